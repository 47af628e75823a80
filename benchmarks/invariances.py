# SPDX-License-Identifier: Apache-2.0
"""Effect of invariances of the likelihood on variational guides.

The linear model depends on the sum of its weights only. In closed form: the terms of the ELBO of
the mean-field guide and of the guide that represents shifts, by number of weights. The networks
have one hidden layer with exchangeable units and output weights that may shift in directions that
the data do not detect: the certified bounds of three guides, alone and symmetrised::

    python -m benchmarks.invariances                     # the figure, a second
    python -m benchmarks.invariances --networks          # some minutes, resumable
    python -m benchmarks.invariances --report
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal, init_to_sample
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    Record,
    add_output_arguments,
    append_record,
    cosine_adam,
    environment,
    fit,
    markdown_table,
    missing_runs,
    read_records,
    write_page,
)
from pyro_implicit import (
    LIVI_ELBO,
    AutoImplicit,
    AutoSemiImplicit,
    InjectiveELBO,
    ResidualGenerator,
    SemiImplicit,
    evidence_bound,
)
from pyro_implicit.diagnostics import draw
from pyro_implicit.guides import Permutations, Symmetrized, Translations
from pyro_implicit.infer import ImplicitELBO

NUM_EVALUATED = 200
NUM_OTHERS = 200  # draws that estimate which map of a symmetrised guide made a draw
RATES = {"mean field": 0.02, "LIVI": 0.01, "injective": 0.01}


class Gaussian(NamedTuple):
    """Moments of all weights: ``(dim,)`` and ``(dim, dim)``."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class LinearModel:
    """y_n ~ N(sum of the weights, noise), with a prior variance that does not depend on dim."""

    dim: int
    y: Tensor
    noise_sd: float = 0.3
    prior_sd: float = 1.0

    def __call__(self) -> None:
        zeros = self.y.new_zeros(self.dim)
        sd = self.prior_sd / math.sqrt(self.dim)
        w = pyro.sample("w", dist.Normal(zeros, sd).to_event(1))
        with pyro.plate("rows", len(self.y)):
            pyro.sample("y", dist.Normal(w.sum(), self.noise_sd), obs=self.y)

    @property
    def prior_variance(self) -> float:
        """Prior variance of a weight."""
        return self.prior_sd**2 / self.dim

    def mean_field(self, loc: float, variance: float) -> Gaussian:
        """Prior times a likelihood N(loc, variance) for each weight: eq. 6a."""
        precision = 1 / self.prior_variance + 1 / variance
        ones = self.y.new_ones(self.dim)
        return Gaussian(ones * loc / variance / precision, torch.diag(ones) / precision)

    def abiding(self, loc: float, variance: float) -> Gaussian:
        """The same, with the likelihood averaged over all shifts that keep the sum: eq. 17."""
        ones = self.y.new_ones(self.dim)
        shrunk = self.prior_variance**2 / (self.dim * (variance + self.prior_variance))
        covariance = torch.diag(ones) * self.prior_variance - shrunk
        return Gaussian(covariance @ ones * loc / variance, covariance)

    def best(self, is_abiding: bool) -> tuple[float, float]:
        """Location and variance that maximise the ELBO of either guide: eqs. 20 and 21."""
        variance = self.noise_sd**2 / len(self.y)
        if is_abiding:
            return self.y.mean().item() / self.dim, variance / self.dim
        mean = self.abiding(*self.best(True)).mean[0].item()  # posterior mean
        return mean * (1 + variance / self.prior_variance), variance

    def log_likelihood(self, q: Gaussian) -> float:
        """Expected log-likelihood under a guide."""
        variance = self.noise_sd**2
        squares = (self.y - q.mean.sum()).square().sum() + len(self.y) * q.covariance.sum()
        constant = len(self.y) * math.log(2 * math.pi * variance)
        return -0.5 * (constant + squares.item() / variance)

    def divergence(self, q: Gaussian) -> float:
        """KL divergence from the prior, in nats."""
        prior = torch.eye(self.dim).to(self.y) * self.prior_variance
        return divergence(q, Gaussian(torch.zeros_like(q.mean), prior))

    def elbo(self, q: Gaussian) -> float:
        """Lower bound on the log evidence."""
        return self.log_likelihood(q) - self.divergence(q)

    def guide(self, loc: float, variance: float) -> Callable[[], Tensor]:
        """The abiding guide as a semi-implicit guide, whose generator makes the shifts."""
        sd = math.sqrt(1 / (1 / self.prior_variance + 1 / variance))
        width = math.sqrt(self.prior_variance - sd**2)
        shifts = width * (torch.eye(self.dim).to(self.y) - 1 / self.dim)
        mean = self.abiding(loc, variance).mean

        def generator(noise: Tensor) -> Tensor:
            return mean + noise @ shifts

        noise = dist.Normal(torch.zeros_like(mean), 1.0).to_event(1)
        return lambda: pyro.sample("w", SemiImplicit(generator, noise, sd))


def divergence(q: Gaussian, p: Gaussian) -> float:
    """KL(q || p)."""
    one, other = (torch.distributions.MultivariateNormal(*g) for g in (q, p))
    return torch.distributions.kl_divergence(one, other).item()


def linear_data(num_data: int = 10, noise_sd: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(num_data, generator=generator, dtype=torch.float64)
    return 1.0 + noise_sd * (noise - noise.mean())


def linear_terms(dims: list[int]) -> dict[str, dict[str, list[float]]]:
    """Return the terms by number of weights, for each guide and each optimum of the parameters."""
    terms: dict[str, dict[str, list[float]]] = {}
    for dim in dims:
        model = LinearModel(dim, linear_data())
        for at_abiding in (True, False):
            parameters = model.best(at_abiding)
            pair = {"mean field": model.mean_field, "abiding": model.abiding}
            for name, make in pair.items():
                q = make(*parameters)
                best = "abiding" if at_abiding else "mean field"
                row = terms.setdefault(f"{name}, best for {best}", {})
                for key, value in {
                    "log-likelihood": model.log_likelihood(q),
                    "KL to the prior": model.divergence(q),
                    "negative ELBO": -model.elbo(q),
                    "sd of the sum": q.covariance.sum().sqrt().item(),
                }.items():
                    row.setdefault(key, []).append(value)
    return terms


def draw_linear(dims: list[int], path: Path) -> None:
    import matplotlib.pyplot as plt

    terms = linear_terms(dims)
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.2), layout="constrained")
    styles = {
        "abiding, best for abiding": ("C0", "-"),
        "mean field, best for abiding": ("C0", "--"),
        "abiding, best for mean field": ("C1", "-"),
        "mean field, best for mean field": ("C1", "--"),
    }
    keys = ["log-likelihood", "KL to the prior", "negative ELBO", "sd of the sum"]
    for axis, key in zip(axes, keys, strict=True):
        for name, (color, style) in styles.items():
            axis.plot(dims, terms[name][key], color=color, linestyle=style, label=name)
        axis.set(xscale="log", xlabel="weights", title=key)
    axes[1].set_yscale("log")
    axes[2].set_yscale("log")
    axes[-1].axhline(1.0, color="gray", linewidth=0.8)
    axes[-1].text(dims[0], 0.95, "prior", color="gray", va="top")
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


class Network:
    """One hidden tanh layer, with a prior over functions that does not depend on its width."""

    def __init__(self, num_units: int, num_data: int = 40) -> None:
        generator = torch.Generator().manual_seed(0)
        sides = torch.cat([torch.linspace(-2, -0.5, num_data // 2), torch.linspace(0.5, 2, 20)])
        self.num_units, self.x = num_units, sides.unsqueeze(-1)
        self.y = torch.sin(3 * sides) + 0.1 * torch.randn(num_data, generator=generator)

    def __call__(self) -> None:
        size = self.num_units
        w1 = pyro.sample("w1", dist.Normal(0.0, 2.0).expand([size, 1]).to_event(2))
        b1 = pyro.sample("b1", dist.Normal(0.0, 2.0).expand([size]).to_event(1))
        sd = 2.0 / math.sqrt(size)
        w2 = pyro.sample("w2", dist.Normal(0.0, sd).expand([size]).to_event(1))
        mean = torch.tanh(self.x @ w1.mT + b1) @ w2
        with pyro.plate("rows", len(self.y)):
            pyro.sample("y", dist.Normal(mean, 0.1), obs=self.y)

    def hidden(self, weights: dict[str, Tensor]) -> Tensor:
        """``(num_draws, num_data, num_units)``."""
        return torch.tanh(self.x @ weights["w1"].mT + weights["b1"].unsqueeze(-2))

    def misfit(self, guide: Any) -> tuple[float, float]:
        """Return the RMSE of the mean prediction and the mean predictive sd."""
        draws = draw(guide, NUM_EVALUATED)
        means = (self.hidden(draws) @ draws["w2"].unsqueeze(-1)).squeeze(-1)
        return (means.mean(0) - self.y).square().mean().sqrt().item(), means.std(0).mean().item()

    def shifted(self, guide: Any) -> Symmetrized:
        scale = 1.0 / math.sqrt(self.num_units)
        return Symmetrized(guide, Translations("w2", self.hidden, scale), NUM_OTHERS)

    def permuted(self, guide: Any) -> Symmetrized:
        return Symmetrized(guide, Permutations({"w1": -2, "b1": -1, "w2": -1}), NUM_OTHERS)


def make_guide(name: str, model: Network) -> tuple[Any, Any]:
    start = {"init_loc_fn": init_to_sample, "init_scale": 0.05}
    if name == "mean field":
        return AutoNormal(model, **start), ImplicitELBO(8, compile="trace")
    if name == "LIVI":
        guide = AutoSemiImplicit(model, noise_dim=30, noise_scale="learn", frame=None, **start)
        return guide, LIVI_ELBO(4, compile="trace")
    rank = min(30, model.num_units)
    guide = AutoImplicit(model, lambda size: ResidualGenerator(size, rank), frame=None, **start)
    return guide, InjectiveELBO(4, compile="trace")


def run_network(num_units: int, name: str, training: str, steps: int) -> dict[str, Any]:
    """Train and evaluate one guide, alone or with permutations and shifts."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = Network(num_units)
    guide, elbo = make_guide(name, model)
    guide()
    whole = guide if training == "alone" else model.permuted(model.shifted(guide))
    began = time.perf_counter()
    fit(SVI(model, whole, cosine_adam(RATES[name], steps), elbo), steps)
    spent = time.perf_counter() - began
    record: dict[str, Any] = {"seconds": spent}
    judged = {"bound": whole}
    if training == "alone":
        judged["bound, permuted"] = model.permuted(guide)
        gap = judged["bound, permuted"].gap()
        record |= {"gap": gap.value, "most": gap.bound}
    options = {"num_samples": NUM_EVALUATED, "num_mixing": 20, "num_starts": 1, "num_steps": 20}
    for key, one in judged.items():
        bound = evidence_bound(model, one, **options)
        record[key] = bound.value
        record[f"error of {key}"] = bound.standard_error
    record["rmse"], record["sd"] = model.misfit(whole)
    return record


def report(records: list[Record]) -> str:
    """Return the Markdown table of the networks."""
    header = [
        "units",
        "guide",
        "trained",
        "steps",
        "ELBO, at least",
        "permuted afterwards",
        "gap (at most)",
    ]
    header += ["RMSE", "predictive sd"]
    rows = []
    for one in sorted(records, key=lambda r: (r["units"], r["guide"], r["training"])):
        has_gap = "gap" in one
        rows.append(
            [
                str(one["units"]),
                one["guide"],
                one["training"],
                str(one["steps"]),
                f"{one['bound']:.1f} ± {one['error of bound']:.1f}",
                f"{one['bound, permuted']:.1f}" if has_gap else "",
                f"{one['gap']:.1f} ({one['most']:.1f})" if has_gap else "",
                f"{one['rmse']:.3f}",
                f"{one['sd']:.3f}",
            ]
        )
    return f"{__doc__.splitlines()[0]}\n\n{markdown_table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", action="store_true")
    parser.add_argument("--units", type=int, nargs="+", default=[10, 50, 200])
    parser.add_argument("--guides", nargs="+", default=["mean field", "LIVI", "injective"])
    parser.add_argument("--trainings", nargs="+", default=["alone", "symmetrised"])
    parser.add_argument("--steps", type=int, default=800)
    add_output_arguments(parser, RESULTS / "invariances.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.networks:
        names = ("units", "guide", "training", "steps")
        runs = itertools.product(args.units, args.guides, args.trainings, [args.steps])
        for key in missing_runs(args.out, (dict(zip(names, run, strict=True)) for run in runs)):
            append_record(args.out, key | run_network(*key.values()) | environment("cpu"))
    if args.networks or args.report:
        write_page(args.out, report(read_records(args.out)))
    else:
        dims = sorted({round(10 ** (k / 8)) for k in range(25)})
        draw_linear(dims, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
