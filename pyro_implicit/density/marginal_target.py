# SPDX-License-Identifier: Apache-2.0
"""The posterior of global latent variables, with those of groups integrated out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from pyro import factor, poutine
from torch import Tensor, distributed

from pyro_implicit.density.groups import Groups
from pyro_implicit.density.policy import GROUPS
from pyro_implicit.density.target import Target
from pyro_implicit.ops.jacobian import hessian_products
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


class MarginalTarget(Target):
    r"""The posterior of the global latent variables of a hierarchical model.

    .. math:: \log p(\theta) + \sum_i \log \int p(x_i, z_i | \theta)\, dz_i

    Each evaluation is one pass over the minibatches, with sums in float64; memory does not depend
    on the number of groups. Under ``torch.distributed`` each process passes over its own
    minibatches, and the sums are those of all processes.

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
    :ivar num_groups: the number of groups of the last pass, in all processes.
    :ivar num_evaluations: the densities of single groups of that pass for each vector: one for
        each node.
    :ivar num_passes: the number of passes so far.
    """

    def __init__(
        self,
        groups: Groups,
        batches: Iterable[tuple],
        rule: NormalRule | None = None,
        has_all: bool = True,
    ) -> None:
        self.groups_of_batch, self.batches = groups, batches
        self.rule, self.has_all = rule or NormalRule(GROUPS.num_nodes), has_all
        self.num_groups = self.num_evaluations = self.num_passes = 0
        self._order, self._offset = 1, 0.0
        self._centre: Tensor | None = None
        source = groups.target
        if set(source.shapes) == set(groups.sites):
            raise ValueError(
                f"all latents ({', '.join(groups.sites)}) lie in plate '{groups.plate}', so that "
                "the groups have nothing in common. Cure: a prior whose parameters are latents "
                "outside of the plate, or amortize='auto'"
            )
        super().__init__(globals_only(groups), *source.args, model_kwargs=source.kwargs)
        self._fused = None

    def with_rule(self, rule: NormalRule) -> MarginalTarget:
        """Return the same posterior with other nodes."""
        return MarginalTarget(self.groups_of_batch, self.batches, rule, self.has_all)

    @torch.no_grad()
    def centre(self, latent: Tensor) -> None:
        """Subtract the sum over groups at a vector ``(latent_dim,)`` from all log-densities.

        The sum over a million groups is too large for differences of 0.01 nats in float32. Passes
        with several vectors find the modes of the groups from those at this vector.
        """
        self._centre = latent
        self._offset = self._pass(latent.unsqueeze(0), 0)[0, 0].item()

    def height(self, log_prob: Tensor) -> float:
        """Return log-densities in float64 without what :meth:`centre` subtracts."""
        return log_prob.double().item() + self._offset

    def derivatives(self, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-density with its first and second derivative, in one pass."""
        self._order = 2
        try:
            return super().derivatives(latent)
        finally:
            self._order = 1

    def _by_model(self, latent: Tensor) -> Tensor:
        return super()._by_model(latent) + self._sum(latent)

    def _sum(self, latent: Tensor) -> Tensor:
        order, dim = self._order if latent.requires_grad else 0, latent.shape[-1]
        sums = self._pass(latent.detach(), order)
        total = sums[:, 0] - self._offset
        # The polynomial with these derivatives at this point.
        step = (latent - latent.detach()).double()
        if order > 0:
            total = total + (step * sums[:, 1 : 1 + dim]).sum(-1)
        if order > 1:
            hessian = sums[:, 1 + dim :].unflatten(-1, (dim, dim))
            total = total + 0.5 * torch.einsum("pi,pij,pj->p", step, hessian, step)
        return total.to(latent)

    def _pass(self, latent: Tensor, order: int) -> Tensor:
        """Return the sum over groups at each vector, and its derivatives up to an order."""
        number, dim = latent.shape
        sums = torch.zeros(number, 1 + dim + dim * dim, dtype=torch.float64, device=latent.device)
        count = num_nodes = 0
        for batch in self.batches:
            part = self.groups_of_batch.on(batch, self.rule)
            count += part.size
            start = None
            if self._centre is not None and number > 1:
                start = part.conditional(self.constrain(self._centre.unsqueeze(0))).mode
            num_nodes = part.num_nodes
            at_once = max(1, GROUPS.elements_at_once // (num_nodes * part.size))
            for first in range(0, number, at_once):
                rows = slice(first, first + at_once)
                self._add(sums[rows], part, latent[rows], order, start)
        self.num_groups = count
        self.num_passes += 1
        if distributed.is_available() and distributed.is_initialized():
            counts = sums.new_tensor(count)
            distributed.all_reduce(sums)
            distributed.all_reduce(counts)
            self.num_groups = int(counts)
        self.num_evaluations = num_nodes * self.num_groups
        if self.has_all:
            sums *= self.groups_of_batch.full_size / self.num_groups
        return sums

    def _add(
        self, sums: Tensor, part: Groups, latent: Tensor, order: int, start: Tensor | None
    ) -> None:
        dim = latent.shape[-1]
        with torch.set_grad_enabled(order > 0):
            latent = latent.requires_grad_(order > 0)
            value = part.log_marginals(self.constrain(latent), start).double().sum(-1)
            sums[:, 0] += value.detach()
            if not order or not value.requires_grad:
                return
            (score,) = torch.autograd.grad(value.sum(), latent, create_graph=order > 1)
            sums[:, 1 : 1 + dim] += score.detach()
            if order > 1:
                hessian = hessian_products(score, latent, torch.eye(dim).to(latent))
                sums[:, 1 + dim :] += hessian.movedim(0, -2).flatten(1)
