# SPDX-License-Identifier: Apache-2.0
"""Random streams that leave the caller's as they were."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from pyro.util import get_rng_state, set_rng_state

__all__ = ["same_streams", "seeded", "with_seed"]

Given = ParamSpec("Given")
Result = TypeVar("Result")


@contextmanager
def seeded(seed: int | None, device: torch.device | None = None) -> Iterator[None]:
    """Draw from streams of this seed, and restore the caller's streams afterwards.

    Covers torch on the CPU and on CUDA devices, numpy's global generator and Python's ``random``.

    **Example:**

    >>> values = []
    >>> for seed in (0, 0, 1):
    ...     with seeded(seed):
    ...         values.append(torch.randn(()))
    >>> bool(values[0] == values[1]), bool(values[0] == values[2])
    (True, False)

    :param seed: of all streams; with ``None`` the caller's streams are used, and advance.
    :param device: the only device that is drawn on besides the CPU; ``None`` if unknown.
    """
    if seed is None:
        yield
        return
    with same_streams(device):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would wake every GPU
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        _seed_gpus(device, seed)
        yield


def with_seed(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Run a function inside ``seeded(seed)``, with its keyword argument ``seed``.

    **Example:**

    >>> @with_seed
    ... def noise(*, seed: int | None = None) -> torch.Tensor:
    ...     return torch.randn(())
    >>> bool(noise(seed=1) == noise(seed=1)), bool(noise() == noise())
    (True, False)

    :param function: whose ``seed`` is keyword-only, and ``None`` by default.
    """

    @functools.wraps(function)
    def inside(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        seed: Any = kwargs.get("seed")
        with seeded(seed):
            return function(*args, **kwargs)

    return inside


@contextmanager
def same_streams(device: torch.device | None = None) -> Iterator[None]:
    """Restore all random streams at the end, also after an exception.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> with same_streams():
    ...     value = torch.randn(())
    >>> bool(torch.randn(()) == value)
    True

    :param device: the only device that is drawn on besides the CPU; ``None`` if unknown.
    """
    outside, first_seed = get_rng_state(), torch.initial_seed()
    gpus = {gpu: torch.cuda.get_rng_state(gpu) for gpu in _gpus(device)}
    asleep = not torch.cuda.is_initialized()
    try:
        yield
    finally:
        set_rng_state(outside)
        for gpu, state in gpus.items():
            torch.cuda.set_rng_state(state, gpu)
        if asleep:  # the caller's CUDA streams would have begun with the seed of the CPU's
            _seed_gpus(device, first_seed)


def _gpus(device: torch.device | None) -> list[int]:
    """Return the GPUs whose streams are kept: the device, or all if CUDA is initialised."""
    if device is None:
        return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


def _seed_gpus(device: torch.device | None, seed: int) -> None:
    """Seed their streams; if CUDA may be initialised later, then the GPUs that it will find."""
    if device is None and not torch.cuda.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        return
    for gpu in _gpus(device):
        torch.cuda.default_generators[gpu].manual_seed(seed)
