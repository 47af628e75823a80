# SPDX-License-Identifier: Apache-2.0
"""Guides averaged over invariances of the likelihood: permutations and translations."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroParam
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _DIM_ALLOCATOR
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Transform, biject_to, constraints

from pyro_implicit.guides.auto_draws import DrawSummaries
from pyro_implicit.guides.posterior_draws import trace_guide
from pyro_implicit.guides.sampler import StoredDraw
from pyro_implicit.ops.permutations import (
    check_units,
    permutation_log_prob,
    permute_units,
    unit_vectors,
)
from pyro_implicit.runtime.messages import refuse_counts, refuse_nonpositive

__all__ = ["Group", "Permutations", "Symmetrized", "Translations"]


class Gap(NamedTuple):
    """Estimate of the invariance gap, its standard error, and its upper bound, in nats."""

    value: float
    standard_error: float
    bound: float


class Symmetrized(DrawSummaries, PyroModule):
    r"""A guide whose draws are moved by random maps :math:`t \sim r` that preserve the likelihood,

    .. math:: q_{\mathrm{sym}}(\theta) = \int q(t^{-1} \theta)\, r(t)\, dt.

    The map is implicit noise. The density of a draw is estimated by

    .. math::
        \log \hat q(\theta) = \log q(t^{-1} \theta) - \log \frac{\tau(t \mid \theta)}{r(t)},

    where :math:`\tau` is a model of the posterior of the map, fitted at each call to the moments of
    other draws of the guide and constant for gradients. For any :math:`\tau` and any maps, the mean
    of :math:`\log \hat q` is at least the mean of :math:`\log q_{\mathrm{sym}}`: a bound by an ELBO
    or :func:`~pyro_implicit.evidence_bound` holds if it holds for the inner guide. For a symmetric
    prior, the difference to the inner guide's bound is the *invariance gap*,

    .. math::
        \mathrm{KL}(q \,\|\, q_{\mathrm{sym}}) = E \log \frac{\tau(t \mid \theta)}{r(t)} +
        E\, \mathrm{KL}(q(t \mid \theta) \,\|\, \tau(t \mid \theta)) \le \log |G|.

    Any ELBO that trains the inner guide trains this guide, except for a contrast with the prior
    (``KIVI_ELBO`` and ``AVB_ELBO`` with ``contrast="prior"``).

    **Example:**

    >>> from pyro.infer.autoguide import AutoNormal
    >>> from pyro_implicit.guides import Permutations
    >>> def model():
    ...     w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     pyro.sample("y", dist.Normal((3 * w).tanh().sum(), 0.1), obs=torch.tensor(0.5))
    >>> guide = Symmetrized(AutoNormal(model), Permutations({"w": -1}))
    >>> guide.sample_posterior(100)["w"].shape
    torch.Size([100, 2])

    :param guide: an autoguide, hand-written guide or another ``Symmetrized``, with a density. It
        keeps its parameters and their names.
    :param group: the maps: :class:`Permutations` of hidden units or :class:`Translations` of
        weights. Nest for several: ``Symmetrized(Symmetrized(guide, one), another)``.
    :param num_samples: draws of the guide at each call, for the moments of :math:`\tau`.
    :raises ValueError: at the first call, for sites that the guide does not have, wrong shapes, or
        points (``AutoDelta``).

    **References:**

    1. Kurle, Herbrich, Januschowski, Wang and Gasthaus (2022), *On the Detrimental Effect of
       Invariances in the Likelihood for Variational Inference*, eqs 5, 6b and 10.
    2. Ranganath, Tran and Blei (2016), *Hierarchical Variational Models* (the bound, eq 7).
    """

    def __init__(self, guide: Callable[..., Any], group: Group, num_samples: int = 500) -> None:
        depth = getattr(guide, "_depth", 0) + 1
        super().__init__(f"{type(self).__name__}{depth if depth > 1 else ''}")
        refuse_counts(2, num_samples=num_samples)
        # Not by setattr, which would rename the guide's parameters.
        if isinstance(guide, nn.Module):
            self._modules["guide"] = guide
        else:
            self.__dict__["guide"] = guide
        self.group = group
        self.num_samples = num_samples
        self._depth = depth
        self._num_plates = 0
        #: By site of the guide, the number of dimensions of a draw, and the support.
        self._ndims: dict[str, int] = {}
        self._supports: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latents, within Pyro's handlers.

        :returns: by site.
        """
        others = self._draws(self.num_samples, args, kwargs)
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
        ndim = self._ndims[self.group.sites[0]]
        batch = site["value"].shape[: site["value"].dim() - ndim]
        batch += (1,) * (ndim - site["fn"].event_dim)  # where its plates are
        term = dist.Unit(-found.reshape(batch), has_rsample=True)
        pyro.sample(f"_{self._pyro_name}_map", term, infer={"is_auxiliary": True})

    def _emit(self, site: dict[str, Any], name: str, value: Tensor) -> Tensor:
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
        with poutine.block():
            if not self._ndims:
                self._bind(args, kwargs)
            if hasattr(self.guide, "sample_posterior"):
                draws = self.guide.sample_posterior(number, *args, **kwargs)
                return {name: draws[name] for name in self._ndims}
            dim = -1 - self._num_plates - len(_DIM_ALLOCATOR._stack)
            with poutine.trace() as traced, pyro.plate(f"_{self._pyro_name}", number, dim=dim):
                self.guide(*args, **kwargs)
        sites = traced.trace.nodes
        return {name: _flat(sites[name]["value"], ndim) for name, ndim in self._ndims.items()}

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> None:
        trace = trace_guide(self.guide, args, kwargs)
        sites = {n: s for n, s in trace.iter_stochastic_nodes() if not site_is_subsample(s)}
        latents = {n: s["value"] for n, s in sites.items() if not s["infer"].get("is_auxiliary")}
        self.group.check({name: value.shape for name, value in latents.items()})
        kinds = [site["fn"] for site in sites.values()]
        is_stored = any(isinstance(fn, StoredDraw) for fn in kinds)
        if is_stored or all(isinstance(fn, dist.Delta) for fn in kinds):
            raise ValueError(
                "the guide consists of points or stored draws, which have no density. Cure: "
                "AutoNormal or another guide with a density"
            )
        frames = [f for s in sites.values() for f in s["cond_indep_stack"] if f.vectorized]
        self._num_plates = max((-frame.dim for frame in frames), default=0)
        self._ndims = {name: value.dim() for name, value in latents.items()}
        if isinstance(self.guide, Symmetrized):
            self._supports = self.guide._supports
        else:  # the sites of an autoguide have no supports, its prototype has
            prototype = getattr(self.guide, "prototype_trace", trace)
            self._supports = {name: prototype.nodes[name]["fn"].support for name in latents}

    def _transforms(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Transform]:
        if not self._ndims:
            with torch.no_grad(), poutine.block():
                self._bind(args, kwargs)
        return {name: biject_to(support) for name, support in self._supports.items()}

    @torch.no_grad()
    def sample_posterior(self, num_samples: int, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latents.

        :param num_samples: number of draws.
        :param args: the model's arguments, if the inner guide needs them.
        :returns: constrained values by site, each ``(num_samples, *site_shape)``.
        """
        draws = self._draws(num_samples, args, kwargs)
        return {**draws, **self.group.move(self.group.sample(draws), draws)}

    @torch.no_grad()
    def gap(self, *args: Any, num_samples: int = 1000, **kwargs: Any) -> Gap:
        r"""Bound the invariance gap :math:`\mathrm{KL}(q \| q_{\mathrm{sym}})` from below, in nats.

        For a symmetric prior, it is the increase of the ELBO of the inner guide.

        :param args: the model's arguments, if the inner guide needs them.
        :param num_samples: number of draws.
        :returns: value, standard error, and the logarithm of the number of maps.
        """
        draws = self._draws(num_samples, args, kwargs)
        others = self._draws(self.num_samples, args, kwargs)
        maps = self.group.sample(draws)
        moved = {**draws, **self.group.move(maps, draws)}
        found = self.group.information(maps, moved, others).double()
        error = found.std().item() / math.sqrt(num_samples)
        return Gap(found.mean().item(), error, self.group.log_size)


class _Inside(Messenger):
    """Hide latents that moved values replace: rename sites with a density, stop Delta sites."""

    def __init__(self, names: tuple[str, ...], prefix: str) -> None:
        super().__init__()
        self.names, self.prefix = names, prefix
        self.seen: dict[str, dict[str, Any]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        infer, name = msg["infer"], msg["name"]
        # Rename the latents, so that contrasts with the prior cannot compare unmoved values.
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
    return value.reshape(-1, *value.shape[value.dim() - ndim :])


Draws: TypeAlias = Mapping[str, Tensor]


class Group(PyroModule):
    """Volume-preserving maps of latents that do not change the likelihood, and their distribution.

    A subclass implements four methods; ``log_size`` is the logarithm of the number of maps. Draws
    are by site, ``(num_samples, *site_shape)``.
    """

    #: The moved sites.
    sites: tuple[str, ...] = ()
    log_size: float = math.inf

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Check the shapes of the guide's sites.

        :raises ValueError: for missing sites or wrong shapes.
        """

    def sample(self, draws: Draws) -> Tensor:
        """Draw a map for each draw, ``(num_samples, ...)``."""
        raise NotImplementedError

    def move(self, maps: Tensor, draws: Draws) -> dict[str, Tensor]:
        """Return the moved values of ``sites``."""
        raise NotImplementedError

    def information(self, maps: Tensor, moved: Draws, draws: Draws) -> Tensor:
        r"""Return :math:`\log \tau(t \mid \theta) - \log r(t)`, with the maps' distribution r and a
        model :math:`\tau` of their posterior.

        :param maps: ``(num_moved, ...)``.
        :param moved: all sites after the move, ``(num_moved, *site_shape)``.
        :param draws: other, unmoved draws for the moments of :math:`\tau`.
        :returns: ``(num_moved,)``, differentiable in all arguments except ``draws``.
        """
        raise NotImplementedError


class Permutations(Group):
    """All permutations of the units of a hidden layer, with equal probabilities.

    **Example:**

    >>> group = Permutations({"0.weight": -2, "0.bias": -1, "2.weight": -1})
    >>> group.sites
    ('0.weight', '0.bias', '2.weight')

    :param units: for each site with weights into or out of the units, the negative dimension that
        counts them: -2 for the weight of the layer, -1 for its bias and for the weight of the next
        layer. The prior should be the same for all units; otherwise the ELBO includes the loss.
    """

    def __init__(self, units: Mapping[str, int]) -> None:
        super().__init__()
        self.units, self.sites = dict(units), tuple(units)

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Check the sites' dimensions and their numbers of units."""
        self.num_units = check_units(shapes, self.units)
        self.log_size = math.lgamma(self.num_units + 1)

    def sample(self, draws: Draws) -> Tensor:
        """Draw the index of the unit at each place, ``(num_samples, num_units)``."""
        value = draws[self.sites[0]]
        return torch.rand(len(value), self.num_units, device=value.device).argsort(-1)

    def move(self, maps: Tensor, draws: Draws) -> dict[str, Tensor]:
        """Reorder the units."""
        return permute_units(draws, self.units, maps)

    def information(self, maps: Tensor, moved: Draws, draws: Draws) -> Tensor:
        """Assign units to Gaussians with the moments of single units of ``draws``."""
        vectors, before = unit_vectors(moved, self.units), unit_vectors(draws, self.units)
        center, unit = before.mean((0, 1)), before.std((0, 1)).clamp(min=_tiny(before))
        vectors, before = (vectors - center) / unit, (before - center) / unit
        loc, precision = before.mean(0), before.var(0).clamp(min=_tiny(before)).reciprocal()
        squares = vectors.square() @ precision.mT - 2 * vectors @ (loc * precision).mT
        constants = (loc.square() * precision - precision.log()).sum(-1)
        return permutation_log_prob(-0.5 * (squares + constants), maps) + self.log_size


class Translations(Group):
    r"""Normally distributed shifts of a layer's weights that do not change its outputs.

    Weights w, ``(*rows, in_features)``, become :math:`w + s P \epsilon` with standard normal
    :math:`\epsilon`. P is nearly the projection onto the orthogonal complement of all inputs, the
    rows of H:

    .. math:: P = (I + H^\top H / \delta)^{-1}, \qquad \delta = a^2 \|H\|_F^2 / N.

    An exact projection has no derivative with respect to inputs that another layer computes.
    Outputs change by at most s a / 2 times the root mean square of the inputs' norms. With as many
    linearly independent inputs as features, P is near 0.

    **Example:**

    >>> x = torch.linspace(-1.0, 1.0, 10).unsqueeze(-1)
    >>> def inputs(w):
    ...     return torch.tanh(x @ w["0.weight"].mT + w["0.bias"].unsqueeze(-2))
    >>> group = Translations("2.weight", inputs, scale=0.1)

    :param site: the layer's weight.
    :param inputs: the layer's inputs for the data, ``(num_data, in_features)``; or a function from
        draws of the other sites to inputs ``(num_samples, num_data, in_features)``.
    :param scale: initial value of s, for a narrow guide about the prior's standard deviation.
    :param tolerance: a.
    :raises ValueError: for a scale or tolerance that is not positive.
    """

    def __init__(
        self,
        site: str,
        inputs: Tensor | Callable[[Draws], Tensor],
        scale: float,
        tolerance: float = 0.01,
    ) -> None:
        super().__init__()
        refuse_nonpositive(scale=scale, tolerance=tolerance)
        self.sites = (site,)
        self.inputs, self.tolerance = inputs, tolerance
        self.scale = PyroParam(torch.tensor(float(scale)), constraints.positive)

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Check that the guide has the site, with the inputs' number of features."""
        shape = tuple(shapes.get(self.sites[0], ()))
        features = shape[-1:]
        if isinstance(self.inputs, Tensor):
            features = tuple(self.inputs.shape[-1:])
        if not shape or features != shape[-1:]:
            raise ValueError(
                f"Translations of site '{self.sites[0]}' by inputs of {features} features, but "
                f"the guide's sites are { {name: tuple(s) for name, s in shapes.items()} }. Cure: "
                "a weight whose last dimension is that of the inputs"
            )

    def sample(self, draws: Draws) -> Tensor:
        """Draw standard normal noise of the weight's shape."""
        return torch.randn_like(draws[self.sites[0]])

    def move(self, maps: Tensor, draws: Draws) -> dict[str, Tensor]:
        """Shift the weights."""
        (site,) = self.sites
        noise = maps.double().reshape(len(maps), -1, maps.shape[-1])
        shift = self.scale * _project(noise, self._inputs(draws))
        return {site: draws[site] + shift.reshape(maps.shape).to(draws[site])}

    def information(self, maps: Tensor, moved: Draws, draws: Draws) -> Tensor:
        """Use independent Gaussian weights with the moments of ``draws``."""
        (site,) = self.sites
        others = draws[site].double().reshape(len(draws[site]), -1, maps.shape[-1])
        loc, precision = others.mean(0), others.var(0).clamp(min=_tiny(others)).reciprocal()
        offsets = moved[site].double().reshape(len(maps), *loc.shape) - loc
        noise = maps.double().reshape(offsets.shape)
        # The posterior of the noise, for each row of the weights.
        inputs = self._inputs(moved)
        eye = torch.eye(maps.shape[-1]).to(inputs)
        steps = self.scale * _project(eye, inputs).unsqueeze(-3)
        weighted = steps * precision.unsqueeze(-2)
        factor = torch.linalg.cholesky(weighted @ steps.mT + eye)
        mean = torch.cholesky_solve(weighted @ offsets.unsqueeze(-1), factor)
        whitened = factor.mT @ (noise.unsqueeze(-1) - mean)
        found = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        found = found + 0.5 * (noise.square().sum(-1) - whitened.square().sum((-2, -1)))
        return found.sum(-1).to(moved[site])

    def _inputs(self, draws: Draws) -> Tensor:
        r"""Return H over the root of :math:`\delta`, in float64."""
        inputs = self.inputs if isinstance(self.inputs, Tensor) else self.inputs(draws)
        inputs = inputs.double()
        size = (inputs.square().sum((-2, -1), keepdim=True) / inputs.shape[-2]).sqrt()
        return inputs / (self.tolerance * size.clamp(min=_tiny(inputs)))


def _project(rows: Tensor, inputs: Tensor) -> Tensor:
    number, size = inputs.shape[-2:]
    if number >= size:
        gram = torch.eye(size).to(inputs) + inputs.mT @ inputs
        return torch.linalg.solve(gram, rows.mT).mT
    gram = torch.eye(number).to(inputs) + inputs @ inputs.mT  # by Woodbury's identity
    return rows - torch.linalg.solve(gram, inputs @ rows.mT).mT @ inputs


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny ** 0.5
