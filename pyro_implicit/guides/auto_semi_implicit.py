# SPDX-License-Identifier: Apache-2.0
"""The automatic semi-implicit guide over all latents of a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, Literal

import torch
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_implicit.distributions import SemiImplicit
from pyro_implicit.guides.affine_frame import Frame
from pyro_implicit.guides.auto_implicit import AutoImplicit

__all__ = ["AutoSemiImplicit"]


class AutoSemiImplicit(AutoImplicit):
    r"""A neural sampler over all latents of a model, with a little noise of its own on each.

    In unconstrained space the latent vector is
    :math:`\theta = m + L (\mu + D \odot (g(z) + \rho \eta))`, with standard normal z and
    :math:`\eta`: the conditional noise scales with each coordinate of the frame.
    Train it by :class:`~pyro_implicit.infer.LIVI_ELBO` or another ELBO for semi-implicit sites.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import LIVI_ELBO
    >>> def model(y=torch.tensor(1.0)):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> guide = AutoSemiImplicit(model)
    >>> svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.01}), LIVI_ELBO(num_particles=8))
    >>> losses = [svi.step() for _ in range(3)]
    >>> guide.median()["x"].shape
    torch.Size([])

    :param noise_scale: :math:`\rho`, relative to the frame: a fixed positive number, or ``"learn"``
        for one learnable number per coordinate that starts at 0.02. SIVI wants it wide, about 0.5.
        With fewer noise dimensions than latents a learnt one may grow until the guide is all but
        mean-field, and a network underfits as under mean field.

    All other parameters are those of :class:`AutoImplicit`.

    :raises ValueError: for a bad ``noise_scale``, and as :class:`AutoImplicit`.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        generator: nn.Module | Callable[[int], nn.Module] | None = None,
        noise_dim: int | None = None,
        init_loc_fn: Callable[[dict[str, Any]], Tensor] | None = None,
        init_scale: float | None = None,
        frame: AutoGuide | Frame | Literal["auto", "mode"] | None = "auto",
        create_plates: Callable[..., Any] | None = None,
        noise_scale: float | Literal["learn"] = 0.02,
    ) -> None:
        if noise_scale != "learn":
            is_number = isinstance(noise_scale, Real) and not isinstance(noise_scale, bool)
            if not (is_number and 0 < noise_scale < math.inf):
                raise ValueError(
                    f'noise_scale must be a positive number or "learn", but got {noise_scale!r}'
                )
            noise_scale = float(noise_scale)
        super().__init__(model, generator, noise_dim, init_loc_fn, init_scale, frame, create_plates)
        self._init_noise_scale = noise_scale

    def _make_parameters(self, *args: Any, **kwargs: Any) -> None:
        super()._make_parameters(*args, **kwargs)
        if self._init_noise_scale == "learn":
            scale = torch.full_like(self.loc, 0.02)
            self.noise_scale = PyroParam(scale, constraints.positive)
        else:
            self.noise_scale = self._init_noise_scale

    def _implicit(self) -> SemiImplicit:
        return SemiImplicit(self._registered_generator(), self._noise(), self.noise_scale)
