# SPDX-License-Identifier: Apache-2.0
"""Checks of numbers: log-densities that are not finite, lost gradients, and rounding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_implicit.compiled.recorder import DispatchMode
from pyro_implicit.density.checks.observations import (
    describe_arrays,
    describe_nan,
    site_log_prob,
)
from pyro_implicit.density.model import compute_log_prob
from pyro_implicit.density.policy import GRADIENTS, ROUNDING, RUNS
from pyro_implicit.density.target import Target
from pyro_implicit.runtime.global_state import same_streams
from pyro_implicit.runtime.messages import first_line, warn_user
from pyro_implicit.runtime.sites import Site, innermost, is_interval
from pyro_implicit.runtime.trees import map_tree

__all__ = [
    "InexactArithmetic",
    "beyond_resolution",
    "blame",
    "finite_log_prob",
    "harmful_rounding",
    "heights_of",
    "is_rounding",
    "loses_digits",
    "warn_of_lost_gradients",
    "widen_if_rounded",
]


# Log-densities that are not finite


@torch.no_grad()
def blame(target: Target, points: Tensor) -> str:
    """Say which sites keep a log-density from being finite, and how.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     fn = dist.Gamma(2.0, scale, validate_args=False)
    ...     pyro.sample("y", fn, obs=torch.tensor(-1.0))
    >>> print(blame(Target(model), torch.zeros(3, 1)).split(". ")[0])
    site 'y' at 3 of 3: its observation is outside GreaterThanEq(lower_bound=0.0) in 1 of 1 elements

    :param points: unconstrained vectors, ``(num_points, latent_dim)``; the first twenty are tried.
    :returns: a clause for each site, and the cure.
    """
    points = points[: RUNS.num_blamed]
    reasons: dict[str, Counter[str]] = {}
    for point in points:
        try:
            trace = target.trace_at(point)
        except Exception as error:  # of the model, of any kind: the clause names it
            reasons.setdefault("the model", Counter())[f"it raises {first_line(error)}"] += 1
            continue
        for name, site in trace.nodes.items():
            if site["type"] != "sample" or site_is_subsample(site):
                continue
            reason = _reason(site)
            if reason:
                reasons.setdefault(f"site '{name}'", Counter())[reason] += 1
    clauses = []
    for who, found in reasons.items():
        (reason, _), *_ = found.most_common(1)
        clauses.append(f"{who} at {found.total()} of {len(points)}: {reason}")
    if not clauses:
        return _blame_gradient(target, points)
    others = target.init_loc, torch.zeros_like(target.init_loc)
    cure = "give the sites priors in whose range the data are possible"
    if all("TypeError" in clause for clause in clauses):  # no draw is to blame
        cure = describe_arrays(target.args, target.kwargs)[1]
    elif all(
        len(found) == 1 and found.total() == len(points) and "RuntimeError: " in next(iter(found))
        for found in reasons.values()
    ) and not any(_runs(target, one) for one in others):
        number = len(points) + len(others)
        cure = f"correct the model: none of the {number} vectors of latents tried avoids the error"
    return f"{'; '.join(clauses)}. Cure: {cure}"


def _runs(target: Target, point: Tensor) -> bool:
    try:
        compute_log_prob(target.trace_at(point))
    except Exception:  # of the model, of any kind
        return False
    return True


def _blame_gradient(target: Target, points: Tensor) -> str:
    log_prob, score = target.score(points)
    if target.error is not None and not log_prob.isfinite().any():
        found, cure = describe_arrays(target.args, target.kwargs)
        return (
            "no site by itself, but with gradients the model raises "
            f"{first_line(target.error)}. Cure: "
            + (cure if found else "a model that computes by torch alone")
        )
    if log_prob.isfinite().all() and score.isfinite().all():
        return (
            "no site: a second run there is finite, so that the log-density consists of rounding "
            "errors, or the model is random beyond its latents. Cure: float64; or "
            "pyro.sample for the random quantity, and networks with dropout in .eval() mode"
        )
    lost = [f"'{name}'" for name, part in target.split(score).items() if not part.isfinite().all()]
    return (
        f"no site by itself, but its gradient by {', '.join(lost) or 'all latents'} is not finite. "
        "Cure: torch.where computes the branch that it does not take, too, and a NaN there makes "
        "the gradient NaN: replace the arguments of that branch first, as in "
        "torch.log(torch.where(x > 0, x, 1.0)); if an intermediate result overflows, float64 or "
        "other units"
    )


def _reason(site: Site) -> str:
    fn, value = site["fn"], site["value"]
    what = "its observation" if site["is_observed"] else "its value"
    try:
        log_prob = site_log_prob(site)
    except Exception as error:  # of the distribution, of any kind: the caller names it
        return first_line(error)
    is_finite, missing = log_prob.isfinite(), describe_nan(value)
    if missing and (site["is_observed"] or not is_finite.all()):
        return f"{what} is NaN in {missing}"
    if is_finite.all():
        return ""
    try:
        inside = fn.support.check(value)
    except (AttributeError, NotImplementedError):
        inside = torch.tensor(True)
    if not inside.all():
        number = inside.numel() - int(inside.sum())
        return f"{what} is outside {fn.support} in {number} of {inside.numel()} elements"
    kind = type(innermost(fn)).__name__
    if log_prob.isnan().any():
        return f"its log-density is NaN: look at the parameters of {kind}"
    sign = "+inf" if (log_prob == torch.inf).any() else "-inf"
    if kind == "Unit":
        return f"the factor is {sign}"
    number = int((~is_finite).sum())
    return f"its log-density is {sign} in {number} of {log_prob.numel()} elements"


# Gradients that a model cuts


@torch.no_grad()
def warn_of_lost_gradients(target: Target) -> None:
    """Compare the gradient of a log-density with difference quotients.

    There is no warning where two quotients disagree with each other (jumps, kinks, rounding, random
    models), nor unless the gradient is wrong at half of a few points near ``init_loc``. The
    caller's random stream is left alone.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(2.0))  # x.detach() would warn
    >>> warn_of_lost_gradients(Target(model))

    :warns UserWarning: naming sites and cure.
    """
    policy = GRADIENTS
    wide_step, narrow_step = policy.steps
    groups = _groups(target)
    start, random = target.init_loc, torch.Generator().manual_seed(0)
    shape = (len(groups), RUNS.num_points, target.latent_dim)
    drawn = torch.randn((2, *shape), generator=random, dtype=torch.float64, device="cpu")
    away, toward = drawn.to(start)
    points = (start + RUNS.nearby * away).flatten(0, 1)
    is_moved = torch.stack([is_moved for _, is_moved in groups]).unsqueeze(1)
    toward = torch.where(is_moved.to(start.device), toward, 0.0).flatten(0, 1)
    ends = [points + sign * step * toward for step in policy.steps for sign in (1, -1)]
    try:
        value, score = target.score(points)
        up, down, *inside = target.log_prob(torch.cat(ends)).chunk(4)
    except Exception:  # the model's own, at these points: other checks report it
        return
    claimed = (score * toward).sum(-1)
    wide, narrow = (up - down) / (2 * wide_step), (inside[0] - inside[1]) / (2 * narrow_step)
    size = wide.abs().maximum(claimed.abs())
    rounding = policy.rounding * torch.finfo(value.dtype).eps * (1 + value.abs()) / narrow_step
    spacing = torch.finfo(points.dtype).eps * torch.where(toward != 0, points, 0.0).abs().amax(-1)
    is_resolved = spacing < policy.resolution * narrow_step
    # Not by the claimed slope: where a density is chaotic, that may be of any size.
    is_smooth = ((wide - narrow).abs() < policy.agree * wide.abs()) & is_resolved
    is_wrong = is_smooth & ((wide - claimed).abs() > policy.differ * size + rounding)
    counts = (one.reshape(shape[:2]).sum(-1).tolist() for one in (is_wrong, is_smooth))
    lost: list[str] = []
    for (names, _), num_wrong, num_smooth in zip(groups, *counts, strict=True):
        if num_wrong >= max(2, num_smooth / 2):
            lost += names
    if lost:
        shown = ", ".join(f"'{name}'" for name in lost[:3]) + ", ..." * (len(lost) > 3)
        warn_user(
            "the gradient of the model's log-density is not its slope: it leaves out the part that "
            f"depends on {shown}. Training and Stein's identities give wrong results, and chains "
            "are slow. Cure: compute with torch all the way from the latents to the "
            "likelihood, without torch.no_grad, .detach(), .item(), float() or NumPy"
        )


def _groups(target: Target) -> list[tuple[list[str], Tensor]]:
    """Return sites that are moved together: their names and their places, ``(latent_dim,)``."""
    places = target.split(torch.arange(target.latent_dim))
    groups = []
    for part in np.array_split(list(places), min(GRADIENTS.max_groups, len(places))):
        names = part.tolist()
        is_moved = torch.zeros(target.latent_dim, dtype=torch.bool)
        is_moved[torch.cat([places[name].flatten() for name in names])] = True
        groups.append((names, is_moved))
    return groups


# Rounding


def finite_log_prob(target: Target, points: Tensor) -> Tensor:
    """Return the log-density at points ``(*batch, latent_dim)``; -inf where it is not finite."""
    flat = target.log_prob(points.reshape(-1, points.shape[-1])).reshape(points.shape[:-1])
    return flat.nan_to_num(-math.inf, -math.inf, -math.inf)


def heights_of(target: Target, points: Tensor) -> Tensor:
    """Return the log-density at points ``(n, latent_dim)``; -inf if it has no finite gradient."""
    log_prob, score = target.score(points)
    return log_prob.masked_fill(~(log_prob.isfinite() & score.isfinite().all(-1)), -math.inf)


def is_rounding(target: Target, points: Tensor) -> Tensor:
    """Tell where a log-density consists of rounding errors and may be any number.

    There, it changes if the last bits of the point change, or changes far more if those of all
    intermediate results do (:class:`InexactArithmetic`).

    :param points: ``(num_points, latent_dim)``.
    :returns: ``(num_points,)``.
    """
    if len(points) == 0:
        return torch.zeros(0, dtype=torch.bool, device=points.device)
    values = _in_last_bits(target, points)
    spread = values.amax(0) - values.amin(0)
    found = ~(spread <= 1.0 + ROUNDING.relative * values.abs().amin(0))
    with InexactArithmetic():
        values = target.log_prob(points.repeat(ROUNDING.num_runs, 1))
    values = values.unflatten(0, (ROUNDING.num_runs, -1))
    # A matrix may have lost its factor by this alone: such points do not count.
    spread = (values.amax(0) - values.amin(0)).nan_to_num(0.0, 0.0, 0.0)
    size = values.abs().amin(0).nan_to_num(0.0)
    return found | (spread > ROUNDING.inexact * (1.0 + ROUNDING.relative * size))


def harmful_rounding(target: Target, draws: Tensor) -> float:
    """Return the rounding error of a log-density at draws, in nats; 0 if it does no harm.

    It is the change by the last bits of the draws, or the distance from double precision, up to a
    constant: near a bound, as of ``Beta(0.1, 0.1)``, values of single precision stand still.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> harmful_rounding(Target(model), torch.randn(5, 1))
    0.0

    :param draws: near the posterior, ``(num_draws, latent_dim)``, of which a few are taken.
    :returns: the error that a share of the draws exceeds.
    """
    draws = draws[:: max(1, len(draws) // ROUNDING.num_draws)]
    values = _in_last_bits(target, draws)
    errors = torch.maximum(values.amax(0) - values.amin(0), _single_precision_error(target, draws))
    error = errors.quantile(1 - ROUNDING.share).item()
    return error if error > ROUNDING.max_error else 0.0


@torch.no_grad()
def loses_digits(target: Target, points: Tensor) -> bool:
    """Return whether points in single precision do not come back from the values of their sites.

    So near a bound, or in a wide interval such as that of Uniform(-1e7, 1e7), many points have the
    same values.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Beta(1.0, 1.0))
    >>> target = Target(model)
    >>> [loses_digits(target, torch.tensor([[x]])) for x in (10.0, 20.0)]
    [False, True]

    :param points: draws, whose standard deviation is the unit of the errors if it is below 1, or a
        single point, ``(num_points, latent_dim)``.
    """
    if points.dtype == torch.float64:
        return False
    back = target.unconstrain(target.constrain(points))
    spread = points.std(0, correction=0)
    unit = torch.where(spread > 0, spread.clamp(max=1.0), 1.0)
    return bool(((back - points).abs() > ROUNDING.max_error * unit).any())


@torch.no_grad()
def beyond_resolution(target: Target, points: Tensor) -> tuple[str, ...]:
    """Return the sites with draws at or beyond the last number before an end of their interval.

    The model sees the last number in their place, so that a density that rises towards the end,
    such as that of Beta(1.0, 0.05), lacks mass.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Beta(1.0, 0.05))
    >>> target = Target(model)
    >>> [beyond_resolution(target, torch.tensor([[x]])) for x in (15.0, 20.0)]
    [(), ('x',)]

    :param points: unconstrained draws, ``(num_points, latent_dim)``.
    :returns: their names; sites whose support is no interval are left out.
    """
    found = []
    for name, part in target.split(points.double() if target.is_wide else points).items():
        # In a simplex, small elements keep their digits, although the map back loses them.
        if name in target.sampled or not is_interval(target.sites[name]) or not part.numel():
            continue
        transform, infinite = target.transforms[name], torch.full_like(part[:1], math.inf)
        low, high = transform(-infinite), transform(infinite)
        # Torch leaves out the ends 0 and 1 of the unit interval, but not other ends.
        first, last = transform.inv(low.nextafter(high)), transform.inv(high)
        lost = part - part.clamp(first + ROUNDING.max_error, last - ROUNDING.max_error) != 0
        if lost.double().mean(0).max() > ROUNDING.beyond_share:
            found.append(name)
    return tuple(found)


@torch.no_grad()
def _single_precision_error(target: Target, draws: Tensor) -> Tensor:
    """Return the distance of log-densities from those in double precision, ``(num_draws,)``.

    It is 0 if the model already runs in double precision, or cannot.
    """
    none = draws.new_zeros(len(draws))
    if target.is_wide or not loses_digits(target, draws):
        return none
    try:
        difference = target.in_double().log_prob(draws).to(draws) - target.log_prob(draws)
    except Exception:  # of a model that mixes dtypes
        return none
    known = difference[difference.isfinite()]
    if not len(known):
        return none
    return (difference - known.median()).abs().nan_to_num(0.0, 0.0, 0.0)


def widen_if_rounded(target: Target, draw: Callable[[int], Tensor]) -> str:
    """Evaluate the model in double precision from now on, if rounding errors matter at draws.

    :param draw: returns draws near the posterior, ``(num_draws, latent_dim)``. The caller's random
        stream is left alone.
    :returns: what was done, in words; empty if nothing.
    """
    if target.is_wide or target.init_loc.dtype == torch.float64:
        return ""
    with same_streams(target.init_loc.device):
        draws = draw(ROUNDING.num_draws)
    error = harmful_rounding(target, draws)
    if not error or not target.widen(draws):
        return ""
    return f"from here in float64, because of rounding errors of {error:.2g} nats"


def _in_last_bits(target: Target, points: Tensor) -> Tensor:
    """Return log-densities at a point and its neighbours, ``(2 * num_runs, num_points)``."""
    last_bits = ROUNDING.num_runs * torch.finfo(points.dtype).eps
    shift = torch.linspace(-1.0, 1.0, 2 * ROUNDING.num_runs).to(points)[:, None, None]
    signs = torch.ones_like(points[0])
    signs[::2] = -1.0
    return finite_log_prob(target, points * (1 + last_bits * shift * signs))


class InexactArithmetic(DispatchMode):
    """Each result of a sum, a product or a function is off by one last bit, as if at random.

    Repeated runs then differ by rounding errors, even by those that are the same in every exact
    run, as of 1e12 + 1 in float32.

    **Example:**

    >>> large = torch.full((4,), 1e12)
    >>> (large + 1 - large).unique()
    tensor([0.])
    >>> with InexactArithmetic():
    ...     found = large + 1 - large
    >>> bool((found.abs() > 1e4).all())
    True

    **References:**

    1. Vignes (2004), *Discrete stochastic arithmetic for validating results of numerical software*.
    """

    # Operations that round, and neither copy nor compare.
    rounds = frozenset(
        (
            *("add", "sub", "rsub", "mul", "div", "reciprocal", "pow", "sqrt", "rsqrt", "exp"),
            *("expm1", "log", "log1p", "lgamma", "digamma", "sigmoid", "log_sigmoid_forward"),
            *("softplus", "tanh", "sum", "mean", "cumsum", "cumprod", "prod", "logsumexp"),
            *("_log_softmax", "_softmax", "mm", "bmm", "addmm", "baddbmm", "dot", "mv"),
        )
    )

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in self.rounds:
            return found
        return map_tree(self._off, found)

    def _off(self, result: Any) -> Any:
        if not (isinstance(result, Tensor) and result.is_floating_point()):
            return result
        # A hash instead of a generator: it leaves the random streams as they are, on any device.
        self._calls += 1
        place = torch.ones_like(result).flatten().cumsum(0)
        is_up = (12.9898 * place + 78.233 * self._calls).sin().reshape(result.shape) > 0
        eps = torch.finfo(result.dtype).eps
        return torch.where(is_up, result * (1 + eps), result * (1 - eps))
