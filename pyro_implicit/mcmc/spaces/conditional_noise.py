# SPDX-License-Identifier: Apache-2.0
"""The space of the noise that remains of latents, given their parents and the data."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.compiled import CompileMode
from pyro_implicit.density.cost import TracedScore
from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.policy import RUNS, SEARCH
from pyro_implicit.density.target import Target
from pyro_implicit.guides.sampler import Guide, Sampler
from pyro_implicit.mcmc.policy import DEFAULT, SpacePolicy
from pyro_implicit.mcmc.spaces.conditional_reparam import (
    ConditionalReparam,
    base_distribution,
    data_information,
    own_hessians,
    score_of_rest,
    unused_suffix,
)
from pyro_implicit.mcmc.spaces.scaled import ScaledReparam
from pyro_implicit.mcmc.spaces.scaling_laws import scaled_reparams
from pyro_implicit.mcmc.spaces.space import Fitted, Space, traced_value
from pyro_implicit.runtime.clock import NO_LIMIT, TimeLimit
from pyro_implicit.runtime.global_state import in_turn, with_seed
from pyro_implicit.runtime.sites import joined_parts

__all__ = [
    "ConditionalNoise",
    "NoiseMap",
    "conditional_noise",
    "conditional_reparams",
    "dependent_sites",
    "is_too_late",
    "middle_of",
]

_NONE: Mapping[str, ConditionalReparam] = MappingProxyType({})


class NoiseMap:
    """The bijection between latents and their noise given parents and data.

    :param target: the posterior of the latents.
    :param reparams: the map of each site.
    """

    def __init__(self, target: Target, reparams: Mapping[str, ConditionalReparam] = _NONE) -> None:
        self.target, self.reparams = target, dict(reparams)
        #: The posterior of the reparameterised model.
        self.noise = target
        if reparams:
            model = poutine.reparam(target.model, self.reparams)
            self.noise = Target(model, *target.args, model_kwargs=target.kwargs)
            if target.is_wide:  # if the noise cannot be, its density is rounded, but right
                self.noise.widen(self.noise.init_loc.unsqueeze(0))
        scaled = (one for one in self.reparams.values() if isinstance(one, ScaledReparam))
        self.blocks = list({id(one.block): one.block for one in scaled}.values())

    def log_prob(self, points: Tensor) -> Tensor:
        """Return the log-density of points, ``(num_points,)``, differentiable; -inf for NaN."""
        noise, log_dets = self.to_noise(points)
        log_prob = self.noise.log_prob(noise)
        for log_det in log_dets.values():
            log_prob = log_prob + log_det.reshape(len(log_det), -1).sum(-1)
        return log_prob.masked_fill(log_prob.isnan(), -math.inf)

    def score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density and its gradient, 0 where the former is not finite."""
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            log_prob = self.log_prob(points)
            (score,) = torch.autograd.grad(log_prob.sum(), points)
        log_prob = log_prob.detach()
        return log_prob, score.masked_fill(~log_prob.isfinite().unsqueeze(-1), 0.0)

    def to_noise(self, points: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Map points to the latents of the reparameterised model, ``(num_points, latent_dim)``.

        :returns: the latents, and the log-determinant of each element of scaled sites, by site.
        """
        if not self.blocks:
            return points, {}
        parts = self.noise.split(points)
        log_dets: dict[str, Tensor] = {}
        for block in self.blocks:
            noise, more = block.to_noise(parts)
            parts, log_dets = parts | noise, log_dets | more
        return joined_parts(parts.values()), log_dets

    @torch.no_grad()
    def to_latent(self, points: Tensor) -> Tensor:
        """Map points to latents, ``(num_points, latent_dim)``."""
        noise, _ = self.to_noise(points)
        moved = self.noise.read(
            noise, lambda trace: {name: trace.nodes[name]["value"] for name in self.reparams}
        )
        values = self.noise.constrain(noise) | moved
        return self.target.unconstrain({name: values[name] for name in self.target.shapes})

    @torch.no_grad()
    def to_points(self, latent: Tensor) -> Tensor:
        """Map latents to points, ``(num_points, latent_dim)``."""
        parts = self._prior_noise(latent)
        for block in self.blocks:
            parts |= block.to_points(parts)
        return joined_parts(parts.values())

    def fitted_laws(
        self, latent: Tensor, laws: Sequence[Tensor], policy: SpacePolicy
    ) -> tuple[Tensor, ...]:
        """Fit the laws of the scaled blocks to draws; see :meth:`ScaledBlock.fitted`.

        :param latent: draws of the posterior, ``(num_draws, latent_dim)``.
        :param laws: where the fit begins.
        :param policy: the limits.
        """
        with torch.no_grad():
            parts = self._prior_noise(latent)
        found = []
        for block, law in zip(self.blocks, laws, strict=True):
            found.append(block.fitted(parts, law, policy))
            with torch.no_grad():
                parts |= block.changed(found[-1]).to_points(parts)
        return tuple(found)

    @torch.no_grad()
    def misfit(self, latent: Tensor) -> float:
        """Return the cross entropy of draws and independent normal noise, up to a constant, in
        nats: constant scales are left to the frame.

        :param latent: draws of the posterior, ``(num_draws, latent_dim)``.
        """
        points = self.to_points(latent)
        value = points.std(0).log().sum() + self.log_prob(points).mean()
        return value.nan_to_num(nan=math.inf, posinf=math.inf).item()

    def changed(self, laws: Sequence[Tensor]) -> NoiseMap:
        """Return the map of other laws; see :meth:`ScaledBlock.changed`."""
        # The model in terms of the priors' noise is the same.
        other = copy.copy(self)
        other.blocks = [block.changed(law) for block, law in zip(self.blocks, laws, strict=True)]
        other.reparams = self.reparams | {
            name: ScaledReparam(block, shape)
            for block in other.blocks
            for name, shape in block.shapes.items()
        }
        return other

    def _prior_noise(self, latent: Tensor) -> dict[str, Tensor]:
        """Return the latents of the reparameterised model by site, unconstrained."""

        def read(trace: Trace) -> dict[str, Tensor]:
            sites = {name: trace.nodes[name] for name in self.reparams}
            return {
                reparam.noise_name(name): reparam.to_noise(sites[name]["fn"], sites[name]["value"])
                for name, reparam in self.reparams.items()
            }

        values = self.target.constrain(latent) | self.target.read(latent, read)
        return self.noise.split(self.noise.unconstrain(values))


def dependent_sites(target: Target, point: Tensor) -> list[str]:
    """Return the latents that suit a map and whose priors change with others, in model order.

    :param point: a point near which the change is measured, ``(latent_dim,)``. If the model raises
        an error there, no sites are found.
    """
    step = torch.linspace(RUNS.nearby, 2 * RUNS.nearby, len(point)).to(point)
    try:
        one, other = (target.trace_at(at).nodes for at in (point, point + step))
    except IMPOSSIBLE:
        return []
    return [
        name
        for name in target.shapes
        if name in one  # no prior that depends on summed-out latents
        and ConditionalReparam.suits_site(one[name])
        and _differ(one[name]["fn"], other[name]["fn"])
    ]


@in_turn
@with_seed
def conditional_reparams(
    model: Callable[..., Any],
    guide: Guide,
    *args: Any,
    seed: int | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, ConditionalReparam]:
    """Return the maps that write a model over the noise of its latents, for ``poutine.reparam``.

    Any guide of the reparameterised model, even a mean field, is a structured guide of the
    original model: latents depend on their parents as prior and data imply, and are independent
    given them. NUTS meets no funnel. :func:`~pyro_implicit.mcmc.refine` applies the maps itself.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> from pyro import poutine
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model(y):
    ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     with pyro.plate("groups", len(y)):
    ...         x = pyro.sample("x", dist.Normal(0.0, scale))
    ...         pyro.sample("y", dist.Normal(x, 0.5), obs=y)
    >>> y = torch.tensor([1.0, -2.0, 0.5])
    >>> reparams = conditional_reparams(model, AutoNormal(model), y, seed=0)
    >>> guide = AutoNormal(poutine.reparam(model, reparams))
    >>> sorted(guide(y))
    ['scale', 'x_noise']

    :param model: a Pyro model of continuous latents, with all its data.
    :param guide: a guide of the model, trained or not, or draws by site. The data's information is
        computed at the median of its draws; a rough median suffices.
    :param args: arguments of the model.
    :param seed: the seed of all random numbers of this call. The caller's random streams do not
        advance; without a seed they are used.
    :param model_kwargs: keyword arguments of the model whose names this function has too.
    :param kwargs: further keyword arguments of the model.
    :returns: a map for each site whose prior depends on other latents, and for each site that the
        model multiplies by other latents. For the latter, ``poutine.reparam`` applies the
        non-centred form, and :class:`~pyro_implicit.mcmc.AutoConditional` and chains apply the
        map. Other sites have no map.
    """
    target = Target(model, *args, model_kwargs={**kwargs, **(model_kwargs or {})})
    return ConditionalNoise(target, middle_of(Sampler(target, guide))).reparams


def middle_of(sampler: Sampler, policy: SpacePolicy = DEFAULT.space) -> Tensor:
    """Return the median of a guide's draws, ``(latent_dim,)``."""
    return sampler.draw(policy.middle_draws).median(0).values


class ConditionalNoise(Space):
    """The noise of latents, given their parents and the data.

    Latents whose priors depend on other latents are mapped by
    :class:`~pyro_implicit.mcmc.ConditionalReparam`. W and h are the second and the first derivative
    of the log-density without the latent's own prior, at a point of the posterior. Latents are
    processed from the last to the first, so that later latents have been replaced by noise.

    Latents whose prior is noise already, but which the model multiplies by functions of other
    latents, follow: see :class:`~pyro_implicit.mcmc.spaces.scaled.ScaledReparam`. The latter map
    also suits a site whose elements the data couple, as the steps of a random walk or the
    coefficients of a regression with more columns than rows. If it makes their noise rounder, it
    replaces the former.

    :param target: the posterior of the latents.
    :param middle: the middle of the posterior, ``(latent_dim,)``.
    :param num_calls: expected calls of :meth:`score`, see :class:`Space`.
    :param compile: see :class:`Space`.
    :param policy: limits of the analysis.
    :param fitted: what an earlier space of this middle has learnt from draws.
    """

    name = "conditional"

    def __init__(
        self,
        target: Target,
        middle: Tensor,
        num_calls: float = math.inf,
        compile: CompileMode = "auto",
        policy: SpacePolicy = DEFAULT.space,
        fitted: Fitted | None = None,
    ) -> None:
        super().__init__(target, num_calls, compile)
        self.middle = middle
        self._again = partial(
            ConditionalNoise, target, num_calls=num_calls, compile=compile, policy=policy
        )
        self._recording: dict[str, Any] = {"num_calls": num_calls, "compile": compile}
        self._policy = policy
        self._others: list[NoiseMap] = []
        sites = dependent_sites(target, middle)
        groups = [[site] for site in reversed(sites)]
        if len(groups) > policy.max_sites:  # the sites of a loop together
            loops = reversed(target.groups)
            groups = [own for loop in loops if (own := [one for one in loop if one in sites])]
        self._map = NoiseMap(target)
        coupled: list[str] = []
        for group in groups:
            found, more = self._reparams_of(group, policy)
            self._map = NoiseMap(target, {**self._map.reparams, **found})
            coupled += more
        if not (coupled and self._scale(coupled, policy)):
            self._scale([], policy)
        self._maps = [self._map, *self._others]
        self._set_map(self._map)
        if fitted is not None:
            self._use(fitted)

    def plain_score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        return self._map.score(points)

    def to_latent(self, points: Tensor) -> Tensor:
        """Map noise to latents, ``(num_chains, latent_dim)``."""
        return self._traced_latent(points)

    def to_points(self, latent: Tensor) -> Tensor:
        """Map latents to noise, ``(num_chains, latent_dim)``."""
        return self._map.to_points(latent)

    def refitted(self, latent: Tensor, anew: bool = False) -> ConditionalNoise | None:
        """Return the space at the median of latents, if this is far from the middle of this one.

        If it is not, but another map or other laws of the information suit the latents better,
        return the space of these.

        :param anew: whether the space is made again wherever the median is: of chains that stay
            apart, the median is not far in units of their sds.
        """
        assert self.middle is not None
        middle = latent.median(0).values
        is_far = (middle - self.middle).abs() > self._policy.max_moved * latent.std(0)
        if not (anew or is_far.any()):
            return self._refitted(latent)
        try:
            space = self._again(middle)
        except RuntimeError:  # no second derivatives there
            return None
        return space if space.reparams else None

    def _refitted(self, latent: Tensor) -> ConditionalNoise | None:
        policy, found = self._policy, []
        if not any(one.blocks for one in self._maps):
            return None
        latent = latent[:: -(-len(latent) // policy.law_draws)]
        for index, one in enumerate(self._maps):
            laws = tuple(latent.new_zeros(block.num_changes) for block in one.blocks)
            if self.fitted is not None and self.fitted.choice == index:
                laws = self.fitted.laws
            with suppress(RuntimeError):  # a matrix without a factor
                laws = one.fitted_laws(latent, laws, policy)
                found.append((one.changed(laws).misfit(latent), Fitted(index, laws)))
        if not found:
            return None
        misfit, fitted = min(found, key=lambda pair: pair[0])
        gain = (self._map.misfit(latent) - misfit) / latent.shape[-1]
        if not gain > policy.least_gain:
            return None
        space = copy.copy(self)
        space._use(fitted)
        space._traced = TracedScore(space.plain_score, **self._recording)
        return space

    def _use(self, fitted: Fitted) -> None:
        self.fitted = fitted
        self._set_map(self._maps[fitted.choice].changed(fitted.laws))

    def _set_map(self, noise_map: NoiseMap) -> None:
        self._map, self.reparams = noise_map, noise_map.reparams
        self._traced_latent = traced_value(noise_map.to_latent, **self._recording)

    def _scale(self, coupled: list[str], policy: SpacePolicy) -> bool:
        """Map scaled latents, and coupled sites in non-centred form, if this makes them rounder."""
        assert self.middle is not None
        before, target = self._map, self.target
        suffix = unused_suffix(target.shapes, target.trace_at(self.middle).nodes)
        nothing = {
            name: ConditionalReparam(0 * one.precision, 0 * one.information, one.suffix)
            for name, one in before.reparams.items()
            if name in coupled
        }
        start = NoiseMap(target, before.reparams | nothing)
        known = {one.noise_name(name): name for name, one in before.reparams.items()}

        def scale_of(name: str) -> Callable[[Tensor], Tensor]:
            def scale(trace: Trace) -> Tensor:
                site = trace.nodes[name]
                return base_distribution(site["fn"]).scale.expand_as(site["value"]).flatten()

            return lambda points: target.read(start.to_latent(points), scale)

        written = {
            noise: (name, scale_of(name)) for noise, name in known.items() if name in coupled
        }
        point = start.to_points(self.middle.unsqueeze(0))[0]
        scaled = scaled_reparams(start.noise, point, known, policy, written, suffix)
        if not scaled:
            return False
        after = NoiseMap(target, before.reparams | scaled)
        limit = policy.max_rest
        if own := scaled.keys() & coupled:
            limit = max(limit, policy.rounder * roughness(before, self.middle, own, policy))
        is_round = roughness(after, self.middle, scaled, policy) < limit
        if is_round:
            self._map = after
        else:
            self._others.append(after)
        return is_round

    def _reparams_of(
        self, sites: list[str], policy: SpacePolicy
    ) -> tuple[dict[str, ConditionalReparam], list[str]]:
        """Return the maps of sites, and which of them have coupled elements."""
        assert self.middle is not None
        noise, point = self._map.noise, self.to_points(self.middle.unsqueeze(0)).detach()
        nodes, made = self.target.trace_at(self.middle).nodes, {}
        coupled = []
        suffix = unused_suffix(self.target.shapes, nodes)
        places = noise.places
        with torch.enable_grad():
            sizes = [
                places[name].shape[-1] if ConditionalReparam.is_vector(nodes[name]["fn"]) else 1
                for name in sites
            ]
            all_columns = [
                places[name].reshape(-1, size) for name, size in zip(sites, sizes, strict=True)
            ]
            score_of = functools.partial(score_of_rest, noise, sites=sites)
            score, hessians = own_hessians(score_of, point, all_columns, policy)
            of_sites = zip(sites, sizes, all_columns, hessians, strict=True)
            for name, size, columns, (hessian, squares) in of_sites:
                fn, place, curvature = nodes[name]["fn"], places[name], -hessian
                is_vector = ConditionalReparam.is_vector(fn)
                gradient, value = score[0, columns], point[0, columns]
                if is_coupled(fn, curvature, squares, policy):
                    coupled.append(name)
                found = data_information(
                    fn, *(one.double() for one in (curvature, gradient, value))
                )
                precision, information = (one.to(value) for one in found)
                shape = (*place.shape, size) if is_vector else place.shape
                made[name] = ConditionalReparam(
                    precision.reshape(shape), information.reshape(place.shape), suffix
                )
        return made, coupled


def is_coupled(fn: Any, curvature: Tensor, squares: Tensor, policy: SpacePolicy) -> bool:
    """Return whether the data couple the elements of a site more than they tell of each.

    :param fn: the prior.
    :param curvature: the negative Hessian, ``(count, 1, count, 1)``, or its diagonal,
        ``(count, 1, 1)``.
    :param squares: the sums of the squares of its rows, ``(count, 1)``.
    """
    if ConditionalReparam.is_vector(fn) or ConditionalReparam.is_bounded(fn):
        return False
    scale = base_distribution(fn).scale.expand(fn.batch_shape + fn.event_shape).flatten()
    if curvature.dim() == 4:
        linear_of = curvature[:, 0, :, 0] * scale * scale.unsqueeze(-1)
        own = 1 + linear_of.diagonal().clamp(min=0)
        shares = (linear_of - linear_of.diagonal().diag()).square() / (own * own.unsqueeze(-1))
        return bool(shares.sum(-1).mean() > policy.coupled)
    diagonal, variance = curvature.flatten(), scale.square()
    own = 1 + (diagonal * variance).clamp(min=0)
    # Others count as their mean: their scales rarely differ.
    others = (squares.flatten() - diagonal.square()) * variance.mean() / own.mean()
    return bool((others * variance / own).mean() > policy.coupled)


def roughness(
    noise_map: NoiseMap, middle: Tensor, names: Collection[str], policy: SpacePolicy
) -> float:
    """Return how far noise is from standard normal while other latents vary widely.

    It is the mean square of score plus noise. If it is large, the law of a :class:`ScaledReparam`
    holds for W at most, and not for h, for instance because a mean moves as well.

    :param noise_map: the map that writes the latents as noise.
    :param middle: the middle of the posterior, ``(latent_dim,)``.
    :param names: the latents.
    """
    centre = noise_map.to_points(middle.unsqueeze(0))
    places = noise_map.noise.places
    own = torch.cat([places[noise_map.reparams[n].noise_name(n)].flatten() for n in names])
    is_other = torch.ones_like(centre[0], dtype=torch.bool)
    is_other[own] = False
    others = is_other.nonzero().flatten()
    steps = policy.difference * torch.eye(centre.shape[-1]).to(centre)[others]
    ahead, behind = (noise_map.score(centre + one)[1] for one in (steps, -steps))
    bends = (behind - ahead)[torch.arange(len(others)), others] / (2 * policy.difference)
    spread = bends.clamp(min=policy.point_spread**-2).nan_to_num(policy.point_spread**-2).rsqrt()
    generator = torch.Generator().manual_seed(0)
    shape = policy.num_points, centre.shape[-1]
    drawn = torch.randn(shape, generator=generator, device="cpu").to(centre)
    points = centre.repeat(policy.num_points, 1)
    points[:, others] += policy.max_moved * spread * drawn[:, others]
    points[:, own] = drawn[:, own]
    rest = (noise_map.score(points)[1] + points)[:, own].square().mean()
    return rest.nan_to_num(nan=math.inf).item()


def conditional_noise(
    target: Target, middle: Tensor, limit: TimeLimit = NO_LIMIT
) -> ConditionalNoise | None:
    """Return the conditional space, or None if it equals the latents or cannot be made in time."""
    if is_too_late(target, limit):
        return None
    try:
        space = ConditionalNoise(target, middle)
    except RuntimeError:  # no second derivatives
        return None
    return space if space.reparams else None


def is_too_late(target: Target, limit: TimeLimit, policy: SpacePolicy = DEFAULT.space) -> bool:
    """Return whether the conditional space takes more than a share of the time left to analyse."""
    if math.isinf(limit.end):
        return False
    # A law is fitted to second derivatives, each of which takes two gradients.
    seconds = 2 * target.seconds(policy.num_points * policy.max_watched)
    return seconds > limit.left(SEARCH.time_share)


def _differ(one: Any, other: Any) -> bool:
    one, other = base_distribution(one), base_distribution(other)
    names = ("loc", "scale_tril") if ConditionalReparam.is_vector(one) else ("loc", "scale")
    return any(not torch.equal(getattr(one, name), getattr(other, name)) for name in names)
