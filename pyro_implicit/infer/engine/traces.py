# SPDX-License-Identifier: Apache-2.0
"""What ``Trace_ELBO`` reads in a trace, filled in and weighted."""

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
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor

from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.checks import refuse_missing_data
from pyro_implicit.density.model import (
    IMPOSSIBLE,
    DiscreteSum,
    Model,
    compute_log_prob,
    leave_out_masked,
    refuse_subsampling,
)
from pyro_implicit.density.policy import RUNS
from pyro_implicit.distributions import find_implicit
from pyro_implicit.guides.posterior_draws import refuse_other_guide
from pyro_implicit.infer.engine.sites import PARTICLE_PLATE
from pyro_implicit.runtime.sites import unconstrained

__all__ = [
    "FirstRun",
    "NonFiniteError",
    "Particles",
    "apply_weights",
    "check_gradients",
    "coverage_log_weights",
    "first_run",
    "leave_out_impossible",
    "log_weights",
    "loss_and_surrogate",
    "nonfinite_terms",
    "refuse_nonfinite",
    "set_score_parts",
]


def set_score_parts(site: dict[str, Any], parts: ScoreParts, log_abs_det: Tensor | float) -> None:
    """Give a sample site of the guide score parts, as ``Trace.compute_score_parts`` would.

    :param site: the site, whose scale and mask apply.
    :param parts: those of the implicit distribution at the root of the site's distribution.
    :param log_abs_det: log-determinant of the transforms that follow, of the site's batch shape.
    """
    batch_ndim = len(site["fn"].batch_shape)

    def to_site(term: Tensor) -> Tensor:
        return sum_rightmost(term, term.dim() - batch_ndim)

    score_function = parts.score_function
    if isinstance(score_function, Tensor):
        score_function = to_site(score_function)
    parts = ScoreParts(
        to_site(parts.log_prob) - log_abs_det,
        score_function,
        to_site(parts.entropy_term) - log_abs_det,
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
    """Weigh log-prior and entropy, and temper what the model says.

    A guide's Delta carries the prior's change of variables.

    :param model_trace: with log-probabilities.
    :param guide_trace: with score parts.
    """
    for trace in (model_trace, guide_trace):
        for site in trace.nodes.values():
            if site["type"] != "sample":
                continue
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


def log_weights(model_trace: Trace, guide_trace: Trace, num_particles: int) -> Tensor:
    """log p(x, theta) - log q(theta) of each particle, ``(num_particles,)``."""
    total: Any = 0.0
    for trace, sign in ((model_trace, 1), (guide_trace, -1)):
        for site in trace.nodes.values():
            if site["type"] == "sample":
                total = total + sign * site["log_prob"].reshape(num_particles, -1).sum(-1)
    return total


def coverage_log_weights(model_trace: Trace, guide_trace: Trace, num_particles: int) -> Tensor:
    """log p(x, theta) - log q(theta) of each particle, constants; with all of the guide scaled by s
    (``poutine.scale``) the target is p to the power of its own scales over s.

    :returns: ``(num_particles,)``.
    :raises ValueError: for traces of which these are not the weights of one posterior: subsampled
        data, a guide with latents that are not injective, or with several scales.
    """
    for trace in (model_trace, guide_trace):
        refuse_subsampling(trace, "InjectiveELBO's coverage")
    scales = set()
    for name, site in guide_trace.nodes.items():
        if site["type"] != "sample" or isinstance(site["fn"], dist.Delta):
            continue
        if find_implicit(site["fn"]) is None:
            raise ValueError(
                f"coverage weighs the paths of injective draws, but site '{name}' of the guide is "
                f"{type(site['fn']).__name__}. Cure: coverage=0, or one AutoImplicit guide of all "
                "latents"
            )
        scales.add(site["scale"] if isinstance(site["scale"], float) else float(site["scale"]))
    if len(scales) > 1:
        raise ValueError(
            f"coverage wants one scale for the whole guide, but its sites have {sorted(scales)}. "
            "Cure: coverage=0, or poutine.scale around the whole guide"
        )
    return log_weights(model_trace, guide_trace, num_particles).detach() / scales.pop()


def leave_out_impossible(
    model_trace: Trace, guide_trace: Trace, num_particles: int
) -> Tensor | None:
    """Let traces count only the particles at which the model's log-density is finite.

    :returns: those that are left out, ``(num_particles,)``; None if that are none or all, of which
        nothing is left out.
    """
    impossible = ~log_weights(model_trace, Trace(), num_particles).isfinite()
    num_left = num_particles - int(impossible.sum())
    if num_left in (0, num_particles):
        return None

    def of_the_others(term: Any) -> Any:
        if not isinstance(term, Tensor) or term.dim() == 0 or len(term) != num_particles:
            return term
        mask = impossible.reshape((-1,) + (1,) * (term.dim() - 1))
        return term.masked_fill(mask, 0.0) * (num_particles / num_left)

    for trace in (model_trace, guide_trace):
        for site in _samples(trace):
            site["log_prob"] = of_the_others(site["log_prob"])
            site["log_prob_sum"] = site["log_prob"].sum()
            if "score_parts" in site:
                site["score_parts"] = ScoreParts(*map(of_the_others, site["score_parts"]))
    return impossible


def loss_and_surrogate(model_trace: Trace, guide_trace: Trace) -> tuple[Tensor, Tensor]:
    """Of the sum over all particles in the traces: the negative ELBO, a constant, and a term whose
    gradient is the estimator's.

    As Pyro's ``Trace_ELBO`` has it, but that nothing is read from the device.

    :param model_trace: with log-probabilities.
    :param guide_trace: with score parts.
    """
    loss: Any = 0.0
    surrogate: Any = 0.0
    log_r = None
    for site in _samples(model_trace):
        loss = loss - site["log_prob_sum"].detach()
        surrogate = surrogate - site["log_prob_sum"]
    for site in _samples(guide_trace):
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


def _samples(trace: Trace) -> list[dict[str, Any]]:
    return [site for site in trace.nodes.values() if site["type"] == "sample"]


_CURE = (
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
    """Which sample sites make a loss that is not finite."""
    terms = {
        f"the {label}'s log-probability of site '{name}'": site
        for label, trace in (("model", model_trace), ("guide", guide_trace))
        for name, site in trace.nodes.items()
        if site["type"] == "sample"
    }
    bad = []
    for term, site in terms.items():
        value = torch.as_tensor(site["log_prob_sum"])
        if not value.isfinite():
            hint = " for every particle, as it is if its observations contain NaN"
            bad.append(f"{term} is {value.item()}{hint * _lacks_data(site)}")
    return "; ".join(bad) or "the sum of all log-probabilities overflows"


def refuse_nonfinite(model_trace: Trace, guide_trace: Trace, elbo: str, step: int) -> None:
    """Say which sample sites make a loss that is not finite.

    :param elbo: name of the ELBO, for the message.
    :param step: number of the step, for the message.
    :raises NonFiniteError: always, naming the sites.
    """
    what = nonfinite_terms(model_trace, guide_trace)
    sites = [site for site in model_trace.nodes.values() if site["type"] == "sample"]
    cure = _DATA_CURE if any(map(_lacks_data, sites)) else _CURE
    raise NonFiniteError(f"{elbo}, step {step}: {what}. {cure}")


def _lacks_data(site: dict[str, Any]) -> bool:
    """Whether an observed site is nan in some element whatever the particle."""
    is_nan = torch.atleast_1d(torch.as_tensor(site["log_prob"])).isnan()
    return site["is_observed"] and bool(is_nan.all(0).any())


def check_gradients(params: Trace, elbo: str, step: int) -> None:
    """Check the gradients of all parameters in a trace of ``pyro.param`` sites.

    :param elbo: name of the ELBO, for the message.
    :param step: number of the step, for the message.
    :raises NonFiniteError: naming the parameters.
    """
    tensors = {name: unconstrained(site) for name, site in params.nodes.items()}
    gradients = {n: tensor.grad for n, tensor in tensors.items() if tensor.grad is not None}
    if not gradients:
        return
    if not torch.nn.utils.get_total_norm(list(gradients.values())).isfinite().item():
        bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
        if bad:
            raise NonFiniteError(
                f"{elbo}, step {step}: the gradient of {', '.join(bad)} is not finite. {_CURE}"
            )


Site = dict[str, Any]


class FirstRun(NamedTuple):
    """The deepest nesting of plates, the guide's sample sites by name, and the model's discrete
    latents that the guide leaves to be summed out."""

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
    """Run guide and model once, outside of all plates and traces.

    A draw of the guide at which the model raises an error gives place to another.

    :raises ValueError: naming the site, for a latent of the model that the guide lacks, one of the
        guide that the model lacks, or an observation that is NaN.
    """
    validates = is_validation_enabled()
    for retries_left in reversed(range(RUNS.max_retries)):
        forgiving = contextlib.suppress(*(IMPOSSIBLE if retries_left else ()))
        has_run = False
        with forgiving, poutine.block():
            guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
            replayed = poutine.replay(model, trace=guide_trace)
            model_trace = poutine.trace(replayed).get_trace(*args, **kwargs)
            has_run = True
        if not has_run:
            continue
        # No other draw of the guide would mend these faults.
        discrete = DiscreteSum.of(model_trace, given=guide_trace)
        for name in discrete.names if discrete else ():
            model_trace.remove_node(name)
        refuse_other_guide(guide, model_trace, guide_trace)
        if validates:
            check_model_guide_match(model_trace, guide_trace, max_plate_nesting)
        guide_trace = prune_subsample_sites(guide_trace)
        model_trace = prune_subsample_sites(model_trace)
        if not validates:
            break
        leave_out_masked(model_trace)
        refuse_missing_data(model_trace)
        with forgiving:
            model_trace.compute_log_prob()
            guide_trace.compute_log_prob(lambda name, site: find_implicit(site["fn"]) is None)
            break
    dims = [0]
    sites: dict[str, Site] = {}
    for trace in (model_trace, guide_trace):
        for name, site in trace.nodes.items():
            if site["type"] != "sample":
                continue
            if validates and "log_prob" in site:
                check_site_shape(site, max_plate_nesting)
            dims += [-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized]
            if trace is guide_trace:
                sites[name] = site
    return FirstRun(max(dims), sites, discrete)


LogProbs = tuple[dict[str, Tensor], dict[str, Tensor]]


class _LeftOut:
    """Particles of which the model's gradient is left out.

    Apart from :class:`Particles`, as a tensor's hook that knew these, which know the tensor, would
    keep both for ever wherever no gradient is taken.
    """

    def __init__(self) -> None:
        self.particles: Tensor | None = None
        """Which ones, ``(num_particles,)``, if any."""

    def of(self, value: Tensor) -> Tensor:
        """The value ``(num_particles, ...)``, whose gradient is 0 for them."""
        if value.requires_grad:
            value = value.view_as(value)
            value.register_hook(self._gradient)
        return value

    def _gradient(self, gradient: Tensor) -> Tensor:
        if self.particles is None:
            return gradient
        shape = self.particles.shape + (1,) * (gradient.dim() - 1)
        return gradient.masked_fill(self.particles.reshape(shape), 0.0)


class Particles(Model):
    """A model to be run at the draws of a guide, the leftmost dimension of which counts particles.

    All ways of running it give a trace in which each log-probability has the particles at dimension
    ``-max_plate_nesting``. All particles share the minibatch of the guide trace or of the first
    run.

    :param model: the Pyro model.
    :param guide_trace: a guide trace under the particle plate, if there are many particles.
    :param num_particles: their number.
    :param value_ndims: dimensions of each latent's value when drawn outside the particle plate.
    :param max_plate_nesting: plates of the model, the particle plate included.
    :param discrete: latents that are summed out.
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
    ) -> None:
        super().__init__(model, args, kwargs, Trace(), discrete)
        self.guide_trace = guide_trace
        self.num_particles = num_particles
        self.max_plate_nesting = max_plate_nesting
        self.left_out = _LeftOut()
        self.latents: dict[str, Tensor] = {}
        for name, site in guide_trace.nodes.items():
            if site["type"] != "sample":
                continue
            self.replayed.add_node(name, **site)
            if not site_is_subsample(site):
                value = site["value"]
                if num_particles > 1:
                    value = self.left_out.of(_particles_first(site, value_ndims.get(name)))
                self.latents[name] = value

    def particle(self, index: int) -> dict[str, Tensor]:
        """The latent values of one particle."""
        if self.num_particles == 1:
            return dict(self.latents)
        return {name: value[index] for name, value in self.latents.items()}

    def run_plate(self, vectorize: Callable[[Callable], Callable]) -> Trace:
        """The model's trace for all particles, run once under Pyro's particle plate.

        :param vectorize: puts the model under that plate.
        """
        if self.discrete is not None and self.num_particles == 1:
            trace = self.run(self.latents)
        else:
            model = poutine.replay(vectorize(self.model), trace=self.guide_trace)
            trace = poutine.trace(model).get_trace(*self.args, **self.kwargs)
            leave_out_masked(trace)
        trace = prune_subsample_sites(trace)
        compute_log_prob(trace)
        return trace

    def run_all(self, runs: BatchedRuns) -> Trace:
        """The model's trace for all particles.

        :param runs: in this way.
        """
        traces: list[Trace] = []

        def read(trace: Trace) -> LogProbs:
            compute_log_prob(trace)
            traces.append(trace)
            return _log_probs(trace)

        return self._lay_out(runs.map(self, self.latents, read), traces[-1])

    def _lay_out(self, log_probs: LogProbs, trace: Trace) -> Trace:
        """A trace of all particles from everyone's log-probabilities and one particle's trace."""
        result = Trace()
        scaled, unscaled = ({n: self._pad(v) for n, v in part.items()} for part in log_probs)
        particle_frame = self._particle_frame()
        for name, site in trace.nodes.items():
            if site["type"] == "param":
                result.add_node(name, **site)
        for name, site in _sample_sites(trace):
            result.add_node(
                name,
                type="sample",
                name=name,
                fn=site["fn"],
                is_observed=site["is_observed"],
                cond_indep_stack=(*particle_frame, *site["cond_indep_stack"]),
                log_prob=scaled[name],
                log_prob_sum=scaled[name].sum(),
            )
            if name in unscaled:
                result.nodes[name]["unscaled_log_prob"] = unscaled[name]
        return result

    def _particle_frame(self) -> tuple[Any, ...]:
        """Pyro's record of the particle plate; none where the guide has no site."""
        for name in self.latents:
            for frame in self.guide_trace.nodes[name]["cond_indep_stack"]:
                if frame.name == PARTICLE_PLATE:
                    return (frame,)
        return ()

    def _pad(self, value: Tensor) -> Tensor:
        """Put the particles at dimension ``-max_plate_nesting``."""
        padding = (1,) * (self.max_plate_nesting - value.dim())
        return value.reshape(value.shape[:1] + padding + value.shape[1:])


def _particles_first(site: dict[str, Any], ndim: int | None) -> Tensor:
    """Drop the singletons between the particle dimension and the value's own dimensions."""
    value = site["value"]
    if ndim is None:  # a site that the first run did not meet
        depths = [-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized]
        depths = sorted(depths)[:-1]
        ndim = max(depths, default=0) + site["fn"].event_dim
    return value.reshape(value.shape[:1] + value.shape[value.dim() - ndim :])


def _log_probs(trace: Trace) -> LogProbs:
    """Log-probabilities of all sites, and of the latents without scale and mask."""
    sites = _sample_sites(trace)
    return (
        {name: torch.as_tensor(site["log_prob"]) for name, site in sites},
        {name: site["unscaled_log_prob"] for name, site in sites if not site["is_observed"]},
    )


def _sample_sites(trace: Trace) -> list[tuple[str, dict[str, Any]]]:
    return [(name, site) for name, site in trace.nodes.items() if site["type"] == "sample"]
