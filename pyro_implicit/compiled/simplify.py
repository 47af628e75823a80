# SPDX-License-Identifier: Apache-2.0
"""A recorded graph without what changes nothing: bits and random draws stay the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["simplify"]

aten = torch.ops.aten
_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_SAME_SHAPE = {
    *(aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default),
    *(aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims, aten.slice.Tensor),
    *(aten.permute.default, aten.transpose.int, aten.t.default, aten.as_strided.default),
}
_COPIES = {aten._to_copy.default, aten.clone.default}
_RESHAPES = {aten.view.default, aten._unsafe_view.default}


def simplify(graph: fx.Graph, mutated: set[int]) -> None:
    """Leave out, in place, operations that do nothing, that were done before, or that nobody uses.

    Random draws stay, used or not, so that the generator's stream does.

    :param graph: of a :class:`~pyro_implicit.compiled.recorder.Recorder`.
    :param mutated: storages that its operations write to, of which all is left as it is.
    """
    for node in graph.nodes:
        if node.op == "call_function" and not _touches(node, mutated):
            _shorten(node)
    seen: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or _touches(node, mutated) or _is_random(node):
            continue
        same = seen.setdefault(_key(node), node)
        if same is not node:
            node.replace_all_uses_with(same)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and not _must_run(node):
            graph.erase_node(node)


def _shorten(node: fx.Node) -> None:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return
    source, target = node.args[0], node.target
    if target in _ALIASES:
        node.replace_all_uses_with(source)
    elif (target in _SAME_SHAPE or target in _COPIES) and _is_alike(node, source):
        node.replace_all_uses_with(source)
    elif target in _RESHAPES and source.target in _RESHAPES:
        root = source.args[0]
        assert isinstance(root, fx.Node)
        if root.meta["stride"] == _contiguous(root.meta["shape"]):
            node.args = (root, *node.args[1:])
            if _is_alike(node, root):
                node.replace_all_uses_with(root)


def _is_alike(node: fx.Node, source: fx.Node) -> bool:
    return all(node.meta[k] == source.meta[k] for k in ("shape", "stride", "dtype", "device")) and (
        node.target is not aten.as_strided.default
    )


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _touches(node: fx.Node, mutated: set[int]) -> bool:
    return any(n.meta.get("storage") in mutated for n in (node, *node.all_input_nodes)) or any(
        user.meta.get("storage") in mutated for user in node.users if _is_part(user)
    )


def _is_part(node: fx.Node) -> bool:
    return not isinstance(node.target, torch._ops.OpOverload)


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _must_run(node: fx.Node) -> bool:
    return _is_random(node) or (
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    )


def _key(node: fx.Node) -> Any:
    def freeze(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *map(freeze, value))
        return (type(value), value) if not isinstance(value, float) else ("float", value.hex())

    return node.target, freeze(node.args), tuple((k, freeze(v)) for k, v in node.kwargs.items())
