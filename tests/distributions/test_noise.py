# SPDX-License-Identifier: Apache-2.0
"""The noise of implicit distributions: its kinds and precision, and the refusals."""

from __future__ import annotations

import copy
import math
import pickle
import re
import weakref

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, RenyiELBO, ReweightedWakeSleep, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor, nn

from pyro_implicit import LIVI_ELBO, MLP, Implicit, SemiImplicit
from pyro_implicit.distributions import IntractableDensityError
from pyro_implicit.generators import AutoregressiveGenerator, ResidualGenerator
from pyro_implicit.generators.base import Differentiable, Generator
from pyro_implicit.guides.auto_implicit import GeneratorTransform

KINDS = ["implicit", "semi_implicit"]


def make(kind: str, generator=None, noise=3, **kwargs) -> Implicit:
    generator = nn.Linear(3, 2) if generator is None else generator
    if kind == "implicit":
        return Implicit(generator, noise, **kwargs)
    return SemiImplicit(generator, noise, scale=0.1, **kwargs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "noise",
    [
        dist.Laplace(torch.tensor([3.0, 0.0, -3.0]), 0.5).to_event(1),
        dist.StudentT(torch.tensor(5.0), torch.tensor([3.0, 0.0, -3.0]), 0.5).to_event(1),
        dist.MultivariateNormal(torch.tensor([3.0, 0.0, -3.0]), 0.25 * torch.eye(3)),
        torch.distributions.Independent(
            torch.distributions.Normal(torch.tensor([3.0, 0.0, -3.0]), 0.5), 1
        ),
    ],
    ids=lambda noise: type(getattr(noise, "base_dist", noise)).__name__,
)
def test_noise_of_other_distributions(kind, noise):
    q = make(kind, noise=noise).expand((4,))
    drawn, value, _ = q.draw((2500,))
    assert drawn.shape == (2500, 4, 3)
    deviation = noise.variance.sqrt()
    # 10,000 draws: the mean within 5 and the spread within some 10 standard errors.
    torch.testing.assert_close(drawn.mean((0, 1)), noise.mean, rtol=0, atol=0.05)
    torch.testing.assert_close(drawn.flatten(0, 1).std(0), deviation, rtol=0.1, atol=0)
    assert (value - q.generate(drawn)).abs().max() < (1e-6 if kind == "implicit" else 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_bounded_noise(kind):
    q = make(kind, noise=dist.Uniform(torch.full((3,), 2.0), 2.5).to_event(1))
    noise = q.draw((1000,)).noise
    assert 2.0 <= noise.min() < 2.01 and 2.49 < noise.max() <= 2.5


@pytest.mark.parametrize("kind", KINDS)
def test_noise_without_a_known_mean(kind):
    base = dist.Normal(torch.zeros(3), 1.0)
    noise = dist.TransformedDistribution(base, [dist.transforms.SigmoidTransform()]).to_event(1)
    assert make(kind, noise=noise).sample().shape == (2,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("default", [torch.float, torch.double])
def test_precision_follows_generator_context_or_default(kind, dtype, default):
    torch.set_default_dtype(default)  # conftest.py restores it
    context = torch.randn(4, 2, dtype=dtype)
    of_generator = make(kind, nn.Linear(3, 2, dtype=dtype))
    of_context = make(kind, MLP(3, 2, context_dim=2).to(dtype), context=context)
    of_function = make(kind, lambda noise, context: noise + context.sum(-1, True), context=context)
    of_noise = make(kind, torch.tanh, noise=dist.Normal(torch.zeros(3, dtype=dtype), 1).to_event(1))
    for q in (of_generator, of_context, of_function, of_noise):
        for expanded in (q, q.expand((6,) + q.batch_shape)):
            noise, value, _ = expanded.draw()
            assert value.dtype == noise.dtype == dtype
    assert make(kind, torch.tanh).sample().dtype == default


@pytest.mark.parametrize("noise", [0, -2, True, 2.0, None, torch.zeros(3), "3"])
def test_refuses_what_is_no_noise(noise):
    with pytest.raises(ValueError, match="noise must be a positive size or a distribution, but"):
        Implicit(nn.Linear(3, 2), noise)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "noise,shapes",
    [
        (dist.Normal(torch.zeros(3), 1), r"batch shape \(3,\) and event shape \(\)"),
        (dist.Normal(torch.zeros(4, 3), 1).to_event(2), r"batch shape \(\) and event .* \(4, 3\)"),
    ],
)
def test_refuses_noise_that_is_no_vector(kind, noise, shapes):
    with pytest.raises(ValueError, match=f"needs a noise distribution over vectors.*{shapes}"):
        make(kind, noise=noise)


@pytest.mark.parametrize("kind", KINDS)
def test_refuses_generators_that_lose_the_batch(kind):
    noise = dist.Normal(torch.zeros(4, 3), 1).to_event(1)
    with pytest.raises(ValueError, match=r"noise of shape \(2, 3\) into \(3,\). Cure"):
        make(kind, lambda z: z.sum(0), noise)

    class WrongSize(nn.Module):
        output_dim = 7

        def forward(self, noise: Tensor) -> Tensor:
            return noise

    with pytest.raises(ValueError, match=r"returned shape \(2, 3\) .*must return \(2, 7\)"):
        make(kind, WrongSize()).sample((2,))


@pytest.mark.parametrize("kind", KINDS)
def test_log_prob_names_the_cure(kind, monkeypatch):
    q = make(kind)
    monkeypatch.setattr(type(q), "trained_by", ["THIS_ELBO", "THAT_ELBO"])
    with pytest.raises(IntractableDensityError, match="Cure: to train, THIS_ELBO, THAT_ELBO"):
        q.log_prob(q.sample())
    monkeypatch.setattr(type(q), "trained_by", [])
    with pytest.raises(NotImplementedError, match=r"to train, the ELBOs of pyro_implicit\.infer"):
        q.expand((4,)).log_prob(torch.zeros(4, 2))


class Affine(Differentiable):
    """A generator whose distribution is normal."""

    injective = True

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = loc, scale

    def __call__(self, noise: Tensor) -> Tensor:
        return self.loc + self.scale * noise

    def inverse(self, value: Tensor, context: Tensor | None = None) -> Tensor:
        return (value - self.loc) / self.scale


def affine_and_normal() -> tuple[Tensor, Tensor, Implicit, dist.TorchDistribution]:
    loc = torch.tensor([0.3, -0.2], requires_grad=True)
    scale = torch.tensor([0.7, 1.4], requires_grad=True)
    noise = dist.Normal(torch.zeros(2), 1.0).to_event(1)
    return loc, scale, Implicit(Affine(loc, scale), noise), dist.Normal(loc, scale).to_event(1)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "elbo",
    [
        Trace_ELBO(3),
        Trace_ELBO(3, max_plate_nesting=0, vectorize_particles=True),
        TraceMeanField_ELBO(3),
        RenyiELBO(num_particles=3),
        ReweightedWakeSleep(3, max_plate_nesting=0, vectorize_particles=False),
    ],
    ids=lambda elbo: type(elbo).__name__,
)
def test_pyros_elbos_have_the_gradient_of_the_closed_form(elbo):
    loc, scale, implicit, _ = affine_and_normal()
    affine = dist.transforms.AffineTransform(loc, scale, event_dim=1)
    # For a Normal, TraceMeanField_ELBO takes the expectation instead of the draws.
    normal = dist.TransformedDistribution(implicit.noise_distribution, [affine])

    def model(q):
        x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        pyro.sample("y", dist.Normal(x.sum(-1), 0.5), obs=torch.tensor(1.0))

    def guide(q):
        # Without a parameter, Pyro computes no gradient.
        pyro.param("loc", loc), pyro.param("scale", scale)
        pyro.sample("x", q)

    found = []
    for q in (implicit, normal):
        pyro.set_rng_seed(0)
        loc.grad = scale.grad = None
        loss = elbo.loss_and_grads(model, guide, q)
        found.append((torch.as_tensor(loss), loc.grad, scale.grad))
    assert (found[0][1] != 0).all()
    torch.testing.assert_close(*found)


@pytest.mark.usefixtures("double")
def test_the_density_of_an_injective_generator():
    loc, scale, implicit, normal = affine_and_normal()
    values = {"drawn": implicit.rsample((5,)), "given": torch.randn(5, 2)}
    with torch.no_grad():
        values["constant"] = implicit.sample((5,))
    for name, value in values.items():
        log_q = implicit.log_prob(value)
        torch.testing.assert_close(log_q, normal.log_prob(value))
        if name != "drawn":
            pairs = (log_q, normal.log_prob(value))
            found = [torch.autograd.grad(one.sum(), (loc, scale)) for one in pairs]
            torch.testing.assert_close(*found)
    expanded = implicit.expand((4,))
    value = expanded.rsample()
    torch.testing.assert_close(expanded.log_prob(value), normal.log_prob(value))


def folded() -> ResidualGenerator:
    """Return z - 4 tanh(2 z)."""
    generator = ResidualGenerator(1, core_dim=1, hidden=(16,))
    with torch.no_grad():
        for parameter in generator.network.parameters():
            parameter.zero_()
        generator.network.layers[0].weight.fill_(2.0)
        generator.network.layers[-1].weight.fill_(-0.25)
    return generator


def test_an_injective_generator_that_folds_has_no_density():
    q = Implicit(folded(), 1)
    with pytest.raises(IntractableDensityError, match=r"Implicit folds: .*both signs.*Cure"):
        q.log_prob(q.rsample((100,)))
    assert q.log_prob(q.rsample()).isfinite()  # one draw cannot tell


@pytest.mark.parametrize("is_module", [True, False])
def test_the_density_after_a_step_of_the_parameters(is_module):
    if is_module:
        q = Implicit(ResidualGenerator(2, core_dim=1), 2)
        parameter = next(q.generator.parameters())
    else:
        _, parameter, q, _ = affine_and_normal()
    with torch.no_grad():
        value = q.sample((3,))
        before = q.log_prob(value)
        parameter.mul_(3.0)
        if is_module:
            with pytest.raises(IntractableDensityError, match="with the parameters that made it"):
                q.log_prob(value)
        else:
            expected = dist.Normal(q.generator.loc, parameter).to_event(1).log_prob(value)
            torch.testing.assert_close(q.log_prob(value), expected)
            assert not before.allclose(expected)


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("cache_size", [None, 0, 1])
def test_generators_without_inverse_in_pyros_elbo(cache_size, is_frozen):
    generator = ResidualGenerator(2, core_dim=1).requires_grad_(not is_frozen)

    def guide():
        q = Implicit(generator, 2)
        if cache_size is not None:
            q = dist.TransformedDistribution(q, dist.transforms.ExpTransform(cache_size=cache_size))
        pyro.sample("x", q)
        pyro.sample("y", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))

    def model():
        prior = dist.Normal if cache_size is None else dist.LogNormal
        pyro.sample("x", prior(0.0, 1.0).expand([2]).to_event(1))
        pyro.sample("y", dist.Normal(0.0, 1.0))

    if cache_size == 0:
        with pytest.raises(ValueError, match=r"'x'(.|\n)*has no inverse.*cache_size=1"):
            Trace_ELBO().loss_and_grads(model, guide)
    else:
        assert math.isfinite(Trace_ELBO().loss_and_grads(model, guide))


def test_a_draw_is_neither_copied_nor_kept():
    q = Implicit(ResidualGenerator(2, core_dim=1), 2)
    value = weakref.ref(q.rsample())
    assert value() is None
    value = q.rsample()
    for again in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert again.rsample().shape == value.shape
    assert q.log_prob(value).isfinite()


def test_inverse_meets_the_context_of_each_row():
    class Shift(Generator):
        injective = True

        def forward(self, noise: Tensor, context: Tensor | None = None) -> Tensor:
            return noise + context

        def inverse(self, value: Tensor, context: Tensor | None = None) -> Tensor:
            return torch.cat([value, context], -1)[..., :2] - context

    context = torch.randn(3, 2)
    q, normal = Implicit(Shift(2, 2, 2), 2, context=context), dist.Normal(context, 1.0).to_event(1)
    for value in (torch.randn(5, 3, 2), torch.randn(2)):
        torch.testing.assert_close(q.log_prob(value), normal.log_prob(value))
    value = q.sample((5,))
    torch.testing.assert_close(q.log_prob(value), q.log_prob(value.clone()))
    value.add_(1.0)
    torch.testing.assert_close(q.log_prob(value), normal.log_prob(value))
    value = q.sample((5,))
    context.add_(1.0)
    moved = dist.Normal(context, 1.0).to_event(1)
    torch.testing.assert_close(q.log_prob(value), moved.log_prob(value))
    with pytest.raises(ValueError, match="shape"):
        q.log_prob(torch.zeros(5, 3))


@pytest.mark.parametrize("is_transform", [True, False])
def test_overflow_has_no_density(is_transform):
    generator = AutoregressiveGenerator(2)
    if is_transform:
        normal = dist.Normal(torch.zeros(2), 1.0).to_event(1)
        q = dist.TransformedDistribution(normal, GeneratorTransform(generator), validate_args=False)
    else:
        q = Implicit(generator, 2)
    found = q.log_prob(torch.tensor([[3e38, 1.0], [0.0, 0.0]]))
    assert found[0] == -math.inf and found[1].isfinite()


def test_parameters_of_inference_mode_do_not_tell_their_changes():
    with torch.inference_mode():
        generator = AutoregressiveGenerator(2)
        q = Implicit(generator, 2)
        value = q.sample()
        for parameter in generator.parameters():
            parameter.add_(0.1)
        torch.testing.assert_close(q.log_prob(value), q.log_prob(value.clone()))


def test_elbos_name_themselves():
    assert LIVI_ELBO.__name__ in SemiImplicit.trained_by
    assert LIVI_ELBO.__name__ not in Implicit.trained_by


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("wrap", [lambda q: q, lambda q: q.expand((4,)).to_event(1)])
@pytest.mark.parametrize("kind", KINDS)
def test_refusal_in_a_guide_names_the_site(kind, wrap, validate):
    q = wrap(make(kind))

    def model():
        pyro.sample("weights", dist.Normal(torch.zeros(q.event_shape), 1).to_event(q.event_dim))

    def guide():
        pyro.sample("weights", q)

    optimiser = pyro.optim.Adam({})
    kind_name = "Implicit" if kind == "implicit" else "SemiImplicit"
    message = f"site 'weights'(.|\n)*density of {kind_name} is intractable(.|\n)*Trace_ELBO"
    with pyro.validation_enabled(validate):
        for compute in (
            lambda: Trace_ELBO().loss(model, guide),
            lambda: SVI(model, guide, optimiser, Trace_ELBO(num_particles=2)).step(),
            lambda: poutine.trace(guide).get_trace().compute_score_parts(),
            lambda: poutine.trace(guide).get_trace().compute_log_prob(),
        ):
            with pytest.raises(ValueError) as error:
                compute()
            assert re.search(message, str(error.value))
