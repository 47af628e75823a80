# SPDX-License-Identifier: Apache-2.0
"""Where latents start: of a flat prior too, which has no draws and tells no dtype and no device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor
from torch.distributions import biject_to
from torch.utils import _pytree as pytree

from pyro_implicit.runtime.sites import is_flat

__all__ = ["FlatPriorStart", "example_tensor"]


class FlatPriorStart:
    """An initialisation of Pyro's, which draws from the prior, that passes over flat priors.

    A site that is reparameterised inside a plate, as Pyro's forecasters do, starts with a value for
    each element: the reparameteriser asks for it before the plate has broadcast the site, and a
    single value would become one latent for all elements.

    :param init_loc_fn: per-site initialisation.
    :param spread: sites of ``ImproperUniform`` that it cannot start are uniform between minus and
        plus so much in unconstrained space; 0 puts them there.
    :param like: these sites get its dtype and device; see :func:`example_tensor`.
    """

    def __init__(
        self,
        init_loc_fn: Callable[[dict[str, Any]], Tensor],
        spread: float = 0.0,
        like: Tensor | None = None,
    ) -> None:
        self.init_loc_fn, self.spread, self.like = init_loc_fn, spread, like

    def __call__(self, site: dict[str, Any]) -> Tensor:
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

    def _in_its_plates(self, site: dict[str, Any]) -> dict[str, Any]:
        """The site with those plates, too, that have not seen it yet."""
        seen = {frame.name for frame in site["cond_indep_stack"]}
        site = site.copy()
        for handler in reversed(_PYRO_STACK):
            if getattr(handler, "init_fn", None) is self:  # plates further out never see the start
                break
            if isinstance(handler, IndepMessenger) and handler.name not in seen:
                handler._process_message(site)
        return site


def example_tensor(model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Some tensor of floating dtype that a model computes with: an argument, a parameter, or one
    that its function closes over.

    **Example:**

    >>> x = torch.zeros(2, dtype=torch.float64)
    >>> example_tensor(lambda: x.sum(), (), {}).dtype
    torch.float64

    :returns: an empty tensor of its dtype on its device, or None.
    """
    for value in pytree.tree_leaves([args, kwargs, *_variables(model)]):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.new_empty(())
    return None


def _variables(model: Callable[..., Any]) -> Iterator[Any]:
    """What a function, a module or another callable object holds."""
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
