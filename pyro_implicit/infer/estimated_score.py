# SPDX-License-Identifier: Apache-2.0
"""Implicit variational inference by estimates of the guide's score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pyro.distributions.score_parts import ScoreParts
from torch import Tensor

from pyro_implicit.distributions import Implicit, SemiImplicit
from pyro_implicit.infer.engine.implicit_sites import (
    ImplicitSite,
    choose_covariance,
    explained_factor,
    site_draws,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.implicit_elbo import ImplicitELBO
from pyro_implicit.ops.density_ratio import Covariance, standardize
from pyro_implicit.ops.score_estimators import gaussian_entropy, spectral_score, stein_score
from pyro_implicit.runtime.messages import refuse_counts, refuse_unknown

__all__ = ["ScoreELBO"]

#: ``(*batch, n, m)`` samples -> their scores, of the same shape.
ScoreEstimator = Callable[[Tensor], Tensor]

ESTIMATORS: dict[str, ScoreEstimator] = {"spectral": spectral_score, "stein": stein_score}


class ScoreELBO(ImplicitELBO):
    r"""ELBO of implicit guides whose entropy gradient is estimated from their draws alone.

    The gradient of the entropy of :math:`\theta = g_\phi(z)` needs only the score of q,

    .. math::
        \nabla_\phi H[q_\phi]
        = -E_z\left[ \left(\frac{\partial \theta}{\partial \phi}\right)^\top
          \nabla_\theta \log q_\phi(\theta) \right],

    and a kernel method estimates this score from the draws. It does not involve the prior, which
    may be flat, and the guide needs no noise around its generator. ``ScoreELBO(32, "stein",
    covariance=None)`` is amortised GFSF (gradient flows with smoothed functions).

    Kernels have a single length scale, so the estimator sees standardised draws
    :math:`w = L^{-1} (\theta - \mu)`, and :math:`H[q] = \log\det L + H[q_w]`.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import AutoImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> svi = SVI(model, AutoImplicit(model), pyro.optim.ClippedAdam({"lr": 1e-3}), ScoreELBO(8))
    >>> isinstance(svi.step(), float)
    True

    :param num_particles: draws of the guide per step that the model sees.
    :param estimator: ``"spectral"`` (SSGE), ``"stein"`` (Li and Turner, GFSF), or a function from
        draws ``(*batch, n, m)`` to their scores, such as ``functools.partial(stein_score,
        ridge=1e-2)``. Each element of the batch is a separate distribution.
    :param num_entropy_particles: minimum number of draws of each implicit site for the estimator:
        the ``num_particles`` draws, and more draws of the site if these are fewer. A site whose
        context or scale depends on other latent variables gets that number for each particle. A
        generator must receive other latent variables through its context only.
    :param covariance: how draws are standardised: ``"full"``, which needs more entropy particles
        than dimensions; ``"diagonal"``; ``"auto"``: full if there are twice as many entropy
        particles as dimensions and at least as many noise dimensions, else diagonal; ``None``: not
        at all, as in the papers. Then directions much narrower than the median distance are
        estimated badly, by ``"spectral"`` not at all, and the guide collapses along them.
    :param kwargs: see :class:`~pyro_implicit.infer.ImplicitELBO`.
    :raises ValueError: for arguments out of range; at a step, for a full covariance of too few
        draws, for draws on a hyperplane, or for an estimator that returns another shape.

    **The loss is optimistic.** A score gives no density, so the value uses the entropy of the
    Gaussian with the moments of the draws (diagonal if ``covariance=None``), which exceeds the
    entropy of every other q with these moments. Do not compare models by it.

    **References:**

    1. Li and Turner (2018), *Gradient Estimators for Implicit Models*.
    2. Shi, Sun and Zhu (2018), *A Spectral Approach to Gradient Estimation for Implicit
       Distributions*.
    3. Liu et al. (2019), *Understanding and Accelerating Particle-Based Variational Inference*,
       which introduces GFSF.
    4. Ratzlaff et al. (2021), *Generative Particle Variational Inference via Estimation of
       Functional Gradients*, which amortises GFSF.
    """

    site_types = (Implicit, SemiImplicit)

    def __init__(
        self,
        num_particles: int = 32,
        estimator: Literal["spectral", "stein"] | ScoreEstimator = "spectral",
        num_entropy_particles: int = 100,
        covariance: Literal["auto"] | Covariance | None = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, **kwargs)
        if not callable(estimator) and estimator not in ESTIMATORS:
            raise ValueError(
                f'estimator must be "spectral", "stein" or a function, but got {estimator!r}'
            )
        refuse_counts(2, num_entropy_particles=num_entropy_particles)
        refuse_unknown("covariance", covariance, "auto", "diagonal", "full", None)
        self.estimator: ScoreEstimator = estimator if callable(estimator) else ESTIMATORS[estimator]
        self.num_entropy_particles = num_entropy_particles
        self.covariance: Literal["auto"] | Covariance | None = covariance

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return means over all draws of the site, the same for each particle."""
        draws = site_draws(site, self.num_particles, self.num_entropy_particles)
        covariance = self.covariance
        if covariance is not None:
            covariance = choose_covariance(covariance, site, *draws.shape[-2:])
        with explained_factor(site):
            log_q = -gaussian_entropy(draws.detach(), covariance or "diagonal")
            if covariance is None:
                entropy_term = self._surrogate(site, draws)
            else:
                # The moments move with the draws, so the score's part along location and scale
                # cancels; the log-determinant replaces it.
                white, log_det = standardize(draws, covariance)
                entropy_term = self._surrogate(site, white) - log_det
        shape = site.distribution.batch_shape
        log_q, entropy_term = log_q.expand(shape), entropy_term.expand(shape)
        return ScoreParts(log_q, 0, entropy_term)

    def _surrogate(self, site: ImplicitSite, draws: Tensor) -> Tensor:
        """Return the mean over draws of a linear function whose gradient is the score."""
        score = self.estimator(draws.detach()).detach()
        if score.shape != draws.shape:
            raise ValueError(
                f"the estimator of {type(self).__name__} returned scores of shape "
                f"{tuple(score.shape)} for the draws of site '{site.name}', of shape "
                f"{tuple(draws.shape)}. Cure: return one score for each draw"
            )
        return (score * draws).sum(-1).mean(-1)
