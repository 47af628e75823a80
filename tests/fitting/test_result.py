# SPDX-License-Identifier: Apache-2.0
"""What a result can do: corrected draws, a posterior for Predictive, diagnosis, comparison."""

from __future__ import annotations

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, Predictive
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import compare, compare_models, diagnose, evidence_bound, fit, refine
from pyro_implicit.density.model import SubsampledError
from pyro_implicit.diagnostics import examination
from pyro_implicit.fitting import Fit, log_evidence
from pyro_implicit.generators import AutoregressiveGenerator
from pyro_implicit.guides import AutoImplicit, AutoSemiImplicit, Frame, StoredDraws
from pyro_implicit.ops import LogWeights

QUIET = {"seed": 0, "progress": False}


def skewed():
    """A unit Gaussian, tilted."""
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("tilt", torch.sigmoid(2 * x).log())


def moments_of_skewed():
    grid = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    density = torch.exp(-0.5 * grid.square()) * torch.sigmoid(2 * grid)
    density = density / density.sum()
    mean = (density * grid).sum()
    return mean.item(), (density * (grid - mean).square()).sum().sqrt().item()


def gaussian_fit(loc=0.3, scale=1.1):
    """A result of which the guide is plainly off."""
    frame = Frame(torch.tensor([loc]), scale_tril=torch.tensor([[scale]]))
    guide = AutoImplicit(skewed, AutoregressiveGenerator, frame=frame)
    guide()
    return Fit(guide=guide, source=(skewed, (), {}))


def test_corrected_draws_are_the_posteriors():
    result = gaussian_fit()
    mean, sd = moments_of_skewed()
    raw = result.sample(40_000)["x"]
    assert abs(raw.mean().item() - mean) > 0.15
    draws = result.sample(40_000, corrected=True)["x"]
    assert draws.mean().item() == pytest.approx(mean, abs=0.02)
    assert draws.std().item() == pytest.approx(sd, abs=0.02)
    # Fit does it by itself where it found the weights reliable, and does not if told so.
    result.correction = 0.9
    assert result.sample(40_000)["x"].mean().item() == pytest.approx(mean, abs=0.02)
    # They are expensive, so that the guide of predictions keeps them.
    assert result.posterior.samples["x"] is result.posterior.samples["x"]
    plain = result.sample(40_000, corrected=False)["x"]
    assert plain.mean().item() == pytest.approx(raw.mean().item(), abs=0.03)


def test_resampled_draws_are_worth_what_is_said():
    """The variance of their mean, of a normal from one that is twice as wide."""
    scale = 2.0
    efficiency = math.sqrt(2 - scale**-2) / scale
    result, number = Fit(guide=None, correction=efficiency), 200
    x = scale * torch.randn(2000, math.ceil(2 * number / efficiency), dtype=torch.float64)
    log_weights = 0.5 * x.square() * (scale**-2 - 1)
    means = [
        row[LogWeights(w).resample(number)].mean() for row, w in zip(x, log_weights, strict=True)
    ]
    variance = number * torch.stack(means).var().item()
    assert 0.9 < variance < 1.1 / result.resampling_efficiency < 1.3


def light_tailed():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("tilt", -0.1 * (x - 0.5) ** 4)


@pytest.fixture(scope="module")
def corrected():
    return fit(light_tailed, "auto", **QUIET)


def test_fit_corrects_by_itself(corrected):
    """Of lighter tails than those of its Gaussian, which is not the posterior."""
    result = corrected
    assert 0.5 < result.correction < 0.999 and result.refined is None and result.losses == []
    grid = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    density = torch.exp(-0.5 * grid.square() - 0.1 * (grid - 0.5) ** 4)
    density = density / density.sum()
    mean = (density * grid).sum().item()
    sd = (density * (grid - mean).square()).sum().sqrt().item()
    draws = result.sample(20_000)["x"]
    assert draws.mean().item() == pytest.approx(mean, abs=0.025)
    assert draws.std().item() == pytest.approx(sd, abs=0.025)
    found = result.diagnose(num_samples=200, modes=None)
    assert found.weighed == result.stages[-1].outcome and "effective" in found.weighed


def test_the_first_draws_repeat_by_seed_like_all_others():
    """The first makes the log-density, which runs the model."""
    result, draws = gaussian_fit(), []
    result.correction = 0.9
    for _ in range(3):
        pyro.set_rng_seed(1)
        draws.append(result.sample(5)["x"])
    assert draws[0].equal(draws[1]) and draws[1].equal(draws[2])


@pytest.mark.parametrize("kind", [AutoNormal, AutoSemiImplicit, AutoImplicit])
def test_no_correction_without_an_exact_density(kind):
    guide = kind(skewed)
    guide()
    with pytest.raises(ValueError, match=f"exact density.*but got {kind.__name__}. Cure"):
        Fit(guide=guide, source=(skewed, (), {})).sample(3, corrected=True)
    with pytest.raises(ValueError, match="num_samples must be at least 1, but got -3"):
        Fit(guide=guide, source=(skewed, (), {})).sample(-3)


Y = torch.tensor([1.0, 3.0, -0.5, 2.0])


def data(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x, 2.0), obs=y)


@pytest.fixture(scope="module")
def refined():
    """Chains from a guide that is hardly trained."""
    return fit(data, AutoNormal(data), Y, num_steps=5, refine=True, **QUIET)


def test_refined_draws_speak_for_the_result(refined):
    result, guide = refined, refined.guide
    assert result.refined.stopped == "converged"
    assert diagnose(data, guide, Y).verdict == "do not trust"
    found = result.diagnose()
    assert found.verdict == "trust" and found.settled and found.bound is None
    assert "none needed for draws of chains" in str(found)
    assert result.compare({"x": torch.randn(1000) * 0.5**0.5 + Y.mean() / 2}).floor_ratio < 3
    draws = Predictive(data, guide=result.posterior, num_samples=2000)(Y)["x"]
    assert draws.std().item() == pytest.approx(0.5**0.5, rel=0.1)
    total = result.refined.num_chains * result.refined.samples["x"].shape[1]
    assert len(result.sample(total)["x"].unique()) == len(
        result.refined.get_samples()["x"].unique()
    )


def test_diagnose_reuses_modes_and_converged_chains(monkeypatch):
    result = fit(data, "auto", Y, refine=True, **QUIET)
    torch.testing.assert_close(result.modes, Y.mean().reshape(1, 1) / 2)
    searched = []
    monkeypatch.setattr(examination, "find_modes", lambda *_, **__: searched.append(1) or 1 / 0)
    found = result.diagnose()
    assert found.drift is None and found.coverage is not None and not searched
    assert result.diagnose(num_transitions=4).drift is not None
    assert result.diagnose(modes="search").coverage is None and searched


def test_draws_that_are_wrong_are_not_trusted():
    pyro.set_rng_seed(0)
    right = torch.randn(4000) * 0.5**0.5 + Y.mean() / 2
    whoever_made_them = diagnose(data, {"x": right}, Y)
    assert whoever_made_them.verdict == "check"
    assert "no chains that settled" in whoever_made_them.findings[0].reason
    assert whoever_made_them.cures == ("refine, or result.refine_more of chains",)
    assert diagnose(data, {"x": 0.7 * right}, Y).verdict == "do not trust"


def two_modes():
    x = pyro.sample("x", dist.Normal(0.5, 10.0))
    parts = torch.stack([dist.Normal(loc, 0.3).log_prob(x) for loc in (-4.0, 6.0)])  # no images
    pyro.factor("modes", parts.logsumexp(0))


def test_weights_of_modes_are_the_guides():
    start = {"x": torch.cat([torch.full((50,), -4.0), torch.full((50,), 6.0)])}
    refined = refine(two_modes, start, seed=0, progress=False, max_gradients=400)
    settled = refine(two_modes, {"x": torch.full((50,), 6.0)}, seed=0, progress=False)
    assert diagnose(two_modes, settled).verdict == "do not trust"  # a mode is lost
    if refined.stopped in ("converged", "steady"):
        found = diagnose(two_modes, refined)
        assert any("weights that the guide gave" in one.reason for one in found.findings)


def test_modes_of_which_the_weights_are_known_are_trusted():
    """By importance weights, to which the remark on chains does not apply."""
    result = fit(two_modes, "auto", **QUIET)
    assert result.correction is not None and result.num_modes == 2
    assert result.diagnose().verdict == "trust"
    unweighed = StoredDraws(result.posterior.samples, settled=True)
    assert diagnose(two_modes, unweighed, progress=False).verdict == "check"


def test_subsampled_data_are_refused_by_name():
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y), subsample_size=2) as rows:
            pyro.sample("y", dist.Normal(x, 1.0), obs=y[rows])

    result = fit(model, AutoNormal(model), torch.zeros(6), num_steps=2, **QUIET)
    with pytest.raises(SubsampledError, match="plate 'rows'"):
        result.diagnose()
    assert math.isfinite(result.sample(3)["x"].sum())


@pytest.mark.parametrize("kind", ["corrected", "refined"])
def test_saved_and_loaded(kind, request, tmp_path):
    model, args = (light_tailed, ()) if kind == "corrected" else (data, (Y,))
    result = request.getfixturevalue(kind)
    result.save(tmp_path / "result.pt")
    pyro.clear_param_store()
    loaded = Fit.load(tmp_path / "result.pt", model, *args)
    assert str(loaded) == str(result) and loaded.correction == result.correction
    pyro.set_rng_seed(3)
    expected = result.sample(50)["x"]
    pyro.set_rng_seed(3)
    assert torch.equal(loaded.sample(50)["x"], expected)
    assert loaded.diagnose(num_samples=500).verdict in ("trust", "check", "do not trust")


def test_changed_data_are_noticed(tmp_path):
    """Their weights would leave a few draws between the old posterior and the new one."""
    x = torch.linspace(-1, 1, 12)
    y = 1.5 * x + 0.1

    def line(y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(slope * x, 0.5).to_event(1), obs=y)

    buffer = y.clone()
    result = fit(line, "auto", buffer, **QUIET)
    expected = result.sample(100, seed=0)["slope"]
    result.save(tmp_path / "result.pt")
    buffer.add_(0.1 * x)  # moves the posterior by .4 sd
    changed = r"at a draw was -\d.* in fit, and is -\d.* Cure: restore them, or fit again"
    methods = [partial(result.sample, 100), result.diagnose, result.check_posterior_predictive]
    methods += [result.sensitivity, partial(log_evidence, result)]
    methods += [
        partial(result.update, line, y),
        partial(compare_models, {"a": result, "b": result}),
    ]
    for method in methods:
        with pytest.raises(ValueError, match=changed):
            method()
    buffer.copy_(y)
    assert torch.equal(result.sample(100, seed=0)["slope"], expected)
    loaded = Fit.load(tmp_path / "result.pt", line, -y)
    with pytest.raises(ValueError, match=changed):
        Predictive(line, guide=loaded.posterior, num_samples=10)(y)


def test_changed_data_are_noticed_by_chains_and_exports_but_not_by_the_prior():
    y = torch.tensor([0.0, 1.0, 0.5])

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    options = {"num_chains": 40, "max_gradients": 40, "num_workers": 1}
    refined = refine(model, {"x": torch.zeros(40)}, **options, **QUIET)
    result = Fit(refined=refined, source=(model, (), {}))
    points = torch.zeros(1, 1)
    result.known = points, result.target.log_prob(points)
    y.add_(3.0)
    changed = "in fit, and is .* Cure: restore them, or fit again; give result.update"
    for method in (
        partial(result.refine_more, max_gradients=10, progress=False),
        partial(result.to_datatree, log_likelihood=True),
        partial(result.to_datatree, posterior_predictive=True),
        partial(result.to_datatree, prior=10),
    ):
        with pytest.raises(ValueError, match=changed):
            method()
    assert "posterior" in result.to_datatree()
    check = result.check_prior_predictive(num_samples=50)
    assert check.sites["y"].replicated.shape == (50, 3)


def test_a_guide_that_cannot_be_pickled_is_named(tmp_path):
    local = lambda: pyro.sample("x", dist.Normal(0.0, 1.0))  # noqa: E731
    for part in (local, (one for one in ())):
        with pytest.raises(ValueError, match="cannot be pickled .*Cure: the guide's functions"):
            Fit(guide=part).save(tmp_path / "fit.pt")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("refined", [False, True])
def test_a_result_stands_for_its_guide_and_its_posterior(refined):
    result = fit(skewed, AutoNormal(skewed), num_steps=50, progress=False, seed=0)
    if refined:
        result.refined = refine(skewed, result, max_gradients=100, **QUIET)
    told = [diagnose(skewed, one, modes=None, progress=False) for one in (result, result.posterior)]
    assert told[0].broken == "" and (told[0].bound is None) == (told[1].bound is None) == refined
    bounds = []
    for one in (result, result.guide):
        pyro.set_rng_seed(1)
        bounds.append(evidence_bound(skewed, one, num_samples=50).value)
    assert bounds[0] == bounds[1]
    reference = {"x": result.sample(500)["x"]}
    assert compare(skewed, result, reference).floor_ratio < 3


def test_chains_of_pyro_are_diagnosed_and_what_is_no_guide_is_named():
    # As good as 200 independent draws: of 300 draws the mean was once too far off to be trusted.
    mcmc = MCMC(NUTS(skewed), num_samples=900, warmup_steps=100, disable_progbar=True)
    with pytest.raises(ValueError, match="MCMC has no draws yet"):
        diagnose(skewed, mcmc)
    mcmc.run()
    told = diagnose(skewed, mcmc, modes=None, progress=False)
    assert told.broken == "" and told.verdict != "do not trust"
    for function in (diagnose, evidence_bound, refine):
        with pytest.raises(TypeError, match="needs a guide, but got Tensor. Cure: .*result of fit"):
            function(skewed, torch.zeros(3))
    with pytest.raises(TypeError, match="compare needs a guide, but got Tensor. Cure"):
        compare(skewed, torch.zeros(3), mcmc)


def learning(y):
    scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(loc, scale), obs=y)


def test_another_fit_does_not_change_a_result():
    pyro.clear_param_store()
    y = torch.randn(30, generator=torch.Generator().manual_seed(0))
    first = fit(learning, "auto", y, num_steps=100, lr=0.05, **QUIET)
    value = pyro.param("scale").item()
    assert f"learnt parameters: scale = {value:.4g}" in str(first)
    pyro.set_rng_seed(1)
    quick = {"num_samples": 460, "num_transitions": 2}
    expected = str(first.diagnose(**quick))
    fit(learning, "auto", 4 * y, num_steps=100, lr=0.05, **QUIET)
    other = pyro.param("scale").item()
    assert other > 2 * value and first.parameters["scale"].constrained.item() == value
    pyro.set_rng_seed(1)
    assert str(first.diagnose(**quick)) == expected and pyro.param("scale").item() == other
    # Data count as unchanged: the posterior compares log-densities by the parameters of its fit.
    draws = Predictive(learning, guide=first.posterior, num_samples=200)(y)["loc"]
    exact = y.sum().item() / (30 + value**2)
    assert draws.mean().item() == pytest.approx(exact, abs=0.35 * value / 30**0.5)
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    assert str(first.diagnose(**quick)) == expected


def test_an_error_of_the_model_does_not_pass_for_a_lack_of_data():
    """The posterior needs a run of the model for its plates, if the data are there."""

    def model(y):
        raise NameError("a mistake of the user")

    def fitted(*args):
        return Fit(draws=StoredDraws({"x": torch.zeros(9)}), source=(model, args, {}))

    with pytest.raises(NameError, match="a mistake of the user"):
        _ = fitted(torch.zeros(3)).posterior
    assert fitted().posterior.samples["x"].shape == (9,)
