# SPDX-License-Identifier: Apache-2.0
"""Accuracy of kernel density ratios for the KL divergence of two Gaussians and its gradient.

A few seconds; the table is printed and written to ``results/``::

    python -m benchmarks.kivi_ratio_table
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    append_record,
    environment,
    markdown_table,
)
from pyro_implicit.ops import Direction, adaptive_log_density, log_density_ratio

PAPER_CLIP = 1e-8
#: dimension, and in each the location and scale of q; p is N(0, 1)
TARGETS = [(1, 1.0, 0.7), (1, 0.0, 0.3), (1, 1.0, 2.0), (5, 0.5, 0.7), (20, 0.5, 0.3)]


def prior(q: Tensor, contrast: Tensor, direction: Direction) -> Tensor:
    return log_density_ratio(q, contrast, direction, clip=PAPER_CLIP).mean()


def adaptive(q: Tensor, contrast: Tensor, direction: Direction) -> Tensor:
    log_q = adaptive_log_density(q, contrast, direction=direction, clip=PAPER_CLIP)
    return (log_q - log_normal(q, 0.0, 1.0)).mean()


def adaptive_detached(q: Tensor, contrast: Tensor, direction: Direction) -> Tensor:
    """KL with the moments of q as constants, as in appendix D of the paper."""
    loc, scale = q.detach().mean(0), q.detach().std(0, correction=0)
    ratio = log_density_ratio((q - loc) / scale, contrast, direction, clip=PAPER_CLIP)
    return (log_normal(q, loc, scale) + ratio - log_normal(q, 0.0, 1.0)).mean()


def log_normal(x: Tensor, loc: Tensor | float, scale: Tensor | float) -> Tensor:
    return torch.distributions.Normal(loc, scale).log_prob(x).sum(-1)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "prior, reverse": lambda q, p: prior(q, p, "reverse"),
    "prior, forward": lambda q, p: prior(q, p, "forward"),
    "adaptive, constant moments, reverse": lambda q, p: adaptive_detached(q, p, "reverse"),
    "adaptive, constant moments, forward": lambda q, p: adaptive_detached(q, p, "forward"),
    "adaptive, reverse": lambda q, p: adaptive(q, p, "reverse"),
    "adaptive, forward": lambda q, p: adaptive(q, p, "forward"),
}


#: half the distance between the two modes of q, and their scale
BIMODAL = [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0), (2.0, 0.5)]
BIMODAL_ESTIMATORS: dict[str, tuple[Direction, float]] = {
    f"{direction}, clip {clip:g}": (direction, clip)
    for direction in ("reverse", "forward")
    for clip in (PAPER_CLIP, 0.01)
}


def gaussian_estimate(
    name: str, target: tuple[int, float, float], num_samples: int
) -> tuple[float, float]:
    """Return one estimate of the KL and of its gradient for one coordinate's log-scale."""
    dim, loc, scale = target
    log_scale = torch.full((dim,), math.log(scale), requires_grad=True)
    q = loc + log_scale.exp() * torch.randn(num_samples, dim)
    kl = ESTIMATORS[name](q, torch.randn(num_samples, dim))
    (gradient,) = torch.autograd.grad(kl, log_scale)
    return kl.item(), gradient[0].item()


def gaussian_truth(target: tuple[int, float, float]) -> tuple[float, float]:
    dim, loc, scale = target
    return dim * (0.5 * (scale**2 + loc**2 - 1) - math.log(scale)), scale**2 - 1


def bimodal_estimate(
    name: str, target: tuple[float, float], num_samples: int
) -> tuple[float, float]:
    """Return one estimate of E_q[log q], by adaptive contrast, and of its gradient."""
    loc, scale = target
    direction, clip = BIMODAL_ESTIMATORS[name]
    log_scale = torch.tensor(math.log(scale), requires_grad=True)
    side = torch.where(torch.rand(num_samples, 1) < 0.5, -loc, loc)
    q = side + log_scale.exp() * torch.randn(num_samples, 1)
    log_q = adaptive_log_density(q, torch.randn(num_samples, 1), direction=direction, clip=clip)
    (gradient,) = torch.autograd.grad(log_q.mean(), log_scale)
    return log_q.mean().item(), gradient.item()


def bimodal_truth(target: tuple[float, float]) -> tuple[float, float]:
    """Integrate by the trapezoidal rule."""
    log_scale = torch.tensor(math.log(target[1]), dtype=torch.float64, requires_grad=True)
    x = torch.linspace(-15, 15, 30_001, dtype=torch.float64)
    modes = [log_normal(x[:, None], side * target[0], log_scale.exp()) for side in (-1, 1)]
    log_q = torch.logsumexp(torch.stack(modes), 0) - math.log(2)
    value = torch.trapezoid(log_q.exp() * log_q, x)
    (gradient,) = torch.autograd.grad(value, log_scale)
    return value.item(), gradient.item()


def tabulate(
    what: str,
    targets: Sequence[tuple],
    names: Iterable[str],
    estimate: Callable[..., tuple[float, float]],
    truth: Callable[..., tuple[float, float]],
    num_samples: int,
    num_seeds: int,
) -> str:
    """Return the Markdown table of all estimators and targets, and collect the runs in records."""
    rows = []
    for target in targets:
        value, slope = truth(target)
        row = [", ".join(f"{number:g}" for number in target), f"{value:.2f}, {slope:.2f}"]
        for name in names:
            runs = []
            for seed in range(num_seeds):
                torch.manual_seed(seed)
                runs.append(estimate(name, target, num_samples))
            values, slopes = torch.tensor(runs, dtype=torch.float64).unbind(-1)
            row.append(f"{values.mean():.2f}, {slopes.mean():.2f} ({slopes.std():.2f})")
            record = {"quantity": what, "estimator": name, "target": target}
            record |= {"num_samples": num_samples, **environment("cpu")}
            for key, numbers in (("value", values), ("gradient", slopes)):
                record[key] = [round(number, 4) for number in numbers.tolist()]
            append_record(RESULTS / "kivi_ratio_table.jsonl", record)
        rows.append(row)
    return markdown_table([what, "truth", *names], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-samples", type=int, default=100, help="draws of each distribution")
    parser.add_argument("--num-seeds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    (RESULTS / "kivi_ratio_table.jsonl").unlink(missing_ok=True)
    counts = (args.num_samples, args.num_seeds)
    gaussian = tabulate("d, μ, s", TARGETS, ESTIMATORS, gaussian_estimate, gaussian_truth, *counts)
    bimodal = tabulate(
        "a, s", BIMODAL, BIMODAL_ESTIMATORS, bimodal_estimate, bimodal_truth, *counts
    )
    text = (
        f"{args.num_samples} draws of each distribution, RBF kernel, ridge 1e-3, mean over "
        f"{args.num_seeds} seeds: estimate, gradient of one log-scale (sd of the gradient).\n\n"
        "KL of q = N(μ, s²) from p = N(0, 1) in each of d dimensions, clip 1e-8. The paper uses "
        '"prior, reverse" and "adaptive, constant moments, reverse".\n\n'
        f"{gaussian}\n"
        "E_q[log q] of q = ½N(-a, s²) + ½N(a, s²) by adaptive contrast. `KIVI_ELBO` uses forward, "
        f"clip 0.01.\n\n{bimodal}"
    )
    (RESULTS / "kivi_ratio_table.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
