# SPDX-License-Identifier: Apache-2.0
"""The first run of a model and guide, with all of Pyro's checks, which tells their shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from pyro import poutine
from pyro.infer.util import is_validation_enabled
from pyro.poutine.util import prune_subsample_sites
from pyro.util import check_model_guide_match, check_site_shape

from pyro_implicit.density.checks import refuse_missing_data
from pyro_implicit.density.model import IMPOSSIBLE, DiscreteSum, leave_out_masked
from pyro_implicit.density.policy import RUNS
from pyro_implicit.distributions import find_implicit
from pyro_implicit.guides.posterior_draws import refuse_other_guide

__all__ = ["FirstRun", "first_run"]

Site = dict[str, Any]


class FirstRun(NamedTuple):
    """The deepest nesting of plates, the guide's sample sites by name, and the model's discrete
    latents that the guide leaves to be summed out."""

    plate_nesting: int
    guide_sites: dict[str, Site]
    discrete: DiscreteSum | None


def first_run(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    max_plate_nesting: float,
) -> FirstRun:
    """Run guide and model once, outside of all plates and traces.

    A draw of the guide at which the model raises an error gives place to another.

    :raises ValueError: naming the site, for a latent of the model that the guide lacks, one of the
        guide that the model lacks, or an observation that is NaN.
    """
    validates = is_validation_enabled()
    for retries_left in reversed(range(RUNS.max_retries)):
        forgiving = contextlib.suppress(*(IMPOSSIBLE if retries_left else ()))
        has_run = False
        with forgiving, poutine.block():
            guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
            replayed = poutine.replay(model, trace=guide_trace)
            model_trace = poutine.trace(replayed).get_trace(*args, **kwargs)
            has_run = True
        if not has_run:
            continue
        # No other draw of the guide would mend these faults.
        discrete = DiscreteSum.of(model_trace, given=guide_trace)
        for name in discrete.names if discrete else ():
            model_trace.remove_node(name)
        refuse_other_guide(guide, model_trace, guide_trace)
        if validates:
            check_model_guide_match(model_trace, guide_trace, max_plate_nesting)
        guide_trace = prune_subsample_sites(guide_trace)
        model_trace = prune_subsample_sites(model_trace)
        if not validates:
            break
        leave_out_masked(model_trace)
        refuse_missing_data(model_trace)
        with forgiving:
            model_trace.compute_log_prob()
            guide_trace.compute_log_prob(lambda name, site: find_implicit(site["fn"]) is None)
            break
    dims = [0]
    sites: dict[str, Site] = {}
    for trace in (model_trace, guide_trace):
        for name, site in trace.nodes.items():
            if site["type"] != "sample":
                continue
            if validates and "log_prob" in site:
                check_site_shape(site, max_plate_nesting)
            dims += [-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized]
            if trace is guide_trace:
                sites[name] = site
    return FirstRun(max(dims), sites, discrete)
