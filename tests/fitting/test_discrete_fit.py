# SPDX-License-Identifier: Apache-2.0
"""``fit`` of models with discrete latent variables that cannot be summed out."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive

from pyro_implicit import diagnose, fit
from pyro_implicit.fitting import Fit

Y = torch.tensor([6.0, 9.0, 4.0])


def thinned(y):
    rate = pyro.sample("rate", dist.Gamma(2.0, 0.1))
    with pyro.plate("rows", 3):
        n = pyro.sample("n", dist.Poisson(rate))
        return pyro.sample("y", dist.Binomial(n, 0.3), obs=y)


def spins():
    """Six spins on a ring, in a field: all latent variables are discrete."""
    with pyro.plate("spins", 6):
        x = pyro.sample("x", dist.Bernoulli(0.5))
    s = 2 * x - 1
    pyro.factor("energy", 0.5 * (s * s.roll(1, -1)).sum(-1) + 0.2 * s.sum(-1))


@pytest.fixture(scope="module")
def fitted():
    return fit(thinned, "auto", Y, seed=0, progress=False)


def test_the_result(fitted):
    assert [stage.name for stage in fitted.stages] == ["discrete", "refine"]
    assert fitted.stages[0].outcome.startswith("3 elements of 'n' are sampled")
    draws = fitted.sample(2000)
    assert draws["n"].shape == (2000, 3) and draws["n"].dtype == torch.float32
    mean = 21.0 / 1.0
    assert draws["rate"].mean().item() == pytest.approx(mean, abs=0.15 * math.sqrt(mean))


def test_the_diagnosis(fitted):
    found = fitted.diagnose()
    assert found.verdict == "trust"
    assert "skipped" in str(found) and "the discrete latents 'n' have no gradient" in str(found)
    with pytest.raises(ValueError, match="cannot use quantities= .*'n'.*Cure: leave it out"):
        diagnose(thinned, fitted.guide, Y, quantities=lambda draws: draws["rate"])
    prior = diagnose(thinned, fitted.guide, Y)
    assert prior.verdict != "trust"


def test_predictions_and_files(fitted, tmp_path):
    predicted = Predictive(thinned, fitted.sample(100))(None)["y"]
    assert predicted.shape[0] == 100 and predicted.mean().item() == pytest.approx(6.3, abs=1.5)
    tree = fitted.to_datatree(50, log_likelihood=True, posterior_predictive=True, prior=10)
    assert tree["posterior"]["n"].shape == (1, 50, 3) == tree["posterior_predictive"]["y"].shape
    assert tree["log_likelihood"]["y"].shape[-1] == 3
    path = tmp_path / "fit.pt"
    fitted.save(path)
    loaded = Fit.load(path, thinned, Y)
    assert torch.equal(loaded.refined.samples["n"], fitted.refined.samples["n"])
    more = loaded.refine_more(max_gradients=50, progress=False)
    assert more.refined.num_gradients > fitted.refined.num_gradients
    assert more.diagnose().verdict in ("trust", "check")


def test_discrete_latents_alone():
    result = fit(spins, "auto", seed=0, progress=False)
    x = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 6)
    s = 2 * x - 1
    weight = (0.5 * (s * s.roll(1, -1)).sum(-1) + 0.2 * s.sum(-1)).softmax(0)
    draws = result.refined.get_samples()["x"]
    size = result.refined.drift.num_effective
    for found, expected in (
        (draws.mean(0), weight @ x),
        ((draws * draws.roll(1, -1)).mean(0), weight @ (x * x.roll(1, -1))),
    ):
        error = 4.5 * (expected * (1 - expected) / min(size, len(draws))).sqrt()
        assert ((found - expected).abs() < error).all()
    assert result.refined.settled


def test_equal_seeds_give_equal_draws(fitted):
    state = torch.get_rng_state()
    again = fit(thinned, "auto", Y, seed=0, progress=False)
    assert torch.equal(again.refined.samples["n"], fitted.refined.samples["n"])
    assert torch.equal(state, torch.get_rng_state())


def test_refusals():
    with pytest.raises(ValueError, match="refine=False leaves no way .*'n'.*Cure"):
        fit(thinned, "auto", Y, refine=False, progress=False)

    def learns():
        n = pyro.sample("n", dist.Poisson(pyro.param("rate", torch.tensor(3.0))))
        pyro.sample("y", dist.Normal(n, 1.0), obs=torch.tensor(2.0))

    with pytest.raises(ValueError, match="parameters rate .*'n'.*Cure: a prior"):
        fit(learns, "auto", progress=False)
