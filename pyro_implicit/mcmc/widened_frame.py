# SPDX-License-Identifier: Apache-2.0
"""The frame of draws, but where they are far narrower than the posterior."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_implicit.density.minibatch_density import MinibatchDensity
from pyro_implicit.mcmc.frame import WhiteningFrame, estimate_frame
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.random_stream import seeded

__all__ = ["widened_frame"]

FAR = 10.0  # as sixteen minibatches know curvatures but roughly
AT_ONCE = 16  # points, each of which costs a pass
PRIOR_DRAWS = 64


@torch.no_grad()
def widened_frame(density: MinibatchDensity, draws: Tensor, stream: BatchStream) -> WhiteningFrame:
    r"""The full frame of draws, but for coordinates in which they are far too narrow.

    A coordinate's sd, given those before it, is at least :math:`E[h]^{-1/2}` of the posterior, with
    h the curvature of the log-density along it. Where the mean of h over draws and minibatches
    allows ten times the sd of these draws, the coordinate gets the width :math:`E[h]^{-1/2}`, at
    most the prior's sd, and no correlations.

    :param draws: unconstrained, finite, ``(num_draws, latent_dim)``.
    """
    frame = estimate_frame(draws, "full")
    sd = draws.std(0)
    if frame.scale_tril is not None:
        sd = sd * frame.scale_tril.diagonal()
    width = _allowed_width(density, draws, sd, stream)
    wider = width > sd
    if not wider.any():
        return frame
    frame = estimate_frame(torch.where(wider, draws.mean(0), draws), "full")
    return frame._replace(scale=torch.where(wider, width, frame.scale))


def _allowed_width(
    density: MinibatchDensity, draws: Tensor, sd: Tensor, stream: BatchStream
) -> Tensor:
    """How wide the log-density lets coordinates be; the sd itself where that is not far more."""
    with seeded(0, draws.device):
        prior = density.sample_prior(PRIOR_DRAWS)
    most = prior[prior.isfinite().all(-1)].std(0)
    width, reach = sd.clone(), FAR * sd.clamp(min=1e-30)
    free = (reach < most).nonzero().squeeze(-1)
    while len(free):
        step = torch.minimum(reach, most)[free]
        drop = _drop(density, draws, free, step, stream)
        allowed = drop < 1
        has_grown = width[free] > sd[free]
        # Where it stops: as wide as the curvature over the last step says.
        found = torch.maximum(width[free], step * drop.clamp(min=1).rsqrt())
        width[free] = torch.where(allowed | has_grown, found, width[free])
        free = free[allowed & (step < most[free])]
        reach = FAR * reach
    return width


def _drop(
    density: MinibatchDensity, draws: Tensor, which: Tensor, step: Tensor, stream: BatchStream
) -> Tensor:
    """Curvature along some coordinates times the squared step, mean over draws and minibatches."""
    drops = []
    for seed, batch in enumerate(stream.probed):
        density.use(batch, seed)
        start = draws[seed * len(draws) // len(stream.probed)]
        signed = step if seed % 2 else -step
        before = _finite_gradient(density, start.unsqueeze(0))[0]
        after = []
        for part, sizes in zip(which.split(AT_ONCE), signed.split(AT_ONCE), strict=True):
            points = start.repeat(len(part), 1)
            rows = torch.arange(len(part), device=draws.device)
            points[rows, part] += sizes
            after.append(_finite_gradient(density, points)[rows, part])
        drops.append((before[which] - torch.cat(after)) * signed)
    drop = torch.stack(drops).mean(0)
    return torch.where(drop.isfinite(), drop, torch.inf)


def _finite_gradient(density: MinibatchDensity, points: Tensor) -> Tensor:
    """NaN where the log-density is not finite."""
    log_density, gradient = density.score(points)
    return torch.where(log_density.isfinite().unsqueeze(-1), gradient, torch.nan)
