# SPDX-License-Identifier: Apache-2.0
"""A random stream apart from torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["own_stream", "same_streams"]


@contextmanager
def own_stream(device: torch.device | None = None, seed: int = 0) -> Iterator[None]:
    """Draw from a stream that is the same each time, and leave torch's as they are.

    **Example:**

    >>> values = []
    >>> for seed in (0, 0, 1):
    ...     with own_stream(seed=seed):
    ...         values.append(torch.randn(()))
    >>> bool(values[0] == values[1]), bool(values[0] == values[2])
    (True, False)

    :param device: on which is drawn, beside the CPU; None where that is not known.
    :param seed: of the stream.
    """
    with same_streams(device):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would wake every GPU
        for gpu in _gpus(device):
            torch.cuda.default_generators[gpu].manual_seed(seed)
        yield


@contextmanager
def same_streams(device: torch.device | None = None) -> Iterator[None]:
    """Leave torch's random streams as they are, whatever is drawn.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> with same_streams():
    ...     value = torch.randn(())
    >>> bool(torch.randn(()) == value)
    True

    :param device: on which is drawn, beside the CPU; None where that is not known.
    """
    with torch.random.fork_rng(devices=_gpus(device)):
        yield


def _gpus(device: torch.device | None) -> list[int]:
    """Whose streams to keep: of one device, or of all that there are once torch has woken CUDA."""
    if device is None:
        return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]
