# SPDX-License-Identifier: Apache-2.0
"""C2ST of sbi's NPE and NRE with default settings.

``PYTHONPATH=. /work/envs/sbi/bin/python -m benchmarks.simulators.sbi_runs --seeds 1 2``
"""

from __future__ import annotations

import time
import warnings

import torch

from benchmarks.simulators.tasks import DIM, LOW, observe, parser, print_score, reference, simulate


def main() -> None:
    """Train and score."""
    from sbi.inference import NPE, NRE
    from sbi.utils import BoxUniform

    command = parser(__doc__)
    command.add_argument("--methods", nargs="+", default=["npe_maf", "npe_nsf", "nre"])
    arguments = command.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for task in arguments.tasks:
        low = LOW[task] * torch.ones(DIM[task])
        prior = BoxUniform(low, -low)
        observed = {n: observe(task, n) for n in arguments.observations}
        exact = {n: reference(task, y, arguments.draws) for n, y in observed.items()}
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
                    key = {"task": task, "method": method, "seed": seed, "observation": number}
                    print_score(exact[number], draws, seconds, **key)


if __name__ == "__main__":
    main()
