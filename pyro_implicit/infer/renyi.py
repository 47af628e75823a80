# SPDX-License-Identifier: Apache-2.0
"""Alpha and importance-weighted bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.util import is_identically_zero
from pyro.infer.util import get_dependent_plate_dims
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.compiled import ACTIVE
from pyro_implicit.density.model import refuse_subsampling
from pyro_implicit.distributions import Draw, Implicit, SemiImplicit
from pyro_implicit.infer.bound import HierarchicalELBO, Proposal
from pyro_implicit.infer.engine.folds import note_orientation
from pyro_implicit.infer.engine.implicit_sites import (
    ImplicitSite,
    ParticleWeights,
    exact_density,
    exact_score,
    path_term,
    send_gradient,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.engine.traces import refuse_nonfinite

__all__ = ["ImplicitRenyiELBO"]


class ImplicitRenyiELBO(HierarchicalELBO):
    r"""Pyro's :class:`~pyro.infer.RenyiELBO` for guides in which some sites have no density.

    With K particles :math:`\theta_k \sim q` and :math:`w_k = p(x, \theta_k) / q(\theta_k)` it
    maximises

    .. math::
        L_\alpha = \frac{1}{1 - \alpha} E \log \frac{1}{K} \sum_{k=1}^K w_k^{1 - \alpha},

    a lower bound on :math:`\log p(x)` for :math:`0 \le \alpha < 1`: the importance-weighted bound
    at :math:`\alpha = 0`, the ELBO in the limit of 1. A smaller :math:`\alpha` makes the guide
    cover more. With :math:`\alpha > 1` it concentrates on one mode; :math:`\alpha < 0` gives no
    bound.

    The density of an injective generator is exact. A semi-implicit site has the estimate of
    :func:`~pyro_implicit.evidence_bound`, whose weights are unbiased, so that the value remains a
    bound; its gradient below is exact as ``num_mixing`` grows. If all sites of model and guide are
    in a common plate, each element of the plate has its own bound, as in Pyro. A model that
    subsamples is refused, as powers of weights of minibatches have another mean.

    The gradient of a guide with one implicit site is doubly reparameterised,

    .. math::
        \sum_k (\alpha \tilde w_k + (1 - \alpha) \tilde w_k^2)\,
        \frac{\partial \log w_k}{\partial \theta_k} \frac{\partial \theta_k}{\partial \phi},
        \qquad \tilde w_k = \frac{w_k^{1 - \alpha}}{\sum_j w_j^{1 - \alpha}},

    because the signal of the plain gradient vanishes in its noise as K grows. It is zero at each
    draw if q is the posterior. Sites with a density, guides with several implicit sites, and
    parameters of the model have the plain gradient :math:`\sum_k \tilde w_k \nabla \log w_k`.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import AutoImplicit, AutoregressiveGenerator
    >>> def model():
    ...     pyro.sample("x", dist.StudentT(3.0, torch.zeros(3), 1.0).to_event(1))
    >>> guide = AutoImplicit(model, AutoregressiveGenerator)
    >>> elbo = ImplicitRenyiELBO(alpha=0.5, num_particles=16)
    >>> svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 1e-3}), elbo)
    >>> isinstance(svi.step(), float)
    True

    :param alpha: the order of the divergence, not 1.
    :param num_particles: K.
    :param num_mixing: number of noises that estimate the density of a semi-implicit draw.
    :param proposal: their proposal, as in :func:`~pyro_implicit.evidence_bound`.
    :param num_steps: Gauss-Newton steps of the linearised proposal; each costs a Jacobian.
    :param kwargs: see :class:`ImplicitELBO`.
    :raises ValueError: for arguments out of range; at the first step, for an implicit site that has
        neither a conditional nor an exact density, noise that is not standard normal, a generator
        whose rows depend on each other, or a subsampled plate.
    :raises NotImplementedError: for a partly reparameterised site of the guide, as in Pyro.

    **References:**

    1. Li and Turner (2016), *Rényi Divergence Variational Inference*, eqs 10 and 14.
    2. Burda, Grosse and Salakhutdinov (2016), *Importance Weighted Autoencoders*, eq 8.
    3. Tucker et al. (2019), *Doubly Reparameterized Gradient Estimators for Monte Carlo
       Objectives*, eq 8 (:math:`\alpha = 0`).
    4. Sobolev and Vetrov (2019), *Importance Weighted Hierarchical Variational Inference*, eq 5.
    """

    site_types = (Implicit, SemiImplicit)
    method = "ImplicitRenyiELBO"

    def __init__(
        self,
        alpha: float = 0.0,
        num_particles: int = 16,
        num_mixing: int = 50,
        proposal: Proposal = "linearized",
        num_steps: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, num_mixing, proposal, num_steps, 1, **kwargs)
        if alpha == 1 or not math.isfinite(alpha):
            raise ValueError(
                f"alpha must be a number other than 1, but got {alpha}. Cure: at 1 the bound is "
                "the ELBO: InjectiveELBO, LIVI_ELBO, or ImplicitELBO for guides with a density"
            )
        self.alpha = alpha

    def draw(self, q: Implicit) -> Draw:
        """Draw with the derivative of an exact generator, and of its log-determinant if needed."""
        if isinstance(q, SemiImplicit):
            return q.draw()
        return q.draw(linearise=True, noise_gradient=torch.is_grad_enabled())

    def transport(self, site: ImplicitSite) -> Tensor | None:
        """Return the draw itself; its gradient is weighted particle by particle."""
        step = self.state.step
        weights = step.setdefault(("weights", ""), ParticleWeights())
        path = step["path", site.name] = send_gradient(site.draw, site.draw, weights.weigh)
        return path

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return log q or its estimate, and the term with the gradient."""
        paths = self._paths()
        if site.name not in paths or len(paths) > 1:
            log_q = self.log_density(site)
            return ScoreParts(log_q, 0, log_q)
        draw = paths[site.name]
        if not isinstance(site.distribution, SemiImplicit):
            log_q, signs, score = exact_score(site)
            note_orientation(self, site.name, signs)
        else:
            log_q, score = self.bound_and_score(site)
            score = site.score_at_draw(score)
        return ScoreParts(log_q.detach(), 0, path_term(site, score, draw))

    def _injective(self, site: ImplicitSite) -> Tensor:
        log_q, signs = exact_density(site)
        note_orientation(self, site.name, signs)
        return log_q

    def _note_folds(self, *args: Any) -> None:
        """Leave folds to evidence_bound."""

    def _losses(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Iterator[tuple[float, Tensor, Tensor]]:
        try:
            yield self._loss(model, guide, args, kwargs)
        finally:
            self.state.step.clear()

    def _paths(self) -> dict[str, Tensor]:
        step = self.state.step
        return {site: path for (kind, site), path in step.items() if kind == "path"}

    def _loss(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> tuple[float, Tensor, Tensor]:
        pairs = list(self._get_traces(model, guide, args, kwargs))
        is_one_trace = self.num_particles > 1 and len(pairs) == 1
        parts = [self._log_weights(*pair, is_one_trace) for pair in pairs]
        log_w, surrogate = (
            terms[0] if is_one_trace else torch.stack(terms) for terms in zip(*parts, strict=True)
        )
        power = (1 - self.alpha) * log_w
        log_means = power.logsumexp(0) - math.log(self.num_particles)
        loss = -log_means.sum() / (1 - self.alpha)
        value = 0.0 if ACTIVE.recorder is not None else float(loss)
        if not math.isfinite(value):
            lost = (
                i for i, (term, _) in enumerate(parts) if (term.isnan() | term.isposinf()).any()
            )
            refuse_nonfinite(*pairs[next(lost, 0)], type(self).__name__, self.num_steps_taken)
        weights = power.softmax(0)
        if is_one_trace and len(self._paths()) == 1:
            self.state.step["weights", ""].weights = self.alpha + (1 - self.alpha) * weights
        return value, loss, -(weights * surrogate).sum()

    def _log_weights(
        self, model_trace: Trace, guide_trace: Trace, is_one_trace: bool
    ) -> tuple[Tensor, Tensor]:
        model_sites, guide_sites = (
            [site for site in trace.nodes.values() if site["type"] == "sample"]
            for trace in (model_trace, guide_trace)
        )
        refuse_subsampling(model_trace, type(self).__name__)
        dims = get_dependent_plate_dims([*model_sites, *guide_sites])
        if is_one_trace:
            dims = [dim for dim in dims if dim > -self.max_plate_nesting]

        def keep(term: Any) -> Tensor:
            term = torch.as_tensor(term)
            inside = [dim for dim in dims if dim >= -term.dim()]
            return term.sum(inside, keepdim=True) if inside else term

        log_w: Any = 0.0
        surrogate: Any = 0.0
        for site in model_sites:
            term = keep(site["log_prob"])
            log_w, surrogate = log_w + term.detach(), surrogate + term
        for site in guide_sites:
            log_w = log_w - keep(site["log_prob"]).detach()
            _, score_function, entropy = site["score_parts"]
            if not is_identically_zero(entropy):
                surrogate = surrogate - keep(entropy)
                if not is_identically_zero(score_function):
                    raise NotImplementedError(
                        f"site '{site['name']}' of the guide is reparameterised in part. Cure: a "
                        "distribution with rsample, or Trace_ELBO"
                    )
            elif not is_identically_zero(score_function):
                if self.alpha == 0:
                    raise NotImplementedError(
                        f"site '{site['name']}' of the guide has no rsample, and a bound with "
                        "alpha=0 gives it no gradient. Cure: alpha above 0, or LIVI_ELBO"
                    )
                factor = self.alpha / (1 - self.alpha)
                surrogate = surrogate + factor * keep(site["log_prob"])
        return log_w, surrogate
