# SPDX-License-Identifier: Apache-2.0
"""Numbers that accuracy, speed or memory of the mathematics and of the generators depend on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BRIDGE_TOLERANCE",
    "CONTEXT_FACTOR",
    "DAMPING_FACTOR",
    "EVEN_EFFICIENCY",
    "FINITE_MEAN_KHAT",
    "FINITE_VARIANCE_KHAT",
    "FIRST_DAMPING",
    "JUMPS",
    "LEAST_COMPONENT",
    "LEAST_SPREAD",
    "MAX_ALIGNMENTS",
    "MAX_BRIDGE_STEPS",
    "MAX_ENTRIES",
    "MAX_LOG_GATE",
    "MAX_MEDIAN_SAMPLES",
    "MAX_REPEATED",
    "MAX_SKEW",
    "MAX_TAIL",
    "NEAR_ZERO",
    "NUM_BALANCINGS",
    "NUM_EM_STEPS",
    "NUM_KEYS",
    "PERMUTATION_POWERS",
    "POWER_FACTOR",
    "POWER_TOLERANCE",
    "PRIOR_SHARE",
    "RELIABLE_KHAT",
    "SETTLED",
    "SMALL_MATRIX",
    "JumpPolicy",
]

#: Steps of expectation-maximisation of a mixture that is a proposal: it need not be the best one.
NUM_EM_STEPS = 50

#: Entries of the largest tensor that a chunked computation makes (64 MiB in float32).
MAX_ENTRIES = 2**24
#: Rows up to which batches of matrices are factored elementwise, to avoid the overhead of LAPACK.
SMALL_MATRIX = 4
#: Share of equal samples up to which a Stein test takes them for the result of resampling.
MAX_REPEATED = 0.5
#: Samples whose distances enter a median bandwidth: sorting more costs more than the kernel.
MAX_MEDIAN_SAMPLES = 128
#: Pareto k-hat above which importance weights are unreliable; Vehtari et al. (2024), section 3.
RELIABLE_KHAT = 0.7
#: Pareto k-hat up to which the variance of importance weights is finite; the same section.
FINITE_VARIANCE_KHAT = 0.5
#: Pareto k-hat above which importance weights have no mean.
FINITE_MEAN_KHAT = 1.0
#: Effective sample size per draw above which weights count as equal and need no k-hat.
EVEN_EFFICIENCY = 0.99
#: Change of a log normalising constant, in nats, at which bridge sampling stops, and the most
#: steps (the iteration is that of Meng and Wong, 1996).
BRIDGE_TOLERANCE = 1e-6
MAX_BRIDGE_STEPS = 200
#: Weight of a mixture component without points, in units of an equal weight: it may gain some.
LEAST_COMPONENT = 1e-3
#: Relative error of the next step of annealing at which its bisection ends, and the factor on the
#: step while no lower bound is known.
POWER_TOLERANCE = 0.01
POWER_FACTOR = 0.1
#: Damping of the first Newton step of a noise's mode, in units of the prior precision of the noise,
#: and its factor after each step (Levenberg-Marquardt; Marquardt, 1963).
FIRST_DAMPING = 1e-2
DAMPING_FACTOR = 10
#: Share of a noise proposal that is drawn from the prior, as a defence against values that its
#: Gaussians miss (Hesterberg, 1995).
PRIOR_SHARE = 0.1
#: Powers of the balanced weights and their shares in the mixture of ``permutation_log_prob``. The
#: first non-zero power is best if many rows compete for a column, the next for single pairs; power
#: zero bounds the loss.
PERMUTATION_POWERS = ((0.0, 0.01), (1.0, 0.33), (1.5, 0.33), (2.0, 0.33))
#: Sinkhorn iterations before it.
NUM_BALANCINGS = 5
#: Rounds of aligning hidden units to their mean, which ends when no unit moves.
MAX_ALIGNMENTS = 20
#: Combinations of entries of which the best one orders units, and the least standard deviation of
#: an entry of one unit there, in units of that over all units.
NUM_KEYS = 256
LEAST_SPREAD = 1e-3
#: Bound of the skew of ``AutoregressiveGenerator``. At it one side of h is 400 times steeper
#: than the other. With ``MAX_TAIL``, ``|h(8)| < 1e5``: float32 squares that without overflow.
MAX_SKEW = 3.0
#: Bound of its tail parameter: at it the tails exceed a Cauchy distribution's up to z = 3.
MAX_TAIL = 1.5
#: Change of its inverted noise, in rounding errors, at which the passes of an inversion end.
SETTLED = 4.0
#: Bound of the logarithm of ``GatedMLP``'s gate, so that it is between 1/20 and 20: without it, the
#: gate is exponential in the noise, and so are draws to which the objective gives no gradient.
MAX_LOG_GATE = 3.0
#: Factor on the initial weights of the last layers: a network starts near its affine part.
NEAR_ZERO = 0.01
#: Factor on the initial weights of a linear map of the context.
CONTEXT_FACTOR = 0.1
#: Dimensions up to which an integral takes a product rule; of 15 nodes in each it has 3,375 nodes.
MAX_PRODUCT_DIM = 3
#: Difference of log-weights up to which they count as equal, in rounding errors of the largest one.
TIED = 8.0


@dataclass(frozen=True)
class JumpPolicy:
    """The search for jumps of a log-density. Checked by ``tests/ops/test_jumps.py``."""

    #: Length of the steps over which jumps are looked for, in sds.
    step: float = 0.3

    #: How often these steps are halved: the last half is 5e-6 sds long.
    num_halvings: int = 16

    #: Nats that are then a jump.
    least_jump: float = 0.05

    #: Roundings of a coordinate that add up: those of a frame, of its inverse, and of halved steps.
    num_roundings: float = 4.0

    #: Nats by which a density falls towards the end of its support if it vanishes there.
    vanishing: float = 5.0


JUMPS = JumpPolicy()
