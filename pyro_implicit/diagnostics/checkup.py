# SPDX-License-Identifier: Apache-2.0
"""What a user can know about a fitted guide without a reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_implicit.density.latent_density import LatentDensity
from pyro_implicit.density.modes import find_modes
from pyro_implicit.diagnostics.coverage import uncovered_modes
from pyro_implicit.diagnostics.drift import drift_check
from pyro_implicit.diagnostics.importance import importance_check
from pyro_implicit.diagnostics.stein import stein_check
from pyro_implicit.diagnostics.verdict import KHAT, Diagnosis
from pyro_implicit.guides.posterior_draws import _broadcasts, draw
from pyro_implicit.infer.bound import EvidenceBound, WeightedDraws, weighted_draws
from pyro_implicit.infer.engine.nonfinite import NonFiniteError

__all__ = ["diagnose"]

LEAST_DRAWS = 100  # of fewer there is no k-hat
NUM_CHAINS = 500
NUM_LOSSES = 20
NUM_SCORES = 4
MAX_SEARCHED_DIM = 100


@torch.no_grad()
def diagnose(
    guide: Callable[..., Any],
    model: Callable[..., Any],
    *args: Any,
    num_samples: int = 2000,
    loss: ELBO | None = None,
    modes: Tensor | Literal["search"] | None = "search",
    num_transitions: int = 20,
    chunk_size: int = 500,
    **kwargs: Any,
) -> Diagnosis:
    r"""
    Says how far a fitted guide can be trusted, from the model and the guide alone.

    Four looks at the same draws, each blind to something that another one sees:

    * *Importance weights* :math:`p(x, \theta) / q(\theta)`, of every guide with a density, an
      injective generator or a semi-implicit distribution: their tail index k-hat, their effective
      sample size, the bound on the log evidence, and what they would correct in means and standard
      deviations. They see the shape of what the guide visits, in all its dimensions at once.
    * *Stein's identities* between draws and the model's scores: means and standard deviations
      along each coordinate and in the worst directions, and a kernel test of everything else.
    * *Short HMC* from the draws: the posterior would stay as it is. Tails, ridges and necks that
      the guide cut off fill again.
    * *Modes*: whether those that carry mass have draws. They are searched from many draws of the
      prior by :func:`~pyro_implicit.density.find_modes`, whatever the guide visited.

    The verdict is "do not trust" if k-hat exceeds 0.7, if a significant error exceeds a quarter of
    a standard deviation in a mean or a factor of 1.25 in a standard deviation, if a mode is
    uncovered or if the draws are degenerate; "check" at 0.5, a tenth and 1.08, if the kernel test
    rejects (p < 0.003), if ``loss`` exceeds the certified bound by more than half a nat, or if
    there is no density; else "trust". Where the effective sample size is above 90 % of the draws,
    the kernel test does not count and k-hat leads to "check" at 0.7 and no further: the tail that
    is missing has next to no mass. Above 99 % it is ignored, as the tail of weights that are all
    the same means nothing. Of k-hat these are the limits of the literature; those of the moments
    mark what changes a plot, and what changes a conclusion. A perfect guide gets less than "trust"
    in about 1 % of all cases.

    **What no diagnostic sees:** a mode that neither the guide nor any way up from the prior's draws
    ever visited, and, of more than 100 latents, any that was not given; a funnel's neck or a tail
    so far from all draws that short HMC does not reach it, when the draws end there without a
    trace; errors below the resolution of ``num_samples``; and a model that is not the one that was
    meant (see :func:`~pyro_implicit.diagnostics.simulation_based_calibration` for errors of the
    whole chain of model, data and fit). Without importance weights the relative weights of
    separated modes are invisible, too.

    **Example:**

        >>> import pyro
        >>> import pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal
        >>> _ = pyro.set_rng_seed(0)
        >>> def model():
        ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(x, 0.1))
        >>> diagnose(AutoNormal(model), model).verdict  # never trained
        'do not trust'

    :param guide: A fitted guide.
    :param model: Its model, with all its data: nothing subsampled.
    :param args: The arguments of both, as ``kwargs``.
    :param num_samples: Draws of the guide, more than twice the latents. Stein's identities get
        five times as many of guides that draw in parallel.
    :param loss: The ELBO it was trained by, to be compared with the certified bound.
    :param modes: ``"search"`` finds them, where there are at most 100 latents and
        ``torch.func.vmap`` can run the model: that takes at least 50 paths of Newton steps, each
        with its Hessian, and draws no random numbers from the caller's stream. Or points in
        unconstrained space, ``(num_modes, latent_dim)``, tops of the density from as many starts
        as possible; or None to skip them.
    :param num_transitions: Transitions of HMC for each of 500 draws; 0 to skip them. They are the
        dearest part: 20 of them take 160 gradients of the model at 500 points. Models that
        ``torch.func.vmap`` cannot run are spared them.
    :param chunk_size: Draws at a time, to bound the memory.
    :returns: A :class:`Diagnosis`: print it, or read its ``verdict``, ``findings`` and numbers.
    :raises ValueError: For too few draws, an unknown word for ``modes``, or a subsampled plate.

    **References:**

    [1] Yao, Vehtari, Simpson and Gelman (2018), *Yes, but Did It Work?: Evaluating Variational
    Inference*.

    [2] Vehtari, Simpson, Gelman, Yao and Gabry (2024), *Pareto Smoothed Importance Sampling*.

    [3] Liu, Lee and Jordan (2016), *A Kernelized Stein Discrepancy for Goodness-of-fit Tests*.
    """
    density = LatentDensity(model, *args, **kwargs)
    dim = density.latent_dim
    if num_samples < max(LEAST_DRAWS, 2 * dim + 1):
        raise ValueError(
            f"num_samples must be at least {max(LEAST_DRAWS, 2 * dim + 1)} ({LEAST_DRAWS}, and "
            f"more than twice the {dim} latents), but got {num_samples}"
        )
    if isinstance(modes, str) and modes != "search":
        raise ValueError(f'modes must be "search", a tensor or None, but got {modes!r}')
    no_density = ""
    try:
        # Their Jacobians and mixtures want more memory for each draw than the model.
        chunk = max(1, chunk_size // 5)
        weighted = weighted_draws(
            model, guide, *args, num_samples=num_samples, chunk_size=chunk, **kwargs
        )
    except NonFiniteError as error:
        return Diagnosis(num_samples, dim, broken=str(error))
    except ValueError as error:
        draws = draw(guide, num_samples, *args, **kwargs)
        weighted, no_density = WeightedDraws(torch.empty(0), draws), str(error)
    points = density.unconstrain(weighted.draws)

    def score(points: Tensor) -> tuple[Tensor, Tensor]:
        parts = [density.score(part) for part in points.split(chunk_size)]
        log_prob, gradient = zip(*parts, strict=True)
        return torch.cat(log_prob), torch.cat(gradient)

    many = points
    if _broadcasts(guide) or hasattr(guide, "sample_posterior"):
        # The noise of scores hides small errors, but not from many draws, and these cost little.
        extra = draw(guide, NUM_SCORES * num_samples, *args, **kwargs)
        many = torch.cat([points, density.unconstrain(extra)])
    log_prob, scores = score(many)
    finite = log_prob.isfinite() & scores.isfinite().all(-1)
    if not finite.all():
        number = int((~finite).sum())
        broken = f"the log-density or its score is not finite at {number} draws"
        return Diagnosis(num_samples, dim, no_density=no_density, broken=broken)
    bound = None if no_density else weighted.bound()
    try:
        stein = stein_check(many, scores)
    except ValueError as error:  # collapsed
        return Diagnosis(num_samples, dim, bound, no_density, broken=str(error))
    importance = drift = coverage = None
    if bound is not None and bound.khat <= KHAT.distrust:
        importance = importance_check(points, weighted.log_weights)
    if num_transitions > 0 and density.is_vectorized:
        drift = drift_check(points[:NUM_CHAINS], score, num_transitions)
    if isinstance(modes, str):
        modes = _search(density)
    if modes is not None:
        # Of a guide on many modes, a Gaussian would overstate the volume.
        evidence = _log_mean_exp(weighted.log_weights) if bound is not None else None
        coverage = uncovered_modes(modes, points, density, evidence)
    gap = None
    if loss is not None and bound is not None:
        gap = _gap(loss, bound, model, guide, args, kwargs)
    return Diagnosis(num_samples, dim, bound, no_density, importance, stein, drift, gap, coverage)


def _search(density: LatentDensity) -> Tensor | None:
    """The modes that can be found, None where there is no way to look."""
    if density.latent_dim > MAX_SEARCHED_DIM or not density.is_vectorized:
        return None
    device = density.init_loc.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            return find_modes(density).loc
        except (ValueError, RuntimeError):  # the model cannot run at draws of its prior
            return None


def _log_mean_exp(log_weights: Tensor) -> float:
    return log_weights.logsumexp(0).item() - math.log(len(log_weights))


def _gap(
    loss: ELBO,
    bound: EvidenceBound,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> tuple[float, float]:
    """The objective minus the bound, and its standard error."""
    values = torch.tensor([-loss.loss(model, guide, *args, **kwargs) for _ in range(NUM_LOSSES)])
    error = math.hypot(values.std().item() / math.sqrt(NUM_LOSSES), bound.standard_error)
    return values.mean().item() - bound.value, error
