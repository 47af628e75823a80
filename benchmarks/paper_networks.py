# SPDX-License-Identifier: Apache-2.0
"""The Bayesian network of PVI's benchmark on Concrete, by its authors' protocol.

::

    python -m benchmarks.paper_networks --data-dir DIR --splits 10
    python -m benchmarks.paper_networks --report

Lim and Johansen (2024), section 5.4 and public code: ten ReLU units, priors N(0, 5), noise .01 of
standardised targets, a fifth of the rows for testing (seed 2 and the next ones), minibatches of 100
rows, 999 steps of RMSprop with a learning rate that falls from .001 to .00001 in the first 100. The
measure is the root of the mean squared error of single draws: all rows and 1,000 draws.

The scale of the conditional is a constant here, and depends on the noise there. ``fit`` has
a minute for the same network and all rows at once.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.nn import PyroParam
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributions import constraints

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    cpu_seconds,
    markdown_table,
    read_records,
    run_missing,
    write_page,
)
from benchmarks.paper_numbers import layers
from pyro_implicit import AutoSemiImplicit, fit
from pyro_implicit.diagnostics import draw
from pyro_implicit.infer import HSIVI_ELBO, PVI, SIVI_ELBO
from pyro_implicit.nn import predict, regressor, to_bayesian_

UNITS, NOISE, PRIOR, BATCH, EPOCHS, NOISE_DIM, SECONDS = 10, 0.01, 5.0, 100, 111, 10, 60.0
METHODS = ("PVI", "SIVI", "SIVI-SM", "fit")


class Data(NamedTuple):
    """Standardised rows."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def load(folder: Path, split: int) -> Data:
    table = np.loadtxt(folder / "tabular" / "concrete.data")
    parts = train_test_split(table[:, :-1], table[:, -1], test_size=0.2, random_state=2 + split)
    units = [(part.mean(0), part.std(0)) for part in (parts[0], parts[2])]
    scaled = [(part - units[i // 2][0]) / units[i // 2][1] for i, part in enumerate(parts)]
    x, test_x, y, test_y = (torch.tensor(part).float() for part in scaled)
    return Data(x, y, test_x, test_y)


def evaluate(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the network's values, ``(*batch, rows)``."""
    hidden = torch.relu(x @ weights["w1"].mT + weights["b1"].unsqueeze(-2))
    return (hidden * weights["w2"].unsqueeze(-2)).sum(-1) + weights["b2"].unsqueeze(-1)


def make_model(num_inputs: int, num_rows: int) -> Callable[..., None]:
    shapes = {"w1": (UNITS, num_inputs), "b1": (UNITS,), "w2": (UNITS,), "b2": ()}

    def model(x: Tensor, y: Tensor) -> None:
        weights = {
            name: pyro.sample(name, dist.Normal(x.new_zeros(shape), PRIOR).to_event(len(shape)))
            for name, shape in shapes.items()
        }
        values = evaluate(weights, x)
        with pyro.plate("rows", num_rows, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(values, NOISE), obs=y)

    return model


class Skip(nn.Module):
    """The sum of a network with two hidden layers and a linear map."""

    def __init__(self, noise_dim: int, output_dim: int) -> None:
        super().__init__()
        self.network = layers(noise_dim, 512, nn.LeakyReLU, output_dim)
        self.linear = nn.Linear(noise_dim, output_dim, bias=False)

    def forward(self, noise: Tensor) -> Tensor:
        return self.linear(noise) + self.network(noise)


def train(method: str, model: Callable[..., None], data: Data) -> Any:
    """Train a guide by the authors' settings."""

    def options_of(name: str) -> dict[str, Any]:
        # The authors' guides have no location and scale of their own.
        is_own = name.rpartition(".")[2] in ("loc", "scale")
        return {"lr": 0.0 if is_own else 1e-3, "alpha": 0.9}

    optim = pyro.optim.PyroOptim(torch.optim.RMSprop, options_of)
    dim = (data.x.shape[-1] + 2) * UNITS + 1
    options: dict[str, Any] = {"noise_dim": NOISE_DIM, "frame": None, "init_scale": 1.0}
    options["generator"] = Skip(NOISE_DIM, dim)
    guide: Any
    if method == "PVI":
        pvi = PVI(
            model,
            optim,
            num_draws=4,
            particle_lr=0.1,
            regularization=1e-3,
            guide_options=options,
        )
        guide, step = pvi.guide, pvi.step
    else:
        guide = AutoSemiImplicit(model, noise_scale="learn", **options)
        elbo: Any = SIVI_ELBO(250, 50)
        if method == "SIVI-SM":
            critic = lambda dim, _: layers(dim, 512, nn.LeakyReLU, dim)  # noqa: E731
            elbo = HSIVI_ELBO(250, critic, critic_optim={"lr": 1e-2})
        step = SVI(model, guide, optim, elbo).step
    guide(data.x[:BATCH], data.y[:BATCH])
    guide.loc, guide.scale = torch.zeros(dim), torch.ones(dim)
    guide.noise_scale = PyroParam(torch.full((dim,), math.log(2)), constraints.positive)
    index = 0
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(data.x)).split(BATCH):
            step(data.x[rows], data.y[rows])
            index += 1
            for one in optim.optim_objs.values():
                for group in one.param_groups:
                    falling = 1e-3 + (1e-5 - 1e-3) * min(1.0, index / 100)
                    group["lr"] = falling if group["lr"] else 0.0
    return guide


def fitted(data: Data) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the network's values at the test rows, by one call of ``fit``."""
    net = nn.Sequential(nn.Linear(data.x.shape[-1], UNITS), nn.ReLU(), nn.Linear(UNITS, 1))
    model = regressor(to_bayesian_(net, dist.Normal(0.0, PRIOR)), len(data.x), noise=NOISE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fit(model, "auto", data.x, data.y, max_seconds=SECONDS, seed=0, progress=False)
    (values,) = predict(found, [data.test_x], 1000, model=model, interval=None)
    assert values.variance is not None
    return values.mean, values.variance - NOISE**2


def run(folder: Path, method: str, split: int) -> dict[str, Any]:
    pyro.clear_param_store()
    pyro.set_rng_seed(split)
    data, began = load(folder, split), cpu_seconds()
    if method == "fit":
        average, variance = fitted(data)
    else:
        guide = train(method, make_model(data.x.shape[-1], len(data.x)), data)
        values = evaluate(draw(guide, 1000, data.x[:BATCH], data.y[:BATCH]), data.test_x)
        average, variance = values.mean(0), values.var(0, correction=0)
    seconds = cpu_seconds() - began
    squares = (average - data.test_y).square()
    return {
        "rmse": (squares + variance).mean().sqrt().item(),
        "rmse_of_mean": squares.mean().sqrt().item(),
        "cpu_seconds": seconds,
    }


def report(path: Path) -> str:
    """Return one line for each method."""
    records, rows = list(read_records(path)), []
    for method in METHODS:
        found = [record for record in records if record["method"] == method and "rmse" in record]
        if not found:
            continue
        cells = [method, str(len(found))]
        for field in ("rmse", "rmse_of_mean"):
            values = [record[field] for record in found]
            spread = f" +- {stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.3f}{spread}")
        rows.append([*cells, f"{mean(record['cpu_seconds'] for record in found):.0f}"])
    header = ["method", "splits", "RMSE of draws", "RMSE of their mean", "CPU s"]
    return markdown_table(header, rows) + "\nMean +- standard deviation over splits.\n"


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    keys = [
        {"method": method, "split": split}
        for split in range(args.splits)
        for method in args.methods
    ]
    run_missing(args.out, [] if args.report else keys, lambda key: run(args.data_dir, **key))
    write_page(args.out, report(args.out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="folder with tabular/")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--splits", type=int, default=10, help="splits 0 to SPLITS - 1")
    add_output_arguments(parser, RESULTS / "paper_networks.jsonl")
    main(parser.parse_args())
