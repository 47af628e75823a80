# SPDX-License-Identifier: Apache-2.0
"""``refine`` on typical models of 150 to 200 latent variables.

A hierarchical Poisson regression, a spatial Poisson model and an item-response model, on simulated
data. A mean-field guide of 1,000 steps is refined by a few hundred gradients, and the moments of
both are compared, in unconstrained space, with those of a *reference*: a much longer run of
``refine`` from draws of a mean-field guide with another seed, at twice their distance from the
mean. The reference has the same kernel, but other initial values and another adaptation::

    python -m benchmarks.refine_models
    python -m benchmarks.refine_models --models items --seeds 2
    python -m benchmarks.refine_models --report

Each run, and each reference, adds one line to ``--out``; runs that have a line with the same
settings are skipped.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    cosine_adam,
    fit,
    markdown_table,
    read_records,
    run_and_report,
    run_missing,
)
from pyro_implicit.density import Target
from pyro_implicit.diagnostics import draw
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import refine

Model = Callable[[], None]
GUIDE_DRAWS = 20_000
REFERENCE_SEED = 1_000


def counts(num_groups: int = 200, rows: int = 5) -> Model:
    """Poisson counts of groups whose intercepts share a scale, non-centred: 203 latents."""
    generator = torch.Generator().manual_seed(1)
    intercept = 1.0 + 0.6 * torch.randn(num_groups, 1, generator=generator)
    x = torch.randn(num_groups, rows, generator=generator)
    y = torch.poisson((intercept + 0.3 * x).exp(), generator=generator)

    def model() -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        effect = pyro.sample("effect", dist.Normal(torch.zeros(num_groups), 1.0).to_event(1))
        log_rate = mean + scale * effect.unsqueeze(-1) + slope * x
        pyro.sample("y", dist.Poisson(log_rate.exp()).to_event(2), obs=y)

    return model


def lattice(side: int = 12, dependence: float = 0.98) -> Model:
    """Counts on a lattice with a conditional autoregressive field: 146 latents."""
    place = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    near = ((place[:, None] - place[None]).abs().sum(-1) == 1).float()
    precision = near.sum(-1).diag() - dependence * near
    scale_tril = torch.linalg.cholesky(torch.linalg.inv(precision))
    generator = torch.Generator().manual_seed(2)
    field = scale_tril @ torch.randn(side**2, generator=generator)
    y = torch.poisson((0.5 + 1.2 * field).exp(), generator=generator)

    def model() -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        scale = pyro.sample("scale", dist.HalfNormal(2.0))
        prior = dist.MultivariateNormal(torch.zeros(side**2), scale_tril=scale_tril)
        field = pyro.sample("field", prior)
        rate = (mean.unsqueeze(-1) + scale.unsqueeze(-1) * field).exp()
        pyro.sample("y", dist.Poisson(rate).to_event(1), obs=y)

    return model


def items(num_persons: int = 150, num_items: int = 20) -> Model:
    """Two-parameter item response: abilities, difficulties, discriminations: 191 latents."""
    generator = torch.Generator().manual_seed(3)
    ability = torch.randn(num_persons, 1, generator=generator)
    difficulty = torch.randn(num_items, generator=generator)
    discrimination = (0.4 * torch.randn(num_items, generator=generator)).exp()
    y = torch.bernoulli((discrimination * (ability - difficulty)).sigmoid(), generator=generator)

    def model() -> None:
        spread = pyro.sample("spread", dist.HalfNormal(2.0))
        ability = pyro.sample("ability", dist.Normal(torch.zeros(num_persons), 1.0).to_event(1))
        zeros = torch.zeros(num_items)
        difficulty = pyro.sample("difficulty", dist.Normal(zeros, spread.unsqueeze(-1)).to_event(1))
        discrimination = pyro.sample("discrimination", dist.LogNormal(zeros, 0.5).to_event(1))
        gap = ability.unsqueeze(-1) - difficulty.unsqueeze(-2)
        logits = discrimination.unsqueeze(-2) * gap
        pyro.sample("y", dist.Bernoulli(logits=logits).to_event(2), obs=y)

    return model


MODELS: dict[str, Callable[[], Model]] = {"counts": counts, "lattice": lattice, "items": items}


def moments(latent: Tensor) -> dict[str, list[float]]:
    """Moments of each latent, from independent chains ``(num_chains, num_draws, latent_dim)``."""
    error = latent.mean(1).std(0) / math.sqrt(len(latent))
    flat = latent.flatten(0, 1).double()
    found = {"mean": flat.mean(0), "sd": flat.std(0), "error": error}
    return {name: [round(value, 5) for value in row.tolist()] for name, row in found.items()}


def run_refine(model: Model, start: Any, args: argparse.Namespace, max_gradients: int) -> dict:
    began = time.process_time()
    result = refine(
        model, start, num_chains=args.chains, max_gradients=max_gradients, progress=False
    )
    taken = time.process_time() - began
    samples = result.get_samples(group_by_chain=True)
    latent = Target(model).unconstrain({k: v.flatten(0, 1) for k, v in samples.items()})
    return {
        "refine_seconds": taken,
        "stopped": result.stopped,
        "gradients": result.num_gradients,
        "failed": result.failed,
        "r_hat": None if result.drift is None else result.drift.r_hat,
        "refined": moments(latent.unflatten(0, (args.chains, -1))),
    }


def mean_field(model: Model, args: argparse.Namespace) -> AutoNormal:
    guide = AutoNormal(model)
    fit(SVI(model, guide, cosine_adam(args.lr, args.steps), ImplicitELBO(8)), args.steps)
    return guide


def run_reference(name: str, args: argparse.Namespace) -> dict[str, Any]:
    pyro.clear_param_store()
    pyro.set_rng_seed(REFERENCE_SEED)
    model = MODELS[name]()
    density = Target(model)
    latent = density.unconstrain(draw(mean_field(model, args), args.chains))
    start = density.constrain(2 * latent - latent.mean(0))
    return run_refine(model, start, args, args.reference_gradients)


def run(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model = MODELS[name]()
    began = time.process_time()  # excludes other jobs on the machine
    guide = mean_field(model, args)
    taken = time.process_time() - began
    latent = Target(model).unconstrain(draw(guide, GUIDE_DRAWS))
    before = {"guide_seconds": taken, "guide": moments(latent.unsqueeze(1))}
    return before | run_refine(model, guide, args, args.max_gradients)


def run_all(args: argparse.Namespace) -> None:
    keys = []
    for name in args.models:
        for seed in (None, *range(args.seeds)):  # the reference has no seed
            names = ["chains", "steps", "lr", "max_gradients"]
            if seed is None:
                names = ["chains", "reference_gradients"]
            keys.append({"model": name, "seed": seed} | {key: getattr(args, key) for key in names})

    def work(key: dict[str, Any]) -> dict[str, Any]:
        name, seed = key["model"], key["seed"]
        return run_reference(name, args) if seed is None else run(name, seed, args)

    run_missing(args.out, keys, work)


def against(found: dict[str, list[float]], truth: dict[str, list[float]]) -> tuple[str, ...]:
    """Return the largest mean error, in reference sds, its noise, and the range of sd ratios."""
    mean, sd, error = (torch.tensor(found[key]) for key in ("mean", "sd", "error"))
    true_mean, true_sd, true_error = (torch.tensor(truth[key]) for key in ("mean", "sd", "error"))
    off = ((mean - true_mean) / true_sd).abs().max().item()
    noise = ((error.square() + true_error.square()).sqrt() / true_sd).max().item()
    ratio = sd / true_sd
    return f"{off:.2f}", f"{noise:.2f}", f"{ratio.min().item():.2f} to {ratio.max().item():.2f}"


def report(path: Path) -> str:
    """Return the Markdown table of the records."""
    records = read_records(path)
    references = {record["model"]: record for record in records if record["seed"] is None}
    rows = []
    for record in records:
        if record["seed"] is None or record["model"] not in references:
            continue
        truth = references[record["model"]]
        guide_off, _, guide_sds = against(record["guide"], truth["refined"])
        off, noise, sds = against(record["refined"], truth["refined"])
        rows.append(
            [
                f"{record['model']}, {len(truth['refined']['mean'])} latents",
                guide_off,
                guide_sds,
                off,
                noise,
                sds,
                f"{record['gradients']}, {record['stopped']}",
                f"{record['guide_seconds']:.0f} + {record['refine_seconds']:.0f}",
                f"{truth['gradients']}, {truth['stopped']}, {truth['refine_seconds']:.0f} s",
            ]
        )
    header = ["model", "guide: mean error", "sds", "refined: mean error", "noise", "sds"]
    header += ["gradients", "CPU s: guide + refine", "reference"]
    return markdown_table(header, rows) + "\n" + NOTE


NOTE = """The largest error of a mean, in posterior sds, and the range of the sd ratios, in
unconstrained space, before and after `refine`. Noise is the largest Monte Carlo standard error of
the difference of two means, estimated from independent chains; among 150 to 200 means, the largest
error is about three standard errors. The reference is a longer run of `refine` from draws of a
mean-field guide with another seed, moved to twice their distance from the mean.

To reproduce: `python -m benchmarks.refine_models`.
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=2e-2, help="falls to zero along a cosine")
    parser.add_argument("--chains", type=int, default=256)
    parser.add_argument("--max-gradients", type=int, default=500, help="of each chain")
    parser.add_argument("--reference-gradients", type=int, default=4000, help="of each chain")
    add_output_arguments(parser, RESULTS / "refine_models.jsonl")
    return parser


if __name__ == "__main__":
    run_and_report(parser().parse_args(), run_all, report)
