# SPDX-License-Identifier: Apache-2.0
"""What :func:`~pyro_implicit.diagnostics.diagnose` needs before and beside its checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.policy import MAX_DENSE_DIM
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.findings import STORED
from pyro_implicit.guides.posterior_draws import draw, trace_guide
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.guides.stored_draws import StoredDraws
from pyro_implicit.infer.bound import EvidenceBound, WeightedDraws, weighted_draws
from pyro_implicit.runtime.random_stream import same_streams

__all__ = [
    "BAD_DRAWS",
    "can_search",
    "check_modes",
    "check_sites",
    "log_mean_exp",
    "objective_gap",
    "search_modes",
    "weigh_draws",
]

NUM_LOSSES = 20
#: What a guide or model says of numbers that it cannot work with.
BAD_DRAWS = (ValueError, ArithmeticError, torch.linalg.LinAlgError)


def check_modes(modes: Tensor | str | None, dim: int) -> None:
    """Refuse an unknown word, and what are no points."""
    if isinstance(modes, str) and modes != "search":
        raise ValueError(f'modes must be "search", a tensor or None, but got {modes!r}')
    if isinstance(modes, Tensor):
        if modes.dim() != 2 or modes.shape[-1] != dim or not modes.isfinite().all():
            raise ValueError(
                f"modes must be finite points in unconstrained space, (num_modes, {dim}), but got "
                f"shape {tuple(modes.shape)}. Cure: Target(model, ...).unconstrain(...)"
            )


def check_sites(
    density: Target, guide: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> None:
    """Refuse a guide that lacks a latent, or has another number of its elements."""
    try:
        nodes = trace_guide(guide, args, kwargs).nodes
    except BAD_DRAWS:  # of which the verdict is going to tell
        return
    for name, value in density.constrain(density.init_loc).items():
        if name not in nodes:
            raise ValueError(
                f"the guide has no site '{name}', which the model samples. Cure: add the site to "
                "the guide, or condition the model on its value"
            )
        shape = nodes[name]["value"].shape
        if shape.numel() != value.numel():
            sampler = Sampler(density, guide)
            raise sampler.wrong_shape(name, ("num_draws", *shape), tuple(value.shape))


def weigh_draws(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    num_samples: int,
    chunk_size: int,
    unweighed: str = "",
) -> tuple[WeightedDraws, str]:
    """Draws and log-weights, none of a guide without density, and why there is none.

    :param unweighed: why there are to be none in any case.
    """
    if isinstance(guide, StoredDraws):
        return WeightedDraws(torch.empty(0), guide.sample_posterior(num_samples)), STORED
    if unweighed:
        draws = draw(guide, num_samples, *args, **kwargs)
        return WeightedDraws(torch.empty(0), draws), unweighed
    try:
        weighted = weighted_draws(
            model,
            guide,
            *args,
            num_samples=num_samples,
            chunk_size=chunk_size,
            model_kwargs=kwargs,
        )
        return weighted, ""
    except ValueError as error:
        draws = draw(guide, num_samples, *args, **kwargs)
        return WeightedDraws(torch.empty(0), draws), str(error).split("\n")[0]


def can_search(density: Target) -> bool:
    """Whether there is a way to look for modes."""
    return density.latent_dim <= MAX_DENSE_DIM and density.is_vectorized


def search_modes(density: Target, num_iterations: int | None = None) -> Tensor | None:
    """The modes that can be found, None where the model cannot run at draws of its prior.

    :param num_iterations: of all rounds, about; None for any number.
    """
    if num_iterations == 0:
        return None
    options = {}
    if num_iterations is not None:
        options = {"max_rounds": 1, "max_iterations": num_iterations}
    with same_streams(density.init_loc.device):
        try:
            return find_modes(density, **options).loc
        except (*BAD_DRAWS, RuntimeError):
            return None


def log_mean_exp(log_weights: Tensor) -> float:
    """Of weights ``(num_draws,)``, an estimate of the log evidence."""
    return log_weights.logsumexp(0).item() - math.log(len(log_weights))


def objective_gap(
    loss: ELBO,
    bound: EvidenceBound,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> tuple[float, float]:
    """The objective minus the bound, and its standard error."""
    try:
        losses = [loss.loss(model, guide, *args, **kwargs) for _ in range(NUM_LOSSES)]
    except (ArithmeticError, torch.linalg.LinAlgError):
        return math.nan, math.nan
    values = -torch.tensor(losses)
    error = math.hypot(values.std().item() / math.sqrt(NUM_LOSSES), bound.standard_error)
    return values.mean().item() - bound.value, error
