# SPDX-License-Identifier: Apache-2.0
"""Discrete latent variables that are sampled: coordinates, checks, and which sites they are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.distributions import MaskedDistribution
from pyro.distributions.constraints import integer as any_integer
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import constraints
from torch.overrides import TorchFunctionMode

from pyro_implicit.density.model import IMPOSSIBLE, compute_log_prob
from pyro_implicit.density.policy import DISCRETE
from pyro_implicit.runtime.global_state import same_streams
from pyro_implicit.runtime.sites import (
    Site,
    innermost,
    innermost_support,
    is_discrete_latent,
    is_flat,
    is_latent,
    without_mask,
)
from pyro_implicit.runtime.trees import leaves_of

__all__ = [
    "Elements",
    "Integers",
    "OneHots",
    "SizeLimit",
    "TooLargeError",
    "coordinates_of",
    "elements_of",
    "refuse_coupled",
    "refuse_improper_prior",
    "sites_to_sample",
    "with_values",
]


class Integers:
    """Integers as coordinates of a vector of floating dtype; they have no log-determinant.

    **Example:**

    >>> integers = Integers(torch.long)
    >>> integers(torch.tensor([2.0, 3.0])), integers.inv(torch.tensor([2, 3])).dtype
    (tensor([2, 3]), torch.float32)

    :param dtype: dtype of the values.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, part: Tensor) -> Tensor:
        return part.detach().round().to(self.dtype)

    def inv(self, value: Tensor) -> Tensor:
        """Return the coordinates of values."""
        return value if value.is_floating_point() else value.to(torch.get_default_dtype())

    def log_abs_det_jacobian(self, part: Tensor, value: Tensor) -> Tensor:
        """Return zeros of the shape of the coordinates."""
        return torch.zeros_like(part)


class OneHots(Integers):
    """Places of the ones as coordinates of one-hot vectors.

    **Example:**

    >>> OneHots(torch.float32, 3)(torch.tensor([2.0]))
    tensor([[0., 0., 1.]])

    :param dtype: dtype of the values.
    :param length: length of the vectors.
    """

    def __init__(self, dtype: torch.dtype, length: int) -> None:
        super().__init__(dtype)
        self.length = length

    def __call__(self, part: Tensor) -> Tensor:
        places = torch.arange(self.length, device=part.device)
        return (part.detach().round().unsqueeze(-1) == places).to(self.dtype)

    def inv(self, value: Tensor) -> Tensor:
        """Return the coordinates of values."""
        places = value.argmax(-1)
        return places.to(value if value.is_floating_point() else torch.get_default_dtype())


class Elements(NamedTuple):
    """Bounds of discrete elements, ``(num_elements,)``; infinite where other latents move them.

    ``is_label`` marks elements whose values have no order.
    """

    low: Tensor
    high: Tensor
    is_label: Tensor

    @property
    def num_values(self) -> Tensor:
        """The number of values of each element, ``(num_elements,)``."""
        return self.high - self.low + 1


def _bounds(name: str, site: Site) -> tuple[Any, Any]:
    """Return the bounds of a site's support, each a number or a tensor."""
    support = innermost_support(site["fn"].support)
    if isinstance(support, type(constraints.boolean)):
        return 0, 1
    if isinstance(support, constraints.integer_interval):
        return support.lower_bound, support.upper_bound
    if isinstance(support, type(constraints.nonnegative_integer)):
        return support.lower_bound, math.inf
    if isinstance(support, type(any_integer)):
        return -math.inf, math.inf
    if isinstance(support, type(constraints.one_hot)):
        return 0, site["value"].shape[-1] - 1
    raise ValueError(
        f"site '{name}' is a discrete latent ({type(innermost(site['fn'])).__name__}) whose "
        f"elements cannot move one by one in its support, {support}. Cure: sites whose elements "
        "are integers, such as one Binomial after the other in place of a Multinomial"
    )


def coordinates_of(name: str, site: Site) -> Integers:
    """Return the map from coordinates to the values of a discrete latent variable.

    :raises ValueError: for a support in which elements cannot move one by one, and for endlessly
        many values without a density: a flat prior, or a mask.
    """
    refuse_improper_prior(name, site)
    value = site["value"]
    if _is_one_hot(site["fn"]):
        return OneHots(value.dtype, value.shape[-1])
    return Integers(value.dtype)


def refuse_improper_prior(name: str, site: Site) -> None:
    """Check that a discrete latent variable without a density has finitely many values.

    :raises ValueError: for a flat prior, or a mask, on endlessly many integers.
    """
    if all(torch.as_tensor(bound).isfinite().all() for bound in _bounds(name, site)):
        return
    fn, mask = site["fn"], site.get("mask")
    is_masked = without_mask(fn) is not fn and isinstance(fn, MaskedDistribution)
    is_masked |= mask is False or (isinstance(mask, Tensor) and not bool(mask.all()))
    if is_masked or is_flat(fn):
        how = "a mask leaves it out" if is_masked else "its prior is flat"
        raise ValueError(
            f"the discrete latent '{name}' has no density ({how}): all of its values are equally "
            "probable, and nothing bounds its posterior. Cure: a proper prior, such as "
            "dist.NegativeBinomial or dist.Categorical, without a mask"
        )


def elements_of(traces: Iterable[Trace], names: Iterable[str], like: Tensor) -> Elements:
    """Return the bounds of all discrete elements.

    A bound that differs between runs depends on other latent variables. It counts as infinite:
    values beyond it have the density 0.

    :param traces: traces of runs of the model, at least one.
    :param names: names of the sampled sites, in the order of the vector.
    :param like: a tensor of the vector's dtype and device.
    """
    lows, highs, labels = [], [], []
    for name in names:
        found: list[tuple[Tensor, Tensor]] = []
        for trace in traces:
            site = trace.nodes[name]
            value = site["value"]
            shape = value.shape[:-1] if _is_one_hot(site["fn"]) else value.shape
            low, high = (torch.as_tensor(b).to(like).expand(shape) for b in _bounds(name, site))
            found.append((low.reshape(-1), high.reshape(-1)))
        (low, high), *others = found
        for one, other in others:
            low = torch.where(low == one, low, -torch.inf)
            high = torch.where(high == other, high, torch.inf)
        lows.append(low)
        highs.append(high)
        kind = type(innermost(site["fn"])).__name__
        labels.append(torch.full_like(low, kind in _LABELS, dtype=torch.bool))
    return Elements(torch.cat(lows), torch.cat(highs), torch.cat(labels))


_LABELS = ("Categorical", "OneHotCategorical")


def _is_one_hot(fn: Any) -> bool:
    return isinstance(innermost_support(fn.support), type(constraints.one_hot))


def sites_to_sample(trace: Trace) -> frozenset[str]:
    """Return the discrete latent variables that are sampled, by their distributions.

    These are the variables that Pyro cannot enumerate; or all, without continuous latent variables.

    :param trace: trace of a run of the model.
    """
    discrete = {n: s for n, s in trace.nodes.items() if is_discrete_latent(s)}
    if not any(is_latent(s) and name not in discrete for name, s in trace.nodes.items()):
        return frozenset(discrete)
    return frozenset(n for n, site in discrete.items() if not site["fn"].has_enumerate_support)


@torch.no_grad()
def refuse_coupled(
    model: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    trace: Trace,
    names: Iterable[str],
) -> None:
    """Check that elements of plates are independent, as a sum over discrete latents assumes.

    Pyro's enumeration gives all elements of a plate one value at a time. A sum over the elements,
    or a difference of neighbours, would then be wrong without an error. Some elements of some sites
    are moved one by one.

    :param model: a Pyro model with its ``args`` and ``kwargs``.
    :param trace: a plain run of it, which does not change.
    :param names: the discrete latent variables to be summed out.
    :raises ValueError: naming the site.
    """

    def run(values: dict[str, Tensor]) -> Trace:
        replayed = poutine.replay(model, trace=with_values(trace, values))
        found = poutine.trace(replayed).get_trace(*args, **kwargs)
        compute_log_prob(found)
        return found

    name = None
    with suppress(*IMPOSSIBLE), same_streams(), poutine.block(), pyro.validation_enabled(False):
        name = _coupled_site(run({}), names, run)
    if name is not None:
        raise ValueError(
            f"elements of the discrete latent '{name}' share a term of the log-density, such as a "
            "sum over its plate or a difference of neighbours, but the elements of a plate are "
            "summed out one by one. Cure: fit or refine, which sample such sites, or a loop of "
            "single sites"
        )


def with_values(trace: Trace, values: Mapping[str, Tensor | None]) -> Trace:
    """Return a trace with other values at some sites, or without these sites."""
    changed = trace.copy()
    for name, value in values.items():
        if value is None:
            changed.remove_node(name)
        else:
            changed.nodes[name] = {**changed.nodes[name], "value": value}
    return changed


def _coupled_site(
    trace: Trace, names: Iterable[str], run: Callable[[dict[str, Tensor]], Trace]
) -> str | None:
    """Return a site whose elements share a term, though their plate says that they are independent.

    :param trace: a plain run, with log-probabilities.
    :param run: runs the model at other values of these sites, with log-probabilities.
    """
    values = {name: trace.nodes[name]["value"] for name in names}
    if any(changed.any() for changed in _changed(trace, run(values)).values()):
        return None  # the model is random beyond its latent variables, which other checks tell
    loops = {re.sub(r"\d+", "#", name): name for name in values}
    for name in list(loops.values())[: DISCRETE.max_probed]:
        if _shares_a_term(name, trace.nodes[name]["fn"], values, run):
            return name
    return None


def _shares_a_term(
    name: str, fn: Any, values: dict[str, Tensor], run: Callable[[dict[str, Tensor]], Trace]
) -> bool:
    """Return whether moves of two elements of a site change the same term of the log-density."""
    value = values[name]
    shape = value.shape[: value.dim() - fn.event_dim]
    if shape.numel() < 2:
        return False
    support = fn.enumerate_support(expand=False)
    others = support.reshape(len(support), *support.shape[support.dim() - fn.event_dim :])
    # From one place alone, the move of an element may leave a term as it is by chance.
    places = torch.randint(len(others), shape, device=others.device)
    starts = (value, others[0].expand(value.shape), others[places])
    bases = [(start, run(values | {name: start})) for start in starts]
    first = (0,) * len(shape)
    ends = [first[:d] + (1,) + first[d + 1 :] for d, size in enumerate(shape) if size > 1]
    seen: dict[str, Tensor] = {}
    for place in (first, *ends):
        found: dict[str, Tensor] = {}
        for start, before in bases:
            is_other = (others != start[place]).reshape(len(others), -1).any(-1)
            if not is_other.any():
                break
            moved = start.clone()
            moved[place] = others[is_other][0]
            for site, changed in _changed(before, run(values | {name: moved})).items():
                found[site] = found[site] | changed if site in found else changed
        if any((seen[site] & changed).any() for site, changed in found.items() if site in seen):
            return True
        for site, changed in found.items():
            seen[site] = seen[site] | changed if site in seen else changed
    return False


def _changed(before: Trace, after: Trace) -> dict[str, Tensor]:
    found = {}
    for name, site in before.nodes.items():
        if site["type"] == "sample" and name in after.nodes:
            one, other = (torch.as_tensor(t.nodes[name]["log_prob"]) for t in (before, after))
            if one.shape == other.shape:
                found[name] = (one != other) & ~(one.isnan() & other.isnan())
    return found


class TooLargeError(RuntimeError):
    """A sum over discrete latent variables has too many values."""


class SizeLimit(TorchFunctionMode):
    """Raise an error for tensors that are much larger than those of a plain run.

    **Example:**

    >>> with SizeLimit(1000) as limit:
    ...     _ = torch.zeros(10) + 1
    >>> limit.largest
    10

    :param limit: the number of elements of a tensor.
    """

    def __init__(self, limit: float = math.inf) -> None:
        super().__init__()
        self.limit, self.largest = limit, 1

    @classmethod
    def beyond(cls, largest: int) -> SizeLimit:
        """Return the limit of an enumerated run.

        :param largest: the number of elements of the largest tensor of a plain run.
        """
        return cls(max(DISCRETE.max_elements, DISCRETE.max_joint * largest))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in leaves_of(found):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
        if self.largest > self.limit:
            raise TooLargeError(f"a tensor of {self.largest:,} elements for their joint values")
        return found
