# SPDX-License-Identifier: Apache-2.0
"""Functions of torch that behave differently while a model runs, above all inside ``vmap``."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Distribution, Transform
from torch.overrides import TorchFunctionMode

from pyro_implicit.compiled import is_recorded, is_tracing
from pyro_implicit.ops.log_space import log_forward, log_ndtr
from pyro_implicit.ops.matrices import normal_by_precision

__all__ = ["BranchError", "RunMode", "VmapError", "all_runs", "in_each_run"]

#: The innermost mode of this context.
active_mode: ContextVar[RunMode | None] = ContextVar("active_mode", default=None)


class VmapError(RuntimeError):
    """A model cannot run inside ``torch.func.vmap``, or would be another model there.

    :param message: the cause.
    :param cure: the cure, if it is not the usual one.
    """

    def __init__(self, message: str, cure: str | None = None) -> None:
        super().__init__(message)
        self.cure = cure


class BranchError(Exception):
    """The runs of a batch part at a branch.

    :param is_true: ``(num_runs,)``, the runs that take the branch.
    """

    def __init__(self, is_true: Tensor) -> None:
        super().__init__("a branch on the value of a tensor")
        self.is_true = is_true


class RunMode(TorchFunctionMode):
    """Runs a model with a few of torch's functions replaced, in this thread and context alone.

    Outside and inside of ``vmap``, a matrix without a factor or an inverse gives NaN instead of an
    error, with gradient 0, so that only its own run has no density; and ``log_ndtr`` has accurate
    derivatives far from the data; and elements can be set through a mask inside of ``vmap`` and in
    recordings. Inside ``vmap`` alone, a tensor has a truth value or a number if all runs agree on
    it, and tensors made by the model can be written to.

    **Example:**

    >>> with RunMode():
    ...     torch.linalg.cholesky(torch.tensor([[[4.0]], [[-1.0]]])).flatten()
    tensor([2., nan])

    :param tag: ``(,)``, True, batched by ``vmap``; None outside of ``vmap``.
    :param fresh_are_batched: whether each run gets its own copy of the tensors that the model
        makes. Models that write latents into such tensors need it.
    """

    def __init__(self, tag: Tensor | None = None, fresh_are_batched: bool = False) -> None:
        super().__init__()
        self.tag = tag
        self.replacements = {**_EVERYWHERE, **({} if tag is None else _IN_VMAP)}
        if fresh_are_batched:
            self.replacements.update(dict.fromkeys(_FRESH, self._fresh))
            self.replacements.update(dict.fromkeys(_AUGMENTED, _augment))
        #: Whether any function was replaced.
        self.was_needed = False

    def __enter__(self) -> RunMode:
        self._outer = active_mode.set(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        active_mode.reset(self._outer)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = self.replacements.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        was_needed, self.was_needed = self.was_needed, True
        options = dict(kwargs or {})
        args = (*args, *(options.pop(name) for name in _OPERANDS if name in options))
        found = replacement(func, *args, **options)
        if found is NotImplemented:
            self.was_needed = was_needed
            return func(*args, **options)
        return found

    def _fresh(self, func: Callable, *args: Any, **kwargs: Any) -> Tensor:
        made = func(*args, **kwargs)
        if self.tag is None or not isinstance(made, Tensor):
            return made
        return torch.where(self.tag, made, made)


# All runs of a batch


def in_each_run(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Inside ``vmap``, call a function of the tensors of all runs.

    **Example:**

    >>> def double_each(num_runs, x):
    ...     return torch.stack([2 * x_k for x_k in x])
    >>> torch.func.vmap(lambda x: in_each_run(double_each, x))(torch.arange(3))
    tensor([0, 2, 4])

    :param function: of the number of runs and the tensors, each ``(num_runs, *shape)``. It returns
        tensors ``(num_runs, *shape)``. If no tensor is batched, the number is None.
    """
    return _BelowVmap.apply(function, *tensors)


class _BelowVmap(torch.autograd.Function):
    """Calls a function below the level of ``vmap``; autograd sees its operations."""

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


def all_runs(tensor: Tensor) -> Tensor | None:
    """Return a tensor of all runs, constant, ``(num_runs, *shape)``; None if it is not batched."""
    seen = []

    def look(num_runs: int | None, batched: Tensor) -> Tensor:
        seen.append(None if num_runs is None else batched)
        return batched

    in_each_run(look, tensor.detach())
    return seen[0]


# Distributions whose log-density vmap cannot compute, or torch computes slowly


def log_prob_in_each_run(fn: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return the log-density of a distribution; loop over the runs where ``vmap`` refuses it.

    ``vmap`` refuses branches on values and indices of dynamic length. The rest of the model still
    runs vectorised.

    :param fn: the distribution. Further parameters are those of its ``log_prob``.
    """
    if isinstance(fn, dist.DiscreteHMM):  # Pyro's takes a logarithm that vmap refuses
        observed = fn.observation_dist.log_prob(
            args[0].unsqueeze(-1 - fn.observation_dist.event_dim)
        )
        return log_forward(fn.initial_logits, fn.transition_logits, observed)
    if isinstance(fn, torch.distributions.MultivariateNormal) and "precision_matrix" in vars(fn):
        # Torch inverts the factor of the precision; a recording leaves this out, as it is not used.
        return normal_by_precision(args[0] - fn.loc, vars(fn)["precision_matrix"])
    mode = active_mode.get()
    try:
        return type(fn).log_prob(fn, *args, **kwargs)
    except Exception as error:
        # BatchedRuns gives each run its own tensors to write to.
        if mode is None or writes_to_unbatched(error):
            raise
        refusal = error.with_traceback(None)  # its frames would keep the graph until gc runs
    mode.was_needed = True
    whole = (fn, args, kwargs)
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _replace_tensors(whole, collect)

    def one_run(tensors: Iterator[Tensor]) -> Tensor:
        one, one_args, one_kwargs = _replace_tensors(whole, lambda _: next(tensors))
        return type(fn).log_prob(one, *one_args, **one_kwargs)

    def loop(num_runs: int | None, *batched: Tensor) -> Tensor:
        if num_runs is None:
            raise refusal
        return torch.stack([one_run(iter(of_run)) for of_run in zip(*batched, strict=True)])

    return in_each_run(loop, *tensors)


def _replace_tensors(part: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Copy a structure, with a function applied to all tensors in it, always in the same order."""
    if isinstance(part, Tensor):
        return function(part)
    if isinstance(part, (list, tuple)):
        return type(part)(_replace_tensors(item, function) for item in part)
    if isinstance(part, dict):
        return {key: _replace_tensors(item, function) for key, item in part.items()}
    if isinstance(part, (Distribution, Transform)):
        part = copy.copy(part)
        vars(part).update(_replace_tensors(dict(vars(part)), function))
    return part


# Matrices without a factor or an inverse


def _holds(condition: Tensor) -> bool:
    """Tell whether it is true everywhere, in all runs; unknown in a recording."""
    if is_tracing():
        return False
    runs = all_runs(condition)
    return bool((condition if runs is None else runs).all())


def _where(good: Tensor, value: Tensor, other: Tensor | float, ndim: int) -> Tensor:
    return torch.where(good.reshape(good.shape + (1,) * ndim), value, other)


def _with_info(factorise: Callable[[Tensor], tuple[Tensor, Tensor]], matrix: Tensor) -> Tensor:
    """Return what a function makes of matrices, and NaN where its second result is not 0."""
    result, info = factorise(matrix)
    good = info == 0
    if _holds(good):
        return result
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    # Factorised again, so that the gradient has no part of the bad ones.
    result, _ = factorise(_where(good, matrix, eye, 2))
    return _where(good, result, math.nan, result.dim() - good.dim())


def _cholesky(func: Callable, matrix: Tensor, upper: bool = False) -> Tensor:
    return _with_info(lambda safe: torch.linalg.cholesky_ex(safe, upper=upper), matrix)


def _inverse(func: Callable, matrix: Tensor) -> Tensor:
    return _with_info(torch.linalg.inv_ex, matrix)


def _solve(func: Callable, matrix: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
    return _with_info(lambda safe: torch.linalg.solve_ex(safe, right, **kwargs), matrix)


def _spectral(func: Callable, matrix: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Decompositions that raise an error if an element is not finite."""
    return _where_good(matrix.isfinite().all(-1).all(-1), func, matrix, *args, **kwargs)


def _log_det(func: Callable, matrix: Tensor) -> Any:
    """Log-determinants, whose second derivative raises an error if the transpose is singular."""
    both = torch.stack([matrix, matrix.mT]).detach()
    return _where_good((torch.linalg.lu_factor_ex(both).info == 0).all(0), func, matrix)


def _where_good(good: Tensor, func: Callable, matrix: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _holds(good):
        return func(matrix, *args, **kwargs)
    eye = torch.eye(*matrix.shape[-2:], dtype=matrix.dtype, device=matrix.device)
    made = func(_where(good, matrix, eye, 2), *args, **kwargs)
    if isinstance(made, Tensor):
        return _where(good, made, math.nan, made.dim() - good.dim())
    return type(made)(_where(good, part, math.nan, part.dim() - good.dim()) for part in made)


# What vmap refuses


def writes_to_unbatched(error: Exception) -> bool:
    """Tell whether ``vmap`` refuses to write batched values into a tensor that is not batched."""
    return any(
        text in str(error)
        for text in ("is not possible because there exists", "doesn't match the broadcast shape")
    )


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


def _of_all(key: Any) -> Any:
    """Return an index whose masks are not batched, if all runs agree on them."""
    if isinstance(key, tuple):
        found = tuple(map(_of_all, key))
        return key if all(map(operator.is_, found, key)) else found
    if not isinstance(key, Tensor) or key.dtype != torch.bool or is_recorded(key):
        return key
    runs = all_runs(key)
    if runs is None or is_recorded(runs) or (runs != runs[0]).any():
        return key
    return runs[0]


def _get_elements(func: Callable, tensor: Tensor, key: Any) -> Tensor:
    """``tensor[mask]`` with the mask of a tensor that the model makes, which may be batched."""
    if not isinstance(key, (Tensor, tuple)):
        return NotImplemented
    same = _of_all(key)
    return NotImplemented if same is key else func(tensor, same)


def _set_elements(func: Callable, tensor: Tensor, key: Any, value: Any) -> None:
    """``tensor[mask] = number`` without an index of dynamic length, where the mask may change."""
    key = _of_all(key)
    is_mask = isinstance(key, Tensor) and key.dtype == torch.bool
    if not is_mask or not (is_recorded(key) or all_runs(key) is not None):
        return func(tensor, key, value)
    if isinstance(value, Tensor) and value.numel() != 1:
        return func(tensor, key, value)
    mask = key.reshape(key.shape + (1,) * (tensor.dim() - key.dim()))
    if isinstance(value, Tensor):
        value = value.reshape(()).to(tensor)
    tensor.copy_(torch.where(mask, value, tensor))


def _augment(func: Callable, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``tensor += number``, out of place if this tensor is not batched."""
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
    near = (one - other).abs() <= atol + rtol * other.abs()
    return (one == other) | near | (equal_nan & one.isnan() & other.isnan())


# Products of a matrix of all runs with one of each run: as written, vmap has a product for each


def _is_of_second_alone(one: Tensor, other: Tensor) -> bool:
    return all_runs(one) is None and all_runs(other) is not None


def _matmul(func: Callable, one: Tensor, other: Tensor) -> Tensor:
    if one.dim() != 2 or other.dim() != 2 or not _is_of_second_alone(one, other):
        return NotImplemented
    return (other.mT.contiguous() @ one.mT).mT


def _einsum(func: Callable, equation: Any, *operands: Any) -> Tensor:
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return NotImplemented
    left, out = equation.replace(" ", "").replace("...", "").split("->")
    pairs = list(zip(left.split(","), operands, strict=True))
    if not _is_of_second_alone(*operands):
        pairs.reverse()
    (word, one), (other_word, other) = pairs
    summed = "".join(letter for letter in word if letter in other_word)
    rows, columns = (
        "".join(letter for letter in letters if letter not in summed)
        for letters in (word, other_word)
    )
    is_plain = all(len(set(letters)) == len(letters) == part.dim() for letters, part in pairs)
    is_product = is_plain and sorted(out) == sorted(rows + columns)
    if not is_product or not _is_of_second_alone(one, other):
        return NotImplemented

    def matrix(letters: str, part: Tensor, own: str) -> Tensor:
        part = part.permute([letters.index(letter) for letter in own + summed])
        return part.reshape(math.prod(part.shape[: len(own)]), -1)

    sizes = dict(zip(word + other_word, one.shape + other.shape, strict=True))
    product = matrix(other_word, other, columns) @ matrix(word, one, rows).mT
    product = product.reshape([sizes[letter] for letter in columns + rows])
    return product.permute([(columns + rows).index(letter) for letter in out])


#: Names by which torch takes operands as keyword arguments: the first one, then the second one.
_OPERANDS = ("input", "A", "other", "mat2", "B")
_EVERYWHERE: dict[Any, Callable] = {
    **dict.fromkeys((torch.linalg.cholesky, torch.cholesky, Tensor.cholesky), _cholesky),
    **dict.fromkeys((torch.linalg.inv, torch.inverse, Tensor.inverse), _inverse),
    torch.linalg.solve: _solve,
    **dict.fromkeys(
        (*(torch.linalg.slogdet, torch.slogdet, Tensor.slogdet), torch.logdet, Tensor.logdet),
        _log_det,
    ),
    **dict.fromkeys(
        (
            *(torch.linalg.eigh, torch.linalg.eigvalsh, torch.linalg.eig, torch.linalg.eigvals),
            *(torch.linalg.svd, torch.linalg.svdvals, torch.linalg.pinv),
        ),
        _spectral,
    ),
    torch.special.log_ndtr: lambda func, value: log_ndtr(value),
    Tensor.__setitem__: _set_elements,
}
_IN_VMAP: dict[Any, Callable] = {
    Tensor.__bool__: _is_true,
    **dict.fromkeys(
        (Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.tolist), _number
    ),
    **dict.fromkeys((Tensor.__format__, Tensor.__repr__), _text),
    **dict.fromkeys((torch.isclose, Tensor.isclose), _isclose),
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    torch.einsum: _einsum,
    Tensor.__getitem__: _get_elements,
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
