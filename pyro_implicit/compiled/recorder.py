# SPDX-License-Identifier: Apache-2.0
"""Record the operations of a function on tensors as a graph."""

from __future__ import annotations

import functools
import linecache
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pyro
import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.fx.operator_schemas import get_signature_for_torch_op
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from pyro_implicit.runtime.messages import LIBRARIES
from pyro_implicit.runtime.trees import leaves_of

__all__ = [
    "ACTIVE",
    "DispatchMode",
    "Operation",
    "Recorder",
    "Untraceable",
    "is_random",
    "is_recorded",
    "is_tracing",
    "must_run",
    "record",
    "schema_of",
    "touches",
]


Operation: type = type(torch.ops.aten.add.Tensor)
"""The class of torch's operations, one for each signature."""


@functools.cache
def schema_of(operation: Any) -> Any:
    """Return the declaration of an operation.

    **Example:**

    >>> [argument.name for argument in schema_of(torch.ops.aten.add.Tensor).arguments]
    ['self', 'other', 'alpha']
    """
    _, schemas = get_signature_for_torch_op(operation, return_schemas=True)
    assert schemas is not None
    return schemas[0]


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not load torch's compiler when it is entered."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True loads the compiler, which takes seconds. The hook is private to torch: without it,
        # recordings are the same.
        return False


class _Active(threading.local):
    recorder: Recorder | None = None


ACTIVE = _Active()
"""The recorder of this thread, if it records: then no value may be read from a tensor."""


class Untraceable(RuntimeError):
    """A function cannot be recorded; the message names the cause."""


class _AliasedConstant(Untraceable):
    """A constant is written to through one of its views."""


def is_tracing() -> bool:
    """Tell whether this thread records a function, so that no value may be read from a tensor."""
    return ACTIVE.recorder is not None


def is_recorded(tensor: Tensor) -> bool:
    """Tell whether a tensor depends on an input of the function that this thread records."""
    return ACTIVE.recorder is not None and ACTIVE.recorder.is_known(tensor)


def record(
    function: Callable[[], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    writable: Sequence[Tensor] = (),
) -> Recorder:
    """Run a function once, and record its operations on tensors.

    Operations that depend on the inputs are recorded, random draws and gradients included. Values
    that depend on other tensors only are computed once; ``captured`` has the versions of these.

    torch's own tracers are not used. The score of a small hierarchical model takes 0.07 s to record
    here and 4 s by ``make_fx``, as that loads the compiler, and a call takes 330 us here and 820 us
    there, as its graph computes constants anew and runs through Python's wrappers of operations.
    With fake tensors, which read no values, results of ``make_fx`` are not bit-identical.
    ``torch.export`` refuses Pyro's handlers.

    **Example:**

    >>> x = torch.zeros(2)
    >>> recorder = record(lambda: [2 * x + torch.ones(2).exp()], [x])
    >>> [node.target.__name__ for node in recorder.graph.nodes if node.op == "call_function"]
    ['mul.Tensor', 'add.Tensor']

    :param function: a function without arguments, which reads the very objects ``inputs``.
    :param inputs: tensors, each once.
    :param writable: the inputs that it may change in place.
    :returns: a recorder with the graph of a function of the inputs.
    :raises Untraceable: if the function reads a value that depends on an input, or writes to a
        tensor that outlives the call.
    """
    try:
        return _record(function, inputs, writable, True)
    except _AliasedConstant:
        return _record(function, inputs, writable, False)


def _record(
    function: Callable, inputs: Sequence[Tensor], writable: Sequence[Tensor], folds: bool
) -> Recorder:
    recorder = Recorder(inputs, writable, folds)
    ACTIVE.recorder = recorder
    try:
        # The backward pass of a GPU would run in a thread of its own, where nothing is recorded.
        in_this_thread = torch.autograd.set_multithreading_enabled(False)
        with in_this_thread, pyro.validation_enabled(False), _NoEscape(recorder), recorder:
            outputs = function()
    except Exception as error:
        if recorder.refusal is not None:
            raise recorder.refusal from error
        raise
    finally:
        ACTIVE.recorder = None
    if recorder.refusal is not None:  # the function caught it
        raise recorder.refusal
    recorder.finish(outputs)
    return recorder


class Recorder(DispatchMode):
    """Records each operation below autograd and ``vmap``, where it is one call of a kernel.

    ``graph`` has a placeholder for each input and a ``get_attr`` for each of ``constants``.
    """

    def __init__(self, inputs: Sequence[Tensor], writable: Sequence[Tensor], folds: bool) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.captured: list[tuple[Tensor, int]] = []
        """Tensors other than inputs, and their versions."""
        self.mutated: set[int] = set()
        """Storages that the graph writes to, as in its nodes' ``meta["storage"]``."""
        self.refusal: Untraceable | None = None
        self._folds = folds
        self._nodes = WeakTensorKeyDictionary()
        self._computed = WeakTensorKeyDictionary()  # constants that were made in here
        self._storages: dict[int, StorageWeakRef] = {}
        self._uses: dict[int, int] = {}
        self._outer: set[int] = set()
        self._seen: set[int] = set()
        for i, tensor in enumerate(inputs):
            node = self.graph.placeholder(f"input_{i}")
            node.meta["depends"] = True
            self._track(tensor, node)
            self._outer.add(node.meta["storage"])
        self._outer -= {self._key(tensor) for tensor in writable}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, Operation):
            raise self.refuse(f"it uses the higher-order operator {func}")
        tensors: list[Tensor] = []
        map_aggregate((args, kwargs), lambda x: tensors.append(x) if isinstance(x, Tensor) else x)
        if func is torch.ops.aten.lift_fresh.default:  # a tensor of numbers, made in the function
            self._computed[tensors[0]] = True
            self._use(tensors[0])
            if self._folds:
                return tensors[0]
            func = _CLONE
        known = [self.is_known(tensor) for tensor in tensors]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if kwargs.get("generator") is not None:
            raise self.refuse("it draws from a generator of its own")
        if any(known):
            self._check_values_unread(func, args)
        elif not (is_random or schema_of(func).is_mutable) and (
            self._folds or torch.Tag.data_dependent_output in func.tags
        ):
            return self._compute(func, args, kwargs, tensors)
        if schema_of(func).is_mutable:
            self._note_writes(func, args, kwargs)
        arguments = map_aggregate(
            (args, kwargs), lambda x: self._node_of(x) if isinstance(x, Tensor) else x
        )
        out = func(*args, **kwargs)
        node = self.graph.call_function(func, *arguments)
        node.meta["depends"] = any(known) or is_random
        if isinstance(out, Tensor):
            self._track(out, node)
        elif isinstance(out, (tuple, list)):
            for i, part in enumerate(out):
                if isinstance(part, Tensor):
                    item = self.graph.call_function(_item, (node, i))
                    item.meta["depends"] = node.meta["depends"]
                    self._track(part, item)
        return out

    def refuse(self, cause: str) -> Untraceable:
        """Return the error to raise. The recording fails even if the function catches it."""
        self.refusal = Untraceable(cause + _place())
        return self.refusal

    def is_known(self, tensor: Tensor) -> bool:
        """Tell whether a tensor depends on an input or on random numbers."""
        if tensor not in self._nodes:
            return False
        meta = self._nodes[tensor].meta
        return meta.get("depends", False) or meta["storage"] in self.mutated

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Add the outputs to the graph."""
        self.graph.output(tuple(map(self._node_of, outputs)))
        self._nodes, self._computed = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()

    def _compute(self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Any:
        for tensor in tensors:
            if tensor not in self._nodes:  # what nodes read is captured
                self._capture(tensor)
        out = func(*args, **kwargs)
        for part in leaves_of(out):
            if isinstance(part, Tensor):
                self._computed[part] = True
                self._use(part)
        return out

    def _capture(self, tensor: Tensor) -> None:
        if tensor not in self._computed and id(tensor) not in self._seen:
            self._seen.add(id(tensor))  # which `captured` keeps, so that no other has this id
            self.captured.append((tensor, tensor._version))
            self._outer.add(self._use(tensor))

    def _node_of(self, tensor: Tensor) -> fx.Node:
        if tensor not in self._nodes:
            self._nodes[tensor] = self._constant(tensor)
        return self._nodes[tensor]

    def _constant(self, tensor: Tensor) -> fx.Node:
        self._capture(tensor)
        name = f"constant_{len(self.constants)}"
        self.constants[name] = tensor
        # Such nodes stand before all operations; without any, at the end.
        first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        before = nullcontext() if first is None else self.graph.inserting_before(first)
        with before:
            node = self.graph.get_attr(name)
        _describe(node, tensor, self._key(tensor))
        return node

    def _track(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[tensor] = node
        _describe(node, tensor, self._use(tensor))

    def _key(self, tensor: Tensor) -> int:
        reference = StorageWeakRef(tensor.untyped_storage())
        # Kept, so that the address is not used again.
        self._storages.setdefault(reference.cdata, reference)
        return reference.cdata

    def _use(self, tensor: Tensor) -> int:
        key = self._key(tensor)
        self._uses[key] = self._uses.get(key, 0) + 1
        return key

    def _check_values_unread(self, func: Any, args: tuple) -> None:
        if torch.Tag.data_dependent_output in func.tags:
            raise self.refuse("it reads the value of a tensor (.item(), float() or a branch)")
        if torch.Tag.dynamic_output_shape not in func.tags:
            return
        if func is torch.ops.aten.index.Tensor:
            masks = (i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8))
            if not any(map(self.is_known, masks)):
                return
        raise self.refuse("it makes a tensor whose size depends on values (a mask as index)")

    def _note_writes(self, func: Any, args: tuple, kwargs: dict) -> None:
        for i, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in leaves_of(written):
                if not isinstance(tensor, Tensor):
                    continue
                key = self._key(tensor)
                if tensor in self._computed:
                    if self._uses[key] > 1:
                        self.refusal = _AliasedConstant("it writes to a view of a constant")
                        raise self.refusal
                    constant = self._constant(tensor.clone())
                    del self._computed[tensor]
                    self._nodes[tensor] = self.graph.call_function(_CLONE, (constant,))
                    _describe(self._nodes[tensor], tensor, key)
                elif tensor not in self._nodes or key in self._outer:
                    raise self.refuse("it changes a tensor in place that outlives the step")
                self.mutated.add(key)


class _NoEscape(TorchFunctionMode):
    """Refuses functions that read values of tensors without an operation."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ESCAPES and self.recorder.is_known(args[0]):
            raise self.recorder.refuse(f"it reads the values of a tensor (.{func.__name__}())")
        return func(*args, **(kwargs or {}))


_CLONE = torch.ops.aten.clone.default
_ESCAPES = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.__reduce_ex__}


def _item(values: Any, i: int) -> Any:
    return values[i]


def touches(node: fx.Node, mutated: set[int]) -> bool:
    """Tell whether a node reads or writes a storage that the graph changes."""
    parts = [user for user in node.users if not isinstance(user.target, Operation)]
    near = (node, *node.all_input_nodes, *parts)
    return any(one.meta.get("storage") in mutated for one in near)


def is_random(node: fx.Node) -> bool:
    """Tell whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def must_run(node: fx.Node) -> bool:
    """Tell whether a node has side effects or draws random numbers."""
    return is_random(node) or (
        isinstance(node.target, Operation) and schema_of(node.target).is_mutable
    )


def _describe(node: fx.Node, tensor: Tensor, storage: int) -> None:
    node.meta.update(
        storage=storage, shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype,
        device=tensor.device,
    )  # fmt: skip


def _place() -> str:
    """Return the innermost line outside of torch, Pyro and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _record.__code__:
        file = frame.f_code.co_filename
        if not file.startswith((*LIBRARIES, "<")):
            line = linecache.getline(file, frame.f_lineno).strip()
            return f", at {Path(file).name}:{frame.f_lineno}: {line}" if line else ""
        frame = frame.f_back
    return ""
