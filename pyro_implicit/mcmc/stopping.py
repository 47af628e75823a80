# SPDX-License-Identifier: Apache-2.0
"""The stopping rule: nothing drifts, and every chain has forgotten its start."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.symmetry import Symmetries
from pyro_implicit.density.target import Target
from pyro_implicit.mcmc.policy import DEFAULT, StoppingPolicy
from pyro_implicit.runtime.messages import warn_user
from pyro_implicit.runtime.trees import leaves_by_path, leaves_of

__all__ = [
    "Drift",
    "OutOfTime",
    "Quantities",
    "Tracked",
    "Tracker",
    "drift",
    "open_errors",
    "pooled",
    "slowest",
    "tracked",
]


class OutOfTime(Exception):
    """Annealing has not reached the posterior in time."""


class Tracked(NamedTuple):
    """The input of the rule: ``values``, ``(num_chains, num_quantities)``, the log-density last.

    ``group``, ``(num_quantities,)``, numbers groups of quantities from 0 on. All quantities of a
    group have one unit, the root mean square of their sds, so that predictions that hardly vary do
    not matter.
    """

    values: Tensor
    group: Tensor


def tracked(parts: list[Tensor], log_density: Tensor) -> Tracked:
    """Join quantities and the log-density.

    **Example:**

    >>> tracked([torch.zeros(5, 1), torch.zeros(5, 2, 1)], torch.zeros(5)).group
    tensor([0, 1, 1, 2])

    :param parts: groups of quantities, ``(num_chains, *shape)``.
    :param log_density: ``(num_chains,)``.
    """
    rows = [part.reshape(len(log_density), -1).to(log_density) for part in (*parts, log_density)]
    sizes = torch.tensor([row.shape[-1] for row in rows], device=log_density.device)
    groups = torch.arange(len(rows), device=log_density.device)
    return Tracked(torch.cat(rows, -1), groups.repeat_interleave(sizes))


class Drift(NamedTuple):
    """The errors of a stretch of chains, for the worst quantity.

    ``mean`` is the error of a mean in sds, as estimated from its drift; ``sd`` is the error of a
    standard deviation as a share. Both include two standard errors of the drift. The standard
    deviation of a heavy-tailed quantity varies more than that of a normal one; its error is divided
    by that ratio, at most by 2. ``r_hat`` is the largest R-hat of values and squares, of
    ``num_chains`` chains. ``is_annealed`` marks standard errors of annealed particles, which know
    nothing of regions that no particle has found, and ``failed`` is the share of trajectories that
    failed, if so many that regions may be missing. ``slowest`` names the latent variable that mixes
    worst, if that is known.
    """

    mean: float
    sd: float
    r_hat: float
    num_chains: int = DEFAULT.num_chains
    is_annealed: bool = False
    slowest: str = ""
    failed: float = 0.0

    def is_settled(self, policy: StoppingPolicy = DEFAULT.stopping) -> bool:
        """Return whether all three numbers are small enough to stop."""
        return self.r_hat <= policy.max_r_hat and self.is_steady(policy)

    def is_steady(self, policy: StoppingPolicy = DEFAULT.stopping) -> bool:
        """Return whether nothing drifts, even if chains still depend on their starts."""
        is_still = max(self.mean, self.sd) <= policy.max_error
        return is_still and self.r_hat <= policy.max_steady_r_hat

    def is_usable(self, policy: StoppingPolicy = DEFAULT.stopping) -> bool:
        """Return whether the errors are small enough for a result, though not to stop early."""
        is_small = max(self.stated()[:2]) <= policy.max_usable_error
        return is_small and self.num_effective >= policy.least_usable

    @property
    def num_effective(self) -> float:
        """The number of independent draws that the chains are worth, by R-hat."""
        return self.num_chains / max(self.r_hat**2 - 1, 1e-9)

    def stated(self) -> Drift:
        """Return bounds that are never smaller than the errors that R-hat leaves open."""
        mean, sd = open_errors(self.r_hat)
        return self._replace(mean=max(self.mean, mean), sd=max(self.sd, sd))

    def __str__(self) -> str:
        if self.is_annealed:  # R-hat is only that of chains with these errors
            last = f"as of {self.num_effective:.0f} independent draws"
        else:
            last = f"R-hat {self.r_hat:.3f}" + f" (slowest: {self.slowest})" * bool(self.slowest)
        if self.mean >= 1:  # `open_errors` knows nothing beyond the distance of the starts
            return f"means may be off by 1 sd or more, {last}"
        unless = ", or more if annealing missed a region" if self.is_annealed else ""
        if self.failed:
            unless = f", or more where trajectories fail ({self.failed:.1%} of them)"
        return f"means may be off by {self.mean:.2f} sd, sds by {self.sd:.1%}{unless}, {last}"


def drift(powers: Tensor, group: Tensor, policy: StoppingPolicy = DEFAULT.stopping) -> Drift:
    r"""Compare the second half of a stretch with the first, chain by chain.

    Each chain gives the difference of its two means. The differences of chains are independent, so
    their standard error needs no autocorrelations. The variance about the common mean gives the
    same for standard deviations.

    The error that a drift implies depends on how fast the chains forget. If they forget as
    :math:`e^{-t}` and the stretch has length x, a bias b at its beginning shifts the mean of the
    stretch by :math:`b (1 - e^{-x}) / x`, and the second half differs from the first by
    :math:`2 b (1 - e^{-x/2})^2 / x`. So the error of the mean is

    .. math:: \frac{1 + e^{-x/2}}{2 (1 - e^{-x/2})}

    such differences: a half once the start is forgotten, more before. R-hat gives x:
    :math:`1 - \hat R^{-2}` is the share of the chains' means in the variance, and for a process
    that forgets in this way it is :math:`2 (x - 1 + e^{-x}) / x^2`.

    A slow drift hides in noise, and a chain that has not moved does not drift at all. So the chains
    must also have forgotten their starts: R-hat of the stretch, for values and for squares,
    requires at least five effective draws of each chain (:math:`\hat R^2 - 1 \approx 1 / n`), after
    which the memory of the start is gone. Long chains need a stricter limit; here noise is averaged
    over chains. Among many quantities, one drifts far by noise alone. So each drift is reduced by
    the excess of the expected maximum of as many normal variables over that of one, in standard
    errors. R-hat is the nested R-hat of reference 1 with a superchain for each chain, because
    larger superchains need common starts, which a guide's draws are not.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(200, 256, 3)
    >>> drift(torch.stack([x, x**2, x**4]), torch.arange(3)).is_settled()
    True
    >>> x = x + torch.linspace(0, 0.5, 200)[:, None, None]
    >>> drift(torch.stack([x, x**2, x**4]), torch.arange(3)).is_settled()
    False

    :param powers: means over successive batches of transitions of the quantities, their squares
        and their fourth powers, ``(3, num_batches, num_chains, num_quantities)``. For the last
        quantity, the log-density, only the mean counts. The quantities must be centred near their
        mean: ``History`` subtracts the mean of the first transition.
    :param group: see ``Tracked``.
    :param policy: the limits.
    :returns: the errors of the worst quantity.

    **References:**

    1. Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman (2022), *Nested R-hat:
       Assessing the Convergence of Markov Chain Monte Carlo When Running Many Short Chains*.
    """
    half = powers.shape[1] // 2
    values, squares, fourths = powers[:, -2 * half :]
    mean = values.mean((0, 1))
    about_mean = squares - 2 * mean * values + mean.square()
    variance = about_mean.mean((0, 1))
    unit = pooled(variance, group)
    r_hat = _r_hat(values.mean(0), squares.mean(0), group)
    r_hat_of_squares = _r_hat(squares.mean(0), fourths.mean(0), group)
    mean_error = _memory(r_hat) * _bound(values, half, policy.errors) / unit.sqrt()
    sd_error = (
        0.5
        * _memory(torch.maximum(r_hat, r_hat_of_squares))
        * _bound(about_mean, half, policy.errors)
    )
    # About zero, not the mean, because third powers are not stored. In 32 runs with skewed and
    # heavy tails the mean moved by at most 0.3 sds, and central moments led to the same decisions.
    kurtosis = fourths.mean((0, 1)) / squares.mean((0, 1)).square().clamp(min=1e-12)
    sd_error = sd_error / ((kurtosis - 1) / 2).clamp(1, policy.max_allowance**2).sqrt()
    return Drift(
        mean_error.max().item(),
        (sd_error / unit)[:-1].max().item(),
        torch.cat([r_hat, r_hat_of_squares[:-1]]).max().item(),
        powers.shape[2],
    )


def open_errors(r_hat: float) -> tuple[float, float]:
    r"""Return the errors of a mean, in sds, and of an sd, as a share, that R-hat leaves open.

    Chains that spread from one point are too narrow and drift slowly, so that neither their
    differences nor their drift show the error. Assume that they start one sd from the mean and
    forget as :math:`e^{-t}`, and that the stretch is the last two thirds of a run, of length x.
    Then the stretch keeps the share :math:`m = e^{-x/2} (1 - e^{-x}) / x` of the mean's error, its
    variance is :math:`v = 1 - e^{-x} (1 - e^{-2x}) / 2x` of the right one, and

    .. math:: \hat R^2 = \frac{v}{v - 2 (x - 1 + e^{-x}) / x^2 + m^2},

    which falls from 6 at :math:`x = 0` (chains that diffuse freely) to 1.

    **Example:**

    >>> ["{:.2f} {:.2f}".format(*open_errors(r_hat)) for r_hat in (1.1, 1.64, 2.3, 3.0)]
    ['0.00 0.00', '0.25 0.04', '0.81 0.42', '1.00 1.00']
    """

    def errors(x: float) -> tuple[float, float, float]:
        mean = -math.exp(-x / 2) * math.expm1(-x) / x
        variance = 1 + math.exp(-x) * math.expm1(-2 * x) / (2 * x)
        within = variance - 2 * (x + math.expm1(-x)) / x**2 + mean**2
        return variance / within, mean, 1 - math.sqrt(variance)

    low, high = 1e-3, 1e4
    if r_hat**2 >= errors(low)[0]:
        return 1.0, 1.0
    for _ in range(60):  # bisection of a function that falls from 6 to 1
        x = math.sqrt(low * high)
        low, high = (x, high) if errors(x)[0] > r_hat**2 else (low, x)
    return errors(low)[1:]


def slowest(draws: Tensor) -> int:
    """Return which coordinate has the largest R-hat, of its values or their squares.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> steady, apart = torch.randn(2, 64, 10)
    >>> slowest(torch.stack([steady, apart + 5 * torch.randn(64, 1)], -1))
    1

    :param draws: ``(num_chains, num_draws, d)``.
    """
    squares = (draws - draws.mean((0, 1))).square()
    ratios = [one.mean(1).var(0) / one.var(1).mean(0) for one in (draws, squares)]
    return int(torch.stack(ratios).nan_to_num(0.0).amax(0).argmax())


def _memory(r_hat: Tensor) -> Tensor:
    """Return the error of the mean of a stretch, in differences of its halves."""
    share = (1 - r_hat**-2).clamp(1e-6, 1 - 1e-6)
    low, high = torch.full_like(share, 1e-6), torch.full_like(share, 1e7)
    for _ in range(60):  # bisection of a function that falls from 1 to 0
        x = (low * high).sqrt()
        is_low = 2 * (x + torch.expm1(-x)) / x.square() > share
        low, high = torch.where(is_low, x, low), torch.where(is_low, high, x)
    left = (-x / 2).exp()
    return 0.5 * (1 + left) / (1 - left)


def pooled(values: Tensor, group: Tensor) -> Tensor:
    """Average over the group of each quantity, ``(num_quantities,)``; 1 instead of 0."""
    zeros = values.new_zeros(len(values))
    total = zeros.index_add(0, group, values)
    mean = (total / zeros.index_add(0, group, torch.ones_like(values)).clamp(min=1))[group]
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def _bound(values: Tensor, half: int, errors: float) -> Tensor:
    differences = values[half:].mean(0) - values[:half].mean(0)
    error = differences.std(0) / math.sqrt(len(differences))
    by_noise = _largest(differences.shape[-1]) - _largest(1)
    return (differences.mean(0).abs() - by_noise * error).clamp(min=0) + errors * error


def _largest(count: int) -> float:
    """Approximate the expected maximum of the moduli of standard normal variables."""
    return NormalDist().inv_cdf(1 - 0.2125 / count)


def _r_hat(means: Tensor, mean_squares: Tensor, group: Tensor) -> Tensor:
    within = (mean_squares - means.square()).mean(0)
    between = (means - means.mean(0)).square().sum(0) / max(1, len(means) - 1)
    constant = between + within.clamp(min=0) == 0
    ratio = torch.where(constant, 0.0, between) / pooled(within.clamp(min=0), group)
    return (1 + ratio).sqrt()


Quantities = Callable[[dict[str, Tensor]], Tensor | dict[str, Tensor]]


class Tracker:
    """A map from latents ``(num_chains, d)`` and log-densities to the tracked quantities.

    **Example:**

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> target = Target(lambda: pyro.sample("x", dist.LogNormal(0.0, 1.0)))
    >>> tracker = Tracker(target, lambda draws: draws["x"].log())
    >>> tracker(torch.ones(2, 1), torch.zeros(2)).values.round(decimals=3)
    tensor([[1., 0.],
            [1., 0.]])

    :param target: the posterior of the latents.
    :param quantities: a function of constrained draws by site; by default the latents.
    :param symmetries: symmetries of the posterior; the latents are ordered before they are tracked.
    """

    def __init__(
        self, target: Target, quantities: Quantities | None, symmetries: Symmetries | None = None
    ) -> None:
        self._target, self._quantities = target, quantities
        self._symmetries = symmetries
        self._warned = False

    def __call__(self, latent: Tensor, log_density: Tensor) -> Tracked:
        if self._quantities is None:
            if self._symmetries:
                latent = self._symmetries.ordered(latent)
            sizes = [self._target.shapes[name].numel() for name in self._target.sampled]
            split = latent.shape[-1] - sum(sizes)
            # A group per site: a rare indicator counts little compared with the others.
            discrete = latent[..., split:].split(sizes, -1) if sizes else ()
            return tracked([*latent[..., :split].unbind(-1), *discrete], log_density)
        found = self._quantities(self._target.constrain(latent))
        _check_shapes(found, len(latent))
        result = tracked(leaves_of(found), log_density)
        lost = ~result.values[:, :-1].isfinite().all(-1)
        if lost.any() and not self._warned:
            self._warned = True
            warn_user(
                f"the quantities are not finite in {int(lost.sum())} of {len(latent)} chains: "
                "the stopping rule cannot check them, and the chains may use their whole budget. "
                "Cure: functions that are finite at all draws of the posterior"
            )
        return result

    def try_at(self, latent: Tensor) -> None:
        """Check the shapes of quantities before the chains walk.

        :raises ValueError: for values that are not one of each chain.
        """
        if self._quantities is None:
            return
        found: Any = ()
        with suppress(*IMPOSSIBLE):  # starts may be far from the posterior
            found = self._quantities(self._target.constrain(latent))
        _check_shapes(found, len(latent))


def _check_shapes(found: Any, num_chains: int) -> None:
    for path, value in leaves_by_path(found):
        if isinstance(value, Tensor) and value.shape[:1] == (num_chains,):
            continue
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        where = "".join(f"[{key!r}]" for key in path)
        raise ValueError(
            f"quantities{where} gave {shape} of {num_chains} chains. Cure: a "
            "function of draws by site, (num_chains, *site_shape), that gives one value for each "
            "chain, first: no mean over them"
        )
