# SPDX-License-Identifier: Apache-2.0
"""Sample sites and parameters of Pyro, their first values, and plates that autoguides refuse."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import pyro
import torch
from pyro.distributions import Delta, ImproperUniform, MaskedDistribution, Unit
from pyro.distributions.util import sum_rightmost
from pyro.nn import PyroModule
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.uncondition_messenger import UnconditionMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Independent, biject_to, constraints

from pyro_implicit.runtime.trees import leaves_of

__all__ = [
    "FlatPriorStart",
    "Owned",
    "QuietPriors",
    "Site",
    "attribute_name",
    "constrained_parts",
    "example_tensor",
    "graph_functions",
    "graph_leaves",
    "innermost",
    "innermost_support",
    "is_close",
    "is_counted",
    "is_data",
    "is_discrete_latent",
    "is_flat",
    "is_interval",
    "is_latent",
    "joined_parts",
    "names_in_plates_of",
    "owned_by",
    "put_into_store",
    "quiet_prior",
    "site_parts",
    "survives",
    "unconstrained",
    "unmasked_elements",
    "unplated_as_events",
    "unplated_dims",
    "without_data",
    "without_event",
    "without_mask",
    "without_sequential_plates",
]


Site = dict[str, Any]


def innermost(fn: Any) -> Any:
    """Return the distribution inside of ``to_event``, ``expand``, ``mask`` and transforms.

    **Example:**

    >>> import pyro.distributions as dist
    >>> type(innermost(dist.LogNormal(torch.zeros(3), 1.0).mask(False).to_event(1)))
    <class 'pyro.distributions.torch.Normal'>

    :param fn: the distribution of a site.
    """
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def is_interval(site: Site) -> bool:
    """Return whether values lie between two bounds."""
    ends = constraints.interval, constraints.half_open_interval
    return isinstance(innermost_support(site["fn"].support), ends)


def innermost_support(support: Any) -> Any:
    """Return the constraint inside of ``independent`` ones."""
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support


def without_event(fn: Any) -> Any:
    """Return the distribution inside of ``to_event``, with all other wrappers.

    **Example:**

    >>> import pyro.distributions as dist
    >>> without_event(dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
    LogNormal()

    :param fn: the distribution of a site.
    """
    while isinstance(fn, Independent):
        fn = fn.base_dist
    return fn


def without_mask(fn: Any) -> Any:
    """Return the distribution inside of ``to_event`` and ``mask``, with all other wrappers.

    **Example:**

    >>> import pyro.distributions as dist
    >>> without_mask(dist.LogNormal(torch.zeros(3), 1.0).mask(False).to_event(1))
    LogNormal()

    :param fn: the distribution of a site.
    """
    while isinstance(fn, (Independent, MaskedDistribution)):
        fn = fn.base_dist
    return fn


def is_latent(site: Site) -> bool:
    """Tell whether a site of a trace is a latent variable.

    :param site: site of any type; the indices of a subsampled plate are no latent variable.
    """
    return site["type"] == "sample" and not site["is_observed"] and not site_is_subsample(site)


def is_discrete_latent(site: Site) -> bool:
    """Tell whether a site of a trace, or a message of Pyro's, is a discrete latent variable."""
    support = getattr(site["fn"], "support", None) if is_latent(site) else None
    return support is not None and support.is_discrete


def is_data(site: Site, factors: bool = True) -> bool:
    """Tell whether a site of a trace is observed data.

    Pyro marks other sites as observed, too: ``pyro.deterministic``, the values that
    reparameterisations compute, and the indices of a subsampled plate.

    **Example:**

    >>> import pyro, torch
    >>> from pyro import poutine
    >>> def model():
    ...     twice = pyro.deterministic("twice", torch.tensor(2.0))
    ...     pyro.sample("y", pyro.distributions.Normal(twice, 1.0), obs=torch.tensor(0.0))
    >>> [name for name, site in poutine.trace(model).get_trace().nodes.items() if is_data(site)]
    ['y']

    :param site: site of any type.
    :param factors: whether ``pyro.factor`` counts as data.
    """
    if site["type"] != "sample" or not site["is_observed"] or site_is_subsample(site):
        return False
    fn = site["fn"]
    # Reparameterisations leave no other mark.
    masks_all = isinstance(fn, MaskedDistribution) and fn._mask is False
    if site["infer"].get("_deterministic") or masks_all and isinstance(fn.base_dist, Delta):
        return False
    return factors or not isinstance(fn, Unit)


class _RedrawData(UnconditionMessenger):
    def _pyro_sample(self, msg: Any) -> None:
        if is_data(msg):
            super()._pyro_sample(msg)


def without_data(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model that draws its observed sites, and computes its deterministic ones.

    ``poutine.uncondition`` draws these, too, from a ``Delta`` that their plates expand.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("rows", 3):
    ...         twice = pyro.deterministic("twice", 2 * x.expand(3))
    ...         return pyro.sample("y", dist.Normal(twice, 1.0), obs=y)
    >>> without_data(model)(torch.zeros(3)).shape
    torch.Size([3])

    :param model: a Pyro model.
    """
    return _RedrawData()(model)


def attribute_name(site: str) -> str:
    """Turn the name of a site into one without dots, differently for different sites.

    **Example:**

    >>> attribute_name("net.weight"), attribute_name("net_weight")
    ('net-dweight', 'net_weight')
    """
    return site.replace("-", "-h").replace(".", "-d")


def names_in_plates_of(data: Iterable[Site], sites: Mapping[str, Site]) -> set[str]:
    """Return the names of the sites that share a plate with data.

    :param data: sites of a trace.
    :param sites: other sites of the trace, by name.
    """
    plates = {frame.name for site in data for frame in site["cond_indep_stack"]}
    return {
        name
        for name, site in sites.items()
        if any(frame.name in plates for frame in site["cond_indep_stack"])
    }


def is_flat(fn: Any) -> bool:
    """Tell whether a distribution is ``ImproperUniform``, possibly inside of wrappers.

    **Example:**

    >>> import pyro.distributions as dist
    >>> is_flat(dist.ImproperUniform(dist.constraints.real, (3,), ()).to_event(1))
    True

    :param fn: the distribution of a site.
    """
    return isinstance(innermost(fn), ImproperUniform)


def is_counted(site: Site) -> Tensor:
    """Tell which observations of a site no mask leaves out.

    A score per row is divided by their number. A mask is that of ``poutine.mask``, of a
    distribution's ``mask`` or of ``obs_mask``. An event counts if any of its elements does.

    **Example:**

    >>> import pyro.distributions as dist
    >>> fn = dist.Normal(torch.zeros(3), 1.0).mask(torch.tensor([True, False, True]))
    >>> is_counted({"fn": fn, "mask": None})
    tensor([ True, False,  True])

    :param site: site of a trace.
    :returns: of the distribution's batch shape.
    """
    found, rank = unmasked_elements(site), len(site["fn"].batch_shape)
    return found.flatten(rank).any(-1) if found.dim() > rank else found


def unmasked_elements(site: Site) -> Tensor:
    """Tell which elements no mask leaves out; ``to_event`` is undone.

    :param site: site of a trace.
    :returns: of the batch shape of the distribution inside of ``to_event``.
    """
    fn = site["fn"]
    masks = [(site["mask"], len(fn.batch_shape))]
    while isinstance(fn, (Independent, MaskedDistribution)):
        if isinstance(fn, MaskedDistribution):
            masks.append((fn._mask, len(fn.batch_shape)))
        fn = fn.base_dist
    device = next((mask.device for mask, _ in masks if isinstance(mask, Tensor)), None)
    found = torch.ones(fn.batch_shape, dtype=torch.bool, device=device)
    for mask, rank in masks:
        if mask is not None:
            mask = torch.as_tensor(mask, device=device).bool()
            found = found & mask.reshape(mask.shape + (1,) * (found.dim() - rank))
    return found


def unconstrained(site: dict[str, Any]) -> Tensor:
    """Return the unconstrained tensor of a parameter, which is trained.

    :param site: the site of the parameter.
    """
    value = site["value"]
    # With module_local_params, the value is the module's parameter itself.
    return value.unconstrained() if hasattr(value, "unconstrained") else value


class Owned(NamedTuple):
    """A parameter of a module: its unconstrained ``value`` and its constraint."""

    value: nn.Parameter
    constraint: constraints.Constraint = constraints.real


def owned_by(module: nn.Module) -> Iterator[tuple[str, Owned]]:
    """Yield the parameters of all Pyro modules in a module, by their names in Pyro's store.

    **Example:**

    >>> [name for name, _ in owned_by(nn.Sequential(PyroModule[nn.Linear](3, 1)))]
    ['weight', 'bias']

    :param module: any module.
    """
    for part in module.modules():
        if not isinstance(part, PyroModule):
            continue
        for local, child in part.named_children():
            if isinstance(child, PyroModule) and not child._pyro_name:
                getattr(part, local)  # Pyro names a module that was converted in place at access
        prefix = f"{part._pyro_name}." if part._pyro_name else ""
        for local, value in part.named_parameters(recurse=False, remove_duplicate=False):
            name = local.removesuffix("_unconstrained")
            yield prefix + name, Owned(value, *part._pyro_params.get(name, ())[:1])


def put_into_store(name: str, own: Owned) -> None:
    """Make the tensor of Pyro's store that of the module.

    A module computes with its own tensor; with another one in the store, training would change
    only the latter.

    :param name: name of the parameter in the store.
    :param own: the parameter of the module.
    """
    store = pyro.get_param_store()
    if name in store and store[name].unconstrained() is not own.value:
        del store[name]
        # Not by pyro.param, which cannot make a parameter inside of vmap.
        state = {"params": {name: own.value}, "constraints": {name: own.constraint}}
        store.set_state(cast(Any, state))


def graph_functions(output: Tensor) -> Iterator[Any]:
    """Yield the functions of autograd that compute the gradient of an output, each once."""
    seen: set[Any] = {None}
    todo: list[Any] = [output.grad_fn]
    while todo:
        function = todo.pop()
        if function not in seen:
            seen.add(function)
            yield function
            todo += [parent for parent, _ in function.next_functions]


def graph_leaves(output: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors to which the gradient of an output flows.

    **Example:**

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> [leaf is x for leaf in graph_leaves((2 * x).sum())]
    [True]

    :param output: a tensor with a gradient function.
    """
    for function in graph_functions(output):
        if type(function).__name__ == "AccumulateGrad":
            yield function.variable


def site_parts(latent: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Split vectors of all latent variables into the parts of the sites.

    **Example:**

    >>> parts = site_parts(torch.arange(5), {"x": torch.Size([2, 2]), "y": torch.Size([])})
    >>> parts["x"], parts["y"]
    (tensor([[0, 1],
            [2, 3]]), tensor(4))

    :param latent: ``(*batch, latent_dim)``.
    :param shapes: shapes by site, in the order of the vector.
    :returns: by site, ``(*batch, *shape)``.
    """
    parts = latent.split([shape.numel() for shape in shapes.values()], dim=-1)
    return {
        name: part.reshape(part.shape[:-1] + shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def joined_parts(parts: Iterable[Tensor]) -> Tensor:
    """Join the values of sites to vectors, the inverse of ``site_parts``.

    **Example:**

    >>> joined_parts([torch.zeros(5), torch.ones(5, 2, 3)]).shape
    torch.Size([5, 7])

    :param parts: ``(num, *site_shape)`` of each site.
    :returns: ``(num, latent_dim)``.
    """
    return torch.cat([part.reshape(len(part), -1) for part in parts], -1)


def constrained_parts(
    latent: Tensor, shapes: Mapping[str, torch.Size], transforms: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Map vectors of all latent variables to the values of the sites.

    :param latent: unconstrained, ``(*batch, latent_dim)``.
    :param shapes: shapes of the unconstrained sites, in the order of the vector.
    :param transforms: bijections from unconstrained values, by site.
    :returns: by site, ``(*batch, *site_shape)``.
    """
    return {name: transforms[name](part) for name, part in site_parts(latent, shapes).items()}


def survives(value: Tensor, support: constraints.Constraint) -> bool:
    """Return whether values come back from unconstrained space: they are in the support.

    **Example:**

    >>> survives(torch.tensor([0.0, 2.0]), constraints.positive)  # 0 is its boundary
    True
    >>> survives(torch.tensor([-1.0, 2.0]), constraints.positive)
    False
    """
    transform = biject_to(support)
    return is_close(transform(transform.inv(value)), value)


def is_close(again: Tensor, value: Tensor) -> bool:
    """Return whether values that came back from unconstrained space are the same, up to rounding.

    :param again: the values that came back.
    :param value: the values before.
    """
    return torch.allclose(again, value, rtol=1e-2, atol=1e-3, equal_nan=True)


@contextlib.contextmanager
def quiet_prior(prior: Any) -> Iterator[None]:
    """Hide torch's warning "Singular sample detected", which valid Wishart draws cause, too.

    :param prior: a distribution. For others than Wishart, warnings stay as they are:
        ``catch_warnings`` around a whole model would let Python repeat the model's own warnings.
    """
    if not isinstance(innermost(prior), torch.distributions.Wishart):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Singular sample detected")
        yield


class QuietPriors(Messenger):
    """Draw Wishart priors in :func:`quiet_prior`, except for sites that the model itself hides."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is None and isinstance(innermost(msg["fn"]), torch.distributions.Wishart):
            with quiet_prior(msg["fn"]):
                msg["value"] = msg["fn"](*msg["args"], **msg["kwargs"])


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
            with quiet_prior(site["fn"]):
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
    for value in leaves_of([args, kwargs, *_variables(model, set())]):
        if isinstance(value, Tensor) and value.is_floating_point():
            with contextlib.suppress(RuntimeError):  # poutine.equalize keeps a value of vmap
                return value.new_empty(())
    return None


def _variables(model: Callable[..., Any], seen: set[int]) -> Iterator[Any]:
    if id(model) in seen:  # a function that calls itself
        return
    seen.add(id(model))
    if isinstance(model, torch.nn.Module):
        yield list(model.parameters())
        yield list(model.buffers())
    if isinstance(model, functools.partial):
        yield model.args
        yield model.keywords
        for part in (model.func, *model.args):  # a handler keeps the model that it wraps there
            if callable(part) and not isinstance(part, Tensor):
                yield from _variables(part, seen)
    elif inspect.ismethod(model):
        yield vars(model.__self__)
        yield from _variables(model.__func__, seen)
    elif inspect.isfunction(model):
        found = inspect.getclosurevars(model)
        yield dict(found.nonlocals)
        for value in found.nonlocals.values():  # handlers close over the model they wrap
            if callable(value) and not isinstance(value, (type, Tensor)):
                yield from _variables(value, seen)
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


def unplated_dims(trace: Any) -> dict[str, int]:
    """Return, by site, the number of batch dimensions that belong to no plate.

    Discrete latent variables, sites inside of plates, and sites with a mask or a scale for each
    element are left out.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro import poutine
    >>> def model():
    ...     pyro.sample("x", dist.Normal(torch.zeros(3), 1.0))
    >>> unplated_dims(poutine.trace(model).get_trace())
    {'x': 1}

    :param trace: trace of a plain run of a model.
    """
    found = {}
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or site_is_subsample(site) or is_discrete_latent(site):
            continue
        if any(frame.vectorized for frame in site["cond_indep_stack"]):
            continue
        if any(isinstance(site[key], Tensor) and site[key].dim() for key in ("mask", "scale")):
            continue
        if number := len(_batch_of(site)):
            found[name] = number
    return found


def unplated_as_events(model: Callable[..., Any], dims: Mapping[str, int]) -> Callable[..., Any]:
    """Return the same model, with batch dimensions outside of plates declared by ``to_event``.

    Pyro's NUTS takes ``pyro.sample("x", dist.Normal(torch.zeros(3), 1.0))`` outside of a plate, but
    its ``SVI`` and autoguides do not. The joint density is the same.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro import poutine
    >>> def model():
    ...     pyro.sample("x", dist.Normal(torch.zeros(3), 1.0))
    >>> poutine.trace(unplated_as_events(model, {"x": 1})).get_trace().nodes["x"]["fn"].event_shape
    torch.Size([3])

    :param model: a Pyro model.
    :param dims: see :func:`unplated_dims`.
    """
    return _UnplatedAsEvents(dims)(model)


def _batch_of(site: Site) -> torch.Size:
    """Return the batch shape of a distribution and its value."""
    fn, shape = site["fn"], torch.as_tensor(site["value"]).shape  # data may be numbers or lists
    return torch.broadcast_shapes(fn.batch_shape, shape[: len(shape) - fn.event_dim])


class _UnplatedAsEvents(Messenger):
    def __init__(self, dims: Mapping[str, int]) -> None:
        super().__init__()
        self.dims = dims

    def _pyro_sample(self, msg: Any) -> None:
        number, fn = self.dims.get(msg["name"], 0), msg["fn"]
        if number and isinstance(fn, Unit):
            factor = sum_rightmost(fn.log_factor, number)
            msg["fn"] = Unit(factor, has_rsample=fn.has_rsample, validate_args=False)
            msg["value"] = msg["fn"].sample()
        elif number:
            if msg["is_observed"]:
                fn = fn.expand(_batch_of(msg))
            msg["fn"] = fn.to_event(number)
