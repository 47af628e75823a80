# SPDX-License-Identifier: Apache-2.0
"""The Bayesian network of the UCI benchmark, and draws from its posterior by each method."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal, init_to_sample
from pyro.nn import PyroModule, PyroParam
from torch import Tensor, nn
from torch.distributions import constraints

from benchmarks.common import cosine_adam, fit
from benchmarks.uci_data import Data
from pyro_implicit import AVB_ELBO, KIVI_ELBO, LIVI_ELBO, AutoImplicit, AutoSemiImplicit
from pyro_implicit.diagnostics import draw
from pyro_implicit.generators import MLP
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.nn import to_bayesian_

__all__ = ["METHODS", "SETTINGS", "log_likelihood", "make_model", "scores"]

Draws = dict[str, Tensor]
Settings = dict[str, Any]

# The settings of all methods; `--set-option livi.lr=0.01` changes one.
SETTINGS: dict[str, Settings] = {
    "livi": {
        "steps": 3000,
        "lr": 5e-3,
        "particles": 8,
        "noise_dim": 50,
        "noise_scale": 0.02,
        "init_scale": 0.1,
    },
    "kivi": {
        "steps": 3000,
        "lr": 5e-3,
        "particles": 10,
        "entropy_particles": 100,
        "init_scale": 0.1,
        "generators": None,  # (noise, hidden units) per layer; None: those of the paper
    },
    "avb": {
        "steps": 3000,
        "lr": 5e-3,
        "particles": 10,
        "entropy_particles": 100,
        "init_scale": 0.1,
        "generators": None,  # as for kivi
        "contrast": "adaptive",
        "discriminator_steps": 1,
    },
    "mean_field": {"steps": 3000, "lr": 1e-2, "particles": 8, "init_scale": 0.01},
    "map": {"steps": 3000, "lr": 1e-2},
    "ensemble": {"steps": 3000, "lr": 1e-2, "members": 5},
    "nuts": {"draws": 500, "warmup": 500, "max_tree_depth": 10},
}


def make_model(
    data: Data,
    hidden: int,
    batch_size: int | None,
    precision_prior: list[float],
    gain: float = 1.0,
) -> Callable:
    """One hidden layer of ReLU units and noise of unknown precision, with optional minibatches.

    :param gain: weights have the prior N(0, gain² / fan-in).
    """
    num_features = data.x_train.shape[1]
    net = nn.Sequential(nn.Linear(num_features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    prior = {"0.weight": gain * num_features**-0.5, "2.weight": gain * hidden**-0.5}
    net = to_bayesian_(net, prior).to(data.x_train)

    def model(x: Tensor, y: Tensor | None = None) -> None:
        # Not the Gamma(6, 6) of the KIVI paper: y is standardised here, and 6 pseudo-observations
        # of variance 1 keep the precision below about (6 + N / 2) / 6, a noise of 0.16 for the
        # 455 rows of boston and 0.13 for energy, whose true noise is below 0.05.
        precision = pyro.sample("precision", dist.Gamma(*x.new_tensor(precision_prior)))
        rows = pyro.plate("rows", len(x), subsample_size=None if y is None else batch_size)
        # Outside the plate: the weights belong to no row.
        mean = pyro.deterministic("mean", net(x[rows.indices]).squeeze(-1))
        with rows:
            y = None if y is None else y[rows.indices]
            pyro.sample("y", dist.Normal(mean, precision**-0.5), obs=y)

    return model


def start(settings: Settings) -> Callable[[dict[str, Any]], Tensor]:
    """Initial values of every method: a network of the prior, or weights scaled by the setting
    ``weight_scale``, and a moderate noise."""

    def init_loc_fn(site: dict[str, Any]) -> Tensor:
        value = init_to_sample(site)
        if site["name"] == "precision":
            return torch.full_like(value, 10.0)
        return settings.get("weight_scale", 1.0) * value

    return init_loc_fn


def _fit(
    model: Callable, guide: Callable, elbo: Trace_ELBO, settings: Settings, data: Data
) -> None:
    svi = SVI(model, guide, cosine_adam(settings["lr"], settings["steps"]), elbo)
    fit(svi, settings["steps"], data.x_train, data.y_train)


def livi(model: Callable, data: Data, settings: Settings, num_draws: int) -> Draws:
    guide = AutoSemiImplicit(
        model,
        noise_dim=settings["noise_dim"],
        init_loc_fn=start(settings),
        frame=None,
        init_scale=settings["init_scale"],
        noise_scale=settings["noise_scale"],
    )
    _fit(model, guide, LIVI_ELBO(settings["particles"]), settings, data)
    return draw(guide, num_draws, data.x_train, data.y_train)


class GammaPosterior(PyroModule):
    """Guide of the noise precision, initialised at a noise variance of 0.1."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        half = data.y_train.new_tensor(len(data.y_train) / 2)
        self.concentration = PyroParam(half, constraints.positive)
        self.rate = PyroParam(0.1 * half, constraints.positive)

    def forward(self, *args: Any) -> dict[str, Tensor]:
        posterior = dist.Gamma(self.concentration, self.rate)
        return {"precision": pyro.sample("precision", posterior)}


def _layerwise(model: Callable, data: Data, settings: Settings) -> AutoGuideList:
    """One implicit guide per layer and an explicit guide of the precision."""
    guide = AutoGuideList(model)
    for layer, (noise_dim, hidden) in zip(("0", "2"), settings["generators"], strict=True):
        part = poutine.block(model, expose=[f"{layer}.weight", f"{layer}.bias"])
        generator = partial(MLP, noise_dim, hidden=(hidden,), activation="relu")
        scale = settings["init_scale"]
        narrow = {"init_loc_fn": start(settings), "init_scale": scale}
        guide.append(AutoImplicit(part, generator, frame=None, **narrow))
    guide.append(GammaPosterior(data))
    return guide


def kivi(model: Callable, data: Data, settings: Settings, num_draws: int) -> Draws:
    guide = _layerwise(model, data, settings)
    elbo = KIVI_ELBO(settings["particles"], num_entropy_particles=settings["entropy_particles"])
    _fit(model, guide, elbo, settings, data)
    return draw(guide, num_draws, data.x_train, data.y_train)


def avb(model: Callable, data: Data, settings: Settings, num_draws: int) -> Draws:
    guide = _layerwise(model, data, settings)
    elbo = AVB_ELBO(
        settings["particles"],
        num_entropy_particles=settings["entropy_particles"],
        contrast=settings["contrast"],
        discriminator_steps=settings["discriminator_steps"],
    )
    _fit(model, guide, elbo, settings, data)
    return draw(guide, num_draws, data.x_train, data.y_train)


def mean_field(model: Callable, data: Data, settings: Settings, num_draws: int) -> Draws:
    guide = AutoNormal(model, init_loc_fn=start(settings), init_scale=settings["init_scale"])
    _fit(model, guide, ImplicitELBO(settings["particles"]), settings, data)
    return draw(guide, num_draws, data.x_train, data.y_train)


def map_estimate(model: Callable, data: Data, settings: Settings, num_draws: int) -> Draws:
    guide = AutoDelta(model, init_loc_fn=start(settings))
    _fit(model, guide, Trace_ELBO(), settings, data)
    return draw(guide, 1, data.x_train, data.y_train)


def ensemble(model: Callable, data: Data, settings: Settings, num_draws: int) -> Draws:
    members = []
    for _ in range(settings["members"]):
        pyro.clear_param_store()
        members.append(map_estimate(model, data, settings, num_draws))
    return {site: torch.cat([member[site] for member in members]) for site in members[0]}


def nuts(model: Callable, data: Data, settings: Settings, num_draws: int) -> Draws:
    kernel = NUTS(model, max_tree_depth=settings["max_tree_depth"], init_strategy=start(settings))
    mcmc = MCMC(kernel, settings["draws"], warmup_steps=settings["warmup"], disable_progbar=True)
    mcmc.run(data.x_train, data.y_train)
    return mcmc.get_samples()


METHODS: dict[str, Callable[[Callable, Data, Settings, int], Draws]] = {
    "livi": livi,
    "kivi": kivi,
    "avb": avb,
    "mean_field": mean_field,
    "map": map_estimate,
    "ensemble": ensemble,
    "nuts": nuts,
}


def scores(model: Callable, draws: Draws, data: Data) -> dict[str, float]:
    """Return the accuracy of the mixture of all draws on the test rows, in units of the data."""
    prediction = Predictive(model, draws, return_sites=["mean"])(data.x_test)
    mean = data.y_mean + data.y_sd * prediction["mean"].reshape(-1, len(data.x_test))
    sd = data.y_sd * draws["precision"].reshape(-1, 1) ** -0.5
    y = data.y_mean + data.y_sd * data.y_test
    return {
        "rmse": (mean.mean(0) - y).square().mean().sqrt().item(),
        "log_likelihood": log_likelihood(mean, sd, y).item(),
        "noise_sd": sd.mean().item(),
    }


def log_likelihood(mean: Tensor, sd: Tensor, y: Tensor) -> Tensor:
    """Mean over rows of the log density of ``y`` ``(n,)`` under the mixture of normal
    distributions of ``mean`` ``(num_draws, n)`` and ``sd`` ``(num_draws, 1)``."""
    log_density = dist.Normal(mean, sd).log_prob(y)
    return (log_density.logsumexp(0) - math.log(len(mean))).mean()
