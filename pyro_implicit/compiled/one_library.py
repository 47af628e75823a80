# SPDX-License-Identifier: Apache-2.0
"""All of inductor's C++ kernels for the CPU in one file, so that its headers are read once.

Inductor compiles each kernel by itself, which takes two seconds, nearly all for the headers, and
tries with the compiler which instruction sets there are, though torch knows. Both are taken over
while :func:`one_library` lasts, by means that torch does not promise to keep.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

__all__ = ["one_library"]

_lock = threading.Lock()
_INCLUDE = re.compile(r"^\s*#include.*$", re.MULTILINE)
_BINDING_INCLUDES = "#define PY_SSIZE_T_CLEAN\n#include <Python.h>\n#include <sstream>\n"


@contextmanager
def one_library(vectorised: bool) -> Iterator[None]:
    """Let the kernels that inductor makes in here, in this thread, become one library.

    :param vectorised: whether they use vector instructions, for which inductor writes each loop
        three times: with single numbers it is done in two thirds of the time.
    """
    from torch._inductor import async_compile, cpu_vec_isa

    with (
        _lock,
        _replaced(async_compile, "AsyncCompile", _compiler),
        _replaced(cpu_vec_isa, "valid_vec_isa_list", _instruction_sets(cpu_vec_isa, vectorised)),
    ):
        yield


@contextmanager
def _replaced(module: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    usual = getattr(module, name)
    setattr(module, name, make(usual))
    try:
        yield
    finally:
        setattr(module, name, usual)


def _instruction_sets(cpu_vec_isa: Any, vectorised: bool) -> Callable[[Any], Any]:
    """What makes a list of them, of which inductor takes the first."""
    known = {"AVX512": cpu_vec_isa.VecAVX512, "AVX2": cpu_vec_isa.VecAVX2}
    kind = known.get(torch.backends.cpu.get_cpu_capability())
    found: list[Any] | None = [] if not vectorised else None
    if vectorised and kind is not None:
        # Its truth value says whether it is there, and usually compiles and runs a program.
        attributes = {"__bool__": lambda self: True, "__hash__": kind.__hash__}
        found = [type(kind.__name__, (kind,), attributes)()]
    owner = threading.get_ident()

    def make(usual: Callable[[], list]) -> Callable[[], list]:
        return lambda: usual() if found is None or threading.get_ident() != owner else found

    return make


class _Kernel(NamedTuple):
    argument_types: list[str]
    source: str


def _compiler(usual: Any) -> Any:
    owner = threading.get_ident()

    class OneLibrary(usual):
        """Collects the kernels of a module until all are wanted."""

        def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
            if threading.get_ident() != owner:  # another thread compiles something of its own
                return super().cpp_pybinding(argtypes, source_code)
            return _Kernel(argtypes, source_code)

        def wait(self, scope: dict[str, Any]) -> None:
            kernels = {name: value for name, value in scope.items() if isinstance(value, _Kernel)}
            if kernels:
                scope.update(zip(kernels, _build(list(kernels.values())), strict=True))
            super().wait(scope)

    return OneLibrary


def _build(kernels: list[_Kernel]) -> list[Callable]:
    """Compile and load them, each in a namespace with its own copy of inductor's Python binding."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    includes = {line for kernel in kernels for line in _INCLUDE.findall(kernel.source)}
    parts, caches = [*sorted(includes), _BINDING_INCLUDES], []
    for i, kernel in enumerate(kernels):
        name = f"kernel_{i}"
        attributes = {"cache": {}, "entry_function": name}
        cache: Any = type("OneOfMany", (CppPythonBindingsCodeCache,), attributes)
        caches.append(cache)
        values = [
            f"parse_arg<{kind.replace('const ', '')}>(args, {n})"
            for n, kind in enumerate(kernel.argument_types)
        ]
        binding = cache.suffix_template.format(
            arg_len=len(values),
            call_entry_func=f"{name}({', '.join(values)}); Py_RETURN_NONE;",
            entry_func=name,
            extra_parse_arg="",
        )
        source = re.sub(r"\bkernel\(", f"{name}(", kernel.source)
        parts.append(f"namespace of_{name} {{{_INCLUDE.sub('', source + binding)}}}")
    code = "\n".join(parts)
    return [getattr(cache.load(code), cache.entry_function) for cache in caches]
