# SPDX-License-Identifier: Apache-2.0
"""A certified lower bound on the log evidence from a fitted guide, and its importance weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_implicit.guides.posterior_draws import guide_of
from pyro_implicit.infer.engine.hierarchical import HierarchicalELBO, Proposal
from pyro_implicit.ops.pareto import pareto_smoothed
from pyro_implicit.runtime.locks import in_turn
from pyro_implicit.runtime.printing import short_repr, steps_of
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = ["EvidenceBound", "FoldWarning", "WeightedDraws", "evidence_bound", "weighted_draws"]


class FoldWarning(UserWarning):
    """A generator makes the same values of different noise."""


class EvidenceBound(NamedTuple):
    """A Monte Carlo estimate of a lower bound on the log evidence, in nats.

    ``value`` is the estimate, ``standard_error`` that of its mean; ``khat`` the Pareto tail index
    of the guide as an importance proposal, ``effective_sample_size`` the number of independent
    posterior draws that its weighted draws are worth.
    """

    value: float
    standard_error: float
    khat: float
    effective_sample_size: float

    def __repr__(self) -> str:
        return short_repr(self)


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
    :param chunk_size: draws of the guide at a time, to bound the memory.
    :param model_kwargs: keyword arguments of model and guide whose names this function has, too.
    :returns: value, standard error, k-hat and effective sample size. The latter two are of the
        weights :math:`p(x, \theta) / \hat q(\theta)`, which are right in the mean: a guide with
        k-hat below 0.7 can be corrected by importance weighting. They are those of the guide itself
        only approximately, as :math:`\hat q` is noisy where the bound is loose. k-hat is infinite
        for fewer than 5 draws in the tail (about 25 samples), and says nothing where the effective
        sample size is nearly ``num_samples``.
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
    return weighted_draws(
        model,
        guide,
        *args,
        num_samples=num_samples,
        num_mixing=num_mixing,
        proposal=proposal,
        num_steps=num_steps,
        num_starts=num_starts,
        chunk_size=chunk_size,
        model_kwargs=model_kwargs,
        **kwargs,
    ).bound()


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
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> WeightedDraws:
    """The draws and log-weights behind :func:`evidence_bound`, whose parameters and errors it has.

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
    kwargs = {**kwargs, **(model_kwargs or {})}
    chunk_size = min(chunk_size, num_samples)
    elbo = HierarchicalELBO(chunk_size, num_mixing, proposal, num_steps, num_starts)
    guide = guide_of("evidence_bound", guide)
    number = -(-num_samples // chunk_size)
    rounds = steps_of(range(number), number, "weights")
    chunks = [elbo.weighted_draws(model, guide, args, kwargs) for _ in rounds]
    for name, shares in elbo.folds.items():
        share = torch.stack(shares).mean().item()
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
