# SPDX-License-Identifier: Apache-2.0
"""Values that two processes share."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from pyro_implicit.runtime.processes import (
    any_process,
    common_seed,
    from_first,
    is_first,
    mean_over_processes,
    num_processes,
)
from tests.two_processes import in_two_processes


def shared(rank):
    cpu = torch.device("cpu")
    torch.manual_seed(rank)
    return {
        "number": num_processes(),
        "first": is_first(),
        "any": [any_process(rank == 1, cpu), any_process(False, cpu)],
        "mean": [mean_over_processes(rank), mean_over_processes(rank, weight=1.0 + 2 * rank)],
        "seed": common_seed(),
        "values": from_first(torch.full((2 + rank,), float(rank))).tolist(),
    }


def work(rank, folder):
    torch.save(shared(rank), folder / f"{rank}.pt")


@pytest.mark.skipif(not distributed.is_available(), reason="torch without torch.distributed")
def test_two_processes_have_common_values(tmp_path):
    in_two_processes(work, tmp_path)
    torch.manual_seed(0)
    seed = int(torch.randint(2**31, ()))
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == {
            "number": 2, "first": rank == 0, "any": [True, False], "mean": [0.5, 0.75],
            "seed": seed, "values": [0.0, 0.0],
        }  # fmt: skip


def test_a_single_process_has_its_own_values():
    assert shared(1) == {
        "number": 1, "first": True, "any": [True, False], "mean": [1, 1],
        "seed": shared(1)["seed"], "values": [1.0, 1.0, 1.0],
    }  # fmt: skip
