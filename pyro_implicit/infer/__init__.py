# SPDX-License-Identifier: Apache-2.0
"""ELBOs that train implicit guides, one method per file."""

from __future__ import annotations

from pyro_implicit.infer.aisivi import AISIVI_ELBO, ReverseConditional
from pyro_implicit.infer.amortized_ksd import AmortizedKSD_ELBO
from pyro_implicit.infer.amortized_svgd import AmortizedSVGD_ELBO
from pyro_implicit.infer.avb import AVB_ELBO
from pyro_implicit.infer.bound import (
    EvidenceBound,
    WeightedDraws,
    evidence_bound,
    weighted_draws,
)
from pyro_implicit.infer.engine.folds import FoldWarning
from pyro_implicit.infer.engine.implicit_sites import ImplicitSite
from pyro_implicit.infer.engine.traces import NonFiniteError
from pyro_implicit.infer.estimated_score import ScoreELBO
from pyro_implicit.infer.gpvi import GPVI_ELBO
from pyro_implicit.infer.hsivi import HSIVI_ELBO, LayeredGenerator
from pyro_implicit.infer.implicit_elbo import ImplicitELBO
from pyro_implicit.infer.injective import InjectiveELBO
from pyro_implicit.infer.kivi import KIVI_ELBO
from pyro_implicit.infer.kpg import KPG_ELBO
from pyro_implicit.infer.ksivi import KSIVI_ELBO
from pyro_implicit.infer.livi import LIVI_ELBO
from pyro_implicit.infer.pvi import PVI
from pyro_implicit.infer.renyi import ImplicitRenyiELBO
from pyro_implicit.infer.sivi import SIVI_ELBO
from pyro_implicit.infer.svgd import GFSF, KSD, SVGD
from pyro_implicit.infer.uivi import UIVI_ELBO

__all__ = [
    "AISIVI_ELBO",
    "AVB_ELBO",
    "GFSF",
    "GPVI_ELBO",
    "HSIVI_ELBO",
    "KIVI_ELBO",
    "KPG_ELBO",
    "KSD",
    "KSIVI_ELBO",
    "LIVI_ELBO",
    "PVI",
    "SIVI_ELBO",
    "SVGD",
    "UIVI_ELBO",
    "AmortizedKSD_ELBO",
    "AmortizedSVGD_ELBO",
    "EvidenceBound",
    "FoldWarning",
    "ImplicitELBO",
    "ImplicitRenyiELBO",
    "ImplicitSite",
    "InjectiveELBO",
    "LayeredGenerator",
    "NonFiniteError",
    "ReverseConditional",
    "ScoreELBO",
    "WeightedDraws",
    "evidence_bound",
    "weighted_draws",
]
