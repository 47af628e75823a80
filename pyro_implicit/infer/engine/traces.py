# SPDX-License-Identifier: Apache-2.0
"""Traces of guide and model for all particles, and the loss that they make."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.score_parts import ScoreParts
from pyro.distributions.util import is_identically_zero, scale_and_mask, sum_rightmost
from pyro.infer.trace_elbo import _compute_log_r
from pyro.infer.util import is_validation_enabled
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor

from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.checks.masks import MaskWatch
from pyro_implicit.density.checks.observations import refuse_missing_data
from pyro_implicit.density.discrete import refuse_coupled
from pyro_implicit.density.model import (
    IMPOSSIBLE,
    DiscreteSum,
    Model,
    compute_log_prob,
    leave_out_masked,
    refuse_subsampling,
    restore_priors,
    without_validation,
)
from pyro_implicit.density.policy import RUNS
from pyro_implicit.distributions import Draw, Implicit, draw_through, find_implicit
from pyro_implicit.guides.posterior_draws import refuse_other_guide
from pyro_implicit.infer.engine.implicit_sites import PARTICLE_PLATE, ImplicitSite
from pyro_implicit.runtime.sites import Site

__all__ = [
    "CURE",
    "DrawMessenger",
    "FirstRun",
    "NonFiniteError",
    "Particles",
    "apply_weights",
    "coverage_log_weights",
    "first_run",
    "leave_out_impossible",
    "log_weights",
    "loss_and_surrogate",
    "nonfinite_terms",
    "refuse_nonfinite",
    "set_score_parts",
]


class FirstRun(NamedTuple):
    """What the first run finds: the deepest nesting of plates, the guide's sample sites by name,
    and the sum over the model's discrete latent variables that the guide lacks."""

    plate_nesting: int
    guide_sites: dict[str, Site]
    discrete: DiscreteSum | None


def first_run(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    max_plate_nesting: float,
) -> FirstRun:
    """Run guide and model once, with all of Pyro's checks, outside of all plates and traces.

    If the model raises an error at a draw of the guide, another draw is tried.

    :raises ValueError: naming the site, for a latent variable of the model that the guide lacks,
        one of the guide that the model lacks, an observation that is NaN, or a mask that the model
        changes after its site.
    """
    validates = is_validation_enabled()
    for retries_left in reversed(range(RUNS.max_retries)):
        forgiven, masks = IMPOSSIBLE if retries_left else (), MaskWatch()
        try:
            with poutine.block():
                guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
                replayed = poutine.trace(poutine.replay(model, trace=guide_trace))
                with masks:
                    model_trace = restore_priors(replayed.get_trace(*args, **kwargs))
        except forgiven:
            continue
        # Faults from here on do not depend on the draw.
        discrete = DiscreteSum.of(model_trace, given=guide_trace)
        if discrete is not None:
            refuse_coupled(model, args, kwargs, model_trace, discrete.names)
            for name in discrete.names:
                model_trace.remove_node(name)
        refuse_other_guide(guide, model_trace, guide_trace)
        if validates:
            masks.refuse_changed()
            check_model_guide_match(model_trace, guide_trace, max_plate_nesting)
        guide_trace = prune_subsample_sites(guide_trace)
        model_trace = prune_subsample_sites(model_trace)
        if not validates:
            break
        leave_out_masked(model_trace)
        refuse_missing_data(model_trace)
        with contextlib.suppress(*forgiven):
            model_trace.compute_log_prob()
            guide_trace.compute_log_prob(lambda name, site: find_implicit(site["fn"]) is None)
            break
    dims = [0]
    sites: dict[str, Site] = {}
    for trace in (model_trace, guide_trace):
        for name, site in _samples(trace):
            if validates and "log_prob" in site:
                check_site_shape(site, max_plate_nesting)
            dims += [-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized]
            if trace is guide_trace:
                sites[name] = site
    return FirstRun(max(dims), sites, discrete)


class DrawMessenger(Messenger):
    """Draw all implicit sites of a guide, and show other values of them to the model.

    :param draw: draws from an implicit distribution.
    :param transport: called with each site; its result, if not None, replaces the draw for the rest
        of the guide and for the model.
    :param explicit: names of sites that are known to have a density.
    """

    def __init__(
        self,
        draw: Callable[[Implicit], Draw],
        transport: Callable[[ImplicitSite], Tensor | None],
        explicit: set[str] | frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.draw, self.transport, self.explicit = draw, transport, explicit
        self.sites: dict[str, ImplicitSite] = {}

    def _pyro_sample(self, msg: Any) -> None:
        # The outermost handler: plates have expanded the distribution already.
        name = msg["name"]
        if name in self.explicit or find_implicit(msg["fn"]) is None:
            return
        if msg["value"] is not None:
            raise ValueError(
                f"the value of implicit site '{name}' of the guide was given, so that the noise "
                "behind it is unknown. Cure: let the guide draw it, without replaying or "
                "conditioning"
            )
        through = draw_through(msg["fn"], self.draw)
        plates = set()
        for frame in msg["cond_indep_stack"]:
            if frame.name != PARTICLE_PLATE:
                plates.add(frame.name)
        site = self.sites[name] = ImplicitSite(
            name,
            through.distribution,
            through.draw.noise,
            through.draw.value,
            through.value,
            through.transforms,
            through.log_abs_det,
            through.draw.linearisation,
            msg["fn"].batch_shape,
            frozenset(plates),
            tuple(msg["infer"].get("latents", (name,))),
        )
        transported = self.transport(site)
        msg["value"] = through.value if transported is None else transported
        msg["done"] = True


class _LeftOut:
    """The particles whose gradient of the model is left out."""

    # Without the latent variables, whose hooks know this object and would keep them in memory.
    particles: Tensor | None = None

    def __call__(self, gradient: Tensor) -> Tensor:
        if self.particles is None:
            return gradient
        shape = self.particles.shape + (1,) * (gradient.dim() - 1)
        return gradient.masked_fill(self.particles.reshape(shape), 0.0)


class Particles(Model):
    """A model at the draws of a guide, whose leftmost dimension counts particles.

    Every way of running it gives a trace whose log-probabilities have the particles at dimension
    ``-max_plate_nesting``. All particles share the minibatch of the guide trace or of the first
    run.

    :param model: the Pyro model.
    :param guide_trace: a guide trace, under the particle plate if there are several particles.
    :param num_particles: their number.
    :param value_ndims: dimensions of each latent value outside the particle plate.
    :param max_plate_nesting: plates of the model, the particle plate included.
    :param discrete: the sum over discrete latent variables, if any.
    :param unchanged: the distributions that need no changes, kept from step to step.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide_trace: Trace,
        num_particles: int,
        value_ndims: dict[str, int],
        max_plate_nesting: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        discrete: DiscreteSum | None = None,
        unchanged: set[tuple] | None = None,
    ) -> None:
        super().__init__(model, args, kwargs, Trace(), discrete)
        if unchanged is not None:
            self._unchanged = unchanged
        self.guide_trace = guide_trace
        self.num_particles = num_particles
        self.max_plate_nesting = max_plate_nesting
        self.left_out = _LeftOut()
        self.latents: dict[str, Tensor] = {}
        for name, site in guide_trace.nodes.items():
            if site["type"] != "sample":
                continue
            self.replayed.add_node(name, **site)
            # An observed site of the guide has the value of the data, without particles.
            if site_is_subsample(site) or site["is_observed"]:
                continue
            value = site["value"]
            if num_particles > 1:
                ndim = value_ndims.get(name)
                if ndim is None:  # the first run did not meet the site
                    depths = [-f.dim for f in site["cond_indep_stack"] if f.vectorized]
                    ndim = max(sorted(depths)[:-1], default=0) + site["fn"].event_dim
                # Drop the singletons between the particles and the value's own dimensions.
                value = value.reshape(value.shape[:1] + value.shape[value.dim() - ndim :])
                if value.requires_grad:
                    value = value.view_as(value)
                    value.register_hook(self.left_out)
            self.latents[name] = value

    def particle(self, index: int) -> dict[str, Tensor]:
        """Return the latent values of one particle."""
        if self.num_particles == 1:
            return dict(self.latents)
        return {name: value[index] for name, value in self.latents.items()}

    def run_plate(self, vectorize: Callable[[Callable], Callable]) -> Trace:
        """Run the model once for all particles, under Pyro's particle plate.

        :param vectorize: puts a model under that plate.
        """
        if self.discrete is not None and self.num_particles == 1:
            trace = self.run(self.latents)
        else:
            model = poutine.replay(vectorize(self.model), trace=self.guide_trace)
            trace = restore_priors(poutine.trace(model).get_trace(*self.args, **self.kwargs))
            leave_out_masked(trace)
            if not is_validation_enabled():
                for site in trace.nodes.values():
                    if site["type"] == "sample":
                        site["fn"] = without_validation(site["fn"])
        trace = prune_subsample_sites(trace)
        compute_log_prob(trace)
        return trace

    def run_all(self, runs: BatchedRuns) -> Trace:
        """Run the model for all particles.

        :param runs: how.
        """
        traces: list[Trace] = []

        def read(trace: Trace) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            compute_log_prob(trace)
            traces.append(trace)
            scaled, unscaled = {}, {}
            for name, site in trace.nodes.items():
                if site["type"] == "sample":
                    scaled[name] = torch.as_tensor(site["log_prob"])
                    if not site["is_observed"]:
                        unscaled[name] = site["unscaled_log_prob"]
            return scaled, unscaled

        scaled, unscaled = runs.map(self, self.latents, read)
        plate: tuple[Any, ...] = ()
        for name in self.latents:
            for frame in self.guide_trace.nodes[name]["cond_indep_stack"]:
                if frame.name == PARTICLE_PLATE:
                    plate = (frame,)
        result = Trace()
        for name, site in traces[-1].nodes.items():
            if site["type"] == "param":
                result.add_node(name, **site)
            if site["type"] != "sample":
                continue
            terms = {"log_prob": scaled[name]}
            if name in unscaled:
                terms["unscaled_log_prob"] = unscaled[name]
            for kind, term in terms.items():  # the particles at dimension -max_plate_nesting
                padding = (1,) * (self.max_plate_nesting - term.dim())
                terms[kind] = term.reshape(term.shape[:1] + padding + term.shape[1:])
            result.add_node(
                name,
                type="sample",
                name=name,
                fn=site["fn"],
                is_observed=site["is_observed"],
                cond_indep_stack=(*plate, *site["cond_indep_stack"]),
                log_prob_sum=terms["log_prob"].sum(),
                **terms,
            )
        return result


def set_score_parts(site: Site, parts: ScoreParts, log_abs_det: Tensor | float) -> None:
    """Give a sample site of the guide score parts, as ``Trace.compute_score_parts`` would.

    :param site: the site, whose scale and mask apply.
    :param parts: the score parts of the implicit distribution inside the site's distribution.
    :param log_abs_det: the log-determinant of the transforms around it, of the site's batch shape.
    """
    ndim = len(site["fn"].batch_shape)
    log_prob, score_function, entropy_term = parts
    if isinstance(score_function, Tensor):
        score_function = sum_rightmost(score_function, score_function.dim() - ndim)
    parts = ScoreParts(
        sum_rightmost(log_prob, log_prob.dim() - ndim) - log_abs_det,
        score_function,
        sum_rightmost(entropy_term, entropy_term.dim() - ndim) - log_abs_det,
    ).scale_and_mask(site["scale"], site["mask"])
    site["score_parts"] = parts
    site["log_prob"] = parts.log_prob
    site["log_prob_sum"] = parts.log_prob.sum()


def apply_weights(
    model_trace: Trace,
    guide_trace: Trace,
    prior_weight: float,
    entropy_weight: float,
    inverse_temperature: float,
) -> None:
    """Weight log-prior and entropy, and temper the model's log-density.

    A Delta of the guide carries the prior's change of variables.

    :param model_trace: a trace with log-probabilities.
    :param guide_trace: a trace with score parts.
    """
    for trace in (model_trace, guide_trace):
        for _, site in _samples(trace):
            if site["is_observed"]:
                weight = inverse_temperature
            elif trace is model_trace or isinstance(site["fn"], dist.Delta):
                weight = inverse_temperature * prior_weight
            else:
                weight = entropy_weight
            if not isinstance(weight, Tensor) and weight == 1.0:
                continue
            site["log_prob"] = scale_and_mask(site["log_prob"], weight)
            site["log_prob_sum"] = site["log_prob_sum"] * weight
            if "score_parts" in site:
                site["score_parts"] = site["score_parts"].scale_and_mask(weight)


def loss_and_surrogate(model_trace: Trace, guide_trace: Trace) -> tuple[Tensor, Tensor]:
    """Return the negative ELBO, a constant, and a term with the gradient of its estimator.

    Both are sums over all particles in the traces. As Pyro's ``Trace_ELBO``, but nothing is read
    from the device.

    :param model_trace: a trace with log-probabilities.
    :param guide_trace: a trace with score parts.
    """
    loss: Any = 0.0
    surrogate: Any = 0.0
    log_r = None
    for site in model_trace.nodes.values():
        if site["type"] == "sample":
            loss = loss - site["log_prob_sum"].detach()
            surrogate = surrogate - site["log_prob_sum"]
    for site in guide_trace.nodes.values():
        if site["type"] != "sample":
            continue
        parts = site["score_parts"]
        loss = loss + torch.as_tensor(site["log_prob_sum"]).detach()
        if not is_identically_zero(parts.entropy_term):
            surrogate = surrogate + parts.entropy_term.sum()
        if not is_identically_zero(parts.score_function):
            if log_r is None:
                log_r = _compute_log_r(model_trace, guide_trace)
            downstream = log_r.sum_to(site["cond_indep_stack"])
            surrogate = surrogate - (downstream * parts.score_function).sum()
    return torch.as_tensor(loss), torch.as_tensor(surrogate)


def log_weights(model_trace: Trace, guide_trace: Trace, num_particles: int) -> Tensor:
    """Return log p(x, theta) - log q(theta) of each particle, ``(num_particles,)``."""
    total: Any = 0.0
    for trace, sign in ((model_trace, 1), (guide_trace, -1)):
        for _, site in _samples(trace):
            total = total + sign * site["log_prob"].reshape(num_particles, -1).sum(-1)
    return total


def coverage_log_weights(model_trace: Trace, guide_trace: Trace, num_particles: int) -> Tensor:
    """Return log p(x, theta) - log q(theta) of each particle, constants.

    If the whole guide has a scale s (``poutine.scale``), the target is p to the power of its own
    scales over s.

    :returns: ``(num_particles,)``.
    :raises ValueError: if there is no such weight: for subsampled data, or a guide with latent
        variables that are not injective, or with several scales.
    """
    for trace in (model_trace, guide_trace):
        refuse_subsampling(trace, "InjectiveELBO's coverage")
    scales = set()
    for name, site in _samples(guide_trace):
        if isinstance(site["fn"], dist.Delta):
            continue
        if find_implicit(site["fn"]) is None:
            raise ValueError(
                f"coverage weights the paths of injective draws, but site '{name}' of the guide is "
                f"{type(site['fn']).__name__}. Cure: coverage=0, or one AutoImplicit guide of all "
                "latents"
            )
        scales.add(float(site["scale"]))
    if len(scales) > 1:
        raise ValueError(
            f"coverage needs one scale for the whole guide, but its sites have {sorted(scales)}. "
            "Cure: coverage=0, or poutine.scale around the whole guide"
        )
    return log_weights(model_trace, guide_trace, num_particles).detach() / scales.pop()


def leave_out_impossible(
    model_trace: Trace, guide_trace: Trace, num_particles: int
) -> Tensor | None:
    """Remove the particles at which the model's log-density is not finite from traces.

    :returns: the removed particles, a mask ``(num_particles,)``; None if it would remove none or
        all, and removes none.
    """
    impossible = ~log_weights(model_trace, Trace(), num_particles).isfinite()
    num_left = num_particles - int(impossible.sum())
    if num_left in (0, num_particles):
        return None

    def drop_particles(term: Any) -> Any:
        if not isinstance(term, Tensor) or term.dim() == 0 or len(term) != num_particles:
            return term
        mask = impossible.reshape((-1,) + (1,) * (term.dim() - 1))
        return term.masked_fill(mask, 0.0) * (num_particles / num_left)

    for trace in (model_trace, guide_trace):
        for _, site in _samples(trace):
            site["log_prob"] = drop_particles(site["log_prob"])
            site["log_prob_sum"] = site["log_prob"].sum()
            if "score_parts" in site:
                site["score_parts"] = ScoreParts(*map(drop_particles, site["score_parts"]))
    return impossible


CURE = (
    "Cure: a smaller learning rate or init_scale, gradient clipping (pyro.optim.ClippedAdam), "
    'float64, or nonfinite="skip" to leave such steps out'
)
_DATA_CURE = (
    "Cure: leave missing data out, or mask them: pyro.sample(name, fn.mask(~y.isnan()), "
    "obs=y.nan_to_num(1.0)); if no data are missing, a smaller learning rate, or "
    'nonfinite="skip" to leave such steps out'
)


class NonFiniteError(ArithmeticError):
    """A term of the loss, or a gradient, is nan or infinite."""


def nonfinite_terms(model_trace: Trace, guide_trace: Trace) -> str:
    """Name the sample sites that make a loss not finite."""
    bad = []
    for label, trace in (("model", model_trace), ("guide", guide_trace)):
        for name, site in _samples(trace):
            value = torch.as_tensor(site["log_prob_sum"])
            if not value.isfinite():
                hint = " for every particle, as it is if its observations contain NaN"
                term = f"the {label}'s log-probability of site '{name}'"
                bad.append(f"{term} is {value.item()}{hint * _lacks_data(site)}")
    return "; ".join(bad) or "the sum of all log-probabilities overflows"


def refuse_nonfinite(model_trace: Trace, guide_trace: Trace, elbo: str, step: int) -> None:
    """Raise the error for a loss that is not finite.

    :param elbo: name of the ELBO, for the message.
    :param step: number of the step, for the message.
    :raises NonFiniteError: always, naming the sites.
    """
    what = nonfinite_terms(model_trace, guide_trace)
    lacks_data = any(_lacks_data(site) for _, site in _samples(model_trace))
    raise NonFiniteError(f"{elbo}, step {step}: {what}. {_DATA_CURE if lacks_data else CURE}")


def _lacks_data(site: Site) -> bool:
    """Tell whether an element of an observed site is nan for all particles."""
    is_nan = torch.atleast_1d(torch.as_tensor(site["log_prob"])).isnan()
    return site["is_observed"] and bool(is_nan.all(0).any())


def _samples(trace: Trace) -> list[tuple[str, Site]]:
    return [(name, site) for name, site in trace.nodes.items() if site["type"] == "sample"]
