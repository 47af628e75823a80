# SPDX-License-Identifier: Apache-2.0
"""Settings of :func:`~pyro_implicit.fitting.fit`: budgets, limits and thresholds.

Each field gives unit, role and source. "Budget" means: a limit of seconds on one core, estimated
from operation counts. "posteriordb" and "zoo" mean ``benchmarks/posteriordb`` and
``benchmarks/hard_geometries.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from pyro_implicit.density.policy import MAX_DENSE_DIM, MarginalPolicy
from pyro_implicit.diagnostics.policy import Thresholds
from pyro_implicit.mcmc.policy import ChainPolicy, TeachPolicy
from pyro_implicit.ops import LogWeights
from pyro_implicit.ops.policy import (
    EVEN_EFFICIENCY,
    FINITE_VARIANCE_KHAT,
    MAX_PRODUCT_DIM,
    RELIABLE_KHAT,
)
from pyro_implicit.ops.quadrature import NormalRule
from pyro_implicit.runtime.policy import EpochPolicy

__all__ = [
    "DEFAULT",
    "DENORMAL_MARGIN",
    "DRAWS_AT_ONCE",
    "BudgetPolicy",
    "ChoicePolicy",
    "CorrectionPolicy",
    "FitPolicy",
    "HeldOutPolicy",
    "HierarchyPolicy",
    "MinibatchPolicy",
    "MixturePolicy",
    "NetworkPolicy",
    "Schedule",
    "SimulatorPolicy",
    "StartPolicy",
    "TrainingPolicy",
    "UpdatePolicy",
]

#: Draws of a guide whose importance weights are computed together; bounds memory.
DRAWS_AT_ONCE = 2000

#: Multiple of the least normal number below which trainings round parameters to zero: a margin for
#: the steps until they are rounded again.
DENORMAL_MARGIN = 1e8


@dataclass(frozen=True)
class Schedule:
    """When a training slows down and when it ends.

    **Example:**

    >>> schedule = Schedule(num_steps=100, lr=0.1)
    >>> [round(schedule.rate(step, decay_start=50), 3) for step in (0, 50, 75, 100)]
    [0.1, 0.1, 0.05, 0.0]

    :param num_steps: the maximal number of steps.
    :param lr: Adam's learning rate. When the smoothed loss stops falling, the rate falls to zero
        along a cosine, in ``decay * num_steps`` steps.
    :param decay: the share of steps in which the rate falls; with 1 it falls from the first step.
    :param plateau: if False, the rate starts to fall ``decay * num_steps`` steps before the end.
    :param window: the number of steps whose mean is one smoothed loss. The loss has stopped falling
        if the last two means are not below the lowest earlier mean by more than their standard
        error.
    :param max_gap: nats between an exact guide and the posterior below which training stops: half
        the variance of the log-weights, from the spread of ``gap_window`` losses.
    :param clip_norm: the maximal norm of gradients; of minibatches, as a multiple of the running
        mean of norms, if this is above 1.
    :param norm_memory: the weight of the past in this mean.
    :param gap_window: the number of losses whose spread gives the gap.
    :param first_look: the number of steps after which a training that may end early is judged, and
        again after twice, four times, ... as many; the second look comes before steps are recorded.
    """

    num_steps: int = 3000
    lr: float = 0.01
    decay: float = 0.5
    plateau: bool = True
    window: int = 100
    max_gap: float = 0.0005
    clip_norm: float = TeachPolicy.clip_norm
    norm_memory: float = 0.99
    gap_window: int = 25
    first_look: int = 20

    def is_look(self, num_steps: int) -> bool:
        """Return whether a training that may end early is judged after a number of steps."""
        ratio, rest = divmod(num_steps, self.first_look)
        return rest == 0 and ratio & (ratio - 1) == 0

    def rate(self, step: int, decay_start: int) -> float:
        """Return the learning rate of a step if the decay starts at ``decay_start``."""
        return self._fall((step - decay_start) / max(1, round(self.num_steps * self.decay)))

    def rate_by_clock(self, share: float) -> float:
        """Return the highest learning rate after a share of the time limit."""
        return self._fall(2 * share - 1)

    def _fall(self, progress: float) -> float:
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))

    def stands_still(self, losses: list[float]) -> bool:
        """Return whether the smoothed loss no longer falls; False before the end of a window."""
        if not self.plateau or len(losses) % self.window or len(losses) < 4 * self.window:
            return False
        windows = torch.tensor(losses, dtype=torch.float64).reshape(-1, self.window)
        means = windows.nanmean(-1)
        latest = windows[-2:].flatten()
        error = latest[latest.isfinite()].std() / math.sqrt(2 * self.window)
        return bool(means[-2:].mean() > means[:-2].min() - error)

    def is_exact(self, losses: list[float], num_particles: int) -> bool:
        """Return whether the loss of an exact guide shows that it agrees with the posterior."""
        if len(losses) % self.gap_window or not losses:
            return False
        spread = torch.tensor(losses[-self.gap_window :], dtype=torch.float64).var()
        return bool(0.5 * num_particles * spread < self.max_gap)


@dataclass(frozen=True)
class BudgetPolicy:
    """What a model can afford."""

    #: Seconds: budget of the mode search.
    search_seconds: float = 20.0

    #: Share of the remaining ``max_seconds`` that the importance weights of a guide may take.
    weighing_share: float = 0.2

    #: Share of the remaining ``max_seconds`` that a training may take if other stages follow.
    training_share: float = 0.5

    #: Seconds: budget of a training before chains; chains are the cheaper way to the posterior.
    training_seconds: float = 10.0

    #: Steps below which a training does not improve its guide.
    least_steps: int = 200

    #: Steps for which ``max_seconds`` must leave time; otherwise the training is skipped.
    fewest_steps: int = 20

    #: Seconds: budget of the chains.
    chain_seconds: float = 40.0

    #: Chains, at least; below 32, moments of the ensemble are too noisy for adaptation.
    least_chains: int = 32

    #: Chains to which their number is halved for cheaper gradients: a warm-up costs as many
    #: gradients of each chain whatever their number.
    usual_chains: int = 64

    #: Chains, at most, as in :func:`~pyro_implicit.mcmc.refine`.
    most_chains: int = ChainPolicy.num_chains

    #: Gradients per chain, at least, whatever they cost.
    least_gradients: int = 800

    #: Gradients per chain, at most, as in :func:`~pyro_implicit.mcmc.refine`.
    most_gradients: int = 4000

    #: Gradients per chain that most posteriordb models need; with fewer, chains are halved again.
    usual_gradients: int = 1200

    #: Modes of the search up to which they are weighed; five exchangeable parts have 120. More are
    #: those of many independent choices, of which a search sees few: 12 pairs of modes have 4,096.
    most_modes: int = 128

    #: Factor on the budget for chains that have not converged; most stop long before.
    patience: int = 2

    #: Seconds of one core, measured, up to which chains continue if R-hat or errors are too large;
    #: about what NUTS takes for hard models of hundreds of latent variables.
    patient_seconds: float = 120.0


@dataclass(frozen=True)
class TrainingPolicy(EpochPolicy):
    """Particles, epochs, initial scales and reports of trainings."""

    #: Particles if each costs a run of a model that cannot be vectorised, a minibatch or a wide
    #: guide.
    few_particles: int = 8

    #: Particles if each is a forward pass of a network (more than 100 latent variables).
    network_particles: int = 2

    #: Initial standard deviation of a guide of many latent variables, for all data.
    init_scale: float = 0.01

    #: Effective sample size of a Gaussian's importance weights, as a share, from which a guide that
    #: begins there needs tens of steps; with less it needs hundreds.
    near_efficiency: float = 0.1

    #: Steps of a mean-field guide from which chains start.
    mean_field_steps: int = 1000

    #: Factor on ``lr`` in that training: without a frame, latents move many units.
    mean_field_lr_factor: float = 5.0

    #: Share of the steps in which the learning rate falls while the model's parameters train: they
    #: may be far from their optimum, but the guide is near.
    parameters_decay: float = 1 / 6

    #: Share of skipped steps (non-finite loss) above which a warning is issued.
    max_skipped: float = 0.01

    #: Steps in a row without a finite loss after which training raises ``RuntimeError``.
    max_nonfinite: int = 50

    #: Nats, and standard deviations of one step's loss: smallest fall of a loss that is reported as
    #: "not settled", and the number of its standard errors that it must exceed as well.
    least_fall: float = 0.1
    fall_errors: float = 3.0


@dataclass(frozen=True)
class NetworkPolicy:
    """Ensembles and chains of networks. Checked by ``benchmarks/networks/tabular.py``."""

    #: Weights of a network, at most, for which a mode search runs instead of an ensemble; with 0,
    #: each network is trained as an ensemble.
    most_searched_weights: int = MAX_DENSE_DIM

    #: Members of the ensemble, and chains. None for ``least_members``, and with all data for more
    #: of them, up to ``most_members``, if they are cheap.
    num_members: int | None = None

    #: The same without a number, at least.
    least_members: int = 10

    #: The same without a number, at most. On four classes (184 weights, 100 rows, 18 CPU seconds)
    #: the distance to NUTS is .035 with 10 members, .023 with 40 and .021 with 100; the floor of
    #: NUTS is .021.
    most_members: int = 100

    #: Ratio of measured to counted seconds: gradients are recorded, and counts assume a slow core.
    #: On airfoil a gradient of ten members takes 2 to 3 ms and is counted as 24 ms; a step of the
    #: ensemble takes 4 to 6 ms and is counted as 47 ms.
    cost_ratio: float = 0.125

    #: Seconds: budget of the ensemble's training.
    training_seconds: float = 60.0

    #: Share of ``max_seconds`` that this training may take.
    training_share: float = 0.3

    #: Seconds: budget of the chains without ``max_seconds``; with it, they may take the time left.
    chain_seconds: float = 120.0

    #: Mean squared energy error of a step of the chains, for each dimension; Sommer et al. (2025).
    #: It is far above that of ``refine``: long steps leave narrow modes, and predict better. After
    #: 25,000 gradients of five chains on airfoil, split 1, the RMSE is .131 with 0.5, .129 with
    #: 0.1 and .140 with 0.01.
    energy_error: float = 0.1

    #: Seconds of a run of chains in prospect from which ``compile="auto"`` compiles their gradient,
    #: if there is a C++ compiler. A gradient then takes 1/2 to 1/3 of its time. Compilation takes 1
    #: to 4 s with a warm cache, and with an empty one 7 s and 15 to 23 CPU seconds of compilers.
    compiled_seconds: float = 30.0

    #: Gradients of each chain below which ``fit`` stays with the ensemble.
    least_gradients: int = 1000

    #: Gradients of each chain, at most, without ``max_seconds``; Sommer et al. (2025) take 120,000.
    most_gradients: int = 60_000

    #: Rows above which the ensemble trains by minibatches. On kin8nm (7,372 rows) 3,000 steps take
    #: a fifth of the time of 3,000 steps with all rows.
    most_rows: int = 2048

    #: Rows of these minibatches.
    batch_rows: int = 256

    #: Factor on ``lr`` with minibatches. On split 1 of kin8nm the log-likelihood of ten members is
    #: 1.206 with 3 and 1.175 with 1.
    minibatch_lr_factor: float = 3.0

    #: Steps of the ensemble's training between two scores of the held-out rows.
    score_interval: int = 50

    #: Share of all scores in a row without a better one after which the training ends.
    patience_share: float = 0.25

    #: Share of the rows that ensemble and first chains do not see, and by which they are compared.
    held_out_share: float = 0.1

    #: Held-out rows, at least; with fewer in prospect none are held out, because the standard error
    #: of a score is too large to compare stages.
    least_held_out: int = 20

    #: Share of the gradients that chains without the held-out rows take, before chains with all
    #: rows continue from their ends.
    trial_share: float = 0.25

    #: Posterior draws that score the held-out rows.
    num_scored: int = 500

    #: Consecutive draws of a chain from which one generator is made.
    window_draws: int = 4

    #: Ratio of a generator's standard deviations to those of its window: a normal distribution of
    #: the whole width leaves the curved path of the chain. On airfoil (split 1) 4 draws lose 0.026
    #: nats of each new row with 1.0 and nothing with 0.7, and 8 draws 0.040 and 0.005.
    generator_width: float = 0.7

    #: Standard errors by which the held-out score must fall for chains to be rejected. Falls of two
    #: or three are no evidence, because the ensemble's training stopped where it predicts these
    #: rows best. On splits 5 to 9 of Boston, Concrete and Energy (60 s) the fall was 2.3 and 2.9
    #: errors on two splits of Concrete, where the chains predict new rows better, by .10 and .64.
    num_errors: float = 4.0

    #: Nats per row: smaller falls of that score are no reason to reject chains. If all rows have
    #: one target, rounding errors are significant, because standard errors vanish.
    least_fall: float = 0.01

    @property
    def fewest_members(self) -> int:
        """The members of an ensemble whose cost is not considered."""
        return self.least_members if self.num_members is None else self.num_members


@dataclass(frozen=True)
class StartPolicy:
    """Initial values for many latent variables."""

    #: Distance from the prior's medians, as a share of the way to a draw of the prior: equal
    #: weights of a network stay equal, and weights of the prior's size are too large.
    spread: float = 0.3

    #: Shares of the way from the origin that are tried as start, the first acceptable one is taken.
    shares: tuple[float, ...] = (1.0, 0.5, 0.2, 0.05, 0.0)

    #: Nats per latent variable below the best start at which a start is rejected, and below the
    #: start at which draws around it and the first step from it are.
    max_fall: float = 10.0

    #: Factors on ``INIT_SCALE`` and on the learning rate, the first acceptable one is taken.
    factors: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)

    #: Draws by which the scale is judged.
    num_samples: int = 8

    #: Mean fields that are trained together from different starts; with ideal points, one to five
    #: of eight ended in the right mode. Their steps, at most; and the share of these steps below
    #: which none are trained.
    num_raced: int = 16
    race_steps: int = 200
    least_race_share: float = 0.25

    #: Seconds that this may take, and share of the remaining ``max_seconds``.
    race_seconds: float = 4.0
    race_share: float = 0.1


@dataclass(frozen=True)
class ChoicePolicy:
    """The choice between candidates. Checked by posteriordb and the zoo."""

    #: Draws that give a candidate's bound.
    num_weighed: int = 1000

    #: The same if ``max_seconds`` is short, at least.
    least_weighed: int = 50

    #: Least share of a Gaussian's draws with a density, for chains to start there: data may bound a
    #: latent variable.
    least_possible: float = 0.05

    #: Share of the lowest log-weights that a bound leaves out: draws of a guide that is too wide.
    trimmed: float = 0.01

    #: Draws that a candidate keeps, as many as a corrected result stores.
    num_kept: int = 10_000

    #: Nats by which bounds must differ, in addition to two standard errors.
    tie: float = 0.001

    #: Nats from guide to posterior below which a guide needs neither another candidate nor chains.
    near: float = 0.01

    #: Share of the posterior mass of a mode that a candidate must not leave out.
    least_mass: float = 0.01


@dataclass(frozen=True)
class CorrectionPolicy:
    """Importance weights of a guide with an exact density."""

    #: Draws of the first judgement.
    num_weighed: int = 2000

    #: Draws of the second judgement, at most: it sees modes with a thousandth of the guide's draws.
    num_weighed_again: int = 8000

    #: Seconds: budget of the second judgement.
    seconds: float = 3.0

    #: Pareto k-hat below which weights are used; Vehtari et al. (2024), Pareto smoothed importance
    #: sampling, section 3: the variance of the weights is finite. Above an effective sample size of
    #: ``near`` it is ``RELIABLE_KHAT``: the tail has little mass.
    max_khat: float = FINITE_VARIANCE_KHAT

    #: Effective sample size, as a share of the draws, above which weights are used: twice the draws
    #: then have the errors of exact ones.
    least_efficiency: float = 0.5

    #: The same above which a guide near the posterior needs no chains, and its training may end.
    near: float = 0.9

    #: Ratio of second to first effective sample size below which the second one counts; it changes
    #: little for reliable weights.
    agrees: float = 0.75

    #: Rounds of adaptive importance sampling (:class:`AdaptiveSampler`) before a training, at most.
    num_rounds: int = 0

    #: Draws of each round, and seconds after which no other round begins.
    num_adapted: int = 1000
    adaptive_seconds: float = 60.0

    #: Normal distributions of a proposal, at most.
    max_components: int = 8

    #: Effective draws for each of them and each dimension, at least.
    matched_per_dim: float = 4.0

    #: Effective draws of the guide for each resampled draw.
    oversampling: int = 2

    #: Draws of the guide, at least, for any number of resampled ones.
    least_proposals: int = 1000

    #: Shares of the resampled draws whose noise is wider, and factors of its scale. A guide that is
    #: too narrow in a tail gives it no draws, so that k-hat cannot see it (Hesterberg, 1995,
    #: Weighted average importance sampling and defensive mixture distributions).
    wide_shares: tuple[float, ...] = (0.15, 0.05)
    wide_scales: tuple[float, ...] = (2.0, 4.0)

    @property
    def usual_share(self) -> float:
        """The share of draws with the guide's own noise."""
        return 1 - sum(self.wide_shares)

    @property
    def widths(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The shares of all draws, and the scales of their noise."""
        return (self.usual_share, *self.wide_shares), (1.0, *self.wide_scales)

    def confirms(self, weights: LogWeights, efficiency: float) -> bool:
        """Return whether more weights confirm the accepted ones.

        Their k-hat may be larger, as it varies between samples, but must be reliable; a region that
        the first draws missed lowers the effective sample size.

        :param weights: log-weights of draws of the guide with wider noise.
        :param efficiency: effective sample size of the accepted weights, as a share.
        """
        agrees = weights.efficiency >= self.agrees * self.usual_share * efficiency
        return self.accepts(weights) or (agrees and weights.khat < RELIABLE_KHAT)

    def accepts(self, weights: LogWeights) -> bool:
        """Return whether draws can be resampled by these weights.

        Between the two effective sample sizes, the limit of k-hat rises in proportion.

        :param weights: log-weights of the guide's draws.
        """
        if self.are_even(weights) or weights.efficiency <= self.least_efficiency:
            return self.are_even(weights)
        share = (weights.efficiency - self.least_efficiency) / (self.near - self.least_efficiency)
        rise = RELIABLE_KHAT - self.max_khat
        return weights.khat < self.max_khat + min(1.0, share) * rise

    def are_even(self, weights: LogWeights) -> bool:
        """Return whether the weights are so even that training may end: the tail has little mass.

        :param weights: log-weights of the guide's draws.
        """
        return weights.efficiency > EVEN_EFFICIENCY or (
            weights.efficiency > self.near and weights.khat < RELIABLE_KHAT
        )


@dataclass(frozen=True)
class MixturePolicy:
    """Weights of a mixture (:func:`~pyro_implicit.fitting.mixture_weights`)."""

    #: Draws of each component, at least.
    least_draws: int = 100

    #: Draws of each component, at most; the standard error of a weight is 3 %.
    most_draws: int = 1000

    #: Draws of all components; every component's density is evaluated at each.
    all_draws: int = 8000

    #: Nats from the maximum of the ELBO at which the iteration ends.
    tolerance: float = 1e-4

    #: Iterations, at most; overlapping components need many.
    max_iterations: int = 1000

    def draws_of_each(self, number: int) -> int:
        """Return the number of draws of each of ``number`` components."""
        return max(self.least_draws, min(self.most_draws, self.all_draws // number))


@dataclass(frozen=True)
class UpdatePolicy:
    """Posteriors as priors (:func:`~pyro_implicit.fitting.posterior_as_prior`)."""

    #: Draws of the earlier posterior, at most.
    num_samples: int = 20_000

    #: Numbers of normal distributions, tried after one until more are not better. After five rows
    #: of data, 16 change the weight of a mode by up to 0.03 at the next update, 32 by 0.001.
    components: tuple[int, ...] = (2, 4, 8, 16, 32)

    #: Draws of the new posterior that are compared with those of the earlier one.
    num_checked: int = 5000

    #: Times that the prior may move to new draws that lie beyond the earlier ones. Data whose mean
    #: has moved by five standard deviations needed two.
    num_moves: int = 4

    #: Points at which the log-density is matched.
    num_matched: int = 8000

    #: Iterations of the least-squares fit.
    match_steps: int = 100

    #: Var[log p - log q] (squared nats) of a fit after which no more normals are tried: it moves a
    #: mean by at most 0.01 standard deviations.
    matched: float = 1e-4


@dataclass(frozen=True)
class PassPolicy:
    """Fits whose log-density costs one pass over the minibatches per evaluation."""

    #: Paths, rounds and iterations of the first search, on a part of the data.
    num_starts: int = 8
    search_rounds: int = 2
    search_iterations: int = 40

    #: Share of the rows or groups that minibatches may lack without a warning (``drop_last``). The
    #: others count for them, so that standard deviations are too small by half of this share.
    max_missing: float = 0.02

    #: Passes to climb to a mode, at most; from the mode of the first search it takes 3.
    max_passes: int = 30

    #: Squared Newton decrement (nats) at the end of the climb: 0.01 standard deviations.
    at_top: float = 1e-4

    #: Nats by which a step may lower the log-density: rounding of sums in float32.
    rounding: float = 0.01

    #: Densities of single rows or groups, one for each draw of the latent variables and each node
    #: of a quadrature, at most. Each takes 0.2 to 0.4 microseconds.
    most_evaluations: float = 1e9

    #: Draws whose weights are computed first; a power of two.
    num_weighed: int = 32

    #: First weights for each latent variable, at least: they estimate a covariance.
    weighed_per_dim: int = 8

    #: Ratio of the scales of the two Gaussians at a mode from which many draws come.
    widening: float = 2.0

    #: Pareto k-hat and effective number of draws with which weights are used: k-hat as in
    #: Vehtari et al. (2024), section 3; errors of 0.03 standard deviations.
    max_khat: float = RELIABLE_KHAT
    least_effective: float = 1000.0

    #: Effective sample size of the first weights, as a share, above which they correct only mean
    #: and covariance: for a skewness of 0.2 it is 0.993.
    near_normal: float = EVEN_EFFICIENCY

    #: Effective number of the first weights below which chains are cheaper than more weights; 0
    #: for never.
    least_promising: float = 0.0

    #: Evaluations of all ``num_samples``, about three seconds, up to which they are computed
    #: although fewer would do. With 100 groups of counts, the standard deviations by 32 even
    #: weights were 4 to 6% too small.
    cheap_evaluations: float = 1.5e7

    #: Most groups or rows for which chains run after uneven weights.
    most_chained: int = 10_000

    #: Stored draws, and at most as many weights if the first ones are uneven; a power of two,
    #: because they are Sobol points.
    num_samples: int = 8192

    def accepts(self, weights: LogWeights) -> bool:
        """Return whether draws can be resampled by these weights.

        :param weights: log-weights of the draws.
        """
        number = weights.efficiency * len(weights)
        is_even = weights.efficiency > self.near_normal
        return is_even or (weights.khat < self.max_khat and number > self.least_effective)


@dataclass(frozen=True)
class RowsPolicy(PassPolicy):
    """Fits of all rows, with at most 100 latent variables."""

    #: Paths of the first search: of two equal modes, one is missed in 1 of 8 million cases.
    num_starts: int = 24

    #: Rows of the first search, at least, and for each latent variable.
    num_pilot: int = 2000
    pilot_per_dim: int = 50


@dataclass(frozen=True)
class MinibatchPolicy(RowsPolicy):
    """Fits of all rows that come in minibatches, with at most 100 latent variables."""

    #: Bytes of minibatches, at most, that are read once and stay in memory.
    most_bytes: int = 2**30

    #: Passes, at least, for which there must be time; else a guide is trained by minibatches.
    least_passes: int = 10

    #: Most rows for which chains run after uneven weights.
    most_chained: int = 100_000


@dataclass(frozen=True)
class ManyRowsPolicy(RowsPolicy):
    """Fits of all data that have many rows, with at most 100 latent variables."""

    #: Rows from which the search begins with a part of them.
    least_rows: int = 1000

    #: Rows of the data for each row of the search, at least, which limits ``num_pilot``: a search
    #: of more than a third of the rows would save little. ``find_pilot`` needs two.
    least_ratio: int = 3

    #: Ratio of standard deviations by some and by all rows, in any direction, beyond which a few
    #: rows hold the information. With 100 latent variables and 5,000 rows it varies by 20 %.
    max_ratio: float = 2.0

    #: Each of the first 32 weights may be worth as much as one independent draw, so three tell
    #: nothing. Weights of a wider mixture need 1,000 independent draws of 8,192.
    least_promising: float = 3.0


@dataclass(frozen=True)
class HierarchyPolicy(PassPolicy):
    """Fits with ``amortize="conditional"``: latent variables of groups are integrated out."""

    #: Groups of the first search, at least; they show the modes of all data.
    num_pilot: int = 500

    #: Nodes of the quadrature in each dimension that are tried in turn.
    num_nodes: tuple[int, ...] = (9, 15, 25, 41)

    #: Scales that are tried for the random nodes of four and more latent variables, at each number.
    #: Measured for four log-gamma densities of shape 2 to 9 and 2,000 groups: with scale 1.25 the
    #: error is a fifth of that with scale 1, for normal densities scale 1 is exact.
    scales: tuple[float, ...] = (1.0, 1.25)

    #: Seeds of the random nodes whose scores are compared.
    num_seeds: int = 3

    #: Shift of the posterior in standard deviations, by a change to other nodes, up to which nodes
    #: suffice. A tenth would be visible.
    max_shift: float = 0.02

    def rules(self, num_latents: int) -> Iterator[tuple[NormalRule, list[NormalRule]]]:
        """Yield rules from cheap to expensive, each with those to compare it with.

        A product rule is compared with the next number of nodes. An error of random nodes may be
        small by chance: these are compared with as many nodes of other seeds.

        :param num_latents: number of latent variables of each group.
        """
        if num_latents <= MAX_PRODUCT_DIM:
            for size, more in itertools.pairwise(self.num_nodes):
                yield NormalRule(size), [NormalRule(more)]
        else:
            for size, scale in itertools.product(self.num_nodes, self.scales):
                rules = [NormalRule(size, scale, seed) for seed in range(self.num_seeds)]
                yield rules[0], rules[1:]


@dataclass(frozen=True)
class IntegrationPolicy:
    """Fits of the variables that remain after others are integrated out."""

    #: Draws of all variables, at most; a power of two, because they are made from Sobol points.
    num_samples: int = PassPolicy.num_samples

    #: Numbers in these draws, at most (160 MB in single precision).
    num_stored: int = 40_000_000

    #: The same, at least, whatever they cost: means have errors of 0.03 standard deviations.
    least_draws: int = 1024

    #: Seconds: budget of these draws.
    draw_seconds: float = 15.0

    #: Seconds: budgets of the two judgements of importance weights and of each adaptive round, and
    #: their least draws.
    weigh_seconds: float = 10.0
    least_weighed: int = 200

    #: Seconds: budget of a Newton step of all paths, which determines their number; a typical path
    #: takes ten.
    step_seconds: float = 0.3

    #: Seconds of chains that are tried before pairs of discrete values are summed. Chains of twelve
    #: counts with a known share of sightings converge in 2.
    chain_seconds: float = 20.0

    #: ``CorrectionPolicy.num_rounds``: few variables remain, whose density may be expensive.
    num_rounds: int = 16

    #: Share of ``max_seconds`` that the fit of the remaining variables may take.
    time_share: float = 0.7

    def affordable_draws(self, latent_dim: int, seconds: float) -> int:
        """Return the number of draws of all variables.

        :param latent_dim: the number of all variables.
        :param seconds: the cost of an evaluation of the remaining variables' density at one point.
        """
        most = min(self.num_samples, self.num_stored / latent_dim, self.draw_seconds / seconds)
        return max(self.least_draws, 2 ** int(math.log2(most)))


@dataclass(frozen=True)
class SimulatorPolicy:
    """Networks and checks of :func:`~pyro_implicit.fitting.fit_simulator`."""

    #: Networks, whose densities are averaged.
    num_networks: int = 3

    #: Normal components of each conditional density.
    num_components: int = 10

    #: Units of each hidden layer, and hidden layers. On two moons (10,000 simulations) the mean
    #: test log-density is 1.83, 2.03 and 2.08 with 2, 3 and 4 layers, the exact one 2.33.
    width: int = 128
    depth: int = 3

    #: Units of each of two hidden layers of the classifier.
    classifier_width: int = 64

    #: Learning rate of Adam, at first.
    lr: float = 2e-3

    #: Steps of a training, at most.
    num_steps: int = 10_000

    #: Simulations of each step.
    batch_size: int = 256

    #: Held-out part of the simulations, steps between two scores of it, scores without a gain until
    #: the end, and the norm of clipped gradients.
    training: TeachPolicy = field(
        default_factory=lambda: TeachPolicy(held_out_part=10, every=100, patience=10)
    )

    #: Finite simulations, at least.
    least_simulations: int = 100

    #: With several rounds: posterior mass outside of the region in which the next round simulates,
    #: and draws from which its latents are resampled.
    tail: float = 1e-4
    num_candidates: int = 100_000

    #: Share of ``max_seconds`` for the simulations.
    simulation_share: float = 0.5

    #: Draws to which each true value is compared, and bins of the histograms of their ranks.
    num_samples: int = 99
    num_bins: int = 10

    #: Accuracies of a classifier between true values and draws, with two standard errors in their
    #: favour, from which the verdict is "check" and "do not trust"; 0.5 is chance.
    accuracy: Thresholds = Thresholds(0.55, 0.65)


@dataclass(frozen=True)
class HeldOutPolicy:
    """Scores of held-out rows."""

    #: Epochs without a better score after which training ends, at least.
    patience: int = 5

    #: The same as a share of all epochs of ``fit``: on small sets, five epochs are few steps.
    patience_share: float = 0.1

    #: Draws of the guide for each score.
    num_samples: int = 8


@dataclass(frozen=True)
class FitPolicy:
    """All settings of :func:`~pyro_implicit.fitting.fit` that are not its arguments.

    The defaults suit models of posteriordb on one to four cores. Replace single fields by
    ``dataclasses.replace``.

    **Example:**

    >>> patient = FitPolicy(budget=BudgetPolicy(chain_seconds=400.0))
    >>> patient.budget.chain_seconds, patient.correction.max_khat
    (400.0, 0.5)
    """

    #: What a model can afford.
    budget: BudgetPolicy = field(default_factory=BudgetPolicy)

    #: Steps and learning rates; ``num_steps`` and ``lr`` of ``fit`` replace its own.
    schedule: Schedule = field(default_factory=Schedule)

    #: Trainings of guides.
    training: TrainingPolicy = field(default_factory=TrainingPolicy)

    #: Networks of :mod:`pyro_implicit.nn`.
    network: NetworkPolicy = field(default_factory=NetworkPolicy)

    #: Initial values for many latent variables.
    start: StartPolicy = field(default_factory=StartPolicy)

    #: The choice between candidates.
    choice: ChoicePolicy = field(default_factory=ChoicePolicy)

    #: Importance weights.
    correction: CorrectionPolicy = field(default_factory=CorrectionPolicy)

    #: Weights of a mixture.
    mixture: MixturePolicy = field(default_factory=MixturePolicy)

    #: Posteriors as priors.
    update: UpdatePolicy = field(default_factory=UpdatePolicy)

    #: Hierarchical models with many groups.
    hierarchy: HierarchyPolicy = field(default_factory=HierarchyPolicy)
    #: Minibatches, with at most 100 latent variables.
    minibatch: MinibatchPolicy = field(default_factory=MinibatchPolicy)
    #: Many rows without minibatches.
    many_rows: ManyRowsPolicy = field(default_factory=ManyRowsPolicy)

    #: Which variables are integrated out.
    marginal: MarginalPolicy = field(default_factory=MarginalPolicy)

    #: The fit of the variables that remain.
    integration: IntegrationPolicy = field(default_factory=IntegrationPolicy)

    #: Scores of held-out rows.
    held_out: HeldOutPolicy = field(default_factory=HeldOutPolicy)


DEFAULT = FitPolicy()
