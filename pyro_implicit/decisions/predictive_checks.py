# SPDX-License-Identifier: Apache-2.0
"""Prior and posterior predictive checks: do data of the model look like the observed data?"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.decisions.pointwise import (
    ObservedSite,
    Pointwise,
    observed_sites,
    refuse_point,
)
from pyro_implicit.decisions.policy import DECISIONS
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.policy import REPORT
from pyro_implicit.export import as_datatree, as_inferencedata, model_groups, quiet_arviz
from pyro_implicit.ops.importance_weights import pareto_smoothed
from pyro_implicit.ops.policy import EVEN_EFFICIENCY, RELIABLE_KHAT
from pyro_implicit.runtime.messages import Printed, Table, refuse_no_probability, short_repr

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Band", "PredictiveCheck", "SiteCheck", "Statistic", "predictive_check"]

Statistics = Mapping[str, Callable[[Tensor], Tensor]]


class Statistic(NamedTuple):
    """A test statistic: its ``observed`` value, the replicated ones, ``(num_draws,)``, and the
    ``tail`` probability that a replicated value is larger (ties count half)."""

    observed: float
    replicated: Tensor
    tail: float

    def __repr__(self) -> str:
        return short_repr(self)


class Band(NamedTuple):
    """An observed curve and the band in which it should lie, each ``(num_points,)``.

    ``x`` are its points: probabilities (PIT-ECDF), predicted probabilities (binned residuals), or
    values (rootogram, in square roots of frequencies).
    """

    x: Tensor
    observed: Tensor
    low: Tensor
    high: Tensor

    @property
    def num_outside(self) -> int:
        """The number of points at which the curve is outside of the band."""
        return int(((self.observed < self.low) | (self.observed > self.high)).sum())

    def __repr__(self) -> str:
        return short_repr(self)


@dataclass(frozen=True, eq=False, repr=False)
class SiteCheck:
    """The check of one observed site.

    :ivar kind: by the type of the site: ``"continuous"``, ``"count"`` or ``"binary"``.
    :ivar observed: the data, ``(num_observations, *event_shape)``, without masked observations.
    :ivar replicated: data drawn from the model, ``(num_draws, num_observations, *event_shape)``.
    :ivar statistics: test statistics by name.
    :ivar pit: probability integral transform of each value, ``(num_values,)``: uniform if the
        predictions are calibrated. In a posterior check, it is that of leave-one-out predictions,
        of observations for which these are reliable.
    :ivar pit_ecdf: the distribution function of ``pit`` minus that of a uniform variable, with a
        simultaneous 95 % band (Säilynoja et al., 2022); None without a value.
    :ivar frequencies: of counts, the rootogram: square roots of the frequencies, with 95 %
        intervals of the replicated ones.
    :ivar residuals: of binary data, mean residuals in bins of the predicted probability, with two
        standard errors.
    :ivar is_prior: whether the data were drawn from the prior, which need not be calibrated.
    :ivar num_unreliable: observations whose leave-one-out predictions importance weights cannot
        give (Pareto k-hat above .7): the posterior without them is another, or draws are fewer
        than 25.
    """

    kind: Literal["continuous", "count", "binary"]
    observed: Tensor
    replicated: Tensor
    statistics: dict[str, Statistic]
    pit: Tensor
    pit_ecdf: Band | None
    frequencies: Band | None = None
    residuals: Band | None = None
    is_prior: bool = False
    num_unreliable: int = 0
    __repr__ = short_repr

    def coverage(self, mass: float) -> float:
        """Return the share of the values of ``pit`` inside of their central predictive intervals;
        NaN if there are none.

        :param mass: the probability of the intervals.
        :raises ValueError: for a ``mass`` outside of (0, 1).
        """
        refuse_no_probability(mass=mass)
        return ((self.pit - 0.5).abs() <= mass / 2).double().mean().item()

    def interval(self, mass: float) -> Tensor:
        """Return central predictive intervals, ``(2, num_observations, *event_shape)``.

        :param mass: their probability.
        :raises ValueError: for a ``mass`` outside of (0, 1).
        """
        refuse_no_probability(mass=mass)
        tails = torch.tensor([0.5 - mass / 2, 0.5 + mass / 2]).to(self.replicated.double())
        return self.replicated.double().quantile(tails, dim=0)

    @property
    def is_miscalibrated(self) -> bool:
        """Whether the PIT-ECDF leaves its band, wherever the values that are not counted lie.

        These are often outliers: without them, predictions of a true model look too wide.
        """
        band = self.pit_ecdf
        if band is None:
            return False
        share = self.num_unreliable / len(self.observed)
        lowest = (1 - share) * (band.observed + band.x)
        is_outside = (lowest > band.x + band.high) | (lowest + share < band.x + band.low)
        return bool(is_outside.any())

    @property
    def faults(self) -> list[str]:
        """What the model does not reproduce, in words."""
        found = [
            f"{name}: {one.observed:.3g} where replicated data have {one.replicated.mean():.3g}"
            for name, one in self.statistics.items()
            if not DECISIONS.tail <= one.tail <= 1 - DECISIONS.tail
        ]
        if self.is_prior:
            return found
        if self.is_miscalibrated:
            found.append("predictions are not calibrated: the PIT-ECDF leaves its 95 % band")
        # Twice the share of points that chance alone puts outside of their intervals.
        limit = 2 * (1 - DECISIONS.band_mass)
        for name, band in (("residuals", self.residuals), ("frequencies", self.frequencies)):
            if band is not None and band.num_outside > max(1, limit * len(band.x)):
                found.append(f"{band.num_outside} of {len(band.x)} {name} are outside of the band")
        return found


@dataclass(frozen=True, eq=False, repr=False)
class PredictiveCheck(Printed):
    """Observed data next to data drawn from the prior or the posterior. ``print`` shows the table.

    :ivar group: ``"prior"`` or ``"posterior"``.
    :ivar sites: the checks by observed site. The sites of a loop with one observation each are one
        series, such as ``"y_0 to y_99"``.
    """

    group: Literal["prior", "posterior"]
    sites: dict[str, SiteCheck]

    def _blocks(self) -> Iterator[str | Table]:
        for name, site in self.sites.items():
            count = f"{len(site.replicated)} data sets from the {self.group}"
            yield f"Site '{name}', {site.kind}: {len(site.observed)} observations, {count}"
            rows: list[tuple[str, ...]] = [("", "observed", "mean", "5%", "95%", "P(larger)")]
            for statistic, (observed, replicated, tail) in site.statistics.items():
                ends = replicated.quantile(replicated.new_tensor([0.05, 0.95])).tolist()
                numbers = observed, replicated.mean().item(), *ends
                rows.append((statistic, *(f"{one:.4g}" for one in numbers), f"{tail:.3f}"))
            yield Table(rows, header=True, indent="  ")
            if len(site.pit):
                shares = (
                    f"{site.coverage(m):.0%} of the values in {m:.0%} intervals" for m in (0.5, 0.9)
                )
                yield f"  {' and '.join(shares)}"
            if site.num_unreliable:
                yield (
                    "  not counted, as the draws cannot give predictions without them (k-hat above "
                    ".7: the posterior without them is another, or draws are fewer than 25): "
                    f"{site.num_unreliable}"
                )
            yield from (f"  ! {fault}" for fault in site.faults)

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Plot each site: the data by type, the PIT-ECDF with its band, and the first statistic.

        Continuous data show densities (ArviZ), counts a rootogram, binary data binned residuals.

        :param path: where to save the picture, if anywhere.
        :returns: the matplotlib figure, which belongs to no window.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 2.9 * len(self.sites)), layout="constrained")
        axes = figure.subplots(len(self.sites), 3, squeeze=False)
        for (name, site), (data, pit, statistic) in zip(self.sites.items(), axes, strict=True):
            if site.residuals is not None:
                _draw(data, site.residuals, "o")
                data.set(xlabel="predicted probability", ylabel="mean residual")
            elif site.frequencies is not None:
                _draw(data, site.frequencies, "o")
                data.set(xlabel=name, ylabel="square root of frequency")
            else:
                self._draw_densities(data, name, site)
            if site.pit_ecdf is not None:
                _draw(pit, site.pit_ecdf, "-")
            pit.set(xlabel="PIT", ylabel="ECDF - uniform")
            label, first = next(iter(site.statistics.items()))
            statistic.hist(first.replicated, bins=REPORT.num_bins, color="0.8")
            statistic.axvline(first.observed, color="C1")
            statistic.set(xlabel=f"{label} of {name}", yticks=[])
        if path is not None:
            figure.savefig(path)
        return figure

    def _draw_densities(self, axis: Any, name: str, site: SiteCheck) -> None:
        groups: dict[str, Mapping[str, Tensor]] = {
            f"{self.group}_predictive": {name: site.replicated.unsqueeze(0)},
            "observed_data": {name: site.observed},
        }
        with quiet_arviz() as arviz:
            data = as_inferencedata(as_datatree(groups))
            number = min(DECISIONS.num_curves, len(site.replicated))
            arviz.plot_ppc(
                data, group=self.group, num_pp_samples=number, random_seed=0, ax=axis, textsize=9
            )
        low, high = site.observed.min().item(), site.observed.max().item()
        axis.set_xlim(low - (high - low) / 2, high + (high - low) / 2)


def _draw(axis: Any, band: Band, style: str) -> None:
    axis.fill_between(band.x, band.low, band.high, color="0.85")
    axis.plot(band.x, band.observed, style, color="C1", markersize=4)


@torch.no_grad()
def predictive_check(
    group: Literal["prior", "posterior"],
    target: Target,
    draws: Mapping[str, Tensor],
    statistics: Statistics | None = None,
) -> PredictiveCheck:
    """Draw data from the prior or the posterior, and compare them with the observed data.

    :param group: which of both.
    :param target: the posterior.
    :param draws: draws by site, ``(num_chains, num_draws, *site_shape)``; as many data sets are
        drawn. In a prior check, only their shapes matter.
    :param statistics: test statistics by name; see :meth:`Fit.check_posterior_predictive
        <pyro_implicit.fitting.Fit.check_posterior_predictive>`.
    :raises ValueError: for posterior draws that are all one point, a model without observed sites,
        a flat prior in a prior check, constant continuous data, a statistic that is no number, or
        replicated data that are not finite.
    """
    if group == "posterior":
        refuse_point(draws)
    flat = {name: value.flatten(0, 1) for name, value in draws.items()}
    found = observed_sites(target, flat)
    source = (target.model, target.args, target.kwargs)
    number = len(next(iter(flat.values())))
    if group == "prior":
        groups = model_groups(draws, source, prior=number)["prior_predictive"]
    else:
        groups = model_groups(draws, source, posterior_predictive=True)["posterior_predictive"]
    replicas = {name: groups[name].flatten(0, 1)[:, site.used] for name, site in found.items()}
    for name, replicated in replicas.items():
        if not replicated.double().isfinite().all():
            raise ValueError(
                f"data of site '{name}' that were drawn from the {group} are not finite. Cure: a "
                "prior whose data are finite, or float64"
            )
    weights: dict[str, Tensor] = {}
    if group == "posterior" and not target.joint_sites(list(found)):
        sizes = [len(site.events) for site in found.values()]
        parts = _left_out_weights(target, draws).split(sizes)
        weights = dict(zip(found, parts, strict=True))
    sites = {}
    for label, names in _series(found).items():
        with torch.device("cpu"):
            sites[label] = _check(
                label,
                found[names[0]].is_discrete,
                torch.cat([found[name].events for name in names]),
                torch.cat([replicas[name] for name in names], 1),
                statistics,
                torch.cat([weights[name] for name in names]) if weights else None,
                group == "prior",
            )
    return PredictiveCheck(group, sites)


def _series(sites: Mapping[str, ObservedSite]) -> dict[str, list[str]]:
    """Return the names of sites by label: a loop's sites of one observation each are one series."""
    found: dict[tuple[str, torch.Size, bool], list[str]] = {}
    for name, site in sites.items():
        key = name if len(site.events) > 1 else re.sub(r"\d+", "#", name)
        found.setdefault((key, site.events.shape, site.is_discrete), []).append(name)
    return {
        names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}": names
        for names in found.values()
    }


def _left_out_weights(target: Target, draws: Mapping[str, Tensor]) -> Tensor:
    """Return normalised weights of the draws, ``(num_observations, num_draws)``, or NaN for an
    observation without reliable ones."""
    logs = -Pointwise.of(target, draws).log_likelihood.flatten(0, 1).T
    weights = logs.softmax(-1)
    is_even = weights.square().sum(-1).reciprocal() > EVEN_EFFICIENCY * logs.shape[-1]
    for row in (~is_even).nonzero().flatten().tolist():
        weights[row] = math.nan
        if logs[row].max() < math.inf:
            smoothed = pareto_smoothed(logs[row])
            if smoothed.khat <= RELIABLE_KHAT:
                weights[row] = smoothed.log_weights.exp()
    return weights


def _check(
    name: str,
    is_discrete: bool,
    observed: Tensor,
    replicated: Tensor,
    statistics: Statistics | None,
    weights: Tensor | None,
    is_prior: bool,
) -> SiteCheck:
    observed, replicated = observed.cpu(), replicated.cpu()
    is_binary = is_discrete and bool(((replicated == 0) | (replicated == 1)).all())
    kind: Literal["continuous", "count", "binary"] = "continuous"
    if is_discrete:
        kind = "binary" if is_binary else "count"
    functions = statistics
    if functions is None:  # a single value has no standard deviation
        is_single = observed.numel() == 1
        functions = {k: f for k, f in _DEFAULTS[kind].items() if not (is_single and k == "sd")}
    found = {
        label: _statistic(f"{label} of '{name}'", function, observed, replicated)
        for label, function in functions.items()
    }
    pit = _pit(observed.double(), replicated.double(), weights)
    num_unreliable = 0 if weights is None else int(weights.isnan().any(-1).sum())
    pit = pit[~pit.isnan()]
    return SiteCheck(
        kind, observed, replicated, found, pit, _pit_ecdf(pit) if len(pit) else None,
        frequencies=_rootogram(observed, replicated) if kind == "count" else None,
        residuals=_binned_residuals(observed, replicated) if kind == "binary" else None,
        is_prior=is_prior, num_unreliable=num_unreliable,
    )  # fmt: skip


def _statistic(
    label: str, function: Callable[[Tensor], Tensor], observed: Tensor, replicated: Tensor
) -> Statistic:
    value = torch.as_tensor(function(observed.double()))
    if value.numel() != 1:
        raise ValueError(
            f"the statistic {label} gives {tuple(value.shape)} values. Cure: a function of data "
            "(num_observations, *event_shape) to one number"
        )
    found = torch.stack([torch.as_tensor(function(one)).reshape(()) for one in replicated.double()])
    for data, values in (("observed", value), ("some replicated", found)):
        if values.isnan().any():
            raise ValueError(
                f"the statistic {label} is NaN for {data} data. Cure: a function that is defined "
                "for all data which the model draws"
            )
    tail = (found > value).double().mean() + (found == value).double().mean() / 2
    return Statistic(value.item(), found.double(), tail.item())


def _share_of_zeros(data: Tensor) -> Tensor:
    return (data == 0).double().mean()


_DEFAULTS: dict[str, Statistics] = {
    "continuous": {"mean": torch.mean, "sd": torch.std, "min": torch.min, "max": torch.max},
    "count": {
        "mean": torch.mean,
        "sd": torch.std,
        "share of zeros": _share_of_zeros,
        "max": torch.max,
    },
    "binary": {"share of ones": torch.mean},
}


def _pit(observed: Tensor, replicated: Tensor, weights: Tensor | None) -> Tensor:
    """Return the PIT of each value, randomised between ties, ``(num_values,)``."""
    size = len(observed)
    values = observed.reshape(size, 1, -1)
    draws = replicated.movedim(0, 1).reshape(size, len(replicated), -1)
    if weights is None:
        weights = torch.full(draws.shape[:2], 1 / draws.shape[1], dtype=torch.float64)
    below, ties = (
        (weights.unsqueeze(-1) * part).sum(1) for part in (draws < values, draws == values)
    )
    return (below + torch.rand_like(below) * ties).flatten()


def _pit_ecdf(pit: Tensor) -> Band:
    """Return the ECDF minus the uniform distribution, with ArviZ's simultaneous band."""
    with quiet_arviz():
        from arviz.stats.ecdf_utils import ecdf_confidence_band
    number = min(len(pit), DECISIONS.num_ecdf_points)
    points = torch.arange(1, number + 1, dtype=torch.float64) / (number + 1)
    ecdf = (pit.unsqueeze(-1) <= points).double().mean(0)
    band = ecdf_confidence_band(len(pit), points.numpy(), points.numpy(), prob=DECISIONS.band_mass)
    low, high = (torch.as_tensor(one) - points for one in band)
    return Band(points, ecdf - points, low, high)


def _rootogram(observed: Tensor, replicated: Tensor) -> Band:
    """Return square roots of the frequencies of all values; large values share the last bin."""
    last = int(observed.double().quantile(0.99)) + 1
    values = torch.arange(min(int(observed.min()), 0), last + 1)

    def frequencies(data: Tensor) -> Tensor:
        cut = data.reshape(len(data), -1, 1).clamp(max=last)
        return (cut == values).sum(1).double().sqrt()

    counts, tail = frequencies(replicated), (1 - DECISIONS.band_mass) / 2
    low, high = counts.quantile(counts.new_tensor([tail, 1 - tail]), dim=0)
    return Band(values.double(), frequencies(observed.unsqueeze(0))[0], low, high)


def _binned_residuals(observed: Tensor, replicated: Tensor) -> Band:
    predicted = replicated.double().mean(0).flatten()
    order = predicted.argsort()
    residuals = (observed.double().flatten() - predicted)[order]
    number = math.isqrt(len(order))
    groups = predicted[order].tensor_split(number)
    centres = torch.stack([group.mean() for group in groups])
    means = torch.stack([group.mean() for group in residuals.tensor_split(number)])
    errors = torch.stack([(group * (1 - group)).sum().sqrt() / len(group) for group in groups])
    return Band(centres, means, -2 * errors, 2 * errors)
