# SPDX-License-Identifier: Apache-2.0
"""Vectors of all latents, cut into those of single sites."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["site_parts"]


def site_parts(latent: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The part of each site, in the order of the shapes.

    **Example:**

    >>> parts = site_parts(torch.arange(5), {"x": torch.Size([2, 2]), "y": torch.Size([])})
    >>> parts["x"], parts["y"]
    (tensor([[0, 1],
            [2, 3]]), tensor(4))

    :param latent: ``(*batch, latent_dim)``.
    :param shapes: of the sites.
    :returns: by site, ``(*batch, *shape)``.
    """
    parts = latent.split([shape.numel() for shape in shapes.values()], dim=-1)
    return {
        name: part.reshape(part.shape[:-1] + shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
