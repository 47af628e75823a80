# SPDX-License-Identifier: Apache-2.0
"""The methods of the benchmark: functions ``(posterior, seed, budget)`` that return one result.

One setting for all posteriors. Every baseline starts at the same point (:func:`good_start`), with
32 particles, and Adam with clipped gradients and a rate of 1e-2 that decays to zero over 5,000
steps, and otherwise Pyro's defaults.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

import pyro
import torch
from pyro.infer import MCMC, NUTS, SVI
from pyro.infer.autoguide import (
    AutoGuide,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalizingFlow,
    init_to_value,
)
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.optim import ClippedAdam
from torch import Tensor

from benchmarks.common import cosine_adam, fit
from benchmarks.posteriordb.flows import framed_iaf, framed_splines
from benchmarks.posteriordb.start import good_start
from pyro_implicit import fitting
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics import draw
from pyro_implicit.guides import AutoSemiImplicit
from pyro_implicit.infer import LIVI_ELBO, ImplicitELBO

__all__ = ["METHODS", "Budget", "Method", "PosteriorLike"]

Draws = dict[str, Tensor]
Info = dict[str, Any]


class PosteriorLike(Protocol):
    """The parts of a posterior that methods need."""

    model: Callable[..., object]
    args: tuple


@dataclass(frozen=True)
class Budget:
    """The budget of each method; smaller only in tests."""

    steps: int = 5000
    particles: int = 32
    rate: float = 1e-2
    draws: int = 10_000
    nuts_warmup: int = 1000
    nuts_draws: int = 1000


Method = Callable[[PosteriorLike, int, Budget], tuple[Draws, Info]]


@dataclass(frozen=True)
class Start:
    """The initial value of a baseline: the vector, its sites, and the cost of finding it."""

    loc: Tensor
    values: Draws
    info: Info


def start(posterior: PosteriorLike) -> Start:
    clock = time.perf_counter()
    density = Target(posterior.model, *posterior.args)
    loc, is_mode = good_start(density)
    info = {"start_is_mode": is_mode, "start_seconds": time.perf_counter() - clock}
    return Start(loc, density.constrain(loc), info)


def _svi(
    make_guide: Callable[[Callable, Start], AutoGuide], num_particles: int | None = None
) -> Method:
    """A method that trains an explicit guide."""

    def method(posterior: PosteriorLike, seed: int, budget: Budget) -> tuple[Draws, Info]:
        model, args = posterior.model, posterior.args
        begin = start(posterior)
        guide = make_guide(model, begin)
        elbo = ImplicitELBO(num_particles or budget.particles)
        svi = SVI(model, guide, cosine_adam(budget.rate, budget.steps), elbo)
        clock = time.perf_counter()
        losses = fit(svi, budget.steps, *args)
        ms_per_step = 1000 * (time.perf_counter() - clock) / budget.steps
        if isinstance(guide, AutoLaplaceApproximation):
            guide = guide.laplace_approximation(*args)
        last = losses[-max(1, budget.steps // 20) :]
        info = begin.info | {"ms_per_step": ms_per_step, "elbo": -fmean(last)}
        return draw(guide, budget.draws, *args), info

    return method


def _gaussian(guide: Callable[..., AutoGuide]) -> Callable[[Callable, Start], AutoGuide]:
    return lambda model, begin: guide(model, init_loc_fn=init_to_value(values=begin.values))


def _flow(make_transform: Callable[[Tensor], Any]) -> Callable[[Callable, Start], AutoGuide]:
    def make_guide(model: Callable, begin: Start) -> AutoGuide:
        # Pyro's flows take no init_loc_fn, but need values for sites without a proper prior.
        model = InitMessenger(init_to_value(values=begin.values))(model)
        return AutoNormalizingFlow(model, make_transform(begin.loc))

    return make_guide


def nuts(posterior: PosteriorLike, seed: int, budget: Budget) -> tuple[Draws, Info]:
    begin = start(posterior)
    # To guess the nesting, which only enumeration uses, Pyro would draw from flat priors.
    kernel = NUTS(
        posterior.model, init_strategy=init_to_value(values=begin.values), max_plate_nesting=4
    )
    mcmc = MCMC(
        kernel,
        num_samples=budget.nuts_draws,
        warmup_steps=budget.nuts_warmup,
        disable_progbar=True,
    )
    mcmc.run(*posterior.args)
    diagnostics = mcmc.diagnostics()
    info = begin.info | {
        "divergences": len(diagnostics["divergences"]["chain 0"]),
        "acceptance_rate": float(diagnostics["acceptance rate"]["chain 0"]),
    }
    return mcmc.get_samples(), info


def implicit(posterior: PosteriorLike, seed: int, budget: Budget) -> tuple[Draws, Info]:
    """``fit`` with default settings: it finds its initial value and number of steps."""
    result = fitting.fit(posterior.model, "auto", *posterior.args, seed=seed, progress=False)
    info = {
        "steps": len(result.losses),
        "guide": type(result.guide).__name__,
        "bounds": result.bounds,
        "num_modes": result.num_modes,
        "stages": [stage.name for stage in result.stages],
        "correction": result.correction,
        "gradients": result.refined.num_gradients if result.refined else 0,
    }
    return result.sample(budget.draws), info


def loop(posterior: PosteriorLike, seed: int, budget: Budget) -> tuple[Draws, Info]:
    """The README's loop: plain SVI with another guide, and the settings of the README."""
    guide = AutoSemiImplicit(posterior.model)
    optim = ClippedAdam({"lr": 5e-3, "lrd": 0.998})
    svi = SVI(posterior.model, guide, optim, LIVI_ELBO(num_particles=8))
    for _ in range(min(2000, budget.steps)):
        svi.step(*posterior.args)
    return draw(guide, budget.draws, *posterior.args), {}


def best_gaussian(posterior: Any, seed: int, budget: Budget) -> tuple[Draws, Info]:
    """A yardstick rather than a method: the Gaussian with mean and covariance of the reference."""
    density = Target(posterior.model, *posterior.args)
    reference = density.unconstrain(posterior.reference())
    gaussian = torch.distributions.MultivariateNormal(reference.mean(0), reference.mT.cov())
    return density.constrain(gaussian.sample((budget.draws,))), {}


METHODS: dict[str, Method] = {
    "best Gaussian": best_gaussian,
    "AutoNormal": _svi(_gaussian(AutoNormal)),
    "AutoMultivariateNormal": _svi(_gaussian(AutoMultivariateNormal)),
    # Its guide is a point: more particles would repeat it.
    "AutoLaplaceApproximation": _svi(_gaussian(AutoLaplaceApproximation), num_particles=1),
    "AutoIAFNormal": _svi(_flow(framed_iaf)),
    "AutoNormalizingFlow": _svi(_flow(framed_splines)),
    "NUTS": nuts,
    "implicit": implicit,
    "loop": loop,
}


def seeded(method: str, posterior: PosteriorLike, seed: int, budget: Budget) -> tuple[Draws, Info]:
    """Run once with an empty parameter store."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    return METHODS[method](posterior, seed, budget)
