# SPDX-License-Identifier: Apache-2.0
"""ScoreELBO: its gradient and value on Gaussians, and its draws; see test_entropy_of_draws, too."""

from __future__ import annotations

import math
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_implicit import MLP, Implicit
from pyro_implicit.infer.estimated_score import ScoreELBO
from pyro_implicit.ops.score_estimators import spectral_score, stein_score
from tests.infer.helpers import drawn

pytestmark = pytest.mark.usefixtures("double")

WEIGHT = torch.tensor([[1.0, 0.3], [-0.5, 2.0]], dtype=torch.float64)


def linear_generator():
    generator = nn.Linear(2, 2)
    generator.weight.data.copy_(WEIGHT)
    return generator


@pytest.mark.parametrize(
    ("name", "function"), [("spectral", spectral_score), ("stein", stein_score)]
)
def test_entropy_gradient_is_minus_score_times_pathwise(name, function):
    """As published, no moments taken out and no draws besides the model's."""
    generator = linear_generator()
    site = drawn(Implicit(generator, 2).expand([9]))
    elbo = ScoreELBO(9, name, num_entropy_particles=9, covariance=None)
    elbo.score_parts(site, None).entropy_term.mean().backward()
    score = function(site.value.detach())
    torch.testing.assert_close(generator.weight.grad, score.T @ site.noise / 9)
    torch.testing.assert_close(generator.bias.grad, score.mean(0))


def test_exact_score_gives_the_exact_gradient_in_expectation():
    """H = log |W| + const, so the gradient of E[log q] is -W^-T."""
    generator = linear_generator()
    precision = torch.linalg.inv(WEIGHT @ WEIGHT.T)
    site = drawn(Implicit(generator, 2).expand([20_000]))
    elbo = ScoreELBO(20_000, lambda x: -(x - generator.bias) @ precision, covariance=None)
    elbo.score_parts(site, None).entropy_term.mean().backward()
    expected = -torch.linalg.inv(WEIGHT).T
    torch.testing.assert_close(generator.weight.grad, expected, rtol=0, atol=0.05)


def test_of_a_gaussian_the_moments_alone_give_the_exact_gradient():
    """No noise at all: what is left of the score is zero."""
    generator = linear_generator()
    site = drawn(Implicit(generator, 2).expand([8]))
    elbo = ScoreELBO(8, lambda x: -x, num_entropy_particles=8, covariance="full")
    elbo.score_parts(site, None).entropy_term.mean().backward()
    torch.testing.assert_close(generator.weight.grad, -torch.linalg.inv(WEIGHT).T)
    torch.testing.assert_close(generator.bias.grad, torch.zeros(2))


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_moments_do_not_change_the_gradient_of_an_exact_score(covariance):
    """Taken out with many draws and the score of what is left: the same gradient as without."""
    generator = nn.Linear(1, 1)
    generator.weight.data.fill_(0.7)
    q = Implicit(lambda z: generator(z) + generator(z).pow(3), 1)  # of a known density
    site = drawn(q.expand([40_000]))
    value = site.value.detach()

    def score(x):  # by the change of variables, at the points of the site
        u = generator(site.noise).detach().requires_grad_()
        log_q = dist.Normal(generator.bias.detach(), 0.7).log_prob(u) - (1 + 3 * u.square()).log()
        return torch.autograd.grad(log_q.sum(), u)[0] / (1 + 3 * u.detach().square())

    scale = (value - value.mean()).square().mean().sqrt()
    gradients = []
    for estimator, chosen in [(score, None), (lambda x: scale * score(x), covariance)]:
        elbo = ScoreELBO(40_000, estimator, covariance=chosen)
        term = elbo.score_parts(site, None).entropy_term.mean()
        gradients.append(torch.autograd.grad(term, generator.weight, retain_graph=True)[0].item())
    log_slope = (1 + 3 * generator(site.noise).square()).log().mean()
    entropy = generator.weight.log() + log_slope  # and a constant
    exact = -torch.autograd.grad(entropy, generator.weight)[0].item()
    assert gradients == pytest.approx([exact, exact], rel=0.05)


@pytest.mark.parametrize(("covariance", "bound"), [("auto", True), (None, False)])
def test_value_is_the_entropy_of_the_moments(covariance, bound):
    exact = 0.5 * torch.logdet(2 * math.pi * math.e * WEIGHT @ WEIGHT.T)
    diagonal = 0.5 * (2 * math.pi * math.e * WEIGHT.square().sum(1)).log().sum()
    site = drawn(Implicit(linear_generator(), 2).expand([5000]))
    parts = ScoreELBO(5000, lambda x: -x, covariance=covariance).score_parts(site, None)
    expected = exact if bound else diagonal
    assert -parts.log_prob.mean().item() == pytest.approx(expected.item(), abs=0.05)
    assert parts.log_prob.shape == parts.entropy_term.shape == (5000,)
    assert not parts.log_prob.requires_grad
    assert parts.score_function == 0


def test_estimators_have_to_return_a_score_for_each_draw():
    site = drawn(Implicit(MLP(3, 2), 3).expand([4]))
    with pytest.raises(
        ValueError, match=r"\(100,\) for the draws of site 'x', of shape \(100, 2\)"
    ):
        ScoreELBO(4, lambda x: x.sum(-1)).score_parts(site, None)
    ScoreELBO(4, partial(stein_score, ridge=0.1)).score_parts(site, None)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"estimator": "sliced"}, 'estimator must be "spectral", "stein" or a function'),
        ({"num_entropy_particles": 1}, "num_entropy_particles must be at least 2"),
        ({"covariance": "low-rank"}, 'covariance must be "auto", "diagonal", "full" or None'),
    ],
)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        ScoreELBO(**kwargs)
