# SPDX-License-Identifier: Apache-2.0
"""Hooks of Sphinx and sphinx-gallery, which docs/conf.py names."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pyro
import torch
from matplotlib.figure import Figure

__all__ = ["add_summary", "fresh_state", "link_short_name", "scrape_figure", "show_figure_first"]


def fresh_state(gallery_conf: dict[str, Any], page: str) -> None:
    """Reset Pyro and torch before a page.

    :param gallery_conf: settings of sphinx-gallery.
    :param page: path of the script.
    """
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    torch.set_num_threads(1)  # more threads slow down small tensors


def scrape_figure(
    block: tuple[Any, ...], block_vars: dict[str, Any], gallery_conf: dict[str, Any]
) -> str:
    """Save the figure that the last line of a block returns.

    :param block: code block of the page.
    :param block_vars: variables of the block.
    :param gallery_conf: settings of sphinx-gallery.
    :returns: reStructuredText of the figure.
    """
    from sphinx_gallery.scrapers import figure_rst  # not installed for doctests

    names = block_vars["example_globals"]
    figure = names.get("___")  # the last line's value
    if not isinstance(figure, Figure):
        return ""
    names["___"] = None  # blocks without a value keep the previous one
    path = next(block_vars["image_path_iterator"])
    figure.savefig(path, dpi=100)
    return figure_rst([path], gallery_conf["src_dir"])


def add_summary(app: Any, page: str, source: list[str]) -> None:
    """Put a table of all public names, with their first lines, before each ``automodule``.

    :param app: Sphinx.
    :param page: name of the page.
    :param source: its text, changed in place.
    """

    def summary(match: re.Match[str]) -> str:
        names = importlib.import_module(match[1]).__all__
        rows = "\n".join(f"   ~{match[1]}.{name}" for name in names)
        return f".. autosummary::\n   :nosignatures:\n\n{rows}\n\n{match[0]}"

    if page.startswith("api/"):
        whole = r"^\.\. automodule:: (\S+)\n   :members:$"  # parts of a module need no summary
        source[0] = re.sub(whole, summary, source[0], flags=re.MULTILINE)


def show_figure_first(app: Any, page: str, source: list[str]) -> None:
    """Show the last figure of a gallery page below its introduction, too.

    :param app: Sphinx.
    :param page: name of the page.
    :param source: its text, changed in place.
    """
    figures = re.findall(r"^\.\. image-sg:: .*\n(?:   :.*\n)+", source[0], flags=re.MULTILINE)
    if page.startswith("auto_gallery/") and figures:
        first_code = ".. GENERATED FROM PYTHON SOURCE LINES"
        source[0] = source[0].replace(first_code, f"{figures[-1]}\n{first_code}", 1)


def link_short_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Link a name such as ``pyro_implicit.fit`` to the page of ``pyro_implicit.fitting.fit``.

    :param app: Sphinx.
    :param env: its environment.
    :param node: a reference without a target.
    :param content: the text of the link.
    :returns: the link, or ``None`` for names of other libraries and of private objects.
    """
    from sphinx.util.nodes import make_refnode  # not installed for doctests

    name = str(node.get("reftarget")).removeprefix("pyro_implicit.")
    found = [
        (path, entry)
        for path, entry in env.get_domain("py").objects.items()
        if path.rpartition(".")[2] == name and entry.objtype in ("class", "function")
        if not entry.aliased
    ]
    if len(found) != 1:
        return None
    ((path, entry),) = found
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, path)
