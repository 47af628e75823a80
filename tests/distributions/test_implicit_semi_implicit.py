# SPDX-License-Identifier: Apache-2.0
"""The conditional noise of SemiImplicit, and its moments with a linear generator."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from pyro_implicit import MLP, SemiImplicit


def assert_moments(draws: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Mean and covariance of Gaussian ``draws`` (num_draws, m), within 5 standard errors."""
    num_draws = len(draws)
    variance = covariance.diagonal()
    mean_error = (draws.mean(0) - mean).abs()
    assert (mean_error < 5 * (variance / num_draws).sqrt()).all()
    covariance_error = (draws.T.cov() - covariance).abs()
    standard_error = ((variance.outer(variance) + covariance.square()) / num_draws).sqrt()
    assert (covariance_error < 5 * standard_error).all()


@pytest.mark.parametrize("seed", range(3))
def test_linear_generator_gives_the_gaussian(seed):
    torch.manual_seed(seed)
    generator = nn.Linear(2, 4)
    scale = torch.tensor([0.1, 1.0, 0.5, 2.0])
    q = SemiImplicit(generator, 2, scale).expand((3, 2))
    draws = q.sample((5000,))
    matrix, bias = generator.weight.detach(), generator.bias.detach()
    covariance = matrix @ matrix.T + scale.square().diag()
    assert_moments(draws.flatten(0, 2), bias, covariance)
    for element in draws.flatten(1, 2).unbind(1):  # and for each element of the batch
        assert_moments(element, bias, covariance)
    # Elements of the batch are independent of each other: those of two sit side by side.
    pairs = torch.cat([draws[:, 0, 0], draws[:, 2, 1]], -1)
    assert_moments(pairs, bias.repeat(2), torch.block_diag(covariance, covariance))


def test_scale_of_each_batch_element():
    generator = nn.Linear(2, 3)
    scale = torch.tensor([[0.1, 0.2, 0.3], [3.0, 2.0, 1.0]])
    q = SemiImplicit(generator, dist.Normal(0.0, 1.0).expand([2, 2]).to_event(1), scale)
    matrix, bias = generator.weight.detach(), generator.bias.detach()
    draws = q.expand((4, 2)).sample((5000,))
    for index in range(2):
        covariance = matrix @ matrix.T + scale[index].square().diag()
        assert_moments(draws[..., index, :].flatten(0, 1), bias, covariance)


@pytest.mark.parametrize("sample_shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("batch_shape", [(), (4,), (5, 4)])
def test_conditional(batch_shape, sample_shape):
    context = torch.randn(batch_shape + (2,))
    scale = 0.1 + torch.rand(batch_shape + (5,))
    q = SemiImplicit(MLP(3, 5, context_dim=2), 3, scale, context)
    noise, value, _ = q.draw(sample_shape)
    conditional = q.conditional(noise)
    assert conditional.batch_shape == sample_shape + batch_shape
    assert conditional.event_shape == (5,)
    torch.testing.assert_close(conditional.mean, q.generate(noise))
    torch.testing.assert_close(conditional.stddev, scale.expand(value.shape))
    log_prob = torch.distributions.Normal(q.generate(noise), scale).log_prob(value).sum(-1)
    torch.testing.assert_close(conditional.log_prob(value), log_prob)


def test_draws_follow_the_conditional():
    """Standardised by the conditional of their own noise, draws are standard normal."""
    q = SemiImplicit(MLP(3, 4), 3, torch.tensor([0.1, 1.0, 0.5, 2.0]))
    noise, value, _ = q.draw((20_000,))
    conditional = q.conditional(noise)
    standardised = ((value - conditional.mean) / conditional.stddev).detach()
    assert_moments(standardised, torch.zeros(4), torch.eye(4))
    # ... and independent of that noise
    joint = torch.cat([standardised, noise], -1)
    assert_moments(joint, torch.zeros(7), torch.eye(7))


@pytest.mark.parametrize("scale_shape", [(), (3,), (2, 3), (2, 1), (4, 1, 1), (4, 2, 3), (1, 2, 3)])
def test_scale_broadcasts_to_matrix_values(scale_shape):
    generator = nn.Sequential(nn.Linear(3, 6), nn.Unflatten(-1, (2, 3)))
    noise = dist.Normal(0.0, 1.0).expand([4, 3]).to_event(1)
    q = SemiImplicit(generator, noise, 0.1 + torch.rand(scale_shape))
    assert q.batch_shape == (4,) and q.event_shape == (2, 3)
    for q in (q, q.expand((5, 4))):  # noqa: B020
        drawn, value, _ = q.draw((6,))
        conditional = q.conditional(drawn)
        assert conditional.event_shape == (2, 3)
        assert conditional.batch_shape == (6,) + q.batch_shape
        torch.testing.assert_close(conditional.stddev, q.scale.expand(value.shape))
        assert conditional.log_prob(value).shape == (6,) + q.batch_shape


def test_gradients_reach_generator_context_and_scale():
    context = torch.randn(4, 2, requires_grad=True)
    scale = (0.1 + torch.rand(4, 5)).requires_grad_()
    q = SemiImplicit(MLP(3, 5, context_dim=2), 3, scale, context)
    noise, value, _ = q.draw()
    mean = q.generate(noise)
    weight = torch.randn_like(value)
    inputs = [context, *q.generator.parameters()]
    found = torch.autograd.grad((weight * value).sum(), [scale, *inputs])
    eta = (value - mean) / scale
    torch.testing.assert_close(found[0], (weight * eta).detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1:], torch.autograd.grad((weight * mean).sum(), inputs))


def test_scale_takes_the_precision_of_the_values():
    q = SemiImplicit(nn.Linear(3, 2).double(), 3, torch.ones(2).float())
    assert q.scale.dtype == q.sample().dtype == torch.double


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), torch.tensor([1.0, 0.0])])
def test_refuses_scales_that_are_not_positive(scale):
    with pytest.raises(ValueError, match="the scale of SemiImplicit must be positive, got"):
        SemiImplicit(nn.Linear(3, 2), 3, scale)


def test_checks_nothing_without_validation():
    assert SemiImplicit(nn.Linear(3, 2), 3, -1.0, validate_args=False).sample().shape == (2,)


@pytest.mark.parametrize("scale_shape", [(4, 2), (1, 2), (3,)])
def test_refuses_scales_of_another_shape(scale_shape):
    with pytest.raises(ValueError, match=r"has shape .* not broadcast to .* shape \(2,\).*noise="):
        SemiImplicit(nn.Linear(3, 2), 3, torch.ones(scale_shape))


def test_follows_the_cure_for_scales_of_a_batch():
    noise = dist.Normal(0.0, 1.0).expand([4, 3]).to_event(1)
    assert SemiImplicit(nn.Linear(3, 2), noise, torch.ones(4, 2)).sample().shape == (4, 2)
