# SPDX-License-Identifier: Apache-2.0
"""A certified lower bound on the log evidence from a fitted guide, and its importance weights."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.model import refuse_subsampling
from pyro_implicit.density.target import Target
from pyro_implicit.distributions import Implicit, SemiImplicit
from pyro_implicit.distributions.implicit import refuse_fold
from pyro_implicit.generators import as_generator
from pyro_implicit.guides.posterior_draws import guide_of, refuse_swapped
from pyro_implicit.infer.engine.folds import FoldWarning
from pyro_implicit.infer.engine.implicit_sites import (
    FlatSite,
    ImplicitSite,
    check_generator,
    check_square,
    check_standard_normal,
    exact_density,
    flatten_site,
    mixture_score,
    split_elements,
)
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.engine.traces import (
    NonFiniteError,
    Particles,
    log_weights,
    nonfinite_terms,
)
from pyro_implicit.infer.implicit_elbo import ImplicitELBO
from pyro_implicit.infer.policy import BOUNDS
from pyro_implicit.ops.importance_weights import LogWeights, describe_weights
from pyro_implicit.ops.policy import MAX_ENTRIES, RELIABLE_KHAT
from pyro_implicit.ops.semi_implicit import (
    NoiseGaussian,
    NoiseProposal,
    conditional_log_density,
    linearised_reverse_conditional,
    mixture_log_density,
)
from pyro_implicit.runtime.global_state import in_turn, same_streams, with_seed
from pyro_implicit.runtime.messages import (
    refuse_counts,
    refuse_nonpositive,
    refuse_unknown,
    short_repr,
    warn_user,
)
from pyro_implicit.runtime.progress import announce, progress_is_shown, steps_of, watching

__all__ = [
    "EvidenceBound",
    "HierarchicalELBO",
    "Proposal",
    "WeightedDraws",
    "evidence_bound",
    "weighted_draws",
]


Proposal = Literal["linearized", "prior"]


class HierarchicalELBO(ImplicitELBO):
    """An ELBO with log q, or an estimate that bounds it from above; for evaluation."""

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
        refuse_counts(num_mixing=num_mixing, num_starts=num_starts)
        refuse_counts(0, num_steps=num_steps)
        refuse_unknown("proposal", proposal, "linearized", "prior")
        super().__init__(num_particles, **kwargs)
        self.num_mixing = num_mixing
        self.proposal = proposal
        self.num_steps = num_steps
        self.num_starts = num_starts
        #: By semi-implicit site, whether each draw may come from a fold (0 or 1), in parts.
        self.folds: dict[str, list[Tensor]] = {}
        #: The guide's sites that have a value in place of a density.
        self.deltas: set[str] = set()

    def _check_kind(self, name: str, implicit: Implicit) -> None:
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
        """Return log p(x, theta) - log q(theta) of each particle, and the draws."""
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
        latents = self.state.step.pop(("latents", ""), None)
        self.state.step.clear()
        if latents:
            return weights, latents
        # Pyro's own loop ran, which keeps the values in one trace for each particle.
        sites = [n for n, site in traces[0][1].nodes.items() if site["type"] == "sample"]
        return weights, {n: torch.stack([q.nodes[n]["value"] for _, q in traces]) for n in sites}

    def _run_model(self, particles: Particles) -> Trace:
        latents = particles.latents
        if self.num_particles == 1:
            latents = {name: value.unsqueeze(0) for name, value in latents.items()}
        self.state.step["latents", ""] = latents
        return super()._run_model(particles)

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse a site that has neither an exact nor a conditional density."""
        if not isinstance(site.distribution, SemiImplicit):
            check_square(site, self.method)
            return
        check_generator(site)
        if self.proposal == "linearized":
            check_standard_normal(site, 'proposal="linearized" (unlike "prior")')

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return log q of each particle and plate element, or the bound on it."""
        log_q = self.log_density(site)
        return ScoreParts(log_q, 0, log_q)

    def log_density(self, site: ImplicitSite) -> Tensor:
        """Return log q or the bound on it, ``(num_particles, *plates)``, differentiable."""
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
        """Estimate with fresh noises of the prior, at most ``size`` at a time."""
        distribution = site.distribution.noise_distribution
        total = conditional_log_density(flat.value, flat.generate(flat.noise[None])[0], flat.scale)
        for some in torch.arange(self.num_mixing).split(max(1, size)):
            fresh = distribution.sample(some.shape)
            part = mixture_log_density(flat.value, flat.generate, flat.scale, [fresh])
            total = total.logaddexp(part + math.log(len(some)))
        return total - math.log(self.num_mixing + 1)

    def bound_and_score(self, site: ImplicitSite) -> tuple[Tensor, Tensor]:
        r"""Return the bound on log q of a semi-implicit site, and an unbiased estimate of the score
        :math:`\nabla_\theta \log q(\theta)` of the shape of ``site.value``, constants.

        The score is a mean over noises that are weighted by :math:`q(z \mid \theta) / \tau`. With
        one among them that made the value, itself a draw of :math:`q(z \mid \theta)`, such a mean
        is right in expectation, however few they are.
        """
        flat = flatten_site(site, self.num_particles)
        log_q, score = mixture_score(flat, *self._noises(site, flat))
        return log_q, score.reshape(site.value.shape)

    @torch.no_grad()
    def _noises(
        self, site: ImplicitSite, flat: FlatSite
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        if self.proposal == "linearized":
            return self._linearized(site, flat)
        distribution = site.distribution.noise_distribution
        fresh = distribution.sample(torch.Size((self.num_mixing,)))
        return [flat.noise.unsqueeze(0), fresh], None

    def _injective(self, site: ImplicitSite) -> Tensor:
        """Return the exact density; refuse a generator that folds."""
        log_q, signs = exact_density(site)
        first = self.remember("sign", site.name, lambda: signs.flatten()[:1])
        refuse_fold(f"the generator of site '{site.name}'", torch.cat([first, signs.flatten()]))
        return log_q

    def _linearized(self, site: ImplicitSite, flat: FlatSite) -> tuple[list[Tensor], list[Tensor]]:
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
        """Note which draws may come from two separate places, neither negligible."""
        means = torch.stack([gaussian.mean for gaussian in gaussians])
        log_mass = conditional_log_density(flat.value, flat.generate(means), flat.scale)
        log_mass = log_mass - 0.5 * means.square().sum(-1)
        log_mass = log_mass - torch.stack([gaussian.half_log_det for gaussian in gaussians])
        folded = torch.zeros_like(log_mass[0], dtype=torch.bool)
        for index, gaussian in enumerate(gaussians):
            is_apart = gaussian.squares(means) > BOUNDS.fold_distance**2
            is_even = (log_mass - log_mass[index]).abs() < BOUNDS.fold_balance
            folded |= (is_apart & is_even).any(0)
        self.folds.setdefault(name, []).append(folded.to(flat.value).flatten())


class EvidenceBound(NamedTuple):
    """A Monte Carlo estimate of a lower bound on the log evidence, in nats.

    ``value`` is the estimate, ``standard_error`` that of its mean; ``khat`` the Pareto tail index
    of the guide as an importance proposal, ``effective_sample_size`` the number of independent
    posterior draws that its weighted draws are worth, and ``num_samples`` the number of draws, if
    it is known. ``print`` says whether the importance weights are reliable.
    """

    value: float
    standard_error: float
    khat: float
    effective_sample_size: float
    num_samples: int | None = None

    def __repr__(self) -> str:
        return short_repr(self)

    def __str__(self) -> str:
        return "\n".join(filter(None, (repr(self), self.advice)))

    @property
    def advice(self) -> str:
        """What is wrong with the importance weights, and the cure; empty if they are reliable."""
        share = self.effective_sample_size / self.num_samples if self.num_samples else math.nan
        found = describe_weights(self.khat, share)
        if self.khat <= RELIABLE_KHAT or found.startswith("even weights"):
            return ""
        if math.isinf(self.khat):
            return (
                f"Whether the importance weights are reliable is unknown ({found}). The bound "
                "holds. Cure: num_samples=1000"
            )
        return (
            f"The importance weights are unreliable ({found}; reliable: k-hat up to "
            f"{RELIABLE_KHAT}): their tail is so heavy that a few draws, or some that are missing, "
            "may have most of the weight. The bound holds, but do not reweight or resample draws "
            "by these weights. Cure: train the guide for longer or give it a wider generator, "
            "raise num_mixing, or move its draws by refine(model, guide, ...). The log-weights of "
            "all rows add up: with a latent for each row, give few rows at a time"
        )


class WeightedDraws(NamedTuple):
    """Draws of a guide as an importance proposal.

    ``log_weights``, ``(num_samples,)``, are those of :func:`evidence_bound`; ``draws``, each
    ``(num_samples, *site_shape)``, are the values of all of the guide's sites, auxiliary ones too.
    """

    log_weights: Tensor
    draws: dict[str, Tensor]

    def __repr__(self) -> str:
        return short_repr(self)

    def bound(self) -> EvidenceBound:
        """Return the result of :func:`evidence_bound`."""
        found = LogWeights(self.log_weights)
        return EvidenceBound(
            found.mean,
            found.standard_error,
            found.khat,
            found.effective_sample_size,
            len(found),
        )


@in_turn
@with_seed
def evidence_bound(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 1000,
    num_mixing: int = 100,
    proposal: Proposal = "linearized",
    num_steps: int = BOUNDS.num_steps,
    num_starts: int = BOUNDS.num_starts,
    chunk_size: int = 100,
    max_seconds: float | None = None,
    seed: int | None = None,
    progress: bool = True,
    model_kwargs: dict[str, Any] | None = None,
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
    >>> bound.value < dist.Normal(0.0, 2.0 ** 0.5).log_prob(y) + 3 * bound.standard_error
    tensor(True)

    :param model: with all its data: nothing subsampled.
    :param guide: guide with explicit sites, :class:`~pyro_implicit.SemiImplicit` sites, and
        :class:`~pyro_implicit.Implicit` sites whose generator is injective with as many values as
        noise, such as :class:`~pyro_implicit.AutoregressiveGenerator`. A result of
        :func:`~pyro_implicit.fit` is replaced by its ``guide``.
    :param args: positional arguments of model and guide; ``kwargs`` are keyword arguments.
    :param num_samples: draws of the guide.
    :param num_mixing: S, for each draw and site; the bound rises with it.
    :param proposal: ``"linearized"``: the Gaussian posterior of the noise when the generator is
        linearised at a point that Gauss-Newton steps find, and a tenth of the draws from the prior
        for what that misses. Needs standard normal noise. ``"prior"``: the noise's own
        distribution, which is the bound of :class:`SIVI_ELBO`.
    :param num_steps: Gauss-Newton steps from each start. Where they stop short, a few draws far
        below the others make ``standard_error`` large.
    :param num_starts: places where they begin, for each draw: 0 and draws of the prior. A generator
        that folds makes a value in several places, and the bound is loose where one is missed.
    :param chunk_size: draws of the guide at a time, to bound the memory. The noises of a site with
        many rows come in smaller chunks by themselves.
    :param max_seconds: approximate limit of wall time; the bound then uses the draws made so far.
    :param seed: of all random numbers of this call. The caller's random streams do not advance;
        without a seed they are used.
    :param progress: whether to show a bar, and the estimated time if it is long, in a terminal or
        notebook. The time grows in proportion to ``num_samples``, the rows of amortised sites,
        ``num_starts * num_steps`` and ``num_mixing``.
    :param model_kwargs: keyword arguments of model and guide whose names this function has, too.
    :returns: value, standard error, k-hat, effective sample size and number of draws. K-hat and the
        effective sample size are of the weights :math:`p(x, \theta) / \hat q(\theta)`, which are
        unbiased: a guide with k-hat below 0.7 can be corrected by importance weighting. They hold
        for the guide itself only approximately, as :math:`\hat q` is noisy where the bound is
        loose. k-hat is infinite for fewer than 5 draws in the tail (about 25 samples), and has no
        meaning if the effective sample size is nearly ``num_samples``.
    :warns UserWarning: if ``max_seconds`` ended it early, with the time that all draws need.
    :raises TypeError: for what is no guide.
    :raises ValueError: for arguments out of range, a guide with an implicit site that has neither a
        conditional nor an exact density, an injective generator that folds (its Jacobian has
        determinants of both signs among the draws), a subsampled plate, a site that is a point
        (Delta), noise that is not standard normal (by ``"linearized"``), or a generator whose rows
        depend on each other.

    **References:**

    1. Sobolev and Vetrov (2019), *Importance Weighted Hierarchical Variational Inference*, eq 5.
    2. Yao et al. (2018), *Yes, but Did It Work?: Evaluating Variational Inference* (k-hat).
    """
    options: dict[str, Any] = {
        "num_mixing": num_mixing,
        "proposal": proposal,
        "num_steps": num_steps,
        "num_starts": num_starts,
        "chunk_size": chunk_size,
        "model_kwargs": model_kwargs,
        **kwargs,
    }
    with watching(progress):
        if progress_is_shown():
            with same_streams(), watching(False), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the run with all draws shows them
                began = time.perf_counter()
                weighted_draws(model, guide, *args, num_samples=BOUNDS.timed_draws, **options)
            seconds = (time.perf_counter() - began) * num_samples / BOUNDS.timed_draws
            announce(f"evidence_bound of {num_samples} draws", seconds)
        options |= {"num_samples": num_samples, "max_seconds": max_seconds}
        return weighted_draws(model, guide, *args, **options).bound()


@in_turn
@with_seed
@torch.no_grad()
def weighted_draws(
    model: Callable[..., Any] | Target,
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 1000,
    num_mixing: int = 100,
    proposal: Proposal = "linearized",
    num_steps: int = BOUNDS.num_steps,
    num_starts: int = BOUNDS.num_starts,
    chunk_size: int = 100,
    max_seconds: float | None = None,
    seed: int | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> WeightedDraws:
    """Return the draws and log-weights behind :func:`evidence_bound`, of the same parameters.

    ``model`` may also be the :class:`~pyro_implicit.density.Target` of a model, which has its
    arguments.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> weighted_draws(model, AutoNormal(model), num_samples=20).log_weights.shape
    torch.Size([20])
    """
    refuse_counts(2, num_samples=num_samples)
    refuse_counts(chunk_size=chunk_size)
    refuse_nonpositive(max_seconds=max_seconds)
    kwargs = {**kwargs, **(model_kwargs or {})}
    if isinstance(model, Target):
        args, kwargs, model = model.args, model.kwargs, model.model
    chunk_size = min(chunk_size, num_samples)
    settings = num_mixing, proposal, num_steps, num_starts
    elbo = HierarchicalELBO(chunk_size, *settings)
    refuse_swapped("evidence_bound", model, guide)
    guide = guide_of("evidence_bound", guide)
    begin = time.perf_counter()
    if max_seconds is not None:
        with same_streams():  # the draws are the same as without a limit
            HierarchicalELBO(BOUNDS.timed_draws, *settings).weighted_draws(
                model, guide, args, kwargs
            )
        most = max_seconds / BOUNDS.num_chunks * BOUNDS.timed_draws / (time.perf_counter() - begin)
        chunk_size = min(chunk_size, max(BOUNDS.timed_draws, int(most)))
        elbo = HierarchicalELBO(chunk_size, *settings)
    chunks = []
    number = -(-num_samples // chunk_size)
    for index in steps_of(range(number), number, "weights"):
        spent = time.perf_counter() - begin
        if index > 0 and max_seconds is not None and spent * (index + 1) / index > max_seconds:
            warn_user(
                f"evidence_bound made {index * chunk_size} of {num_samples} draws in "
                f"max_seconds={max_seconds:g}; all draws need about {spent * number / index:.3g} "
                "s. Cure: more seconds, fewer rows, or smaller num_starts, num_steps or num_mixing"
            )
            break
        chunks.append(elbo.weighted_draws(model, guide, args, kwargs))
    for name, shares in elbo.folds.items():
        share = torch.cat(shares).mean().item()
        if share > BOUNDS.max_folded:
            warn_user(
                f"the generator of site '{name}' folds: {share:.0%} of its draws could have been "
                "made in two places. The bound holds, but LIVI_ELBO, which counts both, reported "
                "too low a loss. Cure: train again from another seed, with a smaller learning rate",
                FoldWarning,
            )
    log_weights, parts = zip(*chunks, strict=True)
    draws = {name: torch.cat([part[name] for part in parts])[:num_samples] for name in parts[0]}
    _refuse_points(draws, elbo.deltas)
    return WeightedDraws(torch.cat(log_weights)[:num_samples], draws)


def _refuse_points(draws: dict[str, Tensor], deltas: set[str]) -> None:
    """Check that the value of every Delta site moves, with a draw that has a density."""
    for name in sorted(deltas & set(draws)):
        if deltas >= set(draws) or (draws[name] == draws[name][:1]).all():
            raise ValueError(
                f"site '{name}' of the guide is a point (Delta), which has no density, so there is "
                "no bound. Cure: AutoNormal or another guide with a density in place of AutoDelta"
            )
