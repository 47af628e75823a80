# SPDX-License-Identifier: Apache-2.0
"""Guides that learn from draws: the density they learn by, what they learn, what is refused."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch.distributions import TransformedDistribution

from pyro_implicit import (
    AutoImplicit,
    AutoMixture,
    AutoregressiveGenerator,
    AutoSemiImplicit,
    ResidualGenerator,
)
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.mcmc import TeachPolicy, teach
from pyro_implicit.mcmc.guide_density import density_at_draws, unconstrained_draws


def model():
    v = pyro.sample("v", dist.Normal(0.0, 1.0))
    pyro.sample("s", dist.LogNormal(v, 0.5))
    with pyro.plate("rows", 2):
        pyro.sample("x", dist.Normal(0.0, (v / 2).exp()))


def posterior(count, dtype=torch.float32):
    v = torch.randn(count, dtype=dtype)
    s = (v + 0.5 * torch.randn(count, dtype=dtype)).exp()
    x = torch.randn(count, 2, dtype=dtype) * (v / 2).exp().unsqueeze(-1)
    return {"v": v, "s": s, "x": x}


def autoregressive(model):
    return AutoImplicit(model, AutoregressiveGenerator, frame=None, init_scale=1.0)


def residual(model):
    return AutoImplicit(model, lambda size: ResidualGenerator(size, 2), frame=None, init_scale=1.0)


def bent(guide):
    """Called, and away from its start."""
    guide()
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return guide


def test_the_last_fifth_is_held_out():
    """A Gaussian takes the moments of the first 400 draws, and is scored by the last 100."""
    generator = torch.Generator().manual_seed(0)
    first, last = (torch.randn(n, generator=generator) for n in (400, 100))
    last = 2 + 0.5 * last

    def one():
        pyro.sample("v", dist.Normal(0.0, 1.0))

    guide = AutoNormal(one)
    taught = teach(guide, {"v": torch.cat([first, last])}, progress=False)
    fitted = dist.Normal(first.mean(), first.std())
    assert guide.median()["v"].item() == pytest.approx(first.mean().item(), abs=1e-5)
    assert taught.after == pytest.approx(fitted.log_prob(last).mean().item(), rel=1e-5)


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def gradients(value, guide):
    wanted = [p for p in guide.parameters() if p.requires_grad]
    return torch.autograd.grad(value, wanted, allow_unused=True)


def test_the_density_of_an_injective_guide_and_its_gradient(double):
    """Against the differentiable inverse, also from a stale noise."""
    torch.manual_seed(0)
    guide, draws = bent(autoregressive(model)), posterior(20)
    found, rows = density_at_draws(guide, draws), torch.arange(20)
    for _ in range(3):
        exact = TransformedDistribution(guide.get_base_dist(), guide.get_transform())
        expected = exact.log_prob(unconstrained_draws(guide, draws))
        log_q = found.log_prob(rows)
        torch.testing.assert_close(log_q, expected, rtol=1e-4, atol=1e-4)
        pairs = zip(gradients(log_q.mean(), guide), gradients(expected.mean(), guide), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-4)
        bent(guide)


def test_the_density_of_a_generator_without_an_inverse(double):
    """At its own draws, whose noise is known; the gradient by finite differences."""
    torch.manual_seed(0)
    guide = bent(residual(model))
    noise, transform = torch.randn(20, 4), guide.get_transform()
    latent = transform(noise)
    expected = guide.get_base_dist().log_prob(noise)
    expected = expected - transform.log_abs_det_jacobian(noise, latent)
    found = density_at_draws(guide, guide._constrain(latent.detach()))
    log_q = found.log_prob(torch.arange(20))
    torch.testing.assert_close(log_q, expected, rtol=1e-4, atol=1e-4)
    weight = guide.generator.network.layers[0].weight
    (slope,) = torch.autograd.grad(log_q.mean(), weight)
    step = 1e-4
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[0, 0] += sign * step
            sides.append(found.log_prob(torch.arange(20)).mean())
            weight[0, 0] -= sign * step
    assert abs(slope[0, 0] - (sides[0] - sides[1]) / (2 * step)) < 1e-3 * slope.abs().max()


def test_the_density_of_a_mixture(double):
    torch.manual_seed(0)
    guide = bent(AutoMixture(model, [autoregressive(model) for _ in range(2)]))
    draws = posterior(20)
    expected = guide.get_posterior().log_prob(unconstrained_draws(guide, draws))
    found = density_at_draws(guide, draws).log_prob(torch.arange(20))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def hand_written():
    loc = pyro.param("loc", torch.zeros(()))
    pyro.sample("v", dist.Normal(loc, 1.0))
    pyro.sample("s", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", 2):
        pyro.sample("x", dist.Normal(0.0, pyro.param("log_scale", torch.zeros(())).exp()))


def test_the_density_of_a_guide_written_by_hand():
    draws = posterior(20)
    found = density_at_draws(hand_written, draws).log_prob(torch.arange(20))
    expected = dist.Normal(0.0, 1.0).log_prob(torch.cat([draws["v"][:, None], draws["x"]], -1))
    expected = expected.sum(-1) + dist.LogNormal(0.0, 1.0).log_prob(draws["s"])
    torch.testing.assert_close(found, expected)
    assert found.requires_grad


@pytest.mark.parametrize("kind", [AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal])
def test_gaussian_guides_take_the_moments(kind):
    torch.manual_seed(0)
    guide = kind(model)
    taught = teach(guide, posterior(4000), progress=False)
    log_s = draw(guide, 4000)["s"].log()  # normal, of variance 1.25
    assert abs(log_s.mean()) < 0.1 and abs(log_s.std() - 1.25**0.5) < 0.1
    assert taught.num_steps == 0 and taught.after > taught.before + 10


@pytest.mark.parametrize(
    "kind",
    [
        autoregressive,
        residual,
        AutoLowRankMultivariateNormal,
        lambda m: AutoIAFNormal(m, [8]),
        lambda m: AutoMixture(m, [autoregressive(m) for _ in range(2)]),
        lambda m: hand_written,
    ],
    ids=["autoregressive", "residual", "low-rank", "flow", "mixture", "hand-written"],
)
def test_guides_learn(kind):
    torch.manual_seed(0)
    guide, draws = kind(model), posterior(500)
    draws["v"], draws["x"] = draws["v"] + 0.5, 0.5 * draws["x"]
    taught = teach(guide, draws, num_steps=30, progress=False)
    assert taught.after > taught.before + 0.05 and taught.num_steps == 30
    gain = taught.after - taught.before
    assert str(taught) == f"mean log q of held-out draws rose by {gain:.3g} nats"


def test_a_flow_learns_what_no_gaussian_can():
    torch.manual_seed(0)
    draws, guide = posterior(2000), autoregressive(model)
    gaussian = teach(AutoMultivariateNormal(model), draws, progress=False)
    flow = teach(guide, draws, num_steps=100, lr=0.03, progress=False)
    # Minus the posterior's entropy: of v, of log s given v, and of the x given v.
    exact = -(4 * 1.4189 + math.log(0.5))
    assert gaussian.after + 0.02 < flow.after < exact + 0.15


def test_a_policy_replaces_the_numbers():
    draws = {"x": torch.randn(100, 2)}
    guide = AutoIAFNormal(two_latents)
    guide()
    with pytest.raises(ValueError, match="teach needs at least 101 draws, but got 100"):
        teach(guide, draws, progress=False, policy=TeachPolicy(least_draws=101))
    impatient = TeachPolicy(every=1, patience=1)
    taught = teach(guide, draws, num_steps=200, lr=0.0, progress=False, policy=impatient)
    assert taught.num_steps == 1  # with a rate of 0 there is no gain


def two_latents():
    pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def test_never_worse_than_the_start():
    """Whatever the learning rate, to the last bit."""
    torch.manual_seed(0)
    guide = autoregressive(model)
    draws = posterior(2000)
    teach(guide, draws, num_steps=50, progress=False)
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    taught = teach(guide, draws, num_steps=25, lr=30.0, progress=False)
    assert taught.before == taught.after and taught.num_steps == 25
    assert str(taught).endswith("the guide did not change")
    assert all(value.equal(before[name]) for name, value in guide.state_dict().items())


def test_interrupted_ends_no_worse(monkeypatch):
    torch.manual_seed(0)
    guide = autoregressive(model)
    guide()
    before = {name: value.clone() for name, value in guide.state_dict().items()}

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", stop)
    with pytest.raises(KeyboardInterrupt):
        teach(guide, posterior(100), progress=False)
    assert all(value.equal(before[name]) for name, value in guide.state_dict().items())


def test_the_store_and_the_guide_stay_one():
    torch.manual_seed(0)
    guide = AutoNormal(model)
    teach(guide, posterior(1000), progress=False)
    inside = guide._get_loc_and_scale("s")[1].item()
    stored = pyro.param("AutoNormal.scales.s").item()
    guide()
    assert inside == stored == guide._get_loc_and_scale("s")[1].item() > 0.8


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (AutoSemiImplicit(model), "AutoSemiImplicit has none.*Cure"),
        (AutoImplicit(model), "several noises.*Cure"),
        (AutoDelta(model), "no density of a AutoDelta.*Cure"),
        (AutoMixture(model, [AutoSemiImplicit(model)]), "a component of AutoMixture.*Cure"),
        (lambda: pyro.sample("v", dist.Normal(0.0, 1.0)), "no parameter.*Cure"),
        (
            lambda: pyro.sample("z", dist.Normal(pyro.param("a", torch.zeros(())), 1.0)),
            "'z', but the draws do not contain.*Cure",
        ),
        (
            lambda: pyro.sample("v", dist.Delta(pyro.param("a", torch.zeros(())))),
            "'v' of the guide is a point.*Cure",
        ),
    ],
)
def test_refuses(guide, message):
    pyro.clear_param_store()
    with pytest.raises(ValueError, match=message):
        teach(guide, posterior(100), progress=False)


def test_refuses_few_draws_and_draws_of_others():
    with pytest.raises(ValueError, match="at least 20 draws, but got 5"):
        teach(AutoNormal(model), posterior(5))
    with pytest.raises(ValueError, match="'x', but the draws contain only.*Cure"):
        teach(AutoNormal(model), {"v": torch.zeros(50), "s": torch.ones(50)})
