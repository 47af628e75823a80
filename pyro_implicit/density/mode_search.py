# SPDX-License-Identifier: Apache-2.0
"""Search for modes: Gaussians along the paths of Newton's method from many initial points."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from pyro.ops.tensor_utils import matvecmul
from torch import Tensor
from torch.distributions import constraints

from pyro_implicit.density.checks.numerics import blame, finite_log_prob, heights_of, is_rounding
from pyro_implicit.density.cost import estimated_seconds, nearby
from pyro_implicit.density.mode_gaps import apart_from, judged, separate
from pyro_implicit.density.modes import Modes, antithetic_noise, gaussian_elbo, highest_draws
from pyro_implicit.density.policy import COST, RUNS, SEARCH, SYMMETRY
from pyro_implicit.density.symmetry import Symmetries, confirmed
from pyro_implicit.density.target import Target
from pyro_implicit.ops.matrices import root_of_inverse
from pyro_implicit.runtime.clock import NO_LIMIT, TimeLimit
from pyro_implicit.runtime.messages import refuse_nonpositive, warn_user
from pyro_implicit.runtime.progress import Watch, watch
from pyro_implicit.runtime.sites import innermost_support

__all__ = ["find_modes", "near_origin", "seconds_of_climb"]


@torch.no_grad()
def find_modes(
    target: Target,
    num_starts: int = SEARCH.num_starts,
    max_rounds: int = SEARCH.max_rounds,
    max_iterations: int = SEARCH.max_iterations,
    num_particles: int = SEARCH.num_draws,
    max_gap: float = SEARCH.max_gap,
    max_seconds: float = math.inf,
    starts: Tensor | None = None,
    symmetries: Symmetries | None = None,
) -> Modes:
    r"""Climb a log-density from draws of the prior, and return the best Gaussian of each mode.

    Each iteration takes a Newton step with the absolute values of the Hessian's eigenvalues, so
    that saddles repel, and the best of a few step sizes. At each point u of a path the Gaussian
    :math:`N(u, |H|^{-1})` is judged by its ELBO: at a mode it is the Laplace approximation, and
    without a mode, as in a funnel, it is the best Gaussian of the path. The Hessian of a density
    with kinks, as of Laplace errors, is blind to them: if few paths end at modes, the others
    continue with secants of the score, one standard deviation of their Gaussian to either side, and
    end when these have settled. Two path ends are separate modes if the log-density between them
    dips by more than 1 nat. If the log-density dips between the best Gaussian and every mode, this
    Gaussian belongs to the mode at the end of its path. The search continues from new initial
    points as long as any of several modes was found only once, or few paths have ended at modes,
    because further modes are then likely to be missing. Paths may end nowhere, or where there is no
    mass, as in a funnel. The best Gaussian of such a path of the first round counts as a mode, too,
    if it lies apart from all modes and another path leads to the same place.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 5.0))
    ...     pyro.sample("y", dist.Normal(x**2, 1.0), obs=torch.tensor(9.0))
    >>> modes = find_modes(Target(model), num_starts=10)
    >>> modes.loc.abs().squeeze(-1).round()
    tensor([3., 3.])

    :param target: the log-density of the model.
    :param num_starts: paths in each round from draws of the prior, the first one from
        ``target.init_loc``. As many begin near the origin if the prior is vague.
    :param max_rounds: the maximal number of rounds.
    :param max_iterations: the maximal length of a path, without its steps with secants.
    :param num_particles: draws for each ELBO along the paths.
    :param max_gap: nats; modes whose ELBO is further below the best one are dropped.
    :param max_seconds: limit of wall time, after the first step of all paths. A search that it ends
        is not reproducible.
    :param starts: further initial points of the first round, ``(n, latent_dim)``.
    :param symmetries: symmetries of the density; one is kept of all modes that they map to each
        other.
    :returns: at least one mode.
    :raises ValueError: for a ``max_seconds`` that is not positive; if the log-density is finite at
        none of the initial points, naming the sites to blame. Single points without a density, or
        at which the model raises an error, are left out.

    **References:**

    1. Zhang, Carpenter, Gelman and Vehtari (2022), *Pathfinder: Parallel quasi-Newton variational
       inference* (the best ELBO along a path; with L-BFGS).
    2. Dauphin et al. (2014), *Identifying and attacking the saddle point problem in
       high-dimensional non-convex optimization* (the eigenvalues).
    3. Good (1953), *The population frequencies of species and the estimation of population
       parameters* (the number of modes found once tells how many are missing).
    """
    refuse_nonpositive(max_seconds=max_seconds)
    limit = TimeLimit(max_seconds)
    given = [] if starts is None else [starts[starts.isfinite().all(-1)]]
    drawn = torch.cat([target.init_loc.unsqueeze(0), target.sample_prior(num_starts - 1)])
    near = drawn[:0]
    if num_starts > 1:  # a single start decides which mode is found
        near = near_origin(target, drawn, num_starts, 0, limit)
    starts = torch.cat([drawn, near, *given])
    found: Modes | None = None
    endless: Modes | None = None
    # A single path is not the luckiest of many.
    final_draws = SEARCH.num_final_draws if num_starts > 1 else num_particles
    with watch("search", max_rounds * max_iterations, leave=False) as watched:
        for number in range(1, max_rounds + 1):
            climbed = _climb(
                target, starts, max_iterations, num_particles, limit, watched, number == 1
            )
            if climbed is None and found is None:
                raise ValueError(
                    "the model's log-density and its gradient are finite at none of "
                    f"{len(starts)} initial points: {blame(target, starts)}"
                ) from target.error
            if climbed is None:
                break
            best, end, tops, rest = climbed
            endless = endless or rest
            if found is None or best.elbo > found.elbo[0]:
                top, top_end = best, end
            else:
                top = found.some(slice(1))
            earlier = [] if found is None else [found.some(slice(1, None))]
            found = Modes.joined([top, *earlier, tops])
            is_late = watched.stopped or limit.is_over()
            final_draws = num_particles if is_late else final_draws
            modes, num_met = separate(target, found, top_end, max_gap, final_draws)
            first = _first_copies(modes, symmetries, target)
            kept = first.unique()
            num_met = torch.zeros_like(num_met).index_add(0, first, num_met)[kept]
            modes = modes.some(kept.to(modes.loc.device))
            # A Gaussian that is no mode is met by no path's end.
            is_alone = len(modes.loc) == 1
            are_known = is_alone or bool((num_met != 1).all())
            least_met = SEARCH.least_met if is_alone else SEARCH.least_met_apart
            most_end_below = 0 < num_met.sum() < least_met * num_starts
            if is_late or (are_known and not most_end_below):
                break
            starts = target.sample_prior(num_starts)
            if len(near):
                near = near_origin(target, starts, num_starts, number, limit)
                starts = torch.cat([starts, near])
    if endless is not None and len(endless.loc) > 1 and not is_late:
        more = judged(target, apart_from(target, modes, endless, limit), final_draws)
        modes = Modes.joined([modes, more])
        modes = modes.some(~(modes.elbo < modes.elbo.max() - max_gap))  # all may be -inf
        first = _first_copies(modes, symmetries, target).unique()
        modes = modes.some(first.to(modes.loc.device))
    return modes.some(modes.elbo.argsort(descending=True))


def _first_copies(modes: Modes, symmetries: Symmetries | None, target: Target) -> Tensor:
    """Return the place of the first mode to which symmetries map each one, ``(num_modes,)``."""
    if not symmetries:
        return torch.arange(len(modes.loc))
    symmetries = confirmed(symmetries, target, modes.loc)
    generator = torch.Generator("cpu").manual_seed(0)  # the caller's stream does not advance
    shape = SYMMETRY.num_draws, *modes.loc.shape
    noise = torch.randn(shape, generator=generator, device="cpu").to(modes.loc)
    draws = modes.loc + matvecmul(modes.scale_tril, noise)
    symmetries = symmetries.keyed(draws.flatten(0, 1))
    ordered, sds = symmetries.ordered(modes.loc), symmetries.ordered(draws).std(0)
    found = [0]
    for row in range(1, len(ordered)):
        kept = sorted({*found})
        distances = ((ordered[row] - ordered[kept]) / sds[kept]).square().mean(-1).sqrt()
        nearest = int(distances.argmin())
        found.append(kept[nearest] if distances[nearest] < SEARCH.same else row)
    return torch.tensor(found)


def near_origin(
    target: Target, drawn: Tensor, num_starts: int, seed: int = 0, limit: TimeLimit = NO_LIMIT
) -> Tensor:
    """Return points near the origin of unconstrained space, where draws of the prior are no starts.

    Draws of a vague prior, such as N(0, 1000^2) or Gamma(.001, .001), are so far away that no path
    reaches the posterior, that gradients overflow, or that the model raises an error: all points
    are returned. With large covariates, gradients overflow near the origin, too: such points move
    towards it. For other priors, only points far more probable than all draws are returned.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1000.0))
    >>> target = Target(model)
    >>> near_origin(target, target.sample_prior(50), 3).abs() <= SEARCH.near_width
    tensor([[True],
            [True],
            [True]])

    :param target: the posterior.
    :param drawn: draws of its prior, ``(num_draws, latent_dim)``.
    :param num_starts: the number of points.
    :param seed: of the points; the caller's random stream does not advance.
    :param limit: ends the search for points with a gradient.
    :returns: up to ``(num_starts, latent_dim)``.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = num_starts, target.latent_dim
    unit = torch.rand(shape, generator=generator, device="cpu").to(drawn)
    near = SEARCH.near_width * (2 * unit - 1)
    heights = heights_of(target, near)
    for _ in range(RUNS.max_retries):
        lost = heights.isinf()
        if not lost.any() or limit.is_over():
            break
        near[lost] = SEARCH.shrink * near[lost]
        heights[lost] = heights_of(target, near[lost])
    least = -math.inf
    if len(drawn) > SEARCH.least_runs * num_starts and not _is_vague(target, drawn):
        least = heights_of(target, drawn).amax().item() + SEARCH.near_gain
    return near[heights > least]


def _is_vague(target: Target, drawn: Tensor) -> bool:
    """Tell whether draws of some latent variable are far apart, or logarithms of extremes."""
    middle = drawn.median(0).values
    spread = (drawn - middle).abs().median(0).values
    supports = {name: innermost_support(site["fn"].support) for name, site in target.sites.items()}
    real = type(constraints.real)
    sizes = [
        (spread if isinstance(supports[name], real) else middle.abs())[place.flatten()]
        for name, place in target.places.items()
    ]
    return bool((torch.cat(sizes) > SEARCH.far).any())


def seconds_of_climb(target: Target) -> float:
    """Return the seconds of one core for one step of all paths.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> seconds_of_climb(Target(model)) < 1
    True

    :param target: is evaluated near its ``init_loc``.
    """
    num_starts, num_trials = SEARCH.num_starts, SEARCH.num_draws + len(SEARCH.step_sizes)

    def climb(number: int) -> None:
        target.derivatives(nearby(target.init_loc, number))
        target.log_prob(nearby(target.init_loc, number * num_trials))

    if target.is_vectorized:
        number = COST.counted_points[0]
        return estimated_seconds(lambda: climb(number), times=num_starts / number)
    # A single run without derivatives takes a third of the time of one with them.
    return num_starts * estimated_seconds(lambda: climb(1), num_runs=1 + num_trials // 3)


class _Paths(NamedTuple):
    """Paths that climb together: points ``(num_paths, latent_dim)``, factors of the covariance of
    their Gaussians ``(num_paths, latent_dim, latent_dim)``, and their numbers ``(num_paths,)``."""

    point: Tensor
    factor: Tensor
    number: Tensor

    def some(self, rows: Tensor) -> _Paths:
        return _Paths(self.point[rows], self.factor[rows], self.number[rows.to("cpu")])


class _Climbed(NamedTuple):
    """The best Gaussian of all paths, the Gaussian at the end of its path, if any, the Gaussians at
    the ends of all paths, and the best Gaussian of each path without an end near the best one."""

    best: Modes
    end: Modes
    tops: Modes
    rest: Modes


class _Climb:
    """A climb from many points at once, and what it has found.

    :param target: the log-density.
    :param num_draws: for each ELBO.
    :param limit: ends the climb after a step of all paths, as ``watched`` does.
    """

    def __init__(self, target: Target, num_draws: int, limit: TimeLimit, watched: Watch) -> None:
        self.target, self.num_draws = target, num_draws
        self.limit, self.watched = limit, watched
        self.best: Modes | None = None
        self.best_path = -1
        self._of_paths: tuple[Modes, Tensor] | None = None
        self._arrived: list[tuple[Modes, Tensor, Tensor]] = []

    @property
    def is_over(self) -> bool:
        return self.watched.stopped or self.limit.is_over()

    @property
    def tops(self) -> tuple[Modes, Tensor, Tensor]:
        """The Gaussians at path ends, with factors for ``scale_tril``, their highest draws, and the
        numbers of their paths."""
        modes, highest, numbers = zip(*self._arrived, strict=True)
        joined = Modes.joined(modes)
        return joined, torch.cat(highest), torch.cat(numbers)

    def climb(self, paths: _Paths, max_iterations: int, with_secants: bool = False) -> _Paths:
        """Return the paths that have not arrived."""
        left = []
        for _ in range(max_iterations):
            paths, stuck = self._step(paths, with_secants)
            left.append(stuck)
            self.watched.step()
            if not len(paths.point) or self.is_over:
                break
        return _Paths(*map(torch.cat, zip(*left, paths, strict=True)))

    def take_blind(self, most: int) -> _Paths:
        """Return the tops as paths if secants contradict most of their Gaussians; otherwise none.

        Between two kinks, a density may have neither slope nor curvature.

        :param most: the number of Gaussians that are compared.
        """
        tops, highest, numbers = self.tops
        paths, nothing = _Paths(tops.loc, tops.scale_tril, numbers), torch.arange(0)
        if not len(numbers):
            return paths
        few = paths.some(torch.linspace(0, len(numbers) - 1, most).long().unique())
        hessian = self.target.secants(few.point, few.factor)[2]
        # Sds of a skewed mode differ, too, but not by so much.
        is_sound = _agree(few.factor, root_of_inverse(hessian)[0], SEARCH.blind)
        if is_sound.double().mean() >= 0.5:
            return paths.some(nothing)
        self._arrived = [(tops.some(nothing), highest[nothing], nothing)]
        return paths

    def _step(self, paths: _Paths, with_secants: bool) -> tuple[_Paths, _Paths]:
        """Return the paths that climb on, and those whose steps gain nothing."""
        target = self.target
        if with_secants:
            log_prob, score, hessian = target.secants(paths.point, paths.factor)
        else:
            log_prob, score, hessian = target.derivatives(paths.point)
        finite = log_prob.isfinite() & score.isfinite().all(-1)
        paths = paths.some(finite)
        if not finite.any():
            return paths, paths
        log_prob, score, hessian = (part[finite] for part in (log_prob, score, hessian))
        point = paths.point
        factor, is_concave = root_of_inverse(hessian)
        whitened = matvecmul(factor.mT, score)
        step = matvecmul(factor, whitened)
        proposals = point + point.new_tensor(SEARCH.step_sizes)[:, None, None] * step
        noise = antithetic_noise(point, self.num_draws)
        draws = point + matvecmul(factor, noise)
        values = finite_log_prob(target, torch.cat([draws, proposals]))
        here = Modes(point, factor, gaussian_elbo(values[: len(draws)], noise, factor))
        highest = highest_draws(draws, values[: len(draws)])
        self._keep(here, highest, paths.number)
        if (index := _better(target, here, highest, self.best)) is not None:
            self.best = here.some(slice(index, index + 1))
            self.best_path = int(paths.number[index])
        gain, choice = (values[len(draws) :] - log_prob).max(0)
        decrement = whitened.square().sum(-1)
        is_stuck = gain <= 0
        has_arrived = decrement <= SEARCH.at_top
        if with_secants:
            is_settled = _agree(paths.factor, factor)
            is_stuck &= is_settled
            has_arrived = (is_settled & has_arrived) | (is_stuck & (decrement <= SEARCH.at_kink))
        is_top = is_concave & has_arrived
        self._arrived.append((here.some(is_top), highest[is_top], paths.number[is_top.cpu()]))
        higher = proposals[choice, torch.arange(len(point))]
        higher = torch.where((gain > 0).unsqueeze(-1), higher, point)
        paths = _Paths(higher, factor, paths.number)
        return paths.some(~(has_arrived | is_stuck)), paths.some(is_stuck & ~has_arrived)

    def _keep(self, here: Modes, highest: Tensor, number: Tensor) -> None:
        """Keep the best Gaussian of each path, and its highest draw."""
        if self._of_paths is None:
            size = int(number.max()) + 1
            none = [part.new_full((size, *part.shape[1:]), -math.inf) for part in (*here, highest)]
            self._of_paths = Modes(*none[:3]), none[3]
        best, tops = self._of_paths
        rows = number.to(here.elbo.device)
        is_better = here.elbo > best.elbo[rows]
        for kept, part in zip((*best, tops), (*here, highest), strict=True):
            kept[rows[is_better]] = part[is_better]

    def _rest(self) -> Modes:
        """Return the best Gaussians, near the best of all, of paths without an end near it."""
        assert self._of_paths is not None and self.best is not None
        (best, highest), (tops, _, numbers) = self._of_paths, self.tops
        least = self.best.elbo - SEARCH.max_gap
        is_near = best.elbo > least
        is_near[numbers.to(is_near.device)[tops.elbo > least]] = False
        best, highest = best.some(is_near), highest[is_near]
        return best.some(_are_sound(self.target, best.loc, highest))

    def result(self, with_rest: bool) -> _Climbed | None:
        """Return what was found; None if no path began.

        :param with_rest: whether to return Gaussians of paths without an end, if there is time.
        """
        if self.best is None:
            return None
        tops, highest, numbers = self.tops
        is_sound = _are_sound(self.target, tops.loc, highest)
        _warn_of_rounding(tops.elbo[~is_sound], self.best)
        is_end = is_sound & (numbers == self.best_path).to(is_sound.device)
        none = tops.some(slice(0))
        rest = self._rest() if with_rest and not self.is_over else none
        return _Climbed(self.best, tops.some(is_end), tops.some(is_sound), rest)


def _agree(factor: Tensor, other: Tensor, most: float = SEARCH.settled) -> Tensor:
    """Return whether sds of covariances, given by factors, differ less in all directions."""
    ratio = torch.linalg.solve_ex(factor, other).result
    is_known = ratio.isfinite().all(-1).all(-1)
    change = torch.linalg.svdvals(ratio.nan_to_num(0.0, 0.0, 0.0)).log().abs().amax(-1)
    return is_known & (change < math.log(most))


def _climb(
    target: Target,
    point: Tensor,
    max_iterations: int,
    num_draws: int,
    limit: TimeLimit,
    watched: Watch,
    with_rest: bool,
) -> _Climbed | None:
    """Climb from all points at once; return None if no path began."""
    found = _Climb(target, num_draws, limit, watched)
    factor = torch.eye(target.latent_dim).to(point).expand(len(point), -1, -1)
    left = found.climb(_Paths(point, factor, torch.arange(len(point))), max_iterations)
    if found.is_over or found.best is None:
        return found.result(with_rest)
    most = max(1, SEARCH.secant_points // (2 * target.latent_dim)) if target.is_vectorized else 1
    blind = found.take_blind(most)
    paths = _Paths(*map(torch.cat, zip(left, blind, strict=True)))
    has_tops = len(found.tops[0].loc) >= SEARCH.least_met * len(point)
    if len(paths.point) and not has_tops:
        first = paths.number.argsort()[:most]
        found.climb(paths.some(first), min(SEARCH.secant_steps, max_iterations), with_secants=True)
    return found.result(with_rest)


def _warn_of_rounding(dropped: Tensor, best: Modes) -> None:
    gap = (dropped - best.elbo).amax().item() if len(dropped) else 0.0
    if gap > SEARCH.rounding_gap:
        dtype = str(best.loc.dtype).removeprefix("torch.")
        warn_user(
            f"near the posterior's mode the log-density is rounding in {dtype}, and the best point "
            f"elsewhere lies {gap:.2g} nats below. Cure: float64, or data and latents that are "
            "centred and scaled",
        )


def _better(target: Target, here: Modes, highest: Tensor, best: Modes | None) -> int | None:
    """Return the index of the best Gaussian that is better than ``best``, if there is one."""
    order = here.elbo.argsort(descending=True)
    if best is not None:
        order = order[here.elbo[order] > best.elbo[0]]
    size = 1  # most often the first one is sound; near a spike hundreds are not
    while len(order):
        few, order, size = order[:size], order[size:], 2 * size
        is_sound = _are_sound(target, here.loc[few], highest[few])
        if is_sound.any():
            return int(few[is_sound.byte().argmax()])
    return None


def _are_sound(target: Target, loc: Tensor, highest: Tensor) -> Tensor:
    """Tell which Gaussians are no spikes of rounding errors, by two points of each."""
    return ~is_rounding(target, torch.cat([loc, highest])).reshape(2, -1).any(0)
