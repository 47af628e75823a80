# SPDX-License-Identifier: Apache-2.0
"""What the rest of a model says of a site, as if it were an observation with normal errors."""

from __future__ import annotations

from typing import Any

import torch
from pyro.ops.tensor_utils import matvecmul
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.model import compute_log_prob
from pyro_implicit.density.target import Target
from pyro_implicit.mcmc.conditional_reparam import ConditionalReparam, base_distribution

__all__ = ["own_hessian", "score_of_rest", "told"]

MOST_COLUMNS, NUM_PROBES = 1200, 64


def score_of_rest(density: Target, points: Tensor, sites: list[str]) -> Tensor:
    """The derivative of the log-density without the priors of sites, with its graph.

    :param points: ``(num_points, latent_dim)``, of which derivatives are recorded.
    """

    def rest(trace: Trace) -> Tensor:
        compute_log_prob(trace)
        total = torch.as_tensor(trace.log_prob_sum())
        return total - sum(trace.nodes[name]["log_prob_sum"] for name in sites)

    (score,) = torch.autograd.grad(density.read(points, rest).sum(), points, create_graph=True)
    return score


def own_hessian(density: Target, point: Tensor, score: Tensor, columns: Tensor) -> Tensor:
    """The Hessian of a site, ``(count, size, count, size)``, at its ``columns`` ``(count, size)``.

    Of very many, its blocks on the diagonal alone, ``(count, size, size)``, as estimated by
    random signs (Hutchinson): what lies beside them cancels.
    """
    count, size = columns.shape
    is_small = columns.numel() <= MOST_COLUMNS
    if is_small:
        signs = torch.eye(count).to(point)
    else:
        shape, seeded = (NUM_PROBES, count), torch.Generator().manual_seed(0)
        signs = torch.randint(2, shape, generator=seeded).to(point) * 2 - 1
    directions = point.new_zeros(len(signs), size, point.shape[-1])
    for index in range(size):
        directions[:, index, columns[:, index]] = signs
    directions = directions.flatten(0, 1)
    found = density.hessian_products(point, score, directions)
    own = torch.stack([one[0, columns] for one in found]).unflatten(0, (len(signs), size))
    return own if is_small else torch.einsum("kb,kjbi->bij", signs, own) / NUM_PROBES


def told(fn: Any, curvature: Tensor, gradient: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    r"""W and h of a second-order expansion, in the directions in which it bends down.

    What the data say of a latent beside others of its site is what they leave of its variance: with
    the prior's precision P, that of the block b is :math:`W_b = ((P + W)^{-1}_{bb})^{-1} - P_b`, so
    that of steps of which the data see sums alone none is taken for known.

    :param curvature: minus a Hessian, ``(count, size, count, size)``, or its blocks on the
        diagonal, ``(count, size, size)``.
    :param gradient: as ``value``, ``(count, size)``.
    """
    loc, prior = _moments(fn, value)
    count, size = value.shape
    if curvature.dim() == 3:
        precision = _bent_down(curvature)
        total = precision + prior
        step = torch.linalg.solve(total, gradient - matvecmul(prior, value - loc))
    else:
        whole = _bent_down(curvature.reshape(count * size, count * size))
        whole = whole + torch.block_diag(*prior)
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(whole))
        pull = (gradient - matvecmul(prior, value - loc)).flatten()
        step = (covariance @ pull).reshape(count, size)
        blocks = covariance.reshape(count, size, count, size).diagonal(dim1=0, dim2=2)
        precision = _bent_down(torch.linalg.inv(blocks.movedim(-1, 0)) - prior)
    centre = value + step
    return precision, matvecmul(precision, centre) + matvecmul(prior, centre - loc)


def _moments(fn: Any, value: Tensor) -> tuple[Tensor, Tensor]:
    """Location ``(count, size)`` and precision ``(count, size, size)`` of a site's prior."""
    fn = base_distribution(fn)
    loc = fn.loc.expand(fn.batch_shape + fn.event_shape).reshape(value.shape)
    if ConditionalReparam.is_vector(fn):
        precision = fn.precision_matrix.expand(*fn.batch_shape, -1, -1)
    else:
        precision = fn.scale.expand(fn.batch_shape) ** -2
    return loc.to(value), precision.reshape(*value.shape, value.shape[-1]).to(value)


def _bent_down(curvature: Tensor) -> Tensor:
    """Without the directions in which it bends up."""
    values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
    return (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT
