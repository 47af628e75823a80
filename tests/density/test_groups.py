# SPDX-License-Identifier: Apache-2.0
"""Latent variables of groups, integrated out and drawn, against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from scipy.special import polygamma

from pyro_implicit.density import groups
from pyro_implicit.density.groups import Groups
from pyro_implicit.density.marginal_target import MarginalTarget
from pyro_implicit.ops.quadrature import NormalRule

NUM_GROUPS = 40


def normal(x):
    mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 3.0))
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 1.0))
    with pyro.plate("groups", NUM_GROUPS, subsample_size=len(x)):
        z = pyro.sample("z", dist.Normal(mean, scale))
        pyro.sample("x", dist.Normal(z, 0.5), obs=x)


def normal_log_marginals(x, mean, scale):
    return dist.Normal(mean, (scale**2 + 0.25).sqrt()).log_prob(x)


def counts(y):
    shape = pyro.sample("shape", dist.LogNormal(y.new_zeros(()), 1.0))
    rate = pyro.sample("rate", dist.LogNormal(y.new_zeros(()), 1.0))
    with pyro.plate("groups", NUM_GROUPS, subsample_size=len(y)):
        z = pyro.sample("z", dist.Gamma(shape, rate))
        pyro.sample("y", dist.Poisson(z), obs=y)


def nested(y, mask):
    """Rows of groups, each with a latent of its own; further plates; masked data."""
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 1.0))
    with pyro.plate("parts", 2, dim=-2):
        scale = pyro.sample("scale", dist.LogNormal(y.new_zeros(2, 1), 1.0))
    with pyro.plate("groups", NUM_GROUPS, subsample_size=y.shape[-1], dim=-1):
        z = pyro.sample("z", dist.Normal(mean, scale[0]))
        with pyro.plate("rows", 2, dim=-2):
            w = pyro.sample("w", dist.Normal(z, scale[1]))
            pyro.sample("y", dist.Normal(w, 1.0).mask(mask), obs=y)


def events(y):
    """A vector of positive numbers for each group."""
    shape = pyro.sample("shape", dist.LogNormal(y.new_zeros(()), 1.0))
    with pyro.plate("groups", NUM_GROUPS, subsample_size=len(y)):
        z = pyro.sample("z", dist.Gamma(shape.expand(4), 1.0).to_event(1))
        pyro.sample("y", dist.Poisson(z).to_event(1), obs=y)


def double(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_normal_groups_are_exact():
    x = 3 * double(6)
    values = {"mean": double(3, seed=1), "scale": double(3, seed=2).exp()}
    exact = normal_log_marginals(x, values["mean"][:, None], values["scale"][:, None])
    groups = Groups(normal, (x,))
    assert (groups.sites, groups.size, groups.full_size) == (("z",), 6, NUM_GROUPS)
    torch.testing.assert_close(groups.log_marginals(values), exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(groups.on((x[:2],)).log_marginals(values), exact[:, :2])
    near = groups.conditional(values)
    precision = 1 / values["scale"][:, None] ** 2 + 4
    mode = (values["mean"] / values["scale"] ** 2)[:, None] + 4 * x
    torch.testing.assert_close(near.mode.squeeze(-1), mode / precision)
    torch.testing.assert_close(near.root[..., 0, 0], precision.rsqrt().expand_as(mode))


@pytest.mark.parametrize("model", [counts, events])
def test_counts_against_the_negative_binomial(model):
    y = torch.tensor([0, 1, 2, 5, 40, 1000]).double()
    values = {"shape": torch.tensor([1.5, 4.0]).double().requires_grad_()}
    rate = 2.0 if model is counts else 1.0
    if model is counts:
        values["rate"] = torch.tensor([rate, rate]).double()
    exact = dist.NegativeBinomial(values["shape"][:, None], 1 / (1 + rate)).log_prob(y)
    if model is events:
        exact, y = 4 * exact, y[:, None].expand(-1, 4)
    found = Groups(model, (y,)).on((y,), NormalRule(41)).log_marginals(values)
    # Product rules; in four dimensions 2,048 draws, for shapes as skewed as 1.5.
    close = {"rtol": 0, "atol": 1e-6 if model is counts else 0.06}
    torch.testing.assert_close(found, exact, **close)
    slopes = [torch.autograd.grad(one.sum(), values["shape"])[0] for one in (found, exact)]
    torch.testing.assert_close(*slopes, rtol=0.02 * (model is events), atol=1e-5)


def test_nested_plates_unbalanced_groups_and_a_group_without_data():
    y = 2 * double(2, 4)
    mask = torch.tensor([[True, True, False, False], [True, False, True, False]])
    groups = Groups(nested, (y, mask))
    assert (groups.sites, groups.num_latents) == (("z", "w"), 3)
    mean, scale = 0.5, torch.tensor([0.7, 1.2]).double()
    values = {"mean": double(1) * 0 + mean, "scale": scale.reshape(1, 2, 1)}
    covariance = scale[0] ** 2 + (scale[1] ** 2 + 1) * torch.eye(2).double()
    both = dist.MultivariateNormal(torch.full((2,), mean).double(), covariance)
    one = dist.Normal(mean, covariance[0, 0].sqrt())
    exact = [both.log_prob(y[:, 0]), one.log_prob(y[0, 1]), one.log_prob(y[1, 2]), y.new_zeros(())]
    torch.testing.assert_close(groups.log_marginals(values)[0], torch.stack(exact))
    draws = groups.draw(
        {name: value.expand(4000, *value.shape[1:]) for name, value in values.items()}
    )
    assert draws["w"].shape == (4000, 2, 4)
    # A group without data has its prior.
    prior = (draws["z"][:, 3] - mean) / scale[0]
    assert stats.kstest(prior, "norm").pvalue > 1e-4
    expected = mean + (scale[0] ** 2 / covariance[0, 0]) * (y[0, 1] - mean)
    assert draws["z"][:, 1].mean().item() == pytest.approx(expected.item(), abs=0.05)


@pytest.mark.parametrize("num_moves", [0, 3])
def test_draws_are_those_of_the_conditional_posterior(num_moves):
    y = torch.tensor([0.0, 3.0, 200.0])
    values = {"shape": torch.full((3000,), 2.0), "rate": torch.full((3000,), 1.5)}
    draws = Groups(counts, (y,)).draw(values, num_moves)["z"]
    for draw, count in zip(draws.unbind(1), y.tolist(), strict=True):
        exact = stats.gamma(2 + count, scale=1 / 2.5)
        assert stats.kstest(draw.numpy(), exact.cdf).statistic < 1.95 / math.sqrt(3000)
        assert draw.log().std().item() == pytest.approx(
            math.sqrt(polygamma(1, 2 + count)), rel=0.05 if num_moves else 0.08
        )


def test_the_marginal_posterior_and_its_derivatives():
    x = 3 * double(10)
    batches = [(x[:4],), (x[4:8],), (x[8:],)]
    target = MarginalTarget(Groups(normal, batches[0]), batches)
    assert list(target.shapes) == ["mean", "scale"]
    point = 0.5 * double(3, 2, seed=1)

    def log_prob(point):
        mean, log_scale = point.unbind(-1)
        prior = dist.Normal(0.0, 3.0).log_prob(mean) + dist.Normal(0.0, 1.0).log_prob(log_scale)
        rows = normal_log_marginals(x, mean.unsqueeze(-1), log_scale.exp().unsqueeze(-1))
        return prior + NUM_GROUPS / len(x) * rows.sum(-1)

    exact = log_prob(point)
    torch.testing.assert_close(target.log_prob(point), exact)
    value, score, hessian = target.derivatives(point)
    torch.testing.assert_close(value, exact)
    for row, one in enumerate(point.split(1)):
        by_hand = torch.autograd.functional
        torch.testing.assert_close(score[row], by_hand.jacobian(log_prob, one).flatten())
        second = by_hand.hessian(lambda point: log_prob(point).sum(), one)
        torch.testing.assert_close(hessian[row], second.reshape(2, 2))
    torch.testing.assert_close(target.score(point)[1], score)
    assert target.num_units == len(x)
    target.centre(point[0])
    centred = target.log_prob(point)
    torch.testing.assert_close(centred - centred[0], exact - exact[0])
    assert target.height(centred[0]) == pytest.approx(exact[0].item())
    part = MarginalTarget(Groups(normal, batches[0]), batches, has_all=False)
    assert (part.log_prob(point) / exact).max() < 0.5


def rows(x, mask):
    """Padded rows (rows, groups)."""
    mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 3.0))
    with pyro.plate("groups", NUM_GROUPS, subsample_size=x.shape[-1]):
        z = pyro.sample("z", dist.Normal(mean, 2.0))
        with pyro.plate("rows", len(x), dim=-2):
            pyro.sample("x", dist.Normal(z, 1.0).mask(mask), obs=x)


def test_groups_of_1_to_10000_rows():
    """Each minibatch has a padding of its own."""
    batches, total = [], 0.0
    for sizes in ([1, 2, 3], [5000, 10_000]):
        x = 1 + double(max(sizes), len(sizes), seed=len(sizes))
        mask = torch.arange(max(sizes)).unsqueeze(-1) < torch.tensor(sizes)
        batches.append((x.masked_fill(~mask, 0.0), mask))
        for column, size in enumerate(sizes):
            data, extra = x[:size, column], 4 / (1 + 4 * size)
            error = data - 0.5  # of the mean below
            square = error.square().sum() - extra * error.sum() ** 2
            log_det = math.log1p(4 * size) + size * math.log(2 * math.pi)
            total = total - 0.5 * (square + log_det)
    target = MarginalTarget(Groups(rows, batches[0]), batches, has_all=False)
    point = torch.full((1, 1), 0.5, dtype=torch.float64)
    prior = dist.Normal(0.0, 3.0).log_prob(point[0, 0])
    torch.testing.assert_close(target.log_prob(point)[0], total + prior, rtol=1e-9, atol=1e-6)


def shared(x):
    """Data outside of the plate of groups that depend on their latents."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", NUM_GROUPS, subsample_size=3):
        z = pyro.sample("z", dist.Normal(mean, 1.0))
    pyro.sample("x", dist.Normal(z[[0, 1, 1, 2]], 1.0).to_event(1), obs=x)


def two_plates(x):
    for name in ("rows", "groups"):
        with pyro.plate(name, NUM_GROUPS, subsample_size=len(x)):
            z = pyro.sample(f"z_{name}", dist.Normal(0.0, 1.0))
            pyro.sample(f"x_{name}", dist.Normal(z, 1.0), obs=x)


def discrete(x):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", NUM_GROUPS, subsample_size=len(x)):
        which = pyro.sample("which", dist.Bernoulli(x.new_full((), 0.5)))
        z = pyro.sample("z", dist.Normal(mean, 1.0))
        pyro.sample("x", dist.Normal(z + which, 1.0), obs=x)


def poisson(x):
    """Not enumerable, and outside of the plate."""
    mean = pyro.sample("count", dist.Poisson(x.new_tensor(2.0)))
    normal(x + mean)


def subsampled_rows(x):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", NUM_GROUPS, subsample_size=x.shape[-1]):
        z = pyro.sample("z", dist.Normal(mean, 1.0))
        with pyro.plate("rows", 10, subsample_size=len(x), dim=-2):
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (discrete, torch.zeros(4), r"needs continuous latents.*\(which\)"),
        (poisson, torch.zeros(4), r"needs continuous latents.*\(count\)"),
        (subsampled_rows, torch.zeros(2, 4), r"'x' lies in the subsampled plate 'rows'.*whole"),
        (shared, torch.zeros(4), r"site 'x' depends on the latents of groups \(z\).*padded"),
        (two_plates, torch.zeros(4), r"plates of latents are \['groups', 'rows'\]"),
        (lambda x: normal(x[:5]), torch.zeros(NUM_GROUPS), "draws 5 of 40 elements.*by itself"),
    ],
)
def test_models_without_separate_groups_are_refused(model, data, message):
    with pytest.raises(ValueError, match=message):
        Groups(model, (data,))


def test_flat_priors():
    """Of a global variable, and of the groups given it: their own integral is 1 for any data."""

    def flat(x, is_local):
        prior = dist.ImproperUniform(dist.constraints.real, (), ())
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0) if is_local else prior)
        with pyro.plate("groups", NUM_GROUPS, subsample_size=len(x)):
            z = pyro.sample("z", prior if is_local else dist.Normal(mean, 1.0))
            pyro.sample("x", dist.Normal(z + is_local * mean, 1.0), obs=x)

    x = torch.tensor([0.0, 2.0], dtype=torch.float64)
    means = torch.tensor([0.0, 1.0], dtype=torch.float64)
    found = Groups(flat, (x,), kwargs={"is_local": True}).log_marginals({"mean": means})
    torch.testing.assert_close(found, torch.zeros(2, 2).double(), atol=1e-6, rtol=0)
    found = Groups(flat, (x,), kwargs={"is_local": False}).log_marginals({"mean": means})
    expected = dist.Normal(means.unsqueeze(-1), math.sqrt(2.0)).log_prob(x)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_missing_data_of_a_later_minibatch_are_named():
    groups = Groups(normal, (torch.zeros(4),))
    with pytest.raises(ValueError, match="observation of site 'x' of a minibatch is NaN"):
        groups.on((torch.tensor([0.0, math.nan]),))


def test_a_later_minibatch_has_the_arguments_and_shapes_of_the_first():
    """Otherwise arguments of the first one would replace the missing ones."""

    def scaled(x, scale):
        mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
        with pyro.plate("groups", NUM_GROUPS, subsample_size=len(x)):
            z = pyro.sample("z", dist.Normal(mean, 1.0))
            pyro.sample("x", dist.Normal(z, scale), obs=x)

    x = torch.zeros(4)
    groups = Groups(scaled, (x, torch.ones(4)))
    with pytest.raises(TypeError, match="a minibatch has 2 arguments, but got 1. Cure"):
        groups.on((x,))
    with pytest.raises(ValueError, match=r"site 'x' has shape \(4, 1\).* together 4 x 4 terms"):
        groups.on((x.unsqueeze(-1), torch.ones(4, 1)))


def test_moves_correct_what_proposals_leave(monkeypatch):
    """With one proposal, resampling leaves the too wide draws of the proposal as they are."""
    monkeypatch.setattr(groups, "GROUPS", replace(groups.GROUPS, num_proposals=1))

    def model(x):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("groups", 5, subsample_size=len(x)):
            z = pyro.sample("z", dist.Normal(mean, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    found = groups.Groups(model, (torch.zeros(2),))
    values = {"mean": torch.zeros(3000)}
    wide, right = (found.draw(values, number)["z"].std() * 2**0.5 for number in (0, 12))
    assert wide.item() == pytest.approx(groups.GROUPS.proposal_scale, rel=0.05)
    assert right.item() == pytest.approx(1.0, abs=0.04)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("at_once", [False, True])
def test_random_nodes_follow_the_values_smoothly(at_once):
    """Differences over a twentieth of an sd are those of the exact density of counts."""

    def model(y):
        shape, rate = (pyro.sample(name, dist.LogNormal(0.0, 1.0)) for name in ("shape", "rate"))
        with pyro.plate("groups", len(y)):
            z = pyro.sample("z", dist.Gamma(shape * torch.arange(1.0, 5.0), rate).to_event(1))
            pyro.sample("y", dist.Poisson(z).to_event(1), obs=y)

    y = dist.Poisson(dist.Gamma(2.0 * torch.arange(1.0, 5.0), 0.8).sample((100,))).sample()
    target = MarginalTarget(Groups(model, (y,)), [(y,)], NormalRule(25))
    at = torch.tensor([0.7, -0.2])
    points = at + torch.tensor([[0.0, 0.0], [1e-3, 0.0], [0.0, 1e-3], [2e-3, -2e-3]])
    target.centre(at)
    found = torch.cat([target.log_prob(points[i : i + 1]) for i in range(4)])
    if at_once:
        found = target.log_prob(points)
    shape, rate = points.exp().unbind(-1)
    fn = dist.NegativeBinomial(shape[:, None] * torch.arange(1.0, 5.0), 1 / (1 + rate)[:, None])
    exact = fn.log_prob(y.unsqueeze(1)).sum((0, -1)) - 0.5 * points.square().sum(-1)
    torch.testing.assert_close(found - found[0], exact - exact[0], atol=2e-3, rtol=0)
    # The rate scales the latents, so that nodes which move with the modes make no error of it.
    rate = at[1].exp().requires_grad_()
    fn = dist.NegativeBinomial(at[0].exp() * torch.arange(1.0, 5.0), 1 / (1 + rate))
    (slope,) = torch.autograd.grad(fn.log_prob(y).sum() - 0.5 * rate.log() ** 2, rate)
    score = target.score(at.unsqueeze(0))[1][0, 1]
    torch.testing.assert_close(score, rate.detach() * slope, atol=1e-2, rtol=0)
