# SPDX-License-Identifier: Apache-2.0
"""The recorded score of a latent density is the density's own."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_implicit.compiled import CompilerError
from pyro_implicit.density.cost import TracedScore
from pyro_implicit.density.target import Target

DATA = torch.tensor([1.0, 2.0, -0.5])


def model():
    loc = pyro.sample("loc", dist.Normal(0.0, 2.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Normal(loc, scale), obs=DATA)


def gaussian_process():
    scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
    covariance = torch.eye(3) * (scale - 0.5)  # no covariance where the scale is small
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(3), covariance), obs=DATA)


def assert_equal(found, expected):
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def correlated():
    """Its Cholesky factor is filled by a mask, and so is the gradient."""
    chol = pyro.sample("chol", dist.LKJCholesky(2, 2.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Normal(chol[1, 0], scale), obs=DATA)


@pytest.mark.parametrize("model", [model, correlated])
@pytest.mark.parametrize("num_draws", [1, 5])
def test_scores_are_the_densitys_own(model, num_draws):
    density = Target(model)
    score = TracedScore(density.score)
    for _ in range(6):
        latent = torch.randn(num_draws, 2)
        assert_equal(score(latent), density.score(latent))
        score(latent)[1].zero_()  # the caller's own
    assert score.refusal is None and score._programs.num_run == 10


def test_impossible_draws_have_no_density_and_no_gradient():
    density = Target(gaussian_process)
    score = TracedScore(density.score)
    for _ in range(6):
        latent = torch.tensor([[1.0], [-1.0], [2.0]])
        log_prob, gradient = score(latent)
        assert_equal((log_prob, gradient), density.score(latent))
        assert log_prob[1] == -math.inf and gradient[1] == 0 and log_prob[[0, 2]].isfinite().all()
    assert score.refusal is None


def test_data_that_change_in_place_are_seen():
    score = TracedScore(Target(model).score)
    latent = torch.zeros(2, 2)
    before = [score(latent)[0] for _ in range(3)][-1]
    DATA.add_(1.0)
    try:
        assert_equal(score(latent), score.plain(latent))
        assert (score(latent)[0] != before).all()
    finally:
        DATA.sub_(1.0)


def test_a_model_that_branches_is_called_as_it_is():
    def branches():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        scale = 2.0 if x > 0 else 1.0
        pyro.sample("y", dist.Normal(x, scale), obs=DATA[0])

    density = Target(branches)
    score = TracedScore(density.score)
    for _ in range(4):
        latent = torch.randn(4, 1)
        assert_equal(score(latent), density.score(latent))
    assert "if x > 0" in score.refusal


def test_who_asks_for_a_recording_is_told_that_there_is_none():
    score = TracedScore(lambda latent: (latent.sum(-1) * latent[0, 0].item(), latent), 1, "trace")
    score(torch.ones(2, 1))
    with pytest.warns(
        UserWarning, match="the log-density runs without compilation.*: it reads the value"
    ):
        score(torch.ones(2, 1))


def test_compiled_scores_are_the_densitys_own_without_a_compiler_too(monkeypatch):
    def fails(*args):
        raise CompilerError("no g++")

    monkeypatch.setattr("pyro_implicit.compiled.program.compile_graph", fails)
    density = Target(model)
    score = TracedScore(density.score, compile=True)
    score(torch.zeros(4, 2))
    with pytest.warns(UserWarning, match="recorded, but not compiled: no g"):
        score(torch.zeros(4, 2))
    assert_equal(score(torch.ones(4, 2)), density.score(torch.ones(4, 2)))


def test_a_gradient_that_is_no_number_is_recorded_as_such():
    def nan_below_zero():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("f", torch.where(x > 0, x.sqrt(), x))  # its untaken branch has no gradient

    score = TracedScore(Target(nan_below_zero).score)
    for _ in range(5):
        log_prob, gradient = score(torch.tensor([[1.0], [-1.0]]))
    assert score.refusal is None and log_prob.isfinite().all()
    assert gradient[0].isfinite() and gradient[1].isnan()


def test_the_log_density_can_be_differentiated():
    density = Target(model)
    score = TracedScore(density.score)
    for _ in range(3):
        latent = torch.randn(4, 2, requires_grad=True)
        (doubled,) = torch.autograd.grad(score.log_prob(2 * latent).sum(), latent)
        assert torch.allclose(doubled, 2 * density.score(2 * latent)[1])


def test_few_calls_do_not_repay_a_recording():
    score = TracedScore(Target(model).score, num_calls=3)
    for _ in range(3):
        score(torch.zeros(4, 2))
    assert "do not repay" in score.refusal
    told = TracedScore(Target(model).score, num_calls=3, compile="trace")
    for _ in range(3):
        told(torch.zeros(4, 2))
    assert told.refusal is None and told._programs.num_recorded == 1
    many = TracedScore(Target(model).score, num_calls=10_000)
    for _ in range(3):
        many(torch.zeros(4, 2))
    assert many.refusal is None


def many_points():
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    x = torch.linspace(0, 1, 100, dtype=torch.float64)
    covariance = (-(x[:, None] - x).square() / scale).exp() + torch.eye(100, dtype=torch.float64)
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(100).double(), covariance), obs=x.sin())


def test_points_whose_tensors_exceed_the_cache_are_evaluated_in_blocks():
    """100 x 100 numbers of 8 bytes: 26 rows fit into 2 MiB, and blocks have 16."""
    score = TracedScore(Target(many_points).score)
    latent = torch.randn(40, 1, dtype=torch.float64)
    for _ in range(4):
        found, expected = score(latent), score.plain(latent)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    sizes = {key[0][0] for key in score._programs._programs}
    assert score.refusal is None and sizes == {16, 8}


def test_large_data_alone_make_no_blocks():
    data = torch.randn(1000, 600)

    def regression():
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(loc, 1.0), obs=(2 * data).sum(-1)[0])

    score = TracedScore(Target(regression).score)
    latent = torch.randn(64, 1)
    for _ in range(3):
        score(latent)
    assert {key[0][0] for key in score._programs._programs} == {64}


def test_the_gradient_at_density_0_is_0():
    """A score there is NaN or infinite, and must not reach the gradients of the others."""

    def score(latent):
        log_prob = (-latent.square().sum(-1)).masked_fill(latent[:, 0] < 0, -math.inf)
        return log_prob, (-2 * latent).masked_fill(latent[:, :1] < 0, math.nan)

    latent = torch.tensor([[1.0, 2.0], [-1.0, 2.0]], requires_grad=True)
    log_prob = TracedScore(score, compile=False).log_prob(latent)
    log_prob[log_prob.isfinite()].sum().backward()
    assert log_prob.tolist() == [-5.0, -math.inf]
    assert latent.grad.tolist() == [[-2.0, -4.0], [0.0, 0.0]]


def test_calls_that_compare_return_what_the_others_do():
    """Chains that resume after a kill compare at other calls, and must round in the same way."""
    score, latent = TracedScore(Target(model).score), torch.randn(4, 2)
    for _ in range(2):
        score(latent)
    (program,) = score._programs._programs.values()
    run = program._run
    program._run = lambda inputs: [one * (1 + 1e-6) for one in run(inputs)]
    expected = program([latent])
    assert not expected[1].equal(score.plain(latent)[1])
    for _ in range(8):
        assert_equal(score(latent), expected)


def table_model(table: Tensor) -> None:
    """Interpolate in a table, whose index of an infinite value raises an error."""
    rate = pyro.sample("rate", dist.LogNormal(0.0, 1.0))
    place = (rate - 0 * rate).clamp(0.0, len(table) - 1.5)  # NaN if the rate is infinite
    index = place.detach().floor().long()
    pyro.sample("y", dist.Normal(table[index + 1] * (place - index), 1.0), obs=torch.tensor(1.0))


def test_an_overflow_that_becomes_an_index_has_density_0(monkeypatch: Any) -> None:
    """Plain, recorded, and when a recording is compared; the other runs remain in one batch."""
    target = Target(table_model, torch.arange(5.0))
    score = TracedScore(target.score)
    points = torch.tensor([[-0.5], [0.3], [0.7]])
    far = points.clone()
    far[1] = 1000.0
    expected = [score(points)[k][[0, 2]] for k in (0, 1)]
    monkeypatch.setattr(target._runs.batched, "_one", None)
    for call in range(10):
        log_prob, gradient = score(far if call % 3 else points)
        torch.testing.assert_close(log_prob[[0, 2]], expected[0])
        torch.testing.assert_close(gradient[[0, 2]], expected[1])
        if call % 3:
            assert log_prob[1] == -torch.inf and gradient[1] == 0
    assert score.refusal is None
