# SPDX-License-Identifier: Apache-2.0
"""What the reference runs of some models need beside the defaults of ``sample``."""

from __future__ import annotations

__all__ = ["SETTINGS"]

SETTINGS: dict[str, tuple[str, ...]] = {
    "sir_loop": ("--from-median",),
    "lotka_volterra": ("--from-median", "--thin", "1"),
    "garch_loop": ("--thin", "2"),
    "arma_loop": ("--from-median", "--thin", "2"),
    "horseshoe_30": ("--target-accept", "0.98", "--thin", "2"),
    "horseshoe_50": ("--target-accept", "0.98", "--thin", "2"),
    "horseshoe_300": ("--target-accept", "0.98", "--thin", "1"),
    "mixed_poisson_lkj": ("--target-accept", "0.95", "--thin", "2"),
    "mixed_linear_lkj_300": ("--target-accept", "0.9", "--thin", "1"),
    "crossed_logit": ("--target-accept", "0.95", "--thin", "8"),
    "nested_schools": ("--target-accept", "0.98", "--thin", "8"),
    "binomial_players": ("--target-accept", "0.98", "--thin", "8"),
    "groups_1000": ("--thin", "1"),
    "car_lattice": ("--target-accept", "0.9", "--thin", "1"),
    "gp_poisson": ("--target-accept", "0.95", "--thin", "2"),
    "gp_bernoulli": ("--target-accept", "0.98", "--thin", "2"),
    "local_level_loop": ("--target-accept", "0.95", "--thin", "2"),
    "stochastic_volatility_1000": ("--thin", "1", "--samples", "1000"),
    "stochastic_volatility_100_loop": ("--target-accept", "0.95", "--thin", "1"),
    "spike_slab": ("--target-accept", "0.95", "--thin", "8"),
    "network_50": ("--thin", "2"),
    "network_500": ("--thin", "2"),
    "factor_energy": ("--target-accept", "0.95", "--thin", "16"),
    "measurement_error": ("--target-accept", "0.95"),
    "deterministic_sites": ("--target-accept", "0.95"),
}
