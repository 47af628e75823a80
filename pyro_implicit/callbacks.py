# SPDX-License-Identifier: Apache-2.0
"""Callbacks for ``fit``, ``train`` and ``refine``: TensorBoard and a live plot in notebooks."""

from __future__ import annotations

import io
import math
import time
from pathlib import Path
from typing import Any

from pyro_implicit.runtime.messages import refuse_nonpositive
from pyro_implicit.runtime.progress import Callback, Stage, Step

__all__ = ["Callback", "LivePlot", "Step", "TensorBoard"]


class TensorBoard(Callback):
    """Write the values of all steps, and the outcome of each stage, for TensorBoard.

    **Example:**

    >>> from pyro_implicit import fit
    >>> fit(model, "auto", y, callbacks=[TensorBoard("runs/first")])  # doctest: +SKIP

    :param writer: a folder, or a ``SummaryWriter`` of ``torch.utils.tensorboard``.
    :raises ImportError: for a folder, without the package ``tensorboard``.
    """

    def __init__(self, writer: Any) -> None:
        if isinstance(writer, (str, Path)):
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(writer))
        self.writer = writer

    def on_step(self, step: Step) -> None:
        """Write the values under ``stage/name``."""
        for name, value in step.values.items():
            self.writer.add_scalar(f"{step.stage}/{name}", value, step.number)

    def on_stage(self, stage: Stage) -> None:
        """Write the outcome as text."""
        self.writer.add_text("stages", f"{stage.name}: {stage.seconds:.1f} s, {stage.outcome}")
        self.writer.flush()


class LivePlot(Callback):
    """Plot the values of the current loop in a notebook while it runs.

    Outside of notebooks nothing is displayed; ``figure`` is the latest plot.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> from pyro_implicit import fit
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> plot = LivePlot()
    >>> _ = fit(model, seed=0, refine=True, callbacks=[plot])
    >>> [axes.get_ylabel() for axes in plot.figure.axes]
    ['log_density', 'step_size', 'sampling']

    :param interval: the seconds between two plots.
    :raises ValueError: for an interval that is not positive.
    """

    def __init__(self, interval: float = 2.0) -> None:
        refuse_nonpositive(interval=interval)
        self.interval = interval
        self.figure: Any = None
        self._shown, self._stage = -math.inf, ""
        self._handle: Any = None
        self._numbers: list[int] = []
        self._values: dict[str, list[float]] = {}

    def on_step(self, step: Step) -> None:
        """Store the values; plot them if the last plot is old."""
        if step.stage != self._stage:
            self._stage, self._numbers, self._values = step.stage, [], {}
        if step.values:
            self._numbers.append(step.number)
        for name, value in step.values.items():
            self._values.setdefault(name, []).append(value)
        if step.values and time.perf_counter() - self._shown > self.interval:
            self._plot()
            self._shown = time.perf_counter()

    def on_stage(self, stage: Stage) -> None:
        """Plot all values of the stage."""
        if self._values:
            self._plot()

    def _plot(self) -> None:
        from matplotlib.figure import Figure  # not pyplot, which would keep every figure

        number = len(self._values)
        self.figure = Figure(figsize=(4.0 * number, 3.0), layout="constrained")
        panels = self.figure.subplots(1, number, squeeze=False)[0]
        for axes, (name, values) in zip(panels, self._values.items(), strict=True):
            axes.plot(self._numbers, values, lw=0.8)
            axes.set(xlabel=self._stage, ylabel=name)
        try:
            from IPython.display import Image, display
        except ImportError:
            return
        content = io.BytesIO()
        self.figure.savefig(content)
        image = Image(content.getvalue(), format="png")
        if self._handle is None:
            self._handle = display(image, display_id=True)  # None outside of notebooks
        else:
            self._handle.update(image)
