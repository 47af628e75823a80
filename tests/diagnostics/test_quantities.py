# SPDX-License-Identifier: Apache-2.0
"""Quantities in place of latents: networks are judged by what they predict; R-hat of chains."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_implicit import compare, diagnose
from pyro_implicit.diagnostics.moments import Fault
from pyro_implicit.diagnostics.quantities import Mixing, describe_faults, mixing
from pyro_implicit.diagnostics.verdict import Diagnosis, _uncalibrated
from pyro_implicit.guides import Permutations
from pyro_implicit.mcmc.stopping import Drift
from pyro_implicit.nn import FunctionValues, NumberReport, classifier, regressor, to_bayesian_
from pyro_implicit.ops import align_hidden_units

X = torch.linspace(-1.0, 1.0, 6).unsqueeze(-1)
UNITS = {"0.weight": -2, "0.bias": -1, "2.weight": -1}


def network(num_units: int = 3):
    net = to_bayesian_(nn.Sequential(nn.Linear(1, num_units), nn.Tanh(), nn.Linear(num_units, 1)))
    return regressor(net, len(X), noise=0.3)


def draws_of(model, number: int) -> dict[str, torch.Tensor]:
    """Draws of the prior, in which the units are in one order."""
    shapes = {"0.weight": (3, 1), "0.bias": (3,), "2.weight": (1, 3), "2.bias": (1,)}
    draws = {name: torch.randn(number, *shape) for name, shape in shapes.items()}
    return {**draws, "0.weight": draws["0.weight"] + torch.tensor([[-4.0], [0.0], [4.0]])}


def mixed(draws: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    group = Permutations(UNITS)
    group.check({name: value.shape[1:] for name, value in draws.items()})
    return {**draws, **group.move(group.sample(draws), draws)}


def test_a_comparison_is_of_predictions_where_units_have_no_order() -> None:
    model = network()
    left = draws_of(model, 400)
    right = mixed(left)
    found = compare(model, left, right, X)
    assert found.sliced_wasserstein < 1e-4
    assert set(found.sites) == {"mean"} and found.guide_draws["mean"].shape == (400, 6)
    assert "in place of the latents: predictions at 6 inputs" in str(found)
    hidden = torch.tanh(X @ left["0.weight"].mT + left["0.bias"].unsqueeze(-2))
    means = (hidden @ left["2.weight"].mT + left["2.bias"].unsqueeze(-2)).squeeze(-1)
    torch.testing.assert_close(found.guide_draws["mean"], means)
    weights = compare(model, left, right, X, quantities="latents")
    assert weights.compared == "" and weights.floor_ratio > 3  # another order
    reference = {name: value.mean(0) for name, value in left.items()}
    aligned = compare(
        model, left, right, X, quantities=lambda d: align_hidden_units(d, UNITS, reference)
    )
    assert aligned.floor_ratio < 1 and set(aligned.sites) == set(left)


def test_chains_of_a_reference_stay_apart() -> None:
    model = network()
    draws = draws_of(model, 400)
    chains = {name: value.unflatten(0, (4, 100)) for name, value in draws.items()}
    chains["2.bias"][3] += 5.0
    found = compare(model, draws, chains, X)
    assert found.reference.worst_r_hat.startswith("mean[") and found.reference.r_hat > 1.2
    with pytest.raises(ValueError, match="no inputs.*Cure"):
        compare(model, draws, chains)


def linear(y: torch.Tensor) -> None:
    """Only the sum of two latents is seen."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    pyro.sample("y", dist.Normal(w.sum(), 0.5), obs=y)


Y = torch.tensor(0.9)
SUM = dist.Normal(Y * 2 / 2.25, (2 * 0.25 / 2.25) ** 0.5)  # the posterior of the sum


def guide_of(width: float):
    """The right posterior of the sum, up to a factor; of the difference one tenth of the width."""

    def guide(y: torch.Tensor) -> None:
        scale = torch.tensor([[1.0, 1.0], [-0.1, 0.1]]) / 2
        factors = torch.stack([SUM.scale * width, torch.tensor(2.0).sqrt()]).unsqueeze(-1) * scale
        covariance = factors.mT @ factors
        mean = (SUM.mean / 2).expand(2)
        pyro.sample("w", dist.MultivariateNormal(mean, covariance))

    return guide


def sums(draws: dict[str, torch.Tensor]) -> torch.Tensor:
    return draws["w"].sum(-1)


def test_a_diagnosis_is_of_the_quantities_asked_for() -> None:
    options = {"num_transitions": 5, "num_samples": 1000, "progress": False}
    right = diagnose(linear, guide_of(1.0), Y, quantities=sums, **options)
    assert right.verdict == "trust" and right.stein is None and right.coverage is None
    assert "by the given quantities" in str(right)
    assert diagnose(linear, guide_of(1.0), Y, **options).verdict == "do not trust"
    narrow = diagnose(linear, guide_of(0.5), Y, quantities=sums, **options)
    assert narrow.verdict == "do not trust" and "`quantity`" in narrow.findings[0].reason
    options |= {"num_transitions": 0, "num_samples": 20_000}  # k-hat: above 0.7 with any seed
    lost = diagnose(linear, guide_of(1.0), Y, quantities=lambda d: 1 + 0 * sums(d), **options)
    assert "the same at all draws" in lost.broken
    blind = diagnose(linear, guide_of(1.0), Y, quantities=sums, **options)
    assert blind.importance is None  # its weights are too uneven to speak
    assert "cannot tell" in blind.findings[0].reason


def test_networks_are_diagnosed_by_their_predictions() -> None:
    model = network()
    draws = draws_of(model, 200)
    found = diagnose(model, draws, X, torch.zeros(6), num_transitions=2, progress=False)
    assert found.judged == "predictions at 6 inputs" and found.verdict == "do not trust"
    assert "`mean[" in found.findings[0].reason
    with pytest.raises(ValueError, match='"auto", "latents" or a function'):
        diagnose(model, draws, X, torch.zeros(6), quantities="weights")
    with pytest.raises(ValueError, match="one value for each draw"):
        diagnose(model, draws, X, torch.zeros(6), quantities=lambda d: torch.zeros(3))


def test_values_of_labels_are_probabilities() -> None:
    net = to_bayesian_(nn.Linear(1, 3))
    weights = {"weight": torch.randn(150, 3, 1), "bias": torch.randn(150, 3)}
    values = FunctionValues(classifier(net, 6), X, max_inputs=3)
    assert str(values) == "predictions at 3 of 6 inputs"
    logits = X[::2] @ weights["weight"].mT + weights["bias"].unsqueeze(-2)
    torch.testing.assert_close(values(weights)["probability"], logits.softmax(-1)[..., 1:])


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
    return Diagnosis(100, 5, judged="predictions", mixing=found, chains=unsettled, **options)


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
    reasons = [one.reason for one in _uncalibrated(found)]
    assert [reason for reason in reasons if side in reason] == reasons
    assert len(reasons) == bool(side)
    assert (f"predictions are {side}" in str(found)) == bool(side)


def test_single_coordinates_are_named_once():
    faults = [
        Fault("sd", 0.68, ((1, 1.0),)),
        Fault("sd", 0.74, ((1, 1.0),)),
        Fault("sd", 1.2, ((0, 1.0), (1, 0.5))),
        Fault("sd", 1.3, ((0, 1.0),)),
        Fault("sd", 0.9, ((0, 1.0),)),
    ]
    text = describe_faults(faults, ["`a`", "`b`"], given_rest=False)
    assert text == "the sd of `b` is 0.68 times what it should be; likewise `a` (1.30)"
    text = describe_faults(faults[2:] + faults[:1], ["`a`", "`b`"], given_rest=False)
    assert text.endswith("; likewise `a` (1.30), `b` (0.68)")
