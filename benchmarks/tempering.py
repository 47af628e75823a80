# SPDX-License-Identifier: Apache-2.0
"""Weights of separate modes by ``fit`` and ``refine(temper=True)``, compared with exact weights.

::

    python -m benchmarks.tempering --seeds 0 1 2 --out results/tempering.jsonl

- ``curved``: two curves of weights .7 and .3 in the plane, 24 sds of their noise apart
- ``four``: four normals of weights .4, .3, .2 and .1 and sds 1, .5, 2 and 1
- ``gmm40``: forty unit normals of equal weights (:mod:`benchmarks.targets`)
- ``pair_2``, ``pair_10``, ``pair_50``: two unit normals of weights .9 and .1, 20 sds apart
- ``switching``: a mixture of three normals with 90 data and exchangeable labels: six equal modes
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from benchmarks.common import RESULTS, append_record, environment
from benchmarks.targets import gmm40_centers, make_target
from pyro_implicit import fit
from pyro_implicit.mcmc import refine

Model = Callable[[], object]
CORNERS = torch.tensor([[-6.0, -6.0], [6.0, -6.0], [-6.0, 6.0], [6.0, 6.0]])


def _normals(loc: Tensor, scale: Tensor, weights: list[float]) -> Model:
    log_weights = torch.tensor(weights).log()

    def model() -> None:
        anywhere = dist.Normal(torch.zeros_like(loc[0]), 8.0).to_event(1)
        x = pyro.sample("x", anywhere.mask(False))
        parts = dist.Normal(loc, scale.unsqueeze(-1)).to_event(1).log_prob(x)
        pyro.factor("modes", (log_weights + parts).logsumexp(-1))

    return model


def _pair(dim: int) -> Model:
    loc = torch.zeros(2, dim)
    loc[:, 0] = torch.tensor([-10.0, 10.0])
    return _normals(loc, torch.ones(2), [0.9, 0.1])


def _curved() -> None:
    anywhere = dist.Normal(torch.zeros(2), 8.0).to_event(1)
    x = pyro.sample("x", anywhere.mask(False))
    middle = 12 - 0.3 * x[0] ** 2
    across = [dist.Normal(sign * middle, 0.5).log_prob(x[1]) for sign in (1, -1)]
    parts = [math.log(weight) + part for weight, part in zip((0.7, 0.3), across, strict=True)]
    along = dist.Normal(0.0, 2.0).log_prob(x[0])
    pyro.factor("curves", along + torch.stack(parts).logsumexp(0))


def _switching() -> Model:
    generator = torch.Generator().manual_seed(3)
    group = torch.randint(3, (90,), generator=generator)
    y = torch.tensor([-3.0, 0.0, 3.5])[group] + 0.7 * torch.randn(90, generator=generator)

    def model() -> None:
        with pyro.plate("components", 3):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            sd = pyro.sample("sd", dist.LogNormal(-0.3, 0.5))
        weights = pyro.sample("weights", dist.Dirichlet(torch.full((3,), 3.0)))
        mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(mu, sd))
        with pyro.plate("data", 90):
            pyro.sample("y", mixture, obs=y)

    return model


def _shares(label: Tensor, number: int) -> Tensor:
    return label.bincount(minlength=number) / len(label)


def _order(draws: dict[str, Tensor]) -> Tensor:
    code = draws["mu"].argsort(-1) @ torch.tensor([9, 3, 1])
    return torch.searchsorted(torch.tensor([5, 7, 11, 15, 19, 21]), code)


def _near(centres: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda draws: torch.cdist(draws["x"], centres).argmin(-1)


PROBLEMS = {
    "curved": (_curved, lambda draws: (draws["x"][:, 1] < 0).long(), [0.7, 0.3]),
    "four": (
        _normals(CORNERS, torch.tensor([1.0, 0.5, 2.0, 1.0]), [0.4, 0.3, 0.2, 0.1]),
        _near(CORNERS),
        [0.4, 0.3, 0.2, 0.1],
    ),
    "gmm40": (make_target("gmm40").model, _near(gmm40_centers()), [1 / 40] * 40),
    "switching": (_switching(), _order, [1 / 6] * 6),
    **{
        f"pair_{dim}": (_pair(dim), lambda draws: (draws["x"][:, 0] > 0).long(), [0.9, 0.1])
        for dim in (2, 10, 50)
    },
}


def run(name: str, method: str, seed: int) -> dict[str, object]:
    """Return CPU seconds and the largest error of a weight, in 20,000 draws of the result."""
    model, label, weights = PROBLEMS[name]
    pyro.clear_param_store()
    began = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if method == "fit":
            result = fit(model, "auto", seed=seed, progress=False)
            refined, draws = result.refined, result.sample(20_000)
        else:
            refined = refine(model, AutoNormal(model), temper=True, seed=seed, progress=False)
            draws = refined.get_samples()
    seconds = time.process_time() - began
    record = {"problem": name, "method": method, "seed": seed, "cpu_seconds": seconds}
    shares = _shares(label(draws), len(weights))
    record["error"] = (shares - torch.tensor(weights)).abs().max().item()
    record["stopped"] = refined.stopped if refined else "corrected"
    record["warnings"] = [str(one.message) for one in caught]
    if refined is not None and refined.weights is not None:
        found = refined.weights
        record["modes"] = len(found.weights)
        record["stated_error"] = found.errors.max().item()
        record["log_evidence"] = [found.log_evidence, found.log_evidence_error]
    if method == "fit":
        began = time.process_time()
        record["verdict"] = result.diagnose().verdict
        record["diagnosis_cpu_seconds"] = time.process_time() - began
    return record


def main() -> None:
    """Run problems with both methods, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--methods", nargs="+", default=["fit", "temper"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS / "tempering.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.problems:
        for method in options.methods:
            for seed in options.seeds:
                record = run(name, method, seed) | environment("cpu")
                append_record(options.out, record)
                keys = ("problem", "method", "seed", "cpu_seconds", "error", "stopped", "verdict")
                print(*(record.get(key, "") for key in keys), flush=True)


if __name__ == "__main__":
    main()
