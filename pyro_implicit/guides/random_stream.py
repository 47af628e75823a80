# SPDX-License-Identifier: Apache-2.0
"""A random stream apart from torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["own_stream"]


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Draw from a stream that is the same each time, and leave torch's as they are.

    **Example:**

    >>> values = []
    >>> for _ in range(2):
    ...     with own_stream(torch.device("cpu")):
    ...         values.append(torch.randn(()))
    >>> bool(values[0] == values[1])
    True

    :param device: on which is drawn, beside the CPU.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would wake every GPU
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        yield
