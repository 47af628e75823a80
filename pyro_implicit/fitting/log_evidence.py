# SPDX-License-Identifier: Apache-2.0
"""The log evidence of a model by bridge sampling from chains."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.decisions.policy import DECISIONS
from pyro_implicit.density.policy import RUNS, SYMMETRY
from pyro_implicit.density.symmetry import Symmetries, confirmed, find_symmetries
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.policy import DEFAULT
from pyro_implicit.fitting.updating import normal_mixture
from pyro_implicit.mcmc import Refined, refine
from pyro_implicit.ops import bridge, bridge_error
from pyro_implicit.runtime.global_state import with_seed
from pyro_implicit.runtime.sites import is_flat

if TYPE_CHECKING:
    from pyro_implicit.fitting.result import Fit

__all__ = ["LogEvidence", "log_evidence"]


class LogEvidence(NamedTuple):
    r"""The log evidence :math:`\log p(y)` in nats, with its Monte Carlo ``standard_error``."""

    value: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} +- {self.standard_error:.3f}"


@with_seed
def log_evidence(result: Fit, *, seed: int | None = None) -> LogEvidence:
    r"""Estimate the log evidence by bridge sampling between chains and a mixture of normals.

    The mixture is fitted, in unconstrained space, to one half of the chains, and bridges to the
    other half; then the halves swap. Separate modes need no connection, but chains must have found
    them: the error knows nothing of modes without draws.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro_implicit import fit
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> y = torch.tensor(0.5)
    >>> found = log_evidence(fit(model, "auto", y, seed=0, progress=False))
    >>> abs(found.value - dist.Normal(0.0, 2.0 ** 0.5).log_prob(y)) < 0.01
    tensor(True)

    :param result: a result of :func:`~pyro_implicit.fit` with all data. If it has no chains, draws
        of the result start short chains.
    :param seed: the seed of all random numbers of this call. The caller's random streams do not
        advance; without a seed they are used.
    :raises ValueError: for a flat prior, which has no evidence, and for too few draws.

    **References:**

    1. Meng and Wong (1996), *Simulating ratios of normalizing constants via a simple identity: a
       theoretical exploration*.
    2. Overstall and Forster (2010), *Default Bayesian model determination methods for generalised
       linear mixed models* (the proposal).
    """
    with result.own_parameters():
        return _log_evidence(result, result.target)


def _log_evidence(result: Fit, target: Target) -> LogEvidence:
    for name, site in target.trace_at(target.init_loc).nodes.items():
        if name in target.shapes and is_flat(site["fn"]):
            raise ValueError(
                f"the prior of site '{name}' is flat (ImproperUniform), so that the evidence is "
                "unknown. Cure: a proper prior"
            )
    latents = _chains(result, target)
    symmetries = _finite_symmetries(target, latents.flatten(0, 1))
    latents = symmetries.ordered(latents)
    latents = latents[torch.randperm(len(latents), device=latents.device)].double()
    halves = latents.tensor_split(2)
    with torch.no_grad():
        found = [_bridged(target, symmetries, *pair) for pair in (halves, halves[::-1])]
    value = sum(one.value for one in found) / 2
    # The halves' errors depend on each other: each proposal has the errors of the other's draws.
    return LogEvidence(value, sum(one.standard_error for one in found) / 2)


def _chains(result: Fit, target: Target) -> Tensor:
    """Return unconstrained draws, ``(num_chains, num_draws, latent_dim)``."""
    number = DECISIONS.evidence_chains * DECISIONS.evidence_draws
    draws = result.draws_by_chain(number)
    if not isinstance(result.refined, Refined):
        start = {name: value.flatten(0, 1) for name, value in draws.items()}
        refined = refine(
            target.model, start, *target.args, num_chains=DECISIONS.evidence_chains,
            progress=False, model_kwargs=target.kwargs,
        )  # fmt: skip
        draws = refined.get_samples(group_by_chain=True)
    lead = next(iter(draws.values())).shape[:2]
    flat = target.unconstrain({name: value.flatten(0, 1) for name, value in draws.items()})
    return flat.unflatten(0, lead)


def _finite_symmetries(target: Target, draws: Tensor) -> Symmetries:
    """Return the groups of finite size that leave the density unchanged, with keys for draws."""
    draws = draws[torch.randperm(len(draws), device=draws.device)[: SYMMETRY.num_draws]]
    found = confirmed(find_symmetries(target), target, draws)
    return found.finite().keyed(draws)


def _bridged(target: Target, symmetries: Symmetries, learnt: Tensor, others: Tensor) -> LogEvidence:
    """Bridge between a mixture and draws whose units are in order.

    The posterior of ordered units has as many times the density of the posterior as the groups have
    members, and none at other orders.
    """
    proposal = normal_mixture(learnt.flatten(0, 1), DEFAULT.update, None)
    lead = others.shape[:2]

    def ratios(points: Tensor) -> Tensor:
        parts = points.to(target.init_loc).split(RUNS.draws_at_once)
        log_p = torch.cat([target.log_prob(part) for part in parts]).double()
        if symmetries:
            log_p = log_p + symmetries.log_size
            log_p = log_p.masked_fill(~symmetries.is_ordered(points), -math.inf)
        return (log_p - proposal.log_prob(points)).unflatten(0, lead)

    first, second = (
        ratios(others.flatten(0, 1)),
        ratios(proposal.sample(torch.Size((lead.numel(),)))),
    )
    value = bridge(first.flatten(), second.flatten())
    return LogEvidence(value.item(), bridge_error(first, second, value))
