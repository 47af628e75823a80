# SPDX-License-Identifier: Apache-2.0
r"""Jacobians of generators, and log-determinants and densities of their linearisation.

A generator :math:`g: R^d \to R^m` with Jacobian J and conditional scales s, linearised around the
noise z, is a Gaussian of covariance :math:`C = J J^\top + \mathrm{diag}(s^2)` (LIVI, eqs 8-12).
The log-determinants use the whitened Jacobian :math:`\mathrm{diag}(s)^{-1} J` and the smaller of
its two Gram matrices, of min(d, m) dimensions; they are exact, or estimated by Krylov methods.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jvp, vjp, vmap

from pyro_implicit.ops.matrices import solve_triangular

__all__ = [
    "batch_jacobian",
    "covariance_log_det",
    "forward_product",
    "hessian_products",
    "jacobian_products",
    "lanczos",
    "linearised_log_density",
    "log_quadratic_and_solve",
    "smallest_eigenpair",
    "smallest_singular_log_det",
    "stochastic_log_det",
]


Operator = Callable[[Tensor], Tensor]


def covariance_log_det(jacobian: Tensor, scale: Tensor) -> Tensor:
    r"""Return :math:`\log\det(J J^\top + \mathrm{diag}(s^2))`, exactly, by Cholesky.

    **Example:**

    >>> covariance_log_det(torch.zeros(2, 5), torch.ones(2))
    tensor(0.)

    :param jacobian: ``(*batch, m, d)``.
    :param scale: positive, ``(*batch, m)``.
    :returns: ``(*batch,)``.
    """
    factor = _gram_factor(jacobian / scale.unsqueeze(-1))
    return 2 * (_half_log_det(factor) + scale.log().sum(-1))


def linearised_log_density(residual: Tensor, jacobian: Tensor, scale: Tensor) -> Tensor:
    r"""Return :math:`\log N(r \mid 0, J J^\top + \mathrm{diag}(s^2))`, exactly.

    With :math:`r = \theta - g(z) + J z` this is LIVI's density before the limit of small s
    (eqs 8-12); for a linear generator it is the density of :math:`\theta`.

    **Example:**

    >>> linearised_log_density(torch.zeros(2), torch.zeros(2, 5), torch.ones(2))
    tensor(-1.8379)

    :param residual: ``(*batch, m)``.
    :param jacobian: ``(*batch, m, d)``.
    :param scale: positive, ``(*batch, m)``.
    :returns: ``(*batch,)``.
    """
    jacobian, residual = jacobian / scale.unsqueeze(-1), residual / scale
    factor = _gram_factor(jacobian)
    if jacobian.shape[-1] <= jacobian.shape[-2]:  # Woodbury, on the noise's side
        projected = (jacobian * residual.unsqueeze(-1)).sum(-2)
        projected = solve_triangular(factor, projected, upper=False)
        quadratic = residual.square().sum(-1) - projected.square().sum(-1)
    else:
        quadratic = solve_triangular(factor, residual, upper=False).square().sum(-1)
    log_normaliser = 0.5 * scale.shape[-1] * math.log(2 * math.pi)
    return -0.5 * quadratic - _half_log_det(factor) - scale.log().sum(-1) - log_normaliser


def smallest_singular_log_det(
    times: Operator, transposed_times: Operator, scale: Tensor, start: Tensor, num_steps: int = 100
) -> tuple[Tensor, Tensor]:
    r"""Bound the log-determinant from below by the smallest singular value (LIVI, eqs 17-18).

    :math:`\log\det C \ge \sum_i \log s_i^2 + d \log(1 + \sigma_{\min}^2)` with the smallest
    singular value of the whitened Jacobian, found by LOBPCG; for equal scales this is
    :math:`d \log(s_{\min}^2 + s^2) + (m - d) \log s^2`. The gradient holds the singular vector
    fixed (envelope theorem). An unconverged vector makes the value too large.

    **Example:**

    >>> double = lambda v: 2.0 * v
    >>> value, residual = smallest_singular_log_det(double, double, torch.ones(3), torch.ones(3))
    >>> torch.allclose(value, 3 * torch.tensor(5.0).log())
    True

    :param times: ``v -> J v`` from ``(*batch, d)`` to ``(*batch, m)``, d <= m, differentiable.
    :param transposed_times: ``u -> J^T u``.
    :param scale: positive, ``(*batch, m)``.
    :param start: first guess of the singular vector, ``(*batch, d)``.
    :param num_steps: LOBPCG steps at most.
    :returns: the bound, and the residual relative to :math:`1 + \sigma_{\min}^2`: both
        ``(*batch,)``.
    """
    noise_dim = start.shape[-1]
    with torch.no_grad():
        operator = _gram(times, transposed_times, scale)
        _, vector, residual = smallest_eigenpair(operator, start, num_steps)
    smallest = (times(vector) / scale).square().sum(-1)
    return noise_dim * smallest.log1p() + 2 * scale.log().sum(-1), residual


def stochastic_log_det(
    times: Operator, transposed_times: Operator, scale: Tensor, probes: Tensor, num_steps: int = 30
) -> tuple[Tensor, Tensor]:
    r"""Estimate the log-determinant by stochastic Lanczos quadrature, with an unbiased gradient.

    With :math:`A = I + J^\top \mathrm{diag}(s^{-2}) J`, the value is the mean over Rademacher
    probes v of :math:`v^\top \log(A) v`, and the gradient that of
    :math:`\mathrm{tr}(A^{-1} dA) = E_v[(A^{-1} v)^\top dA\, v]`, both up to the returned residual.
    J is never stored.

    **Example:**

    >>> double = lambda v: 2.0 * v
    >>> probes = torch.ones(1, 3)
    >>> value, residual = stochastic_log_det(double, double, torch.ones(1, 3), probes)
    >>> torch.allclose(value, 3 * torch.tensor(5.0).log())
    True

    :param times: ``v -> J v`` from ``(num_probes, *batch, d)`` to ``(num_probes, *batch, m)``,
        differentiable.
    :param transposed_times: ``u -> J^T u``.
    :param scale: positive, broadcastable to ``(num_probes, *batch, m)``.
    :param probes: random signs, ``(num_probes, *batch, d)``.
    :param num_steps: Lanczos steps.
    :returns: the estimate ``(*batch,)`` and the relative residual of the solves
        ``(num_probes, *batch)``.

    **References:**

    1. Gardner et al. (2018), *GPyTorch: Blackbox Matrix-Matrix Gaussian Process Inference*.
    """
    with torch.no_grad():
        operator = _gram(times, transposed_times, scale)
        quadratic, solution, residual = log_quadratic_and_solve(operator, probes, num_steps)
    slope = ((times(solution) / scale) * (times(probes) / scale)).sum(-1)
    log_det = (quadratic + slope - slope.detach()).mean(0)
    return log_det + 2 * scale.log().sum(-1).expand(probes.shape[:-1]).mean(0), residual


def _gram(times: Operator, transposed_times: Operator, scale: Tensor) -> Operator:
    return lambda v: v + transposed_times(times(v) / scale.square())


def _gram_factor(jacobian: Tensor) -> Tensor:
    """Factor I + the smaller Gram matrix in float64; NaN if the Jacobian is not finite."""
    dtype, jacobian = jacobian.dtype, jacobian.double()
    tall = jacobian.shape[-2] >= jacobian.shape[-1]
    gram = jacobian.mT @ jacobian if tall else jacobian @ jacobian.mT
    gram = gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(gram)  # inline, as steps of ELBOs come here
    return factor.masked_fill((info != 0)[..., None, None], math.nan).to(dtype)


def _half_log_det(factor: Tensor) -> Tensor:
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def lanczos(operator: Operator, start: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Tridiagonalise an operator on the Krylov space of ``start``, fully reorthogonalised.

    **Example:**

    >>> basis, tridiagonal = lanczos(lambda v: 2.0 * v, torch.tensor([3.0, 4.0]), num_steps=1)
    >>> tridiagonal.round(decimals=3)
    tensor([[2.]])

    :param operator: ``v -> A v`` on ``(*batch, d)``, A symmetric.
    :param start: ``(*batch, d)``.
    :param num_steps: size k of the Krylov space, at most d.
    :returns: orthonormal basis Q ``(*batch, d, k)`` and T = Q^T A Q ``(*batch, k, k)``.

    **References:**

    1. Golub and Van Loan, *Matrix Computations*, section 10.1.
    """
    tiny = torch.finfo(start.dtype).tiny
    basis = [start / start.norm(dim=-1, keepdim=True).clamp(min=tiny)]
    diagonal, off_diagonal = [], []
    for step in range(num_steps):
        image = operator(basis[-1])
        diagonal.append((basis[-1] * image).sum(-1))
        if step == num_steps - 1:
            break
        stacked = torch.stack(basis, -1)
        for _ in range(2):
            overlap = (stacked * image.unsqueeze(-1)).sum(-2, keepdim=True)
            image = image - (stacked * overlap).sum(-1)
        norm = image.norm(dim=-1, keepdim=True)
        # In an invariant space the remainder is rounding noise: replace it by zero.
        alive = norm > diagonal[0].unsqueeze(-1).abs() * torch.finfo(start.dtype).eps * 10
        basis.append(torch.where(alive, image / norm.clamp(min=tiny), 0.0))
        off_diagonal.append(torch.where(alive, norm, 0.0).squeeze(-1))
    tridiagonal = torch.diag_embed(torch.stack(diagonal, -1))
    if off_diagonal:
        side = torch.stack(off_diagonal, -1)
        tridiagonal = tridiagonal + torch.diag_embed(side, 1) + torch.diag_embed(side, -1)
    return torch.stack(basis, -1), tridiagonal


def log_quadratic_and_solve(
    operator: Operator, probe: Tensor, num_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute :math:`v^\top \log(A) v` and :math:`A^{-1} v` by one Lanczos run.

    The solution equals that of the conjugate gradient method after the same number of steps. The
    mean of the quadratic form over Rademacher probes is the log-determinant (stochastic Lanczos
    quadrature).

    **Example:**

    >>> probe = torch.ones(4)
    >>> log, solution, residual = log_quadratic_and_solve(lambda v: 2.0 * v, probe, num_steps=2)
    >>> torch.allclose(log, 4 * torch.tensor(2.0).log()), torch.allclose(solution, probe / 2)
    (True, True)

    :param operator: ``v -> A v`` on ``(*batch, d)``, A symmetric with eigenvalues of at least 1.
    :param probe: ``(*batch, d)``.
    :param num_steps: size of the Krylov space; at most d is used.
    :returns: the quadratic form ``(*batch,)``, the solution ``(*batch, d)`` and the relative
        residual ``|A x - v| / |v|`` of the solution ``(*batch,)``.

    **References:**

    1. Ubaru, Chen and Saad (2017), *Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature*.
    """
    basis, tridiagonal = lanczos(operator, probe, min(num_steps, probe.shape[-1]))
    values, vectors = torch.linalg.eigh(tridiagonal)
    # Directions that the recursion dropped have eigenvalue 0 and no weight.
    weights, values = vectors[..., 0, :], values.clamp(min=1.0)
    norm = probe.norm(dim=-1)
    quadratic = norm.square() * (weights.square() * values.log()).sum(-1)
    coefficients = (vectors * (weights / values).unsqueeze(-2)).sum(-1)
    solution = norm.unsqueeze(-1) * (basis * coefficients.unsqueeze(-2)).sum(-1)
    residual = (operator(solution) - probe).norm(dim=-1) / norm
    return quadratic, solution, residual


def smallest_eigenpair(
    operator: Operator, start: Tensor, num_steps: int = 100, tolerance: float = 1e-3
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the smallest eigenvalue of each operator by LOBPCG with one vector.

    Each step minimises the Rayleigh quotient over the span of the vector, its residual and the last
    direction, so that the value decreases towards the eigenvalue.

    **Example:**

    >>> scales = torch.tensor([3.0, 1.0, 2.0])
    >>> value, vector, residual = smallest_eigenpair(lambda v: scales * v, torch.ones(3))
    >>> round(value.item(), 3)
    1.0

    :param operator: ``v -> A v`` on ``(*batch, d)``, A symmetric positive semi-definite.
    :param start: ``(*batch, d)``, not orthogonal to the eigenvector sought.
    :param num_steps: most steps.
    :param tolerance: stop when every relative residual is below.
    :returns: eigenvalues ``(*batch,)``, unit vectors ``(*batch, d)``, and the relative residuals
        ``|A v - value v| / value`` ``(*batch,)``.

    **References:**

    1. Knyazev (2001), *Toward the Optimal Preconditioned Eigensolver*.
    """
    tiny = torch.finfo(start.dtype).tiny
    num_directions = min(3, start.shape[-1])
    vector = start / start.norm(dim=-1, keepdim=True)
    direction = torch.zeros_like(vector)
    for step in range(num_steps + 1):
        image = operator(vector)
        value = (vector * image).sum(-1)
        remainder = image - value.unsqueeze(-1) * vector
        residual = remainder.norm(dim=-1) / value.clamp(min=tiny)
        if step == num_steps or bool((residual <= tolerance).all()):
            break
        remainder = remainder / remainder.norm(dim=-1, keepdim=True).clamp(min=tiny)
        space = torch.stack([vector, remainder, direction], -1)[..., :num_directions]
        space = torch.linalg.qr(space).Q
        images = torch.stack([operator(column) for column in space.unbind(-1)], -1)
        small = torch.linalg.eigh(space.mT @ images).eigenvectors[..., :1]
        new_vector = (space @ small).squeeze(-1)
        direction = (space[..., 1:] @ small[..., 1:, :]).squeeze(-1)
        direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=tiny)
        vector = new_vector / new_vector.norm(dim=-1, keepdim=True)
    return value, vector, residual


Function = Callable[[Tensor], Tensor]


def batch_jacobian(function: Function, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the value and the dense Jacobian of each row, by forward mode for all rows at once.

    Works under ``torch.no_grad`` and is differentiable by reverse mode.

    **Example:**

    >>> value, jacobian = batch_jacobian(torch.sin, torch.zeros(2, 3))
    >>> torch.allclose(jacobian[0], torch.eye(3))
    True

    :param function: function from ``(*batch, d)`` to ``(*batch, m)``, each row independently.
    :param inputs: ``(*batch, d)``.
    :returns: the value ``(*batch, m)`` and its Jacobian ``(*batch, m, d)``.
    """

    def push(direction: Tensor) -> tuple[Tensor, Tensor]:
        return forward_product(function, inputs, direction.expand_as(inputs))

    basis = torch.eye(inputs.shape[-1], dtype=inputs.dtype, device=inputs.device)
    # For a random function (dropout), this is the Jacobian of one outcome.
    values, columns = vmap(push, out_dims=(0, 0), randomness="same")(basis)
    return values[0], columns.movedim(0, -1)


def jacobian_products(function: Function, inputs: Tensor) -> tuple[Function, Function]:
    """Return products with each row's Jacobian :math:`J`, which is never stored.

    **Example:**

    >>> times, transposed_times = jacobian_products(torch.sin, torch.zeros(2, 3))
    >>> torch.allclose(times(torch.ones(2, 3)), torch.ones(2, 3))
    True

    :param function: function from ``(*batch, d)`` to ``(*batch, m)``, each row independently.
    :param inputs: ``(*batch, d)``.
    :returns: ``v -> J v``, from ``(*batch, d)`` to ``(*batch, m)``, and ``u -> J^T u`` back.
    """
    value, pull = vjp(function, inputs)[:2]

    @functools.cache  # for all vectors, once as a constant and once differentiable
    def push(differentiable: bool) -> Callable[[Tensor], tuple[Tensor]]:
        # The pullback is linear, and its own pullback is the product. Forward mode would evaluate
        # the function again for each vector.
        return vjp(lambda u: pull(u)[0], torch.zeros_like(value))[1]

    return lambda v: push(torch.is_grad_enabled())(v)[0], lambda u: pull(u)[0]


def forward_product(function: Function, inputs: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the value and the derivative in one direction, by forward mode.

    **Example:**

    >>> forward_product(torch.sin, torch.zeros(2), torch.tensor([1.0, 2.0]))
    (tensor([0., 0.]), tensor([1., 2.]))

    :param direction: of the inputs' shape.
    """
    _prepare_forward_mode()
    output = jvp(function, (inputs,), (direction,))
    return output[0], output[1]


def hessian_products(
    score: Tensor, points: Tensor, directions: Tensor, create_graph: bool = False
) -> Tensor:
    """Multiply second derivatives by vectors, vectorised unless an operation has no rule for it.

    The products are NaN if torch has no second derivative of an operation, as of attention.

    **Example:**

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> (score,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    >>> hessian_products(score, x, torch.eye(3))[0]
    tensor([[6., 0., 0.],
            [6., 0., 0.]])

    :param score: the gradient by the points, with its graph, of the points' shape.
    :param points: ``(*batch, d)``.
    :param directions: ``(num_directions, d)``.
    :param create_graph: whether the products are to be differentiated.
    :returns: ``(num_directions, *batch, d)``.
    """
    shape = (len(directions), *(1,) * (points.dim() - 1), points.shape[-1])
    seeds = directions.to(score).reshape(shape).expand(-1, *points.shape)
    if not score.requires_grad:  # of a linear function
        return torch.zeros_like(seeds)

    def product(seed: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(
            score, points, seed, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        return torch.zeros_like(seed) if found is None else found

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a missing rule, and a slow loop instead
            return torch.func.vmap(product)(seeds)
    except RuntimeError:  # of vmap; the loop raises other errors again
        pass
    try:
        return torch.stack([product(seed) for seed in seeds])
    except RuntimeError as error:
        if "derivative for" in str(error) and "not implemented" in str(error):
            return torch.full_like(seeds, torch.nan)
        raise


@functools.cache
def _prepare_forward_mode() -> None:
    """Trigger torch's own scripting on first use, which warns from torch 2.15 on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
