# SPDX-License-Identifier: Apache-2.0
"""How steps, and scores of chains, are run."""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["CompileMode", "check_mode"]

CompileMode = Literal["trace", "auto"] | bool


def check_mode(compile: Any) -> None:
    """Refuse all that is no :data:`CompileMode`.

    :raises ValueError: naming those that are.
    """
    if compile not in (True, False, "trace", "auto"):
        raise ValueError(f'compile must be True, "trace", "auto" or False, got {compile!r}')
