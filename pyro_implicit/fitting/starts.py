# SPDX-License-Identifier: Apache-2.0
"""Initial values for many latent variables, and the turns in which draws of angles lie."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pyro_implicit.compiled import CompileMode
from pyro_implicit.density.bijections import intervals_of
from pyro_implicit.density.checks.numerics import finite_log_prob
from pyro_implicit.density.cost import TracedScore
from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.model import total_log_prob
from pyro_implicit.density.policy import ANGLES, RUNS, SEARCH
from pyro_implicit.density.symmetry import find_symmetries
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.policy import DEFAULT, StartPolicy
from pyro_implicit.nn import start_values
from pyro_implicit.runtime.global_state import same_streams

__all__ = ["best_of_race", "between", "find_phases", "first_scales", "middle_of_turns"]


#: By site, the bounds of its values.
Phases: TypeAlias = dict[str, tuple[Tensor, Tensor]]


def between(target: Target, policy: StartPolicy = DEFAULT.start) -> dict[str, Tensor]:
    """Return initial values between the prior's medians and one of its draws.

    Weights of a network that are equal stay equal, and a draw of their prior is much too large. The
    values of a module's own weights are better, if the model has them. An extreme start (the median
    of ``InverseGamma(0.001, 0.001)`` is about 1e35) is moved towards the origin of unconstrained
    space.
    """
    drawn = target.sample_prior(1)
    step = policy.spread * (drawn[0] - target.init_loc) if len(drawn) else 0.0
    shares = torch.tensor(policy.shares).to(target.init_loc).unsqueeze(-1)
    starts = shares * (target.init_loc + step)
    heights = finite_log_prob(target, starts)
    accepted = heights > heights.max() - policy.max_fall * target.latent_dim
    values = target.constrain(starts[int(accepted.to(torch.uint8).argmax())])
    if isinstance(target.model, nn.Module):
        known = start_values(target.model)
        values |= {name: known[name] for name in values.keys() & known.keys()}
    return values


def first_scales(
    target: Target, values: dict[str, Tensor], lr: float, policy: StartPolicy = DEFAULT.start
) -> tuple[float, float]:
    """Return a mean field's initial standard deviation, and a learning rate, that are small enough.

    Draws must not be far less probable than their centre, nor must the point that one step of Adam
    reaches. In a random walk of thousands of steps, the changes of all steps add up.

    :param values: the centre, constrained, by site.
    :param lr: the largest learning rate.
    :param policy: the factors to try, and the nats of an acceptable fall.
    :returns: the scale and the learning rate.
    """
    centre = target.unconstrain({name: value.unsqueeze(0) for name, value in values.items()})
    shape = policy.num_draws, target.latent_dim
    stream = torch.Generator("cpu").manual_seed(0)  # the caller's does not advance
    noise = torch.randn(shape, generator=stream, device="cpu").to(centre)
    step = target.score(centre)[1].sign().nan_to_num(0.0)
    least = finite_log_prob(target, centre) - policy.max_fall * target.latent_dim

    def first(largest: float, directions: Tensor) -> float:
        for factor in policy.factors:
            if finite_log_prob(target, centre + factor * largest * directions).median() >= least:
                break
        return factor * largest

    return first(policy.scale, noise), first(lr, step)


def best_of_race(
    target: Target,
    values: dict[str, Tensor],
    scale: float,
    rate: float,
    seconds: float,
    policy: StartPolicy = DEFAULT.start,
    compile: CompileMode = "auto",
) -> tuple[dict[str, Tensor], str]:
    """Return the best of several initial values: train a mean field from each for a short time.

    All are trained together, each by one draw in a step. Chains see only the mode in which their
    mean field ends. Ideal points whose signs are determined by two half-normal latent variables,
    for instance, have a mirrored mode 70 nats below.

    :param values: one of the initial values, constrained, by site. Others are draws of the prior,
        and points between its medians and draws, in turns.
    :param scale: initial standard deviation.
    :param rate: the learning rate of Adam.
    :param seconds: a limit.
    :param policy: the numbers of initial values and of steps.
    :param compile: how the score is evaluated, as in :class:`~pyro_implicit.infer.ImplicitELBO`.
    :returns: the location of the mean field with the highest ELBO at the end, constrained; and the
        outcome in words, empty if ``seconds`` allows only few steps.
    """
    number = policy.num_raced
    steps = min(policy.race_steps, int(seconds / target.seconds(number)))
    if steps < policy.least_race_steps:
        return values, ""
    drawn = target.sample_prior(number - 1)
    shares = torch.tensor([policy.spread, 1.0]).to(drawn).repeat(number)[: len(drawn), None]
    first = target.unconstrain({name: value.unsqueeze(0) for name, value in values.items()})
    loc = torch.cat([first, target.init_loc + shares * (drawn - target.init_loc)])
    log_scale = torch.full_like(loc, math.log(scale))
    score = TracedScore(target.score, steps, compile)
    optimizer = torch.optim.Adam([loc, log_scale], lr=rate)
    elbos = []
    for _ in range(steps):
        noise = torch.randn_like(loc)
        log_prob, gradient = score(loc + log_scale.exp() * noise)
        gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
        elbos.append(log_prob + log_scale.sum(-1))
        loc.grad, log_scale.grad = -gradient, -gradient * log_scale.exp() * noise - 1.0
        optimizer.step()
    constant = 0.5 * target.latent_dim * math.log(2 * math.pi * math.e)
    ends = torch.stack(elbos[steps * 3 // 4 :]).median(0).values + constant
    ends = ends.nan_to_num(-math.inf, -math.inf, -math.inf)  # a spike of the density is no mode
    best = int(ends.argmax())
    outcome = (
        f"; the best of {len(loc)} starts, with an ELBO of {ends[best]:.0f} after {steps} steps"
    )
    outcome += f" (the median of all: {ends.median():.0f})"
    return {n: part[0] for n, part in target.constrain(loc[best : best + 1]).items()}, outcome


def find_phases(target: Target) -> Phases:
    """Return the uniform latent variables at whose bounds the density is the same, and its slope.

    Such as a phase that is uniform on [0, 2 pi): where the posterior lies at its bounds, they cut
    one mode into two, which no chain connects.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     phase = pyro.sample("phase", dist.Uniform(0.0, 2 * math.pi))
    ...     size = pyro.sample("size", dist.Uniform(0.0, 2.0))
    ...     pyro.sample("y", dist.Normal(size * phase.cos(), 1.0), obs=torch.tensor(0.5))
    >>> find_phases(Target(model))
    {'phase': (tensor(0.), tensor(6.2832))}

    :param target: the posterior.
    """
    found = intervals_of(target.trace_at(target.init_loc))
    if not found:
        return {}
    with same_streams():
        values = target.constrain(target.sample_prior(RUNS.num_compared_runs))
    return {name: ends for name, ends in found.items() if _meet(target, values, name, *ends)}


@torch.no_grad()
def _meet(
    target: Target, values: Mapping[str, Tensor], name: str, low: Tensor, high: Tensor
) -> bool:
    """Return whether the density of a site is the same at both ends, and has the same slope.

    An even density is the same at both ends, too, but its slopes are not.
    """
    number, largest = len(values[name]), torch.nextafter(high, low)
    doubled = {other: value.repeat(2, *[1] * (value.dim() - 1)) for other, value in values.items()}

    def heights(share: float) -> Tensor:
        ends = [torch.lerp(low, largest, share), torch.lerp(largest, low, share)]
        at_ends = torch.cat([end.expand_as(values[name]) for end in ends])
        log_prob = target.read_at({**doubled, name: at_ends}, total_log_prob)
        return log_prob.double().unflatten(0, (2, number))

    try:
        ends = heights(0.0)
        rounding = RUNS.repeat_tolerance * (1 + ends[0].abs())
        if not ((ends[0] - ends[1]).abs() <= rounding).all():
            return False
        slopes = heights(ANGLES.phase_step) - ends
        rise = (heights(0.25) - ends).abs().amax(0)
    except Exception:  # of any kind, as models may not take values at the ends
        return False
    return bool((slopes.sum(0).abs() <= ANGLES.phase_step * rise + rounding).all())


def middle_of_turns(
    target: Target, num_iterations: int, seconds: float, phases: Phases | None = None
) -> Mapping[str, Tensor | None]:
    r"""Return the middle of the turn for latent angles: their values at the best mode.

    The moments of draws then have a meaning, and modes are not cut into two. Angles that symmetries
    move, such as those of the components of a mixture, share the middle 0 or :math:`\pi`. A density
    that is not periodic in its angles has no middle: they end where their prior ends.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     phi = pyro.sample("phi", dist.VonMises(3.0, 100.0))
    ...     pyro.sample("y", dist.VonMises(phi, 100.0), obs=torch.tensor(-3.0))
    >>> middle = middle_of_turns(Target(model), 100, seconds=10.0)["phi"]
    >>> bool((middle.abs() - torch.pi).abs() < 0.05)
    True

    :param target: whose angles are those of ``target.turns``.
    :param num_iterations: the maximal number of Newton iterations. If it is 0, L-BFGS climbs from
        ``target.init_loc`` instead, at its values of discrete latent variables.
    :param seconds: the limit of the search in wall time.
    :param phases: of :func:`find_phases`, which are angles, too, if they are at the mode.
    :returns: by site, of the shape of its value; see
        :func:`~pyro_implicit.density.bijections.on_one_turn`.
    :raises ValueError: if the log-density is finite at none of the initial points of the search.
    """
    middle = dict[str, Tensor | None](dict.fromkeys(target.turns))
    bounds = dict(phases or {})
    if target.turns and _is_periodic(target):
        bounds |= {name: (zero - math.pi, zero + math.pi) for name, zero in target.turns.items()}
    if not bounds:
        return middle
    values = target.constrain(_mode(target, num_iterations, seconds))
    # At draws of vague priors, rounding may hide a difference between the ends.
    at_mode = {name: value.unsqueeze(0) for name, value in values.items()}
    for name, ends in (phases or {}).items():
        if not _meet(target, at_mode, name, *ends):
            del bounds[name]
    for name, (low, high) in bounds.items():
        middle[name] = low + torch.remainder(values[name] - low, high - low)
    for group in find_symmetries(target, seconds).groups:
        for place in group.places:
            if angles := [name for name in place.sites if name in bounds]:
                shares = {n: (values[n] - low) / (high - low) for n, (low, high) in bounds.items()}
                shared = _shared(shares[name] for name in angles)
                middle |= {name: torch.lerp(*bounds[name], shared) for name in angles}
    return middle


def _is_periodic(target: Target) -> bool:
    """Return whether the density stays the same where each angle moves by whole turns."""
    values = target.constrain(target.sample_prior(RUNS.num_compared_runs))
    generator = torch.Generator("cpu").manual_seed(0)  # the caller's stream does not advance
    turned = dict(values)
    for name in target.turns:
        shape = values[name].shape
        turns = torch.randint(-2, 3, shape, generator=generator, device="cpu").to(values[name])
        turned[name] = values[name] + 2 * math.pi * turns
    before, after = (target.read_at(draws, total_log_prob) for draws in (values, turned))
    return torch.allclose(before, after, RUNS.tolerance, RUNS.tolerance, equal_nan=True)


def _mode(target: Target, num_iterations: int, seconds: float) -> Tensor:
    if num_iterations > 0:
        modes = find_modes(
            target,
            ANGLES.num_starts,
            max_rounds=1,
            max_iterations=min(num_iterations, SEARCH.max_iterations),
            max_seconds=seconds,
        )
        return modes.loc[int(modes.elbo.argmax())]
    deadline = time.perf_counter() + seconds
    point = target.init_loc.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([point], line_search_fn="strong_wolfe")

    def climb() -> Tensor:
        log_prob, score = target.score(point.detach().unsqueeze(0))
        point.grad = -score.squeeze(0)
        return -log_prob.squeeze(0)

    for _ in range(ANGLES.max_climbs):
        optimiser.step(climb)
        if time.perf_counter() > deadline:
            break
    return point.detach() if point.isfinite().all() else target.init_loc


def _shared(shares: Iterable[Tensor]) -> float:
    """Return the half or the whole of a turn, whichever is farther from cutting one of the values.

    :param shares: of the turn, from its begin to each of the values.
    """
    cos = torch.cat([2 * math.pi * share.flatten() for share in shares]).cos()
    return 0.5 if (1 - cos).min() >= (1 + cos).min() else 1.0
