# SPDX-License-Identifier: Apache-2.0
"""Matrices without a factor or an inverse: NaN in place of an error, and no gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_implicit.compiled import is_tracing
from pyro_implicit.density.in_each_run import all_runs

__all__ = ["OF_MATRICES"]


def _holds(condition: Tensor) -> bool:
    """Whether it is true everywhere, in all runs; not known of a recording, which is for all."""
    if is_tracing():
        return False
    runs = all_runs(condition)
    return bool((condition if runs is None else runs).all())


def _where(good: Tensor, value: Tensor, other: Tensor | float, ndim: int) -> Tensor:
    return torch.where(good.reshape(good.shape + (1,) * ndim), value, other)


def _eye(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def _cholesky(func: Callable, matrix: Tensor, upper: bool = False) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(matrix, upper=upper)
    good = info == 0
    if _holds(good):
        return factor
    # Factorised anew, so that the gradient has no part of the bad ones.
    factor = torch.linalg.cholesky_ex(_where(good, matrix, _eye(matrix), 2), upper=upper).L
    return _where(good, factor, math.nan, 2)


def _inverse(func: Callable, matrix: Tensor) -> Tensor:
    inverse, info = torch.linalg.inv_ex(matrix)
    good = info == 0
    if _holds(good):
        return inverse
    inverse = torch.linalg.inv_ex(_where(good, matrix, _eye(matrix), 2)).inverse
    return _where(good, inverse, math.nan, 2)


def _solve(func: Callable, matrix: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
    solution, info = torch.linalg.solve_ex(matrix, right, **kwargs)
    good = info == 0
    if _holds(good):
        return solution
    safe = _where(good, matrix, _eye(matrix), 2)
    solution = torch.linalg.solve_ex(safe, right, **kwargs).result
    return _where(good, solution, math.nan, solution.dim() - good.dim())


def _spectral(func: Callable, matrix: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Decompositions that raise an error if an element is not finite."""
    good = matrix.isfinite().all(-1).all(-1)
    if _holds(good):
        return func(matrix, *args, **kwargs)
    eye = torch.eye(*matrix.shape[-2:], dtype=matrix.dtype, device=matrix.device)
    made = func(_where(good, matrix, eye, 2), *args, **kwargs)
    if isinstance(made, Tensor):
        return _where(good, made, math.nan, made.dim() - good.dim())
    return type(made)(_where(good, part, math.nan, part.dim() - good.dim()) for part in made)


#: By function of torch's, what takes its place.
OF_MATRICES: dict[Any, Callable] = {
    **dict.fromkeys((torch.linalg.cholesky, torch.cholesky, Tensor.cholesky), _cholesky),
    **dict.fromkeys((torch.linalg.inv, torch.inverse, Tensor.inverse), _inverse),
    torch.linalg.solve: _solve,
    **dict.fromkeys(
        (
            *(torch.linalg.eigh, torch.linalg.eigvalsh, torch.linalg.eig, torch.linalg.eigvals),
            *(torch.linalg.svd, torch.linalg.svdvals, torch.linalg.pinv),
        ),
        _spectral,
    ),
}
