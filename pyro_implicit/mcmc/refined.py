# SPDX-License-Identifier: Apache-2.0
"""What :func:`~pyro_implicit.mcmc.refine` returns: draws, and how they came about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pyro.infer.mcmc.util import diagnostics, print_summary, select_samples
from torch import Tensor

from pyro_implicit.export.arviz import ArvizExport
from pyro_implicit.guides.stored_draws import StoredDraws
from pyro_implicit.mcmc.chain_density import ChainDensity
from pyro_implicit.mcmc.chains import Chains
from pyro_implicit.mcmc.conditional_reparam import ConditionalReparam
from pyro_implicit.mcmc.modes import KEPT, Modes
from pyro_implicit.mcmc.stopping import Drift
from pyro_implicit.mcmc.teaching import Taught
from pyro_implicit.runtime.printing import Printed, aligned
from pyro_implicit.runtime.user_warnings import warn_user

__all__ = ["Refined", "collect"]

MANY_FAILED = 0.01
# Of chains that converged: a neck that is filling shows in them as drift and R-hat.
MOST_FAILED = 0.05


@dataclass(frozen=True, eq=False, repr=False)
class Refined(Printed, ArvizExport):
    """Draws of many short chains. ``print`` shows how they came about, ``summary()`` their moments.

    The draws are those after warm-up, without the first third, thinned.

    :ivar samples: Constrained draws by site, ``(num_chains, num_draws, *site_shape)``.
    :ivar stopped: Why the chains stopped: ``"converged"``, ``"steady"``, ``"max_gradients"``,
        ``"max_seconds"``, or ``"interrupted"``, by Ctrl-C. Steady are ``quantities`` that drift no
        longer while the chains remember where they began (R-hat from 1.1 to 2): right as far as the
        guide's weights of the places between which no chain passes are.
    :ivar drift: What the stopping rule saw last; None if it was never asked.
    :ivar acceptance: Mean probability of acceptance after warm-up.
    :ivar failed: Share of trajectories after warm-up whose probability of acceptance was below 1 %,
        as others count divergences. Above .002 there are narrow places, which may still fill.
    :ivar step_size: Of the leapfrog integrator, in the frame.
    :ivar trajectory_length: The longest, in the frame.
    :ivar num_gradients: Gradients of the log-density that each chain took, warm-up included.
    :ivar warmup_gradients: Those of the warm-up.
    :ivar seconds: Wall time.
    :ivar replaced_starts: Chains put where others are, because their start had no finite
        log-density, or because in the warm-up they stood still for a whole window, or stayed, a few
        of all, where the log-density is far below all others'.
    :ivar stuck: Chains all of whose draws are one point: a trajectory into the posterior was never
        accepted from there. Their draws are wrong, and widen every standard deviation.
    :ivar frame: ``"diagonal"``, ``"low-rank"`` or ``"full"``.
    :ivar space: ``"latent"``; ``"noise"`` where the chains walked on a guide's noise, and
        ``"conditional"`` on what parents and data leave open of each latent
        (:class:`~pyro_implicit.mcmc.ConditionalReparam`).
    :ivar space_note: Why that space, where others were possible.
    :ivar reparams: Those of the conditional space, by site.
    :ivar modes: A note on separate modes.
    :ivar modes_weighed: Whether each has its due share of the chains, by bridge sampling.
    :ivar taught: What the guide learnt, with ``teach=True``.
    """

    samples: dict[str, Tensor]
    stopped: Literal["converged", "steady", "max_gradients", "max_seconds", "interrupted"]
    drift: Drift | None
    acceptance: float
    failed: float
    step_size: float
    trajectory_length: float
    num_gradients: int
    warmup_gradients: int
    seconds: float
    replaced_starts: int
    stuck: int
    frame: str
    space: str
    space_note: str
    modes: str
    modes_weighed: bool = False
    taught: Taught | None = None
    reparams: dict[str, ConditionalReparam] = field(default_factory=dict)

    @property
    def num_chains(self) -> int:
        """How many chains there are."""
        return len(next(iter(self.samples.values())))

    def get_samples(
        self, num_samples: int | None = None, group_by_chain: bool = False
    ) -> dict[str, Tensor]:
        """Constrained draws by site, as Pyro's ``MCMC`` gives them.

        :param num_samples: so many, drawn with replacement; by default all.
        :param group_by_chain: whether the chains are a dimension of their own.
        :returns: ``(num_samples, *site_shape)`` or ``(num_chains, num_samples, *site_shape)``.
        """
        return select_samples(self.samples, num_samples, group_by_chain)

    @property
    def settled(self) -> bool:
        """Whether the chains stopped because nothing drifted any more, and not at a budget."""
        return self.stopped in ("converged", "steady")

    @property
    def doubts(self) -> tuple[str, ...]:
        """What speaks against the draws, of which ``diagnose`` says "check"."""
        found = []
        if not self.settled:
            how = "interrupted" if self.stopped == "interrupted" else f"stopped by {self.stopped}"
            found.append(f"the chains were {how}, before they settled")
        if self.failed > (MOST_FAILED if self.stopped == "converged" else MANY_FAILED):
            share = f"{self.failed:.1%} of the chains' trajectories failed"
            found.append(f"{share}: narrow places may not have filled")
        if self.stuck:
            found.append(f"{self.stuck} of {self.num_chains} chains never moved")
        return tuple(found)

    def as_guide(self) -> StoredDraws:
        """The draws as a guide, for ``Predictive``."""
        return StoredDraws(self.get_samples(), self.settled, self.modes_weighed, self.doubts)

    def diagnostics(self) -> dict[str, Any]:
        """Effective sample size and split R-hat by site, as Pyro's ``MCMC`` gives them.

        R-hat of many short chains is above that of few long ones with as many draws in all: 1.05
        stands for ten effective draws of each chain.
        """
        return diagnostics(self.samples)

    def summary(self, prob: float = 0.9) -> None:
        """Print means, standard deviations, intervals, effective sample sizes and R-hats.

        :param prob: mass of the intervals.
        """
        print_summary(self.samples, prob=prob)

    def moving(self) -> dict[str, Tensor]:
        """Constrained draws by site of the chains that moved, those of a chain side by side."""
        is_stuck = torch.stack(
            [(v == v[:, :1]).flatten(1).all(-1) for v in self.samples.values()]
        ).all(0)
        return {name: value[~is_stuck].flatten(0, 1) for name, value in self.samples.items()}

    def __str__(self) -> str:
        num_draws = next(iter(self.samples.values())).shape[1]
        rows = {
            "stopped": self.stopped,
            "draws": f"{self.num_chains} chains x {num_draws}",
            "gradients of each chain": f"{self.num_gradients} ({self.warmup_gradients} to warm up)",
            "seconds": f"{self.seconds:.1f}",
            "acceptance": f"{self.acceptance:.2f}, failed {self.failed:.2%}",
            "step, longest trajectory": f"{self.step_size:.3g}, {self.trajectory_length:.3g}",
            "frame": f"{self.frame}, of the {self.space}",
        }
        if self.drift is not None:
            rows["off by drift, at most"] = (
                f"means {self.drift.mean:.3f} sd, sds {self.drift.sd:.1%}, "
                f"R-hat {self.drift.r_hat:.3f}"
            )
        if self.space_note:
            rows["why there"] = self.space_note
        if self.replaced_starts:
            rows["chains replaced"] = str(self.replaced_starts)
        if self.stuck:
            rows["chains that never moved"] = str(self.stuck)
        if self.taught is not None:
            rows["guide taught"] = str(self.taught)
        return f"{aligned(rows)}\n{self.modes}"


def collect(density: ChainDensity, modes: Modes | None, chains: Chains) -> Refined:
    """What chains that have stopped leave.

    :param density: that they walked on.
    :param modes: of the guide.
    """
    density.check(chains.frame.to_points(chains.state.position))
    latents = chains.history.draws().transpose(0, 1).contiguous()
    stuck = int((latents == latents[:, :1]).flatten(1).all(-1).sum())
    if stuck:
        warn_user(
            f"{stuck} of {len(latents)} chains never moved after the warm-up, so their draws are "
            "wrong: they began where every trajectory is rejected, far out or in a narrow place. "
            "Cure: a better guide, more max_gradients, or leave out those chains of "
            "get_samples(group_by_chain=True) whose draws are all the same",
        )
    rows, note = None, KEPT
    if modes is not None:
        rows, note = modes.chosen(latents)
        latents = latents if rows is None else latents[rows]
    return Refined(
        samples=density.density.constrain(latents),
        stopped=chains.stopped,  # type: ignore[arg-type]
        drift=chains.last_drift,
        acceptance=chains.acceptance,
        failed=chains.failed,
        step_size=chains.kernel.step_size,
        trajectory_length=chains.kernel.trajectory_length,
        num_gradients=chains.gradients,
        warmup_gradients=chains.warmup_gradients,
        seconds=chains.seconds,
        replaced_starts=chains.replaced_starts,
        stuck=stuck,
        frame=chains.frame.kind,
        space=chains.space,
        space_note=chains.space_note,
        modes=note,
        modes_weighed=rows is not None,
        reparams=density.reparams,
    )
