# SPDX-License-Identifier: Apache-2.0
"""Automatic inference: a fitted guide and posterior draws from a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGuide, AutoNormal
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_implicit.compiled import CompileMode, check_mode
from pyro_implicit.density.checks import MovingSupportError
from pyro_implicit.density.checks.numerics import warn_of_lost_gradients
from pyro_implicit.density.marginal_normal import find_normal_marginal
from pyro_implicit.density.model import SubsampledError, trace_model
from pyro_implicit.density.policy import MAX_DENSE_DIM, RUNS, SEARCH, MarginalPolicy
from pyro_implicit.density.scales import has_only_local_latents
from pyro_implicit.density.tails import find_tails
from pyro_implicit.density.target import Target
from pyro_implicit.density.workers import current_workers, workers
from pyro_implicit.fitting.arguments import (
    LOCAL_VALIDATION,
    Amortize,
    quiet_about_frozen,
    refuse_amortizing,
    refuse_length,
    refuse_misplaced,
    refuse_processes,
    refuse_training_mode,
    refuse_unfit_guide,
    refuse_validation,
    warn_of_stored_values,
)
from pyro_implicit.fitting.candidates import mean_field_guide
from pyro_implicit.fitting.checkpoint import loss_settings, own_file, same_start
from pyro_implicit.fitting.held_out import HeldOut
from pyro_implicit.fitting.hierarchy import fit_hierarchy
from pyro_implicit.fitting.many_rows_fit import fit_many_rows
from pyro_implicit.fitting.marginal_fit import fit_discrete, fit_marginal
from pyro_implicit.fitting.minibatch_fit import fit_by_passes
from pyro_implicit.fitting.network_fit import (
    fit_network,
    refuse_missing_targets,
    score_validation,
    train_by_minibatches,
)
from pyro_implicit.fitting.parameters import keep_frozen
from pyro_implicit.fitting.policy import DEFAULT, FitPolicy
from pyro_implicit.fitting.refinement import (
    ChainPlan,
    Fallback,
    Plan,
    correct,
    make_plan,
    move_draws,
    train_mean_field,
)
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import Stages, train_exact, train_semi_implicit
from pyro_implicit.fitting.starts import between
from pyro_implicit.fitting.training import default_loss
from pyro_implicit.fitting.turns import find_phases, middle_of_turns
from pyro_implicit.guides import AutoAmortized, AutoSemiImplicit
from pyro_implicit.guides.auto_draws import own_names
from pyro_implicit.guides.policy import MINIBATCH_INIT_SCALE
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import refine_by_minibatches
from pyro_implicit.mcmc.minibatch_chains import check_scaling
from pyro_implicit.nn import NetworkModel
from pyro_implicit.runtime.clock import TimeLimit
from pyro_implicit.runtime.global_state import in_turn, same_streams, single_thread, with_seed
from pyro_implicit.runtime.messages import (
    first_line,
    refuse_counts,
    refuse_nonpositive,
    refuse_unknown,
    warn_user,
)
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.processes import num_processes
from pyro_implicit.runtime.progress import Callback

__all__ = ["fit"]

NO_CHAINS = (
    "teach=True makes generators from chains of a network with more than 100 weights and all data, "
    "but this fit runs none. Cure: fit(model, 'auto', x, y) of a classifier or regressor, or for "
    "other models teach(guide, refine(model, guide, ...).get_samples(), ...)"
)


@in_turn
@with_seed
def fit(
    model: Callable[..., Any],
    guide: str | AutoGuide | Callable[..., Any] = "auto",
    *args: Any,
    batches: Iterable[Any] | None = None,
    epochs: int | None = None,
    validation: Iterable[Any] | None = None,
    amortize: Amortize | None = None,
    loss: Trace_ELBO | None = None,
    num_steps: int | None = None,
    lr: float = 0.01,
    num_particles: int = 128,
    refine: Literal["auto"] | bool = "auto",
    teach: bool = False,
    max_seconds: float | None = None,
    num_workers: int | None = None,
    seed: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 500,
    compile: CompileMode = "auto",
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
    policy: FitPolicy | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Fit:
    r"""Fit a guide to a model, and draw from the posterior.

    With ``guide="auto"`` and at most 100 latent variables, these stages run. Each adds a line to
    the result (``print(result)``):

    1. **search**: :func:`~pyro_implicit.density.find_modes` finds a Gaussian for each mode. Of
       modes that are equal up to symmetries, such as the order of components, one is kept; the
       final draws are moved by random ones (:doc:`/invariances`).
    2. **parameters**: the model's own parameters (``pyro.param``), if any, are trained and fixed.
       The search then runs again.
    3. **gaussian**: the Gaussians are the first candidate.
    4. **injective**: an :class:`AutoImplicit` with an exact density is trained by
       :class:`InjectiveELBO`. ``fit`` skips this stage if there are several modes, if importance
       weights can correct the Gaussians, if chains have better coordinates
       (:class:`~pyro_implicit.mcmc.ConditionalReparam`), or if they cost less. It looks at the
       weights after 20, 40, 80, ... steps, and ends the training once they are even. With
       ``refine=False`` several modes get a **mixture**: an :class:`AutoMixture` of such guides.
    5. **choose**: the candidate with the highest bound wins, among those that cover all modes.
    6. **correct**: if the importance weights are reliable (k-hat below 0.5 and effective sample
       size above half of the draws, rising to 0.7 and nine tenths), ``result.sample`` resamples
       draws by them.
    7. **refine**: otherwise :func:`~pyro_implicit.mcmc.refine` moves the draws to the posterior by
       many short chains, unless the guide is within 0.01 nats of it. Chains that would end before
       they forget their initial values continue as fewer, longer chains. A guide that was not
       trained then takes the moments of the draws (**teach**). For several modes annealed particles
       replace the chains and give the modes' weights. ``result.sample`` then draws from
       ``result.refined``.

    With more than 100 latent variables, all that are normal given the others are integrated out
    (**marginal**), the stages above run for the others, and the integrated variables are drawn
    given each of their draws (**draws**). If there are none, or if a search would take minutes, an
    ``AutoNormal`` is trained (**mean-field**), chains refine its draws, and the guide learns their
    moments (**teach**). With ``refine=False`` no chains run: an :class:`AutoSemiImplicit` is
    trained by :class:`LIVI_ELBO` as a further candidate. For a network of :mod:`pyro_implicit.nn`
    with more than 100 weights, an :class:`AutoEnsemble` is trained (**ensemble**), and a chain runs
    from each member, first without some rows (**mclmc, held out**) and then with all (**mclmc**).
    Discrete latent variables that cannot be summed out are sampled together with the continuous
    ones, by chains from draws of the prior (**discrete**). :doc:`/fitting` describes all stages and
    cases.

    If a stage fails, its line gives the reason and the other candidates remain. Ctrl-C returns the
    best result so far (``result.interrupted``). The operation count of the log-density determines
    what a model can afford.

    **Example:**

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> result = fit(model, "auto", torch.tensor(2.0), seed=0, progress=False)
    >>> print(f"{result.guide.median()['x']:.1f}")
    1.0
    >>> [stage.name for stage in result.stages]
    ['search', 'gaussian', 'choose', 'correct']

    :param model: a Pyro model.
    :param guide: ``"auto"``, or a guide that is trained in place.
    :param args: positional arguments of the model; ``kwargs`` are keyword arguments.
    :param batches: minibatches, for instance a ``DataLoader``: tuples of the arguments that follow
        ``args``, or single arguments. The model scales each to all data by
        ``pyro.plate(name, number_of_all_rows, subsample_size=len(x))``. With at most 100 latent
        variables, each evaluation of the log-density is a pass over all rows, and the stages are
        **search** on a part of the rows, **gaussian**, **correct** and **refine**
        (:doc:`/howto/minibatches`). Networks of :mod:`pyro_implicit.nn` get an
        :class:`AutoEnsemble` that is trained by minibatches, other models an ``AutoNormal``;
        ``refine=True`` moves its draws by stochastic gradients
        (:func:`~pyro_implicit.mcmc.refine_by_minibatches`). After
        ``torch.distributed.init_process_group`` all processes fit one guide, each with its own
        minibatches (``DistributedSampler``).
    :param epochs: the number of passes over ``batches`` in training, and again in chains; by
        default 10, or as many as make 2,000 steps. It replaces ``num_steps`` there.
    :param validation: minibatches of held-out rows. Fits by passes only report their score.
        Training by minibatches ends after five epochs, or a tenth of
        ``epochs``, without a lower negative log-likelihood of these rows, and restores the
        parameters of the best epoch (:class:`~pyro_implicit.fitting.HeldOut`). Without ``batches``
        they stop the ensemble of a network, and replace the rows that ``fit`` would hold out.
    :param amortize: for latent variables of single rows or groups, in a plate that ``batches`` or
        the model subsamples. ``"conditional"`` integrates them out by quadrature around their modes
        given the other variables, whose posterior is then that of all groups; ``epochs``,
        ``num_steps`` and ``lr`` have no meaning (:doc:`/howto/large_hierarchies`). ``"auto"``, or
        encoders by site, trains an :class:`~pyro_implicit.guides.AutoAmortized`, whose rows are
        independent of the other variables. ``result.sample(n, x)`` draws for new rows.
    :param loss: the loss of a given guide, by default that of
        :func:`~pyro_implicit.fitting.default_loss`.
    :param num_steps: the maximal number of steps of each training without ``batches``, by default
        3000, except ensembles of networks on many rows that train until ``max_seconds``. The
        learning rate falls once the smoothed loss stops falling
        (:class:`~pyro_implicit.fitting.Schedule`).
    :param lr: the learning rate, for latent variables of unit scale in the guide's frame.
    :param num_particles: the number of particles of default losses; at most 8 if the model cannot
        be vectorised or with ``batches``, and 2 with ``batches`` and more than 100 latent
        variables.
    :param refine: ``"auto"`` runs chains as above, but never for a given guide; ``True`` always
        runs them, ``False`` never.
    :param teach: for networks with all data, whether to make generators from the chains: the guide
        is then an :class:`AutoMixture` for unlimited draws, as large as the chains' draws.
        ``print(result)`` shows the held-out log-likelihood that it loses against them.
    :param max_seconds: the approximate limit of wall time. A run that it shortens is not
        reproducible. Chains that have not converged use all of it; without a limit they go on for
        at most 120 seconds of one core. If no time is left for chains, or they hardly moved, the
        guide is the result, and a warning says so.
    :param num_workers: the number of processes between which chains with all data divide the rows
        of an expensive log-density, as in :func:`~pyro_implicit.mcmc.refine`.
    :param seed: the seed of all random numbers of this call. The caller's random streams do not
        advance; without a seed they are used.
    :param checkpoint: a folder. If a run was killed, the same call resumes it and ends with the
        same parameters: bit-identical with ``compile=False``, else up to rounding. Fits by passes
        begin again.
    :param checkpoint_every: the number of steps between two writes.
    :param compile: how training steps and the chains' log-density are compiled; see
        :class:`~pyro_implicit.infer.ImplicitELBO` and :doc:`/howto/compile`.
    :param progress: whether to show progress bars in a terminal or a notebook.
    :param callbacks: observers of steps and stages, which may end a stage
        (:mod:`pyro_implicit.callbacks`).
    :param policy: budgets, limits and thresholds; by default those of
        :class:`~pyro_implicit.fitting.FitPolicy`.
    :param model_kwargs: keyword arguments of the model that have the name of an argument here, such
        as ``seed``, ``lr`` or ``loss``.
    :returns: guide, draws, losses, bounds, stages and the model's parameters. Guides made by
        ``fit`` leave nothing in Pyro's parameter store; a given guide, and parameters of the model,
        are there as after ``SVI``.
    :raises TypeError: for a class or data in place of a guide; in several processes, for
        ``pyro.param`` outside of modules.
    :raises ValueError: inside a plate or a handler that changes the model, such as
        ``poutine.scale``; for an unknown guide; counts below 1; a ``max_seconds`` that is not
        positive; ``num_steps`` with ``batches``, and ``epochs`` without; a discrete latent variable
        that can neither be summed out nor sampled; an observation that is NaN; a model whose
        log-density is finite nowhere; a checkpoint of a run with other settings (changed data are
        not detected); ``refine=True`` for a model that subsamples its data; in several processes,
        for identical minibatches, ``refine=True``, and losses with networks of their own.
    :raises RuntimeError: for a model without latent variables.
    :warns UserWarning: for a new guide whose name has values in Pyro's parameter store, and for a
        model that subsamples its data, unless ``refine=False``.
    """
    refuse_misplaced(model, guide, loss)
    check_mode(compile)
    refuse_counts(num_steps=num_steps, epochs=epochs, num_particles=num_particles)
    refuse_length(num_steps, epochs, batches)
    refuse_counts(checkpoint_every=checkpoint_every)
    refuse_nonpositive(max_seconds=max_seconds)
    refuse_unknown("refine", refine, "auto", True, False)
    if amortize is not None:
        refuse_amortizing(guide, refine)
    is_network = isinstance(model, NetworkModel) and guide == "auto"
    refuse_validation(validation, batches, amortize, is_network)
    if teach and not (is_network and batches is None and amortize is None and refine is not False):
        raise ValueError(NO_CHAINS)
    if checkpoint is None:
        warn_of_stored_values(guide)
    policy, kwargs = policy or DEFAULT, {**kwargs, **(model_kwargs or {})}
    num_steps = num_steps or policy.schedule.num_steps
    if checkpoint is not None:
        settings = {
            "guide": guide if isinstance(guide, str) else type(guide).__name__,
            "num_steps": num_steps,
            "epochs": epochs,
            "validation": validation is not None,
            "lr": lr,
            "num_particles": num_particles,
            "seed": seed,
            "loss": loss_settings(loss),
            "amortize": amortize if amortize is None or isinstance(amortize, str) else [*amortize],
            "refine": refine,
            "teach": teach,
            "policy": repr(policy),
        }
        same_start(own_file(checkpoint, "start"), settings)
    options = {
        "checkpoint": checkpoint,
        "checkpoint_every": checkpoint_every,
        "progress": progress,
        "compile": compile,
    }
    stages = Stages(
        model,
        args,
        kwargs,
        num_steps,
        lr,
        num_particles,
        TimeLimit(max_seconds),
        policy,
        options,
        callbacks,
        validation,
        teach,
    )
    if batches is not None:
        _take_batches(stages, BatchStream(batches), epochs, refine is True, is_network)
    keep_frozen(model, guide)
    everything = (*args, *stages.first_batch)
    if isinstance(model, NetworkModel):
        refuse_missing_targets(model, everything, kwargs)
    else:
        refuse_training_mode(model, everything, kwargs)
    with quiet_about_frozen(), stages.kept_apart(), workers(num_workers):
        if batches is None and amortize is None and isinstance(guide, str):
            return _fit_auto(stages, refine)
        return _fit_one(stages, guide, loss, amortize, refine)


def _take_batches(
    stages: Stages, batches: BatchStream, epochs: int | None, refine: bool, is_network: bool
) -> None:
    """Let trainings use minibatches, and score the rows for validation after each epoch."""
    stages.batches = batches
    stages.result.minibatches = True
    refuse_processes(stages.first_batch, refine)
    stages.epochs = epochs or stages.policy.training.epochs_of(batches.epoch_length)
    stages.num_steps = stages.epochs * batches.epoch_length
    if stages.validation is None:
        return
    limits, number = stages.policy.held_out, stages.policy.held_out.num_samples
    if is_network:  # all members of an ensemble
        number = max(number, stages.policy.network.fewest_members)
    patience = max(limits.patience, round(limits.patience_share * stages.epochs))
    try:
        stages.held_out = HeldOut(
            stages.model,
            stages.validation,
            stages.args,
            stages.kwargs,
            len(stages.first_batch),
            replace(limits, patience=patience, num_samples=number),
        )
    except SubsampledError as error:
        raise ValueError(LOCAL_VALIDATION) from error


def _fit_one(
    stages: Stages,
    guide: Any,
    loss: Trace_ELBO | None,
    amortize: Amortize | None,
    refine: Literal["auto"] | bool,
) -> Fit:
    args, kwargs, budget = stages.args, stages.kwargs, stages.policy.budget
    share = budget.training_share if refine is True else 1.0
    try:
        if amortize == "conditional":
            return fit_hierarchy(stages)
        if stages.batches is not None:
            _fit_batches(stages, guide, loss, amortize, refine, share)
            is_done = refine is not True or stages.result.refined is not None
            draws = stages.result.draws  # of passes, with reliable weights
            is_done |= draws is not None and draws.settled
            return stages.result if is_done else _refine_batches(stages)
        if amortize is not None:
            return _fit_amortized(stages, amortize)
        refuse_unfit_guide(stages.model, guide, args, kwargs, loss)
        loss = loss or default_loss(guide, stages.num_particles, *args, model_kwargs=kwargs)
        result = stages.train_alone("guide", guide, loss, share)
        chains = ChainPlan(budget.most_chains, budget.most_gradients)
        return move_draws(stages, chains) if refine is True else result
    except KeyboardInterrupt:
        return stages.keep_the_best(None, None)


def _fit_auto(stages: Stages, refine: Literal["auto"] | bool) -> Fit:
    target = _find_target(stages, refine)
    # Processes that divide the chains use all cores, on which threads of torch would wait actively.
    is_divided = refine is not False and 1 < torch.get_num_threads() <= current_workers().number
    with single_thread(target is not None and (is_divided or target.is_small)):
        result = _fit_target(stages, target, refine)
        result.in_double = target is not None and target.is_wide
        if not (target is None or isinstance(stages.model, NetworkModel)):
            try:
                result.known = _known_points(result, target)
            except KeyboardInterrupt:
                result.interrupted = True
            except Exception:
                result.known = None  # the result stands without it
        return result


def _known_points(result: Fit, target: Target) -> tuple[Tensor, Tensor] | None:
    """Return draws and the log-density there."""
    with same_streams(target.init_loc.device):
        points = Sampler(target, result.guide).draw(RUNS.num_points)
    heights = target.log_prob(points)
    is_known = heights.isfinite()
    return (points[is_known], heights[is_known]) if is_known.any() else None


def _find_target(stages: Stages, refine: Literal["auto"] | bool) -> Target | None:
    """Return the posterior of all data in suitable coordinates; None if the model subsamples them.

    Latent variables with moving supports, batch dimensions outside of plates, priors without a
    variance and angles are declared for all stages first.
    """

    def make_target() -> Target:
        return Target(stages.model, *stages.args, model_kwargs=stages.kwargs, sample_discrete=True)

    target: Target | None = None
    try:
        while target is None:
            try:
                target = make_target()
            except MovingSupportError as error:
                stages.declare_supports(error.names)
        if target.unplated and not target.sampled:
            stages.declare_events(target.unplated)
            target = make_target()
        if tails := find_tails(target):
            stages.declare_tails(tails)
            target = make_target()
        phases = find_phases(target)
        if target.turns or phases:
            budget = stages.policy.budget
            plan = make_plan(target, budget, stages.limit)
            iterations = 0 if target.sampled else plan.search_iterations
            seconds = min(budget.search_seconds, stages.limit.left(SEARCH.time_share))
            stages.declare_turns(middle_of_turns(target, iterations, seconds, phases))
            target = make_target()
        return target
    except SubsampledError as error:
        if isinstance(stages.model, NetworkModel):
            raise ValueError(
                f"num_data of the network is {stages.model.num_data}, but fit got fewer rows. "
                "Cure: num_data=len(x), or batches= for minibatches"
            ) from error
        if refine is True:
            raise ValueError(
                "refine moves draws by gradients of all data, but the model subsamples them. Cure: "
                "refine=False, or the model without subsample_size"
            ) from error
        if refine == "auto":
            warn_user(f"fit neither corrects nor checks the draws of this guide: {error}")
        return None


def _fit_target(stages: Stages, target: Target | None, refine: Literal["auto"] | bool) -> Fit:
    """Fit a guide to all data. The first case that applies determines the route:

    - The model subsamples its data, or has more than 100 latents with ``refine=False``:
      ``_train_semi_implicit_alone``.
    - Discrete latents have coordinates: ``fit_discrete`` sums them out and fits the others by
      ``_fit_by_search``, or runs chains from draws of the prior.
    - A network of many weights: ``fit_network`` trains an ensemble; chains start at its members.
    - Some of more than 100 latents are normal given the others: ``fit_marginal`` integrates them
      out and fits the others by ``_fit_by_search``.
    - Thousands of rows: ``fit_many_rows`` weighs draws at the modes. If the weights do not suffice,
      ``_fit_by_search`` continues from these modes.
    - A search is too expensive, as with more than 100 latents: ``_fit_without_search`` trains a
      mean-field guide and runs chains.
    - Otherwise ``_fit_by_search``. If its chains do not converge, ``fit_marginal`` may follow.

    ``refine=False`` skips ``fit_marginal``, ``fit_many_rows`` and ``_fit_without_search``. The
    first two leave models that do not suit them to the cases below.

    :param target: the posterior; None if the model subsamples its data.
    """
    policy, is_network = stages.policy, target is not None and _is_ensemble(stages, target)
    if stages.teaches and not is_network:
        raise ValueError(NO_CHAINS)
    if stages.validation is not None and (not is_network or refine is False):
        raise ValueError(
            "validation without batches is for the ensemble of a network with more than "
            f"{policy.network.most_searched_weights} weights, which this fit does not train. Cure: "
            "batches=loader"
        )
    try:
        if target is None or (target.latent_dim > MAX_DENSE_DIM and refine is False):
            limits = policy.training
            return _train_semi_implicit_alone(stages, limits.init_scale, limits.few_particles)
        stages.result.target = target
        target.refuse_improper()
        if target.sampled:
            return fit_discrete(stages, target, refine, _fit_by_search)
        if is_network:
            return fit_network(stages, target, refine is True)
        if refine is not False and _integration(stages, target, policy.marginal, refine).run():
            return stages.result
        modes = None if refine is False else fit_many_rows(stages, target, refine == "auto")
        if stages.result.draws is not None:
            return stages.result
        plan = make_plan(target, policy.budget, stages.limit)._replace(modes=modes)
        if not target.is_vectorized:
            stages.one_by_one = True
            stages.num_particles = min(stages.num_particles, policy.training.few_particles)
        warn_of_lost_gradients(target)
        if plan.search_iterations == 0 and refine is not False and modes is None:
            return _fit_without_search(stages, target, plan)
        if target.latent_dim <= policy.marginal.least_latents:
            every = replace(policy.marginal, least_latents=0, least_integrated=1, least_added=1)
            plan = plan._replace(fallback=_integration(stages, target, every, refine))
        return _fit_by_search(stages, target, plan, refine)
    except KeyboardInterrupt:
        return stages.keep_the_best(target, None)


def _is_ensemble(stages: Stages, target: Target) -> bool:
    """Return whether the model is a network whose weights are too many for a mode search."""
    is_wide = target.latent_dim > stages.policy.network.most_searched_weights
    return is_wide and isinstance(stages.model, NetworkModel)


def _integration(
    stages: Stages, target: Target, policy: MarginalPolicy, refine: Literal["auto"] | bool
) -> Fallback:
    """Return a way to integrate latent variables out, if some are normal given the others."""
    find = partial(find_normal_marginal, target, policy)

    def exists() -> bool:
        with suppress(Exception):  # of the model
            return find() is not None
        return False

    def run() -> bool:
        marginal = find()
        return marginal is not None and fit_marginal(stages, marginal, refine, _fit_by_search)

    return Fallback(exists, run)


def _fit_without_search(stages: Stages, target: Target, plan: Plan) -> Fit:
    stages.noise = stages.result.modes = stages.result.num_modes = None
    train_mean_field(stages, target)
    return move_draws(stages, plan.chains, fallback=plan.fallback)


def _fit_by_search(
    stages: Stages, target: Target, plan: Plan, refine: Literal["auto"] | bool
) -> Fit:
    """Search for modes, and train, weigh or move draws of Gaussians at them.

    With too many modes, or if they are spikes even in double precision, fit without the search.
    """
    policy, modes = stages.policy, plan.modes
    try:
        # Draws of a guide, which are all without refinement, are not moved by symmetries.
        search = partial(
            stages.search, target, plan.search_iterations, plan.num_starts, refine is False
        )
        modes = search() if modes is None else modes
        if stages.learn_parameters(target, modes):
            modes = search()
        if refine is False:
            exact = train_exact(stages, target, modes, math.inf)
            if not exact.gap < policy.choice.near:
                train_semi_implicit(stages, target, exact)
            stages.choose(target, modes)
            return stages.warn_if_untrained()
        if len(modes.loc) > policy.budget.most_modes:
            warn_user(
                f"the search found {len(modes.loc)} separate modes, and the posterior may have "
                "many more: fit does not weigh them, and its draws stay in the modes where chains "
                "start. Cure: a model without ambiguous signs or orders, such as a positive latent "
                "for one that enters by its square"
            )
            return _fit_without_search(stages, target, plan)
        exact = train_exact(stages, target, modes, policy.budget.training_seconds)
        if not math.isfinite(exact.bound):
            if target.widen(modes.loc):  # rounding errors of large terms may make a spike
                return _fit_by_search(stages, target, plan._replace(modes=None), refine)
            possible = target.log_prob(exact.draws).isfinite().double().mean()
            if possible < policy.choice.least_possible:
                # The search ended in a spike, as a funnel has at scale 0: no Gaussian is near.
                return _fit_without_search(stages, target, plan)
        stages.choose(target, modes)
        # These weights are of new draws; those of the bound may have missed a region.
        is_near = correct(stages, target) > policy.correction.near
        is_near &= exact.gap < policy.choice.near
        if refine is True or not (is_near or stages.result.correction):
            move_draws(stages, plan.chains, refine is not True, modes, plan.fallback)
        return stages.warn_if_untrained()
    except KeyboardInterrupt:
        return stages.keep_the_best(target, modes)


def _fit_batches(
    stages: Stages,
    guide: Any,
    loss: Trace_ELBO | None,
    amortize: Amortize | None,
    refine: Literal["auto"] | bool,
    time_share: float,
) -> Fit:
    """Fit by passes over minibatches, or train a guide; scales of an automatic one start small."""
    assert stages.batches is not None
    first, policy = stages.first_batch, stages.policy.training

    may_be_local = amortize is not None or _knows_rows(guide)
    whole = (stages.model, stages.args, first, stages.kwargs)

    def make_target() -> Target:
        return Target.of_minibatches(
            stages.model,
            *stages.args,
            batch=first,
            allow_local=may_be_local,
            model_kwargs=stages.kwargs,
        )

    target = make_target()
    if target.unplated and isinstance(guide, str):
        stages.declare_events(target.unplated)
        target = make_target()
    # Each minibatch has other rows, so that latents of single rows keep Pyro's coordinates.
    if isinstance(guide, str) and not may_be_local and (tails := find_tails(target)):
        stages.declare_tails(tails)
        target = make_target()
    if target.turns and isinstance(guide, str):
        stages.declare_turns(target.turns)
        target = make_target()
    if may_be_local and not target.scaled and has_only_local_latents(*whole):
        # Without global latents, the scale is a constant factor of the ELBO.
        if stages.validation is not None:
            raise ValueError(LOCAL_VALIDATION)
    else:
        check_scaling(target, stages.batches, num_processes())
    if amortize is not None:
        return _fit_amortized(stages, amortize)
    is_wide = target.latent_dim > MAX_DENSE_DIM
    few = policy.network_particles if is_wide else policy.few_particles
    particles = min(stages.num_particles, few)
    if not isinstance(guide, str):
        everything = (*stages.args, *first)
        refuse_unfit_guide(stages.model, guide, everything, stages.kwargs, loss)
        loss = loss or default_loss(guide, particles, *everything, model_kwargs=stages.kwargs)
        return stages.train_alone("guide", guide, loss, time_share)
    if _is_ensemble(stages, target):
        return train_by_minibatches(stages, time_share)
    if not is_wide:
        if fit_by_passes(stages, target, refine):
            return stages.result
        return _train_semi_implicit_alone(stages, MINIBATCH_INIT_SCALE, particles, time_share)
    start = between(target, stages.policy.start)
    guide = mean_field_guide(stages.model, target, start, init_scale=MINIBATCH_INIT_SCALE)
    loss = ImplicitELBO(particles, nonfinite="skip")
    return stages.train_alone("mean-field", guide, loss, time_share)


def _train_semi_implicit_alone(
    stages: Stages, scale: float, num_particles: int, time_share: float = 1.0
) -> Fit:
    guide = own_names(AutoSemiImplicit(stages.model, frame=None, init_scale=scale))
    loss = default_loss(guide, min(stages.num_particles, num_particles))
    return stages.train_alone("semi-implicit", guide, loss, time_share)


def _knows_rows(guide: Any) -> bool:
    if isinstance(guide, AutoGuide) and not isinstance(guide, AutoAmortized):
        return guide.create_plates is not None
    return not isinstance(guide, str)


def _refine_batches(stages: Stages) -> Fit:
    assert stages.batches is not None
    result = stages.result
    with result.attempt("refine") as line:
        refined: Any = refine_by_minibatches(
            stages.model,
            result.guide,
            *stages.args,
            batches=stages.batches.batches,
            num_chains=getattr(result.guide, "num_members", None),
            max_epochs=stages.epochs,
            max_seconds=stages.limit.seconds(),
            progress=stages.options["progress"],
            model_kwargs=stages.kwargs,
        )
        result.refined, choice, result.draws = refined, refined.choice, None
        line.outcome = (
            f"{refined.num_gradients} gradients, step size bounded by {choice.limit}, "
            f"{choice.relaxations:.2g} relaxation times"
        )
        result.interrupted = refined.stopped == "interrupted"
        score_validation(stages, refined)
    if line.error is not None:
        warn_user(f"fit did not refine its draws: {first_line(line.error)}")
    return result


def _fit_amortized(stages: Stages, amortize: Amortize) -> Fit:
    everything, policy = (*stages.args, *stages.first_batch), stages.policy.training

    def rest(hidden: Callable[..., Any]) -> AutoGuide:
        nodes = trace_model(hidden, everything, stages.kwargs).iter_stochastic_nodes()
        latents = [site for _, site in nodes if not site_is_subsample(site)]
        if sum(site["value"].numel() for site in latents) <= MAX_DENSE_DIM:
            return AutoSemiImplicit(hidden, frame=None, init_scale=MINIBATCH_INIT_SCALE)
        return AutoNormal(hidden, init_scale=MINIBATCH_INIT_SCALE)

    assert amortize != "conditional"
    guide = own_names(AutoAmortized(stages.model, amortize, rest))
    particles = min(stages.num_particles, policy.few_particles)
    loss = default_loss(guide, particles, *everything, model_kwargs=stages.kwargs)
    return stages.train_alone("amortised", guide, loss)


Fit._fit = staticmethod(fit)
