# SPDX-License-Identifier: Apache-2.0
"""The looks of :func:`~pyro_implicit.diagnostics.diagnose` at a guide's draws, as planned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_implicit.density.cost import TracedScore
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.coverage import uncovered_modes
from pyro_implicit.diagnostics.drift import NUM_LEAPFROG, drift_check
from pyro_implicit.diagnostics.effort import NUM_CHAINS, NUM_OBSERVED_CHAINS, Effort
from pyro_implicit.diagnostics.findings import EVEN_WEIGHTS, GOOD_WEIGHTS, KHAT
from pyro_implicit.diagnostics.function_space import Function, Observed, describe
from pyro_implicit.diagnostics.importance import importance_check
from pyro_implicit.diagnostics.labels import coordinate_labels
from pyro_implicit.diagnostics.preparation import (
    BAD_DRAWS,
    log_mean_exp,
    objective_gap,
    search_modes,
    weigh_draws,
)
from pyro_implicit.diagnostics.stein import stein_by_site, stein_check
from pyro_implicit.diagnostics.verdict import Diagnosis
from pyro_implicit.diagnostics.whitening import CollapsedError, Whitened, whiten_draws
from pyro_implicit.guides.auto_implicit import AutoSemiImplicit
from pyro_implicit.guides.posterior_draws import draw, draws_in_parallel
from pyro_implicit.guides.stored_draws import StoredDraws
from pyro_implicit.runtime.printing import steps_of

__all__ = ["WEIGHED_PART", "examine"]

FEW_LOST = 0.005  # of the draws, with which no moment is lost
WEIGHED_PART = 5  # of a chunk, as a weight takes more memory than a score


@torch.no_grad()
def examine(
    density: Target,
    guide: Callable[..., Any],
    effort: Effort,
    modes: Tensor | Literal["search"] | None,
    loss: ELBO | None,
    chunk_size: int,
    function: Function | None,
) -> Diagnosis:
    """Take the looks that the plan grants."""
    model, args, kwargs = density.model, density.args, density.kwargs
    num_samples = effort.num_samples
    report = partial(
        Diagnosis,
        num_samples,
        density.latent_dim,
        labels=coordinate_labels(density),
        semi_implicit=isinstance(guide, AutoSemiImplicit),
        planned_seconds=effort.seconds,
        spared=effort.spared,
    )
    try:
        weighed = max(1, chunk_size // WEIGHED_PART)
        weighted, no_density = weigh_draws(
            model, guide, args, kwargs, num_samples, weighed, effort.unweighed
        )
        points = density.unconstrain(weighted.draws)
        many = points
        if (
            function is None
            and effort.extra
            and draws_in_parallel(guide)
            and not isinstance(guide, StoredDraws)
        ):
            # The noise of scores hides small errors, but not from many draws: they cost little.
            extra = draw(guide, effort.extra * num_samples, *args, **kwargs)
            many = torch.cat([points, density.unconstrain(extra)])
        chunks = many.split(chunk_size)
        calls = len(chunks) + effort.num_transitions * NUM_LEAPFROG
        traced = TracedScore(density.score, calls)
        # Of quantities no score is asked for.
        score = traced if function is None else lambda u: (density.log_prob(u), u[:, :0])
        parts = [score(part) for part in steps_of(chunks, len(chunks), "scores")]
    except BAD_DRAWS as error:
        return report(broken=f"guide or model fails at the guide's draws: {error}")
    log_prob, scores = (torch.cat(part) for part in zip(*parts, strict=True))
    finite = log_prob.isfinite() & scores.isfinite().all(-1) & many.isfinite().all(-1)
    log_weights = weighted.log_weights
    finite[: len(log_weights)] &= log_weights.isfinite()
    left_out = ""
    if not finite.all():
        number = int((~finite).sum())
        reason = f"log-density, score or importance weight is not finite at {number} draws"
        density.log_prob(many[~finite][:1])  # a recording does not say why
        if density.error is not None:
            reason += f", the model fails there: {density.error}".split("\n")[0]
        if number > FEW_LOST * len(finite):
            return report(no_density=no_density, broken=reason)
        left_out, kept = f"{reason}, of {len(finite)}", finite[:num_samples]
        weighted = weighted._replace(log_weights=log_weights[kept[: len(log_weights)]])
        points, many, scores = points[kept], many[finite], scores[finite]
        num_samples = len(points)
    bound = None if no_density else weighted.bound()
    observed = None
    try:
        whitened = whiten_draws(many)
        if function is not None:
            observed = Observed(function, density, points)
            report = partial(report, labels=observed.labels, judged=describe(function))
    except CollapsedError as error:
        return report(bound=bound, no_density=no_density, broken=str(error))
    stein = stein_check(whitened, scores) if observed is None else None
    few = bound is None or bound.effective_sample_size < GOOD_WEIGHTS * num_samples
    if stein is not None and few and len(density.shapes) > 1:
        sizes = {name: shape.numel() for name, shape in density.shapes.items()}
        stein = stein._replace(by_site=stein_by_site(many, scores, sizes))
    importance = drift = coverage = None
    is_even = bound is not None and bound.effective_sample_size >= EVEN_WEIGHTS * num_samples
    if bound is not None and (is_even or bound.khat <= KHAT.distrust):
        seen = whitened.first(num_samples)
        if observed is not None:
            values = observed(points[:num_samples])
            seen = Whitened(values, values.new_zeros(()), values.new_ones(()), None)
        importance = importance_check(seen, weighted.log_weights)
    if effort.num_transitions > 0 and density.is_vectorized:
        number = NUM_CHAINS if function is None else NUM_OBSERVED_CHAINS
        with suppress(*BAD_DRAWS):  # somewhere on the way
            drift = drift_check(
                whitened.first(number),
                traced.log_prob,
                effort.num_transitions,
                chunk_size=chunk_size,
                observe=observed,
                others=whitened.white[number:] if observed is None else None,
            )
    if isinstance(modes, str):
        modes = search_modes(density, effort.search_iterations)
    if modes is not None:
        # Of a guide on many modes, a Gaussian would overstate the volume.
        evidence = log_mean_exp(weighted.log_weights) if bound is not None else None
        coverage = uncovered_modes(modes, points, density, evidence)
    gap = None
    if loss is not None and bound is not None:
        gap = objective_gap(loss, bound, model, guide, args, kwargs)
    return report(
        bound=bound,
        no_density=no_density,
        importance=importance,
        stein=stein,
        drift=drift,
        gap=gap,
        coverage=coverage,
        left_out=left_out,
        **_known(guide),
    )


def _known(guide: Callable[..., Any]) -> dict[str, Any]:
    """What is known of draws beforehand."""
    if not isinstance(guide, StoredDraws):
        return {}
    names = ("settled", "modes_weighed", "doubts")
    return {name: getattr(guide, name) for name in names}
