# SPDX-License-Identifier: Apache-2.0
"""What all threads of a process share: random streams, Pyro's handlers, and freed memory."""

from __future__ import annotations

import ctypes
import difflib
import functools
import inspect
import operator
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from pyro import poutine
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor

from pyro_implicit.runtime.trees import map_tree

__all__ = [
    "in_turn",
    "keep_freed_memory",
    "misspelt",
    "random_streams",
    "refuse_outer_handlers",
    "refuse_outer_plates",
    "restore_random_streams",
    "same_streams",
    "single_thread",
    "seeded",
    "states_on_cpu",
    "stream_positions",
    "with_seed",
]


Given = ParamSpec("Given")
Result = TypeVar("Result")


@contextmanager
def seeded(seed: int | None, device: torch.device | None = None) -> Iterator[None]:
    """Draw from streams of this seed, and restore the caller's streams afterwards.

    Covers torch on the CPU and on CUDA devices, numpy's global generator and Python's ``random``.

    **Example:**

    >>> values = []
    >>> for seed in (0, 0, 1):
    ...     with seeded(seed):
    ...         values.append(torch.randn(()))
    >>> bool(values[0] == values[1]), bool(values[0] == values[2])
    (True, False)

    :param seed: of all streams; with ``None`` the caller's streams are used, and advance.
    :param device: the only device that is drawn on besides the CPU; ``None`` if unknown.
    :raises ValueError: for a negative seed, and from 2**32 on.
    """
    if seed is None:
        yield
        return
    seed = operator.index(seed)  # an integer of numpy, too
    if not 0 <= seed < 2**32:  # numpy's limits
        raise ValueError(f"seed must be at least 0 and less than 2**32, but got {seed}")
    with same_streams(device):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would wake every GPU
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        _seed_gpus(device, seed)
        yield


def with_seed(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Run a function inside ``seeded(seed)``, with its keyword argument ``seed``.

    **Example:**

    >>> @with_seed
    ... def noise(*, seed: int | None = None) -> torch.Tensor:
    ...     return torch.randn(())
    >>> bool(noise(seed=1) == noise(seed=1)), bool(noise() == noise())
    (True, False)

    :param function: whose ``seed`` is keyword-only, and ``None`` by default.
    """

    @functools.wraps(function)
    def inside(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        seed: Any = kwargs.get("seed")
        with seeded(seed):
            return function(*args, **kwargs)

    return inside


@contextmanager
def same_streams(device: torch.device | None = None) -> Iterator[None]:
    """Restore all random streams at the end, also after an exception.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> with same_streams():
    ...     value = torch.randn(())
    >>> bool(torch.randn(()) == value)
    True

    :param device: the only device that is drawn on besides the CPU; ``None`` if unknown.
    """
    outside, first_seed = get_rng_state(), torch.initial_seed()
    gpus = {gpu: torch.cuda.get_rng_state(gpu) for gpu in _gpus(device)}
    asleep = not torch.cuda.is_initialized()
    try:
        yield
    finally:
        set_rng_state(outside)
        for gpu, state in gpus.items():
            torch.cuda.set_rng_state(state, gpu)
        if asleep:  # the caller's CUDA streams would have begun with the seed of the CPU's
            _seed_gpus(device, first_seed)


def stream_positions() -> tuple[Any, ...]:
    """Return values that stay equal until something is drawn from a global random stream.

    **Example:**

    >>> before = stream_positions()
    >>> before == stream_positions(), torch.rand(()).shape, before == stream_positions()
    (True, torch.Size([]), False)
    """
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in _gpus(None))]
    _, keys, position, *_ = np.random.get_state()  # noqa: NPY002
    torchs = tuple(state.numpy().tobytes() for state in states)
    return (torchs, np.asarray(keys).tobytes(), position, random.getstate())


def _gpus(device: torch.device | None) -> list[int]:
    """Return the GPUs whose streams are kept: the device, or all if CUDA is initialised."""
    if device is None:
        return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


def _seed_gpus(device: torch.device | None, seed: int) -> None:
    """Seed their streams; if CUDA may be initialised later, then the GPUs that it will find."""
    if device is None and not torch.cuda.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        return
    for gpu in _gpus(device):
        torch.cuda.default_generators[gpu].manual_seed(seed)


_lock = threading.RLock()
_is_inside = False  # of a function that runs in turn


def in_turn(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Let one thread at a time run such functions, and refuse calls inside of handlers.

    Pyro's handlers, parameters and random numbers belong to the process: without the lock, the
    handlers of one thread would process the sites of another's model. The function runs outside of
    ``torch.inference_mode``, which has no gradients.

    **Example:**

    >>> @in_turn
    ... def half(x: float) -> float:
    ...     return x / 2
    >>> half(3.0)
    1.5

    :param function: a function that runs models.
    :raises ValueError: by the function, if it is called inside a plate or a handler that changes
        the model. Inside another such function, handlers may be those of this library.
    """
    is_wrapper = next(iter(inspect.signature(function).parameters), "") == "model"

    @functools.wraps(function)
    def waiting(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        global _is_inside
        with _lock, torch.inference_mode(False):
            refuse_outer_plates(function.__name__)
            if not _is_inside:
                refuse_outer_handlers(function.__name__, is_wrapper)
            was_inside, _is_inside = _is_inside, True
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                hint = misspelt(function, kwargs, error)
                if not hint:
                    raise
                raise TypeError(hint) from error
            finally:
                _is_inside = was_inside

    return waiting


@contextmanager
def single_thread(is_wanted: bool = True) -> Iterator[None]:
    """Let torch use one intra-operation thread, and restore the user's number at the end.

    No other thread runs functions of this library meanwhile.

    **Example:**

    >>> before = torch.get_num_threads()
    >>> with single_thread():
    ...     print(torch.get_num_threads())
    1
    >>> torch.get_num_threads() == before
    True

    :param is_wanted: with ``False`` nothing changes.
    """
    with _lock:
        number = torch.get_num_threads()
        if not is_wanted or number == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(number)


def misspelt(function: Callable[..., Any], kwargs: Mapping[str, Any], error: TypeError) -> str:
    """Suggest the parameter that a keyword argument may have meant, if it was refused.

    **Example:**

    >>> def fit(model, *args, num_steps=100, **kwargs):
    ...     return model(*args, **kwargs)
    >>> error = TypeError("model() got an unexpected keyword argument 'num_step'")
    >>> print(misspelt(fit, {"num_step": 5}, error))
    model() got an unexpected keyword argument 'num_step', which ... Cure: num_steps=

    :param function: the function that was called.
    :param kwargs: of the call.
    :param error: the error that it raised.
    :returns: the whole message with its cure; empty if the argument is not to blame.
    """
    found = re.search(r"\S+\(\) got an unexpected keyword argument '(\w+)'", str(error))
    known = inspect.signature(function).parameters
    if found is None or found[1] not in kwargs or found[1] in known:
        return ""
    near = difflib.get_close_matches(found[1], known, n=1)
    if all(one.kind is not one.VAR_KEYWORD for one in known.values()):
        names = [f"{name}=" for name in (near or known) if name != "self"]
        return f"{found[0]}. Cure: {' or '.join(names)}"
    cure = f"{near[0]}=" if near else "leave it out, or give the model such a parameter"
    passed_on = f"which {function.__name__} passes on, as it has no parameter of that name"
    return f"{found[0]}, {passed_on}. Cure: {cure}"


def refuse_outer_plates(who: str) -> None:
    """Check that no plate is open, which would copy all sites of a model.

    :param who: the function that is called, for the message.
    :raises ValueError: naming plate and cure.
    """
    for handler in _PYRO_STACK:
        if isinstance(handler, IndepMessenger):
            raise ValueError(
                f"{who} is called inside plate '{handler.name}', which would make copies of all "
                "that the model samples. Cure: call it outside of the plate"
            )


#: Handlers that change the sites of a model.
CHANGING = (
    poutine.handlers.ConditionMessenger,
    poutine.handlers.DoMessenger,
    poutine.handlers.EnumMessenger,
    poutine.handlers.EqualizeMessenger,
    poutine.handlers.InferConfigMessenger,
    poutine.handlers.LiftMessenger,
    poutine.handlers.MaskMessenger,
    poutine.handlers.ReparamMessenger,
    poutine.handlers.ReplayMessenger,
    poutine.handlers.ScaleMessenger,
    poutine.handlers.SubstituteMessenger,
    poutine.handlers.UnconditionMessenger,
)


def refuse_outer_handlers(who: str, takes_model: bool = True) -> None:
    """Check that no handler around a call changes the model: it would change some runs only.

    :param who: the function that is called, for the message.
    :param takes_model: whether its first argument is a model, which the handler could wrap.
    :raises ValueError: naming handler and cure.
    """
    for handler in reversed(_PYRO_STACK):
        if isinstance(handler, poutine.handlers.BlockMessenger) and _hides_all(handler):
            return
        kind = next((one for one in CHANGING if isinstance(handler, one)), None)
        if kind is not None:
            words = re.findall("[A-Z][a-z]+", kind.__name__.removesuffix("Messenger"))
            name = "poutine." + "_".join(words).lower()
            wrap = f"wrap the model, as in {who}({name}(model, ...), ...)"
            raise ValueError(
                f"{who} is called inside {name}, which would change only some runs of the model. "
                f"Cure: {wrap if takes_model else 'call it outside of the handler'}"
            )


def _hides_all(block: poutine.handlers.BlockMessenger) -> bool:
    site: Any = {"type": "sample", "name": "", "is_observed": False, "value": None, "infer": {}}
    try:
        return bool(block.hide_fn(site))
    except Exception:  # a user's hide_fn may read other fields
        return False


def _renew() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "fork"):  # a thread that does not exist in the child may hold the lock
    os.register_at_fork(after_in_child=_renew)


def random_streams() -> dict[str, Any]:
    """Return the states of all random number generators, without waking a GPU."""
    return {
        "cpu": get_rng_state(),
        "cuda": {gpu: torch.cuda.get_rng_state(gpu) for gpu in _gpus(None)},
    }


def states_on_cpu(states: Any) -> Any:
    """Move random states to the CPU: torch needs them there, whatever device a file was read to.

    :param states: random states, in dicts, lists and tuples.
    :returns: the same structure.
    """
    return map_tree(lambda one: one.cpu() if isinstance(one, Tensor) else one, states)


def restore_random_streams(states: dict[str, Any], device: torch.device | None = None) -> None:
    """Restore the states that :func:`random_streams` returned.

    :param states: the states.
    :param device: the only device that is drawn on besides the CPU; ``None`` if unknown.
    """
    states = states_on_cpu(states)
    set_rng_state(states["cpu"])
    for gpu in _gpus(device):
        if gpu in states["cuda"]:
            torch.cuda.set_rng_state(states["cuda"][gpu], gpu)


class _Parameter(IntEnum):
    """As in glibc's header ``malloc.h``."""

    TRIM_THRESHOLD = -1
    MMAP_THRESHOLD = -3


@functools.cache
def keep_freed_memory(most: int, largest: int) -> bool:
    """Let glibc keep freed memory for the next tensor instead of returning it to the system.

    By default, glibc returns the free memory at the end of its heap when there are more than
    128 KiB of it. The next tensor then causes a page fault for each of its pages, about 2
    microseconds each on a virtual machine. This made programs with tensors of 50 KiB up to three
    times slower, or not at all, depending on their addresses.

    The setting applies to the whole process, and is never undone. Nothing is set on other systems,
    or if the environment has settings of its own (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_TOP_PAD_``,
    ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``). Other allocators ignore it.

    :param most: bytes of free memory at the end of the heap that are kept.
    :param largest: bytes of a tensor above which its memory is returned at once, at most 32 MiB.
    :returns: whether it was set.
    """
    own = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if sys.platform != "linux" or any(name in os.environ for name in own):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Setting one of the two fixes the other at 128 KiB, which glibc otherwise adapts.
    settings = ((_Parameter.MMAP_THRESHOLD, largest), (_Parameter.TRIM_THRESHOLD, most))
    return all(mallopt(*setting) == 1 for setting in settings)
