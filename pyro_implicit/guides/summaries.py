# SPDX-License-Identifier: Apache-2.0
"""Medians and quantiles of guides that are known by their draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.ops.stats import quantile
from torch import Tensor
from torch.distributions import IndependentTransform, Transform, biject_to

from pyro_implicit.runtime.random_stream import seeded

__all__ = ["DrawSummaries"]


class DrawSummaries:
    """``median`` and ``quantiles`` of a guide that is a module and has ``sample_posterior``.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoGuide
    >>> class Prior(DrawSummaries, AutoGuide):
    ...     def forward(self):
    ...         self._setup_prototype()
    ...     def sample_posterior(self, num_samples):
    ...         return {"x": self.prototype_trace.nodes["x"]["fn"].sample((num_samples,))}
    >>> guide = Prior(lambda: pyro.sample("x", dist.Exponential(1.0)))
    >>> print(f"{guide.median(num_samples=10_000)['x']:.1f}")  # log 2
    0.7
    """

    prototype_trace: Any
    sample_posterior: Callable[..., dict[str, Tensor]]

    @torch.no_grad()
    def quantiles(
        self, quantiles: list[float] | Tensor, *args: Any, num_samples: int = 1000, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Posterior quantiles of each latent, estimated from draws.

        They are those of the unconstrained latents, as in Pyro's autoguides, so that for instance
        simplices stay simplices; below an upper bound, where the unconstrained latents run the
        other way, they still rise. The same guide gives the same values each time: the draws are
        of a random stream of their own.

        :param quantiles: numbers between 0 and 1.
        :param args: the model's arguments, as ``kwargs``, if the guide reads them or was never
            called.
        :param num_samples: number of draws; a median is wrong by 1.25 standard deviations over
            their square root.
        :returns: constrained values by site, ``(len(quantiles), *site_shape)``.
        :raises ValueError: for other numbers.
        """
        transforms = self._transforms(args, kwargs)
        with seeded(0, self._device()):
            draws = self._unconstrained(num_samples, transforms, args, kwargs)
        like = next(iter(draws.values()))
        levels = torch.as_tensor(quantiles, dtype=like.dtype, device=like.device).reshape(-1)
        if not ((levels >= 0) & (levels <= 1)).all():
            raise ValueError(f"quantiles must be numbers between 0 and 1, but got {quantiles}")
        found = {}
        for name, values in draws.items():
            transform = transforms[name]
            rising = 1 - levels if _falls(transform) else levels
            found[name] = transform(quantile(values, rising.to(values.dtype), dim=0))
        return found

    def median(self, *args: Any, num_samples: int = 1000, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior medians of each latent, as :meth:`quantiles` gives them.

        :param args: the model's arguments, as ``kwargs``, if the guide reads them or was never
            called.
        :param num_samples: number of draws.
        :returns: constrained values by site, ``site_shape``.
        """
        quantiles = self.quantiles([0.5], *args, num_samples=num_samples, **kwargs)
        return {name: value.squeeze(0) for name, value in quantiles.items()}

    def _transforms(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Transform]:
        """To the support of each latent; the guide is called, if it never was."""
        if self.prototype_trace is None:
            with torch.no_grad(), poutine.block():
                self(*args, **kwargs)  # type: ignore[operator]
        sites = self.prototype_trace.iter_stochastic_nodes()
        return {name: biject_to(site["fn"].support) for name, site in sites}

    def _unconstrained(
        self,
        num_samples: int,
        transforms: Mapping[str, Transform],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> dict[str, Tensor]:
        """Draws by site, ``(num_samples, *unconstrained_shape)``."""
        draws = self.sample_posterior(num_samples, *args, **kwargs)
        return {name: transforms[name].inv(value) for name, value in draws.items()}

    def _device(self) -> torch.device:
        parameter = next(self.parameters(), None)  # type: ignore[attr-defined]
        return torch.device("cpu") if parameter is None else parameter.device


def _falls(transform: Transform) -> bool:
    """Whether each element falls with its unconstrained one, as below an upper bound."""
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    try:
        return bool((torch.as_tensor(transform.sign) < 0).all())
    except NotImplementedError:  # not monotone
        return False
