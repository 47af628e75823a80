# SPDX-License-Identifier: Apache-2.0
"""Sites of LIVI's tests, without model or guide, and the comparison of their densities."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pyro_implicit import LIVI_ELBO, SemiImplicit
from pyro_implicit.infer import ImplicitSite


def draw(q: SemiImplicit) -> ImplicitSite:
    noise, value, _ = q.draw()
    value = value.detach()
    return ImplicitSite("x", q, noise, value, value)


def linearised(elbo: LIVI_ELBO, site: ImplicitSite) -> ImplicitSite:
    """With the derivative, if the method asks for it when it draws."""
    if elbo.draw(site.distribution).linearisation is None:
        return site
    return replace(site, linearisation=site.distribution.linearise(site.noise))


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Compare the values and the gradients with respect to all inputs."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weight = 1 + torch.rand_like(found)
    torch.testing.assert_close(
        torch.autograd.grad((weight * found).sum(), inputs, materialize_grads=True),
        torch.autograd.grad((weight * expected).sum(), inputs, materialize_grads=True),
        rtol=1e-8,
        atol=1e-8,
    )
