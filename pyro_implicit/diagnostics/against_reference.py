# SPDX-License-Identifier: Apache-2.0
"""Compare the posterior of a guide with reference draws, site by site and jointly."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, cast, runtime_checkable

import torch
from pyro.ops.stats import effective_sample_size, quantile, split_gelman_rubin
from torch import Tensor

from pyro_implicit.density.labels import element_labels
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.comparison import (
    Comparison,
    ReferenceCheck,
    SiteComparison,
)
from pyro_implicit.diagnostics.distances import (
    maximum_mean_discrepancy,
    pairwise_distances,
    sliced_wasserstein,
    sliced_wasserstein_floor,
    sliced_wasserstein_interval,
)
from pyro_implicit.diagnostics.moments import rounding
from pyro_implicit.diagnostics.policy import CHECKS, COMPARE, REFERENCE, VERDICT, ComparePolicy
from pyro_implicit.diagnostics.quantities import (
    Quantities,
    describe,
    find_quantities,
    values_of,
)
from pyro_implicit.guides.posterior_draws import (
    draw,
    posterior_of,
    refuse_missing_sites,
    refuse_swapped,
    samples_of,
)
from pyro_implicit.guides.sampler import Sampler, StoredDraws
from pyro_implicit.infer.bound import weighted_draws
from pyro_implicit.mcmc import Refined
from pyro_implicit.mcmc.policy import DEFAULT as CHAINS
from pyro_implicit.ops import LogWeights
from pyro_implicit.runtime.global_state import in_turn, same_streams, with_seed
from pyro_implicit.runtime.messages import first_line

__all__ = ["compare"]


@runtime_checkable
class HasSamples(Protocol):
    """An object with draws by site, as :class:`~pyro.infer.mcmc.api.MCMC`."""

    def get_samples(self) -> Mapping[str, Tensor]:
        """By site, ``(num_samples, *site_shape)``."""


@in_turn
@with_seed
def compare(
    model: Callable[..., Any] | None,
    guide: Callable[..., Any] | HasSamples | Mapping[str, Tensor],
    reference: HasSamples | Mapping[str, Tensor],
    *args: Any,
    num_samples: int | None = None,
    quantities: Quantities = "auto",
    seed: int | None = None,
    policy: ComparePolicy | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Comparison:
    r"""Compare a guide's posterior with reference draws, in constrained space.

    Every coordinate of every common site gets the mean and standard deviation of both sides, the
    difference of means in units of the reference's standard deviation, the ratio of standard
    deviations, and the errors of the 5, 25, 50, 75 and 95 % quantiles in the same units. All
    coordinates together get a sliced 2-Wasserstein distance with its sampling floor, what a
    perfect guide would show at these numbers of draws, and a maximum mean discrepancy. The floor
    counts as many draws of the reference as its effective sample size, and the verdict has a 95 %
    interval of the ratio to the floor. The headline is the distance after dividing each coordinate
    by the reference's standard deviation; where the reference is constant, errors stay in the
    coordinate's own units.

    The reference is checked, too: its effective sample size, its R-hat if its chains are known, and
    the mass of regions in which the guide has draws and the reference has none. The verdict says if
    the reference is worse than the guide.

    Networks are compared by their predictions at the given inputs, because hidden units have no
    order and many weights give the same function. Single weights can be compared once both sides
    have their units in one order (:func:`~pyro_implicit.ops.align_hidden_units`).

    **Example:**

    >>> truth = {"z": torch.randn(1000, 2)}
    >>> narrow = {"z": 0.5 * torch.randn(1000, 2)}
    >>> report = compare(None, narrow, truth)
    >>> bool(report.floor_ratio > 3)
    True

    :param model: model of guide and reference, to look for mass that the reference lacks; None
        where both are draws.
    :param guide: a Pyro guide, or its draws: a dict of tensors ``(num_samples, *site shape)``, or
        an object with ``get_samples()``. A result of :func:`~pyro_implicit.fit` is replaced by its
        ``posterior``.
    :param reference: an object with ``get_samples()``, such as an
        :class:`~pyro.infer.mcmc.api.MCMC` that has run or a result of
        :func:`~pyro_implicit.refine`, or a dict of draws, which may be one by
        ``get_samples(group_by_chain=True)``: ``(num_chains, num_samples, *site shape)``.
    :param args: the arguments of the model and the guide.
    :param num_samples: number of draws from the guide; default: as many as the reference has.
    :param quantities: function from a dict of constrained draws by site,
        ``(num_draws, *site_shape)``, to a tensor or a dict of tensors ``(num_draws, *shape)``,
        which are compared in place of the sites, as in :func:`~pyro_implicit.refine`. By default
        ``"latents"``; for a model of :func:`~pyro_implicit.nn.classifier` or
        :func:`~pyro_implicit.nn.regressor`, its predictions at up to 50 of the inputs
        (:class:`~pyro_implicit.nn.FunctionValues`).
    :param seed: the seed of all random numbers of this call. The caller's random streams do not
        advance; without a seed they are used.
    :param policy: the limits of the verdict; by default those of
        :class:`~pyro_implicit.diagnostics.ComparePolicy`.
    :param model_kwargs: keyword arguments of model and guide whose names this function has, too.
    :param kwargs: the keyword arguments of the model and the guide.
    :returns: a :class:`Comparison`, with ``print``, ``plot()`` and ``to_dict()``.
    :raises TypeError: for another order of arguments, or a reference without draws.
    :raises ValueError: if no site is common to both, a site's shapes differ, draws are not
        finite or fewer than 4 (2 for the guide), or ``num_samples`` comes with a dict of draws.
    """
    policy = policy or COMPARE
    refuse_swapped("compare", model, guide)
    guide = posterior_of("compare", guide)
    kwargs = {**kwargs, **(model_kwargs or {})}
    if not _has_draws(reference):
        raise TypeError(
            "reference must be an MCMC that has run (with get_samples()) or a dict of draws, but "
            f"got {type(reference).__name__}. Cure: compare(model, guide, reference, *args)"
        )
    reference_draws = samples_of(reference, "reference")
    if _has_draws(guide):
        if num_samples is not None:
            raise ValueError(
                "num_samples is the number of draws to take from a guide; draws that are there "
                "already are compared as they are. Cure: leave num_samples out, or slice the draws"
            )
        guide_draws = example = samples_of(guide, "guide")
    else:
        with same_streams():
            example = draw(cast(Any, guide), 1, *args, **kwargs)
    chains = chains_of(reference, {name: value.dim() - 1 for name, value in example.items()})
    if chains is not None:
        reference_draws = {name: value.flatten(0, 1) for name, value in chains.items()}
    num_reference = _count(reference_draws, "reference", at_least=CHAINS.least_kept)
    if not _has_draws(guide):
        number = num_samples or num_reference
        guide_draws = draw(cast(Any, guide), number, *args, **kwargs)
    num_samples = _count(guide_draws, "guide", at_least=2)
    function = find_quantities(quantities, model, args, kwargs)
    if function is not None:
        guide_draws = values_of(function, guide_draws)
        reference_draws = values_of(function, reference_draws)
        if chains is not None:
            shape = next(iter(chains.values())).shape[:2]
            chains = {n: value.unflatten(0, shape) for n, value in reference_draws.items()}
    names = _common_sites(guide_draws, reference_draws)
    pairs = {name: _aligned(name, guide_draws[name], reference_draws[name]) for name in names}

    x = torch.cat([pair[0].reshape(num_samples, -1) for pair in pairs.values()], dim=-1)
    y = torch.cat([pair[1].reshape(num_reference, -1) for pair in pairs.values()], dim=-1)
    scale = _scale(y)
    common = {name: reference_draws[name] for name in names}
    check = check_mixing(common, chains, reference)
    if model is not None and function is None:  # else there is no density to say
        try:
            target = Target(model, *args, model_kwargs=kwargs)
            lost = missing_mass(target, guide, guide_draws, reference_draws, policy)
            check = replace(check, missing=lost)
        except Exception as error:  # any error of the model
            check = replace(check, unsearched=first_line(error))
    x_standard, y_standard = (x - y.mean(dim=0)) / scale, (y - y.mean(dim=0)) / scale
    return Comparison(
        sites={name: _compare_site(*pair) for name, pair in pairs.items()},
        sliced_wasserstein=sliced_wasserstein(x_standard, y_standard).item(),
        sampling_floor=sliced_wasserstein_floor(
            y_standard, num_samples, effective_size=check.independent_draws
        ).item(),
        sliced_wasserstein_constrained=sliced_wasserstein(x, y).item(),
        squared_mmd=maximum_mean_discrepancy(x_standard, y_standard).item(),
        only_in_guide=tuple(sorted(set(guide_draws) - set(names))),
        only_in_reference=tuple(sorted(set(reference_draws) - set(names))),
        guide_draws={name: pair[0] for name, pair in pairs.items()},
        reference_draws={name: pair[1] for name, pair in pairs.items()},
        reference=check,
        compared="" if function is None else describe(function),
        distance_interval=sliced_wasserstein_interval(
            x_standard, y_standard, check.independent_draws
        ),
        policy=policy,
    )


def _compare_site(x: Tensor, y: Tensor) -> SiteComparison:
    guide_sd, reference_sd, scale = x.std(dim=0), y.std(dim=0), _scale(y)
    levels = list(REFERENCE.quantiles)
    guide_mean, reference_mean = x.double().mean(dim=0), y.double().mean(dim=0)
    both_constant = (guide_sd <= rounding(y)) & (reference_sd <= rounding(y))
    sd_ratio = torch.where(both_constant, torch.ones_like(scale), guide_sd / reference_sd)
    return SiteComparison(
        guide_mean=guide_mean.to(x),
        guide_sd=guide_sd,
        reference_mean=reference_mean.to(y),
        reference_sd=reference_sd,
        mean_error=((guide_mean - reference_mean) / scale).to(x),
        sd_ratio=sd_ratio,
        quantile_errors=(quantile(x, levels) - quantile(y, levels)) / scale,
    )


def _scale(reference: Tensor) -> Tensor:
    """Return the standard deviations, with 1 for coordinates that are constant up to rounding."""
    sd = reference.std(dim=0)
    return torch.where(sd > rounding(reference), sd, torch.ones_like(sd))


def _has_draws(side: Any) -> bool:
    return isinstance(side, (HasSamples, Mapping))


def _count(draws: dict[str, Tensor], side: str, at_least: int) -> int:
    counts = {name: value.shape[:1].numel() for name, value in draws.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"the sites of the {side} have different numbers of draws: {counts}. Cure: tensors "
            "(num_samples, *site shape)"
        )
    count = next(iter(counts.values()), 0)
    if draws and count < at_least:
        raise ValueError(
            f"the {side} has {count} draws, but compare needs at least {at_least}. Cure: more draws"
        )
    return count


def _common_sites(guide: dict[str, Tensor], reference: dict[str, Tensor]) -> list[str]:
    names = [name for name in reference if name in guide]
    if not names:
        raise ValueError(
            f"the guide and the reference have no site in common: guide {sorted(guide)}, "
            f"reference {sorted(reference)}. Cure: the same model; for a reparameterised reference "
            "add its deterministic sites, by Predictive(model, mcmc.get_samples())(...)"
        )
    return names


def _aligned(name: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[1:] != y.shape[1:]:
        raise ValueError(
            f"site {name!r} has shape {tuple(x.shape[1:])} in the guide and "
            f"{tuple(y.shape[1:])} in the reference (after the sample dimension). Cure: the "
            "same model arguments for both, and draws of shape (num_samples, *site shape)"
        )
    dtype = torch.promote_types(x.dtype, y.dtype)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    x, y = (value.detach().to(device=y.device, dtype=dtype) for value in (x, y))
    for side, value in (("guide", x), ("reference", y)):
        bad = int((~value.isfinite()).reshape(len(value), -1).any(dim=-1).sum())
        if bad:
            raise ValueError(
                f"site {name!r}: {bad} of {len(value)} draws of the {side} are not finite. Cure: "
                "look for a diverged fit, or leave the site out of a dict of draws"
            )
    return x, y


def chains_of(source: Any, site_dims: Mapping[str, int]) -> dict[str, Tensor] | None:
    """Return draws by chain, ``(num_chains, num_draws, *site_shape)``, or None if the chains are
    unknown.

    :param source: what has ``get_samples(group_by_chain=True)``, or a dict.
    :param site_dims: number of dimensions of each site's values: a dict of draws with one dimension
        more has chains.
    """
    if isinstance(source, Mapping):
        common = [name for name in source if name in site_dims]
        grouped = bool(common) and all(
            source[name].dim() == site_dims[name] + 2 and source[name].shape[1] >= CHAINS.least_kept
            for name in common
        )
        return dict(source) if grouped else None
    with suppress(TypeError, ValueError):  # of no signature
        if "group_by_chain" in inspect.signature(source.get_samples).parameters:
            return dict(source.get_samples(group_by_chain=True))
    return None


def check_mixing(
    draws: Mapping[str, Tensor], chains: Mapping[str, Tensor] | None, source: Any
) -> ReferenceCheck:
    """Return effective sample size and R-hat of the worst coordinates.

    **Example:**

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(4, 200) + torch.tensor([0.0, 0.0, 0.0, 5.0]).unsqueeze(-1)
    >>> found = check_mixing({"x": x.flatten()}, {"x": x}, None)
    >>> next(found.faults())
    'R-hat 2.49 of `x`'

    :param draws: draws by site, ``(num_draws, *site_shape)``, in the order of the chain or chains.
    :param chains: the same with their chains apart.
    :param source: that they are from.
    """
    found = ReferenceCheck(settled=isinstance(source, Refined) and source.settled)
    labels, sizes, r_hats = [], [], []
    for name, whole in draws.items():
        value = whole.unsqueeze(0) if chains is None else chains[name]
        if not value.is_floating_point() or value.shape[1] < CHAINS.least_kept:
            continue
        value = value.detach().double().reshape(*value.shape[:2], -1)
        moves = value.flatten(0, 1).std(0) > 0
        if not moves.any():
            continue
        named = zip(element_labels(name, whole.shape[1:]), moves, strict=True)
        labels += [label for label, moved in named if moved]
        value = value[..., moves]
        sizes.append(effective_sample_size(value).nan_to_num(math.inf, math.inf))
        if chains is not None:
            r_hats.append(split_gelman_rubin(value).nan_to_num(1.0))
    if r_hats:
        r_hat, worst = torch.cat(r_hats).max(0)
        found = replace(found, r_hat=r_hat.item(), worst_r_hat=labels[int(worst)])
    if sizes:
        # Variances add up over coordinates, and the variance of a mean goes as 1 / size.
        inverse = 1 / torch.cat(sizes).clamp(1, len(next(iter(draws.values()))))
        found = replace(found, independent_draws=1 / inverse.mean().item())
        size, worst = torch.cat(sizes).min(0)
        if size.isfinite():
            found = replace(found, effective_sample_size=size.item(), worst_ess=labels[int(worst)])
    return found


@torch.no_grad()
def missing_mass(
    target: Target,
    guide: Any,
    guide_draws: Mapping[str, Tensor],
    reference_draws: Mapping[str, Tensor],
    policy: ComparePolicy = COMPARE,
) -> float:
    """Estimate the posterior mass of regions with draws of the guide and none of the reference.

    A draw is far if its distance to the nearest draw of the reference is twice the 99 % quantile of
    the reference's own distances. Reliable importance weights of the guide give the mass of far
    draws. Without such weights, it is the share of the guide's draws that are far and have a
    log-density above the reference's 5 % quantile.

    :param target: the posterior.
    :param guide: a guide, or its draws.
    :param guide_draws: draws by site, ``(num_draws, *site_shape)``.
    :param reference_draws: likewise.
    :param policy: with fewer far draws than its ``least_mass``, the mass counts as 0.
    :raises ValueError: if one side lacks a latent variable.
    """
    for draws in (guide_draws, reference_draws):
        refuse_missing_sites("one side has", target.shapes, draws, "draws")
    with same_streams():
        reference = target.unconstrain(_some(reference_draws))
        found = target.unconstrain(_some(guide_draws))
        frame = _Neighbours(reference)
        far = frame.are_far(found)
        if far.double().mean() < policy.least_mass:
            return 0.0
        by_weights = _weighted_share(Sampler(target, guide), frame)
        if by_weights is not None:
            return by_weights
        limit = target.log_prob(reference).quantile(REFERENCE.typical)
        return (far & (target.log_prob(found) > limit)).double().mean().item()


class _Neighbours:
    def __init__(self, points: Tensor) -> None:
        points = points.double()
        self.center, sd = points.mean(0), points.std(0)
        self.scale = torch.where(sd > 0, sd, torch.ones_like(sd))
        self.points = self._standard(points)
        own = pairwise_distances(self.points, self.points).fill_diagonal_(math.inf).amin(-1)
        self.limit = REFERENCE.far * own.quantile(0.99)

    def _standard(self, points: Tensor) -> Tensor:
        return (points.double() - self.center) / self.scale

    def are_far(self, points: Tensor) -> Tensor:
        return pairwise_distances(self._standard(points), self.points).amin(-1) > self.limit


def _weighted_share(sampler: Sampler, frame: _Neighbours) -> float | None:
    if not callable(sampler.guide) or isinstance(sampler.guide, StoredDraws):
        return None
    try:
        weighted = weighted_draws(sampler.target, sampler.guide, num_samples=CHECKS.pairwise_draws)
    except ValueError:  # no density
        return None
    weights = LogWeights(weighted.log_weights)
    if weights.khat > VERDICT.khat.distrust and weights.efficiency < VERDICT.good_weights:
        return None
    return weights.shares[frame.are_far(sampler.target.unconstrain(weighted.draws))].sum().item()


def _some(draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    count = len(next(iter(draws.values())))
    return {name: value[:: -(-count // CHECKS.pairwise_draws)] for name, value in draws.items()}
