# SPDX-License-Identifier: Apache-2.0
"""The checks of :func:`~pyro_implicit.diagnostics.diagnose`, as planned by the budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_implicit.density.cost import TracedScore
from pyro_implicit.density.labels import coordinate_labels
from pyro_implicit.density.mirrors import Images, with_images
from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.symmetry import confirmed, find_symmetries
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.checks import (
    SteinCheck,
    drift_check,
    endless_scales,
    importance_check,
    stein_by_site,
    stein_check,
    uncovered_modes,
)
from pyro_implicit.diagnostics.moments import (
    CollapsedError,
    MomentErrors,
    Whitened,
    whiten_draws,
)
from pyro_implicit.diagnostics.policy import CHECKS, EFFORT, MOMENTS, VerdictPolicy
from pyro_implicit.diagnostics.quantities import (
    Function,
    Mixing,
    Observed,
    describe,
    mixing,
    values_of,
)
from pyro_implicit.diagnostics.verdict import STORED, Diagnosis
from pyro_implicit.guides.auto_hierarchical import AutoHierarchical
from pyro_implicit.guides.auto_implicit import AutoSemiImplicit
from pyro_implicit.guides.posterior_draws import draw, draws_in_parallel
from pyro_implicit.guides.sampler import Sampler, StoredDraws
from pyro_implicit.infer.bound import EvidenceBound, WeightedDraws, weighted_draws
from pyro_implicit.ops import LogWeights
from pyro_implicit.ops.jumps import jump_share
from pyro_implicit.ops.policy import EVEN_EFFICIENCY, JUMPS
from pyro_implicit.runtime.global_state import same_streams
from pyro_implicit.runtime.progress import steps_of

__all__ = ["BAD_DRAWS", "Effort", "examine", "examine_mixed"]


class Effort(NamedTuple):
    """Numbers of weighed draws, of further scored draws for each, of transitions of HMC and of
    Newton iterations (None without a limit, 0 for no search); their estimated time; the checks that
    the budget reduced; and the reason if there are no weights.
    """

    num_samples: int
    extra: int
    num_transitions: int
    search_iterations: int | None
    seconds: float
    spared: tuple[str, ...] = ()
    unweighed: str = ""


@torch.no_grad()
def examine(
    sampler: Sampler,
    effort: Effort,
    modes: Tensor | Literal["search"] | None,
    loss: ELBO | None,
    chunk_size: int,
    function: Function | None,
    policy: VerdictPolicy,
) -> Diagnosis:
    """Run the checks that the plan allows."""
    target, guide = sampler.target, sampler.guide
    report = partial(
        Diagnosis,
        effort.num_samples,
        target.latent_dim,
        semi_implicit=isinstance(guide, AutoSemiImplicit),
        spared=effort.spared,
        policy=policy,
    )
    labels, observed, stein, skipped = coordinate_labels(target), None, None, ""
    try:
        found = _evaluate(sampler, effort, chunk_size, is_scored=function is None)
    except _UnusableError as error:
        return report(labels=labels, broken=str(error), no_density=error.no_density)
    report = partial(report, bound=found.bound, no_density=found.no_density)
    try:
        if function is not None:
            observed = Observed(function, target, found.points)
            labels = observed.labels
            report = partial(report, judged=describe(function), mixing=_mixing(function, guide))
        whitened = whiten_draws(found.many)
        if observed is None:
            stein, skipped = _stein(found, whitened, target, policy)
    except CollapsedError as error:
        return report(labels=labels, broken=str(error))
    importance = _importance(found, whitened, observed, policy)
    drift = None
    if effort.num_transitions > 0 and target.is_vectorized:
        number = EFFORT.num_chains if function is None else EFFORT.num_observed_chains
        with suppress(*BAD_DRAWS):  # the model may fail on the way
            drift = drift_check(
                whitened.first(number),
                found.score.log_prob,
                effort.num_transitions,
                chunk_size=chunk_size,
                observe=observed,
                others=whitened.white[number:] if observed is None else None,
            )
    if isinstance(modes, str):
        modes = search_modes(target, effort.search_iterations)
    images = None
    if observed is None:
        with suppress(*BAD_DRAWS):  # the model may fail at an image
            images = _images(target, found.points)
    coverage = gap = None
    if modes is not None:
        # The Gaussian default overstates the volume of a guide with many modes.
        log_evidence = None if found.bound is None else found.weights.log_mean
        coverage = uncovered_modes(target, modes, found.points, log_evidence)
    if loss is not None and found.bound is not None:
        gap = objective_gap(loss, found.bound, sampler)
    return report(
        labels=labels,
        importance=importance,
        stein=stein,
        drift=drift,
        gap=gap,
        coverage=coverage,
        left_out=found.left_out,
        skipped=skipped,
        improper=endless_scales(target, found.points),
        images=images,
        **_known(guide),
    )


def _images(target: Target, points: Tensor) -> Images | None:
    """Return mirror images of one copy of the modes."""
    _, images = with_images(target, points)
    if images is not None and (symmetries := find_symmetries(target)):
        symmetries = confirmed(symmetries, target, points).keyed(points)
        _, images = with_images(target, symmetries.finite().ordered(points), symmetries)
    return images


class _Evaluated(NamedTuple):
    """Draws without those at which a number is not finite, which ``left_out`` describes.

    ``points`` of shape ``(num_samples, latent_dim)`` have importance weights if the guide has a
    density; otherwise ``no_density`` says why not. ``many`` begins with them, and has ``scores``.
    """

    points: Tensor
    many: Tensor
    scores: Tensor
    weights: LogWeights
    bound: EvidenceBound | None
    no_density: str
    left_out: str
    score: TracedScore


class _UnusableError(Exception):
    def __init__(self, reason: str, no_density: str = "") -> None:
        super().__init__(reason)
        self.no_density = no_density


def _evaluate(sampler: Sampler, effort: Effort, chunk_size: int, is_scored: bool) -> _Evaluated:
    """Draw from the guide, and evaluate the weights and the target's scores at the draws.

    :param is_scored: quantities need the log-density only.
    :raises _UnusableError: if the guide or the model fails there, or too few numbers are finite.
    """
    target, guide, num_samples = sampler.target, sampler.guide, effort.num_samples
    try:
        weighed = max(1, chunk_size // EFFORT.weighed_part)
        weighted, no_density = _weigh(sampler, num_samples, weighed, effort.unweighed)
        many = points = target.unconstrain(weighted.draws)
        is_cheap = draws_in_parallel(guide) and not isinstance(guide, StoredDraws)
        if is_scored and effort.extra and is_cheap:
            # The noise of scores hides small errors, but not from many draws.
            extra = _draw(sampler, effort.extra * num_samples)
            many = torch.cat([points, target.unconstrain(extra)])
        chunks = many.split(chunk_size)
        calls = len(chunks) + effort.num_transitions * CHECKS.num_leapfrog
        traced = TracedScore(target.score, calls)
        score = traced if is_scored else lambda u: (target.log_prob(u), u[:, :0])
        parts = [score(part) for part in steps_of(chunks, len(chunks), "scores")]
    except BAD_DRAWS as error:
        raise _UnusableError(f"guide or model fails at the guide's draws: {error}") from error
    log_prob, scores = (torch.cat(part) for part in zip(*parts, strict=True))
    finite = log_prob.isfinite() & scores.isfinite().all(-1) & many.isfinite().all(-1)
    log_weights, left_out = weighted.log_weights, ""
    finite[: len(log_weights)] &= log_weights.isfinite()
    if not finite.all():
        number = int((~finite).sum())
        reason = f"log-density, score or importance weight is not finite at {number} draws"
        target.log_prob(many[~finite][:1])  # a recording does not say why
        if target.error is not None:
            reason += f", the model fails there: {target.error}".split("\n")[0]
        if number > CHECKS.max_lost * len(finite):
            raise _UnusableError(reason, no_density)
        left_out, kept = f"{reason}, of {len(finite)}", finite[:num_samples]
        log_weights = log_weights[kept[: len(log_weights)]]
        weighted = weighted._replace(log_weights=log_weights)
        points, many, scores = points[kept], many[finite], scores[finite]
    weights, bound = LogWeights(log_weights), None if no_density else weighted.bound()
    return _Evaluated(points, many, scores, weights, bound, no_density, left_out, traced)


def _mixing(function: Function, guide: Any) -> Mixing | None:
    if not isinstance(guide, StoredDraws):
        return None
    by_name, shape = values_of(function, guide.samples), (guide.num_chains, -1)
    return mixing({name: value.unflatten(0, shape) for name, value in by_name.items()})


def _stein(
    found: _Evaluated, whitened: Whitened, target: Target, policy: VerdictPolicy
) -> tuple[SteinCheck | None, str]:
    """Return Stein's identities, by site if weights cannot replace them, or why there are none."""
    stein = stein_check(whitened, found.scores)
    if stein.faults or stein.kernel.p_value < MOMENTS.false_alarm:
        white = whitened.white[: EFFORT.num_chains]
        share = jump_share(white, whitened.score_of(target.score))
        if share > CHECKS.max_jumps:
            return None, (
                f"Stein's identities, because the log-density jumps in {share:.0%} of the steps of "
                f"{JUMPS.step:g} sd between draws"
            )
    needed = policy.good_weights * len(found.points)
    few = found.bound is None or found.bound.effective_sample_size < needed
    if few and len(target.shapes) > 1:
        sizes = {name: shape.numel() for name, shape in target.shapes.items()}
        stein = stein._replace(by_site=stein_by_site(found.many, found.scores, sizes))
    return stein, ""


def _importance(
    found: _Evaluated, whitened: Whitened, observed: Observed | None, policy: VerdictPolicy
) -> MomentErrors | None:
    """Compare the draws with their reweighted moments, unless the weights are too uneven."""
    if found.bound is None:
        return None
    number = len(found.points)
    is_even = found.bound.effective_sample_size >= EVEN_EFFICIENCY * number
    if not (is_even or found.bound.khat <= policy.khat.distrust):
        return None
    seen = whitened.first(number)
    if observed is not None:
        values = observed(found.points)
        seen = Whitened(values, values.new_zeros(()), values.new_ones(()), None)
    return importance_check(seen, found.weights)


def examine_mixed(sampler: Sampler, num_samples: int, policy: VerdictPolicy) -> Diagnosis:
    """Judge draws with discrete latent variables, for which the checks have no gradients."""
    target, guide = sampler.target, sampler.guide
    names = ", ".join(f"'{name}'" for name in target.sampled)
    if isinstance(guide, StoredDraws):
        num_samples = min(num_samples, guide.num_draws)
    report = partial(
        Diagnosis,
        num_samples,
        target.latent_dim,
        skipped=f"Stein's identities, short HMC, modes: the discrete latents {names} have no "
        "gradient",
        policy=policy,
        **_known(guide),
    )
    try:
        weighted, no_density = _weigh(sampler, num_samples, num_samples, "")
        points = target.unconstrain(weighted.draws)
        if no_density:
            is_lost = not target.log_prob(points).isfinite().all()
            broken = "the log-density is not finite at some draws" if is_lost else ""
            return report(no_density=no_density, broken=broken)
        bound, importance = weighted.bound(), None
        # A flag may have one value in all draws, and flags may be functions of others.
        varies = (points != points[:1]).any(0)
        labels = coordinate_labels(target)
        labels = tuple(label for label, one in zip(labels, varies, strict=True) if one)
        if bound.khat <= policy.khat.distrust:
            whitened = whiten_draws(points[:, varies], full=False)
            importance = importance_check(whitened, LogWeights(weighted.log_weights))
    except BAD_DRAWS as error:
        return report(broken=f"guide or model fails at the guide's draws: {error}")
    return report(bound=bound, importance=importance, labels=labels)


def _known(guide: Callable[..., Any]) -> dict[str, Any]:
    if not isinstance(guide, StoredDraws):
        return {"automatic": getattr(guide, "made_by_fit", False)}
    names = ("settled", "modes_weighed", "doubts")
    return {name: getattr(guide, name) for name in names} | {"chains": guide.drift}


#: Errors that a guide or a model raises at bad numbers.
BAD_DRAWS = (ValueError, ArithmeticError, torch.linalg.LinAlgError)


def _draw(sampler: Sampler, num_samples: int) -> dict[str, Tensor]:
    return draw(sampler.guide, num_samples, *sampler.target.args, **sampler.target.kwargs)


def _weigh(
    sampler: Sampler, num_samples: int, chunk_size: int, unweighed: str
) -> tuple[WeightedDraws, str]:
    stored = StoredDraws, AutoHierarchical
    reason = STORED if isinstance(sampler.guide, stored) else unweighed
    if not reason:
        try:
            weighted = weighted_draws(
                sampler.target, sampler.guide, num_samples=num_samples, chunk_size=chunk_size
            )
            return weighted, ""
        except ValueError as error:
            reason = str(error).split("\n")[0]
    return WeightedDraws(torch.empty(0), _draw(sampler, num_samples)), reason


def search_modes(target: Target, num_iterations: int | None = None) -> Tensor | None:
    """Return the modes, or None if the model cannot run at draws of its prior."""
    if num_iterations == 0:
        return None
    options: dict[str, Any] = {}
    if num_iterations is not None:
        options = {"max_rounds": 1, "max_iterations": num_iterations}
    with same_streams(target.init_loc.device):
        try:
            return find_modes(target, **options).loc
        except (*BAD_DRAWS, RuntimeError):
            return None


def objective_gap(
    loss: ELBO,
    bound: EvidenceBound,
    sampler: Sampler,
) -> tuple[float, float]:
    """Return the objective minus the bound, and its standard error."""
    target, num = sampler.target, CHECKS.num_losses
    source = target.model, sampler.guide, *target.args
    try:
        losses = [loss.loss(*source, **target.kwargs) for _ in range(num)]
    except (ArithmeticError, torch.linalg.LinAlgError):
        return math.nan, math.nan
    values = -torch.tensor(losses)
    error = math.hypot(values.std().item() / math.sqrt(num), bound.standard_error)
    return values.mean().item() - bound.value, error
