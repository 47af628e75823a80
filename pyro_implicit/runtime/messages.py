# SPDX-License-Identifier: Apache-2.0
"""Messages to users: one-line representations, tables, warnings, refused arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import itertools
import operator
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pyro
import torch
from torch import Tensor, nn

__all__ = [
    "LIBRARIES",
    "Printed",
    "Table",
    "counted",
    "first_line",
    "refuse_counts",
    "refuse_no_probability",
    "refuse_nonpositive",
    "refuse_string",
    "refuse_unknown",
    "short_repr",
    "warn_user",
]


COLOURS = {"trust": "green", "uniform": "green", "check": "#b58900", "do not trust": "red"}
VERDICT = re.compile(rf"^Verdict: (?:({'|'.join(COLOURS)})\b)?", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells, as aligned text or as an HTML table.

    **Example:**

    >>> table = Table([("", "mean"), ("a", "0.5"), ("long name", "-10.0")], header=True)
    >>> print(table)
                mean
    a            0.5
    long name  -10.0
    """

    rows: Sequence[Sequence[str]]

    #: Whether the first row names the columns.
    header: bool = False

    #: One letter for each column, ``l`` or ``r``; the last one is for all further columns.
    align: str = "lr"

    #: Characters that the first columns have at least, in text.
    widths: Sequence[int] = ()

    #: Text before each line.
    indent: str = ""

    def __str__(self) -> str:
        columns = list(itertools.zip_longest(*self.rows, fillvalue=""))
        least = itertools.chain(self.widths, itertools.repeat(0))
        widths = [max(low, *map(len, column)) for low, column in zip(least, columns, strict=False)]
        return "\n".join(self._line(row, widths).rstrip() for row in self.rows)

    def _line(self, row: Sequence[str], widths: list[int]) -> str:
        cells = zip(row, widths, self._sides(), strict=False)
        padded = (cell.rjust(n) if side == "r" else cell.ljust(n) for cell, n, side in cells)
        return self.indent + "  ".join(padded)

    def _sides(self) -> Iterator[str]:
        return itertools.chain(self.align, itertools.repeat(self.align[-1]))

    def to_html(self) -> str:
        """Return a ``table`` element, in the style of data frames in notebooks."""
        rows = [
            self._html_row(row, "th" if i < self.header else "td")
            for i, row in enumerate(self.rows)
        ]
        return f'<table class="dataframe">{"".join(rows)}</table>'

    def _html_row(self, row: Sequence[str], tag: str) -> str:
        cells = ""
        for cell, side in zip(row, self._sides(), strict=False):
            text = html.escape(cell.lstrip())
            depth = len(cell) - len(cell.lstrip())
            where = "right" if side == "r" else "left"
            cells += f'<{tag} style="text-align: {where}">{"&nbsp;" * depth}{text}</{tag}>'
        return f"<tr>{cells}</tr>"


class Printed:
    """A report that shows its ``__str__`` everywhere, with a coloured verdict where possible.

    A report consists of the lines and tables that ``_blocks`` gives. The string has no colours, as
    it may be written to a file or a log. Notebooks call ``_repr_html_``, which keeps the columns
    of tables aligned in any font, and rich's ``print`` calls ``__rich__``.

    **Example:**

    >>> class Found(Printed):
    ...     def _blocks(self):
    ...         yield Table([("a", "1.0")])
    ...         yield "Verdict: check: <a>"
    >>> Found()
    a  1.0
    Verdict: check: <a>
    >>> print(Found()._repr_html_().split("</table>")[1])
    <div style="white-space: pre-wrap">Verdict: <b style="color: #b58900">check</b>: &lt;a&gt;</div>
    """

    def _blocks(self) -> Iterable[str | Table]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(map(str, self._blocks()))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        parts = []
        for is_table, group in itertools.groupby(self._blocks(), lambda x: isinstance(x, Table)):
            if is_table:
                parts += [block.to_html() for block in group if isinstance(block, Table)]
                continue
            text = "\n".join(html.escape(str(line)) for line in group if line)
            text = _coloured(text, '<b style="color: {}">{}</b>')
            parts.append(f'<div style="white-space: pre-wrap">{text}</div>' if text else "")
        return "".join(parts)

    def __rich__(self) -> str:
        text = re.sub(r"(\\*)(\[[a-z#/@])", r"\1\1\\\2", str(self))  # escapes rich's markup
        return _coloured(text, "[bold {}]{}[/]")


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


#: Paths whose lines are not the user's: this package, Pyro, torch, and decorators.
LIBRARIES = (
    str(Path(__file__).parent.parent) + os.sep,
    *(str(Path(file).parent) + os.sep for file in (pyro.__file__, torch.__file__)),
    contextlib.__file__,
    functools.__file__,
)


def warn_user(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest line outside of this package, Pyro and torch.

    Python 3.12 has ``skip_file_prefixes`` for it, but 3.11 is supported, too.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    **Example:**

    >>> counted(1, "step"), counted(20, "step")
    ('1 step', '20 steps')
    """
    return f"{number} {noun}" + "s" * (number != 1)


def first_line(error: BaseException) -> str:
    """Return an error's kind and the first line of its message. Pyro adds the shapes of all sites.

    **Example:**

    >>> first_line(ValueError("no density\\nTrace Shapes:")), first_line(StopIteration())
    ('ValueError: no density', 'StopIteration')
    """
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def refuse_counts(least: int = 1, **counts: int | None) -> None:
    """Check that every count that is given has a minimum.

    **Example:**

    >>> refuse_counts(num_steps=100, num_particles=8)

    :param least: the minimum.
    :param counts: by the name of the argument.
    :raises ValueError: naming the argument.
    """
    for name, count in counts.items():
        if count is None:
            continue
        try:
            operator.index(count)
        except TypeError as error:
            raise ValueError(f"{name} must be a whole number (int), but got {count!r}") from error
        if count < least:
            raise ValueError(f"{name} must be at least {least}, but got {count}")


def refuse_no_probability(**numbers: float | None) -> None:
    """Check that every number that is given lies between 0 and 1.

    **Example:**

    >>> refuse_no_probability(level=0.9, interval=None)

    :param numbers: by the name of the argument.
    :raises ValueError: naming the argument.
    """
    for name, number in numbers.items():
        if number is not None and not 0 < number < 1:
            raise ValueError(f"{name} must be a probability between 0 and 1, but got {number}")


def refuse_nonpositive(**numbers: float | None) -> None:
    """Check that every number that is given is positive.

    **Example:**

    >>> refuse_nonpositive(lr=0.1, max_seconds=None)

    :param numbers: by the name of the argument.
    :raises ValueError: naming the argument.
    """
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise ValueError(f"{name} must be positive, but got {number}")


def refuse_string(**names: object) -> None:
    """Check that no list of names is a string, whose letters would be taken for names.

    **Example:**

    >>> refuse_string(sites=["loc", "scale"], prior_sites=None)

    :param names: by the name of the argument.
    :raises TypeError: naming the argument.
    """
    for argument, value in names.items():
        if isinstance(value, str):
            raise TypeError(
                f"{argument} must be a list of names, but got a string. "
                f"Cure: {argument}=[{value!r}]"
            )


def refuse_unknown(name: str, value: object, *known: object) -> None:
    """Check that an option has one of its values.

    **Example:**

    >>> refuse_unknown("kernel", "imq", "rbf", "imq")

    :param name: the name of the argument.
    :param known: all values of the option.
    :raises ValueError: naming the argument and its values.
    """
    if value not in known:
        *first, last = (f'"{one}"' if isinstance(one, str) else repr(one) for one in known)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, but got {value!r}")
