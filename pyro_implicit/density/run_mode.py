# SPDX-License-Identifier: Apache-2.0
"""What torch does otherwise while a model runs: bad matrices, and what vmap alone cannot do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["BranchError", "RunMode", "VmapError", "in_each_run", "writes_to_unbatched"]


class VmapError(RuntimeError):
    """A model cannot run inside ``torch.func.vmap``, or would be another model there."""


class BranchError(Exception):
    """The runs of a batch part at a branch: ``is_true``, ``(num_runs,)``, tells which take it."""

    def __init__(self, is_true: Tensor) -> None:
        super().__init__("a branch on the value of a tensor")
        self.is_true = is_true


class RunMode(TorchFunctionMode):
    """Runs a model with a few of torch's functions replaced, in this thread and context alone.

    Everywhere, a matrix without a factor or an inverse gets NaN for it in place of an error, so
    that it is this run's density that is not a number and not the batch's, and its gradient is 0.
    Inside ``vmap``, a tensor can be asked for its truth or its number if all runs agree, elements
    can be set through a mask, and tensors made in the model can be written to.

    **Example:**

    >>> with RunMode():
    ...     torch.linalg.cholesky(torch.tensor([[[4.0]], [[-1.0]]])).flatten()
    tensor([2., nan])

    :param tag: ``(,)`` of one run inside ``vmap``, True; None outside.
    :param fresh_are_batched: whether each run has its own copy of tensors that the model makes, as
        it must if latents are written into them.
    """

    def __init__(self, tag: Tensor | None = None, fresh_are_batched: bool = False) -> None:
        super().__init__()
        self.tag = tag
        self.replacements = dict(_EVERYWHERE)
        if tag is not None:
            self.replacements.update(_IN_VMAP)
        if fresh_are_batched:
            self.replacements.update(dict.fromkeys(_FRESH, self._fresh))
            self.replacements.update(dict.fromkeys(_AUGMENTED, _augment))
        self.was_needed = False
        """Whether any function was replaced."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = self.replacements.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        self.was_needed = True
        return replacement(func, *args, **(kwargs or {}))

    def _fresh(self, func: Callable, *args: Any, **kwargs: Any) -> Tensor:
        made = func(*args, **kwargs)
        if self.tag is None or not isinstance(made, Tensor):
            return made
        return torch.where(self.tag, made, made)


def in_each_run(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Inside ``vmap``, a function of what the tensors are in all runs.

    **Example:**

    >>> def double_each(num_runs, x):
    ...     return torch.stack([2 * x_k for x_k in x])
    >>> torch.func.vmap(lambda x: in_each_run(double_each, x))(torch.arange(3))
    tensor([0, 2, 4])

    :param function: of the number of runs and the tensors, each ``(num_runs, *shape)``, to tensors
        ``(num_runs, *shape)``. If none of the tensors is batched, it gets None for the number.
    """
    return _Below.apply(function, *tensors)


class _Below(torch.autograd.Function):
    """Calls a function below the level of vmap; autograd sees what it does there."""

    @staticmethod
    def forward(function: Callable, *tensors: Tensor) -> Any:
        return function(None, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, function: Callable, *tensors: Tensor) -> tuple[Any, int]:
        size = info.batch_size
        batched = (
            tensor.expand((size,) + tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        )
        return function(size, *batched), 0


def writes_to_unbatched(error: Exception) -> bool:
    """Whether vmap refuses to write what differs between runs into a tensor that does not."""
    return any(
        text in str(error)
        for text in ("is not possible because there exists", "doesn't match the broadcast shape")
    )


def _all_runs(tensor: Tensor) -> Tensor | None:
    """The tensor in all runs, a constant ``(num_runs, *shape)``; None if it is not batched."""
    seen = []

    def look(num_runs: int | None, batched: Tensor) -> Tensor:
        seen.append(None if num_runs is None else batched)
        return batched

    in_each_run(look, tensor.detach())
    return seen[0]


def _is_true(func: Callable, tensor: Tensor) -> bool:
    runs = _all_runs(tensor)
    if runs is None:
        return func(tensor)
    is_true = runs.reshape(len(runs)) != 0
    if is_true.all() or not is_true.any():
        return bool(is_true[0])
    raise BranchError(is_true)


def _number(func: Callable, tensor: Tensor, *args: Any) -> Any:
    runs = _all_runs(tensor)
    if runs is None:
        return func(tensor, *args)
    if not ((runs == runs[0]) | (runs.isnan() & runs[0].isnan())).all():
        raise VmapError("a tensor is asked for its number (.item()), which differs between runs")
    return func(runs[0], *args)


def _text(func: Callable, tensor: Tensor, *args: Any, **kwargs: Any) -> str:
    runs = _all_runs(tensor)
    return func(tensor if runs is None else runs, *args, **kwargs) if runs is None else str(runs)


def _set_elements(func: Callable, tensor: Tensor, key: Any, value: Any) -> None:
    """``tensor[mask] = number`` without an index of dynamic length."""
    is_mask = isinstance(key, Tensor) and key.dtype == torch.bool and key.dim() > 0
    if not is_mask or _all_runs(key) is None:
        return func(tensor, key, value)
    if isinstance(value, Tensor) and value.numel() != 1:
        return func(tensor, key, value)
    mask = key.reshape(key.shape + (1,) * (tensor.dim() - key.dim()))
    if isinstance(value, Tensor):
        value = value.reshape(()).to(tensor)
    tensor.copy_(torch.where(mask, value, tensor))


def _augment(func: Callable, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``tensor += number``, which gives the name another tensor if this one is not batched."""
    try:
        return func(tensor, *args, **kwargs)
    except RuntimeError as error:
        if not writes_to_unbatched(error):
            raise
        return _AUGMENTED[func](tensor, *args, **kwargs)


def _isclose(
    func: Callable, one: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8,
    equal_nan: bool = False,
) -> Tensor:  # fmt: skip
    """Which vmap has no rule for."""
    near = (one - other).abs() <= atol + rtol * other.abs()
    return (one == other) | near | (equal_nan & one.isnan() & other.isnan())


def _holds(condition: Tensor) -> bool:
    """Whether it is true everywhere, in all runs."""
    runs = _all_runs(condition.detach()) if _in_vmap(condition) else None
    return bool((condition if runs is None else runs).all())


def _in_vmap(tensor: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(tensor)


def _where(good: Tensor, value: Tensor, other: Tensor | float, ndim: int) -> Tensor:
    return torch.where(good.reshape(good.shape + (1,) * ndim), value, other)


def _eye(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def _cholesky(func: Callable, matrix: Tensor, upper: bool = False, **kwargs: Any) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(matrix, upper=upper)
    good = info == 0
    if _holds(good):
        return factor
    # Factorised anew, so that the gradient has no part of the bad ones.
    factor = torch.linalg.cholesky_ex(_where(good, matrix, _eye(matrix), 2), upper=upper).L
    return _where(good, factor, math.nan, 2)


def _inverse(func: Callable, matrix: Tensor, **kwargs: Any) -> Tensor:
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


_EVERYWHERE: dict[Any, Callable] = {
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
_IN_VMAP: dict[Any, Callable] = {
    Tensor.__bool__: _is_true,
    **dict.fromkeys(
        (Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.tolist), _number
    ),
    **dict.fromkeys((Tensor.__format__, Tensor.__repr__), _text),
    **dict.fromkeys((torch.isclose, Tensor.isclose), _isclose),
    Tensor.__setitem__: _set_elements,
    Tensor.data.__get__: lambda func, tensor, *args: tensor.detach(),  # type: ignore[attr-defined]
}
_FRESH = (
    *(torch.zeros, torch.ones, torch.empty, torch.full, torch.eye, torch.tensor),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.clone),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
    *(Tensor.clone, Tensor.repeat),
)
_AUGMENTED: dict[Any, Callable] = {
    Tensor.add_: torch.add,
    Tensor.sub_: torch.sub,
    Tensor.mul_: torch.mul,
    Tensor.div_: torch.div,
}
