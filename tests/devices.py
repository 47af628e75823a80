# SPDX-License-Identifier: Apache-2.0
"""A device that is not there: its tensors compute on the CPU and refuse to meet the CPU's.

:class:`Elsewhere` is a mode. Inside it ``device=ELSEWHERE`` is a device like ``"cuda"``: modules
and tensors move there, ``x.device`` says so, and what is computed from it stays there, in
``torch.func`` transforms and in backward passes too. A tensor made on the CPU that meets one from
elsewhere raises the ``RuntimeError`` that CUDA would. So faults of CUDA show without CUDA:

>>> with Elsewhere():
...     torch.ones(3, device=ELSEWHERE) + torch.ones(3)
Traceback (most recent call last):
RuntimeError: Expected all tensors to be on the same device, but aten.add.Tensor got meta and a ...

The rules are CUDA's: one tensor of no dimensions may come from the CPU into a pointwise operation
(``x + torch.tensor(2.0)``), but not into ``stack``, ``cat`` or a product of matrices; indices may
lie on the CPU; a generator of random numbers may not. Random numbers are the CPU's, so runs there
and on the CPU agree to the bit.

What it does not see: a copy to the CPU and back (``.item()``, ``.cpu()``), which is right on CUDA,
only slow; kernels that CUDA lacks or rounds otherwise; ``torch.load``'s ``map_location``, as a
saved tensor comes back to where it was; ``tensor.data = other`` of another shape.

Its tensors are wrappers that report the device ``meta``, on which torch itself stores and computes
nothing, and hold a tensor of the CPU. (A device of its own, by torch's key for backends written in
Python, would start a thread in the autograd engine, after which no process can be forked.)
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_implicit.runtime.trees import leaves_of, map_tree

__all__ = ["ELSEWHERE", "Elsewhere", "ElsewhereTensor"]

#: Its name, of a device on which torch has no data and no threads.
ELSEWHERE = "meta"
DEVICE = torch.device(ELSEWHERE)
aten = torch.ops.aten

#: Operations that take tensors of two devices by their nature: each with the arguments that may
#: come from the CPU.
COPIES = {aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor}
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}

#: Further operations, beside the pointwise ones, that take a number of the CPU.
FILLS = {
    aten.fill.Tensor,
    aten.fill_.Tensor,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Tensor,
}

GENERATOR = torch.Generator
GENERATORS_ELSEWHERE: list[torch.Generator] = []


class ElsewhereTensor(Tensor):
    """A tensor that says it is elsewhere.

    :param inner: what it holds, on the CPU.
    """

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> ElsewhereTensor:
        result = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        result.inner = inner
        return result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: int) -> tuple:
        return _restore, (self.inner, self.requires_grad, isinstance(self, torch.nn.Parameter))

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self) -> str:
        return f"elsewhere({self.inner!r})"

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ElsewhereTensor) or value.shape != self.shape:
            raise RuntimeError(f"incompatible tensor type: {self.device} and {value.device}")
        self.inner = value.inner


def _restore(inner: Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    """As torch.load does with a tensor of CUDA, if no map_location moves it."""
    tensor = ElsewhereTensor(inner).requires_grad_(requires_grad)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor


torch.serialization.add_safe_globals([_restore])


class Elsewhere(TorchDispatchMode):
    """The mode in which that device is there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})

    def __enter__(self) -> Elsewhere:
        self.outer = ExitStack()
        self.outer.enter_context(_FromData())
        self.outer.enter_context(mock.patch("torch.Generator", _Generator))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        GENERATORS_ELSEWHERE.clear()
        self.outer.close()


class _Generator(GENERATOR):
    """In place of ``torch.Generator``, which knows no generator elsewhere."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        result = GENERATOR(device="cpu")
        if torch.device(device).type == ELSEWHERE:
            GENERATORS_ELSEWHERE.append(result)
        return result


class _FromData(TorchFunctionMode):
    """Makes tensors from Python's numbers, which torch forgets on the device ``meta``."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], _index(args[1]), *args[2:])
        if func is Tensor.new_tensor and device is None:
            func, like, args = torch.tensor, args[0], args[1:]
            kwargs = {"dtype": like.dtype, **kwargs}
            device = like.device
        if func not in (torch.tensor, torch.as_tensor, torch.asarray) or device is None:
            return func(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        kwargs.pop("device", None)
        result = func(*args, **kwargs).to(device)
        return result.requires_grad_() if requires_grad else result


def _index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_index(part) for part in index)
    if not isinstance(index, list):
        return index
    return torch.tensor(index) if index else torch.tensor([], dtype=torch.long)  # as torch does


def _dispatch(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operation on what its tensors hold."""
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
    outer = [tensor for tensor in tensors if isinstance(tensor, ElsewhereTensor)]
    if outer:
        _refuse_to_mix(func, args, tensors)
    device = kwargs.get("device")
    goes_there = bool(outer) if device is None else device.type == ELSEWHERE
    generator = kwargs.get("generator")
    if generator is not None and _is_elsewhere(generator) != goes_there:
        raise RuntimeError(f"the random numbers of a tensor and {generator} are on two devices")
    if device is not None and device.type == ELSEWHERE:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func is aten._efficientzerotensor.default:  # a kind of tensor of its own, not to be wrapped
        func = aten.zeros.default
    holders = {id(tensor.inner): tensor for tensor in outer}
    unwrapped = map_tree(
        lambda leaf: leaf.inner if isinstance(leaf, ElsewhereTensor) else leaf, (args, kwargs)
    )
    result = func(*unwrapped[0], **unwrapped[1])
    if outer and torch.Tag.inplace_view in func.tags:
        with no_dispatch():  # shape and strides of the wrapper itself
            func(*args, **kwargs)

    def wrap(leaf: Any) -> Any:
        if not (goes_there and isinstance(leaf, Tensor)):
            return leaf
        return holders[id(leaf)] if id(leaf) in holders else ElsewhereTensor(leaf)

    return map_tree(wrap, result)


def _is_elsewhere(generator: torch.Generator) -> bool:
    return any(generator._cdata == other._cdata for other in GENERATORS_ELSEWHERE)


def _refuse_to_mix(func: Any, args: tuple, tensors: list[Tensor]) -> None:
    if func in COPIES:
        return
    if func in INDEXED:  # self, indices, values
        indices = {id(index) for index in args[1]}
        tensors = [tensor for tensor in tensors if id(tensor) not in indices]
    strangers = [tensor for tensor in tensors if not isinstance(tensor, ElsewhereTensor)]
    if not strangers:
        return
    allowed = func in INDEXED | FILLS or torch.Tag.pointwise in func.tags
    written = func._schema.is_mutable and strangers[0] is args[0]
    if allowed and not written and len(strangers) == 1 and strangers[0].dim() == 0:
        return
    if func is aten.where.self and all(tensor.dim() == 0 for tensor in strangers):
        return
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but {func} got {DEVICE} and a tensor of "
        f"the CPU of shape {tuple(strangers[0].shape)}"
    )
