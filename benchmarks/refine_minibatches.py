# SPDX-License-Identifier: Apache-2.0
"""Accuracy of minibatch chains of ``refine``, and of their automatic step size.

``regression``: a conjugate regression of 1,000 rows and 10 correlated columns, in minibatches of
50; 256 chains of 1,000 steps from a mean-field Gaussian (half a posterior sd off) compared with the
closed form, at the automatic step size and at multiples of it. ``digits``: a network of 2,410
weights on scikit-learn's digits, 1,200 images in minibatches of 100; guides before and after 8
chains of 1,200 steps, on 597 other images::

    python -m benchmarks.refine_minibatches --seeds 1
    python -m benchmarks.refine_minibatches --parts regression
    python -m benchmarks.refine_minibatches --report

Each part and seed adds its lines to ``--out`` when it is done; parts that have lines are skipped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    append_record,
    cosine_adam,
    environment,
    fit,
    markdown_table,
    read_records,
    write_page,
)
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.mcmc import Refined, refine_by_minibatches
from pyro_implicit.nn import to_bayesian_

ROWS, COLUMNS, BATCH = 1000, 10, 50
CHAINS = 256
FACTORS = (1.0, 0.25, 4.0, 16.0)
IMAGES = 1200
PRIOR = 0.5


def regression(seed: int) -> Iterator[dict[str, Any]]:
    """Run the chains at all step sizes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(ROWS, COLUMNS) + normal(ROWS, 1)
    y = x.sum(-1) + normal(ROWS)
    precision = x.T @ x + torch.eye(COLUMNS)
    center, covariance = torch.linalg.solve(precision, x.T @ y), torch.linalg.inv(precision)
    sd = covariance.diagonal().sqrt()

    def model(x: Tensor, y: Tensor) -> None:
        weight = pyro.sample("weight", dist.Normal(x.new_zeros(COLUMNS), 1.0).to_event(1))
        with pyro.plate("rows", ROWS, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ weight, 1.0), obs=y)

    start = center + 0.5 * sd + normal(1000, COLUMNS) / precision.diagonal().sqrt()
    loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True)
    found = 0.0
    for factor in FACTORS:
        clock = time.process_time()
        key = {"part": "regression", "seed": seed, "kernel": "sghmc", "factor": factor}
        try:
            result = refine_by_minibatches(
                model,
                {"weight": start},
                batches=loader,
                num_chains=CHAINS,
                max_epochs=50,
                step_size=None if factor == 1 else factor * found,
                seed=seed,
                progress=False,
            )
        except RuntimeError:
            yield key | {"step": factor * found, "diverged": True}
            continue
        found = found or result.step_size
        weight = result.get_samples()["weight"]
        standard = (weight - center) @ torch.linalg.cholesky(precision)
        yield (
            key
            | describe(result)
            | {
                "mean_bias": ((weight.mean(0) - center) / sd).abs().max().item(),
                "sd_bias": (weight.std(0) / sd - 1).abs().max().item(),
                "variance_bias": (standard.T.cov().diagonal().mean() - 1).item(),
                "cpu_seconds": time.process_time() - clock,
            }
        )


def describe(result: Refined) -> dict[str, Any]:
    """Return the statistics of the chains."""
    choice = result.choice
    assert choice is not None
    return {
        "step": choice.step_size,
        "limit": choice.limit,
        "heat": choice.heat,
        "relaxations": choice.relaxations,
        "temperature": result.temperature,
    }


def digits(seed: int) -> Iterator[dict[str, Any]]:
    """Evaluate guides before and after refinement."""
    pyro.set_rng_seed(seed)
    data = load_digits()
    order = torch.randperm(len(data.target))
    x = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    y = torch.tensor(data.target)[order]
    loader = DataLoader(TensorDataset(x[:IMAGES], y[:IMAGES]), 100, shuffle=True)
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    net = to_bayesian_(nn.Sequential(*layers), PRIOR)

    def model(x: Tensor, y: Tensor | None = None) -> None:
        logits = net(x)
        with pyro.plate("rows", IMAGES, subsample_size=len(x)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    for name, guide in {
        "MAP": AutoDelta(model),
        "mean field": AutoNormal(model, init_scale=0.02),
    }.items():
        clock = time.process_time()
        draws = draws_of(guide, model, x, y)
        key = {"part": "digits", "seed": seed, "start": name}
        seconds = {"cpu_seconds": time.process_time() - clock}
        yield key | {"kernel": ""} | seconds | score([draws], x, y)
        clock = time.process_time()
        result = refine_by_minibatches(
            model,
            draws,
            batches=loader,
            max_epochs=100,
            max_draws=40,
            seed=seed,
            progress=False,
        )
        seconds = {"cpu_seconds": time.process_time() - clock}
        found = score(result.stream(64), x, y)
        yield key | {"kernel": "sghmc"} | describe(result) | seconds | found


def draws_of(guide: Any, model: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """A hundred draws of a guide after training on minibatches; one draw of a point estimate."""
    pyro.clear_param_store()
    steps = 1500
    loss = Trace_ELBO()
    svi = SVI(model, guide, cosine_adam(0.01, steps), loss)
    for _ in range(steps):
        rows = torch.randperm(IMAGES)[:100]
        fit(svi, 1, x[rows], y[rows])
    return draw(guide, 1 if isinstance(guide, AutoDelta) else 100, x[:100], y[:100])


def score(stream: Any, x: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy and negative log-likelihood of the mean prediction on held-out rows."""
    x, y, total, count = x[IMAGES:], y[IMAGES:], torch.zeros(()), 0
    for draws in stream:
        hidden = (x @ draws["0.weight"].mT + draws["0.bias"].unsqueeze(-2)).relu()
        logits = hidden @ draws["2.weight"].mT + draws["2.bias"].unsqueeze(-2)
        total, count = total + logits.softmax(-1).sum(0), count + len(logits)
    probability = total / count
    nll = -probability.gather(-1, y.unsqueeze(-1)).log().mean().item()
    return {"accuracy": (probability.argmax(-1) == y).float().mean().item(), "nll": nll}


def report(path: Path) -> str:
    """Return the Markdown tables of the records."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for run in read_records(path):
        names = ("part", "kernel", "factor") if run["part"] == "regression" else ()
        names = names or ("part", "start", "kernel")
        groups.setdefault(tuple(run[name] for name in names), []).append(run)

    def average(runs: list[dict[str, Any]], name: str, form: str) -> str:
        values = [run[name] for run in runs if run.get(name) is not None]
        return format(mean(values), form) if values else ""

    columns = {
        "step": ".3g", "heat": ".3f", "variance_bias": ".3f", "mean_bias": ".3f",
        "sd_bias": ".3f", "temperature": ".3f", "relaxations": ".1f", "cpu_seconds": ".0f",
    }  # fmt: skip
    first = []
    for key, runs in sorted((k, r) for k, r in groups.items() if k[0] == "regression"):
        bold = "**" if key[2] == 1 else ""
        note = runs[0].get("limit", "diverged") if key[2] == 1 or "diverged" in runs[0] else ""
        cells = [average(runs, name, form) for name, form in columns.items()]
        first.append([f"{bold}{key[1]}, {key[2]:g} x{bold}", note, *cells])
    columns = {
        "accuracy": ".4f", "nll": ".4f", "step": ".3g", "heat": ".2f", "relaxations": ".1f",
        "cpu_seconds": ".0f",
    }  # fmt: skip
    second = [
        [key[1], key[2] or "as it is", runs[0].get("limit", "")]
        + [average(runs, name, form) for name, form in columns.items()]
        for key, runs in groups.items()
        if key[0] == "digits"
    ]
    header = ["kernel, step", "bounded by", "step", "heat expected", "variances", "worst mean"]
    header += ["worst sd", "temperature", "relaxations", "CPU s"]
    tables = markdown_table(header, first) + "\n"
    tables += (
        "Variances: relative excess, mean over the directions of the standardised posterior. Means "
        "and sds: the largest\nerror of the ten, in posterior sds. The automatic step is in bold; "
        "the others are multiples of it.\n\n"
    )
    header = ["start", "refined by", "bounded by", "accuracy", "NLL", "step", "heat"]
    tables += markdown_table([*header, "relaxations", "CPU s"], second) + "\n"
    return tables + (
        "The weights have the prior N(0, 0.25). Each chain takes 1,200 steps with an automatic "
        "step size.\n\n"
        "To reproduce: `python -m benchmarks.refine_minibatches --seeds 1`.\n"
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 to SEEDS - 1")
    add_output_arguments(parser, RESULTS / "refine_minibatches.jsonl")
    return parser


PARTS = {"regression": regression, "digits": digits}


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if not args.report:
        machine, done = environment("cpu"), read_records(args.out)
        for part in args.parts:
            for seed in range(args.seeds):
                if any((run["part"], run["seed"]) == (part, seed) for run in done):
                    continue
                records = list(tqdm(PARTS[part](seed), desc=f"{part} {seed}", unit="run"))
                for record in records:
                    append_record(args.out, record | machine)
    write_page(args.out, report(args.out))


if __name__ == "__main__":
    main(parser().parse_args())
