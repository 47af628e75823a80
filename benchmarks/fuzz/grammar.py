# SPDX-License-Identifier: Apache-2.0
"""The grammar of random models: plates, sites and their arguments."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.fuzz.families import FAMILIES, SIZE, Family

__all__ = ["Argument", "Draft", "Site", "draw_model"]

POSITIVE_LIKE = ("LogNormal", "Gamma", "Exponential", "HalfNormal", "Weibull", "InverseGamma")
LOCATIONS = ("Normal", "Normal", "StudentT", "Laplace", "Logistic", "MultivariateNormal", "Vector")
MAX_LATENTS, MAX_CHOICES = 14, 81


@dataclass(frozen=True)
class Argument:
    """An argument of a distribution: ``link(constant + sum of weight * parent)``.

    :ivar kind: real, positive, vector or tril.
    :ivar constant: in the shape of the site's plates.
    :ivar parents: weights by name.
    :ivar scale_parent: a positive latent that multiplies the result.
    :ivar extra: the vector or triangle that makes it an event.
    :ivar param: name of an added parameter.
    """

    kind: str
    constant: Tensor
    parents: tuple[tuple[str, float], ...] = ()
    scale_parent: str | None = None
    extra: Tensor | None = None
    param: str | None = None

    def value(self, constant: Tensor, parents: dict[str, Tensor], params: dict[str, Any]) -> Any:
        """Evaluate for a batch or one element, like constant and parents."""
        total = constant
        for name, weight in self.parents:
            total = total + weight * parents[name]
        if self.param is not None:
            total = total + params[self.param]
        if self.kind in ("positive", "tril"):
            total = softplus(total) + 0.1
        if self.scale_parent is not None:
            total = total * parents[self.scale_parent]
        if self.kind == "vector":
            assert self.extra is not None
            return total.unsqueeze(-1) + self.extra
        if self.kind == "tril":
            assert self.extra is not None
            return total.unsqueeze(-1).unsqueeze(-1) * self.extra
        return total

    @property
    def names(self) -> set[str]:
        """All parents."""
        return {name for name, _ in self.parents} | ({self.scale_parent} - {None})


@dataclass(frozen=True)
class Site:
    """A sample statement.

    :ivar family: of :data:`~benchmarks.fuzz.families.FAMILIES`, ``factor`` or ``deterministic``.
    :ivar plates: numbers of its plates.
    :ivar mask: in the plates' shape, or one for all.
    :ivar mask_how: ``handler`` or ``method``.
    :ivar scale: one number, or a tensor in the plates' shape.
    """

    name: str
    family: str
    plates: tuple[int, ...]
    args: tuple[Argument, ...]
    is_observed: bool = False
    mask: Any = None
    mask_how: str = "handler"
    scale: Any = None

    @property
    def kind(self) -> Family:
        """Event shape of its distribution."""
        return FAMILIES[self.family]


@dataclass(frozen=True)
class Draft:
    """A random model.

    :ivar sizes: sizes of the plates, whose dimensions are -1, -2, ...
    :ivar subsample: indices of plate 0, if it is subsampled.
    :ivar is_mixed: whether observed sites are in float64, like NumPy arrays.
    """

    seed: int
    sizes: tuple[int, ...]
    sites: tuple[Site, ...]
    params: dict[str, float]
    dtype: torch.dtype = torch.float64
    subsample: Tensor | None = None
    is_mixed: bool = False
    data: dict[str, Tensor] = field(default_factory=dict)

    def shape(self, plates: tuple[int, ...]) -> tuple[int, ...]:
        """Pyro's batch shape of a site in these plates, over the whole plates."""
        depth = max(plates, default=-1) + 1
        return tuple(self.sizes[p] if p in plates else 1 for p in reversed(range(depth)))

    @property
    def latents(self) -> list[Site]:
        """Continuous latent sites."""
        return [s for s in self.sites if self._is_latent(s) and not s.kind.is_discrete]

    @property
    def discrete(self) -> list[Site]:
        """Sites to be marginalised."""
        return [s for s in self.sites if self._is_latent(s) and s.kind.is_discrete]

    @staticmethod
    def _is_latent(site: Site) -> bool:
        return site.family in FAMILIES and not site.is_observed

    def without(self, name: str) -> Draft:
        """The model without one site."""
        return replace(self, sites=tuple(s for s in self.sites if s.name != name))

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.dtype}, plates {self.sizes}, params {self.params}"]
        if self.is_mixed:
            lines.append("observed sites of float64")
        if self.subsample is not None:
            lines.append(f"subsample {self.subsample.tolist()} of plate 0")
        for s in self.sites:
            args = ", ".join(
                f"{a.kind}({' + '.join(f'{w:.2g}*{n}' for n, w in a.parents) or 'const'}"
                f"{f' * {a.scale_parent}' if a.scale_parent else ''}"
                f"{f' + param {a.param}' if a.param else ''})"
                for a in s.args
            )
            more = "".join(
                [
                    " observed" if s.is_observed else "",
                    f" mask({s.mask_how})={s.mask}" if s.mask is not None else "",
                    f" scale={s.scale}" if s.scale is not None else "",
                ]
            )
            lines.append(f"  {s.name} ~ {s.family}({args}) plates {s.plates}{more}")
        return "\n".join(lines)


def draw_model(seed: int) -> Draft:
    """Draw a model without data."""
    return _Grammar(seed).draw()


class _Grammar:
    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.sites: list[Site] = []
        self.num_latents, self.num_choices = 0, 1
        self.kinds = {
            "x": self.add_latent,
            "y": self.add_observed,
            "z": self.add_discrete,
            "d": lambda name: self.sites.append(self.extra(name, "deterministic")),
            "f": lambda name: self.sites.append(self.extra(name, "factor")),
        }
        self.params: dict[str, float] = {}

    def draw(self) -> Draft:
        rng = self.rng
        self.sizes = tuple(
            rng.choice([1, 2, 2, 3, 4]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))
        )
        if rng.random() < 0.2:
            self.params["w"] = round(rng.uniform(-1, 1), 2)
        self.draft = Draft(self.seed, self.sizes, (), self.params)
        kinds = ["x"] * rng.randint(1, 5) + ["y"] * rng.choice([0, 1, 1, 2, 3])
        for kind, chance in (("z", 0.2), ("z", 0.1), ("d", 0.25), ("f", 0.2)):
            kinds += [kind] * (rng.random() < chance)
        if rng.random() < 0.5:
            rng.shuffle(kinds)
        for index, kind in enumerate(kinds):
            self.kinds[kind](f"{kind}{index}")
        subsample = None
        if self.sizes and self.sizes[0] > 2 and rng.random() < 0.15:
            if not any(0 in s.plates and s.name[0] in "xzd" for s in self.sites):
                subsample = torch.randperm(self.sizes[0], generator=self.torch)[:2]
        dtype = torch.float32 if rng.random() < 0.25 else torch.float64
        is_mixed = dtype == torch.float32 and rng.random() < 0.4
        return replace(
            self.draft,
            sites=tuple(self.sites),
            subsample=subsample,
            dtype=dtype,
            is_mixed=is_mixed,
        )

    def plates(self) -> tuple[int, ...]:
        return tuple(p for p in range(len(self.sizes)) if self.rng.random() < 0.4)

    def add_latent(self, name: str) -> None:
        rng = self.rng
        names = [n for n, f in FAMILIES.items() if f.latent and not f.is_discrete]
        family = rng.choice([*names, *rng.choices(LOCATIONS, k=12), *POSITIVE_LIKE])
        plates = self.plates()
        size = torch.Size(self.draft.shape(plates)).numel() * max(
            1, torch.Size(FAMILIES[family].event).numel()
        )
        if self.num_latents + size > MAX_LATENTS:
            plates, family = (), rng.choice(["Normal", "LogNormal", "StudentT"])
            size = 1
        self.num_latents += size
        self.sites.append(self.decorated(self.site(name, family, plates), 0.04))

    def add_discrete(self, name: str) -> None:
        plates, family = self.plates(), self.rng.choice(["Bernoulli", "Categorical"])
        each = 2 if family == "Bernoulli" else 3
        if self.num_choices * each ** torch.Size(self.draft.shape(plates)).numel() > MAX_CHOICES:
            plates = ()
        self.num_choices *= each ** torch.Size(self.draft.shape(plates)).numel()
        if self.num_choices <= MAX_CHOICES:
            self.sites.append(self.site(name, family, plates))

    def add_observed(self, name: str) -> None:
        family = self.rng.choice([*FAMILIES, *LOCATIONS])
        plates = tuple(p for p in range(len(self.sizes)) if self.rng.random() < 0.7)
        site = replace(self.site(name, family, plates), is_observed=True)
        self.sites.append(self.decorated(site, 0.2))

    def decorated(self, site: Site, chance: float) -> Site:
        rng, shape = self.rng, self.draft.shape(site.plates)
        if rng.random() < chance:
            mask = torch.rand(shape, generator=self.torch) < 0.6
            how = "handler"
            if site.is_observed:
                mask, how = rng.choice([mask, mask, True, False]), rng.choice([how, "method"])
            site = replace(site, mask=mask, mask_how=how)
        if rng.random() < chance:
            some = 0.5 + torch.rand(shape, generator=self.torch, dtype=torch.float64)
            site = replace(site, scale=rng.choice([2.5, 0.3, some]))
        return site

    def extra(self, name: str, family: str) -> Site:
        plates = self.plates()
        return Site(name, family, plates, (self.argument("real", plates),))

    def site(self, name: str, family: str, plates: tuple[int, ...]) -> Site:
        args = tuple(self.argument(kind, plates) for kind in FAMILIES[family].kinds)
        return Site(name, family, plates, args)

    def argument(self, kind: str, plates: tuple[int, ...]) -> Argument:
        rng = self.rng
        shape = self.draft.shape(plates)
        constant = torch.randn(shape, generator=self.torch, dtype=torch.float64)
        if rng.random() < 0.3:
            constant = constant.new_full(shape, constant.sum().item() if constant.numel() else 0.5)
        known = [s for s in self.sites if s.family != "factor" and set(s.plates) <= set(plates)]
        parents = rng.sample(known, min(len(known), rng.choice([0, 0, 1, 1, 2])))
        weights = tuple((s.name, round(rng.uniform(-1, 1), 2)) for s in parents)
        positive = [
            s.name for s in known if s.family in FAMILIES
            and s.kind.support is torch.distributions.constraints.positive and not s.is_observed
        ]  # fmt: skip
        scale_parent = None
        if kind in ("positive", "tril") and positive and rng.random() < 0.4:
            scale_parent = rng.choice(positive)
        extra = None
        if kind == "vector":
            extra = torch.randn(SIZE, generator=self.torch, dtype=torch.float64)
        if kind == "tril":
            some = torch.randn(SIZE, SIZE, generator=self.torch, dtype=torch.float64)
            extra = torch.linalg.cholesky(some @ some.T + torch.eye(SIZE, dtype=torch.float64))
        param = rng.choice([None, *self.params])
        return Argument(kind, constant, weights, scale_parent, extra, param)
