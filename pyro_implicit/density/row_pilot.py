# SPDX-License-Identifier: Apache-2.0
"""The posterior of some rows of the data, for a search that all rows would make slow."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_implicit.density.policy import PILOT, RUNS
from pyro_implicit.density.target import Target
from pyro_implicit.runtime.global_state import same_streams
from pyro_implicit.runtime.minibatches import num_rows
from pyro_implicit.runtime.sites import is_data
from pyro_implicit.runtime.trees import leaves_of, map_tree

__all__ = ["find_pilot", "largest_num_rows"]


class _ScaleRows(Messenger):
    """Scales data, and discrete latent variables of rows, as a subsampled plate does."""

    def __init__(self, scale: float, num_rows: int) -> None:
        super().__init__()
        self._scale, self._num_rows = scale, num_rows

    def _pyro_sample(self, msg: Any) -> None:
        sizes = [frame.size for frame in msg["cond_indep_stack"]]
        if self._num_rows in sizes or (not sizes and is_data(msg)):  # other plates are complete
            msg["scale"] = msg["scale"] * self._scale


def largest_num_rows(target: Target) -> int:
    """Return the largest number of rows of a model's arguments; 0 if none has rows."""
    return max((num_rows(leaf) or 0 for leaf in leaves_of((target.args, target.kwargs))), default=0)


def find_pilot(target: Target, number: int) -> Target | None:
    r"""Return the posterior of random rows, if the likelihood factorises over rows.

    Each row counts N / n times, as n of N rows stand for all: the dip of the log-density between
    two modes is as deep as that of all rows. The likelihood factorises if, for any part A of the
    rows and the others B,

    .. math:: \log p(\theta, A) + \log p(\theta, B) - \log p(\theta, A \cup B) = \log p(\theta) .

    Two parts must agree on the rise of this difference between points. They do not if rows depend
    on each other, as in a time series, or on their number.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("rows", len(y)):
    ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> pilot = find_pilot(Target(model, torch.ones(9)), 3)
    >>> len(pilot.args[0]), pilot.score(torch.zeros(1, 1))[1]
    (3, tensor([[9.]]))
    >>> def walk(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("steps", len(y) - 1):
    ...         pyro.sample("y", dist.Normal(x * y[:-1], 1.0), obs=y[1:])
    >>> find_pilot(Target(walk, torch.arange(9.0)), 3) is None
    True

    :param target: the posterior of all rows, which the arguments of the model hold in their first
        dimensions.
    :param number: the number of rows of the pilot.
    :returns: the pilot; None if there are fewer than twice as many rows, if the model cannot run on
        a part of them, or if rows depend on each other.
    """
    size = largest_num_rows(target)
    if size < 2 * number:
        return None
    generator = torch.Generator("cpu").manual_seed(0)  # the caller's stream does not advance
    order = torch.randperm(size, generator=generator, device="cpu")
    with (
        suppress(Exception),  # models with fewer rows may raise any
        same_streams(target.init_loc.device),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        # Two disjoint parts are the fewest that can disagree.
        chosen, other = order[: 2 * number].split(number)
        if _factorises(target, (chosen, other), size):
            few = _of_rows(target, chosen, size)
            model = _ScaleRows(size / number, number)(target.model)
            pilot = Target(model, *few.args, model_kwargs=few.kwargs, sample_discrete=True)
            pilot.log_prob(pilot.init_loc.unsqueeze(0))
            return pilot if pilot.shapes == target.shapes else None
    return None


def _factorises(target: Target, parts: tuple[Tensor, Tensor], size: int) -> bool:
    """Return whether the divisions of the rows by each part agree on the rise of the prior."""
    target, points, total, noise = _wide_log_probs(target)
    rises = []
    for part in parts:
        some = torch.zeros(size, dtype=torch.bool)
        some[part] = True
        both = -total
        for rows in (some, ~some):
            both = both + _of_rows(target, rows.nonzero()[:, 0], size).log_prob(points).double()
        rises.append(both.diff())
    return bool(((rises[0] - rises[1]).abs() <= noise).all())


def _wide_log_probs(target: Target) -> tuple[Target, Tensor, Tensor, float]:
    """Return the target, in double precision if the model allows it, three points, the
    log-densities there, and the nats by which they may be off."""
    spread = torch.linspace(-PILOT.spread, PILOT.spread, 3).to(target.init_loc)
    points = target.init_loc + spread.unsqueeze(-1)
    with suppress(Exception):  # of a model that mixes dtypes
        wide = target.in_double()
        total = wide.log_prob(points.double())
        if total.isfinite().all():
            return wide, points.double(), total, PILOT.max_noise
    total = target.log_prob(points).double()
    rounding = RUNS.rounding * torch.finfo(points.dtype).eps * total.abs().max().item()
    return target, points, total, PILOT.max_noise + rounding


def _of_rows(target: Target, rows: Tensor, size: int) -> Target:
    """Return the posterior of some of the rows; arguments of another size stay as they are."""

    def part_of(leaf: Any) -> Any:
        if num_rows(leaf) != size:
            return leaf
        return leaf[rows.numpy()] if isinstance(leaf, np.ndarray) else leaf[rows.to(leaf.device)]

    return target.with_data(*map_tree(part_of, (target.args, target.kwargs)))
