# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a fitted guide from the model and the guide alone."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_implicit.density.checks.numerics import warn_of_lost_gradients
from pyro_implicit.density.cost import estimated_seconds, nearby, seconds_near
from pyro_implicit.density.mode_search import seconds_of_climb
from pyro_implicit.density.policy import MAX_DENSE_DIM
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.examination import (
    BAD_DRAWS,
    Effort,
    examine,
    weigh,
)
from pyro_implicit.diagnostics.policy import CHECKS, EFFORT, MOMENTS, VERDICT, VerdictPolicy
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
from pyro_implicit.mcmc import Refined
from pyro_implicit.runtime.locks import in_turn
from pyro_implicit.runtime.printing import announce, showing_progress
from pyro_implicit.runtime.random_stream import same_streams

__all__ = ["diagnose", "plan_effort"]


@in_turn
@torch.no_grad()
def diagnose(
    model: Callable[..., Any] | Target,
    guide: Callable[..., Any] | Mapping[str, Tensor] | Refined,
    *args: Any,
    num_samples: int | None = None,
    loss: ELBO | None = None,
    modes: Tensor | Literal["search"] | None = "search",
    num_transitions: int = 20,
    chunk_size: int = 500,
    max_seconds: float = 60.0,
    quantities: Quantities = "auto",
    progress: bool = True,
    policy: VerdictPolicy | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Diagnosis:
    r"""Says how far a fitted guide can be trusted, from the model and the guide alone.

    Four looks at the same draws, each blind to something that another one sees:

    * *Importance weights* :math:`p(x, \theta) / q(\theta)`, of every guide with a density, an
      injective generator or a semi-implicit distribution: their tail index k-hat, their effective
      sample size, the bound on the log evidence, and what they would correct in means and standard
      deviations. They see the shape of what the guide visits, in all its dimensions at once.
    * *Stein's identities* between draws and the model's scores: means and standard deviations
      along each coordinate and in the worst directions, and a kernel test of everything else.
    * *Short HMC* from the draws: the posterior would stay as it is. Tails, ridges and necks that
      the guide cut off fill again, and some chains end beyond all of its draws.
    * *Modes*: whether those that carry mass have draws. They are searched from many draws of the
      prior by :func:`~pyro_implicit.density.find_modes`, whatever the guide visited.

    The verdict is "do not trust" if k-hat exceeds 0.7, if a significant error exceeds a quarter of
    a standard deviation in a mean or a factor of 1.25 in a standard deviation, if a mode is
    uncovered or if the draws are degenerate; "check" at 0.5, a tenth and 1.08, if the kernel test
    rejects (p < 0.003; of all latents, or of one site by itself), if the weights are worth so few
    draws that they would not show errors above the first limits, nor would short HMC ("cannot
    tell"; never where the effective sample size is above 94 %), if ``loss`` exceeds the certified
    bound by more than half a nat, if there is no density, or if chains did not settle, never moved
    or failed in more than 1 % of their trajectories; else "trust". Chains of short HMC that end
    beyond all of the guide's draws, if that is no chance, are "check" above 1 % and "do not trust"
    above 5 %. Where the effective sample size is above 90 % of the draws, the kernel test does not
    count and k-hat leads to "check" at 0.7 and no further: the tail that is missing has next to no
    mass. Above 99 % it is ignored, as the tail of weights that are all the same means nothing. Of
    k-hat these are the limits of the literature; those of the moments mark what changes a plot, and
    what changes a conclusion. A perfect guide gets less than "trust" in about 1 % of all cases.

    **Networks** are judged by their predictions: hidden units have no order, so that a guide on one
    of their many orders has lost no mode, and weights that are too narrow each by itself may still
    make the right functions. With ``quantities`` importance weights and short HMC look at these in
    place of the latents; k-hat only says whether the weights may speak, and Stein's identities and
    modes, which are the latents', are left out. Without power in either look it is "cannot tell".

    **What no diagnostic sees:** a mode that neither the guide nor any way up from the prior's draws
    ever visited, and, of more than 100 latents, any that was not given; a funnel's neck or a tail
    so far from all draws that short HMC does not reach it, when the draws end there without a
    trace; errors below the resolution of ``num_samples``; and a model that is not the one that was
    meant (see :func:`~pyro_implicit.diagnostics.simulation_based_calibration` for errors of the
    whole chain of model, data and fit). Without importance weights the relative weights of
    separated modes are invisible, too.

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
    :param guide: a fitted guide of it; or draws, a dict ``(num_draws, *site_shape)`` by site, or
        what :func:`~pyro_implicit.refine` or an ``MCMC`` gave: these have no density, which chains
        of ``refine`` that had settled need not have. What :func:`~pyro_implicit.fit` returned
        stands for its ``posterior``.
    :param args: the arguments of both, as ``kwargs``.
    :param num_samples: draws of the guide, by default 2,000; up to 300 latents more than twice as
        many as these, and above each coordinate is scaled by itself. Stein's identities get
        five times as many of guides that draw in parallel.
    :param loss: the ELBO it was trained by, to be compared with the certified bound.
    :param modes: ``"search"`` finds them, where there are at most 100 latents and
        ``torch.func.vmap`` can run the model: that takes at least 50 paths of Newton steps, each
        with its Hessian, and draws no random numbers from the caller's stream. Or points in
        unconstrained space, ``(num_modes, latent_dim)``, tops of the density from as many starts
        as possible; or None to skip them.
    :param num_transitions: transitions of HMC for each of 500 draws; 0 to skip them. They are the
        dearest part: 20 of them take 160 gradients of the model at 500 points. Models that
        ``torch.func.vmap`` cannot run, or that raise errors on the way, are spared them.
    :param chunk_size: draws at a time, to bound the memory.
    :param max_seconds: that the model's evaluations may take on one core, as estimated by their
        operations, so that equal seeds give equal results. What would take longer is cut down or
        left out, and the report says so. The density of implicit guides is counted, too: it is
        dear in hundreds of latents, and if 500 weights are too dear there are none. That of other
        guides is not.
    :param quantities: of a dict of constrained draws by site, ``(num_draws, *site_shape)``, a
        tensor or a dict of tensors ``(num_draws, *shape)``, whose errors are looked for, as in
        :func:`~pyro_implicit.refine`. By default ``"latents"``, but for a model of
        :func:`~pyro_implicit.nn.classifier` or :func:`~pyro_implicit.nn.regressor` its predictions
        at up to 50 of the inputs (:class:`~pyro_implicit.nn.FunctionValues`).
    :param progress: whether to show a bar, with the estimate, where there is a terminal.
    :param policy: the limits of the verdict; by default those of
        :class:`~pyro_implicit.diagnostics.VerdictPolicy`.
    :param model_kwargs: keyword arguments of model and guide whose names this function has, too.
    :returns: a :class:`Diagnosis`: print it, or read its ``verdict``, ``findings`` and numbers.
        However bad the draws are, there is one.
    :raises TypeError: for another order of arguments, or missing ones.
    :raises ValueError: for too few draws, bad ``modes``, a guide that lacks a latent of the model,
        or a subsampled plate.

    **References:**

    1. Yao, Vehtari, Simpson and Gelman (2018), *Yes, but Did It Work?: Evaluating Variational
       Inference*.

    2. Vehtari, Simpson, Gelman, Yao and Gabry (2024), *Pareto Smoothed Importance Sampling*.

    3. Liu, Lee and Jordan (2016), *A Kernelized Stein Discrepancy for Goodness-of-fit Tests*.
    """
    refuse_swapped("diagnose", model, guide)
    guide = posterior_of("diagnose", guide)
    kwargs = {**kwargs, **(model_kwargs or {})}
    if isinstance(guide, Refined):
        guide = guide.as_guide()
    elif not callable(guide) or hasattr(guide, "get_samples"):
        guide = StoredDraws(samples_of(guide, "guide"))
    if isinstance(model, Target):
        if args or kwargs:
            raise TypeError(
                "diagnose got a Target, which has the model's arguments, and further arguments "
                f"{[*args, *kwargs]}. Cure: diagnose(target, guide)"
            )
        target = model
    else:
        target = Target(model, *args, model_kwargs=kwargs)
    dim = target.latent_dim
    # Above, each coordinate is scaled by itself.
    least = max(EFFORT.least_samples, 2 * dim + 1 if dim <= MOMENTS.max_full_dim else 0)
    if num_samples is not None and num_samples < least:
        raise ValueError(
            f"num_samples must be at least {least} ({EFFORT.least_samples}, and more than twice "
            f"the {dim} latents up to {MOMENTS.max_full_dim}), but got {num_samples}"
        )
    warn_of_lost_gradients(target)
    check_modes(modes, dim)
    sampler = Sampler(target, guide)
    check_sites(sampler)
    function = find_quantities(quantities, target.model, target.args, target.kwargs)
    if isinstance(modes, str) and (function is not None or not can_search(target)):
        modes = None
    weight = seconds_of_weights(sampler, max(1, chunk_size // EFFORT.weighed_part))
    effort = plan_effort(
        target,
        num_samples or EFFORT.num_samples,
        num_samples or least,
        num_transitions,
        isinstance(modes, str),
        chunk_size,
        max_seconds,
        EFFORT.num_chains if function is None else EFFORT.num_observed_chains,
        weight,
    )
    with showing_progress(progress):
        announce("diagnose", effort.seconds)
        return examine(sampler, effort, modes, loss, chunk_size, function, policy or VERDICT)


def plan_effort(
    target: Target,
    num_samples: int,
    least_samples: int,
    num_transitions: int,
    can_search: bool,
    chunk_size: int,
    max_seconds: float,
    num_chains: int = EFFORT.num_chains,
    weight: float = 0.0,
) -> Effort:
    """Cut what was asked for to a budget, by the operations of the model's log-density.

    Scores and weights, HMC and the search for modes may take a third of the budget each, and the
    first two a half where there is no search.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> plan_effort(Target(model), 2000, 100, 20, False, 500, 60.0)[:3]
    (2000, 4, 20)

    :param target: the posterior; it is evaluated a few times at its start.
    :param num_samples: wanted.
    :param least_samples: so many in any case.
    :param num_transitions: wanted.
    :param can_search: whether modes are to be searched for.
    :param chunk_size: draws at a time.
    :param max_seconds: of one core, as counted.
    :param num_chains: of HMC, at most.
    :param weight: seconds of the guide's density at one draw.
    """
    extra = max(
        0, min(EFFORT.num_scores, EFFORT.max_numbers // (num_samples * target.latent_dim) - 1)
    )
    full = Effort(num_samples, extra, num_transitions, None, math.nan)
    try:
        point = target.init_loc
        target.log_prob(nearby(point, 2))  # how the model can be run
        one_by_one = not target.is_vectorized
        rows = min(chunk_size, EFFORT.timed_points) if one_by_one else chunk_size
        score = seconds_near(target.score, point, rows, one_by_one) / rows
        iteration = seconds_of_climb(target) if can_search else 0.0
    except Exception:  # the model's own, at its start: the draws have others
        return full
    share, spared, unweighed = max_seconds / (3 if can_search else 2), [], ""
    least = max(least_samples, min(num_samples, EFFORT.num_chains))
    if weight * least > share:
        cost = f"{weight * least:,.1f} s, more than max_seconds grants"
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
        if iterations < EFFORT.least_iterations:
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

    The density of a semi-implicit site takes Gauss-Newton steps for each draw, which in thousands
    of latents are far dearer than the model. Counted at a few draws and steps, it is 0 of guides
    that have a density at hand, or none at all.

    :param sampler: the guide and its target.
    :param chunk_size: draws at a time.
    """
    target, guide = sampler.target, sampler.guide
    if isinstance(guide, StoredDraws):
        return 0.0
    defaults = inspect.signature(weighted_draws).parameters
    num_steps = defaults["num_steps"].default * defaults["num_starts"].default

    def seconds(steps: int) -> float:
        return estimated_seconds(
            lambda: weigh(sampler, num_samples=2, num_steps=steps, num_starts=1), chunk_size / 2
        )

    with same_streams(target.init_loc.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of all draws are shown
        try:
            sites = trace_guide(guide, target.args, target.kwargs).iter_stochastic_nodes()
            if all(find_implicit(site["fn"]) is None for _, site in sites):
                return 0.0
            one = seconds(1)
            step = (seconds(3) - one) / 2
        except Exception:  # of which the verdict is going to tell
            return 0.0
    return (one + (num_steps - 1) * max(0.0, step)) / chunk_size


def check_modes(modes: Tensor | str | None, dim: int) -> None:
    """Refuse an unknown word, and what are no points."""
    if isinstance(modes, str) and modes != "search":
        raise ValueError(f'modes must be "search", a tensor or None, but got {modes!r}')
    if isinstance(modes, Tensor):
        if modes.dim() != 2 or modes.shape[-1] != dim or not modes.isfinite().all():
            raise ValueError(
                f"modes must be finite points in unconstrained space, (num_modes, {dim}), but got "
                f"shape {tuple(modes.shape)}. Cure: Target(model, ...).unconstrain(...)"
            )


def check_sites(sampler: Sampler) -> None:
    """Refuse a guide that lacks a latent site, or has another number of its elements."""
    target = sampler.target
    try:
        nodes = trace_guide(sampler.guide, target.args, target.kwargs).nodes
    except BAD_DRAWS:  # of which the verdict is going to tell
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


def can_search(target: Target) -> bool:
    """Whether there is a way to look for modes."""
    return target.latent_dim <= MAX_DENSE_DIM and target.is_vectorized
