# SPDX-License-Identifier: Apache-2.0
"""The step size of chains that see minibatches, from curvature and gradient noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.mcmc.policy import DEFAULT, ChainPolicy, LangevinPolicy

__all__ = [
    "GradientNoise",
    "Probe",
    "Score",
    "StepChoice",
    "choose_step",
    "finite_gradient",
    "gradient_noise",
    "judge",
    "largest_curvature",
    "probe",
    "stable_step",
]

Gradient = Callable[[Tensor], Tensor]
Score = Callable[[Tensor], tuple[Tensor, Tensor]]
Limit = Literal["stability", "balance", "heat", "user"]


class Probe(NamedTuple):
    """Measurements in the frame that bound the step size.

    ``curvature`` is the largest curvature of minibatches' log-densities, ``noise`` the root mean
    square of their gradients' variances over directions, ``gradients`` what the measurement took.
    """

    curvature: float
    noise: float
    gradients: int


class StepChoice(NamedTuple):
    """A step size, and its expected errors.

    ``limit`` is the active bound: ``"stability"``, ``"balance"`` or ``"heat"``, see
    :func:`choose_step`; ``"user"`` for a given step size. ``heat`` is the share by which gradient
    noise widens the posterior's variances, root mean square over directions. ``relaxations`` counts
    how many times the chains forget their position after the warm-up, in directions as wide as the
    frame says. ``curvature`` and ``noise`` are those of the :class:`Probe`.
    """

    step_size: float
    limit: Limit
    heat: float
    relaxations: float
    curvature: float
    noise: float

    def rows(self) -> dict[str, str]:
        """Return rows of a table."""
        return {
            "step, bounded by": f"{self.step_size:.3g}, {self.limit}",
            "curvature, noise": f"{self.curvature:.3g}, {self.noise:.3g}",
            "variances too large by": f"{self.heat:.1%} (root mean square over directions)",
            "relaxation times": f"{self.relaxations:.3g}",
        }


def stable_step(curvature: float) -> float:
    """Return the largest step size, half of the leapfrog integrator's limit."""
    return 1 / math.sqrt(max(curvature, 1.0))


def choose_step(found: Probe, steps: int, policy: LangevinPolicy = DEFAULT.langevin) -> StepChoice:
    r"""Choose the step size of a run.

    With step h, friction :math:`\gamma` and rms noise :math:`\sigma^2`, gradient noise widens the
    posterior's variances by a share of :math:`\tau`, and in T steps the chains relax R times:

    .. math:: \tau = \frac{h \sigma^2}{2 \gamma}, \quad R = \tfrac12 \gamma h T.

    All chains see the same minibatches. So part of the heat moves them together, and only a run of
    many relaxation times shows it as width.

    Longer steps have more heat. Shorter steps stay closer to the start: the mean over a run of R
    relaxation times keeps a share of about 1/R of the start's error, and a share of that order is
    noise. So the step is that at which :math:`\tau = 1/R` (limit ``"balance"``); half the error
    takes four times the steps. The heat stays below ``policy.max_heat``, beyond which draws of
    networks predicted worse than their starts (``"heat"``): then the run is too short to relax
    twice. In any case the step is at most half of the leapfrog integrator's limit
    (``"stability"``).

    **Example:**

    >>> found = Probe(curvature=4.0, noise=10.0, gradients=0)
    >>> choose_step(found, 10_000).limit
    'balance'

    :param found: measured curvature and noise.
    :param steps: T, the steps after the warm-up.
    :param policy: the friction and the largest heat.
    """
    unit = judge(found, steps, 1.0, "user", policy)
    limits: dict[Limit, float] = {"stability": stable_step(found.curvature)}
    if unit.heat > 0:
        limits["balance"] = 1 / math.sqrt(unit.heat * unit.relaxations)
        limits["heat"] = policy.max_heat / unit.heat
    limit = min(limits, key=lambda name: limits[name])
    return judge(found, steps, limits[limit], limit, policy)


def judge(
    found: Probe,
    steps: int,
    step_size: float,
    limit: Limit,
    policy: LangevinPolicy = DEFAULT.langevin,
) -> StepChoice:
    """Return the expected errors of a step size."""
    heat = found.noise / (2 * policy.friction) * step_size
    relaxations = policy.friction * steps / 2 * step_size
    return StepChoice(step_size, limit, heat, relaxations, found.curvature, found.noise)


def probe(scores: list[Score], position: Tensor, policy: ChainPolicy = DEFAULT) -> Probe:
    """Measure curvature and gradient noise at the positions of some chains.

    :param scores: the score of each minibatch.
    :param position: ``(num_chains, d)``, of which a few count.
    :param policy: the numbers of points and of iterations.
    :raises RuntimeError: if no gradient is finite there.
    """
    numbers = policy.langevin
    points = position[: policy.frame.num_points]
    gradients = [finite_gradient(score) for score in scores]
    found = torch.stack([gradient(points) for gradient in gradients])
    finite = found.isfinite().all(-1).all(0)
    if not finite.any():
        raise RuntimeError(
            f"minibatches' gradients are not finite at any of {len(points)} chains. Cure: check "
            "the data for NaN; a better start, a shorter step_size, or float64"
        )
    points, found = points[finite], found[:, finite]
    spent, curvature = len(gradients), 0.0
    for gradient in gradients[:2]:
        largest = largest_curvature(gradient, points, numbers)
        curvature = max(curvature, largest.nan_to_num().max().item())
        spent += 1 + numbers.power_iterations
    return Probe(curvature, gradient_noise(found).rms, spent)


def finite_gradient(score: Score) -> Gradient:
    """Return the gradient of a score, NaN where the log-density is not finite."""

    def gradient(points: Tensor) -> Tensor:
        log_density, found = score(points)
        return torch.where(log_density.isfinite().unsqueeze(-1), found, torch.nan)

    return gradient


class GradientNoise(NamedTuple):
    r"""How much minibatches' gradients differ, by their covariance :math:`\Sigma`: of the variances
    in its d principal directions ``mean`` is the mean, :math:`\operatorname{tr} \Sigma / d`, and
    ``rms`` the root mean square, :math:`\sqrt{\operatorname{tr} \Sigma^2 / d}`."""

    mean: float
    rms: float


def gradient_noise(gradients: Tensor) -> GradientNoise:
    r"""The noise in minibatches' gradients, from few of them.

    Differences of disjoint pairs have covariance :math:`2 \Sigma`, and the expected squared inner
    product of two independent ones is :math:`4 \operatorname{tr} \Sigma^2`: both traces are found
    without bias, in however many dimensions.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> noise = gradient_noise(torch.tensor([3.0, 1.0]) * torch.randn(16, 4000, 2))
    >>> f"{noise.mean:.1f}, {noise.rms:.1f}"  # of 9 and 1
    '5.0, 6.4'

    :param gradients: gradients of minibatches at the same points, ``(num_batches, num_points, d)``;
        at least four.
    """
    even = len(gradients) // 2 * 2
    differences = (gradients[:even:2] - gradients[1:even:2]).transpose(0, 1)
    products = differences @ differences.mT  # (num_points, pairs, pairs)
    num_points, pairs, dim = differences.shape
    squares = products.diagonal(dim1=-2, dim2=-1)
    mean = squares.mean().item() / (2 * dim)
    off_diagonal = (products.square().sum() - squares.square().sum()).item()
    trace_of_square = off_diagonal / (4 * num_points * pairs * (pairs - 1))
    return GradientNoise(mean, max(math.sqrt(trace_of_square / dim), mean))


def largest_curvature(
    gradient: Gradient, position: Tensor, policy: LangevinPolicy = DEFAULT.langevin
) -> Tensor:
    """The largest curvature of log-densities at points, by power iteration on differences of
    gradients.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> curvature = largest_curvature(lambda z: -z * torch.tensor([1.0, 9.0]), torch.zeros(1, 2))
    >>> curvature.round(decimals=2)
    tensor([9.])

    :param gradient: function from points ``(num_points, d)`` to gradients, the same in every call.
    :param position: ``(num_points, d)``.
    :param policy: the power iterations, with a gradient each, and the distance of the points whose
        gradients are compared.
    :returns: absolute values, ``(num_points,)``; power iteration comes from below.
    """
    here = gradient(position)
    direction = torch.randn_like(position)
    curvature = position.new_zeros(len(position))
    distance = policy.curvature_distance
    for _ in range(policy.power_iterations):
        direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        direction = (gradient(position + distance * direction) - here) / distance
        curvature = direction.norm(dim=-1)
    return curvature
