# SPDX-License-Identifier: Apache-2.0
"""Pyro's normalising flows over all latents, with the initial values of the other baselines.

Pyro's own ``AutoIAFNormal`` starts from a standard normal at 0, far from most posteriors in their
units. Here the flow works in a diagonal affine frame with learnt location and scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyro.distributions.transforms as transforms
import torch
from pyro.distributions.torch_transform import ComposeTransformModule, TransformModule
from torch import Tensor, nn
from torch.distributions import constraints

__all__ = ["framed_iaf", "framed_splines"]

INIT_SCALE = 0.1  # initial scale of Pyro's Gaussian autoguides


class Frame(TransformModule):
    """``loc + scale * x``, both learnt."""

    domain = codomain = constraints.real_vector
    bijective = True

    def __init__(self, loc: Tensor, scale: float = INIT_SCALE) -> None:
        super().__init__(cache_size=1)
        self.loc = nn.Parameter(loc.clone())
        self.log_scale = nn.Parameter(torch.full_like(loc, scale).log())

    def _call(self, x: Tensor) -> Tensor:
        return self.loc + self.log_scale.exp() * x

    def _inverse(self, y: Tensor) -> Tensor:
        return (y - self.loc) / self.log_scale.exp()

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return self.log_scale.sum().expand(x.shape[:-1])


def framed_iaf(loc: Tensor, num_transforms: int = 1) -> Callable[[int], ComposeTransformModule]:
    """The flow of ``AutoIAFNormal``, Pyro's ``affine_autoregressive``, in a frame at ``loc``."""
    return partial(_compose, transforms.affine_autoregressive, loc, num_transforms)


def framed_splines(loc: Tensor, num_transforms: int = 2) -> Callable[[int], ComposeTransformModule]:
    """Rational splines in coupling layers, with reversed coordinates between layers."""
    return partial(_compose, transforms.spline_coupling, loc, num_transforms)


def _compose(
    make: Callable[[int], TransformModule], loc: Tensor, num_transforms: int, dim: int
) -> ComposeTransformModule:
    parts: list[torch.distributions.Transform] = [make(dim)]
    for _ in range(num_transforms - 1):
        parts += [transforms.permute(dim, torch.arange(dim).flip(0)), make(dim)]
    return ComposeTransformModule([*parts, Frame(loc)])
