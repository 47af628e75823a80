# SPDX-License-Identifier: Apache-2.0
"""The result of ``fit``."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from pyro.infer import ELBO
from pyro.poutine.trace_struct import Trace
from torch import Tensor

from pyro_implicit.compiled import CompileMode
from pyro_implicit.decisions.policy import DECISIONS
from pyro_implicit.decisions.power_scaling import Sensitivity, power_scaling
from pyro_implicit.decisions.predictive_checks import PredictiveCheck, predictive_check
from pyro_implicit.density.bijections import on_one_turn
from pyro_implicit.density.model import IMPOSSIBLE, SubsampledError, trace_model
from pyro_implicit.density.pass_target import RowsTarget
from pyro_implicit.density.policy import ROUNDING, RUNS
from pyro_implicit.density.supports import on_fixed_supports
from pyro_implicit.density.symmetry import Symmetries
from pyro_implicit.density.tails import Tails, with_short_tails
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics import Comparison, Diagnosis, compare, diagnose
from pyro_implicit.diagnostics.policy import EFFORT, ComparePolicy, VerdictPolicy
from pyro_implicit.diagnostics.quantities import Function, Quantities
from pyro_implicit.export import as_datatree, as_inferencedata, joined, model_groups, quiet_arviz
from pyro_implicit.fitting.arguments import Amortize, refuse_unfit_guide
from pyro_implicit.fitting.candidates import corrected_draws, joint_draws
from pyro_implicit.fitting.parameters import (
    Learnt,
    describe,
    first_few,
    own_parameters,
    put_back,
    warn_of_lost_modules,
)
from pyro_implicit.fitting.policy import DEFAULT, FitPolicy
from pyro_implicit.fitting.updating import JointPrior, fit_update
from pyro_implicit.guides import AutoHierarchical
from pyro_implicit.guides.auto_implicit import has_exact_density
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.guides.sampler import Sampler, SitePlates, StoredDraws
from pyro_implicit.mcmc import AutoConditional, Refined
from pyro_implicit.mcmc.refine import continue_chains
from pyro_implicit.nn import LabelReport, NetworkModel, NumberReport
from pyro_implicit.runtime.files import read_file, write_file
from pyro_implicit.runtime.global_state import in_turn, seeded, with_seed
from pyro_implicit.runtime.messages import Printed, Table, first_line, refuse_counts, warn_user
from pyro_implicit.runtime.processes import common_seed, num_processes
from pyro_implicit.runtime.progress import Callback, Stage, new_stage
from pyro_implicit.runtime.sites import unplated_as_events

__all__ = ["Fit"]

KIND = "a result of fit"


M = TypeVar("M", bound=Callable[..., Any])


def _by_own_parameters(method: M) -> M:
    """Run a method of :class:`Fit` while the model has the parameters of this fit."""

    @functools.wraps(method)
    def inside(self: Fit, *args: Any, **kwargs: Any) -> Any:
        with self.own_parameters():
            return method(self, *args, **kwargs)

    return cast(M, inside)


@dataclass(repr=False)
class Fit(Printed):
    """The result of :func:`fit`; ``print`` shows a table of its stages.

    :param guide: the fitted guide.
    :param losses: the loss of each step of its training; of a mixture, for one component after the
        other.
    :param bounds: the bound of each candidate in nats: the mean of log p - log q without the lowest
        one per cent.
    :param num_modes: the number of separate modes that the search found, None without a search;
        modes that symmetries map to each other are one.
    :param modes: these modes in unconstrained space, ``(num_modes, latent_dim)``.
    :param chosen: the name of the candidate that ``guide`` is.
    :param stages: the stages, with the reason of each failure.
    :param refined: the chains that moved draws of the guide to the posterior, if any.
    :param correction: the effective sample size, as a share of the draws, of the importance weights
        by which draws are resampled; None if they are not.
    :param interrupted: whether Ctrl-C ended the call.
    :param parameters: the learnt parameters of the model, by name. Methods that run the model give
        it these for a while, whatever another fit has changed.
    :param held_out: scores of rows that the automatic fit of a network held out, by the name of the
        stage that did not see them; empty for other models and few rows.
    :param minibatches: whether the data came in minibatches, which are not in ``source``.
    :param source: the model, its arguments and its keyword arguments.
    :param unplated: by site, the number of the model's batch dimensions outside of plates, which
        are dimensions of an event for the guide.
    :param supports: the sites whose supports depend on others. The guide and the chains have their
        positions within the supports (:class:`~pyro_implicit.SupportReparam`), and :meth:`sample`
        and :attr:`posterior` their values, too.
    :param turns: by site, the middle of the turn of the circle in which its angles lie; None for
        angles at whose ends the density ends.
    :param tails: by site, location and scale of priors without a variance, which have other
        unconstrained coordinates than in Pyro.
    :param marginal: the fit of the latent variables that remain after the others were integrated
        out, if any were; its chains and importance weights are those of this result.
    :param draws: draws of all latent variables, if some were integrated out, or of passes over
        minibatches.
    :param passes: the log-density of all rows that came in minibatches, if passes over them made
        this result; not saved.
    :param symmetries: groups that leave the posterior unchanged, such as permutations of the
        components of a mixture. Corrected and refined draws are moved by random members.
    :param prior: the posterior of earlier data that :meth:`update` gave the model as its prior.
    :param extrapolated: the share of draws for which this prior is a guess: beyond all draws to
        which it was fitted.
    :param coarse: the share of the effective draws that is lost to the error of this prior, if
        weights cannot correct it where it is no guess.
    :param unweighted: the draws of an update before the weights of the earlier density over this
        prior; ``diagnose`` checks them, as the target has this prior.
    :param known: some vectors and the log-density there, by which ``target`` notices that the
        model's data have changed; None for minibatches, networks, given guides, and models that
        run in float64 because of rounding errors.
    :param in_double: whether the model ran in float64 because of rounding errors.
    :param unsettled: the model's parameters whose training ended while the ELBO was rising.
    :param policy: the settings of the call.
    """

    #: ``fit``, which calls this file and therefore registers itself here.
    _fit: ClassVar[Callable[..., Fit]]

    guide: Any = None
    losses: list[float] = field(default_factory=list)
    bounds: dict[str, float] = field(default_factory=dict)
    num_modes: int | None = None
    modes: Tensor | None = field(default=None, repr=False)
    chosen: str = "guide"
    stages: list[Stage] = field(default_factory=list)
    refined: Refined | None = None
    correction: float | None = None
    interrupted: bool = False
    parameters: dict[str, Learnt] = field(default_factory=dict, repr=False)
    held_out: dict[str, LabelReport | NumberReport] = field(default_factory=dict, repr=False)
    minibatches: bool = False
    source: tuple[Any, tuple, dict[str, Any]] = field(default=(None, (), {}), repr=False)
    unplated: dict[str, int] = field(default_factory=dict, repr=False)
    supports: tuple[str, ...] = field(default=(), repr=False)
    turns: dict[str, Tensor | None] = field(default_factory=dict, repr=False)
    tails: dict[str, Tails] = field(default_factory=dict, repr=False)
    marginal: Fit | None = field(default=None, repr=False)
    draws: StoredDraws | None = field(default=None, repr=False)
    passes: RowsTarget | None = field(default=None, repr=False)
    symmetries: Symmetries | None = field(default=None, repr=False)
    prior: JointPrior | None = field(default=None, repr=False)
    extrapolated: float = 0.0
    coarse: float = 0.0
    unweighted: Any = field(default=None, repr=False)
    known: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    in_double: bool = field(default=False, repr=False)
    unsettled: str = ""
    policy: FitPolicy = field(default=DEFAULT, repr=False)

    def own_parameters(self) -> AbstractContextManager[None]:
        """Give the model the parameters of this fit for a while, as the methods of a result do.

        Another fit of the model, or other code, may have changed its modules and Pyro's store.

        **Example:**

        >>> import pyro
        >>> import pyro.distributions as dist
        >>> from pyro_implicit import fit
        >>> def model(y):
        ...     scale = pyro.param("scale", torch.tensor(1.0))
        ...     pyro.sample("x", dist.Normal(y, scale))
        >>> result = fit(model, "auto", torch.tensor(0.0), num_steps=100, seed=0, progress=False)
        >>> learnt = pyro.param("scale").item()
        >>> pyro.param("scale").data.fill_(9.0)
        tensor(9.)
        >>> with result.own_parameters():
        ...     pyro.param("scale").item() == learnt
        True
        """
        return own_parameters(self.parameters, self.source[0], self.guide)

    @property
    def target(self) -> Target:
        """The posterior as a function of the unconstrained latent variables.

        Each access evaluates the model at the vectors of ``known``.

        :raises SubsampledError: if the model subsamples its data, or had them in minibatches.
        :raises ValueError: if the log-density has changed since the fit, as with other data.
        """
        target = self._target
        self._refuse_changed_data()
        return target

    @target.setter
    def target(self, target: Target) -> None:
        self._target = target

    def _refuse_changed_data(self) -> None:
        if self.known is None:
            return
        points, before = self.known
        with self.own_parameters():
            now = self._target.log_prob(points.to(self._target.init_loc)).to(before)
        change = (now - before).abs() - RUNS.repeat_tolerance * before.abs()
        if not (change <= ROUNDING.max_error).all():
            worst = int(change.argmax())
            raise ValueError(
                f"the model's log-density at a draw was {before[worst]:.6g} in fit, and is "
                f"{now[worst]:.6g} now: its data, its mode (.train()) or variables that it reads "
                "have changed. Cure: restore them, or fit again; give result.update(...) its data "
                "as new tensors"
            )

    @cached_property
    def _target(self) -> Target:
        args, kwargs = self._of_all_data()
        own: Iterable[Tensor] = getattr(self.guide, "parameters", tuple)()
        device = next((one.device for one in own), torch.device("cpu"))
        with seeded(0, device):  # a loaded result, too, repeats its draws
            model = self._in_coordinates(self.model)
            target = Target(model, *args, model_kwargs=kwargs, sample_discrete=True)
            if self.in_double and not target.widen(target.init_loc.unsqueeze(0)):
                warn_user(
                    "the model ran in float64 in fit, but now fails in it, so that it runs in "
                    "float32, with rounding errors. Cure: the model and the data of the fit"
                )
            return target

    @property
    def model(self) -> Any:
        """The model that was fitted: ``source``'s, with positions instead of moving supports."""
        model = self.source[0]
        return on_fixed_supports(model, self.supports) if self.supports else model

    def __getstate__(self) -> dict[str, Any]:
        """Return all fields except fields with data, or with runs, which cannot be copied."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return found | {"marginal": None, "passes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set all fields, and give a guide that runs the model its model."""
        vars(self).update(state)
        self._attach()

    def _attach(self) -> None:
        model = self.model
        if isinstance(self.guide, (AutoConditional, AutoHierarchical)) and model is not None:
            model = unplated_as_events(model, self.unplated) if self.unplated else model
            self.guide.attach(self._in_coordinates(model))

    def _in_coordinates(self, model: Any) -> Any:
        """Return a model with the unconstrained coordinates of this fit."""
        model = with_short_tails(model, self.tails) if self.tails else model
        return on_one_turn(model, self.turns) if self.turns else model

    @in_turn
    @with_seed
    @_by_own_parameters
    def sample(
        self,
        num_samples: int,
        *args: Any,
        corrected: bool | None = None,
        seed: int | None = None,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Draw from the posterior: refined or corrected draws if available, else from the guide.

        For sites of ``pyro.deterministic``, use ``Predictive(model, guide=result.posterior, ...)``
        (:doc:`/howto/predict`).

        Draws that were resampled by importance weights repeat where weights are large. The head of
        the report of :meth:`diagnose` says how many independent draws the stored ones are worth.

        :param num_samples: the number of draws; refined draws repeat only after all were returned.
        :param args: positional arguments of a hand-written guide; ``kwargs`` are keyword arguments.
        :param corrected: whether to resample two effective draws of a guide with an exact density
            to one, by Pareto-smoothed importance weights; by default if ``correction`` is set.
        :param seed: the seed of all random numbers of this call. The caller's random streams do not
            advance; without a seed they are used.
        :param model_kwargs: keyword arguments of the guide whose names this method has, too.
        :returns: by site, ``(num_samples, *site_shape)``.
        :raises ValueError: for changed data, no draws, and for ``corrected=True`` and a guide
            without an exact density.
        """
        refuse_counts(num_samples=num_samples)
        if corrected is None:
            corrected = self.correction is not None
        if corrected:
            return self._with_values(self._corrected(num_samples))
        has_draws = self.refined is not None or self.draws is not None
        guide = self._posterior(num_samples) if has_draws else self.guide
        return self._with_values(
            draw(guide, num_samples, *args, **{**kwargs, **(model_kwargs or {})})
        )

    @property
    @in_turn
    @_by_own_parameters
    def posterior(self) -> Any:
        """A guide for ``Predictive``: refined or corrected draws if available, else ``guide``."""
        number = self.policy.choice.num_kept
        is_resampled = self.draws is self.refined is None and self.correction is not None
        found = self._resampled if is_resampled else self._posterior(number)
        if self.supports:
            draws = found.samples if isinstance(found, StoredDraws) else draw(found, number)
            found = StoredDraws(self._with_values(draws))
        if isinstance(found, StoredDraws) and not found.plates:
            found = copy.copy(found)
            found.plates = self._site_plates
        return found

    @cached_property
    def _resampled(self) -> StoredDraws:
        """The resampled draws of ``posterior``, which need many evaluations of the density."""
        return self._posterior(self.policy.choice.num_kept)

    @cached_property
    def _site_plates(self) -> dict[str, SitePlates]:
        """The plates of the sites; of the guide's sites if the model cannot run on all data."""
        trace = getattr(self.guide, "prototype_trace", None)
        # Without all data, or at an impossible draw of the prior: draws may need no plates.
        with suppress(TypeError, *IMPOSSIBLE), seeded(0):
            args, kwargs = self._of_all_data()
            trace = trace_model(self.source[0], args, kwargs)
        return {} if trace is None else SitePlates.of(trace)

    def _with_values(self, draws: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the values of sites whose positions were drawn."""
        if not self.supports:
            return draws

        def read(trace: Trace) -> dict[str, Tensor]:
            return {name: trace.nodes[name]["value"] for name in self.supports}

        with torch.no_grad():
            return draws | self.target.read_at(draws, read)

    def _posterior(self, num_corrected: int) -> Any:
        if self.draws is not None:
            return self.draws
        if self.refined is not None:
            if isinstance(self.refined, Refined):
                return self.refined.as_guide()
            return StoredDraws(self.refined.get_samples())
        if self.correction is not None:
            return StoredDraws(self._corrected(num_corrected), settled=True, modes_weighed=True)
        return self.guide

    @_by_own_parameters
    def refine_more(
        self,
        max_seconds: float | None = None,
        max_gradients: int | None = None,
        progress: bool = True,
    ) -> Fit:
        """Continue the chains where they stopped, also after :meth:`load` with model and data.

        The guide does not learn from the new draws.

        :param max_seconds: further wall time.
        :param max_gradients: further gradients of each chain; by default as many as before. See
            :meth:`Refined.refine_more <pyro_implicit.mcmc.Refined.refine_more>`.
        :param progress: whether to show a bar.
        :returns: a new result; this one does not change.
        :raises ValueError: without chains of all data, and for changed data.
        """
        if self.unweighted is not None:
            raise ValueError(
                "weights of the earlier density have replaced the chains of this update. Cure: one "
                "fit to the earlier and the new data, with refine=True"
            )
        self._refuse_changed_data()
        if self.marginal is not None:
            return self._refine_marginal(max_seconds, max_gradients, progress)
        chains = getattr(self.refined, "chains", None)
        if self.refined is None or chains is None:
            raise ValueError(
                "this result has no chains of all data that could go on. Cure: fit(refine=True), "
                "or refine(model, result, ...)"
            )
        result = replace(self, stages=[*self.stages], interrupted=False)
        with result.stage("refine_more") as line:
            more = self.refined.more or partial(
                continue_chains, Sampler(self.target, self.guide), chains
            )
            result.refined = found = more(max_seconds, max_gradients, progress)
            line.outcome = f"{found.stopped} after {found.num_gradients} gradients; {found.drift}"
        return result

    def _refine_marginal(self, *options: Any) -> Fit:
        assert self.marginal is not None and self.draws is not None
        more = self.marginal.refine_more(*options)
        result = replace(self, marginal=more, stages=[*self.stages], interrupted=False)
        result.stages.append(more.stages[-1])
        with result.stage("draws") as line:
            marginal, policy = more.source[0].marginal, self.policy.integration
            seconds = marginal.seconds(with_score=False)
            number = policy.affordable_draws(marginal.target.latent_dim, seconds)
            result.draws, _ = joint_draws(more, marginal, number)
            line.outcome = f"{result.draws.num_draws:,} draws of all latent variables"
        return result

    @in_turn
    def update(
        self,
        model: Callable[..., Any],
        *args: Any,
        sites: Collection[str] | None = None,
        batches: Iterable[Any] | None = None,
        epochs: int | None = None,
        validation: Iterable[Any] | None = None,
        amortize: Amortize | None = None,
        num_steps: int | None = None,
        lr: float = 0.01,
        num_particles: int = 128,
        refine: Literal["auto"] | bool = "auto",
        max_seconds: float | None = None,
        num_workers: int | None = None,
        seed: int | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 500,
        compile: CompileMode = "auto",
        progress: bool = True,
        callbacks: Iterable[Callback] = (),
        policy: FitPolicy | None = None,
        model_kwargs: dict[str, Any] | None = None,
    ) -> Fit:
        """Fit new data, with this posterior as the prior.

        **Example:**

        >>> import pyro
        >>> import pyro.distributions as dist
        >>> from pyro_implicit import fit
        >>> def model(y):
        ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("rows", len(y)):
        ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
        >>> monday = fit(model, "auto", torch.tensor([2.0, 3.0]), seed=0, progress=False)
        >>> tuesday = monday.update(model, torch.tensor([1.0]), seed=0, progress=False)
        >>> print(f"{tuesday.sample(1_000)['x'].mean():.1f}")  # (2 + 3 + 1) / (3 + 1)
        1.5

        :param model: the model of the new data, with its own priors.
        :param args: its arguments: only the new data.
        :param sites: the sites that keep what is known of them; see
            :func:`~pyro_implicit.fitting.posterior_as_prior`, which also lists the errors.
        :param batches: as for :func:`~pyro_implicit.fit`, like all arguments without a description
            here.
        :param policy: of the prior and of the new fit; by default that of this result. All other
            arguments have the defaults of ``fit``, not those of the call that made this result.
        :param model_kwargs: keyword arguments of the model.
        :raises TypeError: for an argument of another name.
        :raises ValueError: also for latent variables whose supports depend on others.
        :returns: the result of ``fit``. Its first stage tells how close the prior is to this
            posterior, by k-hat and effective sample size of importance weights (unknown if the
            prior has only some of the sites), and how many modes the new data have excluded. If the
            new data disagree with the earlier ones, further stages are those of a second fit.
        """
        if self.supports:
            raise ValueError(
                f"update needs fixed supports, but that of latent '{self.supports[0]}' depends on "
                "other latents. Cure: fit and update the model pyro.poutine.reparam(model, "
                f"{{'{self.supports[0]}': pyro_implicit.SupportReparam()}})"
            )
        options: dict[str, Any] = {
            "batches": batches,
            "epochs": epochs,
            "validation": validation,
            "amortize": amortize,
            "num_steps": num_steps,
            "lr": lr,
            "num_particles": num_particles,
            "refine": refine,
            "max_seconds": max_seconds,
            "num_workers": num_workers,
            "seed": seed,
            "checkpoint": checkpoint,
            "checkpoint_every": checkpoint_every,
            "compile": compile,
            "progress": progress,
            "callbacks": callbacks,
            "policy": policy,
        }
        with self._same_in_all_processes():
            return fit_update(self, model, args, sites, model_kwargs, options)

    @in_turn
    @with_seed
    @_by_own_parameters
    def diagnose(
        self,
        *,
        num_samples: int | None = None,
        loss: ELBO | None = None,
        modes: Tensor | Literal["known", "search"] | None = "known",
        num_transitions: int | None = None,
        chunk_size: int = EFFORT.chunk_size,
        max_core_seconds: float = EFFORT.max_core_seconds,
        quantities: Quantities = "auto",
        seed: int | None = None,
        progress: bool = True,
        policy: VerdictPolicy | None = None,
    ) -> Diagnosis:
        """Return :func:`~pyro_implicit.diagnose` of the refined or corrected draws or the guide.

        Discrete latent variables that were summed out one by one are summed out here, too: the
        checks are those of the continuous ones, which have gradients.

        :param num_samples: as for :func:`~pyro_implicit.diagnose`, like all arguments without a
            description here: ``loss``, ``chunk_size``, ``max_core_seconds``, ``quantities``,
            ``progress`` and ``policy``.
        :param modes: ``"known"`` takes the modes of the search of ``fit``, and searches if there
            are none. ``"search"`` searches in any case, from other draws of the prior. A tensor
            gives the modes, and None skips the check.
        :param num_transitions: transitions of short HMC. By default 20, but 0 for chains that have
            converged, because their draws do not drift.
        :param seed: the seed of all random numbers of this call. The caller's random streams do not
            advance; without a seed they are used.
        :raises TypeError: for an argument of another name.
        :raises SubsampledError: if the model subsamples its data, or had them in minibatches over
            which no passes were made, or in several processes.
        """
        options: dict[str, Any] = {
            "num_samples": num_samples,
            "loss": loss,
            "chunk_size": chunk_size,
            "max_core_seconds": max_core_seconds,
            "quantities": quantities,
            "progress": progress,
            "policy": policy,
        }
        corrected = self.correction is not None and self.draws is None and self.refined is None
        weights = [line.outcome for line in self.stages if line.name == "correct"]
        of_fit: dict[str, Any] = {
            "weighed": weights[-1] if corrected and weights else "",
            "extrapolated": self.extrapolated,
            "coarse": self.coarse,
            "given": self.unsettled,
        }
        if self.marginal is not None and self.target.sampled:
            options |= {"modes": modes, "num_transitions": num_transitions}
            found = self.marginal.diagnose(**options)
            return replace(found, **of_fit)
        if isinstance(modes, str) and modes == "known":
            known = None if callable(quantities) else self._known_modes
            modes = "search" if known is None else known
        if num_transitions is None:
            num_transitions = 0 if self._has_converged else EFFORT.num_transitions
        if self.passes is not None and num_processes() > 1:
            raise SubsampledError(
                "the budgets of diagnose differ between processes, whose minibatches a pass adds "
                "up. Cure: diagnose(model, result.posterior, x, y) with all data in one process"
            )
        draws = self.unweighted
        if draws is None:
            draws = self._posterior(num_samples or EFFORT.num_samples)
        found = diagnose(
            self.passes or self.target,
            draws,
            modes=modes,
            num_transitions=num_transitions,
            **options,
        )
        held_out = next(reversed(self.held_out.values()), None)
        return replace(found, held_out=held_out, **of_fit)

    def _same_in_all_processes(self) -> AbstractContextManager[None]:
        """Give all processes the same random numbers, if a pass adds up their minibatches."""
        if self.passes is None or num_processes() == 1:
            return nullcontext()
        return seeded(common_seed())

    @property
    def _known_modes(self) -> Tensor | None:
        """The modes of the search; None if they are of a marginal density, or of single weights."""
        is_network = isinstance(self.source[0], NetworkModel)  # judged by predictions
        if self.modes is None or self.marginal is not None or is_network:
            return None
        density = self.passes or self.target
        return self.modes if self.modes.shape[-1] == density.latent_dim else None

    @property
    def _has_converged(self) -> bool:
        found = self.refined
        return isinstance(found, Refined) and found.stopped == "converged" and not found.weights

    @in_turn
    @with_seed
    @_by_own_parameters
    def compare(
        self,
        reference: Any,
        *,
        num_samples: int | None = None,
        quantities: Quantities = "auto",
        seed: int | None = None,
        policy: ComparePolicy | None = None,
    ) -> Comparison:
        """Return :func:`~pyro_implicit.compare` of these draws with a reference, for instance NUTS.

        :param reference: an ``MCMC`` that has run, another object with ``get_samples()``, or draws
            by site.
        :param num_samples: as for :func:`~pyro_implicit.compare`, like ``quantities`` and
            ``policy``.
        :param seed: the seed of all random numbers of this call. The caller's random streams do not
            advance; without a seed they are used.
        :raises TypeError: for an argument of another name.
        """
        _, args, kwargs = self.source
        options: dict[str, Any] = {"num_samples": num_samples, "quantities": quantities}
        options |= {"policy": policy, "model_kwargs": kwargs}
        return compare(self.model, self.posterior, reference, *args, **options)

    def summary(
        self, num_samples: int | None = None, hdi_prob: float = 0.9, *, seed: int | None = None
    ) -> Any:
        """Return ArviZ's summary of each element of each site.

        **Example:**

        >>> import pyro
        >>> import pyro.distributions as dist
        >>> from pyro_implicit import fit
        >>> def model():
        ...     pyro.sample("x", dist.Normal(3.0, 1.0))
        >>> found = fit(model, "auto", seed=0, progress=False).summary()
        >>> list(found.columns[:4]), f"{found.loc['x', 'mean']:.0f}"
        (['mean', 'sd', 'hdi_5%', 'hdi_95%'], '3')

        :param num_samples: as for :meth:`to_datatree`.
        :param hdi_prob: the mass of the highest-density intervals.
        :param seed: the seed of all random numbers of this call. The caller's random streams do not
            advance; without a seed they are used.
        :returns: a data frame with mean, sd, interval, Monte Carlo standard errors (MCSE),
            effective sample sizes (ESS) and R-hat. Draws without chains count as independent, and
            have no R-hat; resampled draws (``correction``) are worth fewer than their ESS.
        :raises ImportError: without ArviZ 0.x.
        """
        data = self.to_inferencedata(num_samples, seed=seed)
        with quiet_arviz() as arviz:  # a single chain has no R-hat
            return arviz.summary(data, hdi_prob=hdi_prob, round_to="none")

    @in_turn
    @with_seed
    @_by_own_parameters
    def check_prior_predictive(
        self,
        statistics: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        num_samples: int = DECISIONS.num_replicas,
        *,
        seed: int | None = None,
    ) -> PredictiveCheck:
        """Compare the observed data with data that are drawn from the prior.

        The prior is wrong if it makes the observed data impossible, or if most of its data are
        absurd. It need not be calibrated: a wide prior is no fault.

        :param statistics: as for :meth:`check_posterior_predictive`, like the other arguments and
            the errors.
        :raises ValueError: also for a flat prior, which has no draws; but not for changed data, or
            without draws of the posterior.
        """
        refuse_counts(DECISIONS.num_groups, num_samples=num_samples)
        start = self._target.init_loc.expand(1, num_samples, -1)
        return predictive_check("prior", self._target, self._target.constrain(start), statistics)

    @in_turn
    @with_seed
    @_by_own_parameters
    def check_posterior_predictive(
        self,
        statistics: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        num_samples: int = DECISIONS.num_replicas,
        *,
        seed: int | None = None,
    ) -> PredictiveCheck:
        r"""Compare the observed data with data that are drawn from the posterior.

        The type of each observed site selects the check: densities for continuous data, a rootogram
        for counts, binned residuals for binary data. For all types there are test statistics, and
        the PIT-ECDF of leave-one-out predictions with a simultaneous 95 % band.

        **Example:**

        >>> import pyro
        >>> import pyro.distributions as dist
        >>> from pyro_implicit import fit
        >>> def model(y):
        ...     rate = pyro.sample("rate", dist.Gamma(1.0, 1.0))
        ...     with pyro.plate("rows", len(y)):
        ...         pyro.sample("y", dist.Poisson(rate), obs=y)
        >>> y = torch.tensor([0.0, 9.0] * 10)  # not Poisson
        >>> found = fit(model, "auto", y, seed=0, progress=False).check_posterior_predictive(seed=0)
        >>> found.sites["y"].kind, found.sites["y"].faults[0]
        ('count', 'sd: 4.62 where replicated data have 2...')

        :param statistics: functions of a site's data, ``(num_observations, *event_shape)`` in
            float64, to a number, by name. By default mean, standard deviation, minimum and maximum
            of continuous data; mean, standard deviation, share of zeros and maximum of counts; the
            share of ones of binary data.
        :param num_samples: the number of data sets, about.
        :param seed: the seed of all random numbers of this call. The caller's random streams do not
            advance; without a seed they are used.
        :returns: numbers by site, with ``plot()``; ``print`` shows a table and names faults.
        :raises ImportError: without ArviZ 0.x.
        :raises ValueError: for a result without draws, a model without observed sites, constant
            continuous data, a statistic that is no number, or data that are not finite.
        :raises SubsampledError: for a model that was fitted by minibatches.

        **References:**

        1. Gabry, Simpson, Vehtari, Betancourt and Gelman (2019), *Visualization in Bayesian
           workflow*.
        2. Säilynoja, Bürkner and Vehtari (2022), *Graphical test for discrete uniformity and its
           applications in goodness-of-fit evaluation and multiple sample comparison*.
        3. Kleiber and Zeileis (2016), *Visualizing count data regressions using rootograms*.
        """
        refuse_counts(DECISIONS.num_groups, num_samples=num_samples)
        draws = self.draws_by_chain(num_samples)
        return predictive_check("posterior", self.target, draws, statistics)

    @in_turn
    @with_seed
    @_by_own_parameters
    def sensitivity(
        self,
        prior_sites: Collection[str] | None = None,
        quantities: Function | None = None,
        *,
        seed: int | None = None,
    ) -> Sensitivity:
        r"""Compute how the posterior depends on its prior and its likelihood, by power-scaling.

        Importance weights of the same draws give posteriors in which the prior, or the likelihood,
        has an exponent near 1. A quantity that changes with both has a prior that disagrees with
        the data ("prior-data conflict"); one that changes with the prior alone has a "strong
        prior", or a weak likelihood.

        **Example:**

        >>> import pyro
        >>> import pyro.distributions as dist
        >>> from pyro_implicit import fit
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("rows", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> y = torch.tensor([9.5, 10.2, 9.1])  # far from the prior
        >>> found = fit(model, "auto", y, seed=0, progress=False).sensitivity(seed=0)
        >>> found.diagnosis
        {'mu': 'prior-data conflict'}

        :param prior_sites: the sites whose prior is scaled. By default all sites whose prior
            depends on no other site, except those in a plate of the data: the priors that a user
            chooses.
        :param quantities: a function of a dict of draws by site, ``(num_draws, *site_shape)``, to a
            tensor or a dict of tensors ``(num_draws, *shape)``, for instance predictions. By
            default all elements of all sites.
        :param seed: the seed of all random numbers of this call. The caller's random streams do not
            advance; without a seed they are used.
        :returns: sensitivities, diagnosis, and curves with the k-hat of their weights.
        :raises ImportError: without ArviZ 0.x.
        :raises ValueError: for a result without draws, an unknown site, or densities that are not
            finite.
        :raises SubsampledError: for a model that was fitted by minibatches.

        **References:**

        1. Kallioinen, Paananen, Bürkner and Vehtari (2023), *Detecting and diagnosing prior and
           likelihood sensitivity with power-scaling*.
        """
        draws = self.draws_by_chain(DECISIONS.num_draws)
        return power_scaling(self.target, draws, prior_sites, quantities)

    @in_turn
    @with_seed
    @_by_own_parameters
    def draws_by_chain(self, num_samples: int, *, seed: int | None = None) -> dict[str, Tensor]:
        """Return draws of the posterior by chain; independent draws in groups of equal size.

        :param num_samples: of all chains, about.
        :param seed: the seed of all random numbers of this call. The caller's random streams do not
            advance; without a seed they are used.
        :returns: by site, ``(num_chains, num_draws, *site_shape)``, evenly spaced along the chains.
        :raises ValueError: for a result without a guide or draws.
        """
        if self.refined is not None:
            chains = self.refined.get_samples(group_by_chain=True)
            count, length = next(iter(chains.values())).shape[:2]
            few = {n: v[:, :: max(1, count * length // num_samples)] for n, v in chains.items()}
            return self._by_chain(few)
        if self.guide is None:
            raise ValueError(
                'the result has no posterior draws. Cure: the result of fit(model, "auto", ...)'
            )
        number = DECISIONS.num_groups * max(1, num_samples // DECISIONS.num_groups)
        draws = self.sample(number, *self.source[1], model_kwargs=self.source[2])
        return {n: v.unflatten(0, (DECISIONS.num_groups, -1)) for n, v in draws.items()}

    def _by_chain(self, chains: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the values of sites whose positions were drawn to draws by chain."""
        lead = next(iter(chains.values())).shape[:2]
        draws = self._with_values({name: value.flatten(0, 1) for name, value in chains.items()})
        return {name: value.unflatten(0, lead) for name, value in draws.items()}

    @property
    def resampling_efficiency(self) -> float:
        """The share of an independent draw that a draw is worth after resampling; 1 without it."""
        if self.refined is not None or self.correction is None:
            return 1.0
        return 1 / (1 + (1 - self.correction) / self.policy.correction.oversampling)

    @in_turn
    @with_seed
    @_by_own_parameters
    def to_datatree(
        self,
        num_samples: int | None = None,
        *,
        log_likelihood: bool = False,
        posterior_predictive: bool = False,
        prior: int | None = None,
        num_chains: int | None = 4,
        coords: Mapping[str, Any] | None = None,
        dims: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> Any:
        """Draws of the posterior as an xarray ``DataTree`` in ArviZ's layout.

        All functions of ArviZ 1.x accept it; for ArviZ 0.x, call :meth:`to_inferencedata`.

        :param num_samples: the number of draws of :meth:`sample`, as one chain; by default all
            refined draws in ``num_chains`` long chains, or 2,000 draws without chains.
        :param log_likelihood: like the other arguments and errors, as for
            :meth:`~pyro_implicit.export.ArvizExport.to_datatree`.
        :param seed: the seed of all random numbers of this call. The caller's random streams do not
            advance; without a seed they are used.
        """
        if num_samples is None and self.refined is not None:
            chains = self._by_chain(self.refined.get_samples(group_by_chain=True))
            posterior = joined(chains, num_chains)
        else:
            number = num_samples or EFFORT.num_samples
            draws = self.sample(number, *self.source[1], model_kwargs=self.source[2])
            posterior = {name: value.unsqueeze(0) for name, value in draws.items()}
        if log_likelihood or posterior_predictive or prior is not None:
            self._refuse_changed_data()
        source = (self.model, *self.source[1:])
        groups = model_groups(posterior, source, log_likelihood, posterior_predictive, prior)
        return as_datatree(groups, coords, dims)

    def to_inferencedata(self, *args: Any, **kwargs: Any) -> Any:
        """Return draws of the posterior as an ``InferenceData`` of ArviZ 0.x.

        :param args: arguments of :meth:`to_datatree`; ``kwargs`` likewise.
        :raises ImportError: without ArviZ 0.x.
        """
        return as_inferencedata(self.to_datatree(*args, **kwargs))

    def save(self, path: str | Path) -> None:
        """Write everything except the model and its data to one file.

        The file is complete or absent. It includes the model's parameters, and those of network
        layers without priors.

        :param path: the path of the file. The guide is pickled, so its parts, such as a generator's
            class, must be importable when it is loaded.
        :raises OSError: if the file cannot be written; an existing file does not change.
        :raises ValueError: if a part of the guide cannot be pickled.
        """
        content = self.__getstate__()
        content["source"] = (None, (), {})
        content["stages"] = [replace(stage, error=None) for stage in self.stages]
        try:
            write_file(Path(path), content, KIND)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"the result has a part that cannot be pickled ({first_line(error)}). Cure: the "
                "guide's functions and classes, such as encoders of amortize=, by def or class at "
                "the top level of a module, instead of lambda or inside a function"
            ) from error

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Callable[..., Any],
        *args: Any,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Fit:
        """Load a file of :meth:`save`. Only load files from sources you trust: unpickling can run
        arbitrary code.

        The learnt parameters are put into the modules that model and guide are, hold or use by
        name, also those of ``pyro.module``, or into Pyro's store. Tensors without a place there,
        and the guide, are on the CPU.

        :param path: the path of the file.
        :param model: the fitted model, with its ``args`` and ``kwargs``. Without these the result
            can be sampled, but methods that run the model raise an error. A result of
            :meth:`update` has its prior in the file.
        :param model_kwargs: keyword arguments of the model of any name.
        :raises ValueError: for a damaged file, a file that is no result of ``fit`` or has another
            version's format, or a model with other latent variables or parameter shapes.
        :warns UserWarning: for a module of ``pyro.module`` that is not found.
        """
        content = read_file(Path(path), "cpu", KIND)
        if content.get("prior") is not None:
            model = content["prior"](model)
        result = cls(**{**content, "source": (model, args, {**kwargs, **(model_kwargs or {})})})
        result._attach()
        if result._misses_data() is None and not result.minibatches:
            refuse_unfit_guide(result.model, result.guide, *result.source[1:])
        put_back(result.parameters, model, result.guide)
        warn_of_lost_modules(result.parameters, model, result.guide)
        return result

    def _misses_data(self) -> TypeError | None:
        model, args, kwargs = self.source
        try:
            inspect.signature(model).bind(*args, **kwargs)
        except TypeError as error:
            return error
        except ValueError:  # a function without a signature
            pass
        return None

    def _of_all_data(self) -> tuple[tuple, dict[str, Any]]:
        if self.minibatches:
            raise SubsampledError(
                "the model was fitted by minibatches, but this function needs all data. Cure: "
                "diagnose(model, result.posterior, x, y) with all data, if they fit in memory; for "
                "networks, pyro_implicit.nn.evaluate on held-out rows"
            )
        missing = self._misses_data()
        if missing is not None:
            raise TypeError(
                f"the model cannot run with the arguments that this result has ({missing}). Cure: "
                "give Fit.load the model's data: Fit.load(path, model, x, y)"
            ) from missing
        return self.source[1:]

    def _corrected(self, num_samples: int) -> dict[str, Tensor]:
        if not has_exact_density(self.guide):
            raise ValueError(
                "corrected=True needs a guide with an exact density, an AutoMixture or an "
                f"injective AutoImplicit, but got {type(self.guide).__name__}. Cure: refine=True"
            )
        policy = self.policy.correction
        efficiency = self.correction or policy.least_efficiency
        return corrected_draws(
            self.guide, self.target, num_samples, efficiency, policy, self.symmetries
        )

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Time a stage and add its line to the result.

        **Example:**

        >>> result = Fit()
        >>> with result.stage("search") as line:
        ...     line.outcome = "1 mode"
        >>> result.stages[0].name, result.stages[0].outcome
        ('search', '1 mode')

        :param name: the name of the stage.
        """
        with new_stage(name) as line:
            self.stages.append(line)
            yield line

    @contextmanager
    def attempt(self, name: str) -> Iterator[Stage]:
        """As :meth:`stage`, for a stage that may fail: the line gets the reason.

        :param name: the name of the stage.
        """
        with self.stage(name) as line:
            try:
                yield line
            except Exception as error:  # any error of the model
                line.error = error
                line.outcome = f"failed: {first_line(error)}"

    def _blocks(self) -> Iterator[str | Table]:
        rows = [(stage.name, f"{stage.seconds:.1f}", stage.outcome) for stage in self.stages]
        head = ("stage", "seconds", "outcome")
        yield Table([head, *rows], header=True, align="lrl", widths=(20, 7))
        if self.parameters:
            values = {name: one.constrained for name, one in self.parameters.items()}
            yield f"learnt parameters: {describe(values)}"
        for name in self.supports:
            yield (
                f"the support of '{name}' depends on others: guide and chains have its position "
                f"'{name}_base', sample() and posterior also its value"
            )
        if symmetries := getattr(self.refined, "symmetries", str(self.symmetries or "")):
            yield f"symmetries: {symmetries}; each draw was moved by random ones"
        target: Target | None = vars(self).get("_target")
        if target is not None and target.summed_out:
            names = first_few(sorted(target.summed_out, key=lambda name: (len(name), name)))
            yield f"summed out: {names}; pyro.infer.infer_discrete draws them given the draws"
        if self.interrupted:
            yield (
                "interrupted by Ctrl-C: the best guide and draws so far; with checkpoint= the same "
                "call goes on"
            )
