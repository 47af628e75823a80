# SPDX-License-Identifier: Apache-2.0
"""Draws of the local level with the walk marginalised: two scales by a random walk, then the rest.

Given the scales all is normal with a tridiagonal precision, so each evaluation of the marginal
likelihood and each draw of the levels costs one banded Cholesky decomposition.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from scipy.linalg import cholesky_banded, solve_banded

__all__ = ["local_level"]

NUM_CHAINS, NUM_POINTS, WARMUP = 4, 6, 300
START_SD, LEVEL_PRIOR, NOISE_PRIOR = 5.0, 1.0, 2.0  # as in the model
STEP = (0.1, 0.03)  # of the logarithms of the scales of the walk and of the noise


def _posterior(y: Any, level: float, noise: float) -> tuple[Any, Any, float]:
    """Return factor and mean of the levels' conditional density, and the log marginal."""
    first = START_SD**2 + level**2
    precision = np.zeros((2, len(y)))  # upper banded form: the diagonal is the last row
    precision[1] = 2 / level**2 + 1 / noise**2
    precision[1, 0] += 1 / first - 1 / level**2
    precision[1, -1] -= 1 / level**2
    precision[0, 1:] = -1 / level**2
    factor = cholesky_banded(precision)
    half = solve_banded((1, 0), _lower(factor), y / noise**2)
    mean = solve_banded((0, 1), factor, half)
    log_prob = 0.5 * half @ half - 0.5 * y @ y / noise**2 - np.log(factor[1]).sum()
    log_prob -= 0.5 * np.log(first) + (len(y) - 1) * np.log(level) + len(y) * np.log(noise)
    return factor, mean, log_prob


def _lower(factor: Any) -> Any:
    """The transpose of an upper bidiagonal matrix, in banded form."""
    return np.stack([factor[1], np.append(factor[0, 1:], 0.0)])


def _log_target(y: Any, log_scales: Any) -> float:
    level, noise = np.exp(log_scales)
    prior = 0.5 * (level / LEVEL_PRIOR) ** 2 + 0.5 * (noise / NOISE_PRIOR) ** 2
    return _posterior(y, level, noise)[2] - prior + log_scales.sum()


def local_level(folder: Path, num_draws: int, thin: int) -> None:
    """Write ``draws.npz`` and ``run.json`` for the data in ``folder``."""
    wall, cpu = time.perf_counter(), time.process_time()
    with np.load(folder / "data.npz") as file:
        y = file["argument_0"]
    chains = [_chain(np.random.default_rng(k), y, num_draws, thin) for k in range(NUM_CHAINS)]
    draws = {name: np.stack([chain[name] for chain in chains]) for name in chains[0]}
    np.savez(folder / "draws.npz", **draws)
    record = {
        "log_probs": [
            _log_density(y, {name: value[0, i] for name, value in draws.items()})
            for i in range(NUM_POINTS)
        ],
        "divergences": 0.0,
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
    }
    (folder / "run.json").write_text(json.dumps(record))


def _chain(rng: np.random.Generator, y: Any, num_draws: int, thin: int) -> dict[str, Any]:
    scales = np.log([0.2, 1.0]) + 0.1 * rng.normal(size=2)
    log_prob, kept = _log_target(y, scales), []
    for i in range(WARMUP + num_draws * thin):
        other = scales + STEP * rng.normal(size=2)
        proposed = _log_target(y, other)
        if np.log(rng.random()) < proposed - log_prob:
            scales, log_prob = other, proposed
        if i >= WARMUP and i % thin == 0:
            kept.append(_complete(rng, y, *np.exp(scales)))
    names = ("sd_level", "sd_noise", "start", "innovations")
    return dict(zip(names, map(np.stack, zip(*kept, strict=True)), strict=True))


def _complete(rng: np.random.Generator, y: Any, level: float, noise: float) -> tuple:
    """Draw the walk and its start given the scales."""
    factor, mean, _ = _posterior(y, level, noise)
    walk = mean + solve_banded((0, 1), factor, rng.normal(size=len(y)))
    share = START_SD**2 / (START_SD**2 + level**2)
    start = share * walk[0] + level * np.sqrt(share) * rng.normal()
    return level, noise, start, np.diff(walk, prepend=start) / level


def _log_density(y: Any, point: dict[str, Any]) -> float:
    """The model's log-density up to a constant."""
    walk = point["start"] + point["sd_level"] * point["innovations"].cumsum()
    total = stats.norm.logpdf(y, walk, point["sd_noise"]).sum()
    total += stats.norm.logpdf(point["innovations"]).sum()
    total += stats.norm.logpdf(point["start"], 0.0, START_SD)
    total += stats.norm.logpdf(point["sd_level"], 0.0, LEVEL_PRIOR)
    return float(total + stats.norm.logpdf(point["sd_noise"], 0.0, NOISE_PRIOR))
