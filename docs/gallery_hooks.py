# SPDX-License-Identifier: Apache-2.0
"""Hooks that sphinx-gallery calls for each page; docs/conf.py names them."""

from __future__ import annotations

from typing import Any

import pyro
import torch
from matplotlib.figure import Figure

__all__ = ["fresh_state", "scrape_figure"]


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
