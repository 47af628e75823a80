# SPDX-License-Identifier: Apache-2.0
"""A step of Adam that reads nothing from the device, for recordings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_implicit.compiled import Untraceable

__all__ = ["adam_step"]


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
