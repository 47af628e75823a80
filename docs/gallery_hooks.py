# SPDX-License-Identifier: Apache-2.0
"""What sphinx-gallery calls for each page; docs/conf.py names it."""

from __future__ import annotations

from typing import Any

import pyro
import torch
from matplotlib.figure import Figure

__all__ = ["fresh_state", "scrape_figure"]


def fresh_state(gallery_conf: dict[str, Any], page: str) -> None:
    """Before a page: Pyro and torch as a new process finds them.

    :param gallery_conf: sphinx-gallery's settings.
    :param page: path of the script.
    """
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    torch.set_num_threads(1)  # tensors this small lose by more


def scrape_figure(
    block: tuple[Any, ...], block_vars: dict[str, Any], gallery_conf: dict[str, Any]
) -> str:
    """After a block of code: the figure of its last line, if that is one without a window.

    :param block: of the page.
    :param block_vars: its names, among others.
    :param gallery_conf: sphinx-gallery's settings.
    :returns: reStructuredText of the picture.
    """
    from sphinx_gallery.scrapers import figure_rst  # not there where doctests are run

    names = block_vars["example_globals"]
    figure = names.get("___")  # the last line's value
    if not isinstance(figure, Figure):
        return ""
    names["___"] = None  # blocks without a value keep that of the one before
    path = next(block_vars["image_path_iterator"])
    figure.savefig(path, dpi=100)
    return figure_rst([path], gallery_conf["src_dir"])
