# SPDX-License-Identifier: Apache-2.0
"""Latents written as noise in what parents and data say of them, and chains that walk on it."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch.autograd.functional import jacobian
from torch.distributions import SigmoidTransform

from pyro_implicit.density import Target
from pyro_implicit.fitting import Fit, fit
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import (
    AutoConditional,
    ConditionalReparam,
    conditional_reparams,
    refine,
)
from pyro_implicit.mcmc.chains import WindowedChains
from pyro_implicit.mcmc.policy import SpacePolicy
from pyro_implicit.mcmc.spaces.conditional_noise import ConditionalNoise, NoiseMap, dependent_sites
from pyro_implicit.mcmc.spaces.scaled import ScaledReparam
from pyro_implicit.mcmc.spaces.space import Fitted

pytestmark = pytest.mark.usefixtures("double")

Y = torch.tensor([2.0, -1.0, 0.5, 1.5], dtype=torch.float64)
SIGMA = torch.tensor([0.3, 0.5, 1.0, 2.0], dtype=torch.float64)


def groups(family=dist.Normal):
    def model():
        mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
        scale = pyro.sample("scale", dist.HalfCauchy(2.0))
        with pyro.plate("groups", 4):
            x = pyro.sample("x", family(loc=mean, scale=scale))
            pyro.sample("y", dist.Normal(x, SIGMA), obs=Y)

    return model


def log_normals():
    """Rates of groups, as of a drug's clearance."""
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    with pyro.plate("groups", 4):
        x = pyro.sample("x", dist.LogNormal(mean, scale))
        pyro.sample("y", dist.Normal(x.log(), SIGMA), obs=Y)


def logit_normals():
    """Rates of groups, one by one and as one vector."""
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    base = dist.Normal(mean, scale).expand([4])
    with pyro.plate("groups", 4):
        x = pyro.sample("x", dist.TransformedDistribution(base, SigmoidTransform()))
        pyro.sample("y", dist.Normal(x, SIGMA), obs=Y.sigmoid())
    vector = dist.TransformedDistribution(base.to_event(1), SigmoidTransform())
    z = pyro.sample("z", vector)
    pyro.sample("other", dist.Normal(z, SIGMA).to_event(1), obs=Y.sigmoid())


def student(loc, scale):
    return dist.StudentT(4.0, loc, scale)


def vectors(family=dist.MultivariateNormal):
    mean = pyro.sample("mean", dist.Normal(torch.zeros(3), 5.0).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(3)).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(3, 2.0))
    with pyro.plate("groups", 4):
        x = pyro.sample("x", family(loc=mean, scale_tril=scale.unsqueeze(-1) * corr))
        pyro.sample("y", dist.Normal(x @ torch.tensor([1.0, 2.0, -1.0]), SIGMA), obs=Y)


def nested():
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("outer", 2):
        a = pyro.sample("a", dist.Normal(0.0, scale))
    b = pyro.sample("b", dist.Normal(a.repeat_interleave(2), 0.7 * scale).to_event(1))
    pyro.sample("y", dist.Normal(b, SIGMA).to_event(1), obs=Y)


def walk():
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    x = torch.zeros(())
    for step in range(4):
        x = pyro.sample(f"x_{step}", dist.Normal(x, scale))
        pyro.sample(f"y_{step}", dist.Normal(x, SIGMA[step]), obs=Y[step])


def steps():
    """A walk of steps of latent scale, of which the data see sums."""
    noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    start = pyro.sample("start", dist.Normal(1.0, 2.0))
    x = pyro.sample("x", dist.Normal(0.0, scale).expand([4]).to_event(1))
    pyro.sample("y", dist.Normal(start + x.cumsum(-1), noise).to_event(1), obs=Y)


def single():
    """A vector of one."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    x = pyro.sample("x", dist.MultivariateNormal(torch.zeros(1), scale_tril=scale.reshape(1, 1)))
    pyro.sample("y", dist.Normal(x, SIGMA[:1]).to_event(1), obs=Y[:1])


NEIGHBOURS = torch.ones(5, dtype=torch.float64).diag(1)  # of six cells in a row
NEIGHBOURS = NEIGHBOURS + NEIGHBOURS.mT


def field(name):
    """A Gaussian field by its covariance or its precision."""

    def model():
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        alpha = pyro.sample("alpha", dist.Beta(4.0, 1.0))
        precision = tau * (NEIGHBOURS.sum(-1).diag() - alpha * NEIGHBOURS)
        given = precision if name == "precision_matrix" else precision.inverse()
        x = pyro.sample("x", dist.MultivariateNormal(alpha.expand(6), **{name: given}))
        pyro.sample("y", dist.Normal(x[:4], SIGMA).to_event(1), obs=Y)

    return model


DESIGN = torch.tensor([[1.0, -1.0, 0.5], [0.0, 2.0, 1.0], [1.0, 1.0, -2.0], [-1.0, 0.5, 1.0]])


def by_hand():
    """A horseshoe and an intercept, whose priors are those of noise."""
    tau = pyro.sample("tau", dist.LogNormal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    level = pyro.sample("level", dist.Normal(1.0, 5.0))
    with pyro.plate("features", 3):
        z = pyro.sample("z", dist.Normal(0.5, 2.0))
        log_lam = pyro.sample("log_lam", dist.Normal(0.0, 1.0))
    mean = level + DESIGN.to(z) @ (tau * log_lam.exp() * z)
    pyro.sample("y", dist.Normal(mean, sigma).to_event(1), obs=Y)


def series():
    """A local level model with noise of latent scale."""
    noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    start = pyro.sample("start", dist.Normal(1.0, 2.0))
    z = pyro.sample("z", dist.Normal(0.5, 2.0).expand([4]).to_event(1))
    pyro.sample("y", dist.Normal(start + scale * z.cumsum(-1), noise).to_event(1), obs=Y)


def both():
    """Groups of a centred and of a non-centred effect."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    tau = pyro.sample("tau", dist.LogNormal(0.0, 1.0))
    with pyro.plate("groups", 4):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        x = pyro.sample("x", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Normal(x, SIGMA), obs=Y)
        pyro.sample("other", dist.Normal(tau * z, SIGMA), obs=Y.flip(0))


def taken_names():
    """Sites called as noise and its density would be."""
    scale = pyro.sample("x_noise", dist.LogNormal(0.0, 1.0))
    tau = pyro.sample("z_noise__factor", dist.LogNormal(0.0, 1.0))
    with pyro.plate("z_noise", 4):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        x = pyro.sample("x", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Normal(x, SIGMA), obs=Y)
        pyro.sample("other", dist.Normal(tau * z, SIGMA), obs=Y.flip(0))


def switches(how="enumerated"):
    """Each observation is of the group or of a wider normal: enumerated or summed by hand."""
    mean, scale = pyro.sample("mean", dist.Normal(0.0, 2.0)), pyro.sample("scale", dist.Gamma(2, 1))
    with pyro.plate("groups", 4):
        x = pyro.sample("x", dist.Normal(mean, scale))
        if how == "enumerated":
            wide = pyro.sample("wide", dist.Bernoulli(0.2))
            pyro.sample("y", dist.Normal(x, SIGMA * (1 + 2 * wide)), obs=Y)
            return
        narrow, wide = (dist.Normal(x, SIGMA * factor).log_prob(Y) for factor in (1, 3))
        total = torch.logaddexp(narrow + math.log(0.8), wide + math.log(0.2))
        if how == "impossible":  # the second derivative of this is not a number
            total = torch.logaddexp(total, total - 1e9)
        pyro.factor("y", total)


MODELS = {
    "enumerated": (switches, ["x"]),
    "taken names": (taken_names, ["z", "x"]),
    "by hand": (by_hand, ["level", "z"]),
    "series": (series, ["start", "z"]),
    "steps": (steps, ["start", "x"]),
    "both": (both, ["z", "x"]),
    "single": (single, ["x"]),
    "by precision": (field("precision_matrix"), ["x"]),
    "by covariance": (field("covariance_matrix"), ["x"]),
    "normal": (groups(), ["x"]),
    "log-normal": (log_normals, ["x"]),
    "logit-normal": (logit_normals, ["x", "z"]),
    "cauchy": (groups(dist.Cauchy), ["x"]),
    "student": (groups(student), ["x"]),
    "vectors": (vectors, ["x"]),
    "student vectors": (partial(vectors, partial(dist.MultivariateStudentT, 4.0)), ["x"]),
    "nested": (nested, ["a", "b"]),
    "walk": (walk, [f"x_{step}" for step in range(4)]),
}


def conditional(name, **limits):
    model, sites = MODELS[name]
    density = Target(model)
    torch.manual_seed(0)
    points = 0.5 * torch.randn(3, density.latent_dim)
    return ConditionalNoise(density, points[0], policy=SpacePolicy(**limits)), points


def by_change_of_variables(walked, noise):
    """The log-density of noise, by the determinant of the map to latents."""
    to_latent = NoiseMap.to_latent.__wrapped__
    log_dets = [
        jacobian(lambda at: to_latent(walked._map, at.unsqueeze(0))[0], one).slogdet()[1]
        for one in noise
    ]
    return walked.target.log_prob(walked.to_latent(noise)) + torch.stack(log_dets)


@pytest.mark.parametrize("name", MODELS)
def test_the_density_is_the_models_by_change_of_variables(name):
    walked, points = conditional(name)
    assert set(walked.reparams) == set(MODELS[name][1])
    noise = walked.to_points(points)
    assert torch.allclose(walked.to_latent(noise), points, atol=1e-10)
    expected = by_change_of_variables(walked, noise)
    assert torch.allclose(walked.score(noise)[0], expected, atol=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        *("normal", "log-normal", "vectors", "by precision", "by covariance", "nested", "walk"),
        "by hand",
        "series",
        "steps",
    ],
)
def test_noise_is_standard_normal_given_the_other_latents(name):
    """Of conjugate models, at the scale at which the expansion was made."""
    walked, points = conditional(name)
    start = walked.to_points(points[:1])
    names = [f"{site}_noise" for site in MODELS[name][1]]
    where = walked._map.noise.split(torch.arange(start.shape[-1]))
    rows = torch.cat([where[site].flatten() for site in names])
    moved = start.repeat(2, 1)
    moved[0, rows], moved[1, rows] = 0.0, torch.linspace(-2, 2, len(rows))
    log_prob, score = walked.score(moved)
    assert torch.allclose(score[:, rows], -moved[:, rows], atol=1e-8)
    assert torch.allclose(log_prob[0] - log_prob[1], 0.5 * moved[1, rows].square().sum())


@pytest.mark.parametrize(
    ("name", "sites"),
    [
        ("normal", ["x"]),
        ("by hand", ["level", "z"]),
        ("series", ["start", "z"]),
        ("steps", ["start", "x"]),
    ],
)
def test_noise_of_normals_is_so_at_every_scale(name, sites):
    walked, points = conditional(name)
    places = walked._map.noise.split(torch.arange(points.shape[-1]))
    own = torch.cat([places[f"{site}_noise"].flatten() for site in sites])
    for shift in (-3.0, 3.0):
        moved = points[:1] + shift * torch.linspace(0.2, 1.0, points.shape[-1])
        noise = walked.to_points(moved)
        assert torch.allclose(walked.score(noise)[1][:, own], -noise[:, own], atol=1e-8)


@pytest.mark.parametrize(("name", "coupled"), [("steps", {"start", "x"}), ("normal", {"x"})])
def test_coupling_is_also_seen_in_sites_that_are_too_long_for_their_hessian(name, coupled):
    """By products with random signs; only the elements of the walk are coupled."""
    walked, points = conditional(name, max_columns=3, num_probes=256)
    assert set(walked.reparams) == coupled
    assert isinstance(walked.reparams["x"], ScaledReparam) == (name == "steps")
    noise = walked.to_points(points)
    assert torch.allclose(walked.score(noise)[0], by_change_of_variables(walked, noise), atol=1e-9)


def test_a_widened_target_keeps_its_space():
    """In single precision, the map is as that of double precision."""

    def model(design, y):
        tau = pyro.sample("tau", dist.LogNormal(0.0, 1.0))
        with pyro.plate("groups", len(y)):
            x = pyro.sample("x", dist.Normal(0.0, tau))
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        mean = x + tau * (z @ design.mT)
        pyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=y)

    found = []
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        target = Target(model, DESIGN.to(dtype), Y.to(dtype))
        points = torch.linspace(-1.0, 1.0, 2 * target.latent_dim).reshape(2, -1).to(dtype)
        assert target.widen(points) == target.is_wide == (dtype == torch.float32)
        walked = ConditionalNoise(target, points[0])
        assert set(walked.reparams) == {"x", "z"} and walked._map.noise.is_wide == target.is_wide
        noise = walked.to_points(points)
        torch.testing.assert_close(walked.to_latent(noise), points, rtol=1e-5, atol=1e-5)
        found.append(torch.cat([noise, *walked.score(noise)[1:]]))
    torch.testing.assert_close(found[1], found[0].float(), rtol=1e-4, atol=1e-4)


def test_the_recorded_map_is_the_map():
    walked, _ = conditional("nested")
    for seed in range(4):  # plain, recorded, and from the recording
        torch.manual_seed(seed)
        points = torch.randn(7, walked.target.latent_dim)
        expected = walked._map.to_latent(points)
        torch.testing.assert_close(walked.to_latent(points), expected, rtol=0, atol=0)


def test_more_latents_than_a_matrix_is_made_of_are_taken_one_by_one():
    """Exactly, where the data see each by itself."""
    walked, points = conditional("both", max_dense=3, max_series=3)
    assert walked.reparams["z"].block.precision.shape == (4,)
    noise = walked.to_points(points)
    assert torch.allclose(walked.to_latent(noise), points, atol=1e-10)
    expected = by_change_of_variables(walked, noise)
    assert torch.allclose(walked.score(noise)[0], expected, atol=1e-9)


LAWS = [("by hand", {}), ("series", {}), ("steps", {}), ("both", {"max_dense": 3, "max_series": 3})]


def laws_of(noise_map, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        0.5 * torch.randn(block.num_changes, generator=generator, dtype=torch.float64)
        for block in noise_map.blocks
    )


@pytest.mark.parametrize(("name", "limits"), LAWS)
def test_the_density_is_exact_for_other_laws(name, limits):
    walked, points = conditional(name, **limits)
    before = walked.to_points(points)
    walked._use(Fitted(0, laws_of(walked._map)))
    noise = walked.to_points(points)
    assert not torch.allclose(noise, before, atol=0.1)
    assert torch.allclose(walked.to_latent(noise), points, atol=1e-10)
    expected = by_change_of_variables(walked, noise)
    assert torch.allclose(walked.score(noise)[0], expected, atol=1e-9)
    again = ConditionalNoise(
        walked.target, points[0], policy=SpacePolicy(**limits), fitted=walked.fitted
    )
    assert torch.allclose(again.to_points(points), noise, atol=1e-9)


@pytest.mark.parametrize(("name", "limits"), LAWS)
def test_the_law_of_draws_is_found(name, limits):
    """Of draws whose noise is standard normal under a known law."""
    walked, _ = conditional(name, **limits)
    known = walked._map.changed(laws_of(walked._map))
    torch.manual_seed(2)
    noise = torch.randn(2000, walked.target.latent_dim)
    own = [f"{site}_noise" for site in walked.reparams]
    for name, part in known.noise.split(noise).items():
        part.mul_(1.0 if name in own else 0.4)
    latent = known.to_latent(noise)
    start = [torch.zeros(block.num_changes) for block in known.blocks]
    found = walked._map.changed(walked._map.fitted_laws(latent, start, SpacePolicy()))
    errors = [(one.to_points(latent) - noise).square().mean() for one in (found, walked)]
    assert errors[0] < 0.15 * errors[1]
    misfits = [one.misfit(latent) for one in (found, known, walked._map)]
    assert misfits[0] < misfits[1] + 0.1 * (misfits[2] - misfits[1]) + 0.03


def lasso():
    """More coefficients than rows, whose likelihood is a wall and far from normal."""
    tau = pyro.sample("tau", dist.HalfCauchy(0.5))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    beta = pyro.sample("beta", dist.Laplace(0.0, tau).expand([16]).to_event(1))
    y = (x[:, 0] > 0).double()
    pyro.sample("y", dist.Bernoulli(logits=beta @ x.mT).to_event(1), obs=y)


def test_the_space_of_a_far_middle_learns_from_draws():
    """Where second derivatives at the middle are misleading."""
    target = Target(lasso)
    middle = torch.cat([torch.tensor([-1.0]), torch.zeros(16)])
    walked = ConditionalNoise(target, middle)
    torch.manual_seed(0)
    log_tau = torch.randn(4000, 1)
    beta = dist.Laplace(0.0, log_tau.exp()).expand([4000, 16]).sample()
    points = torch.cat([log_tau, beta], -1)
    weight = target.log_prob(points) - dist.Laplace(0.0, log_tau.exp()).log_prob(beta).sum(-1)
    kept = points[torch.multinomial(weight.softmax(0), 1000)]
    noise = walked.to_points(kept)
    for _ in range(2):  # a recording of this map
        torch.testing.assert_close(walked.to_latent(noise), kept)
    again = walked.refitted(kept)
    torch.testing.assert_close(again.to_latent(again.to_points(kept)), kept)
    assert again.fitted is not None and torch.equal(again.middle, middle)
    assert again._map.misfit(kept) < walked._map.misfit(kept) - 0.5
    # The median is near the middle, and still the new one if chains have shown that this one fails.
    anew = walked.refitted(kept, anew=True)
    assert torch.equal(anew.middle, kept.median(0).values)
    torch.testing.assert_close(anew.to_latent(anew.to_points(kept)), kept)


def shifted():
    """The data say of the noise what another latent, which is no location, makes of it."""
    shift = pyro.sample("shift", dist.LogNormal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    with pyro.plate("steps", 4):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(shift + sigma * z, 0.1).to_event(1), obs=Y)


def noisy():
    """A precision of the data's noise is no factor of a coefficient."""
    precision = pyro.sample("precision", dist.Gamma(1.0, 1.0))
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(weight * SIGMA, precision.rsqrt()).to_event(1), obs=Y)


def masked():
    tau = pyro.sample("tau", dist.LogNormal(0.0, 1.0))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).mask(torch.tensor(True)))
    pyro.sample("y", dist.Normal(tau * z, 1.0), obs=Y[0])


def scaled():
    """By a tensor, as Pyro allows it."""
    tau = pyro.sample("tau", dist.LogNormal(0.0, 1.0))
    with poutine.scale(scale=SIGMA), pyro.plate("groups", 4):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(tau * z, 1.0).to_event(1), obs=Y)


def test_a_level_and_its_steps_share_the_power_of_the_noise():
    """Fits of their powers differ by chance, but their information must grow together."""
    y = (0.3 * torch.arange(40.0).cos().cumsum(-1)).exp() * torch.arange(40.0).sin()

    def volatility():
        nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
        sigma = pyro.sample("sigma", dist.Exponential(5.0))
        start = pyro.sample("start", dist.Normal(0.0, 2.0))
        steps = pyro.sample("steps", dist.Normal(0.0, sigma).expand([40]).to_event(1))
        scale = (start + steps.cumsum(-1)).exp()
        pyro.sample("y", dist.StudentT(nu, 0.0, scale).to_event(1), obs=y)

    target = Target(volatility)
    middle = torch.cat([torch.tensor([0.5, -1.0, 0.0]), torch.zeros(40)])
    block = ConditionalNoise(target, middle).reparams["steps"].block
    assert block.rests["start"]["nu"] == block.rests["steps"]["nu"] > 0.1
    assert abs(block.powers["steps"]["sigma"] - 2) < 1e-6


@pytest.mark.parametrize("model", [shifted, noisy, masked, scaled])
def test_latents_without_such_a_law_are_left_alone(model):
    density = Target(model)
    assert ConditionalNoise(density, density.init_loc + 0.1).reparams == {}


def test_chains_settle_in_a_horseshoe_written_by_hand():
    """Against the integral over the coefficients, which are normal given their scales."""

    def model():
        tau = pyro.sample("tau", dist.HalfCauchy(1.0))
        with pyro.plate("groups", 8):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(tau * z, 0.1), obs=torch.linspace(-2, 2, 8))

    found = refine(model, AutoNormal(model), num_chains=64, seed=0,
                   progress=False, max_gradients=1500)  # fmt: skip
    assert found.space == "conditional" and found.stopped == "converged"
    tau = torch.linspace(1e-3, 60, 60_001)
    variance = tau.square() + 0.01
    weight = -4 * variance.log() - torch.linspace(-2, 2, 8).square().sum() / variance / 2
    weight = (weight - weight.max()).exp() / (1 + tau.square())
    expected = (weight * tau.log()).sum() / weight.sum()
    spread = ((weight * tau.log().square()).sum() / weight.sum() - expected**2).sqrt()
    drawn = found.get_samples()["tau"].log()
    assert abs(drawn.mean() - expected) < 0.1 * spread
    assert abs(drawn.std() / spread - 1) < 0.1


@pytest.mark.parametrize(("how", "tolerance"), [("enumerated", 1e-9), ("impossible", 1e-3)])
def test_the_map_is_that_of_the_sum_by_hand(how, tolerance):
    expected, found = (
        ConditionalNoise(Target(partial(switches, one)), torch.tensor([0.5, 0.2] + [0.4] * 4))
        for one in ("by hand", how)
    )
    one, other = found.reparams["x"], expected.reparams["x"]
    assert other.precision.max() > 0.1
    torch.testing.assert_close(one.precision, other.precision, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(one.information, other.information, rtol=tolerance, atol=1e-9)


def test_without_data_it_is_the_non_centred_form():
    reparam = ConditionalReparam(torch.zeros(4), torch.zeros(4))
    model = poutine.reparam(lambda: pyro.sample("x", dist.Normal(2.0, 3.0).expand([4])),
                            {"x": reparam})  # fmt: skip
    trace = poutine.trace(model).get_trace()
    nodes = trace.nodes
    assert torch.allclose(nodes["x"]["value"], 2.0 + 3.0 * nodes["x_noise"]["value"])
    expected = dist.Normal(0.0, 1.0).log_prob(nodes["x_noise"]["value"]).sum()
    assert torch.allclose(trace.log_prob_sum(), expected)


class Slab(dist.Normal):
    """A subclass with other arguments."""

    def __init__(self, where):
        super().__init__(where["loc"], where["scale"])


def slab(loc, scale):
    return Slab({"loc": loc, "scale": scale})


def student_vector(loc, scale):
    factor = torch.tensor([[1.0, 0.0], [0.5, 2.0]]).to(scale)
    return dist.MultivariateStudentT(4.0, loc, scale * factor)


@pytest.mark.parametrize(
    "family",
    [
        *(dist.Normal, slab, student, dist.Cauchy, dist.Laplace, dist.Logistic, dist.Gumbel),
        student_vector,
    ],
)
def test_the_density_has_no_spurious_peak_where_the_scale_vanishes(family):
    """In float32, x - 3 is 0 if the scale is 1e-12, while the noise is not."""
    noise, log_probs = torch.tensor([1.5, -0.7]), []
    precision = torch.eye(2) if family is student_vector else torch.ones(2)
    for dtype in (torch.float32, torch.float64):
        loc, scale = torch.tensor([3.0, -2.0], dtype=dtype), torch.tensor(1e-12, dtype=dtype)
        fn = family(loc=loc, scale=scale)
        fn = fn.to_event(1 - fn.event_dim)
        reparam = ConditionalReparam(precision.to(dtype), torch.ones(2, dtype=dtype))

        def model(fn=fn):
            pyro.sample("x", fn)

        conditioned = poutine.condition(model, {"x_noise": noise.to(dtype)})
        trace = poutine.trace(poutine.reparam(conditioned, {"x": reparam})).get_trace()
        log_probs.append(trace.log_prob_sum().double())
    torch.testing.assert_close(*log_probs, rtol=1e-5, atol=1e-5)


def test_a_value_that_is_given_is_kept():
    """As Pyro's own reparameterisers do it, so that init functions may name the site."""
    reparam = ConditionalReparam(SIGMA**-2, Y * SIGMA**-2)
    model = poutine.reparam(groups(), {"x": reparam})
    init = poutine.trace(
        pyro.infer.autoguide.initialization.InitMessenger(
            pyro.infer.autoguide.init_to_value(values={"x": Y})
        )(model)
    ).get_trace()
    assert torch.equal(init.nodes["x"]["value"], Y)


@pytest.mark.parametrize(
    "fn", [dist.Gamma(1.0, 1.0), dist.Uniform(0.0, 1.0), dist.LogNormal(0.0, 1.0)]
)
def test_other_families_are_left_alone(fn):
    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        pyro.sample(
            "x", dist.TransformedDistribution(fn, dist.transforms.AffineTransform(0, scale))
        )
        pyro.sample("z", dist.Normal(0.0, 1.0))

    density = Target(model)
    assert dependent_sites(density, density.init_loc) == []
    with pytest.raises(ValueError, match="depend on other latents, or are multiplied"):
        refine(model, AutoNormal(model), frame="conditional", num_chains=16, progress=False)


@pytest.mark.parametrize("factor", [2.0, torch.tensor([1.0, 2.0])])
def test_scaled_and_masked_sites_are_left_alone(factor):
    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", 2), poutine.scale(scale=factor):
            pyro.sample("x", dist.Normal(0.0, scale))

    density = Target(model)
    assert dependent_sites(density, density.init_loc) == []


def test_chains_settle_in_a_hierarchy_where_they_do_not_among_its_latents():
    """Eight groups that say little: centred, the chains meet a funnel."""

    def model():
        scale = pyro.sample("scale", dist.HalfCauchy(1.0))
        with pyro.plate("groups", 8):
            x = pyro.sample("x", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(x, 3.0), obs=torch.linspace(-2, 2, 8))

    guide = AutoNormal(model)
    found = refine(model, guide, num_chains=64, seed=0, progress=False, max_gradients=2000)
    assert found.space == "conditional" and found.stopped == "converged"
    scale = torch.linspace(1e-4, 60, 60_001)
    variance = scale.square() + 9
    weight = -4 * variance.log() - torch.linspace(-2, 2, 8).square().sum() / variance / 2
    weight = weight.exp() / (1 + scale.square())
    expected = (weight * scale.log()).sum() / weight.sum()
    spread = ((weight * scale.log().square()).sum() / weight.sum() - expected**2).sqrt()
    drawn = found.get_samples()["scale"].log()
    assert abs(drawn.mean() - expected) < 0.1 * spread
    assert abs(drawn.std() / spread - 1) < 0.1


def test_any_guide_of_the_reparameterised_model_is_structured():
    """Its mean field is exact, given the scale, where the groups are independent."""

    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.1))
        with pyro.plate("groups", 4):
            x = pyro.sample("x", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(x, SIGMA), obs=Y)

    reparams = conditional_reparams(model, {"scale": torch.ones(1), "x": torch.zeros(1, 4)})
    assert torch.allclose(reparams["x"].precision, SIGMA**-2)
    assert torch.allclose(reparams["x"].information, Y * SIGMA**-2)
    written = poutine.reparam(model, reparams)
    noise = torch.randn(4)
    trace = poutine.trace(
        poutine.condition(written, {"scale": torch.tensor(2.0), "x_noise": noise})
    ).get_trace()
    variance = 1 / (1 / 4 + SIGMA**-2)
    expected = variance * Y * SIGMA**-2 + variance.sqrt() * noise
    assert torch.allclose(trace.nodes["x"]["value"], expected)


def test_steps_of_which_the_data_see_sums_are_not_taken_for_known():
    """What is told of each is what is left of its variance, in closed form."""

    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        steps = pyro.sample("steps", dist.Normal(0.5, scale).expand([6]).to_event(1))
        pyro.sample("y", dist.Normal(steps.cumsum(-1), 0.5).to_event(1), obs=torch.arange(6.0))

    density = Target(model)
    middle = torch.full((7,), 0.3)
    policy = SpacePolicy(coupled=math.inf)
    found = ConditionalNoise(density, middle, policy=policy).reparams["steps"]
    sums, prior = torch.ones(6, 6).tril(), math.exp(-0.6)
    covariance = torch.linalg.inv(4 * sums.mT @ sums + prior * torch.eye(6))
    mean = covariance @ (4 * sums.mT @ torch.arange(6.0) + prior * 0.5)
    precision = 1 / covariance.diagonal() - prior
    assert torch.allclose(found.precision, precision)
    assert (found.precision < 0.5 * (4 * sums.mT @ sums).diagonal()).any()
    expected = precision * mean + prior * (mean - 0.5)
    assert torch.allclose(found.information, expected)


@pytest.mark.parametrize("name", ["normal", "vectors"])
def test_very_many_latents_are_probed_by_random_signs(name):
    """Exactly, where groups are independent."""
    exact, _ = conditional(name)
    probed, _ = conditional(name, max_columns=0)
    one, other = exact.reparams["x"], probed.reparams["x"]
    assert torch.allclose(one.precision, other.precision)
    assert torch.allclose(one.information, other.information)


@pytest.mark.parametrize(
    "name",
    [
        "single",
        "normal",
        "log-normal",
        "student",
        "vectors",
        "nested",
        "walk",
        "by hand",
        "taken names",
    ],
)
def test_the_density_of_the_guide_is_that_of_its_noise(name):
    """By the change of variables, with Pyro's own trace of guide and model."""
    model, sites = MODELS[name]
    torch.manual_seed(0)
    walked, points = conditional(name)
    guide = AutoConditional(model, walked.reparams)
    to_latent = NoiseMap.to_latent.__wrapped__
    trace = poutine.trace(guide).get_trace()
    values = {site: trace.nodes[site]["value"] for site in walked.target.shapes}
    latent = walked.target.unconstrain({n: value.unsqueeze(0) for n, value in values.items()})
    noise = walked.to_points(latent)[0]
    log_det = jacobian(lambda one: to_latent(walked._map, one.unsqueeze(0))[0], noise).slogdet()[1]
    by_guide = guide.noise.get_posterior().log_prob(noise) - log_det
    by_model = poutine.trace(poutine.condition(model, values)).get_trace().log_prob_sum()
    to_constrained = walked.target.log_prob(latent)[0] - by_model
    assert torch.allclose(trace.log_prob_sum() + to_constrained, by_guide, atol=1e-8)


def test_a_taught_guide_is_exact_where_the_model_is_gaussian_given_its_scale():
    torch.manual_seed(0)

    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.3))
        with pyro.plate("groups", 4):
            x = pyro.sample("x", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(x, SIGMA), obs=Y)

    found = refine(model, AutoNormal(model), num_chains=128, seed=0, progress=False)
    guide = AutoConditional(model, found.reparams)
    guide.take_moments(found.get_samples())
    draws = guide.sample_posterior(4000)
    for name, value in found.get_samples().items():
        assert (draws[name].mean(0) - value.mean(0)).abs().max() < 0.1 * value.std(0).max()
        assert (draws[name].std(0) / value.std(0) - 1).abs().max() < 0.1
    median, levels = guide.median(), guide.quantiles([0.1, 0.9], num_samples=4000)
    for name, value in draws.items():
        assert torch.allclose(median[name], value.median(0).values, atol=0.1)
        assert levels[name].shape == (2, *value.shape[1:])
        expected = value.quantile(torch.tensor([0.1, 0.9]), dim=0)
        assert torch.allclose(levels[name], expected, atol=0.15)
    state = torch.get_rng_state()
    assert torch.equal(guide.median()["x"], median["x"])
    assert torch.equal(torch.get_rng_state(), state)
    loss = Trace_ELBO(num_particles=200).loss(model, guide)
    scale = torch.linspace(0.01, 8, 4000)
    evidence = dist.LogNormal(0.0, 0.3).log_prob(scale)
    evidence = evidence + dist.Normal(0.0, (scale[:, None] ** 2 + SIGMA**2).sqrt()).log_prob(Y).sum(
        -1
    )
    assert -loss == pytest.approx(evidence.logsumexp(0).item() + math.log(7.99 / 3999), abs=0.05)


def test_a_guide_of_flat_hyperparameters_is_taught():
    """They have no draws of the prior to begin with."""

    def model():
        mean = pyro.sample("mean", dist.ImproperUniform(dist.constraints.real, (), ()))
        scale = pyro.sample("scale", dist.ImproperUniform(dist.constraints.positive, (), ()))
        with pyro.plate("groups", 4):
            x = pyro.sample("x", dist.Normal(mean, scale))
            pyro.sample("y", dist.Normal(x, SIGMA), obs=Y)

    mean, scale = 0.3 * torch.randn(500), (0.2 * torch.randn(500)).exp()
    draws = {"mean": mean, "scale": scale, "x": mean[:, None] + torch.randn(500, 4)}
    guide = AutoConditional(model, conditional_reparams(model, draws))
    guide.take_moments(draws)
    found = guide.sample_posterior(2000)
    for name, expected in draws.items():
        torch.testing.assert_close(found[name].std(0), expected.std(0), rtol=0.2, atol=0.0)


def test_a_guide_is_taught_if_the_median_of_the_prior_is_impossible():
    """The logarithm is NaN at the median."""

    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("groups", 4):
            x = pyro.sample("x", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(x + (level - 0.5).log(), SIGMA), obs=Y)

    def draws(number):
        free = torch.randn(number, 6)
        return {"scale": free[:, 0].exp(), "level": 2 + 0.1 * free[:, 1], "x": free[:, 2:]}

    pyro.set_rng_seed(0)
    guide = AutoConditional(model, conditional_reparams(model, draws(100)))
    taught = guide.take_moments(draws(500))
    assert taught.after > taught.before
    level = guide.sample_posterior(2000)["level"]
    assert level.mean().item() == pytest.approx(2.0, abs=0.03)


@pytest.mark.parametrize("elbo", [Trace_ELBO(2), ImplicitELBO(8)])
def test_the_guide_learns_as_any_of_pyros(elbo):
    model = groups()
    guide = AutoConditional(model, conditional_reparams(model, AutoNormal(model)))
    pyro.set_rng_seed(0)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), elbo)
    losses = [svi.step() for _ in range(60)]
    assert sum(losses[-10:]) < sum(losses[:10]) - 5
    draws = Predictive(model, guide=guide, num_samples=5, return_sites=["x", "y"])()
    assert draws["x"].shape == (5, 4) and draw(guide, 7)["x"].shape == (7, 4)
    assert sorted(guide()) == ["mean", "scale", "x"]


def test_particles_in_a_plate_of_a_model_that_does_not_broadcast():
    """One by one or all at once, the ELBO is the same."""
    index = torch.tensor([0, 0, 1, 1])

    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.1))
        with pyro.plate("groups", 2):
            x = pyro.sample("x", dist.Normal(0.0, scale))
        with pyro.plate("rows", 4):
            pyro.sample("y", dist.Normal(x[index], SIGMA), obs=Y)

    pyro.set_rng_seed(0)
    guide = AutoConditional(model, conditional_reparams(model, AutoNormal(model)))
    losses = [elbo.loss(model, guide) for elbo in (Trace_ELBO(150), ImplicitELBO(600))]
    assert losses[0] == pytest.approx(losses[1], abs=0.1)


def test_fit_leaves_a_guide_of_the_noise_that_can_be_saved(tmp_path):
    model = groups()
    result = fit(model, "auto", seed=0, progress=False)
    assert result.chosen == "conditional" and isinstance(result.guide, AutoConditional)
    assert result.refined.space == "conditional"
    draws = result.guide.sample_posterior(2000)["x"]
    refined = result.refined.get_samples()["x"]
    assert ((draws.mean(0) - refined.mean(0)).abs() < 0.2 * refined.std(0)).all()
    result.save(tmp_path / "result.pt")
    assert result.guide.model is not None
    copied = copy.deepcopy(result)
    assert torch.equal(copied.refined.get_samples()["x"], refined)
    assert copied.guide.median()["x"].shape == refined.shape[1:]  # it has its model
    loaded = Fit.load(tmp_path / "result.pt", model)
    found = []
    for guide in (result.guide, loaded.guide):
        torch.manual_seed(1)
        found.append(guide.sample_posterior(3)["x"])
    assert torch.equal(*found)


def test_the_guide_needs_no_data_once_it_is_set_up():
    """As Pyro's: ``Predictive(model, guide=guide)(x)`` of a model with ``y=None``."""

    def model(exposure, y=None):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.3))
        with pyro.plate("groups", 4):
            x = pyro.sample("x", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Poisson(exposure * x.exp()), obs=y)

    exposure, y = torch.tensor(3.0), torch.tensor([0.0, 4.0, 2.0, 9.0])
    guide = AutoConditional(model, conditional_reparams(model, AutoNormal(model), exposure, y))
    guide(exposure, y)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for args in ((exposure, y), (exposure,)):
            torch.manual_seed(1)
            found.append(guide.sample_posterior(3, *args))
        predicted = Predictive(model, guide=guide, num_samples=50, parallel=True)(exposure)
    assert torch.equal(found[0]["x"], found[1]["x"])
    assert predicted["y"].shape == predicted["x"].shape == (50, 4)


@pytest.mark.parametrize("kind", ["far", "learns"])
def test_killed_chains_go_on(tmp_path, monkeypatch, kind):
    pyro.set_rng_seed(1)  # with some starts, another law is found later
    file, model, site = tmp_path / "chains.pt", groups(), "x"
    if kind == "far":  # the space is made again on the way
        far = {"mean": torch.full((16,), -20.0), "scale": torch.linspace(0.1, 0.2, 16)}
        guide = far | {"x": -20 + 0.1 * torch.randn(16, 4)}
    if kind == "learns":  # another law of the information is found
        tau = torch.linspace(-1.5, 0.0, 16).exp()
        model, site = lasso, "beta"
        guide = {"tau": tau, "beta": tau.unsqueeze(-1) * torch.randn(16, 16)}

    def run(**options):
        number = {"far": 100, "learns": 150}[kind]
        options |= {"num_chains": 16, "max_gradients": number, "seed": 0, "progress": False}
        return refine(model, guide, **options)

    whole = run()
    assert whole.space == "conditional"
    if kind == "far":
        assert abs(whole.chains.middle[0]) < 8
    assert (whole.chains.fitted is not None) == (kind == "learns")
    advance, calls = WindowedChains.advance, iter(range(12))

    def killed(self, *args, **kwargs):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return advance(self, *args, **kwargs)

    monkeypatch.setattr(WindowedChains, "advance", killed)
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=file, checkpoint_every=5)
    monkeypatch.setattr(WindowedChains, "advance", advance)
    again = run(checkpoint=file, checkpoint_every=5)
    assert torch.equal(again.get_samples()[site], whole.get_samples()[site])
    more = [one.refine_more(max_gradients=10, progress=False) for one in (whole, again)]
    assert torch.equal(*(one.get_samples()[site] for one in more))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_wants_its_model_and_the_original_keeps_it(make_copy):
    model = groups()
    guide = AutoConditional(model, conditional_reparams(model, AutoNormal(model)))
    guide()
    for _ in range(2):  # copies of one that was copied, too
        copied = make_copy(guide)
        assert guide.noise.model is not None and guide.noise.master() is guide
    draws = []
    for one in (guide, copied):
        if one is copied:
            with pytest.raises(RuntimeError, match=r"without its model.*Cure: guide.attach\(model"):
                one()
            one.attach(model)
        one()
        pyro.set_rng_seed(0)
        draws.append(Predictive(model, guide=one, num_samples=5, parallel=True)()["x"])
    assert torch.equal(*draws)


def test_missing_arguments_of_the_model_are_named():
    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("groups", len(y)):
            x = pyro.sample("x", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(x, SIGMA), obs=y)

    guide = AutoConditional(model, conditional_reparams(model, AutoNormal(model), Y))
    for _ in range(2):
        with pytest.raises(TypeError, match="AutoConditional reads the model's arguments.*Cure"):
            guide.sample_posterior(4)
        guide(Y)


def test_latents_that_discrete_ones_make():
    """They are in the sum over these, and in no site of their own."""

    def model():
        which = pyro.sample("which", dist.Bernoulli(0.3))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        pyro.sample("level", dist.Normal(2 * which, scale))

    assert dependent_sites(Target(model), torch.zeros(2)) == []
    walked = NoiseMap(Target(model))
    points = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(walked.to_latent(points), points)
    torch.testing.assert_close(walked.to_points(points), points)


def test_latents_of_a_markov_chain_beside_enumerated_states():
    """Pyro's scope has a site before its enumeration knows it, while its noise is drawn."""
    y = torch.tensor([1.0, 0.0, 1.0])

    def model():
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        state = torch.tensor(0)
        for step in pyro.markov(range(3)):
            a = pyro.sample(f"a_{step}", dist.Normal(0.0, scale))
            state = pyro.sample(f"z_{step}", dist.Bernoulli(logits=a + state)).long()
            pyro.sample(f"y_{step}", dist.Bernoulli(0.2 + 0.6 * state), obs=y[step])

    target = Target(model)
    space = ConditionalNoise(target, target.init_loc)
    assert set(space.reparams) == {"a_0", "a_1", "a_2"}
    noise = torch.randn(5, 4)
    torch.testing.assert_close(space.plain_score(noise)[0], by_change_of_variables(space, noise))
