# SPDX-License-Identifier: Apache-2.0
"""Bijections from real vectors: angles within one turn, small shares of a simplex, and positive
definite matrices."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro.distributions import SineBivariateVonMises, SineSkewed, Uniform, VonMises
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import (
    Transform,
    TransformedDistribution,
    biject_to,
    constraints,
    transform_to,
)
from torch.distributions.transforms import IndependentTransform, StickBreakingTransform
from torch.distributions.utils import tril_matrix_to_vec, vec_to_tril_matrix
from torch.nn.functional import logsigmoid, pad

from pyro_implicit.density.policy import ANGLES
from pyro_implicit.runtime.sites import innermost_support, is_latent

__all__ = [
    "InDouble",
    "LogCholesky",
    "StickBreaking",
    "intervals_of",
    "is_endless",
    "on_one_turn",
    "one_turn",
    "turns_of",
    "with_small_shares",
    "within_turn",
]


def within_turn(angle: Tensor, period: Tensor | float = 2 * math.pi) -> Tensor:
    r"""Return the same angles in :math:`[-\pi, \pi)`, or within half a period.

    **Example:**

    >>> within_turn(torch.tensor([0.5, 6.0]))
    tensor([ 0.5000, -0.2832])
    """
    return torch.remainder(angle + period / 2, period) - period / 2


class _OneTurn(constraints.Constraint):
    r"""Angles in :math:`[c - \pi, c + \pi)`; others are valid, too, and mean the same.

    With the bounds of an interval in place of the ends of that turn, its width is the period
    :math:`\tau`, instead of :math:`2 \pi`. ``biject_to`` maps real numbers to them by
    :math:`u \mapsto \theta`, u modulo :math:`\tau`. The number of turns :math:`(u - \theta) / \tau`
    is an auxiliary variable, so that the density of u is smooth, and has one mode where that of the
    angle has one, not far from c:

    .. math::
        \tilde p(u) = p(\theta)\, p(u \mid \theta), \qquad
        p(u \mid \theta) = \frac{N(u; c, s^2)}{\sum_k N(\theta + \tau k; c, s^2)}.

    It is exact: the angle of a draw of :math:`\tilde p` is one of p.

    **Example:**

    >>> transform = biject_to(one_turn(torch.tensor(3.0)))
    >>> transform(torch.tensor([-3.0, 3.5]))
    tensor([3.2832, 3.5000])
    >>> transform = biject_to(one_turn(torch.tensor(3.0), torch.zeros(()), torch.tensor(10.0)))
    >>> transform(torch.tensor([-3.0, 3.5]))
    tensor([7.0000, 3.5000])

    :param centre: c, of a shape that broadcasts with the angles.
    :param low: the least value, if it is not :math:`c - \pi`; ``high``, with it, the end.
    """

    def __init__(
        self, centre: Tensor, low: Tensor | None = None, high: Tensor | None = None
    ) -> None:
        self.centre = centre
        self.low = centre - math.pi if low is None else low
        self.high = self.low + 2 * math.pi if high is None else high
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        """Return whether values are numbers: torch takes all angles modulo a turn."""
        return value == value


#: As torch names constraints.
one_turn = _OneTurn


class _Winding(Transform):
    domain = codomain = constraints.real
    bijective = True  # up to the number of turns
    sign = 1

    def __init__(self, centre: Tensor, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.centre, self.low, self.period = centre, low, high - low
        self.largest = torch.nextafter(high, low)
        self.unit = self.period / (2 * math.pi)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Winding) and all(
            bool((getattr(self, name) == getattr(other, name)).all())
            for name in ("centre", "low", "period")
        )

    def _call(self, x: Tensor) -> Tensor:
        return torch.minimum(self.low + torch.remainder(x - self.low, self.period), self.largest)

    def _inverse(self, y: Tensor) -> Tensor:
        turned = within_turn(y - self.centre, self.period) / self.unit
        log_odds = 2 * math.pi * (turned.abs() - math.pi) / ANGLES.turn_width**2  # of the next turn
        # Draws of the angle become draws of u: some move to the next turn. Which ones is decided by
        # their last digits instead of random numbers, so that this is a function.
        moves = torch.remainder(turned.abs() / ANGLES.last_digits, 1) > 1 - log_odds.sigmoid()
        return self.centre + self.unit * (turned - 2 * math.pi * turned.sign() * moves)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log-probability of the number of turns."""
        turned = (y - self.centre) / self.unit
        turns = torch.tensor([-1.0, 0.0, 1.0], dtype=turned.dtype, device=turned.device)
        all_turns = turned.unsqueeze(-1) + 2 * math.pi * turns
        precision = ANGLES.turn_width**-2
        normaliser = (-0.5 * precision * all_turns.square()).logsumexp(-1)
        return -0.5 * precision * ((x - self.centre) / self.unit).square() - normaliser


@biject_to.register(_OneTurn)
@transform_to.register(_OneTurn)
def _(constraint: _OneTurn) -> Transform:
    return _Winding(constraint.centre, constraint.low, constraint.high)


def turns_of(trace: Trace) -> dict[str, Tensor]:
    """Return 0, the first middle of their turn, for the latent angles on the whole real line.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro import poutine
    >>> model = lambda: pyro.sample("phi", dist.VonMises(torch.zeros(2), 1.0).to_event(1))
    >>> turns_of(poutine.trace(model).get_trace())
    {'phi': tensor([0., 0.])}

    :param trace: trace of a run of the model.
    :returns: by site, of the shape of its value.
    """
    return {
        name: torch.zeros_like(site["value"])
        for name, site in trace.nodes.items()
        if is_latent(site) and is_endless(site["fn"])
    }


def intervals_of(trace: Trace) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the bounds of the uniform latent variables, which may be phases.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro import poutine
    >>> model = lambda: pyro.sample("phase", dist.Uniform(0.0, 1.0))
    >>> intervals_of(poutine.trace(model).get_trace())
    {'phase': (tensor(0.), tensor(1.))}

    :param trace: trace of a run of the model.
    :returns: by site, lower and upper bounds of the shape of its value.
    """
    found = {name: _unwrapped(site["fn"]) for name, site in trace.nodes.items() if is_latent(site)}
    return {name: (fn.low, fn.high) for name, fn in found.items() if isinstance(fn, Uniform)}


def on_one_turn(
    model: Callable[..., Any], centres: Mapping[str, Tensor | None]
) -> Callable[..., Any]:
    """Return the same model, whose latent angles lie within one turn.

    A uniform distribution keeps its bounds. Between them, its coordinate does not end.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro import poutine
    >>> model = lambda: pyro.sample("phi", dist.VonMises(0.0, 1.0))
    >>> turned = on_one_turn(model, {"phi": torch.zeros(())})
    >>> poutine.trace(turned).get_trace().nodes["phi"]["fn"].support
    OneTurn()

    :param model: a Pyro model.
    :param centres: the middle of the turn, by site, of the shape of its value; None if the density
        is not that of an angle, and ends at the ends of the turn around 0.
    """
    return _OnOneTurn(centres)(model)


class _OnOneTurn(Messenger):
    def __init__(self, centres: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        self.centres = centres

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.centres:
            msg["fn"] = _turned(msg["fn"], self.centres[msg["name"]])


class _Circle(Uniform):
    """A uniform distribution whose ends are one point."""

    support: Any = constraints.real  # of each instance another one


def _turned(fn: Any, centre: Any) -> Any:
    """Return the same distribution, whose innermost elements lie within one turn."""
    if isinstance(fn, Uniform):
        circle = _Circle(fn.low, fn.high)
        circle.support = one_turn(centre, fn.low, fn.high)
        return circle
    fn = copy.copy(fn)
    if not isinstance(fn, (SineBivariateVonMises, SineSkewed, VonMises)):
        fn.base_dist = _turned(fn.base_dist, centre)  # expanded, masked, or an event
        return fn
    fn.support = constraints.interval(-math.pi, math.pi) if centre is None else one_turn(centre)
    if not isinstance(fn, VonMises):
        fn.support = constraints.independent(fn.support, 1)
    return fn


def _unwrapped(fn: Any) -> Any:
    # Transformed angles may have another period.
    while hasattr(fn, "base_dist") and not isinstance(fn, (SineSkewed, TransformedDistribution)):
        fn = fn.base_dist
    return fn


def is_endless(fn: Any) -> bool:
    """Return whether a distribution is of angles, whose density repeats itself on the real line.

    **Example:**

    >>> import pyro.distributions as dist
    >>> is_endless(dist.VonMises(0.0, 1.0)), is_endless(dist.Normal(0.0, 1.0))
    (True, False)

    :param fn: the distribution of a site.
    """
    fn = _unwrapped(fn)
    is_angle = isinstance(fn, (SineBivariateVonMises, SineSkewed, VonMises))
    return is_angle and innermost_support(fn.support) is constraints.real


class StickBreaking(StickBreakingTransform):
    r"""The bijection of ``torch.distributions.biject_to(simplex)``, without its differences.

    .. math:: y_k = z_k \prod_{j < k} (1 - z_j), \qquad z_k = \sigma(x_k - \log(K - k)),

    for :math:`k < K` of K shares; the last share is the remainder. Coordinates are
    ``(*batch, K - 1)``, shares ``(*batch, K)``. Torch computes :math:`1 - z_j`, and the inverse by
    one minus a sum. In float32, the remainder is then at least about 1e-7, which cuts the tails of
    small shares off, such as those of a Dirichlet with concentrations below one. Here the remainder
    is a product of :math:`\sigma(-\cdot)`, and a sum of the later shares in the inverse. Torch's
    log-determinant is a function of the shares. It stops changing where shares underflow, which
    makes the tail of a Dirichlet of small concentrations flat. Here it is a function of x:

    .. math:: \log |\det J| = \sum_k \log z_k + \log (1 - z_k) + \sum_{j < k} \log (1 - z_j).

    **Example:**

    >>> bijection = StickBreaking()
    >>> shares = bijection(torch.tensor([25.0, 0.0]))
    >>> [f"{share:.1e}" for share in shares.tolist()]
    ['1.0e+00', '1.4e-11', '1.4e-11']
    >>> bijection.inv(shares).round()
    tensor([25., 0.])
    """

    def _call(self, x: Tensor) -> Tensor:
        ratio = x - _offset(x)
        before = pad(logsigmoid(-ratio).cumsum(-1), [1, 0])  # what remains before each share
        shares = (pad(logsigmoid(ratio), [0, 1]) + before).exp()
        return shares.clamp(min=torch.finfo(x.dtype).tiny)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log-determinant, ``(*batch,)``, of coordinates x."""
        ratio = x - _offset(x)
        before = pad(logsigmoid(-ratio).cumsum(-1)[..., :-1], [1, 0])
        return (logsigmoid(ratio) + logsigmoid(-ratio) + before).sum(-1)

    def _inverse(self, y: Tensor) -> Tensor:
        y = y.clamp(min=torch.finfo(y.dtype).tiny)
        rest = y.flip(-1).cumsum(-1).flip(-1)[..., 1:]
        ratio = y[..., :-1].log() - rest.log()
        return ratio + _offset(ratio)


def with_small_shares(transform: Any) -> Any:
    """Replace torch's bijection to the simplex by :class:`StickBreaking`."""
    if type(transform) is StickBreakingTransform:
        return StickBreaking()
    if isinstance(transform, IndependentTransform):
        base = with_small_shares(transform.base_transform)
        return IndependentTransform(base, transform.reinterpreted_batch_ndims)
    return transform


class InDouble(Transform):
    """The same bijection in double precision, between numbers of any precision.

    In single precision, all values of a wide interval lose digits: those of Uniform(-1e7, 1e7) are
    integers.

    **Example:**

    >>> wide = biject_to(constraints.interval(-1e7, 1e7))
    >>> wide(torch.tensor(7e-7)), InDouble(wide)(torch.tensor(7e-7))
    (tensor(4.), tensor(3.5000))

    :param base: a bijection between numbers.
    """

    bijective = True

    def __init__(self, base: Transform) -> None:
        super().__init__()
        self.base, self.domain, self.codomain = base, base.domain, base.codomain

    def _call(self, x: Tensor) -> Tensor:
        infinite = torch.full_like(x, math.inf)
        # Rounding must not go beyond the values that torch's bijection reaches in this precision.
        return self.base(x.double()).to(x).clamp(self.base(-infinite), self.base(infinite))

    def _inverse(self, y: Tensor) -> Tensor:
        return self.base.inv(y.double()).to(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log-determinant of coordinates x."""
        x = x.double()
        return self.base.log_abs_det_jacobian(x, self.base(x)).to(y)


def _offset(x: Tensor) -> Tensor:
    """Return the logarithms of the numbers of later shares, which make x = 0 the even shares."""
    return torch.arange(x.shape[-1], 0, -1, dtype=x.dtype, device=x.device).log()


class LogCholesky(Transform):
    r"""Bijection from vectors to positive definite matrices, by the logarithms of Cholesky factors.

    .. math::
        X = L L^T, \qquad L_{ii} = e^{u_{ii}}, \qquad L_{ij} = u_{ij} \text{ for } i > j, \qquad
        \log |\det J| = d \log 2 + \sum_{i=1}^d (d - i + 2)\, u_{ii}.

    ``biject_to`` returns it for the support of ``Wishart``, so that Pyro's guides and NUTS have
    coordinates of such latent variables, too. The inverse of a matrix without a factor is NaN.

    **Example:**

    >>> transform = biject_to(constraints.positive_definite)
    >>> transform(torch.tensor([0.0, 2.0, 0.0]))
    tensor([[1., 2.],
            [2., 5.]])

    **Reference:** Pinheiro and Bates (1996), *Unconstrained parametrizations for
    variance-covariance matrices*, section 2.2.
    """

    domain = constraints.real_vector
    codomain = constraints.positive_definite
    bijective = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LogCholesky)

    def forward_shape(self, shape: Any) -> torch.Size:
        """Return the shape of matrices, ``(*batch, d, d)``."""
        dim = (math.isqrt(8 * shape[-1] + 1) - 1) // 2
        if dim * (dim + 1) // 2 != shape[-1]:
            raise ValueError(f"{shape[-1]} is not the number of elements of a triangular matrix")
        return torch.Size((*shape[:-1], dim, dim))

    def inverse_shape(self, shape: Any) -> torch.Size:
        """Return the shape of vectors, ``(*batch, d (d + 1) / 2)``."""
        if len(shape) < 2 or shape[-2] != shape[-1]:
            raise ValueError(f"the shape {tuple(shape)} is not that of square matrices")
        return torch.Size((*shape[:-2], shape[-1] * (shape[-1] + 1) // 2))

    def _call(self, x: Tensor) -> Tensor:
        factor = vec_to_tril_matrix(x)
        factor = factor.tril(-1) + factor.diagonal(dim1=-2, dim2=-1).exp().diag_embed()
        return factor @ factor.mT

    def _inverse(self, y: Tensor) -> Tensor:
        factor, info = torch.linalg.cholesky_ex(y)
        factor = torch.where(info[..., None, None] == 0, factor, math.nan)
        factor = factor.tril(-1) + factor.diagonal(dim1=-2, dim2=-1).log().diag_embed()
        return tril_matrix_to_vec(factor)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log-determinant, ``(*batch,)``."""
        dim = y.shape[-1]
        weights = torch.arange(dim + 1, 1, -1).to(x)
        return dim * math.log(2) + vec_to_tril_matrix(x).diagonal(dim1=-2, dim2=-1) @ weights


@biject_to.register(constraints.positive_definite)
def _(constraint: constraints.Constraint) -> Transform:
    return LogCholesky()


@biject_to.register(constraints.MixtureSameFamilyConstraint)
@transform_to.register(constraints.MixtureSameFamilyConstraint)
def _(constraint: Any) -> Transform:
    """Return the bijection of the components. torch has none for a mixture, so Pyro's guides and
    NUTS take latent mixtures, too."""
    bounds = vars(innermost_support(constraint)).values()
    if any(isinstance(bound, Tensor) and bound.dim() > 0 for bound in bounds):
        raise NotImplementedError(f"the components of {constraint} may have different bounds")
    return biject_to(constraint.base_constraint)
