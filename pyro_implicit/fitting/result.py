# SPDX-License-Identifier: Apache-2.0
"""What ``fit`` returns, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.mcmc import Refined

__all__ = ["Fit", "Stage"]


@dataclass
class Stage:
    """One stage of :func:`fit`: its ``name``, the ``seconds`` it took, and in words its
    ``outcome``: what it found, or why it failed; then ``error`` is the error.
    """

    name: str
    seconds: float = 0.0
    outcome: str = ""
    error: Exception | None = None


def reason(error: Exception) -> str:
    """An error's kind and first line."""
    return f"{type(error).__name__}: {error}".strip().split("\n")[0]


@dataclass
class Fit:
    """What :func:`fit` returns; ``print`` it for a table of its stages.

    ``guide`` is the fitted guide, ``losses`` are those of its training, one for each step (of a
    mixture's components one after the other). ``bounds`` are what decided between the candidates,
    in nats: the mean of log p - log q without its lowest hundredth; ``chosen`` is the name of the
    one that ``guide`` is. ``num_modes`` is the number of separate modes that the search found, None
    where there was none. ``stages`` tells what was done, a failed candidate with its reason.
    ``refined`` are the chains that moved the guide's draws on, None where none did. If
    ``interrupted``, by Ctrl-C, this is the best there was by then.
    """

    guide: Any = None
    losses: list[float] = field(default_factory=list)
    bounds: dict[str, float] = field(default_factory=dict)
    num_modes: int | None = None
    chosen: str = "guide"
    stages: list[Stage] = field(default_factory=list)
    refined: Refined | None = None
    interrupted: bool = False

    def sample(self, num_samples: int, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draws of the posterior: refined ones where there are, with replacement, else the guide's.

        :param num_samples: so many.
        :param args: of the model, as ``kwargs``, for a guide written by hand that reads them.
        :returns: by site, ``(num_samples, *site_shape)``.
        """
        if self.refined is not None:
            return self.refined.get_samples(num_samples)
        return draw(self.guide, num_samples, *args, **kwargs)

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Time a stage and leave its line in the result.

        **Example:**

        >>> result = Fit()
        >>> with result.stage("search") as line:
        ...     line.outcome = "1 mode"
        >>> result.stages[0].name, result.stages[0].outcome
        ('search', '1 mode')

        :param name: of the stage.
        """
        line = Stage(name)
        self.stages.append(line)
        start = time.perf_counter()
        try:
            yield line
        finally:
            line.seconds = time.perf_counter() - start

    @contextmanager
    def attempt(self, name: str) -> Iterator[Stage]:
        """A stage that may fail: what was found before is kept, and the line has the reason.

        :param name: of the stage.
        """
        with self.stage(name) as line:
            try:
                yield line
            except Exception as error:  # the model's own too, of any kind
                line.error = error
                line.outcome = f"failed: {reason(error)}"

    def __str__(self) -> str:
        lines = [f"{'stage':<20} {'seconds':>8}  outcome"]
        lines += [f"{s.name:<20} {s.seconds:8.1f}  {s.outcome}" for s in self.stages]
        return "\n".join(lines)
