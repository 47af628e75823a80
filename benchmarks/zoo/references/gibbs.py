# SPDX-License-Identifier: Apache-2.0
"""Gibbs sampling of the horseshoes, on which NUTS does not converge.

With :math:`\\beta = z \\lambda \\tau` the local scales have inverse-gamma conditionals given the
coefficients, each with an auxiliary variable (Makalic and Schmidt 2016, *A Simple Sampler for the
Horseshoe Estimator*). The common scale and the noise scale are sampled with the coefficients
marginalised, which are then drawn jointly (Johndrow, Orenstein and Bhattacharya 2020, *Scalable
Approximate MCMC Algorithms for the Horseshoe Prior*); one eigendecomposition serves all of this.
Because a small coefficient and its local scale are strongly dependent, the scale is also sampled
given :math:`z`.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

__all__ = ["horseshoe", "walk_local"]

NUM_CHAINS, NUM_POINTS = 8, 6
NOISE_PRIOR = 2.0
NUM_WALKS, STEP = 10, 0.3  # per sweep; step of the logarithms of the two common scales
LOCAL_STEP, NUM_LOCAL = 3.0, 4  # step of the logarithms of the local scales; their Gibbs steps


def _inverse_gamma(rng: np.random.Generator, shape: float, scale: Any) -> Any:
    return scale / rng.gamma(shape, size=np.shape(scale))


def _log_marginal(log_scales: Any, eigenvalues: Any, rotated: Any) -> Any:
    """Log-density of ``log(tau), log(sigma)``, ``(num_chains, 2)``, given the local scales."""
    tau, sigma = np.exp(log_scales).T
    variance = sigma[:, None] ** 2 + tau[:, None] ** 2 * eigenvalues
    total = -0.5 * (np.log(variance) + rotated**2 / variance).sum(-1)
    total -= np.log1p(tau**2) + 0.5 * (sigma / NOISE_PRIOR) ** 2
    return total + log_scales.sum(-1)


def walk_local(
    rng: np.random.Generator, x: Any, residual: Any, local: Any, coefficients: Any, noise: Any
) -> Any:
    """Update each local scale with its ``z`` fixed, so that its coefficient moves along.

    :param residual: ``y`` minus the contribution of the coefficients.
    :param noise: variances.
    """
    local, residual = local.copy(), residual.copy()
    factor = np.exp(LOCAL_STEP * rng.normal(size=local.shape))
    log_uniform = np.log(rng.uniform(size=local.shape))
    log_prior = np.log(factor) + np.log1p(local**2) - np.log1p((local * factor) ** 2)
    change, squares = coefficients * (factor - 1), (x**2).sum(0)
    for j, column in enumerate(x.T):
        gain = change[:, j] * (residual @ column - 0.5 * change[:, j] * squares[j]) / noise
        accepted = log_uniform[:, j] < gain + log_prior[:, j]
        residual -= np.outer(accepted * change[:, j], column)
        local[:, j] *= np.where(accepted, factor[:, j], 1.0)
    return local


def _exchange(rng: np.random.Generator, log_tau: Any, log_local: Any) -> tuple[Any, Any]:
    """Move scale between the common and the local scales with fixed products."""

    def log_prior(log_scales: Any) -> Any:  # half-Cauchy
        return (log_scales - np.logaddexp(0, 2 * log_scales)).sum(-1)

    for _ in range(NUM_WALKS):
        change = rng.normal(size=log_tau.shape) * 2 / math.sqrt(log_local.shape[-1])
        after = log_prior(log_tau + change) + log_prior(log_local - change)
        gain = after - log_prior(log_tau) - log_prior(log_local)
        accepted = np.log(rng.uniform(size=len(gain))) < gain
        change = np.where(accepted[:, None], change, 0.0)
        log_tau, log_local = log_tau + change, log_local - change
    return log_tau, log_local


def _log_prob(x: Any, y: Any, draw: dict[str, Any]) -> float:
    """The joint density by the model's distributions."""
    cauchy, normal = stats.halfcauchy.logpdf, stats.norm.logpdf
    mean = x @ (draw["z"] * draw["lam"] * draw["tau"])
    total = cauchy(draw["tau"]) + cauchy(draw["lam"]).sum() + normal(draw["z"]).sum()
    total += stats.halfnorm.logpdf(draw["sigma"], scale=NOISE_PRIOR)
    return float(total + normal(y, mean, draw["sigma"]).sum())


def horseshoe(folder: Path, num_draws: int, thin: int, seed: int = 0) -> None:
    """Write draws and their cost, as ``sample`` does for NUTS.

    :param folder: contains the data and receives the draws.
    :param num_draws: draws kept from each of 8 chains, after a third of all sweeps as warm-up.
    :param thin: sweeps between two draws.
    """
    with np.load(folder / "data.npz") as file:
        x, y = file["argument_0"], file["argument_1"]
    began, wall = time.process_time(), time.perf_counter()
    rng = np.random.default_rng(seed)
    rows, columns = x.shape
    local = np.exp(rng.normal(size=(NUM_CHAINS, columns)))
    log_scales = rng.normal(size=(NUM_CHAINS, 2)) - [2, 0]
    kept: dict[str, list[Any]] = {"tau": [], "sigma": [], "lam": [], "z": []}
    warmup = num_draws * thin // 2
    for sweep in range(warmup + num_draws * thin):
        scaled = x * local[:, None]
        eigenvalues, vectors = np.linalg.eigh(scaled @ scaled.mT)
        rotated = y @ vectors
        before = _log_marginal(log_scales, eigenvalues, rotated)
        for _ in range(NUM_WALKS):
            proposal = log_scales + STEP * rng.normal(size=log_scales.shape)
            after = _log_marginal(proposal, eigenvalues, rotated)
            accepted = np.log(rng.uniform(size=NUM_CHAINS)) < after - before
            log_scales = np.where(accepted[:, None], proposal, log_scales)
            before = np.where(accepted, after, before)
        tau, sigma = np.exp(log_scales).T[..., None]
        # A prior draw, corrected by the difference of its noisy observations from ``y``.
        z = rng.normal(size=local.shape)
        seen = (scaled @ (tau * z)[..., None])[..., 0] + sigma * rng.normal(size=(NUM_CHAINS, rows))
        weights = ((y - seen)[:, None] @ vectors)[:, 0] / (sigma**2 + tau**2 * eigenvalues)
        z += tau * ((vectors @ weights[..., None]).mT @ scaled)[:, 0]
        if sweep >= warmup and (sweep - warmup) % thin == 0:
            kept["tau"].append(tau[:, 0])
            kept["sigma"].append(sigma[:, 0])
            kept["lam"].append(local)
            kept["z"].append(z)
        coefficients = tau * z * local
        residual = y - coefficients @ x.T
        local = walk_local(rng, x, residual, local, coefficients, sigma[:, 0] ** 2)
        squares = (z * local) ** 2
        for _ in range(NUM_LOCAL):
            extra = _inverse_gamma(rng, 1.0, 1 + 1 / local**2)
            local = np.sqrt(_inverse_gamma(rng, 1.0, 1 / extra + squares / 2))
        log_scales[:, :1], log_local = _exchange(rng, log_scales[:, :1], np.log(local))
        local = np.exp(log_local)
    draws = {name: np.stack(values, 1) for name, values in kept.items()}
    points = [{name: value[0, i] for name, value in draws.items()} for i in range(NUM_POINTS)]
    np.savez(folder / "draws.npz", **draws)
    record = {
        "sampler": "gibbs",
        "log_probs": [_log_prob(x, y, point) for point in points],
        "divergences": 0.0,
        "sweeps": (warmup + num_draws * thin) * NUM_CHAINS,
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - began,
    }
    assert all(math.isfinite(value) for value in record["log_probs"])
    (folder / "run.json").write_text(json.dumps(record))
