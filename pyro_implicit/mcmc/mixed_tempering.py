# SPDX-License-Identifier: Apache-2.0
"""Annealing of models with discrete latent variables whose chains stay in separate modes.

Particles are drawn from the prior, and their distribution is moved to the posterior by powers of
the likelihood (Del Moral, Doucet and Jasra, 2006). At each power the transitions are those of
``MixedChains``.
"""

from __future__ import annotations

import math
import time

import torch
from pyro.distributions import MaskedDistribution
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from pyro_implicit.density.cost import TracedScore
from pyro_implicit.density.model import compute_log_prob
from pyro_implicit.density.target import Target
from pyro_implicit.mcmc.draws import History
from pyro_implicit.mcmc.kernels import hmc
from pyro_implicit.mcmc.mixed_chains import MixedChains, mixed_frame
from pyro_implicit.mcmc.spaces.choice import ChainSetup
from pyro_implicit.mcmc.spaces.space import MixedSpace
from pyro_implicit.mcmc.stopping import OutOfTime, Tracker
from pyro_implicit.mcmc.tempering import Annealed, Cloud, Evaluated, join_clouds
from pyro_implicit.runtime.sites import is_data, is_flat, is_latent

__all__ = ["TemperedSpace", "temper_mixed", "why_not_tempered"]


def why_not_tempered(target: Target) -> str:
    """Return the name of a latent site whose prior cannot be drawn from; empty if there is none.

    Such priors are flat, scaled or masked, or replaced by a posterior of earlier data.

    :param target: the posterior.
    """
    for name, site in target.trace_at(target.init_loc).nodes.items():
        if site["type"] != "sample":
            continue
        if is_latent(site):
            fn = site["fn"]
            while hasattr(fn, "base_dist") and not isinstance(fn, MaskedDistribution):
                fn = fn.base_dist
            is_masked = isinstance(fn, MaskedDistribution) or site["mask"] is not None
            if is_masked or is_flat(fn) or site["scale"] != 1:
                return name
        elif site["infer"].get("is_prior"):
            return name
    return ""


class TemperedSpace(MixedSpace):
    r"""The density :math:`p(\theta)\, p(x | \theta)^\beta` with a power :math:`\beta` that changes.

    :param target: the posterior of the latent variables, some of which are discrete.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.power = 1.0
        trace = prune_subsample_sites(target.trace_at(target.init_loc))
        compute_log_prob(trace)
        self._is_data = torch.cat(
            [
                torch.as_tensor(site["log_prob"]).new_full(
                    (site["log_prob"].numel(),), is_data(site)
                )
                for site in trace.nodes.values()
                if site["type"] == "sample"
            ]
        ).bool()
        self._traced_data = TracedScore(self._data_score)

    def log_likelihood(self, points: Tensor) -> Tensor:
        """Return the log-likelihood, ``(num_points,)``."""
        return super().terms(points)[:, self._is_data].sum(-1)

    def _data_score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            total = self.target.terms(points)[:, self._is_data].sum(-1)
            if not total.requires_grad:
                return total, torch.zeros_like(points)
            (gradient,) = torch.autograd.grad(total.sum(), points)
        return total.detach(), gradient

    def score(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density and its gradient."""
        log_density, gradient = super().score(points)
        if self.power == 1:
            return log_density, gradient
        total, slope = self._traced_data(points)
        rest = 1 - self.power
        return _without(log_density, rest * total), gradient - rest * slope

    def terms(self, points: Tensor) -> Tensor:
        """Return the terms of the log-density, ``(num_points, num_terms)``."""
        found = super().terms(points)
        return torch.where(self._is_data, self.power * found, found)

    def log_prob(self, points: Tensor) -> Tensor:
        """Return the log-density without its gradient, ``(num_points,)``."""
        found = super().log_prob(points)
        return _without(found, (1 - self.power) * self.log_likelihood(points))


def _without(log_density: Tensor, part: Tensor) -> Tensor:
    """Subtract a part of log-densities, which are -inf wherever the part is."""
    return torch.where(log_density.isfinite(), log_density - part, log_density)


class _Particles:
    """Particles that move to the posterior; they count the gradients of single particles."""

    def __init__(self, plan: ChainSetup) -> None:
        self.space, self.plan = TemperedSpace(plan.sampler.target), plan
        self.num_points = 0
        self.chains: MixedChains | None = None
        self.cpu_began = time.process_time()

    def anneal(self, number: int) -> Cloud:
        """Move new particles from the prior to the posterior.

        :raises ValueError: if the likelihood is 0 at all of them.
        :raises OutOfTime: if chains stay the result, and no time is left.
        """
        limits, points = self.plan.policy.tempering, self.space.target.sample_prior(number)
        number, power = len(points), 0.0
        even = points.new_full((number,), -math.log(max(number, 1)), dtype=torch.float64)
        origin = torch.arange(number, device=points.device)
        cloud = Cloud(_at(points), even, origin, torch.zeros_like(origin))
        while power < 1:
            if self.plan.anneals_apart and self._is_late():
                raise OutOfTime
            ratio = self.space.log_likelihood(cloud.here.points).double()
            lost = ~ratio.isfinite()
            if not cloud.log_weights[~lost].isfinite().any():
                raise ValueError("the likelihood is 0 at all draws of the prior")
            power = cloud.reweighted(ratio, power, limits.share)
            if lost.any() or 1 / cloud.shares.square().sum() < limits.resampling * number:
                cloud.take(cloud.resampled(number))
            self.space.power = power
            cloud.here = self.walk(cloud, limits.moves)[-1]
        return cloud

    def _is_late(self) -> bool:
        seconds = time.process_time() - self.cpu_began
        return self.plan.limit.is_over() or seconds >= self.plan.patience

    def walk(self, cloud: Cloud, number: int) -> list[Evaluated]:
        """Make transitions of all particles, in a frame that is estimated from them."""
        space, plan, points = self.space, self.plan, cloud.here.points
        pool = points[cloud.resampled(len(points))]
        frame = mixed_frame(pool, plan.kind, space.score, len(pool), space.elements, plan.policy)
        before = self.chains
        chains = self.chains = MixedChains(
            kernel="hmc",
            state=hmc.init(frame.to_white(points), lambda white: space.white_score(frame, white)),
            frame=frame,
            policy=plan.policy,
            adaptation=hmc.adaptation(plan.policy, plan.policy.tempering.max_leapfrogs),
            frame_kind=plan.kind,
            history=History(plan.policy.least_kept),
            elements=space.elements,
            depends=None if before is None else before.depends,
            is_sequential=before is not None and before.is_sequential,
        )
        chains.attach(space)
        chains.start()
        chains.learn_moves(pool)
        found = []
        for _ in range(number):
            chains.advance()
            found.append(_at(chains.points, chains.state.log_density))
        self.num_points += chains.gradients * len(points)
        return found


def _at(points: Tensor, log_density: Tensor | None = None) -> Evaluated:
    if log_density is None:
        log_density = torch.zeros_like(points[:, 0])
    return Evaluated(points, log_density, torch.zeros_like(points))


def temper_mixed(plan: ChainSetup, track: Tracker) -> Annealed:
    """Draw by annealing from the prior, until the errors of tracked quantities are small.

    :param plan: the number of chains, their budget, and the patience after it.
    :param track: the quantities whose errors decide.
    :raises ValueError: for a prior that cannot be drawn from, or no draw of it with a likelihood.
    """
    target, policy = plan.sampler.target, plan.policy
    if name := why_not_tempered(target):
        raise ValueError(
            f"annealing starts from the prior, but that of site '{name}' cannot be drawn from "
            "(flat, scaled, masked, or a posterior of earlier data). Cure: a proper prior"
        )
    began, limits = time.perf_counter(), policy.tempering
    particles = _Particles(plan)
    joined, drift, stopped, num_gradients = join_clouds(
        lambda: (particles.anneal(limits.num_particles), particles.num_points),
        lambda _, error: error <= limits.mixed_error,
        track,
        plan,
        particles.cpu_began,
    )
    joined.take(joined.resampled(len(joined.origin)))
    snapshots = particles.walk(joined, limits.moves)
    draws = torch.stack([one.points for one in snapshots])
    chains, seconds = particles.chains, time.perf_counter() - began
    assert chains is not None
    return Annealed(draws, None, drift, chains, stopped, num_gradients, seconds)
