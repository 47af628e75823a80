# SPDX-License-Identifier: Apache-2.0
"""The base of all ELBOs for implicit guides: Pyro's ``Trace_ELBO`` with densities filled in."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar

import pyro
import torch
from pyro import poutine
from pyro.distributions.score_parts import ScoreParts
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn

from pyro_implicit.compiled import ACTIVE, Untraceable
from pyro_implicit.density.model import DiscreteSum, restore_priors
from pyro_implicit.distributions import Draw, Implicit, SemiImplicit, find_implicit
from pyro_implicit.guides.posterior_draws import name_of
from pyro_implicit.infer.engine.folds import warn_of_folds
from pyro_implicit.infer.engine.implicit_sites import PARTICLE_PLATE, ImplicitSite
from pyro_implicit.infer.engine.prior import PriorMemory, SitePrior
from pyro_implicit.infer.engine.steps import StepELBO
from pyro_implicit.infer.engine.traces import (
    DrawMessenger,
    Particles,
    apply_weights,
    set_score_parts,
)
from pyro_implicit.infer.policy import ELBOS
from pyro_implicit.runtime.messages import first_line, warn_user
from pyro_implicit.runtime.sites import attribute_name

__all__ = ["ImplicitELBO", "ImplicitSite", "NetworkELBO", "adam_step"]


Site = dict[str, Any]


class ImplicitELBO(StepELBO):
    r"""``Trace_ELBO`` for guides in which some sites have no density.

    The guide draws all particles under Pyro's particle plate. For each implicit site of the guide,
    a subclass computes :math:`\log q` and its entropy gradient (:meth:`score_parts`); everything
    else is as in ``Trace_ELBO``. For guides without implicit sites it equals ``Trace_ELBO``, with
    faster particles.

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
        one warning that names the cause. So does a guide that fails under the particle plate,
        unless it has implicit sites. ``"plate"`` or ``True``: once under Pyro's particle plate,
        for models that broadcast. ``False``: one run after the other.
    :param prior_weight: weight of the log-prior, for annealing. Only 1 gives the posterior.
    :param entropy_weight: weight of the guide's entropy. Only 1 gives the posterior.
    :param inverse_temperature: :math:`\beta` of the target :math:`p(x, \theta)^\beta`, priors
        included (in unconstrained space for the latent variables of an autoguide). Raising it from
        near 0 to 1 during the training helps a guide to find separate modes; only 1 gives the
        posterior. All three weights may change between steps.
    :param nonfinite: what happens if the loss of all particles or a gradient is not finite.
        ``"raise"``: an error that names the term. ``"skip"``: the step leaves all parameters as
        they are, returns nan, and is counted in ``num_skipped``. Single particles at which the
        model has no density are left out of the means, with one warning, and counted in
        ``num_left_out``. Messages give the step as ``num_steps_taken``, the number of training
        steps so far.
    :param compile: how steps are run. ``"trace"``: the second step is recorded, gradients included,
        and later steps call its kernels without the overhead of Python and Pyro: the same results
        up to rounding, 1.3 to 2.8 times as fast on small models. ``True``: inductor compiles the
        recording, which takes tens of seconds once and needs a C++ compiler; other processes find
        the kernels on disk. ``"auto"``: ``"trace"`` after 42 steps, without a warning if that
        is impossible, and ``True`` once the seconds that it would have saved exceed those of the
        compilation (results of 131,000 elements or more, on a CPU). ``False``: plain steps. The
        inputs of a recording are parameters and the tensors among the arguments; everything else is
        constant. A model that cannot be recorded, because it branches on a value, for example, runs
        plain steps, with one warning that names the cause. The first, second, fourth, eighth ...
        recorded step is compared with a plain one. See :doc:`/howto/compile`.
    :param kwargs: all other arguments of :class:`pyro.infer.Trace_ELBO`, such as
        ``max_plate_nesting`` (found by one run if omitted) and ``retain_graph``. The arguments for
        enumeration and the jit have no effect.
    :raises ValueError: for arguments out of range; at the first step, for a guide with an implicit
        site that this ELBO cannot train.
    :raises NonFiniteError: for a log-probability or a gradient that is not finite.
    """

    #: The implicit distributions that the subclass can train.
    site_types: ClassVar[tuple[type[Implicit], ...]] = ()
    #: Those of them that messages recommend this ELBO for; its subclasses do not inherit this.
    recommended_for: ClassVar[tuple[type[Implicit], ...]] = ()
    #: Whether :meth:`score_parts` reads the prior; if not, it gets None.
    needs_prior: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for site_type in cls.site_types:
            known = site_type.trained_by
            if cls.__name__ not in known:  # a notebook may define a class twice
                is_first = site_type in vars(cls).get("recommended_for", ())  # not of a base class
                known.insert(0 if is_first else len(known), cls.__name__)

    def __repr__(self) -> str:
        """Return the number of particles and the settings that differ from the defaults."""
        own, common = inspect.signature(type(self)), inspect.signature(ImplicitELBO)
        parameters = {**common.parameters, **own.parameters}
        given = [(n, getattr(self, n)) for n in parameters if hasattr(self, n)]
        simple = [(n, v) for n, v in given if v is None or isinstance(v, (bool, int, float, str))]
        shown = [(n, v) for n, v in simple if n == "num_particles" or v != parameters[n].default]
        changed = [f"{name}={value!r}" for name, value in shown]
        return f"{type(self).__name__}({', '.join(changed)})"

    def draw(self, q: Implicit) -> Draw:
        """Draw a site. A method that needs the generator's derivative overrides this."""
        return q.draw()

    def check_site(self, site: ImplicitSite) -> None:
        """Refuse a site that the method cannot train. Called once for each site.

        :raises ValueError: naming site and cure.
        """

    def transport(self, site: ImplicitSite) -> Tensor | None:
        """Return a value in place of the site's draw, for methods that change its gradient.

        :param site: the site with its draw, which has a gradient.
        :returns: a tensor of the shape of ``site.draw``, or None to keep the draw.
        """
        return None

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        """Return the surrogate density of one implicit site: the one method of a subclass.

        :param site: all particles of the site.
        :param prior: the prior of its latent variables; None unless ``needs_prior``.
        :returns: the value of log q, the score function term (0 for none), and the term whose
            gradient is the entropy's, each of ``site.distribution.batch_shape``.
        """
        raise NotImplementedError(f"{type(self).__name__} trains no implicit sites")

    def _begin_step(self) -> None:
        super()._begin_step()
        if self.num_steps_taken % ELBOS.fold_steps == 0:
            warn_of_folds(self)

    def _check_trainable(self, name: str, site: Site) -> None:
        implicit = find_implicit(site["fn"])
        if implicit is not None:
            self.state.implicit_sites.add(name)
            self._check_kind(name, implicit)

    def _check_kind(self, name: str, implicit: Implicit) -> None:
        kind = SemiImplicit if isinstance(implicit, SemiImplicit) else Implicit
        if kind not in self.site_types:
            raise ValueError(
                f"{type(self).__name__} cannot train site '{name}', whose distribution is "
                f"{type(implicit).__name__}. Cure: use one of "
                f"{', '.join(implicit.trained_by) or 'the ELBOs made for it'}, or change "
                f"the site to {' or '.join(t.__name__ for t in self.site_types) or 'a density'}"
            )

    def _get_traces(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> Iterator[tuple[Trace, Trace]]:
        # A GuideMessenger runs the model itself, so only Pyro's own loop can run it.
        is_messenger = isinstance(poutine.unwrap(guide), poutine.messenger.Messenger)
        if not is_messenger:
            self._bind(model, guide, args, kwargs)
        state, weights = self.state, None
        for weight in (self.prior_weight, self.entropy_weight, self.inverse_temperature):
            if isinstance(weight, Tensor) or weight != 1.0:
                weights = self.weights()
        one_by_one = not (self.vectorize_particles or state.implicit_sites)
        found = None
        value_ndims = state.value_ndims or {}
        if value_ndims and not (is_messenger or one_by_one):
            found = self._run_guide(guide, args, kwargs, value_ndims)
        if found is None:
            for _ in range(self.num_particles):
                if is_messenger or state.discrete is None:
                    pair = self._get_trace(model, guide, args, kwargs)
                    restore_priors(pair[0]).compute_log_prob()
                else:
                    pair = self._get_summed_trace(model, guide, args, kwargs)
                if weights is not None:
                    apply_weights(*pair, **weights)
                yield pair
            return
        drawn, guide_trace = found
        self._particles = particles = Particles(
            model,
            guide_trace,
            self.num_particles,
            value_ndims,
            int(self.max_plate_nesting),
            args,
            kwargs,
            state.discrete,
            state.unchanged,
        )
        try:
            model_trace = self._run_model(particles)
            guide_trace = prune_subsample_sites(guide_trace)
            self._check_structure(model, guide, args, kwargs, (model_trace, guide_trace))
            for name, site in drawn.items():
                prior: Any = None
                if self.needs_prior:
                    memory = self.remember("prior", name, PriorMemory)
                    prior = SitePrior(site, particles, model_trace, memory)
                parts = self.score_parts(site, prior)
                set_score_parts(guide_trace.nodes[name], parts, site.log_abs_det)
            guide_trace.compute_score_parts()
            if weights is not None:
                apply_weights(model_trace, guide_trace, **weights)
            yield model_trace, guide_trace
        finally:
            self._particles = None

    def _get_summed_trace(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict
    ) -> tuple[Trace, Trace]:
        """Run the guide, and the model with discrete latents summed out, for one particle."""
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        state, nesting = self.state, int(self.max_plate_nesting)
        particle = Particles(
            model, guide_trace, 1, {}, nesting, args, kwargs, state.discrete, state.unchanged
        )
        model_trace = particle.run_plate(lambda model: model)
        guide_trace = prune_subsample_sites(guide_trace)
        guide_trace.compute_score_parts()
        return model_trace, guide_trace

    def _run_guide(
        self, guide: Callable, args: tuple, kwargs: dict, names: Collection[str]
    ) -> tuple[dict[str, ImplicitSite], Trace] | None:
        """Draw all particles at once; None if the guide can only draw one after the other.

        :param names: the sites that the first run has drawn.
        """
        state = self.state
        if state.guide_mode == "loop":
            return None
        explicit = {*names, PARTICLE_PLATE} - state.implicit_sites
        tracer = poutine.trace(self._vectorized_num_particles(guide))
        try:
            with DrawMessenger(self.draw, self._transport, explicit) as drawn:
                guide_trace = tracer.get_trace(*args, **kwargs)
        except Exception as error:  # of a network that does not broadcast, of many kinds
            # Errors of this library about implicit sites have their own cure.
            is_own = state.implicit_sites and not _is_of_torch(error)
            if state.guide_mode == "plate" or self.num_particles == 1 or is_own:
                raise
            self._give_up_plate(guide, tracer.trace, error)
            state.guide_mode = "loop"
            return None
        state.guide_mode = "plate"
        return drawn.sites, guide_trace

    def _give_up_plate(self, guide: Callable, trace: Trace, error: Exception) -> None:
        """Warn that the guide runs in a loop.

        :param trace: trace of the run that failed.
        :raises ValueError: if a loop is impossible.
        """
        state = self.state
        sites = [name for name, site in trace.nodes.items() if site["type"] == "sample"]
        behind = [f", behind site '{name}'" for name in sites if name != PARTICLE_PLATE][-1:]
        fault = (
            f"the guide {name_of(guide)} cannot run under the particle plate, which adds a leading "
            f"dimension to its draws ({first_line(error)}{''.join(behind)})"
        )
        cure = (
            "networks in the guide that accept leading dimensions, such as nn.LayerNorm instead of "
            "nn.BatchNorm1d, and no .view with fixed sizes"
        )
        if state.implicit_sites:
            few = "; or num_particles=1" if self.least_particles == 1 else ""
            raise ValueError(
                f"{fault}, as its implicit site '{min(state.implicit_sites)}' needs. Cure: "
                f"{cure}{few}"
            ) from error
        name, count = type(self).__name__, self.num_particles
        warn_user(
            f"{name} runs guide and model one particle at a time, because {fault}: {count} "
            f"particles take {count} times as long as one. Cure: {cure}; or fewer particles. "
            f"{name}({count}, vectorize_particles=False) is the same loop without this warning"
        )

    def _transport(self, site: ImplicitSite) -> Tensor | None:
        if site.name not in self.state.checked_sites:
            self.check_site(site)
            self.state.checked_sites.add(site.name)
        has_gradient = torch.is_grad_enabled() and site.draw.requires_grad
        return self.transport(site) if has_gradient else None

    def _run_model(self, particles: Particles) -> Trace:
        if self.num_particles == 1 or self.vectorize_particles == "plate":
            return particles.run_plate(self._vectorized_num_particles)
        return particles.run_all(self.state.runs)

    def _check_sum(self, discrete: DiscreteSum | None) -> None:
        if discrete is not None and self.vectorize_particles == "plate" and self.num_particles > 1:
            names = ", ".join(f"'{name}'" for name in sorted(discrete.names))
            raise ValueError(
                f"the discrete latents {names} of the model are summed out, but "
                f"vectorize_particles={self.vectorize_particles!r} cannot do this. Cure: "
                'vectorize_particles="vmap" or False, or Pyro\'s TraceEnum_ELBO for a guide with a '
                "density"
            )


class NetworkELBO(ImplicitELBO, nn.Module):  # type: ignore[misc]  # both have ``compile``
    """An ELBO that trains one network for each implicit site.

    ``networks`` is a :class:`torch.nn.ModuleDict`, so that ``ELBOModule.parameters()`` and
    ``state_dict()`` include the networks after the first step; Pyro's parameter store has them,
    too, under names that are unique to the object. ``optimisers`` train them, by site.

    :param optim: arguments of :class:`torch.optim.Adam`.
    """

    num_particles: int
    records_to_the_bit = False  # of its optimiser

    def __init__(self, num_particles: int, optim: dict[str, Any], **kwargs: Any) -> None:
        nn.Module.__init__(self)
        super().__init__(num_particles, **kwargs)
        self.networks = nn.ModuleDict()
        self.store_name = self._new_name()
        self._optim = optim

    @property
    def optimisers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimisers of the networks, by site."""
        return self.state.optimisers

    def __getstate__(self) -> dict[str, Any]:
        for parameter in self.parameters():
            # Pyro's weak reference cannot be pickled; the store renews it at the next read.
            parameter.__dict__.pop("unconstrained", None)
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.store_name = self._new_name()  # a copy shares no parameters with its original

    def _new_name(self) -> str:
        return f"{type(self).__name__}-{uuid.uuid4().hex[:8]}"

    def site_network(self, name: str, make: Callable[[], nn.Module], like: Tensor) -> nn.Module:
        """Return the network of a site.

        :param make: makes the network, the first time.
        :param like: a tensor of its dtype and on its device.
        """
        key = attribute_name(name)  # which differs from the attributes of ModuleDict
        key += "-" if hasattr(nn.ModuleDict(), key) else ""
        if key not in self.networks:
            self.networks[key] = make().to(dtype=like.dtype, device=like.device)
        network = self.networks[key]
        if not pyro.settings.get("module_local_params"):
            pyro.module(f"{self.store_name}.{key}", network, update_module_params=True)
        return network

    def _forget_guide(self) -> None:
        self.networks.clear()
        store = pyro.get_param_store()  # otherwise new networks would take the old values
        for name in [name for name in store if name.startswith(f"{self.store_name}.")]:
            del store[name]

    def descend(self, name: str, network: nn.Module, loss: Tensor) -> None:
        """Take one step of the site's network, and leave no gradient to the guide's optimiser."""
        parameters = list(network.parameters())
        optimiser = self.optimisers.get(name)
        if optimiser is None or not _same(optimiser.param_groups[0]["params"], parameters):
            optimiser = torch.optim.Adam(parameters, **self._optim)
            self.optimisers[name] = optimiser
        gradients = torch.autograd.grad(loss, parameters)
        if ACTIVE.recorder is not None:
            adam_step(optimiser, gradients)
            return
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimiser.step()
        optimiser.zero_grad()


def _is_of_torch(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)


def _same(left: list[nn.Parameter], right: list[nn.Parameter]) -> bool:
    return all(a is b for a, b in zip(left, right, strict=True))


@torch.no_grad()
def adam_step(optimiser: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> None:
    """Take a later step of :class:`torch.optim.Adam` in tensor operations only, for recordings.

    :param optimiser: an optimiser of one group, without options beyond learning rate, decays,
        epsilon and weight decay.
    :param gradients: the gradients of its parameters.
    :raises Untraceable: for other options.
    """
    group = optimiser.param_groups[0]
    if group["amsgrad"] or group["maximize"] or group.get("decoupled_weight_decay"):
        raise Untraceable("the optimiser of an ELBO's network has options beyond plain Adam's")
    beta1, beta2 = group["betas"]
    for parameter, gradient in zip(group["params"], gradients, strict=True):
        if group["weight_decay"]:
            gradient = gradient + group["weight_decay"] * parameter
        state = optimiser.state[parameter]
        state["step"].add_(1)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step = state["step"].double()
        rate = group["lr"] / (1 - beta1**step)
        scale = (1 - beta2**step).sqrt()
        like = {"dtype": parameter.dtype, "device": parameter.device}
        denominator = square.sqrt().div_(scale.to(**like)).add_(group["eps"])
        parameter.sub_(rate.to(**like) * mean / denominator)
