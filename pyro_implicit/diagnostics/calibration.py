# SPDX-License-Identifier: Apache-2.0
"""Simulation-based calibration of a way of fitting, on data drawn from the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_implicit.density.labels import element_labels
from pyro_implicit.density.model import refuse_subsampling
from pyro_implicit.diagnostics.policy import MOMENTS, REPORT
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.runtime.global_state import in_turn, seeded, with_seed
from pyro_implicit.runtime.messages import Printed, Table
from pyro_implicit.runtime.sites import is_flat, without_data

__all__ = [
    "Calibration",
    "calibration_of",
    "rank",
    "simulation_based_calibration",
    "simulation_trace",
]


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(Printed):
    """Ranks of true values among draws. ``print`` shows the histograms.

    :ivar ranks: by site, ``(num_simulations, *site shape)``, from 0 to ``num_samples``: how many of
        the draws lie below the truth.
    :ivar counts: by site, histograms ``(num_bins, *site shape)`` of the ranks.
    :ivar p_values: by site, ``(*site shape)``: of a chi-square test that ranks are uniform.
    :ivar num_samples: number of draws that each truth was compared with.
    """

    ranks: dict[str, Tensor]
    counts: dict[str, Tensor]
    p_values: dict[str, Tensor]
    num_samples: int

    @property
    def is_calibrated(self) -> bool:
        """Whether no rank is less uniform than chance allows, at 1 % for all scalars together."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of the scalars whose ranks are not uniform."""
        return tuple(label for label, _, p_value, _ in self._rows() if self._fails(p_value))

    def _fails(self, p_value: float) -> bool:
        return p_value * sum(p.numel() for p in self.p_values.values()) < MOMENTS.calibration_alarm

    def _rows(self) -> list[tuple[str, list[int], float, str]]:
        rows = []
        for name, ranks in self.ranks.items():
            parts = (ranks, self.counts[name], self.p_values[name].unsqueeze(0))
            columns = zip(*(part.reshape(len(part), -1).unbind(-1) for part in parts), strict=True)
            labels = element_labels(name, ranks.shape[1:])
            for label, (rank, count, p_value) in zip(labels, columns, strict=True):
                scaled = (rank.double() + 0.5) / (self.num_samples + 1)
                rows.append((label, count.tolist(), p_value.item(), _shape(scaled)))
        return sorted(rows, key=lambda row: row[2])

    def _blocks(self) -> Iterator[str | Table]:
        rows, count = self._rows(), len(next(iter(self.ranks.values())))
        yield f"Ranks of {count} true values among {self.num_samples} draws; uniform if right"
        cells = []
        for label, counts, p_value, shape in rows[: REPORT.max_rows]:
            bars = " ".join(f"{number:3d}" for number in counts)
            cells.append((label, bars, f"p = {p_value:.2g}", shape * self._fails(p_value)))
        yield Table(cells, align="l", indent="  ")
        if len(rows) > REPORT.max_rows:
            yield f"  ... {len(rows) - REPORT.max_rows} more, all closer to uniform"
        found = (
            f"{len(self.failures)} of {len(rows)} not calibrated" if self.failures else "uniform"
        )
        yield f"Verdict: {found}"


@with_seed  # not in turn: threads of an executor wait for theirs
def simulation_based_calibration(
    model: Callable[..., Any],
    fit: Callable[[Callable[[], Any]], Callable[..., Any] | Mapping[str, Tensor]],
    *args: Any,
    num_simulations: int = 100,
    num_samples: int = 99,
    num_bins: int = 10,
    executor: Executor | None = None,
    seed: int | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Calibration:
    r"""Test a way of fitting on data drawn from the model.

    Each simulation draws all latents and then all observed sites from the model, fits the model to
    these data, and ranks the true latents among draws of the fit. If the fit is the posterior, each
    rank is uniform on 0, ..., ``num_samples``, whatever the model. A U-shaped
    histogram shows posteriors that are too narrow, a hill posteriors that are too wide, a slope
    posteriors that are biased.

    The test averages over the prior: it may miss errors at the data set of interest, and it misses
    errors of the joint distribution if all marginals are correct.

    **Example:**

    >>> _ = pyro.set_rng_seed(0)
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> def fit(model):  # the posterior is N(y / 2, 1 / 2), but this is half as wide
    ...     y = poutine.trace(model).get_trace().nodes["y"]["value"]
    ...     return {"x": y / 2 + 0.25 * torch.randn(99)}
    >>> print(simulation_based_calibration(model, fit, torch.tensor(0.0)))
    Ranks of 100 true values among 99 draws; uniform if right
      x   ... p = ...  too narrow
    Verdict: 1 of 1 not calibrated

    :param model: a Pyro model with proper priors; its observed sites are drawn anew.
    :param fit: called with the model, which then takes no arguments and observes simulated data;
        returns a fitted guide, or draws: a dict of ``(num_samples or more, *site shape)``, of which
        evenly spaced ones are taken. It has a parameter store of its own each time.
    :param args: the model's arguments, as ``kwargs``: they give the data's shapes, and covariates.
        Data must reach the model by ``obs=`` alone.
    :param num_simulations: number of data sets and fits.
    :param num_samples: number of independent draws of each fit; thin those of MCMC.
    :param num_bins: number of bins of the histograms, at most a fifth of ``num_simulations``.
    :param executor: runs the fits, for instance a ``concurrent.futures.ProcessPoolExecutor`` or the
        ``get_executor()`` of a Dask client, for which ``model`` and ``fit`` must be picklable.
    :param seed: the seed of all random numbers of this call. The caller's random streams do not
        advance; without a seed they are used. Each fit has a stream of its own, so the result is
        the same with and without an executor.
    :param model_kwargs: keyword arguments of the model whose names this function has, too.
    :returns: a :class:`Calibration`: print it, or ask whether it ``is_calibrated``.
    :raises ValueError: for a site that cannot be simulated (a flat prior, a factor), for a model
        without latents or data, for too few draws, or bins too many.

    **References:**

    1. Talts, Betancourt, Simpson, Vehtari and Gelman (2018), *Validating Bayesian Inference
       Algorithms with Simulation-Based Calibration*.

    2. Säilynoja, Bürkner and Vehtari (2022), *Graphical test for discrete uniformity and its
       applications in goodness-of-fit evaluation and multiple sample comparison*.
    """
    if not 2 <= num_bins <= min(num_simulations // 5, num_samples + 1):
        raise ValueError(
            f"num_bins must be from 2 to {min(num_simulations // 5, num_samples + 1)}, a fifth of "
            f"num_simulations and at most num_samples + 1, but got {num_bins}"
        )
    kwargs = {**kwargs, **(model_kwargs or {})}
    simulations = _simulations(model, args, kwargs, num_simulations)
    seeds = torch.randint(2**31, (len(simulations),)).tolist()
    tasks = [
        (fit, partial(poutine.condition(model, data), *args, **kwargs), truth, num_samples, seed)
        for (truth, data), seed in zip(simulations, seeds, strict=True)
    ]
    all_ranks: dict[str, list[Tensor]] = {}
    for ranks in (map if executor is None else executor.map)(_ranks, tasks):
        for name, value in ranks.items():
            all_ranks.setdefault(name, []).append(value)
    return calibration_of(
        {name: torch.stack(values) for name, values in all_ranks.items()}, num_samples, num_bins
    )


@in_turn
def _simulations(
    model: Callable[..., Any], args: tuple, kwargs: dict[str, Any], number: int
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [_simulate(model, args, kwargs) for _ in range(number)]


@in_turn
def _ranks(task: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return the ranks of one simulation's latents, by site."""
    fit, conditioned, truth, num_samples, seed = task
    with seeded(seed), pyro.get_param_store().scope():
        fitted = fit(conditioned)
        if not isinstance(fitted, Mapping):
            fitted = draw(fitted, num_samples)
        return {
            name: rank(value, _thin(name, fitted, num_samples, value))
            for name, value in truth.items()
        }


def calibration_of(ranks: dict[str, Tensor], num_samples: int, num_bins: int) -> Calibration:
    """Test whether ranks are uniform.

    :param ranks: ranks by site, ``(num_simulations, *site_shape)``, from 0 to ``num_samples``.
    """
    bins = torch.arange(num_samples + 1) * num_bins // (num_samples + 1)
    counts, p_values = {}, {}
    for name, rank in ranks.items():
        expected = torch.bincount(bins).double() * len(rank) / (num_samples + 1)
        found = torch.stack([(bins[rank] == b).sum(0) for b in range(num_bins)])
        share = expected.reshape((-1,) + (1,) * (found.dim() - 1))
        statistic = ((found - share).square() / share).sum(0)
        freedom = torch.full_like(statistic, (num_bins - 1) / 2)
        counts[name], p_values[name] = found, torch.special.gammaincc(freedom, statistic / 2)
    return Calibration(ranks, counts, p_values, num_samples)


class _RefuseImproper(Messenger):
    def _pyro_sample(self, msg: Any) -> None:
        fn, name = msg["fn"], msg["name"]
        if is_flat(fn):
            raise ValueError(
                f"the prior of site '{name}' (ImproperUniform) is flat, so that no truth can be "
                "drawn from it. Cure: a proper prior, for instance a wide Normal"
            )
        if isinstance(fn, dist.Unit):
            raise ValueError(
                f"the factor '{name}' weighs latents, but makes no data that could be simulated. "
                "Cure: write it as pyro.sample(..., obs=...)"
            )


@torch.no_grad()
def simulation_trace(
    model: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    given: Mapping[str, Tensor] | None = None,
) -> Trace:
    """Return a trace in which the latents that are not given, and the observed sites, are drawn.

    :raises ValueError: for a flat prior or a factor.
    """
    with poutine.block(), _RefuseImproper():
        drawn = poutine.condition(without_data(model), dict(given or {}))
        return poutine.trace(drawn).get_trace(*args, **kwargs)


def _simulate(
    model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    trace = simulation_trace(model, args, kwargs)
    refuse_subsampling(trace, "a simulation")  # which has data of these rows alone
    truth: dict[str, Tensor] = {}
    data: dict[str, Tensor] = {}
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or site_is_subsample(site) or site["is_observed"]:
            continue  # observed ones are computed by the model
        (data if site["infer"].get("was_observed") else truth)[name] = site["value"]
    for sites, kind in ((truth, "latents"), (data, "observed sites")):
        if not sites:
            raise ValueError(
                f"the model has no {kind}, so there is nothing to calibrate. Cure: pass the "
                "arguments with which it has them (data of the right shape)"
            )
    return truth, data


def _thin(name: str, fitted: Mapping[str, Tensor], num_samples: int, truth: Tensor) -> Tensor:
    if name not in fitted:
        raise ValueError(
            f"fit returned no draws of site '{name}', only of {sorted(fitted)}. Cure: return a "
            "guide or draws of all latents"
        )
    draws = fitted[name]
    if len(draws) < num_samples or draws.shape[1:] != truth.shape:
        raise ValueError(
            f"fit returned draws of site '{name}' of shape {tuple(draws.shape)}. Cure: draws of "
            f"shape ({num_samples} or more, *{tuple(truth.shape)})"
        )
    return draws[torch.arange(num_samples) * len(draws) // num_samples]


def rank(truth: Tensor, draws: Tensor) -> Tensor:
    """Return how many draws lie below the truth, with ties at random, on the CPU."""
    below, ties = (draws < truth).sum(0), (draws == truth).sum(0)
    return (below + (torch.rand(truth.shape) * (ties.cpu() + 1)).long().to(below)).cpu()


def _shape(scaled: Tensor) -> str:
    count = len(scaled)
    slope = (scaled.mean() - 0.5).item() * math.sqrt(12 * count)
    # Of a uniform variable, (x - 1/2)^2 has mean 1/12 and variance 1/180.
    spread = ((scaled - 0.5).square().mean() - 1 / 12).item() * math.sqrt(180 * count)
    if abs(slope) > abs(spread):
        return "too low" if slope > 0 else "too high"
    return "too narrow" if spread > 0 else "too wide"
