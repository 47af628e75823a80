# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: light to import, documented, its version told once."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path

import pyro.infer
import pytest

import pyro_implicit
from pyro_implicit.diagnostics import distances
from pyro_implicit.fitting import Fit
from pyro_implicit.guides import auto_implicit

ROOT = Path(__file__).parents[1]
MODULES = ["pyro_implicit"] + [
    module.name for module in pkgutil.walk_packages(pyro_implicit.__path__, "pyro_implicit.")
]


SCRIPT = """
import importlib, sys, warnings

warnings.simplefilter("error")
import pyro_implicit

print(*{name.split(".")[0] for name in sys.modules})
warnings.simplefilter("default")
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*{name.split(".")[0] for name in sys.modules})
"""


@pytest.fixture(scope="module")
def loaded() -> list[set[str]]:
    """What is in memory after the import of the package, and after that of all its modules."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, *MODULES],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    return [set(line.split()) for line in found.stdout.splitlines()]


def test_no_module_imports_test_tools(loaded: list[set[str]]) -> None:
    """pytest is a requirement of the tests only."""
    assert "pyro_implicit" in loaded[1] and not {"pytest", "_pytest"} & loaded[1]
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    (required,) = re.findall(r"install_requires=\[(.*?)\]", setup)
    assert "pytest" not in required


def test_imports_are_requirements() -> None:
    """Imports at the top of files need no extra; those within functions may."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    (required,) = re.findall(r"install_requires=\[(.*?)\]", setup)
    of_pyro = [one for one in importlib.metadata.requires("pyro-ppl") or [] if "extra" not in one]
    names = [*re.findall(r'"([\w-]+)', required), *re.findall(r"^[\w-]+", "\n".join(of_pyro), re.M)]
    known = {{"pyro-ppl": "pyro"}.get(name, name.replace("-", "_")) for name in names}
    found = set()
    for path in (ROOT / "pyro_implicit").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and path.name != "sklearn.py":
                found.add((node.module or "").split(".")[0])
    others = found - set(sys.stdlib_module_names) - {"pyro_implicit", "__future__"}
    assert {"torch", "pyro"} < others <= known


def test_import_stays_light(loaded: list[set[str]]) -> None:
    heavy = {"matplotlib", "pytest", "sklearn", "arviz", "pandas"}
    assert "pyro_implicit" in loaded[0] and not heavy & loaded[0]


@pytest.mark.parametrize("name", MODULES)
def test_module_says_what_it_offers(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    assert hasattr(module, "__all__"), f"{name} has no __all__"
    for public in module.__all__:
        assert hasattr(module, public), f"{name}.__all__ names {public}, which it does not have"


@pytest.mark.parametrize("name", sorted(set(pyro_implicit.__all__) - {"__version__"}))
def test_public_name_is_documented(name: str) -> None:
    # Not inspect.getdoc: a docstring inherited from torch or Pyro does not count.
    assert getattr(pyro_implicit, name).__doc__, f"pyro_implicit.{name} has no docstring"


def test_version_is_told_once() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[([^]]+)\]", changelog, re.MULTILINE)
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == pyro_implicit.__version__
    assert citation is not None and citation[1] == pyro_implicit.__version__


def test_readme_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of the README form one program; here with few steps and draws."""
    quick = {"num_samples": 200, "num_transitions": 2, "modes": None}
    for owner, name, budget in (
        (Fit, "diagnose", quick),
        (pyro_implicit, "diagnose", quick),
        (pyro_implicit, "refine", {"num_chains": 32, "max_gradients": 200}),
        (pyro.infer, "NUTS", {"max_tree_depth": 2}),
    ):
        limited = partialmethod if owner is Fit else partial
        monkeypatch.setattr(owner, name, limited(getattr(owner, name), **budget))
    monkeypatch.setattr(auto_implicit, "find_frame", lambda *args: None)
    monkeypatch.setattr(distances, "DISTANCES", replace(distances.DISTANCES, num_bootstrap=10))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    program = "".join(blocks)
    few = re.sub(r"\d_000", "20", program)
    assert few != program, "write the README's step counts as 3_000, for this test to cut"
    exec(compile(few, "<README.md>", "exec"), {"__name__": "readme"})
