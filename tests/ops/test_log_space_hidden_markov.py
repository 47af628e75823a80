# SPDX-License-Identifier: Apache-2.0
"""Hidden Markov models against a sum over all paths."""

import itertools

import pytest
import torch

from pyro_implicit.ops.log_space import log_forward


def sum_over_paths(initial, transition, observed):
    length, num_states = observed.shape
    paths = []
    for path in itertools.product(range(num_states), repeat=length + 1):
        steps = [
            transition[t if len(transition) > 1 else 0, path[t], path[t + 1]]
            + observed[t, path[t + 1]]
            for t in range(length)
        ]
        paths.append(initial[path[0]] + sum(steps))
    return torch.stack(paths).logsumexp(0)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("changes", [False, True])
def test_a_sequence_has_the_density_of_all_its_paths(length, changes):
    initial = torch.randn(3, dtype=torch.float64).log_softmax(-1).requires_grad_()
    transition = torch.randn(length if changes else 1, 3, 3, dtype=torch.float64).log_softmax(-1)
    transition.requires_grad_()
    observed = (50 * torch.randn(length, 3, dtype=torch.float64)).requires_grad_()
    parts = (initial, transition, observed)
    found, expected = log_forward(*parts), sum_over_paths(*parts)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(one, parts) for one in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_forbidden_steps_have_no_density_and_no_gradient():
    forbidden = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]], requires_grad=True)
    initial = torch.tensor([0.0, -torch.inf])
    observed = torch.tensor([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]])
    found = log_forward(initial, forbidden.unsqueeze(0), observed)
    assert found.item() == pytest.approx(6.0)
    (gradient,) = torch.autograd.grad(found, forbidden)
    torch.testing.assert_close(gradient, torch.tensor([[3.0, 0.0], [0.0, 0.0]]))
