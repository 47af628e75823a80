# SPDX-License-Identifier: Apache-2.0
"""The automatic fit of models with discrete latent variables that Pyro cannot enumerate."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch

from pyro_implicit.density.marginal_discrete import DiscreteMarginal, find_owners
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.marginal_fit import fit_marginal
from pyro_implicit.fitting.parameters import model_parameters
from pyro_implicit.fitting.refinement import affordable_chains, move_draws
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.guides.sampler import StoredDraws
from pyro_implicit.mcmc.kernels.window_gibbs import dependence, terms_given
from pyro_implicit.mcmc.policy import DEFAULT
from pyro_implicit.runtime.clock import TimeLimit

__all__ = ["fit_discrete"]


def fit_discrete(
    stages: Stages,
    target: Target,
    refine: Literal["auto"] | bool,
    fit_rest: Callable[..., Fit],
) -> Fit:
    """Sum over discrete elements whose terms form trees, or sample by chains.

    The chains of all latent variables start at draws of the prior, which are then the guide of the
    result. If elements share terms, short chains are tried first: where they mix, they are cheaper
    than sums over pairs of values.

    :param target: of which some discrete latent variables have coordinates.
    :param fit_rest: see :func:`~pyro_implicit.fitting.marginal_fit.fit_marginal`.
    :raises ValueError: without chains, or for a model with parameters.
    """
    names = ", ".join(f"'{name}'" for name in target.sampled)
    if refine is False:
        raise ValueError(
            f"refine=False leaves no way to the posterior of the discrete latents {names}, which "
            "Pyro cannot enumerate: no automatic guide has them. Cure: refine='auto', or a guide "
            "of your own"
        )
    if parameters := model_parameters(target):
        raise ValueError(
            f"the parameters {', '.join(parameters)} (pyro.param) cannot be learnt together with "
            f"the discrete latents {names}, which Pyro cannot enumerate. Cure: a prior, by "
            "pyro.sample, in place of pyro.param"
        )
    marginal = _find_marginal(target, stages)
    if marginal is not None and marginal.has_pairs and _short_chains_converge(stages, target):
        return stages.result
    if marginal is not None and fit_marginal(stages, marginal, refine, fit_rest):
        return stages.result
    return _by_chains(stages, target)


def _short_chains_converge(stages: Stages, target: Target) -> bool:
    limits, result = stages.policy.integration, stages.result
    seconds = min(limits.chain_seconds, stages.limit.left(1 - limits.time_share))
    if seconds <= 0:
        return False
    trial = replace(stages, limit=TimeLimit(seconds))
    trial.result.target = target
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _by_chains(trial, target)
    if not (found.interrupted or getattr(found.refined, "settled", False)):
        return False
    result.guide, result.chosen, result.refined = found.guide, found.chosen, found.refined
    result.stages, result.interrupted = [*result.stages, *found.stages], found.interrupted
    return True


def _by_chains(stages: Stages, target: Target) -> Fit:
    names = ", ".join(f"'{name}'" for name in target.sampled)
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


@torch.no_grad()
def _find_marginal(target: Target, stages: Stages) -> DiscreteMarginal | None:
    """Return the density without the discrete elements if their terms form trees."""
    if target.discrete_dim == target.latent_dim or not target.is_vectorized:
        return None
    limits, elements = DEFAULT.window, target.elements
    assert elements is not None
    if not elements.low.isfinite().all():
        return None
    points = target.sample_prior(limits.num_probed)
    split = target.latent_dim - target.discrete_dim
    continuous, values = points[:, :split], points[:, split:]
    terms = terms_given(target, continuous)
    depends = dependence(values, terms, elements, limits)
    for reach in (limits.first_reach**0.5, limits.first_reach):
        # Small moves change nothing where the density is 0.
        far = (values + reach).minimum(elements.high)
        depends |= dependence(values, terms, elements, limits, far)
    owners = find_owners(depends)
    if owners is None:
        return None
    for exact in (target.in_double(), target):  # double precision does not suit all models
        found = DiscreteMarginal(target, exact, owners, stages.policy.marginal)
        if found.evaluate(continuous, False)[0].isfinite().any():
            return found
    return None
