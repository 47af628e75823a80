# SPDX-License-Identifier: Apache-2.0
"""How results print: tensors as shapes, on one line; reports as their table."""

from __future__ import annotations

import dataclasses
import html
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor, nn
from tqdm.auto import tqdm

__all__ = [
    "Printed",
    "aligned",
    "announce",
    "progress_bar",
    "progress_is_shown",
    "short_repr",
    "showing_progress",
    "steps_of",
]


MANY_ITEMS = 4
COLOURS = {"trust": "green", "uniform": "green", "check": "#b58900", "do not trust": "red"}
VERDICT = re.compile(rf"^Verdict: (?:({'|'.join(COLOURS)})\b)?", re.MULTILINE)


class Printed:
    """Shows its ``__str__`` wherever it is shown, with a coloured verdict where there are colours.

    The string itself stays plain, as it may go to a file or a log from a terminal, too. Notebooks
    ask for ``_repr_html_``, and rich's ``print`` for ``__rich__``, if it prints on a terminal.

    **Example:**

    >>> class Found(Printed):
    ...     def __str__(self):
    ...         return "Verdict: check: <a>"
    >>> Found()
    Verdict: check: <a>
    >>> Found()._repr_html_()
    '<pre>Verdict: <b style="color: #b58900">check</b>: &lt;a&gt;</pre>'
    """

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        text = _coloured(html.escape(str(self)), '<b style="color: {}">{}</b>')
        return f"<pre>{text}</pre>"

    def __rich__(self) -> str:
        text = re.sub(r"(\\*)(\[[a-z#/@])", r"\1\1\\\2", str(self))  # no markup of rich's
        return _coloured(text, "[bold {}]{}[/]")


def aligned(rows: Mapping[str, str]) -> str:
    """A line for each row: its name, and what it says in a column of its own.

    **Example:**

    >>> print(aligned({"draws": "8 chains x 100", "seconds": "0.3"}))
    draws    8 chains x 100
    seconds  0.3
    """
    width = max(map(len, rows))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows.items())


def short_repr(self: Any) -> str:
    """The ``__repr__`` of a dataclass or named tuple.

    **Example:**

    >>> import torch
    >>> from pyro_implicit.guides import Frame
    >>> Frame(torch.zeros(200), scale=torch.ones(200))
    Frame(loc=(200,), scale=(200,), scale_tril=None)
    """
    if dataclasses.is_dataclass(self):
        names = [field.name for field in dataclasses.fields(self) if field.repr]
    else:
        names = list(self._fields)
    return f"{type(self).__name__}({', '.join(f'{n}={_short(getattr(self, n))}' for n in names)})"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return _short(value.item()) if value.numel() == 1 else str(tuple(value.shape))
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, Mapping):
        found = [f"{key!r}: {_short(one)}" for key, one in list(value.items())[:MANY_ITEMS]]
        return f"{{{', '.join(found)}{', ...' * (len(value) > MANY_ITEMS)}}}"
    if isinstance(value, list) and len(value) > MANY_ITEMS:
        return f"[{len(value)} values]"
    return getattr(value, "__name__", None) or repr(value)


def _coloured(text: str, style: str) -> str:
    def of(match: re.Match[str]) -> str:
        verdict = match[1]
        return "Verdict: " + (style.format(COLOURS[verdict], verdict) if verdict else "")

    return VERDICT.sub(of, text)


Item = TypeVar("Item")

DELAY = 1.0  # seconds, before which no bar appears
WORTH_SAYING = 5.0  # seconds

_wanted: ContextVar[bool] = ContextVar("progress", default=False)


@contextmanager
def showing_progress(wanted: bool) -> Iterator[None]:
    """Whether what is called in here shows bars."""
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def progress_bar(total: float, name: str, progress: bool, **options: Any) -> Any:
    """A tqdm bar, if it is wanted and someone may be watching: in a terminal or a notebook.

    **Example:**

    >>> with progress_bar(10, "refine", progress=False) as bar:
    ...     _ = bar.update(3)

    :param total: of its units.
    :param name: of what is going on.
    :param progress: whether it is wanted.
    :param options: of tqdm.
    """
    disable = not (progress and _is_watched())
    return tqdm(total=total, desc=name, disable=disable, delay=DELAY, **options)


def steps_of(steps: Iterable[Item], total: int, name: str) -> Iterator[Item]:
    """Steps with a bar that goes away, inside of a function that shows its progress.

    **Example:**

    >>> list(steps_of(range(3), 3, "search"))
    [0, 1, 2]

    :param steps: to be taken one after the other.
    :param total: how many these are at most.
    :param name: of what is going on.
    """
    with progress_bar(total, name, _wanted.get(), leave=False) as bar:
        for step in steps:
            yield step
            bar.update()


def announce(name: str, seconds: float) -> None:
    """Say how long something is going to take, if that is long and someone watches.

    :param name: of what is going to happen.
    :param seconds: as estimated.
    """
    if progress_is_shown() and seconds > WORTH_SAYING:
        tqdm.write(f"{name}: about {seconds:.0f} s of one core", file=sys.stderr)


def progress_is_shown() -> bool:
    """Whether progress is wanted and someone may be watching."""
    return _wanted.get() and _is_watched()


def _is_watched() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules
