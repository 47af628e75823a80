# SPDX-License-Identifier: Apache-2.0
"""Settings of the diagnostics: limits of the verdicts, sizes of the checks, budgets.

Each field gives unit, role and source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pyro_implicit.mcmc.policy import DEFAULT as CHAINS
from pyro_implicit.ops.policy import FINITE_VARIANCE_KHAT, RELIABLE_KHAT

__all__ = [
    "CHECKS",
    "COMPARE",
    "DISTANCES",
    "EFFORT",
    "MOMENTS",
    "REFERENCE",
    "REPORT",
    "VERDICT",
    "ComparePolicy",
    "Thresholds",
    "VerdictPolicy",
]


class Thresholds(NamedTuple):
    """Limits above which a number is a reason to check, and a reason not to trust."""

    check: float
    distrust: float


@dataclass(frozen=True)
class MomentPolicy:
    """Whitening of draws, and tests of their means and standard deviations."""

    #: Probability that one check finds an error of a perfect guide. Three checks of a guide find
    #: one in about 1 % of all cases.
    false_alarm: float = 0.003

    #: Probability that :func:`~pyro_implicit.diagnostics.simulation_based_calibration` rejects a
    #: correct way of fitting, for all scalars together.
    calibration_alarm: float = 0.01

    #: Latent variables up to which covariances are used. With more, each has its own scale.
    max_full_dim: int = 300

    #: Draws for each latent variable, at least, if covariances are used: half of them give a
    #: covariance with a condition number of at most 34 (Marchenko and Pastur (1967)).
    draws_per_dim: int = 4

    #: Steps of Lanczos' method for the worst directions of more latent variables.
    krylov_steps: int = 30

    #: Draws whose quantiles give the middle and the spread of all draws; a limit of time.
    num_sorted: int = 2000

    #: Ratio of the standard deviation of all draws to that of the others from which the farthest
    #: draw is refused. Fewer than 1 in 100 sets of Cauchy draws have one.
    far: float = 1e4

    #: Units in the last place up to which a spread counts as rounding.
    rounding: float = 10.0

    #: The same if moments are computed in double precision.
    wide_rounding: float = 3.0

    #: The same of means of test statistics, whose terms may cancel.
    mean_rounding: float = 100.0

    #: Draws of each chain, at least, for R-hat and effective sample size of quantities.
    least_chain_draws: int = 8

    #: Coordinates of each kind of error that are named.
    max_faults: int = 10

    #: Share of a direction's squared length at which further coordinates are dropped.
    enough_terms: float = 0.8

    #: Error of a coordinate, as a share of the worst direction's, from which the coordinate is
    #: named instead.
    as_bad: float = 0.9


@dataclass(frozen=True)
class CheckPolicy:
    """Kernel Stein test, short HMC, coverage of modes, the objective."""

    #: Draws of the kernel test, and of both sides in which the mass that a reference lacks is
    #: sought; time and memory grow with their square.
    pairwise_draws: int = 1000

    #: Draws of the kernel test of a single site.
    site_draws: int = 500

    #: Sites that are tested by themselves.
    max_sites: int = 30

    #: P-value below which the kernel test of a site is repeated with more random signs.
    suspect: float = 0.02

    #: Leapfrog steps of a transition of short HMC.
    num_leapfrog: int = 8

    #: Halvings of its step size, at most.
    max_halvings: int = 8

    #: Ratio of the largest to the smallest step size, so that chains enter narrow necks.
    spread: float = 30.0

    #: Acceptance probability below which chains stand still and show nothing.
    least_acceptance: float = 0.1

    #: Mass of a mode by Laplace's approximation, as a share, below which the mode is ignored.
    least_mass: float = 0.02

    #: Share of its draws by mass below which a mode counts as uncovered.
    least_share: float = 0.1

    #: Curvature, in units of the guide's, below which it may be rounding.
    least_curvature: float = 1e-3

    #: Share of draws with non-finite log-density that are left out; more are an error.
    max_lost: float = 0.005

    #: Share of steps with a jump of the log-density from which Stein's identities do not hold.
    max_jumps: float = 0.01

    #: Share of draws with an endless scale above which the posterior counts as improper.
    endless_share: float = 0.01

    #: Evaluations of the objective.
    num_losses: int = 20


@dataclass(frozen=True)
class EffortPolicy:
    """The effort of ``diagnose``, and its reductions to meet a time limit."""

    #: Draws of the guide, by default; ``Fit.to_datatree`` exports as many if no chains ran.
    num_samples: int = 2000

    #: Transitions of short HMC, by default.
    num_transitions: int = 20

    #: Draws at a time, by default; bounds memory.
    chunk_size: int = 500

    #: Budget of all checks in seconds of one core, by default.
    max_core_seconds: float = 60.0

    #: Draws of the guide, at least: fewer have no k-hat.
    least_samples: int = 100

    #: Draws that short HMC moves, and from which steps are tried for jumps; importance weights are
    #: cut to no fewer draws.
    num_chains: int = 500

    #: The same for quantities, which are fewer and need more power.
    num_observed_chains: int = 1000

    #: Scores for each weighed draw, besides its own, of guides that draw in parallel.
    num_scores: int = 4

    #: Draws at a time that are weighed, as a part of ``chunk_size``: a weight takes more memory.
    weighed_part: int = 5

    #: Transitions that tune the step size, for the estimate of time.
    num_tuning: int = 4

    #: Transitions below which short HMC is skipped.
    least_transitions: int = 5

    #: Newton iterations that a search usually takes; it has no limit if they are affordable.
    usual_iterations: int = 40


@dataclass(frozen=True)
class VerdictPolicy:
    """Limits of the verdict of :func:`~pyro_implicit.diagnostics.diagnose`.

    **Example:**

    >>> strict = VerdictPolicy(mean=Thresholds(0.05, 0.1))
    >>> strict.mean.distrust
    0.1
    """

    #: Pareto k-hat of the importance weights; Yao et al. (2018), Vehtari et al. (2024).
    khat: Thresholds = Thresholds(FINITE_VARIANCE_KHAT, RELIABLE_KHAT)

    #: Error of a mean, in standard deviations: what changes a plot, and what changes a conclusion.
    mean: Thresholds = Thresholds(0.1, 0.25)

    #: Ratio of standard deviations, or its inverse: the same two.
    sd: Thresholds = Thresholds(1.08, 1.25)

    #: Nested R-hat of chains that ended before they converged. If chains forget exponentially, a
    #: mean keeps 1 % and 25 % of the error of their starts (``mcmc.stopping.open_errors``).
    r_hat: Thresholds = Thresholds(CHAINS.stopping.max_usable_r_hat, CHAINS.stopping.apart_r_hat)

    #: Share of failed trajectories of such chains above which their draws are not trusted: the
    #: narrow places that they miss have a mass. With 26 % a mean was 1.1 standard deviations off.
    max_failed: float = 0.1

    #: Share of chains of short HMC that leave the guide's draws behind. It counts only if
    #: chance would give it in fewer than ``false_alarm`` of all cases. Also the limits of the error
    #: of the share of a mirror image, less ``num_errors`` standard errors.
    escaped: Thresholds = Thresholds(0.02, 0.05)

    #: Share of draws of an update beyond all draws to which its prior was fitted, or one minus
    #: their effective sample size if weights cannot correct the prior. If the prior may not move,
    #: normal data whose mean moved by 0 to 1.5 of their sds have at most 0.1 %, and errors up to
    #: 0.07 sd; by 2, 6 to 20 % and 0.3 sd; by 5, all and 3 sd.
    extrapolated: Thresholds = Thresholds(0.01, 0.25)

    #: Effective sample size per draw from which the kernel test is ignored, and with it k-hat up to
    #: 1: the tail has little mass. Above 1 a mean of weights is not finite.
    good_weights: float = 0.9

    #: Nats by which an objective may exceed the bound.
    gap: float = 0.5

    #: Standard errors that this difference, an error of coverage of held-out rows, or an error of
    #: the share of a mirror image must exceed.
    num_errors: float = 3.0

    @property
    def telling_weights(self) -> float:
        """Effective sample size per draw from which weights rule out any error of a mean that
        leads to "do not trust"."""
        # The mean of f is off by at most sd(f) times the weights' coefficient of variation.
        return 1 / (1 + self.mean.distrust**2)


@dataclass(frozen=True)
class ComparePolicy:
    """Limits of the verdict of :func:`~pyro_implicit.diagnostics.compare`."""

    #: Ratio to the sampling floor up to which draws cannot be told from exact draws.
    at_floor: float = 1.5

    #: Effective sample size of the worst coordinate of a reference, at least: means have an error
    #: of a tenth of a standard deviation. Vehtari et al. (2021) recommend 100
    #: per chain.
    least_ess: float = 100.0

    #: R-hat of the worst coordinate of a reference, at most.
    max_r_hat: float = CHAINS.stopping.strict_r_hat

    #: Posterior mass, as a share, that a reference may lack.
    least_mass: float = 0.01


@dataclass(frozen=True)
class ReferencePolicy:
    """Comparison with a reference: quantiles, chains, and the search for lacking mass."""

    #: Probabilities of the quantiles whose errors are reported.
    quantiles: tuple[float, ...] = (0.05, 0.25, 0.5, 0.75, 0.95)

    #: Distance to the nearest draw of the reference from which a draw is far, as a multiple of the
    #: distance that one in a hundred of the reference's own draws has.
    far: float = 2.0

    #: Quantile of the reference's log-densities below which a far draw proves nothing.
    typical: float = 0.05


@dataclass(frozen=True)
class DistancePolicy:
    """Accuracy and time of the distances between sets of draws."""

    #: Coordinates above which differences of all pairs take longer than a second.
    exact_dim: int = 300

    #: Splits of a reference into halves, for the sampling floor.
    num_splits: int = 4

    #: Resamples of the interval: its 2.5 % quantile is the fifth of them.
    num_bootstrap: int = 200

    #: Draws that are resampled, directions and quantiles: 0.1 s on one core.
    bootstrap_rows: int = 500
    bootstrap_projections: int = 32
    num_levels: int = 100

    #: Probability beyond either end of the interval.
    tail: float = 0.025

    #: Distances that are tried as ends: from 0 to the observed distance plus this multiple of the
    #: largest noise of a resample, evenly spaced.
    num_candidates: int = 1000
    reach: float = 4.0


@dataclass(frozen=True)
class ReportPolicy:
    """Lengths of printed reports, and pictures."""

    #: Rows of a site, or of all scalars, in a table.
    max_rows: int = 20

    #: Findings below the verdict.
    max_also: int = 5

    #: Coordinates that a finding names, and by which a direction is described.
    max_named: int = 3

    #: Bins of a histogram; pairs have twice as many.
    num_bins: int = 40

    #: Shares of the draws that the contours of a pair enclose.
    masses: tuple[float, ...] = (0.5, 0.9)


MOMENTS = MomentPolicy()
CHECKS = CheckPolicy()
EFFORT = EffortPolicy()
VERDICT = VerdictPolicy()
COMPARE = ComparePolicy()
REFERENCE = ReferencePolicy()
DISTANCES = DistancePolicy()
REPORT = ReportPolicy()
