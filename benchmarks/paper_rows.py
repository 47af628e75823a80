# SPDX-License-Identifier: Apache-2.0
"""The rows of `long_runs.py`: the papers' tables at the papers' lengths.

Hours are CPU hours of one thread, extrapolated from some steps on a machine that other jobs kept
busy. Values are relative: the first seed of a target of an issue counts most.
"""

from __future__ import annotations

from benchmarks.long_runs import Row

POTENTIALS = ("two moons", "sinusoid", "bisected", "split")


def energy(potential: str, method: str, hours: float, value: float, seed: int = 0) -> Row:
    """GPVI's appendix D.1: 200,000 steps of 100 particles, two layers of 500 units."""
    command = ["-m", "benchmarks.energy_potentials", "--paper", "--runs", "{runs}"]
    command += ["--potentials", potential, "--methods", method]
    command += ["--first-seed", str(seed), "--seeds", str(seed + 1)]
    line = {"potential": potential, "method": method, "seed": seed, "steps": 200_000, "hidden": 500}
    name, out = (
        f"energy {potential} {method} {seed}",
        "benchmarks/results/paper_energy_potentials.jsonl",
    )
    return Row(name, tuple(command), hours, value, out, (line,))


ROWS = [
    *(energy(potential, "InjectiveELBO", 0.9, 3.0) for potential in POTENTIALS),
    *(energy(potential, "GPVI", 1.0, 3.0) for potential in POTENTIALS),
    *(energy(potential, "amortised SVGD", 0.7, 0.7) for potential in POTENTIALS),
]
