# SPDX-License-Identifier: Apache-2.0
"""The frame that an implicit guide finds for itself: a climb, and a Gaussian there."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import init_to_median
from pyro.poutine.block_messenger import BlockMessenger
from torch import Tensor

from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.policy import MAX_DENSE_DIM
from pyro_implicit.density.target import Target
from pyro_implicit.guides.affine_frame import Frame
from pyro_implicit.runtime.random_stream import seeded
from pyro_implicit.runtime.user_warnings import first_line, warn_user

__all__ = ["find_frame"]

BUDGET = 1.0  # seconds
NUM_MINIBATCHES, NUM_PARTICLES = 100, 8


def find_frame(
    model: Callable[..., Any],
    init_loc_fn: Callable[[dict[str, Any]], Tensor],
    device: torch.device,
    args: tuple,
    kwargs: dict[str, Any],
) -> Frame | None:
    r"""A Gaussian near a model's posterior, in about a second.

    Of at most 100 latents, :func:`~pyro_implicit.density.find_modes` climbs from the start alone,
    or, where that is the default, from draws of the prior as well, and keeps the Gaussian of the
    highest ELBO on its way, with a full scale. Where the model draws
    minibatches, it climbs for one of them; then the location takes Newton steps of size 1/t for
    fresh ones, which lead to the mode for all data. Of more latents, or where no Gaussian on the
    way has an ELBO, a few hundred steps of mean-field variational inference make a diagonal frame.

    How many steps there are in a second is told from the operations in one evaluation, not by the
    clock: the same model gets the same frame, and torch's random streams are left as they are.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> from pyro.infer.autoguide import init_to_median
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 100.0))
    ...     pyro.sample("y", dist.Normal(x, 0.1), obs=y)
    >>> frame = find_frame(model, init_to_median, torch.device("cpu"), (torch.tensor(50.0),), {})
    >>> frame.loc.round(decimals=3), frame.scale_tril
    (tensor([50.]), tensor([[0.1000]]))

    :param model: a Pyro model with continuous latents and fixed structure.
    :param init_loc_fn: where the climb begins.
    :param device: of the latents.
    :param args: of the model, as ``kwargs``.
    :returns: None for a part of a model (``poutine.block``), which has no density of its own, and
        for a model whose density fails.
    :warns UserWarning: in the latter case, naming the cause.
    """
    if _hides_sites(model):
        return None
    try:
        # What is wrong with the model but can be lived with is for its training to say.
        with poutine.block(), seeded(0, device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target = Target.of_minibatches(
                model,
                *args,
                batch=(),
                allow_local=True,
                init_loc_fn=init_loc_fn,
                model_kwargs=kwargs,
            )
            return _gaussian(target, has_start=init_loc_fn is not init_to_median)
    except Exception as error:  # the model's own, of any kind
        cause = first_line(error)
    warn_user(
        f"the guide found no frame, and starts at init_loc_fn as with frame=None ({cause}). Cure: "
        "frame=None, or a Frame or a Gaussian guide fitted before",
    )
    return None


def _gaussian(target: Target, has_start: bool) -> Frame:
    num_evaluations = round(BUDGET / target.seconds(NUM_PARTICLES))
    if target.latent_dim <= MAX_DENSE_DIM:
        frame = _climb(target, num_evaluations, has_start)
        if frame is not None:
            return frame
    return _mean_field(target, max(100, min(500, num_evaluations)))


def _climb(target: Target, num_evaluations: int, has_start: bool) -> Frame | None:
    """A full frame, None where no Gaussian on the way has an ELBO."""
    num_iterations = max(10, min(100, num_evaluations // target.latent_dim))
    options = {"max_rounds": 1, "max_iterations": num_iterations, "num_draws": 32}
    many = 20 if target.is_vectorized else 3
    try:
        modes = find_modes(target, num_starts=1 if has_start else many, **options)
    except ValueError:  # no density at the start: draws of the prior may have one
        modes = find_modes(target, num_starts=many, **options)
    if not modes.elbo[0].isfinite():
        return None
    loc, factor = modes.loc[0], modes.scale_tril[0]
    for index in range(NUM_MINIBATCHES if target.draws_rows else 0):
        target = target.on(())
        _, score = target.score(loc.unsqueeze(0))
        step = factor @ (factor.mT @ score[0]) / (index + 2)
        loc = loc + step.nan_to_num(0.0, 0.0, 0.0)
    frame = Frame(loc, scale_tril=factor)
    frame.check(target.latent_dim)
    return frame


def _mean_field(target: Target, num_steps: int) -> Frame:
    """A diagonal frame, by the path derivative of the ELBO."""
    loc = target.init_loc.clone()
    log_scale = torch.full_like(loc, 0.1).log()
    optimiser = torch.optim.Adam([loc, log_scale])
    for index in range(num_steps):
        if target.draws_rows:
            target = target.on(())
        noise = torch.randn(NUM_PARTICLES, *loc.shape, dtype=loc.dtype, device=loc.device)
        scale = log_scale.exp()
        _, score = target.score(loc + scale * noise)
        path = (score + noise / scale).nan_to_num(0.0, 0.0, 0.0)
        loc.grad, log_scale.grad = -path.mean(0), -(path * noise * scale).mean(0)
        optimiser.param_groups[0]["lr"] = 0.1 * (1 - index / num_steps)
        optimiser.step()
    frame = Frame(loc, scale=log_scale.exp())
    frame.check(target.latent_dim)
    return frame


def _hides_sites(model: Callable[..., Any]) -> bool:
    """Whether ``poutine.block`` leaves some of the model's sites out."""
    while isinstance(model, functools.partial):
        inner = model.func if not model.args else model.args[-1]
        if any(isinstance(part, BlockMessenger) for part in model.args):
            return True
        model = inner
    return False
