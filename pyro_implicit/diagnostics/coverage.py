# SPDX-License-Identifier: Apache-2.0
"""Which of some modes a guide's draws leave out."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.density.target import Target
from pyro_implicit.ops import gaussian_entropy
from pyro_implicit.runtime.printing import short_repr

__all__ = ["ModeCoverage", "uncovered_modes"]


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
    density: Target,
    log_evidence: float | None = None,
    least_mass: float = 0.02,
) -> ModeCoverage:
    r"""Which modes carry mass where a guide has next to no draws.

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
    :param density: of the model.
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
        log_prob = density.log_prob(draws).mean() + scale.log().sum()
        log_evidence = (log_prob + entropy).item()
    hessian = density.hessian(modes) * scale * scale.unsqueeze(-1)
    # Of draws in the far distance the products leave the range of numbers.
    limit = torch.finfo(hessian.dtype).max ** 0.25
    values, vectors = torch.linalg.eigh(-hessian.nan_to_num(0.0).clamp(-limit, limit))
    # Flat directions: a curvature of rounding alone would promise endless mass.
    precision = torch.where(values > 1e-3, values, torch.ones_like(values))
    dim = draws.shape[-1]
    log_mass = density.log_prob(modes) - 0.5 * precision.log().sum(-1)
    log_mass = log_mass + scale.log().sum() + 0.5 * dim * math.log(2 * math.pi)
    mass = (log_mass - log_evidence).sigmoid()
    offsets = (draws - modes.unsqueeze(-2)) / scale
    squares = ((offsets @ vectors).square() * precision.unsqueeze(-2)).sum(-1)
    # The 99 % quantile of chi squared, by Wilson and Hilferty.
    bulk = dim * (1 - 2 / (9 * dim) + 2.33 * math.sqrt(2 / (9 * dim))) ** 3
    share = (squares < bulk).to(draws).mean(-1)
    return ModeCoverage(mass, share, (mass > least_mass) & (share < 0.1 * mass))
