# SPDX-License-Identifier: Apache-2.0
"""Fixtures that reset Pyro and torch before every test and doctest, and set float64."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Generator, Iterator

import pyro
import pytest
import torch

os.environ.setdefault("MPLBACKEND", "Agg")
# Tensors in tests are small: a second thread slows them down, especially on a busy machine. The
# variable is for processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
TEST_SEED = int(os.environ.get("TEST_SEED", "0"))  # no test may depend on it: try others


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt the modules and the collected tests from garbage collection.

    They are millions of objects that live as long as the process: each full collection takes
    nearly a second to visit them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()  # what is garbage already may stay: to find it takes a second


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Clear the parameter store, seed, and undo what a test changes globally."""
    dtype = torch.get_default_dtype()
    pyro.clear_param_store()
    pyro.set_rng_seed(TEST_SEED)
    with pyro.validation_enabled(True):
        yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def double(_fresh_state: None) -> None:
    """Make float64 the default dtype; `_fresh_state` restores the previous dtype."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few resamples for the intervals of distances, which take most of the time of `compare`."""
    from pyro_implicit.diagnostics import distances

    few = dataclasses.replace(distances.DISTANCES, num_bootstrap=10)
    monkeypatch.setattr(distances, "DISTANCES", few)
