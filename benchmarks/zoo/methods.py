# SPDX-License-Identifier: Apache-2.0
"""The methods: ``fit`` with default settings, and methods of Pyro with their defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoMultivariateNormal
from pyro.optim import ClippedAdam
from torch import Tensor

from benchmarks.common import cosine_adam, fit
from benchmarks.zoo.registry import ZooModel
from pyro_implicit import LIVI_ELBO, AutoSemiImplicit, fitting
from pyro_implicit.diagnostics import Diagnosis, diagnose, draw

__all__ = ["METHODS", "NUM_DRAWS", "Fitted"]

NUM_DRAWS = 10_000
SVI_STEPS, LOOP_STEPS = 5000, 2000
MAX_DENSE_DIM = 100

Draws = dict[str, Tensor]


class Fitted:
    """The result of a method: how to draw, how to diagnose if that is possible, and notes."""

    def __init__(
        self,
        sample: Callable[[], Draws],
        diagnose: Callable[[], Diagnosis] | None = None,
        **notes: Any,
    ) -> None:
        self.sample, self.diagnose, self.notes = sample, diagnose, notes


def ours(zoo: ZooModel, model: Any, args: tuple, seed: int) -> Fitted:
    result = fitting.fit(model, "auto", *args, seed=seed, progress=False)
    assert result.posterior is not None  # drawn here, so that its seconds are those of the fit
    return Fitted(
        lambda: result.sample(NUM_DRAWS, *args),
        result.diagnose,
        steps=len(result.losses),
        bounds=result.bounds,
        num_modes=result.num_modes,
        chosen=result.chosen,
        report=str(result),
    )


def gaussian(zoo: ZooModel, model: Any, args: tuple, seed: int) -> Fitted:
    """A full-rank Gaussian, or low-rank above 100 latents, by 5,000 steps of Pyro's SVI."""
    _, start, _ = zoo.potential(args)
    is_dense = sum(value.numel() for value in start.values()) <= MAX_DENSE_DIM
    make = AutoMultivariateNormal if is_dense else AutoLowRankMultivariateNormal
    guide = make(pyro.poutine.block(model, expose=list(start)))
    if zoo.max_plate_nesting is None:
        loss: Any = Trace_ELBO()
    else:
        loss = TraceEnum_ELBO(max_plate_nesting=zoo.max_plate_nesting)
    fit(SVI(model, guide, cosine_adam(1e-2, SVI_STEPS), loss), SVI_STEPS, *args)
    return Fitted(lambda: draw(guide, NUM_DRAWS, *args), lambda: diagnose(model, guide, *args))


def nuts(zoo: ZooModel, model: Any, args: tuple, seed: int) -> Fitted:
    """One chain of 1,000 draws after 1,000 steps of warm-up, each draw repeated ten times."""
    kernel = NUTS(model, max_plate_nesting=zoo.max_plate_nesting)
    mcmc = MCMC(kernel, num_samples=1000, warmup_steps=1000, disable_progbar=True)
    mcmc.run(*args)
    draws = mcmc.get_samples()
    rows = torch.randperm(NUM_DRAWS) % 1000
    return Fitted(lambda: {name: value[rows] for name, value in draws.items()})


def loop(zoo: ZooModel, model: Any, args: tuple, seed: int) -> Fitted:
    """The README's loop: plain SVI with another guide, and the settings of the README."""
    guide = AutoSemiImplicit(model)
    optim = ClippedAdam({"lr": 5e-3, "lrd": 0.998})
    svi = SVI(model, guide, optim, LIVI_ELBO(num_particles=8))
    for _ in range(LOOP_STEPS):
        svi.step(*args)
    return Fitted(lambda: draw(guide, NUM_DRAWS, *args), lambda: diagnose(model, guide, *args))


METHODS: dict[str, Callable[[ZooModel, Any, tuple, int], Fitted]] = {
    "fit": ours,
    "gaussian": gaussian,
    "nuts": nuts,
    "loop": loop,
}
