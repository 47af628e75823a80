# SPDX-License-Identifier: Apache-2.0
"""What :func:`~pyro_implicit.diagnostics.diagnose` found, and what it makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pyro_implicit.diagnostics.coverage import ModeCoverage
from pyro_implicit.diagnostics.drift import DriftCheck
from pyro_implicit.diagnostics.labels import describe_faults
from pyro_implicit.diagnostics.moments import MomentErrors
from pyro_implicit.diagnostics.stein import SteinCheck
from pyro_implicit.infer.bound import EvidenceBound
from pyro_implicit.ops.printing import Printed

__all__ = ["Diagnosis", "Finding", "Verdict"]

Verdict = Literal["trust", "check", "do not trust"]

STEPS = "more steps with a smaller learning rate"
FIT_BETTER = (
    "a more flexible guide (AutoSemiImplicit with LIVI_ELBO, with and without a frame), "
    f"{STEPS}, or NUTS"
)


class Finding(NamedTuple):
    """A reason against a guide, how grave it is, and a cure to try."""

    verdict: Verdict
    reason: str
    cure: str


class Thresholds(NamedTuple):
    """Where a number becomes a reason to check, and one not to trust."""

    check: float
    distrust: float

    def judge(self, value: float, reason: str, cure: str) -> Iterator[Finding]:
        """The finding, if any."""
        if not value <= self.distrust:
            yield Finding("do not trust", reason, cure)
        elif value > self.check:
            yield Finding("check", reason, cure)


#: Of k-hat: Yao et al. (2018), Vehtari et al. (2024).
KHAT = Thresholds(0.5, 0.7)
KHAT_OF_EVEN = Thresholds(0.7, math.inf)
#: Of the error of a mean, in standard deviations.
MEAN = Thresholds(0.1, 0.25)
#: Of the ratio of standard deviations, or its inverse.
SD = Thresholds(1.08, 1.25)
#: Share of the draws that the effective sample size must reach for the weights' tail to be moot.
EVEN_WEIGHTS = 0.99
#: Share from which on weights leave so little error that a kernel test's significance is moot.
GOOD_WEIGHTS = 0.9
#: Nats by which an objective may exceed the certified bound.
GAP = 0.5
#: Mass of a mode that counts, where the weights of modes may be wrong.
LEAST = 0.01
#: Of the kernel test.
P_VALUE = 0.003
#: Why draws of chains, or from elsewhere, have no weights.
STORED = "stored draws"
#: Lines on further reasons.
MAX_ALSO = 5

MomentCheck = MomentErrors | SteinCheck | DriftCheck


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
    :ivar broken: why nothing could be tested (collapsed or infinite draws), else empty.
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

    @property
    def verdict(self) -> Verdict:
        """``"trust"``, ``"check"`` or ``"do not trust"``."""
        verdicts = [finding.verdict for finding in self.findings]
        order: tuple[Verdict, ...] = ("do not trust", "check")
        return next((verdict for verdict in order if verdict in verdicts), "trust")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All reasons against the guide."""
        return tuple(self._find())

    @property
    def cures(self) -> tuple[str, ...]:
        """What to try, the cures of the gravest findings only."""
        verdict = self.verdict
        return tuple(dict.fromkeys(f.cure for f in self.findings if f.verdict == verdict))

    @property
    def efficiency(self) -> float:
        """The effective sample size of the importance weights, as a share of the draws."""
        return self.bound.effective_sample_size / self.num_samples if self.bound else 0.0

    def _find(self) -> Iterator[Finding]:
        if self.broken:
            yield Finding("do not trust", self.broken, "fit again: a wider start, " + STEPS)
        if self.bound is not None and self.efficiency < EVEN_WEIGHTS and not self.judged:
            reason = f"k-hat {self.bound.khat:.2f}: the guide is too narrow somewhere"
            # Even weights leave a heavy tail little mass.
            limits = KHAT_OF_EVEN if self.efficiency > GOOD_WEIGHTS else KHAT
            yield from limits.judge(self.bound.khat, reason, FIT_BETTER)
        keep = self.settled and not self.modes_weighed
        if keep and self.coverage is not None and (self.coverage.mass > LEAST).sum() > 1:
            reason = "chains keep the weights that the guide gave to separate modes"
            yield Finding("check", reason, "a mixture of exact density (AutoMixture)")
        if self.no_density and not (self.broken or self.settled or self.judged):
            cure = "AutoSemiImplicit with LIVI_ELBO, or AutoregressiveGenerator with InjectiveELBO"
            reason = "no importance weights, without which no guide is trusted"
            if self.no_density == STORED:
                cure = "refine, with more max_gradients if it did not settle"
                reason = "these draws have no importance weights, and are of no chains that settled"
            yield Finding("check", reason, cure)
        checks = (
            ("importance weights", self.importance),
            ("Stein's identities", self.stein),
            ("short HMC", self.drift),
        )
        for name, check in checks:
            if check is not None:
                yield from self._moment_findings(name, check)
        yield from self._lack_of_power()
        if self.stein is not None and self.efficiency < GOOD_WEIGHTS:
            yield from _kernel_findings(self.stein)
        if self.gap is not None and not self.gap[0] <= max(GAP, 3 * self.gap[1]):
            reason = f"the objective is {self.gap[0]:.1f} nats above the certified bound"
            if not math.isfinite(self.gap[0]):
                reason = "the objective is not finite"
            yield Finding(
                "check",
                reason,
                "judge fits by evidence_bound; LIVI with log_det='exact', or InjectiveELBO",
            )
        if self.coverage is not None and self.coverage.uncovered.any():
            lost = self.coverage.mass[self.coverage.uncovered].max().item()
            reason = f"no draws at a mode that holds about {lost:.0%} of the mass"
            yield Finding("do not trust", reason, "a mixture of guides, tempering, a wider start")

    def _moment_findings(self, name: str, check: MomentCheck) -> Iterator[Finding]:
        low, high = check.sd_ratios
        reason = f"a mean is off by {check.mean_error:.2f} sd ({name})"
        reason = self._located("mean", name, check) or reason
        yield from MEAN.judge(check.mean_error, reason, FIT_BETTER)
        worst = low if low * high < 1 else high
        reason = f"an sd is {worst:.2f} times what it should be ({name})"
        reason = self._located("sd", name, check) or reason
        yield from SD.judge(max(high, 1 / low if low > 0 else math.inf), reason, FIT_BETTER)

    def _located(self, kind: str, name: str, check: MomentCheck) -> str:
        limit = MEAN.check if kind == "mean" else math.log(SD.check)
        faults = [f for f in check.faults if f.kind == kind]
        # The worst in any case, as the limits are those of the worst direction.
        faults = faults[:1] + [fault for fault in faults[1:] if fault.size > limit]
        if not faults:
            return ""
        return f"{describe_faults(faults, self.labels, isinstance(check, SteinCheck))} ({name})"

    def _lack_of_power(self) -> Iterator[Finding]:
        """Weights that are few do not tell, nor do Stein's identities of a guide that was trained
        by them."""
        looks = [check for check in (self.importance, self.drift) if check is not None]
        if self.judged and not (self.settled or self.broken or any(map(_has_power, looks))):
            seen = _beyond(looks[-1]) if looks else "of any size"
            reason = f"cannot tell: nothing would show errors {seen}"
            yield Finding("check", reason, "more draws (num_samples), or refine and then diagnose")
        if self.judged:
            return
        if self.importance is None or self.bound is None or _has_power(self.importance):
            return
        if self.drift is not None and _has_power(self.drift):
            return
        number = self.bound.effective_sample_size
        reason = (
            f"cannot tell: the weights are worth {number:.0f} draws ({self.efficiency:.0%}), which "
            f"do not show errors {_beyond(self.importance)}"
        )
        yield Finding("check", reason, "more draws (num_samples), or refine and then diagnose")

    def __str__(self) -> str:
        head = f"Diagnosis of {self.num_samples} draws in {self.latent_dim} dimensions"
        if self.judged:
            head += f", by {self.judged}"
        lines = [f"  {name:<20}{text}" for name, text in self._rows()]
        return "\n".join([head, *lines, *self._verdict_lines()])

    def _rows(self) -> Iterator[tuple[str, str]]:
        if self.bound is not None:
            yield (
                "importance weights",
                f"k-hat {self.bound.khat:.2f}, effective sample size {self.efficiency:.0%}",
            )
            yield (
                "log evidence",
                f"at least {self.bound.value:.2f} +- {self.bound.standard_error:.2f}",
            )
        elif self.settled:
            yield "importance weights", "none wanted: chains that settled, or weighted draws"
        else:
            yield "importance weights", f"none: {self.no_density or 'not computed'}"
        if self.importance is not None:
            yield "  would correct", _moments(self.importance)
        if self.stein is not None:
            yield "Stein's identities", _moments(self.stein)
            by_site = "".join(
                f", of `{site}` alone {p_value:.3f}"
                for site, p_value in self.stein.by_site[:1]
                if p_value < P_VALUE
            )
            yield "kernel Stein test", f"p = {self.stein.kernel.p_value:.3f}{by_site}"
        if self.drift is not None:
            yield "short HMC", f"{_moments(self.drift)}, {self.drift.acceptance:.0%} accepted"
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


def _kernel_findings(stein: SteinCheck) -> Iterator[Finding]:
    sites = [f"`{site}`" for site, p_value in stein.by_site if p_value < P_VALUE]
    where = f", those of {' and '.join(sites[:2])} by themselves" if sites else ""
    p_values = [stein.kernel.p_value, *(p_value for _, p_value in stein.by_site)]
    if min(p_values) < P_VALUE:
        reason = (
            f"the draws do not fit the scores{where} (kernel Stein test, p = {min(p_values):.3f})"
        )
        yield Finding("check", reason, FIT_BETTER)


def _has_power(check: MomentCheck) -> bool:
    """Whether what must not be missed would have been seen."""
    return check.resolution.mean <= MEAN.distrust and check.resolution.sd <= SD.distrust


def _beyond(check: MomentCheck) -> str:
    mean, sd = check.resolution.mean, check.resolution.sd
    of_sds = f"a factor {sd:.2f} in sds" if math.isfinite(sd) else "nor any in sds"
    return f"below {mean:.2f} sd in means, {of_sds}"


def _moments(check: MomentCheck) -> str:
    low, high = check.sd_ratios
    if check.mean_error == 0 and (low, high) == (1.0, 1.0) and not _has_power(check):
        return f"cannot tell: no errors seen, but none {_beyond(check)} would be"
    return f"means off by {check.mean_error:.2f} sd, sds {low:.2f} to {high:.2f} times the right"
