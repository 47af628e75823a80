# SPDX-License-Identifier: Apache-2.0
"""Implicit sites of a guide: their draws, noise, densities and further draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.util import sum_rightmost
from torch import Tensor

from pyro_implicit.density.policy import RUNS
from pyro_implicit.distributions import Implicit, SemiImplicit
from pyro_implicit.generators import Linearisation, as_generator
from pyro_implicit.ops import Covariance, gaussian_entropy
from pyro_implicit.ops.semi_implicit import mixture_log_density

__all__ = [
    "PARTICLE_PLATE",
    "FlatSite",
    "ImplicitSite",
    "ParticleWeights",
    "check_generator",
    "check_same_distribution",
    "check_square",
    "check_standard_normal",
    "choose_covariance",
    "differs_by_particle",
    "exact_density",
    "exact_score",
    "explained_factor",
    "flatten_site",
    "mixing_noise",
    "mixture_log_q",
    "mixture_score",
    "moments_log_q",
    "particles_first",
    "particles_inside",
    "path_of_score",
    "path_term",
    "second_batch",
    "send_gradient",
    "send_gradients",
    "site_draws",
    "site_linearisation",
    "split_elements",
]


PARTICLE_PLATE = "num_particles_vectorized"  # Pyro's name


@dataclass(frozen=True)
class ImplicitSite:
    """All particles of one implicit sample site of the guide.

    ``distribution`` is the implicit distribution, of batch shape ``(num_particles, *plates)``
    (without the first dimension for a single particle). Its draw consists of ``noise``,
    ``(*batch_shape, noise_dim)``, of ``value``, ``(*batch_shape, *event_shape)``, and of the
    ``linearisation`` of the generator at the noise, if the ELBO requested it. ``transforms`` with
    log-determinant ``log_abs_det`` turn ``value`` into ``draw``, the value of the site, of
    ``batch_shape``, in ``plates`` of these names. ``latents`` are the sites of the model that it
    represents.
    """

    name: str
    distribution: Implicit
    noise: Tensor
    value: Tensor
    draw: Tensor
    transforms: tuple[torch.distributions.Transform, ...] = ()
    log_abs_det: Tensor | float = 0.0
    linearisation: Linearisation | None = None
    batch_shape: torch.Size = torch.Size()
    plates: frozenset[str] = frozenset()
    latents: tuple[str, ...] = ()

    def push(self, value: Tensor) -> Tensor:
        """Turn further values of ``distribution`` into values of the site."""
        for transform in self.transforms:
            value = transform(value)
        return value

    def score_at_draw(self, score: Tensor) -> Tensor:
        r"""Return the score of the site's density at ``draw``, from that of ``distribution``.

        With :math:`x = T(v)` it is :math:`T'^{-\top} (\nabla_v \log q(v) - \nabla_v \log |T'|)`.

        :param score: :math:`\nabla_v \log q(v)` at ``value``, of its shape.
        :returns: of the shape of ``draw``, a constant.
        """
        score = score.detach()
        if not self.transforms:
            return score
        batch_ndim = len(self.batch_shape)
        with torch.enable_grad():
            draw = self.draw.detach().requires_grad_()
            value, log_q = draw, 0.0
            for transform in reversed(self.transforms):
                base = transform.inv(value)
                term = transform.log_abs_det_jacobian(base, value)
                log_q = log_q - sum_rightmost(term, term.dim() - batch_ndim)
                value = base
            linear = sum_rightmost(score * value, value.dim() - batch_ndim)
            return torch.autograd.grad((linear + log_q).sum(), draw)[0]

    def gradient_at_draw(self, gradient: Tensor) -> Tensor:
        r"""Return the gradient at ``draw`` that becomes the given gradient at ``value``.

        With :math:`x = T(v)` it is :math:`T'^{-\top} g`.

        :param gradient: g, of the shape of ``value``.
        :returns: of the shape of ``draw``, a constant.
        """
        gradient = gradient.detach()
        if not self.transforms:
            return gradient
        with torch.enable_grad():
            draw = self.draw.detach().requires_grad_()
            value = draw
            for transform in reversed(self.transforms):
                value = transform.inv(value)
            return torch.autograd.grad(value, draw, gradient)[0]


class FlatSite(NamedTuple):
    """A semi-implicit site with vectors for values.

    ``value`` and ``scale`` are ``(*batch_shape, m)``, ``noise`` is ``(*batch_shape, d)``, and
    ``context`` broadcasts to it. If ``shared``, the generator is the same for all particles, and
    noise for :meth:`generate` may have size 1 in their place.
    """

    value: Tensor
    scale: Tensor
    noise: Tensor
    generator: Any
    context: Tensor | None
    shared: bool

    def generate(self, noise: Tensor) -> Tensor:
        """Turn noise ``(*any, *batch_shape, d)`` into values ``(*any, *batch_shape, m)``."""
        return self.generator(*self._inputs(noise)).reshape(noise.shape[:-1] + (-1,))

    def linearise(self, noise: Tensor) -> Linearisation:
        """Linearise the generator at noise ``(*batch_shape, d)``."""
        return as_generator(self.generator).linearise(*self._inputs(noise))

    def _inputs(self, noise: Tensor) -> tuple[Tensor, ...]:
        if self.context is None:
            return (noise,)
        return noise, self.context.expand(noise.shape[:-1] + (-1,))


def flatten_site(site: ImplicitSite, num_particles: int) -> FlatSite:
    """Return the parts of a site that its densities need.

    :param num_particles: the number of particles; if it exceeds 1, they are the first dimension.
    """
    q: Any = site.distribution
    context = q.context
    shared = num_particles > 1 and (context is None or context.stride(0) == 0)
    if shared and context is not None:
        context = context[:1]
    shape = site.noise.shape[:-1] + (-1,)
    scale = q.scale.expand(site.value.shape).reshape(shape)
    return FlatSite(site.value.reshape(shape), scale, site.noise, q.generator, context, shared)


def split_elements(site: ImplicitSite, flat: FlatSite, size: int) -> Iterator[FlatSite]:
    """Split a site's batch into elements, which are independent given their contexts.

    :param size: maximum number of elements at a time.
    :returns: sites of batch shape ``(size,)``.
    """
    q: Any = site.distribution
    batch_shape = flat.noise.shape[:-1]
    for some in torch.arange(batch_shape.numel(), device=flat.noise.device).split(size):
        index = torch.unravel_index(some, batch_shape)
        context = None if q.context is None else q.context[index]
        value, scale, noise = (part[index] for part in (flat.value, flat.scale, flat.noise))
        yield FlatSite(value, scale, noise, q.generator, context, False)


def mixing_noise(site: ImplicitSite, flat: FlatSite, num_mixing: int) -> Tensor:
    """Draw fresh noise for :func:`~pyro_implicit.ops.semi_implicit.mixture_log_density`.

    :returns: ``(num_mixing, *batch_shape, d)``, with size 1 for the particles if they share it.
    """
    distribution = site.distribution.noise_distribution
    if not flat.shared:
        return distribution.rsample(torch.Size((num_mixing,)))
    num_rounds = -(-num_mixing // len(flat.noise))
    noise = distribution.rsample(torch.Size((num_rounds,)))
    return noise.flatten(0, 1)[:num_mixing].unsqueeze(1)


def mixture_log_q(
    site: ImplicitSite, flat: FlatSite, num_mixing: int, chunk_size: int | None = None
) -> Tensor:
    """Return the log-density of the mixture of a draw's own and of fresh conditionals (SIVI).

    Its expectation is at least that of log q, so that the ELBO is bounded from below.

    :param num_mixing: fresh noises.
    :param chunk_size: see :func:`~pyro_implicit.ops.semi_implicit.mixture_log_density`.
    """
    noises = [flat.noise.unsqueeze(0), mixing_noise(site, flat, num_mixing)]
    return mixture_log_density(flat.value, flat.generate, flat.scale, noises, chunk_size=chunk_size)


def mixture_score(
    flat: FlatSite, noises: list[Tensor], log_weights: list[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-density of a mixture of conditionals, and its score at the draws, constants.

    The parameters are those of :func:`~pyro_implicit.ops.semi_implicit.mixture_log_density`.
    """
    generate = torch.no_grad()(flat.generate)
    with torch.enable_grad():
        value = flat.value.detach().requires_grad_()
        scale = flat.scale.detach()
        log_q = mixture_log_density(value, generate, scale, noises, log_weights)
        (score,) = torch.autograd.grad(log_q.sum(), value)
    return log_q.detach(), score


def path_of_score(log_q: Tensor, flat: FlatSite, score: Tensor) -> ScoreParts:
    """Return score parts with the value of log q and the gradient of the score along the draws.

    :param log_q: a constant, ``batch_shape``.
    :param score: an estimate of the score of q at ``flat.value``, of its shape.
    """
    path = (score * (flat.value - flat.value.detach())).sum(-1)
    return ScoreParts(log_q + path, 0, log_q + path)


@torch.no_grad()
def check_generator(site: ImplicitSite) -> None:
    """Refuse a generator whose values depend on more than their own noise.

    :raises ValueError: naming site and cure.
    """
    q, noise = site.distribution, site.noise
    others = (-noise).contiguous()
    others.view(-1, noise.shape[-1])[0] = noise.reshape(-1, noise.shape[-1])[0]
    values, again, among_others = (q.generate(z) for z in (noise, noise, others))
    shape = (-1, *q.event_shape)
    first, first_among_others = (v.reshape(shape)[0] for v in (values, among_others))
    tolerance = RUNS.tolerance * (1 + values.abs().max())
    if (values - again).abs().max() > tolerance:
        cause = "draws randomness of its own (dropout?)"
    elif (first - first_among_others).abs().max() > tolerance:
        cause = "mixes the rows of a batch (batch normalisation in training mode?)"
    else:
        return
    raise ValueError(
        f"the generator of site '{site.name}' {cause}, but the density needs each value to be a "
        "function of its own noise alone. Cure: call generator.eval(), or take the layer out"
    )


def check_standard_normal(site: ImplicitSite, method: str) -> None:
    """Refuse noise that is not standard normal.

    :param method: the method that needs it, for the message.
    :raises ValueError: naming site and cure.
    """
    noise_distribution = site.distribution.noise_distribution
    base = getattr(noise_distribution, "base_dist", None)
    if not isinstance(base, dist.Normal) or (base.loc != 0).any() or (base.scale != 1).any():
        raise ValueError(
            f"{method} needs standard normal noise, but the noise of site '{site.name}' is "
            f"{noise_distribution}. Cure: give the noise's size, "
            f"noise={noise_distribution.event_shape[-1]}, and let the generator scale it"
        )


def site_linearisation(site: ImplicitSite) -> Linearisation:
    """Return the generator's linearisation at the noise of a site's draw."""
    return site.linearisation or site.distribution.linearise(site.noise)


def exact_density(site: ImplicitSite) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\log q(f(z)) = \log N(z) - \log |\det J_f(z)|`, differentiable in z and f,
    and the signs of the determinants, ``(num_particles, *plates)`` each."""
    signs, log_det = site_linearisation(site).slogdet()
    log_q = site.distribution.noise_distribution.log_prob(site.noise) - log_det
    return log_q, signs.detach()


def exact_score(site: ImplicitSite) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return density and signs, as :func:`exact_density`, and the score at the draw.

    :param site: a site drawn with ``linearise=True, noise_gradient=True``.
    """
    log_q, signs = exact_density(site)
    (slope,) = torch.autograd.grad(log_q.sum(), site.noise, retain_graph=True)
    score = site_linearisation(site).solve_transposed(slope).reshape(site.value.shape)
    return log_q, signs, site.score_at_draw(score)


def check_same_distribution(site: ImplicitSite, method: str, others: str) -> None:
    """Refuse a site whose particles differ in distribution.

    :param method: the method that compares particles, for the message.
    :param others: methods that do not, for the message.
    :raises ValueError: naming site and cure.
    """
    if differs_by_particle(site.distribution):
        raise ValueError(
            f"the context or scale of site '{site.name}' depends on other latents, so that each "
            f"particle has its own distribution, but {method} compares particles of one "
            f"distribution. Cure: {others}, or a context of data alone"
        )


def check_square(site: ImplicitSite, method: str) -> None:
    """Refuse a site without an exact density.

    :param method: the method that needs it, for the message.
    :raises ValueError: naming site and cure.
    """
    q = site.distribution
    noise_dim, size = site.noise.shape[-1], q.event_shape.numel()
    if isinstance(q, SemiImplicit):
        raise ValueError(
            f"{method} cannot train site '{site.name}', whose distribution is SemiImplicit: the "
            "noise around the generator hides its exact density. Cure: use an ELBO for "
            "semi-implicit guides (LIVI_ELBO), or AutoImplicit or Implicit for the site"
        )
    if noise_dim != size:
        raise ValueError(
            f"{method} needs as many noise dimensions as values, but the generator of site "
            f"'{site.name}' turns {noise_dim} into {size}. Cure: "
            "AutoImplicit(model, AutoregressiveGenerator), for many latents "
            "AutoImplicit(model, lambda dim: ResidualGenerator(dim, core_dim=50)), or another "
            f"invertible generator with noise_dim={size}"
        )
    check_standard_normal(site, method)
    check_generator(site)


def site_draws(
    site: ImplicitSite,
    num_particles: int,
    num_draws: int,
    to_vectors: Callable[[Tensor], Tensor] | None = None,
    fresh: bool = False,
) -> Tensor:
    """Return at least ``num_draws`` draws of a site's implicit distribution, its own draws first.

    :param num_particles: the site's number of particles.
    :param to_vectors: from values ``(n, *batch_shape, *event_shape)`` to ``(n, *batch, m)``; by
        default, the values are flattened.
    :param fresh: whether new draws replace the site's own.
    :returns: the draws of all particles together, ``(*plates, n, m)``; or ``(num_particles,
        *plates, n, m)`` if the context or scale depends on other latent variables, so that each
        particle has its own distribution.
    """
    q = site.distribution
    is_pooled = num_particles > 1 and not differs_by_particle(q)
    num_rounds = -(-num_draws // num_particles) if is_pooled else num_draws
    if fresh:
        draws = q.rsample(torch.Size((num_rounds,)))
    else:
        draws = site.value.unsqueeze(0)
        if num_rounds > 1:
            draws = torch.cat([draws, q.rsample(torch.Size((num_rounds - 1,)))])
    if to_vectors is None:
        draws = draws.reshape(draws.shape[:1] + q.batch_shape + (-1,))
    else:
        draws = to_vectors(draws)
    return (draws.flatten(0, 1) if is_pooled else draws).movedim(0, -2)


def choose_covariance(
    covariance: Literal["auto"] | Covariance, site: ImplicitSite, num_draws: int, dim: int
) -> Covariance:
    """Return the kind of covariance by which a site's draws are standardised.

    :param covariance: the given kind; ``"auto"`` is full if there are twice as many draws as
        dimensions, and they fill all dimensions; else diagonal.
    :param num_draws: number of draws, of ``dim`` dimensions.
    :raises ValueError: for a full covariance of too few draws.
    """
    if covariance == "full" and num_draws <= dim:
        raise ValueError(
            f"site '{site.name}' has {dim} dimensions, but covariance=\"full\" got {num_draws} "
            f'draws. Cure: num_entropy_particles of at least {dim + 1}, or "diagonal"'
        )
    if covariance != "auto":
        return covariance
    full_rank = isinstance(site.distribution, SemiImplicit) or site.noise.shape[-1] >= dim
    return "full" if full_rank and num_draws >= 2 * dim else "diagonal"


@contextmanager
def explained_factor(site: ImplicitSite, other_cure: str = "") -> Iterator[None]:
    """Raise a ``ValueError`` with a cure if the Cholesky factor of a site's draws fails."""
    try:
        yield
    except torch.linalg.LinAlgError as error:
        raise ValueError(
            f"the Cholesky factor of the draws of site '{site.name}', or of their kernel matrix, "
            'failed. Cure: covariance="diagonal" where the generator reaches only a hyperplane '
            f"(fewer noise dimensions than latents){other_cure}"
        ) from error


def differs_by_particle(q: Implicit) -> bool:
    """Tell whether the context or scale depends on the particle."""
    conditions = []
    if q.context is not None:
        conditions.append(q.context)
    if isinstance(q, SemiImplicit):
        conditions.append(q.scale.expand(q.batch_shape + q.event_shape))
    return any(condition.stride(0) != 0 for condition in conditions)


def moments_log_q(site: ImplicitSite) -> Tensor:
    """Return the expectation of log q for a Gaussian with the moments of the site's values."""
    q = site.distribution
    points = site.value.detach().reshape(q.batch_shape + (-1,)).movedim(0, -2)
    covariance = choose_covariance("auto", site, *points.shape[-2:])
    try:
        return -gaussian_entropy(points, covariance).expand(q.batch_shape)
    except torch.linalg.LinAlgError as error:
        raise ValueError(
            f"the draws of site '{site.name}' lie on a hyperplane: the guide has collapsed, or "
            "some of its draws are far from all others. Cure: a smaller learning rate, so that a "
            "critic keeps up with the guide, or another ELBO"
        ) from error


class ParticleWeights:
    """Weights for the gradients of the particles' draws, set after the draws are made.

    It holds no reference to the draws, whose hooks refer to it: that would be a reference cycle.

    **Example:**

    >>> import torch
    >>> later, draw = ParticleWeights(), torch.zeros(2, 3, requires_grad=True)
    >>> sent = send_gradient(draw, draw, later.weigh)
    >>> later.weights = torch.tensor([1.0, 2.0])
    >>> sent.sum().backward()
    >>> draw.grad[:, 0]
    tensor([1., 2.])

    :ivar weights: ``(num_particles, *plates)``; None for gradients as they are.
    """

    def __init__(self) -> None:
        self.weights: Tensor | None = None

    def weigh(self, gradient: Tensor) -> Tensor:
        """Weight a draw's gradient, ``(num_particles, *plates, ...)``."""
        if self.weights is None:
            return gradient
        weights = self.weights.to(gradient)  # data may be of another dtype
        return gradient * weights.reshape(weights.shape + (1,) * (gradient.dim() - weights.dim()))


def send_gradient(value: Tensor, to: Tensor, through: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor with the given value, whose gradient goes to another tensor.

    **Example:**

    >>> import torch
    >>> draw = torch.zeros(3, requires_grad=True)
    >>> send_gradient(torch.ones(3), draw, lambda gradient: 2 * gradient).sum().backward()
    >>> draw.grad
    tensor([2., 2., 2.])

    :param value: the value.
    :param to: a tensor of the same shape, with gradient.
    :param through: turns the gradient at the value into the gradient of ``to``.
    """
    sent = value.detach() + (to - to.detach())
    sent.register_hook(lambda gradient: through(gradient.detach()))
    return sent


def send_gradients(
    draw: Tensor, other: Tensor, through: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return copies of two tensors, whose gradients both go to the first tensor.

    :param draw: a tensor with gradient.
    :param other: any tensor.
    :param through: turns the gradients at both copies into the gradient of ``draw``.
    """
    return _JointBackward.apply(draw, other, through)


class _JointBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, draw: Tensor, other: Tensor, through: Callable) -> tuple[Tensor, Tensor]:
        ctx.through = through
        return draw.clone(), other.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.through(*gradients), None, None


def path_term(site: ImplicitSite, score: Tensor, draw: Tensor) -> Tensor:
    """Return a term whose gradient is that of log q along the path of the draw.

    :param score: the score of the site's density at ``site.draw``, of its shape.
    :param draw: ``site.draw``, or a copy whose gradient goes elsewhere.
    :returns: ``site.batch_shape``, for score parts of the distribution without its transforms.
    """
    path = score * draw
    # The score at the draw includes the log-determinant of the site's transforms.
    return sum_rightmost(path, path.dim() - len(site.batch_shape)) + site.log_abs_det


def second_batch(site: ImplicitSite) -> ImplicitSite:
    """Draw a second, independent batch of a site."""
    noise, value, _ = site.distribution.draw()
    return replace(site, noise=noise, value=value, draw=site.push(value), linearisation=None)


def particles_inside(points: Tensor) -> Tensor:
    """Move the particles of ``(num_particles, *plates, m)`` to the second-last dimension."""
    return points.movedim(0, -2)


def particles_first(points: Tensor) -> Tensor:
    """Move the particles of ``(*plates, num_particles, m)`` to the first dimension."""
    return points.movedim(-2, 0)
