# SPDX-License-Identifier: Apache-2.0
"""The stages of ``fit``, in their order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGuide

from pyro_implicit.density.latent_density import LatentDensity
from pyro_implicit.density.modes import Modes, find_modes
from pyro_implicit.density.progress import showing_progress
from pyro_implicit.fitting.candidates import (
    Candidate,
    choose,
    exact_guide,
    frame_of_draws,
    semi_implicit_guide,
    set_weights,
    weigh,
)
from pyro_implicit.fitting.correction import reliability
from pyro_implicit.fitting.losses import default_loss
from pyro_implicit.fitting.parameters import describe, model_parameters, with_fixed_parameters
from pyro_implicit.fitting.plan import LEAST_ITERATIONS, LEAST_STEPS, TimeLimit, affordable
from pyro_implicit.fitting.result import Fit, reason
from pyro_implicit.fitting.training import Schedule, train
from pyro_implicit.guides import AutoImplicit, AutoMixture
from pyro_implicit.guides.names import forget
from pyro_implicit.infer import InjectiveELBO
from pyro_implicit.mcmc.batch_stream import BatchStream

__all__ = ["Stages"]

NEAR_ENOUGH = 0.01  # nats
FOLDED = 0.5  # nats: two folds are log 2
AT_ONCE = 0.0005  # nats
GOOD = 0.8  # effective share of the draws


class Stages:
    """What :func:`~pyro_implicit.fitting.fit` does, one method for each stage.

    Each leaves its line in ``result.stages``, and candidates in ``candidates``, the last resort
    first.

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
        self.files: dict[str, Any] = {"progress": False}
        """Arguments of :func:`~pyro_implicit.fitting.train`: checkpoint and progress."""
        self.result = Fit(source=(model, args, kwargs))
        self.candidates: list[Candidate] = []
        self.guides: list[AutoGuide] = []
        self.batches: BatchStream | None = None
        self.in_training: tuple[str, Any] | None = None
        self.trained = model
        """The model, of fixed parameters once they are learnt."""

    @contextmanager
    def leaving_no_names(self) -> Iterator[None]:
        """Take the guides made in here out of Pyro's parameter store at the end."""
        try:
            with showing_progress(self.files["progress"]):
                yield
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
    ) -> list[float]:
        """One training with the files and the settings of all.

        :param time_share: of the time that is left.
        """
        self.in_training = name, guide
        losses = train(
            self.trained,
            guide,
            loss,
            *self.args,
            batches=self.batches,
            schedule=Schedule(num_steps=num_steps or self.num_steps, lr=self.lr),
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

    def train_alone(
        self, name: str, guide: Any, loss: Trace_ELBO, time_share: float = 1.0, **options: Any
    ) -> Fit:
        """One guide and nothing else, with the model's parameters."""
        if name != "guide":
            self.guides.append(guide)
        self.result.guide, self.result.chosen = guide, name
        with self.result.stage(name) as line:
            self.result.losses = self.train(name, guide, loss, time_share=time_share, **options)
            line.outcome = f"{_steps(self.result.losses)} of {type(loss).__name__}"
        return self.result

    def search(self, density: LatentDensity, num_iterations: int) -> Modes:
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

    def learn_parameters(self, density: LatentDensity, modes: Modes) -> bool:
        """Train the model's parameters, if there are any, with a guide that starts at the best
        Gaussian, to the plateau of the ELBO; then fix them.

        :returns: whether there are any.
        """
        parameters = model_parameters(density)
        if not parameters:
            return False
        with self.result.stage("parameters") as line:
            best = int(modes.elbo.argmax())
            guide = self._exact(Modes(*(part[best : best + 1] for part in modes)))
            losses = self.train(
                "parameters", guide, InjectiveELBO(self.num_particles, nonfinite="skip")
            )
            line.outcome = f"{_steps(losses)}; {describe(model_parameters(density))}"
            if _still_falls(losses):
                line.outcome += "; not settled"
                warnings.warn(
                    "the ELBO was still rising when the training of the model's parameters "
                    f"({', '.join(parameters)}) ended after num_steps={self.num_steps}. Cure: a "
                    "larger num_steps or lr, or parameters of unit scale",
                    stacklevel=3,
                )
        self.trained = with_fixed_parameters(self.model)
        return True

    def train_exact(self, density: LatentDensity, modes: Modes, seconds: float) -> Candidate:
        """The Gaussians as a candidate, and what training makes of them.

        :param seconds: of one core that the training may take, as estimated.
        :returns: the trained one, or the Gaussians if that failed.
        """
        guide = self._exact(modes)
        start = {name: value.clone() for name, value in guide.state_dict().items()}
        with self.result.attempt("gaussian") as line:
            set_weights(density, guide)
            line.outcome = self._add(weigh("gaussian", guide, density))
            if self.candidates[-1].gap < AT_ONCE:
                return self.candidates[-1]
            # Chains or weights may follow, and weights can right this one.
            if math.isfinite(seconds) and reliability(guide, density).suffices(GOOD):
                return self.candidates[-1]
        is_mixture = isinstance(guide, AutoMixture)
        with self.result.attempt("mixture" if is_mixture else "injective") as line:
            losses: list[float] = []
            notes = ""
            if isinstance(guide, AutoMixture):
                seconds /= len(guide.components) ** 0.5
                for index, part in enumerate(guide.components):
                    more, note = self._train_part(density, part, index, len(modes.loc), seconds)
                    losses, notes = losses + more, notes + note
                set_weights(density, guide)
            else:
                loss = self.default_loss(guide)
                losses = self.train(line.name, guide, loss, self._steps_for(guide, loss, seconds))
            line.outcome = self._add(weigh(line.name, guide, density, losses)) + notes
        if line.error is not None:
            guide.load_state_dict(start)
        if not self.candidates and line.error is not None:
            raise line.error
        return self.candidates[-1]

    def _steps_for(self, guide: Any, loss: Trace_ELBO, seconds: float) -> int:
        """As many as can be had in so many seconds of one core."""
        if math.isinf(seconds):
            return self.num_steps

        def step() -> None:
            value = loss.differentiable_loss(self.trained, guide, *self.args, **self.kwargs)
            torch.autograd.grad(value, list(guide.parameters()), allow_unused=True)

        least = min(LEAST_STEPS, self.num_steps)
        return affordable(step, seconds, least, self.num_steps)

    def _train_part(
        self,
        density: LatentDensity,
        part: AutoImplicit,
        index: int,
        number: int,
        seconds: float,
    ) -> tuple[list[float], str]:
        """Train a component of a mixture, which stays the Gaussian it was if that is better."""
        start = weigh("start", part, density, num_draws=1)
        # Without coverage: it is to stay in its mode.
        loss = InjectiveELBO(self.num_particles, nonfinite="skip")
        name, note = f"mode-{index}", ""
        try:
            steps = min(
                math.ceil(self.num_steps * number**-0.5), self._steps_for(part, loss, seconds)
            )
            losses = self.train(name, part, loss, steps, time_share=0.5 / (number - index))
            if not weigh(name, part, density, num_draws=1).falls_short(start):
                return losses, ""
            note = "its bound fell"
        except Exception as error:  # the model's own too, of any kind
            losses, note = [], reason(error)
        start.restore()
        return losses, f"; {name} stays a Gaussian ({note})"

    def is_near(self, candidate: Candidate) -> bool:
        """Whether a candidate needs no other beside it."""
        return candidate.gap < NEAR_ENOUGH

    def train_semi_implicit(self, density: LatentDensity, before: Candidate) -> None:
        """A guide of another shape, in the frame of another candidate's draws.

        :param before: that candidate.
        """
        for name in ("semi-implicit", "semi-implicit-again"):
            with self.result.attempt(name) as line:
                frame = frame_of_draws(before.draws)
                guide = semi_implicit_guide(self.model, frame, *self.args, **self.kwargs)
                self.guides.append(guide)
                losses = self.train(name, guide, self.default_loss(guide))
                found = weigh(name, guide, density, losses)
                line.outcome = self._add(found)
                # LIVI takes a generator that covers one place twice for one of more entropy.
                promised = -torch.tensor(losses[-100:]).nanmean().item() - found.bound
                if not promised < FOLDED:
                    line.outcome += f", {promised:.1f} below what its loss promised: it folds"
                    continue
            return

    @staticmethod
    def warn(message: str) -> None:
        """On behalf of ``fit``'s caller."""
        warnings.warn(message, stacklevel=5)

    def keep_the_best(self, density: LatentDensity | None, modes: Modes | None) -> Fit:
        """What there is when the user interrupts.

        :raises KeyboardInterrupt: if there is nothing yet.
        """
        if self.candidates and density is not None and modes is not None:
            if self.in_training is not None and isinstance(self.in_training[1], AutoGuide):
                with suppress(Exception):  # it is half trained: of any kind
                    self._add(weigh(*self.in_training, density))
            self.choose(density, modes)
        elif self.result.guide is None:
            raise KeyboardInterrupt
        self.result.interrupted = True
        return self.result

    def choose(self, density: LatentDensity, modes: Modes) -> Fit:
        """Make the best of the candidates the result."""
        with self.result.stage("choose") as line:
            chosen, line.outcome = choose(self.candidates, modes, density)
            chosen.restore()
        result = self.result
        result.guide, result.losses, result.chosen = chosen.guide, chosen.losses, chosen.name
        result.bounds = {one.name: one.bound for one in self.candidates}
        errors = "; ".join(stage.outcome for stage in result.stages if stage.error)
        if errors and {one.name for one in self.candidates} == {"gaussian"}:
            warnings.warn(
                f"fit kept the Gaussian that it started from, because no training ended ({errors})",
                stacklevel=3,
            )
        return result

    def _exact(self, modes: Modes) -> AutoImplicit | AutoMixture:
        guide = exact_guide(self.model, modes, *self.args, **self.kwargs)
        self.guides.append(guide)
        return guide

    def _add(self, candidate: Candidate) -> str:
        self.candidates.append(candidate)
        steps = f"{_steps(candidate.losses)}; " if candidate.losses else ""
        return f"{steps}bound {candidate.bound:.3f}"


def _still_falls(losses: list[float]) -> bool:
    """Whether a tenth of a nat or more was gained while the rate was already falling."""
    values = torch.tensor(losses, dtype=torch.float64)
    size = max(1, len(values) // 10)
    middle, last = values[len(values) // 2 :][:size], values[-size:]
    error = (middle.var() + last.var()).nan_to_num().sqrt().item() / size**0.5
    return (middle.nanmean() - last.nanmean()).item() > 0.1 + 3 * error


def _steps(losses: list[float]) -> str:
    return f"{len(losses)} steps"
