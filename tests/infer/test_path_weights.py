# SPDX-License-Identifier: Apache-2.0
"""The share of the path in InjectiveELBO's gradient: the formula, its variance, its memory."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit import AutoImplicit, Implicit, InjectiveELBO, ResidualGenerator
from pyro_implicit.infer import injective
from pyro_implicit.infer.engine.implicit_sites import exact_score
from pyro_implicit.infer.injective import ScoreControlVariate, ScoreRecorder

pytestmark = pytest.mark.usefixtures("double")


def learnt(guide: torch.Tensor, model: torch.Tensor) -> ScoreControlVariate:
    return ScoreControlVariate.start(guide[0]).after(guide, model)


def test_share_has_the_least_variance():
    """Of scores with unequal scales and noise, against a search."""
    generator = torch.Generator().manual_seed(0)
    guide = torch.randn(400, 3, generator=generator) * torch.tensor([1.0, 20.0, 0.1])
    noise = torch.randn(400, 3, generator=generator)
    model = torch.tensor([0.9, 0.3, 0.6]) * guide + noise * torch.tensor([0.2, 3.0, 0.05])
    candidates = torch.linspace(0, 1, 10_001).unsqueeze(-1)
    squares = ((candidates.unsqueeze(-1) * guide - model) ** 2).mean(1) / model.square().mean(0)
    best = candidates[squares.sum(-1).argmin()].item()
    assert 0.35 < best < 0.75
    assert learnt(guide, model).weight().item() == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("sd", [0.1, 0.5, 1.0, 2.0])
def test_share_of_a_gaussian_is_its_variance_over_that_of_the_posterior(sd):
    z = torch.randn(1000, 2)
    share = learnt(-z / sd, -sd * z).weight().item()
    assert share == pytest.approx(min(sd**2, 1.0), rel=1e-9)


def test_share_of_what_says_nothing_is_none():
    zeros, ones = torch.zeros(4, 2), torch.ones(4, 2)
    assert ScoreControlVariate.start(zeros[0]).weight() == 0.0
    assert learnt(ones, zeros).weight() == 0.0  # a flat model
    lost = torch.tensor([[torch.nan, 1.0], [torch.inf, 2.0]])
    assert learnt(lost, lost).weight() == 1.0  # what is no number is left out
    assert learnt(ones, -ones).weight() == 0.0


def test_scores_of_rows_and_particles():
    """The loss is a mean over particles, not over a plate's rows."""
    memory, model = (
        {("path weight", "x"): ScoreControlVariate.start(torch.zeros(2))},
        torch.randn(5, 3, 2),
    )
    scores = ScoreRecorder(memory, "x", num_particles=5)
    assert scores.see(torch.ones(5, 3, 2)).equal(torch.ones(5, 3, 2))  # none is known yet
    assert memory["path weight", "x"].model.equal(torch.zeros(2))
    scores.guide = 2 * model
    gradient = -model / 5
    assert scores.see(gradient) is gradient
    torch.testing.assert_close(memory["path weight", "x"].model, model.square().mean((0, 1)))
    torch.testing.assert_close(memory["path weight", "x"].both, 2 * model.square().mean((0, 1)))


def narrow(sd: float):
    """A guide of standard deviation sd around (0.3, 0.3, 0.3), and a standard normal model."""

    def model():
        pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    guide = AutoImplicit(model, lambda n: ResidualGenerator(n, 2), frame=None, init_scale=sd)
    guide()
    with torch.no_grad():
        guide.loc.fill_(0.3)
        for parameter in guide.generator.network.parameters():
            parameter.zero_()
    return model, guide


def gradients(elbo, model, guide, seed):
    pyro.set_rng_seed(seed)
    parameters = list(guide.parameters())
    return torch.autograd.grad(elbo.differentiable_loss(model, guide), parameters)


def test_gradient_is_the_mixture_of_path_and_plain():
    model, guide = narrow(0.6)
    elbo = InjectiveELBO(4)
    gradients(elbo, model, guide, 0)
    (share,) = elbo.path_weights.values()
    assert 0.1 < share < 0.9
    found = gradients(elbo, model, guide, 1)
    others = [InjectiveELBO(4, path_derivative=path) for path in (True, False)]
    for other in others:
        gradients(other, model, guide, 0)  # the first step of an ELBO runs the guide once more
    path, plain = (gradients(other, model, guide, 1) for other in others)
    for one, by_path, by_plain in zip(found, path, plain, strict=True):
        torch.testing.assert_close(one, share * by_path + (1 - share) * by_plain)
    assert elbo.path_weights != {"_AutoImplicit_latent": share}  # it has learnt more


@pytest.mark.parametrize("num_lost", [1, 4])
def test_draws_whose_score_overflows_have_the_plain_gradient(monkeypatch, num_lost):
    model, guide = narrow(0.6)
    elbo, plain = InjectiveELBO(4), InjectiveELBO(4, path_derivative=False)
    gradients(plain, model, guide, 0)

    def overflowing(site):
        *density, score = exact_score(site)
        score[:num_lost, 1] = torch.inf
        return *density, score

    monkeypatch.setattr(injective, "exact_score", overflowing)
    monkeypatch.setattr(injective.ScoreControlVariate, "weight", lambda average: torch.tensor(0.5))
    gradients(elbo, model, guide, 0)
    found, without = gradients(elbo, model, guide, 1), gradients(plain, model, guide, 1)
    if num_lost == 4:
        torch.testing.assert_close(found, without)
    else:
        assert all(one.isfinite().all() for one in found)
        assert not torch.allclose(found[0], without[0])


@pytest.mark.parametrize("sd", [0.05, 1.0])
def test_variance_is_that_of_the_better_one(sd):
    """Of the gradient by the location: 1/sd² by the path of a narrow guide, none at the posterior
    but for what two parameters of one scale keep."""
    model, guide = narrow(sd)
    with torch.no_grad():
        guide.loc.zero_()
    variances = {}
    for path in (True, False, "auto"):
        elbo = InjectiveELBO(2, path_derivative=path)
        gradients(elbo, model, guide, 0)
        found = torch.stack([gradients(elbo, model, guide, seed)[0] for seed in range(1, 60)])
        variances[path] = found.var(0).mean().item()
    if sd == 1.0:
        assert variances["auto"] < 1e-20 and variances[False] > 0.1
    else:
        assert variances["auto"] < 1.05 * variances[False] < 1e-3 * variances[True]


def test_shares_are_saved_and_forgotten():
    model, guide = narrow(0.6)
    elbo, other = InjectiveELBO(4), InjectiveELBO(4)
    gradients(elbo, model, guide, 0)
    gradients(other, model, guide, 5)
    assert other.path_weights != elbo.path_weights
    other.set_state(elbo.get_state())
    assert other.path_weights == elbo.path_weights
    model, guide = narrow(0.6)
    elbo.loss(model, guide)
    assert elbo.path_weights == {}


def test_a_recorded_step_takes_them_over():
    model, guide = narrow(0.6)
    plain, recorded = InjectiveELBO(4), InjectiveELBO(4, compile="trace")
    for seed in range(6):
        both = [gradients(elbo, model, guide, seed) for elbo in (plain, recorded)]
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other)
    assert recorded.state.traced.programs.num_run > 2
    assert recorded.path_weights == pytest.approx(plain.path_weights)


def test_coverage_takes_all_of_the_path():
    model, guide = narrow(0.6)
    elbo = InjectiveELBO(4, coverage=1.0)
    gradients(elbo, model, guide, 0)
    assert elbo.path_weights == {}


def test_rows_of_their_own():
    """Local latents, whose number changes with the minibatch."""
    generator = ResidualGenerator(2, 1)

    def model(x):
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x)

    def guide(x):
        pyro.module("generator", generator)
        with pyro.plate("rows", len(x)):
            pyro.sample("z", Implicit(generator, 2))

    elbo = InjectiveELBO(3)
    for size in (5, 5, 2):
        elbo.differentiable_loss(model, guide, torch.ones(size)).backward()
    assert 0 < elbo.path_weights["z"] <= 1


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="must be True, False or \"auto\", but got 'always'"):
        InjectiveELBO(4, path_derivative="always")
