# SPDX-License-Identifier: Apache-2.0
"""Work of two processes that ``torch.distributed`` connects."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # DistributedDataParallel imports it: once, before the processes part
from torch import distributed

__all__ = ["in_two_processes"]


def in_two_processes(work: Callable[[int, Path], None], folder: Path) -> None:
    """Calls ``work(rank, folder)`` in both, and asserts that both come to its end."""
    context = multiprocessing.get_context("fork")  # which imports nothing again
    workers = [context.Process(target=_connected, args=(work, rank, folder)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        worker.kill()
    assert [worker.exitcode for worker in workers] == [0, 0]


def _connected(work: Callable[[int, Path], None], rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    method = f"file://{folder / 'meeting'}"
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    work(rank, folder)
    distributed.barrier()
    distributed.destroy_process_group()
