# SPDX-License-Identifier: Apache-2.0
"""What :func:`~pyro_implicit.diagnostics.diagnose` found, and what it makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from pyro_implicit.diagnostics.coverage import ModeCoverage
from pyro_implicit.diagnostics.drift import DriftCheck
from pyro_implicit.diagnostics.findings import (
    TELLING_WEIGHTS,
    Finding,
    MomentCheck,
    Verdict,
    beyond,
    find_faults,
    has_power,
)
from pyro_implicit.diagnostics.moments import FALSE_ALARM, MomentErrors
from pyro_implicit.diagnostics.stein import SteinCheck
from pyro_implicit.infer.bound import EvidenceBound
from pyro_implicit.ops.importance_weights import describe_weights
from pyro_implicit.runtime.printing import Printed, Table

__all__ = ["Diagnosis"]

#: Lines on further reasons.
MAX_ALSO = 5


@dataclass(frozen=True, repr=False)
class Diagnosis(Printed):
    """What can be known about a fitted guide without a reference. ``print`` shows all of it.

    :ivar num_samples: draws of the guide that were looked at.
    :ivar latent_dim: their unconstrained dimensions.
    :ivar bound: lower bound of the log evidence in nats, with k-hat and effective sample size of
        the importance weights; None for a guide without density.
    :ivar no_density: why there are no importance weights, else empty.
    :ivar importance: errors of moments by importance weights; None where k-hat forbids it.
    :ivar stein: errors of moments by Stein's identities, and the kernel test.
    :ivar drift: how draws drift under a few transitions of Hamiltonian Monte Carlo; None if
        skipped.
    :ivar gap: the training objective minus the bound, in nats, and its standard error; None
        without a ``loss``.
    :ivar coverage: of the modes that were found or given; None if there was no search.
    :ivar settled: whether the draws are of chains that had settled, or righted by reliable weights:
        these need no density.
    :ivar modes_weighed: whether separate modes are known to have their due share of these.
    :ivar doubts: what chains are known to have failed in.
    :ivar broken: why nothing could be tested (collapsed or infinite draws), else empty.
    :ivar left_out: at which few draws nothing could be tested, and why, else empty.
    :ivar semi_implicit: whether the guide is an :class:`~pyro_implicit.AutoSemiImplicit`, so that
        other guides are advised.
    :ivar labels: names of the unconstrained coordinates, of which ``faults`` of the checks speak.
    :ivar planned_seconds: of one core, that the model's evaluations were estimated to take.
    :ivar spared: what the budget left out.
    :ivar judged: of what the errors are, in place of the latents; empty for these.
    """

    num_samples: int
    latent_dim: int
    bound: EvidenceBound | None = None
    no_density: str = ""
    importance: MomentErrors | None = None
    stein: SteinCheck | None = None
    drift: DriftCheck | None = None
    gap: tuple[float, float] | None = None
    coverage: ModeCoverage | None = None
    broken: str = ""
    settled: bool = False
    modes_weighed: bool = False
    labels: tuple[str, ...] = field(default=(), repr=False)
    planned_seconds: float = math.nan
    spared: tuple[str, ...] = ()
    judged: str = ""
    doubts: tuple[str, ...] = ()
    left_out: str = ""
    semi_implicit: bool = False

    @property
    def verdict(self) -> Verdict:
        """``"trust"``, ``"check"`` or ``"do not trust"``."""
        verdicts = [finding.verdict for finding in self.findings]
        order: tuple[Verdict, ...] = ("do not trust", "check")
        return next((verdict for verdict in order if verdict in verdicts), "trust")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All reasons against the guide."""
        return tuple(find_faults(self))

    @property
    def cures(self) -> tuple[str, ...]:
        """What to try, the cures of the gravest findings only."""
        verdict = self.verdict
        return tuple(dict.fromkeys(f.cure for f in self.findings if f.verdict == verdict))

    @property
    def efficiency(self) -> float:
        """The effective sample size of the importance weights, as a share of the draws."""
        return self.bound.effective_sample_size / self.num_samples if self.bound else 0.0

    def _blocks(self) -> Iterator[str | Table]:
        head = f"Diagnosis of {self.num_samples} draws in {self.latent_dim} dimensions"
        if self.judged:
            head += f", by {self.judged}"
        yield head
        yield Table(list(self._rows()), align="l", widths=(18,), indent="  ")
        yield from self._verdict_lines()

    def _rows(self) -> Iterator[tuple[str, str]]:
        if self.bound is not None:
            yield "importance weights", describe_weights(self.bound.khat, self.efficiency)
            yield (
                "log evidence",
                f"at least {self.bound.value:.2f} +- {self.bound.standard_error:.2f}",
            )
        elif self.settled:
            yield "importance weights", "none wanted: chains that settled, or weighted draws"
        else:
            yield "importance weights", f"none: {self.no_density or 'not computed'}"
        if self.importance is not None:
            telling = self.efficiency >= TELLING_WEIGHTS
            yield "  would correct", _moments(self.importance, telling)
        if self.stein is not None:
            yield "Stein's identities", _moments(self.stein)
            by_site = "".join(
                f", of `{site}` alone {p_value:.3f}"
                for site, p_value in self.stein.by_site[:1]
                if p_value < FALSE_ALARM
            )
            yield "kernel Stein test", f"p = {self.stein.kernel.p_value:.3f}{by_site}"
        if self.drift is not None:
            escaped = f", {self.drift.escaped:.1%} escaped" if self.drift.escaped else ""
            accepted = f"{self.drift.acceptance:.0%} accepted"
            yield "short HMC", f"{_moments(self.drift)}, {accepted}{escaped}"
        elif not self.broken:
            yield "short HMC", "not run"
        if self.gap is not None:
            value, error = self.gap
            yield "objective", f"{value:+.2f} +- {error:.2f} nats from the bound"
        if self.coverage is not None:
            lost = int(self.coverage.uncovered.sum())
            yield "modes", f"{lost} of {len(self.coverage.mass)} without draws"
        elif not (self.broken or self.judged):
            yield "modes", "not looked for"
        if self.spared:
            yield "spared by budget", ", ".join(self.spared)

    def _verdict_lines(self) -> Iterator[str]:
        worst = next((f for f in self.findings if f.verdict == self.verdict), None)
        yield f"Verdict: {self.verdict}" + (f": {worst.reason}" if worst else "")
        others = [finding for finding in self.findings if finding != worst]
        for finding in others[:MAX_ALSO]:
            yield f"  also: {finding.reason}"
        if len(others) > MAX_ALSO:
            yield f"  also: {len(others) - MAX_ALSO} more, see findings"
        if self.cures:
            yield f"  try: {'; '.join(self.cures)}"


def _moments(check: MomentCheck, has_told: bool = False) -> str:
    low, high = check.sd_ratios
    nothing = check.mean_error == 0 and (low, high) == (1.0, 1.0)
    if nothing and not (has_told or has_power(check)):
        return f"cannot tell: no errors seen, but none {beyond(check)} would be"
    return f"means off by {check.mean_error:.2f} sd, sds {low:.2f} to {high:.2f} times the right"
