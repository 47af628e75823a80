# SPDX-License-Identifier: Apache-2.0
"""Compiled recordings compute what the function does, and are found on disk by other processes."""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pyro_implicit.compiled import RECORDINGS, RecordedFunction, program

FORK = multiprocessing.get_context("fork")  # no process has to import torch again


def compile_and_compare(folder: Path) -> None:
    from torch._dynamo.utils import counters

    def function():
        wave = x.sin()
        return [wave, (wave @ wave).cos() + torch.randn(8, 8)]  # a product between two kernels

    counters.clear()
    x = torch.randn(8, 8, dtype=torch.float64)
    recorded = RecordedFunction(function, [x])
    before = torch.get_rng_state()
    recorded.compile([x])
    assert torch.equal(torch.get_rng_state(), before)
    x = torch.nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
    torch.manual_seed(0)
    found = recorded([x])
    torch.manual_seed(0)
    for one, other in zip(found, function(), strict=True):
        torch.testing.assert_close(one, other.detach())
    assert counters["stats"]["unique_graphs"] == 1
    with (folder / "hits").open("a") as file:
        print(counters["inductor"]["fxgraph_cache_hit"], file=file)


def run_in_a_process(function, *args) -> None:
    process = FORK.Process(target=function, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def compile_in_two_processes(folder: Path) -> None:
    warnings.simplefilter("ignore")  # torch's own
    # Compilers take less time without a precompiled header and without vector instructions.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
    importlib.import_module("torch._inductor.compile_fx")  # once for both
    for _ in range(2):
        run_in_a_process(compile_and_compare, folder)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_another_process_finds_compiled_programs_on_disk(tmp_path):
    run_in_a_process(compile_in_two_processes, tmp_path)
    assert (tmp_path / "hits").read_text().split() == ["0", "1"]


@pytest.mark.parametrize(
    ("changes", "break_even"),
    [({}, 6), ({"compilation_per_operation": 1.0}, 8), ({"large_result": 4097}, math.inf)],
)
def test_calls_that_repay_a_compilation(monkeypatch, changes, break_even):
    x = torch.ones(4096)
    recorded = RecordedFunction(lambda: [(x.exp() + 1).view(64, 64)], [x])
    values = {"compilation": 4.5, "compilation_per_operation": 0.5, "large_result": 4096}
    values["saved_per_element"] = 1 / (2 * 4096)  # a second for each call
    monkeypatch.setattr(program, "RECORDINGS", replace(RECORDINGS, **values | changes))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/g++")
    calls = range(1, 10)
    assert [recorded.repays_compilation(n) for n in calls] == [n >= break_even for n in calls]


def test_nothing_repays_a_compilation_without_a_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    x = torch.ones(RECORDINGS.large_result)
    assert not RecordedFunction(lambda: [x.exp()], [x]).repays_compilation(10**9)
