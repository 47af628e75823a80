# SPDX-License-Identifier: Apache-2.0
"""A warning names the line of the user, from any depth of the library."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

import pyro_implicit

#: Library code that warns behind a context manager, which torch's Module.__call__ runs.
SOURCE = """
import contextlib, torch
from pyro_implicit.runtime.user_warnings import warn_user

@contextlib.contextmanager
def room():
    warn_user("mind the step", FutureWarning)
    yield

class Deep(torch.nn.Module):
    @torch.no_grad()
    def forward(self, function=None):
        if function is not None:
            return function()
        with room():
            pass
"""


@pytest.fixture(scope="module")
def deep():
    names = {}
    file = Path(pyro_implicit.__file__).with_name("made_up.py")
    exec(compile(SOURCE, str(file), "exec"), names)
    return names["Deep"]()


def here() -> int:
    return inspect.currentframe().f_back.f_lineno


def test_the_users_line_is_named(deep: torch.nn.Module) -> None:
    with pytest.warns(FutureWarning, match="mind") as record:
        line = here() + 1
        deep()
    assert (record[0].filename, record[0].lineno) == (__file__, line)


def test_a_model_that_the_library_calls_is_the_users(deep: torch.nn.Module) -> None:
    def model() -> int:
        deep()
        return here() - 1

    with pytest.warns(FutureWarning, match="mind") as record:
        line = deep(model)
    assert (record[0].filename, record[0].lineno) == (__file__, line)
