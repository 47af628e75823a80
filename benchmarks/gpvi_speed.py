# SPDX-License-Identifier: Apache-2.0
"""How long is a GPVI step compared with amortised SVGD, at 60,000 latents?

The guide is the same, an injective generator of all weights of a classifier, and so are the data;
only the ELBO differs. The paper reports 1.28 times the cost for its helper network on MNIST and
1.78 on CIFAR. All cases alternate in one process; about ten minutes on one CPU thread::

    python -m benchmarks.gpvi_speed

The classifier is 790-75-10 without biases on simulated data. ``default`` is the default network of
:class:`ResidualGenerator`, ``paper`` that of the paper's experiments on MNIST, and ``wide`` is
``paper`` with a core of 16 in the place of 256 dimensions. The learning rate is zero, so that every
step of a case sees the same guide.

**References:**

[1] `Generative Particle Variational Inference via Estimation of Functional Gradients`,
    N. Ratzlaff et al., ICML 2021.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import init_to_sample
from torch import Tensor
from tqdm import trange

from benchmarks.common import RESULTS, environment, markdown_table
from benchmarks.vectorization_speed import Case
from pyro_implicit import AutoImplicit, InjectiveELBO, ResidualGenerator
from pyro_implicit.infer import AmortizedSVGD_ELBO
from pyro_implicit.infer.gpvi import GPVI_ELBO, GPVIHelper

LAYERS = [(790, 75), (75, 10)]
GENERATORS: dict[str, dict[str, Any]] = {
    "default": {"core_dim": 16},
    "wide": {"core_dim": 16, "hidden": (256, 512, 1024), "activation": "relu"},
    "paper": {"core_dim": 256, "hidden": (256, 512, 1024), "activation": "relu"},
}
BASELINE, HELPER = "amortised SVGD", "GPVI, helper network"
PAPER = 1.28


def logits(theta: Tensor, x: Tensor, layers: list[tuple[int, int]]) -> Tensor:
    """Evaluate networks with weights ``(*batch, m)`` at points ``(n, inputs)``."""
    weights = theta.split([inputs * outputs for inputs, outputs in layers], -1)
    for position, (weight, shape) in enumerate(zip(weights, layers, strict=True)):
        x = (x if position == 0 else x.relu()) @ weight.unflatten(-1, shape)
    return x


class CPUCase(Case):
    """A case, timed by the CPU clock of this process, which other jobs do not affect."""

    def take_turn(self, data: tuple[Tensor, Tensor], budget: float) -> None:
        with pyro.get_param_store().scope(self.params) as self.params:
            spent = 0.0
            while spent < budget:
                start = time.process_time()
                self.losses.append(self.svi.step(*data))
                step = time.process_time() - start
                self.milliseconds.append(1e3 * step)
                spent += step


def make_model(layers: list[tuple[int, int]]) -> Callable:
    scale = torch.cat([torch.full((i * o,), i**-0.5) for i, o in layers])

    def model(x: Tensor, y: Tensor) -> None:
        theta = pyro.sample("theta", dist.Normal(torch.zeros_like(scale), scale).to_event(1))
        pyro.sample("y", dist.Categorical(logits=logits(theta, x, layers)).to_event(1), obs=y)

    return model


def make_cases(
    model: Callable, generator: dict[str, Any], num_particles: int
) -> dict[str, CPUCase]:
    elbos = {
        BASELINE: AmortizedSVGD_ELBO,
        "GPVI, exact Jacobian": GPVI_ELBO,
        HELPER: partial(GPVI_ELBO, jacobian="helper", helper=partial(GPVIHelper, width=512)),
        "InjectiveELBO": InjectiveELBO,
    }

    def make_guide() -> AutoImplicit:
        return AutoImplicit(
            model,
            lambda size: ResidualGenerator(size, **generator),
            init_loc_fn=init_to_sample,
            frame=None,
            init_scale=0.01,
        )

    # The model broadcasts: Pyro's vectorisation is the fastest and favours no case.
    return {
        name: CPUCase(make_guide(), elbo(num_particles, vectorize_particles="plate"))
        for name, elbo in elbos.items()
    }


def peak_megabytes(work: Callable[[], Any]) -> float | None:
    """Return by how much the memory of the process grows during ``work()``; ``None`` without
    Linux."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # otherwise memory freed before hides the growth
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = _status("VmRSS")
        work()
        return (_status("VmHWM") - before) / 1024
    except (OSError, AttributeError):
        return None


def _status(key: str) -> int:
    """Return a line of the kernel's account of this process, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def time_generator(
    generator: dict[str, Any], data: tuple[Tensor, Tensor], args: argparse.Namespace
) -> dict[str, Any]:
    """Return summaries of all cases, and the ratios of their medians to amortised SVGD's."""
    cases = make_cases(make_model(args.layers), generator, args.particles)
    for turn in trange(args.turns + 1, unit="turn"):
        for name, case in cases.items():
            if name == HELPER and turn > 1 and turn % 5:
                continue  # a slow case, for which a few steps are sufficient
            case.take_turn(data, args.seconds)
            if turn == 0:
                case.forget()
    summaries = {name: case.summary() for name, case in cases.items()}
    for name, case in cases.items():
        summaries[name]["peak_mb"] = peak_megabytes(partial(case.take_turn, data, 1e-9))
    baseline = summaries[BASELINE]["median_ms"]
    ratios = {name: case["median_ms"] / baseline for name, case in summaries.items()}
    return {"generator": generator, "cases": summaries, "ratios": ratios}


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    pyro.set_rng_seed(args.seed)
    inputs, outputs = args.layers[0][0], args.layers[-1][1]
    data = torch.randn(args.rows, inputs), torch.randint(outputs, (args.rows,))
    settings = {key: getattr(args, key) for key in ("particles", "rows", "layers", "turns", "seed")}
    settings["latents"] = sum(i * o for i, o in args.layers)
    settings = json.loads(json.dumps(settings))  # as they will be read
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    if result.get("settings") != settings:
        result = {"settings": settings, "generators": {}}
    for name in args.generators:  # keep the results of other generators
        timed = time_generator(GENERATORS[name], data, args)
        result["generators"][name] = timed | environment("cpu")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))


def report(result: dict[str, Any]) -> str:
    rows = []
    for generator, timed in result["generators"].items():
        for name, case in timed["cases"].items():
            row = [f"{generator}: {name}", f"{case['median_ms']:.1f}"]
            row += [f"{case['min_ms']:.1f} to {case['max_ms']:.1f}", str(case["steps"])]
            row += [f"{timed['ratios'][name]:.2f}"]
            peak = case["peak_mb"]
            rows.append([*row, "" if peak is None else f"{peak:.0f}"])
    header = ["generator: method", "CPU ms per step", "min to max", "steps", "ratio", "peak MB"]
    note = f"\nRatio of medians, to {BASELINE}; the paper's helper network took {PAPER} on MNIST.\n"
    return markdown_table(header, rows) + note


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--particles", type=int, default=10)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument(
        "--layers", type=json.loads, default=LAYERS, help="JSON, inputs and outputs of each"
    )
    parser.add_argument("--generators", nargs="+", default=list(GENERATORS), choices=GENERATORS)
    parser.add_argument("--turns", type=int, default=10, help="turns of each case")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpvi_speed.json")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
