# SPDX-License-Identifier: Apache-2.0
"""When chains may stop: nothing drifts, and every chain has forgotten where it began."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.target import Target
from pyro_implicit.mcmc.policy import DEFAULT, StoppingPolicy
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = ["Drift", "Quantities", "Tracked", "Tracker", "drift", "pooled", "tracked"]


class Tracked(NamedTuple):
    """What the rule looks at: ``values``, ``(num_chains, num_quantities)``, the log-density last.

    ``group``, ``(num_quantities,)``, numbers the quantities of one unit from 0 on: the root mean
    square of their sds, so that of many predictions those that hardly vary do not matter.
    """

    values: Tensor
    group: Tensor


def tracked(parts: list[Tensor], log_density: Tensor) -> Tracked:
    """Quantities and the log-density side by side.

    **Example:**

    >>> tracked([torch.zeros(5, 1), torch.zeros(5, 2, 1)], torch.zeros(5)).group
    tensor([0, 1, 1, 2])

    :param parts: each of one unit, ``(num_chains, *shape)``.
    :param log_density: ``(num_chains,)``.
    """
    rows = [part.reshape(len(log_density), -1).to(log_density) for part in (*parts, log_density)]
    sizes = torch.tensor([row.shape[-1] for row in rows], device=log_density.device)
    groups = torch.arange(len(rows), device=log_density.device)
    return Tracked(torch.cat(rows, -1), groups.repeat_interleave(sizes))


class Drift(NamedTuple):
    """What a stretch of chains says; each number is of the worst quantity.

    ``mean`` is how far a mean may be off, in sds, as its drift says; ``sd`` the same of standard
    deviations, as a share; both with two standard errors of the drift. Of heavy tails, whose
    standard deviation varies more than a normal's in as many draws, the share is divided by how
    much, at most by 2. ``r_hat`` is the greatest R-hat of values and squares.
    """

    mean: float
    sd: float
    r_hat: float

    def is_settled(self, policy: StoppingPolicy = DEFAULT.stopping) -> bool:
        """Return whether all three numbers are small enough to stop."""
        return self.r_hat <= policy.max_r_hat and self.is_steady(policy)

    def is_steady(self, policy: StoppingPolicy = DEFAULT.stopping) -> bool:
        """Return whether nothing drifts, even if chains still depend on their starts."""
        is_still = max(self.mean, self.sd) <= policy.max_error
        return is_still and self.r_hat <= policy.max_steady_r_hat


def drift(
    powers: Tensor,
    group: Tensor,
    label: Tensor | None = None,
    policy: StoppingPolicy = DEFAULT.stopping,
) -> Drift:
    r"""Compare the second half of a stretch with the first, chain by chain.

    Each chain gives the difference of its two means. They are independent of the other chains', so
    that their standard error needs no autocorrelations. The variance about the common mean does
    the same for standard deviations.

    What a drift says of the error depends on how fast the chains forget. If as :math:`e^{-t}`, and
    the stretch is x long, a bias b at its beginning shifts the mean of the stretch by
    :math:`b (1 - e^{-x}) / x`, and the second half differs from the first by
    :math:`2 b (1 - e^{-x/2})^2 / x`. So the mean is off by

    .. math:: \frac{1 + e^{-x/2}}{2 (1 - e^{-x/2})}

    such differences: a half once the start is forgotten, more before. R-hat tells x:
    :math:`1 - \hat R^{-2}` is the share of the chains' means in the variance, and of a process that
    forgets in this way it is :math:`2 (x - 1 + e^{-x}) / x^2`.

    A slow drift hides in noise, and a chain that has not moved does not drift at all. So the chains
    must also have forgotten their starts: R-hat of the stretch, of values and of squares, asks each
    chain for five effective draws at least (:math:`\hat R^2 - 1 \approx 1 / n`), after which the
    memory of the start is gone. It is not asked for more, as of long chains, because noise is
    averaged over chains. Of many quantities one drifts far by noise alone: what the largest of so
    many normal variables is expected to have more than a single one, in standard errors, is taken
    off each drift. R-hat is the nested R-hat of reference 1 with a superchain for each chain:
    larger ones want common starts, which a guide's draws are not.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(200, 256, 3)
    >>> drift(torch.stack([x, x**2, x**4]), torch.arange(3)).is_settled()
    True
    >>> x = x + torch.linspace(0, 0.5, 200)[:, None, None]
    >>> drift(torch.stack([x, x**2, x**4]), torch.arange(3)).is_settled()
    False

    :param powers: means over successive batches of transitions of the quantities, their squares
        and their fourth powers, ``(3, num_batches, num_chains, num_quantities)``. Of the last of
        them, the log-density, the mean alone counts.
    :param group: see :class:`Tracked`.
    :param label: for chains of separate modes, the mode of each, ``(num_chains,)``: means,
        variances and R-hat are then those within modes.
    :param policy: the limits.
    :returns: that of the worst quantity.

    **References:**

    1. Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman (2022), *Nested R-hat:
       Assessing the Convergence of Markov Chain Monte Carlo When Running Many Short Chains*.
    """
    half = powers.shape[1] // 2
    values, squares, fourths = powers[:, -2 * half :]
    members = _members(label, values)
    mean = _within(values.mean(0), members)
    about_mean = squares - 2 * mean * values + mean.square()
    variance = about_mean.mean((0, 1))
    unit = pooled(variance, group)
    r_hat = _r_hat(values.mean(0), squares.mean(0), group, members)
    r_hat_of_squares = _r_hat(squares.mean(0), fourths.mean(0), group, members)
    mean_error = _memory(r_hat) * _bound(values, half, policy.errors) / unit.sqrt()
    sd_error = (
        0.5
        * _memory(torch.maximum(r_hat, r_hat_of_squares))
        * _bound(about_mean, half, policy.errors)
    )
    kurtosis = fourths.mean((0, 1)) / squares.mean((0, 1)).square().clamp(min=1e-12)
    sd_error = sd_error / ((kurtosis - 1) / 2).clamp(1, policy.max_allowance**2).sqrt()
    return Drift(
        mean_error.max().item(),
        (sd_error / unit)[:-1].max().item(),
        torch.cat([r_hat, r_hat_of_squares[:-1]]).max().item(),
    )


def _members(label: Tensor | None, values: Tensor) -> Tensor:
    """Which chain is of which mode, ``(num_modes, num_chains)``."""
    if label is None:
        return values.new_ones(1, values.shape[1])
    return (label.unique().unsqueeze(-1) == label).to(values)


def _within(values: Tensor, members: Tensor) -> Tensor:
    """Each chain's mean over all chains of its mode, ``(num_chains, num_quantities)``."""
    return members.mT @ (members @ values / members.sum(-1, keepdim=True))


def _memory(r_hat: Tensor) -> Tensor:
    """How many differences of its halves the mean of a stretch may be off."""
    share = (1 - r_hat**-2).clamp(1e-6, 1 - 1e-6)
    low, high = torch.full_like(share, 1e-6), torch.full_like(share, 1e7)
    for _ in range(60):  # bisection of what falls from 1 to 0
        x = (low * high).sqrt()
        is_low = 2 * (x + torch.expm1(-x)) / x.square() > share
        low, high = torch.where(is_low, x, low), torch.where(is_low, high, x)
    left = (-x / 2).exp()
    return 0.5 * (1 + left) / (1 - left)


def pooled(values: Tensor, group: Tensor) -> Tensor:
    """Each quantity's mean over its group, ``(num_quantities,)``, and 1 instead of 0."""
    zeros = values.new_zeros(len(values))
    total = zeros.index_add(0, group, values)
    mean = (total / zeros.index_add(0, group, torch.ones_like(values)).clamp(min=1))[group]
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def _bound(values: Tensor, half: int, errors: float) -> Tensor:
    """The drift of each quantity's mean, plus its errors: ``(num_quantities,)``."""
    differences = values[half:].mean(0) - values[:half].mean(0)
    error = differences.std(0) / math.sqrt(len(differences))
    by_noise = _largest(differences.shape[-1]) - _largest(1)
    return (differences.mean(0).abs() - by_noise * error).clamp(min=0) + errors * error


def _largest(count: int) -> float:
    """What the largest of so many standard normal variables is expected to be, about, unsigned."""
    return NormalDist().inv_cdf(1 - 0.2125 / count)


def _r_hat(means: Tensor, mean_squares: Tensor, group: Tensor, members: Tensor) -> Tensor:
    """Of chains that are not split, because their halves are compared already.

    :param means: of each chain, as ``mean_squares``, ``(num_chains, num_quantities)``.
    """
    within = (mean_squares - means.square()).mean(0)
    freedom = max(1, members.shape[1] - len(members))
    between = (means - _within(means, members)).square().sum(0) / freedom
    constant = between + within.clamp(min=0) == 0
    ratio = torch.where(constant, 0.0, between) / pooled(within.clamp(min=0), group)
    return (1 + ratio).sqrt()


Quantities = Callable[[dict[str, Tensor]], Tensor | dict[str, Tensor]]


class Tracker:
    """The tracked quantities of latents ``(num_chains, d)`` and log-densities ``(num_chains,)``.

    **Example:**

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> target = Target(lambda: pyro.sample("x", dist.LogNormal(0.0, 1.0)))
    >>> tracker = Tracker(target, lambda draws: draws["x"].log())
    >>> tracker(torch.ones(2, 1), torch.zeros(2)).values.round(decimals=3)
    tensor([[1., 0.],
            [1., 0.]])

    :param target: the posterior of the latents.
    :param quantities: of constrained draws by site; by default the latents.
    """

    def __init__(self, target: Target, quantities: Quantities | None) -> None:
        self._target, self._quantities = target, quantities
        self._warned = False

    def __call__(self, latent: Tensor, log_density: Tensor) -> Tracked:
        if self._quantities is None:
            return tracked(list(latent.unbind(-1)), log_density)
        found = self._quantities(self._target.constrain(latent))
        _check_shapes(found, len(latent))
        result = tracked(pytree.tree_leaves(found), log_density)
        lost = ~result.values[:, :-1].isfinite().all(-1)
        if lost.any() and not self._warned:
            self._warned = True
            warn_user(
                f"the quantities are not finite in {int(lost.sum())} of {len(latent)} chains: "
                "whether they drift cannot be told, and the chains may go on until their budget "
                "ends. Cure: functions that are finite at all draws of the posterior"
            )
        return result

    def try_at(self, latent: Tensor) -> None:
        """Check the quantities' shapes, before the chains walk.

        :raises ValueError: for values that are not one of each chain.
        """
        if self._quantities is None:
            return
        found: Any = ()
        with suppress(*IMPOSSIBLE):  # of starts that are far from the posterior
            found = self._quantities(self._target.constrain(latent))
        _check_shapes(found, len(latent))


def _check_shapes(found: Any, num_chains: int) -> None:
    for path, value in pytree.tree_leaves_with_path(found):
        if isinstance(value, Tensor) and value.shape[:1] == (num_chains,):
            continue
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"quantities{pytree.keystr(path)} gave {shape} of {num_chains} chains. Cure: a "
            "function of draws by site, (num_chains, *site_shape), that gives one value for each "
            "chain, first: no mean over them"
        )
