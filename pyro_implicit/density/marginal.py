# SPDX-License-Identifier: Apache-2.0
"""Densities of a few latent variables, with all others integrated or summed out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_implicit.density.cost import estimated_seconds, nearby
from pyro_implicit.density.model import without_validation
from pyro_implicit.density.policy import SEARCH, MarginalPolicy
from pyro_implicit.density.run_mode import all_runs, in_each_run
from pyro_implicit.density.target import Target
from pyro_implicit.runtime.sites import site_parts

__all__ = ["Marginal", "MarginalModel", "SplitSites"]


class SplitSites:
    """The latent variables of a posterior, split into integrated and remaining ones.

    :param target: the posterior of all latent variables.
    :param exact: the same posterior in the precision of the computation.
    :param names: the sites that are integrated out.
    :param policy: limits and tolerances.
    """

    def __init__(
        self, target: Target, exact: Target, names: list[str], policy: MarginalPolicy
    ) -> None:
        self.target, self.names, self.policy = target, names, policy
        self._exact = exact
        parts = site_parts(torch.arange(target.latent_dim), target.shapes)
        rest = [name for name in target.shapes if name not in names]
        like = exact.init_loc
        #: The remaining sites, with their shapes.
        self.shapes = {name: target.shapes[name] for name in rest}
        self._own = {name: target.shapes[name] for name in names}
        self._rest_index = torch.cat([parts[name].flatten() for name in rest]).to(like.device)
        self._own_index = torch.cat([parts[name].flatten() for name in names]).to(like.device)
        self.dim, self.num_integrated = len(self._rest_index), len(self._own_index)
        self.init_loc = like[self._rest_index].double()

    def _vectors(self, rest: Tensor, own: Tensor) -> Tensor:
        """Return vectors of all latent variables, ``(num_points, latent_dim)``."""
        whole = own.new_zeros(len(own), self.target.latent_dim)
        whole = whole.index_copy(1, self._rest_index, rest.to(own))
        return whole.index_copy(1, self._own_index, own)


class Marginal(SplitSites, ABC):
    """The density of the remaining latent variables, and draws of the integrated ones.

    The arguments are those of :class:`SplitSites`.

    :cvar how: whether sites are "integrated" or "summed" out.
    """

    how: ClassVar[str] = "integrated"

    @abstractmethod
    def evaluate(self, rest: Tensor, with_score: bool = True) -> tuple[Tensor, Tensor]:
        """Return the marginal log-density and its gradient, constants in double precision.

        The log-density is -inf, with gradient 0, where it is not finite.

        :param rest: unconstrained coordinates of the remaining sites, ``(num_points, dim)``.
        :param with_score: whether to compute the gradient; otherwise it is 0.
        :returns: ``(num_points,)`` and ``(num_points, dim)``.
        """

    @abstractmethod
    def draw(self, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the integrated sites given the others.

        :param rest: ``(num_points, dim)``.
        :returns: unconstrained vectors of all latent variables, ``(num_points, latent_dim)``;
            marginal log-densities ``(num_points,)``; and errors ``(num_points,)``: the nats by
            which the joint log-density differs from that of the marginal and conditional ones,
            beyond rounding; inf where there is no density.
        """

    def seconds(self, with_score: bool) -> float:
        """Return the estimated seconds of one core for an evaluation at one point.

        :param with_score: see :meth:`evaluate`.
        """
        points = nearby(self.init_loc, SEARCH.num_draws)
        return estimated_seconds(lambda: self.evaluate(points, with_score)) / len(points)

    def __call__(self, rest: Tensor) -> Tensor:
        """Return the marginal log-density, differentiable twice, ``(num_points,)``.

        :param rest: unconstrained coordinates of the remaining sites, ``(num_points, dim)``.
        """
        return _Value.apply(rest, self).to(rest.dtype)


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rest: Tensor, owner: Marginal) -> Tensor:
        value, score = owner.evaluate(rest, ctx.needs_input_grad[0])
        ctx.owner = owner
        ctx.save_for_backward(rest, score.to(rest))
        return value.to(rest)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rest, score = ctx.saved_tensors
        if torch.is_grad_enabled():
            score = _Score.apply(rest, score, ctx.owner)
        return gradient.unsqueeze(-1) * score, None


class _Score(torch.autograd.Function):
    """Its derivative is a difference of scores: each is a closed form in double precision."""

    @staticmethod
    def forward(ctx: Any, rest: Tensor, score: Tensor, owner: Marginal) -> Tensor:
        ctx.owner = owner
        ctx.save_for_backward(rest)
        return score.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rest,), owner = ctx.saved_tensors, ctx.owner

        def differences(_: int | None, seeds: Tensor) -> Tensor:
            points = rest.double().expand_as(seeds).reshape(-1, rest.shape[-1])
            seeds, shape = seeds.double().reshape(points.shape), seeds.shape
            size = seeds.abs().amax(-1, True).clamp(min=torch.finfo(seeds.dtype).tiny)
            step = owner.policy.step * seeds / size
            ahead = owner.evaluate(points + step)[1]
            behind = owner.evaluate(points - step)[1]
            found = (ahead - behind) * size / (2 * owner.policy.step)
            return found.reshape(shape).to(rest)

        if all_runs(gradient) is None:
            return differences(None, gradient), None, None
        return in_each_run(differences, gradient), None, None


class _Priors(Messenger):
    """Reads the own priors of sites, before reparameterisations replace them, and the values."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.priors: dict[str, tuple[Any, Any, Any]] = {}
        self.values: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self._names:
            self.priors[msg["name"]] = msg["fn"], msg["scale"], msg["mask"]

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] in self._names:
            self.values[msg["name"]] = msg["value"]


class MarginalModel:
    """The Pyro model of the remaining sites, with their own priors.

    Its factor ``"integrated"`` is the rest of the marginal density, so that the log-density is that
    of the data and the remaining sites.

    :param marginal: the marginal density of ``model``.
    """

    def __init__(self, marginal: Marginal) -> None:
        self.marginal = marginal
        target = marginal.target
        values = target.constrain(target.init_loc)
        self._values = {name: values[name] for name in marginal.names}
        sites = target.trace_at(target.init_loc).nodes
        # Pyro warns of plates that only a guide has.
        hidden = [name for name, site in sites.items() if not site_is_subsample(site)]
        self._hidden = [name for name in hidden if name not in marginal.shapes]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Sample the remaining sites, and add the factor.

        :param args: arguments of the model whose sites are integrated out, as ``kwargs``.
        """
        marginal = self.marginal
        target = marginal.target
        given: Callable[..., Any] = poutine.condition(target.model, data=self._values)
        with poutine.block(hide=self._hidden), _Priors(marginal.shapes) as sites:
            given(*args, **kwargs)
        points, known = [], torch.zeros((), device=target.init_loc.device)
        for name, shape in marginal.shapes.items():
            (fn, scale, mask), value = sites.priors[name], sites.values[name]
            transform = target.transforms[name]
            part = transform.inv(value)
            log_det = transform.log_abs_det_jacobian(part, value)
            prior = scale_and_mask(without_validation(fn).log_prob(value), scale, mask)
            known = known + prior.sum() + log_det.sum()
            points.append(part.reshape(shape.numel()))
        point = torch.cat(points)
        if all_runs(point) is None:
            total = marginal(point.unsqueeze(0)).squeeze(0)
        else:
            total = in_each_run(lambda _, many: marginal(many), point)
        pyro.factor("integrated", total - known)
