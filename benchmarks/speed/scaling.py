# SPDX-License-Identifier: Apache-2.0
"""Scaling of the time of a step with latents, particles and rows of data::

    python -m benchmarks.speed.scaling
    python -m benchmarks.speed.scaling --plot  # existing measurements

Seconds of one CPU thread (``time.thread_time``), of a regression whose weights are the latents;
steps are recorded (``compile="trace"``), as in ``fit``. Each point adds one line to ``--out``;
points that have a line are skipped. A curve ends before a step that would take ``--longest``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from benchmarks.common import RESULTS, append_record, environment, markdown_table, read_records
from pyro_implicit import (
    LIVI_ELBO,
    AutoImplicit,
    AutoregressiveGenerator,
    AutoSemiImplicit,
    InjectiveELBO,
)
from pyro_implicit.density import Target
from pyro_implicit.density.cost import TracedScore
from pyro_implicit.infer import ImplicitELBO

OUT = RESULTS / "speed_scaling.jsonl"
PICTURE = Path(__file__).parents[2] / "docs" / "img" / "scaling.png"
LATENTS = (10, 30, 100, 300, 1000, 2000)
PARTICLES = (1, 4, 16, 64, 256, 1024)
ROWS = (100, 1000, 10_000, 100_000, 1_000_000)
FEW, BATCH, CHAINS = 8, 100, 256
STEPS = 7


def regression(x: Tensor, y: Tensor, num_rows: int) -> None:
    """Rows of standard normal predictors, ``num_rows`` in total."""
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
    with pyro.plate("rows", num_rows, subsample_size=len(x)):
        pyro.sample("y", dist.Normal((x @ weight.unsqueeze(-1)).squeeze(-1), 1.0), obs=y)


def by_indices(x: Tensor, y: Tensor, num_rows: int) -> None:
    """The same, without the permutation of all rows that ``subsample_size=`` draws in each step."""
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
    with pyro.plate("rows", num_rows, subsample=torch.arange(len(x))):
        pyro.sample("y", dist.Normal((x @ weight.unsqueeze(-1)).squeeze(-1), 1.0), obs=y)


def data(num_rows: int, latents: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, latents, generator=generator)
    return x, x.sum(-1) / latents**0.5 + torch.randn(num_rows, generator=generator)


def trained(guide: Any, loss: Any, *args: Any) -> Callable[[], Any]:
    """A step of SVI."""
    svi = SVI(regression, guide, pyro.optim.ClippedAdam({"lr": 1e-3}), loss)
    return lambda: svi.step(*args)


def livi(particles: int, *args: Any) -> Callable[[], Any]:
    guide = AutoSemiImplicit(regression, frame=None)
    return trained(guide, LIVI_ELBO(particles, compile="trace"), *args)


def injective(particles: int, *args: Any) -> Callable[[], Any]:
    guide = AutoImplicit(regression, AutoregressiveGenerator, frame=None)
    return trained(guide, InjectiveELBO(particles, compile="trace"), *args)


def mean_field(particles: int, *args: Any) -> Callable[[], Any]:
    return trained(AutoNormal(regression), ImplicitELBO(particles, compile="trace"), *args)


def chains(number: int, *args: Any) -> Callable[[], Any]:
    """One gradient of the given number of chains."""
    density = Target(regression, *args)
    score = TracedScore(density.score, compile="trace")
    points = density.init_loc + 0.1 * torch.randn(number, density.latent_dim)
    return lambda: score(points)


def minibatches(model: Callable, rows: int) -> Callable[[], Any]:
    """LIVI on random minibatches, including the time to draw them."""
    x, y = data(rows, 10)
    guide = AutoSemiImplicit(model, frame=None)
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 1e-3}), LIVI_ELBO(FEW, compile="trace"))

    def step() -> float:
        chosen = torch.randint(rows, (BATCH,))
        return svi.step(x[chosen], y[chosen], rows)

    return step


def on_all(make: Callable, number: int, rows: int = 100, latents: int = 10) -> Callable[[], Any]:
    return make(number, *data(rows, latents), rows)


Curve = tuple[tuple[int, ...], Callable[[int], Callable[[], Any]]]
PANELS: dict[str, dict[str, Curve]] = {
    "latents": {
        "LIVI, 8 particles": (LATENTS, lambda d: on_all(livi, FEW, latents=d)),
        "injective, 8 particles": (LATENTS, lambda d: on_all(injective, FEW, latents=d)),
        "AutoNormal, 8 particles": (LATENTS, lambda d: on_all(mean_field, FEW, latents=d)),
        "gradient of 256 chains": (LATENTS, lambda d: on_all(chains, CHAINS, latents=d)),
    },
    "particles": {
        "LIVI": (PARTICLES, lambda k: on_all(livi, k)),
        "injective": (PARTICLES, lambda k: on_all(injective, k)),
        "AutoNormal": (PARTICLES, lambda k: on_all(mean_field, k)),
        "gradient of so many chains": (PARTICLES, lambda k: on_all(chains, k)),
    },
    "rows": {
        "LIVI, 8 particles, all rows": (ROWS, lambda n: on_all(livi, FEW, rows=n)),
        "LIVI, 8 particles, 100 by subsample=": (ROWS, lambda n: minibatches(by_indices, n)),
        "LIVI, 8 particles, subsample_size=100": (ROWS, lambda n: minibatches(regression, n)),
        "gradient of 256 chains": (ROWS, lambda n: on_all(chains, CHAINS, rows=n)),
    },
}


def seconds(make: Callable[[], Callable[[], Any]]) -> float:
    """Median time of a step, without the first two and without comparisons with plain steps."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    step = make()
    times = []
    for i in range(-2, 2 * STEPS):
        began = time.thread_time()
        step()
        is_compared = i >= 0 and (i + 1) & i == 0
        if i >= 0 and not is_compared:
            times.append(time.thread_time() - began)
        if sum(times) > 5 and len(times) > 1:
            break
    return median(times)


def run(args: argparse.Namespace) -> None:
    records = read_records(args.out)
    known = {(r["panel"], r["curve"], r["size"]): r["seconds"] for r in records}
    for panel, curves in PANELS.items():
        for name, (sizes, make) in curves.items():
            previous: list[tuple[int, float]] = []
            for size in sizes:
                if len(previous) > 1 and _expected(previous, size) > args.longest:
                    break
                key = (panel, name, size)
                if key not in known:
                    known[key] = seconds(lambda make=make, size=size: make(size))  # type: ignore[misc]
                    record = dict(zip(("panel", "curve", "size"), key, strict=True))
                    append_record(args.out, record | {"seconds": known[key]} | environment("cpu"))
                    print(*key, f"{1e3 * known[key]:.2f} ms", flush=True)
                previous.append((size, known[key]))


def _expected(points: list[tuple[int, float]], size: int) -> float:
    (first, before), (last, now) = points[-2:]
    slope = max(1.0, np.log(now / before) / np.log(last / first))
    return now * (size / last) ** slope


def slope(sizes: list[int], times: list[float]) -> float:
    """Slope of the last three points, where fixed costs matter least."""
    return float(np.polyfit(np.log(sizes[-3:]), np.log(times[-3:]), 1)[0])


def report(args: argparse.Namespace) -> None:
    """Write the figure and a table of the slopes."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    records = read_records(args.out)
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True, layout="constrained")
    rows = []
    for axis, (panel, curves) in zip(axes, PANELS.items(), strict=True):
        for name in curves:
            points = [r for r in records if (r["panel"], r["curve"]) == (panel, name)]
            sizes, times = [r["size"] for r in points], [r["seconds"] for r in points]
            if len(sizes) < 3:
                continue
            steep = slope(sizes, times)
            axis.loglog(sizes, times, marker="o", markersize=3, label=f"{name}: {steep:.1f}")
            spread = f"{sizes[0]:,} to {sizes[-1]:,}"
            rows.append(
                [
                    panel,
                    name,
                    spread,
                    f"{1e3 * times[0]:.1f}",
                    f"{1e3 * times[-1]:.1f}",
                    f"{steep:.2f}",
                ]
            )
        axis.set_xlabel(panel)
        axis.legend(fontsize=7, title="slope of the last three", title_fontsize=7)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("CPU seconds of a step")
    figure.savefig(PICTURE, dpi=80)
    header = ["against", "step", "sizes", "ms, first", "ms, last", "slope of the last three"]
    (RESULTS / "speed_scaling.md").write_text(NOTE + markdown_table(header, rows))


NOTE = """# Scaling of a training step

`python -m benchmarks.speed.scaling`: milliseconds of one CPU thread for a recorded step
(`compile="trace"`) of a regression, with 100 rows and 10 latent variables (the weights) unless the
table says otherwise; float32, including the optimiser. Slopes are those of log seconds against log
size; a slope of 1 is linear growth.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=float, default=1.0, help="CPU seconds of a step")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--plot", action="store_true", help="only draw and tabulate")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.plot:
        run(args)
    report(args)


if __name__ == "__main__":
    main()
