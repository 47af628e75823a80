# SPDX-License-Identifier: Apache-2.0
"""Draws for ArviZ 0.2x and 1.x, with the data, the log-likelihood and predictions."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine
from pyro.infer import Predictive
from torch import Tensor

from pyro_implicit.density.model import refuse_subsampling
from pyro_implicit.density.target import Target
from pyro_implicit.runtime.global_state import with_seed
from pyro_implicit.runtime.sites import QuietPriors, is_data, is_flat, without_data

__all__ = [
    "ArvizExport",
    "as_datatree",
    "as_inferencedata",
    "import_arviz",
    "joined",
    "model_groups",
    "quiet_arviz",
]


Draws = Mapping[str, Tensor]
Groups = dict[str, Draws]
#: The model, its arguments and its keyword arguments.
Source = tuple[Any, tuple, dict[str, Any]]


class ArvizExport:
    """Export to ArviZ for results with ``get_samples``."""

    get_samples: Callable[..., dict[str, Tensor]]

    @with_seed
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
        seed: int | None = None,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the draws as an xarray ``DataTree`` in ArviZ's layout.

        All functions of ArviZ 1.x accept it; for ArviZ 0.x, call :meth:`to_inferencedata`.

        If there are more than ``num_chains`` chains, they are joined into ``num_chains`` long ones.
        ArviZ's effective sample size is then correct. For hundreds of separate short chains it is
        not, and ArviZ's R-hat measures their length, not their convergence (see ``drift`` and
        ``settled``).

        :param model: the model with its ``args`` and ``kwargs``, needed for each of the following
            groups; ``observed_data`` is then exported, too.
        :param log_likelihood: whether to export the log-likelihood of each observation, for
            ``arviz.loo``. It needs all data. A masked observation has 0: the sum of ``arviz.loo``
            is correct, but its number of rows includes masked ones.
        :param posterior_predictive: whether to export a replica of the data for each draw, by
            Pyro's ``Predictive``, one draw at a time; discrete latents are drawn again.
        :param prior: the number of draws of the prior, exported with the data that they predict.
        :param num_chains: the maximal number of chains; fewer than ``num_chains`` draws are left
            out. None exports all chains separately.
        :param coords: coordinates of dimensions, as for ArviZ's ``from_dict``. A slash in the name
            of a site becomes a dot.
        :param dims: names of the dimensions of sites, likewise.
        :param seed: the seed of all random numbers of this call. The caller's random streams do not
            advance; without a seed they are used.
        :param model_kwargs: keyword arguments of the model of any name.
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
        """Return the draws as an ``InferenceData`` of ArviZ 0.x.

        :param args: arguments of :meth:`to_datatree`; ``kwargs`` likewise.
        :raises ImportError: without ArviZ 0.x.
        """
        return as_inferencedata(self.to_datatree(*args, **kwargs))


def joined(draws: Draws, num_chains: int | None) -> Draws:
    """Join chains into fewer long ones.

    The chains are joined in a random order, which is always the same: neighbours may be of one
    mode, and a long chain that visits one mode after the other would seem to mix badly.

    **Example:**

    >>> joined({"x": torch.arange(6.0).view(3, 2)}, 2)["x"]
    tensor([[4., 5., 0.],
            [1., 2., 3.]])

    :param draws: draws by site, ``(num_chains, num_draws, *site_shape)``.
    :param num_chains: the maximal number of chains; None for all.
    :raises ValueError: for a number of chains that is not positive.
    """
    if num_chains is None:
        return draws
    if num_chains < 1:
        raise ValueError(f"num_chains must be at least 1, or None for all, but got {num_chains}")
    count = len(next(iter(draws.values())))
    if count <= num_chains:
        return draws
    generator = torch.Generator(device="cpu").manual_seed(0)
    order = torch.randperm(count, generator=generator, device="cpu")

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
    """Return the groups of ArviZ: draws, and what their model computes from them.

    :param posterior: draws by site, ``(num_chains, num_draws, *site_shape)``.
    :param source: the model, its arguments and its keyword arguments, if any group needs them.
    :param log_likelihood: as for :meth:`ArvizExport.to_datatree`, like the other arguments.
    """
    groups: Groups = {"posterior": posterior}
    options = {
        "log_likelihood": log_likelihood,
        "posterior_predictive": posterior_predictive,
        "prior": prior is not None,
    }
    wanted = [name for name, is_wanted in options.items() if is_wanted]
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
            "obs=...): pyro.factor adds no density of data. Cure: an observed site"
        )

    def chains(values: Draws) -> Draws:
        return {name: value.unflatten(0, lead) for name, value in values.items()}

    if observed:
        groups["observed_data"] = {name: trace.nodes[name]["value"] for name in observed}
    if log_likelihood:
        density = Target(model, *args, model_kwargs=kwargs, sample_discrete=True)
        groups["log_likelihood"] = chains(density.log_likelihood(draws, observed))
    # If Predictive needs a draw for shapes, it gets the first one: priors may be flat.
    replica = without_data(model)
    shapes = {name: trace.nodes[name]["value"].shape for name in (*observed, *latents)}
    if posterior_predictive:
        predictive = Predictive(poutine.condition(replica, one), draws, return_sites=observed)
        found = predictive(*args, **kwargs)
        groups["posterior_predictive"] = chains(_shaped(found, shapes))
    if prior is not None:
        found = _prior(QuietPriors()(replica), prior, list(shapes), trace)(*args, **kwargs)
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
    arviz = import_arviz()
    arrays = {
        group: {_in_tree(name): value.detach().cpu().numpy() for name, value in values.items()}
        for group, values in groups.items()
    }
    dims = None if dims is None else {_in_tree(name): value for name, value in dims.items()}
    # Many short chains are meant: no warning of more chains than draws.
    if not _is_old(arviz):
        return arviz.from_dict(arrays, coords=coords, dims=dims, check_conventions=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "More chains")
        return arviz.from_dict(**arrays, coords=coords, dims=dims).to_datatree()


def _in_tree(name: str) -> str:
    return name.replace("/", ".")  # in a DataTree a slash separates groups


def as_inferencedata(tree: Any) -> Any:
    """A ``DataTree`` as the ``InferenceData`` that functions of ArviZ 0.x take.

    :raises ImportError: without ArviZ 0.x.
    """
    arviz = import_arviz()
    if not _is_old(arviz):
        raise ImportError(
            f"ArviZ {arviz.__version__} has no InferenceData. Cure: to_datatree(), which all its "
            "functions take, or pip install 'arviz<1'"
        )
    return arviz.from_datatree(tree)


def _is_old(arviz: Any) -> bool:
    return int(arviz.__version__.split(".")[0]) < 1


def import_arviz() -> Any:
    """Import ArviZ.

    :raises ImportError: without ArviZ, with the cure.
    """
    try:
        import arviz
    except ImportError as error:
        raise ImportError(
            f"ArviZ is needed for this, and it cannot be imported ({error}). Cure: "
            "pip install 'pyro-implicit[arviz]'"
        ) from error
    return arviz


@contextmanager
def quiet_arviz() -> Iterator[Any]:
    """Import ArviZ, without its warnings of k-hat, of its use of pandas, and of entries that are
    constant, such as those above the diagonal of a Cholesky factor.

    :raises ImportError: without ArviZ, with the cure.
    """
    arviz, disabled = import_arviz(), logging.root.manager.disable
    logging.disable(logging.WARNING)  # a single chain has no R-hat
    with warnings.catch_warnings():
        for category in (UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning):
            warnings.simplefilter("ignore", category)
        try:
            yield arviz
        finally:
            logging.disable(disabled)


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
