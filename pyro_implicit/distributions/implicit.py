# SPDX-License-Identifier: Apache-2.0
"""Distributions without a tractable density: a generator fed with noise, and mixtures of such."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.distributions.util import sum_rightmost
from torch import Tensor
from torch.distributions import Categorical, Distribution, constraints

from pyro_implicit.generators.base import (
    Differentiable,
    Linearisation,
    as_generator,
    has_inverse,
    noise_of,
)
from pyro_implicit.runtime.sites import innermost
from pyro_implicit.runtime.trees import leaves_of

__all__ = [
    "Draw",
    "Implicit",
    "IntractableDensityError",
    "Mixture",
    "SemiImplicit",
    "TransformedDraw",
    "draw_through",
    "find_implicit",
    "refuse_fold",
]


Generator = Callable[..., Tensor]


class IntractableDensityError(NotImplementedError, ValueError):
    """Raised by ``log_prob`` of a distribution without a density.

    It is also a :class:`ValueError`, to which Pyro's traces add the name of the site.
    """


class Draw(NamedTuple):
    """A draw of an implicit distribution, with its noise.

    ``noise`` is ``(*batch, noise_dim)``, ``value`` is ``(*batch, *event_shape)``, and
    ``linearisation``, if requested, is that of the generator at the noise, with flat values
    ``(*batch, m)``.
    """

    noise: Tensor
    value: Tensor
    linearisation: Linearisation | None


class Implicit(TorchDistribution):
    r"""The distribution of :math:`\theta = g(z)`, a generator fed with noise.

    :meth:`draw` returns the value and its noise. Only injective generators with as many values as
    noise have a density (:meth:`log_prob`). The ELBOs of :mod:`pyro_implicit.infer` train the
    distribution at any ``pyro.sample`` statement of a guide.
    It composes with ``to_event`` and, for constrained supports, with
    :class:`~pyro.distributions.TransformedDistribution`.

    **Example:**

    >>> from pyro_implicit import MLP
    >>> q = Implicit(MLP(noise_dim=4, output_dim=3), 4)
    >>> q.event_shape, q.sample((5,)).shape
    (torch.Size([3]), torch.Size([5, 3]))

    :param generator: a callable ``generator(noise)``, or ``generator(noise, context)`` if a context
        is given, from ``(*batch, noise_dim)`` to ``(*batch, *event_shape)``, with independent rows
        for any leading batch shape.
    :param noise: the size of standard normal noise, or a distribution of the noise with
        ``event_dim`` 1.
    :param context: input of the generator, of shape ``(*batch, context_dim)``; its batch shape
        broadcasts with that of the noise.
    :param validate_args: whether torch checks parameters and values; None for torch's default.
    :raises ValueError: if the noise is not a vector, or the generator loses its batch shape.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    has_rsample = True
    #: Names of the ELBOs that can train this kind of distribution; each ELBO adds its name.
    trained_by: ClassVar[list[str]] = []
    #: The last value, its noise, and the state of the generator that made it.
    _last: tuple[weakref.ref[Tensor], Tensor, tuple] | None = None

    def __init__(
        self,
        generator: Generator,
        noise: int | dist.TorchDistribution,
        context: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(noise, torch.distributions.Distribution):
            noise = _standard_normal(noise, generator, context)
        if len(noise.event_shape) != 1:
            raise ValueError(
                f"{type(self).__name__} needs a noise distribution over vectors, but got batch "
                f"shape {tuple(noise.batch_shape)} and event shape {tuple(noise.event_shape)}. "
                "Cure: noise.to_event(1), which declares its rightmost dimension as the event"
            )
        batch_shape = noise.batch_shape
        if context is not None:
            batch_shape = torch.broadcast_shapes(batch_shape, context.shape[:-1])
            context = context.expand(batch_shape + context.shape[-1:])
        self.generator = generator
        self.context = context
        self.noise_distribution = noise.expand(batch_shape)
        try:
            like = noise.mean  # without a draw
        except NotImplementedError:
            like = noise.sample()
        self._like = like.new_empty(())
        output_dim = getattr(generator, "output_dim", None)
        event_shape = torch.Size((output_dim,)) if output_dim else self._find_event_shape()
        super().__init__(batch_shape, event_shape, validate_args=validate_args)

    def __repr__(self) -> str:
        noise_dim, name = self.noise_distribution.event_shape[0], type(self.generator).__name__
        shapes = f"batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)}"
        return f"{type(self).__name__}({name}, noise_dim={noise_dim}, {shapes})"

    def _find_event_shape(self) -> torch.Size:
        arguments = [self._like.new_zeros((2,) + self.noise_distribution.event_shape)]
        if self.context is not None:
            context = self.context.reshape(-1, self.context.shape[-1])
            arguments.append(context[:1].expand(2, -1))
        with torch.no_grad():
            shape = self.generator(*arguments).shape
        if shape[:1] != (2,):
            raise ValueError(
                f"the generator of {type(self).__name__} turned noise of shape "
                f"{tuple(arguments[0].shape)} into {tuple(shape)}. Cure: a generator that keeps "
                "the leading batch shape (2,)"
            )
        return shape[1:]

    @property
    def support(self) -> constraints.Constraint:
        """The support, :math:`R^m`."""
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> Implicit:
        """Expand to independent noise for each element of ``batch_shape``."""
        new = self._get_checked_instance(Implicit, _instance)
        batch_shape = torch.Size(batch_shape)
        new.generator = self.generator
        new.context = self.context
        if self.context is not None:
            new.context = self.context.expand(batch_shape + self.context.shape[-1:])
        new.noise_distribution = self.noise_distribution.expand(batch_shape)
        new._like = self._like
        TorchDistribution.__init__(new, batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def generate(self, noise: Tensor) -> Tensor:
        """Apply the generator to noise, in this distribution's context.

        :param noise: ``(*sample_shape, *batch_shape, noise_dim)``.
        :returns: ``(*sample_shape, *batch_shape, *event_shape)``.
        """
        if self.context is None:
            return self.generator(noise)
        return self.generator(noise, self.context.expand(noise.shape[:-1] + (-1,)))

    def linearise(self, noise: Tensor) -> Linearisation:
        """Linearise the generator at some noise, in this distribution's context, with flat values.

        :param noise: ``(*batch, *batch_shape, noise_dim)``.
        """
        context = self.context
        if context is not None:
            context = context.expand(noise.shape[:-1] + (-1,))
        return as_generator(self.generator).linearise(noise, context)

    def draw(
        self,
        sample_shape: torch.Size = torch.Size(),  # noqa: B008
        linearise: bool = False,
        noise_gradient: bool = False,
    ) -> Draw:
        """Draw a value with its noise.

        :param sample_shape: sample shape of independent draws.
        :param linearise: whether to compute the generator's derivative in the same pass.
        :param noise_gradient: whether value and derivative can be differentiated in the noise.
        :returns: a draw of batch shape ``(*sample_shape, *batch_shape)``, differentiable in the
            generator's parameters and the context.
        """
        noise = self.noise_distribution.rsample(sample_shape)
        if noise_gradient:
            noise = noise.detach().requires_grad_()
        linearisation = self.linearise(noise) if linearise else None
        value = self.generate(noise) if linearisation is None else linearisation.value
        shape = noise.shape[:-1] + self.event_shape
        if value.numel() != shape.numel() or (linearisation is None and value.shape != shape):
            raise ValueError(
                f"the generator of {type(self).__name__} returned shape {tuple(value.shape)} for "
                f"noise of shape {tuple(noise.shape)}, but must return {tuple(shape)}"
            )
        return Draw(noise, self._around(value.reshape(shape)), linearisation)

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Draw, differentiably in the generator's parameters and the context.

        :returns: ``(*sample_shape, *batch_shape, *event_shape)``.
        """
        noise, value, _ = self.draw(sample_shape)
        self._last = weakref.ref(value), noise, self._state(value)
        return value

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the last draw, which has a graph and cannot be copied."""
        return {name: item for name, item in vars(self).items() if name != "_last"}

    def _around(self, value: Tensor) -> Tensor:
        return value

    def log_prob(self, value: Tensor) -> Tensor:
        r"""Return the log-density of an injective generator.

        It is :math:`\log p(z) - \log |\det J_g(z)|`, with p the density of the noise.
        The value of the last :meth:`rsample` has the noise of that draw, a constant for gradients,
        unless the generator's parameters have changed. For all other values, such as detached
        ones, the generator's ``inverse`` gives the noise.

        :param value: ``(*sample_shape, *batch_shape, *event_shape)``.
        :returns: ``(*sample_shape, *batch_shape)``.
        :raises IntractableDensityError: if the generator is not injective or has another number of
            values than noise, naming the ELBOs that can train the distribution; if it folds (its
            Jacobian has determinants of both signs); at another value than the last, without an
            ``inverse``.
        """
        is_square = self.noise_distribution.event_shape == self.event_shape
        generator = as_generator(self.generator)
        if type(self) is Implicit and is_square and generator.injective:
            if self._validate_args:
                self._validate_sample(value)
            noise = self._noise_of(value, generator)
            signs, log_abs_det = self.linearise(noise).slogdet()
            if not has_inverse(generator):
                refuse_fold(f"the generator of {type(self).__name__}", signs)
            log_prob = self.noise_distribution.log_prob(noise) - log_abs_det
            return log_prob.masked_fill(noise.isinf().any(-1), -math.inf)
        raise IntractableDensityError(
            f"the density of {type(self).__name__} is intractable, and log_prob, Trace_ELBO, "
            "render_model and importance sampling need it. Cure: to train, "
            f"{', '.join(self.trained_by) or 'the ELBOs of pyro_implicit.infer'}; to judge, "
            "evidence_bound or diagnose; to draw the model, render_model(model)"
        )

    @property
    def _tensors(self) -> list[Tensor]:
        return [*_tensors_of(self.generator), *([] if self.context is None else [self.context])]

    def _state(self, value: Tensor) -> tuple:
        """Return what changes with the value, the context and the generator's tensors."""
        tensors = [value, *self._tensors]
        # Tensors of inference mode do not count their changes.
        return tuple(None if one.is_inference() else (id(one), one._version) for one in tensors)

    def _noise_of(self, value: Tensor, generator: Differentiable) -> Tensor:
        # A constant value has another gradient than a draw of constant noise.
        is_trained = torch.is_grad_enabled() and any(one.requires_grad for one in self._tensors)
        may_be_last = value.requires_grad or not is_trained
        if may_be_last and self._last is not None and value is self._last[0]():
            _, noise, state = self._last
            if None not in state and state == self._state(value):
                return noise
        if not has_inverse(generator):
            raise IntractableDensityError(
                f"{type(generator).__name__} has no inverse, so the density of "
                f"{type(self).__name__} is known only at its last draw, with the parameters that "
                "made it. Cure: inside TransformedDistribution, transforms with cache_size=1, as "
                "in ExpTransform(cache_size=1); or AutoregressiveGenerator"
            )
        shape = torch.broadcast_shapes(value.shape, self.batch_shape + self.event_shape)
        value, context = value.expand(shape), self.context
        if context is not None:
            context = context.expand(shape[:-1] + (-1,))
        return noise_of(generator, value, context)


def _tensors_of(generator: Any) -> list[Tensor]:
    """Return the tensors of a module, or of an object of another class."""
    found = list(leaves_of(vars(generator))) if hasattr(generator, "__dict__") else []
    modules = [one for one in [generator, *found] if isinstance(one, torch.nn.Module)]
    owned = [tensor for one in modules for tensor in (*one.parameters(), *one.buffers())]
    return [*owned, *(one for one in found if isinstance(one, Tensor))]


def refuse_fold(who: str, signs: Tensor) -> None:
    """Check that the determinants of an injective generator's Jacobian have one sign.

    **Example:**

    >>> refuse_fold("the generator of site 'x'", torch.tensor([1.0, 1.0]))

    :param who: the generator, for the message.
    :param signs: the signs at all draws, of any shape.
    :raises IntractableDensityError: if both signs are among them.
    """
    if (signs > 0).any() & (signs < 0).any():  # a single synchronisation with a GPU
        raise IntractableDensityError(
            f"{who} folds: the determinant of its Jacobian has both signs among the draws, so it "
            "is not injective and its density is unknown. Cure: train with a smaller learning "
            "rate, or use AutoSemiImplicit"
        )


def _standard_normal(
    noise_dim: int, generator: Generator, context: Tensor | None
) -> dist.TorchDistribution:
    if isinstance(noise_dim, bool) or not isinstance(noise_dim, int) or noise_dim < 1:
        raise ValueError(f"noise must be a positive size or a distribution, but got {noise_dim!r}")
    tensors = [] if context is None else [context]
    if isinstance(generator, torch.nn.Module):
        tensors += generator.parameters()
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    zeros = torch.zeros(noise_dim) if like is None else like.new_zeros(noise_dim)
    return dist.Normal(zeros, torch.ones_like(zeros)).to_event(1)


class TransformedDraw(NamedTuple):
    """A draw of an implicit distribution, and its value after the transforms.

    ``draw`` belongs to ``distribution``; ``transforms`` turn its value into ``value``;
    ``log_abs_det`` is their log-determinant, of the whole distribution's batch shape, or 0.
    """

    distribution: Implicit
    draw: Draw
    value: Tensor
    log_abs_det: Tensor | float
    transforms: tuple[torch.distributions.Transform, ...]


def find_implicit(fn: torch.distributions.Distribution) -> Implicit | None:
    """Return the implicit distribution inside ``fn``, or ``None`` if ``fn`` has a density.

    **Example:**

    >>> import pyro.distributions as dist
    >>> find_implicit(dist.Normal(0.0, 1.0)) is None
    True

    :param fn: a distribution, possibly inside ``to_event``, transforms or a mask.
    """
    inner = innermost(fn)
    return inner if isinstance(inner, Implicit) else None


def draw_through(
    fn: torch.distributions.Distribution, draw: Callable[[Implicit], Draw]
) -> TransformedDraw:
    """Draw from the implicit distribution at the root of ``fn``, and apply its transforms.

    **Example:**

    >>> import pyro.distributions as dist
    >>> from pyro_implicit import MLP
    >>> q = Implicit(MLP(noise_dim=4, output_dim=3), 4).expand([5])
    >>> positive = dist.TransformedDistribution(q, dist.transforms.ExpTransform())
    >>> found = draw_through(positive, Implicit.draw)
    >>> bool((found.value > 0).all()), found.log_abs_det.shape
    (True, torch.Size([5]))

    :param fn: an implicit distribution, possibly inside ``Independent`` (``to_event``) or
        ``TransformedDistribution``.
    :param draw: draws from the implicit distribution once, without a sample shape.
    :returns: the draw and its transformed value.
    :raises ValueError: if ``fn`` wraps the implicit distribution in another way
        (``MaskedDistribution``: use ``pyro.poutine.mask``).
    """
    batch_ndim = len(fn.batch_shape)
    transforms: list[torch.distributions.Transform] = []
    while not isinstance(fn, Implicit):
        if isinstance(fn, torch.distributions.TransformedDistribution):
            transforms = [*fn.transforms, *transforms]
        elif not isinstance(fn, torch.distributions.Independent):
            raise ValueError(
                f"cannot train an implicit distribution inside {type(fn).__name__}. Cure: wrap it "
                "only by to_event or TransformedDistribution, and mask by pyro.poutine.mask"
            )
        fn = fn.base_dist
    drawn = draw(fn)
    value, log_abs_det = drawn.value, 0.0
    for transform in transforms:
        base, value = value, transform(value)
        term = transform.log_abs_det_jacobian(base, value)
        log_abs_det = log_abs_det + sum_rightmost(term, term.dim() - batch_ndim)
    return TransformedDraw(fn, drawn, value, log_abs_det, tuple(transforms))


class SemiImplicit(Implicit):
    r"""The distribution of :math:`\theta = g(z) + s \odot \eta`, :math:`\eta \sim N(0, I)`.

    The conditional :math:`q(\theta | z) = N(g(z), \mathrm{diag}(s^2))` is explicit
    (:meth:`conditional`); the marginal over the noise :math:`z` is implicit.

    **Example:**

    >>> from pyro_implicit import MLP
    >>> q = SemiImplicit(MLP(noise_dim=4, output_dim=3), 4, scale=0.05)
    >>> draw = q.draw((7,))
    >>> q.conditional(draw.noise).log_prob(draw.value).shape
    torch.Size([7])

    :param generator: see :class:`~pyro_implicit.distributions.Implicit`.
    :param noise: the size of standard normal noise, or a distribution with ``event_dim`` 1.
    :param scale: standard deviation :math:`s` of the conditional, in the units of the value: a
        positive number, or a tensor that broadcasts to ``(*batch_shape, *event_shape)``.
    :param context: see :class:`~pyro_implicit.distributions.Implicit`.
    :param validate_args: whether torch checks scale and values; None for torch's default.
    :raises ValueError: if the scale is not positive or does not broadcast.

    **References:**

    1. Yin and Zhou (2018), *Semi-Implicit Variational Inference*.
    """

    trained_by: ClassVar[list[str]] = []

    def __init__(
        self,
        generator: Generator,
        noise: int | dist.TorchDistribution,
        scale: float | Tensor,
        context: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(generator, noise, context, validate_args=validate_args)
        self.scale = torch.as_tensor(scale, dtype=self._like.dtype, device=self._like.device)
        if self._validate_args and not (self.scale > 0).all():
            raise ValueError(f"the scale of {type(self).__name__} must be positive, got {scale}")
        shape = self.batch_shape + self.event_shape
        if self.scale.dim() and not _broadcasts(self.scale.shape, shape):
            raise ValueError(
                f"the scale of {type(self).__name__} has shape {tuple(self.scale.shape)}, which "
                f"does not broadcast to the values' shape {tuple(shape)}. Cure: noise of that "
                "batch shape, noise=dist.Normal(...).expand([...]).to_event(1)"
            )

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> SemiImplicit:
        """Expand to independent noise for each element of ``batch_shape``."""
        new = self._get_checked_instance(SemiImplicit, _instance)
        new.scale = self.scale
        return super().expand(batch_shape, _instance=new)

    def _around(self, value: Tensor) -> Tensor:
        return value + self.scale * torch.randn_like(value)

    def conditional(self, noise: Tensor) -> dist.TorchDistribution:
        r"""Return the explicit :math:`q(\theta | z)`.

        :param noise: ``(*sample_shape, *batch_shape, noise_dim)``.
        :returns: an independent normal distribution of batch shape ``noise.shape[:-1]``.
        """
        return dist.Normal(self.generate(noise), self.scale).to_event(len(self.event_shape))


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    sizes = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(a in (1, b) for a, b in sizes)


class Mixture(TorchDistribution):
    r"""The mixture :math:`\sum_k w_k q_k` of explicit or implicit distributions.

    Unlike in torch's ``MixtureSameFamily``, the components may be of different classes, and each
    draws only as often as it is selected. With constant weights, the selection is part of the
    noise, and draws are differentiable in the components (``rsample``). With trained weights there
    is no ``rsample``.

    **Example:**

    >>> import pyro.distributions as dist
    >>> parts = [dist.Normal(m, 1.0).expand([2]).to_event(1) for m in (-3.0, 3.0)]
    >>> q = Mixture(torch.tensor([0.2, 0.8]).log(), parts)
    >>> q.sample((5,)).shape, q.log_prob(torch.zeros(5, 2)).shape
    (torch.Size([5, 2]), torch.Size([5]))

    :param log_weights: ``(num_components,)``, up to a common constant; -inf for weight 0.
    :param components: each of ``event_shape`` (m,) and no batch shape.
    :param validate_args: whether torch checks parameters and values; None for torch's default.
    :raises ValueError: for weights that do not match the components.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.real_vector

    def __init__(
        self,
        log_weights: Tensor,
        components: Sequence[Distribution],
        validate_args: bool | None = None,
    ) -> None:
        shapes = [(tuple(q.batch_shape), tuple(q.event_shape)) for q in components]
        if log_weights.shape != (len(shapes),) or not shapes:
            raise ValueError(
                f"log_weights has shape {tuple(log_weights.shape)} for {len(shapes)} components. "
                "Cure: one number for each, and at least one component"
            )
        if any(batch or len(event) != 1 or event != shapes[0][1] for batch, event in shapes):
            raise ValueError(
                "the components of a mixture must be vectors of one size, without a batch shape, "
                f"but their (batch_shape, event_shape) are {shapes}. Cure: mix first, then expand"
            )
        if not log_weights.logsumexp(0).isfinite():
            raise ValueError(f"log_weights cannot be normalised: {log_weights.tolist()}")
        self.log_weights = log_weights.log_softmax(0)
        self.components = list(components)
        self.has_rsample = not log_weights.requires_grad and all(q.has_rsample for q in components)
        super().__init__(torch.Size(), torch.Size(shapes[0][1]), validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> Mixture:
        """Expand to an independent selection for each element of ``batch_shape``."""
        new = self._get_checked_instance(Mixture, _instance)
        new.log_weights = self.log_weights
        new.components = self.components
        new.has_rsample = self.has_rsample
        TorchDistribution.__init__(
            new, torch.Size(batch_shape), self.event_shape, validate_args=False
        )
        new._validate_args = self._validate_args
        return new

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Draw, without a gradient.

        :returns: ``(*sample_shape, *batch_shape, *event_shape)``.
        """
        return self._draw(sample_shape, "sample")

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Draw, differentiably in the components.

        :returns: ``(*sample_shape, *batch_shape, *event_shape)``.
        :raises NotImplementedError: for trained weights, and components without ``rsample``.
        """
        if not self.has_rsample:
            raise NotImplementedError(
                "draws of this mixture have no gradient, as its weights are trained or a component "
                "has no rsample. Cure: sample(), or weights without gradient"
            )
        return self._draw(sample_shape, "rsample")

    def _draw(self, sample_shape: torch.Size, method: str) -> Tensor:
        shape = self._extended_shape(sample_shape)
        choice = Categorical(logits=self.log_weights).sample((math.prod(shape[:-1]),))
        counts = choice.bincount(minlength=len(self.components)).tolist()
        draws = [
            getattr(q, method)(torch.Size((count,)))
            for q, count in zip(self.components, counts, strict=True)
            if count
        ]
        # The draws are sorted by component: restore the order of the selection.
        return torch.cat(draws)[choice.argsort(stable=True).argsort()].reshape(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density; a component that overflows far from its draws has density 0.

        :param value: ``(*sample_shape, *batch_shape, *event_shape)``.
        :returns: ``(*sample_shape, *batch_shape)``.
        :raises IntractableDensityError: naming the first component without a density.
        """
        if self._validate_args:
            self._validate_sample(value)
        parts = torch.stack([self._part(k, value) for k in range(len(self.components))], -1)
        is_nan = parts.isnan()
        parts = parts.masked_fill(is_nan & ~is_nan.all(-1, keepdim=True), -math.inf)
        log_prob = (parts + self.log_weights).logsumexp(-1)
        return log_prob.expand(torch.broadcast_shapes(log_prob.shape, self.batch_shape))

    def _part(self, index: int, value: Tensor) -> Tensor:
        try:
            return self.components[index].log_prob(value)
        except NotImplementedError as error:
            raise IntractableDensityError(
                f"component {index} of the mixture, {type(self.components[index]).__name__}, has "
                "no density at the draws of the others, so the mixture has none; it can only be "
                "sampled. Cure: components with a generator that has an inverse, as in "
                "AutoImplicit(model, AutoregressiveGenerator), or train each component separately"
            ) from error
