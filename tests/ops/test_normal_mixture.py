# SPDX-License-Identifier: Apache-2.0
"""Mixtures of normal distributions of weighted points."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.ops import fit_normal_mixture


def weighted_points(number: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    points = torch.randn(number, dim) @ torch.randn(dim, dim) + 5.0 * torch.randn(dim)
    return points, (2.0 * torch.randn(number)).softmax(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_component_has_the_moments_of_the_points(dtype: torch.dtype) -> None:
    points, shares = (one.to(dtype) for one in weighted_points(50, 3))
    log_weights, loc, scale_tril = fit_normal_mixture(points, shares, 1, 20.0)
    assert log_weights.tolist() == [0.0] and scale_tril.dtype == loc.dtype == dtype
    torch.testing.assert_close(loc[0], shares @ points)
    covariance = points.T.cov(correction=0, aweights=shares)
    torch.testing.assert_close(scale_tril[0] @ scale_tril[0].T, covariance)


def test_separate_clusters_have_the_covariances_of_the_equation() -> None:
    """Responsibilities are then 0 or 1, so that the fixed point is known."""
    torch.set_default_dtype(torch.float64)
    points, shares = weighted_points(40, 2)
    right = torch.arange(40) % 4 == 0
    points[right] += torch.tensor([1_000.0, -300.0])
    number = 30.0
    torch.manual_seed(3)  # the first means lie in both clusters
    log_weights, loc, scale_tril = fit_normal_mixture(points, shares, 2, number)
    order = loc[:, 0].argsort()
    everything = points.T.cov(correction=0, aweights=shares)
    for index, part in zip(order, (~right, right), strict=True):
        size = number * shares[part].sum()
        inside = points[part].T.cov(correction=0, aweights=shares[part])
        expected = (4 * everything / 2 + size * inside) / (4 + size)  # nu = d + 2, K^(-2/d) = 1/2
        torch.testing.assert_close(scale_tril[index] @ scale_tril[index].T, expected)
        mean = shares[part] @ points[part] / shares[part].sum()
        torch.testing.assert_close(loc[index], mean)
        expected = ((size + 1) / (number + 2)).log()
        torch.testing.assert_close(log_weights[index], expected)


def test_components_of_repeated_points_do_not_collapse() -> None:
    points = torch.tensor([[0.0, 0.0], [1.0, 3.0], [2.0, -1.0]]).repeat(4, 1)
    _, _, scale_tril = fit_normal_mixture(points, torch.full((12,), 1 / 12), 3, 3.0)
    sds = scale_tril.square().sum(-1).sqrt()
    assert (sds > 0.3 * points.std(0)).all()


def test_points_without_weight_have_no_part() -> None:
    points, shares = weighted_points(50, 3)
    torch.manual_seed(1)
    expected = fit_normal_mixture(points, shares, 2, 20.0)
    impossible = torch.tensor([[torch.nan] * 3, [torch.inf] * 3])
    torch.manual_seed(1)
    found = fit_normal_mixture(
        torch.cat([points, impossible]), torch.cat([shares, torch.zeros(2)]), 2, 20.0
    )
    torch.testing.assert_close(found, expected)
