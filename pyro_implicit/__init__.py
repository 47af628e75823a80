# SPDX-License-Identifier: Apache-2.0
"""Implicit variational inference for Pyro: swap in an implicit guide, run SVI as always."""

from __future__ import annotations

from pyro_implicit.density import SupportReparam
from pyro_implicit.diagnostics import compare, diagnose, simulation_based_calibration
from pyro_implicit.distributions import Implicit, SemiImplicit
from pyro_implicit.fitting import compare_models, fit, fit_simulator
from pyro_implicit.generators import (
    MLP,
    MMNN,
    AutoregressiveGenerator,
    CorrelatedMMNN,
    GatedMLP,
    GatedResidualGenerator,
    NoisyEncoder,
    ResidualGenerator,
)
from pyro_implicit.guides import (
    AutoAmortized,
    AutoEnsemble,
    AutoImplicit,
    AutoMixture,
    AutoSemiImplicit,
)
from pyro_implicit.infer import (
    AISIVI_ELBO,
    AVB_ELBO,
    GFSF,
    GPVI_ELBO,
    HSIVI_ELBO,
    KIVI_ELBO,
    KPG_ELBO,
    KSD,
    KSIVI_ELBO,
    LIVI_ELBO,
    PVI,
    SIVI_ELBO,
    SVGD,
    UIVI_ELBO,
    AmortizedKSD_ELBO,
    AmortizedSVGD_ELBO,
    ImplicitRenyiELBO,
    InjectiveELBO,
    ScoreELBO,
    evidence_bound,
)
from pyro_implicit.mcmc import NoiseSpaceReparam, refine, warm_start

__version__ = "0.1.0"

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
    "MLP",
    "MMNN",
    "PVI",
    "SIVI_ELBO",
    "SVGD",
    "UIVI_ELBO",
    "AmortizedKSD_ELBO",
    "AmortizedSVGD_ELBO",
    "AutoAmortized",
    "AutoEnsemble",
    "AutoImplicit",
    "AutoMixture",
    "AutoSemiImplicit",
    "AutoregressiveGenerator",
    "CorrelatedMMNN",
    "GatedMLP",
    "GatedResidualGenerator",
    "Implicit",
    "ImplicitRenyiELBO",
    "InjectiveELBO",
    "NoiseSpaceReparam",
    "NoisyEncoder",
    "ResidualGenerator",
    "ScoreELBO",
    "SemiImplicit",
    "SupportReparam",
    "compare",
    "compare_models",
    "diagnose",
    "evidence_bound",
    "fit",
    "fit_simulator",
    "refine",
    "simulation_based_calibration",
    "warm_start",
]
