# SPDX-License-Identifier: Apache-2.0
"""Automatic guides, most of them implicit, and tools for guides."""

from __future__ import annotations

from pyro_implicit.guides.auto_amortized import AutoAmortized
from pyro_implicit.guides.auto_draws import Frame
from pyro_implicit.guides.auto_hierarchical import AutoHierarchical
from pyro_implicit.guides.auto_implicit import AutoImplicit, AutoSemiImplicit
from pyro_implicit.guides.auto_mixture import AutoEnsemble, AutoMixture, init_to_shuffled
from pyro_implicit.guides.sampler import StoredDraws
from pyro_implicit.guides.symmetrized import Group, Permutations, Symmetrized, Translations

__all__ = [
    "AutoAmortized",
    "AutoEnsemble",
    "AutoHierarchical",
    "AutoImplicit",
    "AutoMixture",
    "AutoSemiImplicit",
    "Frame",
    "Group",
    "Permutations",
    "StoredDraws",
    "Symmetrized",
    "Translations",
    "init_to_shuffled",
]
