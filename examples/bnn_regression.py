# SPDX-License-Identifier: Apache-2.0
"""A Bayesian neural network for regression: an implicit guide over all of its weights.

One hidden layer of 50 ReLU units predicts the progression of diabetes from ten measurements (442
patients, scikit-learn). The script approximates the posterior over weights and noise by the
implicit guide, by a mean-field Gaussian, by an ensemble of MAP fits and, with ``--nuts``, by NUTS.
It prints errors on held-out rows and draws 90 % predictive intervals. It takes about two
minutes::

    python examples/bnn_regression.py
    python examples/bnn_regression.py --data my_table.csv     # numeric, target in the last column
    python examples/bnn_regression.py --nuts 500              # NUTS takes another ten minutes
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.optim import ClippedAdam
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from tqdm import trange

from pyro_implicit import LIVI_ELBO, AutoEnsemble, AutoSemiImplicit
from pyro_implicit.diagnostics import draw
from pyro_implicit.infer import ImplicitELBO


class BNN(PyroModule):
    """A network with one hidden layer, a prior on each weight, and unknown noise."""

    def __init__(self, num_features: int, hidden: int) -> None:
        super().__init__()
        self.hidden = PyroModule[nn.Linear](num_features, hidden)
        self.output = PyroModule[nn.Linear](hidden, 1)
        for layer in (self.hidden, self.output):
            shape, spread = layer.weight.shape, layer.in_features**-0.5
            layer.weight = PyroSample(dist.Normal(0.0, spread).expand(shape).to_event(2))
            layer.bias = PyroSample(dist.Normal(0.0, 1.0).expand(shape[:1]).to_event(1))
        self.noise = PyroSample(dist.LogNormal(-1.0, 1.0))

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        mean = self.output(torch.relu(self.hidden(x))).squeeze(-1)
        noise = pyro.deterministic("sd", self.noise)
        pyro.deterministic("mean", mean)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(mean, noise), obs=y)


class Data(NamedTuple):
    """Standardised training and test rows, and the scale of ``y``."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    y_mean: Tensor
    y_sd: Tensor


def load(path: Path | None, seed: int) -> Data:
    """Read a table and hold out a tenth of its rows: a random tenth, or the split in the file."""
    splits = None
    if path is None:
        x, y = load_diabetes(return_X_y=True)
    elif path.suffix == ".npz":
        file = np.load(path)
        x, y = file["X"], file["y"]
        splits = [file["train_idx"], file["test_idx"]] if "train_idx" in file else None
    else:
        table = np.genfromtxt(path, delimiter=",")
        table = table[~np.isnan(table).all(axis=1)]  # the header is read as nan
        if np.isnan(table).any():
            raise ValueError(f"{path} has entries that are no numbers: drop or encode them first")
        x, y = table[:, :-1], table[:, -1]
    if splits is not None:
        train, test = (rows[seed % len(rows)] for rows in splits)
    else:
        train, test = np.split(
            np.random.default_rng(seed).permutation(len(y)), [round(0.9 * len(y))]
        )
    x, y = torch.tensor(x).float(), torch.tensor(y).float()
    x_mean, x_sd, y_mean, y_sd = x[train].mean(0), x[train].std(0), y[train].mean(), y[train].std()
    x = (x - x_mean) / torch.where(x_sd > 0, x_sd, 1.0)
    y = (y - y_mean) / y_sd
    return Data(x[train], y[train], x[test], y[test], y_mean, y_sd)


def fit(model: BNN, guide, elbo: Trace_ELBO, data: Data, steps: int, name: str) -> None:
    # Decrease the learning rate a hundredfold, so that the last steps average the gradient noise.
    optimizer = ClippedAdam({"lr": 1e-2, "lrd": 0.01 ** (1 / steps)})
    svi = SVI(model, guide, optimizer, loss=elbo)
    for step in (bar := trange(steps, desc=name)):
        loss = svi.step(data.x_train, data.y_train)
        if step % 100 == 0:
            bar.set_postfix(loss=f"{loss:.1f}", refresh=False)


class Prediction(NamedTuple):
    """Predictive draws of the test rows in the units of the data, one network per draw."""

    mean: Tensor  # (num_draws, num_rows), without noise
    sd: Tensor  # (num_draws, 1), of the noise

    def interval(self, level: float, noisy: bool = True) -> Tensor:
        """Return the central interval of a new measurement, or of its noise-free mean."""
        draws = self.mean.expand(max(1, 2000 // len(self.mean)), -1, -1)
        draws = torch.normal(draws, self.sd.expand_as(draws)) if noisy else draws
        tails = torch.tensor([(1 - level) / 2, (1 + level) / 2])
        return draws.flatten(0, 1).quantile(tails, dim=0)


def predict(model: BNN, weights: dict[str, Tensor], data: Data) -> Prediction:
    sites = ["mean", "sd"]
    draws = Predictive(model, weights, return_sites=sites)(data.x_test)
    mean, sd = (draws[site].reshape(len(draws[site]), -1) for site in sites)
    return Prediction(data.y_mean + data.y_sd * mean, data.y_sd * sd)


def scores(prediction: Prediction, data: Data) -> list[str]:
    y = data.y_mean + data.y_sd * data.y_test
    rmse = (prediction.mean.mean(0) - y).square().mean().sqrt()
    log_density = dist.Normal(prediction.mean, prediction.sd).log_prob(y)
    log_likelihood = (log_density.logsumexp(0) - np.log(len(log_density))).mean()
    low, high = prediction.interval(0.9)
    coverage = ((low <= y) & (y <= high)).float().mean()
    width = (high - low).mean()
    return [f"{rmse:.4g}", f"{log_likelihood:.3f}", f"{coverage:.0%}", f"{width:.4g}"]


def plot(predictions: dict[str, Prediction], data: Data, path: Path) -> None:
    figure, axes = plt.subplots(
        1,
        len(predictions),
        figsize=(4.3 * len(predictions), 4),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    y = data.y_mean + data.y_sd * data.y_test
    for axis, (name, prediction) in zip(axes[0], predictions.items(), strict=True):
        order = prediction.mean.mean(0).argsort()
        for noisy, alpha, label in [
            (True, 0.2, "new measurement"),
            (False, 0.5, "its noise-free mean"),
        ]:
            low, high = prediction.interval(0.9, noisy)[:, order]
            axis.fill_between(
                range(len(y)), low, high, alpha=alpha, color="C0", linewidth=0, label=label
            )
        axis.plot(prediction.mean.mean(0)[order], color="C0")
        axis.plot(y[order], ".", color="0.2", label="measured")
        axis.set_title(name)
        axis.set_xlabel("test row, by predicted mean")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("target")
    axes[0, 0].legend(title="90 % interval", frameon=False, loc="upper left")
    figure.savefig(path, dpi=150)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # more threads do not speed up small tensors
    pyro.set_rng_seed(args.seed)
    data = load(args.data, args.seed)
    model = BNN(data.x_train.shape[1], args.hidden)
    train = data.x_train, data.y_train

    def implicit() -> dict[str, Tensor]:
        # Fewer noise dimensions than weights; learnt Gaussian noise covers the remaining ones.
        guide = AutoSemiImplicit(
            model, noise_dim=args.noise_dim, noise_scale="learn", frame=None, init_scale=0.01
        )
        elbo = LIVI_ELBO(num_particles=args.particles)
        fit(model, guide, elbo, data, args.steps, "implicit")
        return draw(guide, args.num_draws, *train)

    def mean_field() -> dict[str, Tensor]:
        guide = AutoNormal(model, init_scale=0.01)
        elbo = ImplicitELBO(num_particles=args.particles)  # Trace_ELBO with vectorised particles
        fit(model, guide, elbo, data, args.steps, "mean-field")
        return draw(guide, args.num_draws, *train)

    def deep_ensemble() -> dict[str, Tensor]:
        guide = AutoEnsemble(model, args.ensemble)
        fit(model, guide, ImplicitELBO(args.ensemble), data, args.steps, "deep ensemble")
        return guide.get_samples()

    def nuts() -> dict[str, Tensor]:
        mcmc = MCMC(NUTS(model), num_samples=args.nuts, warmup_steps=args.nuts)
        mcmc.run(*train)
        return mcmc.get_samples()

    methods = {"implicit": implicit, "mean-field": mean_field, "deep ensemble": deep_ensemble}
    if args.nuts:
        methods["NUTS"] = nuts
    row = "{:14} {:>10} {:>15} {:>13} {:>12} {:>8}".format
    table = [row("", "RMSE", "log-likelihood", "90 % covers", "mean width", "seconds")]
    predictions = {}
    for name, method in methods.items():
        pyro.clear_param_store()
        start = time.perf_counter()
        weights = method()
        seconds = time.perf_counter() - start
        predictions[name] = predict(model, weights, data)
        table.append(row(name, *scores(predictions[name], data), f"{seconds:.0f}"))
    print(f"\n{len(data.y_train)} training rows, {len(data.y_test)} test rows")
    print("\n".join(table))
    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "bnn_regression.png"
    plot(predictions, data, picture)
    print(f"Figure: {picture}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a .csv file, or an .npz file with X and y")
    parser.add_argument("--steps", type=int, default=3000, help="steps of each fit")
    parser.add_argument("--particles", type=int, default=8, help="draws per step")
    parser.add_argument("--hidden", type=int, default=50, help="hidden units of the network")
    parser.add_argument("--noise-dim", type=int, default=50, help="noise of the implicit guide")
    parser.add_argument("--ensemble", type=int, default=5, help="networks of the deep ensemble")
    parser.add_argument("--nuts", type=int, default=0, help="draws of NUTS; 0 skips NUTS")
    parser.add_argument("--num-draws", type=int, default=500, help="posterior draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the figure")
    main(parser.parse_args())
