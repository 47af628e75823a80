# SPDX-License-Identifier: Apache-2.0
"""A model with its data, run at given values of its latent variables."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from opt_einsum import shared_intermediates
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.infer.util import is_validation_enabled
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.packed import broadcast_all, pack, scale_and_mask, unpack
from pyro.ops.rings import LogRing
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    TransformedDistribution,
    biject_to,
    constraints,
)

from pyro_implicit.density.policy import DISCRETE
from pyro_implicit.density.run_mode import active_mode, log_prob_in_each_run
from pyro_implicit.runtime.sites import (
    QuietPriors,
    Site,
    innermost,
    innermost_support,
    is_discrete_latent,
    is_latent,
)
from pyro_implicit.runtime.trees import map_tree

__all__ = [
    "DiscreteSum",
    "Model",
    "SubsampledError",
    "UnfitModelError",
    "compute_log_prob",
    "converted",
    "log_likelihood_of",
    "restore_priors",
    "total_log_prob",
    "trace_model",
]

Values = dict[str, Tensor]

#: The errors that a model raises where the values of its latent variables are impossible.
IMPOSSIBLE = (ValueError, ArithmeticError, RuntimeError, AssertionError, IndexError)


class SubsampledError(ValueError):
    """All data are needed, but the model or the guide subsamples them."""


class UnfitModelError(ValueError):
    """A model has no log-density of fixed latent variables, whatever their values."""


class Model:
    """A Pyro model with its data, to be run at given values of its latent variables.

    :param model: the Pyro model.
    :param args: its positional arguments; ``kwargs`` are keyword arguments.
    :param latents: the sites whose values will be given, and subsampled indices that are fixed.
    :param discrete: the sum over discrete latent variables, if any.
    :ivar is_wide: whether values of latent variables are converted to double precision.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        latents: Trace,
        discrete: DiscreteSum | None = None,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.replayed = latents
        self.discrete = discrete
        self.is_wide = False
        #: The last site that a run came to, or ``_RETURN`` if it came to its end.
        self.last_site: str | None = None

    def on(self, args: tuple, kwargs: dict[str, Any], names: Iterable[str]) -> Model:
        """Return the same model with other arguments, which draws its subsampled indices anew.

        :param names: names of the latent variables.
        """
        latents = Trace()
        for name in names:
            latents.add_node(name, **self.replayed.nodes[name])
        found = Model(self.model, args, kwargs, latents, self.discrete)
        return found.in_double() if self.is_wide else found

    def in_double(self) -> Model:
        """Return the same model that gets its arguments and latent values in double precision."""
        args, kwargs = converted((self.args, self.kwargs), torch.float64)
        wide = Model(self.model, args, kwargs, self.replayed, self.discrete)
        wide.is_wide = True
        return wide

    def run(self, values: Values) -> Trace:
        """Return the trace of one run.

        Log-probabilities are not computed yet, unless discrete latent variables are summed out.
        """
        for name, value in (converted(values, torch.float64) if self.is_wide else values).items():
            self.replayed.nodes[name]["value"] = value
        model = self.model if self.discrete is None else self.discrete.enumerate(self.model)
        tracer = poutine.trace(poutine.replay(model, trace=self.replayed))
        try:
            trace = tracer.get_trace(*self.args, **self.kwargs)
        finally:
            self.last_site = next(reversed(tracer.trace.nodes), None)
        restore_priors(trace)
        checks, mode = is_validation_enabled(), active_mode.get()
        for site in trace.nodes.values():
            if site["type"] != "sample":
                continue
            # Inline, as this is the inner loop of every training: most sites need no change.
            fn, masks, validates = site["fn"], isinstance(site["mask"], Tensor), False
            parts = [fn]
            for part in parts:
                masks = masks or isinstance(part, dist.MaskedDistribution)
                validates = validates or getattr(part, "_validate_args", False)
                if isinstance(part, TransformedDistribution):
                    validates = validates or not isinstance(
                        part.base_dist, torch.distributions.Normal
                    )
                for inner in vars(part).values():
                    if isinstance(inner, Distribution):
                        parts.append(inner)
            if masks and site["is_observed"]:
                site["value"] = replace_masked(fn, site["value"], site["mask"])
            if checks:
                continue
            if validates:
                fn = site["fn"] = without_validation(fn)
            if mode is not None or isinstance(fn, dist.DiscreteHMM):
                site["fn"] = copy.copy(fn)
                site["fn"].log_prob = functools.partial(log_prob_in_each_run, fn)
        return trace if self.discrete is None else self.discrete.collapse(trace)

    def share_minibatch(self, trace: Trace) -> None:
        """Make all later runs use the subsampled indices of ``trace``."""
        for name, site in trace.nodes.items():
            if site["type"] == "sample" and site_is_subsample(site) and name not in self.replayed:
                self.replayed.add_node(name, **{**site, "is_observed": False})


def converted(tree: Any, dtype: torch.dtype) -> Any:
    """Return nested arguments or results with floating-point tensors of one dtype."""

    def convert(leaf: Any) -> Any:
        is_number = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_number else leaf

    return map_tree(convert, tree)


def trace_model(model: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Trace one run of the model, hidden from outer handlers."""
    with torch.no_grad(), poutine.block(), QuietPriors():
        return restore_priors(poutine.trace(model).get_trace(*args, **kwargs))


def compute_log_prob(trace: Trace) -> None:
    """Call ``trace.compute_log_prob()``; give flat priors the dtype and device of their latents."""
    trace.compute_log_prob()
    for site in trace.nodes.values():
        if site["type"] == "sample":
            fn = site["fn"]
            while hasattr(fn, "base_dist"):  # inline, as this is the inner loop of every training
                fn = fn.base_dist
            if isinstance(fn, dist.ImproperUniform):  # its zeros are float32 on the CPU
                for key in ("log_prob", "unscaled_log_prob", "log_prob_sum"):
                    site[key] = site[key].to(site["value"])


def total_log_prob(trace: Trace) -> Tensor:
    """Compute the log-probabilities of a trace, and return their sum."""
    compute_log_prob(trace)
    return torch.as_tensor(trace.log_prob_sum())


def varying_site(name: str) -> UnfitModelError:
    """Return the error for a site that only some runs of a model have."""
    return UnfitModelError(
        f"site '{name}' is in some runs of the model and not in others, so that there is no "
        "log-density of fixed latent variables. Cure: sample it always, and use torch.where or a "
        "mask where it has no effect"
    )


def refuse_subsampling(trace: Trace, what: str) -> None:
    """Check that a trace saw all data.

    :param what: what needs all data, for the message.
    :raises SubsampledError: naming plate, site and cure.
    """
    for name, site in trace.nodes.items():
        frame = subsampled_plate(site)
        if frame is not None:
            raise SubsampledError(
                f"{what} needs all data, but plate '{frame.name}' of site '{name}' subsamples "
                f"{frame.size} of {frame.full_size} elements. Cure: run the model without "
                "subsample_size"
            )


def subsampled_plate(site: Site) -> Any:
    """Return a plate of a site that subsamples; None if there is none."""
    for frame in site.get("cond_indep_stack", ()):
        if frame.full_size is not None and frame.full_size != frame.size:
            return frame
    return None


# Distributions without validation, and what it leaves to be done


def without_validation(fn: Any) -> Any:
    """Return a distribution that checks no values; ``fn`` itself if it has no such checks.

    Distributions that were made while validation was on go on checking, inside ``vmap``, too. A
    transformed distribution relies on these checks: without them, an ``Exponential`` moved by a
    latent variable has the more density the further the data lie on its wrong side. Its base gets
    density 0 outside of its support.

    **Example:**

    >>> fn = dist.TransformedDistribution(dist.Exponential(1.0), dist.transforms.ExpTransform())
    >>> without_validation(fn).log_prob(torch.tensor([0.5, 1.0]))
    tensor([-inf, 0.])
    """
    parts = {
        name: without_validation(part)
        for name, part in vars(fn).items()
        if isinstance(part, Distribution)
    }
    base = fn.base_dist if isinstance(fn, TransformedDistribution) else None
    restricts = base is not None and _is_bounded(base)
    changes = any(part is not vars(fn)[name] for name, part in parts.items())
    if not (getattr(fn, "_validate_args", False) or restricts or changes):
        return fn
    fn = copy.copy(fn)
    for name, part in parts.items():
        setattr(fn, name, part)
    fn._validate_args = False  # last: Pyro's Independent hands it on to its base
    if restricts:
        kind: Any = type(fn.base_dist)
        fn.base_dist = copy.copy(fn.base_dist)
        fn.base_dist.__class__ = _restricted_class(kind)
    return fn


def _is_bounded(base: Any) -> bool:
    try:
        inner = innermost_support(base.support)
    except (AttributeError, NotImplementedError):
        return False
    return not isinstance(inner, type(constraints.real)) and not hasattr(base, "_is_restricted")


@functools.cache
def _restricted_class(kind: Any) -> Any:
    def log_prob(self: Any, value: Tensor) -> Tensor:
        inside = self.support.check(value)
        return torch.where(inside, kind.log_prob(self, value), -torch.inf)

    return type(kind.__name__, (kind,), {"log_prob": log_prob, "_is_restricted": True})


def replace_masked(fn: Any, value: Tensor, mask: Any = None) -> Tensor:
    """Return an observation with possible values in place of the masked ones.

    Masked elements do not count, but the gradient of their density must be a number.

    **Example:**

    >>> fn = dist.LogNormal(torch.zeros(2), 1.0).mask(torch.tensor([True, False]))
    >>> replace_masked(fn, torch.tensor([3.0, 0.0]))
    tensor([3., 1.])

    :param fn: the distribution of a site.
    :param value: its value.
    :param mask: its mask, by a handler.
    """
    if isinstance(fn, dist.MaskedDistribution):
        value = replace_masked(fn.base_dist, value, fn._mask)
    elif isinstance(fn, Independent):
        value = replace_masked(fn.base_dist, value)
    if not (isinstance(mask, Tensor) and isinstance(value, Tensor) and value.is_floating_point()):
        return value
    try:
        transform = biject_to(fn.support)
        possible = transform(value.new_zeros(transform.inverse_shape(value.shape)))
    except NotImplementedError:  # counts
        possible = torch.zeros_like(value)
    return torch.where(mask.reshape(mask.shape + (1,) * len(fn.event_shape)), value, possible)


def restore_priors(trace: Trace) -> Trace:
    """Give all elements of the latent variables of ``obs_mask`` their prior, and return the trace.

    Pyro makes a latent variable of every row and masks the observed rows, which affect nothing
    else. Without a density they are improper; with their prior, the posterior of all other
    variables stays the same.

    **Example:**

    >>> import pyro
    >>> def model(y, mask):
    ...     with pyro.plate("rows", 2):
    ...         pyro.sample("y", dist.Normal(0.0, 1.0), obs=y, obs_mask=mask)
    >>> trace = poutine.trace(model).get_trace(torch.zeros(2), torch.tensor([True, False]))
    >>> restore_priors(trace).nodes["y_unobserved"]["mask"]
    tensor([True, True])
    """
    for name, site in trace.nodes.items():
        if name.endswith("_unobserved") and is_latent(site):
            observed = trace.nodes.get(f"{name.removesuffix('_unobserved')}_observed")
            if observed is not None and observed["is_observed"]:
                site["mask"] = site["mask"] | observed["mask"]
                site.pop("log_prob", None)  # of the masked rows
    return trace


def leave_out_masked(trace: Trace) -> None:
    """Replace the masked elements of all observations in a trace."""
    for site in trace.nodes.values():
        if site["type"] == "sample" and site["is_observed"]:
            site["value"] = replace_masked(site["fn"], site["value"], site["mask"])


# Discrete latent variables


def refuse_infinite(name: str, site: Site) -> None:
    """Check that a discrete latent variable can be summed out.

    :raises ValueError: naming site and cure.
    """
    fn = site["fn"]
    if not is_discrete_latent(site) or fn.has_enumerate_support:
        return
    cure = (
        "fit or refine with all data, which sample it; for an ELBO, a guide that has it; or sum it "
        "out by hand, by pyro.factor with a logsumexp"
    )
    if isinstance(fn, Independent) and fn.base_dist.has_enumerate_support:
        cure = "a plate instead of .to_event; its elements are then summed out one by one"
    raise ValueError(
        f"site '{name}' is a discrete latent ({type(innermost(fn)).__name__}) that Pyro cannot "
        f"enumerate, and it has no gradient. Cure: {cure}"
    )


class _KnownScope(Messenger):
    """Removes sites from the scope of ``pyro.markov`` that ``poutine.enum`` has not seen yet.

    A reparameterisation samples the noise of a site before the site itself reaches that handler,
    which would raise a ``KeyError``.
    """

    def __enter__(self) -> _KnownScope:
        self._known: set[str] = set()
        return super().__enter__()

    def _pyro_sample(self, msg: Any) -> None:
        if msg["done"] or not isinstance(msg["fn"], TorchDistributionMixin):
            return
        scope = msg["infer"].get("_markov_scope", {})
        for name in scope.keys() - self._known:
            del scope[name]
        self._known.add(msg["name"])


class DiscreteSum:
    """Sums discrete latent variables out of a model's log-density, by Pyro's enumeration.

    In a trace of the enumerated model, the discrete latent variables and the sites that depend on
    them are replaced by one factor: the logarithm of the sum over all of their values. It equals
    that of :class:`~pyro.infer.TraceEnum_ELBO`, for every model that Pyro can enumerate:
    assignments in a plate, hidden Markov models in :func:`pyro.markov`.

    **Example:**

    >>> import pyro
    >>> def model():
    ...     z = pyro.sample("z", dist.Bernoulli(0.5))
    ...     pyro.sample("y", dist.Normal(4 * z, 1.0), obs=torch.tensor(0.0))
    >>> summed = DiscreteSum.of(poutine.trace(model).get_trace())
    >>> trace = summed.collapse(poutine.trace(summed.enumerate(model)).get_trace())
    >>> trace.log_prob_sum()
    tensor(-1.6118)

    :param names: the sites to be summed out.
    :param max_plate_nesting: ``max_plate_nesting`` of the model.
    """

    def __init__(self, names: frozenset[str], max_plate_nesting: int) -> None:
        self.names, self.max_plate_nesting = names, max_plate_nesting

    @classmethod
    def of(cls, trace: Trace, given: Any = ()) -> DiscreteSum | None:
        """Return the sum over all discrete latent variables of a model; None if it has none.

        :param trace: trace of the model.
        :param given: sites that have a value of their own.
        :raises ValueError: for a site that cannot be summed out.
        """
        names, depth = set(), 0
        for name, site in trace.nodes.items():
            if site["type"] == "sample":
                dims = [-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized]
                depth = max(depth, *dims, 0)
            if is_discrete_latent(site) and name not in given:
                refuse_infinite(name, site)
                names.add(name)
        return cls(frozenset(names), depth) if names else None

    def enumerate(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model with all values of the discrete latent variables in parallel."""
        # By name, as a guide may have its own draws of other sites.
        configured = poutine.infer_config(model, self._config)
        in_order = _KnownScope()(configured)
        return poutine.enum(in_order, first_available_dim=-1 - self.max_plate_nesting)

    def _config(self, site: Site) -> dict[str, Any]:
        if site["name"] in self.names:
            return {"enumerate": "parallel", "expand": False}
        return {}

    def collapse(self, trace: Trace) -> Trace:
        """Return the trace with one factor for the sum.

        :param trace: trace of the enumerated model.
        :raises UnfitModelError: if the sites in the sum have different scales (of minibatches).
        """
        minibatches = {n: site for n, site in trace.nodes.items() if site_is_subsample(site)}
        trace = prune_subsample_sites(trace)
        trace.compute_log_prob()
        trace.pack_tensors()
        plates = set(trace.plate_to_symbol.values())
        sums = set(trace.symbol_to_dim) - plates
        terms: OrderedDict[frozenset, list[Tensor]] = OrderedDict()
        scales: dict[str, Any] = {}
        summed: dict[str, _SummedSite] = {}
        result = Trace()
        for name, site in minibatches.items():  # which further runs share
            result.add_node(name, **site)
        for name, site in trace.nodes.items():
            if site["type"] != "sample":
                result.add_node(name, **site)
                continue
            packed = site["packed"]
            if name not in self.names and sums.isdisjoint(packed["log_prob"]._pyro_dims):
                result.add_node(name, **site)
                continue
            ordinal = frozenset(
                trace.plate_to_symbol[frame.name]
                for frame in site["cond_indep_stack"]
                if frame.vectorized
            )
            # A masked observation says nothing, but a masked choice is still one choice.
            mask = None if name in self.names else packed["mask"]
            term = scale_and_mask(packed["unscaled_log_prob"], mask=mask)
            terms.setdefault(ordinal, []).append(term)
            scale = torch.as_tensor(site["scale"]).to(term)
            scales[name] = pack(scale, site["infer"]["_dim_to_symbol"])
            summed[name] = _SummedSite(packed["unscaled_log_prob"], mask, scale, ordinal)
        scale = _common(scales)
        with shared_intermediates() as cache:
            total = _scaled(contract_tensor_tree(terms, sums, ring=_Ring(cache)), scale)
        name = f"sum over {', '.join(sorted(self.names)[:3])}{', ...' * (len(self.names) > 3)}"
        result.add_node(
            name, type="sample", name=name, fn=dist.Unit(total, validate_args=False),
            value=total.new_empty(0), is_observed=True, scale=1.0, mask=None, infer={}, args=(),
            kwargs={}, cond_indep_stack=(), log_prob=total, unscaled_log_prob=total,
            log_prob_sum=total, joint=_SummedSites(summed, sums, self.names, trace.symbol_to_dim),
        )  # fmt: skip
        return result


class _SummedSite(NamedTuple):
    """A site that a sum over discrete latent variables replaces.

    ``log_prob`` and ``mask`` are packed, and ``plates`` are the symbols of the site's plates.
    """

    log_prob: Tensor
    mask: Any
    scale: Tensor
    plates: frozenset[str]


class _SummedSites(NamedTuple):
    """The ``sites`` of a sum over the discrete latent variables ``names``.

    ``sums`` are the symbols of their values, and ``symbol_to_dim`` has those of the plates, too.
    """

    sites: dict[str, _SummedSite]
    sums: set[str]
    names: frozenset[str]
    symbol_to_dim: dict[str, int]

    def log_likelihood(self, name: str, scaled: bool) -> Tensor | None:
        """Return the log-likelihood of each observation of a site, ``(*batch_shape)``.

        :returns: None if observations share discrete latent variables with each other, or with
            another site.
        """
        site, joined = self.sites[name], self._joined(name)
        if joined is None:
            return None
        terms = [
            scale_and_mask(self.sites[one].log_prob, mask=site.mask)
            if one == name and scaled
            else self.sites[one].log_prob
            for one in sorted(joined)
        ]
        with shared_intermediates() as cache:
            tree = OrderedDict({site.plates: terms})
            found = contract_tensor_tree(tree, self.sums, ring=_Ring(cache))
        total = unpack(*found[site.plates], self.symbol_to_dim)
        return total * site.scale if scaled else total

    def _joined(self, name: str) -> set[str] | None:
        """Return a site and its discrete latent variables, if no other site depends on them and all
        lie in the same plates; else None."""
        joined: set[str] = set()
        more = {name}
        while more:
            joined |= more
            others = joined - {name} - self.names
            if others or any(self.sites[one].plates != self.sites[name].plates for one in more):
                return None
            symbols = set().union(*map(self._values_of, more))
            connected = {n for n in self.sites if not symbols.isdisjoint(self._values_of(n))}
            more = connected - joined
        return joined

    def _values_of(self, name: str) -> set[str]:
        return self.sums.intersection(_symbols(self.sites[name].log_prob))


def log_likelihood_of(trace: Trace, name: str, scaled: bool) -> Tensor | None:
    """Return the log-likelihood of each observation of a site, ``(*batch_shape)``.

    :param trace: trace with log-probabilities.
    :param scaled: False leaves out scales and masks.
    :returns: None for a site without it: its observations share discrete latent variables.
    """
    if name in trace:
        return trace.nodes[name]["log_prob" if scaled else "unscaled_log_prob"]
    (joint,) = [site["joint"] for site in trace.nodes.values() if "joint" in site]
    return joint.log_likelihood(name, scaled)


class _Ring(LogRing):
    """Pyro's ring, with a sum that ``vmap`` can run."""

    _backend = "pyro_implicit.ops.log_space"

    def sumproduct(self, terms: Sequence[Tensor], dims: Iterable[str]) -> Tensor:
        """Sum over dimensions, first over every other one of a chain, and so on.

        Sums of equal shapes that do not depend on each other can run as one operation.
        """
        terms, dims = list(terms), set(dims)
        while len(dims) >= DISCRETE.least_chain and (apart := self._apart(terms, dims)):
            dims -= apart
            for dim in sorted(apart):
                own = [term for term in terms if dim in _symbols(term)]
                terms = [term for term in terms if dim not in _symbols(term)]
                terms.append(super().sumproduct(own, {dim}))
        return super().sumproduct(terms, dims)

    @staticmethod
    def _apart(terms: list[Tensor], dims: set[str]) -> set[str]:
        """Return dimensions that share no term, and whose sums have few elements."""
        size: dict[str, int] = {}
        near: dict[str, set[str]] = {}
        for term in terms:
            symbols = _symbols(term)
            size.update(zip(symbols, term.shape, strict=True))
            for dim in dims.intersection(symbols):
                near.setdefault(dim, set()).update(symbols)
        cost = {dim: math.prod(size[symbol] for symbol in near[dim]) for dim in near}
        apart: set[str] = set()
        for dim in sorted(cost, key=lambda dim: (cost[dim], dim)):
            if cost[dim] <= DISCRETE.most_at_once and apart.isdisjoint(near[dim]):
                apart.add(dim)
        return apart


def _symbols(term: Any) -> str:
    """Return Pyro's names of the dimensions of a packed tensor."""
    return term._pyro_dims


def _common(scales: dict[str, Tensor]) -> Tensor:
    """Return the packed scale of all sites.

    :raises UnfitModelError: if they have different ones.
    """
    values = {value for scale in scales.values() for value in scale.unique().tolist()}
    first, *others = scales.values()
    if len(values) == 1:  # a number and a tensor may be equal
        return pack(first.flatten()[0], {})
    if any(_symbols(first) != _symbols(one) or not first.equal(one) for one in others):
        shown = {name: scale.unique().tolist() for name, scale in scales.items()}
        raise UnfitModelError(
            f"sites {sorted(scales)} are summed over discrete latents, but have different scales "
            f"({shown}), as if they belonged to different minibatches. Cure: all data at once, "
            "discrete latents in the subsampled plate alone, or one poutine.scale for all these "
            "sites"
        )
    return first


def _scaled(tree: dict[frozenset, list[Tensor]], scale: Tensor) -> Tensor:
    """Return the total of terms over plates, each scaled.

    :param scale: a packed scale, which may differ between elements of plates that all terms have.
    """
    total = scale.new_zeros(())
    for term in itertools.chain(*tree.values()):
        term, factor = broadcast_all(term, scale)
        total = total + (term * factor).sum()
    return total
