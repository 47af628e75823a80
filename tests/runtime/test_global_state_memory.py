# SPDX-License-Identifier: Apache-2.0
"""A recording does not return its memory to the system after each operation."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CALLS = 400
#: Two processes share the imports of a third. The user's setting is glibc's default, which returns
#: all memory; it is applied as glibc does when a process starts.
PROGRAM = f"""
import ctypes
import os
import resource
import torch
from pyro_implicit.compiled import RecordedFunction

torch.set_num_threads(1)

def count_faults():
    x = torch.randn(64, 100, dtype=torch.float64)
    program = RecordedFunction(lambda: [(x * k + x).exp() for k in range(40)], [x])
    for _ in range(100):
        program([x])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({CALLS}):
        program([x])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)

for is_set_by_user in (False, True):
    if os.fork() == 0:
        if is_set_by_user:
            os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
            assert ctypes.CDLL(None).mallopt(-1, 131072) == 1  # M_TRIM_THRESHOLD
        count_faults()
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_a_recording_keeps_its_memory():
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    command = [sys.executable, "-c", PROGRAM]
    printed = subprocess.run(command, env=inherited, check=True, stdout=subprocess.PIPE, text=True)
    faults, faults_by_user = map(int, printed.stdout.split())
    # The heap may still grow by some tensors, of 13 pages each, where its free blocks do not fit:
    # at most one page in each call. Memory that is returned costs at least a tensor in each call.
    assert faults < CALLS
    assert faults_by_user > 13 * CALLS
