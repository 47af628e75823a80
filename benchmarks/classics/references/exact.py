# SPDX-License-Identifier: Apache-2.0
"""Independent draws of six posteriors.

Up to two latents are drawn from a grid. Given them, coefficients are normal (``dyes``,
``dugongs``, ``stagnant``), and the trials of ``magnesium`` are independent.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from scipy.special import log_expit, logsumexp, softmax

from benchmarks.large.references.collapsed import run_chains

__all__ = ["beetles", "dogs", "dugongs", "dyes", "magnesium", "stagnant"]

VAGUE = 0.001  # shape and rate of the gamma priors
Chain = dict[str, Any]


def _log_gamma(log_tau: Any) -> Any:
    """Log-density of the logarithm of a precision."""
    return VAGUE * log_tau - VAGUE * np.exp(log_tau)


def _draw_cells(rng: np.random.Generator, log_prob: Any, axes: list[Any], count: int) -> list[Any]:
    """Draw cells of a grid, and uniform points within them."""
    cells = rng.choice(log_prob.size, count, p=softmax(log_prob.ravel()))
    index = np.unravel_index(cells, log_prob.shape)
    jitter = rng.uniform(-0.5, 0.5, (len(axes), count))
    return [
        axis[i] + (axis[1] - axis[0]) * one
        for axis, i, one in zip(axes, index, jitter, strict=True)
    ]


def _normal(x: Any, y: Any, noise: Any, prior: Any) -> tuple[Any, Any, Any]:
    """Return the log marginal of ``y``, and the mean and Cholesky factor of the precision.

    :param noise: precisions of the rows, batched.
    :param prior: precisions of the coefficients, batched in front.
    """
    precision = noise[..., None, None] * (x.mT @ x) + prior[..., None] * np.eye(x.shape[-1])
    factor = np.linalg.cholesky(precision)
    right = noise[..., None] * (x.mT @ y[:, None])[..., 0]
    mean = np.linalg.solve(precision, right[..., None])[..., 0]
    log_prob = 0.5 * (right * mean).sum(-1) - 0.5 * noise * (y @ y) + 0.5 * len(y) * np.log(noise)
    log_prob += 0.5 * np.log(prior).sum(-1)
    log_prob -= np.log(np.diagonal(factor, axis1=-2, axis2=-1)).sum(-1)
    return log_prob, mean, factor


def _draw_normal(rng: np.random.Generator, mean: Any, factor: Any) -> Any:
    noise = rng.normal(size=mean.shape)[..., None]
    return mean + np.linalg.solve(factor.mT, noise)[..., 0]


def _dyes_chain(rng: np.random.Generator, amount: Any, num_draws: int, thin: int) -> Chain:
    x = np.concatenate([np.ones((30, 1)), np.repeat(np.eye(6), 5, 0)], 1)

    def posterior(between: Any, within: Any) -> tuple[Any, Any, Any]:
        prior = np.concatenate([[1e-10 + 0 * between], [np.exp(between)] * 6])
        return _normal(x, amount.ravel(), np.exp(within), np.moveaxis(prior, 0, -1))

    axes = [np.linspace(-14.0, 9.5, 300), np.linspace(-11.0, -5.0, 60)]
    grid = np.meshgrid(*axes, indexing="ij")
    log_prob = posterior(*grid)[0] + sum(map(_log_gamma, grid))
    between, within = _draw_cells(rng, log_prob, axes, num_draws)
    values = _draw_normal(rng, *posterior(between, within)[1:])
    effects = {"theta": values[:, 0], "mu": values[:, :1] + values[:, 1:]}
    return effects | {"tau_between": np.exp(between), "tau_within": np.exp(within)}


def _dyes_log_density(amount: Any, draw: Chain) -> float:
    between, within = draw["tau_between"], draw["tau_within"]
    total = stats.norm.logpdf(draw["theta"], 0.0, 1e5)
    total += stats.gamma.logpdf([between, within], VAGUE, scale=1 / VAGUE).sum()
    total += stats.norm.logpdf(draw["mu"], draw["theta"], between**-0.5).sum()
    return total + stats.norm.logpdf(amount, draw["mu"][:, None], within**-0.5).sum()


def _lines(x: Any) -> Any:
    """Return the columns of both lines for each change point."""
    distance = x - x[:, None]
    left = np.tri(len(x))
    return np.stack([np.ones_like(left), left * distance, (1 - left) * distance], -1)


def _stagnant_chain(rng: np.random.Generator, x: Any, y: Any, num_draws: int, thin: int) -> Chain:
    lines, axis = _lines(x), np.linspace(2.0, 10.0, 200)
    prior = np.full(3, 1e-6)
    log_prob = np.stack([_normal(one, y, np.exp(axis), prior)[0] for one in lines])
    axes = [np.arange(29.0), axis]
    change, log_tau = _draw_cells(rng, log_prob + _log_gamma(axis), axes, num_draws)
    own = lines[np.rint(change).astype(int)]
    values = _draw_normal(rng, *_normal(own, y, np.exp(log_tau), prior)[1:])
    return dict(zip(("alpha", "beta1", "beta2"), values.T, strict=True)) | {"tau": np.exp(log_tau)}


def _stagnant_log_density(x: Any, y: Any, draw: Chain) -> float:
    coefficients = np.stack([draw["alpha"], draw["beta1"], draw["beta2"]])
    rows = stats.norm.logpdf(y, _lines(x) @ coefficients, draw["tau"] ** -0.5)
    prior = stats.norm.logpdf(coefficients, 0.0, 1000.0).sum()
    prior += stats.gamma.logpdf(draw["tau"], VAGUE, scale=1 / VAGUE)
    return prior + logsumexp(rows.sum(-1))


def _dugongs_chain(rng: np.random.Generator, age: Any, length: Any, count: int, thin: int) -> Chain:
    prior = np.full(2, 1e-6)

    def posterior(gamma: Any, log_tau: Any) -> tuple[Any, Any, Any]:
        power = gamma[..., None] ** age
        return _normal(np.stack([np.ones_like(power), -power], -1), length, np.exp(log_tau), prior)

    axes = [np.linspace(0.5, 1.0, 402)[1:-1], np.linspace(1.0, 7.0, 100)]
    grid = np.meshgrid(*axes, indexing="ij")
    log_prob = posterior(*grid)[0] + _log_gamma(grid[1])
    gamma, log_tau = _draw_cells(rng, log_prob, axes, count)
    values = _draw_normal(rng, *posterior(gamma, log_tau)[1:])
    return {"alpha": values[:, 0], "beta": values[:, 1], "gamma": gamma, "tau": np.exp(log_tau)}


def _dugongs_log_density(age: Any, length: Any, draw: Chain) -> float:
    mean = draw["alpha"] - draw["beta"] * draw["gamma"] ** age
    total = stats.norm.logpdf([draw["alpha"], draw["beta"]], 0.0, 1000.0).sum()
    total += stats.gamma.logpdf(draw["tau"], VAGUE, scale=1 / VAGUE)
    return total + stats.norm.logpdf(length, mean, draw["tau"] ** -0.5).sum()


def _beetles_log_density(dose: Any, exposed: Any, killed: Any, draw: Chain) -> Any:
    rate = np.exp(draw["alpha"][..., None] + draw["beta"][..., None] * (dose - dose.mean()))
    rows = killed * np.log(-np.expm1(-rate)) - (exposed - killed) * rate
    return rows.sum(-1) - (draw["alpha"] ** 2 + draw["beta"] ** 2) / 2e6


def _dogs_log_density(avoided: Any, draw: Chain) -> Any:
    avoidances = avoided.cumsum(-1)[:, :-1].ravel()
    shocks = (1 - avoided).cumsum(-1)[:, :-1].ravel()
    log_p = -draw["alpha"][..., None] * avoidances - draw["beta"][..., None] * shocks
    rows = np.where(avoided[:, 1:].ravel() > 0, np.log(-np.expm1(log_p)), log_p)
    return rows.sum(-1) - (draw["alpha"] ** 2 + draw["beta"] ** 2) / (2 * 316.0**2)


def _plane_chain(log_density: Any, axes: Any, rng: np.random.Generator, *words: Any) -> Chain:
    """Draw ``alpha`` and ``beta`` from a grid."""
    grid = dict(zip(("alpha", "beta"), np.meshgrid(*axes, indexing="ij"), strict=True))
    values = _draw_cells(rng, log_density(*words[:-2], grid), axes, words[-2])
    return dict(zip(("alpha", "beta"), values, strict=True))


def _trials(rt: Any, nt: Any, rc: Any, nc: Any, theta: Any, logit: Any) -> Any:
    """Log-likelihood of each trial plus the log-prior of the logit of the risk."""
    log_prob = (rc + 1) * log_expit(logit) + (nc - rc + 1) * log_expit(-logit)
    return log_prob + rt * log_expit(theta + logit) + (nt - rt) * log_expit(-theta - logit)


def _log_priors(log_tau: Any, counts: tuple) -> Any:
    """Six log-densities of ``log_tau``, up to constants."""
    s2, scale = _scales(counts)
    variance = np.exp(2 * log_tau)
    return np.stack([
        _log_gamma(-2 * log_tau),
        np.where(variance < 49, 2 * log_tau, -np.inf),
        np.where(variance < 49**2, log_tau, -np.inf),
        2 * log_tau - 2 * np.log(s2 + variance),
        log_tau - 2 * np.log(s2**0.5 + np.exp(log_tau)),
        2 * log_tau - variance**2 / (2 * scale**2),
    ])  # fmt: skip


def _scales(counts: tuple) -> tuple[float, float]:
    rt, nt, rc, nc = counts
    inverse = sum(1 / (count + 0.5) for count in (rt, nt - rt, rc, nc - rc))
    s2 = 1 / (1 / inverse).mean()
    return s2, np.sqrt(s2 / stats.norm.cdf(0.75))


def _magnesium_chain(rng: np.random.Generator, *words: Any) -> Chain:
    counts, num_draws = words[:4], words[4]
    column = [count[:, None, None] for count in counts]
    theta, logit = np.arange(-14.0, 11.0, 0.025), np.arange(-9.0, 4.0, 0.025)
    table = logsumexp(_trials(*column, theta[:, None], logit), axis=-1)  # (8, num_theta)
    peak = table.max(1)
    likelihood = np.exp(table - peak[:, None]).T
    mu, log_tau = theta[162:958:2], np.linspace(-9.0, 3.88, 180)
    log_prob = np.empty((len(mu), len(log_tau)))
    for k, tau in enumerate(np.exp(log_tau)):
        weights = softmax(-0.5 * ((theta - mu[:, None]) / tau) ** 2, axis=1)
        log_prob[:, k] = np.log(weights @ likelihood + 1e-300).sum(-1)
    draws: dict[str, list] = {"mu": [], "log_tau": [], "theta": [], "risk": []}
    for prior in _log_priors(log_tau, counts):
        own_mu, own = _draw_cells(rng, log_prob + prior, [mu, log_tau], num_draws)
        near = -0.5 * ((theta - own_mu[:, None]) * np.exp(-own[:, None])) ** 2
        chosen = (near[:, None] + table + rng.gumbel(size=(num_draws, *table.shape))).argmax(-1)
        effect = theta[chosen] + rng.uniform(-0.0125, 0.0125, chosen.shape)
        given = _trials(*column, effect.T[..., None], logit)
        chosen = (given + rng.gumbel(size=given.shape)).argmax(-1).T
        risk = 1 / (1 + np.exp(-logit[chosen] - rng.uniform(-0.0125, 0.0125, chosen.shape)))
        for key, value in zip(draws, (own_mu, own, effect, risk), strict=True):
            draws[key].append(value)
    found = {key: np.stack(value, 1) for key, value in draws.items()}
    tau, s2 = np.exp(found.pop("log_tau")).T, _scales(counts)[0]
    return found | {
        "precision": tau[0] ** -2,
        "variance": tau[1] ** 2,
        "sd": tau[2],
        "shrinkage": s2 / (s2 + tau[3] ** 2),
        "dumouchel": s2**0.5 / (s2**0.5 + tau[4]),
        "half_normal": tau[5] ** 2,
    }


def _magnesium_log_density(*words: Any) -> float:
    counts, draw = words[:4], words[4]
    s2, scale = _scales(counts)
    shrinkage, dumouchel = draw["shrinkage"], draw["dumouchel"]
    tau = np.sqrt([
        1 / draw["precision"],
        draw["variance"],
        draw["sd"] ** 2,
        s2 * (1 - shrinkage) / shrinkage,
        s2 * ((1 - dumouchel) / dumouchel) ** 2,
        draw["half_normal"],
    ])  # fmt: skip
    theta, logit = draw["theta"], np.log(draw["risk"] / (1 - draw["risk"]))
    total = stats.gamma.logpdf(draw["precision"], VAGUE, scale=1 / VAGUE)
    total += stats.halfnorm.logpdf(draw["half_normal"], scale=scale)
    total += stats.norm.logpdf(theta, draw["mu"][:, None], tau[:, None]).sum()
    likelihood = _trials(*counts, theta, logit) - log_expit(logit) - log_expit(-logit)
    return total + likelihood.sum()


def _run(chain: Any, log_density: Any, folder: Path, num_draws: int, thin: int) -> None:
    run_chains(folder, num_draws, thin, chain, log_density)


BEETLES = np.linspace(-0.8, 0.8, 200), np.linspace(10.0, 36.0, 200)
DOGS = np.linspace(0.12, 0.38, 100), np.linspace(0.02, 0.15, 100)
beetles = partial(_run, partial(_plane_chain, _beetles_log_density, BEETLES), _beetles_log_density)
dogs = partial(_run, partial(_plane_chain, _dogs_log_density, DOGS), _dogs_log_density)
dugongs = partial(_run, _dugongs_chain, _dugongs_log_density)
dyes = partial(_run, _dyes_chain, _dyes_log_density)
stagnant = partial(_run, _stagnant_chain, _stagnant_log_density)
magnesium = partial(_run, _magnesium_chain, _magnesium_log_density)
