# SPDX-License-Identifier: Apache-2.0
"""The best weights of a mixture whose components stay as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_implicit.density.target import Target

__all__ = ["MixtureWeights", "mixture_weights"]

LEAST_DRAWS, MOST_DRAWS, DRAWS_OF_ALL = 100, 1000, 8000


class MixtureWeights(NamedTuple):
    """Normalised ``log_weights`` ``(num_components,)``, -inf for a component without a finite
    log-density, and the ``elbo`` ``()`` of the mixture with these weights.
    """

    log_weights: Tensor
    elbo: Tensor


@torch.no_grad()
def mixture_weights(
    density: Target,
    components: Sequence[Distribution],
    num_draws: int | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 1000,
) -> MixtureWeights:
    r"""Maximise the exact ELBO of a mixture :math:`q_w = \sum_k w_k q_k` over its weights.

    With p the model's unnormalised density,

    .. math:: F(w) = \sum_k w_k a_k(w), \qquad a_k(w) = E_{q_k}[\log p - \log q_w].

    F is concave, as the entropy is, and :math:`\partial F / \partial w_k = a_k(w) - 1`. Since

    .. math:: F(w) = F(v) + \sum_k (w_k - v_k)\, a_k(v) - KL(q_w \| q_v)

    for any weights v, and :math:`KL(q_w \| q_v) \le KL(w \| v)`, a lower bound of F(w) that
    touches it at v is largest at

    .. math:: w_k \propto v_k \, e^{a_k(v)},

    so no step of this iteration lowers F, and it leads to the maximum. Concavity also says how far
    that is: :math:`\max_k a_k(w) - F(w)` at most. Components that do not overlap are done in one
    step, with weights proportional to :math:`e^{ELBO_k}`; of two that are equal, only the sum of
    the weights counts, and that is not counted twice.

    The expectations are over the draws of all components, each with
    :math:`q_k / \sum_j q_j` as its weight in that of component k: alike components then get alike
    values. Draws at which the log-density is not finite are left out, and their component is
    judged as cut to the others: a share s of good draws costs it :math:`-\log s`.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 5.0))
    ...     pyro.factor("modes", torch.logaddexp(-50 * (x - 3) ** 2, 1 - 50 * (x + 3) ** 2))
    >>> parts = [dist.Normal(m, 0.1).expand([1]).to_event(1) for m in (3.0, -3.0)]
    >>> weights = mixture_weights(Target(model), parts)
    >>> weights.log_weights.diff().round(decimals=1)
    tensor([1.])

    :param density: of the model.
    :param components: distributions of the unconstrained latent vector with a density at any point,
        such as ``AutoMixture(...).get_posterior().components``.
    :param num_draws: of each component; by default 1,000, or 8,000 of all if they are more than
        eight, as each is judged at the draws of all.
    :param tolerance: in nats, how near to the maximum to stop.
    :param max_iterations: stops there in any case; overlapping components take many.
    :raises ValueError: for no components, or if the log-density is finite at no draw.
    :raises NotImplementedError: for a component without a density.

    **References:**

    1. Blahut (1972), *Computation of channel capacity and rate-distortion functions*: the same
       iteration, with :math:`-\log p` as the cost of a symbol.
    """
    if not components:
        raise ValueError("mixture_weights wants at least one component")
    if num_draws is None:
        num_draws = max(LEAST_DRAWS, min(MOST_DRAWS, DRAWS_OF_ALL // len(components)))
    draws = [q.sample(torch.Size((num_draws,))) for q in components]
    log_p = torch.stack([density.log_prob(points) for points in draws])
    points = torch.cat(draws)
    # In float64, as the densities of one component at another's draws are many powers apart. A
    # density that overflows does so far from all draws of its component.
    log_q = torch.stack([q.log_prob(points) for q in components], -1).double()
    log_q = log_q.masked_fill(log_q.isnan(), -math.inf)
    log_p = log_p.double()
    is_good = log_p.isfinite() & log_q.logsumexp(-1).isfinite().reshape(log_p.shape)
    share = is_good.double().mean(-1)
    if not is_good.any():
        raise ValueError(
            f"the model's log-density is finite at none of {len(points)} draws of the components. "
            "Cure: train them first, each from a start in its mode"
        )
    kept = share > 0
    chosen = is_good.flatten()
    found = _maximise(
        log_p.flatten()[chosen],
        log_q[chosen][:, kept] - share[kept].log(),
        tolerance,
        max_iterations,
    )
    log_weights = torch.full_like(share, -math.inf)
    log_weights[kept] = found.log_weights
    return MixtureWeights(log_weights.to(points), found.elbo.to(points))


def _maximise(
    log_p: Tensor, log_q: Tensor, tolerance: float, max_iterations: int
) -> MixtureWeights:
    """The iteration.

    :param log_p: ``(num_points,)``.
    :param log_q: ``(num_points, num_components)``.
    """
    log_total = log_q.logsumexp(-1)
    shares = (log_q - log_total.unsqueeze(-1)).exp()
    expect = shares / shares.sum(0)  # column k takes the expectation under component k
    smallest = torch.finfo(shares.dtype).tiny
    log_weights = log_q.new_zeros(log_q.shape[-1]).log_softmax(0)
    for iteration in range(max_iterations + 1):
        weights = log_weights.exp()
        log_mixture = log_total + (shares @ weights).clamp(min=smallest).log()
        values = expect.mT @ (log_p - log_mixture)
        elbo = weights @ values
        if values.max() - elbo < tolerance or iteration == max_iterations:
            break
        log_weights = (log_weights + values).log_softmax(0)
    return MixtureWeights(log_weights, elbo)
