# SPDX-License-Identifier: Apache-2.0
"""Where functions that run models may be called: by one thread at a time, outside of plates."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.runtime import _PYRO_STACK

__all__ = ["in_turn", "misspelt", "refuse_outer_plates"]

Given = ParamSpec("Given")
Result = TypeVar("Result")

_lock = threading.RLock()


def in_turn(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A function that waits until no other thread is in one of these, and refuses plates around it.

    Pyro's handlers and parameters, and random numbers, are the process's: else sites of one
    thread's model are seen by the handlers of another's. Inside ``torch.inference_mode`` it leaves
    that mode, which has no gradients.

    **Example:**

    >>> @in_turn
    ... def half(x: float) -> float:
    ...     return x / 2
    >>> half(3.0)
    1.5

    :param function: that runs models.
    :raises ValueError: by the function, where it is called inside a plate.
    """

    @functools.wraps(function)
    def waiting(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with _lock, torch.inference_mode(False):
            refuse_outer_plates(function.__name__)
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                hint = misspelt(function, kwargs, error)
                if not hint:
                    raise
                raise TypeError(hint) from error

    return waiting


def misspelt(function: Callable[..., Any], kwargs: Mapping[str, Any], error: TypeError) -> str:
    """The parameter that a keyword argument may have meant, if the model refused that argument.

    **Example:**

    >>> def fit(model, *args, num_steps=100, **kwargs):
    ...     return model(*args, **kwargs)
    >>> error = TypeError("model() got an unexpected keyword argument 'num_step'")
    >>> print(misspelt(fit, {"num_step": 5}, error))
    model() got an unexpected keyword argument 'num_step', which ... Cure: num_steps=

    :param function: that was called.
    :param kwargs: of the call.
    :param error: that it raised.
    :returns: the whole message with its cure; nothing if the argument is not to blame.
    """
    found = re.search(r"\S+\(\) got an unexpected keyword argument '(\w+)'", str(error))
    known = inspect.signature(function).parameters
    if found is None or found[1] not in kwargs or found[1] in known:
        return ""
    near = difflib.get_close_matches(found[1], known, n=1)
    cure = f"{near[0]}=" if near else "leave it out, or give the model such a parameter"
    passed_on = f"which {function.__name__} passes on, as it has no parameter of that name"
    return f"{found[0]}, {passed_on}. Cure: {cure}"


def refuse_outer_plates(who: str) -> None:
    """Check that no plate is open, which would make copies of all that a model samples.

    :param who: is called, for the message.
    :raises ValueError: naming plate and cure.
    """
    for handler in _PYRO_STACK:
        if isinstance(handler, IndepMessenger):
            raise ValueError(
                f"{who} is called inside plate '{handler.name}', which would make copies of all "
                "that the model samples. Cure: call it outside of the plate"
            )


def _renew() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "fork"):  # a thread that is no more in the child may have held it
    os.register_at_fork(after_in_child=_renew)
