# SPDX-License-Identifier: Apache-2.0
"""Cost of an evaluation, counted instead of timed, and scores that are recorded where that pays."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from pyro_implicit.compiled import (
    ACTIVE,
    RECORDINGS,
    CompileMode,
    FusedFunction,
    ProgramCache,
    RecordedFunction,
    Untraceable,
    disagreement,
)
from pyro_implicit.compiled.recorder import DispatchMode
from pyro_implicit.density.policy import COST, RUNS
from pyro_implicit.density.workers import current_workers
from pyro_implicit.ops.ensemble_hmc import score_of
from pyro_implicit.runtime.messages import first_line
from pyro_implicit.runtime.trees import leaves_of

__all__ = [
    "FusedDensity",
    "TracedScore",
    "estimated_seconds",
    "nearby",
    "seconds_near",
    "suits_one_thread",
]


def estimated_seconds(
    evaluate: Callable[[], Any],
    times: float = 1.0,
    num_runs: int = 1,
    is_recorded: bool = False,
) -> float:
    """Return the seconds that one core needs for an evaluation, by its operations and their sizes.

    The estimate does not depend on the machine or its load, so that plans are reproducible.

    **Example:**

    >>> import torch
    >>> small, large = torch.ones(10), torch.ones(1000, 1000)
    >>> estimated_seconds(lambda: small + 1) < estimated_seconds(lambda: large @ large)
    True

    :param evaluate: is called once; it may be a vectorised run with its gradients.
    :param times: scales the sizes; the number of operations stays.
    :param num_runs: runs of the model in it, one after the other.
    :param is_recorded: whether later evaluations replay a recording, without Pyro and autograd.
    """
    with _Counter() as counter:
        evaluate()
    if is_recorded:
        each = COST.per_operation - COST.saved_per_operation
        return each * counter.operations + times * counter.work
    return COST.per_run * num_runs + COST.per_operation * counter.operations + times * counter.work


def seconds_near(
    evaluate: Callable[[Tensor], Any],
    point: Tensor,
    one_by_one: bool = False,
    is_recorded: bool = False,
) -> Callable[[int], float]:
    """Return :func:`estimated_seconds` of an evaluation around a point, by the number of points.

    Only a few points are evaluated, once: operations and sizes are linear in their number.

    **Example:**

    >>> import torch
    >>> seconds = seconds_near(torch.exp, torch.zeros(3))
    >>> seconds(1) < seconds(100)
    True

    :param evaluate: of points ``(n, dim)``.
    :param point: ``(dim,)``.
    :param one_by_one: whether the model runs once for each point.
    :param is_recorded: as in :func:`estimated_seconds`.
    """

    @cache
    def counted(number: int) -> float:
        points = nearby(point, number)
        num_runs = number if one_by_one else 1
        return estimated_seconds(
            lambda: evaluate(points), num_runs=num_runs, is_recorded=is_recorded
        )

    @cache
    def of_point() -> float:
        evaluate(nearby(point, few))  # a first call may prepare what the others reuse
        return max(0.0, counted(more) - counted(few)) / (more - few)

    few, more = COST.counted_points

    def seconds(number: int) -> float:
        if number <= more:
            return counted(number)
        slope = of_point()
        return counted(more) + (number - more) * slope

    return seconds


def suits_one_thread(score: Callable[[Tensor], Any], point: Tensor) -> bool:
    """Return whether the operations of a score are too small to be divided between threads.

    **Example:**

    >>> import torch
    >>> suits_one_thread(torch.exp, torch.zeros(3))
    True

    :param score: a function of points ``(number, dim)``.
    :param point: near which it is counted, ``(dim,)``; on a GPU the result is False.
    """
    if torch.get_num_threads() == 1 or point.device.type != "cpu":
        return torch.get_num_threads() == 1
    with _Counter() as counter:
        score(nearby(point, COST.threaded_points))
    return counter.work < COST.least_threaded * counter.operations


def nearby(point: Tensor, number: int) -> Tensor:
    """Return distinct points ``(number, dim)`` around one: copies would agree on every branch.

    **Example:**

    >>> import torch
    >>> nearby(torch.zeros(1), 3).squeeze(-1)
    tensor([-0.1000,  0.0000,  0.1000])

    :param point: ``(dim,)``.
    """
    return point + torch.linspace(-RUNS.nearby, RUNS.nearby, number).to(point).unsqueeze(-1)


class _Counter(DispatchMode):
    """Counts below autograd and ``vmap``, where each operation is one call of a kernel."""

    num_active = 0  # of all counters

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.largest = 0
        self.elements = self.flops = 0.0

    @property
    def work(self) -> float:
        """Seconds of one core that grow with sizes."""
        return COST.per_element * self.elements + COST.per_flop * self.flops

    @property
    def seconds(self) -> float:
        """Seconds of one core, without those of Pyro's handlers."""
        return COST.per_operation * self.operations + self.work

    def __enter__(self) -> _Counter:
        _Counter.num_active += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _Counter.num_active -= 1
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        self.operations += 1
        packet = func.overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=found)
        if not func.is_view:
            leaves = leaves_of(found)
            sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)]
            self.elements += _weight(packet.__name__, args) * sum(sizes)
            self.largest = max(self.largest, *sizes, 0)
        return found


def _weight(name: str, args: tuple) -> float:
    if name in COST.factorisations:
        return COST.factorisations[name] * (1 + args[0].shape[-1] / COST.large_matrix)
    return COST.functions.get(name, 1)


Score = Callable[[Tensor], tuple[Tensor, Tensor]]


class TracedScore:
    """A log-density with its gradient, without the overhead of Pyro, ``vmap`` and autograd.

    The second call for a number of vectors records the operations. The first, second, fourth,
    eighth ... call after it is compared with the log-density itself. If it cannot be recorded,
    because the model branches on values or cannot run inside ``torch.func.vmap``, every call
    evaluates it as it is, and ``refusal`` says why. Results are bit-identical, except for models
    with loops, whose recordings are fused, and for many vectors, which are evaluated in blocks
    that fit into a core's cache: there they differ by rounding.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> from pyro_implicit.density import Target
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> score = TracedScore(Target(model).score)
    >>> log_prob, gradient = score(torch.ones(3, 1))
    >>> gradient.flatten()
    tensor([-1., -1., -1.])

    :param score: a function of vectors ``(num_draws, latent_dim)``, such as :meth:`Target.score`,
        of a model and data that stay the same.
    :param num_calls: the number of calls that are expected; too few for a recording to save time
        give no recording.
    :param compile: ``"auto"`` as above. ``"trace"`` always records, and warns if it cannot. With
        ``True`` inductor compiles the recording, and results differ by rounding. ``False`` never
        records.
    """

    def __init__(
        self, score: Score, num_calls: float = math.inf, compile: CompileMode = "auto"
    ) -> None:
        self.plain, self.num_calls = score, num_calls
        self._programs: ProgramCache[RecordedFunction] = ProgramCache(compile)
        self._shares: dict[Any, _Shares] = {}  # by the size of calls

    @property
    def compile(self) -> CompileMode:
        """How it runs; may be changed between calls."""
        return self._programs.compile

    @compile.setter
    def compile(self, mode: CompileMode) -> None:
        self._programs.compile = mode

    @property
    def refusal(self) -> str | None:
        """Why it is not recorded; None if it is."""
        return self._programs.refusal

    def __call__(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-density and its gradient, constants.

        :param latent: ``(num_draws, latent_dim)``.
        :returns: ``(num_draws,)`` and ``(num_draws, latent_dim)``.
        """
        if len(latent) == 0:
            return self.plain(latent)
        latent = latent.detach().contiguous()
        shares = self._shares.get(_key(latent))
        if shares is not None and shares.is_divided:
            parts = current_workers().score(self, self._alone, latent, shares.results)
            if parts is not None:
                return parts
        return self._alone(latent)

    def _alone(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        key = _key(latent)
        if key not in self._shares:
            # Sizes that occur once, as when chains are started anew, are not worth a recording.
            found, self._shares[key] = self._first(latent)
            return found
        if self._programs.compile is False or self._programs.refusal is not None:
            return self.plain(latent)
        if (rows := self._shares[key].rows) == len(latent):
            return self._recorded(latent)
        parts = [self._recorded(part) for part in latent.split(rows)]
        log_prob, score = map(torch.cat, zip(*parts, strict=True))
        return log_prob, score

    def _recorded(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        programs = self._programs
        key = _key(latent)
        program, is_due = programs.find(key)
        own = None
        if program is not None:
            with suppress(IndexError):  # of an overflow, which the plain score leaves out
                own = program([latent])
            if own is not None and not is_due:
                return own[0], own[1]
        found = self.plain(latent)
        if own is not None:
            if difference := disagreement(own, found):
                cause = f"a recording disagrees with it: {difference}"
                programs.give_up("the log-density", cause, is_wrong=True)
            else:  # chains that resume compare at other calls, and rounding must be the same
                found = own[0], own[1]
        elif program is None and programs.refusal is None:
            inputs = latent.clone()
            programs.record(
                "the log-density",
                key,
                lambda: RecordedFunction(lambda: self.plain(inputs), [inputs]),
                lambda _: [inputs],
            )
        return found

    def log_prob(self, latent: Tensor) -> Tensor:
        """Return the log-density, differentiable once, ``(num_draws,)``.

        The gradient of vectors of density 0 is 0.
        """
        with torch.no_grad():
            log_prob, score = self(latent)
            score = score.where(log_prob.isfinite().unsqueeze(-1), 0.0)
        return log_prob + ((latent - latent.detach()) * score).sum(-1)

    def _first(self, latent: Tensor) -> tuple[tuple[Tensor, Tensor], _Shares]:
        """Return the result, and how later calls with as many rows are evaluated."""
        with _Counter() as counter:
            found = self.plain(latent)
        like = tuple(one.new_empty(0, *one.shape[1:]) for one in found)
        shares = _Shares(*self._division(latent, counter), like)
        saved = self.num_calls * (COST.per_run + COST.saved_per_operation * counter.operations)
        if self._programs.compile == "auto" and saved < 2 * COST.per_recorded * counter.operations:
            self._programs.give_up(
                "the log-density",
                f"{self.num_calls:g} calls do not repay the recording of {counter.operations} "
                "operations",
            )
        return found, shares

    def _division(self, latent: Tensor, whole: _Counter) -> tuple[int, bool]:
        """Return the rows of a block, and whether processes divide the rows."""
        number = len(latent)
        num_workers = min(current_workers().number, number // 2)
        is_large = whole.largest * latent.element_size() > COST.cache
        if latent.device.type != "cpu" or not (is_large or num_workers > 1):
            return number, False
        some = latent[: number // max(2, num_workers)]
        with _Counter() as part:
            self.plain(some)
        is_divided = num_workers > 1 and whole.seconds - part.seconds > COST.least_divided
        # Data are as large in both.
        per_row = (whole.largest - part.largest) / (number - len(some)) * latent.element_size()
        affordable = COST.cache / per_row if per_row > 0 else number
        if affordable >= number:
            return number, is_divided
        return 1 << max(1, int(math.log2(max(2, affordable)))), is_divided


def _key(latent: Tensor) -> tuple[Any, ...]:
    return latent.shape, latent.dtype, latent.device


class _Shares(NamedTuple):
    """The ``rows`` of a block, a power of two or all; whether processes divide the rows; the
    ``results`` for no rows."""

    rows: int
    is_divided: bool
    results: tuple[Tensor, ...]


class FusedDensity:
    """A log-density, recorded once and fused if the model has many operations, as loops do.

    The recording is compared with the model, gradients included, and again at the first, second,
    fourth, eighth ... call. Models that cannot be recorded, or whose operations differ, run as they
    are, and ``refusal`` says why.

    :param by_model: runs the model for many vectors, ``(num_draws, latent_dim)``.
    :param of_one: runs the model for one vector, ``(latent_dim,)``.
    """

    def __init__(
        self, by_model: Callable[[Tensor], Tensor], of_one: Callable[[Tensor], Tensor]
    ) -> None:
        self.by_model, self.of_one = by_model, of_one
        self.refusal: str | None = None
        self._function: FusedFunction | None = None
        self._num_calls = 0

    def __call__(self, latent: Tensor) -> Tensor:
        """Return the log-density, differentiable, ``(num_draws,)``."""
        # An estimate of the cost must not count a comparison with the model.
        if ACTIVE.recorder is None and self.refusal is None and not _Counter.num_active:
            try:
                self._prepare(latent.detach())
            except Exception as error:  # of the model, too
                self.refusal, self._function = first_line(error), None
        if self._function is None:
            return self.by_model(latent)
        return torch.func.vmap(self._function)(latent)

    def _prepare(self, latent: Tensor) -> None:
        if self._function is None:
            with torch.no_grad(), _Counter() as counter:
                self.by_model(latent[:1])
            if counter.operations < RECORDINGS.least_operations:
                raise Untraceable(f"it has {counter.operations} operations")
            function = FusedFunction(self.of_one, latent[0])
            self._compare(function, latent[:2])
            self._function = function
        elif not self._function.holds():
            raise Untraceable("its data were changed in place")
        else:
            self._num_calls += 1
            if self._num_calls & (self._num_calls - 1) == 0:
                self._compare(self._function, latent[:2])

    def _compare(self, function: FusedFunction, latent: Tensor) -> None:
        found, expected = (
            score_of(one)(latent) for one in (torch.func.vmap(function), self.by_model)
        )
        if difference := disagreement(found, expected):
            raise Untraceable(f"a recording disagrees with the model: {difference}")
