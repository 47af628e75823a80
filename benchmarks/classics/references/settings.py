# SPDX-License-Identifier: Apache-2.0
"""Settings of the reference runs of the classic examples."""

from __future__ import annotations

from benchmarks.classics.references.exact import beetles, dogs, dugongs, dyes, magnesium, stagnant

__all__ = ["MAX_COLUMNS", "MAX_VALUES", "MIN_ESS", "SAMPLERS", "SETTINGS", "USER"]

USER = ""  # no run with NumPyro's defaults
MAX_COLUMNS, MAX_VALUES = 25, 30_000  # files of at most 60 kB
MIN_ESS = 400
SETTINGS = {
    "rats": "--samples 1000",
    "pump": "--samples 1000",
    "seeds": "--samples 1500 --target-accept 0.9 --noncentred b",
    "surgical": "--samples 1500 --target-accept 0.9 --noncentred b",
    "salm": "--samples 1500 --target-accept 0.9 --noncentred effect",
    "leukfr": "--samples 1000 --target-accept 0.9 --noncentred b",
    "stacks": "--samples 1500 --target-accept 0.9",
    "mice": "--samples 1500 --target-accept 0.9",
    "cervix": "--samples 1000 --target-accept 0.9",
}
# An exact sampler, its draws of each chain, and an unused number.
SAMPLERS = {
    "beetles": (beetles, 1000, 1),
    "dogs": (dogs, 1000, 1),
    "dugongs": (dugongs, 1000, 1),
    "dyes": (dyes, 1000, 1),
    "magnesium": (magnesium, 400, 1),
    "stagnant": (stagnant, 1000, 1),
}
