# SPDX-License-Identifier: Apache-2.0
"""What a model's sites must be for its log-density, said by the site's name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions import SineBivariateVonMises, VonMises
from pyro.distributions.constraints import sphere
from pyro.infer.inspect import get_dependencies
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import MixtureSameFamily, biject_to, constraints

from pyro_implicit.density.blame import Site, describe_nan, site_log_prob
from pyro_implicit.density.discrete import is_discrete_latent, refuse_infinite
from pyro_implicit.density.observations import (
    mistyped_observation,
    repeated_observation,
    simulated_observation,
)
from pyro_implicit.density.supports import observation_outside
from pyro_implicit.runtime.sites import innermost, is_data
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = [
    "refuse_missing_data",
    "refuse_unfit_data",
    "refuse_unfit_sites",
    "warn_of_missing_data",
]


def refuse_unfit_sites(trace: Trace) -> None:
    """Check that a model's sites make a density of continuous latents.

    :param trace: of the model with its data.
    :raises RuntimeError: for a model without continuous latents, or of which none has elements.
    :raises ValueError: for a discrete latent that cannot be summed out, a latent in a sequential
        plate or one of a support without unconstrained coordinates, or an observation that
        broadcasting repeats, or that is NaN or outside its support.
    :raises TypeError: for an observation of a type of which its distribution has no density.
    :warns UserWarning: for a latent of which some elements are masked, as ``obs_mask`` makes them,
        and an angle on the whole real line.
    """
    latents, observed = _split(trace)
    if not latents:
        raise RuntimeError(
            f"the model has no latent sites: {_all_observed(observed)}. Cure: pyro.sample without "
            "obs= for what is to be inferred; a model that has only pyro.param is trained by "
            "SVI(model, lambda *args, **kwargs: None, optim, Trace_ELBO())"
        )
    for name, site in latents.items():
        refuse_infinite(name, site)
        _refuse_sequential(name, site)
        _refuse_boundless(name, site)
    continuous = {name: site for name, site in latents.items() if not is_discrete_latent(site)}
    if not continuous:
        raise RuntimeError(
            f"the model has no continuous latents: {', '.join(latents)} are discrete, and summed "
            "out. Cure: pyro.infer.infer_discrete, which needs no guide"
        )
    if not any(site["value"].numel() for site in continuous.values()):
        shapes = ", ".join(
            f"'{n}' of shape {tuple(s['value'].shape)}" for n, s in continuous.items()
        )
        raise RuntimeError(
            f"the model's latent sites have no elements: {shapes}. Cure: data or plates that are "
            "not empty"
        )
    for name, site in continuous.items():
        _warn_of_masked(name, site)
        _warn_of_angle(name, site)
    refuse_unfit_data(trace)


def refuse_unfit_data(trace: Trace) -> None:
    """Check that a model's observations have a density.

    :param trace: of the model with its data.
    :raises ValueError: for an observation that broadcasting repeats, that does not broadcast, that
        is NaN or outside its support, or of a point mass.
    :raises TypeError: for an observation of a type of which its distribution has no density.
    """
    observed = _split(trace)[1]
    for name, site in observed.items():
        fault = mistyped_observation(name, site)
        if fault:
            raise TypeError(fault)
        fault = repeated_observation(name, site)
        if fault:
            raise ValueError(fault)
    refuse_missing_data(trace)
    for name, site in observed.items():
        fault = simulated_observation(name, site)
        if fault:
            raise ValueError(fault)
        fault = observation_outside(site)
        if fault:
            raise ValueError(
                f"the observation of site '{name}' is {fault}. Cure: other data, or a distribution "
                "of that support; its validate_args=False if this is meant, as with gray pixels "
                "under a Bernoulli"
            )


def refuse_missing_data(trace: Trace, where: str = "") -> None:
    """Check that no observation is NaN where it counts.

    :param trace: of the model with its data.
    :param where: which data these are.
    :raises ValueError: naming the site.
    """
    for name, site in _split(trace)[1].items():
        fault = describe_nan(site["value"])
        if fault and bool((_missing(site) & ~site_log_prob(site).isfinite()).any()):
            raise ValueError(
                f"the observation of site '{name}'{where} is NaN in {fault}. Cure: leave these "
                "elements out, or mask them: pyro.sample(name, fn.mask(~y.isnan()), "
                "obs=y.nan_to_num(1.0))"
            )


def _missing(site: Site) -> Tensor:
    """Which elements are NaN, in part at least, of those that have a log-density each."""
    missing: Tensor = site["value"].isnan()
    event_dim = site["fn"].event_dim
    return missing.flatten(-event_dim).any(-1) if event_dim else missing


def warn_of_missing_data(
    model: Callable[..., Any], trace: Trace, args: tuple, kwargs: dict[str, Any]
) -> None:
    """Say so if the model observes nothing, though it was given arguments or misses one, and a
    latent in a plate looks like data: no other site depends on it.

    :param trace: of the model.
    :param args: of the model, as ``kwargs``.
    :warns UserWarning: naming site, plate and number of latents.
    """
    latents, observed = _split(trace)
    if observed or not (args or kwargs or _misses_argument(model, args, kwargs)):
        return
    try:
        parents = get_dependencies(model, args, kwargs)["prior_dependencies"]
    except Exception:  # some models cannot be traced with provenance: then nothing is known
        return
    for name, site in latents.items():
        plates = [frame.name for frame in site["cond_indep_stack"]]
        used = any(name in above for child, above in parents.items() if child != name)
        if plates and not used:
            warn_user(
                f"the model observes nothing, and no site depends on '{name}': "
                f"{site['value'].numel()} latents in plate '{plates[-1]}'. Cure: if these are "
                f"data, pass them to the model, with obs= in pyro.sample('{name}', ...)",
            )


def _split(trace: Trace) -> tuple[dict[str, Site], dict[str, Site]]:
    """Latent and observed sites; deterministic ones are neither."""
    sites = {n: s for n, s in trace.nodes.items() if s["type"] == "sample"}
    latents = {
        name: site
        for name, site in sites.items()
        if not site["is_observed"] and not site_is_subsample(site)
    }
    return latents, {name: site for name, site in sites.items() if is_data(site)}


def _all_observed(observed: dict[str, Site]) -> str:
    names = ", ".join(f"'{name}'" for name in observed)
    return f"all that it samples is observed ({names})" if observed else "it samples nothing"


def _misses_argument(model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an argument of the model is None: observations that were not given."""
    try:
        bound = inspect.signature(model).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    bound.apply_defaults()
    return any(value is None for value in bound.arguments.values())


def _refuse_sequential(name: str, site: Site) -> None:
    for frame in site["cond_indep_stack"]:
        if not (frame.vectorized or is_discrete_latent(site)):
            raise ValueError(
                f"latent '{name}' is in a sequential plate that subsamples, '{frame.name}', and "
                "so is another one each time. Cure: the plate without subsample_size"
            )


def _refuse_boundless(name: str, site: Site) -> None:
    if is_discrete_latent(site):
        return
    support = site["fn"].support
    try:
        biject_to(support)
    except NotImplementedError:
        cure = "another distribution, or the same written as a function of other sites"
        if isinstance(support, type(constraints.positive_definite)):
            cure = (
                "a Cholesky factor of it, such as scale.unsqueeze(-1) * pyro.sample('"
                f"{name}_cholesky', dist.LKJCholesky(dim)) with a site for the scales"
            )
        elif support is sphere:
            cure = (
                "dist.ProjectedNormal, and a model reparameterised by poutine.reparam(config="
                f"{{'{name}': ProjectedNormalReparam()}})"
            )
        elif isinstance(site["fn"], MixtureSameFamily):
            cure = (
                f"which = pyro.sample('{name}_which', dist.Categorical(weights)), which is summed "
                f"out, and pyro.sample('{name}', ...) of that component"
            )
        raise ValueError(
            f"latent '{name}' has no unconstrained coordinates, as torch has no bijection to its "
            f"support, {support}. Cure: {cure}"
        ) from None


def _warn_of_angle(name: str, site: Site) -> None:
    fn = innermost(site["fn"])
    if isinstance(fn, (SineBivariateVonMises, VonMises)):
        warn_user(
            f"latent '{name}' is an angle ({type(fn).__name__}) whose density repeats itself on "
            "the whole real line: unless the data tell it well, draws lie in several turns, and "
            "their moments mean nothing. Cure: dist.ProjectedNormal with "
            f"pyro.infer.reparam.ProjectedNormalReparam; or {name} = pyro.sample('{name}', "
            f"dist.Uniform(-math.pi, math.pi)) and pyro.factor('{name}_prior', "
            f"fn.log_prob({name})), with fn its distribution now"
        )


def _warn_of_masked(name: str, site: Site) -> None:
    mask = site["mask"]
    if not isinstance(mask, Tensor) or mask.all():
        return
    batch_shape = torch.broadcast_shapes(mask.shape, site["fn"].batch_shape)
    masked = batch_shape.numel() - int(mask.expand(batch_shape).sum())
    what = "the model masks them"
    cure = "do not mask latents"
    if name.endswith("_unobserved"):
        base = name.removesuffix("_unobserved")
        what = f"obs_mask makes a latent of every row of '{base}', of those that are observed too"
        cure = (
            f"sample the rows apart, pyro.sample('{base}', fn_known, obs=y[mask]) and "
            f"pyro.sample('{base}_missing', fn_missing); or leave out the missing ones, by "
            "fn.mask(mask) and obs=y.nan_to_num(1.0) in place of obs_mask"
        )
    warn_user(
        f"{masked} of {batch_shape.numel()} elements of latent '{name}' have no density ({what}): "
        "they are improper, no guide can fit them, and every bound counts them. Cure: " + cure,
    )
