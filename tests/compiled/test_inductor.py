# SPDX-License-Identifier: Apache-2.0
"""Compiled recordings compute what the function does, and are found on disk by other processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

#: Two processes compile the same function, one after the other; both have the imports of a third.
PROGRAM = """
import os
import torch
import torch._inductor.compile_fx
from torch._dynamo.utils import counters
from pyro_implicit.compiled import RecordedFunction

torch.set_num_threads(1)

def work():
    def function():
        wave = x.sin()
        return [wave, (wave @ wave).cos() + torch.randn(8, 8)]  # a product between two kernels

    x = torch.randn(8, 8, dtype=torch.float64)
    recorded = RecordedFunction(function, [x])
    before = torch.get_rng_state()
    recorded.compile([x])
    assert torch.equal(torch.get_rng_state(), before)
    x = torch.randn(8, 8, dtype=torch.float64)
    torch.manual_seed(0)
    found = recorded([x])
    torch.manual_seed(0)
    for one, other in zip(found, function(), strict=True):
        torch.testing.assert_close(one, other)
    print(counters["inductor"]["fxgraph_cache_hit"], flush=True)

for _ in range(2):
    if os.fork() == 0:
        work()
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_another_process_finds_compiled_programs_on_disk(tmp_path):
    # Without a precompiled header and trials of instruction sets, compilers run for less time.
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    hits = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, **settings},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert hits == ["0", "1"]
