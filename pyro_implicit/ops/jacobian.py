# SPDX-License-Identifier: Apache-2.0
"""Jacobians of functions that treat the rows of a batch independently."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jvp, vjp, vmap

__all__ = ["batch_jacobian", "forward_product", "jacobian_products"]

Function = Callable[[Tensor], Tensor]


def batch_jacobian(function: Function, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the value and the dense Jacobian of each row, by forward mode for all rows at once.

    Works under ``torch.no_grad`` and is differentiable by reverse mode.

    **Example:**

    >>> value, jacobian = batch_jacobian(torch.sin, torch.zeros(2, 3))
    >>> torch.allclose(jacobian[0], torch.eye(3))
    True

    :param function: from ``(*batch, d)`` to ``(*batch, m)``, each row independently.
    :param inputs: ``(*batch, d)``.
    :returns: the value ``(*batch, m)`` and its Jacobian ``(*batch, m, d)``.
    """

    def push(direction: Tensor) -> tuple[Tensor, Tensor]:
        return forward_product(function, inputs, direction.expand_as(inputs))

    basis = torch.eye(inputs.shape[-1], dtype=inputs.dtype, device=inputs.device)
    # For a random function (dropout), this is the Jacobian of one outcome.
    values, columns = vmap(push, out_dims=(0, 0), randomness="same")(basis)
    return values[0], columns.movedim(0, -1)


def jacobian_products(function: Function, inputs: Tensor) -> tuple[Function, Function]:
    """Return products with each row's Jacobian :math:`J`, which is never stored.

    **Example:**

    >>> times, transposed_times = jacobian_products(torch.sin, torch.zeros(2, 3))
    >>> torch.allclose(times(torch.ones(2, 3)), torch.ones(2, 3))
    True

    :param function: from ``(*batch, d)`` to ``(*batch, m)``, each row independently.
    :param inputs: ``(*batch, d)``.
    :returns: ``v -> J v``, from ``(*batch, d)`` to ``(*batch, m)``, and ``u -> J^T u`` back.
    """
    value, pull = vjp(function, inputs)[:2]

    @functools.cache  # for all vectors, once as a constant and once differentiable
    def push(differentiable: bool) -> Callable[[Tensor], tuple[Tensor]]:
        # The pullback is linear, and its own pullback is the product. Forward mode would evaluate
        # the function again for each vector.
        return vjp(lambda u: pull(u)[0], torch.zeros_like(value))[1]

    return lambda v: push(torch.is_grad_enabled())(v)[0], lambda u: pull(u)[0]


def forward_product(function: Function, inputs: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the value and the derivative in one direction, by forward mode.

    **Example:**

    >>> forward_product(torch.sin, torch.zeros(2), torch.tensor([1.0, 2.0]))
    (tensor([0., 0.]), tensor([1., 2.]))

    :param direction: of the inputs' shape.
    """
    _prepare_forward_mode()
    output = jvp(function, (inputs,), (direction,))
    return output[0], output[1]


@functools.cache
def _prepare_forward_mode() -> None:
    """Trigger torch's own scripting on first use, which warns from torch 2.15 on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
