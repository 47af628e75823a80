# SPDX-License-Identifier: Apache-2.0
"""The logarithm of einsum, with its gradient, where sums are empty and where they underflow."""

from __future__ import annotations

import math

import pytest
import torch
from opt_einsum import contract

from pyro_implicit.ops.log_space import einsum

BACKEND = "pyro_implicit.ops.log_space"


@pytest.mark.parametrize("equation", ["ij,jk->ik", "ij,jk,k->", "bi,bij->jb", "i,j->ji", "ij->j"])
def test_values_and_gradients(equation):
    shapes = {"i": 2, "j": 3, "k": 4, "b": 5}
    operands = [
        torch.randn([shapes[s] for s in symbols], dtype=torch.float64, requires_grad=True)
        for symbols in equation.split("->")[0].split(",")
    ]
    expected = torch.einsum(equation, *(operand.exp() for operand in operands)).log()
    for found in (einsum(equation, *operands), contract(equation, *operands, backend=BACKEND)):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found.sin().sum(), operands),
            torch.autograd.grad(expected.sin().sum(), operands, retain_graph=True),
        )


def test_impossible_terms_have_no_gradient():
    a = torch.tensor([[-math.inf, -math.inf], [0.3, -math.inf]], requires_grad=True)
    found = einsum("ij->i", a)
    assert found.tolist() == [-math.inf, pytest.approx(0.3)]
    total = einsum("i->", found)
    (gradient,) = torch.autograd.grad(total, a)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
