# SPDX-License-Identifier: Apache-2.0
"""Stein's kernel against autograd, its test against what it must accept and reject."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, jacrev

from pyro_implicit.ops.score_estimators import stein_gram, stein_test

pytestmark = pytest.mark.usefixtures("double")


def score_of(x):
    """Of log p = -sum x^4 / 4 + x_0 x_1."""
    return -x.pow(3) + torch.stack([x[..., 1], x[..., 0], 0 * x[..., 2]], -1)


def test_gram_is_steins_operator_on_both_arguments():
    """Pair by pair, with derivatives of the kernel by autograd."""
    torch.manual_seed(0)
    x, bandwidth = torch.randn(5, 3), torch.tensor(1.3)
    kernel = lambda a, b: (1 + (a - b).square().sum() / bandwidth**2) ** -0.5  # noqa: E731
    found = stein_gram(x, score_of(x), bandwidth)
    for i, a in enumerate(x):
        for j, b in enumerate(x):
            s, t = score_of(a), score_of(b)
            mixed = jacrev(grad(kernel, argnums=1), argnums=0)(a, b).trace()
            slopes = s @ grad(kernel, argnums=1)(a, b) + t @ grad(kernel)(a, b)
            expected = s @ t * kernel(a, b) + slopes + mixed
            assert found[i, j].item() == pytest.approx(expected.item(), abs=1e-12)


def test_gram_has_mean_zero_under_the_density():
    """In its second argument, by quadrature, for any first one."""
    grid = torch.linspace(-9, 9, 2001).unsqueeze(-1)
    weight = torch.exp(-0.5 * grid.square().squeeze(-1))
    gram = stein_gram(grid, -grid, torch.tensor(0.7))
    means = (gram * weight).sum(-1) / weight.sum()
    assert means[800:1200].abs().max() < 1e-8
    assert (stein_gram(grid, -2 * grid, torch.tensor(0.7)) * weight).mean(-1)[1200].abs() > 1e-2


def test_statistic_leaves_the_diagonal_out():
    torch.manual_seed(0)
    x = torch.randn(7, 2)
    gram = stein_gram(x, score_of(torch.nn.functional.pad(x, (0, 1)))[:, :2])
    off = [gram[i, j] for i in range(7) for j in range(7) if i != j]
    expected = torch.stack(off).mean()
    found = stein_test(x, score_of(torch.nn.functional.pad(x, (0, 1)))[:, :2])
    assert found.statistic == pytest.approx(expected.item(), rel=1e-12)
    assert found.relative == pytest.approx((expected / gram.diagonal().mean()).item(), rel=1e-12)


@pytest.mark.parametrize(("dim", "is_resampled"), [(1, False), (5, False), (5, True)])
def test_p_values_are_uniform_under_the_density(dim, is_resampled):
    """Also of draws resampled by importance weights, of which a third are equal."""
    p_values = []
    for seed in range(200):
        torch.manual_seed(seed)
        x = torch.randn(100, dim)
        if is_resampled:
            x = 1.3 * torch.randn(200, dim)
            log_weights = -0.5 * (1 - 1.3**-2) * x.square().sum(-1)
            x = x[torch.multinomial(log_weights.exp(), 100, replacement=True)]
        p_values.append(stein_test(x, -x, num_bootstrap=200).p_value)
    p = torch.tensor(p_values)
    # A share of 0.1 has standard error 0.021, of 0.5 one of 0.035.
    assert (p <= 0.1).double().mean().item() == pytest.approx(0.1, abs=0.065)
    assert (p <= 0.5).double().mean().item() == pytest.approx(0.5, abs=0.11)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dim", [1, 5])
def test_rejects_what_is_too_narrow(dim, seed):
    torch.manual_seed(seed)
    x = 0.8 * torch.randn(1000, dim)
    assert stein_test(x, -x).p_value < 0.01


def test_rejects_draws_of_few_particles():
    torch.manual_seed(0)
    particles = torch.randn(20, 2)
    x = particles[torch.randint(20, (1000,))]
    assert stein_test(x, -x).p_value < 0.01


def test_float32():
    torch.manual_seed(0)
    x = torch.randn(300, 3)
    double = stein_gram(x, score_of(x))
    single = stein_gram(x.float(), score_of(x).float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4)


def test_one_sample():
    with pytest.raises(ValueError, match="at least 2 samples"):
        stein_test(torch.zeros(1, 2), torch.zeros(1, 2))
