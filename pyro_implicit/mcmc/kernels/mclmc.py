# SPDX-License-Identifier: Apache-2.0
"""Microcanonical Langevin Monte Carlo, in which each chain has its own step size."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.mcmc.policy import DEFAULT, ChainPolicy, MCLMCPolicy
from pyro_implicit.ops.ensemble_hmc import Score, chosen

__all__ = [
    "Info",
    "MCLMCTuning",
    "Settings",
    "State",
    "adaptation",
    "gradients_of",
    "init",
    "path",
    "step",
]


class State(NamedTuple):
    """Position, direction of motion in scaled coordinates (a unit vector) and gradient, each
    ``(num_chains, d)``, and the log-density ``(num_chains,)``."""

    position: Tensor
    direction: Tensor
    log_density: Tensor
    gradient: Tensor


class Settings(NamedTuple):
    """Step size and decoherence length of each chain, ``(num_chains, 1)``, the steps of a
    transition, the energy error above which a transition is undone, and the diagonal
    preconditioner: chains move in coordinates ``z / scale``, with scales ``(num_chains, d)``."""

    step_size: Tensor
    length: Tensor
    num_steps: int
    max_error: float = math.inf
    scale: Tensor | float = 1.0


class Info(NamedTuple):
    """Mean squared energy error of a step for each dimension, ``(num_chains,)``, infinite for
    chains that were put back; and the gradients of each chain."""

    energy_error: Tensor
    num_gradients: int

    @property
    def acceptance(self) -> Tensor:
        """1 for chains that moved and 0 for chains that were put back, ``(num_chains,)``."""
        return self.energy_error.isfinite().to(self.energy_error)


def init(position: Tensor, score: Score) -> State:
    """Start chains at positions ``(num_chains, d)`` in random directions."""
    return State(position, _unit(torch.randn_like(position)), *score(position))


def step(state: State, score: Score, settings: Settings) -> tuple[State, Info]:
    r"""Make ``num_steps`` steps of isokinetic Langevin dynamics, without a Metropolis step.

    The direction :math:`u` has length 1. With :math:`g = \nabla \log p(z)`, step size h and
    decoherence length L, the dynamics in d dimensions is

    .. math:: dz = u\, dt, \quad
        du = (I - u u^\top) \left(\tfrac{1}{d - 1} g\, dt + \sqrt{\tfrac{2}{L d}}\, dW\right).

    A step is a kick over time :math:`\lambda h`, half a drift, a kick over
    :math:`(1 - 2 \lambda) h`, half a drift, a kick over :math:`\lambda h`, and a partial
    refreshment :math:`u' \propto u + \nu \xi` with :math:`\nu^2 = (e^{2 h / L} - 1) / d`. It takes
    two gradients; :math:`\lambda = 0.193` has the least error of third order. A kick over time t,
    with :math:`e = g / |g|`, :math:`\delta = t |g| / (d - 1)` and
    :math:`c = \cosh \delta + e^\top u \sinh \delta`, is exact:

    .. math:: u' = \frac{u + e\, (\sinh \delta + e^\top u\, (\cosh \delta - 1))}{c},
        \quad \Delta K = (d - 1) \log c.

    :math:`\Delta K - \Delta \log p` is the energy error, of order :math:`h^3` in a step. Draws are
    biased by the step size: the error of variances vanishes with the energy error's variance.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> score = lambda z: (-0.5 * z.square().sum(-1), -z)
    >>> state, size = init(torch.randn(1000, 10), score), torch.full((1000, 1), 1.0)
    >>> for _ in range(20):
    ...     state, info = step(state, score, Settings(size, 3 * size, num_steps=4))
    >>> f"{state.position.var():.1f}", info.num_gradients
    ('1.0', 8)

    :param state: positions and directions.
    :param score: log-densities and gradients of points ``(num_chains, d)``.
    :param settings: step sizes and lengths.
    :returns: the next state and the info. A chain that leaves the finite numbers, or whose energy
        error is above ``max_error``, goes on from where the transition began, in a new direction.

    **References:**

    1. Robnik, De Luca, Silverstein and Seljak (2023), *Microcanonical Hamiltonian Monte Carlo*,
       JMLR 24, section 3.
    2. Robnik and Seljak (2024), *Fluctuation without dissipation: Microcanonical Langevin Monte
       Carlo*.
    3. McLachlan (1995), *On the Numerical Integration of Ordinary Differential Equations by
       Symmetric Composition Methods*, on :math:`\lambda`.
    """
    after, squares, _ = path(state, score, settings)
    error = squares / (settings.num_steps * state.position.shape[-1])
    is_finite = (error < settings.max_error) & after.gradient.isfinite().all(-1)
    back = state._replace(direction=_unit(torch.randn_like(state.direction)))
    after = after._replace(direction=refreshed(after.direction, settings))
    kept = chosen(is_finite, after, back)
    return kept, Info(error.masked_fill(~is_finite, math.inf), gradients_of(settings))


def path(state: State, score: Score, settings: Settings) -> tuple[State, Tensor, Tensor]:
    """Follow the dynamics of :func:`step` for ``num_steps`` steps, refreshed between them.

    Its reverse is a path of the same kind; a refreshment at one end only would break this.

    :returns: the end, and the sums of the squared and of the signed energy errors of the steps,
        ``(num_chains,)``; not finite in chains that leave the finite numbers.
    """
    size, scale = settings.step_size, settings.scale
    position, direction, log_density, gradient = state
    squares = total = torch.zeros_like(log_density)
    outer = 0.1931833275037836  # lambda, a mathematical constant
    for number in range(settings.num_steps):
        if number:
            direction = refreshed(direction, settings)
        before = log_density
        direction, first = _kick(direction, scale * gradient, outer * size)
        position = position + size / 2 * scale * direction
        middle = scale * score(position)[1]
        direction, second = _kick(direction, middle, (1 - 2 * outer) * size)
        position = position + size / 2 * scale * direction
        log_density, gradient = score(position)
        direction, third = _kick(direction, scale * gradient, outer * size)
        error = first + second + third + before - log_density
        squares, total = squares + error.square(), total + error
    return State(position, direction, log_density, gradient), squares, total


def refreshed(direction: Tensor, settings: Settings) -> Tensor:
    """Return directions ``(num_chains, d)`` after the partial refreshment of one step."""
    variance = torch.expm1(2 * settings.step_size / settings.length) / direction.shape[-1]
    return _unit(direction + variance.sqrt() * torch.randn_like(direction))


def gradients_of(settings: Settings) -> int:
    """Return the gradients of a path: two for each step."""
    return 2 * settings.num_steps


def _kick(direction: Tensor, gradient: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Turn directions towards gradients; return them, and the changes of kinetic energy."""
    dim = max(direction.shape[-1] - 1, 1)
    norm = gradient.norm(dim=-1, keepdim=True)
    force = gradient / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    angle = time * norm / dim
    decay = (-angle).exp()  # the formulas over exp(angle) / 2, so that nothing overflows
    along = (force * direction).sum(-1, keepdim=True)
    turned = 2 * decay * direction + force * (1 - decay) * (1 + decay + along * (1 - decay))
    energy = angle - math.log(2) + (1 + along + (1 - along) * decay.square()).log()
    return _unit(turned), dim * energy.squeeze(-1)


def _unit(direction: Tensor) -> Tensor:
    return direction / direction.norm(dim=-1, keepdim=True)


class _Moments(NamedTuple):
    """Sums over states: of positions, of their squares, and of squared gradients."""

    number: int
    total: Tensor
    squares: Tensor
    forces: Tensor

    @classmethod
    def of(cls, state: State) -> _Moments:
        return cls(1, state.position, state.position.square(), state.gradient.square())

    def __add__(self, other: tuple) -> _Moments:
        return _Moments(*(one + two for one, two in zip(self, other, strict=True)))

    @property
    def variance(self) -> Tensor:
        mean = self.total / self.number
        return (self.squares / self.number - mean.square()).clamp(min=0)

    def scale(self, limit: float) -> Tensor:
        """Return scales of geometric mean 1, at most ``limit`` from it."""
        ratio = self.variance * self.number / self.forces
        logs = ratio.clamp(min=torch.finfo(ratio.dtype).tiny).log() / 4
        logs = logs.nan_to_num()
        return (logs - logs.mean(-1, keepdim=True)).exp().clamp(1 / limit, limit)


@dataclass(frozen=True)
class MCLMCTuning:
    r"""Step sizes and decoherence lengths of chains that learn nothing from each other, as a value.

    The mean squared energy error of a step, for each dimension, grows as :math:`c h^6`. Each chain
    estimates its own :math:`c` by a running mean and takes the step size at which the error is
    ``energy_error``. A chain that was put back halves its step size, after the warm-up until it
    moves again. In windows of the warm-up that double, each chain learns a diagonal preconditioner
    :math:`s_i = (\sigma_i^2 / \mathrm{E} g_i^2)^{1/4}` from the variances of its positions and its
    squared gradients; for a Gaussian, these are its standard deviations. Afterwards, the length is
    :math:`L = \sqrt{\sum_i \sigma_i^2 / s_i^2}`.

    :param policy: the numbers of the adaptation.
    :param step_sizes: of the chains, ``(num_chains, 1)``.
    :param lengths: decoherence lengths of the chains, ``(num_chains, 1)``.
    :param energy_error: the target; it falls during the warm-up.
    :param tuned: the step sizes at the end of the warm-up, which are no longer exceeded.
    :param coefficient: the running mean of :math:`c`, and the sum of its weights.
    :param moments: of the present window of the warm-up.
    :param scale: the preconditioner, ``(num_chains, d)``.
    :param window: transitions after which the preconditioner is learnt next.

    **References:**

    1. Robnik, De Luca, Silverstein and Seljak (2023), *Microcanonical Hamiltonian Monte Carlo*,
       section 4.
    2. Sommer, Robnik, Nozadze, Seljak and Rügamer (2025), *Microcanonical Langevin Ensembles:
       Advancing the Sampling of Bayesian Neural Networks*, section 3.
    3. Seyboldt, Carlson and Carpenter (2026), *Preconditioning Hamiltonian Monte Carlo by
       Minimizing Fisher Divergence*, arXiv:2603.18845, on :math:`s_i`.
    """

    policy: MCLMCPolicy = field(default_factory=MCLMCPolicy)
    step_sizes: Tensor | None = None
    lengths: Tensor | None = None
    energy_error: float = DEFAULT.mclmc.first_energy_error
    tuned: Tensor | None = None
    coefficient: tuple[Tensor, Tensor] | None = None
    moments: _Moments | None = None
    scale: Tensor | float = 1.0
    window: int = DEFAULT.mclmc.first_scale_window

    is_stiff: ClassVar[bool] = False  # each chain has its own step size in any case

    def settings(self, state: State) -> Settings:
        """Return the settings of the next transition."""
        sizes, lengths = self.step_sizes, self.lengths
        if sizes is None or lengths is None:
            dim = state.position.shape[-1]
            sizes = lengths = torch.full_like(state.position[:, :1], math.sqrt(dim))
        limits = self.policy
        return Settings(sizes, lengths, limits.num_steps, limits.max_energy_error, self.scale)

    def update(self, state: State, info: Info, settings: Settings) -> MCLMCTuning:
        """Learn from a transition."""
        error = info.energy_error.unsqueeze(-1)
        is_finite, size = error.isfinite(), settings.step_size
        if self.tuned is not None:
            longer = torch.minimum(2 * size, self.tuned)
            return replace(self, step_sizes=torch.where(is_finite, longer, size / 2))
        found = torch.where(is_finite, error, 0.0) / size**6
        total, weight = self.coefficient or (torch.zeros_like(size), torch.zeros_like(size))
        total = torch.where(is_finite, self.policy.memory * total + found, total)
        weight = torch.where(is_finite, self.policy.memory * weight + 1, weight)
        wanted = (self.energy_error * weight / total.clamp(min=1e-30)) ** (1 / 6)
        wanted = torch.where(is_finite, wanted, 0.0).clamp(min=size / 2, max=2 * size)
        moments = _Moments.of(state) + (self.moments or (0, 0, 0, 0))
        return replace(self, step_sizes=wanted, coefficient=(total, weight), moments=moments)

    def restart(self, score: Score, state: State) -> tuple[State, MCLMCTuning, int]:
        """Find first step sizes by doubling and halving.

        :returns: the state, the adaptation, and the gradients taken.
        """
        first = self.settings(state)
        found, gradients = replace(self, step_sizes=first.step_size, lengths=first.length), 0
        for _ in range(self.policy.max_doublings):
            settings = found.settings(state)._replace(num_steps=1)
            state, info = step(state, score, settings)
            found = replace(found.update(state, info, settings), coefficient=None, moments=None)
            gradients += info.num_gradients
            change = found.settings(state).step_size / settings.step_size
            if (change.log().abs() < math.log(1.5)).all():
                break
        return state, found, gradients

    def at(self, share: float) -> MCLMCTuning:
        """Learn from the warm-up.

        :param share: of the warm-up that is over.
        """
        limits, moments = self.policy, self.moments
        first, last = limits.first_energy_error, limits.energy_error
        found = replace(self, energy_error=first * (last / first) ** min(share, 1.0))
        if moments is None or self.step_sizes is None:
            return found
        if share <= limits.scale_share:
            if moments.number < self.window:
                return found
            return replace(
                found,
                scale=moments.scale(limits.max_scale),
                window=2 * self.window,
                step_sizes=limits.restart_factor * self.step_sizes,
                coefficient=None,
                moments=None,
            )
        widths = moments.variance.sqrt() / self.scale
        lengths = widths.square().sum(-1, keepdim=True).sqrt()
        return replace(found, lengths=lengths.clamp(min=self.step_sizes))

    def frozen(self) -> MCLMCTuning:
        """Stop adapting."""
        return replace(self, tuned=self.step_sizes)

    @property
    def max_gradients(self) -> int:
        """The gradients of a transition."""
        return 2 * self.policy.num_steps

    @property
    def step_size(self) -> float:
        """The median of the chains' step sizes."""
        return math.nan if self.step_sizes is None else self.step_sizes.median().item()

    @property
    def trajectory_length(self) -> float:
        """The median of the chains' decoherence lengths."""
        return math.nan if self.lengths is None else self.lengths.median().item()


def adaptation(policy: ChainPolicy = DEFAULT, max_gradients: int = 0) -> MCLMCTuning:
    """Return the first adaptation of a run."""
    limits = policy.mclmc
    return MCLMCTuning(
        limits, energy_error=limits.first_energy_error, window=limits.first_scale_window
    )
