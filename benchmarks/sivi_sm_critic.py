# SPDX-License-Identifier: Apache-2.0
"""How does SIVI-SM depend on the way in which its critic learns?

SIVI-SM on PVI's banana in plain torch, with the sizes of PVI's authors, whose choices are all
``--choices``; without a word, the critic learns by Adam from the guide's own draws before the
guide's step, has leaky units, and the logarithm of the scale is trained::

    python -m benchmarks.sivi_sm_critic --choices rmsprop fresh after relu raw
    python -m benchmarks.sivi_sm_critic --choices rmsprop --seed 1

Each run prints the sliced 2-Wasserstein distance (the floor is .07) during the training, and adds
one line to ``--out``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import RESULTS, append_record, environment
from benchmarks.paper_numbers import layers
from pyro_implicit.diagnostics import sliced_wasserstein

CHOICES = ("rmsprop", "fresh", "after", "relu", "raw")
WIDTH, BATCH, NUM_DRAWS = 512, 250, 10_000


def score(value: Tensor) -> Tensor:
    """Of x ~ N(0, 2), y ~ N(x^2 / 4, 1)."""
    x, y = value.unbind(-1)
    error = y - x.square() / 4
    return torch.stack([-x / 4 + error * x / 2, -error], -1)


def train(choices: list[str], steps: int, marks: list[int]) -> dict[int, float]:
    """Return the distances after some numbers of steps."""
    generator, critic = (
        layers(2, WIDTH, nn.LeakyReLU),
        layers(2, WIDTH, nn.ReLU if "relu" in choices else nn.LeakyReLU),
    )
    raw = nn.Parameter(torch.ones(2) if "raw" in choices else torch.zeros(2))
    scale: Callable[[], Tensor] = lambda: raw if "raw" in choices else raw.exp()  # noqa: E731
    parameters = [*generator.parameters(), raw]
    optim = torch.optim.RMSprop(parameters, lr=1e-4, alpha=0.9)
    weights, critic_optim = (
        list(critic.parameters()),
        torch.optim.Adam(critic.parameters(), lr=1e-3),
    )
    if "rmsprop" in choices:
        critic_optim = torch.optim.RMSprop(weights, lr=1e-3, alpha=0.9)  # type: ignore[assignment]

    def draw(number: int) -> tuple[Tensor, Tensor]:
        noise, error = torch.randn(2, number, 2)
        return noise + generator(noise) + scale() * error, -error / scale()

    def objective(value: Tensor, conditional: Tensor) -> Tensor:
        target = score(value)
        witness = target + critic(value)
        return (witness * (2 * (target - conditional) - witness)).sum(-1).mean()

    def learn(value: Tensor, conditional: Tensor) -> None:
        if "fresh" in choices:
            value, conditional = draw(BATCH)
        critic_optim.zero_grad()
        (-objective(value.detach(), conditional.detach())).backward(inputs=weights)
        critic_optim.step()

    found = {}
    for index in range(1, steps + 1):
        value, conditional = draw(BATCH)
        if "after" not in choices:
            learn(value, conditional)
        optim.zero_grad()
        objective(value, conditional).backward(inputs=parameters)
        optim.step()
        if "after" in choices:
            learn(value, conditional)
        if index in marks:
            found[index] = distance(draw(NUM_DRAWS)[0].detach())
            print(*choices, index, f"{found[index]:.3f}", flush=True)
    return found


def distance(value: Tensor) -> float:
    x, error = torch.randn(2, len(value))
    exact = torch.stack([2 * x, x.square() + error], -1)
    return sliced_wasserstein(value, exact, num_projections=500).item()


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    began = time.process_time()
    marks = [args.steps * k // 6 for k in range(1, 7)]
    record: dict[str, Any] = {"choices": args.choices, "seed": args.seed, "steps": args.steps}
    record["distances"] = train(args.choices, args.steps, marks)
    record["cpu_seconds"] = time.process_time() - began
    append_record(args.out, record | environment("cpu"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choices", nargs="*", choices=CHOICES, default=[])
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "sivi_sm_critic.jsonl")
    main(parser.parse_args())
