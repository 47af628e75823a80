# SPDX-License-Identifier: Apache-2.0
"""Messages to users: warnings at their own line, errors in one line, checks of counts."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import pyro
import torch

__all__ = ["LIBRARIES", "first_line", "refuse_counts", "warn_user"]


#: Paths whose lines are not the user's: this package, Pyro, torch, and decorators.
LIBRARIES = (
    str(Path(__file__).parent.parent) + os.sep,
    *(str(Path(file).parent) + os.sep for file in (pyro.__file__, torch.__file__)),
    contextlib.__file__,
    functools.__file__,
)


def warn_user(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest line outside of this package, Pyro and torch.

    Python 3.12 has ``skip_file_prefixes`` for it, but 3.11 is supported, too.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def first_line(error: BaseException) -> str:
    """Return an error's kind and the first line of its message. Pyro adds the shapes of all sites.

    **Example:**

    >>> first_line(ValueError("no density\\nTrace Shapes:")), first_line(StopIteration())
    ('ValueError: no density', 'StopIteration')
    """
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def refuse_counts(least: int = 1, **counts: int) -> None:
    """Check that every count has a minimum.

    **Example:**

    >>> refuse_counts(num_steps=100, num_particles=8)

    :param least: the minimum.
    :param counts: by the name of the argument.
    :raises ValueError: naming the argument.
    """
    for name, count in counts.items():
        if count < least:
            raise ValueError(f"{name} must be at least {least}, but got {count}")
