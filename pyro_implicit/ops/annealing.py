# SPDX-License-Identifier: Apache-2.0
"""Mixtures of normals as references of annealing, and annealed importance weights of particles."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.ops.policy import LEAST_COMPONENT, POWER_FACTOR, POWER_TOLERANCE

__all__ = ["NormalMixture", "next_power", "stratified_errors"]


class NormalMixture(NamedTuple):
    """A mixture of normal distributions on R^d.

    ``log_weights`` ``(num_components,)`` are normalised, ``loc`` is ``(num_components, d)``;
    ``scale_tril`` and its inverse ``whiten`` are ``(num_components, d, d)``.

    **Example:**

    >>> loc, eye = torch.tensor([[-9.0], [9.0]]), torch.eye(1).expand(2, 1, 1)
    >>> mixture = NormalMixture.of(torch.tensor([1.0, 3.0]).log(), loc, eye)
    >>> mixture.score(torch.tensor([[8.0]]))[1]
    tensor([[1.]])
    """

    log_weights: Tensor
    loc: Tensor
    scale_tril: Tensor
    whiten: Tensor

    @staticmethod
    def of(log_weights: Tensor, loc: Tensor, scale_tril: Tensor) -> NormalMixture:
        """Return the mixture with these parameters; ``log_weights`` need not be normalised."""
        eye = torch.eye(loc.shape[-1]).to(loc).expand_as(scale_tril)
        whiten = torch.linalg.solve_triangular(scale_tril, eye, upper=False)
        return NormalMixture(log_weights.log_softmax(0), loc, scale_tril, whiten)

    def components(self, rows: Tensor | slice) -> NormalMixture:
        """Return the mixture of some components, by their indices."""
        return NormalMixture(self.log_weights[rows].log_softmax(0), *(x[rows] for x in self[1:]))

    def log_joint(self, points: Tensor) -> Tensor:
        """Return the log-density of each component times its weight, ``(n, num_components)``.

        :param points: ``(n, d)``.
        """
        return self._log_joint(self._all_white(points))

    def score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density ``(n,)`` and its gradient ``(n, d)`` at points ``(n, d)``."""
        white = self._all_white(points)
        log_joint = self._log_joint(white)
        pulls = log_joint.softmax(-1).unsqueeze(-1) * white
        return log_joint.logsumexp(-1), -pulls.flatten(1) @ self.whiten.flatten(0, 1)

    def to_white(self, points: Tensor, label: Tensor) -> Tensor:
        """Return points in the white coordinates of one component each, ``(n, d)``.

        :param points: ``(n, d)``.
        :param label: the components, ``(n,)``.
        """
        return _chosen(self._all_white(points), label)

    def to_points(self, white: Tensor, label: Tensor) -> Tensor:
        """Return the points of white coordinates ``(n, d)``, the inverse of :meth:`to_white`."""
        every = white @ self.scale_tril.flatten(0, 1).mT
        return self.loc[label] + _chosen(every.unflatten(-1, self.loc.shape), label)

    def pull_back(self, gradient: Tensor, label: Tensor) -> Tensor:
        """Map gradients by points to gradients by white coordinates, ``(n, d)``."""
        every = gradient @ self.scale_tril.movedim(0, -2).flatten(1)
        return _chosen(every.unflatten(-1, self.loc.shape), label)

    def sample(self, label: Tensor) -> Tensor:
        """Draw one point from each of some components, ``(n, d)``."""
        return self.to_points(torch.randn(len(label), self.loc.shape[-1]).to(self.loc), label)

    def adapted(self, points: Tensor, weights: Tensor, known: float) -> NormalMixture:
        """Return the result of one step of expectation maximisation, shrunk to this mixture.

        :param points: ``(n, d)``.
        :param weights: weights of the points, which sum to 1, ``(n,)``.
        :param known: the number of effective draws that count as much as the present moments.
        """
        white = self._all_white(points)
        shares = self._log_joint(white).softmax(-1) * weights.unsqueeze(-1)
        mass, tiny = shares.sum(0), torch.finfo(points.dtype).tiny
        num_draws = mass.square() / shares.square().sum(0).clamp(min=tiny)
        trust = (num_draws / (num_draws + known)).unsqueeze(-1)
        shares = shares / mass.clamp(min=tiny)
        mean = torch.einsum("nk,nkd->kd", shares, white)
        roots = (white - mean) * shares.sqrt().unsqueeze(-1)
        eye = torch.eye(points.shape[-1]).to(points)
        moment = eye + trust.unsqueeze(-1) * (torch.einsum("nki,nkj->kij", roots, roots) - eye)
        factor, failed = torch.linalg.cholesky_ex(moment)
        factor = torch.where((failed == 0)[:, None, None], factor, eye)
        loc = self.loc + (self.scale_tril @ (trust * mean).unsqueeze(-1)).squeeze(-1)
        log_weights = mass.clamp(min=LEAST_COMPONENT / len(mass)).log()
        return NormalMixture.of(log_weights, loc, self.scale_tril @ factor)

    def _all_white(self, points: Tensor) -> Tensor:
        shift = (self.whiten @ self.loc.unsqueeze(-1)).flatten()
        return (points @ self.whiten.flatten(0, 1).mT - shift).unflatten(-1, self.loc.shape)

    def _log_joint(self, white: Tensor) -> Tensor:
        log_det = self.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = self.log_weights - log_det - 0.5 * white.shape[-1] * math.log(2 * math.pi)
        return constant - 0.5 * white.square().sum(-1)


def _chosen(every: Tensor, label: Tensor) -> Tensor:
    return every[torch.arange(len(label), device=label.device), label]


def next_power(log_ratio: Tensor, log_weights: Tensor, power: float, share: float) -> float:
    """Return the next power of annealing, at most 1.

    The conditional effective sample size of the step is a given share of the particles.

    **Example:**

    >>> log_weights = torch.zeros(1000).log_softmax(0)
    >>> next_power(torch.zeros(1000), log_weights, 0.0, 0.9)
    1.0
    >>> next_power(10 * torch.linspace(-1, 1, 1000), log_weights, 0.0, 0.9) < 0.1
    True

    :param log_ratio: the log-density of the last distribution over that of the first, ``(n,)``.
    :param log_weights: the log-weights of the particles, normalised, ``(n,)``.
    :param power: the present one.
    :param share: the share, in (0, 1).

    **References:**

    1. Zhou, Johansen and Aston (2016), *Toward Automatic Model Comparison: An Adaptive Sequential
       Monte Carlo Approach*, section 3.3.
    """

    def is_short(step: float) -> bool:
        change = step * log_ratio
        first, second = (log_weights + k * change for k in (1, 2))
        return bool(2 * first.logsumexp(0) - second.logsumexp(0) >= math.log(share))

    low, high = 0.0, 1.0 - power
    if is_short(high):
        return 1.0
    while high - low > POWER_TOLERANCE * low and high > torch.finfo(torch.float64).eps:
        middle = 0.5 * (low + high) if low else POWER_FACTOR * high
        low, high = (middle, high) if is_short(middle) else (low, middle)
    return power + high


def stratified_errors(terms: Tensor, origin: Tensor, stratum: Tensor) -> Tensor:
    """Return the standard errors of sums over particles, ``(m,)``.

    Particles of different origins are independent; resampled particles of one origin are not.

    **Example:**

    >>> terms = torch.tensor([[0.5], [-0.5]])
    >>> stratified_errors(terms, torch.arange(2), torch.zeros(2, dtype=torch.long))
    tensor([1.])

    :param terms: terms of the sums, one of each particle, ``(n, m)``.
    :param origin: the index of the first ancestor of each particle, ``(n,)``.
    :param stratum: index of the stratum of each origin, ``(num_origins,)``. The number of origins
        in each stratum is fixed.

    **References:**

    1. Lee and Whiteley (2018), *Variance estimation in the particle filter*, section 3.
    """
    width = terms.shape[-1]
    sums = terms.new_zeros(len(stratum), width).index_add(0, origin, terms)
    counts = stratum.bincount().to(terms).unsqueeze(-1)
    means = terms.new_zeros(len(counts), width).index_add(0, stratum, sums) / counts.clamp(min=1)
    squares = torch.zeros_like(means).index_add(0, stratum, (sums - means[stratum]).square())
    return (squares * counts / (counts - 1).clamp(min=1)).sum(0).sqrt()
