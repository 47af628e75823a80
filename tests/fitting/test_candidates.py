# SPDX-License-Identifier: Apache-2.0
"""How candidates are made, weighed and chosen."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints

from pyro_implicit.density import Target, find_modes
from pyro_implicit.density.modes import Modes
from pyro_implicit.fitting import (
    Candidate,
    ChoicePolicy,
    CorrectionPolicy,
    candidates,
    choose,
    exact_guide,
    frame_of_draws,
    weigh,
)
from pyro_implicit.fitting.candidates import (
    _joint_by_weights,
    _JointDraws,
    corrected_draws,
    exact_log_weights,
    guide_of,
    matched_modes,
    reliability,
)
from pyro_implicit.fitting.policy import DEFAULT
from pyro_implicit.ops import LogWeights
from pyro_implicit.ops.quadrature import normal_draws

pytestmark = pytest.mark.usefixtures("double")


def normal():
    pyro.sample("x", dist.Normal(torch.zeros(2), torch.tensor([1.0, 3.0])).to_event(1))


def test_the_start_is_the_gaussian():
    density = Target(normal)
    guide = exact_guide(normal, find_modes(density))
    found = weigh("start", density, guide)
    assert found.bound == pytest.approx(0.0, abs=2e-3) and found.gap < 2e-3
    assert found.draws.shape == (10_000, 2) and len(found.log_weights) == 990
    torch.testing.assert_close(found.draws.std(0), torch.tensor([1.0, 3.0]), rtol=0.03, atol=0)
    with torch.no_grad():
        guide.loc.add_(1.0)
    found.restore()
    assert (guide.loc == 0).all()


def test_the_policy_sets_the_numbers_of_draws():
    density = Target(normal)
    policy = ChoicePolicy(num_weighed=50, num_kept=7, trimmed=0.1)
    found = weigh("start", density, exact_guide(normal, find_modes(density)), policy=policy)
    assert found.draws.shape == (7, 2) and len(found.log_weights) == 45


def spied(monkeypatch):
    """A density, its guide, and the numbers of points at which it is evaluated."""
    sizes, log_prob = [], Target.log_prob

    def spy(self, latent):
        sizes.append(len(latent))
        return log_prob(self, latent)

    density = Target(normal)
    guide = exact_guide(normal, find_modes(density))
    monkeypatch.setattr(Target, "log_prob", spy)
    return density, guide, sizes


def test_few_draws_are_evaluated_together(monkeypatch):
    density, guide, sizes = spied(monkeypatch)
    monkeypatch.setattr(candidates, "DRAWS_AT_ONCE", 20)
    weigh("start", density, guide)
    policy = CorrectionPolicy(50, num_weighed_again=60)
    reliability(guide, density, policy)
    corrected_draws(guide, density, 10, 0.5, policy)
    assert max(sizes) == 20 and sum(sizes) > 2_000


@pytest.mark.parametrize("efficiency, number", [(0.5, 500), (0.8, 313)])
def test_two_effective_draws_for_each_resampled_draw(efficiency, number, monkeypatch):
    density, guide, sizes = spied(monkeypatch)
    corrected_draws(guide, density, 100, efficiency, CorrectionPolicy(least_proposals=10))
    assert sum(sizes) == number


def heavy():
    pyro.sample("x", dist.StudentT(5.0, torch.zeros(2), 1.0).to_event(1))


@pytest.mark.parametrize("num_modes", [1, 2])
@pytest.mark.parametrize("sobol", [False, True])
def test_wide_noise_has_its_density(num_modes, sobol):
    """The guide is about a normal of scale 2, or one of a quarter and another one at 1."""
    policy, number = CorrectionPolicy(wide_shares=(0.2, 0.1), wide_scales=(3.0, 5.0)), 4096
    locs = torch.tensor([[0.0, 0.0], [1.0, 1.0]])[:num_modes]
    modes = Modes(locs, 2 * torch.eye(2).expand(num_modes, 2, 2), torch.zeros(num_modes))
    guide, noise, weights_of = exact_guide(heavy, modes), None, torch.ones(1)
    if num_modes == 2:
        weights_of = torch.tensor([0.25, 0.75])
        guide.log_weights = weights_of.log()
    if sobol:
        noise = normal_draws(number, 4, locs)
    options = {"noise": noise, "wide": policy, "log_prob": lambda points: points[:, 0] * 0}
    draws, weights = exact_log_weights(Target(heavy), guide, number, **options)
    shares, scales = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([1.0, 3.0, 5.0])
    parts = []
    components = guide.components if num_modes == 2 else [guide]
    for one, weight in zip(components, weights_of, strict=True):
        transform = one.get_transform()
        normal_noise = transform.inv(draws)
        log_det = transform.log_abs_det_jacobian(normal_noise, draws)
        radius = normal_noise.square().sum(-1, keepdim=True)
        density = weight * shares * (-0.5 * radius / scales**2).exp() / (2 * math.pi * scales**2)
        parts.append(density.sum(-1).log() - log_det)
    torch.testing.assert_close(-weights.values, torch.stack(parts).logsumexp(0))
    variance = 4 * (shares @ scales.square()) + weights_of.prod() * (num_modes == 2)
    assert (draws.var(0) / variance - 1).abs().max() < 0.2  # its kurtosis is about 9
    if sobol:  # random draws are off by 0.07
        assert (draws.mean(0) - weights_of @ locs).abs().max() < 0.03


def test_draws_reach_tails_that_the_guide_lacks():
    """A standard normal for a t distribution with five degrees of freedom, of sd 1.29."""
    modes = Modes(torch.zeros(1, 2), torch.eye(2)[None], torch.zeros(1))
    guide, target = exact_guide(heavy, modes), Target(heavy)
    draws = corrected_draws(guide, target, 20_000, 0.8)["x"]
    # Without wider noise: 1.15.
    assert (draws.std(0) / (5 / 3) ** 0.5 - 1).abs().max() < 0.04


def test_a_gaussian_with_the_moments_of_weighted_draws():
    density = Target(normal)
    points = torch.randn(400, density.latent_dim)
    weights = LogWeights(0.5 * torch.randn(400))
    found = guide_of(density, matched_modes(points, weights))
    shares, transform = weights.shares.to(points), found.get_transform()
    loc = transform(torch.zeros(1, 2))  # the generator is almost the identity
    factor = (transform(torch.eye(2)) - loc).T
    near = {"rtol": 0.01, "atol": 0.01}
    torch.testing.assert_close(loc[0], shares @ points, **near)
    covariance = points.T.cov(correction=0, aweights=shares)
    torch.testing.assert_close(factor @ factor.T, covariance, **near)
    few = CorrectionPolicy(matched_per_dim=weights.effective_sample_size)
    assert matched_modes(points, weights, policy=few) is None


def test_a_mixture_of_weighted_draws_has_their_shares():
    points = 0.5 * torch.randn(400, 2)
    points[:40] += 20.0
    weights = LogWeights(torch.zeros(400))
    torch.manual_seed(1)  # the first means lie in both clusters
    found = matched_modes(points, weights, 2)
    shares, factors = guide_of(Target(normal), found).log_weights.exp(), found.scale_tril
    assert sorted(shares.tolist()) == pytest.approx([0.1, 0.9], abs=0.003)
    assert factors.shape == (2, 2, 2)
    few = CorrectionPolicy(matched_per_dim=400 / 2 / 1.9)  # for one and a half components
    assert len(matched_modes(points, weights, 8, few).loc) == 1


@pytest.mark.parametrize(("num_modes", "num_fits"), [(1, 2), (2, 1)])
def test_a_mixture_of_one_mode_is_fitted_again_to_its_weighted_draws(num_modes, num_fits):
    """If weights are poor. A fit to the draws of two modes might lose one."""
    torch.manual_seed(0)
    loc = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    modes = Modes(loc, 0.5 * torch.eye(2).expand(2, 2, 2), torch.zeros(2))
    target, log_probs = Target(heavy), []

    class Marginal(SimpleNamespace):
        policy = DEFAULT.marginal

        def draw(self, rest):
            log_probs.append(target.log_prob(rest))
            return rest, log_probs[-1], torch.zeros(len(rest))

    found = SimpleNamespace(
        target=target,
        guide=guide_of(target, modes),
        correction=0.9,
        num_modes=num_modes,
        policy=SimpleNamespace(correction=CorrectionPolicy()),
    )
    latent, known = _joint_by_weights(found, _JointDraws(None, Marginal()), 500)
    fits = [one for one in log_probs if len(one) == 500]  # the others are of repeated points
    assert latent.shape == (500, 2) and len(fits) == num_fits
    assert known["settled"] == (num_modes == 1) and bool(known["doubts"]) == (num_modes == 2)


def test_the_lowest_hundredth_is_left_out(monkeypatch):
    values = torch.arange(1000.0)
    values[torch.randperm(1000)[:10]] = torch.tensor([-1e9, -math.inf] * 5)
    kept = values[values >= 0]
    assert len(kept) == 990

    def log_weights(guide, target, num_samples):
        return LogWeights(values[torch.randperm(1000)])

    monkeypatch.setattr("pyro_implicit.fitting.candidates._log_weights", log_weights)
    density = Target(normal)
    found = weigh("any", density, exact_guide(normal, find_modes(density)))
    assert found.bound == pytest.approx(kept.mean().item())
    assert found.gap == pytest.approx(0.5 * kept.var().item())
    values[values.argmax()] = math.nan  # is no bound
    assert weigh("any", density, found.guide).bound == -math.inf


def test_frames_of_draws():
    draws = torch.randn(500, 3) @ torch.tensor([[1.0, 2.0, 0.0], [0.0, 1e-6, 5.0], [0.0, 0.0, 1e4]])
    frame = frame_of_draws(torch.cat([draws, torch.full((3, 3), math.nan)]))
    covariance = draws.T.cov()
    torch.testing.assert_close(frame.loc, draws.mean(0))
    torch.testing.assert_close(frame.scale_tril @ frame.scale_tril.T, covariance, rtol=1e-9, atol=0)
    assert torch.equal(frame.scale_tril, frame.scale_tril.tril())
    assert (frame.scale_tril.diagonal() > 0).all()
    single = frame_of_draws(draws[:, :1])  # its covariance has no dimensions in torch
    torch.testing.assert_close(single.scale_tril, draws[:, :1].std(0, keepdim=True))


def energy(x, y):
    return -((x**2 + y - 4) ** 2) / 8 - ((x + y**2 - 4) ** 2) / 8 - 0.05 * (x**2 + y**2)


def four_arms():
    x = pyro.sample("x", dist.ImproperUniform(constraints.real, (), ()))
    y = pyro.sample("y", dist.ImproperUniform(constraints.real, (), ()))
    pyro.factor("energy", energy(x, y))


def by_quadrature():
    """Draws of the density, and the mass of its mode below the others."""
    line = torch.linspace(-6, 6, 601)
    x, y = (part.flatten() for part in torch.meshgrid(line, line, indexing="ij"))
    shares = energy(x, y).softmax(0)
    chosen = shares.multinomial(5000, replacement=True)
    is_lost = (x < 0) & (y < 0)
    return torch.stack([x, y], -1)[chosen], is_lost[chosen], shares[is_lost].sum().item()


def candidate(name, bound, draws):
    log_weights = LogWeights(bound + torch.tensor([-1.0, 1.0]))
    return Candidate(name, None, log_weights, draws, [0.0])


@pytest.mark.parametrize("seed", range(3))
def test_a_guide_that_lost_a_mode_does_not_win(seed):
    """A tenth of the mass, at a bound that is .09 higher."""
    pyro.set_rng_seed(seed)
    density = Target(four_arms)
    modes = find_modes(density)
    assert len(modes.loc) >= 2
    draws, is_lost, mass = by_quadrature()
    assert mass == pytest.approx(0.113, abs=0.002)
    covers = candidate("mixture", 1.70, draws)
    loses = candidate("semi-implicit", 1.79, draws[~is_lost])
    chosen, why = choose(density, [covers, loses], modes)
    assert chosen is covers and "semi-implicit has a higher bound, but misses modes" in why
    # Of two that cover all, the bound decides, and the order does not.
    also = candidate("semi-implicit", 1.79, draws[::2])
    assert choose(density, [covers, also], modes)[0] is also
    assert choose(density, [loses, covers], modes)[0] is covers
    assert choose(density, [loses], modes)[0] is loses


def test_a_mode_of_a_thousandth_does_not_count():
    def model():
        x = pyro.sample("x", dist.ImproperUniform(constraints.real, (), ()))
        parts = [dist.Normal(-1.5, 0.1).log_prob(x), dist.Normal(1.5, 0.1).log_prob(x) - 7.0]
        pyro.factor("modes", torch.logaddexp(*parts))

    density = Target(model)
    modes = find_modes(density)
    assert len(modes.loc) == 2
    draws = -1.5 + 0.1 * torch.randn(2000, 1)
    loses = candidate("semi-implicit", 0.0, draws)
    covers = candidate("mixture", -0.1, torch.cat([draws, -draws[:2]]))
    assert choose(density, [covers, loses], modes)[0] is loses


def test_ties_and_bounds_that_are_none():
    density = Target(normal)
    modes = find_modes(density)
    draws = torch.randn(10, 2)

    def weighed(bound, sd, losses=()):
        """Of a hundred log-weights, so that the bound has a tenth of their sd as its error."""
        spread = torch.linspace(-1.0, 1.0, 100)
        log_weights = LogWeights(bound + sd * spread / spread.std())
        return Candidate("gaussian", None, log_weights, draws, list(losses))

    trained = weighed(0.0, 0.1, [0.0])
    assert choose(density, [weighed(0.0005, 0.0), trained], modes)[0] is trained
    # Two errors of the difference of two are .028.
    assert choose(density, [weighed(0.025, 0.1), trained], modes)[0] is trained
    better = weighed(0.032, 0.1)
    assert choose(density, [better, trained], modes)[0] is better
    broken = candidate("semi-implicit", math.nan, draws)
    assert broken.bound == -math.inf and broken.gap == math.inf
    assert choose(density, [broken, trained], modes)[0] is trained
