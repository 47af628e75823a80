# SPDX-License-Identifier: Apache-2.0
r"""Mirror images of draws: reflections under which a posterior changes by a few nats only.

The signs of factors, or of the traits of an ideal-point model, are often fixed by a weak prior of
one element. The posterior then has a second mode at the mirror image, with another share of the
mass, which no chain reaches. Let T be the reflection, and :math:`\Delta(x) = \log p(T x) - \log
p(x)`. Draws x of any of the two modes, weighed by :math:`1 + e^{\Delta(x)}` and then replaced by
:math:`T x` with probability :math:`e^\Delta / (1 + e^\Delta)`, are draws of both: each place z is
reached from z and from T z, by

.. math:: q(z) \frac{p(z) + p(Tz)}{p(z)} \frac{p(z)}{p(z) + p(Tz)} + q(Tz)
    \frac{p(z) + p(Tz)}{p(Tz)} \frac{p(z)}{p(z) + p(Tz)}
    = p(z) \Bigl[ \frac{q(z)}{p(z)} + \frac{q(Tz)}{p(Tz)} \Bigr],

where q is the density of the draws, and the bracket is constant if q is proportional to p within
each mode, whatever the shares of the modes in q are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import softplus

from pyro_implicit.density.policy import MIRROR, RUNS, SYMMETRY
from pyro_implicit.density.target import Target
from pyro_implicit.ops.importance_weights import LogWeights, systematic
from pyro_implicit.ops.policy import EVEN_EFFICIENCY, MAX_ENTRIES, RELIABLE_KHAT
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.sites import innermost_support

T = TypeVar("T")

__all__ = ["Image", "Mirror", "find_mirrors", "with_images"]


class Mirror(NamedTuple):
    """A reflection: ``signs`` of the coordinates, ``(latent_dim,)``, and ``name``, what changes.

    The sign of the coordinate ``key`` tells the sides apart.
    """

    signs: Tensor
    name: str
    key: int = 0


class Image(NamedTuple):
    """How an image was added to draws.

    ``share`` is the share of the mass that was reached by it, and ``moved`` that by which the
    shares of both sides changed. ``weights`` are those of the draws of each side: of both together,
    the tail is one side alone. ``efficiency`` is the share of independent draws that remain.
    """

    mirror: Mirror
    share: float
    moved: float
    weights: list[LogWeights]
    efficiency: float

    @property
    def is_reliable(self) -> bool:
        """Whether the weights are."""
        return all(
            one.khat < RELIABLE_KHAT or one.efficiency > EVEN_EFFICIENCY for one in self.weights
        )

    def __str__(self) -> str:
        return (
            f"the mirror image of the draws with other signs of {self.mirror.name} holds "
            f"{self.share:.0%} of the mass ({' and '.join(map(str, self.weights))})"
        )


@torch.no_grad()
def find_mirrors(target: Target, draws: Tensor) -> list[Mirror]:
    """Return reflections of whole sites, or of one unit along a dimension, with massive images.

    Some coordinate that changes its sign must be far from 0 in all draws, so that the image is a
    separate mode. Exact symmetries are left out: :mod:`pyro_implicit.density.symmetry` has them.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> _ = pyro.set_rng_seed(0)
    >>> def model():
    ...     a = pyro.sample("a", dist.Normal(0.1, 1.0))
    ...     b = pyro.sample("b", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(a * b, 0.1), obs=torch.tensor(9.0))
    >>> draws = 3.0 + 0.02 * torch.randn(200, 2)
    >>> [mirror.name for mirror in find_mirrors(Target(model), draws)]
    ["'a' and 'b'"]

    :param target: the posterior.
    :param draws: of the posterior, of one mode or several, ``(num_draws, latent_dim)``.
    """
    if target.sampled:  # no gradients: other moves change them
        return []
    size = draws.abs()
    distance = size.mean(0) / size.std(0)
    apart = distance > MIRROR.separation
    rows = torch.linspace(0, len(draws) - 1, MIRROR.num_tried, device=draws.device).long()
    some, least = draws[rows], math.log(MIRROR.least_share)
    most = SYMMETRY.max_seconds / target.seconds(RUNS.draws_at_once) * RUNS.draws_at_once
    number = min(MIRROR.max_tried, int(most / MIRROR.num_tried))
    tried = islice(_candidates(target), number)
    mirrors = [one for one in tried if ((one.signs < 0) & apart).any()]
    if not mirrors:
        return []
    mirrors.sort(key=lambda one: int((one.signs < 0).sum()))
    before = _log_prob(target, some)
    at_once = max(1, MAX_ENTRIES // some.numel())
    changes = [
        _log_prob(target, torch.cat([one.signs * some for one in part])).reshape(len(part), -1)
        for part in (mirrors[i : i + at_once] for i in range(0, len(mirrors), at_once))
    ]
    tolerance = SYMMETRY.absolute + torch.finfo(some.dtype).eps * before.abs()
    found: list[Mirror] = []
    for mirror, after in zip(mirrors, torch.cat(changes), strict=True):
        flips, change = mirror.signs < 0, after - before
        if any((flips | (one.signs > 0)).all() for one in found):
            continue  # it has more signs than an image that is known
        if change.max() > least and (change.abs() > tolerance).any():
            key = int(torch.where(flips, distance, 0.0).argmax())
            found.append(mirror._replace(key=key))
    return found


@torch.no_grad()
def with_images(target: Target, draws: Tensor) -> tuple[Tensor, list[Image]]:
    """Return draws of all modes that are mirror images of those of some draws.

    :param target: the posterior.
    :param draws: right within each mode, ``(num_draws, latent_dim)``. Neighbours stay neighbours.
    :returns: as many draws, and the images that were found. Draws stay as they are where weights
        are unreliable.
    """
    images = []
    for mirror in find_mirrors(target, draws):
        change = _log_prob(target, mirror.signs * draws) - _log_prob(target, draws)
        change = change.double().nan_to_num(nan=-math.inf)
        weights = LogWeights(softplus(change))
        share = (weights.shares * change.sigmoid()).sum().item()
        if share < MIRROR.least_share:
            continue
        is_left = draws[:, mirror.key] < 0
        sides = [change[side] for side in (is_left, ~is_left)]
        large = [one for one in sides if len(one) > MIRROR.least_side * len(draws)]
        left = torch.where(is_left, (-change).sigmoid(), change.sigmoid())
        moved = abs((weights.shares * left).sum().item() - is_left.double().mean().item())
        parts = [LogWeights(softplus(one)) for one in large]
        images.append(Image(mirror, share, moved, parts, weights.efficiency))
        if images[-1].is_reliable:
            with seeded(0, draws.device):  # continued chains repeat it
                rows = systematic(weights.shares, len(draws))
                moves = torch.rand_like(change) < change[rows].sigmoid()
            draws = draws[rows] * torch.where(moves.unsqueeze(-1), mirror.signs, 1.0).to(draws)
    return draws, images


def _log_prob(target: Target, latent: Tensor) -> Tensor:
    return torch.cat([target.log_prob(some) for some in latent.split(RUNS.draws_at_once)])


def _candidates(target: Target) -> Iterator[Mirror]:
    """Yield reflections of few blocks first: whole sites, those of a loop together, and units."""
    real = {
        name
        for name, prior in target.priors.items()
        if isinstance(innermost_support(prior.support), type(constraints.real))
    }
    places, blocks = target.places, dict[int, dict[str, Tensor]]()
    for names in target.groups:
        if real.issuperset(names):
            label = " and ".join(f"'{name}'" for name in (names[:1] + names[1:][-1:]))
            index = torch.cat([places[name].flatten() for name in names])
            blocks.setdefault(1, {})[label] = index.unsqueeze(0)
        for name in real.intersection(names):
            for dim, length in enumerate(places[name].shape):
                if 1 < length <= MIRROR.max_tried:
                    units = places[name].movedim(dim, 0).reshape(length, -1)
                    blocks.setdefault(length, {})[f"'{name}'"] = units
    for length, some in sorted(blocks.items()):
        for chosen in _subsets(list(some.items()), MIRROR.max_tried // length):
            for unit in range(length):
                signs = torch.ones(target.latent_dim).to(target.init_loc)
                for _, units in chosen:
                    signs[units[unit]] = -1.0
                of = f"unit {unit} of " if length > 1 else ""
                yield Mirror(signs, of + " and ".join(label for label, _ in chosen))


def _subsets(blocks: list[T], most: int) -> Iterator[tuple[T, ...]]:
    """Yield subsets of blocks, small ones first; of too many, small ones and the whole."""
    number = 0
    for size in range(1, len(blocks)):
        for chosen in combinations(blocks, size):
            if (number := number + 1) >= most:
                break
            yield chosen
    yield tuple(blocks)
