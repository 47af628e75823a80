# SPDX-License-Identifier: Apache-2.0
"""The interface of generators: value, Jacobian and log-determinant from one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from pyro_implicit.ops.jacobian import batch_jacobian
from pyro_implicit.ops.kernels import InverseTransposed
from pyro_implicit.runtime.messages import refuse_counts

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Differentiable",
    "FunctionGenerator",
    "Generator",
    "Linearisation",
    "as_generator",
    "has_inverse",
    "noise_of",
]


class Linearisation:
    r"""The value of a generator f at some noise, and its Jacobian :math:`J_f` there.

    The Jacobian is dense here. Generators with a structured Jacobian return a subclass that reuses
    the pass that computed the value. All methods but :meth:`solve_transposed` and
    :meth:`inverse_transposed` are differentiable.

    :ivar value: ``(*batch, m)``.
    """

    value: Tensor

    def jacobian(self) -> Tensor:
        """:returns: :math:`J_f`, ``(*batch, m, d)``."""
        raise NotImplementedError(
            f"{type(self).__name__} has no dense Jacobian. Cure: a method jacobian() -> "
            "(*batch, m, d), or all of slogdet, solve_transposed and inverse_transposed"
        )

    def slogdet(self) -> tuple[Tensor, Tensor]:
        r""":returns: the sign of :math:`\det J_f` and :math:`\log |\det J_f|`, for m = d,
        ``(*batch)`` each."""
        sign, log_abs_det = torch.linalg.slogdet(self.jacobian())
        return sign, log_abs_det

    def log_abs_det(self) -> Tensor:
        r""":returns: :math:`\log |\det J_f|` for m = d, ``(*batch)``."""
        return self.slogdet()[1]

    @torch.no_grad()
    def solve_transposed(self, vector: Tensor) -> Tensor:
        r"""Turn a function's gradient with respect to the noise into that with respect to the
        value.

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
    """The base of all generators, including functions that are not modules.

    :cvar injective: whether no two noises have the same value, by construction or (for
        :class:`~pyro_implicit.ResidualGenerator`) near its initial value. The density is then
        exact.
    """

    injective: ClassVar[bool] = False

    if TYPE_CHECKING:  # a method here would hide PyroModule's in a guide

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
        """Compute values and their Jacobian in one pass, by forward mode.

        :param noise: ``(*batch, d)``.
        :param context: ``(*batch, context_dim)``, or None.
        """
        rest = () if context is None else (context,)
        return _Dense(lambda z: self(z, *rest).reshape(z.shape[:-1] + (-1,)), noise)

    def inverse(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the noise of a value.

        :param value: ``(*batch, m)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: ``(*batch, d)``.
        :raises NotImplementedError: if the generator has no inverse.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no inverse, so its density is known only at its own "
            "draws. Cure: AutoImplicit(model, AutoregressiveGenerator)"
        )


class FunctionGenerator(Differentiable):
    """A function of noise, or of noise and context, with the Jacobian by torch's forward mode.

    **Example:**

    >>> FunctionGenerator(torch.exp).linearise(torch.ones(4, 2)).log_abs_det().round(decimals=3)
    tensor([2., 2., 2., 2.])

    :param function: function from ``(*batch, d)`` to ``(*batch, *event_shape)``, each row
        independently.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)


def as_generator(function: Callable[..., Tensor] | Differentiable) -> Differentiable:
    """Return a generator unchanged, and wrap any other function as :class:`FunctionGenerator`.

    **Example:**

    >>> as_generator(torch.exp).linearise(torch.zeros(4, 2)).jacobian().shape
    torch.Size([4, 2, 2])

    :param function: function from ``(*batch, d)`` to ``(*batch, *event_shape)``, each row
        independently.
    """
    return function if isinstance(function, Differentiable) else FunctionGenerator(function)


def has_inverse(generator: Differentiable) -> bool:
    """Return whether a generator has an ``inverse``.

    **Example:**

    >>> has_inverse(as_generator(torch.exp))
    False

    :param generator: any generator.
    """
    return type(generator).inverse is not Differentiable.inverse


def noise_of(generator: Differentiable, value: Tensor, context: Tensor | None = None) -> Tensor:
    """Return the noise of a value by ``inverse``; infinite, of density 0, if the value overflows.

    **Example:**

    >>> from pyro_implicit.generators import AutoregressiveGenerator
    >>> noise_of(AutoregressiveGenerator(2), torch.tensor([torch.inf, 0.0])).detach()
    tensor([inf, inf])

    :param generator: a generator with an ``inverse``.
    :param value: ``(*batch, m)``.
    :param context: ``(*batch, context_dim)``, or None.
    :returns: ``(*batch, d)``.
    """
    noise = generator.inverse(value, context)
    return noise.masked_fill(noise.isnan(), math.inf)


class Activation(NamedTuple):
    """An elementwise function, and its derivative given the argument and the function's value."""

    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor, Tensor], Tensor]


def _tanh_derivative(x: Tensor, value: Tensor) -> Tensor:
    return 1 - value * value


def _elu_derivative(x: Tensor, value: Tensor) -> Tensor:
    return 1 + value.clamp(max=0)


def _relu_derivative(x: Tensor, value: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def _silu_derivative(x: Tensor, value: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gate + value * (1 - gate)


#: Activations by name.
ACTIVATIONS = {
    "tanh": Activation(torch.tanh, _tanh_derivative),
    "elu": Activation(torch.nn.functional.elu, _elu_derivative),
    "relu": Activation(torch.relu, _relu_derivative),
    "silu": Activation(torch.nn.functional.silu, _silu_derivative),
}


class Generator(Differentiable, nn.Module):
    """A network from noise, and optionally a context, to a value.

    Guides accept any :class:`torch.nn.Module` called as ``generator(noise, context)``. This base
    class stores the sizes and refuses inputs of the wrong size. A subclass overrides ``forward``
    or, if it has a closed form for its Jacobian, :meth:`linearise`; an injective one sets
    ``injective``.

    **Example:**

    >>> class Scaled(Generator):
    ...     injective = True
    ...     def forward(self, noise, context=None):
    ...         return 2 * noise
    >>> Scaled(3, 3).linearise(torch.zeros(5, 3)).jacobian().shape
    torch.Size([5, 3, 3])

    :param noise_dim: size of the noise vector.
    :param output_dim: size of the value.
    :param context_dim: size of the context vector; 0 for none.
    :raises ValueError: if a size is not positive (a context of size 0 means no context).
    """

    def __init__(self, noise_dim: int, output_dim: int, context_dim: int = 0) -> None:
        super().__init__()
        refuse_counts(noise_dim=noise_dim, output_dim=output_dim)
        if context_dim < 0:
            raise ValueError(f"context_dim is {context_dim}. Cure: a size, or 0 for no context")
        self.noise_dim = noise_dim
        self.output_dim = output_dim
        self.context_dim = context_dim

    @property
    def core_dim(self) -> int:
        """Number of leading noise coordinates that the Jacobian depends on."""
        return self.noise_dim

    if TYPE_CHECKING:
        __call__ = nn.Module.__call__

    def forward(self, noise: Tensor, context: Tensor | None = None) -> Tensor:
        """Turn noise into values.

        :param noise: ``(*batch, noise_dim)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: ``(*batch, output_dim)``.
        :raises ValueError: if the noise or the context has the wrong size.
        """
        return self.linearise(noise, context).value

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
        """Compute values and their derivative in the noise in one pass.

        :param noise: ``(*batch, noise_dim)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: the value and the exact derivative.
        :raises ValueError: if the noise or the context has the wrong size.
        """
        self._check_inputs(noise, context)
        return super().linearise(noise, context)

    def extra_repr(self) -> str:
        sizes = f"noise_dim={self.noise_dim}, output_dim={self.output_dim}"
        return sizes + (f", context_dim={self.context_dim}" if self.context_dim else "")

    def _check_inputs(self, noise: Tensor, context: Tensor | None) -> None:
        name = type(self).__name__
        if noise.dim() == 0 or noise.shape[-1] != self.noise_dim:
            raise ValueError(
                f"{name} expects noise of shape (*batch, {self.noise_dim}), "
                f"but got {tuple(noise.shape)}. Cure: draw noise of the generator's noise_dim"
            )
        if self.context_dim == 0:
            if context is not None:
                raise ValueError(
                    f"{name} was built without a context but got one of shape "
                    f"{tuple(context.shape)}. Cure: build it with context_dim={context.shape[-1]}"
                )
        elif context is None:
            raise ValueError(
                f"{name} was built with context_dim={self.context_dim} but got no context. "
                "Cure: pass context=..., or build the generator with context_dim=0"
            )
        elif context.dim() == 0 or context.shape[-1] != self.context_dim:
            raise ValueError(
                f"{name} expects a context of shape (*batch, {self.context_dim}), "
                f"but got {tuple(context.shape)}. Cure: a generator with that context_dim"
            )

    def _join(self, noise: Tensor, context: Tensor | None) -> Tensor:
        self._check_inputs(noise, context)
        return joined(noise, context)


def joined(noise: Tensor, context: Tensor | None) -> Tensor:
    """Concatenate noise and context, with broadcast batch shapes."""
    if context is None:
        return noise
    batch = torch.broadcast_shapes(noise.shape[:-1], context.shape[:-1])
    return torch.cat([noise.expand(batch + (-1,)), context.expand(batch + (-1,))], dim=-1)


def bounded(x: Tensor, bound: float) -> Tensor:
    """Return x near 0, and never more than the bound; the slope is ``1 - (result / bound)**2``."""
    return bound * (x / bound).tanh()


def check_layers(hidden: Sequence[int], activation: str) -> None:
    """Refuse widths below one and unknown activations."""
    for width in hidden:
        refuse_counts(hidden=width)
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be one of {', '.join(ACTIVATIONS)}, but got {activation!r}"
        )
