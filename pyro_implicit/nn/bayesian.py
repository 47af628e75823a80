# SPDX-License-Identifier: Apache-2.0
"""Priors on the parameters of any network."""

from __future__ import annotations

from collections.abc import Mapping

import pyro.distributions as dist
from pyro.nn import PyroModule, PyroSample
from pyro.nn.module import to_pyro_module_
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pyro_implicit.nn.moving_prior import START, MovingPrior
from pyro_implicit.nn.priors import (
    NORMALIZATION,
    Prior,
    find_key,
    make_prior,
    refuse_unknown_keys,
)

__all__ = ["has_priors", "start_values", "to_bayesian_"]


def to_bayesian_(
    module: nn.Module,
    prior: Prior = "fan_in",
    *,
    normalization: bool = False,
) -> PyroModule:
    r"""Puts priors on the parameters of any network, in place.

    Each becomes a latent, a sample site with the parameter's name, such as ``"0.weight"``. The
    network is then called as before, in a Pyro model: once, and before the plate of its data, as in
    :func:`~pyro_implicit.nn.classifier`. What the parameters were, trained or not, are
    :func:`start_values` for guides.

    Parameters without a prior are learnt by maximum likelihood, as Pyro parameters. Frozen ones
    (``requires_grad=False``) keep their values; they turn into buffers, as Pyro would train them.

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

    :param module: a network, changed in place. For batch normalisation call ``module.eval()``
        before training, as its running moments would depend on the order of the particles.
    :param prior: what each parameter is drawn from. ``"fan_in"``: weights from
        :math:`N(0, 9/\text{fan-in})`, wide enough for a classifier to be sure,
        the scales of normalisation layers from N(1, 1), and biases, embeddings and all else from
        N(0, 1). ``"moped"``: the same, but around what the parameters are, for networks that were
        trained on other data (Krishnan et al., whose standard deviation is 1). A number: the
        standard deviation of a normal distribution around zero. A distribution of scalars, from
        which all entries are drawn. A function ``(name, parameter) -> distribution``, of scalars or
        of the parameter's shape, or None; it is called once, and its distribution must not depend
        on other latents. None: no prior. A dict of these, by the names of layers or parameters: the
        longest name counts, ``""`` stands for all, and what it leaves out has ``"fan_in"``. So
        ``{"": None, "head": "fan_in"}`` is a network whose last layer alone is Bayesian.
    :param normalization: whether batch, layer, group, instance and RMS normalisation layers get
        priors, too; a dict that names one gives it one in any case.
    :returns: ``module`` itself, now a :class:`~pyro.nn.module.PyroModule`.
    :raises TypeError: for a prior of another kind.
    :raises ValueError: for a prior whose shape does not fit, a name that is none, parameters that
        several modules share, lazy ones that have no shape yet, and a module that has Pyro's sites
        already. The module is unchanged then.

    The priors follow the module's dtype and device: ``module.to(...)`` moves them, at the next
    call. A call inside a plate, which would draw weights for each of its elements, is refused.

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
                owner.register_buffer(START + local, start, persistent=False)
                setattr(owner, local, PyroSample(MovingPrior(distribution, local)))
    return module


def start_values(module: nn.Module) -> dict[str, Tensor]:
    """What the parameters of a network were before it became Bayesian.

    Weights of a pretrained network, or those that torch drew, where a guide starts better than at
    the prior's medians, all of which are 0. Load a trained network's weights, and freeze what is to
    stay, before :func:`to_bayesian_`:

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
    """Whether any parameter of a network is a latent."""
    return any(bool(getattr(part, "_pyro_samples", ())) for part in module.modules())


def _describe(prefix: str, owner: nn.Module) -> str:
    return f"submodule '{prefix}'" if prefix else f"the module ({type(owner).__name__})"
