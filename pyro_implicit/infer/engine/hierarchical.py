# SPDX-License-Identifier: Apache-2.0
"""The density of a guide at its own draws, or an estimate that bounds it from above."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pyro.distributions as dist
import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.model import refuse_subsampling
from pyro_implicit.distributions import SemiImplicit, find_implicit
from pyro_implicit.generators import as_generator
from pyro_implicit.infer.engine.flat_site import (
    FlatSite,
    check_generator,
    check_standard_normal,
    flatten_site,
    split_elements,
)
from pyro_implicit.infer.engine.noise_proposal import NoiseGaussian, NoiseProposal
from pyro_implicit.infer.engine.nonfinite import NonFiniteError, nonfinite_terms
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
    MAX_ENTRIES,
    conditional_log_density,
    linearised_reverse_conditional,
    mixture_log_density,
)

__all__ = ["HierarchicalELBO", "Proposal"]

Proposal = Literal["linearized", "prior"]

#: Standard deviations between two places of the noise, and nats between their masses.
APART, EVEN = 6.0, 5.0


class HierarchicalELBO(ImplicitELBO):
    """Fills in log q, or the estimate that bounds it from above; evaluates and does not train."""

    #: For messages.
    method = "evidence_bound"

    def __init__(
        self,
        num_particles: int,
        num_mixing: int,
        proposal: Proposal,
        num_steps: int,
        num_starts: int,
        **kwargs: Any,
    ) -> None:
        for name, number, least in (
            ("num_mixing", num_mixing, 1),
            ("num_steps", num_steps, 0),
            ("num_starts", num_starts, 1),
        ):
            if number < least:
                raise ValueError(f"{name} must be at least {least}, but got {number}")
        if proposal not in ("linearized", "prior"):
            raise ValueError(f'proposal must be "linearized" or "prior", but got {proposal!r}')
        super().__init__(num_particles, **kwargs)
        self.num_mixing = num_mixing
        self.proposal = proposal
        self.num_steps = num_steps
        self.num_starts = num_starts
        #: By semi-implicit site, whether each draw may come from a fold (0 or 1), in parts.
        self.folds: dict[str, list[Tensor]] = {}
        #: The guide's sites that have a value in place of a density.
        self.deltas: set[str] = set()
        self._orientations: dict[str, Tensor] = {}
        self._latents: dict[str, Tensor] = {}

    def _check_trainable(self, name: str, site: dict[str, Any]) -> None:
        implicit = find_implicit(site["fn"])
        if implicit is None:
            return
        self.state.has_implicit_sites = True
        exact = as_generator(implicit.generator).injective
        if not (exact or isinstance(implicit, SemiImplicit)):
            raise ValueError(
                f"{self.method} knows no density of site '{name}', whose distribution "
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
        for _, guide_trace in traces:
            samples = {n: s for n, s in guide_trace.nodes.items() if s["type"] == "sample"}
            self.deltas |= {n for n, s in samples.items() if isinstance(s["fn"], dist.Delta)}
        weights = torch.cat([log_weights(model, guide, size) for model, guide in traces])
        log_p = torch.cat([log_weights(model, Trace(), size) for model, _ in traces])
        if not log_p.isnan().all():  # single draws at which the model has no density
            weights = weights.masked_fill(log_p.isnan(), -math.inf)
        bad = (weights.isnan() | weights.isposinf()).nonzero()
        if len(bad):
            terms = nonfinite_terms(*traces[int(bad[0]) // size])
            raise NonFiniteError(  # nothing is trained: no step, and no cure of a training
                f"evidence_bound: {terms}. Cure: data without nan, float64, or another guide"
            )
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
            check_square(site, self.method)
            return
        check_generator(site.name, flatten_site(site, self.num_particles))
        if self.proposal == "linearized":
            method = 'proposal="linearized" (unlike "prior")'
            check_standard_normal(site.name, site.distribution.noise_distribution, method)

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Log q of each particle and plate element, or the bound on it from noise of its own."""
        log_q = self.log_density(site)
        return ScoreParts(log_q, 0, log_q)

    def log_density(self, site: ImplicitSite) -> Tensor:
        """Log q or the bound on it, ``(num_particles, *plates)``, differentiable."""
        if not isinstance(site.distribution, SemiImplicit):
            return self._injective(site)
        flat = flatten_site(site, self.num_particles)
        num_elements = flat.value[..., 0].numel()
        numbers = (self.num_mixing + 1) * max(flat.value.shape[-1], flat.noise.shape[-1])
        size = max(1, MAX_ENTRIES // numbers)  # elements at a time
        if torch.is_grad_enabled() or num_elements <= size:
            return self._log_density(site, flat)
        if self.proposal == "prior":
            return self._log_density_by_noises(site, flat, self.num_mixing * size // num_elements)
        parts = split_elements(site, flat, size)
        found = torch.cat([self._log_density(site, part) for part in parts])
        return found.reshape(flat.value.shape[:-1])

    def _log_density(self, site: ImplicitSite, flat: FlatSite) -> Tensor:
        noises, log_weights = self._noises(site, flat)
        return mixture_log_density(flat.value, flat.generate, flat.scale, noises, log_weights)

    def _log_density_by_noises(self, site: ImplicitSite, flat: FlatSite, size: int) -> Tensor:
        """With fresh noises of the prior, at most ``size`` at a time."""
        distribution = site.distribution.noise_distribution
        total = conditional_log_density(flat.value, flat.generate(flat.noise[None])[0], flat.scale)
        for some in torch.arange(self.num_mixing).split(max(1, size)):
            fresh = distribution.sample(some.shape)
            part = mixture_log_density(flat.value, flat.generate, flat.scale, [fresh])
            total = total.logaddexp(part + math.log(len(some)))
        return total - math.log(self.num_mixing + 1)

    def bound_and_score(self, site: ImplicitSite) -> tuple[Tensor, Tensor]:
        r"""The bound on log q of a semi-implicit site, and an unbiased estimate of the score
        :math:`\nabla_\theta \log q(\theta)` of the shape of ``site.value``, constants.

        The score is a mean over noises that are weighted by :math:`q(z \mid \theta) / \tau`. With
        one among them that made the value, itself a draw of :math:`q(z \mid \theta)`, such a mean
        is right in expectation, however few they are.
        """
        flat = flatten_site(site, self.num_particles)
        noises, log_weights = self._noises(site, flat)
        generate = torch.no_grad()(flat.generate)
        with torch.enable_grad():
            value = flat.value.detach().requires_grad_()
            scale = flat.scale.detach()
            log_q = mixture_log_density(value, generate, scale, noises, log_weights)
            (score,) = torch.autograd.grad(log_q.sum(), value)
        return log_q.detach(), score.reshape(site.value.shape)

    @torch.no_grad()
    def _noises(
        self, site: ImplicitSite, flat: FlatSite
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """All noises of the estimate, and their log p - log tau, if that is not 0."""
        propose = self._linearized if self.proposal == "linearized" else self._prior
        return propose(site, flat)

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

    def _prior(self, site: ImplicitSite, flat: FlatSite) -> tuple[list[Tensor], None]:
        distribution = site.distribution.noise_distribution
        fresh = distribution.sample(torch.Size((self.num_mixing,)))
        return [flat.noise.unsqueeze(0), fresh], None

    def _linearized(self, site: ImplicitSite, flat: FlatSite) -> tuple[list[Tensor], list[Tensor]]:
        """All noises, the one that made the value among them, and their log p - log tau.

        These are the draws of multiple importance sampling with the balance heuristic, reweighted
        by its estimate of q, so that E[q / q_hat] = 1, which is what makes the bound.
        """

        def around(noise: Tensor) -> tuple[Tensor, Tensor]:
            linearisation = flat.linearise(noise)
            return linearisation.value, linearisation.jacobian()

        def reach(start: Tensor) -> NoiseGaussian:
            found = linearised_reverse_conditional(
                flat.value, around, flat.scale, start, self.num_steps
            )
            return NoiseGaussian(*found)

        # A folded generator makes a value in several places. Beyond the first, found from 0, they
        # lie on other sides of the fold: its mirror image is a start for the second.
        gaussians = [reach(torch.zeros_like(flat.noise))]
        for index in range(1, self.num_starts):
            start = -gaussians[0].mean if index == 1 else torch.randn_like(flat.noise)
            gaussians.append(reach(start))
        self._note_folds(site.name, flat, gaussians)
        proposal = NoiseProposal(gaussians, self.num_mixing + 1)
        noise = proposal.sample(flat.noise)
        return [noise], [-proposal.log_ratio(noise)]

    def _note_folds(self, name: str, flat: FlatSite, gaussians: list[NoiseGaussian]) -> None:
        """Keep the share of draws that may come from two places apart, neither negligible."""
        means = torch.stack([gaussian.mean for gaussian in gaussians])
        log_mass = conditional_log_density(flat.value, flat.generate(means), flat.scale)
        log_mass = log_mass - 0.5 * means.square().sum(-1)
        log_mass = log_mass - torch.stack([gaussian.half_log_det for gaussian in gaussians])
        folded = torch.zeros_like(log_mass[0], dtype=torch.bool)
        for index, gaussian in enumerate(gaussians):
            is_apart = gaussian.squares(means) > APART**2
            is_even = (log_mass - log_mass[index]).abs() < EVEN
            folded |= (is_apart & is_even).any(0)
        self.folds.setdefault(name, []).append(folded.to(flat.value).flatten())
