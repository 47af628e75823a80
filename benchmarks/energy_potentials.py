# SPDX-License-Identifier: Apache-2.0
"""The four energy potentials of Rezende and Mohamed, as in the appendix of the GPVI paper.

Two moons, a sinusoid, a bisected sinusoid and a split sinusoid, as models with a flat prior on the
plane. The error of a method is the sliced 2-Wasserstein distance to draws from a fine grid; its
*floor* is the same distance between two sets from the grid. The sinusoids are infinite; here the
energy grows beyond x = ±4. About a quarter of an hour of CPU time for all::

    python -m benchmarks.energy_potentials
    python -m benchmarks.energy_potentials --potentials "two moons" --methods GPVI
    python -m benchmarks.energy_potentials --report
    python -m benchmarks.energy_potentials --paper --methods GPVI InjectiveELBO

``--paper`` sets the steps, particles, width and initial rate of the paper: some 8 CPU hours for the
last line, which continue from their checkpoints in ``--runs`` after a kill. Each run adds one line
to ``--out``, and a run whose line is there already is not repeated; the table and the figure of
the first seed are made anew.

**References:**

[1] `Variational Inference with Normalizing Flows`, D. J. Rezende and S. Mohamed, ICML 2015,
table 1.
[2] `Generative Particle Variational Inference via Estimation of Functional Gradients`, N. Ratzlaff,
Q. Bai, F. Li and W. Xu, ICML 2021, figures 4 to 7.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.transforms import iterated, spline_autoregressive
from pyro.infer import ELBO, Trace_ELBO
from pyro.infer.autoguide import AutoGuide, AutoIAFNormal, AutoNormalizingFlow
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    add_paper_arguments,
    attempt,
    markdown_table,
    parse_arguments,
    read_records,
    run_missing,
    spread,
    train_resumably,
    write_page,
)
from pyro_implicit import LIVI_ELBO, AutoImplicit, AutoSemiImplicit, ResidualGenerator, fit
from pyro_implicit.diagnostics import draw, sliced_wasserstein
from pyro_implicit.infer import AmortizedSVGD_ELBO
from pyro_implicit.infer.gpvi import GPVI_ELBO
from pyro_implicit.infer.injective import InjectiveELBO

Model = Callable[[], object]
Energy = Callable[[Tensor, Tensor], Tensor]

EDGE = 4.0
HALF_WIDTH = 5.0  # of the figure
NUM_BINS = 60
NUM_DRAWS = 10_000
TRUTH_SEED = 1_000_000  # distinct from the seeds of the guides
#: Standard deviation of the noise that enters the network: the largest of the paper's three, 1, 2
#: and 6. At step 1,000 of GPVI, with the paper's other settings, 99 % of the draws are in one moon
#: for 1; for 6, half of them are in each.
NOISE_SD = 6.0


def bump(x: Tensor, sd: float) -> Tensor:
    """The logarithm of a Gaussian bump of height 1."""
    return -0.5 * (x / sd).square()


def two_moons(x: Tensor, y: Tensor) -> Tensor:
    ring = bump(torch.sqrt(x.square() + y.square() + 1e-12) - 2, 0.4)
    return -ring - torch.logaddexp(bump(x - 2, 0.6), bump(x + 2, 0.6))


def end(x: Tensor) -> Tensor:
    """Zero between -4 and 4; outside, the energy of a Gaussian of standard deviation 0.4."""
    return -bump((x.abs() - EDGE).relu(), 0.4)


def wave(x: Tensor) -> Tensor:
    return torch.sin(0.5 * math.pi * x)


def sinusoid(x: Tensor, y: Tensor) -> Tensor:
    return end(x) - bump(y - wave(x), 0.4)


def bisected(x: Tensor, y: Tensor) -> Tensor:
    gap = 3 * torch.exp(bump(x - 1, 0.6))
    rest = y - wave(x)
    return end(x) - torch.logaddexp(bump(rest, 0.35), bump(rest + gap, 0.35))


def split(x: Tensor, y: Tensor) -> Tensor:
    gap = 3 * torch.sigmoid((x - 1) / 0.3)
    rest = y - wave(x)
    return end(x) - torch.logaddexp(bump(rest, 0.4), bump(rest + gap, 0.35))


POTENTIALS: dict[str, Energy] = {
    "two moons": two_moons,
    "sinusoid": sinusoid,
    "bisected": bisected,
    "split": split,
}


def make_model(energy: Energy) -> Model:
    # A masked prior is flat, and guides that draw their initial value from it can do so.
    flat = dist.Normal(torch.zeros(2), 1.0).to_event(1).mask(False)

    def model() -> None:
        point = pyro.sample("x", flat)
        pyro.factor("energy", -energy(point[..., 0], point[..., 1]))

    return model


def grid_draws(energy: Energy, num_draws: int, seed: int, num_cells: int = 700) -> Tensor:
    """Draws ``(num_draws, 2)`` of the cells of a grid on [-7, 7]², uniform inside their cell."""
    generator = torch.Generator().manual_seed(seed)
    width = 14 / num_cells
    centers = width * (torch.arange(num_cells, dtype=torch.float64) + 0.5) - 7
    log_masses = -energy(centers[:, None], centers[None, :]).flatten()
    masses = torch.exp(log_masses - log_masses.max())
    cells = torch.multinomial(masses, num_draws, replacement=True, generator=generator)
    corners = torch.stack([cells // num_cells, cells % num_cells], -1) * width - 7
    return (corners + width * torch.rand(num_draws, 2, generator=generator)).float()


def injective(model: Model, args: argparse.Namespace) -> AutoImplicit:
    def generator(size: int) -> ResidualGenerator:
        found = ResidualGenerator(size, core_dim=2, hidden=(args.hidden, args.hidden))
        with torch.no_grad():
            found.network.layers[0].weight.mul_(args.noise_sd)
        return found

    return AutoImplicit(model, generator=generator, frame=None, init_scale=2.0)


SPLINES = partial(iterated, 3, partial(spline_autoregressive, hidden_dims=[64, 64], bound=6.0))
PYRO_ELBO = partial(Trace_ELBO, vectorize_particles=True)
METHODS: dict[
    str, tuple[Callable[[Model, argparse.Namespace], AutoGuide], Callable[[int], ELBO]]
] = {
    "GPVI": (injective, GPVI_ELBO),
    "amortised SVGD": (injective, AmortizedSVGD_ELBO),
    "LIVI": (lambda model, _: AutoSemiImplicit(model, frame=None, init_scale=2.0), LIVI_ELBO),
    "InjectiveELBO": (injective, InjectiveELBO),
    "IAF": (lambda model, _: AutoIAFNormal(model, num_transforms=3), PYRO_ELBO),
    "splines": (lambda model, _: AutoNormalizingFlow(model, SPLINES), PYRO_ELBO),
}
AUTOMATIC = "fit"  # which has no settings
ALL_METHODS = [*METHODS, AUTOMATIC]
#: GPVI's appendix D.1 and table 6. The paper's rate is constant; its Jacobian is a helper network
#: with an input for each pair of particles, which takes 1.5 s per step on one CPU core.
PAPER = {"steps": 200_000, "particles": 100, "lr": 1e-4, "hidden": 500, "seeds": 1}
SETTINGS = ("steps", "particles", "lr", "hidden", "noise_sd")


def floor(energy: Energy) -> float:
    """Distance between two sets of exact draws: the median of five pairs."""
    pairs = [TRUTH_SEED + 1000 + 2 * pair for pair in range(5)]
    return median(
        sliced_wasserstein(
            grid_draws(energy, NUM_DRAWS, pair), grid_draws(energy, NUM_DRAWS, pair + 1)
        ).item()
        for pair in pairs
    )


def histogram(draws: Tensor) -> list[list[int]]:
    """Counts of draws in the figure's square, ``NUM_BINS`` each way; rows are x."""
    cells = ((draws + HALF_WIDTH) * NUM_BINS / (2 * HALF_WIDTH)).floor().long()
    cells = cells[((cells >= 0) & (cells < NUM_BINS)).all(-1)]
    flat = torch.bincount(cells[:, 0] * NUM_BINS + cells[:, 1], minlength=NUM_BINS**2)
    return flat.reshape(NUM_BINS, NUM_BINS).tolist()


def run(key: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Fit one method to one potential with one seed and measure it."""
    energy, seed = POTENTIALS[key["potential"]], key["seed"]
    model = make_model(energy)
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    start = time.process_time()
    if key["method"] == AUTOMATIC:
        sample = fit(model, progress=False).sample
    else:
        make_guide, make_elbo = METHODS[key["method"]]
        guide = make_guide(model, args)
        train_resumably(model, guide, make_elbo(args.particles), args, key)
        sample = partial(draw, guide)
    cpu = time.process_time() - start
    draws = sample(NUM_DRAWS)["x"].reshape(-1, 2)
    distance = sliced_wasserstein(draws, grid_draws(energy, NUM_DRAWS, TRUTH_SEED + seed)).item()
    result = {"sw2": distance, "cpu_seconds": cpu}
    return result if seed else result | {"histogram": histogram(draws)}


def run_all(args: argparse.Namespace) -> None:
    settings = {key: getattr(args, key) for key in SETTINGS}
    keys = (
        {"potential": potential, "method": method, "seed": seed} | settings
        for seed in range(args.first_seed, args.seeds)
        for potential in args.potentials
        for method in args.methods
    )
    run_missing(args.out, keys, lambda key: attempt(run, key, args))


NOTE = """Sliced 2-Wasserstein distance to draws from the grid, 10,000 draws each; mean (range) over
seeds. The floor is the distance between two sets of draws from the grid. GPVI, amortised SVGD and
InjectiveELBO train the same generator, two hidden layers plus a scaled identity (the paper's layers
have 500 units, and it takes 200,000 steps of 100 particles at a learning rate of 1e-4); LIVI trains
the default guide; IAF and splines are Pyro's flows with three transforms; fit has no settings.
Seconds are CPU time of the last process of a run.
"""


def report(records: list[dict[str, Any]]) -> str:
    """Return the Markdown table of the runs, one for each setting."""
    parts = []
    potentials = [name for name in POTENTIALS if any(r["potential"] == name for r in records)]
    floors = ["floor", *(f"{floor(POTENTIALS[name]):.3f}" for name in potentials), ""]
    for setting in dict.fromkeys(tuple(record[key] for key in SETTINGS) for record in records):
        lines = [line for line in records if tuple(line[key] for key in SETTINGS) == setting]
        rows = []
        for method in ALL_METHODS:
            own = [line for line in lines if line["method"] == method]
            if not own:
                continue
            fitted = [line for line in own if "error" not in line]
            cells = []
            for name in potentials:
                none = "failed" if any(r["potential"] == name for r in own) else "not run"
                found = [r["sw2"] for r in fitted if r["potential"] == name]
                cells.append(spread(found, 3, none))
            times = [line["cpu_seconds"] for line in fitted]
            rows.append([method, *cells, f"{mean(times):.0f}" if times else ""])
        seeds = f"{len({line['seed'] for line in lines})} seeds"
        title = f"{setting[0]} steps of {setting[1]} particles, rate {setting[2]:g} decaying to 0"
        title += f", {setting[3]} hidden units, noise of sd {setting[4]:g}"
        table = markdown_table(["method", *potentials, "seconds"], [*rows, floors])
        parts.append(f"{title}, {seeds}:\n\n{table}")
    return "\n".join([*parts, NOTE])


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the densities of the grid and of every method; the newest run of seed 0."""
    import matplotlib.pyplot as plt

    shown = {(r["potential"], r["method"]): r["histogram"] for r in records if "histogram" in r}
    potentials = [name for name in POTENTIALS if any(key[0] == name for key in shown)]
    methods = [name for name in ALL_METHODS if any(key[1] == name for key in shown)]
    if not shown:
        return
    figure, panels = plt.subplots(
        len(potentials),
        1 + len(methods),
        figsize=(1.5 * (1 + len(methods)), 1.6 * len(potentials)),
        squeeze=False,
    )
    for row, potential in zip(panels, potentials, strict=True):
        exact = torch.tensor(histogram(grid_draws(POTENTIALS[potential], 100_000, TRUTH_SEED)))
        counts = {"target": exact / 10}
        for method in methods:
            if (potential, method) in shown:
                counts[method] = torch.tensor(shown[potential, method])
        for panel, name in zip(row, ["target", *methods], strict=True):
            panel.set(xticks=[], yticks=[])
            if name in counts:
                image = counts[name].T.numpy()
                panel.imshow(image, origin="lower", vmax=float(counts["target"].max()))
            if potential == potentials[0]:
                panel.set_title(name, fontsize=8)
        row[0].set_ylabel(potential, fontsize=8)
    figure.tight_layout(pad=0.3)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(args: argparse.Namespace) -> None:
    if not args.report:
        torch.set_num_threads(args.threads)
        run_all(args)
    records = read_records(args.out)
    write_page(args.out, report(records))
    plot(records, args.out.with_suffix(".png"))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--potentials", nargs="+", default=list(POTENTIALS), choices=list(POTENTIALS)
    )
    parser.add_argument("--methods", nargs="+", default=ALL_METHODS, choices=ALL_METHODS)
    add_paper_arguments(parser, seeds=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--particles", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-2, help="falls to zero along a cosine")
    parser.add_argument("--hidden", type=int, default=128, help="units of each hidden layer")
    words = "of the noise that enters the network, by its first weights (LIVI and flows: 1)"
    parser.add_argument("--noise-sd", type=float, default=NOISE_SD, help=words)
    add_output_arguments(parser, RESULTS / "energy_potentials.jsonl")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    return parser


if __name__ == "__main__":
    out = RESULTS / "paper_energy_potentials.jsonl"
    main(parse_arguments(parser(), lambda args: PAPER | {"out": out}))
