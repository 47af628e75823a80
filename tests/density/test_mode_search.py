# SPDX-License-Identifier: Apache-2.0
"""The search for modes, on densities whose modes are known."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from pyro.ops.tensor_utils import matvecmul
from torch import Tensor

from pyro_implicit.density import mode_gaps
from pyro_implicit.density import mode_search as module
from pyro_implicit.density.checks.numerics import finite_log_prob, heights_of
from pyro_implicit.density.cost import estimated_seconds, nearby
from pyro_implicit.density.mode_gaps import dip, separate
from pyro_implicit.density.mode_search import find_modes, seconds_of_climb
from pyro_implicit.density.modes import Modes, antithetic_noise, gaussian_elbo
from pyro_implicit.density.policy import SEARCH
from pyro_implicit.density.target import Target
from pyro_implicit.runtime.clock import TimeLimit

pytestmark = pytest.mark.usefixtures("double")


def target(log_density, size=1):
    """A density of a flat latent vector, whose starts lie between -2 and 2."""

    def model():
        x = pyro.sample("x", dist.ImproperUniform(constraints.real_vector, (), (size,)))
        pyro.factor("density", log_density(x))

    return Target(model)


def mixture(locs, scales, weights):
    """Of isotropic Gaussians; ``locs`` ``(num_modes, size)``."""
    locs, scales, weights = map(torch.as_tensor, (locs, scales, weights))
    parts = dist.Normal(locs, scales.unsqueeze(-1)).to_event(1)
    return target(lambda x: (parts.log_prob(x) + weights.log()).logsumexp(-1), locs.shape[-1])


def covariance(modes) -> Tensor:
    return modes.scale_tril @ modes.scale_tril.mT


def test_a_gaussian_of_any_scale_and_correlation():
    scale = torch.tensor([1e-3, 1.0, 1e5, 30.0])
    correlation = torch.eye(4)
    correlation[0, 2] = correlation[2, 0] = 0.9999
    correlation[1, 3] = correlation[3, 1] = -0.9
    expected = scale[:, None] * correlation * scale
    loc = torch.tensor([0.5, -3.0, 2e5, 1.0])
    root = torch.linalg.cholesky(correlation)

    def log_density(x):
        noise = torch.linalg.solve_triangular(root, ((x - loc) / scale)[:, None], upper=False)
        return -0.5 * noise.square().sum() + 7.0

    modes = find_modes(target(log_density, 4))
    assert modes.loc.shape == (1, 4) and modes.scale_tril.shape == (1, 4, 4)
    # Within 0.1 sd of the top, where a path ends
    assert torch.linalg.solve_triangular(
        scale[:, None] * root, (modes.loc[0] - loc)[:, None], upper=False
    ).norm() < 0.1  # fmt: skip
    found = covariance(modes)[0] / (scale[:, None] * scale)
    torch.testing.assert_close(found, correlation, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(modes.scale_tril, modes.scale_tril.tril())
    assert (modes.scale_tril.diagonal(dim1=-2, dim2=-1) > 0).all()
    evidence = 7.0 + 2 * math.log(2 * math.pi) + 0.5 * torch.linalg.slogdet(expected).logabsdet
    assert modes.elbo.item() == pytest.approx(evidence.item(), abs=0.5)  # 4 sd of 256 draws


def elbo_by_draws(density, loc, root, num_draws):
    noise = antithetic_noise(loc, num_draws)
    draws = loc + matvecmul(root, noise)
    return gaussian_elbo(finite_log_prob(density, draws), noise, root)


def test_elbo_of_gaussians():
    """Against the closed form of a quadratic, and with any root of the covariance."""
    precision = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    density = target(lambda x: -0.5 * x @ precision @ x, 2)
    loc = torch.tensor([[1.0, -1.0], [0.0, 0.5]])
    root = torch.tensor([[[1.0, 0.0], [0.5, 0.3]], [[0.2, 1.0], [-2.0, 0.1]]])
    expected = [
        -0.5 * (m @ precision @ m + (precision @ f @ f.T).trace())
        + dist.MultivariateNormal(m, f @ f.T).entropy()
        for m, f in zip(loc, root, strict=True)
    ]
    found = elbo_by_draws(density, loc, root, 40_000)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=0.05)
    # Draws come in pairs: a linear log-density has no noise.
    density = target(lambda x: 3 * x.sum(), 2)
    entropy = torch.stack(
        [dist.MultivariateNormal(m, f @ f.T).entropy() for m, f in zip(loc, root, strict=True)]
    )
    torch.testing.assert_close(elbo_by_draws(density, loc, root, 2), 3 * loc.sum(-1) + entropy)


def test_elbo_of_gaussians_cut_off_at_the_domain():
    density = target(lambda x: torch.where(x > 0, x, -math.inf).sum())
    loc = torch.tensor([[0.1], [50.0], [-50.0]])
    found = elbo_by_draws(density, loc, torch.ones(3, 1, 1), 100_000)
    standard = torch.distributions.Normal(0.0, 1.0)
    below, pdf = -0.1, standard.log_prob(torch.tensor(-0.1)).exp()
    inside = standard.cdf(torch.tensor(0.1))
    entropy = (math.sqrt(2 * math.pi * math.e) * inside).log() + below * pdf / (2 * inside)
    assert found[0].item() == pytest.approx((0.1 + pdf / inside + entropy).item(), abs=0.02)
    assert found[1].isfinite() and found[2] == -math.inf


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weights", [(0.3, 0.7), (0.25, 0.35, 0.4)])
def testseparate_modes_have_their_laplace_approximations(weights, seed):
    pyro.set_rng_seed(seed)
    locs = torch.tensor([[-1.5, 1.0], [1.5, 1.5], [0.0, -1.5]])[: len(weights)]
    scales = torch.tensor([0.1, 0.2, 0.15])[: len(weights)]
    modes = find_modes(mixture(locs, scales, weights))
    assert len(modes.loc) == len(weights)
    nearest = torch.cdist(modes.loc, locs).argmin(-1)
    assert sorted(nearest.tolist()) == list(range(len(weights)))
    assert ((modes.loc - locs[nearest]).norm(dim=-1) < 0.1 * scales[nearest] + 1e-3).all()
    expected = scales[nearest].square()[:, None, None] * torch.eye(2)
    torch.testing.assert_close(covariance(modes), expected, rtol=1e-3, atol=1e-6)
    # Of a Gaussian, the ELBO is the log-evidence: here the mode's weight.
    expected = torch.tensor(weights).log()[nearest]
    torch.testing.assert_close(modes.elbo, expected, rtol=0, atol=0.35)  # 4 sd


@pytest.mark.parametrize("seed", range(3))
def test_one_hump_is_one_mode(seed):
    """Two Gaussians that overlap, and a plateau with many tops of no depth."""
    pyro.set_rng_seed(seed)
    assert len(find_modes(mixture([[-0.9], [0.9]], [1.0, 1.0], [0.5, 0.5])).loc) == 1
    wavy = target(lambda x: -0.02 * (x**2).sum() + 0.3 * torch.cos(4 * x).sum())
    assert len(find_modes(wavy).loc) == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_funnel_gets_one_gaussian(seed):
    """A density without a mode: its top is at the neck's end, where the Gaussian is useless."""
    pyro.set_rng_seed(seed)

    def funnel():
        v = pyro.sample("v", dist.Normal(0.0, 3.0))
        pyro.sample("x", dist.Normal(torch.zeros(4), (v / 2).exp()).to_event(1))

    density = Target(funnel)
    modes = find_modes(density)
    assert len(modes.loc) == 1
    assert all(part.isfinite().all() for part in modes)
    # Log-evidence 0. A Gaussian down in the neck would have far less.
    assert elbo_by_draws(density, modes.loc, modes.scale_tril, 5_000).item() > -15


@pytest.mark.parametrize("seed", range(3))
def test_the_best_gaussian_of_a_path_belongs_to_the_mode_at_its_end(seed, monkeypatch):
    """In a bent funnel the density dips between the two, and one round finds everything.

    The ridge bends so much that a second Gaussian on it may count as a mode."""
    pyro.set_rng_seed(seed)

    def bent():
        v = pyro.sample("v", dist.Normal(0.0, 2.0))
        pyro.sample("x", dist.Normal(v.square().expand(4), (v / 2).exp()).to_event(1))

    density = Target(bent)
    rounds = []
    sample_prior = density.sample_prior
    monkeypatch.setattr(density, "sample_prior", lambda n: rounds.append(n) or sample_prior(n))
    modes = find_modes(density, max_gap=math.inf)
    assert modes.loc[0, 0] > -2  # the mode is at -8, in a neck with no mass
    assert len(modes.loc) <= 2 and (modes.loc[:, 0] > -4).all()
    assert rounds == [49]


def test_a_path_that_leaves_for_another_mode_hides_none():
    """The best Gaussian is at one mode, and its path ends at the other."""
    density = mixture([[-3.0], [3.0]], [1.0, 1.0], [0.5, 0.5])
    loc = torch.tensor([[-2.9], [-3.0], [3.0], [3.0]])
    found = Modes(loc, torch.ones(4, 1, 1), torch.tensor([-0.5, -0.7, -0.7, -0.7]))
    end = Modes(*(part[-1:] for part in found))
    modes, num_met = separate(density, found, end, 10.0, 16)
    assert modes.loc.flatten().tolist() == [-2.9, 3.0] and num_met.tolist() == [1, 2]


@pytest.mark.parametrize("seed", range(3))
def test_labels_switch(seed):
    """A mixture model of two exchangeable components has two mirrored modes."""
    pyro.set_rng_seed(seed)
    y = torch.cat([torch.linspace(-3.5, -2.5, 20), torch.linspace(2.5, 3.5, 20)])

    def model():
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 4.0).to_event(1))
        parts = dist.Normal(loc, 0.5).log_prob(y.unsqueeze(-1))
        pyro.factor("y", parts.logsumexp(-1).sum())

    modes = find_modes(Target(model))
    assert len(modes.loc) == 2
    torch.testing.assert_close(modes.loc[0], modes.loc[1].flip(0), rtol=0, atol=0.03)
    assert (modes.elbo[0] - modes.elbo[1]).abs() < 0.5


@pytest.mark.parametrize("seed", range(3))
def test_a_prior_whose_draws_are_all_far_away(seed):
    """No path from coefficients of some hundreds reaches that of a logistic regression."""
    row = torch.arange(15.0)
    x = torch.stack([torch.ones(15), row % 2, row // 8], -1)
    y = torch.tensor([2.0, 5, 1, 4, 2, 6, 2, 3, 4, 8, 5, 7, 3, 8, 4])

    def model():
        b = pyro.sample("b", dist.Normal(0.0, 1000.0).expand([3]).to_event(1))
        pyro.sample("y", dist.Binomial(10, logits=x @ b).to_event(1), obs=y)

    pyro.set_rng_seed(seed)
    modes = find_modes(Target(model))
    residual = y - 10 * (x @ modes.loc[0].to(x)).sigmoid()
    assert len(modes.loc) == 1
    # Half an sd; without these starts paths end at 31 to 46.
    assert (x.mT @ residual).abs().max() < 3.0


@pytest.mark.parametrize("seed", range(3))
def test_a_prior_at_whose_draws_gradients_overflow(seed):
    """More than half of the draws of Gamma(.001, .001) are the smallest number of float32."""
    y = torch.tensor(
        [[1545.0, 1440, 1440, 1520], [1595, 1630, 1515, 1635], [1490, 1605, 1510, 1560]]
    )

    def model():
        centre = pyro.sample("centre", dist.Normal(0.0, 1e5))
        precision = pyro.sample("precision", dist.Gamma(0.001, 0.001))
        pyro.sample("y", dist.Normal(centre, precision**-0.5).expand(y.shape).to_event(2), obs=y)

    pyro.set_rng_seed(seed)
    modes = find_modes(Target(model))
    assert len(modes.loc) == 1
    sd = y.std()
    assert (modes.loc[0, 0] - y.mean()).abs() < 0.05 * sd
    assert modes.loc[0, 1].exp().item() == pytest.approx(sd.item() ** -2, rel=0.15)


@pytest.mark.parametrize(
    ("prior", "is_vague"),
    [
        (dist.Normal(178.0, 20.0), False),
        (dist.Normal(0.0, 1000.0), True),
        (dist.LogNormal(-70.0, 1.0), True),
        (dist.LogNormal(3.0, 1.0), False),
    ],
)
def test_vague_priors_are_wide_or_have_extreme_logarithms(prior, is_vague):
    pyro.set_rng_seed(0)
    density = Target(lambda: pyro.sample("x", prior))
    assert module._is_vague(density, density.sample_prior(50)) is is_vague


def test_points_without_a_gradient_are_no_initial_points():
    density = target(lambda x: x.abs().sqrt().sum())
    found = heights_of(density, torch.tensor([[0.0], [4.0]]))
    assert found.tolist() == [-math.inf, 2.0]


def test_points_near_the_origin():
    """They shrink until the density is finite. Priors that are not vague have only better ones."""
    limit = TimeLimit(math.inf)
    steep = target(lambda x: -(3000 * x.abs()).exp().sum(), 2)  # overflows above .24
    far = 400 * torch.randn(30, 2, generator=torch.Generator().manual_seed(0)).double()
    near = module.near_origin(steep, far, 30, 0, limit)
    assert near.shape == (30, 2) and steep.log_prob(near).isfinite().all()
    assert 0.05 < near.abs().max() < 0.3
    narrow = target(lambda x: -(2000 * x**2).sum(), 2)
    drawn = 3 * torch.ones(30, 2).double() + torch.rand(30, 2).double()
    found = module.near_origin(narrow, drawn, 30, 0, limit)
    least = narrow.log_prob(drawn).max() + 1000
    assert 0 < len(found) and (narrow.log_prob(found) > least).all()
    assert len(module.near_origin(narrow, 0.1 * drawn, 30, 0, limit)) == 0
    # At the other draws the model raised an error.
    assert len(module.near_origin(narrow, 0.1 * drawn[:2], 30, 0, limit)) == 30


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([[1], [1], [2], [9]], 3), ([[2, 3], [3, 6], [4, 6], [9, 9]], 3), ([[9, 2], [9, 9]], 1)],
)
def test_the_search_goes_on_if_few_paths_end_at_modes(monkeypatch, counts, expected):
    """Of twenty paths in a round, two must end at a single mode, and ten at several."""
    density, rounds = target(lambda x: -(x**2).sum(), 1), []

    def separate(target, found, *rest):
        rounds.append(counts[len(rounds)])
        number = torch.tensor(rounds[-1])
        return Modes(*(part[: len(number)] for part in found)), number

    monkeypatch.setattr(module, "separate", separate)
    find_modes(density, num_starts=20, max_rounds=4)
    assert len(rounds) == expected


def test_later_rounds_begin_near_the_origin_too(monkeypatch):
    """Two modes of one path each make a second round."""
    density, seen, original = target(lambda x: -(x**2).sum(), 1), [], module.near_origin

    def near(*args):
        seen.append(args[3])
        return original(*args)

    monkeypatch.setattr(module, "near_origin", near)
    monkeypatch.setattr(module, "_is_vague", lambda target, drawn: True)
    monkeypatch.setattr(
        module,
        "separate",
        lambda target, found, *rest: (found, torch.ones(len(found.loc), dtype=torch.long)),
    )
    find_modes(density, num_starts=2, max_rounds=2)
    assert seen[:2] == [0, 1]


def test_a_covariate_that_overflows_near_the_origin():
    dose = torch.tensor([0.0, 10, 33, 100, 333, 1000])
    y = torch.tensor([22.0, 18, 26, 33, 35, 33])

    def model():
        a, b = (pyro.sample(name, dist.Normal(0.0, 1000.0)) for name in "ab")
        pyro.sample("y", dist.Poisson((a + b * dose).exp()).to_event(1), obs=y)

    modes = find_modes(Target(model))
    assert len(modes.loc) == 1
    score = (y - (modes.loc[0, 0] + modes.loc[0, 1] * dose).exp()) @ torch.stack([dose**0, dose], 1)
    assert (score.abs() < torch.tensor([6.0, 3000.0])).all()  # half an sd


def test_a_single_start_is_not_exchanged(monkeypatch):
    """Not even if it is ten thousands of nats below points near the origin."""
    density, original, seen = target(lambda x: -(x**2).sum(), 2), module._climb, []
    density.init_loc = torch.full((2,), 200.0)

    def climb(target, points, *rest):
        seen.append(points)
        return original(target, points, *rest)

    monkeypatch.setattr(module, "_climb", climb)
    find_modes(density, num_starts=1)
    assert seen[0].tolist() == [[200.0, 200.0]]


def test_no_start_with_a_density():
    with pytest.raises(
        ValueError, match="none of 50 initial points: .*'density' at .*is -inf. Cure: give"
    ):
        find_modes(target(lambda x: 0 * x.sum() - math.inf))
    with pytest.raises(ValueError, match="finite at none of 7 initial points"):
        find_modes(target(lambda x: torch.where(x > 5, x, -math.inf).sum()), num_starts=7)


def test_starts_without_a_density_are_left_out():
    """Three of four starts lie where a coordinate is negative."""
    density = target(lambda x: torch.where(x > 0, 40 * x.abs().log() - 40 * x, -math.inf).sum(), 2)
    modes = find_modes(density)
    # Within an sd of .16: the best Gaussian need not be at the top.
    torch.testing.assert_close(modes.loc, torch.ones(1, 2), rtol=0, atol=0.1)
    torch.testing.assert_close(covariance(modes)[0], torch.eye(2) / 40, rtol=0.1, atol=0.005)


@pytest.mark.parametrize("seed", range(3))
def test_modes_far_below_the_best_are_dropped(seed):
    pyro.set_rng_seed(seed)
    density = mixture([[-1.5], [1.5]], [0.1, 0.1], [1.0, math.exp(-12)])
    kept = find_modes(density)
    torch.testing.assert_close(kept.loc, torch.tensor([[-1.5]]), rtol=0, atol=0.03)
    both = find_modes(density, max_gap=14.0)
    torch.testing.assert_close(both.loc, torch.tensor([[-1.5], [1.5]]), rtol=0, atol=0.03)
    torch.testing.assert_close(both.elbo, torch.tensor([0.0, -12.0]), rtol=0, atol=0.3)


def strips(width):
    """Each mode has a strip of the starts to itself, from which no path leads into another."""
    edges = 4 * torch.cat([torch.zeros(1), width.cumsum(0)]) / width.sum() - 2
    center, sd = (edges[1:] + edges[:-1]) / 2, edges.diff() / 14

    def log_density(x):
        strip = torch.bucketize(x.detach(), edges[1:-1])
        return (-0.5 * ((x - center[strip]) / sd[strip]) ** 2).sum()

    return target(log_density), center, sd


@pytest.mark.parametrize("seed", range(4))
def test_modes_that_few_starts_reach(seed):
    """With 4 % of the starts each: of 50 starts, many were met once and about three by none."""
    pyro.set_rng_seed(seed)
    density, center, sd = strips(1 + 0.2 * torch.arange(25).sin())
    modes = find_modes(density)
    loc, order = modes.loc.flatten().sort()
    assert len(loc) >= 24
    nearest = (loc[:, None] - center).abs().argmin(-1)
    assert len(nearest.unique()) == len(loc)
    assert ((loc - center[nearest]).abs() < 0.1 * sd[nearest]).all()
    torch.testing.assert_close(modes.scale_tril.flatten()[order], sd[nearest])


def test_the_search_goes_on_until_all_were_met_twice():
    density, _, _ = strips(torch.ones(4))  # at -1.5, -0.5, 0.5, 1.5
    rounds = [[-1.4, -1.6, -1.5, -0.4], [0.4, 0.4, 0.6], [-0.6, -0.4, 1.5], [1.4, 1.6], [0.4]]
    calls = iter(rounds)
    density.init_loc = torch.tensor([-1.3])
    density.sample_prior = lambda num_draws: torch.tensor(next(calls)).unsqueeze(-1)
    # -0.5 was met once until the third round, 1.5 until the fourth
    modes = find_modes(density, num_starts=5, max_gap=50.0)
    assert modes.loc.sort(0).values.round(decimals=1).flatten().tolist() == [-1.5, -0.5, 0.5, 1.5]
    assert list(calls) == [[0.4]]


def test_the_search_ends():
    """Each start is in a strip of its own: no mode is ever met twice."""
    density, center, _ = strips(1 + 0.2 * torch.arange(25).sin())
    density.init_loc = center[-1:]
    calls, unseen = [], iter(center)

    def sample_prior(num_draws):
        calls.append(num_draws)
        return torch.stack([next(unseen) for _ in range(num_draws)]).unsqueeze(-1)

    density.sample_prior = sample_prior
    modes = find_modes(density, num_starts=5, max_rounds=3)
    assert len(modes.loc) == 15
    assert calls == [4, 5, 5, 5]  # the last for a round that does not come


@pytest.mark.parametrize("seed", range(3))
def test_a_saddle_repels(seed, monkeypatch):
    """All paths begin at the saddle between two modes, nearly: its gradient leads into it."""
    pyro.set_rng_seed(seed)
    density = target(lambda x: 40 * (x[0] ** 2 - x[0] ** 4) - 50 * x[1] ** 2, 2)
    start = torch.tensor([0.02, 0.3])
    density.init_loc = start
    density.sample_prior = lambda num_draws: torch.stack([start, -start] * 5)[:num_draws]
    monkeypatch.setattr(module, "near_origin", lambda target, drawn, *rest: drawn[:0])
    modes = find_modes(density, num_starts=4)
    top = math.sqrt(0.5)
    torch.testing.assert_close(
        modes.loc.sort(0).values, torch.tensor([[-top, 0.0], [top, 0.0]]), rtol=0, atol=0.02
    )
    expected = torch.diag(torch.tensor([1 / 160.0, 1 / 100.0])).expand(2, 2, 2)
    torch.testing.assert_close(covariance(modes), expected, rtol=0.05, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_rounding_errors_are_no_mode(seed):
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 3.0))
        pyro.sample("y", dist.Normal(x, 0.5), obs=torch.tensor(0.0))
        large = (10 * x.abs()).exp()
        pyro.factor("nothing", (1.1 * large - large - 0.1 * large).abs())  # but far out

    pyro.set_rng_seed(seed)
    modes = find_modes(Target(model), max_iterations=20)
    evidence = dist.Normal(0.0, math.hypot(3.0, 0.5)).log_prob(torch.tensor(0.0)).item()
    assert modes.loc.abs().max() < 1e-6 and len(modes.loc) == 1
    assert modes.elbo.item() == pytest.approx(evidence, abs=0.2)


def test_a_mode_that_single_precision_cannot_resolve_is_told_of():
    torch.set_default_dtype(torch.float32)
    data = 1e9 + torch.randn(20, generator=torch.Generator().manual_seed(0))

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1e6))
        with pyro.plate("data", 20):
            pyro.sample("y", dist.Normal(x, 1.0), obs=data)

    pyro.set_rng_seed(0)
    with pytest.warns(UserWarning, match="rounding in float32.*nats below. Cure: float64"):
        find_modes(Target(model), num_starts=10, max_rounds=1)


def test_constrained_sites_and_the_seed():
    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        pyro.sample(
            "y", dist.Normal(torch.zeros(20), scale).to_event(1), obs=torch.full((20,), 2.0)
        )

    density = Target(model)
    found = []
    for seed in (1, 1, 2):
        pyro.set_rng_seed(seed)
        found.append(find_modes(density, num_starts=5))
    for left, right in zip(found[0], found[1], strict=True):
        assert torch.equal(left, right)
    assert not torch.equal(found[0].elbo, found[2].elbo)
    # d/du: -u - 20 + 80 exp(-2u) = 0
    u = found[0].loc.squeeze()
    assert (-u - 20 + 80 * (-2 * u).exp()).abs() < 1.0
    assert u.item() == pytest.approx(math.log(2) - 0.0166, abs=0.02)
    expected = 1 / (1 + 160 * (-2 * u).exp())
    torch.testing.assert_close(covariance(found[0]).squeeze(), expected)


def test_single_precision():
    torch.set_default_dtype(torch.float32)
    modes = find_modes(mixture([[-1.5, 0.0], [1.5, 1.0]], [0.2, 0.1], [0.5, 0.5]))
    assert len(modes.loc) == 2 and all(part.dtype == torch.float32 for part in modes)
    torch.testing.assert_close(modes.elbo, torch.full((2,), 0.5).log(), rtol=0, atol=0.35)
    scale = torch.tensor([1e-2, 1e3])
    wide = target(lambda x: -0.5 * ((x - scale) / scale).square().sum(), 2)
    torch.testing.assert_close(find_modes(wide).scale_tril[0], scale.diag(), rtol=1e-3, atol=1e-3)


def test_tops_that_meet_are_told_without_the_density(monkeypatch):
    """Most paths end where others did; between these there is nothing to be looked at."""
    modes = mixture([[-1.5, 0.0], [1.0, 0.0]], [0.2, 0.3], [0.5, 0.5])
    calls = []

    def counted(*args):
        calls.append(args)
        return dip(*args)

    monkeypatch.setattr(mode_gaps, "dip", counted)
    pyro.set_rng_seed(0)
    found = find_modes(modes, num_starts=40, max_rounds=2)
    assert len(found.loc) == 2
    assert 1 <= len(calls) < 8


def test_seconds_of_a_climb_are_counted_at_few_of_its_points():
    """Sizes grow with the number of paths, and the number of operations does not. The covariance,
    which is the same for all paths, counts as if it grew: 4 % here."""

    def model():
        pyro.sample("x", dist.MultivariateNormal(torch.zeros(20), torch.eye(20) + 0.5))

    target = Target(model)
    trials = SEARCH.num_starts * (SEARCH.num_draws + len(SEARCH.step_sizes))

    def climb():
        target.derivatives(nearby(target.init_loc, SEARCH.num_starts))
        target.log_prob(nearby(target.init_loc, trials))

    assert seconds_of_climb(target) == pytest.approx(estimated_seconds(climb), rel=0.1)


def laplace_regression(y, sd=10.0):
    with pyro.plate("coefficients", 2):
        x = pyro.sample("x", dist.Normal(0.0, sd))
    mean = x[0] + x[1] * torch.linspace(-1.0, 1.0, len(y))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Laplace(mean, 0.3), obs=y)


def test_the_gaussian_of_kinked_errors():
    """The Hessian of Laplace errors is 0: Laplace approximations are as wide as the prior."""
    torch.manual_seed(0)
    y = dist.Laplace(1.0 + 2 * torch.linspace(-1.0, 1.0, 40), 0.3).sample()
    density = Target(laplace_regression, y)
    modes = find_modes(density)
    axes = [centre + torch.linspace(-1.0, 1.0, 401) for centre in modes.loc[0]]
    grid = torch.cartesian_prod(*axes)
    log_mass = density.log_prob(grid).logsumexp(0) + 2 * math.log(0.005)
    weights = density.log_prob(grid).softmax(0)
    mean = weights @ grid
    covariance = (grid - mean).T @ (weights.unsqueeze(-1) * (grid - mean))
    assert len(modes.loc) == 1
    assert modes.elbo.item() == pytest.approx(log_mass.item(), abs=0.6)
    found = modes.scale_tril[0].square().sum(-1).sqrt()
    assert ((modes.loc[0] - mean).abs() < covariance.diagonal().sqrt()).all()
    assert torch.allclose(found, covariance.diagonal().sqrt(), rtol=0.4)


@pytest.mark.parametrize("size", [2, 8])
def test_both_modes_of_kinked_errors(size):
    """Powers of a mixture of two Laplace densities, whose modes have no second derivatives."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 5.0).expand([size]).to_event(1))
        parts = [dist.Laplace(loc, 0.5).log_prob(x).sum(-1) for loc in (-4.0, 4.0)]
        pyro.factor("modes", 3 * torch.stack(parts).logsumexp(0))

    modes = find_modes(Target(model))
    assert sorted(modes.loc[:, 0].round().tolist()) == [-4.0, 4.0]
    # Of Laplace densities of scale 1/6; secants settle within a factor of two. The prior has 5.
    sds = modes.scale_tril.square().sum(-1).sqrt()
    assert (sds > 0.24 / 3).all() and (sds < 0.24 * 3).all()


def test_a_single_path_goes_on_until_its_secants_have_settled():
    """Quantile regression: the first secants are as long as the prior is wide, and lead nowhere."""
    torch.manual_seed(0)
    x = torch.linspace(-1.0, 1.0, 80)
    y = 1.0 + 2 * x + torch.randn(80)

    def model():
        a, b = (pyro.sample(name, dist.Normal(0.0, 100.0)) for name in "ab")
        left = y - a - b * x
        pyro.factor("loss", -5 * torch.where(left > 0, 0.9 * left, -0.1 * left).sum())

    density = Target(model)
    modes = find_modes(density, num_starts=1, num_particles=256)
    axes = [centre + torch.linspace(-2.0, 2.0, 401) for centre in modes.loc[0]]
    log_mass = density.log_prob(torch.cartesian_prod(*axes)).logsumexp(0) + 2 * math.log(0.01)
    assert modes.elbo.item() == pytest.approx(log_mass.item(), abs=0.6)


@pytest.mark.parametrize(("size", "scale"), [(2, 0.1), (4, 0.3)])
@pytest.mark.parametrize("seed", range(2))
def test_a_place_without_slope_between_kinks(seed, size, scale):
    """Between the middle two rows the score of the likelihood is 0, so that paths end there."""
    pyro.set_rng_seed(seed)
    y = torch.randn(size)

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 10.0))
        pyro.sample("y", dist.Laplace(x, scale).expand([size]).to_event(1), obs=y)

    density = Target(model)
    modes = find_modes(density)
    grid = torch.linspace(-5, 5, 10_001).unsqueeze(-1)
    log_mass = density.log_prob(grid).logsumexp(0) + math.log(1e-3)
    assert modes.elbo.max().item() == pytest.approx(log_mass.item(), abs=2.0)  # without: -100


def test_one_round_suffices_for_quantile_regression(monkeypatch):
    """Paths that the first secants do not lead upwards go on: otherwise too few end at the mode."""
    torch.set_default_dtype(torch.float32)  # as in most models
    torch.manual_seed(0)
    x, rounds = torch.randn(80, 3), []
    y = 1 + x @ torch.linspace(-1.0, 1.0, 3) + dist.Laplace(0.0, 0.5).sample((80,))

    def model():
        a = pyro.sample("a", dist.Normal(0.0, 10.0))
        b = pyro.sample("b", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        left = (y - a - x @ b) / scale
        pyro.factor("loss", (-torch.where(left > 0, 0.9 * left, -0.1 * left) - scale.log()).sum())

    climb = module._climb
    monkeypatch.setattr(module, "_climb", lambda *args: rounds.append(1) or climb(*args))
    find_modes(Target(model))
    assert len(rounds) == 1


def test_a_single_path_that_ends_without_slope():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 10.0))
        pyro.sample("y", dist.Laplace(x, 0.1).expand([2]).to_event(1), obs=torch.tensor([-1.0, 1]))

    modes = find_modes(Target(model), num_starts=1)
    assert modes.scale_tril.item() == pytest.approx(0.6, rel=0.4)  # of Uniform(-1, 1), not 10


def test_steep_slopes_need_no_secants(monkeypatch):
    """Far below a count of 1000, only the smallest step of Newton's method gains."""

    def model():
        rate = pyro.sample("rate", dist.Normal(-3.0, 2.0).expand([20]).to_event(1))
        pyro.sample("y", dist.Poisson(rate.exp()).to_event(1), obs=torch.full((20,), 1000.0))

    calls, secants = [], Target.secants

    def counted(*args):
        calls.append(args)
        return secants(*args)

    monkeypatch.setattr(Target, "secants", counted)
    assert len(find_modes(Target(model), num_starts=20).loc) == 1
    assert len(calls) == 1  # which compares the modes


def test_secants():
    """Of a quadratic function they are its derivatives; of one with kinks, what lies between."""
    density = target(
        lambda x: x[..., 0] * x[..., 1] - x[..., 0].square() - (x[..., 1] - 1).abs(), 2
    )
    point, width = torch.tensor([[0.5, 0.6]]), torch.tensor([[0.2, 0.8]])
    log_prob, score, hessian = density.secants(point, width.diag_embed())
    assert log_prob.item() == pytest.approx(0.3 - 0.25 - 0.4)
    # The scores at the four points, of x and of y: the kink lies between two of them.
    by_hand = [[0.6 - 1.4, 0.7 + 1], [0.6 - 0.6, 0.3 + 1], [1.4 - 1, 0.5 - 1], [-0.2 - 1, 0.5 + 1]]
    torch.testing.assert_close(score[0], torch.tensor(by_hand).mean(0))
    torch.testing.assert_close(hessian[0], torch.tensor([[-2.0, 1.0], [1.0, -2 / 1.6]]))


def test_directions_without_a_finite_score_have_no_curvature():
    """torch's derivative is NaN where a square root that is not used has a negative argument."""

    def log_density(x):
        root = torch.where(x[..., 0] > 0, x[..., 0].sqrt(), 0.0)
        return -root - x[..., 1].square()

    density = target(log_density, 2)
    root = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    _, score, hessian = density.secants(torch.full((1, 2), 0.25), root)
    assert score.isfinite().all()
    torch.testing.assert_close(hessian[0], torch.tensor([[0.0, 0.0], [0.0, -2.0]]))


@pytest.mark.parametrize("seed", range(3))
def test_two_modes_that_no_path_reaches(seed):
    """All paths run down a funnel, whose walls have two modes of another latent."""
    pyro.set_rng_seed(seed)

    def model():
        z = pyro.sample("z", dist.Normal(0.3, 1.0))
        pyro.sample("known", dist.Normal(z**2 - z, 0.5), obs=torch.tensor(4.0))
        scale = pyro.sample("scale", dist.HalfNormal(2.0))
        x = pyro.sample("x", dist.Normal(torch.zeros(6), scale).to_event(1))
        pyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=torch.linspace(-2.0, 3.0, 6))

    modes = find_modes(Target(model))
    assert (modes.elbo.diff() <= 0).all()  # best first
    z = modes.loc[:, 0]
    expected = torch.tensor([(1 - 17**0.5) / 2, (1 + 17**0.5) / 2])
    torch.testing.assert_close(z.sort().values, expected, rtol=0, atol=0.5)  # within the walls


def test_a_search_without_time_leaves_endless_paths_alone(monkeypatch):
    def funnel():
        v = pyro.sample("v", dist.Normal(0.0, 3.0))
        pyro.sample("x", dist.Normal(torch.zeros(4), (v / 2).exp()).to_event(1))

    monkeypatch.setattr(module, "apart_from", lambda *args: pytest.fail("there is no time"))
    monkeypatch.setattr(module._Climb, "_rest", lambda self: pytest.fail("there is no time"))
    assert len(find_modes(Target(funnel), max_seconds=1e-6).loc) == 1


def test_lines_to_a_point_without_a_density_dip():
    def log_prob(points):
        return torch.where(points.sum(-1) > 2, -math.inf, 0.0)

    assert dip(log_prob, torch.tensor([[0.0], [1.0]]), torch.tensor([3.0])).isinf().all()
