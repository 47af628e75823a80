# SPDX-License-Identifier: Apache-2.0
"""Priors on the parameters of any network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeAlias, cast

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample
from pyro.nn.module import to_pyro_module_
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from pyro_implicit.nn.policy import FAN_IN_GAIN

__all__ = [
    "NORMALIZATION",
    "START",
    "MovingPrior",
    "Prior",
    "ScaledWeight",
    "find_key",
    "has_priors",
    "make_prior",
    "moved",
    "refuse_unknown_keys",
    "start_values",
    "to_bayesian_",
]


def to_bayesian_(
    module: nn.Module,
    prior: Prior = "fan_in",
    *,
    normalization: bool = False,
) -> PyroModule:
    r"""Put priors on the parameters of any network, in place.

    Each parameter becomes a latent variable, a sample site with the parameter's name, such as
    ``"0.weight"``. The network is then called as before, in a Pyro model: once, and before the
    plate of its data, as in :func:`~pyro_implicit.nn.classifier`. :func:`start_values` returns the
    previous values of the parameters, as initial values of guides.

    Parameters without a prior are learnt by maximum likelihood, as Pyro parameters. Frozen
    parameters (``requires_grad=False``) become buffers, because Pyro would train them.

    **Example:**

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> from torch import nn
    >>> net = to_bayesian_(nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 1)))
    >>> def model(x, y=None):
    ...     mean = net(x).squeeze(-1)
    ...     with pyro.plate("rows", len(x)):
    ...         pyro.sample("y", dist.Normal(mean, 0.1), obs=y)
    >>> trace = pyro.poutine.trace(model).get_trace(torch.randn(8, 3))
    >>> [name for name in trace.stochastic_nodes if name != "rows"]
    ['0.weight', '0.bias', '2.weight', '2.bias', 'y']

    :param module: a network, changed in place. With batch normalisation, call ``module.eval()``
        before training: its running moments would depend on the order of the particles.
    :param prior: the prior of each parameter. ``"fan_in"``: :math:`N(0, 9/\text{fan-in})` for
        weights, wide enough for confident classifiers, N(1, 1) for the scales of normalisation
        layers, and N(0, 1) for biases, embeddings and all other parameters. ``"moped"``: the same,
        centred at the present values, for networks trained on other data (Krishnan et al., whose
        standard deviation is 1). ``"hierarchical"``: the default times a scale that is inferred,
        one for each weight matrix: :math:`w = \tau s z` with :math:`\tau = 3/\sqrt{\text{fan-in}}`,
        s half-normal with scale 1 (site ``"0.weight_scale"``) and z standard normal (site
        ``"0.weight_unit"``); w is deterministic, and all other parameters have the default. This
        non-centred form keeps the density of an ensemble's members bounded, which is infinite at s
        = 0 if w itself is the latent variable. A number: the standard deviation of a normal
        distribution around zero. A distribution of scalars for all entries. A function ``(name,
        parameter) -> distribution``, of scalars or of the parameter's shape, or None; it is called
        once, and its distribution must not depend on other latents. None: no prior. A dict of these
        by the names of layers or parameters: the longest name applies, ``""`` applies to all, and
        the default is ``"fan_in"``. For example, in ``{"": None, "head": "fan_in"}`` only the last
        layer is Bayesian.
    :param normalization: whether batch, layer, group, instance and RMS normalisation layers have
        priors, too. A dict that names one gives it a prior in any case.
    :returns: ``module`` itself, now a :class:`~pyro.nn.module.PyroModule`.
    :raises TypeError: for a prior of another kind.
    :raises ValueError: for a prior of another shape, an unknown name, parameters that several
        modules share, lazy parameters without a shape, embeddings with ``padding_idx``,
        parametrised layers (such as spectral normalisation), and a module that has Pyro's sites
        already. The module is then unchanged.

    Parameters with a prior leave ``module.state_dict()``: load pretrained weights before this call,
    and save guides or draws afterwards.

    The priors follow the module's dtype and device after ``module.to(...)``. A call inside a plate
    raises ``ValueError``, because it would draw weights for each element of the plate.

    **References:**

    1. Krishnan, Subedar and Tickoo (2020), *Specifying Weight Priors in Bayesian Deep Neural
       Networks with Empirical Bayes*.
    """
    priors: dict[str, dist.TorchDistribution | None] = {}
    names: dict[nn.Parameter, str] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        if isinstance(owner, PyroModule) and (owner._pyro_samples or owner._pyro_params):
            raise ValueError(
                f"{_describe(prefix, owner)} has Pyro's sites or parameters already. Cure: call "
                "to_bayesian_ once, on a plain nn.Module"
            )
        for name, parameter in owner.named_parameters(prefix, recurse=False):
            if not parameter.requires_grad:
                continue
            if is_lazy(parameter):
                raise ValueError(
                    f"parameter '{name}' has no shape yet. Cure: run the module once on a batch "
                    "before to_bayesian_"
                )
            if parameter in names:
                raise ValueError(
                    f"parameters '{names[parameter]}' and '{name}' are one tensor, which would "
                    "become two independent latents. Cure: untie them, or register the layer once "
                    "and use it twice in forward(), where both uses see one draw"
                )
            names[parameter] = name
            is_named = isinstance(prior, Mapping) and bool(find_key(prior, name))
            keep = isinstance(owner, NORMALIZATION) and not (normalization or is_named)
            priors[name] = None if keep else make_prior(prior, owner, name, parameter)
            if priors[name] is not None and not is_named:
                _refuse_hidden_meaning(prefix, owner)
    refuse_unknown_keys(prior, list(priors))

    to_pyro_module_(module)
    for prefix, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(prefix, recurse=False)):
            local = name.rpartition(".")[-1]
            if not parameter.requires_grad:
                delattr(owner, local)
                owner.register_buffer(local, parameter.detach().clone())
            elif (distribution := priors[name]) is not None:
                start = parameter.detach().clone()
                if parameter.dim() > 1 and _for_name(prior, name) == "hierarchical":
                    _put_scaled(owner, local, distribution, start)
                else:
                    _put(owner, local, distribution, start)
    return module


def start_values(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a network before it became Bayesian.

    The pretrained or random weights are better initial values of a guide than the prior's medians,
    which are all 0. Load pretrained weights, and freeze constant ones, before
    :func:`to_bayesian_`:

    **Example:**

    >>> from pyro.infer.autoguide import AutoNormal, init_to_value
    >>> net = to_bayesian_(nn.Linear(3, 1))
    >>> values = start_values(net)
    >>> {name: tuple(value.shape) for name, value in values.items()}
    {'weight': (1, 3), 'bias': (1,)}
    >>> guide = AutoNormal(net, init_loc_fn=init_to_value(values=values), init_scale=0.01)

    :param module: a network after :func:`to_bayesian_`, or a module that holds one.
    :returns: copies by site, on the module's device.
    """
    values: dict[str, Tensor] = {}
    if not isinstance(module, PyroModule):
        for child in module.children():
            values |= start_values(child)
        return values
    for name, owner in module.named_modules(prefix=module._pyro_name):
        for local in getattr(owner, "_pyro_samples", ()):
            if hasattr(owner, START + local):
                start = getattr(owner, START + local)
                values[f"{name}.{local}" if name else local] = start.clone()  # guides train theirs
    return values


def has_priors(module: nn.Module) -> bool:
    """Check whether any parameter of a network is a latent variable."""
    return any(bool(getattr(part, "_pyro_samples", ())) for part in module.modules())


def _describe(prefix: str, owner: nn.Module) -> str:
    return f"submodule '{prefix}'" if prefix else f"the module ({type(owner).__name__})"


def _refuse_hidden_meaning(prefix: str, owner: nn.Module) -> None:
    """Refuse parameters whose values torch does not use as they are.

    :raises ValueError: for an embedding with ``padding_idx``, and for the tensors behind a
        parametrised weight.
    """
    if getattr(owner, "padding_idx", None) is not None:
        raise ValueError(
            f"{_describe(prefix, owner)} has padding_idx={owner.padding_idx}: torch cuts the "
            "gradient of that row, which would become a latent variable. Cure: padding_idx=None, "
            f'or prior={{"": "fan_in", "{prefix}": None}}, which leaves the layer as it is'
        )
    if isinstance(owner, ParametrizationList):
        layer, _, weight = prefix.rpartition(".parametrizations.")
        raise ValueError(
            f"'{weight}' of layer '{layer}' is parametrised ({type(owner[0]).__name__}): a prior "
            "on the tensors behind it is not one on the weights. Cure: "
            f"torch.nn.utils.parametrize.remove_parametrizations(layer, '{weight}'), or name "
            f"the prior of these tensors, prior={{'{prefix}': ...}}"
        )


PriorFunction = Callable[[str, nn.Parameter], dist.TorchDistribution | None]
OnePrior: TypeAlias = float | str | dist.TorchDistribution | PriorFunction | None
Prior: TypeAlias = OnePrior | Mapping[str, OnePrior]

NORMALIZATION = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def _for_name(prior: Prior, name: str) -> OnePrior:
    if not isinstance(prior, Mapping):
        return prior
    key = find_key(prior, name)
    return "fan_in" if key is None else prior[key]


def _put(owner: nn.Module, local: str, prior: dist.TorchDistribution, start: Tensor) -> None:
    owner.register_buffer(START + local, start, persistent=False)
    setattr(owner, local, PyroSample(MovingPrior(prior, local)))


def _put_scaled(owner: nn.Module, local: str, prior: dist.TorchDistribution, start: Tensor) -> None:
    sd = prior.stddev.flatten()[0]
    scale = start.square().mean().sqrt() / sd
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    one, unit = torch.ones_like(sd), f"{local}_unit"
    _put(owner, f"{local}_scale", dist.HalfNormal(one), scale)
    normal = dist.Normal(torch.zeros_like(sd), one).expand(start.shape).to_event(start.dim())
    _put(owner, unit, normal, start / (sd * scale))
    setattr(owner, local, PyroSample(ScaledWeight(local, sd.item())))


def make_prior(
    prior: Prior, owner: nn.Module, name: str, parameter: nn.Parameter
) -> dist.TorchDistribution | None:
    """Make the prior of one parameter, with the parameter's shape as event shape; None if none."""
    prior = _for_name(prior, name)
    if prior is None:
        return None
    if prior in ("fan_in", "moped", "hierarchical"):
        mean, sd = _default_moments(owner, name.rpartition(".")[-1], parameter)
        loc = parameter.detach().clone() if prior == "moped" else parameter.new_tensor(mean)
        distribution = dist.Normal(loc, parameter.new_tensor(sd))
    elif isinstance(prior, str):
        raise ValueError(
            f'prior must be "fan_in", "hierarchical" or "moped" if it is a word, but got {prior!r}'
        )
    elif isinstance(prior, Real):
        sd = float(prior)
        if not sd > 0:
            raise ValueError(f"a number as prior is a standard deviation above 0, but got {prior}")
        distribution = dist.Normal(parameter.new_tensor(0.0), parameter.new_tensor(sd))
    elif isinstance(prior, torch.distributions.Distribution):
        distribution = prior
    elif callable(prior):
        distribution = prior(name, parameter)
        if distribution is None:
            return None
    else:
        raise TypeError(
            'prior must be a number, "fan_in", "hierarchical", "moped", a Pyro distribution, a '
            "function (name, parameter) -> distribution, a dict of these by layer or None, but got "
            f"{type(prior).__name__}"
        )
    return _of_shape(distribution, name, parameter.shape)


def find_key(prior: Mapping[str, Any], name: str) -> str | None:
    """Return the longest key that names a parameter or a module that contains it.

    **Example:**

    >>> find_key({"": 1.0, "conv": 0.1, "conv.bias": 2.0}, "conv.weight")
    'conv'
    """
    keys = [key for key in prior if not key or f"{name}.".startswith(f"{key}.")]
    return max(keys, key=len, default=None)


def refuse_unknown_keys(prior: Prior, names: list[str]) -> None:
    """Check that each key of a dict of priors names a parameter or a layer."""
    for key in prior if isinstance(prior, Mapping) else ():
        if key and not any(find_key({key: None}, name) for name in names):
            layers = sorted({name.rpartition(".")[0] for name in names})
            raise ValueError(
                f"prior names '{key}', which is no layer or parameter of the network that is "
                f"trained. It has the layers {', '.join(map(repr, layers))}"
            )


def _of_shape(distribution: Any, name: str, shape: torch.Size) -> dist.TorchDistribution:
    if not hasattr(distribution, "to_event"):
        raise TypeError(
            f"the prior of parameter '{name}' must be a distribution of pyro.distributions, but "
            f"got {type(distribution).__module__}.{type(distribution).__name__}"
        )
    num_batch = len(shape) - len(distribution.event_shape)
    try:
        if num_batch < 0 or distribution.event_shape != shape[num_batch:]:
            raise ValueError("event shape")
        distribution = distribution.expand(shape[:num_batch])
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"the prior of parameter '{name}' has batch shape {tuple(distribution.batch_shape)} "
            f"and event shape {tuple(distribution.event_shape)}, but the parameter has shape "
            f"{tuple(shape)}. Cure: a distribution of scalars, or a function (name, parameter) -> "
            "distribution"
        ) from error
    return distribution.to_event(num_batch)


def _default_moments(owner: nn.Module, name: str, parameter: Tensor) -> tuple[float, float]:
    if isinstance(owner, NORMALIZATION):
        return (1.0 if name == "weight" else 0.0), 1.0
    embedding = isinstance(owner, (nn.Embedding, nn.EmbeddingBag))  # one row is one output
    if "bias" in name or parameter.dim() < 2 or embedding:
        return 0.0, 1.0
    fan_in = parameter[0].numel()
    if isinstance(owner, nn.modules.conv._ConvTransposeNd):  # the inputs come first
        fan_in = parameter[:, 0].numel() // owner.groups
    return 0.0, FAN_IN_GAIN / math.sqrt(fan_in)


START = "_start_"  # prefix of the buffer with a parameter's previous value


class ScaledWeight:
    """The product of a weight's scales and its standard normal latent, as a picklable function."""

    def __init__(self, name: str, sd: float) -> None:
        self.name, self.sd = name, sd

    def __call__(self, module: PyroModule) -> Tensor:
        scale, unit = getattr(module, f"{self.name}_scale"), getattr(module, f"{self.name}_unit")
        return self.sd * scale * unit


class MovingPrior:
    """A prior that follows the dtype and device of its module, as a picklable function."""

    def __init__(self, distribution: dist.TorchDistribution, name: str) -> None:
        self.distribution = distribution
        self.name = name
        self.place: tuple[torch.dtype, torch.device] | None = None

    def __call__(self, module: PyroModule) -> dist.TorchDistribution:
        _refuse_plates(module, self.name)
        like = cast(Tensor, getattr(module, START + self.name))
        if self.place != (like.dtype, like.device):
            self.distribution = moved(self.distribution, like)
            self.place = like.dtype, like.device
        return self.distribution


def _refuse_plates(module: PyroModule, name: str) -> None:
    """Check that no layer of torch is called in a plate, which would give each row weights."""
    if not type(module).forward.__module__.startswith("torch.nn"):
        return
    for plate in _PYRO_STACK:
        if isinstance(plate, IndepMessenger) and plate._vectorized:
            if plate.name.startswith(("num_particles", "_num_predictive")):
                cure = (
                    "vectorize_particles=False, an ELBO of this library (ImplicitELBO), or "
                    "parallel=False"
                )
            else:
                cure = "call the network before the plate: logits = net(x), then with pyro.plate"
            raise ValueError(
                f"latent '{module._pyro_get_fullname(name)}' of the network is drawn inside plate "
                f"'{plate.name}': one set of weights for each element. Cure: {cure}"
            )


def moved(part: Any, like: Tensor, copies: dict[int, Any] | None = None) -> Any:
    """Copy a distribution, or a part of one, to ``like``'s dtype and device.

    ``copies`` avoids endless recursion, because a transform and its inverse hold each other.
    """
    copies = {} if copies is None else copies
    if isinstance(part, Tensor):
        return part.to(like) if part.is_floating_point() else part.to(like.device)
    if isinstance(part, (list, tuple)):
        return type(part)([moved(item, like, copies) for item in part])
    if isinstance(part, (torch.distributions.Distribution, torch.distributions.Transform)):
        if id(part) not in copies:
            copies[id(part)] = result = object.__new__(type(part))
            for name, value in vars(part).items():
                setattr(result, name, moved(value, like, copies))
        return copies[id(part)]
    return part
