# SPDX-License-Identifier: Apache-2.0
"""Output: one-line representations, tables of reports, progress bars."""

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


COLOURS = {"trust": "green", "uniform": "green", "check": "#b58900", "do not trust": "red"}
VERDICT = re.compile(rf"^Verdict: (?:({'|'.join(COLOURS)})\b)?", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class DisplayPolicy:
    """When progress is shown."""

    #: Seconds before a bar appears; shorter parts show none.
    delay: float = 1.0

    #: Estimated seconds of a part from which they are announced.
    worth_saying: float = 5.0


DISPLAY = DisplayPolicy()


class Printed:
    """A report that shows its ``__str__`` everywhere, with a coloured verdict where possible.

    The string has no colours, as it may be written to a file or a log. Notebooks call
    ``_repr_html_``, and rich's ``print`` calls ``__rich__``.

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
        text = re.sub(r"(\\*)(\[[a-z#/@])", r"\1\1\\\2", str(self))  # escapes rich's markup
        return _coloured(text, "[bold {}]{}[/]")


def aligned(rows: Mapping[str, str]) -> str:
    """Return a table of two columns, names and values.

    **Example:**

    >>> print(aligned({"draws": "8 chains x 100", "seconds": "0.3"}))
    draws    8 chains x 100
    seconds  0.3
    """
    width = max(map(len, rows))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows.items())


def short_repr(self: Any) -> str:
    """Return the ``__repr__`` of a dataclass or named tuple, with tensors as shapes.

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
        found = [f"{key!r}: {_short(one)}" for key, one in list(value.items())[:4]]
        return f"{{{', '.join(found)}{', ...' * (len(value) > 4)}}}"
    if isinstance(value, list) and len(value) > 4:
        return f"[{len(value)} values]"
    return getattr(value, "__name__", None) or repr(value)


def _coloured(text: str, style: str) -> str:
    def of(match: re.Match[str]) -> str:
        verdict = match[1]
        return "Verdict: " + (style.format(COLOURS[verdict], verdict) if verdict else "")

    return VERDICT.sub(of, text)


Item = TypeVar("Item")

_wanted: ContextVar[bool] = ContextVar("progress", default=False)


@contextmanager
def showing_progress(wanted: bool) -> Iterator[None]:
    """Set whether functions that are called inside show progress bars."""
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def progress_bar(total: float, name: str, progress: bool, **options: Any) -> Any:
    """Return a tqdm bar, shown after a second in a terminal or a notebook.

    **Example:**

    >>> with progress_bar(10, "refine", progress=False) as bar:
    ...     _ = bar.update(3)

    :param total: the number of its units.
    :param name: its label.
    :param progress: whether to show it.
    :param options: of tqdm.
    """
    disable = not (progress and _is_watched())
    return tqdm(total=total, desc=name, disable=disable, delay=DISPLAY.delay, **options)


def steps_of(steps: Iterable[Item], total: int, name: str) -> Iterator[Item]:
    """Iterate with a bar that disappears at the end, inside of :func:`showing_progress`.

    **Example:**

    >>> list(steps_of(range(3), 3, "search"))
    [0, 1, 2]

    :param steps: an iterable.
    :param total: the maximal number of its items.
    :param name: the label of the bar.
    """
    with progress_bar(total, name, _wanted.get(), leave=False) as bar:
        for step in steps:
            yield step
            bar.update()


def announce(name: str, seconds: float) -> None:
    """Print the estimated time of a part that takes more than five seconds.

    :param name: of the part.
    :param seconds: of one core.
    """
    if progress_is_shown() and seconds > DISPLAY.worth_saying:
        tqdm.write(f"{name}: about {seconds:.0f} s of one core", file=sys.stderr)


def progress_is_shown() -> bool:
    """Whether progress is wanted and someone may be watching."""
    return _wanted.get() and _is_watched()


def _is_watched() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules
