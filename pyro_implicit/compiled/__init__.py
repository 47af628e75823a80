# SPDX-License-Identifier: Apache-2.0
"""Recorded functions of tensors, which run without the overhead of Python and Pyro.

:class:`ProgramCache` holds the recordings of one function: which arguments share one, how they are
checked, when to give up.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pyro_implicit.compiled.policy import RECORDINGS
from pyro_implicit.compiled.program import (
    CompilerError,
    FusedFunction,
    RandomState,
    RecordedFunction,
    has_compiler,
)
from pyro_implicit.compiled.recorder import ACTIVE, Untraceable, is_recorded, is_tracing
from pyro_implicit.runtime.messages import first_line, refuse_unknown, warn_user
from pyro_implicit.runtime.trees import flatten, unflatten

__all__ = [
    "ACTIVE",
    "RECORDINGS",
    "Arguments",
    "CompileMode",
    "CompilerError",
    "FusedFunction",
    "ProgramCache",
    "RandomState",
    "RecordedFunction",
    "Same",
    "Untraceable",
    "check_mode",
    "disagreement",
    "flatten_arguments",
    "has_compiler",
    "is_recorded",
    "is_tracing",
]


CompileMode = Literal["trace", "auto"] | bool

_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum)
_OF_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)


def check_mode(compile: Any) -> None:
    """Check that a value is a :data:`CompileMode`.

    :raises ValueError: naming the modes.
    """
    refuse_unknown("compile", compile, True, "trace", "auto", False)


class _Program(Protocol):
    def holds(self) -> bool: ...

    def compile(self, inputs: Any) -> None: ...


Program = TypeVar("Program", bound=_Program)


class ProgramCache(Generic[Program]):
    """The recordings of one function, by the kind of its arguments.

    The first, second, fourth, eighth ... call of each recording is due for a comparison with the
    function itself. A function that cannot be recorded, or whose recording is wrong, runs as it is
    from then on, and ``refusal`` says why.

    **Example:**

    >>> x, cache = torch.ones(2), ProgramCache("auto")
    >>> make = lambda: RecordedFunction(lambda: [x.exp()], [x])
    >>> cache.record("exp", "a key", make, lambda program: [x])
    >>> program, is_due = cache.find("a key")
    >>> program([torch.zeros(2)]), is_due
    ([tensor([1., 1.])], True)

    :param compile: with True, inductor compiles each recording; with ``"auto"``, no warning tells
        that a function cannot be recorded.
    """

    def __init__(self, compile: CompileMode) -> None:
        self.compile: CompileMode = compile
        self.num_recorded = self.num_run = 0
        self.refusal: str | None = None
        self._programs: dict[Hashable, Program] = {}
        self._calls: dict[Hashable, int] = {}

    def find(self, key: Hashable) -> tuple[Program | None, bool]:
        """Return the recording for a call, None if there is none, and whether it is to be checked.

        A recording whose constants have changed is dropped.
        """
        program = self._programs.pop(key, None)
        if program is None or not program.holds():
            return None, False
        self._programs[key] = program  # now the latest
        self.num_run += 1
        calls = self._calls[key] = self._calls[key] + 1
        return program, calls & (calls - 1) == 0

    def record(
        self,
        who: str,
        key: Hashable,
        record: Callable[[], Program],
        inputs: Callable[[Program], Any],
    ) -> None:
        """Keep a new recording, or give up.

        :param who: what is recorded, for messages.
        :param record: makes the recording.
        :param inputs: gives example arguments to inductor.
        """
        if self.num_recorded == RECORDINGS.max_recordings:
            self.give_up(
                who,
                f"it was recorded {self.num_recorded} times, as shapes or arguments other than the "
                "values of tensors change from call to call",
            )
            return
        self.num_recorded += 1
        try:
            program = record()
        except Exception as error:  # of the model, too
            self.give_up(who, str(error) if isinstance(error, Untraceable) else first_line(error))
            return
        if len(self._programs) == RECORDINGS.max_programs:
            del self._programs[next(iter(self._programs))]
        self._programs[key], self._calls[key] = program, 0
        if self.compile is True:
            try:
                program.compile(inputs(program))
            except CompilerError as error:
                warn_user(
                    f"{who} runs recorded, but not compiled: {error}. Cure: a C++ compiler, or "
                    'compile="trace"'
                )

    def give_up(self, who: str, cause: str, is_wrong: bool = False) -> None:
        """Run the function as it is from now on.

        :param who: what runs, for the message.
        :param is_wrong: whether a recording has given wrong results, which ``"auto"`` tells, too.
        """
        self.refusal = cause
        self.clear()
        if self.compile != "auto" or is_wrong:
            warn_user(
                f"{who} runs without compilation from now on: {cause}. A recording reads anew only "
                "the tensors among the arguments and the parameters. Cure: pass what changes as a "
                "tensor argument, or compile=False"
            )

    def clear(self) -> None:
        """Drop all recordings."""
        self._programs.clear()


def disagreement(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Compare a value and its gradients with those of the function itself.

    **Example:**

    >>> disagreement([torch.ones(())], [torch.zeros(())])
    'its value is 1 and not 0'

    :param found: the value and the gradients of a recording.
    :param expected: those of the function itself.
    :returns: in what they differ by more than rounding; None if they agree.
    """
    errors, sizes = [], []
    for one, other in zip(found, expected, strict=True):
        same = (one == other) | (one.isnan() & other.isnan())
        errors.append(torch.where(same, 0.0, one - other))
        sizes.append(other.where(other.isfinite(), 0.0).norm())
    is_double = found[0].dtype == torch.float64
    tolerance = RECORDINGS.rounding_double if is_double else RECORDINGS.rounding
    if not errors[0].abs().max() <= tolerance * (1 + sizes[0]):
        worst = errors[0].abs().nan_to_num(torch.inf).argmax()
        values = [part[0].flatten()[worst].item() for part in (found, expected)]
        return f"its value is {values[0]:.6g} and not {values[1]:.6g}"
    floor = RECORDINGS.small_gradient * math.hypot(*map(float, sizes[1:]))
    for error, size in zip(errors[1:], sizes[1:], strict=True):
        if not error.norm() <= tolerance * (size + floor):
            return f"a gradient of shape {tuple(error.shape)} differs"
    return None


class Arguments(NamedTuple):
    """The arguments of a call, flattened.

    ``tensors`` are the inputs, each once. ``key`` is equal for arguments that differ in the values
    of tensors only. ``rebuild`` turns other tensors of their kind into arguments.
    """

    key: Hashable
    tensors: list[Tensor]
    rebuild: Callable[[Sequence[Tensor]], tuple[tuple, dict[str, Any]]]


def flatten_arguments(args: tuple, kwargs: dict[str, Any]) -> Arguments:
    """Separate the tensors among arguments from all other values, which a recording keeps.

    **Example:**

    >>> x, y = torch.zeros(3), torch.ones(3)
    >>> flatten_arguments((x, 2), {}).key == flatten_arguments((y, 2), {}).key
    True
    >>> flatten_arguments((x, x), {}).key == flatten_arguments((x, y), {}).key
    False

    :raises Untraceable: for a mutable argument whose changes cannot be seen, such as an array.
    """
    leaves, spec = flatten((args, kwargs))
    tensors: list[Tensor] = []
    index: dict[int, int] = {}
    places: list[int | None] = []
    key: list[Hashable] = [spec]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            place = index.setdefault(id(leaf), len(tensors))
            if place == len(tensors):
                tensors.append(leaf)
            places.append(place)
            if leaf.layout != torch.strided:
                raise Untraceable("an argument is a tensor that is not dense")
            key.append((
                place, type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device,
                leaf.requires_grad,
            ))  # fmt: skip
            continue
        places.append(None)
        if isinstance(leaf, (*_PLAIN, *_OF_TORCH)):
            key.append((type(leaf), leaf))
        elif callable(leaf):  # modules too
            key.append(Same(leaf))
        else:
            raise Untraceable(f"an argument is a {type(leaf).__name__}. Cure: pass a tensor")

    def rebuild(others: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
        new = [
            leaf if place is None else others[place]
            for leaf, place in zip(leaves, places, strict=True)
        ]
        return unflatten(new, spec)

    return Arguments(tuple(key), tensors, rebuild)


class Same:
    """A key that equals only itself. It keeps its object, so that no other gets the address.

    :param target: the object.
    """

    def __init__(self, target: Any) -> None:
        self.target = target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.target is other.target

    def __hash__(self) -> int:
        return id(self.target)
