# SPDX-License-Identifier: Apache-2.0
"""Discrete latents: those that Pyro can enumerate are summed out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from opt_einsum import shared_intermediates
from pyro import poutine
from pyro.ops.contract import contract_to_tensor
from pyro.ops.packed import scale_and_mask
from pyro.ops.rings import LogRing
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor

from pyro_implicit.runtime.sites import innermost

__all__ = ["DiscreteSum", "is_discrete_latent", "is_summable", "refuse_infinite"]

Site = dict[str, Any]


def is_discrete_latent(site: Site) -> bool:
    """Whether a site, or a message of Pyro's, is a latent of discrete values."""
    if site["type"] != "sample" or site["is_observed"] or site_is_subsample(site):
        return False
    support = getattr(site["fn"], "support", None)
    return support is not None and support.is_discrete


def is_summable(site: Site) -> bool:
    """Whether it is one that Pyro can enumerate."""
    return is_discrete_latent(site) and site["fn"].has_enumerate_support


def refuse_infinite(name: str, site: Site) -> None:
    """Check that a discrete latent can be summed out.

    :raises ValueError: naming site and cure.
    """
    if not is_discrete_latent(site) or is_summable(site):
        return
    fn = site["fn"]
    cure = "sum it out by hand, in a distribution of its own or by pyro.factor with a logsumexp"
    if isinstance(fn, torch.distributions.Independent) and fn.base_dist.has_enumerate_support:
        cure = "a plate in place of .to_event, in which its elements are summed out one by one"
    raise ValueError(
        f"site '{name}' is a discrete latent ({type(innermost(fn)).__name__}) that Pyro cannot "
        f"enumerate, and there is no density to follow the gradient of. Cure: {cure}"
    )


class DiscreteSum:
    """Sums discrete latents out of a model's log-density, by Pyro's parallel enumeration.

    In a trace of the enumerated model, the sites that depend on the latents, and the latents, give
    place to one factor, the logarithm of the sum over all of the latents' values. It is that of
    :class:`~pyro.infer.TraceEnum_ELBO`, for models that Pyro can enumerate: assignments in a plate,
    hidden Markov models in :func:`pyro.markov`.

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
    :param max_plate_nesting: of the model.
    """

    def __init__(self, names: frozenset[str], max_plate_nesting: int) -> None:
        self.names, self.max_plate_nesting = names, max_plate_nesting

    @classmethod
    def of(cls, trace: Trace, given: Any = ()) -> DiscreteSum | None:
        """The sum over all discrete latents of a model, None if there are none.

        :param trace: of the model.
        :param given: sites that have a value of their own.
        :raises ValueError: for one that cannot be summed out.
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
        """The model with all values of the latents side by side."""
        # By name, as a guide may have its own draws of others.
        configured = poutine.infer_config(model, self._config)
        return poutine.enum(configured, first_available_dim=-1 - self.max_plate_nesting)

    def _config(self, site: Site) -> dict[str, Any]:
        if site["name"] in self.names:
            return {"enumerate": "parallel", "expand": False}
        return {}

    def collapse(self, trace: Trace) -> Trace:
        """The trace with one factor for the sum.

        :param trace: of the enumerated model.
        :raises ValueError: for scales (of minibatches) that differ among the sites in the sum.
        """
        trace = prune_subsample_sites(trace)
        trace.compute_log_prob()
        trace.pack_tensors()
        plates = set(trace.plate_to_symbol.values())
        sums = set(trace.symbol_to_dim) - plates
        terms: OrderedDict[frozenset, list[Tensor]] = OrderedDict()
        scales: dict[str, Any] = {}
        result = Trace()
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
            scales[name] = site["scale"]
        with shared_intermediates() as cache:
            total = contract_to_tensor(terms, sums, ring=_Ring(cache)) * _common(scales)
        name = f"sum over {', '.join(sorted(self.names)[:3])}{', ...' * (len(self.names) > 3)}"
        result.add_node(
            name, type="sample", name=name, fn=dist.Unit(total, validate_args=False),
            value=total.new_empty(0), is_observed=True, scale=1.0, mask=None, infer={}, args=(),
            kwargs={}, cond_indep_stack=(), log_prob=total, unscaled_log_prob=total,
            log_prob_sum=total,
        )  # fmt: skip
        return result


class _Ring(LogRing):
    """Pyro's, by a sum that vmap can run."""

    _backend = "pyro_implicit.ops.log_einsum"


def _common(scales: dict[str, Any]) -> Any:
    """The one scale of all sites."""
    if len({float(scale) for scale in scales.values()}) > 1:
        raise ValueError(
            f"sites {sorted(scales)} are summed over discrete latents, but have different scales "
            f"({scales}), as if a minibatch were all that they belong to. Cure: all data at once, "
            "or discrete latents in the subsampled plate alone"
        )
    return next(iter(scales.values()))
