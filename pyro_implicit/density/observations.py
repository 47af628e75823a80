# SPDX-License-Identifier: Apache-2.0
"""Observations that broadcasting counts more than once, or of a type that has no density."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import Delta, Unit
from pyro.distributions.hmm import HiddenMarkovModel
from torch import Tensor

from pyro_implicit.density.blame import array_kind, site_log_prob
from pyro_implicit.runtime.sites import innermost

__all__ = ["mistyped_observation", "repeated_observation", "simulated_observation"]

Shape = tuple[int, ...]


def repeated_observation(name: str, site: dict[str, Any]) -> str:
    """What is wrong with an observation of which broadcasting makes more terms than are meant.

    Nothing is, where each of its elements makes one term, or where it is repeated to the shape of
    the distribution, in declared plates or outside of all; nor of a hidden Markov model, whose
    first dimension may be of any length.

    **Example:**

    >>> import pyro
    >>> from pyro import poutine
    >>> def model(y):
    ...     pyro.sample("y", pyro.distributions.Normal(torch.zeros(3), 1.0), obs=y)
    >>> site = poutine.trace(model).get_trace(torch.zeros(3, 1)).nodes["y"]
    >>> repeated_observation("y", site).split(". ")[0]
    "the observation of site 'y' has shape (3, 1), but its distribution (3,): together 3 x 3 terms"

    :param name: of the site, for the message.
    :param site: of a trace, observed, with the sizes of its plates.
    :returns: in words, with the cure, or nothing.
    """
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
    try:
        whole = tuple(torch.broadcast_shapes(*shapes.values()))
    except RuntimeError:
        return "" if _has_density(site, value) else _unlike(name, site, shapes)
    number = torch.Size(whole).numel()
    if number == value.numel():
        return ""
    frames = {frame.dim: frame for frame in site["cond_indep_stack"] if frame.vectorized}
    batch = whole[: len(whole) - fn.event_dim]
    undeclared = [d for d in range(-len(batch), 0) if batch[d] > 1 and d not in frames]
    has_all = any(torch.Size(shape).numel() == number for shape in shapes.values())
    if has_all and not (frames and undeclared):
        return ""
    (_, of_value), *others = shapes.items()
    plates = [f"plate '{frame.name}' has {frame.size}" for frame in frames.values()]
    meant = f"; if all are meant, another plate, of dim={undeclared[-1]}" if undeclared else ""
    return (
        f"the observation of site '{name}' has shape {of_value}, but "
        f"{' and '.join(f'{what} {shape}' for what, shape in others)}: together "
        f"{' x '.join(map(str, whole))} terms{', where ' * bool(plates)}{' and '.join(plates)}. "
        f"Cure: {_cure(name, of_value, has_all)}{meant if frames else ''}"
    )


def _unlike(name: str, site: dict[str, Any], shapes: dict[str, Shape]) -> str:
    """Say that shapes do not broadcast."""
    (_, of_value), *others = shapes.items()
    plates = [f"plate '{frame.name}' has {frame.size}" for frame in site["cond_indep_stack"]]
    return (
        f"the observation of site '{name}' has shape {of_value}, but "
        f"{' and '.join(f'{what} {shape}' for what, shape in others)}"
        f"{', where ' * bool(plates)}{' and '.join(plates)}: these do not broadcast. Cure: as many "
        "rows of the observation as of the other arguments, in the same order"
    )


def simulated_observation(name: str, site: dict[str, Any]) -> str:
    """What is wrong with observing a point mass: all other values have no density.

    **Example:**

    >>> import pyro
    >>> from pyro import poutine
    >>> def model(y):
    ...     x = pyro.sample("x", pyro.distributions.Normal(0.0, 1.0))
    ...     pyro.sample("y", pyro.distributions.Delta(x.exp()), obs=y)
    >>> site = poutine.trace(model).get_trace(torch.tensor(-1.0)).nodes["y"]
    >>> simulated_observation("y", site).split(":")[0]
    "site 'y' observes a Delta, which gives the data the density 0 unless they are equal to it"

    :param name: of the site, for the message.
    :param site: of a trace, observed.
    :returns: in words, with the cure, or nothing.
    """
    if not isinstance(innermost(site["fn"]), Delta) or site_log_prob(site).isfinite().all():
        return ""
    return (
        f"site '{name}' observes a Delta, which gives the data the density 0 unless they are equal "
        "to it: the model is a simulator and has no likelihood. Cure: a distribution of the "
        f"measurement error, as in pyro.sample('{name}', dist.Normal(simulated, noise), obs={name})"
        "; or a method that needs no likelihood, such as those of the package sbi"
    )


def mistyped_observation(name: str, site: dict[str, Any]) -> str:
    """What is wrong with an observation's type: that its distribution has no density of an array, a
    list or whole numbers, but has one of the same as a tensor, or as floating-point numbers.

    **Example:**

    >>> import pyro
    >>> from pyro import poutine
    >>> def model(y):
    ...     pyro.sample("y", pyro.distributions.Bernoulli(torch.tensor(0.5)), obs=y)
    >>> site = poutine.trace(model).get_trace(torch.tensor(True)).nodes["y"]
    >>> mistyped_observation("y", site)
    "the observation of site 'y' is torch.bool, but Bernoulli takes torch.float32. Cure: y.float()"

    :param name: of the site, for the message.
    :param site: of a trace, observed.
    :returns: in words, with the cure, or nothing.
    """
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
    what = array_kind(value) or type(value).__name__
    make, given = "torch.as_tensor", name
    if hasattr(value, "to_numpy"):  # of pandas, for instance, which gives a read-only view
        value, make, given = value.to_numpy().copy(), "torch.tensor", f"{name}.to_numpy()"
    for dtype in (None, real):
        try:
            tensor = torch.as_tensor(value, dtype=dtype)
        except Exception:  # of strings, or of rows of different lengths
            return ""
        if _has_density(site, tensor):
            cure = f"{make}({given}{f', dtype={dtype}' if dtype else ''})"
            return (
                f"the observation of site '{name}' is a {what}, but {kind} takes a tensor. "
                f"Cure: {cure}"
            )
    return ""


@torch.no_grad()
def _has_density(site: dict[str, Any], value: Any) -> bool:
    """Whether the distribution computes one."""
    try:
        site_log_prob({**site, "value": value})
    except Exception:  # it is the type's fault if another type helps
        return False
    return True


def _cure(name: str, of_value: Shape, has_all: bool) -> str:
    if of_value[-1:] != (1,):
        return f"parameters of shape {of_value}, as by .squeeze(-1) of the mean"
    if has_all:  # a plate has made rows of the parameters' columns
        return f"{name}.squeeze(-1), and .squeeze(-1) of the parameters"
    return f"{name}.squeeze(-1), or parameters of the same shape"
