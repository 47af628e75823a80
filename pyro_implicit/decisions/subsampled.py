# SPDX-License-Identifier: Apache-2.0
"""Leave-one-out cross-validation of large data by a random part of the observations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.decisions.pointwise import Pointwise, observation_columns, observed_sites
from pyro_implicit.decisions.policy import DECISIONS
from pyro_implicit.density.target import Target
from pyro_implicit.ops.log_space import log_mean_exp
from pyro_implicit.runtime.minibatches import BatchStream, num_rows

__all__ = [
    "DifferenceEstimate",
    "Subsample",
    "difference_estimate",
    "subsample_batches",
    "subsample_observations",
]


@dataclass(frozen=True, eq=False)
class Subsample:
    """A random part of the observations.

    :ivar surrogate: the log predictive density of each observation by a few draws of the posterior
        of all data, ``(num_observations,)``.
    :ivar found: draws with the log-likelihoods of the chosen observations; ``found.places`` are
        their places among all.
    """

    surrogate: Tensor
    found: Pointwise


class DifferenceEstimate(NamedTuple):
    """The sum over all observations, its standard error by subsampling, and that by the data."""

    total: float
    subsampling_error: float
    error: float


def difference_estimate(surrogate: Tensor, chosen: Tensor, values: Tensor) -> DifferenceEstimate:
    r"""Estimate a sum over N observations from m of them and a surrogate of all.

    With the differences :math:`e_j` from the surrogate, it is

    .. math:: \sum_{i=1}^N \tilde\pi_i + \frac Nm \sum_{j \in S} e_j
        \pm N \sqrt{(1 - m / N) s_e^2 / m},

    which is unbiased for any surrogate. So is the variance over the observations. Where that is
    negative, because few observations were chosen, it is the variance of the chosen ones instead.

    **Example:**

    >>> surrogate = torch.arange(10.0)
    >>> chosen = torch.tensor([0, 4, 8])
    >>> difference_estimate(surrogate, chosen, surrogate[chosen] + 1).total
    55.0

    :param surrogate: ``(num_observations,)``.
    :param chosen: a random sample without replacement of the places, ``(num_chosen,)``.
    :param values: the exact values there, ``(num_chosen,)``.

    **References:**

    1. Magnusson, Andersen, Jonasson and Vehtari (2019), *Bayesian leave-one-out cross-validation
       for large data*.
    2. Magnusson, Vehtari, Jonasson and Andersen (2020), *Leave-one-out cross-validation for
       Bayesian model comparison in large data*, equations 7 to 9.
    """
    number, part = len(surrogate), len(chosen)
    rest = values - surrogate[chosen]
    total = surrogate.sum() + number * rest.mean()
    variance = (1 - part / number) * rest.var() / part
    squares = surrogate.square().mean() + (values.square() - surrogate[chosen].square()).mean()
    spread = squares - (total / number).square() + variance  # the square of a mean is too large
    if spread <= 0:
        spread = values.var()
    return DifferenceEstimate(
        total.item(), number * variance.sqrt().item(), (number * spread).sqrt().item()
    )


def _few(draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a few draws, evenly spaced, ``(num_draws, *site_shape)``."""
    flat = {name: value.flatten(0, 1) for name, value in draws.items()}
    step = max(1, len(next(iter(flat.values()))) // DECISIONS.surrogate_draws)
    return {name: value[::step] for name, value in flat.items()}


def _columns(target: Target, draws: Mapping[str, Tensor], scaled: bool) -> Tensor:
    sites = observed_sites(target, draws)
    return observation_columns(target.log_likelihood(draws, list(sites), scaled), sites)


@torch.no_grad()
def subsample_observations(
    target: Target, draws: Mapping[str, Tensor], order: Tensor, number: int
) -> Subsample:
    """Choose observations of a model of all data.

    :param target: the posterior of all data.
    :param draws: by site, ``(num_chains, num_draws, *site_shape)``.
    :param order: a random order of the observations.
    :param number: of observations, at most.
    """
    places = order[:number].sort().values
    return Subsample(
        log_mean_exp(_columns(target, _few(draws), True)), Pointwise.of(target, draws, places)
    )


@torch.no_grad()
def subsample_batches(
    targets: Mapping[str, Target],
    draws: Mapping[str, Mapping[str, Tensor]],
    batches: Iterable[Any],
    number: int,
) -> dict[str, Subsample]:
    """Choose rows of minibatches, the same for all models, in one pass.

    :param targets: by model, the posterior by minibatches, each with the whole data's scale.
    :param draws: by model and site, ``(num_chains, num_draws, *site_shape)``.
    :param batches: the minibatches, each a tuple of tensors with one row for each observation.
    :param number: of rows, at most.
    :raises ValueError: for a minibatch whose rows are not its observations.
    """
    stream, few = BatchStream(batches), {name: _few(one) for name, one in draws.items()}
    surrogates: dict[str, list[Tensor]] = {name: [] for name in targets}
    first = 0
    kept = None
    keys = torch.empty(0, dtype=torch.float64, device="cpu")
    places = torch.empty(0, dtype=torch.long, device="cpu")
    for _ in range(stream.epoch_length):
        batch = stream.next()
        counts = {num_rows(part) for part in batch if num_rows(part) is not None}
        for name, target in targets.items():
            columns = _columns(target.on(batch), few[name], scaled=False)
            if counts != {columns.shape[-1]}:
                raise ValueError(
                    f"model '{name}': a minibatch has {columns.shape[-1]} observations, and its "
                    f"parts have {sorted(counts, key=str)} rows; subsample needs one observation "
                    "for each row. Cure: fit with all data"
                )
            surrogates[name].append(log_mean_exp(columns))
        size = columns.shape[-1]
        # The rows with the smallest keys so far are a sample without replacement.
        keys = torch.cat([keys, torch.rand(size, dtype=torch.float64, device="cpu")])
        places = torch.cat([places, torch.arange(first, first + size, device="cpu")])
        best = keys.argsort()[:number]
        rows = batch if kept is None else tuple(map(torch.cat, zip(kept, batch, strict=True)))
        keys, places, kept = keys[best], places[best], tuple(part[best] for part in rows)
        first += size
    assert kept is not None
    found = {}
    for name, target in targets.items():
        chosen = Pointwise.of(target.on(kept), draws[name], scaled=False)
        (site,) = chosen.sites
        labels = tuple(f"{site}[{place}]" for place in places.tolist())
        chosen = replace(chosen, labels=labels, places=places)
        found[name] = Subsample(torch.cat(surrogates[name]), chosen)
    return found
