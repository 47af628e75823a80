# SPDX-License-Identifier: Apache-2.0
"""Where chains that see minibatches start, and in which frame."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_implicit.density.checks.numerics import blame
from pyro_implicit.density.minibatch_density import MinibatchDensity
from pyro_implicit.density.policy import MAX_DENSE_DIM
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.mcmc.frame import WhiteningFrame, widened_frame
from pyro_implicit.mcmc.minibatch_chains import MinibatchChains
from pyro_implicit.mcmc.minibatch_schedule import Schedule
from pyro_implicit.mcmc.space_choice import finite_starts
from pyro_implicit.mcmc.step_choice import MinibatchKernel
from pyro_implicit.runtime.minibatches import BatchStream, num_rows
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = ["check_scaling", "minibatch_frame", "start_chains"]

FRAME_DRAWS = 64
LEAST_DRAWS = 20
MAX_POINTS = 8  # at which the information is measured
MAX_VALUES = 10**7  # drawn at once


def check_scaling(density: MinibatchDensity, stream: BatchStream, num_shares: int = 1) -> None:
    """Whether the model takes a minibatch for what it is.

    :param num_shares: processes that have minibatches of their own.
    :raises ValueError: if it plainly takes one for all data.
    :warns UserWarning: if plate and minibatches disagree about the number of rows.
    """
    batches = stream.epoch_length * num_shares
    if batches > 1 and not density.scaled:
        raise ValueError(
            f"the model takes each of {batches} minibatches for all data: no observed site is "
            "scaled. Cure: with pyro.plate('rows', number_of_all_rows, subsample_size=len(x)), or "
            "poutine.scale; of classifier and regressor, the number of all rows as num_data"
        )
    if density.subsampled is None or not any(stream.probed):
        return
    name, first_size, full_size = density.subsampled
    size = _mean_size(stream.probed[: stream.epoch_length], first_size)
    if not (batches - 1) * size < full_size < (batches + 1) * size:
        share = full_size / size / batches
        warn_user(
            f"plate '{name}' has {full_size} rows in all, but {batches} minibatches of {size:.4g} "
            f"make about {round(batches * size)}, so that the likelihood counts {share:.3g} times. "
            "Cure: the number of all rows as the plate's size",
        )


def _mean_size(batches: list[tuple], first_size: int) -> float:
    """Mean number of rows, by the part that has as many in the first minibatch as the plate."""
    rows = [num_rows(part) for part in batches[0]]
    if first_size not in rows:
        return first_size
    place = rows.index(first_size)
    return sum(num_rows(batch[place]) or 0 for batch in batches) / len(batches)


@torch.no_grad()
def minibatch_frame(
    density: MinibatchDensity,
    sampler: Sampler,
    stream: BatchStream,
) -> WhiteningFrame:
    r"""The frame of a guide's draws: of their covariance up to 100 dimensions, else their scales.

    In a covariance those coordinates are widened in which draws are far narrower than the
    posterior, see :func:`~pyro_implicit.mcmc.frame.widened_frame`. Coordinates that do not
    vary, and all if fewer than twenty draws are given, have the scales
    :math:`(s^{-2} + F)^{-1/2}` of the prior's, s, and of what the data say there, F: with E
    minibatches in an epoch, the variance of their gradients over E - 1, which is the diagonal of
    Fisher's information where the model is right; the mean over the draws that are given, as
    between the members of an ensemble there is nothing.
    """
    dim, given = density.latent_dim, sampler.num_given
    count = given or (10 * dim if dim <= MAX_DENSE_DIM else FRAME_DRAWS)
    if dim <= MAX_DENSE_DIM and count >= LEAST_DRAWS:
        draws = sampler.draw(max(count, FRAME_DRAWS))
        draws = draws[draws.isfinite().all(-1)]
        if len(draws) >= LEAST_DRAWS and bool((draws != draws[:1]).any(0).all()):
            return widened_frame(density, draws, stream)
    chunk = max(1, min(count, MAX_VALUES // dim))
    moments = _Moments(dim, density.init_loc)
    points = None
    if given:
        points = sampler.draw(count)
        moments.add(points)
        points = points[points.isfinite().all(-1)][:MAX_POINTS]
    else:
        for start in range(0, count, chunk):
            size = min(chunk, count - start)
            moments.add(sampler.draw(size))
    scale = moments.sd()
    fixed = scale == 0 if count >= LEAST_DRAWS else torch.ones_like(scale, dtype=torch.bool)
    if fixed.any():
        prior = _Moments(dim, density.init_loc)
        for start in range(0, FRAME_DRAWS, chunk):
            prior.add(density.sample_prior(min(chunk, FRAME_DRAWS - start)))
        spread = prior.sd()
        spread = torch.where(spread > 0, spread, 1.0)
        if points is None or not len(points):
            points = moments.mean.unsqueeze(0)
        spread = (spread**-2 + _information(density, points, stream)).rsqrt()
        scale = torch.where(fixed, spread, scale)
    return WhiteningFrame(moments.mean.clone(), scale)


def _information(density: MinibatchDensity, points: Tensor, stream: BatchStream) -> Tensor:
    """The diagonal of Fisher's information, mean over points, 0 where gradients are not
    finite."""
    if stream.epoch_length == 1:
        return torch.zeros_like(points[0])
    each = [_Moments(points.shape[-1], points) for _ in points]
    for seed, batch in enumerate(stream.probed):
        density.use(batch, seed)
        for moments, gradient in zip(each, density.score(points)[1], strict=True):
            moments.add(gradient.unsqueeze(0))
    information = torch.stack([moments.sd().square() for moments in each]).mean(0)
    return information / (stream.epoch_length - 1)


def start_chains(
    density: MinibatchDensity,
    guide: Any,
    num_chains: int,
    kernel: MinibatchKernel,
    schedule: Schedule,
    given_step: float | None,
    stream: BatchStream,
) -> MinibatchChains:
    """Chains at draws of the guide.

    :raises ValueError: for a guide of another model, and if the log-density is finite at none.
    """
    sampler = Sampler(density, guide)
    frame = minibatch_frame(density, sampler, stream)
    points = sampler.draw(num_chains)
    starts = finite_starts(density.score, points, sampler, lambda: blame(density, points))
    position = frame.to_white(starts.points)
    velocity = torch.randn_like(position)
    return MinibatchChains(position, velocity, frame, kernel, schedule, given_step, starts.replaced)


class _Moments:
    """Means and standard deviations of draws, some at a time."""

    def __init__(self, dim: int, like: Tensor) -> None:
        self.count = 0
        self.mean = like.new_zeros(dim)
        self._squares = like.new_zeros(dim)

    def add(self, draws: Tensor) -> None:
        draws = draws[draws.isfinite().all(-1)]
        for draw in draws:  # Welford's recursion: exact zeros for coordinates that do not vary
            self.count += 1
            change = draw - self.mean
            self.mean = self.mean + change / self.count
            self._squares = self._squares + change * (draw - self.mean)

    def sd(self) -> Tensor:
        return (self._squares / max(1, self.count - 1)).clamp(min=0).sqrt()
