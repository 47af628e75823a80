# SPDX-License-Identifier: Apache-2.0
"""What every generator promises: shapes, independent rows, exact Jacobians, clear errors."""

from __future__ import annotations

import pickle

import pytest
import torch
from pyro import poutine
from pyro.nn.module import PyroModule, to_pyro_module_
from torch import Tensor
from torch.func import functional_call, jacfwd, vmap

from pyro_implicit.generators import (
    MLP,
    MMNN,
    AutoregressiveGenerator,
    CorrelatedMMNN,
    GatedMLP,
    GatedResidualGenerator,
    Generator,
    NoisyEncoder,
    ResidualGenerator,
)
from pyro_implicit.generators.base import ACTIVATIONS

# torch.func's forward mode, our reference here, imports code that torch itself calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

ALL = {
    "mlp": lambda: MLP(3, 5, hidden=(8, 7)),
    "mlp wide noise": lambda: MLP(5, 2, hidden=(8,), activation="relu"),
    "mlp affine": lambda: MLP(3, 5, hidden=()),
    "mlp context": lambda: MLP(3, 5, hidden=(8, 7), activation="silu", context_dim=2),
    "mlp affine context": lambda: MLP(3, 5, hidden=(), context_dim=2),
    "gated": lambda: GatedMLP(4, 4, hidden=(8, 7)),
    "gated narrow": lambda: GatedMLP(3, 5, hidden=(8,), activation="elu"),
    "gated context": lambda: GatedMLP(5, 3, hidden=(8, 7), context_dim=2),
    "residual": lambda: ResidualGenerator(5, 2, hidden=(8, 7)),
    "residual full core": lambda: ResidualGenerator(3, 3, hidden=(8,)),
    "residual context": lambda: ResidualGenerator(5, 2, hidden=(8, 7), context_dim=2),
    "gated residual": lambda: GatedResidualGenerator(5, 2, (8, 7)),
    "gated residual context": lambda: GatedResidualGenerator(5, 2, (8, 7), context_dim=2),
    "autoregressive": lambda: AutoregressiveGenerator(4, (8, 7)),
    "autoregressive context": lambda: AutoregressiveGenerator(4, (8, 7), context_dim=2),
    "encoder context": lambda: NoisyEncoder(2, 5, (8, 7), "silu"),
    "mmnn": lambda: MMNN((2, 3), ((4, 5), (3, 4)), (3, 4), output_dim=10),
    "mmnn linear": lambda: MMNN((2, 3), (), (3, 4)),
    "correlated": lambda: CorrelatedMMNN([5, 1, 12], (2, 3), ((4, 5), (4, 6)), ((3, 4),)),
}
BATCHES = [(), (5,), (4, 1, 3)]


def build(name: str, dtype: torch.dtype = torch.float64) -> Generator:
    """A generator with all parameters far from their starting point, so that none is hidden."""
    torch.manual_seed(0)
    generator = ALL[name]().to(dtype)
    for parameter in generator.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return generator


def inputs(generator: Generator, batch: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    dtype = next(generator.parameters()).dtype
    noise = torch.randn(batch + (generator.noise_dim,), dtype=dtype)
    if generator.context_dim == 0:
        return noise, None
    return noise, torch.randn(batch + (generator.context_dim,), dtype=dtype)


def jacobian_by_torch(generator, noise, context, parameters=None):
    """Row by row with torch.func, for comparison."""
    parameters = dict(generator.named_parameters()) if parameters is None else parameters

    def one(noise, context):
        return functional_call(generator, parameters, (noise, context))

    rows = noise.reshape(-1, noise.shape[-1])
    contexts = None if context is None else context.reshape(-1, context.shape[-1])
    in_dims = (0, None if context is None else 0)
    jacobian = vmap(jacfwd(one), in_dims=in_dims)(rows, contexts)
    return jacobian.reshape(noise.shape[:-1] + jacobian.shape[1:])


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_shape_and_dtype(name, dtype, batch):
    generator = build(name, dtype)
    value = generator(*inputs(generator, batch))
    assert value.shape == batch + (generator.output_dim,)
    assert value.dtype == dtype


@pytest.mark.parametrize("name", ALL)
def test_rows_are_independent(name):
    generator = build(name)
    noise, context = inputs(generator, (4, 1, 3))
    value = generator(noise, context)
    alone = generator(noise[2, 0, 1], None if context is None else context[2, 0, 1])
    torch.testing.assert_close(alone, value[2, 0, 1])
    noise[0, 0, 0] += 1
    changed = (generator(noise, context) != value).any(-1)
    assert changed[0, 0, 0]
    assert changed.sum() == 1


@pytest.mark.parametrize("name", ALL)
def test_every_parameter_reaches_the_value(name):
    generator = build(name)
    generator(*inputs(generator, (20,))).square().sum().backward()
    for key, parameter in generator.named_parameters():
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_jacobian(name, batch):
    generator = build(name)
    noise, context = inputs(generator, batch)
    linearisation = generator.linearise(noise, context)
    value, jacobian = linearisation.value, linearisation.jacobian()
    assert jacobian.shape == batch + (generator.output_dim, generator.noise_dim)
    torch.testing.assert_close(value, generator(noise, context))
    torch.testing.assert_close(jacobian, jacobian_by_torch(generator, noise, context))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("generator_class", [MLP, GatedMLP])
def test_jacobian_of_every_activation(generator_class, activation):
    torch.manual_seed(0)
    generator = generator_class(3, 4, hidden=(9, 8), activation=activation).double()
    for parameter in generator.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    noise = 3 * torch.randn(20, 3, dtype=torch.float64)
    jacobian = generator.linearise(noise).jacobian()
    torch.testing.assert_close(jacobian, jacobian_by_torch(generator, noise, None))


@pytest.mark.parametrize("name", ALL)
def test_jacobian_can_be_differentiated(name):
    generator = build(name)
    noise, context = inputs(generator, (5,))
    noise.requires_grad_()
    weights = torch.randn(5, generator.output_dim, generator.noise_dim, dtype=torch.float64)
    parameters = dict(generator.named_parameters())

    def gradients(jacobian):
        scalar = (weights * jacobian).sum().square() + (weights * jacobian.square()).sum()
        leaves = [noise, *parameters.values()]
        return torch.autograd.grad(scalar, leaves, allow_unused=True, materialize_grads=True)

    actual = gradients(generator.linearise(noise, context).jacobian())
    expected = gradients(jacobian_by_torch(generator, noise, context, parameters))
    for key, a, b in zip(["noise", *parameters], actual, expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", [name for name in ALL if "context" in name])
def test_context_broadcasts_and_matters(name):
    generator = build(name)
    noise, _ = inputs(generator, (6, 5))
    context = torch.randn(5, generator.context_dim, dtype=torch.float64)
    linearisation = generator.linearise(noise, context)
    value, jacobian = linearisation.value, linearisation.jacobian()
    linearisation = generator.linearise(noise, context.expand(6, 5, -1))
    full_value, full_jacobian = linearisation.value, linearisation.jacobian()
    torch.testing.assert_close(generator(noise, context), full_value)
    torch.testing.assert_close(value, full_value)
    torch.testing.assert_close(jacobian, full_jacobian)
    assert (generator(noise, context + 1) != value).any(-1).all()
    one_noise = generator(noise[0, 0], context)
    torch.testing.assert_close(one_noise, generator(noise[0, 0].expand(5, -1), context))


@pytest.mark.parametrize("name", ALL)
def test_inside_vmap(name):
    generator = build(name)
    noise, context = inputs(generator, (5,))
    in_dims = (0, None if context is None else 0)
    value = vmap(generator, in_dims=in_dims)(noise, context)
    torch.testing.assert_close(value, generator(noise, context))


@pytest.mark.parametrize("name", ALL)
def test_stays_on_its_device(name):
    # The meta device refuses tensors of any other, as a GPU would.
    generator = build(name).to("meta")
    noise, context = inputs(generator, (5,))
    noise, context = noise.to("meta"), None if context is None else context.to("meta")
    linearisation = generator.linearise(noise, context)
    results = [generator(noise, context), linearisation.value, linearisation.jacobian()]
    if generator.noise_dim == generator.output_dim:
        results += [linearisation.log_abs_det(), linearisation.solve_transposed(noise)]
    assert all(result.device.type == "meta" for result in results)


@pytest.mark.parametrize("name", ALL)
def test_inside_a_pyro_module(name):
    # A guide turns its generator into a Pyro module; a call must leave the parameters' names alone.
    guide = PyroModule("guide")
    guide.generator = build(name)
    to_pyro_module_(guide)
    for _ in range(2):
        with poutine.trace(param_only=True) as trace:
            guide.generator(*inputs(guide.generator, (5,)))
        names = {f"guide.generator.{key}" for key, _ in guide.generator.named_parameters()}
        assert set(trace.trace.param_nodes) == names


@pytest.mark.parametrize("name", ALL)
def test_pickle(name):
    generator = build(name)
    noise, context = inputs(generator, (5,))
    again = pickle.loads(pickle.dumps(generator))
    assert torch.equal(again(noise, context), generator(noise, context))


@pytest.mark.parametrize("name", ALL)
def test_errors_of_the_inputs(name):
    generator = build(name)
    noise, context = inputs(generator, (5,))
    size = rf"\(\*batch, {generator.noise_dim}\)"
    for call in (generator, generator.linearise):
        with pytest.raises(ValueError, match=f"expects noise of shape {size}.*noise_dim"):
            call(torch.cat([noise, noise], -1), context)
        with pytest.raises(ValueError, match="expects noise of shape"):
            call(noise[0, 0], context)
        if context is None:
            with pytest.raises(ValueError, match=r"without a context .* with context_dim=7"):
                call(noise, torch.zeros(5, 7))
        else:
            with pytest.raises(ValueError, match="got no context. Cure: pass context="):
                call(noise)
            with pytest.raises(ValueError, match=r"expects a context of shape \(\*batch, 2\)"):
                call(noise, context[..., :1])


def test_errors_of_the_sizes():
    with pytest.raises(ValueError, match="noise_dim must be at least 1, but got 0"):
        MLP(0, 3)
    with pytest.raises(ValueError, match="output_dim must be at least 1, but got -1"):
        GatedMLP(3, -1)
    with pytest.raises(ValueError, match="hidden must be at least 1, but got 0"):
        MLP(3, 3, hidden=(4, 0))
    with pytest.raises(ValueError, match="context_dim is -2. Cure: a size, or 0 for no context"):
        MLP(3, 3, context_dim=-2)
    with pytest.raises(ValueError, match="one of tanh, elu, relu, silu.*, but got 'gelu'"):
        GatedMLP(3, 3, activation="gelu")
    with pytest.raises(ValueError, match="one of tanh, elu, relu, silu.*, but got 'gelu'"):
        AutoregressiveGenerator(3, activation="gelu")


def test_sizes_are_shown():
    shown = repr(MLP(3, 5, context_dim=2))
    assert "noise_dim=3, output_dim=5, context_dim=2" in shown
