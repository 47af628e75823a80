# SPDX-License-Identifier: Apache-2.0
"""Implicit distributions with a little Gaussian noise on the generator's output."""

from __future__ import annotations

from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_implicit.distributions.implicit import Generator, Implicit

__all__ = ["SemiImplicit"]


class SemiImplicit(Implicit):
    r"""The distribution of :math:`\theta = g(z) + s \odot \eta`, :math:`\eta \sim N(0, I)`.

    The conditional :math:`q(\theta | z) = N(g(z), \mathrm{diag}(s^2))` is explicit
    (:meth:`conditional`), the marginal over the noise :math:`z` is not.

    **Example:**

    >>> from pyro_implicit import MLP
    >>> q = SemiImplicit(MLP(noise_dim=4, output_dim=3), 4, scale=0.05)
    >>> draw = q.draw((7,))
    >>> q.conditional(draw.noise).log_prob(draw.value).shape
    torch.Size([7])

    :param generator: see :class:`~pyro_implicit.distributions.Implicit`.
    :param noise: the size of standard normal noise, or a distribution with ``event_dim`` 1.
    :param scale: standard deviation :math:`s` of the conditional, in the units of the value: a
        positive number, or a tensor that broadcasts to ``(*batch_shape, *event_shape)``.
    :param context: see :class:`~pyro_implicit.distributions.Implicit`.
    :param validate_args: whether torch checks scale and values; None for torch's default.
    :raises ValueError: if the scale is not positive or does not broadcast.

    **References:**

    1. Yin and Zhou (2018), *Semi-Implicit Variational Inference*.
    """

    trained_by: ClassVar[list[str]] = []

    def __init__(
        self,
        generator: Generator,
        noise: int | dist.TorchDistribution,
        scale: float | Tensor,
        context: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(generator, noise, context, validate_args=validate_args)
        self.scale = torch.as_tensor(scale, dtype=self._like.dtype, device=self._like.device)
        if self._validate_args and not (self.scale > 0).all():
            raise ValueError(f"the scale of {type(self).__name__} must be positive, got {scale}")
        shape = self.batch_shape + self.event_shape
        if self.scale.dim() and not _broadcasts(self.scale.shape, shape):
            raise ValueError(
                f"the scale of {type(self).__name__} has shape {tuple(self.scale.shape)}, which "
                f"does not broadcast to the values' shape {tuple(shape)}; give the noise that "
                "batch shape too: noise=dist.Normal(...).expand([...]).to_event(1)"
            )

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> SemiImplicit:
        """The same distribution with independent noise for each element of ``batch_shape``."""
        new = self._get_checked_instance(SemiImplicit, _instance)
        new.scale = self.scale
        return super().expand(batch_shape, _instance=new)

    def _around(self, value: Tensor) -> Tensor:
        return value + self.scale * torch.randn_like(value)

    def conditional(self, noise: Tensor) -> dist.TorchDistribution:
        """The explicit :math:`q(\\theta | z)`.

        :param noise: ``(*sample_shape, *batch_shape, noise_dim)``.
        :returns: an independent normal distribution of batch shape ``noise.shape[:-1]``.
        """
        return dist.Normal(self.generate(noise), self.scale).to_event(len(self.event_shape))


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    sizes = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(a in (1, b) for a, b in sizes)
