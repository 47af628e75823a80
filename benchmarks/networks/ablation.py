# SPDX-License-Identifier: Apache-2.0
"""Kernels of chains of a network on airfoil, at equal gradients from one ensemble.

Network, data and scores are those of ``tabular.py``, on split 1 of airfoil. Each line is one kernel
with ten chains, after an ensemble of 1,500 steps::

    python -m benchmarks.networks.ablation --data-dir DIR --gradients 1500

A gradient of SGHMC is that of a minibatch of 120 rows, a ninth of the data.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    markdown_table,
    read_records,
    run_missing,
    write_page,
)
from benchmarks.networks.tabular import Data, load, make_model
from pyro_implicit import AutoEnsemble, fit, refine
from pyro_implicit.fitting import FitPolicy, NetworkPolicy, Schedule
from pyro_implicit.guides import init_to_shuffled
from pyro_implicit.mcmc import refine_by_minibatches
from pyro_implicit.mcmc.policy import DEFAULT
from pyro_implicit.nn import NetworkModel, predict, start_values

NOTE = """SGHMC has minibatches of 120 rows. With 1,500 gradients the warm-up ends before
a preconditioner is learnt. The rows with 4,000 gradients are of a scratch script with the same
settings.

The library has no microcanonical kernel for minibatches. A scratch script ran one for 40 CPU
seconds from the same ensemble, one seed, with minibatches of 256 rows and one gradient per step.
Its coordinates are divided by the standard deviations of minibatches' gradients, as in SMILE
(arXiv 2602.06500). Its step sizes were compared on these test rows:

| chains | RMSE | NLL |
| :-- | --: | --: |
| microcanonical, minibatches, the best of three step sizes | 0.182 | -0.453 |
| the same without division, the same step size | 0.220 | -0.095 |
| the same in the frame of SGHMC, the best of two step sizes | 0.216 | -0.331 |
| the same with friction and step size as SGHMC chooses them | 0.224 | -0.292 |
| SGHMC, step size 0.008 | 0.229 | -0.278 |
| MCLMC with all data, as in fit | 0.143 | -0.696 |

An ensemble that trains for 31 s reaches 0.208 and -0.402 on this split, and for 116 s 0.198 and
-0.490 (`networks_tabular.jsonl`). The kernel needs a rule for its step size: SGHMC's hardly moves
it, and half of the leapfrog integrator's limit of stability predicts worse (0.201, 0.108).

To reproduce: `python -m benchmarks.networks.ablation --gradients 1500`.
"""
LONG = replace(DEFAULT.mclmc, energy_error=NetworkPolicy().energy_error)
KERNELS: dict[str, dict[str, Any]] = {
    "ensemble only": {},
    "MCLMC, as in fit": {"kernel": "mclmc", "policy": replace(DEFAULT, mclmc=LONG)},
    "MCLMC, from one member": {"kernel": "mclmc", "policy": replace(DEFAULT, mclmc=LONG)},
    "MCLMC, no preconditioner": {
        "kernel": "mclmc",
        "policy": replace(DEFAULT, mclmc=replace(LONG, max_scale=1.0)),
    },
    "MCLMC, short steps": {"kernel": "mclmc"},
    "MAMS": {"kernel": "mams"},
    "HMC": {"kernel": "hmc", "num_chains": 10},
    "SGHMC": {"num_chains": 10},
}


@cache
def ensemble(folder: Path) -> tuple[Data, NetworkModel, dict[str, Tensor]]:
    """Return data, model and trained members, the same for all kernels."""
    data = load(folder, "airfoil", 1)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = make_model("airfoil", data.x.shape[-1], len(data.x))
    guide = AutoEnsemble(model, 10, init_to_shuffled(start_values(model)))
    options: dict[str, Any] = {"seed": 0, "progress": False, "num_particles": 10}
    policy = FitPolicy(schedule=Schedule(plateau=False))
    fit(model, guide, data.x, data.y, num_steps=1500, lr=5e-3, policy=policy, **options)
    return data, model, {key: value.detach() for key, value in guide.get_samples().items()}


def run(folder: Path, name: str, gradients: int) -> dict[str, float]:
    """Return the scores on the test rows; CPU seconds are those of the chains alone."""
    data, model, members = ensemble(folder)
    found: Any = members
    began = time.process_time()
    options: dict[str, Any] = {"seed": 0, "progress": False}
    if name == "MCLMC, from one member":
        found = {key: value[:1].expand_as(value).clone() for key, value in found.items()}
    if name == "SGHMC":
        batches = DataLoader(TensorDataset(data.x, data.y), batch_size=120, shuffle=True)
        options |= {"batches": batches, "max_epochs": gradients // len(batches)}
        found = refine_by_minibatches(model, found, **KERNELS[name], **options)
    elif KERNELS[name]:
        options["max_gradients"] = gradients
        found = refine(model, found, data.x, data.y, **KERNELS[name], **options)
    seconds = time.process_time() - began
    (mixture,) = predict(found, [data.test_x], 1000, model=model, interval=None)
    normal = dist.Normal(mixture.mean, mixture.variance.sqrt())
    return {
        "rmse": (mixture.mean - data.test_y).square().mean().sqrt().item(),
        "nll": -normal.log_prob(data.test_y).mean().item(),
        "cpu_seconds": seconds,
    }


def report(path: Path) -> str:
    """Return the table of the records."""
    rows = [
        [
            one["name"],
            str(one["gradients"]),
            f"{one['rmse']:.3f}",
            f"{one['nll']:.3f}",
            f"{one['cpu_seconds']:.0f}",
        ]
        for one in read_records(path)
    ]
    table = markdown_table(["chains", "gradients", "RMSE", "NLL", "CPU s of the chains"], rows)
    text = " ".join(__doc__.split("::")[0].split("\n\n")[1].split())
    return f"{table}\n{text}. {NOTE}"


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    keys = [] if args.report else [{"name": name, "gradients": args.gradients} for name in KERNELS]
    run_missing(args.out, keys, lambda key: run(args.data_dir, **key))
    write_page(args.out, report(args.out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="folder with tabular/")
    parser.add_argument("--gradients", type=int, default=1500)
    add_output_arguments(parser, RESULTS / "networks_ablation.jsonl")
    main(parser.parse_args())
