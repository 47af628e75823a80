# SPDX-License-Identifier: Apache-2.0
r"""Symmetries of a posterior: permutations, reflections and rotations of exchangeable units.

The components of a mixture have no order, the hidden units of a network neither order nor sign,
and the factors of a factor model may be rotated. For such a group G, :math:`p(g \theta) =
p(\theta)`: the posterior has up to :math:`|G|` equal copies of each mode, and chains visit a few of
them. They need no more. If :math:`\theta` is a draw of the posterior in one copy, and g is uniform
on G and independent of it, then :math:`g \theta` is a draw of the posterior (Frühwirth-Schnatter,
2001, for the components of mixtures). Chains therefore start in one copy, their convergence is
judged by functions that no g changes, and each draw is moved by a random g in the end.

A group acts along dimensions of one length at some sites, on the sites of a loop, or changes the
signs of whole sites. These are its *places*. It is found by trial: members that generate it are
applied to subsets of these places, at some points in double precision.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import accumulate, combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import StickBreakingTransform, constraints

from pyro_implicit.density.marginal import MarginalModel
from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.policy import RUNS, SYMMETRY
from pyro_implicit.density.target import Target
from pyro_implicit.ops.permutations import (
    Kind,
    apply_members,
    entries_of,
    is_identity,
    ordering_members,
    random_members,
    separating_key,
    trial_members,
)
from pyro_implicit.runtime.global_state import same_streams, seeded
from pyro_implicit.runtime.sites import innermost_support, site_parts

__all__ = ["Place", "Symmetries", "Symmetry", "confirmed", "find_symmetries"]


class Place(NamedTuple):
    """Where units lie: along a dimension of one site, or as whole sites, such as those of a loop.

    ``dim`` counts from the right and is negative; it is ``None`` for whole sites.
    """

    sites: tuple[str, ...]
    dim: int | None


class Symmetry(NamedTuple):
    """A group that acts on the units at all its places at once.

    ``key`` has weights of the units' entries, by default of the first alone. Permutations sort
    units by the weighted sum, reflections make it positive.
    """

    kind: Kind
    places: tuple[Place, ...]
    size: int
    key: tuple[float, ...] = (1.0,)

    @property
    def log_size(self) -> float:
        """Logarithm of the number of members; infinite for rotations."""
        if self.kind == "rotations":
            return math.inf
        return self.size * math.log(2) if self.kind == "reflections" else math.lgamma(self.size + 1)

    def __str__(self) -> str:
        names = list(dict.fromkeys(f"'{name}'" for place in self.places for name in place.sites))
        if len(names) > 4:
            names[2:-1] = ["..."]
        sites = " and ".join(names)
        if self.size == 1:
            return f"{self.kind} of {sites} as a whole"
        return f"{self.kind} of the {self.size} units of {sites}"


class Symmetries:
    """Groups that leave a posterior unchanged, as maps of unconstrained vectors.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     with pyro.plate("components", 3):
    ...         pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    >>> found = find_symmetries(Target(model))
    >>> print(found)
    permutations of the 3 units of 'scale'
    >>> found.ordered(torch.tensor([[0.5, -1.0, 0.1]]))
    tensor([[-1.0000,  0.1000,  0.5000]])

    :param shapes: shapes of the sites' parts of a vector.
    :param transforms: maps from these parts to values.
    :param groups: permutations and rotations act on disjoint places.
    """

    def __init__(
        self,
        shapes: dict[str, torch.Size],
        transforms: dict[str, Any],
        groups: tuple[Symmetry, ...] = (),
    ) -> None:
        self.groups = groups
        self._shapes, self._transforms = shapes, transforms
        self._all_groups = groups
        #: Simplices, whose elements are not those of their unconstrained parts.
        self._simplices = {
            name
            for group in groups
            for place in group.places
            for name in place.sites
            if isinstance(transforms[name], StickBreakingTransform)
        }
        self._orderable = tuple(group for group in groups if self._keys_of(group))

    def __bool__(self) -> bool:
        return bool(self.groups)

    def __str__(self) -> str:
        return "; ".join(map(str, self.groups))

    @property
    def log_size(self) -> float:
        """Logarithm of the number of maps, of all groups together."""
        return sum(group.log_size for group in self.groups)

    def finite(self) -> Symmetries:
        """Return the groups of finitely many members whose units can be ordered."""
        found = copy(self)  # the entries to which keys belong depend on all groups
        found.groups = tuple(one for one in self._orderable if math.isfinite(one.log_size))
        found._orderable = found.groups
        return found

    def shuffled(self, latent: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Apply a random member of each group to each vector.

        :param latent: ``(*batch, latent_dim)``.
        :param generator: the source of random numbers, on the CPU.
        """
        number = len(latent.flatten(0, -2))

        def draw(group: Symmetry, values: dict[str, Tensor]) -> Tensor:
            return random_members(group.kind, number, group.size, generator)

        return self._moved(latent, draw, self.groups[::-1])

    def tried(self, points: Tensor) -> Tensor:
        """Apply members of a single group that show whether a density has it.

        :param points: ``(num_points, latent_dim)``.
        :returns: ``(num_points, num_members, latent_dim)``.
        """
        (group,) = self.groups
        members = trial_members(group.kind, group.size)
        latent = points.unsqueeze(1).expand(-1, len(members), -1)
        all_members = members.expand(len(points), *members.shape).flatten(0, 1)
        return self._moved(latent, lambda *_: all_members, self.groups)

    def ordered(self, latent: Tensor) -> Tensor:
        """Return the member of each vector's orbit in which the units are in order.

        Members of the groups do not change the result. Whole sites are ordered first, by sites that
        no other group changes; then units, by their entries at sites along which groups act in one
        dimension alone. Groups without such a site do nothing.

        :param latent: ``(*batch, latent_dim)``.
        """
        return self._moved(latent, self._order, self._orderable)

    def is_ordered(self, latent: Tensor) -> Tensor:
        """Return whether :meth:`ordered` leaves vectors as they are, ``(*batch)``."""
        flat = latent.flatten(0, -2)
        values, found = self._values(flat), torch.ones(len(flat), dtype=torch.bool).to(flat.device)
        for group in self._orderable:
            found &= is_identity(group.kind, self._order(group, values))
        return found.reshape(latent.shape[:-1])

    def keyed(self, latent: Tensor) -> Symmetries:
        """Return the same groups with keys by which the units of some draws differ far.

        :param latent: ``(num_draws, latent_dim)``, of any copies.
        """
        groups: list[Symmetry] = []
        for group in self.groups:
            if group not in self._orderable or group.kind == "rotations":
                groups.append(group)
                continue
            before = self._moved(latent, self._order, [one for one in groups if self._keys_of(one)])
            units = self._units(group, self._values(before))
            groups.append(group._replace(key=separating_key(group.kind, units)))
        return Symmetries(self._shapes, self._transforms, tuple(groups))

    def _keys_of(self, group: Symmetry) -> list[Place]:
        """Return the places whose entries no other group changes, once whole sites are in order.

        Permutations keep the signs of units, and reflections their order.
        """
        groups = [other for other in self._all_groups if group.size == 1 or other.size > 1]
        alike = [place for other in groups if other.kind == group.kind for place in other.places]
        places = {place for other in groups for place in other.places}
        sites = [name for place in places for name in place.sites]
        return [
            place
            for place in group.places
            if alike.count(place) == 1 and all(sites.count(name) == 1 for name in place.sites)
        ]

    def _units(self, group: Symmetry, values: dict[str, Tensor]) -> Tensor:
        """Return the entries by which units are ordered, ``(num_points, num_entries, size)``."""
        parts = [entries_of(*_along(values, place)) for place in self._keys_of(group)]
        return torch.cat(parts, 1).double()

    def _order(self, group: Symmetry, values: dict[str, Tensor]) -> Tensor:
        return ordering_members(group.kind, self._units(group, values), group.key)

    def _moved(
        self,
        latent: Tensor,
        members_of: Callable[[Symmetry, dict[str, Tensor]], Tensor],
        groups: Iterable[Symmetry],
    ) -> Tensor:
        if not self.groups or latent.numel() == 0:
            return latent
        values = self._values(latent.flatten(0, -2))
        for group in groups:
            members = members_of(group, values).to(latent.device)
            for place in group.places:
                moved = apply_members(group.kind, members, *_along(values, place))
                parts = (moved,) if place.dim is not None else moved.unbind(-1)
                values.update(zip(place.sites, parts, strict=True))
        found = []
        for name, value in values.items():
            part = self._transforms[name].inv(value) if name in self._simplices else value
            found.append(part.reshape(len(part), -1).to(latent))
        return torch.cat(found, -1).reshape(latent.shape)

    def _values(self, latent: Tensor) -> dict[str, Tensor]:
        """Return the parts of unconstrained vectors by site, but the values of simplices."""
        parts = site_parts(latent, self._shapes)
        for name in self._simplices:
            parts[name] = self._transforms[name](parts[name].double())
        return parts


@torch.no_grad()
def find_symmetries(
    target: Target, max_seconds: float = math.inf, points: Tensor | None = None
) -> Symmetries:
    """Find groups that leave the posterior unchanged, by trial in double precision.

    Exchangeable units lie in one plate, along dimensions of one length, or are the sites of a loop.
    Their sites may be of any support for permutations, also elements of a simplex, and unbounded
    for reflections and rotations. A whole site is one unit, too; those of a loop are then reflected
    together. At most one group of permutations, and one of rotations, is found at each place.
    Models whose runs fail in double precision, or take too long, have none.

    :param target: the posterior.
    :param max_seconds: there is no trial if it may take longer, judged by one run of the model.
    :param points: at which groups are tried, too, ``(num_points, latent_dim)``.
    """
    none = Symmetries(target.shapes, target.transforms)
    places = list(_places(target))
    if target.sampled or not places:
        return none
    began = time.perf_counter()
    target.trace_at(target.init_loc)
    if SYMMETRY.num_runs * (time.perf_counter() - began) > max_seconds:
        return none
    with seeded(0, target.init_loc.device):
        try:
            number = RUNS.num_points
            counts = range(SYMMETRY.most_blocks + 1)
            fast = [n for n in counts if target.seconds(2**n) < SYMMETRY.max_seconds]
            if not fast:
                return none
            noise = torch.randn(number, target.latent_dim).to(target.init_loc)
            anywhere = torch.cat([target.sample_prior(number), target.init_loc + noise])
            if points is not None:
                number = SYMMETRY.num_confirmed
                anywhere = torch.cat([anywhere, points[:number]])
            trial = _Trial(target, anywhere, number, max(fast))
        except IMPOSSIBLE:
            return none
        groups = tuple(_search(trial, places)) if trial.is_possible else ()
    return Symmetries(target.shapes, target.transforms, groups)


@torch.no_grad()
def confirmed(symmetries: Symmetries, target: Target, points: Tensor) -> Symmetries:
    """Return the groups that leave the density unchanged at some points, too.

    If one does not, all are searched again: a rotation that fails hides permutations that hold.

    :param points: of the posterior, such as its modes, ``(num_points, latent_dim)``.
    """
    if not symmetries:
        return symmetries
    with same_streams(target.init_loc.device):
        try:
            trial = _Trial(target, points[: SYMMETRY.num_confirmed], SYMMETRY.num_confirmed)
        except IMPOSSIBLE:
            return symmetries
        if all(trial.holds([group])[0] for group in symmetries.groups):
            return symmetries
    return find_symmetries(target, points=points)


def _along(values: dict[str, Tensor], place: Place) -> tuple[Tensor, int]:
    """Return the values at a place and their dimension of units."""
    if place.dim is None:
        return torch.stack([values[name] for name in place.sites], -1), -1
    return values[place.sites[0]], place.dim


class _Candidate(NamedTuple):
    place: Place
    size: int
    plate: str
    is_real: bool


def _places(target: Target) -> Iterator[_Candidate]:
    """Return the sites, and their dimensions along which elements may be exchanged."""
    for name, shape in target.shapes.items():
        site, transform = target.sites[name], target.transforms[name]
        is_simplex = isinstance(transform, StickBreakingTransform)
        support = innermost_support(site["fn"].support)
        is_real = isinstance(support, type(constraints.real))
        shape = site["value"].shape if is_simplex else shape
        plates = {frame.dim: frame.name for frame in site["cond_indep_stack"] if frame.vectorized}
        num_events = len(shape) - len(site["fn"].batch_shape)
        if is_real:
            yield _Candidate(Place((name,), None), 1, "", is_real)
        for dim in range(-len(shape), 0):
            is_event = dim >= -num_events
            if shape[dim] < 2 or (is_event and not is_simplex and support.event_dim):
                continue
            plate = "" if is_event else plates.get(dim + num_events, "")
            yield _Candidate(Place((name,), dim), shape[dim], plate, is_real)
    for names in target.groups:
        if len(names) > 1:
            support = innermost_support(target.sites[names[0]]["fn"].support)
            is_real = isinstance(support, type(constraints.real))
            yield _Candidate(Place(tuple(names), None), len(names), "", is_real)


def _search(trial: _Trial, places: list[_Candidate]) -> list[Symmetry]:
    found: list[Symmetry] = []
    rotated: set[Place] = set()
    kinds: tuple[Kind, ...] = ("rotations", "reflections", "permutations")
    for kind in kinds:
        for size in sorted({one.size for one in places} - {1}):
            if kind == "rotations" and size > SYMMETRY.most_rotated:
                continue
            blocks: dict[Any, list[Place]] = {}
            for place, length, plate, is_real in places:
                if length == size and (is_real or kind == "permutations"):
                    block = plate if plate and kind == "permutations" else place
                    blocks.setdefault(block, []).append(place)
            find = _reflections if kind == "reflections" else partial(_disjoint, kind)
            for group in find(trial, list(blocks.values()), size):
                if kind == "rotations":
                    rotated |= set(group.places)
                if kind == "rotations" or not rotated.issuperset(group.places):
                    found.append(group)
    real = {one.place.sites[0] for one in places if one.size == 1}
    loops = [[Place((name,), None) for name in loop] for loop in trial.loops if real >= {*loop}]
    units = [_reflected(group) for group in found if group.kind != "permutations"]
    return [*_reflections(trial, loops, 1, units), *found]


def _reflected(group: Symmetry) -> set[Place]:
    """Return the whole sites that change their signs if all units do."""
    sites: set[Place] = set()
    for place in group.places:
        sites ^= {Place((name,), None) for name in place.sites}
    return sites


def _reflections(
    trial: _Trial, blocks: list[list[Place]], size: int, known: Sequence[set[Place]] = ()
) -> list[Symmetry]:
    """Return reflections that generate, with the known ones, all that hold.

    Each of them has a place that no other has (elimination modulo 2).
    """
    others = set().union(*known)
    held = [{*group.places} for group in _holding("reflections", trial, blocks, size)]
    basis: dict[Place, set[Place]] = {}
    num_known = 0
    for rows in (known, held):
        num_known = len(basis)
        for row in rows:
            for pivot, other in basis.items():
                row = row ^ other if pivot in row else row
            if not row:
                continue
            place = min(row, key=lambda one: (one in others, one.sites, one.dim or 0))
            for other in basis.values():
                if place in other:
                    other.symmetric_difference_update(row)
            basis[place] = {*row}
    order = [place for block in blocks for place in block]
    return [
        Symmetry("reflections", tuple(place for place in order if place in row), size)
        for row in list(basis.values())[num_known:]
    ]


def _disjoint(
    kind: Kind, trial: _Trial, blocks: list[list[Place]], size: int
) -> Iterator[Symmetry]:
    """Return the groups that act on disjoint sets of blocks, of as few blocks as possible."""
    taken: set[Place] = set()
    for group in _holding(kind, trial, blocks, size):
        if taken.isdisjoint(group.places):
            taken |= set(group.places)
            yield group


def _holding(kind: Kind, trial: _Trial, blocks: list[list[Place]], size: int) -> list[Symmetry]:
    """Return the groups on subsets of blocks that leave the density unchanged, small ones first.

    With many blocks, only small subsets and the whole set are tried.
    """
    counts = accumulate(math.comb(len(blocks), number) for number in range(1, len(blocks) + 1))
    numbers = [n for n, count in enumerate(counts, 1) if count < 2**trial.most_blocks]
    numbers = sorted({*numbers, len(blocks)} - {0})
    subsets = [subset for number in numbers for subset in combinations(blocks, number)]
    groups = [Symmetry(kind, tuple(sum(subset, [])), size) for subset in subsets]
    return [group for group, holds in zip(groups, trial.holds(groups), strict=True) if holds]


class _Trial:
    """Compares the density in double precision before and after members of groups.

    :param points: the points of highest density among these are used.
    :param number: the number of points that are used.
    :param most_blocks: the number of blocks up to which all subsets are tried; with more blocks,
        small subsets and the whole set.
    """

    def __init__(self, target: Target, points: Tensor, number: int, most_blocks: int = 0) -> None:
        self._target, self.most_blocks = target, most_blocks
        #: Sites of the same loop, and other sites alone.
        self.loops = target.groups
        # Of unconstrained vectors: the maps preserve volume there or, for simplices, among the
        # values; the log-determinant of the stick-breaking transform is the sum of the values'
        # logarithms, in any order.
        if isinstance(target.model, MarginalModel):  # computes in double precision
            self._density: Callable[[Tensor], Tensor] = target.model.marginal
        else:
            self._density = target.in_double().log_prob
        points = points.double()
        before = self._density(points)
        best = before.nan_to_num(-math.inf).argsort(descending=True)[:number]
        best = best[before[best].isfinite()]
        self._points, self._before = points[best], before[best]
        #: Whether there are enough points of finite density.
        self.is_possible = len(best) > 1

    def holds(self, groups: list[Symmetry]) -> list[bool]:
        """Return whether each group leaves the density unchanged."""
        number = RUNS.draws_at_once
        if len(groups) > number:
            return self.holds(groups[:number]) + self.holds(groups[number:])
        found = [True] * len(groups)
        for some in (slice(1), slice(1, None)):  # few groups are left after the first point
            index = [row for row, holds in enumerate(found) if holds]
            points, before = self._points[some], self._before[some, None]
            if not index or len(points) == 0:
                break
            moved = torch.stack([self._maps(groups[row]).tried(points) for row in index])
            after = self._density(moved.flatten(0, -2)).reshape(moved.shape[:-1])
            tolerance = SYMMETRY.absolute + SYMMETRY.relative * before.abs()
            is_equal = ((after - before).abs() < tolerance).flatten(1).all(-1)
            for row, holds in zip(index, is_equal.tolist(), strict=True):
                found[row] = holds
        return found

    def _maps(self, group: Symmetry) -> Symmetries:
        return Symmetries(self._target.shapes, self._target.transforms, (group,))
