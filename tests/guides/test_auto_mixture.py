# SPDX-License-Identifier: Apache-2.0
"""Mixtures of guides: their density, their parameters, what they save, and what they refuse."""

from __future__ import annotations

import io
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoMultivariateNormal, AutoNormal
from torch import nn

from pyro_implicit import (
    AutoImplicit,
    AutoSemiImplicit,
    InjectiveELBO,
    ResidualGenerator,
    evidence_bound,
)
from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.target import Target
from pyro_implicit.distributions import IntractableDensityError
from pyro_implicit.fitting.candidates import mixture_weights
from pyro_implicit.fitting.training import Schedule
from pyro_implicit.fitting.training import train as fit
from pyro_implicit.generators import Generator
from pyro_implicit.generators.autoregressive import AutoregressiveGenerator
from pyro_implicit.guides.auto_draws import Frame
from pyro_implicit.guides.auto_implicit import GeneratorTransform
from pyro_implicit.guides.auto_mixture import AutoMixture
from pyro_implicit.infer import ImplicitELBO


def model(y=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    mix = pyro.sample("mix", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("outer", 2, dim=-2), pyro.plate("inner", 4, dim=-1):
        z = pyro.sample("z", dist.Normal(0.0, scale))
        pyro.sample(
            "y", dist.Normal(z + mix.sum(-1), 1.0), obs=torch.zeros(2, 4) if y is None else y
        )


def component(**kwargs):
    return AutoImplicit(model, AutoregressiveGenerator, **kwargs)


def make(log_weights=None):
    parts = [component(frame=None, init_scale=scale) for scale in (0.1, 0.3)]
    return AutoMixture(model, parts, log_weights)


def spread(guide, by):
    """Move all parameters, each differently."""
    for parameter in guide.parameters():
        parameter.data += by * torch.randn_like(parameter)


def draw(guide):
    pyro.set_rng_seed(7)
    return guide.sample_posterior(20)


def assert_equal(actual, expected):
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0)


def assert_differ(actual, expected):
    assert (actual["z"] != expected["z"]).all()


@pytest.mark.parametrize("framed", [False, True])
def test_density_of_a_component_at_any_point(framed):
    """Where a Gaussian frame and a generator of known noise make a Gaussian."""
    torch.set_default_dtype(torch.float64)

    def normal():
        pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    class Affine(Generator):
        injective = True

        def __init__(self):
            super().__init__(3, 3)
            self.linear = nn.Linear(3, 3)

        def forward(self, noise, context=None):
            return self.linear(noise)

        def inverse(self, value, context=None):
            centred = (value - self.linear.bias).unsqueeze(-1)
            return torch.linalg.solve(self.linear.weight, centred).squeeze(-1)

    base, centre, factor = None, torch.zeros(3), torch.eye(3)
    if framed:
        base = AutoMultivariateNormal(normal)
        base()
        base.scale_tril = torch.tensor([[1.0, 0, 0], [0.5, 1, 0], [-0.3, 0.2, 1]])
        base.scale = torch.tensor([0.5, 3.0, 1.0])
        base.loc.data = torch.tensor([1.0, -2.0, 30.0])
        centre, factor = base.loc.detach(), (base.scale[:, None] * base.scale_tril).detach()
    guide = AutoImplicit(normal, Affine(), 3, frame=base)
    guide()
    guide.scale = torch.tensor([0.5, 2.0, 1.5])
    guide.loc = torch.tensor([0.5, -1.0, 0.0])
    q = dist.TransformedDistribution(guide.get_base_dist(), guide.get_transform())
    affine = factor @ guide.scale.diag()
    mean = centre + factor @ guide.loc + affine @ guide.generator.linear.bias
    root = affine @ guide.generator.linear.weight
    expected = dist.MultivariateNormal(mean, root @ root.T)
    points = torch.randn(6, 3)
    torch.testing.assert_close(q.log_prob(points), expected.log_prob(points))
    mixture = AutoMixture(normal, [guide])
    torch.testing.assert_close(mixture.get_posterior().log_prob(points), expected.log_prob(points))


def test_inverse_of_a_generator():
    transform = GeneratorTransform(ResidualGenerator(3, 2))
    with pytest.raises(NotImplementedError, match="ResidualGenerator has no inverse.*Cure"):
        transform.inv(torch.zeros(3))
    cached = GeneratorTransform(ResidualGenerator(3, 2), cache_size=1)
    noise = torch.randn(4, 3)
    assert cached.inv(cached(noise)) is noise

    class Overflows(AutoregressiveGenerator):
        def inverse(self, value, context=None):
            return value / 0.0 * 0.0

    assert (GeneratorTransform(Overflows(3)).inv(torch.ones(3)) == math.inf).all()


def test_trace_elbo_sees_the_exact_density():
    torch.set_default_dtype(torch.float64)
    guide = make(torch.tensor([0.2, 0.8]).log())
    guide()
    spread(guide.components, 0.01)
    with pyro.plate("particles", 6, dim=-3):
        trace = poutine.trace(guide).get_trace()
    trace.compute_log_prob()
    site = trace.nodes["_AutoMixture_latent"]
    assert site["value"].shape == (6, 1, 1, 11) and site["value"].unique().numel() == 66
    parts = [
        dist.TransformedDistribution(c.get_base_dist(), c.get_transform()).log_prob(site["value"])
        for c in guide.components
    ]
    expected = torch.logaddexp(parts[0] + math.log(0.2), parts[1] + math.log(0.8))
    torch.testing.assert_close(site["log_prob"], expected)

    density = Target(model)
    latent = guide.get_posterior().sample((10000,))
    log_ratio = density.log_prob(latent) - guide.get_posterior().log_prob(latent)
    expected, error = log_ratio.mean().item(), 5 * log_ratio.std().item() / 1000**0.5
    for elbo in (Trace_ELBO(1000, vectorize_particles=True), InjectiveELBO(1000)):
        loss = SVI(model, guide, pyro.optim.Adam({}), elbo).evaluate_loss()
        assert -loss == pytest.approx(expected, abs=error)
    bound = evidence_bound(model, guide, num_samples=1000, chunk_size=1000)
    assert bound.value == pytest.approx(expected, abs=5 * bound.standard_error)


@pytest.mark.parametrize("make_elbo", [Trace_ELBO, ImplicitELBO])
def test_a_mixture_at_the_posterior_stays_there(make_elbo):
    """Its gradient has the mean 0 there, and the entropy of the mixture is a part of it."""
    torch.set_default_dtype(torch.float64)

    def normals():
        pyro.sample("x", dist.Normal(torch.tensor([1.0, -2.0]), 0.5).to_event(1))

    pyro.set_rng_seed(0)
    parts = [AutoImplicit(normals, AutoregressiveGenerator) for _ in range(2)]
    guide = AutoMixture(normals, parts, torch.tensor([0.3, 0.7]).log())
    guide()
    elbo = make_elbo(num_particles=4000, vectorize_particles=True)
    elbo.differentiable_loss(normals, guide).backward()
    gradients = {name: value.grad for name, value in guide.components.named_parameters()}
    assert sum(grad is not None for grad in gradients.values()) > 4
    for name, grad in gradients.items():
        assert grad is None or grad.abs().max() < 0.1, name


def test_draws():
    guide = make(torch.tensor([0.25, 0.75]).log())
    guide()
    guide.components[0].loc = guide.components[0].loc + 10.0
    draws = guide.sample_posterior(4000)
    shapes = {name: tuple(value.shape) for name, value in draws.items()}
    assert shapes == {"scale": (4000,), "mix": (4000, 3), "z": (4000, 2, 4)}
    assert (draws["z"][:, 0, 0] > 5).float().mean().item() == pytest.approx(0.25, abs=0.03)
    # All latents of a draw come from one component.
    assert ((draws["z"] > 5) == (draws["scale"] > 100)[:, None, None]).all()
    levels = guide.quantiles([0.1, 0.9], num_samples=2000)
    assert levels["z"].shape == (2, 2, 4) and (levels["z"][1] - levels["z"][0] > 8).all()
    assert guide.median()["mix"].sum().item() == pytest.approx(1.0, abs=1e-5)
    assert Predictive(model, guide=guide, num_samples=5)()["y"].shape == (5, 2, 4)


def test_nothing_at_construction_but_the_weights():
    guide = make()
    assert [name for name, _ in guide.named_parameters()] == ["log_weights_unconstrained"]
    guide()
    names = set(dict(pyro.get_param_store().named_parameters()))
    assert {"AutoMixture.components.0.loc", "AutoMixture.components.1.loc"} <= names
    assert "AutoMixture.components.1.generator$$$skip.weight" in names
    assert not any(name.startswith("AutoImplicit") for name in names)


def test_weights_can_be_set_at_any_time():
    guide = make()
    for _ in range(2):  # before and after the first call
        guide.log_weights = torch.tensor([-math.inf, 3.0])
        guide.sample_posterior(1)
        assert guide.get_posterior().log_weights.tolist() == [-math.inf, 0.0]


def test_float64_comes_from_the_model():
    def double():
        pyro.sample("x", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))

    parts = [AutoImplicit(double, AutoregressiveGenerator) for _ in range(2)]
    guide = AutoMixture(double, parts, torch.tensor([0.2, 0.8]).log())
    assert guide.sample_posterior(3)["x"].dtype == torch.float64
    assert all(p.dtype == torch.float64 for p in guide.parameters())
    assert guide.get_posterior().log_weights.exp()[0].item() == pytest.approx(0.2)


def train(guide, target=model, num_steps=3):
    svi = SVI(target, guide, pyro.optim.Adam({"lr": 0.01}), InjectiveELBO(4))
    return [svi.step() for _ in range(num_steps)]


@pytest.mark.parametrize("clear", [False, True])
def test_components_trained_inside_keep_parameters_of_their_own(clear):
    guide = make()
    guide()
    first, second = guide.components
    before = draw(first)
    train(second)
    assert_equal(draw(first), before)
    before = draw(second)
    if clear:
        pyro.clear_param_store()
    train(first)
    assert_equal(draw(second), before)
    mixed = draw(guide)
    if clear:
        pyro.clear_param_store()
    assert_equal(draw(guide), mixed)


def test_components_trained_before_with_a_clear_between():
    parts = [component(), component()]
    expected = []
    for part in parts:
        pyro.clear_param_store()
        train(part)
        expected.append(draw(part))
    guide = AutoMixture(model, parts)
    guide()
    assert_differ(*expected)
    for part, draws in zip(guide.components, expected, strict=True):
        assert_equal(draw(part), draws)


def test_components_trained_before_under_one_name_are_refused():
    parts = [component(), component()]
    for part in parts:
        train(part)
    message = r"components 0 and 1 of AutoMixture share the parameter 'loc.*Cure.*clear_param_store"
    with pytest.raises(ValueError, match=message):
        AutoMixture(model, parts)()
    part = component()
    with pytest.raises(ValueError, match="share the parameter"):
        AutoMixture(model, [part, part])()


def test_another_mixture_in_the_store_is_refused():
    """Else the new guide would silently take over the old one's values."""
    make()()
    fitted = component()
    train(fitted)
    with pytest.raises(ValueError, match="'AutoMixture.components.0.*Cure: pyro.clear_param_store"):
        AutoMixture(model, [fitted, component()])
    with pytest.raises(ValueError, match="'AutoMixture.log_weights'.*set guide.log_weights"):
        make(torch.tensor([0.0, 1.0]))
    expected = draw(fitted)
    pyro.clear_param_store()
    guide = AutoMixture(model, [fitted, component()], torch.tensor([0.0, -math.inf]))
    guide()
    assert_equal(draw(guide.components[0]), expected)
    again = AutoMixture(model, list(guide.components), torch.tensor([0.0, -math.inf]))
    again()
    assert_equal(draw(again), draw(guide))  # of the same parameters


def test_saved_guide_draws_without_model_and_data():
    data = torch.full((2, 4), 7.25)
    guide = make()
    guide(data)
    train(guide.components[1], lambda: model(data))
    expected = draw(guide)
    file = io.BytesIO()
    torch.save(guide, file)
    assert data.numpy().tobytes() not in file.getvalue()
    pyro.clear_param_store()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_equal(draw(loaded), expected)
    assert_equal(draw(loaded.components[1]), draw(guide.components[1]))


def test_saved_components_are_trained_without_plates_of_the_mixture():
    guide = make()
    train(guide.components[0])  # and the mixture was never called
    file = io.BytesIO()
    torch.save(guide, file)
    file.seek(0)
    assert len(train(torch.load(file, weights_only=False).components[0])) == 3


def test_module_local_parameters():
    with pyro.settings.context(module_local_params=True):
        guide = make()
        guide()
        before = draw(guide.components[0])
        pair = InjectiveELBO(4)(model, guide.components[1])
        optimiser = torch.optim.Adam(pair.parameters(), lr=0.1)
        pair().backward()
        optimiser.step()
        assert_equal(draw(guide.components[0]), before)
        assert_differ(draw(guide.components[1]), before)
        assert draw(guide)["z"].shape == (20, 2, 4) and len(pyro.get_param_store()) == 0


@pytest.mark.parametrize(
    "without",
    [
        AutoSemiImplicit,
        lambda model: AutoImplicit(model, lambda size: ResidualGenerator(size, 3)),  # no inverse
    ],
)
def test_components_without_a_density_give_draws_only(without):
    guide = AutoMixture(model, [component(), without(model)])
    assert draw(guide)["z"].shape == (20, 2, 4)
    with pytest.raises(IntractableDensityError, match="component 1 of the mixture.*Cure"):
        guide.get_posterior().log_prob(torch.zeros(11))
    with pytest.raises(ValueError, match=r"(?s)_AutoMixture_latent.*component 1 of the mixture"):
        Trace_ELBO().loss(model, guide)


def test_in_a_list_with_explicit_guides():
    part = poutine.block(model, hide=["scale"])
    guide = AutoGuideList(model)
    guide.append(AutoMixture(part, [AutoImplicit(part, AutoregressiveGenerator) for _ in "ab"]))
    guide.append(AutoNormal(poutine.block(model, expose=["scale"])))
    train(
        guide[0].components[0], poutine.condition(model, {"scale": torch.tensor(1.0)})
    )  # which needs no plates of the list
    assert math.isfinite(Trace_ELBO(3, vectorize_particles=False).loss(model, guide))
    assert set(guide.median()) == {"z", "mix", "scale"}


@pytest.mark.parametrize(
    "make",
    [AutoSemiImplicit, lambda model, **options: AutoMixture(model, [component()], **options)],
)
def test_create_plates(make):
    made = []

    def create_plates():
        made.append(pyro.plate("outer", 2, dim=-2))
        return made[-1]

    guide = make(model, create_plates=create_plates)
    guide()
    before = len(made)
    guide()
    assert len(made) == before + 1 == 3


def test_bad_arguments():
    with pytest.raises(TypeError, match="got AutoDelta.*Cure"):
        AutoMixture(model, [AutoDelta(model)])
    with pytest.raises(ValueError, match="at least one"):
        AutoMixture(model, [])
    with pytest.raises(ValueError, match="each of its 1 components"):
        AutoMixture(model, [component()], torch.zeros(2))
    with pytest.raises(ValueError, match="nan"):
        AutoMixture(model, [component()], torch.tensor([math.nan]))
    part = AutoImplicit(poutine.block(model, hide=["z"]))
    with pytest.raises(ValueError, match=r"component 1 .*'mix': \(2,\)\}.*but the model has.*'z'"):
        AutoMixture(model, [component(), part])()
    fitted = AutoImplicit(poutine.block(model, hide=["mix"]))
    fitted()
    pyro.clear_param_store()
    with pytest.raises(ValueError, match="component 0 of AutoMixture covers the sites"):
        AutoMixture(model, [fitted])()


WEIGHTS = torch.tensor([0.3, 0.7], dtype=torch.float64)
LOCS = torch.tensor([[-4.0, 1.0], [3.0, -2.0]], dtype=torch.float64)
FACTORS = torch.tensor([[[0.5, 0.0], [0.4, 0.3]], [[1.0, 0.0], [-0.6, 0.5]]], dtype=torch.float64)


def two_modes():
    parts = torch.distributions.MultivariateNormal(LOCS, scale_tril=FACTORS)
    choice = torch.distributions.Categorical(WEIGHTS)
    target = torch.distributions.MixtureSameFamily(choice, parts)
    x = pyro.sample("x", dist.Normal(torch.zeros(2, dtype=torch.float64), 10.0).to_event(1))
    prior = dist.Normal(0.0, 10.0).log_prob(x).sum(-1)
    pyro.factor("target", target.log_prob(x) - prior + 1.5)


def test_two_modes_end_to_end():
    density = Target(two_modes)
    modes = find_modes(density, num_starts=20)
    parts = []
    for loc, scale_tril in zip(modes.loc, modes.scale_tril, strict=True):
        frame = Frame(loc, scale_tril=scale_tril)
        parts.append(AutoImplicit(two_modes, AutoregressiveGenerator, frame=frame))
    guide = AutoMixture(two_modes, parts)
    guide()
    for part in guide.components:
        fit(two_modes, part, InjectiveELBO(16), schedule=Schedule(num_steps=200, decay=1.0))
    found = mixture_weights(density, guide.get_posterior().components)
    guide.log_weights = found
    order = modes.loc[:, 0].argsort()
    torch.testing.assert_close(found.exp()[order], WEIGHTS, atol=0.02, rtol=0)
    bound = evidence_bound(two_modes, guide, num_samples=500, chunk_size=500)
    assert bound.value == pytest.approx(1.5, abs=0.05)
    draws = guide.sample_posterior(40000)["x"]
    is_left = draws[:, 0] < -1.7
    for side, factor, mean in zip((is_left, ~is_left), FACTORS, LOCS, strict=True):
        cluster = draws[side]
        sd = factor.square().sum(-1).sqrt()
        torch.testing.assert_close(cluster.std(0) / sd, torch.ones_like(sd), atol=0.05, rtol=0)
        assert ((cluster.mean(0) - mean) / sd).abs().max() < 0.05
