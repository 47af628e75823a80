# SPDX-License-Identifier: Apache-2.0
"""A recording does not return its memory to the system after each operation."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CALLS = 400
PROGRAM = f"""
import resource
import torch
from pyro_implicit.compiled import RecordedFunction

torch.set_num_threads(1)
x = torch.randn(64, 100, dtype=torch.float64)
program = RecordedFunction(lambda: [(x * k + x).exp() for k in range(40)], [x])
for _ in range(100):
    program([x])
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({CALLS}):
    program([x])
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_a_recording_keeps_its_memory():
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }

    def faults(**settings):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**inherited, **settings},
            check=True,
            capture_output=True,
            text=True,
        )
        return int(done.stdout)

    # The heap may still grow by some tensors, of 13 pages each, where its free blocks do not fit:
    # at most one page in each call. Memory that is returned costs at least a tensor in each call.
    assert faults() < CALLS
    # A user's setting stays. This one is glibc's default, which returns all memory.
    assert faults(MALLOC_TRIM_THRESHOLD_="131072") > 13 * CALLS
