# SPDX-License-Identifier: Apache-2.0
"""Recorded functions of tensors, which run without the overhead of Python and Pyro."""

from __future__ import annotations

from pyro_implicit.compiled.cache import (
    Arguments,
    CompileMode,
    ProgramCache,
    Same,
    check_mode,
    disagreement,
    flatten_arguments,
)
from pyro_implicit.compiled.policy import RECORDINGS
from pyro_implicit.compiled.program import (
    CompilerError,
    FusedFunction,
    RandomState,
    RecordedFunction,
)
from pyro_implicit.compiled.recorder import ACTIVE, Untraceable, is_tracing

__all__ = [
    "ACTIVE",
    "Arguments",
    "CompileMode",
    "CompilerError",
    "FusedFunction",
    "ProgramCache",
    "RECORDINGS",
    "RandomState",
    "RecordedFunction",
    "Same",
    "Untraceable",
    "check_mode",
    "disagreement",
    "flatten_arguments",
    "is_tracing",
]
