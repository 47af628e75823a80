# SPDX-License-Identifier: Apache-2.0
"""Kernels against their formulas on explicit differences, value and gradient."""

from __future__ import annotations

import statistics

import pytest
import torch

from pyro_implicit.ops import (
    imq_kernel,
    median_bandwidth,
    multiscale_rbf_kernel,
    rbf_kernel,
    squared_distances,
)

pytestmark = pytest.mark.usefixtures("double")

KERNELS = {"rbf": rbf_kernel, "multiscale": multiscale_rbf_kernel, "imq": imq_kernel}

BANDWIDTH = 1.3


def explicit(name, x, y):
    squares = (x.unsqueeze(-2) - y.unsqueeze(-3)).pow(2).sum(-1)
    if name == "rbf":
        return torch.exp(-squares / (2 * BANDWIDTH**2))
    if name == "multiscale":
        widths = [BANDWIDTH / 2**k for k in range(4)]
        return sum(torch.exp(-squares / (2 * width**2)) for width in widths) / 4
    return 1 / torch.sqrt(1 + squares / BANDWIDTH**2)


@pytest.mark.parametrize("name", KERNELS)
def test_value_and_gradient(name):
    x = torch.randn(2, 5, 3, requires_grad=True)
    y = torch.randn(2, 4, 3, requires_grad=True)
    weight = torch.randn(2, 5, 4)
    found = KERNELS[name](x, y, torch.tensor(BANDWIDTH))
    expected = explicit(name, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((found * weight).sum(), (x, y))
    wanted = torch.autograd.grad((expected * weight).sum(), (x, y))
    torch.testing.assert_close(gradients, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS.values())
def test_one_bandwidth_for_each_batch(kernel):
    x, bandwidth = torch.randn(3, 5, 2), torch.tensor([0.5, 1.0, 2.0])
    for row, gram in enumerate(kernel(x, x, bandwidth)):
        torch.testing.assert_close(gram, kernel(x[row], x[row], bandwidth[row]))


def test_a_point_does_not_feel_itself():
    x = torch.randn(6, 3)
    points = x.clone().requires_grad_()
    gram = rbf_kernel(points, x, torch.tensor(BANDWIDTH))
    torch.testing.assert_close(gram.diagonal(), torch.ones(6))
    (gradient,) = torch.autograd.grad(gram.diagonal().sum(), points)
    torch.testing.assert_close(gradient, torch.zeros(6, 3))


def test_distances_far_from_the_origin_in_single_precision():
    x = torch.randn(20, 3)
    near = squared_distances(x.float(), x.float())
    far = squared_distances(x.float() + 1024, x.float() + 1024)  # exact shifts to 2^-13
    torch.testing.assert_close(near.double(), torch.cdist(x, x).square(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(far, near, rtol=1e-2, atol=1e-3)


def test_median_bandwidth():
    x = torch.randn(2, 6, 3, requires_grad=True)
    found = median_bandwidth(x)
    assert torch.autograd.gradcheck(median_bandwidth, x)
    for row in range(2):
        pairs = [(x[row, i] - x[row, j]).norm().item() for i in range(6) for j in range(i)]
        assert found[row].item() == pytest.approx(statistics.median(pairs), rel=1e-12)


def test_median_of_many_samples():
    x = torch.randn(300, 3)
    assert median_bandwidth(x).item() == pytest.approx(median_bandwidth(x[::3]).item(), rel=1e-6)
    everything = torch.pdist(x).median().item()
    assert median_bandwidth(x).item() == pytest.approx(everything, rel=0.05)


def test_equal_samples_keep_the_kernel_finite():
    x = torch.ones(4, 2)
    bandwidth = median_bandwidth(x)
    assert bandwidth > 0
    assert rbf_kernel(x, x, bandwidth).equal(torch.ones(4, 4))


def test_median_of_one_sample():
    with pytest.raises(ValueError, match="at least 2 samples, but got 1"):
        median_bandwidth(torch.ones(1, 2))
