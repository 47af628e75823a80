# SPDX-License-Identifier: Apache-2.0
"""What a model says about the latents of an implicit site before it has seen data."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.util import sum_rightmost
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import biject_to

from pyro_implicit.infer.engine.particles import Particles
from pyro_implicit.infer.engine.prior_draws import PriorDraws, PriorMemory
from pyro_implicit.infer.engine.sites import PARTICLE_PLATE, ImplicitSite
from pyro_implicit.runtime.sites import is_flat

__all__ = ["SitePrior"]


class SitePrior:
    """The prior of the latents of one implicit site: its density at their draws, and draws of it.

    Its points live in unconstrained space, all latents side by side in one dimension.

    :param site: whose latents are meant.
    :param particles: the model at the latents' draws.
    :param model_trace: of its run, with log-probabilities.
    :param memory: kept from step to step.
    """

    def __init__(
        self, site: ImplicitSite, particles: Particles, model_trace: Trace, memory: PriorMemory
    ) -> None:
        self.site, self.particles, self.model_trace = site, particles, model_trace
        self.memory = memory
        self._draws = PriorDraws(particles, site.latents, memory)
        self._alone: Trace | None = None

    def log_prob(self) -> Tensor:
        """The log-density at the site's draw, without scales and masks: ``site.batch_shape``."""
        shape = self.site.batch_shape
        is_whole = self._is_whole()
        total = torch.zeros(())
        for name in self.site.latents:
            term = self._model_site(name)["unscaled_log_prob"]
            if name != self.site.name:  # then it is a Delta there, with the change of variables
                delta = self.particles.guide_trace.nodes[name]
                term = term - delta["fn"].log_prob(delta["value"])
            if is_whole:
                batch_ndim = int(self.particles.num_particles > 1)
                term = sum_rightmost(term, term.dim() - batch_ndim)
                term = term.reshape(term.shape + (1,) * (len(shape) - batch_ndim))
            total = total.to(term) + term
        return total.expand(shape)

    def score_parts(self, log_ratio: Tensor) -> ScoreParts:
        r"""The score parts of the site's distribution, given log q/p, the log-ratio to this prior.

        The gradient of :math:`\log q = \log p + \log(q / p)` passes through the draw alone, so that
        what the prior itself learns is not cancelled.

        :param log_ratio: broadcasts to ``site.batch_shape``.
        """
        log_prior, draw = self.log_prob(), self.site.draw
        # The log-determinant leads back from the site's value to that of its distribution.
        entropy_term = log_ratio.expand(log_prior.shape) + self.site.log_abs_det
        log_prob = log_prior.detach() + entropy_term.detach()
        if log_prior.requires_grad and draw.requires_grad:
            (slope,) = torch.autograd.grad(
                log_prior.sum(), draw, retain_graph=True, allow_unused=True
            )
            if slope is not None:
                path = slope * draw
                entropy_term = entropy_term + sum_rightmost(path, path.dim() - log_prior.dim())
        return ScoreParts(log_prob, 0, entropy_term)

    @torch.no_grad()
    def sample(self, num: int) -> Tensor:
        """Draws of the latents.

        Priors without parents are sampled as they stand; others need the model, see
        :class:`~pyro_implicit.infer.engine.prior_draws.PriorDraws`.

        :returns: ``(*plates, num, m)``, or ``(num_particles, *plates, num, m)`` where the prior is
            made from latents of other sites.
        :raises ValueError: for a prior that cannot be sampled, naming the site and the cure.
        """
        self._find_parents()
        self._refuse_flat()
        values = self.particles.particle(0)
        if not self.memory.depends:
            draws = {name: self._sample_fn(name, num, values) for name in self.site.latents}
            return self._lay_out(draws)
        if not self.memory.on_others or self.particles.num_particles == 1:
            return self._draw(num, values)
        particles = [self.particles.particle(k) for k in range(self.particles.num_particles)]
        return torch.stack([self._draw(num, values) for values in particles])

    def log_density(self, points: Tensor) -> Tensor:
        """The log-density at any points, differentiable in them.

        :param points: ``(*batch, n, m)``.
        :returns: ``(*batch, n)``.
        :raises ValueError: for a prior made from latents.
        """
        self._find_parents()
        if self.memory.depends:
            raise ValueError(
                f"the prior of site '{self.site.name}' is made from latents, so its density is "
                "known at the guide's own draws only. Cure: log_prior_logit=False"
            )
        total, start = torch.zeros_like(points[..., 0]), 0
        values = self.particles.particle(0)
        for name in self.site.latents:
            fn = self._fn(name)
            transform = biject_to(fn.support)
            shape = transform.inv(values[name]).shape
            if not self._is_whole():
                shape = shape[values[name].dim() - fn.event_dim :]
            free = points[..., start : start + shape.numel()].reshape(points.shape[:-1] + shape)
            if not self._is_whole():  # the plates stand before the draws, not behind them
                free = free.movedim(points.dim() - 2, 0)
            start += shape.numel()
            value = transform(free)
            jacobian = transform.log_abs_det_jacobian(free, value)
            term = fn.log_prob(value)
            term = term + sum_rightmost(jacobian, jacobian.dim() - term.dim())
            if self._is_whole():
                term = sum_rightmost(term, term.dim() - total.dim())
            else:
                term = term.movedim(0, -1)
            total = total + term
        return total

    def unconstrain(self, values: Tensor) -> Tensor:
        """Bring the site's values ``(*batch, *event_shape)`` to the space of the prior's draws.

        :returns: ``(*batch, m)``.
        """
        event_ndim = self.site.draw.dim() - len(self.site.batch_shape)
        batch = values.shape[: values.dim() - event_ndim]
        if self.site.latents == (self.site.name,):
            values = biject_to(self._fn(self.site.name).support).inv(values)
        return values.reshape(batch + (-1,))

    def _model_site(self, name: str) -> dict[str, Any]:
        try:
            return self.model_trace.nodes[name]
        except KeyError:
            discrete = self.particles.discrete
            if discrete is not None and name in self.site.latents:
                names = ", ".join(f"'{one}'" for one in sorted(discrete.names))
                raise ValueError(
                    f"the prior of site '{name}' is made from the discrete latents {names}, which "
                    "are summed out, so that it has no density of its own. Cure: "
                    'contrast="adaptive"'
                ) from None
            raise ValueError(
                f"site '{self.site.name}' of the guide stands for '{name}', which the model does "
                "not sample. Cure: name the model's sites by pyro.sample(..., infer={'latents': "
                "[...]})"
            ) from None

    def _fn(self, name: str) -> Any:
        """The distribution of a latent at the first particle.

        Of a run on its own: what vmap leaves in the trace of all particles can be of no use outside
        of it, even where it is constant.
        """
        if self._alone is None:
            self._model_site(name)  # raises for a site that the model lacks
            with torch.enable_grad():
                self._alone = self._draws.up_to_latents(self.particles.particle(0))
        return self._alone.nodes[name]["fn"]

    def _find_parents(self) -> None:
        self._is_whole()  # raises for sites that the model lacks
        if self.memory.depends is None:
            with torch.no_grad():
                self._draws.find_parents()

    def _is_whole(self) -> bool:
        """Whether one draw holds the latents of all their plates, as in an autoguide."""
        for name in self.site.latents:
            frames = self._model_site(name)["cond_indep_stack"]
            plates = {frame.name for frame in frames if frame.vectorized} - {PARTICLE_PLATE}
            if plates != self.site.plates:
                if not self.site.plates:
                    return True
                raise ValueError(
                    f"site '{self.site.name}' of the guide is drawn in plates "
                    f"{sorted(self.site.plates)} and '{name}' of the model in {sorted(plates)}, so "
                    'their prior cannot be the contrast. Cure: contrast="adaptive"'
                )
        return False

    def _refuse_flat(self) -> None:
        for name in self.site.latents:
            if is_flat(self._fn(name)):
                raise ValueError(
                    f"the prior of site '{name}' (ImproperUniform) is flat and cannot be sampled. "
                    'Cure: contrast="adaptive", which needs no prior draws'
                )

    def _draw(self, num: int, values: dict[str, Tensor]) -> Tensor:
        try:
            return self._lay_out(self._draws.draw(num, values))
        except (ValueError, RuntimeError) as error:
            latents = ", ".join(f"'{name}'" for name in self.site.latents)
            raise ValueError(
                f"the model cannot run at draws of the prior of {latents}: {error}. Cure: a prior "
                'without such draws, or contrast="adaptive", which needs none'
            ) from error

    def _sample_fn(self, name: str, num: int, values: dict[str, Tensor]) -> Tensor:
        draw = self._fn(name).sample((num,))
        return draw.reshape((num,) + values[name].shape)

    def _lay_out(self, draws: dict[str, Tensor]) -> Tensor:
        """Constrained draws by site, ``(num, *site_shape)``, as points ``(*plates, num, m)``."""
        parts = []
        for name, draw in draws.items():
            fn = self._fn(name)
            batch_ndim = 1 if self._is_whole() else draw.dim() - fn.event_dim
            free = biject_to(fn.support).inv(draw)
            parts.append(free.reshape(free.shape[:batch_ndim] + (-1,)))
        points = torch.cat(parts, -1).movedim(0, -2)
        plates = self.site.batch_shape[int(self.particles.num_particles > 1) :]
        return points.expand(plates + points.shape[-2:])
