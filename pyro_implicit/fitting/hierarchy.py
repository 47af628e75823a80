# SPDX-License-Identifier: Apache-2.0
"""``fit`` for hierarchical models with many groups: local latent variables are integrated out."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from pyro_implicit.density.groups import Groups
from pyro_implicit.density.marginal_target import MarginalTarget
from pyro_implicit.density.mode_search import Modes, find_modes
from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.policy import SEARCH
from pyro_implicit.fitting.arguments import any_process, common_seed, num_processes
from pyro_implicit.fitting.parameters import model_parameters
from pyro_implicit.fitting.refinement import affordable_chains, patience_of
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.stages import Stages
from pyro_implicit.guides.auto_hierarchical import AutoHierarchical
from pyro_implicit.guides.sampler import Sampler, StoredDraws
from pyro_implicit.mcmc.minibatch_chains import check_scaling
from pyro_implicit.mcmc.refine import refine_target
from pyro_implicit.mcmc.spaces.choice import ChainSetup
from pyro_implicit.ops import LogWeights
from pyro_implicit.ops.annealing import NormalMixture
from pyro_implicit.ops.matrices import lower_factor, root_of_inverse
from pyro_implicit.ops.quadrature import NormalRule, normal_draws, normal_rule
from pyro_implicit.runtime.clock import TimeLimit
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.messages import first_line, warn_user
from pyro_implicit.runtime.minibatches import BatchStream

__all__ = ["fit_hierarchy"]


class _Pass:
    """One pass over the minibatches in each iteration."""

    def __init__(self, stream: BatchStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[tuple]:
        for _ in range(self.stream.epoch_length):
            yield self.stream.next()


def fit_hierarchy(stages: Stages) -> Fit:
    """Infer the global variables from the marginal likelihood of all groups.

    The stages are: **search**, for the modes of a few hundred groups; **marginal**, Newton steps by
    passes over all groups; **correct**, importance weights of the Gaussian at the mode; and
    **refine**, chains if the weights are uneven and all groups are cheap enough.

    :raises ValueError: without minibatches, with a checkpoint, or for a model with parameters.
    """
    _refuse_unsupported(stages)
    with seeded(common_seed()):  # all processes decide alike
        return _fit(stages)


def _fit(stages: Stages) -> Fit:
    result, policy = stages.result, stages.policy.hierarchy
    assert stages.batches is not None
    groups = Groups(stages.model, stages.first_batch, stages.args, stages.kwargs)
    check_scaling(groups.target, stages.batches, num_processes())
    if names := model_parameters(groups.target):
        raise ValueError(
            f"amortize='conditional' does not train parameters of the model ({', '.join(names)}). "
            "Cure: latent variables with priors instead, or amortize='auto'"
        )
    with result.stage("search") as line:
        pilot = _pilot(groups, stages)
        modes = find_modes(
            pilot,
            num_starts=policy.num_starts,
            max_rounds=policy.search_rounds,
            max_iterations=policy.search_iterations,
            max_seconds=_search_seconds(stages),
        )
        rule, shift = _choose_rule(pilot, modes, stages)
        number = len(normal_rule(groups.num_latents, rule, modes.loc)[1])
        line.outcome = (
            f"{len(modes.loc)} mode{'s'[: len(modes.loc) > 1]} of {pilot.num_groups} groups; "
            f"{number} nodes, error {shift:.1g} sd"
        )
        if not shift <= policy.max_shift:
            warn_user(
                f"the integrals over the latents of groups are inexact: with {number} nodes "
                f"the posterior may be off by {shift:.2g} standard deviations. "
                "Cure: other coordinates of the latents of groups, in which their conditional "
                "posteriors are closer to normal"
            )
    target = MarginalTarget(groups, _Pass(stages.batches), rule)
    with result.stage("marginal") as line:
        modes = _climb_all(target, modes, stages)
        result.num_modes = len(modes.loc)
        line.outcome = f"{target.num_passes} passes over {target.num_groups} groups"
        full = groups.full_size
        if abs(target.num_groups / full - 1) > policy.max_missing:
            warn_user(
                f"the minibatches have {target.num_groups} groups, but plate '{groups.plate}' has "
                f"{full}: the posterior is as narrow as that of {full} groups. Cure: all "
                f"groups in batches=, or pyro.plate('{groups.plate}', {target.num_groups}, ...)"
            )
    draws, log_weights = _weigh(stages, target, modes)
    if log_weights is not None and not policy.accepts(log_weights):
        draws = _refine(stages, target, draws, log_weights)
    draws = draws[torch.randperm(len(draws))]  # evenly spaced Sobol points share their digits
    values = target.constrain(draws)
    result.guide, result.chosen = AutoHierarchical(stages.model, StoredDraws(values)), "conditional"
    return result


def _search_seconds(stages: Stages) -> float:
    """Return the limit of the search; several processes, whose clocks differ, have none."""
    left = stages.limit.left(stages.policy.budget.search_share)
    return left if num_processes() == 1 else math.inf


def _refuse_unsupported(stages: Stages) -> None:
    if stages.batches is None:
        raise ValueError(
            "amortize='conditional' passes over minibatches of groups. Cure: batches=loader, or "
            "batches=[(x,)] for all groups at once"
        )
    if stages.options.get("checkpoint") is not None:
        raise ValueError(
            "amortize='conditional' takes passes instead of steps, and writes no checkpoints. "
            "Cure: no checkpoint="
        )


def _pilot(groups: Groups, stages: Stages) -> MarginalTarget:
    """Return the posterior of a few hundred groups, those of the first minibatches."""
    assert stages.batches is not None
    least = math.ceil(stages.policy.hierarchy.num_pilot / num_processes())
    found: list[tuple] = []
    count = 0
    for batch in _Pass(stages.batches):
        found.append(_few(groups, batch, least - count))
        count += groups.on(found[-1]).size
        if count >= least:
            break
    return MarginalTarget(groups, found, has_all=False)


def _few(groups: Groups, batch: tuple, number: int) -> tuple:
    """Return the first groups of a minibatch whose tensors have groups as first dimension."""
    size = groups.on(batch).size
    if size <= number:
        return batch
    few = tuple(
        part[:number] if isinstance(part, Tensor) and part.dim() and len(part) == size else part
        for part in batch
    )
    with suppress(*IMPOSSIBLE):  # another dimension of some tensor may be that of the groups
        if groups.on(few).size == number:
            return few
    return batch


def _choose_rule(pilot: MarginalTarget, modes: Modes, stages: Stages) -> tuple[NormalRule, float]:
    r"""Return the smallest quadrature that suffices, or the best one, and its estimated error.

    The error is :math:`|F^\top (g - g')|` of the scores g, g' of two rules, where
    :math:`F F^\top` is the covariance of the posterior. It grows as the root of the number of
    groups.
    """
    policy = stages.policy.hierarchy
    at, root, groups = modes.loc[:1], modes.scale_tril[0], pilot.groups_of_batch

    @functools.cache
    def score(rule: NormalRule) -> Tensor:
        trial = pilot.with_rule(rule)
        found = (trial.score(at)[1] @ root).squeeze(0)
        return math.sqrt(max(1.0, groups.full_size / trial.num_groups)) * found

    best, least = NormalRule(policy.num_nodes[-1]), math.inf
    for rule, others in policy.rules(groups.num_latents):
        errors = torch.stack([score(other) - score(rule) for other in others])
        shift = errors.square().sum(-1).mean().sqrt().item()
        if shift <= policy.max_shift:
            return rule, shift
        if shift < least:
            best, least = others[-1], shift
    return best, least


def _climb_all(target: MarginalTarget, modes: Modes, stages: Stages) -> Modes:
    """Climb from each mode of the pilot; merge equal modes and drop modes far below the best."""
    found: list[tuple[Tensor, Tensor, float]] = []
    for start in modes.loc:
        loc, root, height = _climb(target, start, stages)
        steps = [torch.linalg.solve(other[1], loc - other[0]).norm() for other in found]
        if all(step > SEARCH.same for step in steps):
            found.append((loc, root, height + torch.linalg.slogdet(root).logabsdet.item()))
    found.sort(key=lambda one: -one[2])
    found = [one for one in found if one[2] >= found[0][2] - SEARCH.max_gap]
    locs, roots, heights = zip(*found, strict=True)
    factors = torch.stack([lower_factor(root) for root in roots])
    return Modes(torch.stack(locs), factors, locs[0].new_tensor(heights) - heights[0])


def _climb(target: MarginalTarget, point: Tensor, stages: Stages) -> tuple[Tensor, Tensor, float]:
    """Climb by Newton steps, each one pass; a step that lowers the density is shortened."""
    policy, length = stages.policy.hierarchy, 1.0
    target.centre(point)
    height, score, hessian = target.derivatives(point.unsqueeze(0))
    root, _ = root_of_inverse(hessian[0])
    for _ in range(policy.max_passes):
        whitened = root.mT @ score[0]
        if whitened.square().sum() < policy.at_top or _is_late(stages.limit, point):
            break
        new = point + length * (root @ whitened)
        after = target.derivatives(new.unsqueeze(0))
        if after[0] >= height - policy.rounding:
            point, length = new, min(1.0, 2 * length)
            height, score, hessian = after
            root, _ = root_of_inverse(hessian[0])
        else:
            length /= 4
    return point, root, target.height(height)


def _is_late(limit: TimeLimit, like: Tensor, seconds: float = 0.0) -> bool:
    """Return whether less than so many seconds are left, in any process."""
    return any_process(limit.left() <= seconds or limit.is_over(), like.device)


def _weigh(
    stages: Stages, target: MarginalTarget, modes: Modes
) -> tuple[Tensor, LogWeights | None]:
    """Return draws of the Gaussians at the modes, corrected by importance weights.

    With many groups each weight is expensive, but the posterior is close to normal: a few even
    weights move mean and covariance of the draws. If they are uneven, or more are cheap, the draws
    are resampled by more weights.
    """
    policy, result, limit = stages.policy.hierarchy, stages.result, stages.limit
    draws, _ = _sobol(modes, policy.num_samples)
    with result.stage("correct") as line:
        if _is_late(limit, draws):
            line.outcome = _warn_of_gaussian()
            return draws, None
        target.centre(modes.loc[0])
        few, most = policy.num_weighed
        few = max(few, 2 ** math.ceil(math.log2(policy.weighed_per_dim * target.latent_dim)))
        points, found = _log_weights(target, modes, few, few, limit)
        is_cheap = most * target.num_evaluations <= policy.cheap_evaluations
        if len(modes.loc) == 1 and found.efficiency > policy.near_normal and not is_cheap:
            line.outcome = f"moments by {few} weights, effective sample size {found.efficiency:.1%}"
            return _moved(draws, points, found.smoothed.log_weights.exp()), found
        if _is_late(limit, draws):
            line.outcome = f"{few} weights: {found}; {_warn_of_gaussian()}"
            return draws, None
        affordable = policy.most_evaluations / target.num_evaluations
        most = 2 ** int(math.log2(max(few, min(most, affordable))))
        points, found = _log_weights(target, _widened(modes, policy.widening), few, most, limit)
        line.outcome = f"{len(found)} weights: {found}"
        draws = points[found.resample(policy.num_samples)]
        if len(found) < most and not policy.accepts(found):
            worth = f"are as good as {found.efficiency * len(found):.0f} independent ones"
            if found.khat > policy.max_khat:
                worth = "may be wrong"
            warn_user(
                f"max_seconds ended the correction after {len(found)} weights of {most} ({found}): "
                f"the draws of the global variables {worth}. Cure: a larger max_seconds"
            )
            return draws, None  # chains would take longer
        return draws, found


def _warn_of_gaussian() -> str:
    """Warn that no weights correct the draws; return the outcome of the stage."""
    warn_user(
        "max_seconds left no time for importance weights: the draws of the global variables are "
        "those of the Gaussian at the mode. Cure: a larger max_seconds"
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
    target: MarginalTarget, modes: Modes, few: int, most: int, limit: TimeLimit
) -> tuple[Tensor, LogWeights]:
    """Weigh points of a mixture: a few, then as many again while there is time for these."""
    points, log_q = _sobol(modes, most)
    began, log_p = time.perf_counter(), target.log_prob(points[:few])
    while (done := len(log_p)) < most:
        if _is_late(limit, log_p, time.perf_counter() - began):
            break
        log_p = torch.cat([log_p, target.log_prob(points[done : 2 * done])])
    return points[:done], LogWeights((log_p - log_q[:done]).nan_to_num(-math.inf))


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


def _refine(
    stages: Stages, target: MarginalTarget, draws: Tensor, log_weights: LogWeights
) -> Tensor:
    """Move draws by chains over all groups, unless there are too many."""
    result, budget, policy = stages.result, stages.policy.budget, stages.policy.hierarchy
    alone = num_processes() == 1  # chains of several processes would stop at different times
    if target.num_groups > policy.most_chained or not alone:
        reason = f"{target.num_groups} groups would take too long" if alone else "one process only"
        warn_user(
            f"the posterior of the global variables is far from normal ({log_weights}), and no "
            f"chains correct it: {reason}. Cure: other coordinates of these variables"
        )
        return draws
    with result.attempt("refine") as line:
        chains = affordable_chains(target.score, target.init_loc, budget=budget)
        plan = ChainSetup(
            Sampler(target, target.constrain(draws[torch.randperm(len(draws))])),
            chains.num_chains,
            chains.max_gradients,
            limit=stages.limit,
            patience=patience_of(stages),
        )
        refined = refine_target(plan)
        line.outcome = f"{refined.stopped} after {refined.num_gradients} gradients"
        result.interrupted = refined.stopped == "interrupted"
        if not (refined.settled or result.interrupted):
            warn_user(
                f"chains of the global variables stopped at {refined.stopped} before they "
                f"converged: {refined.drift}. Cure: a larger max_seconds"
            )
        return target.unconstrain(refined.get_samples())
    warn_user(f"fit did not refine its draws: {first_line(line.error)}")
    return draws
