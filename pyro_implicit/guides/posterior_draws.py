# SPDX-License-Identifier: Apache-2.0
"""Posterior draws of any guide, and checks of what users pass as a guide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.contrib.easyguide import EasyGuide
from pyro.infer import MCMC, Predictive
from pyro.infer.autoguide import AutoCallable, AutoGuide, AutoMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_implicit.runtime.messages import first_line
from pyro_implicit.runtime.sites import is_data, is_discrete_latent

__all__ = [
    "draw",
    "draws_in_parallel",
    "guide_of",
    "name_of",
    "posterior_of",
    "refuse_missing_sites",
    "refuse_other_guide",
    "refuse_swapped",
    "samples_of",
    "trace_guide",
]

OR_DRAWS = "a dict of draws by site, or an object with get_samples()"


@torch.no_grad()
def draw(
    guide: Callable[..., Any], num_samples: int, /, *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    """Draw from a guide, in constrained space.

    Draws of Pyro's autoguides and guides with ``sample_posterior`` are vectorised; other guides are
    called once per draw. Auxiliary sites (``infer={"is_auxiliary": True}``) and deterministic sites
    are left out.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model():
    ...     pyro.sample("scale", dist.LogNormal(0.0, 1.0).expand([3]).to_event(1))
    >>> draw(AutoNormal(model), 100)["scale"].shape
    torch.Size([100, 3])

    :param guide: a Pyro guide.
    :param num_samples: number of draws.
    :param args: arguments of the model and the guide; a guide that was called before and does not
        read them needs none.
    :param kwargs: their keyword arguments.
    :returns: draws ``(num_samples, *shape)`` of every latent site of this ``shape``, without
        gradient.
    :raises TypeError: if the guide's arguments are missing, or if it observes a site.
    """
    # Call it once in any case: an autoguide reads its model in the first call.
    trace = trace_guide(guide, args, kwargs)
    if hasattr(guide, "sample_posterior") and "num_samples" not in kwargs:
        with poutine.block():  # guides may draw from guides
            return guide.sample_posterior(num_samples, *args, **kwargs)
    # Predictive adds dimensions for plates, (N, 1, 3) for a site of shape (3,) outside of them.
    shapes = {
        name: site["value"].shape
        for name, site in trace.iter_stochastic_nodes()
        if not site["infer"].get("is_auxiliary") and not site_is_subsample(site)
    }
    predictive = Predictive(
        guide, num_samples=num_samples, return_sites=list(shapes), parallel=_broadcasts(guide)
    )
    with poutine.block():
        samples = predictive(*args, **kwargs)
    return {
        name: samples[name].detach().reshape(num_samples, *shape).clone()
        for name, shape in shapes.items()
    }


def trace_guide(guide: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Trace one run of a guide.

    :raises TypeError: if its arguments are missing, or it observes a site.
    """
    try:
        with poutine.block():
            trace: Any = poutine.trace(guide).get_trace(*args, **kwargs)
    except TypeError as error:
        if args or kwargs:
            raise
        raise TypeError(
            f"the guide {name_of(guide)} could not run without arguments ({error}). Cure: pass the "
            "arguments of the model as well, as in compare(model, guide, mcmc, x, y), or call an "
            "autoguide once before, guide(x, y)"
        ) from error
    if isinstance(guide, Messenger):  # which runs the model itself
        return trace
    for name, site in trace.nodes.items():
        is_auxiliary = site["type"] == "sample" and site["infer"].get("is_auxiliary", False)
        if is_data(site, factors=False) and not is_auxiliary:
            raise TypeError(
                f"the guide {name_of(guide)} observes site '{name}', as only a model does. Cure: "
                "the order of arguments is (model, guide, *args)"
            )
    return trace


def refuse_swapped(function: str, model: Any, guide: Any) -> None:
    """Refuse a guide in place of the model, with a ``TypeError`` of the named function."""
    if isinstance(model, (AutoGuide, EasyGuide, AutoMessenger, Mapping)):
        raise TypeError(
            f"{function} needs the model first, but got {name_of(model)} there and "
            f"{name_of(guide)} as the guide. Cure: {function}(model, guide, ...)"
        )


def refuse_missing_sites(
    who: str, wanted: Iterable[str], found: Iterable[str], what: str = "a guide"
) -> None:
    """Check that draws of all latent sites are there.

    :param who: the source of the draws, with its verb.
    :param wanted: the model's sites.
    :param found: the sites of the source.
    :param what: is needed instead, for the cure.
    :raises ValueError: naming the sites.
    """
    wanted, found = set(wanted), set(found)
    if wanted - found:
        extra = sorted(found - wanted)
        raise ValueError(
            f"{who} no draws of {sorted(wanted - found)}, which the model samples"
            + (f", but {who.split()[-1]} {extra}, which it does not" if extra else "")
            + f". Cure: {what} of this model, with every latent site"
        )


def refuse_other_guide(guide: Any, model_trace: Trace, guide_trace: Trace) -> None:
    """Check that a guide samples all continuous latents of a model, and no other sites.

    :param guide: for its name.
    :param model_trace: trace of one run of the model with its data.
    :param guide_trace: trace of one run of the guide with the same arguments.
    :raises ValueError: naming the sites that the guide lacks, or that the model does not sample.
    """
    sampled, found = (
        {name: site for name, site in trace.iter_stochastic_nodes() if not site_is_subsample(site)}
        for trace in (model_trace, guide_trace)
    )
    extra = {
        name
        for name, site in found.items()
        if name not in sampled and not site["infer"].get("is_auxiliary")
    }
    # The guide may leave discrete latents out, or sample them.
    latents = {name for name, site in sampled.items() if not is_discrete_latent(site)}
    known = latents & found.keys() | extra
    refuse_missing_sites(f"the guide {name_of(guide)} has", latents, known)
    if extra:
        fault = "does not have" if extra.isdisjoint(model_trace) else "observes or computes"
        raise ValueError(
            f"the guide {name_of(guide)} samples {sorted(extra)}, which the model {fault}. Cure: a "
            "guide of this model, with its data and reparameterisations; mark variables of the "
            "guide's own with infer={'is_auxiliary': True} in pyro.sample"
        )


def guide_of(function: str, given: Any, or_draws: bool = False) -> Any:
    """Return the guide of a result of ``fit``, or the given guide.

    :param function: name of the function for the message.
    :param or_draws: whether draws by site, or an object with ``get_samples``, are allowed.
    :raises TypeError: for anything else.
    """
    guide = given.guide if _is_fit(given) else given
    if or_draws and (hasattr(guide, "get_samples") or isinstance(guide, Mapping)):
        return samples_of(guide, "given")
    if not callable(guide):
        raise _no_guide(function, guide, OR_DRAWS if or_draws else "")
    return guide


def posterior_of(function: str, given: Any) -> Any:
    """Return the posterior of a result of ``fit``, or the given guide or draws.

    :param function: name of the function for the message.
    :returns: a guide, draws by site, or an object with ``get_samples``.
    :raises TypeError: for anything else.
    """
    posterior = given.posterior if _is_fit(given) else given
    if not (
        callable(posterior) or isinstance(posterior, Mapping) or hasattr(posterior, "get_samples")
    ):
        raise _no_guide(function, posterior, OR_DRAWS)
    return posterior


def samples_of(source: Any, side: str) -> dict[str, Tensor]:
    """Return draws by site, of an ``MCMC``, another object with ``get_samples``, or a dict.

    :param side: description of the draws for the message.
    :returns: tensors ``(num_draws, *site_shape)``, also for arrays and lists.
    :raises ValueError: for an ``MCMC`` that has not run.
    :raises TypeError: for values that are not arrays.
    """
    if isinstance(source, Mapping):
        return {name: _as_tensor(name, value, side) for name, value in source.items()}
    if isinstance(source, MCMC) and source._samples is None:
        raise ValueError(f"the {side} MCMC has no draws yet: call its run(...) first.")
    return dict(source.get_samples())


def draws_in_parallel(guide: Callable[..., Any]) -> bool:
    """Check whether draws of a guide are vectorised."""
    return hasattr(guide, "sample_posterior") or _broadcasts(guide)


def _is_fit(given: Any) -> bool:
    return all(hasattr(given, name) for name in ("source", "guide"))


def _no_guide(function: str, given: Any, others: str) -> TypeError:
    return TypeError(
        f"{function} needs a guide, but got {name_of(given)}. Cure: {function}(model, guide, ...) "
        f"with a guide or a result of fit{others and f', {others}'}"
    )


def _as_tensor(name: str, value: Any, side: str) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"the {side} draws of site '{name}' are a {name_of(value)} that is not an array "
            f"({first_line(error)}). Cure: a tensor (num_draws, *site_shape)"
        ) from error


def _broadcasts(guide: Callable[..., Any]) -> bool:
    """Check whether a guide can run inside another plate: users' code may not."""
    if not isinstance(guide, AutoGuide):
        return False
    return not any(isinstance(module, AutoCallable) for module in guide.modules())


def name_of(guide: object) -> str:
    """Return the name of a function, or of the class of another object, for messages."""
    return getattr(guide, "__name__", type(guide).__name__)
