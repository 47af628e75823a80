# SPDX-License-Identifier: Apache-2.0
"""Draws from separate modes, with their weights, by annealed sequential Monte Carlo.

Particles start from normals at the modes and a wide normal of the prior's size. Their distribution
is moved to the posterior along a geometric path (Del Moral, Doucet and Jasra, 2006). All
transitions are Hamiltonian Monte Carlo in the frame of one mode: a label is drawn with
probabilities that depend on the particle's place, and the trajectory leaves the density times the
probability of the label invariant. So no frame must suit all modes, and particles may cross.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.density.modes import Modes
from pyro_implicit.density.policy import SEARCH
from pyro_implicit.mcmc.kernels import hmc
from pyro_implicit.mcmc.policy import DEFAULT, MODES_SHOWN, StoppingPolicy, TemperingPolicy
from pyro_implicit.mcmc.spaces.choice import ChainSetup
from pyro_implicit.mcmc.spaces.space import Space
from pyro_implicit.mcmc.stopping import Drift, OutOfTime, Tracker, pooled
from pyro_implicit.ops.annealing import NormalMixture, next_power, stratified_errors
from pyro_implicit.ops.ensemble_hmc import ChainState, chosen
from pyro_implicit.ops.importance_weights import systematic
from pyro_implicit.runtime.progress import new_stage, watch

__all__ = ["Annealed", "Cloud", "Evaluated", "ModeWeights", "anneal", "join_clouds", "temper"]


Stopped = Literal["converged", "max_gradients", "max_seconds", "callback", "interrupted"]


class ModeWeights(NamedTuple):
    """The weights of modes by annealing.

    ``weights`` and their standard ``errors`` are ``(num_modes,)``, heaviest first. Several normals
    describe each mode, and a point belongs to the likeliest; modes between which the log-density
    does not dip are joined. ``log_evidence``, with its error, is the logarithm of the integral of
    the model's density. The error is the spread of particles, which does not know of tails that few
    particles reach: on five correlated variables, some at their bounds, the estimate lay .08 nats
    below that of importance sampling, with an error of .01.
    """

    weights: Tensor
    errors: Tensor
    log_evidence: float
    log_evidence_error: float

    def __str__(self) -> str:
        pairs = zip(self.weights.tolist(), self.errors.tolist(), strict=True)
        shown = [f"{weight:.3f} +- {error:.3f}" for weight, error in pairs]
        some = [*shown[:MODES_SHOWN], "..."] if len(shown) > MODES_SHOWN else shown
        shares = ", ".join(some)
        evidence = f"{self.log_evidence:.2f} +- {self.log_evidence_error:.2f}"
        return f"weights of modes by annealing: {shares}; log evidence {evidence}"


class Evaluated(NamedTuple):
    """Points ``(n, d)`` with the model's log-density ``(n,)`` and gradient ``(n, d)`` there."""

    points: Tensor
    log_density: Tensor
    gradient: Tensor

    def take(self, rows: Tensor) -> Evaluated:
        """Return some of the points, by their indices."""
        return Evaluated(*(part[rows] for part in self))


class LabelledScore:
    """The density of a power posterior times the probability of labels, in the labels' frames.

    Only the former moves trajectories; Metropolis' rule corrects for the latter.

    :param space: gives the model's log-density.
    :param frame: a normal for each label.
    :param label: label of each chain, ``(n,)``.
    :param label_width: the factor on the standard deviations of these normals.
    :param reference: the distribution at power 0.
    """

    def __init__(
        self,
        space: Space,
        frame: NormalMixture,
        label: Tensor,
        label_width: float,
        reference: NormalMixture | None = None,
        power: float = 1.0,
    ) -> None:
        self.space, self.frame, self.label = space, frame, label
        self.label_width = label_width
        self.reference, self.power = reference, power
        self.last: Evaluated | None = None

    def __call__(self, white: Tensor) -> tuple[Tensor, Tensor]:
        points = self.frame.to_points(white, self.label)
        self.last = Evaluated(points, *self.space.score(points))
        return self.at(self.last)

    def at(self, here: Evaluated) -> tuple[Tensor, Tensor]:
        """Return the density and its gradient by white coordinates at evaluated points."""
        density, gradient = here.log_density, here.gradient
        if self.reference is not None and self.power < 1:
            log_q, slope = self.reference.score(here.points)
            density = self.power * density + (1 - self.power) * log_q
            gradient = self.power * gradient + (1 - self.power) * slope
        log_share = log_shares(self.frame, here.points, self.label_width)
        density = density + log_share.gather(-1, self.label.unsqueeze(-1)).squeeze(-1)
        return density, self.frame.pull_back(gradient, self.label)

    def state(self, here: Evaluated) -> ChainState:
        """Return the state of chains at evaluated points."""
        return ChainState(self.frame.to_white(here.points, self.label), *self.at(here))


def log_shares(frame: NormalMixture, points: Tensor, width: float) -> Tensor:
    """Return the log-probabilities of labels at points ``(n, d)``, ``(n, num_labels)``."""
    return (frame.log_joint(points) / width**2).log_softmax(-1)


def draw_labels(frame: NormalMixture, points: Tensor, width: float) -> Tensor:
    """Draw a label for each point, ``(n,)``."""
    shares = log_shares(frame, points, width).exp().nan_to_num(1.0)
    return torch.multinomial(shares, 1).squeeze(-1)


@dataclass
class Cloud:
    """Weighted particles.

    :param log_weights: log-weights of the density over the normalised reference, so that their sum
        estimates the evidence, ``(n,)`` in double precision.
    :param origin: the index of the first ancestor, ``(n,)``.
    :param stratum: the component of the reference of each origin, ``(num_origins,)``.
    """

    here: Evaluated
    log_weights: Tensor
    origin: Tensor
    stratum: Tensor

    @staticmethod
    def of(space: Space, reference: NormalMixture, number: int) -> Cloud:
        """Draw particles from a reference, a fixed number from each component."""
        weights = reference.log_weights.double()
        edges = (number * weights.exp().cumsum(0)).round().long()
        edges[-1] = number
        counts = torch.diff(edges, prepend=edges.new_zeros(1))
        stratum = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        points = reference.sample(stratum)
        log_weights = (weights - counts.log())[stratum]
        origin = torch.arange(number, device=points.device)
        return Cloud(Evaluated(points, *space.score(points)), log_weights, origin, stratum)

    @property
    def shares(self) -> Tensor:
        """The normalised weights, ``(n,)``."""
        return self.log_weights.softmax(0)

    def reweighted(self, ratio: Tensor, power: float, share: float) -> float:
        """Move the weights to the next power, and return it.

        :param ratio: log-ratios of the density at power 1 to the density at power 0, ``(n,)``; a
            particle without a finite ratio loses its weight.
        :raises ValueError: if no particle has a weight any more.
        """
        lost = ~ratio.isfinite()
        self.log_weights = self.log_weights.masked_fill(lost, -math.inf)
        if self.log_weights.isneginf().all():
            raise ValueError(
                "annealing lost all particles: the log-density and its gradient are finite at none "
                "of them. A log-density that rises without limit attracts them, such as that of "
                "-log(1 - cdf) by rounding. Cure: a model that is exact there"
            )
        ratio = ratio.masked_fill(lost, 0.0)
        after = next_power(ratio, self.log_weights.log_softmax(0), power, share)
        self.log_weights = self.log_weights + (after - power) * ratio
        return after

    def take(self, rows: Tensor) -> None:
        """Replace the particles by resampled ones of equal weights, ``(n,)``."""
        total = self.log_weights.logsumexp(0) - math.log(len(rows))
        self.here, self.origin = self.here.take(rows), self.origin[rows]
        self.log_weights = total.expand(len(rows))

    def resampled(self, number: int) -> Tensor:
        """Return resampled indices, so that the strata's shares change by one particle at most."""
        order = self.stratum[self.origin].argsort(stable=True)
        return order[systematic(self.shares[order], number)]

    def errors(self, values: Tensor) -> Tensor:
        """Return standard errors of weighted means of values ``(n, m)`` with mean 0."""
        return stratified_errors(self.shares.unsqueeze(-1) * values, self.origin, self.stratum)

    def drift(self, track: Tracker, num_chains: int, policy: StoppingPolicy) -> Drift:
        """Return bounds on the errors of tracked quantities, as those of chains.

        :param num_chains: the number of chains that are worth as many draws as the particles.
        """
        found = track(self.here.points, self.here.log_density)
        shares = self.shares
        # The log-density of a particle without weight may be -inf.
        values = found.values.double().masked_fill((shares == 0).unsqueeze(-1), 0.0)
        values = values - shares @ values
        values = values / pooled(shares @ values.square(), found.group).sqrt()
        squares = values.square() - shares @ values.square()
        heavy = ((shares @ squares.square()) / 2).sqrt().clamp(1.0, policy.max_allowance)
        mean = self.errors(values).max().item()
        sd = (0.5 * self.errors(squares) / heavy).max().item()
        # R-hat of chains whose means have this error.
        r_hat = math.sqrt(1 + num_chains * mean**2)
        return Drift(policy.errors * mean, policy.errors * sd, r_hat, num_chains, True)

    def joined(self, other: Cloud) -> Cloud:
        """Return the particles of two independent clouds of one reference."""
        one, two = (len(cloud.origin) for cloud in (self, other))
        logs = [
            cloud.log_weights + math.log(size / (one + two))
            for cloud, size in ((self, one), (other, two))
        ]
        return Cloud(
            Evaluated(*map(torch.cat, zip(self.here, other.here, strict=True))),
            torch.cat(logs),
            torch.cat([self.origin, len(self.stratum) + other.origin]),
            torch.cat([self.stratum, other.stratum]),
        )


class Walkers(NamedTuple):
    """The moves of particles: ``frame`` and the adaptation of Hamiltonian Monte Carlo.

    ``label_width`` is the factor on the standard deviations of the normals that give the labels.
    ``num_points`` counts gradients of single particles.
    """

    frame: NormalMixture
    adaptation: hmc.ChEES
    label_width: float
    num_points: int = 0

    def moved(
        self,
        space: Space,
        here: Evaluated,
        reference: NormalMixture | None = None,
        power: float = 1.0,
    ) -> tuple[Walkers, Evaluated]:
        """Make one transition of all points."""
        label = draw_labels(self.frame, here.points, self.label_width)
        score = LabelledScore(space, self.frame, label, self.label_width, reference, power)
        before = score.state(here)
        settings = self.adaptation.settings(before)
        after, info = hmc.step(before, score, settings)
        adaptation = self.adaptation.update(before, info, settings)
        assert score.last is not None
        rows = (after.position != before.position).any(-1)
        done = self.num_points + info.num_gradients * len(rows)
        return self._replace(adaptation=adaptation, num_points=done), chosen(rows, score.last, here)


def anneal(
    space: Space,
    reference: NormalMixture,
    walkers: Walkers,
    number: int,
    policy: TemperingPolicy = DEFAULT.tempering,
) -> tuple[Cloud, Walkers]:
    """Move particles from a reference to the posterior.

    The powers follow from the conditional effective sample size. At each power the particles are
    resampled if their weights are uneven, the frame learns from them, and they move.

    :param number: number of particles.
    :returns: weighted particles; frame and adaptation at the end.
    """
    cloud, power = Cloud.of(space, reference, number), 0.0
    known = policy.known_per_dim * reference.loc.shape[-1]
    walkers = walkers._replace(num_points=walkers.num_points + number)
    while power < 1:
        here = cloud.here
        ratio = (here.log_density - reference.log_joint(here.points).logsumexp(-1)).double()
        ratio = ratio.masked_fill(~here.gradient.isfinite().all(-1), math.nan)
        power = cloud.reweighted(ratio, power, policy.share)
        if 1 / cloud.shares.square().sum() < policy.resampling * number:
            cloud.take(cloud.resampled(number))
        points = cloud.here.points
        frame = walkers.frame.adapted(points, cloud.shares.to(points), known)
        walkers = walkers._replace(frame=frame)
        for _ in range(policy.moves):
            walkers, cloud.here = walkers.moved(space, cloud.here, reference, power)
    return cloud, walkers


def reference_of(
    modes: NormalMixture, wide: NormalMixture, widening: float, share: float
) -> NormalMixture:
    """Join normals at modes, widened, with a wide normal that has a share of the mass."""
    factor = 1 + widening / math.sqrt(modes.loc.shape[-1])
    logs = [modes.log_weights + math.log1p(-share), wide.log_weights + math.log(share)]
    return NormalMixture.of(
        torch.cat(logs),
        torch.cat([modes.loc, wide.loc]),
        torch.cat([factor * modes.scale_tril, wide.scale_tril]),
    )


def refined_normals(
    modes: NormalMixture, points: Tensor, policy: TemperingPolicy = DEFAULT.tempering
) -> tuple[NormalMixture, Tensor]:
    """Describe each mode by several normals, if there are enough points.

    :param points: points of equal weight, ``(n, d)``.
    :returns: the normals, and the mode of each.
    """
    dim, parts = points.shape[-1], []
    nearest = modes.log_joint(points).argmax(-1)
    for mode in range(len(modes.loc)):
        own = points[nearest == mode]
        number = min(policy.most_normals, len(own) // (policy.draws_per_normal * dim))
        loc, scale = modes.loc[mode : mode + 1], modes.scale_tril[mode : mode + 1]
        if number > 1:
            loc = own[torch.randperm(len(own), device=own.device)[:number]]
            scale = scale.expand(number, dim, dim) * number ** (-1 / dim)
        share = torch.full((len(loc),), max(1, len(own)) / len(loc)).to(points)
        parts.append((share.log(), loc, scale))
    normals = NormalMixture.of(*map(torch.cat, zip(*parts, strict=True)))
    even = torch.full((len(points),), 1 / len(points)).to(points)
    for _ in range(policy.em_steps):
        normals = normals.adapted(points, even, policy.known_per_dim * dim)
    counts = torch.tensor([len(loc) for _, loc, _ in parts], device=points.device)
    return normals, torch.arange(len(parts), device=points.device).repeat_interleave(counts)


class ModeLabels:
    """Groups of normals, one group for each mode.

    :param normals: normals of all modes; a point belongs to the likeliest.
    :param group: the mode of each normal.
    """

    def __init__(self, normals: NormalMixture, group: Tensor) -> None:
        self.normals, self.group = normals, group

    def label(self, latent: Tensor) -> Tensor:
        """Return the mode at latents ``(n, d)``, ``(n,)``."""
        return self.group[self.normals.log_joint(latent).nan_to_num(nan=-math.inf).argmax(-1)]

    def join(
        self, space: Space, points: Tensor, policy: TemperingPolicy = DEFAULT.tempering
    ) -> None:
        """Join modes between which the log-density does not dip.

        Lines connect the nearest points of two modes. The modes are one if the best of these lines
        is not lower than lines between neighbours in the lighter mode. A mode without points joins
        the nearest one.

        :param points: points of equal weight, ``(n, d)``.
        """
        number, most = policy.num_lines, policy.num_compared
        label = self.label(points)
        owned = {mode: points[label == mode] for mode in self.group.unique().tolist()}
        lightest_first = sorted(owned, key=lambda mode: len(owned[mode]))
        few = {mode: own[torch.randperm(len(own))[:most]] for mode, own in owned.items()}
        for index, mode in enumerate(lightest_first[:-1]):
            some, others = few[mode], lightest_first[index + 1 :]
            if len(some) < policy.least_compared:
                own = self.group == mode
                log_joint = self.normals.log_joint(self.normals.loc[own])
                best = log_joint.masked_fill(own, -math.inf).amax(0).argmax()
                self.group[own] = self.group[best].clone()
                continue
            whiten = self.normals.whiten[self.normals.log_joint(some).argmax(-1)[0]].mT
            lines = [_lines(some, some, whiten, number, same=True)]
            lines += [_lines(some, few[one], whiten, number) for one in others]
            on_lines = torch.stack(lines)  # (1 + num_others, number, 3, d)
            heights = space.target.log_prob(on_lines.flatten(0, 2)).reshape(on_lines.shape[:3])
            lowest = heights.amin(-1)
            bridges = lowest[1:].amax(-1)
            if bridges.max() > lowest[0].median() - SEARCH.min_dip:
                self.group[self.group == mode] = others[int(bridges.argmax())]

    def weigh(self, cloud: Cloud) -> ModeWeights:
        """Return the weights of the modes by weighted particles."""
        shares = cloud.shares
        _, index = self.label(cloud.here.points).unique(return_inverse=True)
        values = torch.nn.functional.one_hot(index).to(shares)
        weights = shares @ values
        errors = cloud.errors(torch.cat([values - weights, torch.ones_like(values[:, :1])], -1))
        order = weights.argsort(descending=True)
        log_evidence = cloud.log_weights.logsumexp(0).item()
        return ModeWeights(weights[order], errors[:-1][order], log_evidence, errors[-1].item())


def _lines(some: Tensor, others: Tensor, whiten: Tensor, number: int, same: bool = False) -> Tensor:
    """Return points between the nearest of two sets of points, ``(number, 3, d)``."""
    distances = torch.cdist(some @ whiten, others @ whiten)
    if same:  # of each point of a few, the nearest other one
        nearest = distances.fill_diagonal_(math.inf)[:number].argmin(-1)
        start, end = some[:number], others[nearest]
    else:
        order = distances.flatten().argsort()[:number]
        start, end = some[order // len(others)], others[order % len(others)]
    if len(start) < number:
        rows = torch.arange(number, device=start.device) % len(start)
        start, end = start[rows], end[rows]
    shares = torch.tensor([0.25, 0.5, 0.75]).to(start)[:, None]
    return start.unsqueeze(1) + shares * (end - start).unsqueeze(1)


class Annealed(NamedTuple):
    """Draws by annealing.

    ``draws`` are unconstrained, ``(num_snapshots, num_chains, d)``; ``walkers`` moved them, with
    ``num_gradients`` as if each chain had taken as many. ``weights`` are None if annealing began
    with the prior, as of discrete latent variables. ``stopped`` is as in
    :class:`~pyro_implicit.mcmc.Refined`.
    """

    draws: Tensor
    weights: ModeWeights | None
    drift: Drift
    walkers: Any
    stopped: Stopped
    num_gradients: int
    seconds: float


def join_clouds(
    draw: Callable[[], tuple[Cloud, int]],
    is_exact: Callable[[Cloud, float], bool],
    track: Tracker,
    plan: ChainSetup,
    cpu_began: float,
    usable: float = 0.0,
) -> tuple[Cloud, Drift, Stopped, int]:
    """Join independent clouds until they are exact enough, or the budget is spent.

    :param draw: returns a cloud, and the gradients of single particles so far.
    :param is_exact: judges the joined clouds, and the larger error of :meth:`Cloud.drift`.
    :param cpu_began: the process time from which the plan's patience counts.
    :param usable: an error with which annealing ends at its budget, whatever patience is left.
    :returns: the clouds, their errors, why annealing ended, and the gradients of each chain.
    """
    joined: Cloud | None = None
    stopped: Stopped | None = None
    with new_stage("refine") as line, watch("temper", plan.max_gradients) as watched:
        while stopped is None:
            try:
                cloud, num_points = draw()
            except KeyboardInterrupt:
                if joined is None:
                    raise
                stopped = "interrupted"
                break
            except OutOfTime:
                if joined is None:
                    raise
                stopped = "max_seconds" if plan.limit.is_over() else "max_gradients"
                break
            joined = cloud if joined is None else joined.joined(cloud)
            drift = joined.drift(track, plan.num_chains, plan.policy.stopping)
            error = max(drift.mean, drift.sd)
            num_gradients = math.ceil(num_points / plan.num_chains)
            watched.step(num_gradients, partial(dict, error=error))
            may_end = error <= usable or time.process_time() - cpu_began >= plan.patience
            if is_exact(joined, error):
                stopped = "converged"
            elif plan.limit.is_over():
                stopped = "max_seconds"
            elif num_gradients >= plan.max_gradients and may_end:
                stopped = "max_gradients"
            elif watched.stopped:
                stopped = "callback"
        line.outcome = f"{stopped} after {num_gradients} gradients"
    assert joined is not None
    return joined, drift, stopped, num_gradients


def temper(space: Space, modes: Modes, track: Tracker, plan: ChainSetup) -> Annealed:
    """Draw from all modes by annealing.

    A first cloud starts from the normals of the search. Its particles, once settled, give each mode
    several normals, from which further clouds start until weights of modes and tracked quantities
    are exact enough, or the budget is spent. The particles of these clouds are resampled and move.

    :param space: the latents of the target.
    :param modes: the known modes; some may be missing.
    :param track: the quantities whose errors decide.
    :param plan: the number of chains and their budget; with patience, annealing goes on after the
        budget if the errors are too large to be used.
    """
    cpu_began = time.process_time()
    began, policy, limits = time.perf_counter(), plan.policy, plan.policy.tempering
    number, dim = min(limits.num_particles, 2 * plan.num_chains), modes.loc.shape[-1]
    wide = _wide(space.target.init_loc, space.target.sample_prior(policy.frame.num_draws))
    log_mass = (0.5 * modes.elbo.softmax(0) + 0.5 / len(modes.loc)).log()
    normals = NormalMixture.of(log_mass, modes.loc, modes.scale_tril)
    reference = reference_of(normals, wide, limits.widening, limits.prior_share)
    adaptation = hmc.adaptation(policy, min(limits.max_leapfrogs, plan.max_leapfrogs))
    adaptation = adaptation.started_at(limits.first_step * dim**-0.25)
    walkers = Walkers(reference, adaptation, limits.label_width)
    cloud, walkers = anneal(space, reference, walkers, number, limits)
    here = cloud.here.take(cloud.resampled(number))
    walkers, pool = _settle(space, walkers, here, normals, limits)
    normals, group = refined_normals(walkers.frame.components(slice(len(modes.loc))), pool, limits)
    labels = ModeLabels(normals, group)
    labels.join(space, pool, limits)
    walkers = walkers._replace(frame=normals)
    reference = reference_of(normals, wide, limits.second_widening, limits.second_prior_share)

    def draw() -> tuple[Cloud, int]:
        nonlocal walkers
        cloud, walkers = anneal(space, reference, walkers, number, limits)
        return cloud, walkers.num_points

    def is_exact(cloud: Cloud, error: float) -> bool:
        is_known = bool((labels.weigh(cloud).errors <= limits.max_error).all())
        return is_known and error <= policy.stopping.max_error

    usable = policy.stopping.max_usable_error
    joined, drift, stopped, _ = join_clouds(draw, is_exact, track, plan, cpu_began, usable)
    weights = labels.weigh(joined)
    here = joined.here.take(joined.resampled(plan.num_chains))
    walkers = walkers._replace(adaptation=walkers.adaptation.frozen())
    walkers, _, draws = _walk(space, walkers, here, limits.num_draws)
    num_gradients = math.ceil(walkers.num_points / plan.num_chains)
    seconds = time.perf_counter() - began
    return Annealed(draws, weights, drift, walkers, stopped, num_gradients, seconds)


def _settle(
    space: Space, walkers: Walkers, here: Evaluated, modes: NormalMixture, policy: TemperingPolicy
) -> tuple[Walkers, Tensor]:
    """Make transitions at the posterior until the spread around the modes no longer grows.

    :returns: the walkers, and positions of the second half, ``(num_positions, d)``.
    """
    number, before = policy.settling, None
    while True:
        walkers, here, positions = _walk(space, walkers, here, number)
        pool = positions[number // 2 :].flatten(0, 1)
        nearest = modes.log_joint(pool).argmax(-1)
        own = torch.nn.functional.one_hot(nearest, len(modes.loc)).to(pool)
        mean = own.mT @ pool / own.sum(0).clamp(min=1).unsqueeze(-1)
        spread = (pool - mean[nearest]).std(0)
        is_still = before is not None and bool((spread <= policy.still * before).all())
        if is_still or number >= policy.most_settling:
            return walkers, pool
        number, before = (number if before is None else 2 * number), spread


def _walk(
    space: Space, walkers: Walkers, here: Evaluated, number: int
) -> tuple[Walkers, Evaluated, Tensor]:
    """Make transitions at the posterior, and return all positions, ``(number, n, d)``."""
    positions = []
    for _ in range(number):
        walkers, here = walkers.moved(space, here)
        positions.append(here.points)
    return walkers, here, torch.stack(positions)


def _wide(like: Tensor, drawn: Tensor) -> NormalMixture:
    """Return a normal of the size of prior draws ``(n, d)``, by their quartiles."""
    if len(drawn) < 2:
        drawn = like + torch.tensor([[-1.0], [1.0]]).to(like)
    low, middle, high = drawn.quantile(torch.tensor([0.25, 0.5, 0.75]).to(drawn), 0)
    sd = ((high - low) / 1.349).clamp(min=torch.finfo(drawn.dtype).tiny ** 0.5)
    return NormalMixture.of(middle.new_zeros(1), middle.unsqueeze(0), sd.diag().unsqueeze(0))
