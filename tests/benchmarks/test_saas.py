# SPDX-License-Identifier: Apache-2.0
"""The function and the predictions of the SAAS benchmark."""

from __future__ import annotations

import pytest
import torch

from benchmarks.saas import data, hartmann, log_predictive, matern

pytestmark = pytest.mark.usefixtures("double")


def test_hartmann_has_its_known_minimum():
    best = torch.tensor([[0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573, 0.5]])
    assert hartmann(best).item() == pytest.approx(-3.32237, abs=1e-4)


def test_predictions_are_conditional_normals():
    x, y, x_test, y_test = data(12, 7)
    draws = {
        "outputscale": torch.tensor([2.0]), "mean": torch.tensor([0.3]),
        "noise": torch.tensor([0.05]), "tau": torch.tensor([0.5]), "inverse": torch.rand(1, 7),
    }  # fmt: skip
    expected = []
    for row in range(2):
        some = torch.cat([x, x_test[row : row + 1]]) * (0.5 * draws["inverse"][0]).sqrt()
        joint = 2 * matern(some, some) + 0.05 * torch.eye(13)
        with_test, without = (
            torch.distributions.MultivariateNormal(torch.full((n,), 0.3), joint[:n, :n])
            for n in (13, 12)
        )
        both = torch.cat([y, y_test[row : row + 1]])
        expected.append((with_test.log_prob(both) - without.log_prob(y)).item())
    found, error = log_predictive(draws, (12, 7), num_test=2)
    assert found == pytest.approx(sum(expected) / 2)
    assert error == pytest.approx(abs(expected[0] - expected[1]) / 2)
