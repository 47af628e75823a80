# SPDX-License-Identifier: Apache-2.0
"""The base of all ELBOs for implicit guides: Pyro's ``Trace_ELBO`` with densities filled in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pyro import poutine
from pyro.distributions.score_parts import ScoreParts
from pyro.infer import Trace_ELBO
from pyro.infer.util import is_validation_enabled
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor

from pyro_implicit.density.engine import BatchedRuns
from pyro_implicit.distributions import Implicit, SemiImplicit, find_implicit
from pyro_implicit.infer.engine.nonfinite import NonFiniteError, check_gradients, check_log_probs
from pyro_implicit.infer.engine.particles import Particles
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.engine.prior_draws import PriorMemory
from pyro_implicit.infer.engine.sites import DrawMessenger, ImplicitSite
from pyro_implicit.infer.engine.traces import apply_weights, set_score_parts

__all__ = ["ImplicitELBO", "ImplicitSite"]

VectorizeMode = Literal["vmap", "plate", False]
Site = dict[str, Any]


class ImplicitELBO(Trace_ELBO):
    r"""``Trace_ELBO`` for guides in which some sites have no density.

    The guide draws all particles under Pyro's particle plate. For each of its implicit sites a
    subclass supplies :math:`\log q` and its entropy gradient (:meth:`score_parts`); everything else
    is ``Trace_ELBO``'s. On guides without implicit sites it *is* ``Trace_ELBO``, with faster
    particles.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro.infer import SVI
    >>> from pyro.infer.autoguide import AutoNormal
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> loss = ImplicitELBO(num_particles=4)
    >>> isinstance(SVI(model, AutoNormal(model), pyro.optim.Adam({}), loss).step(), float)
    True

    :param num_particles: draws of the guide per step.
    :param vectorize_particles: how the model runs for all of them. ``"vmap"``: once, inside
        ``torch.func.vmap``, for any model whose Python does not depend on latent values; the
        first step compares it with a plain run, and a model that fails falls back to the loop with
        one warning that names the cause. ``"plate"``: once under Pyro's particle plate, for models
        that broadcast. ``False``: one run after the other.
    :param max_plate_nesting: as in :class:`pyro.infer.ELBO`; guessed by one run if omitted.
    :param prior_weight: weight of the log-prior, for annealing. Only 1 is Bayes.
    :param entropy_weight: weight of the guide's entropy. Only 1 is Bayes.
    :param inverse_temperature: :math:`\beta` of the target :math:`p(x, \theta)^\beta`, priors
        included (of an autoguide's latents, in unconstrained space). Raised from near 0 to 1 over
        the steps it lets a guide find separated modes; only 1 is Bayes. All three weights may be
        changed between steps.
    :param nonfinite: ``"raise"`` an error that names the term, or ``"skip"`` such steps (leaving
        all parameters alone, returning nan) and count them in ``num_skipped``.
    :raises ValueError: for arguments out of range; at the first step, for a guide with an implicit
        site that this ELBO cannot train.
    :raises NonFiniteError: for a log-probability or a gradient that is not finite.
    """

    #: The implicit distributions that the subclass can train.
    site_types: ClassVar[tuple[type[Implicit], ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for site_type in cls.site_types:
            site_type.trained_by.append(cls.__name__)

    def __init__(
        self,
        num_particles: int = 1,
        vectorize_particles: VectorizeMode = "vmap",
        max_plate_nesting: float = math.inf,
        prior_weight: float = 1.0,
        entropy_weight: float = 1.0,
        inverse_temperature: float = 1.0,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        if num_particles < 1:
            raise ValueError(f"num_particles must be at least 1, but got {num_particles}")
        if vectorize_particles not in ("vmap", "plate", False):
            raise ValueError(
                f'vectorize_particles must be "vmap", "plate" or False, got {vectorize_particles!r}'
            )
        if nonfinite not in ("raise", "skip"):
            raise ValueError(f'nonfinite must be "raise" or "skip", but got {nonfinite!r}')
        self.max_plate_nesting: float
        # The guide always runs under the particle plate, which Pyro counts in max_plate_nesting.
        super().__init__(num_particles, max_plate_nesting, vectorize_particles=True)
        self.vectorize_particles = vectorize_particles
        self.prior_weight = prior_weight
        self.entropy_weight = entropy_weight
        self.inverse_temperature = inverse_temperature
        self.nonfinite = nonfinite
        self.num_steps = 0
        self.num_skipped = 0
        self._value_ndims: dict[str, int] | None = None
        self._has_implicit_sites = False
        self._runs = BatchedRuns(type(self).__name__, "vmap" if vectorize_particles else False)
        self._prior_memory: dict[str, PriorMemory] = {}

    def score_parts(self, site: ImplicitSite) -> ScoreParts:
        """The surrogate density of one implicit site: the one method of a subclass.

        :param site: all particles of the site.
        :returns: the value of log q, the score function term, and the term whose gradient is the
            entropy's, each of ``site.distribution.batch_shape``.
        """
        raise NotImplementedError(f"{type(self).__name__} trains no implicit sites")

    def transport(self, site: ImplicitSite) -> Tensor | None:
        """A value to be seen in place of the site's draw, for methods that bend its gradient.

        :param site: as drawn; ``site.prior`` is not known yet.
        :returns: of the shape of ``site.draw``, or None to leave it.
        """
        return None

    def _guess_max_plate_nesting(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> None:
        """Run the pair once, with all of Pyro's checks, to learn the shapes of one particle."""
        with poutine.block():
            guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
            model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(
                *args, **kwargs
            )
        if is_validation_enabled():
            check_model_guide_match(model_trace, guide_trace, self.max_plate_nesting)
        guide_trace = prune_subsample_sites(guide_trace)
        model_trace = prune_subsample_sites(model_trace)
        explicit = lambda name, site: find_implicit(site["fn"]) is None  # noqa: E731
        if is_validation_enabled():
            model_trace.compute_log_prob()
            guide_trace.compute_log_prob(explicit)
        dims = [0]
        self._value_ndims = {}
        for trace in (model_trace, guide_trace):
            for name, site in trace.nodes.items():
                if site["type"] != "sample":
                    continue
                if is_validation_enabled() and "log_prob" in site:
                    check_site_shape(site, self.max_plate_nesting)
                dims += [-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized]
                if trace is guide_trace:
                    self._value_ndims[name] = site["value"].dim()
                    self._check_trainable(name, site)
        if math.isinf(self.max_plate_nesting):
            self.max_plate_nesting = max(dims) + (self.num_particles > 1)

    def _check_trainable(self, name: str, site: Site) -> None:
        implicit = find_implicit(site["fn"])
        if implicit is None:
            return
        self._has_implicit_sites = True
        kind = SemiImplicit if isinstance(implicit, SemiImplicit) else Implicit
        if kind not in self.site_types:
            raise ValueError(
                f"{type(self).__name__} cannot train site '{name}', whose distribution is "
                f"{type(implicit).__name__}. Cure: use one of "
                f"{', '.join(implicit.trained_by) or 'the ELBOs made for it'}, or give the site a "
                f"{' or '.join(t.__name__ for t in self.site_types) or 'density'}"
            )

    def _get_traces(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Iterator[tuple[Trace, Trace]]:
        # A GuideMessenger runs the model itself, so only Pyro's own loop knows how.
        is_messenger = isinstance(poutine.unwrap(guide), poutine.messenger.Messenger)
        if not is_messenger and self._value_ndims is None:
            self._guess_max_plate_nesting(model, guide, args, kwargs)
        if is_messenger or not (self.vectorize_particles or self._has_implicit_sites):
            for _ in range(self.num_particles):
                traces = self._get_trace(model, guide, args, kwargs)
                self._weigh_and_check(*traces)
                yield traces
            return
        with DrawMessenger(self.transport) as drawn:
            guide_trace = poutine.trace(self._vectorized_num_particles(guide)).get_trace(
                *args, **kwargs
            )
        particles = Particles(
            model,
            guide_trace,
            self.num_particles,
            self._value_ndims or {},
            int(self.max_plate_nesting),
            args,
            kwargs,
        )
        model_trace = self._run_model(particles)
        guide_trace = prune_subsample_sites(guide_trace)
        for name, site in drawn.sites.items():
            memory = self._prior_memory.setdefault(name, PriorMemory())
            prior = SitePrior(site, particles, model_trace, memory)
            parts = self.score_parts(replace(site, prior=prior))
            set_score_parts(guide_trace.nodes[name], parts, site.log_abs_det)
        guide_trace.compute_score_parts()
        self._weigh_and_check(model_trace, guide_trace)
        yield model_trace, guide_trace

    def _weigh_and_check(self, model_trace: Trace, guide_trace: Trace) -> None:
        apply_weights(
            model_trace,
            guide_trace,
            self.prior_weight,
            self.entropy_weight,
            self.inverse_temperature,
        )
        check_log_probs(model_trace, guide_trace, type(self).__name__, self.num_steps)

    def _run_model(self, particles: Particles) -> Trace:
        """The model's trace for all particles, in the chosen way."""
        if self.num_particles == 1 or self.vectorize_particles == "plate":
            return particles.run_plate(self._vectorized_num_particles)
        return particles.run_all(self._runs)

    def loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """:returns: an estimate of the negative ELBO (nan for a skipped one)."""
        try:
            with torch.no_grad():
                return super().loss(model, guide, *args, **kwargs)
        except NonFiniteError as error:
            self._skip(error)
            return math.nan

    def differentiable_loss(
        self, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> Tensor:
        """:returns: a surrogate of the negative ELBO whose gradient is the estimator's.

        A skipped step returns a nan that no parameter hangs on.
        """
        self.num_steps += 1
        try:
            return super().differentiable_loss(model, guide, *args, **kwargs)
        except NonFiniteError as error:
            self._skip(error)
            return torch.full((), math.nan, requires_grad=True)

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Adds the gradients of the negative ELBO to the parameters.

        :returns: an estimate of the negative ELBO (nan for a skipped step).
        """
        self.num_steps += 1
        with poutine.trace(param_only=True) as capture:
            try:
                loss = super().loss_and_grads(model, guide, *args, **kwargs)
                check_gradients(capture.trace, type(self).__name__, self.num_steps)
                return loss
            except NonFiniteError as error:
                self._skip(error)
        for site in capture.trace.nodes.values():
            site["value"].unconstrained().grad = None
        return math.nan

    def _skip(self, error: NonFiniteError) -> None:
        if self.nonfinite == "raise":
            raise error
        self.num_skipped += 1
