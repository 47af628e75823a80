# SPDX-License-Identifier: Apache-2.0
"""Scores of held-out rows, by which a training ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.model import compute_log_prob
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.policy import DEFAULT, HeldOutPolicy
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.processes import mean_over_processes
from pyro_implicit.runtime.sites import is_counted, is_data

__all__ = ["HeldOut"]


class HeldOut:
    r"""The negative log-likelihood of held-out rows under a guide.

    .. math:: -\frac1N \sum_i \log \frac1S \sum_s p(y_i | x_i, \theta_s)

    The S draws (eight) always come from the same seed, so that two scores differ only by the guide.
    The weights of minibatches and temperatures are ignored, and masked rows do not count.

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

    :param model: a Pyro model with its ``args`` and ``kwargs``.
    :param rows: minibatches, as for training.
    :param width: the number of parts of a training minibatch.
    :param policy: the number of draws and the patience.
    :param interval: the steps between two scores; None for an epoch.
    :raises TypeError: if ``rows`` is not iterable.
    :raises ValueError: for discrete latent variables that are summed out; for no rows, rows that
        can be iterated over only once, or minibatches with another number of parts; when called,
        if all rows are masked.
    :ivar scores: the score of each epoch or interval.
    :ivar num_steps: the steps before the last score.
    :ivar best: the parameters of the best epoch, a dict.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        rows: Iterable[Any],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        width: int | None = None,
        policy: HeldOutPolicy | None = None,
        interval: int | None = None,
    ) -> None:
        self.interval = interval
        self._stream = BatchStream(rows, "validation")
        first = self._stream.probed[0]
        if width is not None and len(first) != width:
            raise ValueError(
                f"a minibatch of validation has {len(first)} parts, but one of batches has {width}."
                " Cure: a DataLoader as for batches, or [(x, y)] for a single minibatch"
            )
        self._target = Target.of_minibatches(model, *args, batch=first, model_kwargs=kwargs)
        if names := self._target.summed_out:
            raise ValueError(
                f"validation needs the log-likelihood of single rows, but the discrete latents "
                f"{sorted(names)} are summed out of all rows together. Cure: no validation, or a "
                "distribution that sums them by itself, such as MixtureSameFamily"
            )
        self._policy = policy or DEFAULT.held_out
        self.scores: list[float] = []
        self.num_steps = 0
        self.best: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, guide: Callable[..., Any]) -> float:
        """Score a guide on all rows of all processes; random streams do not advance."""
        with seeded(0):
            return mean_over_processes(*self._score(guide))

    def _score(self, guide: Callable[..., Any]) -> tuple[float, torch.device, int]:
        """Return the mean over the rows of this process, its device, and the number of rows."""
        target, total, count = self._target, 0.0, 0
        number = self._policy.num_samples
        draws = draw(guide, number, *target.args, **target.kwargs)
        for _ in range(self._stream.epoch_length):
            target = target.on(self._stream.next())
            for log_prob, counted in target.read_at(draws, _log_likelihood).values():
                rows = log_prob.double().logsumexp(0) - math.log(number)
                total, count = total - rows.sum().item(), count + int((counted != 0).any(0).sum())
        if not count:
            raise ValueError(
                "validation has no row that counts: every observation is masked. Cure: rows with "
                "observed targets"
            )
        return total / count, target.init_loc.device, count

    def __str__(self) -> str:
        epoch = self.best_epoch
        score = self.scores[epoch - 1]
        if self.interval is not None:
            step = min(self.interval * epoch, self.num_steps)  # a limit of time ends an interval
            place = f"the best held-out score after {step} steps"
            return place + ", still rising" * self.is_rising
        return f"held-out NLL {score:.4g} at epoch {epoch}, the best of {len(self.scores)}"

    @property
    def best_epoch(self) -> int:
        """The epoch or interval with the best score, counted from 1."""
        return 1 + min(range(len(self.scores)), key=self.scores.__getitem__)

    @property
    def is_rising(self) -> bool:
        """Whether the last epoch or interval has the best score."""
        return bool(self.scores) and self.best_epoch == len(self.scores)

    def judge(self, guide: Callable[..., Any], parameters: Mapping[str, Tensor]) -> bool:
        """Score an epoch.

        :param parameters: the parameters of guide and model, by name.
        :returns: whether training should end.
        """
        score = self(guide)
        self.scores.append(score if math.isfinite(score) else math.inf)
        if self.is_rising:
            self.best = {name: value.detach().clone() for name, value in parameters.items()}
        return len(self.scores) - self.best_epoch >= self._policy.patience

    @torch.no_grad()
    def take_best(self, parameters: Mapping[str, Tensor]) -> None:
        """Set parameters to the values of the best epoch."""
        for name, value in self.best.items():
            parameters[name].copy_(value)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        names = ("scores", "num_steps", "best")
        return {name: getattr(self, name) for name in names}

    def restore(self, state: dict[str, Any]) -> None:
        """Load a state."""
        for name, value in state.items():
            setattr(self, name, value)


def _log_likelihood(trace: Trace) -> dict[str, tuple[Tensor, Tensor]]:
    compute_log_prob(trace)
    return {
        name: (site["log_prob"] / site["scale"], is_counted(site).to(site["log_prob"]))
        for name, site in trace.nodes.items()
        if is_data(site)
    }
