# SPDX-License-Identifier: Apache-2.0
"""Arguments that count something."""

from __future__ import annotations

__all__ = ["refuse_counts"]


def refuse_counts(least: int = 1, **counts: int) -> None:
    """Check that there are enough of each.

    **Example:**

    >>> refuse_counts(num_steps=100, num_particles=8)

    :param least: of each.
    :param counts: by the argument's name.
    :raises ValueError: naming the argument.
    """
    for name, count in counts.items():
        if count < least:
            raise ValueError(f"{name} must be at least {least}, but got {count}")
