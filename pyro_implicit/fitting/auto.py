# SPDX-License-Identifier: Apache-2.0
"""A fitted guide from a model, with nothing to set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGuide

from pyro_implicit.compiled import CompileMode, check_mode
from pyro_implicit.density.checks.numerics import warn_of_lost_gradients
from pyro_implicit.density.model import SubsampledError
from pyro_implicit.density.policy import MAX_DENSE_DIM
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.arguments import (
    Amortize,
    refuse_amortizing,
    refuse_misplaced,
    refuse_processes,
    refuse_unfit_guide,
    refuse_validation,
    warn_of_stored_values,
)
from pyro_implicit.fitting.checkpoint import own_file, same_start
from pyro_implicit.fitting.minibatch_fit import fit_amortized, fit_batches, refine_batches
from pyro_implicit.fitting.refinement import (
    MOST_CHAINS,
    MOST_GRADIENTS,
    TRAINING_SECONDS,
    ChainPlan,
    correct,
    make_plan,
    move_draws,
    train_mean_field,
)
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import (
    Stages,
    TimeLimit,
    is_near,
    train_exact,
    train_semi_implicit,
)
from pyro_implicit.fitting.training import HeldOut, default_loss
from pyro_implicit.guides import AutoSemiImplicit
from pyro_implicit.guides.names import own_names
from pyro_implicit.runtime.locks import in_turn
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.random_stream import with_seed
from pyro_implicit.runtime.user_warnings import refuse_counts

__all__ = ["fit"]

NEARLY = 0.9  # effective share of the draws


@in_turn
@with_seed
def fit(
    model: Callable[..., Any],
    guide: str | AutoGuide | Callable[..., Any] = "auto",
    *args: Any,
    batches: Iterable[Any] | None = None,
    epochs: int = 10,
    validation: Iterable[Any] | None = None,
    amortize: Amortize | None = None,
    loss: Trace_ELBO | None = None,
    num_steps: int = 3000,
    lr: float = 0.01,
    num_particles: int = 128,
    refine: Literal["auto"] | bool = "auto",
    max_seconds: float | None = None,
    seed: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 500,
    compile: CompileMode = "auto",
    progress: bool = True,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Fit:
    r"""Fits a guide to a model.

    With ``guide="auto"`` and at most 100 latents, by these stages, each of which leaves its line in
    the result (``print(result)``):

    1. **search**: :func:`~pyro_implicit.density.find_modes` climbs the log-density from many draws
       of the prior, which gives a Gaussian for each separate mode;
    2. **gaussian**: these Gaussians are the first candidate, so that no training can end below
       where it began;
    3. **injective**: from there an :class:`AutoImplicit` with an :class:`AutoregressiveGenerator`
       is trained by :class:`InjectiveELBO`, whose exact density stops it as soon as guide and
       posterior agree: for near-Gaussian posteriors, funnels, skew and heavy tails; or **mixture**:
       several modes make an :class:`AutoMixture` of such guides, whose weights maximise its ELBO
       (each is trained for ``num_steps`` over the square root of their number, and none where that
       would take more than two minutes);
    4. **choose**: the candidate of the highest bound is kept, of those that leave out no mode of
       more than a hundredth of the mass that another covers;
    5. **correct**: where its importance weights are reliable (k-hat below 0.5, effective sample
       size above half of the draws), ``result.sample`` resamples its draws by them;
    6. **refine**: if they are not, nor the guide within a hundredth of a nat of the posterior, its
       draws are moved there by many short chains (:func:`~pyro_implicit.mcmc.refine`):
       ``result.refined``, from which ``result.sample`` draws.

    Of more than 100 latents, or where a search would take minutes, an ``AutoNormal`` is trained for
    1,000 steps (**mean-field**), and its draws are refined. Once the chains have settled, it takes
    their moments (**teach**). Where priors of latents depend on other latents, the guide that is
    left is then an :class:`~pyro_implicit.mcmc.AutoConditional`, of any number of latents.

    With ``refine=False`` the guide is all there is: an :class:`AutoSemiImplicit` is trained by
    :class:`LIVI_ELBO` as well, for every shape that is not injective, and is one more candidate. If
    its loss promises half a nat more than its bound keeps, its generator has folded, which LIVI
    does not see, and another is trained from another start. Of more than 100 latents it is the only
    one, of diagonal frame, as it is where the model subsamples its data.

    A model with parameters of its own (``pyro.param``) has one stage more, **parameters**, after
    the search: a guide in the best Gaussian's frame is trained together with them, to the plateau
    of the ELBO. Then they stay as they are, and the search begins anew.

    Unless ``refine=False``, nothing is trained where importance weights can right the Gaussians of
    the search, nor where priors of latents depend on other latents, as there chains have a better
    space than a trained guide's (:class:`~pyro_implicit.mcmc.ConditionalReparam`); and trainings
    are short, as chains are the cheaper way from there.

    A candidate that fails leaves its reason in its line, and the others are kept. What a model can
    afford of all this is planned by counting the operations of its log-density. Ctrl-C ends it with
    the best guide so far (``result.interrupted``).

    All of it is public: to set more, put the pieces together yourself.

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

    :param model: a Pyro model with continuous latents.
    :param guide: ``"auto"``, or a guide to be trained in place.
    :param args: of the model, as ``kwargs``.
    :param batches: minibatches, a ``DataLoader`` for instance: tuples of the arguments that follow
        ``args``, or single ones. The model scales each to all data, by
        ``pyro.plate(name, number_of_all_rows, subsample_size=len(x))``. Of at most 100 latents an
        :class:`AutoSemiImplicit` is trained, of more an ``AutoNormal``, and ``refine=True`` moves
        its draws by stochastic gradients (:func:`~pyro_implicit.mcmc.refine`). After
        ``torch.distributed.init_process_group`` each process brings minibatches of its own, by a
        ``DistributedSampler``, and all train one guide.
    :param epochs: passes over ``batches``, of the training, and of the chains; in place of
        ``num_steps``. All are taken, without ``max_seconds`` and ``validation``.
    :param validation: minibatches of held-out rows. Their negative log-likelihood under the guide
        is taken after each epoch: training ends when five epochs did not lower it, and the
        parameters are those of the best (:class:`~pyro_implicit.fitting.HeldOut`).
    :param amortize: for latents of single rows, in a plate that ``batches`` or the model subsample:
        ``"auto"``, or encoders by site, see :class:`~pyro_implicit.guides.AutoAmortized`, which is
        the guide then. ``result.sample(n, x)`` draws for new rows.
    :param loss: by which a given guide is trained; by default that of
        :func:`~pyro_implicit.fitting.default_loss`.
    :param num_steps: of each training, at most: it is slowed down once the smoothed loss stands
        still (:class:`~pyro_implicit.fitting.Schedule`).
    :param lr: learning rate, which suits latents that are of unit scale in the guide's frame.
    :param num_particles: of the default losses; with ``batches`` at most 8, and 2 of more than 100
        latents, as a network runs once for each; 8 of a model that can run for one alone.
    :param refine: ``"auto"`` as above, which leaves a guide that was given as it is; ``True``
        refines in any case, ``False`` never.
    :param max_seconds: of wall time, about. A run that it shortens does not repeat to the last bit.
    :param seed: of all random numbers of this call. The caller's random streams stay as they were;
        by default they are used, and advance.
    :param checkpoint: a folder. A run that was killed goes on from there when it is called again
        with the same arguments, and ends with the same parameters to the last bit.
    :param checkpoint_every: steps between two writings.
    :param compile: of the steps of all trainings, and of the chains' log-density: see
        :class:`~pyro_implicit.infer.ImplicitELBO` and :doc:`/howto/compile`.
    :param progress: whether to show bars for search, trainings, bounds and chains, each with what
        is left of its time: in a terminal or a notebook, never in a log.
    :param model_kwargs: more keyword arguments of the model: those with a name of ours, such as
        ``seed``, ``lr`` or ``loss``.
    :returns: guide, losses, bounds, stages and the model's parameters. Its guides leave nothing in
        Pyro's parameter store; a guide that was given, and parameters of the model, are there as
        after ``SVI``.
    :raises TypeError: for a class, or the model's data, in place of a guide; in several processes,
        for ``pyro.param`` outside of modules.
    :raises ValueError: for an unknown guide, steps, epochs or particles of none, a discrete latent,
        an observation that is NaN, a model whose log-density is nowhere finite (naming the sites to
        blame), or a checkpoint of a run with other settings (that its data were others goes
        unnoticed); for ``refine`` of a model that subsamples its data; in several processes, for
        the same minibatches in all, for ``refine=True``, and for a loss that trains networks of its
        own.
    :raises RuntimeError: for a model without latents.
    :warns UserWarning: for a new guide that Pyro's parameter store has values for.
    """
    refuse_misplaced(model, guide, loss)
    check_mode(compile)
    refuse_counts(num_steps=num_steps, epochs=epochs, num_particles=num_particles)
    refuse_counts(checkpoint_every=checkpoint_every)
    if amortize is not None:
        refuse_amortizing(guide, refine)
    refuse_validation(validation, batches, amortize)
    if checkpoint is None:
        warn_of_stored_values(guide)
    kwargs = {**kwargs, **(model_kwargs or {})}
    folder = None if checkpoint is None else Path(checkpoint)
    if folder is not None:
        settings = {
            "guide": guide if isinstance(guide, str) else type(guide).__name__,
            "num_steps": num_steps,
            "epochs": None if batches is None else epochs,
            "validation": validation is not None,
            "lr": lr,
            "num_particles": num_particles,
            "seed": seed,
        }
        same_start(own_file(folder, "start"), settings)
    stages = Stages(model, args, kwargs, num_steps, lr, num_particles, limit=TimeLimit(max_seconds))
    stages.files = {
        "checkpoint": folder,
        "checkpoint_every": checkpoint_every,
        "progress": progress,
        "compile": compile,
    }
    if batches is not None:
        stages.batches, stages.result.minibatches = BatchStream(batches), True
        refuse_processes(stages.batches.probed[0], refine is True)
        stages.num_steps = epochs * stages.batches.epoch_length
        if validation is not None:
            width = len(stages.batches.probed[0])
            stages.held_out = HeldOut(model, validation, args, kwargs, width)
    with stages.kept_apart():
        return _fit(stages, guide, loss, amortize, refine, epochs)


def _fit(
    stages: Stages,
    guide: Any,
    loss: Trace_ELBO | None,
    amortize: Amortize | None,
    refine: Literal["auto"] | bool,
    epochs: int,
) -> Fit:
    model, args, kwargs = stages.model, stages.args, stages.kwargs
    try:
        if stages.batches is not None:
            fit_batches(stages, guide, loss, amortize, time_share=0.5 if refine is True else 1.0)
            return refine_batches(stages, epochs) if refine is True else stages.result
        if amortize is not None:
            return fit_amortized(stages, amortize)
        if not isinstance(guide, str):
            refuse_unfit_guide(model, guide, args, kwargs)
            loss = loss or default_loss(guide, stages.num_particles, *args, model_kwargs=kwargs)
            return _fit_given(stages, guide, loss, refine is True)
    except KeyboardInterrupt:
        return stages.keep_the_best(None, None)
    density = _density(model, args, kwargs)
    if density is None and refine is True:
        raise ValueError(
            "refine moves draws by gradients of all data, but the model subsamples them. Cure: "
            "refine=False, or the model without subsample_size"
        )
    return _fit_auto(stages, density, refine)


def _fit_given(stages: Stages, guide: Any, loss: Trace_ELBO, refine: bool) -> Fit:
    result = stages.train_alone("guide", guide, loss, time_share=0.5 if refine else 1.0)
    return move_draws(stages, ChainPlan(MOST_CHAINS, MOST_GRADIENTS)) if refine else result


def _fit_auto(stages: Stages, density: Target | None, refine: Literal["auto"] | bool) -> Fit:
    modes = None
    try:
        if density is None or (density.latent_dim > MAX_DENSE_DIM and refine is False):
            guide = own_names(AutoSemiImplicit(stages.model, frame=None, init_scale=0.01))
            loss = default_loss(guide, min(stages.num_particles, 8))
            return stages.train_alone("semi-implicit", guide, loss)
        plan = make_plan(density)
        if not density.is_vectorized:
            stages.run_one_by_one()
        warn_of_lost_gradients(density)
        if plan.search_iterations == 0 and refine is not False:
            train_mean_field(stages, density)
            return move_draws(stages, plan.chains)
        modes = stages.search(density, plan.search_iterations)
        if stages.learn_parameters(density, modes):
            modes = stages.search(density, plan.search_iterations)
        seconds = math.inf if refine is False else TRAINING_SECONDS
        exact = train_exact(stages, density, modes, seconds)
        near = is_near(exact)
        if refine is False and not near:
            train_semi_implicit(stages, density, exact)
        stages.choose(density, modes)
        if refine is False:
            return stages.result
        # The bound saw a thousand draws, and these are new ones.
        near = correct(stages, density) > NEARLY and near
        if refine is True or not (near or stages.result.correction):
            move_draws(stages, plan.chains)
        return stages.result
    except KeyboardInterrupt:
        return stages.keep_the_best(density, modes)


def _density(model: Callable[..., Any], args: Any, kwargs: Any) -> Target | None:
    """The log-density, if it is one of all data."""
    try:
        return Target(model, *args, model_kwargs=kwargs)
    except SubsampledError:
        return None
