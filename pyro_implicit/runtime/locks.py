# SPDX-License-Identifier: Apache-2.0
"""Functions that run models: called by one thread at a time, and outside of plates."""

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
    """Let one thread at a time run such functions, and refuse calls inside of plates.

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
    :raises ValueError: by the function, if it is called inside a plate.
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
    """Suggest the parameter that a keyword argument may have meant, if the model refused it.

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


def _renew() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "fork"):  # a thread that does not exist in the child may hold the lock
    os.register_at_fork(after_in_child=_renew)
