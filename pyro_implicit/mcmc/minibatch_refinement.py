# SPDX-License-Identifier: Apache-2.0
"""From a guide to the posterior by chains that see one minibatch at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from pyro_implicit.density.minibatch_density import MinibatchDensity
from pyro_implicit.guides.posterior_draws import guide_of
from pyro_implicit.mcmc.chain_files import load_chains, save_chains
from pyro_implicit.mcmc.draws import DrawStore
from pyro_implicit.mcmc.minibatch_chains import MAX_TEMPERATURE, MinibatchChains
from pyro_implicit.mcmc.minibatch_refined import MinibatchRefined, SitesOf
from pyro_implicit.mcmc.minibatch_schedule import Schedule
from pyro_implicit.mcmc.minibatch_start import check_scaling, start_chains
from pyro_implicit.mcmc.step_choice import MinibatchKernel
from pyro_implicit.runtime.locks import in_turn
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.printing import progress_bar
from pyro_implicit.runtime.random_stream import with_seed
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = ["refine_by_minibatches"]

LEAST_EPOCHS = 10
LEAST_STEPS = 2000
LEAST_IN_ALL = 4
WARMUP_SHARE = 0.3
ENOUGH = 2.0  # relaxation times, beyond which the step is that of the balance


@in_turn
@with_seed
def refine_by_minibatches(
    model: Callable[..., Any],
    guide: Callable[..., Any] | Mapping[str, Tensor],
    *args: Any,
    batches: Iterable[Any] | None,
    kernel: Literal["hmc", "sghmc", "sgld"] = "sghmc",
    num_chains: int = 8,
    step_size: float | None = None,
    cycles: int = 0,
    max_epochs: int | None = None,
    max_seconds: float | None = None,
    max_draws: int = 100,
    store: str | Path | None = None,
    seed: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 50,
    progress: bool = True,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> MinibatchRefined:
    r"""Moves draws of a guide towards the posterior, side by side, by minibatches of the data.

    For models that have no full pass, such as networks; :func:`~pyro_implicit.mcmc.refine` calls it
    where ``batches`` is given. The chains are those of :func:`~pyro_implicit.ops.sghmc.sghmc_step`
    or :func:`~pyro_implicit.ops.sghmc.sgld_step`, in a frame in which the guide's sds are one.
    There is no Metropolis step, so draws are not exact: noise of the gradients widens the
    posterior, the more the longer the steps are, and short steps do not get away from the guide.
    The step size is found in the warm-up, the first three tenths, from curvature and gradient noise
    where the chains are (:func:`~pyro_implicit.mcmc.step_choice.choose_step`). The result says what
    bounded it, and by how much variances are expected to be too large.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> import torch
    >>> from pyro.infer.autoguide import AutoNormal
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> def model(x, y):
    ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("rows", 100, subsample_size=len(x)):
    ...         pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
    >>> x = torch.linspace(-1, 1, 100)
    >>> loader = DataLoader(TensorDataset(x, 0.3 * x), batch_size=20, shuffle=True)
    >>> guide = AutoNormal(model)
    >>> result = refine_by_minibatches(
    ...     model, guide, batches=loader, max_epochs=40, seed=0, progress=False
    ... )
    >>> result.choice.limit, result.get_samples()["slope"].shape
    ('balance', torch.Size([560]))

    :param model: a Pyro model of continuous latents that scales the minibatch it is given to all
        data, by ``pyro.plate(name, number_of_all_rows, subsample_size=len(x))`` or
        ``poutine.scale``.
    :param guide: any guide of this model, trained or not, or draws: a dict of constrained values by
        site, ``(num_draws, *site_shape)``, or what has ``get_samples``, such as
        :class:`AutoEnsemble`. Fewer draws than chains are taken in turn; of fewer than twenty the
        frame is made of the prior's scales and the information.
        What :func:`~pyro_implicit.fit` returned stands for its ``guide``.
    :param args: the first arguments of model and guide, the same for all minibatches.
    :param batches: a ``DataLoader`` or any other iterable of tuples of the model's further
        arguments, or of single ones, that can be passed over many times. For a model that draws its
        own rows, ``[()] * batches_per_epoch``.
    :param kernel: ``"sghmc"`` or ``"sgld"``.
    :param num_chains: each costs a network's pass in every step.
    :param step_size: in the frame, instead of the one found.
    :param cycles: if not 0, steps fall along so many cosines, from up to four times the size found,
        and draws are those of the last third of each: chains then see more modes (Zhang et al.).
    :param max_epochs: passes over the minibatches; by default ten, or as many as make 2,000 steps.
    :param max_seconds: of wall time. A run that it stops does not repeat to the last bit.
    :param max_draws: kept of each chain, evenly spaced.
    :param store: a folder for the draws, one file for each step that is kept, so that they need
        not fit into memory; see :meth:`MinibatchRefined.stream`.
    :param seed: of all random numbers of this call. The caller's random streams stay as they were;
        by default they are used, and advance.
    :param checkpoint: a file. A run that was killed goes on from there when it is called again with
        the same arguments, and ends with the same draws to the last bit. Without ``store`` the
        draws are beside it, in a folder with ".draws" added to its name.
    :param checkpoint_every: steps between two writings.
    :param progress: whether to show a bar.
    :param model_kwargs: keyword arguments of model and guide whose names are also names here.
    :param kwargs: their other keyword arguments.
    :raises SubsampledError: for a latent of each row.
    :raises ValueError: for a model that takes a minibatch for all data, a guide of another model,
        empty ``batches``, NaN among a minibatch's observations, too few steps, starts of which none
        has a finite log-density, or a checkpoint of other settings.
    :raises RuntimeError: if all chains leave the finite numbers.

    **References:**

    1. Chen, Fox and Guestrin (2014), *Stochastic Gradient Hamiltonian Monte Carlo*.
    2. Welling and Teh (2011), *Bayesian Learning via Stochastic Gradient Langevin Dynamics*.
    3. Zhang, Li, Zhang, Chen and Wilson (2020), *Cyclical Stochastic Gradient MCMC for Bayesian
       Deep Learning*.
    """
    _check_arguments(
        batches, kernel, num_chains, step_size, cycles, max_epochs, max_draws, checkpoint_every
    )
    assert batches is not None and kernel != "hmc"
    kwargs = {**kwargs, **(model_kwargs or {})}
    guide = guide_of("refine_by_minibatches", guide, or_draws=True)
    stream = BatchStream(batches)
    density = MinibatchDensity(model, *args, batch=stream.probed[0], model_kwargs=kwargs)
    check_scaling(density, stream)
    epochs = max_epochs or max(LEAST_EPOCHS, -(-LEAST_STEPS // stream.epoch_length))
    steps = epochs * stream.epoch_length
    if steps < LEAST_IN_ALL:
        raise ValueError(
            f"{epochs} epochs of {stream.epoch_length} minibatches are {steps} steps, but the "
            f"warm-up and a draw take at least {LEAST_IN_ALL}. Cure: more max_epochs"
        )
    schedule = Schedule(steps, round(WARMUP_SHARE * steps), cycles, max_draws)
    settings = {
        "latent_dim": density.latent_dim,
        "kernel": kernel,
        "num_chains": num_chains,
        "schedule": schedule,
        "step_size": step_size,
        "seed": seed,
    }
    file = None if checkpoint is None else Path(checkpoint)
    if store is None and file is not None:
        store = file.with_name(file.name + ".draws")
    draws = DrawStore(store)

    began = time.perf_counter()
    if file is not None and file.exists():
        content = load_chains(file, settings, density.init_loc.device)
        chains: MinibatchChains = content["chains"]
        stream.restore(content["stream"])
        draws.go_on(content["num_draws"])
    else:
        draws.begin()
        chains = start_chains(density, guide, num_chains, kernel, schedule, step_size, stream)
    began -= chains.seconds

    def save() -> None:
        if file is not None:
            content = {"chains": chains, "stream": stream.state(), "num_draws": len(draws)}
            save_chains(file, settings, content)

    if chains.step == 0:
        save()
    with progress_bar(steps, "refine", progress, initial=chains.step) as bar:
        try:
            while chains.stopped is None:
                before, gradients = time.perf_counter(), chains.gradients
                kept = chains.advance(density, stream)
                if kept is not None:
                    draws.append(kept)
                chains.seconds = time.perf_counter() - began
                is_plain = chains.gradients == gradients + 1  # without probes
                if (
                    max_seconds is not None
                    and is_plain
                    and chains.seconds > WARMUP_SHARE * max_seconds
                ):
                    left = max_seconds - chains.seconds
                    chains.hurry(round(left / (time.perf_counter() - before)))
                if chains.step == chains.schedule.steps:
                    chains.stopped = "max_epochs" if chains.step == steps else "max_seconds"
                elif max_seconds is not None and chains.seconds >= max_seconds and len(draws):
                    chains.stopped = "max_seconds"
                if chains.stopped or chains.step % checkpoint_every == 0:
                    save()
                bar.update()
        except KeyboardInterrupt:
            if not len(draws):
                raise
            chains.stopped = "interrupted"
    return _result(density, chains, draws, stream.epoch_length)


def _check_arguments(
    batches: Any,
    kernel: str,
    num_chains: int,
    step_size: float | None,
    cycles: int,
    max_epochs: int | None,
    max_draws: int,
    checkpoint_every: int,
) -> None:
    if kernel not in get_args(MinibatchKernel):
        raise ValueError(
            f"with batches kernel must be one of {get_args(MinibatchKernel)}, but got {kernel!r}: "
            "Metropolis' rule wants all data"
        )
    if batches is None:
        raise ValueError(
            f"kernel={kernel!r} wants batches. Cure: batches=loader, where the loader gives tuples "
            "of the model's arguments"
        )
    positive = {
        "num_chains": num_chains,
        "max_epochs": 1 if max_epochs is None else max_epochs,
        "max_draws": max_draws,
        "checkpoint_every": checkpoint_every,
        "step_size": 1.0 if step_size is None else step_size,
        "cycles + 1": cycles + 1,
    }
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, but got {value}")


def _result(
    density: MinibatchDensity, chains: MinibatchChains, draws: DrawStore, epoch_length: int
) -> MinibatchRefined:
    assert chains.choice is not None
    sampled = (chains.step - chains.schedule.warmup) / chains.schedule.sampling
    choice = chains.choice._replace(relaxations=sampled * chains.choice.relaxations)
    if chains.replaced_late:
        warn_user(
            f"{chains.replaced_late} times a chain left the finite numbers after the warm-up, and "
            "went on from another: draws before that are suspect. Cure: a shorter step_size, or "
            "float64",
        )
    if chains.temperature is not None and chains.temperature > MAX_TEMPERATURE:
        warn_user(
            f"the velocities' temperature is {chains.temperature:.3g} and should be 1, so that "
            "draws are wrong: the chains began far from the posterior, or their steps of "
            f"{chains.choice.step_size:.3g} in the frame are too long. Cure: a better guide and "
            "more max_epochs, or a shorter step_size",
        )
    if choice.relaxations < 1 and chains.stopped != "interrupted":
        _warn_of_short(choice.relaxations, chains, epoch_length)
    return MinibatchRefined(
        stopped=chains.stopped,  # type: ignore[arg-type]
        kernel=chains.kernel,
        choice=choice,
        temperature=chains.temperature,
        num_chains=len(chains.position),
        num_gradients=chains.gradients,
        warmup_gradients=chains.warmup_gradients,
        epochs=chains.step / epoch_length,
        seconds=chains.seconds,
        replaced=chains.replaced,
        frame=chains.frame.kind,
        store=draws,
        constrain=SitesOf(density.shapes, density.transforms, density.init_loc.new_empty(0)),
    )


def _warn_of_short(relaxations: float, chains: MinibatchChains, epoch_length: int) -> None:
    """Where steps are too few to relax, relaxations grow as these do."""
    factor = ENOUGH / max(relaxations, 1e-9)
    more = f"max_epochs (about {math.ceil(factor * chains.step / epoch_length)})"
    if chains.stopped == "max_seconds":
        more = f"max_seconds (about {math.ceil(factor * chains.seconds)})"
    warn_user(
        f"the chains forgot their start only {relaxations:.2g} of a relaxation time long: draws "
        f"are still near those of the guide. Cure: more {more}, larger minibatches, or a better "
        "guide",
    )
