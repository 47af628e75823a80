# SPDX-License-Identifier: Apache-2.0
"""What the stages of ``fit`` share, and the first and the last of them."""

from __future__ import annotations

import math
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
from pyro_implicit.fitting.candidates import Candidate, choose, exact_guide, weigh
from pyro_implicit.fitting.correction import Reliability
from pyro_implicit.fitting.held_out import HeldOut
from pyro_implicit.fitting.losses import default_loss
from pyro_implicit.fitting.parameters import (
    describe,
    learnt_parameters,
    model_parameters,
    with_fixed_parameters,
)
from pyro_implicit.fitting.plan import LEAST_ITERATIONS, LEAST_STEPS, TimeLimit
from pyro_implicit.fitting.result import Fit, Stage
from pyro_implicit.fitting.schedule import Schedule
from pyro_implicit.fitting.training import TrainingInterrupted, train
from pyro_implicit.guides import AutoImplicit, AutoMixture
from pyro_implicit.guides.names import forget
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.infer import InjectiveELBO
from pyro_implicit.runtime.minibatches import BatchStream
from pyro_implicit.runtime.printing import showing_progress
from pyro_implicit.runtime.random_stream import seeded
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = ["Stages", "still_falls"]

PARTICLES_ALONE = 8
NUM_TRIED = 8
MAX_SKIPPED = 0.01  # of the steps
LEAST_COMPARED = 4  # steps; a median and its noise need a few
PARAMETERS_DECAY = 1 / 6  # of their steps: they may lie far, and the guide is near


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
