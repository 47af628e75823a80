# SPDX-License-Identifier: Apache-2.0
"""Checks of draws: importance weights, Stein identities, short HMC, coverage of modes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.moments import (
    CollapsedError,
    Fault,
    MomentErrors,
    Resolution,
    Whitened,
    moment_errors,
    whiten_draws,
)
from pyro_implicit.diagnostics.policy import CHECKS, MOMENTS
from pyro_implicit.ops import LogWeights, gaussian_entropy
from pyro_implicit.ops.ensemble_hmc import ChainState, ensemble_move, score_of
from pyro_implicit.ops.score_estimators import SteinTest, stein_test
from pyro_implicit.runtime.printing import short_repr, steps_of

__all__ = [
    "DriftCheck",
    "ModeCoverage",
    "SteinCheck",
    "drift_check",
    "importance_check",
    "stein_by_site",
    "stein_check",
    "uncovered_modes",
]


@torch.no_grad()
def importance_check(draws: Whitened, log_weights: LogWeights) -> MomentErrors:
    r"""Return errors of a guide's moments from its Pareto-smoothed importance weights.

    Reliable for k-hat below 0.7, in regions where the guide has draws.

    **Example:**

    >>> from pyro_implicit.diagnostics.moments import whiten_draws
    >>> _ = torch.manual_seed(0)
    >>> u = 0.8 * torch.randn(2000, 1)
    >>> log_weights = LogWeights((-0.5 * u.square() + 0.5 * (u / 0.8).square()).squeeze(-1))
    >>> importance_check(whiten_draws(u), log_weights).sd_ratios[0] < 0.9
    True

    :param draws: whitened draws of the guide in unconstrained space, ``(num_draws, latent_dim)``.
    :param log_weights: :math:`\log p(x, \theta) - \log q(\theta)` at the draws.
    :returns: errors of means and standard deviations in any tested direction.
    """
    white = draws.white - draws.white.mean(0)  # not exactly 0 for a part of the draws
    weights = len(white) * log_weights.shares.to(white)
    mean = (weights.unsqueeze(-1) * white).mean(0)
    centered = white - mean
    weighted = weights.unsqueeze(-1) * centered
    # In the mean, the first is that of the posterior, and the products sum to the difference of
    # covariances. What is added to them has mean 0: it follows the noise of the weights' sum.
    products = [(1.0, white, white), (-1.0, weighted, centered)]
    unit = white if draws.axes is None else None
    shifts = weighted - white + mean
    return moment_errors(shifts, products, draws.axes, MOMENTS.false_alarm, weights - 1, unit)


class SteinCheck(NamedTuple):
    """What :func:`stein_check` found.

    ``mean_error`` is the largest significant error of a mean in the guide's standard deviations, 0
    if there is none; ``sd_ratios`` the smallest and largest significant ratio of the guide's
    standard deviation to the posterior's in any direction, 1 if there is none; ``kernel`` the
    kernel test; ``faults`` and ``resolution`` those of the moments; ``by_site`` the kernel test's
    p-values of single sites, see :func:`stein_by_site`.
    """

    mean_error: float
    sd_ratios: tuple[float, float]
    kernel: SteinTest
    faults: tuple[Fault, ...] = ()
    resolution: Resolution = Resolution()
    by_site: tuple[tuple[str, float], ...] = ()


@torch.no_grad()
def stein_check(draws: Whitened, scores: Tensor) -> SteinCheck:
    r"""Test draws of a guide by Stein's identities, in the units of the draws' own covariance.

    Of the score s of the posterior and its draws u,

    .. math:: E[s] = 0, \qquad -E[s\, (u - E u)^\top] = I.

    For Gaussians the first is the error of the mean, and along any direction the second is the
    squared ratio of the guide's standard deviation to the posterior's given all other directions:
    the largest one, of the direction that a guide overestimates most, and the smallest one are
    reported, with those of the coordinates. :func:`~pyro_implicit.ops.score_estimators.stein_test`
    asks the same of all functions of a reproducing kernel Hilbert space.

    A guide that has converged fulfils the identities that belong to its own parameters, whatever
    the posterior: no test of means and variances finds fault with a fitted
    ``AutoMultivariateNormal``. And no score knows the weights of separated modes, or of a mode that
    no draw has met.

    **Example:**

    >>> from pyro_implicit.diagnostics.moments import whiten_draws
    >>> _ = torch.manual_seed(0)
    >>> u = 0.7 * torch.randn(2000, 3)
    >>> stein_check(whiten_draws(u), -u).sd_ratios[0] < 0.8
    True

    :param draws: independent, in unconstrained space, whitened: ``(num_draws, latent_dim)``.
    :param scores: gradients of the model's log-density by the unconstrained latents, of the same
        shape.
    :returns: errors and kernel test.

    **References:**

    1. Liu, Lee and Jordan (2016), *A Kernelized Stein Discrepancy for Goodness-of-fit Tests*.
    """
    white, white_scores = draws.white, draws.scores(scores)
    minus_one = -torch.ones_like(white[:, 0])
    products = [(-1.0, white_scores, white)]
    errors = moment_errors(
        white_scores, products, draws.axes, MOMENTS.false_alarm, minus_one, to_ratio=_ratio
    )
    keep = slice(0, None, -(-len(white) // CHECKS.kernel_draws))
    return SteinCheck(
        errors.mean_error,
        errors.sd_ratios,
        stein_test(white[keep], white_scores[keep]),
        errors.faults,
        errors.resolution,
    )


@torch.no_grad()
def stein_by_site(
    draws: Tensor, scores: Tensor, sizes: Mapping[str, int]
) -> tuple[tuple[str, float], ...]:
    r"""The kernel test of each site by itself, where that of all latents at once has no power.

    The score of some of the latents has the mean, given them, of the score of their marginal
    density, so that the identity of Stein holds for functions of these latents alone, with the
    scores of the joint density. Of more than 30 sites those with the largest mean scores are
    tested; the p-values are for all of them.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> u = torch.randn(500, 2)
    >>> scores = torch.stack([-u[:, 0], 0.5 - u[:, 1]], -1)
    >>> stein_by_site(u, scores, {"right": 1, "wrong": 1})[0]
    ('wrong', 0.001...)

    :param draws: independent, in unconstrained space, ``(num_draws, latent_dim)``.
    :param scores: gradients of the model's log-density, of the same shape.
    :param sizes: how many latents each site has, in their order.
    :returns: site and p-value, times the number of sites, the smallest first.
    """
    keep = slice(0, None, -(-len(draws) // CHECKS.site_draws))
    sds = draws.std(0)
    numbers = list(sizes.values())
    shifts = (scores * sds).mean(0).square().split(numbers)
    parts = (whole[keep].split(numbers, -1) for whole in (draws, scores))
    found = [
        (shift.sum().item(), name, part, score)
        for shift, name, part, score in zip(shifts, sizes, *parts, strict=True)
    ]
    found.sort(key=lambda one: -one[0])
    p_values = {}
    for _, name, part, score in found[: CHECKS.max_sites]:
        try:
            site = whiten_draws(part)
        except CollapsedError:  # of so few draws
            continue
        site_scores = site.scores(score)
        p_value = stein_test(site.white, site_scores).p_value
        if p_value < CHECKS.suspect:
            number = math.ceil(2 * len(sizes) / MOMENTS.false_alarm)  # to tell it from larger ones
            p_value = stein_test(site.white, site_scores, number).p_value
        p_values[name] = min(1.0, len(sizes) * p_value)
    return tuple(sorted(p_values.items(), key=lambda pair: pair[1]))


def _ratio(excess: float) -> float:
    return math.sqrt(max(0.0, 1 + excess))


class DriftCheck(NamedTuple):
    """What :func:`drift_check` found: drifts of means and standard deviations as errors of the
    guide, the share of accepted moves, ``acceptance``, and the share ``escaped`` of chains that end
    farther out than any draw of the guide, 0 where that may be chance.
    """

    mean_error: float
    sd_ratios: tuple[float, float]
    acceptance: float
    faults: tuple[Fault, ...] = ()
    resolution: Resolution = Resolution()
    escaped: float = 0.0


@torch.no_grad()
def drift_check(
    draws: Whitened,
    log_prob: Callable[[Tensor], Tensor],
    num_transitions: int = 20,
    chunk_size: int = 500,
    observe: Callable[[Tensor], Tensor] | None = None,
    others: Tensor | None = None,
) -> DriftCheck:
    r"""Move draws by a few transitions that leave the posterior unchanged.

    Were the draws the posterior's, their distribution would stay. What drifts is wrong, and by at
    least so much: a neck of a funnel or a tail that the guide has cut off fills again. The chains
    are far too short to reach a mode that lies apart, or to right the weights of two of them.

    Moments of heavy tails are noisy, and importance weights do not see a tail that has no draws.
    So chains are counted that end farther from the centre than all of many other draws: of n chains
    and m others, all from the posterior, the k outermost are all chains in a share of
    :math:`\binom{n}{k} / \binom{n+m}{k}` of all cases.

    The frame is that of the draws' covariance. Each move of each chain draws its own step, up to
    the largest one of which about 80 % are accepted and down to a thirtieth of it, so that narrow
    places can be entered. A step to where there is no density is rejected.

    **Example:**

    >>> from pyro_implicit.diagnostics.moments import whiten_draws
    >>> _ = torch.manual_seed(0)
    >>> log_prob = lambda u: -0.5 * u.square().sum(-1)
    >>> drift_check(whiten_draws(0.7 * torch.randn(1000, 2)), log_prob).sd_ratios[0] < 0.85
    True

    :param draws: independent, in unconstrained space, whitened: ``(num_draws, latent_dim)``.
    :param log_prob: of ``(num_points, latent_dim)`` the model's log-density, ``(num_points,)``,
        differentiable.
    :param num_transitions: of Hamiltonian Monte Carlo for each draw.
    :param chunk_size: draws at a time, to bound the memory.
    :param observe: of ``(num_points, latent_dim)`` quantities ``(num_points, q)`` in units of their
        standard deviations, whose drift is looked at in place of the latents'.
    :param others: more draws of the guide in the frame of ``draws``, ``(num_others, latent_dim)``.
    :returns: the drift, and the share of accepted moves.

    **References:**

    1. Neal (2011), *MCMC using Hamiltonian dynamics*.
    2. Cook, Gelman and Rubin (2006), *Validation of Software for Bayesian Models Using Posterior
       Quantiles* (what leaves the posterior invariant tests it).
    """
    center = draws.white.mean(0)  # of some of the draws, it is not quite 0
    white = draws.white - center

    def white_log_prob(points: Tensor) -> Tensor:
        latent = draws.unwhiten(points + center)
        # No force where there is no number: a trajectory that has left the domain stays finite.
        latent.register_hook(lambda gradient: gradient.nan_to_num(0.0, 0.0, 0.0))
        value = log_prob(latent)
        return torch.where(value.isfinite(), value, -math.inf)

    def move(states: list[ChainState], step: float) -> tuple[list[ChainState], float]:
        """One transition of all chains, and the mean probability of acceptance."""
        moved, acceptances = [], []
        for state in states:
            sizes = step * CHECKS.spread ** -torch.rand_like(state.log_density).unsqueeze(-1)
            found = ensemble_move(score, state, sizes, CHECKS.num_leapfrog)
            moved.append(found.state)
            acceptances.append(found.acceptance)
        return moved, torch.cat(acceptances).mean().item()

    score = score_of(white_log_prob)
    start = [ChainState(part, *score(part)) for part in white.split(chunk_size)]
    step = 1.0
    for _ in range(CHECKS.max_halvings):
        if move(start, step)[1] > CHECKS.target_acceptance:
            break
        step /= 2
    states, accepted = start, 0.0
    for _ in steps_of(range(num_transitions), num_transitions, "short HMC"):
        states, acceptance = move(states, step)
        accepted += acceptance / num_transitions
    before, after, axes = white, torch.cat([state.position for state in states]), draws.axes
    escaped = 0.0 if others is None else _escaped(after, others - center)
    if observe is not None:
        before, after = (observe(draws.unwhiten(part + center)) for part in (before, after))
        before, after, axes = before - before.mean(0), after - before.mean(0), None
    centered = after - after.mean(0)
    products = [(1.0, before, before), (-1.0, centered, centered)]
    unit = before if axes is None else None
    errors = moment_errors(after - before, products, axes, MOMENTS.false_alarm, unit=unit)
    # Chains that stand still show nothing.
    resolution = (
        errors.resolution if accepted > CHECKS.least_acceptance else Resolution(math.inf, math.inf)
    )
    return DriftCheck(
        errors.mean_error, errors.sd_ratios, accepted, errors.faults, resolution, escaped
    )


def _escaped(ends: Tensor, others: Tensor) -> float:
    """Return the share of rows farther out than all others, or 0 if it may be chance."""
    if len(others) == 0:
        return 0.0
    number = int((ends.square().sum(-1) > others.square().sum(-1).max()).sum())
    total = len(ends) + len(others)
    p_value = math.prod((len(ends) - k) / (total - k) for k in range(number))
    return number / len(ends) if p_value < MOMENTS.false_alarm else 0.0


class ModeCoverage(NamedTuple):
    """For each mode, ``(num_modes,)``: an estimate of the ``mass`` near it, as a share of that and
    the guide's region together; the share of ``draws`` found there; and whether it is
    ``uncovered``.
    """

    mass: Tensor
    draws: Tensor
    uncovered: Tensor

    def __repr__(self) -> str:
        return short_repr(self)


@torch.no_grad()
def uncovered_modes(
    modes: Tensor,
    draws: Tensor,
    target: Target,
    log_evidence: float | None = None,
    least_mass: float = CHECKS.least_mass,
) -> ModeCoverage:
    r"""Find modes that carry mass but have almost no draws.

    The mass near a mode u is that of Laplace's approximation,
    :math:`p(u) \, |{-H} / 2 \pi|^{-1/2}`. In directions in which the log-density does not bend
    down, the guide's standard deviation takes the place of the curvature's. A mode is uncovered if
    it has at least ``least_mass``, and its Gaussian's bulk (99 %) has less than a tenth of the
    draws that its mass wants.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> _ = torch.manual_seed(0)
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 5.0))
    ...     pyro.sample("y", dist.Normal(x**2, 1.0), obs=torch.tensor(9.0))
    >>> modes, draws = torch.tensor([[-3.0], [3.0]]), 3.0 + 0.17 * torch.randn(1000, 1)
    >>> uncovered_modes(modes, draws, Target(model)).uncovered
    tensor([ True, False])

    :param modes: tops of the density in unconstrained space, ``(num_modes, latent_dim)``.
    :param draws: of the guide, ``(num_draws, latent_dim)``.
    :param target: the posterior.
    :param log_evidence: of the guide's region; by default, the mean log-density of the draws and
        the entropy of a Gaussian with their covariance.
    :param least_mass: share below which a mode does not count.
    :returns: mass and share of draws of each mode, and what is uncovered.
    """
    # In units in which no square leaves the range of numbers.
    unit = draws.abs().amax(0).clamp(min=torch.finfo(draws.dtype).tiny)
    scale = (draws / unit).std(0) * unit
    if log_evidence is None:
        covariance = "full" if len(draws) >= 2 * draws.shape[-1] else "diagonal"
        entropy = gaussian_entropy(draws / scale, covariance)  # type: ignore[arg-type]
        log_prob = target.log_prob(draws).mean() + scale.log().sum()
        log_evidence = (log_prob + entropy).item()
    hessian = target.hessian(modes) * scale * scale.unsqueeze(-1)
    # Of draws in the far distance the products leave the range of numbers.
    limit = torch.finfo(hessian.dtype).max ** 0.25
    values, vectors = torch.linalg.eigh(-hessian.nan_to_num(0.0).clamp(-limit, limit))
    # Flat directions: a curvature of rounding alone would promise endless mass.
    precision = torch.where(values > CHECKS.least_curvature, values, torch.ones_like(values))
    dim = draws.shape[-1]
    log_mass = target.log_prob(modes) - 0.5 * precision.log().sum(-1)
    log_mass = log_mass + scale.log().sum() + 0.5 * dim * math.log(2 * math.pi)
    mass = (log_mass - log_evidence).sigmoid()
    offsets = (draws - modes.unsqueeze(-2)) / scale
    squares = ((offsets @ vectors).square() * precision.unsqueeze(-2)).sum(-1)
    # The 99 % quantile of chi squared, by Wilson and Hilferty.
    bulk = dim * (1 - 2 / (9 * dim) + 2.33 * math.sqrt(2 / (9 * dim))) ** 3
    share = (squares < bulk).to(draws).mean(-1)
    return ModeCoverage(mass, share, (mass > least_mass) & (share < CHECKS.least_share * mass))
