# SPDX-License-Identifier: Apache-2.0
"""What :func:`~pyro_implicit.mcmc.refine` returns: draws, and how they came about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pyro.infer.mcmc.util import diagnostics, print_summary, select_samples
from torch import Tensor

from pyro_implicit.mcmc.stopping import Drift

__all__ = ["Refined"]

MODES = (
    "Chains that start in separate modes stay there: each mode keeps the weight that the guide "
    "gave it."
)


@dataclass(frozen=True, eq=False, repr=False)
class Refined:
    """Draws of many short chains. ``print`` shows how they came about, ``summary()`` their moments.

    The draws are those after warm-up, without the first third, thinned.

    :ivar samples: Constrained draws by site, ``(num_chains, num_draws, *site_shape)``.
    :ivar stopped: Why the chains stopped: ``"converged"``, ``"max_gradients"`` or
        ``"max_seconds"``.
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
        log-density, or because they stood still for a whole window of the warm-up.
    :ivar stuck: Chains all of whose draws are one point: a trajectory into the posterior was never
        accepted from there. Their draws are wrong, and widen every standard deviation.
    :ivar frame: ``"diagonal"``, ``"low-rank"`` or ``"full"``.
    :ivar space: ``"latent"``, or ``"noise"`` where the chains walked on a guide's noise.
    :ivar modes: A note on separate modes.
    """

    samples: dict[str, Tensor]
    stopped: Literal["converged", "max_gradients", "max_seconds"]
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
    modes: str = MODES

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

    def __repr__(self) -> str:
        return str(self)

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
            rows["drift, at most"] = (
                f"means {self.drift.mean:.3f} sd, sds {self.drift.sd:.1%}, "
                f"R-hat {self.drift.r_hat:.3f}"
            )
        if self.replaced_starts:
            rows["chains replaced"] = str(self.replaced_starts)
        if self.stuck:
            rows["chains that never moved"] = str(self.stuck)
        width = max(map(len, rows))
        lines = [f"{name.ljust(width)}  {value}" for name, value in rows.items()]
        return "\n".join([*lines, self.modes])
