# SPDX-License-Identifier: Apache-2.0
"""What the mean over draws predicts, from sums that do not grow with the draws."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_implicit.runtime.printing import short_repr
from pyro_implicit.runtime.wrappers import without_event

__all__ = ["LabelMean", "NumberMean", "Prediction", "fitting_target"]


@dataclass(frozen=True, repr=False)
class Prediction:
    """What the mean of all draws says of a minibatch.

    Of labels it has ``probability``, ``(batch, num_classes)``, the ``entropy`` of that, in nats,
    and ``mutual_information``, the part of the entropy that knowing the weights would take away
    (epistemic); the rest is the labels' own (aleatoric). Of numbers it has ``mean``, ``aleatoric``
    variance (the mean of the noise's) and ``epistemic`` variance (that of the means), each
    ``(batch,)`` or ``(batch, num_targets)``. What does not apply is None.

    :ivar num_samples: How many draws.
    :ivar log_prob: Of given targets under the mean of the draws' distributions, ``(batch,)``.
    :ivar pit: Of given numbers: the mean of the draws' distribution functions there, uniform if
        predictions are right, ``(batch,)`` or ``(batch, num_targets)``.
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
    __repr__ = short_repr


class _Mean:
    """Sums over draws, of which the first are seen before the others."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: dict[str, Tensor] = {}
        self.log_sum: Tensor | None = None

    def add(self, found: dict[str, Tensor]) -> None:
        """More draws.

        :param found: what :meth:`read` gave for each, ``(num_draws, ...)``.
        """
        self.count += len(next(iter(found.values())))
        log_prob = found.pop("log_prob", None)
        if log_prob is not None:
            total = log_prob.logsumexp(0)
            self.log_sum = total if self.log_sum is None else self.log_sum.logaddexp(total)
        for name, value in found.items():
            self.sums[name] = self.sums[name] + value.sum(0) if name in self.sums else value.sum(0)

    def _means(self) -> tuple[dict[str, Tensor], Tensor | None]:
        log_mean = None if self.log_sum is None else self.log_sum - math.log(self.count)
        return {name: value / self.count for name, value in self.sums.items()}, log_mean


class LabelMean(_Mean):
    """Probabilities and entropies of labels."""

    def read(self, fn: dist.TorchDistribution, target: Tensor | None) -> dict[str, Tensor]:
        """What one draw predicts.

        :param fn: its ``Categorical`` or ``Bernoulli``.
        :param target: labels, or None.
        """
        probability = without_event(fn).probs
        if isinstance(without_event(fn), dist.Bernoulli):
            probability = torch.stack([1 - probability, probability], dim=-1)
        found = {"probability": probability, "entropy": _entropy(probability)}
        return found if target is None else found | {"log_prob": fn.log_prob(target)}

    def prediction(self) -> Prediction:
        """That of all draws."""
        means, log_prob = self._means()
        entropy = _entropy(means["probability"])
        information = (entropy - means["entropy"]).clamp(min=0.0)
        return Prediction(self.count, means["probability"], entropy, information, log_prob=log_prob)


class NumberMean(_Mean):
    """Means and variances of numbers. Squares are of differences to the first draw."""

    def __init__(self) -> None:
        super().__init__()
        self.origin: Tensor | None = None

    def read(self, fn: dist.TorchDistribution, target: Tensor | None) -> dict[str, Tensor]:
        """What one draw predicts.

        :param fn: any distribution with a mean and a variance.
        :param target: numbers, or None.
        """
        found = {"mean": fn.mean, "variance": fn.variance}
        if target is not None:
            found["log_prob"] = fn.log_prob(target)
            with suppress(NotImplementedError):
                found["pit"] = without_event(fn).cdf(target)
        return found

    def add(self, found: dict[str, Tensor]) -> None:
        mean = found.pop("mean")
        if self.origin is None:
            self.origin = mean[0]
        shift = mean - self.origin
        super().add(found | {"shift": shift, "square": shift.square()})

    def prediction(self) -> Prediction:
        """That of all draws."""
        means, log_prob = self._means()
        assert self.origin is not None
        return Prediction(
            self.count,
            mean=self.origin + means["shift"],
            aleatoric=means["variance"],
            epistemic=(means["square"] - means["shift"].square()).clamp(min=0.0),
            log_prob=log_prob,
            pit=means.get("pit"),
        )


def fitting_target(y: Tensor, fn: dist.TorchDistribution) -> Tensor:
    """Targets in the shape of a distribution of them, without or with a last dimension of one.

    :raises ValueError: if they are of another shape.
    """
    if y.numel() != fn.shape().numel() or len(y) != fn.shape()[0]:
        raise ValueError(
            f"the targets have shape {tuple(y.shape)}, but what the model draws has shape "
            f"{tuple(fn.shape())}"
        )
    return (
        y.reshape(fn.shape()).to(without_event(fn).probs)
        if isinstance(without_event(fn), dist.Bernoulli)
        else y.reshape(fn.shape())
    )


def _entropy(probability: Tensor) -> Tensor:
    return torch.special.entr(probability).sum(-1)
