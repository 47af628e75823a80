# SPDX-License-Identifier: Apache-2.0
"""What leaves a likelihood as it is: permutations of hidden units, translations of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_implicit.ops.permutations import (
    check_units,
    permutation_log_prob,
    permute_units,
    unit_vectors,
)

__all__ = ["Group", "Permutations", "Translations"]

Draws: TypeAlias = Mapping[str, Tensor]


class Group(PyroModule):
    """Maps of latents that leave the likelihood as it is, and volumes too, with a distribution over
    these maps. A subclass gives four methods; ``log_size`` is the logarithm of their number.

    Draws are by site, ``(num_draws, *site_shape)``.
    """

    #: The sites that are moved.
    sites: tuple[str, ...] = ()
    log_size: float = math.inf

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Refuse sites that do not fit, given the shapes of all of the guide's.

        :raises ValueError: naming site and cure.
        """

    def sample(self, draws: Draws) -> Tensor:
        """A map for each draw, ``(num_draws, ...)``."""
        raise NotImplementedError

    def move(self, maps: Tensor, draws: Draws) -> dict[str, Tensor]:
        """The moved values of ``sites``."""
        raise NotImplementedError

    def information(self, maps: Tensor, moved: Draws, draws: Draws) -> Tensor:
        r"""What moved draws tell of the maps that moved them: :math:`\\log \\tau(t \\mid \\theta) -
        \\log r(t)`, r the maps' distribution and :math:`\\tau` a model of the posterior of t.

        :param maps: ``(num_moved, ...)``.
        :param moved: all sites after the move, ``(num_moved, *site_shape)``.
        :param draws: other draws, not moved, for the moments of :math:`\\tau`.
        :returns: ``(num_moved,)``, differentiable in all but ``draws``.
        """
        raise NotImplementedError


class Permutations(Group):
    """All orders of the units of a hidden layer, equally probable.

    **Example:**

    >>> group = Permutations({"0.weight": -2, "0.bias": -1, "2.weight": -1})
    >>> group.sites
    ('0.weight', '0.bias', '2.weight')

    :param units: of each site with weights into or out of the units the dimension that counts
        them, from the right: -2 for the weight of a layer that ends in them, -1 for its bias and
        for the weight of the next layer. Their prior must be the same for all units, else it is the
        ELBO that says how much is lost.
    """

    def __init__(self, units: Mapping[str, int]) -> None:
        super().__init__()
        self.units, self.sites = dict(units), tuple(units)

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Refuse sites that have no such dimension, or other numbers of units."""
        self.num_units = check_units(shapes, self.units)
        self.log_size = math.lgamma(self.num_units + 1)

    def sample(self, draws: Draws) -> Tensor:
        """Which unit of the draw stands at each place, ``(num_draws, num_units)``."""
        value = draws[self.sites[0]]
        return torch.rand(len(value), self.num_units, device=value.device).argsort(-1)

    def move(self, maps: Tensor, draws: Draws) -> dict[str, Tensor]:
        """The units in another order."""
        return permute_units(draws, self.units, maps)

    def information(self, maps: Tensor, moved: Draws, draws: Draws) -> Tensor:
        """By the Gaussians that ``draws`` of single units have: which of them made which unit."""
        vectors, before = unit_vectors(moved, self.units), unit_vectors(draws, self.units)
        center, unit = before.mean((0, 1)), before.std((0, 1)).clamp(min=_tiny(before))
        vectors, before = (vectors - center) / unit, (before - center) / unit
        loc, precision = before.mean(0), before.var(0).clamp(min=_tiny(before)).reciprocal()
        squares = vectors.square() @ precision.mT - 2 * vectors @ (loc * precision).mT
        constants = (loc.square() * precision - precision.log()).sum(-1)
        return permutation_log_prob(-0.5 * (squares + constants), maps) + self.log_size


class Translations(Group):
    r"""Shifts of a layer's weights that its inputs do not see, normally distributed.

    Weights w, ``(*rows, in_features)``, become :math:`w + s P \epsilon` with standard normal
    :math:`\epsilon`. P is nearly the projection onto what is orthogonal to all inputs, the rows of
    H:

    .. math:: P = (I + H^\top H / \delta)^{-1}, \qquad \delta = a^2 \|H\|_F^2 / N.

    An exact projection has no derivative where the inputs are outputs of another layer. Outputs
    move by at most s a / 2 times the root mean square of the inputs' norms. With as many linearly
    independent inputs as features there is nothing to shift, and P is near 0.

    **Example:**

    >>> x = torch.linspace(-1.0, 1.0, 10).unsqueeze(-1)
    >>> def inputs(w):
    ...     return torch.tanh(x @ w["0.weight"].mT + w["0.bias"].unsqueeze(-2))
    >>> group = Translations("2.weight", inputs, scale=0.1)

    :param site: the layer's weight.
    :param inputs: that the layer has for the data, ``(num_data, in_features)``; or a function that
        makes them, ``(num_draws, num_data, in_features)``, of draws of the other sites.
    :param scale: s, where its training begins. Best about the prior's standard deviation, where the
        guide is narrow.
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
        for name, value in {"scale": scale, "tolerance": tolerance}.items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, but got {value}")
        self.sites = (site,)
        self.inputs, self.tolerance = inputs, tolerance
        self.scale = PyroParam(torch.tensor(float(scale)), constraints.positive)

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Refuse a site that the guide has not, or whose size is not the inputs'."""
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
        """Standard normal noise of the weight's shape."""
        return torch.randn_like(draws[self.sites[0]])

    def move(self, maps: Tensor, draws: Draws) -> dict[str, Tensor]:
        """The weights after their shift."""
        (site,) = self.sites
        noise = maps.double().reshape(len(maps), -1, maps.shape[-1])
        shift = self.scale * _project(noise, self._inputs(draws))
        return {site: draws[site] + shift.reshape(maps.shape).to(draws[site])}

    def information(self, maps: Tensor, moved: Draws, draws: Draws) -> Tensor:
        """By Gaussian weights with the moments of ``draws``, independent of each other."""
        (site,) = self.sites
        others = draws[site].double().reshape(len(draws[site]), -1, maps.shape[-1])
        loc, precision = others.mean(0), others.var(0).clamp(min=_tiny(others)).reciprocal()
        offsets = moved[site].double().reshape(len(maps), *loc.shape) - loc
        noise = maps.double().reshape(offsets.shape)
        # The posterior of the noise, one for each row of the weights.
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
        r"""H over the root of :math:`\delta`, whose squares want double precision."""
        inputs = self.inputs if isinstance(self.inputs, Tensor) else self.inputs(draws)
        inputs = inputs.double()
        size = (inputs.square().sum((-2, -1), keepdim=True) / inputs.shape[-2]).sqrt()
        return inputs / (self.tolerance * size.clamp(min=_tiny(inputs)))


def _project(rows: Tensor, inputs: Tensor) -> Tensor:
    """Rows times the inverse of one plus the inputs' Gram matrix."""
    number, size = inputs.shape[-2:]
    if number >= size:
        gram = torch.eye(size).to(inputs) + inputs.mT @ inputs
        return torch.linalg.solve(gram, rows.mT).mT
    gram = torch.eye(number).to(inputs) + inputs @ inputs.mT  # the same by less
    return rows - torch.linalg.solve(gram, inputs @ rows.mT).mT @ inputs


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny ** 0.5
