# SPDX-License-Identifier: Apache-2.0
"""Distance of a guide's draws from reference draws: tensors ``(num_draws, dim)``.

All draws are in unconstrained space. The distance is the sliced 1-Wasserstein distance in the frame
in which the reference has mean 0 and covariance I; its *floor* is the distance between two halves
of the reference. A guide has twice as many draws as a half, so the ratio of a perfect guide is
about 0.7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_implicit.diagnostics.distances import sliced_wasserstein, whiten

__all__ = ["distance", "floor", "measure"]

NUM_DIRECTIONS = 200
NUM_SPLITS = 10


def distance(draws: Tensor, reference: Tensor) -> float:
    """Sliced 1-Wasserstein distance, whitened by ``reference``.

    :param draws: ``(n, dim)``.
    :param reference: ``(m, dim)``.
    """
    white = whiten(draws, reference), whiten(reference, reference)
    return sliced_wasserstein(*white, num_projections=NUM_DIRECTIONS, p=1).item()


def floor(reference: Tensor, num_draws: int | None = None, seed: int = 0) -> float:
    """Return the distance of ``num_draws`` of the reference draws from all others.

    :param reference: ``(m, dim)``.
    :param num_draws: default: half of them.
    :param seed: of the splits, over which the distance is averaged.
    """
    white = whiten(reference, reference)
    size = num_draws or len(white) // 2
    generator = torch.Generator(device=white.device).manual_seed(seed)
    total = 0.0
    for _ in range(NUM_SPLITS):
        rows = torch.randperm(len(white), generator=generator, device=white.device)
        first, second = white[rows[:size]], white[rows[size:]]
        total += sliced_wasserstein(first, second, num_projections=NUM_DIRECTIONS, p=1).item()
    return total / NUM_SPLITS


def measure(draws: Tensor, reference: Tensor, directions: Tensor | None = None) -> dict[str, float]:
    """Return the distance and the errors of the moments of single coordinates.

    :param draws: ``(n, dim)``.
    :param reference: ``(m, dim)``.
    :param directions: ``(dim, k)``, additional directions that count as coordinates.
    :returns: ``distance``; ``mean_error``, the largest absolute difference of means in sds of the
        reference; ``sd_ratio_min`` and ``sd_ratio_max`` over coordinates.
    :raises ValueError: for draws that are not finite.
    """
    bad = int((~draws.isfinite()).any(-1).sum())
    if bad:
        raise ValueError(f"{bad} of {len(draws)} draws are not finite in unconstrained space")
    away = distance(draws, reference)
    if directions is not None:
        draws, reference = (torch.cat([x, x @ directions], -1) for x in (draws, reference))
    sd = reference.std(0)
    ratio = draws.std(0) / sd
    return {
        "distance": away,
        "mean_error": ((draws.mean(0) - reference.mean(0)).abs() / sd).max().item(),
        "sd_ratio_min": ratio.min().item(),
        "sd_ratio_max": ratio.max().item(),
    }
