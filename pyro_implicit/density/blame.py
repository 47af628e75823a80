# SPDX-License-Identifier: Apache-2.0
"""Which site is to blame: what a model must be for its log-density, said by the site's name."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from pyro.distributions.util import scale_and_mask
from pyro.infer.inspect import get_dependencies
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_implicit.density.discrete import is_discrete_latent, refuse_infinite
from pyro_implicit.density.supports import observation_outside
from pyro_implicit.density.validation import without_validation
from pyro_implicit.user_warnings import warn_user

if TYPE_CHECKING:
    from pyro_implicit.density.latent_density import LatentDensity

__all__ = ["blame", "refuse_unfit_sites", "warn_of_missing_data"]

Site = dict[str, Any]


def refuse_unfit_sites(trace: Trace) -> None:
    """Check that a model's sites make a density of continuous latents.

    :param trace: of the model with its data.
    :raises RuntimeError: for a model without continuous latents.
    :raises ValueError: for a discrete latent that cannot be summed out, a latent in a sequential
        plate, or an observation that is NaN or outside its support.
    :warns UserWarning: for a latent of which some elements are masked, as ``obs_mask`` makes them.
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
    if all(is_discrete_latent(site) for site in latents.values()):
        raise RuntimeError(
            f"the model has no continuous latents: {', '.join(latents)} are discrete, and summed "
            "out. Cure: pyro.infer.infer_discrete, which needs no guide"
        )
    for name, site in latents.items():
        if not is_discrete_latent(site):
            _warn_of_masked(name, site)
    for name, site in observed.items():
        fault = _nan(site["value"])
        if fault and not _log_prob(site).isfinite().all():
            raise ValueError(
                f"the observation of site '{name}' is NaN in {fault}. Cure: leave these elements "
                "out, or mask them: pyro.sample(name, fn.mask(~y.isnan()), obs=y.nan_to_num(1.0))"
            )
        fault = observation_outside(site)
        if fault:
            raise ValueError(
                f"the observation of site '{name}' is {fault}. Cure: other data, or a distribution "
                "of that support; its validate_args=False if this is meant, as with gray pixels "
                "under a Bernoulli"
            )


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


@torch.no_grad()
def blame(density: LatentDensity, points: Tensor) -> str:
    """What keeps a log-density from being finite, by site.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro_implicit.density import LatentDensity
    >>> def model():
    ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     fn = dist.Gamma(2.0, scale, validate_args=False)
    ...     pyro.sample("y", fn, obs=torch.tensor(-1.0))
    >>> print(blame(LatentDensity(model), torch.zeros(3, 1)))
    site 'y' at 3 of 3: its observation is outside GreaterThanEq(lower_bound=0.0) in 1 of 1 elements

    :param points: unconstrained vectors, ``(num_points, latent_dim)``; the first twenty are asked.
    :returns: a clause for each site to blame.
    """
    points = points[:20]
    reasons: dict[str, Counter[str]] = {}
    for point in points:
        try:
            trace = density.trace_at(point)
        except Exception as error:
            first_line = f"{type(error).__name__}: {error}".strip().split("\n")[0]
            reasons.setdefault("the model", Counter())[f"it raises {first_line}"] += 1
            continue
        for name, site in trace.nodes.items():
            if site["type"] != "sample" or site_is_subsample(site):
                continue
            reason = _reason(site)
            if reason:
                reasons.setdefault(f"site '{name}'", Counter())[reason] += 1
    clauses = []
    for who, found in reasons.items():
        (reason, _), *_ = found.most_common(1)
        clauses.append(f"{who} at {found.total()} of {len(points)}: {reason}")
    return "; ".join(clauses) or "no site by itself; its gradient is not finite"


def _split(trace: Trace) -> tuple[dict[str, Site], dict[str, Site]]:
    """Latent and observed sites; deterministic ones are neither."""
    sites = {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample"
        and not site_is_subsample(site)
        and not site["infer"].get("_deterministic")
    }
    observed = {name: site for name, site in sites.items() if site["is_observed"]}
    return {name: site for name, site in sites.items() if name not in observed}, observed


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
                f"latent '{name}' is in a sequential plate, '{frame.name}', which Pyro's "
                "unconstrained view of latents refuses. Cure: a vectorised one, with "
                f"pyro.plate('{frame.name}', {frame.size}):, or range({frame.size}) in its place"
            )


def _kind(fn: Any) -> str:
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return type(fn).__name__


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


def _nan(value: Tensor) -> str:
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return ""
    number = int(value.isnan().sum())
    return f"{number} of {value.numel()} elements" if number else ""


def _log_prob(site: Site) -> Tensor:
    log_prob = without_validation(site["fn"]).log_prob(site["value"], *site["args"])
    return scale_and_mask(torch.as_tensor(log_prob), mask=site["mask"])


def _reason(site: Site) -> str:
    """Why a site's log-density is not finite, or nothing if it is."""
    fn, value = site["fn"], site["value"]
    what = "its observation" if site["is_observed"] else "its value"
    try:
        log_prob = _log_prob(site)
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().split("\n")[0]
    if _nan(value) and site["is_observed"]:
        return f"{what} is NaN in {_nan(value)}"
    if log_prob.isfinite().all():
        return ""
    if _nan(value):
        return f"{what} is NaN in {_nan(value)}"
    try:
        inside = fn.support.check(value)
    except (AttributeError, NotImplementedError):
        inside = torch.tensor(True)
    if not inside.all():
        number = inside.numel() - int(inside.sum())
        return f"{what} is outside {fn.support} in {number} of {inside.numel()} elements"
    if log_prob.isnan().any():
        return f"its log-density is NaN: look at the parameters of {_kind(fn)}"
    is_factor = _kind(fn) == "Unit"
    number = int((~log_prob.isfinite()).sum())
    sign = "+inf" if (log_prob == torch.inf).any() else "-inf"
    return (
        f"the factor is {sign}"
        if is_factor
        else f"its log-density is {sign} in {number} of {log_prob.numel()} elements"
    )
