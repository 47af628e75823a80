# SPDX-License-Identifier: Apache-2.0
"""Nested containers of tensors."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from pyro_implicit.runtime.trees import flatten, leaves_by_path, leaves_of, map_tree, unflatten

Pair = namedtuple("Pair", ["first", "second"])
LARGEST = torch.tensor([[1.0, 3.0]]).max(-1)


@pytest.mark.parametrize(
    ("tree", "number"),
    [
        ({"a": [1, (2, None)], "b": {}}, 3),
        (OrderedDict(b=1, a=[2]), 2),
        (Pair(1, [2, 3]), 3),
        (immutable_list([1, immutable_dict(a=2)]), 2),
        (torch.Size([2, 3]), 1),
        (slice(1, 2), 1),
        ("text", 1),
    ],
)
def test_a_tree_is_rebuilt_from_its_leaves(tree: Any, number: int) -> None:
    leaves, structure = flatten(tree)
    assert len(leaves) == number
    again = unflatten(leaves, structure)
    assert again == tree
    assert type(again) is type(tree)
    assert hash(structure) == hash(flatten(again)[1])


def test_results_of_torch_keep_their_fields() -> None:
    doubled = map_tree(lambda leaf: 2 * leaf, LARGEST)
    assert doubled.values.tolist() == [6.0]
    assert doubled.indices.tolist() == [2]


@pytest.mark.parametrize("other", [(1, 2), [1], [1, [2]], [1, 2, 3]])
def test_other_containers_and_numbers_of_parts_are_other_structures(other: Any) -> None:
    assert flatten(other)[1] != flatten([1, 2])[1]


def test_order_of_keys_counts_and_paths_name_them() -> None:
    tree = {"b": [1], "a": 2}
    assert leaves_of(tree) == [1, 2]
    assert list(leaves_by_path(tree)) == [(("b", 0), 1), (("a",), 2)]
    assert flatten(tree)[1] != flatten({"a": 2, "b": [1]})[1]
