# SPDX-License-Identifier: Apache-2.0
"""Priors on the parameters of any network."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample
from pyro.nn.module import to_pyro_module_
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["to_bayesian_"]

PriorFunction = Callable[[str, nn.Parameter], dist.TorchDistribution | None]

NORMALIZATION = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def to_bayesian_(
    module: nn.Module,
    prior: float | dist.TorchDistribution | PriorFunction | None = None,
    *,
    normalization: bool = False,
) -> PyroModule:
    r"""Puts priors on the parameters of any network, in place.

    Each becomes a latent, a sample site with the parameter's name, such as ``"0.weight"``. The
    network is then called as before, in a Pyro model.

    Parameters without a prior are learnt by maximum likelihood, as Pyro parameters. Frozen ones
    (``requires_grad=False``) keep their values; they turn into buffers, as Pyro would train them.

    **Example:**

    >>> import pyro
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

    :param module: a network, changed in place. For batch normalisation call ``module.eval()``
        before training, as its running moments would depend on the order of the particles.
    :param prior: what each parameter is drawn from. ``None``: weights from
        :math:`N(0, 1/\text{fan-in})`, so that activations keep their size from layer to layer,
        the scales of normalisation layers from N(1, 1), and biases, embeddings and all else from
        N(0, 1). A number: the standard deviation of a normal distribution around zero. A
        distribution of scalars, from which all entries are drawn. A function
        ``(name, parameter) -> distribution``, of scalars or of the parameter's shape, or None for a
        parameter without a prior. It is called once, and its distribution must not depend on other
        latents.
    :param normalization: whether batch, layer, group, instance and RMS normalisation layers get
        priors, too.
    :returns: ``module`` itself, now a :class:`~pyro.nn.module.PyroModule`.
    :raises TypeError: for a prior of another kind.
    :raises ValueError: for a prior whose shape does not fit, parameters that several modules share,
        lazy ones that have no shape yet, and a module that has Pyro's sites already. The module is
        unchanged then.

    The priors follow the module's dtype and device: ``module.to(...)`` moves them, at the next
    call.
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
            keep = isinstance(owner, NORMALIZATION) and not normalization
            priors[name] = None if keep else _make_prior(prior, owner, name, parameter)

    to_pyro_module_(module)
    for prefix, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(prefix, recurse=False)):
            local = name.rpartition(".")[-1]
            if not parameter.requires_grad:
                delattr(owner, local)
                owner.register_buffer(local, parameter.detach())
            elif (distribution := priors[name]) is not None:
                owner.register_buffer("_prior_like", parameter.new_empty(0), persistent=False)
                setattr(owner, local, PyroSample(_MovingPrior(distribution)))
    return module


def _describe(prefix: str, owner: nn.Module) -> str:
    return f"submodule '{prefix}'" if prefix else f"the module ({type(owner).__name__})"


def _make_prior(
    prior: float | dist.TorchDistribution | PriorFunction | None,
    owner: nn.Module,
    name: str,
    parameter: nn.Parameter,
) -> dist.TorchDistribution | None:
    """The prior of one parameter, with its shape as the event shape."""
    if prior is None:
        distribution = _default_prior(owner, name.rpartition(".")[-1], parameter)
    elif isinstance(prior, (int, float)):
        if not prior > 0:
            raise ValueError(f"a number as prior is a standard deviation above 0, but got {prior}")
        distribution = _normal(parameter, 0.0, prior)
    elif isinstance(prior, torch.distributions.Distribution):
        distribution = prior
    elif callable(prior):
        distribution = prior(name, parameter)
        if distribution is None:
            return None
    else:
        raise TypeError(
            "prior must be None, a number, a Pyro distribution or a function (name, parameter) -> "
            f"distribution, but got {type(prior).__name__}"
        )
    if not hasattr(distribution, "to_event"):
        raise TypeError(
            f"the prior of parameter '{name}' must be a distribution of pyro.distributions, but "
            f"got {type(distribution).__module__}.{type(distribution).__name__}"
        )
    shape = parameter.shape
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


def _normal(like: Tensor, mean: float, sd: float) -> dist.TorchDistribution:
    return dist.Normal(like.new_tensor(mean), like.new_tensor(sd))


def _default_prior(owner: nn.Module, name: str, parameter: nn.Parameter) -> dist.TorchDistribution:
    if isinstance(owner, NORMALIZATION):
        return _normal(parameter, 1.0 if name == "weight" else 0.0, 1.0)
    embedding = isinstance(owner, (nn.Embedding, nn.EmbeddingBag))  # one row is one output
    if "bias" in name or parameter.dim() < 2 or embedding:
        return _normal(parameter, 0.0, 1.0)
    fan_in = parameter[0].numel()
    if isinstance(owner, nn.modules.conv._ConvTransposeNd):  # the inputs come first
        fan_in = parameter[:, 0].numel() // owner.groups
    return _normal(parameter, 0.0, 1 / math.sqrt(fan_in))


class _MovingPrior:
    """A prior in the dtype and on the device of its module, as a picklable function of it."""

    def __init__(self, distribution: dist.TorchDistribution) -> None:
        self.distribution = distribution
        self.place: tuple[torch.dtype, torch.device] | None = None

    def __call__(self, module: nn.Module) -> dist.TorchDistribution:
        like = cast(Tensor, module._prior_like)
        if self.place != (like.dtype, like.device):
            self.distribution = _moved(self.distribution, like, {})
            self.place = like.dtype, like.device
        return self.distribution


def _moved(part: Any, like: Tensor, moved: dict[int, Any]) -> Any:
    """A copy of a distribution, or of a part of one, with ``like``'s dtype and device; ``moved``
    knows the copies made so far, as a transform and its inverse hold each other."""
    if isinstance(part, Tensor):
        return part.to(like) if part.is_floating_point() else part.to(like.device)
    if isinstance(part, (list, tuple)):
        return type(part)([_moved(item, like, moved) for item in part])
    if isinstance(part, (torch.distributions.Distribution, torch.distributions.Transform)):
        if id(part) not in moved:
            moved[id(part)] = result = object.__new__(type(part))
            for name, value in vars(part).items():
                setattr(result, name, _moved(value, like, moved))
        return moved[id(part)]
    return part
