# SPDX-License-Identifier: Apache-2.0
"""Discrete latent variables with coordinates of their own, and models that are refused."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_implicit.density import Target, find_modes

pytestmark = pytest.mark.usefixtures("double")


Y = torch.tensor([2.0, 0.0, 3.0], dtype=torch.float64)


def thinning():
    rate = pyro.sample("rate", dist.Gamma(2.0, 0.5))
    with pyro.plate("rows", 3):
        n = pyro.sample("n", dist.Poisson(rate))
        k = pyro.sample("k", dist.Binomial(n, 0.7))
        pyro.sample("y", dist.Binomial(k, 0.5), obs=Y)


def labels():
    """A label as an index, one that a one-hot vector has, and an event of two flags."""
    which = pyro.sample("which", dist.Categorical(torch.ones(3)))
    kind = pyro.sample("kind", dist.OneHotCategorical(torch.tensor([0.2, 0.8])))
    flags = pyro.sample("flags", dist.Bernoulli(0.3).expand([2]).to_event(1))
    loc = torch.tensor([0.0, 1.0, 5.0])[which] + kind @ torch.tensor([0.0, 2.0]) + flags.sum(-1)
    pyro.sample("y", dist.Normal(loc, 1.0), obs=torch.tensor(1.0))


def test_value_gradient_and_terms():
    target = Target(thinning, sample_discrete=True)
    assert target.sampled == ("n", "k") and target.discrete_dim == 6 and target.latent_dim == 7
    assert (target.elements.low == 0).all()
    assert (target.elements.high == math.inf).all()  # that of k is n
    n, k = torch.tensor([5.0, 1.0, 4.0]), torch.tensor([3.0, 0.0, 3.0])
    log_rate = torch.tensor([0.3, 0.8]).unsqueeze(-1)
    latent = torch.cat([log_rate, torch.cat([n, k]).expand(2, -1)], -1)
    rate = log_rate.exp().requires_grad_()
    parts = [
        dist.Gamma(2.0, 0.5).log_prob(rate),
        dist.Poisson(rate).log_prob(n),
        dist.Binomial(n, 0.7).log_prob(k).expand(2, -1),
        dist.Binomial(k, 0.5).log_prob(Y).expand(2, -1),
    ]
    terms = torch.cat(parts, -1)
    torch.testing.assert_close(target.terms(latent), terms.detach())
    expected = terms.sum(-1) + log_rate[:, 0]
    value, gradient = target.score(latent)
    torch.testing.assert_close(value, expected.detach())
    (by_rate,) = torch.autograd.grad(terms.sum(), rate)
    torch.testing.assert_close(gradient[:, :1], by_rate * rate.detach() + 1)
    assert (gradient[:, 1:] == 0).all()
    impossible = latent.clone()
    impossible[0, 4], impossible[1, 1] = 9.0, -1.0  # more thinned than there are; fewer than none
    assert (target.log_prob(impossible) == -math.inf).all()
    geometric = Target(lambda: pyro.sample("g", dist.Geometric(0.5)), sample_discrete=True)
    # Torch's own formula goes on below 0.
    assert geometric.log_prob(torch.tensor([[-1.0], [1.0]])).exp().tolist() == [0.0, 0.25]


def test_values_of_every_kind():
    target = Target(labels, sample_discrete=True)
    assert target.sampled == ("which", "kind", "flags") and target.latent_dim == 4
    assert target.elements.num_values.tolist() == [3, 2, 2, 2]
    assert target.elements.is_label.tolist() == [True, True, False, False]
    values = target.constrain(torch.tensor([[2.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]]))
    assert values["which"].tolist() == [2, 0] and values["which"].dtype == torch.long
    assert values["kind"].tolist() == [[0, 1], [1, 0]] and values["flags"].tolist()[0] == [0, 1]
    torch.testing.assert_close(
        target.unconstrain(values), torch.tensor([[2.0, 1, 0, 1], [0.0, 0, 1, 1]])
    )
    locs = torch.tensor([8.0, 2.0])
    flags = torch.tensor([0.3 * 0.7, 0.3**2]).log()
    expected = flags + torch.tensor([0.8, 0.2]).log() - math.log(3)
    expected = expected + dist.Normal(locs, 1.0).log_prob(torch.tensor(1.0))
    latent = target.unconstrain(values)
    torch.testing.assert_close(target.log_prob(latent), expected)
    assert (target.score(latent)[1] == 0).all()


def test_enumeration_is_preferred_where_it_is_cheap():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        total = 0.0
        for i in range(int(number)):
            total = total + pyro.sample(f"z{i}", dist.Bernoulli(0.5))
        k = pyro.sample("k", dist.Poisson(1.0)) if counts else 0.0
        pyro.sample("y", dist.Normal(total + x + k, 1.0), obs=torch.tensor(3.0))

    number, counts = 3, False
    target = Target(model, sample_discrete=True)
    assert target.summed_out and target.sampled == ()
    counts = True  # the flags are summed out for each count
    target = Target(model, sample_discrete=True)
    assert target.summed_out and target.sampled == ("k",)
    binomial = dist.Binomial(3, 0.5)
    totals = torch.arange(4.0)
    by_hand = torch.logsumexp(
        binomial.log_prob(totals) + dist.Normal(totals + 2.5, 1.0).log_prob(torch.tensor(3.0)), 0
    )
    by_hand = by_hand + dist.Normal(0.0, 1.0).log_prob(torch.tensor(0.5))
    by_hand = by_hand + dist.Poisson(1.0).log_prob(torch.tensor(2.0))
    torch.testing.assert_close(target.log_prob(torch.tensor([[0.5, 2.0]]))[0], by_hand)
    number, counts = 20, False  # of a million joint values
    target = Target(model, sample_discrete=True)
    assert len(target.sampled) == 20 and "elements for their joint values" in target.unsummed


def test_a_model_that_does_not_broadcast_is_sampled():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(x if z else -x, 1.0), obs=torch.tensor(1.0))

    target = Target(model, sample_discrete=True)
    assert target.sampled == ("z",) and "ambiguous" in target.unsummed
    one, other = target.log_prob(torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    assert (one - other).item() == pytest.approx(2.0)


def flat():
    pyro.sample("k", dist.ImproperUniform(dist.constraints.nonnegative_integer, (), ()))
    pyro.sample("x", dist.Normal(0.0, 1.0))


def masked():
    with poutine.mask(mask=False):
        pyro.sample("k", dist.Poisson(2.0))
    pyro.sample("x", dist.Normal(0.0, 1.0))


def changes_number():
    k = pyro.sample("k", dist.Poisson(3.0))
    for i in range(int(k)):
        pyro.sample(f"x{i}", dist.Normal(0.0, 1.0))


def changes_shape():
    k = pyro.sample("k", dist.Poisson(3.0))
    pyro.sample("x", dist.Normal(torch.zeros(int(k) + 1), 1.0).to_event(1))


def changes_support():
    k = pyro.sample("k", dist.Poisson(3.0))
    pyro.sample("x", dist.Uniform(0.0, k + 1))


def has_a_sum():
    pyro.sample("k", dist.Multinomial(3, torch.ones(3)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (flat, r"discrete latent 'k' has no density \(its prior is flat\).*Cure: a proper prior"),
        (masked, r"discrete latent 'k' has no density \(a mask leaves it out\).*Cure"),
        (changes_number, r"latent 'x\d' is in some runs.*discrete latent 'k' changed the number"),
        (changes_shape, r"'x' has the shape .* in another, as if the discrete latent 'k'.*Cure"),
        (changes_support, r"support of latent 'x' changes with the discrete latent 'k'.*Cure"),
        (has_a_sum, r"'k' is a discrete latent \(Multinomial\) whose elements cannot move.*Cure"),
    ],
)
def test_refused_models(model, message):
    with pytest.raises(ValueError, match=message):
        Target(model, sample_discrete=True)


def test_finitely_many_values_need_no_density():
    """The values of a masked site are equally probable, and their posterior is proper."""

    def model():
        with poutine.mask(mask=torch.tensor([True, False])), pyro.plate("sites", 2):
            k = pyro.sample("k", dist.Categorical(torch.tensor([0.7, 0.2, 0.1])))
        pyro.sample("x", dist.Normal(k * 1.0, 1.0).to_event(1), obs=torch.ones(2))

    target = Target(model, sample_discrete=True)
    rows = torch.tensor([[0.0, 0.0], [0.0, 2.0], [2.0, 1.0]])
    wanted = dist.Normal(rows, 1.0).log_prob(torch.ones(())).sum(-1)
    wanted += torch.tensor([0.7, 0.7, 0.1]).log()
    torch.testing.assert_close(target.log_prob(rows), wanted.to(rows.dtype))


def test_other_functions_refuse_them_still():
    with pytest.raises(ValueError, match="site 'n' is a discrete latent .*Cure"):
        find_modes(Target(thinning))


def image():
    """Neighbours in a plate: sliced in an enumerated run, the factor would be wrong silently."""
    bright = pyro.sample("bright", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 3, dim=-1):
        x = pyro.sample("x", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(bright * x, 1.0), obs=torch.zeros(3, 3))
    pyro.factor("smooth", (x[1:] == x[:-1]).double().sum())


def test_coupled_elements_are_not_summed_out():
    with pytest.raises(ValueError, match="elements of the discrete latent 'x' share a term.*Cure"):
        Target(image)
    target = Target(image, sample_discrete=True)
    assert target.sampled == ("x",) and "share a term" in target.unsummed
