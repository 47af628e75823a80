# SPDX-License-Identifier: Apache-2.0
"""Mirror images of draws: which are found, and their shares against quadrature."""

from __future__ import annotations

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_implicit import diagnose, fit, refine
from pyro_implicit.density import Target
from pyro_implicit.density.mirrors import find_mirrors, with_images


def squared(y: Tensor) -> None:
    """Two modes near 3 and -3, of which the prior prefers the first."""
    x = pyro.sample("x", dist.Normal(1.0, 3.0))
    pyro.sample("y", dist.Normal(x**2, 2.0), obs=y)


GRID = torch.linspace(-6.0, 6.0, 12_001, dtype=torch.float64)
LOG_PROB = dist.Normal(1.0, 3.0).log_prob(GRID) + dist.Normal(GRID**2, 2.0).log_prob(
    torch.tensor(9.0)
)
EXACT = LOG_PROB.softmax(0)
SHARE = EXACT[GRID < 0].sum().item()


def draws_of(share: float, number: int = 20_000) -> Tensor:
    """Draws that are right within both modes, of which the negative one has another share."""
    sides = [(EXACT * side) / (EXACT * side).sum() for side in (GRID > 0, GRID < 0)]
    weights = (1 - share) * sides[0] + share * sides[1]
    return GRID[weights.multinomial(number, replacement=True)].unsqueeze(-1).float()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_draws_of_any_share_become_draws_of_the_posterior(share):
    torch.manual_seed(0)
    target = Target(squared, torch.tensor(9.0))
    found, (image,) = with_images(target, draws_of(share))
    assert image.mirror.name == "'x'" and image.is_reliable
    assert 0.2 < SHARE < 0.4
    assert (found < 0).double().mean().item() == pytest.approx(SHARE, abs=0.015)
    for side in (GRID > 0, GRID < 0):
        own = EXACT * side / (EXACT * side).sum()
        mean, some = (own * GRID).sum().item(), found[(found < 0) == (GRID[side][0] < 0)]
        sd = math.sqrt((own * (GRID - mean) ** 2).sum().item())
        assert some.mean().item() == pytest.approx(mean, abs=0.05 * sd)
        assert some.std().item() == pytest.approx(sd, rel=0.03)
    if share != 0.5:  # all images are in the other mode
        assert image.share == pytest.approx(1 - SHARE if share else SHARE, abs=0.01)


def test_one_mode_and_exact_symmetries_have_no_mirrors():
    def model():
        pyro.sample("near", dist.Normal(0.2, 1.0))
        pyro.sample("far", dist.Normal(5.0, 1.0))
        pyro.sample("scale", dist.LogNormal(3.0, 0.1))

    target = Target(model)
    assert find_mirrors(target, target.sample_prior(500)) == []

    def product():
        a, b = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "ab")
        pyro.sample("y", dist.Normal(a * b, 0.1), obs=torch.tensor(4.0))

    near_one = 2.0 + 0.05 * torch.randn(500, 2)
    assert find_mirrors(Target(product), near_one) == []


def test_units_and_loops_are_reflected_by_themselves():
    def model():
        with pyro.plate("units", 3):
            x = pyro.sample("x", dist.Normal(torch.tensor([0.1, 4.0, 0.0]), 1.0))
        a, b = (pyro.sample(f"a_{i}", dist.Normal(0.1, 1.0)) for i in range(2))
        pyro.sample("square", dist.Normal(x[0] ** 2, 0.1), obs=torch.tensor(9.0))
        pyro.sample("product", dist.Normal(a * b, 0.1), obs=torch.tensor(9.0))

    draws = torch.tensor([3.0, 4.0, 0.0, 3.0, 3.0]) + 0.05 * torch.randn(200, 5)
    names = [mirror.name for mirror in find_mirrors(Target(model), draws)]
    assert names == ["unit 0 of 'x'", "'a_0' and 'a_1'"]


def other_shape(y: Tensor) -> None:
    """The second mode is so much wider than the first that images of draws do not cover it."""
    x = pyro.sample("x", dist.Normal(0.0, 3.0))
    pyro.sample("y", dist.Normal(x**2, 1.0), obs=y)
    scale = torch.where(x > 0, 1.0, 4.0)
    pyro.sample("z", dist.Normal(0.0, scale).expand([3]).to_event(1))


def test_images_that_weights_cannot_add_are_doubted():
    torch.manual_seed(0)
    target = Target(other_shape, torch.tensor(9.0))
    draws = torch.cat([3.0 + 0.17 * torch.randn(4_000, 1), torch.randn(4_000, 3)], -1)
    found, (image,) = with_images(target, draws)
    assert not image.is_reliable and torch.equal(found, draws)
    start = {"x": draws[:64, 0], "z": draws[:64, 1:]}
    refined = refine(
        other_shape, start, torch.tensor(9.0), num_chains=64, max_gradients=1_000, progress=False,
        seed=0,
    )  # fmt: skip
    assert "other signs of 'x' holds" in refined.lost
    assert any(doubt.endswith("which the draws lack") for doubt in refined.doubts)


def test_diagnose_tells_of_images_that_draws_lack():
    torch.manual_seed(0)
    y = torch.tensor(9.0)
    for share, verdict in ((0.0, "do not trust"), (SHARE, "check"), (SHARE - 0.15, "do not trust")):
        x = draws_of(share, 2_000)[:, 0]
        found = diagnose(squared, {"x": x}, y, modes=None, progress=False, seed=0)
        ((image, moved),) = found.images
        assert moved == pytest.approx(abs(SHARE - share), abs=0.04)
        reasons = [one.reason for one in found.findings if "mirror image" in one.reason]
        assert len(reasons) == (share != SHARE) and all(image in reason for reason in reasons)
        assert found.verdict == verdict  # stored draws without weights are checked


def test_chains_of_one_mode_are_draws_of_both():
    y = torch.tensor(9.0)
    start = {"x": 3.0 + 0.1 * torch.randn(64)}
    refined = refine(squared, start, y, num_chains=64, max_gradients=1_000, progress=False, seed=0)
    x = refined.get_samples()["x"]
    assert (x < 0).double().mean().item() == pytest.approx(SHARE, abs=0.03)
    assert "other signs of 'x' holds" in refined.modes and not refined.lost
    assert 0.9 < refined.kept < 1.0  # the weights are nearly even
    half = replace(refined, kept=0.5).as_guide().num_independent
    assert half == pytest.approx(refined.drift.num_effective / 2, rel=1e-3)
    again = refined.refine_more(max_gradients=200, progress=False).get_samples()["x"]
    assert (again < 0).double().mean().item() == pytest.approx(SHARE, abs=0.03)


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
    position, slope = torch.randn(100, 1, generator=generator), 2.0 + torch.rand(10)
    chance = (position * slope * torch.tensor([1.0, -1.0]).repeat(5)).sigmoid()
    votes = torch.bernoulli(chance, generator=generator)
    result = fit(model, "auto", votes, seed=0, progress=False)
    draws = result.sample(4_000)
    # The prior of the first position alone tells the modes apart.
    first, sign = draws["x"][:, 0], draws["slope"][:, 0].sign()
    assert (sign > 0).double().mean().item() == pytest.approx(
        torch.sigmoid(first * sign).mean().item(), abs=0.05
    )
    assert "mirror image" in str(result)
