# SPDX-License-Identifier: Apache-2.0
"""Distance of draws from the reference, as for posteriordb and for the worst coordinate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.posteriordb import metrics
from benchmarks.zoo import registry

__all__ = ["Reference", "measure", "read_reference"]

NUM_SPLITS = 10


@dataclass(frozen=True)
class Reference:
    """Thinned reference draws of some features, and the moments of all.

    ``values`` are ``(num_draws, len(columns))``, of the features ``columns``; ``mean`` and ``sd``
    are those of all features over the whole chains.
    """

    values: Tensor
    columns: Tensor
    mean: Tensor
    sd: Tensor


def read_reference(name: str) -> Reference | None:
    """Return the committed reference of a model, ``None`` if there is none."""
    path = registry.load(name).references / "draws" / f"{name}.npz"
    if not path.exists():
        return None
    with np.load(path) as file:
        part = {key: torch.as_tensor(file[key]) for key in file.files}
    columns, mean, sd = part["columns"].long(), part["mean"], part["sd"]
    values = part["standardised"].double() * sd[columns] + mean[columns]
    return Reference(values, columns, mean, sd)


def _marginal(first: Tensor, second: Tensor) -> float:
    """Largest 1-Wasserstein distance of single columns, for equal numbers of draws."""
    return (first.sort(0).values - second.sort(0).values).abs().mean(0).max().item()


def _marginal_floor(values: Tensor) -> float:
    generator, size, total = torch.Generator().manual_seed(0), len(values) // 2, 0.0
    for _ in range(NUM_SPLITS):
        rows = torch.randperm(len(values), generator=generator)
        total += _marginal(values[rows[:size]], values[rows[size : 2 * size]])
    return total / NUM_SPLITS


def measure(draws: Tensor, reference: Reference) -> dict[str, float]:
    """Return ratios to the floor and the errors of moments.

    :param draws: of all features, ``(num_draws, num_features)``, at least as many as the reference.
    :returns: ``distance`` and its ``floor``, ``ratio`` (sliced, as for posteriordb), and
        ``worst_ratio`` (of the worst column, relative to the floor of the worst column), with as
        many draws as the reference; ``mean_error``, ``sd_ratio_min`` and ``sd_ratio_max`` of all
        features with all draws.
    :raises ValueError: for draws that are not finite.
    """
    bad = int((~draws.isfinite()).any(-1).sum())
    if bad:
        raise ValueError(f"{bad} of {len(draws)} draws are not finite in unconstrained space")
    draws = draws.double()
    values, columns = reference.values, reference.columns
    some = draws[: len(values)][:, columns]
    distance, floor = metrics.distance(some, values), metrics.floor(values)
    standard, own = (
        (part - reference.mean[columns]) / reference.sd[columns] for part in (values, some)
    )
    ratio = draws.std(0) / reference.sd
    return {
        "distance": distance,
        "floor": floor,
        "ratio": distance / floor,
        "worst_ratio": _marginal(own, standard) / _marginal_floor(standard),
        "mean_error": ((draws.mean(0) - reference.mean).abs() / reference.sd).max().item(),
        "sd_ratio_min": ratio.min().item(),
        "sd_ratio_max": ratio.max().item(),
    }
