# SPDX-License-Identifier: Apache-2.0
"""The guides that ``fit`` chooses between: made, weighed, chosen."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.distributions import TransformedDistribution
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_implicit.density.mode_search import Modes
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.coverage import uncovered_modes
from pyro_implicit.fitting.weights import mixture_weights
from pyro_implicit.generators import AutoregressiveGenerator
from pyro_implicit.guides import AutoImplicit, AutoMixture, AutoSemiImplicit
from pyro_implicit.guides.affine_frame import Frame
from pyro_implicit.guides.exactness import has_exact_density
from pyro_implicit.guides.names import own_names
from pyro_implicit.infer.bound import FoldWarning, weighted_draws
from pyro_implicit.ops.factors import lower_factor
from pyro_implicit.runtime.printing import short_repr

__all__ = [
    "Candidate",
    "choose",
    "exact_guide",
    "exact_log_weights",
    "frame_of_draws",
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
