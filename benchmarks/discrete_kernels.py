# SPDX-License-Identifier: Apache-2.0
"""Effective draws per CPU second of three kernels for binary latent variables.

::

    python -m benchmarks.discrete_kernels

``sweep`` moves independent elements in parallel (``mcmc/kernels/window_gibbs.py``, what ``refine``
runs). ``gradients`` flips one element, chosen by the gradient (Gibbs with gradients, Grathwohl et
al., 2021). ``langevin`` flips many at once (discrete Langevin proposal, Zhang, Liu and Liu, 2022),
with a step size for the acceptance 0.57. All three run on the same function in torch, without Pyro,
with 64 chains. The number is the smallest effective sample size of all elements and the energy.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import arviz
import torch
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    Record,
    append_record,
    environment,
    markdown_table,
    read_records,
    spread,
    write_page,
)
from pyro_implicit.density.discrete import Elements
from pyro_implicit.mcmc.kernels import window_gibbs
from pyro_implicit.mcmc.policy import DEFAULT
from pyro_implicit.ops.ensemble_hmc import score_of

OUT = RESULTS / "discrete_kernels.jsonl"
NUM_CHAINS = 64


class Problem(NamedTuple):
    """A log-density of ``number`` flags, term by term."""

    number: int
    terms: Callable[[Tensor], Tensor]


def dense() -> Problem:
    """Twenty spins, all coupled."""
    j = torch.randn(20, 20).triu(1) * 1.2 / math.sqrt(20)
    h = 0.3 * torch.randn(20)

    def terms(x: Tensor) -> Tensor:
        s = 2 * x - 1
        return ((s @ j) * s + h * s).sum(-1, keepdim=True)

    return Problem(20, terms)


def lattice() -> Problem:
    """256 spins on a lattice, below the critical coupling of 0.44."""

    def terms(x: Tensor) -> Tensor:
        s = (2 * x - 1).unflatten(-1, (16, 16))
        pairs = s * s.roll(1, -1), s * s.roll(1, -2)
        return torch.cat([0.35 * one.flatten(-2) for one in pairs], -1)

    return Problem(256, terms)


def regression(number: int = 30) -> Problem:
    """Indicators of known coefficients of correlated columns."""
    x = torch.randn(2 * number, number) + 0.8 * torch.randn(2 * number, 1)
    slope = torch.randn(number) / math.sqrt(number)
    y = x @ (slope * torch.bernoulli(torch.full((number,), 0.5))) + torch.randn(2 * number)

    def terms(z: Tensor) -> Tensor:
        return -0.5 * (y - (z * slope) @ x.T).square()

    return Problem(number, terms)


def wide() -> Problem:
    """The same with 200 columns."""
    return regression(200)


PROBLEMS = {"dense": dense, "lattice": lattice, "regression": regression, "wide": wide}
Advance = Callable[[Tensor], Tensor]


def sweep(problem: Problem) -> Advance:
    flags = torch.ones(problem.number)
    elements = Elements(0 * flags, flags, flags.bool() & False)
    x = torch.bernoulli(torch.full((NUM_CHAINS, problem.number), 0.5))
    found = window_gibbs.dependence(x, problem.terms, elements)
    classes = window_gibbs.move_classes(found, elements, DEFAULT.window)

    def advance(x: Tensor) -> Tensor:
        state = window_gibbs.State(x, problem.terms(x))
        return window_gibbs.step(state, problem.terms, classes, elements, flags)[0].values

    return advance


def gradients(problem: Problem) -> Advance:
    score = score_of(lambda x: problem.terms(x).sum(-1))
    cache: list[tuple[Tensor, Tensor]] = []

    def advance(x: Tensor) -> Tensor:
        value, slope = cache.pop() if cache else score(x)
        log_q = (0.5 * slope * (1 - 2 * x)).log_softmax(-1)
        place = torch.distributions.Categorical(logits=log_q).sample().unsqueeze(-1)
        moved = x.scatter(-1, place, 1 - x.gather(-1, place))
        other, slope_there = score(moved)
        back = (0.5 * slope_there * (1 - 2 * moved)).log_softmax(-1)
        change = other - value + (back - log_q).gather(-1, place).squeeze(-1)
        accepted = torch.rand_like(change).log() < change
        rows = accepted.unsqueeze(-1)
        cache.append((torch.where(accepted, other, value), torch.where(rows, slope_there, slope)))
        return torch.where(rows, moved, x)

    return advance


def langevin(problem: Problem) -> Advance:
    score = score_of(lambda x: problem.terms(x).sum(-1))
    state = {"log_alpha": 0.0, "steps": 0.0}
    cache: list[tuple[Tensor, Tensor]] = []

    def advance(x: Tensor) -> Tensor:
        value, slope = cache.pop() if cache else score(x)
        cost = 0.5 * math.exp(-state["log_alpha"])
        logits = 0.5 * slope * (1 - 2 * x) - cost
        flips = torch.bernoulli(logits.sigmoid())
        moved = (x - flips).abs()
        other, slope_there = score(moved)
        back = 0.5 * slope_there * (1 - 2 * moved) - cost
        forth = torch.nn.functional.logsigmoid(torch.where(flips > 0, logits, -logits)).sum(-1)
        reverse = torch.nn.functional.logsigmoid(torch.where(flips > 0, back, -back)).sum(-1)
        change = other - value + reverse - forth
        accepted = torch.rand_like(change).log() < change
        if state["steps"] < 300:  # of the warm-up
            state["steps"] += 1
            rate = change.clamp(max=0).exp().mean().item() - 0.57
            state["log_alpha"] += 2 * rate / math.sqrt(state["steps"])
        rows = accepted.unsqueeze(-1)
        cache.append((torch.where(accepted, other, value), torch.where(rows, slope_there, slope)))
        return torch.where(rows, moved, x)

    return advance


KERNELS = {"sweep": sweep, "gradients": gradients, "langevin": langevin}


def run(name: str, kernel: str, seed: int, seconds: float) -> Record:
    torch.manual_seed(seed)
    problem = PROBLEMS[name]()
    advance = KERNELS[kernel](problem)
    x = torch.bernoulli(torch.full((NUM_CHAINS, problem.number), 0.5))
    clock = time.process_time()
    count = 0
    while time.process_time() - clock < 0.4 * seconds or (kernel != "sweep" and count < 300):
        x, count = advance(x), count + 1
    draws, every = [], max(1, count // 400)
    clock, steps = time.process_time(), 0
    while time.process_time() - clock < seconds:
        x, steps = advance(x), steps + 1
        if steps % every == 0:
            draws.append(torch.cat([x, problem.terms(x).sum(-1, keepdim=True)], -1))
    spent = time.process_time() - clock
    path = torch.stack(draws)
    varies = (path != path[:1]).flatten(0, 1).any(0)
    paths = path[:, :, varies].transpose(0, 1).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of more chains than draws
        found = arviz.ess(arviz.convert_to_dataset({"x": paths}), method="mean")
    least = float(found["x"].min())
    return {
        "problem": name, "kernel": kernel, "seed": seed, "steps": steps, "seconds": spent,
        "ess_per_second": least / spent,
    }  # fmt: skip


def report() -> None:
    """Write the page."""
    rows = []
    for name in PROBLEMS:
        cells = []
        for kernel in KERNELS:
            own = [
                one["ess_per_second"]
                for one in read_records(OUT)
                if (one["problem"], one["kernel"]) == (name, kernel)
            ]
            cells.append(spread(own, 0))
        rows.append([name, *cells])
    text = ["# Kernels of binary latent variables", __doc__.split("\n\n", 1)[1]]
    write_page(OUT, "\n\n".join([*text, markdown_table(["problem", *KERNELS], rows)]))


def main() -> None:
    """Run all pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=1.5, help="of CPU, after the warm-up")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in PROBLEMS:
        for kernel in KERNELS:
            for seed in args.seeds:
                record = run(name, kernel, seed, args.seconds)
                print(record, flush=True)
                append_record(OUT, record | environment("cpu"))
    report()


if __name__ == "__main__":
    main()
