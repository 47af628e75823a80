# SPDX-License-Identifier: Apache-2.0
"""The result of :func:`~pyro_implicit.mcmc.refine`: draws, and how they came about."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from pyro.infer.mcmc.util import diagnostics, print_summary
from torch import Tensor

from pyro_implicit.density.checks.numerics import beyond_resolution
from pyro_implicit.density.labels import coordinate_labels
from pyro_implicit.density.mirrors import Images, with_images
from pyro_implicit.density.model import IMPOSSIBLE
from pyro_implicit.density.symmetry import Symmetries
from pyro_implicit.density.target import Target
from pyro_implicit.export import ArvizExport
from pyro_implicit.guides.sampler import StoredDraws
from pyro_implicit.mcmc.chains import WindowedChains
from pyro_implicit.mcmc.draws import DrawStore
from pyro_implicit.mcmc.driver import Chains
from pyro_implicit.mcmc.kernels import KERNELS
from pyro_implicit.mcmc.kernels.step_choice import StepChoice
from pyro_implicit.mcmc.minibatch_chains import MinibatchChains
from pyro_implicit.mcmc.policy import StoppingPolicy
from pyro_implicit.mcmc.spaces.conditional_reparam import ConditionalReparam
from pyro_implicit.mcmc.spaces.space import Space
from pyro_implicit.mcmc.stopping import Drift, slowest
from pyro_implicit.mcmc.tempering import Annealed, ModeWeights
from pyro_implicit.runtime.messages import Printed, Table, warn_user
from pyro_implicit.runtime.sites import constrained_parts

__all__ = ["Refined", "SitesOf", "collect", "collect_annealed", "collect_minibatches"]

KEPT = (
    "Chains that start in separate modes stay there: each mode keeps the weight that the guide "
    "gave it."
)


@dataclass(frozen=True, eq=False)
class SitesOf:
    """From unconstrained vectors to values by site, without the model.

    :param shapes: shapes of the sites' parts of a vector.
    :param transforms: maps from these parts to values.
    :param like: a tensor of the values' dtype and device.
    """

    shapes: dict[str, torch.Size]
    transforms: dict[str, Any]
    like: Tensor

    @staticmethod
    def of(target: Target) -> SitesOf:
        """The maps of a target."""
        return SitesOf(target.shapes, target.transforms, target.init_loc.new_empty(0))

    def __call__(self, latent: Tensor) -> dict[str, Tensor]:
        return constrained_parts(latent.to(self.like), self.shapes, self.transforms)


@dataclass(frozen=True, eq=False, repr=False)
class Refined(Printed, ArvizExport):
    """Draws of many chains. ``print`` shows how they came about, ``summary()`` their moments.

    With all data, the draws are those after the warm-up, without the first third, thinned. With
    minibatches they are spaced evenly after the warm-up.

    :ivar stopped: Why the chains stopped: ``"converged"``, ``"steady"``, ``"max_gradients"``,
        ``"max_seconds"``, ``"max_epochs"``, ``"callback"``, or ``"interrupted"`` by Ctrl-C.
        ``"steady"`` means that
        ``quantities`` do not drift while the chains still depend on their starts (R-hat from 1.1
        to 2): right as far as the guide's weights of places are between which no chain passes.
    :ivar kernel: ``"hmc"``, ``"slice"``, ``"mams"``, ``"mclmc"`` or ``"sghmc"``.
    :ivar store: The unconstrained draws, in memory or on disk.
    :ivar constrain: The map from unconstrained draws to values by site.
    :ivar num_chains: Number of chains.
    :ivar frame: ``"diagonal"``, ``"low-rank"`` or ``"full"``; ``"none"`` for ``"mclmc"``
        and ``"mams"``.
    :ivar step_size: Step size of the kernel in the frame; the median over chains for ``"mclmc"``
        and ``"mams"``.
    :ivar num_gradients: Gradients that each chain took, warm-up and probes included.
    :ivar warmup_gradients: Gradients of the warm-up.
    :ivar seconds: Wall time.
    :ivar replaced: Chains that restarted from other chains, because their start had no finite
        log-density, because they stood still for a whole window of the warm-up, because the
        log-density of a few chains stayed far below that of all others, or because they left the
        finite numbers. With minibatches there should be none after the warm-up.
    :ivar space: ``"latent"``; ``"noise"`` if the chains walked on a guide's noise;
        ``"conditional"`` if they walked on noise given parents and data
        (:class:`~pyro_implicit.mcmc.ConditionalReparam`).
    :ivar space_note: Why that space was chosen, if others were possible.
    :ivar moves: How discrete latent variables moved, if the chains sampled any.
    :ivar reparams: The maps of the conditional space, by site.
    :ivar symmetries: Groups that leave the posterior unchanged, in words; each draw was moved by a
        random member. ``drift`` is that of units in order.
    :ivar drift: Bounds on the errors, from the last input of the stopping rule and from R-hat
        (:func:`~pyro_implicit.mcmc.stopping.open_errors`); None if there were too few draws.
    :ivar acceptance: Mean probability of acceptance after the warm-up; None with minibatches and
        for ``"mclmc"``.
    :ivar failed: Share of trajectories after the warm-up with an acceptance probability below 1 %,
        which others count as divergences. Above .002 there are narrow places, which may still fill.
    :ivar trajectory_length: The longest trajectory in the frame, or for ``"mclmc"`` and ``"mams"``
        the median decoherence length, or for ``"slice"`` the width of the first interval; None
        with minibatches.
    :ivar stuck: Chains whose draws are all one point: no trajectory from there was accepted.
        Their draws are wrong, and widen every standard deviation.
    :ivar unresolved: Which sites have draws nearer to a bound than the numbers of the model's
        dtype, in words; else empty.
    :ivar modes: A note on separate modes.
    :ivar images: Mirror images of the draws that are further modes, in words; else empty. If their
        weights are reliable, they are among the draws (:mod:`pyro_implicit.density.mirrors`), which
        are then resampled: a draw may belong to another chain.
    :ivar kept: The share of independent draws that these weights leave.
    :ivar lacks_images: Whether the weights are unreliable, so that the draws lack the images.
    :ivar modes_weighed: Whether annealing gave each mode its share of chains.
    :ivar weights: With ``temper=True``, the weights of modes and the evidence, with errors.
    :ivar choice: With minibatches, the step size, its active bound, and its expected errors.
    :ivar temperature: With minibatches, the temperature of velocities after the warm-up: 1, plus
        the heat of gradient noise.
    :ivar epochs: Passes over the minibatches; None with all data.
    :ivar policy: The limits of ``doubts``.
    :ivar chains: The state of chains with all data, from which :meth:`refine_more` continues.
    """

    stopped: Literal[
        "converged",
        "steady",
        "max_gradients",
        "max_seconds",
        "max_epochs",
        "callback",
        "interrupted",
    ]
    kernel: str
    store: DrawStore = field(repr=False)
    constrain: Callable[[Tensor], dict[str, Tensor]] = field(repr=False)
    num_chains: int
    frame: str
    step_size: float
    num_gradients: int
    warmup_gradients: int
    seconds: float
    replaced: int
    space: str = "latent"
    space_note: str = ""
    moves: str = ""
    reparams: dict[str, ConditionalReparam] = field(default_factory=dict)
    symmetries: str = ""
    drift: Drift | None = None
    acceptance: float | None = None
    failed: float = 0.0
    trajectory_length: float | None = None
    stuck: int = 0
    unresolved: str = ""
    modes: str = ""
    images: str = ""
    kept: float = 1.0
    lacks_images: bool = False
    modes_weighed: bool = False
    weights: ModeWeights | None = None
    choice: StepChoice | None = None
    temperature: float | None = None
    epochs: float | None = None
    policy: StoppingPolicy = field(default_factory=StoppingPolicy, repr=False)
    chains: WindowedChains | None = field(default=None, repr=False)
    more: Callable[..., Refined] | None = field(default=None, repr=False)

    def refine_more(
        self,
        max_seconds: float | None = None,
        max_gradients: int | None = None,
        progress: bool = True,
    ) -> Refined:
        """Continue the chains where they stopped, without a new warm-up.

        The chains continue with their own random streams: the draws are bit-identical to those of
        one longer run, if its budget changes neither its warm-up nor its longest trajectory. They
        stop when they have converged; chains that had converged spend the whole budget.

        :param max_seconds: further wall time.
        :param max_gradients: further gradients of each chain; by default, without a limit of time,
            as many as before.
        :param progress: whether to show a bar.
        :returns: a new result, with the last two thirds of all draws; this one does not change.
        :raises ValueError: for chains of minibatches, annealed draws, a result that was unpickled
            without its model, and chains on the noise of a guide that has changed since.
        """
        if self.more is None:
            raise ValueError(
                "these chains cannot continue: they saw minibatches, annealing made them, or the "
                "result was loaded without its model. Cure: a larger max_gradients or max_seconds; "
                "fit(...).refine_more, also after Fit.load with model and data; or "
                "refine(model, result.get_samples(), ...), which starts from these draws"
            )
        return self.more(max_seconds, max_gradients, progress)

    @property
    def num_draws(self) -> int:
        """Number of draws of each chain."""
        return len(self.store)

    @cached_property
    def samples(self) -> dict[str, Tensor]:
        """Constrained draws by site, ``(num_chains, num_draws, *site_shape)``, in memory."""
        return self.get_samples(group_by_chain=True)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "samples"}
        return kept | {"more": None}

    @torch.no_grad()
    def get_samples(
        self, num_samples: int | None = None, group_by_chain: bool = False
    ) -> dict[str, Tensor]:
        """Return constrained draws by site, as Pyro's ``MCMC`` does, in memory; see :meth:`stream`.

        :param num_samples: the number of draws, with replacement; by default all draws once.
        :param group_by_chain: whether the chains are a dimension of their own.
        :returns: ``(num_samples, *site_shape)`` or ``(num_chains, num_samples, *site_shape)``.
        """
        snapshots = torch.arange(self.num_draws)
        if num_samples is not None and group_by_chain:
            snapshots = torch.randint(self.num_draws, (num_samples,))
        shape = (self.num_chains, len(snapshots))
        index = torch.arange(self.num_chains).unsqueeze(-1) + self.num_chains * snapshots
        rows = index.flatten()
        if num_samples is not None and not group_by_chain:
            rows = rows[torch.randint(len(rows), (num_samples,))]
        latents = self.store.take(rows)
        return self.constrain(latents.unflatten(0, shape) if group_by_chain else latents)

    @torch.no_grad()
    def stream(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Yield all draws in batches, for predictions in memory that does not grow.

        :param batch_size: draws of a batch; the last batch may be smaller.
        :returns: an iterator over dicts by site, ``(batch_size, *site_shape)``. All chains of one
            snapshot come before those of the next.
        """
        total = self.num_chains * self.num_draws
        for start in range(0, total, batch_size):
            yield self.take(torch.arange(start, min(start + batch_size, total)))

    @torch.no_grad()
    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Return some draws.

        :param rows: their places in the order of :meth:`stream`, ``(num_rows,)``.
        :returns: by site, ``(num_rows, *site_shape)``.
        """
        return self.constrain(self.store.take(rows))

    @property
    def settled(self) -> bool:
        """Whether the chains stopped because nothing drifted any more, and not at a budget."""
        return self.stopped in ("converged", "steady")

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons to doubt draws of all data, for which ``diagnose`` says "check"."""
        found: list[str] = []
        if self.choice is not None:
            return ()
        if not self.settled and self.drift is None:
            how = "interrupted" if self.stopped == "interrupted" else f"stopped by {self.stopped}"
            found.append(f"the chains were {how}, before they settled")
        if self.failed > self.policy.max_end_failed:
            share = f"{self.failed:.1%} of the chains' trajectories failed"
            found.append(f"{share}: narrow places may not have filled")
        if self.unresolved:
            found.append(f"{self.unresolved}: mass beyond is lost")
        if self.lacks_images:
            found.append(f"{self.images}, and these weights are unreliable: the draws lack them")
        if self.stuck:
            found.append(f"{self.stuck} of {self.num_chains} chains never moved")
        if not KERNELS[self.kernel].exact:
            found.append(f"without Metropolis steps, {self.kernel}'s step size biases variances")
        return tuple(found)

    def as_guide(self) -> StoredDraws:
        """Return the draws as a guide, for ``Predictive``."""
        drift = self.drift
        return StoredDraws(
            self.get_samples(),
            self.settled,
            self.modes_weighed,
            self.doubts,
            drift=drift,
            num_independent=math.inf if drift is None else self.kept * drift.num_effective,
            num_chains=self.num_chains,
        )

    def diagnostics(self) -> dict[str, Any]:
        """Return effective sample size and split R-hat by site, as Pyro's ``MCMC`` does.

        R-hat of many short chains exceeds that of few long ones with as many draws in all: 1.05
        means ten effective draws of each chain.
        """
        return diagnostics(self.samples)

    def summary(self, prob: float = 0.9) -> None:
        """Print means, standard deviations, intervals, effective sample sizes and R-hats.

        :param prob: mass of the intervals.
        """
        print_summary(self.samples, prob=prob)

    def moving(self) -> dict[str, Tensor]:
        """Return constrained draws by site of the chains that moved, chain after chain."""
        is_stuck = torch.stack(
            [(v == v[:, :1]).flatten(1).all(-1) for v in self.samples.values()]
        ).all(0)
        return {name: value[~is_stuck].flatten(0, 1) for name, value in self.samples.items()}

    def _blocks(self) -> Iterator[str | Table]:
        rows = {
            "stopped": self.stopped,
            "draws": f"{self.num_chains} chains x {self.num_draws}",
            "gradients of each chain": f"{self.num_gradients} ({self.warmup_gradients} to warm up)",
        }
        if self.epochs is None:
            rows["seconds"] = f"{self.seconds:.1f}"
        else:
            rows["epochs, seconds"] = f"{self.epochs:.3g}, {self.seconds:.1f}"
        if self.acceptance is not None:
            rows["acceptance"] = f"{self.acceptance:.2f}, failed {self.failed:.2%}"
        if self.trajectory_length is not None:
            lengths = f"{self.step_size:.3g}, {self.trajectory_length:.3g}"
            rows["step, longest trajectory"] = lengths
        if self.choice is None:
            rows["frame"] = f"{self.frame}, of the {self.space}"
        else:
            rows |= {"kernel, frame": f"{self.kernel}, {self.frame}", **self.choice.rows()}
        if self.temperature is not None:
            rows["temperature of velocities"] = f"{self.temperature:.3f}"
        if self.drift is not None:
            rows["errors, at most"] = str(self.drift)
        if self.moves:
            rows["discrete latents"] = self.moves
        if self.symmetries:
            rows["symmetries"] = self.symmetries
        if self.space_note:
            rows["why there"] = self.space_note
        if self.replaced:
            rows["chains replaced"] = str(self.replaced)
        if self.stuck:
            rows["chains that never moved"] = str(self.stuck)
        yield Table(list(rows.items()), align="l")
        if self.modes:
            yield self.modes


def collect(space: Space, chains: WindowedChains, has_images: bool = True) -> Refined:
    """Return the result of chains with all data that walked in a space.

    :param has_images: whether mirror images of the draws may be further modes.
    """
    space.check(chains.points)
    latents = chains.history.draws().transpose(0, 1).contiguous()
    drift = _stated(space.target, chains, latents)
    is_stuck = (latents == latents[:, :1]).flatten(1).all(-1) & chains.has_draws
    images: Images | None = None
    if has_images and not is_stuck.all():
        with suppress(*IMPOSSIBLE):  # of the model at an image: the draws stay
            latents, images = _add_images(space.target, latents, is_stuck, chains.symmetries)
    if chains.symmetries:
        latents = _shuffled(latents, chains.symmetries)
    if stuck := int(is_stuck.sum()):
        warn_user(
            f"{stuck} of {len(latents)} chains never moved after the warm-up, so their draws are "
            "wrong: they began where every trajectory is rejected, far out or in a narrow place. "
            "Cure: a better guide, more max_gradients, or leave out those chains of "
            "get_samples(group_by_chain=True) whose draws are all the same"
        )
    store = DrawStore()
    for snapshot in latents.unbind(1):
        store.append(snapshot)
    return Refined(
        **_common(space.target, chains, store),
        step_size=chains.adaptation.step_size,
        space=chains.space,
        space_note=chains.space_note,
        moves=chains.moves,
        reparams=space.reparams,
        symmetries=str(chains.symmetries or ""),
        drift=drift,
        acceptance=chains.acceptance if KERNELS[chains.kernel].exact else None,
        failed=chains.failed,
        trajectory_length=chains.adaptation.trajectory_length,
        stuck=stuck,
        unresolved=_unresolved(space.target, latents.flatten(0, 1)),
        **_notes(images),
        policy=chains.policy.stopping,
    )


def _stated(target: Target, chains: WindowedChains, latents: Tensor) -> Drift | None:
    """Return the last drift, with the name of the worst latent unless chains have settled."""
    drift = chains.convergence.drift
    if drift is None:
        return None
    if chains.failed > chains.policy.stopping.max_end_failed:
        drift = drift._replace(failed=chains.failed)
    num_sampled = sum(target.shapes[name].numel() for name in target.sampled)
    continuous = latents[..., : latents.shape[-1] - num_sampled]
    is_settled = chains.stopped in ("converged", "steady")
    is_short = min(continuous.shape[:2]) < 2 or not continuous.shape[-1]
    # Copies of a symmetric posterior have no names, and of quantities only their errors are known.
    if is_settled or is_short or chains.symmetries or chains.has_quantities:
        return drift.stated()
    return drift.stated()._replace(slowest=coordinate_labels(target)[slowest(continuous)])


def _add_images(
    target: Target, latents: Tensor, is_stuck: Tensor, symmetries: Symmetries | None
) -> tuple[Tensor, Images | None]:
    """Add mirror images to the draws of chains that moved, ``(num_chains, num_draws, d)``."""
    moving = latents[~is_stuck]
    if symmetries:  # images are those of one copy
        moving = symmetries.finite().ordered(moving)
    found, images = with_images(target, moving.flatten(0, 1), symmetries)
    if images is not None and images.is_reliable:
        latents = latents.clone()
        latents[~is_stuck] = found.reshape(moving.shape)
    return latents, images


def _notes(images: Images | None) -> dict[str, Any]:
    if images is None:
        return {"modes": KEPT}
    if not images.is_reliable:
        return {"modes": KEPT, "images": str(images), "lacks_images": True}
    note = f"{KEPT} But {images}, and draws were reflected to them."
    return {"modes": note, "images": str(images), "kept": images.kept}


def collect_annealed(
    target: Target, found: Annealed, policy: StoppingPolicy, symmetries: Symmetries | None = None
) -> Refined:
    """Return the result of annealing."""
    store = DrawStore()
    for snapshot in _shuffled(found.draws, symmetries) if symmetries else found.draws:
        store.append(snapshot)
    adaptation, weights = found.walkers.adaptation, found.weights
    note, is_known, frame = "Annealing began with draws of the prior.", True, "full"
    if weights is not None:
        note, frame = f"{weights}.", "full for each mode"
        is_known = bool((weights.errors <= policy.max_weight_error).all())
    return Refined(
        stopped=found.stopped,
        kernel="hmc",
        store=store,
        constrain=SitesOf.of(target),
        num_chains=found.draws.shape[1],
        frame=frame,
        step_size=adaptation.step_size,
        num_gradients=found.num_gradients,
        warmup_gradients=found.num_gradients,
        seconds=found.seconds,
        replaced=0,
        symmetries=str(symmetries or ""),
        drift=found.drift,
        trajectory_length=adaptation.trajectory_length,
        unresolved=_unresolved(target, found.draws.flatten(0, 1)),
        modes=note[0].upper() + note[1:],
        modes_weighed=is_known,
        weights=weights,
        policy=policy,
    )


def _unresolved(target: Target, latents: Tensor) -> str:
    names = beyond_resolution(target, latents)
    if not names:
        return ""
    dtype = torch.float64 if target.is_wide else latents.dtype
    sites = ", ".join(f"'{name}'" for name in names)
    return (
        f"draws of {sites} lie nearer to a bound than {str(dtype).removeprefix('torch.')} resolves"
    )


def _shuffled(latents: Tensor, symmetries: Symmetries) -> Tensor:
    """Move each draw by a random group member, from a fixed seed that ``refine_more`` repeats."""
    return symmetries.shuffled(latents, torch.Generator("cpu").manual_seed(0))


def collect_minibatches(
    target: Target, chains: MinibatchChains, store: DrawStore, epoch_length: int
) -> Refined:
    """Return the result of chains that saw minibatches, and warn of faults."""
    assert chains.choice is not None
    limits, steps = chains.policy.langevin, chains.transitions
    sampled = (steps - chains.schedule.warmup) / chains.schedule.sampling
    choice = chains.choice._replace(relaxations=sampled * chains.choice.relaxations)
    if chains.replaced_late:
        warn_user(
            f"{chains.replaced_late} times a chain became non-finite after the warm-up and was "
            "replaced by a copy of another chain: earlier draws are unreliable. Cure: a shorter "
            "step_size, or float64"
        )
    if chains.temperature is not None and chains.temperature > limits.max_temperature:
        warn_user(
            f"the velocities' temperature is {chains.temperature:.3g} and should be 1, so the "
            "draws are wrong: the initial values were far from the posterior, or the step size of "
            f"{choice.step_size:.3g} in the frame is too large. Cure: a better guide and "
            "more max_epochs, or a smaller step_size"
        )
    if choice.relaxations < 1 and chains.stopped != "interrupted":
        # Steps are too few to relax, so relaxation times grow as the steps do. After two of them
        # the mean has forgotten the start.
        factor = 2 / max(choice.relaxations, 1e-9)
        more = f"max_epochs (about {math.ceil(factor * steps / epoch_length)})"
        if chains.stopped == "max_seconds":
            more = f"max_seconds (about {math.ceil(factor * chains.seconds)})"
        warn_user(
            f"the chains ran for only {choice.relaxations:.2g} relaxation times, so the draws "
            f"still depend on the initial values. Cure: more {more}, larger minibatches, or a "
            "better guide"
        )
    return Refined(
        **_common(target, chains, store),
        step_size=choice.step_size,
        choice=choice,
        temperature=chains.temperature,
        epochs=steps / epoch_length,
    )


def _common(target: Target, chains: Chains, store: DrawStore) -> dict[str, Any]:
    return {
        "stopped": chains.stopped,
        "kernel": chains.kernel,
        "store": store,
        "constrain": SitesOf.of(target),
        "num_chains": len(chains.state.position),
        "frame": "none" if KERNELS[chains.kernel].separate else chains.frame.kind,
        "num_gradients": chains.gradients,
        "warmup_gradients": chains.warmup_gradients,
        "seconds": chains.seconds,
        "replaced": chains.replaced,
    }
