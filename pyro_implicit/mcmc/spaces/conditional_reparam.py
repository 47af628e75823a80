# SPDX-License-Identifier: Apache-2.0
"""Latents written as noise, given their parents and the information of the data.

Priors that are not location-scale families become so in unconstrained coordinates, approximately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.transforms import OrderedTransform
from pyro.distributions.util import sum_rightmost
from pyro.infer.reparam.reparam import Reparam, ReparamMessage, ReparamResult
from pyro.ops.tensor_utils import matvecmul
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions.transforms import ExpTransform, SigmoidTransform, Transform

from pyro_implicit.density.model import total_log_prob
from pyro_implicit.density.tails import has_short_tails
from pyro_implicit.density.target import Target
from pyro_implicit.mcmc.policy import SpacePolicy
from pyro_implicit.ops.jacobian import hessian_products
from pyro_implicit.ops.matrices import (
    from_standard,
    product,
    small_matvec,
    solve_triangular,
    to_standard,
)
from pyro_implicit.runtime.sites import without_event

__all__ = [
    "SUFFIX",
    "ConditionalReparam",
    "Unconstrained",
    "base_distribution",
    "own_hessians",
    "score_of_rest",
    "data_information",
    "transform_of",
    "unused_suffix",
]


def _of_gamma(fn: Any) -> tuple[Tensor, Tensor]:
    return (fn.concentration / fn.rate).log(), fn.concentration.rsqrt()


def _of_inverse_gamma(fn: Any) -> tuple[Tensor, Tensor]:
    return (fn.rate / fn.concentration).log(), fn.concentration.rsqrt()


def _of_beta(fn: Any) -> tuple[Tensor, Tensor]:
    one, zero = fn.concentration1, fn.concentration0
    return (one / zero).log(), (one.reciprocal() + zero.reciprocal()).sqrt()


#: By family, the map from unconstrained coordinates, and location and scale in them.
_FAMILIES: dict[type, tuple[Transform, Callable[[Any], tuple[Tensor, Tensor]]]] = {
    dist.Beta: (SigmoidTransform(), _of_beta),
    dist.Gamma: (ExpTransform(), _of_gamma),
    dist.InverseGamma: (ExpTransform(), _of_inverse_gamma),
    dist.Weibull: (ExpTransform(), lambda fn: (fn.scale.log(), fn.concentration.reciprocal())),
}


class Unconstrained:
    r"""A prior in unconstrained coordinates, and the normal distribution at its mode there.

    For a value :math:`T(u)` with density p, the density of u is :math:`p(T(u)) |T'(u)|`. Its mode
    :math:`l` and its curvature at the mode, :math:`s^{-2}`, are functions of the parents:

    ================== ============================ =============================
    family             location :math:`l`           scale :math:`s`
    ================== ============================ =============================
    Beta(a, b)         :math:`\log(a / b)`          :math:`(1/a + 1/b)^{1/2}`
    Gamma(a, b)        :math:`\log(a / b)`          :math:`a^{-1/2}`
    InverseGamma(a, b) :math:`\log(b / a)`          :math:`a^{-1/2}`
    Weibull(c, k)      :math:`\log c`               :math:`1 / k`
    ================== ============================ =============================

    T is the logistic function for Beta, and the exponential function for the others. The affine map
    :math:`u = l + s \epsilon` is a bijection with a known determinant, so that densities are exact
    although :math:`\epsilon` is only approximately standard normal.

    Exponential and half families have no row: s would be constant, so that priors have no funnel,
    and the linear frame of the chains suffices.

    **Example:**

    >>> prior = Unconstrained(dist.Gamma(torch.tensor(4.0), torch.tensor(2.0)))
    >>> round(prior.loc.item(), 3), round(prior.scale.item(), 3)
    (0.693, 0.5)

    :param fn: a distribution of one of the families, without ``to_event``.
    """

    def __init__(self, fn: Any) -> None:
        self.fn, self.batch_shape, self.event_shape = fn, fn.batch_shape, fn.event_shape
        self._transform, location_scale = _entry(fn)
        self.loc, self.scale = location_scale(fn)

    @staticmethod
    def suits(fn: Any) -> bool:
        """Return whether a distribution belongs to one of the families."""
        return isinstance(fn, tuple(_FAMILIES))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of unconstrained values."""
        constrained = self._transform(value)
        log_det = self._transform.log_abs_det_jacobian(value, constrained)
        return self.fn.log_prob(constrained) + log_det


def transform_of(fn: Any) -> Transform | None:
    """Return the map from unconstrained coordinates; None if values have no bounds.

    :param fn: a distribution, without ``to_event``.
    """
    if _is_transformed(fn):
        return fn.transforms[0]
    return _entry(fn)[0] if Unconstrained.suits(fn) else None


def _is_transformed(fn: Any) -> bool:
    """Tell whether a location-scale family is mapped as its unconstrained coordinates are."""
    return (
        isinstance(fn, torch.distributions.TransformedDistribution)
        and isinstance(without_event(fn.base_dist), LOC_SCALE)
        and len(fn.transforms) == 1
        and isinstance(fn.transforms[0], (ExpTransform, SigmoidTransform, OrderedTransform))
    )


def _entry(fn: Any) -> tuple[Transform, Callable[[Any], tuple[Tensor, Tensor]]]:
    return next(entry for family, entry in _FAMILIES.items() if isinstance(fn, family))


SUFFIX = "_noise"
LOC_SCALE = (
    *(dist.Normal, dist.StudentT, dist.Cauchy, dist.Laplace, dist.Logistic, dist.Gumbel),
    Unconstrained,
)
VECTORS = dist.MultivariateNormal, dist.MultivariateStudentT


class ConditionalReparam(Reparam):
    r"""Write a latent as the noise that remains given its parents and the data.

    For a latent :math:`x = \mu + L \epsilon`, whose mean and scale depend on other latents, let the
    rest of the model be :math:`\exp(h^\top x - \frac12 x^\top W x)`. Then

    .. math::
        z = C (\epsilon - m), \quad C^\top C = I + L^\top W L, \quad
        m = (C^\top C)^{-1} L^\top (h - W \mu)

    is standard normal a posteriori for all values of the other latents. Without information of the
    data (:math:`W = 0`) this is the non-centred form, and with much information the centred form.
    In between it changes with the scale, unlike a fixed partly centred form
    (:class:`~pyro.infer.reparam.loc_scale.LocScaleReparam`): it is centred at the mouth of a funnel
    and non-centred in its neck. The density is exact in any case; W and h only affect its geometry.
    A vector with a precision matrix P, a Gaussian Markov field, is written in the same way without
    factors of P: :math:`z = C (x - m)`, :math:`C^\top C = P + W`. For a latent with bounds, x is
    its unconstrained value: the logarithm of a log-normal latent, the logit of a logit-normal one
    (``TransformedDistribution`` with ``SigmoidTransform``), the first element of an ordered
    vector and the logarithms of its differences (``OrderedTransform``), and for other families see
    ``Unconstrained``.

    **Example:**

    >>> from pyro import poutine
    >>> def model():
    ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     x = pyro.sample("x", dist.Normal(0.0, scale))
    ...     pyro.sample("y", dist.Normal(x, 0.5), obs=torch.tensor(1.0))
    >>> reparam = ConditionalReparam(precision=torch.tensor(4.0), information=torch.tensor(4.0))
    >>> trace = poutine.trace(poutine.reparam(model, {"x": reparam})).get_trace()
    >>> list(trace.stochastic_nodes)
    ['scale', 'x_noise']

    :param precision: W, ``(*batch_shape, *event_shape)``, not negative; for a
        :class:`~pyro.distributions.MultivariateNormal` or
        :class:`~pyro.distributions.MultivariateStudentT` ``(*batch_shape, n, n)``.
    :param information: h, in the latent's shape.
    :param suffix: suffix of the name of the noise.
    """

    def __init__(self, precision: Tensor, information: Tensor, suffix: str = SUFFIX) -> None:
        self.precision, self.information, self.suffix = precision, information, suffix

    @staticmethod
    def suits(fn: Any) -> bool:
        """Return whether a distribution has location and scale in unconstrained coordinates."""
        return isinstance(base_distribution(fn), (*LOC_SCALE, *VECTORS))

    @classmethod
    def suits_site(cls, site: dict[str, Any]) -> bool:
        """Return whether a site has such a distribution, neither scaled nor masked, in Pyro's
        coordinates."""
        if site["mask"] is not None or has_short_tails(site["fn"]):
            return False
        return bool((torch.as_tensor(site["scale"]) == 1).all()) and cls.suits(site["fn"])

    @staticmethod
    def is_vector(fn: Any) -> bool:
        """Return whether its precision is a matrix."""
        return isinstance(base_distribution(fn), VECTORS)

    @staticmethod
    def is_bounded(fn: Any) -> bool:
        """Return whether values have bounds, so that unconstrained values are mapped."""
        return transform_of(without_event(fn)) is not None

    def apply(self, msg: ReparamMessage) -> ReparamResult:
        """Sample noise ``"{name}{suffix}"`` in place of the site, which is computed from it."""
        name, (fn, event_dim) = self.noise_name(msg["name"]), self._unwrap(msg["fn"])
        value = self.information if msg["value"] is None else msg["value"]
        standard = dist.Normal(torch.zeros_like(value), 1.0).to_event(event_dim)
        form = self._form(fn)
        noise = None if msg["value"] is None else form.to_noise(value)
        infer = {"is_observed": msg["is_observed"]}
        noise = pyro.sample(name, standard, obs=noise, infer=infer)
        value, *parts = form.to_value(noise)
        log_density, log_det = (sum_rightmost(one, event_dim - form.event_dim) for one in parts)
        pyro.factor(f"{name}_factor", log_density - standard.log_prob(noise))
        value = value if msg["value"] is None else msg["value"]
        # The density given the noise, for guides with a density of the noise.
        delta = dist.Delta(value, -log_det, event_dim=event_dim).mask(False)
        return {"fn": delta, "value": value, "is_observed": True}

    def noise_name(self, site: str) -> str:
        """Return the name of a site's noise."""
        return f"{site}{self.suffix}"

    def to_noise(self, fn: Any, value: Tensor) -> Tensor:
        """Map a value of the site to its noise."""
        return self._form(fn).to_noise(value)

    def _form(self, fn: Any) -> _Scalar | _Vector | _VectorOfPrecision:
        base, given = base_distribution(fn), (self.precision, self.information)
        if transform := transform_of(without_event(fn)):
            return _Bounded(base, *given, transform)
        if not self.is_vector(fn):
            return _Scalar(base, *given)
        # Torch keeps the matrix that the prior was made of.
        is_normal = isinstance(base, dist.MultivariateNormal)
        is_by_precision = is_normal and "precision_matrix" in vars(base)
        return _VectorOfPrecision(base, *given) if is_by_precision else _Vector(base, *given)


def unused_suffix(latents: Collection[str], sites: Collection[str]) -> str:
    """Return ``"_noise"``, with underscores appended until no name is taken.

    :param latents: latents that may be written as noise.
    :param sites: all names of the model.
    """
    suffix = SUFFIX
    while any(f"{name}{suffix}{end}" in sites for name in latents for end in ("", "_factor")):
        suffix += "_"
    return suffix


def base_distribution(fn: Any) -> Any:
    """Strip ``to_event``, and take unconstrained coordinates if values have bounds."""
    fn = without_event(fn)
    if _is_transformed(fn):
        return without_event(fn.base_dist)
    return Unconstrained(fn) if Unconstrained.suits(fn) else fn


class _Scalar:
    """Each element by itself."""

    event_dim = 0

    def __init__(self, fn: Any, precision: Tensor, information: Tensor) -> None:
        self.fn = fn
        self.stretch = (1 + precision * fn.scale.square()).sqrt()
        self.shift = fn.scale * (information - precision * fn.loc) / self.stretch.square()

    def to_value(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        white = self.shift + noise / self.stretch
        value = self.fn.loc + self.fn.scale * white
        log_det = (self.fn.scale / self.stretch).log()
        if isinstance(self.fn, Unconstrained):
            return value, self.fn.log_prob(value) + log_det, log_det
        # By the noise: if the scale is tiny, value - loc is 0 in float32, a spurious peak.
        log_density = _standard(self.fn).log_prob(white)
        return value, log_density - self.stretch.log(), log_det

    def to_noise(self, value: Tensor) -> Tensor:
        return self.stretch * ((value - self.fn.loc) / self.fn.scale - self.shift)


def _standard(fn: Any) -> Any:
    """Return the member of a location-scale family with location 0 and scale 1."""
    # Not type(fn): a subclass has other arguments.
    family: Any = next(one for one in LOC_SCALE if isinstance(fn, one))
    shape = {name: getattr(fn, name) for name in family.arg_constraints.keys() - {"loc", "scale"}}
    zero = torch.zeros_like(fn.loc)
    return family(**shape, loc=zero, scale=torch.ones_like(zero))


class _Bounded(_Scalar):
    """The unconstrained value of each element by itself."""

    def __init__(
        self, fn: Any, precision: Tensor, information: Tensor, transform: Transform
    ) -> None:
        super().__init__(fn, precision, information)
        self.transform, self.event_dim = transform, transform.domain.event_dim

    def to_value(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, *logs = super().to_value(noise)
        log_density, log_det = (sum_rightmost(one, self.event_dim) for one in logs)
        found = self.transform(value)
        return found, log_density, log_det + self.transform.log_abs_det_jacobian(value, found)

    def to_noise(self, value: Tensor) -> Tensor:
        return super().to_noise(self.transform.inv(value))


class _Vector:
    """All elements of a vector together."""

    event_dim = 1

    def __init__(self, fn: Any, precision: Tensor, information: Tensor) -> None:
        self.fn, self.loc, self.factor = fn, fn.loc, fn.scale_tril
        weighed = product(precision, self.factor)
        identity = torch.eye(weighed.shape[-1], dtype=weighed.dtype, device=weighed.device)
        self.precision = identity + product(self.factor.mT, weighed)
        self.linear = small_matvec(self.factor.mT, information - small_matvec(precision, fn.loc))

    def to_value(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        white, log_det = from_standard(noise, self.precision, self.linear)
        log_det = log_det.sum(-1)
        scale = self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        value = self.loc + small_matvec(self.factor, white)
        if isinstance(self.fn, dist.MultivariateNormal):  # without solving for white again
            log_density = dist.Normal(0.0, 1.0).log_prob(white).sum(-1)
        else:
            one = torch.eye(noise.shape[-1]).to(noise)
            standard = dist.MultivariateStudentT(self.fn.df, torch.zeros_like(noise), one)
            log_density = standard.log_prob(white)
        return value, log_density + log_det, scale + log_det

    def to_noise(self, value: Tensor) -> Tensor:
        white = solve_triangular(self.factor, value - self.loc, upper=False)
        return to_standard(white, self.precision, self.linear)


class _VectorOfPrecision:
    """A vector with a precision matrix, which needs no factor."""

    event_dim = 1

    def __init__(self, fn: Any, precision: Tensor, information: Tensor) -> None:
        self.loc, self.prior = fn.loc, fn.precision_matrix
        self.precision = self.prior + precision
        self.linear = information + small_matvec(self.prior, fn.loc)

    def to_value(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, log_det = from_standard(noise, self.precision, self.linear)
        log_det, offset = log_det.sum(-1), value - self.loc
        zero = torch.zeros_like(noise)
        log_scale = from_standard(zero, self.prior, zero)[1].sum(-1)
        white = (offset * small_matvec(self.prior, offset)).sum(-1) + noise.shape[-1] * math.log(
            2 * math.pi
        )
        return value, log_det - log_scale - white / 2, log_det

    def to_noise(self, value: Tensor) -> Tensor:
        return to_standard(value, self.precision, self.linear)


def score_of_rest(target: Target, points: Tensor, sites: list[str]) -> Tensor:
    """Differentiate the log-density without the priors of some sites, with its graph.

    :param points: ``(num_points, latent_dim)``, which require gradients.
    """

    def rest(trace: Trace) -> Tensor:
        return total_log_prob(trace) - sum(trace.nodes[name]["log_prob_sum"] for name in sites)

    (score,) = torch.autograd.grad(target.read(points, rest).sum(), points, create_graph=True)
    return score


def own_hessians(
    score_of: Callable[[Tensor], Tensor], point: Tensor, sites: list[Tensor], policy: SpacePolicy
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the Hessian of each site, ``(count, size, count, size)``, of all in one call.

    For many columns, return estimates of its diagonal blocks, ``(count, size, size)``, by random
    signs (Hutchinson): the other blocks cancel. With each Hessian goes the sum of the squares of
    each row, ``(count, size)``: those of products with random signs have this mean. Differences of
    scores replace second derivatives that are not finite.

    :param score_of: the score at points ``(num_points, latent_dim)``, with its graph.
    :param point: ``(1, latent_dim)``.
    :param sites: for each site, its places in the latent vector, ``(count, size)``.
    :param policy: the limits.
    :returns: the score at the point, and the Hessians.
    """
    point = point.detach().requires_grad_()
    score = score_of(point)

    def products_of(some: Tensor) -> Tensor:
        exact = hessian_products(score, point, some)
        if exact.isfinite().all():
            return exact
        steps = policy.difference * some
        ends = [(point + step).detach().requires_grad_() for step in (steps, -steps)]
        ahead, behind = map(score_of, ends)
        return ((ahead - behind) / (2 * policy.difference)).detach().unsqueeze(1)

    signs, directions = [], []
    for columns in sites:
        count, size = columns.shape
        if columns.numel() <= policy.max_columns:
            signs.append(torch.eye(count).to(point))
        else:
            shape, seeded = (policy.num_probes, count), torch.Generator().manual_seed(0)
            drawn = torch.randint(2, shape, generator=seeded, device="cpu")
            signs.append(drawn.to(point) * 2 - 1)
        own = point.new_zeros(len(signs[-1]), size, point.shape[-1])
        for index in range(size):
            own[:, index, columns[:, index]] = signs[-1]
        directions.append(own.flatten(0, 1))
    products = iter(
        [
            product
            for some in torch.cat(directions).split(policy.columns_at_once)
            for product in products_of(some)
        ]
    )
    found = []
    for columns, sign, own in zip(sites, signs, directions, strict=True):
        rows = torch.stack([next(products)[0, columns] for _ in own])
        rows = rows.unflatten(0, (len(sign), -1))
        squares = rows.square().sum((0, 1))
        if columns.numel() > policy.max_columns:
            rows = torch.einsum("kb,kjbi->bij", sign, rows) / policy.num_probes
            squares = squares / policy.num_probes
        found.append((rows, squares))
    return score.detach(), found


def data_information(
    fn: Any, curvature: Tensor, gradient: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return the precision W and the linear term h that the data add to latent variables.

    Both are of a second-order expansion, in directions of negative curvature.

    The information on one latent among others of its site is the reduction of its variance: with
    the prior's precision P, the information of block b is
    :math:`W_b = ((P + W)^{-1}_{bb})^{-1} - P_b`. So if the data see only sums of steps, no step
    counts as known.

    :param fn: the prior.
    :param curvature: the negative Hessian, ``(count, size, count, size)``, or its diagonal blocks,
        ``(count, size, size)``.
    :param gradient: ``(count, size)``.
    :param value: where the Hessian was computed, ``(count, size)``.
    """
    loc, prior = _moments(fn, value)
    count, size = value.shape
    if curvature.dim() == 3:
        precision = _positive_part(curvature)
        total = precision + prior
        step = torch.linalg.solve(total, gradient - matvecmul(prior, value - loc))
    else:
        whole = _positive_part(curvature.reshape(count * size, count * size))
        whole = whole + torch.block_diag(*prior)
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(whole))
        pull = (gradient - matvecmul(prior, value - loc)).flatten()
        step = (covariance @ pull).reshape(count, size)
        blocks = covariance.reshape(count, size, count, size).diagonal(dim1=0, dim2=2)
        precision = _positive_part(torch.linalg.inv(blocks.movedim(-1, 0)) - prior)
    centre = value + step
    return precision, matvecmul(precision, centre) + matvecmul(prior, centre - loc)


def _moments(fn: Any, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return location ``(count, size)`` and precision ``(count, size, size)`` of a prior."""
    fn = base_distribution(fn)
    loc = fn.loc.expand(fn.batch_shape + fn.event_shape).reshape(value.shape)
    if ConditionalReparam.is_vector(fn):
        precision = fn.precision_matrix.expand(*fn.batch_shape, -1, -1)
    else:
        precision = fn.scale.expand(fn.batch_shape) ** -2
    return loc.to(value), precision.reshape(*value.shape, value.shape[-1]).to(value)


def _positive_part(curvature: Tensor) -> Tensor:
    """Drop directions of positive curvature."""
    values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
    return (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT
