# SPDX-License-Identifier: Apache-2.0
"""The noisy encoder: its formula, its Jacobian, and one first layer for many samples."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch.func import jacfwd, vmap

from pyro_implicit import KIVI_ELBO, LIVI_ELBO, Implicit, SemiImplicit
from pyro_implicit.generators.base import ACTIVATIONS
from pyro_implicit.generators.mlp import NoisyEncoder

# torch.func's forward mode, our reference here, imports code that torch itself calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

HIDDEN = [(7,), (7, 6), (5, 8, 6)]


def build(hidden=(7, 6), activation="relu", dtype=torch.float64, seed=0) -> NoisyEncoder:
    """An encoder with all parameters far from their starting point, so that none is hidden."""
    torch.manual_seed(seed)
    encoder = NoisyEncoder(4, 3, hidden, activation).to(dtype)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return encoder


def inputs(encoder, batch):
    like = encoder.log_noise_scale
    noise = like.new_empty(batch + (encoder.noise_dim,)).normal_()
    return noise, like.new_empty(batch + (encoder.context_dim,)).normal_()


def by_the_formula(encoder, noise, context):
    """Layer after layer on the full tensors, the noise added to the first hidden one."""
    activation = ACTIVATIONS[encoder.activation].function
    h = activation(context @ encoder.context_layer.weight.T + encoder.context_layer.bias)
    h = h + encoder.log_noise_scale.exp() * noise
    *middle, last = encoder.layers
    for layer in middle:
        h = activation(h @ layer.weight.T + layer.bias)
    return h @ last.weight.T + last.bias


def gradients(encoder, value):
    weights = torch.linspace(-1, 2, value.numel(), dtype=value.dtype).reshape(value.shape)
    scalar = (weights * value).sum() + value.square().sum()
    return torch.autograd.grad(scalar, list(encoder.parameters()))


@pytest.mark.parametrize("batch", [(), (5,), (4, 1, 3)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("hidden", HIDDEN, ids=str)
def test_formula_and_gradient(hidden, activation, batch):
    encoder = build(hidden, activation)
    noise, context = inputs(encoder, batch)
    value, expected = encoder(noise, context), by_the_formula(encoder, noise, context)
    assert value.shape == (*batch, 3)
    torch.testing.assert_close(value, expected)
    names = [name for name, _ in encoder.named_parameters()]
    pairs = zip(names, gradients(encoder, value), gradients(encoder, expected), strict=True)
    for name, actual, reference in pairs:
        assert reference.abs().sum() > 0, name
        torch.testing.assert_close(actual, reference, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("batch", [(), (5,), (4, 1, 3)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("hidden", HIDDEN, ids=str)
def test_jacobian(hidden, activation, batch):
    encoder = build(hidden, activation)
    noise, context = inputs(encoder, batch)
    linearisation = encoder.linearise(noise, context)
    value, jacobian = linearisation.value, linearisation.jacobian()
    rows = noise.reshape(-1, encoder.noise_dim), context.reshape(-1, 4)
    expected = vmap(jacfwd(lambda z, x: by_the_formula(encoder, z, x)))(*rows)
    assert jacobian.shape == (*batch, 3, encoder.noise_dim)
    torch.testing.assert_close(jacobian, expected.reshape(jacobian.shape))
    torch.testing.assert_close(value, encoder(noise, context))
    parameters = [p for p in encoder.parameters() if p is not encoder.layers[-1].bias]
    actual, reference = (
        torch.autograd.grad(
            j.reshape(expected.shape).pow(3).sum(), parameters, allow_unused=True, **extra
        )
        for j, extra in ((jacobian, {"materialize_grads": True}), (expected, {}))
    )
    for a, b in zip(actual, reference, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


@pytest.mark.parametrize("name", ["forward", "linearise"])
@pytest.mark.parametrize(
    "shape, view, rows",
    [
        ((100, 6), lambda c: c.expand(100, 6, 4), 6),
        ((6, 100), lambda c: c.unsqueeze(1).expand(6, 100, 4), 6),
        ((9, 6, 100), lambda c: c.unsqueeze(1).expand(9, 6, 100, 4), 6),
        ((100, 6), lambda c: c[:1].expand(100, 6, 4), 1),
        ((100, 6), lambda c: c, 6),
        ((100, 6), lambda c: c.expand(100, 6, 4).clone(), 600),
    ],
    ids=["samples first", "samples last", "both", "one image", "broadcast", "copied"],
)
def test_first_layer_runs_once_for_all_samples(name, shape, view, rows):
    encoder = build()
    context = torch.randn(6, 4, dtype=torch.float64)
    noise = torch.randn(*shape, encoder.noise_dim, dtype=torch.float64)
    seen = []
    encoder.context_layer.register_forward_hook(lambda _, args, out: seen.append(out.numel() // 7))
    result = getattr(encoder, name)(noise, view(context))
    value = result if name == "forward" else result.value
    assert seen == [rows]
    expected = by_the_formula(encoder, noise, view(context))
    torch.testing.assert_close(value, expected)
    for a, b in zip(gradients(encoder, value), gradients(encoder, expected), strict=True):
        torch.testing.assert_close(a, b)


def test_a_context_with_a_gradient():
    # Contexts made by another network: every copy of a row must send its gradient back.
    encoder = build()
    context = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(10, 6, encoder.noise_dim, dtype=torch.float64)
    grads = [
        torch.autograd.grad(f(noise, context.expand(10, 6, 4)).pow(2).sum(), context)[0]
        for f in (encoder, lambda z, x: by_the_formula(encoder, z, x))
    ]
    torch.testing.assert_close(*grads)


def test_one_noise_for_all_contexts_inside_vmap():
    encoder = build()
    noise, context = inputs(encoder, (5,))
    value = vmap(encoder, (None, 0))(noise[0], context)
    torch.testing.assert_close(value, encoder(noise[0], context))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [50, 500])
def test_initial_spread(width, seed):
    torch.manual_seed(seed)
    encoder = NoisyEncoder(64, 8, hidden=(width, width))
    images = (torch.rand(20, 64) < 0.4).float()
    with torch.no_grad():
        value = encoder(torch.randn(2000, 20, width), images)
    spread = value.var(0).mean().sqrt()
    assert 0.14 < spread < 0.26, spread
    assert not encoder.layers[-1].bias.any()


def test_noise_scale_is_the_standard_deviation():
    encoder = NoisyEncoder(4, 3, hidden=(6,), noise_scale=0.3)
    jacobian = encoder.linearise(torch.randn(6), torch.randn(4)).jacobian()
    torch.testing.assert_close(jacobian, 0.3 * encoder.layers[0].weight)


@pytest.mark.parametrize(
    "elbo", [KIVI_ELBO(1, 20), KIVI_ELBO(3, 20), LIVI_ELBO(3)], ids=["kivi", "kivi-3", "livi-3"]
)
def test_one_pass_of_the_image_per_step(elbo):
    """In a guide of a plate, all particles share one first layer per call."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    encoder = NoisyEncoder(4, 2, hidden=(7, 6))
    images = torch.randn(9, 4)
    rows = []
    encoder.context_layer.register_forward_hook(lambda _, args, out: rows.append(out.numel() // 7))

    def model(x):
        with pyro.plate("images", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z @ torch.ones(2, 4), 1.0).to_event(1), obs=x)

    def guide(x):
        pyro.module("encoder", encoder)
        with pyro.plate("images", len(x)):
            if isinstance(elbo, LIVI_ELBO):
                pyro.sample("z", SemiImplicit(encoder, 7, 0.1, context=x))
            else:
                pyro.sample("z", Implicit(encoder, 7, context=x))

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), elbo)
    svi.step(images)
    rows.clear()
    svi.step(images)
    assert set(rows) == {9}
    # The draw, with its Jacobian, and the further draws.
    assert len(rows) == (1 if isinstance(elbo, LIVI_ELBO) else 2)


def test_errors():
    with pytest.raises(ValueError, match="context_dim must be at least 1, but got 0"):
        NoisyEncoder(0, 3)
    with pytest.raises(ValueError, match="hidden is empty. Cure: the width of the layer"):
        NoisyEncoder(4, 3, hidden=())
    with pytest.raises(ValueError, match="hidden must be at least 1, but got 0"):
        NoisyEncoder(4, 3, hidden=(4, 0))
    with pytest.raises(ValueError, match="noise_scale must be positive, but got 0.0"):
        NoisyEncoder(4, 3, noise_scale=0.0)
    with pytest.raises(ValueError, match="one of tanh, elu, relu, silu.*, but got 'gelu'"):
        NoisyEncoder(4, 3, activation="gelu")
