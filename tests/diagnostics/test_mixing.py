# SPDX-License-Identifier: Apache-2.0
"""R-hat between and within chains, by quantities."""

from __future__ import annotations

import math

import pytest
import torch

from pyro_implicit.diagnostics.mixing import Mixing, mixing
from pyro_implicit.diagnostics.policy import VERDICT
from pyro_implicit.diagnostics.verdict import Diagnosis, _calibration_findings
from pyro_implicit.mcmc.stopping import Drift
from pyro_implicit.nn import NumberReport


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_separate_chains_have_a_large_r_hat_between_them():
    noise, apart = torch.randn(4, 2000, 10), torch.arange(4.0).reshape(4, 1, 1)
    found = mixing({"mean": noise + apart, "quiet": torch.randn(4, 2000)})
    # The offsets 0 to 3 have variance 5 / 3.
    assert found.between == pytest.approx(math.sqrt(1 + 5 / 3), rel=0.02)
    assert found.within == pytest.approx(1.0, abs=0.001)
    assert found.effective_sample_size < 20


def test_drifting_chains_have_a_large_r_hat_within_them():
    noise = torch.randn(4, 2000, 10)
    noise[:, 1000:] += 2.0
    found = mixing({"mean": noise})
    # Half means 2 apart have variance 2.
    assert found.within == pytest.approx(math.sqrt(1 + 2), rel=0.02)
    assert found.between == pytest.approx(1.0, abs=0.01)


def test_predictions_that_hardly_vary_do_not_matter():
    values = torch.randn(4, 2000, 10)
    values[..., 0] = 1e-3 * (torch.randn(4, 2000) + 10 * torch.arange(4.0).unsqueeze(-1))
    assert mixing({"mean": values}).between < 1.01


def test_independent_draws_are_all_effective():
    found = mixing({"mean": torch.randn(4, 2000, 10)})
    assert found.effective_sample_size == pytest.approx(8000, rel=0.1)
    assert found.between == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("shape", [(1, 50, 2), (4, 7, 2)])
def test_too_few_draws_have_none(shape):
    assert mixing({"mean": torch.randn(shape)}) is None


def test_constant_quantities_have_none():
    assert mixing({"mean": torch.ones(4, 50, 2)}) is None


def judged(found, **options):
    unsettled = Drift(0.5, 0.5, 2.0)
    return Diagnosis(100, 5, judged="predictions", mixing=found, unsettled=unsettled, **options)


def test_reports_say_where_chains_differ():
    apart = judged(Mixing(2.0, 1.01, 30.0))
    assert "R-hat 2.00 between chains, 1.01 within; effective sample size 30" in str(apart)
    assert apart.verdict == "check" and "stay in separate modes" in str(apart)
    assert "more members" in apart.cures[0]
    drifting = judged(Mixing(2.0, 1.5, 30.0))
    assert "before their quantities converged" in str(drifting)
    assert "refine_more" in drifting.cures[0]


def report(coverage):
    scores = {"rmse": 1.0, "log_likelihood": -1.5, "coverage": coverage, "pit": None}
    log_prob = torch.full((100,), -1.5)
    return NumberReport(100, 10, 1.0, {}, {}, log_prob, **scores)


@pytest.mark.parametrize(
    "share, side", [(0.80, "overconfident"), (0.82, ""), (1.0, "underconfident")]
)
def test_coverage_beyond_three_standard_errors(share, side):
    # Of 100 rows, the share inside of 90 % intervals has the standard error 0.03.
    found = Diagnosis(100, 5, judged="predictions", held_out=report({0.9: share}))
    assert "NLL 1.500 on 100 rows, coverage" in str(found)
    reasons = [one.reason for one in _calibration_findings(found.held_out, VERDICT)]
    assert [reason for reason in reasons if side in reason] == reasons
    assert len(reasons) == bool(side)
    assert (f"predictions are {side}" in str(found)) == bool(side)
