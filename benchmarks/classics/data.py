# SPDX-License-Identifier: Apache-2.0
"""Read the data of the classic examples from ``data.json``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.zoo.registry import floats, integers

__all__ = ["arguments", "cervix_rows", "entry"]

FILE = Path(__file__).parent / "data.json"
INDICES = ("group", "pair")  # arguments with integers


def entry(name: str) -> dict[str, Any]:
    """Return the arguments of an example and what they are made from, by their names."""
    return json.loads(FILE.read_text())[name]


def arguments(name: str) -> Callable[[], tuple]:
    """Return a function that makes the example's arguments, in the order of the file."""

    def make() -> tuple:
        return tuple(
            integers(value) if key in INDICES else floats(value)[0]
            for key, value in entry(name).items()
        )

    return make


def cervix_rows() -> tuple:
    """Expand the counts of equal patients to rows."""
    values = entry("cervix")
    complete = np.repeat(values["complete"], values["complete_counts"], 0)
    incomplete = np.repeat(values["incomplete"], values["incomplete_counts"], 0)
    return floats(*complete.T, *incomplete.T)
