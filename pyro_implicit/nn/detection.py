# SPDX-License-Identifier: Apache-2.0
"""How well an uncertainty tells foreign inputs from familiar ones. Needs torchmetrics."""

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
    :raises ImportError: without torchmetrics.
    """
    try:
        from torchmetrics.functional import classification
    except ImportError as error:
        raise ImportError(
            'ood= needs torchmetrics. Cure: pip install "pyro-implicit[networks]"'
        ) from error
    both = torch.cat([familiar, foreign]).cpu()
    is_foreign = torch.cat([torch.zeros(len(familiar)), torch.ones(len(foreign))]).long()
    # Ranks: torchmetrics would take scores above one for logits.
    distinct, rank = both.unique(return_inverse=True)
    score = (rank.double() + 1) / (len(distinct) + 1)
    specificity, _ = classification.binary_specificity_at_sensitivity(
        1 - score, 1 - is_foreign, min_sensitivity=KEPT
    )
    return Detection(
        auroc=classification.binary_auroc(score, is_foreign).item(),
        aupr=classification.binary_average_precision(score, is_foreign).item(),
        fpr95=1 - specificity.item(),
    )
