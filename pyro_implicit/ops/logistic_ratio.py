# SPDX-License-Identifier: Apache-2.0
"""The loss whose optimum is a density ratio: logistic classification of two sets of samples."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

__all__ = ["logistic_ratio_loss"]


def logistic_ratio_loss(q_logits: Tensor, p_logits: Tensor) -> Tensor:
    r"""Logistic loss of a discriminator T that tells samples of q from samples of p.

    .. math::
        E_q[-\log \sigma(T(x))] + E_p[-\log(1 - \sigma(T(x)))]

    is least at :math:`T = \log q / p`, where it is twice :math:`\log 2` less the Jensen-Shannon
    divergence of q and p. Each expectation is a mean over its own samples, so the two numbers of
    samples may differ; the sum of the two means is not halved.

    **Example:**

    >>> import torch
    >>> logistic_ratio_loss(torch.zeros(5), torch.zeros(3))  # a T that knows nothing: 2 log 2
    tensor(1.3863)

    :param q_logits: T at the samples of q, ``(*batch, num_q)``.
    :param p_logits: T at the samples of p, ``(*batch, num_p)``.
    :returns: ``(*batch)``, one loss for each pair of sets. Sum them to train one T on all.

    **References:**

    1. Mescheder, Nowozin and Geiger (2017), *Adversarial Variational Bayes*, eq 3.3.
    """
    return softplus(-q_logits).mean(-1) + softplus(p_logits).mean(-1)
