# SPDX-License-Identifier: Apache-2.0
"""Initial values for many latent variables, for which no modes are searched."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pyro_implicit.compiled import CompileMode
from pyro_implicit.density.checks.numerics import finite_log_prob, heights_of
from pyro_implicit.density.cost import TracedScore
from pyro_implicit.density.mode_search import near_origin
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.policy import DEFAULT, StartPolicy
from pyro_implicit.guides.policy import INIT_SCALE
from pyro_implicit.nn import start_values

__all__ = ["best_of_race", "between", "first_scales"]


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
    heights = heights_of(target, starts)
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
    shape = policy.num_samples, target.latent_dim
    stream = torch.Generator("cpu").manual_seed(0)  # the caller's does not advance
    noise = torch.randn(shape, generator=stream, device="cpu").to(centre)
    step = target.score(centre)[1].sign().nan_to_num(0.0)
    least = finite_log_prob(target, centre) - policy.max_fall * target.latent_dim

    def first(largest: float, directions: Tensor) -> float:
        for factor in policy.factors:
            if finite_log_prob(target, centre + factor * largest * directions).median() >= least:
                break
        return factor * largest

    return first(INIT_SCALE, noise), first(lr, step)


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
        and points between its medians and draws, in turns; half are near the origin if the prior is
        vague.
    :param scale: initial standard deviation.
    :param rate: the learning rate of Adam.
    :param seconds: a limit.
    :param policy: the numbers of initial values and of steps.
    :param compile: how the score is evaluated, as in :class:`~pyro_implicit.infer.ImplicitELBO`.
    :returns: the location of the mean field with the highest ELBO at the end, constrained; and the
        outcome in words, empty if ``seconds`` allows only few steps, or if no ELBO is finite. The
        location is then ``values``.
    """
    number = policy.num_raced
    steps = min(policy.race_steps, int(seconds / target.seconds(number)))
    if steps < policy.least_race_share * policy.race_steps:
        return values, ""
    drawn = target.sample_prior(number - 1)
    shares = torch.tensor([policy.spread, 1.0]).to(drawn).repeat(number)[: len(drawn), None]
    first = target.unconstrain({name: value.unsqueeze(0) for name, value in values.items()})
    others = target.init_loc + shares * (drawn - target.init_loc)
    near = near_origin(target, drawn, number // 2)
    loc = torch.cat([first, others[len(near) :], near])
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
    # The last step may have led to where float32 overflows.
    ends = ends.masked_fill(~target.log_prob(loc.detach()).isfinite(), -math.inf)
    best = int(ends.argmax())
    if not ends[best].isfinite():
        return values, ""
    outcome = (
        f"; the best of {len(loc)} starts, with an ELBO of {ends[best]:.0f} after {steps} steps"
    )
    outcome += f" (the median of all: {ends.median():.0f})"
    return {n: part[0] for n, part in target.constrain(loc[best : best + 1]).items()}, outcome
