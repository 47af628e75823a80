# SPDX-License-Identifier: Apache-2.0
"""A certified lower bound on the log evidence from a fitted guide, and its importance weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.ops.stats import fit_generalized_pareto
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.nn.functional import softplus

from pyro_implicit.distributions import Implicit, SemiImplicit, find_implicit
from pyro_implicit.infer.flat_site import (
    FlatSite,
    check_generator,
    check_standard_normal,
    flatten_site,
)
from pyro_implicit.infer.implicit_elbo import ImplicitELBO
from pyro_implicit.infer.livi import _value_and_jacobian
from pyro_implicit.infer.sites import ImplicitSite
from pyro_implicit.infer.square_site import SquareSite, check_square
from pyro_implicit.infer.vectorize import ParticleModel
from pyro_implicit.ops.semi_implicit import (
    linearised_reverse_conditional,
    mixture_log_density,
)

__all__ = ["EvidenceBound", "WeightedDraws", "evidence_bound", "weighted_draws"]

Proposal = Literal["linearized", "prior"]


class EvidenceBound(NamedTuple):
    """A Monte Carlo estimate of a lower bound on the log evidence, in nats.

    ``value`` is the estimate, ``standard_error`` that of its mean; ``khat`` the Pareto tail index
    of the guide as an importance proposal, ``effective_sample_size`` the number of independent
    posterior draws that its weighted draws are worth.
    """

    value: float
    standard_error: float
    khat: float
    effective_sample_size: float


class WeightedDraws(NamedTuple):
    """Draws of a guide as an importance proposal.

    ``log_weights``, ``(num_samples,)``, are those of :func:`evidence_bound`; ``draws``, each
    ``(num_samples, *site_shape)``, are the values of all of the guide's sites, auxiliary ones too.
    """

    log_weights: Tensor
    draws: dict[str, Tensor]

    def bound(self) -> EvidenceBound:
        """What :func:`evidence_bound` returns."""
        log_weights = self.log_weights.double()
        weights = (log_weights - log_weights.max()).exp()
        return EvidenceBound(
            value=log_weights.mean().item(),
            standard_error=log_weights.std().item() / math.sqrt(len(log_weights)),
            khat=_pareto_khat(weights),
            effective_sample_size=(weights.sum().square() / weights.square().sum()).item(),
        )


def evidence_bound(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 1000,
    num_mixing: int = 100,
    proposal: Proposal = "linearized",
    num_steps: int = 50,
    chunk_size: int = 100,
    **kwargs: Any,
) -> EvidenceBound:
    r"""A lower bound on :math:`\log p(x)` that holds for any guide whose sites have a density, an
    injective generator or a semi-implicit distribution.

    The density of each draw :math:`\theta`, made by the noise :math:`z_0`, is estimated by

    .. math::
        \log \hat q(\theta) = \log \frac{1}{S+1} \sum_{s=0}^S
        \frac{q(\theta \mid z_s)\, p(z_s)}{\tau(z_s \mid \theta)}, \qquad
        z_1, \dots, z_S \sim \tau(z \mid \theta).

    For any proposal :math:`\tau` that knows :math:`\theta` alone and not :math:`z_0`, its mean lies
    above :math:`E \log q(\theta)`. So the mean of :math:`\log p(x, \theta) - \log \hat q(\theta)`
    lies below the guide's ELBO and below the log evidence, whatever guide and proposal are like;
    only ``standard_error`` blurs it. Sites with a density enter with that density, those of an
    injective generator with its exact one.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro_implicit import AutoSemiImplicit
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> y = torch.tensor(0.5)
    >>> bound = evidence_bound(model, AutoSemiImplicit(model), y, num_samples=50)
    >>> bound.value < dist.Normal(0.0, 2.0 ** 0.5).log_prob(y)
    tensor(True)

    :param model: with all its data: nothing subsampled.
    :param guide: of explicit sites, :class:`~pyro_implicit.SemiImplicit` ones, and
        :class:`~pyro_implicit.Implicit` ones whose generator has as many values as noise and a
        method ``log_abs_det_jacobian``, as :class:`~pyro_implicit.ResidualGenerator`.
    :param args: of model and guide, as ``kwargs``.
    :param num_samples: draws of the guide.
    :param num_mixing: S, for each draw and site; the bound rises with it.
    :param proposal: ``"linearized"``: the Gaussian posterior of the noise when the generator is
        linearised at a point that Gauss-Newton steps find, and a tenth of the draws from the prior
        for what that misses. Wants standard normal noise. ``"prior"``: the noise's own
        distribution, which is the bound of :class:`SIVI_ELBO`.
    :param num_steps: Gauss-Newton steps, all from the same start. Where they stop short, a few
        draws far below the others make ``standard_error`` large.
    :param chunk_size: draws of the guide at a time, to bound the memory.
    :returns: value, standard error, k-hat and effective sample size. The latter two are of the
        weights :math:`p(x, \theta) / \hat q(\theta)`, which are right in the mean: a guide with
        k-hat below 0.7 can be corrected by importance weighting. They are those of the guide itself
        only approximately, as :math:`\hat q` is noisy where the bound is loose. k-hat is infinite
        for fewer than 10 draws in the tail (about 50 samples), and says nothing where the effective
        sample size is nearly ``num_samples``.
    :raises ValueError: for arguments out of range, a guide with an implicit site that has neither
        a conditional nor an exact density, an injective generator that folds (its Jacobian has
        determinants of both signs among the draws), a subsampled plate, noise that is not standard
        normal (by ``"linearized"``), or a generator whose rows depend on each other.

    **References:**

    1. Sobolev and Vetrov (2019), *Importance Weighted Hierarchical Variational Inference*, eq 5.
    2. Yao et al. (2018), *Yes, but Did It Work?: Evaluating Variational Inference* (k-hat).
    """
    return weighted_draws(
        model,
        guide,
        *args,
        num_samples=num_samples,
        num_mixing=num_mixing,
        proposal=proposal,
        num_steps=num_steps,
        chunk_size=chunk_size,
        **kwargs,
    ).bound()


@torch.no_grad()
def weighted_draws(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 1000,
    num_mixing: int = 100,
    proposal: Proposal = "linearized",
    num_steps: int = 50,
    chunk_size: int = 100,
    **kwargs: Any,
) -> WeightedDraws:
    """The draws and log-weights behind :func:`evidence_bound`, whose parameters and errors it has.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> weighted_draws(model, AutoNormal(model), num_samples=20).log_weights.shape
    torch.Size([20])
    """
    for name, number, least in (
        ("num_samples", num_samples, 2),
        ("num_mixing", num_mixing, 1),
        ("num_steps", num_steps, 0),
        ("chunk_size", chunk_size, 1),
    ):
        if number < least:
            raise ValueError(f"{name} must be at least {least}, but got {number}")
    if proposal not in ("linearized", "prior"):
        raise ValueError(f'proposal must be "linearized" or "prior", but got {proposal!r}')
    chunk_size = min(chunk_size, num_samples)
    elbo = _HierarchicalELBO(chunk_size, num_mixing, proposal, num_steps)
    rounds = range(-(-num_samples // chunk_size))
    chunks = [elbo.weighted_draws(model, guide, args, kwargs) for _ in rounds]
    return WeightedDraws(
        torch.cat([chunk.log_weights for chunk in chunks])[:num_samples],
        {
            name: torch.cat([chunk.draws[name] for chunk in chunks])[:num_samples]
            for name in chunks[0].draws
        },
    )


class _HierarchicalELBO(ImplicitELBO):
    """Fills in log q, or the estimate that bounds it from above; evaluates and does not train."""

    prior_share: ClassVar[float] = 0.1

    def __init__(
        self, num_particles: int, num_mixing: int, proposal: Proposal, num_steps: int
    ) -> None:
        super().__init__(num_particles)
        self.num_mixing = num_mixing
        self.proposal = proposal
        self.num_steps = num_steps
        self._checked_sites: set[str] = set()
        self._orientations: dict[str, Tensor] = {}
        self._latents: dict[str, Tensor] = {}

    def _check_trainable(self, name: str, site: dict[str, Any]) -> None:
        implicit = find_implicit(site["fn"])
        if implicit is None:
            return
        self._has_implicit_sites = True
        exact = hasattr(implicit.generator, "log_abs_det_jacobian")
        if not (exact or isinstance(implicit, SemiImplicit)):
            raise ValueError(
                f"evidence_bound knows no density of site '{name}', whose distribution "
                f"is {type(implicit).__name__}. Cure: give the site a SemiImplicit or a generator "
                "that is injective (ResidualGenerator), or use AutoSemiImplicit"
            )

    def weighted_draws(
        self, model: Callable[..., Any], guide: Callable[..., Any], args: tuple, kwargs: dict
    ) -> WeightedDraws:
        """One draw and log p(x, theta) - log q(theta) for each particle."""
        self._latents = {}
        traces = list(self._get_traces(model, guide, args, kwargs))
        size = self.num_particles // len(traces)
        log_weights = torch.cat([_total(p, size) - _total(q, size) for p, q in traces])
        if self._latents:
            return WeightedDraws(log_weights, self._latents)
        # Pyro's own loop ran, which keeps the values in one trace for each particle.
        sites = [n for n, site in traces[0][1].nodes.items() if site["type"] == "sample"]
        return WeightedDraws(
            log_weights, {n: torch.stack([q.nodes[n]["value"] for _, q in traces]) for n in sites}
        )

    def _run_model(self, particles: ParticleModel) -> Trace:
        latents = particles.latents
        if self.num_particles == 1:
            latents = {name: value.unsqueeze(0) for name, value in latents.items()}
        self._latents = latents
        return super()._run_model(particles)

    def score_parts(self, site: ImplicitSite) -> ScoreParts:
        """Log q of each particle and plate element, or the bound on it from noise of its own."""
        if not isinstance(site.distribution, SemiImplicit):
            log_q = self._injective(site)
            return ScoreParts(log_q, torch.zeros_like(log_q), log_q)
        flat = flatten_site(site, self.num_particles)
        if site.name not in self._checked_sites:
            check_generator(site.name, flat)
            if self.proposal == "linearized":
                method = 'proposal="linearized" (unlike "prior")'
                check_standard_normal(site.name, site.distribution.noise_distribution, method)
            self._checked_sites.add(site.name)
        propose = self._linearized if self.proposal == "linearized" else self._prior
        noises, log_weights = propose(site.distribution, flat)
        log_q = mixture_log_density(flat.value, flat.generate, flat.scale, noises, log_weights)
        return ScoreParts(log_q, torch.zeros_like(log_q), log_q)

    def _injective(self, site: ImplicitSite) -> Tensor:
        """The exact density, of a generator that folds at no draw."""
        if site.name not in self._checked_sites:
            check_square(site, "evidence_bound")
            self._checked_sites.add(site.name)
        square = SquareSite(site)
        sign = torch.linalg.slogdet(square.jacobian(site.noise)).sign
        first = sign[0] if self.num_particles > 1 else sign
        if (sign != self._orientations.setdefault(site.name, first)).any():
            raise ValueError(
                f"the generator of site '{site.name}' folds: the determinant of its Jacobian has "
                "both signs among the draws, so it is not injective and its density is unknown. "
                "Cure: train with a smaller learning rate, or use AutoSemiImplicit"
            )
        return square.log_density(site.noise)

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
        mean, factor = linearised_reverse_conditional(
            flat.value, partial(_value_and_jacobian, q), flat.scale, noise_dim, self.num_steps
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


def _total(trace: Trace, num_particles: int) -> Tensor:
    """The log-probability of all sites of each particle, ``(num_particles,)``."""
    total: Any = 0.0
    for name, site in trace.nodes.items():
        if site["type"] != "sample":
            continue
        for frame in site["cond_indep_stack"]:
            if frame.full_size is not None and frame.full_size != frame.size:
                raise ValueError(
                    f"evidence_bound wants all data, but plate '{frame.name}' of site '{name}' "
                    f"subsamples {frame.size} of {frame.full_size} elements. Cure: run model and "
                    "guide without subsample_size"
                )
        total = total + site["log_prob"].reshape(num_particles, -1).sum(-1)
    return total


def _pareto_khat(weights: Tensor) -> float:
    """Tail index of importance weights of which the largest is 1, as ``psis_diagnostic``'s."""
    tail_size = math.ceil(min(0.2 * len(weights), 3.0 * math.sqrt(len(weights))))
    cutoff = weights.sort().values[-tail_size - 1]
    tail = weights[weights > cutoff]
    if len(tail) < 10:
        return math.inf
    return fit_generalized_pareto((tail - cutoff).cpu())[0]
