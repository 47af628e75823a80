# SPDX-License-Identifier: Apache-2.0
"""Draws for ArviZ, of whichever version is installed, and what ArviZ makes of them."""

from __future__ import annotations

import math
import sys
from dataclasses import fields

import arviz
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit import fit
from pyro_implicit.density import SubsampledError
from pyro_implicit.export import as_datatree, joined
from pyro_implicit.fitting import Fit
from pyro_implicit.guides.sampler import StoredDraws
from pyro_implicit.mcmc import Refined
from pyro_implicit.mcmc.draws import DrawStore

Y = torch.tensor([0.3, -1.2, 2.9, 0.8, 1.4, 0.1], dtype=torch.float64)
SD = 0.9
IS_OLD = int(arviz.__version__.split(".")[0]) < 1


def normal(y, scale=SD):
    """A mean with a conjugate prior, and two latents in a plate that the data do not touch."""
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 2.0))
    with pyro.plate("two", 2):
        pyro.sample("free", dist.Normal(y.new_zeros(()), 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, scale), obs=y)


def posterior(y):
    variance = 1 / (1 / 4 + len(y) / SD**2)
    return variance * y.sum() / SD**2, variance


def stored(num_draws, y=Y, model=normal, **kwargs):
    """A result whose draws are the posterior's."""
    mean, variance = posterior(y)
    draws = mean + variance**0.5 * torch.randn(num_draws, dtype=y.dtype)
    free = torch.randn(num_draws, 2, dtype=y.dtype)
    guide = StoredDraws({"mean": draws, "free": free})
    return Fit(guide=guide, source=(model, (y,), kwargs))


def sizes(tree):
    return {
        group: {name: value.shape for name, value in tree[group].data_vars.items()}
        for group in tree.children
    }


def test_deterministic_sites_in_plates_are_computed():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 2.0))
        with pyro.plate("rows", len(y)):
            line = pyro.deterministic("line", mean + torch.arange(6.0, dtype=y.dtype))
            pyro.sample("y", dist.Normal(line, 1e-9), obs=y)

    tree = stored(50, model=model).to_datatree(20, posterior_predictive=True, prior=7)
    for group, latents in (("posterior_predictive", "posterior"), ("prior_predictive", "prior")):
        gaps = torch.tensor(tree[group]["y"].values - tree[latents]["mean"].values[..., None])
        torch.testing.assert_close(gaps, torch.arange(6.0).expand_as(gaps), check_dtype=False)


def test_groups_of_a_guide():
    found = stored(50).to_datatree(20, log_likelihood=True, posterior_predictive=True, prior=7)
    assert sizes(found) == {
        "posterior": {"mean": (1, 20), "free": (1, 20, 2)},
        "observed_data": {"y": (6,)},
        "log_likelihood": {"y": (1, 20, 6)},
        "posterior_predictive": {"y": (1, 20, 6)},
        "prior": {"mean": (1, 7), "free": (1, 7, 2)},
        "prior_predictive": {"y": (1, 7, 6)},
    }
    mean = torch.as_tensor(found["posterior"]["mean"].values).unsqueeze(-1)
    expected = dist.Normal(mean, SD).log_prob(Y)
    assert torch.allclose(torch.as_tensor(found["log_likelihood"]["y"].values), expected)
    assert torch.equal(torch.as_tensor(found["observed_data"]["y"].values), Y)
    assert sizes(stored(50).to_datatree(dims={"free": ["pair"]})) == {
        "posterior": {"mean": (1, 2000), "free": (1, 2000, 2)}
    }
    named = stored(50).to_datatree(3, dims={"free": ["pair"]}, coords={"pair": ["a", "b"]})
    assert named["posterior"]["free"].sel(pair="b").shape == (1, 3)


def test_names_with_a_slash():
    """Those of ``pyro.contrib.autoname.scope``; in a DataTree a slash separates groups."""
    draws = {"school/mu": torch.randn(1, 20, 2)}
    tree = as_datatree({"posterior": draws}, dims={"school/mu": ["pair"]})
    assert tree["posterior"]["school.mu"].dims[-1] == "pair"


def test_predictions_are_drawn_anew():
    found = stored(250).to_datatree(250, posterior_predictive=True, prior=250)
    mean, variance = posterior(Y)
    replicas = found["posterior_predictive"]["y"].values
    assert replicas.mean() == pytest.approx(mean.item(), abs=0.15)
    within = replicas - found["posterior"]["mean"].values[..., None]
    assert within.std() == pytest.approx(SD, rel=0.08)
    assert found["prior"]["mean"].values.std() == pytest.approx(2.0, rel=0.2)
    ahead = found["prior_predictive"]["y"].values - found["prior"]["mean"].values[..., None]
    assert ahead.std() == pytest.approx(SD, rel=0.08)


def leave_one_out():
    """Exactly: each observation by the posterior of the others."""
    total = 0.0
    for row in range(len(Y)):
        mean, variance = posterior(torch.cat([Y[:row], Y[row + 1 :]]))
        total += dist.Normal(mean, (variance + SD**2) ** 0.5).log_prob(Y[row]).item()
    return total


def test_leave_one_out_of_arviz_is_that_of_brute_force():
    result = stored(4000)
    data = result.to_inferencedata if IS_OLD else result.to_datatree
    found = arviz.loo(data(4000, log_likelihood=True))
    elpd = found.elpd_loo if IS_OLD else found.elpd
    assert float(elpd) == pytest.approx(leave_one_out(), abs=0.05)


@pytest.fixture
def refined():
    """Draws of 32 chains, more than there are draws of each, as if chains had made them."""
    mean, variance = posterior(Y)
    store = DrawStore()
    for means, free in zip(
        torch.randn(5, 32, 1, dtype=Y.dtype), torch.randn(5, 32, 2, dtype=Y.dtype), strict=True
    ):
        store.append(torch.cat([mean + variance**0.5 * means, free], -1))
    others = dict.fromkeys((field.name for field in fields(Refined)), 0)
    found: dict = {"store": store, "num_chains": 32, "kernel": "hmc", "drift": None}
    found["constrain"] = lambda rows: {"mean": rows[..., 0], "free": rows[..., 1:]}
    return Refined(**{**others, **found})


def test_refined_draws_keep_their_chains(refined):
    shape = (32, 5)
    found = refined.to_datatree(normal, Y, log_likelihood=True, num_chains=None)
    assert found["posterior"]["mean"].shape == shape
    assert found["log_likelihood"]["y"].shape == (*shape, 6)
    mean = torch.as_tensor(found["posterior"]["mean"].values).unsqueeze(-1)
    expected = dist.Normal(mean, SD).log_prob(Y)
    assert torch.allclose(torch.as_tensor(found["log_likelihood"]["y"].values), expected)
    whole = Fit(guide=None, refined=refined, source=(normal, (Y,), {}))
    assert whole.to_datatree(num_chains=None)["posterior"]["mean"].shape == shape
    assert whole.to_datatree()["posterior"]["mean"].shape == (4, 40)
    assert whole.to_datatree(9)["posterior"]["mean"].shape == (1, 9)


def autoregression(num_chains, length, memory=0.95):
    x = [torch.randn(num_chains, dtype=torch.float64)]
    for _ in range(length - 1):
        x.append(memory * x[-1] + (1 - memory**2) ** 0.5 * torch.randn_like(x[-1]))
    return torch.stack(x, 1)


@pytest.mark.skipif(not IS_OLD, reason="ess and rhat of 1.x take no arrays by default")
def test_joined_chains_have_the_right_effective_sample_size():
    """256 chains of 8 draws with autocorrelation 0.95^k: known, and far off with chains apart."""
    memory, length = 0.95, 8
    k = torch.arange(1, length)
    expected = 256 * length / (1 + 2 * ((1 - k / length) * memory**k).sum().item())
    found = []
    for _ in range(8):
        draws = {"x": autoregression(256, length, memory)}
        few = joined(draws, 4)["x"]
        assert arviz.rhat(few.numpy()) < 1.05 < arviz.rhat(draws["x"].numpy())
        found.append(arviz.ess(few.numpy()))
        assert arviz.ess(draws["x"].numpy()) > 5 * expected
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.15)


def test_joined_chains_do_not_visit_one_mode_after_the_other():
    """Annealed particles are sorted by mode."""
    modes = 100.0 * (torch.arange(256) >= 128)
    few = joined({"x": modes.unsqueeze(-1) + torch.randn(256, 8)}, 4)["x"]
    assert arviz.rhat(few.numpy()) < 1.1 and arviz.ess(few.numpy()) > 128


def test_joined_chains_keep_their_draws(refined):
    draws = {"x": torch.arange(15.0).view(5, 3), "y": torch.arange(30.0).view(5, 3, 2)}
    few = joined(draws, 2)
    assert few["x"].shape == (2, 7)
    whole = few["x"].flatten()  # the last draw is left out
    assert whole.sort().values.unique().shape == (14,)
    assert all((whole[i : i + 3].diff() == 1).all() for i in range(0, 12, 3))
    assert not whole.equal(whole.sort().values)
    assert torch.equal(few["y"][..., 0], 2 * few["x"])
    for number in (None, 5, 9):
        assert torch.equal(joined(draws, number)["x"], draws["x"])
    with pytest.raises(ValueError, match="num_chains must be at least 1, or None for all"):
        refined.to_datatree(num_chains=0)
    found = refined.to_datatree(normal, Y, log_likelihood=True)
    mean = torch.as_tensor(found["posterior"]["mean"].values)
    assert mean.shape == (4, 40) and set(mean.flatten().tolist()) == set(
        refined.samples["mean"].flatten().tolist()
    )
    expected = dist.Normal(mean.unsqueeze(-1), SD).log_prob(Y)
    assert torch.allclose(torch.as_tensor(found["log_likelihood"]["y"].values), expected)


@pytest.mark.parametrize("option", ["log_likelihood", "posterior_predictive", "prior"])
def test_without_the_model(refined, option):
    assert sizes(refined.to_datatree()).keys() == {"posterior"}
    with pytest.raises(ValueError, match=f"{option} needs the model and its data. Cure"):
        refined.to_datatree(**{option: 3})


def test_inference_data_of_old_versions_only(refined):
    if IS_OLD:
        found = refined.to_inferencedata(
            normal, Y, log_likelihood=True, model_kwargs={"scale": 2.0}
        )
        mean = torch.as_tensor(found.posterior["mean"].values).unsqueeze(-1)
        expected = dist.Normal(mean, 2.0).log_prob(Y)
        assert torch.allclose(torch.as_tensor(found.log_likelihood["y"].values), expected)
    else:
        with pytest.raises(ImportError, match="has no InferenceData. Cure: to_datatree"):
            refined.to_inferencedata()


def test_without_arviz(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"Cure: pip install 'pyro-implicit\[arviz\]'"):
        stored(3).to_datatree(3)


def masked(y):
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, SD).mask(y < 1), obs=y)
        pyro.sample("pair", dist.Normal(mean, SD).expand([6, 3]).to_event(1), obs=y.new_zeros(6, 3))
    pyro.deterministic("twice", 2 * mean)
    pyro.factor("tilt", -mean)


def test_only_data_are_data():
    guide = StoredDraws({"mean": torch.linspace(-1, 1, 4, dtype=torch.float64)})
    result = Fit(guide=guide, source=(masked, (Y,), {}))
    found = result.to_datatree(4, log_likelihood=True, posterior_predictive=True)
    assert sizes(found)["observed_data"] == {"y": (6,), "pair": (6, 3)}
    assert sizes(found)["log_likelihood"] == {"y": (1, 4, 6), "pair": (1, 4, 6)}
    assert sizes(found)["posterior_predictive"] == {"y": (1, 4, 6), "pair": (1, 4, 6, 3)}
    terms = found["log_likelihood"]["y"].values
    assert (terms[..., 2] == 0).all() and (terms[..., 0] != 0).all()  # the third is masked


def flat(y):
    mean = pyro.sample("mean", dist.ImproperUniform(dist.constraints.real, (), ()))
    pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_a_flat_prior_has_predictions_but_no_draws():
    guide = StoredDraws({"mean": torch.zeros(3)})
    result = Fit(guide=guide, source=(flat, (torch.tensor(1.0),), {}))
    found = result.to_datatree(3, posterior_predictive=True, log_likelihood=True)
    assert found["posterior_predictive"]["y"].shape == (1, 3)
    with pytest.raises(ValueError, match="prior of site 'mean' is flat .*Cure: leave out prior="):
        result.to_datatree(3, prior=2)


def mixture(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(mean + z, 1.0), obs=y)


def twice(y):
    """Two observed sites with one class."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(mean + z, 1.0), obs=y)
        pyro.sample("again", dist.Normal(mean + z, 1.0), obs=y)


def test_likelihoods_of_rows_with_classes():
    result = Fit(guide=StoredDraws({"mean": torch.zeros(3)}), source=(mixture, (Y.float(),), {}))
    found = result.to_datatree(3, log_likelihood=True)["log_likelihood"]["y"].values
    parts = [dist.Normal(mean, 1.0).log_prob(Y.float()) for mean in (0.0, 1.0)]
    expected = torch.logaddexp(*parts) - math.log(2.0)
    torch.testing.assert_close(torch.tensor(found)[0], expected.expand(3, -1))


def nothing(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.factor("y", dist.Normal(mean, 1.0).log_prob(y).sum())


def subsampled(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y), subsample_size=2) as rows:
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (twice, "site 'y' is not known, because they share discrete latents"),
        (nothing, "needs observations, but the model observes nothing"),
        (subsampled, "needs all data, but plate 'rows'"),
    ],
)
def test_no_likelihood_of_single_observations(model, message):
    result = Fit(guide=StoredDraws({"mean": torch.zeros(3)}), source=(model, (Y.float(),), {}))
    with pytest.raises(ValueError, match=message) as found:
        result.to_datatree(3, log_likelihood=True)
    assert isinstance(found.value, SubsampledError) == (model is subsampled)
    assert sizes(result.to_datatree(3)) == {"posterior": {"mean": (1, 3)}}
    if model is twice:
        replicas = result.to_datatree(3, posterior_predictive=True)["posterior_predictive"]["y"]
        assert replicas.shape == (1, 3, 6) and math.isfinite(float(replicas.sum()))


def test_summary_of_constant_entries_is_quiet():
    """Warnings are errors here, and ArviZ divides by their variance of 0."""

    def model():
        pyro.sample("factor", dist.LKJCholesky(2, 1.0))

    found = fit(model, "auto", seed=0, progress=False).summary()
    assert found.loc["factor[0, 1]", "sd"] == 0
