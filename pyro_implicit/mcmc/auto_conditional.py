# SPDX-License-Identifier: Apache-2.0
"""A guide in which latents depend on their parents as prior and data imply."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuide, AutoMultivariateNormal
from pyro.infer.autoguide.initialization import InitMessenger, init_to_median
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.density.model import trace_model
from pyro_implicit.density.policy import MAX_DENSE_DIM
from pyro_implicit.density.target import Target
from pyro_implicit.guides.auto_draws import DrawSummaries
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.mcmc.spaces.conditional_noise import NoiseMap
from pyro_implicit.mcmc.spaces.conditional_reparam import ConditionalReparam
from pyro_implicit.mcmc.teaching import Taught, teach
from pyro_implicit.runtime.global_state import in_turn, with_seed
from pyro_implicit.runtime.sites import FlatPriorStart, without_sequential_plates

__all__ = ["AutoConditional"]


class AutoConditional(DrawSummaries, AutoGuide):
    r"""Gaussian noise, mapped to latents given their parents and the data.

    .. math:: z \sim N(m, S), \quad x_i = T_i(z_i; \mathrm{parents}(x_i))

    with the maps of :class:`~pyro_implicit.mcmc.ConditionalReparam`: parents before children, each
    latent centred on what its parents and the data imply, with a funnel where the model has one.
    The covariance is full up to 100 latents and diagonal above. With a diagonal covariance, the
    latents of a plate are independent given their parents, and memory is linear in their number.

    The guide runs the model for its priors, so it needs the model's arguments, also in
    ``median`` and ``quantiles``.

    **Example:**

    >>> from pyro_implicit.mcmc import conditional_reparams
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model(y):
    ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     with pyro.plate("groups", len(y)):
    ...         x = pyro.sample("x", dist.Normal(0.0, scale))
    ...         pyro.sample("y", dist.Normal(x, 0.5), obs=y)
    >>> y = torch.tensor([1.0, -2.0, 0.5])
    >>> guide = AutoConditional(model, conditional_reparams(model, AutoNormal(model), y))
    >>> {name: tuple(value.shape) for name, value in sorted(guide(y).items())}
    {'scale': (), 'x': (3,)}

    :param model: a Pyro model.
    :param reparams: the maps by site, see :func:`~pyro_implicit.mcmc.conditional_reparams`.
    """

    def __init__(
        self, model: Callable[..., Any], reparams: Mapping[str, ConditionalReparam]
    ) -> None:
        super().__init__(without_sequential_plates(model))
        self.reparams = dict(reparams)
        self.noise: Any = None
        self._last: tuple[tuple, NoiseMap | None] = (), None

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        start, model = FlatPriorStart(init_to_median), self.model
        self._model = (InitMessenger(start)(model),)  # Pyro hides all handlers outside
        # A median of a vague prior may be impossible, but only shapes are read from it.
        with pyro.validation_enabled(False):
            try:
                super()._setup_prototype(*args, **kwargs)
            finally:
                self._model = (model,)
            sites = self.prototype_trace.iter_stochastic_nodes()
            size = sum(site["value"].numel() for _, site in sites)
            kind = AutoMultivariateNormal if size <= MAX_DENSE_DIM else AutoDiagonalNormal
            self.noise = kind(poutine.reparam(self.model, self.reparams), init_loc_fn=start)
            self.noise._setup_prototype(*args, **kwargs)

    def _check_prototype(self, part_trace: Trace) -> None:
        """Skip the check of ``AutoGuideList``: the noise has its own sites."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the model after the first call; :meth:`attach` restores it after loading."""
        return {**super().__getstate__(), "_last": ((), None)}

    @property
    def model(self) -> Callable[..., Any]:
        """The model.

        :raises RuntimeError: for a guide that was copied or unpickled, before :meth:`attach`.
        """
        if self._model is None:
            raise RuntimeError(
                "this AutoConditional was copied or unpickled, and so is without its model, which "
                "it runs. Cure: guide.attach(model)"
            )
        return self._model[0]

    def attach(self, model: Callable[..., Any]) -> None:
        """Restore the model after copying or unpickling."""
        self._model = (without_sequential_plates(model),)

    def share(self, target: Target) -> None:
        """Use an existing target of the model instead of one that is built from the arguments."""
        given = (*target.args, *target.kwargs.values())
        self._last = given, NoiseMap(target, self.reparams)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample all latents, and their noise as auxiliary sites.

        :returns: values by site.
        """
        plates = self._prepared_plates(args, kwargs)
        known = self.prototype_trace.nodes
        auxiliary = poutine.infer_config(
            self.noise, lambda site: {"is_auxiliary": site["name"] not in known}
        )
        values = auxiliary(*args, **kwargs)
        for name, (value, log_density) in self._given_noise(values, args, kwargs).items():
            site = known[name]
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                fn = dist.Delta(value, log_density=log_density, event_dim=site["fn"].event_dim)
                values[name] = pyro.sample(name, fn)
        return {name: value for name, value in values.items() if name in known}

    def _given_noise(
        self, values: dict[str, Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Map noise to latents with their log-densities; particles are left of the plates."""
        noise_map = self._map(args, kwargs)
        noise = noise_map.noise
        shapes = noise.constrain(noise.init_loc)
        flat = {name: values[name].reshape(-1, *like.shape) for name, like in shapes.items()}

        def read(trace: Trace) -> list[tuple[Tensor, Tensor]]:
            sites = [trace.nodes[name] for name in self.reparams]
            return [(site["value"], site["fn"].base_dist.log_density) for site in sites]

        latent, log_dets = noise_map.to_noise(noise.unconstrain(flat))
        made = noise.read(latent, read)
        found = {}
        for (name, reparam), (value, log_density) in zip(self.reparams.items(), made, strict=True):
            noise_name = reparam.noise_name(name)
            shape = values[noise_name].shape
            event_dim = self.prototype_trace.nodes[name]["fn"].event_dim
            if (log_det := log_dets.get(noise_name)) is not None:
                log_density = log_density - sum_rightmost(log_det, event_dim)
            found[name] = (
                value.reshape(shape),
                log_density.reshape(shape[: len(shape) - event_dim]),
            )
        return found

    @torch.no_grad()
    def sample_posterior(self, num_samples: int, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return draws, vectorised.

        :returns: by site, ``(num_samples, *site_shape)``.
        """
        self._prepared_plates(args, kwargs)
        noise = draw(self.noise, num_samples, *args, **kwargs)
        noise_map = self._map(args, kwargs)
        points = noise_map.noise.unconstrain(noise)
        return noise_map.target.constrain(noise_map.to_latent(points))

    @in_turn
    @with_seed
    def take_moments(
        self,
        draws: Mapping[str, Tensor],
        *args: Any,
        seed: int | None = None,
        model_kwargs: dict[str, Any] | None = None,
    ) -> Taught:
        """Give the Gaussian the moments of the noise of draws.

        **Example:**

        >>> from pyro_implicit.mcmc import conditional_reparams
        >>> from pyro.infer.autoguide import AutoNormal
        >>> def model(y):
        ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        ...     x = pyro.sample("x", dist.Normal(0.0, scale))
        ...     pyro.sample("y", dist.Normal(x, 0.5), obs=y)
        >>> y = torch.tensor(1.0)
        >>> guide = AutoConditional(model, conditional_reparams(model, AutoNormal(model), y))
        >>> draws = {"scale": torch.rand(100) + 1.0, "x": torch.rand(100)}
        >>> taught = guide.take_moments(draws, y, seed=0)
        >>> taught.after > taught.before
        True

        :param draws: posterior draws by site, ``(num_draws, *site_shape)``.
        :param args: arguments of the model.
        :param seed: the seed of all random numbers of this call. The caller's random streams do not
            advance; without a seed they are used.
        :param model_kwargs: keyword arguments of the model.
        """
        kwargs = model_kwargs or {}
        self._prepared_plates(args, kwargs)
        noise_map = self._map(args, kwargs)
        points = noise_map.to_points(noise_map.target.unconstrain(dict(draws)))
        noise = noise_map.noise.constrain(points)
        return teach(self.noise, noise, *args, progress=False, model_kwargs=kwargs)

    def _prepared_plates(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        if self.prototype_trace is None:
            self._map(args, kwargs)  # first, as it says what is missing
            self._setup_prototype(*args, **kwargs)
        return self._create_plates(*args, **kwargs)

    def _map(self, args: tuple, kwargs: dict[str, Any]) -> NoiseMap:
        given = (*args, *kwargs.values())
        before, found = self._last
        if found is None or len(before) != len(given) or any(map(operator.is_not, before, given)):
            try:
                target = Target(self._with_data(args, kwargs), *args, model_kwargs=kwargs)
            except TypeError as error:
                if given:
                    raise
                raise TypeError(
                    f"AutoConditional reads the model's arguments, which are missing ({error}). "
                    "Cure: of a model (x, y), guide.sample_posterior(num_samples, x, y), "
                    "guide.median(x, y) and guide.quantiles([0.1, 0.9], x, y)"
                ) from error
            found = NoiseMap(target, self.reparams)
            self._last = given, found
        return found

    def _with_data(self, args: tuple, kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Return the model; data that the arguments lack are a draw, as the maps ignore them."""
        if self.prototype_trace is None:
            return self.model
        known = self.prototype_trace.nodes
        drawn = {
            name: site["value"]
            for name, site in trace_model(self.model, args, kwargs).iter_stochastic_nodes()
            if name not in known
        }
        return poutine.condition(self.model, drawn) if drawn else self.model
