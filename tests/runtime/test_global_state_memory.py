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

    def start(**settings):
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**inherited, **settings},
            stdout=subprocess.PIPE,
            text=True,
        )

    # A user's setting stays. This one is glibc's default, which returns all memory.
    with start() as by_default, start(MALLOC_TRIM_THRESHOLD_="131072") as by_user:
        faults, faults_by_user = (int(one.communicate()[0]) for one in (by_default, by_user))
    # The heap may still grow by some tensors, of 13 pages each, where its free blocks do not fit:
    # at most one page in each call. Memory that is returned costs at least a tensor in each call.
    assert faults < CALLS
    assert faults_by_user > 13 * CALLS
