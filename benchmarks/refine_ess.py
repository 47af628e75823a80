# SPDX-License-Identifier: Apache-2.0
"""Effective draws per CPU second: ``refine`` compared with NUTS of Pyro and of NumPyro.

Eight schools (non-centred), a hierarchical Poisson regression of 203 latents (``refine_models.py``)
and the four-class toy network of 184 weights (``toy_classification.py``)::

    python -m benchmarks.refine_ess --numpyro /path/to/venv/bin/python
    python -m benchmarks.refine_ess --report

NumPyro runs in a separate environment (``pip install numpyro 'jax<0.8' 'jaxlib<0.8'``), twice in
one process: with its compilation and without. Each run adds one line to ``--out``; runs that have a
line are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, SVI
from pyro.infer.autoguide import AutoNormal
from pyro.ops.stats import effective_sample_size
from torch import Tensor

from benchmarks import refine_toy, toy_classification
from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    cosine_adam,
    fit,
    markdown_table,
    read_records,
    run_and_report,
    run_missing,
)
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import refine

OUT = RESULTS / "refine_ess.jsonl"
Draws = dict[str, Tensor]
Data = dict[str, Tensor]
METHODS = ("refine", "Pyro NUTS", "NumPyro NUTS")


def schools() -> tuple[Callable[..., None], Data]:
    effect = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    error = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def model(effect: Tensor, error: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", 8):
            eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(mu + tau * eta, error), obs=effect)

    return model, {"effect": effect, "error": error}


def counts(num_groups: int = 200, rows: int = 5) -> tuple[Callable[..., None], Data]:
    """The model of ``refine_models.py``, with its data."""
    generator = torch.Generator().manual_seed(1)
    intercept = 1.0 + 0.6 * torch.randn(num_groups, 1, generator=generator)
    x = torch.randn(num_groups, rows, generator=generator)
    y = torch.poisson((intercept + 0.3 * x).exp(), generator=generator)

    def model(x: Tensor, y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        effect = pyro.sample("effect", dist.Normal(torch.zeros(len(x)), 1.0).to_event(1))
        log_rate = mean + scale * effect.unsqueeze(-1) + slope * x
        pyro.sample("y", dist.Poisson(log_rate.exp()).to_event(2), obs=y)

    return model, {"x": x, "y": y}


def toy() -> tuple[Callable[..., None], Data]:
    x, y = toy_classification.make_data(toy_classification.NUM_TRAIN, seed=0)
    return toy_classification.model, {"x": x, "y": y}


MODELS: dict[str, Callable[[], tuple[Callable[..., None], Data]]] = {
    "eight schools": schools,
    "counts": counts,
    "toy": toy,
}


def smallest(name: str, draws: dict[str, Any]) -> float:
    """Return the smallest effective sample size of a mean, for draws ``(num_chains, num_draws,
    *shape)``; for the toy, whose weights are not identified, that of a predicted probability."""
    draws = {key: torch.as_tensor(np.asarray(value)) for key, value in draws.items()}
    if name == "toy":
        grid = toy_classification.make_grid(5)
        draws = {"probability": toy_classification.logits(draws["theta"], grid).softmax(-1)}
    sizes = []
    for value in draws.values():
        value = value.double().reshape(*value.shape[:2], -1)
        sizes.append(effective_sample_size(value, chain_dim=0, sample_dim=1).min().item())
    return min(sizes)


def run_refine(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    model, data = MODELS[name]()
    clock = time.process_time()
    guide = AutoNormal(model)
    loss = ImplicitELBO(8)
    fit(SVI(model, guide, cosine_adam(0.02, args.steps), loss), args.steps, *data.values())
    options = {"max_gradients": args.max_gradients, "max_draws": 1000, "progress": False}
    if name == "toy":
        options["quantities"] = refine_toy.probabilities
    result = refine(model, guide, *data.values(), seed=seed, **options)
    seconds = time.process_time() - clock
    found = smallest(name, result.get_samples(group_by_chain=True))
    return {"ess": found, "cpu_seconds": seconds, "stopped": result.stopped}


def run_pyro(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    model, data = MODELS[name]()
    clock = time.process_time()
    kernel = NUTS(model, jit_compile=False)
    mcmc = MCMC(kernel, args.draws, warmup_steps=args.warmup, disable_progbar=True)
    mcmc.run(*data.values())
    seconds = time.process_time() - clock
    return {"ess": smallest(name, mcmc.get_samples(group_by_chain=True)), "cpu_seconds": seconds}


def run_numpyro(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    data = {key: value.numpy() for key, value in MODELS[name]()[1].items()}
    script = Path(__file__).with_name("refine_ess_numpyro.py")
    threads = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "data.npz", **data)
        words = [name, str(seed), str(args.warmup), str(args.draws), folder]
        environ = {**os.environ, "XLA_FLAGS": threads, "PYTHONPATH": ""}
        subprocess.run([str(args.numpyro), str(script), *words], check=True, env=environ)
        record = json.loads((Path(folder) / "record.json").read_text())
        record["ess"] = smallest(name, dict(np.load(Path(folder) / "draws.npz")))
    return record


RUNS = {"refine": run_refine, "Pyro NUTS": run_pyro, "NumPyro NUTS": run_numpyro}


def report(path: Path) -> str:
    rows = []
    for r in read_records(path):
        cells = [f"{r['ess']:.0f}", f"{r['cpu_seconds']:.1f}", f"{r['ess'] / r['cpu_seconds']:.1f}"]
        if "run_seconds" in r:
            cells[1] += f" ({r['run_seconds']:.1f} compiled)"
            cells[2] += f" ({r['ess'] / r['run_seconds']:.1f})"
        rows.append([r["model"], r["method"], *cells, r.get("stopped", "")])
    header = ["model", "method", "smallest ESS", "CPU s", "ESS by CPU s", "stopped"]
    return markdown_table(header, rows) + "\n" + NOTE


NOTE = """Effective sample size of the mean of the worst latent variable (for the toy, of the worst
of 100 predicted probabilities), by `pyro.ops.stats`, per CPU second, including warm-up. `refine`:
an `AutoNormal` trained for 500 steps with 8 particles, whose time is included, and 256 chains that
stop at convergence or after 1,000 gradients. NUTS: one chain of 300 + 500 transitions; for NumPyro,
the value in brackets excludes compilation. The toy has several modes: differences between the modes
of 256 chains count against `refine`, while one chain of NUTS does not see them. The machine ran
several times as many jobs as it has cores, which increases all CPU times except that of `refine` on
the toy.

To reproduce: `python -m benchmarks.refine_ess --numpyro PYTHON`.
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--numpyro", type=Path, help="the python of its environment")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--steps", type=int, default=500, help="of the guide of refine")
    parser.add_argument("--max-gradients", type=int, default=1000)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--draws", type=int, default=500)
    add_output_arguments(parser, OUT)
    return parser


def run_all(args: argparse.Namespace) -> None:
    names = ["steps", "max_gradients", "warmup", "draws"]
    settings = {name: getattr(args, name) for name in names}
    methods = args.methods
    if args.numpyro is None:
        print("NumPyro is left out: --numpyro names the python of its environment")
        methods = [method for method in methods if method != "NumPyro NUTS"]
    keys = (
        {"model": model, "method": method, "seed": seed} | settings
        for seed in range(args.seeds)
        for model in args.models
        for method in methods
    )

    def work(key: dict[str, Any]) -> dict[str, Any]:
        pyro.clear_param_store()
        pyro.set_rng_seed(key["seed"])
        return RUNS[key["method"]](key["model"], key["seed"], args)

    run_missing(args.out, keys, work)


if __name__ == "__main__":
    run_and_report(parser().parse_args(), run_all, report)
