# SPDX-License-Identifier: Apache-2.0
"""Sphinx settings; `tox -e docs` builds the pages with warnings as errors."""

import sys
from pathlib import Path
from typing import Any

import pyro_implicit

sys.path.insert(0, str(Path(__file__).parent))
from site_hooks import add_summary, link_short_name, show_figure_first

project = "pyro_implicit"
author = "The pyro_implicit developers"
copyright = "the pyro_implicit developers, Apache-2.0"
release = version = pyro_implicit.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
# The copy button leaves out prompts and output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"
html_theme = "furo"
html_title = f"pyro_implicit {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build", "gallery"]
default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# torch's and Pyro's docstrings use their own markup.
autodoc_inherit_docstrings = False

# Each build runs the scripts of the pages and draws their figures, which are not in git.
# `-D sphinx_gallery_conf.plot_gallery=0` builds without running them.
SECTIONS = ["hierarchies", "modes", "series", "networks", "checks"]
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": "",  # all of them
    "subsection_order": [f"gallery/{section}" for section in SECTIONS],
    "within_subsection_order": "ExampleTitleSortKey",
    "image_scrapers": ("matplotlib", "site_hooks.scrape_figure"),
    "capture_repr": (),
    "reset_modules": ("matplotlib", "site_hooks.fresh_state"),
    "download_all_examples": False,
}

# Links to names of this library must work; those of type hints and other libraries have no page.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:(class|exc|obj)", r"(?!pyro_implicit\.\w+$).*"),
    (r"py:.*", r"(?!pyro_implicit\.).*"),
]

autosummary_generate = False  # the tables link to the same page


def setup(app: Any) -> None:
    """Register the hooks that change pages: summaries of the API, figures of the gallery, links."""
    app.connect("source-read", add_summary)
    app.connect("source-read", show_figure_first)
    app.connect("missing-reference", link_short_name)
