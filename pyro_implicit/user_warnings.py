# SPDX-License-Identifier: Apache-2.0
"""Warnings that name the user's line, however deep in the library they arise."""

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

__all__ = ["LIBRARIES", "warn_user"]

#: Where a line is not the user's: this package, what calls it back, and the decorators of both.
LIBRARIES = (
    *(str(Path(file).parent) + os.sep for file in (__file__, pyro.__file__, torch.__file__)),
    contextlib.__file__,
    functools.__file__,
)


def warn_user(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest line outside of this package, Pyro and torch.

    Python 3.12 has ``skip_file_prefixes`` for this; 3.11 is supported, too.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
