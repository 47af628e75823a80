# SPDX-License-Identifier: Apache-2.0
"""Alpha and importance-weighted bounds: value, gradient, and what they make of a guide."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions.testing.rejection_gamma import ShapeAugmentedGamma
from pyro.infer import SVI, RenyiELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.optim import Adam
from torch import nn

from pyro_implicit import (
    AutoImplicit,
    AutoMixture,
    AutoregressiveGenerator,
    AutoSemiImplicit,
    Implicit,
    ImplicitRenyiELBO,
    SemiImplicit,
)
from pyro_implicit.generators import Generator
from pyro_implicit.guides import Frame
from pyro_implicit.infer import bound as hierarchical

pytestmark = pytest.mark.usefixtures("double")

ALPHAS = (-0.5, 0.0, 0.5, 2.0)
alphas = pytest.mark.parametrize("alpha", ALPHAS)
PRIOR, NOISE, Y = 1.0, 0.5, 1.2


def normal():
    """Of evidence N(y | 0, PRIOR^2 + NOISE^2)."""
    x = pyro.sample("x", dist.Normal(0.0, PRIOR))
    pyro.sample("y", dist.Normal(x, NOISE), obs=torch.tensor(Y))


def exact_bound(alpha, loc, scale):
    """log of E_q[w^(1 - alpha)], over 1 - alpha, of q = N(loc, scale^2): a Gaussian integral."""
    variance = 1 / (1 / PRIOR**2 + 1 / NOISE**2)
    mean = variance * Y / NOISE**2
    evidence = dist.Normal(0.0, math.hypot(PRIOR, NOISE)).log_prob(torch.tensor(Y))
    a, b = (1 - alpha) / variance, alpha / scale**2
    center = (a * mean + b * loc) / (a + b)
    exponent = (a + b) * center**2 - a * mean**2 - b * loc**2
    log_norm = -(1 - alpha) * math.log(2 * math.pi * variance) - alpha * math.log(
        2 * math.pi * scale**2
    )
    log_integral = 0.5 * (log_norm + exponent + math.log(2 * math.pi / (a + b)))
    return evidence.item() + log_integral / (1 - alpha)


class Affine(Generator):
    """loc + scale * noise, as a module whose derivative is dense."""

    injective = True

    def __init__(self, loc=0.7, scale=0.6):
        super().__init__(1, 1)
        self.loc, self.log_scale = (
            nn.Parameter(torch.tensor([value])) for value in (loc, math.log(scale))
        )

    def forward(self, noise, context=None):
        return self.loc + self.log_scale.exp() * noise


def implicit(model=normal, **kwargs):
    guide = AutoImplicit(model, Affine(**kwargs), frame=Frame(torch.zeros(1), torch.ones(1)))
    guide()
    return guide


@alphas
def test_value_in_closed_form(alpha):
    """With many particles the bound is that of Li and Turner's eq 10."""
    guide = implicit(scale=0.5)
    loss = ImplicitRenyiELBO(alpha, 100_000).loss(normal, guide)
    assert -loss == pytest.approx(exact_bound(alpha, 0.7, 0.5), abs=0.01)


@alphas
@pytest.mark.parametrize("semi", [False, True])
def test_any_alpha_gives_the_evidence_at_the_posterior(alpha, semi):
    variance = 1 / (1 / PRIOR**2 + 1 / NOISE**2)
    loc = variance * Y / NOISE**2
    evidence = dist.Normal(0.0, math.hypot(PRIOR, NOISE)).log_prob(torch.tensor(Y)).item()
    if semi:
        generator = Affine(loc, (variance - 0.04) ** 0.5)
        frame = Frame(torch.zeros(1), torch.ones(1))
        guide = AutoSemiImplicit(normal, generator, frame=frame, noise_scale=0.2)
        guide()
    else:
        guide = implicit(loc=loc, scale=variance**0.5)
    elbo = ImplicitRenyiELBO(alpha, 5, num_mixing=200)
    error = 0.01 if semi else 1e-9  # of a mean over noises in the tenth of them from the prior
    assert -elbo.loss(normal, guide) == pytest.approx(evidence, abs=error)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_gradient_vanishes_draw_by_draw_at_the_posterior(alpha):
    variance = 1 / (1 / PRIOR**2 + 1 / NOISE**2)
    guide = implicit(loc=variance * Y / NOISE**2, scale=variance**0.5)
    elbo = ImplicitRenyiELBO(alpha, 3)
    elbo.loss_and_grads(normal, guide)
    for parameter in guide.generator.parameters():
        assert parameter.grad.abs().item() < 1e-12


def independent_gradient(alpha, num_particles, repetitions):
    """Autograd through the bound as written, in lines of its own."""
    loc, log_scale = (torch.tensor(v, requires_grad=True) for v in (0.7, math.log(0.6)))
    noise = torch.randn(repetitions, num_particles)
    x = loc + log_scale.exp() * noise
    log_q = -0.5 * noise**2 - log_scale - 0.5 * math.log(2 * math.pi)
    log_p = dist.Normal(0.0, PRIOR).log_prob(x) + dist.Normal(x, NOISE).log_prob(torch.tensor(Y))
    power = (1 - alpha) * (log_p - log_q)
    bounds = (power.logsumexp(1) - math.log(num_particles)) / (1 - alpha)
    return -torch.stack(torch.autograd.grad(bounds.mean(), [loc, log_scale]))


def mean_and_error(gradients):
    """The mean of independent estimates, and its standard error."""
    estimates = torch.stack(gradients)
    return estimates.mean(0), estimates.std(0) / len(estimates) ** 0.5


@pytest.mark.parametrize(
    ("alpha", "kind"),
    [(0.0, "exact"), (0.5, "exact"), (0.5, "semi-implicit"), (0.0, "explicit"), (0.5, "explicit")],
)
def test_gradient_is_that_of_the_bound(alpha, kind):
    """The doubly reparameterised one has the mean of the plain one. The elements of a plate that
    holds all sites are so many independent bounds of four particles."""
    num_rows = 20_000 if kind == "explicit" else 1000  # whose gradient is the plain one, and noisy
    y = torch.full((num_rows, 1), Y)

    def model():
        with pyro.plate("rows", num_rows):
            x = pyro.sample("x", dist.Normal(torch.zeros(num_rows, 1), PRIOR).to_event(1))
            pyro.sample("y", dist.Normal(x, NOISE).to_event(1), obs=y)

    noise_scale = 0.2 * (kind == "semi-implicit")
    generator = Affine(scale=(0.36 - noise_scale**2) ** 0.5)

    def guide():
        with pyro.plate("rows", num_rows):
            if kind == "exact":
                q = Implicit(generator, 1)
            elif kind == "semi-implicit":
                q = SemiImplicit(generator, 1, noise_scale)
            else:
                q = dist.Normal(generator.loc, generator.log_scale.exp()).to_event(1)
            pyro.sample("x", q)

    num_mixing = 100
    elbo = ImplicitRenyiELBO(alpha, 4, num_mixing=num_mixing, num_steps=2)  # it is linear

    def gradient():
        loss = elbo.differentiable_loss(model, guide) / num_rows
        return torch.cat(torch.autograd.grad(loss, list(generator.parameters())))

    found, error = mean_and_error([gradient() for _ in range(20)])
    plain, plain_error = mean_and_error([independent_gradient(alpha, 4, 40_000) for _ in range(20)])
    factor = torch.tensor([1.0, 1 - noise_scale**2 / 0.36])  # d sd / d log of generator's scale
    limit = 5 * (error.square() + plain_error.square()).sqrt()
    if kind == "semi-implicit":  # the bias of a mean of densities, about 0.5 / num_mixing
        limit += 0.8 / num_mixing
    assert ((found - factor * plain).abs() < limit).all()
    assert (limit < torch.tensor([0.04, 0.03])).all()  # of 0.2 and 0.06, 0.6 and 0.28


@alphas
@pytest.mark.parametrize("make_guide", [AutoNormal, AutoMultivariateNormal])
@pytest.mark.parametrize("how", ["vmap", "plate", False])
def test_an_ordinary_guide_is_pyros(alpha, make_guide, how):
    """Values and gradients, from the same random numbers, with scale, mask and plates."""
    data = torch.randn(3, 4)

    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.3))
        with pyro.plate("rows", 4, dim=-1), pyro.plate("columns", 3, dim=-2):
            z = pyro.sample("z", dist.Normal(0.0, scale))
            with poutine.scale(scale=2.0), poutine.mask(mask=data > -1):
                pyro.sample("y", dist.Normal(z, 1.0), obs=data)

    guide = make_guide(model)
    guide()
    results = []
    for elbo in (
        ImplicitRenyiELBO(alpha, 5, vectorize_particles=how, max_plate_nesting=2 + bool(how)),
        RenyiELBO(alpha, 5, vectorize_particles=bool(how), max_plate_nesting=2 + bool(how)),
    ):
        if isinstance(elbo, ImplicitRenyiELBO):
            elbo.loss(model, guide)  # the first run
        for parameter in guide.parameters():
            parameter.grad = None
        pyro.set_rng_seed(5)
        loss = elbo.loss_and_grads(model, guide)
        results.append([torch.tensor(loss), *(p.grad for p in guide.parameters())])
    torch.testing.assert_close(*results)


def test_particles_that_share_a_plate_with_all_sites_are_weighed_in_it():
    """As in Pyro; and not where one vector of the guide stands for all rows."""
    data = torch.randn(6)

    def model():
        with pyro.plate("rows", 6):
            z = pyro.sample("z", dist.Normal(torch.zeros(6), 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=data)

    losses = {}
    for make_guide in (AutoNormal, AutoMultivariateNormal):
        for elbo in (ImplicitRenyiELBO(0.0, 7), RenyiELBO(0.0, 7, 1, vectorize_particles=True)):
            pyro.clear_param_store()
            guide = make_guide(model, init_scale=0.7)
            pyro.set_rng_seed(2)
            elbo.loss(model, guide)
            pyro.set_rng_seed(3)
            losses[make_guide, type(elbo)] = elbo.loss(model, guide)
    assert losses[AutoNormal, ImplicitRenyiELBO] == pytest.approx(losses[AutoNormal, RenyiELBO])
    evidence = dist.Normal(0.0, 2**0.5).log_prob(data).sum()
    assert losses[AutoMultivariateNormal, ImplicitRenyiELBO] > -evidence - 1


def test_a_mixture_has_the_bound_of_its_density():
    guide = AutoMixture(normal, [AutoImplicit(normal, AutoregressiveGenerator) for _ in range(2)])
    evidence = dist.Normal(0.0, math.hypot(PRIOR, NOISE)).log_prob(torch.tensor(Y)).item()
    assert -ImplicitRenyiELBO(0.5, 4).loss(normal, guide) == pytest.approx(evidence, abs=1e-6)


def test_several_implicit_sites_have_the_plain_gradient():
    """Of two latents, the second drawn given the first, it is autograd's, in the mean."""
    num_rows = 100_000
    y = torch.full((num_rows, 1), Y)

    def model():
        with pyro.plate("rows", num_rows):
            a = pyro.sample("a", dist.Normal(torch.zeros(num_rows, 1), PRIOR).to_event(1))
            b = pyro.sample("b", dist.Normal(a, PRIOR).to_event(1))
            pyro.sample("y", dist.Normal(b, NOISE).to_event(1), obs=y)

    first, second = Affine(), Affine(0.1, 0.8)

    class Chained(Generator):
        injective = True

        def forward(self, noise, context=None):
            return second(noise) + 0.5 * context

    chained = Chained(1, 1, 1)

    def guide():
        with pyro.plate("rows", num_rows):
            a = pyro.sample("a", Implicit(first, 1))
            pyro.sample("b", Implicit(chained, 1, context=a))

    parameters = [*first.parameters(), *second.parameters()]
    loss = ImplicitRenyiELBO(0.0, 3).differentiable_loss(model, guide) / num_rows
    found = torch.cat(torch.autograd.grad(loss, parameters))

    noise = torch.randn(num_rows, 3, 2)
    a = first(noise[..., :1])
    b = second(noise[..., 1:]) + 0.5 * a
    log_q = -0.5 * noise.square().sum(-1) - first.log_scale - second.log_scale
    log_p = sum(
        dist.Normal(mean, scale).log_prob(value).squeeze(-1)
        for value, mean, scale in ((a, 0.0, PRIOR), (b, a, PRIOR), (torch.tensor(Y), b, NOISE))
    )
    bound = (log_p - log_q).logsumexp(1).mean()
    expected = -torch.cat(torch.autograd.grad(bound, parameters))
    torch.testing.assert_close(found, expected, atol=0.015, rtol=0.03)


def test_small_alpha_covers_more():
    """A Gaussian guide of a heavy-tailed target grows wider as alpha falls."""

    def heavy():
        pyro.sample("x", dist.StudentT(3.0, 0.0, 1.0))

    scales = []
    for alpha in (2.0, 0.0):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = implicit(heavy, loc=0.0, scale=1.0)
        svi = SVI(heavy, guide, Adam({"lr": 0.05}), ImplicitRenyiELBO(alpha, 50))
        for _ in range(60):
            svi.step()
        scales.append(guide.sample_posterior(4000)["x"].std())
    assert scales[1] > 1.15 * scales[0]


@pytest.mark.parametrize("compile", [False, "trace"])
def test_gauss_newton_steps_stay_as_many_as_training_goes_on(monkeypatch, compile):
    seen = []
    reach = hierarchical.linearised_reverse_conditional

    def spy(*args):
        seen.append(args[-1])
        return reach(*args)

    monkeypatch.setattr(hierarchical, "linearised_reverse_conditional", spy)
    elbo = ImplicitRenyiELBO(num_particles=2, num_mixing=3, num_steps=2, compile=compile)
    svi = SVI(normal, AutoSemiImplicit(normal, frame=None), Adam({"lr": 1e-3}), elbo)
    for _ in range(5):
        svi.step()
    assert set(seen) == {2} and elbo.num_steps == 2
    assert elbo.num_steps_taken == 5

    resumed = ImplicitRenyiELBO(num_steps=3)
    resumed.set_state(elbo.get_state())
    assert resumed.num_steps == 3 and resumed.num_steps_taken == 5


def test_bad_arguments():
    for alpha in (1, math.nan, math.inf):
        with pytest.raises(ValueError, match="alpha must be.*Cure.*InjectiveELBO"):
            ImplicitRenyiELBO(alpha)
    for name in ("num_particles", "num_mixing"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, but got 0"):
            ImplicitRenyiELBO(0.5, **{name: 0})
    with pytest.raises(ValueError, match="num_steps must be at least 0"):
        ImplicitRenyiELBO(num_steps=-1)
    with pytest.raises(ValueError, match='proposal must be "linearized" or "prior"'):
        ImplicitRenyiELBO(proposal="other")


def test_a_generator_that_may_fold_is_refused():
    with pytest.raises(ValueError, match="ImplicitRenyiELBO knows no density of site.*Cure"):
        ImplicitRenyiELBO().loss(normal, AutoImplicit(normal))


def test_a_guide_reparameterised_in_part_is_refused():
    def model():
        pyro.sample("x", dist.Gamma(2.0, 1.0))

    def partial():
        concentration = pyro.param("concentration", torch.tensor(2.0))
        pyro.sample("x", ShapeAugmentedGamma(concentration, torch.tensor(1.0)))

    with pytest.raises(NotImplementedError, match="site 'x'.*reparameterised in part.*Cure"):
        ImplicitRenyiELBO(0.5, 2, vectorize_particles=False).loss_and_grads(model, partial)


@pytest.mark.filterwarnings("ignore:Encountered NaN")  # Pyro's own
@pytest.mark.parametrize("vectorize", ["vmap", False])
def test_the_particle_without_a_number_is_blamed(vectorize):
    """Not the first one, where each runs by itself."""
    calls = []

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        calls.append(x)
        unknown = x * math.nan if vectorize or len(calls) % 3 == 0 else x
        with pyro.validation_enabled(False):
            pyro.factor("term", unknown)

    def guide():
        pyro.sample("x", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))

    elbo = ImplicitRenyiELBO(0.5, 3, vectorize_particles=vectorize)
    with pytest.raises(ArithmeticError, match="log-probability of site 'term' is nan"):
        elbo.loss(model, guide)


def test_subsampled_models_are_refused():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 10, subsample_size=2):
            pyro.sample("y", dist.Normal(x, 1.0), obs=torch.zeros(2))

    with pytest.raises(ValueError, match="ImplicitRenyiELBO needs all data, but plate 'rows'"):
        ImplicitRenyiELBO().loss(model, AutoNormal(model))
