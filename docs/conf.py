# SPDX-License-Identifier: Apache-2.0
"""Sphinx settings; `tox -e docs` builds the pages with warnings as errors."""

import pyro_implicit

project = "pyro_implicit"
author = "The pyro_implicit developers"
copyright = "the pyro_implicit developers, Apache-2.0"
release = version = pyro_implicit.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"pyro_implicit {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build"]
default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# torch's and Pyro's docstrings have their own home and their own markup.
autodoc_inherit_docstrings = False
