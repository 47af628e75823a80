# SPDX-License-Identifier: Apache-2.0
"""Candidates of ``fit``: their construction, importance weights and choice."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import TransformedDistribution
from pyro.infer.autoguide import (
    AutoGuide,
    AutoNormal,
    init_to_value,
)
from torch import Tensor
from torch.distributions import Distribution

from pyro_implicit.density.cost import seconds_near
from pyro_implicit.density.marginal import Marginal
from pyro_implicit.density.modes import Modes
from pyro_implicit.density.symmetry import Symmetries
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.checks import uncovered_modes
from pyro_implicit.distributions.implicit import Mixture
from pyro_implicit.fitting.policy import (
    DEFAULT,
    DRAWS_AT_ONCE,
    ChoicePolicy,
    CorrectionPolicy,
    MixturePolicy,
)
from pyro_implicit.generators import AutoregressiveGenerator
from pyro_implicit.guides import AutoImplicit, AutoMixture
from pyro_implicit.guides.auto_draws import Frame, own_names
from pyro_implicit.guides.auto_implicit import has_exact_density
from pyro_implicit.guides.sampler import StoredDraws
from pyro_implicit.infer import FoldWarning, weighted_draws
from pyro_implicit.ops import LogWeights, fit_normal_mixture
from pyro_implicit.ops.matrices import lower_factor
from pyro_implicit.ops.quadrature import normal_draws
from pyro_implicit.runtime.messages import short_repr
from pyro_implicit.runtime.sites import FlatPriorStart, without_sequential_plates

__all__ = [
    "Candidate",
    "choose",
    "corrected_draws",
    "exact_guide",
    "exact_log_weights",
    "guide_of",
    "frame_of_draws",
    "joint_draws",
    "matched_modes",
    "mean_field_guide",
    "mixture_weights",
    "proposal_of",
    "reliability",
    "set_up",
    "weigh",
]


@dataclass(repr=False)
class Candidate:
    """A guide in the state in which it was weighed.

    ``log_weights`` are log p - log q at draws of the guide, in increasing order, without the lowest
    one per cent. ``draws`` are other draws, unconstrained, ``(num_draws, latent_dim)``. ``losses``
    are those of its training, and ``state`` is its ``state_dict``.
    """

    name: str
    guide: AutoGuide
    log_weights: LogWeights
    draws: Tensor
    losses: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict, repr=False)
    __repr__ = short_repr

    @property
    def bound(self) -> float:
        """The mean of the log-weights, -inf if it is not a number."""
        return self.log_weights.mean

    def falls_short(self, other: Candidate, tie: float = DEFAULT.choice.tie) -> bool:
        """Return whether the bound is lower than that of another candidate.

        :param other: the other candidate.
        :param tie: nats by which it must be lower; two standard errors of the difference, if these
            are larger.
        """
        errors = [one.log_weights.standard_error for one in (self, other)]
        error = 2 * math.hypot(*errors)  # NaN if a bound is infinite
        return self.bound < other.bound - (error if error > tie else tie)

    @property
    def gap(self) -> float:
        """An estimate of KL(guide || posterior) in nats."""
        return self.log_weights.gap

    def restore(self) -> None:
        """Load the state in which the guide was weighed."""
        self.guide.load_state_dict(self.state)


def exact_guide(
    model: Callable[..., Any], modes: Modes, *args: Any, **kwargs: Any
) -> AutoImplicit | AutoMixture:
    """Return a guide with an exact density that is initialised at the Gaussian of each mode.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> modes = Modes(torch.zeros(1, 1), torch.ones(1, 1, 1), torch.zeros(1))
    >>> exact_guide(model, modes).sample_posterior(5)["x"].shape
    torch.Size([5])

    :param model: a Pyro model.
    :param modes: the result of :func:`~pyro_implicit.density.find_modes`.
    :param args: positional arguments of the model; ``kwargs`` are keyword arguments.
    :returns: an :class:`AutoImplicit`; for several modes an :class:`AutoMixture` with equal
        weights.
    """
    guide: AutoImplicit | AutoMixture
    parts = [
        AutoImplicit(model, AutoregressiveGenerator, frame=Frame(loc, scale_tril=scale_tril))
        for loc, scale_tril in zip(modes.loc, modes.scale_tril, strict=True)
    ]
    guide = parts[0] if len(parts) == 1 else AutoMixture(model, parts)
    return set_up(guide, args, kwargs)


def mean_field_guide(
    model: Callable[..., Any], target: Target, values: dict[str, Tensor], **options: Any
) -> AutoNormal:
    """Return a mean-field guide of all latent variables that are not summed out.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> guide = mean_field_guide(model, Target(model), {"x": torch.tensor(2.0)})
    >>> _ = guide()
    >>> guide.median()["x"]
    tensor(2.)

    :param model: a Pyro model.
    :param target: its posterior.
    :param values: where it starts, by site.
    :param options: arguments of ``AutoNormal``.
    """
    model = without_sequential_plates(model)
    if target.summed_out:
        model = poutine.block(model, hide=sorted(target.summed_out))
    start = FlatPriorStart(init_to_value(values=values))
    return own_names(AutoNormal(model, init_loc_fn=start, **options))


def frame_of_draws(draws: Tensor) -> Frame:
    """Return the Gaussian with the mean and covariance of draws.

    **Example:**

    >>> frame_of_draws(torch.tensor([[1.0], [3.0], [5.0]])).scale_tril.round(decimals=3)
    tensor([[2.]])

    :param draws: ``(num_samples, latent_dim)``; rows that are not finite are ignored.
    """
    draws = draws[draws.isfinite().all(-1)]
    centered = (draws - draws.mean(0)) / (len(draws) - 1) ** 0.5
    return Frame(draws.mean(0), scale_tril=lower_factor(centered.mT))


@torch.no_grad()
def weigh(
    name: str,
    target: Target,
    guide: AutoGuide,
    losses: list[float] | None = None,
    num_samples: int | None = None,
    policy: ChoicePolicy | None = None,
) -> Candidate:
    """Compute log p - log q at 1,000 draws of a guide, and drop the lowest 10.

    A guide that is too wide has a few very low log-weights, which affect its bound but not its use.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> modes = Modes(torch.zeros(1, 1), torch.ones(1, 1, 1), torch.zeros(1))
    >>> found = weigh("gaussian", Target(model), exact_guide(model, modes))
    >>> f"{abs(found.bound):.3f}"
    '0.000'

    :param name: the name of the candidate.
    :param target: the posterior.
    :param guide: an autoguide with a density, or a semi-implicit one.
    :param losses: the losses of its training.
    :param num_samples: the number of draws that the candidate keeps; by default that of the policy.
    :param policy: the number of log-weights and the share that is dropped.
    """
    policy = policy or DEFAULT.choice
    log_weights = _log_weights(guide, target, policy).trimmed(policy.trimmed)
    state = {name: value.clone() for name, value in guide.state_dict().items()}
    posterior = guide.get_posterior(*target.args, **target.kwargs)
    num_samples = policy.num_kept if num_samples is None else num_samples
    draws = posterior.sample(torch.Size((num_samples,)))
    return Candidate(name, guide, log_weights, draws, losses or [], state)


def choose(
    target: Target, candidates: list[Candidate], modes: Modes, policy: ChoicePolicy | None = None
) -> tuple[Candidate, str]:
    """Choose the candidate with the highest bound among those that cover all modes.

    A guide without a mode of a tenth of the mass loses only 0.1 nats of its bound, so the bound
    alone may prefer it.

    **Example:**

    >>> import pyro
    >>> def model():
    ...     x = pyro.sample("x", pyro.distributions.Normal(0.0, 5.0))
    ...     pyro.factor("modes", torch.logaddexp(-50 * (x - 3) ** 2, 1 - 50 * (x + 3) ** 2))
    >>> modes = Modes(torch.tensor([[3.0], [-3.0]]), torch.full((2, 1, 1), 0.1), torch.zeros(2))
    >>> target, first = Target(model), Modes(*(part[1:] for part in modes))
    >>> guides = {"one": exact_guide(model, first), "both": exact_guide(model, modes)}
    >>> candidates = [weigh(name, target, guide) for name, guide in guides.items()]
    >>> choose(target, candidates, modes)[1]
    'both: the highest bound'

    :param target: the posterior.
    :param candidates: at least one.
    :param modes: the result of the search.
    :param policy: when bounds are equal, and the mass that a guide may leave out.
    :returns: the candidate, and the reason in words.
    """
    policy = policy or DEFAULT.choice
    ranked = sorted(candidates, key=lambda one: -one.bound)
    if math.isfinite(ranked[0].bound):  # a trained guide wins a tie
        tied = [one for one in candidates if not one.falls_short(ranked[0], policy.tie)]
        best = max(tied, key=lambda one: (bool(one.losses), one.bound))
        ranked.sort(key=lambda one: one is not best)
    if len(modes.loc) == 1 or not math.isfinite(ranked[0].bound):
        return ranked[0], f"{ranked[0].name}: the highest bound"
    missing = []
    for one in ranked:
        draws = one.draws[one.draws.isfinite().all(-1)]
        found = uncovered_modes(target, modes.loc, draws, ranked[0].bound, policy.least_mass)
        missing.append(found.mass[found.uncovered].sum().item())
    chosen = ranked[missing.index(min(missing))]
    if chosen is ranked[0]:
        return chosen, f"{chosen.name}: the highest bound"
    return chosen, (
        f"{chosen.name}: {ranked[0].name} has a higher bound, but misses modes with about "
        f"{missing[0]:.1%} of the mass"
    )


def _log_weights(guide: AutoGuide, target: Target, policy: ChoicePolicy) -> LogWeights:
    if has_exact_density(guide):
        return exact_log_weights(target, guide, policy.num_weighed)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FoldWarning)  # ``train_semi_implicit`` reports folds
        found = weighted_draws(target, guide, num_samples=policy.num_weighed, num_starts=2)
    return LogWeights(found.log_weights)


@torch.no_grad()
def exact_log_weights(
    target: Target,
    guide: AutoGuide,
    num_samples: int,
    log_prob: Callable[[Tensor], Tensor] | None = None,
    noise: Tensor | None = None,
    wide: CorrectionPolicy | None = None,
) -> tuple[Tensor, LogWeights]:
    """Draw from a guide with an exact density, and return the draws and log p - log q.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> guide = exact_guide(model, Modes(torch.zeros(1, 1), torch.ones(1, 1, 1), torch.zeros(1)))
    >>> draws, log_weights = exact_log_weights(Target(model), guide, 5)
    >>> draws.shape, log_weights.values.shape
    (torch.Size([5, 1]), torch.Size([5]))

    :param target: the posterior.
    :param guide: a guide for which ``has_exact_density`` is true.
    :param num_samples: the number of draws.
    :param log_prob: evaluates the target at draws; by default ``target.log_prob``.
    :param noise: the standard normal noise of the draws ``(num_samples, 1 + latent_dim)``, for
        instance of Sobol points; by default random. The first column selects the components of a
        mixture; with ``wide``, one more at the end selects the scales.
    :param wide: widens the noise of some draws, so that they reach tails which the guide lacks.
    :returns: unconstrained draws ``(num_draws, latent_dim)`` and log-weights ``(num_draws,)``, -inf
        where the model has no density.
    """
    q = proposal_of(target, guide, wide)
    points = None if noise is None else _moved(guide, noise, wide)
    parts, log_weights = [], []
    log_prob = log_prob or target.log_prob
    for first in range(0, num_samples, DRAWS_AT_ONCE):
        if points is None:
            part = q.sample(torch.Size((min(DRAWS_AT_ONCE, num_samples - first),)))
        else:
            part = points[first : first + DRAWS_AT_ONCE]
        parts.append(part)
        log_weights.append(log_prob(part) - q.log_prob(part))
    found = torch.cat(log_weights)
    return torch.cat(parts), LogWeights(found.masked_fill(~found.isfinite(), -math.inf))


def proposal_of(
    target: Target, guide: AutoGuide, wide: CorrectionPolicy | None = None
) -> Distribution:
    """Return the density of a guide's unconstrained draws.

    :param target: the posterior.
    :param guide: a guide for which ``has_exact_density`` is true.
    :param wide: widens the noise of some draws.
    """
    q = guide.get_posterior(*target.args, **target.kwargs)
    if not isinstance(guide, AutoMixture):
        q = TransformedDistribution(guide.get_base_dist(), guide.get_transform())
    return q if wide is None else _widened(q, wide)


def _widened(q: Distribution, policy: CorrectionPolicy) -> Distribution:
    """Return a distribution whose standard normal noise is mixed with wider noise."""
    if isinstance(q, Mixture):
        return Mixture(q.log_weights, [_widened(part, policy) for part in q.components])
    if not isinstance(q, TransformedDistribution):
        return q
    zeros = torch.zeros_like(q.base_dist.mean)
    shares, scales = policy.widths
    parts = [dist.Normal(zeros, scale).to_event(1) for scale in scales]
    return TransformedDistribution(Mixture(zeros.new_tensor(shares).log(), parts), q.transforms)


def _moved(guide: AutoGuide, noise: Tensor, wide: CorrectionPolicy | None) -> Tensor:
    """Return the draws that a guide makes of noise; see :func:`exact_log_weights`."""
    selected, noise = noise[:, 0], noise[:, 1:]
    if wide is not None:
        noise = _widened_noise(noise, wide)
    if not isinstance(guide, AutoMixture):
        return guide.get_transform()(noise)
    place = _places(selected, guide.log_weights.softmax(0))
    points = torch.empty_like(noise)
    for index, part in enumerate(guide.components):
        points[place == index] = part.get_transform()(noise[place == index])
    return points


def _widened_noise(noise: Tensor, policy: CorrectionPolicy) -> Tensor:
    """Return noise that is scaled as the last column says, without that column."""
    shares, scales = map(noise.new_tensor, policy.widths)
    return noise[:, :-1] * scales[_places(noise[:, -1], shares)].unsqueeze(-1)


def _places(noise: Tensor, shares: Tensor) -> Tensor:
    """Return places that standard normal noise selects, each with its share, ``(num_samples,)``."""
    return torch.bucketize(torch.special.ndtr(noise), shares[:-1].cumsum(0))


def set_up(guide: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Make the parameters of a guide, under unique names and outside of Pyro's store."""
    guide = own_names(guide)
    # Called outside of ``guide(...)``, the prototype adds no parameter to Pyro's store.
    guide._setup_prototype(*args, **kwargs)
    return guide


@torch.no_grad()
def mixture_weights(
    target: Target, components: Sequence[Distribution], policy: MixturePolicy | None = None
) -> Tensor:
    r"""Maximise the exact ELBO of a mixture :math:`q_w = \sum_k w_k q_k` over its weights.

    With p the model's unnormalised density,

    .. math:: F(w) = \sum_k w_k a_k(w), \qquad a_k(w) = E_{q_k}[\log p - \log q_w].

    F is concave, because the entropy is, and :math:`\partial F / \partial w_k = a_k(w) - 1`. Since

    .. math:: F(w) = F(v) + \sum_k (w_k - v_k)\, a_k(v) - KL(q_w \| q_v)

    for all weights v, and :math:`KL(q_w \| q_v) \le KL(w \| v)`, F(w) has a lower bound that
    touches it at v. The maximum of this bound,

    .. math:: w_k \propto v_k \, e^{a_k(v)},

    is one iteration, which never lowers F. Concavity also bounds the distance to the maximum by
    :math:`\max_k a_k(w) - F(w)`. Components that do not overlap need one iteration; their weights
    are proportional to :math:`e^{ELBO_k}`. For two equal components only the sum of their weights
    matters, so their mass is not counted twice.

    The expectation under component k is estimated at the draws of all components, with weights
    :math:`q_k / \sum_j q_j`, so that similar components get similar values. Draws at which the
    log-density is not finite are ignored; a component with a share s of finite draws is truncated
    to them and loses :math:`-\log s`.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 5.0))
    ...     pyro.factor("modes", torch.logaddexp(-50 * (x - 3) ** 2, 1 - 50 * (x + 3) ** 2))
    >>> parts = [dist.Normal(m, 0.1).expand([1]).to_event(1) for m in (3.0, -3.0)]
    >>> mixture_weights(Target(model), parts).diff().round(decimals=1)
    tensor([1.])

    :param target: the posterior.
    :param components: distributions of the unconstrained latent vector with a density at any point,
        such as ``AutoMixture(...).get_posterior().components``.
    :param policy: the numbers of draws and iterations. By default, each component has 1,000 draws;
        more than eight components have 8,000 in all, at least 100 of each.
    :returns: the normalised log-weights ``(num_components,)``, -inf for a component at none of
        whose draws the log-density is finite.
    :raises ValueError: for no components, or if the log-density is finite at no draw.
    :raises NotImplementedError: for a component without a density.

    **References:**

    1. Blahut (1972), *Computation of channel capacity and rate-distortion functions*: the same
       iteration, with :math:`-\log p` as the cost of a symbol.
    """
    if not components:
        raise ValueError("mixture_weights needs at least one component")
    policy = policy or DEFAULT.mixture
    num_samples = policy.draws_of_each(len(components))
    draws = [q.sample(torch.Size((num_samples,))) for q in components]
    log_p = torch.stack([target.log_prob(points) for points in draws])
    points = torch.cat(draws)
    # float64: the densities of one component at another's draws differ by many powers of ten. A
    # density that overflows does so far from all draws of its component.
    log_q = torch.stack([q.log_prob(points) for q in components], -1).double()
    log_q = log_q.masked_fill(log_q.isnan(), -math.inf)
    log_p = log_p.double()
    is_good = log_p.isfinite() & log_q.logsumexp(-1).isfinite().reshape(log_p.shape)
    share = is_good.double().mean(-1)
    if not is_good.any():
        raise ValueError(
            f"the model's log-density is finite at none of {len(points)} draws of the components. "
            "Cure: train the components first, each with an initial value in its mode"
        )
    kept = share > 0
    chosen = is_good.flatten()
    log_weights = torch.full_like(share, -math.inf)
    log_weights[kept] = _maximise(
        log_p.flatten()[chosen], log_q[chosen][:, kept] - share[kept].log(), policy
    )
    return log_weights.to(points)


def _maximise(log_p: Tensor, log_q: Tensor, policy: MixturePolicy) -> Tensor:
    """``log_p`` is ``(num_points,)``, ``log_q`` is ``(num_points, num_components)``."""
    log_total = log_q.logsumexp(-1)
    shares = (log_q - log_total.unsqueeze(-1)).exp()
    expect = shares / shares.sum(0)  # column k takes the expectation under component k
    smallest = torch.finfo(shares.dtype).tiny
    log_weights = log_q.new_zeros(log_q.shape[-1]).log_softmax(0)
    for iteration in range(policy.max_iterations + 1):
        weights = log_weights.exp()
        log_mixture = log_total + (shares @ weights).clamp(min=smallest).log()
        values = expect.mT @ (log_p - log_mixture)
        elbo = weights @ values
        if values.max() - elbo < policy.tolerance or iteration == policy.max_iterations:
            break
        log_weights = (log_weights + values).log_softmax(0)
    return log_weights


def reliability(
    guide: Any,
    target: Target,
    policy: CorrectionPolicy = DEFAULT.correction,
    wide: CorrectionPolicy | None = None,
) -> LogWeights:
    """Return log-weights of a guide with an exact density, of 2,000 draws.

    If the policy accepts them, up to 8,000 more draws must agree, as many as a few seconds allow:
    a mode that the guide hardly covers has one draw in a thousand, and no other draw reveals it.

    :param wide: widens the noise of some of the first draws, as it always is of the others.
    """
    found = exact_log_weights(target, guide, policy.num_weighed, wide=wide)[1]
    if not policy.accepts(found):
        return found
    most = policy.num_weighed_again
    seconds = seconds_near(target.log_prob, target.init_loc, not target.is_vectorized)(most)
    number = min(most, int(policy.seconds * most / seconds))
    if number <= policy.num_weighed:
        return found
    more = exact_log_weights(target, guide, number, wide=policy)[1]
    return found if policy.confirms(more, found.efficiency) else more


@torch.no_grad()
def matched_modes(
    points: Tensor,
    weights: LogWeights,
    max_components: int = 1,
    policy: CorrectionPolicy = DEFAULT.correction,
) -> Modes | None:
    """Fit normal distributions to weighted draws.

    A single one has their moments: its tails are heavier than those of the Gaussian at the mode.

    :param points: unconstrained draws, ``(num_samples, latent_dim)``.
    :param weights: their weights.
    :param max_components: the number of distributions, at most; fewer for few effective draws.
    :returns: the distributions, with their log-weights in place of ELBOs; None for too few
        effective draws.
    """
    affordable = weights.effective_sample_size / (policy.matched_per_dim * points.shape[-1])
    if not affordable > 1:
        return None
    log_weights, loc, scale_tril = fit_normal_mixture(
        points,
        weights.shares,
        min(max_components, int(affordable)),
        weights.effective_sample_size,
    )
    return Modes(loc, scale_tril, log_weights)


def guide_of(target: Target, modes: Modes) -> AutoImplicit | AutoMixture:
    """Return :func:`exact_guide` for the arguments of a target, with weights by the ELBOs.

    :param target: the posterior.
    :param modes: those of :func:`matched_modes`, for instance.
    """
    guide = exact_guide(target.model, modes, *target.args, **target.kwargs)
    if isinstance(guide, AutoMixture):
        guide.log_weights = modes.elbo.log_softmax(0)
    return guide


def corrected_draws(
    guide: Any,
    target: Target,
    num_samples: int,
    efficiency: float,
    policy: CorrectionPolicy = DEFAULT.correction,
    symmetries: Symmetries | None = None,
) -> dict[str, Tensor]:
    """Resample draws of a guide with an exact density by their Pareto-smoothed weights.

    :param efficiency: the effective sample size of these weights, as a share.
    :param symmetries: symmetries of the posterior, by random members of which the draws are moved.
    :returns: constrained, by site, ``(num_samples, *site_shape)``, in random order.
    """
    efficiency *= policy.usual_share
    proposals = math.ceil(policy.oversampling * num_samples / efficiency)
    number = max(proposals, policy.least_proposals)
    draws, log_weights = exact_log_weights(target, guide, number, wide=policy)
    drawn = draws[log_weights.resample(num_samples)]
    return target.constrain(symmetries.shuffled(drawn) if symmetries else drawn)


def joint_draws(found: Any, marginal: Marginal, num_samples: int) -> tuple[StoredDraws, float]:
    """Return draws of all latent variables, and the largest error of their density in nats.

    :param found: the fit of the remaining variables.
    :param marginal: their density.
    :param num_samples: the number of draws.
    """
    joint = _JointDraws(found.symmetries, marginal)
    if found.refined is None and found.correction is not None:
        latent, known = _joint_by_weights(found, joint, num_samples)
    else:
        latent, known = _joint_by_chains(found, joint, num_samples)
    return StoredDraws(marginal.target.constrain(latent), **known), joint.max_fault


class _JointDraws:
    """Draws of the integrated variables, one for each value of the remaining ones."""

    def __init__(self, symmetries: Symmetries | None, marginal: Marginal) -> None:
        self._symmetries, self._marginal = symmetries, marginal
        self._latents: list[Tensor] = []
        self._faults: list[Tensor] = []
        self._kept: list[float] = []

    @property
    def max_fault(self) -> float:
        """The largest error of a log-density among draws that are kept; infinite without any."""
        return max(self._kept, default=math.inf)

    def draw(self, rest: Tensor) -> Tensor:
        """Draw the integrated variables, and return the density of the remaining ones."""
        # Before the other variables are drawn given these; the density does not change.
        rest = self._symmetries.shuffled(rest) if self._symmetries else rest
        latent, value, fault = self._marginal.draw(rest)
        self._latents.append(latent)
        self._faults.append(fault.masked_fill(~value.isfinite(), 0.0))
        # Where scales vanish, rounding may make any value: one such draw would get all the weight.
        limits = self._marginal.policy
        is_wrong = ~(fault <= limits.max_fault)
        is_rare = is_wrong.double().mean() <= limits.max_faulty
        return value.masked_fill(is_wrong, -math.inf) if is_rare else value

    def take(self) -> tuple[Tensor, Tensor]:
        """Return all latent variables since the last call, and the errors of their densities.

        :returns: ``(num_samples, latent_dim)`` and ``(num_samples,)``.
        """
        latents, faults = torch.cat(self._latents), torch.cat(self._faults)
        self._latents, self._faults = [], []
        return latents, faults

    def keep(self, faults: Tensor) -> None:
        """Note the errors of draws that are kept."""
        self._kept.append(faults.amax().item())


def _joint_by_weights(
    found: Any, joint: _JointDraws, num_samples: int
) -> tuple[Tensor, dict[str, Any]]:
    """Resample joint draws by the importance weights of the remaining variables."""
    # Sobol points: moments of the remaining variables are then almost those of an integral.
    like, seed = found.target.init_loc, int(torch.randint(2**31, ()))
    noise, policy = normal_draws(num_samples, len(like) + 2, like, seed), found.policy.correction
    guide, is_settled = found.guide, False
    while guide is not None:
        rest, weights = exact_log_weights(
            found.target, guide, num_samples, log_prob=joint.draw, noise=noise, wide=policy
        )
        latent, faults = joint.take()
        is_settled = policy.confirms(weights, found.correction)
        is_mixture = isinstance(guide, AutoMixture)
        covers_modes = is_mixture and (found.num_modes or 1) > 1  # which another fit might lose
        if is_settled or covers_modes or guide is not found.guide:
            break
        most = policy.max_components if is_mixture else 1
        matched = matched_modes(rest, weights, most, policy)
        guide = None if matched is None else guide_of(found.target, matched)
    index = weights.resample(num_samples)
    joint.keep(faults[index])
    latent, order = latent[index], index.argsort()
    again = order[1:][index[order].diff() == 0]
    if len(again):  # a point that repeats has other values of the integrated variables
        joint.draw(rest[index[again]])
        latent[again], faults = joint.take()
        joint.keep(faults)
    doubts = () if is_settled else (f"importance weights of the remaining variables: {weights}",)
    return latent, {"settled": is_settled, "modes_weighed": True, "doubts": doubts}


def _joint_by_chains(
    found: Any, joint: _JointDraws, num_samples: int
) -> tuple[Tensor, dict[str, Any]]:
    """Complete draws of the remaining variables, evenly spaced along their chains."""
    stored = found.posterior
    if not isinstance(stored, StoredDraws):
        stored = StoredDraws(found.sample(num_samples), settled=True)
    index = torch.arange(stored.num_draws).reshape(stored.num_chains, -1)
    index = index[:, :: max(1, math.ceil(stored.num_draws / num_samples))].flatten()
    joint.draw(found.target.unconstrain({k: v[index] for k, v in stored.samples.items()}))
    names = ("settled", "modes_weighed", "doubts", "drift", "num_independent", "num_chains")
    latent, faults = joint.take()
    joint.keep(faults)
    return latent, {name: getattr(stored, name) for name in names}
