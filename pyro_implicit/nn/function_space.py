# SPDX-License-Identifier: Apache-2.0
"""What a network computes, in place of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.nn.prediction import target_runner
from pyro_implicit.runtime.sites import without_mask

__all__ = ["FunctionValues"]

AT_ONCE = 100  # draws


class FunctionValues:
    """A network's predictions at given inputs, as a function of draws of its weights.

    Weights have no meaning of their own: hidden units may change places, and many weights make one
    function. Predictions are what a guide and chains must agree on. This goes in as ``quantities``
    of :func:`~pyro_implicit.compare`, :func:`~pyro_implicit.diagnose` and
    :func:`~pyro_implicit.refine`.

    **Example:**

    >>> from torch import nn
    >>> from pyro_implicit.nn import regressor, to_bayesian_
    >>> model = regressor(to_bayesian_(nn.Linear(2, 1)), num_data=150, noise=0.1)
    >>> values = FunctionValues(model, torch.randn(5, 2))
    >>> values({"weight": torch.randn(7, 1, 2), "bias": torch.randn(7, 1)})["mean"].shape
    torch.Size([7, 5])

    :param model: of :func:`~pyro_implicit.nn.classifier` or :func:`~pyro_implicit.nn.regressor`, or
        one of your own ``(x, y=None)``, as :func:`~pyro_implicit.nn.predict` takes it.
    :param x: inputs, ``(num_inputs, ...)``.
    :param max_inputs: of more inputs so many, evenly spaced.
    """

    def __init__(self, model: Callable[..., Any], x: Tensor, max_inputs: int = 50) -> None:
        self.model, self.num_given = model, len(x)
        self.x = x[:: -(-len(x) // max_inputs)]
        self._runs = BatchedRuns("FunctionValues")

    @torch.no_grad()
    def __call__(self, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The predictions.

        :param draws: by site, ``(num_draws, *site_shape)``.
        :returns: of labels ``"probability"``, ``(num_draws, num_inputs, num_classes)``, of all
            classes but the first; of numbers their ``"mean"``,
            ``(num_draws, num_inputs)`` or with the targets' dimension.
        """
        example = {name: value[0] for name, value in draws.items()}
        runner, site, _ = target_runner(self.model, example, self.x)
        known = {name: value for name, value in draws.items() if name in runner.replayed}
        count = len(next(iter(draws.values())))
        parts = [
            self._runs.map(
                runner,
                {name: value[start : start + AT_ONCE] for name, value in known.items()},
                lambda trace: _value(trace, site),
            )
            for start in range(0, count, AT_ONCE)
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def __str__(self) -> str:
        number = f"{len(self.x)}" + (
            f" of {self.num_given}" if len(self.x) < self.num_given else ""
        )
        return f"predictions at {number} inputs"


def _value(trace: Trace, site: str) -> dict[str, Tensor]:
    fn = trace.nodes[site]["fn"]
    if isinstance(without_mask(fn), dist.Categorical):
        return {"probability": without_mask(fn).probs[..., 1:]}
    return {"probability" if isinstance(without_mask(fn), dist.Bernoulli) else "mean": fn.mean}
