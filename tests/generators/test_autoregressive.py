# SPDX-License-Identifier: Apache-2.0
"""The autoregressive generator: masks, exact derivatives, inverse, and funnels it fits."""

from __future__ import annotations

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, SVI
from torch.autograd import forward_ad

from pyro_implicit import AutoImplicit
from pyro_implicit.generators import AutoregressiveGenerator, GatedResidualGenerator
from pyro_implicit.infer import InjectiveELBO
from pyro_implicit.mcmc import NoiseSpaceReparam
from pyro_implicit.ops import batch_jacobian
from pyro_implicit.ops.sinh_arcsinh import sinh_arcsinh

# The last has fewer hidden units than values.
CASES = [(1, (8,), 0), (1, (8, 7), 2), (2, (8, 7), 0), (6, (16, 12), 2), (5, (), 0), (9, (4,), 0)]
cases = pytest.mark.parametrize("output_dim, hidden, context_dim", CASES, ids=str)
batches = pytest.mark.parametrize("batch", [(), (5,), (4, 1, 3)], ids=str)


def build(output_dim, hidden=(8, 7), context_dim=0, std=0.4, **options) -> AutoregressiveGenerator:
    torch.manual_seed(0)
    generator = AutoregressiveGenerator(output_dim, hidden, context_dim=context_dim, **options)
    for parameter in generator.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return generator.double()


def inputs(output_dim, context_dim, batch):
    noise = torch.randn(batch + (output_dim,), dtype=torch.float64, requires_grad=True)
    context = torch.randn(batch + (context_dim,), dtype=torch.float64) if context_dim else None
    return noise, context


def test_formula_of_linear_maps():
    generator = build(3, hidden=())
    raw = torch.randn(7, 3, dtype=torch.float64)
    (last,) = generator.layers
    weight, bias = last.weight.reshape(4, 3, 3).tril(-1), last.bias.reshape(4, 3)
    shape = generator.noise_skew, generator.noise_tail
    noise = sinh_arcsinh(raw, 3 * torch.tanh(shape[0] / 3), 1.5 * torch.tanh(shape[1] / 1.5))
    outputs = torch.einsum("pij,kj->pki", weight, noise) + bias.unsqueeze(1)
    skip = generator.skip.weight.reshape(2, 3, 3).tril(-1)
    outputs[:2] += torch.einsum("pij,kj->pki", skip, noise)
    shift, log_scale, skew, tail = outputs
    bent = sinh_arcsinh(noise, 3 * torch.tanh(skew / 3), 1.5 * torch.tanh(tail / 1.5))
    torch.testing.assert_close(generator(raw), shift + log_scale.exp() * bent)
    assert generator.noise_dim == generator.output_dim == 3


def forward_derivative(function, at, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(at, tangent))).tangent


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@batches
@cases
def test_inverse(output_dim, hidden, context_dim, batch):
    generator = build(output_dim, hidden, context_dim)
    noise, context = inputs(output_dim, context_dim, batch)
    value = generator(noise, context).detach().requires_grad_()
    inverse = generator.inverse(value, context)
    torch.testing.assert_close(inverse, noise)

    # Differentiable: J^{-T} v.
    vector = torch.randn_like(noise)
    (gradient,) = torch.autograd.grad(inverse, value, vector)
    expected = generator.linearise(noise, context).solve_transposed(vector)
    torch.testing.assert_close(gradient, expected)
    with torch.no_grad():
        torch.testing.assert_close(generator.inverse(value, context), noise)
        found = forward_derivative(lambda x: generator.inverse(x, context), value.detach(), vector)
    jacobian = generator.linearise(noise, context).jacobian()
    expected = torch.linalg.solve_triangular(jacobian, vector.unsqueeze(-1), upper=False)
    torch.testing.assert_close(found, expected.squeeze(-1))


@torch.no_grad()
def test_inverse_near_the_identity_takes_few_passes(monkeypatch):
    """Without gradients; also in ``vmap``, and next to values that overflow."""
    generator = AutoregressiveGenerator(20)
    noise, passes, original = torch.randn(9, 20), [], generator._pass
    value = generator(noise)
    monkeypatch.setattr(generator, "_pass", lambda x: passes.append(1) or original(x))
    torch.testing.assert_close(generator.inverse(value), noise)
    assert len(passes) <= 6
    torch.testing.assert_close(torch.func.vmap(generator.inverse)(value), noise)
    value[0, 3] = math.inf
    found = generator.inverse(value)
    torch.testing.assert_close(found[1:], noise[1:])
    torch.testing.assert_close(found[0, :3], noise[0, :3])
    assert not found[0, 3].isfinite()


@pytest.mark.parametrize("context_dim", [0, 2])
@pytest.mark.parametrize("output_dim, hidden", [(2, (3,)), (6, (12, 12)), (20, (64, 64))])
def test_every_function_sees_all_earlier_noise_and_no_other(output_dim, hidden, context_dim):
    # Of small weights, because the bound of a far too large skew or tail has no slope in float64.
    generator = build(output_dim, hidden, context_dim, std=0.5)
    noise, context = inputs(output_dim, context_dim, (50,))
    torch.nn.init.zeros_(generator.skip.weight)  # the network must see it without the linear maps
    below = torch.ones(output_dim, output_dim, dtype=torch.bool).tril(-1)

    def functions(z, context):
        joined = z if context is None else torch.cat([z, context], -1)
        return torch.stack(generator._pass(joined)[1], -1)

    for function in range(4):
        _, slopes = batch_jacobian(lambda z, k=function: functions(z, context)[..., k], noise)
        assert torch.equal((slopes != 0).any(0), below)
        if context is not None:
            on_context = lambda c, k=function: functions(noise, c)[..., k]  # noqa: E731
            _, slopes = batch_jacobian(on_context, context)
            assert (slopes != 0).any(0).all()


def test_the_linear_maps_see_all_earlier_noise_and_all_context():
    generator = AutoregressiveGenerator(4, context_dim=2)
    below = torch.ones(4, 4).tril(-1)
    expected = torch.cat([below, torch.ones(4, 2)], -1).repeat(2, 1)
    assert torch.equal(generator.skip.mask, expected)


def test_gradient_reaches_all_parameters():
    generator = build(5, (16, 12), context_dim=2)
    noise, context = inputs(5, 2, (30,))
    loss = generator(noise, context).sum() + generator.linearise(noise, context).log_abs_det().sum()
    loss.backward()
    masks = {name.replace("mask", "weight"): mask for name, mask in generator.named_buffers()}
    for name, parameter in generator.named_parameters():
        seen = masks.get(name, torch.ones_like(parameter)) > 0
        assert torch.equal(parameter.grad != 0, seen), name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("std", [0.5, 2.0])
def test_is_injective_whatever_its_weights(seed, std):
    torch.manual_seed(seed)
    generator = AutoregressiveGenerator(3, (16, 16)).double()
    for parameter in generator.parameters():
        torch.nn.init.normal_(parameter, std=std / math.sqrt(parameter.shape[-1]))
    # Two extreme bends in a row lose all digits of a value.
    torch.nn.init.normal_(generator.noise_skew, std=0.3)
    torch.nn.init.normal_(generator.noise_tail, std=0.3)
    noise = torch.randn(2000, 3, dtype=torch.float64)
    linearisation = generator.linearise(noise)
    value, jacobian = linearisation.value, linearisation.jacobian()
    assert jacobian.diagonal(dim1=-2, dim2=-1).min() > 0
    assert torch.equal(jacobian.triu(1), torch.zeros_like(jacobian))
    torch.testing.assert_close(generator.inverse(value), noise, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_starts_near_the_noise(seed):
    torch.manual_seed(seed)
    generator = AutoregressiveGenerator(20, context_dim=2)
    noise, context = torch.randn(1000, 20), torch.randn(1000, 2)
    with torch.no_grad():
        shift = context @ generator.skip.weight[:20, 20:].mT  # what an encoder learns by
        assert shift.abs().max() > 0.1
        assert (generator(noise, context) - shift - noise).abs().max() < 0.2
        assert generator.linearise(noise, context).log_abs_det().abs().max() < 0.5


def test_draws_stay_finite_in_float32():
    generator = AutoregressiveGenerator(3)
    with torch.no_grad():
        generator.layers[-1].bias[6:] = 100.0  # both bounds reached
    noise = torch.tensor([[8.0, -8.0, 8.0]], requires_grad=True)
    value = generator(noise)
    loss = value.square().sum() + generator.linearise(noise).log_abs_det().sum()
    (gradient,) = torch.autograd.grad(loss, noise)
    assert value.isfinite().all() and gradient.isfinite().all()
    assert value.abs().max() < 1.5e5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dtype(dtype):
    generator = AutoregressiveGenerator(4, context_dim=2).to(dtype)
    noise, context = torch.randn(5, 4, dtype=dtype), torch.randn(5, 2, dtype=dtype)
    linearisation = generator.linearise(noise, context)
    results = [generator(noise, context), linearisation.value, linearisation.jacobian()]
    results += [linearisation.log_abs_det(), linearisation.solve_transposed(noise)]
    results += [generator.inverse(noise, context)]
    assert all(result.dtype == dtype for result in results)


def test_one_value_makes_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generator = AutoregressiveGenerator(1)
    assert sum(parameter.numel() for parameter in generator.layers.parameters()) == 8
    generator(torch.randn(3, 1)).sum().backward()


def autoregressive_funnel() -> AutoregressiveGenerator:
    generator = AutoregressiveGenerator(4).double()
    torch.nn.init.zeros_(generator.layers[-1].weight)
    with torch.no_grad():
        generator.skip.weight[5:, 0] = 1.5
        generator.layers[-1].bias[4] = math.log(3.0)
    return generator


def gated_funnel() -> GatedResidualGenerator:
    generator = GatedResidualGenerator(4, 1, output_scale=0.0).double()
    torch.nn.init.constant_(generator.gate_linear.weight, 1.5)
    generator.log_scale.data[0] = math.log(3.0)
    return generator


@pytest.mark.parametrize("make", [autoregressive_funnel, gated_funnel])
def test_carries_a_funnel_exactly(make):
    """By its linear map alone: v ~ N(0, 9), x_i | v ~ N(0, e^v) (Neal, 2003)."""
    generator = make()
    noise = torch.randn(50, 4, dtype=torch.float64)
    v, x = generator(noise).split([1, 3], -1)
    normal = torch.distributions.Normal
    log_p = normal(0.0, 3.0).log_prob(v) + normal(0.0, (v / 2).exp()).log_prob(x).sum(-1, True)
    log_q = normal(0.0, 1.0).log_prob(noise).sum(-1) - generator.linearise(noise).log_abs_det()
    torch.testing.assert_close(log_q, log_p.squeeze(-1))


def funnel():
    v = pyro.sample("v", dist.Normal(0.0, 1.5))
    pyro.sample("x", dist.Normal(torch.zeros(4), (v / 2).exp()).to_event(1))


def train(num_steps: int, num_particles: int) -> AutoImplicit:
    guide = AutoImplicit(funnel, AutoregressiveGenerator)
    optimizer = pyro.optim.CosineAnnealingLR(
        {"optimizer": torch.optim.Adam, "optim_args": {"lr": 1e-2}, "T_max": num_steps},
        {"clip_norm": 10.0},
    )
    svi = SVI(funnel, guide, optimizer, InjectiveELBO(num_particles, compile="trace"))
    for _ in range(num_steps):
        svi.step()
        optimizer.step()
    return guide


def test_fits_a_funnel():
    pyro.set_rng_seed(0)
    guide = train(400, 64)
    draws = guide.sample_posterior(40_000)
    assert draws["v"].std() / 1.5 == pytest.approx(1.0, abs=0.03)
    scaled = draws["x"] / (draws["v"] / 2).exp().unsqueeze(-1)
    assert scaled.std().item() == pytest.approx(1.0, abs=0.03)


def test_noise_space_nuts():
    pyro.set_rng_seed(0)
    reparam = NoiseSpaceReparam(train(20, 8))
    mcmc = MCMC(
        NUTS(reparam.reparam(funnel)), num_samples=20, warmup_steps=20, disable_progbar=True
    )
    mcmc.run()
    samples = reparam.transform_sample(mcmc.get_samples()["v_shared_latent"])
    assert samples["x"].shape == (20, 4) and samples["v"].isfinite().all()


def test_errors():
    generator = AutoregressiveGenerator(5, context_dim=2)
    with pytest.raises(ValueError, match=r"values of shape \(\*batch, 5\), but got \(3,\)"):
        generator.inverse(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="got no context. Cure: pass context="):
        generator.inverse(torch.zeros(3, 5))
