# SPDX-License-Identifier: Apache-2.0
"""The step size of chains that see minibatches: how large it may be, and what bounds it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.ops.sghmc import gradient_noise, largest_curvature

__all__ = [
    "FRICTION",
    "MinibatchKernel",
    "Probe",
    "StepChoice",
    "choose_step",
    "judge",
    "probe",
    "stable_step",
]

MinibatchKernel = Literal["sghmc", "sgld"]
Limit = Literal["stability", "balance", "heat", "user"]

FRICTION = 1.0  # critical for directions twice as wide as the frame says
MAX_HEAT = 0.5
MAX_DISCRETISATION = 0.05  # of the variance in the narrowest direction, by steps of SGLD
MAX_POINTS = 8
ITERATIONS = 6  # of the power method
MAX_VALUES = 10**6  # in the gradients of one minibatch


class Probe(NamedTuple):
    """What bounds the step size, in the frame: the largest ``curvature`` of minibatches'
    log-densities, and the root mean square ``noise`` of their gradients' variances, over
    directions; found by so many ``gradients``."""

    curvature: float
    noise: float
    gradients: int


class StepChoice(NamedTuple):
    """A step size, and what to expect of it.

    ``limit`` is what bounds it: ``"stability"``, ``"balance"`` or ``"heat"``, see
    :func:`choose_step`; ``"user"`` if it was given. ``heat`` is the excess of the posterior's
    variances that gradient noise brings, as a share, root mean square over directions.
    ``relaxations`` says how many times the chains forget where they were, once warm, in directions
    as wide as the frame says. ``curvature`` and ``noise`` are those of the :class:`Probe`.
    """

    step_size: float
    limit: Limit
    heat: float
    relaxations: float
    curvature: float
    noise: float

    def rows(self) -> dict[str, str]:
        """For a table."""
        return {
            "step, bounded by": f"{self.step_size:.3g}, {self.limit}",
            "curvature, noise": f"{self.curvature:.3g}, {self.noise:.3g}",
            "variances too large by": f"{self.heat:.1%} (root mean square over directions)",
            "relaxation times": f"{self.relaxations:.3g}",
        }


def choose_step(kernel: MinibatchKernel, found: Probe, steps: int) -> StepChoice:
    r"""The step size of a run.

    With step h, friction :math:`\gamma` and rms noise :math:`\sigma^2`, gradient noise widens the
    posterior's variances by a share of :math:`\tau`, and in so many steps T the chains relax R
    times:

    .. math:: \tau = \frac{h \sigma^2}{2 \gamma}, \quad R = \tfrac12 \gamma h T \text{ (SGHMC)};
        \qquad \tau = \tfrac14 h^2 \sigma^2, \quad R = \tfrac12 h^2 T \text{ (SGLD)}.

    All chains see the same minibatches. So part of the heat moves them together, and only a run of
    many relaxation times shows it as width.

    Longer steps err by more heat. Shorter ones stay closer to the start: the mean over a run of R
    relaxation times still has a share of about 1/R of the start's error, and a share of that order
    is noise. So the step is that at which :math:`\tau = 1/R` (limit ``"balance"``); half the error
    takes four times the steps. But the heat stays below .5, beyond which
    draws of networks predicted worse than their starts (``"heat"``): then the run is too short to
    relax twice. And the step is stable at any rate (``"stability"``): half of the leapfrog's limit
    :math:`2 / \sqrt{\lambda}` for SGHMC, and for SGLD that at which it widens the narrowest
    direction, of precision :math:`\lambda`, by 5 %.

    **Example:**

    >>> choose_step("sghmc", Probe(curvature=4.0, noise=10.0, gradients=0), 10_000).limit
    'balance'

    :param steps: T, after the warm-up.
    """
    heat, relaxations = _per_unit(kernel, found.noise, steps)
    power = 1 if kernel == "sghmc" else 2
    limits: dict[Limit, float] = {"stability": stable_step(kernel, found.curvature) ** power}
    if heat > 0:
        limits |= {"balance": 1 / math.sqrt(heat * relaxations), "heat": MAX_HEAT / heat}
    limit = min(limits, key=lambda name: limits[name])
    return judge(kernel, found, steps, limits[limit] ** (1 / power), limit)


def stable_step(kernel: MinibatchKernel, curvature: float) -> float:
    """The largest step that the greatest curvature allows."""
    stable = 1 / math.sqrt(max(curvature, 1.0))
    return stable if kernel == "sghmc" else math.sqrt(4 * MAX_DISCRETISATION) * stable


def judge(
    kernel: MinibatchKernel, found: Probe, steps: int, step_size: float, limit: Limit
) -> StepChoice:
    """What to expect of a step size."""
    heat, relaxations = _per_unit(kernel, found.noise, steps)
    unit = step_size if kernel == "sghmc" else step_size**2
    return StepChoice(
        step_size, limit, heat * unit, relaxations * unit, found.curvature, found.noise
    )


def _per_unit(kernel: MinibatchKernel, noise: float, steps: int) -> tuple[float, float]:
    """Heat and relaxation times, by the step of SGHMC or by the squared step of SGLD."""
    if kernel == "sghmc":
        return noise / (2 * FRICTION), FRICTION * steps / 2
    return noise / 4, steps / 2


def probe(gradients: list[Callable[[Tensor], Tensor]], position: Tensor) -> Probe:
    """Measure curvature and gradient noise where the chains are.

    :param gradients: of the log-density, by one minibatch each, at points ``(num_points, d)``.
    :param position: ``(num_chains, d)``; the first eight of them count, or fewer if d is large.
    :raises RuntimeError: if no gradient is finite there.
    """
    points = position[: max(1, min(MAX_POINTS, MAX_VALUES // position.shape[-1]))]
    found = torch.stack([gradient(points) for gradient in gradients])
    finite = found.isfinite().all(-1).all(0)
    if not finite.any():
        raise RuntimeError(
            f"minibatches' gradients are not finite at any of {len(points)} chains. Cure: check "
            "the data for NaN; a better start, a shorter step_size, or float64"
        )
    points, found = points[finite], found[:, finite]
    spent = len(gradients)
    noise = gradient_noise(found).rms
    curvature = 0.0
    for gradient in gradients[:2]:
        curvature = max(
            curvature, largest_curvature(gradient, points, ITERATIONS).nan_to_num().max().item()
        )
        spent += 1 + ITERATIONS
    return Probe(curvature, noise, spent)
