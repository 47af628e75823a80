# SPDX-License-Identifier: Apache-2.0
"""Parameters of differential equations, solved with fixed steps.

The number of steps is the smallest for which the logarithm of every solution is accurate to a
thousandth of the noise over the whole posterior.
"""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

__all__ = [
    "PositiveNormal",
    "log_concentrations",
    "log_populations",
    "lotka_volterra",
    "one_compartment",
]

# For extreme parameters the solutions overflow. Their likelihood is practically zero, but must be
# finite.
_MAX_LOG = 15.0


class PositiveNormal(dist.Normal):
    """A normal distribution restricted to the positive numbers."""

    support = constraints.positive

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value) - self._mass().log()

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        shape = self._extended_shape(sample_shape)
        uniform = torch.rand(shape, dtype=self.loc.dtype, device=self.loc.device)
        return self.icdf(1 - uniform * self._mass())

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        return self.rsample(sample_shape).detach()

    def _mass(self) -> Tensor:
        """Probability of a positive value under the unrestricted distribution."""
        return torch.special.ndtr(self.loc / self.scale)


# The first half of a symmetric step: the fractions by which prey and predators move.
_PREY = (0.0792036964311957, 0.353172906049774, -0.0420650803577195)
_PREDATORS = (0.209515106613362, -0.143851773179818)


def log_populations(theta: Tensor, log_start: Tensor, times: Tensor, steps: int = 2) -> Tensor:
    r"""Log numbers u of prey and v of predators from time 0 on.

    .. math::
        \dot u = \theta_1 - \theta_2 e^v, \qquad \dot v = -\theta_3 + \theta_4 e^u

    Each right-hand side contains only the other unknown, so each can be moved exactly while the
    other is fixed: the symmetric fourth-order splitting S6 of Blanes and Moan takes thirteen moves
    per step.

    :param theta: shape ``(..., 4)``.
    :param log_start: shape ``(..., 2)``.
    :param times: increasing, shape ``(num_times,)``.
    :param steps: from one time to the next.
    :returns: shape ``(..., num_times, 2)``.

    **References:**

    [1] `Practical symplectic partitioned Runge-Kutta and Runge-Kutta-Nystrom methods`, S. Blanes
    and P. C. Moan, Journal of Computational and Applied Mathematics 142, 2002, table 2.
    """
    middle_prey, middle_predators = 1 - 2 * sum(_PREY), 0.5 - sum(_PREDATORS)
    prey = [*_PREY, middle_prey, *_PREY[::-1]]
    predators = [*_PREDATORS, middle_predators, middle_predators, *_PREDATORS[::-1]]
    fractions = [*(f for pair in zip(prey, predators, strict=False) for f in pair), prey[-1]]

    dt = torch.diff(times, prepend=torch.zeros_like(times[:1])) / steps
    signed = theta * theta.new_tensor([1.0, -1.0, -1.0, 1.0])
    spans = dt[:, None] * dt.new_tensor(fractions)
    # By time and move: the growth of the moving population and its response to the other.
    growth = torch.stack([signed[..., 0:4:2]] * 7, dim=-2).flatten(-2)[..., :13]
    response = torch.stack([signed[..., 1:4:2]] * 7, dim=-2).flatten(-2)[..., :13]
    growth = (growth.unsqueeze(-2) * spans).flatten(-2).unbind(-1)
    response = (response.unsqueeze(-2) * spans).flatten(-2).unbind(-1)

    moving, waiting = log_start.unbind(-1)
    path = []
    for interval in range(len(times)):
        moves = range(interval * 13, interval * 13 + 13)
        for _ in range(steps):
            for k in moves:
                pull = waiting.clamp(max=_MAX_LOG).exp()
                moving, waiting = waiting, torch.addcmul(moving + growth[k], response[k], pull)
            moving, waiting = waiting, moving  # the prey moves first and last
        path.append(torch.stack([moving, waiting], dim=-1))
    return torch.stack(path, dim=-2)


def lotka_volterra(times: Tensor, y_start: Tensor, y: Tensor) -> None:
    """Hares and lynxes: two populations counted each year, with lognormal errors."""
    location, scale = y.new_tensor([1.0, 0.05, 1.0, 0.05]), y.new_tensor([0.5, 0.05, 0.5, 0.05])
    theta = pyro.sample("theta", PositiveNormal(location, scale).to_event(1))
    start = dist.LogNormal(torch.full_like(y_start, 10.0).log(), 1.0).to_event(1)
    z_init = pyro.sample("z_init", start)
    sigma = pyro.sample("sigma", dist.LogNormal(-torch.ones_like(y_start), 1.0).to_event(1))
    path = log_populations(theta, z_init.log(), times)
    pyro.sample("y_init", dist.LogNormal(z_init.log(), sigma).to_event(1), obs=y_start)
    pyro.sample("y", dist.LogNormal(path, sigma.unsqueeze(-2)).to_event(2), obs=y)


def log_concentrations(
    k_a: Tensor, K_m: Tensor, V_m: Tensor, times: Tensor, dose: Tensor, steps: int = 6
) -> Tensor:
    r"""Log concentration C of a drug taken at time 0: absorbed at a rate, eliminated by enzymes.

    .. math:: \dot C = k_a D e^{-k_a t} - \frac{V_m C}{K_m + C}, \qquad C(0) = 0

    The absorbed amount has a closed form, so only the eliminated amount is integrated, by the
    classical Runge-Kutta method; the steps are short while C rises past a small :math:`K_m`.

    :param k_a: like ``K_m`` and ``V_m`` (per volume) of shape ``(...,)``.
    :param times: positive, increasing, shape ``(num_times,)``.
    :param dose: D, per volume.
    :param steps: before the first time; after it one step from each time to the next.
    :returns: shape ``(..., num_times)``.
    """
    early = times[0] * torch.linspace(0, 1, steps + 1, dtype=times.dtype, device=times.device) ** 3
    grid = torch.cat([early, times[1:]])
    halves = torch.stack([grid[:-1], (grid[:-1] + grid[1:]) / 2], dim=-1).flatten()
    halves = torch.cat([halves, grid[-1:]])
    absorbed = (-dose * torch.expm1(-k_a.unsqueeze(-1) * halves)).unbind(-1)

    def rate(absorbed: Tensor, eliminated: Tensor) -> Tensor:
        concentration = (absorbed - eliminated).clamp(min=0)
        return V_m * concentration / (K_m + concentration)

    eliminated, path = torch.zeros_like(k_a), []
    for step, dt in enumerate(torch.diff(grid)):
        start, middle, end = absorbed[2 * step : 2 * step + 3]
        k1 = rate(start, eliminated)
        k2 = rate(middle, eliminated + dt / 2 * k1)
        k3 = rate(middle, eliminated + dt / 2 * k2)
        k4 = rate(end, eliminated + dt * k3)
        eliminated = eliminated + dt / 6 * (k1 + 2 * (k2 + k3) + k4)
        path.append(end - eliminated)
    return torch.stack(path[steps - 1 :], dim=-1).clamp(min=1e-30).log()


def one_compartment(times: Tensor, observed: Tensor, dose: Tensor, volume: Tensor) -> None:
    """A drug's concentration in one compartment, with lognormal errors."""
    names = ("k_a", "K_m", "V_m", "sigma")
    k_a, K_m, V_m, sigma = (
        pyro.sample(name, dist.HalfCauchy(torch.ones_like(dose))) for name in names
    )
    loc = log_concentrations(k_a, K_m, V_m / volume, times, dose / volume)
    pyro.sample("C_hat", dist.LogNormal(loc, sigma.unsqueeze(-1)).to_event(1), obs=observed)
