# SPDX-License-Identifier: Apache-2.0
"""Rows of a network's data that are held out of a part of its fit."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.fitting.policy import NetworkPolicy
from pyro_implicit.nn import LabelReport, NetworkModel, NumberReport, evaluate

__all__ = ["HeldOutRows", "describe_score", "is_worse", "split_rows"]


class HeldOutRows(NamedTuple):
    """Training and held-out rows of a network's data.

    ``model`` is the model of the training rows ``x``, ``y``: it has the priors and parameters of
    the whole model, and a smaller ``num_data``.
    """

    model: NetworkModel
    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor

    def score(self, posterior: Any, num_draws: int) -> LabelReport | NumberReport:
        """Return scores of the predictions for the held-out rows; random streams do not advance.

        :param posterior: a guide, chains or draws by site.
        :param num_draws: posterior draws, at most.
        """
        part = [(self.held_x, self.held_y)]
        return evaluate(posterior, part, model=self.model, num_samples=num_draws, seed=0)


def split_rows(
    model: NetworkModel, args: tuple, kwargs: Mapping[str, Any], policy: NetworkPolicy
) -> HeldOutRows | None:
    """Split the rows of a network's data, equally in each call.

    Every ``1 / share``-th row in the order of the targets is held out, so that both parts have
    similar targets. A class with a single row stays in the training part.

    **Example:**

    >>> from torch import nn
    >>> from pyro_implicit.nn import classifier, to_bayesian_
    >>> model = classifier(to_bayesian_(nn.Linear(1, 2)), num_data=200)
    >>> x, y = torch.randn(200, 1), torch.arange(200) % 2
    >>> rows = split_rows(model, (x, y), {}, NetworkPolicy())
    >>> len(rows.x), rows.held_y.bincount(), rows.model.num_data
    (180, tensor([10, 10]), 180)

    :param model: of all rows, with its ``args`` and ``kwargs``.
    :param policy: the share of held-out rows and their least number.
    :returns: None if there would be too few held-out rows, or without targets.
    """
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    x, y = given["x"], given.get("y")
    if y is None or policy.held_out_share * len(x) < policy.least_held_out:
        return None
    stride = round(1 / policy.held_out_share)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    labels = y.detach().reshape(len(y), -1)[:, 0].cpu()
    order = order[labels[order].argsort(stable=True)]
    held = order[stride // 2 :: stride]
    if not y.is_floating_point():
        held = held[labels.long().bincount()[labels[held].long()] > 1]
    kept = torch.ones(len(x), dtype=torch.bool)
    kept[held] = False
    held, rest = held.to(x.device), kept.nonzero().squeeze(-1).to(x.device)
    part = copy.copy(model)
    part.num_data = max(len(rest), round(model.num_data * len(rest) / len(x)))
    return HeldOutRows(part, x[rest], y[rest], x[held], y[held])


def describe_score(report: LabelReport | NumberReport) -> str:
    """Describe the held-out negative log-likelihood with its standard error."""
    error = report.log_prob.std().item() / math.sqrt(report.num_rows)
    return f"held-out NLL {-report.log_prob.mean().item():.3f} +- {error:.3f}"


def is_worse(
    new: LabelReport | NumberReport, old: LabelReport | NumberReport, num_errors: float
) -> bool:
    """Return whether scores of the same rows have fallen significantly.

    :param num_errors: standard errors of the mean difference over rows.
    """
    falls = (old.log_prob - new.log_prob).double()
    if not falls.isfinite().all():
        return not bool(new.log_prob.isfinite().all())
    return bool(falls.mean() > num_errors * falls.std() / math.sqrt(len(falls)))
