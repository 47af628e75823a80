# SPDX-License-Identifier: Apache-2.0
"""What to do when a step wants more memory than there is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

__all__ = ["noting_memory"]

Given = ParamSpec("Given")
Result = TypeVar("Result")


class _ELBO(Protocol):
    num_particles: int
    _memory_cure: Any


Owner = TypeVar("Owner", bound=_ELBO)


def noting_memory(
    method: Callable[Concatenate[Owner, Given], Result],
) -> Callable[Concatenate[Owner, Given], Result]:
    """A step whose errors for want of memory, of whatever kind, have a note with the cure.

    :param method: of an ELBO.
    """

    @functools.wraps(method)
    def noting(self: Owner, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return method(self, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if _is_of_memory(error):
                error.add_note(
                    f"{type(self).__name__} ran out of memory in a step of {self.num_particles} "
                    f"particles. Cure: {self._memory_cure}"
                )
            raise

    return noting


def _is_of_memory(error: Exception) -> bool:
    """On the CPU torch raises a plain ``RuntimeError``."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or "can't allocate memory" in str(error)
