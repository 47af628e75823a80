# SPDX-License-Identifier: Apache-2.0
"""Exact derivatives of all injective generators, against ``torch.func``'s; a new one joins by
adding itself to the list."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.generators import (
    AutoregressiveGenerator,
    GatedResidualGenerator,
    ResidualGenerator,
)
from pyro_implicit.ops import batch_jacobian

# Generator, its arguments, its context's size, and the sd of its weights.
CASES = [
    (AutoregressiveGenerator, (1, (8,)), 0, 0.4),
    (AutoregressiveGenerator, (1, (8, 7)), 2, 0.4),
    (AutoregressiveGenerator, (2, (8, 7)), 0, 0.4),
    (AutoregressiveGenerator, (6, (16, 12)), 2, 0.4),
    (AutoregressiveGenerator, (6, (16, 12), "tanh"), 2, 0.4),
    (AutoregressiveGenerator, (6, (16, 12), "elu"), 2, 0.4),
    (AutoregressiveGenerator, (5, ()), 0, 0.4),
    (AutoregressiveGenerator, (9, (4,)), 0, 0.4),  # fewer hidden units than values
    (GatedResidualGenerator, (6, 2, (8, 7)), 0, 0.5),
    (GatedResidualGenerator, (5, 1, (8, 7)), 0, 0.5),
    (GatedResidualGenerator, (4, 3, (8, 7)), 0, 0.5),
    (GatedResidualGenerator, (6, 3, (8, 7)), 2, 0.5),
    (ResidualGenerator, (6, 2, (8, 7)), 0, 0.5),
    (ResidualGenerator, (4, 4, (8, 7)), 0, 0.5),
    (ResidualGenerator, (5, 1, (8, 7)), 0, 0.5),
    (ResidualGenerator, (6, 3, (8, 7)), 2, 0.5),
]
pytestmark = [
    pytest.mark.parametrize("batch", [(), (5,), (4, 1, 3)], ids=str),
    pytest.mark.parametrize("make, args, context_dim, std", CASES),
]


def build(make, args, context_dim, std, batch):
    torch.manual_seed(0)
    generator = make(*args, context_dim=context_dim).double()
    for parameter in generator.parameters():
        torch.nn.init.normal_(parameter, std=std)
    noise = torch.randn(batch + (args[0],), dtype=torch.float64, requires_grad=True)
    context = torch.randn(batch + (context_dim,), dtype=torch.float64) if context_dim else None
    _, jacobian = batch_jacobian(lambda z: generator(z, context), noise)
    return generator, noise, context, jacobian


def test_jacobian(make, args, context_dim, std, batch):
    generator, noise, context, expected = build(make, args, context_dim, std, batch)
    linearisation = generator.linearise(noise, context)
    torch.testing.assert_close(linearisation.value, generator(noise, context))
    torch.testing.assert_close(linearisation.jacobian(), expected)


def test_slogdet(make, args, context_dim, std, batch):
    generator, noise, context, jacobian = build(make, args, context_dim, std, batch)
    sign, actual = generator.linearise(noise, context).slogdet()
    assert sign.shape == actual.shape == batch
    expected_sign, expected = torch.linalg.slogdet(jacobian)
    assert sign.equal(expected_sign)
    torch.testing.assert_close(actual, expected)

    leaves = [noise, *generator.parameters()]
    options = {"allow_unused": True, "materialize_grads": True}
    gradients = torch.autograd.grad(actual.square().sum(), leaves, **options)
    expected_gradients = torch.autograd.grad(expected.square().sum(), leaves, **options)
    torch.testing.assert_close(gradients, expected_gradients)


def test_solve_transposed(make, args, context_dim, std, batch):
    generator, noise, context, jacobian = build(make, args, context_dim, std, batch)
    vector = torch.randn_like(noise)
    expected = torch.linalg.solve(jacobian.mT, vector).detach()
    with torch.no_grad():
        solved = generator.linearise(noise, context).solve_transposed(vector)
    torch.testing.assert_close(solved, expected)
