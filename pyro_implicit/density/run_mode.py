# SPDX-License-Identifier: Apache-2.0
"""What torch does otherwise while a model runs: bad matrices, and what vmap alone cannot do."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_implicit.density.bad_matrices import OF_MATRICES
from pyro_implicit.density.in_each_run import all_runs
from pyro_implicit.ops.log_ndtr import log_ndtr

__all__ = ["BranchError", "RunMode", "VmapError", "writes_to_unbatched"]


_is_active: ContextVar[bool] = ContextVar("_is_active", default=False)


class VmapError(RuntimeError):
    """A model cannot run inside ``torch.func.vmap``, or would be another model there.

    :param message: the cause.
    :param cure: where it is none of the usual ones.
    """

    def __init__(self, message: str, cure: str | None = None) -> None:
        super().__init__(message)
        self.cure = cure


class BranchError(Exception):
    """The runs of a batch part at a branch: ``is_true``, ``(num_runs,)``, tells which take it."""

    def __init__(self, is_true: Tensor) -> None:
        super().__init__("a branch on the value of a tensor")
        self.is_true = is_true


class RunMode(TorchFunctionMode):
    """Runs a model with a few of torch's functions replaced, in this thread and context alone.

    Everywhere, a matrix without a factor or an inverse gets NaN for it in place of an error, so
    that it is this run's density that is not a number and not the batch's, and its gradient is 0;
    and ``log_ndtr`` has derivatives that hold far from the data, where a search begins.
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
        self.replacements = {**OF_MATRICES, torch.special.log_ndtr: _log_ndtr}
        if tag is not None:
            self.replacements.update(_IN_VMAP)
        if fresh_are_batched:
            self.replacements.update(dict.fromkeys(_FRESH, self._fresh))
            self.replacements.update(dict.fromkeys(_AUGMENTED, _augment))
        self.was_needed = False
        """Whether any function was replaced."""

    def __enter__(self) -> RunMode:
        self._outer = _is_active.set(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _is_active.reset(self._outer)

    @staticmethod
    def is_active() -> bool:
        """Whether functions are replaced here."""
        return _is_active.get()

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


def writes_to_unbatched(error: Exception) -> bool:
    """Whether vmap refuses to write what differs between runs into a tensor that does not."""
    return any(
        text in str(error)
        for text in ("is not possible because there exists", "doesn't match the broadcast shape")
    )


def _log_ndtr(func: Callable, value: Tensor) -> Tensor:
    return log_ndtr(value)


def _is_true(func: Callable, tensor: Tensor) -> bool:
    runs = all_runs(tensor)
    if runs is None:
        return func(tensor)
    is_true = runs.reshape(len(runs)) != 0
    if is_true.all() or not is_true.any():
        return bool(is_true[0])
    raise BranchError(is_true)


def _number(func: Callable, tensor: Tensor, *args: Any) -> Any:
    runs = all_runs(tensor)
    if runs is None:
        return func(tensor, *args)
    if not ((runs == runs[0]) | (runs.isnan() & runs[0].isnan())).all():
        raise VmapError("a tensor is asked for its number (.item()), which differs between runs")
    return func(runs[0], *args)


def _text(func: Callable, tensor: Tensor, *args: Any, **kwargs: Any) -> str:
    runs = all_runs(tensor)
    return func(tensor, *args, **kwargs) if runs is None else str(runs)


def _set_elements(func: Callable, tensor: Tensor, key: Any, value: Any) -> None:
    """``tensor[mask] = number`` without an index of dynamic length."""
    is_mask = isinstance(key, Tensor) and key.dtype == torch.bool
    if not is_mask or all_runs(key) is None:
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
