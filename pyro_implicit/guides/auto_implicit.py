# SPDX-License-Identifier: Apache-2.0
"""The automatic implicit and semi-implicit guides over all latents, and their exact densities."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide, init_to_median
from pyro.nn import PyroParam
from pyro.params import param_with_module_name
from torch import Tensor, nn
from torch.distributions import Transform, constraints

from pyro_implicit.distributions import Implicit, SemiImplicit
from pyro_implicit.generators import GatedMLP, as_generator
from pyro_implicit.generators.base import Differentiable, noise_of
from pyro_implicit.guides.affine_frame import find_frame, find_frame_and_rows, gaussian_frame
from pyro_implicit.guides.auto_draws import AutoDraws, Frame, refuse_stored, registered
from pyro_implicit.guides.policy import INIT_SCALE, MAX_NOISE_DIM, NOISE_SCALE
from pyro_implicit.runtime.messages import refuse_counts, refuse_nonpositive

__all__ = [
    "AutoImplicit",
    "AutoSemiImplicit",
    "GeneratorTransform",
    "has_exact_density",
    "why_inexact",
]


class AutoImplicit(AutoDraws):
    r"""A neural sampler over all latents of a model.

    In unconstrained space the latent vector is :math:`\theta = m + L (\mu + D \odot g(z))` with
    standard normal noise z, a generator g, learnable :math:`\mu` and D, initially 0 and 1, and a
    fixed frame (m, L): a Gaussian that defines the guide's units, found at the first call unless
    ``init_loc_fn`` or ``init_scale`` is given. The default generator,
    :class:`~pyro_implicit.generators.GatedMLP`, is initially an affine map, so that training starts
    from this Gaussian. The guide has no density: train it by the ELBOs for
    :class:`~pyro_implicit.distributions.Implicit` sites.

    **Example:**

    >>> def model():
    ...     scale = pyro.sample("scale", dist.HalfNormal(1.0))
    ...     pyro.sample("x", dist.Normal(0.0, scale))
    >>> guide = AutoImplicit(model)
    >>> sorted(guide())
    ['scale', 'x']
    >>> guide.sample_posterior(5)["x"].shape
    torch.Size([5])

    :param model: a Pyro model with continuous latents and fixed structure.
    :param generator: a module ``(noise) -> value`` from ``(*batch, noise_dim)`` to
        ``(*batch, latent_dim)``, or a function from ``latent_dim`` to such a module.
    :param noise_dim: size of the noise; by default the generator's ``noise_dim``, or the latent
        dimension up to 200 (a LIVI step with an exact log-determinant takes seconds on a CPU for
        more).
    :param init_loc_fn: per-site initialisation, see Pyro's :ref:`autoguide-initialization`; the
        default is ``init_to_median``. Sites with a flat prior (``ImproperUniform``) that it cannot
        initialise begin at 0 in unconstrained space.
    :param init_scale: the initial standard deviation of each latent, in unconstrained space. The
        default 0.1 suits small models; 0.01 suits large networks. It multiplies the generator's own
        spread, which is 1 for the default generator: give :class:`~pyro_implicit.MMNN`
        ``output_scale=1.0``.
    :param frame: None: no frame, so that :math:`\theta = \mu + D \odot g(z)` starts at
        ``init_loc_fn`` with ``init_scale``. ``"mode"`` climbs from ``init_loc_fn`` to a mode and
        takes a Gaussian there, in about a second. ``"auto"`` is None if ``init_loc_fn`` or
        ``init_scale`` is given, and ``"mode"`` otherwise. A Gaussian autoguide of the same model,
        fitted or not, or a :class:`Frame` gives its location and scale, full or diagonal.
    :param create_plates: as in Pyro's autoguides; see :class:`AutoDraws` for latents of rows. If a
        frame is searched, they start at the posterior of the first minibatch.
    :raises ValueError: for an invalid argument; at the first call, for a discrete latent, a latent
        in a subsampled plate without ``create_plates``, a generator of the wrong input or output
        size, or another guide's parameters under its names in Pyro's parameter store.
    :warns UserWarning: at the first call, if ``"auto"`` finds no frame, naming the cause.
    :raises RuntimeError: at the first call, for a model without latents.
    """

    max_default_noise_dim = MAX_NOISE_DIM
    noise_dim: Any  # None until the first call, unless given

    def __init__(
        self,
        model: Callable[..., Any],
        generator: nn.Module | Callable[[int], nn.Module] | None = None,
        noise_dim: int | None = None,
        init_loc_fn: Callable[[dict[str, Any]], Tensor] | None = None,
        init_scale: float | None = None,
        frame: AutoGuide | Frame | Literal["auto", "mode"] | None = "auto",
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        refuse_nonpositive(init_scale=init_scale)
        is_searched = isinstance(frame, str)
        is_ignored = {
            "init_loc_fn": init_loc_fn is not None and frame is not None and not is_searched,
            "init_scale": init_scale is not None and frame is not None and frame != "auto",
        }
        for name in (name for name, ignored in is_ignored.items() if ignored):
            raise ValueError(
                f"{name} initialises a guide without a frame, but a frame was given, in whose "
                f"units the guide starts at location 0 and scale 1. Cure: frame=None, or no {name}"
            )
        if is_searched and frame == "auto" and not (init_loc_fn is init_scale is None):
            frame = None
        super().__init__(model, init_loc_fn or init_to_median, create_plates)
        refuse_counts(noise_dim=noise_dim)
        self.noise_dim = noise_dim
        self._init_scale = INIT_SCALE if init_scale is None else init_scale
        # In tuples, so that they are not submodules.
        self._make_generator: tuple[Any, ...] = (generator,)
        self._make_frame: tuple[Any, ...] = (frame,)

    def _make_parameters(self, *args: Any, **kwargs: Any) -> None:
        loc = self._init_loc()
        generator = self._init_generator(loc)  # before the frame, whose search takes longer
        shapes = {
            param_with_module_name("generator", name): tuple(parameter.shape)
            for name, parameter in generator.named_parameters()
        }
        refuse_stored(self, {"loc": tuple(loc.shape), **shapes})
        frame = self._frame(*args, **kwargs)
        if frame is None:
            scale = torch.full_like(loc, self._init_scale)
        else:
            loc, scale = torch.zeros_like(frame.loc), torch.ones_like(frame.loc)
        self.loc = PyroParam(loc)
        self.scale = PyroParam(scale, constraints.positive)
        for name, value in zip(Frame._fields, frame or (None,) * 3, strict=True):
            self._set_frame(name, value)
        self.generator = generator
        self._make_generator = self._make_frame = ()

    def _frame(self, *args: Any, **kwargs: Any) -> Frame | None:
        (frame,) = self._make_frame
        if frame is None or (isinstance(frame, str) and frame in ("auto", "mode")):
            if self._is_stored("loc"):  # loaded, with the frame that the guide had
                return self._stored_frame()
            if frame is None:
                return None
            model = self.model.args[-1]  # inside of Pyro's InitMessenger
            start, device = self._start.init_loc_fn, self._init_loc().device
            rows = self._first_rows
            if rows is None:
                return find_frame(model, start, device, args, kwargs)
            found = find_frame_and_rows(
                rows.minibatch(model), self._row_sites, start, device, args, kwargs
            )
            frame, rows.starts = found or (None, None)
            return frame
        if not isinstance(frame, Frame):
            with poutine.block():  # a Laplace approximation runs its model
                frame = gaussian_frame(frame, list(self._unconstrained_shapes), *args, **kwargs)
        frame.check(self.latent_dim)
        return frame

    def _is_stored(self, name: str) -> bool:
        if pyro.settings.get("module_local_params"):
            return False
        return self._pyro_get_fullname(name) in pyro.get_param_store()

    def _stored_frame(self) -> Frame | None:
        if not self._is_stored("frame_loc"):
            return None
        names = [name for name in Frame._fields if self._is_stored(f"frame_{name}")]
        store = pyro.get_param_store()
        return Frame(**{name: store[self._pyro_get_fullname(f"frame_{name}")] for name in names})

    def _set_frame(self, name: str, value: Tensor | None) -> None:
        if value is None:
            setattr(self, f"frame_{name}", None)
            return
        # A parameter, so that every way of saving keeps it, but one that nothing trains: it is
        # detached wherever it is used, and weight decay must not shrink it.
        setattr(self, f"frame_{name}", PyroParam(value.detach().clone()))
        getattr(self, f"frame_{name}_unconstrained").requires_grad_(False)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in Frame._fields:
            saved = state_dict.get(f"{prefix}frame_{name}_unconstrained")
            if (saved is None) != (getattr(self, f"frame_{name}") is None):
                delattr(self, f"frame_{name}")
                self._set_frame(name, saved)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _init_generator(self, like: Tensor) -> nn.Module:
        (generator,) = self._make_generator
        if generator is None:
            default = min(self.latent_dim, self.max_default_noise_dim)
            generator = GatedMLP(self.noise_dim or default, self.latent_dim)
        elif not isinstance(generator, nn.Module):
            generator = generator(self.latent_dim)
        generator = generator.to(dtype=like.dtype, device=like.device)
        if self.noise_dim is None:
            self.noise_dim = getattr(generator, "noise_dim", self.latent_dim)
        try:
            with torch.no_grad():
                shape = tuple(generator(like.new_zeros(2, self.noise_dim)).shape)
        except (RuntimeError, ValueError) as error:
            sizes = (getattr(part, "in_features", None) for part in generator.modules())
            wanted = next(filter(None, sizes), "...")
            raise ValueError(
                f"the generator of {type(self).__name__}, a {type(generator).__name__}, takes no "
                f"noise of shape (2, {self.noise_dim}): {error}. Cure: noise_dim={wanted}, the "
                "size of its noise"
            ) from error
        if shape != (2, self.latent_dim):
            raise ValueError(
                f"the generator of {type(self).__name__} turns noise of shape (2, "
                f"{self.noise_dim}) into {shape}, but the latents of sites "
                f"{list(self._unconstrained_shapes)} have shape (2, {self.latent_dim}). Cure: a "
                "function that makes a generator from the latent size"
            )
        return generator

    def _implicit(self) -> Implicit:
        return Implicit(registered(self, "generator"), self.get_base_dist())

    def _frame_transforms(self) -> list[dist.transforms.Transform]:
        loc, scale = self.loc, self.scale
        if self.frame_scale is not None:  # compose two diagonal maps
            units = self.frame_scale.detach()
            loc, scale = self.frame_loc.detach() + units * loc, units * scale
        transforms: list[Any] = [
            dist.transforms.AffineTransform(loc, scale, event_dim=1, cache_size=1)
        ]
        if self.frame_scale_tril is not None:
            loc, scale_tril = self.frame_loc.detach(), self.frame_scale_tril.detach()
            transforms.append(dist.transforms.LowerCholeskyAffine(loc, scale_tril, cache_size=1))
        return transforms

    def get_posterior(self, *args: Any, **kwargs: Any) -> dist.TransformedDistribution:
        """Return the distribution of the unconstrained latent vector, ``event_shape``
        (latent_dim,)."""
        return dist.TransformedDistribution(self._implicit(), self._frame_transforms())

    def _centre(self) -> Tensor:
        centre = registered(self, "generator")(self.loc.new_zeros(1, self.noise_dim)).squeeze(0)
        for transform in self._frame_transforms():
            centre = transform(centre)
        return centre

    def get_base_dist(self) -> dist.TorchDistribution:
        """Return the distribution of the noise, ``event_shape`` (noise_dim,)."""
        zeros = self.loc.new_zeros(self.noise_dim)
        return dist.Normal(zeros, torch.ones_like(zeros)).to_event(1)

    def get_transform(self, *args: Any, **kwargs: Any) -> dist.transforms.ComposeTransform:
        """Return the map from noise to the unconstrained latent vector, with an exact Jacobian.

        :class:`~pyro_implicit.mcmc.NoiseSpaceReparam` uses it. For a generator with ``inverse``,
        ``TransformedDistribution(guide.get_base_dist(), guide.get_transform())`` has a density at
        any point, otherwise only at its last draw.

        :raises NotImplementedError: for a generator that is not injective or has another number of
            noise dimensions than latents, and for a semi-implicit guide.
        """
        implicit = self._implicit()
        _check_exact(implicit, self.noise_dim)
        return dist.transforms.ComposeTransform(
            [
                GeneratorTransform(as_generator(implicit.generator), cache_size=1),
                *self._frame_transforms(),
            ]
        )

    def _has_exact_density(self) -> bool:
        return not why_inexact(self)


class AutoSemiImplicit(AutoImplicit):
    r"""A neural sampler over all latents of a model, with a little Gaussian noise on each.

    In unconstrained space the latent vector is
    :math:`\theta = m + L (\mu + D \odot (g(z) + \rho \eta))`, with standard normal z and
    :math:`\eta`: the conditional noise scales with each coordinate of the frame.
    Train it by :class:`~pyro_implicit.infer.LIVI_ELBO` or another ELBO for semi-implicit sites.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro_implicit import LIVI_ELBO
    >>> def model(y=torch.tensor(1.0)):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> guide = AutoSemiImplicit(model)
    >>> svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.01}), LIVI_ELBO(num_particles=8))
    >>> losses = [svi.step() for _ in range(3)]
    >>> guide.median()["x"].shape
    torch.Size([])

    :param noise_scale: :math:`\rho`, relative to the frame: a fixed positive number, or ``"learn"``
        for a learnable number per coordinate, initially 0.02. SIVI needs about 0.5. With fewer
        noise dimensions than latents, a learnt noise may grow until the guide is nearly mean-field
        and a network underfits.

    All other parameters are those of :class:`AutoImplicit`.

    :raises ValueError: for an invalid ``noise_scale``, and as :class:`AutoImplicit`.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        generator: nn.Module | Callable[[int], nn.Module] | None = None,
        noise_dim: int | None = None,
        init_loc_fn: Callable[[dict[str, Any]], Tensor] | None = None,
        init_scale: float | None = None,
        frame: AutoGuide | Frame | Literal["auto", "mode"] | None = "auto",
        create_plates: Callable[..., Any] | None = None,
        noise_scale: float | Literal["learn"] = NOISE_SCALE,
    ) -> None:
        if noise_scale != "learn":
            is_number = isinstance(noise_scale, Real) and not isinstance(noise_scale, bool)
            if not (is_number and 0 < noise_scale < math.inf):
                raise ValueError(
                    f'noise_scale must be a positive number or "learn", but got {noise_scale!r}'
                )
            noise_scale = float(noise_scale)
        super().__init__(model, generator, noise_dim, init_loc_fn, init_scale, frame, create_plates)
        self._init_noise_scale = noise_scale

    def _make_parameters(self, *args: Any, **kwargs: Any) -> None:
        super()._make_parameters(*args, **kwargs)
        if self._init_noise_scale == "learn":
            scale = torch.full_like(self.loc, NOISE_SCALE)
            self.noise_scale = PyroParam(scale, constraints.positive)
        else:
            self.noise_scale = self._init_noise_scale

    def _implicit(self) -> SemiImplicit:
        return SemiImplicit(registered(self, "generator"), self.get_base_dist(), self.noise_scale)


def why_inexact(guide: Any) -> str:
    """Say why an :class:`AutoImplicit` has no exact density, with the cure; empty if it has one.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> guide = AutoImplicit(model)
    >>> _ = guide()
    >>> why_inexact(guide).split(".")[0]
    'GatedMLP may give one value to several noises'

    :param guide: a guide that was called before.
    """
    try:
        guide.get_transform()
    except NotImplementedError as error:
        return str(error)
    return ""


@torch.no_grad()
def has_exact_density(guide: Any) -> bool:
    """Check whether a guide has an exact density.

    Such guides are injective :class:`AutoImplicit` guides, and mixtures of guides whose generators
    have an ``inverse``.

    :param guide: a guide that was called before.
    """
    check = getattr(guide, "_has_exact_density", None)
    return check is not None and check()


CURE = (
    "Cure: AutoImplicit(model, AutoregressiveGenerator), or for many latents AutoImplicit(model, "
    "lambda size: ResidualGenerator(size, core_dim)), trained by InjectiveELBO"
)


class GeneratorTransform(Transform):
    """The map from noise to value, with the generator's log-determinant.

    For a generator without ``inverse``, only the last computed value can be inverted, with
    ``cache_size=1``.

    **Example:**

    >>> from pyro_implicit.generators import AutoregressiveGenerator
    >>> transform = GeneratorTransform(AutoregressiveGenerator(output_dim=3))
    >>> noise = torch.randn(5, 3)
    >>> transform.log_abs_det_jacobian(noise, transform(noise)).shape
    torch.Size([5])
    >>> torch.allclose(transform.inv(transform(noise)), noise, atol=1e-4)
    True

    :param generator: an injective :class:`~pyro_implicit.generators.Generator` of equal noise and
        output dimension.
    :param cache_size: as in torch.
    """

    domain = constraints.real_vector
    codomain = constraints.real_vector
    bijective = True

    def __init__(self, generator: Differentiable, cache_size: int = 0) -> None:
        super().__init__(cache_size)
        self.generator = generator

    def with_cache(self, cache_size: int = 1) -> GeneratorTransform:
        """Return the transform with another cache size."""
        return GeneratorTransform(self.generator, cache_size)

    def _call(self, x: Tensor) -> Tensor:
        return self.generator(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return noise_of(self.generator, y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the generator's log-determinant, ``(*batch)``, at the noise x, ``(*batch, m)``.

        It is 0 at infinite noise, which has density 0.
        """
        return self.generator.linearise(x).log_abs_det().masked_fill(x.isinf().any(-1), 0.0)


def _check_exact(distribution: Implicit, noise_dim: int) -> None:
    """Refuse a guide whose distribution, without its frame, has no exact density."""
    (size,) = distribution.event_shape
    if isinstance(distribution, SemiImplicit):
        reason = (
            "the noise that a semi-implicit guide adds to its generator hides its exact density"
        )
    elif noise_dim != size:
        reason = (
            f"the generator turns {noise_dim} noise dimensions into {size} latents, but an exact "
            "density requires equal numbers"
        )
    elif not as_generator(distribution.generator).injective:
        reason = f"{type(distribution.generator).__name__} may give one value to several noises"
    else:
        return
    raise NotImplementedError(f"{reason}. {CURE}")
