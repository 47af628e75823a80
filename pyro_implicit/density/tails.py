# SPDX-License-Identifier: Apache-2.0
"""Unconstrained coordinates with exponential tails, for priors without a variance."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from pyro.distributions import Cauchy, StudentT
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Transform, TransformedDistribution, biject_to, constraints

from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.policy import RUNS
from pyro_implicit.density.target import Target
from pyro_implicit.runtime.global_state import same_streams
from pyro_implicit.runtime.sites import innermost_support

__all__ = ["Tails", "find_tails", "has_short_tails", "with_short_tails"]

_Real: Any = type(constraints.real)


class Tails(NamedTuple):
    r"""Location and scale of a prior without a variance, of shapes that broadcast with its value.

    The coordinate z of a value x is given by

    .. math:: x = \mu + \sigma \sinh z.

    Tails of x that fall as :math:`|x|^{-1 - \nu}`, such as those of Student's t with :math:`\nu`
    degrees of freedom, fall as :math:`e^{-\nu |z|}`. Chains cross them in a few transitions, and
    moments exist.
    """

    loc: Tensor
    scale: Tensor


class _ShortTailed(_Real):
    """The real line, whose ``biject_to`` is that of :class:`Tails`."""

    def __init__(self, tails: Tails) -> None:
        self.tails = tails
        super().__init__()


class _Sinh(Transform):
    domain = codomain = constraints.real
    bijective = True
    sign = 1

    def __init__(self, tails: Tails) -> None:
        super().__init__()
        self.tails = tails

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Sinh) and all(map(torch.equal, self.tails, other.tails))

    def _call(self, x: Tensor) -> Tensor:
        return self.tails.loc + self.tails.scale * x.sinh()

    def _inverse(self, y: Tensor) -> Tensor:
        return ((y - self.tails.loc) / self.tails.scale).asinh()

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the logarithm of the derivative, whose cosh does not overflow here."""
        return self.tails.scale.log() + torch.logaddexp(x, -x) - math.log(2)


@biject_to.register(_ShortTailed)
def _(constraint: _ShortTailed) -> Transform:
    return _Sinh(constraint.tails)


def find_tails(target: Target) -> dict[str, Tails]:
    """Return location and scale of priors without a variance that do not depend on other latents.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    ...     pyro.sample("x", dist.Cauchy(0.0, 2.5))
    ...     pyro.sample("y", dist.Cauchy(0.0, scale))
    >>> find_tails(Target(model))
    {'x': Tails(loc=tensor(0.), scale=tensor(2.5000))}

    :param target: the posterior.
    :returns: by site. There are none if the model runs at no draw of the prior.
    """
    found = {name: tails for name, site in target.sites.items() if (tails := _tails_of(site["fn"]))}
    with same_streams():
        for _ in range(RUNS.max_retries if found else 0):
            with suppress(*IMPOSSIBLE):
                (draw,) = target.sample_prior(1)
                other = target.trace_at(draw).nodes
                moved = {name: _tails_of(other[name]["fn"]) for name in found if name in other}
                return {n: tails for n, tails in found.items() if _are_equal(tails, moved.get(n))}
    return {}


def with_short_tails(model: Callable[..., Any], tails: Mapping[str, Tails]) -> Callable[..., Any]:
    """Return the same model, with other unconstrained coordinates of some latent variables.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Cauchy(0.0, 2.5))
    >>> short = with_short_tails(model, {"x": Tails(torch.tensor(0.0), torch.tensor(2.5))})
    >>> Target(short).log_prob(torch.tensor([[0.0], [20.0]]))  # falls as exp(-|z|)
    tensor([ -1.1447, -20.4516])

    :param model: a Pyro model.
    :param tails: location and scale, by site.
    """
    return _WithShortTails(tails)(model)


def has_short_tails(fn: Any) -> bool:
    """Return whether a latent variable has the coordinates of :class:`Tails`.

    :param fn: its distribution.
    """
    return isinstance(innermost_support(fn.support), _ShortTailed)


class _WithShortTails(Messenger):
    def __init__(self, tails: Mapping[str, Tails]) -> None:
        super().__init__()
        self.tails = tails

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.tails:
            msg["fn"] = _shortened(msg["fn"], self.tails[msg["name"]])


def _shortened(fn: Any, tails: Tails) -> Any:
    """Return the same distribution, whose innermost elements have another support.

    Other families stay as they are: the prior of another model, or one that is changed already.
    """
    fn = copy.copy(fn)
    if _has_base(fn):
        fn.base_dist = _shortened(fn.base_dist, tails)
    elif type(fn) in _FAR:
        fn.support = _ShortTailed(tails)
        fn.__class__ = _FAR[type(fn)]
    return fn


def _log_prob(fn: Any, value: Tensor, df: Tensor) -> Tensor:
    """Return the log-density of Student's t; torch's overflows from 1e19 in float32."""
    distance = torch.hypot((value - fn.loc) / (fn.scale * df.sqrt()), torch.ones_like(df))
    normaliser = torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - (math.pi * df).log() / 2
    return normaliser - fn.scale.log() - (df + 1) * distance.log()


class _Far:
    """Keeps the support of an instance, which torch's ``expand`` loses."""

    support: Any

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        found = super().expand(batch_shape, _instance)  # type: ignore[misc]
        found.support = self.support
        return found


class _FarCauchy(_Far, Cauchy):
    def log_prob(self, value: Tensor) -> Tensor:
        return _log_prob(self, value, torch.ones_like(self.scale))


class _FarStudentT(_Far, StudentT):
    def log_prob(self, value: Tensor) -> Tensor:
        return _log_prob(self, value, self.df)


#: Subclasses whose log-density does not overflow in float32.
_FAR: dict[type, type] = {Cauchy: _FarCauchy, StudentT: _FarStudentT}


def _tails_of(fn: Any) -> Tails | None:
    while _has_base(fn):
        fn = fn.base_dist
    is_heavy = type(fn) is Cauchy or (type(fn) is StudentT and bool((fn.df <= 2).all()))
    return Tails(_common(fn.loc), _common(fn.scale)) if is_heavy else None


def _common(values: Tensor) -> Tensor:
    """Return one number for all elements if they are equal."""
    values = values.detach().clone()  # of a parameter, training changes the memory
    first = values.flatten()[:1].squeeze(0)
    return first if bool((values == first).all()) else values


def _has_base(fn: Any) -> bool:
    return hasattr(fn, "base_dist") and not isinstance(fn, TransformedDistribution)


def _are_equal(one: Tails, other: Tails | None) -> bool:
    return other is not None and all(map(torch.equal, one, other))
