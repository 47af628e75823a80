# SPDX-License-Identifier: Apache-2.0
"""All numbers that decide something in ``refine`` and ``teach``."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "DEFAULT",
    "ChainPolicy",
    "FramePolicy",
    "HMCPolicy",
    "LangevinPolicy",
    "SpacePolicy",
    "StoppingPolicy",
    "TEACHING",
    "TeachPolicy",
    "WarmupPolicy",
]


@dataclass(frozen=True)
class FramePolicy:
    """How draws become an affine frame. Set by ``benchmarks/refine_posteriordb.py``.

    :ivar outlier_ranges: Interquartile ranges from the median beyond which a draw is an outlier.
    :ivar max_rank: Principal axes of a low-rank frame; memory is ``d * max_rank`` numbers.
    :ivar axis_margin: Factor over Marchenko and Pastur's edge from which a variance is significant.
    :ivar draws_per_dim: Draws for each dimension below which correlations are shrunk.
    :ivar too_narrow: Ratio of the allowed width to the sd of draws above which a coordinate is
        widened; large, because sixteen minibatches give curvatures only roughly.
    :ivar num_draws: Draws that estimate a scale of a guide or of the prior.
    :ivar least_draws: Draws below which their covariance is not used.
    :ivar num_points: Points at which information, curvature and gradient noise are measured.
    """

    outlier_ranges: float = 6.0
    max_rank: int = 32
    axis_margin: float = 1.05
    draws_per_dim: int = 10
    too_narrow: float = 10.0
    num_draws: int = 64
    least_draws: int = 20
    num_points: int = 8


@dataclass(frozen=True)
class HMCPolicy:
    """ChEES adaptation of step size and trajectory length.

    :ivar target_acceptance: Mean acceptance probability; Hoffman and Gelman (2014).
    :ivar rate: Step of the ascent of the log trajectory length; ``benchmarks/refine_ess.py``.
    :ivar memory: Weight of older transitions in the criterion and in the mean length.
    :ivar cost: Power of the length by which the criterion is divided, a cost of long trajectories.
    :ivar start_length: First trajectory length, about a quarter turn of a unit Gaussian (pi / 2).
    :ivar gamma: Shrinkage of dual averaging, in a frame whose step size is nearly right.
    :ivar spread: Ratio of the largest to the smallest step size where trajectories fail.
    :ivar harmonic_target: Harmonic mean of acceptance probabilities where trajectories fail.
    :ivar least_acceptance: Least probability in that mean, so that one chain does not dominate.
    :ivar failed_acceptance: Acceptance probability below which a trajectory counts as failed.
    """

    target_acceptance: float = 0.8
    rate: float = 0.2
    memory: float = 0.8
    cost: float = 0.25
    start_length: float = 1.5
    gamma: float = 0.2
    spread: float = 8.0
    harmonic_target: float = 0.7
    least_acceptance: float = 0.05
    failed_acceptance: float = 0.01


@dataclass(frozen=True)
class WarmupPolicy:
    """Windows of the warm-up of chains with all data. Set by ``benchmarks/refine_posteriordb.py``.

    :ivar first_window: Transitions of the first window; each window is twice as long as the last.
    :ivar least_windows: Windows before the warm-up may end.
    :ivar tuning: Transitions in the last frame before the kernel is frozen.
    :ivar share: Share of the budget after which the warm-up ends.
    :ivar max_pool: Draws from which a frame is estimated; a limit of time.
    :ivar max_stretch: White sds above which the frame must be estimated again.
    :ivar max_failed: Share of failed trajectories above which a density counts as stiff.
    :ivar least_lost: Nats below the median log-density at which a chain counts as lost.
    :ivar max_lost: Share of chains that may be lost; more of them are a mode.
    :ivar drift_errors: Standard errors within which the log-density counts as stationary.
    :ivar drift_sd: The same in standard deviations of the log-density.
    :ivar chunks: The longest trajectory takes this part of ``max_gradients``.
    """

    first_window: int = 8
    least_windows: int = 3
    tuning: int = 16
    share: float = 0.4
    max_pool: int = 4096
    max_stretch: float = 3.0
    max_failed: float = 0.002
    least_lost: float = 15.0
    max_lost: float = 0.02
    drift_errors: float = 3.0
    drift_sd: float = 0.1
    chunks: int = 40


@dataclass(frozen=True)
class StoppingPolicy:
    """When chains with all data stop. Set by ``benchmarks/refine_stopping.py`` (200 runs).

    :ivar max_error: Drift of a mean in sds, or of an sd as a share, at which it is small enough.
    :ivar errors: Standard errors of the drift that count as drift.
    :ivar max_allowance: Allowance for heavy tails, a factor on the drift of standard deviations.
    :ivar max_r_hat: Nested R-hat of converged chains; five effective draws of each chain.
    :ivar max_steady_r_hat: Nested R-hat up to which named quantities may be steady.
    :ivar strict_r_hat: Nested R-hat of converged chains where trajectories fail.
    :ivar enough: Effective draws after which converged chains stop.
    :ivar least_share: Gradients, as a share of the warm-up's, after which converged chains stop.
    :ivar first_check: Draws of each chain before the first check.
    :ivar between_checks: Ratio of the numbers of draws of successive checks.
    :ivar least_draws: Draws of each chain before a budget may stop the run.
    :ivar max_crossed: Share of chains that may change modes and still count as separate.
    :ivar max_end_failed: Share of failed trajectories above which draws are doubtful.
    :ivar max_converged_failed: The same of converged chains, whose R-hat shows a filling neck.
    :ivar num_weighed: Draws of each mode for bridge sampling.
    """

    max_error: float = 0.05
    errors: float = 2.0
    max_allowance: float = 2.0
    max_r_hat: float = 1.1
    max_steady_r_hat: float = 2.0
    strict_r_hat: float = 1.05
    enough: int = 4000
    least_share: float = 0.5
    first_check: int = 16
    between_checks: float = 1.2
    least_draws: int = 12
    max_crossed: float = 0.01
    max_end_failed: float = 0.01
    max_converged_failed: float = 0.05
    num_weighed: int = 2000


@dataclass(frozen=True)
class SpacePolicy:
    """Which space chains walk in, and how the conditional space is made.

    Set by ``benchmarks/refine_models.py`` and the hard geometries of ``benchmarks/posteriordb``.

    :ivar probe: Transitions of a trial walk; the first third does not count.
    :ivar probe_leapfrogs: Leapfrog steps of a transition in a trial walk.
    :ivar easy: Gradients of a transition up to which a guide's noise needs no comparison.
    :ivar faster: Ratio of speeds above which the latents replace a guide's noise.
    :ivar max_replaced: Share of replaced starts above which a space is left.
    :ivar fold_draws: Noise draws at which a generator is checked for folds.
    :ivar middle_draws: Draws of the guide whose median is the middle of the posterior.
    :ivar max_sites: Sites that are analysed one after the other.
    :ivar max_columns: Columns of a Hessian that are computed; more are probed by random signs.
    :ivar num_probes: Random signs of Hutchinson's estimate.
    :ivar max_watched: Elements of a site at which the law of its information is fitted.
    :ivar max_dense: Latents of a scaled block that share one matrix.
    :ivar num_points: Points at which the law of the information is fitted.
    :ivar point_spread: Sd of these points, in unconstrained coordinates.
    :ivar explained: Share of the variance that the law must explain.
    :ivar constant: Sd of log information below which it counts as constant.
    :ivar least_power: Powers below this are dropped from a law.
    :ivar factor_power: Power above which a latent counts as a factor; less belongs to noise scales.
    :ivar least_told: Information, in units of the prior's, below which a site is left out.
    :ivar max_rest: Mean squared error of the score of a standard normal that is round enough.
    :ivar far: Sds by which other latents are moved in that check.
    :ivar difference: Step of central differences, in unconstrained coordinates.
    """

    probe: int = 24
    probe_leapfrogs: int = 16
    easy: float = 8.0
    faster: float = 1.2
    max_replaced: float = 0.1
    fold_draws: int = 64
    middle_draws: int = 128
    max_sites: int = 12
    max_columns: int = 1200
    num_probes: int = 64
    max_watched: int = 16
    max_dense: int = 128
    num_points: int = 24
    point_spread: float = 0.3
    explained: float = 0.8
    constant: float = 0.1
    least_power: float = 0.1
    factor_power: float = 1.5
    least_told: float = 0.01
    max_rest: float = 0.3
    far: float = 3.0
    difference: float = 0.01


@dataclass(frozen=True)
class LangevinPolicy:
    """Chains that see minibatches. Set by ``benchmarks/refine_minibatches.py``.

    :ivar friction: Friction of SGHMC, critical for directions twice as wide as the frame says.
    :ivar max_heat: Share by which gradient noise may widen variances.
    :ivar max_discretisation: Share by which SGLD's steps may widen the narrowest direction.
    :ivar max_growth: Ratio of the step sizes of successive windows.
    :ivar max_temperature: Temperature of velocities above which a step counts as too long.
    :ivar power_iterations: Iterations of the power method for the largest curvature.
    :ivar curvature_distance: Distance of two points whose gradients give a curvature, in the frame.
    :ivar warmup_share: Share of the budget for the warm-up.
    :ivar least_steps: Steps after the warm-up that a time budget leaves, and three for each cycle.
    :ivar default_epochs: Epochs of a run without ``max_epochs``, at least.
    :ivar default_steps: Steps of such a run, at least.
    :ivar least_in_all: Steps of the shortest run.
    :ivar enough: Relaxation times after which the mean has forgotten the start.
    :ivar peak: Ratio of the largest to the chosen step size in a cycle; Zhang et al. (2020).
    :ivar max_values: Numbers drawn or differentiated at once; a limit of memory.
    """

    friction: float = 1.0
    max_heat: float = 0.5
    max_discretisation: float = 0.05
    max_growth: float = 2.0
    max_temperature: float = 3.0
    power_iterations: int = 6
    curvature_distance: float = 0.1
    warmup_share: float = 0.3
    least_steps: int = 10
    default_epochs: int = 10
    default_steps: int = 2000
    least_in_all: int = 4
    enough: float = 2.0
    peak: float = 4.0
    max_values: int = 10**6


@dataclass(frozen=True)
class TeachPolicy:
    """How a guide learns from draws. Set by ``benchmarks/refine_teach.py``.

    :ivar least_draws: Draws below which nothing is learnt.
    :ivar max_learnt: Draws that a guide learns from.
    :ivar max_held_out: Draws of the validation set.
    :ivar held_out_part: One draw in this many is held out.
    :ivar every: Steps between two evaluations on the validation set.
    :ivar patience: Evaluations without a gain after which the training ends.
    :ivar clip_norm: Norm to which gradients are clipped.
    :ivar near: Relative error of a value at which Newton's method has found its noise.
    :ivar newton_steps: Steps of Newton's method without a start.
    :ivar least_share: Responsibility below which a component does not learn from a draw.
    """

    least_draws: int = 20
    max_learnt: int = 4096
    max_held_out: int = 1024
    held_out_part: int = 5
    every: int = 25
    patience: int = 6
    clip_norm: float = 10.0
    near: float = 1e-4
    newton_steps: int = 30
    least_share: float = 1e-3


@dataclass(frozen=True)
class ChainPolicy:
    """All settings of :func:`~pyro_implicit.mcmc.refine` that are not its arguments.

    :ivar num_chains: Chains with all data, by default.
    :ivar least_chains: Chains with all data, at least: they learn by comparison.
    :ivar num_minibatch_chains: Chains that see minibatches, by default.
    :ivar least_kept: Kept draws of each chain, at least: fewer have no halves to compare.
    """

    num_chains: int = 256
    least_chains: int = 8
    num_minibatch_chains: int = 8
    least_kept: int = 4
    frame: FramePolicy = field(default_factory=FramePolicy)
    hmc: HMCPolicy = field(default_factory=HMCPolicy)
    warmup: WarmupPolicy = field(default_factory=WarmupPolicy)
    stopping: StoppingPolicy = field(default_factory=StoppingPolicy)
    space: SpacePolicy = field(default_factory=SpacePolicy)
    langevin: LangevinPolicy = field(default_factory=LangevinPolicy)


DEFAULT = ChainPolicy()
TEACHING = TeachPolicy()
