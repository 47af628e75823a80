# SPDX-License-Identifier: Apache-2.0
"""Which implicit method is the most accurate at equal CPU seconds?

Fit each method to the posteriors of ``targets.py`` for ``--budget`` CPU seconds by the library's
settings, and measure the sliced 2-Wasserstein distance to exact draws, before and (with the first
seed) after ``refine`` of the guide. In two dimensions also KL(p || q), from 1,000 exact draws, with
the guide's density as a mixture of 5,000 of its conditionals (exact for ``PVI``, injective guides
and ``AutoMultivariateNormal``). ``KSIVI`` and ``HSIVI`` raise the inverse temperature from 0.1 to 1
in the first half, as KSIVI's authors do for separate modes. The report has a picture::

    python -m benchmarks.implicit_methods --data-dir /path/to/data --budget 8 --seeds 3
    python -m benchmarks.implicit_methods --report

``fit``, ``refine``, Pyro's ``NUTS`` (300 transitions of warm-up, 500 draws) and the first step of
each guide, which searches for its frame, take the time that they take. The settings of the methods'
authors are in ``paper_numbers.py``. Each run adds one line to ``--out``; runs that have a line with
the same settings are skipped.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pyro
import torch
from pyro.distributions.transforms import spline_autoregressive
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoIAFNormal, AutoMultivariateNormal, AutoNormalizingFlow
from torch import Tensor

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
from benchmarks.sampling_targets import NUM_DRAWS, floor, truth
from benchmarks.targets import KnownPosterior, MissingData, make_target
from pyro_implicit import (
    AutoImplicit,
    AutoregressiveGenerator,
    AutoSemiImplicit,
    ResidualGenerator,
    fit,
    refine,
)
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
NUM_NEAREST, NUM_NEWTON = 20_000, 30  # for the noise of given points
WITHOUT_KL = ("AutoIAFNormal", "neural spline")
FAILED = 300.0  # where the picture ends: failures and larger ratios
Step = Callable[[], float]
GENERATORS: dict[str, Callable[[int], Any]] = {
    "Injective": AutoregressiveGenerator,
    "Injective, residual": lambda size: ResidualGenerator(size, core_dim=size),
}


def adam(lr: float) -> pyro.optim.PyroOptim:
    return pyro.optim.ClippedAdam({"lr": lr, "betas": (0.9, 0.99)})


def make(name: str, model: Callable) -> tuple[Any, Any, pyro.optim.PyroOptim, float]:
    """Return a guide, its ELBO or PVI, the optimiser and the first learning rate."""
    # Methods with second derivatives of the model or with few moved draws need a lower rate.
    lr = 3e-3 if name in ("KSIVI", "HSIVI", "KPG-IS") else 1e-2
    optim = adam(lr)
    if name == "PVI":
        method = PVI(model, optim, 100, 1, compile="auto")
        return method.guide, method, optim, lr
    explicit: dict[str, Callable[[Callable], Any]] = {
        "AutoMultivariateNormal": AutoMultivariateNormal,
        "AutoIAFNormal": AutoIAFNormal,
        "neural spline": partial(AutoNormalizingFlow, init_transform_fn=spline_autoregressive),
    }
    elbos: dict[str, Callable[[], Any]] = {
        "KSIVI": partial(KSIVI_ELBO, 64),
        "AISIVI": partial(AISIVI_ELBO, 64, 100),
        "HSIVI": partial(HSIVI_ELBO, 64),
        "KPG": partial(KPG_ELBO, 64),
        "KPG-IS": partial(KPG_ELBO, 128, 8),
        "SIVI": partial(SIVI_ELBO, 64),
        "UIVI": partial(UIVI_ELBO, 64),
        "LIVI": partial(LIVI_ELBO, 64),
        **dict.fromkeys(GENERATORS, partial(InjectiveELBO, 64)),
    }
    if name in explicit:
        guide = explicit[name](model)
        elbo = Trace_ELBO(64, vectorize_particles=True)
    else:
        elbo = elbos[name](compile="trace")
        if name in GENERATORS:
            guide = AutoImplicit(model, GENERATORS[name])
        else:
            guide = AutoSemiImplicit(model, **({} if name == "LIVI" else {"noise_scale": 0.5}))
    return guide, elbo, optim, lr


def train(step: Step, elbo: Any, optim: Any, lr: float, budget: float) -> int:
    """Step until the CPU time is spent; the learning rate falls along a cosine."""
    start, steps = time.process_time(), 0
    while (share := (time.process_time() - start) / budget) < 1:
        if isinstance(elbo, KSIVI_ELBO | HSIVI_ELBO):
            elbo.inverse_temperature = min(0.1 + 2 * share, 1.0)
        step()
        steps += 1
        rate = 0.5 * (1 + math.cos(math.pi * share))
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
    if isinstance(guide, AutoImplicit) and not isinstance(guide, AutoSemiImplicit):
        return (log_p - injective_log_prob(guide, exact)).mean().item()
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


@torch.enable_grad()
def injective_log_prob(guide: AutoImplicit, value: Tensor) -> Tensor:
    """Return the density of an injective guide at given points, by Newton's method for their noise.

    The first noise is that of the nearest of ``NUM_NEAREST`` draws. A point that no noise reaches
    has the density of the noise at which the last step ends, which is too high.

    :param value: unconstrained, ``(num_points, latent_dim)``.
    """
    transform = guide.get_transform()
    trials = torch.randn(NUM_NEAREST, value.shape[-1])
    with torch.no_grad():
        noise = trials[torch.cdist(value, transform(trials)).argmin(-1)]
    for _ in range(NUM_NEWTON):
        noise = noise.detach().requires_grad_()
        image = transform(noise)
        rows = [torch.autograd.grad(one.sum(), noise, retain_graph=True)[0] for one in image.T]
        jacobian = torch.stack(rows, -2)
        step = torch.linalg.solve(jacobian, image.detach() - value)
        noise = noise - step / step.norm(dim=-1, keepdim=True).clamp(min=1.0)
    log_base = -0.5 * (noise.square() + math.log(2 * math.pi)).sum(-1)
    return (log_base - torch.linalg.slogdet(jacobian).logabsdet).detach()


def nuts(target: KnownPosterior) -> dict[str, Tensor]:
    """Return draws of one chain of Pyro's NUTS."""
    mcmc = MCMC(NUTS(target.model), num_samples=500, warmup_steps=300, disable_progbar=True)
    mcmc.run()
    return mcmc.get_samples()


def run(target: KnownPosterior, name: str, seed: int, budget: float) -> dict[str, Any]:
    """Fit one method, and measure the result."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    start = time.process_time()
    found: dict[str, Any] = {}
    exact = truth(target, seed)

    def distance(draws: dict[str, Tensor]) -> float:
        flat = target.flatten(draws)
        if len(flat) < len(exact):
            flat = flat[torch.randint(len(flat), (len(exact),))]
        flat = flat[torch.randperm(len(flat))[: len(exact)]]
        return sliced_wasserstein(flat, exact).item()

    if name in ("fit", "NUTS"):
        if name == "fit":
            draws = fit(target.model, "auto", seed=seed, progress=False).sample(len(exact))
        else:
            draws = nuts(target)
        found["cpu_seconds"] = time.process_time() - start
        return found | {"sw2": distance(draws)}
    guide, elbo, optim, lr = make(name, target.model)
    step = elbo.step if name == "PVI" else SVI(target.model, guide, optim, elbo).step
    step()
    found["steps"] = train(step, elbo, optim, lr, budget)
    found["cpu_seconds"] = time.process_time() - start
    if target.name in TWO_DIMENSIONS and name not in WITHOUT_KL:
        found["kl"] = forward_kl(target, guide, seed)
    found["sw2"] = distance(draw(guide, len(exact)))
    if seed == 0:
        start = time.process_time()
        refined = refine(target.model, guide, seed=seed, progress=False)
        found["refined_cpu_seconds"] = time.process_time() - start
        found["refined_sw2"] = distance(refined.get_samples())
    return found


METHODS = ["KSIVI", "PVI", "AISIVI", "HSIVI", "KPG", "KPG-IS", "SIVI", "UIVI", "LIVI", "Injective"]
METHODS += [
    "Injective, residual",
    "AutoMultivariateNormal",
    "AutoIAFNormal",
    "neural spline",
    "NUTS",
    "fit",
]


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
            {"target": name, "method": method, "seed": seed, "budget": args.budget}
            for seed in range(args.seeds)
            for method in args.methods or METHODS
        ]
        for key in missing_runs(args.out, keys):
            result = attempt(run, target, key["method"], key["seed"], args.budget)
            for kind in ("", "refined_"):
                if f"{kind}sw2" in result:
                    result[f"{kind}ratio"] = result[f"{kind}sw2"] / known
            append_record(args.out, key | {"floor": known} | result | machine)


def report(args: argparse.Namespace) -> str:
    """Return one row for each method, one column for each target."""
    cells, floors = defaultdict(list), {}
    for record in read_records(args.out):
        cells[record["method"], record["target"]].append(record)
        floors[record["target"]] = record["floor"]
    targets = [name for name in TARGETS if name in floors]
    rows = [["floor of SW2", *(f"{floors[name]:.4f}" for name in targets)]]
    for method in METHODS:
        row = [cell(cells[method, name]) for name in targets]
        if any(row):
            rows.append([method, *row])
    note = (
        "\nRatio of SW2 to the sampling floor, median (and range) over seeds; KL(p || q) in nats "
        "in two dimensions;\nCPU seconds. After the arrow: the first seed after `refine` of the "
        "guide, and its CPU seconds. Every\ntraining has the same CPU seconds, without the search "
        "for the guide's frame.\n\nEffective draws per CPU second, median over seeds, and after "
        "`refine` with the first seed:\n\n"
    )
    rates = [
        [method, *(rate(cells[method, name]) for name in targets)]
        for method in METHODS
        if any(cells[method, name] for name in targets)
    ]
    end = (
        "\nA set of n exact draws has the distance of the floor times the root of 10,000 / n. So "
        "draws at a ratio r above 1 are\nworth 10,000 / r^2 exact ones, and others 10,000; "
        "training, chains and drawing take the seconds.\n"
    )
    whole = markdown_table(["method", *targets], rows) + note
    return whole + markdown_table(["method", *targets], rates) + end


def rate(records: list[dict[str, Any]]) -> str:
    """Return the number of exact draws that the draws are worth, for each CPU second."""
    worth = [
        NUM_DRAWS / max(1.0, record["ratio"]) ** 2 / record["cpu_seconds"]
        for record in records
        if "ratio" in record
    ]
    text = f"{median(worth):,.0f}" if worth else ""
    for record in records:
        if "refined_ratio" in record:
            seconds = record["cpu_seconds"] + record["refined_cpu_seconds"]
            text += f" → {NUM_DRAWS / max(1.0, record['refined_ratio']) ** 2 / seconds:,.0f}"
    return text


def cell(records: list[dict[str, Any]]) -> str:
    fitted = [record for record in records if "error" not in record]
    if not fitted:
        return "failed" if records else ""
    ratios = [record["ratio"] for record in fitted]
    text = f"{median(ratios):.2f}"
    if len(ratios) > 1:
        text += f" ({min(ratios):.2f} to {max(ratios):.2f})"
    if all(record.get("kl") is not None for record in fitted):
        text += f"; KL {median(record['kl'] for record in fitted):.3f}"
    text += f"; {median(record['cpu_seconds'] for record in fitted):.1f} s"
    if len(fitted) < len(records):
        text += f"; {len(records) - len(fitted)} failed"
    for record in fitted:
        if "refined_ratio" in record:
            text += f" → {record['refined_ratio']:.2f}, {record['refined_cpu_seconds']:.1f} s"
    return text


def draw_picture(out: Path) -> None:
    """Draw the ratio of each method on each target, best first, next to the records."""
    import matplotlib.pyplot as plt

    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in read_records(out):
        ratios[record["method"]][record["target"]].append(record.get("ratio", math.inf))
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
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="by default all")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--budget", type=float, default=8.0, help="CPU seconds of a training")
    parser.add_argument("--data-dir", type=Path, help="holds sivi_blr/ and the like")
    add_output_arguments(parser, RESULTS / "implicit_methods.jsonl")
    add_machine_arguments(parser)
    main(parser.parse_args())
