# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a fitted guide from the model and the guide alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_implicit.density.checks.numerics import warn_of_lost_gradients
from pyro_implicit.density.cost import estimated_seconds, nearby
from pyro_implicit.density.mode_search import seconds_of_climb
from pyro_implicit.density.policy import MAX_DENSE_DIM, SEARCH
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.examination import (
    BAD_DRAWS,
    Effort,
    examine,
    examine_mixed,
)
from pyro_implicit.diagnostics.policy import CHECKS, EFFORT, VERDICT, VerdictPolicy
from pyro_implicit.diagnostics.quantities import Quantities, find_quantities
from pyro_implicit.diagnostics.verdict import Diagnosis
from pyro_implicit.distributions import find_implicit
from pyro_implicit.guides.posterior_draws import (
    posterior_of,
    refuse_swapped,
    samples_of,
    trace_guide,
)
from pyro_implicit.guides.sampler import Sampler, StoredDraws
from pyro_implicit.infer.bound import weighted_draws
from pyro_implicit.infer.policy import BOUNDS
from pyro_implicit.mcmc import Refined
from pyro_implicit.ops.policy import MAX_ENTRIES
from pyro_implicit.runtime.global_state import in_turn, same_streams, single_thread, with_seed
from pyro_implicit.runtime.messages import refuse_counts, refuse_nonpositive
from pyro_implicit.runtime.progress import announce, watching
from pyro_implicit.runtime.sites import is_close

__all__ = ["diagnose", "plan_effort"]


@in_turn
@with_seed
@torch.no_grad()
def diagnose(
    model: Callable[..., Any] | Target,
    guide: Callable[..., Any] | Mapping[str, Tensor] | Refined,
    *args: Any,
    num_samples: int | None = None,
    loss: ELBO | None = None,
    modes: Tensor | Literal["search"] | None = "search",
    num_transitions: int = EFFORT.num_transitions,
    chunk_size: int = EFFORT.chunk_size,
    max_core_seconds: float = EFFORT.max_core_seconds,
    quantities: Quantities = "auto",
    seed: int | None = None,
    progress: bool = True,
    policy: VerdictPolicy | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Diagnosis:
    r"""Judge how far a fitted guide can be trusted, from the model and the guide alone.

    Four checks of the same draws complement each other:

    * *Importance weights* :math:`p(x, \theta) / q(\theta)` of every guide with a density, an
      injective generator or a semi-implicit distribution. They give Pareto k-hat, the effective
      sample size, a lower bound on the log evidence, and errors of means and standard deviations.
    * *Stein's identities* between the draws and the model's scores. They give errors of means and
      standard deviations along each coordinate and in the worst directions, and a kernel test.
    * *Short HMC* from the draws, which leaves the posterior unchanged. Tails, ridges and necks that
      the guide misses fill again.
    * *Modes*: whether all modes that carry mass have draws.
      :func:`~pyro_implicit.density.find_modes` searches for them from draws of the prior. Mirror
      images of the draws are tried for any number of latent variables.

    The limits of the verdict are the fields of :class:`~pyro_implicit.diagnostics.VerdictPolicy`:

    * "do not trust": k-hat exceeds 0.7, a significant error exceeds 0.25 standard deviations in a
      mean or a factor of 1.25 in a standard deviation, a mode has no draws, the draws have
      collapsed, more than 5 % of the chains of short HMC end beyond all of the guide's draws, or
      the share of a mirror image is wrong by more than 5 %.
    * "check": the same quantities exceed 0.5, 0.1, 1.08 and 2 %; the kernel test rejects
      (p < 0.003, for all latents or for one site); the checks lack power ("cannot tell");
      ``loss`` exceeds the bound by more than half a nat; there is no density; or chains never
      moved or failed in more than 1 % of their trajectories.
    * "trust": everything else. About 1 % of perfect guides get another verdict.

    **Discrete latent variables** that are sampled have no gradient: only importance weights of
    guides with a density, and the chains' own convergence, tell of them.

    Chains of ``refine`` that ended before they converged are judged by their error bounds, with the
    limits of means and standard deviations for "check", and by R-hat: above 1.2 "check", above 1.65
    "do not trust". If more than a tenth of their trajectories failed, they are not trusted.

    If the effective sample size exceeds 90 % of the draws, the kernel test is ignored and k-hat
    leads to "check" above 1 and never to "do not trust": the missing tail has little mass.
    Above 94 % the verdict is never "cannot tell".
    Above 99 % k-hat is ignored: the tail of equal weights has no meaning.

    **Networks** are judged by their predictions, because hidden units have no order and many
    weights give the same function. With ``quantities``, importance weights and short HMC check the
    quantities in place of the latent variables. Stein's identities and modes are skipped.

    **Limits.** No check sees a mode that neither the guide nor the search visited. With more than
    100 latent variables there is no search. Short HMC does not reach necks and tails that are far
    from all draws. Errors below the resolution of ``num_samples`` are invisible. Without importance
    weights, so are the relative weights of separate modes. Errors of the model itself need
    :func:`~pyro_implicit.diagnostics.simulation_based_calibration`.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> _ = pyro.set_rng_seed(0)
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(x, 0.1))
    >>> diagnose(model, AutoNormal(model)).verdict  # never trained
    'do not trust'

    :param model: with all its data: nothing subsampled; or the
        :class:`~pyro_implicit.density.Target` of a model, without further arguments.
    :param guide: a fitted guide of the model; or draws, a dict ``(num_draws, *site_shape)`` by
        site; or the result of :func:`~pyro_implicit.refine`, of an ``MCMC`` or of
        :func:`~pyro_implicit.fit`. Draws have no density; settled chains of ``refine`` need none.
    :param args: positional arguments of both; ``kwargs`` are keyword arguments.
    :param num_samples: the number of draws, by default 2,000, or as many independent draws as
        stored draws are worth.
        Stein's identities use five times as many draws of guides that draw in parallel.
    :param loss: the ELBO that trained the guide, to be compared with the bound.
    :param modes: ``"search"`` finds modes, for at most 100 latent variables and models that
        ``torch.func.vmap`` can run; it takes at least 50 paths of Newton steps. Or modes in
        unconstrained space, ``(num_modes, latent_dim)``; or None to skip the check.
    :param num_transitions: transitions of HMC for each of 500 draws; 0 skips them. Their cost
        dominates: 20 transitions take 160 gradients at 500 points. Models that ``torch.func.vmap``
        cannot run, or that raise errors on the way, have no short HMC.
    :param chunk_size: the number of draws that are evaluated at once; bounds memory.
    :param max_core_seconds: the budget of the model's evaluations in seconds of one core, estimated
        from operation counts and not measured by the clock, so that equal seeds give equal results.
        More expensive checks are reduced or skipped, and the report says so. The density of
        implicit guides is counted, too: it is expensive for hundreds of latent variables, and if
        500 weights exceed the budget, none are computed.
    :param quantities: a function of constrained draws by site, ``(num_draws, *site_shape)``, that
        returns a tensor or a dict of tensors ``(num_draws, *shape)``, which are checked in place of
        the latents, as in :func:`~pyro_implicit.refine`. By default, models of
        :func:`~pyro_implicit.nn.classifier` and :func:`~pyro_implicit.nn.regressor` have their
        predictions checked at up to 50 of the inputs (:class:`~pyro_implicit.nn.FunctionValues`),
        other models their ``"latents"``.
    :param seed: the seed of all random numbers of this call. The caller's random streams do not
        advance; without a seed they are used.
    :param progress: whether to show a progress bar and the estimated time in a terminal.
    :param policy: the limits of the verdict; by default those of
        :class:`~pyro_implicit.diagnostics.VerdictPolicy`.
    :param model_kwargs: keyword arguments of model and guide whose names this function has, too.
    :returns: a :class:`Diagnosis`: print it, or read its ``verdict``, ``findings`` and numbers.
    :raises TypeError: for another order of arguments, or missing ones.
    :raises ValueError: for too few draws, a ``max_core_seconds`` or ``chunk_size`` that is not
        positive, bad ``modes``, a guide that lacks a latent of the model, given draws outside of
        the support of their latent, a subsampled plate, and ``loss`` or ``quantities`` for a model
        whose discrete latents are sampled.

    **References:**

    1. Yao, Vehtari, Simpson and Gelman (2018), *Yes, but Did It Work?: Evaluating Variational
       Inference*.

    2. Vehtari, Simpson, Gelman, Yao and Gabry (2024), *Pareto Smoothed Importance Sampling*.

    3. Liu, Lee and Jordan (2016), *A Kernelized Stein Discrepancy for Goodness-of-fit Tests*.
    """
    refuse_swapped("diagnose", model, guide)
    refuse_nonpositive(max_core_seconds=max_core_seconds)
    refuse_counts(chunk_size=chunk_size)
    refuse_counts(0, num_transitions=num_transitions)
    guide = posterior_of("diagnose", guide)
    kwargs = {**kwargs, **(model_kwargs or {})}
    given = None
    if isinstance(guide, Refined):
        guide = guide.as_guide()
    elif not callable(guide) or hasattr(guide, "get_samples"):
        given = samples_of(guide, "guide")
        guide = StoredDraws(given)
    if isinstance(model, Target):
        if args or kwargs:
            raise TypeError(
                "diagnose got a Target, which has the model's arguments, and further arguments "
                f"{[*args, *kwargs]}. Cure: diagnose(target, guide)"
            )
        target = model
    else:
        target = Target(model, *args, model_kwargs=kwargs, sample_discrete=True)
    dim = target.latent_dim
    least = EFFORT.least_samples
    if num_samples is not None and num_samples < least:
        raise ValueError(f"num_samples must be at least {least}, but got {num_samples}")
    sampler = Sampler(target, guide)
    check_sites(sampler)
    if given is not None:
        refuse_outside(target, given)
    if target.sampled:
        for name, value in (("loss", loss), ("quantities", quantities)):
            if value not in (None, "auto"):
                raise ValueError(
                    f"diagnose cannot use {name}= for a model whose discrete latents are sampled "
                    f"('{target.sampled[0]}'): these checks need gradients. Cure: leave it out"
                )
        return examine_mixed(sampler, num_samples or EFFORT.num_samples, policy or VERDICT)
    warn_of_lost_gradients(target)
    check_modes(modes, dim)
    function = find_quantities(quantities, target.model, target.args, target.kwargs)
    if isinstance(modes, str) and (function is not None or not can_search(target)):
        modes = None
    weight = seconds_of_weights(sampler, max(1, chunk_size // EFFORT.weighed_part))
    wanted, num_stored = num_samples or EFFORT.num_samples, 0
    if isinstance(guide, StoredDraws) and num_samples is None:
        # The tests assume independent draws: repeated ones would show errors that are none.
        if guide.num_independent < min(wanted, guide.num_draws):
            num_stored = guide.num_draws
        wanted = max(least, min(wanted, guide.num_independent))
    effort = plan_effort(
        target,
        wanted,
        num_samples or least,
        num_transitions,
        isinstance(modes, str),
        chunk_size,
        max_core_seconds,
        EFFORT.num_chains if function is None else EFFORT.num_observed_chains,
        weight,
    )
    with watching(progress), single_thread(target.is_small):
        announce("diagnose", effort.seconds)
        found = examine(sampler, effort, modes, loss, chunk_size, function, policy or VERDICT)
    return replace(found, num_stored=num_stored)


def plan_effort(
    target: Target,
    num_samples: int,
    least_samples: int,
    num_transitions: int,
    can_search: bool,
    chunk_size: int,
    max_core_seconds: float,
    num_chains: int = EFFORT.num_chains,
    weight: float = 0.0,
) -> Effort:
    """Reduce the checks to a time budget, from operation counts of the model's log-density.

    Scores and weights, HMC and the mode search may take a third of the budget each; without a
    search, the first two may take a half each.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> plan_effort(Target(model), 2000, 100, 20, False, 500, 60.0)[:3]
    (2000, 4, 20)

    :param target: the posterior; it is evaluated a few times at its initial point.
    :param num_samples: the requested number of draws.
    :param least_samples: the smallest number of draws, whatever the budget.
    :param num_transitions: the requested number of HMC transitions.
    :param can_search: whether the mode search may run.
    :param chunk_size: draws in memory at a time.
    :param max_core_seconds: the budget in seconds of one core, from operation counts.
    :param num_chains: the largest number of HMC chains.
    :param weight: seconds that the guide's density at one draw takes.
    """
    extra = max(0, min(EFFORT.num_scores, MAX_ENTRIES // (num_samples * target.latent_dim) - 1))
    full = Effort(num_samples, extra, num_transitions, None, math.nan)
    try:
        point = target.init_loc
        target.log_prob(nearby(point, 2))  # how the model can be run
        score = target.seconds(chunk_size) / chunk_size
        iteration = seconds_of_climb(target) if can_search else 0.0
    except Exception:  # the model's own, at its start: the draws have others
        return full
    share, spared, unweighed = max_core_seconds / (3 if can_search else 2), [], ""
    least = max(least_samples, min(num_samples, EFFORT.num_chains))
    if weight * least > share:
        cost = f"{weight * least:,.1f} s, more than max_core_seconds allows"
        unweighed = f"{least} of them would take {cost}"
        spared.append("importance weights")
        weight = 0.0
    affordable = int(share / (score + weight / 2))
    if affordable < 2 * num_samples:
        number = max(least, min(num_samples, affordable // 2))
        if number < num_samples:
            spared.append(f"{number} draws of {num_samples}")
        num_samples, extra = number, 0
    extra = min(extra, max(0, affordable // num_samples - 2))
    per_transition = score * min(num_chains, num_samples) * CHECKS.num_leapfrog
    if num_transitions and target.is_vectorized:
        number = min(num_transitions, int(share / per_transition) - EFFORT.num_tuning)
        if number < num_transitions:
            number = number if number >= EFFORT.least_transitions else 0
            spared.append(f"{number} transitions of HMC of {num_transitions}")
        num_transitions = number
    iterations: int | None = 0
    if can_search:
        iterations = int(share / iteration)
        if iterations < SEARCH.least_iterations:
            iterations = 0
            spared.append("no search for modes")
        elif iterations >= EFFORT.usual_iterations:
            iterations = None
    seconds = (score * (2 + extra) + weight) * num_samples
    if num_transitions and target.is_vectorized:
        seconds += per_transition * (num_transitions + EFFORT.num_tuning)
    if can_search:
        seconds += iteration * (EFFORT.usual_iterations if iterations is None else iterations)
    return Effort(
        num_samples, extra, num_transitions, iterations, seconds, tuple(spared), unweighed
    )


def seconds_of_weights(sampler: Sampler, chunk_size: int) -> float:
    """Estimate the seconds of one core that an importance weight takes.

    The density of a semi-implicit site takes Gauss-Newton steps for each draw, which are far more
    expensive than the model for thousands of latent variables. The time is 0 for other guides.

    :param sampler: the guide and its target.
    :param chunk_size: draws at a time.
    """
    target, guide = sampler.target, sampler.guide
    if isinstance(guide, StoredDraws):
        return 0.0

    def seconds(steps: int) -> float:
        return estimated_seconds(
            lambda: weighted_draws(target, guide, num_samples=2, num_steps=steps, num_starts=1),
            chunk_size / 2,
        )

    with same_streams(target.init_loc.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of all draws are shown
        try:
            sites = trace_guide(guide, target.args, target.kwargs).iter_stochastic_nodes()
            if all(find_implicit(site["fn"]) is None for _, site in sites):
                return 0.0
            one = seconds(1)
            step = (seconds(3) - one) / 2
        except Exception:  # the verdict reports it
            return 0.0
    return (one + (BOUNDS.num_steps * BOUNDS.num_starts - 1) * max(0.0, step)) / chunk_size


def check_modes(modes: Tensor | str | None, dim: int) -> None:
    """Check the argument ``modes``."""
    if isinstance(modes, str) and modes != "search":
        raise ValueError(f'modes must be "search", a tensor or None, but got {modes!r}')
    if isinstance(modes, Tensor):
        if modes.dim() != 2 or modes.shape[-1] != dim or not modes.isfinite().all():
            raise ValueError(
                f"modes must be finite points in unconstrained space, (num_modes, {dim}), but got "
                f"shape {tuple(modes.shape)}. Cure: Target(model, ...).unconstrain(...)"
            )


def check_sites(sampler: Sampler) -> None:
    """Check that the guide has every latent site, with the right number of elements."""
    target = sampler.target
    try:
        nodes = trace_guide(sampler.guide, target.args, target.kwargs).nodes
    except BAD_DRAWS:  # the verdict reports them
        return
    for name, value in target.constrain(target.init_loc).items():
        if name not in nodes:
            raise ValueError(
                f"the guide has no site '{name}', which the model samples. Cure: add the site to "
                "the guide, or condition the model on its value"
            )
        shape = nodes[name]["value"].shape
        if shape.numel() != value.numel():
            raise sampler.wrong_shape(name, ("num_draws", *shape), tuple(value.shape))


def refuse_outside(target: Target, draws: dict[str, Tensor]) -> None:
    """Check that draws are in the supports of the model's continuous latents.

    :param draws: draws by site, ``(num_draws, *site_shape)``.
    :raises ValueError: otherwise, with the name of the first such site.
    """
    for name in target.shapes:
        if name in target.sampled:
            continue
        # In float32 the way back loses more than a narrow posterior in a wide support has.
        value, transform = draws[name].double(), target.transforms[name]
        if not is_close(transform(transform.inv(value)), value):
            raise ValueError(
                f"draws of '{name}' are outside of its support in the model. Cure: constrained "
                "values of the same model, as MCMC.get_samples() gives them"
            )


def can_search(target: Target) -> bool:
    return target.latent_dim <= MAX_DENSE_DIM and target.is_vectorized
