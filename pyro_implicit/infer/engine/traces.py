# SPDX-License-Identifier: Apache-2.0
"""What ``Trace_ELBO`` reads in a trace, filled in and weighted."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.util import is_identically_zero, scale_and_mask, sum_rightmost
from pyro.infer.trace_elbo import _compute_log_r
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.model import refuse_subsampling
from pyro_implicit.distributions import find_implicit

__all__ = [
    "apply_weights",
    "coverage_log_weights",
    "leave_out_impossible",
    "log_weights",
    "loss_and_surrogate",
    "set_score_parts",
]


def set_score_parts(site: dict[str, Any], parts: ScoreParts, log_abs_det: Tensor | float) -> None:
    """Give a sample site of the guide score parts, as ``Trace.compute_score_parts`` would.

    :param site: the site, whose scale and mask apply.
    :param parts: those of the implicit distribution at the root of the site's distribution.
    :param log_abs_det: log-determinant of the transforms that follow, of the site's batch shape.
    """
    batch_ndim = len(site["fn"].batch_shape)

    def to_site(term: Tensor) -> Tensor:
        return sum_rightmost(term, term.dim() - batch_ndim)

    score_function = parts.score_function
    if isinstance(score_function, Tensor):
        score_function = to_site(score_function)
    parts = ScoreParts(
        to_site(parts.log_prob) - log_abs_det,
        score_function,
        to_site(parts.entropy_term) - log_abs_det,
    ).scale_and_mask(site["scale"], site["mask"])
    site["score_parts"] = parts
    site["log_prob"] = parts.log_prob
    site["log_prob_sum"] = parts.log_prob.sum()


def apply_weights(
    model_trace: Trace,
    guide_trace: Trace,
    prior_weight: float,
    entropy_weight: float,
    inverse_temperature: float,
) -> None:
    """Weigh log-prior and entropy, and temper what the model says.

    A guide's Delta carries the prior's change of variables.

    :param model_trace: with log-probabilities.
    :param guide_trace: with score parts.
    """
    for trace in (model_trace, guide_trace):
        for site in trace.nodes.values():
            if site["type"] != "sample":
                continue
            if site["is_observed"]:
                weight = inverse_temperature
            elif trace is model_trace or isinstance(site["fn"], dist.Delta):
                weight = inverse_temperature * prior_weight
            else:
                weight = entropy_weight
            if not isinstance(weight, Tensor) and weight == 1.0:
                continue
            site["log_prob"] = scale_and_mask(site["log_prob"], weight)
            site["log_prob_sum"] = site["log_prob_sum"] * weight
            if "score_parts" in site:
                site["score_parts"] = site["score_parts"].scale_and_mask(weight)


def log_weights(model_trace: Trace, guide_trace: Trace, num_particles: int) -> Tensor:
    """log p(x, theta) - log q(theta) of each particle, ``(num_particles,)``."""
    total: Any = 0.0
    for trace, sign in ((model_trace, 1), (guide_trace, -1)):
        for site in trace.nodes.values():
            if site["type"] == "sample":
                total = total + sign * site["log_prob"].reshape(num_particles, -1).sum(-1)
    return total


def coverage_log_weights(model_trace: Trace, guide_trace: Trace, num_particles: int) -> Tensor:
    """log p(x, theta) - log q(theta) of each particle, constants; with all of the guide scaled by s
    (``poutine.scale``) the target is p to the power of its own scales over s.

    :returns: ``(num_particles,)``.
    :raises ValueError: for traces of which these are not the weights of one posterior: subsampled
        data, a guide with latents that are not injective, or with several scales.
    """
    for trace in (model_trace, guide_trace):
        refuse_subsampling(trace, "InjectiveELBO's coverage")
    scales = set()
    for name, site in guide_trace.nodes.items():
        if site["type"] != "sample" or isinstance(site["fn"], dist.Delta):
            continue
        if find_implicit(site["fn"]) is None:
            raise ValueError(
                f"coverage weighs the paths of injective draws, but site '{name}' of the guide is "
                f"{type(site['fn']).__name__}. Cure: coverage=0, or one AutoImplicit guide of all "
                "latents"
            )
        scales.add(site["scale"] if isinstance(site["scale"], float) else float(site["scale"]))
    if len(scales) > 1:
        raise ValueError(
            f"coverage wants one scale for the whole guide, but its sites have {sorted(scales)}. "
            "Cure: coverage=0, or poutine.scale around the whole guide"
        )
    return log_weights(model_trace, guide_trace, num_particles).detach() / scales.pop()


def leave_out_impossible(
    model_trace: Trace, guide_trace: Trace, num_particles: int
) -> Tensor | None:
    """Let traces count only the particles at which the model's log-density is finite.

    :returns: those that are left out, ``(num_particles,)``; None if that are none or all, of which
        nothing is left out.
    """
    impossible = ~log_weights(model_trace, Trace(), num_particles).isfinite()
    num_left = num_particles - int(impossible.sum())
    if num_left in (0, num_particles):
        return None

    def of_the_others(term: Any) -> Any:
        if not isinstance(term, Tensor) or term.dim() == 0 or len(term) != num_particles:
            return term
        mask = impossible.reshape((-1,) + (1,) * (term.dim() - 1))
        return term.masked_fill(mask, 0.0) * (num_particles / num_left)

    for trace in (model_trace, guide_trace):
        for site in _samples(trace):
            site["log_prob"] = of_the_others(site["log_prob"])
            site["log_prob_sum"] = site["log_prob"].sum()
            if "score_parts" in site:
                site["score_parts"] = ScoreParts(*map(of_the_others, site["score_parts"]))
    return impossible


def loss_and_surrogate(model_trace: Trace, guide_trace: Trace) -> tuple[Tensor, Tensor]:
    """Of the sum over all particles in the traces: the negative ELBO, a constant, and a term whose
    gradient is the estimator's.

    As Pyro's ``Trace_ELBO`` has it, but that nothing is read from the device.

    :param model_trace: with log-probabilities.
    :param guide_trace: with score parts.
    """
    loss: Any = 0.0
    surrogate: Any = 0.0
    log_r = None
    for site in _samples(model_trace):
        loss = loss - site["log_prob_sum"].detach()
        surrogate = surrogate - site["log_prob_sum"]
    for site in _samples(guide_trace):
        parts = site["score_parts"]
        loss = loss + torch.as_tensor(site["log_prob_sum"]).detach()
        if not is_identically_zero(parts.entropy_term):
            surrogate = surrogate + parts.entropy_term.sum()
        if not is_identically_zero(parts.score_function):
            if log_r is None:
                log_r = _compute_log_r(model_trace, guide_trace)
            downstream = log_r.sum_to(site["cond_indep_stack"])
            surrogate = surrogate - (downstream * parts.score_function).sum()
    return torch.as_tensor(loss), torch.as_tensor(surrogate)


def _samples(trace: Trace) -> list[dict[str, Any]]:
    return [site for site in trace.nodes.values() if site["type"] == "sample"]
