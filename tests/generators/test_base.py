# SPDX-License-Identifier: Apache-2.0
"""Value and derivative from one pass: every generator, and foreign functions, against torch.func.

Jacobians are compared in ``test_generators.py``; here is what is made of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyro_implicit.generators import (
    MLP,
    MMNN,
    AutoregressiveGenerator,
    GatedMLP,
    GatedResidualGenerator,
    NoisyEncoder,
    ResidualGenerator,
)
from pyro_implicit.generators.base import Differentiable, as_generator
from pyro_implicit.ops import batch_jacobian

# torch.func's forward mode, our reference here, imports code that torch itself calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

# As many values as noises.
SQUARE = {
    "mlp": lambda: MLP(4, 4, hidden=(8, 7), activation="tanh"),
    "mlp context": lambda: MLP(4, 4, hidden=(8, 7), context_dim=2),
    "gated": lambda: GatedMLP(4, 4, hidden=(8, 7)),
    "gated context": lambda: GatedMLP(4, 4, hidden=(8, 7), context_dim=2),
    "encoder context": lambda: NoisyEncoder(2, 4, hidden=(4, 7), activation="silu"),
    "residual": lambda: ResidualGenerator(4, 2, hidden=(8, 7)),
    "residual full core": lambda: ResidualGenerator(3, 3, hidden=(8,)),
    "residual context": lambda: ResidualGenerator(4, 2, hidden=(8, 7), context_dim=2),
    "gated residual": lambda: GatedResidualGenerator(4, 2, hidden=(8, 7)),
    "gated residual context": lambda: GatedResidualGenerator(4, 2, hidden=(8, 7), context_dim=2),
    "autoregressive": lambda: AutoregressiveGenerator(4, (8, 7)),
    "autoregressive context": lambda: AutoregressiveGenerator(4, (8, 7), context_dim=2),
    "mmnn": lambda: MMNN((2, 3), (), (2, 3)),
}
BATCHES = [(), (5,), (4, 1, 3)]


def build(name, batch):
    torch.manual_seed(0)
    generator = SQUARE[name]().double()
    for parameter in generator.parameters():
        nn.init.normal_(parameter, std=0.5)
    noise = torch.randn(batch + (generator.noise_dim,), dtype=torch.float64, requires_grad=True)
    context = None
    if generator.context_dim:
        context = torch.randn(batch + (generator.context_dim,), dtype=torch.float64)
    return generator, noise, context


def assert_same_gradients(actual, expected, leaves):
    options = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad(actual, leaves, **options)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, **options))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", SQUARE)
def test_value_is_that_of_the_forward_pass(name, batch):
    generator, noise, context = build(name, batch)
    value, expected = generator.linearise(noise, context).value, generator(noise, context)
    torch.testing.assert_close(value, expected)
    leaves = [noise, *generator.parameters()]
    assert_same_gradients(value.pow(3).sum(), expected.pow(3).sum(), leaves)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", SQUARE)
def test_log_abs_det(name, batch):
    generator, noise, context = build(name, batch)
    actual = generator.linearise(noise, context).log_abs_det()
    _, jacobian = batch_jacobian(lambda z: generator(z, context), noise)
    expected = torch.linalg.slogdet(jacobian).logabsdet
    assert actual.shape == batch
    torch.testing.assert_close(actual, expected)
    leaves = [noise, *generator.parameters()]
    assert_same_gradients(actual.square().sum(), expected.square().sum(), leaves)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", SQUARE)
def test_solve_and_inverse_transposed_are_constants(name, batch):
    generator, noise, context = build(name, batch)
    vector = torch.randn_like(noise).requires_grad_()
    linearisation = generator.linearise(noise, context)
    _, jacobian = batch_jacobian(lambda z: generator(z, context), noise)
    expected = torch.linalg.solve(jacobian.mT, vector).detach()
    solved = linearisation.solve_transposed(vector)
    torch.testing.assert_close(solved, expected)

    inverse = linearisation.inverse_transposed()
    compressed = vector if inverse.compress is None else inverse.compress(vector)
    upper = (inverse.rows @ compressed.detach().unsqueeze(-1)).squeeze(-1)
    lower = inverse.diagonal * vector.detach()[..., upper.shape[-1] :]
    torch.testing.assert_close(torch.cat([upper, lower], -1), expected)
    sign, log_det = inverse.slogdet()
    expected = torch.linalg.slogdet(jacobian.detach())
    assert sign.equal(expected.sign)
    torch.testing.assert_close(log_det, -expected.logabsdet)
    for result in (solved, inverse.rows, inverse.diagonal, log_det):
        assert not result.requires_grad


@pytest.mark.parametrize("name", SQUARE)
def test_asking_twice_changes_nothing(name):
    generator, noise, context = build(name, (5,))
    linearisation = generator.linearise(noise, context)
    first = linearisation.jacobian(), linearisation.log_abs_det()
    linearisation.solve_transposed(torch.randn_like(noise))
    assert linearisation.jacobian().equal(first[0])
    assert linearisation.log_abs_det().equal(first[1])


def test_which_generators_are_injective():
    injective = {name.split()[0] for name in SQUARE if SQUARE[name]().injective}
    assert injective == {"residual", "gated", "autoregressive"}
    assert not GatedMLP(4, 4).injective and GatedResidualGenerator(4, 2).injective
    assert not as_generator(torch.exp).injective


def test_core_dim():
    """The Jacobian of a gated residual generator depends on the rest, too."""
    assert ResidualGenerator(5, 2).core_dim == 2
    assert GatedResidualGenerator(5, 2).core_dim == 5
    assert MLP(3, 5).core_dim == AutoregressiveGenerator(3).core_dim == 3


def test_inverse_is_refused_where_it_is_not_known():
    for generator in (MLP(4, 4), ResidualGenerator(4, 2), as_generator(torch.exp)):
        message = f"{type(generator).__name__} has no inverse.*Cure: AutoImplicit"
        with pytest.raises(NotImplementedError, match=message):
            generator.inverse(torch.zeros(4))


class Exponential(Differentiable):
    """Written by a user who knows nothing but the function."""

    def __call__(self, noise):
        return noise.exp() + noise.sum(-1, keepdim=True)


FOREIGN = {
    "function": lambda: lambda z: z.exp() + z.sum(-1, keepdim=True),
    "module": lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double(),
    "differentiable": Exponential,
}


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_functions_and_modules(name, batch):
    torch.manual_seed(0)
    function = FOREIGN[name]()
    noise = torch.randn(batch + (3,), dtype=torch.float64, requires_grad=True)
    generator = as_generator(function)
    assert as_generator(generator) is generator
    linearisation = generator.linearise(noise)
    torch.testing.assert_close(linearisation.value, function(noise))
    rows = noise.reshape(-1, 3)
    jacobian = torch.stack([torch.autograd.functional.jacobian(function, row) for row in rows])
    jacobian = jacobian.reshape(batch + (3, 3))
    torch.testing.assert_close(linearisation.jacobian(), jacobian)
    log_det = torch.linalg.slogdet(jacobian).logabsdet
    torch.testing.assert_close(linearisation.log_abs_det(), log_det)
    # By double backward, against forward over reverse.
    one = torch.autograd.functional.jacobian(function, rows[0], create_graph=True)
    found = torch.autograd.grad(linearisation.jacobian().pow(3).sum(), noise)[0].reshape(-1, 3)[0]
    torch.testing.assert_close(
        found, torch.autograd.grad(one.pow(3).sum(), noise)[0].reshape(-1, 3)[0]
    )


def test_values_of_any_shape_are_flattened():
    linearisation = as_generator(lambda z: z[..., :, None] * z[..., None, :]).linearise(
        torch.tensor([[1.0, 2.0]])
    )
    assert linearisation.value.equal(torch.tensor([[1.0, 2.0, 2.0, 4.0]]))
    expected = torch.tensor([[[2.0, 0.0], [2.0, 1.0], [2.0, 1.0], [0.0, 4.0]]])
    assert linearisation.jacobian().equal(expected)


def test_foreign_function_with_a_context():
    noise, context = torch.randn(5, 3), torch.randn(5, 3)
    linearisation = as_generator(lambda z, c: z * c).linearise(noise, context)
    torch.testing.assert_close(linearisation.jacobian(), context.diag_embed())
