# SPDX-License-Identifier: Apache-2.0
r"""Mirror images of draws: reflections under which a posterior changes by a few nats only.

The signs of factors, or of the traits of an ideal-point model, are often fixed by a weak prior of
one element. The posterior then has a second mode at the mirror image, with another share of the
mass, which no chain reaches. Let :math:`T_0 = I, T_1, \dots` be reflections that map the mode A to
separate modes, and :math:`\Delta_j(x) = \log p(T_j x) - \log p(x)`. Draws x of A are reweighted by

.. math:: w(x) = \sum_j e^{\Delta_j(x)} = \sum_j p(T_j x) / p(x),

resampled, and replaced by :math:`T_j x` with probability :math:`e^{\Delta_j(x)} / w(x)`. The
density of the result at :math:`T_j x` is proportional to :math:`p(x)\, w(x)\, e^{\Delta_j(x)} /
w(x) = p(T_j x)`: it is that of the posterior on all these modes. As with all importance weights,
the draws of A must cover the modes that are mapped back to A, which their weights show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations, islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_implicit.density.policy import MIRROR, RUNS, SYMMETRY
from pyro_implicit.density.symmetry import Symmetries
from pyro_implicit.density.target import Target
from pyro_implicit.ops.importance_weights import LogWeights, systematic
from pyro_implicit.ops.log_space import log_mean_exp
from pyro_implicit.ops.policy import EVEN_EFFICIENCY, MAX_ENTRIES, RELIABLE_KHAT
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.sites import innermost_support

__all__ = ["Images", "Mirror", "find_mirrors", "with_images"]

T = TypeVar("T")


class Mirror(NamedTuple):
    """A reflection: ``signs`` of the coordinates, ``(latent_dim,)``, and the ``name`` of what it
    reflects."""

    signs: Tensor
    name: str

    def after(self, other: Mirror) -> Mirror:
        """Return the reflection by both."""
        return Mirror(self.signs * other.signs, f"{self.name} and of {other.name}")


class Images(NamedTuple):
    """Mirror images of a mode.

    :ivar mirrors: the reflections.
    :ivar shares: the posterior mass of each image, as a share of all images and the mode.
    :ivar weights: the importance weights of the draws of the mode.
    :ivar moved: the largest change of such a share by the weights.
    :ivar kept: the share of independent draws that the weights leave.
    """

    mirrors: list[Mirror]
    shares: list[float]
    weights: LogWeights
    moved: float
    kept: float

    @property
    def is_reliable(self) -> bool:
        """Whether the weights are reliable, so that the images are among the draws."""
        if len(self.mirrors) > MIRROR.most_images:
            return False  # and there may be more of them
        return self.weights.khat < RELIABLE_KHAT or self.weights.efficiency > EVEN_EFFICIENCY

    def __str__(self) -> str:
        found = sorted(zip(self.shares, self.mirrors, strict=True), key=lambda one: -one[0])
        shares = [(f"{share:.0%}", mirror.name) for share, mirror in found]
        shares = [one for one in shares if one[0] != "0%"] or shares[:1]
        parts = [f"{share} at the reflection of {name}" for share, name in shares[:3]]
        if more := len(shares) - len(parts):
            parts.append(f"{more} more")
        return f"mirror images hold mass: {', '.join(parts)} ({self.weights})"


@torch.no_grad()
def find_mirrors(
    target: Target,
    draws: Tensor,
    symmetries: Symmetries | None = None,
    apart: Tensor | None = None,
) -> list[Mirror]:
    """Return reflections whose images of a mode have a share of the mass.

    Whole sites are reflected, those of a loop together, and single units along a dimension of
    sites. In some coordinate that changes its sign there must be a gap around 0 with next to no
    draws. Of reflections with the same signs in all such coordinates, whose images are the same
    mode, the one of the highest density is returned. Exact symmetries are left out, and so are
    images that these map to the mode: :mod:`pyro_implicit.density.symmetry` has them.

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
    :param draws: draws of one mode, ``(num_draws, latent_dim)``.
    :param symmetries: the exact ones, by which the draws are in order.
    :param apart: which coordinates have a gap, ``(latent_dim,)``; by default those of ``draws``.
    """
    apart = _apart(draws) if apart is None else apart
    if target.sampled or not apart.any():
        return []
    trial = _Trial(target, draws, symmetries, apart)
    affordable = SYMMETRY.max_seconds / target.seconds(RUNS.draws_at_once) * RUNS.draws_at_once
    number = min(MIRROR.max_tried, int(affordable / MIRROR.num_tried))
    trial.add(islice(_candidates(target), number))
    # Images of images: sites and units were tried by themselves.
    while trial.found and len(trial.found) <= MIRROR.most_images:
        pairs = combinations([mirror for _, mirror in trial.found.values()], 2)
        if not trial.add(one.after(other) for one, other in pairs):
            break
    ordered = sorted(trial.found.values(), key=lambda one: -one[0])
    return [mirror for _, mirror in ordered]


class _Trial:
    """The images of some draws that have a share of the mass, by the signs that they change."""

    def __init__(
        self, target: Target, draws: Tensor, symmetries: Symmetries | None, apart: Tensor
    ) -> None:
        self._symmetries = symmetries
        rows = torch.linspace(0, len(draws) - 1, MIRROR.num_tried, device=draws.device).long()
        self._target, self._apart, self._draws = target, apart, draws[rows]
        self._before = _log_prob(target, self._draws)
        rounding = torch.finfo(draws.dtype).eps * self._before.abs()
        self._tolerance = SYMMETRY.absolute + rounding
        #: Logarithm of the ratio of image and mode, and mirror.
        self.found: dict[tuple[bool, ...], tuple[float, Mirror]] = {}
        self._known: set[bytes] = set()

    def add(self, mirrors: Iterable[Mirror]) -> bool:
        """Try reflections that were not tried before; return whether one was found."""
        new = {}
        for mirror in mirrors:
            flips = mirror.signs < 0
            code = flips.cpu().numpy().tobytes()
            if (flips & self._apart).any() and code not in self._known:
                self._known.add(code)
                new[code] = mirror
        some, at_once = list(new.values()), max(1, MAX_ENTRIES // self._draws.numel())
        before = len(self.found)
        for part in (some[i : i + at_once] for i in range(0, len(some), at_once)):
            moved = torch.cat([mirror.signs * self._draws for mirror in part])
            changes = _log_prob(self._target, moved).reshape(len(part), -1) - self._before
            for mirror, change in zip(part, changes.nan_to_num(nan=-math.inf), strict=True):
                self._judge(mirror, change)
        return len(self.found) > before

    def _judge(self, mirror: Mirror, change: Tensor) -> None:
        if (change.abs() <= self._tolerance).all():
            return
        image = mirror.signs * self._draws
        if self._symmetries:
            image = self._symmetries.finite().ordered(image)
        is_changed = (image.sign() != self._draws.sign())[:, self._apart].double().mean(0) > 0.5
        if not is_changed.any():
            return
        ratio, key = log_mean_exp(change.double()).item(), tuple(is_changed.tolist())
        if ratio > max(math.log(MIRROR.least_share), self.found.get(key, (-math.inf,))[0]):
            self.found[key] = ratio, mirror


@torch.no_grad()
def with_images(
    target: Target, draws: Tensor, symmetries: Symmetries | None = None
) -> tuple[Tensor, Images | None]:
    """Return draws of a mode and of its mirror images, each with its share.

    The mode is the one of most draws. Draws at its images give way to images of its draws; draws at
    other places stay as they are.

    :param target: the posterior.
    :param draws: draws, correct within the mode, ``(num_draws, latent_dim)``.
    :param symmetries: exact ones, by which the draws are in order.
    :returns: as many draws, and the images, if any. The draws are the given ones if there are no
        images, or if the weights are unreliable.
    """
    apart = _apart(draws)
    if target.sampled or not apart.any():
        return draws, None
    patterns, pattern, counts = (draws[:, apart] > 0).unique(
        dim=0, return_inverse=True, return_counts=True
    )
    largest = int(counts.argmax())
    mode = draws[pattern == largest]
    mirrors = find_mirrors(target, mode, symmetries, apart)
    if not mirrors:
        return draws, None
    before = _log_prob(target, mode)
    changes = [_log_prob(target, one.signs * mode) - before for one in mirrors]
    log_ratios = torch.stack([torch.zeros_like(before), *changes], -1)
    log_ratios = log_ratios.double().nan_to_num(nan=-math.inf)
    weights = LogWeights(log_ratios.logsumexp(-1))
    shares = weights.shares @ log_ratios.softmax(-1)
    signs = torch.stack([torch.ones_like(mode[0]), *(one.signs for one in mirrors)])
    # The draws at each image, and in the mode itself.
    images = (patterns[largest] == (signs[:, apart] > 0)).unsqueeze(1) == patterns
    at_image = images.all(-1)[:, pattern]
    known = at_image.any(0)
    now = at_image.double().sum(-1) / known.sum()
    if not (shares[1:] > MIRROR.least_share).any():
        return draws, None
    kept = (len(mode) * weights.efficiency + (~known).sum().item()) / len(draws)
    moved = (shares - now).abs().max().item()
    found = Images(mirrors, shares[1:].tolist(), weights, moved, kept)
    if not found.is_reliable:
        return draws, found
    with seeded(0, draws.device):  # so that `refine_more` repeats it
        rows = systematic(weights.shares, int(known.sum()))
        member = log_ratios[rows].softmax(-1).multinomial(1).squeeze(-1)
    changed = draws.clone()
    changed[known] = mode[rows] * signs[member]
    return changed, found


def _apart(draws: Tensor) -> Tensor:
    """Return whether coordinates have a gap around 0, ``(latent_dim,)``."""
    size = draws.abs()
    sd = size.std(0)
    nearest = size.kthvalue(1 + int(MIRROR.least_share * len(size)), 0).values
    return (size.mean(0) > MIRROR.separation * sd) & (nearest > MIRROR.gap * sd) & (sd > 0)


def _log_prob(target: Target, latent: Tensor) -> Tensor:
    return torch.cat([target.log_prob(some) for some in latent.split(RUNS.draws_at_once)])


def _candidates(target: Target) -> Iterator[Mirror]:
    """Yield reflections of whole sites, those of a loop together, and of single units."""
    real = {
        name
        for name, site in target.sites.items()
        if isinstance(innermost_support(site["fn"].support), type(constraints.real))
    }
    places, blocks = target.places, dict[int, dict[str, Tensor]]()
    for names in target.groups:
        if real.issuperset(names):
            label = f"'{names[0]}'" if len(names) == 1 else f"'{names[0]}' to '{names[-1]}'"
            index = torch.cat([places[name].flatten() for name in names])
            blocks.setdefault(1, {})[label] = index.unsqueeze(0)
        for name in filter(real.__contains__, names):
            for dim, length in enumerate(places[name].shape):
                if 1 < length <= MIRROR.max_tried:
                    units = places[name].movedim(dim, 0).reshape(length, -1)
                    where = f" of dimension {dim}" if places[name].dim() > 1 else ""
                    blocks.setdefault(length, {})[f"'{name}'{where}"] = units
    for length, some in sorted(blocks.items()):
        for chosen in _subsets(list(some.items()), MIRROR.max_tried // length):
            for unit in range(length):
                signs = torch.ones(target.latent_dim).to(target.init_loc)
                for _, units in chosen:
                    signs[units[unit]] = -1.0
                of = f"unit {unit} of " if length > 1 else ""
                yield Mirror(signs, of + " and ".join(label for label, _ in chosen))


def _subsets(blocks: list[T], most: int) -> Iterator[tuple[T, ...]]:
    """Yield single blocks, all of them, and then pairs and so on, up to a number of subsets."""
    sizes = dict.fromkeys([1, len(blocks), *range(2, len(blocks))])
    yield from islice((one for size in sizes for one in combinations(blocks, size)), max(1, most))
