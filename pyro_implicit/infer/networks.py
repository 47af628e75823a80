# SPDX-License-Identifier: Apache-2.0
"""ELBOs that train networks of their own beside the guide."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_implicit.compiled import ACTIVE, Untraceable
from pyro_implicit.infer.implicit_elbo import ImplicitELBO

__all__ = ["NetworkELBO", "adam_step"]


class NetworkELBO(ImplicitELBO, nn.Module):  # type: ignore[misc]  # both have ``compile``
    """An ELBO with one network for each implicit site, and the optimisers that train them.

    ``networks`` is an :class:`torch.nn.ModuleDict`, so that ``ELBOModule.parameters()`` and
    ``state_dict()`` have them after the first step; they are in Pyro's parameter store too.
    ``optimisers`` are theirs, by site.

    Their names in the store are the object's own, so that two ELBOs of one class share nothing.

    :param optim: arguments of :class:`torch.optim.Adam`.
    """

    num_particles: int
    records_to_the_bit = False  # of its optimiser

    def __init__(self, num_particles: int, optim: dict[str, Any], **kwargs: Any) -> None:
        nn.Module.__init__(self)
        super().__init__(num_particles, **kwargs)
        self.networks = nn.ModuleDict()
        self.store_name = self._new_name()
        self._optim = optim

    @property
    def optimisers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimisers of the networks, by site."""
        return self.state.optimisers

    def __getstate__(self) -> dict[str, Any]:
        for parameter in self.parameters():
            # Pyro's weak reference cannot be pickled; the store renews it when it is next read.
            parameter.__dict__.pop("unconstrained", None)
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.store_name = self._new_name()  # a copy shares no parameters with its original

    def _new_name(self) -> str:
        return f"{type(self).__name__}-{uuid.uuid4().hex[:8]}"

    def site_network(self, name: str, make: Callable[[], nn.Module], like: Tensor) -> nn.Module:
        """The network of a site.

        :param make: makes it, the first time.
        :param like: of its dtype and on its device.
        """
        key = name.replace(".", "-")  # names of modules have no dots
        if key not in self.networks:
            self.networks[key] = make().to(dtype=like.dtype, device=like.device)
        network = self.networks[key]
        if not pyro.settings.get("module_local_params"):
            pyro.module(f"{self.store_name}.{key}", network, update_module_params=True)
        return network

    def _forget_guide(self) -> None:
        self.networks.clear()
        store = pyro.get_param_store()  # else the new networks would take the old ones' values
        for name in [name for name in store if name.startswith(f"{self.store_name}.")]:
            del store[name]

    def descend(self, name: str, network: nn.Module, loss: Tensor) -> None:
        """One step of the site's network; nothing of it is left to the guide's optimiser."""
        parameters = list(network.parameters())
        optimiser = self.optimisers.get(name)
        if optimiser is None or not _same(optimiser.param_groups[0]["params"], parameters):
            optimiser = torch.optim.Adam(parameters, **self._optim)
            self.optimisers[name] = optimiser
        gradients = torch.autograd.grad(loss, parameters)
        if ACTIVE.recorder is not None:
            adam_step(optimiser, gradients)
            return
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimiser.step()
        optimiser.zero_grad()


def _same(left: list[nn.Parameter], right: list[nn.Parameter]) -> bool:
    return all(a is b for a, b in zip(left, right, strict=True))


@torch.no_grad()
def adam_step(optimiser: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> None:
    """What ``optimiser.step()`` does after its first step, in tensor operations alone.

    :param optimiser: :class:`torch.optim.Adam` of one group, without options beyond learning rate,
        decays, epsilon and weight decay.
    :param gradients: of its parameters.
    :raises Untraceable: for other options.
    """
    group = optimiser.param_groups[0]
    if group["amsgrad"] or group["maximize"] or group.get("decoupled_weight_decay"):
        raise Untraceable("the optimiser of an ELBO's network has options beyond plain Adam's")
    beta1, beta2 = group["betas"]
    for parameter, gradient in zip(group["params"], gradients, strict=True):
        if group["weight_decay"]:
            gradient = gradient + group["weight_decay"] * parameter
        state = optimiser.state[parameter]
        state["step"].add_(1)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step = state["step"].double()
        rate = group["lr"] / (1 - beta1**step)
        scale = (1 - beta2**step).sqrt()
        like = {"dtype": parameter.dtype, "device": parameter.device}
        denominator = square.sqrt().div_(scale.to(**like)).add_(group["eps"])
        parameter.sub_(rate.to(**like) * mean / denominator)
