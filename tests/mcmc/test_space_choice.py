# SPDX-License-Identifier: Apache-2.0
"""Whether chains walk on the latents or on the noise of a guide, as a short walk on both says."""

from __future__ import annotations

from dataclasses import replace
from functools import partialmethod

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit import AutoImplicit, AutoregressiveGenerator
from pyro_implicit.density import Target
from pyro_implicit.guides import Frame
from pyro_implicit.guides.sampler import Sampler
from pyro_implicit.mcmc import ChainPolicy, refine
from pyro_implicit.mcmc.policy import SpacePolicy
from pyro_implicit.mcmc.spaces.choice import ChainSetup, _Walk, start_chains
from pyro_implicit.mcmc.spaces.conditional_noise import ConditionalNoise
from pyro_implicit.runtime.clock import NO_LIMIT, TimeLimit


def gaussian():
    pyro.sample("x", dist.Normal(0.0, 1.0).expand([3]).to_event(1))


def funnel():
    v = pyro.sample("v", dist.Normal(0.0, 1.5))
    pyro.sample("x", dist.Normal(0.0, (v / 2).exp()).expand([3]).to_event(1))


def hidden_funnel():
    """Pyro does not see that the second site has a scale."""
    v = pyro.sample("v", dist.Normal(0.0, 1.5))
    scaled = dist.transforms.AffineTransform(0.0, (v / 2).exp())
    standard = dist.Normal(0.0, 1.0).expand([3])
    pyro.sample("x", dist.TransformedDistribution(standard, scaled).to_event(1))


def injective(model, latent_dim):
    frame = Frame(torch.zeros(latent_dim), torch.ones(latent_dim))
    guide = AutoImplicit(model, AutoregressiveGenerator, frame=frame)
    guide()
    return guide


def exact_funnel():
    guide = injective(funnel, 4)
    guide.scale = torch.tensor([1.5, 1.0, 1.0, 1.0])
    with torch.no_grad():
        guide.generator.skip.weight[5:, 0] = 0.75  # log-scales of x by the noise of v
    return guide


def bent(size):
    """Gives a funnel's scales to the latents behind the first."""
    generator = AutoregressiveGenerator(size)
    with torch.no_grad():
        generator.skip.weight[size + 1 :, 0] = 3.0
    return generator


def begin(model, guide, frame="auto", max_gradients=4000):
    target = Target(model)
    sampler = Sampler(target, guide)
    plan = ChainSetup(sampler, 64, max_gradients, frame)
    return start_chains(plan)[1]


def test_a_good_guide_keeps_its_noise_at_no_cost():
    torch.manual_seed(0)
    chains = begin(gaussian, injective(gaussian, 3))
    assert chains.space == "noise" and chains.space_note == "" and chains.gradients < 150


def test_a_funnel_stays_in_the_noise_of_its_guide():
    torch.manual_seed(0)
    guide = exact_funnel()
    draws = guide.sample_posterior(20_000)
    assert abs(draws["v"].std() - 1.5) < 0.05
    assert abs((draws["x"] * (-draws["v"] / 2).exp().unsqueeze(-1)).std() - 1) < 0.05
    assert begin(hidden_funnel, guide).space == "noise"
    assert begin(funnel, guide).space == "conditional"


def test_a_guide_that_lacks_a_narrow_part_gives_way_to_the_latents():
    def spike():
        x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        narrow = dist.Normal(1.0, 0.01).log_prob(x) - dist.Normal(0.0, 1.0).log_prob(x)
        pyro.factor("narrow", narrow.exp().log1p().sum(-1))

    torch.manual_seed(0)
    chains = begin(spike, injective(spike, 2))
    assert chains.space == "latent" and "lacks a part of the posterior" in chains.space_note


@pytest.mark.parametrize("frame", ["auto", "noise"])
def test_a_bent_guide_gives_way_to_the_latents(frame):
    """A Gaussian, but the guide thinks it a funnel."""
    torch.manual_seed(0)
    frame_of_guide = Frame(torch.zeros(3), torch.ones(3))
    guide = AutoImplicit(gaussian, bent, frame=frame_of_guide)
    guide()
    chains = begin(gaussian, guide, frame)
    if frame == "noise":
        assert chains.space == "noise" and chains.space_note == ""
    else:
        assert chains.space == "latent" and "times as fast" in chains.space_note


def test_what_a_gradient_costs_decides_too(monkeypatch):
    """The bent guide's chains stay in its noise if the latents are a thousand times dearer."""
    torch.manual_seed(0)
    guide = AutoImplicit(gaussian, bent, frame=Frame(torch.zeros(3), torch.ones(3)))
    guide()
    costs = {"latent": 1000.0, "noise": 1.0}
    monkeypatch.setattr(
        "pyro_implicit.mcmc.spaces.choice._cost", lambda chains: costs[chains.space]
    )
    chains = begin(gaussian, guide)
    assert chains.space == "noise" and "times as fast" in chains.space_note


def kinked():
    """The second derivatives of Laplace errors say that the data tell nothing about x."""
    scale = pyro.sample("scale", dist.Gamma(0.01, 0.01))
    with pyro.plate("rows", 3):
        x = pyro.sample("x", dist.Normal(0.0, scale**-0.5))
    pyro.sample("y", dist.Laplace(x, 0.03).to_event(1), obs=torch.tensor([4.0, 2.0, -1.0]))


def test_own_noise_that_is_blind_to_kinks_gives_way_to_the_latents():
    torch.manual_seed(0)
    near = torch.tensor([4.0, 2.0, -1.0]) + dist.Laplace(0.0, 0.03).sample((500, 3))
    draws = {"scale": dist.Gamma(1.51, 0.5 * near.square().sum(-1)).sample(), "x": near}
    chains = begin(kinked, draws)
    assert chains.space == "latent" and "in their own noise" in chains.space_note


def test_the_space_of_chains_is_the_renewed_one(monkeypatch):
    """The warm-up, of which a trial walk is the beginning, may make the own noise again."""
    anew = partialmethod(ConditionalNoise.refitted, anew=True)
    monkeypatch.setattr(ConditionalNoise, "refitted", anew)
    torch.manual_seed(0)
    plan = ChainSetup(Sampler(Target(funnel), exact_funnel()), 64, 4000)
    space, chains = start_chains(plan)
    assert space is chains.current_space
    first, chains = start_chains(replace(plan, frame="conditional"))
    walk = _Walk(chains, plan.policy)
    assert chains.current_space is not first
    read, to_latent = [], ConditionalNoise.to_latent

    def recorded(space, points):
        read.append(space)
        return to_latent(space, points)

    monkeypatch.setattr(ConditionalNoise, "to_latent", recorded)
    walk._values(chains)
    assert len(read) == 1 and read[0] is chains.current_space


def test_a_walk_that_leaves_the_finite_numbers_has_no_speed():
    walk = _Walk.__new__(_Walk)
    walk._jump = walk._spread = torch.tensor([1.0, torch.inf])
    walk.gradients = 1.0
    assert walk.speed(walk) == 0.0


def test_no_trial_walk_that_would_take_too_long(monkeypatch):
    torch.manual_seed(0)
    guide = AutoImplicit(gaussian, bent, frame=Frame(torch.zeros(3), torch.ones(3)))
    guide()
    sampler = Sampler(Target(gaussian), guide)
    monkeypatch.setattr(Target, "seconds", lambda target, number: 1.0)
    for limit, note in ((TimeLimit(60.0), ""), (NO_LIMIT, "times as fast")):
        _, chains = start_chains(ChainSetup(sampler, 64, 4000, limit=limit))
        assert bool(chains.space_note) == bool(note) and note in chains.space_note


def test_the_latents_where_the_noise_has_no_finite_density(monkeypatch):
    from pyro_implicit.mcmc.spaces.space import GuideNoise

    def nothing(self, points):
        return torch.full_like(points[:, 0], torch.nan), torch.zeros_like(points)

    monkeypatch.setattr(GuideNoise, "score", nothing)
    result = refine(
        gaussian, injective(gaussian, 3), num_chains=16, max_gradients=30, seed=0, progress=False
    )
    assert result.space == "latent" and "finite nowhere" in str(result)


def test_the_space_survives_a_checkpoint(tmp_path):
    policy = ChainPolicy(space=SpacePolicy(probe=6, probe_leapfrogs=2, easy=1.0))

    def run(**options):
        pyro.clear_param_store()
        torch.manual_seed(0)
        guide = AutoImplicit(gaussian, bent, frame=Frame(torch.zeros(3), torch.ones(3)))
        options |= {"num_chains": 16, "max_gradients": 60, "seed": 0, "progress": False}
        return refine(gaussian, guide, policy=policy, **options)

    whole = run()
    file = tmp_path / "chains.pt"
    first, again = run(checkpoint=file), run(checkpoint=file)
    for result in (first, again):
        assert result.get_samples()["x"].equal(whole.get_samples()["x"])
        assert result.space == "latent" and result.space_note == whole.space_note != ""


def test_a_small_budget_is_not_spent_on_walks():
    guide = AutoImplicit(gaussian, bent, frame=Frame(torch.zeros(3), torch.ones(3)))
    guide()
    chains = begin(gaussian, guide, max_gradients=1000)
    assert chains.space == "noise" and chains.transitions == 0


def test_warnings_of_the_walk_are_not_lost():
    def one_by_one():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(0.0 if x.item() > 0 else -0.1, 1.0), obs=torch.tensor(0.0))

    guide = injective(one_by_one, 1)
    with pytest.warns(UserWarning, match="one particle at a time") as caught:
        policy = ChainPolicy(space=SpacePolicy(khat_draws=100))
        options = {"seed": 0, "progress": False, "policy": policy}
        refine(one_by_one, guide, num_chains=8, max_gradients=10, **options)
    assert {one.filename for one in caught} == {__file__}
