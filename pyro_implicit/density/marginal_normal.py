# SPDX-License-Identifier: Apache-2.0
r"""Latent variables that are normal given all others: integrate them out in closed form.

Let the log-density be a quadratic function of some latent variables s for all values of the others
r, with precision matrix P(r) and conditional mean m(r). Then

.. math:: \log p(r, y) = \log p(r, m(r), y) + \tfrac n2 \log 2\pi - \tfrac12 \log\det P(r),
    \qquad s \mid r, y \sim N(m(r), P(r)^{-1}).

One Newton step finds m(r). A few products with the Hessian, one for each colour of its sparsity
pattern, give P(r) (Curtis, Powell and Reid, 1974).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, reverse_cuthill_mckee
from torch import Tensor

from pyro_implicit.density.marginal import Marginal, SplitSites
from pyro_implicit.density.policy import MARGINAL, RUNS, MarginalPolicy
from pyro_implicit.density.target import Target
from pyro_implicit.ops.block_tridiagonal import BlockFactor
from pyro_implicit.ops.jacobian import hessian_products
from pyro_implicit.ops.policy import MAX_ENTRIES
from pyro_implicit.runtime.sites import site_parts

__all__ = ["JointDensity", "NormalMarginal", "find_normal_marginal"]


class _Sums(NamedTuple):
    """Coordinates of a site: sums along ``dim`` (negative), taken ``times`` times."""

    dim: int = -1
    times: int = 0


class _Structure(NamedTuple):
    """Entries of the precision matrix: where they are read, and where they lie in its blocks."""

    row: Tensor
    colour: Tensor
    place: Tensor
    seeds: Tensor  # (num_colours, n), the columns of each colour
    order: Tensor  # (n,), the place of each coordinate in the blocks
    num_blocks: int
    size: int
    is_chain: bool  # whether blocks have neighbours


class JointDensity(SplitSites):
    """The joint density in coordinates of the integrated sites, and its Hessian by them.

    The arguments are those of :class:`SplitSites`.
    """

    def __init__(
        self, target: Target, exact: Target, names: list[str], policy: MarginalPolicy
    ) -> None:
        super().__init__(target, exact, names, policy)
        self._coordinates = dict.fromkeys(names, _Sums())
        self._centre = exact.init_loc[self._own_index]

    def rest_of(self, vectors: Tensor) -> Tensor:
        """Return the remaining sites of vectors ``(num_points, latent_dim)``."""
        return vectors[:, self._rest_index].to(self._centre)

    def _to_latent(self, points: Tensor) -> Tensor:
        if not any(sums.times for sums in self._coordinates.values()):
            return points  # without the splits of hundreds of sites, and their gradients
        parts = []
        for name, part in site_parts(points, self._own).items():
            sums = self._coordinates[name]
            for _ in range(sums.times):
                start = torch.zeros_like(part.narrow(sums.dim, 0, 1))
                part = part.diff(dim=sums.dim, prepend=start)
            parts.append(part.reshape(len(points), -1))
        return torch.cat(parts, -1)

    def _to_points(self, latent: Tensor) -> Tensor:
        parts = []
        for name, part in site_parts(latent, self._own).items():
            sums = self._coordinates[name]
            for _ in range(sums.times):
                part = part.cumsum(sums.dim)
            parts.append(part.reshape(len(latent), -1))
        return torch.cat(parts, -1)

    def _log_prob(self, rest: Tensor, points: Tensor) -> Tensor:
        own = self._to_latent(points)
        if self._exact.is_fused:  # without the join of hundreds of sites, and its gradients
            return self._exact.log_prob(self._vectors(rest, own)).double()
        parts = site_parts(rest.to(own), self.shapes) | site_parts(own, self._own)
        return self._exact.log_prob_by_site(parts).double()

    def _gradient(self, rest: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the joint log-density and its gradient by ``points``, with its graph."""
        value = self._log_prob(rest, points)
        (gradient,) = torch.autograd.grad(value.sum(), points, create_graph=True)
        return value, gradient

    @torch.enable_grad()
    def is_quadratic(self, rest: Tensor) -> bool:
        """Return whether the density is quadratic in the integrated sites, as far as seen.

        Value, gradient and Hessian at random points, near and far, must be those of one quadratic
        function. The Hessian alone is blind to kinks, and the gradient to jumps.

        :param rest: values of the remaining sites, ``(num_points, dim)``.
        """
        policy, tolerance = self.policy, self._tolerance
        distances = self._centre.new_tensor([0.0, *policy.distances])
        count = len(distances)
        direction, other = torch.randn(2, self.num_integrated).to(self._centre)
        start = self._centre.expand(len(rest), -1).clone().requires_grad_()
        slope = self._gradient(rest, start)[1]
        curved = -hessian_products(slope, start, direction.unsqueeze(0))[0]
        if curved.isnan().all():  # torch has no such derivative
            return False
        scales = []  # a standard deviation of each site, roughly
        for part in site_parts(curved * direction, self._own).values():
            mean = part.reshape(len(rest), -1).mean(-1, keepdim=True)
            scale = torch.where(mean > 0, mean, 1.0).rsqrt()
            scales.append(scale.expand(-1, part[0].numel()))
        moved = torch.cat(scales, -1) * direction
        along = torch.zeros_like(start)  # the curvature along the step
        if slope.requires_grad:
            (along,) = torch.autograd.grad(slope, start, moved)
        points = (start + distances.reshape(-1, 1, 1) * moved).detach().flatten(0, 1)
        points.requires_grad_()
        value, gradient = self._gradient(rest.repeat(count, 1), points)
        curved = hessian_products(gradient, points, torch.stack([direction, other]))
        value = value.detach().reshape(count, len(rest))
        gradient = gradient.detach().reshape(count, len(rest), -1)
        curved = curved.detach().reshape(2, count, len(rest), -1)
        far = distances.reshape(-1, 1, 1)
        expected = gradient[0] + far * along
        slopes = ((gradient[0] + 0.5 * far * along) * far * moved).sum(-1)
        is_close = _close(curved, curved[:, :1], tolerance, self._own)
        is_close &= _close(gradient, expected, tolerance, self._own)
        error = (value - (value[0] + slopes)).abs()
        size = value.abs() + value[0].abs() + slopes.abs()
        return bool(is_close) and bool((error <= tolerance * size + tolerance).all())

    @property
    def _tolerance(self) -> float:
        return _tolerance(self._centre.dtype, self.policy)

    def in_sparse_coordinates(self, rest: Tensor) -> JointDensity:
        """Return the density in the sums of each site whose Hessian has fewest entries."""
        found = copy.copy(self)
        for name, shape in self._own.items():
            fewest = math.inf
            if shape.numel() < self.policy.least_integrated:
                continue
            dims = [-1 - dim for dim in range(len(shape)) if shape[-1 - dim] > 1]
            for sums in [_Sums(), *(_Sums(dim, times) for times in (1, 2) for dim in dims)]:
                tried = copy.copy(found)
                tried._coordinates = found._coordinates | {name: sums}
                count = tried._count_entries(rest, name)
                if count < fewest:
                    fewest, found = count, tried
        found._centre = found._to_points(self._centre.unsqueeze(0)).squeeze(0)
        return found

    def _columns(self, rest: Tensor, seeds: Tensor) -> Tensor:
        """Return the precision matrix times vectors at one point, ``(num_seeds, n)``."""
        with torch.enable_grad():
            start = self._centre.unsqueeze(0).clone().requires_grad_()
            gradient = self._gradient(rest, start)[1]
            return -hessian_products(gradient, start, seeds).detach().squeeze(1)

    def _count_entries(self, rest: Tensor, name: str) -> float:
        parts = site_parts(torch.arange(self.num_integrated), self._own)
        index = parts[name].flatten()
        picked = index[torch.randperm(len(index))[: self.policy.num_columns]]
        columns = self._columns(rest[:1], _units(picked, self.num_integrated).to(self._centre))
        columns = columns[:, index.to(columns.device)].abs()
        return (columns > self._zero * columns.amax(-1, True)).sum(-1).max().item()

    @property
    def _zero(self) -> float:
        return max(self.policy.zero, torch.finfo(self._centre.dtype).eps)

    def find_structure(self, rest: Tensor) -> _Structure | None:
        """Return the sparsity pattern and its layout; None if a factor is too expensive."""
        for read in (self._guessed_pattern, self._whole_pattern):
            pattern = read(rest)
            found = None if pattern is None else self._laid_out(pattern, rest)
            if found is not None:
                cubes = found.num_blocks * found.size**3 * (3 if found.is_chain else 1)
                return found if cubes <= self.policy.most_operations else None
        return None

    def _guessed_pattern(self, rest: Tensor) -> csr_array | None:
        """Return the pattern in which all columns have entries where some columns have them."""
        size, policy = self.num_integrated, self.policy
        index = torch.randperm(size, device="cpu")[: 4 * policy.num_columns]
        which, row = self._entries_of(rest[:1], index)
        offsets = np.unique(row - index.numpy()[which])
        if len(offsets) > policy.most_products or len(index) == size:
            return None
        row = np.arange(size) + offsets.reshape(-1, 1)
        is_inside = (row >= 0) & (row < size)
        return _symmetric(row[is_inside], np.nonzero(is_inside)[1], size)

    def _whole_pattern(self, rest: Tensor) -> csr_array | None:
        """Return the pattern, from a product with every unit vector."""
        size, rows, columns = self.num_integrated, [], []
        at_once = max(1, MAX_ENTRIES // (16 * size))
        for index in torch.arange(size, device="cpu").split(at_once):
            for one in rest[:2].split(1):
                which, row = self._entries_of(one, index)
                rows.append(row)
                columns.append(index.numpy()[which])
            if sum(map(len, rows)) > 2 * self.policy.most_products * size:
                return None
        return _symmetric(np.concatenate(rows), np.concatenate(columns), size)

    def _entries_of(self, rest: Tensor, index: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return columns (their places in ``index``) and rows of the entries at one point."""
        found = self._columns(rest, _units(index, self.num_integrated).to(self._centre)).abs()
        which, row = (found > self._zero * found.amax(-1, True)).nonzero(as_tuple=True)
        return which.cpu().numpy(), row.cpu().numpy()

    def _laid_out(self, pattern: csr_array, rest: Tensor) -> _Structure | None:
        """Lay out a pattern without its zeros; None if products at some point disagree."""
        colours = _colour(pattern, self.policy.most_products)
        if colours is None:
            return None
        seeds = _seeds(colours).to(self._centre)
        vector = torch.randn(self.num_integrated).to(self._centre)
        row, column = pattern.nonzero()
        largest = np.zeros(len(row))
        for one in rest.split(1):
            found = self._columns(one, torch.cat([seeds, vector.unsqueeze(0)])).cpu()
            entries = found.numpy()[colours[column], row]
            built = csr_array((entries, (row, column)), shape=pattern.shape)
            product = torch.from_numpy(built @ vector.cpu().numpy())
            if not _close(product, found[-1], self._tolerance, self._own):
                return None
            largest = np.maximum(largest, np.abs(entries))
        is_used = (largest > 0) | (row == column)
        pattern = _symmetric(row[is_used], column[is_used], len(colours))
        colours = _colour(pattern, self.policy.most_products)
        if colours is None:
            return None
        return _lay_out(pattern, colours, self._centre, self.policy)


class NormalMarginal(JointDensity, Marginal):
    """The density of the remaining latent variables, and draws of the integrated ones.

    :param joint: the joint density in the coordinates of the structure.
    :param structure: the entries of the precision matrix.
    """

    def __init__(self, joint: JointDensity, structure: _Structure) -> None:
        super().__init__(joint.target, joint._exact, joint.names, joint.policy)
        self._coordinates, self._centre = joint._coordinates, joint._centre
        self._structure = structure

    @classmethod
    def of(cls, joint: JointDensity, starts: Tensor) -> NormalMarginal | None:
        """Return the marginal of a quadratic density; None if it is expensive or inexact.

        :param starts: vectors of all latent variables, ``(num_points, latent_dim)``.
        :raises ValueError: for a quadratic function without a maximum, naming the site.
        """
        policy = joint.policy
        if joint.dim > policy.most_remaining or joint.num_integrated > policy.most_integrated:
            return None
        rest = joint.rest_of(starts)
        joint = joint.in_sparse_coordinates(rest)
        structure = joint.find_structure(rest)
        if structure is None:
            return None
        found = cls(joint, structure)
        if found.work > policy.most_work:
            return None
        found.refuse_improper(rest)
        return found if found._is_exact(rest) else None

    @property
    def work(self) -> int:
        """Roughly proportional to the time of a fit of the remaining sites.

        A step of Newton's method takes two scores for each of their dimensions, a score some
        products with the Hessian; and more dimensions need more steps, weights and transitions.
        """
        return len(self._structure.seeds) * (2 * self.dim + 1) ** 2

    def _is_exact(self, rest: Tensor) -> bool:
        """Return whether marginal and conditional density make the joint one, at draws."""
        faults = torch.stack([self.draw(rest, far)[2] for far in self.policy.distances[1:4]])
        is_known = faults.isfinite().all(0)
        return bool(is_known.any()) and bool((faults[:, is_known] < self.policy.max_fault).all())

    def refuse_improper(self, rest: Tensor) -> None:
        """Check that the precision matrix is positive definite somewhere.

        :param rest: values of the remaining sites, ``(num_points, dim)``.
        :raises ValueError: naming the site.
        """
        names = [name for name, shape in self._own.items() for _ in range(shape.numel())]
        colour = self._structure.seeds.argmax(0)
        for one in rest.split(1):
            products = self._columns(one, self._structure.seeds).unsqueeze(1)
            if not products.isfinite().all():
                return
            diagonal = products[colour, :, torch.arange(len(colour), device=colour.device)].T
            left = self._unordered(self._factor(-products).pivots()).square() / diagonal.double()
            # Smaller pivots are rounding of sums of a hundred terms: the matrix is singular.
            if (left > 100 * torch.finfo(left.dtype).eps).all():
                return
            place = int(left.nan_to_num(0.0).argmin())
        raise ValueError(
            f"the posterior is improper: the log-density is a quadratic function of site "
            f"'{names[place]}' without a maximum, as its precision matrix is not positive definite "
            "(tried at several values of the other sites). Cure: a proper prior, data for each "
            "connected part, or a sum-to-zero constraint for each of them, such as "
            "pyro.sample('centre', Normal(x.sum(), 0.001), obs=zero)"
        )

    # The marginal density

    def _factor(self, products: Tensor) -> BlockFactor:
        found = self._structure
        entries = -products[found.colour, :, found.row].double().T
        blocks, size = found.num_blocks, found.size
        below = (blocks - 1) * size * size if found.is_chain else 0
        storage = entries.new_zeros(len(entries), blocks * size * size + below)
        storage[:, found.place] = entries
        diagonal, lower = storage.split([blocks * size * size, below], -1)
        diagonal = diagonal.reshape(-1, blocks, size, size)
        padding = diagonal.new_ones(blocks * size).index_fill(0, found.order, 0.0)
        diagonal = diagonal + padding.reshape(blocks, size).diag_embed()
        if not found.is_chain:
            return BlockFactor(diagonal)
        return BlockFactor(diagonal, lower.reshape(-1, blocks - 1, size, size))

    def _ordered(self, vector: Tensor) -> Tensor:
        found = self._structure
        whole = vector.new_zeros(len(vector), found.num_blocks * found.size)
        whole[:, found.order] = vector
        return whole.double().reshape(-1, found.num_blocks, found.size)

    def _unordered(self, blocks: Tensor) -> Tensor:
        return blocks.flatten(1)[:, self._structure.order]

    def _chunks(self, rest: Tensor) -> Iterator[Tensor]:
        found = self._structure
        entries = 2 * found.num_blocks * found.size**2 + 8 * found.seeds.numel()
        return iter(rest.split(max(1, MAX_ENTRIES // (2 * entries))))

    def evaluate(self, rest: Tensor, with_score: bool = True) -> tuple[Tensor, Tensor]:
        """Return log-density and gradient, see :meth:`Marginal.evaluate`.

        The log-density is -inf, too, where the precision matrix is not positive definite.
        """
        parts = [self._at(chunk, with_score)[:2] for chunk in self._chunks(rest.detach().double())]
        value, score = map(torch.cat, zip(*parts, strict=True))
        return value, score

    @torch.enable_grad()
    def _at(self, rest: Tensor, with_score: bool) -> tuple[Tensor, Tensor, BlockFactor, Tensor]:
        """Return log-density, gradient, factor and the conditional mean in own coordinates."""
        found = self._structure
        rest = rest.detach().requires_grad_(with_score)
        start = self._centre.expand(len(rest), -1).clone().requires_grad_()
        _, gradient = self._gradient(rest, start)
        products = hessian_products(gradient, start, found.seeds, create_graph=with_score)
        with torch.no_grad():
            factor = self._factor(products)
            step = self._unordered(factor.solve(self._ordered(gradient)))
            mean = (start + step.to(start)).detach()
        mean.requires_grad_()
        joint = self._log_prob(rest, mean)
        wanted = (rest, mean) if with_score else (mean,)
        *slopes, left = torch.autograd.grad(joint.sum(), wanted)
        with torch.no_grad():
            # The density lost because rounding moved the mean.
            fault = 0.5 * factor.whiten(self._ordered(left)).square().sum((-1, -2))
            log_det = factor.log_det()
            value = joint + fault + 0.5 * self.num_integrated * math.log(2 * math.pi)
            value = value - 0.5 * log_det
            is_finite = value.isfinite()
        score = torch.zeros_like(rest)
        if with_score:
            weights = self._read_inverse(factor, products)
            score = slopes[0]
            if products.requires_grad:
                (slope,) = torch.autograd.grad(
                    products, rest, 0.5 * weights.to(products), allow_unused=True
                )
                score = score if slope is None else score + slope
            is_finite = is_finite & score.isfinite().all(-1)
        value = value.detach().masked_fill(~is_finite, -math.inf)
        score = score.detach().masked_fill(~is_finite.unsqueeze(-1), 0.0)
        return value, score, factor, mean.detach().double()

    @torch.no_grad()
    def _read_inverse(self, factor: BlockFactor, products: Tensor) -> Tensor:
        """Return the entries of the inverse at the entries that ``products`` hold."""
        found = self._structure
        diagonal, below = factor.selected_inverse()
        storage = [one.flatten(1) for one in (diagonal, below) if one is not None]
        weights = torch.zeros_like(products, dtype=diagonal.dtype)
        weights[found.colour, :, found.row] = torch.cat(storage, -1)[:, found.place].T
        return weights

    @torch.no_grad()
    def draw(self, rest: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the integrated sites given the others, see :meth:`Marginal.draw`.

        :param scale: factor on the conditional standard deviations.
        """
        parts = [self._draw(chunk, scale) for chunk in self._chunks(rest.detach().double())]
        drawn, values, faults = map(torch.cat, zip(*parts, strict=True))
        return drawn, values, faults

    def _draw(self, rest: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        value, _, factor, mean = self._at(rest, False)
        noise = self._ordered(torch.randn_like(mean))
        points = mean + scale * self._unordered(factor.solve_transposed(noise))
        joint = self._log_prob(rest, points.to(self._centre))
        square = 0.5 * scale**2 * noise.square().sum((-1, -2))
        constant = 0.5 * self.num_integrated * math.log(2 * math.pi)
        top = value - constant + 0.5 * factor.log_det()
        rounding = self._tolerance * (joint.abs() + top.abs() + square)
        fault = ((joint - (top - square)).abs() - rounding).clamp(min=0.0)
        fault = fault.masked_fill(~(value.isfinite() & fault.isfinite()), math.inf)
        vectors = self._vectors(rest, self._to_latent(points))
        return vectors.to(self.target.init_loc), value, fault


def find_normal_marginal(
    target: Target, policy: MarginalPolicy = MARGINAL
) -> NormalMarginal | None:
    """Find latent variables that are normal given all others; None if there are too few.

    With at most 100 latent variables in all, none are integrated out: a search for modes and
    importance weights in all of them are cheaper.

    Each site is taken if the density stays a quadratic function of all sites that were taken. Sites
    with few elements are taken next to larger ones if that saves work. Every claim is checked by
    numbers: value, gradient and Hessian far from the mode, and in the end the joint density at
    draws.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     scale = pyro.sample("scale", dist.HalfNormal(1.0))
    ...     with pyro.plate("rows", len(y)):
    ...         x = pyro.sample("x", dist.Normal(0.0, scale))
    ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> marginal = find_normal_marginal(Target(model, torch.linspace(-2.0, 2.0, 101)))
    >>> marginal.names, marginal.num_integrated, list(marginal.shapes)
    (['x'], 101, ['scale'])

    :param target: the posterior.
    :param policy: limits and tolerances.
    :raises ValueError: for a quadratic function without a maximum, naming the site.
    """
    own = [group for group in target.groups if _may_be_normal(target, group, policy)]
    own.sort(key=lambda group: -_size(target, group))
    if not own or _size(target, own[0]) < policy.least_integrated:
        return None
    if target.summed_out or target.subsampled or not target.is_vectorized:
        return None
    bends = _bend(target, own, target.init_loc.unsqueeze(0), policy)
    starts = target.sample_prior(RUNS.num_points - 1)
    starts = target.init_loc + policy.spread * (starts - target.init_loc)
    starts = torch.cat([target.init_loc.unsqueeze(0), starts[starts.isfinite().all(-1)]])
    exact = target.in_double()
    if not exact.log_prob(starts.double()).isfinite().any():
        exact = target  # for instance a matrix in single precision outside of the arguments
    for index in (index for index, bent in enumerate(bends) if bent):
        # Few sites of a loop may have other terms, as those of censored observations.
        alone = [[name] for name in own[index]] if len(own[index]) > 1 else []
        bent = _bend(exact, alone, starts.to(exact.init_loc), policy)
        own[index] = [name for (name,), is_bent in zip(alone, bent, strict=True) if not is_bent]
    own = [group for group in own if _size(target, group) >= policy.least_added]
    own.sort(key=lambda group: -_size(target, group))
    taken: list[list[str]] = []
    for group in own:
        if not taken and _size(target, group) < policy.least_integrated:
            return None
        names = sum(taken, group)
        if len(names) == len(target.shapes):
            continue  # a site must remain
        joint = JointDensity(target, exact, names, policy)
        if joint.is_quadratic(joint.rest_of(starts)):
            taken.append(group)
    large = [group for group in taken if _size(target, group) >= policy.least_integrated]
    if not large:
        return None
    # A site on which all elements of another depend may make the matrix dense.
    usable: list[NormalMarginal] = []
    for number in dict.fromkeys((len(taken), len(large), 1)):
        joint = JointDensity(target, exact, sum(taken[:number], []), policy)
        found = NormalMarginal.of(joint, starts)
        if found is not None:
            usable.append(found)
        if usable and number <= len(large):
            break
    return min(usable, key=lambda found: found.work, default=None)


def _size(target: Target, group: list[str]) -> int:
    return sum(target.shapes[name].numel() for name in group)


def _may_be_normal(target: Target, group: list[str], policy: MarginalPolicy) -> bool:
    if target.latent_dim <= policy.least_latents or _size(target, group) < policy.least_added:
        return False
    return all(_is_identity(target.transforms[name]) for name in group)


def _bend(
    target: Target, groups: list[list[str]], starts: Tensor, policy: MarginalPolicy
) -> list[bool]:
    """Return for each group whether the density along a line is clearly no quadratic function.

    The third difference of one line's values costs little, and spares the whole check.
    """
    index = site_parts(torch.arange(target.latent_dim), target.shapes)
    lines = starts.new_zeros(len(groups), 1, target.latent_dim)
    for line, group in zip(lines, groups, strict=True):
        own = torch.cat([index[name].flatten() for name in group])
        line[:, own] = policy.line_length * torch.randn(len(own)).to(line)
    steps = torch.arange(4).to(lines)[:, None, None, None] - 1.5
    points = starts + steps * lines
    values = target.log_prob(points.flatten(0, 2)).reshape(points.shape[:-1])
    third = values.diff(n=3, dim=0).squeeze(0).abs()
    bent = third > _tolerance(values.dtype, policy) * values.abs().amax(0)
    return bent.any(-1).tolist()


def _tolerance(dtype: torch.dtype, policy: MarginalPolicy) -> float:
    return torch.finfo(dtype).eps ** policy.rounding_power


def _is_identity(transform: Any) -> bool:
    while hasattr(transform, "base_transform"):
        transform = transform.base_transform
    return isinstance(transform, torch.distributions.transforms.ComposeTransform) and not (
        transform.parts
    )


def _symmetric(row: np.ndarray, column: np.ndarray, size: int) -> csr_array:
    """Return a symmetric pattern with its diagonal."""
    diagonal = np.arange(size)
    both = (np.concatenate([row, column, diagonal]), np.concatenate([column, row, diagonal]))
    pattern = csr_array((np.ones(len(both[0])), both), shape=(size, size))
    pattern.sum_duplicates()
    return pattern


def _seeds(colours: np.ndarray) -> Tensor:
    """Return the sum of the unit vectors of each colour, ``(num_colours, size)``."""
    return _units(torch.from_numpy(colours), int(colours.max()) + 1).T


def _units(index: Tensor, size: int) -> Tensor:
    return torch.nn.functional.one_hot(index, size)


def _close(one: Tensor, other: Tensor, tolerance: float, shapes: dict[str, torch.Size]) -> bool:
    """Return whether vectors agree, compared with the largest element of each site."""
    if not (one.isfinite().all() and other.isfinite().all()):
        return False
    other = other.expand_as(one)
    parts = (site_parts(vector, shapes).values() for vector in (one, other))
    for a, b in zip(*parts, strict=True):
        a, b = (part.reshape(*one.shape[:-1], -1) for part in (a, b))
        size = torch.maximum(a.abs().amax(-1), b.abs().amax(-1))
        if not ((a - b).abs().amax(-1) <= tolerance * size).all():
            return False
    return True


def _colour(pattern: csr_array, most: int) -> np.ndarray | None:
    """Colour the columns so that no row has two columns of one colour; None above ``most``."""
    size, (starts, indices) = pattern.shape[0], (pattern.indptr, pattern.indices)
    if np.diff(starts).max() > most:
        return None
    neighbours = [indices[starts[k] : starts[k + 1]] for k in range(size)]
    colours = np.full(size, -1)
    for column in range(size):
        near = np.concatenate([neighbours[row] for row in neighbours[column]])
        used = np.zeros(most + 1, dtype=bool)
        used[colours[near]] = True  # -1, no colour, is the last place
        free = np.flatnonzero(~used[:most])
        if len(free) == 0:
            return None
        colours[column] = free[0]
    return colours


def _lay_out(
    pattern: csr_array, colours: np.ndarray, like: Tensor, policy: MarginalPolicy
) -> _Structure:
    """Arrange the entries in blocks: those of connected components, or of a banded matrix."""
    size = pattern.shape[0]
    row, column = pattern.nonzero()
    number, component = connected_components(pattern, directed=False)
    largest = np.bincount(component).max()
    is_chain = largest > policy.least_block
    if is_chain:
        orders = [np.arange(size), reverse_cuthill_mckee(pattern.tocsr(), symmetric_mode=True)]
        places = [np.argsort(order) for order in orders]
        widths = [np.abs(place[row] - place[column]).max() for place in places]
        place, block = places[int(np.argmin(widths))], max(min(widths), policy.least_block)
        block = size if 2 * block > size else block  # a single block
        num_blocks = -(-size // block)
        is_chain = num_blocks > 1
    else:
        block, num_blocks = largest, number
        order = np.argsort(component, kind="stable")
        first = np.concatenate([[0], np.cumsum(np.bincount(component))[:-1]])
        within = np.empty(size, dtype=int)
        within[order] = np.arange(size) - first[component[order]]
        place = component * block + within
    at, other = place[row], place[column]
    lower, upper = np.maximum(at, other), np.minimum(at, other)
    is_inside = at // block == other // block
    inside = (at // block) * block**2 + (at % block) * block + other % block
    below = num_blocks * block**2 + (upper // block) * block**2
    below = below + (lower % block) * block + upper % block
    device = like.device

    def as_tensor(array: np.ndarray) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array), dtype=torch.long, device=device)

    return _Structure(
        as_tensor(row),
        as_tensor(colours[column]),
        as_tensor(np.where(is_inside, inside, below)),
        _seeds(colours).to(like),
        as_tensor(place),
        int(num_blocks),
        int(block),
        bool(is_chain),
    )
