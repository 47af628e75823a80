# SPDX-License-Identifier: Apache-2.0
"""What does a step of KIVI cost beside one of mean-field with the same likelihood particles?

The network and the clock are those of ``vectorization_speed.py``; KIVI has one implicit guide per
layer, with the generators of its paper for sets like Boston, and 100 posterior and 100 contrast
draws. All cases take turns in one process, a minute or two::

    python -m benchmarks.kivi_speed
    python -m benchmarks.kivi_speed --device cuda
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuideList, AutoNormal, init_to_mean
from tqdm import trange

from benchmarks.common import RESULTS, add_machine_arguments, environment
from benchmarks.vectorization_speed import BNN, NUM_FEATURES, NUM_ROWS, Case, report
from pyro_implicit import KIVI_ELBO, MLP, AutoImplicit
from pyro_implicit.infer import ImplicitELBO

NUM_DRAWS = 100


def layerwise(model: BNN) -> AutoGuideList:
    """Table 3 of Shi, Sun and Zhu (2018): noise of 20 and 30 hidden units for each layer."""
    guide = AutoGuideList(model)
    for layer in ("hidden", "output"):
        part = poutine.block(model, expose=[f"{layer}.weight", f"{layer}.bias"])
        generator = partial(MLP, 20, hidden=(30,), activation="relu")
        guide.append(AutoImplicit(part, generator, init_loc_fn=init_to_mean))
    return guide


def make_cases(device: str) -> dict[str, Case]:
    model = BNN(device)
    cases = {}
    for particles in (1, 10, 100):
        cases[f"mean-field, {particles}"] = Case(
            AutoNormal(model, init_loc_fn=init_to_mean), ImplicitELBO(particles)
        )
        for contrast in ("adaptive", "prior"):
            elbo = KIVI_ELBO(particles, NUM_DRAWS, NUM_DRAWS, contrast=contrast)
            cases[f"KIVI {contrast}, {particles}"] = Case(layerwise(model), elbo)
    return cases


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    pyro.set_rng_seed(args.seed)
    x = torch.randn(NUM_ROWS, NUM_FEATURES, device=args.device)
    data = x, torch.sin(x.sum(-1))
    cases = make_cases(args.device)
    for turn in trange(args.turns + 1, unit="turn"):
        for case in cases.values():
            case.take_turn(data, args.seconds)
            if turn == 0:
                case.forget()
    summaries = {name: case.summary() for name, case in cases.items()}
    ratios = {}
    for name in cases:
        method, particles = name.split(", ")
        if method != "mean-field":
            other = f"mean-field, {particles}"
            ratios[f"{name} / {other}"] = (
                summaries[name]["median_ms"] / summaries[other]["median_ms"]
            )
    settings = {"draws": NUM_DRAWS, "turns": args.turns, "seed": args.seed}
    result = environment(args.device) | settings | {"cases": summaries, "ratios": ratios}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10, help="turns of each case")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "kivi_speed.json")
    add_machine_arguments(parser)
    main(parser.parse_args())
