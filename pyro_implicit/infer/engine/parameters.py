# SPDX-License-Identifier: Apache-2.0
"""Parameters of Pyro's modules, in traces and in Pyro's store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import pyro
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import constraints

__all__ = ["Owned", "announce", "graph_leaves", "owned_by", "unconstrained"]


def unconstrained(site: dict[str, Any]) -> Tensor:
    """The tensor that is trained.

    :param site: of a parameter.
    """
    value = site["value"]
    # With module_local_params a module announces its parameters as they are.
    return value.unconstrained() if hasattr(value, "unconstrained") else value


class Owned(NamedTuple):
    """A module's own parameter: its unconstrained ``value``, and what it is constrained to."""

    value: nn.Parameter
    constraint: constraints.Constraint = constraints.real


def owned_by(module: nn.Module) -> Iterator[tuple[str, Owned]]:
    """The parameters of Pyro's modules in one, by their names in Pyro's store.

    **Example:**

    >>> [name for name, _ in owned_by(nn.Sequential(PyroModule[nn.Linear](3, 1)))]
    ['weight', 'bias']

    :param module: any.
    """
    for part in module.modules():
        if not isinstance(part, PyroModule):
            continue
        prefix = f"{part._pyro_name}." if part._pyro_name else ""
        for local, value in part._parameters.items():
            name = local.removesuffix("_unconstrained")
            if value is not None:
                yield prefix + name, Owned(value, *part._pyro_params.get(name, ())[:1])


def announce(name: str, own: Owned) -> None:
    """Let Pyro's store have a module's own tensor by its name, and no other's.

    A module goes on with its own, whatever the store has: then training would train the other.

    :param name: in the store.
    """
    store = pyro.get_param_store()
    if name in store and store[name].unconstrained() is not own.value:
        del store[name]
        # Not by pyro.param, which cannot make a parameter inside of vmap.
        state = {"params": {name: own.value}, "constraints": {name: own.constraint}}
        store.set_state(cast(Any, state))


def graph_leaves(output: Tensor) -> Iterator[Tensor]:
    """The leaves that have a gradient of an output.

    **Example:**

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> [leaf is x for leaf in graph_leaves((2 * x).sum())]
    [True]

    :param output: with a gradient.
    """
    seen: set[Any] = set()
    todo: list[Any] = [output.grad_fn]
    while todo:
        function = todo.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if type(function).__name__ == "AccumulateGrad":
            yield function.variable
        todo += [parent for parent, _ in function.next_functions]
