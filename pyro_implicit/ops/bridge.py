# SPDX-License-Identifier: Apache-2.0
"""Normalising constants by bridge sampling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["bridge"]

NUM_ITERATIONS = 200


def bridge(log_target: Tensor, log_proposal: Tensor) -> Tensor:
    r"""The log of a normalising constant, by bridge sampling.

    **Example:**

    >>> bridge(torch.full((5,), 2.0), torch.full((5,), 2.0))
    tensor(2.)

    :param log_target: the log-ratio of density to proposal at draws of the target, ``(n,)``.
    :param log_proposal: the same at draws of the proposal, -inf where the density is none.

    **References:**

    1. Meng and Wong (1996), *Simulating ratios of normalizing constants via a simple identity: a
       theoretical exploration*, equation 4.1.
    """
    first, second = log_target.double(), log_proposal.double()
    log_share = math.log(len(first) / (len(first) + len(second)))
    log_rest = math.log(len(second) / (len(first) + len(second)))
    found = first.median()
    for _ in range(NUM_ITERATIONS):
        above = second - torch.logaddexp(log_share + second, log_rest + found)
        below = -torch.logaddexp(log_share + first, log_rest + found)
        before, found = found, _log_mean(above) - _log_mean(below)
        if (found - before).abs() < 1e-6:
            break
    return found.to(log_target)


def _log_mean(values: Tensor) -> Tensor:
    return values.logsumexp(0) - math.log(len(values))
