# SPDX-License-Identifier: Apache-2.0
"""Any guide, averaged over what leaves the likelihood as it is."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _DIM_ALLOCATOR
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Transform, biject_to

from pyro_implicit.guides.groups import Group
from pyro_implicit.guides.posterior_draws import trace_guide
from pyro_implicit.guides.summaries import DrawSummaries

__all__ = ["Symmetrized"]


class Gap(NamedTuple):
    """The mean of the gap's estimates, its standard error, and the most that a gap can be."""

    value: float
    standard_error: float
    bound: float


class Symmetrized(DrawSummaries, PyroModule):
    r"""A guide whose draws are moved by maps :math:`t \sim r` under which the likelihood is the
    same:

    .. math:: q_{\mathrm{sym}}(\theta) = \int q(t^{-1} \theta)\, r(t)\, dt.

    The map is implicit noise. The density of a draw is estimated by

    .. math::
        \log \hat q(\theta) = \log q(t^{-1} \theta) - \log \frac{\tau(t \mid \theta)}{r(t)},

    where :math:`\tau` is a model of which map made a draw, fitted at each call to the moments of
    other draws of the guide, and is taken as given by gradients. For any :math:`\tau`, and whatever
    the maps do to the likelihood, the mean of :math:`\log \hat q` lies above that
    of :math:`\log q_{\mathrm{sym}}`: what an ELBO or :func:`~pyro_implicit.evidence_bound` says of
    this guide is certified, up to what it says of the guide inside. The difference to the latter,
    where the prior is symmetric as well, is the *invariance gap*,

    .. math::
        \mathrm{KL}(q \,\|\, q_{\mathrm{sym}}) = E \log \frac{\tau(t \mid \theta)}{r(t)} +
        E\, \mathrm{KL}(q(t \mid \theta) \,\|\, \tau(t \mid \theta)) \le \log |G|.

    Any ELBO that trains the guide inside trains this one, those of implicit guides included, but
    for a contrast with the prior (``KIVI_ELBO`` and ``AVB_ELBO`` with ``contrast="prior"``).

    **Example:**

    >>> from pyro.infer.autoguide import AutoNormal
    >>> from pyro_implicit.guides import Permutations
    >>> def model():
    ...     w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     pyro.sample("y", dist.Normal((3 * w).tanh().sum(), 0.1), obs=torch.tensor(0.5))
    >>> guide = Symmetrized(AutoNormal(model), Permutations({"w": -1}))
    >>> guide.sample_posterior(100)["w"].shape
    torch.Size([100, 2])

    :param guide: any guide with draws that vary: autoguides, hand-written ones, and another
        ``Symmetrized``. It keeps its parameters, their names and its training.
    :param group: the maps: :class:`Permutations` of hidden units or :class:`Translations` of
        weights. For several, nest: ``Symmetrized(Symmetrized(guide, one), another)``.
    :param num_draws: of the guide, at each call, for the moments that :math:`\tau` is made of.
    :raises ValueError: at the first call, for sites that the guide has not, or whose shapes do not
        fit, or that are points (``AutoDelta``).

    **References:**

    1. Kurle, Herbrich, Januschowski, Wang and Gasthaus (2022), *On the Detrimental Effect of
       Invariances in the Likelihood for Variational Inference*, eqs 5, 6b and 10.
    2. Ranganath, Tran and Blei (2016), *Hierarchical Variational Models* (the bound, eq 7).
    """

    def __init__(self, guide: Callable[..., Any], group: Group, num_draws: int = 500) -> None:
        depth = getattr(guide, "_depth", 0) + 1
        super().__init__(f"{type(self).__name__}{depth if depth > 1 else ''}")
        if num_draws < 2:
            raise ValueError(f"num_draws must be at least 2, but got {num_draws}")
        # Not by setattr, which would give the guide's parameters other names.
        if isinstance(guide, nn.Module):
            self._modules["guide"] = guide
        else:
            self.__dict__["guide"] = guide
        self.group = group
        self.num_draws = num_draws
        self._depth = depth
        self._num_plates = 0
        #: By site of the guide, the dimensions of a single draw, and the support.
        self._ndims: dict[str, int] = {}
        self._supports: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latents, within Pyro's handlers.

        :returns: by site.
        """
        others = self._draws(self.num_draws, args, kwargs)
        with _Inside(self.group.sites, self._pyro_name) as inside:
            self.guide(*args, **kwargs)
        values = {name: inside.seen[name]["value"] for name in self._ndims}
        draws = {name: _flat(value, self._ndims[name]) for name, value in values.items()}
        maps = self.group.sample(draws)
        moved = self.group.move(maps, draws)
        found = self.group.information(maps, {**draws, **moved}, others)
        self._count(found, inside.seen[self.group.sites[0]])
        for name, value in moved.items():
            values[name] = self._emit(inside.seen[name], name, value.reshape(values[name].shape))
        return values

    def _count(self, found: Tensor, site: dict[str, Any]) -> None:
        """Add the estimate of the map's part to the guide's log-density."""
        ndim = self._ndims[self.group.sites[0]]
        batch = site["value"].shape[: site["value"].dim() - ndim]
        batch += (1,) * (ndim - site["fn"].event_dim)  # where its plates are
        term = dist.Unit(-found.reshape(batch), has_rsample=True)
        pyro.sample(f"_{self._pyro_name}_map", term, infer={"is_auxiliary": True})

    def _emit(self, site: dict[str, Any], name: str, value: Tensor) -> Tensor:
        """The site of the model, in the plates of the guide inside."""
        log_density = site["fn"].log_density if isinstance(site["fn"], dist.Delta) else 0.0
        plates = getattr(self.guide, "plates", {})
        with contextlib.ExitStack() as stack:
            for frame in site["cond_indep_stack"]:
                if frame.name in plates:
                    stack.enter_context(plates[frame.name])
            fn = dist.Delta(value, log_density, event_dim=site["fn"].event_dim)
            return pyro.sample(name, fn)

    @torch.no_grad()
    def _draws(self, number: int, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Draws of the guide inside, ``(number, *site_shape)``, in whatever plates that is."""
        with poutine.block():
            if not self._ndims:
                self._meet(args, kwargs)
            if hasattr(self.guide, "sample_posterior"):
                draws = self.guide.sample_posterior(number, *args, **kwargs)
                return {name: draws[name] for name in self._ndims}
            dim = -1 - self._num_plates - len(_DIM_ALLOCATOR._stack)
            with poutine.trace() as traced, pyro.plate(f"_{self._pyro_name}", number, dim=dim):
                self.guide(*args, **kwargs)
        sites = traced.trace.nodes
        return {name: _flat(sites[name]["value"], ndim) for name, ndim in self._ndims.items()}

    def _meet(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Look at the guide inside, once."""
        trace = trace_guide(self.guide, args, kwargs)
        sites = {n: s for n, s in trace.iter_stochastic_nodes() if not site_is_subsample(s)}
        latents = {n: s["value"] for n, s in sites.items() if not s["infer"].get("is_auxiliary")}
        self.group.check({name: value.shape for name, value in latents.items()})
        if all(isinstance(site["fn"], dist.Delta) for site in sites.values()):
            raise ValueError(
                "the guide is of points or stored draws, which have no density to be averaged. "
                "Cure: AutoNormal or another guide with a density"
            )
        frames = [f for s in sites.values() for f in s["cond_indep_stack"] if f.vectorized]
        self._num_plates = max((-frame.dim for frame in frames), default=0)
        self._ndims = {name: value.dim() for name, value in latents.items()}
        if isinstance(self.guide, Symmetrized):
            self._supports = self.guide._supports
        else:  # an autoguide's own sites are but values
            prototype = getattr(self.guide, "prototype_trace", trace)
            self._supports = {name: prototype.nodes[name]["fn"].support for name in latents}

    def _transforms(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Transform]:
        if not self._ndims:
            with torch.no_grad(), poutine.block():
                self._meet(args, kwargs)
        return {name: biject_to(support) for name, support in self._supports.items()}

    @torch.no_grad()
    def sample_posterior(self, num_samples: int, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latents.

        :param num_samples: number of draws.
        :param args: the model's arguments, where the guide inside needs them.
        :returns: constrained values by site, each ``(num_samples, *site_shape)``.
        """
        draws = self._draws(num_samples, args, kwargs)
        return {**draws, **self.group.move(self.group.sample(draws), draws)}

    @torch.no_grad()
    def gap(self, *args: Any, num_samples: int = 1000, **kwargs: Any) -> Gap:
        r"""A lower bound on the invariance gap :math:`\mathrm{KL}(q \| q_{\mathrm{sym}})`, in nats.

        By so much symmetrising raises the ELBO of the guide inside, where the prior is symmetric.

        :param args: the model's arguments, where the guide inside needs them.
        :param num_samples: draws to average over.
        :returns: value, standard error, and the logarithm of the number of maps.
        """
        draws = self._draws(num_samples, args, kwargs)
        others = self._draws(self.num_draws, args, kwargs)
        maps = self.group.sample(draws)
        moved = {**draws, **self.group.move(maps, draws)}
        found = self.group.information(maps, moved, others).double()
        error = found.std().item() / math.sqrt(num_samples)
        return Gap(found.mean().item(), error, self.group.log_size)


class _Inside(Messenger):
    """Keeps some latents of a guide from the world outside, in which they are to be others.

    A site that is but the value of another (Delta) is hidden; one with a density gets another name.
    """

    def __init__(self, names: tuple[str, ...], prefix: str) -> None:
        super().__init__()
        self.names, self.prefix = names, prefix
        self.seen: dict[str, dict[str, Any]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        infer, name = msg["infer"], msg["name"]
        # The guide stands for other values than the model sees: contrasts with the prior would
        # compare what does not belong together, and now ask for these names in vain.
        latents = tuple(self._inner(latent) for latent in infer.get("latents", (name,)))
        if site_is_subsample(msg) or infer.get("is_auxiliary"):
            msg["infer"] = {**infer, "latents": latents}
            return
        self.seen[name] = msg
        if name not in self.names:
            return
        if isinstance(msg["fn"], dist.Delta):
            msg["stop"] = True
        else:
            msg["name"] = f"_{self.prefix}_{name}"
            msg["infer"] = {**infer, "is_auxiliary": True, "latents": latents}

    def _inner(self, name: str) -> str:
        return f"{name}, before a map of its group" if name in self.names else name


def _flat(value: Tensor, ndim: int) -> Tensor:
    """All dimensions to the left of the last ``ndim`` as one."""
    return value.reshape(-1, *value.shape[value.dim() - ndim :])
