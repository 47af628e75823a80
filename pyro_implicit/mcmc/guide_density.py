# SPDX-License-Identifier: Apache-2.0
"""Exact log-densities of guides at given draws."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.infer.autoguide import AutoContinuous, AutoGuide, AutoLaplaceApproximation, AutoNormal
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import Independent, Normal, biject_to

from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.model import Model, refuse_subsampling, total_log_prob
from pyro_implicit.distributions import find_implicit
from pyro_implicit.guides import AutoImplicit, AutoMixture
from pyro_implicit.guides.affine_frame import normal_moments
from pyro_implicit.guides.auto_implicit import why_inexact
from pyro_implicit.mcmc.policy import INVERSION

__all__ = [
    "DensityAtDraws",
    "InjectiveDensity",
    "MixtureDensity",
    "density_at_draws",
    "unconstrained_draws",
]


class DensityAtDraws:
    """The log-density of a guide at unconstrained draws ``(num_draws, latent_dim)``.

    :param guide: an autoguide of Pyro with a density over the latent vector.
    :param latent: the draws, in the guide's order of sites.
    """

    def __init__(self, guide: Any, latent: Tensor) -> None:
        self.guide, self.latent = guide, latent
        self.num_draws, self.device = len(latent), latent.device

    def log_prob(self, rows: Tensor) -> Tensor:
        """Return the log-density at some of the draws.

        :param rows: the indices of the draws, ``(n,)``.
        :returns: ``(n,)``.
        """
        return self.guide.get_posterior().log_prob(self.latent[rows])

    def objective(self, rows: Tensor) -> Tensor:
        """Return the objective of training, ``()``: the mean log-density."""
        return self.log_prob(rows).mean()


class InjectiveDensity(DensityAtDraws):
    r"""Injective generators, :math:`\log q(f(z)) = \log N(z; 0, I) - \log |\det J_f(z)|`.

    Newton's method finds the noise of each draw from its last value. The implicit function theorem
    gives the gradient by the parameters of f: with h the right-hand side as a function of z,

    .. math:: \log q(\theta) = h(z) - (f(z) - \theta)^\top J_f^{-\top} \nabla h(z),

    whose last factor is a constant, has the exact gradient at :math:`f(z) = \theta`, and an error
    of second order near it.
    """

    def __init__(self, guide: AutoImplicit, latent: Tensor) -> None:
        super().__init__(guide, latent)
        self._noise = torch.full_like(latent, torch.nan)

    def log_prob(self, rows: Tensor) -> Tensor:
        """As above; -inf at draws whose noise is not found."""
        transform, *frame = self.guide.get_transform().parts
        value = self.latent[rows]
        log_det = value.new_zeros(len(rows))
        for part in reversed(frame):
            outer, value = value, part.inv(value)
            log_det = log_det + part.log_abs_det_jacobian(value, outer)
        generator = transform.generator
        start, found = self._solve(generator, value.detach(), rows)
        if not found.any():
            return value.new_full((len(rows),), -math.inf)
        start, value = start[found], value[found]
        with torch.enable_grad():
            noise = start.requires_grad_()
            around = generator.linearise(noise)
            log_q = self.guide.get_base_dist().log_prob(noise) - around.log_abs_det()
            (slope,) = torch.autograd.grad(log_q.sum(), noise, retain_graph=True)
        pull = around.solve_transposed(slope)
        log_q = log_q - ((around.value - value) * pull).sum(-1)
        result = log_q.new_full((len(rows),), -math.inf).masked_scatter(found, log_q)
        return result - log_det

    def objective(self, rows: Tensor) -> Tensor:
        log_q = self.log_prob(rows)
        return log_q[log_q > -math.inf].mean()

    @torch.no_grad()
    def _solve(self, generator: Any, value: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        noise = self._noise[rows]
        found = ~noise.isnan().any(-1)
        if found.any():
            noise[found], near = _newton(generator, value[found], noise[found], 1)
            found = found.masked_scatter(found, near)
        if not found.all():
            noise[~found], near = _from_scratch(generator, value[~found])
            found = found.masked_scatter(~found, near)
        self._noise[rows] = noise.masked_fill(~found.unsqueeze(-1), torch.nan)
        return noise, found


class MixtureDensity(DensityAtDraws):
    """Mixtures, whose components learn from the draws by their initial responsibilities.

    This is one round of expectation maximisation with fixed weights.
    """

    def __init__(self, guide: AutoMixture, latent: Tensor) -> None:
        super().__init__(guide, latent)
        self._parts = [InjectiveDensity(part, latent) for part in guide.components]
        self._shares: Tensor | None = None

    def log_prob(self, rows: Tensor) -> Tensor:
        return self.log_joint(rows).logsumexp(-1)

    def objective(self, rows: Tensor) -> Tensor:
        if self._shares is None:
            with torch.no_grad():
                parts = torch.arange(self.num_draws, device=self.device).split(512)
                log_q = torch.cat([self.log_joint(part) for part in parts])
            self._shares = log_q.softmax(-1).nan_to_num()
        total = self.latent.new_zeros(())
        for k, part in enumerate(self._parts):
            own = rows[self._shares[rows, k] > INVERSION.least_share]
            if len(own):
                log_q = part.log_prob(own)
                share = self._shares[own, k].masked_fill(log_q == -math.inf, 0.0)
                total = total + share @ log_q.clamp(min=torch.finfo(log_q.dtype).min)
        return total / len(rows)

    def log_joint(self, rows: Tensor) -> Tensor:
        """Return the log-density of each component with its weight, ``(n, num_components)``."""
        parts = torch.stack([part.log_prob(rows) for part in self._parts], -1)
        return parts + self.guide.log_weights.detach().log_softmax(0)


def _from_scratch(generator: Any, value: Tensor) -> tuple[Tensor, Tensor]:
    try:
        noise = generator.inverse(value)
    except NotImplementedError:
        return _newton(generator, value, torch.zeros_like(value), INVERSION.newton_steps)
    return noise, noise.isfinite().all(-1)


def _newton(generator: Any, value: Tensor, noise: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Run a damped Newton method for each row; return noise, and where it converged."""
    allowed = INVERSION.near * (1 + value.abs().amax(-1))
    error = (generator(noise) - value).abs().amax(-1)
    noise, size = noise.clone(), torch.ones_like(allowed)
    for _ in range(num_steps):
        rows = (~(error <= allowed)).nonzero().squeeze(-1)
        if len(rows) == 0:
            break
        around = generator.linearise(noise[rows])
        step = torch.linalg.solve_ex(around.jacobian(), around.value - value[rows])[0]
        trial = noise[rows] - size[rows].unsqueeze(-1) * step
        trial_error = (generator(trial) - value[rows]).abs().amax(-1)
        better = trial_error < error[rows]
        noise[rows] = torch.where(better.unsqueeze(-1), trial, noise[rows])
        error[rows] = torch.where(better, trial_error, error[rows])
        size[rows] = torch.where(better, (2 * size[rows]).clamp(max=1), size[rows] / 4)
    return noise, error <= allowed


Draws = dict[str, Tensor]
CURE = "Cure: AutoImplicit(model, AutoregressiveGenerator), or one of Pyro's Gaussian autoguides"


class _NormalDensity(DensityAtDraws):
    def log_prob(self, rows: Tensor) -> Tensor:
        sites = (name for name, _ in self.guide.prototype_trace.iter_stochastic_nodes())
        return Independent(Normal(*normal_moments(self.guide, sites)), 1).log_prob(
            self.latent[rows]
        )


class _TracedDensity(DensityAtDraws):
    """A guide written by hand, run at the draws by :class:`BatchedRuns`."""

    def __init__(self, guide: Any, draws: Draws, args: tuple, kwargs: dict[str, Any]) -> None:
        self.draws = draws
        first = next(iter(draws.values()))
        self.num_draws, self.device = len(first), first.device
        latents = Trace()
        with poutine.block():
            trace: Any = poutine.trace(guide).get_trace(*args, **kwargs)
        refuse_subsampling(trace, "teach")
        sites = [(n, s) for n, s in trace.iter_stochastic_nodes() if not site_is_subsample(s)]
        for name, site in sites:
            _refuse_site(name, site, draws)
            latents.add_node(name, **site)
        self._names = list(latents.nodes)
        self._model = Model(guide, args, kwargs, latents)
        self._runs = BatchedRuns("teach")

    def log_prob(self, rows: Tensor) -> Tensor:
        with poutine.block():
            values = {name: self.draws[name][rows] for name in self._names}
            return self._runs.map(self._model, values, total_log_prob)


def density_at_draws(
    guide: Any, draws: Draws, args: tuple = (), kwargs: dict[str, Any] | None = None
) -> DensityAtDraws:
    """Return the log-density of a guide at draws.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoDiagonalNormal, init_to_value
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> start = init_to_value(values={"x": torch.tensor(1.0)})
    >>> guide = AutoDiagonalNormal(model, init_loc_fn=start, init_scale=1.0)
    >>> _ = guide()
    >>> found = density_at_draws(guide, {"x": torch.tensor([1.0, 2.718281828])})
    >>> found.log_prob(torch.tensor([0, 1]))
    tensor([-0.9189, -1.4189], grad_fn=<SumBackward1>)

    :param guide: a guide that was called before.
    :param draws: constrained values by site, ``(num_draws, *site_shape)``.
    :param args: positional arguments of the guide; ``kwargs`` are keyword arguments.
    :raises ValueError: for a guide without a density at these draws.
    """
    who = type(guide).__name__
    if not isinstance(guide, AutoGuide):
        return _TracedDensity(guide, draws, args, kwargs or {})
    if isinstance(guide, AutoNormal):
        return _NormalDensity(guide, unconstrained_draws(guide, draws))
    if isinstance(guide, AutoMixture):
        for part in guide.components:
            _refuse_inexact(part, f"a component of {who}")
        return MixtureDensity(guide, unconstrained_draws(guide, draws))
    if isinstance(guide, AutoImplicit):
        _refuse_inexact(guide, who)
        return InjectiveDensity(guide, unconstrained_draws(guide, draws))
    if isinstance(guide, AutoLaplaceApproximation) or not isinstance(guide, AutoContinuous):
        raise ValueError(f"teach knows no density of a {who} at draws of the posterior. {CURE}")
    return DensityAtDraws(guide, unconstrained_draws(guide, draws))


def _refuse_inexact(guide: AutoImplicit, who: str) -> None:
    if reason := why_inexact(guide):
        raise ValueError(f"teach needs a guide with a density, and {who} has none: {reason}")


def _refuse_site(name: str, site: dict[str, Any], draws: Draws) -> None:
    if name not in draws:
        raise ValueError(
            f"the guide samples '{name}', but the draws do not contain this site, so the guide's "
            f"density at the draws is unknown. {CURE}"
        )
    if isinstance(site["fn"], Delta):
        raise ValueError(f"site '{name}' of the guide is a point (Delta), without density. {CURE}")
    if find_implicit(site["fn"]) is not None:
        raise ValueError(
            f"site '{name}' of the guide has no density at draws of the posterior: its "
            f"distribution is {type(site['fn']).__name__}. {CURE}"
        )


def unconstrained_draws(guide: AutoGuide, draws: Draws) -> Tensor:
    """Return unconstrained draws in the guide's order and dtype, ``(num_draws, latent_dim)``.

    :raises ValueError: for draws of other sites.
    """
    parts = []
    for name, site in guide.prototype_trace.iter_stochastic_nodes():
        if name not in draws:
            raise ValueError(
                f"the guide samples '{name}', but the draws contain only {sorted(draws)}. Cure: "
                "draws of the guide's own model"
            )
        free = biject_to(site["fn"].support).inv(draws[name])
        parts.append(free.reshape(len(free), -1))
    return torch.cat(parts, -1).to(next(guide.parameters()))
