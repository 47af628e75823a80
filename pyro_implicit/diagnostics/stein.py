# SPDX-License-Identifier: Apache-2.0
"""Whether a guide's draws and the model's scores fit together: no density of the guide wanted."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.diagnostics.moments import moment_errors
from pyro_implicit.diagnostics.whitening import Whitened
from pyro_implicit.ops.stein_discrepancy import SteinTest, stein_test

__all__ = ["SteinCheck", "stein_check"]

MAX_KERNEL_DRAWS = 1000


class SteinCheck(NamedTuple):
    """What :func:`stein_check` found.

    ``mean_error`` is the largest significant error of a mean in the guide's standard deviations, 0
    if there is none; ``sd_ratios`` the smallest and largest significant ratio of the guide's
    standard deviation to the posterior's in any direction, 1 if there is none; ``kernel`` the
    kernel test.
    """

    mean_error: float
    sd_ratios: tuple[float, float]
    kernel: SteinTest


@torch.no_grad()
def stein_check(draws: Whitened, scores: Tensor, false_alarm: float = 0.003) -> SteinCheck:
    r"""Tests draws of a guide by Stein's identities, in the units of the draws' own covariance.

    Of the score s of the posterior and its draws u,

    .. math:: E[s] = 0, \qquad -E[s\, (u - E u)^\top] = I.

    For Gaussians the first is the error of the mean, and along any direction the second is the
    squared ratio of the guide's standard deviation to the posterior's given all other directions:
    the largest one, of the direction that a guide overestimates most, and the smallest one are
    reported, with those of the coordinates. :func:`~pyro_implicit.ops.stein_discrepancy.stein_test`
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
    :param false_alarm: probability that means and variances of a perfect guide show any error.
    :returns: errors and kernel test.

    **References:**

    1. Liu, Lee and Jordan (2016), *A Kernelized Stein Discrepancy for Goodness-of-fit Tests*.
    """
    white, white_scores = draws.white, draws.scores(scores)
    minus_one = -torch.ones_like(white[:, 0])
    products = [(-1.0, white_scores, white)]
    errors = moment_errors(white_scores, products, draws.axes, false_alarm, minus_one)
    keep = slice(0, None, -(-len(white) // MAX_KERNEL_DRAWS))
    return SteinCheck(
        errors.mean_error,
        (math.sqrt(max(0.0, 1 + errors.smallest_excess)), math.sqrt(1 + errors.largest_excess)),
        stein_test(white[keep], white_scores[keep]),
    )
