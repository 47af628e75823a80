# SPDX-License-Identifier: Apache-2.0
"""A certified lower bound on the log evidence from a fitted guide, and its importance weights."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.guides.posterior_draws import guide_of
from pyro_implicit.infer.engine.hierarchical import HierarchicalELBO, Proposal
from pyro_implicit.ops.pareto import RELIABLE_KHAT, describe_weights, pareto_smoothed
from pyro_implicit.runtime.locks import in_turn
from pyro_implicit.runtime.printing import (
    announce,
    progress_is_shown,
    short_repr,
    showing_progress,
    steps_of,
)
from pyro_implicit.runtime.random_stream import same_streams
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = ["EvidenceBound", "FoldWarning", "WeightedDraws", "evidence_bound", "weighted_draws"]


FEW = 2  # draws that are timed for an estimate; the fewest of a standard error
NUM_CHUNKS = 5  # chunks within max_seconds, so that the last one overruns it by little


class FoldWarning(UserWarning):
    """A generator makes the same values of different noise."""


class EvidenceBound(NamedTuple):
    """A Monte Carlo estimate of a lower bound on the log evidence, in nats.

    ``value`` is the estimate, ``standard_error`` that of its mean; ``khat`` the Pareto tail index
    of the guide as an importance proposal, ``effective_sample_size`` the number of independent
    posterior draws that its weighted draws are worth, and ``num_samples`` the number of draws, if
    it is known. ``print`` says whether the importance weights are reliable.
    """

    value: float
    standard_error: float
    khat: float
    effective_sample_size: float
    num_samples: int | None = None

    def __repr__(self) -> str:
        return short_repr(self)

    def __str__(self) -> str:
        return "\n".join(filter(None, (repr(self), self.advice)))

    @property
    def advice(self) -> str:
        """What is wrong with the importance weights, and the cure; empty if they are reliable."""
        share = self.effective_sample_size / self.num_samples if self.num_samples else math.nan
        found = describe_weights(self.khat, share)
        if self.khat <= RELIABLE_KHAT or found.startswith("even weights"):
            return ""
        if math.isinf(self.khat):
            return (
                f"Whether the importance weights are reliable is unknown ({found}). The bound "
                "holds. Cure: num_samples=1000"
            )
        return (
            f"The importance weights are unreliable ({found}; reliable: k-hat up to "
            f"{RELIABLE_KHAT}): a few draws have nearly all the weight. The bound holds, but do "
            "not reweight or resample draws by these weights. Cure: train the guide for longer or "
            "give it a wider generator, raise num_mixing, or move its draws by refine(model, "
            "guide, ...). The log-weights of all rows add up: with a latent for each row, give "
            "few rows at a time"
        )


class WeightedDraws(NamedTuple):
    """Draws of a guide as an importance proposal.

    ``log_weights``, ``(num_samples,)``, are those of :func:`evidence_bound`; ``draws``, each
    ``(num_samples, *site_shape)``, are the values of all of the guide's sites, auxiliary ones too.
    """

    log_weights: Tensor
    draws: dict[str, Tensor]

    def __repr__(self) -> str:
        return short_repr(self)

    def bound(self) -> EvidenceBound:
        """What :func:`evidence_bound` returns."""
        log_weights = self.log_weights.double()
        weights = (log_weights - log_weights.max()).exp()
        return EvidenceBound(
            value=log_weights.mean().item(),
            standard_error=log_weights.std().item() / math.sqrt(len(log_weights)),
            khat=pareto_smoothed(log_weights).khat if weights.isfinite().all() else math.inf,
            effective_sample_size=(weights.sum().square() / weights.square().sum()).item(),
            num_samples=len(log_weights),
        )


@in_turn
def evidence_bound(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 1000,
    num_mixing: int = 100,
    proposal: Proposal = "linearized",
    num_steps: int = 50,
    num_starts: int = 4,
    chunk_size: int = 100,
    max_seconds: float | None = None,
    progress: bool = True,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> EvidenceBound:
    r"""A lower bound on :math:`\log p(x)` that holds for any guide whose sites have a density, an
    injective generator or a semi-implicit distribution.

    The density of each draw :math:`\theta`, made by the noise :math:`z_0`, is estimated by

    .. math::
        \log \hat q(\theta) = \log \frac{1}{S+1} \sum_{s=0}^S
        \frac{q(\theta \mid z_s)\, p(z_s)}{\tau(z_s \mid \theta)}, \qquad
        z_1, \dots, z_S \sim \tau(z \mid \theta).

    For any proposal :math:`\tau` that knows :math:`\theta` alone and not :math:`z_0`, its mean lies
    above :math:`E \log q(\theta)`. So the mean of :math:`\log p(x, \theta) - \log \hat q(\theta)`
    lies below the guide's ELBO and below the log evidence, whatever guide and proposal are like;
    only ``standard_error`` blurs it. Sites with a density enter with that density, those of an
    injective generator with its exact one.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro_implicit import AutoSemiImplicit
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> y = torch.tensor(0.5)
    >>> bound = evidence_bound(model, AutoSemiImplicit(model), y, num_samples=50)
    >>> bound.value < dist.Normal(0.0, 2.0 ** 0.5).log_prob(y) + 3 * bound.standard_error
    tensor(True)

    :param model: with all its data: nothing subsampled.
    :param guide: of explicit sites, :class:`~pyro_implicit.SemiImplicit` ones, and
        :class:`~pyro_implicit.Implicit` ones whose generator is injective with as many values as
        noise, as :class:`~pyro_implicit.AutoregressiveGenerator`. What :func:`~pyro_implicit.fit`
        returned stands for its ``guide``.
    :param args: of model and guide, as ``kwargs``.
    :param num_samples: draws of the guide.
    :param num_mixing: S, for each draw and site; the bound rises with it.
    :param proposal: ``"linearized"``: the Gaussian posterior of the noise when the generator is
        linearised at a point that Gauss-Newton steps find, and a tenth of the draws from the prior
        for what that misses. Wants standard normal noise. ``"prior"``: the noise's own
        distribution, which is the bound of :class:`SIVI_ELBO`.
    :param num_steps: Gauss-Newton steps from each start. Where they stop short, a few draws far
        below the others make ``standard_error`` large.
    :param num_starts: places where they begin, for each draw: 0 and draws of the prior. A generator
        that folds makes a value in several places, and the bound is loose where one is missed.
    :param chunk_size: draws of the guide at a time, to bound the memory. The noises of a site with
        many rows come in smaller chunks by themselves.
    :param max_seconds: of wall time, about: then the bound is of the draws made until then.
    :param progress: whether to show a bar, and the estimated time if it is long, in a terminal or
        notebook. The time grows in proportion to ``num_samples``, the rows of amortised sites,
        ``num_starts * num_steps`` and ``num_mixing``.
    :param model_kwargs: keyword arguments of model and guide whose names this function has, too.
    :returns: value, standard error, k-hat, effective sample size and number of draws. K-hat and the
        effective sample size are of the weights :math:`p(x, \theta) / \hat q(\theta)`, which are
        unbiased: a guide with k-hat below 0.7 can be corrected by importance weighting. They hold
        for the guide itself only approximately, as :math:`\hat q` is noisy where the bound is
        loose. k-hat is infinite for fewer than 5 draws in the tail (about 25 samples), and has no
        meaning if the effective sample size is nearly ``num_samples``.
    :warns UserWarning: if ``max_seconds`` ended it early, with the time that all draws need.
    :raises TypeError: for what is no guide.
    :raises ValueError: for arguments out of range, a guide with an implicit site that has neither a
        conditional nor an exact density, an injective generator that folds (its Jacobian has
        determinants of both signs among the draws), a subsampled plate, a site that is a point
        (Delta), noise that is not standard normal (by ``"linearized"``), or a generator whose rows
        depend on each other.

    **References:**

    1. Sobolev and Vetrov (2019), *Importance Weighted Hierarchical Variational Inference*, eq 5.
    2. Yao et al. (2018), *Yes, but Did It Work?: Evaluating Variational Inference* (k-hat).
    """
    options: dict[str, Any] = {
        "num_mixing": num_mixing,
        "proposal": proposal,
        "num_steps": num_steps,
        "num_starts": num_starts,
        "chunk_size": chunk_size,
        "model_kwargs": model_kwargs,
        **kwargs,
    }
    with showing_progress(progress):
        if progress_is_shown():
            with same_streams(), showing_progress(False), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # all draws are going to show them
                began = time.perf_counter()
                weighted_draws(model, guide, *args, num_samples=FEW, **options)
            seconds = (time.perf_counter() - began) * num_samples / FEW
            announce(f"evidence_bound of {num_samples} draws", seconds)
        options |= {"num_samples": num_samples, "max_seconds": max_seconds}
        return weighted_draws(model, guide, *args, **options).bound()


@in_turn
@torch.no_grad()
def weighted_draws(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 1000,
    num_mixing: int = 100,
    proposal: Proposal = "linearized",
    num_steps: int = 50,
    num_starts: int = 4,
    chunk_size: int = 100,
    max_seconds: float | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> WeightedDraws:
    """Return the draws and log-weights behind :func:`evidence_bound`, of the same parameters.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> weighted_draws(model, AutoNormal(model), num_samples=20).log_weights.shape
    torch.Size([20])
    """
    for name, number, least in (
        ("num_samples", num_samples, 2),
        ("chunk_size", chunk_size, 1),
    ):
        if number < least:
            raise ValueError(f"{name} must be at least {least}, but got {number}")
    if max_seconds is not None and not max_seconds > 0:
        raise ValueError(f"max_seconds must be positive, but got {max_seconds}")
    kwargs = {**kwargs, **(model_kwargs or {})}
    chunk_size = min(chunk_size, num_samples)
    settings = num_mixing, proposal, num_steps, num_starts
    elbo = HierarchicalELBO(chunk_size, *settings)
    guide = guide_of("evidence_bound", guide)
    begin = time.perf_counter()
    if max_seconds is not None:
        with same_streams():  # the draws are the same as without a limit
            HierarchicalELBO(FEW, *settings).weighted_draws(model, guide, args, kwargs)
        most = max_seconds / NUM_CHUNKS * FEW / (time.perf_counter() - begin)
        chunk_size = min(chunk_size, max(FEW, int(most)))
        elbo = HierarchicalELBO(chunk_size, *settings)
    chunks = []
    number = -(-num_samples // chunk_size)
    for index in steps_of(range(number), number, "weights"):
        spent = time.perf_counter() - begin
        if index > 0 and max_seconds is not None and spent * (index + 1) / index > max_seconds:
            warn_user(
                f"evidence_bound made {index * chunk_size} of {num_samples} draws in "
                f"max_seconds={max_seconds:g}; all draws need about {spent * number / index:.3g} "
                "s. Cure: more seconds, fewer rows, or smaller num_starts, num_steps or num_mixing"
            )
            break
        chunks.append(elbo.weighted_draws(model, guide, args, kwargs))
    for name, shares in elbo.folds.items():
        share = torch.cat(shares).mean().item()
        if share > 0.05:
            warn_user(
                f"the generator of site '{name}' folds: {share:.0%} of its draws could have been "
                "made in two places. The bound holds, but LIVI_ELBO, which counts both, reported "
                "too low a loss. Cure: train again from another seed, with a smaller learning rate",
                FoldWarning,
            )
    log_weights, parts = zip(*chunks, strict=True)
    draws = {name: torch.cat([part[name] for part in parts])[:num_samples] for name in parts[0]}
    _refuse_points(draws, elbo.deltas)
    return WeightedDraws(torch.cat(log_weights)[:num_samples], draws)


def _refuse_points(draws: dict[str, Tensor], deltas: set[str]) -> None:
    """Check that the value of every Delta site moves, with a draw that has a density."""
    for name in sorted(deltas & set(draws)):
        if deltas >= set(draws) or (draws[name] == draws[name][:1]).all():
            raise ValueError(
                f"site '{name}' of the guide is a point (Delta), which has no density, so there is "
                "no bound. Cure: AutoNormal or another guide with a density in place of AutoDelta"
            )
