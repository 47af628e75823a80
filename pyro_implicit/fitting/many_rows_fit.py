# SPDX-License-Identifier: Apache-2.0
"""The automatic fit of few latent variables to many rows, each evaluation of which is expensive."""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor

from pyro_implicit.density.modes import Modes
from pyro_implicit.density.pass_target import WholeTarget
from pyro_implicit.density.policy import MAX_DENSE_DIM
from pyro_implicit.density.row_pilot import find_pilot, largest_num_rows
from pyro_implicit.density.symmetry import find_symmetries
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.parameters import model_parameters
from pyro_implicit.fitting.passes import PassStages, count_modes, pilot_modes, use_gaussians
from pyro_implicit.fitting.policy import ManyRowsPolicy
from pyro_implicit.fitting.refinement import make_plan
from pyro_implicit.fitting.stages import Stages, widen_near
from pyro_implicit.runtime.processes import num_processes

__all__ = ["fit_many_rows"]


def fit_many_rows(stages: Stages, target: Target, weighs: bool) -> Modes | None:
    """Search for the modes of a few thousand rows, climb to those of all, and weigh draws there.

    The stages are those of minibatches (:mod:`pyro_implicit.fitting.passes`): a search of all rows
    evaluates the log-density thousands of times, Newton steps from the modes of some rows a few
    times, and the posterior of many rows is often so close to normal that few weights suffice.
    If a few rows hold most of the information, other rows cannot stand for them: all rows are then
    searched instead, unless that is too expensive.

    :param target: the posterior of all rows.
    :param weighs: whether to weigh draws; unnecessary if chains follow.
    :returns: the modes of all rows, for further stages; None if there are few rows, or if some of
        them cannot stand for all. If the weights suffice, the result has draws.
    """
    policy, number = stages.policy.many_rows, largest_num_rows(target)
    if number < policy.least_rows or target.latent_dim > MAX_DENSE_DIM or num_processes() > 1:
        return None
    if model_parameters(target):  # the density does not determine them
        return None
    least = policy.pilot_per_dim * target.latent_dim
    few = min(max(policy.num_pilot, least), number // policy.least_ratio)
    pilot = None if few < least else find_pilot(target, few)
    if pilot is None or _is_too_slow(stages, pilot):
        return None
    with stages.result.attempt("search") as line:
        modes = pilot_modes(pilot, stages, policy)
        line.outcome = f"{count_modes(modes)} of {few} rows"
    if line.error is not None:
        return None
    may_have_copies = len(modes.loc) > 1 or not weighs
    if may_have_copies and find_symmetries(target, stages.limit.left()):
        return None  # the search of all rows knows copies of modes
    whole = WholeTarget(_precise(target, modes.loc[:1], policy), number)
    passes = PassStages(stages, whole, policy, "the latent variables")
    with stages.result.stage("gaussian") as line:
        first, modes = modes, passes.climb_all(modes)
        line.outcome = f"{whole.num_passes} evaluations of {number} rows{passes.note}"
        if not passes.note:
            line.outcome += widen_near(whole, modes)
        if not passes.note and not _agrees(first, modes, policy):
            line.outcome += "; few rows hold the information"
            if not _is_too_slow(stages, target):
                line.outcome += ", so that all are searched"
                return None
            line.outcome += "; a search of all is too expensive"
    if passes.note:  # a spike of the density, such as that of a funnel at scale 0
        return None
    use_gaussians(stages, modes)
    stages.result.num_modes, stages.result.modes = len(modes.loc), modes.loc
    if not weighs:
        return modes
    draws, weights = passes.weigh(modes)
    if weights is None or policy.accepts(weights):
        stages.result.draws = passes.stored(draws, weights)
    elif find_symmetries(target, stages.limit.left()):
        return None
    return modes


def _precise(target: Target, point: Tensor, policy: ManyRowsPolicy) -> Target:
    """Return the posterior in double precision if single precision rounds its height visibly."""
    error = target.log_prob(point).abs() * torch.finfo(point.dtype).eps
    if error > policy.rounding:
        with suppress(Exception):  # of a model that mixes dtypes
            wide = target.in_double()
            if wide.log_prob(point.double()).isfinite():
                return wide
    return target


def _is_too_slow(stages: Stages, target: Target) -> bool:
    """Return whether the search would exceed its budget."""
    return make_plan(target, stages.policy.budget, stages.limit).search_iterations == 0


def _agrees(few: Modes, modes: Modes, policy: ManyRowsPolicy) -> bool:
    """Return whether the best Gaussians of some and of all rows have similar widths."""
    ratios = torch.linalg.solve_triangular(modes.scale_tril[0], few.scale_tril[0], upper=False)
    return bool((torch.linalg.svdvals(ratios).log().abs() < math.log(policy.max_ratio)).all())
