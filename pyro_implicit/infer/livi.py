# SPDX-License-Identifier: Apache-2.0
"""Linearised implicit variational inference."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor

from pyro_implicit.distributions import Draw, Implicit, SemiImplicit
from pyro_implicit.infer.engine.implicit_sites import (
    FlatSite,
    ImplicitSite,
    check_generator,
    check_standard_normal,
    flatten_site,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.implicit_elbo import ImplicitELBO
from pyro_implicit.infer.policy import ELBOS
from pyro_implicit.ops import (
    covariance_log_det,
    jacobian_products,
    linearised_log_density,
    smallest_singular_log_det,
    stochastic_log_det,
)
from pyro_implicit.runtime.messages import refuse_counts, refuse_unknown, warn_user

__all__ = ["LIVI_ELBO"]

LogDet = Literal["auto", "exact", "smallest", "stochastic"]


class LIVI_ELBO(ImplicitELBO):
    r"""ELBO of semi-implicit guides by linearising their generator (LIVI).

    With the generator linearised at z, a draw :math:`\theta = g(z) + s \odot \eta` has the
    distribution :math:`N(g(z) - J z,\, C)`, where :math:`C = J J^\top + \mathrm{diag}(s^2)` and J
    is the Jacobian of g at z. For small s, the entropy is approximately

    .. math::
        H[q] \approx \tfrac12 E_z[\log\det C] + \tfrac m2 (1 + \log 2\pi)

    (the bound L'), or, from the smallest singular value alone, the lower bound L''.

    **Example:**

    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro.optim import ClippedAdam
    >>> from pyro_implicit import AutoSemiImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> import pyro
    >>> svi = SVI(model, AutoSemiImplicit(model), ClippedAdam({"lr": 1e-3}), LIVI_ELBO(8))
    >>> isinstance(svi.step(), float)
    True

    :param num_particles: draws of the guide per step.
    :param log_det: ``"exact"``: Jacobian and Cholesky, L'. ``"smallest"``: L'', by LOBPCG without
        storing the Jacobian; needs at least as many values as noise dimensions. ``"stochastic"``:
        L' estimated by stochastic Lanczos quadrature with an unbiased gradient, without storing the
        Jacobian. ``"auto"``: exact up to 800 noise dimensions (or values) if all Jacobians together
        have at most 2e8 entries, else stochastic.
    :param entropy: ``"limit"`` as above, or ``"quadratic"``: :math:`-\log N(\theta \mid g(z) -
        J z, C)` before the limit of small s (eqs A.4 and A.7), with the exact log-determinant.
    :param num_probes: random probes of ``"stochastic"``, per particle.
    :param max_iterations: LOBPCG or Lanczos steps.
    :param kwargs: see :class:`ImplicitELBO`.
    :raises ValueError: for options that exclude each other, and at the first step for a generator
        whose rows depend on each other (batch normalisation in training mode, dropout).

    After each step, ``residuals`` has, by site, the largest relative residual of the iterative
    solver (LOBPCG or Lanczos); exact log-determinants have none. An unconverged L'' is not a bound:
    a residual above 0.1 issues one warning.

    **References:**

    1. Uppal et al. (2023), *Implicit Variational Inference for High-Dimensional Posteriors*.
    """

    site_types = (SemiImplicit,)
    recommended_for = (SemiImplicit,)

    def __init__(
        self,
        num_particles: int = 8,
        log_det: LogDet = "auto",
        entropy: Literal["limit", "quadratic"] = "limit",
        num_probes: int = 4,
        max_iterations: int = 50,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, **kwargs)
        refuse_unknown("log_det", log_det, "auto", "exact", "smallest", "stochastic")
        refuse_unknown("entropy", entropy, "limit", "quadratic")
        if entropy == "quadratic" and log_det not in ("auto", "exact"):
            raise ValueError(f'entropy="quadratic" needs log_det="exact", but got {log_det!r}')
        refuse_counts(num_probes=num_probes, max_iterations=max_iterations)
        self.log_det = log_det
        self.entropy = entropy
        self.num_probes = num_probes
        self.max_iterations = max_iterations
        self._warned = False

    @property
    def _memory_cure(self) -> str:
        cheaper = 'log_det="stochastic", which stores no Jacobian; '
        return ("" if self.log_det == "stochastic" else cheaper) + super()._memory_cure

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return log q of the linearised Gaussian, for value and entropy gradient."""
        flat = flatten_site(site, self.num_particles)
        if site.linearisation is None:
            is_smallest = self._method(site.distribution) == "smallest"
            log_det, residual = self._smallest(flat) if is_smallest else self._stochastic(flat)
            self.state.memory["residual", site.name] = residual.max().detach()
        elif self.entropy == "quadratic":
            jacobian = site.linearisation.jacobian()
            shift = (jacobian @ flat.noise.unsqueeze(-1)).squeeze(-1)
            residual = flat.value - site.linearisation.value + shift
            log_q = linearised_log_density(residual, jacobian, flat.scale)
            return ScoreParts(log_q, 0, log_q)
        else:
            log_det = covariance_log_det(site.linearisation.jacobian(), flat.scale)
        log_q = -0.5 * log_det - 0.5 * flat.scale.shape[-1] * (1 + math.log(2 * math.pi))
        return ScoreParts(log_q, 0, log_q)

    def draw(self, q: Implicit) -> Draw:
        """Draw from ``q``; include the full Jacobian if the log-determinant is exact."""
        return q.draw(linearise=self._method(q) == "exact")

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse noise that is not standard normal, and rows that depend on each other."""
        check_standard_normal(site, "LIVI")
        check_generator(site)

    @property
    def residuals(self) -> dict[str, float]:
        """By site, the largest relative residual of the last step's iterative solver."""
        return {name: float(value) for name, value in self.remembered("residual").items()}

    def _method(self, q: Implicit) -> LogDet:
        if self.entropy == "quadratic":
            return "exact"
        if self.log_det != "auto":
            return self.log_det
        event_size, noise_dim = q.event_shape.numel(), q.noise_distribution.event_shape.numel()
        num_entries = q.batch_shape.numel() * event_size * noise_dim
        small = min(event_size, noise_dim) <= ELBOS.max_exact_dim
        return "exact" if small and num_entries <= ELBOS.max_exact_entries else "stochastic"

    def _smallest(self, flat: FlatSite) -> tuple[Tensor, Tensor]:
        num_values, noise_dim = flat.value.shape[-1], flat.noise.shape[-1]
        if num_values < noise_dim:
            raise ValueError(
                f'log_det="smallest" needs noise_dim <= {num_values}, the number of values, '
                f'but got {noise_dim}. Cure: fewer noise dimensions, or log_det="exact"'
            )
        products = jacobian_products(flat.generate, flat.noise)
        start = torch.randn_like(flat.noise)
        log_det, residual = smallest_singular_log_det(
            *products, flat.scale, start, self.max_iterations
        )
        if not self._warned and residual.max() > ELBOS.max_residual:
            self._warned = True
            warn_user(
                f"LOBPCG left a relative residual of {residual.max():.2g} after "
                f"{self.max_iterations} iterations, so the LIVI bound L'' may lie above the ELBO. "
                'Cure: a larger max_iterations, or log_det="stochastic"',
            )
        return log_det, residual

    def _stochastic(self, flat: FlatSite) -> tuple[Tensor, Tensor]:
        noise = flat.noise.expand((self.num_probes,) + flat.noise.shape)
        products = jacobian_products(flat.generate, noise)
        probes = torch.randint_like(noise, 2) * 2 - 1
        return stochastic_log_det(*products, flat.scale, probes, self.max_iterations)
