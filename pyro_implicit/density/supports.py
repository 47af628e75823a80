# SPDX-License-Identifier: Apache-2.0
"""Latent variables whose supports depend on others: their positions within the supports."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import sum_rightmost
from pyro.infer.reparam.reparam import Reparam
from torch import Tensor
from torch.distributions import constraints

from pyro_implicit.runtime.sites import is_flat

__all__ = ["SupportReparam", "on_fixed_supports"]

_Interval = constraints.interval, constraints.half_open_interval
_Above = constraints.greater_than, constraints.greater_than_eq


class SupportReparam(Reparam):
    r"""Sample the position of a latent variable within its support, for moving supports.

    The unconstrained coordinate of a latent variable belongs to one support. If its bounds
    :math:`a < x < b` depend on other latent variables, this class samples

    .. math:: z = (x - a) / (b - a) \in (0, 1), \qquad
        \log p(z) = \log p(x) + \log (b - a),

    as the site ``"x_base"``, and the model computes x. With one bound, z is the distance from it.
    The posterior of x is the same. :func:`~pyro_implicit.fit` does this itself.

    **Example:**

    >>> def model():
    ...     alpha = pyro.sample("alpha", dist.Uniform(0.0, 1.0))
    ...     return pyro.sample("beta", dist.Uniform(0.0, 1.0 - alpha))
    >>> fixed = poutine.reparam(model, {"beta": SupportReparam()})
    >>> trace = poutine.trace(fixed).get_trace()
    >>> trace.nodes["beta_base"]["fn"].support
    Interval(lower_bound=0.0, upper_bound=1.0)
    >>> bool(trace.nodes["beta"]["value"] < 1 - trace.nodes["alpha"]["value"])
    True
    """

    def apply(self, msg: Any) -> Any:
        """Replace a site by its position and a deterministic value.

        :param msg: Pyro's message of the site.
        :raises NotImplementedError: for a support without bounds of each element, and for a flat
            prior.
        """
        name, value = msg["name"], msg["value"]
        fn, event_dim = self._unwrap(msg["fn"])
        if is_flat(fn):
            raise NotImplementedError(
                f"SupportReparam needs a distribution that has draws, but site '{name}' has a flat "
                "prior (ImproperUniform). Cure: a proper prior, such as dist.Uniform"
            )
        position = _Position(fn)
        given = None if value is None else position.of(value)
        found = pyro.sample(
            f"{name}_base",
            self._wrap(position, event_dim),
            obs=given,
            infer={"is_observed": msg["is_observed"]},
        )
        value = position.value(found) if value is None else value
        fixed = dist.Delta(value, event_dim=event_dim).mask(False)
        return {"fn": fixed, "value": value, "is_observed": True}


class _Position(dist.TorchDistribution):
    """The distribution of the position of a variable within its support."""

    arg_constraints: dict[str, Any] = {}
    support: Any = None  # of the position

    def __init__(self, fn: Any) -> None:
        self.fn, self.has_rsample = fn, fn.has_rsample
        self._low, self._width, inner = _bounds_of(fn)
        self.support = constraints.independent(inner, fn.event_dim) if fn.event_dim else inner
        super().__init__(fn.batch_shape, fn.event_shape, validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> _Position:
        """Return the same distribution with another batch shape."""
        return type(self)(self.fn.expand(torch.Size(batch_shape)))

    def of(self, value: Tensor) -> Tensor:
        """Return the positions of values."""
        return (value - self._low) / self._width

    def value(self, position: Tensor) -> Tensor:
        """Return the values at positions."""
        return self._low + self._width * position

    def log_prob(self, position: Tensor) -> Tensor:
        """Return the log-density of positions."""
        log_width = torch.log(torch.abs(self._width)).expand(self.shape())
        log_prob = self.fn.log_prob(self.value(position))
        return log_prob + sum_rightmost(log_width, self.fn.event_dim)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw positions."""
        return self.of(self.fn.sample(sample_shape)).detach()

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw positions, with gradients."""
        return self.of(self.fn.rsample(sample_shape))


def _bounds_of(fn: Any) -> tuple[Tensor, Tensor, Any]:
    """Return a bound, the signed width, and the support of positions."""
    support = fn.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if isinstance(support, _Interval):
        low = torch.as_tensor(support.lower_bound)
        return low, support.upper_bound - low, constraints.unit_interval
    if isinstance(support, _Above):
        low = torch.as_tensor(support.lower_bound)
        return low, torch.ones_like(low), constraints.positive
    if isinstance(support, constraints.less_than):
        high = torch.as_tensor(support.upper_bound)
        return high, -torch.ones_like(high), constraints.positive
    raise NotImplementedError(
        f"SupportReparam needs a lower or an upper bound of each element, but the support of "
        f"{type(fn).__name__} is {support}. Cure: sample on a fixed support, and compute the value"
    )


def on_fixed_supports(model: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    """Return the same model, some of whose latent variables are positions within their supports.

    **Example:**

    >>> def model():
    ...     low = pyro.sample("low", dist.Normal(0.0, 1.0))
    ...     pyro.sample("x", dist.Pareto(low.exp(), 3.0))
    >>> list(poutine.trace(on_fixed_supports(model, ["x"])).get_trace().stochastic_nodes)
    ['low', 'x_base']

    :param model: a Pyro model.
    :param names: see :class:`SupportReparam`.
    """
    return poutine.reparam(model, config=dict.fromkeys(names, SupportReparam()))
