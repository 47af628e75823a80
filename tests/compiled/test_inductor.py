# SPDX-License-Identifier: Apache-2.0
"""Compiled recordings compute what the function does, and are found on disk by other processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings

import pytest

PROGRAM = """
import torch
from torch._dynamo.utils import counters
from pyro_implicit.compiled import RecordedFunction

counters.clear()

def function():
    wave = x.sin()
    return [wave, (wave @ wave).cos() + torch.randn(8, 8)]  # a product between two kernels

x = torch.randn(8, 8, dtype=torch.float64)
recorded = RecordedFunction(function, [x])
recorded.compile([x])
x = torch.randn(8, 8, dtype=torch.float64)
torch.manual_seed(0)
found = recorded([x])
torch.manual_seed(0)
for one, other in zip(found, function(), strict=True):
    torch.testing.assert_close(one, other)
hits = counters["inductor"]["fxgraph_cache_hit"]
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_another_process_finds_compiled_programs_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Compilers run for half as long without a precompiled header and trials of instruction sets.
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{PROGRAM}\nassert hits == 0"], check=True
    )
    here = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(PROGRAM, here)
    assert here["hits"] == 1
