# SPDX-License-Identifier: Apache-2.0
"""The turn of the circle in which the draws of latent angles lie."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.model import total_log_prob
from pyro_implicit.density.policy import RUNS, SEARCH
from pyro_implicit.density.target import Target

__all__ = ["middle_of_turns"]


def middle_of_turns(
    target: Target, num_iterations: int, seconds: float
) -> dict[str, Tensor | None]:
    """Return the middle of the turn for each latent angle: its value at the best mode.

    The moments of draws then have a meaning, and modes are not cut into two. It is 0 if there is no
    time for a search, or if discrete latent variables have coordinates, which have no gradient. For
    a model that is not periodic, there is none, as its angles end where their prior ends.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     phi = pyro.sample("phi", dist.VonMises(3.0, 100.0))
    ...     pyro.sample("y", dist.VonMises(phi, 100.0), obs=torch.tensor(-3.0))
    >>> middle = middle_of_turns(Target(model), 100, seconds=10.0)["phi"]
    >>> bool((middle.abs() - torch.pi).abs() < 0.05)
    True

    :param target: whose angles lie within the turn around 0.
    :param num_iterations: the maximal number of Newton iterations.
    :param seconds: the limit of the search in wall time.
    :returns: by site, of the shape of its value; see
        :func:`~pyro_implicit.density.angles.on_one_turn`.
    """
    if not _is_periodic(target):
        return dict.fromkeys(target.turns)
    if num_iterations == 0 or target.sampled:
        return {**target.turns}
    num_iterations = min(num_iterations, SEARCH.max_iterations)
    modes = find_modes(target, max_rounds=1, max_iterations=num_iterations, max_seconds=seconds)
    values = target.constrain(modes.loc[int(modes.elbo.argmax())])
    return {name: values[name] for name in target.turns}


def _is_periodic(target: Target) -> bool:
    """Return whether the density stays the same where each angle moves by whole turns."""
    points = target.sample_prior(RUNS.num_compared_runs)
    values = target.constrain(points)
    generator = torch.Generator("cpu").manual_seed(0)  # the caller's stream does not advance
    turned = dict(values)
    for name in target.turns:
        shape = values[name].shape
        turns = torch.randint(-2, 3, shape, generator=generator, device="cpu").to(points)
        turned[name] = values[name] + 2 * math.pi * turns
    before, after = (target.read_at(draws, total_log_prob) for draws in (values, turned))
    return torch.allclose(before, after, RUNS.tolerance, RUNS.tolerance, equal_nan=True)
