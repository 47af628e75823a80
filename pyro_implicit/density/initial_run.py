# SPDX-License-Identifier: Apache-2.0
"""The first run of a model, and runs at draws of its prior: sites, subsampling, discrete sums."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.distributions import Unit
from pyro.infer.autoguide import init_to_feasible, init_to_median, init_to_sample
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_implicit.density.bijections import on_one_turn, turns_of
from pyro_implicit.density.checks import refuse_moving_sites, refuse_unfit_sites
from pyro_implicit.density.checks.masks import MaskWatch
from pyro_implicit.density.checks.observations import explain, warn_of_missing_data
from pyro_implicit.density.discrete import (
    Elements,
    SizeLimit,
    elements_of,
    refuse_coupled,
    refuse_improper_prior,
    sites_to_sample,
    with_values,
)
from pyro_implicit.density.model import (
    IMPOSSIBLE,
    DiscreteSum,
    Model,
    SubsampledError,
    UnfitModelError,
    compute_log_prob,
    refuse_subsampling,
    restore_priors,
    subsampled_plate,
    total_log_prob,
)
from pyro_implicit.density.policy import RUNS, SEARCH
from pyro_implicit.runtime.messages import first_line
from pyro_implicit.runtime.sites import (
    FlatPriorStart,
    Site,
    example_tensor,
    innermost_support,
    is_data,
    is_discrete_latent,
    is_flat,
    is_latent,
    without_sequential_plates,
)

__all__ = ["InitialRun", "Subsampling", "initialisations", "prior_run"]


def initialisations(
    init_loc_fn: Callable[[dict[str, Any]], Tensor],
) -> list[Callable[[dict[str, Any]], Tensor]]:
    """Return per-site initialisations, to be tried in turn until the model runs.

    At all draws of a vague prior, such as ``Gamma(0.001, 0.001)``, the likelihood may overflow: the
    last initialisation is the origin of unconstrained space.

    :param init_loc_fn: the first.
    """
    return [init_loc_fn, *[init_to_sample] * RUNS.max_retries, init_to_feasible]


class Subsampling(NamedTuple):
    """How a model subsamples and scales its data."""

    plate: tuple[str, int, int] | None = None
    """Name, rows in the first minibatch, and rows in total of the subsampled plate, if any."""
    scaled: bool = False
    """Whether the model scales the likelihood of its minibatch."""
    draws_rows: bool = False
    """Whether the model draws the rows of its minibatch itself."""


class InitialRun:
    """The first run of a model, which must pass the checks of ``density/checks/``.

    :param model: the model; ``args`` and ``kwargs`` are its arguments.
    :param init_loc_fn: determines the values of latent variables.
    :param allow_local: whether a minibatch may have latent variables of single rows; None refuses
        minibatches.
    :param sample_discrete: whether discrete latent variables that cannot be summed out get
        coordinates.
    :ivar model: the model, with its angles on one turn of the circle.
    :ivar like: a tensor of the dtype and device of the model, if it has any.
    :ivar turns: by site, the middle of the turn in which its angles lie.
    :ivar sampled: the discrete latent variables that get coordinates.
    :ivar discrete: the sum over the others.
    :ivar unsummed: why discrete latent variables that Pyro can enumerate are not summed out.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        init_loc_fn: Callable[[dict[str, Any]], Tensor],
        allow_local: bool | None,
        sample_discrete: bool,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.like = example_tensor(model, args, kwargs)
        self.trace = self._run(init_loc_fn)
        self.turns = turns_of(self.trace)
        if self.turns:
            self.model = on_one_turn(model, self.turns)
            self.trace = self._run(init_loc_fn)
        self.subsampling = Subsampling()
        if allow_local is None:
            refuse_subsampling(self.trace, "the log-density")
        else:
            self.subsampling = _subsampling_of(self.trace, allow_local)
        self.sampled = sites_to_sample(self.trace) if sample_discrete else frozenset[str]()
        refuse_unfit_sites(self.trace, self.sampled)
        self.discrete = DiscreteSum.of(self.trace, given=self.sampled)
        self.unsummed = ""
        if self.discrete is not None and sample_discrete:
            self.unsummed = self._why_not_summed(self.discrete)
            if self.unsummed:
                self.sampled, self.discrete = self.sampled | self.discrete.names, None
        warn_of_missing_data(self.model, self.trace, args, kwargs)

    def _run(self, init_loc_fn: Callable[[dict[str, Any]], Tensor]) -> Trace:
        trace = self._first_possible(initialisations(init_loc_fn))
        with suppress(Exception):  # of the model, or of latents without coordinates, refused later
            if init_loc_fn is init_to_median and _extremes(trace):
                again = self._first_possible(initialisations(init_to_sample))
                if extremes := _extremes(trace, again):
                    return self._without(extremes, trace)
        return trace

    def _without(self, extremes: set[str], trace: Trace) -> Trace:
        """Return a run in which these sites begin at the origin, if it is not impossible there."""

        def init(site: dict[str, Any]) -> Tensor:
            start = init_to_feasible if site["name"] in extremes else init_to_median
            return start(site)

        moved = self._first_possible([init])
        return moved if _is_possible(moved) or not _is_possible(trace) else trace

    def _first_possible(self, inits: list[Callable[[dict[str, Any]], Tensor]]) -> Trace:
        first_error = None
        for init in inits:
            start, masks = FlatPriorStart(init, like=self.like), MaskWatch()
            try:
                with (
                    poutine.block(),
                    InitMessenger(start),
                    poutine.block(hide_fn=_is_drawn),
                    masks,
                ):
                    model = poutine.trace(without_sequential_plates(self.model))
                    trace = model.get_trace(*self.args, **self.kwargs)
            except Exception as error:  # of the model; raised below if no start works
                first_error = first_error or error
                continue
            masks.refuse_changed()
            return restore_priors(trace)
        assert first_error is not None
        found = explain(first_error, self.model, self.args, self.kwargs)
        raise found from (None if found is first_error else first_error)

    @property
    def latents(self) -> Trace:
        """The sites that get coordinates, in model order, the discrete ones last."""
        latents = Trace()
        names = [name for name, site in self.trace.nodes.items() if is_latent(site)]
        for name in sorted(names, key=self.sampled.__contains__):
            site = self.trace.nodes[name]
            if name in self.sampled or not is_discrete_latent(site):
                latents.add_node(name, **site)
        return latents

    def try_sum(self, model: Model, values: dict[str, Tensor]) -> None:
        """Sum the discrete latent variables out once, where a plain run is known to work.

        :param model: the model with the sum.
        :param values: the values of this run, by site.
        :raises ValueError: if the model cannot be enumerated, naming the sites.
        :raises UnfitModelError: if the sites of the sum have different scales.
        """
        if self.discrete is None:
            return
        try:
            with poutine.block(), pyro.validation_enabled(False):
                model.run(values)
        except UnfitModelError:  # which names its own cure
            raise
        except Exception as error:  # of a model that does not broadcast, of many kinds
            names = ", ".join(f"'{name}'" for name in sorted(self.discrete.names))
            raise ValueError(
                f"the discrete latents {names} cannot be summed out, as the model raises "
                f"{first_line(error)}. Cure: write it so that it "
                "broadcasts over all their values at once (pyro.ops.indexing.Vindex, no branches), "
                "see Pyro's tutorial on enumeration"
            ) from error
        self._refuse_coupled(self.discrete)

    def elements(self, names: tuple[str, ...], like: Tensor) -> Elements:
        """Return the bounds of discrete elements, which may differ between runs.

        :param names: their sites, in the order of the coordinates.
        :param like: a tensor of the dtype and device of the result.
        """
        others = []
        for _ in range(RUNS.num_compared_runs):
            with suppress(*IMPOSSIBLE):  # at draws of the prior
                others.append(self._prior_run())
        refuse_moving_sites(self.trace, others, names)
        return elements_of([self.trace, *others], names, like)

    def _prior_run(self) -> Trace:
        return prior_run(self.model, self.args, self.kwargs, self.like)

    def _possible_run(self) -> Trace:
        """Return a run at a draw of the prior, with log-probabilities."""
        for attempt in range(RUNS.max_retries + 1):
            try:
                trace = self._prior_run()
                compute_log_prob(trace)
                break
            except IMPOSSIBLE:  # at a draw of the prior
                if attempt == RUNS.max_retries:
                    raise
        return trace

    def _why_not_summed(self, discrete: DiscreteSum) -> str:
        """Return why an enumerated run fails, is wrong, or too large; empty if it is none."""
        try:
            with poutine.block(), pyro.validation_enabled(False), torch.no_grad():
                with SizeLimit() as plain:
                    trace = self._possible_run()
                model = poutine.replay(
                    discrete.enumerate(self.model),
                    trace=with_values(trace, dict.fromkeys(discrete.names)),
                )
                with SizeLimit.beyond(plain.largest):
                    found = poutine.trace(model).get_trace(*self.args, **self.kwargs)
                    discrete.collapse(found)
            self._refuse_coupled(discrete)
        except Exception as error:  # of a model that does not broadcast, of many kinds
            return first_line(error)
        return ""

    def _refuse_coupled(self, discrete: DiscreteSum) -> None:
        trace = None
        with suppress(*IMPOSSIBLE), poutine.block(), pyro.validation_enabled(False):
            with torch.no_grad():
                trace = self._possible_run()
        if trace is not None:
            refuse_coupled(self.model, self.args, self.kwargs, trace, discrete.names)


def prior_run(
    model: Callable[..., Any], args: tuple, kwargs: dict[str, Any], like: Tensor | None
) -> Trace:
    """Run a model at a draw of its prior; flat priors are uniform in unconstrained space.

    :param like: a tensor of the dtype and device of flat priors.
    """
    init = FlatPriorStart(init_to_sample, spread=SEARCH.near_width, like=like)
    with poutine.block(), InitMessenger(init), poutine.block(hide_fn=_is_drawn):
        return poutine.trace(model).get_trace(*args, **kwargs)


def _extremes(trace: Trace, again: Trace | None = None) -> set[str]:
    """Return the latent variables that are too large for initial values.

    :param again: another run. If values are large because the prior is vague, and not because it
        has such a location, they differ by a multiple of their size. The variables that may have
        caused it, such as precisions of exp(-80), are then returned, too.
    """
    found, causes = set(), set()
    for name, site in trace.nodes.items():
        if is_latent(site) and not is_discrete_latent(site):
            support = site["fn"].support
            inverse = biject_to(support).inv
            value = inverse(site["value"])
            is_far = ~(value.abs() < RUNS.extreme)
            if again is not None:
                change = (value - inverse(again.nodes[name]["value"])).abs()
                is_far &= ~(change < RUNS.least_spread * value.abs())
                is_bounded = not isinstance(innermost_support(support), type(constraints.real))
                if is_bounded and (value.abs() > SEARCH.far).any():
                    causes.add(name)
            if is_far.any():
                found.add(name)
    return found | causes if found else found


def _is_possible(trace: Trace) -> bool:
    """Return whether the log-density of a run is finite."""
    with suppress(Exception), pyro.validation_enabled(False):  # of the model
        return bool(total_log_prob(trace.copy()).isfinite())
    return False


def _is_drawn(site: Site) -> bool:
    """Return whether a site is a discrete latent variable, which is drawn from its prior."""
    if not is_discrete_latent(site):
        return False
    if is_flat(site["fn"]):
        refuse_improper_prior(site["name"], site)
    return True


def _subsampling_of(trace: Trace, allow_local: bool) -> Subsampling:
    """Read how a model subsamples and scales its data; refuse latents of single rows."""
    found = Subsampling()
    for name, site in trace.nodes.items():
        if site["type"] != "sample":
            continue
        if site_is_subsample(site):
            is_part = len(site["value"]) < site["fn"].size
            found = found._replace(draws_rows=found.draws_rows or is_part)
        elif not site["is_observed"]:
            if not allow_local and not is_discrete_latent(site):
                _refuse_local(name, site)
        elif is_data(site):
            scale = torch.as_tensor(site["scale"])
            # A factor of data may scale itself.
            is_factor = isinstance(site["fn"], Unit) and not site["infer"].get("is_prior")
            found = found._replace(scaled=found.scaled or is_factor or bool((scale != 1).any()))
            frame = subsampled_plate(site)
            if frame is not None:
                found = found._replace(plate=(frame.name, frame.size, frame.full_size))
    return found


def _refuse_local(name: str, site: Site) -> None:
    frame = subsampled_plate(site)
    if frame is not None:
        raise SubsampledError(
            f"latent '{name}' lies in plate '{frame.name}', and a minibatch has {frame.size} of "
            f"{frame.full_size} elements: the others could not move. Cure: fit(..., "
            "amortize='conditional'), which integrates it out; amortize='auto', which trains an "
            "encoder of the rows; or give all data at once"
        )
