# SPDX-License-Identifier: Apache-2.0
"""Does ``refine`` stop too early?

Run ``refine`` from poor initial draws (a mean-field Gaussian in unconstrained space with half the
width, half a standard deviation off) on targets with known moments, and count how often it reports
"converged" while a mean is off by more than .1 posterior sd or an sd by more than 10 %, beyond
three Monte Carlo standard errors (of the independent chains)::

    python -m benchmarks.refine_stopping --seeds 20
    python -m benchmarks.refine_stopping --targets funnel-centred --seeds 2
    python -m benchmarks.refine_stopping --report

Each run adds one line to ``--out``; runs that have a line are skipped.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    markdown_table,
    read_records,
    run_and_report,
    run_missing,
)
from pyro_implicit.density import Target
from pyro_implicit.mcmc import refine

Draws = dict[str, Tensor]
NUM_TRUTH = 200_000


class Case(NamedTuple):
    """A model and its exact draws, ``(num_draws, *site_shape)`` by site."""

    model: Callable[[], None]
    truth: Callable[[int], Draws]


def gaussian(dim: int, condition: float) -> Case:
    """A Gaussian with random axes and a covariance of condition number ``condition``."""
    generator = torch.Generator().manual_seed(dim)
    axes = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
    factor = axes * torch.logspace(0, -0.5 * math.log10(condition), dim)
    normal = dist.MultivariateNormal(torch.zeros(dim), factor @ factor.T)
    return Case(lambda: pyro.sample("x", normal), lambda n: {"x": normal.sample((n,))})


def funnel(centred: bool, sd: float = 1.5, dim: int = 9) -> Case:
    def model() -> None:
        v = pyro.sample("v", dist.Normal(torch.tensor(0.0), sd))
        scale = (v / 2).exp() if centred else torch.ones(())
        pyro.sample("x", dist.Normal(torch.zeros(dim), scale.unsqueeze(-1)).to_event(1))

    def truth(n: int) -> Draws:
        v, x = sd * torch.randn(n), torch.randn(n, dim)
        return {"v": v, "x": x * (v / 2).exp().unsqueeze(-1) if centred else x}

    return Case(model, truth)


def banana() -> Case:
    normal = dist.MultivariateNormal(torch.zeros(2), torch.tensor([[1.0, 0.9], [0.9, 1.0]]))

    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 100.0).to_event(1))
        first, second = x.unbind(-1)
        pyro.factor("y", normal.log_prob(torch.stack([first, second + first**2 + 1], -1)))

    def truth(n: int) -> Draws:
        first, second = normal.sample((n,)).unbind(-1)
        return {"x": torch.stack([first, second - first**2 - 1], -1)}

    return Case(model, truth)


def regression(rows: int = 40, dim: int = 5) -> Case:
    """A conjugate regression with correlated columns."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, dim, generator=generator).cumsum(-1)
    y = x.sum(-1) + torch.randn(rows, generator=generator)

    def model() -> None:
        weight = pyro.sample("weight", dist.Normal(torch.zeros(dim), 3.0).to_event(1))
        pyro.sample("y", dist.Normal(x @ weight, 1.0).to_event(1), obs=y)

    precision = x.T @ x + torch.eye(dim) / 9
    posterior = dist.MultivariateNormal(
        torch.linalg.solve(precision, x.T @ y), precision_matrix=precision
    )
    return Case(model, lambda n: {"weight": posterior.sample((n,))})


def single(distribution: Any) -> Case:
    return Case(lambda: pyro.sample("x", distribution), lambda n: {"x": distribution.sample((n,))})


def rates() -> Case:
    """Five Poisson counts with their conjugate gamma rates."""
    counts = torch.tensor([0.0, 1.0, 3.0, 8.0, 20.0])

    def model() -> None:
        rate = pyro.sample("rate", dist.Gamma(torch.ones(5), 0.5).to_event(1))
        pyro.sample("count", dist.Poisson(rate).to_event(1), obs=counts)

    posterior = dist.Gamma(1 + counts, torch.tensor(1.5))
    return Case(model, lambda n: {"rate": posterior.sample((n,))})


TARGETS: dict[str, Callable[[], Case]] = {
    "gaussian-2": lambda: gaussian(2, 1e2),
    "gaussian-10": lambda: gaussian(10, 1e4),
    "gaussian-30": lambda: gaussian(30, 1e3),
    "funnel-non-centred": lambda: funnel(centred=False),
    "funnel-centred": lambda: funnel(centred=True),
    "banana": banana,
    "regression": regression,
    "rates": rates,
    "beta": lambda: single(dist.Beta(torch.tensor(1.5), 4.0)),
    "student": lambda: single(dist.StudentT(torch.tensor(5.0))),
}


def poor_start(density: Target, truth: Draws, num_chains: int) -> Draws:
    """Independent normals in unconstrained space, too narrow and shifted."""
    latent = density.unconstrain({name: value[:10_000] for name, value in truth.items()})
    sd = latent.std(0)
    noise = torch.randn(num_chains, latent.shape[-1])
    return density.constrain(latent.mean(0) + sd * (0.5 + 0.5 * noise))


def run(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    pyro.set_rng_seed(seed)
    target = TARGETS[name]()
    truth, density = target.truth(NUM_TRUTH), Target(target.model)
    start = poor_start(density, truth, args.chains)
    clock = time.process_time()
    result = refine(
        target.model,
        start,
        num_chains=args.chains,
        max_gradients=args.max_gradients,
        progress=False,
    )
    clock = time.process_time() - clock
    exact = density.unconstrain(truth)
    samples = result.get_samples(group_by_chain=True)
    latent = density.unconstrain({k: v.flatten(0, 1) for k, v in samples.items()})
    latent = latent.unflatten(0, (args.chains, -1))
    standard = (latent - exact.mean(0)) / exact.std(0)
    bias = standard.mean((0, 1))
    error = standard.mean(1).std(0) / math.sqrt(args.chains)
    centred = (standard - bias).square()
    sd_bias = centred.mean((0, 1)).sqrt() - 1
    sd_error = 0.5 * centred.mean(1).std(0) / math.sqrt(args.chains)
    return {
        "stopped": result.stopped,
        "gradients": result.num_gradients,
        "failed": result.failed,
        "cpu_seconds": clock,
        "mean_error": bias.abs().max().item(),
        "sd_error": sd_bias.abs().max().item(),
        "wrong": bool(
            (bias.abs() - 3 * error > 0.1).any() or (sd_bias.abs() - 3 * sd_error > 0.1).any()
        ),
    }


def report(path: Path) -> str:
    """Return the Markdown table of the records."""
    groups = defaultdict(list)
    for record in read_records(path):
        groups[record["target"]].append(record)
    rows, early, total, finished, raw = [], 0, 0, 0, 0
    for name, runs in groups.items():
        done = [run for run in runs if run["stopped"] == "converged"]
        wrong = sum(run["wrong"] for run in done)
        early, total = early + wrong, total + len(runs)
        finished += len(done)
        raw += sum(max(run["mean_error"], run["sd_error"]) > 0.1 for run in done)
        rows.append(
            [
                name,
                f"{len(done)} of {len(runs)}",
                str(wrong),
                f"{mean(run['gradients'] for run in runs):.0f}",
                f"{mean(run['cpu_seconds'] for run in runs):.1f}",
                f"{max(run['mean_error'] for run in runs):.3f}",
                f"{max(run['sd_error'] for run in runs):.3f}",
            ]
        )
    header = ["target", "converged", "too early", "gradients", "CPU s", "worst mean", "worst sd"]
    return (
        markdown_table(header, rows)
        + f"\n{early} of {total} runs stopped too early: a mean off by more than .1 sd or an sd by "
        "more than 10 %,\nbeyond three Monte Carlo standard errors; without this allowance, "
        f"{raw} runs. {finished} of {total} runs converged, the\nothers used their budget. Worst "
        "mean and sd are the largest errors of all runs, in posterior sds.\n\n"
        "To reproduce: `python -m benchmarks.refine_stopping --seeds 20`.\n"
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--seeds", type=int, default=20, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--chains", type=int, default=256)
    parser.add_argument("--max-gradients", type=int, default=4000)
    add_output_arguments(parser, RESULTS / "refine_stopping.jsonl")
    return parser


def run_all(args: argparse.Namespace) -> None:
    settings = {"chains": args.chains, "max_gradients": args.max_gradients}
    keys = (
        {"target": name, "seed": seed} | settings
        for seed in range(args.seeds)
        for name in args.targets
    )
    run_missing(args.out, keys, lambda key: run(key["target"], key["seed"], args))


def main(args: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)
    run_and_report(args, run_all, report)


if __name__ == "__main__":
    main(parser().parse_args())
