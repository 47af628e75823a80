# SPDX-License-Identifier: Apache-2.0
"""Samplers of six models by blocks of latent variables that are drawn or integrated out exactly.

A Student density is a normal one whose precision has a gamma distribution (Geweke, 1993). Given
these precisions, the random walk with Student steps and the Gaussian process with Student noise are
Gaussian: their scales are updated with the process integrated out. Then the degrees of freedom and
a scale are updated with the precisions integrated out.

The effects of schools have a normal conditional density. Their covariance matrix is proposed from
the inverse Wishart density of the effects, so that only the prior decides about the acceptance.

The scales of a horseshoe have inverse-gamma conditionals given the coefficients (Makalic and
Schmidt, 2016). Hamiltonian Monte Carlo moves the coefficients given the scales, in units of the
information of the counts, and then all noise together with the scales.

The log-volatilities are moved together with their scale by Hamiltonian Monte Carlo, in the
eigenvectors of a random walk (a cosine transform), in units of the approximate posterior sds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from scipy.fft import dct, idct
from scipy.linalg import cholesky, solve_triangular
from scipy.special import gammaln, polygamma

from benchmarks.large.references.collapsed import draw_walk, run_chains, walk_posterior

__all__ = [
    *("gp_student", "horseshoe_poisson", "log_variance", "schools"),
    *("student_walk", "volatility"),
]

Generator = np.random.Generator
Chain = dict[str, Any]
WARMUP, SMALL_STEPS = 300, 4  # sweeps; steps of the cheap updates of two scalars


def _metropolis(
    rng: Generator, point: Any, log_density: Callable[..., float], steps: Any, count: int
) -> Any:
    """Walk on positive numbers; ``log_density`` is that of their logarithms."""
    value = log_density(*point)
    for _ in range(count):
        other = point * np.exp(steps * rng.normal(size=len(point)))
        proposed = log_density(*other)
        if np.log(rng.random()) < proposed - value:
            point, value = other, proposed
    return point


def _student(x: Any, nu: float, scale: float) -> float:
    """Log-density of independent Student variables, up to a constant."""
    each = gammaln((nu + 1) / 2) - gammaln(nu / 2) - 0.5 * np.log(nu) - np.log(scale)
    return float(len(x) * each - 0.5 * (nu + 1) * np.log1p((x / scale) ** 2 / nu).sum())


def _half_normal(value: float, sd: float) -> float:
    """Log prior of a scale, in the coordinate of its logarithm."""
    return -0.5 * (value / sd) ** 2 + np.log(value)


def _freedom(nu: float) -> float:
    """Log prior Gamma(2, 0.1), in the coordinate of the logarithm."""
    return 2 * np.log(nu) - 0.1 * nu


def _precisions(rng: Generator, x: Any, nu: float) -> Any:
    """Draw the precisions of standard Student variables."""
    return rng.gamma((nu + 1) / 2, 2 / (nu + x**2))


def _stack(names: tuple[str, ...], kept: list[tuple]) -> Chain:
    return dict(zip(names, map(np.stack, zip(*kept, strict=True)), strict=True))


def student_walk(folder: Path, num_draws: int, thin: int) -> None:
    """Write ``draws.npz`` and ``run.json`` for the data in ``folder``."""
    run_chains(folder, num_draws, thin, _walk_chain, _walk_log_density)


def _walk_chain(rng: Generator, y: Any, num_draws: int, thin: int) -> Chain:
    scale, noise, nu = np.exp(np.log([0.15, 0.4, 3.0]) + 0.1 * rng.normal(size=3))
    weights, kept = np.ones(len(y)), []

    def variances(scale: float) -> Any:
        found = scale**2 / weights
        found[0] += 4.0
        return found

    def marginal(scale: float, noise: float) -> float:
        prior = _half_normal(scale, 1.0) + _half_normal(noise, 1.0)
        return walk_posterior(y, variances(scale), noise)[2] + prior

    for i in range(WARMUP + num_draws * thin):
        scale, noise = _metropolis(rng, np.array([scale, noise]), marginal, [0.15, 0.05], 1)
        factor, mean, _ = walk_posterior(y, variances(scale), noise)
        walk = draw_walk(rng, factor, mean)
        first = scale**2 / weights[0]
        share = 4.0 / (4.0 + first)
        start = share * walk[0] + np.sqrt(share * first) * rng.normal()
        moves = np.diff(walk, prepend=start)

        def of_steps(scale: float, nu: float, moves: Any = moves) -> float:
            return _student(moves, nu, scale) + _half_normal(scale, 1.0) + _freedom(nu)

        point = np.array([scale, nu])
        scale, nu = _metropolis(rng, point, of_steps, [0.1, 0.3], SMALL_STEPS)
        weights = _precisions(rng, moves / scale, nu)
        if i >= WARMUP and i % thin == 0:
            kept.append((nu, scale, noise, start, moves / scale))
    return _stack(("nu", "scale", "noise", "start", "steps"), kept)


def _walk_log_density(y: Any, point: Chain) -> float:
    level = point["start"] + point["scale"] * point["steps"].cumsum()
    total = stats.norm.logpdf(y, level, point["noise"]).sum()
    total += stats.t.logpdf(point["steps"], point["nu"]).sum()
    total += stats.norm.logpdf(point["start"], 0.0, 2.0)
    total += stats.norm.logpdf([point["scale"], point["noise"]]).sum()
    return float(total + stats.gamma.logpdf(point["nu"], 2.0, scale=10.0))


def gp_student(folder: Path, num_draws: int, thin: int) -> None:
    """Write ``draws.npz`` and ``run.json`` for the data in ``folder``."""
    run_chains(folder, num_draws, thin, _process_chain, _process_log_density)


def _covariance(t: Any, length: float, amplitude: float) -> Any:
    found = amplitude**2 * np.exp(-0.5 * ((t[:, None] - t) / length) ** 2)
    found[np.diag_indices_from(found)] += 1e-5
    return found


def _process_chain(rng: Generator, t: Any, y: Any, num_draws: int, thin: int) -> Chain:
    start = np.log([2.0, 1.0, 0.2, 3.0]) + 0.1 * rng.normal(size=4)
    length, amplitude, sigma, nu = np.exp(start)
    weights, kept = np.ones(len(y)), []

    def marginal(length: float, amplitude: float, sigma: float) -> float:
        both = _covariance(t, length, amplitude)
        both[np.diag_indices_from(both)] += sigma**2 / weights
        factor = cholesky(both, lower=True, check_finite=False)
        half = solve_triangular(factor, y, lower=True, check_finite=False)
        prior = -4 * np.log(length) - 6 / length  # inverse gamma (4, 6) of the logarithm
        prior += _half_normal(amplitude, 2.0) + _half_normal(sigma, 1.0)
        return float(prior - 0.5 * half @ half - np.log(np.diag(factor)).sum())

    for i in range(WARMUP + num_draws * thin):
        point = np.array([length, amplitude, sigma])
        length, amplitude, sigma = _metropolis(rng, point, marginal, [0.25, 0.3, 0.1], 3)
        root = cholesky(_covariance(t, length, amplitude), lower=True, check_finite=False)
        told = weights / sigma**2
        factor = cholesky(np.eye(len(y)) + (root.T * told) @ root, check_finite=False)
        half = solve_triangular(factor, root.T @ (told * y), trans=1, check_finite=False)
        z = solve_triangular(factor, half + rng.normal(size=len(y)), check_finite=False)
        rest = y - root @ z

        def of_noise(sigma: float, nu: float, rest: Any = rest) -> float:
            return _student(rest, nu, sigma) + _half_normal(sigma, 1.0) + _freedom(nu)

        sigma, nu = _metropolis(rng, np.array([sigma, nu]), of_noise, [0.15, 0.4], SMALL_STEPS)
        weights = _precisions(rng, rest / sigma, nu)
        if i >= WARMUP and i % thin == 0:
            kept.append((nu, sigma, length, amplitude, z))
    return _stack(("nu", "sigma", "length", "amplitude", "z"), kept)


def _process_log_density(t: Any, y: Any, point: Chain) -> float:
    root = cholesky(_covariance(t, point["length"], point["amplitude"]), lower=True)
    total = stats.t.logpdf(y, point["nu"], root @ point["z"], point["sigma"]).sum()
    total += stats.norm.logpdf(point["z"]).sum() + stats.norm.logpdf(point["sigma"])
    total += stats.norm.logpdf(point["amplitude"], 0.0, 2.0)
    total += stats.invgamma.logpdf(point["length"], 4.0, scale=6.0)
    return float(total + stats.gamma.logpdf(point["nu"], 2.0, scale=10.0))


def schools(folder: Path, num_draws: int, thin: int) -> None:
    """Write ``draws.npz`` and ``run.json`` for the data in ``folder``."""
    run_chains(folder, num_draws, thin, _school_chain, _school_log_density)


def _school_chain(rng: Generator, school: Any, x: Any, y: Any, num_draws: int, thin: int) -> Chain:
    design = np.column_stack([np.ones(len(y)), x])
    number = school.max() + 1
    gram, told = np.zeros((number, 3, 3)), np.zeros((number, 3))
    np.add.at(gram, school, design[:, :, None] * design[:, None])
    np.add.at(told, school, design * y[:, None])
    mean, covariance, sigma, kept = rng.normal(size=3), np.eye(3) * rng.uniform(0.2, 1.0), 1.0, []

    def prior(covariance: Any) -> float:  # of tau and the correlations (LKJ with 2)
        variances = np.diag(covariance)
        log_det = np.linalg.slogdet(covariance)[1] - np.log(variances).sum()
        return float(log_det - 0.5 * variances.sum() - 1.5 * np.log(variances).sum())

    for i in range(WARMUP + num_draws * thin):
        inverse = np.linalg.inv(covariance)
        factor = np.linalg.cholesky(inverse + gram / sigma**2).swapaxes(1, 2)
        right = (inverse @ mean + told / sigma**2)[..., None]
        half = np.linalg.solve(factor.swapaxes(1, 2), right) + rng.normal(size=(number, 3, 1))
        effect = np.linalg.solve(factor, half)[..., 0]
        root = np.linalg.cholesky(number * inverse + np.eye(3) / 4.0).T
        mean = np.linalg.solve(root.T, inverse @ effect.sum(0)) + rng.normal(size=3)
        mean = np.linalg.solve(root, mean)
        scatter = (effect - mean).T @ (effect - mean)
        proposed = stats.invwishart.rvs(number - 4, scatter, random_state=rng)
        if np.log(rng.random()) < prior(proposed) - prior(covariance):
            covariance = proposed
        rest = y - (design * effect[school]).sum(-1)
        other = np.sqrt(0.5 * rest @ rest / rng.gamma(0.5 * (len(y) - 1)))
        if np.log(rng.random()) < (sigma**2 - other**2) / 8.0:
            sigma = other
        if i >= WARMUP and i % thin == 0:
            tau = np.sqrt(np.diag(covariance))
            corr = np.linalg.cholesky(covariance / tau[:, None] / tau)
            kept.append((mean, tau, corr, sigma, effect))
    return _stack(("mean", "tau", "corr", "sigma", "effect"), kept)


def _school_log_density(school: Any, x: Any, y: Any, point: Chain) -> float:
    effect, root = point["effect"], point["tau"][:, None] * point["corr"]
    own, diagonal = effect[school], np.diag(point["corr"])
    location = own[:, 0] + (own[:, 1:] * x).sum(-1)
    total = stats.norm.logpdf(y, location, point["sigma"]).sum()
    total += stats.multivariate_normal.logpdf(effect, point["mean"], root @ root.T).sum()
    total += stats.norm.logpdf(point["mean"], 0.0, 2.0).sum()
    total += stats.norm.logpdf(point["tau"]).sum() + stats.norm.logpdf(point["sigma"], 0.0, 2.0)
    return float(total + 3 * np.log(diagonal[1]) + 2 * np.log(diagonal[2]))


LOG_SIGMA, LOG_NU = 0, 1  # the first coordinates; those of the log-volatilities follow
NUM_LEAPFROGS, TARGET_ACCEPTANCE, FIRST_STEP = (4, 12), 0.85, 0.2
START_VARIANCE = 4.0
# Of a day: 2 nu / (nu + 3) about a log-scale, for a Student variable; 1 / 2 about a log-variance.
INFORMATION, INFORMATION_OF_VARIANCE = 1.5, 0.5


def volatility(folder: Path, num_draws: int, thin: int) -> None:
    """Write ``draws.npz`` and ``run.json`` for the data in ``folder``."""
    run_chains(folder, num_draws, thin, _volatility_chain, _volatility_log_density)


def log_variance(folder: Path, num_draws: int, thin: int) -> None:
    """Write ``draws.npz`` and ``run.json`` for the data in ``folder``."""
    run_chains(folder, num_draws, thin, _log_variance_chain, _log_variance_log_density)


class _Walk:
    """A random walk in white coordinates, with its start integrated out."""

    def __init__(self, log_sigma: float, white: Any, mean: float, information: float) -> None:
        self.sigma, self.white, number = np.exp(log_sigma), white, len(white)
        precision = (2 - 2 * np.cos(np.pi * np.arange(number) / number)) / self.sigma**2
        self.share = precision / (precision + information)
        self.spread = (precision + information) ** -0.5
        self.level = idct(self.spread * white, norm="ortho")
        self._moves, self._first = np.diff(self.level), self.level[0] - mean

    def finish(self, of_level: Any) -> tuple[float, float, Any]:
        """Return the walk's log-density, and gradients by log sigma and white coordinates.

        :param of_level: the gradient of the data's log-density by the level.
        """
        moves, first, number = self._moves, self._first, len(self.white)
        variance, squares = START_VARIANCE + self.sigma**2, moves @ moves / self.sigma**2
        log_prob = -0.5 * squares - (number - 1) * np.log(self.sigma) + np.log(self.spread).sum()
        log_prob -= 0.5 * first**2 / variance + 0.5 * np.log(variance)
        of_level[:-1] += moves / self.sigma**2
        of_level[1:] -= moves / self.sigma**2
        of_level[0] -= first / variance
        of_white = dct(of_level, norm="ortho") * self.spread
        of_sigma = squares - (number - 1) + self.share.sum() + of_white @ (self.white * self.share)
        of_sigma += self.sigma**2 * (first**2 / variance - 1) / variance
        return log_prob, of_sigma, of_white


def volatility_score(returns: Any, point: Any) -> tuple[float, Any, Any]:
    """Return log-density, gradient and log-volatilities at white coordinates."""
    walk, nu = _Walk(point[LOG_SIGMA], point[2:], -4.0, INFORMATION), np.exp(point[LOG_NU])
    number, sigma = len(returns), walk.sigma
    squares = returns**2 * np.exp(-2 * walk.level)
    log_prob = gammaln((nu + 1) / 2) - gammaln(nu / 2) - 0.5 * np.log(nu)
    log_prob = number * log_prob - 0.5 * (nu + 1) * np.log1p(squares / nu).sum()
    log_prob += point[LOG_SIGMA] - 10 * sigma + _freedom(nu) - walk.level.sum()
    found, of_sigma, of_white = walk.finish((nu + 1) * squares / (nu + squares) - 1)
    of_nu = polygamma(0, (nu + 1) / 2) - polygamma(0, nu / 2) - 1 / nu
    of_nu = 0.5 * number * of_nu - 0.5 * np.log1p(squares / nu).sum()
    of_nu = nu * (of_nu + 0.5 * (nu + 1) * (squares / (nu + squares)).sum() / nu - 0.1) + 2
    gradient = np.concatenate([[of_sigma + 1 - 10 * sigma, of_nu], of_white])
    return log_prob + found, gradient, walk.level


def log_variance_score(returns: Any, point: Any) -> tuple[float, Any, Any]:
    """Return log-density, gradient and log-variances at white coordinates."""
    walk = _Walk(point[LOG_SIGMA], point[1:], -1.0, INFORMATION_OF_VARIANCE)
    squares = returns**2 * np.exp(-walk.level)
    log_prob = -0.5 * (walk.level + squares).sum() + _half_normal(walk.sigma, 0.5)
    found, of_sigma, of_white = walk.finish(0.5 * (squares - 1))
    gradient = np.append(of_sigma + 1 - 4 * walk.sigma**2, of_white)
    return log_prob + found, gradient, walk.level


def _walk_points(
    rng: Generator, score: Callable[[Any], Any], point: Any, mass: Any, num_draws: int, thin: int
) -> Iterator[tuple[Any, Any]]:
    """Yield points and levels of a chain of Hamiltonian Monte Carlo."""
    point = point + 0.3 * rng.normal(size=len(point))
    value, gradient, level = score(point)
    log_step = np.log(FIRST_STEP)
    for i in range(WARMUP + num_draws * thin):
        step = np.exp(log_step) * rng.uniform(0.8, 1.2)
        momentum = np.sqrt(mass) * rng.normal(size=len(point))
        energy = value - 0.5 * (momentum**2 / mass).sum()
        there, slope = point, gradient
        for _ in range(rng.integers(*NUM_LEAPFROGS)):
            momentum = momentum + 0.5 * step * slope
            there = there + step * momentum / mass
            found, slope, heights = score(there)
            momentum = momentum + 0.5 * step * slope
        change = found - 0.5 * (momentum**2 / mass).sum() - energy
        accepted = np.exp(min(0.0, change)) if np.isfinite(change) else 0.0
        if rng.random() < accepted:
            point, value, gradient, level = there, found, slope, heights
        if i < WARMUP:
            log_step += (accepted - TARGET_ACCEPTANCE) / np.sqrt(1 + i / 10)
        elif i % thin == 0:
            yield point, level


def _start(rng: Generator, first: float, mean: float, sigma: float) -> float:
    """Draw the start of a walk given its first level."""
    share = START_VARIANCE / (START_VARIANCE + sigma**2)
    return mean + share * (first - mean) + np.sqrt(share) * sigma * rng.normal()


def _volatility_chain(rng: Generator, returns: Any, num_draws: int, thin: int) -> Chain:
    point = np.concatenate([np.log([0.1, 8.0]), np.zeros(len(returns))])
    point[2] = -4.5 * np.sqrt(INFORMATION * len(returns))  # a constant level
    # Both scalars are known to about a fifth: the masses make them move as far as the others.
    mass, kept = np.concatenate([[25.0, 10.0], np.ones(len(returns))]), []
    score = partial(volatility_score, returns)
    for at, level in _walk_points(rng, score, point, mass, num_draws, thin):
        sigma, nu = np.exp(at[:2])
        start = _start(rng, level[0], -4.0, sigma)
        kept.append((sigma, nu, start, np.diff(level, prepend=start)))
    return _stack(("sigma", "nu", "start", "steps"), kept)


def _log_variance_chain(rng: Generator, returns: Any, num_draws: int, thin: int) -> Chain:
    point = np.append(np.log(0.2), np.zeros(len(returns)))
    point[1] = -np.sqrt(INFORMATION_OF_VARIANCE * len(returns))
    mass, kept = np.append(25.0, np.ones(len(returns))), []
    score = partial(log_variance_score, returns)
    for at, level in _walk_points(rng, score, point, mass, num_draws, thin):
        sigma = np.exp(at[LOG_SIGMA])
        start = _start(rng, level[0], -1.0, sigma)
        kept.append((sigma, start, np.diff(level, prepend=start)))
    return _stack(("sigma", "start", "steps"), kept)


def _log_variance_log_density(returns: Any, point: Chain) -> float:
    level = point["start"] + point["steps"].cumsum()
    total = stats.norm.logpdf(returns, 0.0, np.exp(level / 2)).sum()
    total += stats.norm.logpdf(point["steps"], 0.0, point["sigma"]).sum()
    return float(total + stats.norm.logpdf(point["start"], -1.0, 2.0) - 2 * point["sigma"] ** 2)


def _volatility_log_density(returns: Any, point: Chain) -> float:
    level = point["start"] + point["steps"].cumsum()
    total = stats.t.logpdf(returns, point["nu"], 0.0, np.exp(level)).sum()
    total += stats.norm.logpdf(point["steps"], 0.0, point["sigma"]).sum()
    total += stats.norm.logpdf(point["start"], -4.0, 2.0) - 10 * point["sigma"]
    return float(total + stats.gamma.logpdf(point["nu"], 2.0, scale=10.0))


HORSESHOE_SD, HORSESHOE_TAU = 2.0, 0.2  # scales of the priors of intercept and tau


def horseshoe_poisson(folder: Path, num_draws: int, thin: int) -> None:
    """Write ``draws.npz`` and ``run.json`` for the data in ``folder``."""
    run_chains(folder, num_draws, thin, _horseshoe_chain, _horseshoe_log_density)


def _leapfrog(
    rng: Generator, point: Any, density: Callable[[Any], tuple[float, Any]], step: float
) -> tuple[Any, float]:
    """Return the next point of Hamiltonian Monte Carlo, and the probability of acceptance."""
    momentum, start = rng.normal(size=len(point)), point
    before, gradient = density(point)
    value, energy = before, 0.5 * momentum @ momentum
    for _ in range(rng.integers(5, 15)):
        momentum = momentum + 0.5 * step * gradient
        point = point + step * momentum
        value, gradient = density(point)
        momentum = momentum + 0.5 * step * gradient
    change = value - before + energy - 0.5 * momentum @ momentum
    chance = float(np.exp(min(0.0, change))) if np.isfinite(change) else 0.0
    return (point, chance) if rng.random() < chance else (start, chance)


def _horseshoe_chain(rng: Generator, x: Any, y: Any, num_draws: int, thin: int) -> Chain:
    design, size = np.column_stack([np.ones(len(y)), x]), x.shape[1]
    gram = (design.T * (y + 0.5)) @ design
    local, tau = np.exp(0.5 * rng.normal(size=size)), 0.05 * np.exp(0.3 * rng.normal())
    white, kept = np.append(0.2, 0.3 * rng.normal(size=size)), []  # intercept and z, prior sd 1
    steps = np.log([0.5, 0.1])  # of both trajectories, fixed after the warm-up

    def of_noise(white: Any, scale: Any) -> tuple[float, Any]:
        with np.errstate(over="ignore", invalid="ignore"):
            rate = design @ (scale * white)
            mean = np.exp(rate)
            value = y @ rate - mean.sum() - 0.5 * white @ white
            return float(value), scale * (design.T @ (y - mean)) - white

    def scales(local: Any, tau: float) -> Any:
        return np.append(HORSESHOE_SD, tau * local)

    def of_all(point: Any) -> tuple[float, Any]:  # with the logarithms of local scales and tau
        white, logs = point[: size + 1], point[size + 1 :]
        with np.errstate(over="ignore", invalid="ignore"):
            value, gradient = of_noise(white, scales(np.exp(logs[:-1]), np.exp(logs[-1])))
            by_scale = white * (gradient + white)
            square = np.exp(2 * (logs - np.append(np.zeros(size), np.log(HORSESHOE_TAU))))
            value += logs.sum() - np.log1p(square).sum()
            pull = np.append(by_scale[1:], by_scale[1:].sum()) + 1 - 2 * square / (1 + square)
        return value, np.concatenate([gradient, pull])

    for i in range(WARMUP + num_draws * thin):
        scale = scales(local, tau)
        root = cholesky(gram * scale * scale[:, None] + np.eye(size + 1), check_finite=False)

        def of_round(point: Any, root: Any = root, scale: Any = scale) -> tuple[float, Any]:
            white = solve_triangular(root, point, check_finite=False)
            value, gradient = of_noise(white, scale)
            return value, solve_triangular(root, gradient, trans=1, check_finite=False)

        point, first = _leapfrog(rng, root @ white, of_round, np.exp(steps[0]))
        white = solve_triangular(root, point, check_finite=False)
        everything = np.concatenate([white, np.log(local), [np.log(tau)]])
        everything, second = _leapfrog(rng, everything, of_all, np.exp(steps[1]))
        white, local = everything[: size + 1], np.exp(everything[size + 1 : -1])
        tau = float(np.exp(everything[-1]))
        if i < WARMUP:
            steps = steps + 0.1 * (np.array([first, second]) - 0.8)
        beta = tau * local * white[1:]
        for _ in range(SMALL_STEPS):
            extra = (1 + 1 / local**2) / rng.gamma(1.0, size=size)
            local = np.sqrt((1 / extra + 0.5 * (beta / tau) ** 2) / rng.gamma(1.0, size=size))
            extra = (HORSESHOE_TAU**-2 + tau**-2) / rng.gamma(1.0)
            square = (1 / extra + 0.5 * ((beta / local) ** 2).sum()) / rng.gamma(0.5 * (size + 1))
            tau = float(np.sqrt(square))
        white[1:] = beta / (tau * local)
        if i >= WARMUP and i % thin == 0:
            kept.append((HORSESHOE_SD * white[0], tau, local, white[1:].copy()))
    return _stack(("intercept", "tau", "lam", "z"), kept)


def _horseshoe_log_density(x: Any, y: Any, point: Chain) -> float:
    rate = point["intercept"] + x @ (point["z"] * point["lam"] * point["tau"])
    total = stats.poisson.logpmf(y, np.exp(rate)).sum() + stats.norm.logpdf(point["z"]).sum()
    total += stats.norm.logpdf(point["intercept"], 0.0, HORSESHOE_SD)
    total += stats.halfcauchy.logpdf(point["tau"], scale=HORSESHOE_TAU)
    return float(total + stats.halfcauchy.logpdf(point["lam"]).sum())
