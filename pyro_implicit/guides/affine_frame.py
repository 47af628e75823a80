# SPDX-License-Identifier: Apache-2.0
"""Affine frames of implicit guides: given, from a Gaussian autoguide, or from a mode search."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoGuide,
    AutoLaplaceApproximation,
    AutoNormal,
    init_to_median,
)
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_implicit.density.checks import warn_of_angle
from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.policy import MAX_DENSE_DIM, SEARCH
from pyro_implicit.density.target import Target
from pyro_implicit.guides.auto_draws import Frame
from pyro_implicit.guides.local_sites import LocalSite, RowStart
from pyro_implicit.guides.policy import FRAME, INIT_SCALE, LEAST_SCALE
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.messages import first_line, warn_user

__all__ = ["find_frame", "find_frame_and_rows", "gaussian_frame", "normal_moments"]


@torch.no_grad()
def gaussian_frame(guide: AutoGuide, sites: list[str], *args: Any, **kwargs: Any) -> Frame:
    """Return location and scale of a Gaussian autoguide, in unconstrained space.

    **Example:**

    >>> from pyro.infer.autoguide import AutoDiagonalNormal
    >>> def model():
    ...     import pyro
    ...     pyro.sample("x", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    >>> gaussian_frame(AutoDiagonalNormal(model), ["x"]).scale
    tensor([0.1000, 0.1000, 0.1000])

    :param guide: ``AutoNormal``, ``AutoDiagonalNormal``, ``AutoMultivariateNormal``,
        ``AutoLowRankMultivariateNormal`` or ``AutoLaplaceApproximation`` of the same model, fitted
        or not.
    :param sites: the model's latent sites in their order.
    :param args: the model's arguments.
    :raises TypeError: for anything but a guide.
    :raises ValueError: if the guide is of another class, covers other sites, or is a Laplace
        approximation away from a mode.
    """
    if not isinstance(guide, AutoGuide):
        raise TypeError(
            'frame must be a Gaussian autoguide, a Frame, "auto", "mode" or None, but got '
            f"{guide!r}"
        )
    if guide.prototype_trace is None:
        with poutine.block():
            guide(*args, **kwargs)
    found = [name for name, _ in guide.prototype_trace.iter_stochastic_nodes()]
    if found != sites:
        raise ValueError(
            f"the frame's guide covers the sites {found}, but the guide covers {sites}. Cure: "
            "build both for the same model"
        )
    if isinstance(guide, AutoNormal):
        loc, scale = normal_moments(guide, sites)
        return Frame(loc.clone(), scale.clone(), None)
    if isinstance(guide, AutoLaplaceApproximation):
        guide = _laplace(guide, args, kwargs)
    posterior = None
    if isinstance(guide, AutoContinuous):
        posterior = guide.get_posterior(*args, **kwargs)
    if isinstance(posterior, (dist.MultivariateNormal, dist.LowRankMultivariateNormal)):
        return Frame(posterior.loc.clone(), None, posterior.scale_tril.clone())
    if isinstance(posterior, dist.Independent) and isinstance(posterior.base_dist, dist.Normal):
        return Frame(posterior.base_dist.loc.clone(), posterior.base_dist.scale.clone(), None)
    raise ValueError(
        f"frame must be a Gaussian autoguide (AutoNormal, AutoDiagonalNormal, "
        f"AutoMultivariateNormal, AutoLowRankMultivariateNormal, AutoLaplaceApproximation), but "
        f"got {type(guide).__name__}"
    )


def normal_moments(guide: AutoNormal, sites: Iterable[str]) -> tuple[Tensor, Tensor]:
    """Return location and scale of a mean-field guide, ``(latent_dim,)``, with their gradients."""
    parts = [guide._get_loc_and_scale(name) for name in sites]
    loc, scale = (
        torch.cat([part.reshape(-1) for part in side]) for side in zip(*parts, strict=True)
    )
    return loc, scale


def _laplace(guide: AutoLaplaceApproximation, args: tuple, kwargs: dict) -> AutoGuide:
    message = (
        "the Laplace approximation given as frame has no positive definite Hessian. Cure: fit it "
        "to a mode first, or use AutoMultivariateNormal for a posterior without a mode (a funnel)"
    )
    try:
        with torch.enable_grad():
            gaussian = guide.laplace_approximation(*args, **kwargs)
    except torch.linalg.LinAlgError as error:
        raise ValueError(message) from error
    if not gaussian.scale_tril.isfinite().all():
        raise ValueError(message)
    return gaussian


def find_frame(
    model: Callable[..., Any],
    init_loc_fn: Callable[[dict[str, Any]], Tensor],
    device: torch.device,
    args: tuple,
    kwargs: dict[str, Any],
) -> Frame | None:
    r"""Find a Gaussian near a model's posterior in about a second.

    With at most 100 latent variables, :func:`~pyro_implicit.density.find_modes` climbs from the
    given initial values, or from the default ones and draws of the prior, and returns the Gaussian
    of the highest ELBO on its path, with a full scale. If the model subsamples, it climbs on one
    minibatch; then the location takes Newton steps of size 1/t on fresh minibatches, which converge
    to the mode for all data, or are taken back if these minibatches prefer the first mode. With
    more latent variables, or if no Gaussian has a finite ELBO, a few hundred steps of mean-field
    variational inference yield a diagonal frame.

    The number of steps is determined by counting operations, not by a clock: the same model has the
    same frame. The random streams of the caller do not change.

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
    :param init_loc_fn: initial values of the climb.
    :param device: device of the latent variables.
    :param args: positional arguments of the model; ``kwargs`` are keyword arguments.
    :returns: None for a part of a model (``poutine.block``), which has no density, and for a model
        whose density raises an error.
    :warns UserWarning: if the density raises an error, and for angles.
    """
    found = _search(model, init_loc_fn, device, args, kwargs)
    return None if found is None else found[1]


def find_frame_and_rows(
    model: Callable[..., Any],
    sites: Iterable[LocalSite],
    init_loc_fn: Callable[[dict[str, Any]], Tensor],
    device: torch.device,
    args: tuple,
    kwargs: dict[str, Any],
) -> tuple[Frame, dict[str, RowStart]] | None:
    r"""Find a Gaussian for the latents of one minibatch's rows, and one for all other latents.

    Both are parts of the Gaussian :math:`N(m, \Sigma)` that :func:`find_frame` finds for these
    rows alone, without a factor for the rows outside the minibatch. The frame of the other
    latents u is its marginal, which is as wide as so few rows leave it. A row has
    :math:`E[z | u] = m_z + \Sigma_{zu} \Sigma_{uu}^{-1} (u - m_u)` and the conditional variance. A
    diagonal Gaussian, for minibatches of more than 100 latents, has no slopes.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> from pyro.infer.autoguide import init_to_median
    >>> from pyro_implicit.guides.local_sites import find_local_sites
    >>> def model(x):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("rows", 100, subsample_size=len(x)):
    ...         pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(mean, 1.0)), 1.0), obs=x)
    >>> x, device = torch.ones(4), torch.device("cpu")
    >>> sites = find_local_sites(poutine.trace(model).get_trace(x))
    >>> frame, rows = find_frame_and_rows(model, sites, init_to_median, device, (x,), {})
    >>> rows["z"].slope.round(decimals=2).flatten(), rows["z"].scale.square().round(decimals=2)
    (tensor([0.5000, 0.5000, 0.5000, 0.5000]), tensor([0.5000, 0.5000, 0.5000, 0.5000]))

    :param model: a model of one minibatch.
    :param sites: its latents of rows.
    :param init_loc_fn: as in :func:`find_frame`, as ``device``, ``args`` and ``kwargs``.
    :returns: the frame of the other latents, and the start of each site of ``sites``.
    """
    found = _search(_RowsAlone()(model), init_loc_fn, device, args, kwargs)
    if found is None:
        return None
    target, joint = found
    places = target.places
    own = {site.name: places.pop(site.name) for site in sites}
    others, rows = (
        torch.cat([place.flatten() for place in part.values()]) for part in (places, own)
    )
    size = len(others)
    if joint.scale is not None:
        frame = Frame(joint.loc[others], scale=joint.scale[others])
        slopes, scales = frame.loc.new_zeros(len(rows), size), joint.scale[rows]
    else:
        assert joint.scale_tril is not None
        factor = torch.linalg.qr(joint.scale_tril[torch.cat([others, rows])].mT).R.mT
        factor = factor * factor.diagonal().sign()
        first, across = factor[:size, :size], factor[size:, :size]
        frame = Frame(joint.loc[others], scale_tril=first)
        slopes = torch.linalg.solve_triangular(first, across, upper=False, left=False)
        scales = factor[size:, size:].norm(dim=-1)
    starts, first_row = {}, 0
    for name, place in own.items():
        part = slice(first_row, first_row := first_row + place.numel())
        scale = scales[part].clamp(min=LEAST_SCALE).reshape(place.shape)
        starts[name] = RowStart(joint.loc[place], scale, slopes[part].reshape(*place.shape, size))
    return frame, starts


class _RowsAlone(Messenger):
    """Count each row of a subsampled plate once, and not also for the rows that are left out."""

    def _pyro_sample(self, msg: Any) -> None:
        for frame in msg["cond_indep_stack"]:
            if frame.full_size not in (None, frame.size):
                msg["scale"] = msg["scale"] * frame.size / frame.full_size


def _search(
    model: Callable[..., Any],
    init_loc_fn: Callable[[dict[str, Any]], Tensor],
    device: torch.device,
    args: tuple,
    kwargs: dict[str, Any],
) -> tuple[Target, Frame] | None:
    if _hides_sites(model):
        return None
    try:
        # Training repeats the warnings about the model, except those about angles.
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
            frame = _gaussian(target, has_start=init_loc_fn is not init_to_median)
    except Exception as error:  # any error of the model
        warn_user(
            f"the guide found no frame, and is initialised as with frame=None "
            f"({first_line(error)}). Cure: frame=None, a Frame, or a fitted Gaussian guide",
        )
        return None
    for name in target.turns:
        warn_of_angle(name)
    return target, frame


def _gaussian(target: Target, has_start: bool) -> Frame:
    num_evaluations = round(FRAME.seconds / target.seconds(FRAME.num_particles))
    if target.latent_dim <= MAX_DENSE_DIM:
        frame = _climb(target, num_evaluations, has_start)
        if frame is not None:
            return frame
    return _mean_field(target, _clipped(num_evaluations, FRAME.steps))


def _clipped(number: int, bounds: tuple[int, int]) -> int:
    return max(bounds[0], min(bounds[1], number))


def _climb(target: Target, num_evaluations: int, has_start: bool) -> Frame | None:
    limits = SEARCH.least_iterations, SEARCH.max_iterations
    num_iterations = _clipped(num_evaluations // target.latent_dim, limits)
    options: dict[str, Any] = {
        "max_rounds": 1,
        "max_iterations": num_iterations,
    }
    many = FRAME.num_starts if target.is_vectorized else FRAME.num_starts_looped
    try:
        modes = find_modes(target, num_starts=1 if has_start else many, **options)
    except ValueError:  # the initial values have no density: draws of the prior may have one
        modes = find_modes(target, num_starts=many, **options)
    if not modes.elbo[0].isfinite():
        return None
    loc, factor = modes.loc[0], modes.scale_tril[0]
    if target.draws_rows:
        loc = _mode_of_all_rows(target, loc, factor)
    frame = Frame(loc, scale_tril=factor)
    frame.check(target.latent_dim)
    return frame


def _mode_of_all_rows(target: Target, start: Tensor, factor: Tensor) -> Tensor:
    """Go from the mode of one minibatch to that of all, unless fresh ones prefer the start."""
    loc, gain = start, 0.0
    for index in range(FRAME.num_minibatches):
        target = target.on(())
        log_p, score = target.score(torch.stack([start, loc]))
        if 2 * index >= FRAME.num_minibatches:
            gain += (log_p[1] - log_p[0]).item()
        step = factor @ (factor.mT @ score[1]) / (index + 2)
        loc = loc + step.nan_to_num(0.0, 0.0, 0.0)
    return loc if gain > 0 else start  # without log-concavity the steps can diverge


def _mean_field(target: Target, num_steps: int) -> Frame:
    loc = target.init_loc.clone()
    log_scale = torch.full_like(loc, INIT_SCALE).log()
    optimiser = torch.optim.Adam([loc, log_scale])
    for index in range(num_steps):
        if target.draws_rows:
            target = target.on(())
        noise = torch.randn(FRAME.num_particles, *loc.shape, dtype=loc.dtype, device=loc.device)
        scale = log_scale.exp()
        _, score = target.score(loc + scale * noise)
        path = (score + noise / scale).nan_to_num(0.0, 0.0, 0.0)
        loc.grad, log_scale.grad = -path.mean(0), -(path * noise * scale).mean(0)
        optimiser.param_groups[0]["lr"] = FRAME.learning_rate * (1 - index / num_steps)
        optimiser.step()
    frame = Frame(loc, scale=log_scale.exp())
    frame.check(target.latent_dim)
    return frame


def _hides_sites(model: Callable[..., Any]) -> bool:
    while isinstance(model, functools.partial):
        inner = model.func if not model.args else model.args[-1]
        if any(isinstance(part, BlockMessenger) for part in model.args):
            return True
        model = inner
    return False
