# SPDX-License-Identifier: Apache-2.0
"""Whether reference draws are good enough to judge a guide by."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.distances import pairwise_distances
from pyro_implicit.diagnostics.labels import index_label
from pyro_implicit.guides.stored_draws import StoredDraws
from pyro_implicit.infer.bound import weighted_draws
from pyro_implicit.mcmc import Refined
from pyro_implicit.runtime.random_stream import same_streams

__all__ = ["ReferenceCheck", "chains_of", "check_mixing", "missing_mass"]

LEAST_DRAWS = 4  # of a chain
LEAST_ESS = 100
MAX_R_HAT = 1.05
MAX_POINTS = 1000
FAR = 2.0  # times the distance that one in a hundred has to its nearest neighbour
TYPICAL = 0.05  # quantile of the reference's log-densities
LEAST_MASS = 0.01
MAX_KHAT = 0.7


@dataclass(frozen=True)
class ReferenceCheck:
    """What speaks against reference draws.

    :ivar effective_sample_size: the smallest of any coordinate; None of fewer than 4 draws in a
        chain.
    :ivar worst_ess: which coordinate that is.
    :ivar independent_draws: how many independent draws the reference is worth on average over
        coordinates, at most its number of draws.
    :ivar r_hat: the largest split R-hat of any coordinate; None where chains are not told apart.
    :ivar worst_r_hat: which coordinate that is.
    :ivar settled: whether a stopping rule of their own has seen that many short chains forgot where
        they began, so that R-hat does not count.
    :ivar missing: the mass of the posterior, as a share, of places where the guide has draws and
        the reference has none; None where that was not looked for.
    """

    effective_sample_size: float | None = None
    worst_ess: str = ""
    r_hat: float | None = None
    worst_r_hat: str = ""
    settled: bool = False
    missing: float | None = None
    independent_draws: float | None = None

    @property
    def is_worse(self) -> bool:
        """Whether the reference lacks mass that the guide has."""
        return self.missing is not None and self.missing > LEAST_MASS

    def faults(self) -> Iterator[str]:
        """In words, the gravest first."""
        if self.is_worse:
            yield f"no draws where about {self.missing:.0%} of the mass is, as the guide knows"
        if self.r_hat is not None and not self.settled and not self.r_hat <= MAX_R_HAT:
            yield f"R-hat {self.r_hat:.2f} of `{self.worst_r_hat}`"
        if self.effective_sample_size is not None and self.effective_sample_size < LEAST_ESS:
            yield f"{self.effective_sample_size:.0f} effective draws of `{self.worst_ess}`"


def chains_of(source: Any, site_dims: Mapping[str, int]) -> dict[str, Tensor] | None:
    """Draws with their chains apart, ``(num_chains, num_draws, *site_shape)``, None where nobody
    knows the chains.

    :param source: what has ``get_samples(group_by_chain=True)``, or a dict.
    :param site_dims: of each site's values: a dict of draws with one dimension more has chains.
    """
    if isinstance(source, Mapping):
        common = [name for name in source if name in site_dims]
        grouped = bool(common) and all(
            source[name].dim() == site_dims[name] + 2 and source[name].shape[1] >= LEAST_DRAWS
            for name in common
        )
        return dict(source) if grouped else None
    with suppress(TypeError, ValueError):  # of no signature
        if "group_by_chain" in inspect.signature(source.get_samples).parameters:
            return dict(source.get_samples(group_by_chain=True))
    return None


def check_mixing(
    draws: Mapping[str, Tensor], chains: Mapping[str, Tensor] | None, source: Any
) -> ReferenceCheck:
    """Effective sample size and R-hat of the worst coordinates.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(4, 200) + torch.tensor([0.0, 0.0, 0.0, 5.0]).unsqueeze(-1)
    >>> found = check_mixing({"x": x.flatten()}, {"x": x}, None)
    >>> next(found.faults())
    'R-hat 2.49 of `x`'

    :param draws: by site, ``(num_draws, *site_shape)``, in the order of the chain or chains.
    :param chains: the same with their chains apart.
    :param source: that they are from.
    """
    one_chain = {name: value.unsqueeze(0) for name, value in draws.items()}
    ess, worst_ess = math.inf, ""
    r_hat, worst_r_hat = 0.0, ""
    length = math.inf
    inverse_sizes = []
    for name in draws:
        value = (one_chain if chains is None else chains)[name]
        if not value.is_floating_point() or value.shape[1] < LEAST_DRAWS:
            continue
        value = value.detach().double().flatten(2) if value.dim() > 2 else value.double()[..., None]
        shape = draws[name].shape[1:]
        length = min(length, value.shape[1])
        moves = value.flatten(0, 1).std(0) > 0
        if not moves.any():
            continue
        found = effective_sample_size(value[..., moves])
        inverse_sizes.append(1 / found.nan_to_num(math.inf).clamp(1, len(draws[name])))
        index = int(found.nan_to_num(math.inf).argmin())
        if found[index] < ess:
            ess, worst_ess = found[index].item(), _label(name, shape, moves, index)
        if chains is not None:
            found = split_gelman_rubin(value[..., moves]).nan_to_num(1.0)
            index = int(found.argmax())
            if found[index] > r_hat:
                r_hat, worst_r_hat = found[index].item(), _label(name, shape, moves, index)
    return ReferenceCheck(
        effective_sample_size=ess if math.isfinite(ess) else None,
        worst_ess=worst_ess,
        r_hat=r_hat if r_hat > 0 and length >= LEAST_DRAWS else None,
        worst_r_hat=worst_r_hat,
        settled=isinstance(source, Refined) and source.settled,
        # Variances add up over coordinates, and the variance of a mean goes as 1 / size.
        independent_draws=1 / torch.cat(inverse_sizes).mean().item() if inverse_sizes else None,
    )


@torch.no_grad()
def missing_mass(
    model: Callable[..., Any],
    guide: Any,
    guide_draws: Mapping[str, Tensor],
    reference_draws: Mapping[str, Tensor],
    args: tuple,
    kwargs: dict[str, Any],
) -> float | None:
    """The posterior's mass in places where the guide has draws and the reference none.

    Far is a draw whose nearest neighbour in the reference is twice as far off as that of one in a
    hundred of the reference's own draws. If the guide has a density and its importance weights
    are reliable, they are asked for the mass of such draws; else it is the share of the guide's
    draws that are far while the log-density there is above the reference's lowest twentieth.

    :param model: of both.
    :param guide: or its draws.
    :param guide_draws: by site, ``(num_draws, *site_shape)``.
    :param reference_draws: the same.
    :param args: of the model, as ``kwargs``.
    :returns: None where there is no way to look.
    """
    with same_streams(), suppress(Exception):  # the model's own, of any kind
        density = Target(model, *args, model_kwargs=kwargs)
        if not all(
            name in side for side in (guide_draws, reference_draws) for name in density.shapes
        ):
            return None
        reference = density.unconstrain(_some(reference_draws))
        found = density.unconstrain(_some(guide_draws))
        frame = _Neighbours(reference)
        far = frame.are_far(found)
        if far.double().mean() < LEAST_MASS:
            return 0.0
        by_weights = _weighted_share(density, guide, frame)
        if by_weights is not None:
            return by_weights
        limit = density.log_prob(reference).quantile(TYPICAL)
        return (far & (density.log_prob(found) > limit)).double().mean().item()
    return None


class _Neighbours:
    """Distances to the nearest of some points, in units of their standard deviations."""

    def __init__(self, points: Tensor) -> None:
        points = points.double()
        self.center, sd = points.mean(0), points.std(0)
        self.scale = torch.where(sd > 0, sd, torch.ones_like(sd))
        self.points = self._standard(points)
        own = pairwise_distances(self.points, self.points).fill_diagonal_(math.inf).amin(-1)
        self.limit = FAR * own.quantile(0.99)

    def _standard(self, points: Tensor) -> Tensor:
        return (points.double() - self.center) / self.scale

    def are_far(self, points: Tensor) -> Tensor:
        return pairwise_distances(self._standard(points), self.points).amin(-1) > self.limit


def _weighted_share(density: Target, guide: Any, frame: _Neighbours) -> float | None:
    if not callable(guide) or isinstance(guide, StoredDraws):
        return None
    try:
        weighted = weighted_draws(
            density.model, guide, *density.args, num_samples=MAX_POINTS, model_kwargs=density.kwargs
        )
    except ValueError:  # no density
        return None
    bound = weighted.bound()
    if bound.khat > MAX_KHAT and bound.effective_sample_size < 0.9 * MAX_POINTS:
        return None
    far = frame.are_far(density.unconstrain(weighted.draws))
    return weighted.log_weights.double().softmax(0)[far].sum().item()


def _some(draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A thousand of them at most, evenly spaced."""
    count = len(next(iter(draws.values())))
    return {name: value[:: -(-count // MAX_POINTS)] for name, value in draws.items()}


def _label(name: str, shape: torch.Size, moves: Tensor, index: int) -> str:
    position = int(moves.nonzero()[index])
    where = torch.unravel_index(torch.tensor(position), shape) if shape else ()
    return index_label(name, map(int, where))
