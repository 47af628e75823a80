# SPDX-License-Identifier: Apache-2.0
"""The posterior of all data that come in minibatches: each evaluation is one pass over them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, distributed

from pyro_implicit.density.policy import GROUPS
from pyro_implicit.density.scales import DataScales
from pyro_implicit.density.target import Target
from pyro_implicit.ops.jacobian import hessian_products
from pyro_implicit.runtime.global_state import seeded
from pyro_implicit.runtime.minibatches import num_rows
from pyro_implicit.runtime.processes import from_first, num_processes

__all__ = ["Part", "PassTarget", "RowsTarget", "WholeTarget"]


class Part(NamedTuple):
    """The contribution of one minibatch to a log-density.

    ``log_prob`` maps vectors ``(num_points, latent_dim)`` to ``(num_points,)``; ``weight`` is its
    share of all data, up to a factor; ``num_units`` is its number of rows or groups; one vector
    costs ``num_evaluations`` of their densities.
    """

    log_prob: Callable[[Tensor], Tensor]
    weight: float
    num_units: int
    num_evaluations: int


class PassTarget(Target):
    """A posterior whose log-density is a sum over minibatches, which is one pass over them.

    Sums are in float64; memory does not depend on the number of minibatches. Under
    ``torch.distributed`` each process passes over its own minibatches, and the sums are those of
    all processes. Subclasses define :meth:`_part`.

    :param target: the posterior that gives coordinates, priors and runs of the model.
    :param batches: the minibatches; each evaluation iterates over them once.
    :ivar num_units: the rows or groups of the last pass, in all processes.
    :ivar num_evaluations: the cost of that pass for one vector, in densities of single rows or
        groups. Each node of a quadrature counts once. A minibatch counts at least
        ``GROUPS.rows_of_run`` if the model takes one vector at a time.
    :ivar num_passes: the number of passes so far.
    """

    #: What a pass counts.
    unit: ClassVar[str] = "rows"

    def __init__(self, target: Target, batches: Iterable[tuple]) -> None:
        vars(self).update(vars(target))
        self._fused = None  # the model alone is not the log-density
        self._start(batches)

    def _start(self, batches: Iterable[tuple]) -> None:
        self.batches = batches
        vars(self).pop("_seconds", None)  # of other minibatches
        self.num_units = self.num_evaluations = self.num_passes = 0
        #: The highest derivative for which `log_prob` prepares: 2 within `derivatives`.
        self._order = 1
        #: What `centre` subtracts.
        self._offset = 0.0

    def _part(self, batch: tuple, is_single: bool) -> Part:
        """Return the contribution of a minibatch to an evaluation at one or several vectors."""
        raise NotImplementedError

    def _normalised(self, sums: Tensor, weight: float) -> Tensor:
        """Scale the sums of all parts, which have this weight together, to all data."""
        return sums / weight

    @torch.no_grad()
    def sums(self, latent: Tensor) -> Tensor:
        """Return the sums over all data at vectors ``(num_points, latent_dim)``, in float64.

        :returns: ``(num_points,)``.
        """
        return self._pass(latent, 0)[:, 0]

    def centre(self, latent: Tensor) -> None:
        """Subtract the sum at a vector ``(latent_dim,)`` from all log-densities.

        The sum over a million rows is too large for differences of 0.01 nats in float32.
        """
        self._offset = self.sums(latent.unsqueeze(0)).item()

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

    def _differences(self, latent: Tensor, directions: Tensor) -> Tensor:
        self._order = 1
        return super()._differences(latent, directions)

    def log_prob_by_site(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the log-density at coordinates that are given by site."""
        flat = [parts[name].reshape(len(parts[name]), -1) for name in self.shapes]
        return self.log_prob(torch.cat(flat, -1))

    def _by_model(self, latent: Tensor) -> Tensor:
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
        """Return the sum at each vector, and its derivatives up to an order.

        :returns: ``(num_points, 1)``, with more columns for the score, and for the Hessian.
        """
        number, dim = latent.shape
        width = 1 + dim * (order > 0) + dim * dim * (order > 1)
        sums = torch.zeros(number, width, dtype=torch.float64, device=latent.device)
        counts = sums.new_zeros(3)
        for batch in self.batches:
            part = self._part(batch, number == 1)
            counts += counts.new_tensor(part[1:])
            size = part.num_evaluations * (dim if order > 1 else 1)  # rows of the Hessian at once
            at_once = max(1, GROUPS.elements_at_once // size)
            for first in range(0, number, at_once):
                rows = slice(first, first + at_once)
                self._add(sums[rows], part, latent[rows], order)
        self.num_passes += 1
        if num_processes() > 1:
            distributed.all_reduce(sums)
            distributed.all_reduce(counts)
        weight, units, evaluations = counts.tolist()
        self.num_units, self.num_evaluations = round(units), round(evaluations)
        return self._normalised(sums, weight)

    @staticmethod
    def _add(sums: Tensor, part: Part, latent: Tensor, order: int) -> None:
        dim = latent.shape[-1]
        with torch.set_grad_enabled(order > 0):
            latent = latent.requires_grad_(order > 0)
            value = part.log_prob(latent).double()
            sums[:, 0] += value.detach()
            if not order or not value.requires_grad:
                return
            (score,) = torch.autograd.grad(value.sum(), latent, create_graph=order > 1)
            sums[:, 1 : 1 + dim] += score.detach()
            if order > 1:
                hessian = hessian_products(score, latent, torch.eye(dim).to(latent))
                sums[:, 1 + dim :] += hessian.movedim(0, -2).flatten(1)


class RowsTarget(PassTarget):
    r"""The posterior of all rows of data that come in minibatches.

    .. math:: \sum_b w_b \log p_b(\theta), \qquad w_b \propto 1 / s_b ,

    where :math:`p_b` is the density of a minibatch, whose likelihood the model scales by
    :math:`s_b`. The weights sum to 1, so the prior counts once, and each row equally.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("rows", 3, subsample_size=len(y)):
    ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> batches = [(torch.zeros(1),), (torch.ones(2),)]
    >>> target = RowsTarget(Target.of_minibatches(model, batch=batches[0]), batches)
    >>> log_prob, score, hessian = target.derivatives(torch.zeros(1, 1))
    >>> score.round(decimals=3), hessian.round(decimals=3)
    (tensor([[2.]]), tensor([[[-4.]]]))

    :param target: the posterior of a first minibatch (:meth:`Target.of_minibatches`).
    :param batches: all minibatches; each evaluation iterates over them once.
    :raises ValueError: when evaluated, for a model that is random beyond its latent variables.
    """

    def __init__(self, target: Target, batches: Iterable[tuple]) -> None:
        target = copy.copy(target)
        target._runs = target._runs.refusing_random(type(self).__name__)
        super().__init__(target, batches)
        self.of_minibatch = target
        self._scales = DataScales(target.model, target.args, target.kwargs)
        self.init_loc = from_first(self.init_loc)

    def with_batches(self, batches: Iterable[tuple]) -> RowsTarget:
        """Return the posterior of other minibatches."""
        found = copy.copy(self)
        found._start(batches)
        return found

    def in_double(self) -> RowsTarget:
        """Return the same posterior in float64."""
        return RowsTarget(self.of_minibatch.in_double(), self.batches)

    def widen(self, points: Tensor) -> bool:
        """Evaluate the model in double precision from now on, if it can."""
        is_done = super().widen(points)
        if is_done:
            self.of_minibatch = self.of_minibatch.in_double()
        return is_done

    def sample_prior(self, num_samples: int) -> Tensor:
        """Draw from the prior; all processes get the draws of the first one.

        Discrete latent variables of rows advance the random streams by the size of a minibatch.
        """
        with seeded(int(torch.randint(2**31, ())), self.init_loc.device):
            return from_first(super().sample_prior(num_samples))

    def _part(self, batch: tuple, is_single: bool) -> Part:
        part = self.of_minibatch.on(batch)
        weight = 1 / self._scales.of(part.args)
        size = None
        if self.subsampled is not None:
            size = self._scales.size_of(self.subsampled[0], part.args)
        size = size or max((num_rows(one) or 1 for one in batch), default=1)
        cost = size if part.is_vectorized else max(size, GROUPS.rows_of_run)
        return Part(lambda latent: weight * part.log_prob(latent).double(), weight, size, cost)


class WholeTarget(PassTarget):
    """The posterior of all data as a pass over a single part.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("rows", len(y)):
    ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> target = WholeTarget(Target(model, torch.ones(3)), num_rows=3)
    >>> log_prob, score, hessian = target.derivatives(torch.zeros(1, 1))
    >>> score.round(decimals=3), hessian.round(decimals=3)
    (tensor([[3.]]), tensor([[[-4.]]]))

    :param target: the posterior; one in double precision gets its vectors in it.
    :param num_rows: the number of rows of its data.
    """

    def __init__(self, target: Target, num_rows: int) -> None:
        super().__init__(target, [()])
        self._whole, self._size = target, num_rows

    def widen(self, points: Tensor) -> bool:
        """Evaluate the model in double precision from now on, if it can."""
        return self._whole.widen(points)

    @property
    def is_wide(self) -> bool:
        """Whether the model runs in double precision."""
        return self._whole.is_wide

    def _part(self, batch: tuple, is_single: bool) -> Part:
        def log_prob(latent: Tensor) -> Tensor:
            is_wide = self._whole.init_loc.dtype == torch.float64
            return self._whole.log_prob(latent.double() if is_wide else latent)

        size = max(self._size, GROUPS.rows_of_run)
        return Part(log_prob, 1.0, self._size, size)
