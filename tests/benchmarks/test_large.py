# SPDX-License-Identifier: Apache-2.0
"""References of the large models: exact samplers and posteriors against independent formulas."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

from benchmarks.large import families
from benchmarks.large.references import augmented
from benchmarks.large.references.collapsed import walk_posterior

pytestmark = pytest.mark.usefixtures("double")


def test_the_walk_is_that_of_its_dense_covariance():
    rng = np.random.default_rng(0)
    variances, y = rng.uniform(0.5, 2.0, 5), rng.normal(size=5)
    root = np.tril(np.ones((5, 5))) * np.sqrt(variances)
    covariance = root @ root.T
    gain = covariance @ np.linalg.inv(covariance + 0.49 * np.eye(5))
    factor, mean, log_prob = walk_posterior(y, variances, 0.7)
    np.testing.assert_allclose(mean, gain @ y)
    upper = np.diag(factor[1]) + np.diag(factor[0, 1:], 1)
    np.testing.assert_allclose(np.linalg.inv(upper.T @ upper), covariance - gain @ covariance)
    zero = walk_posterior(0 * y, variances, 0.7)[2]
    exact = stats.multivariate_normal(np.zeros(5), covariance + 0.49 * np.eye(5)).logpdf
    assert log_prob - zero == pytest.approx(exact(y) - exact(0 * y))
    other = walk_posterior(y, 2 * variances, 1.3)[2]
    doubled = stats.multivariate_normal(np.zeros(5), 2 * covariance + 1.69 * np.eye(5)).logpdf(y)
    assert other - log_prob == pytest.approx(doubled - exact(y))


def checked_gradient(score, point):
    """Check the gradient by differences; return the function of the log-density."""

    def value_of(point):
        return score(point)[0]

    steps = 1e-6 * np.eye(len(point))
    numeric = [(value_of(point + step) - value_of(point - step)) / 2e-6 for step in steps]
    np.testing.assert_allclose(score(point)[1], numeric, rtol=1e-4, atol=1e-5)
    return value_of


def test_the_score_of_volatilities():
    """The density is that of the model in white coordinates; the gradient is its derivative."""
    rng = np.random.default_rng(0)
    returns, point = 0.02 * rng.standard_t(8, 6), rng.normal(size=8) * 0.3
    point[:3] += [np.log(0.2), np.log(8.0), -9.0]

    value_of = checked_gradient(partial(augmented.volatility_score, returns), point)

    def by_hand(point):
        """The start is integrated out: the first level is normal with variance 4 + sigma**2."""
        sigma, nu = np.exp(point[:2])
        level = augmented.volatility_score(returns, point)[2]
        total = stats.t.logpdf(returns, nu, 0.0, np.exp(level)).sum() - 10 * sigma + point[0]
        total += stats.norm.logpdf(level[0], -4.0, np.sqrt(4.0 + sigma**2))
        total += stats.norm.logpdf(np.diff(level), 0.0, sigma).sum()
        total += stats.gamma.logpdf(nu, 2.0, scale=10.0) + point[1]
        turns = [augmented.volatility_score(returns, np.append(point[:2], e))[2] for e in np.eye(6)]
        return total + np.linalg.slogdet(np.stack(turns))[1]

    other = point + 0.1 * rng.normal(size=8)
    assert value_of(other) - value_of(point) == pytest.approx(by_hand(other) - by_hand(point))


def test_the_score_of_log_variances():
    rng = np.random.default_rng(0)
    returns, point = rng.normal(size=6), rng.normal(size=7) * 0.3
    point[:2] += [np.log(0.2), -1.0]

    value_of = checked_gradient(partial(augmented.log_variance_score, returns), point)

    def by_hand(point):
        sigma = np.exp(point[0])
        level = augmented.log_variance_score(returns, point)[2]
        total = stats.norm.logpdf(returns, 0.0, np.exp(level / 2)).sum() - 2 * sigma**2 + point[0]
        total += stats.norm.logpdf(level[0], -1.0, np.sqrt(4.0 + sigma**2))
        total += stats.norm.logpdf(np.diff(level), 0.0, sigma).sum()
        at = [np.append(point[0], e) for e in np.eye(6)]
        turns = [augmented.log_variance_score(returns, one)[2] for one in at]
        return total + np.linalg.slogdet(np.stack(turns))[1]

    other = point + 0.1 * rng.normal(size=7)
    assert value_of(other) - value_of(point) == pytest.approx(by_hand(other) - by_hand(point))


def test_school_covariances_are_proposed_from_their_likelihood():
    """Their steps leave the posterior of exact effects invariant: means of a long chain agree."""
    rng = np.random.default_rng(0)
    school = np.repeat(np.arange(40), 6)
    x = rng.normal(size=(240, 2))
    effect = rng.normal(size=(40, 3)) * [0.8, 0.4, 0.3] + [1.0, 0.5, -0.3]
    own = effect[school]
    y = own[:, 0] + (own[:, 1:] * x).sum(-1) + 0.5 * rng.normal(size=240)
    chain = augmented._school_chain(rng, school, x, y, 300, 2)
    scale = chain["tau"].std(0) + 0.1
    assert (np.abs(chain["tau"].mean(0) - effect.std(0)) < 3 * scale).all()
    assert abs(chain["sigma"].mean() - 0.5) < 0.1


def test_quadrature_of_groups_is_that_of_normal_priors():
    y = torch.tensor([0.3, -1.0, 2.0])
    points, tau = families.nearby(y, -torch.inf), torch.tensor([0.7, 1.5])
    log_prior = dist.Normal(0.0, tau[:, None, None]).log_prob(points)
    log_mass, mean, variance = families.by_quadrature(y, log_prior, points)
    total = tau.unsqueeze(-1) ** 2 + families.errors(y) ** 2
    share = tau.unsqueeze(-1) ** 2 / total
    torch.testing.assert_close(mean, share * y, rtol=0, atol=1e-6)
    torch.testing.assert_close(variance, share * families.errors(y) ** 2, rtol=1e-5, atol=0)
    expected = dist.Normal(0.0, total.sqrt()).log_prob(y).sum(-1)
    torch.testing.assert_close(log_mass, expected, rtol=0, atol=1e-5)


def test_shares_are_those_of_a_dirichlet_multinomial():
    counts = torch.tensor([[3.0, 17.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0]])
    alpha = torch.tensor([0.4, 2.0])
    log_weight, mean, variance = families.simplex_exact(counts, {"alpha": alpha})
    for i, one in enumerate(alpha):
        prior = dist.DirichletMultinomial(one * torch.ones(4), 20)
        expected = prior.log_prob(counts).sum() + dist.Gamma(2.0, 0.5).log_prob(one)
        if i == 0:
            constant = expected - log_weight[0]  # multinomial coefficients
        torch.testing.assert_close(log_weight[i] + constant, expected)
        given = dist.Dirichlet(one + counts)
        torch.testing.assert_close(mean[i], given.mean.flatten())
        torch.testing.assert_close(variance[i], given.variance.flatten())
