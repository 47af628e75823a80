# SPDX-License-Identifier: Apache-2.0
"""Where a posterior's mass may lie: Gaussians found along the way from many starts."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_implicit.density.blame import blame
from pyro_implicit.density.latent_density import LatentDensity
from pyro_implicit.density.progress import steps_of
from pyro_implicit.ops.printing import short_repr

__all__ = ["Modes", "find_modes"]

MIN_DIP = 1.0  # nats
ROUNDINGS = 4
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
    density: LatentDensity,
    num_starts: int = 50,
    max_rounds: int = 16,
    max_iterations: int = 100,
    num_draws: int = 16,
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
    >>> modes = find_modes(LatentDensity(model), num_starts=10)
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
                f"the model's log-density is finite at none of {num_starts} draws of its prior: "
                f"{blame(density, starts)}. Cure: give the sites priors, or an init_loc_fn, in "
                "whose range the data are possible"
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


def _climb(
    density: LatentDensity,
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
        factor, is_concave = _root_of_inverse(hessian)
        whitened = _apply(factor.mT, score)
        proposals = point + point.new_tensor(STEP_SIZES)[:, None, None] * _apply(factor, whitened)
        noise = _antithetic_noise(point, num_draws)
        draws = point + _apply(factor, noise)
        values = _log_prob(density, torch.cat([draws, proposals]))
        here = Modes(point, factor, _elbo(values[: len(draws)], noise, factor))
        highest = _highest(draws, values[: len(draws)])
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
    is_sound = ~(_is_rounding(density, all_tops.loc) | _is_rounding(density, torch.cat(ends)))
    return best, Modes(*(part[is_sound] for part in all_tops))


def _better(
    density: LatentDensity, here: Modes, highest: Tensor, best: Modes | None
) -> Modes | None:
    """The best Gaussian so far, with those of the points where the paths are now.

    :param highest: a draw of each.
    """
    for index in here.elbo.argsort(descending=True).tolist():
        if best is not None and not here.elbo[index] > best.elbo[0]:
            break
        one = Modes(*(part[index : index + 1] for part in here))
        if not _is_rounding(density, torch.stack([one.loc[0], highest[index]])).any():
            return one
    return best


def _highest(draws: Tensor, values: Tensor) -> Tensor:
    """Of draws ``(num_draws, num_gaussians, latent_dim)`` that of the highest log-density."""
    return draws[values.argmax(0), torch.arange(draws.shape[1])]


def _is_rounding(density: LatentDensity, points: Tensor) -> Tensor:
    """Where the log-density is that of rounding errors, which may be any number: it changes by more
    than a thousandth when the last bits of the point do.

    :param points: ``(num_points, latent_dim)``.
    :returns: ``(num_points,)``.
    """
    if len(points) == 0:
        return torch.zeros(0, dtype=torch.bool, device=points.device)
    last_bits = ROUNDINGS * torch.finfo(points.dtype).eps
    shift = torch.linspace(-1.0, 1.0, 2 * ROUNDINGS).to(points)[:, None, None]
    signs = torch.ones_like(points[0])
    signs[::2] = -1.0
    values = _log_prob(density, points * (1 + last_bits * shift * signs))
    spread = values.max(0).values - values.min(0).values
    return ~(spread <= 1.0 + 1e-3 * values.abs().min(0).values)


def gaussian_elbo(density: LatentDensity, loc: Tensor, factor: Tensor, num_draws: int) -> Tensor:
    """The ELBO of Gaussians, each cut off where the model has no density.

    :param loc: ``(num_gaussians, latent_dim)``.
    :param factor: any F with covariance F F^T, ``(num_gaussians, latent_dim, latent_dim)``.
    :returns: ``(num_gaussians,)``.
    """
    noise = _antithetic_noise(loc, num_draws)
    return _elbo(_log_prob(density, loc + _apply(factor, noise)), noise, factor)


def _antithetic_noise(loc: Tensor, num_draws: int) -> Tensor:
    noise = torch.randn((num_draws // 2,) + loc.shape, dtype=loc.dtype, device=loc.device)
    return torch.cat([noise, -noise])


def _elbo(log_prob: Tensor, noise: Tensor, factor: Tensor) -> Tensor:
    """From the log-density at draws, ``(num_draws, num_gaussians)``, and their noise."""
    dim = factor.shape[-1]
    inside = log_prob > -math.inf
    num_inside = inside.sum(0)
    entropy = torch.linalg.slogdet(factor).logabsdet + 0.5 * dim * math.log(2 * math.pi)
    # Half of E[noise^2]: that of the draws themselves where some are left out.
    half_square = 0.5 * noise.square().sum(-1)
    half_square = torch.where(num_inside == len(noise), 0.5 * dim, half_square)
    mean = (log_prob + half_square).masked_fill(~inside, 0.0).sum(0) / num_inside
    elbo = mean + entropy + (num_inside / len(noise)).log()
    return elbo.nan_to_num(-math.inf, -math.inf, -math.inf)


def _separate(density: LatentDensity, found: Modes, max_gap: float) -> tuple[Modes, Tensor]:
    """The Gaussians between any two of which the log-density dips, and how often each was met.

    :param found: the best of all points, then tops.
    """
    order = 1 + found.elbo[1:].argsort(descending=True)
    order = order[found.elbo[order] > found.elbo[0] - max_gap]
    fractions = torch.linspace(0, 1, 11).to(found.loc)[:, None, None]
    kept, num_met = [0], [0]
    for candidate in order.tolist():
        start, end = found.loc[kept], found.loc[candidate]
        heights = _log_prob(density, start + fractions * (end - start))
        dip = torch.minimum(heights[0], heights[-1]) - heights.min(0).values
        nearest = int(dip.argmin())
        if dip[nearest] > MIN_DIP:
            kept.append(candidate)
            num_met.append(1)
        else:
            num_met[nearest] += 1
    # Judged anew with many draws: the best of many paths was in part the luckiest.
    loc, root, elbo = (part[kept] for part in found)
    noise = _antithetic_noise(loc, 256)
    draws = loc + _apply(root, noise)
    values = _log_prob(density, draws)
    is_sound = ~_is_rounding(density, _highest(draws, values))
    elbo = torch.where(is_sound, _elbo(values, noise, root), elbo)
    return Modes(loc, lower_factor(root), elbo), torch.tensor(num_met)


def _root_of_inverse(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """F with F F^T = |H|^-1, by eigenvalues after scaling to a unit diagonal, and whether H < 0."""
    hessian = torch.nan_to_num(hessian)
    # A coordinate without any curvature has no scale of its own: it is left as it is.
    is_flat = (hessian == 0).all(-1)
    hessian = hessian - torch.diag_embed(is_flat.to(hessian))
    scale = hessian.diagonal(dim1=-2, dim2=-1).abs().clamp(min=1e-20).rsqrt()
    scaled = scale.unsqueeze(-1) * hessian * scale.unsqueeze(-2)
    values, vectors = torch.linalg.eigh(scaled)
    is_concave = (values < 0).all(-1)
    values = values.abs().clamp(min=10 * torch.finfo(values.dtype).eps)
    return scale.unsqueeze(-1) * vectors * values.rsqrt().unsqueeze(-2), is_concave


def lower_factor(root: Tensor) -> Tensor:
    """The Cholesky factor of R R^T, without that product: it exists however thin R is.

    :param root: ``(*batch, dim, num_columns)``, of at least as many columns as rows.
    :returns: ``(*batch, dim, dim)``.
    """
    factor = torch.linalg.qr(root.mT).R.mT
    sign = torch.where(factor.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(factor)
    return (factor * sign.unsqueeze(-2)).tril()


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def _log_prob(density: LatentDensity, points: Tensor) -> Tensor:
    """Of points ``(*batch, latent_dim)``; -inf where there is no number."""
    flat = density.log_prob(points.reshape(-1, points.shape[-1])).reshape(points.shape[:-1])
    return flat.nan_to_num(-math.inf, -math.inf, -math.inf)
