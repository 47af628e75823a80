# SPDX-License-Identifier: Apache-2.0
"""The base of all ELBOs for implicit guides: Pyro's ``Trace_ELBO`` with densities filled in."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from pyro import poutine
from pyro.distributions.score_parts import ScoreParts
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from pyro_implicit.compiled import CompileMode, check_mode, is_tracing
from pyro_implicit.distributions import Draw, Implicit, SemiImplicit, find_implicit
from pyro_implicit.infer.engine.evaluation import Evaluation
from pyro_implicit.infer.engine.memory import noting_memory
from pyro_implicit.infer.engine.nonfinite import (
    NonFiniteError,
    check_gradients,
    nonfinite_terms,
    refuse_nonfinite,
)
from pyro_implicit.infer.engine.particles import Particles
from pyro_implicit.infer.engine.prior import SitePrior
from pyro_implicit.infer.engine.prior_draws import PriorMemory
from pyro_implicit.infer.engine.sites import DrawMessenger, ImplicitSite
from pyro_implicit.infer.engine.state import StatefulELBO
from pyro_implicit.infer.engine.traces import (
    apply_weights,
    leave_out_impossible,
    loss_and_surrogate,
    set_score_parts,
)
from pyro_implicit.user_warnings import warn_user

__all__ = ["ImplicitELBO", "ImplicitSite"]

VectorizeMode = Literal["vmap", "plate"] | bool
Site = dict[str, Any]

_WEIGHTS = ("prior_weight", "entropy_weight", "inverse_temperature")
_COUNTERS = ("num_steps", "num_skipped", "num_left_out")
_SIMPLE = (bool, int, float, str, type(None))


class ImplicitELBO(StatefulELBO):
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
        one warning that names the cause. ``"plate"`` or ``True``: once under Pyro's particle plate,
        for models that broadcast. ``False``: one run after the other.
    :param prior_weight: weight of the log-prior, for annealing. Only 1 is Bayes.
    :param entropy_weight: weight of the guide's entropy. Only 1 is Bayes.
    :param inverse_temperature: :math:`\beta` of the target :math:`p(x, \theta)^\beta`, priors
        included (of an autoguide's latents, in unconstrained space). Raised from near 0 to 1 over
        the steps it lets a guide find separated modes; only 1 is Bayes. All three weights may be
        changed between steps.
    :param nonfinite: ``"raise"`` an error that names the term where the loss of all particles or a
        gradient is not finite, or ``"skip"`` such steps (leaving all parameters alone, returning
        nan) and count them in ``num_skipped``. Single particles at which the model has no density
        are left out of the means, with one warning, and counted in ``num_left_out``.
    :param compile: how steps are run. ``"trace"``: the second step is recorded, gradients included,
        and later ones call its kernels one after the other, without what Python and Pyro take
        beside them: the same numbers two to three times as fast, on small models. ``True``:
        inductor makes few kernels of them besides, which takes it ten to twenty seconds and a C++
        compiler. ``"auto"``: ``"trace"`` after twenty steps, without a word where that cannot be.
        ``False``: by Pyro. A recording has the values of all tensors among the arguments for
        inputs, and holds all else for constant: what it cannot follow, a branch on a value say,
        runs by Pyro with one warning that names the cause, and its first, second, fourth, eighth
        ... step is compared with one by Pyro. See :doc:`/howto/compile`.
    :param kwargs: all others of :class:`pyro.infer.Trace_ELBO`, as ``max_plate_nesting`` (guessed
        by one run if omitted) and ``retain_graph``. Those for enumeration and for the jit have no
        effect, as they have none there.
    :raises ValueError: for arguments out of range; at the first step, for a guide with an implicit
        site that this ELBO cannot train.
    :raises NonFiniteError: for a log-probability or a gradient that is not finite.
    """

    #: The implicit distributions that the subclass can train.
    site_types: ClassVar[tuple[type[Implicit], ...]] = ()
    #: Whether a recorded step gives the numbers of a plain one to the last bit.
    records_to_the_bit: ClassVar[bool] = True

    @property
    def _memory_cure(self) -> str:
        """What to try when a step has run out of memory."""
        return "a smaller num_particles, or minibatches"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for site_type in cls.site_types:
            site_type.trained_by.append(cls.__name__)

    def __init__(
        self,
        num_particles: int = 1,
        vectorize_particles: VectorizeMode = "vmap",
        prior_weight: float = 1.0,
        entropy_weight: float = 1.0,
        inverse_temperature: float = 1.0,
        nonfinite: Literal["raise", "skip"] = "raise",
        compile: CompileMode = False,
        **kwargs: Any,
    ) -> None:
        if num_particles < 1:
            raise ValueError(f"num_particles must be at least 1, but got {num_particles}")
        if vectorize_particles not in ("vmap", "plate", True, False):
            raise ValueError(
                f'vectorize_particles must be "vmap", "plate" or False, got {vectorize_particles!r}'
            )
        if nonfinite not in ("raise", "skip"):
            raise ValueError(f'nonfinite must be "raise" or "skip", but got {nonfinite!r}')
        check_mode(compile)
        mode = "plate" if vectorize_particles is True else vectorize_particles
        super().__init__(num_particles, mode, **kwargs)
        self.prior_weight = prior_weight
        self.entropy_weight = entropy_weight
        self.inverse_temperature = inverse_temperature
        self.nonfinite = nonfinite
        self.compile: CompileMode = compile
        self.num_left_out = 0
        self._particles: Particles | None = None

    def __repr__(self) -> str:
        """With the number of particles and the settings that are not the defaults."""
        own, common = inspect.signature(type(self)), inspect.signature(ImplicitELBO)
        parameters = {**common.parameters, **own.parameters}
        given = [(n, getattr(self, n)) for n in parameters if hasattr(self, n)]
        simple = [(n, v) for n, v in given if isinstance(v, _SIMPLE)]
        shown = [(n, v) for n, v in simple if n == "num_particles" or v != parameters[n].default]
        changed = [f"{name}={value!r}" for name, value in shown]
        return f"{type(self).__name__}({', '.join(changed)})"

    def draw(self, q: Implicit) -> Draw:
        """How a site is drawn: a method that needs the generator's derivative asks for it here."""
        return q.draw()

    def carried(self) -> dict[Any, Tensor]:
        """Tensors that a step takes over from the last and leaves to the next, by some name."""
        return {}

    def carry(self, tensors: dict[Any, Tensor]) -> None:
        """Put others in the place of those of :meth:`carried`."""

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse a site that the method cannot train; called once for each.

        :raises ValueError: naming site and cure.
        """

    def transport(self, site: ImplicitSite) -> Tensor | None:
        """A value to be seen in place of the site's draw, for methods that bend its gradient.

        :param site: as drawn.
        :returns: of the shape of ``site.draw``, or None to leave it.
        """
        return None

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """The surrogate density of one implicit site: the one method of a subclass.

        :param site: all particles of the site.
        :param prior: what the model says of its latents, for methods that ask.
        :returns: the value of log q, the score function term (0 for none), and the term whose
            gradient is the entropy's, each of ``site.distribution.batch_shape``.
        """
        raise NotImplementedError(f"{type(self).__name__} trains no implicit sites")

    def _check_trainable(self, name: str, site: Site) -> None:
        implicit = find_implicit(site["fn"])
        if implicit is None:
            return
        self.state.has_implicit_sites = True
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
        if not is_messenger:
            self._meet(model, guide, args, kwargs)
        one_by_one = not (self.vectorize_particles or self.state.has_implicit_sites)
        self._check_sum(one_by_one)
        if is_messenger or one_by_one or not self.state.value_ndims:
            for _ in range(self.num_particles):
                yield self._weighed(*self._get_trace(model, guide, args, kwargs))
            return
        with DrawMessenger(self.draw, self._transport) as drawn:
            guide_trace = poutine.trace(self._vectorized_num_particles(guide)).get_trace(
                *args, **kwargs
            )
        particles = Particles(
            model,
            guide_trace,
            self.num_particles,
            self.state.value_ndims,
            int(self.max_plate_nesting),
            args,
            kwargs,
            self.state.discrete,
        )
        model_trace = self._run_model(particles)
        guide_trace = prune_subsample_sites(guide_trace)
        for name, site in drawn.sites.items():
            memory = self.remember("prior", name, PriorMemory)
            prior = SitePrior(site, particles, model_trace, memory)
            parts = self.score_parts(site, prior)
            set_score_parts(guide_trace.nodes[name], parts, site.log_abs_det)
        guide_trace.compute_score_parts()
        self._particles = particles
        try:
            yield self._weighed(model_trace, guide_trace)
        finally:
            self._particles = None

    def _check_sum(self, one_by_one: bool) -> None:
        """Refuse to sum out discrete latents where Pyro's own loop or plate runs the model."""
        discrete, is_plate = self.state.discrete, self.vectorize_particles == "plate"
        if discrete is not None and (one_by_one or (is_plate and self.num_particles > 1)):
            names = ", ".join(f"'{name}'" for name in sorted(discrete.names))
            raise ValueError(
                f"the discrete latents {names} of the model are summed out, which "
                f"vectorize_particles={self.vectorize_particles!r} does not do. Cure: "
                'vectorize_particles="vmap", or Pyro\'s TraceEnum_ELBO for a guide with a density'
            )

    def _losses(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Iterator[tuple[float, Tensor, Tensor]]:
        """Shares of the loss, as numbers and as constants, each with a surrogate that has its
        gradient.

        :raises NonFiniteError: if a share is not a number, naming the sites to blame.
        """
        for pair in self._get_traces(model, guide, args, kwargs):
            shares = (part / self.num_particles for part in self._evaluate(*pair))
            yield tuple(shares)

    def _transport(self, site: ImplicitSite) -> Tensor | None:
        if site.name not in self.state.checked_sites:
            self.check_site(site)
            self.state.checked_sites.add(site.name)
        return self.transport(site)

    def _weighed(self, model_trace: Trace, guide_trace: Trace) -> tuple[Trace, Trace]:
        apply_weights(
            model_trace,
            guide_trace,
            self.prior_weight,
            self.entropy_weight,
            self.inverse_temperature,
        )
        return model_trace, guide_trace

    def _run_model(self, particles: Particles) -> Trace:
        """The model's trace for all particles, in the chosen way."""
        if self.num_particles == 1 or self.vectorize_particles == "plate":
            return particles.run_plate(self._vectorized_num_particles)
        return particles.run_all(self.state.runs)

    @noting_memory
    def loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """:returns: an estimate of the negative ELBO (nan for a skipped one)."""
        try:
            with torch.no_grad():
                return sum(value for value, _, _ in self._losses(model, guide, args, kwargs))
        except NonFiniteError as error:
            self._skip(error)
            return math.nan

    @noting_memory
    def differentiable_loss(
        self, model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> Tensor:
        """:returns: a surrogate of the negative ELBO whose gradient is the estimator's.

        A skipped step returns a nan that no parameter hangs on.
        """
        self.num_steps += 1
        known = self._traced_step(model, guide, args, kwargs)
        if known is not None:
            return known.differentiable()
        try:
            loss, surrogate = self.total(model, guide, args, kwargs)
            return loss + (surrogate - surrogate.detach())
        except NonFiniteError as error:
            self._skip(error)
            return torch.full((), math.nan, requires_grad=True)

    @noting_memory
    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Adds the gradients of the negative ELBO to the parameters.

        :returns: an estimate of the negative ELBO (nan for a skipped step).
        """
        self.num_steps += 1
        known = self._traced_step(model, guide, args, kwargs)
        if known is not None:
            return known.backward()
        total = 0.0
        with poutine.trace(param_only=True) as capture:
            try:
                for value, _, surrogate in self._losses(model, guide, args, kwargs):
                    total += value
                    if surrogate.requires_grad:
                        surrogate.backward(retain_graph=self.retain_graph)
                check_gradients(capture.trace, type(self).__name__, self.num_steps)
                return total
            except NonFiniteError as error:
                self._skip(error)
        for site in capture.trace.nodes.values():
            site["value"].unconstrained().grad = None
        return math.nan

    def total(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> tuple[Tensor, Tensor]:
        """The loss, a constant, and a surrogate that has its gradient.

        :raises NonFiniteError: as :meth:`loss_and_grads`.
        """
        total: Any = 0.0
        total_surrogate: Any = 0.0
        for _, loss, surrogate in self._losses(model, guide, args, kwargs):
            total, total_surrogate = total + loss, total_surrogate + surrogate
        return total, total_surrogate

    def weights(self) -> dict[str, float]:
        """The settings that may differ from step to step."""
        return {name: getattr(self, name) for name in _WEIGHTS}

    @contextlib.contextmanager
    def weighed_by(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """With tensors in the place of some of :meth:`weights`."""
        before = self.weights()
        self.__dict__.update(weights)
        try:
            yield
        finally:
            self.__dict__.update(before)

    def settings(self) -> tuple[Any, ...]:
        """All other settings, and which of the weights are 1."""
        values = [(n, v) for n, v in vars(self).items() if isinstance(v, _SIMPLE) and n[0] != "_"]
        return (
            *((n, v) for n, v in values if n not in _WEIGHTS and n not in _COUNTERS),
            *(weight == 1.0 for weight in self.weights().values()),
        )

    def _traced_step(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Evaluation | None:
        """The step by a recording; None where a plain one is to be taken."""
        if self.compile is False or not torch.is_grad_enabled():
            return None
        self._forget_others(model, guide)
        return self.state.traced.step(self, model, guide, args, kwargs)

    def _evaluate(self, model_trace: Trace, guide_trace: Trace) -> tuple[float, Tensor, Tensor]:
        """The loss as a number, the one thing in a step that is read from the device, and as a
        tensor, and the surrogate.

        :raises NonFiniteError: if it is none for all particles, naming the sites to blame.
        """
        loss, surrogate = loss_and_surrogate(model_trace, guide_trace)
        if is_tracing():
            return 0.0, loss, surrogate
        value = float(loss)
        if not math.isfinite(value):
            loss, surrogate = self._of_possible(model_trace, guide_trace)
            value = float(loss)
        return value, loss, surrogate

    def _of_possible(self, model_trace: Trace, guide_trace: Trace) -> tuple[Tensor, Tensor]:
        """Loss and surrogate without the particles at which the model has no density."""
        terms = nonfinite_terms(model_trace, guide_trace)
        impossible = None
        if self._particles is not None and self.num_particles > 1:
            impossible = leave_out_impossible(model_trace, guide_trace, self.num_particles)
        loss, surrogate = loss_and_surrogate(model_trace, guide_trace)
        if impossible is None or not loss.isfinite():
            refuse_nonfinite(model_trace, guide_trace, type(self).__name__, self.num_steps)
        assert self._particles is not None and impossible is not None
        self._particles.impossible = impossible
        number = int(impossible.sum())
        if not self.num_left_out:
            warn_user(
                f"{type(self).__name__}, step {self.num_steps}: the model has no density at "
                f"{number} of {self.num_particles} particles, which are left out ({terms}). Said "
                "once; see num_left_out. Cure, if they are many: a smaller init_scale, or priors "
                "in whose range the data are possible",
            )
        self.num_left_out += number
        return loss, surrogate

    def _skip(self, error: NonFiniteError) -> None:
        if self.nonfinite == "raise":
            raise error
        self.num_skipped += 1
