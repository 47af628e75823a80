# SPDX-License-Identifier: Apache-2.0
"""Semi-implicit variational inference."""

from __future__ import annotations

from typing import Any

from pyro.distributions.score_parts import ScoreParts

from pyro_implicit.distributions import SemiImplicit
from pyro_implicit.infer.engine.implicit_sites import (
    ImplicitSite,
    check_generator,
    flatten_site,
    mixture_log_q,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.implicit_elbo import ImplicitELBO
from pyro_implicit.runtime.messages import refuse_counts

__all__ = ["SIVI_ELBO"]


class SIVI_ELBO(ImplicitELBO):
    r"""ELBO of semi-implicit guides by the surrogate lower bound of SIVI.

    The density of a draw :math:`\theta`, made by the noise :math:`z_0`, is estimated by a mixture
    over that noise and S fresh ones,

    .. math::
        \log q(\theta) \approx \log \frac{1}{S+1} \sum_{s=0}^S q(\theta \mid z_s),

    whose expectation is above :math:`\log q(\theta)`. So this ELBO is a lower bound on the guide's
    ELBO, and approaches it as S grows. If the conditional is narrow (small ``scale``, many
    dimensions), no fresh noise explains a draw, and the bound stays loose for every affordable S:
    prefer :class:`LIVI_ELBO` then.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import AutoSemiImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> guide = AutoSemiImplicit(model, noise_scale=0.3)
    >>> svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 1e-3}), SIVI_ELBO(8))
    >>> isinstance(svi.step(), float)
    True

    :param num_particles: draws of the guide per step.
    :param num_mixing: S. All particles of a site share the fresh noises, unless its context depends
        on other latent variables. A generator must receive other latent variables through its
        context only.
    :param chunk_size: noises whose values are in memory at a time; by default at most 2^24 numbers
        for each site. Several chunks cost a second pass through the generator.
    :param kwargs: see :class:`ImplicitELBO`.
    :raises ValueError: for arguments out of range, and at the first step for a generator whose rows
        depend on each other (batch normalisation in training mode, dropout).

    **References:**

    1. Yin and Zhou (2018), *Semi-Implicit Variational Inference*, eq 9.
    """

    site_types = (SemiImplicit,)

    def __init__(
        self,
        num_particles: int = 8,
        num_mixing: int = 50,
        chunk_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, **kwargs)
        refuse_counts(num_mixing=num_mixing, chunk_size=chunk_size)
        self.num_mixing = num_mixing
        self.chunk_size = chunk_size

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse a generator whose rows depend on each other."""
        check_generator(site)

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return log q of the mixture, for value and entropy gradient."""
        flat = flatten_site(site, self.num_particles)
        log_q = mixture_log_q(site, flat, self.num_mixing, self.chunk_size)
        return ScoreParts(log_q, 0, log_q)
