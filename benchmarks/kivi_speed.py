# SPDX-License-Identifier: Apache-2.0
"""How long is a KIVI step compared with a mean-field step with the same likelihood particles?

The network and the clock are those of ``vectorization_speed.py``; KIVI has one implicit guide per
layer, with the generators of its paper for sets like Boston, and 100 posterior and 100 contrast
draws. All cases alternate in one process, a minute or two::

    python -m benchmarks.kivi_speed
    python -m benchmarks.kivi_speed --device cuda
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from pyro import poutine
from pyro.infer.autoguide import AutoGuideList, AutoNormal, init_to_mean

from benchmarks.common import RESULTS, add_machine_arguments
from benchmarks.vectorization_speed import BNN, Case, measure
from pyro_implicit import KIVI_ELBO, MLP, AutoImplicit
from pyro_implicit.infer import ImplicitELBO

NUM_DRAWS = 100
PARTICLES, CONTRASTS = (1, 10, 100), ("adaptive", "prior")
# Each case and its baseline.
PAIRS = [
    (f"KIVI {contrast}, {particles}", f"mean-field, {particles}")
    for particles in PARTICLES
    for contrast in CONTRASTS
]


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
    for particles in PARTICLES:
        cases[f"mean-field, {particles}"] = Case(
            AutoNormal(model, init_loc_fn=init_to_mean), ImplicitELBO(particles)
        )
        for contrast in CONTRASTS:
            elbo = KIVI_ELBO(particles, NUM_DRAWS, NUM_DRAWS, contrast=contrast)
            cases[f"KIVI {contrast}, {particles}"] = Case(layerwise(model), elbo)
    return cases


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10, help="turns of each case")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "kivi_speed.json")
    add_machine_arguments(parser)
    args = parser.parse_args()
    measure(args, partial(make_cases, args.device), PAIRS, {"draws": NUM_DRAWS})
