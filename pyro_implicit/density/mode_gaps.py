# SPDX-License-Identifier: Apache-2.0
"""Which Gaussians belong to separate modes: dips of the log-density between them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from pyro.ops.tensor_utils import matvecmul
from torch import Tensor

from pyro_implicit.density.checks.numerics import finite_log_prob, is_rounding
from pyro_implicit.density.modes import Modes, antithetic_noise, gaussian_elbo, highest_draws
from pyro_implicit.density.policy import SEARCH
from pyro_implicit.density.target import Target
from pyro_implicit.ops.matrices import lower_factor, root_of_inverse
from pyro_implicit.runtime.clock import TimeLimit

__all__ = ["apart_from", "dip", "judged", "separate"]


def dip(
    log_prob: Callable[[Tensor], Tensor],
    start: Tensor,
    end: Tensor,
    number: int = SEARCH.num_between,
) -> Tensor:
    """Return by how many nats a log-density dips on straight lines between points, ``(n,)``.

    The dip is infinite if the density is 0 at an end.

    **Example:**

    >>> start, end = torch.tensor([[1.0], [-1.0]]), torch.tensor([1.0])
    >>> dip(lambda x: x.square().sum(-1), start, end)
    tensor([0., 1.])

    :param log_prob: of points ``(num_points, dim)``; where it is not finite, it counts as -inf.
    :param start: ``(n, dim)``.
    :param end: ``(dim,)``.
    :param number: the number of points on a line.
    """
    fractions = torch.linspace(0, 1, number).to(end)[:, None, None]
    points = start + fractions * (end - start)
    heights = log_prob(points.flatten(0, 1)).reshape(points.shape[:2])
    heights = heights.nan_to_num(-math.inf, -math.inf, -math.inf)
    found = torch.minimum(heights[0], heights[-1]) - heights.min(0).values
    return found.nan_to_num(nan=math.inf)  # the density of an end is 0


def separate(
    target: Target, found: Modes, end: Modes, max_gap: float, num_draws: int
) -> tuple[Modes, Tensor]:
    """Return the Gaussians between which the log-density dips, and how often each was found.

    :param target: the log-density.
    :param found: the best Gaussian of all paths, and those at the paths' ends.
    :param end: the Gaussian at the end of the first one's path, if any.
    :param max_gap: nats; Gaussians whose ELBO is further below the first one's are left out.
    :param num_draws: for the ELBO of each mode.
    :returns: the modes, and ``(num_modes,)`` integers.
    """
    order = 1 + found.elbo[1:].argsort(descending=True)
    order = order[found.elbo[order] > found.elbo[0] - max_gap]
    top, dips = found, dip(target.log_prob, found.loc[order], found.loc[0])
    if len(end.loc) and (dips > SEARCH.min_dip).all():
        # The best Gaussian is separate from all modes, and belongs to the mode at its path's end.
        top = Modes.joined([end, found.some(slice(1, None))])
    kept, num_met = [0], [0]
    whiten = torch.linalg.inv_ex(top.scale_tril[:1]).inverse
    for candidate in order.tolist():
        start, other = top.loc[kept], top.loc[candidate]
        apart = matvecmul(whiten, other - start).norm(dim=-1).nan_to_num(math.inf)
        if apart.min() < SEARCH.same:
            num_met[int(apart.argmin())] += 1
            continue
        dips = dip(target.log_prob, start, other)
        nearest = int(dips.argmin())
        if dips[nearest] > SEARCH.min_dip:
            kept.append(candidate)
            own = torch.linalg.inv_ex(top.scale_tril[candidate : candidate + 1])
            whiten = torch.cat([whiten, own.inverse])
            num_met.append(1)
        else:
            num_met[nearest] += 1
    return judged(target, found.some(kept), num_draws), torch.tensor(num_met)


def judged(target: Target, found: Modes, num_draws: int) -> Modes:
    """Judge Gaussians again with many draws: the best of many paths is partly the luckiest.

    :param target: the log-density.
    :param found: Gaussians, with any factors of their covariances.
    :param num_draws: for each ELBO.
    :returns: the same Gaussians, with Cholesky factors.
    """
    loc, root, elbo = found
    noise = antithetic_noise(loc, num_draws)
    draws = loc + matvecmul(root, noise)
    values = finite_log_prob(target, draws)
    is_sound = ~is_rounding(target, highest_draws(draws, values))
    elbo = torch.where(is_sound, gaussian_elbo(values, noise, root), elbo)
    return Modes(loc, lower_factor(root), elbo)


def apart_from(target: Target, modes: Modes, rest: Modes, limit: TimeLimit) -> Modes:
    """Return Gaussians at places that are separate from all modes, one for each place.

    A place needs two Gaussians. Gaussians with a high ELBO are compared first, because the
    log-density rises towards the neck of a funnel, where there is little mass.

    :param modes: the modes at path ends.
    :param rest: the best Gaussians of paths that end nowhere, or far below the best mode.
    :param limit: ends the comparison.
    """
    points, num_places = list(modes.loc), len(modes.loc)
    places = list(range(num_places))
    dips = torch.stack([dip(target.log_prob, rest.loc, one) for one in points])
    for _ in range(SEARCH.most_ridges):
        least, nearest = dips.min(0)
        if limit.is_over() or not (least > SEARCH.min_dip).any():
            break
        gain = least.clamp(max=SEARCH.max_gap) + rest.elbo
        row = int(gain.masked_fill(least <= SEARCH.min_dip, -math.inf).argmax())
        start, end = points[nearest[row]], rest.loc[row]
        is_new = _ridge_dips(target, start, end)
        places.append(num_places if is_new else places[nearest[row]])
        num_places += is_new
        points.append(end)
        dips = torch.cat([dips, dip(target.log_prob, rest.loc, end).unsqueeze(0)])
    least, nearest = dips.min(0)
    place = torch.tensor(places, device="cpu")[nearest.cpu()]
    place = place.masked_fill(least.cpu() > SEARCH.min_dip, -1)
    of_places = [(place == new).nonzero().squeeze(-1) for new in range(len(modes.loc), num_places)]
    elbo = rest.elbo.cpu()
    return rest.some([int(own[elbo[own].argmax()]) for own in of_places if len(own) > 1])


def _ridge_dips(target: Target, start: Tensor, end: Tensor) -> bool:
    """Return whether the log-density dips along the ridge between two points, each ``(dim,)``.

    On a straight line it also dips between points of one curved ridge. So the points of the line
    first climb by Newton steps perpendicular to the line.
    """
    fractions = torch.linspace(0, 1, SEARCH.num_between).to(end)[1:-1, None]
    along = (end - start).expand(len(fractions), -1)
    points = start + fractions * along
    sizes = points.new_tensor([*SEARCH.step_sizes, 0.0])[:, None, None]
    for _ in range(SEARCH.ridge_steps):
        _, score, hessian = target.derivatives(points)
        factor, _ = root_of_inverse(hessian)
        step, line = (matvecmul(factor, matvecmul(factor.mT, one)) for one in (score, along))
        share = (step * along).sum(-1) / (line * along).sum(-1)
        step = (step - share.unsqueeze(-1) * line).nan_to_num(0.0, 0.0, 0.0)
        tried = points + sizes * step
        best = finite_log_prob(target, tried).argmax(0)
        points = tried[best, torch.arange(len(points))]
    heights = finite_log_prob(target, torch.cat([torch.stack([start, end]), points]))
    return bool(heights[:2].min() - heights[2:].min() > SEARCH.min_dip)
