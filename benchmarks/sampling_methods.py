# SPDX-License-Identifier: Apache-2.0
"""The guides and objectives that ``sampling_targets.py`` compares.

Every method has its default settings on all targets; :attr:`Method.settings` lists the exceptions.
Steps, particles, optimiser and learning rate are the same for all methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyro.infer import ELBO, Trace_ELBO
from pyro.infer.autoguide import (
    AutoGuide,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)

from pyro_implicit import AutoImplicit, AutoSemiImplicit, ResidualGenerator
from pyro_implicit.infer import (
    AVB_ELBO,
    KIVI_ELBO,
    LIVI_ELBO,
    SIVI_ELBO,
    UIVI_ELBO,
    AmortizedKSD_ELBO,
    AmortizedSVGD_ELBO,
    InjectiveELBO,
    ScoreELBO,
)
from pyro_implicit.infer.gpvi import GPVI_ELBO

__all__ = ["EXPLICIT_AND_LIVI", "METHODS", "Method"]


@dataclass(frozen=True)
class Method:
    """A guide and its objective.

    :param make_guide: makes a guide of a model.
    :param make_elbo: makes the objective from the number of particles.
    :param settings: guide and options, as shown in the table.
    """

    make_guide: Callable[[Callable[..., Any]], AutoGuide]
    make_elbo: Callable[[int], ELBO]
    settings: str


def _injective_guide(model: Callable[..., Any]) -> AutoImplicit:
    return AutoImplicit(model, lambda size: ResidualGenerator(size, core_dim=size))


# All targets broadcast, so Pyro's own guides use Pyro's vectorisation.
_PYRO_ELBO = partial(Trace_ELBO, vectorize_particles=True)
# SIVI and UIVI need conditionals that are wide enough to overlap.
_WIDE_GUIDE = partial(AutoSemiImplicit, noise_scale=0.5)

METHODS = {
    "AutoNormal": Method(AutoNormal, _PYRO_ELBO, "Pyro, mean field"),
    "AutoMultivariateNormal": Method(AutoMultivariateNormal, _PYRO_ELBO, "Pyro, full rank"),
    "AutoLaplace": Method(AutoLaplaceApproximation, _PYRO_ELBO, "Pyro, Hessian at the mode"),
    "AutoIAFNormal": Method(AutoIAFNormal, _PYRO_ELBO, "Pyro, a flow of one transform"),
    "implicit": Method(AutoSemiImplicit, LIVI_ELBO, "LIVI of AutoSemiImplicit"),
    "KIVI": Method(AutoImplicit, KIVI_ELBO, "AutoImplicit"),
    "AVB": Method(AutoImplicit, AVB_ELBO, "AutoImplicit"),
    "Score": Method(AutoImplicit, ScoreELBO, "AutoImplicit, spectral estimator"),
    "amortised SVGD": Method(AutoImplicit, AmortizedSVGD_ELBO, "AutoImplicit"),
    "amortised KSD": Method(AutoImplicit, AmortizedKSD_ELBO, "AutoImplicit, 5 critic steps"),
    "amortised GFSF": Method(
        AutoImplicit,
        partial(ScoreELBO, estimator="stein", covariance=None),
        'AutoImplicit, ScoreELBO(estimator="stein", covariance=None)',
    ),
    "SIVI": Method(_WIDE_GUIDE, SIVI_ELBO, "AutoSemiImplicit(noise_scale=0.5)"),
    "UIVI": Method(_WIDE_GUIDE, UIVI_ELBO, "AutoSemiImplicit(noise_scale=0.5)"),
    "GPVI": Method(_injective_guide, GPVI_ELBO, "ResidualGenerator(size, core_dim=size)"),
    "Injective": Method(_injective_guide, InjectiveELBO, "ResidualGenerator(size, core_dim=size)"),
}

#: The methods without ``--methods``.
EXPLICIT_AND_LIVI = ["AutoNormal", "AutoMultivariateNormal", "AutoIAFNormal", "implicit"]
