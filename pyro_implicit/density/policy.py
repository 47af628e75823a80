# SPDX-License-Identifier: Apache-2.0
"""Settings of everything that evaluates a model's log-density.

Each field gives unit, role and source. "Measured" means: on one core of a CPU, on the models of
``benchmarks/posteriordb`` and ``benchmarks/speed``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "ANGLES",
    "COST",
    "DISCRETE",
    "GRADIENTS",
    "GROUPS",
    "MARGINAL",
    "MAX_DENSE_DIM",
    "PILOT",
    "ROUNDING",
    "RUNS",
    "SEARCH",
    "SearchPolicy",
]

#: Latent variables up to which dense matrices over all of them (covariances, Hessians) are used.
MAX_DENSE_DIM = 100


@dataclass(frozen=True)
class RunPolicy:
    """How a model is run for many values of its latent variables."""

    #: Draws of the prior, or of a guide, at which a model may raise an error before its first error
    #: is raised. As Pyro's ``initialize_model``, which tries 100 points.
    max_retries: int = 10

    #: Unconstrained coordinate of a prior's median above which a latent variable begins at 0:
    #: float32 has one decimal place there. Effects whose precision is Gamma(.001, .001) have 1e17.
    extreme: float = 1e6

    #: Change of such a coordinate in another draw of the prior, as a share of its size, below which
    #: the prior has this location.
    least_spread: float = 0.3

    #: Groups of runs that take the same branches. With more groups, if they are more than half as
    #: many as the runs, vectorisation gains nothing.
    max_groups: int = 8

    #: Absolute and relative difference of log-densities, or of values, that counts as equal, far
    #: above rounding in float32.
    tolerance: float = 1e-3

    #: Absolute and relative difference of log-densities of two plain runs at one point that counts
    #: as equal: sums of float32 in another order. A larger one means that the model is random, or
    #: that its data have changed.
    repeat_tolerance: float = 1e-5

    #: Differences up to this multiple of the effect of the latents' last bits are rounding, or of
    #: the last bit of the log-density of a model that can only run in single precision.
    rounding: float = 10.0

    #: Runs at one point whose observed sites are compared: a loop of random length, of two lengths,
    #: has one length in all of them in 1 of 100 cases. Draws of the prior at which the supports and
    #: shapes of all latent variables are compared, for the same reason.
    num_compared_runs: int = 8

    #: Points at which a claim about the density is tried: which terms depend on which elements,
    #: symmetries, a quadratic form, unchanged data, and gradients. These count as wrong if they are
    #: so at half of the points, and at two.
    num_points: int = 4

    #: Distance of nearby points in unconstrained coordinates, as where an evaluation is counted, or
    #: a gradient is compared: priors may have kinks at ``init_loc``. Also the least distance by
    #: which latent variables are moved, to find priors that depend on others; the largest is twice
    #: as large. All distances differ, so differences of latent variables change as well.
    nearby: float = 0.1

    #: Draws in one vectorised run where each leaves a number per observation; bounds memory.
    draws_at_once: int = 100

    #: Points, at most, that are run one by one to find the sites to blame for an error.
    num_blamed: int = 20


@dataclass(frozen=True)
class AnglePolicy:
    """The turns of latent angles."""

    #: Standard deviation (rad) of an angle and its turns around the middle of its turn. At 1, the
    #: next turn has 3e-9 of the mass of an angle in the middle, and at the ends half of it, within
    #: .3 rad.
    turn_width: float = 1.0

    #: The digits of an angle (rad) below this one are taken to be random; float32 has three.
    last_digits: float = 1e-4

    #: Share of a phase's interval by which it moves from the ends, for the slopes of the density
    #: there. They are the same if they differ by less than the rise in a quarter of the interval.
    phase_step: float = 1e-4

    #: Paths of the search for the middle: the best of few modes suffices.
    num_starts: int = 10

    #: Steps of L-BFGS, of 20 iterations each, in its place, where a search is too expensive.
    max_climbs: int = 10


@dataclass(frozen=True)
class CostPolicy:
    """Seconds of one core, by the operations of an evaluation. Measured within a factor of two."""

    #: Seconds: Pyro's handlers, for each run of the model.
    per_run: float = 3e-3

    #: Seconds: dispatch, for each call of a kernel.
    per_operation: float = 8e-6

    #: Seconds, for each element of a result.
    per_element: float = 2e-9

    #: Seconds, for each floating-point operation of matrix products and convolutions.
    per_flop: float = 1e-10

    #: Seconds to record one operation.
    per_recorded: float = 2.5e-4

    #: Seconds that a replay of a recorded operation saves: autograd and ``vmap``.
    saved_per_operation: float = 6e-6

    #: Elements of a sum that take as long as one element of this function.
    functions: Mapping[str, int] = field(default_factory=lambda: {
        "lgamma": 15, "digamma": 15, "polygamma": 30, "special_log_ndtr": 15,
    })  # fmt: skip

    #: The same for small matrices; it grows by ``1 + rows / large_matrix``.
    factorisations: Mapping[str, int] = field(default_factory=lambda: {
        **dict.fromkeys(("cholesky_inverse", "cholesky_solve"), 8),
        **dict.fromkeys(("linalg_cholesky_ex", "linalg_solve_triangular", "triangular_solve"), 4),
        **dict.fromkeys(("linalg_lu_factor_ex", "_linalg_slogdet", "_linalg_det"), 5),
        **dict.fromkeys(("_linalg_solve_ex", "linalg_inv_ex", "linalg_qr"), 15),
        **{"_linalg_eigh": 50, "_linalg_svd": 100},
    })  # fmt: skip

    #: Rows above which the cubic term of a factorisation dominates.
    large_matrix: int = 100

    #: Two numbers of points, from which the cost of any number is extrapolated.
    counted_points: tuple[int, int] = (2, 4)

    #: Points of that evaluation which decides on threads, as many as ``fit`` has chains.
    threaded_points: int = 256

    #: Bytes of the largest tensor of a block of points: about the second-level cache of a core.
    #: Without blocks, 2,048 points of a Gaussian process with 50 data take four times as long.
    cache: int = 2**21

    #: Seconds that a division between processes must save in each call, counted; a call and its
    #: answer take 2e-4 s.
    least_divided: float = 2e-3

    #: Processes between which the rows of a score are divided, at most, by default.
    most_workers: int = 4

    #: Seconds after which a process without an answer counts as hanging.
    longest_answer: float = 120.0

    #: Seconds of work per operation below which one thread is used. Torch divides operations of
    #: more than 32,768 elements; in the zoo, two threads gain nothing up to 40,000 elements, which
    #: count as 8e-5 s, and take up to five times the CPU seconds.
    least_threaded: float = 1e-4


@dataclass(frozen=True)
class GradientPolicy:
    """Comparison of a log-density's gradient with difference quotients."""

    #: Two widths of central differences, in unconstrained coordinates; rows where they disagree are
    #: not judged. Wide enough for float32.
    steps: tuple[float, float] = (1e-2, 2.5e-3)

    #: Groups of sites that are moved together; bounds the evaluations to 4 per group and point.
    max_groups: int = 6

    #: Relative difference of the two quotients up to which the function counts as smooth.
    agree: float = 0.005

    #: Relative difference of quotient and gradient from which the gradient is wrong.
    differ: float = 0.05

    #: Allowed error of a quotient, in units of the dtype's resolution over the narrow step.
    rounding: float = 100.0

    #: Share of the narrow step that the points' own resolution may take.
    resolution: float = 0.02


@dataclass(frozen=True)
class SearchPolicy:
    """The search for modes by :func:`~pyro_implicit.density.find_modes`."""

    #: Paths per round. A mode with a tenth of the prior's mass is missed in 1 of 200 rounds.
    num_starts: int = 50

    #: Paths per round of expensive densities, such as Gaussian processes of a hundred rows.
    least_starts: int = 12

    #: Ends of paths at modes, as a share of the paths of a round, below which the search goes on
    #: if it has found a single mode.
    least_met: float = 0.1

    #: The same for several modes. With half a round, a mode with a tenth of the paths' ends is
    #: missed in 7 of 100 searches.
    least_met_apart: float = 0.5

    #: Half the width of the cube of points near the origin of unconstrained space, and of that of
    #: draws of flat priors, as in Stan and NumPyro.
    near_width: float = 2.0

    #: Factor by which such points shrink if the density or its gradient overflows there.
    shrink: float = 0.25

    #: A prior is too vague if, over its draws, the median deviation of an unbounded latent variable
    #: from its median, or the median size of another one's unconstrained coordinate, is larger.
    #: Gamma(.001, .001) has a flat tail below exp(-80), more probable than the posterior at times.
    far: float = 50.0

    #: Share of the prior's draws at which the model raises no error, below which it is too vague.
    least_runs: float = 0.1

    #: Nats by which points near the origin must be more probable than all draws of another prior.
    near_gain: float = 1000.0

    #: Draws for the ELBO of a Gaussian on a path; Pathfinder (Zhang et al., 2022) has 5 to 25.
    num_draws: int = 16

    #: Rounds; ends searches in which new modes appear again and again.
    max_rounds: int = 16

    #: Newton steps of a path; funnels need tens (posteriordb).
    max_iterations: int = 100

    #: Newton steps in all below which ``fit`` and ``diagnose`` skip the search.
    least_iterations: int = 10

    #: Share of the remaining ``max_seconds`` that the search may take in ``fit`` and ``refine``,
    #: and that making or comparing the spaces of chains may take.
    time_share: float = 0.25

    #: Nats of ELBO below the best mode from which a mode is dropped: its weight is below 1e-4.
    max_gap: float = 10.0

    #: Shares of a Newton step that are tried; the best one is taken.
    step_sizes: tuple[float, ...] = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01, 1e-3)

    #: Squared Newton decrement (nats) below which a path has arrived.
    at_top: float = 1e-2

    #: Squared Newton decrement (nats) below which a stuck path has arrived at a kink, where the
    #: score is not 0: .1 to .7 with 4 to 20 latent variables.
    at_kink: float = 1.0

    #: Factor between the sds of two Gaussians in any direction up to which they agree.
    settled: float = 2.0

    #: The same factor above which the Gaussian of a mode is blind to kinks: 10 and more with two or
    #: four rows of Laplace errors; skewed modes have less.
    blind: float = 6.0

    #: Points in one step of all secants, two in each coordinate of a path: limits the paths.
    secant_points: int = 1000

    #: Steps with secants; ten suffice for regressions with Laplace errors.
    secant_steps: int = 25

    #: Nats by which the log-density must dip between two separate modes.
    min_dip: float = 1.0

    #: Distance in standard deviations up to which two path ends are one mode; paths to one mode end
    #: 0.1 apart (``at_top``). With the units in order, it is the root mean square of coordinates.
    same: float = 0.3

    #: Points on the line between two modes at which a dip is looked for.
    num_between: int = 11

    #: Ridges between Gaussians on which a search looks for dips, at most.
    most_ridges: int = 8

    #: Newton steps from a line to its ridge. With 5 steps, some lines bypass the wall between two
    #: modes through the neck of a funnel.
    ridge_steps: int = 3

    #: Draws for the final ELBO of each mode; the best of many paths is partly the luckiest.
    num_final_draws: int = 256

    #: Nats between dropped and kept modes from which a warning about rounding is issued.
    rounding_gap: float = 1e4

    @property
    def most_iterations(self) -> int:
        """Newton steps of a search in all, at most."""
        return self.max_rounds * self.max_iterations


@dataclass(frozen=True)
class DiscretePolicy:
    """Which discrete latent variables are summed out, and how others are checked."""

    #: Elements of a tensor up to which a sum over joint values is always computed; with 256 chains
    #: and 4 bytes, 128 MiB.
    max_elements: int = 2**17

    #: Elements of a tensor of the enumerated run, as a multiple of those of the plain run, up to
    #: which a sum is computed: a row of a mixture of 256 components.
    max_joint: int = 256

    #: Smallest length of a chain of discrete variables in which every other variable is summed
    #: out at once, and largest number of elements of such a sum; larger sums are faster one by one.
    least_chain: int = 8
    most_at_once: int = 256

    #: Sites, at most, of which some elements are moved to see whether they share a term.
    max_probed: int = 8

    #: Values of each element that are summed at first, and at most; the latter also where elements
    #: share terms, so that all pairs of values are summed. Their range doubles until the rest of
    #: the sum is negligible: this share of it, by which a density is off.
    first_values: int = 32
    most_values: int = 4096
    most_paired: int = 512
    negligible: float = 1e-7

    #: The largest distance of these values, and the longest stride of moves that look for possible
    #: values, or for the elements on which terms depend.
    longest_stride: int = 1024

    #: Nats of a new highest density at which the window of these values follows it, and its margin
    #: on either side, in units of its width.
    higher: float = 3.0
    margin: float = 0.3

    #: Numbers that a gradient keeps for each value of each term; a limit of memory.
    graph_entries: int = 8


@dataclass(frozen=True)
class RoundingPolicy:
    """When a log-density consists of rounding errors (Vignes, 2004)."""

    #: Perturbed evaluations that measure the effect of the last bits, as in the discrete stochastic
    #: arithmetic of Vignes (2004; 2 to 3).
    num_runs: int = 4

    #: Change relative to the log-density, in addition to one nat, that counts as rounding.
    relative: float = 1e-3

    #: Factor by which perturbing every operation may exceed it.
    inexact: float = 10.0

    #: Nats of rounding error at a share of the draws from which ``fit`` evaluates the model in
    #: double precision, or names rounding as the reason why chains fail, and the number of these
    #: draws. Trajectories need about a tenth of a nat. A change of the density by more, beyond
    #: rounding, means that the data have changed.
    max_error: float = 0.1
    share: float = 0.05
    num_draws: int = 32

    #: Draws of the guide that show whether the posterior reaches a bound.
    num_near: int = 500

    #: Share of the draws of chains at or beyond the last number before a bound, from which too much
    #: mass is lost. The density falls steeply there: a small b of Beta(a, b) loses this share / b.
    beyond_share: float = 5e-3


@dataclass(frozen=True)
class PilotPolicy:
    """When some rows of the data stand for all in a search."""

    #: Distance of two points from the initial one, in each unconstrained coordinate. Between such
    #: points the terms of single rows change visibly.
    spread: float = 1.0

    #: Nats by which the rise of the log-density over one unit, or over one standard deviation of
    #: each latent variable, may differ between divisions of the rows, or between two passes over
    #: minibatches: other rows, or randomness of the model. It shifts the posterior by as many
    #: standard deviations.
    max_noise: float = 0.05


@dataclass(frozen=True)
class GroupPolicy:
    """Conditional posteriors of the latent variables of groups, and integrals over them."""

    #: Newton steps to the conditional modes, at most; log-concave densities need 4 to 10.
    max_steps: int = 30

    #: Squared Newton decrement (nats) below which a group has arrived: nodes of the quadrature are
    #: then within 0.003 standard deviations of their best place. With 1e-3 instead, the random
    #: nodes of four latent variables differ visibly from point to point.
    at_top: float = 1e-5

    #: Length of the longest Newton step, in conditional standard deviations of its start.
    longest_step: float = 20.0

    #: Nodes in each dimension of a first quadrature, before their number is chosen.
    num_nodes: int = 9

    #: Draws of a Gaussian at the mode from which one is resampled, and its scale in conditional
    #: standard deviations: the tails of a posterior are often heavier. Measured with two HMC moves
    #: for log-gamma densities of shape 2 to 12: standard deviations within 0.6 per cent. Without
    #: moves it is 2.3, at scale 1 it is 9.
    num_proposals: int = 16
    proposal_scale: float = 1.3

    #: Elements of one site in a vectorised run; bounds memory (8 MB in float64).
    elements_at_once: int = 2**20

    #: Rows whose densities take as long as the overhead of one run of the model.
    rows_of_run: int = 10_000

    #: Step size, in conditional standard deviations, and leapfrog steps of local HMC moves: a
    #: quarter of a period, with an acceptance above 0.9 up to ten dimensions.
    move_size: float = 0.4
    move_steps: int = 4


@dataclass(frozen=True)
class MarginalPolicy:
    """When latent variables are integrated out, given the others, in closed form."""

    #: Latent variables up to which none are integrated out, unless chains of all do not converge:
    #: models of the zoo with 34 to 52 take 2.5 to 4.6 times as long if they are.
    least_latents: int = MAX_DENSE_DIM

    #: Elements of the largest integrated sites, at least, those of one loop together: with fewer,
    #: the remaining sites are hardly fewer than before.
    least_integrated: int = 20

    #: Elements, at least, of other sites that are integrated out with these.
    least_added: int = 5

    #: Unconstrained coordinates that remain, at most, as points are drawn in all of them.
    most_remaining: int = 40

    #: Work of a fit of the remaining variables, at most: products with the Hessian in a score,
    #: times the square of twice their dimensions. A structural equation model takes 85 to 215 s
    #: with 16,000, and more than 500 s with 260,000; chains of all its 261 variables take 126 s.
    most_work: int = 50_000

    #: Elements of the integrated sites, at most: finding the structure takes a product with each
    #: column of the Hessian.
    most_integrated: int = 20_000

    #: Products with the Hessian that determine it, at most; each takes about three scores.
    most_products: int = 128

    #: Floating-point operations of one factor, at most (about a minute for 1,000 factors).
    most_operations: float = 1e9

    #: Rows of a block of a banded matrix, at least. On one core, 10,000 rows of 64 tridiagonal
    #: matrices take 1.7 ms each in blocks of 16, 2.3 ms in blocks of 8, 4.6 ms in blocks of 32.
    least_block: int = 16

    #: Distance of the values of the remaining sites, at which the density is compared with its
    #: quadratic form, from the initial point, as a share of the way to a draw of the prior.
    spread: float = 0.5

    #: Distances in conditional standard deviations at which it is compared: a Student or logistic
    #: density is almost quadratic near its mode, but not far out.
    distances: tuple[float, ...] = (0.1, 1.0, 10.0, 100.0, 1e4)

    #: Power of the dtype's resolution: the relative difference that counts as rounding, 4e-10 in
    #: double and 7e-5 in single precision. A sum of a million terms loses three digits.
    rounding_power: float = 0.6

    #: Distance, in unconstrained coordinates, between the four points of a line along which a
    #: density that is clearly not quadratic is recognised.
    line_length: float = 2.0

    #: Columns whose entries are counted to choose between coordinates.
    num_columns: int = 8

    #: Entries of a Hessian below this share of the largest one in their column count as zero.
    zero: float = 1e-12

    #: Unconstrained coordinates: step of the differences of scores that give second derivatives.
    #: Scores have ten digits, and third derivatives change by the order of themselves over one.
    step: float = 1e-3

    #: Nats by which the joint density of a final draw may differ from the product of its marginal
    #: and conditional densities, in addition to rounding.
    #: Draws in single precision are off by 0.02 if the prior's sd is 100 and that of the data 0.1.
    max_fault: float = 5e-2

    #: Share of weighted draws beyond ``max_fault``, at most, that are left out.
    max_faulty: float = 1e-2


@dataclass(frozen=True)
class SymmetryPolicy:
    """How groups that leave a posterior unchanged are found."""

    #: Modes, or starts of chains, at which the density is compared again: it may have spikes.
    num_confirmed: int = 64

    #: Draws from which the keys are chosen by which units are ordered.
    num_draws: int = 256

    #: Errors of the density by rounding in nats: a share of its size, 45,000 times that of one
    #: number in double precision, and that of terms in single precision, such as the log-density
    #: of ``Gamma(2.0, 0.3)``.
    relative: float = 1e-11
    absolute: float = 1e-4

    #: Plates, dimensions of one length, or sites, whose subsets are all tried; of more, as many
    #: subsets of a few, and the whole.
    most_blocks: int = 9

    #: Units of the largest rotations.
    most_rotated: int = 64

    #: Runs of the model that all trials may take, in addition to those of all subsets at once.
    num_runs: int = 30

    #: Seconds of one core that all subsets may take; fewer are tried of slow models.
    max_seconds: float = 2.0


@dataclass(frozen=True)
class MirrorPolicy:
    """Reflections under which a posterior changes by a few nats. Checked by
    ``tests/density/test_mirrors.py``."""

    #: Mean distance of a coordinate from 0, in its own sds, from which it may tell images apart.
    separation: float = 3.0

    #: Half of the width of the gap around 0, in the same unit.
    gap: float = 0.5

    #: Draws at which each reflection is tried.
    num_tried: int = 16

    #: Reflections that are tried, at most: with more than nine sites not all subsets.
    max_tried: int = 512

    #: Images, at most, that are added; of more, some may be unknown.
    most_images: int = 16

    #: Share of the mass below which an image is left out, and of the draws that may lie in the gap.
    least_share: float = 1e-3


RUNS = RunPolicy()
ANGLES = AnglePolicy()
GROUPS = GroupPolicy()
MARGINAL = MarginalPolicy()
COST = CostPolicy()
DISCRETE = DiscretePolicy()
GRADIENTS = GradientPolicy()
SEARCH = SearchPolicy()
PILOT = PilotPolicy()
ROUNDING = RoundingPolicy()
SYMMETRY = SymmetryPolicy()
MIRROR = MirrorPolicy()
