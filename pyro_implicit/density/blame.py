# SPDX-License-Identifier: Apache-2.0
"""Which site keeps a log-density from being finite, and how."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_implicit.density.validation import without_validation
from pyro_implicit.runtime.sites import innermost
from pyro_implicit.runtime.user_warnings import first_line

if TYPE_CHECKING:
    from pyro_implicit.density.target import Target

__all__ = ["array_kind", "blame", "describe_arrays", "describe_nan", "explain", "site_log_prob"]

Site = dict[str, Any]


@torch.no_grad()
def blame(density: Target, points: Tensor) -> str:
    """What keeps a log-density from being finite, by site.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro_implicit.density import Target
    >>> def model():
    ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     fn = dist.Gamma(2.0, scale, validate_args=False)
    ...     pyro.sample("y", fn, obs=torch.tensor(-1.0))
    >>> print(blame(Target(model), torch.zeros(3, 1)).split(". ")[0])
    site 'y' at 3 of 3: its observation is outside GreaterThanEq(lower_bound=0.0) in 1 of 1 elements

    :param points: unconstrained vectors, ``(num_points, latent_dim)``; the first twenty are asked.
    :returns: a clause for each site to blame, and the cure.
    """
    points = points[:20]
    reasons: dict[str, Counter[str]] = {}
    for point in points:
        try:
            trace = density.trace_at(point)
        except Exception as error:
            reasons.setdefault("the model", Counter())[f"it raises {first_line(error)}"] += 1
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
    if not clauses:
        return _blame_gradient(density, points)
    cure = "give the sites priors, or an init_loc_fn, in whose range the data are possible"
    if all("TypeError" in clause for clause in clauses):  # of which no draw is to blame
        cure = describe_arrays(density.args, density.kwargs)[1]
    return f"{'; '.join(clauses)}. Cure: {cure}"


def _blame_gradient(density: Target, points: Tensor) -> str:
    """By which latents it is not finite, though the log-density is."""
    log_prob, score = density.score(points)
    if density.error is not None and not log_prob.isfinite().any():
        found, cure = describe_arrays(density.args, density.kwargs)
        return (
            "no site by itself, but where its gradient is asked for the model raises "
            f"{first_line(density.error)}. Cure: "
            + (cure if found else "a model that computes by torch alone")
        )
    lost = [f"'{name}'" for name, part in density.split(score).items() if not part.isfinite().all()]
    return (
        f"no site by itself, but its gradient by {', '.join(lost) or 'all latents'} is not finite. "
        "Cure: torch.where computes the branch that it does not take, too, and what is NaN there "
        "makes the gradient NaN: give its function other arguments before, as in "
        "torch.log(torch.where(x > 0, x, 1.0)); if something overflows on the way, float64 or "
        "other units"
    )


def describe_arrays(args: tuple, kwargs: dict[str, Any]) -> tuple[str, str]:
    """Which of a model's arguments are arrays or lists in place of tensors, and the cure.

    **Example:**

    >>> describe_arrays((np.zeros(2), torch.zeros(2)), {"y": [1.0]})
    ("argument 1 is a NumPy array and argument 'y' is a list", 'torch.as_tensor of these arguments')

    :param args: of the model, as ``kwargs``.
    :returns: in words; the first is empty if none is.
    """
    named = [(str(i), value) for i, value in enumerate(args, start=1)]
    named += [(f"'{name}'", value) for name, value in kwargs.items()]
    kinds = {name: array_kind(value) for name, value in named}
    found = [f"argument {name} is a {kind}" for name, kind in kinds.items() if kind]
    if not found:
        return "", "arguments of the types that the model takes"
    cure = "torch.as_tensor of these arguments"
    if any(hasattr(value, "to_numpy") for _, value in named):  # of pandas, for instance
        cure = "torch.tensor(argument.to_numpy()) of these arguments"
    return " and ".join(found), cure


def array_kind(value: Any) -> str:
    """What an array or a list is called that stands in place of a tensor; else nothing."""
    if isinstance(value, np.ndarray):
        return "NumPy array"
    if isinstance(value, list) or (hasattr(value, "to_numpy") and not isinstance(value, Tensor)):
        return type(value).__name__
    return ""


def explain(
    error: Exception, model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Exception:
    """The error that a model raised, with its cause and its cure if an argument is to blame.

    **Example:**

    >>> error = explain(ZeroDivisionError("no size"), lambda x: x, (torch.zeros(0, 2),), {})
    >>> print(error)
    the model raises ZeroDivisionError: no size: argument 1 has no rows, shape (0, 2). Cure: ...

    :param error: that it raised.
    :param model: a Pyro model.
    :param args: of the model, as ``kwargs``.
    """
    try:
        inspect.signature(model).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return error
    found, cure = describe_arrays(args, kwargs)
    is_of_type = isinstance(error, (AttributeError, TypeError)) or "torch.Tensor" in str(error)
    if found and is_of_type:
        return TypeError(f"the model raises {first_line(error)}: {found}. Cure: {cure}")
    named = [(str(i), value) for i, value in enumerate(args, start=1)]
    named += [(f"'{name}'", value) for name, value in kwargs.items()]
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


def describe_nan(value: Tensor) -> str:
    """How many elements are NaN, in words; nothing if none is."""
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return ""
    number = int(value.isnan().sum())
    return f"{number} of {value.numel()} elements" if number else ""


def site_log_prob(site: Site) -> Tensor:
    """Of each element that is not masked, unscaled, without the checks of its arguments."""
    log_prob = without_validation(site["fn"]).log_prob(site["value"], *site["args"])
    return scale_and_mask(torch.as_tensor(log_prob), mask=site["mask"])


def _reason(site: Site) -> str:
    """Why a site's log-density is not finite, or nothing if it is."""
    fn, value = site["fn"], site["value"]
    what = "its observation" if site["is_observed"] else "its value"
    try:
        log_prob = site_log_prob(site)
    except Exception as error:
        return first_line(error)
    if describe_nan(value) and site["is_observed"]:
        return f"{what} is NaN in {describe_nan(value)}"
    if log_prob.isfinite().all():
        return ""
    if describe_nan(value):
        return f"{what} is NaN in {describe_nan(value)}"
    try:
        inside = fn.support.check(value)
    except (AttributeError, NotImplementedError):
        inside = torch.tensor(True)
    if not inside.all():
        number = inside.numel() - int(inside.sum())
        return f"{what} is outside {fn.support} in {number} of {inside.numel()} elements"
    kind = type(innermost(fn)).__name__
    if log_prob.isnan().any():
        return f"its log-density is NaN: look at the parameters of {kind}"
    number = int((~log_prob.isfinite()).sum())
    sign = "+inf" if (log_prob == torch.inf).any() else "-inf"
    return (
        f"the factor is {sign}"
        if kind == "Unit"
        else f"its log-density is {sign} in {number} of {log_prob.numel()} elements"
    )
