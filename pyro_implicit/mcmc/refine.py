# SPDX-License-Identifier: Apache-2.0
"""From a guide to the posterior by many chains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pyro import poutine
from torch import Tensor

from pyro_implicit.compiled import CompileMode, check_mode
from pyro_implicit.density.checks.numerics import is_rounding
from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.modes import Modes
from pyro_implicit.density.policy import MAX_DENSE_DIM, SEARCH, SYMMETRY
from pyro_implicit.density.symmetry import Symmetries, confirmed, find_symmetries
from pyro_implicit.density.target import Target
from pyro_implicit.density.workers import current_workers, workers
from pyro_implicit.guides.auto_draws import AutoDraws
from pyro_implicit.guides.posterior_draws import guide_of, refuse_swapped
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.mcmc.chains import WindowedChains
from pyro_implicit.mcmc.driver import Checkpoint, run
from pyro_implicit.mcmc.kernels import KERNELS
from pyro_implicit.mcmc.mixed_tempering import temper_mixed, why_not_tempered
from pyro_implicit.mcmc.policy import DEFAULT, ChainPolicy
from pyro_implicit.mcmc.refined import Refined, collect, collect_annealed
from pyro_implicit.mcmc.spaces.choice import ChainSetup, space_of, start_chains
from pyro_implicit.mcmc.spaces.space import GuideNoise, Space
from pyro_implicit.mcmc.stopping import OutOfTime, Quantities, Tracker
from pyro_implicit.mcmc.tempering import temper as temper_modes
from pyro_implicit.runtime.clock import TimeLimit
from pyro_implicit.runtime.global_state import (
    in_turn,
    random_streams,
    restore_random_streams,
    same_streams,
    single_thread,
    with_seed,
)
from pyro_implicit.runtime.messages import refuse_counts, refuse_nonpositive
from pyro_implicit.runtime.progress import Callback, watching

__all__ = ["continue_chains", "refine", "refine_target"]

FRAMES = ("auto", "diagonal", "low-rank", "full", "noise", "conditional")


@in_turn
@with_seed
def refine(
    model: Callable[..., Any],
    guide: Callable[..., Any] | Mapping[str, Tensor],
    *args: Any,
    kernel: Literal["hmc", "slice", "mams", "mclmc"] = "hmc",
    num_chains: int | None = None,
    frame: Literal["auto", "diagonal", "low-rank", "full", "noise", "conditional"] = "auto",
    quantities: Quantities | None = None,
    max_gradients: int = 4000,
    max_leapfrogs: int = 64,
    max_seconds: float | None = None,
    max_draws: int = 100,
    num_workers: int | None = None,
    seed: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 50,
    temper: bool = False,
    compile: CompileMode = "auto",
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
    policy: ChainPolicy | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Refined:
    r"""Move draws of a guide to the posterior by many chains.

    Each draw starts a chain. All chains move together, in one vectorised density, in a common
    frame in which posterior standard deviations are near one. Models that cannot run on all data
    need :func:`~pyro_implicit.mcmc.refine_by_minibatches`.

    The chains run Hamiltonian Monte Carlo. In the warm-up, the frame is estimated
    from the chains in windows that double, and :class:`~pyro_implicit.mcmc.kernels.hmc.ChEES` finds
    step size and trajectory length. The warm-up ends when the log-density no longer drifts. Then
    the kernel is frozen and leaves the posterior exactly invariant.

    The chains stop once the drift of every mean, every standard deviation (of latents, in
    unconstrained space) and the mean log-density, in the last two thirds of the draws, is below a
    twentieth of a standard deviation with two standard errors, and each chain has forgotten its
    start (:func:`~pyro_implicit.mcmc.stopping.drift`). Because draws are cheap then, they go on
    until there are four thousand effective draws or half of the warm-up's gradients have been
    spent. A budget may stop them earlier; the result says which.

    If groups such as permutations of components leave the density unchanged, chains start in one
    copy of the posterior, the drift is that of components in order, and the draws are moved by
    random members of the groups (:doc:`/invariances`). Nothing is moved with ``quantities``, or by
    ``"mclmc"`` and ``"mams"``, whose chains belong to members of an ensemble.

    Chains that start in separate modes stay there. Each mode keeps the weight that the guide gave
    it, and R-hat sees the modes, so the chains run until the budget ends.

    **With** ``temper=True`` the weights of modes are computed by annealed sequential Monte Carlo,
    for any guide and up to 100 latent variables. The search of
    :func:`~pyro_implicit.density.find_modes` starts from draws of guide and prior. Particles move
    from normals at these modes to the posterior along a geometric path; their weights give the
    weights of modes and the evidence, with standard errors (``result.weights``). Particles are
    added until each weight is exact to 0.0035 and each mean and standard deviation to 0.05
    standard deviations, or the budget ends. Discrete latent variables are annealed from draws of
    the prior instead (:mod:`~pyro_implicit.mcmc.mixed_tempering`).

    **Example:**

    >>> import pyro, pyro.distributions as dist
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

    :param model: a Pyro model of continuous latents, with all its data and nothing subsampled.
    :param guide: any guide of this model, trained or not; or draws: a dict of constrained values by
        site, ``(num_draws, *site_shape)``, such as particles, or an object with ``get_samples``,
        such as :class:`AutoEnsemble` and ``MCMC``. If there are fewer draws than chains, some
        draws start several chains. A result of :func:`~pyro_implicit.fit` stands for its ``guide``.
    :param args: the arguments of model and guide.
    :param kernel: ``"hmc"``; or ``"slice"`` for densities that end or jump
        (:func:`~pyro_implicit.mcmc.kernels.slice_sampling.step`). Chains of ``"hmc"`` that find
        jumps in the warm-up go on with ``"slice"``, in latent space and with at most 30 latent
        variables; or ``"mclmc"`` for networks: microcanonical Langevin dynamics without Metropolis
        steps, whose chains share neither frame nor step size
        (:func:`~pyro_implicit.mcmc.kernels.mclmc.step`); or ``"mams"``, the same with Metropolis
        steps after the first part of the warm-up, which is exact and takes shorter steps
        (:func:`~pyro_implicit.mcmc.kernels.mams.step`).
    :param num_chains: at least 8; by default 256, or fewer if ``max_seconds`` is short. With
        ``"mclmc"`` and ``"mams"`` any number; by default one chain for each given draw, such as the
        members of an :class:`AutoEnsemble`, or 16 for other guides.
    :param frame: ``"full"`` for the covariance, ``"low-rank"`` for a diagonal and the directions in
        which draws or scores are widest, ``"diagonal"``; or a space other than the latents, for
        funnels: ``"noise"`` of an injective :class:`~pyro_implicit.AutoImplicit`, or
        ``"conditional"``, the noise of latents given their parents and the data
        (:class:`~pyro_implicit.mcmc.ConditionalReparam`), if priors depend on other latents. By
        default the conditional space if there are such
        priors, otherwise the noise if the guide allows it, unless a short walk shows the latents
        to be faster. The frame in the space is full up to 100 dimensions and low-rank above.
    :param quantities: a function of a dict of constrained draws by site,
        ``(num_chains, *site_shape)``, to a tensor or a dict of tensors ``(num_chains, *shape)``,
        for instance predictions. If given, these and the log-density replace the latents in the
        stopping rule, which may then stop before the chains have forgotten their starts:
        ``stopped="steady"``. All values of one tensor have one unit, their root mean square sd.
    :param max_gradients: gradients of each chain, warm-up included. The chains may exceed it by one
        transition, and for twelve draws.
    :param max_leapfrogs: leapfrog steps of one transition.
    :param max_seconds: wall time, with the choice of the space and the warm-up. If it ends the
        warm-up, the chains' last positions are the draws, and no verdict trusts them. A run that it
        stops is not reproducible.
    :param max_draws: kept draws of each chain; longer chains are thinned.
    :param num_workers: the number of processes between which the rows of the log-density are
        divided, if this saves at least 2 ms in each evaluation; by default as many as
        torch has intra-operation threads (``torch.get_num_threads()``), at most 4. The processes
        are forked, so the model need not be picklable; without Linux, or if torch has an
        accelerator, there is one. Equal seeds give equal draws for equal numbers of processes.
    :param seed: by default the current random streams are used.
    :param checkpoint: a file. A killed run resumes from it when it is called again with the same
        arguments, and ends with bit-identical draws.
    :param checkpoint_every: transitions between two writings of the checkpoint.
    :param temper: whether annealing replaces the chains, as above. R-hat is then that of chains
        that are worth as many draws; the chains cannot be continued.
    :param compile: how the log-density and its gradient are run, like the steps of an ELBO: see
        :class:`~pyro_implicit.infer.ImplicitELBO` and :doc:`/howto/compile`.
    :param progress: whether to show a bar.
    :param callbacks: observers of the transitions, which may end the chains
        (:mod:`pyro_implicit.callbacks`).
    :param policy: all further numbers; see :class:`~pyro_implicit.mcmc.ChainPolicy`.
    :param model_kwargs: keyword arguments of model and guide whose names are also names here.
    :param kwargs: further keyword arguments of model and guide.
    :raises SubsampledError: for a model that subsamples its data.
    :raises ValueError: for a guide of another model, an unknown frame or kernel, too few chains,
        steps or kept draws (fewer than 4), quantities that are not one of each chain, starts of
        which none has a finite log-density, or a checkpoint of other settings; with ``temper`` for
        a checkpoint, a kernel or a frame, for more than 100 latent variables, and for a discrete
        latent with other latents whose prior cannot be drawn from.
    :warns UserWarning: for quantities that are not finite.

    **References:**

    1. Hoffman, Radul and Sountsov (2021), *An Adaptive-MCMC Scheme for Setting Trajectory Lengths
       in Hamiltonian Monte Carlo*.
    2. Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman (2022), *Nested R-hat:
       Assessing the Convergence of Markov Chain Monte Carlo When Running Many Short Chains*.
    3. Del Moral, Doucet and Jasra (2006), *Sequential Monte Carlo samplers*.
    """
    _check_kernel(kernel)
    policy = policy or DEFAULT
    refuse_counts(checkpoint_every=checkpoint_every)
    refuse_nonpositive(max_seconds=max_seconds)
    limit = TimeLimit(max_seconds)
    kwargs = {**kwargs, **(model_kwargs or {})}
    refuse_swapped("refine", model, guide)
    guide = guide_of("refine", guide, or_draws=True)
    adapts_number = num_chains is None and not KERNELS[kernel].separate and not temper
    if num_chains is None:
        num_chains = _default_chains(kernel, guide, policy, temper)
    _check_all_data(num_chains, frame, kernel, policy)
    refuse_counts(max_gradients=max_gradients, max_leapfrogs=max_leapfrogs)
    refuse_counts(policy.least_kept, max_draws=max_draws)
    check_mode(compile)
    target = Target(model, *args, model_kwargs=kwargs, sample_discrete=True)
    if target.sampled:
        _refuse_mixed(target, kernel, frame)
    sampler, modes = Sampler(target, guide), None
    if temper:
        _check_tempering(target, kernel, frame, checkpoint)
        _call_once(sampler)
        if not target.sampled:
            starts = sampler.draw(policy.tempering.num_starts)
            seconds = limit.left(SEARCH.time_share)
            modes = find_modes(target, starts=starts, max_seconds=seconds)
    with watching(progress, callbacks), workers(num_workers), single_thread(target.is_small):
        if adapts_number:
            num_chains = chains_in_time(target, num_chains, limit, policy) or policy.least_chains
        plan = ChainSetup(
            sampler, num_chains, max_gradients, frame, max_leapfrogs, max_draws, compile, kernel,
            policy, limit, quantities,
        )  # fmt: skip
        settings = {**plan.settings(), "seed": seed, "num_workers": current_workers().number}
        file = Checkpoint(checkpoint, settings, checkpoint_every)
        return refine_target(plan, file, modes, from_prior=temper and modes is None)


def refine_target(
    plan: ChainSetup,
    file: Checkpoint | None = None,
    modes: Modes | None = None,
    from_prior: bool = False,
) -> Refined:
    """Run chains with all data on an existing target.

    :param plan: the target, the starts of the chains and their settings.
    :param file: resumes killed chains; by default there is none.
    :param modes: if given, annealing from these modes replaces the chains.
    :param from_prior: whether annealing from the prior replaces the chains of discrete latents.
    """
    _call_once(plan.sampler)
    longest = max(1, min(plan.max_leapfrogs, plan.max_gradients // plan.policy.warmup.chunks))
    plan = replace(plan, max_leapfrogs=longest, symmetries=_symmetries(plan))
    # Threads of torch would wait actively on the cores of the processes that divide the rows.
    with single_thread(current_workers().number > 1):
        if modes is not None or from_prior:
            return _anneal(plan, modes)
        return _run_chains(plan, file or Checkpoint())


def _symmetries(plan: ChainSetup) -> Symmetries | None:
    """Return the groups that leave the density unchanged; None if quantities are tracked, or if
    each chain belongs to a member of an ensemble."""
    target = plan.sampler.target
    if plan.quantities is not None or KERNELS[plan.kernel].separate:
        return None
    if not (found := find_symmetries(target, plan.limit.left())):
        return None
    with same_streams(target.init_loc.device):
        draws = plan.sampler.draw(SYMMETRY.num_draws)
    draws = draws[draws.isfinite().all(-1)]
    return confirmed(found, target, draws).keyed(draws) if len(draws) > 1 else None


def _run_chains(plan: ChainSetup, file: Checkpoint) -> Refined:
    """Start chains, or load them, and walk until they stop."""
    target, began, max_seconds = plan.sampler.target, time.perf_counter(), plan.limit.seconds()
    chains: WindowedChains | None = file.load(target.init_loc.device)
    if chains is not None:
        streams = random_streams()  # those of the chains
        space = space_of(plan, chains.space, chains.middle, chains.fitted)
        restore_random_streams(streams, target.init_loc.device)
    else:
        space, chains = start_chains(plan)
        chains.max_gradients, chains.patience = plan.max_gradients, plan.patience
        chains.ends_apart = plan.anneals_apart and _can_anneal(target, plan.policy)
        chains.num_workers = current_workers().number
        Tracker(target, plan.quantities).try_at(space.to_latent(chains.points))
        chains.seconds = time.perf_counter() - began
    chains.max_seconds, chains.has_alternative = max_seconds, plan.has_alternative
    return _walk(plan, space, chains, file)


def _anneal(plan: ChainSetup, modes: Modes | None) -> Refined:
    """Anneal from modes, or from the prior of discrete latents."""
    target = plan.sampler.target
    track = Tracker(target, plan.quantities, plan.symmetries)
    if modes is None:
        found = temper_mixed(plan, track)
    else:
        track.try_at(modes.loc)
        found = temper_modes(space_of(plan, "latent"), modes, track, plan)
    return collect_annealed(target, found, plan.policy.stopping, plan.symmetries)


def _anneal_near(plan: ChainSetup, chains: WindowedChains) -> Refined | None:
    """Anneal what chains that stay apart have found; None if they are better."""
    target, settings = plan.sampler.target, plan.policy.tempering
    points = chains.current_space.to_latent(chains.points)
    if target.sampled:
        left = replace(plan, patience=plan.patience - chains.cpu_seconds)
        return _better_than(points, _anneal(left, None), target, plan.policy)
    starts = points[: settings.num_starts]
    if is_rounding(target, starts).any():  # which keeps chains apart, and spoils weights
        if not target.widen(starts):
            return None
        return _run_chains(plan, Checkpoint())
    modes = find_modes(target, starts=starts, max_seconds=plan.limit.left(SEARCH.time_share))
    factor = max(1, settings.num_chains // plan.num_chains)
    more = replace(
        plan, num_chains=factor * plan.num_chains, max_gradients=plan.max_gradients // factor
    )
    return _better_than(points, _anneal(more, modes), target, plan.policy)


def _can_anneal(target: Target, policy: ChainPolicy) -> bool:
    if target.sampled:
        return not why_not_tempered(target)
    return target.latent_dim <= policy.tempering.max_apart_dim


def _better_than(
    points: Tensor, annealed: Refined, target: Target, policy: ChainPolicy
) -> Refined | None:
    """Return annealed draws if they may replace chains that stay apart; else None.

    Their errors must be small, and of continuous latent variables their highest log-density must
    not be far below that of the chains: annealing would have missed a mode.

    :param points: where the chains are, ``(num_chains, latent_dim)``.
    """
    drift = annealed.drift
    if drift is None or not drift.r_hat <= policy.stopping.apart_r_hat:
        return None
    if target.sampled:
        return annealed
    drawn = target.unconstrain(annealed.get_samples())[:: annealed.num_draws]
    highest, reached = (target.log_prob(one).max() for one in (points, drawn))
    return annealed if highest - reached < policy.tempering.max_higher else None


def _walk(plan: ChainSetup, space: Space, chains: WindowedChains, file: Checkpoint) -> Refined:
    sampler, quantities = plan.sampler, plan.quantities
    track = Tracker(sampler.target, quantities, chains.symmetries)
    chains.attach(space, track, quantities is not None)
    run(chains, file)
    ends_apart = chains.ends_apart and chains.is_apart
    chains.ends_apart = False  # chains that go on are not annealed again
    if ends_apart:
        # The chains stay if no draw of the prior is possible, or no time is left.
        with suppress(OutOfTime, *IMPOSSIBLE):
            annealed = _anneal_near(plan, chains)
            if annealed is not None:
                return annealed
        if chains.stopped == "max_gradients" and not sampler.target.sampled:
            chains.stopped = None
            run(chains, file)
    chains.streams, space = random_streams(), chains.current_space
    more = partial(continue_chains, sampler, chains, space=space, quantities=quantities)
    has_images = quantities is None and not KERNELS[chains.kernel].separate
    return replace(collect(space, chains, has_images), chains=chains, more=more)


@in_turn
def continue_chains(
    sampler: Sampler,
    chains: WindowedChains,
    max_seconds: float | None = None,
    max_gradients: int | None = None,
    progress: bool = True,
    space: Space | None = None,
    quantities: Quantities | None = None,
) -> Refined:
    """Continue chains with all data where they stopped, with their random streams.

    :param sampler: the guide and target from which they started.
    :param chains: the chains, which stay as they are.
    :param space: their space; by default it is made again.
    :param quantities: those of :func:`refine`; the other arguments are those of
        :meth:`Refined.refine_more`.
    """
    refuse_counts(max_gradients=max_gradients)
    refuse_nonpositive(max_seconds=max_seconds)
    further = chains.continued(max_seconds, max_gradients)
    target = sampler.target
    with (
        watching(progress),
        same_streams(target.init_loc.device),
        workers(chains.num_workers),
        single_thread(chains.num_workers > 1 or target.is_small),
    ):
        number, calls = len(chains.state.position), max(chains.gradients, max_gradients or 0)
        plan = ChainSetup(sampler, number, calls, policy=chains.policy, quantities=quantities)
        if space is None:
            space = space_of(plan, chains.space, chains.middle, chains.fitted)
        if isinstance(space, GuideNoise):
            log_density, _ = space.white_score(further.frame, further.state.position)
            tolerance = math.sqrt(torch.finfo(log_density.dtype).eps)
            if not torch.allclose(log_density, further.state.log_density, rtol=tolerance):
                raise ValueError(
                    "the guide, on whose noise these chains walk, has changed since. Cure: "
                    "refine(model, result.get_samples(), ...), which starts from these draws"
                )
        restore_random_streams(chains.streams, target.init_loc.device)
        return _walk(plan, space, further, Checkpoint())


def chains_in_time(
    target: Target, num_chains: int, limit: TimeLimit, policy: ChainPolicy = DEFAULT
) -> int:
    """Halve the number of chains until the shortest run, by its operation count, ends in time.

    :returns: the number, 0 if it is not even ``policy.least_chains``.
    """
    if math.isinf(limit.end):
        return num_chains
    gradients = policy.warmup.least_gradients + policy.warmup.tuning + policy.stopping.least_draws
    with suppress(Exception):  # of the model at its initial point
        while gradients * target.seconds(num_chains) > limit.left():
            if num_chains <= policy.least_chains:
                return 0
            num_chains = max(policy.least_chains, num_chains // 2)
    return num_chains


def _call_once(sampler: Sampler) -> None:
    """Create the parameters of a guide that was never called."""
    guide, target = sampler.guide, sampler.target
    if isinstance(guide, AutoDraws) and guide.prototype_trace is None:
        with torch.no_grad(), poutine.block():
            guide(*target.args, **target.kwargs)


def _check_tempering(target: Target, kernel: str, frame: str, checkpoint: Any) -> None:
    if kernel != "hmc" or frame != "auto" or checkpoint is not None:
        raise ValueError(
            "temper=True has a kernel and frames of its own, and no checkpoint, but got "
            f"kernel={kernel!r}, frame={frame!r}, checkpoint={checkpoint!r}. Cure: leave them out"
        )
    if target.latent_dim > MAX_DENSE_DIM:
        raise ValueError(
            f"temper=True searches for modes, which needs at most {MAX_DENSE_DIM} latent "
            f"variables, but the model has {target.latent_dim}. Cure: temper=False; each mode then "
            "keeps the weight that the guide gave it"
        )


def _check_kernel(kernel: str) -> None:
    of_all_data = tuple(name for name, one in KERNELS.items() if one.adaptation is not None)
    if kernel not in of_all_data:
        by_minibatches = "; with minibatches, refine_by_minibatches" if kernel in KERNELS else ""
        raise ValueError(f"kernel must be one of {of_all_data}{by_minibatches}, but got {kernel!r}")


def _refuse_mixed(target: Target, kernel: str, frame: str) -> None:
    names = ", ".join(f"'{name}'" for name in target.sampled)
    for option, value, usual in (
        ("kernel", kernel, "hmc"),
        ("frame", frame, frame if frame not in ("noise", "conditional") else "auto"),
    ):
        if value != usual:
            raise ValueError(
                f"{option}={value!r} needs continuous latents, but the chains sample the discrete "
                f"latents {names}. Cure: {option}={usual!r}"
            )


def _default_chains(kernel: str, guide: Any, policy: ChainPolicy, temper: bool) -> int:
    if not KERNELS[kernel].separate:
        return policy.tempering.num_chains if temper else policy.num_chains
    given = isinstance(guide, Mapping) and bool(guide)
    return len(next(iter(guide.values()))) if given else policy.mclmc.num_chains


def _check_all_data(num_chains: int, frame: str, kernel: str, policy: ChainPolicy) -> None:
    if KERNELS[kernel].separate:
        refuse_counts(num_chains=num_chains)
        if frame != "auto":
            raise ValueError(
                f"kernel={kernel!r} has no frame, but got frame={frame!r}. Cure: leave it out"
            )
    elif num_chains < policy.least_chains:
        raise ValueError(
            f"num_chains must be at least {policy.least_chains}, but got {num_chains}: frame, step "
            "size and stopping rule are learnt by comparing chains. Cure: many chains cost little "
            "more than one; for one long chain take Pyro's NUTS"
        )
    if frame not in FRAMES:
        raise ValueError(f"frame must be one of {FRAMES}, but got {frame!r}")
