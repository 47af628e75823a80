# SPDX-License-Identifier: Apache-2.0
"""Stein's identities, importance weights and short HMC: what they measure, when they are silent.

Of a Gaussian guide for a Gaussian posterior all of it is known.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from pyro_implicit.diagnostics.checks import (
    drift_check,
    importance_check,
    stein_by_site,
    stein_check,
)
from pyro_implicit.diagnostics.moments import (
    CollapsedError,
    _Tests,
    halves,
    moment_errors,
    whiten_draws,
)
from pyro_implicit.diagnostics.verdict import Diagnosis
from pyro_implicit.ops import LogWeights

pytestmark = pytest.mark.usefixtures("double")

NUM = 2000


class Gaussian:
    """A posterior with correlations, on scales from 0.01 to 100."""

    def __init__(self, dim: int) -> None:
        generator = torch.Generator().manual_seed(1)
        mix = torch.eye(dim) + 0.5 * torch.randn(dim, dim, generator=generator)
        self.factor = torch.logspace(-2, 2, dim).unsqueeze(-1) * mix
        self.loc = torch.arange(1.0, dim + 1)
        self.precision = torch.linalg.inv(self.factor @ self.factor.mT)

    def log_prob(self, u):
        offset = u - self.loc
        return -0.5 * (offset @ self.precision * offset).sum(-1)

    def score(self, u):
        return -(u - self.loc) @ self.precision

    def guide(self, shift: float = 0.0, scale: float = 1.0, num: int = NUM):
        """Draws off by so many sds along one direction, or so many times too wide; log weights."""
        noise = torch.randn(num, len(self.loc))
        sds = torch.ones_like(self.loc)
        sds[0] = scale
        white = noise * sds
        white[:, 0] += shift
        log_weights = -0.5 * white.square().sum(-1) + 0.5 * noise.square().sum(-1)
        return self.loc + white @ self.factor.mT, log_weights


def run(name: str, target: Gaussian, draws, log_weights):
    whitened = whiten_draws(draws)
    if name == "stein":
        return stein_check(whitened, target.score(draws))
    if name == "drift":
        return drift_check(whitened, target.log_prob)
    return importance_check(whitened, LogWeights(log_weights))


@pytest.mark.parametrize("name", ["stein", "drift", "importance"])
@pytest.mark.parametrize("dim", [1, 12])
def test_silent_for_the_posterior(name, dim):
    target = Gaussian(dim)
    for seed in range(3):
        torch.manual_seed(seed)
        draws, _ = target.guide()
        found = run(name, target, draws, 0.1 * torch.randn(NUM))  # weights of a noisy density
        assert found.mean_error == 0
        assert found.sd_ratios == (1.0, 1.0)


@pytest.mark.parametrize("scale", [0.7, 1.4])
@pytest.mark.parametrize("name", ["stein", "drift", "importance"])
@pytest.mark.parametrize("dim", [1, 12])
def test_measures_the_standard_deviation(name, dim, scale):
    """Along a direction that is no coordinate; the other end stays silent."""
    target = Gaussian(dim)
    low, high = run(name, target, *target.guide(scale=scale)).sd_ratios
    # The directions that half of the draws suggest are a little off: the errors are the least ones.
    assert (low if scale < 1 else high) == pytest.approx(scale, rel=0.13)
    assert (high if scale < 1 else low) == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("name", ["stein", "drift", "importance"])
@pytest.mark.parametrize("dim", [1, 12])
def test_measures_the_mean(name, dim):
    target = Gaussian(dim)
    found = run(name, target, *target.guide(shift=0.5))
    assert found.mean_error == pytest.approx(0.5, abs=0.13)
    assert found.sd_ratios == pytest.approx((1.0, 1.0), abs=0.1)


@pytest.mark.parametrize("name", ["stein", "drift", "importance"])
def test_ten_per_cent_are_seen(name):
    torch.manual_seed(0)
    target = Gaussian(2)
    assert run(name, target, *target.guide(scale=0.88, num=4000)).sd_ratios[0] < 0.95


@pytest.mark.parametrize("name", ["stein", "drift"])
def test_mean_field_of_a_correlated_posterior(name):
    """The best mean-field guide of correlation r has ratios sqrt(1 - r) and sqrt(1 + r)."""
    torch.manual_seed(0)
    posterior = MultivariateNormal(torch.zeros(2), torch.tensor([[1.0, 0.99], [0.99, 1.0]]))
    precision = posterior.precision_matrix
    draws = torch.randn(NUM, 2) * precision.diagonal().rsqrt()
    whitened = whiten_draws(draws)
    low, high = (
        stein_check(whitened, -draws @ precision)
        if name == "stein"
        else drift_check(whitened, posterior.log_prob)
    ).sd_ratios
    assert low == pytest.approx(math.sqrt(0.01), rel=0.2)
    assert high == pytest.approx(math.sqrt(1.99), rel=0.2)


class Funnel:
    """v ~ N(0, 3^2), nine x ~ N(0, e^v), and draws of it without the neck."""

    def log_prob(self, u):
        v, x = u[:, 0], u[:, 1:]
        return -v.square() / 18 - 4.5 * v - 0.5 * (x.square().sum(-1) * (-v).exp())

    def score(self, u):
        v, x = u[:, :1], u[:, 1:]
        squares = (x.square() * (-v).exp()).sum(-1, keepdim=True)
        return torch.cat([-v / 9 - 4.5 + 0.5 * squares, -x * (-v).exp()], -1)

    def draws(self, least: float, num: int = 1000):
        v = 3 * torch.randn(20 * num, 1)
        v = v[v[:, 0] > least][:num]
        return torch.cat([v, (0.5 * v).exp() * torch.randn(num, 9)], -1)


def test_heavy_tails_raise_no_false_alarm():
    for seed in range(5):
        torch.manual_seed(seed)
        target = Funnel()
        draws = target.draws(-math.inf)
        drift = drift_check(whiten_draws(draws), target.log_prob)
        stein = stein_check(whiten_draws(draws), target.score(draws))
        for found in (drift, stein):
            assert found.mean_error == 0 and found.sd_ratios == (1.0, 1.0)
        assert stein.kernel.p_value > 0.01


def test_a_lost_neck_is_seen():
    torch.manual_seed(0)
    target = Funnel()
    draws = target.draws(-3.0, 10_000)
    assert stein_check(whiten_draws(draws), target.score(draws)).sd_ratios[0] < 0.92


def test_drift_survives_the_edge_of_the_domain():
    """Beyond 0 there is no density: such steps are rejected."""
    torch.manual_seed(0)

    def log_prob(u):
        return torch.where(u > 0, u.log() - u, -math.inf).sum(-1)

    draws = torch.distributions.Gamma(2.0, 1.0).sample((1000, 2))
    found = drift_check(whiten_draws(draws), log_prob)
    assert found.mean_error == 0 and 0.5 < found.acceptance < 1


def test_whitening():
    torch.manual_seed(0)
    target = Gaussian(3)
    draws, _ = target.guide()
    scores = target.score(draws)
    whitened = whiten_draws(draws)
    white, frame = whitened.white, whitened.frame
    torch.testing.assert_close(torch.cov(white.mT), torch.eye(3))
    torch.testing.assert_close(frame, white.mT @ (draws - draws.mean(0)) / (NUM - 1))
    torch.testing.assert_close(whitened.unwhiten(white), draws)
    # The chain rule, for draws = loc + white @ frame.
    torch.testing.assert_close(whitened.scores(scores), scores @ frame.mT)
    standard = (draws - draws.mean(0)) / draws.std(0)
    torch.testing.assert_close(white @ whitened.axes, standard)
    few = whitened.first(7)
    torch.testing.assert_close(few.unwhiten(few.white), draws[:7])


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("size", [0.0, 0.1, 1.0, 1e30])
@pytest.mark.parametrize("kind", ["equal", "rounding", "coordinate", "plane"])
@pytest.mark.parametrize("dim", [1, 3])
def test_collapsed_draws(kind, size, dim, dtype):
    torch.manual_seed(0)
    draws = torch.full((200, dim), size, dtype=dtype)
    noise = torch.randn(200, dim, dtype=dtype)
    if kind == "rounding":
        ulps = torch.randint(-1, 2, (200, dim)).to(dtype)
        draws = draws * (1 + torch.finfo(dtype).eps * ulps)
    elif kind == "coordinate":
        draws = torch.cat([noise[:, 1:], draws[:, :1]], -1)
    elif kind == "plane":
        draws = draws + size * (noise - noise.mean(-1, keepdim=True))
    with pytest.raises(CollapsedError, match=f"{dim} latents lie on a hyperplane.*Cure: more dr"):
        whiten_draws(draws)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_whitening_knows_no_units(size):
    """Squares of such draws leave the range of float32."""
    torch.manual_seed(0)
    draws = torch.randn(200, 2) @ torch.tensor([[1.0, 0.9], [0.0, 0.1]])
    expected = whiten_draws(draws)
    found = whiten_draws((size * draws).float())
    torch.testing.assert_close(found.white, expected.white.float(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.frame / size, expected.frame.float(), rtol=1e-3, atol=1e-4)


def test_numbers_out_of_range_are_errors_without_end():
    noise = torch.randn(100, 2)
    for wild in (1e80 * noise, noise / 0.0, math.nan * noise):
        products = [(1.0, wild, noise)]
        errors = moment_errors(halves(noise, products, torch.eye(2)), 0.01)
        assert errors.mean_error == math.inf and errors.sd_ratios == (1.0, math.inf)
        errors = moment_errors(halves(wild, [(1.0, noise, noise)], torch.eye(2)), 0.01)
        assert errors.mean_error == math.inf and errors.sd_ratios[1] == math.inf


def test_drift_takes_chunks():
    """Each chain moves on its own; only the step is of all."""
    torch.manual_seed(0)
    target = Gaussian(2)
    draws = whiten_draws(target.guide(scale=0.7)[0])
    sizes = []

    def log_prob(u):
        sizes.append(len(u))
        return target.log_prob(u)

    low, _ = drift_check(draws, log_prob, num_transitions=10, chunk_size=300).sd_ratios
    assert set(sizes) == {300, 200} and low == pytest.approx(0.7, rel=0.13)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_cut_tail_fills_beyond_all_draws(seed):
    """Of tails as heavy as these no variance can be told, but where the draws end is plain."""
    torch.manual_seed(seed)
    target = torch.distributions.StudentT(2.0)
    draws = target.sample((8000, 2))
    near = draws[draws.square().sum(-1) < draws.square().sum(-1).quantile(0.9)]

    def check(draws):
        whitened = whiten_draws(draws)
        log_prob = lambda u: target.log_prob(u).sum(-1)  # noqa: E731
        return drift_check(whitened.first(300), log_prob, others=whitened.white[300:])

    assert check(draws).escaped == 0.0
    cut = check(near)
    assert 0.03 < cut.escaped < 0.15 and cut.sd_ratios == (1.0, 1.0)
    whole = Diagnosis(300, 2, drift=cut, settled=True)
    assert whole.verdict == ("do not trust" if cut.escaped > 0.05 else "check")
    assert f"{cut.escaped:.1%} escaped" in str(whole) and "a tail is lost" in str(whole)
    assert "refine from elsewhere" in whole.cures[0]  # chains, not a guide, are at fault


@pytest.mark.parametrize("seed", [0, 1])
def test_small_errors_of_many_sds_are_no_lost_tail(seed):
    """In 300 dimensions 5 % in all sds move all distances by more than they vary."""
    torch.manual_seed(seed)
    whitened = whiten_draws(0.95 * torch.randn(830, 304))
    log_prob = lambda u: -0.5 * u.square().sum(-1)  # noqa: E731
    found = drift_check(whitened.first(400), log_prob, 13, others=whitened.white[400:])
    assert found.escaped == 0.0


def test_directions_are_tested_on_other_draws_than_they_come_from():
    """Else pure noise in many dimensions would look like an error."""
    alarms = 0
    for seed in range(30):
        torch.manual_seed(seed)
        noise, other = torch.randn(2, 200, 50)
        errors = moment_errors(halves(noise, [(1.0, noise, other)], torch.eye(50)), 0.01)
        alarms += errors[:3] != (0.0, (1.0, 1.0), ())
    assert alarms <= 3


def test_float32():
    torch.manual_seed(0)
    target = Gaussian(3)
    draws, log_weights = target.guide(scale=0.7)
    scores = target.score(draws)
    whitened, single_whitened = whiten_draws(draws), whiten_draws(draws.float())
    single = stein_check(single_whitened, scores.float())
    assert single.sd_ratios == pytest.approx(stein_check(whitened, scores).sd_ratios, rel=1e-3)
    single = importance_check(single_whitened, LogWeights(log_weights.float()))
    expected = importance_check(whitened, LogWeights(log_weights))
    assert single.sd_ratios == pytest.approx(expected.sd_ratios, rel=1e-3)


@pytest.mark.parametrize("name", ["stein", "drift", "importance"])
def test_says_which_coordinate(name):
    """In a frame with correlations, on scales from 0.01 to 100."""
    torch.manual_seed(0)
    scales = torch.tensor([0.01, 1.0, 100.0])
    factor = scales.unsqueeze(-1) * torch.linalg.cholesky(torch.eye(3) + 0.5 - 0.5 * torch.eye(3))
    posterior = MultivariateNormal(torch.zeros(3), scale_tril=factor)
    moved = posterior.loc + torch.tensor([0.0, 0.4, 0.0]) * posterior.stddev
    guide = MultivariateNormal(moved, scale_tril=factor)
    draws = guide.sample((8000,))
    faults = {
        "stein": lambda w: stein_check(w, -draws @ posterior.precision_matrix),
        "drift": lambda w: drift_check(w.first(2000), posterior.log_prob),
        "importance": lambda w: importance_check(
            w, LogWeights(posterior.log_prob(draws) - guide.log_prob(draws))
        ),
    }[name](whiten_draws(draws)).faults
    (worst, *_) = (fault for fault in faults if fault.kind == "mean")
    if name == "stein":  # the mean given the others
        assert any(fault.terms == ((1, 1.0),) for fault in faults)
    else:
        # A shift of one of three correlated latents is larger still in the direction between them.
        assert worst.terms[0][0] == 1 and worst.error > 0.35
        by_axis = {f.terms[0][0]: f.error for f in faults if len(f.terms) == 1}
        assert by_axis[1] == pytest.approx(0.4, abs=0.08) and 0 not in by_axis


def test_names_the_directions_of_a_correlation():
    """A mean-field guide is too narrow along the sum, and too wide along the difference."""
    torch.manual_seed(0)
    precision = MultivariateNormal(
        torch.zeros(3), torch.tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.0]])
    ).precision_matrix
    draws = torch.randn(4000, 3) * precision.diagonal().rsqrt()
    narrow, wide = (
        fault
        for fault in stein_check(whiten_draws(draws), -draws @ precision).faults
        if len(fault.terms) == 2
    )
    if narrow.error > wide.error:
        narrow, wide = wide, narrow
    assert {i for i, _ in narrow.terms} == {i for i, _ in wide.terms} == {0, 1}
    assert narrow.terms[1][1] == pytest.approx(1.0, abs=0.1)
    assert wide.terms[1][1] == pytest.approx(-1.0, abs=0.1)
    assert narrow.error == pytest.approx(0.1**0.5, rel=0.1)
    assert wide.error == pytest.approx(1.9**0.5, rel=0.1)


def test_many_dimensions():
    """Scaled by coordinate, correlations left as they are; the worst directions by Lanczos."""
    torch.manual_seed(0)
    dim = 310
    draws = torch.randn(10_000, dim)
    draws[:, 7] *= 0.5
    draws[:, 9] += 0.5
    scale = torch.logspace(-2, 2, dim)
    whitened = whiten_draws(draws * scale)
    assert whitened.axes is None
    torch.testing.assert_close(whitened.unwhiten(whitened.white), draws * scale)
    # The posterior has correlation 0.9 between two others, at which no coordinate looks wrong.
    score = -draws.clone()
    a, b = draws[:, 20], draws[:, 21]
    width = (1 - 0.9**2) ** 0.5
    a, b = a * width, b * width
    draws[:, 20], draws[:, 21] = a, b
    score[:, 20], score[:, 21] = (0.9 * b - a) / width**2, (0.9 * a - b) / width**2
    found = stein_check(whiten_draws(draws * scale), score / scale)
    singles = {(f.kind, f.terms[0][0]): f.error for f in found.faults if len(f.terms) == 1}
    assert singles == {
        ("sd", 7): pytest.approx(0.5, rel=0.1),
        ("mean", 9): pytest.approx(0.5, rel=0.2),
    }
    (pair,) = (f for f in found.faults if len(f.terms) > 1 and f.error > 1)
    assert {index for index, _ in pair.terms[:2]} == {20, 21}
    assert pair.error == pytest.approx(1.9**0.5, rel=0.1)


@pytest.mark.parametrize("seed", range(2))
def test_the_kernel_test_by_site(seed):
    """Of one wrong site among many latents that are right."""
    torch.manual_seed(seed)
    u = torch.randn(1000, 60)
    scores = -u
    scores[:, 0] = -2 * u[:, 0].pow(3)  # a quartic well, of wider shoulders
    sizes = {"odd": 1, "many": 50, "rest": 9}
    (first, p_value), *others = stein_by_site(u, scores, sizes)
    assert first == "odd" and p_value < 0.003
    assert all(p > 0.01 for _, p in others) and len(others) == 2


@pytest.mark.parametrize(("loc", "sd"), [(2000.0, 2e-3), (1e6, 1.0)])
def test_draws_of_a_few_units_in_the_last_place_have_their_moments(loc, sd):
    torch.manual_seed(0)
    exact = loc + sd * torch.randn(2000, 2, dtype=torch.double)
    draws = exact.float()
    whitened = whiten_draws(draws)
    assert all(part.dtype == torch.float32 for part in whitened if part is not None)
    covariance = whitened.white.double().mT.cov()
    torch.testing.assert_close(covariance, torch.eye(2, dtype=torch.double), rtol=0, atol=1e-3)
    spread = whitened.frame.double().norm(dim=0)
    torch.testing.assert_close(spread, exact.std(0), rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_draws_and_copies_have_collapsed(dtype):
    torch.manual_seed(0)
    draws = torch.randn(500, 3, dtype=dtype)
    constant = draws.clone()
    constant[:, 1] = 0.1 * constant[:1, 1]
    copied = draws.clone()
    copied[:, 2] = 3 * copied[:, 0] - copied[:, 1]
    for lying in (constant, copied):
        with pytest.raises(CollapsedError, match="hyperplane") as caught:
            whiten_draws(lying)
        assert ("float64" in str(caught.value)) == (dtype == torch.float32)


@pytest.mark.parametrize(("dim", "number"), [(60, 300), (100, 400), (60, 150)])
def test_exact_draws_in_many_dimensions(dim, number):
    """The covariance of few draws whitens these draws better than any others."""
    torch.manual_seed(3)
    factor = torch.randn(dim, dim, dtype=torch.float64) / dim**0.5 + torch.eye(dim)
    precision = torch.cholesky_inverse(torch.linalg.cholesky(factor @ factor.mT))
    for _ in range(6):
        draws = torch.randn(number, dim, dtype=torch.float64) @ factor.mT
        whitened = whiten_draws(draws)
        found = stein_check(whitened, -draws @ precision)
        assert (found.mean_error, found.sd_ratios) == (0.0, (1.0, 1.0))
        part = whitened.first(number // 2)

        def log_prob(u):
            return -0.5 * ((u @ precision) * u).sum(-1)

        moved = drift_check(part, log_prob, 5, others=whitened.white[number // 2 :])
        assert (moved.mean_error, moved.sd_ratios, moved.escaped) == (0.0, (1.0, 1.0), 0.0)


@pytest.mark.parametrize("scale", [0.7, 1.4])
def test_wrong_draws_in_many_dimensions(scale):
    """One direction that is no coordinate is wrong, and found among 60 by 400 draws."""
    torch.manual_seed(0)
    dim = 60
    direction = torch.nn.functional.normalize(torch.ones(dim, 1, dtype=torch.float64), dim=0)
    draws = torch.randn(1200, dim, dtype=torch.float64)
    draws = draws + (scale - 1) * draws @ direction @ direction.mT
    low, high = stein_check(whiten_draws(draws), -draws).sd_ratios
    # The direction comes from the other half of the draws, so it is not quite the worst.
    assert low == pytest.approx(min(scale, 1.0), rel=0.15)
    assert high == pytest.approx(max(scale, 1.0), rel=0.15)


def test_skewed_terms_do_not_look_significant():
    """Means of squares are too small more often than a normal quantile says."""
    torch.manual_seed(0)
    found = 0
    for _ in range(200):
        terms = torch.randn(100, 20).square() - 1
        tests = _Tests(3.0, 20, odd=False)
        tests.add(terms)
        found += int((tests.found != 0).sum())
    assert found < 30  # 10.8 of 4,000 for normal terms; 66 without the correction
