# SPDX-License-Identifier: Apache-2.0
"""What the reference runs of some models need beside the defaults of ``sample``."""

from __future__ import annotations

__all__ = ["SETTINGS"]

SETTINGS: dict[str, tuple[str, ...]] = {
    "sir_loop": ("--from-median",),
    "lotka_volterra": ("--from-median", "--optimise"),
    "arma_loop": ("--from-median", "--optimise"),
    "garch_loop": ("--optimise",),
    "horseshoe_30": ("--target-accept", "0.95"),
    "horseshoe_50": ("--target-accept", "0.95"),
    "horseshoe_300": ("--target-accept", "0.95", "--optimise"),
    "mixed_poisson_lkj": ("--target-accept", "0.9"),
    "mixed_linear_lkj_300": ("--target-accept", "0.9", "--optimise"),
    "crossed_logit": ("--target-accept", "0.95", "--thin", "3"),
    "nested_schools": ("--target-accept", "0.98", "--thin", "4"),
    "binomial_players": ("--target-accept", "0.95", "--thin", "3"),
    "groups_1000": ("--optimise",),
    "car_lattice": ("--target-accept", "0.9", "--optimise"),
    "gp_poisson": (
        "--target-accept",
        "0.95",
    ),
    "gp_bernoulli": (
        "--target-accept",
        "0.95",
    ),
    "local_level_loop": ("--target-accept", "0.95", "--thin", "2"),
    "stochastic_volatility_1000": ("--samples", "1000", "--optimise"),
    "stochastic_volatility_100_loop": ("--target-accept", "0.95", "--optimise"),
    "spike_slab": ("--target-accept", "0.95", "--thin", "2"),
    "network_50": ("--thin", "2"),
    "network_500": ("--optimise",),
    "factor_energy": ("--target-accept", "0.95", "--thin", "4"),
    "measurement_error": ("--target-accept", "0.95"),
    "deterministic_sites": ("--target-accept", "0.95"),
}
