# SPDX-License-Identifier: Apache-2.0
"""What :func:`~pyro_implicit.diagnostics.compare` found, as numbers, a table and a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pyro_implicit.diagnostics.labels import index_label
from pyro_implicit.diagnostics.plots import plot_posteriors
from pyro_implicit.diagnostics.reference_check import ReferenceCheck
from pyro_implicit.runtime.printing import Printed, Table, short_repr

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["QUANTILES", "Comparison", "SiteComparison"]

#: The quantiles whose errors are reported.
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

#: Ratio to the sampling floor up to which nothing can be told from exact draws.
AT_FLOOR = 1.5

_MAX_ROWS = 20
_HEADER = ("", "mean", "sd", "ref mean", "ref sd", "mean err", "sd ratio", "quantile err")


@dataclass(frozen=True, eq=False, repr=False)
class SiteComparison:
    """The marginals of one site, each a tensor of the site's shape.

    :ivar guide_mean: means of the guide's draws, in the site's units; so are the next three.
    :ivar guide_sd: standard deviations of the guide's draws.
    :ivar reference_mean: means of the reference.
    :ivar reference_sd: standard deviations of the reference.
    :ivar mean_error: guide's mean minus reference's, in reference standard deviations.
    :ivar sd_ratio: guide's standard deviation over the reference's.
    :ivar quantile_errors: guide's quantiles at :data:`QUANTILES` minus the reference's, in
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
    :ivar reference: whether these are good enough to judge by.
    :ivar compared: what was, in place of the sites; empty for these.
    :ivar distance_interval: 95 % interval of the distance of the distributions, without sampling
        noise (:func:`~pyro_implicit.diagnostics.sliced_wasserstein_interval`).
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

    @property
    def verdict(self) -> str:
        """In words, which side is the worse one, and by how much."""
        faults = "; ".join(self.reference.faults())
        if self.reference.is_worse:
            return f"the reference is the worse one: {faults}"
        if faults:
            return f"the reference is too poor to judge by: {faults}"
        ratio, (low, high) = self.floor_ratio, self.floor_ratio_interval
        if high <= AT_FLOOR or (low <= 1 and ratio <= AT_FLOOR):
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
        guide, reference = _count(self.guide_draws), _count(self.reference_draws)
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
        yield f"Verdict: {self.verdict}"

    def to_dict(self) -> dict[str, Any]:
        """All numbers but the draws as plain Python lists and floats, for ``json.dumps``.

        :returns: by name; a number that is not finite becomes None.
        """
        return {
            "num_samples": _count(self.guide_draws),
            "num_reference_samples": _count(self.reference_draws),
            "quantiles": list(QUANTILES),
            "sites": {
                name: {field: _plain(value.tolist()) for field, value in vars(site).items()}
                for name, site in self.sites.items()
            },
            "sliced_wasserstein": _plain(self.sliced_wasserstein),
            "sampling_floor": _plain(self.sampling_floor),
            "floor_ratio": _plain(self.floor_ratio),
            "floor_ratio_interval": [_plain(end) for end in self.floor_ratio_interval],
            "sliced_wasserstein_constrained": _plain(self.sliced_wasserstein_constrained),
            "squared_mmd": _plain(self.squared_mmd),
            "compared": self.compared,
            "verdict": self.verdict,
            "reference": {
                name: value if isinstance(value, (str, bool)) or value is None else _plain(value)
                for name, value in asdict(self.reference).items()
            },
            "only_in_guide": list(self.only_in_guide),
            "only_in_reference": list(self.only_in_reference),
        }

    def plot(
        self,
        sites: Sequence[str] | None = None,
        max_coordinates: int = 6,
        path: str | PathLike[str] | None = None,
    ) -> Figure:
        """Marginals and pairs of both sides, overlaid.

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
    shape = site.guide_mean.shape
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
    labels = [index_label(name, index) for index in itertools.product(*map(range, shape))]

    def row(i: int) -> tuple[str, ...]:
        *moments, mean_error, sd_ratio, error, level = (column[i] for column in columns)
        return (
            labels[i],
            *(f"{value:.4g}" for value in moments),
            f"{mean_error:+.2f}",
            f"{sd_ratio:.2f}",
            f"{error:+.2f} at {QUANTILES[int(level)]:>3.0%}",
        )

    shown = count if count <= _MAX_ROWS else _MAX_ROWS - 1
    yield from map(row, range(shown))
    if shown < count:
        worst = int(largest.values.reshape(-1)[shown:].argmax()) + shown
        yield (f"... {count - shown} more, worst:", *[""] * (len(_HEADER) - 1))
        yield row(worst)


def _count(draws: dict[str, Tensor]) -> int:
    return len(next(iter(draws.values())))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if math.isfinite(value) else None
