# SPDX-License-Identifier: Apache-2.0
"""Settings of the reference runs of some models, in addition to the defaults of ``sample``."""

from __future__ import annotations

from benchmarks.zoo.references.gibbs import horseshoe

__all__ = ["MAX_COLUMNS", "MAX_VALUES", "MIN_ESS", "SAMPLERS", "SETTINGS", "USER"]

USER = ""  # no run with NumPyro's defaults
MAX_COLUMNS, MAX_VALUES = 75, 150_000
MIN_ESS = 1000

SETTINGS = {
    "sir_loop": "--from-median",
    "lotka_volterra": "--from-median --optimise",
    "arma_loop": "--from-median --optimise",
    "garch_loop": "--optimise",
    "mixed_linear_lkj_300": "--diagonal --target-accept 0.9 --optimise",
    "crossed_logit": "--target-accept 0.95 --thin 3",
    "nested_schools": "--target-accept 0.98 --thin 4",
    "binomial_players": "--target-accept 0.95 --thin 3",
    "groups_1000": "--diagonal --optimise",
    "gp_poisson": "--target-accept 0.95",
    "gp_bernoulli": "--target-accept 0.95 --noncentred f --optimise --diagonal",
    "local_level_loop": "--target-accept 0.95 --noncentred level --optimise",
    "local_level": "--target-accept 0.95 --optimise",
    "irt_2pl": "--diagonal",
    "mixed_poisson_lkj": "--target-accept 0.9 --diagonal --noncentred effect --optimise",
    "car_lattice": "--diagonal --target-accept 0.9 --thin 8 --optimise",
    "stochastic_volatility_1000": "--diagonal --noncentred steps --samples 1000 --optimise",
    "stochastic_volatility_100_loop": "--diagonal --target-accept 0.95 --optimise",
    "spike_slab": "--target-accept 0.95 --thin 2",
    "network_50": "--diagonal --thin 2 --optimise",
    "network_500": "--diagonal --optimise",
    "factor_analysis": "--samples 4000 --optimise",
    "factor_energy": "--target-accept 0.95 --thin 4",
    "measurement_error": "--target-accept 0.95",
    "deterministic_sites": "--target-accept 0.95",
}

# Models on which NUTS does not converge: sampler, draws of each chain, sweeps between two draws.
SAMPLERS = {
    "horseshoe_30": (horseshoe, 800, 5),
    "horseshoe_50": (horseshoe, 800, 5),
    "horseshoe_300": (horseshoe, 400, 10),
}
