# SPDX-License-Identifier: Apache-2.0
"""The bijection to shares: torch's in double precision, and small shares in single precision."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_implicit.density.bijections import StickBreaking
from pyro_implicit.density.target import Target

DTYPES = (torch.float32, torch.float64)
POINTS = 3.0 * torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_it_is_the_bijection_of_torch() -> None:
    ours, torchs = StickBreaking(), biject_to(constraints.simplex)
    shares = torchs(POINTS)
    torch.testing.assert_close(ours(POINTS), shares, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(ours.inv(shares), POINTS, rtol=1e-8, atol=1e-8)
    found, expected = (one.log_abs_det_jacobian(POINTS, shares) for one in (ours, torchs))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0.0)


def test_small_shares_in_single_precision() -> None:
    """At these points torch's bijection is off by up to 19 orders, and its inverse by up to 69."""
    points, bijection = 12.0 * POINTS.abs(), StickBreaking()
    shares = bijection(points.float())
    exact = bijection(points)
    large = exact > 1e-30
    assert exact[large].min() < 1e-20
    torch.testing.assert_close(shares.double()[large], exact[large], rtol=1e-4, atol=0.0)
    some = large.all(-1)
    assert 5 < some.sum() < 50
    points, shares = points[some], shares[some]
    torch.testing.assert_close(bijection.inv(shares).double(), points, rtol=1e-5, atol=0)
    found = bijection.log_abs_det_jacobian(points.float(), shares)
    expected = bijection.log_abs_det_jacobian(points, exact[some])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_shares_of_zero_have_finite_coordinates() -> None:
    found = StickBreaking().inv(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    assert found.isfinite().all()


def test_density_of_a_sparse_dirichlet_in_single_precision() -> None:
    def model(like: Tensor) -> None:
        pyro.sample("p", dist.Dirichlet(like.new_full((2, 5), 0.1)).to_event(1))

    single, double = (Target(model, torch.zeros(1, dtype=dtype)) for dtype in DTYPES)
    points = 5.0 * torch.cat([POINTS, POINTS.flip(0)], -1)
    assert single.constrain(points.float())["p"].min() < 1e-12
    found, expected = single.score(points.float()), double.score(points)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-4, atol=1e-4)
    far = 200.0 * points.float()
    assert single.score(far)[0].isfinite().all() and single.score(far)[1].isfinite().all()
    # Beyond the smallest share, the tail still falls, but faster than the concentration implies.
    ends = torch.zeros(2, 8)
    ends[:, 0] = torch.tensor([-100.0, -150.0])
    log_prob, score = single.score(ends)
    assert log_prob.diff().item() < -0.1 * 49 and (score[:, 0] > 0.09).all()
    again = single.unconstrain(single.constrain(points.float()))
    torch.testing.assert_close(again.double(), points, rtol=1e-4, atol=1e-4)
