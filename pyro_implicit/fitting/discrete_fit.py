# SPDX-License-Identifier: Apache-2.0
"""The automatic fit of models with discrete latent variables that cannot be summed out."""

from __future__ import annotations

from typing import Literal

from pyro_implicit.density.target import Target
from pyro_implicit.fitting.parameters import model_parameters
from pyro_implicit.fitting.refinement import affordable_chains, move_draws
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.guides.sampler import StoredDraws

__all__ = ["fit_discrete"]


def fit_discrete(stages: Stages, target: Target, refine: Literal["auto"] | bool) -> Fit:
    """Sample all latent variables by chains that start at draws of the prior.

    The guide of the result holds these draws of the prior; ``result.posterior`` has the chains'.

    :param target: of which some discrete latent variables have coordinates.
    :raises ValueError: without chains, or for a model with parameters.
    """
    names = ", ".join(f"'{name}'" for name in target.sampled)
    if refine is False:
        raise ValueError(
            f"refine=False leaves no way to the posterior of the discrete latents {names}, which "
            "cannot be summed out: no automatic guide has them. Cure: refine='auto', or a guide of "
            "your own"
        )
    if parameters := model_parameters(target):
        raise ValueError(
            f"the parameters {', '.join(parameters)} (pyro.param) cannot be learnt together with "
            f"the discrete latents {names}, which are sampled by chains. Cure: a prior, by "
            "pyro.sample, in place of pyro.param"
        )
    result, budget = stages.result, stages.policy.budget
    with result.stage("discrete") as line:
        why = f", as the sum over their values fails ({target.unsummed})" if target.unsummed else ""
        line.outcome = f"{target.discrete_dim} elements of {names} are sampled{why}"
        # Determines whether the model can be vectorised.
        stages.one_by_one = not target.is_vectorized
        chains = affordable_chains(target.score, target.init_loc, stages.one_by_one, budget)
        draws = target.constrain(target.sample_prior(chains.num_chains))
        result.guide, result.chosen = StoredDraws(draws), "prior"
    return move_draws(stages, chains)
