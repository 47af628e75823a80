# SPDX-License-Identifier: Apache-2.0
"""Draws for ArviZ 0.2x and 1.x, with the data, the log-likelihood and predictions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.infer import Predictive
from torch import Tensor

from pyro_implicit.density.model import refuse_subsampling
from pyro_implicit.density.target import Target
from pyro_implicit.runtime.sites import is_data, is_flat

__all__ = ["ArvizExport", "as_datatree", "as_inferencedata", "joined", "model_groups"]


Draws = Mapping[str, Tensor]
Groups = dict[str, Draws]
#: The model, its arguments and its keyword arguments.
Source = tuple[Any, tuple, dict[str, Any]]


class ArvizExport:
    """What results with ``get_samples`` offer to ArviZ."""

    get_samples: Callable[..., dict[str, Tensor]]

    def to_datatree(
        self,
        model: Callable[..., Any] | None = None,
        *args: Any,
        log_likelihood: bool = False,
        posterior_predictive: bool = False,
        prior: int | None = None,
        num_chains: int | None = 4,
        coords: Mapping[str, Any] | None = None,
        dims: Mapping[str, Any] | None = None,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The draws as an xarray ``DataTree`` in ArviZ's layout.

        Of ArviZ 1.x all functions take it; those of 0.x take :meth:`to_inferencedata`.

        More than ``num_chains`` chains are joined, one after the other, into that many long ones.
        ArviZ's effective sample size is then right; of hundreds of short chains apart it is not,
        and its R-hat measures their length, not their convergence (``drift`` and ``settled`` do).

        :param model: with its ``args`` and ``kwargs``, for any of the groups that follow; with one
            of them ``observed_data`` comes as well.
        :param log_likelihood: of each observation, for ``arviz.loo``. All data are needed. A masked
            observation has 0: ``arviz.loo`` has the right sum, but counts it as a row.
        :param posterior_predictive: a replica of the data for each draw, by Pyro's ``Predictive``,
            one draw at a time; discrete latents are drawn anew.
        :param prior: so many draws of the prior, with the data that they predict.
        :param num_chains: at most so many chains, with all draws but fewer than ``num_chains``;
            None for all chains apart.
        :param coords: of dimensions, as ArviZ's ``from_dict`` takes them.
        :param dims: names of the dimensions of sites, as there.
        :param model_kwargs: more keyword arguments of the model, whatever their names.
        :raises ImportError: without ArviZ.
        :raises ValueError: for groups that need a model or data without them, a log-likelihood that
            is summed over discrete latents, or draws of a flat prior.
        :raises SubsampledError: for these groups of a model that subsamples its data.
        """
        source = (model, args, {**kwargs, **(model_kwargs or {})})
        posterior = joined(self.get_samples(group_by_chain=True), num_chains)
        groups = model_groups(posterior, source, log_likelihood, posterior_predictive, prior)
        return as_datatree(groups, coords, dims)

    def to_inferencedata(self, *args: Any, **kwargs: Any) -> Any:
        """The same as an ``InferenceData`` of ArviZ 0.x.

        :param args: of :meth:`to_datatree`, as ``kwargs``.
        :raises ImportError: without ArviZ 0.x.
        """
        return as_inferencedata(self.to_datatree(*args, **kwargs))


def joined(draws: Draws, num_chains: int | None) -> Draws:
    """Join chains, one after the other, into fewer long ones.

    Each long chain takes every ``num_chains``-th chain, as neighbours may have come from one mode.

    **Example:**

    >>> joined({"x": torch.arange(6.0).view(3, 2)}, 2)["x"]
    tensor([[0., 1., 4.],
            [5., 2., 3.]])

    :param draws: by site, ``(num_chains, num_draws, *site_shape)``.
    :param num_chains: at most so many; None for all.
    :raises ValueError: for a number of chains that is not positive.
    """
    if num_chains is None:
        return draws
    if num_chains < 1:
        raise ValueError(f"num_chains must be at least 1, or None for all, but got {num_chains}")
    count = len(next(iter(draws.values())))
    if count <= num_chains:
        return draws
    order = torch.cat([torch.arange(first, count, num_chains) for first in range(num_chains)])

    def join(value: Tensor) -> Tensor:
        flat = value[order.to(value.device)].flatten(0, 1)
        return flat[: len(flat) // num_chains * num_chains].unflatten(0, (num_chains, -1))

    return {name: join(value) for name, value in draws.items()}


@torch.no_grad()
def model_groups(
    posterior: Draws,
    source: Source,
    log_likelihood: bool = False,
    posterior_predictive: bool = False,
    prior: int | None = None,
) -> Groups:
    """Draws, and what their model says of them, by the names of ArviZ's groups.

    :param posterior: by site, ``(num_chains, num_draws, *site_shape)``.
    :param source: the model, its arguments and its keyword arguments, if any group needs them.
    :param log_likelihood: as for :meth:`ArvizExport.to_datatree`, and so the others.
    """
    groups: Groups = {"posterior": posterior}
    wanted = [
        name
        for name, value in (
            ("log_likelihood", log_likelihood),
            ("posterior_predictive", posterior_predictive),
            ("prior", prior is not None),
        )
        if value
    ]
    if not wanted:
        return groups
    model, args, kwargs = source
    if model is None:
        raise ValueError(
            f"{wanted[0]} needs the model and its data. Cure: to_datatree(model, *args, "
            f"{wanted[0]}=...)"
        )
    lead = next(iter(posterior.values())).shape[:2]
    draws = {name: value.flatten(0, 1) for name, value in posterior.items()}
    one = {name: value[0] for name, value in draws.items()}
    with poutine.block():
        trace = poutine.trace(poutine.condition(model, one)).get_trace(*args, **kwargs)
    refuse_subsampling(trace, "an export to ArviZ with the model's data")
    latents = [name for name in one if name in trace.nodes]
    sites = {name: site for name, site in trace.nodes.items() if name not in one}
    observed = [name for name, site in sites.items() if is_data(site, factors=False)]
    if not observed and wanted != ["prior"]:
        raise ValueError(
            f"{wanted[0]} needs observations, but the model observes nothing by pyro.sample(..., "
            "obs=...): what pyro.factor adds is no density of data. Cure: an observed site"
        )

    def chains(values: Draws) -> Draws:
        return {name: value.unflatten(0, lead) for name, value in values.items()}

    if observed:
        groups["observed_data"] = {name: trace.nodes[name]["value"] for name in observed}
    if log_likelihood:
        density = Target(model, *args, model_kwargs=kwargs)
        groups["log_likelihood"] = chains(density.log_likelihood(draws, observed))
    # Where Predictive wants a draw of its own, for shapes, it takes the first: priors may be flat.
    replica = poutine.uncondition(model)
    shapes = {name: trace.nodes[name]["value"].shape for name in (*observed, *latents)}
    if posterior_predictive:
        predictive = Predictive(poutine.condition(replica, one), draws, return_sites=observed)
        found = predictive(*args, **kwargs)
        groups["posterior_predictive"] = chains(_shaped(found, shapes))
    if prior is not None:
        found = _prior(replica, prior, list(shapes), trace)(*args, **kwargs)
        found = {name: value.unsqueeze(0) for name, value in _shaped(found, shapes).items()}
        groups["prior"] = {name: found[name] for name in latents}
        if observed:
            groups["prior_predictive"] = {name: found[name] for name in observed}
    return groups


def as_datatree(
    groups: Groups,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, Any] | None = None,
) -> Any:
    """Groups of arrays as an xarray ``DataTree``, by the ArviZ that is installed.

    :param groups: by group and variable, ``(num_chains, num_draws, *shape)``; of ``observed_data``
        without chains and draws.
    :param coords: as for :meth:`ArvizExport.to_datatree`, as ``dims``.
    :raises ImportError: without ArviZ.
    """
    arviz = _arviz()
    arrays = {
        group: {name: value.detach().cpu().numpy() for name, value in values.items()}
        for group, values in groups.items()
    }
    # Many short chains are meant: no warning of more chains than draws.
    if not _is_old(arviz):
        return arviz.from_dict(arrays, coords=coords, dims=dims, check_conventions=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "More chains")
        return arviz.from_dict(**arrays, coords=coords, dims=dims).to_datatree()


def as_inferencedata(tree: Any) -> Any:
    """A ``DataTree`` as the ``InferenceData`` that functions of ArviZ 0.x take.

    :raises ImportError: without ArviZ 0.x.
    """
    arviz = _arviz()
    if not _is_old(arviz):
        raise ImportError(
            f"ArviZ {arviz.__version__} has no InferenceData. Cure: to_datatree(), which all its "
            "functions take, or pip install 'arviz<1'"
        )
    return arviz.from_datatree(tree)


def _is_old(arviz: Any) -> bool:
    return int(arviz.__version__.split(".")[0]) < 1


def _arviz() -> Any:
    try:
        import arviz
    except ImportError as error:
        raise ImportError(
            f"ArviZ is needed for this, and it cannot be imported ({error}). Cure: "
            "pip install 'pyro-implicit[arviz]'"
        ) from error
    return arviz


def _prior(model: Callable[..., Any], number: int, sites: list[str], trace: Any) -> Predictive:
    for name in sites:
        if is_flat(trace.nodes[name]["fn"]):
            raise ValueError(
                f"the prior of site '{name}' is flat (ImproperUniform) and has no draws. Cure: "
                "leave out prior=, or give it a proper prior"
            )
    return Predictive(model, num_samples=number, return_sites=sites)


def _shaped(values: Draws, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Without the singleton dimensions that Predictive puts where plates would be."""
    return {name: value.reshape(len(value), *shapes[name]) for name, value in values.items()}
