# SPDX-License-Identifier: Apache-2.0
"""A generator around the noise of a draw: value, Jacobian and log-determinant in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from pyro_implicit.ops.functional_gradient import InverseTransposed
from pyro_implicit.ops.jacobian import batch_jacobian

__all__ = ["Differentiable", "FunctionGenerator", "Linearisation", "as_generator"]


class Linearisation:
    r"""The value of a generator f at some noise and what is known about its Jacobian :math:`J_f`.

    The Jacobian is dense here. Generators that know theirs better return a subclass, which takes
    what it needs from the pass that made the value. All but :meth:`solve_transposed` and
    :meth:`inverse_transposed` are differentiable.

    :ivar value: ``(*batch, m)``.
    """

    value: Tensor

    def jacobian(self) -> Tensor:
        """:returns: :math:`J_f`, ``(*batch, m, d)``."""
        raise NotImplementedError(
            f"{type(self).__name__} knows no dense Jacobian. Cure: a method jacobian() -> "
            "(*batch, m, d), or all of log_abs_det, solve_transposed and inverse_transposed"
        )

    def log_abs_det(self) -> Tensor:
        r""":returns: :math:`\log |\det J_f|` of as many noises as values, ``(*batch)``."""
        return torch.linalg.slogdet(self.jacobian()).logabsdet

    @torch.no_grad()
    def solve_transposed(self, vector: Tensor) -> Tensor:
        r"""Turns the gradient of a function of the noise into that of a function of the value.

        :param vector: v, ``(*batch, m)``.
        :returns: :math:`J_f^{-\top} v`, ``(*batch, m)``, a constant.
        """
        return torch.linalg.solve(self.jacobian().mT, vector)

    @torch.no_grad()
    def inverse_transposed(self) -> InverseTransposed:
        r""":returns: :math:`J_f^{-\top}`, a constant."""
        jacobian = self.jacobian()
        return InverseTransposed(torch.linalg.inv(jacobian).mT, jacobian.new_empty(0))


class _Dense(Linearisation):
    def __init__(self, function: Callable[[Tensor], Tensor], noise: Tensor) -> None:
        self.value, self._jacobian = batch_jacobian(function, noise)

    def jacobian(self) -> Tensor:
        return self._jacobian


class Differentiable:
    """What every generator can do with its Jacobian: the base of all, foreign functions too.

    :cvar injective: whether no two noises have the same value, by construction or, as of
        :class:`~pyro_implicit.ResidualGenerator`, near its start: then the density is exact.
    """

    injective: ClassVar[bool] = False

    if TYPE_CHECKING:  # a method here would hide PyroModule's in a guide

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
        """Value and Jacobian in one pass, here by forward mode.

        :param noise: ``(*batch, d)``.
        :param context: ``(*batch, context_dim)``, or None.
        """
        rest = () if context is None else (context,)
        return _Dense(lambda z: self(z, *rest).reshape(z.shape[:-1] + (-1,)), noise)

    def inverse(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        """The noise of a value.

        :param value: ``(*batch, m)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: ``(*batch, d)``.
        :raises NotImplementedError: where it is not known.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no inverse, so its density is known only at its own "
            "draws. Cure: AutoImplicit(model, AutoregressiveGenerator)"
        )


class FunctionGenerator(Differentiable):
    """Any function of noise, or of noise and context, with the Jacobian that torch finds.

    **Example:**

    >>> FunctionGenerator(torch.exp).linearise(torch.ones(4, 2)).log_abs_det()
    tensor([2., 2., 2., 2.])

    :param function: from ``(*batch, d)`` to ``(*batch, *event_shape)``, each row on its own.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)


def as_generator(function: Callable[..., Tensor] | Differentiable) -> Differentiable:
    """The generator itself, or a function made one.

    **Example:**

    >>> as_generator(torch.exp).linearise(torch.zeros(4, 2)).jacobian().shape
    torch.Size([4, 2, 2])

    :param function: from ``(*batch, d)`` to ``(*batch, *event_shape)``, each row on its own.
    """
    return function if isinstance(function, Differentiable) else FunctionGenerator(function)
