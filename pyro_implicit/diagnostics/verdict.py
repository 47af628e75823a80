# SPDX-License-Identifier: Apache-2.0
"""Result of :func:`~pyro_implicit.diagnostics.diagnose`: numbers, findings and verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

from pyro_implicit.density.mirrors import Images
from pyro_implicit.diagnostics.checks import DriftCheck, ModeCoverage, SteinCheck
from pyro_implicit.diagnostics.moments import MomentErrors
from pyro_implicit.diagnostics.policy import (
    CHECKS,
    MOMENTS,
    REPORT,
    VERDICT,
    Thresholds,
    VerdictPolicy,
)
from pyro_implicit.diagnostics.quantities import Mixing, describe_faults
from pyro_implicit.infer.bound import EvidenceBound
from pyro_implicit.mcmc.policy import DEFAULT as CHAINS
from pyro_implicit.mcmc.stopping import Drift
from pyro_implicit.nn import LabelReport, NumberReport
from pyro_implicit.ops.importance_weights import describe_weights
from pyro_implicit.ops.policy import EVEN_EFFICIENCY, FINITE_MEAN_KHAT
from pyro_implicit.runtime.messages import Printed, Table, counted

__all__ = [
    "SMALL_ENOUGH",
    "Diagnosis",
    "Finding",
    "MomentCheck",
    "Verdict",
    "beyond",
    "coarse_prior",
    "far_from_prior",
    "find_faults",
    "has_power",
    "judge_chains",
]


@dataclass(frozen=True, repr=False)
class Diagnosis(Printed):
    """Result of :func:`~pyro_implicit.diagnostics.diagnose`. ``print`` shows all of it.

    :ivar num_samples: the number of draws that were checked.
    :ivar num_stored: the number of stored draws if fewer were checked, because they are worth only
        so many independent ones: chains are correlated, and resampled draws repeat; else 0.
    :ivar weighed: k-hat and effective sample size of the weights by which ``fit`` resampled the
        draws, else empty.
    :ivar latent_dim: the number of unconstrained latent variables.
    :ivar bound: lower bound of the log evidence in nats, with k-hat and effective sample size of
        the importance weights; None for a guide without density.
    :ivar no_density: why there are no importance weights, else empty.
    :ivar importance: errors of moments by importance weights; None if k-hat is too large.
    :ivar stein: errors of moments by Stein's identities, and the kernel test.
    :ivar drift: how draws drift under a few transitions of Hamiltonian Monte Carlo; None if
        skipped.
    :ivar gap: the training objective minus the bound, in nats, and its standard error; None
        without a ``loss``.
    :ivar coverage: coverage of the modes that were found or given; None without modes.
    :ivar images: mirror images of the draws that are further modes; None if there are none.
    :ivar settled: whether the draws are of settled chains or resampled by reliable weights, so that
        they need no density.
    :ivar modes_weighed: whether the weights of separate modes are known to be correct.
    :ivar doubts: known failures of the chains.
    :ivar chains: error bounds and R-hat of chains.
    :ivar automatic: whether ``fit`` made the guide, so that its training has no settings.
    :ivar broken: the reason if no check was possible (collapsed or infinite draws), else empty.
    :ivar left_out: the number of draws that were left out, and the reason, else empty.
    :ivar improper: the scales with a flat prior whose draws have no end, else empty.
    :ivar extrapolated: the share of draws for which the prior of ``Fit.update`` is a guess.
    :ivar coarse: the share of the effective draws that an update loses to the error of this prior.
    :ivar given: the parameters of the model whose training had not settled, else empty. The draws
        are given their values.
    :ivar semi_implicit: whether the guide is an :class:`~pyro_implicit.AutoSemiImplicit`, so that
        the advice is another guide.
    :ivar labels: names of the unconstrained coordinates in the ``faults`` of the checks.
    :ivar spared: checks that the budget reduced or skipped.
    :ivar skipped: checks that do not apply, and why.
    :ivar policy: the limits of the verdict.
    :ivar judged: the quantities that were checked; empty for the latents.
    :ivar mixing: R-hat between and within chains and effective sample size of these quantities, for
        draws of chains.
    :ivar held_out: scores of held-out rows, if the automatic fit of a network held out some. The
        draws that were scored had not seen these rows.
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
    images: Images | None = field(default=None, repr=False)
    broken: str = ""
    settled: bool = False
    modes_weighed: bool = False
    labels: tuple[str, ...] = field(default=(), repr=False)
    spared: tuple[str, ...] = ()
    skipped: str = ""
    judged: str = ""
    mixing: Mixing | None = None
    held_out: LabelReport | NumberReport | None = field(default=None, repr=False)
    doubts: tuple[str, ...] = ()
    chains: Drift | None = None
    automatic: bool = False
    left_out: str = ""
    improper: str = ""
    extrapolated: float = 0.0
    coarse: float = 0.0
    given: str = ""
    semi_implicit: bool = False
    num_stored: int = 0
    weighed: str = ""
    policy: VerdictPolicy = field(default_factory=VerdictPolicy, repr=False)

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
        """Cures of the most severe findings."""
        verdict = self.verdict
        found = dict.fromkeys(f.cure for f in self.findings if f.verdict == verdict)
        continues = any(cure.startswith(CONTINUE) for cure in found)
        return tuple(ELSEWHERE if continues and cure == MOVE_BETTER else cure for cure in found)

    @property
    def efficiency(self) -> float:
        """Effective sample size of the importance weights per draw."""
        return self.bound.effective_sample_size / self.num_samples if self.bound else 0.0

    @property
    def of_chains(self) -> bool:
        """Whether the draws are of chains, or resampled by reliable weights."""
        return self.settled or self.chains is not None

    @property
    def unsettled(self) -> Drift | None:
        """Error bounds and R-hat of chains that have not converged, else None."""
        return None if self.settled else self.chains

    def _blocks(self) -> Iterator[str | Table]:
        number = str(self.num_samples)
        if self.num_stored:
            number += f" of {self.num_stored} stored"
        head = f"Diagnosis of {number} draws in {counted(self.latent_dim, 'dimension')}"
        if self.num_stored:
            head += ", thinned because they depend on each other"
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
        elif self.of_chains:
            used = f"the draws were resampled by them: {self.weighed}" if self.weighed else ""
            yield "importance weights", used or "none needed for draws of chains or resampled draws"
        else:
            yield "importance weights", f"none: {self.no_density or 'not computed'}"
        if self.importance is not None:
            telling = self.efficiency >= self.policy.telling_weights
            yield "  would correct", self._moments(self.importance, telling)
        if self.stein is not None:
            yield "Stein's identities", self._moments(self.stein)
            by_site = "".join(
                f", of `{site}` alone {p_value:.3f}"
                for site, p_value in self.stein.by_site[:1]
                if p_value < MOMENTS.false_alarm
            )
            yield "kernel Stein test", f"p = {self.stein.kernel.p_value:.3f}{by_site}"
        if self.drift is not None:
            escaped = f", {self.drift.escaped:.1%} escaped" if self.drift.escaped else ""
            accepted = f"{self.drift.acceptance:.0%} accepted"
            yield "short HMC", f"{self._moments(self.drift)}, {accepted}{escaped}"
        elif not (self.broken or self.skipped):
            yield "short HMC", "not run"
        if self.mixing is not None:
            yield "chains", str(self.mixing)
        elif self.chains is not None:
            is_small = not self.settled and judge_chains(self.chains, self.policy) == "trust"
            yield "chains", str(self.chains) + (SMALL_ENOUGH if is_small else "")
        if self.held_out is not None:
            yield "held-out rows", _describe_calibration(self.held_out)
        if self.gap is not None:
            value, error = self.gap
            yield "objective", f"{value:+.2f} +- {error:.2f} nats from the bound"
        if self.coverage is not None:
            lost = int(self.coverage.uncovered.sum())
            yield "modes", f"{lost} of {len(self.coverage.mass)} without draws"
        elif not (self.broken or self.judged or self.skipped):
            yield "modes", "not looked for"
        if self.skipped:
            yield "skipped", self.skipped
        if self.spared:
            yield "spared by budget", ", ".join(self.spared)

    def _verdict_lines(self) -> Iterator[str]:
        worst = next((f for f in self.findings if f.verdict == self.verdict), None)
        yield f"Verdict: {self.verdict}" + (f": {worst.reason}" if worst else "")
        others = [finding for finding in self.findings if finding != worst]
        for finding in others[: REPORT.max_also]:
            yield f"  also: {finding.reason}"
        if len(others) > REPORT.max_also:
            yield f"  also: {len(others) - REPORT.max_also} more, see findings"
        if self.cures:
            yield f"  try: {'; '.join(self.cures)}"

    def _moments(self, check: MomentCheck, has_told: bool = False) -> str:
        low, high = check.sd_ratios
        nothing = check.mean_error == 0 and (low, high) == (1.0, 1.0)
        if nothing:
            blind = not (has_told or has_power(check, self.policy))
            if blind and any(_lack_of_power(self)):
                return f"cannot tell: it would not show errors {beyond(check)}"
            rests = ", and other checks decide the verdict" if blind else ""
            return f"no error seen; errors {beyond(check)} would not show{rests}"
        return (
            f"means off by {check.mean_error:.2f} sd, sds {low:.2f} to {high:.2f} times the right"
        )


Verdict = Literal["trust", "check", "do not trust"]
MomentCheck = MomentErrors | SteinCheck | DriftCheck

STEPS = "more steps with a smaller learning rate"
FIT_BETTER = (
    "a more flexible guide (AutoSemiImplicit with LIVI_ELBO, with and without a frame), "
    f"{STEPS}, or NUTS"
)

#: Advice for semi-implicit guides.
FIT_UNLIKE = (
    "chains from the guide (refine), a guide of exact density (AutoImplicit of an "
    f"AutoregressiveGenerator with InjectiveELBO), {STEPS}, or NUTS"
)
CONTINUE = "result.refine_more(max_seconds=...), which continues the chains, or another model"
MORE_MEMBERS = (
    "more members (NetworkPolicy.num_members), each of which is a further mode; longer chains do "
    "not reach other modes"
)
UNCALIBRATED = "another noise or prior of the model, more members, or longer chains"

#: Advice for guides of ``fit``, whose training has no settings.
FIT_REFINED = (
    "fit with refine=True, which moves the draws by chains; a reparameterised model; or NUTS"
)
ELSEWHERE = (
    "refine from elsewhere (draws of the prior, another guide), a reparameterised model, or NUTS"
)
MOVE_BETTER = f"result.refine_more(max_seconds=...), {ELSEWHERE}"


class Finding(NamedTuple):
    """A reason against a guide, its severity, and a cure."""

    verdict: Verdict
    reason: str
    cure: str


#: Why chains that a budget ended may be trusted.
SMALL_ENOUGH = "; not converged, but these errors are within the limits of the verdict"

#: The reason why given draws have no weights.
STORED = "stored draws"
TOGETHER = "one fit to the earlier and the new data"
JOINTLY = f"{TOGETHER}, or a model in which they may differ"


def far_from_prior(share: float) -> str:
    """Describe an update by data that disagree with the earlier ones."""
    return (
        f"the new data disagree with the earlier ones: {share:.0%} of the draws lie where the "
        "earlier posterior had none, so that the prior is a guess"
    )


def coarse_prior(evidence: str) -> str:
    """Describe an update whose prior approximates the earlier posterior badly.

    :param evidence: what is known of the error.
    """
    return (
        f"the mixture of normals that is the prior is too coarse ({evidence}), so that the "
        "posterior may be off"
    )


def _judge(limits: Thresholds, value: float, reason: str, cure: str) -> Iterator[Finding]:
    if not value <= limits.distrust:
        yield Finding("do not trust", reason, cure)
    elif value > limits.check:
        yield Finding("check", reason, cure)


def judge_chains(drift: Drift, policy: VerdictPolicy = VERDICT) -> Verdict:
    """Return the verdict on chains that ended before they converged.

    :param drift: their error bounds and R-hat.
    """
    if not drift.r_hat <= policy.r_hat.distrust or drift.failed > policy.max_failed:
        return "do not trust"
    is_small = drift.mean <= policy.mean.check and 1 + drift.sd <= policy.sd.check
    is_known = drift.num_effective >= CHAINS.stopping.least_usable
    is_known = is_known and drift.r_hat <= policy.r_hat.check
    return "trust" if is_small and is_known else "check"


def find_faults(found: Diagnosis) -> Iterator[Finding]:
    """Yield all reasons against a guide."""
    return chain.from_iterable(rule(found) for rule in _RULES)


def _unusable_draws(found: Diagnosis) -> Iterator[Finding]:
    if found.broken:
        cure = MOVE_BETTER if found.no_density == STORED else f"fit again: a wider start, {STEPS}"
        yield Finding("do not trust", found.broken, cure)
    if found.improper:
        yield Finding("do not trust", found.improper, "a proper prior, such as HalfNormal")


def _uneven_weights(found: Diagnosis) -> Iterator[Finding]:
    policy = found.policy
    if found.bound is None or found.judged or found.efficiency >= EVEN_EFFICIENCY:
        return
    reason = f"k-hat {found.bound.khat:.2f}: the guide is too narrow somewhere"
    # If weights are even, a heavy tail has little mass.
    is_even = found.efficiency > policy.good_weights
    limits = Thresholds(FINITE_MEAN_KHAT, math.inf) if is_even else policy.khat
    yield from _judge(limits, found.bound.khat, reason, _better_fit(found))


def _unweighed_modes(found: Diagnosis) -> Iterator[Finding]:
    if found.coverage is None or found.modes_weighed or not found.of_chains:
        return
    if (found.coverage.mass > CHECKS.least_mass).sum() > 1:
        reason = "chains keep the weights that the guide gave to separate modes"
        yield Finding("check", reason, "refine(..., temper=True), which weighs the modes")


def _left_out_draws(found: Diagnosis) -> Iterator[Finding]:
    if found.left_out:
        cure = "data and defaults in float64, or priors that do not reach where the model overflows"
        yield Finding("check", found.left_out, cure)


def _prior_of_an_update(found: Diagnosis) -> Iterator[Finding]:
    limits = found.policy.extrapolated
    yield from _judge(limits, found.extrapolated, far_from_prior(found.extrapolated), JOINTLY)
    reason = coarse_prior(f"weights that correct it lose {found.coarse:.0%} of the draws")
    yield from _judge(limits, found.coarse, reason, TOGETHER)


def _unsettled_training(found: Diagnosis) -> Iterator[Finding]:
    if found.given:
        reason = f"the ELBO was still rising when the training of {found.given} ended"
        yield Finding("check", reason, "fit with more num_steps or a larger lr, or give it a prior")


def _unsettled_chains(found: Diagnosis) -> Iterator[Finding]:
    for doubt in found.doubts:
        yield Finding("check", doubt, MOVE_BETTER)
    verdict: Verdict = "trust"
    if found.unsettled is not None:
        verdict = judge_chains(found.unsettled, found.policy)
    if verdict != "trust":
        # The units of a network have no order: R-hat of its weights says little of predictions.
        reason, cure = f"the chains ended before they converged: {found.unsettled}", CONTINUE
        if found.judged and found.mixing is not None:
            reason, cure = _describe_mixing(found.mixing, found.policy)
        yield Finding("check" if found.judged else verdict, reason, cure)


def _missing_density(found: Diagnosis) -> Iterator[Finding]:
    known = found.broken or found.of_chains or found.judged or found.doubts
    if known or not found.no_density:
        return
    cure = "AutoSemiImplicit with LIVI_ELBO, or AutoregressiveGenerator with InjectiveELBO"
    if found.semi_implicit:
        cure = "AutoregressiveGenerator with InjectiveELBO, or refine"
    reason = "no importance weights, without which no guide is trusted"
    if found.no_density == STORED:
        cure = "refine, or result.refine_more of chains"
        reason = "these draws have no importance weights, and are of no chains that settled"
    yield Finding("check", reason, cure)


def _wrong_moments(found: Diagnosis) -> Iterator[Finding]:
    checks = (
        ("importance weights", found.importance),
        ("Stein's identities", found.stein),
        ("short HMC", found.drift),
    )
    for name, check in checks:
        if check is not None:
            yield from _moment_findings(found, name, check)


def _lost_tail(found: Diagnosis) -> Iterator[Finding]:
    if found.drift is not None:
        share = found.drift.escaped
        reason = f"{share:.1%} of short HMC's draws end beyond all of the guide's: a tail is lost"
        yield from _judge(found.policy.escaped, share, reason, _cure(found))


def _loose_objective(found: Diagnosis) -> Iterator[Finding]:
    gap, error = found.gap or (0.0, 0.0)
    if gap <= max(found.policy.gap, found.policy.num_errors * error):
        return
    reason = f"the objective is {gap:.1f} nats above the certified bound"
    if not math.isfinite(gap):
        reason = "the objective is not finite"
    cure = "judge fits by evidence_bound; LIVI with log_det='exact', or InjectiveELBO"
    yield Finding("check", reason, cure)


def _lost_images(found: Diagnosis) -> Iterator[Finding]:
    images = found.images
    if images is None:
        return
    if not images.is_reliable:
        if not found.doubts:  # which say so of chains
            reason = f"{images}, but these weights are unreliable"
            yield Finding("check", reason, "chains that start at all images, or NUTS")
        return
    noise = found.policy.num_errors / math.sqrt(4 * found.num_samples)
    reason = f"{images}: the share of the draws at one of them is wrong by {images.moved:.0%}"
    yield from _judge(found.policy.escaped, images.moved - noise, reason, "refine, which adds them")


def _lost_modes(found: Diagnosis) -> Iterator[Finding]:
    if found.coverage is not None and found.coverage.uncovered.any():
        lost = found.coverage.mass[found.coverage.uncovered].max().item()
        reason = f"no draws at a mode that holds about {lost:.0%} of the mass"
        yield Finding("do not trust", reason, "a mixture of guides, tempering, a wider start")


def _describe_mixing(mixing: Mixing, policy: VerdictPolicy) -> tuple[str, str]:
    if mixing.between > policy.r_hat.check >= mixing.within:
        return (
            f"the quantities differ between chains (R-hat {mixing.between:.2f}) and are steady "
            f"within each ({mixing.within:.2f}): the chains stay in separate modes, whose shares "
            "are those of the starts",
            MORE_MEMBERS,
        )
    return f"the chains ended before their quantities converged: {mixing}", CONTINUE


def _levels(report: LabelReport | NumberReport) -> list[tuple[str, float, float]]:
    """Return what was predicted, its predicted share and its share among held-out rows."""
    if isinstance(report, LabelReport):
        return [("correct labels", report.confidence["test"], report.accuracy)]
    return [(f"{level:.0%} intervals", level, share) for level, share in report.coverage.items()]


def _describe_calibration(report: LabelReport | NumberReport) -> str:
    nll = f"NLL {-report.log_prob.mean().item():.3f} on {report.num_rows} rows"
    shares = [f"{share:.0%} of {level:.0%}" for _, level, share in _levels(report)]
    kind = "accuracy" if isinstance(report, LabelReport) else "coverage"
    return f"{nll}, {kind} {', '.join(shares)}" if shares else nll


def _uncalibrated(found: Diagnosis) -> Iterator[Finding]:
    report = found.held_out
    if report is None:
        return
    for name, expected, share in _levels(report):
        error = math.sqrt(expected * (1 - expected) / report.num_rows)
        if abs(share - expected) > found.policy.num_errors * error:
            side = "overconfident" if share < expected else "underconfident"
            reason = (
                f"predictions are {side}: {share:.0%} of {name} on held-out rows instead of "
                f"{expected:.0%}"
            )
            yield Finding("check", reason, UNCALIBRATED)
            return


def _cure(found: Diagnosis) -> str:
    return MOVE_BETTER if found.of_chains or found.no_density == STORED else _better_fit(found)


def _better_fit(found: Diagnosis) -> str:
    if found.automatic:
        return FIT_REFINED
    return FIT_UNLIKE if found.semi_implicit else FIT_BETTER


def _moment_findings(found: Diagnosis, name: str, check: MomentCheck) -> Iterator[Finding]:
    low, high = check.sd_ratios
    reason = f"a mean is off by {check.mean_error:.2f} sd ({name})"
    reason = _located(found, "mean", name, check) or reason
    yield from _judge(found.policy.mean, check.mean_error, reason, _cure(found))
    worst = low if low * high < 1 else high
    reason = f"an sd is {worst:.2f} times what it should be ({name})"
    reason = _located(found, "sd", name, check) or reason
    size = max(high, 1 / low if low > 0 else math.inf)
    yield from _judge(found.policy.sd, size, reason, _cure(found))


def _located(found: Diagnosis, kind: str, name: str, check: MomentCheck) -> str:
    limit = found.policy.mean.check if kind == "mean" else math.log(found.policy.sd.check)
    faults = [f for f in check.faults if f.kind == kind]
    # The worst one always: the limits hold for the worst direction.
    faults = faults[:1] + [fault for fault in faults[1:] if fault.size > limit]
    if not faults:
        return ""
    return f"{describe_faults(faults, found.labels, isinstance(check, SteinCheck))} ({name})"


def _lack_of_power(found: Diagnosis) -> Iterator[Finding]:
    looks = [check for check in (found.importance, found.drift) if check is not None]
    has_told = found.efficiency >= found.policy.telling_weights
    if has_told or any(has_power(check, found.policy) for check in looks):
        return
    if found.judged:
        if found.of_chains or found.broken:
            return
        seen = beyond(looks[-1]) if looks else "of any size"
        reason = f"cannot tell: nothing would show errors {seen}"
    elif found.importance is not None and found.bound is not None:
        number = found.bound.effective_sample_size
        reason = (
            f"cannot tell: the weights are worth {number:.0f} draws ({found.efficiency:.0%}), "
            f"which do not show errors {beyond(found.importance)}"
        )
    else:
        return
    yield Finding("check", reason, "more draws (num_samples), or refine and then diagnose")


def _unlike_scores(found: Diagnosis) -> Iterator[Finding]:
    stein = found.stein
    if stein is None or found.efficiency >= found.policy.good_weights:
        return
    sites = [f"`{site}`" for site, p_value in stein.by_site if p_value < MOMENTS.false_alarm]
    where = f", those of {' and '.join(sites[:2])} by themselves" if sites else ""
    p_values = [stein.kernel.p_value, *(p_value for _, p_value in stein.by_site)]
    if min(p_values) < MOMENTS.false_alarm:
        reason = (
            f"the draws do not fit the scores{where} (kernel Stein test, p = {min(p_values):.3f})"
        )
        yield Finding("check", reason, _cure(found))


#: In the order of the report: the first of the worst findings is the reason of the verdict.
_RULES = (
    _unusable_draws,
    _uneven_weights,
    _unweighed_modes,
    _left_out_draws,
    _prior_of_an_update,
    _unsettled_training,
    _unsettled_chains,
    _uncalibrated,
    _missing_density,
    _wrong_moments,
    _lost_tail,
    _lack_of_power,
    _unlike_scores,
    _loose_objective,
    _lost_images,
    _lost_modes,
)


def has_power(check: MomentCheck, policy: VerdictPolicy = VERDICT) -> bool:
    """Return whether a check would have seen every error that leads to "do not trust"."""
    mean, sd = check.resolution
    return mean <= policy.mean.distrust and sd <= policy.sd.distrust


def beyond(check: MomentCheck) -> str:
    """Describe the errors that a check cannot see."""
    mean, sd = check.resolution.mean, check.resolution.sd
    of_sds = f"a factor of {sd:.2f}" if math.isfinite(sd) else "any size"
    return f"below {mean:.2g} sd in means or of {of_sds} in sds"
