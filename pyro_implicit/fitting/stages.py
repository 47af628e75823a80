# SPDX-License-Identifier: Apache-2.0
"""What the stages of ``fit`` share, and the first and the last of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGuide

from pyro_implicit.density.cost import estimated_seconds
from pyro_implicit.density.mode_search import Modes, find_modes
from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.target import Target
from pyro_implicit.fitting.candidates import (
    Candidate,
    Reliability,
    choose,
    exact_guide,
    frame_of_draws,
    reliability,
    semi_implicit_guide,
    set_weights,
    weigh,
)
from pyro_implicit.fitting.parameters import (
    describe,
    learnt_parameters,
    model_parameters,
    with_fixed_parameters,
)
from pyro_implicit.fitting.result import Fit, Stage
from pyro_implicit.fitting.training import (
    HeldOut,
    Schedule,
    TrainingInterrupted,
    default_loss,
    train,
)
from pyro_implicit.guides import AutoImplicit, AutoMixture
from pyro_implicit.guides.names import forget
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.infer import InjectiveELBO
from pyro_implicit.mcmc.spaces.space import conditional_noise
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.printing import showing_progress
from pyro_implicit.runtime.random_stream import seeded
from pyro_implicit.runtime.user_warnings import first_line, warn_user

__all__ = ["Stages", "TimeLimit", "is_near", "still_falls", "train_exact", "train_semi_implicit"]


LEAST_ITERATIONS, LEAST_STEPS = 10, 200
PARTICLES_ALONE = 8
NUM_TRIED = 8
MAX_SKIPPED = 0.01  # of the steps
LEAST_COMPARED = 4  # steps; a median and its noise need a few
PARAMETERS_DECAY = 1 / 6  # of their steps: they may lie far, and the guide is near


class TimeLimit:
    """Seconds of wall time that are left.

    **Example:**

    >>> TimeLimit(None).left()
    inf

    :param max_seconds: from now on; None for any number.
    """

    def __init__(self, max_seconds: float | None) -> None:
        self.end = math.inf if max_seconds is None else time.perf_counter() + max_seconds

    def left(self, share: float = 1.0) -> float:
        """So much of what is left, never negative."""
        return max(0.0, share * (self.end - time.perf_counter()))


class Stages:
    """What :func:`~pyro_implicit.fitting.fit` does, stage by stage.

    Each leaves its line in ``result.stages``, and candidates in ``candidates``, the last resort
    first.

    **Example:**

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model():
    ...     pyro.sample("x", dist.Normal(0.0, 1.0))
    >>> stages = Stages(model, (), {}, 100, lr=0.01, num_particles=8, limit=TimeLimit(None))
    >>> density = Target(model)
    >>> with stages.kept_apart():
    ...     modes = stages.search(density, num_iterations=100)
    ...     _ = stages.add(weigh("gaussian", stages.exact_guide(modes), density))
    ...     result = stages.choose(density, modes)
    >>> [stage.name for stage in result.stages]
    ['search', 'choose']

    :param model: with its ``args`` and ``kwargs``.
    :param num_steps: of a training, at most.
    :param lr: learning rate.
    :param num_particles: of the losses.
    :param limit: of the time for all.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        num_steps: int,
        lr: float,
        num_particles: int,
        limit: TimeLimit,
    ) -> None:
        self.limit = limit
        self.model, self.args, self.kwargs = model, args, kwargs
        self.num_steps, self.lr, self.num_particles = num_steps, lr, num_particles
        self.files: dict[str, Any] = {"progress": False, "compile": "auto"}
        """Arguments of :func:`~pyro_implicit.fitting.train`: checkpoint, progress and compile."""
        self.result = Fit(source=(model, args, kwargs))
        self.candidates: list[Candidate] = []
        self.guides: list[AutoGuide] = []
        self.batches: BatchStream | None = None
        self.held_out: HeldOut | None = None
        self.in_training: tuple[str, Any] | None = None
        self.one_by_one = False
        """Whether the model runs once for each particle."""
        self.trained = model
        """The model, of fixed parameters once they are learnt."""
        self.reliability: Reliability | None = None
        """That of the Gaussians, where it suffices."""

    def run_one_by_one(self) -> None:
        """Take few particles, as the model runs once for each."""
        self.one_by_one, self.num_particles = True, min(self.num_particles, PARTICLES_ALONE)

    @contextmanager
    def kept_apart(self) -> Iterator[None]:
        """Take the guides made in here out of Pyro's parameter store at the end, and leave in the
        result what the model learnt."""
        try:
            with showing_progress(self.files["progress"]):
                yield
            self._keep_parameters()
        finally:
            for guide in self.guides:
                forget(guide)

    def train(
        self,
        name: str,
        guide: Any,
        loss: Trace_ELBO,
        num_steps: int | None = None,
        time_share: float = 0.5,
        decay: float = Schedule.decay,
        haste: float = 1.0,
    ) -> list[float]:
        """One training with the files and the settings of all.

        :param time_share: of the time that is left.
        :param decay: of :class:`~pyro_implicit.fitting.Schedule`.
        :param haste: times the learning rate.
        """
        # The noise of minibatches hides what many epochs bring, and their number was asked for.
        schedule = Schedule(
            num_steps=num_steps or self.num_steps,
            lr=haste * self.lr,
            decay=decay,
            plateau=self.batches is None,
        )
        self.in_training = name, guide
        losses = train(
            self.trained,
            guide,
            loss,
            *self.args,
            batches=self.batches,
            held_out=self.held_out,
            schedule=schedule,
            name=name,
            max_seconds=self.limit.left(time_share),
            model_kwargs=self.kwargs,
            **self.files,
        )
        self.in_training = None
        return losses

    def default_loss(self, guide: Any) -> Trace_ELBO:
        """The ELBO that suits a guide of this model."""
        return default_loss(guide, self.num_particles, *self.args, model_kwargs=self.kwargs)

    @property
    def least_steps(self) -> int:
        """Of a training that is of use."""
        return min(LEAST_STEPS, self.num_steps)

    def steps_for(self, guide: Any, loss: Trace_ELBO, seconds: float) -> int:
        """As many as can be had in so many seconds of one core, but no fewer than the least."""
        if math.isinf(seconds):
            return self.num_steps
        steps = int(seconds / self.seconds_of_step(guide, loss))
        return max(self.least_steps, min(self.num_steps, steps))

    def seconds_of_step(self, guide: Any, loss: Trace_ELBO) -> float:
        """Of one core, by its operations, and its runs of the model if these are single."""

        def step() -> None:
            value = loss.differentiable_loss(self.trained, guide, *self.args, **self.kwargs)
            torch.autograd.grad(value, list(guide.parameters()), allow_unused=True)

        return estimated_seconds(step, num_runs=self.num_particles if self.one_by_one else 1)

    def train_alone(
        self, name: str, guide: Any, loss: Trace_ELBO, time_share: float = 1.0, **options: Any
    ) -> Fit:
        """One guide and nothing else, with the model's parameters."""
        if name != "guide":
            self.guides.append(guide)
        self.result.guide, self.result.chosen = guide, name
        with self.result.stage(name) as line:
            try:
                losses = self.train(name, guide, loss, time_share=time_share, **options)
                self._report(line, losses, loss, self._unsettled(losses, options))
            except TrainingInterrupted as interrupt:
                self._report(line, interrupt.losses, loss, "; interrupted")
                raise
        return self.result

    def _unsettled(self, losses: list[float], options: dict[str, Any]) -> str:
        """Say that a training ended too early, and what lengthens it."""
        # Chains follow a shortened training; held-out rows decide by themselves.
        if "num_steps" in options or self.held_out is not None:
            return ""
        if not still_falls(losses, self.num_steps):
            return ""
        cure = "num_steps" if self.batches is None else "epochs"
        if len(losses) < self.num_steps and math.isfinite(self.limit.end):
            cure = "max_seconds"
        return f"; not settled, as the loss was still falling: more {cure}, or a larger lr"

    def _report(self, line: Stage, losses: list[float], loss: Trace_ELBO, end: str) -> None:
        self.result.losses = losses
        if _skipped(losses) > MAX_SKIPPED * len(losses):
            warn_user(
                f"{_skipped(losses)} of {len(losses)} steps of '{line.name}' were skipped, as "
                "their loss was not finite: what they would have taught is lost. Cure: run the "
                'ELBO with nonfinite="raise", which names the term; priors or an init_loc_fn in '
                "whose range the data are possible, or a lower lr"
            )
        line.outcome = f"{_steps(losses)} of {type(loss).__name__}{end}"
        if self.held_out is not None and self.held_out.scores:
            line.outcome += f"; {self.held_out}"

    def search(self, density: Target, num_iterations: int) -> Modes:
        """The Gaussians from which all begins.

        :param num_iterations: of all rounds, about.
        """
        with self.result.stage("search") as line:
            modes = find_modes(
                density,
                max_rounds=max(2, min(16, num_iterations // 50)),
                max_iterations=max(LEAST_ITERATIONS, min(100, num_iterations)),
                max_seconds=self.limit.left(0.25),
            )
            number = self.result.num_modes = len(modes.loc)
            best = modes.elbo.max().item()
            line.outcome = f"{number} mode{'s'[: number > 1]}, best ELBO {best:.2f}"
        return modes

    def learn_parameters(self, density: Target, modes: Modes) -> bool:
        """Train the model's parameters, if there are any, with a guide that starts at the best
        Gaussian, to the plateau of the ELBO; then fix them.

        :returns: whether there are any.
        """
        parameters = model_parameters(density)
        if not parameters:
            return False
        with self.result.stage("parameters") as line:
            best = int(modes.elbo.argmax())
            guide = self.exact_guide(Modes(*(part[best : best + 1] for part in modes)))
            loss = InjectiveELBO(self.num_particles, nonfinite="skip")
            losses = self.train("parameters", guide, loss, decay=PARAMETERS_DECAY)
            line.outcome = f"{_steps(losses)}; {describe(model_parameters(density))}"
            if still_falls(losses, self.num_steps, PARAMETERS_DECAY):
                line.outcome += "; not settled"
                warn_user(
                    "the ELBO was still rising when the training of the model's parameters "
                    f"({', '.join(parameters)}) ended after num_steps={self.num_steps}. Cure: a "
                    "larger num_steps or lr, or parameters of unit scale",
                )
        self.trained = with_fixed_parameters(self.model)
        return True

    def _keep_parameters(self) -> None:
        """Those of the model, and of a guide that is no module."""
        guide, first = self.result.guide, () if self.batches is None else self.batches.probed[0]
        args, found = (*self.args, *first), self.result.parameters
        with seeded(0, torch.device("cpu")):
            if not isinstance(guide, torch.nn.Module):
                found.update(learnt_parameters(guide, *args, **self.kwargs))
            # Where the posterior is: a model may fail at draws of its prior, and at some of these.
            draws = draw(guide, NUM_TRIED, *args, **self.kwargs)
            for index in range(NUM_TRIED):
                model = poutine.condition(self.model, {n: v[index] for n, v in draws.items()})
                with suppress(*IMPOSSIBLE):
                    found.update(learnt_parameters(model, *args, **self.kwargs))
                    break

    @staticmethod
    def warn(message: str) -> None:
        """On behalf of ``fit``'s caller."""
        warn_user(message)

    def keep_the_best(self, density: Target | None, modes: Modes | None) -> Fit:
        """What there is when the user interrupts.

        :raises KeyboardInterrupt: if there is nothing yet.
        """
        if self.candidates and density is not None and modes is not None:
            if self.in_training is not None and isinstance(self.in_training[1], AutoGuide):
                with suppress(Exception):  # it is half trained: of any kind
                    self.add(weigh(*self.in_training, density))
            self.choose(density, modes)
        elif self.result.guide is None:
            raise KeyboardInterrupt
        self.result.interrupted = True
        return self.result

    def choose(self, density: Target, modes: Modes) -> Fit:
        """Make the best of the candidates the result."""
        with self.result.stage("choose") as line:
            chosen, line.outcome = choose(self.candidates, modes, density)
            chosen.restore()
        result = self.result
        result.guide, result.losses, result.chosen = chosen.guide, chosen.losses, chosen.name
        result.bounds = {one.name: one.bound for one in self.candidates}
        errors = "; ".join(stage.outcome for stage in result.stages if stage.error)
        if errors and {one.name for one in self.candidates} == {"gaussian"}:
            warn_user(
                f"fit kept the Gaussian that it started from, because no training ended ({errors})",
            )
        return result

    def exact_guide(self, modes: Modes) -> AutoImplicit | AutoMixture:
        """A guide with an exact density that starts as the Gaussian of each mode."""
        guide = exact_guide(self.model, modes, *self.args, **self.kwargs)
        self.guides.append(guide)
        return guide

    def add(self, candidate: Candidate) -> str:
        """Take a candidate in.

        :returns: what its stage's line is to say.
        """
        self.candidates.append(candidate)
        steps = f"{_steps(candidate.losses)}; " if candidate.losses else ""
        return f"{steps}bound {candidate.bound:.3f}"


def still_falls(losses: list[float], num_steps: int, decay: float = Schedule.decay) -> bool:
    """Whether the loss was falling when the learning rate began to fall.

    The last quarter of the steps at the full rate is compared with the quarter before: while the
    rate falls, the loss falls with it, settled or not. The difference of their medians must exceed
    three standard errors, a tenth of the noise of one step, and a tenth of a nat.

    **Example:**

    >>> still_falls([100.0 - step for step in range(100)], num_steps=100)
    True
    >>> still_falls([10.0] * 50 + [10.0 - 0.1 * step for step in range(50)], num_steps=100)
    False

    :param losses: of all steps.
    :param num_steps: that were planned.
    :param decay: of :class:`~pyro_implicit.fitting.Schedule`.
    """
    values = torch.tensor(losses, dtype=torch.float64)
    values = values[values.isfinite()]
    full_rate = len(values) - round(decay * num_steps)
    if full_rate <= 0:  # the time was over before: then the rate fell for half of it
        full_rate = len(values) // 2
    size = full_rate // 4
    if size < LEAST_COMPARED:
        return False
    before, last = values[full_rate - 2 * size : full_rate].split(size)
    # Of two normal values, the absolute difference has the median 0.954 sd; trends hardly count.
    noise = torch.cat([before, last]).diff().abs().median() / 0.954
    error = 1.253 * noise * math.sqrt(2 / size)  # 1.253 sd / sqrt(n), of the median of n values
    fall = before.median() - last.median()
    return bool(fall > max(0.1, 3 * error, 0.1 * noise))


def _skipped(losses: list[float]) -> int:
    return sum(math.isnan(loss) for loss in losses)


def _steps(losses: list[float]) -> str:
    skipped = _skipped(losses)
    return f"{len(losses)} steps" + (f" ({skipped} skipped)" if skipped else "")


NEAR_ENOUGH = 0.01  # nats
FOLDED = 0.5  # nats: two folds are log 2
AT_ONCE = 0.0005  # nats
MOST_SECONDS = 120.0  # of all components


def is_near(candidate: Candidate) -> bool:
    """Whether a candidate needs no other beside it."""
    return candidate.gap < NEAR_ENOUGH


def train_exact(stages: Stages, density: Target, modes: Modes, seconds: float) -> Candidate:
    """The Gaussians as a candidate, and what training makes of them.

    :param seconds: of one core that the training may take, as estimated. If not infinite, chains or
        weights follow, and there is no training where these can right the Gaussians.
    :returns: the trained one, or the Gaussians if that failed.
    """
    guide = stages.exact_guide(modes)
    start = {name: value.clone() for name, value in guide.state_dict().items()}
    with stages.result.attempt("gaussian") as line:
        set_weights(density, guide)
        line.outcome = stages.add(weigh("gaussian", guide, density))
        if stages.candidates[-1].gap < AT_ONCE:
            return stages.candidates[-1]
        if math.isfinite(seconds):
            found = reliability(guide, density)
            if found.suffices:
                stages.reliability = found
                return stages.candidates[-1]
            if len(modes.loc) == 1 and conditional_noise(density, modes.loc[0]):
                line.outcome += "; chains have a better space than a trained guide's"
                return stages.candidates[-1]
            if not _can_train_all(stages, guide):
                line.outcome += f"; {len(modes.loc)} trainings would take minutes"
                return stages.candidates[-1]
    is_mixture = isinstance(guide, AutoMixture)
    with stages.result.attempt("mixture" if is_mixture else "injective") as line:
        losses: list[float] = []
        notes = ""
        if isinstance(guide, AutoMixture):
            seconds /= len(guide.components) ** 0.5
            for index, part in enumerate(guide.components):
                more, note = _train_part(stages, density, part, index, len(modes.loc), seconds)
                losses, notes = losses + more, notes + note
            set_weights(density, guide)
        else:
            loss = stages.default_loss(guide)
            losses = stages.train(line.name, guide, loss, stages.steps_for(guide, loss, seconds))
        line.outcome = stages.add(weigh(line.name, guide, density, losses)) + notes
    if line.error is not None:
        guide.load_state_dict(start)
    if not stages.candidates and line.error is not None:
        raise line.error
    return stages.candidates[-1]


def train_semi_implicit(stages: Stages, density: Target, before: Candidate) -> None:
    """A guide of another shape, in the frame of another candidate's draws.

    :param before: that candidate.
    """
    for name in ("semi-implicit", "semi-implicit-again"):
        with stages.result.attempt(name) as line:
            frame = frame_of_draws(before.draws)
            guide = semi_implicit_guide(stages.model, frame, *stages.args, **stages.kwargs)
            stages.guides.append(guide)
            losses = stages.train(name, guide, stages.default_loss(guide))
            found = weigh(name, guide, density, losses)
            line.outcome = stages.add(found)
            # LIVI takes a generator that covers one place twice for one of more entropy.
            promised = -torch.tensor(losses[-100:]).nanmean().item() - found.bound
            if not promised < FOLDED:
                line.outcome += f", {promised:.1f} below what its loss promised: it folds"
                continue
        return


def _can_train_all(stages: Stages, guide: AutoImplicit | AutoMixture) -> bool:
    """Whether there is time for the least training of each component."""
    if not isinstance(guide, AutoMixture):
        return True
    seconds = stages.seconds_of_step(guide.components[0], _loss_of_part(stages))
    return seconds * stages.least_steps * len(guide.components) < MOST_SECONDS


def _loss_of_part(stages: Stages) -> InjectiveELBO:
    """Without coverage: a component is to stay in its mode."""
    return InjectiveELBO(stages.num_particles, nonfinite="skip")


def _train_part(
    stages: Stages,
    density: Target,
    part: AutoImplicit,
    index: int,
    number: int,
    seconds: float,
) -> tuple[list[float], str]:
    """Train a component of a mixture, which stays the Gaussian it was if that is better."""
    start = weigh("start", part, density, num_draws=1)
    loss = _loss_of_part(stages)
    name, note = f"mode-{index}", ""
    try:
        most = math.ceil(stages.num_steps * number**-0.5)
        steps = min(most, stages.steps_for(part, loss, seconds))
        losses = stages.train(name, part, loss, steps, time_share=0.5 / (number - index))
        if not weigh(name, part, density, num_draws=1).falls_short(start):
            return losses, ""
        note = "its bound fell"
    except Exception as error:  # the model's own too, of any kind
        losses, note = [], first_line(error)
    start.restore()
    return losses, f"; {name} stays a Gaussian ({note})"
