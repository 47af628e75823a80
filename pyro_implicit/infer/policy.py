# SPDX-License-Identifier: Apache-2.0
"""Settings of the ELBOs and bounds that are not arguments."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BOUNDS", "ELBOS", "BoundPolicy", "ElboPolicy"]


@dataclass(frozen=True)
class ElboPolicy:
    """Limits and rates within the methods that train guides."""

    #: ``LIVI_ELBO(log_det="auto")``: the smaller one of noise and value dimensions up to which the
    #: log-determinant is exact. A step then takes seconds on one core (``benchmarks/speed``).
    max_exact_dim: int = 800

    #: The same for the entries of all Jacobians of a step together: 0.8 GB in float32.
    max_exact_entries: int = 200_000_000

    #: ``LIVI_ELBO``: relative residual of an iterative solver from which a warning is issued.
    max_residual: float = 0.1

    #: ``UIVI_ELBO``: the first step size of its chains, in standard deviations of the noise.
    initial_step_size: float = 0.1

    #: ``UIVI_ELBO``: change of the step size's logarithm per unit of excess acceptance, for each
    #: transition (Robbins and Monro, 1951).
    adaptation_rate: float = 0.5

    #: ``ReverseConditional``: bound of the logarithm of each layer's scales.
    max_log_scale: float = 5.0

    #: ``PVI``: weight of the past in the moving average of squared gradients of the particles, for
    #: each step (Lim and Johansen, 2024, their code).
    particle_decay: float = 0.9

    #: ``InjectiveELBO``: weight of the past in the moving averages of scores, for each step.
    control_variate_decay: float = 0.95

    #: Exact densities: weight of the past in the moving average of the share of reversed draws.
    fold_decay: float = 0.99

    #: Training steps from one look at this share to the next. Folds of the first steps are mostly
    #: gone by then, with ``InjectiveELBO``.
    fold_steps: int = 500

    #: Share of reversed draws from which a warning is issued. Half a percent lowered a loss by a
    #: quarter of a nat.
    max_reversed: float = 0.003

    #: ``InjectiveELBO``: weight of a reversed draw. On ``benchmarks/energy_potentials``, 10 leaves
    #: folds that lower the loss by half a nat, and 1,000 disturbs the training.
    unfolding_weight: float = 100.0

    #: Relative difference of log-densities in and outside a plate that counts as equal (float32).
    prior_tolerance: float = 1e-4

    #: Share of the prior draws of a model that draws one at a time which is renewed at each step.
    renewed_prior_draws: float = 0.1


@dataclass(frozen=True)
class BoundPolicy:
    """Settings of :func:`~pyro_implicit.evidence_bound`."""

    #: Standard deviations between two places of the noise from which they count as separate.
    fold_distance: float = 6.0

    #: Nats between the masses of two places up to which neither is negligible.
    fold_balance: float = 5.0

    #: Share of draws from two places from which a warning is issued.
    max_folded: float = 0.05

    #: Draws that are timed for an estimate; the fewest of a standard error.
    timed_draws: int = 2

    #: Gauss-Newton steps from each initial value, by default; ``diagnose`` estimates the cost of a
    #: weight from this number and the next one.
    num_steps: int = 50

    #: Initial values of these steps for each draw, by default.
    num_starts: int = 4

    #: Chunks within ``max_seconds``, so that the last one overruns it by a fifth at most.
    num_chunks: int = 5


ELBOS = ElboPolicy()
BOUNDS = BoundPolicy()
