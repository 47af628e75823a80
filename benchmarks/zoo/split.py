# SPDX-License-Identifier: Apache-2.0
"""The models for the development of ``fit``, and those that are only scored.

Written before the first result, one half of each kind. For models in ``SCORE`` only the totals of a
finished version are read; crashes may be fixed, without tuning on these models.
"""

from __future__ import annotations

__all__ = ["LOOK", "SCORE"]

LOOK = (
    # regression
    "coin",
    "ordinal",
    "dirichlet_multinomial",
    "negative_binomial",
    "logistic_breast_cancer",
    "heteroscedastic",
    # hierarchical
    "mixed_poisson_lkj",
    "nested_schools",
    "groups_1000",
    # shrinkage
    "horseshoe_30",
    "horseshoe_300",
    # gaussian_processes
    "gp_poisson",
    "car_lattice",
    # time_series
    "garch_loop",
    "local_level_loop",
    "stochastic_volatility_100_loop",
    "ar2",
    # dynamics
    "sir_loop",
    # mixtures
    "mixture_3",
    "hmm_enumerated",
    # latent_variables
    "factor_analysis",
    "topics",
    # missing
    "missing_covariates",
    "factor_energy",
    # networks
    "network_50",
)

SCORE = (
    # regression
    "linear_diabetes",
    "weibull_survival",
    "zero_inflated_poisson",
    "student_robust",
    "softmax_wine",
    "poisson_exposure",
    # hierarchical
    "crossed_logit",
    "mixed_linear_lkj_300",
    "binomial_players",
    # shrinkage
    "horseshoe_50",
    "spike_slab",
    # gaussian_processes
    "gp_regression",
    "gp_bernoulli",
    # time_series
    "stochastic_volatility_1000",
    "arma_loop",
    "local_level",
    "ar2_loop",
    # dynamics
    "lotka_volterra",
    # mixtures
    "mixture_2_enumerated",
    "mixture_4",
    "change_point",
    # latent_variables
    "irt_2pl",
    # missing
    "measurement_error",
    "deterministic_sites",
    # networks
    "network_500",
)
