# SPDX-License-Identifier: Apache-2.0
"""Sums over discrete elements: closed forms, and explicit sums over many values."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_implicit.density import marginal_discrete as module
from pyro_implicit.density.marginal import MarginalModel
from pyro_implicit.density.marginal_discrete import DiscreteMarginal
from pyro_implicit.density.policy import DISCRETE, MARGINAL
from pyro_implicit.density.target import Target

Y = torch.tensor([3.0, 0.0, 40.0])
SEEN = 0.375
SITES = frozenset({"n", "few", "label"})


def thinned(y: Tensor) -> None:
    """Each of a Poisson number of animals is seen or not: the seen ones are Poisson, too."""
    rate = pyro.sample("rate", dist.Exponential(torch.full((3,), 0.125)).to_event(1))
    with pyro.plate("rows", 3):
        n = pyro.sample("n", dist.Poisson(rate))
        pyro.sample("y", dist.Binomial(n, SEEN), obs=y)


def marginal_of(target: Target, owner: list[int]) -> DiscreteMarginal:
    return DiscreteMarginal(target, target.in_double(), torch.tensor(owner), MARGINAL)


@pytest.fixture
def marginal() -> DiscreteMarginal:
    # The terms are those of the rates, of the numbers and of the data; the rates have an event.
    return marginal_of(Target(thinned, Y, sample_discrete=True), [3, 0, 1, 2, 0, 1, 2])


def thinned_exactly(log_rate: Tensor) -> Tensor:
    rate = log_rate.exp()
    prior = dist.Exponential(0.125).log_prob(rate) + log_rate
    return (prior + dist.Poisson(SEEN * rate).log_prob(Y.double())).sum(-1)


def test_value_gradient_and_curvature_are_exact(marginal: DiscreteMarginal) -> None:
    """Rates up to a thousand: the number of summed values differs between points."""
    log_rate = torch.tensor([[0.0, 1.0, 3.0], [2.0, -3.0, 7.0]]).double().requires_grad_()
    value, score = marginal.evaluate(log_rate)
    exact = thinned_exactly(log_rate)
    slope = torch.autograd.grad(exact.sum(), log_rate)[0]
    torch.testing.assert_close(value, exact.detach(), rtol=0, atol=3 * DISCRETE.negligible)
    torch.testing.assert_close(score, slope, rtol=1e-5, atol=1e-5)
    assert marginal.evaluate(log_rate, with_score=False)[1].count_nonzero() == 0
    inner = Target(MarginalModel(marginal), Y)
    found = inner.derivatives(log_rate.detach().float())
    torch.testing.assert_close(found[0].double(), exact.detach(), rtol=1e-6, atol=1e-5)
    hessian = torch.autograd.functional.hessian(lambda p: thinned_exactly(p).sum(), log_rate[0])
    torch.testing.assert_close(found[2][0].double(), hessian, rtol=1e-3, atol=1e-3)


def test_draws_are_those_of_the_conditional(marginal: DiscreteMarginal) -> None:
    """The animals that were not seen are Poisson, whatever was seen."""
    number = 4000
    log_rate = torch.tensor([[0.0, 1.0, 4.5]]).double()
    marginal.draw(log_rate)  # from here on, sums begin at other values than zero
    vectors, value, fault = marginal.draw(log_rate.expand(number, -1))
    torch.testing.assert_close(value, thinned_exactly(log_rate).expand(number))
    assert fault.max() == 0
    parts = marginal.target.split(vectors)
    assert torch.equal(parts["rate"], log_rate.float().expand(number, -1))
    unseen = parts["n"] - Y
    mean = (1 - SEEN) * log_rate[0].exp()
    assert unseen.min() == 0
    assert ((unseen.mean(0) - mean) / mean.sqrt()).abs().max() < 4.5 / number**0.5
    assert (unseen.var(0) / mean - 1).abs().max() < 4.5 * ((2 + 1 / mean) / number).sqrt().max()
    assert unseen.T.corrcoef().fill_diagonal_(0.0).abs().max() < 4.5 / number**0.5


def test_sums_follow_the_values_that_count(
    marginal: DiscreteMarginal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second sum at the same point takes few values; a far point then needs others."""
    rows = []
    terms = Target.terms
    monkeypatch.setattr(
        Target, "terms", lambda self, latent: rows.append(len(latent)) or terms(self, latent)
    )
    near, far = torch.tensor([[5.0, 4.0, 5.0]]).double(), torch.tensor([[0.0, 0.0, 7.0]]).double()
    for point in (near, near, far):
        value = marginal.evaluate(point)[0]
        torch.testing.assert_close(value, thinned_exactly(point), rtol=0, atol=1e-6)
        rows.append(0)
    first, second, _ = (list(part) for is_sum, part in groupby(rows, bool) if is_sum)
    assert first == [32, 64, 128, 256] and len(second) == 1 and second[0] < 200


def test_a_sum_that_is_cut_is_a_fault(
    marginal: DiscreteMarginal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DISCRETE", replace(DISCRETE, most_values=64))
    cut = marginal_of(marginal.target, [3, 0, 1, 2, 0, 1, 2])
    rest = torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 5.0]])  # 40 and 129 animals
    fault = cut.draw(rest)[2]
    assert fault[0] == 0 and math.isinf(fault[1])


def test_terms_of_several_elements_are_a_fault() -> None:
    def model() -> None:
        rate = pyro.sample("rate", dist.Exponential(0.3))
        with pyro.plate("rows", 2):
            n = pyro.sample("n", dist.Poisson(rate))
        pyro.sample("y", dist.Normal(n.sum(-1), 1.0), obs=torch.tensor(7.0))

    target = Target(model, sample_discrete=True)
    fault = marginal_of(target, [2, 0, 1, 0]).draw(torch.zeros(50, 1))[2]
    assert (fault > 0.1).any()


def mixed(y: Tensor) -> None:
    """Bounded and unbounded elements, terms of all and of none, and a label."""
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    size = pyro.sample("size", dist.LogNormal(1.0, 0.3))
    with pyro.plate("rows", 2):
        n = pyro.sample("n", dist.NegativeBinomial(size, torch.tensor(0.7)))
        pyro.sample("y", dist.Normal(n, 1.5), obs=y)
    few = pyro.sample("few", dist.Binomial(5.0, p))
    pyro.sample("seen", dist.Normal(few * size, 2.0), obs=torch.tensor(4.0))
    label = pyro.sample("label", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
    loc = torch.tensor([-1.0, 0.0, 3.0])[label.long()]
    pyro.sample("z", dist.Normal(loc, 1.0), obs=torch.tensor(0.7))


def mixed_exactly(point: Tensor) -> Tensor:
    p, size = point[0].sigmoid(), point[1].exp()
    y = torch.tensor([4.0, 9.0])
    total = dist.Beta(2.0, 2.0).log_prob(p) + (p * (1 - p)).log()
    total = total + dist.LogNormal(1.0, 0.3).log_prob(size) + point[1]
    n = torch.arange(400).double().unsqueeze(-1)
    part = dist.NegativeBinomial(size, 0.7).log_prob(n) + dist.Normal(n, 1.5).log_prob(y)
    total = total + part.logsumexp(0).sum()
    few = torch.arange(6).double()
    part = dist.Binomial(5.0, p).log_prob(few)
    total = total + (part + dist.Normal(few * size, 2.0).log_prob(torch.tensor(4.0))).logsumexp(0)
    loc = torch.tensor([-1.0, 0.0, 3.0])
    part = torch.tensor([0.2, 0.3, 0.5]).log() + dist.Normal(loc, 1.0).log_prob(torch.tensor(0.7))
    return total + part.logsumexp(0)


def test_bounded_elements_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.tensor([4.0, 9.0])
    monkeypatch.setattr("pyro_implicit.density.target.sites_to_sample", lambda _: SITES)
    target = Target(mixed, y, sample_discrete=True)
    # p, size, n, y, few, seen, label, z
    marginal = marginal_of(target, [4, 4, 0, 1, 0, 1, 2, 2, 3, 3])
    for point in 0.5 * torch.randn(3, 2).double() + torch.tensor([0.0, 1.0]):
        point = point.requires_grad_()
        value, score = marginal.evaluate(point.unsqueeze(0))
        exact = mixed_exactly(point)
        torch.testing.assert_close(value[0], exact.detach(), rtol=1e-6, atol=1e-6)
        slope = torch.autograd.grad(exact, point)[0]
        torch.testing.assert_close(score[0], slope, rtol=1e-5, atol=1e-5)
        vectors, _, fault = marginal.draw(point.detach().expand(100, -1))
        assert fault.max() == 0
        parts = target.split(vectors)
        assert parts["few"].max() <= 5 and set(parts["label"].unique().tolist()) <= {0.0, 1.0, 2.0}


def test_slow_tails_are_summed_to_their_end() -> None:
    """Without data, the probabilities of all values sum to one."""

    def model() -> None:
        p = pyro.sample("p", dist.Beta(2.0, 1.0))
        pyro.sample("n", dist.NegativeBinomial(1.0, p))

    marginal = marginal_of(Target(model, sample_discrete=True), [1, 0])
    # At 98.85 % from each value to the next, the 1,024th is less than 1e-7, and the rest 7e-6.
    logits = torch.tensor([0.0, 4.4539, 5.3]).double()
    p = logits.sigmoid()
    exact = (2 * p).log() + (p * (1 - p)).log()
    found = marginal.evaluate(logits.unsqueeze(-1))[0]
    torch.testing.assert_close(found, exact, rtol=0, atol=2 * DISCRETE.negligible)


def test_points_without_density_have_none(marginal: DiscreteMarginal) -> None:
    value, score = marginal.evaluate(torch.tensor([[0.0, 0.0, 0.0], [0.0, math.nan, 0.0]]))
    assert value[0].isfinite() and value[1] == -math.inf and (score[1] == 0).all()
