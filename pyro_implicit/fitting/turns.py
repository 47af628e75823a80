# SPDX-License-Identifier: Apache-2.0
"""The turn of the circle in which the draws of latent angles lie."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pyro_implicit.density.bijections import within_turn
from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.model import total_log_prob
from pyro_implicit.density.policy import ANGLES, RUNS, SEARCH
from pyro_implicit.density.symmetry import find_symmetries
from pyro_implicit.density.target import Target

__all__ = ["middle_of_turns"]


def middle_of_turns(
    target: Target, num_iterations: int, seconds: float
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
    :returns: by site, of the shape of its value; see
        :func:`~pyro_implicit.density.bijections.on_one_turn`.
    :raises ValueError: if the log-density is finite at none of the initial points of the search.
    """
    if not _is_periodic(target):
        return dict.fromkeys(target.turns)
    values = target.constrain(_mode(target, num_iterations, seconds))
    middle = {name: within_turn(values[name]) for name in target.turns}
    for group in find_symmetries(target, seconds).groups:
        for place in group.places:
            if angles := [name for name in place.sites if name in target.turns]:
                shared = _shared(values[name] for name in angles)
                middle |= {name: torch.full_like(middle[name], shared) for name in angles}
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


def _shared(values: Iterable[Tensor]) -> float:
    """Return 0 or pi, whichever is farther from cutting one of the values."""
    cos = torch.cat([value.flatten() for value in values]).cos()
    return 0.0 if (1 + cos).min() >= (1 - cos).min() else math.pi
