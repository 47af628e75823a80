# SPDX-License-Identifier: Apache-2.0
"""The guides that ``fit`` chooses between: made, weighed, chosen."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyro.distributions.constraints as constraints
import torch
from pyro import poutine
from pyro.distributions import TransformedDistribution
from pyro.infer.autoguide import AutoGuide, AutoMultivariateNormal, init_to_median
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_implicit.density.cost import seconds_near
from pyro_implicit.density.initialisation import (
    FlatPriorStart,
    example_tensor,
    without_sequential_plates,
)
from pyro_implicit.density.mode_search import Modes
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.coverage import uncovered_modes
from pyro_implicit.generators import AutoregressiveGenerator
from pyro_implicit.guides import AutoImplicit, AutoMixture, AutoSemiImplicit
from pyro_implicit.guides.affine_frame import Frame
from pyro_implicit.guides.exactness import has_exact_density
from pyro_implicit.guides.names import own_names
from pyro_implicit.infer.bound import FoldWarning, weighted_draws
from pyro_implicit.ops.importance_weights import describe_weights, pareto_smoothed
from pyro_implicit.ops.matrices import lower_factor
from pyro_implicit.runtime.printing import short_repr

__all__ = [
    "Candidate",
    "MixtureWeights",
    "Reliability",
    "choose",
    "corrected_draws",
    "exact_guide",
    "exact_log_weights",
    "frame_of_draws",
    "gaussian_guide",
    "mixture_weights",
    "reliability",
    "semi_implicit_guide",
    "set_weights",
    "weigh",
]


LEAST_MASS = 0.01
TIE = 0.001  # nats
CHUNK_SIZE = 2000


@dataclass(repr=False)
class Candidate:
    """A guide as it was when it was weighed.

    ``log_weights`` are log p - log q at its draws, in increasing order, without the lowest
    hundredth, and ``bound`` is their mean, -inf if it is not a number. ``draws`` are others, in
    unconstrained space, ``(num_draws, latent_dim)``; ``losses`` those of its training.
    """

    name: str
    guide: AutoGuide
    log_weights: Tensor
    draws: Tensor
    losses: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict, repr=False)
    __repr__ = short_repr

    @property
    def bound(self) -> float:
        """The mean of the log-weights."""
        value = self.log_weights.mean().item()
        return -math.inf if math.isnan(value) else value

    def falls_short(self, other: Candidate) -> bool:
        """Whether its bound is lower than another's by more than a thousandth of a nat and two
        standard errors of their difference."""
        error = 0.0
        for one in (self, other):
            error += one.log_weights.var().nan_to_num(0.0).item() / len(one.log_weights)
        return self.bound < other.bound - max(TIE, 2 * math.sqrt(error))

    @property
    def gap(self) -> float:
        """How far guide and posterior are from each other, in nats, if they are near."""
        value = 0.5 * self.log_weights.var().item()
        return math.inf if math.isnan(value) else value

    def restore(self) -> None:
        """Put the guide back to what it was."""
        self.guide.load_state_dict(self.state)


def exact_guide(
    model: Callable[..., Any], modes: Modes, *args: Any, **kwargs: Any
) -> AutoImplicit | AutoMixture:
    """A guide with an exact density that starts as the Gaussian of each mode.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> modes = Modes(torch.zeros(1, 1), torch.ones(1, 1, 1), torch.zeros(1))
    >>> exact_guide(model, modes).sample_posterior(5)["x"].shape
    torch.Size([5])

    :param model: of which it is to be a guide.
    :param modes: as found by :func:`~pyro_implicit.density.find_modes`.
    :param args: of the model, as ``kwargs``.
    :returns: for several modes a mixture, whose weights are still equal.
    """
    guide: AutoImplicit | AutoMixture
    parts = [
        AutoImplicit(model, AutoregressiveGenerator, frame=Frame(loc, scale_tril=scale_tril))
        for loc, scale_tril in zip(modes.loc, modes.scale_tril, strict=True)
    ]
    guide = parts[0] if len(parts) == 1 else AutoMixture(model, parts)
    return _set_up(guide, args, kwargs)


def semi_implicit_guide(
    model: Callable[..., Any], frame: Frame, *args: Any, **kwargs: Any
) -> AutoSemiImplicit:
    """The guide for shapes that no injective generator makes.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> guide = semi_implicit_guide(model, Frame(torch.zeros(1), scale=torch.ones(1)))
    >>> guide.sample_posterior(5)["x"].shape
    torch.Size([5])

    :param model: of which it is to be a guide.
    :param frame: in which it starts.
    :param args: of the model, as ``kwargs``.
    """
    return _set_up(AutoSemiImplicit(model, frame=frame), args, kwargs)


def set_weights(density: Target, guide: AutoImplicit | AutoMixture) -> None:
    """Give a mixture its best weights, by :func:`mixture_weights`.

    **Example:**

    >>> import pyro
    >>> def model():
    ...     x = pyro.sample("x", pyro.distributions.Normal(0.0, 5.0))
    ...     pyro.factor("modes", torch.logaddexp(-50 * (x - 3) ** 2, 1 - 50 * (x + 3) ** 2))
    >>> modes = Modes(torch.tensor([[3.0], [-3.0]]), torch.full((2, 1, 1), 0.1), torch.zeros(2))
    >>> guide = exact_guide(model, modes)
    >>> set_weights(Target(model), guide)
    >>> guide.log_weights.detach().diff().round(decimals=1)
    tensor([1.])

    :param density: of the model.
    :param guide: any other than an :class:`AutoMixture` stays as it is.
    """
    if isinstance(guide, AutoMixture):
        parts = guide.get_posterior().components
        guide.log_weights = mixture_weights(density, parts).log_weights


def frame_of_draws(draws: Tensor) -> Frame:
    """The Gaussian with the moments of draws.

    **Example:**

    >>> frame_of_draws(torch.tensor([[1.0], [3.0], [5.0]])).scale_tril.round(decimals=3)
    tensor([[2.]])

    :param draws: ``(num_draws, latent_dim)``; those that are not finite are left out.
    """
    draws = draws[draws.isfinite().all(-1)]
    centered = (draws - draws.mean(0)) / (len(draws) - 1) ** 0.5
    return Frame(draws.mean(0), scale_tril=lower_factor(centered.mT))


@torch.no_grad()
def weigh(
    name: str,
    guide: AutoGuide,
    density: Target,
    losses: list[float] | None = None,
    num_draws: int = 10_000,
) -> Candidate:
    """Judge a guide by log p - log q at a thousand of its draws, without the lowest ten.

    There lie the few draws of a guide that covers too much, which cost nothing but nats.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> modes = Modes(torch.zeros(1, 1), torch.ones(1, 1, 1), torch.zeros(1))
    >>> found = weigh("gaussian", exact_guide(model, modes), Target(model))
    >>> f"{abs(found.bound):.3f}"
    '0.000'

    :param name: of the candidate.
    :param guide: an autoguide with a density or a semi-implicit one.
    :param density: of the model.
    :param losses: of its training.
    :param num_draws: to be kept in the candidate.
    """
    args, kwargs = density.args, density.kwargs
    log_weights = _log_weights(guide, density)
    log_weights = log_weights.sort().values[len(log_weights) // 100 :]
    state = {name: value.clone() for name, value in guide.state_dict().items()}
    draws = guide.get_posterior(*args, **kwargs).sample(torch.Size((num_draws,)))
    return Candidate(name, guide, log_weights, draws, losses or [], state)


def choose(candidates: list[Candidate], modes: Modes, density: Target) -> tuple[Candidate, str]:
    """The candidate of the highest bound, of those that cover the modes that the best covers.

    A guide that leaves out a mode of a tenth of the mass loses a tenth of a nat by it, and may
    still be ahead of another: nothing in its bound tells of what it does not see.

    **Example:**

    >>> import pyro
    >>> def model():
    ...     x = pyro.sample("x", pyro.distributions.Normal(0.0, 5.0))
    ...     pyro.factor("modes", torch.logaddexp(-50 * (x - 3) ** 2, 1 - 50 * (x + 3) ** 2))
    >>> modes = Modes(torch.tensor([[3.0], [-3.0]]), torch.full((2, 1, 1), 0.1), torch.zeros(2))
    >>> density, first = Target(model), Modes(*(part[1:] for part in modes))
    >>> guides = {"one": exact_guide(model, first), "both": exact_guide(model, modes)}
    >>> candidates = [weigh(name, guide, density) for name, guide in guides.items()]
    >>> choose(candidates, modes, density)[1]
    'both: the highest bound'

    :param candidates: at least one.
    :param modes: of the search.
    :param density: of the model.
    :returns: the chosen one, and why in words.
    """
    # A tie goes to a guide that was trained.
    ranked = sorted(candidates, key=lambda one: -one.bound)
    if math.isfinite(ranked[0].bound):
        tied = [one for one in candidates if not one.falls_short(ranked[0])]
        best = max(tied, key=lambda one: (bool(one.losses), one.bound))
        ranked.sort(key=lambda one: one is not best)
    if len(modes.loc) == 1 or not math.isfinite(ranked[0].bound):
        return ranked[0], f"{ranked[0].name}: the highest bound"
    left_out = [_left_out(one, modes, density, ranked[0].bound) for one in ranked]
    fewest = min(left_out)
    chosen = next(one for one, mass in zip(ranked, left_out, strict=True) if mass <= fewest)
    if chosen is ranked[0]:
        return chosen, f"{chosen.name}: the highest bound"
    return chosen, (
        f"{chosen.name}: {ranked[0].name} has the higher bound, but leaves out modes of about "
        f"{left_out[0]:.1%} of the mass"
    )


def _left_out(one: Candidate, modes: Modes, density: Target, log_evidence: float) -> float:
    """The mass of the modes that a guide has next to no draws of."""
    draws = one.draws[one.draws.isfinite().all(-1)]
    found = uncovered_modes(modes.loc, draws, density, log_evidence, LEAST_MASS)
    return found.mass[found.uncovered].sum().item()


def _log_weights(guide: AutoGuide, density: Target, num_draws: int = 1000) -> Tensor:
    """Log p - log q at draws, -inf where the model has no density or raises an error."""
    if has_exact_density(guide):
        return exact_log_weights(guide, density, num_draws)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FoldWarning)  # the stage sees it and trains another
        return weighted_draws(
            density.model,
            guide,
            *density.args,
            num_samples=num_draws,
            num_starts=2,
            model_kwargs=density.kwargs,
        ).log_weights


@torch.no_grad()
def exact_log_weights(guide: AutoGuide, density: Target, num_draws: int) -> tuple[Tensor, Tensor]:
    """Draws and log p - log q of a guide whose density is exact.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.LogNormal(0.0, 1.0))
    >>> guide = exact_guide(model, Modes(torch.zeros(1, 1), torch.ones(1, 1, 1), torch.zeros(1)))
    >>> draws, log_weights = exact_log_weights(guide, Target(model), 5)
    >>> draws.shape, log_weights.shape
    (torch.Size([5, 1]), torch.Size([5]))

    :param guide: of those that :func:`~pyro_implicit.guides.exactness.has_exact_density` tells.
    :param density: of the model.
    :param num_draws: of the guide.
    :returns: ``(num_draws, latent_dim)`` in unconstrained space, and ``(num_draws,)``, -inf where
        the model has no density.
    """
    q = guide.get_posterior(*density.args, **density.kwargs)
    if not isinstance(guide, AutoMixture):
        q = TransformedDistribution(guide.get_base_dist(), guide.get_transform())
    parts, log_weights = [], []
    for first in range(0, num_draws, CHUNK_SIZE):
        part = q.sample(torch.Size((min(CHUNK_SIZE, num_draws - first),)))
        parts.append(part)
        log_weights.append(density.log_prob(part) - q.log_prob(part))
    found = torch.cat(log_weights)
    return torch.cat(parts), found.masked_fill(~found.isfinite(), -math.inf)


def _set_up(guide: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    guide = own_names(guide)
    # Outside a call of the guide, so that the parameters are its own and not yet in Pyro's store.
    guide._setup_prototype(*args, **kwargs)
    return guide


LEAST_DRAWS, MOST_DRAWS, DRAWS_OF_ALL = 100, 1000, 8000


class MixtureWeights(NamedTuple):
    """Normalised ``log_weights`` ``(num_components,)``, -inf for a component without a finite
    log-density, and the ``elbo`` ``()`` of the mixture with these weights.
    """

    log_weights: Tensor
    elbo: Tensor


@torch.no_grad()
def mixture_weights(
    density: Target,
    components: Sequence[Distribution],
    num_draws: int | None = None,
    tolerance: float = 1e-4,
    max_iterations: int = 1000,
) -> MixtureWeights:
    r"""Maximise the exact ELBO of a mixture :math:`q_w = \sum_k w_k q_k` over its weights.

    With p the model's unnormalised density,

    .. math:: F(w) = \sum_k w_k a_k(w), \qquad a_k(w) = E_{q_k}[\log p - \log q_w].

    F is concave, as the entropy is, and :math:`\partial F / \partial w_k = a_k(w) - 1`. Since

    .. math:: F(w) = F(v) + \sum_k (w_k - v_k)\, a_k(v) - KL(q_w \| q_v)

    for any weights v, and :math:`KL(q_w \| q_v) \le KL(w \| v)`, a lower bound of F(w) that
    touches it at v is largest at

    .. math:: w_k \propto v_k \, e^{a_k(v)},

    so no step of this iteration lowers F, and it leads to the maximum. Concavity also says how far
    that is: :math:`\max_k a_k(w) - F(w)` at most. Components that do not overlap are done in one
    step, with weights proportional to :math:`e^{ELBO_k}`; of two that are equal, only the sum of
    the weights counts, and that is not counted twice.

    The expectations are over the draws of all components, each with
    :math:`q_k / \sum_j q_j` as its weight in that of component k: alike components then get alike
    values. Draws at which the log-density is not finite are left out, and their component is
    judged as cut to the others: a share s of good draws costs it :math:`-\log s`.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 5.0))
    ...     pyro.factor("modes", torch.logaddexp(-50 * (x - 3) ** 2, 1 - 50 * (x + 3) ** 2))
    >>> parts = [dist.Normal(m, 0.1).expand([1]).to_event(1) for m in (3.0, -3.0)]
    >>> weights = mixture_weights(Target(model), parts)
    >>> weights.log_weights.diff().round(decimals=1)
    tensor([1.])

    :param density: of the model.
    :param components: distributions of the unconstrained latent vector with a density at any point,
        such as ``AutoMixture(...).get_posterior().components``.
    :param num_draws: of each component; by default 1,000, or 8,000 of all if they are more than
        eight, as each is judged at the draws of all.
    :param tolerance: in nats, how near to the maximum to stop.
    :param max_iterations: stops there in any case; overlapping components take many.
    :raises ValueError: for no components, or if the log-density is finite at no draw.
    :raises NotImplementedError: for a component without a density.

    **References:**

    1. Blahut (1972), *Computation of channel capacity and rate-distortion functions*: the same
       iteration, with :math:`-\log p` as the cost of a symbol.
    """
    if not components:
        raise ValueError("mixture_weights wants at least one component")
    if num_draws is None:
        num_draws = max(LEAST_DRAWS, min(MOST_DRAWS, DRAWS_OF_ALL // len(components)))
    draws = [q.sample(torch.Size((num_draws,))) for q in components]
    log_p = torch.stack([density.log_prob(points) for points in draws])
    points = torch.cat(draws)
    # In float64, as the densities of one component at another's draws are many powers apart. A
    # density that overflows does so far from all draws of its component.
    log_q = torch.stack([q.log_prob(points) for q in components], -1).double()
    log_q = log_q.masked_fill(log_q.isnan(), -math.inf)
    log_p = log_p.double()
    is_good = log_p.isfinite() & log_q.logsumexp(-1).isfinite().reshape(log_p.shape)
    share = is_good.double().mean(-1)
    if not is_good.any():
        raise ValueError(
            f"the model's log-density is finite at none of {len(points)} draws of the components. "
            "Cure: train them first, each from a start in its mode"
        )
    kept = share > 0
    chosen = is_good.flatten()
    found = _maximise(
        log_p.flatten()[chosen],
        log_q[chosen][:, kept] - share[kept].log(),
        tolerance,
        max_iterations,
    )
    log_weights = torch.full_like(share, -math.inf)
    log_weights[kept] = found.log_weights
    return MixtureWeights(log_weights.to(points), found.elbo.to(points))


def _maximise(
    log_p: Tensor, log_q: Tensor, tolerance: float, max_iterations: int
) -> MixtureWeights:
    """The iteration.

    :param log_p: ``(num_points,)``.
    :param log_q: ``(num_points, num_components)``.
    """
    log_total = log_q.logsumexp(-1)
    shares = (log_q - log_total.unsqueeze(-1)).exp()
    expect = shares / shares.sum(0)  # column k takes the expectation under component k
    smallest = torch.finfo(shares.dtype).tiny
    log_weights = log_q.new_zeros(log_q.shape[-1]).log_softmax(0)
    for iteration in range(max_iterations + 1):
        weights = log_weights.exp()
        log_mixture = log_total + (shares @ weights).clamp(min=smallest).log()
        values = expect.mT @ (log_p - log_mixture)
        elbo = weights @ values
        if values.max() - elbo < tolerance or iteration == max_iterations:
            break
        log_weights = (log_weights + values).log_softmax(0)
    return MixtureWeights(log_weights, elbo)


def gaussian_guide(
    model: Callable[..., Any],
    loc: Tensor,
    scale_tril: Tensor,
    *args: Any,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> AutoMultivariateNormal:
    """Pyro's full-rank guide, started at a given Gaussian: for its own ELBOs.

    As the frame of another guide, give ``frame=Frame(loc, scale_tril=scale_tril)``.

    **Example:**

    >>> import pyro, torch
    >>> def model():
    ...     pyro.sample("x", pyro.distributions.LogNormal(torch.zeros(2), 1.0).to_event(1))
    >>> guide = gaussian_guide(model, torch.ones(2), torch.tensor([[1.0, 0.0], [2.0, 3.0]]))
    >>> guide.get_posterior().covariance_matrix.detach().round(decimals=3)
    tensor([[ 1.,  2.],
            [ 2., 13.]])

    :param model: of which it is to be a guide.
    :param loc: in unconstrained space, ``(latent_dim,)``.
    :param scale_tril: ``(latent_dim, latent_dim)``.
    :param args: of the model, as ``kwargs``.
    :param model_kwargs: more keyword arguments of the model: those with a name of ours.
    """
    kwargs = {**kwargs, **(model_kwargs or {})}
    start = FlatPriorStart(init_to_median, like=example_tensor(model, args, kwargs))
    guide = own_names(AutoMultivariateNormal(without_sequential_plates(model), init_loc_fn=start))
    with poutine.block():
        guide._setup_prototype(*args, **kwargs)
    scale = scale_tril.diagonal()
    guide.loc = nn.Parameter(loc.clone())
    guide.scale = PyroParam(scale.clone(), constraints.positive)
    guide.scale_tril = PyroParam(scale_tril / scale.unsqueeze(-1), constraints.unit_lower_cholesky)
    return guide


OVERSAMPLING, LEAST_PROPOSALS = 4, 1000
NUM_WEIGHED, NUM_WEIGHED_AGAIN = 2000, 8000
NUM_TIMED, SECONDS_AGAIN = 100, 3.0
MAX_KHAT, LEAST_EFFICIENCY, EVEN = 0.5, 0.5, 0.99
AGREES = 0.75  # of the efficiency seen before: that of good weights hangs on their number less


class Reliability(NamedTuple):
    """``khat``, the tail index of a guide's importance weights, infinite where these have no tail,
    and ``efficiency``, their effective sample size as a share of the draws.
    """

    khat: float
    efficiency: float

    @property
    def suffices(self) -> bool:
        """Whether draws can be resampled by such weights."""
        # The tail of even weights is that of rounding.
        return self.efficiency > EVEN or (
            self.efficiency > LEAST_EFFICIENCY and self.khat < MAX_KHAT
        )

    def __str__(self) -> str:
        return describe_weights(self.khat, self.efficiency)


def reliability(guide: Any, density: Target) -> Reliability:
    """Of the smoothed weights of 2,000 new draws.

    Where these are good, up to 8,000 more have to agree, as many as a few seconds allow: a mode
    that the guide only touches is met by one draw in a thousand, and no weight tells of it before.

    :param guide: with an exact density, see
        :func:`~pyro_implicit.guides.exactness.has_exact_density`.
    :param density: of the model.
    """
    log_weights = exact_log_weights(guide, density, NUM_WEIGHED)[1]
    found = _judge(log_weights)
    number = _affordable(density) if found.suffices else 0
    if number > NUM_WEIGHED:
        more = exact_log_weights(guide, density, number)[1]
        again = _judge(torch.cat([log_weights, more]))
        if again.efficiency < AGREES * found.efficiency:
            return again
    return found


def _affordable(density: Target) -> int:
    """How many more draws are weighed."""
    one_by_one = not density.is_vectorized
    seconds = seconds_near(density.log_prob, density.init_loc, NUM_TIMED, one_by_one)
    return min(NUM_WEIGHED_AGAIN, int(SECONDS_AGAIN * NUM_TIMED / seconds))


def _judge(log_weights: Tensor) -> Reliability:
    smoothed = pareto_smoothed(log_weights.double())
    squares = smoothed.log_weights.mul(2).exp().sum().item()
    return Reliability(smoothed.khat, 1 / (len(log_weights) * squares))


def corrected_draws(guide: Any, density: Target, num_samples: int) -> dict[str, Tensor]:
    """Draws resampled by their smoothed weights, one out of four.

    :param guide: as for :func:`reliability`.
    :returns: constrained, by site, ``(num_samples, *site_shape)``, in random order.
    """
    number = max(OVERSAMPLING * num_samples, LEAST_PROPOSALS)
    draws, log_weights = exact_log_weights(guide, density, number)
    weights = pareto_smoothed(log_weights.double()).log_weights.exp()
    # Systematic resampling: as even as the weights allow.
    ticks = (torch.arange(num_samples).to(weights) + torch.rand(()).to(weights)) / num_samples
    index = torch.searchsorted(weights.cumsum(0), ticks).clamp(max=number - 1)
    return density.constrain(draws[index[torch.randperm(num_samples)]])
