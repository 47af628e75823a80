# SPDX-License-Identifier: Apache-2.0
"""Mixtures of any vectors, against torch's mixture of Gaussians."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn
from torch.distributions import MixtureSameFamily

from pyro_implicit import Implicit
from pyro_implicit.distributions import IntractableDensityError
from pyro_implicit.distributions.implicit import Mixture

LOC = torch.tensor([[-2.0, 0.5], [1.0, 1.0], [0.0, -3.0]], dtype=torch.float64)
SCALE = torch.tensor([[0.3, 1.0], [2.0, 0.5], [1.0, 1.0]], dtype=torch.float64)
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def gaussians():
    return [dist.Normal(*pair).to_event(1) for pair in zip(LOC, SCALE, strict=True)]


def reference():
    parts = torch.distributions.Independent(torch.distributions.Normal(LOC, SCALE), 1)
    return MixtureSameFamily(torch.distributions.Categorical(WEIGHTS), parts)


def test_log_prob_and_its_gradient():
    value = (3 * torch.randn(4, 5, 2, dtype=torch.float64)).requires_grad_()
    actual = Mixture(WEIGHTS.log() + 7.0, gaussians()).log_prob(value)  # normalises
    expected = reference().log_prob(value)
    torch.testing.assert_close(actual, expected)
    (actual_slope,) = torch.autograd.grad(actual.sum(), value)
    (expected_slope,) = torch.autograd.grad(expected.sum(), value)
    torch.testing.assert_close(actual_slope, expected_slope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws(dtype):
    parts = [
        dist.Normal(loc.to(dtype), scale.to(dtype)).to_event(1)
        for loc, scale in zip(LOC, SCALE, strict=True)
    ]
    draws = Mixture(WEIGHTS.to(dtype).log(), parts).sample((200, 500))
    assert draws.shape == (200, 500, 2) and draws.dtype == dtype and not draws.requires_grad
    draws = draws.reshape(-1, 2)
    expected = reference()
    torch.testing.assert_close(draws.mean(0).double(), expected.mean, atol=0.03, rtol=0)
    torch.testing.assert_close(draws.var(0).double(), expected.variance, atol=0, rtol=0.03)
    # The first and the second coordinate of one draw belong together.
    inside = (draws[:, 1] < -1.5).double().mean().item()
    both = ((draws[:, 1] < -1.5) & (draws[:, 0] < -1)).double().mean().item()
    assert both / inside == pytest.approx(0.16, abs=0.03)
    # And neighbours do not.
    side = (draws[:, 0] < -1.0).double()
    assert torch.corrcoef(torch.stack([side[1:], side[:-1]]))[0, 1].abs() < 0.015


def test_the_gradient_of_draws():
    """Of E[x^2] = sum of w_k (m_k^2 + s_k^2), for constant weights."""
    loc, scale = LOC.clone().requires_grad_(), SCALE.clone().requires_grad_()
    parts = [dist.Normal(*pair).to_event(1) for pair in zip(loc, scale, strict=True)]
    q = Mixture(WEIGHTS.log(), parts)
    pyro.set_rng_seed(0)
    q.rsample((200_000,)).square().sum(-1).mean().backward()
    torch.testing.assert_close(loc.grad, 2 * WEIGHTS[:, None] * LOC, atol=0.02, rtol=0)
    torch.testing.assert_close(scale.grad, 2 * WEIGHTS[:, None] * SCALE, atol=0.03, rtol=0)
    trained = Mixture(WEIGHTS.log().requires_grad_(), parts)
    assert not trained.has_rsample
    with pytest.raises(NotImplementedError, match="weights are trained .* Cure: sample"):
        trained.rsample()


def test_components_draw_only_as_often_as_chosen():
    counts = []

    class Counting(nn.Module):
        output_dim = 1

        def forward(self, noise):
            counts.append(len(noise))
            return noise

    parts = [Implicit(Counting(), 1), Implicit(Counting(), 1)]
    Mixture(torch.tensor([0.3, 0.7]).log(), parts).sample((1000,))
    assert sum(counts) == 1000 and abs(counts[0] - 300) < 60
    counts.clear()
    Mixture(torch.tensor([-math.inf, 0.0]), parts).sample((10,))
    assert counts == [10]


def test_a_plate_gives_every_element_its_own_draw():
    q = Mixture(WEIGHTS.log(), gaussians())
    with pyro.plate("particles", 4, dim=-2), pyro.plate("inner", 3, dim=-1):
        trace = poutine.trace(lambda: pyro.sample("x", q)).get_trace()
    trace.compute_log_prob()
    site = trace.nodes["x"]
    assert site["value"].shape == (4, 3, 2) and site["value"].unique().numel() == 24
    torch.testing.assert_close(site["log_prob"], reference().log_prob(site["value"]))
    wide = q.expand(torch.Size((4, 3)))
    assert wide.batch_shape == (4, 3) and wide.event_shape == (2,) and wide.has_rsample
    assert wide.log_prob(torch.zeros(2, dtype=torch.float64)).shape == (4, 3)


def test_seeds_give_equal_draws():
    q = Mixture(WEIGHTS.log(), gaussians())
    pyro.set_rng_seed(3)
    first = q.sample((50,))
    pyro.set_rng_seed(3)
    assert q.sample((50,)).equal(first)


def test_overflow_far_from_a_component_counts_as_no_density():
    class Overflows(dist.Normal):
        def log_prob(self, value):
            return super().log_prob(value).masked_fill(value.abs() > 10, math.nan)

    parts = [Overflows(0.0, 1.0).expand([1]).to_event(1), dist.Normal(20.0, 1.0).expand([1])]
    parts[1] = parts[1].to_event(1)
    q = Mixture(torch.zeros(2), parts)
    expected = parts[1].log_prob(torch.tensor([20.5])) + math.log(0.5)
    torch.testing.assert_close(q.log_prob(torch.tensor([20.5])), expected)
    alone = Mixture(torch.zeros(1), parts[:1])
    assert alone.log_prob(torch.tensor([20.5])).isnan()


def test_no_density_says_so():
    parts = [dist.Normal(torch.zeros(2), 1.0).to_event(1), Implicit(nn.Linear(2, 2), 2)]
    q = Mixture(torch.zeros(2), parts)
    message = "component 1 of the mixture, Implicit, has no density.*Cure: .*AutoregressiveGen"
    with pytest.raises(IntractableDensityError, match=message):
        q.log_prob(q.sample())


def test_bad_arguments():
    part = dist.Normal(torch.zeros(2), 1.0)
    with pytest.raises(ValueError, match=r"log_weights has shape \(2,\) for 1 components"):
        Mixture(torch.zeros(2), [part.to_event(1)])
    with pytest.raises(ValueError, match=r"shape \(0,\) for 0 components"):
        Mixture(torch.zeros(0), [])
    with pytest.raises(ValueError, match=r"vectors of one size.*\(\(2,\), \(\)\)"):
        Mixture(torch.zeros(1), [part])
    with pytest.raises(ValueError, match="one size"):
        Mixture(torch.zeros(2), [part.to_event(1), dist.Normal(torch.zeros(3), 1.0).to_event(1)])
    with pytest.raises(ValueError, match="cannot be normalised"):
        Mixture(torch.tensor([-math.inf]), [part.to_event(1)])
