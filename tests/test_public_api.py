# SPDX-License-Identifier: Apache-2.0
"""Names and signatures of all that is public, beside those in public_api.txt.

Where a change is meant, ``python tests/test_public_api.py`` writes that file anew; what was there
before and is no more, or has another signature, goes into CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).with_name("public_api.txt")
#: Those with a page in the reference; machinery has none.
PACKAGES = [f"pyro_implicit.{page.stem}" for page in sorted((ROOT / "docs" / "api").glob("*.rst"))]

MACHINERY = {"pyro_implicit.compiled", "pyro_implicit.runtime"}
#: Functions whose parameters are those of another.
SAME_AS = {"weighted_draws": "evidence_bound"}


class Shown:
    """A default value, printed without addresses and without the fields of a policy."""

    def __init__(self, value: Any) -> None:
        self.text = getattr(value, "__qualname__", repr(value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            self.text = f"{type(value).__name__}(...)"  # its fields have a line of their own
        if " at 0x" in self.text:
            self.text = type(value).__qualname__

    def __repr__(self) -> str:
        return self.text


def signature(function: Any) -> str:
    """Names, kinds and defaults; types may become wider."""
    found = inspect.signature(function)
    plain = [
        one.replace(
            annotation=one.empty,
            default=one.empty if one.default is one.empty else Shown(one.default),
        )
        for one in found.parameters.values()
    ]
    return str(found.replace(parameters=plain, return_annotation=found.empty))


def owner(cls: type, name: str) -> type | None:
    """The class that an attribute comes from, None if that is not the library's."""
    found = next((base for base in cls.__mro__ if name in vars(base)), object)
    return found if found.__module__.startswith("pyro_implicit") else None


def members(cls: type, public: set[Any]) -> Iterator[str]:
    """Public methods and properties, without those that a public base class has."""
    bases = [base for base in cls.__mro__[1:] if base in public]
    for name in sorted(dir(cls)):
        if name.startswith("_") or owner(cls, name) is None:
            continue
        value = inspect.getattr_static(cls, name)
        if any(value is inspect.getattr_static(base, name, None) for base in bases):
            continue
        if isinstance(value, (staticmethod, classmethod)):
            value = getattr(cls, name)
        if inspect.isroutine(value) and callable(value):
            yield f"{name}{signature(value)}"
        elif isinstance(value, (property, functools.cached_property)):
            yield name


def public_api() -> Iterator[str]:
    """One line for each name: a name that two packages offer has its signature once."""
    modules = [importlib.import_module(package) for package in (*PACKAGES, "pyro_implicit")]
    homes: dict[Any, str] = {}
    for module in modules:
        for name in module.__all__:
            if callable(getattr(module, name)):
                homes.setdefault(getattr(module, name), f"{module.__name__}.{name}")
    for module in modules:
        for name in sorted(module.__all__):
            value, full = getattr(module, name), f"{module.__name__}.{name}"
            if not callable(value):
                yield f"{full}: {type(value).__qualname__}"
            elif homes[value] != full:
                yield f"{full} is {homes[value]}"
            elif inspect.isclass(value):
                made_here = owner(value, "__init__") or owner(value, "__new__")
                yield full + (signature(value) if made_here else "")
                yield from (f"    {member}" for member in members(value, set(homes)))
            else:
                yield full + (signature(value) if inspect.isroutine(value) else "")


def test_every_public_function_is_used_on_a_page():
    """In the guide or the gallery, besides the reference."""
    docs = ROOT / "docs"
    pages = [docs / "index.rst", *docs.glob("*.rst"), *docs.glob("howto/*.rst")]
    text = "\n".join(p.read_text(encoding="utf-8") for p in [*pages, *docs.glob("gallery/*/*.py")])
    words = set(re.findall(r"\w+", text))
    functions = {
        name
        for package in PACKAGES
        for name, value in vars(importlib.import_module(package)).items()
        if name in importlib.import_module(package).__all__ and inspect.isfunction(value)
    }
    assert len(functions) > 80 and functions <= words, sorted(functions - words)


def test_public_api_is_the_one_that_is_frozen():
    frozen = FROZEN.read_text(encoding="utf-8").splitlines()
    changes = [
        line
        for line in difflib.unified_diff(frozen, list(public_api()), n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    assert not changes, (
        "the public API is another than in tests/public_api.txt. Cure: if that is meant, "
        "python tests/test_public_api.py, and a line in CHANGELOG.md\n" + "\n".join(changes)
    )


def test_every_public_name_is_on_a_page_of_the_reference():
    """Autodoc takes what is in ``__all__`` and has a docstring; a page may describe others."""
    shown, missing = [], []
    for package in PACKAGES:
        module, name = importlib.import_module(package), package.rpartition(".")[2]
        page = (ROOT / "docs" / "api" / f"{name}.rst").read_text("utf-8")
        assert f".. automodule:: {package}\n   :members:" in page
        for name in module.__all__:
            value = getattr(module, name)
            shown.append(value)
            has_docstring = inspect.isclass(value) or inspect.isroutine(value)
            if not (value.__doc__ if has_docstring else f".. py:data:: {name}\n" in page):
                missing.append(f"{package}.{name}")
    library = importlib.import_module("pyro_implicit")
    missing += [name for name in library.__all__ if getattr(library, name) not in shown]
    assert [name for name in missing if name != "__version__"] == []
    with_all = {path.parent.name for path in Path(library.__path__[0]).glob("*/__init__.py")}
    assert {f"pyro_implicit.{name}" for name in with_all} - set(PACKAGES) == MACHINERY


def undocumented(function: Any) -> list[str]:
    """Parameters that no docstring names: ``:param x:``, or the convention "as ``x``"."""
    if isinstance(function, type):
        if not (owner(function, "__init__") or owner(function, "__new__")):
            return []
        bases = [base for base in function.__mro__ if base.__module__.startswith("pyro_implicit")]
        texts = [base.__doc__ or "" for base in bases]  # a subclass adds to what there is
    else:
        texts = [function.__doc__ or ""]
    text = "".join(texts)
    names = inspect.signature(function).parameters
    return [name for name in names if f":param {name}:" not in text and f"``{name}``" not in text]


def is_record(value: Any) -> bool:
    """A result, whose docstring tells of its fields in one piece."""
    is_one = dataclasses.is_dataclass(value) or hasattr(value, "_fields")
    return is_one and ":param" not in (value.__doc__ or "")


def test_every_parameter_is_in_its_docstring():
    missing = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if name in SAME_AS:
                assert f":func:`{SAME_AS[name]}`" in value.__doc__
            elif inspect.isroutine(value) or (inspect.isclass(value) and not is_record(value)):
                missing += [f"{package}.{name}({one})" for one in undocumented(value)]
    assert missing == []


if __name__ == "__main__":
    FROZEN.write_text("\n".join(public_api()) + "\n", encoding="utf-8")
