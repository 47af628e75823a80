# SPDX-License-Identifier: Apache-2.0
"""The density of a guide at its own draws, or an estimate that bounds it from above."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.nn.functional import softplus

from pyro_implicit.density.engine import refuse_subsampling
from pyro_implicit.distributions import Implicit, SemiImplicit, find_implicit
from pyro_implicit.generators import as_generator
from pyro_implicit.infer.engine.flat_site import (
    FlatSite,
    check_generator,
    check_standard_normal,
    flatten_site,
)
from pyro_implicit.infer.engine.particles import Particles
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.engine.sites import ImplicitSite
from pyro_implicit.infer.engine.square_site import (
    check_square,
    exact_log_density,
    site_linearisation,
)
from pyro_implicit.infer.engine.traces import log_weights
from pyro_implicit.infer.implicit_elbo import ImplicitELBO
from pyro_implicit.ops.semi_implicit import (
    linearised_reverse_conditional,
    mixture_log_density,
)

__all__ = ["HierarchicalELBO", "Proposal"]

Proposal = Literal["linearized", "prior"]


class HierarchicalELBO(ImplicitELBO):
    """Fills in log q, or the estimate that bounds it from above; evaluates and does not train."""

    prior_share: ClassVar[float] = 0.1

    def __init__(
        self, num_particles: int, num_mixing: int, proposal: Proposal, num_steps: int
    ) -> None:
        super().__init__(num_particles)
        self.num_mixing = num_mixing
        self.proposal = proposal
        self.num_steps = num_steps
        self._orientations: dict[str, Tensor] = {}
        self._latents: dict[str, Tensor] = {}

    def _check_trainable(self, name: str, site: dict[str, Any]) -> None:
        implicit = find_implicit(site["fn"])
        if implicit is None:
            return
        self._has_implicit_sites = True
        exact = as_generator(implicit.generator).injective
        if not (exact or isinstance(implicit, SemiImplicit)):
            raise ValueError(
                f"evidence_bound knows no density of site '{name}', whose distribution "
                f"is {type(implicit).__name__}. Cure: give the site a SemiImplicit or a generator "
                "that is injective (AutoregressiveGenerator), or use AutoSemiImplicit"
            )

    def weighted_draws(
        self, model: Callable[..., Any], guide: Callable[..., Any], args: tuple, kwargs: dict
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log p(x, theta) - log q(theta) of each particle, ``(num_particles,)``, and its draws."""
        self._latents = {}
        traces = list(self._get_traces(model, guide, args, kwargs))
        size = self.num_particles // len(traces)
        for trace in (trace for pair in traces for trace in pair):
            refuse_subsampling(trace, "evidence_bound")
        weights = torch.cat([log_weights(model, guide, size) for model, guide in traces])
        if self._latents:
            return weights, self._latents
        # Pyro's own loop ran, which keeps the values in one trace for each particle.
        sites = [n for n, site in traces[0][1].nodes.items() if site["type"] == "sample"]
        return weights, {n: torch.stack([q.nodes[n]["value"] for _, q in traces]) for n in sites}

    def _run_model(self, particles: Particles) -> Trace:
        latents = particles.latents
        if self.num_particles == 1:
            latents = {name: value.unsqueeze(0) for name, value in latents.items()}
        self._latents = latents
        return super()._run_model(particles)

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse what has neither an exact nor a conditional density."""
        if not isinstance(site.distribution, SemiImplicit):
            check_square(site, "evidence_bound")
            return
        check_generator(site.name, flatten_site(site, self.num_particles))
        if self.proposal == "linearized":
            method = 'proposal="linearized" (unlike "prior")'
            check_standard_normal(site.name, site.distribution.noise_distribution, method)

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Log q of each particle and plate element, or the bound on it from noise of its own."""
        if not isinstance(site.distribution, SemiImplicit):
            log_q = self._injective(site)
            return ScoreParts(log_q, 0, log_q)
        flat = flatten_site(site, self.num_particles)
        propose = self._linearized if self.proposal == "linearized" else self._prior
        noises, log_weights = propose(site.distribution, flat)
        log_q = mixture_log_density(flat.value, flat.generate, flat.scale, noises, log_weights)
        return ScoreParts(log_q, 0, log_q)

    def _injective(self, site: ImplicitSite) -> Tensor:
        """The exact density, of a generator that folds at no draw."""
        sign = torch.linalg.slogdet(site_linearisation(site).jacobian()).sign
        first = sign[0] if self.num_particles > 1 else sign
        if (sign != self._orientations.setdefault(site.name, first)).any():
            raise ValueError(
                f"the generator of site '{site.name}' folds: the determinant of its Jacobian has "
                "both signs among the draws, so it is not injective and its density is unknown. "
                "Cure: train with a smaller learning rate, or use AutoSemiImplicit"
            )
        return exact_log_density(site)

    def _prior(self, q: Implicit, flat: FlatSite) -> tuple[list[Tensor], None]:
        fresh = q.noise_distribution.sample(torch.Size((self.num_mixing,)))
        return [flat.noise.unsqueeze(0), fresh], None

    def _linearized(self, q: Implicit, flat: FlatSite) -> tuple[list[Tensor], list[Tensor]]:
        """All noises, the one that made the value among them, and their log p - log tau.

        Of the S + 1 a fixed number come from the linearised Gaussian and the others from the prior;
        tau is their mixture. The noise that made the value takes the place of a Gaussian or of a
        prior draw, by the odds of either having made it: then the draws are those of multiple
        importance sampling with the balance heuristic, reweighted by its estimate of q, so that
        E[q / q_hat] = 1, which is what makes the bound.
        """
        noise_dim = flat.noise.shape[-1]

        def around(noise: Tensor) -> tuple[Tensor, Tensor]:
            linearisation = q.linearise(noise)
            return linearisation.value, linearisation.jacobian()

        mean, factor = linearised_reverse_conditional(
            flat.value, around, flat.scale, noise_dim, self.num_steps
        )
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        num_prior = max(1, round(self.prior_share * (self.num_mixing + 1)))
        num_gaussian = self.num_mixing + 1 - num_prior
        log_odds = math.log(num_gaussian / num_prior)

        def log_ratio(noise: Tensor) -> Tensor:
            """log of N(mean, (F F^T)^-1) to N(0, I), each times its number of draws."""
            # The noises as columns, so that no factor is copied for each of them.
            white = factor.mT @ (noise - mean).movedim(0, -1)
            squares = noise.square().sum(-1) - white.square().sum(-2).movedim(-1, 0)
            return log_det + 0.5 * squares + log_odds

        white = torch.randn_like(flat.noise.expand((num_gaussian,) + flat.noise.shape))
        step = torch.linalg.solve_triangular(factor.mT, white.movedim(0, -1), upper=True)
        prior = torch.randn_like(flat.noise.expand((num_prior,) + flat.noise.shape))
        noise = torch.cat([mean + step.movedim(-1, 0), prior])
        is_gaussian = torch.rand_like(log_det) < log_ratio(flat.noise.unsqueeze(0))[0].sigmoid()
        noise[0] = torch.where(is_gaussian.unsqueeze(-1), flat.noise, noise[0])
        noise[-1] = torch.where(is_gaussian.unsqueeze(-1), noise[-1], flat.noise)
        # p / tau = (S + 1) / (num_gaussian N / p + num_prior)
        log_weight = math.log(1 + num_gaussian / num_prior) - softplus(log_ratio(noise))
        return [noise], [log_weight]
