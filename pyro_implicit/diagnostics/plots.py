# SPDX-License-Identifier: Apache-2.0
"""Pictures of posteriors. Needs matplotlib, which is imported only when a picture is drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING

import torch
from pyro.ops.stats import quantile
from torch import Tensor

from pyro_implicit.diagnostics.labels import index_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_posteriors"]

# The Okabe-Ito palette, which colour-blind readers can tell apart; grey is for the reference.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_REFERENCE_COLOUR = "#9A9A9A"
_NUM_BINS = 40
_MASSES = (0.5, 0.9)


def plot_posteriors(
    draws: Mapping[str, Mapping[str, Tensor]],
    sites: Sequence[str] | None = None,
    max_coordinates: int = 6,
    reference: str | None = None,
    path: str | PathLike[str] | None = None,
) -> Figure:
    """Overlays any number of posteriors.

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
    :param sites: the sites to show; default: those that all labels have.
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
    _add_legend(figure, colours, reference, size)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _coordinates(
    draws: Mapping[str, Mapping[str, Tensor]], sites: Sequence[str] | None, max_coordinates: int
) -> list[tuple[str, tuple[int, ...]]]:
    """The coordinates to show: the first of each site, then the second of each, and so on."""
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
        counts, edges = torch.histogram(draws, _NUM_BINS, range=limits)
        # Draws outside the axes keep their share of the mass.
        density = counts / (len(draws) * (edges[1] - edges[0]))
        peaks[label] = float(density.max())
        filled = label == reference
        alpha = 0.6 if filled else 1.0
        axes.stairs(
            density.numpy(), edges.numpy(), color=colours[label], fill=filled, alpha=alpha, lw=1.4
        )
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
    """Bin centres, the smoothed share of draws in each bin, and the levels of it above which lie
    ``_MASSES`` of the draws; a level is left out if too many draws are outside the limits."""
    bins = 2 * _NUM_BINS
    counts, edges = torch.histogramdd(pair, [bins, bins], range=[*x_limits, *y_limits])
    smooth_x, smooth_y = map(_smoothing, pair.T, edges)
    density = smooth_x @ counts @ smooth_y.T / len(pair)
    ranked, order = density.flatten().sort(descending=True)
    mass = counts.flatten()[order].cumsum(dim=0) / len(pair)
    indices = [int((mass < target).sum()) for target in _MASSES if mass[-1] >= target]
    # Where a single bin holds them all, the contour is a little below its top.
    levels = {float(ranked[index] if index else 0.6 * ranked[0]) for index in indices}
    x, y = ((edge[1:] + edge[:-1]) / 2 for edge in edges)
    return x, y, density, sorted(levels)


def _smoothing(values: Tensor, edges: Tensor) -> Tensor:
    """The matrix that smooths a histogram of ``values`` by a Gaussian kernel."""
    lower, upper = quantile(values, [0.25, 0.75])
    # Less than Scott's bandwidth, which would wash out the neck of a funnel.
    bandwidth = 0.7 * len(values) ** (-1 / 6) * (upper - lower) / 1.349
    bandwidth = torch.maximum(bandwidth, edges[1] - edges[0])
    kernel = (-0.5 * ((edges[:-1, None] - edges[:-1]) / bandwidth).square()).exp()
    return kernel / kernel.sum(dim=0)


def _add_legend(figure: Figure, colours: dict[str, str], reference: str | None, size: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(color=colour, alpha=0.6, label=label)
        if label == reference
        else Line2D([], [], color=colour, label=label)
        for label, colour in colours.items()
    ]
    if size > 1:  # The upper right is empty.
        figure.legend(handles=handles, loc="upper right", frameon=False)
    else:
        figure.legend(handles=handles, loc="outside upper center", frameon=False, ncols=2)
