# SPDX-License-Identifier: Apache-2.0
"""Sites as LIVI's tests make them, without model or guide."""

from __future__ import annotations

from dataclasses import replace

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
