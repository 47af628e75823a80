# SPDX-License-Identifier: Apache-2.0
"""Variational inference with the exact density of an injective generator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.util import sum_rightmost
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.distributions import Draw, Implicit
from pyro_implicit.infer.engine.folds import note_orientation
from pyro_implicit.infer.engine.implicit_sites import (
    ImplicitSite,
    ParticleWeights,
    check_square,
    exact_density,
    exact_score,
    path_term,
    send_gradient,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.engine.traces import coverage_log_weights
from pyro_implicit.infer.implicit_elbo import ImplicitELBO
from pyro_implicit.infer.policy import ELBOS
from pyro_implicit.runtime.messages import refuse_unknown

__all__ = ["InjectiveELBO", "ScoreControlVariate", "ScoreRecorder"]


class ScoreControlVariate(NamedTuple):
    r"""A running estimate of the best weight c of the guide's score, as a control variate.

    With the scores :math:`u = \nabla_\theta \log q` of the guide and :math:`s = \nabla_\theta \log
    p` of the model, the gradient at a draw is :math:`c\, u - s`: plain with c = 0, along the path
    only with c = 1. As E[u] = 0, every c gives the same expectation if it does not depend on the
    draws. In units of each coordinate's :math:`E[s^2]`, which are those of Adam, the variance is
    least for

    .. math:: c = \frac{\sum_i E[s_i u_i] / E[s_i^2]}{\sum_i E[u_i^2] / E[s_i^2]},

    which is 1 if q is the posterior, and near 0 if q is much narrower. The expectations are
    moving averages over steps.

    ``both``, ``guide`` and ``model`` are those of :math:`s u`, :math:`u^2` and :math:`s^2`, by
    coordinate.
    """

    both: Tensor
    guide: Tensor
    model: Tensor

    @classmethod
    def start(cls, like: Tensor) -> ScoreControlVariate:
        """Return the value before the first step, with c = 0.

        :param like: a tensor of the shape, dtype and device of one draw.
        """
        return cls(*(torch.zeros_like(like) for _ in range(3)))

    def weight(self) -> Tensor:
        """Return c, between 0 and 1, without dimensions."""
        units = self.model.clamp(min=torch.finfo(self.model.dtype).tiny)
        known = (self.guide / units).sum()
        share = (self.both / units).sum() / known
        return torch.where(known.isfinite() & (known > 0), share.clamp(0, 1), 0.0)

    @torch.no_grad()
    def after(self, guide: Tensor, model: Tensor) -> ScoreControlVariate:
        """Return the averages after a step with these scores, ``(num_draws, *shape)`` each.

        Scores that are not finite count as 0.
        """
        finite = guide.isfinite() & model.isfinite()
        guide, model = torch.where(finite, guide, 0.0), torch.where(finite, model, 0.0)
        decay = ELBOS.control_variate_decay
        return ScoreControlVariate(
            decay * self.both + (model * guide).mean(0),
            decay * self.guide + guide.square().mean(0),
            decay * self.model + model.square().mean(0),
        )


class ScoreRecorder:
    """The scores of a step's draws: first of the guide, then of the model.

    It holds no reference to the draws, whose hooks refer to it: that would be a reference cycle.

    :param memory: the ELBO's memory, which keeps the :class:`ScoreControlVariate` of a site.
    :param site: the name of that site.
    :param num_particles: the number of particles whose mean the loss is.
    """

    def __init__(self, memory: dict[tuple[str, str], Any], site: str, num_particles: int) -> None:
        self._memory, self._key = memory, ("path weight", site)
        self._num_particles = num_particles
        #: Of the guide, ``(*batch, *shape)``; None until it is known.
        self.guide: Tensor | None = None

    def see(self, gradient: Tensor) -> Tensor:
        """Note the gradient of the loss at the model's draws, and return it."""
        if self.guide is not None:
            average = self._memory[self._key]
            shape = (-1, *average.guide.shape)
            model = -self._num_particles * gradient.to(self.guide)
            scores = self.guide.reshape(shape), model.reshape(shape)
            self._memory[self._key] = average.after(*scores)
        return gradient


class InjectiveELBO(ImplicitELBO):
    r"""The exact ELBO of implicit guides whose generator is injective with as many values as noise.

    For :math:`\theta = f(z)` with standard normal z,

    .. math::
        \log q(\theta) = \log N(z) - \log |\det J_f(z)|.

    It is exact, and so are its gradients: use it if such a generator is flexible enough.
    The determinant of :class:`~pyro_implicit.AutoregressiveGenerator`, which is always injective,
    is free; that of :class:`~pyro_implicit.ResidualGenerator` needs a k x k matrix; every other
    generator needs a dense Jacobian.

    Its gradient may use the path of the draw only ("sticking the landing"), with

    .. math::
        \nabla_\theta \log q(\theta) = J_f^{-\top} (-z - \nabla_z \log |\det J_f(z)|)

    a constant. This gradient has the same expectation, and no variance if q is the posterior; but
    it is mostly noise if the guide is much narrower, as early in the training of a network. The
    default is a share c of it plus 1 - c of the plain gradient, with c from the steps before.

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
    :param path_derivative: True: the path gradient; False: the plain gradient; ``"auto"``: the
        share of the path gradient with the least variance
        (:class:`~pyro_implicit.infer.injective.ScoreControlVariate`), see ``path_weights``, and the
        plain gradient for draws at which the score overflows. With ``coverage``, the share is 1.
    :param coverage: c of the divergence KL(q || p) + c KL(p || q) that the gradient descends. The
        second term makes the guide cover tails and necks that the ELBO misses; 1 gives Jeffreys'
        divergence. Its gradient is the path gradient with particles weighted by their
        :math:`w = p / q`, normalised and truncated at the square root of their number times the
        mean. Needs many particles, all data, and a guide of injective latent variables only. The
        loss remains the ELBO.
    :param kwargs: see :class:`~pyro_implicit.infer.ImplicitELBO`.
    :raises ValueError: for coverage with one particle; at a step, for coverage with subsampled data
        or sites that are not injective; at the first step, for a site that is semi-implicit, has
        not as many noise dimensions as values, has noise that is not standard normal, or has a
        generator whose rows depend on each other (batch normalisation in training mode, dropout).

    The generator has to be injective. If it folds the noise, several noises have the same value,
    and log q counts one of them: the entropy is too large, and the loss is too low and no bound.
    The determinant then has another sign at some draws. In their loss, :math:`w \log |\det J_f|`
    with a large w takes the place of log q; descent pushes the determinant through 0 to the sign
    that it has elsewhere. If too many such draws remain, a
    :class:`~pyro_implicit.infer.FoldWarning` says so.

    **References:**

    1. Roeder, Wu and Duvenaud (2017), *Sticking the Landing: Simple, Lower-Variance Gradient
       Estimators for Variational Inference*.
    2. Bauer and Mnih (2021), *Generalized Doubly Reparameterized Gradient Estimators* (the path
       gradient of KL(p || q)).
    3. Ionides (2008), *Truncated Importance Sampling*.
    4. Ratzlaff et al. (2021), *Generative Particle Variational Inference via Estimation of
       Functional Gradients*, section 3.2 (the generator).
    """

    site_types = (Implicit,)

    def __init__(
        self,
        num_particles: int = 8,
        path_derivative: bool | Literal["auto"] = "auto",
        coverage: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, **kwargs)
        if not coverage >= 0:
            raise ValueError(f"coverage must be at least 0, but got {coverage}")
        refuse_unknown("path_derivative", path_derivative, True, False, "auto")
        if coverage > 0 and not path_derivative:
            raise ValueError(
                "coverage needs path_derivative=True, as it weights the particles of the path"
            )
        if coverage > 0 and num_particles < 2:
            raise ValueError(
                "coverage weights particles against each other, but num_particles is 1. Cure: "
                "num_particles of 16 or more, or coverage=0"
            )
        self.path_derivative = path_derivative
        self.coverage = coverage

    def draw(self, q: Implicit) -> Draw:
        """Draw with the generator's derivative, and that of its log-determinant if needed."""
        return q.draw(linearise=True, noise_gradient=self._takes_path())

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse a site without an exact density."""
        check_square(site, type(self).__name__)

    def transport(self, site: ImplicitSite) -> Tensor | None:
        """Return the draw itself; its gradient is weighted particle by particle, or noted."""
        step = self.state.step
        if self.coverage:
            weights = step.setdefault(("weights", ""), ParticleWeights())
            path = step["path", site.name] = send_gradient(site.draw, site.draw, weights.weigh)
            return path
        if self.path_derivative != "auto":
            return None
        one = site.draw[(0,) * len(site.batch_shape)]
        self.remember("path weight", site.name, lambda: ScoreControlVariate.start(one))
        scores = ScoreRecorder(self.state.memory, site.name, self.num_particles)
        step["scores", site.name] = scores
        return send_gradient(site.draw, site.draw, scores.see)

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return log q, exact, and the term with the chosen gradient."""
        if not self._takes_path():
            log_q, signs = exact_density(site)
            return ScoreParts(log_q, 0, self._unfolding(site, log_q, signs)[1])
        log_q, signs, score = exact_score(site)
        is_reversed, plain = self._unfolding(site, log_q, signs)
        # A path is that of a site, which may consist of several draws of the generator.
        batch_ndim = len(site.batch_shape)
        is_reversed = is_reversed.unsqueeze(-1).flatten(batch_ndim).any(-1)
        plain = sum_rightmost(plain, plain.dim() - batch_ndim)
        step = self.state.step
        scores = step.get(("scores", site.name))
        if scores is None:
            path = path_term(site, score, step.get(("path", site.name), site.draw))
            return ScoreParts(log_q.detach(), 0, torch.where(is_reversed, plain, path))
        share, scores.guide = self.state.memory["path weight", site.name].weight(), score
        # An ill-conditioned Jacobian can let the score overflow; the plain gradient does not.
        has_path = score.isfinite().flatten(batch_ndim).all(-1) & ~is_reversed
        path = path_term(site, score.nan_to_num(0.0, 0.0, 0.0), site.draw)
        share = torch.where(has_path, share, 0.0)
        return ScoreParts(log_q.detach(), 0, share * path + (1 - share) * plain)

    def _unfolding(self, site: ImplicitSite, log_q: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
        """Return which draws are reversed, and log q with the gradient that turns these around."""
        is_reversed = note_orientation(self, site.name, signs)
        return is_reversed, torch.where(is_reversed, -ELBOS.unfolding_weight * log_q, log_q)

    @property
    def path_weights(self) -> dict[str, float]:
        """By site, the share of the path in the next step's gradient, if that is ``"auto"``."""
        return {name: float(kept.weight()) for name, kept in self.remembered("path weight").items()}

    def _takes_path(self) -> bool:
        return bool(self.path_derivative) and torch.is_grad_enabled()

    def _get_traces(self, *args: Any) -> Iterator[tuple[Trace, Trace]]:
        for model_trace, guide_trace in super()._get_traces(*args):
            weights = self.state.step.get(("weights", ""))
            if self.coverage and torch.is_grad_enabled() and self.state.value_ndims:
                log_w = coverage_log_weights(model_trace, guide_trace, self.num_particles)
                if weights is not None:
                    weights.weights = 1 + self.coverage * _truncated(log_w)
            yield model_trace, guide_trace


def _truncated(log_weights: Tensor) -> Tensor:
    """Return weights of mean 1, truncated at the square root of their number."""
    weights = len(log_weights) * log_weights.nan_to_num(nan=-math.inf).softmax(0)
    weights = weights.clamp(max=len(weights) ** 0.5)
    return weights / weights.mean()
