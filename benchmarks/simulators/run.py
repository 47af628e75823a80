# SPDX-License-Identifier: Apache-2.0
"""C2ST of ``fit_simulator`` with default settings, on the observations of ``sbi_runs``.

``PYTHONPATH=. python -m benchmarks.simulators.run --seeds 1 2`` prints JSON lines.
"""

from __future__ import annotations

import itertools
import time

import pyro
import pyro.distributions as dist
import torch

from benchmarks.simulators.tasks import DIM, LOW, observe, parser, print_score, reference, simulate
from pyro_implicit import fit_simulator
from pyro_implicit.fitting import SimulatorPolicy


def model(task, y):
    """The task as a Pyro model without a likelihood."""
    low = LOW[task] * torch.ones(DIM[task])
    theta = pyro.sample("theta", dist.Uniform(low, -low).to_event(1))
    pyro.sample("y", dist.Delta(simulate(task, theta), event_dim=1), obs=y)


def main() -> None:
    """Train and score."""
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=1)
    command.add_argument("--networks", type=int, default=SimulatorPolicy.num_networks)
    arguments = command.parse_args()
    torch.set_num_threads(1)
    for task in arguments.tasks:
        observed = {number: observe(task, number) for number in arguments.observations}
        exact = {n: reference(task, y, arguments.draws) for n, y in observed.items()}
        groups = [list(observed)] if arguments.rounds == 1 else [[number] for number in observed]
        for seed, group in itertools.product(arguments.seeds, groups):
            began = time.process_time()
            result = fit_simulator(
                model,
                task,
                observed[group[0]],
                num_simulations=arguments.number,
                rounds=arguments.rounds,
                policy=SimulatorPolicy(num_networks=arguments.networks),
                seed=seed,
                progress=False,
            )
            seconds = time.process_time() - began
            print(f"# {result}".replace("\n", "\n# "), flush=True)
            torch.manual_seed(seed)
            for number in group:
                draws = result.sample(arguments.draws, task, observed[number])["theta"]
                key = {"task": task, "method": "fit_simulator", "rounds": arguments.rounds}
                print_score(exact[number], draws, seconds, **key, seed=seed, observation=number)
            print(f"# {result.diagnose(seed=0)}".replace("\n", "\n# "), flush=True)


if __name__ == "__main__":
    main()
