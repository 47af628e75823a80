# SPDX-License-Identifier: Apache-2.0
"""Mirror images of draws: which are found, and their shares against quadrature."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_implicit import diagnose, fit, refine
from pyro_implicit.density import Target
from pyro_implicit.density.mirrors import Images, Mirror, find_mirrors, with_images
from pyro_implicit.density.symmetry import find_symmetries
from pyro_implicit.fitting import BudgetPolicy, FitPolicy
from pyro_implicit.fitting.policy import TrainingPolicy
from pyro_implicit.mcmc.refined import _add_images
from pyro_implicit.ops import LogWeights


def squared(y: Tensor) -> None:
    """Two modes near 3 and -3, of which the prior prefers the first."""
    x = pyro.sample("x", dist.Normal(1.0, 3.0))
    pyro.sample("y", dist.Normal(x**2, 2.0), obs=y)


Y = torch.tensor(9.0)
GRID = torch.linspace(-6.0, 6.0, 12_001, dtype=torch.float64)
LOG_PROB = dist.Normal(1.0, 3.0).log_prob(GRID) + dist.Normal(GRID**2, 2.0).log_prob(Y)
EXACT = LOG_PROB.softmax(0)
SHARE = EXACT[GRID < 0].sum().item()


def draws_of(share: float, number: int = 20_000) -> Tensor:
    """Draws that are correct within both modes, of which the negative one has another share."""
    sides = [(EXACT * side) / (EXACT * side).sum() for side in (GRID > 0, GRID < 0)]
    weights = (1 - share) * sides[0] + share * sides[1]
    return GRID[weights.multinomial(number, replacement=True)].unsqueeze(-1).float()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.4, 0.6, 1.0])
def test_draws_of_any_share_become_draws_of_the_posterior(share):
    torch.manual_seed(0)
    found, images = with_images(Target(squared, Y), draws_of(share))
    assert [mirror.name for mirror in images.mirrors] == ["'x'"] and images.is_reliable
    assert 0.2 < SHARE < 0.4
    assert images.shares[0] == pytest.approx(SHARE if share < 0.5 else 1 - SHARE, abs=0.015)
    assert images.moved == pytest.approx(abs(share - SHARE), abs=0.015)
    assert images.kept == pytest.approx(max(share, 1 - share), abs=0.05)
    assert (found < 0).double().mean().item() == pytest.approx(SHARE, abs=0.015)
    for side in (GRID > 0, GRID < 0):
        own = EXACT * side / (EXACT * side).sum()
        mean, some = (own * GRID).sum().item(), found[(found < 0) == (GRID[side][0] < 0)]
        sd = math.sqrt((own * (GRID - mean) ** 2).sum().item())
        assert some.mean().item() == pytest.approx(mean, abs=0.05 * sd)
        assert some.std().item() == pytest.approx(sd, rel=0.03)


@pytest.mark.parametrize(
    "fn",
    [
        dist.Normal(3.2, 1.0),
        dist.Normal(5.0, 1.0),
        dist.StudentT(5.0, 4.2, 1.0),
        dist.StudentT(3.0, 8.0, 1.0),
        dist.Gumbel(4.0, 1.0),
    ],
)
def test_draws_of_one_mode_stay_as_they_are(fn):
    target = Target(lambda: pyro.sample("x", fn))
    for seed in range(5):
        torch.manual_seed(seed)
        draws = fn.sample((5_000, 1))
        found, images = with_images(target, draws)
        assert found is draws and images is None


def test_exact_symmetries_have_no_mirrors():
    def product():
        a, b = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "ab")
        pyro.sample("y", dist.Normal(a * b, 0.1), obs=torch.tensor(4.0))

    assert find_mirrors(Target(product), 2.0 + 0.05 * torch.randn(500, 2)) == []


def test_images_that_symmetries_map_to_the_mode_are_no_images():
    """Five clusters in nearly even places: to change all signs is to change their order."""
    y = torch.tensor([-40.2, -20.0, 0.3, 20.1, 40.0])

    def model():
        with pyro.plate("components", 5):
            loc = pyro.sample("loc", dist.Normal(0.0, 30.0))
        with pyro.plate("rows", 5):
            z = pyro.sample("z", dist.Categorical(torch.ones(5)), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(loc[z], 1.0), obs=y)

    torch.manual_seed(0)
    target, draws = Target(model), y + torch.randn(4_000, 5)
    assert with_images(target, draws)[1] is not None
    symmetries = find_symmetries(target).keyed(draws)
    found, images = with_images(target, symmetries.ordered(draws), symmetries)
    assert images is None
    assert diagnose(model, {"loc": draws}, modes=None, progress=False).images is None


def test_several_images_of_one_mode():
    """The image of two signs holds most of the mass, and that of one of them little."""
    modes = torch.tensor([[3.0, 3.0], [-3.0, 3.0], [-3.0, -3.0]])
    shares = torch.tensor([0.1, 0.02, 0.88])

    def model():
        a, b = (pyro.sample(name, dist.Normal(0.0, 100.0)) for name in "ab")
        away = torch.stack([a, b], -1).unsqueeze(-2) - modes
        pyro.factor("modes", (shares.log() - 8 * away.square().sum(-1)).logsumexp(-1))

    torch.manual_seed(0)
    found, images = with_images(Target(model), 3.0 + 0.25 * torch.randn(20_000, 2))
    assert [mirror.name for mirror in images.mirrors] == ["'a' and 'b'", "'a'"]
    assert images.shares == pytest.approx([0.88, 0.02], abs=0.01)
    for mode, share in zip(modes, shares, strict=True):
        near = ((found - mode).abs() < 1.5).all(-1)
        assert near.double().mean().item() == pytest.approx(share.item(), abs=0.01)


def test_few_draws_at_an_image_do_not_replace_those_of_the_mode():
    """A few chains are at the smaller mode, which is narrower."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 100.0))
        parts = dist.Normal(10.0, 1.0).log_prob(x), dist.Normal(-10.0, 0.3).log_prob(x)
        parts = math.log(0.995) + parts[0], math.log(0.005) + parts[1]
        pyro.factor("modes", torch.logaddexp(*parts))

    torch.manual_seed(0)
    draws = torch.cat([10.0 + torch.randn(9_500, 1), -10.0 + 0.3 * torch.randn(500, 1)])
    found, images = with_images(Target(model), draws)
    assert images.is_reliable and images.shares[0] == pytest.approx(0.005, abs=0.003)
    right = found[found > 0]
    assert right.std().item() == pytest.approx(1.0, abs=0.03)
    assert len(right.unique()) > 0.6 * len(right)


def test_units_dimensions_and_loops_are_reflected_by_themselves():
    def model():
        with pyro.plate("units", 3):
            x = pyro.sample("x", dist.Normal(torch.tensor([0.1, 4.0, 0.0]), 1.0))
        a, b = (pyro.sample(f"a_{i}", dist.Normal(0.1, 1.0)) for i in range(2))
        square = pyro.sample("square", dist.Normal(0.1, 1.0).expand([2, 2]).to_event(2))
        pyro.sample("of_x", dist.Normal(x[0] ** 2, 0.1), obs=Y)
        pyro.sample("of_a", dist.Normal(a * b, 0.1), obs=Y)
        rows = square[..., :, 0] * square[..., :, 1]
        pyro.sample("of_rows", dist.Normal(rows, 0.1).to_event(1), obs=Y.expand(2))

    draws = torch.tensor([3.0, 4.0, 0.0] + [3.0] * 6) + 0.02 * torch.randn(400, 9)
    found = find_mirrors(Target(model), draws)
    rows = {f"unit {i} of 'square' of dimension 0" for i in range(2)}
    assert {"'a_0' to 'a_1'", "unit 0 of 'x'", "'square'", *rows} < {one.name for one in found}
    signs = {tuple(mirror.signs.tolist()) for mirror in found}
    assert len(signs) == len(found) == 2**4 - 1  # each of the four by itself, and all together


def other_shape(y: Tensor) -> None:
    """The second mode is so much wider than the first that images of draws do not cover it."""
    x = pyro.sample("x", dist.Normal(0.0, 3.0))
    pyro.sample("y", dist.Normal(x**2, 1.0), obs=y)
    scale = torch.where(x > 0, 1.0, 4.0)
    pyro.sample("z", dist.Normal(0.0, scale).expand([3]).to_event(1))


def test_images_that_weights_cannot_add_are_doubted():
    torch.manual_seed(0)
    draws = torch.cat([3.0 + 0.17 * torch.randn(4_000, 1), torch.randn(4_000, 3)], -1)
    found, images = with_images(Target(other_shape, Y), draws)
    assert not images.is_reliable and found is draws
    start = {"x": draws[:64, 0], "z": draws[:64, 1:]}
    options = {"num_chains": 64, "max_gradients": 1_000, "progress": False, "seed": 0}
    refined = refine(other_shape, start, Y, **options)
    assert refined.lacks_images and refined.kept == 1.0
    assert any(doubt.endswith("the draws lack them") for doubt in refined.doubts)
    for guide in (refined, {"x": draws[:2_000, 0], "z": draws[:2_000, 1:]}):
        reasons = [
            one
            for one in diagnose(other_shape, guide, Y, modes=None, progress=False).findings
            if "mirror images" in one.reason
        ]
        assert [one.verdict for one in reasons] == ["check"]


def test_diagnose_tells_of_images_that_draws_lack():
    torch.manual_seed(0)
    for share, verdict in ((0.0, "do not trust"), (SHARE, ""), (SHARE - 0.15, "do not trust")):
        x = draws_of(share, 2_000)[:, 0]
        found = diagnose(squared, {"x": x}, Y, modes=None, progress=False, seed=0)
        assert found.images.moved == pytest.approx(abs(SHARE - share), abs=0.04)
        reasons = [one for one in found.findings if "mirror images" in one.reason]
        assert [one.verdict for one in reasons] == [verdict] * bool(verdict)


def test_chains_of_one_mode_are_draws_of_both():
    torch.manual_seed(0)
    start = {"x": 3.0 + 0.1 * torch.randn(64)}
    refined = refine(squared, start, Y, num_chains=64, max_gradients=1_000, progress=False, seed=0)
    x = refined.get_samples()["x"]
    assert (x < 0).double().mean().item() == pytest.approx(SHARE, abs=0.03)
    assert "at the reflection of 'x'" in refined.modes and not refined.lacks_images
    assert 0.9 < refined.kept <= 1.0  # the weights are nearly even
    half = replace(refined, kept=0.5).as_guide().num_independent
    assert half == int(refined.drift.num_effective / 2)
    again = refined.refine_more(max_gradients=200, progress=False).get_samples()["x"]
    assert (again < 0).double().mean().item() == pytest.approx(SHARE, abs=0.03)


def test_chains_that_never_moved_keep_their_draws():
    torch.manual_seed(0)
    latents = draws_of(0.0, 800).reshape(8, 100, 1)
    latents[3] = 2.5
    is_stuck = (latents == latents[:, :1]).flatten(1).all(-1)
    found, images = _add_images(Target(squared, Y), latents, is_stuck, None)
    assert images.is_reliable and (found[3] == 2.5).all()
    assert (found < 0).double().mean().item() == pytest.approx(SHARE, abs=0.07)


def test_images_without_mass_are_not_printed():
    mirrors = [Mirror(torch.ones(1), name) for name in "abc"]
    found = Images(mirrors, [0.001, 0.6, 0.0], LogWeights(torch.zeros(9)), 0.0, 1.0)
    assert str(found).startswith("mirror images hold mass: 60% at the reflection of b (")


def test_a_fit_of_many_latents_has_both_modes():
    """Ideal points: one weak prior fixes the sign of 100 positions and 10 votes."""

    def model(votes: Tensor) -> None:
        loc = torch.cat([torch.tensor([0.5]), torch.zeros(99)])
        x = pyro.sample("x", dist.Normal(loc, 1.0).to_event(1))
        slope = pyro.sample("slope", dist.Normal(0.0, 2.0).expand([10]).to_event(1))
        with pyro.plate("people", 100, dim=-2), pyro.plate("items", 10, dim=-1):
            logits = x.unsqueeze(-1) * slope
            pyro.sample("votes", dist.Bernoulli(logits=logits), obs=votes)

    generator = torch.Generator().manual_seed(0)
    position = torch.randn(100, 1, generator=generator)
    chance = (position * 2.5 * torch.tensor([1.0, -1.0]).repeat(5)).sigmoid()
    votes = torch.bernoulli(chance, generator=generator)
    short = BudgetPolicy(most_gradients=400, least_gradients=400, patience=1, patient_seconds=0.0)
    policy = FitPolicy(budget=short, training=TrainingPolicy(mean_field_steps=300))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # chains need not converge
        result = fit(model, "auto", votes, seed=0, progress=False, policy=policy)
    draws = result.sample(4_000)
    first, sign = draws["x"][:, 0], draws["slope"][:, 0].sign()
    # The rest of the model is even: of size s, the first position has the sign of the mode or the
    # other one with odds exp(s), exp(-s) over 2 (its prior mean is 0.5).
    expected = torch.sigmoid(first * sign).mean().item()
    share = (sign > 0).double().mean().item()
    assert 0.1 < expected < 0.9 and share == pytest.approx(expected, abs=0.05)
    assert "mirror images hold mass" in str(result)
