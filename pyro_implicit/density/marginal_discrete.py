# SPDX-License-Identifier: Apache-2.0
r"""Discrete elements that are independent given all other latent variables: sum them out.

Let each term :math:`t_k` of the log-density depend on at most one of the discrete elements
:math:`n_1, \dots, n_E`, and let :math:`O_e` be the terms of element e. Then

.. math:: \log p(r, y) = \sum_{k \notin \cup O_e} t_k(r)
    + \sum_e \log \sum_n \exp \sum_{k \in O_e} t_k(r, n),

so that a window of values of all elements is evaluated at once. It grows until geometric series
that continue its ends are negligible: they bound the rest of a sum with log-concave terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical

from pyro_implicit.density.marginal import Marginal
from pyro_implicit.density.policy import DISCRETE, MarginalPolicy
from pyro_implicit.density.target import Target
from pyro_implicit.ops.policy import MAX_ENTRIES

__all__ = ["DiscreteMarginal"]


class _Window(NamedTuple):
    """The values of each element that are summed."""

    first: Tensor  # (num_elements,)
    number: int


class _Sum(NamedTuple):
    """Sums over a window, at some points."""

    window: _Window
    weights: Tensor  # (num_values, num_points, num_elements), unnormalised log-probabilities
    value: Tensor  # (num_points,), the marginal log-density
    is_whole: Tensor  # (num_points,), whether other values are negligible


class DiscreteMarginal(Marginal):
    """The density of continuous latent variables, and draws of the discrete ones.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     rate = pyro.sample("rate", dist.Exponential(1.0))
    ...     n = pyro.sample("n", dist.Poisson(rate))
    ...     pyro.sample("y", dist.Binomial(n, 0.5), obs=torch.tensor(3.0))
    >>> target = Target(model, sample_discrete=True)
    >>> owner = torch.tensor([1, 0, 0])  # the rate depends on no count
    >>> marginal = DiscreteMarginal(target, target.in_double(), owner, MarginalPolicy())
    >>> marginal(torch.zeros(1, 1))  # at rate = 1: y is Poisson(0.5)
    tensor([-5.3712])

    :param target: the posterior of all latent variables, of which some are discrete.
    :param exact: the same posterior in the precision of the computation.
    :param owner: the element on which each of its ``terms`` depends, ``(num_terms,)``; the number
        of elements for none.
    :param policy: steps and tolerances.
    """

    how = "summed"

    def __init__(
        self, target: Target, exact: Target, owner: Tensor, policy: MarginalPolicy
    ) -> None:
        assert target.elements is not None
        super().__init__(target, exact, list(target.sampled), policy)
        low, high, _ = target.elements
        self._owner, self._low, self._high = owner, low.to(exact.init_loc), high.to(exact.init_loc)
        self._most = int(target.elements.num_values.max().clamp(max=DISCRETE.most_values))
        self._window = _Window(self._low, min(DISCRETE.first_values, self._most))
        self._best = -math.inf

    def evaluate(self, rest: Tensor, with_score: bool = True) -> tuple[Tensor, Tensor]:
        """Return log-density and gradient, see :meth:`Marginal.evaluate`."""
        rest = rest.detach().double()
        value, score = rest.new_full(rest.shape[:1], -math.inf), torch.zeros_like(rest)
        for rows, points, found in self._sums(rest, with_score):
            value[rows] = found.value.detach()
            if with_score:
                each = torch.ones_like(found.value)
                (score[rows],) = torch.autograd.grad(found.value, points, each)
        is_finite = value.isfinite() & score.isfinite().all(-1)
        value = value.masked_fill(~is_finite, -math.inf)
        return value, score.masked_fill(~is_finite.unsqueeze(-1), 0.0)

    @torch.no_grad()
    def draw(self, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the discrete elements given the others, see :meth:`Marginal.draw`."""
        rest = rest.detach().double()
        values = rest.new_zeros(len(rest), self.num_integrated)
        value, conditional = rest.new_zeros(2, len(rest))
        is_whole = torch.zeros_like(value, dtype=torch.bool)
        for rows, _, found in self._sums(rest, False):
            places = Categorical(logits=found.weights.movedim(0, -1).nan_to_num(0.0)).sample()
            chosen = found.weights.gather(0, places.unsqueeze(0)).squeeze(0)
            values[rows] = found.window.first + places
            conditional[rows] = (chosen - found.weights.logsumexp(0)).sum(-1)
            value[rows], is_whole[rows] = found.value, found.is_whole
        vectors = self._vectors(rest, values.to(self._low))
        joint = self._exact.log_prob(vectors).double()
        rounding = torch.finfo(self._low.dtype).eps ** self.policy.rounding_power
        fault = (joint - value - conditional).abs() - rounding * (joint.abs() + value.abs())
        is_known = is_whole & value.isfinite() & fault.isfinite()
        fault = fault.clamp(min=0.0).masked_fill(~is_known, math.inf)
        return vectors.to(self.target.init_loc), value, fault

    def _sums(self, rest: Tensor, with_score: bool) -> Iterator[tuple[Tensor, Tensor, _Sum]]:
        """Sum at each point until other values are negligible, or their number is the largest.

        The sums of a point are the last that are yielded for it.

        :returns: rows of ``rest``, their points, and the sums at these.
        """
        rows, window = torch.arange(len(rest), device=rest.device), self._window
        while len(rows):
            left = []
            at_once = MAX_ENTRIES // (DISCRETE.graph_entries * window.number * len(self._owner))
            for some in rows.split(max(1, at_once)):
                points = rest[some].requires_grad_(with_score)
                with torch.set_grad_enabled(with_score):
                    found = self._sum(points, window)
                yield some, points, found
                self._learn(found)
                left.append(some[~found.is_whole])
            rows = torch.cat(left) if window.number < self._most else rows[:0]
            window = self._between(window.first - window.number // 2, 2 * window.number)

    def _between(self, first: Tensor, number: int) -> _Window:
        return _Window(first.maximum(self._low), min(number, self._most))

    def _sum(self, rest: Tensor, window: _Window) -> _Sum:
        number = window.number
        steps = window.first + torch.arange(number).to(self._low).unsqueeze(-1)
        values = steps.minimum(self._high)
        vectors = self._vectors(rest.repeat(number, 1), values.repeat_interleave(len(rest), 0))
        terms = self._exact.terms(vectors).double()
        sums = terms.new_zeros(len(terms), self.num_integrated + 1)
        sums = sums.index_add(-1, self._owner, terms).unflatten(0, (number, len(rest)))
        others, weights = sums[0, :, -1], sums[..., :-1]
        is_value = (steps <= self._high).unsqueeze(1)
        weights = weights.masked_fill(weights.isnan() | ~is_value, -math.inf)
        value = others + weights.logsumexp(0).sum(-1) + self._exact.log_det(vectors[: len(rest)])
        return _Sum(window, weights, value, self._is_whole(weights.detach(), window))

    def _is_whole(self, weights: Tensor, window: _Window) -> Tensor:
        total = weights.logsumexp(0)
        shares = (weights - total).exp()
        is_first = window.first <= self._low
        is_last = window.first + window.number > self._high
        is_known = (_tail(shares[:2].flip(0)) < DISCRETE.negligible) | is_first
        is_known &= (_tail(shares[-2:]) < DISCRETE.negligible) | is_last
        return (is_known & total.isfinite()).all(-1)

    @torch.no_grad()
    def _learn(self, found: _Sum) -> None:
        """Move the window to the values that count where the density is highest so far."""
        value = found.value.masked_fill(~found.is_whole | found.value.isnan(), -math.inf)
        best, place = value.max(0)
        if not best > self._best + DISCRETE.higher:
            return
        self._best = best.item()
        weights = found.weights[:, place]
        counts = weights - weights.logsumexp(0) > math.log(DISCRETE.negligible)
        first = counts.to(torch.uint8).argmax(0)
        last = len(counts) - 1 - counts.flip(0).to(torch.uint8).argmax(0)
        margin = math.ceil(DISCRETE.margin * (last - first + 1).max().item())
        number = int((last - first).max()) + 1 + 2 * margin
        self._window = self._between(found.window.first + first - margin, number)


def _tail(shares: Tensor) -> Tensor:
    """Return the sum of the geometric series that two values begin, without these."""
    before, last = shares[0], shares[-1]
    return torch.where(last > 0, last.square() / (before - last).clamp(min=0.0), 0.0)
