# SPDX-License-Identifier: Apache-2.0
"""Nested dicts, lists and tuples of tensors and other leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from torch.fx.immutable_collections import immutable_dict, immutable_list

__all__ = ["flatten", "leaves_by_path", "leaves_of", "map_tree", "unflatten"]

MAPPINGS = (dict, OrderedDict, immutable_dict)
SEQUENCES = (list, tuple, immutable_list)


def _keys(tree: Any) -> Iterable[Any] | None:
    """Return the keys of a container's parts, None for a leaf."""
    kind = type(tree)
    if kind in MAPPINGS:
        return tree
    is_named = issubclass(kind, tuple) and (
        hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")  # of C, as of torch.max
    )
    return range(len(tree)) if kind in SEQUENCES or is_named else None


def leaves_by_path(tree: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Yield each leaf after its path, a tuple of keys and indices.

    Subclasses of dict and list are leaves, except those of the standard library's
    ``OrderedDict`` and of ``torch.fx``.

    **Example:**

    >>> list(leaves_by_path({"a": [1, 2], "b": 3}))
    [(('a', 0), 1), (('a', 1), 2), (('b',), 3)]
    """
    keys = _keys(tree)
    if keys is None:
        yield path, tree
    else:
        for key in keys:
            yield from leaves_by_path(tree[key], (*path, key))


def leaves_of(tree: Any) -> list[Any]:
    """Return all leaves in their order."""
    return flatten(tree)[0]


def flatten(tree: Any) -> tuple[list[Any], Hashable]:
    """Return the leaves, and the structure for :func:`unflatten`; equal trees have equal ones."""
    leaves: list[Any] = []
    return leaves, _visit(tree, leaves)


# Not inside of the function: a closure that calls itself would keep all leaves until gc runs.
def _visit(tree: Any, leaves: list[Any]) -> Hashable:
    keys = _keys(tree)
    if keys is None:
        leaves.append(tree)
        return None
    return type(tree), tuple(keys), tuple([_visit(tree[key], leaves) for key in keys])


def unflatten(leaves: Iterable[Any], structure: Any) -> Any:
    """Build the tree of a structure from its leaves."""
    return _build(structure, iter(leaves))


def _build(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return next(leaves)
    kind, keys, structures = structure
    parts = [_build(part, leaves) for part in structures]
    if kind in MAPPINGS:
        return kind(zip(keys, parts, strict=True))
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def map_tree(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return the tree of a function's values at the leaves of trees of one structure.

    **Example:**

    >>> map_tree(lambda one, other: one + other, {"a": (1, 2)}, {"a": (3, 4)})
    {'a': (4, 6)}
    """
    leaves, structure = flatten(tree)
    return unflatten(map(fn, leaves, *map(leaves_of, others)), structure)
