# SPDX-License-Identifier: Apache-2.0
r"""Discrete elements with pairwise terms that form trees: sum them out.

Let each term :math:`t_k` of the log-density depend on at most two of the discrete elements
:math:`n_1, \dots, n_E`, such as a count and the count of the year before, and let the graph of
these pairs have no cycle. Messages from the leaves of the trees to their roots then give

.. math:: \log p(r, y) = \sum_{k \text{ of none}} t_k(r)
    + \log \sum_{n_1, \dots, n_E} \exp \sum_{k \text{ of some}} t_k(r, n)

at the price of all pairs of values (``ops/belief_propagation.py``).

A window of values of all elements is evaluated at once. It grows until geometric series that
continue its ends are negligible: they bound the rest of a sum with log-concave terms. Wide windows
have every h-th value with h times its weight: by Poisson's summation formula this sum differs from
that of all values by a factor of :math:`1 + 2 \exp(-2 \pi^2 \sigma^2 / h^2)` for a normal density,
:math:`1 + 5 \cdot 10^{-9}` for h equal to its standard deviation :math:`\sigma`. The sum of every
2h-th value verifies it: its error :math:`\delta` exceeds that of h by far, which is
:math:`2 (\delta / 2)^4`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.density.marginal import Marginal
from pyro_implicit.density.policy import DISCRETE, MarginalPolicy
from pyro_implicit.density.target import Target
from pyro_implicit.ops.belief_propagation import (
    Forest,
    draw_values,
    find_forest,
    log_marginals,
    sum_product,
)
from pyro_implicit.ops.policy import MAX_ENTRIES
from pyro_implicit.runtime.sites import site_parts

__all__ = ["DiscreteMarginal", "Owners", "find_owners"]


class Owners(NamedTuple):
    """The elements on which each term depends.

    ``owner`` is ``(num_terms,)``: the element, of a pair the child, or the number of elements for
    none. ``is_pair`` marks the terms that depend on the parent of the element, too.
    """

    owner: Tensor
    is_pair: Tensor
    forest: Forest


def find_owners(depends: Tensor) -> Owners | None:
    """Return the elements on which terms depend, None if a sum over all values is too expensive.

    :param depends: which terms depend on which elements, ``(num_elements, num_terms)``.
    """
    number = depends.sum(0)
    if (number > 2).any():
        return None
    is_pair, size = number == 2, len(depends)
    pairs = depends[:, is_pair].T.nonzero()[:, 1].reshape(-1, 2)
    forest = find_forest(pairs, size)
    if forest is None:
        return None
    owner = torch.where(number > 0, depends.to(torch.uint8).argmax(0), size)
    one, other = pairs.unbind(-1)
    owner[is_pair] = torch.where(forest.parent.to(one.device)[one] == other, one, other)
    return Owners(owner, is_pair, forest.to(owner.device))


class _Window(NamedTuple):
    """The values of each element that are summed, at some points."""

    first: Tensor  # (num_points, num_elements)
    stride: Tensor  # (num_points, num_elements), between values
    number: int
    is_fine: bool = False  # whether larger strides were too coarse

    def of(self, rows: Tensor) -> _Window:
        """Return the windows at some of the points."""
        return self._replace(first=self.first[rows], stride=self.stride[rows])


class _Sum(NamedTuple):
    """Sums over a window, at some points."""

    window: _Window
    values: Tensor  # (num_points, num_values, num_elements)
    beliefs: Tensor  # (num_points, num_elements, num_values)
    pairs: Tensor  # (num_points, num_children, num_values, num_values)
    value: Tensor  # (num_points,), the marginal log-density
    shares: Tensor  # (num_points, num_elements, num_values), log-probabilities, constant
    is_short: Tensor  # (num_points, num_elements), whether values outside of the window count
    is_coarse: Tensor  # (num_points,), whether values between those of the window count

    @property
    def is_whole(self) -> Tensor:
        """Whether other values are negligible, ``(num_points,)``."""
        return ~self.is_short.any(-1) & ~self.is_coarse & self.value.isfinite()


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
    >>> owners = find_owners(torch.tensor([[False, True, True]]))  # of rate, n and y
    >>> marginal = DiscreteMarginal(target, target.in_double(), owners, MarginalPolicy())
    >>> marginal(torch.zeros(1, 1))  # at rate = 1: y is Poisson(0.5)
    tensor([-5.3712])

    :param target: the posterior of all latent variables, of which some are discrete.
    :param exact: the same posterior in the precision of the computation.
    :param owners: the elements on which its ``terms`` depend.
    :param policy: steps and tolerances.
    """

    how = "summed"

    def __init__(
        self, target: Target, exact: Target, owners: Owners, policy: MarginalPolicy
    ) -> None:
        assert target.elements is not None
        super().__init__(target, exact, list(target.sampled), policy)
        low, high, _ = target.elements
        self._owners = owners
        self._low, self._high = low.to(exact.init_loc), high.to(exact.init_loc)
        self._is_label = target.elements.is_label
        most = DISCRETE.most_paired if owners.is_pair.any() else DISCRETE.most_values
        self._most = int(target.elements.num_values.max().clamp(max=most))
        number = min(DISCRETE.first_values, self._most)
        low = self._low.unsqueeze(0)
        self._window = _Window(low, torch.ones_like(low), number)
        self._stride = torch.full_like(low, math.inf)  # small enough near the mode
        self._best = -math.inf
        self._sites = exact.sites_of_terms()
        is_pair = owners.is_pair.tolist()
        self._paired = {name for name, own in zip(self._sites, is_pair, strict=True) if own}
        #: Whether elements share terms.
        self.has_pairs = bool(self._paired)

    def evaluate(self, rest: Tensor, with_score: bool = True) -> tuple[Tensor, Tensor]:
        """Return log-density and gradient, see :meth:`Marginal.evaluate`."""
        rest = rest.detach().double()
        value, score = rest.new_full(rest.shape[:1], -math.inf), torch.zeros_like(rest)
        for rows, points, found, is_last in self._sums(rest, with_score):
            value[rows] = found.value.detach()
            if with_score and is_last.any():
                (slopes,) = torch.autograd.grad(found.value, points, is_last.to(found.value))
                score[rows[is_last]] = slopes[is_last]
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
        for rows, _, found, _ in self._sums(rest, False, is_random=True):
            places, log_prob = draw_values(found.beliefs, found.pairs, self._owners.forest)
            chosen = found.values.gather(1, places.unsqueeze(1)).squeeze(1)
            values[rows] = chosen.to(values)
            conditional[rows] = log_prob - found.window.stride.log().sum(-1)
            value[rows], is_whole[rows] = found.value, found.is_whole
        vectors = self._vectors(rest, values.to(self._low))
        joint = self._exact.log_prob(vectors).double()
        rounding = torch.finfo(self._low.dtype).eps ** self.policy.rounding_power
        fault = (joint - value - conditional).abs() - rounding * (joint.abs() + value.abs())
        is_known = is_whole & fault.isfinite()
        fault = fault.clamp(min=0.0).masked_fill(~is_known, math.inf)
        return vectors.to(self.target.init_loc), value, fault

    def _sums(
        self, rest: Tensor, with_score: bool, is_random: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, _Sum, Tensor]]:
        """Sum at each point until other values are negligible, or their number is the largest.

        :param is_random: whether windows with strides have random offsets, so that all values can
            be drawn.
        :returns: rows of ``rest``, their points, the sums at these, and whether the sums are the
            last ones of a point.
        """
        rows = torch.arange(len(rest), device=rest.device)
        todo = [(rows, self._window.of(torch.zeros_like(rows)))]
        num_pairs = int(self._owners.is_pair.sum())
        while todo:
            rows, windows = todo.pop()
            number = windows.number
            entries = number * (len(self._owners.owner) + num_pairs * number)
            at_once = MAX_ENTRIES // (DISCRETE.graph_entries * entries)
            for part in torch.arange(len(rows), device=rest.device).split(max(1, at_once)):
                window = windows.of(part)
                if is_random:
                    window = self._moved(window)
                points = rest[rows[part]].requires_grad_(with_score)
                with torch.set_grad_enabled(with_score):
                    found = self._sum(points, window)
                self._learn(found)
                is_last = torch.ones_like(found.is_coarse)
                for again, other in (self._longer(found), self._finer(found)):
                    if len(again):
                        todo.append((rows[part[again]], other))
                        is_last[again] = False
                yield rows[part], points, found, is_last

    def _moved(self, window: _Window) -> _Window:
        """Return windows with random offsets, so that each value is as likely in a window."""
        stride = window.stride
        first = window.first + ((torch.rand_like(stride) - 0.5) * stride).round()
        return window._replace(first=torch.where(first < self._low, first + stride, first))

    def _longer(self, found: _Sum) -> tuple[Tensor, _Window]:
        """Return points, and windows of twice the length for elements whose window is too short."""
        (first, stride, number, is_fine), is_short = found.window, found.is_short
        first = torch.where(is_short, first - number // 2 * stride, first)
        is_small = number < DISCRETE.first_values
        if is_fine or is_small or (is_short & self._is_label).any():
            number = 2 * number
        else:
            stride = torch.where(is_short, 2 * stride, stride)
        is_allowed = (stride <= DISCRETE.longest_stride).all(-1) & (number < 2 * self._most)
        rows = (is_short.any(-1) & is_allowed).nonzero().flatten()
        return rows, self._between(first, stride, number, is_fine).of(rows)

    def _finer(self, found: _Sum) -> tuple[Tensor, _Window]:
        """Return points, and windows of half the strides for the values that count."""
        rows = (found.is_coarse & ~found.is_short.any(-1)).nonzero().flatten()
        first, width = self._that_count(found, rows)
        stride = (found.window.stride[rows] / 2).ceil().minimum(self._stride)
        number = int((width / stride).ceil().max()) if len(rows) else 0
        if number > self._most:
            rows = rows[:0]
        return rows, self._between(first, stride, number, is_fine=True)

    def _that_count(self, found: _Sum, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first value of each element that counts, and the range of these values."""
        window = found.window.of(rows)
        counts = (found.shares[rows] > math.log(DISCRETE.negligible)).to(torch.uint8)
        before, after = counts.argmax(-1), counts.flip(-1).argmax(-1)
        first = window.first + (before - 1) * window.stride
        return first, (counts.shape[-1] - before - after + 2) * window.stride

    def _between(
        self, first: Tensor, stride: Tensor, number: int, is_fine: bool = False
    ) -> _Window:
        return _Window(first.maximum(self._low), stride, min(number, self._most), is_fine)

    def _sum(self, rest: Tensor, window: _Window) -> _Sum:
        owners, number, size = self._owners, window.number, self.num_integrated
        steps = torch.arange(number).to(self._low).unsqueeze(-1) * window.stride.unsqueeze(1)
        # Integers, also under ``InexactArithmetic``: (num_points, number, num_elements).
        values = (window.first.unsqueeze(1) + steps).round()
        is_value = (values <= self._high).mT
        values = values.minimum(self._high)
        vectors = self._vectors(rest.repeat_interleave(number, 0), values.flatten(0, 1))
        terms = self._exact.terms(vectors).double()[:, ~owners.is_pair]
        sums = terms.new_zeros(len(terms), size + 1)
        sums = sums.index_add(-1, owners.owner[~owners.is_pair], terms)
        sums = sums.unflatten(0, (-1, number)).mT
        others, unary = sums[:, -1, 0], sums[:, :-1] + window.stride.log().unsqueeze(-1)
        unary = unary.masked_fill(unary.isnan() | ~is_value, -math.inf)
        pairs = self._pairs(rest, values) if owners.is_pair.any() else unary[:, :0, :, None]
        totals, beliefs, messages = sum_product(unary, pairs, owners.forest)
        value = others + totals.sum(-1) + self._exact.log_det(vectors[::number])
        unary, pairs, totals = unary.detach(), pairs.detach(), totals.detach()
        beliefs, messages = beliefs.detach(), messages.detach()
        shares = log_marginals(beliefs, messages, pairs, owners.forest)
        is_coarse = self._is_coarse(unary, pairs, totals, window)
        is_coarse |= self._jumps(shares, pairs, window)
        is_short = self._is_short(shares.exp(), window)
        return _Sum(window, values, beliefs, pairs, value, shares, is_short, is_coarse)

    def _is_coarse(self, unary: Tensor, pairs: Tensor, totals: Tensor, window: _Window) -> Tensor:
        """Return whether the sum of every second value differs too much, ``(num_points,)``."""
        has_stride = (window.stride > 1).unsqueeze(-1)
        if not has_stride.any():
            return torch.zeros_like(totals[:, 0], dtype=torch.bool)
        is_left_out = has_stride & (torch.arange(window.number).to(self._low) % 2 == 1)
        half = (unary + math.log(2.0) * has_stride).masked_fill(is_left_out, -math.inf)
        errors = (sum_product(half, pairs, self._owners.forest)[0] - totals).abs()
        return ~(errors < 2 * (DISCRETE.negligible / 2) ** 0.25).all(-1)

    def _jumps(self, shares: Tensor, pairs: Tensor, window: _Window) -> Tensor:
        """Return whether a value counts next to an impossible one, ``(num_points,)``.

        Strides are for smooth functions: the sum of every h-th value misjudges a jump in proportion
        to h.
        """
        has_stride, counts = window.stride > 1, shares > math.log(DISCRETE.negligible)
        after = window.first + window.number * window.stride > self._high
        is_impossible = torch.nn.functional.pad(shares == -math.inf, (1, 1))
        is_impossible[..., 0] = window.first - window.stride < self._low
        is_impossible[..., -1] = after
        is_edge = is_impossible[..., :-2] | is_impossible[..., 2:]
        jumps = ((is_edge & counts).any(-1) & has_stride).any(-1)
        is_impossible = pairs == -math.inf
        if is_impossible.any() and has_stride.any():
            child = self._owners.forest.children
            parent = self._owners.forest.parent[child]
            both = counts[:, child].unsqueeze(-1) & counts[:, parent].unsqueeze(-2)
            has_stride = has_stride[:, child] | has_stride[:, parent]
            jumps |= ((both & is_impossible).any(-1).any(-1) & has_stride).any(-1)
        return jumps

    def _pairs(self, rest: Tensor, values: Tensor) -> Tensor:
        """Return the terms of each element and its parent, see :func:`sum_product`.

        Elements of even depth have one dimension of the values, those of odd depth another: nested
        calls of ``vmap`` evaluate a term that depends on only one of them at only its values.
        """
        owners, number = self._owners, values.shape[1]
        of_sites = torch.tensor([name in self._paired for name in self._sites])
        is_pair = owners.is_pair[of_sites.to(values.device)].nonzero().flatten()
        read = torch.func.vmap(self._terms_of_pairs, (None, None, 0))
        read = torch.func.vmap(torch.func.vmap(read, (None, 0, None)))
        terms = read(rest, values, values).double().movedim(-1, 1)
        if len(is_pair) < terms.shape[1]:
            terms = terms[:, is_pair]
        owner = owners.owner[owners.is_pair]
        is_odd = owners.forest.is_odd[owner].reshape(-1, 1, 1)
        terms = torch.where(is_odd, terms.mT, terms)
        if terms.isnan().any():
            terms = terms.masked_fill(terms.isnan(), -math.inf)
        child, place = (owner.unsqueeze(-1) == owners.forest.children).nonzero(as_tuple=True)
        if len(owner) == place.amax() + 1:
            return terms[:, child[place.argsort()]]
        pairs = terms.new_zeros(len(rest), len(owners.forest.children), number, number)
        return pairs.index_add(1, place, terms)

    def _terms_of_pairs(self, rest: Tensor, even: Tensor, odd: Tensor) -> Tensor:
        values, transforms = {}, self.target.transforms
        for name, part in site_parts(rest, self.shapes).items():
            values[name] = transforms[name](part)
        kinds = [site_parts(one, self._own) for one in (self._owners.forest.is_odd, even, odd)]
        for name in self.names:
            is_odd, *parts = (kind[name] for kind in kinds)
            part = parts[int(is_odd.all())]
            if is_odd.any() and not is_odd.all():
                part = torch.where(is_odd, parts[1], parts[0])
            values[name] = transforms[name](part)
        return self._exact.terms_at(values, self._paired)

    def _is_short(self, shares: Tensor, window: _Window) -> Tensor:
        """Return whether values outside of the window count, ``(num_points, num_elements)``."""
        is_known = _tail(shares[..., 1], shares[..., 0]) < DISCRETE.negligible
        is_known |= window.first - window.stride < self._low
        is_last = _tail(shares[..., -2], shares[..., -1]) < DISCRETE.negligible
        is_last |= window.first + window.number * window.stride > self._high
        return ~(is_known & is_last & shares.isfinite().all(-1))

    @torch.no_grad()
    def _learn(self, found: _Sum) -> None:
        """Move the window to the values that count where the density is highest so far."""
        best, place = found.value.masked_fill(~found.is_whole, -math.inf).max(0)
        if not best > self._best + DISCRETE.higher:
            return
        self._best, self._stride = best.item(), found.window.stride[place : place + 1]
        first, width = self._that_count(found, place.reshape(1))
        margin = (DISCRETE.margin * width).ceil()
        width = width + 2 * margin
        number = int((width / self._stride).ceil().max())
        if number > DISCRETE.first_values * (1 if self._paired else 2):
            number = DISCRETE.first_values  # a finer window for the values that count follows
        number = max(number, int(torch.where(self._is_label, width, 1).max()))
        self._window = self._between(first - margin, (width / number).ceil(), number)


def _tail(before: Tensor, last: Tensor) -> Tensor:
    """Return the sum of the geometric series that two values begin, without these."""
    return torch.where(last > 0, last.square() / (before - last).clamp(min=0.0), 0.0)
