# SPDX-License-Identifier: Apache-2.0
"""The closed form of the linear model, beside the library's bound and plain Gaussian algebra."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributions import MultivariateNormal

from benchmarks import invariances
from pyro_implicit import evidence_bound


@pytest.fixture(params=[1, 2, 7])
def model(request):
    return invariances.LinearModel(request.param, invariances.linear_data())


def log_evidence(model) -> float:
    number = len(model.y)
    covariance = model.prior_sd**2 + model.noise_sd**2 * torch.eye(number).double()
    return MultivariateNormal(torch.zeros(number).double(), covariance).log_prob(model.y).item()


def test_the_best_abiding_guide_is_the_posterior(model) -> None:
    q = model.abiding(*model.best(True))
    ones = torch.ones(model.dim, model.dim).double()
    precision = torch.eye(model.dim) / model.prior_variance
    precision = precision + len(model.y) / model.noise_sd**2 * ones
    torch.testing.assert_close(q.covariance, precision.inverse())
    mean = precision.inverse() @ ones[0] * model.y.sum() / model.noise_sd**2
    torch.testing.assert_close(q.mean, mean)
    assert model.elbo(q) == pytest.approx(log_evidence(model), abs=1e-9)


@pytest.mark.parametrize("parameters", [(0.3, 0.02), (-0.1, 0.4)])
def test_the_gap_is_the_divergence_between_the_guides(model, parameters) -> None:
    mean_field, abiding = model.mean_field(*parameters), model.abiding(*parameters)
    gap = model.elbo(abiding) - model.elbo(mean_field)
    assert gap == pytest.approx(invariances.divergence(mean_field, abiding), abs=1e-9)
    assert (gap > 0.01) == (model.dim > 1)


def test_the_best_mean_field_is_best_and_reverts_to_the_prior(model) -> None:
    loc, variance = model.best(False)
    best = model.elbo(model.mean_field(loc, variance))
    for factor in (0.9, 1.1):
        assert model.elbo(model.mean_field(factor * loc, variance)) < best
        assert model.elbo(model.mean_field(loc, factor * variance)) < best
    wide = invariances.LinearModel(1000, model.y)
    assert wide.mean_field(*wide.best(False)).covariance.sum() > 0.85 * model.prior_sd**2


@pytest.mark.parametrize("parameters", [None, (0.3, 0.02)])
def test_the_semi_implicit_guide_is_the_abiding_one(model, parameters) -> None:
    is_best = parameters is None
    parameters = parameters or model.best(True)
    guide = model.guide(*parameters)
    options = {"num_samples": 50, "num_mixing": 50, "num_starts": 1, "num_steps": 2}
    bound = evidence_bound(model, guide, **options)
    wanted = model.elbo(model.abiding(*parameters))
    assert bound.value == pytest.approx(wanted, abs=1e-9 + 4 * bound.standard_error)
    if is_best:  # it is the posterior: no draw is off
        assert wanted == pytest.approx(log_evidence(model), abs=1e-9)
        assert bound.standard_error < 1e-2


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    invariances.draw_linear([1, 2, 4], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
