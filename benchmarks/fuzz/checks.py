# SPDX-License-Identifier: Apache-2.0
"""Checks of a random model; each raises :class:`Wrong` if it fails."""

from __future__ import annotations

import math
import random
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import Tensor

from benchmarks.fuzz.grammar import Draft
from benchmarks.fuzz.models import Drawn, Oracle, Rewritten
from pyro_implicit import AutoSemiImplicit, diagnose, fit, refine
from pyro_implicit.density import Target
from pyro_implicit.fitting import Fit
from pyro_implicit.mcmc.spaces.conditional_noise import ConditionalNoise
from tests.test_contract import ELBOS, GUIDES, refusal

__all__ = ["CHECKS", "Wrong"]

NUM_PARTICLES = 4
STEP = 1e-5
#: These need draws of the prior, which the rewritten model does not have.
OF_PRIOR = {"AVB-prior", "KIVI-prior"}
#: These are guides of the model of the contract test.
OF_CONTRACT = {"AutoImplicit-rows", "AutoSemiImplicit-rows", "HandWritten"}


class Wrong(AssertionError):
    """A wrong result without an error."""


def _tolerance(draft: Draft) -> float:
    return 1e-7 if draft.dtype == torch.float64 else 2e-3


def _compare(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare values; the library may be non-finite only if the expected value is."""
    found, expected = found.double(), expected.double()
    known = expected.isfinite()
    size = 1 + expected[known].abs().max().item() if known.any() else 1.0
    if not torch.allclose(found[known], expected[known], rtol=tolerance, atol=tolerance * size):
        raise Wrong(f"{what}: {found.tolist()} in place of {expected.tolist()}")


def _points(density: Target, seed: int, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(10**6 + seed)
    like = density.init_loc
    return torch.randn(count, density.latent_dim, generator=generator, dtype=like.dtype)


def _oracle(draft: Draft, points: Tensor) -> Tensor:
    oracle = Oracle(draft)
    return torch.stack([oracle.unconstrained(point.double()) for point in points])


def _differences(function: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    """Derivatives of each value with respect to its point, ``(count, *value_shape, dim)``."""
    steps = STEP * torch.eye(points.shape[-1], dtype=points.dtype)
    columns = [(function(points + h) - function(points - h)) / (2 * STEP) for h in steps]
    return torch.stack(columns, -1)


def density(draft: Draft) -> str:
    """Compare log-density and gradient with the oracle and its finite differences."""
    found = Target(Drawn(draft), draft.data)
    points = _points(found, draft.seed)
    log_prob, score = found.score(points)
    expected = _oracle(draft, points)
    _compare("log-density", log_prob, expected, _tolerance(draft))
    if not expected.isfinite().all():
        return "no density at some points"
    differences = _differences(lambda at: _oracle(draft, at), points.double())
    at = points.double().requires_grad_()
    (derivative,) = torch.autograd.grad(_oracle(draft, at).sum(), at)
    # In distant regions, derivatives of torch's own densities overflow.
    differences = differences.masked_fill(~derivative.isfinite(), math.nan)
    _compare("gradient", score, differences, max(_tolerance(draft), 1e-5))
    return "right"


def conditional(draft: Draft) -> str:
    """The same in the noise of latents, with the determinant of the map."""
    model = Target(Drawn(draft), draft.data)
    if draft.dtype != torch.float64:
        return "skipped"
    middle = 0.3 * _points(model, draft.seed, 1)[0]
    try:
        walked = ConditionalNoise(model, middle)
    except torch.linalg.LinAlgError:  # refine then samples the latents
        return "no curvature"
    if not walked.reparams:
        return "nothing depends"
    points = _points(model, draft.seed)
    latent = walked.to_latent(points)
    _compare("round trip", walked.to_points(latent), points, 1e-6)
    expected = _oracle(draft, latent)
    if not expected.isfinite().all():
        return "no density at some points"
    jacobian = _differences(walked.to_latent, points)
    log_prob, score = walked.score(points)
    _compare("log-density", log_prob, expected + torch.linalg.slogdet(jacobian)[1], 1e-5)
    _compare("gradient", score, _differences(lambda at: walked.score(at)[0], points), 1e-4)
    return "right"


def _guide(name: str, model: Callable[..., Any], draft: Draft) -> Any:
    if name != "AutoGuideList":
        return GUIDES[name](model)  # type: ignore[arg-type]
    names = [site.name for site in draft.latents]
    guide = AutoGuideList(model)
    guide.append(AutoSemiImplicit(poutine.block(model, expose=names[:1])))
    guide.append(AutoNormal(poutine.block(model, expose=names[1:])))
    return guide


def _step(draft: Draft, model: Any, guide_name: str, elbo_name: str) -> tuple[Tensor, dict]:
    """Return the loss of a first step and all gradients."""
    pyro.clear_param_store()
    pyro.set_rng_seed(draft.seed)
    guide = _guide(guide_name, Drawn(draft), draft)
    guide(draft.data)
    elbo = ELBOS[elbo_name](NUM_PARTICLES)
    pyro.set_rng_seed(draft.seed)
    loss = torch.as_tensor(elbo.loss_and_grads(model, guide, draft.data))
    params = pyro.get_param_store().named_parameters()
    return loss, {n: p.grad.clone() for n, p in params if p.grad is not None}


def _start(draft: Draft) -> Tensor:
    return Target(Drawn(draft), draft.data).init_loc


def _fits(guide: str, elbo: str, size: int) -> bool:
    """Check whether a guide of the contract test, with fixed sizes, fits the number of latents."""
    least = 4 if "residual" in guide or elbo == "LIVI-smallest" else 1
    return least <= size and (size <= 9 or "MMNN" not in guide)


def pairs(draft: Draft, count: int = 2) -> list[tuple[str, str]]:
    """Select guides and ELBOs that can be trained, by seed."""
    size = len(_start(draft))
    some = [
        (guide, elbo)
        for guide in GUIDES
        for elbo in ELBOS
        if guide not in OF_CONTRACT
        and refusal(guide, elbo) is None
        and not (guide == "AutoGuideList" and len(draft.latents) < 2)
        and _fits(guide, elbo, size)
        and not (guide == "AutoSemiImplicit-frame" and draft.discrete)  # not supported by Pyro
    ]
    return random.Random(draft.seed).sample(some, count)


def elbos(draft: Draft) -> str:
    """Compare loss and gradients of a step with those of the oracle's density."""
    outcomes = [_pair(draft, guide, elbo) for guide, elbo in pairs(draft)]
    return next((one for one in outcomes if one != "right"), "right")


def _pair(draft: Draft, guide: str, elbo: str) -> str:
    try:
        loss, gradients = _step(draft, Drawn(draft), guide, elbo)
        if elbo in OF_PRIOR or draft.discrete:  # the first run draws from the prior
            return "right" if loss.isfinite() else "not finite"
        if not _oracle(draft, _start(draft).unsqueeze(0)).isfinite().all():
            return "no density at the start"
        expected, others = _step(draft, Rewritten(draft), guide, elbo)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise type(error)(f"{guide} by {elbo}: {error}") from error
    if not expected.isfinite():
        return "no density at some points"
    tolerance = 10 * _tolerance(draft)
    _compare(f"loss of {guide} by {elbo}", loss, expected, tolerance)
    names = [name.split(".", 1)[-1] for name in gradients]
    if names != [name.split(".", 1)[-1] for name in others]:
        raise Wrong(f"gradients of {guide} by {elbo}: of {names}, not {list(others)}")
    for (name, one), other in zip(gradients.items(), others.values(), strict=True):
        _compare(f"gradient of {name} of {guide} by {elbo}", one, other, 10 * tolerance)
    return "right"


def _stein(draft: Draft, draws: dict[str, Tensor], model: Target) -> None:
    """Check that the oracle's score has mean 0 under draws of the posterior."""
    latent = model.unconstrain(draws)[:150].double().requires_grad_()
    (score,) = torch.autograd.grad(_oracle(draft, latent).sum(), latent)
    error = score.std(0) / math.sqrt(len(score))
    off = (score.mean(0) / error.clamp(min=1e-12)).abs()
    if not off.isfinite().all() or off.max() > 6:
        raise Wrong(f"draws are off: the score's mean is {off.tolist()} standard errors from 0")


def _is_improper(draft: Draft) -> bool:
    """Check whether elements of a latent are masked, so that they have no density."""
    masks = (torch.as_tensor(s.mask) for s in draft.latents if s.mask is not None)
    return not all(mask.all() for mask in masks)


def _is_in_support(site: Any, value: Tensor) -> bool:
    """Support check up to rounding: underflow and overflow count as the boundary."""
    support = site.kind.support
    is_number = support in (dist.constraints.real, dist.constraints.positive)
    border = (value == 0) | value.isinf() if is_number else torch.tensor(False)
    return bool((support.check(value) | border).all())


def fits(draft: Draft) -> str:
    """Check a short fit: its draws, its file, its predictions, its verdict."""
    pyro.clear_param_store()
    model = Drawn(draft)
    short = partial(fit, model, "auto", draft.data, num_steps=50, seed=draft.seed, progress=False,
                    max_seconds=10.0)  # fmt: skip
    if _is_improper(draft):
        with warnings.catch_warnings(record=True) as said, suppress(ValueError):
            warnings.simplefilter("always")
            short()
        if not any("have no density" in str(one.message) for one in said):
            raise Wrong("no warning of an improper posterior")
        return "improper, and said so"
    result = short()
    failed = [line.outcome for line in result.stages if line.error is not None]
    if failed:
        raise Wrong(f"a stage of fit failed: {failed}")
    draws = result.sample(200)
    for site in draft.latents:
        shape = (200, *draft.shape(site.plates), *site.kind.event)
        if draws[site.name].shape != shape:
            raise Wrong(f"{site.name} has shape {tuple(draws[site.name].shape)}, not {shape}")
        if not _is_in_support(site, draws[site.name]):
            raise Wrong(f"{site.name} has draws outside its support")
    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder) / "fit.pt")
        loaded = Fit.load(Path(folder) / "fit.pt", model, draft.data)
    found = []
    for one in (result, loaded):
        pyro.set_rng_seed(1)
        found.append(one.sample(5, draft.data))
    for name in found[0]:
        _compare(f"{name} after loading", found[1][name], found[0][name], 0.0)
    predictive = Predictive(model, guide=result.posterior, num_samples=7)({})
    for site in draft.sites:
        if site.is_observed and draft.subsample is None:
            _same_shape(site.name, predictive[site.name], draft)
    if draft.subsample is not None:
        return "right"
    result.diagnose(num_samples=100, num_transitions=2)
    if result.refined is not None and result.refined.stopped == "converged":
        learnt = {name: one.value.item() for name, one in result.parameters.items()}
        _stein(replace(draft, params=learnt), result.sample(150), result.target)
        return "right, converged"
    return "right"


def _same_shape(name: str, value: Tensor, draft: Draft) -> None:
    if value[0].numel() != draft.data[name].numel():  # Pyro's has one dimension per plate
        raise Wrong(f"predictions of {name} have shape {tuple(value.shape)}")


def refines(draft: Draft) -> str:
    """Check chains from an untrained mean field, in the latents or their noise."""
    pyro.clear_param_store()
    pyro.set_rng_seed(draft.seed)
    model = Drawn(draft)
    guide = AutoNormal(poutine.block(model, hide=[s.name for s in draft.discrete]), init_scale=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = refine(model, guide, draft.data, num_chains=32, max_gradients=600, progress=False)
        diagnose(model, result, draft.data, num_samples=100, num_transitions=2)
    if result.stopped != "converged":
        return result.stopped
    draws = {name: value[:, -1] for name, value in result.samples.items()}
    _stein(draft, draws, Target(model, draft.data))
    return "right, converged"


CHECKS: dict[str, Callable[[Draft], str]] = {
    "density": density, "conditional": conditional, "elbos": elbos, "refine": refines, "fit": fits,
}  # fmt: skip
