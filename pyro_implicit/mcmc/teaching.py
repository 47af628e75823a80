# SPDX-License-Identifier: Apache-2.0
"""Training of a guide on posterior draws."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
from pyro.infer.autoguide.utils import deep_setattr
from torch import Tensor

from pyro_implicit.mcmc.frame import estimate_frame
from pyro_implicit.mcmc.guide_density import DensityAtDraws, density_at_draws
from pyro_implicit.mcmc.policy import TEACHING, TeachPolicy
from pyro_implicit.runtime.global_state import in_turn, with_seed
from pyro_implicit.runtime.progress import new_stage, watch, watching
from pyro_implicit.runtime.sites import unconstrained

__all__ = ["Taught", "teach"]


@dataclass(frozen=True)
class Taught:
    """The gain of a training on draws.

    ``before`` and ``after`` are the guide's mean log-densities, in nats, at held-out draws; if they
    are equal, the guide did not change. The training took ``num_steps`` steps and ``seconds``.
    """

    before: float
    after: float
    num_steps: int
    seconds: float

    def __str__(self) -> str:
        if self.after == self.before:
            return "held-out draws did not become likelier: the guide did not change"
        return f"mean log q of held-out draws rose by {self.after - self.before:.3g} nats"


@in_turn
@with_seed
def teach(
    guide: Callable[..., Any],
    draws: Mapping[str, Tensor],
    *args: Any,
    num_steps: int = 500,
    lr: float = 0.01,
    batch_size: int = 128,
    seed: int | None = None,
    progress: bool = True,
    policy: TeachPolicy | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Taught:
    r"""Train a guide on posterior draws, in place.

    The training maximises the mean of :math:`\log q(\theta)` over the draws, which minimises the
    forward divergence :math:`KL(p \| q)`: the guide covers the whole posterior, while an ELBO
    concentrates it on the bulk. A unimodal guide of several modes also covers the region between
    them. The Gaussian guides ``AutoNormal``, ``AutoDiagonalNormal`` and ``AutoMultivariateNormal``
    take the moments of the draws, which is the maximum. Any other guide is trained by Adam, whose
    rate falls to zero along a cosine. The last fifth of the draws is held out, and the guide ends
    with the parameters at which they were likeliest, never below its initial log-density.

    The weights of an :class:`~pyro_implicit.AutoMixture` do not change.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> guide = AutoNormal(model)
    >>> taught = teach(guide, {"x": torch.linspace(3.0, 5.0, 100)[torch.randperm(100)]})
    >>> taught.after > taught.before, f"{guide.median()['x']:.0f}"
    (True, '4')

    :param guide: a guide with a density at any point: Gaussian autoguides and flows,
        :class:`~pyro_implicit.AutoImplicit` with an injective generator, an
        :class:`~pyro_implicit.AutoMixture` of such guides, or a guide written by hand.
    :param draws: constrained values by site, ``(num_draws, *site_shape)``, chain after chain, as
        :meth:`Refined.get_samples` returns them, so that whole chains are held out.
    :param args: arguments of the guide.
    :param num_steps: maximum number of Adam steps. The training ends earlier if the held-out draws
        have not become likelier for 150 steps.
    :param lr: Adam's learning rate, which suits a guide of unit scale.
    :param batch_size: draws at each step.
    :param seed: the seed of all random numbers of this call. The caller's random streams do not
        advance; without a seed they are used.
    :param progress: whether to show a bar.
    :param policy: sizes of the training and validation sets and the patience; by default those of
        :class:`~pyro_implicit.mcmc.TeachPolicy`.
    :param model_kwargs: keyword arguments of the guide whose names this function has too.
    :param kwargs: further keyword arguments of the guide.
    :raises ValueError: for a guide without a density, or without parameters, or too few draws.
    """
    kwargs, policy = {**kwargs, **(model_kwargs or {})}, policy or TEACHING
    began = time.perf_counter()
    parameters = _parameters(guide, args, kwargs)
    learnt, held_out = _parts(dict(draws), policy)
    density = density_at_draws(guide, learnt, args, kwargs)
    score = _HeldOutScore(density_at_draws(guide, held_out, args, kwargs))
    best = KeptBest(parameters, score())
    before, steps = best.score, 0
    with watching(progress), new_stage("teach") as line:
        try:
            if _take_moments(guide, density):
                best.update(score())
            else:
                size, rows = density.num_draws, density.objective
                steps = maximise(rows, size, best, score, num_steps, lr, batch_size, policy)
        finally:  # interrupted, too
            best.restore()
        taught = Taught(before, best.score, steps, time.perf_counter() - began)
        line.outcome = str(taught)
    return taught


def maximise(
    objective: Callable[[Tensor], Tensor],
    num_rows: int,
    best: KeptBest,
    score: Callable[[], float],
    num_steps: int,
    lr: float,
    batch_size: int,
    policy: TeachPolicy,
    name: str = "teach",
    max_seconds: float = math.inf,
) -> int:
    """Maximise an objective by Adam, until the score of held-out rows stops rising.

    :param objective: a function of the indices of some rows.
    :param num_rows: the number of rows for training.
    :param best: the parameters, which it keeps at the best score.
    :param score: of the held-out rows.
    :param name: the name of the loop.
    :param max_seconds: the limit of wall time.
    :returns: the number of steps.
    """
    steps, size, began = 0, min(batch_size, num_rows), time.perf_counter()
    optimiser, device = torch.optim.Adam(best.parameters, lr), best.parameters[0].device
    with watch(name, num_steps) as watched:
        while steps < num_steps and best.age < policy.patience and not watched.stopped:
            share = max(steps / num_steps, (time.perf_counter() - began) / max_seconds)
            for group in optimiser.param_groups:
                group["lr"] = 0.5 * lr * (1 + math.cos(math.pi * min(share, 1.0)))
            rows = torch.randint(num_rows, (size,), device=device)
            loss = -objective(rows)
            if loss.requires_grad:  # the guide has a density at some of these draws
                descend(loss, optimiser, policy.clip_norm)
            steps += 1
            watched.step(values=lambda: {"score": best.score})
            is_last = steps == num_steps or watched.stopped or share >= 1
            if steps % policy.every == 0 or is_last:
                best.update(score())
            if is_last:
                break
    optimiser.zero_grad()
    return steps


def _parameters(guide: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    with poutine.block(), poutine.trace(param_only=True) as capture:
        guide(*args, **kwargs)
    nodes = capture.trace.nodes.values()
    found = {id(p): p for p in (unconstrained(site) for site in nodes)}
    parameters = [p for p in found.values() if p.requires_grad]
    if not parameters:
        raise ValueError(
            f"the guide {getattr(guide, '__name__', type(guide).__name__)} has no parameter to "
            "train. Cure: a guide with pyro.param, or one of the autoguides"
        )
    return parameters


def _parts(
    draws: dict[str, Tensor], policy: TeachPolicy
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    count = min((len(value) for value in draws.values()), default=0)
    if count < policy.least_draws:
        raise ValueError(f"teach needs at least {policy.least_draws} draws, but got {count}")
    device = next(iter(draws.values())).device
    rows = torch.arange(count, device=device)
    parts = []
    last = count // policy.held_out_part
    few = policy.max_learnt // (policy.held_out_part - 1)
    for part, most in ((rows[:-last], policy.max_learnt), (rows[-last:], few)):
        chosen = part[torch.linspace(0, len(part) - 1, min(len(part), most)).round().long()]
        parts.append({name: value[chosen].detach() for name, value in draws.items()})
    return parts[0], parts[1]


def descend(loss: Tensor, optimiser: torch.optim.Optimizer, clip_norm: float) -> float:
    """Take a step along the clipped gradient, if this is finite, and return its norm before."""
    optimiser.zero_grad()
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    loss.backward(inputs=parameters)  # other parameters get no gradient
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm).item()
    if math.isfinite(norm):
        optimiser.step()
    return norm


def _take_moments(guide: Any, density: DensityAtDraws) -> bool:
    """Give a Gaussian guide the moments of the draws; return whether it is Gaussian."""
    if not isinstance(guide, (AutoMultivariateNormal, AutoDiagonalNormal, AutoNormal)):
        return False
    is_full = isinstance(guide, AutoMultivariateNormal)
    frame = estimate_frame(density.latent, "full" if is_full else "diagonal")
    scale = frame.scale
    if frame.scale_tril is not None:
        diagonal = frame.scale_tril.diagonal()
        scale = scale * diagonal
        guide.scale_tril = frame.scale.unsqueeze(-1) * frame.scale_tril / scale.unsqueeze(-1)
    if not isinstance(guide, AutoNormal):
        guide.loc.data.copy_(frame.loc)
        guide.scale = scale
        return True
    first = 0
    for name, _ in guide.prototype_trace.iter_stochastic_nodes():
        shape = guide._get_loc_and_scale(name)[0].shape
        for module, values in ((guide.locs, frame.loc), (guide.scales, scale)):
            deep_setattr(module, name, values[first : first + shape.numel()].reshape(shape))
        first += shape.numel()
    return True


class KeptBest:
    """Parameters with the values of the best score so far."""

    def __init__(self, parameters: list[Tensor], score: float) -> None:
        self.parameters, self.score, self.age = parameters, score, 0
        self._values = [parameter.detach().clone() for parameter in parameters]

    def update(self, score: float) -> None:
        self.age += 1
        if score > self.score:
            self.score, self.age = score, 0
            self._values = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, value in zip(self.parameters, self._values, strict=True):
            parameter.copy_(value)


class _HeldOutScore:
    """Mean log-density of the validation set, without draws at which it is not finite at first."""

    def __init__(self, density: DensityAtDraws) -> None:
        self._density = density
        self._rows = torch.arange(density.num_draws, device=density.device)
        finite = self._log_q().isfinite()
        if finite.any():
            self._rows = self._rows[finite]

    def __call__(self) -> float:
        return self._log_q().nan_to_num(nan=-math.inf, neginf=-math.inf).mean().item()

    @torch.no_grad()
    def _log_q(self) -> Tensor:
        return torch.cat([self._density.log_prob(rows) for rows in self._rows.split(256)])
