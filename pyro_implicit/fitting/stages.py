# SPDX-License-Identifier: Apache-2.0
"""State and stages of ``fit`` up to the choice of a guide."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGuide

from pyro_implicit.density.bijections import on_one_turn
from pyro_implicit.density.checks.numerics import widen_if_rounded
from pyro_implicit.density.cost import estimated_seconds, seconds_near
from pyro_implicit.density.mode_gaps import dip
from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.modes import Modes
from pyro_implicit.density.policy import RUNS, SEARCH, SYMMETRY
from pyro_implicit.density.supports import on_fixed_supports
from pyro_implicit.density.symmetry import confirmed, find_symmetries
from pyro_implicit.density.tails import Tails, with_short_tails
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics.policy import VERDICT
from pyro_implicit.fitting.adaptive_sampling import AdaptiveSampler
from pyro_implicit.fitting.candidates import (
    Candidate,
    choose,
    exact_guide,
    exact_log_weights,
    frame_of_draws,
    mixture_weights,
    reliability,
    set_up,
    weigh,
)
from pyro_implicit.fitting.held_out import HeldOut
from pyro_implicit.fitting.parameters import (
    describe,
    first_few,
    guide_parameters,
    learnt_parameters,
    model_parameters,
    shown_names,
    with_fixed_parameters,
)
from pyro_implicit.fitting.policy import (
    DEFAULT,
    CorrectionPolicy,
    FitPolicy,
    Schedule,
    TrainingPolicy,
)
from pyro_implicit.fitting.result import Fit
from pyro_implicit.fitting.training import TrainingInterrupted, default_loss, train
from pyro_implicit.guides import AutoImplicit, AutoMixture, AutoSemiImplicit
from pyro_implicit.guides.auto_draws import forget
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.infer import InjectiveELBO
from pyro_implicit.mcmc.spaces.conditional_noise import ConditionalNoise, conditional_noise
from pyro_implicit.ops import LogWeights
from pyro_implicit.runtime.clock import NO_LIMIT, TimeLimit
from pyro_implicit.runtime.global_state import same_streams, seeded
from pyro_implicit.runtime.messages import counted, first_line, warn_user
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.progress import Callback, Stage, watching
from pyro_implicit.runtime.sites import unplated_as_events

__all__ = [
    *("NO_WEIGHTS", "Stages", "TrainingData", "still_falls", "train_exact"),
    *("train_semi_implicit", "widen_near"),
]


NO_WEIGHTS = "max_seconds leaves too little time for importance weights"


@dataclass(frozen=True)
class TrainingData:
    """Model and data of one training.

    :param model: the model of these data, with its ``args`` and ``kwargs``.
    :param batches: minibatches, whose arguments follow ``args``.
    :param held_out: rows whose score ends the training.
    """

    model: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    batches: BatchStream | None = None
    held_out: HeldOut | None = None

    @property
    def first_args(self) -> tuple:
        """The arguments of the first step."""
        return self.args if self.batches is None else (*self.args, *self.batches.probed[0])


@dataclass(repr=False, eq=False)
class Stages:
    """State of one call of :func:`~pyro_implicit.fitting.fit`.

    Each stage adds a line to ``result.stages``, and may add a candidate to ``candidates``.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> stages = Stages(model, (), {}, 100, lr=0.01, num_particles=8, limit=TimeLimit(None))
    >>> target = Target(model)
    >>> with stages.kept_apart():
    ...     modes = stages.search(target, num_iterations=100)
    ...     _ = stages.add(weigh("gaussian", target, stages.exact_guide(modes)))
    ...     result = stages.choose(target, modes)
    >>> [stage.name for stage in result.stages]
    ['search', 'choose']

    :param model: a Pyro model with its ``args`` and ``kwargs``.
    :param num_steps: the maximal number of steps of a training.
    :param lr: the learning rate.
    :param num_particles: the number of particles of the losses.
    :param limit: the time limit of the call.
    :param policy: budgets, limits and thresholds.
    :param options: arguments of :func:`~pyro_implicit.fitting.train`, such as ``checkpoint``.
    :param callbacks: observers of the call.
    :param validation: held-out rows that the user gave.
    :param teaches: whether generators learn from the chains of a network.
    """

    model: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    num_steps: int
    lr: float
    num_particles: int
    limit: TimeLimit
    policy: FitPolicy = field(default_factory=FitPolicy)
    options: dict[str, Any] = field(default_factory=lambda: {"progress": False, "compile": "auto"})
    callbacks: Iterable[Callback] = ()
    validation: Any = None
    teaches: bool = False

    # State of the call, which `begin_again` resets.
    #: The result so far.
    result: Fit = field(init=False)
    #: Weighed guides, of which `choose` takes the best.
    candidates: list[Candidate] = field(init=False, default_factory=list)
    #: Guides made by this call.
    guides: list[AutoGuide] = field(init=False, default_factory=list)
    #: The model of trainings; its parameters are fixed once they are learnt.
    trained: Callable[..., Any] = field(init=False)
    #: Minibatches of all trainings; None with all data.
    batches: BatchStream | None = field(init=False, default=None)
    #: Passes over the minibatches.
    epochs: int = field(init=False, default=0)
    #: Held-out rows that end trainings by minibatches.
    held_out: HeldOut | None = field(init=False, default=None)
    #: Name and guide of the current training.
    in_training: tuple[str, Any] | None = field(init=False, default=None)
    #: Whether the model runs once for each particle.
    one_by_one: bool = field(init=False, default=False)
    #: The noise of the priors as coordinates of the chains, if the model has any.
    noise: ConditionalNoise | None = field(init=False, default=None)
    #: Importance weights of the latest candidate, if they suffice.
    reliability: LogWeights | None = field(init=False, default=None)
    #: Seconds of the log-density by the number of draws, once they are needed.
    _seconds: Callable[[int], float] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.result = Fit(source=(self.model, self.args, self.kwargs), policy=self.policy)
        self.trained = self.model

    def begin_again(self, target: Target, limit: TimeLimit, **settings: Any) -> Stages:
        """Return the stages of a fit within this one: the same settings, and none of the state.

        :param target: the posterior of the fit.
        :param limit: its time limit.
        :param settings: further fields that differ, such as ``model``.
        """
        stages = replace(self, limit=limit, **settings)
        stages.result.target = target
        return stages

    @property
    def data(self) -> TrainingData:
        """The data of the call, with which guides are trained by default."""
        return TrainingData(self.trained, self.args, self.kwargs, self.batches, self.held_out)

    @property
    def first_batch(self) -> tuple:
        """The first minibatch; empty with all data."""
        return () if self.batches is None else self.batches.probed[0]

    @contextmanager
    def kept_apart(self) -> Iterator[None]:
        """Remove the guides of this call from Pyro's parameter store at the end, and put the
        model's learnt parameters into the result."""
        try:
            with watching(self.options["progress"], self.callbacks):
                yield
            self._keep_parameters()
        finally:
            for guide in self.guides:
                guide.made_by_fit = True  # which advice of `diagnose` suits it
                forget(guide)

    def declare_events(self, dims: dict[str, int]) -> None:
        """Declare the model's batch dimensions outside of plates by ``to_event`` in all stages.

        :param dims: their number by site.
        """
        self.model = self.trained = unplated_as_events(self.model, dims)
        self.result.unplated = dims

    def declare_supports(self, names: Collection[str]) -> None:
        """Sample latent variables with moving supports by their positions in all stages.

        :param names: see :func:`~pyro_implicit.density.supports.on_fixed_supports`.
        """
        self.model = self.trained = on_fixed_supports(self.model, names)
        self.result.supports += tuple(names)

    def declare_tails(self, tails: Mapping[str, Tails]) -> None:
        """Shorten the tails of latent variables whose priors have no variance in all stages.

        :param tails: see :func:`~pyro_implicit.density.tails.with_short_tails`.
        """
        self.model = self.trained = with_short_tails(self.model, tails)
        self.result.tails = dict(tails)

    def declare_turns(self, centres: Mapping[str, torch.Tensor | None]) -> None:
        """Keep the model's latent angles within one turn in all stages.

        :param centres: see :func:`~pyro_implicit.density.bijections.on_one_turn`.
        """
        self.model = self.trained = on_one_turn(self.model, centres)
        self.result.turns = dict(centres)

    def train(
        self,
        name: str,
        guide: Any,
        loss: Trace_ELBO,
        num_steps: int | None = None,
        time_share: float | None = None,
        decay: float | None = None,
        lr_factor: float = 1.0,
        is_enough: Callable[[], bool] | None = None,
        data: TrainingData | None = None,
    ) -> list[float]:
        """Train one guide with the options of the call.

        :param time_share: the share of the remaining time that the training may take.
        :param decay: replaces that of the schedule.
        :param lr_factor: a factor on the learning rate.
        :param is_enough: see :func:`~pyro_implicit.fitting.train`.
        :param data: replaces those of the call.
        """
        data = data or self.data
        schedule = replace(
            self.policy.schedule,
            num_steps=num_steps or self.num_steps,
            lr=lr_factor * self.lr,
            # The noise of minibatches hides slow progress, and the user sets the epochs.
            plateau=self.policy.schedule.plateau and data.batches is None,
        )
        if decay is not None:
            schedule = replace(schedule, decay=decay)
        if time_share is None:
            time_share = self.policy.budget.training_share
        self.in_training = name, guide
        losses = train(
            data.model,
            guide,
            loss,
            *data.args,
            batches=data.batches,
            held_out=data.held_out,
            schedule=schedule,
            name=name,
            max_seconds=self.limit.left(time_share),
            is_enough=is_enough,
            max_nonfinite=self.policy.training.max_nonfinite,
            model_kwargs=data.kwargs,
            **self.options,
        )
        self.in_training = None
        return losses

    def steps_for(
        self, guide: Any, loss: Trace_ELBO, seconds: float, data: TrainingData | None = None
    ) -> int:
        """Return the number of steps that a budget in seconds allows, at least ``least_steps``."""
        if math.isinf(seconds):
            return self.num_steps
        steps = int(seconds / self.seconds_of_step(guide, loss, data))
        least = min(self.policy.budget.least_steps, self.num_steps)
        return max(least, min(self.num_steps, steps))

    def seconds_of_step(
        self, guide: Any, loss: Trace_ELBO, data: TrainingData | None = None
    ) -> float:
        """Estimate the seconds of one step on one core from its operation count."""
        of = data or self.data

        def step() -> None:
            value = loss.differentiable_loss(of.model, guide, *of.first_args, **of.kwargs)
            trained = [one for one in guide.parameters() if one.requires_grad]
            torch.autograd.grad(value, trained, allow_unused=True)

        return estimated_seconds(step, num_runs=self.num_particles if self.one_by_one else 1)

    def train_alone(
        self, name: str, guide: Any, loss: Trace_ELBO, time_share: float = 1.0, **options: Any
    ) -> Fit:
        """Train one guide, together with the model's parameters, and make it the result.

        :param options: further arguments of :meth:`train`.
        """
        held_out = options.get("data", self.data).held_out
        if name != "guide":
            self.guides.append(guide)
        result = self.result
        result.guide, result.chosen = guide, name
        with result.stage(name) as line:
            try:
                result.losses = self.train(name, guide, loss, time_share=time_share, **options)
                # Chains follow a shortened training, and held-out rows end a training themselves.
                ends_early = "num_steps" in options or held_out is not None
                end = "" if ends_early else self._unsettled(result.losses)
                self._report(line, loss, end, held_out)
            except TrainingInterrupted as interrupt:
                result.losses = interrupt.losses
                self._report(line, loss, "; interrupted", held_out)
                raise
        return result

    def _falls(self, losses: list[float], decay: float) -> bool:
        return still_falls(losses, self.num_steps, decay, self.policy.training)

    def _unsettled(self, losses: list[float]) -> str:
        if not self._falls(losses, self.policy.schedule.decay):
            return ""
        more = f"more {self._what_ended(losses)}, or a larger lr"
        return f"; not settled, as the loss was still falling: {more}"

    def _what_ended(self, losses: list[float]) -> str:
        """Return the argument that ended a training."""
        if len(losses) < self.num_steps and math.isfinite(self.limit.end):
            return "max_seconds"
        return "num_steps" if self.batches is None else "epochs"

    def _report(self, line: Stage, loss: Trace_ELBO, end: str, held_out: HeldOut | None) -> None:
        losses = self.result.losses
        skipped = _skipped(losses)
        if skipped > self.policy.training.max_skipped * len(losses):
            warn_user(
                f"{skipped} of {len(losses)} steps of '{line.name}' were skipped, because their "
                "loss was not finite; the guide is not trained where that happens. Cure: run the "
                'ELBO with nonfinite="raise", which names the term; priors or an init_loc_fn in '
                "whose range the data are possible; or a lower lr"
            )
        line.outcome = f"{_steps(losses)} of {type(loss).__name__.lstrip('_')}{end}"
        if held_out is not None and held_out.scores:
            line.outcome += f"; {held_out}"

    def search(
        self,
        target: Target,
        num_iterations: int,
        num_starts: int = SEARCH.num_starts,
        all_copies: bool = False,
    ) -> Modes:
        """Search for modes, each with its Gaussian.

        :param num_iterations: the approximate number of Newton iterations in all.
        :param num_starts: the number of paths in each round.
        :param all_copies: whether to keep all modes that symmetries map to each other.
        """
        with self.result.stage("search") as line:
            symmetries = None if all_copies else find_symmetries(target, self.limit.left())
            modes = find_modes(
                target,
                num_starts,
                # A path takes about half of its maximal number of iterations.
                max_rounds=max(
                    2, min(SEARCH.max_rounds, 2 * num_iterations // SEARCH.max_iterations)
                ),
                max_iterations=max(
                    SEARCH.least_iterations, min(SEARCH.max_iterations, num_iterations)
                ),
                max_seconds=self.limit.left(SEARCH.time_share),
                symmetries=symmetries,
            )
            if symmetries:
                # A bound may cut off images of points that are far from the modes.
                near = torch.cat([modes.loc, _draws_near(modes, SYMMETRY.num_confirmed)])
                symmetries = confirmed(symmetries, target, near)
            self.result.symmetries = symmetries
            note = ""
            if len(modes.loc) > 1 and not (symmetries or all_copies):
                found, modes = len(modes.loc), joined_in_noise(target, modes, self.limit)
                note = f" ({found} in the latents)" * (found > len(modes.loc))
            number = self.result.num_modes = len(modes.loc)
            self.result.modes = modes.loc
            best = modes.elbo.max().item()
            line.outcome = f"{number} mode{'s'[: number > 1]}"
            line.outcome += f"{' up to symmetries' if symmetries else note}, best ELBO {best:.2f}"
            line.outcome += widen_near(target, modes)
        return modes

    def learn_parameters(self, target: Target, modes: Modes) -> bool:
        """Train the model's parameters, if it has any, and fix them.

        A guide that is initialised at the best Gaussian trains with them until the ELBO stops
        rising.

        :returns: whether there are parameters.
        """
        parameters = model_parameters(target)
        if not parameters:
            return False
        decay = self.policy.training.parameters_decay
        with self.result.stage("parameters") as line:
            best = int(modes.elbo.argmax())
            guide = self.exact_guide(Modes(*(part[best : best + 1] for part in modes)))
            loss = InjectiveELBO(self.num_particles, nonfinite="skip")
            losses = self.train("parameters", guide, loss, decay=decay)
            line.outcome = f"{_steps(losses)}; {describe(model_parameters(target))}"
            if self._falls(losses, decay):
                line.outcome += "; not settled"
                end = self._what_ended(losses)
                names = self.result.unsettled = first_few(shown_names(parameters))
                warn_user(
                    "the ELBO was still rising when the training of the model's parameters "
                    f"({names}) ended after {len(losses)} steps, by {end}. Cure: a "
                    f"larger {end} or lr, or parameters of unit scale"
                )
        self.trained = with_fixed_parameters(self.model)
        return True

    def _keep_parameters(self) -> None:
        """Put the parameters of the model, and of a guide that is no module, into the result."""
        guide, number = self.result.guide, RUNS.max_retries
        args, found = self.data.first_args, self.result.parameters
        with seeded(0, torch.device("cpu")):
            if not isinstance(guide, torch.nn.Module):
                found.update(guide_parameters(guide, *args, **self.kwargs))
            # A model may raise an error at draws of its prior; draws of the guide fail rarely.
            draws = draw(guide, number, *args, **self.kwargs)
            for index in range(number):
                model = poutine.condition(self.model, {n: v[index] for n, v in draws.items()})
                with suppress(*IMPOSSIBLE):
                    found.update(learnt_parameters(model, *args, **self.kwargs))
                    break

    def keep_the_best(self, target: Target | None, modes: Modes | None) -> Fit:
        """Return the best result so far after Ctrl-C.

        :raises KeyboardInterrupt: if there is none.
        """
        if self.candidates and target is not None and modes is not None:
            if self.in_training is not None and isinstance(self.in_training[1], AutoGuide):
                with suppress(Exception):  # any error of a half-trained guide
                    name, guide = self.in_training
                    self.add(weigh(name, target, guide, policy=self.policy.choice))
            self.choose(target, modes)
            self.warn_if_untrained()
        elif self.result.guide is None:
            raise KeyboardInterrupt
        self.result.interrupted = True
        return self.result

    def choose(self, target: Target, modes: Modes) -> Fit:
        """Make the best candidate the result."""
        with self.result.stage("choose") as line:
            chosen, line.outcome = choose(target, self.candidates, modes, self.policy.choice)
            chosen.restore()
        if chosen is not self.candidates[-1]:
            self.reliability = None
        result = self.result
        result.guide, result.losses, result.chosen = chosen.guide, chosen.losses, chosen.name
        result.bounds = {one.name: one.bound for one in self.candidates}
        return result

    def warn_if_untrained(self) -> Fit:
        """Warn if draws of a Gaussian are the result because trainings failed; return the result.

        Failed trainings do not affect draws of chains and reweighted draws.
        """
        result = self.result
        errors = "; ".join(stage.outcome for stage in result.stages if stage.error)
        is_corrected = result.refined is not None or result.correction
        if errors and not is_corrected and {*result.bounds} == {"gaussian"}:
            warn_user(f"fit returns its initial Gaussian, because every training failed ({errors})")
        return result

    def exact_guide(self, modes: Modes) -> AutoImplicit | AutoMixture:
        """Return :func:`exact_guide`, and note it as a guide of this call."""
        guide = exact_guide(self.model, modes, *self.data.first_args, **self.kwargs)
        self.guides.append(guide)
        return guide

    def set_weights(self, target: Target, guide: AutoImplicit | AutoMixture, modes: Modes) -> str:
        """Set the weights of a mixture, from the search alone if ``max_seconds`` is short.

        Weights of components that do not overlap are proportional to the exponentials of their
        ELBOs. Others take the density of each component at the draws of all.

        :returns: what was done, in words; empty by default.
        """
        if not isinstance(guide, AutoMixture):
            return ""
        parts = guide.get_posterior().components
        if math.isfinite(self.limit.end):
            number, part = len(parts), parts[0]
            points = target.init_loc.expand(self.policy.mixture.draws_of_each(number), -1)
            seconds = number * estimated_seconds(lambda: part.log_prob(points), times=number)
            if seconds > self.limit.left(self.policy.budget.weighing_share):
                guide.log_weights = modes.elbo.log_softmax(0)
                return "; max_seconds is too short for weights other than those by the ELBOs"
        guide.log_weights = mixture_weights(target, parts, policy=self.policy.mixture)
        return ""

    def lacks_time_to_train(
        self, target: Target, guide: Any, loss: Trace_ELBO, number: int = 1
    ) -> bool:
        """Return whether ``max_seconds`` leaves no time for a few steps of ``number`` guides."""
        if math.isinf(self.limit.end):
            return False
        budget = self.policy.budget
        seconds = self.limit.left(budget.training_share) / (number * budget.fewest_steps)
        # A step costs at least its score.
        return target.seconds(self.num_particles) > seconds or (
            self.seconds_of_step(guide, loss) > seconds
        )

    def weigh(
        self, name: str, guide: Any, target: Target, losses: list[float] | None = None
    ) -> Candidate:
        """Return a candidate by :func:`weigh`, by fewer draws if ``max_seconds`` is short."""
        policy, share = self.policy.choice, self.policy.budget.weighing_share
        seconds = self._seconds_of_weights(target, policy.num_weighed)
        if seconds > (left := self.limit.left(share)):
            number = math.floor(policy.num_weighed * left / seconds)
            policy = replace(policy, num_weighed=max(policy.least_weighed, number))
        return weigh(name, target, guide, losses, policy=policy)

    def reliability_of(
        self, guide: Any, target: Target, wide: CorrectionPolicy | None = None
    ) -> LogWeights | None:
        """Return the finding of ``reliability``; None if ``max_seconds`` is too short for it."""
        policy = self.policy.correction
        if not self.can_weigh(target, policy.num_weighed):
            return None
        return reliability(guide, target, policy, wide)

    def can_weigh(self, target: Target, number: int) -> bool:
        """Return whether ``max_seconds`` suffices to evaluate a density at ``number`` draws."""
        return self._seconds_of_weights(target, number) <= self.limit.left()

    def _seconds_of_weights(self, target: Target, number: int) -> float:
        if math.isinf(self.limit.end):
            return 0.0
        if self._seconds is None:
            self._seconds = seconds_near(target.log_prob, target.init_loc, self.one_by_one)
        return self._seconds(number)

    def add(self, candidate: Candidate) -> str:
        """Add a candidate, and return the outcome of its stage."""
        self.candidates.append(candidate)
        steps = f"{_steps(candidate.losses)}; " if candidate.losses else ""
        return f"{steps}bound {candidate.bound:.3f}"


def widen_near(target: Target, modes: Modes) -> str:
    """Call ``widen_if_rounded`` with draws of the best Gaussian; return its note after "; "."""
    note = widen_if_rounded(target, partial(_draws_near, modes))
    return f"; {note}" if note else ""


def _draws_near(modes: Modes, number: int) -> torch.Tensor:
    """Return draws of the best Gaussian, the same in each call."""
    loc, factor = modes.loc[0], modes.scale_tril[0]
    with same_streams(loc.device):
        return loc + torch.randn(number, len(loc)).to(loc) @ factor.mT


def still_falls(
    losses: list[float],
    num_steps: int,
    decay: float = Schedule.decay,
    policy: TrainingPolicy = DEFAULT.training,
) -> bool:
    """Return whether the loss was falling when the learning rate began to fall.

    Compares the last quarter of the steps at the full rate with the quarter before; later steps say
    nothing, because the loss falls with the rate. The difference of the medians must exceed three
    standard errors, a tenth of the standard deviation of one step, and a tenth of a nat.

    **Example:**

    >>> still_falls([100.0 - step for step in range(100)], num_steps=100)
    True
    >>> still_falls([10.0] * 50 + [10.0 - 0.1 * step for step in range(50)], num_steps=100)
    False

    :param losses: the losses of all steps.
    :param num_steps: the planned number of steps.
    :param decay: that of :class:`~pyro_implicit.fitting.Schedule`.
    :param policy: the least fall in nats, in standard deviations and in standard errors.
    """
    values = torch.tensor(losses, dtype=torch.float64)
    values = values[values.isfinite()]
    full_rate = len(values) - round(decay * num_steps)
    if full_rate <= 0:  # a time limit ended the training: the rate fell in its second half
        full_rate = len(values) // 2
    size = full_rate // 4
    if size < 2:
        return False
    before, last = values[full_rate - 2 * size : full_rate].split(size)
    # The absolute difference of two normal values has the median 0.954 sd; trends hardly matter.
    noise = torch.cat([before, last]).diff().abs().median() / 0.954
    error = 1.253 * noise * math.sqrt(2 / size)  # 1.253 sd / sqrt(n): error of a median
    fall = before.median() - last.median()
    least = policy.least_fall
    return bool(fall > max(least, policy.fall_errors * error, least * noise))


def _skipped(losses: list[float]) -> int:
    return sum(math.isnan(loss) for loss in losses)


def _steps(losses: list[float]) -> str:
    skipped = _skipped(losses)
    return counted(len(losses), "step") + (f" ({skipped} skipped)" if skipped else "")


def train_exact(stages: Stages, target: Target, modes: Modes, seconds: float) -> Candidate:
    """Add the Gaussians of the modes as a candidate, then train them and add the result.

    :param seconds: the budget of the training. If it is finite, chains follow, and nothing is
        trained if importance weights suffice, or if chains have better coordinates than the guide's
        or cost less than its training.
    :returns: the trained guide, or the Gaussians if training failed.
    """
    guide = stages.exact_guide(modes)
    start = {name: value.clone() for name, value in guide.state_dict().items()}
    with stages.result.attempt("gaussian") as line:
        notes = stages.set_weights(target, guide, modes)
        gaussian = stages.weigh("gaussian", guide, target)
        line.outcome = stages.add(gaussian) + notes
        has_copies = len(modes.loc) > 1 and bool(stages.result.symmetries)  # chains weigh them
        found, correction = None, stages.policy.correction
        if math.isfinite(seconds) and not has_copies:
            found = stages.reliability_of(guide, target)
            if found is not None and correction.accepts(found):
                stages.reliability = found
                return gaussian
            if correction.num_rounds and len(modes.loc) == 1:
                told, stages.reliability = _adapt(stages, target, modes)
                line.outcome += told
                if stages.reliability is not None:
                    return stages.candidates[-1]
        if gaussian.gap < stages.policy.schedule.max_gap:
            return gaussian
        if math.isfinite(seconds):
            reason = _why_untrained(stages, target, modes, gaussian, found)
            if reason is not None:
                line.outcome += reason
                return gaussian
    name = "mixture" if isinstance(guide, AutoMixture) else "injective"
    with stages.result.attempt(name) as line:
        parts = list(guide.components) if isinstance(guide, AutoMixture) else [guide]
        loss = _loss_of(stages, guide)
        if stages.lacks_time_to_train(target, parts[0], loss, len(parts)):
            line.outcome = "skipped: max_seconds is too short for a training"
            return gaussian
        losses: list[float] = []
        notes = ""
        if isinstance(guide, AutoMixture):
            seconds /= len(parts) ** 0.5
            for index, part in enumerate(parts):
                more, note = _train_part(stages, target, part, index, len(parts), seconds)
                losses, notes = losses + more, notes + note
            notes += stages.set_weights(target, guide, modes)
        else:
            steps = stages.steps_for(guide, loss, seconds)
            is_enough = _judge(stages, target, guide) if math.isfinite(seconds) else None
            losses = stages.train(name, guide, loss, steps, is_enough=is_enough)
        line.outcome = stages.add(stages.weigh(name, guide, target, losses)) + notes
    if line.error is not None:
        guide.load_state_dict(start)
        stages.reliability = None
        if not stages.candidates:
            raise line.error
    return stages.candidates[-1]


def _adapt(stages: Stages, target: Target, modes: Modes) -> tuple[str, LogWeights | None]:
    """Add a mixture by adaptive sampling as a candidate, if it is better than the Gaussian.

    :param modes: the first proposal.
    :returns: what was done, in words, and the weights of the mixture if they suffice.
    """
    policy, number = stages.policy.correction, 0
    seconds = stages.limit.left(stages.policy.budget.training_share)
    limit = TimeLimit(min(policy.adaptive_seconds, seconds))

    def has_time() -> bool:
        return not limit.is_over() and stages.can_weigh(target, policy.num_adapted)

    if not has_time():
        return "", None
    sampler = AdaptiveSampler(target, modes, policy)
    first = found = sampler.draw()
    accepted = None
    while accepted is None and number < policy.num_rounds and has_time() and sampler.adapt():
        found, number = sampler.draw(), number + 1
        if policy.accepts(found):  # the proposals were fitted to these draws: judge by fresh ones
            fresh = stages.reliability_of(sampler.guide(), target, policy)
            accepted = fresh if fresh is not None and policy.accepts(fresh) else None
    told = f"; after {counted(number, 'adaptive round')} "
    if accepted is None and found.efficiency <= first.efficiency:
        return f"{told}no better", None
    guide = sampler.guide()
    stages.guides.append(guide)
    told += stages.add(stages.weigh("adaptive", guide, target))
    return f"{told}, {found if accepted is None else accepted}", accepted


def _why_untrained(
    stages: Stages, target: Target, modes: Modes, gaussian: Candidate, found: LogWeights | None
) -> str | None:
    """Say why chains replace the training of a guide; None if they do not.

    Keeps the noise of the priors if chains use it.

    :param found: the importance weights of the Gaussian.
    """
    if not math.isfinite(gaussian.bound):  # data bound a latent variable, or it is a spike
        return ""
    several = len(modes.loc) > 1 and not stages.result.symmetries
    if (several or len(modes.loc) == 1) and len(target.shapes) > 1:
        # A prior may depend on another site.
        stages.noise = conditional_noise(target, modes.loc[0], limit=stages.limit)
    if stages.noise is not None:
        how = "try" if several else "use"
        return f"; chains {how} the noise of the priors instead of a trained guide"
    if len(modes.loc) > 1:
        weighs = "chains weigh" if stages.result.symmetries else "annealing weighs"
        return f"; {weighs} the modes, and no guide is trained"
    efficiency = 0.0 if found is None else found.efficiency
    if _chains_are_cheaper(stages, target, gaussian.guide, efficiency):
        return "; chains cost less than the training of a guide"
    return None


def joined_in_noise(target: Target, modes: Modes, limit: TimeLimit = NO_LIMIT) -> Modes:
    """Leave out modes that are no modes in the noise of the priors, such as a funnel's neck.

    :param modes: separate modes in the latents, best first.
    :param limit: ends the analysis of the priors.
    """
    if len(target.shapes) == 1:
        return modes
    try:
        space = conditional_noise(target, modes.loc[0], limit=limit)
        if space is None:
            return modes
        points, kept = space.to_points(modes.loc), [0]
        for row in range(1, len(points)):
            dips = dip(lambda some: space.plain_score(some)[0], points[kept], points[row])
            if dips.min() > SEARCH.min_dip:
                kept.append(row)
    except Exception:  # of the model
        return modes
    return Modes(*(part[kept] for part in modes))


def _chains_are_cheaper(stages: Stages, target: Target, guide: Any, efficiency: float) -> bool:
    """Return whether chains from a Gaussian cost less than a training.

    :param efficiency: the effective sample size of its importance weights, as a share. A guide that
        is near the posterior needs few steps.
    """
    policy, budget = stages.policy.training, stages.policy.budget
    if efficiency >= policy.near_efficiency or stages.one_by_one:
        return False
    step = stages.seconds_of_step(guide, _loss_of(stages, guide))
    gradient = seconds_near(target.score, target.init_loc, is_recorded=True)(budget.usual_chains)
    return budget.usual_gradients * gradient < budget.least_steps * step


def _judge(stages: Stages, target: Target, guide: Any) -> Callable[[], bool]:
    # Two independent sets of draws must agree; the second one also decides the correction.
    policy, num_draws = stages.policy.correction, stages.policy.choice.num_weighed
    share = stages.policy.budget.weighing_share

    def is_enough() -> bool:
        if stages._seconds_of_weights(target, num_draws) > stages.limit.left(share):
            return False
        if not policy.are_even(exact_log_weights(target, guide, num_draws)[1]):
            return False
        found = stages.reliability_of(guide, target)
        stages.reliability = found if found is not None and policy.are_even(found) else None
        return stages.reliability is not None

    return is_enough


def train_semi_implicit(stages: Stages, target: Target, before: Candidate) -> None:
    """Train a semi-implicit guide and add it as a candidate.

    :param before: the candidate whose draws give the frame.
    """
    policy = stages.policy.choice
    for name in ("semi-implicit", "semi-implicit-again"):
        with stages.result.attempt(name) as line:
            frame = frame_of_draws(before.draws)
            guide = AutoSemiImplicit(stages.model, frame=frame)
            guide = set_up(guide, stages.args, stages.kwargs)
            stages.guides.append(guide)
            losses = stages.train(name, guide, default_loss(guide, stages.num_particles))
            found = weigh(name, target, guide, losses, policy=policy)
            line.outcome = stages.add(found)
            # LIVI counts the entropy of a generator that covers one place twice as larger.
            last = losses[-stages.policy.schedule.window :]
            promised = -torch.tensor(last).nanmean().item() - found.bound
            if not promised < VERDICT.gap:  # two folds are log 2
                line.outcome += f", {promised:.1f} below its loss: the generator folds"
                continue
        return


def _loss_of_part(stages: Stages) -> InjectiveELBO:
    return InjectiveELBO(stages.num_particles, nonfinite="skip")  # coverage would leave the mode


def _loss_of(stages: Stages, guide: Any) -> Trace_ELBO:
    if isinstance(guide, AutoMixture):
        return _loss_of_part(stages)
    return default_loss(guide, stages.num_particles, *stages.args, model_kwargs=stages.kwargs)


def _train_part(
    stages: Stages, target: Target, part: AutoImplicit, index: int, number: int, seconds: float
) -> tuple[list[float], str]:
    """Train a component of a mixture; restore its Gaussian if the bound fell."""
    choice, share = stages.policy.choice, stages.policy.budget.training_share
    start = weigh("start", target, part, num_samples=1, policy=choice)
    loss = _loss_of_part(stages)
    name, note = f"mode-{index}", ""
    try:
        most = math.ceil(stages.num_steps * number**-0.5)
        steps = min(most, stages.steps_for(part, loss, seconds))
        losses = stages.train(name, part, loss, steps, time_share=share / (number - index))
        trained = weigh(name, target, part, num_samples=1, policy=choice)
        if not trained.falls_short(start, choice.tie):
            return losses, ""
        note = "its bound fell"
    except Exception as error:  # any error of the model
        losses, note = [], first_line(error)
    start.restore()
    return losses, f"; {name} stays a Gaussian ({note})"
