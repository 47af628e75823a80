# SPDX-License-Identifier: Apache-2.0
"""Mixing of chains, by quantities such as the predictions of networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from pyro.ops.stats import effective_sample_size
from torch import Tensor

from pyro_implicit.diagnostics.policy import MOMENTS

__all__ = ["Mixing", "mixing"]


class Mixing(NamedTuple):
    """R-hat of quantities between chains and within them, and their median effective sample size.

    ``within`` is the R-hat of the two halves of each chain. If it is near 1 and ``between`` is
    large, every chain is stationary, but stays in a region of its own.
    """

    between: float
    within: float
    effective_sample_size: float

    def __str__(self) -> str:
        return (
            f"R-hat {self.between:.2f} between chains, {self.within:.2f} within; effective sample "
            f"size {self.effective_sample_size:.0f}"
        )


@torch.no_grad()
def mixing(values: Mapping[str, Tensor]) -> Mixing | None:
    r"""Measure how chains mix, by all elements of all quantities together.

    With B the variance of the means of chains (or of halves of chains about their chain's mean) and
    W the mean variance inside of them, both averaged over the elements of a quantity,
    :math:`\hat R = \sqrt{1 + B / W}`. The worst quantity counts.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> apart = torch.randn(4, 500, 10) + torch.arange(4.0).reshape(4, 1, 1)
    >>> print(mixing({"mean": apart}))
    R-hat 1.6... between chains, 1.00 within; effective sample size ...

    :param values: by name, ``(num_chains, num_draws, *shape)``.
    :returns: None for a single chain, fewer than 8 draws of a chain, or constant quantities.
    """
    rows = [value.reshape(*value.shape[:2], -1).double() for value in values.values()]
    if len(rows[0]) < 2 or rows[0].shape[1] < MOMENTS.least_chain_draws:
        return None
    between, within = (max(map(find, rows)) for find in (_between, _within))
    sizes = torch.cat([effective_sample_size(row, 0, 1).flatten() for row in rows])
    sizes = sizes[sizes.isfinite()]
    if not len(sizes) or not between < float("inf"):
        return None
    return Mixing(between, within, sizes.median().item())


def _between(row: Tensor) -> float:
    inside = row.var(1).mean().item()
    return (1 + row.mean(1).var(0).mean().item() / inside) ** 0.5 if inside > 0 else float("inf")


def _within(row: Tensor) -> float:
    half = row.shape[1] // 2
    halves = row[:, -2 * half :].unflatten(1, (2, half))
    inside = halves.var(2).mean().item()
    apart = halves.mean(2).var(1).mean().item()
    return (1 + apart / inside) ** 0.5 if inside > 0 else float("inf")
