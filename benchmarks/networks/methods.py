# SPDX-License-Identifier: Apache-2.0
"""Approximations of a network's posterior, by name: the rows of the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import (
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoNormal,
    init_to_value,
)
from torch import nn

from benchmarks.networks.run import REFINED, Run, start_of
from pyro_implicit import (
    GPVI_ELBO,
    KIVI_ELBO,
    LIVI_ELBO,
    AutoImplicit,
    AutoMixture,
    AutoSemiImplicit,
    InjectiveELBO,
    ResidualGenerator,
)
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.nn import NetworkModel, classifier, start_values, to_bayesian_

__all__ = ["METHODS", "posterior_of"]

MEMBERS, INIT_SCALE = 5, 0.01
Posterior = tuple[NetworkModel, Any]


def mode(run: Run) -> Posterior:
    model, weights = run.member()
    return model, {name: value[None] for name, value in weights.items()}


def ensemble(run: Run) -> Posterior:
    members = [run.member(index) for index in range(MEMBERS)]
    names = members[0][1]
    return members[0][0], {
        name: torch.stack([weights[name] for _, weights in members]) for name in names
    }


def last_layer_laplace(run: Run) -> Posterior:
    """A Gaussian around a mode, with the curvature of the last layer."""
    model, weights = run.member()
    with run.clock("laplace"):
        *body, head = run.network().to(run.args.device).named_children()
        features = nn.Sequential(*(layer for _, layer in body))
        features.load_state_dict(
            {name: value for name, value in weights.items() if not name.startswith(f"{head[0]}.")}
        )
        with torch.no_grad():
            x = torch.cat([features(part) for part in run.train[0].split(1000)])
        alone = nn.Sequential()
        alone.add_module(*head)
        last = classifier(to_bayesian_(alone), len(x))
        pyro.clear_param_store()
        start = init_to_value(values={name: weights[name] for name in start_values(last)})
        guide = AutoLaplaceApproximation(last, init_loc_fn=start)
        guide(x, run.train[1])
        found = draw(guide.laplace_approximation(x, run.train[1]), 100)
    return model, {
        name: found[name] if name in found else value.expand(100, *value.shape)
        for name, value in weights.items()
    }


def mean_field(run: Run) -> Posterior:
    model = run.model(run.seed)
    guide = AutoNormal(model, init_loc_fn=start_of(model), init_scale=INIT_SCALE)
    run.fit(model, guide, ImplicitELBO(2), "mean-field")
    return model, guide


def low_rank(run: Run) -> Posterior:
    model = run.model(run.seed)
    guide = AutoLowRankMultivariateNormal(
        model, init_loc_fn=start_of(model), init_scale=INIT_SCALE, rank=10
    )
    run.fit(model, guide, ImplicitELBO(2), "low-rank")
    return model, guide


def linearised(run: Run, log_det: Any) -> LIVI_ELBO:
    return LIVI_ELBO(
        run.args.particles or 2, log_det=log_det, num_probes=1, max_iterations=run.args.solver
    )


def livi(run: Run, log_det: Any, has_fixed_widths: bool = False) -> Posterior:
    """The generator moves all weights; with fixed widths, no weight has a scale of its own."""
    model = run.model(run.seed)
    guide = AutoSemiImplicit(
        model, run.matrices, init_loc_fn=start_of(model), frame=None, init_scale=INIT_SCALE
    )
    name = f"livi-{log_det}"
    if has_fixed_widths:
        guide(*next(iter(run.loader)))
        guide.scale_unconstrained.requires_grad_(False)
        name += "-fixed"
    run.fit(model, guide, linearised(run, log_det), name)
    return model, guide


def kivi(run: Run, **options: Any) -> Posterior:
    """One guide for each layer."""
    model = run.model(run.seed)
    guide, start = AutoGuideList(model), start_of(model)
    layers: dict[str, list[str]] = {}
    for name in start_values(model):
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    for sites in layers.values():
        part = poutine.block(model, expose=sites)
        guide.append(
            AutoImplicit(part, run.matrices, init_loc_fn=start, frame=None, init_scale=INIT_SCALE)
        )
    # The paper has ten draws for both terms.
    loss = KIVI_ELBO(run.args.particles or 4, num_entropy_particles=10, **options)
    run.fit(model, guide, loss, "-".join(["kivi", *map(str, options.values())]))
    return model, guide


def residual(run: Run, loss: Any, name: str) -> Posterior:
    """One guide for all weights, by an injective generator."""
    model = run.model(run.seed)
    guide = AutoImplicit(
        model,
        lambda dim: ResidualGenerator(dim, core_dim=min(run.args.hidden, dim // 10)),
        init_loc_fn=start_of(model),
        frame=None,
        init_scale=INIT_SCALE,
    )
    run.fit(model, guide, loss, name)
    return model, guide


def mixture(run: Run) -> Posterior:
    """A LIVI guide at each member of the ensemble, trained for a third as long."""
    members = [run.member(index)[1] for index in range(MEMBERS)]
    model = run.model(run.seed)
    parts = [
        AutoSemiImplicit(
            model, run.matrices, init_loc_fn=init_to_value(values=weights), frame=None,
            init_scale=INIT_SCALE,
        )
        for weights in members
    ]  # fmt: skip
    guide = AutoMixture(model, parts)
    loss = linearised(run, "stochastic")
    for index, part in enumerate(guide.components):
        run.fit(model, part, loss, f"mixture-{index}", share=1 / 3)
    guide(*run.train)  # determines which sites of the model are latent
    return model, guide


METHODS: dict[str, Callable[[Run], Posterior]] = {
    "MAP": mode,
    "ensemble": ensemble,
    "last-layer Laplace": last_layer_laplace,
    "mean field": mean_field,
    "low rank": low_rank,
    "LIVI L'": lambda run: livi(run, "stochastic"),
    "LIVI L', fixed widths": lambda run: livi(run, "stochastic", has_fixed_widths=True),
    "LIVI L''": lambda run: livi(run, "smallest"),
    "KIVI": lambda run: kivi(run, contrast="prior", direction="reverse", clip=1e-8),
    "KIVI, adaptive contrast": kivi,
    "GPVI": lambda run: residual(run, GPVI_ELBO(run.args.particles or 4), "gpvi"),
    "injective": lambda run: residual(run, InjectiveELBO(run.args.particles or 2), "injective"),
    "mixture": mixture,
}


def posterior_of(run: Run, row: str) -> Posterior:
    """Return the model and the posterior of a row; ``run.seconds`` is their cost.

    :param row: a name of ``METHODS``, with ``", refined"`` appended for chains from there.
    """
    run.seconds = 0.0
    name = row.removesuffix(REFINED)
    model, posterior = METHODS[name](run)
    return model, run.refine(model, posterior, name) if row != name else posterior
