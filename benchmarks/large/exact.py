# SPDX-License-Identifier: Apache-2.0
"""Compare ``fit`` with exact posteriors: a local level model, a separable AR(1) field, groups.

Given the hyperparameters, the first two are Gaussian: Kalman's smoother, and the eigenvectors of
the correlation along a side. The groups are those of ``families``. The hyperparameters are
integrated over a grid.

    python -m benchmarks.large.exact --out benchmarks/results/exact.jsonl
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from benchmarks.large.families import FAMILIES
from pyro_implicit.diagnostics import diagnose
from pyro_implicit.fitting import fit

GRID = 17  # points for each hyperparameter, from -WIDTH to WIDTH sds of the draws
WIDTH = 4.5


def level_data(size: int) -> Tensor:
    rng = np.random.default_rng(3)
    y = np.cumsum(0.2 * rng.normal(size=size)) + 0.7 * rng.normal(size=size)
    return torch.tensor(y, dtype=torch.float32)


def level(y: Tensor) -> None:
    """Standardised innovations in one site, as in the how-to page on time series."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    start = pyro.sample("start", dist.Normal(0.0, 5.0))
    with pyro.plate("time", len(y)):
        steps = pyro.sample("steps", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(start + scale * steps.cumsum(-1), noise), obs=y)


def level_states(draws: dict[str, Tensor]) -> Tensor:
    moved = draws["scale"].unsqueeze(-1) * draws["steps"].cumsum(-1)
    return draws["start"].unsqueeze(-1) + moved


def level_exact(y: Tensor, values: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return log weights ``(grid,)``, and means and variances of the levels ``(grid, n)``."""
    scale, noise = values["scale"], values["noise"]
    mean, variance = torch.zeros_like(scale), torch.full_like(scale, 25.0)
    log_weight = -0.5 * (scale.square() + noise.square())
    means, variances = [], []
    for value in y:
        variance = variance + scale.square()
        total, error = variance + noise.square(), value - mean
        log_weight = log_weight - 0.5 * (total.log() + error.square() / total)
        gain = variance / total
        mean, variance = mean + gain * error, variance * (1 - gain)
        means.append(mean)
        variances.append(variance)
    for index in range(len(y) - 2, -1, -1):
        ahead = variances[index] + scale.square()
        gain = variances[index] / ahead
        means[index] = means[index] + gain * (means[index + 1] - means[index])
        change = gain.square() * (variances[index + 1] - ahead)
        variances[index] = variances[index] + change
    return log_weight, torch.stack(means, -1), torch.stack(variances, -1)


def correlation(size: int, phi: Tensor) -> Tensor:
    lag = torch.arange(size).to(phi)
    return phi[..., None, None] ** (lag - lag.unsqueeze(-1)).abs()


def factor(size: int, phi: Tensor) -> Tensor:
    """Return the lower triangular factor of :func:`correlation`."""
    lag = torch.arange(size).to(phi)
    lag = lag.unsqueeze(-1) - lag
    lower = torch.where(lag >= 0, phi ** lag.clamp(min=0), torch.zeros_like(lag))
    rest = (1 - phi.square()).sqrt().expand(size - 1)
    return lower * torch.cat([torch.ones_like(rest[:1]), rest])


def field_data(side: int) -> Tensor:
    rng = np.random.default_rng(5)
    root = factor(side, torch.tensor(0.9)).numpy()
    y = root @ rng.normal(size=(side, side)) @ root.T + 0.5 * rng.normal(size=(side, side))
    return torch.tensor(y, dtype=torch.float32)


def field(y: Tensor) -> None:
    side = len(y)
    phi = pyro.sample("phi", dist.Beta(8.0, 2.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    z = pyro.sample("z", dist.Normal(torch.zeros(side, side), 1.0).to_event(2))
    root = factor(side, phi)
    pyro.sample("y", dist.Normal(scale * root @ z @ root.mT, noise).to_event(2), obs=y)


def field_states(draws: dict[str, Tensor]) -> Tensor:
    side = draws["z"].shape[-1]
    root = torch.stack([factor(side, one) for one in draws["phi"]])
    found = draws["scale"][:, None, None] * root @ draws["z"] @ root.mT
    return found.flatten(1)


def whiten(x: Tensor, phi: Tensor) -> Tensor:
    """Return the standardised innovations of autoregressions along the last dimension."""
    rest = (x[..., 1:] - phi * x[..., :-1]) / (1 - phi.square()).sqrt()
    return torch.cat([x[..., :1], rest], -1)


def lattice(y: Tensor) -> None:
    """The posterior of :func:`field` as a Markov random field: each site and its neighbours."""
    side = len(y)
    phi = pyro.sample("phi", dist.Beta(8.0, 2.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    flat = dist.ImproperUniform(dist.constraints.independent(dist.constraints.real, 2), (), y.shape)
    x = pyro.sample("x", flat)
    z = whiten(whiten(x, phi).mT, phi) / scale
    log_det = side**2 * scale.log() + side * (side - 1) * (1 - phi.square()).log()
    pyro.factor("prior", -0.5 * z.square().sum((-1, -2)) - log_det)
    pyro.sample("y", dist.Normal(x, noise).to_event(2), obs=y)


def field_exact(y: Tensor, values: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return log weights ``(grid,)``, and means and variances of the field ``(grid, n)``."""
    phi, scale, noise = values["phi"], values["scale"], values["noise"]
    sizes, axes = torch.linalg.eigh(correlation(len(y), phi))
    prior = scale.square()[:, None, None] * sizes.unsqueeze(-1) * sizes.unsqueeze(-2)
    total = prior + noise.square()[:, None, None]
    turned = axes.mT @ y @ axes
    log_weight = -0.5 * (total.log() + turned.square() / total).sum((-1, -2))
    log_weight = log_weight + dist.Beta(8.0, 2.0).log_prob(phi)
    log_weight = log_weight - 0.5 * (scale.square() + noise.square())
    mean = axes @ (prior / total * turned) @ axes.mT
    squares = axes.square()
    variance = squares @ (prior - prior.square() / total) @ squares.mT
    return log_weight, mean.flatten(1), variance.flatten(1)


KINDS = {
    "level": (level, level_data, level_states, level_exact, ("scale", "noise")),
    "field": (field, field_data, field_states, field_exact, ("phi", "scale", "noise")),
    "lattice": (
        lattice,
        field_data,
        lambda draws: draws["x"].flatten(1),
        field_exact,
        ("phi", "scale", "noise"),
    ),
    **FAMILIES,
}


def compare(name: str, seed: int) -> dict:
    """Run ``fit`` once and compare means and sds of states and hyperparameters."""
    kind, size = name.split(":")
    model, data, states, exact, parameters = KINDS[kind]
    y = data(int(size))
    pyro.set_rng_seed(seed)
    began = time.process_time()
    found = fit(model, "auto", y, progress=False)
    seconds = time.process_time() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    drawn, refined = found.posterior, (found.marginal or found).refined
    drawn = found.sample(drawn.num_draws)  # each stored draw once
    draws = {key: value.double() for key, value in drawn.items()}
    axes = []
    for key in parameters:
        centre, spread = draws[key].mean(), draws[key].std()
        grid = torch.linspace(-WIDTH, WIDTH, GRID).double() * spread + centre
        axes.append(grid.clamp(min=1e-3, max=0.999 if key == "phi" else None))
    grids = torch.meshgrid(*axes, indexing="ij")
    values = {key: one.flatten() for key, one in zip(parameters, grids, strict=True)}
    parts = [
        exact(y.double(), dict(zip(values, chunk, strict=True)))
        for chunk in zip(*(one.split(256) for one in values.values()), strict=True)
    ]
    log_weight, means, variances = (torch.cat(one) for one in zip(*parts, strict=True))
    weight = log_weight.softmax(0)
    expected = weight @ means
    sd = (weight @ (variances + means.square()) - expected.square()).sqrt()
    drawn = states(draws)
    verdict = diagnose(model, found.posterior, y).verdict if kind in FAMILIES else None
    report = {
        "model": name,
        "seed": seed,
        "cpu_seconds": round(seconds, 1),
        "peak_mb": round(memory),
        "stages": [stage.name for stage in found.stages],
        "stopped": refined and refined.stopped,
        "r_hat": refined and refined.drift and round(refined.drift.r_hat, 3),
        "gradients": refined and refined.num_gradients,
        "draws": len(drawn),
        "verdict": verdict,
        "state_mean_error_rms": ((drawn.mean(0) - expected) / sd).square().mean().sqrt().item(),
        "state_sd_ratio": (drawn.std(0) / sd).mean().item(),
    }
    for key in parameters:
        mean = weight @ values[key]
        spread = (weight @ (values[key] - mean).square()).sqrt()
        report[f"{key}_mean_error"] = ((draws[key].mean() - mean) / spread).item()
        report[f"{key}_sd_ratio"] = (draws[key].std() / spread).item()
    return {key: round(one, 3) if isinstance(one, float) else one for key, one in report.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["level:2000", "field:30"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models:
        for seed in options.seeds:
            report = compare(name, seed)
            with options.out.open("a") as file:
                file.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
