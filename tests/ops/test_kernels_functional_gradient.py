# SPDX-License-Identifier: Apache-2.0
"""Kernel gradients against their definition, pair by pair with dense Jacobians."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_implicit.generators import ResidualGenerator
from pyro_implicit.ops.kernels import (
    InverseTransposed,
    kernel_and_slopes,
    particle_bandwidth,
    repulsion,
)

pytestmark = pytest.mark.usefixtures("double")


def by_definition(kernel, x, y, bandwidth, jacobians):
    """One pair at a time: the kernel, and J^-T times its gradient by autograd, summed over j."""
    gram = torch.zeros(len(x), len(y))
    sums = torch.zeros(y.shape)
    for j in range(len(x)):
        for i in range(len(y)):
            point = x[j].clone().requires_grad_()
            square = (point - y[i]).square().sum() / bandwidth**2
            value = (-0.5 * square).exp() if kernel == "rbf" else 1 / (1 + square).sqrt()
            (gradient,) = torch.autograd.grad(value, point)
            gram[j, i] = value.detach()
            sums[i] += torch.linalg.inv(jacobians[j]).T @ gradient
    return gram, sums


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("size, core", [(4, 2), (3, 3), (5, 1)])
def test_residual_dense_and_definition_agree(kernel, size, core):
    generator = ResidualGenerator(size, core, (6,))
    for parameter in generator.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, y, bandwidth = torch.randn(6, size), torch.randn(5, size), torch.tensor(0.9)
    jacobians = generator.linearise(x).jacobian().detach()
    assert not torch.allclose(jacobians, jacobians.mT, atol=0.1)
    gram, sums = by_definition(kernel, x, y, bandwidth, jacobians)
    found, slopes = kernel_and_slopes(x, y, bandwidth, kernel)
    torch.testing.assert_close(found, gram)
    structured = repulsion(slopes, x, y, generator.linearise(x).inverse_transposed())
    torch.testing.assert_close(structured, sums)
    dense = InverseTransposed(torch.linalg.inv(jacobians).mT, x.new_empty(0))
    torch.testing.assert_close(repulsion(slopes, x, y, dense), sums)


def test_identity_jacobian():
    x, bandwidth = torch.randn(6, 3), torch.tensor(1.3)
    _, sums = by_definition("rbf", x, x, bandwidth, torch.eye(3).expand(6, 3, 3))
    _, slopes = kernel_and_slopes(x, x, bandwidth)
    torch.testing.assert_close(repulsion(slopes, x, x), sums)


def test_batches_are_independent():
    generator = ResidualGenerator(4, 2, (6,), output_scale=1.0)
    x, y = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 5, 4)
    bandwidth = particle_bandwidth(y)
    assert bandwidth.shape == (2, 3)
    _, slopes = kernel_and_slopes(x, y, bandwidth)
    found = repulsion(slopes, x, y, generator.linearise(x).inverse_transposed())
    for index in [(0, 0), (1, 2)]:
        inverse = generator.linearise(x[index]).inverse_transposed()
        _, one = kernel_and_slopes(x[index], y[index], bandwidth[index])
        torch.testing.assert_close(found[index], repulsion(one, x[index], y[index], inverse))


def test_bandwidth_is_that_of_svgd():
    """exp(-d^2 log n / med^2) at the median distance is 1/n."""
    samples = torch.randn(51, 3)
    gram, _ = kernel_and_slopes(samples, samples, particle_bandwidth(samples))
    rows, columns = torch.triu_indices(51, 51, offset=1)
    assert gram[rows, columns].median().item() == pytest.approx(1 / 51, rel=0.01)


def test_far_from_the_origin_in_single_precision():
    x = torch.randn(20, 3)
    expected = repulsion(kernel_and_slopes(x, x, torch.tensor(1.0))[1], x, x)
    far = (x + 1000).float()
    _, slopes = kernel_and_slopes(far, far, torch.tensor(1.0, dtype=torch.float32))
    found = repulsion(slopes, far, far)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-3)


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest output of any operation."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, torch.Tensor):
                # An expanded tensor needs no memory of its own.
                layout = zip(tensor.shape, tensor.stride(), strict=True)
                stored = math.prod(size for size, stride in layout if stride != 0)
                self.numel = max(self.numel, stored)
        return output


def test_no_tensor_of_all_pairs():
    size, count, core = 60_000, 100, 5
    generator = ResidualGenerator(size, core, (16,)).float()
    x, y = torch.randn(2, count, size, dtype=torch.float32)
    with LargestTensor() as largest:
        gram, slopes = kernel_and_slopes(x, y, particle_bandwidth(y))
        found = repulsion(slopes, x, y, generator.linearise(x).inverse_transposed())
    assert found.shape == (count, size) and found.isfinite().all()
    assert largest.numel == 2 * count * size  # of both batches, not n * n * m
