# SPDX-License-Identifier: Apache-2.0
"""Where a posterior's mass may lie: Gaussians found along the way from many starts."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.density.blame import blame
from pyro_implicit.density.cost import estimated_seconds, nearby
from pyro_implicit.density.gaussian_elbo import (
    antithetic_noise,
    finite_log_prob,
    gaussian_elbo,
    highest_draws,
    is_rounding,
)
from pyro_implicit.density.target import Target
from pyro_implicit.ops.factors import lower_factor, matvec, root_of_inverse
from pyro_implicit.runtime.printing import short_repr, steps_of
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = ["Modes", "find_modes", "seconds_of_climb"]

NUM_STARTS, NUM_DRAWS = 50, 16
MIN_DIP = 1.0  # nats
FAR_BELOW = 1e4  # nats
SAME = 0.3  # standard deviations between two tops that are one: paths end at .1
STEP_SIZES = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01, 1e-3)


class Modes(NamedTuple):
    """Gaussians at separate modes, best first: ``loc`` ``(num_modes, latent_dim)``,
    ``scale_tril`` ``(num_modes, latent_dim, latent_dim)``, ``elbo`` ``(num_modes,)``.
    """

    loc: Tensor
    scale_tril: Tensor
    elbo: Tensor

    def __repr__(self) -> str:
        return short_repr(self)


@torch.no_grad()
def find_modes(
    density: Target,
    num_starts: int = NUM_STARTS,
    max_rounds: int = 16,
    max_iterations: int = 100,
    num_draws: int = NUM_DRAWS,
    max_gap: float = 10.0,
    max_seconds: float = math.inf,
) -> Modes:
    r"""Climb a log-density from draws of the prior, and keep the best Gaussian of all ways up.

    Each step is one of Newton's, with the Hessian's eigenvalues made positive, so that saddles
    repel, and with the best of a few step sizes. At each point u of a path the Gaussian
    :math:`N(u, |H|^{-1})` is judged by its ELBO: at a mode it is Laplace's approximation, and where
    there is none, as in a funnel, it is the best on the way. Two tops are separate modes if the
    log-density between them dips by more than 1 nat. The search goes on from new starts until
    every mode was met twice: as long as some were met once, others are likely to be missing.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 5.0))
    ...     pyro.sample("y", dist.Normal(x**2, 1.0), obs=torch.tensor(9.0))
    >>> modes = find_modes(Target(model), num_starts=10)
    >>> modes.loc.abs().squeeze(-1).round()
    tensor([3., 3.])

    :param density: of the model.
    :param num_starts: paths in each round; the first path begins at ``density.init_loc``.
    :param max_rounds: at most.
    :param max_iterations: longest path.
    :param num_draws: for each ELBO along the paths.
    :param max_gap: modes whose ELBO is so many nats below the best are dropped.
    :param max_seconds: of wall time, after the first step of all paths. A search that it ends does
        not repeat to the last bit.
    :returns: at least one.
    :raises ValueError: if the log-density is finite at no start, naming the sites to blame. Single
        starts without a density, or at which the model raises an error, are left out.

    **References:**

    1. Zhang, Carpenter, Gelman and Vehtari (2022), *Pathfinder: Parallel quasi-Newton variational
       inference* (the best ELBO along a path; theirs uses L-BFGS).
    2. Dauphin et al. (2014), *Identifying and attacking the saddle point problem in
       high-dimensional non-convex optimization* (the eigenvalues).
    3. Good (1953), *The population frequencies of species and the estimation of population
       parameters* (what was met once tells how much is missing).
    """
    deadline = time.perf_counter() + max_seconds
    starts = torch.cat([density.init_loc.unsqueeze(0), density.sample_prior(num_starts - 1)])
    found: Modes | None = None
    for _ in range(max_rounds):
        climbed = _climb(density, starts, max_iterations, num_draws, deadline)
        if climbed is None and found is None:
            raise ValueError(
                "the model's log-density and its gradient are finite at none of "
                f"{num_starts} draws of its prior: {blame(density, starts)}"
            ) from density.error
        if climbed is None:
            break
        best, tops = climbed
        if found is None or best.elbo > found.elbo[0]:
            first = best
        else:
            first = Modes(*(part[:1] for part in found))
        earlier = [] if found is None else [Modes(*(part[1:] for part in found))]
        found = Modes(*map(torch.cat, zip(first, *earlier, tops, strict=True)))
        modes, num_met = _separate(density, found, max_gap)
        if len(modes.loc) == 1 or (num_met > 1).all() or time.perf_counter() > deadline:
            break
        starts = density.sample_prior(num_starts)
    return modes


def seconds_of_climb(density: Target) -> float:
    """What one step of all paths costs, of one core.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> seconds_of_climb(Target(model)) < 1
    True

    :param density: is evaluated near its start.
    """
    num_trials = NUM_DRAWS + len(STEP_SIZES)

    def climb() -> None:
        density.derivatives(nearby(density.init_loc, NUM_STARTS))
        density.log_prob(nearby(density.init_loc, NUM_STARTS * num_trials))

    # A single run without derivatives takes a third of the time of one with them.
    num_runs = 1 if density.is_vectorized else NUM_STARTS * (1 + num_trials // 3)
    return estimated_seconds(climb, num_runs=num_runs)


def _climb(
    density: Target,
    point: Tensor,
    max_iterations: int,
    num_draws: int,
    deadline: float,
) -> tuple[Modes, Modes] | None:
    """The best Gaussian on all paths, and those at the paths' tops; None without a good start."""
    best: Modes | None = None
    tops, ends = [], []
    for _ in steps_of(range(max_iterations), max_iterations, "search"):
        log_prob, score, hessian = density.derivatives(point)
        finite = log_prob.isfinite() & score.isfinite().all(-1)
        if not finite.any():
            break
        point, log_prob, score, hessian = (
            part[finite] for part in (point, log_prob, score, hessian)
        )
        factor, is_concave = root_of_inverse(hessian)
        whitened = matvec(factor.mT, score)
        step = matvec(factor, whitened)
        proposals = point + point.new_tensor(STEP_SIZES)[:, None, None] * step
        noise = antithetic_noise(point, num_draws)
        draws = point + matvec(factor, noise)
        values = finite_log_prob(density, torch.cat([draws, proposals]))
        here = Modes(point, factor, gaussian_elbo(values[: len(draws)], noise, factor))
        highest = highest_draws(draws, values[: len(draws)])
        best = _better(density, here, highest, best)
        gain, choice = (values[len(draws) :] - log_prob).max(0)
        climbs = whitened.square().sum(-1) > 1e-2
        is_top = is_concave & ~climbs
        tops.append(Modes(*(part[is_top] for part in here)))
        ends.append(highest[is_top])
        climbs &= gain > 0
        if not climbs.any() or time.perf_counter() > deadline:
            break
        point = proposals[choice, torch.arange(len(point))][climbs]
    if best is None:
        return None
    all_tops = Modes(*map(torch.cat, zip(*tops, strict=True)))
    is_sound = ~(is_rounding(density, all_tops.loc) | is_rounding(density, torch.cat(ends)))
    _warn_of_rounding(all_tops.elbo[~is_sound], best)
    return best, Modes(*(part[is_sound] for part in all_tops))


def _warn_of_rounding(dropped: Tensor, best: Modes) -> None:
    """Say so where tops that floating point cannot resolve are far above all that it can."""
    gap = (dropped - best.elbo).amax().item() if len(dropped) else 0.0
    if gap > FAR_BELOW:
        dtype = str(best.loc.dtype).removeprefix("torch.")
        warn_user(
            f"near the posterior's mode the log-density is rounding in {dtype}, and what was found "
            f"elsewhere lies {gap:.2g} nats below. Cure: float64, or data and latents that are "
            "centred and scaled",
        )


def _better(density: Target, here: Modes, highest: Tensor, best: Modes | None) -> Modes | None:
    """The best Gaussian so far, with those of the points where the paths are now.

    :param highest: a draw of each.
    """
    for index in here.elbo.argsort(descending=True).tolist():
        if best is not None and not here.elbo[index] > best.elbo[0]:
            break
        one = Modes(*(part[index : index + 1] for part in here))
        if not is_rounding(density, torch.stack([one.loc[0], highest[index]])).any():
            return one
    return best


def _separate(density: Target, found: Modes, max_gap: float) -> tuple[Modes, Tensor]:
    """The Gaussians between any two of which the log-density dips, and how often each was met.

    :param found: the best of all points, then tops.
    """
    order = 1 + found.elbo[1:].argsort(descending=True)
    order = order[found.elbo[order] > found.elbo[0] - max_gap]
    fractions = torch.linspace(0, 1, 11).to(found.loc)[:, None, None]
    kept, num_met = [0], [0]
    whiten = torch.linalg.inv_ex(found.scale_tril[:1]).inverse
    for candidate in order.tolist():
        start, end = found.loc[kept], found.loc[candidate]
        apart = matvec(whiten, end - start).norm(dim=-1).nan_to_num(math.inf)
        if apart.min() < SAME:
            num_met[int(apart.argmin())] += 1
            continue
        heights = finite_log_prob(density, start + fractions * (end - start))
        dip = torch.minimum(heights[0], heights[-1]) - heights.min(0).values
        nearest = int(dip.argmin())
        if dip[nearest] > MIN_DIP:
            kept.append(candidate)
            own = torch.linalg.inv_ex(found.scale_tril[candidate : candidate + 1])
            whiten = torch.cat([whiten, own.inverse])
            num_met.append(1)
        else:
            num_met[nearest] += 1
    # Judged anew with many draws: the best of many paths was in part the luckiest.
    loc, root, elbo = (part[kept] for part in found)
    noise = antithetic_noise(loc, 256)
    draws = loc + matvec(root, noise)
    values = finite_log_prob(density, draws)
    is_sound = ~is_rounding(density, highest_draws(draws, values))
    elbo = torch.where(is_sound, gaussian_elbo(values, noise, root), elbo)
    return Modes(loc, lower_factor(root), elbo), torch.tensor(num_met)
