# SPDX-License-Identifier: Apache-2.0
"""From a guide to the posterior, by many short chains."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from pyro import poutine
from torch import Tensor

from pyro_implicit.compiled import CompileMode, check_mode
from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.policy import MAX_DENSE_DIM
from pyro_implicit.density.target import Target
from pyro_implicit.guides.auto_draws import AutoDraws
from pyro_implicit.guides.posterior_draws import guide_of
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.mcmc.chain_files import load_chains, save_chains
from pyro_implicit.mcmc.chains import TUNING, Chains
from pyro_implicit.mcmc.frame import FrameKind
from pyro_implicit.mcmc.minibatch_refined import MinibatchRefined
from pyro_implicit.mcmc.minibatch_refinement import refine_by_minibatches
from pyro_implicit.mcmc.modes import Modes
from pyro_implicit.mcmc.refined import Refined, collect
from pyro_implicit.mcmc.space_choice import Plan, density_of, start_chains
from pyro_implicit.mcmc.stopping import Quantities, Tracker
from pyro_implicit.mcmc.teaching import check_teachable
from pyro_implicit.mcmc.teaching import teach as teach_guide
from pyro_implicit.runtime.files import random_streams, restore_random_streams
from pyro_implicit.runtime.locks import in_turn
from pyro_implicit.runtime.printing import progress_bar
from pyro_implicit.runtime.random_stream import with_seed
from pyro_implicit.runtime.user_warnings import first_line, refuse_counts, warn_user

__all__ = ["refine"]

FRAMES = ("auto", "diagonal", "low-rank", "full", "noise", "conditional")
LEAST_CHAINS = 8
WARMUP_SHARE = 0.4
LEAST_DRAWS = 12
LEAST_KEPT = 4  # fewer of a chain have no halves to compare
KERNELS = ("hmc", "sghmc", "sgld")
HMC_OPTIONS = ("frame", "quantities", "max_gradients", "max_leapfrogs", "teach", "compile")


@overload
def refine(
    model: Callable[..., Any],
    guide: Callable[..., Any] | Mapping[str, Tensor],
    *args: Any,
    batches: None = None,
    **kwargs: Any,
) -> Refined: ...


@overload
def refine(
    model: Callable[..., Any],
    guide: Callable[..., Any] | Mapping[str, Tensor],
    *args: Any,
    batches: Iterable[Any],
    **kwargs: Any,
) -> MinibatchRefined: ...


@in_turn
@with_seed
def refine(
    model: Callable[..., Any],
    guide: Callable[..., Any] | Mapping[str, Tensor],
    *args: Any,
    kernel: Literal["hmc", "sghmc", "sgld"] = "hmc",
    batches: Iterable[Any] | None = None,
    num_chains: int | None = None,
    frame: Literal["auto", "diagonal", "low-rank", "full", "noise", "conditional"] = "auto",
    quantities: Quantities | None = None,
    max_gradients: int = 4000,
    max_seconds: float | None = None,
    max_leapfrogs: int = 64,
    max_draws: int = 100,
    seed: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 50,
    teach: bool = False,
    compile: CompileMode = "auto",
    progress: bool = True,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Refined | MinibatchRefined:
    r"""Moves draws of a guide to the posterior, side by side.

    Each draw starts a chain of Hamiltonian Monte Carlo. All chains move at once, in one vectorised
    density, in a common frame in which posterior sds are near one. In the warm-up the frame is
    estimated anew from the chains, in windows that double, and
    :class:`~pyro_implicit.mcmc.ChEES` finds step size and trajectory length; it ends when the
    log-density no longer drifts. Then all is frozen, and the chains leave the posterior exactly as
    it is.

    They stop by themselves: once no mean and no standard deviation of a latent, in unconstrained
    space, nor the mean log-density, is off by more than a twentieth of a standard deviation, as its
    drift in the last two thirds of the draws tells with two standard errors, and each chain has
    forgotten where it began (:func:`~pyro_implicit.mcmc.stopping.drift`); and, as draws are cheap
    then, once there are four thousand effective draws, or half of the warm-up's gradients have been
    spent on them. Or at a budget; the result says which.

    Chains that start in separate modes stay there, so that each mode keeps the weight that the
    guide gave it, and R-hat sees the modes, so that they run until the budget ends. The components
    of an :class:`~pyro_implicit.AutoMixture` of exact density are known: where no more than a
    hundredth of the chains goes from one to another, R-hat is that within them, and at the end
    chains are left out or repeated until each component has its share of them, by bridge sampling.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model(y):
    ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(0.0, scale), obs=y)
    >>> y = torch.tensor([1.0, -2.0, 3.0])
    >>> guide = AutoNormal(model)  # better trained, but any will do
    >>> result = refine(model, guide, y, seed=0, progress=False)
    >>> result.stopped, f"{result.get_samples()['scale'].mean():.0f}"
    ('converged', '2')

    :param model: a Pyro model of continuous latents, with all its data: nothing subsampled, unless
        ``batches`` are given.
    :param guide: any guide of this model, trained or not, or draws: a dict of constrained values by
        site, ``(num_draws, *site_shape)``, such as particles, or what has ``get_samples``, such as
        :class:`AutoEnsemble` and ``MCMC``. Fewer draws than chains are taken in turn. What
        :func:`~pyro_implicit.fit` returned stands for its ``guide``.
    :param args: the arguments of model and guide.
    :param kernel: ``"hmc"``, or of minibatches ``"sghmc"`` or ``"sgld"``.
    :param batches: minibatches, a ``DataLoader`` for instance: all else is then done by
        :func:`~pyro_implicit.mcmc.refine_by_minibatches`, which has parameters of its own and
        returns a :class:`~pyro_implicit.mcmc.MinibatchRefined`.
    :param num_chains: at least 8; by default 256, and 8 of minibatches.
    :param frame: ``"full"`` for the covariance, ``"low-rank"`` for its significant principal axes
        on a diagonal, ``"diagonal"``; or another space than that of the latents, for funnels:
        ``"noise"`` of an injective :class:`~pyro_implicit.AutoImplicit`, or ``"conditional"``, what
        is left of latents once their parents and the data are known
        (:class:`~pyro_implicit.mcmc.ConditionalReparam`), where priors depend on other latents. By
        default the latter if there are such priors, else noise where the guide allows it, unless a
        short walk shows the latents to be better; the frame in the space is full up to 100
        dimensions and low-rank above.
    :param quantities: of a dict of constrained draws by site, ``(num_chains, *site_shape)``, a
        tensor or a dict of tensors ``(num_chains, *shape)``, for instance predictions. If given,
        these and the log-density decide when to stop, in place of the latents, and may do so
        before the chains have forgotten their starts: ``stopped="steady"``. All values of one
        tensor are of one unit, their root mean square sd.
    :param max_gradients: of each chain, warm-up included. It may be exceeded by one transition, and
        for twelve draws.
    :param max_seconds: of wall time. A run that it stops does not repeat to the last bit.
    :param max_leapfrogs: in one transition.
    :param max_draws: kept of each chain; longer chains are thinned.
    :param seed: of all random numbers of this call. The caller's random streams stay as they were;
        by default they are used, and advance.
    :param checkpoint: a file. A run that was killed goes on from there when it is called again with
        the same arguments, and ends with the same draws to the last bit.
    :param checkpoint_every: transitions between two writings.
    :param teach: whether the guide then learns from the draws, in place
        (:func:`~pyro_implicit.mcmc.teach`), so that the next ``refine`` begins nearer.
    :param compile: of the log-density with its gradient, as of the steps of an ELBO: see
        :class:`~pyro_implicit.infer.ImplicitELBO` and :doc:`/howto/compile`.
    :param progress: whether to show a bar.
    :param model_kwargs: keyword arguments of model and guide whose names are also names here.
    :param kwargs: their other keyword arguments.
    :raises SubsampledError: for a model that subsamples its data.
    :raises ValueError: for a guide of another model, an unknown frame or kernel, too few chains or
        kept draws (fewer than 4), quantities that are not one of each chain, starts of which none
        has a finite log-density, or a checkpoint of other settings; with ``teach`` for a guide
        without a density.
    :warns UserWarning: for quantities that are not finite.

    **References:**

    1. Hoffman, Radul and Sountsov (2021), *An Adaptive-MCMC Scheme for Setting Trajectory Lengths
       in Hamiltonian Monte Carlo*.
    2. Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman (2022), *Nested R-hat:
       Assessing the Convergence of Markov Chain Monte Carlo When Running Many Short Chains*.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {KERNELS}, but got {kernel!r}")
    if kernel != "hmc" or batches is not None:
        _refuse_hmc_options(locals())
        return refine_by_minibatches(
            model,
            guide,
            *args,
            batches=batches,
            kernel=kernel,
            num_chains=8 if num_chains is None else num_chains,
            max_seconds=max_seconds,
            max_draws=max_draws,
            seed=seed,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            progress=progress,
            model_kwargs=model_kwargs,
            **kwargs,
        )
    num_chains = 256 if num_chains is None else num_chains
    _check_arguments(num_chains, frame)
    refuse_counts(max_gradients=max_gradients, max_leapfrogs=max_leapfrogs)
    refuse_counts(LEAST_KEPT, max_draws=max_draws)
    refuse_counts(checkpoint_every=checkpoint_every)
    check_mode(compile)
    kwargs = {**kwargs, **(model_kwargs or {})}
    guide = guide_of("refine", guide, or_draws=True)
    density = Target(model, *args, model_kwargs=kwargs)
    if isinstance(guide, AutoDraws) and guide.prototype_trace is None:
        with torch.no_grad(), poutine.block():
            guide(*args, **kwargs)
    kind: FrameKind = "full" if density.latent_dim <= MAX_DENSE_DIM else "low-rank"
    if frame not in ("auto", "noise", "conditional"):
        kind = frame  # type: ignore[assignment]
    longest = max(1, min(max_leapfrogs, max_gradients // 40))
    sampler = Sampler(density, guide)
    plan = Plan(sampler, num_chains, frame, kind, max_gradients, longest, max_draws, compile)
    settings = {
        "latent_dim": density.latent_dim,
        "num_chains": num_chains,
        "frame": (frame, kind),
        "max_gradients": max_gradients,
        "max_leapfrogs": max_leapfrogs,
        "max_draws": max_draws,
        "seed": seed,
    }
    if teach:
        _check_teachable(density, plan)
    modes = Modes.of(density, guide)
    file = None if checkpoint is None else Path(checkpoint)

    track = Tracker(density, quantities)
    began = time.perf_counter()
    if file is not None and file.exists():
        chains: Chains = load_chains(file, settings, density.init_loc.device)
        streams = random_streams()  # the chains' own
        walked = density_of(density, plan, chains.space, chains.middle)
        restore_random_streams(streams)
    else:
        walked, chains = start_chains(density, plan)
        track.try_at(walked.to_latent(chains.frame.to_points(chains.state.position)))
    began -= chains.seconds
    with progress_bar(max_gradients, "refine", progress) as bar:
        try:
            while chains.stopped is None:
                share = chains.gradients / max_gradients
                if max_seconds is not None:
                    share = max(share, chains.seconds / max(max_seconds, 1e-9))
                hurry = share >= WARMUP_SHARE
                if hurry and max_seconds is not None and chains.phase == "warm-up":
                    chains.kernel.max_leapfrogs = _longest_in_time(chains, max_seconds)
                chains.advance(walked, track, hurry)
                chains.seconds = time.perf_counter() - began
                chains.stopped = chains.check(
                    quantities is not None, modes.label if modes is not None else None
                )
                if chains.stopped is None and chains.history.seen >= LEAST_DRAWS:
                    if chains.gradients >= max_gradients:
                        chains.stopped = chains.settled or "max_gradients"
                    elif max_seconds is not None and chains.seconds >= max_seconds:
                        chains.stopped = chains.settled or "max_seconds"
                if file is not None and (
                    chains.stopped or chains.transitions % checkpoint_every == 0
                ):
                    save_chains(file, settings, chains)
                bar.update(min(chains.gradients, max_gradients) - bar.n)
                bar.set_postfix_str(f"{chains.phase}, step {chains.kernel.step_size:.2g}", False)
        except KeyboardInterrupt:
            if chains.history.seen < LEAST_DRAWS:
                raise
            chains.stopped = "interrupted"
    result = collect(walked, modes, chains)
    if not teach or isinstance(guide, Mapping):  # which was refused
        return result
    try:
        taught = teach_guide(guide, result.moving(), *args, progress=progress, model_kwargs=kwargs)
    except (KeyboardInterrupt, *IMPOSSIBLE) as error:
        warn_user(
            "the chains are done, but the guide learnt nothing from them "
            f"({first_line(error)}). Cure: teach(guide, result.get_samples(), ...)"
        )
        return result
    return replace(result, taught=taught)


def _refuse_hmc_options(options: dict[str, Any]) -> None:
    """Check that options which minibatches do not have are at their defaults."""
    parameters = inspect.signature(refine).parameters
    for name in HMC_OPTIONS:
        if options[name] != parameters[name].default:
            raise ValueError(
                f"{name} is for kernel='hmc' and all data. Cure: leave it out, or leave out "
                "kernel and batches; the length of a run with minibatches is max_epochs"
            )


def _longest_in_time(chains: Chains, max_seconds: float) -> int:
    """Leapfrogs of a transition, so that the least number of those to come ends in time."""
    left = max(0.0, max_seconds / max(chains.seconds, 1e-9) - 1) * chains.gradients
    return max(1, min(chains.kernel.max_leapfrogs, int(left / (1 + TUNING + LEAST_DRAWS))))


def _check_teachable(density: Target, plan: Plan) -> None:
    guide = plan.sampler.guide
    if isinstance(guide, Mapping):
        raise ValueError("teach wants a guide, and these are draws. Cure: teach=False")
    example = density.constrain(density.init_loc.expand(2, -1))
    check_teachable(guide, example, density.args, density.kwargs)


def _check_arguments(num_chains: int, frame: str) -> None:
    if num_chains < LEAST_CHAINS:
        raise ValueError(
            f"num_chains must be at least {LEAST_CHAINS}, but got {num_chains}: frame, step size "
            "and stopping rule are learnt by comparing chains. Cure: many chains cost little more "
            "than one; for one long chain take Pyro's NUTS"
        )
    if frame not in FRAMES:
        raise ValueError(f"frame must be one of {FRAMES}, but got {frame!r}")
