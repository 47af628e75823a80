# SPDX-License-Identifier: Apache-2.0
"""The stages of ``fit``, in their order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGuide, AutoNormal, init_to_value

from pyro_implicit.density.latent_density import LatentDensity
from pyro_implicit.density.modes import Modes, find_modes
from pyro_implicit.diagnostics import diagnose
from pyro_implicit.fitting.candidates import (
    Candidate,
    choose,
    exact_guide,
    frame_of_draws,
    semi_implicit_guide,
    set_weights,
    weigh,
)
from pyro_implicit.fitting.losses import default_loss
from pyro_implicit.fitting.parameters import describe, model_parameters, with_fixed_parameters
from pyro_implicit.fitting.result import Fit, reason
from pyro_implicit.fitting.training import Schedule, train
from pyro_implicit.guides import AutoImplicit, AutoMixture
from pyro_implicit.guides.names import forget, own_names
from pyro_implicit.infer import ImplicitELBO, InjectiveELBO
from pyro_implicit.mcmc import refine

__all__ = ["Stages"]

NEAR_ENOUGH = 0.01  # nats
FOLDED = 0.5  # nats: two folds are log 2
ROUGH_STEPS, ROUGH_PARTICLES = 1000, 8


class Stages:
    """What :func:`~pyro_implicit.fitting.fit` does, one method for each stage.

    Each leaves its line in ``result.stages``, and candidates in ``candidates``, the last resort
    first.

    :param model: with its ``args`` and ``kwargs``.
    :param num_steps: of a training, at most.
    :param lr: learning rate.
    :param num_particles: of the losses.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        num_steps: int,
        lr: float,
        num_particles: int,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.num_steps, self.lr, self.num_particles = num_steps, lr, num_particles
        self.files: dict[str, Any] = {"progress": False}
        """Arguments of :func:`~pyro_implicit.fitting.train`: checkpoint and progress."""
        self.result = Fit()
        self.candidates: list[Candidate] = []
        self.guides: list[AutoGuide] = []
        self.trained = model
        """The model, of fixed parameters once they are learnt."""

    @contextmanager
    def leaving_no_names(self) -> Iterator[None]:
        """Take the guides made in here out of Pyro's parameter store at the end."""
        try:
            yield
        finally:
            for guide in self.guides:
                forget(guide)

    def train(self, name: str, guide: Any, loss: Trace_ELBO, share: float = 1.0) -> list[float]:
        """One training with the files and the settings of all."""
        schedule = Schedule(num_steps=math.ceil(share * self.num_steps), lr=self.lr)
        return train(
            self.trained,
            guide,
            loss,
            *self.args,
            schedule=schedule,
            name=name,
            model_kwargs=self.kwargs,
            **self.files,
        )

    def default_loss(self, guide: Any) -> Trace_ELBO:
        """The ELBO that suits a guide of this model."""
        return default_loss(guide, self.num_particles, *self.args, model_kwargs=self.kwargs)

    def train_alone(self, name: str, guide: Any, loss: Trace_ELBO) -> Fit:
        """One guide and nothing else, with the model's parameters."""
        if name != "guide":
            self.guides.append(guide)
        with self.result.stage(name) as line:
            losses = self.train(name, guide, loss)
            line.outcome = f"{_steps(losses)} of {type(loss).__name__}"
        self.result.guide, self.result.losses, self.result.chosen = guide, losses, name
        return self.result

    def search(self, density: LatentDensity) -> Modes:
        """The Gaussians from which all begins."""
        with self.result.stage("search") as line:
            modes = find_modes(density)
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

    def train_exact(self, density: LatentDensity, modes: Modes) -> Candidate | None:
        """The Gaussians as a candidate, and what training makes of them.

        :returns: the trained one, or the Gaussians if that failed.
        """
        guide = self._exact(modes)
        start = {name: value.clone() for name, value in guide.state_dict().items()}
        with self.result.attempt("gaussian") as line:
            set_weights(density, guide)
            line.outcome = self._add(weigh("gaussian", guide, density))
        is_mixture = isinstance(guide, AutoMixture)
        with self.result.attempt("mixture" if is_mixture else "injective") as line:
            losses: list[float] = []
            notes = ""
            if isinstance(guide, AutoMixture):
                for index, part in enumerate(guide.components):
                    more, note = self._train_part(density, part, index, len(modes.loc))
                    losses, notes = losses + more, notes + note
                set_weights(density, guide)
            else:
                losses = self.train(line.name, guide, self.default_loss(guide))
            line.outcome = self._add(weigh(line.name, guide, density, losses)) + notes
        if line.error is not None:
            guide.load_state_dict(start)
        if not self.candidates and line.error is not None:
            raise line.error
        return self.candidates[-1]

    def _train_part(
        self, density: LatentDensity, part: AutoImplicit, index: int, number: int
    ) -> tuple[list[float], str]:
        """Train a component of a mixture, which stays the Gaussian it was if that is better."""
        start = weigh("start", part, density, num_draws=1)
        # Without coverage: it is to stay in its mode.
        loss = InjectiveELBO(self.num_particles, nonfinite="skip")
        name, note = f"mode-{index}", ""
        try:
            losses = self.train(name, part, loss, share=number**-0.5)
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

    def train_mean_field(self, density: LatentDensity) -> Fit:
        """A rough guide of many latents, for :meth:`refine` to start from."""
        start = init_to_value(values=density.constrain(density.init_loc))
        guide = own_names(AutoNormal(self.model, init_loc_fn=start, init_scale=0.1))
        self.num_steps = min(self.num_steps, ROUGH_STEPS)
        loss = ImplicitELBO(min(self.num_particles, ROUGH_PARTICLES), nonfinite="skip")
        return self.train_alone("mean-field", guide, loss)

    def refine(self, when: Literal["auto", True]) -> Fit:
        """Move draws of the guide to the posterior, by many short chains.

        :param when: ``"auto"``: unless :func:`~pyro_implicit.diagnose` trusts the guide.
        """
        result, guide = self.result, self.result.guide
        options = {"progress": self.files["progress"], "model_kwargs": self.kwargs}
        if when == "auto" and result.num_modes is not None:
            with result.attempt("diagnose") as line:
                found = diagnose(self.model, guide, *self.args, model_kwargs=self.kwargs)
                line.outcome = str(found).split("Verdict: ")[-1].splitlines()[0]
                if found.verdict == "trust":
                    return result
        with result.attempt("refine") as line:
            refined = result.refined = refine(self.model, guide, *self.args, **options)
            line.outcome = f"{refined.stopped} after {refined.num_gradients} gradients"
        if line.error is not None:
            warnings.warn(f"fit did not refine its draws: {reason(line.error)}", stacklevel=3)
        return result

    def choose(self, density: LatentDensity, modes: Modes) -> Fit:
        """Make the best of the candidates the result."""
        with self.result.stage("choose") as line:
            chosen, line.outcome = choose(self.candidates, modes, density)
            chosen.restore()
        result = self.result
        result.guide, result.losses, result.chosen = chosen.guide, chosen.losses, chosen.name
        result.bounds = {one.name: one.bound for one in self.candidates}
        if {one.name for one in self.candidates} == {"gaussian"}:
            errors = "; ".join(stage.outcome for stage in result.stages if stage.error)
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
