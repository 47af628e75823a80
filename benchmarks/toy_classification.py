# SPDX-License-Identifier: Apache-2.0
"""The four-class toy of the GPVI paper: predictive uncertainty far from the data.

Four Gaussian blobs in the plane, 100 points, and a network 2-10-10-4 with a standard normal prior
on its 184 weights (section 4.3 and Figs 2 and 8 of the paper; it names no prior). Each method draws
networks; the *map* is the standard deviation of their class probabilities, summed over the four
classes, at each point of a grid on [-10, 10]². The error is the mean absolute difference between a
map and that of NUTS::

    python -m benchmarks.toy_classification
    python -m benchmarks.toy_classification --methods GPVI NUTS --seeds 1
    python -m benchmarks.toy_classification --paper --methods NUTS GPVI InjectiveELBO
    python -m benchmarks.toy_classification --report

``--paper`` sets the steps and the rate of the paper: two hours per method, which continue from
their checkpoints in ``--runs`` after a kill. A quarter of an hour of one CPU thread for one seed.
Each run adds one line to ``--out``, with its map; runs that have a line with
the same settings are skipped. ``--report`` writes the table and the figure.

**References:**

[1] `Generative Particle Variational Inference via Estimation of Functional Gradients`,
    N. Ratzlaff et al., ICML 2021.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, RBFSteinKernel
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal, init_to_sample
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    add_paper_arguments,
    attempt,
    cosine_adam,
    fit,
    markdown_table,
    parse_arguments,
    read_records,
    run_missing,
    spread,
    train_resumably,
    write_page,
)
from pyro_implicit import (
    AVB_ELBO,
    KIVI_ELBO,
    LIVI_ELBO,
    SIVI_ELBO,
    SVGD,
    AutoImplicit,
    AutoSemiImplicit,
    InjectiveELBO,
    ResidualGenerator,
    ScoreELBO,
)
from pyro_implicit.diagnostics import draw
from pyro_implicit.infer import AmortizedKSD_ELBO, AmortizedSVGD_ELBO, ImplicitELBO
from pyro_implicit.infer.gpvi import GPVI_ELBO

LAYERS = [(10, 2), (10, 10), (4, 10)]
NUM_WEIGHTS = sum(rows * columns + rows for rows, columns in LAYERS)
CENTERS = torch.tensor([[-2.0, -2.0], [-2.0, 2.0], [2.0, -2.0], [2.0, 2.0]])
CHI_SQUARE_MEDIAN = 0.455  # of one degree of freedom
NUM_TRAIN, NUM_TEST, BLOB_SD = 100, 200, 0.3

Data = tuple[Tensor, Tensor]


def make_data(num_points: int, seed: int) -> Data:
    """Points ``(n, 2)`` around the four centres, equally many each, and their classes ``(n,)``."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(num_points) % len(CENTERS)
    return CENTERS[label] + BLOB_SD * torch.randn(num_points, 2, generator=generator), label


def make_grid(points_per_side: int) -> Tensor:
    """``(points_per_side**2, 2)``; the first coordinate varies slowest."""
    axis = torch.linspace(-10, 10, points_per_side)
    return torch.cartesian_prod(axis, axis)


def logits(theta: Tensor, x: Tensor) -> Tensor:
    """Evaluate networks with weights ``(*batch, 184)`` at points ``(n, 2)``: ``(*batch, n, 4)``."""
    hidden, used = x, 0
    for position, (rows, columns) in enumerate(LAYERS):
        weight, bias = theta[..., used : used + rows * (columns + 1)].split(
            [rows * columns, rows], -1
        )
        hidden = (hidden if position == 0 else hidden.relu()) @ weight.unflatten(
            -1, (rows, columns)
        ).mT
        hidden = hidden + bias.unsqueeze(-2)
        used += rows * (columns + 1)
    return hidden


def model(x: Tensor, y: Tensor) -> None:
    theta = pyro.sample("theta", dist.Normal(torch.zeros(NUM_WEIGHTS), 1.0).to_event(1))
    pyro.sample("y", dist.Categorical(logits=logits(theta, x)).to_event(1), obs=y)


def potential(theta: Tensor, data: Data) -> Tensor:
    """Minus the log-density of the model, up to a constant: ``(*batch)``.

    For NUTS and the ensemble, at a fifth of the model's time.
    """
    x, y = data
    log_likelihood = logits(theta, x).log_softmax(-1)[..., torch.arange(len(y)), y].sum(-1)
    return theta.square().sum(-1) / 2 - log_likelihood


Method = Callable[[Data, argparse.Namespace, dict[str, Any]], Tensor]
#: Table 8. The rate of the paper is constant.
PAPER = {"steps": 500_000, "particles": 100, "lr": 1e-3}


def by_guide(make_guide: Callable, make_elbo: Callable, particles: int | None = None) -> Method:
    """A guide initialised at a network of the prior, trained by an ELBO."""

    def run(data: Data, args: argparse.Namespace, key: dict[str, Any]) -> Tensor:
        guide = make_guide(model, init_loc_fn=init_to_sample)
        # The model broadcasts: Pyro's vectorisation is the fastest here.
        elbo = make_elbo(particles or args.particles, vectorize_particles="plate")
        train_resumably(model, guide, elbo, args, key, *data)
        return draw(guide, args.draws, *data)["theta"]

    return run


def svgd(data: Data, args: argparse.Namespace, key: dict[str, Any]) -> Tensor:
    """Pyro's SVGD with a kernel on whole networks, as in the paper."""
    optim = cosine_adam(args.lr, args.steps)
    # Pyro multiplies kernels of single coordinates, and the product of 184 vanishes. This bandwidth
    # corresponds to the median distance between whole networks.
    kernel = RBFSteinKernel(bandwidth_factor=NUM_WEIGHTS / CHI_SQUARE_MEDIAN)
    method = SVGD(model, kernel, optim, args.particles, 0, mode="multivariate")
    fit(method, args.steps, *data)
    return method.get_named_particles()["theta"]


def ensemble(data: Data, args: argparse.Namespace, key: dict[str, Any]) -> Tensor:
    """Modes of the posterior, by gradient descent from networks of the prior."""
    theta = torch.randn(args.particles, NUM_WEIGHTS).requires_grad_()
    optim = torch.optim.Adam([theta], args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, args.steps)
    for _ in range(args.steps):
        optim.zero_grad()
        potential(theta, data).sum().backward()
        optim.step()
        schedule.step()
    return theta.detach()


def nuts(data: Data, args: argparse.Namespace, key: dict[str, Any]) -> Tensor:
    """Two chains from networks of the prior, in sequence: ``(2, nuts_draws, 184)``."""
    chains = []
    for _ in range(2):
        kernel = NUTS(
            potential_fn=lambda latents: potential(latents["theta"], data),
            max_tree_depth=args.nuts_tree_depth,
        )
        start = {"theta": torch.randn(NUM_WEIGHTS)}
        mcmc = MCMC(kernel, args.nuts_draws, args.nuts_warmup, start, disable_progbar=True)
        mcmc.run()
        chains.append(mcmc.get_samples()["theta"])
    return torch.stack(chains)


IMPLICIT = partial(AutoImplicit, frame="mode")
SEMI_IMPLICIT = partial(AutoSemiImplicit, frame="mode")
INJECTIVE = partial(IMPLICIT, generator=lambda size: ResidualGenerator(size, 10))
# LIVI's determinants are as large as the noise: fewer particles and dimensions, for equal time.
METHODS: dict[str, Method] = {
    "NUTS": nuts,
    "InjectiveELBO": by_guide(INJECTIVE, InjectiveELBO),
    "GPVI": by_guide(INJECTIVE, GPVI_ELBO),
    "amortised GFSF": by_guide(INJECTIVE, partial(ScoreELBO, estimator="stein", covariance=None)),
    "amortised SVGD": by_guide(INJECTIVE, AmortizedSVGD_ELBO),
    "amortised KSD": by_guide(INJECTIVE, AmortizedKSD_ELBO),
    "KIVI": by_guide(IMPLICIT, KIVI_ELBO),
    "AVB": by_guide(IMPLICIT, AVB_ELBO),
    "LIVI": by_guide(partial(SEMI_IMPLICIT, noise_dim=50), LIVI_ELBO, particles=10),
    "SIVI": by_guide(SEMI_IMPLICIT, SIVI_ELBO, particles=32),
    "AutoNormal": by_guide(AutoNormal, ImplicitELBO),
    "AutoMultivariateNormal": by_guide(AutoMultivariateNormal, ImplicitELBO),
    "SVGD (particles)": svgd,
    "deep ensemble": ensemble,
}


@torch.no_grad()
def uncertainty(theta: Tensor, grid: Tensor) -> Tensor:
    """Return the map ``(len(grid),)`` of networks ``(n, 184)``: sd of the probabilities, summed."""
    probabilities = torch.cat([logits(part, grid).softmax(-1) for part in theta.split(100)])
    return probabilities.std(0, correction=0).sum(-1)


@torch.no_grad()
def scores(theta: Tensor, data: Data) -> dict[str, float]:
    """Return the accuracy and likelihood of the mixture of networks ``(n, 184)``."""
    x, y = data
    probability = logits(theta, x).softmax(-1).mean(0)
    return {
        "accuracy": (probability.argmax(-1) == y).double().mean().item(),
        "log_likelihood": probability[torch.arange(len(y)), y].log().mean().item(),
    }


def run(key: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    method = key["method"]
    pyro.clear_param_store()
    pyro.set_rng_seed(key["seed"])
    start = time.process_time()  # excludes other jobs on the machine
    theta = METHODS[method](make_data(NUM_TRAIN, seed=0), args, key)
    result: dict[str, Any] = {"cpu_seconds": time.process_time() - start}
    grid = make_grid(args.grid)
    if method == "NUTS":
        first, second = (uncertainty(chain, grid) for chain in theta)
        result["floor"] = (first - second).abs().mean().item()
        theta = theta.flatten(0, 1)
    result |= scores(theta, make_data(NUM_TEST, seed=1))
    return result | {"map": [round(value, 4) for value in uncertainty(theta, grid).tolist()]}


def run_all(args: argparse.Namespace) -> None:
    keys = []
    for method in args.methods:
        names = ["grid", "steps", "lr", "particles", "draws"]
        seeds = range(args.first_seed, args.seeds)
        if method == "NUTS":  # one reference for all seeds
            names = ["grid", "nuts_draws", "nuts_warmup", "nuts_tree_depth"]
            seeds = range(1)
        settings = {name: getattr(args, name) for name in names}
        keys += [{"method": method, "seed": seed} | settings for seed in seeds]
    run_missing(args.out, keys, lambda key: attempt(run, key, args))


def difference(left: dict[str, Any], right: dict[str, Any]) -> float:
    """Return the mean absolute difference of two maps."""
    pairs = zip(left["map"], right["map"], strict=True)
    return mean(abs(a - b) for a, b in pairs)


def report(path: Path) -> str:
    """Return the Markdown table of the records, closest to NUTS first."""
    records = read_records(path)
    reference = next(record for record in records if record["method"] == "NUTS")
    groups = defaultdict(list)
    for record in records:
        groups[record["method"]].append(record)
    rows = []
    for method, runs in groups.items():
        fitted = [run for run in runs if "error" not in run]
        numbers = [[difference(run, reference) for run in fitted]]
        if method == "NUTS":
            numbers = [[reference["floor"]]]
            method = "NUTS, two chains"
        numbers.append([mean(run["map"]) for run in fitted])
        numbers += [[run[key] for run in fitted] for key in COLUMNS.values()]
        cells = [spread(*pair) for pair in zip(numbers, (3, 2, 3, 3, 0), strict=True)]
        rows.append([method, *cells, f"{len(fitted)} of {len(runs)}"])
    rows.sort(key=lambda row: (row[0] != "NUTS, two chains", row[1]))
    header = ["method", "difference to NUTS", "mean of the map", *COLUMNS, "runs"]
    return markdown_table(header, rows) + "\n" + NOTE


COLUMNS = {
    "test accuracy": "accuracy",
    "test log-likelihood": "log_likelihood",
    "CPU seconds": "cpu_seconds",
}
NOTE = """Mean (range) over seeds. The map is the standard deviation over networks of the class
probabilities, summed over classes, on a grid on [-10, 10]²; the difference is the mean absolute
difference over the grid. The first row compares two NUTS chains with each other; the other methods
are compared with the union of both chains, which is more accurate than either.
"""


def plot(path: Path) -> None:
    """Draw the maps of the first seed of each method and of NUTS, with the training points."""
    import matplotlib.pyplot as plt

    records = [record for record in read_records(path) if "error" not in record]
    first = {record["method"]: record for record in reversed(records)}
    shown = [
        "NUTS",
        *sorted(first.keys() - {"NUTS"}, key=lambda m: difference(first[m], first["NUTS"])),
    ]
    columns = 5
    height = -(-len(shown) // columns)
    figure, panels = plt.subplots(
        height, columns, figsize=(2 * columns, 2.2 * height), squeeze=False, layout="constrained"
    )
    x, _ = make_data(NUM_TRAIN, seed=0)
    for panel in panels.flat:
        panel.axis("off")
    for panel, method in zip(panels.flat, shown, strict=False):
        side = first[method]["grid"]
        values = torch.tensor(first[method]["map"]).reshape(side, side).T.numpy()
        image = panel.imshow(
            values, origin="lower", extent=(-10, 10, -10, 10), vmin=0, vmax=1.75, cmap="Blues"
        )
        panel.scatter(*x.T.numpy(), s=0.5, color="tab:red")
        distance = difference(first[method], first["NUTS"])
        panel.set_title(method if method == "NUTS" else f"{method}: {distance:.2f}", fontsize=7)
    figure.colorbar(image, ax=panels, shrink=0.6)
    figure.savefig(path.with_suffix(".png"), dpi=90)
    plt.close(figure)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if not args.report:
        run_all(args)
    write_page(args.out, report(args.out))
    plot(args.out)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    add_paper_arguments(parser, seeds=1)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=1e-2, help="falls to zero along a cosine")
    parser.add_argument("--particles", type=int, default=100)
    parser.add_argument("--draws", type=int, default=1000, help="networks drawn from a guide")
    parser.add_argument("--nuts-draws", type=int, default=2000, help="of each chain")
    parser.add_argument("--nuts-warmup", type=int, default=300)
    parser.add_argument("--nuts-tree-depth", type=int, default=7)
    parser.add_argument("--grid", type=int, default=41, help="points on a side")
    add_output_arguments(parser, RESULTS / "toy_classification.jsonl")
    return parser


if __name__ == "__main__":
    out = RESULTS / "paper_toy_classification.jsonl"
    main(parse_arguments(parser(), lambda args: PAPER | {"out": out}))
