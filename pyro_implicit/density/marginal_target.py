# SPDX-License-Identifier: Apache-2.0
"""The posterior of global latent variables, with those of groups integrated out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from pyro import factor, poutine
from torch import Tensor

from pyro_implicit.density.groups import Groups
from pyro_implicit.density.pass_target import Part, PassTarget
from pyro_implicit.density.policy import GROUPS
from pyro_implicit.density.target import Target
from pyro_implicit.ops.quadrature import NormalRule

__all__ = ["MarginalTarget", "globals_only"]


def globals_only(groups: Groups) -> Callable[..., Any]:
    """Return the model without the plate of the groups: the priors of the global variables.

    :param groups: the groups of the model.
    """
    target = groups.target
    values = {
        name: value.detach()
        for name, value in target.constrain(target.init_loc).items()
        if name in groups.sites
    }
    inner = poutine.block(poutine.condition(groups.model, data=values), hide=list(groups.hidden))

    def model_of_globals(*args: Any, **kwargs: Any) -> None:
        inner(*args, **kwargs)
        factor("groups", torch.zeros(()))

    return model_of_globals


class MarginalTarget(PassTarget):
    r"""The posterior of the global latent variables of a hierarchical model.

    .. math:: \log p(\theta) + \sum_i \log \int p(x_i, z_i | \theta)\, dz_i

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model(x):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("groups", 4, subsample_size=len(x)):
    ...         z = pyro.sample("z", dist.Normal(mean, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> batches = [(torch.zeros(2),), (torch.ones(2),)]
    >>> target = MarginalTarget(Groups(model, batches[0]), batches)
    >>> log_prob, score, hessian = target.derivatives(torch.zeros(1, 1))
    >>> score.round(decimals=3), hessian.round(decimals=3)
    (tensor([[1.]]), tensor([[[-3.]]]))

    :param groups: the groups of a first minibatch.
    :param batches: all minibatches; each evaluation iterates over them once.
    :param rule: rule of the quadrature.
    :param has_all: whether the minibatches are all data. If they have fewer or more groups than
        the plate, as without a last minibatch that is too small, the sum is scaled.
    :raises ValueError: if all latent variables belong to groups.
    """

    unit = "groups"

    def __init__(
        self,
        groups: Groups,
        batches: Iterable[tuple],
        rule: NormalRule | None = None,
        has_all: bool = True,
    ) -> None:
        self.groups_of_batch, self.has_all = groups, has_all
        self.rule = rule or NormalRule(GROUPS.num_nodes)
        self._centre: Tensor | None = None
        source = groups.target
        if set(source.shapes) == set(groups.sites):
            raise ValueError(
                f"all latents ({', '.join(groups.sites)}) lie in plate '{groups.plate}', so that "
                "the groups have nothing in common. Cure: a prior whose parameters are latents "
                "outside of the plate, or amortize='auto'"
            )
        rest = Target(globals_only(groups), *source.args, model_kwargs=source.kwargs)
        super().__init__(rest, batches)

    def with_rule(self, rule: NormalRule) -> MarginalTarget:
        """Return the same posterior with other nodes."""
        return MarginalTarget(self.groups_of_batch, self.batches, rule, self.has_all)

    def centre(self, latent: Tensor) -> None:
        """Subtract the sum at a vector ``(latent_dim,)`` from all log-densities.

        Passes with several vectors find the modes of the groups from those at this vector.
        """
        self._centre = latent
        super().centre(latent)

    def _by_model(self, latent: Tensor) -> Tensor:
        return Target._by_model(self, latent) + super()._by_model(latent)

    def _part(self, batch: tuple, is_single: bool) -> Part:
        part, start = self.groups_of_batch.on(batch, self.rule), None
        if self._centre is not None and not is_single:
            start = part.conditional(self.constrain(self._centre.unsqueeze(0))).mode

        def log_prob(latent: Tensor) -> Tensor:
            return part.log_marginals(self.constrain(latent), start).double().sum(-1)

        return Part(log_prob, part.size, part.size, part.num_nodes * part.size)

    def _normalised(self, sums: Tensor, weight: float) -> Tensor:
        return sums * (self.groups_of_batch.full_size / weight if self.has_all else 1)
