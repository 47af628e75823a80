# SPDX-License-Identifier: Apache-2.0
"""The models for the development of ``fit``, and those that are only scored.

Written before the first result. The first seven of ``LOOK`` are those of issue 31; the other 23
models were divided by ``random.Random(31).shuffle``. For models in ``SCORE`` only the totals of a
finished version are read; crashes may be fixed, without tuning on these models.
"""

from __future__ import annotations

__all__ = ["LOOK", "SCORE"]

LOOK = (
    "bayesian_lasso_200",
    "student_walk_400",
    "hospitals_loop_120",
    "negative_binomial_1000",
    "ricker_markov_60",
    "volatility_1000",
    "volatility_2500",
    "local_level_2000",
    "additive_splines",
    "dirichlet_groups",
    "elo_seasons",
    "gp_student",
    "measurement_error_300",
    "poisson_markov_150",
    "probit_crossed",
    "zero_inflated_200",
)

SCORE = (
    "beta_binomial_300",
    "bradley_terry_100",
    "cauchy_sparse",
    "cox_process_100",
    "disease_map",
    "gamma_glm_200",
    "gumbel_stations",
    "hierarchical_ar",
    "horseshoe_poisson",
    "irt_3pl",
    "latent_space",
    "meta_student",
    "schools_lkj_100",
    "survival_walks",
    "weibull_frailty",
)
