# SPDX-License-Identifier: Apache-2.0
"""An injective generator for funnels, skew and heavy tails, with an exact density."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from pyro.nn import MaskedLinear
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn.functional import linear

from pyro_implicit.generators.base import (
    ACTIVATIONS,
    Generator,
    Linearisation,
    bounded,
    check_layers,
)
from pyro_implicit.ops.policy import MAX_SKEW, MAX_TAIL, NEAR_ZERO, SETTLED
from pyro_implicit.ops.sinh_arcsinh import (
    sinh_arcsinh,
    sinh_arcsinh_inverse,
    sinh_arcsinh_log_derivative,
    sinh_arcsinh_slopes,
)

__all__ = ["AutoregressiveGenerator"]


class AutoregressiveGenerator(Generator):
    r"""Each value shifts, scales, skews and bends its own noise, depending on the preceding noise:

    .. math:: f_i(z) = m_i + e^{s_i} h(w_i; \epsilon_i, \delta_i), \qquad
        w_i = h(z_i; a_i, b_i), \qquad
        h(z; \epsilon, \delta) = \frac{\sinh(e^\delta \operatorname{arsinh} z + \epsilon)
        - \sinh \epsilon}{e^\delta \cosh \epsilon},

    where :math:`m_i, s_i, \epsilon_i, \delta_i` are functions of :math:`w_{<i}`: the outputs of one
    masked network, plus a linear map for m and s; a and b are constants. h is the sinh-arcsinh
    transformation (reference 1), shifted and scaled so that h(0) = 0 and h'(0) = 1: m is the median
    and :math:`e^s` the slope there for every shape, which speeds up training. :math:`\epsilon`
    skews, and :math:`\delta` makes the tails heavier (if positive) or lighter; h is the identity if
    both are 0. The soft bounds :math:`|\epsilon| < 3` and :math:`|\delta| < 1.5` keep draws finite
    in float32. The linear maps extend correlations and the scales of funnels into the tails.

    h is increasing, so f is injective for all weights, and the Jacobian is lower triangular,

    .. math:: \log |\det J_f(z)| = \sum_i \big( s_i + \log h'(w_i; \epsilon_i, \delta_i)
        + \log h'(z_i; a_i, b_i) \big).

    The distribution of each value given the preceding values is unimodal. Parents should therefore
    precede their children, as they do in an autoguide's latent vector. f is initially near the
    identity, with unit spread, plus a random linear map of the context.

    **Example:**

    >>> generator = AutoregressiveGenerator(output_dim=4)
    >>> noise = torch.randn(8, 4)
    >>> generator.linearise(noise).log_abs_det().shape
    torch.Size([8])
    >>> torch.allclose(generator.inverse(generator(noise)), noise, atol=1e-4)
    True

    :param output_dim: size of the value and of the noise.
    :param hidden: widths of the hidden layers, ``()`` for linear maps alone. With fewer than about
        twice ``output_dim`` units per layer, only the linear map of a late value may depend on the
        noise just before it.
    :param activation: "tanh", "elu", "relu" or "silu".
    :param context_dim: size of the context vector, on which all four functions depend; 0 for
        none.
    :raises ValueError: if a size is not positive or the activation is unknown.

    **References:**

    1. Jones and Pewsey (2009), *Sinh-arcsinh distributions*, Biometrika 96, section 2.
    2. Germain, Gregor, Murray and Larochelle (2015), *MADE: Masked Autoencoder for Distribution
       Estimation*, section 3 (the masks).
    """

    injective = True

    def __init__(
        self,
        output_dim: int,
        hidden: Sequence[int] = (64, 64),
        activation: str = "silu",
        context_dim: int = 0,
    ) -> None:
        super().__init__(output_dim, output_dim, context_dim)
        check_layers(hidden, activation)
        self.activation = activation
        if output_dim == 1 and context_dim == 0:
            hidden = ()  # nothing to depend on: constants remain, the last layer's biases

        # An edge may lead to a unit of degree k from inputs 1 to k alone; the context has degree 0.
        inputs = torch.cat([torch.arange(1, output_dim + 1), torch.zeros(context_dim)])
        outputs = torch.arange(output_dim)
        degrees = [inputs, *(_hidden_degrees(output_dim, width, context_dim) for width in hidden)]
        layers = [_masked(b[:, None] >= a) for a, b in itertools.pairwise(degrees)]
        last = _masked(outputs.repeat(4)[:, None] >= degrees[-1])
        skip = _masked(outputs.repeat(2)[:, None] >= inputs, bias=False)
        with torch.no_grad():
            last.weight.mul_(NEAR_ZERO)
            last.bias.zero_()
            # The medians depend on the context from the start: otherwise an encoder's features have
            # hardly any gradient.
            skip.weight[:, :output_dim] = 0.0
            skip.weight[output_dim:] = 0.0
        self.layers = cast(Sequence[MaskedLinear], nn.ModuleList([*layers, last]))
        self.skip = skip
        self.noise_skew = nn.Parameter(torch.zeros(output_dim))
        self.noise_tail = nn.Parameter(torch.zeros(output_dim))

    def linearise(self, noise: Tensor, context: Tensor | None = None) -> Linearisation:
        return _TriangularLinearisation(self, noise, context)

    def inverse(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the noise of a value by ``output_dim`` passes of the network, differentiably.

        Without derivatives, as in ``torch.no_grad``, the passes end when the noise no longer
        changes.

        :param value: ``(*batch, output_dim)``.
        :param context: ``(*batch, context_dim)``, or None.
        :returns: ``(*batch, noise_dim)``.
        :raises ValueError: if the value or the context has the wrong size.
        """
        if value.dim() == 0 or value.shape[-1] != self.output_dim:
            raise ValueError(
                f"{type(self).__name__} inverts values of shape (*batch, {self.output_dim}), but "
                f"got {tuple(value.shape)}. Cure: values as the generator returns them"
            )
        bent = torch.zeros_like(value)
        for i in range(self.output_dim):
            p = self._pass(self._join(bent, context))[1]
            shape = (value - p.shift) / p.log_scale.exp()
            found = sinh_arcsinh_inverse(shape, p.skew, p.tail)
            # Exact up to coordinate i, whose parameters depend on earlier ones alone. Near the
            # identity the others are soon exact, too, but not their derivatives.
            if torch.is_grad_enabled() or unpack_dual(found).tangent is not None:
                bent = nn.functional.pad(found[..., : i + 1], (0, self.output_dim - i - 1))
            elif _is_settled(found, bent):
                break
            else:
                bent = found.nan_to_num(0.0, 0.0, 0.0)  # 0 * inf, behind a mask, would be NaN
        return sinh_arcsinh_inverse(found, *self._noise_shape())

    def _noise_shape(self) -> tuple[Tensor, Tensor]:
        return bounded(self.noise_skew, MAX_SKEW), bounded(self.noise_tail, MAX_TAIL)

    def _pass(self, inputs: Tensor) -> tuple[list[tuple[Tensor, Tensor, Tensor]], _Parameters]:
        activation = ACTIVATIONS[self.activation].function
        hidden, x = [], inputs
        for layer in self.layers[:-1]:
            weight = layer.weight * layer.mask
            argument = linear(x, weight, layer.bias)
            x = activation(argument)
            hidden.append((weight, argument, x))
        shift, log_scale, skew, tail = self.layers[-1](x).chunk(4, -1)
        linear_shift, linear_scale = self.skip(inputs).chunk(2, -1)
        return hidden, _Parameters(
            shift + linear_shift,
            log_scale + linear_scale,
            bounded(skew, MAX_SKEW),
            bounded(tail, MAX_TAIL),
        )


class _TriangularLinearisation(Linearisation):
    def __init__(
        self, generator: AutoregressiveGenerator, noise: Tensor, context: Tensor | None
    ) -> None:
        self._generator, self._noise = generator, noise
        generator._check_inputs(noise, context)
        self._noise_shape = generator._noise_shape()
        self._bent = sinh_arcsinh(noise, *self._noise_shape)
        self._inputs = generator._join(self._bent, context)
        self._hidden, self._parameters = generator._pass(self._inputs)
        p = self._parameters
        self._scale, self._shape = p.log_scale.exp(), sinh_arcsinh(self._bent, p.skew, p.tail)
        self.value = p.shift + self._scale * self._shape

    def slogdet(self) -> tuple[Tensor, Tensor]:
        p = self._parameters
        log_slope = sinh_arcsinh_log_derivative(self._bent, p.skew, p.tail)
        noise_slope = sinh_arcsinh_log_derivative(self._noise, *self._noise_shape)
        log_det = (p.log_scale + log_slope + noise_slope).sum(-1)
        return torch.ones_like(log_det), log_det

    def jacobian(self) -> Tensor:
        generator, p = self._generator, self._parameters
        noise_slope = sinh_arcsinh_slopes(self._noise, *self._noise_shape)[0]
        last, derivative = generator.layers[-1], ACTIVATIONS[generator.activation].derivative
        like = self._inputs
        # Transposed, as in MLP.
        tangent = torch.eye(
            generator.noise_dim, like.shape[-1], dtype=like.dtype, device=like.device
        )
        for weight, argument, value in self._hidden:
            tangent = (tangent @ weight.mT) * derivative(argument, value).unsqueeze(-2)
        slope, skew_slope, tail_slope = sinh_arcsinh_slopes(self._bent, p.skew, p.tail)
        # Combine the four functions before the tangents: one matrix product instead of four.
        factors = torch.stack(
            [
                torch.ones_like(self._scale),
                self._scale * self._shape,
                self._scale * skew_slope * (1 - (p.skew / MAX_SKEW).square()),
                self._scale * tail_slope * (1 - (p.tail / MAX_TAIL).square()),
            ],
            -2,
        )
        weight = (last.weight * last.mask).unflatten(0, (4, -1))
        skip = (generator.skip.weight * generator.skip.mask)[:, : generator.noise_dim]
        skip = skip.unflatten(0, (2, -1))
        rows = torch.einsum("...pi,pih->...ih", factors, weight)
        jacobian = rows @ tangent.mT + torch.einsum("...pi,pij->...ij", factors[..., :2, :], skip)
        return (jacobian + (self._scale * slope).diag_embed()) * noise_slope.unsqueeze(-2)

    @torch.no_grad()
    def solve_transposed(self, vector: Tensor) -> Tensor:
        upper, column = self.jacobian().mT, vector.unsqueeze(-1)
        return torch.linalg.solve_triangular(upper, column, upper=True).squeeze(-1)


class _Parameters(NamedTuple):
    """m, s, epsilon and delta, each ``(*batch, output_dim)``."""

    shift: Tensor
    log_scale: Tensor
    skew: Tensor
    tail: Tensor


def _is_settled(found: Tensor, before: Tensor) -> bool:
    """Return whether all noise that is finite differs by rounding alone."""
    most = SETTLED * torch.finfo(found.dtype).eps * (1 + before.abs())
    try:
        return bool((~((found - before).abs() > most) | ~found.isfinite()).all())
    except RuntimeError:  # of torch.func.vmap, where it is unknown
        return False


def _hidden_degrees(output_dim: int, width: int, context_dim: int) -> Tensor:
    lowest = 0 if context_dim else 1
    # Squared, for more low degrees: otherwise the network of the second value, often a
    # hyperparameter, would have two or three units.
    return (lowest + (output_dim - 1 - lowest) * torch.linspace(0, 1, width).square()).round()


def _masked(mask: Tensor, bias: bool = True) -> MaskedLinear:
    """Make a layer whose initial spread does not depend on the number of masked inputs."""
    layer = MaskedLinear(mask.shape[1], mask.shape[0], mask.to(torch.get_default_dtype()), bias)
    with torch.no_grad():
        seen = mask.sum(-1).clamp(min=1)
        layer.weight.mul_((mask.shape[1] / seen).sqrt().unsqueeze(-1))
    return layer
