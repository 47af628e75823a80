# SPDX-License-Identifier: Apache-2.0
"""How accurate are ``compare_models``, its log evidence and ``sensitivity``?

Four parts, each against an independent computation (closed forms, or quadrature on a grid)::

    python -m benchmarks.decisions --parts loo evidence stacking sensitivity --seeds 100 105
    python -m benchmarks.decisions --report

Each run adds one line to ``--out``; runs that have a line are skipped. Seeds below 100
were looked at during the development; the page shows seeds from 100 alone.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from scipy import stats
from scipy.special import gammaln, logsumexp, roots_hermitenorm
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    markdown_table,
    read_records,
    run_missing,
    write_page,
)
from pyro_implicit import compare_models, fit
from pyro_implicit.decisions.leave_one_out import leave_one_out
from pyro_implicit.fitting import log_evidence
from pyro_implicit.fitting.model_comparison import pointwise_of

FIRST_SCORED = 100


class Case(NamedTuple):
    """A model, its arguments, and the exact answer."""

    model: Callable[..., Any]
    args: tuple
    exact: Callable[[], Any]


def rows(number: int) -> Any:
    return pyro.plate("rows", number)


def tensor(values: np.ndarray) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float32)


# Exact leave-one-out densities


def by_evidence(log_evidence_of: Callable[[np.ndarray], float], number: int) -> np.ndarray:
    """``log p(y) - log p(y_-i)`` from the log evidence of a subset of the rows."""
    indices = np.arange(number)
    whole = log_evidence_of(indices >= 0)
    return np.array([whole - log_evidence_of(indices != one) for one in indices])


def on_grid(log_prior: np.ndarray, log_likelihood: np.ndarray) -> np.ndarray:
    """The same on a grid: ``(num_points,)`` and ``(num_points, num_rows)``."""
    joint = log_prior + log_likelihood.sum(-1)
    without = joint[:, None] - log_likelihood
    return logsumexp(joint) - logsumexp(without, axis=0)


def mesh(*axes: np.ndarray) -> list[np.ndarray]:
    return [part.ravel() for part in np.meshgrid(*axes, indexing="ij")]


def regression(x, y):
    b = pyro.sample("b", dist.Normal(torch.zeros(x.shape[-1]), 2.0).to_event(1))
    with rows(len(y)):
        pyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)


def regression_evidence(x: Tensor, y: Tensor) -> Callable[[np.ndarray], float]:
    x, y = x.double().numpy(), y.double().numpy()

    def of(keep: np.ndarray) -> float:
        covariance = 4 * x[keep] @ x[keep].T + np.eye(keep.sum())
        return float(stats.multivariate_normal.logpdf(y[keep], cov=covariance))

    return of


def bernoulli(y):
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with rows(len(y)):
        pyro.sample("y", dist.Bernoulli(p), obs=y)


def gamma_poisson(y):
    rate = pyro.sample("rate", dist.Gamma(1.0, 0.2))
    with rows(len(y)):
        pyro.sample("y", dist.Poisson(rate), obs=y)


def normal(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with rows(len(y)):
        pyro.sample("y", dist.Normal(mu, sigma), obs=y)


def logistic(x, y):
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    with rows(len(y)):
        pyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)


def student(x, y):
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with rows(len(y)):
        pyro.sample("y", dist.StudentT(4.0, b * x, sigma), obs=y)


EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(y, error):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with rows(len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, error), obs=y)


def count_effects(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with rows(len(y)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Poisson((mu + tau * z).exp()), obs=y)


def loo_cases() -> dict[str, Case]:
    generator = np.random.default_rng(1)

    x5 = generator.normal(size=(60, 5))
    x5[0] *= 4  # a leverage point
    y5 = x5 @ np.array([1.0, 0.0, -1.0, 0.5, 0.0]) + generator.normal(size=60)
    y5[0] += 4.0
    x5, y5 = tensor(x5), tensor(y5)

    coin = tensor((generator.random(30) < 0.2).astype(float))

    def exact_coin() -> np.ndarray:
        y = coin.numpy().astype(float)
        rest, n = y.sum() - y, len(y) - 1
        p = (1 + rest) / (2 + n)
        return np.log(np.where(y == 1, p, 1 - p))

    counts = tensor(np.append(generator.poisson(2.0, size=39), 14))

    def exact_counts() -> np.ndarray:
        y = counts.numpy().astype(float)
        shape, rate = 1 + y.sum() - y, 0.2 + len(y) - 1
        return stats.nbinom.logpmf(y, shape, rate / (rate + 1))

    values = tensor(np.append(generator.normal(1.0, 1.0, size=24), 6.0))

    def exact_normal() -> np.ndarray:
        y = values.double().numpy()
        mu, s = mesh(np.linspace(-2, 4.5, 801), np.exp(np.linspace(-1.2, 1.8, 601)))
        prior = stats.norm.logpdf(mu, 0, 5) + stats.halfnorm.logpdf(s, scale=2) + np.log(s)
        return on_grid(prior, stats.norm.logpdf(y, mu[:, None], s[:, None]))

    x1 = generator.normal(size=40)
    labels = tensor((generator.random(40) < 1 / (1 + np.exp(0.5 - 2 * x1))).astype(float))

    def exact_logistic() -> np.ndarray:
        y = labels.numpy()
        a, b = mesh(np.linspace(-4, 3, 501), np.linspace(-2, 8, 501))
        logits = a[:, None] + b[:, None] * x1
        prior = stats.norm.logpdf(a, 0, 2) + stats.norm.logpdf(b, 0, 2)
        return on_grid(prior, -np.logaddexp(0, np.where(y == 1, -logits, logits)))

    ys = tensor(1.5 * x1 + 0.5 * generator.standard_t(2, size=40))

    def exact_student() -> np.ndarray:
        y = ys.double().numpy()
        b, s = mesh(np.linspace(0, 3, 601), np.exp(np.linspace(-2.5, 1.0, 601)))
        prior = stats.norm.logpdf(b, 0, 2) + stats.halfnorm.logpdf(s, scale=2) + np.log(s)
        z = (y - b[:, None] * x1) / s[:, None]
        return on_grid(prior, stats.t.logpdf(z, 4) - np.log(s)[:, None])

    def exact_schools() -> np.ndarray:
        y, e = EFFECTS.double().numpy(), ERRORS.double().numpy()
        mu, tau = mesh(np.linspace(-25, 30, 601), np.exp(np.linspace(-7, 7, 1401)))
        prior = stats.norm.logpdf(mu, 0, 5) + stats.halfcauchy.logpdf(tau, scale=5) + np.log(tau)
        return on_grid(prior, stats.norm.logpdf(y, mu[:, None], np.hypot(tau[:, None], e)))

    wild = tensor(generator.poisson(np.exp(1.0 + 0.9 * generator.normal(size=20))).astype(float))

    def exact_effects() -> np.ndarray:
        y = wild.numpy().astype(float)
        mu, tau = mesh(np.linspace(-1.5, 3.5, 201), np.exp(np.linspace(-4, 1.5, 201)))
        prior = stats.norm.logpdf(mu, 0, 2) + stats.halfnorm.logpdf(tau) + np.log(tau)
        nodes, weights = roots_hermitenorm(80)
        logs = np.empty((len(mu), len(y)))
        log_rate = mu[:, None] + tau[:, None] * nodes
        log_w = np.log(weights / weights.sum())
        for index, count in enumerate(y):
            terms = count * log_rate - np.exp(log_rate) - gammaln(count + 1)
            logs[:, index] = logsumexp(terms + log_w, axis=1)
        return on_grid(prior, logs)

    evidence = regression_evidence(x5, y5)
    return {
        "regression": Case(regression, (x5, y5), lambda: by_evidence(evidence, len(y5))),
        "bernoulli": Case(bernoulli, (coin,), exact_coin),
        "gamma-poisson": Case(gamma_poisson, (counts,), exact_counts),
        "normal": Case(normal, (values,), exact_normal),
        "logistic": Case(logistic, (tensor(x1), labels), exact_logistic),
        "student": Case(student, (tensor(x1), ys), exact_student),
        "eight schools": Case(schools, (EFFECTS, ERRORS), exact_schools),
        "count effects": Case(count_effects, (wild,), exact_effects),
    }


def run_loo(case: Case, seed: int) -> dict[str, Any]:
    result = fit(case.model, "auto", *case.args, seed=seed, progress=False)
    pyro.set_rng_seed(seed)
    start = time.process_time()
    found = pointwise_of("model", result)
    loo = leave_one_out(result.target, found, 1200.0, result.resampling_efficiency)
    exact = torch.as_tensor(case.exact())
    error = (loo.elpd - exact).abs()
    named = torch.tensor([label in loo.bad for label in loo.labels])
    return {
        "observations": len(error),
        "repaired": int(loo.is_repaired.sum()),
        "named": int(named.sum()),
        "within_1": int((error <= loo.error)[~named].sum()),
        "within_2": int((error <= 2 * loo.error)[~named].sum()),
        "within_3": int((error <= 3 * loo.error)[~named].sum()),
        "squares": ((error / loo.error)[~named].square().sum().item()),
        "largest": error[~named].max().item(),
        "total_error": (loo.elpd - exact).sum().item(),
        "seconds": time.process_time() - start,
    }


# Log evidence


def scaled_regression(x, y):
    variance = pyro.sample("variance", dist.InverseGamma(3.0, 2.0))
    b = pyro.sample("b", dist.Normal(torch.zeros(x.shape[-1]), variance.sqrt()).to_event(1))
    with rows(len(y)):
        pyro.sample("y", dist.Normal(x @ b, variance.sqrt()), obs=y)


def rates(y, exposure):
    with pyro.plate("groups", len(y)):
        rate = pyro.sample("rate", dist.Gamma(0.7, 0.5))
        pyro.sample("y", dist.Poisson(rate * exposure), obs=y)


def two_modes(y):
    x = pyro.sample("x", dist.Normal(torch.zeros(3), 4.0).to_event(1))
    signs = torch.tensor([1.0, -1.0])
    parts = dist.Normal(x.unsqueeze(-2) * signs.unsqueeze(-1), 0.4).to_event(1)
    shares = dist.Categorical(torch.tensor([0.3, 0.7]))
    pyro.sample("y", dist.MixtureSameFamily(shares, parts), obs=y)


def evidence_cases() -> dict[str, Case]:
    generator = np.random.default_rng(2)

    def data(n: int, d: int) -> tuple[Tensor, Tensor]:
        x = generator.normal(size=(n, d))
        return tensor(x), tensor(x @ generator.normal(size=d) + generator.normal(size=n))

    small, large, scaled = data(40, 5), data(60, 30), data(30, 3)
    coin = tensor((generator.random(12) < 0.1).astype(float))
    counts = np.array([0.0, 1, 0, 4, 9, 0, 2, 30, 1, 0])
    exposure = np.array([1.0, 2, 1, 3, 5, 1, 2, 9, 1, 4])
    point = np.array([3.0, -2.0, 1.0])

    def exact_scaled() -> float:
        x, y = (part.double().numpy() for part in scaled)
        shape = (np.eye(len(y)) + x @ x.T) * 2 / 3  # InverseGamma(a, b): t with 2a and b/a
        return float(stats.multivariate_t.logpdf(y, shape=shape, df=6))

    def exact_coin() -> float:
        k, n = float(coin.sum()), len(coin)
        return float(gammaln(1 + k) + gammaln(1 + n - k) - gammaln(2 + n))

    def exact_rates() -> float:
        p = 0.5 / (0.5 + exposure)
        return float(stats.nbinom.logpmf(counts, 0.7, p).sum())

    def exact_modes() -> float:
        return float(stats.norm.logpdf(point, 0, math.sqrt(16 + 0.16)).sum())

    def whole(pair: tuple[Tensor, Tensor]) -> Callable[[], float]:
        return lambda: regression_evidence(*pair)(np.ones(len(pair[1]), dtype=bool))

    return {
        "regression, 5-d": Case(regression, small, whole(small)),
        "regression, 30-d": Case(regression, large, whole(large)),
        "regression with scale": Case(scaled_regression, scaled, exact_scaled),
        "bernoulli": Case(bernoulli, (coin,), exact_coin),
        "poisson rates, 10-d": Case(rates, (tensor(counts), tensor(exposure)), exact_rates),
        "two modes": Case(two_modes, (tensor(point),), exact_modes),
    }


def run_evidence(case: Case, seed: int) -> dict[str, Any]:
    result = fit(case.model, "auto", *case.args, seed=seed, progress=False)
    pyro.set_rng_seed(seed)
    start = time.process_time()
    found = log_evidence(result)
    seconds = time.process_time() - start
    return {"error": found.value - case.exact(), "sd": found.standard_error, "seconds": seconds}


# Stacking: the M-open regression of Yao et al. (2018), section 4.2, with three of its models


def one_column(x, y):
    b = pyro.sample("b", dist.Normal(0.0, 10.0))
    sigma = pyro.sample("sigma", dist.Gamma(0.1, 0.1))
    with rows(len(y)):
        pyro.sample("y", dist.Normal(b * x, sigma), obs=y)


def open_regression(seed: int, number: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Rows of 15 predictors with mean 5, three humps of coefficients, and signal 4 of noise 1."""
    generator = np.random.default_rng(seed)
    j = np.arange(1, 16)
    humps = sum((abs(j - c) < 5) * (5 - abs(j - c)) ** 2 for c in (4, 8, 12)).astype(float)
    coefficients = humps * math.sqrt(4.0 / (humps**2).sum())
    x = generator.normal(5.0, 1.0, size=(number, 15))
    return x, x @ coefficients + generator.normal(size=number)


def exact_weights(x: np.ndarray, y: np.ndarray, columns: Iterable[int]) -> np.ndarray:
    found = []
    for column in columns:
        xc = x[:, column]
        slope = (xc * y).sum() / (xc**2).sum()
        spread = (y - slope * xc).std()
        width = 8 * spread / math.sqrt((xc**2).sum())
        b, s = mesh(
            np.linspace(slope - width, slope + width, 401),
            spread * np.exp(np.linspace(-0.9, 0.9, 401)),
        )
        prior = stats.norm.logpdf(b, 0, 10) + stats.gamma.logpdf(s, 0.1, scale=10) + np.log(s)
        found.append(on_grid(prior, stats.norm.logpdf(y, b[:, None] * xc, s[:, None])))
    densities = np.exp(np.stack(found, -1))
    # EM for mixture weights converges monotonically to the optimum of this concave problem
    weights = np.full(densities.shape[1], 1 / densities.shape[1])
    for _ in range(100_000):
        shares = densities * weights
        updated = (shares / shares.sum(1, keepdims=True)).mean(0)
        if abs(updated - weights).max() < 1e-9:
            break
        weights = updated
    return weights


def run_stacking(case: Case, seed: int) -> dict[str, Any]:
    x, y = open_regression(seed)
    columns = (3, 7, 11)
    results = {
        str(c): fit(case.model, "auto", tensor(x[:, c]), tensor(y), seed=seed, progress=False)
        for c in columns
    }
    start = time.process_time()
    found = compare_models(results, evidence=False, seed=seed)
    seconds = time.process_time() - start
    weights = [float(found.table.loc[str(c), "stacking"]) for c in columns]
    exact = exact_weights(x, y, columns)
    return {
        "weights": weights,
        "exact": exact.tolist(),
        "error": float(abs(np.array(weights) - exact).max()),
        "seconds": seconds,
    }


# Sensitivity: the examples of R's priorsense, and data that a prior dominates


def two_parameters(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.5))
    with rows(len(y)):
        pyro.sample("y", dist.Normal(mu, sigma), obs=y)


def schools_non_centred(y, error):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with rows(len(y)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * z, error), obs=y)


#: R's ``airquality``: ozone in ppb and temperature in degrees Fahrenheit of 111 days without
#: missing values (New York State Department of Conservation and National Weather Service, 1973).
OZONE = """
    41 36 12 18 23 19 8 16 11 14 18 14 34 6 30 11 1 11 4 32 23 45 115 37 29 71 39 23 21 37 20
    12 13 135 49 32 64 40 77 97 97 85 10 27 7 48 35 61 79 63 16 80 108 20 52 82 50 64 59 39 9
    16 122 89 110 44 28 65 22 59 23 31 44 21 9 45 168 73 76 118 84 85 96 78 73 91 47 32 20 23
    21 24 44 21 28 9 13 46 18 13 24 16 13 23 36 7 14 30 14 18 20
"""
TEMPERATURE = """
    67 72 74 62 65 59 61 69 66 68 58 64 66 57 68 62 59 73 61 61 67 81 79 76 82 90 87 82 77 72
    65 73 76 84 85 81 83 83 88 92 92 89 73 81 80 81 82 84 87 85 74 86 85 82 86 88 86 83 81 81
    81 82 89 90 90 86 82 80 77 79 76 78 78 77 72 79 81 86 97 94 96 94 91 92 93 93 87 84 80 78
    75 73 81 76 77 71 71 78 67 76 68 82 64 71 81 69 63 70 75 76 68
"""


def ozone_model(ozone, temperature):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 100.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 5.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(10.0))
    with rows(len(ozone)):
        pyro.sample("ozone", dist.Normal(intercept + slope * temperature, sigma), obs=ozone)


def sensitivity_cases() -> dict[str, Case]:
    """Examples of priorsense: its README, its vignette "air quality", and its eight schools.

    The values of the last are not published.
    """
    y = torch.tensor(
        [9.5, 10.2, 9.1, 9.1, 10.3, 10.9, 11.7, 10.3, 9.6, 8.6, 9.1, 11.1, 9.3, 10.5, 9.7, 10.3]
        + [10.0, 9.8, 9.6, 8.3, 10.2, 9.8, 10.0, 10.0, 9.1]
    )
    ozone, temperature = (
        torch.tensor([float(value) for value in text.split()]) for text in (OZONE, TEMPERATURE)
    )
    air = {"intercept": (0.005, 0.077), "slope": (0.006, 0.093), "sigma": (0.062, 0.083)}
    published = {"mu": (0.433, 0.641), "sigma": (0.360, 0.674)}
    return {
        "univariate normal": Case(two_parameters, (y,), lambda: published),
        "air quality": Case(ozone_model, (ozone, temperature - temperature.mean()), lambda: air),
        "eight schools": Case(schools_non_centred, (EFFECTS, ERRORS), lambda: {}),
    }


def run_sensitivity(case: Case, seed: int) -> dict[str, Any]:
    result = fit(case.model, "auto", *case.args, seed=seed, progress=False)
    start = time.process_time()
    found = result.sensitivity(seed=seed)
    names = [name for name in found.labels if not name.startswith("z")]
    index = [found.labels.index(name) for name in names]
    return {
        "prior": dict(zip(names, found.prior[index].tolist(), strict=True)),
        "likelihood": dict(zip(names, found.likelihood[index].tolist(), strict=True)),
        "diagnosis": {name: found.diagnosis[name] for name in names},
        "published": case.exact(),
        "seconds": time.process_time() - start,
    }


PARTS: dict[str, tuple[Callable[[], dict[str, Case]], Callable[[Case, int], dict[str, Any]]]] = {
    "evidence": (evidence_cases, run_evidence),
    "stacking": (lambda: {"M-open regression": Case(one_column, (), tuple)}, run_stacking),
    "sensitivity": (sensitivity_cases, run_sensitivity),
    "loo": (loo_cases, run_loo),
}


# The page


def page(records: list[dict[str, Any]]) -> str:
    by_case: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if record["seed"] >= FIRST_SCORED:
            by_case[record["part"], record["case"]].append(record)
    tables: dict[str, list[list[str]]] = defaultdict(list)
    totals = np.zeros(5)
    for (part, case), runs in by_case.items():
        n, seconds = str(len(runs)), f"{np.mean([run['seconds'] for run in runs]):.1f}"
        if part == "loo":
            keys = ("observations", "named", "repaired", "within_2", "within_3")
            sums = np.array([sum(run[key] for run in runs) for key in keys])
            totals += sums
            rms = math.sqrt(sum(run["squares"] for run in runs) / (sums[0] - sums[1]))
            largest = max(run["largest"] for run in runs)
            tables[part].append([case, n, *share(sums), f"{rms:.2f}", f"{largest:.3f}", seconds])
        elif part == "evidence":
            errors, sds = (np.array([run[key] for run in runs]) for key in ("error", "sd"))
            covered = int((abs(errors) <= 1.645 * sds).sum()), int((abs(errors) <= 2 * sds).sum())
            worst = f"{abs(errors).max():.4f}"
            row = [case, n, worst, f"{sds.mean():.4f}", *map(str, covered), seconds]
            tables[part].append(row)
        elif part == "stacking":
            for run in runs:
                both = [" ".join(f"{w:.3f}" for w in run[key]) for key in ("weights", "exact")]
                tables[part].append([str(run["seed"]), *both, f"{run['error']:.3f}"])
        else:
            for name in runs[0]["prior"]:
                ranges = [
                    f"{min(values):.2f} to {max(values):.2f}"
                    for values in (
                        [run[key][name] for run in runs] for key in ("prior", "likelihood")
                    )
                ]
                words = ", ".join(sorted({run["diagnosis"][name] for run in runs}))
                known = runs[0]["published"].get(name)
                known = f"{known[0]:.2f}, {known[1]:.2f}" if known else "-"
                tables[part].append([f"{case}: {name}", n, *ranges, known, words])
    if tables["loo"]:
        tables["loo"].append(["all", "", *share(totals), "", "", ""])
    heads = {
        "loo": ["leave-one-out", "runs", "observations", "named bad", "repaired", "within 2 errors"]
        + ["within 3", "rms error / stated", "largest error, nats", "CPU s"],
        "evidence": ["log evidence", "runs", "largest error, nats", "mean stated error"]
        + ["within 1.645", "within 2", "CPU s"],
        "stacking": ["M-open regression, seed", "weights", "exact weights", "largest difference"],
        "sensitivity": ["sensitivity", "runs", "prior", "likelihood", "priorsense", "diagnosis"],
    }
    text = "# Decisions: `compare_models`, log evidence, stacking, sensitivity\n\n"
    text += f"{__doc__.split('::')[0].splitlines()[0]} Seeds from {FIRST_SCORED}; "
    text += "`python -m benchmarks.decisions --report` writes this page.\n"
    for part in PARTS:
        if tables[part]:
            text += "\n" + markdown_table(heads[part], tables[part])
    return text


def share(sums: np.ndarray) -> list[str]:
    scored = sums[0] - sums[1]
    shares = [f"{value / scored:.1%}" for value in sums[3:]]
    return [f"{value:.0f}" for value in sums[:3]] + shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--seeds", nargs=2, type=int, default=(100, 105), help="first and end")
    add_output_arguments(parser, RESULTS / "decisions.jsonl")
    settings = parser.parse_args()
    if not settings.report:
        warnings.simplefilter("ignore")
        cases = {part: PARTS[part][0]() for part in settings.parts}
        keys = [
            {"part": part, "case": case, "seed": seed}
            for seed in range(*settings.seeds)
            for part in settings.parts
            for case in cases[part]
        ]

        def work(key: dict[str, Any]) -> dict[str, Any]:
            return PARTS[key["part"]][1](cases[key["part"]][key["case"]], key["seed"])

        run_missing(settings.out, keys, work)
    write_page(settings.out, page(read_records(settings.out)))


if __name__ == "__main__":
    main()
