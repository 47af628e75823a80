# SPDX-License-Identifier: Apache-2.0
"""Coordinates of positive definite matrices, which torch lacks."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_implicit import fit
from pyro_implicit.density.target import Target

# Torch says so of each sample, also of sound ones.
pytestmark = pytest.mark.filterwarnings("ignore:Singular sample")

Y = torch.tensor([[1.0, 0.5], [-0.4, 0.3], [2.0, 1.9], [-1.1, -0.2], [0.3, -0.7]])


def normals(y: Tensor) -> None:
    precision = pyro.sample("precision", dist.Wishart(torch.tensor(4.0), torch.eye(2)))
    data = dist.MultivariateNormal(torch.zeros(2), precision_matrix=precision)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", data, obs=y)


def posterior_of_normals(y: Tensor) -> dist.Wishart:
    inverse_scale = torch.eye(2) + y.mT @ y
    return dist.Wishart(torch.tensor(4.0 + len(y)), precision_matrix=inverse_scale)


@pytest.mark.parametrize("dim", [1, 2, 4])
@pytest.mark.usefixtures("double")
def test_values_inverse_and_log_determinant(dim: int) -> None:
    transform = biject_to(constraints.positive_definite)
    torch.manual_seed(0)
    vectors = torch.randn(3, dim * (dim + 1) // 2)
    matrices = transform(vectors)
    assert matrices.shape == transform.forward_shape(vectors.shape) == (3, dim, dim)
    assert transform.inverse_shape(matrices.shape) == vectors.shape
    assert constraints.positive_definite.check(matrices).all()
    torch.testing.assert_close(transform.inv(matrices), vectors)
    row, column = torch.tril_indices(dim, dim)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda x: transform(x)[row, column]))(vectors)
    expected = torch.linalg.slogdet(jacobian).logabsdet
    torch.testing.assert_close(transform.log_abs_det_jacobian(vectors, matrices), expected)


@pytest.mark.usefixtures("double")
def test_the_density_is_that_of_the_conjugate_posterior() -> None:
    """Up to the constant, in coordinates whose Jacobian is part of the density."""
    target = Target(normals, Y.double())
    vectors = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    transform = target.transforms["precision"]
    matrices = transform(vectors)
    expected = posterior_of_normals(Y.double()).log_prob(matrices)
    expected = expected + transform.log_abs_det_jacobian(vectors, matrices)
    torch.testing.assert_close(target.log_prob(vectors).diff(), expected.diff())


def test_fit_has_the_conjugate_posterior() -> None:
    result = fit(normals, "auto", Y, seed=0, progress=False)
    draws = result.sample(4000, seed=0)["precision"]
    posterior = posterior_of_normals(Y)
    sd = posterior.variance.sqrt()
    assert result.diagnose(seed=0).verdict == "trust"
    assert ((draws.mean(0) - posterior.mean).abs() < 0.08 * sd).all()
    assert torch.allclose(draws.std(0), sd, rtol=0.08)


def test_nuts_of_pyro_has_coordinates() -> None:
    mcmc = MCMC(NUTS(normals), num_samples=2, warmup_steps=2, disable_progbar=True)
    mcmc.run(Y)
    assert constraints.positive_definite.check(mcmc.get_samples()["precision"]).all()
