# SPDX-License-Identifier: Apache-2.0
"""Held-out rows, which tell a training when it was best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.minibatch_density import MinibatchDensity
from pyro_implicit.density.model import compute_log_prob
from pyro_implicit.fitting.processes import mean_over_processes
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.random_stream import seeded
from pyro_implicit.runtime.sites import is_counted, is_data

__all__ = ["HeldOut"]

PATIENCE = 5  # epochs
NUM_DRAWS, SEED = 8, 0


class HeldOut:
    r"""The negative log-likelihood of held-out rows under a guide,

    .. math:: -\frac1N \sum_i \log \frac1S \sum_s p(y_i | x_i, \theta_s),

    by eight draws, always from the same seed, so that two values differ by the guide alone; without
    the weight that a minibatch or a temperature gives a row, and without masked rows, which N does
    not count. A training asks after each epoch, ends
    when five brought nothing, and keeps the parameters of the best.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoDelta, init_to_mean
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("rows", 100, subsample_size=len(y)):
    ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> guide = AutoDelta(model, init_loc_fn=init_to_mean)
    >>> print(f"{HeldOut(model, torch.zeros(20).split(5))(guide):.4f}")
    0.9189

    :param model: with its ``args`` and ``kwargs``.
    :param rows: minibatches, as for training.
    :param width: so many parts has one of those for training.
    :raises TypeError: for what is no iterable of them.
    :raises ValueError: if there are none, if they can be passed over only once, or if they have
        more or fewer parts; when it is called, if all rows are masked.
    :ivar scores: one for each epoch.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        rows: Iterable[Any],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        width: int | None = None,
    ) -> None:
        self._stream = BatchStream(rows, "validation")
        first = self._stream.probed[0]
        if width is not None and len(first) != width:
            raise ValueError(
                f"a minibatch of validation has {len(first)} parts, but one of batches {width}. "
                "Cure: a DataLoader as for batches, or [(x, y)] for a single minibatch"
            )
        self._density = MinibatchDensity(model, *args, batch=first, model_kwargs=kwargs)
        self.scores: list[float] = []
        self._best: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, guide: Callable[..., Any]) -> float:
        """Goes through all rows; no random stream is touched."""
        with seeded(SEED):
            return self._score(guide)

    def _score(self, guide: Callable[..., Any]) -> float:
        density, total, count = self._density, 0.0, 0
        draws = draw(guide, NUM_DRAWS, *density.args, **density.kwargs)
        for _ in range(self._stream.epoch_length):
            density.use(self._stream.next())
            for log_prob, counted in density.read_at(draws, _log_likelihood).values():
                rows = log_prob.double().logsumexp(0) - math.log(NUM_DRAWS)
                total, count = total - rows.sum().item(), count + int((counted != 0).any(0).sum())
        if not count:
            raise ValueError(
                "validation has no row that counts: every observation is masked. Cure: rows with "
                "observed targets"
            )
        return total / count

    def __str__(self) -> str:
        epoch = self.best_epoch
        score = self.scores[epoch - 1]
        return f"held-out NLL {score:.4g} at epoch {epoch}, the best of {len(self.scores)}"

    @property
    def best_epoch(self) -> int:
        """Counted from 1."""
        return 1 + min(range(len(self.scores)), key=self.scores.__getitem__)

    def judge(self, guide: Callable[..., Any], parameters: Mapping[str, Tensor]) -> bool:
        """Score an epoch.

        :param parameters: of guide and model, by name.
        :returns: whether the last five were no better than one before them.
        """
        device = next(iter(parameters.values())).device
        score = mean_over_processes(self(guide), device)
        self.scores.append(score if math.isfinite(score) else math.inf)
        if self.best_epoch == len(self.scores):
            self._best = {name: value.detach().clone() for name, value in parameters.items()}
        return len(self.scores) - self.best_epoch >= PATIENCE

    @torch.no_grad()
    def take_best(self, parameters: Mapping[str, Tensor]) -> None:
        """Put the best epoch's values into them."""
        for name, value in self._best.items():
            parameters[name].copy_(value)

    def state(self) -> dict[str, Any]:
        """What a resumed training must know, for a checkpoint."""
        return {"scores": self.scores, "best": self._best}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from another's state."""
        self.scores, self._best = state["scores"], state["best"]


def _log_likelihood(trace: Trace) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each observation, by site, and whether it counts."""
    compute_log_prob(trace)
    return {
        name: (site["log_prob"] / site["scale"], is_counted(site).to(site["log_prob"]))
        for name, site in trace.nodes.items()
        if is_data(site)
    }
