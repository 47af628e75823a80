# SPDX-License-Identifier: Apache-2.0
"""An ensemble of point estimates as one guide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import init_to_sample
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import biject_to

from pyro_implicit.guides.auto_draws import AutoDraws
from pyro_implicit.guides.names import refuse_stored
from pyro_implicit.runtime.sites import site_parts
from pyro_implicit.runtime.user_warnings import refuse_counts

__all__ = ["AutoEnsemble", "init_to_shuffled"]

ONE = torch.Size()


class AutoEnsemble(AutoDraws):
    r"""Several point estimates, each in a mode of its own, trained side by side.

    .. math:: q(\theta) = \frac1K \sum_{k=1}^K \delta(\theta - \theta_k)

    Each member climbs the log-density of latents and data in unconstrained space from its own
    start, all in one vectorised pass: an ensemble of networks as one guide (Lakshminarayanan et
    al., without adversarial examples). The ELBO is the mean of the members' log-densities. A point
    has no width; :func:`~pyro_implicit.refine` adds that of its mode. Made for networks, whose
    predictions differ more between modes than within one: of a hierarchical model a point estimate
    may be meaningless.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     x = pyro.sample("x", dist.Normal(0.0, 3.0))
    ...     pyro.sample("y", dist.Normal(x**2, 0.1), obs=torch.tensor(4.0))
    >>> _ = pyro.set_rng_seed(1)
    >>> guide = AutoEnsemble(model, num_members=4)
    >>> from pyro_implicit import fit
    >>> result = fit(model, guide, num_steps=500, lr=0.1, seed=0, progress=False)
    >>> guide.get_samples()["x"].round().abs()
    tensor([2., 2., 2., 2.])

    :param model: a Pyro model with continuous latents and fixed structure.
    :param num_members: K. An ELBO with as many particles moves all of them in each step, one with
        fewer moves some.
    :param init_loc_fn: per-site initialisation, called anew for each member, so it must be random:
        :func:`init_to_shuffled` for networks.
    :param create_plates: as in Pyro's autoguides.
    :raises ValueError: for no members; at the first call, if all members start at one point, and as
        :class:`AutoDraws`.

    **References:**

    1. Lakshminarayanan, Pritzel and Blundell (2017), *Simple and Scalable Predictive Uncertainty
       Estimation using Deep Ensembles*. https://arxiv.org/abs/1612.01474
    """

    members: Tensor

    def __init__(
        self,
        model: Callable[..., Any],
        num_members: int = 5,
        init_loc_fn: Callable[[dict[str, Any]], Tensor] = init_to_sample,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        refuse_counts(num_members=num_members)
        super().__init__(model, init_loc_fn, create_plates)
        self.num_members = num_members

    def _make_parameters(self, *args: Any, **kwargs: Any) -> None:
        refuse_stored(self, {"members": (self.num_members, self.latent_dim)})
        starts = [self._init_loc()]
        for _ in range(1, self.num_members):
            with torch.no_grad(), poutine.block():
                nodes = poutine.trace(self.model).get_trace(*args, **kwargs).nodes
            parts = [
                biject_to(nodes[name]["fn"].support).inv(nodes[name]["value"]).reshape(-1)
                for name in self._unconstrained_shapes
            ]
            starts.append(torch.cat(parts))
        members = torch.stack(starts)
        if len(members) > 1 and (members == members[0]).all():
            raise ValueError(
                f"all {self.num_members} members of AutoEnsemble start at one point and would stay "
                "together. Cure: an init_loc_fn that is random, such as init_to_sample, or "
                "init_to_shuffled(start_values(net)) for a network"
            )
        self.members = PyroParam(members)

    def get_posterior(self, *args: Any, **kwargs: Any) -> dist.Delta:
        """The distribution of the unconstrained latent vector, ``event_shape`` (latent_dim,)."""
        return _Members(self.members)

    @torch.no_grad()
    def get_samples(self) -> dict[str, Tensor]:
        """The members, as ``MCMC`` gives its draws.

        :returns: constrained values by site, ``(num_members, *site_shape)``.
        :raises RuntimeError: before the first call.
        """
        if self.prototype_trace is None:
            raise RuntimeError(
                "AutoEnsemble makes its members at its first call: train it, or call guide(*args)"
            )
        nodes = self.prototype_trace.nodes
        with self._pyro_context:  # the parameter store's values, as in a call
            parts = site_parts(self.members.detach(), self._unconstrained_shapes)
        return {name: biject_to(nodes[name]["fn"].support)(part) for name, part in parts.items()}


class _Members(dist.Delta):
    """Point masses; so many draws are as many different members, if there are enough."""

    def __init__(self, members: Tensor, batch_shape: torch.Size = ONE) -> None:
        self.members = members
        super().__init__(members[0].expand(batch_shape + members.shape[1:]), event_dim=1)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> _Members:
        return _Members(self.members, torch.Size(batch_shape))

    def rsample(self, sample_shape: torch.Size = ONE) -> Tensor:
        shape = torch.Size(sample_shape) + self.batch_shape
        first = torch.randint(len(self.members), ())
        index = (first + torch.arange(shape.numel())) % len(self.members)
        return self.members[index.to(self.members.device)].reshape(shape + self.event_shape)

    def log_prob(self, x: Tensor) -> Tensor:
        """0 as of Pyro's Delta, but wherever it is asked: draws are members."""
        return x.new_zeros(x.shape[:-1])


def init_to_shuffled(values: Mapping[str, Tensor]) -> Callable[[dict[str, Any]], Tensor]:
    """Starts a network anew at each call, with the weights that it has, in another order.

    So every member of an :class:`AutoEnsemble` has a start of its own, at the scale that torch
    chose for each layer. Sites that are not named begin at a draw of the prior.

    **Example:**

    >>> import pyro.distributions as dist
    >>> start = init_to_shuffled({"weight": torch.arange(4.0)})
    >>> site = {"name": "weight", "fn": dist.Normal(torch.zeros(4), 1.0).to_event(1)}
    >>> start(site).sort().values
    tensor([0., 1., 2., 3.])

    :param values: by site, as of :func:`~pyro_implicit.nn.start_values`; entries of a site must be
        exchangeable, as weights that were drawn independently are.
    """

    def start(site: dict[str, Any]) -> Tensor:
        if site["name"] not in values:
            return init_to_sample(site)
        value = values[site["name"]]
        return value.flatten()[torch.randperm(value.numel())].reshape(value.shape)

    return start
