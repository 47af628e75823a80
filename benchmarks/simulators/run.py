# SPDX-License-Identifier: Apache-2.0
"""C2ST of ``fit_simulator`` with default settings, on the observations of ``sbi_runs``.

``PYTHONPATH=. python -m benchmarks.simulators.run --seeds 1 2`` prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import time

import pyro
import pyro.distributions as dist
import torch

from benchmarks.simulators.tasks import DIM, LOW, SCORE, c2st, observe, reference, simulate
from pyro_implicit import fit_simulator


def model(task, y):
    """The task as a Pyro model without a likelihood."""
    low = LOW[task] * torch.ones(DIM[task])
    theta = pyro.sample("theta", dist.Uniform(low, -low).to_event(1))
    pyro.sample("y", dist.Delta(simulate(task, theta), event_dim=1), obs=y)


def main() -> None:
    """Train and score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(DIM))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--observations", type=int, nargs="+", default=SCORE)
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--draws", type=int, default=3000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for task in arguments.tasks:
        observed = {number: observe(task, number) for number in arguments.observations}
        exact = {n: reference(task, y, arguments.draws) for n, y in observed.items()}
        for seed in arguments.seeds:
            began = time.process_time()
            first = next(iter(observed.values()))
            result = fit_simulator(
                model, task, first, num_simulations=arguments.number, seed=seed, progress=False
            )
            seconds = time.process_time() - began
            print(f"# {result}".replace("\n", "\n# "), flush=True)
            torch.manual_seed(seed)
            for number, data in observed.items():
                draws = result.sample(arguments.draws, task, data)["theta"]
                found = {
                    "task": task,
                    "method": "fit_simulator",
                    "seed": seed,
                    "observation": number,
                    "c2st": round(c2st(exact[number], draws.numpy()), 3),
                    "cpu_training": round(seconds, 1),
                }
                print(json.dumps(found), flush=True)
            found = result.diagnose(seed=0)
            print(f"# {found}".replace("\n", "\n# "), flush=True)


if __name__ == "__main__":
    main()
