# SPDX-License-Identifier: Apache-2.0
"""Priors that follow their module to its dtype and device."""

from __future__ import annotations

from typing import Any, cast

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor

__all__ = ["START", "MovingPrior", "moved"]

START = "_start_"  # before a parameter's name: the buffer with what it was


class MovingPrior:
    """A prior in the dtype and on the device of its module, as a picklable function of it.

    :param distribution: the prior.
    :param name: of the module's parameter.
    """

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
    """Check that a layer is not called inside a plate, which would give each element weights of its
    own. A layer of torch's fails there in any case, one of the user's may be made for it.

    :raises ValueError: naming site, plate and cure.
    """
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
    """A copy of a distribution, or of a part of one, with ``like``'s dtype and device.

    :param copies: those made so far, as a transform and its inverse hold each other.
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
