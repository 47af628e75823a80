# SPDX-License-Identifier: Apache-2.0
"""A fitted guide from a model, with nothing to set."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGuide, AutoMultivariateNormal
from torch import Tensor

from pyro_implicit.density.engine import SubsampledError
from pyro_implicit.density.latent_density import LatentDensity
from pyro_implicit.density.modes import Modes, find_modes
from pyro_implicit.fitting.checkpoint import same_start
from pyro_implicit.fitting.gaussian import gaussian_guide
from pyro_implicit.fitting.training import Schedule, train
from pyro_implicit.fitting.weights import mixture_weights
from pyro_implicit.generators.autoregressive import AutoregressiveGenerator
from pyro_implicit.guides import AutoImplicit, AutoSemiImplicit
from pyro_implicit.guides.auto_mixture import AutoMixture
from pyro_implicit.guides.names import own_names
from pyro_implicit.infer import LIVI_ELBO, ImplicitELBO, InjectiveELBO
from pyro_implicit.infer.bound import weighted_draws

__all__ = ["Fit", "fit"]

MAX_DENSE_DIM = 100
NEAR_ENOUGH = 0.01  # nats
FOLDED = 0.5  # nats: two folds are log 2


@dataclass
class Fit:
    """What :func:`fit` returns.

    ``guide`` is the fitted guide, ``losses`` are those of its training, one for each step (of a
    mixture's components one after the other). ``bounds`` are what decided between the candidates,
    in nats: the mean of log p - log q without its lowest hundredth. ``num_modes`` is the number of
    separate modes that the search found, None where there was none.
    """

    guide: Callable[..., Any]
    losses: list[float]
    bounds: dict[str, float] = field(default_factory=dict)
    num_modes: int | None = None


def fit(
    model: Callable[..., Any],
    guide: str | AutoGuide | Callable[..., Any] = "auto",
    *args: Any,
    loss: Trace_ELBO | None = None,
    num_steps: int = 3000,
    lr: float = 0.01,
    num_particles: int = 128,
    seed: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 500,
    progress: bool = True,
    **kwargs: Any,
) -> Fit:
    r"""Fits a guide to a model.

    With ``guide="auto"`` and at most 100 latents,

    1. :func:`~pyro_implicit.density.find_modes` climbs the log-density from many draws of the
       prior, which gives a Gaussian for each separate mode;
    2. in the frame of that Gaussian an :class:`AutoImplicit` with an
       :class:`AutoregressiveGenerator` is trained by :class:`InjectiveELBO`, whose exact density
       stops it as soon as guide and posterior agree: for near-Gaussian posteriors, funnels, skew
       and heavy tails;
    3. several modes make an :class:`AutoMixture` of such guides, whose weights maximise its ELBO
       (each is trained for ``num_steps`` over the square root of their number);
    4. if that is not within a hundredth of a nat of the posterior, an :class:`AutoSemiImplicit` is
       trained by :class:`LIVI_ELBO` as well, for every other shape, and the one of the higher bound
       is kept. If its loss promises half a nat more than its bound keeps, its generator has folded,
       which LIVI does not see, and it is trained once more from another start.

    Of more latents, or with data that the model subsamples, an :class:`AutoSemiImplicit` of
    diagonal frame is trained by :class:`LIVI_ELBO`.

    All of it is public: to set more, put the pieces together yourself.

    **Example:**

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> result = fit(model, "auto", torch.tensor(2.0), seed=0, progress=False)
    >>> print(f"{result.guide.median()['x']:.1f}")
    1.0

    :param model: a Pyro model with continuous latents.
    :param guide: ``"auto"``, or a guide to be trained in place.
    :param args: of the model, as ``kwargs``.
    :param loss: by which a given guide is trained; by default :class:`LIVI_ELBO` for
        :class:`AutoSemiImplicit`, :class:`InjectiveELBO` for :class:`AutoImplicit`, else Pyro's
        ELBO with vectorised particles.
    :param num_steps: of each training, at most: it is slowed down once the smoothed loss stands
        still (:class:`~pyro_implicit.fitting.Schedule`).
    :param lr: learning rate, which suits latents that are of unit scale in the guide's frame.
    :param num_particles: of the default losses.
    :param seed: by default the random streams are taken as they are.
    :param checkpoint: a folder. A run that was killed goes on from there when it is called again
        with the same arguments, and ends with the same parameters to the last bit.
    :param checkpoint_every: steps between two writings.
    :param progress: whether to show a bar for each training.
    :raises ValueError: for an unknown guide, a model whose log-density is nowhere finite, or a
        checkpoint of a run with other settings (that its data were others goes unnoticed).
    """
    folder = None if checkpoint is None else Path(checkpoint)
    if seed is not None:
        pyro.set_rng_seed(seed)
    if folder is not None:
        settings = {
            "guide": guide if isinstance(guide, str) else type(guide).__name__,
            "num_steps": num_steps,
            "lr": lr,
            "num_particles": num_particles,
            "seed": seed,
        }
        same_start(folder / "start.pt", settings)
    resume: dict[str, Any] = {
        "checkpoint": folder,
        "checkpoint_every": checkpoint_every,
        "progress": progress,
    }

    def run(name: str, guide: Callable[..., Any], loss: Trace_ELBO, share: float = 1.0) -> list:
        schedule = Schedule(num_steps=math.ceil(share * num_steps), lr=lr)
        return train(model, guide, loss, *args, schedule=schedule, name=name, **resume, **kwargs)

    if guide != "auto":
        if isinstance(guide, str):
            raise ValueError(f'guide must be "auto" or a guide, but got {guide!r}')
        return Fit(guide, run("guide", guide, loss or default_loss(guide, num_particles)))
    if loss is not None:
        raise ValueError('loss is for a given guide; guide="auto" chooses its own')
    density = _density(model, args, kwargs)
    if density is None:
        guide = own_names(AutoSemiImplicit(model, init_scale=0.01))
        return Fit(guide, run("semi-implicit", guide, default_loss(guide, min(num_particles, 8))))

    modes = find_modes(density)
    exact: AutoImplicit | AutoMixture
    parts = [
        AutoImplicit(model, AutoregressiveGenerator, base_guide=frame)
        for frame in _frames(model, modes, args, kwargs)
    ]
    if len(parts) == 1:
        name, exact = "injective", own_names(parts[0])
        losses = run(name, exact, default_loss(exact, num_particles))
    else:
        name, exact = "mixture", own_names(AutoMixture(model, parts))
        losses = []
        for index, part in enumerate(exact.components):
            loss = InjectiveELBO(num_particles, nonfinite="skip")
            losses += run(f"mode-{index}", part, loss, share=len(parts) ** -0.5)
        with poutine.block():
            exact(*args, **kwargs)
        components = exact.get_posterior().components
        exact.log_weights = mixture_weights(density, components).log_weights
    log_weights = _log_weights(model, exact, args, kwargs)
    result = Fit(exact, losses, {name: log_weights.mean().item()}, len(parts))
    if 0.5 * log_weights.var() < NEAR_ENOUGH:
        return result

    draws = density.unconstrain(exact.sample_posterior(10_000))
    scale_tril = torch.linalg.cholesky(draws.mT.cov())
    frame = gaussian_guide(model, draws.mean(0), scale_tril, *args, **kwargs)
    for attempt in ("semi-implicit", "semi-implicit-again"):
        semi_implicit = own_names(AutoSemiImplicit(model, base_guide=frame))
        losses = run(attempt, semi_implicit, default_loss(semi_implicit, num_particles))
        bound = _log_weights(model, semi_implicit, args, kwargs).mean().item()
        # LIVI takes a generator that covers the same place twice for one of more entropy.
        if -fmean(losses[-100:]) - bound < FOLDED:
            break
    if bound > result.bounds[name]:
        result.guide, result.losses = semi_implicit, losses
    result.bounds["semi-implicit"] = bound
    return result


def default_loss(guide: Callable[..., Any], num_particles: int) -> Trace_ELBO:
    """The ELBO for a guide: by its kind, and Pyro's own for guides with a density."""
    if isinstance(guide, AutoSemiImplicit):
        return LIVI_ELBO(num_particles, nonfinite="skip")
    if isinstance(guide, AutoImplicit):
        return InjectiveELBO(num_particles, coverage=1.0, nonfinite="skip")
    return ImplicitELBO(num_particles, nonfinite="skip")


def _density(model: Callable[..., Any], args: Any, kwargs: Any) -> LatentDensity | None:
    """The log-density, if it is one of few latents and all data."""
    try:
        density = LatentDensity(model, *args, **kwargs)
    except SubsampledError:
        return None
    return density if density.latent_dim <= MAX_DENSE_DIM else None


def _frames(
    model: Callable[..., Any], modes: Modes, args: Any, kwargs: Any
) -> list[AutoMultivariateNormal]:
    return [
        gaussian_guide(model, loc, scale_tril, *args, **kwargs)
        for loc, scale_tril in zip(modes.loc, modes.scale_tril, strict=True)
    ]


def _log_weights(
    model: Callable[..., Any], guide: Callable[..., Any], args: Any, kwargs: Any
) -> Tensor:
    """log p - log q at draws, without the lowest hundredth.

    There lie the few draws of a guide that covers too much, which cost nothing but nats.
    """
    log_weights = weighted_draws(model, guide, *args, **kwargs).log_weights
    return log_weights.sort().values[len(log_weights) // 100 :]
