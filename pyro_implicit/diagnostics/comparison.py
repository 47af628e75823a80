# SPDX-License-Identifier: Apache-2.0
"""Result of :func:`~pyro_implicit.diagnostics.compare`: numbers, table and pictures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from pyro.ops.stats import quantile
from torch import Tensor

from pyro_implicit.density.labels import element_labels, index_label
from pyro_implicit.runtime.messages import Printed, Table, refuse_string, short_repr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from pyro_implicit.diagnostics.policy import COMPARE, REFERENCE, REPORT, ComparePolicy

__all__ = ["Comparison", "ReferenceCheck", "SiteComparison", "plot_posteriors"]


_HEADER = ("", "mean", "sd", "ref mean", "ref sd", "mean err", "sd ratio", "quantile err")


@dataclass(frozen=True)
class ReferenceCheck:
    """Checks of reference draws.

    :ivar effective_sample_size: the smallest of any coordinate; None of fewer than 4 draws in a
        chain.
    :ivar worst_ess: which coordinate that is.
    :ivar independent_draws: how many independent draws the reference is worth on average over
        coordinates, at most its number of draws.
    :ivar r_hat: the largest split R-hat of any coordinate; None where chains are not told apart.
    :ivar worst_r_hat: which coordinate that is.
    :ivar settled: whether a stopping rule of their own has seen that many short chains forgot where
        they began, so that R-hat does not count.
    :ivar missing: the mass of the posterior, as a share, of places where the guide has draws and
        the reference has none; None if it was not searched for.
    :ivar unsearched: the error that prevented this search; empty if there was none.
    """

    effective_sample_size: float | None = None
    worst_ess: str = ""
    r_hat: float | None = None
    worst_r_hat: str = ""
    settled: bool = False
    missing: float | None = None
    independent_draws: float | None = None
    unsearched: str = ""

    def is_worse(self, policy: ComparePolicy = COMPARE) -> bool:
        """Return whether the reference lacks mass that the guide has."""
        return self.missing is not None and self.missing > policy.least_mass

    def faults(self, policy: ComparePolicy = COMPARE) -> Iterator[str]:
        """Yield what is wrong with the reference, the worst first."""
        if self.is_worse(policy):
            yield f"no draws where about {self.missing:.0%} of the mass is, as the guide knows"
        if self.r_hat is not None and not self.settled and not self.r_hat <= policy.max_r_hat:
            yield f"R-hat {self.r_hat:.2f} of `{self.worst_r_hat}`"
        if self.effective_sample_size is not None and self.effective_sample_size < policy.least_ess:
            yield f"{self.effective_sample_size:.0f} effective draws of `{self.worst_ess}`"


@dataclass(frozen=True, eq=False, repr=False)
class SiteComparison:
    """The marginals of one site, each a tensor of the site's shape.

    :ivar guide_mean: means of the guide's draws, in the site's units; so are the next three.
    :ivar guide_sd: standard deviations of the guide's draws.
    :ivar reference_mean: means of the reference.
    :ivar reference_sd: standard deviations of the reference.
    :ivar mean_error: guide's mean minus reference's, in reference standard deviations.
    :ivar sd_ratio: guide's standard deviation over the reference's.
    :ivar quantile_errors: guide's quantiles at 5, 25, 50, 75 and 95 % minus the reference's, in
        reference standard deviations: ``(5, *site shape)``.
    """

    guide_mean: Tensor
    guide_sd: Tensor
    reference_mean: Tensor
    reference_sd: Tensor
    mean_error: Tensor
    sd_ratio: Tensor
    quantile_errors: Tensor
    __repr__ = short_repr


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Printed):
    """A guide against reference draws. ``print`` shows the table.

    :ivar sites: the marginals of every compared site.
    :ivar sliced_wasserstein: sliced 2-Wasserstein distance of all coordinates jointly, each in
        reference standard deviations: the headline.
    :ivar sampling_floor: the distance that as many exact draws as the guide's would show: both sets
        have sampling noise, the reference that of its effective sample size.
    :ivar sliced_wasserstein_constrained: the distance in the sites' own units.
    :ivar squared_mmd: unbiased squared maximum mean discrepancy of the standardised draws.
    :ivar only_in_guide: sites not compared, as the reference lacks them.
    :ivar only_in_reference: sites not compared, as the guide lacks them.
    :ivar guide_draws: the compared draws of the guide, ``(num_samples, *site shape)``.
    :ivar reference_draws: the compared draws of the reference.
    :ivar reference: checks of the reference draws.
    :ivar compared: the quantities that were compared; empty for the sites.
    :ivar distance_interval: 95 % interval of the distance of the distributions, without sampling
        noise (:func:`~pyro_implicit.diagnostics.sliced_wasserstein_interval`).
    :ivar policy: the limits of the verdict.
    """

    sites: dict[str, SiteComparison]
    sliced_wasserstein: float
    sampling_floor: float
    sliced_wasserstein_constrained: float
    squared_mmd: float
    only_in_guide: tuple[str, ...]
    only_in_reference: tuple[str, ...]
    guide_draws: dict[str, Tensor]
    reference_draws: dict[str, Tensor]
    reference: ReferenceCheck = ReferenceCheck()
    compared: str = ""
    distance_interval: tuple[float, float] = (0.0, math.inf)
    policy: ComparePolicy = field(default_factory=ComparePolicy)

    @property
    def verdict(self) -> str:
        """Which side is worse, and by how much."""
        faults = "; ".join(self.reference.faults(self.policy))
        if self.reference.is_worse(self.policy):
            return f"the reference is the worse one: {faults}"
        if faults:
            return f"the reference is too poor to judge by: {faults}"
        ratio, (low, high) = self.floor_ratio, self.floor_ratio_interval
        if high <= self.policy.at_floor or (low <= 1 and ratio <= self.policy.at_floor):
            return (
                f"the guide is as near as exact draws would be, at most {high:.1f} times as far off"
            )
        far = f"{ratio:.1f} times as far off as exact draws would be"
        if low > 1:
            return f"the guide is {far} (95 % interval {low:.1f} to {high:.1f})"
        return f"cannot tell: {far}, but noise alone may do that (95 % interval 1 to {high:.1f})"

    @property
    def floor_ratio(self) -> float:
        """The headline distance in units of its sampling floor: 1 is perfect."""
        return self.sliced_wasserstein / self.sampling_floor if self.sampling_floor else math.inf

    @property
    def floor_ratio_interval(self) -> tuple[float, float]:
        """95 % interval of the ratio that guides of this quality have on average: from 1."""
        if not self.sampling_floor:
            return 1.0, math.inf
        low, high = (math.hypot(1.0, end / self.sampling_floor) for end in self.distance_interval)
        return low, high

    def _blocks(self) -> Iterator[str | Table]:
        rows: list[tuple[str, ...]] = [_HEADER]
        for name, site in self.sites.items():
            rows.extend(_site_rows(name, site))
        yield Table(rows, header=True)
        yield ""
        guide, reference = _num_draws(self.guide_draws), _num_draws(self.reference_draws)
        coordinates = sum(site.guide_mean.numel() for site in self.sites.values())
        if self.compared:
            yield f"Compared in place of the latents: {self.compared}"
        yield f"Joint, {guide} guide draws against {reference} of the reference, dim {coordinates}"
        ratio = f"= {self.floor_ratio:.1f} x its sampling floor {self.sampling_floor:.4g}"
        yield Table(
            [
                ("sliced W2, standardised", f"{self.sliced_wasserstein:.4g}  {ratio}"),
                ("sliced W2, constrained", f"{self.sliced_wasserstein_constrained:.4g}"),
                ("squared MMD", f"{self.squared_mmd:.3g}"),
            ],
            align="l",
            indent="  ",
        )
        yield "Errors of means and quantiles are in reference sds; of the quantiles, the largest."
        for side, names in (("guide", self.only_in_guide), ("reference", self.only_in_reference)):
            if names:
                yield f"Not compared, only in the {side}: {', '.join(names)}"
        if self.reference.unsearched:
            yield f"Whether the reference lacks mass is unknown: {self.reference.unsearched}"
        yield f"Verdict: {self.verdict}"

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers except the draws as plain Python lists and floats, for ``json.dumps``.

        :returns: by name; a number that is not finite becomes None.
        """
        hidden = ("guide_draws", "reference_draws", "distance_interval", "policy")
        numbers = {name: value for name, value in vars(self).items() if name not in hidden}
        return _plain(
            {
                **numbers,
                "num_samples": _num_draws(self.guide_draws),
                "num_reference_samples": _num_draws(self.reference_draws),
                "quantiles": REFERENCE.quantiles,
                "sites": {name: vars(site) for name, site in self.sites.items()},
                "floor_ratio": self.floor_ratio,
                "floor_ratio_interval": self.floor_ratio_interval,
                "verdict": self.verdict,
                "reference": asdict(self.reference),
            }
        )

    def plot(
        self,
        sites: Sequence[str] | None = None,
        max_coordinates: int = 6,
        path: str | PathLike[str] | None = None,
    ) -> Figure:
        """Plot marginals and pairs of both sides.

        See :func:`~pyro_implicit.diagnostics.plot_posteriors`.

        :param sites: the sites to show; default: all compared ones.
        :param max_coordinates: number of coordinates to show at most.
        :param path: where to save the picture, if anywhere.
        :returns: the matplotlib figure.
        """
        return plot_posteriors(
            {"reference": self.reference_draws, "guide": self.guide_draws},
            sites=sites,
            max_coordinates=max_coordinates,
            reference="reference",
            path=path,
        )


def _site_rows(name: str, site: SiteComparison) -> Iterator[tuple[str, ...]]:
    largest = site.quantile_errors.abs().max(dim=0)
    count = site.guide_mean.numel()
    columns = [
        value.reshape(-1).tolist()
        for value in (
            site.guide_mean,
            site.guide_sd,
            site.reference_mean,
            site.reference_sd,
            site.mean_error,
            site.sd_ratio,
            site.quantile_errors.gather(0, largest.indices.unsqueeze(0)),
            largest.indices,
        )
    ]
    labels = element_labels(name, site.guide_mean.shape)

    def row(i: int) -> tuple[str, ...]:
        *moments, mean_error, sd_ratio, error, level = (column[i] for column in columns)
        return (
            labels[i],
            *(f"{value:.4g}" for value in moments),
            f"{mean_error:+.2f}",
            f"{sd_ratio:.2f}",
            f"{error:+.2f} at {REFERENCE.quantiles[int(level)]:>3.0%}",
        )

    shown = count if count <= REPORT.max_rows else REPORT.max_rows - 1
    yield from map(row, range(shown))
    if shown < count:
        worst = int(largest.values.reshape(-1)[shown:].argmax()) + shown
        yield (f"... {count - shown} more, worst:", *[""] * (len(_HEADER) - 1))
        yield row(worst)


def _num_draws(draws: dict[str, Tensor]) -> int:
    return len(next(iter(draws.values())))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# The Okabe-Ito palette, which colour-blind readers can tell apart; grey is for the reference.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_REFERENCE_COLOUR = "#9A9A9A"


def plot_posteriors(
    draws: Mapping[str, Mapping[str, Tensor]],
    sites: Sequence[str] | None = None,
    max_coordinates: int = 6,
    reference: str | None = None,
    path: str | PathLike[str] | None = None,
) -> Figure:
    """Plot any number of posteriors on top of each other.

    Histograms of the marginals stand on the diagonal; below, for each pair of coordinates, the
    smallest regions that hold 50 % and 90 % of the draws. Coordinates are taken in turn from the
    sites, so that each site shows. The axes span the central 98 % of the reference and a margin (of
    all draws where no reference is named).

    **Example:**

    >>> z = torch.randn(500, 2)
    >>> figure = plot_posteriors({"NUTS": {"z": z}, "guide": {"z": 0.5 * z}}, reference="NUTS")
    >>> len(figure.axes)
    3

    :param draws: for each label, draws ``(num_samples, *site shape)`` by site.
    :param sites: the sites to show; default: the sites that all labels have.
    :param max_coordinates: number of coordinates to show at most.
    :param reference: the label to be drawn as a filled grey background.
    :param path: where to save the picture, if anywhere.
    :returns: the matplotlib figure, which belongs to no window.
    :raises ValueError: if a site or the reference is unknown, or no site is common to all.
    """
    from matplotlib.figure import Figure

    if reference is not None and reference not in draws:
        raise ValueError(f"the reference {reference!r} is not among the labels {list(draws)}.")
    coordinates = _coordinates(draws, sites, max_coordinates)
    titles = [index_label(name, at) for name, at in coordinates]
    # The reference comes first, so that all others lie on top of it.
    labels = sorted(draws, key=lambda label: label != reference)
    matrices = {label: _matrix(draws[label], coordinates) for label in labels}
    limits = _limits(matrices[reference] if reference else torch.cat(list(matrices.values())))
    palette = itertools.cycle(_COLOURS)
    colours = {k: _REFERENCE_COLOUR if k == reference else next(palette) for k in labels}

    size = len(titles)
    figure = Figure(figsize=(max(5.0, 2.2 * size),) * 2, layout="constrained")
    grid = figure.add_gridspec(size, size)
    for column, row in itertools.combinations_with_replacement(range(size), 2):
        axes = figure.add_subplot(grid[row, column])
        if row == column:
            marginals = {label: matrices[label][:, row] for label in labels}
            _draw_marginals(axes, marginals, limits[row], colours, reference)
        else:
            for label in labels:
                pair = matrices[label][:, [column, row]]
                filled = label == reference
                _draw_pair(axes, pair, limits[column], limits[row], colours[label], filled)
        axes.tick_params(labelsize="small", labelbottom=row == size - 1, labelleft=column == 0)
        axes.set_xlim(*limits[column])
        if row == size - 1:
            axes.set_xlabel(titles[column])
        if row == column:
            axes.set_yticks([])
        else:
            axes.set_ylim(*limits[row])
            axes.set_ylabel(titles[row] if column == 0 else "")
    handles, _ = figure.axes[0].get_legend_handles_labels()
    place = {"loc": "upper right"} if size > 1 else {"loc": "outside upper center", "ncols": 2}
    figure.legend(handles=handles, frameon=False, **place)  # the upper right is empty
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _coordinates(
    draws: Mapping[str, Mapping[str, Tensor]], sites: Sequence[str] | None, max_coordinates: int
) -> list[tuple[str, tuple[int, ...]]]:
    """The coordinates to show: the first of each site, then the second of each, and so on."""
    refuse_string(sites=sites)
    first = next(iter(draws.values()), {})
    common = [name for name in first if all(name in other for other in draws.values())]
    chosen = common if sites is None else list(sites)
    unknown = [name for name in chosen if name not in common]
    if unknown or not chosen:
        raise ValueError(
            f"cannot plot the sites {unknown or chosen}: the labels {list(draws)} have these "
            f"sites in common: {common}."
        )
    by_site = [
        [(name, index) for index in itertools.product(*map(range, first[name].shape[1:]))]
        for name in chosen
    ]
    turns = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*by_site)))
    picked = set(itertools.islice(turns, max_coordinates))
    return [coordinate for site in by_site for coordinate in site if coordinate in picked]


def _matrix(draws: Mapping[str, Tensor], coordinates: list[tuple[str, tuple[int, ...]]]) -> Tensor:
    columns = []
    for name, index in coordinates:
        all_draws: tuple[slice | int, ...] = (slice(None), *index)
        columns.append(draws[name][all_draws].detach().cpu().double())
    return torch.stack(columns, dim=-1)


def _limits(matrix: Tensor) -> list[tuple[float, float]]:
    low, high = quantile(matrix, [0.01, 0.99])
    margin = 0.15 * (high - low) + 1e-6 * high.abs().clamp(min=1.0)
    return list(zip((low - margin).tolist(), (high + margin).tolist(), strict=True))


def _draw_marginals(
    axes: Axes,
    values: dict[str, Tensor],
    limits: tuple[float, float],
    colours: dict[str, str],
    reference: str | None,
) -> None:
    peaks = {}
    for label, draws in values.items():
        counts, edges = torch.histogram(draws, REPORT.num_bins, range=limits)
        # Draws outside the axes keep their share of the mass.
        density = counts / (len(draws) * (edges[1] - edges[0]))
        peaks[label] = float(density.max())
        filled = label == reference
        alpha = 0.6 if filled else 1.0
        style: dict[str, Any] = {"color": colours[label], "fill": filled, "alpha": alpha, "lw": 1.4}
        axes.stairs(density.numpy(), edges.numpy(), label=label, **style)
    top = max(peaks.values())
    # A guide that has collapsed may leave the axes; it must not flatten the reference.
    axes.set_ylim(0.0, 1.05 * (top if reference is None else min(top, 4 * peaks[reference])))


def _draw_pair(
    axes: Axes,
    pair: Tensor,
    x_limits: tuple[float, float],
    y_limits: tuple[float, float],
    colour: str,
    filled: bool,
) -> None:
    x, y, density, levels = _regions(pair, x_limits, y_limits)
    if filled:
        # Overlapping fills make the inner region darker.
        for level in levels:
            axes.contourf(x, y, density.T, [level, math.inf], colors=colour, alpha=0.5)
    elif levels:
        axes.contour(x, y, density.T, levels, colors=colour, linewidths=1.4)


def _regions(
    pair: Tensor, x_limits: tuple[float, float], y_limits: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    """Bin centres, the smoothed share of draws in each bin, and the levels of the contours."""
    bins = 2 * REPORT.num_bins
    counts, edges = torch.histogramdd(pair, [bins, bins], range=[*x_limits, *y_limits])
    smooth_x, smooth_y = map(_smoothing, pair.T, edges)
    density = smooth_x @ counts @ smooth_y.T / len(pair)
    ranked, order = density.flatten().sort(descending=True)
    mass = counts.flatten()[order].cumsum(dim=0) / len(pair)
    indices = [int((mass < target).sum()) for target in REPORT.masses if mass[-1] >= target]
    # Where a single bin holds them all, the contour is a little below its top.
    levels = {float(ranked[index] if index else 0.6 * ranked[0]) for index in indices}
    x, y = ((edge[1:] + edge[:-1]) / 2 for edge in edges)
    return x, y, density, sorted(levels)


def _smoothing(values: Tensor, edges: Tensor) -> Tensor:
    lower, upper = quantile(values, [0.25, 0.75])
    # Less than Scott's bandwidth, which would wash out the neck of a funnel.
    bandwidth = 0.7 * len(values) ** (-1 / 6) * (upper - lower) / 1.349
    bandwidth = torch.maximum(bandwidth, edges[1] - edges[0])
    kernel = (-0.5 * ((edges[:-1, None] - edges[:-1]) / bandwidth).square()).exp()
    return kernel / kernel.sum(dim=0)
