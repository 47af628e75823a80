# SPDX-License-Identifier: Apache-2.0
"""Leave-one-out cross-validation by importance weights, repaired by short chains."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_implicit.decisions.pointwise import Pointwise, WeightedObservations, observation_columns
from pyro_implicit.decisions.policy import DECISIONS
from pyro_implicit.density.target import Target
from pyro_implicit.export import as_datatree, as_inferencedata, import_arviz, joined, quiet_arviz
from pyro_implicit.mcmc import refine
from pyro_implicit.ops import LogWeights, bridge, bridge_error
from pyro_implicit.ops.policy import FINITE_VARIANCE_KHAT
from pyro_implicit.runtime.messages import short_repr
from pyro_implicit.runtime.progress import steps_of

__all__ = ["LeaveOneOut", "leave_one_out"]


@dataclass(frozen=True, eq=False, repr=False)
class LeaveOneOut:
    r"""Expected log predictive densities of single observations, given all others.

    :ivar elpd: :math:`\log p(y_i \mid y_{-i})` in nats, ``(num_observations,)``.
    :ivar error: its Monte Carlo standard error.
    :ivar khat: Pareto k-hat of the importance weights, before any repair.
    :ivar is_repaired: whether chains replaced the importance weights.
    :ivar labels: the names of the observations.
    :ivar bad: the observations whose elpd is unreliable, with the reason.
    :ivar num_parameters: the effective number of parameters (``p_loo``).
    :ivar good_khat: k-hat up to which importance weights are reliable for so many draws.
    """

    elpd: Tensor
    error: Tensor
    khat: Tensor
    is_repaired: Tensor
    labels: tuple[str, ...]
    bad: dict[str, str]
    num_parameters: float
    good_khat: float
    __repr__ = short_repr

    @property
    def total(self) -> float:
        """The sum of all ``elpd``."""
        return self.elpd.sum().item()


@torch.no_grad()
def leave_one_out(
    target: Target | None, found: Pointwise, max_seconds: float, efficiency: float = 1.0
) -> LeaveOneOut:
    r"""Estimate the leave-one-out predictive density of each observation.

    Pareto-smoothed importance sampling (ArviZ's ``loo``) comes first. If k-hat of an observation
    exceeds .5 (the variance of its weights may be infinite), draws that are resampled by its
    weights start chains of :func:`refine <pyro_implicit.refine>` on the leave-one-out posterior,
    and bridge sampling between both posteriors gives
    :math:`\log p(y_i \mid y_{-i}) = \log Z - \log Z_{-i}`.

    :param target: the posterior of all data; None if there is none, so that nothing is repaired.
    :param found: its draws and their log-likelihoods.
    :param max_seconds: wall time after which no further observation is repaired.
    :param efficiency: the share of independent draws that a draw is worth, besides autocorrelation.

    **References:**

    1. Vehtari, Gelman and Gabry (2017), *Practical Bayesian model evaluation using leave-one-out
       cross-validation and WAIC*.
    2. Meng and Wong (1996), *Simulating ratios of normalizing constants via a simple identity: a
       theoretical exploration*.
    """
    data, reff = _exported(found)
    reff = efficiency * reff
    with quiet_arviz() as arviz:  # bad k-hats are repaired, or reported
        loo = arviz.loo(data, pointwise=True, reff=reff.mean().item())
    columns = found.log_likelihood.flatten(0, 1)
    elpd, khat = (torch.from_numpy(loo[k].values.copy()).flatten() for k in ("loo_i", "pareto_k"))
    # Equal weights have no tail.
    khat = khat.masked_fill((columns == columns[0]).all(0), 0.0)
    error = _importance_error(columns, elpd, reff)
    is_repaired, bad = torch.zeros_like(elpd, dtype=torch.bool), {}
    rows = (~(khat <= FINITE_VARIANCE_KHAT)).nonzero().flatten()
    suspects = rows[khat[rows].argsort(descending=True)].tolist()
    deadline = time.perf_counter() + max_seconds
    for index in steps_of(suspects, len(suspects), "repair of LOO"):
        label = found.labels[index]
        if target is None or time.perf_counter() > deadline:
            why = "chains need all data" if target is None else "max_seconds were over"
            if not khat[index] <= loo.good_k:
                bad[label] = f"k-hat {khat[index]:.2f}, and {why}"
            continue
        path = _Path(target, found, index, deadline)
        value, its_error = path.run()
        if not path.settled or not its_error < DECISIONS.max_elpd_error:
            why = (
                f"Monte Carlo error {its_error:.2f}"
                if path.settled
                else "its chains did not converge"
            )
            bad[label] = f"k-hat {khat[index]:.2f}, and {why}"
        if math.isfinite(value):
            elpd[index], error[index], is_repaired[index] = value, its_error, True
    change = loo["elpd_loo"] - elpd.sum().item()
    return LeaveOneOut(
        elpd, error, khat, is_repaired, found.labels, bad, loo["p_loo"] + change, loo["good_k"]
    )


def _exported(found: Pointwise) -> tuple[Any, Tensor]:
    """Return ArviZ's data, and the relative efficiency of the draws for each observation."""
    chains = joined({"y": found.log_likelihood}, 4)
    likelihood = (chains["y"] - chains["y"].amax((0, 1))).exp()
    data = as_inferencedata(as_datatree({"posterior": {"y": likelihood}, "log_likelihood": chains}))
    number = chains["y"].shape[0] * chains["y"].shape[1]
    ess = import_arviz().ess(data.posterior, method="mean")["y"].values
    reff = torch.from_numpy(ess).flatten() / number
    return data, torch.where(reff.isfinite(), reff, 1.0).clamp(max=1.0)


def _importance_error(columns: Tensor, elpd: Tensor, reff: Tensor) -> Tensor:
    """Return the standard error of the smoothed weights' elpd, joined with their bias.

    The bias falls with the number of draws: it is at most about the difference between all draws
    and parts of them.
    """
    weights = _smoothed(columns, reff.mean().item())
    relative = (columns.T - elpd.unsqueeze(-1)).exp() - 1
    error = ((2 * weights).exp() * relative.square()).sum(-1).div(reff).log1p().sqrt()
    number = DECISIONS.num_parts
    parts = [columns[first::number] for first in range(number)]
    found = [(_smoothed(part, reff.mean().item()) + part.T).logsumexp(-1) for part in parts]
    return error.hypot(torch.stack(found).mean(0) - elpd)


def _smoothed(columns: Tensor, reff: float) -> Tensor:
    return torch.from_numpy(import_arviz().psislw(-columns.T.numpy(), reff)[0])


class _Path:
    """Bridges from the posterior to one without an observation, by chains in between if needed."""

    def __init__(self, target: Target, found: Pointwise, index: int, deadline: float) -> None:
        self.target, self.found, self.index, self.deadline = target, found, index, deadline
        self.settled = True

    def run(self) -> tuple[float, float]:
        """Return the elpd of the observation and its standard error."""
        full = self.found.log_likelihood[..., self.index]
        rows = LogWeights(-full.flatten()).resample(DECISIONS.repair_chains)
        start = {name: value.flatten(0, 1)[rows] for name, value in self.found.draws.items()}
        return self._bridge(full, 1.0, *self._chains(start, 0.0), 0.0, DECISIONS.max_halvings)

    def _bridge(
        self, upper: Tensor, top: float, lower: Tensor, draws: dict[str, Tensor], bottom: float,
        halvings: int,
    ) -> tuple[float, float]:  # fmt: skip
        """Bridge between two weights of the observation; halve the step if it is too long."""
        first, second = (top - bottom) * upper, (top - bottom) * lower
        value = bridge(first.flatten(), second.flatten())
        error = bridge_error(first, second, value)
        is_over = time.perf_counter() > self.deadline
        if error < DECISIONS.max_bridge_error or not halvings or is_over:
            return value.item(), error
        middle = (top + bottom) / 2
        rows = LogWeights((middle - bottom) * lower.flatten()).resample(DECISIONS.repair_chains)
        flat = {name: value.flatten(0, 1)[rows] for name, value in draws.items()}
        between, inner = self._chains(flat, middle)
        above = self._bridge(upper, top, between, inner, middle, halvings - 1)
        below = self._bridge(between, middle, lower, draws, bottom, halvings - 1)
        return above[0] + below[0], math.hypot(above[1], below[1])

    def _chains(self, start: dict[str, Tensor], weight: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return log-likelihoods of the observation, and draws, by chain, for one weight of it."""
        target, sites = self.target, self.found.sites
        weights = self.found.weights_with(torch.tensor([self.index]), weight)
        model = WeightedObservations(target.model, weights)
        left = max(1.0, self.deadline - time.perf_counter())
        with torch.enable_grad():
            chains = refine(
                model, start, *target.args, num_chains=DECISIONS.repair_chains, max_seconds=left,
                progress=False, model_kwargs=target.kwargs,
            )  # fmt: skip
        self.settled &= chains.settled
        draws = chains.get_samples(group_by_chain=True)
        flat = {name: value.flatten(0, 1) for name, value in draws.items()}
        values = observation_columns(target.log_likelihood(flat, list(sites)), sites)
        place = self.found.places[self.index]
        return values[:, place].unflatten(0, (chains.num_chains, -1)), draws
