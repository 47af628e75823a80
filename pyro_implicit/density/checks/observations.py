# SPDX-License-Identifier: Apache-2.0
"""Checks of a model's arguments and observations: types, shapes, missing and impossible values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from pyro.distributions import Categorical, Delta, MaskedDistribution, OneHotCategorical, Unit
from pyro.distributions.hmm import HiddenMarkovModel
from pyro.distributions.util import scale_and_mask
from pyro.infer.inspect import get_dependencies
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import Independent, constraints

from pyro_implicit.density.model import without_validation
from pyro_implicit.runtime.messages import first_line, warn_user
from pyro_implicit.runtime.sites import Site, innermost, innermost_support, is_data, is_latent

__all__ = [
    "describe_arrays",
    "explain",
    "refuse_missing_data",
    "refuse_unfit_data",
    "refuse_unfit_targets",
]

Shape = tuple[int, ...]


# Arguments of the model


def explain(
    error: Exception, model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Exception:
    """Return an error with cause and cure if an argument is to blame; else the model's own.

    **Example:**

    >>> error = explain(ZeroDivisionError("no size"), lambda x: x, (torch.zeros(0, 2),), {})
    >>> print(error)
    the model raises ZeroDivisionError: no size: argument 1 has no rows, shape (0, 2). Cure: ...

    :param error: the error that the model raised.
    :param model: a Pyro model.
    :param args: positional arguments of the model; ``kwargs`` are keyword arguments.
    """
    try:
        inspect.signature(model).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return error
    found, cure = describe_arrays(args, kwargs)
    is_of_type = isinstance(error, (AttributeError, TypeError)) or "torch.Tensor" in str(error)
    if found and is_of_type:
        return TypeError(f"the model raises {first_line(error)}: {found}. Cure: {cure}")
    if isinstance(error, ValueError) and "PositiveDefinite" in str(error):
        return ValueError(
            f"the model raises {first_line(error).rstrip(':')}. Cure: a matrix that has an "
            "inverse; with neighbours in a lattice or graph, elements without neighbours (islands) "
            "have rows of zeros, and need a prior of their own"
        )
    named = _named(args, kwargs)
    nans = {name: describe_nan(value) for name, value in named}
    missing = [f"argument {name} is NaN in {share}" for name, share in nans.items() if share]
    if missing and "nan" in str(error):
        return ValueError(
            f"the model raises {first_line(error)}: {' and '.join(missing)}. Cure: leave these "
            "rows out, or replace the missing values, for instance by latent variables"
        )
    empty = [
        f"argument {name} has no rows, shape {tuple(value.shape)}"
        for name, value in named
        if tuple(getattr(value, "shape", ()))[:1] == (0,)
    ]
    if empty:
        return ValueError(
            f"the model raises {first_line(error)}: {' and '.join(empty)}. Cure: data of at least "
            "one row"
        )
    return error


def describe_arrays(args: tuple, kwargs: dict[str, Any]) -> tuple[str, str]:
    """Name the arguments of a model that are arrays or lists instead of tensors, and the cure.

    **Example:**

    >>> describe_arrays((np.zeros(2), torch.zeros(2)), {"y": [1.0]})
    ("argument 1 is a NumPy array and argument 'y' is a list", 'torch.as_tensor of these arguments')

    :param args: positional arguments of the model; ``kwargs`` are keyword arguments.
    :returns: in words; the first is empty if there are none.
    """
    kinds = {name: _array_kind(value) for name, value in _named(args, kwargs)}
    found = [f"argument {name} is a {kind}" for name, kind in kinds.items() if kind]
    if not found:
        return "", "arguments of the types that the model takes"
    cure = "torch.as_tensor of these arguments"
    if any(hasattr(value, "to_numpy") for value in (*args, *kwargs.values())):
        cure = "torch.tensor(argument.to_numpy()) of these arguments"
    return " and ".join(found), cure


def _named(args: tuple, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    named = [(str(i), value) for i, value in enumerate(args, start=1)]
    return named + [(f"'{name}'", value) for name, value in kwargs.items()]


def _array_kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "NumPy array"
    if isinstance(value, list) or (hasattr(value, "to_numpy") and not isinstance(value, Tensor)):
        return type(value).__name__
    return ""


# Observations


def refuse_unfit_data(trace: Trace, where: str = "") -> None:
    """Check that a model's observations have a density.

    :param trace: trace of the model with its data.
    :param where: which data these are, for the message.
    :raises TypeError: for an observation of a type for which its distribution has no density.
    :raises ValueError: for an observation that broadcasting repeats, that does not broadcast, that
        is NaN, infinite, outside of its support or at its edge, or of a point mass.
    """
    observed = {name: site for name, site in trace.nodes.items() if is_data(site)}
    for name, site in observed.items():
        fault = _mistyped(name, site)
        if fault:
            raise TypeError(fault)
        fault = _repeated(name, site)
        if fault:
            raise ValueError(fault)
    refuse_missing_data(trace, where)
    for name, site in observed.items():
        fault = _simulated(name, site) or _outside(name, site)
        if fault:
            raise ValueError(fault)


def refuse_missing_data(trace: Trace, where: str = "") -> None:
    """Check that no observation is NaN where it counts, or infinite without a finite density.

    :param trace: trace of the model with its data.
    :param where: which data these are, for the message.
    :raises ValueError: naming the site.
    """
    for name, site in trace.nodes.items():
        value = site["value"] if is_data(site) else None
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        for kind, missing in (("NaN", value.isnan()), ("infinite", value.isinf())):
            number = int(missing.sum())
            if number and bool(
                (_any_of_event(site, missing) & ~site_log_prob(site).isfinite()).any()
            ):
                raise ValueError(
                    f"the observation of site '{name}'{where} is {kind} in {number} of "
                    f"{value.numel()} elements. Cure: leave these elements out, or mask them: "
                    "seen = y.isfinite(); pyro.sample(name, fn.mask(seen), "
                    "obs=torch.where(seen, y, 1.0))"
                )


def refuse_unfit_targets(name: str, site: Site, targets: Tensor) -> None:
    """Check that targets have a density by the distribution of a site that drew others.

    :param name: the name of the site; ``site`` is of a trace.
    :raises TypeError: as :func:`refuse_unfit_data`.
    :raises ValueError: as :func:`refuse_unfit_data`.
    """
    trace = Trace()
    trace.add_node(name, **{**site, "value": targets, "is_observed": True})
    refuse_unfit_data(trace)


def describe_nan(value: Any) -> str:
    """Say how many elements are NaN; nothing if none is."""
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return ""
    number = int(value.isnan().sum())
    return f"{number} of {value.numel()} elements" if number else ""


def site_log_prob(site: Site) -> Tensor:
    """Return the log-density of each element, unscaled; 0 for masked elements."""
    log_prob = without_validation(site["fn"]).log_prob(site["value"], *site["args"])
    return scale_and_mask(torch.as_tensor(log_prob), mask=site["mask"])


def _any_of_event(site: Site, elements: Tensor) -> Tensor:
    event_dim = site["fn"].event_dim
    return elements.flatten(-event_dim).any(-1) if event_dim else elements


@torch.no_grad()
def _has_density(site: Site, value: Any) -> bool:
    try:
        site_log_prob({**site, "value": value})
    except Exception:  # of any kind, as distributions do not check types
        return False
    return True


def _mistyped(name: str, site: Site) -> str:
    """Describe an observation that has a density only as a tensor, or as another dtype."""
    value = site["value"]
    is_tensor = isinstance(value, Tensor)
    if is_tensor and (value.is_floating_point() or value.is_complex()):
        return ""
    if _has_density(site, value):
        return ""
    real = torch.get_default_dtype()
    kind = type(innermost(site["fn"])).__name__
    if is_tensor:
        if not _has_density(site, value.to(real)):
            return ""
        cure = f"{name}.{'double' if real == torch.float64 else 'float'}()"
        return (
            f"the observation of site '{name}' is {value.dtype}, but {kind} takes {real}. "
            f"Cure: {cure}"
        )
    what = _array_kind(value) or type(value).__name__
    make, given = "torch.as_tensor", name
    if hasattr(value, "to_numpy"):  # pandas gives a read-only view
        value, make, given = value.to_numpy().copy(), "torch.tensor", f"{name}.to_numpy()"
    for dtype in (None, real):
        try:
            tensor = torch.as_tensor(value, dtype=dtype)
        except Exception:  # strings, or rows of different lengths
            return ""
        if _has_density(site, tensor):
            cure = f"{make}({given}{f', dtype={dtype}' if dtype else ''})"
            return (
                f"the observation of site '{name}' is a {what}, but {kind} takes a tensor. "
                f"Cure: {cure}"
            )
    return ""


def _repeated(name: str, site: Site) -> str:
    """Describe an observation that broadcasting repeats, but not to the distribution's shape."""
    fn, value = site["fn"], site["value"]
    if not isinstance(value, Tensor) or isinstance(innermost(fn), (Unit, HiddenMarkovModel)):
        return ""
    shapes: dict[str, Shape] = {
        "its observation": tuple(value.shape),
        "its distribution": (*fn.batch_shape, *fn.event_shape),
    }
    for what in ("mask", "scale"):
        if isinstance(site[what], Tensor) and site[what].numel() > 1:
            shapes[f"its {what}"] = (*site[what].shape, *(1,) * fn.event_dim)
    (_, of_value), *others = shapes.items()
    found = f"the observation of site '{name}' has shape {of_value}, but " + " and ".join(
        f"{what} {shape}" for what, shape in others
    )
    try:
        whole = np.broadcast_shapes(*shapes.values())  # torch's imports sympy, 0.2 s
    except ValueError:
        if _has_density(site, value):
            return ""
        plates = [f"plate '{frame.name}' has {frame.size}" for frame in site["cond_indep_stack"]]
        return (
            f"{found}{', where ' * bool(plates)}{' and '.join(plates)}: these do not broadcast. "
            "Cure: as many rows of the observation as of the other arguments, in the same order"
        )
    number = torch.Size(whole).numel()
    if number == value.numel():
        return ""
    frames = {frame.dim: frame for frame in site["cond_indep_stack"] if frame.vectorized}
    batch = whole[: len(whole) - fn.event_dim]
    undeclared = [d for d in range(-len(batch), 0) if batch[d] > 1 and d not in frames]
    has_all = any(torch.Size(shape).numel() == number for shape in shapes.values())
    if has_all and not (frames and undeclared):
        return ""
    plates = [f"plate '{frame.name}' has {frame.size}" for frame in frames.values()]
    if of_value[-1:] != (1,):
        cure = f"parameters of shape {of_value}, for instance by .squeeze(-1) of the mean"
    elif has_all:  # a plate has made rows of the parameters' columns
        cure = f"{name}.squeeze(-1), and .squeeze(-1) of the parameters"
    else:
        cure = f"{name}.squeeze(-1), or parameters of the same shape"
    if frames and undeclared:
        cure += f"; if all are meant, another plate, of dim={undeclared[-1]}"
    return (
        f"{found}: together {' x '.join(map(str, whole))} terms{', where ' * bool(plates)}"
        f"{' and '.join(plates)}. Cure: {cure}"
    )


def _simulated(name: str, site: Site) -> str:
    if not isinstance(innermost(site["fn"]), Delta) or site_log_prob(site).isfinite().all():
        return ""
    return (
        f"site '{name}' observes a Delta, which gives the data the density 0 unless they are equal "
        "to it: the model is a simulator and has no likelihood. Cure: a distribution of the "
        f"measurement error, as in pyro.sample('{name}', dist.Normal(simulated, noise), obs={name})"
        "; or a method that needs no likelihood, such as those of the package sbi"
    )


def _outside(name: str, site: Site) -> str:
    """Describe data outside of a fixed support, unless masked or with ``validate_args=False``."""
    fn, value = site["fn"], site["value"]
    if not isinstance(value, Tensor):
        return ""
    part = fn
    while isinstance(part, (Independent, MaskedDistribution)) and part._validate_args:
        part = part.base_dist
    if not part._validate_args:
        return ""
    try:
        support = fn.support
        inside = support.check(value)
        if any(True for _ in support_bounds(support)):
            return ""
    except Exception:  # a distribution without a support, or one that cannot check it
        return ""
    try:
        whole = site_log_prob({**site, "mask": None})
    except Exception:  # of labels that are none
        whole = torch.ones(fn.batch_shape)
    if inside.all():
        return _at_the_edge(name, site, support, whole)
    missing = value.isnan() if value.is_floating_point() else torch.zeros_like(value).bool()
    counted = scale_and_mask(whole, mask=site["mask"]) != 0
    rank = missing.dim() - inside.dim()
    missing = missing.flatten(-rank).any(-1) if rank > 0 else missing
    outside = ~inside & counted & ~missing
    number = int(outside.sum())
    if not number:
        return ""
    labels = ""
    if isinstance(innermost(fn), (Categorical, OneHotCategorical)):
        labels = " (labels begin at 0)"
    return (
        f"the observation of site '{name}' is outside {support} in {number} of {outside.numel()} "
        f"elements. Cure: other data{labels}, or a distribution of that support; its "
        "validate_args=False if this is meant, as with gray pixels under a Bernoulli"
    )


def _at_the_edge(name: str, site: Site, support: Any, log_prob: Tensor) -> str:
    """Describe data without a finite density at the edge of the support."""
    value = site["value"]
    if support.is_discrete or value.shape != log_prob.shape:
        return ""
    lost = scale_and_mask(log_prob, mask=site["mask"]).isfinite().logical_not()
    support = innermost_support(support)
    low, high = (getattr(support, f"{side}_bound", math.nan) for side in ("lower", "upper"))
    number = int((lost & ((value == low) | (value == high))).sum())
    if not number:
        return ""
    return (
        f"the observation of site '{name}' is at the edge of {support} in {number} of "
        f"{value.numel()} elements, where its density is 0 or infinite. Cure: a distribution "
        "that has a probability of these values, such as a mixture with a point mass; or data that "
        "are moved inside, such as (y * (n - 1) + 0.5) / n of n proportions"
    )


def support_bounds(support: Any) -> Iterator[Tensor]:
    """Yield the tensors that bound a support."""
    for part in vars(support).values():
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, constraints.Constraint):
            yield from support_bounds(part)
        elif isinstance(part, (list, tuple)):
            for item in part:
                if isinstance(item, constraints.Constraint):
                    yield from support_bounds(item)


# Data that were not given


def warn_of_missing_data(
    model: Callable[..., Any], trace: Trace, args: tuple, kwargs: dict[str, Any]
) -> None:
    """Warn if a model observes nothing, and a latent variable in a plate looks like data.

    It looks like data if no other site depends on it, and the model has arguments or misses one.

    :param trace: trace of the model.
    :param args: positional arguments of the model; ``kwargs`` are keyword arguments.
    :warns UserWarning: naming site, plate and number of latent variables.
    """
    if any(is_data(site) for site in trace.nodes.values()):
        return
    if not (args or kwargs or _misses_argument(model, args, kwargs)):
        return
    try:
        parents = get_dependencies(model, args, kwargs)["prior_dependencies"]
    except Exception:  # some models cannot be traced with provenance: then nothing is known
        return
    for name, site in trace.nodes.items():
        if not is_latent(site) or not site["value"].numel():  # such as an unconditioned factor
            continue
        plates = [frame.name for frame in site["cond_indep_stack"]]
        used = any(name in above for child, above in parents.items() if child != name)
        if plates and not used:
            warn_user(
                f"the model observes nothing, and no site depends on '{name}': "
                f"{site['value'].numel()} latents in plate '{plates[-1]}'. Cure: if these are "
                f"data, pass them to the model, with obs= in pyro.sample('{name}', ...)",
            )


def _misses_argument(model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
    try:
        bound = inspect.signature(model).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    bound.apply_defaults()
    return any(value is None for value in bound.arguments.values())
