# SPDX-License-Identifier: Apache-2.0
"""Parameters of models and guides: found, trained, fixed, saved and restored."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.params.param_store import normalize_param_name, user_param_name
from torch import Tensor, nn
from torch.distributions import constraints, transform_to

from pyro_implicit.density.target import Target
from pyro_implicit.infer.implicit_elbo import NetworkELBO
from pyro_implicit.runtime.messages import warn_user
from pyro_implicit.runtime.sites import Owned, owned_by, put_into_store, unconstrained

__all__ = [
    "GUIDE_PREFIX",
    "Learnt",
    "are_all_of_guide",
    "describe",
    "first_few",
    "keep_frozen",
    "guide_parameters",
    "learnt_parameters",
    "model_parameters",
    "modules_of",
    "own_parameters",
    "put_back",
    "shown_names",
    "trained_parameters",
    "warn_of_lost_modules",
    "with_fixed_parameters",
]


GUIDE_PREFIX = "<guide>."  # replaces the name of a guide in names of its parameters
DIVIDER = "$$$"  # between the names of module and parameter in the store, by pyro.module
LIBRARIES = ("pyro", "pyro_implicit", "torch")  # their functions hold no modules of users


class Learnt(NamedTuple):
    """A parameter: its unconstrained ``value`` and its ``constraint``.

    **Example:**

    >>> Learnt(torch.tensor(0.0), constraints.positive).constrained
    tensor(1.)
    """

    value: Tensor
    constraint: constraints.Constraint

    @property
    def constrained(self) -> Tensor:
        """The value that the model sees."""
        return transform_to(self.constraint)(self.value)


def model_parameters(target: Target) -> dict[str, Tensor]:
    """Return the trainable parameters of a model.

    **Example:**

    >>> import torch
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(pyro.param("loc", torch.tensor(1.0)), 1.0))
    >>> list(model_parameters(Target(model)))
    ['loc']

    :param target: the posterior of the model.
    :returns: their current values, by name.
    """
    nodes = target.trace_at(target.init_loc).nodes.items()
    return {
        name: site["value"]
        for name, site in nodes
        if site["type"] == "param" and site["value"].requires_grad
    }


def with_fixed_parameters(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model whose parameters are not trained."""
    return poutine.block(model, hide_types=["param"])


def learnt_parameters(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Learnt]:
    """Return a dict of the trained parameters of a model.

    **Example:**

    >>> def model():
    ...     pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
    >>> learnt_parameters(model)
    {'scale': Learnt(value=tensor(0.), constraint=GreaterThan(lower_bound=0.0))}

    :param function: a model; it runs once.
    """
    return _learnt(_trained(_parameters_of(function, args, kwargs)))


def guide_parameters(guide: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Learnt]:
    """Return a dict of all parameters of a guide that is a function, with its frozen frames.

    **Example:**

    >>> def guide():
    ...     pyro.param("fixed", torch.tensor(1.0)).unconstrained().requires_grad_(False)
    >>> guide_parameters(guide).keys(), learnt_parameters(guide).keys()
    (dict_keys(['fixed']), dict_keys([]))

    :param guide: the guide; it runs once.
    """
    trace = _parameters_of(guide, args, kwargs)
    return _learnt({name: unconstrained(site) for name, site in _params(trace)})


def _parameters_of(function: Callable[..., Any], args: Any, kwargs: Any) -> poutine.Trace:
    with torch.no_grad(), poutine.block(), poutine.trace(param_only=True) as capture:
        function(*args, **kwargs)
    return capture.trace


def _learnt(values: Mapping[str, Tensor]) -> dict[str, Learnt]:
    known = pyro.get_param_store().get_state()["constraints"]
    return {
        name: Learnt(value.detach().clone(), known.get(name, constraints.real))
        for name, value in values.items()
    }


def keep_frozen(*functions: Any) -> None:
    """Let Pyro's store know which parameters of Pyro modules are frozen.

    It would set ``requires_grad`` of any other parameter at the first run, and train it.

    :param functions: model and guide, which are, hold or use the modules.
    """
    store = pyro.get_param_store()
    for name, own in _owned({}, functions).items():
        if not own.value.requires_grad and name not in store:
            constraint = {name: own.constraint}
            store.set_state({"params": {name: own.value}, "constraints": constraint})


@torch.no_grad()
def put_back(parameters: dict[str, Learnt], *functions: Any) -> None:
    """Restore the learnt parameters of model and guide, in their modules and in Pyro's store.

    Existing parameters keep their device and dtype. Parameters that the store lacks are added as
    they were saved. Modules that ``pyro.module`` registers are found as in :func:`_registered`.

    :param parameters: the parameters, by name.
    :param functions: model and guide, which are, hold or use the modules.
    :raises ValueError: for a parameter of another shape.
    """
    owned = _owned(parameters, functions)
    current = _current(parameters, owned)
    for name, (value, constraint) in parameters.items():
        own = current.get(name)
        if own is None:
            state = {"params": {name: value.detach().clone().requires_grad_()}}
            pyro.get_param_store().set_state({**state, "constraints": {name: constraint}})
            continue
        if own.shape != value.shape:
            raise ValueError(
                f"the model's parameter '{name}' has shape {tuple(own.shape)}, but the fitted one "
                f"has shape {tuple(value.shape)}. Cure: the model that was fitted, or "
                "pyro.clear_param_store() if the parameter belongs to another model"
            )
        own.copy_(value)  # in place, so that recordings notice the change
        if name in owned:
            put_into_store(name, owned[name])


@contextmanager
def own_parameters(parameters: dict[str, Learnt], *functions: Any) -> Iterator[None]:
    """Give model and guide the parameters of their fit for a while.

    Another fit of the model, or other code, may have changed its modules and Pyro's store.

    **Example:**

    >>> model = lambda: pyro.param("scale", torch.tensor(1.0))
    >>> first = learnt_parameters(model)
    >>> _ = pyro.param("scale").data.fill_(5.0)
    >>> with own_parameters(first, model):
    ...     model().item()
    1.0
    >>> model().item()
    5.0
    """
    if not parameters:
        yield
        return
    now = {
        name: Learnt(value.detach().clone(), parameters[name].constraint)
        for name, value in _current(parameters, _owned(parameters, functions)).items()
    }
    if all(
        name in now and now[name].value.equal(value.to(now[name].value))
        for name, (value, _) in parameters.items()
    ):
        yield
        return
    put_back(parameters, *functions)
    try:
        yield
    finally:
        put_back(now, *functions)


def warn_of_lost_modules(parameters: dict[str, Learnt], *functions: Any) -> None:
    """Warn of modules of ``pyro.module`` that :func:`put_back` cannot find in model and guide."""
    found = _owned(parameters, functions).keys()
    for prefix, locals_ in _by_module(parameters).items():
        if not found >= locals_.keys():
            warn_user(
                f"the module that pyro.module registers as '{prefix}' was not found, so that its "
                "learnt parameters are only in Pyro's store, and the module computes with its own. "
                "Cure: make the module a global or closure variable of model or guide, or an "
                f"attribute of their module, named '{prefix}' if others have the same shapes; or "
                "pyro.module(..., update_module_params=True), and ignore this warning"
            )


def _owned(parameters: dict[str, Learnt], functions: Iterable[Any]) -> dict[str, Owned]:
    """Return a dict of the parameters of the modules that model and guide are, hold or use."""
    owned: dict[str, Owned] = {}
    for function in functions:
        own: dict[str, Owned] = {}
        parts: list[tuple[str, nn.Module]] = []
        for variable, module in modules_of(function):
            own.update(owned_by(module))
            parts += [(path or variable, part) for path, part in module.named_modules()]
        owned = _registered(parameters, parts) | own | owned
    return owned


def _registered(
    parameters: dict[str, Learnt], parts: list[tuple[str, nn.Module]]
) -> dict[str, Owned]:
    """Find the modules that ``pyro.module`` registers, by names and shapes of their parameters.

    ``pyro.module`` leaves a module as it is if the store has other values. If several modules have
    the same names and shapes, the name in ``parts`` must be that of the registration.
    """
    found: dict[str, Owned] = {}
    for prefix, values in _by_module(parameters).items():
        alike: dict[int, dict[str, nn.Parameter]] = {}
        namesake = None
        for path, part in parts:
            trained = (item for item in part.named_parameters() if item[1].requires_grad)
            own = {f"{prefix}{DIVIDER}{name}": value for name, value in trained}
            if {name: value.shape for name, value in own.items()} == values:
                alike[id(part)] = own
                namesake = id(part) if path == prefix else namesake
        if len(alike) == 1 or namesake is not None:
            own = alike[namesake] if namesake is not None else next(iter(alike.values()))
            found |= {name: Owned(value) for name, value in own.items()}
    return found


def _by_module(parameters: dict[str, Learnt]) -> dict[str, dict[str, torch.Size]]:
    """Return the shapes of the parameters of ``pyro.module``, by the name of its registration."""
    found: dict[str, dict[str, torch.Size]] = {}
    for name, (value, _) in parameters.items():
        if DIVIDER in name:
            found.setdefault(name.partition(DIVIDER)[0], {})[name] = value.shape
    return found


def _current(names: Iterable[str], owned: dict[str, Owned]) -> dict[str, Tensor]:
    """Return the tensors themselves that modules or Pyro's store have under these names."""
    tensors = pyro.get_param_store().get_state()["params"]
    tensors |= {name: own.value for name, own in owned.items()}
    return {name: tensors[name] for name in names if name in tensors}


def modules_of(function: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a model or guide is, holds or uses, with the names of the variables.

    **Example:**

    >>> list(modules_of(functools.partial(print, net=nn.Linear(2, 1))))
    [('net', Linear(in_features=2, out_features=1, bias=True))]

    :param function: any object.
    """
    return _modules(function, "", set())


def _modules(part: Any, variable: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(part) in seen:
        return
    seen.add(id(part))
    inner: list[tuple[str, Any]] = []
    if isinstance(part, nn.Module):
        yield variable, part
    elif isinstance(part, functools.partial):
        inner = [("", one) for one in (part.func, *part.args)] + [*part.keywords.items()]
    elif inspect.ismethod(part):
        inner = [("", part.__self__), ("", part.__func__)]
    elif inspect.isfunction(part) and (part.__module__ or "").split(".")[0] not in LIBRARIES:
        used = inspect.getclosurevars(part)
        inner = [*used.nonlocals.items(), *used.globals.items()]
    for name, one in inner:
        yield from _modules(one, name, seen)


def describe(parameters: dict[str, Tensor]) -> str:
    """Describe the first four parameters by value, or by shape."""
    return first_few(
        f"{name} = {value.item():.4g}" if value.numel() == 1 else f"{name} {tuple(value.shape)}"
        for name, value in zip(shown_names(parameters), parameters.values(), strict=True)
    )


def shown_names(names: Iterable[str]) -> list[str]:
    """Return names of parameters for users: without their modules, unless names would be equal.

    **Example:**

    >>> shown_names(["one$$$fc.weight", "two$$$fc.weight", "two$$$fc.bias"])
    ['one.fc.weight', 'two.fc.weight', 'fc.bias']

    :param names: in Pyro's parameter store.
    """
    whole = list(names)
    short = [user_param_name(name) for name in whole]
    count = Counter(short)
    return [
        normalize_param_name(name) if count[part] > 1 else part
        for name, part in zip(whole, short, strict=True)
    ]


def first_few(parts: Iterable[str]) -> str:
    """Join the first four parts, and count the others.

    **Example:**

    >>> first_few("abcdef")
    'a, b, c, d and 2 more'
    """
    found = list(parts)
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def trained_parameters(
    model: Callable[..., Any], guide: Callable[..., Any], loss: Trace_ELBO, args: Any, kwargs: Any
) -> dict[str, Tensor]:
    """Return a dict of all parameters that an evaluation of the loss uses and can train.

    Prefixes of guide and loss are replaced, because these may have other names in a resumed run.

    :raises ValueError: if neither model nor guide has a parameter.
    """
    with poutine.trace(param_only=True) as capture:
        value = loss.differentiable_loss(model, guide, *args, **kwargs)
    if _names_of_others(value, dict(_params(capture.trace))):
        return trained_parameters(model, guide, loss, args, kwargs)
    parameters = _trained(capture.trace)
    if not parameters:
        raise ValueError(
            "neither model nor guide has a parameter to train. Cure: a guide with pyro.param or "
            "one of the autoguides"
        )
    # Some ELBOs create the optimisers of their networks in the backward pass.
    value.backward(inputs=list(parameters.values()))
    owners = {
        getattr(guide, "_pyro_name", ""): GUIDE_PREFIX,
        loss.store_name if isinstance(loss, NetworkELBO) else "": "<loss>.",
    }

    def own(name: str) -> str:
        for prefix, owner in owners.items():
            if prefix and name.startswith(f"{prefix}."):
                return owner + name.removeprefix(f"{prefix}.")
        return name

    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in parameters.items():
        found.setdefault(id(value), (own(name), value))  # a module may share it under two names
    return dict(found.values())


def _names_of_others(value: Tensor, sites: dict[str, dict[str, Any]]) -> bool:
    """Replace stored parameters of another module of the same names; return whether any were."""
    # Layers without priors of two networks in one process have the same names.
    announced = {name: site["args"][-1] for name, site in sites.items()}
    others = {
        name: own
        for name, own in announced.items()
        if isinstance(own, nn.Parameter) and own is not unconstrained(sites[name])
    }
    if not others:
        return False
    stored = [unconstrained(sites[name]) for name in others]
    found = torch.autograd.grad(
        value, [*others.values(), *stored], allow_unused=True, retain_graph=True
    )
    used, unused = found[: len(others)], found[len(others) :]
    names = [
        name
        for name, one, other in zip(others, used, unused, strict=True)
        if one is not None and other is None
    ]
    for name in names:
        put_into_store(name, Owned(others[name]))
    return bool(names)


def _params(trace: poutine.Trace) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((name, site) for name, site in trace.nodes.items() if site["type"] == "param")


def _trained(trace: poutine.Trace) -> dict[str, Tensor]:
    """Return a dict of the parameters in a trace that are not frozen."""
    values = {name: unconstrained(site) for name, site in _params(trace)}
    return {name: value for name, value in values.items() if value.requires_grad}


def are_all_of_guide(
    guide: Callable[..., Any], parameters: dict[str, Tensor], args: Any, kwargs: Any
) -> bool:
    """Return whether all parameters are the guide's, and none the model's."""
    with poutine.block(), poutine.trace(param_only=True) as capture:
        guide(*args, **kwargs)
    own = {id(unconstrained(site)) for _, site in _params(capture.trace)}
    return all(id(parameter) in own for parameter in parameters.values())
