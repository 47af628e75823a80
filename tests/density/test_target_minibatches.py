# SPDX-License-Identifier: Apache-2.0
"""One minibatch's log-density: unbiased, of the same rows until the next, and what is refused."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.density import SubsampledError, Target

Y = torch.tensor([[0.1, 0.9], [2.0, -1.0], [3.0, 0.5]], dtype=torch.float64)


def model(y):
    loc = pyro.sample("loc", dist.Normal(y.new_zeros(()), 2.0))
    scale = pyro.sample("scale", dist.LogNormal(y.new_zeros(()), 1.0))
    with pyro.plate("rows", 6, subsample_size=len(y)):
        pyro.sample("y", dist.Normal(loc, scale), obs=y)


def test_mean_over_minibatches_is_the_whole():
    latent = torch.randn(5, 2, dtype=torch.float64)
    density = Target.of_minibatches(model, batch=(Y[0],))
    total, gradient = 0.0, 0.0
    for part in Y:
        density = density.on((part,))
        log_density, score = density.score(latent)
        total, gradient = total + log_density / 3, gradient + score / 3
    expected = Target(model, Y.flatten()).score(latent)
    assert torch.allclose(total, expected[0]) and torch.allclose(gradient, expected[1])
    assert density.is_vectorized and density.scaled and density.subsampled == ("rows", 2, 6)


@pytest.mark.parametrize("infer", [{}, {"enumerate": "parallel"}])
def test_classes_of_rows_are_summed_out(infer):
    def mixture(y):
        loc = pyro.sample("loc", dist.Normal(y.new_zeros(()), 2.0))
        with pyro.plate("rows", 6, subsample_size=len(y)):
            group = pyro.sample("group", dist.Bernoulli(y.new_tensor(0.3)), infer=infer)
            pyro.sample("y", dist.Normal(loc + group, 1.0), obs=y)

    loc = torch.randn(5, 1, dtype=torch.float64)
    found = Target.of_minibatches(mixture, batch=(Y[0],)).log_prob(loc)
    rows = [dist.Normal(loc + group, 1.0).log_prob(Y[0]).exp() for group in (0.0, 1.0)]
    likelihood = (0.7 * rows[0] + 0.3 * rows[1]).log().sum(-1)
    expected = 3 * likelihood + dist.Normal(0.0, 2.0).log_prob(loc[:, 0])
    torch.testing.assert_close(found, expected)


def test_the_last_minibatch_may_be_smaller():
    density = Target.of_minibatches(model, batch=(Y[0],))
    latent = torch.randn(2, 2, dtype=torch.float64)
    density.score(latent)
    density = density.on((Y[0, :1],))
    expected = Target(model, Y[0, :1].expand(6)).log_prob(latent)
    assert torch.allclose(density.log_prob(latent), expected)


def drawing(y):
    loc = pyro.sample("loc", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(y), subsample_size=2) as rows:
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y[rows])


def test_rows_that_the_model_draws_are_kept_until_the_next_minibatch():
    density = Target.of_minibatches(drawing, torch.arange(50.0), batch=())
    latent, found = torch.zeros(3, 1), []
    for seed in (None, None, 1, 1):
        density = density.on((), seed=seed)
        before = torch.get_rng_state()
        first, again = density.log_prob(latent), density.log_prob(latent)
        assert before.equal(torch.get_rng_state())
        assert first.equal(again) and first[0].allclose(first[2])
        found.append(first[0].item())
    assert found[0] != found[1] and found[2] == found[3]


def test_rows_may_be_drawn_by_the_model_without_a_plate():
    def by_hand(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 2.0))
        rows = torch.randint(len(y), (2,))
        with pyro.poutine.scale(scale=len(y) / 2):
            pyro.sample("y", dist.Normal(loc, 1.0).expand([2]).to_event(1), obs=y[rows])

    density = Target.of_minibatches(by_hand, torch.arange(50.0), batch=())
    with pytest.warns(UserWarning, match="one particle at a time.*random beyond its latents.*Cure"):
        assert density.log_prob(torch.zeros(3, 1)).isfinite().all()


def test_discrete_latents_are_summed_out_of_every_minibatch():
    def mixture(y):
        loc = pyro.sample("loc", dist.Normal(y.new_zeros(()), 2.0))
        with pyro.plate("rows", 6, subsample_size=len(y)):
            sign = 2 * pyro.sample("is_right", dist.Bernoulli(y.new_tensor(0.3))) - 1
            pyro.sample("y", dist.Normal(sign * loc, 1.0), obs=y)

    latent = torch.randn(5, 1, dtype=torch.float64)
    density = Target.of_minibatches(mixture, batch=(Y[0],), allow_local=True)
    for part in Y[1:]:
        density = density.on((part,))
        expected = Target.of_minibatches(mixture, batch=(part,), allow_local=True)
        assert torch.allclose(density.log_prob(latent), expected.log_prob(latent))


def test_refuses_latents_of_rows():
    def local(y):
        with pyro.plate("rows", 6, subsample_size=len(y)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    with pytest.raises(SubsampledError, match="latent 'z' lies in plate 'rows'.*2 of 6.*Cure"):
        Target.of_minibatches(local, batch=(Y[0],))


def test_knows_whether_the_model_scales():
    def plain(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    def by_hand(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 2.0))
        pyro.factor("y", 3 * dist.Normal(loc, 1.0).log_prob(y).sum())

    def handled(y):
        with pyro.poutine.scale(scale=3.0):
            plain(y)

    y = Y[0].float()
    assert not Target.of_minibatches(plain, batch=(y,)).scaled
    assert Target.of_minibatches(by_hand, batch=(y,)).scaled
    assert Target.of_minibatches(handled, batch=(y,)).scaled


def test_on_leaves_the_first_target_as_it_was():
    latent = torch.randn(5, 2, dtype=torch.float64)
    first = Target.of_minibatches(model, batch=(Y[0],))
    before = first.log_prob(latent)
    other = first.on((Y[1],))
    expected = Target(model, Y[1].repeat(3)).log_prob(latent)
    assert torch.allclose(other.log_prob(latent), expected)
    assert first.log_prob(latent).equal(before) and not before.allclose(expected)
