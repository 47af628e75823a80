# SPDX-License-Identifier: Apache-2.0
"""A model, run for many values of its latent variables at once by ``torch.func.vmap``."""

from __future__ import annotations

import contextlib
import math
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import pyro
import torch
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from pyro_implicit.compiled import ACTIVE, Untraceable
from pyro_implicit.density.model import IMPOSSIBLE, Model, UnfitModelError, varying_site
from pyro_implicit.density.policy import ROUNDING, RUNS
from pyro_implicit.density.run_mode import BranchError, RunMode, VmapError, writes_to_unbatched
from pyro_implicit.runtime.global_state import same_streams, stream_positions
from pyro_implicit.runtime.messages import first_line, warn_user
from pyro_implicit.runtime.sites import is_latent
from pyro_implicit.runtime.trees import flatten, leaves_by_path, leaves_of, map_tree

__all__ = ["BatchedRuns"]

Values = dict[str, Tensor]
T = TypeVar("T")
#: Rows of a batch with their result, None if the model raised an error.
Part = tuple[Tensor, Any]


class _Task(NamedTuple):
    """A model, the values to run it at, and the function that reads each run."""

    model: Model
    values: Values
    read: Callable[[Trace], Any]


class BatchedRuns:
    """Runs a model for many values of its latent variables, and remembers how it can be run.

    The first batch is compared with a plain run. A model that cannot run inside ``vmap`` is run one
    value at a time from then on, with one warning that names the cause. If runs part at a branch,
    those that take it are one batch, and the others another one. If a run raises an error, the
    others go on.

    :param owner: the class or function that runs the model, for the warning.
    :param mode: ``"vmap"``, or ``False`` for one run after the other.
    :param refuses_random: whether a model that is random beyond its latent variables is an error;
        otherwise it is run one value at a time.
    """

    def __init__(
        self, owner: str, mode: Literal["vmap", False] = "vmap", refuses_random: bool = False
    ) -> None:
        self.owner = owner
        self.mode = mode
        self.refuses_random = refuses_random
        self.checked = mode is False
        #: The last error that the model raised at impossible values.
        self.error: Exception | None = None
        self._named: set[type] = set()
        # Functions are replaced until a whole batch did not need it, and again after an error.
        self._replaces = True
        self._must_replace = False
        self._fresh_are_batched = False

    def map(
        self,
        model: Model,
        values: Values,
        read: Callable[[Trace], T],
        otherwise: T | None = None,
    ) -> T:
        """Return what ``read`` finds in the trace of each run, stacked.

        :param values: values by site, ``(num_runs, *site_shape)``.
        :param read: returns tensors, alone or in dicts and tuples, from a trace without subsampling
            sites, whose log-probabilities are not computed yet.
        :param otherwise: the result for a run that raises an error. By default it is NaN, or the
            error itself if all runs raise one.
        :returns: the same structure, each tensor ``(num_runs, *shape)``.
        :raises UnfitModelError: if runs have different sites in dicts by site, or for a random
            model that is refused.
        """
        task = _Task(model, values, read)
        if ACTIVE.recorder is not None:  # all runs at once; an error means: not to be recorded
            if self.mode is False or not self.checked:
                raise Untraceable("the model runs one particle at a time, outside torch.func.vmap")
            return self._vmap(task)[0]
        rows = torch.arange(len(next(iter(values.values()))))
        if self.mode == "vmap":
            try:
                if self.checked:
                    return self._batches(task, rows, otherwise)
                return self._compared(task, rows, otherwise)
            except VmapError as error:
                self._give_up_vmap(error, task)
        return self._join([self._one(task, row) for row in rows], otherwise)

    def _compared(self, task: _Task, rows: Tensor, otherwise: Any) -> Any:
        """As :meth:`_batches`, compared with a plain run at the first possible values."""
        for row in rows:
            before = stream_positions()
            _, expected = self._one(task, row, knows_latents=False)
            if expected is not None:
                break
        else:
            return self._join([(rows, None)], otherwise)
        drew = before != stream_positions()
        result = self._batches(task, rows, otherwise)
        found = map_tree(lambda leaf: leaf[row : row + 1], result)
        one, other = _total(found), _total(expected)
        if math.isfinite(other) and (drew or not _is_close(one, other, RUNS.tolerance)):
            self._refuse_difference(task, row, one, other)
        self.checked = True
        return result

    def _refuse_difference(self, task: _Task, row: Tensor, one: float, other: float) -> None:
        """Check that a plain run repeats its result, and that the vectorised run has the same.

        :param one: the result of the vectorised run.
        :param other: the result of a plain run.
        """
        # The two may be close by chance; a minibatch was drawn, but now stays the same.
        _, again = self._one(task, row)
        repeated = other if again is None else _total(again)
        is_equal = _is_close(one, other, RUNS.tolerance)
        is_repeatable = _is_close(repeated, other, RUNS.repeat_tolerance)
        if is_equal and is_repeatable:
            return
        if not _is_close(repeated, other, RUNS.tolerance):
            self._meet_random(other, repeated)
        rounding = self._rounding(task, row)
        if not (is_repeatable or abs(repeated - other) <= rounding):
            self._meet_random(other, repeated)
        if not (is_equal or abs(one - other) <= rounding):
            raise VmapError(
                f"its log-density is {one:.6g} there and {other:.6g} outside; are latents written "
                "into tensors in place?"
            )

    def _rounding(self, task: _Task, row: Tensor) -> float:
        """Return the difference that counts as rounding of plain runs at one point."""
        values = (task.values, *(_perturbed(task.values, k) for k in range(ROUNDING.num_runs)))
        totals = []
        for some in values:
            with same_streams():  # what the model draws is no effect of rounding
                _, run = self._one(task._replace(values=some), row)
            if run is not None:
                totals.append(_total(run))
        return RUNS.rounding * max((abs(total - totals[0]) for total in totals), default=0.0)

    def _meet_random(self, one: float, other: float) -> NoReturn:
        fault = (
            "the model is random beyond its latents, or changes from run to run: its log-density "
            f"at one point is {one:.6g}, and then {other:.6g}"
        )
        cure = (
            "make the random quantity a latent, by pyro.sample, or fix it before; networks with "
            "dropout in .eval() mode"
        )
        if self.refuses_random:
            raise UnfitModelError(f"{fault}. Cure: {cure}")
        raise VmapError(fault, cure)

    def _batches(self, task: _Task, rows: Tensor, otherwise: Any) -> Any:
        """Return the results of all runs, in groups of runs that take the same branches."""
        todo: list[Tensor] = [rows]
        done: list[Part] = []
        replaced = False
        while todo:
            group, some = todo.pop(), task
            if len(group) < len(rows):
                picked = {name: v[group.to(v.device)] for name, v in task.values.items()}
                some = task._replace(values=picked)
            try:
                part, needed = self._vmap(some)
                done.append((group, part))
                replaced |= needed
            except BranchError as branch:
                if len(todo) + len(done) > max(RUNS.max_groups, len(rows) // 2):
                    raise VmapError("its runs take too many different branches") from branch
                if len(todo) + len(done) == 0:
                    # All groups see the same data: their indices are drawn in a plain run.
                    self._one(task, group[0])
                is_true = branch.is_true.cpu()
                todo += [group[is_true], group[~is_true]]
            except (VmapError, UnfitModelError):
                raise
            except Exception as error:  # vmap raises many kinds of errors
                if not self._replaces:
                    self._replaces = self._must_replace = True
                    todo.append(group)
                elif not self._fresh_are_batched and writes_to_unbatched(error):
                    self._fresh_are_batched = True
                    todo.append(group)
                elif not (finite := _are_finite(some.values)).all():
                    # An overflow, which becomes an index, for instance, fails for all runs.
                    finite = finite.cpu()
                    todo += [group[finite]] if finite.any() else []
                    self.error = error.with_traceback(None)
                    done += [(row.reshape(1), None) for row in group[~finite]]
                else:
                    parts = [self._one(task, row) for row in group]
                    if all(part is not None for _, part in parts):
                        raise VmapError(first_line(error), _cure(error)) from error
                    done += parts  # the error was the model's own, at some of these values
        # Another `read` may not need it: once needed, it is kept.
        self._must_replace |= replaced
        self._replaces = self._must_replace
        if len(done) == 1 and done[0][1] is not None:
            return done[0][1]
        return self._join(done, otherwise)

    def _vmap(self, task: _Task) -> tuple[Any, bool]:
        """Return the result of all runs, and whether functions of torch had to be replaced."""
        modes: list[RunMode] = []

        def read_one(tag: Tensor, values: Values) -> Any:
            if self._replaces:
                modes.append(RunMode(tag, self._fresh_are_batched))
            # The plain run made Pyro's checks; in here they would branch on batched values.
            with modes[0] if modes else contextlib.nullcontext(), pyro.validation_enabled(False):
                return task.read(prune_subsample_sites(task.model.run(values)))

        first = next(iter(task.values.values()))
        tag = torch.ones(len(first), dtype=torch.bool, device=first.device)
        # Torch's attention for inference is used inside vmap, too, and cannot be differentiated.
        mha, was_enabled = torch.backends.mha, torch.backends.mha.get_fastpath_enabled()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # missing vmap rules
            mha.set_fastpath_enabled(False)
            try:
                result = torch.func.vmap(read_one, randomness="same")(tag, task.values)
            finally:
                mha.set_fastpath_enabled(was_enabled)
        return result, bool(modes) and modes[0].was_needed

    def _one(self, task: _Task, row: Tensor, knows_latents: bool = True) -> Part:
        try:
            with RunMode() if self._replaces else contextlib.nullcontext():
                trace = task.model.run({name: v[row] for name, v in task.values.items()})
                task.model.share_minibatch(trace)
                trace = prune_subsample_sites(trace)
                found = task.read(trace)
                if not knows_latents:
                    _refuse_unknown_latents(task.model, trace)
        except (VmapError, UnfitModelError):
            raise
        except IMPOSSIBLE as error:
            if isinstance(error, (AssertionError, IndexError)):
                self._warn_of_fault(error)
            self.error = error.with_traceback(None)
            return row.reshape(1), None
        return row.reshape(1), map_tree(lambda leaf: leaf.unsqueeze(0), found)

    def _warn_of_fault(self, error: Exception) -> None:
        """Warn once of an error that may be a fault of the model."""
        if type(error) not in self._named:
            self._named.add(type(error))
            warn_user(
                f"the model raised {first_line(error)} at some values of its latent variables, "
                "which count as impossible. Cure: correct the model if these values are possible; "
                "otherwise raise a ValueError there, or add a pyro.factor of -inf"
            )

    def _join(self, parts: list[Part], otherwise: Any) -> Any:
        good = [part for _, part in parts if part is not None]
        for part in good[1:]:
            if flatten(part)[1] != flatten(good[0])[1]:
                raise varying_site(min(_keys(part) ^ _keys(good[0])))
        if otherwise is None:
            if not good:
                assert self.error is not None
                raise self.error
            otherwise = map_tree(lambda leaf: torch.full_like(leaf[0], math.nan), good[0])

        def fill(rows: Tensor) -> Any:
            return map_tree(lambda leaf: leaf.expand((len(rows),) + leaf.shape), otherwise)

        whole = [fill(rows) if part is None else part for rows, part in parts]
        order = torch.cat([rows for rows, _ in parts]).argsort()
        return map_tree(lambda *leaves: torch.cat(leaves)[order.to(leaves[0].device)], *whole)

    def _give_up_vmap(self, error: VmapError, task: _Task) -> None:
        model, values = task.model, task.values
        cause = str(error).splitlines()[0]  # Pyro adds the shapes of all sites
        if model.last_site not in (None, "_INPUT", "_RETURN"):
            cause += f", behind site '{model.last_site}'"
        self.mode, self.checked, self._replaces = False, True, True
        start = time.perf_counter()
        with contextlib.suppress(*IMPOSSIBLE):
            model.run({name: value[0] for name, value in values.items()})
        seconds = time.perf_counter() - start
        num_runs = len(next(iter(values.values())))
        cure = error.cure or (
            "write the model without .item() and without branches on latent values"
        )
        if self.owner.endswith("ELBO"):
            cure += '; in a loss of your own, fewer particles, vectorize_particles="plate" or False'
        warn_user(
            f"{self.owner} runs the model one particle at a time, because it cannot run inside "
            f"torch.func.vmap ({cause}): {num_runs} particles take {num_runs * seconds:.2g} s, "
            f"one takes {seconds:.2g} s. Cure: {cure}",
        )


def _refuse_unknown_latents(model: Model, trace: Trace) -> None:
    for name, site in trace.nodes.items():
        if is_latent(site) and name not in model.replayed:
            raise VmapError(f"site '{name}' is a latent that is drawn anew in each run")


def _keys(tree: Any) -> set[str]:
    return {key for path, _ in leaves_by_path(tree) for key in path if isinstance(key, str)}


def _is_close(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)


def _perturbed(values: Values, seed: int) -> Values:
    random = torch.Generator().manual_seed(seed)
    moved = {}
    for name, value in values.items():
        if value.is_floating_point():
            signs = torch.randint(2, value.shape, generator=random, device="cpu")
            signs = signs.mul(2).sub(1).to(value)
            value = value * (1 + torch.finfo(value.dtype).eps * signs)
        moved[name] = value
    return moved


def _are_finite(values: Values) -> Tensor:
    """Return for each run whether all its values are finite."""
    return torch.stack([v.isfinite().reshape(len(v), -1).all(1) for v in values.values()]).all(0)


def _total(tree: Any) -> float:
    return sum(leaf.detach().double().sum().item() for leaf in leaves_of(tree))


def _cure(error: Exception) -> str | None:
    if "setup_context" in str(error):
        classes = [frame.f_locals.get("cls") for frame, _ in traceback.walk_tb(error.__traceback__)]
        kinds = [one for one in classes if isinstance(one, type(torch.autograd.Function))]
        name = f"{kinds[-1].__module__}.{kinds[-1].__qualname__}" if kinds else "the Function"
        return (
            f"give {name} a method setup_context and generate_vmap_rule=True, or use torch's "
            "functions instead (in a CompartmentalModel, num_quant_bins=1)"
        )
    if "Batching rule not implemented for" not in str(error):
        return None
    return (
        "another operation, for which torch.func.vmap has a rule: instead of nn.LSTM, nn.GRU or "
        "nn.RNN, nn.GRUCell in a loop over the steps; or fewer particles"
    )
