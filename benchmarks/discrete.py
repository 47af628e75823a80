# SPDX-License-Identifier: Apache-2.0
"""Compare ``fit`` with exact draws, for models whose discrete latent variables it samples.

::

    python -m benchmarks.discrete --seeds 0 1

``ratio`` is the sliced distance of 10,000 draws from 10,000 exact ones, over the distance between
halves of the latter, and ``worst`` the same for the worst coordinate (``benchmarks/zoo``).
Exact draws come from enumeration or grids in numpy, independently of Pyro; those of ``selection``
from a collapsed Gibbs sampler of 10,000 thinned sweeps.

The settings were chosen on the models of ``LOOK``; those of ``SCORE_ONLY`` were only measured.
The chains of ``changepoints`` and ``ferromagnet`` stay in separate modes, so that ``fit`` anneals
them. They were looked at when annealing was built.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from scipy import stats
from scipy.special import gammaln, logsumexp

from benchmarks.common import (
    RESULTS,
    append_record,
    environment,
    markdown_table,
    read_records,
    spread,
    write_page,
)
from benchmarks.zoo.metrics import Reference, measure
from pyro_implicit import fit
from pyro_implicit.density import Target
from pyro_implicit.fitting import FitPolicy
from pyro_implicit.mcmc import Refined

OUT = RESULTS / "discrete.jsonl"
LOOK = ("thinning", "n_mixture", "ising", "selection")
SCORE_ONLY = (
    "changepoints", "recapture", "electrons", "dictionary", "image", "diagnosis", "population",
    "ferromagnet",
)  # fmt: skip
NUM_DRAWS = 10_000

Draws = dict[str, np.ndarray]
Exact = Callable[[np.random.Generator], Draws]


class Case(NamedTuple):
    """A model without arguments, and its exact draws by site."""

    model: Callable[[], Any]
    exact: Exact


def _choose(rng: np.random.Generator, log_weights: np.ndarray) -> np.ndarray:
    """Draw places in a table of log-weights; all of them on a grid of equal cells."""
    flat = log_weights.ravel()
    weights = np.exp(flat - logsumexp(flat))
    return rng.choice(len(flat), size=NUM_DRAWS, p=weights)


def _choose_rows(rng: np.random.Generator, log_weights: np.ndarray) -> np.ndarray:
    """Draw a place in each row, ``(num_rows, num_values)``, by Gumbel's maximum."""
    return (log_weights + rng.gumbel(size=log_weights.shape)).argmax(-1)


def _spins(number: int) -> np.ndarray:
    codes = np.arange(2**number)
    return ((codes[:, None] >> np.arange(number)) & 1).astype(np.float64)


# The models to look at


def thinning() -> Case:
    """Poisson counts, of which a known share is seen, with an unknown rate."""
    y, share = np.array([6.0, 9.0, 4.0, 11.0, 7.0]), 0.3
    data = torch.tensor(y).float()

    def model() -> None:
        rate = pyro.sample("rate", dist.Gamma(2.0, 0.1))
        with pyro.plate("rows", 5):
            n = pyro.sample("n", dist.Poisson(rate))
            pyro.sample("y", dist.Binomial(n, share), obs=data)

    def exact(rng: np.random.Generator) -> Draws:
        rate = rng.gamma(2 + y.sum(), 1 / (0.1 + 5 * share), NUM_DRAWS)
        unseen = rng.poisson((1 - share) * rate[:, None], (NUM_DRAWS, 5))
        return {"rate": rate, "n": y + unseen}

    return Case(model, exact)


def n_mixture() -> Case:
    """Animals of 30 sites, each counted three times with an unknown probability of detection."""
    rng = np.random.default_rng(1)
    truth = rng.poisson(9.0, 30)
    y = rng.binomial(truth[:, None], 0.4, (30, 3)).astype(np.float64)
    data = torch.tensor(y).float()

    def model() -> None:
        rate = pyro.sample("rate", dist.Gamma(4.0, 0.5))
        seen = pyro.sample("seen", dist.Beta(4.0, 4.0))
        with pyro.plate("sites", 30, dim=-2):
            n = pyro.sample("n", dist.Poisson(rate))
            with pyro.plate("visits", 3, dim=-1):
                pyro.sample("y", dist.Binomial(n, seen), obs=data)

    def exact(rng: np.random.Generator) -> Draws:
        rates, shares, counts = np.linspace(2, 45, 260), np.linspace(0.02, 0.8, 240), np.arange(120)
        # log p(y_i | n, share) is sum_j [log C(n, y_ij) + y_ij log s + (n - y_ij) log(1 - s)].
        with np.errstate(divide="ignore", invalid="ignore"):
            choose = gammaln(counts + 1) - gammaln(y[..., None] + 1)
            choose = choose - np.where(
                counts >= y[..., None], gammaln(counts - y[..., None] + 1), np.inf
            )
        choose = choose.sum(1)  # (sites, counts)
        total = y.sum(1)
        log_poisson = stats.poisson.logpmf(counts, rates[:, None])
        table = np.empty((len(rates), len(shares)))
        per_share = []
        for k, share in enumerate(shares):
            seen = total[:, None] * np.log(share) + (3 * counts - total[:, None]) * np.log1p(-share)
            per_share.append(choose + seen)
            table[:, k] = logsumexp(per_share[-1] + log_poisson[:, None], axis=-1).sum(-1)
        table += stats.gamma.logpdf(rates, 4, scale=2)[:, None] + stats.beta.logpdf(shares, 4, 4)
        row, column = np.unravel_index(_choose(rng, table), table.shape)
        n = np.stack([
            _choose_rows(rng, per_share[c] + log_poisson[r])
            for r, c in zip(row, column, strict=True)
        ])  # fmt: skip
        return {
            "rate": rates[row] + (rng.random(NUM_DRAWS) - 0.5) * (rates[1] - rates[0]),
            "seen": shares[column] + (rng.random(NUM_DRAWS) - 0.5) * (shares[1] - shares[0]),
            "n": n[..., None].astype(np.float64),
        }

    return Case(model, exact)


def _ising(couplings: np.ndarray, field: np.ndarray) -> Case:
    number = len(field)
    j, h = torch.tensor(couplings).float(), torch.tensor(field).float()

    def model() -> None:
        with pyro.plate("spins", number):
            x = pyro.sample("x", dist.Bernoulli(0.5))
        s = 2 * x - 1
        pyro.factor("energy", 0.5 * (s @ j) @ s + h @ s)

    def exact(rng: np.random.Generator) -> Draws:
        x = _spins(number)
        s = 2 * x - 1
        energy = 0.5 * ((s @ couplings) * s).sum(-1) + s @ field
        return {"x": x[_choose(rng, energy)]}

    return Case(model, exact)


def ising() -> Case:
    """Twenty spins with random couplings between all of them, and random fields."""
    rng = np.random.default_rng(2)
    j = np.triu(rng.normal(size=(20, 20)) * 1.2 / np.sqrt(20), 1)
    return _ising(j + j.T, 0.3 * rng.normal(size=20))


def selection() -> Case:
    """Thirty indicators of regression coefficients, with correlated columns."""
    rng = np.random.default_rng(3)
    number, rows, noise, rate = 30, 60, 0.7, 0.15
    x = rng.normal(size=(rows, number)) + 0.8 * rng.normal(size=(rows, 1))
    slope = np.zeros(number)
    slope[:5] = [1.0, -0.6, 0.35, 0.25, -0.2]
    y = x @ slope + noise * rng.normal(size=rows)
    features, data = torch.tensor(x).float(), torch.tensor(y).float()

    def model() -> None:
        with pyro.plate("columns", number):
            z = pyro.sample("z", dist.Bernoulli(rate))
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", rows):
            pyro.sample("y", dist.Normal(features @ (z * b), noise), obs=data)

    def exact(rng: np.random.Generator) -> Draws:
        gram, cross, log_odds = x.T @ x / noise**2, x.T @ y / noise**2, np.log(rate / (1 - rate))

        def evidence(z: np.ndarray) -> float:
            on = z.nonzero()[0]
            if not len(on):
                return 0.0
            precision = gram[np.ix_(on, on)] + np.eye(len(on))
            factor = np.linalg.cholesky(precision)
            half = np.linalg.solve(factor, cross[on])
            return 0.5 * half @ half - np.log(factor.diagonal()).sum() + len(on) * log_odds

        z, zs, bs = np.zeros(number, dtype=bool), [], []
        value = evidence(z)
        for sweep in range(200 + 2 * NUM_DRAWS):
            for k in rng.permutation(number):
                other = z.copy()
                other[k] = ~z[k]
                found = evidence(other)
                if np.log(rng.random()) < found - value:
                    z, value = other, found
            if sweep >= 200 and sweep % 2:
                b, on = rng.normal(size=number), z.nonzero()[0]
                if len(on):
                    covariance = np.linalg.inv(gram[np.ix_(on, on)] + np.eye(len(on)))
                    b[on] = rng.multivariate_normal(covariance @ cross[on], covariance)
                zs.append(z.astype(np.float64))
                bs.append(b)
        return {"z": np.stack(zs), "b": np.stack(bs)}

    return Case(model, exact)


# The models that are only measured


def changepoints() -> Case:
    """Two changes of a Poisson rate, at unknown places of 60."""
    rng = np.random.default_rng(4)
    times = np.arange(60)
    y = rng.poisson(np.where(times < 20, 3.0, np.where(times < 44, 7.0, 4.5))).astype(np.float64)
    data, grid = torch.tensor(y).float(), torch.arange(60)

    def model() -> None:
        a = pyro.sample("a", dist.Categorical(torch.ones(60)))
        b = pyro.sample("b", dist.Categorical(torch.ones(60)))
        rates = pyro.sample("rates", dist.Gamma(2.0, 0.5).expand([3]).to_event(1))
        part = (grid >= a).long() + (grid >= b).long()
        with pyro.plate("times", 60):
            pyro.sample("y", dist.Poisson(rates[part]), obs=data)

    def exact(rng: np.random.Generator) -> Draws:
        sums = np.concatenate([[0], y.cumsum()])
        table = np.empty((60, 60))
        stat = {}
        for a, b in product(range(60), range(60)):
            low, high = min(a, b), max(a, b)
            ends = np.array([0, low, high, 60])
            total, size = np.diff(sums[ends]), np.diff(ends)
            stat[a, b] = 2 + total, 0.5 + size
            table[a, b] = (gammaln(2 + total) - (2 + total) * np.log(0.5 + size)).sum()
        a, b = np.unravel_index(_choose(rng, table), table.shape)
        shapes, inverses = (
            np.stack([stat[one][k] for one in zip(a.tolist(), b.tolist(), strict=True)])
            for k in (0, 1)
        )
        return {"a": a, "b": b, "rates": rng.gamma(shapes, 1 / inverses)}

    return Case(model, exact)


def recapture() -> Case:
    """The size of a closed population, from four occasions of capture and marking."""
    unique, total, occasions = 52.0, 71.0, 4.0

    def model() -> None:
        rate = pyro.sample("rate", dist.Gamma(2.0, 0.02))
        n = pyro.sample("n", dist.Poisson(rate))
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        ways = torch.lgamma(n + 1) - torch.lgamma((n - unique).clamp(min=0) + 1)
        seen = total * p.log() + (occasions * n - total) * (-p).log1p()
        pyro.factor("seen", torch.where(n >= unique, ways + seen, -torch.inf))

    def exact(rng: np.random.Generator) -> Draws:
        n = np.arange(unique, 800)
        # The rate is integrated out: Poisson counts of a gamma rate are negative binomial.
        log_prior = stats.nbinom.logpmf(n, 2, 0.02 / 1.02)
        ways = gammaln(n + 1) - gammaln(n - unique + 1)
        beta = gammaln(total + 1) + gammaln(occasions * n - total + 1) - gammaln(occasions * n + 2)
        chosen = n[_choose(rng, log_prior + ways + beta)]
        return {
            "rate": rng.gamma(2 + chosen, 1 / 1.02),
            "n": chosen,
            "p": rng.beta(1 + total, 1 + occasions * chosen - total),
        }

    return Case(model, exact)


def electrons() -> Case:
    """Negative binomial counts, read with an unknown gain and noise that blurs neighbours."""
    rng = np.random.default_rng(5)
    truth = rng.negative_binomial(3, 0.35, 15)
    y = 1.3 * truth + 0.6 * rng.normal(size=15)
    data = torch.tensor(y).float()

    def model() -> None:
        gain = pyro.sample("gain", dist.LogNormal(0.0, 0.5))
        with pyro.plate("cells", 15):
            n = pyro.sample("n", dist.NegativeBinomial(3.0, probs=torch.tensor(0.65)))
            pyro.sample("y", dist.Normal(gain * n, 0.6), obs=data)

    def exact(rng: np.random.Generator) -> Draws:
        gains, counts = np.linspace(0.2, 3.0, 2801), np.arange(150)
        prior = stats.nbinom.logpmf(counts, 3, 0.35)
        rows = [
            stats.norm.logpdf(y[:, None], gain * counts, 0.6) + prior for gain in gains
        ]  # fmt: skip
        table = np.array([logsumexp(row, axis=-1).sum() for row in rows])
        table += stats.lognorm.logpdf(gains, 0.5)
        place = _choose(rng, table)
        return {
            "gain": gains[place] + (rng.random(NUM_DRAWS) - 0.5) * (gains[1] - gains[0]),
            "n": np.stack([_choose_rows(rng, rows[k]) for k in place]).astype(np.float64),
        }

    return Case(model, exact)


def dictionary() -> Case:
    """Two labels of ten points among 150 atoms, whose indices have no order, and a noise scale."""
    rng = np.random.default_rng(6)
    atoms = rng.normal(size=(150, 2))
    truth = rng.integers(150, size=(2, 10))
    means = np.stack([atoms[truth[0]], atoms[truth[1]], atoms[truth[0]] + atoms[truth[1]]], 1)
    y = means + 0.3 * rng.normal(size=(10, 3, 2))
    places, data = torch.tensor(atoms).float(), torch.tensor(y).float()

    def model() -> None:
        scale = pyro.sample("scale", dist.LogNormal(-1.5, 0.5))
        with pyro.plate("points", 10):
            one = places[pyro.sample("one", dist.Categorical(torch.ones(150)))]
            two = places[pyro.sample("two", dist.Categorical(torch.ones(150)))]
            loc = torch.stack(torch.broadcast_tensors(one, two, one + two), -2)
            pyro.sample("y", dist.Normal(loc, scale).to_event(2), obs=data)

    def exact(rng: np.random.Generator) -> Draws:
        logs = np.linspace(-2.5, 0.2, 300)
        squares = ((y[:, 0, None] - atoms) ** 2).sum(-1)[:, :, None]
        squares = squares + ((y[:, 1, None] - atoms) ** 2).sum(-1)[:, None]
        both = atoms[:, None] + atoms
        squares = squares + ((y[:, 2, None, None] - both) ** 2).sum(-1)
        flat = squares.reshape(10, -1)
        table = stats.norm.logpdf(logs, -1.5, 0.5)
        for k, log in enumerate(logs):
            table[k] += (logsumexp(-0.5 * flat * np.exp(-2 * log), axis=-1) - 6 * log).sum()
        place = np.sort(_choose(rng, table))
        chosen = np.empty((NUM_DRAWS, 10), dtype=np.int64)
        for k in np.unique(place):
            rows = (place == k).nonzero()[0]
            weights = -0.5 * flat * np.exp(-2 * logs[k])
            weights = np.exp(weights - logsumexp(weights, axis=-1, keepdims=True))
            for point in range(10):
                chosen[rows, point] = rng.choice(flat.shape[-1], len(rows), p=weights[point])
        order, step = rng.permutation(NUM_DRAWS), logs[1] - logs[0]
        log = logs[place] + (rng.random(NUM_DRAWS) - 0.5) * step
        return {
            "scale": np.exp(log)[order], "one": chosen[order] // 150, "two": chosen[order] % 150
        }  # fmt: skip

    return Case(model, exact)


def image() -> Case:
    """A smooth binary image of 4 x 4 pixels under noise, with unknown brightness."""
    rng = np.random.default_rng(7)
    truth = np.zeros((4, 4))
    truth[1:3, 1:] = 1
    y = 1.2 * truth + 0.8 * rng.normal(size=(4, 4))
    data = torch.tensor(y).float()

    def model() -> None:
        bright = pyro.sample("bright", dist.Normal(1.0, 1.0))
        with pyro.plate("rows", 4, dim=-2), pyro.plate("columns", 4, dim=-1):
            x = pyro.sample("x", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(bright * x, 0.8), obs=data)
        same = (x[1:] == x[:-1]).float().sum() + (x[:, 1:] == x[:, :-1]).float().sum()
        pyro.factor("smooth", 0.7 * same)

    def exact(rng: np.random.Generator) -> Draws:
        x = _spins(16).reshape(-1, 4, 4)
        same = (x[:, 1:] == x[:, :-1]).sum((1, 2)) + (x[:, :, 1:] == x[:, :, :-1]).sum((1, 2))
        size, total = x.sum((1, 2)), (x * y).sum((1, 2))
        # Given the image, the brightness is normal.
        precision = 1 + size / 0.64
        mean = (1 + total / 0.64) / precision
        weights = 0.7 * same - 0.5 * np.log(precision) + 0.5 * precision * mean**2
        place = _choose(rng, weights)
        bright = mean[place] + rng.normal(size=NUM_DRAWS) / np.sqrt(precision[place])
        return {"bright": bright, "x": x[place]}

    return Case(model, exact)


def diagnosis() -> Case:
    """Twenty rare causes of fifteen symptoms (noisy-or)."""
    rng = np.random.default_rng(8)
    leak = -np.log(0.95)
    strength = rng.exponential(1.0, (20, 15)) * (rng.random((20, 15)) < 0.3)
    rates = rng.uniform(0.05, 0.3, 20)
    cause = rng.random(20) < rates
    symptom = (rng.random(15) < 1 - np.exp(-leak - cause @ strength)).astype(np.float64)
    weights, prior = torch.tensor(strength).float(), torch.tensor(rates).float()
    data = torch.tensor(symptom).float()

    def model() -> None:
        with pyro.plate("causes", 20):
            x = pyro.sample("x", dist.Bernoulli(prior))
        with pyro.plate("symptoms", 15):
            pyro.sample("y", dist.Bernoulli(-torch.expm1(-leak - x @ weights)), obs=data)

    def exact(rng: np.random.Generator) -> Draws:
        x = _spins(20)
        spared = -leak - x @ strength
        table = spared @ (1 - symptom) + np.log(-np.expm1(spared)) @ symptom
        table += x @ np.log(rates) + (1 - x) @ np.log1p(-rates)
        return {"x": x[_choose(rng, table)]}

    return Case(model, exact)


def population() -> Case:
    """A growing population of twelve years, of which a known share is counted."""
    rng = np.random.default_rng(9)
    n, truth = 12, [20]
    for _ in range(n - 1):
        truth.append(rng.poisson(1.08 * truth[-1]))
    y = rng.binomial(truth, 0.5).astype(np.float64)

    def model() -> None:
        growth = pyro.sample("growth", dist.LogNormal(0.0, 0.3))
        before = torch.tensor(20.0)
        for t in range(n):
            rate = before * growth + 1e-3
            before = pyro.sample(f"n{t}", dist.Poisson(rate))
            pyro.sample(f"y{t}", dist.Binomial(before, 0.5), obs=torch.tensor(float(y[t])))

    def exact(rng: np.random.Generator) -> Draws:
        counts, growths = np.arange(260), np.linspace(0.6, 1.8, 400)
        seen = stats.binom.logpmf(y[:, None], counts, 0.5)
        filters, table = [], np.empty(len(growths))
        for k, growth in enumerate(growths):
            moves = stats.poisson.logpmf(counts, counts[:, None] * growth + 1e-3)
            message = moves[20] + seen[0]
            steps = [message]
            for t in range(1, n):
                message = logsumexp(message[:, None] + moves, axis=0) + seen[t]
                steps.append(message)
            filters.append(steps)
            table[k] = logsumexp(message) + stats.lognorm.logpdf(growth, 0.3)
        place = np.sort(_choose(rng, table))
        paths = np.empty((NUM_DRAWS, n))
        for k in np.unique(place):
            rows = (place == k).nonzero()[0]
            moves = stats.poisson.logpmf(counts, counts[:, None] * growths[k] + 1e-3)
            last = _choose_rows(rng, np.repeat(filters[k][-1][None], len(rows), 0))
            paths[rows, -1] = last
            for t in range(n - 2, -1, -1):
                last = _choose_rows(rng, filters[k][t] + moves[:, last].T)
                paths[rows, t] = last
        order = rng.permutation(NUM_DRAWS)
        grown = growths[place] + (rng.random(NUM_DRAWS) - 0.5) * (growths[1] - growths[0])
        return {"growth": grown[order]} | {f"n{t}": paths[order, t] for t in range(n)}

    return Case(model, exact)


def ferromagnet() -> Case:
    """Twenty spins in two modes of unequal mass, between which flips of one spin never pass."""
    return _ising(np.full((20, 20), 0.12) - 0.12 * np.eye(20), np.full(20, 0.02))


CASES: dict[str, Callable[[], Case]] = {
    "thinning": thinning, "n_mixture": n_mixture, "ising": ising, "selection": selection,
    "changepoints": changepoints, "recapture": recapture, "electrons": electrons,
    "dictionary": dictionary, "image": image, "diagnosis": diagnosis, "population": population,
    "ferromagnet": ferromagnet,
}  # fmt: skip


def reference_of(name: str, target: Target) -> Reference:
    """Return exact draws in the coordinates of a target; constant ones are left out."""
    draws = CASES[name]().exact(np.random.default_rng(100))
    tensors = {
        site: torch.as_tensor(value).reshape(NUM_DRAWS, *example.shape)
        for (site, example), value in (
            ((site, target.constrain(target.init_loc)[site]), draws[site]) for site in target.shapes
        )
    }
    values = target.unconstrain(tensors).double()
    columns = (values.std(0) > 0).nonzero().flatten()
    return Reference(values[:, columns], columns, values.mean(0), values.std(0).clamp(min=1e-9))


def run(name: str, seed: int, patience: float) -> dict[str, Any]:
    """Fit a model, and measure the distance of its draws from the exact ones.

    :param patience: seconds up to which chains go on that have not converged.
    """
    policy = FitPolicy(budget=replace(FitPolicy().budget, patient_seconds=patience))
    model = CASES[name]().model
    target = Target(model, sample_discrete=True)
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fit(model, "auto", seed=seed, progress=False, policy=policy)
    seconds = time.process_time() - began
    refined = result.refined
    draws = target.unconstrain(result.sample(NUM_DRAWS))
    found = measure(draws, reference_of(name, target))
    return {
        "model": name,
        "split": "look" if name in LOOK else "score only",
        "seed": seed,
        "patience": patience,
        "verdict": result.diagnose().verdict,
        "cpu_seconds": seconds,
        "way": "sum" if refined is None else "chains",
        **({} if refined is None else chains_of(refined)),
        **found,
    }


def chains_of(refined: Refined) -> dict[str, Any]:
    return {
        "stopped": refined.stopped,
        "r_hat": refined.drift.r_hat,
        "gradients": refined.num_gradients,
        "moves": refined.moves,
    }


def report() -> None:
    """Write the page of all records."""
    rows, records = [], read_records(OUT)
    for name in (*LOOK, *SCORE_ONLY):
        own = [one for one in records if one["model"] == name]
        if not own:
            continue
        digits = {"ratio": 2, "worst_ratio": 2, "r_hat": 2, "cpu_seconds": 0}
        columns = [
            spread([one[key] for one in own if key in one], places, none="")
            for key, places in digits.items()
        ]
        columns.insert(0, ", ".join(sorted({one.get("way", "chains") for one in own})))
        verdicts = ", ".join(sorted({one["verdict"] for one in own}))
        rows.append([name, own[0]["split"], str(len(own)), *columns, verdicts])
    head = [
        "model",
        "split",
        "seeds",
        "way",
        "ratio",
        "worst coordinate",
        "R-hat",
        "CPU s",
        "verdict",
    ]
    text = ["# Discrete latent variables", __doc__.split("\n\n", 1)[1], markdown_table(head, rows)]
    write_page(OUT, "\n\n".join(text))


def main() -> None:
    """Run the models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*LOOK, *SCORE_ONLY], choices=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--patience", type=float, default=120.0, help="as of fit: 120 s")
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args()
    for name in [] if options.report else options.models:
        for seed in options.seeds:
            found = run(name, seed, options.patience)
            append_record(OUT, found | environment("cpu"))
            print(found, flush=True)
    report()


if __name__ == "__main__":
    main()
