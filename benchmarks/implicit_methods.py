# SPDX-License-Identifier: Apache-2.0
"""Which implicit method is the most accurate at equal CPU seconds?

Fit each method to the posteriors of ``targets.py`` for ``--budget`` CPU seconds, by the library's
settings and by those of the method's authors, and measure the sliced 2-Wasserstein distance to
exact draws. In two dimensions also KL(p || q), from 1,000 exact draws, with the guide's density as
a mixture of 5,000 of its conditionals (exact for ``PVI`` and ``AutoMultivariateNormal``). The
report has a picture::

    python -m benchmarks.implicit_methods --data-dir /path/to/data --budget 15
    python -m benchmarks.implicit_methods --report

The authors' settings are those of their public code: a plain perceptron without a frame, learnable
conditional noise, Adam with a rate of 0.001 that falls in steps. ``fit`` and the first step of each
guide, which searches for its frame, take the time that they take. Each run adds one line to
``--out``; runs that have a line with the same settings are skipped.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoIAFNormal, AutoMultivariateNormal
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from benchmarks.common import (
    RESULTS,
    add_machine_arguments,
    add_output_arguments,
    append_record,
    attempt,
    environment,
    markdown_table,
    missing_runs,
    read_records,
    write_page,
)
from benchmarks.sampling_targets import floor, truth
from benchmarks.targets import KnownPosterior, MissingData, make_target
from pyro_implicit import MLP, AutoImplicit, AutoregressiveGenerator, AutoSemiImplicit, fit
from pyro_implicit.density import Target
from pyro_implicit.diagnostics import draw, sliced_wasserstein
from pyro_implicit.distributions import SemiImplicit
from pyro_implicit.infer import (
    AISIVI_ELBO,
    HSIVI_ELBO,
    KPG_ELBO,
    KSIVI_ELBO,
    LIVI_ELBO,
    PVI,
    SIVI_ELBO,
    UIVI_ELBO,
    InjectiveELBO,
)
from pyro_implicit.infer.pvi import _Particles
from pyro_implicit.ops import mixture_log_density

TWO_DIMENSIONS = ("banana", "x_shape", "multimodal")
TARGETS = (*TWO_DIMENSIONS, "waveform", "conditioned_diffusion")
NUM_KL_DRAWS, NUM_COMPONENTS = 1_000, 5_000
FAILED = 300.0  # where the picture ends: failures and larger ratios
Step = Callable[[], float]


@dataclass(frozen=True)
class Sizes:
    """The authors' noise size, hidden width, initial conditional sd and number of particles."""

    noise: int
    hidden: int
    sd: float
    particles: int


#: From the configurations in the public code of KSIVI, which KPG and, nearly, AISIVI share.
SIZES = {name: Sizes(3, 50, 0.5, 500) for name in TWO_DIMENSIONS} | {
    "waveform": Sizes(10, 100, 0.08, 100),
    "conditioned_diffusion": Sizes(100, 128, 0.1, 128),
}


def plain_guide(model: Callable, sizes: Sizes) -> AutoSemiImplicit:
    """The authors' guide."""
    network = lambda size: MLP(  # noqa: E731
        sizes.noise, size, (sizes.hidden, sizes.hidden), "relu"
    )
    guide = AutoSemiImplicit(model, network, frame=None, init_scale=1.0, noise_scale="learn")
    guide()
    start = torch.full_like(guide.noise_scale.detach(), sizes.sd)
    guide.noise_scale = PyroParam(start, constraints.positive)
    return guide


def adam(lr: float) -> pyro.optim.PyroOptim:
    return pyro.optim.ClippedAdam({"lr": lr, "betas": (0.9, 0.99)})


def make(
    name: str, settings: str, target: KnownPosterior
) -> tuple[Any, Step, pyro.optim.PyroOptim, float]:
    """Return a guide, its training step, the optimiser and the first learning rate."""
    model, sizes = target.model, SIZES[target.name]
    own = settings == "library"
    # At 0.01, methods with second derivatives of the model end in gradients that are not finite.
    own_lr = 3e-3 if name in ("KSIVI", "HSIVI") else 1e-2
    lr = own_lr if own else 1e-3
    count = 64 if own else sizes.particles
    if name == "PVI":
        optim = adam(lr)
        options: dict[str, Any] = {}
        if not own:
            network = lambda size: MLP(min(10, size), size, (512, 512), "relu")  # noqa: E731
            options = {"generator": network, "frame": None, "init_scale": 1.0}
        method = PVI(model, optim, 100, 1 if own else 250, guide_options=options, compile="auto")
        return method.guide, method.step, optim, lr
    elbos: dict[str, Callable[[], Any]] = {
        "KSIVI": partial(KSIVI_ELBO, count, statistic="u" if own else "two-batch"),
        "AISIVI": partial(AISIVI_ELBO, count, 100),
        "HSIVI": partial(HSIVI_ELBO, count),
        "KPG": partial(KPG_ELBO, count),
        "KPG-IS": partial(KPG_ELBO, 128 if own else 100, 8 if own else 10),
        "SIVI": partial(SIVI_ELBO, count),
        "UIVI": partial(UIVI_ELBO, min(count, 100)),
        "LIVI": partial(LIVI_ELBO, count),
        "Injective": partial(InjectiveELBO, count),
    }
    if name in ("AutoMultivariateNormal", "AutoIAFNormal"):
        classes = {"AutoMultivariateNormal": AutoMultivariateNormal, "AutoIAFNormal": AutoIAFNormal}
        guide = classes[name](model)
        elbo = Trace_ELBO(count, vectorize_particles=True)
    else:
        elbo = elbos[name](compile="trace")
        if name == "Injective":
            guide = AutoImplicit(model, AutoregressiveGenerator)
        elif not own:
            guide = plain_guide(model, sizes)
        else:
            guide = AutoSemiImplicit(model, **({} if name == "LIVI" else {"noise_scale": 0.5}))
    optim = adam(lr)
    svi = SVI(model, guide, optim, elbo)
    return guide, svi.step, optim, lr


def train(step: Step, optim: Any, lr: float, budget: float, falls: bool) -> int:
    """Step until the CPU time is spent; the learning rate falls along a cosine, or in steps."""
    start, steps = time.process_time(), 0
    while (share := (time.process_time() - start) / budget) < 1:
        step()
        steps += 1
        rate = 0.5 * (1 + math.cos(math.pi * share)) if falls else 0.9 ** int(50 * share)
        for one in optim.optim_objs.values():
            for group in one.param_groups:
                group["lr"] = lr * rate
    return steps


@torch.no_grad()
def forward_kl(target: KnownPosterior, guide: Any, seed: int) -> float | None:
    """KL(p || q), None for a guide without a density."""
    exact = truth(target, seed)[:NUM_KL_DRAWS]
    log_p = Target(target.model).log_prob(exact)
    posterior = guide.get_posterior()
    if not isinstance(guide, AutoSemiImplicit):
        return (log_p - posterior.log_prob(exact)).mean().item()
    value, log_q = exact, torch.zeros(len(exact))
    for transform in reversed(posterior.transforms):
        base = transform.inv(value)
        log_q = log_q - transform.log_abs_det_jacobian(base, value)
        value = base
    q: SemiImplicit = posterior.base_dist
    noise = q.noise_distribution
    is_exact = isinstance(noise, _Particles)
    noises = noise.particles if is_exact else noise.sample((NUM_COMPONENTS,))
    scale = q.scale.expand(value.shape)
    log_q = log_q + mixture_log_density(value, q.generator, scale, [noises.unsqueeze(1)])
    return (log_p - log_q).mean().item()


def run(
    target: KnownPosterior, name: str, settings: str, seed: int, budget: float
) -> dict[str, Any]:
    """Fit one method by one group of settings, and measure the result."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    start = time.process_time()
    found: dict[str, Any] = {}
    exact = truth(target, seed)
    if name == "fit":
        result = fit(target.model, "auto", seed=seed, progress=False)
        found["cpu_seconds"] = time.process_time() - start
        draws: Tensor = target.flatten(result.sample(len(exact)))
    else:
        guide, step, optim, lr = make(name, settings, target)
        step()
        found["steps"] = train(step, optim, lr, budget, falls=settings == "library")
        found["cpu_seconds"] = time.process_time() - start
        if target.name in TWO_DIMENSIONS and name not in ("Injective", "AutoIAFNormal"):
            found["kl"] = forward_kl(target, guide, seed)
        draws = target.flatten(draw(guide, len(exact)))
    return found | {"sw2": sliced_wasserstein(draws, exact).item()}


BOTH = ("KSIVI", "PVI", "AISIVI", "HSIVI", "KPG", "KPG-IS", "SIVI", "UIVI")
METHODS = [(name, "library") for name in (*BOTH, "LIVI", "Injective")]
METHODS += [("AutoMultivariateNormal", "library"), ("AutoIAFNormal", "library"), ("fit", "library")]
METHODS += [(name, "authors") for name in BOTH if name not in ("UIVI",)]


def run_all(args: argparse.Namespace) -> None:
    machine = environment("cpu")
    floors = {record["target"]: record["floor"] for record in read_records(args.out)}
    for name in args.targets:
        try:
            target = make_target(name, "cpu", args.data_dir)
        except MissingData as missing:
            print(f"{name} is left out: {missing}")
            continue
        known = floors[name] if name in floors else floor(target)
        keys = [
            {"target": name, "method": method, "settings": settings, "seed": seed}
            | {"budget": args.budget}
            for seed in range(args.seeds)
            for method, settings in METHODS
            if method in (args.methods or [method])
        ]
        for key in missing_runs(args.out, keys):
            result = attempt(run, target, key["method"], key["settings"], key["seed"], args.budget)
            if "sw2" in result:
                result["ratio"] = result["sw2"] / known
            append_record(args.out, key | {"floor": known} | result | machine)


def report(args: argparse.Namespace) -> str:
    """Return one row for each method and settings, one column for each target."""
    cells, floors = defaultdict(list), {}
    for record in read_records(args.out):
        cells[record["method"], record["settings"], record["target"]].append(record)
        floors[record["target"]] = record["floor"]
    targets = [name for name in TARGETS if name in floors]
    rows = [["floor of SW2", "", *(f"{floors[name]:.4f}" for name in targets)]]
    for method, settings in METHODS:
        row = [cell(cells[method, settings, name]) for name in targets]
        if any(row):
            rows.append([method, settings, *row])
    note = (
        "\nRatio of SW2 to the sampling floor; KL(p || q) in nats in two dimensions; CPU seconds. "
        "Medians over\nseeds. Every training has the same CPU seconds, without the search for the "
        "guide's frame.\n"
    )
    return markdown_table(["method", "settings", *targets], rows) + note


def cell(records: list[dict[str, Any]]) -> str:
    fitted = [record for record in records if "error" not in record]
    if not fitted:
        return "failed" if records else ""
    text = f"{median(record['ratio'] for record in fitted):.2f}"
    if all(record.get("kl") is not None for record in fitted):
        text += f"; KL {median(record['kl'] for record in fitted):.3f}"
    seconds = median(record["cpu_seconds"] for record in fitted)
    failed = f", {len(records) - len(fitted)} failed" if len(fitted) < len(records) else ""
    return f"{text} ({seconds:.0f} s{failed})"


def draw_picture(out: Path) -> None:
    """Draw the ratio of each method on each target, best first, next to the records."""
    import matplotlib.pyplot as plt

    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in read_records(out):
        own = record["settings"] == "library"
        method = record["method"] if own else f"{record['method']} (authors' settings)"
        ratios[method][record["target"]].append(record.get("ratio", math.inf))
    middle = {
        method: {target: median(found) for target, found in row.items()}
        for method, row in ratios.items()
    }
    order = sorted(middle, key=lambda name: sum(map(_height, middle[name].values())))
    figure, axis = plt.subplots(figsize=(7.0, 0.3 * len(order) + 1.2), layout="constrained")
    for target, marker in zip(TARGETS, "osD^v", strict=True):
        places = [k for k, name in enumerate(order) if target in middle[name]]
        values = [min(middle[order[k]][target], FAILED) for k in places]
        axis.scatter(values, places, marker=marker, label=target, alpha=0.8)
    axis.axvspan(0, 1.5, color="tab:green", alpha=0.12, lw=0)
    axis.set(xscale="log", xlabel="sliced 2-Wasserstein distance / sampling floor")
    axis.set_yticks(range(len(order)), order)
    axis.invert_yaxis()
    axis.set_xlim(0.5, 1.3 * FAILED)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False)
    figure.savefig(out.with_suffix(".png"), dpi=110)


def _height(ratio: float) -> float:
    return math.log(min(ratio, FAILED))


def main(args: argparse.Namespace) -> None:
    if args.report:
        write_page(args.out, report(args))
        draw_picture(args.out)
        return
    torch.set_num_threads(args.threads)
    run_all(args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--methods", nargs="+", help="by default all")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--budget", type=float, default=30.0, help="CPU seconds of a training")
    parser.add_argument("--data-dir", type=Path, help="holds sivi_blr/ and the like")
    add_output_arguments(parser, RESULTS / "implicit_methods.jsonl")
    add_machine_arguments(parser)
    main(parser.parse_args())
