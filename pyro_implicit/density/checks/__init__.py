# SPDX-License-Identifier: Apache-2.0
"""Checks of a model, in the order in which :class:`~pyro_implicit.density.Target` makes them.

1. The first run: ``observations.explain`` names the argument to blame for an error of the model.
2. Subsampling: all data are needed, or minibatches without latent variables of single rows.
3. Latent variables (here): continuous, with elements, unconstrained coordinates and a density.
4. ``observations``: of a type and a shape that the distribution takes, neither NaN nor impossible.
5. Missing data: a warning if the model observes nothing.
6. Discrete latent variables: one enumerated run, or runs at draws of the prior (``discrete``).
7. Supports of latent variables that change with others.

Numerical checks, for results that are not finite, are in ``numerics``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta, Empirical, VonMises
from pyro.distributions.constraints import sphere
from pyro.poutine.trace_struct import Trace
from torch.distributions import MixtureSameFamily, biject_to, constraints

from pyro_implicit.density.bijections import is_endless
from pyro_implicit.density.checks.observations import refuse_unfit_data, support_bounds
from pyro_implicit.density.model import IMPOSSIBLE, Model, refuse_infinite, varying_site
from pyro_implicit.runtime.messages import warn_user
from pyro_implicit.runtime.sites import (
    Site,
    innermost,
    innermost_support,
    is_data,
    is_discrete_latent,
    is_flat,
    is_latent,
    unmasked_elements,
)

__all__ = [
    "MovingSupportError",
    "refuse_moving_sites",
    "refuse_moving_supports",
    "refuse_point",
    "refuse_unfit_sites",
    "warn_of_angle",
]


def refuse_unfit_sites(trace: Trace, sampled: Collection[str] = ()) -> None:
    """Check that a model's sites make a density of continuous latent variables.

    The observations are checked as well.

    :param trace: trace of the model with its data.
    :param sampled: discrete latent variables that have coordinates of their own.
    :raises RuntimeError: for a model without continuous latent variables, or without elements.
    :raises ValueError: for a discrete latent variable that cannot be summed out, one in a
        sequential plate that subsamples, one with a ``Delta`` or ``Empirical`` prior, or one
        without unconstrained coordinates.
    :warns UserWarning: for a latent variable with masked elements, and a transformed angle.
    """
    latents = {name: site for name, site in trace.nodes.items() if is_latent(site)}
    if not latents:
        names = ", ".join(f"'{name}'" for name, site in trace.nodes.items() if is_data(site))
        found = f"all that it samples is observed ({names})" if names else "it samples nothing"
        raise RuntimeError(
            f"the model has no latent sites: {found}. Cure: pyro.sample without obs= for the "
            "quantities to be inferred, or expose some if poutine.block hides them all; train a "
            "model that has only pyro.param by "
            "SVI(model, lambda *args, **kwargs: None, optim, Trace_ELBO())"
        )
    continuous = {}
    for name, site in latents.items():
        if name in sampled:
            continue
        refuse_infinite(name, site)
        if not is_discrete_latent(site):
            continuous[name] = site
            _refuse_sequential(name, site)
            refuse_point(name, site)
            _refuse_boundless(name, site)
    if not continuous and not sampled:
        raise RuntimeError(
            f"the model has no continuous latents: {', '.join(latents)} are discrete, and summed "
            "out. Cure: fit(model, 'auto', ...), which samples them, or pyro.infer.infer_discrete"
        )
    own = continuous | {name: latents[name] for name in sampled}
    if not any(site["value"].numel() for site in own.values()):
        shapes = ", ".join(f"'{n}' of shape {tuple(s['value'].shape)}" for n, s in own.items())
        raise RuntimeError(
            f"the model's latent sites have no elements: {shapes}. Cure: data or plates that are "
            "not empty"
        )
    for name, site in continuous.items():
        _warn_of_masked(name, site)
        _warn_of_transformed_angle(name, site)
    refuse_unfit_data(trace)


def _refuse_sequential(name: str, site: Site) -> None:
    for frame in site["cond_indep_stack"]:
        if not frame.vectorized:
            raise ValueError(
                f"latent '{name}' is in a sequential plate that subsamples, '{frame.name}', so "
                "that each run has other latents. Cure: the plate without subsample_size"
            )


def refuse_point(name: str, site: Site) -> None:
    """Check that the prior of a latent variable has a density between single points.

    :raises ValueError: for a ``Delta`` or ``Empirical`` prior, with the cure.
    """
    if isinstance(innermost(site["fn"]), Empirical):
        raise ValueError(
            f"latent '{name}' has the prior Empirical, whose density is 0 between its samples. "
            f"Cure: which = pyro.sample('{name}_which', dist.Categorical(logits=log_weights)), "
            "which is summed out, and Vindex(samples)[which] for the value; a Normal fitted to the "
            "samples; or, for the posterior of a result of fit, result.update(...)"
        )
    if isinstance(innermost(site["fn"]), Delta):
        raise ValueError(
            f"latent '{name}' has the prior Delta, whose density is 0 at all other values. Cure: "
            f"pyro.deterministic('{name}', ...) for a value that the model computes; a Normal with "
            "a scale, for a value that is uncertain"
        )


def _refuse_boundless(name: str, site: Site) -> None:
    fn, support = innermost(site["fn"]), site["fn"].support
    reason = ""
    try:
        biject_to(support)
    except NotImplementedError:
        reason = f"torch has no bijection to its support, {support}"
    if isinstance(fn, MixtureSameFamily):
        cure = (
            f"which = pyro.sample('{name}_which', dist.Categorical(weights)), which is summed "
            f"out, and pyro.sample('{name}', ...) of that component"
        )
        if reason:
            reason = "the components of its mixture may have different bounds"
        elif is_endless(fn.component_distribution):
            reason = "the components of its mixture are densities of angles"
    elif support is sphere:
        cure = (
            "dist.ProjectedNormal, and a model reparameterised by poutine.reparam(config="
            f"{{'{name}': ProjectedNormalReparam()}})"
        )
    else:
        cure = "another distribution, or the same written as a function of other sites"
    if reason:
        raise ValueError(
            f"latent '{name}' has no unconstrained coordinates: {reason}. Cure: {cure}"
        )


def warn_of_angle(name: str) -> None:
    """Warn of a latent variable whose density is periodic on the real line of a guide."""
    warn_user(
        f"latent '{name}' is an angle, whose density repeats itself on the whole real line: unless "
        "the data determine it well, draws of the guide lie in several turns, and their moments "
        "mean nothing. Cure: fit(model, 'auto', ...), whose draws lie within one turn; "
        "dist.ProjectedNormal with pyro.infer.reparam.ProjectedNormalReparam; or "
        f"{name} = pyro.sample('{name}', dist.Uniform(-math.pi, math.pi)) and "
        f"pyro.factor('{name}_prior', fn.log_prob({name})), with fn its distribution now"
    )


def _warn_of_transformed_angle(name: str, site: Site) -> None:
    # The support of other angles is one turn.
    if (
        isinstance(innermost(site["fn"]), VonMises)
        and innermost_support(site["fn"].support) is constraints.real
    ):
        warn_user(
            f"latent '{name}' is a transformed angle, whose density repeats itself on the whole "
            f"real line. Cure: pyro.sample('{name}', ...) of the angle itself, and the "
            "transformation in the model"
        )


def _warn_of_masked(name: str, site: Site) -> None:
    if is_flat(site["fn"]) or name.endswith("_unobserved"):  # of obs_mask
        return
    has_prior = unmasked_elements(site)
    masked = has_prior.numel() - int(has_prior.sum())
    # A mask of all elements is deliberate: another term, such as a factor, is their density.
    if 0 < masked < has_prior.numel():
        warn_user(
            f"{masked} of {has_prior.numel()} elements of latent '{name}' have no prior, because "
            "the model masks them: elements on which nothing else depends are improper, no guide "
            "can fit them, and every bound counts them. Cure: mask observations, but not latents"
        )


class MovingSupportError(ValueError):
    """The supports of latent variables depend on others, or on parameters.

    :param message: names site and cure.
    :param names: all such sites.
    """

    # With a default, as Pyro makes an error of a run anew from its message.
    def __init__(self, message: str, names: Collection[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


def _moving(causes: dict[str, str]) -> MovingSupportError:
    name, cause = next(iter(causes.items()))
    return MovingSupportError(
        f"the support of latent '{name}' changes with {cause}, but its unconstrained "
        "coordinate belongs to one support: posterior mass outside of it would be lost. Cure: "
        f"pyro.poutine.reparam(model, {{'{name}': pyro_implicit.SupportReparam()}}), which "
        f"samples its position '{name}_base' within the support",
        causes,
    )


def refuse_moving_supports(
    model: Callable[..., Any], args: tuple, kwargs: dict[str, Any], latents: Trace
) -> None:
    """Check that the supports of latent variables do not depend on others or on parameters.

    The model is run once more if a support has tensors for bounds.

    :param latents: latent variables of a run of the model.
    :raises MovingSupportError: naming sites and cure.
    :raises ValueError: for a site that the other run does not have.
    """
    sites = {name: s for name, s in latents.nodes.items() if not is_discrete_latent(s)}
    first = {name: site["fn"] for name, site in sites.items() if _has_bounds(site["fn"])}
    if not first:
        return
    shifts = torch.linspace(0.1, 0.2, len(sites)).tolist()  # no two the same
    values = {}
    for (name, site), shift in zip(sites.items(), shifts, strict=True):
        transform = biject_to(site["fn"].support)
        values[name] = transform(transform.inv(site["value"].detach()) + shift)
    try:
        with poutine.block(), pyro.validation_enabled(False), torch.enable_grad():
            nodes = Model(model, args, kwargs, latents.copy()).run(values).nodes
    except IMPOSSIBLE:
        return
    causes = {}
    for name, fn in first.items():
        if name not in nodes:
            raise varying_site(name)
        other = nodes[name]["fn"]
        pairs = list(zip(support_bounds(fn.support), support_bounds(other.support), strict=True))
        if not all(torch.equal(one, two) for one, two in pairs):
            causes[name] = f"other latents ({fn.support} in one run, {other.support} in another)"
        elif any(bound.requires_grad for _, bound in pairs):
            causes[name] = "parameters that are learnt"
    if causes:
        raise _moving(causes)


def refuse_moving_sites(first: Trace, others: Iterable[Trace], names: Iterable[str]) -> None:
    """Check that discrete latent variables change neither the others nor their shapes or supports.

    :param first: a run of the model.
    :param others: runs at other draws of the prior.
    :param names: the discrete latent variables that are sampled.
    :raises ValueError: naming both sites.
    """
    cause = "the discrete latent " + " or ".join(f"'{name}'" for name in names)
    before = {name: site["fn"] for name, site in first.nodes.items() if is_latent(site)}
    for other in others:
        after = {name: site["fn"] for name, site in other.nodes.items() if is_latent(site)}
        for name in sorted(before.keys() | after.keys()):
            one, two = before.get(name), after.get(name)
            if one is None or two is None or one.shape() != two.shape():
                what = "is in some runs of the model and not in others"
                if one is not None and two is not None:
                    what = f"has the shape {tuple(one.shape())} in one run and "
                    what += f"{tuple(two.shape())} in another"
                raise ValueError(
                    f"latent '{name}' {what}, as if {cause} changed the number of other latents: "
                    "chains need latents of fixed number and shape. Cure: sample the largest "
                    "number always, and leave out what is not used by "
                    "torch.where(torch.arange(most) < number, ...)"
                )
            if not one.support.is_discrete and _has_bounds(one):
                bounds = zip(support_bounds(one.support), support_bounds(two.support), strict=True)
                if not all(torch.equal(a, b) for a, b in bounds):
                    raise _moving({name: cause})


def _has_bounds(fn: Any) -> bool:
    try:
        return any(True for _ in support_bounds(fn.support))
    except (AttributeError, NotImplementedError):
        return False
