# SPDX-License-Identifier: Apache-2.0
"""Reports of ``evaluate``: scores, a table and a figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_implicit.runtime.messages import Printed, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Detection",
    "Foreign",
    "LabelReport",
    "NumberReport",
    "Reliability",
    "average",
    "detect",
]


@dataclass(frozen=True)
class Reliability:
    """Calibration of labels by bins of confidence, each ``(num_bins,)``; 0 for empty bins.

    :ivar share: Share of the rows.
    :ivar confidence: Mean of the largest probabilities.
    :ivar accuracy: Share of correct labels.
    """

    share: Tensor
    confidence: Tensor
    accuracy: Tensor


@dataclass(frozen=True)
class Foreign:
    """Results on a set of out-of-distribution inputs.

    :ivar num_rows: Number of inputs.
    :ivar detection: Detection of the inputs by each uncertainty.
    :ivar uncertainty: By name, for each row.
    """

    num_rows: int
    detection: dict[str, Detection]
    uncertainty: dict[str, Tensor] = field(repr=False)


@dataclass(frozen=True, repr=False)
class _Report(Printed):
    num_rows: int
    num_samples: int
    temperature: float
    ood: dict[str, Foreign] = field(repr=False)
    uncertainty: dict[str, Tensor] = field(repr=False)
    log_prob: Tensor = field(repr=False)

    def _columns(self) -> dict[str, dict[str, Tensor]]:
        return {"test": self.uncertainty} | {n: set_.uncertainty for n, set_ in self.ood.items()}

    def _table(self, scores: dict[str, str], means: dict[str, list[str]]) -> Iterator[str | Table]:
        counts = [str(self.num_rows)] + [str(one.num_rows) for one in self.ood.values()]
        rows = {"rows": counts} | {name: [value] for name, value in scores.items()} | means
        for index, measure in enumerate(("auroc", "aupr", "fpr95") if self.ood else ()):
            for name in self.uncertainty:
                found = [getattr(one.detection[name], measure) for one in self.ood.values()]
                label = ("AUROC", "AUPR", "FPR at 95 %")[index]
                rows[f"{label} by {name}"] = [""] + [f"{100 * value:.1f}" for value in found]
        head = ["", "test", *self.ood]
        cells = [[name, *row] for name, row in rows.items()]
        yield Table([head, *cells], header=True, widths=[0] + [8] * len(counts))
        yield f"{self.num_samples} draws of the posterior"
        if self.temperature != 1:
            yield f"tempered: the likelihood to the power 1/{self.temperature:g}, not Bayes"


@dataclass(frozen=True, repr=False)
class LabelReport(_Report):
    """Scores of predicted labels; ``print`` shows a table.

    :ivar log_prob: Log-probability of each row's label.
    :ivar accuracy: Share of correct labels.
    :ivar nll: Mean negative log-probability of the labels.
    :ivar brier: Brier score: mean squared distance of probabilities and label, summed over classes,
        from 0 to 2.
    :ivar ece: Expected calibration error.
    :ivar reliability: The bins of the expected calibration error.
    """

    accuracy: float
    nll: float
    brier: float
    ece: float
    reliability: Reliability = field(repr=False)

    @property
    def confidence(self) -> dict[str, float]:
        """Mean largest probability in each set."""
        return {
            name: 1 - average(found["max-probability"]) for name, found in self._columns().items()
        }

    @property
    def entropy(self) -> dict[str, tuple[float, float]]:
        """Mean aleatoric and epistemic part, in nats, in each set."""
        parts = {}
        for name, found in self._columns().items():
            epistemic = average(found["mutual information"])
            parts[name] = average(found["entropy"]) - epistemic, epistemic
        return parts

    def _blocks(self) -> Iterator[str | Table]:
        scores = {
            "accuracy": f"{self.accuracy:.4f}",
            "negative log-likelihood": f"{self.nll:.4f}",
            "Brier score": f"{self.brier:.4f}",
            "calibration error (ECE)": f"{self.ece:.4f}",
        }
        entropies = list(self.entropy.values())
        means = {
            "mean confidence": [f"{value:.3f}" for value in self.confidence.values()],
            "entropy, nats": [f"{a + e:.3f}" for a, e in entropies],
            "  of labels (aleatoric)": [f"{a:.3f}" for a, _ in entropies],
            "  of weights (epistemic)": [f"{e:.3f}" for _, e in entropies],
        }
        return self._table(scores, means)

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Plot the reliability and the entropies of all sets.

        :param path: file to save the figure to, or None.
        :returns: a matplotlib figure without a window.
        """
        figure, (left, right) = _figure()
        full = self.reliability.share > 0
        confidence, accuracy = (
            part[full].tolist() for part in (self.reliability.confidence, self.reliability.accuracy)
        )
        edges = [index / len(full) for index in range(len(full) + 1)]
        left.stairs(self.reliability.share.tolist(), edges, fill=True, color="0.85", label="share")
        left.plot([0, 1], [0, 1], color="0.5", linewidth=1)
        left.plot(confidence, accuracy, "o-", color="C0", label="accuracy")
        left.set(xlabel="confidence", title=f"ECE {self.ece:.3f}", xlim=(0, 1), ylim=(0, 1))
        left.legend(frameon=False)
        _histograms(right, {n: found["entropy"] for n, found in self._columns().items()})
        right.set(xlabel="entropy, nats")
        return _saved(figure, path)


@dataclass(frozen=True, repr=False)
class NumberReport(_Report):
    """Scores of predicted numbers, in the targets' units; ``print`` shows a table.

    :ivar log_prob: Log-density of each row's targets.
    :ivar rmse: Root mean squared error of the mean.
    :ivar log_likelihood: Mean log-density of the targets.
    :ivar coverage: Share of targets inside the central interval, by its probability; empty for
        distributions without ``cdf``.
    :ivar pit: Predictive distribution function at each target, uniform if predictions are
        calibrated; None without ``cdf``.
    """

    rmse: float
    log_likelihood: float
    coverage: dict[float, float]
    pit: Tensor | None = field(repr=False)

    @property
    def sd(self) -> dict[str, tuple[float, float]]:
        """Root mean aleatoric and epistemic variance, summed over targets, in each set."""
        parts = {}
        for name, found in self._columns().items():
            epistemic = average(found["epistemic variance"])
            total = average(found["variance"])
            parts[name] = max(0.0, total - epistemic) ** 0.5, epistemic**0.5
        return parts

    def _blocks(self) -> Iterator[str | Table]:
        scores = {"RMSE": f"{self.rmse:.4g}", "log-likelihood": f"{self.log_likelihood:.4f}"}
        scores |= {f"{level:.0%} interval covers": f"{c:.1%}" for level, c in self.coverage.items()}
        sds = list(self.sd.values())
        means = {
            "sd of noise (aleatoric)": [f"{a:.3g}" for a, _ in sds],
            "sd of weights (epistemic)": [f"{e:.3g}" for _, e in sds],
        }
        return self._table(scores, means)

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Plot the coverage of all central intervals, and the predictive sds of all sets.

        :param path: file to save the figure to, or None.
        :returns: a matplotlib figure without a window.
        """
        figure, (left, right) = _figure()
        left.plot([0, 1], [0, 1], color="0.5", linewidth=1)
        if self.pit is not None:
            inside = 2 * (self.pit.flatten().double() - 0.5).abs()
            levels = torch.linspace(0, 1, 101, dtype=torch.float64)
            shares = (inside <= levels.unsqueeze(-1)).double().mean(-1)
            left.plot(levels.tolist(), shares.tolist(), color="C0")
        left.set(xlabel="central interval", ylabel="share of targets inside")
        left.set(title=f"RMSE {self.rmse:.3g}", xlim=(0, 1), ylim=(0, 1))
        sds = {name: found["variance"].sqrt() for name, found in self._columns().items()}
        _histograms(right, sds)
        right.set(xlabel="predictive sd")
        return _saved(figure, path)


def average(values: Tensor) -> float:
    """Return the mean in float64."""
    return values.double().mean().item()


def _figure() -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = list(figure.subplots(1, 2))
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _histograms(axes: Axes, sets: dict[str, Tensor]) -> None:
    highest = max(values.max().item() for values in sets.values()) or 1.0
    edges = torch.linspace(0, highest, 31)
    for name, values in sets.items():
        axes.hist(values.tolist(), edges.tolist(), density=True, histtype="step", label=name)
    axes.set_yticks([])
    axes.legend(frameon=False)


def _saved(figure: Figure, path: str | PathLike[str] | None) -> Figure:
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


@dataclass(frozen=True)
class Detection:
    """Detection of out-of-distribution inputs by an uncertainty.

    :ivar auroc: Probability that an out-of-distribution input is more uncertain than a familiar
        one; ties count half.
    :ivar aupr: Average precision, with out-of-distribution inputs as positives.
    :ivar fpr95: Share of out-of-distribution inputs below the threshold that accepts 95 % of the
        familiar inputs.
    """

    auroc: float
    aupr: float
    fpr95: float


def detect(familiar: Tensor, foreign: Tensor) -> Detection:
    """Compare the uncertainties of two sets of inputs.

    **Example:**

    >>> found = detect(torch.tensor([0.1, 0.2, 0.3, 0.6]), torch.tensor([0.5, 0.9]))
    >>> found.auroc, round(found.aupr, 3), found.fpr95
    (0.875, 0.833, 0.5)

    :param familiar: uncertainties of inputs like the training data, ``(num_familiar,)``.
    :param foreign: uncertainties of out-of-distribution inputs, ``(num_foreign,)``.
    :raises ImportError: without scikit-learn.
    """
    try:
        from sklearn import metrics
    except ImportError as error:
        raise ImportError(
            'ood= needs scikit-learn. Cure: pip install "pyro-implicit[networks]"'
        ) from error
    score = torch.cat([familiar, foreign]).double().cpu().numpy()
    is_foreign = torch.cat([torch.zeros(len(familiar)), torch.ones(len(foreign))]).cpu().numpy()
    passed, kept, _ = metrics.roc_curve(1 - is_foreign, -score, drop_intermediate=False)
    return Detection(
        auroc=float(metrics.roc_auc_score(is_foreign, score)),
        aupr=float(metrics.average_precision_score(is_foreign, score)),
        fpr95=float(passed[kept >= 0.95][0]),
    )
