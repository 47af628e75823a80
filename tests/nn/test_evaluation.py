# SPDX-License-Identifier: Apache-2.0
"""``evaluate``: its scores against closed forms, its table and its figure."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_implicit.nn import classifier, evaluate, regressor, to_bayesian_
from pyro_implicit.nn.reports import detect

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


X, FOREIGN = normal(40, 3), 9 * normal(30, 3)
LABELS = torch.randint(2, (40,), generator=GENERATOR)
WEIGHTS = {"weight": normal(11, 2, 3), "bias": normal(11, 2)}


def outputs(x):
    return torch.einsum("nd,scd->snc", x, WEIGHTS["weight"]) + WEIGHTS["bias"].unsqueeze(1)


def pairs(x, y, size=16):
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.fixture(scope="module")
def labels():
    model = classifier(to_bayesian_(nn.Linear(3, 2).double()), 70, temperature=0.5)
    ood = {"foreign": FOREIGN.split(16)}
    return evaluate(WEIGHTS, pairs(X, LABELS), ood=ood, num_bins=5, model=model)


def test_scores_of_labels(labels):
    mean = outputs(X).softmax(-1).mean(0)
    right = mean.argmax(-1) == LABELS
    assert labels.accuracy == pytest.approx(right.double().mean().item())
    assert labels.nll == pytest.approx(-mean[range(40), LABELS].log().mean().item())
    brier = sum(
        sum((mean[row, c].item() - (c == label)) ** 2 for c in range(2))
        for row, label in enumerate(LABELS.tolist())
    )
    assert labels.brier == pytest.approx(brier / 40)
    confidence, ece = mean.max(-1).values, 0.0
    for low in (0.4, 0.6, 0.8):
        inside = (confidence > low) & (confidence <= low + 0.2)
        if inside.any():
            gap = right[inside].double().mean() - confidence[inside].mean()
            ece += inside.double().mean().item() * abs(gap.item())
    assert labels.ece == pytest.approx(ece)
    assert labels.reliability.share.sum() == pytest.approx(1.0)
    assert labels.num_samples == 11 and labels.num_rows == 40


def test_uncertainty_of_labels(labels):
    for name, x in {"test": X, "foreign": FOREIGN}.items():
        each = outputs(x).softmax(-1)
        mean = each.mean(0)
        assert labels.confidence[name] == pytest.approx(mean.max(-1).values.mean().item())
        own = torch.special.entr(each).sum(-1).mean().item()
        total = torch.special.entr(mean).sum(-1).mean().item()
        assert labels.entropy[name] == pytest.approx((own, total - own))
        columns = labels.uncertainty if name == "test" else labels.ood[name].uncertainty
        spread = each.var(0, unbiased=False).sum(-1)
        torch.testing.assert_close(columns["epistemic variance"], spread)
    familiar = labels.uncertainty["entropy"]
    found = labels.ood["foreign"]
    above = found.uncertainty["entropy"].unsqueeze(-1) > familiar
    assert found.detection["entropy"].auroc == pytest.approx(above.double().mean().item())


def test_detection():
    """Ties count half; average precision is the mean precision at each foreign input."""
    found = detect(torch.tensor([1.0, 2.0, 2.0, 7.0]), torch.tensor([2.0, 5.0, 9.0]))
    wins = [1 + 2 * 0.5, 3, 4]  # of 4 familiar inputs each
    assert found.auroc == pytest.approx(sum(wins) / 12)
    assert found.aupr == pytest.approx((1 / 1 + 2 / 3 + 3 / 6) / 3)
    assert found.fpr95 == pytest.approx(2 / 3)  # all familiar ones pass at 7, and 2 and 5 with them
    familiar = torch.linspace(0, 1, 100)
    assert detect(familiar, torch.tensor([0.5, 0.945, 0.97, 2.0])).fpr95 == 0.5  # at 94 / 99


def test_scores_of_numbers():
    model = regressor(to_bayesian_(nn.Linear(3, 2).double()), 70, noise="heteroscedastic")
    y = normal(40)
    report = evaluate(WEIGHTS, pairs(X, y), ood={"foreign": [FOREIGN]}, model=model)
    out = outputs(X)
    means, sds = out[..., 0], nn.functional.softplus(out[..., 1]) + 1e-6
    assert report.rmse == pytest.approx((means.mean(0) - y).square().mean().sqrt().item())
    z = (y - means) / sds
    density = ((-0.5 * z**2).exp() / sds / math.sqrt(2 * math.pi)).mean(0)
    assert report.log_likelihood == pytest.approx(density.log().mean().item())
    pit = (0.5 * (1 + torch.erf(z / math.sqrt(2)))).mean(0)
    inside = (pit >= 0.05) & (pit <= 0.95)
    assert report.coverage[0.9] == pytest.approx(inside.double().mean().item())
    epistemic = means.var(0, unbiased=False).mean().sqrt().item()
    assert report.sd["test"] == pytest.approx((sds.square().mean().sqrt().item(), epistemic))
    assert report.ood["foreign"].detection["epistemic variance"].auroc > 0.5
    assert "RMSE" in str(report) and "90% interval covers" in str(report)
    assert len(report.plot().axes) == 2


COUNTED = torch.arange(40) % 2 == 0


def by_rows(fn, x, y, handler):
    """A model of rows of which the mask comes with the input, as its last column."""
    mask = x[:, -1] > 0
    with pyro.plate("data", len(x)), poutine.mask(mask=mask if handler else True):
        return pyro.sample("y", fn if handler else fn.mask(mask), obs=y)


@pytest.mark.parametrize("handler", [False, True])
def test_masked_rows_are_not_scored(handler):
    def labels(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(2, 3).double(), 1.0).to_event(2))
        return by_rows(dist.Categorical(logits=x[:, :3] @ weight.mT), x, y, handler)

    def numbers(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(1, 3).double(), 1.0).to_event(2))
        return by_rows(dist.Normal((x[:, :3] @ weight.mT).squeeze(-1), 1.0), x, y, handler)

    marked = torch.cat([X, COUNTED[:, None].double()], -1)
    for model, y, size in ((labels, LABELS, 2), (numbers, normal(40), 1)):
        draws = {"weight": WEIGHTS["weight"][:, :size]}
        found = evaluate(draws, pairs(marked, y), model=model)
        every = torch.cat([X[COUNTED], torch.ones(20, 1).double()], -1)
        expected = evaluate(draws, pairs(every, y[COUNTED]), model=model)
        assert found.num_rows == 20 and str(found) == str(expected)
        with pytest.raises(ValueError, match="the model masks all targets"):
            evaluate(draws, pairs(0 * marked, y), model=model)
    mean = torch.einsum("nd,sd->sn", X, WEIGHTS["weight"][:, 0])
    density = dist.Normal(mean, 1.0).log_prob(y).logsumexp(0) - math.log(11)
    assert found.log_likelihood == pytest.approx(density[COUNTED].mean().item())


def test_rows_masked_in_part_are_refused():
    def several(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(2, 3).double(), 1.0).to_event(2))
        fn = dist.Normal(x @ weight.mT, 1.0).mask(torch.tensor([True, False]))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", fn.to_event(1), obs=y)

    draws = {"weight": WEIGHTS["weight"]}
    with pytest.raises(ValueError, match="masks some targets of a row and not others.*Cure: a mas"):
        evaluate(draws, pairs(X, normal(40, 2)), model=several)


def test_table_and_figure(labels, tmp_path):
    table = str(labels)
    lines = {line[:28].strip(): line[28:].split() for line in table.splitlines()}
    assert lines["rows"] == ["40", "30"]
    assert lines["accuracy"] == [f"{labels.accuracy:.4f}"]
    (auroc,) = lines["AUROC by mutual information"]
    expected = labels.ood["foreign"].detection["mutual information"].auroc
    assert float(auroc) == pytest.approx(100 * expected, abs=0.06)
    assert "tempered: the likelihood to the power 1/0.5, not Bayes" in table
    labels.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").exists()


def test_errors():
    model = classifier(to_bayesian_(nn.Linear(3, 2).double()), 70)
    with pytest.raises(ValueError, match="the loader is empty"):
        evaluate(WEIGHTS, [], model=model)
    with pytest.raises(
        ValueError, match=r"tuples \(inputs, targets\), but gave one of 1. Cure: \[\(x, y\)\]"
    ):
        evaluate(WEIGHTS, (X, LABELS), model=model)
    with pytest.raises(TypeError, match="ood must be a dict of loaders by name, but got a list"):
        evaluate(WEIGHTS, [(X, LABELS)], ood=[[X]], model=model)
    with pytest.raises(ValueError, match=r"targets have shape \(4,\), but .* of shape \(40,\)"):
        evaluate(WEIGHTS, [(X, LABELS[:4])], model=model)


@pytest.mark.parametrize(
    "x, y, message",
    [
        (None, math.nan, r"observation of site 'y' is NaN in 1 of 6 elements. Cure: leave these"),
        (math.nan, 0.0, r"argument 1 is NaN in 1 of 18 elements. Cure: leave these rows out"),
        (None, 2, r"site 'y' is outside .* in 1 of 6 elements. Cure: .*labels begin at 0"),
    ],
)
def test_data_without_a_density_are_named_as_by_fit(x, y, message):
    inputs, targets = torch.randn(6, 3), torch.zeros(6, dtype=torch.tensor(y).dtype)
    targets[0] = y
    inputs[0, 0] = 0.0 if x is None else x
    number = 1 if targets.is_floating_point() else 2
    net = to_bayesian_(nn.Linear(3, number))
    model = regressor(net, 6, noise=0.1) if number == 1 else classifier(net, 6)
    draws = {"weight": torch.randn(4, number, 3), "bias": torch.zeros(4, number)}
    with pytest.raises(ValueError, match=message):
        evaluate(draws, [(inputs, targets)], model=model)
