# SPDX-License-Identifier: Apache-2.0
"""The logistic loss by hand, and its optimum, the log density ratio."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from pyro_implicit.ops.density_ratio import logistic_ratio_loss

pytestmark = pytest.mark.usefixtures("double")


def test_loss_of_two_logits_by_hand():
    q_logits, p_logits = torch.tensor([0.3, -2.0]), torch.tensor([1.5, 0.0, -4.0])
    sigmoid = lambda t: 1 / (1 + math.exp(-t))  # noqa: E731
    expected = -(math.log(sigmoid(0.3)) + math.log(sigmoid(-2.0))) / 2
    expected -= sum(math.log(1 - sigmoid(t)) for t in (1.5, 0.0, -4.0)) / 3
    assert logistic_ratio_loss(q_logits, p_logits).item() == pytest.approx(expected, rel=1e-12)


def test_loss_is_batched_and_finite_for_huge_logits():
    q_logits, p_logits = 3 * torch.randn(2, 4, 5), 3 * torch.randn(2, 4, 7)
    loss = logistic_ratio_loss(q_logits, p_logits)
    assert loss.shape == (2, 4)
    torch.testing.assert_close(loss[1, 2], logistic_ratio_loss(q_logits[1, 2], p_logits[1, 2]))
    huge = torch.tensor([1e4], dtype=torch.float32)
    assert logistic_ratio_loss(-huge, huge).item() == pytest.approx(2e4)
    assert logistic_ratio_loss(huge, -huge).item() == 0


def test_loss_is_least_at_the_log_ratio():
    """On a grid, weighted by both densities, so that the expectations are exact."""
    x = torch.linspace(-8, 8, 4001)
    q, p = Normal(1.0, 0.5), Normal(0.0, 1.0)
    step = x[1] - x[0]

    def expected_loss(logits):
        one = logits.unsqueeze(-1)  # the loss of each point alone, then the integral
        none = torch.full_like(one, math.inf)
        of_q, of_p = logistic_ratio_loss(one, -none), logistic_ratio_loss(none, one)
        return step * (q.log_prob(x).exp() * of_q + p.log_prob(x).exp() * of_p).sum()

    logits = (q.log_prob(x) - p.log_prob(x)).requires_grad_()
    least = expected_loss(logits)
    (gradient,) = torch.autograd.grad(least, logits)
    torch.testing.assert_close(gradient, torch.zeros_like(x), rtol=0, atol=1e-12)
    mixture = (q.log_prob(x).exp() + p.log_prob(x).exp()) / 2
    divergence = sum(
        step * (d.log_prob(x).exp() * (d.log_prob(x) - mixture.log())).sum() / 2 for d in (q, p)
    )
    assert least.item() == pytest.approx(2 * (math.log(2) - divergence.item()), rel=1e-9)
    for change in (0.1, -0.1, 0.1 * x):
        assert expected_loss(logits.detach() + change) > least
