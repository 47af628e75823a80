# SPDX-License-Identifier: Apache-2.0
"""Gain from ``InjectiveELBO(path_derivative=...)``: "auto" compared with all and none of the path.

Each line is the ELBO of 2,000 draws after a short training on one model with one seed, with a frame
and without; without a frame, initial guides are far too narrow or wide::

    python -m benchmarks.path_share
    python -m benchmarks.path_share --report
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from statistics import mean
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    append_record,
    cosine_adam,
    environment,
    fit,
    markdown_table,
    missing_runs,
    read_records,
    write_page,
)
from benchmarks.refine_ess import MODELS
from pyro_implicit import AutoImplicit, AutoregressiveGenerator, InjectiveELBO, ResidualGenerator

SHARES: tuple[Any, ...] = (True, False, "auto")


def gaussian() -> tuple[Callable[[], None], dict[str, Any]]:
    """Twenty correlated latent variables."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(20, 20, generator=generator)
    covariance = root @ root.T / 20 + 0.1 * torch.eye(20)

    def model() -> None:
        pyro.sample("x", dist.MultivariateNormal(torch.zeros(20), covariance))

    return model, {}


def residual(size: int) -> ResidualGenerator:
    return ResidualGenerator(size, core_dim=20)


CASES: dict[str, tuple[Callable, Callable]] = {
    "gaussian": (gaussian, AutoregressiveGenerator),
    "eight schools": (MODELS["eight schools"], AutoregressiveGenerator),
    "toy": (MODELS["toy"], residual),
    "counts": (MODELS["counts"], residual),
}


def run(name: str, frame: str | None, path: Any, seed: int, steps: int) -> dict[str, Any]:
    """Return the final negative ELBO and the last share."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    make, generator = CASES[name]
    model, data = make()
    guide = AutoImplicit(model, generator, frame=frame)
    elbo = InjectiveELBO(8, path_derivative=path)
    fit(SVI(model, guide, cosine_adam(0.01, steps), elbo), steps, *data.values())
    loss = InjectiveELBO(2000).loss(model, guide, *data.values())
    return {"loss": loss, "shares": elbo.path_weights}


def report(records: list[dict[str, Any]]) -> str:
    """Return one row for each model and frame."""
    rows = []
    present = {(r["model"], r["frame"]) for r in records}
    for name, frame in product(CASES, ("auto", None)):
        if (name, frame) not in present:
            continue
        cells = [name, "yes" if frame else "no"]
        for path in SHARES:
            found = [
                r["loss"]
                for r in records
                if (r["model"], r["frame"]) == (name, frame) and r["path"] == path
            ]
            cells.append(f"{mean(found):.2f} ({min(found):.2f} to {max(found):.2f})")
        rows.append(cells)
    header = ["model", "frame", "path", "plain", '"auto"']
    return markdown_table(header, rows) + (
        "\nNegative ELBOs, means over seeds (and ranges); eight particles, cosine learning rate "
        "from 0.01.\nToy and counts use ResidualGenerator, the others AutoregressiveGenerator.\n\n"
        "To reproduce: `python -m benchmarks.path_share`.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    add_output_arguments(parser, RESULTS / "path_share.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = ("model", "frame", "path", "seed", "steps")
    runs = product(CASES, ("auto", None), SHARES, range(args.seeds), [args.steps])
    keys = [dict(zip(names, one, strict=True)) for one in runs]
    for key in missing_runs(args.out, [] if args.report else keys):
        append_record(args.out, key | run(*key.values()) | environment("cpu"))
    write_page(args.out, report(read_records(args.out)))


if __name__ == "__main__":
    main()
