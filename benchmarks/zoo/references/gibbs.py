# SPDX-License-Identifier: Apache-2.0
"""Gibbs sampling of the horseshoes, whose geometry NUTS does not manage.

With :math:`\\beta = z \\lambda \\tau` all conditionals are known: a normal one of the coefficients,
inverse-gamma ones of the squared scales, each with an auxiliary variable (Makalic and Schmidt 2016,
*A Simple Sampler for the Horseshoe Estimator*), and a generalised inverse Gaussian one of the
variance of the noise, whose prior is half-normal.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

__all__ = ["horseshoe"]

NUM_CHAINS, NUM_POINTS = 64, 6
NOISE_PRIOR = 2.0


def _inverse_gamma(rng: np.random.Generator, shape: float, scale: Any) -> Any:
    return scale / rng.gamma(shape, size=np.shape(scale))


def _noise_variance(rng: np.random.Generator, rows: int, squares: Any) -> Any:
    """Of the density ``w ** -((rows + 1) / 2) * exp(-squares / (2 w) - w / (2 prior ** 2))``."""
    first = 1 / NOISE_PRIOR**2
    scale = np.sqrt(squares / first)
    return scale * stats.geninvgauss.rvs((1 - rows) / 2, np.sqrt(squares * first), random_state=rng)


def _log_prob(x: Any, y: Any, draw: dict[str, Any]) -> float:
    """The joint density, by the model's own distributions."""
    cauchy, normal = stats.halfcauchy.logpdf, stats.norm.logpdf
    mean = x @ (draw["z"] * draw["lam"] * draw["tau"])
    total = cauchy(draw["tau"]) + cauchy(draw["lam"]).sum() + normal(draw["z"]).sum()
    total += stats.halfnorm.logpdf(draw["sigma"], scale=NOISE_PRIOR)
    return float(total + normal(y, mean, draw["sigma"]).sum())


def horseshoe(folder: Path, num_draws: int, thin: int, seed: int = 0) -> None:
    """Writes draws and what they cost, as ``sample`` does for NUTS.

    :param folder: has the data and gets the draws.
    :param num_draws: that each of 64 chains keeps, after as much again to warm up.
    :param thin: sweeps between two of them.
    """
    with np.load(folder / "data.npz") as file:
        x, y = file["argument_0"], file["argument_1"]
    began, wall = time.process_time(), time.perf_counter()
    rng = np.random.default_rng(seed)
    rows, columns = x.shape
    gram, product = x.T @ x, x.T @ y
    local = np.exp(rng.normal(size=(NUM_CHAINS, columns)))  # squared, as all scales here
    common, noise = np.exp(rng.normal(size=NUM_CHAINS) - 2), np.exp(rng.normal(size=NUM_CHAINS))
    kept: dict[str, list[Any]] = {"tau": [], "sigma": [], "lam": [], "z": []}
    for sweep in range(2 * num_draws * thin):
        prior = local * common[:, None]
        precision = gram / noise[:, None, None]
        precision[:, np.arange(columns), np.arange(columns)] += 1 / prior
        factor = np.linalg.cholesky(precision)
        half = np.linalg.solve(factor, (product / noise[:, None])[..., None])
        half += rng.normal(size=half.shape)
        beta = np.linalg.solve(np.swapaxes(factor, -1, -2), half)[..., 0]
        residual = y - beta @ x.T
        noise = _noise_variance(rng, rows, (residual**2).sum(-1))
        extra = _inverse_gamma(rng, 1.0, 1 + 1 / local)
        local = _inverse_gamma(rng, 1.0, 1 / extra + beta**2 / (2 * common[:, None]))
        extra = _inverse_gamma(rng, 1.0, 1 + 1 / common)
        scale = 1 / extra + (beta**2 / local).sum(-1) / 2
        common = _inverse_gamma(rng, (columns + 1) / 2, scale)
        if sweep >= num_draws * thin and sweep % thin == 0:
            kept["tau"].append(np.sqrt(common))
            kept["sigma"].append(np.sqrt(noise))
            kept["lam"].append(np.sqrt(local))
            kept["z"].append(beta / np.sqrt(local * common[:, None]))
    draws = {name: np.stack(values, 1) for name, values in kept.items()}
    points = [{name: value[0, i] for name, value in draws.items()} for i in range(NUM_POINTS)]
    np.savez(folder / "draws.npz", **draws)
    record = {
        "sampler": "gibbs",
        "log_probs": [_log_prob(x, y, point) for point in points],
        "divergences": 0.0,
        "sweeps": 2 * num_draws * thin * NUM_CHAINS,
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - began,
    }
    assert all(math.isfinite(value) for value in record["log_probs"])
    (folder / "run.json").write_text(json.dumps(record))
