# SPDX-License-Identifier: Apache-2.0
"""The densities of the posteriordb models against plain computations, on tiny invented data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine
from pyro.poutine.util import prune_subsample_sites
from scipy import integrate, stats
from scipy.special import expit
from torch import Tensor

from benchmarks.posteriordb import differential_equations as ode
from benchmarks.posteriordb import models, regressions
from benchmarks.posteriordb.check import THRESHOLD, stein_z_scores
from benchmarks.posteriordb.markov import hmm_log_likelihood
from pyro_implicit.density.target import Target

pytestmark = pytest.mark.usefixtures("double")

Array = np.ndarray
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(7, 3)), RNG.normal(size=7)
EFFECTS, ERRORS = 8 * RNG.normal(size=8), RNG.uniform(8, 15, size=8)
U, V, ALPHA = RNG.exponential(size=5), RNG.exponential(size=5), np.array([[4.0, 2.0], [1.5, 3.0]])
TIMES = np.array([0.5, 1.25, 2.25, 3.0])
COUNTS, FIRST_COUNTS = RNG.uniform(5, 60, size=(4, 2)), np.array([30.0, 4.0])
CONCENTRATIONS, DOSE, VOLUME = RNG.uniform(4, 12, size=4), 30.0, 2.0
norm, half_cauchy, half_normal = stats.norm.logpdf, stats.halfcauchy.logpdf, stats.halfnorm.logpdf


# The densities of vectors u of unconstrained latents. A sum of u is the log Jacobian of positive
# latents exp(u).


def rows(mean: Array, u_sigma: float) -> float:
    return norm(Y, mean, np.exp(u_sigma)).sum() + u_sigma


def flat_regression(u: Array) -> float:
    return rows(X @ u[:3], u[3])


def half_cauchy_regression(u: Array) -> float:
    return rows(X @ u[:3], u[3]) + half_cauchy(np.exp(u[3]), scale=2.5)


def blr(u: Array) -> float:
    prior = norm(u[:3], 0, 10).sum() + half_normal(np.exp(u[3]), scale=10)
    return rows(X @ u[:3], u[3]) + prior


def autoregression(u: Array) -> float:
    prior = norm(u[:4], 0, 10).sum() + half_cauchy(np.exp(u[4]), scale=2.5)
    return rows(u[0] + X @ u[1:4], u[4]) + prior


def schools(mu: float, u_tau: float) -> float:
    return norm(mu, 0, 5) + half_cauchy(np.exp(u_tau), scale=5) + u_tau


def eight_schools_centered(u: Array) -> float:
    effects = norm(u[2:], u[0], np.exp(u[1])).sum()
    return schools(*u[:2]) + effects + norm(EFFECTS, u[2:], ERRORS).sum()


def eight_schools_noncentered(u: Array) -> float:
    likelihood = norm(EFFECTS, u[0] + np.exp(u[1]) * u[2:], ERRORS).sum()
    return schools(*u[:2]) + norm(u[2:]).sum() + likelihood


def two_normals(mu: Array, u_sigma: Array, u_theta: float) -> float:
    sigma, theta = np.exp(u_sigma), expit(u_theta)
    density = theta * stats.norm.pdf(Y, mu[0], sigma[0])
    density = density + (1 - theta) * stats.norm.pdf(Y, mu[1], sigma[1])
    prior = (
        norm(mu, 0, 2).sum() + half_normal(sigma, scale=2).sum() + stats.beta.logpdf(theta, 5, 5)
    )
    return np.log(density).sum() + prior + u_sigma.sum() + np.log(theta * (1 - theta))


def gauss_mix(u: Array) -> float:
    return two_normals(np.array([u[0], u[0] + np.exp(u[1])]), u[2:4], u[4]) + u[1]


def gauss_mix_unordered(u: Array) -> float:
    return two_normals(u[:2], u[2:4], u[4])


def gp_regression(u: Array) -> float:
    rho, alpha, sigma = np.exp(u)
    covariance = sigma * np.eye(7)
    for i, j in itertools.product(range(7), range(7)):
        covariance[i, j] += alpha**2 * np.exp(-((X[i, 0] - X[j, 0]) ** 2) / (2 * rho**2))
    prior = stats.gamma.logpdf(rho, 25, scale=1 / 4) + half_normal(alpha, scale=2)
    likelihood = stats.multivariate_normal.logpdf(Y, np.zeros(7), covariance)
    return likelihood + prior + half_normal(sigma) + u.sum()


def hmm_drive(u: Array) -> float:
    stay, phi_log = expit(u[:2]), np.array([u[2], u[2] + np.exp(u[3])])
    lambda_log = np.array([u[4], u[4] + np.exp(u[5])])
    phi, rate = np.exp(phi_log), np.exp(lambda_log)
    theta = np.stack([stay, 1 - stay], axis=-1)
    total = 0.0
    for path in itertools.product(range(2), repeat=5):
        moves = np.prod([theta[a, b] for a, b in itertools.pairwise(path)])
        k = list(path)
        total += moves * np.prod(phi[k] * np.exp(-phi[k] * U) * rate[k] * np.exp(-rate[k] * V))
    prior = sum(stats.dirichlet.logpdf(theta[k], ALPHA[k]) for k in range(2))
    prior += norm(phi, [0, 3], 1).sum() + norm(rate, [0, 3], 1).sum()
    jacobian = np.log(stay * (1 - stay)).sum() + phi_log.sum() + lambda_log.sum() + u[3] + u[5]
    return np.log(total) + prior + jacobian


def solve(field: Callable[[float, Array], Array], start: Array) -> Array:
    solution = integrate.solve_ivp(
        field, (0, TIMES[-1]), start, "LSODA", TIMES, rtol=1e-10, atol=1e-10
    )
    return solution.y.T


def log_normal(value: Array, log_median: Array, sd: Array | float) -> float:
    return (norm(np.log(value), log_median, sd) - np.log(value)).sum()


def lotka_volterra(u: Array) -> float:
    theta, start, sigma = np.split(np.exp(u), [4, 6])

    def field(t: float, z: Array) -> Array:
        prey, predators = z
        growth = theta[0] - theta[1] * predators, -theta[2] + theta[3] * prey
        return np.array(growth) * z

    path = np.log(solve(field, start))
    location, scale = np.array([1, 0.05, 1, 0.05]), np.array([0.5, 0.05, 0.5, 0.05])
    prior = (norm(theta, location, scale) - stats.norm.logcdf(location / scale)).sum()
    prior += log_normal(start, np.log(10), 1) + log_normal(sigma, -1, 1)
    likelihood = log_normal(FIRST_COUNTS, np.log(start), sigma) + log_normal(COUNTS, path, sigma)
    return likelihood + prior + u.sum()


def one_compartment(u: Array) -> float:
    k_a, K_m, V_m, sigma = np.exp(u)

    def field(t: float, c: Array) -> Array:
        return DOSE * k_a / VOLUME * np.exp(-k_a * t) - V_m / VOLUME * c / (K_m + c)

    path = np.log(solve(field, np.zeros(1))[:, 0])
    likelihood = log_normal(CONCENTRATIONS, path, sigma)
    return likelihood + half_cauchy(np.exp(u)).sum() + u.sum()


class Case(NamedTuple):
    model: Callable[..., None]
    args: tuple[Array | float, ...]
    expected: Callable[[Array], float]
    center: tuple[float, ...]  # around which latents are tried
    tolerance: float = 1e-8
    in_plate: tuple[str, ...] | None = None  # latents of the plate; none where there is no plate


LV_CENTER = (*np.log([0.55, 0.028, 0.8, 0.024, 30, 5]), -1.0, -1.0)
CASES = [
    Case(regressions.flat_regression, (X, Y), flat_regression, (0,) * 4),
    Case(regressions.half_cauchy_regression, (X, Y), half_cauchy_regression, (0,) * 4),
    Case(regressions.blr, (X, Y), blr, (0,) * 4),
    Case(regressions.autoregression, (X, Y), autoregression, (0,) * 5),
    Case(
        models.eight_schools_centered,
        (EFFECTS, ERRORS),
        eight_schools_centered,
        (0,) * 10,
        in_plate=("theta",),
    ),
    Case(
        models.eight_schools_noncentered,
        (EFFECTS, ERRORS),
        eight_schools_noncentered,
        (0,) * 10,
        in_plate=("theta_trans",),
    ),
    Case(models.gauss_mix, (Y,), gauss_mix, (0,) * 5, in_plate=()),
    Case(models.gauss_mix_unordered, (Y,), gauss_mix_unordered, (0,) * 5, in_plate=()),
    Case(models.gp_regression, (X[:, 0], Y), gp_regression, (0,) * 3),
    Case(models.hmm_drive, (U, V, ALPHA), hmm_drive, (0,) * 6),
    Case(ode.lotka_volterra, (TIMES, FIRST_COUNTS, COUNTS), lotka_volterra, LV_CENTER, 5e-3),
    Case(
        ode.one_compartment,
        (TIMES, CONCENTRATIONS, DOSE, VOLUME),
        one_compartment,
        (-0.3, 0, 0, -1),
        1e-3,
    ),
]
IDS = [case.model.__name__ for case in CASES]


def arguments(case: Case) -> tuple[Tensor, ...]:
    return tuple(torch.as_tensor(value, dtype=torch.float64) for value in case.args)


def latents(case: Case, num: int) -> Tensor:
    return torch.tensor(case.center) + 0.3 * torch.randn(num, len(case.center))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_density(case: Case) -> None:
    density, u = Target(case.model, *arguments(case)), latents(case, 5)
    expected = torch.tensor([case.expected(row) for row in u.numpy()])
    torch.testing.assert_close(density.log_prob(u), expected, rtol=0, atol=case.tolerance)
    assert density.is_vectorized  # inside vmap


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_gradient(case: Case) -> None:
    density = Target(case.model, *arguments(case))
    assert torch.autograd.gradcheck(density.log_prob, latents(case, 2).requires_grad_())


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_broadcasts_over_a_particle_plate(case: Case) -> None:
    args, u = arguments(case), latents(case, 4)
    density = Target(case.model, *args)
    values = density.constrain(u)
    if case.in_plate is not None:
        values = {k: v if k in case.in_plate else v.unsqueeze(1) for k, v in values.items()}
    model = poutine.condition(case.model, values)
    with pyro.plate("particles", 4, dim=-1 if case.in_plate is None else -2):
        trace = poutine.trace(model).get_trace(*args)
    trace.compute_log_prob()
    found = sum(
        site["log_prob"].reshape(4, -1).sum(-1)
        for site in prune_subsample_sites(trace).nodes.values()
        if site["type"] == "sample"
    )
    transforms = density.transforms
    jacobian = sum(
        transforms[name].log_abs_det_jacobian(part, transforms[name](part)).reshape(4, -1).sum(-1)
        for name, part in density.split(u).items()
    )
    torch.testing.assert_close(found + jacobian, density.log_prob(u))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_finite_far_from_the_posterior(case: Case) -> None:
    """Where inits and badly started guides may lie."""
    density = Target(case.model, *arguments(case))
    log_prob, score = density.score(6 * torch.rand(64, len(case.center)) - 3)
    assert log_prob.isfinite().all() and score.isfinite().all()


@pytest.mark.parametrize("steps, bound", [(2, 4e-6), (16, 5e-9)])
def test_populations_follow_the_equations(steps: int, bound: float) -> None:
    theta = np.exp(LV_CENTER[:4])

    def field(t: float, z: Array) -> Array:
        prey, predators = z
        growth = theta[0] - theta[1] * predators, -theta[2] + theta[3] * prey
        return np.array(growth) * z

    expected = torch.tensor(np.log(solve(field, np.exp(LV_CENTER[4:6]))))
    parameters, start = torch.tensor(theta), torch.tensor(LV_CENTER[4:6])
    found = ode.log_populations(parameters, start, torch.tensor(TIMES), steps)
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("K_m, V_m", [(1e-3, 0.5), (1.0, 0.9), (80.0, 6.0)])
def test_concentrations_follow_the_equation(K_m: float, V_m: float) -> None:
    def field(t: float, c: Array) -> Array:
        return 15 * 0.75 * np.exp(-0.75 * t) - V_m / 2 * c / (K_m + c)

    expected = torch.tensor(np.log(solve(field, np.zeros(1))[:, 0]))
    parameters = torch.tensor([0.75, K_m, V_m / 2])
    found = ode.log_concentrations(*parameters, torch.tensor(TIMES), torch.tensor(15.0))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("states, steps", [(2, 2), (2, 6), (3, 5)])
def test_hmm_sums_over_all_paths(states: int, steps: int) -> None:
    transition = torch.softmax(torch.randn(4, states, states), dim=-1)
    emissions = 3 * torch.randn(4, steps, states) - 400  # out of range without the scales
    paths = []
    for path in itertools.product(range(states), repeat=steps):
        moves = sum(transition[:, a, b].log() for a, b in itertools.pairwise(path))
        paths.append(moves + sum(emissions[:, t, k] for t, k in enumerate(path)))
    expected = torch.logsumexp(torch.stack(paths), dim=0)
    torch.testing.assert_close(hmm_log_likelihood(transition, emissions), expected)


def test_positive_normal() -> None:
    distribution = ode.PositiveNormal(torch.tensor([0.5, -1.0]), torch.tensor([1.0, 2.0]))
    exact = [stats.truncnorm(-0.5, np.inf, 0.5, 1), stats.truncnorm(0.5, np.inf, -1, 2)]
    value = torch.tensor([0.3, 1.7])
    expected = torch.tensor([e.logpdf(v) for e, v in zip(exact, value.tolist(), strict=True)])
    torch.testing.assert_close(distribution.log_prob(value), expected)
    draws = distribution.sample((100_000,))
    assert (draws > 0).all()
    means, sds = (torch.tensor([getattr(e, m)() for e in exact]) for m in ("mean", "std"))
    torch.testing.assert_close(draws.mean(0), means, rtol=0, atol=0.02)
    torch.testing.assert_close(draws.std(0), sds, rtol=0, atol=0.02)


def test_stein_z_scores_find_a_wrong_density() -> None:
    frame = torch.tensor([[2.0, 0.0], [1.5, 0.5]])
    draws = torch.randn(4000, 2) @ frame.T + 3.0
    score = -torch.linalg.solve(frame @ frame.T, (draws - 3.0).T).T
    assert max(z.abs().max() for z in stein_z_scores(draws, score)) < THRESHOLD
    shifted, wide = stein_z_scores(draws, score + 0.3)[0], stein_z_scores(draws, 0.8 * score)[1]
    assert shifted.abs().max() > THRESHOLD
    assert wide.abs().max() > THRESHOLD
