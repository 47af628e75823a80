# SPDX-License-Identifier: Apache-2.0
"""The initial value of every baseline: the mode, if the posterior has one."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_implicit.density.target import Target

__all__ = ["find_mode", "good_start"]

# Largest length of the last Newton step, as half its square in posterior sds.
TOLERANCE = 1e-4


def good_start(density: Target) -> tuple[Tensor, bool]:
    """Return the best mode reached from the prior's median and from 0, or the better point.

    :returns: a vector ``(latent_dim,)``, and whether it is a mode.
    """
    points = [density.init_loc.detach(), torch.zeros_like(density.init_loc)]
    modes = [mode for mode in (find_mode(density, point) for point in points) if mode is not None]
    candidates = torch.stack(modes or points)
    with torch.no_grad():
        values = density.log_prob(candidates).nan_to_num(nan=-torch.inf)
    return candidates[values.argmax()], bool(modes)


def find_mode(density: Target, start: Tensor) -> Tensor | None:
    """Run L-BFGS from ``start``, then Newton steps, whose length identifies a mode in any units.

    :param start: ``(latent_dim,)``.
    :returns: ``(latent_dim,)``, or ``None`` without a mode.
    """
    point = _lbfgs(density, start)
    for _ in range(20):
        value, score = density.score(point[None])
        factor, info = torch.linalg.cholesky_ex(-density.derivatives(point[None])[2][0])
        if info or not (value.isfinite().all() and factor.isfinite().all()):
            return None
        step = torch.cholesky_solve(score[0][:, None], factor)[:, 0]
        if score[0] @ step / 2 < TOLERANCE:
            return point
        shrink = 0.5 ** torch.arange(20, dtype=point.dtype)
        with torch.no_grad():
            values = density.log_prob(point + shrink[:, None] * step)
        if not (values > value).any():
            return None
        point = point + shrink[values.nan_to_num(nan=-torch.inf).argmax()] * step
    return None


def _lbfgs(density: Target, start: Tensor, max_iter: int = 500) -> Tensor:
    point = start.detach().clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [point], max_iter=max_iter, history_size=20, line_search_fn="strong_wolfe"
    )
    best_value, best_point = torch.inf, start.detach().clone()

    def closure() -> Tensor:
        nonlocal best_value, best_point
        value, score = density.score(point[None])
        loss = -value[0]
        if not (loss.isfinite() and score.isfinite().all()):
            # A barrier for the line search.
            point.grad = torch.zeros_like(point)
            return torch.full_like(loss, 1e100)
        point.grad = -score[0]
        if loss < best_value:
            best_value, best_point = loss.item(), point.detach().clone()
        return loss

    optimizer.step(closure)
    return best_point
