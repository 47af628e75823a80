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
from pyro_implicit.density.checks.numerics import InexactArithmetic
from pyro_implicit.density.marginal import MarginalModel
from pyro_implicit.density.marginal_discrete import DiscreteMarginal, find_owners
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
    """Each term depends on one element; the number of elements stands for none."""
    depends = torch.tensor(owner) == torch.arange(target.discrete_dim).unsqueeze(-1)
    return of_dependence(target, depends)


def of_dependence(target: Target, depends: Tensor) -> DiscreteMarginal:
    owners = find_owners(depends)
    assert owners is not None
    return DiscreteMarginal(target, target.in_double(), owners, MARGINAL)


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
    """A second sum at the same point takes one window; a far point then needs others."""
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
    assert first == [32, 32, 32, 32]  # of 200 values every eighth
    assert len(second) == 1 and second[0] <= 64


def test_a_sum_that_is_cut_is_a_fault(
    marginal: DiscreteMarginal, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(DISCRETE, first_values=64, most_values=64, longest_stride=1)
    monkeypatch.setattr(module, "DISCRETE", few)
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
    monkeypatch.setattr("pyro_implicit.density.initial_run.sites_to_sample", lambda _: SITES)
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


class Chain:
    """Counts of three years in two places, and the exact sums over them by matrix products."""

    y = torch.tensor([[20.0, 2.0], [31.0, 1.0], [50.0, 0.0]])
    values = torch.arange(500.0).double()

    def model(self, y: Tensor) -> None:
        growth = pyro.sample("growth", dist.LogNormal(0.0, 0.5))
        mean: Tensor | float = pyro.sample("first", dist.Gamma(4.0, 0.1))
        with pyro.plate("places", 2):
            for year in range(3):
                n = pyro.sample(f"n_{year}", dist.Poisson(mean))
                pyro.sample(f"y_{year}", dist.Binomial(n, SEEN), obs=y[year])
                mean = growth * n + 0.5

    def depends(self) -> Tensor:
        """Of (year, place) on growth, first, then n and y of both places in each year."""
        found = torch.zeros(6, 2 + 12, dtype=torch.bool)
        for element in range(6):
            year, place = divmod(element, 2)
            found[element, [2 + 4 * year + place, 4 + 4 * year + place]] = True
            if year < 2:
                found[element, 6 + 4 * year + place] = True
        return found

    def exactly(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density, and the means of the counts given the others."""
        growth, first = point[0].exp(), point[1].exp()
        total = dist.LogNormal(0.0, 0.5).log_prob(growth) + point[0]
        total = total + dist.Gamma(4.0, 0.1).log_prob(first) + point[1]
        n, means = self.values, []
        step = dist.Poisson(growth * n.unsqueeze(-1) + 0.5).log_prob(n).exp()
        for place in range(2):
            seen = dist.Binomial(n, SEEN, validate_args=False)
            data = [
                torch.where(n >= y, seen.log_prob(torch.minimum(y, n)).exp(), 0.0)
                for y in self.y[:, place].double()
            ]
            start = dist.Poisson(first).log_prob(n).exp() * data[0]
            ahead = [start, (start @ step) * data[1]]
            ahead.append((ahead[1] @ step) * data[2])
            behind = [step @ (data[1] * (step @ data[2])), step @ data[2], torch.ones_like(n)]
            total = total + ahead[2].sum().log()
            means.append(
                torch.stack(
                    [(n * a * b).sum() / (a * b).sum() for a, b in zip(ahead, behind, strict=True)]
                )
            )
        return total, torch.stack(means, -1)


def test_chains_of_counts_are_exact() -> None:
    chain, number = Chain(), 400
    target = Target(chain.model, chain.y, sample_discrete=True)
    marginal = of_dependence(target, chain.depends())
    for place in ([0.3, 4.0], [0.6, 5.0]):
        point = torch.tensor(place).double().requires_grad_()
        exact, means = chain.exactly(point)
        value, score = marginal.evaluate(point.unsqueeze(0))
        torch.testing.assert_close(value[0], exact.detach(), rtol=0, atol=1e-6)
        slope = torch.autograd.grad(exact, point)[0]
        torch.testing.assert_close(score[0], slope, rtol=1e-5, atol=1e-5)
        vectors, found, fault = marginal.draw(point.detach().expand(number, -1))
        assert fault.max() < 1e-5
        torch.testing.assert_close(found, exact.detach().expand(number), rtol=0, atol=1e-6)
        counts = vectors[:, 2:].unflatten(-1, (3, 2)).double()
        error = (counts.mean(0) - means.detach()) / (counts.std(0) + 0.1)
        assert error.abs().max() < 4 / number**0.5
        assert len(counts[:, 2, 0].remainder(8).unique()) == 8  # between the strides, too


def test_jumps_between_neighbours_need_all_values() -> None:
    """The second count cannot exceed the first; sums of every h-th value hardly differ."""

    def step(first: Tensor, second: Tensor, gap: Tensor) -> Tensor:
        near = dist.Normal(gap, 30.0).log_prob(first - second)
        return torch.where(second <= first, near, -math.inf)

    def model() -> None:
        gap = pyro.sample("gap", dist.Normal(60.0, 1.0))
        first = pyro.sample("first", dist.Poisson(400.0))
        second = pyro.sample("second", dist.Poisson(350.0))
        pyro.factor("step", step(first, second, gap))

    depends = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]], dtype=torch.bool)
    marginal = of_dependence(Target(model, sample_discrete=True), depends)
    gap, n = torch.tensor([60.0]).double(), torch.arange(700.0).double()
    joint = step(n.unsqueeze(-1), n, gap) + dist.Poisson(350.0).log_prob(n)
    joint = joint + dist.Poisson(400.0).log_prob(n).unsqueeze(-1)
    exact = dist.Normal(60.0, 1.0).log_prob(gap) + joint.flatten().logsumexp(0)
    found = marginal.evaluate(gap.unsqueeze(0), with_score=False)[0]
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6)


def test_terms_may_precede_those_of_the_parent() -> None:
    """The third count is the parent of the second one, and a child of the first."""
    data = torch.tensor([1.0, -2.0])

    def model() -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        a, b, c = (pyro.sample(name, dist.Poisson(3.0)) for name in "abc")
        pyro.sample("bc", dist.Normal(b - c, scale), obs=data[0])
        pyro.sample("ac", dist.Normal(2 * a - c, scale), obs=data[1])

    depends = torch.tensor([[0, 1, 0, 0, 0, 1], [0, 0, 1, 0, 1, 0], [0, 0, 0, 1, 1, 1]])
    marginal = of_dependence(Target(model, sample_discrete=True), depends.bool())
    log_scale = torch.tensor([0.3]).double()
    a, b, c = torch.cartesian_prod(*[torch.arange(40.0).double()] * 3).unbind(-1)
    joint = sum(dist.Poisson(3.0).log_prob(n) for n in (a, b, c))
    joint = joint + dist.Normal(b - c, log_scale.exp()).log_prob(data[0].double())
    joint = joint + dist.Normal(2 * a - c, log_scale.exp()).log_prob(data[1].double())
    exact = dist.LogNormal(0.0, 1.0).log_prob(log_scale.exp()) + log_scale + joint.logsumexp(0)
    found = marginal.evaluate(log_scale.unsqueeze(0), with_score=False)[0]
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6)


def test_neighbours_of_one_site_are_exact() -> None:
    """Differences of neighbouring labels: pairs within a site."""
    gaps = torch.tensor([1.2, -0.4])

    def model() -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", 3):
            n = pyro.sample("n", dist.Categorical(torch.tensor([0.2, 0.5, 0.3])))
        pyro.sample("gaps", dist.Normal(n.diff().float(), scale).to_event(0), obs=gaps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "pyro_implicit.density.initial_run.sites_to_sample", lambda _: frozenset({"n"})
        )
        target = Target(model, sample_discrete=True)
    depends = torch.tensor(
        [[0, 1, 0, 0, 1, 0], [0, 0, 1, 0, 1, 1], [0, 0, 0, 1, 0, 1]], dtype=torch.bool
    )
    marginal = of_dependence(target, depends)
    point = torch.tensor([-0.3]).double()
    n = torch.cartesian_prod(*[torch.arange(3)] * 3)
    joint = torch.tensor([0.2, 0.5, 0.3]).double().log()[n].sum(-1)
    joint = joint + dist.Normal(n.diff().double(), point.exp()).log_prob(gaps.double()).sum(-1)
    exact = joint.logsumexp(0) + dist.LogNormal(0.0, 1.0).log_prob(point.exp())[0] + point[0]
    torch.testing.assert_close(marginal.evaluate(point.unsqueeze(0))[0][0], exact)
    drawn, _, fault = marginal.draw(point.expand(4000, 1))
    assert fault.max() == 0
    counts = (drawn[:, 1:].unsqueeze(1) == n).all(-1).double().mean(0)
    assert (counts - joint.softmax(0)).abs().max() < 4 * 0.5 / 4000**0.5


def test_cycles_and_terms_of_three_elements_have_no_owners() -> None:
    ring = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    assert find_owners(ring) is None and find_owners(torch.ones(3, 1, dtype=torch.bool)) is None
    owners = find_owners(ring[:, :2])
    assert owners is not None and owners.is_pair.all() and sorted(owners.owner) == [1, 2]


def test_inexact_arithmetic_keeps_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label of one minus a last bit was no value: the search dropped most of its paths."""

    def model(y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 3.0).to_event(1))
        with pyro.plate("rows", 3):
            z = pyro.sample("z", dist.Bernoulli(0.4))
            pyro.sample("y", dist.Normal(loc[..., 0] * (1 - z) + loc[..., 1] * z, 1.0), obs=y)

    monkeypatch.setattr("pyro_implicit.density.initial_run.sites_to_sample", lambda _: {"z"})
    marginal = marginal_of(Target(model, Y / 10, sample_discrete=True), [3, 0, 1, 2, 0, 1, 2])
    points = torch.tensor([[-1.0, 2.0]]).expand(8, -1)
    expected = marginal.evaluate(points)[0]
    with InexactArithmetic():
        for _ in range(8):
            found = marginal.evaluate(points)[0]
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_points_without_density_have_none(marginal: DiscreteMarginal) -> None:
    value, score = marginal.evaluate(torch.tensor([[0.0, 0.0, 0.0], [0.0, math.nan, 0.0]]))
    assert value[0].isfinite() and value[1] == -math.inf and (score[1] == 0).all()
