# SPDX-License-Identifier: Apache-2.0
"""Packaging metadata. The version is read as text from pyro_implicit/__init__.py."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
INIT = (ROOT / "pyro_implicit" / "__init__.py").read_text(encoding="utf-8")
VERSION = re.search(r'^__version__ = "([^"]+)"', INIT, re.MULTILINE).group(1)

NETWORKS = ["scikit-learn>=1.6"]
ARVIZ = ["arviz>=0.22,<2"]
EXAMPLES = [*NETWORKS, *ARVIZ, "tqdm"]
TEST = ["pytest>=8", "pytest-xdist", *EXAMPLES]
DOCS = ["sphinx>=8", "furo", "sphinx-copybutton", "sphinx-gallery>=0.19", *NETWORKS]
LINT = ["ruff", "mypy", "import-linter"]

setup(
    name="pyro-implicit",
    version=VERSION,
    description="Implicit variational inference for Pyro: neural samplers as guides",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["pyro_implicit", "pyro_implicit.*"]),
    package_data={"pyro_implicit": ["py.typed"]},
    python_requires=">=3.11",
    # matplotlib is imported lazily, by the first plot: tests/test_package.py.
    # torch: the oldest tested version (CONTRIBUTING.md, "Release").
    # scipy: graphs (compiled/fusion.py, density/marginal_normal.py, ops/belief_propagation.py) and
    # assignments (ops/permutations.py).
    install_requires=["pyro-ppl>=1.9.2", "torch>=2.9.1", "numpy", "scipy", "matplotlib"],
    extras_require={
        "networks": NETWORKS,  # pyro_implicit.sklearn, evaluate(ood=...)
        "arviz": ARVIZ,  # to_datatree, to_inferencedata
        "examples": EXAMPLES,
        "test": TEST,
        "docs": DOCS,
        "lint": LINT,
        "dev": [*TEST, *DOCS, *LINT, "distributed", "tox>=4"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
