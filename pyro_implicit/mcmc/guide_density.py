# SPDX-License-Identifier: Apache-2.0
"""Which log-density a guide has at draws that are not its own, and which guide has none."""

from __future__ import annotations

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
from pyro_implicit.density.engine import Model, compute_log_prob, refuse_subsampling
from pyro_implicit.distributions import find_implicit
from pyro_implicit.guides import AutoImplicit, AutoMixture
from pyro_implicit.guides.exactness import why_inexact
from pyro_implicit.mcmc.density_at_draws import DensityAtDraws, InjectiveDensity, MixtureDensity

__all__ = ["density_at_draws", "unconstrained_draws"]

Draws = dict[str, Tensor]
CURE = "Cure: AutoImplicit(model, AutoregressiveGenerator), or one of Pyro's Gaussian autoguides"


class _NormalDensity(DensityAtDraws):
    """Of ``AutoNormal``, which keeps its sites apart."""

    def log_prob(self, rows: Tensor) -> Tensor:
        pairs = [self.guide._get_loc_and_scale(name) for name in _sites(self.guide)]
        loc, scale = (
            torch.cat([part.reshape(-1) for part in side]) for side in zip(*pairs, strict=True)
        )
        return Independent(Normal(loc, scale), 1).log_prob(self.latent[rows])


class _TracedDensity(DensityAtDraws):
    """Of a guide written by hand, run at the draws by :class:`BatchedRuns`."""

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
            return self._runs.map(self._model, values, _total)


def density_at_draws(
    guide: Any, draws: Draws, args: tuple = (), kwargs: dict[str, Any] | None = None
) -> DensityAtDraws:
    """What knows a guide's log-density at draws.

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

    :param guide: that was called once.
    :param draws: constrained values by site, ``(num_draws, *site_shape)``.
    :param args: of the guide, as ``kwargs``.
    :raises ValueError: for a guide without a density there, naming the cure.
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
        raise ValueError(f"teach wants a guide with a density, and {who} has none: {reason}")


def _refuse_site(name: str, site: dict[str, Any], draws: Draws) -> None:
    if name not in draws:
        raise ValueError(
            f"the guide samples '{name}', of which there are no draws, so that its density at the "
            f"others is unknown. {CURE}"
        )
    if isinstance(site["fn"], Delta):
        raise ValueError(f"site '{name}' of the guide is a point (Delta), without density. {CURE}")
    if find_implicit(site["fn"]) is not None:
        raise ValueError(
            f"site '{name}' of the guide has no density at draws of the posterior: its "
            f"distribution is {type(site['fn']).__name__}. {CURE}"
        )


def _sites(guide: AutoGuide) -> list[str]:
    return [name for name, _ in guide.prototype_trace.iter_stochastic_nodes()]


def unconstrained_draws(guide: AutoGuide, draws: Draws) -> Tensor:
    """Unconstrained, in the guide's order, dtype and device, ``(num_draws, latent_dim)``.

    :raises ValueError: for draws of other sites.
    """
    parts = []
    for name, site in guide.prototype_trace.iter_stochastic_nodes():
        if name not in draws:
            raise ValueError(
                f"the guide samples '{name}', of which there are no draws, but only of "
                f"{sorted(draws)}. Cure: draws of the guide's own model"
            )
        free = biject_to(site["fn"].support).inv(draws[name])
        parts.append(free.reshape(len(free), -1))
    return torch.cat(parts, -1).to(next(guide.parameters()))


def _total(trace: Trace) -> Tensor:
    compute_log_prob(trace)
    return torch.as_tensor(trace.log_prob_sum())
