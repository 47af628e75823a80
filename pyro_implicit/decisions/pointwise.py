# SPDX-License-Identifier: Apache-2.0
"""Posterior draws with the log-likelihood of each observation; models with weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.labels import element_labels
from pyro_implicit.density.model import trace_model
from pyro_implicit.density.policy import RUNS
from pyro_implicit.density.target import Target
from pyro_implicit.runtime.messages import short_repr, warn_user
from pyro_implicit.runtime.sites import Site, is_data, unmasked_elements

__all__ = [
    "ObservedSite",
    "Pointwise",
    "WeightedObservations",
    "observation_columns",
    "observed_sites",
    "refuse_point",
]


@dataclass(frozen=True, eq=False)
class ObservedSite:
    """An observed site of a model.

    :ivar value: the data, ``(*batch_shape, *event_shape)``.
    :ivar used: ``(*batch_shape)``, which observations no mask leaves out.
    :ivar is_discrete: whether its distribution is discrete.
    """

    value: Tensor
    used: Tensor
    is_discrete: bool

    @staticmethod
    def of(site: Site) -> ObservedSite:
        """Read an observed site of a trace."""
        fn = site["fn"]
        used = unmasked_elements(site).reshape(*fn.batch_shape, -1).any(-1)
        return ObservedSite(site["value"], used, bool(fn.support.is_discrete))

    @property
    def events(self) -> Tensor:
        """The values of the observations in use, ``(num_observations, *event_shape)``."""
        return self.value[self.used]


def observed_sites(target: Target, draws: Mapping[str, Tensor]) -> dict[str, ObservedSite]:
    """Return the observed sites of a model, sorted by their names, as in other models.

    :param target: the posterior.
    :param draws: draws by site, ``(num_draws, *site_shape)``; the first draw is used.
    :raises ValueError: for a model without observed sites, or whose continuous data are constant.
    """
    found = {
        name: ObservedSite.of(site)
        for name, site in _trace_at_first(target, draws).nodes.items()
        if name not in target.shapes and is_data(site, factors=False)
    }
    if not found:
        raise ValueError(
            "the model observes nothing by pyro.sample(..., obs=...), so that no observation has a "
            "log-likelihood (pyro.factor adds no density of data). Cure: an observed site"
        )
    found = {name: found[name] for name in sorted(found, key=_by_name)}
    for name, site in found.items():
        events = site.events
        if not site.is_discrete and len(events) > 1 and (events == events[0]).all():
            raise ValueError(
                f"all {len(events)} observations of site '{name}' are equal, so that no continuous "
                "distribution describes them. Cure: check how the data were read, or remove the "
                "site"
            )
    return found


def _trace_at_first(target: Target, draws: Mapping[str, Tensor]) -> Trace:
    model = poutine.condition(target.model, {name: draws[name][0] for name in target.shapes})
    return trace_model(model, target.args, target.kwargs)


def _warn_of_factors(target: Target, draws: Mapping[str, Tensor]) -> None:
    """Warn of factors in plates, which may be rows of data, such as censored ones."""
    for name, site in _trace_at_first(target, draws).nodes.items():
        if not is_data(site) or is_data(site, factors=False) or not site["cond_indep_stack"]:
            continue
        number = int(unmasked_elements(site).sum())
        warn_user(
            f"the {number} elements of the pyro.factor '{name}' are left out, as they are no "
            "observations with a distribution; the posterior and the log evidence include them. "
            "Cure: an observed site, for instance pyro.sample(name, dist.Bernoulli(probability of "
            "survival), obs=1.0) for censored rows"
        )


def _by_name(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names, and numbers in them by value: ``y_2`` before ``y_10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]


_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, eq=False, repr=False)
class Pointwise:
    """Posterior draws with the log-likelihood of each observation.

    :ivar draws: by site, ``(num_chains, num_draws, *site_shape)``.
    :ivar log_likelihood: ``(num_chains, num_draws, num_observations)`` in float64: the observations
        of all sites that no mask leaves out.
    :ivar labels: the names of the observations, such as ``"y[3]"``.
    :ivar sites: the observed sites.
    :ivar places: the places of these observations among all of the sites, ``(num_observations,)``.
    """

    draws: dict[str, Tensor]
    log_likelihood: Tensor
    labels: tuple[str, ...]
    sites: dict[str, ObservedSite]
    places: Tensor
    __repr__ = short_repr

    @staticmethod
    def of(
        target: Target,
        draws: Mapping[str, Tensor],
        places: Tensor | None = None,
        scaled: bool = True,
    ) -> Pointwise:
        """Compute the log-likelihood of each observation at each draw.

        :param target: the posterior of all data.
        :param draws: draws by site, ``(num_chains, num_draws, *site_shape)``.
        :param places: places of the observations to compute, by default all,
            ``(num_observations,)``.
        :param scaled: see :meth:`Target.log_likelihood`.
        :raises ValueError: for draws that are all one point, observations that depend on discrete
            latent variables, and log-likelihoods that are not finite.
        :warns UserWarning: for each ``pyro.factor`` in a plate, whose elements are left out.
        """
        refuse_point(draws)
        lead = next(iter(draws.values())).shape[:2]
        flat = {name: value.flatten(0, 1) for name, value in draws.items()}
        sites, parts = observed_sites(target, flat), []
        _warn_of_factors(target, flat)
        for start in range(0, lead.numel(), RUNS.draws_at_once):
            some = {k: value[start : start + RUNS.draws_at_once] for k, value in flat.items()}
            part = observation_columns(target.log_likelihood(some, list(sites), scaled), sites)
            parts.append(part if places is None else part[:, places])
        values = torch.cat(parts)
        labels = [
            label
            for name, site in sites.items()
            for label, used in zip(
                element_labels(name, site.used.shape), site.used.flatten().tolist(), strict=True
            )
            if used
        ]
        if places is None:
            places = torch.arange(len(labels), device="cpu")
        labels = [labels[place] for place in places.tolist()]
        lost = (~values.isfinite()).sum(0)
        if lost.any():
            worst = int(lost.argmax())
            raise ValueError(
                f"observation {labels[worst]} has a log-likelihood that is not finite at "
                f"{int(lost[worst])} of {len(values)} draws. Cure: a finite weight "
                "(poutine.scale), data inside of the support, or a mask for this observation"
            )
        return Pointwise(dict(draws), values.unflatten(0, lead), tuple(labels), sites, places)

    def weights_with(self, index: Tensor, weight: float) -> dict[str, Tensor]:
        """Return weights of all observations: 1, and another one for some.

        :param index: the places of these observations.
        :returns: by observed site, ``(*batch_shape)``.
        """
        sizes = [int(site.used.sum()) for site in self.sites.values()]
        every = torch.ones(sum(sizes), dtype=torch.float64, device="cpu")
        every[self.places[index.cpu()]] = weight
        found = {name: site.used.double() for name, site in self.sites.items()}
        for (name, site), part in zip(self.sites.items(), every.split(sizes), strict=True):
            found[name][site.used] = part.to(site.used.device)
        return found


def observation_columns(
    log_likelihood: Mapping[str, Tensor], sites: Mapping[str, ObservedSite]
) -> Tensor:
    """Return the log-likelihood of all observations in use, on the CPU, where ArviZ reads it.

    :returns: ``(num_draws, num_observations)`` in float64.
    :param log_likelihood: by observed site, ``(num_draws, *batch_shape)``.
    """
    return torch.cat([log_likelihood[n][:, s.used].double().cpu() for n, s in sites.items()], -1)


def refuse_point(draws: Mapping[str, Tensor]) -> None:
    """Check that the draws of a posterior differ.

    :param draws: draws by site, ``(num_chains, num_draws, *site_shape)``.
    """
    if all((value == value[:1, :1]).all() for value in draws.values()):
        raise ValueError(
            f"the result has no posterior draws: all values of '{next(iter(draws))}' are equal, as "
            'of a point guide (AutoDelta). Cure: fit(model, "auto", ...), or refine the result'
        )


class WeightedObservations:
    """A model with weights of its observations; it can be pickled if the model can.

    **Example:**

    >>> import pyro, pyro.distributions as dist
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("rows", len(y)):
    ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> first = WeightedObservations(model, {"y": torch.tensor([1.0, 0.0])})
    >>> Target(first, torch.tensor([0.0, float("inf")])).log_prob(torch.zeros(1, 1))
    tensor([-1.8379])

    :param model: a Pyro model.
    :param weights: by observed site, the factors of the log-likelihoods, ``(*batch_shape)``.
        Observations of weight 0 are masked.
    """

    def __init__(self, model: Callable[..., Any], weights: Mapping[str, Tensor]) -> None:
        self.model, self.weights = model, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        with _Weigh(self.weights):
            return self.model(*args, **kwargs)


class _Weigh(Messenger):
    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._weights = weights

    def _pyro_sample(self, msg: Any) -> None:
        weight = self._weights.get(msg["name"])
        if weight is not None and msg["is_observed"]:
            mask = weight > 0
            msg["mask"] = mask if msg["mask"] is None else msg["mask"] & mask
            if ((weight != 0) & (weight != 1)).any():
                msg["scale"] = msg["scale"] * weight.where(mask, 1.0).float()
