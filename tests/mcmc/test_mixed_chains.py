# SPDX-License-Identifier: Apache-2.0
"""Chains of continuous and discrete latent variables against closed forms."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit.density import Target
from pyro_implicit.mcmc import refine
from pyro_implicit.mcmc.mixed_chains import MixedChains, mixed_frame, possible_points
from pyro_implicit.mcmc.policy import DEFAULT
from pyro_implicit.mcmc.spaces.space import MixedSpace

Y = torch.tensor([6.0, 9.0, 4.0])
P = 0.3


def thinned(y=Y):
    """Poisson counts of which a share P is seen: those unseen are Poisson given the rate."""
    rate = pyro.sample("rate", dist.Gamma(2.0, 0.1))
    with pyro.plate("rows", len(y)):
        n = pyro.sample("n", dist.Poisson(rate))
        pyro.sample("y", dist.Binomial(n, P), obs=y)


def prior(model, number, **options):
    target = Target(model, sample_discrete=True, **options)
    return target.constrain(target.sample_prior(number))


@pytest.fixture(scope="module")
def refined():
    torch.manual_seed(0)
    return refine(
        thinned, prior(thinned, 64), Y, seed=0, num_chains=64, max_gradients=3000, progress=False
    )


def test_moments_of_thinned_counts(refined):
    draws = refined.get_samples()
    # The seen counts have the rate P * rate, so that the posterior of the rate is a gamma.
    gamma = dist.Gamma(2.0 + Y.sum(), 0.1 + 3 * P)
    size = refined.drift.num_effective
    error = 4.5 * gamma.stddev / math.sqrt(size)
    assert size > 500
    assert (draws["rate"].mean() - gamma.mean).abs() < error
    assert draws["rate"].std() / gamma.stddev == pytest.approx(1, abs=4.5 / math.sqrt(size))
    unseen = (1 - P) * gamma.mean
    sd = (unseen + (1 - P) ** 2 * gamma.variance).sqrt()
    assert ((draws["n"].mean(0) - Y - unseen).abs() < 4.5 * sd / math.sqrt(size)).all()
    ratio = draws["n"].std(0) / sd
    assert ((ratio - 1).abs() < 4.5 / math.sqrt(size)).all()
    assert (draws["n"] >= Y).all() and draws["n"].eq(draws["n"].round()).all()
    assert refined.stopped == "converged"


def test_the_report_and_the_classes(refined):
    assert "3 elements in 1 independent classes" in str(refined)
    assert "along a ridge" in refined.moves
    chains = refined.chains
    assert isinstance(chains, MixedChains) and not chains.is_sequential
    assert len(chains.classes) == 1 and (chains.moved > 0.5).all()
    assert (chains.frame.scale[1:] == 1).all() and (chains.frame.loc[1:] == 0).all()
    assert torch.equal(chains.points[:, 1:], chains.points[:, 1:].round())


def test_chains_resume_and_go_on(tmp_path):
    start = prior(thinned, 16)
    options = {"seed": 3, "num_chains": 16, "progress": False, "max_gradients": 400}
    one = refine(thinned, start, Y, **options)
    file = tmp_path / "chains"
    other = refine(thinned, start, Y, checkpoint=file, checkpoint_every=5, **options)
    assert torch.equal(one.samples["n"], other.samples["n"])
    again = refine(thinned, start, Y, checkpoint=file, checkpoint_every=5, **options)
    assert torch.equal(one.samples["n"], again.samples["n"])  # from the file
    more = other.refine_more(max_gradients=100, progress=False)
    assert more.num_gradients > other.num_gradients and more.samples["n"].dtype == torch.float32


def test_starts_become_possible():
    target = Target(thinned, torch.tensor([600.0, 80.0, 900.0]), sample_discrete=True)
    points = target.sample_prior(32)
    points[:, 1:] = 3.0
    assert not target.log_prob(points).isfinite().any()
    moved = possible_points(MixedSpace(target), points, DEFAULT)
    assert target.log_prob(moved).isfinite().all()
    assert torch.equal(moved[:, :1], points[:, :1])


def test_a_dependence_that_was_missed_is_noticed():
    """The elements depend on each other only where both are large."""

    def model():
        with pyro.plate("pair", 2):
            k = pyro.sample("k", dist.Poisson(3.0))
        pyro.factor("far", torch.where((k > 5).all(-1), 2.0, 0.0))

    refined = refine(
        model, prior(model, 32), seed=0, num_chains=32, max_gradients=3000, progress=False
    )
    chains = refined.chains
    if not chains.is_sequential:  # the probes met it
        assert len(chains.classes) == 2
    draws = refined.get_samples()["k"]
    tail = 1 - dist.Poisson(3.0).log_prob(torch.arange(6.0)).exp().sum()
    both = tail**2 * math.exp(2) / (1 + tail**2 * (math.exp(2) - 1))
    found = (draws > 5).all(-1).float().mean()
    size = refined.drift.num_effective
    assert (found - both).abs() < 4.5 * (both * (1 - both) / min(size, len(draws))).sqrt()


def test_frames_leave_discrete_coordinates_alone():
    draws = torch.randn(500, 4, dtype=torch.float64)
    draws[:, 2:] = (draws[:, :2] * 4 + torch.randn(500, 2)).round()
    elements = MixedSpace(Target(thinned, sample_discrete=True)).elements
    elements = elements._replace(**{n: v[:2].double() for n, v in elements._asdict().items()})
    elements = elements._replace(is_label=torch.zeros(2, dtype=torch.bool))

    def score(points):
        slope = torch.zeros_like(points)
        slope[:, :2] = -16 * (points[:, :2] - points[:, 2:] / 4)
        return slope.sum(-1), slope

    for kind in ("diagonal", "low-rank", "full"):
        frame = mixed_frame(draws, kind, score, 100, elements, DEFAULT)
        white = frame.to_white(draws)
        assert torch.equal(white[:, 2:], draws[:, 2:])
        torch.testing.assert_close(frame.to_points(white), draws)
        # Given the counts, the sd is about a quarter.
        assert white[:, 0].std().item() == pytest.approx(4, rel=0.3)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"kernel": "mclmc"}, "kernel='mclmc' needs continuous latents.*'n'.*Cure"),
        ({"frame": "conditional"}, "frame='conditional' needs continuous latents"),
    ],
)
def test_refused_options(option, message):
    with pytest.raises(ValueError, match=message):
        refine(thinned, prior(thinned, 16), Y, num_chains=16, progress=False, **option)
