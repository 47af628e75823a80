# SPDX-License-Identifier: Apache-2.0
"""Coordinates of positive definite matrices."""

from __future__ import annotations

import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.mcmc.util import initialize_model
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_implicit import fit
from pyro_implicit.density.bijections import LogCholesky
from pyro_implicit.density.target import Target
from pyro_implicit.runtime.sites import QuietPriors

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
    prior = result.to_datatree(10, prior=5, seed=0)["prior"]["precision"]
    assert prior.shape == (1, 5, 2, 2)


def test_nuts_of_pyro_has_the_density_of_the_conjugate_posterior() -> None:
    _, potential, transforms, _ = initialize_model(QuietPriors()(normals), (Y,))
    matrices = posterior_of_normals(Y).mean * torch.tensor([0.5, 1.0, 2.0])[:, None, None]
    transform = transforms["precision"]
    found = torch.stack([potential({"precision": transform(matrix)}) for matrix in matrices])
    log_det = transform.inv.log_abs_det_jacobian(transform(matrices), matrices)
    expected = -posterior_of_normals(Y).log_prob(matrices) - log_det
    torch.testing.assert_close(found.diff(), expected.diff())


def test_it_is_equal_to_itself_and_can_be_pickled() -> None:
    transform = biject_to(constraints.positive_definite)
    assert transform == LogCholesky() == pickle.loads(pickle.dumps(transform))
    assert transform != biject_to(constraints.positive)


@pytest.mark.parametrize("shape", [(4,), (2, 5)])
def test_a_vector_of_another_length_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"{shape[-1]} is not the number"):
        LogCholesky().forward_shape(shape)


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_matrices_that_are_not_square_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not that of square matrices"):
        LogCholesky().inverse_shape(shape)


@pytest.mark.usefixtures("double")
def test_matrices_in_a_plate_have_their_own_densities() -> None:
    def model() -> None:
        with pyro.plate("groups", 3):
            pyro.sample("x", dist.Wishart(torch.tensor([4.0, 5.0, 6.0]), torch.eye(2)))

    target = Target(model)
    torch.manual_seed(0)
    vectors = torch.randn(5, 9)
    parts = vectors.unflatten(-1, (3, 3))
    matrices = target.constrain(vectors)["x"]
    expected = dist.Wishart(torch.tensor([4.0, 5.0, 6.0]), torch.eye(2)).log_prob(matrices)
    expected = expected + LogCholesky().log_abs_det_jacobian(parts, matrices)
    assert target.sample_prior(2).shape == (2, 9)
    torch.testing.assert_close(target.log_prob(vectors), expected.sum(-1))


#: In float32, L L^T of the second one is singular.
REGULAR_AND_SINGULAR = torch.tensor([[0.0, 0.5, 0.0], [0.0, 2.0**30, -50.0]])


def test_a_singular_matrix_has_no_density_among_others() -> None:
    target = Target(normals, Y)
    log_prob, score, hessian = target.derivatives(REGULAR_AND_SINGULAR)
    assert log_prob.isfinite().tolist() == [True, False]
    assert (score[1] == 0).all()
    alone = target.derivatives(REGULAR_AND_SINGULAR[:1])
    torch.testing.assert_close((log_prob[:1], score[:1], hessian[:1]), alone)


def test_a_singular_matrix_has_no_coordinates_among_others() -> None:
    matrices = LogCholesky()(REGULAR_AND_SINGULAR)
    assert LogCholesky().inv(matrices).isnan().any(-1).tolist() == [False, True]


@pytest.mark.filterwarnings("ignore:Low df values")
def test_singular_draws_of_the_prior_are_left_out() -> None:
    def model() -> None:
        pyro.sample("x", dist.Wishart(torch.tensor(2.01), torch.eye(3)))

    pyro.set_rng_seed(0)
    draws = Target(model).sample_prior(50)
    assert 0 < len(draws) < 50 and draws.isfinite().all()
