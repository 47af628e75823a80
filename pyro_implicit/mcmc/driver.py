# SPDX-License-Identifier: Apache-2.0
"""The driver of all chains: it calls them until they stop, and writes checkpoints."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pyro_implicit.mcmc.frame import WhiteningFrame
from pyro_implicit.mcmc.policy import DEFAULT, ChainPolicy
from pyro_implicit.runtime.files import read_file, write_file
from pyro_implicit.runtime.global_state import random_streams, restore_random_streams
from pyro_implicit.runtime.progress import new_stage, watch

__all__ = ["Chains", "Checkpoint", "run"]

KIND = "chains of refine"


class Checkpoint:
    """A file from which killed chains resume, with the random streams.

    The file is complete or absent, whenever the process dies.

    :param path: the file; None for no checkpoint.
    :param settings: the settings of the run; a resumed run must have the same.
    :param every: transitions between two writings.
    """

    def __init__(
        self, path: str | Path | None = None, settings: dict[str, Any] | None = None, every: int = 1
    ) -> None:
        self.path = None if path is None else Path(path)
        self.settings, self.every = settings, every

    def save(self, chains: Any) -> None:
        """Write chains and random streams."""
        if self.path is not None:
            content = {"settings": self.settings, "chains": chains, "random": random_streams()}
            write_file(self.path, content, KIND)

    def load(self, device: torch.device) -> Any:
        """Read chains, and restore the random streams; None without a file.

        :param device: the device of the chains.
        :raises ValueError: if the file is damaged, foreign, or of a run with other settings.
        """
        if self.path is None or not self.path.exists():
            return None
        content = read_file(self.path, device, KIND)
        if content["settings"] != self.settings:
            raise ValueError(
                f"the checkpoint {self.path} is of a run with {content['settings']}, but this one "
                f"has {self.settings}. Cure: another file, or the same settings"
            )
        restore_random_streams(content["random"], device)
        return content["chains"]


@dataclass(kw_only=True)
class Chains:
    """The state of all chains at one moment; a checkpoint stores it whole.

    :param kernel: a name in :data:`~pyro_implicit.mcmc.kernels.KERNELS`.
    :param state: the kernel's state, in white coordinates of ``frame``.
    :param policy: the numbers that decide.
    :param replaced: chains that were put elsewhere.
    :param gradients: gradients of each chain.
    :param stopped: the reason why the chains stopped; None while they walk.
    :param cpu_seconds: seconds of one core, which other programs lengthen less than ``seconds``.
    """

    kernel: str
    state: Any
    frame: WhiteningFrame
    policy: ChainPolicy = DEFAULT
    replaced: int = 0
    gradients: int = 0
    warmup_gradients: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    transitions: int = 0
    stopped: str | None = None
    max_seconds: float | None = None

    def advance(self) -> None:
        """Make one transition of all chains, and learn from it."""
        raise NotImplementedError

    def check(self) -> str | None:
        """Return the reason why the chains stop now, or None."""
        raise NotImplementedError

    @property
    def has_draws(self) -> bool:
        """Whether there are enough draws for a result."""
        raise NotImplementedError

    @property
    def progress(self) -> tuple[int, int]:
        """Work done and work in all."""
        raise NotImplementedError

    def stop_soon(self) -> None:
        """End as soon as there are enough draws for a result."""
        self.max_seconds = min(self.max_seconds or math.inf, self.seconds)

    def values(self) -> dict[str, float]:
        """Return what bars and callbacks show."""
        raise NotImplementedError


def run(chains: Chains, checkpoint: Checkpoint) -> None:
    """Walk until the chains stop.

    After Ctrl-C they stop as ``"interrupted"``, if there are draws. If a callback ends them, they
    stop as ``"callback"``, as soon as there are draws.
    """
    began = time.perf_counter() - chains.seconds
    cpu_began = time.process_time() - chains.cpu_seconds
    done, total = chains.progress
    with new_stage("refine") as line, watch("refine", total, done) as watched:
        try:
            while chains.stopped is None:
                chains.advance()
                chains.seconds = time.perf_counter() - began
                chains.cpu_seconds = time.process_time() - cpu_began
                chains.stopped = chains.check()
                if watched.stopped and chains.stopped in ("max_seconds", "max_gradients"):
                    chains.stopped = "callback"
                if chains.stopped or chains.transitions % checkpoint.every == 0:
                    checkpoint.save(chains)
                done, watched.total = chains.progress
                watched.step(done, chains.values)
                if watched.stopped:
                    chains.stop_soon()
        except KeyboardInterrupt:
            if not chains.has_draws:
                raise
            chains.stopped = "interrupted"
        line.outcome = f"{chains.stopped} after {chains.gradients} gradients"
