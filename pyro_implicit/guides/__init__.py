# SPDX-License-Identifier: Apache-2.0
"""Automatic guides whose density is implicit."""

from __future__ import annotations

from pyro_implicit.guides.affine_frame import Frame
from pyro_implicit.guides.auto_amortized import AutoAmortized
from pyro_implicit.guides.auto_ensemble import AutoEnsemble, init_to_shuffled
from pyro_implicit.guides.auto_implicit import AutoImplicit, AutoSemiImplicit
from pyro_implicit.guides.auto_mixture import AutoMixture
from pyro_implicit.guides.groups import Group, Permutations, Translations
from pyro_implicit.guides.stored_draws import StoredDraws
from pyro_implicit.guides.symmetrized import Symmetrized

__all__ = [
    "AutoAmortized",
    "AutoEnsemble",
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
