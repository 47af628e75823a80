# SPDX-License-Identifier: Apache-2.0
"""A recorded function: its graph, simplified and written as one plain function."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from pyro_implicit.compiled.fusion import RESHAPES, FusedGraph
from pyro_implicit.compiled.policy import RECORDINGS
from pyro_implicit.compiled.recorder import (
    Operation,
    Recorder,
    Untraceable,
    is_random,
    must_run,
    record,
    schema_of,
    touches,
)
from pyro_implicit.compiled.replay import Function, replayed
from pyro_implicit.runtime.global_state import keep_freed_memory, same_streams
from pyro_implicit.runtime.messages import first_line
from pyro_implicit.runtime.sites import graph_functions

__all__ = [
    "CompilerError",
    "FusedFunction",
    "Guard",
    "RandomState",
    "RecordedFunction",
    "as_function",
    "compile_graph",
    "has_compiler",
    "simplify",
]


def as_function(graph: fx.Graph, constants: dict[str, Tensor]) -> Function:
    """Write straight-line Python that calls one kernel after the other and frees values early.

    :param graph: the graph of a :class:`~pyro_implicit.compiled.recorder.Recorder`.
    :param constants: its constants, by its ``get_attr`` nodes.
    :returns: a function of the list of inputs, without autograd.
    """
    writer = _Writer(constants)
    last_use = {arg: node for node in graph.nodes for arg in node.all_input_nodes}
    for node in graph.nodes:
        writer.add(node)
        if node.op == "call_function":
            writer.forget([arg for arg in node.all_input_nodes if last_use[arg] is node])
    return writer.function()


class _Writer:
    def __init__(self, constants: dict[str, Tensor]) -> None:
        self.constants = constants
        self.names: dict[fx.Node, str] = {}
        self.inputs: list[str] = []
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {}

    def add(self, node: fx.Node) -> None:
        name = self.names[node] = f"{node.op[0]}{len(self.names)}"
        if node.op == "placeholder":
            self.inputs.append(name)
        elif node.op == "get_attr":
            self.scope[name] = self.constants[node.target]  # type: ignore[index]
        elif node.op == "output":
            self.lines.append(f"return {self._show(node.args[0])}")
        elif isinstance(node.target, Operation):
            arguments = [self._show(arg) for arg in node.args]
            arguments += [f"{key}={self._show(value)}" for key, value in node.kwargs.items()]
            # The kernel itself, without torch's Python wrapper, where torch gives it.
            self.scope[f"f{name}"] = getattr(node.target, "op", node.target)
            self.lines.append(f"{name} = f{name}({', '.join(arguments)})")
        else:
            values, i = (self._show(arg) for arg in node.args)
            self.lines.append(f"{name} = {values}[{i}]")

    def forget(self, nodes: list[fx.Node]) -> None:
        names = [self.names[node] for node in nodes if node.op != "get_attr"]
        if names:
            self.lines.append(" = ".join(names) + " = None")

    def function(self) -> Function:
        head = "def run(inputs):\n"
        if self.inputs:
            head += f"    {', '.join(self.inputs)}, = inputs\n"
        exec(head + "".join(f"    {line}\n" for line in self.lines), self.scope)
        run, is_plain = self.scope["run"], all(map(_is_plain, self.constants.values()))

        def without_autograd(inputs: Sequence[Tensor]) -> list[Tensor]:
            # Inference mode takes less time, but has no views of tensor subclasses.
            is_fast = is_plain and all(map(_is_plain, inputs))
            with torch.inference_mode() if is_fast else torch.no_grad():
                found = run(inputs)
            # A caller may change tensors of its own in place, but none of inference mode.
            return [part.clone() if part.is_inference() else part for part in found]

        return without_autograd

    def _show(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(self._show, value)) + "]"
        is_finite = isinstance(value, float) and math.isfinite(value)
        if value is None or isinstance(value, (bool, int)) or is_finite:
            return repr(value)
        name = f"value{len(self.scope)}"
        self.scope[name] = value
        return name


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


aten = torch.ops.aten
_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_NO_CHANGE = {
    *(aten._to_copy.default, aten.clone.default, aten.expand.default, aten.reshape.default),
    *(aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims, aten.slice.Tensor),
    *(aten.permute.default, aten.transpose.int, aten.t.default, aten.as_strided.default),
    *RESHAPES,
}
_ELEMENTWISE = {aten.select.int, aten.select_scatter.default}
_WRITES = {aten.select_scatter.default, aten.as_strided_scatter.default}


def simplify(recorder: Recorder) -> None:
    """Remove, in place, operations without effect, repeated operations and unused ones.

    Results stay bit-identical. Unused random draws stay, as they move the generator's state.

    :param recorder: with a graph. Operations on storages that the graph writes to stay as they are.
        Those on a tensor that nothing else shares become functional, and leave ``mutated``.
    """
    graph, mutated = recorder.graph, recorder.mutated
    written: dict[int, list[fx.Node]] = {storage: [] for storage in mutated}
    for node in graph.nodes:
        if (storage := node.meta.get("storage")) in written:
            written[storage].append(node)
    mutated.difference_update(key for key, nodes in written.items() if _make_functional(nodes))
    for node in graph.nodes:
        if node.op == "call_function" and not touches(node, mutated):
            _shorten(node)
    seen: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            key = _contents(recorder.constants[str(node.target)])
        elif node.op == "call_function" and not (touches(node, mutated) or is_random(node)):
            key = _key(node)
        else:
            continue
        same = seen.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and not must_run(node):
            graph.erase_node(node)


def _stack_writes(graph: fx.Graph) -> None:
    """Replace writes to elements of a new tensor by one stack of these elements, in place.

    :param graph: graph of a function whose writes ``torch.func.functionalize`` replaced by new
        tensors.
    :raises Untraceable: if other writes are left.
    """
    for node in list(graph.nodes):
        if node.target is aten.copy.default and _is_alike(node, node.args[1]):
            node.replace_all_uses_with(node.args[1])
        elif node.target is aten.slice_scatter.default:  # vmap refuses an end beyond the tensor
            written, part, dim, start, end, *step = node.args
            node.args = (written, part, dim, start, min(end, node.meta["shape"][dim]), *step)
    for node in list(graph.nodes):
        if node.target is aten.select.int:
            source, dim, index = node.args
            written, source = _writes(source, dim)
            node.args = (source, dim, index)
            size = source.meta["shape"][dim]
            if (part := written.get(index % size)) is not None:
                node.replace_all_uses_with(part)
        elif node.target is aten.select_scatter.default:
            dim = node.args[2]
            written, source = _writes(node, dim)
            with graph.inserting_before(node):
                parts = [
                    written.get(i) or _selected(graph, source, dim, i)
                    for i in range(node.meta["shape"][dim])
                ]
                stack = graph.call_function(aten.stack.default, (parts, dim))
            stack.meta.update(node.meta)
            node.replace_all_uses_with(stack, lambda user: user.target not in _ELEMENTWISE)
    graph.eliminate_dead_code()
    if any(node.target in _WRITES for node in graph.nodes):
        raise Untraceable("it changes tensors in place")


def _writes(node: fx.Node, dim: int) -> tuple[dict[int, fx.Node], fx.Node]:
    """Return what was written along a dimension, by place, and the tensor before these writes."""
    found: dict[int, fx.Node] = {}
    while node.target is aten.select_scatter.default and node.args[2] == dim:
        before, part, _, index = node.args
        found.setdefault(index % node.meta["shape"][dim], part)  # type: ignore[arg-type]
        node = before  # type: ignore[assignment]
    return found, node


def _selected(graph: fx.Graph, source: fx.Node, dim: int, index: int) -> fx.Node:
    found = graph.call_function(aten.select.int, (source, dim, index))
    shape, stride = list(source.meta["shape"]), list(source.meta["stride"])
    del shape[dim], stride[dim]
    found.meta.update(source.meta, shape=torch.Size(shape), stride=tuple(stride))
    return found


def _make_functional(nodes: Sequence[fx.Node]) -> bool:
    """Replace writes by new tensors, if each of the nodes is a write to the one before it."""
    new: list[Any] = []
    for before, node in pairwise(nodes):
        if not isinstance(node.target, Operation) or node.args[:1] != (before,):
            return False
        schema = schema_of(node.target)
        if not schema.name.endswith("_"):
            return False
        # A write keeps its dtype, where a new tensor would be promoted.
        if {n.meta["dtype"] for n in node.all_input_nodes} - {node.meta["dtype"], torch.bool}:
            return False
        functional = getattr(aten, schema.name.removeprefix("aten::")[:-1], None)
        name = schema.overload_name or "default"
        if functional is None or name not in functional.overloads():
            return False
        new.append(getattr(functional, name))
    if nodes[0].op != "call_function" or must_run(nodes[0]):
        return False
    for node, target in zip(nodes[1:], new, strict=True):
        node.target = target
    return True


def _shorten(node: fx.Node) -> None:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return
    source, target = node.args[0], node.target
    if target in _ALIASES:
        node.replace_all_uses_with(source)
    elif target in _NO_CHANGE and _is_alike(node, source):
        node.replace_all_uses_with(source)
    elif target in RESHAPES and source.target in RESHAPES:
        root = source.args[0]
        assert isinstance(root, fx.Node)
        if root.meta["stride"] == torch.empty(root.meta["shape"], device="meta").stride():
            node.args = (root, *node.args[1:])
            if _is_alike(node, root):
                node.replace_all_uses_with(root)


def _is_alike(node: fx.Node, source: fx.Node) -> bool:
    return all(node.meta[k] == source.meta[k] for k in ("shape", "stride", "dtype", "device")) and (
        node.target is not aten.as_strided.default
    )


def _key(node: fx.Node) -> Any:
    def freeze(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *map(freeze, value))
        return (type(value), value) if not isinstance(value, float) else ("float", value.hex())

    return node.target, freeze(node.args), tuple((k, freeze(v)) for k, v in node.kwargs.items())


def _contents(tensor: Tensor) -> Any:
    """Return a key that is the same for small constants of the same kind and contents."""
    is_known = _is_plain(tensor) and tensor.device.type != "meta"
    if not is_known or tensor.numel() > RECORDINGS.largest_compared:
        return id(tensor)
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    kind = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    return *kind, bytes(flat.view(torch.uint8).tolist())


class Guard:
    """Notices changes of what a recording holds constant: tensors, and the contents of modules.

    A tensor that begins to have a gradient, as of an unfrozen layer, counts as changed.

    :param captured: constant tensors, with their versions.
    :param modules: modules whose parameters, buffers, submodules and modes must stay the same.
    """

    def __init__(
        self, captured: Iterable[tuple[Tensor, int]], modules: Iterable[nn.Module]
    ) -> None:
        self._captured = [(tensor, version, tensor.requires_grad) for tensor, version in captured]
        self._entries: list[tuple[dict[str, Any], str, Any]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        for module in modules:
            for part in module.modules():
                self._modes.append((part, part.training))
                for entries in (part._parameters, part._buffers, part._modules):
                    self._entries += [(entries, name, value) for name, value in entries.items()]

    def holds(self) -> bool:
        """Tell whether nothing was replaced or written to."""
        return (
            all(
                tensor._version == version and tensor.requires_grad == has_gradient
                for tensor, version, has_gradient in self._captured
            )
            and all(entries.get(name) is value for entries, name, value in self._entries)
            and all(module.training == mode for module, mode in self._modes)
        )


class RecordedFunction:
    """A recorded function of tensors, without the overhead of Python, Pyro and autograd.

    On a GPU it is a CUDA graph, if all that it computes is there.

    Random draws are the same as those of the function until :meth:`compile`, and results are the
    same up to rounding, which a long graph that
    :class:`~pyro_implicit.compiled.fusion.FusedGraph` shortens changes most.

    **Example:**

    >>> x, y = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    >>> recorded = RecordedFunction(lambda: torch.autograd.grad(x.square().sum(), x), [x])
    >>> recorded([y])
    [tensor([6., 6.])]

    :param function: a function without arguments, which reads the very objects ``inputs``.
    :param inputs: the tensors that may differ between calls.
    :param modules: modules that it reads, whose parameters and buffers stay the same objects.
    :param writable: the inputs that it may change in place.
    :raises Untraceable: naming the cause.
    """

    def __init__(
        self,
        function: Callable[[], Sequence[Tensor]],
        inputs: Sequence[Tensor],
        modules: Iterable[nn.Module] = (),
        writable: Sequence[Tensor] = (),
    ) -> None:
        keep_freed_memory(RECORDINGS.kept_memory, RECORDINGS.largest_kept)
        recorder = record(function, inputs, writable)
        simplify(recorder)
        if len(recorder.graph.nodes) > RECORDINGS.least_operations:
            fused = FusedGraph(recorder)
            if fused.pays:  # recorded again, as one kernel after the other
                recorder = record(lambda: fused(inputs), inputs, writable)
                simplify(recorder)
        self.graph, self._constants = recorder.graph, recorder.constants
        self._guard = Guard(recorder.captured, modules)
        self._recorded = replayed(as_function(self.graph, self._constants), self.graph, inputs)
        self._run = self._recorded
        self._break_even: float | None = None

    def holds(self) -> bool:
        """Tell whether the tensors that it holds constant are unchanged."""
        return self._guard.holds()

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the function's results for other inputs of the same shapes, without autograd."""
        return self._run(inputs)

    def compile(self, inputs: Sequence[Tensor]) -> None:
        """Compile the recording with inductor, which takes seconds to a minute.

        :param inputs: example inputs.
        :raises CompilerError: if there is no compiler, or it fails.
        """
        compiled = compile_graph(self.graph, self._constants, inputs)
        self._run = replayed(compiled, self.graph, inputs)

    @property
    def is_compiled(self) -> bool:
        """Whether inductor has compiled it."""
        return self._run is not self._recorded

    def undo_compilation(self) -> None:
        """Run as recorded again, from now on."""
        self._run, self._break_even = self._recorded, math.inf

    def repays_compilation(self, num_calls: int) -> bool:
        """Tell whether inductor would have saved as many seconds as its compilation takes.

        However many calls follow, compiling then costs little more than it saves. The seconds are
        counted by operations and their sizes, so that equal runs are compiled at the same call.

        :param num_calls: the calls so far. Never enough without a C++ compiler, in a process of
            ``multiprocessing``, and on a GPU, where a CUDA graph does most of it.
        """
        if multiprocessing.parent_process() is not None:
            return False
        if self._break_even is None:
            self._break_even = _calls_until_break_even(self.graph)
        return num_calls >= self._break_even


class FusedFunction:
    """A function of one tensor, recorded once and fused. It is differentiable.

    :param function: a function without side effects.
    :param like: an example of its argument.
    :raises Untraceable: naming the cause, if it cannot be recorded, its gradient cannot be repeated
        from its operations, or fusion does not make it much shorter.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], like: Tensor) -> None:
        recorder, result = _record_one(function, like)
        graph = recorder.graph
        if any(tensor.requires_grad for tensor, _ in recorder.captured):
            raise Untraceable("it has parameters")
        if any(node.target is aten.detach.default and node.users for node in graph.nodes):
            raise Untraceable("it detaches tensors from their gradient")
        custom = torch.autograd.function.BackwardCFunction  # whose operations are unknown
        if any(isinstance(node, custom) for node in graph_functions(result)):
            raise Untraceable("it has gradients of its own")
        if any(map(is_random, graph.nodes)):
            raise Untraceable("it is random")
        simplify(recorder)
        if recorder.mutated:
            recorder, _ = _record_one(torch.func.functionalize(function), like)
            _stack_writes(recorder.graph)
            simplify(recorder)
        if recorder.mutated:
            raise Untraceable("it changes tensors in place")
        self._fused, self._guard = FusedGraph(recorder), Guard(recorder.captured, ())
        if not self._fused.pays:
            raise Untraceable("its operations differ")

    def holds(self) -> bool:
        """Tell whether the tensors that it holds constant are unchanged."""
        return self._guard.holds()

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the function's result for another tensor of the same shape."""
        return self._fused([tensor])[0]


def _record_one(function: Callable[[Tensor], Tensor], like: Tensor) -> tuple[Recorder, Tensor]:
    results: list[Tensor] = []

    def once() -> list[Tensor]:
        results.append(function(example))
        return results

    with torch.enable_grad():
        example = like.detach().clone().requires_grad_()
        return record(once, [example]), results[0]


class RandomState:
    """The states of torch's generators alone, as each recorded step reads them."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Set the generators back to these states."""
        torch.set_rng_state(self._cpu)
        if self._gpus:
            torch.cuda.set_rng_state_all(self._gpus)


def has_compiler() -> bool:
    """Tell whether inductor's C++ compiler is there: that of ``CXX``, or g++."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def _calls_until_break_even(graph: fx.Graph) -> float:
    """Return the calls after which inductor has saved the time of its compilation."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and "shape" in node.meta]
    is_possible = has_compiler() and all(node.meta["device"].type == "cpu" for node in nodes)
    sizes = [node.meta["shape"].numel() for node in nodes if not _is_view(node)]
    elements = sum(size for size in sizes if size >= RECORDINGS.large_result)
    if not is_possible or elements == 0:
        return math.inf
    seconds = RECORDINGS.compilation + RECORDINGS.compilation_per_operation * len(nodes)
    return seconds / (RECORDINGS.saved_per_element * elements)


def _is_view(node: fx.Node) -> bool:
    return any(one.meta.get("storage") == node.meta["storage"] for one in node.all_input_nodes)


class CompilerError(RuntimeError):
    """There is no compiler, or it fails."""


def compile_graph(
    graph: fx.Graph, constants: dict[str, Tensor], inputs: Sequence[Tensor]
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Compile a graph into few kernels, whose random draws are those of torch's generator.

    Inductor keeps its kernels on disk (``TORCHINDUCTOR_CACHE_DIR``), so that another process that
    compiles the same graph finds them there.

    :param graph: the graph of a :class:`~pyro_implicit.compiled.recorder.Recorder`.
    :param constants: its constants, by its ``get_attr`` nodes.
    :param inputs: example inputs.
    :returns: a function of the list of inputs, without autograd.
    :raises CompilerError: if there is no compiler, or it fails.
    """
    module, held = _without_attributes(graph, constants)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            # Parameters and plain tensors would be compiled apart.
            return list(compiled(*(tensor.detach() for tensor in inputs), *held))

    try:
        with same_streams(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own internals
            compiled = torch.compile(module, fullgraph=True, options={"fallback_random": True})
            run([tensor.clone() for tensor in inputs])
    except Exception as error:  # of torch and of compilers, of many kinds
        raise CompilerError(first_line(error)) from error
    return run


def _without_attributes(
    graph: fx.Graph, constants: dict[str, Tensor]
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return a copy of a graph that has its constants as further inputs, and these."""
    copy = fx.Graph()
    output = copy.graph_copy(graph, {})
    copy.output(output)
    held = []
    for node in list(copy.nodes):
        if node.op == "get_attr":
            held.append(constants[str(node.target)])
            with copy.inserting_before(node):
                node.replace_all_uses_with(copy.placeholder(node.name))
            copy.erase_node(node)
    return fx.GraphModule({}, copy), held
