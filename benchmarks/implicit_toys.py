# SPDX-License-Identifier: Apache-2.0
"""The two toys of the KIVI paper: a mixture of two modes, and a logistic regression.

``mixture`` (section 6.1, Fig. 1): the density ½N(-3, 1) + ½N(3, 1); the error is the total
variation between the histogram of a guide and the exact bin masses. ``logistic`` (appendix F.1):
w ~ N(0, I) in two dimensions and 200 labels, compared with NUTS by ``compare``. About five minutes
for both on one CPU thread::

    python -m benchmarks.implicit_toys
    python -m benchmarks.implicit_toys --toys mixture --seeds 1

Each run replaces the lines of its toy in ``--out``, and the tables and figures next to it.

**References:**

[1] `Kernel Implicit Variational Inference`, J. Shi, S. Sun and J. Zhu, ICLR 2018.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import ELBO, MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuide, AutoMultivariateNormal, AutoNormal
from torch import Tensor
from torch.distributions import constraints
from tqdm import tqdm

from benchmarks.common import (
    RESULTS,
    append_record,
    cosine_adam,
    environment,
    fit,
    markdown_table,
    read_records,
    seconds,
    spread,
    write_page,
)
from pyro_implicit import KIVI_ELBO, LIVI_ELBO, MLP, AutoImplicit, AutoSemiImplicit
from pyro_implicit.diagnostics import compare, draw

Model = Callable[..., object]
Method = tuple[Callable[[Model], AutoGuide], Callable[[], ELBO]]

PARTICLES = 100


PYRO_ELBO = partial(Trace_ELBO, PARTICLES, vectorize_particles=True)
PAPER_ELBO = partial(
    KIVI_ELBO, PARTICLES, contrast="prior", direction="reverse", ridge=3e-3, clip=1e-8
)


# The initial KIVI guides are about as wide as the mixture: GatedMLP has unit spread under its
# noise, this small MLP about 0.1, and narrower initial guides end with most of their mass in one
# mode. Widths and kernels were chosen in pilot runs of seed 0.
GATED = partial(AutoImplicit, frame=None, init_scale=3.0)
SMALL_MLP = partial(
    AutoImplicit,
    generator=lambda dim: MLP(10, dim, hidden=(10, 10), activation="tanh"),
    frame=None,
    init_scale=30.0,
)
MULTISCALE = partial(KIVI_ELBO, PARTICLES, num_entropy_particles=200, kernel="multiscale")

MIXTURE_METHODS: dict[str, Method] = {
    "AutoNormal": (AutoNormal, PYRO_ELBO),
    "LIVI": (AutoSemiImplicit, partial(LIVI_ELBO, PARTICLES)),
    "KIVI, MLP 10-10, multiscale": (SMALL_MLP, MULTISCALE),
    "KIVI, GatedMLP, multiscale": (GATED, MULTISCALE),
    "KIVI, GatedMLP, defaults": (GATED, partial(KIVI_ELBO, PARTICLES)),
    "KIVI, MLP 10-10, paper's setting": (SMALL_MLP, PAPER_ELBO),
}
LOGISTIC_METHODS: dict[str, Method] = {
    "AutoNormal": (AutoNormal, PYRO_ELBO),
    "AutoMultivariateNormal": (AutoMultivariateNormal, PYRO_ELBO),
    "LIVI": (AutoSemiImplicit, partial(LIVI_ELBO, PARTICLES)),
    "KIVI": (AutoImplicit, partial(KIVI_ELBO, PARTICLES)),
}


class Mixture(dist.MixtureSameFamily):
    """A mixture on R with a real support, because Pyro has no bijection for mixture supports."""

    support = constraints.real


MIXTURE = Mixture(dist.Categorical(torch.ones(2)), dist.Normal(torch.tensor([-3.0, 3.0]), 1.0))
EDGES = torch.linspace(-8, 8, 161, dtype=torch.float64)


def mixture_model() -> None:
    pyro.sample("x", MIXTURE)


def bin_masses(edges: Tensor) -> Tensor:
    """Return the mixture's probabilities of the bins between ``edges`` and of the outer two."""
    components = dist.Normal(torch.tensor([[-3.0], [3.0]], dtype=edges.dtype), 1.0)
    cdf = components.cdf(edges).mean(0)
    return torch.cat([cdf[:1], cdf.diff(), 1 - cdf[-1:]])


def total_variation(draws: Tensor, edges: Tensor, masses: Tensor) -> float:
    """Return the total variation between the histogram of the draws and the exact masses.

    :param draws: ``(n,)``.
    :param edges: ``(num_edges,)``, increasing.
    :param masses: ``(num_edges + 1,)``, with the two unbounded bins first and last.
    """
    counts = torch.bincount(torch.bucketize(draws.to(edges), edges), minlength=len(masses))
    return 0.5 * (counts / len(draws) - masses).abs().sum().item()


def measure_mixture(draws: Tensor) -> dict[str, Any]:
    """Measure ``draws`` ``(n,)`` of the mixture; a mode without draws has no spread."""
    right = draws > 0
    sds = [draws[side].std().item() if side.sum() > 1 else None for side in (~right, right)]
    return {
        "weight_right": right.double().mean().item(),
        "total_variation": total_variation(draws, EDGES, bin_masses(EDGES)),
        "sd_left": sds[0],
        "sd_right": sds[1],
    }


def train(model: Model, method: Method, args: argparse.Namespace, *data: Tensor) -> AutoGuide:
    make_guide, make_elbo = method
    guide = make_guide(model)
    fit(SVI(model, guide, cosine_adam(args.lr, args.steps), make_elbo()), args.steps, *data)
    return guide


def run_mixture(args: argparse.Namespace) -> None:
    """Fit and measure the methods, and draw the figure of the first seed."""
    shown: dict[str, Tensor] = {}
    for method, seed in progress("mixture", MIXTURE_METHODS, args):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        guides: list[AutoGuide] = []
        wall = seconds(
            lambda: guides.append(train(mixture_model, MIXTURE_METHODS[method], args))  # noqa: B023
        )
        draws = draw(guides[0], args.draws)["x"]
        shown.setdefault(method, draws)
        record(args, "mixture", method, seed, measure_mixture(draws) | {"seconds": wall})
    pyro.set_rng_seed(0)
    for seed in range(10):
        exact = measure_mixture(MIXTURE.sample((args.draws,)))
        record(args, "mixture", "exact draws", seed, exact)
    plot_mixture(shown, args.out.with_name(f"{args.out.stem}_mixture.png"))


def plot_mixture(draws: dict[str, Tensor], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(draws), figsize=(2.6 * len(draws), 2.4), sharey=True)
    centers, widths = (EDGES[:-1] + EDGES[1:]) / 2, EDGES.diff()
    density = bin_masses(EDGES)[1:-1] / widths
    for panel, (method, values) in zip(panels, draws.items(), strict=True):
        counts = torch.histc(values, len(centers), EDGES[0].item(), EDGES[-1].item())
        panel.fill_between(centers, counts / len(values) / widths, step="mid", alpha=0.5)
        panel.plot(centers, density, "k", linewidth=1)
        panel.set(title=method, xlim=(-7, 7), ylim=(0, 2 * density.max().item()))
        panel.title.set_fontsize(8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def logistic_data(num_rows: int = 200) -> tuple[Tensor, Tensor]:
    """Inputs uniform on [-5, 5]² and labels from one draw of the model, with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(num_rows, 2, generator=generator) - 5
    w = torch.randn(2, generator=generator)
    return x, torch.bernoulli(torch.sigmoid(x @ w), generator=generator)


def logistic_model(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=torch.linalg.vecdot(x, w)), obs=y)


def run_logistic(args: argparse.Namespace) -> None:
    """Fit the methods, compare them with NUTS, and draw the figure of the first seed."""
    data = logistic_data()
    pyro.set_rng_seed(0)
    kernel = NUTS(logistic_model)
    nuts = MCMC(kernel, args.nuts_draws, args.nuts_draws // 4, disable_progbar=True)
    wall = seconds(lambda: nuts.run(*data))
    summary = {key: float(value.min()) for key, value in nuts.diagnostics()["w"].items()}
    record(args, "logistic", "NUTS", 0, summary | {"seconds": wall})
    shown = {"NUTS": nuts.get_samples()["w"]}
    for method, seed in progress("logistic", LOGISTIC_METHODS, args):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        guides: list[AutoGuide] = []
        wall = seconds(
            lambda: guides.append(train(logistic_model, LOGISTIC_METHODS[method], args, *data))  # noqa: B023
        )
        comparison = compare(logistic_model, guides[0], nuts, *data)
        shown.setdefault(method, comparison.guide_draws["w"])
        result = {
            "sliced_wasserstein": comparison.sliced_wasserstein,
            "floor": comparison.sampling_floor,
            "floor_ratio": comparison.floor_ratio,
            "sd_ratio": comparison.sites["w"].sd_ratio.tolist(),
            "correlation": torch.corrcoef(comparison.guide_draws["w"].T)[0, 1].item(),
            "reference_correlation": torch.corrcoef(shown["NUTS"].T)[0, 1].item(),
        }
        record(args, "logistic", method, seed, result | {"seconds": wall})
    plot_logistic(shown, args.out.with_name(f"{args.out.stem}_logistic.png"))


def plot_logistic(draws: dict[str, Tensor], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(draws), figsize=(2.4 * len(draws), 2.6), sharex=True, sharey=True
    )
    for panel, (method, values) in zip(panels, draws.items(), strict=True):
        panel.scatter(*values[:1000].T, s=1, alpha=0.5)
        panel.set_title(method, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def progress(toy: str, methods: dict[str, Method], args: argparse.Namespace) -> tqdm:
    runs = [(method, seed) for method in methods for seed in range(args.seeds)]
    return tqdm(runs, desc=toy, unit="run")


def record(
    args: argparse.Namespace, toy: str, method: str, seed: int, result: dict[str, Any]
) -> None:
    keys = ("steps", "lr", "draws") if toy == "mixture" else ("steps", "lr", "nuts_draws")
    settings = {key: getattr(args, key) for key in keys} | {"particles": PARTICLES}
    line = {"toy": toy, "method": method, "seed": seed}
    append_record(args.out, line | settings | result | environment("cpu"))


def forget(path: Path, toy: str) -> None:
    """Remove the lines of ``toy`` from the records."""
    kept = [line for line in read_records(path) if line["toy"] != toy]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))


COLUMNS = {
    "mixture": {
        "weight of +3": ("weight_right", 3),
        "total variation": ("total_variation", 3),
        "sd of -3": ("sd_left", 2),
        "sd of +3": ("sd_right", 2),
        "seconds": ("seconds", 0),
    },
    "logistic": {
        "sliced W2": ("sliced_wasserstein", 3),
        "floor": ("floor", 3),
        "x floor": ("floor_ratio", 1),
        "correlation": ("correlation", 3),
        "NUTS's": ("reference_correlation", 3),
        "seconds": ("seconds", 0),
    },
}


#: by quadrature over a grid
LOGISTIC_CORRELATION = 0.111
NOTE = f"""Mean (range) over seeds. The row "exact draws" shows the sampling floor of each column.

The exact correlation of the logistic posterior is {LOGISTIC_CORRELATION}, by quadrature. The
difference of NUTS is its own sampling error, which the floor of independent draws does not include.
"""


def report(path: Path) -> str:
    """Return the Markdown tables of the records."""
    parts = []
    for toy, columns in COLUMNS.items():
        lines = [line for line in read_records(path) if line["toy"] == toy]
        rows = []
        for method in dict.fromkeys(line["method"] for line in lines):
            runs = [line for line in lines if line["method"] == method]
            cells = [
                spread([run[key] for run in runs if run.get(key) is not None], digits, none="-")
                for key, digits in columns.values()
            ]
            within = sum(abs(run.get("weight_right", 2) - 0.5) <= 0.03 for run in runs)
            good = [f"{within} of {len(runs)}"] if toy == "mixture" else []
            rows.append([method, *cells, *good])
        if rows:
            extra = ["weights 0.5 ± 0.03"] if toy == "mixture" else []
            steps = f"{lines[0]['steps']} steps, rate {lines[0]['lr']:g}"
            parts.append(f"{toy}, {steps}:\n\n{markdown_table([toy, *columns, *extra], rows)}")
    return "\n".join([*parts, NOTE])


#: the function and the number of steps of each toy
RUNS = {"mixture": (run_mixture, 1000), "logistic": (run_logistic, 500)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toys", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--steps", type=int, help="default: 1000 mixture, 500 logistic")
    parser.add_argument("--lr", type=float, default=1e-2, help="falls to zero along a cosine")
    parser.add_argument("--draws", type=int, default=100_000, help="of each guide of the mixture")
    parser.add_argument("--nuts-draws", type=int, default=2000, help="after a quarter as warm-up")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--out", type=Path, default=RESULTS / "implicit_toys.jsonl")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    for toy in args.toys:
        forget(args.out, toy)
        run, steps = RUNS[toy]
        run(argparse.Namespace(**vars(args) | {"steps": args.steps or steps}))
    write_page(args.out, report(args.out))


if __name__ == "__main__":
    main()
