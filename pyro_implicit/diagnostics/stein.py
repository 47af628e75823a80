# SPDX-License-Identifier: Apache-2.0
"""Whether a guide's draws and the model's scores fit together: no density of the guide wanted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.diagnostics.moments import FALSE_ALARM, Fault, Resolution, moment_errors
from pyro_implicit.diagnostics.whitening import CollapsedError, Whitened, whiten_draws
from pyro_implicit.ops.score_estimators import SteinTest, stein_test

__all__ = ["SteinCheck", "stein_by_site", "stein_check"]

MAX_KERNEL_DRAWS = 1000
MAX_SITE_DRAWS, MAX_SITES = 500, 30
FIRST_BOOTSTRAP, SUSPECT = 1000, 0.02


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
    r"""Tests draws of a guide by Stein's identities, in the units of the draws' own covariance.

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

    >>> from pyro_implicit.diagnostics.whitening import whiten_draws
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
        white_scores, products, draws.axes, FALSE_ALARM, minus_one, to_ratio=_ratio
    )
    keep = slice(0, None, -(-len(white) // MAX_KERNEL_DRAWS))
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
    keep = slice(0, None, -(-len(draws) // MAX_SITE_DRAWS))
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
    for _, name, part, score in found[:MAX_SITES]:
        try:
            site = whiten_draws(part)
        except CollapsedError:  # of so few draws
            continue
        site_scores = site.scores(score)
        p_value = stein_test(site.white, site_scores, FIRST_BOOTSTRAP).p_value
        if p_value < SUSPECT:
            number = math.ceil(2 * len(sizes) / FALSE_ALARM)  # to tell it from larger ones
            p_value = stein_test(site.white, site_scores, number).p_value
        p_values[name] = min(1.0, len(sizes) * p_value)
    return tuple(sorted(p_values.items(), key=lambda pair: pair[1]))


def _ratio(excess: float) -> float:
    return math.sqrt(max(0.0, 1 + excess))
