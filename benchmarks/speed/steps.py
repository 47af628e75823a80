# SPDX-License-Identifier: Apache-2.0
"""Time of a training step by Pyro, recorded, and compiled by inductor.

Times are seconds of one CPU thread (``time.thread_time``), to exclude other jobs::

    python -m benchmarks.speed.steps
    python -m benchmarks.speed.steps --inductor  # fifteen seconds of compilation for each line
    python -m benchmarks.speed.steps --inductor --methods  # all ELBOs, 16 particles
    python -m benchmarks.speed.steps --device cuda --large  # seconds of wall time
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pyro_implicit import (
    AVB_ELBO,
    GPVI_ELBO,
    KIVI_ELBO,
    LIVI_ELBO,
    SIVI_ELBO,
    UIVI_ELBO,
    AmortizedKSD_ELBO,
    AmortizedSVGD_ELBO,
    AutoImplicit,
    AutoregressiveGenerator,
    AutoSemiImplicit,
    ImplicitRenyiELBO,
    InjectiveELBO,
    ResidualGenerator,
    ScoreELBO,
)

RESULTS = Path(__file__).parent.parent / "results"
EFFECTS = [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]
ERRORS = [15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]


def eight_schools() -> Callable[[], None]:
    effects, errors = torch.tensor(EFFECTS), torch.tensor(ERRORS)

    def model() -> None:
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(torch.full((), 5.0)))
        with pyro.plate("schools", 8):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, errors), obs=effects)

    return model


class Network(PyroModule):
    """One hidden layer of 50 units, 151 latents, 100 observations."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = PyroModule[nn.Linear](1, 50), PyroModule[nn.Linear](50, 1)
        for layer in (self.hidden, self.out):
            for name, value in list(layer.named_parameters()):
                prior = dist.Normal(torch.zeros_like(value), 1.0).to_event(value.dim())
                setattr(layer, name, PyroSample(prior))
        self.x = torch.linspace(-2, 2, 100).unsqueeze(-1)
        self.y = (3 * self.x).sin().squeeze(-1)

    def forward(self) -> None:
        mean = self.out(self.hidden(self.x).tanh()).squeeze(-1)
        with pyro.plate("data", 100):
            pyro.sample("y", dist.Normal(mean, 0.1), obs=self.y)


def network(particles: int) -> tuple[Callable, Callable, Callable]:
    return (
        Network,
        lambda model: AutoSemiImplicit(model, frame=None),
        lambda: LIVI_ELBO(particles),
    )


CASES: dict[str, tuple[Callable, Callable, Callable]] = {
    "LIVI, 64 particles": (eight_schools, AutoSemiImplicit, lambda: LIVI_ELBO(64)),
    "LIVI, 8": (eight_schools, AutoSemiImplicit, lambda: LIVI_ELBO(8)),
    "Injective, 128": (
        eight_schools,
        lambda model: AutoImplicit(model, AutoregressiveGenerator),
        lambda: InjectiveELBO(128),
    ),
    "SIVI, 64": (eight_schools, AutoSemiImplicit, lambda: SIVI_ELBO(64)),
    "network of 50 units, LIVI, 16": network(16),
}


def residual(model: Callable) -> AutoImplicit:
    return AutoImplicit(model, lambda dim: ResidualGenerator(dim, core_dim=4))


#: All methods, with their guides.
METHODS: dict[str, tuple[Callable, Callable, Callable]] = {
    name: (eight_schools, guide, elbo)
    for name, guide, elbo in (
        ("LIVI, quadratic", AutoSemiImplicit, lambda: LIVI_ELBO(16, entropy="quadratic")),
        ("LIVI, smallest", AutoSemiImplicit, lambda: LIVI_ELBO(16, log_det="smallest")),
        ("LIVI, stochastic", AutoSemiImplicit, lambda: LIVI_ELBO(16, log_det="stochastic")),
        ("SIVI", AutoSemiImplicit, lambda: SIVI_ELBO(16)),
        ("UIVI", AutoSemiImplicit, lambda: UIVI_ELBO(16)),
        ("KIVI", AutoSemiImplicit, lambda: KIVI_ELBO(16)),
        ("KIVI, prior", AutoSemiImplicit, lambda: KIVI_ELBO(16, contrast="prior")),
        ("score, spectral", AutoSemiImplicit, lambda: ScoreELBO(16, "spectral")),
        ("score, Stein", AutoSemiImplicit, lambda: ScoreELBO(16, "stein")),
        ("AVB", AutoSemiImplicit, lambda: AVB_ELBO(16)),
        ("Renyi", residual, lambda: ImplicitRenyiELBO(0.5, 16)),
        ("injective, residual", residual, lambda: InjectiveELBO(16)),
        ("GPVI", residual, lambda: GPVI_ELBO(16)),
        ("GPVI, helper", residual, lambda: GPVI_ELBO(16, jacobian="helper")),
        ("amortised SVGD", residual, lambda: AmortizedSVGD_ELBO(16)),
        ("amortised GFSF", residual, lambda: ScoreELBO(16, "stein", covariance=None)),
        ("amortised KSD", residual, lambda: AmortizedKSD_ELBO(16)),
    )
}
LARGE = {
    "network of 50 units, LIVI, 64": network(64),
    "network of 50 units, LIVI, 1024": network(1024),
}


def seconds() -> float:
    """Seconds of this thread; wall time if kernels run on another device."""
    if torch.get_default_device().type != "cuda":
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def cpu_seconds(who: int) -> float:
    """CPU seconds of this process, or of the compilers that it waited for."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def measure(case: tuple, mode: str | bool, num_steps: int) -> dict[str, float | str | None]:
    make_model, make_guide, make_elbo = case
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = make_model()
    guide, elbo = make_guide(model), make_elbo()
    elbo.compile = mode
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 1e-3}), elbo)
    svi.step()
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    before = [cpu_seconds(who) for who in whose]
    svi.step()
    own, compiler = (cpu_seconds(who) - start for who, start in zip(whose, before, strict=True))
    times: list[float] = []
    losses: list[Tensor | float] = []
    for i in range(num_steps):
        start = seconds()
        losses.append(svi.step())
        is_compared = mode is not False and (i + 1) & i == 0
        if not is_compared:
            times.append(seconds() - start)
    refusal = None if mode is False else elbo.state.traced.programs.refusal
    return {
        "refusal": refusal,
        "step": median(times),
        "second": own + compiler,
        "compiler": compiler,
        "loss": float(losses[-1]),
    }


NOTE = """CPU seconds are up to twice as long if other jobs share the cores.

Profile of a compilation, LIVI with 8 particles on a quieter core, 12 CPU seconds in total (58 with
one file per kernel and a compiler test of instruction sets): 1.7 for imports of inductor; 5.9 for
inductor's Python, of which a fifth retraces the graph, a quarter lowers and schedules it, and two
fifths write C++; 4.2 for g++, of which 2.5 are headers. Vector instructions, used for steps with
more computation (injective, SIVI, networks), add three seconds of Python and three of g++.
"""


def line(row: dict) -> str:
    """Rows of the table."""
    pyro_ms, traced = 1e3 * row["pyro"]["step"], 1e3 * row["trace"]["step"]
    if row["trace"]["refusal"]:
        return f"| {row['case']} | {pyro_ms:.1f} | by Pyro alone | | | | | | |"
    recording = max(0.0, row["trace"]["second"] - row["pyro"]["step"])
    cells = [row["case"], f"{pyro_ms:.1f}", f"{traced:.1f}", f"{pyro_ms / traced:.1f}"]
    compiled = row.get("inductor")
    if compiled is None:
        cells += ["", "", f"{recording:.1f} s", "", ""]
    else:
        ms = 1e3 * compiled["step"]
        cells += [f"{ms:.1f}", f"{pyro_ms / ms:.1f}", f"{recording:.1f} s"]
        cells += [f"{compiled[part]:.0f} s" for part in ("second", "compiler")]
    return "| " + " | ".join(cells) + " |"


def table(rows: list[dict], device: str) -> str:
    clock = "one CPU thread" if device == "cpu" else f"wall time on {device}"
    lines = [
        "# Time of a training step",
        "",
        f"`benchmarks/speed/steps.py`: median milliseconds of {clock} for `SVI.step`, "
        f"including the optimiser; torch {torch.__version__}. Recording and compilation in CPU "
        "seconds; the first compilation includes two seconds of imports.",
        "",
        "| step | by Pyro | recorded | ratio | inductor | ratio | recording | compilation "
        "| by g++ |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += map(line, rows)
    note = [NOTE] if device == "cpu" else []
    return "\n".join([*lines, "", *note])


def main(num_steps: int, inductor: bool, device: str, cases: dict[str, tuple], name: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_device(device)
    rows: list[dict] = []
    modes: dict[str, str | bool] = {"pyro": False, "trace": "trace"}
    if inductor:
        modes["inductor"] = True
    name = name if device == "cpu" else f"{name}_{device}"
    for label, case in cases.items():
        rows.append(
            {"case": label} | {m: measure(case, how, num_steps) for m, how in modes.items()}
        )
        (RESULTS / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
        (RESULTS / f"{name}.md").write_text(table(rows, device))
        print(line(rows[-1]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-steps", type=int, default=40)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--large", action="store_true", help="networks of many particles too")
    parser.add_argument("--methods", action="store_true", help="all methods instead, a table apart")
    arguments = parser.parse_args()
    chosen = METHODS if arguments.methods else {**CASES, **(LARGE if arguments.large else {})}
    name = "speed_methods" if arguments.methods else "speed_steps"
    if arguments.methods:  # recordings are compared with plain steps to 1e-8
        torch.set_default_dtype(torch.float64)
    main(arguments.num_steps, arguments.inductor, arguments.device, chosen, name)
