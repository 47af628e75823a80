# SPDX-License-Identifier: Apache-2.0
"""Predictions by the mean over posterior draws, from running sums."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_implicit.nn.policy import TARGETS_PER_DRAW
from pyro_implicit.runtime.messages import first_line, short_repr
from pyro_implicit.runtime.sites import without_mask

__all__ = ["LabelMean", "NumberMean", "Prediction", "fitting_target"]

PARAMETER = "parameter "  # prefix of a distribution's parameters among the values of a run


@dataclass(frozen=True, repr=False)
class Prediction:
    """The posterior predictive distribution of a minibatch, averaged over posterior draws.

    Predictions of labels have ``probability``, ``entropy``, ``mutual_information`` and
    ``epistemic``; predictions of numbers have ``mean``, ``aleatoric``, ``epistemic``, ``variance``
    and ``interval``. Fields that do not apply are None.

    :ivar num_samples: Number of posterior draws.
    :ivar probability: Of each class, ``(batch, num_classes)``.
    :ivar entropy: Of ``probability``, in nats, ``(batch,)``.
    :ivar mutual_information: Epistemic part of the entropy, in nats, ``(batch,)``: the expected
        decrease if the weights were known. The rest is aleatoric.
    :ivar mean: Mean of the targets, ``(batch,)`` or ``(batch, num_targets)``.
    :ivar aleatoric: Mean over draws of the noise variance, of the shape of ``mean``.
    :ivar epistemic: Variance over draws of the predicted mean, of the shape of ``mean``; of labels,
        the sum of the variances of all probabilities, ``(batch,)``.
    :ivar log_prob: Log-density of given targets, ``(batch,)``.
    :ivar pit: Predictive distribution function at given numbers, of the shape of ``mean``; uniform
        if predictions are calibrated.
    :ivar interval: Lower and upper end of the central interval, ``(2, *mean.shape)``; by quantiles
        of drawn targets for a distribution without ``cdf``, such as ``StudentT`` and ``Poisson``.
    :ivar draws: One target for each posterior draw, ``(num_samples, batch)`` or ``(num_samples,
        batch, num_targets)``.
    """

    num_samples: int
    probability: Tensor | None = None
    entropy: Tensor | None = None
    mutual_information: Tensor | None = None
    mean: Tensor | None = None
    aleatoric: Tensor | None = None
    epistemic: Tensor | None = None
    log_prob: Tensor | None = None
    pit: Tensor | None = None
    interval: Tensor | None = None
    draws: Tensor | None = None
    __repr__ = short_repr

    @property
    def variance(self) -> Tensor | None:
        """Variance of the targets, ``aleatoric + epistemic``."""
        if self.aleatoric is None or self.epistemic is None:
            return None
        return self.aleatoric + self.epistemic


class _Mean:
    """Means over draws, and the variance of one of them by differences to the first draw."""

    averaged: str
    origin: Tensor | None = None

    def __init__(self, interval: float | None = None, draws: bool = False) -> None:
        self.interval, self.draws = interval, draws
        self.kind: type | None = None
        self.parameters: dict[str, list[Tensor]] = {}
        self.count = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, found: dict[str, Tensor]) -> None:
        """Add draws: values of each, ``(num_draws, ...)``."""
        average = found[self.averaged]
        self.count += len(average)
        if self.origin is None:
            self.origin = average[0]
        shift = average - self.origin
        found = found | {"shift": shift, "square": shift.square()}
        for name, value in found.items():
            if name.startswith(PARAMETER):
                self.parameters.setdefault(name.removeprefix(PARAMETER), []).append(value)
                continue
            is_log = name == "log_prob"
            total = value.logsumexp(0) if is_log else value.sum(0)
            add = torch.logaddexp if is_log else torch.add
            self.sums[name] = add(self.sums[name], total) if name in self.sums else total

    def _kept(self, fn: dist.TorchDistribution) -> dict[str, Tensor]:
        if not self.draws and self.interval is None:
            return {}
        base = without_mask(fn)
        repeated = {"covariance_matrix", "precision_matrix"}
        if "logits" in base.arg_constraints:
            repeated.add("probs")
        self.kind = type(base)
        names = [name for name in base.arg_constraints if name not in repeated]
        return {f"{PARAMETER}{name}": getattr(base, name) for name in names}

    def _distribution(self) -> Any:
        if self.kind is None:
            return None
        try:
            return self.kind(**{name: torch.cat(part) for name, part in self.parameters.items()})
        except (TypeError, ValueError) as error:
            if not self.draws:
                return None
            raise ValueError(
                f"predict cannot draw targets of {self.kind.__name__} ({first_line(error)}). Cure: "
                "pyro.infer.Predictive, or draws=False"
            ) from error

    def _means(self) -> dict[str, Tensor]:
        return {
            name: value - math.log(self.count) if name == "log_prob" else value / self.count
            for name, value in self.sums.items()
        }

    def _variance(self, means: dict[str, Tensor]) -> Tensor:
        return (means["square"] - means["shift"].square()).clamp(min=0.0)


class LabelMean(_Mean):
    """Probabilities and entropies of labels."""

    averaged = "probability"

    def read(self, fn: dist.TorchDistribution, target: Tensor | None) -> dict[str, Tensor]:
        """Read the prediction of one draw from its ``Categorical`` or ``Bernoulli``."""
        probability = without_mask(fn).probs
        if isinstance(without_mask(fn), dist.Bernoulli):
            probability = torch.stack([1 - probability, probability], dim=-1)
        found = {"probability": probability, "entropy": _entropy(probability)} | self._kept(fn)
        return found if target is None else found | {"log_prob": fn.log_prob(target)}

    def prediction(self) -> Prediction:
        """Return the prediction of all draws."""
        means = self._means()
        entropy = _entropy(means["probability"])
        information = (entropy - means["entropy"]).clamp(min=0.0)
        return Prediction(
            self.count,
            means["probability"],
            entropy,
            information,
            epistemic=self._variance(means).sum(-1),
            log_prob=means.get("log_prob"),
            draws=self._distribution().sample() if self.draws else None,
        )


class NumberMean(_Mean):
    """Means and variances of numbers."""

    averaged = "mean"

    def read(self, fn: dist.TorchDistribution, target: Tensor | None) -> dict[str, Tensor]:
        """Read the prediction of one draw from a distribution with mean and variance."""
        found = {"mean": fn.mean, "variance": fn.variance} | self._kept(fn)
        if target is not None:
            found["log_prob"] = fn.log_prob(target)
            with suppress(NotImplementedError):
                found["pit"] = without_mask(fn).cdf(target)
        return found

    def prediction(self) -> Prediction:
        """Return the prediction of all draws."""
        means = self._means()
        assert self.origin is not None
        fn = self._distribution()
        found = Prediction(
            self.count,
            mean=self.origin + means["shift"],
            aleatoric=means["variance"],
            epistemic=self._variance(means),
            log_prob=means.get("log_prob"),
            pit=means.get("pit"),
            draws=fn.sample() if self.draws else None,
        )
        if fn is None or self.interval is None:
            return found
        return replace(found, interval=_central_interval(fn, found, self.interval))


def fitting_target(y: Tensor, fn: dist.TorchDistribution) -> Tensor:
    """Reshape targets to their distribution's shape, which may differ by dimensions of size one."""
    if y.numel() != fn.shape().numel() or len(y) != fn.shape()[0]:
        raise ValueError(
            f"the targets have shape {tuple(y.shape)}, but the model draws targets of shape "
            f"{tuple(fn.shape())}"
        )
    y, base = y.reshape(fn.shape()), without_mask(fn)
    return y.to(base.probs) if isinstance(base, dist.Bernoulli) else y


def _central_interval(fn: Any, found: Prediction, probability: float) -> Tensor:
    """Find the quantiles of the mixture over draws, ``(2, ...)``, by bisection of its ``cdf``."""
    # Cantelli's inequality brackets them: a quantile of level a is at most sqrt((1 - a) / a)
    # standard deviations below the mean, and sqrt(a / (1 - a)) above it.
    assert found.mean is not None and found.variance is not None
    mean, sd = found.mean, found.variance.sqrt()
    tail = (1 - probability) / 2
    far, near = math.sqrt((1 - tail) / tail), math.sqrt(tail / (1 - tail))
    low = torch.stack([mean - far * sd, mean - near * sd])
    high = torch.stack([mean + near * sd, mean + far * sd])
    level = mean.new_tensor([tail, 1 - tail]).reshape(2, *[1] * mean.dim())
    with pyro.validation_enabled(False), suppress(NotImplementedError):
        for _ in range(torch.finfo(mean.dtype).bits):
            middle = (low + high) / 2
            reached = fn.cdf(middle.unsqueeze(1)).nan_to_num(0.0).mean(1)  # nan: below the support
            low = torch.where(reached < level, middle, low)
            high = torch.where(reached < level, high, middle)
        return (low + high) / 2
    targets = fn.sample((TARGETS_PER_DRAW,)).flatten(0, 1).sort(dim=0).values
    last = len(targets) - 1
    return targets[[round(tail * last), round((1 - tail) * last)]]


def _entropy(probability: Tensor) -> Tensor:
    return torch.special.entr(probability).sum(-1)
