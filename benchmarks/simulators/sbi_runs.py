# SPDX-License-Identifier: Apache-2.0
"""C2ST of sbi's NPE and NRE with default settings.

``PYTHONPATH=. /work/envs/sbi/bin/python -m benchmarks.simulators.sbi_runs --seeds 1 2``
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import torch

from benchmarks.simulators.tasks import DIM, LOW, SCORE, c2st, observe, reference, simulate


def main() -> None:
    """Train and score."""
    from sbi.inference import NPE, NRE
    from sbi.utils import BoxUniform

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(DIM))
    parser.add_argument("--methods", nargs="+", default=["npe_maf", "npe_nsf", "nre"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--draws", type=int, default=3000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for task in arguments.tasks:
        low = LOW[task] * torch.ones(DIM[task])
        prior = BoxUniform(low, -low)
        observed = {seed: observe(task, seed) for seed in SCORE}
        exact = {s: reference(task, y, arguments.draws) for s, y in observed.items()}
        for method in arguments.methods:
            for seed in arguments.seeds:
                torch.manual_seed(seed)
                theta = prior.sample((arguments.number,))
                y = simulate(task, theta)
                began = time.process_time()
                if method == "nre":
                    trainer = NRE(prior, show_progress_bars=False)
                else:
                    trainer = NPE(prior, density_estimator=method[4:], show_progress_bars=False)
                trainer.append_simulations(theta, y).train()
                seconds = time.process_time() - began
                options = {}
                if method == "nre":
                    options = {
                        "mcmc_method": "slice_np_vectorized",
                        "mcmc_parameters": {"num_chains": 100, "warmup_steps": 50, "thin": 5},
                    }
                posterior = trainer.build_posterior(**options)
                for number, data in observed.items():
                    shape = (arguments.draws,)
                    draws = posterior.sample(shape, x=data, show_progress_bars=False)
                    found = {
                        "task": task,
                        "method": method,
                        "seed": seed,
                        "observation": number,
                        "c2st": round(c2st(exact[number], draws.numpy()), 3),
                        "cpu_training": round(seconds, 1),
                    }
                    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
