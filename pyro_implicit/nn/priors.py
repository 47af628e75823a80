# SPDX-License-Identifier: Apache-2.0
"""Priors of a network's parameters, from what a user says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pyro.distributions as dist
import torch
from torch import Tensor, nn

__all__ = ["NORMALIZATION", "Prior", "find_key", "make_prior", "refuse_unknown_keys"]

PriorFunction = Callable[[str, nn.Parameter], dist.TorchDistribution | None]
OnePrior: TypeAlias = float | str | dist.TorchDistribution | PriorFunction | None
Prior: TypeAlias = OnePrior | Mapping[str, OnePrior]

NORMALIZATION = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


#: With 1, draws of the prior are so unsure of labels that a MAP stays so, however many epochs it
#: gets: benchmarks/networks/digits.py.
GAIN = 3.0


def make_prior(
    prior: Prior, owner: nn.Module, name: str, parameter: nn.Parameter
) -> dist.TorchDistribution | None:
    """The prior of one parameter, with its shape as the event shape; None for no prior.

    :param prior: as :func:`~pyro_implicit.nn.to_bayesian_` takes it.
    :param owner: the layer that has the parameter.
    :param name: of the parameter, with the layer's.
    :raises TypeError: for a prior of another kind.
    :raises ValueError: for a number that is not positive, an unknown word or a wrong shape.
    """
    if isinstance(prior, Mapping):
        key = find_key(prior, name)
        prior = "fan_in" if key is None else prior[key]
    if prior is None:
        return None
    if prior in ("fan_in", "moped"):
        mean, sd = _default_moments(owner, name.rpartition(".")[-1], parameter)
        loc = parameter.detach().clone() if prior == "moped" else parameter.new_tensor(mean)
        distribution = dist.Normal(loc, parameter.new_tensor(sd))
    elif isinstance(prior, str):
        raise ValueError(f'prior must be "fan_in" or "moped" if it is a word, but got {prior!r}')
    elif isinstance(prior, (int, float)):
        if not prior > 0:
            raise ValueError(f"a number as prior is a standard deviation above 0, but got {prior}")
        distribution = dist.Normal(parameter.new_tensor(0.0), parameter.new_tensor(prior))
    elif isinstance(prior, torch.distributions.Distribution):
        distribution = prior
    elif callable(prior):
        distribution = prior(name, parameter)
        if distribution is None:
            return None
    else:
        raise TypeError(
            'prior must be a number, "fan_in", "moped", a Pyro distribution, a function (name, '
            "parameter) -> distribution, a dict of these by layer or None, but got "
            f"{type(prior).__name__}"
        )
    return _of_shape(distribution, name, parameter.shape)


def find_key(prior: Mapping[str, Any], name: str) -> str | None:
    """The longest key that is a parameter's name or that of a module around it; "" is around all.

    **Example:**

    >>> find_key({"": 1.0, "conv": 0.1, "conv.bias": 2.0}, "conv.weight")
    'conv'
    """
    keys = [key for key in prior if not key or f"{name}.".startswith(f"{key}.")]
    return max(keys, key=len, default=None)


def refuse_unknown_keys(prior: Prior, names: list[str]) -> None:
    """Check that each key of a dict of priors belongs to a parameter.

    :param names: of all parameters.
    :raises ValueError: naming the key and the layers there are.
    """
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
    """Mean and standard deviation."""
    if isinstance(owner, NORMALIZATION):
        return (1.0 if name == "weight" else 0.0), 1.0
    embedding = isinstance(owner, (nn.Embedding, nn.EmbeddingBag))  # one row is one output
    if "bias" in name or parameter.dim() < 2 or embedding:
        return 0.0, 1.0
    fan_in = parameter[0].numel()
    if isinstance(owner, nn.modules.conv._ConvTransposeNd):  # the inputs come first
        fan_in = parameter[:, 0].numel() // owner.groups
    return 0.0, GAIN / math.sqrt(fan_in)
