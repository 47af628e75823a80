# SPDX-License-Identifier: Apache-2.0
"""Pure functions on tensors of any device and floating dtype: the mathematics of all methods."""

from __future__ import annotations

from pyro_implicit.ops.density_ratio import (
    Covariance,
    DensityRatio,
    Direction,
    adaptive_log_density,
    fit_density_ratio,
    log_density_ratio,
    logistic_ratio_loss,
    standardize,
)
from pyro_implicit.ops.ensemble_hmc import ChainState, Move, ensemble_move, score_of
from pyro_implicit.ops.importance_weights import (
    LogWeights,
    SmoothedWeights,
    bridge,
    bridge_error,
    pareto_smoothed,
)
from pyro_implicit.ops.jacobian import (
    batch_jacobian,
    covariance_log_det,
    jacobian_products,
    lanczos,
    linearised_log_density,
    log_quadratic_and_solve,
    smallest_eigenpair,
    smallest_singular_log_det,
    stochastic_log_det,
)
from pyro_implicit.ops.kernels import (
    InverseTransposed,
    Kernel,
    RadialKernel,
    imq_kernel,
    kernel_and_slopes,
    median_bandwidth,
    multiscale_rbf_kernel,
    particle_bandwidth,
    rbf_kernel,
    repulsion,
    squared_distances,
)
from pyro_implicit.ops.normal_mixture import fit_normal_mixture
from pyro_implicit.ops.permutations import (
    align_hidden_units,
    linear_assignment,
    permutation_log_prob,
)
from pyro_implicit.ops.score_estimators import (
    SteinTest,
    gaussian_entropy,
    kernel_stein_discrepancy,
    spectral_score,
    stein_gram,
    stein_score,
    stein_test,
)
from pyro_implicit.ops.semi_implicit import (
    conditional_log_density,
    conditional_stein_discrepancy,
    linearised_reverse_conditional,
    mixture_log_density,
)
from pyro_implicit.ops.sinh_arcsinh import (
    sinh_arcsinh,
    sinh_arcsinh_inverse,
    sinh_arcsinh_log_derivative,
    sinh_arcsinh_slopes,
)

__all__ = [
    "ChainState",
    "Covariance",
    "DensityRatio",
    "Direction",
    "InverseTransposed",
    "Kernel",
    "LogWeights",
    "Move",
    "RadialKernel",
    "SmoothedWeights",
    "SteinTest",
    "adaptive_log_density",
    "align_hidden_units",
    "batch_jacobian",
    "bridge",
    "bridge_error",
    "conditional_log_density",
    "conditional_stein_discrepancy",
    "covariance_log_det",
    "ensemble_move",
    "fit_density_ratio",
    "fit_normal_mixture",
    "gaussian_entropy",
    "imq_kernel",
    "jacobian_products",
    "kernel_and_slopes",
    "kernel_stein_discrepancy",
    "lanczos",
    "linear_assignment",
    "linearised_log_density",
    "linearised_reverse_conditional",
    "log_density_ratio",
    "log_quadratic_and_solve",
    "logistic_ratio_loss",
    "median_bandwidth",
    "mixture_log_density",
    "multiscale_rbf_kernel",
    "pareto_smoothed",
    "particle_bandwidth",
    "permutation_log_prob",
    "rbf_kernel",
    "repulsion",
    "score_of",
    "sinh_arcsinh",
    "sinh_arcsinh_inverse",
    "sinh_arcsinh_log_derivative",
    "sinh_arcsinh_slopes",
    "smallest_eigenpair",
    "smallest_singular_log_det",
    "spectral_score",
    "squared_distances",
    "standardize",
    "stein_gram",
    "stein_score",
    "stein_test",
    "stochastic_log_det",
]
