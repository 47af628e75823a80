# SPDX-License-Identifier: Apache-2.0
"""A mixture of different distributions over vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import Categorical, Distribution, constraints

from pyro_implicit.distributions.implicit import IntractableDensityError

__all__ = ["Mixture"]


class Mixture(TorchDistribution):
    r"""The mixture :math:`\sum_k w_k q_k` of explicit or implicit distributions.

    Unlike in torch's ``MixtureSameFamily``, the components may be of different classes, and each
    draws only as often as it is selected. There is no ``rsample``: the selection has no gradient.

    **Example:**

    >>> import pyro.distributions as dist
    >>> parts = [dist.Normal(m, 1.0).expand([2]).to_event(1) for m in (-3.0, 3.0)]
    >>> q = Mixture(torch.tensor([0.2, 0.8]).log(), parts)
    >>> q.sample((5,)).shape, q.log_prob(torch.zeros(5, 2)).shape
    (torch.Size([5, 2]), torch.Size([5]))

    :param log_weights: ``(num_components,)``, up to a common constant; -inf for weight 0.
    :param components: each of ``event_shape`` (m,) and no batch shape.
    :param validate_args: whether torch checks parameters and values; None for torch's default.
    :raises ValueError: for weights that do not match the components.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.real_vector
    has_rsample = False

    def __init__(
        self,
        log_weights: Tensor,
        components: Sequence[Distribution],
        validate_args: bool | None = None,
    ) -> None:
        shapes = [(tuple(q.batch_shape), tuple(q.event_shape)) for q in components]
        if log_weights.shape != (len(shapes),) or not shapes:
            raise ValueError(
                f"log_weights has shape {tuple(log_weights.shape)} for {len(shapes)} components; "
                "give one number for each, and at least one component"
            )
        if any(batch or len(event) != 1 or event != shapes[0][1] for batch, event in shapes):
            raise ValueError(
                "the components of a mixture must be vectors of one size, without a batch shape, "
                f"but their (batch_shape, event_shape) are {shapes}; mix first, then expand"
            )
        if not log_weights.logsumexp(0).isfinite():
            raise ValueError(f"log_weights cannot be normalised: {log_weights.tolist()}")
        self.log_weights = log_weights.log_softmax(0)
        self.components = list(components)
        super().__init__(torch.Size(), torch.Size(shapes[0][1]), validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> Mixture:
        """Expand to an independent selection for each element of ``batch_shape``."""
        new = self._get_checked_instance(Mixture, _instance)
        new.log_weights = self.log_weights
        new.components = self.components
        TorchDistribution.__init__(
            new, torch.Size(batch_shape), self.event_shape, validate_args=False
        )
        new._validate_args = self._validate_args
        return new

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Draw, without a gradient.

        :returns: ``(*sample_shape, *batch_shape, *event_shape)``.
        """
        shape = self._extended_shape(sample_shape)
        choice = Categorical(logits=self.log_weights).sample((math.prod(shape[:-1]),))
        counts = choice.bincount(minlength=len(self.components)).tolist()
        draws = [
            q.sample(torch.Size((count,)))
            for q, count in zip(self.components, counts, strict=True)
            if count
        ]
        # The draws are sorted by component: restore the order of the selection.
        return torch.cat(draws)[choice.argsort(stable=True).argsort()].reshape(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density; a component that overflows far from its draws has density 0.

        :param value: ``(*sample_shape, *batch_shape, *event_shape)``.
        :returns: ``(*sample_shape, *batch_shape)``.
        :raises IntractableDensityError: naming the first component without a density.
        """
        if self._validate_args:
            self._validate_sample(value)
        parts = torch.stack([self._part(k, value) for k in range(len(self.components))], -1)
        is_nan = parts.isnan()
        parts = parts.masked_fill(is_nan & ~is_nan.all(-1, keepdim=True), -math.inf)
        log_prob = (parts + self.log_weights).logsumexp(-1)
        return log_prob.expand(torch.broadcast_shapes(log_prob.shape, self.batch_shape))

    def _part(self, index: int, value: Tensor) -> Tensor:
        try:
            return self.components[index].log_prob(value)
        except NotImplementedError as error:
            raise IntractableDensityError(
                f"component {index} of the mixture, {type(self.components[index]).__name__}, has "
                "no density at the draws of the others, so the mixture has none; it can only be "
                "sampled. Cure: components with a generator that has an inverse, as in "
                "AutoImplicit(model, AutoregressiveGenerator), or train each component separately"
            ) from error
