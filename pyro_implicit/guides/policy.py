# SPDX-License-Identifier: Apache-2.0
"""Numbers that the initial values and networks of automatic guides depend on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "AMORTIZED_CONDITIONAL_SCALE",
    "AMORTIZED_WIDTH",
    "FRAME",
    "INIT_SCALE",
    "INIT_SPREAD",
    "LEAST_SCALE",
    "MAX_NOISE_DIM",
    "MINIBATCH_INIT_SCALE",
    "NOISE_SCALE",
    "ROW_SLOPE",
    "FrameSearchPolicy",
]


@dataclass(frozen=True)
class FrameSearchPolicy:
    """The search for a frame of ``frame="auto"`` and ``frame="mode"``.

    :ivar seconds: time of one core for all evaluations of the model, counted by operations.
    :ivar num_starts: starting points from the prior, for models that run vectorised.
    :ivar num_starts_looped: starting points from the prior, for other models.
    :ivar num_minibatches: Newton steps on fresh minibatches; the error of the location is the
        distance of a minibatch's mode over the root of this number.
    :ivar num_particles: particles of mean-field variational inference.
    :ivar steps: fewest and most steps of mean-field variational inference.
    :ivar learning_rate: initial learning rate of Adam, which falls linearly to 0.
    """

    seconds: float = 1.0
    num_starts: int = 20
    num_starts_looped: int = 3
    num_minibatches: int = 100
    num_particles: int = 8
    steps: tuple[int, int] = (100, 500)
    learning_rate: float = 0.1


FRAME = FrameSearchPolicy()
#: Initial standard deviation of latents without a frame, in unconstrained space; Pyro's default.
INIT_SCALE = 0.1
#: Share of the difference of two prior draws that breaks the symmetry of constant weights: under
#: the prior ``"fan_in"`` it has about torch's initial standard deviation for linear layers.
INIT_SPREAD = 0.15
#: Initial conditional standard deviation of a semi-implicit guide, relative to its frame.
NOISE_SCALE = 0.02
#: Largest default noise dimension: a LIVI step with an exact log-determinant takes seconds on a CPU
#: beyond it.
MAX_NOISE_DIM = 200
#: Initial standard deviation of (global) latents if minibatches train a guide, whose gradients are
#: noisy; in unconstrained space.
MINIBATCH_INIT_SCALE = 0.05
#: Conditional standard deviation of implicit local sites, relative to their initial unit scale.
AMORTIZED_CONDITIONAL_SCALE = 0.05
#: Units in each of the two hidden layers of the default encoders.
AMORTIZED_WIDTH = 64
#: Unit of a row's own slope. With 1, Adam's noise in the slopes of 1,000 rows narrowed latents that
#: no data determine to a fifth of their standard deviation; with .1 it is 14 % too small.
ROW_SLOPE = 0.1
#: Least standard deviation of an encoder, and at the start of a row, in unconstrained space.
LEAST_SCALE = 1e-4
