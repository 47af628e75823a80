# SPDX-License-Identifier: Apache-2.0
"""The methods of this library and of Pyro in ``field.py``, in a separate process::

    python -m benchmarks.speed.field_methods PROBLEM METHOD SEED FOLDER [DATA_DIR]

writes ``draws.npz`` and ``record.json`` in the folder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer import MCMC, NUTS, SVI, JitTrace_ELBO, Trace_ELBO
from pyro.infer.autoguide import AutoIAFNormal, AutoMultivariateNormal, AutoNormal

from benchmarks.common import cosine_adam
from benchmarks.speed.field_problems import Problem, load
from pyro_implicit import fit
from pyro_implicit.compiled import RecordedFunction
from pyro_implicit.diagnostics import draw

__all__ = ["METHODS"]

NUM_DRAWS, STEPS, RATE = 10_000, 3000, 1e-2
Draws = dict[str, torch.Tensor]
Outcome = tuple[Draws, float]


def ours(problem: Problem, seed: int) -> Outcome:
    """``fit`` with default settings; its recordings count as compilation."""
    record, recording = RecordedFunction.__init__, [0.0]

    def timed(*args: Any, **kwargs: Any) -> None:
        began = time.process_time()
        record(*args, **kwargs)
        recording[0] += time.process_time() - began

    RecordedFunction.__init__ = timed  # type: ignore[method-assign]
    result = fit(problem.model, "auto", *problem.args, seed=seed, progress=False)
    return result.sample(NUM_DRAWS, *problem.args), recording[0]


def svi(guide_type: Any, jit: bool) -> Callable[[Problem, int], Outcome]:
    """3,000 steps of one particle by Adam, with a rate that decays from .01 to 0."""

    def run(problem: Problem, seed: int) -> Outcome:
        guide = guide_type(problem.model)
        loss = JitTrace_ELBO(ignore_jit_warnings=True) if jit else Trace_ELBO()
        optimiser = cosine_adam(RATE, STEPS)
        steps = SVI(problem.model, guide, optimiser, loss)
        times = []
        for _ in range(STEPS):
            began = time.process_time()
            steps.step(*problem.args)
            optimiser.step()
            times.append(time.process_time() - began)
        compiling = sum(times[:3]) - 3 * median(times) if jit else 0.0
        return draw(guide, NUM_DRAWS, *problem.args), compiling

    return run


def nuts(problem: Problem, seed: int) -> Outcome:
    """One chain of 1,000 draws after 1,000 steps of warm-up."""
    mcmc = MCMC(NUTS(problem.model), num_samples=1000, warmup_steps=1000, disable_progbar=True)
    mcmc.run(*problem.args)
    return mcmc.get_samples(), 0.0


GUIDES = (AutoNormal, AutoMultivariateNormal, AutoIAFNormal)
METHODS: dict[str, Callable[[Problem, int], Outcome]] = {
    "fit": ours,
    **{f"Pyro {guide.__name__}": svi(guide, jit=False) for guide in GUIDES},
    **{f"Pyro {guide.__name__}, jit": svi(guide, jit=True) for guide in GUIDES},
    "Pyro NUTS": nuts,
}


def main(problem: str, method: str, seed: str, folder: str, *data_dir: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    loaded = load(problem, Path(data_dir[0]) if data_dir else None)
    pyro.set_rng_seed(int(seed))
    wall, cpu = time.perf_counter(), time.process_time()
    draws, compiling = METHODS[method](loaded, int(seed))
    record = {
        "cpu_seconds": time.process_time() - cpu,
        "seconds": time.perf_counter() - wall,
        "compile_seconds": compiling,
    }
    np.savez(Path(folder) / "draws.npz", **{k: v.detach().numpy() for k, v in draws.items()})
    (Path(folder) / "record.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
