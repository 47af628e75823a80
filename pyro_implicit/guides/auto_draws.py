# SPDX-License-Identifier: Apache-2.0
"""What an automatic guide can do by its draws alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoContinuous, init_to_median, init_to_sample
from torch import Tensor
from torch.distributions import Transform, biject_to

from pyro_implicit.density.checks import refuse_moving_supports, refuse_unfit_sites
from pyro_implicit.density.initialisation import (
    FlatPriorStart,
    example_tensor,
    without_sequential_plates,
)
from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.policy import RUNS
from pyro_implicit.guides.row_data import trace_model
from pyro_implicit.guides.summaries import DrawSummaries
from pyro_implicit.runtime.sites import is_discrete_latent, site_parts

__all__ = ["AutoDraws"]


class AutoDraws(DrawSummaries, AutoContinuous):
    """An autoguide known by its draws: the base of :class:`AutoImplicit`.

    A subclass gives ``get_posterior``, a distribution of the unconstrained latent vector that can
    be sampled, with or without a density.

    :param model: a Pyro model of fixed structure. The guide is of its continuous latents; discrete
        ones that Pyro can enumerate are left to the ELBO, which sums them out.
    :param init_loc_fn: per-site initialisation, see Pyro's :ref:`autoguide-initialization`; sites
        with a flat prior (``ImproperUniform``) that it cannot start begin at 0 in unconstrained
        space.
    :param create_plates: as in Pyro's autoguides.
    :raises ValueError: at the first call, for another discrete latent, one in a subsampled
        plate, one without unconstrained coordinates, or one whose support changes with others.
    :raises RuntimeError: at the first call, for a model without latents.
    """

    prototype_trace: Any

    def __init__(
        self,
        model: Callable[..., Any],
        init_loc_fn: Callable[[dict[str, Any]], Tensor] = init_to_median,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        self._start = FlatPriorStart(init_loc_fn)
        super().__init__(without_sequential_plates(model), init_loc_fn=self._start)
        self.create_plates = create_plates

    @staticmethod
    def _prototype_hide_fn(msg: Any) -> bool:
        return AutoContinuous._prototype_hide_fn(msg) or (
            is_discrete_latent(msg) and msg["fn"].has_enumerate_support
        )

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        try:
            self._start.like = example_tensor(self.model, args, kwargs)
            self._trace_prototype(args, kwargs)
            self._refuse_subsampled_latents()
            self._forget_data()
            with torch.no_grad():
                refuse_moving_supports(self.model, args, kwargs, self.prototype_trace)
            self._make_parameters(*args, **kwargs)
        except BaseException:
            self.prototype_trace = None  # so that the next call says so, too
            raise

    def _make_parameters(self, *args: Any, **kwargs: Any) -> None:
        """Make what the guide is trained by, for the latents that the first call has found."""

    def _trace_prototype(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Run the model at its start, or at draws of the prior if it raises an error there."""
        given = self._start.init_loc_fn
        try:
            for retries_left in reversed(range(RUNS.max_retries)):
                try:
                    return super()._setup_prototype(*args, **kwargs)
                except IMPOSSIBLE:
                    if self.prototype_trace is not None:  # the model ran: its sites are to blame
                        refuse_unfit_sites(trace_model(self.model, args, kwargs))
                        raise
                    if not retries_left:
                        raise
                    self._start.init_loc_fn = init_to_sample
        finally:
            self._start.init_loc_fn = given

    def _refuse_subsampled_latents(self) -> None:
        for name, frames in self._cond_indep_stacks.items():
            for frame in frames:
                if frame.full_size is not None and frame.full_size != frame.size:
                    raise ValueError(
                        f"site '{name}' has one latent for each of the {frame.full_size} elements "
                        f"of plate '{frame.name}', which subsamples {frame.size}: "
                        f"{type(self).__name__} would keep one latent per minibatch slot. Cure: "
                        "fit(model, 'auto', ..., amortize='auto'), or AutoAmortized(model)"
                    )

    def _forget_data(self) -> None:
        """Keep only the latents' shapes and supports, so that a saved guide holds no data."""
        trace = self.prototype_trace
        latents = {name for name, _ in trace.iter_stochastic_nodes()}
        for name in list(trace.nodes):
            if name not in latents:
                trace.remove_node(name)

    def sample_latent(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draw the unconstrained latent vector, ``(*batch, latent_dim)``."""
        infer = {"is_auxiliary": True, "latents": tuple(self._unconstrained_shapes)}
        name = f"_{self._pyro_name}_latent"
        return pyro.sample(name, self.get_posterior(*args, **kwargs), infer=infer)

    @torch.no_grad()
    def sample_posterior(self, num_samples: int, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw all latents. A guide that was called once needs no arguments.

        :param num_samples: number of draws.
        :param args: the model's arguments, if the guide was never called.
        :returns: constrained values by site, each ``(num_samples, *site_shape)``.
        """
        return self._constrain(self._draw(num_samples, *args, **kwargs))

    @torch.no_grad()
    def _draw(self, num_samples: int, *args: Any, **kwargs: Any) -> Tensor:
        """Unconstrained latents, ``(num_samples, latent_dim)``, unseen by handlers outside."""
        with poutine.block():
            if self.prototype_trace is None:
                self(*args, **kwargs)
            with self._pyro_context:  # the parameter store's values, as in a call
                return self.get_posterior(*args, **kwargs).sample(torch.Size((num_samples,)))

    def _unconstrained(
        self,
        num_samples: int,
        transforms: Mapping[str, Transform],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> dict[str, Tensor]:
        latents = self._draw(num_samples, *args, **kwargs)
        return site_parts(latents, self._unconstrained_shapes)

    def _constrain(self, latents: Tensor) -> dict[str, Tensor]:
        """By site, ``(n, *site_shape)`` of unconstrained latents ``(n, latent_dim)``."""
        nodes = self.prototype_trace.nodes
        parts = site_parts(latents, self._unconstrained_shapes).items()
        return {name: biject_to(nodes[name]["fn"].support)(value) for name, value in parts}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch; the guide must have been called once, as its parameters exist only then."""
        if self.prototype_trace is None:
            raise RuntimeError(
                f"{type(self).__name__} makes its parameters at its first call: call guide(*args) "
                "once, with any arguments of the model, before load_state_dict"
            )
        return super().load_state_dict(*args, **kwargs)
