# SPDX-License-Identifier: Apache-2.0
"""Latent angles and phases: which variables they are, and the turn in which their draws lie."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from pyro_implicit.density.bijections import intervals_of
from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.model import total_log_prob
from pyro_implicit.density.policy import ANGLES, RUNS, SEARCH
from pyro_implicit.density.symmetry import find_symmetries
from pyro_implicit.density.target import Target
from pyro_implicit.runtime.global_state import same_streams

__all__ = ["find_phases", "middle_of_turns"]


#: By site, the bounds of its values.
Phases: TypeAlias = dict[str, tuple[Tensor, Tensor]]


def find_phases(target: Target) -> Phases:
    """Return the uniform latent variables at whose bounds the density is the same, and its slope.

    They are phases, for instance uniform on [0, 2 pi). Where the posterior lies at the bounds, they
    cut one mode into two, which no chain connects.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     phase = pyro.sample("phase", dist.Uniform(0.0, 2 * math.pi))
    ...     size = pyro.sample("size", dist.Uniform(0.0, 2.0))
    ...     pyro.sample("y", dist.Normal(size * phase.cos(), 1.0), obs=torch.tensor(0.5))
    >>> find_phases(Target(model))
    {'phase': (tensor(0.), tensor(6.2832))}

    :param target: the posterior.
    :returns: by site, the bounds, of the shape of its value.
    """
    found = intervals_of(target.trace_at(target.init_loc))
    if not found:
        return {}
    with same_streams():
        drawn = target.sample_prior(RUNS.num_compared_runs)
        # At draws of vague priors, rounding may hide a difference that points near the origin show.
        near = SEARCH.near_width * (2 * torch.rand_like(drawn) - 1)
    of_prior, near_origin = target.constrain(drawn), target.constrain(near)
    return {
        name: ends
        for name, ends in found.items()
        if _meet(target, of_prior, name, *ends)
        and _meet(target, near_origin, name, *ends) is not False
    }


@torch.no_grad()
def _meet(
    target: Target, values: Mapping[str, Tensor], name: str, low: Tensor, high: Tensor
) -> bool | None:
    """Return whether the density of a site is the same at both ends, and has the same slope.

    An even density is the same at both ends, too, but its slopes are not. None where the density is
    not finite, or the model raises an error.
    """
    number, largest = len(values[name]), torch.nextafter(high, low)
    doubled = {other: value.repeat(2, *[1] * (value.dim() - 1)) for other, value in values.items()}

    def heights(share: float) -> Tensor:
        ends = [torch.lerp(low, largest, share), torch.lerp(largest, low, share)]
        at_ends = torch.cat([end.expand_as(values[name]) for end in ends])
        log_prob = target.read_at({**doubled, name: at_ends}, total_log_prob)
        return log_prob.double().unflatten(0, (2, number))

    try:
        ends, inside, quarter = (heights(share) for share in (0.0, ANGLES.phase_step, 0.25))
    except Exception:  # of any kind, as models may not take values at the ends
        return None
    is_possible = ends.isfinite()
    rounding = RUNS.repeat_tolerance * (1 + ends[0].abs())
    is_same = is_possible.all(0) & ((ends[0] - ends[1]).abs() <= rounding)
    if (is_possible.any(0) & ~is_same).any():
        return False
    is_known = torch.cat([ends, inside, quarter]).isfinite().all(0)
    if not is_known.any():
        return None
    slopes = ((inside - ends).sum(0).abs() - rounding)[is_known]
    rise = (quarter - ends).abs().amax(0)[is_known]
    return bool((slopes <= ANGLES.phase_step * rise).all())


def middle_of_turns(
    target: Target, num_iterations: int, seconds: float, phases: Phases | None = None
) -> Mapping[str, Tensor | None]:
    r"""Return the middle of the turn for latent angles: their values at the best mode.

    The moments of draws then have a meaning, and modes are not cut into two. Angles that symmetries
    move, such as those of the components of a mixture, share the middle 0 or :math:`\pi`. A density
    that is not periodic in its angles has no middle: they end where their prior ends.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     phi = pyro.sample("phi", dist.VonMises(3.0, 100.0))
    ...     pyro.sample("y", dist.VonMises(phi, 100.0), obs=torch.tensor(-3.0))
    >>> middle = middle_of_turns(Target(model), 100, seconds=10.0)["phi"]
    >>> bool((middle.abs() - torch.pi).abs() < 0.05)
    True

    :param target: whose angles are those of ``target.turns``.
    :param num_iterations: the maximal number of Newton iterations. If it is 0, L-BFGS climbs from
        ``target.init_loc`` instead, at its values of discrete latent variables.
    :param seconds: the limit of the search in wall time.
    :param phases: phases of :func:`find_phases`, which are angles, too, if they are at the mode.
    :returns: by site, of the shape of its value; see
        :func:`~pyro_implicit.density.bijections.on_one_turn`.
    :raises ValueError: if the log-density is finite at none of the initial points of the search.
    """
    phases, middle = phases or {}, dict[str, Tensor | None](dict.fromkeys(target.turns))
    bounds = dict(phases)
    if target.turns and _is_periodic(target):
        bounds |= {name: (zero - math.pi, zero + math.pi) for name, zero in target.turns.items()}
    if not bounds:
        return middle
    values = target.constrain(_mode(target, num_iterations, seconds))
    at_mode = {name: value.unsqueeze(0) for name, value in values.items()}
    for name, ends in phases.items():
        if not _meet(target, at_mode, name, *ends):
            del bounds[name]
    for name, (low, high) in bounds.items():
        middle[name] = low + torch.remainder(values[name] - low, high - low)
    shares = {name: (values[name] - low) / (high - low) for name, (low, high) in bounds.items()}
    for group in find_symmetries(target, seconds).groups:
        for place in group.places:
            if angles := [name for name in place.sites if name in bounds]:
                shared = _shared(shares[name] for name in angles)
                middle |= {name: torch.lerp(*bounds[name], shared) for name in angles}
    return middle


def _is_periodic(target: Target) -> bool:
    """Return whether the density stays the same where each angle moves by whole turns."""
    values = target.constrain(target.sample_prior(RUNS.num_compared_runs))
    generator = torch.Generator("cpu").manual_seed(0)  # the caller's stream does not advance
    turned = dict(values)
    for name in target.turns:
        shape = values[name].shape
        turns = torch.randint(-2, 3, shape, generator=generator, device="cpu").to(values[name])
        turned[name] = values[name] + 2 * math.pi * turns
    before, after = (target.read_at(draws, total_log_prob) for draws in (values, turned))
    return torch.allclose(before, after, RUNS.tolerance, RUNS.tolerance, equal_nan=True)


def _mode(target: Target, num_iterations: int, seconds: float) -> Tensor:
    if num_iterations > 0:
        modes = find_modes(
            target,
            ANGLES.num_starts,
            max_rounds=1,
            max_iterations=min(num_iterations, SEARCH.max_iterations),
            max_seconds=seconds,
        )
        return modes.loc[int(modes.elbo.argmax())]
    deadline = time.perf_counter() + seconds
    point = target.init_loc.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([point], line_search_fn="strong_wolfe")

    def climb() -> Tensor:
        log_prob, score = target.score(point.detach().unsqueeze(0))
        point.grad = -score.squeeze(0)
        return -log_prob.squeeze(0)

    for _ in range(ANGLES.max_climbs):
        optimiser.step(climb)
        if time.perf_counter() > deadline:
            break
    return point.detach() if point.isfinite().all() else target.init_loc


def _shared(shares: Iterable[Tensor]) -> float:
    """Return the half or the whole of a turn, whichever is farther from cutting one of the values.

    :param shares: shares of the turn, from its beginning to each of the values.
    """
    cos = torch.cat([2 * math.pi * share.flatten() for share in shares]).cos()
    return 0.5 if (1 - cos).min() >= (1 + cos).min() else 1.0
