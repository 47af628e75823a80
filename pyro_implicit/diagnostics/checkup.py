# SPDX-License-Identifier: Apache-2.0
"""What a user can know about a fitted guide without a reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_implicit.density.checks.numerics import warn_of_lost_gradients
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.effort import NUM_CHAINS, NUM_OBSERVED_CHAINS, plan_effort
from pyro_implicit.diagnostics.examination import WEIGHED_PART, examine
from pyro_implicit.diagnostics.function_space import (
    Quantities,
    find_quantities,
)
from pyro_implicit.diagnostics.guide_cost import seconds_of_weights
from pyro_implicit.diagnostics.preparation import (
    can_search,
    check_modes,
    check_sites,
)
from pyro_implicit.diagnostics.verdict import Diagnosis
from pyro_implicit.diagnostics.whitening import MAX_FULL_DIM
from pyro_implicit.guides.posterior_draws import posterior_of, refuse_swapped, samples_of
from pyro_implicit.guides.stored_draws import StoredDraws
from pyro_implicit.mcmc import Refined
from pyro_implicit.runtime.locks import in_turn
from pyro_implicit.runtime.printing import announce, showing_progress

__all__ = ["diagnose"]

LEAST_DRAWS = 100  # of fewer there is no k-hat
NUM_SAMPLES = 2000


@in_turn
@torch.no_grad()
def diagnose(
    model: Callable[..., Any],
    guide: Callable[..., Any] | Mapping[str, Tensor] | Refined,
    *args: Any,
    num_samples: int | None = None,
    loss: ELBO | None = None,
    modes: Tensor | Literal["search"] | None = "search",
    num_transitions: int = 20,
    chunk_size: int = 500,
    max_seconds: float = 60.0,
    quantities: Quantities = "auto",
    progress: bool = True,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Diagnosis:
    r"""Says how far a fitted guide can be trusted, from the model and the guide alone.

    Four looks at the same draws, each blind to something that another one sees:

    * *Importance weights* :math:`p(x, \theta) / q(\theta)`, of every guide with a density, an
      injective generator or a semi-implicit distribution: their tail index k-hat, their effective
      sample size, the bound on the log evidence, and what they would correct in means and standard
      deviations. They see the shape of what the guide visits, in all its dimensions at once.
    * *Stein's identities* between draws and the model's scores: means and standard deviations
      along each coordinate and in the worst directions, and a kernel test of everything else.
    * *Short HMC* from the draws: the posterior would stay as it is. Tails, ridges and necks that
      the guide cut off fill again, and some chains end beyond all of its draws.
    * *Modes*: whether those that carry mass have draws. They are searched from many draws of the
      prior by :func:`~pyro_implicit.density.find_modes`, whatever the guide visited.

    The verdict is "do not trust" if k-hat exceeds 0.7, if a significant error exceeds a quarter of
    a standard deviation in a mean or a factor of 1.25 in a standard deviation, if a mode is
    uncovered or if the draws are degenerate; "check" at 0.5, a tenth and 1.08, if the kernel test
    rejects (p < 0.003; of all latents, or of one site by itself), if the weights are worth so few
    draws that they would not show errors above the first limits, nor would short HMC ("cannot
    tell"; never where the effective sample size is above 94 %), if ``loss`` exceeds the certified
    bound by more than half a nat, if there is no density, or if chains did not settle, never moved
    or failed in more than 1 % of their trajectories; else "trust". Chains of short HMC that end
    beyond all of the guide's draws, if that is no chance, are "check" above 1 % and "do not trust"
    above 5 %. Where the effective sample size is above 90 % of the draws, the kernel test does not
    count and k-hat leads to "check" at 0.7 and no further: the tail that is missing has next to no
    mass. Above 99 % it is ignored, as the tail of weights that are all the same means nothing. Of
    k-hat these are the limits of the literature; those of the moments mark what changes a plot, and
    what changes a conclusion. A perfect guide gets less than "trust" in about 1 % of all cases.

    **Networks** are judged by their predictions: hidden units have no order, so that a guide on one
    of their many orders has lost no mode, and weights that are too narrow each by itself may still
    make the right functions. With ``quantities`` importance weights and short HMC look at these in
    place of the latents; k-hat only says whether the weights may speak, and Stein's identities and
    modes, which are the latents', are left out. Without power in either look it is "cannot tell".

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
    >>> diagnose(model, AutoNormal(model)).verdict  # never trained
    'do not trust'

    :param model: with all its data: nothing subsampled.
    :param guide: a fitted guide of it; or draws, a dict ``(num_draws, *site_shape)`` by site, or
        what :func:`~pyro_implicit.refine` or an ``MCMC`` gave: these have no density, which chains
        of ``refine`` that had settled need not have. What :func:`~pyro_implicit.fit` returned
        stands for its ``posterior``.
    :param args: the arguments of both, as ``kwargs``.
    :param num_samples: draws of the guide, by default 2,000; up to 300 latents more than twice as
        many as these, and above each coordinate is scaled by itself. Stein's identities get
        five times as many of guides that draw in parallel.
    :param loss: the ELBO it was trained by, to be compared with the certified bound.
    :param modes: ``"search"`` finds them, where there are at most 100 latents and
        ``torch.func.vmap`` can run the model: that takes at least 50 paths of Newton steps, each
        with its Hessian, and draws no random numbers from the caller's stream. Or points in
        unconstrained space, ``(num_modes, latent_dim)``, tops of the density from as many starts
        as possible; or None to skip them.
    :param num_transitions: transitions of HMC for each of 500 draws; 0 to skip them. They are the
        dearest part: 20 of them take 160 gradients of the model at 500 points. Models that
        ``torch.func.vmap`` cannot run, or that raise errors on the way, are spared them.
    :param chunk_size: draws at a time, to bound the memory.
    :param max_seconds: that the model's evaluations may take on one core, as estimated by their
        operations, so that equal seeds give equal results. What would take longer is cut down or
        left out, and the report says so. The density of implicit guides is counted, too: it is
        dear in hundreds of latents, and if 500 weights are too dear there are none. That of other
        guides is not.
    :param quantities: of a dict of constrained draws by site, ``(num_draws, *site_shape)``, a
        tensor or a dict of tensors ``(num_draws, *shape)``, whose errors are looked for, as in
        :func:`~pyro_implicit.refine`. By default ``"latents"``, but for a model of
        :func:`~pyro_implicit.nn.classifier` or :func:`~pyro_implicit.nn.regressor` its predictions
        at up to 50 of the inputs (:class:`~pyro_implicit.nn.FunctionValues`).
    :param progress: whether to show a bar, with the estimate, where there is a terminal.
    :param model_kwargs: keyword arguments of model and guide whose names this function has, too.
    :returns: a :class:`Diagnosis`: print it, or read its ``verdict``, ``findings`` and numbers.
        However bad the draws are, there is one.
    :raises TypeError: for another order of arguments, or missing ones.
    :raises ValueError: for too few draws, bad ``modes``, a guide that lacks a latent of the model,
        or a subsampled plate.

    **References:**

    1. Yao, Vehtari, Simpson and Gelman (2018), *Yes, but Did It Work?: Evaluating Variational
       Inference*.

    2. Vehtari, Simpson, Gelman, Yao and Gabry (2024), *Pareto Smoothed Importance Sampling*.

    3. Liu, Lee and Jordan (2016), *A Kernelized Stein Discrepancy for Goodness-of-fit Tests*.
    """
    refuse_swapped("diagnose", model, guide)
    guide = posterior_of("diagnose", guide)
    kwargs = {**kwargs, **(model_kwargs or {})}
    if isinstance(guide, Refined):
        guide = guide.as_guide()
    elif not callable(guide) or hasattr(guide, "get_samples"):
        guide = StoredDraws(samples_of(guide, "guide"))
    density = Target(model, *args, model_kwargs=kwargs)
    dim = density.latent_dim
    # Above, each coordinate is scaled by itself.
    least = max(LEAST_DRAWS, 2 * dim + 1 if dim <= MAX_FULL_DIM else 0)
    if num_samples is not None and num_samples < least:
        raise ValueError(
            f"num_samples must be at least {least} ({LEAST_DRAWS}, and more than twice the {dim} "
            f"latents up to {MAX_FULL_DIM}), but got {num_samples}"
        )
    warn_of_lost_gradients(density)
    check_modes(modes, dim)
    check_sites(density, guide, args, kwargs)
    function = find_quantities(quantities, model, args, kwargs)
    if isinstance(modes, str) and (function is not None or not can_search(density)):
        modes = None
    weight = seconds_of_weights(density, guide, max(1, chunk_size // WEIGHED_PART))
    effort = plan_effort(
        density,
        num_samples or NUM_SAMPLES,
        num_samples or least,
        num_transitions,
        isinstance(modes, str),
        chunk_size,
        max_seconds,
        NUM_CHAINS if function is None else NUM_OBSERVED_CHAINS,
        weight,
    )
    with showing_progress(progress):
        announce("diagnose", effort.seconds)
        return examine(density, guide, effort, modes, loss, chunk_size, function)
