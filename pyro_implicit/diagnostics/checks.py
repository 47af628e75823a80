# SPDX-License-Identifier: Apache-2.0
"""Checks of draws: importance weights, Stein identities, short HMC, coverage of modes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions.transforms import ExpTransform

from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.moments import (
    CollapsedError,
    Fault,
    Fold,
    MomentErrors,
    Resolution,
    Rows,
    Whitened,
    halves,
    held_out_frames,
    moment_errors,
    whiten_draws,
)
from pyro_implicit.diagnostics.policy import CHECKS, MOMENTS, VERDICT
from pyro_implicit.mcmc.policy import DEFAULT as CHAINS
from pyro_implicit.ops import LogWeights, gaussian_entropy
from pyro_implicit.ops.ensemble_hmc import ChainState, ensemble_move, score_of
from pyro_implicit.ops.score_estimators import SteinTest, stein_test
from pyro_implicit.runtime.messages import short_repr
from pyro_implicit.runtime.progress import steps_of
from pyro_implicit.runtime.sites import is_flat

__all__ = [
    "DriftCheck",
    "ModeCoverage",
    "SteinCheck",
    "drift_check",
    "endless_scales",
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
    folds = halves(shifts, products, draws.axes, weights - 1, unit)
    return moment_errors(folds, MOMENTS.false_alarm)


class SteinCheck(NamedTuple):
    """The result of :func:`stein_check`.

    ``mean_error`` is the largest significant error of a mean in standard deviations of the guide,
    or 0. ``sd_ratios`` are the smallest and largest significant ratios of standard deviations,
    guide to posterior, in any direction, or 1. ``kernel`` is the kernel test, and ``by_site`` has
    its p-values of single sites (:func:`stein_by_site`). ``faults`` and ``resolution`` are those of
    :class:`MomentErrors`.
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

    Draws u of the posterior with score s satisfy

    .. math:: E[s] = 0, \qquad -E[s\, (u - E u)^\top] = I.

    For Gaussians, the first expectation is the error of the mean. The second one, along any
    direction, is the squared ratio of standard deviations, guide to posterior, given all other
    directions. The check reports the largest and the smallest ratio, and those of the coordinates.
    :func:`~pyro_implicit.ops.score_estimators.stein_test` tests the same identities for all
    functions of a reproducing kernel Hilbert space.

    Each half of the draws is tested in the frame of the other half
    (:func:`~pyro_implicit.diagnostics.moments.held_out_frames`).

    A converged guide satisfies the identities of its own parameters for any posterior: tests of
    means and variances never reject a fitted ``AutoMultivariateNormal``. Scores do not depend on
    the weights of separate modes, or on modes without draws.

    **Example:**

    >>> from pyro_implicit.diagnostics.moments import whiten_draws
    >>> _ = torch.manual_seed(0)
    >>> u = 0.7 * torch.randn(2000, 3)
    >>> stein_check(whiten_draws(u), -u).sd_ratios[0] < 0.8
    True

    :param draws: independent whitened draws in unconstrained space, ``(num_draws, latent_dim)``.
    :param scores: gradients of the log-density at the draws, of the same shape.
    :returns: errors and kernel test.
    :raises CollapsedError: if one half of the draws lies on a hyperplane.

    **References:**

    1. Liu, Lee and Jordan (2016), *A Kernelized Stein Discrepancy for Goodness-of-fit Tests*.
    """
    white, white_scores = draws.white, draws.scores(scores)
    minus_one, folds = -torch.ones_like(white[:, 0]), []
    for train, test, frame in held_out_frames(white, draws.axes):
        turned = frame.scores(white_scores)
        rows = Rows(turned, [(-1.0, turned, frame.whiten(white))], minus_one)
        folds.append(Fold(rows.at(train), rows.at(test), frame.axes))
    errors = moment_errors(folds, MOMENTS.false_alarm, to_ratio=_ratio)
    keep = slice(0, None, -(-len(white) // CHECKS.pairwise_draws))
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
    r"""Apply the kernel test to single sites, if the test of all latents lacks power.

    Given the latents of a site, the mean of their joint score is the score of their marginal
    density. Stein's identity therefore holds for functions of these latents and the joint scores.
    With more than 30 sites, the test takes those with the largest mean scores; the p-values are
    corrected for the number of all sites.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> u = torch.randn(500, 2)
    >>> scores = torch.stack([-u[:, 0], 0.5 - u[:, 1]], -1)
    >>> stein_by_site(u, scores, {"right": 1, "wrong": 1})[0]
    ('wrong', 0.001...)

    :param draws: independent draws in unconstrained space, ``(num_draws, latent_dim)``.
    :param scores: gradients of the log-density at the draws, of the same shape.
    :param sizes: the number of latents of each site, in the order of the coordinates.
    :returns: site and corrected p-value, the smallest first.
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
        except CollapsedError:  # too few draws for this site
            continue
        site_scores = site.scores(score)
        p_value = stein_test(site.white, site_scores).p_value
        if p_value < CHECKS.suspect:
            number = math.ceil(2 * len(sizes) / MOMENTS.false_alarm)  # resolves small p-values
            p_value = stein_test(site.white, site_scores, number).p_value
        p_values[name] = min(1.0, len(sizes) * p_value)
    return tuple(sorted(p_values.items(), key=lambda pair: pair[1]))


def _ratio(excess: float) -> float:
    return math.sqrt(max(0.0, 1 + excess))


class DriftCheck(NamedTuple):
    """The result of :func:`drift_check`.

    The drifts of means and standard deviations are errors of the guide. ``acceptance`` is the share
    of accepted moves. ``escaped`` is the share of chains that end farther out than any draw of the
    guide, or 0 if this may be chance.
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

    The distribution of posterior draws would not change. A drift is a lower bound on the error of
    the guide: the neck of a funnel or a tail that the guide lacks fills again. The chains are too
    short to reach a separate mode, or to correct the weights of modes.

    Moments of heavy tails are noisy, and importance weights do not see a tail without draws. The
    check therefore counts the chains that end farther from the centre than all of many other draws,
    by more than the sds of a good guide may be off.
    If n chains and m other draws have the posterior's distribution, the k outermost points are all
    chains with probability :math:`\binom{n}{k} / \binom{n+m}{k}`. Distances are in the frame of the
    starts, to which ends and other draws are new.

    Chains move in the frame of the draws' covariance. Each transition of each chain draws its own
    step size, between the largest size with an acceptance of about 80 % and a thirtieth of it, so
    that chains can enter narrow regions. A step to a point without a density is rejected.

    **Example:**

    >>> from pyro_implicit.diagnostics.moments import whiten_draws
    >>> _ = torch.manual_seed(0)
    >>> log_prob = lambda u: -0.5 * u.square().sum(-1)
    >>> drift_check(whiten_draws(0.7 * torch.randn(1000, 2)), log_prob).sd_ratios[0] < 0.85
    True

    :param draws: independent whitened draws in unconstrained space, ``(num_draws, latent_dim)``.
    :param log_prob: a differentiable function of points ``(num_points, latent_dim)`` that returns
        log-densities ``(num_points,)``.
    :param num_transitions: transitions of Hamiltonian Monte Carlo for each draw.
    :param chunk_size: the number of draws that are moved at once; bounds memory.
    :param observe: a function of points ``(num_points, latent_dim)`` that returns quantities
        ``(num_points, q)`` in units of their standard deviations; their drift is measured in place
        of the latents'.
    :param others: more draws of the guide in the frame of ``draws``, ``(num_others, latent_dim)``.
    :returns: the drift, and the share of accepted moves.

    **References:**

    1. Neal (2011), *MCMC using Hamiltonian dynamics*.
    2. Cook, Gelman and Rubin (2006), *Validation of Software for Bayesian Models Using Posterior
       Quantiles* (tests by transitions that leave the posterior invariant).
    """
    center = draws.white.mean(0)  # not exactly 0 for a part of the draws
    white = draws.white - center

    def white_log_prob(points: Tensor) -> Tensor:
        latent = draws.unwhiten(points + center)
        # Without forces that are not finite, a trajectory outside of the domain stays finite.
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
        if move(start, step)[1] > CHAINS.hmc.target_acceptance:
            break
        step /= 2
    states, accepted = start, 0.0
    for _ in steps_of(range(num_transitions), num_transitions, "short HMC"):
        states, acceptance = move(states, step)
        accepted += acceptance / num_transitions
    after = torch.cat([state.position for state in states])
    escaped, others = 0.0, None if others is None else others - center
    if others is not None and len(others) > 0:
        escaped = _escaped(*_in_frame_of_starts(white, draws.axes, after, others))
    if observe is None:
        errors = _moved(white, after, draws.axes, others)
    else:
        errors = _moved(*(observe(draws.unwhiten(part + center)) for part in (white, after)))
    # Chains that do not move detect no error.
    resolution = (
        errors.resolution if accepted > CHECKS.least_acceptance else Resolution(math.inf, math.inf)
    )
    return DriftCheck(
        errors.mean_error, errors.sd_ratios, accepted, errors.faults, resolution, escaped
    )


def _moved(
    before: Tensor, after: Tensor, axes: Tensor | None = None, others: Tensor | None = None
) -> MomentErrors:
    folds = []
    for train, test, frame in held_out_frames(before, axes, others):
        first, last = frame.whiten(before), frame.whiten(after)
        shifts = last - first
        first, last = first - first.mean(0), last - last.mean(0)
        products = [(1.0, first, first), (-1.0, last, last)]
        rows = Rows(shifts, products, shifts.new_zeros(len(shifts)))
        unit = first if axes is None else None
        folds.append(Fold(rows.at(train), rows.at(test), frame.axes, unit))
    return moment_errors(folds, MOMENTS.false_alarm)


def _in_frame_of_starts(
    starts: Tensor, axes: Tensor | None, ends: Tensor, others: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ends and others in a frame to which both are new, so that neither looks nearer."""
    if axes is None:
        return ends, others
    if 2 * len(starts) < MOMENTS.draws_per_dim * starts.shape[-1]:
        return ends @ axes, others @ axes  # each coordinate in its own sd
    frame = whiten_draws(starts, full=True)
    return frame.whiten(ends), frame.whiten(others)


def _escaped(ends: Tensor, others: Tensor) -> float:
    """Return the share of rows farther out than all others, or 0 if it may be chance.

    In many dimensions all distances are nearly equal, and grow with the standard deviations, whose
    own check allows small errors.
    """
    farthest = VERDICT.sd.check**2 * others.square().sum(-1).max()
    number = int((ends.square().sum(-1) > farthest).sum())
    total = len(ends) + len(others)
    p_value = math.prod((len(ends) - k) / (total - k) for k in range(number))
    return number / len(ends) if p_value < MOMENTS.false_alarm else 0.0


@torch.no_grad()
def endless_scales(target: Target, points: Tensor) -> str:
    """Describe positive latent variables with a flat prior whose draws have no end; else empty.

    The posterior of a group scale is improper at 0 if its prior is flat in the logarithm, and at
    infinity if its prior is flat and there is one group. Chains then walk to the largest or the
    smallest numbers. A short run is not seen, nor a posterior whose infinite mass the chains do not
    find.

    :param target: the posterior.
    :param points: draws in unconstrained space, ``(num_draws, latent_dim)``.
    """
    found = []
    # Such a scale, or its inverse, is lost next to 1 in float64.
    limit = -math.log(torch.finfo(torch.float64).eps)
    for name, part in target.split(points).items():
        transform = target.transforms[name]
        steps = getattr(transform, "parts", [transform])
        is_scale = any(isinstance(one, ExpTransform) for one in steps)
        if is_scale and is_flat(target.sites[name]["fn"]):
            far = part.abs().reshape(len(part), -1) > limit
            share = far.any(-1).double().mean().item()
            if share > CHECKS.endless_share:
                found.append(f"that of `{name}` in {share:.0%} of the draws")
    if not found:
        return ""
    return (
        "the posterior is improper: logarithms of scales with a flat prior exceed "
        f"{limit:.0f} in absolute value, {' and '.join(found)}"
    )


class ModeCoverage(NamedTuple):
    """Coverage of modes, each field ``(num_modes,)``.

    ``mass`` is the estimated mass near the mode, as a share of the sum of this mass and that of
    the guide's region. ``draws`` is the share of draws near the mode. ``uncovered`` says whether
    the mode lacks draws.
    """

    mass: Tensor
    draws: Tensor
    uncovered: Tensor

    def __repr__(self) -> str:
        return short_repr(self)


@torch.no_grad()
def uncovered_modes(
    target: Target,
    modes: Tensor,
    draws: Tensor,
    log_evidence: float | None = None,
    least_mass: float = CHECKS.least_mass,
) -> ModeCoverage:
    r"""Find modes that have mass but almost no draws.

    The mass near a mode u is that of Laplace's approximation,
    :math:`p(u) \, |{-H} / 2 \pi|^{-1/2}`. In directions without negative curvature, the standard
    deviation of the guide replaces that of the curvature. A mode is uncovered if its mass is at
    least ``least_mass``, and the 99 % region of its Gaussian has fewer than a tenth of the draws
    that correspond to its mass.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> _ = torch.manual_seed(0)
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 5.0))
    ...     pyro.sample("y", dist.Normal(x**2, 1.0), obs=torch.tensor(9.0))
    >>> modes, draws = torch.tensor([[-3.0], [3.0]]), 3.0 + 0.17 * torch.randn(1000, 1)
    >>> uncovered_modes(Target(model), modes, draws).uncovered
    tensor([ True, False])

    :param target: the posterior.
    :param modes: maxima of the density in unconstrained space, ``(num_modes, latent_dim)``.
    :param draws: draws of the guide, ``(num_draws, latent_dim)``.
    :param log_evidence: log-mass of the guide's region; by default the mean log-density of the
        draws plus the entropy of a Gaussian with their covariance.
    :param least_mass: the share of the mass below which a mode is ignored.
    :returns: mass and share of draws of each mode, and whether it is uncovered.
    """
    # In units in which no square overflows.
    unit = draws.abs().amax(0).clamp(min=torch.finfo(draws.dtype).tiny)
    scale = (draws / unit).std(0) * unit
    if log_evidence is None:
        covariance = "full" if len(draws) >= 2 * draws.shape[-1] else "diagonal"
        entropy = gaussian_entropy(draws / scale, covariance)  # type: ignore[arg-type]
        log_prob = target.log_prob(draws).mean() + scale.log().sum()
        log_evidence = (log_prob + entropy).item()
    hessian = target.derivatives(modes)[2] * scale * scale.unsqueeze(-1)
    # The products overflow for extremely distant draws.
    limit = torch.finfo(hessian.dtype).max ** 0.25
    values, vectors = torch.linalg.eigh(-hessian.nan_to_num(0.0).clamp(-limit, limit))
    # In flat directions, curvature that is only rounding would give an enormous mass.
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
