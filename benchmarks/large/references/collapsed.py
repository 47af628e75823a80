# SPDX-License-Identifier: Apache-2.0
"""Samplers of two models that use their normal conditional densities.

The local level has its walk marginalised: two scales by a random walk, then the rest. Given the
scales all is normal with a tridiagonal precision, so each evaluation of the marginal likelihood and
each draw of the levels costs one banded Cholesky decomposition.

The Cauchy coefficients are normal with inverse-gamma variances (Gibbs sampling). The coefficients
are marginalised in one update of the scales, and the variances in another.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from scipy.linalg import cholesky, cholesky_banded, solve_banded, solve_triangular

__all__ = ["cauchy_sparse", "draw_walk", "local_level", "run_chains", "walk_posterior"]

NUM_CHAINS, NUM_POINTS, WARMUP = 4, 6, 300
START_SD, LEVEL_PRIOR, NOISE_PRIOR = 5.0, 1.0, 2.0  # as in the model
STEP = (0.1, 0.03)  # of the logarithms of the scales of the walk and of the noise


def walk_posterior(y: Any, variances: Any, noise: float) -> tuple[Any, Any, float]:
    """Return factor and mean of a walk's conditional density, and the log marginal of ``y``.

    :param variances: of the first level and of the increments, as long as ``y``.
    """
    inverse = 1 / variances
    precision = np.zeros((2, len(y)))  # upper banded form: the diagonal is the last row
    precision[1] = inverse + np.append(inverse[1:], 0.0) + 1 / noise**2
    precision[0, 1:] = -inverse[1:]
    factor = cholesky_banded(precision)
    half = solve_banded((1, 0), _lower(factor), y / noise**2)
    mean = solve_banded((0, 1), factor, half)
    log_prob = 0.5 * half @ half - 0.5 * y @ y / noise**2 - np.log(factor[1]).sum()
    log_prob -= 0.5 * np.log(variances).sum() + len(y) * np.log(noise)
    return factor, mean, log_prob


def draw_walk(rng: np.random.Generator, factor: Any, mean: Any) -> Any:
    """Draw a walk from its conditional density."""
    return mean + solve_banded((0, 1), factor, rng.normal(size=len(mean)))


def _posterior(y: Any, level: float, noise: float) -> tuple[Any, Any, float]:
    variances = np.full(len(y), level**2)
    variances[0] += START_SD**2
    return walk_posterior(y, variances, noise)


def _lower(factor: Any) -> Any:
    """The transpose of an upper bidiagonal matrix, in banded form."""
    return np.stack([factor[1], np.append(factor[0, 1:], 0.0)])


def _log_target(y: Any, log_scales: Any) -> float:
    level, noise = np.exp(log_scales)
    prior = 0.5 * (level / LEVEL_PRIOR) ** 2 + 0.5 * (noise / NOISE_PRIOR) ** 2
    return _posterior(y, level, noise)[2] - prior + log_scales.sum()


def local_level(folder: Path, num_draws: int, thin: int) -> None:
    """Write ``draws.npz`` and ``run.json`` for the data in ``folder``."""
    run_chains(folder, num_draws, thin, _chain, _log_density)


def cauchy_sparse(folder: Path, num_draws: int, thin: int) -> None:
    """Write ``draws.npz`` and ``run.json`` for the data in ``folder``."""
    run_chains(folder, num_draws, thin, _cauchy_chain, _cauchy_log_density)


def run_chains(
    folder: Path, num_draws: int, thin: int, chain: Callable, log_density: Callable
) -> None:
    """Write ``draws.npz`` and ``run.json`` of four chains for the data in ``folder``.

    :param chain: returns draws by site, from a generator, the data, ``num_draws`` and ``thin``.
    :param log_density: the model's log-density up to a constant, of the data and a draw.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    with np.load(folder / "data.npz") as file:
        data = [file[f"argument_{i}"] for i in range(len(file.files))]
    chains = [chain(np.random.default_rng(k), *data, num_draws, thin) for k in range(NUM_CHAINS)]
    draws = {name: np.stack([one[name] for one in chains]) for name in chains[0]}
    np.savez(folder / "draws.npz", **draws)
    points = [{name: value[0, i] for name, value in draws.items()} for i in range(NUM_POINTS)]
    record = {
        "log_probs": [log_density(*data, point) for point in points],
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
    walk = draw_walk(rng, factor, mean)
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


# As in the model of the Cauchy coefficients: sds of the priors of intercept, tau and sigma.
CAUCHY_PRIOR = (5.0, 0.5, 2.0)
CAUCHY_STEP = (0.25, 0.08)  # of the logarithms of tau and sigma, with marginalised coefficients
SCALE_STEPS = 4  # random-walk steps of each other update of a scale, which cost little


def _cauchy_posterior(x: Any, y: Any, variances: Any, sigma: float) -> tuple[Any, Any, float]:
    """Return factor and mean of the normal coefficients given the rest, and the log marginal."""
    precision = x.T @ x / sigma**2
    precision[np.diag_indices_from(precision)] += 1 / variances
    factor = cholesky(precision, check_finite=False)
    half = solve_triangular(factor, x.T @ y / sigma**2, trans=1, check_finite=False)
    log_prob = 0.5 * half @ half - 0.5 * y @ y / sigma**2 - len(y) * np.log(sigma)
    log_prob -= np.log(np.diag(factor)).sum() + 0.5 * np.log(variances).sum()
    return factor, solve_triangular(factor, half, check_finite=False), log_prob


def _half_normals(tau: float, sigma: float) -> float:
    """Log priors of the scales, in the coordinates of their logarithms."""
    _, of_tau, of_sigma = CAUCHY_PRIOR
    return -0.5 * ((tau / of_tau) ** 2 + (sigma / of_sigma) ** 2) + np.log(tau * sigma)


def _walk(
    rng: np.random.Generator, scale: float, log_density: Callable[[float], float], step: float
) -> float:
    value = log_density(scale)
    for _ in range(SCALE_STEPS):
        other = scale * np.exp(step * rng.normal())
        proposed = log_density(other)
        if np.log(rng.random()) < proposed - value:
            scale, value = other, proposed
    return scale


def _cauchy_chain(
    rng: np.random.Generator, x: Any, y: Any, num_draws: int, thin: int
) -> dict[str, Any]:
    design = np.column_stack([np.ones(len(y)), x])
    tau, sigma = np.exp(np.log([0.05, 0.7]) + 0.5 * rng.normal(size=2))
    spread, kept = 1 / rng.gamma(0.5, 2.0, x.shape[1]), []  # inverse gamma (1/2, 1/2)

    def variances(tau: float) -> Any:
        return np.append(CAUCHY_PRIOR[0] ** 2, tau**2 * spread)

    for i in range(WARMUP * thin + num_draws * thin):
        found = _cauchy_posterior(design, y, variances(tau), sigma)
        one, two = np.exp(np.log([tau, sigma]) + CAUCHY_STEP * rng.normal(size=2))
        other = _cauchy_posterior(design, y, variances(one), two)
        change = other[2] + _half_normals(one, two) - found[2] - _half_normals(tau, sigma)
        if np.log(rng.random()) < change:
            tau, sigma, found = one, two, other
        factor, mean, _ = found
        weights = mean + solve_triangular(factor, rng.normal(size=len(mean)), check_finite=False)
        beta, rest = weights[1:], y - design @ weights
        square = rest @ rest

        def of_tau(tau: float, beta: Any = beta, sigma: float = sigma) -> float:
            spreads = np.log1p((beta / tau) ** 2).sum() + len(beta) * np.log(tau)
            return float(_half_normals(tau, sigma) - spreads)

        tau = _walk(rng, tau, of_tau, 0.3)

        def of_sigma(sigma: float, tau: float = tau, square: float = square) -> float:
            return float(
                _half_normals(tau, sigma) - 0.5 * square / sigma**2 - len(y) * np.log(sigma)
            )

        sigma = _walk(rng, sigma, of_sigma, 0.1)
        spread = (0.5 + 0.5 * (beta / tau) ** 2) / rng.gamma(1.0, 1.0, len(beta))
        if i >= WARMUP * thin and i % thin == 0:
            kept.append((weights[0], tau, sigma, beta))
    names = ("intercept", "tau", "sigma", "beta")
    return dict(zip(names, map(np.stack, zip(*kept, strict=True)), strict=True))


def _cauchy_log_density(x: Any, y: Any, point: dict[str, Any]) -> float:
    """The model's log-density up to a constant."""
    of_intercept, of_tau, of_sigma = CAUCHY_PRIOR
    mean = point["intercept"] + x @ point["beta"]
    total = stats.norm.logpdf(y, mean, point["sigma"]).sum()
    total += stats.norm.logpdf(point["intercept"], 0.0, of_intercept)
    total += stats.norm.logpdf(point["tau"], 0.0, of_tau)
    total += stats.norm.logpdf(point["sigma"], 0.0, of_sigma)
    return float(total + stats.cauchy.logpdf(point["beta"], 0.0, point["tau"]).sum())
