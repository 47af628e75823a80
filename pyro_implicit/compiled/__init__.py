# SPDX-License-Identifier: Apache-2.0
"""Functions of tensors, recorded once and run without Python's and Pyro's share of the time."""

from __future__ import annotations

from pyro_implicit.compiled.function import RandomState, RecordedFunction, rounding
from pyro_implicit.compiled.inductor import CompilerError
from pyro_implicit.compiled.mode import CompileMode, check_mode
from pyro_implicit.compiled.recorder import Untraceable, is_tracing
from pyro_implicit.compiled.signature import Arguments, Same, flatten_arguments

__all__ = [
    "Arguments",
    "CompileMode",
    "CompilerError",
    "RandomState",
    "RecordedFunction",
    "Same",
    "Untraceable",
    "check_mode",
    "flatten_arguments",
    "is_tracing",
    "rounding",
]
