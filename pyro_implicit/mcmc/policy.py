# SPDX-License-Identifier: Apache-2.0
"""All numbers that decide something in ``refine`` and ``teach``."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyro_implicit.runtime.policy import EpochPolicy

__all__ = [
    "DEFAULT",
    "INVERSION",
    "MODES_SHOWN",
    "TEACHING",
    "ChainPolicy",
    "FramePolicy",
    "HMCPolicy",
    "LangevinPolicy",
    "MCLMCPolicy",
    "ShiftPolicy",
    "SlicePolicy",
    "SpacePolicy",
    "StepPolicy",
    "StoppingPolicy",
    "TeachPolicy",
    "TemperingPolicy",
    "WarmupPolicy",
    "WindowPolicy",
]

#: Modes whose weights are printed, heaviest first.
MODES_SHOWN = 8


@dataclass(frozen=True)
class FramePolicy:
    """How draws become an affine frame. Checked by ``benchmarks/refine_posteriordb.py``."""

    #: Interquartile ranges from the median beyond which a draw is an outlier, for frames and for
    #: the stopping rule.
    outlier_ranges: float = 6.0

    #: Draws whose scores make a low-rank frame; eight gradients of 128 chains.
    max_scored: int = 1024

    #: Principal axes of draws, and of scores, for a low-rank frame; memory is ``2 * d * max_rank``
    #: numbers.
    max_rank: int = 32

    #: Factor over Marchenko and Pastur's edge from which a variance is significant.
    axis_margin: float = 1.05

    #: Draws for each dimension below which correlations are shrunk.
    draws_per_dim: int = 10

    #: Ratio of the allowed width to the sd of draws above which a coordinate is widened; large,
    #: because sixteen minibatches give curvatures only roughly.
    too_narrow: float = 10.0

    #: Draws that estimate a scale of a guide or of the prior, also for annealing.
    num_draws: int = 64

    #: Draws below which their covariance is not used.
    least_draws: int = 20

    #: Points at which information, curvature and gradient noise are measured.
    num_points: int = 8

    #: Power of the relative rounding error that is the ridge of correlations, far below sampling
    #: noise.
    rounding_power: float = 0.5


@dataclass(frozen=True)
class StepPolicy:
    """The search for a first step size."""

    #: Transitions, at most. Each changes the step size by a factor of two at most: in all, by nine
    #: orders of magnitude.
    max_doublings: int = 30


@dataclass(frozen=True)
class HMCPolicy(StepPolicy):
    """ChEES adaptation of step size and trajectory length."""

    #: Mean acceptance probability; Hoffman and Gelman (2014).
    target_acceptance: float = 0.8

    #: Step of the ascent of the log trajectory length; ``benchmarks/refine_ess.py``.
    rate: float = 0.2

    #: Weight of older transitions in the criterion and in the mean length.
    memory: float = 0.8

    #: Power of the length by which the criterion is divided, a cost of long trajectories.
    cost: float = 0.25

    #: First trajectory length, about a quarter turn of a unit Gaussian (pi / 2).
    start_length: float = 1.5

    #: Shrinkage of dual averaging, in a frame whose step size is nearly right.
    gamma: float = 0.2

    #: Ratio of the largest to the smallest step size where trajectories fail.
    spread: float = 8.0

    #: Harmonic mean of acceptance probabilities where trajectories fail.
    harmonic_target: float = 0.7

    #: Least probability in that mean, so that one chain does not dominate.
    least_acceptance: float = 0.05

    #: Acceptance probability below which a trajectory counts as failed.
    failed_acceptance: float = 0.01

    #: Leapfrog steps of the trajectories that find the first step size.
    search_leapfrogs: int = 2


@dataclass(frozen=True)
class MCLMCPolicy(StepPolicy):
    """Microcanonical Langevin dynamics. Checked by ``benchmarks/networks/tabular.py``."""

    #: Steps of a transition, of two gradients each. Positions between them are not looked at.
    num_steps: int = 8

    #: Mean squared energy error of a step for each dimension, at the start of the warm-up;
    #: Sommer et al. (2025).
    first_energy_error: float = 0.5

    #: The same at its end, and of all draws. Without preconditioner, variances of Gaussians in 20
    #: and 200 dimensions, of condition number 100, are 2 % too small on average and 2 % too large
    #: in the narrowest direction; at 0.01, 5 % too small and up to 90 % too large.
    energy_error: float = 0.001

    #: The same above which a transition is undone: the chain has left its mode by a wild step.
    max_energy_error: float = 100.0

    #: Weight of older transitions in the estimate of the energy error.
    memory: float = 0.9

    #: Transitions after which a chain first learns its preconditioner; further windows double.
    first_scale_window: int = 32

    #: Share of the warm-up after which the preconditioner stays.
    scale_share: float = 0.5

    #: Ratio of a coordinate's scale to the geometric mean of all, and its inverse, at most.
    max_scale: float = 10.0

    #: Share of the budget for the warm-up.
    warmup_share: float = 0.5

    #: Share of the warm-up after which a window ends, so that short runs adapt several times.
    longest_window: float = 0.1

    #: Chains, if the guide has no draws of its own to start from.
    num_chains: int = 16

    #: Mean acceptance probability of each chain with Metropolis' adjustment (``"mams"``); Robnik et
    #: al. (2025), section 4.
    target_acceptance: float = 0.9

    #: Share of the warm-up without this adjustment.
    unadjusted_share: float = 0.5

    #: Factor on step sizes for a new preconditioner, and at the beginning of the adjustment.
    restart_factor: float = 0.5


@dataclass(frozen=True)
class SlicePolicy:
    """Slice sampling along random directions. Checked by
    ``tests/mcmc/kernels/test_slice_sampling.py``."""

    #: Largest latent dimension in which it replaces HMC if the density jumps.
    max_dim: int = 30

    #: Share of short steps with a jump above which chains change to it.
    least_jumps: float = 0.03

    #: Width of the first interval, in sds of the frame.
    width: float = 4.0

    #: Points of an interval after which a chain stays where it is.
    max_shrinks: int = 60

    #: Points of an interval until a chain has moved, about.
    usual_shrinks: int = 5

    #: Directions of a transition: enough that chains wait little for each other.
    num_directions: int = 12


@dataclass(frozen=True)
class WindowPolicy:
    """Moves of discrete elements between HMC transitions. Checked by ``benchmarks/discrete.py``."""

    #: Values up to which all of them are candidates.
    max_whole: int = 64

    #: The same for labels, whose windows are no neighbourhoods.
    max_labels: int = 1024

    #: Candidates of an element with more values, the current one included.
    num_values: int = 8

    #: The longest stride, in sds of the element's draws over half the number of candidates; the
    #: best scale of a random walk, with two candidates (Roberts and Rosenthal, 2001).
    reach: float = 2.4

    #: Sweeps of a transition, at most.
    most_sweeps: int = 8

    #: Nats by which a term of density 0 counts while starts are made possible.
    impossible: float = 1e4

    #: Sweeps that make starts possible, at most.
    most_repairs: int = 30


@dataclass(frozen=True)
class ShiftPolicy:
    """Joint moves of counts and continuous latents. Checked by ``benchmarks/discrete.py``."""

    #: Values that an element must exceed to be shifted; fewer are at their bounds too often.
    least_values: int = 8

    #: Variance of a coordinate, in units of that given the counts, from which it is a ridge.
    least_variance: float = 2.0

    #: Moves of a transition.
    num_moves: int = 4

    #: Mean acceptance probability; between the optima 0.44 and 0.23 of random walks in one and in
    #: many dimensions (Roberts and Rosenthal, 2001).
    target_acceptance: float = 0.35

    #: Power of the number of moves by which the adaptation of their size slows down.
    slowing: float = 0.6

    #: First size, in widths of the ridge.
    first_size: float = 0.5


@dataclass(frozen=True)
class WarmupPolicy:
    """Warm-up of chains with all data. Checked by ``benchmarks/refine_posteriordb.py``."""

    #: Transitions of the first window; each window is twice as long as the last.
    first_window: int = 8

    #: Windows before the warm-up may end.
    least_windows: int = 3

    #: Transitions in the last frame before the kernel is frozen.
    tuning: int = 16

    #: Share of the budget after which the warm-up ends.
    share: float = 0.4

    #: Gradients, about, of a first step size and the shortest warm-up; a window does not end if
    #: ``max_seconds`` leaves time for fewer.
    least_gradients: int = 40

    #: Draws from which a frame is estimated; a limit of time.
    max_pool: int = 4096

    #: White sds above which the frame must be estimated again.
    max_stretch: float = 3.0

    #: Share of failed trajectories above which a density counts as stiff.
    max_failed: float = 0.002

    #: Nats below the median log-density at which a chain counts as lost.
    least_lost: float = 15.0

    #: Share of chains that may be lost; more of them are a mode.
    max_lost: float = 0.02

    #: Standard errors within which the log-density counts as stationary.
    drift_errors: float = 3.0

    #: The same in standard deviations of the log-density.
    drift_sd: float = 0.1

    #: The longest trajectory takes this part of ``max_gradients``.
    chunks: int = 40


@dataclass(frozen=True)
class StoppingPolicy:
    """When chains with all data stop. Checked by ``benchmarks/refine_stopping.py`` (200 runs)."""

    #: Drift of a mean in sds, or of an sd as a share, at which it is small enough.
    max_error: float = 0.05

    #: Standard errors of the drift that count as drift.
    errors: float = 2.0

    #: Allowance for heavy tails, a factor on the drift of standard deviations.
    max_allowance: float = 2.0

    #: Nested R-hat of converged chains; five effective draws of each chain.
    max_r_hat: float = 1.1

    #: Nested R-hat up to which named quantities may be steady.
    max_steady_r_hat: float = 2.0

    #: Nested R-hat of converged chains where trajectories fail, and of chains that end before an
    #: extended budget does: at 1.19 those of ``bayesian_lasso_200`` lacked a tail (2.1 floors).
    strict_r_hat: float = 1.05

    #: Effective draws after which converged chains stop.
    enough: int = 4000

    #: Gradients, as a share of the warm-up's, after which converged chains stop.
    least_share: float = 0.5

    #: Draws of each chain before the first check.
    first_check: int = 16

    #: Ratio of the numbers of draws of successive checks.
    between_checks: float = 1.2

    #: Draws of each chain before a budget may stop the run; with minibatches, steps after a warm-up
    #: that it ends.
    least_draws: int = 12

    #: Share of failed trajectories above which draws are doubtful.
    max_end_failed: float = 0.05

    #: Nested R-hat up to which draws may be used if a budget stopped the chains.
    max_usable_r_hat: float = 1.2

    #: Effective draws of the worst quantity, by R-hat, of chains that a budget may stop: those of
    #: 256 chains at 1.2. With 64 chains at 1.13, a tail of ``bayesian_lasso_200`` was missing (2.0
    #: floors), though means and sds seemed right.
    least_usable: float = 580.0

    #: The same for errors of means in sds and of sds as a share, at which chains need no patience.
    max_usable_error: float = 0.08

    #: Nested R-hat at the end of the first budget above which chains of discrete latent variables
    #: count as separate, and end; Gelman and Rubin's between-chain variance is then 1.7
    #: times the one within.
    apart_r_hat: float = 1.65

    #: The same for continuous latent variables, which are annealed: the distance between chains is
    #: then three times the width of one. Slow chains, as in a funnel, have less.
    stuck_r_hat: float = 3.0

    #: Nested R-hat of chains that have moved by less than a tenth of a standard deviation: ``fit``
    #: drops them if ``max_seconds`` ended them. If the budget is too short, their conditional space
    #: is made again from the draws: R-hat is 17 to 420 in a space that was made far from the
    #: posterior (``volatility_2500``).
    unmoved_r_hat: float = 10.0

    #: Gradients of each chain from which ``stuck_r_hat`` ends it; most chains converge before.
    stuck_gradients: int = 8192

    #: Ratio of the gradients needed to the gradients left, above which the chains begin again with
    #: another number or space: this costs a second warm-up. At 1, ``disease_map`` took 15 or 50 s.
    too_long: float = 2.0

    #: Remaining seconds, as a share of the spent ones, below which chains end.
    least_left: float = 0.25

    #: Standard error of a mode's weight above which ``diagnose`` does not count it as known.
    max_weight_error: float = 0.02


@dataclass(frozen=True)
class SpacePolicy:
    """Which space chains walk in, and how the conditional space is made.

    Checked by ``benchmarks/refine_models.py`` and the hard geometries of posteriordb.
    """

    #: Transitions of a trial walk; the first third does not count.
    probe: int = 24

    #: Leapfrog steps of a transition in a trial walk.
    probe_leapfrogs: int = 16

    #: Draws of a guide whose Pareto k-hat decides whether chains run in the guide's noise.
    khat_draws: int = 4096

    #: Latent variables up to which it is looked at: with more, small errors everywhere add up.
    max_khat_dim: int = 10

    #: Gradients of a transition up to which a guide's noise needs no comparison.
    easy: float = 8.0

    #: Ratio of speeds above which the latents replace a guide's noise.
    faster: float = 1.2

    #: Sds of the chains by which they may leave the middle of the conditional space in a window of
    #: the warm-up; further away it is made again. ``volatility_1000`` in ``benchmarks/large``. Also
    #: the sds by which other latents are moved to see whether the noise is round there.
    max_moved: float = 3.0

    #: Draws to which the law of the information is fitted in a window of the warm-up.
    law_draws: int = 256

    #: Iterations of this fit (L-BFGS), at most.
    law_iterations: int = 40

    #: Gain in nats for each draw and element from which the fitted law replaces the present one.
    #: A standard deviation of the noise that is off by a factor of 1.4 everywhere costs 0.05. The
    #: iterations end at one that gains less than this for each draw, over all elements.
    least_gain: float = 0.01

    #: Share of replaced starts above which a space is left.
    max_replaced: float = 0.1

    #: Noise draws at which a generator is checked for folds.
    fold_draws: int = 64

    #: Draws of the guide whose median is the middle of the posterior.
    middle_draws: int = 128

    #: Sites that are analysed one after the other.
    max_sites: int = 12

    #: Columns of a Hessian that are computed; more are probed by random signs.
    max_columns: int = 1200

    #: Random signs of Hutchinson's estimate.
    num_probes: int = 64

    #: Elements of a site at which the law of its information is fitted.
    max_watched: int = 16

    #: Latents of a scaled block that share one matrix.
    max_dense: int = 128

    #: Elements of a latent with one scale, which has n**2 numbers of eigenvectors.
    max_series: int = 4096

    #: Columns of a Hessian that are computed at once; a limit of memory.
    columns_at_once: int = 512

    #: Newton iterations to the mode of a block given the other latents.
    newton_steps: int = 5

    #: Root mean square of such a step, in posterior sds, below which the iterations end.
    newton_error: float = 0.1

    #: Points at which the law of the information is fitted.
    num_points: int = 24

    #: Sd of these points, in unconstrained coordinates.
    point_spread: float = 0.3

    #: Fits of the law, each with the factors of the last.
    law_rounds: int = 4

    #: Share of the variance that the law must explain.
    explained: float = 0.8

    #: Sd of log information below which it counts as constant.
    constant: float = 0.1

    #: Powers below this are dropped from a law.
    least_power: float = 0.1

    #: Power above which a latent counts as a factor; less belongs to noise scales.
    factor_power: float = 1.5

    #: Difference up to which powers of one latent in several sites count as equal.
    equal_powers: float = 0.25

    #: Information, in units of the prior's, below which a site is left out.
    least_told: float = 0.01

    #: Sum of squared correlations of an element with all others, given the rest, above which
    #: a map of all elements is tried; 0.02 is one other element with a correlation of 0.14.
    coupled: float = 0.02

    #: Ratio of roughness below which coupled elements leave their elementwise map.
    rounder: float = 0.5

    #: Mean squared error of the score of a standard normal that is round enough.
    max_rest: float = 0.3

    #: Step of central differences, in unconstrained coordinates.
    difference: float = 0.01


@dataclass(frozen=True)
class TemperingPolicy:
    """Annealed sequential Monte Carlo. Checked by ``benchmarks/tempering.py``."""

    #: Particles of a cloud; two for each chain, at most, as there are few chains if gradients are
    #: expensive.
    num_particles: int = 2048

    #: Draws of the guide from which the search for modes starts, besides those of the prior.
    num_starts: int = 32

    #: Latent variables up to which chains that stay apart are annealed. With more, particles from
    #: the modes near the chains may miss most of the mass: 40 pairs of modes have 2^40 in all.
    max_apart_dim: int = 10

    #: Nats by which the log-density of a chain may exceed that of all annealed draws.
    max_higher: float = 3.0

    #: Chains that start at the particles: a mode's weight is rounded to 1 / 1024.
    num_chains: int = 1024

    #: Conditional effective sample size of a step, as a share of the particles; Zhou et al. (2016).
    share: float = 0.9

    #: Effective sample size, as a share of the particles, below which they are resampled.
    resampling: float = 0.5

    #: Transitions at each power.
    moves: int = 2

    #: Leapfrog steps of a transition.
    max_leapfrogs: int = 8

    #: First step size in one dimension; it falls with the fourth root of the dimension.
    first_step: float = 0.8

    #: Factor less 1, times the root of the dimension, by which the sds of the first cloud's normals
    #: are widened, so that they reach into the tails of modes that are not normal.
    widening: float = 0.7

    #: The same for later clouds, whose normals are estimated from draws.
    second_widening: float = 0.15

    #: Share of particles that start from a normal of the prior's size.
    prior_share: float = 0.1

    #: The same of later clouds.
    second_prior_share: float = 0.05

    #: Effective draws for each dimension that count as much as the present moments of a normal.
    known_per_dim: float = 4.0

    #: Factor on the sds of the normals that give the labels of particles: wide labels change slowly
    #: along a trajectory, so that it may cross from one mode to another.
    label_width: float = 2.0

    #: Transitions at the posterior before each mode is described by several normals: a first block
    #: and a second one as long, after which the length doubles up to a limit while the sd of any
    #: variable around the modes still grows by this factor. Particles take long to reach tails.
    settling: int = 8
    most_settling: int = 64
    still: float = 1.05

    #: Normals of a mode, at most.
    most_normals: int = 8

    #: Draws for each dimension of a normal, at least.
    draws_per_normal: int = 20

    #: Points of a mode whose distances from other modes are compared; a limit of memory.
    num_compared: int = 256

    #: Points of a mode, at least; one with fewer joins the nearest mode.
    least_compared: int = 4

    #: Lines between the nearest points of two modes, along which the log-density may dip.
    num_lines: int = 8

    #: Iterations of expectation maximisation.
    em_steps: int = 10

    #: Standard error of a weight at which no further cloud is needed; a third of .01.
    max_error: float = 0.0035

    #: The same for twice the errors of means in sds and of sds as a share, with discrete latent
    #: variables: 2,500 independent draws have it. With it, the distance from exact draws is 1.0
    #: times that of 10,000 independent draws (two changepoints).
    mixed_error: float = 0.04

    #: Transitions of the resampled particles, each of which is kept as a draw.
    num_draws: int = 8


@dataclass(frozen=True)
class LangevinPolicy(EpochPolicy):
    """Chains that see minibatches. Checked by ``benchmarks/refine_minibatches.py``."""

    #: Friction of SGHMC, critical for directions twice as wide as the frame says.
    friction: float = 1.0

    #: Share by which gradient noise may widen variances.
    max_heat: float = 0.5

    #: Ratio of the step sizes of successive windows.
    max_growth: float = 2.0

    #: Temperature of velocities above which a step counts as too long.
    max_temperature: float = 3.0

    #: Iterations of the power method for the largest curvature.
    power_iterations: int = 6

    #: Distance of two points whose gradients give a curvature, in the frame.
    curvature_distance: float = 0.1

    #: Share of the budget for the warm-up.
    warmup_share: float = 0.3

    #: Steps of the shortest run.
    least_in_all: int = 4


@dataclass(frozen=True)
class TeachPolicy:
    """How a guide learns from draws. Checked by ``benchmarks/refine_teach.py``."""

    #: Draws below which nothing is learnt.
    least_draws: int = 20

    #: Draws that a guide learns from, at most; the validation set has at most its part of these.
    max_learnt: int = 4096

    #: One draw in this many is held out.
    held_out_part: int = 5

    #: Steps between two evaluations on the validation set.
    every: int = 25

    #: Evaluations without a gain after which the training ends.
    patience: int = 6

    #: Norm to which gradients are clipped.
    clip_norm: float = 10.0


@dataclass(frozen=True)
class InversionPolicy:
    """The density of guides at draws that they did not make. Checked as :class:`TeachPolicy`."""

    #: Relative error of a value at which Newton's method has found its noise.
    near: float = 1e-4

    #: Steps of Newton's method without a start.
    newton_steps: int = 30

    #: Responsibility below which a component does not learn from a draw.
    least_share: float = 1e-3


@dataclass(frozen=True)
class ChainPolicy:
    """All settings of :func:`~pyro_implicit.mcmc.refine` that are not its arguments."""

    #: Chains with all data, by default.
    num_chains: int = 256

    #: Chains with all data, at least: they learn by comparison.
    least_chains: int = 8

    #: Chains that see minibatches, by default.
    num_minibatch_chains: int = 8

    #: Number of chains below which it is not reduced further. With 64, R-hat 1.05 and the least
    #: number of effective draws require equally long chains. With fewer, each chain must be longer,
    #: but a gradient costs little less (``student_walk_400``: 120 s with 32 chains, 68 s with 64).
    least_long_chains: int = 64

    #: Cost of a gradient of half of the chains over the cost with all, above which the number
    #: is not halved.
    max_halved_cost: float = 0.7

    #: Leapfrog steps of their longest trajectory, half of NUTS's 1,023.
    long_leapfrogs: int = 512

    #: Kept draws of each chain, at least: fewer have no halves to compare.
    least_kept: int = 4

    #: Parts of the policy, by their subject.
    frame: FramePolicy = field(default_factory=FramePolicy)
    hmc: HMCPolicy = field(default_factory=HMCPolicy)
    mclmc: MCLMCPolicy = field(default_factory=MCLMCPolicy)
    slice: SlicePolicy = field(default_factory=SlicePolicy)
    warmup: WarmupPolicy = field(default_factory=WarmupPolicy)
    window: WindowPolicy = field(default_factory=WindowPolicy)
    shift: ShiftPolicy = field(default_factory=ShiftPolicy)
    stopping: StoppingPolicy = field(default_factory=StoppingPolicy)
    space: SpacePolicy = field(default_factory=SpacePolicy)
    tempering: TemperingPolicy = field(default_factory=TemperingPolicy)
    langevin: LangevinPolicy = field(default_factory=LangevinPolicy)


DEFAULT = ChainPolicy()
TEACHING = TeachPolicy()
INVERSION = InversionPolicy()
