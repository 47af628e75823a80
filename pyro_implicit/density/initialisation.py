# SPDX-License-Identifier: Apache-2.0
"""First values of latent variables, and handlers that prepare a model for autoguides."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor
from torch.distributions import biject_to
from torch.utils import _pytree as pytree

from pyro_implicit.runtime.sites import Site, is_flat

__all__ = ["FlatPriorStart", "example_tensor", "without_sequential_plates"]


class FlatPriorStart:
    """A per-site initialisation that also covers flat priors, which have no draws.

    A site that is reparameterised inside a plate, as in Pyro's forecasters, gets a value for each
    element: the reparameteriser asks for it before the plate has broadcast the site, and a single
    value would become one latent variable for all elements.

    :param init_loc_fn: a per-site initialisation of Pyro's.
    :param spread: sites of ``ImproperUniform`` that ``init_loc_fn`` cannot initialise are uniform
        on ``[-spread, spread]`` in unconstrained space.
    :param like: these sites get its dtype and device; see :func:`example_tensor`.
    """

    def __init__(
        self,
        init_loc_fn: Callable[[Site], Tensor],
        spread: float = 0.0,
        like: Tensor | None = None,
    ) -> None:
        self.init_loc_fn, self.spread, self.like = init_loc_fn, spread, like

    def __call__(self, site: Site) -> Tensor:
        site = self._in_its_plates(site)
        try:
            return self.init_loc_fn(site)
        except NotImplementedError:
            if not is_flat(site["fn"]):
                raise
            transform = biject_to(site["fn"].support)
            like = torch.zeros(()) if self.like is None else self.like
            start = like.new_zeros(transform.inverse_shape(site["fn"].shape()))
            return transform(start.uniform_(-self.spread, self.spread))

    def _in_its_plates(self, site: Site) -> Site:
        seen = {frame.name for frame in site["cond_indep_stack"]}
        site = site.copy()
        for handler in reversed(_PYRO_STACK):
            # Plates further out never see the initial value.
            if getattr(handler, "init_fn", None) is self:
                break
            if isinstance(handler, IndepMessenger) and handler.name not in seen:
                handler._process_message(site)
        return site


def example_tensor(model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Return a tensor of the floating dtype and on the device that a model computes with.

    It is like the first argument, parameter or closure variable of floating dtype.

    **Example:**

    >>> x = torch.zeros(2, dtype=torch.float64)
    >>> example_tensor(lambda: x.sum(), (), {}).dtype
    torch.float64

    :returns: an empty tensor, or None.
    """
    for value in pytree.tree_leaves([args, kwargs, *_variables(model)]):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.new_empty(())
    return None


def _variables(model: Callable[..., Any]) -> Iterator[Any]:
    if isinstance(model, torch.nn.Module):
        yield list(model.parameters())
        yield list(model.buffers())
    if isinstance(model, functools.partial):
        yield model.args
        yield model.keywords
        for part in (model.func, *model.args):  # a handler keeps the model that it wraps there
            if callable(part) and not isinstance(part, Tensor):
                yield from _variables(part)
    elif inspect.ismethod(model):
        yield vars(model.__self__)
        yield from _variables(model.__func__)
    elif inspect.isfunction(model):
        found = inspect.getclosurevars(model)
        yield dict(found.nonlocals)
        for value in found.nonlocals.values():  # handlers close over the model they wrap
            if callable(value) and not isinstance(value, (type, Tensor)):
                yield from _variables(value)
        yield dict(found.globals)
    elif hasattr(model, "__dict__"):
        yield dict(vars(model))


def without_sequential_plates(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same model, whose sites do not know the sequential plates that they are in.

    Pyro's autoguides refuse latent variables in sequential plates. A latent variable in ``for i in
    pyro.plate("rows", n)`` becomes like one in ``for i in range(n)``, with the same joint density.
    Plates that subsample stay.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model():
    ...     for row in pyro.plate("rows", 2):
    ...         pyro.sample(f"x{row}", dist.Normal(0.0, 1.0))
    >>> sorted(AutoNormal(without_sequential_plates(model))())
    ['x0', 'x1']

    :param model: a Pyro model.
    """
    return _WithoutSequentialPlates()(model)


class _WithoutSequentialPlates(Messenger):
    def _pyro_sample(self, msg: Any) -> None:
        msg["cond_indep_stack"] = tuple(
            frame
            for frame in msg["cond_indep_stack"]
            if frame.vectorized or frame.size != frame.full_size
        )
