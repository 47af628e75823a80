# SPDX-License-Identifier: Apache-2.0
"""How well an uncertainty tells foreign inputs from familiar ones. Needs scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Detection", "detect"]

KEPT = 0.95


@dataclass(frozen=True)
class Detection:
    """Foreign inputs, found by an uncertainty that should be high there.

    :ivar auroc: The chance that a foreign input is the more uncertain of two, ties counting half.
    :ivar aupr: Average precision with foreign inputs as what is looked for.
    :ivar fpr95: The share of foreign inputs that pass where 95 % of the familiar ones do.
    """

    auroc: float
    aupr: float
    fpr95: float


def detect(familiar: Tensor, foreign: Tensor) -> Detection:
    """Compares the uncertainties of two sets of inputs.

    **Example:**

    >>> found = detect(torch.tensor([0.1, 0.2, 0.3, 0.6]), torch.tensor([0.5, 0.9]))
    >>> found.auroc, round(found.aupr, 3), found.fpr95
    (0.875, 0.833, 0.5)

    :param familiar: of inputs like the training data, ``(num_familiar,)``.
    :param foreign: of others, ``(num_foreign,)``.
    :raises ImportError: without scikit-learn.
    """
    try:
        from sklearn import metrics
    except ImportError as error:
        raise ImportError(
            'ood= needs scikit-learn. Cure: pip install "pyro-implicit[networks]"'
        ) from error
    score = torch.cat([familiar, foreign]).double().cpu().numpy()
    is_foreign = torch.cat([torch.zeros(len(familiar)), torch.ones(len(foreign))]).numpy()
    passed, kept, _ = metrics.roc_curve(1 - is_foreign, -score, drop_intermediate=False)
    return Detection(
        auroc=float(metrics.roc_auc_score(is_foreign, score)),
        aupr=float(metrics.average_precision_score(is_foreign, score)),
        fpr95=float(passed[kept >= KEPT][0]),
    )
