# SPDX-License-Identifier: Apache-2.0
"""Variational inference with the exact density of an injective generator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.distributions import Draw, Implicit
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.engine.sites import (
    ImplicitSite,
    LaterWeights,
    check_square,
    exact_log_density,
    exact_score,
    path_term,
    send_gradient,
)
from pyro_implicit.infer.engine.steps import CarriedMemory
from pyro_implicit.infer.engine.traces import coverage_log_weights
from pyro_implicit.infer.implicit_elbo import ImplicitELBO

__all__ = ["InjectiveELBO", "Landing", "Scores"]


class InjectiveELBO(ImplicitELBO):
    r"""The exact ELBO of implicit guides whose generator is injective with as many values as noise.

    Of :math:`\theta = f(z)` with standard normal z,

    .. math::
        \log q(\theta) = \log N(z) - \log |\det J_f(z)|.

    No other ELBO for implicit guides is exact: where such a generator is flexible enough, use this.
    :class:`~pyro_implicit.AutoregressiveGenerator` has its determinant for nothing and is always
    injective; :class:`~pyro_implicit.ResidualGenerator` has it at the price of a k x k matrix; any
    other generator gets a dense Jacobian.

    Its gradient may take the path of the draw alone ("sticking the landing"), with

    .. math::
        \nabla_\theta \log q(\theta) = J_f^{-\top} (-z - \nabla_z \log |\det J_f(z)|)

    a constant. That has the same expectation, and no variance at all once q is the posterior; but
    of a guide that is much narrower, as at the start in a network, it is all noise. By default the
    step takes a share c of it and 1 - c of the plain gradient, c by the steps before.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import AutoImplicit, ResidualGenerator
    >>> def model():
    ...     pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = AutoImplicit(model, lambda size: ResidualGenerator(size, core_dim=2))
    >>> svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 1e-3}), InjectiveELBO(8))
    >>> isinstance(svi.step(), float)
    True

    :param num_particles: draws of the guide per step.
    :param path_derivative: True: the gradient takes that path; False: it is the plain one;
        ``"auto"``: the share of the path that has the least variance
        (:class:`~pyro_implicit.infer.injective.Landing`), see ``shares``. With coverage all.
    :param coverage: c of the divergence KL(q || p) + c KL(p || q) that the gradient descends. The
        second term makes the guide cover the tails and necks that the ELBO alone leaves out; 1 is
        Jeffreys' divergence. Its gradient is that of the path, the particles weighted by their
        :math:`w = p / q`, normalised and cut at the square root of their number times the mean.
        Wants many particles, all data, and a guide whose every latent is injective. The loss
        stays the ELBO.
    :param kwargs: see :class:`~pyro_implicit.infer.ImplicitELBO`.
    :raises ValueError: for coverage with one particle; at a step, for coverage with subsampled data
        or sites that are not injective; at the first step, for a site that is semi-implicit, has
        not as many noise dimensions as values, has other noise than standard normal, or a generator
        whose rows depend on each other (batch normalisation in training mode, dropout).

    That the generator is injective is taken for granted. Of one that folds the noise, the formula
    sees one fold only, and so more entropy than there is: the loss is then too low.

    **References:**

    1. Roeder, Wu and Duvenaud (2017), *Sticking the Landing: Simple, Lower-Variance Gradient
       Estimators for Variational Inference*.
    2. Bauer and Mnih (2021), *Generalized Doubly Reparameterized Gradient Estimators* (the path
       gradient of KL(p || q)).
    3. Ionides (2008), *Truncated Importance Sampling*.
    4. Ratzlaff et al. (2021), *Generative Particle Variational Inference via Estimation of
       Functional Gradients*, section 3.2 (the generator).
    """

    site_types: ClassVar[tuple[type[Implicit], ...]] = (Implicit,)

    def __init__(
        self,
        num_particles: int = 8,
        path_derivative: bool | Literal["auto"] = "auto",
        coverage: float = 0.0,
        **kwargs: Any,
    ) -> None:
        if not coverage >= 0:
            raise ValueError(f"coverage must be at least 0, but got {coverage}")
        if path_derivative not in (True, False, "auto"):
            raise ValueError(
                f'path_derivative must be True, False or "auto", but got {path_derivative!r}'
            )
        if coverage > 0 and not path_derivative:
            raise ValueError("coverage wants path_derivative=True, whose particles it weighs")
        if coverage > 0 and num_particles < 2:
            raise ValueError(
                "coverage weighs particles against each other, but num_particles is 1. Cure: "
                "num_particles of 16 or more, or coverage=0"
            )
        super().__init__(num_particles, **kwargs)
        self.path_derivative = path_derivative
        self.coverage = coverage
        self._weighing, self._paths = LaterWeights(), dict[str, Tensor]()
        self._scores: dict[str, Scores] = {}

    def draw(self, q: Implicit) -> Draw:
        """With the generator's derivative, and that of its log-determinant where it is wanted."""
        return q.draw(linearise=True, noise_gradient=self._takes_path())

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse a site without an exact density."""
        check_square(site, type(self).__name__)

    def transport(self, site: ImplicitSite) -> Tensor | None:
        """The draw itself, whose gradient is weighted particle by particle, or looked at."""
        if not (self._takes_path() and site.draw.requires_grad):
            return None
        if self.coverage:
            self._paths[site.name] = send_gradient(site.draw, site.draw, self._weighing.weigh)
            return self._paths[site.name]
        if self.path_derivative != "auto":
            return None
        one = site.draw[(0,) * len(site.batch_shape)]
        landing = self.remember("landing", site.name, lambda: Landing.start(one))
        self._scores[site.name] = scores = Scores(landing, self.num_particles)
        return send_gradient(site.draw, site.draw, scores.see)

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Log q, exact, and the term with the chosen gradient."""
        if not self._takes_path():
            log_q = exact_log_density(site)
            return ScoreParts(log_q, 0, log_q)
        log_q, score = exact_score(site)
        path = path_term(site, score, self._paths.get(site.name, site.draw))
        scores = self._scores.pop(site.name, None)
        if scores is not None:
            share, scores.guide = self.remembered(Landing)[site.name].share(), score
            path = share * path + (1 - share) * log_q
        return ScoreParts(log_q.detach(), 0, path)

    @property
    def shares(self) -> dict[str, float]:
        """By site, the share of the path in the next step's gradient, if that is ``"auto"``."""
        return {name: float(landing.share()) for name, landing in self.remembered(Landing).items()}

    def _takes_path(self) -> bool:
        return bool(self.path_derivative) and torch.is_grad_enabled()

    def _get_traces(self, *args: Any) -> Iterator[tuple[Trace, Trace]]:
        self._weighing, self._paths, self._scores = LaterWeights(), {}, {}
        try:
            for model_trace, guide_trace in super()._get_traces(*args):
                covers = self.coverage and torch.is_grad_enabled()
                if covers and self.state.value_ndims:  # else nothing was drawn
                    log_w = coverage_log_weights(model_trace, guide_trace, self.num_particles)
                    self._weighing.weights = 1 + self.coverage * _truncated(log_w)
                yield model_trace, guide_trace
        finally:
            self._paths, self._scores = {}, {}  # tensors of a graph cannot be copied


def _truncated(log_weights: Tensor) -> Tensor:
    """Weights of mean 1, after none exceeds the square root of their number."""
    weights = len(log_weights) * log_weights.nan_to_num(nan=-math.inf).softmax(0)
    weights = weights.clamp(max=len(weights) ** 0.5)
    return weights / weights.mean()


DECAY = 0.95


@dataclass
class Landing(CarriedMemory):
    r"""The share c of the score function that an entropy's gradient leaves out.

    With the scores :math:`u = \nabla_\theta \log q` of the guide and :math:`s = \nabla_\theta \log
    p` of the model, the gradient at a draw is :math:`c\, u - s`: plain with c = 0, along the path
    alone with c = 1. As E[u] = 0, any c has the same expectation, if it does not know the draws.
    In the units of each coordinate's :math:`E[s^2]`, which are those of Adam, the variance is least
    for

    .. math:: c = \frac{\sum_i E[s_i u_i] / E[s_i^2]}{\sum_i E[u_i^2] / E[s_i^2]},

    which is 1 where q is the posterior and near 0 where it is much narrower. The expectations are
    moving averages over steps.

    ``both``, ``guide`` and ``model`` are those of :math:`s u`, :math:`u^2` and :math:`s^2`, by
    coordinate.
    """

    both: Tensor
    guide: Tensor
    model: Tensor

    @classmethod
    def start(cls, like: Tensor) -> Landing:
        """Of a guide that has not taken a step: c is 0.

        :param like: of a coordinate's dtype and device, and of the shape of one draw.
        """
        return cls(*(torch.zeros_like(like) for _ in range(3)))

    def share(self) -> Tensor:
        """c, between 0 and 1, without dimensions."""
        units = self.model.clamp(min=torch.finfo(self.model.dtype).tiny)
        known = (self.guide / units).sum()
        share = (self.both / units).sum() / known
        return torch.where(known.isfinite() & (known > 0), share.clamp(0, 1), 0.0)

    @torch.no_grad()
    def note(self, guide: Tensor, model: Tensor) -> None:
        """Take the scores of a step, ``(num_draws, *shape)`` each; 0 where they are no numbers."""
        finite = guide.isfinite() & model.isfinite()
        guide, model = torch.where(finite, guide, 0.0), torch.where(finite, model, 0.0)
        self.both = DECAY * self.both + (model * guide).mean(0)
        self.guide = DECAY * self.guide + guide.square().mean(0)
        self.model = DECAY * self.model + model.square().mean(0)


class Scores:
    """Those of a step's draws: the guide's first, then the model's.

    They do not know the draws, whose hooks know them and would keep them for ever.

    :param landing: takes them.
    :param num_particles: of which the step's loss is the mean.
    """

    def __init__(self, landing: Landing, num_particles: int) -> None:
        self._landing, self._num_particles = landing, num_particles
        #: Of the guide, ``(*batch, *shape)``; None until it is known.
        self.guide: Tensor | None = None

    def see(self, gradient: Tensor) -> Tensor:
        """The gradient of the loss at the draws that the model has; the same comes out."""
        if self.guide is not None:
            shape = (-1, *self._landing.guide.shape)
            model = -self._num_particles * gradient.to(self.guide)
            self._landing.note(self.guide.reshape(shape), model.reshape(shape))
        return gradient
