# SPDX-License-Identifier: Apache-2.0
"""Limits of recordings, for steps of ELBOs and scores of chains alike."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RECORDINGS", "RecordingPolicy"]


@dataclass(frozen=True)
class RecordingPolicy:
    """When functions are recorded, how many recordings are kept, and when one counts as wrong."""

    #: Recordings of one function that are kept, one for each kind of arguments; the least recently
    #: used one is dropped. Bounds memory.
    max_programs: int = 8

    #: Recordings of one function after which it runs without. A recording takes as long as some
    #: tens of plain calls (``benchmarks/speed``).
    max_recordings: int = 24

    #: Plain steps before ``compile="auto"`` records one: the cost of a recording, 6 steps of a
    #: regression and 50 of a model with a loop (``benchmarks/zoo``). More than 40 steps and the one
    #: that estimates their cost, so that ``fit`` looks twice before (``Schedule.first_look``).
    auto_steps: int = 42

    #: Seconds that inductor saves for each element of a large intermediate result: .4 to .75e-9 in
    #: steps of perceptrons with 478,000 weights (one core; MAP, mean field, LIVI and KIVI).
    saved_per_element: float = 5e-10

    #: Elements of such a result. Smaller ones stay in a core's cache: with 80,000, gradients of a
    #: logistic regression are no faster compiled.
    large_result: int = 2**17

    #: Seconds of a compilation, however short the recording: inductor is imported and calls g++. It
    #: takes 3 with kernels of another run on disk, and 12 to 14 without.
    compilation: float = 10.0

    #: Seconds of a compilation for each operation: .01 to .02 for the perceptrons.
    compilation_per_operation: float = 0.02

    #: Bytes of freed memory that the process keeps for the next replay.
    kept_memory: int = 2**28

    #: Bytes of a tensor above which its memory is returned at once: the most that glibc allows.
    largest_kept: int = 2**25

    #: Relative error of a recorded value in float32. Recordings are bit-identical; kernels of
    #: inductor sum in another order.
    rounding: float = 1e-3

    #: The same in float64.
    rounding_double: float = 1e-8

    #: Share of the norm of all gradients that each gradient's own norm is raised by, so that a
    #: gradient of zero may differ by rounding.
    small_gradient: float = 0.01

    #: Elements of a constant up to which it is compared with others, as equal ones become one.
    largest_compared: int = 1024

    #: Equal operations that are fused; fewer cost more to stack than they save.
    fused_nodes: int = 3

    #: Terms of a chain of additions that becomes one sum.
    fused_terms: int = 8

    #: Operations of a graph below which no fusion is tried: planning takes as long as some calls.
    least_operations: int = 300

    #: Steps of a fused graph as a share of its operations, above which it is not used.
    fused_share: float = 0.5


RECORDINGS = RecordingPolicy()
