# SPDX-License-Identifier: Apache-2.0
"""From a guide towards the posterior by chains that see one minibatch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pyro_implicit.density.checks.numerics import blame
from pyro_implicit.density.target import Target
from pyro_implicit.guides.posterior_draws import guide_of, refuse_swapped
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.mcmc.draws import DrawStore
from pyro_implicit.mcmc.driver import Checkpoint, run
from pyro_implicit.mcmc.frame import minibatch_frame
from pyro_implicit.mcmc.kernels import KERNELS
from pyro_implicit.mcmc.minibatch_chains import MinibatchChains, StepSchedule, check_scaling
from pyro_implicit.mcmc.policy import DEFAULT, ChainPolicy
from pyro_implicit.mcmc.refined import Refined, collect_minibatches
from pyro_implicit.mcmc.spaces.choice import finite_starts
from pyro_implicit.runtime.clock import TimeLimit
from pyro_implicit.runtime.global_state import in_turn, with_seed
from pyro_implicit.runtime.messages import refuse_counts, refuse_nonpositive
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.progress import Callback, watching

__all__ = ["refine_by_minibatches"]

KERNEL = "sghmc"  # kernels with a Metropolis step need all data


@in_turn
@with_seed
def refine_by_minibatches(
    model: Callable[..., Any],
    guide: Callable[..., Any] | Mapping[str, Tensor],
    *args: Any,
    batches: Iterable[Any],
    num_chains: int | None = None,
    max_epochs: int | None = None,
    max_seconds: float | None = None,
    max_draws: int = 100,
    step_size: float | None = None,
    store: str | Path | None = None,
    seed: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 50,
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
    policy: ChainPolicy | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Refined:
    r"""Move draws of a guide towards the posterior by stochastic gradients.

    For models that cannot run on all data, such as networks. Each draw starts a chain. The chains
    run stochastic gradient dynamics (:mod:`~pyro_implicit.mcmc.kernels.sghmc`). There is no
    Metropolis step, so the draws are not exact: gradient noise widens the posterior, and more so
    with longer steps, while short steps stay near the guide. The warm-up, three tenths of the run,
    finds the step size from curvature and gradient noise
    (:func:`~pyro_implicit.mcmc.kernels.step_choice.choose_step`). The result names the active bound
    and the expected excess of variances.

    **Example:**

    >>> import pyro, pyro.distributions as dist, torch
    >>> from pyro.infer.autoguide import AutoNormal
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> def model(x, y):
    ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("rows", 100, subsample_size=len(x)):
    ...         pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
    >>> x = torch.linspace(-1, 1, 100)
    >>> loader = DataLoader(TensorDataset(x, 0.3 * x), batch_size=20, shuffle=True)
    >>> guide = AutoNormal(model)
    >>> options = {"max_epochs": 40, "seed": 0, "progress": False}
    >>> result = refine_by_minibatches(model, guide, batches=loader, **options)
    >>> result.choice.limit, result.get_samples()["slope"].shape
    ('balance', torch.Size([560]))

    :param model: a Pyro model of continuous latents. It scales the minibatch to all data, by
        ``pyro.plate(name, number_of_all_rows, subsample_size=len(x))`` or ``poutine.scale``.
    :param guide: any guide of this model, or draws, as in :func:`~pyro_implicit.mcmc.refine`.
    :param args: the first arguments of model and guide, which are the same for all minibatches.
    :param batches: a ``DataLoader`` or another iterable of tuples of the model's further arguments,
        or of single arguments, that can be passed over many times. For a model that draws its own
        rows, ``[()] * batches_per_epoch``.
    :param num_chains: by default 8, because each chain costs a network's pass in every step.
    :param max_epochs: passes over the minibatches; by default ten, or as many as make 2,000 steps.
    :param max_seconds: wall time with the warm-up. A run that it stops is not reproducible.
    :param max_draws: kept draws of each chain; longer chains are thinned.
    :param step_size: the step size in the frame, instead of the automatic one.
    :param store: a folder for the draws, one file for each kept step, so that the draws need not
        fit into memory; see :meth:`Refined.stream`.
    :param seed: by default the current random streams are used.
    :param checkpoint: a file. A killed run resumes from it when it is called again with the same
        arguments, and ends with bit-identical draws. Without ``store``, the draws are next to the
        file, in a folder with ".draws" added to its name.
    :param checkpoint_every: transitions between two writings of the checkpoint.
    :param progress: whether to show a bar.
    :param callbacks: observers of the transitions, which may end the chains
        (:mod:`pyro_implicit.callbacks`).
    :param policy: all further numbers; see :class:`~pyro_implicit.mcmc.ChainPolicy`.
    :param model_kwargs: keyword arguments of model and guide whose names are also names here.
    :param kwargs: further keyword arguments of model and guide.
    :raises SubsampledError: for a latent of each row.
    :raises ValueError: for a guide of another model, counts or sizes that are not positive, too few
        steps for a warm-up, initial values without a finite log-density, empty ``batches``, a model
        that does not scale a minibatch, NaN among a minibatch's observations, or a checkpoint of
        other settings.
    :raises RuntimeError: if all chains become non-finite.
    :warns UserWarning: for minibatches that have fewer rows in all than the model says.

    **References:**

    1. Chen, Fox and Guestrin (2014), *Stochastic Gradient Hamiltonian Monte Carlo*.
    """
    policy, kwargs = policy or DEFAULT, {**kwargs, **(model_kwargs or {})}
    num_chains = policy.num_minibatch_chains if num_chains is None else num_chains
    refuse_counts(checkpoint_every=checkpoint_every, num_chains=num_chains, max_draws=max_draws)
    refuse_counts(max_epochs=max_epochs)
    refuse_nonpositive(max_seconds=max_seconds, step_size=step_size)
    limit, stream = TimeLimit(max_seconds), BatchStream(batches)
    refuse_swapped("refine_by_minibatches", model, guide)
    guide = guide_of("refine_by_minibatches", guide, or_draws=True)
    with watching(progress, callbacks):
        target = Target.of_minibatches(model, *args, batch=stream.probed[0], model_kwargs=kwargs)
        check_scaling(target, stream)
        schedule = _schedule(max_epochs, stream.epoch_length, max_draws, policy)
        settings = {
            "kernel": KERNEL,
            "seed": seed,
            "policy": policy,
            "latent_dim": target.latent_dim,
            "num_chains": num_chains,
            "schedule": schedule,
            "step_size": step_size,
        }
        file = Checkpoint(checkpoint, settings, checkpoint_every)
        if store is None and file.path is not None:
            store = file.path.with_name(file.path.name + ".draws")
        draws = DrawStore(store)
        chains: MinibatchChains | None = file.load(target.init_loc.device)
        if chains is not None:
            stream.restore(chains.stream_state)
            draws.go_on(chains.num_draws)
        else:
            draws.begin()
            sampler = Sampler(target, guide)
            chains = _start(sampler, stream, num_chains, schedule, step_size, policy)
        chains.attach(target, stream, draws)
        chains.max_seconds = limit.seconds()
        if chains.transitions == 0:
            file.save(chains)
        run(chains, file)
        return collect_minibatches(target, chains, draws, stream.epoch_length)


def _start(
    sampler: Sampler,
    stream: BatchStream,
    num_chains: int,
    schedule: StepSchedule,
    step_size: float | None,
    policy: ChainPolicy,
) -> MinibatchChains:
    target = sampler.target
    frame = minibatch_frame(target, sampler, stream, policy)
    points = sampler.draw(num_chains)
    starts = finite_starts(target.score, points, sampler, lambda: blame(target, points))
    return MinibatchChains(
        kernel=KERNEL,
        state=KERNELS[KERNEL].init(frame.to_white(starts.points), target.score),
        frame=frame,
        policy=policy,
        replaced=starts.replaced,
        schedule=schedule,
        planned=schedule.steps,
        given_step=step_size,
    )


def _schedule(
    max_epochs: int | None, epoch_length: int, max_draws: int, policy: ChainPolicy
) -> StepSchedule:
    limits = policy.langevin
    epochs = max_epochs or limits.epochs_of(epoch_length)
    steps = epochs * epoch_length
    if steps < limits.least_in_all:
        raise ValueError(
            f"{epochs} epochs of {epoch_length} minibatches are {steps} steps, but the warm-up "
            f"and a draw take at least {limits.least_in_all}. Cure: more max_epochs"
        )
    warmup = round(limits.warmup_share * steps)
    return StepSchedule(steps, warmup, max_draws)
