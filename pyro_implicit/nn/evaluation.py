# SPDX-License-Identifier: Apache-2.0
"""Scores of a network's predictions, calibration, and detection of out-of-distribution inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_implicit.nn.policy import COVERAGE_LEVELS
from pyro_implicit.nn.prediction import model_and_posterior, predictions
from pyro_implicit.nn.predictive_means import Prediction
from pyro_implicit.nn.reports import (
    Foreign,
    LabelReport,
    NumberReport,
    Reliability,
    average,
    detect,
)
from pyro_implicit.runtime.global_state import in_turn, with_seed

__all__ = ["evaluate"]

UNCERTAINTIES = (
    "max-probability", "entropy", "mutual information", "variance", "epistemic variance"
)  # fmt: skip


@in_turn
@with_seed
@torch.no_grad()
def evaluate(
    result: Any,
    loader: Iterable[Any],
    *,
    ood: Mapping[str, Iterable[Any]] | None = None,
    num_samples: int = 100,
    num_bins: int = 15,
    model: Callable[..., Any] | None = None,
    seed: int | None = None,
) -> LabelReport | NumberReport:
    r"""Score predictions on held-out data, and uncertainties on out-of-distribution data.

    Predictions are those of :func:`~pyro_implicit.nn.predict`. Memory grows by a few numbers for
    each row. Rows whose targets the model masks are neither scored nor counted.

    **Example:**

    >>> from torch import nn
    >>> from pyro_implicit.nn import classifier, to_bayesian_
    >>> model = classifier(to_bayesian_(nn.Linear(4, 3)), num_data=150)
    >>> ensemble = {"weight": torch.randn(5, 3, 4), "bias": torch.randn(5, 3)}
    >>> test = [(torch.randn(20, 4), torch.randint(3, (20,)))]
    >>> report = evaluate(ensemble, test, model=model)
    >>> print(report)
                                   test
    rows                             20
    accuracy                        ...
    negative log-likelihood         ...
    Brier score                     ...
    calibration error (ECE)         ...
    mean confidence                 ...
    entropy, nats                   ...
      of labels (aleatoric)         ...
      of weights (epistemic)        ...
    5 draws of the posterior

    :param result: what :func:`~pyro_implicit.fit` returned, or anything that
        :func:`~pyro_implicit.nn.predict` takes, with its ``model``.
    :param loader: minibatches ``(inputs, targets)``.
    :param ood: loaders of out-of-distribution inputs by name (of tuples the first part is read).
        The report says how well uncertainties separate these inputs from those of ``loader``.
        Requires scikit-learn, the extra ``networks``.
    :param num_samples: posterior draws, as for :func:`~pyro_implicit.nn.predict`.
    :param num_bins: equally wide bins of confidence for the expected calibration error,
        :math:`\sum_b \frac{n_b}{n} |\text{accuracy}_b - \text{confidence}_b|`.
    :param model: the model, if ``result`` does not know it.
    :param seed: seed of all random numbers, as for :func:`~pyro_implicit.nn.predict`.
    :returns: a report for ``print`` and ``plot()``: a :class:`LabelReport` or a
        :class:`NumberReport`.
    :raises TypeError: for an invalid loader, or ``ood`` without names.
    :raises ValueError: for an empty loader, tuples of other lengths, several labels a row, masks of
        all targets or of a part of a row's, or targets without a density, such as NaN or labels
        out of range.
    :raises ImportError: for ``ood`` without scikit-learn.
    """
    model, posterior = model_and_posterior(result, model)
    if ood is not None and not isinstance(ood, Mapping):
        raise TypeError(
            f"ood must be a dict of loaders by name, but got a {type(ood).__name__}. Cure: "
            'ood={"elsewhere": loader}'
        )
    number, parts = 0, []
    for found, target, unmasked in predictions(model, posterior, loader, num_samples, True):
        assert target is not None
        counted, number = _counted_rows(unmasked), found.num_samples
        read = _number_rows if found.probability is None else _label_rows
        rows = _uncertainties(found) | read(found, target)
        parts.append({name: value[counted] for name, value in rows.items()})
    columns = _columns(parts, "the loader is empty")
    if not len(columns["log_prob"]):
        raise ValueError("the model masks all targets. Cure: rows with observed targets")
    foreign = {}
    for name, others in (ood or {}).items():
        foreign[name] = _foreign(columns, predictions(model, posterior, others, num_samples, False))
    common = {
        "num_rows": len(columns["log_prob"]),
        "num_samples": number,
        "temperature": getattr(model, "temperature", 1.0),
        "ood": foreign,
        "uncertainty": {name: columns[name] for name in UNCERTAINTIES if name in columns},
        "log_prob": columns["log_prob"],
    }
    if "correct" in columns:
        return _label_report(columns, num_bins, common)
    return _number_report(columns, common)


def _columns(parts: list[dict[str, Tensor]], empty: str) -> dict[str, Tensor]:
    if not parts:
        raise ValueError(empty)
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


def _counted_rows(unmasked: Tensor) -> Tensor:
    elements = unmasked.reshape(len(unmasked), -1)
    counted = elements.any(-1)
    if (counted & ~elements.all(-1)).any():
        raise ValueError(
            "the model masks some targets of a row and not others, but evaluate scores whole rows. "
            "Cure: a mask of rows, or predict, whose mean has each target"
        )
    return counted


def _uncertainties(found: Prediction) -> dict[str, Tensor]:
    if found.probability is not None:
        assert found.entropy is not None and found.mutual_information is not None
        assert found.epistemic is not None
        return {
            "max-probability": 1 - found.probability.max(-1).values,
            "entropy": found.entropy,
            "mutual information": found.mutual_information,
            "epistemic variance": found.epistemic,
        }
    assert found.aleatoric is not None and found.epistemic is not None
    parts = found.aleatoric, found.epistemic
    aleatoric, epistemic = (part.reshape(len(part), -1).sum(-1) for part in parts)
    return {"variance": aleatoric + epistemic, "epistemic variance": epistemic}


def _label_rows(found: Prediction, target: Tensor) -> dict[str, Tensor]:
    assert found.probability is not None and found.log_prob is not None
    if found.probability.dim() != 2:
        raise ValueError(
            f"each row has labels of shape {tuple(found.probability.shape[1:-1])}, but evaluate "
            "scores one. Cure: predict, whose probability has them all"
        )
    labels = target.reshape(-1).long()
    hit = torch.nn.functional.one_hot(labels, found.probability.shape[-1])
    return {
        "correct": (found.probability.argmax(-1) == labels).float(),
        "log_prob": found.log_prob,
        "brier": (found.probability - hit).square().sum(-1),
    }


def _number_rows(found: Prediction, target: Tensor) -> dict[str, Tensor]:
    assert found.mean is not None and found.log_prob is not None
    error = (found.mean - target.reshape(found.mean.shape)).square()
    rows = {"square": error.reshape(len(error), -1).mean(-1), "log_prob": found.log_prob}
    return rows if found.pit is None else rows | {"pit": found.pit}


def _foreign(columns: dict[str, Tensor], found: Iterable[Any]) -> Foreign:
    parts = [_uncertainties(prediction) for prediction, *_ in found]
    scores = _columns(parts, "a loader of ood is empty")
    return Foreign(
        num_rows=len(next(iter(scores.values()))),
        detection={name: detect(columns[name], score) for name, score in scores.items()},
        uncertainty=scores,
    )


def _label_report(columns: dict[str, Tensor], num_bins: int, common: dict) -> LabelReport:
    confidence, correct = 1 - columns["max-probability"], columns["correct"]
    bins = (confidence * num_bins).ceil().long().clamp(1, num_bins) - 1
    count = torch.bincount(bins, minlength=num_bins)
    size = count.clamp(min=1)
    reliability = Reliability(
        share=count / len(confidence),
        confidence=torch.bincount(bins, confidence.double(), num_bins) / size,
        accuracy=torch.bincount(bins, correct.double(), num_bins) / size,
    )
    gap = (reliability.accuracy - reliability.confidence).abs()
    return LabelReport(
        accuracy=average(correct),
        nll=-average(columns["log_prob"]),
        brier=average(columns["brier"]),
        ece=(reliability.share * gap).sum().item(),
        reliability=reliability,
        **common,
    )


def _number_report(columns: dict[str, Tensor], common: dict) -> NumberReport:
    pit, coverage = columns.get("pit"), {}
    if pit is not None:
        inside = 2 * (pit - 0.5).abs()
        coverage = {level: average(inside <= level) for level in COVERAGE_LEVELS}
    return NumberReport(
        rmse=average(columns["square"]) ** 0.5,
        log_likelihood=average(columns["log_prob"]),
        coverage=coverage,
        pit=pit,
        **common,
    )
