# SPDX-License-Identifier: Apache-2.0
"""Stages of ``fit`` for a log-density that costs a pass over minibatches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.modes import Modes
from pyro_implicit.density.pass_target import PassTarget
from pyro_implicit.density.policy import SEARCH
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.policy import PassPolicy
from pyro_implicit.fitting.refinement import (
    affordable_chains,
    has_failed,
    large_errors,
    patience_of,
)
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.guides import AutoMixture
from pyro_implicit.guides.sampler import Sampler, StoredDraws
from pyro_implicit.mcmc import Refined
from pyro_implicit.mcmc.refine import refine_target
from pyro_implicit.mcmc.spaces.choice import ChainSetup
from pyro_implicit.ops import LogWeights
from pyro_implicit.ops.annealing import NormalMixture
from pyro_implicit.ops.matrices import lower_factor, root_of_inverse
from pyro_implicit.ops.quadrature import normal_draws
from pyro_implicit.runtime.clock import TimeLimit
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.messages import warn_user
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.processes import any_process, num_processes

__all__ = ["OnePass", "PassStages", "count_modes", "is_late", "pilot_modes", "use_gaussians"]


class OnePass:
    """The minibatches of a stream: each iteration is one whole pass."""

    def __init__(self, stream: BatchStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[tuple]:
        self.stream.begin_pass()  # an earlier iteration may have ended within a pass
        for _ in range(self.stream.epoch_length):
            yield self.stream.next()


def pilot_modes(pilot: Target, stages: Stages, policy: PassPolicy) -> Modes:
    """Search for the modes of the first minibatches.

    :param pilot: the posterior of the first minibatches. It may be scaled to all data.
    """
    # Several processes have different clocks, so their search has no time limit.
    left = stages.limit.left(SEARCH.time_share)
    return find_modes(
        pilot,
        num_starts=policy.num_starts,
        max_rounds=policy.search_rounds,
        max_iterations=policy.search_iterations,
        max_seconds=left if num_processes() == 1 else math.inf,
    )


def count_modes(modes: Modes) -> str:
    """Return the number of modes in words."""
    return f"{len(modes.loc)} mode{'s'[: len(modes.loc) > 1]}"


def use_gaussians(stages: Stages, modes: Modes) -> None:
    """Make the Gaussians at modes the guide of the result."""
    # Latent variables of rows would advance the streams of processes differently.
    with seeded(0, modes.loc.device):
        guide = stages.exact_guide(modes)
    if isinstance(guide, AutoMixture):
        guide.log_weights = modes.elbo.log_softmax(0)
    stages.result.guide, stages.result.chosen = guide, "gaussian"


def is_late(limit: TimeLimit, like: Tensor, seconds: float = 0.0) -> bool:
    """Return whether less than so many seconds are left, in any process."""
    return any_process(limit.left() <= seconds or limit.is_over(), like.device)


class PassStages:
    """Newton steps, importance weights and chains, with few evaluations of the log-density.

    :param stages: the state of the call.
    :param target: the log-density.
    :param policy: budgets and limits.
    :param what: names the latent variables in messages.
    """

    def __init__(self, stages: Stages, target: PassTarget, policy: PassPolicy, what: str) -> None:
        self.stages, self.target, self.policy, self.what = stages, target, policy, what
        #: What to add to the outcome of a climb that ended early.
        self.note = ""

    def warn_of_missing(self, plate: str, full_size: int) -> None:
        """Warn if minibatches have another number of rows or groups than their plate."""
        number, unit = self.target.num_units, self.target.unit
        if abs(number / full_size - 1) > self.policy.max_missing:
            warn_user(
                f"the minibatches have {number} {unit}, but plate '{plate}' has {full_size}: the "
                f"posterior is as narrow as that of {full_size} {unit}. Cure: all {unit} in "
                f"batches=, or pyro.plate('{plate}', {number}, ...)"
            )

    def climb_all(self, modes: Modes) -> Modes:
        """Climb from each mode of the pilot; merge equal modes, drop ones far below the best."""
        found: list[tuple[Tensor, Tensor, float]] = []
        for start in modes.loc:
            loc, root, height = self._climb(start)
            steps = [torch.linalg.solve(other[1], loc - other[0]).norm() for other in found]
            if all(step > SEARCH.same for step in steps):
                found.append((loc, root, height + torch.linalg.slogdet(root).logabsdet.item()))
        found.sort(key=lambda one: -one[2])
        found = [one for one in found if one[2] >= found[0][2] - SEARCH.max_gap]
        locs, roots, heights = zip(*found, strict=True)
        factors = torch.stack([lower_factor(root) for root in roots])
        return Modes(torch.stack(locs), factors, locs[0].new_tensor(heights) - heights[0])

    def _climb(self, point: Tensor) -> tuple[Tensor, Tensor, float]:
        """Climb by Newton steps, each one pass; a step that lowers the density is shortened."""
        target, policy, length = self.target, self.policy, 1.0
        target.centre(point)
        height, score, hessian = target.derivatives(point.unsqueeze(0))
        root, _ = root_of_inverse(hessian[0])
        for _ in range(policy.max_passes):
            whitened = root.mT @ score[0]
            if whitened.square().sum() < policy.at_top or is_late(self.stages.limit, point):
                break
            new = point + length * (root @ whitened)
            after = target.derivatives(new.unsqueeze(0))
            if after[0] >= height - policy.rounding:
                point, length = new, min(1.0, 2 * length)
                height, score, hessian = after
                root, _ = root_of_inverse(hessian[0])
            else:
                length /= 4
        if (root.mT @ score[0]).square().sum() >= policy.at_top:
            self.note = "; not converged"
        return point, root, target.height(height)

    def weigh(self, modes: Modes) -> tuple[Tensor, LogWeights | None]:
        """Return draws of the Gaussians at the modes, corrected by importance weights.

        With many rows each weight is expensive, but the posterior is close to normal: a few even
        weights move mean and covariance of the draws. If they are uneven, or more are cheap, the
        draws are resampled by more weights.

        :returns: draws ``(num_draws, latent_dim)``, and the weights; None if time ended them.
        """
        target, policy = self.target, self.policy
        result, limit = self.stages.result, self.stages.limit
        draws, _ = _sobol(modes, policy.num_samples)
        with result.stage("correct") as line:
            if is_late(limit, draws):
                line.outcome = self._warn_of_gaussian()
                return draws, None
            target.centre(modes.loc[0])
            few, most = policy.num_weighed, policy.num_samples
            few = max(few, 2 ** math.ceil(math.log2(policy.weighed_per_dim * target.latent_dim)))
            points, found = _log_weights(target, modes, few, few, limit)
            is_cheap = most * target.num_evaluations <= policy.cheap_evaluations
            if len(modes.loc) == 1 and found.efficiency > policy.near_normal and not is_cheap:
                share = f"effective sample size {found.efficiency:.1%}"
                line.outcome = f"moments by {few} weights, {share}"
                return _moved(draws, points, found.smoothed.log_weights.exp()), found
            if found.effective_sample_size < policy.least_promising:
                line.outcome = f"{few} weights: {found}"
                return draws, found
            if is_late(limit, draws):
                line.outcome = f"{few} weights: {found}; {self._warn_of_gaussian()}"
                return draws, None
            affordable = policy.most_evaluations / target.num_evaluations
            most = 2 ** int(math.log2(max(few, min(most, affordable))))
            wide = _widened(modes, policy.widening)
            points, found = _log_weights(target, wide, few, most, limit, self._suffice)
            line.outcome = f"{len(found)} weights: {found}"
            draws = points[found.resample(policy.num_samples)]
            if len(found) < most and not policy.accepts(found):
                worth = f"are as good as {found.efficiency * len(found):.0f} independent ones"
                if found.khat > policy.max_khat:
                    worth = "may be wrong"
                warn_user(
                    f"max_seconds ended the correction after {len(found)} weights of {most} "
                    f"({found}): the draws of {self.what} {worth}. Cure: a larger max_seconds"
                )
                return draws, None  # chains would take longer
            return draws, found

    def stored(self, draws: Tensor, weights: LogWeights | None) -> StoredDraws:
        """Store weighed draws in random order, with doubts if the weights are not accepted.

        :param draws: with ``weights``, the results of :meth:`weigh`.
        """
        is_sound = weights is not None and self.policy.accepts(weights)
        draws = draws[torch.randperm(len(draws))]  # evenly spaced Sobol points share their digits
        return StoredDraws(
            self.target.constrain(draws),
            settled=is_sound,
            modes_weighed=True,
            doubts=() if is_sound else (f"importance weights: {weights or 'none'}",),
        )

    def refine(self, draws: Tensor, log_weights: LogWeights) -> Refined | None:
        """Move draws by chains over all data; None, after a warning, if there are too many."""
        stages, target = self.stages, self.target
        result, alone = stages.result, num_processes() == 1
        if target.num_units > self.policy.most_chained or not alone:
            reason = f"{target.num_units} {target.unit} would take too long"
            reason = reason if alone else "one process only"  # others would stop at other times
            warn_user(
                f"the posterior of {self.what} is far from normal ({log_weights}), and no chains "
                f"correct it: {reason}. Cure: other coordinates of these variables"
            )
            return None
        with result.attempt("refine") as line:
            chains = affordable_chains(target.score, target.init_loc, budget=stages.policy.budget)
            plan = ChainSetup(
                Sampler(target, target.constrain(draws[torch.randperm(len(draws))])),
                chains.num_chains,
                chains.max_gradients,
                limit=stages.limit,
                patience=patience_of(stages),
            )
            refined = refine_target(plan)
            line.outcome = f"{refined.stopped} after {refined.num_gradients} gradients"
        if has_failed(line):
            return None
        if drifts := large_errors(result, line, refined):
            cure = "other coordinates of these variables"
            if refined.stopped == "max_seconds":
                cure = "a larger max_seconds"
            warn_user(
                f"chains of {self.what} stopped at {refined.stopped} before they converged: "
                f"{drifts}. Cure: {cure}"
            )
        return refined

    def _suffice(self, found: LogWeights) -> bool:
        """Return whether more weights would cost more than they are worth."""
        is_cheap = len(found) * self.target.num_evaluations <= self.policy.cheap_evaluations
        return not is_cheap and self.policy.accepts(found)

    def _warn_of_gaussian(self) -> str:
        """Warn that no weights correct the draws; return the outcome of the stage."""
        warn_user(
            f"max_seconds left no time for importance weights: the draws of {self.what} are those "
            "of the Gaussian at the mode. Cure: a larger max_seconds"
        )
        return "no time left: the draws are those of the Gaussian"


def _widened(modes: Modes, widening: float) -> Modes:
    """Add a wider Gaussian at each mode, for the tails."""
    return Modes(
        modes.loc.repeat(2, 1),
        torch.cat([modes.scale_tril, widening * modes.scale_tril]),
        modes.elbo.repeat(2),
    )


def _log_weights(
    target: PassTarget,
    modes: Modes,
    few: int,
    most: int,
    limit: TimeLimit,
    suffice: Callable[[LogWeights], bool] = lambda found: False,
) -> tuple[Tensor, LogWeights]:
    """Weigh points of a mixture: a few, then as many again until they suffice or time ends."""
    points, log_q = _sobol(modes, most)
    began, log_p = time.perf_counter(), target.log_prob(points[:few])
    while True:
        done = len(log_p)
        found = LogWeights((log_p - log_q[:done]).nan_to_num(-math.inf))
        took = time.perf_counter() - began
        if done >= most or suffice(found) or is_late(limit, log_p, took):
            return points[:done], found
        log_p = torch.cat([log_p, target.log_prob(points[done : 2 * done])])


def _sobol(modes: Modes, number: int) -> tuple[Tensor, Tensor]:
    """Return Sobol points of the mixture of Gaussians, and their log-density.

    They are mirrored pairs: the skewness of the posterior then does not change a covariance that
    few of their weights estimate.
    """
    q = NormalMixture.of(modes.elbo, modes.loc, modes.scale_tril)
    seed = int(torch.randint(2**31, ()))
    half = normal_draws(number // 2, modes.loc.shape[-1], modes.loc, seed)
    noise = torch.stack([half, -half], 1).flatten(0, 1)
    which = torch.zeros(number, dtype=torch.long, device=noise.device)
    if len(modes.loc) > 1:
        levels = (torch.randperm(number, device=noise.device) + 0.5) / number
        which = torch.bucketize(levels.to(noise), modes.elbo.softmax(0).cumsum(0)[:-1])
    points = q.to_points(noise, which)
    return points, q.log_joint(points).logsumexp(-1)


def _moved(draws: Tensor, points: Tensor, weights: Tensor) -> Tensor:
    """Move draws by the difference of weighted and unweighted moments of some points."""
    equal = torch.full_like(weights, 1 / len(weights))
    mean, root = _moments(points, weights)
    old_mean, old_root = _moments(points, equal)
    factor = root @ torch.linalg.inv(old_root)
    return (mean + (draws.double() - old_mean) @ factor.mT).to(draws)


def _moments(points: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    points, weights = points.double(), weights.double()
    mean = weights @ points
    return mean, lower_factor((weights.sqrt().unsqueeze(-1) * (points - mean)).mT)
