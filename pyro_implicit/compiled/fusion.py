# SPDX-License-Identifier: Apache-2.0
"""Horizontal fusion: equal operations of a recorded graph, such as those of a loop, become one."""

from __future__ import annotations

import functools
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, fx

from pyro_implicit.compiled.policy import RECORDINGS
from pyro_implicit.compiled.recorder import (
    ACTIVE,
    Operation,
    Recorder,
    must_run,
    schema_of,
    touches,
)
from pyro_implicit.runtime.trees import flatten, unflatten

__all__ = ["RESHAPES", "FusedGraph"]

aten = torch.ops.aten
_SUMS = {aten.add.Tensor, aten.sub.Tensor}
RESHAPES = {aten.view.default, aten._unsafe_view.default}
Node = Any  #: An ``fx.Node``, whose arguments have too many types to name.
Values = dict[Any, Any]
Step = Callable[[Values], None]


class FusedGraph:
    """A recorded graph whose independent, equal operations run as one operation on stacked tensors.

    Nodes of the same operation, shapes and distance from the inputs (or from the outputs) form a
    group: its operands are stacked, and :func:`torch.func.vmap` runs the operation once. Chains of
    additions become one sum, so that the terms of a loop have the same distance from the total. The
    function is differentiable, and its results differ from those of the graph by rounding.

    **Example:**

    >>> from pyro_implicit.compiled.recorder import record
    >>> x = torch.arange(20.0)
    >>> recorder = record(lambda: [sum(x[i].exp() * i for i in range(20))], [x])
    >>> fused = FusedGraph(recorder)
    >>> fused.pays
    True
    >>> torch.isclose(fused([x])[0], (x.exp() * x).sum())
    tensor(True)

    :param recorder: recorder of a function, simplified or not.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._captured = recorder.captured
        self._planner = _Planner(recorder)
        self.num_nodes, self._least = len(self._planner.deps), self._planner.least_steps

    @cached_property
    def _plan(self) -> tuple[list[Step], list[Node], Callable[[Values], Any]]:
        planner = self._planner
        del self._planner  # the recording, which no call needs
        return planner.plan()

    @property
    def num_steps(self) -> int:
        """The number of operations now."""
        return len(self._plan[0])

    @property
    def pays(self) -> bool:
        """Whether the graph is much shorter now."""
        most = RECORDINGS.fused_share * self.num_nodes
        return self._least < most and self.num_steps < most

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the results for other inputs of the same shapes."""
        if ACTIVE.recorder is not None:  # stacked constants are copies, which do not change
            ACTIVE.recorder.captured += self._captured
        steps, names, read = self._plan
        values: Values = dict(zip(names, inputs, strict=True))
        for step in steps:
            step(values)
        return read(values)


class _Planner:
    """Decides which nodes run together, and in which order."""

    def __init__(self, recorder: Recorder) -> None:
        self.graph, self.constants = recorder.graph, recorder.constants
        self.fixed = {
            node for node in self.graph.nodes if touches(node, recorder.mutated) or must_run(node)
        }
        self.sums = self._find_sums()
        #: The nodes that are computed, with the nodes that they need.
        self.deps: dict[Node, list[Node]] = {}
        last: list[Node] = []  # the latest node with an effect
        before: dict[Node, list[Node]] = {}
        for node in self.graph.nodes:
            if node.op == "call_function" and node not in self._inner:
                terms = self.sums.get(node)
                self.deps[node] = terms[0] + terms[1] if terms else list(node.all_input_nodes)
                if node in self.fixed:
                    before[node], last = last, [node]
        self.number = {node: i for i, node in enumerate(self.deps)}
        edges = [
            (i, self.number[one])
            for node, i in self.number.items()
            for one in self.deps[node] + before.get(node, [])
            if one in self.number
        ]
        #: Pairs of numbers of a node and of one that must run before it.
        self.edges = np.array(edges, dtype=np.intp).reshape(-1, 2)
        #: For each node of a group: the stacked tensor that holds it, and its row there.
        self.place: dict[Node, tuple[Any, int]] = {}
        self.steps: list[Step] = []
        #: Rows of the stacked tensors that exist.
        self.size: dict[Any, int] = {}

    def plan(self) -> tuple[list[Step], list[Node], Callable[[Values], Any]]:
        """Return the steps, the inputs, and the function that reads the outputs."""
        for unit in self._ordered(self._refined(self._groups)):
            node = unit[0]
            if len(unit) > 1 and node in self.sums:
                self._add_sums(unit)
            elif len(unit) > 1:
                self._add_group(unit)
            elif node in self.sums:
                signed = (sorted(terms, key=self._row) for terms in self.sums[node])
                self._add(node, _sum, tuple(self._stack(terms) for terms in signed))
            else:
                self._add(node, *_call_of(node))
        outputs = next(node for node in self.graph.nodes if node.op == "output").args[0]
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        return self.steps, inputs, self._getter(list(outputs))

    def _find_sums(self) -> dict[Node, tuple[list[Node], list[Node]]]:
        """Return the terms of long chains of additions and subtractions, by the last of these."""
        self._inner: set[Node] = set()
        sums = {}
        for root in reversed(self.graph.nodes):
            if root in self._inner or not self._is_sum(root):
                continue
            terms: tuple[list[Node], list[Node]] = [], []
            inner: set[Node] = set()
            todo = [(root, 0)]
            while todo:
                node, sign = todo.pop()
                if node is root or (
                    self._is_sum(node) and len(node.users) == 1 and node not in inner
                ):
                    inner.add(node)
                    one, other = node.args
                    todo += [(other, sign ^ (node.target is aten.sub.Tensor)), (one, sign)]
                else:
                    terms[sign].append(node)
            if len(inner) >= RECORDINGS.fused_terms and not inner.intersection(*terms):
                sums[root] = terms
                self._inner |= inner - {root}
        return sums

    def _is_sum(self, node: Node) -> bool:
        return (
            node.target in _SUMS
            and node.meta["dtype"].is_floating_point
            and not node.kwargs
            and node not in self.fixed
            and all(
                isinstance(arg, fx.Node)
                and (arg.meta["shape"], arg.meta["dtype"])
                == (node.meta["shape"], node.meta["dtype"])
                for arg in node.args
            )
        )

    def _signature(self, node: Node) -> Any:
        """Return what the nodes of a group have in common; None for a node that runs alone."""
        target = node.target
        if (part := _part_of(node)) is not None and node not in self.fixed:
            return *part[:2], node.meta["shape"]
        if node in self.sums:
            return "sum", *map(len, self.sums[node]), _kind(node)
        if (
            not isinstance(target, Operation)
            or node in self.fixed
            or "shape" not in node.meta
            or any(isinstance(arg, fx.Node) for arg in node.kwargs.values())
        ):
            return None
        if target in RESHAPES:
            return target, _kind(node.args[0]), node.meta["shape"]
        parts = []
        for arg, declared in zip(node.args, schema_of(target).arguments, strict=False):
            if isinstance(arg, (list, tuple)) and any(isinstance(one, fx.Node) for one in arg):
                return None
            is_number = isinstance(arg, float) and str(declared.type) == "Tensor"
            parts.append("number" if is_number else _kind(arg))
        return target, tuple(parts), tuple((key, _kind(arg)) for key, arg in node.kwargs.items())

    @property
    def least_steps(self) -> int:
        """The number of steps if all groups stay whole; it costs little."""
        return len(self.deps) - sum(len(group) - 1 for group in self._groups)

    @cached_property
    def _groups(self) -> list[list[Node]]:
        """Groups of nodes that may run together without a cycle."""
        signatures = {node: self._signature(node) for node in self.deps}
        schemes = []
        for level in self._levels():
            classes: dict[Any, list[Node]] = defaultdict(list)
            for node, signature in signatures.items():
                if signature is not None:
                    # The parts of a tensor need this tensor alone.
                    rank = level[node] if _part_of(node) is None else None
                    classes[signature, rank].append(node)
            schemes.append([one for one in classes.values() if len(one) >= RECORDINGS.fused_nodes])
        groups: list[list[Node]] = []
        grouped: set[Node] = set()
        for scheme in sorted(schemes, key=lambda one: -sum(map(len, one))):
            rest = [[node for node in group if node not in grouped] for group in scheme]
            rest = [group for group in rest if len(group) >= RECORDINGS.fused_nodes]
            together = self._is_acyclic([*groups, *rest])
            for group in sorted(rest, key=len, reverse=True):
                if together or self._is_acyclic([*groups, group]):
                    groups.append(group)
                    grouped.update(group)
        return groups

    def _levels(self) -> Iterator[dict[Node, int]]:
        """Yield the distances of all nodes from the outputs, and from the inputs."""
        height: dict[Node, int] = defaultdict(int)
        for node, deps in reversed(self.deps.items()):
            for one in deps:
                height[one] = max(height[one], height[node] + 1)
        yield height
        depth: dict[Node, int] = defaultdict(int)
        for node, deps in self.deps.items():
            depth[node] = 1 + max((depth[one] for one in deps), default=0)
        yield depth

    def _refined(self, groups: list[list[Node]]) -> list[list[Node]]:
        """Split groups whose operands come from different groups, as these would be mixed."""
        own: dict[Node, Any] = {}
        refined = []
        for group in self._ordered(groups):
            parts: dict[Any, list[Node]] = defaultdict(list)
            for node in group:
                parts[self._origin(node, own)].append(node)
            for origin, part in parts.items():
                if origin is not None and len(part) >= RECORDINGS.fused_nodes:
                    refined.append(part)
                    own.update(dict.fromkeys(part, part[0]))
        return refined

    def _origin(self, node: Node, own: dict[Node, Any]) -> Any:
        """Return the groups of a node's operands; None for a sum with a term in no group."""
        if node not in self.sums:
            return tuple(own.get(one) for one in node.all_input_nodes)
        counts = [Counter(own.get(one) for one in terms) for terms in self.sums[node]]
        if any(None in count for count in counts):
            return None
        return tuple(frozenset(count.items()) for count in counts)

    def _ordered(self, groups: list[list[Node]]) -> list[list[Node]]:
        """Return groups and single nodes, each after what it needs."""
        unit = self._units(groups)
        members = {self.number[group[0]]: group for group in groups}
        users: list[list[int]] = [[] for _ in unit]
        missing = [0] * len(unit)
        for user, need in unit[self.edges].tolist():
            users[need].append(user)
            missing[user] += 1
        # A unit's rank is the place of its first node.
        ready = [int(one) for one in np.unique(unit) if missing[one] == 0]
        ordered = []
        nodes = list(self.deps)
        while ready:
            own = heapq.heappop(ready)
            ordered.append(members.get(own, [nodes[own]]))
            for one in users[own]:
                missing[one] -= 1
                if missing[one] == 0:
                    heapq.heappush(ready, one)
        return ordered

    def _is_acyclic(self, groups: list[list[Node]]) -> bool:
        """Return whether groups can be ordered."""
        unit = self._units(groups)
        users, needs = unit[self.edges].T
        if (users == needs).any():
            return False
        links = coo_array((np.ones(len(users)), (users, needs)), shape=(len(unit), len(unit)))
        number = connected_components(links, connection="strong", return_labels=False)
        return bool(number == len(unit))

    def _units(self, groups: list[list[Node]]) -> np.ndarray:
        """Return the number of the first node of each node's group."""
        unit = np.arange(len(self.number))
        for group in groups:
            unit[[self.number[node] for node in group]] = self.number[group[0]]
        return unit

    def _add(self, key: Any, run: Callable, args: Any, kwargs: Any = MappingProxyType({})) -> None:
        get = self._getter((tuple(args), dict(kwargs)))

        def step(values: Values) -> None:
            args, kwargs = get(values)
            values[key] = run(*args, **kwargs)

        self.steps.append(step)

    def _add_group(self, group: list[Node]) -> None:
        first, key = group[0], ("group", group[0])
        shape = first.meta["shape"]
        if (part := _part_of(first)) is not None:
            source, dim, _ = part
            starts = {node: _part_of(node)[2] for node in group}  # type: ignore[index]
            group = sorted(group, key=starts.__getitem__)
            length = None if first.target is aten.select.int else shape[dim]
            rows = [starts[node] + i for node in group for i in range(length or 1)]
            index = _index(rows, source)
            self._add(key, _take, (source, dim, index, length))
        else:
            group = sorted(group, key=self._row)
            run, arguments, kwargs = _call_of(first)
            args, ranks = list(arguments), []
            dims: list[int | None] = [None] * len(args)
            for i, arg in enumerate(first.args):
                operands = [node.args[i] for node in group]
                if isinstance(arg, fx.Node) and len(set(operands)) > 1:
                    (args[i],) = self._stack(operands)  # of one group, see `_refined`
                    ranks.append(len(arg.meta["shape"]))
                elif isinstance(arg, float) and len(set(operands)) > 1:
                    numbers = torch.tensor(operands, dtype=torch.float64).to(
                        first.meta["device"], _real(first.all_input_nodes[0], first)
                    )
                    args[i] = numbers.reshape(-1, *(1,) * len(shape))
                    ranks.append(len(shape))
                else:
                    continue
                dims[i] = 0
            is_plain = torch.Tag.pointwise in getattr(run, "tags", ())
            is_plain &= len({node.meta["dtype"] for node in first.all_input_nodes}) == 1
            if not (is_plain and all(rank == len(shape) for rank in ranks)):
                run = functools.partial(_vectorized, run, tuple(dims))
            self._add(key, run, args, kwargs)
        self.size[key] = len(group)
        self.place.update((node, (key, i)) for i, node in enumerate(group))

    def _add_sums(self, sums: list[Node]) -> None:
        """Add sums whose terms are rows of the same stacked tensors, such as moving sums."""
        key = "group", sums[0]
        signed: tuple[list[_Value], list[_Value]] = ([], [])
        for sign, pieces in enumerate(signed):
            rows: dict[Any, list[int]] = defaultdict(list)
            for node in sums:
                for group, row in sorted(
                    (self.place[term] for term in self.sums[node][sign]), key=lambda place: place[1]
                ):
                    rows[group].append(row)
            for group, some in rows.items():
                piece = "sums", sums[0], sign, group
                index = torch.tensor(some, device=sums[0].meta["device"])
                self._add(piece, _take, (_Value(group), 0, index, len(some) // len(sums)))
                pieces.append(_Value(piece))
        self._add(key, functools.partial(_sum, dim=1), signed)
        self.size[key] = len(sums)
        self.place.update((node, (key, i)) for i, node in enumerate(sums))

    def _row(self, node: Node) -> int:
        """Return the row of a node or of its first stacked operand, to keep the order of rows."""
        near = (node, *node.all_input_nodes)
        return next((self.place[one][1] for one in near if one in self.place), 0)

    def _stack(self, nodes: list[Node]) -> list[_Value]:
        """Return tensors that have these nodes as rows, those of one group together."""
        parts: dict[Any, list[Node]] = defaultdict(list)
        for node in nodes:
            parts[self.place[node][0] if node in self.place else None].append(node)
        pieces = []
        for group, some in parts.items():
            key: Any = ("rows", *some)
            if group is not None:
                index = _index([self.place[node][1] for node in some], some[0])
                if index == slice(0, self.size[group]):
                    key = group
                else:
                    self._add(key, _take, (_Value(group), 0, index))
            elif all(node.op == "get_attr" for node in some):
                constant = torch.stack([self.constants[str(node.target)] for node in some])
                self._add(key, lambda value: value, (constant,))
            else:
                self._add(key, torch.stack, (some,))
            pieces.append(_Value(key))
        return pieces

    def _getter(self, structure: Any) -> Callable[[Values], Any]:
        """Return a function that puts values in place of the nodes of a structure."""
        leaves, spec = flatten(structure)
        found: list[tuple[int, Any, int | None]] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, _Value):
                found.append((i, leaf.key, None))
            elif isinstance(leaf, fx.Node) and leaf.op == "get_attr":
                leaves[i] = self.constants[str(leaf.target)]
            elif isinstance(leaf, fx.Node) and leaf in self.place:
                group, row = self.place[leaf]
                key = "parts", group
                if key not in self.size:
                    self.size[key] = self.size[group]
                    self._add(key, torch.unbind, (_Value(group),))
                found.append((i, key, row))
            elif isinstance(leaf, fx.Node):
                found.append((i, leaf, None))

        def get(values: Values) -> Any:
            filled = list(leaves)
            for i, key, row in found:
                filled[i] = values[key] if row is None else values[key][row]
            return unflatten(filled, spec)

        return get


class _Value:
    """A tensor of an earlier step."""

    def __init__(self, key: Any) -> None:
        self.key = key


def _call_of(node: Node) -> tuple[Callable, tuple, dict[str, Any]]:
    if node.target in RESHAPES:  # stacked tensors may have other strides
        return aten.reshape.default, (node.args[0], list(node.meta["shape"])), {}
    return _IN_GROUPS.get(node.target, node.target), node.args, node.kwargs


def _log_sigmoid_backward(gradient: Tensor, value: Tensor, buffer: Tensor) -> Tensor:
    # torch's own does not broadcast: it makes a result of the gradient's shape, and warns.
    return gradient * (-value).sigmoid()


def _copy(value: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(value).expand_as(value)  # ``vmap`` has no rule for torch's own


#: Replacements of operations that are slow, or warn, with stacked tensors.
_IN_GROUPS: dict[Any, Callable] = {
    aten.log_sigmoid_backward.default: _log_sigmoid_backward,
    aten.copy.default: _copy,
}


def _kind(arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        return arg.meta["shape"], arg.meta["dtype"], arg.meta["device"]
    if isinstance(arg, (list, tuple)):
        return tuple(map(_kind, arg))
    return type(arg), arg.hex() if isinstance(arg, float) else arg


def _real(node: Node, other: Node) -> torch.dtype:
    dtypes = (one.meta["dtype"] for one in (node, other))
    return next(dtype for dtype in dtypes if dtype.is_floating_point)


def _part_of(node: Node) -> tuple[Node, int, int] | None:
    """Return the tensor of which a node is a part, the dimension, and the first element."""
    if node.target is aten.select.int:
        source, dim, start = node.args
    elif node.op == "call_function" and not isinstance(node.target, Operation):
        split, i = node.args
        if split.target is not aten.split_with_sizes.default:
            return None
        source, sizes, dim = (*split.args, 0)[:3]
        start = sum(sizes[:i])
    else:
        return None
    dim %= len(source.meta["shape"])
    return source, dim, start % source.meta["shape"][dim]


def _index(rows: list[int], like: Node) -> Tensor | slice:
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=like.meta["device"])


def _take(source: Tensor, dim: int, index: Tensor | slice, length: int | None = None) -> Tensor:
    """Return parts of a tensor along a dimension, stacked; of ``length`` elements each."""
    if not isinstance(index, slice):
        source = source.index_select(dim, index)
    elif index != slice(0, source.shape[dim]):
        source = source.narrow(dim, index.start, index.stop - index.start)
    if length is not None:
        source = source.unflatten(dim, (-1, length))
    return source.movedim(dim, 0)


def _sum(terms: list[Tensor], subtracted: list[Tensor], dim: int = 0) -> Tensor:
    added, taken = ([piece.sum(dim) for piece in pieces] for pieces in (terms, subtracted))
    return functools.reduce(torch.sub, [functools.reduce(torch.add, added), *taken])


def _vectorized(run: Callable, dims: tuple, *args: Any, **kwargs: Any) -> Tensor:
    return torch.func.vmap(lambda *some: run(*some, **kwargs), in_dims=dims)(*args)
