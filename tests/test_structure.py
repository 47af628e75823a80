# SPDX-License-Identifier: Apache-2.0
"""Structure: no cycles of files, numbers in policy modules, no private parts of torch."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pyro_implicit

ROOT = Path(pyro_implicit.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
NAMES = {
    ".".join(("pyro_implicit", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): file
    for file in FILES
}


def imports_of(file: Path) -> set[Path]:
    """The package's files that a file imports, inside functions and for types included."""
    found = set()
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found.add(NAMES.get(f"{node.module}.{alias.name}") or NAMES.get(node.module))
    return {one for one in found if one and one != file and one.name != "__init__.py"}


def test_no_files_import_each_other_in_a_cycle() -> None:
    graph = {file: imports_of(file) for file in FILES}
    while graph:  # remove files that import none of the remaining ones
        free = {file for file, others in graph.items() if not others & graph.keys()}
        if not free:
            break
        graph = {file: others - free for file, others in graph.items() if file not in free}
    assert not graph, sorted(str(file.relative_to(ROOT)) for file in graph)


def constants(tree: ast.Module) -> Iterator[str]:
    """The upper-case names of a module whose values contain numbers."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        numbers = [
            part
            for part in ast.walk(node.value)
            if isinstance(part, ast.Constant)
            and isinstance(part.value, int | float)
            and not isinstance(part.value, bool)
        ]
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        if numbers and all(name.isupper() for name in names):
            yield from names


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_numbers_that_decide_stand_in_policy_modules(file: Path) -> None:
    if not file.name.startswith("policy"):
        assert not list(constants(TREES[file]))


PRIVATE = {
    name
    for owner in (
        *(torch, torch.Tensor, torch.nn, torch.nn.Module(), torch.autograd, torch.fx, torch.cuda),
        *(torch.fx.Graph(), torch.fx.Node, torch.ops.aten.add.Tensor),
    )
    for name in dir(owner)
    if name.startswith("_") and not name.endswith("__")
} - {"_base", "_indices", "_stack"}  # names of Pyro's and our own, too
NEEDED = {
    # The official name, "Extending PyTorch" in torch's documentation.
    ("compiled/recorder.py", "torch.utils._python_dispatch"),
    # The counter of changes in place that "Autograd mechanics" describes.
    ("compiled/recorder.py", "_version"),
    ("compiled/program.py", "_version"),
    ("distributions/implicit.py", "_version"),
    # Lookups of these dictionaries see a replaced parameter; attributes of a PyroModule draw.
    ("compiled/program.py", "_parameters"),
    ("compiled/program.py", "_buffers"),
    ("compiled/program.py", "_modules"),
}


def private_parts(tree: ast.Module) -> Iterator[str]:
    """The private names of torch that a module uses, on other objects than its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            if any(part.startswith("_") for part in str(node.module).split(".")):
                yield str(node.module)
        elif isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            owner = ast.unparse(node.value)
            if owner not in ("self", "super()") and not owner.startswith(("torch.ops.", "aten")):
                yield node.attr


def test_no_private_parts_of_torch() -> None:
    found = {
        (file.relative_to(ROOT).as_posix(), name)
        for file, tree in TREES.items()
        for name in private_parts(tree)
    }
    assert found == NEEDED


def test_random_numbers_of_a_generator_state_its_device() -> None:
    """Without ``device=``, ``torch.set_default_device("cuda")`` asks for a generator there."""
    makers = {"empty", "rand", "randint", "randn", "randperm"}
    faults = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in FILES
        for node in ast.walk(TREES[file])
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in makers
        and {"generator"} == {key.arg for key in node.keywords} & {"generator", "device"}
    ]
    assert not faults, faults


def test_no_two_modules_or_classes_share_a_name() -> None:
    modules = Counter(file.stem for file in FILES if file.name not in ("__init__.py", "policy.py"))
    assert not [name for name, count in modules.items() if count > 1]
    classes = defaultdict(list)
    for file, tree in TREES.items():
        if file.parent.name == "kernels":  # which share the names of their parts
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in classes.items() if len(files) > 1}
