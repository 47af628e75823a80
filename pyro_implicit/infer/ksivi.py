# SPDX-License-Identifier: Apache-2.0
"""Semi-implicit variational inference by matching scores: the kernel Stein discrepancy (KSIVI)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.util import sum_rightmost
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.distributions import SemiImplicit
from pyro_implicit.infer.engine.implicit_sites import (
    FlatSite,
    ImplicitSite,
    check_same_distribution,
    flatten_site,
    mixture_log_q,
    particles_inside,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.engine.traces import loss_and_surrogate
from pyro_implicit.infer.implicit_elbo import ImplicitELBO
from pyro_implicit.ops.kernels import RadialKernel
from pyro_implicit.ops.semi_implicit import PairStatistic, conditional_stein_discrepancy
from pyro_implicit.runtime.messages import refuse_counts, refuse_unknown

__all__ = ["KSIVI_ELBO", "ScoreMatchingELBO"]


class ScoreMatchingELBO(ImplicitELBO):
    r"""Base of methods that minimise a divergence of scores instead of the KL divergence.

    A subclass defines the divergence as a function of the draws, of :math:`\nabla \log p(\theta)`
    and of :math:`-\nabla_\theta \log q(\theta \mid z)`. Its gradient needs products with the
    Hessian of log p, and replaces that of the negative ELBO for the parameters of semi-implicit
    sites only. All other parameters get the gradient of the negative ELBO. The points
    are the values of the generator, before the frame of an autoguide.

    The value is the surrogate bound of :class:`SIVI_ELBO` with ``num_mixing`` fresh noises.
    """

    num_mixing: int

    @abstractmethod
    def divergence(
        self, site: ImplicitSite, points: Tensor, scores: Tensor, conditional: Tensor
    ) -> Tensor:
        """Return the divergence, differentiable in the last three arguments.

        :param points: the values, ``(num_particles, *plates, m)``.
        :param scores: those of the model, of the same shape.
        :param conditional: minus the scores of the conditionals, of the same shape.
        :returns: terms whose sum is the mean over particles, summed over plates.
        """

    def matched(self, site: ImplicitSite, flat: FlatSite) -> tuple[Tensor, Tensor]:
        """Return the values, ``(num_particles, *plates, m)``, with their conditional scores.

        :returns: the values that the model sees, and minus their conditional scores,
            differentiable in the scale.
        """
        with torch.no_grad():
            error = (flat.value - flat.generate(flat.noise.unsqueeze(0))[0]) / flat.scale
        return site.value, error / flat.scale

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return log q of the mixture, and zeros whose gradient is the weight of the entropy."""
        flat = flatten_site(site, self.num_particles)
        with torch.no_grad():
            log_q = mixture_log_q(site, flat, self.num_mixing)
        if not (torch.is_grad_enabled() and site.value.requires_grad):
            return ScoreParts(log_q, 0, log_q)
        weights = torch.zeros_like(log_q, requires_grad=True)
        self.state.step["matched", site.name] = site, *self.matched(site, flat), weights
        return ScoreParts(log_q, 0, weights)

    def _get_traces(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Iterator[tuple[Trace, Trace]]:
        for model_trace, guide_trace in super()._get_traces(model, guide, args, kwargs):
            _, surrogate = loss_and_surrogate(model_trace, guide_trace)
            for (purpose, name), parts in self.state.step.items():
                if purpose == "matched":
                    term = self._match(surrogate, *parts)
                    node = guide_trace.nodes[name]
                    old = node["score_parts"]
                    term = sum_rightmost(term, term.dim() - len(node["fn"].batch_shape))
                    node["score_parts"] = old._replace(entropy_term=old.entropy_term + term)
            yield model_trace, guide_trace

    def _match(
        self,
        surrogate: Tensor,
        site: ImplicitSite,
        value: Tensor,
        conditional: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Return a term with the divergence's gradient, less the surrogate's one at the values."""
        slope, weight = torch.autograd.grad(
            surrogate, (value, weights), create_graph=True, materialize_grads=True
        )
        weight = weight.detach().unsqueeze(-1)
        heard = weight != 0  # a mask may remove the entropy
        factor = torch.where(heard, 1 / torch.where(heard, weight, 1.0), 0.0)
        slopes = slope.reshape(conditional.shape)
        scores = -slopes * factor
        # A particle without a density is left out later, and must not move the others.
        known = heard & scores.isfinite().all(-1, keepdim=True)
        parts = [
            torch.where(known, part.detach(), 0.0).requires_grad_()
            for part in (scores, conditional)
        ]
        points = value.detach().reshape(conditional.shape).requires_grad_()
        total = self.divergence(site, points, *parts).sum()
        moved, of_scores, of_conditional = torch.autograd.grad(total, (points, *parts))
        if scores.requires_grad:
            (curved,) = torch.autograd.grad(
                scores, value, of_scores, retain_graph=True, materialize_grads=True
            )
            moved = moved + curved.reshape(moved.shape)
        size = self.num_particles * weight
        path = (size * moved - heard * slopes.detach()) * value.reshape(moved.shape)
        return (path + size * of_conditional * conditional).sum(-1)


class KSIVI_ELBO(ScoreMatchingELBO):
    r"""Semi-implicit guides trained by the kernel Stein discrepancy (KSIVI).

    It minimises, in place of the KL divergence,

    .. math::
        E_{(\theta, z), (\theta', z')}\left[ k(\theta, \theta')\, a(\theta, z)^\top
        a(\theta', z') \right], \qquad
        a(\theta, z) = \nabla \log p(x, \theta) - \nabla_\theta \log q(\theta \mid z),

    which is the squared kernel Stein discrepancy, because the conditional score is an unbiased
    estimate of the score of q. It equals the largest mean of
    :math:`2 f^\top (\nabla \log p - \nabla \log q) - \|f\|^2` over functions f in the space of
    the kernel, so that no critic is trained. The bandwidth is
    :func:`~pyro_implicit.ops.particle_bandwidth` of the draws, and is differentiated, too (as in
    the authors' code): otherwise a wider guide would have smaller kernel values, and spread without
    end. Each element of a plate has its own kernel; each site is compared given the draws of the
    others.

    A step needs second derivatives of the model: about twice the cost of a step of
    :class:`LIVI_ELBO` without its Jacobian. The discrepancy is quadratic in the score, so that
    minibatches bias it. It is nearly blind to the weights of modes, so that a guide stays where it
    starts, often in one mode: raise ``inverse_temperature`` from 0.1 to 1 in the first half of the
    training. Far draws have small kernel values and return slowly.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import AutoSemiImplicit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> guide = AutoSemiImplicit(model, noise_scale=0.5)
    >>> svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 1e-3}), KSIVI_ELBO(16))
    >>> isinstance(svi.step(), float)
    True

    :param num_particles: draws of the guide per step, at least 2.
    :param kernel: ``"rbf"`` or ``"imq"``.
    :param statistic: ``"u"``: the mean over all pairs of draws; ``"two-batch"``: over the pairs
        between two halves of the draws, the paper's "vanilla" estimator. Both are unbiased; the
        first has less variance at the same cost.
    :param num_mixing: fresh noises of the reported value, the surrogate bound of
        :class:`SIVI_ELBO`.
    :param kwargs: see :class:`ImplicitELBO`.
    :raises ValueError: for arguments out of range; at the first step, for a context or scale that
        depends on other latent variables.

    **References:**

    1. Cheng et al. (2024), *Kernel Semi-Implicit Variational Inference*.
    """

    site_types = (SemiImplicit,)
    least_particles = 2

    def __init__(
        self,
        num_particles: int = 64,
        kernel: RadialKernel = "rbf",
        statistic: PairStatistic = "u",
        num_mixing: int = 50,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, **kwargs)
        refuse_unknown("kernel", kernel, "rbf", "imq")
        refuse_unknown("statistic", statistic, "u", "two-batch")
        refuse_counts(num_mixing=num_mixing)
        self.kernel: RadialKernel = kernel
        self.statistic: PairStatistic = statistic
        self.num_mixing = num_mixing

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse a site whose particles differ in distribution."""
        check_same_distribution(site, type(self).__name__, "SIVI_ELBO")

    def divergence(
        self, site: ImplicitSite, points: Tensor, scores: Tensor, conditional: Tensor
    ) -> Tensor:
        """Return the kernel Stein discrepancy of each element of a plate."""
        inside = particles_inside(points), particles_inside(scores + conditional)
        return conditional_stein_discrepancy(*inside, self.kernel, self.statistic)
