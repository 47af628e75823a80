# SPDX-License-Identifier: Apache-2.0
"""``fit`` on small models of every kind: which guide comes out, and how good it is."""

from __future__ import annotations

import contextlib
import io
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoNormal

from pyro_implicit.diagnostics import simulation_based_calibration
from pyro_implicit.fitting import Candidate, ChoicePolicy, Fit, FitPolicy, fit
from pyro_implicit.guides import AutoImplicit, AutoSemiImplicit
from pyro_implicit.guides.auto_mixture import AutoMixture
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.ops import LogWeights

#: For tests that do not depend on the values of bounds, which are expensive.
FEW = FitPolicy(choice=ChoicePolicy(num_weighed=100))

X = torch.tensor([[1.0, 0.2], [1.0, -0.5], [1.0, 1.0], [1.0, 2.5]], dtype=torch.float64)
Y = torch.tensor([0.3, 0.9, -0.4, -1.7], dtype=torch.float64)


def regression(x, y, noise=0.5):
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(2), 2.0).to_event(1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x @ weight, noise), obs=y)


def funnel():
    v = pyro.sample("v", dist.Normal(0.0, 1.5))
    with pyro.plate("two", 2):
        pyro.sample("x", dist.Normal(0.0, (v / 2).exp()))


def two_modes():
    """Weights 0.3 and 0.7, and evidence e^2."""
    x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
    left, right = dist.Normal(-1.5, 0.1).log_prob(x), dist.Normal(1.0, 0.2).log_prob(x)
    parts = torch.stack([left + math.log(0.3), right + math.log(0.7)])
    pyro.factor("modes", 2.0 + parts.logsumexp(0))


def two_skewed_modes():
    """As above, each with a steeper side."""
    x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
    parts = [
        dist.Normal(loc, 0.1).log_prob(x) + torch.log(2 * torch.sigmoid(20 * (x - loc)))
        for loc in (-1.5, 1.0)
    ]
    pyro.factor("modes", torch.stack(parts).logsumexp(0))


def constrained(y=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    share = pyro.sample("share", dist.Dirichlet(torch.tensor([3.0, 4.0, 5.0])))
    with pyro.plate("rows", 5):
        pyro.sample("y", dist.Normal(share[..., 0], scale), obs=y)


def quick(model, *args, num_steps=60, **kwargs):
    options = {"num_particles": 16, "progress": False, "seed": 0, "refine": False} | kwargs
    return fit(model, "auto", *args, num_steps=num_steps, **options)


def draw(guide, num_samples=50):
    pyro.set_rng_seed(7)
    return guide.sample_posterior(num_samples)


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gaussian_posterior(dtype):
    torch.set_default_dtype(dtype)
    x, y = X.to(dtype), Y.to(dtype)
    result = fit(regression, "auto", x, y=y, noise=0.4, seed=0, progress=False)
    precision = x.T @ x / 0.16 + torch.eye(2) / 4
    covariance = precision.inverse()
    mean = covariance @ x.T @ y / 0.16
    draws = result.guide.sample_posterior(20_000)["weight"]
    assert draws.dtype == dtype
    sd = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - mean).abs() / sd < 0.05).all()
    torch.testing.assert_close(draws.std(0), sd, rtol=0.05, atol=0)
    correlation = covariance[0, 1] / sd.prod()
    assert draws.T.corrcoef()[0, 1].item() == pytest.approx(correlation.item(), abs=0.03)
    # The Gaussian is exact from the start: no step is taken.
    assert isinstance(result.guide, AutoImplicit) and not isinstance(result.guide, AutoSemiImplicit)
    assert result.num_modes == 1 and result.losses == []
    evidence = dist.MultivariateNormal(torch.zeros(4), 4 * x @ x.T + 0.16 * torch.eye(4))
    assert set(result.bounds) == {"gaussian"} and result.chosen == "gaussian"
    assert [stage.name for stage in result.stages] == ["search", "gaussian", "choose", "correct"]
    assert result.correction > 0.99
    assert result.bounds["gaussian"] == pytest.approx(evidence.log_prob(y).item(), abs=0.03)


def test_a_funnel_gets_both_guides():
    result = quick(funnel, num_steps=150)
    best = max(result.bounds, key=result.bounds.get)
    assert set(result.bounds) <= {"gaussian", "injective", "semi-implicit"}
    assert result.chosen == best
    assert isinstance(result.guide, AutoSemiImplicit) == (best == "semi-implicit")
    assert result.num_modes == 1 and len(result.losses) <= 150
    assert -0.5 < result.bounds[best] < 0.1  # the log-evidence is 0
    draws = result.guide.sample_posterior(5000)
    assert draws["v"].shape == (5000,) and draws["x"].shape == (5000, 2)
    assert draws["v"].std().item() == pytest.approx(1.5, abs=0.5)


def rigged(monkeypatch, bounds):
    """Candidates of given bounds, which are not near the posterior."""

    def weigh(name, density, guide, losses=None, num_samples=50, policy=None):
        size = density.latent_dim
        state = {key: value.clone() for key, value in guide.state_dict().items()}
        log_weights = LogWeights(bounds[name] + torch.tensor([-1.0, 1.0]))
        return Candidate(name, guide, log_weights, torch.randn(50, size), losses, state)

    monkeypatch.setattr("pyro_implicit.fitting.stages.weigh", weigh)


@pytest.mark.parametrize("kept", ["gaussian", "injective", "semi-implicit"])
def test_the_highest_bound_is_kept(kept, monkeypatch):
    """Of guides that are not near enough. The loss promises what the bound keeps."""
    bounds = {"gaussian": 51.0, "injective": 52.0, "semi-implicit": 53.0, kept: 60.0}
    rigged(monkeypatch, bounds)
    result = quick(funnel, num_steps=4)
    assert result.bounds == pytest.approx(bounds) and result.chosen == kept
    assert isinstance(result.guide, AutoSemiImplicit) == (kept == "semi-implicit")
    if kept == "gaussian":  # as it was before it was trained
        assert (result.guide.loc == 0).all() and (result.guide.scale == 1).all()
        assert not result.losses
    else:
        assert (result.guide.loc != 0).any() and len(result.losses) == 4


@pytest.mark.parametrize("lost, again", [(0.4, False), (0.6, True)])
def test_a_folded_guide_is_trained_again(lost, again, monkeypatch):
    """One whose loss promises half a nat more than its bound keeps; both stay candidates."""
    bounds = {"gaussian": -52.0, "injective": -50.0, "semi-implicit": 5.0 - lost}
    rigged(monkeypatch, bounds | {"semi-implicit-again": -100.0})
    trained = []

    def train(self, name, guide, loss, *args, **kwargs):
        trained.append(name)
        return [-5.0] * 4

    monkeypatch.setattr("pyro_implicit.fitting.stages.Stages.train", train)
    result = quick(funnel)
    assert ("semi-implicit-again" in trained) == again == ("semi-implicit-again" in result.bounds)
    # The second is no better, and does not take the place of the first.
    assert result.chosen == "semi-implicit"
    assert ("the generator folds" in str(result)) == again


@pytest.mark.parametrize("seed", [0, 1])
def test_separate_modes_get_a_mixture(seed):
    result = quick(two_modes, num_steps=100, num_particles=32, seed=seed)
    assert isinstance(result.guide, AutoMixture) and result.num_modes == 2
    # Two Gaussians it is: no step is taken.
    assert set(result.bounds) == {"gaussian"} and result.losses == []
    assert result.bounds["gaussian"] == pytest.approx(2.0, abs=0.05)
    x = result.guide.sample_posterior(10_000)["x"]
    assert (x < 0).float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert x[x < 0].mean().item() == pytest.approx(-1.5, abs=0.02)
    assert x[x > 0].std().item() == pytest.approx(0.2, abs=0.02)


def test_constrained_sites_predictive_and_saving():
    y = torch.tensor([0.1, 7.25, -0.9, 1.3, 0.2])
    result = quick(constrained, y, policy=FEW)
    draws = draw(result.guide)
    assert draws["scale"].min() > 0 and draws["share"].shape == (50, 3)
    torch.testing.assert_close(draws["share"].sum(-1), torch.ones(50))
    found = Predictive(constrained, guide=result.guide, num_samples=7)()
    assert found["y"].shape == (7, 5) and found["scale"].reshape(-1).shape == (7,)
    # In a file, without the data; drawn without the model's arguments.
    file = io.BytesIO()
    torch.save(result.guide, file)
    assert y.numpy().tobytes() not in file.getvalue()
    pyro.clear_param_store()
    file.seek(0)
    assert_equal(draw(torch.load(file, weights_only=False)), draws)


def test_a_mixture_can_be_saved():
    result = quick(two_modes, num_steps=10, policy=FEW)
    assert isinstance(result.guide, AutoMixture)
    draws = draw(result.guide)
    file = io.BytesIO()
    torch.save(result.guide, file)
    pyro.clear_param_store()
    file.seek(0)
    assert_equal(draw(torch.load(file, weights_only=False)), draws)


def unplated(num_weights, x, y):
    """As NUTS takes it: no plate, and no ``to_event``."""
    weight = pyro.sample("weight", dist.Laplace(x.new_zeros(num_weights), 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(x.new_ones(1)))
    pyro.sample("y", dist.Normal(x @ weight, noise), obs=y)


@pytest.mark.parametrize("num_weights, chosen", [(2, "injective"), (101, "semi-implicit")])
def test_a_model_without_plates(num_weights, chosen):
    torch.manual_seed(0)
    x = torch.randn(300, num_weights)
    y = x[:, 0] + 0.5 * torch.randn(300)
    result = quick(unplated, num_weights, x, y, num_steps=20)
    assert result.chosen == chosen and not any(stage.error for stage in result.stages)
    draws = result.sample(400)
    assert draws["weight"].shape == (400, num_weights) and draws["noise"].shape == (400, 1)
    if chosen == "injective":
        exact = torch.linalg.lstsq(x, y).solution  # as the prior hardly matters
        torch.testing.assert_close(draws["weight"].mean(0), exact, rtol=0, atol=0.02)


def test_results_of_models_without_plates(tmp_path):
    def model(sigma, y=None):
        mean = pyro.sample("mean", dist.Normal(sigma.new_zeros(1), 5.0))
        tau = pyro.sample("tau", dist.HalfNormal(sigma.new_ones(1)))
        effect = pyro.sample("effect", dist.Normal(mean * torch.ones(4), tau))
        return pyro.sample("y", dist.Normal(effect, sigma), obs=y)

    sigma, y = torch.ones(4), torch.tensor([0.3, -1.0, 2.0, 0.5])
    result = fit(model, "auto", sigma, y, seed=0, progress=False)
    assert result.chosen == "conditional"
    result.save(tmp_path / "result.pt")
    loaded, found = Fit.load(tmp_path / "result.pt", model, sigma, y), []
    for one in (result, loaded):
        torch.manual_seed(1)
        found.append(one.guide.sample_posterior(3, sigma))
    assert_equal(*found)
    tree = loaded.to_datatree(log_likelihood=True)
    assert tree["log_likelihood"]["y"].shape[-1] == 4  # an observation each
    assert Predictive(model, guide=result.guide, num_samples=5)(sigma)["y"].shape == (5, 4)


def test_minibatches_of_a_model_without_plates_for_its_weights():
    def model(x, y):
        weight = pyro.sample("weight", dist.Normal(x.new_zeros(2), 2.0))
        with pyro.plate("rows", 40, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ weight, 0.5), obs=y)

    x = torch.randn(40, 2)
    batches = list(zip(x.split(10), x[:, 0].split(10), strict=True))
    result = fit(model, "auto", batches=batches, epochs=30, seed=0, progress=False)
    torch.testing.assert_close(
        result.guide.median()["weight"], torch.tensor([1.0, 0.0]), rtol=0, atol=0.2
    )


class CountingELBO(ImplicitELBO):
    def differentiable_loss(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().differentiable_loss(*args, **kwargs)


def test_a_given_guide_is_trained_in_place():
    torch.set_default_dtype(torch.float64)
    guide, loss = AutoNormal(regression), CountingELBO(4)
    result = fit(regression, guide, X, Y, loss=loss, num_steps=150, lr=0.1, seed=0, progress=False)
    assert isinstance(result, Fit) and result.guide is guide
    assert len(result.losses) == 150 and loss.calls == 151
    assert result.bounds == {} and result.num_modes is None
    precision = X.T @ X / 0.25 + torch.eye(2) / 4
    mean = torch.linalg.solve(precision, X.T @ Y / 0.25)
    torch.testing.assert_close(guide.locs.weight.detach(), mean, rtol=0, atol=0.1)
    # Mean field has the conditional sd.
    sd = precision.diagonal().rsqrt()
    torch.testing.assert_close(guide.scales.weight.detach(), sd, rtol=0.15, atol=0)


def nowhere():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("never", 0 * x - math.inf)


def test_a_density_that_is_nowhere_finite():
    with pytest.raises(
        ValueError, match="none of 50 initial points.*site 'never'.*factor is -inf. Cure"
    ):
        quick(nowhere)


def walled():
    """A guide's draw or two of a thousand lie behind the walls."""
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("walls", torch.where(x.abs() > 3.0, -math.inf, 0.0 * x))


def test_single_draws_without_a_density_do_not_end_it():
    result = quick(walled, num_steps=40)
    assert result.guide.sample_posterior(100)["x"].abs().median() < 1.5
    assert all(not math.isnan(bound) for bound in result.bounds.values())


def many_latents():
    pyro.sample("x", dist.Normal(torch.zeros(101), 1.0).to_event(1))


def subsampled(y):
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y), subsample_size=3) as rows:
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y[rows])


@pytest.mark.parametrize("model, args", [(many_latents, ()), (subsampled, (torch.arange(12.0),))])
def test_large_and_subsampled_models_get_a_semi_implicit_guide(model, args):
    result = quick(model, *args, num_steps=4)
    assert isinstance(result.guide, AutoSemiImplicit) and result.guide.frame_scale_tril is None
    assert result.num_modes is None and result.bounds == {} and len(result.losses) == 4
    assert all(math.isfinite(loss) for loss in result.losses)


def test_a_subsampled_model_is_warned_about():
    with pytest.warns(UserWarning, match="neither corrects nor checks .* 'rows' .* 3 of 12"):
        quick(subsampled, torch.arange(12.0), num_steps=1, refine="auto")


@pytest.mark.filterwarnings("ignore:fit's chains stopped at")
def test_heavy_tailed_modes_are_annealed():
    def heavy_modes():
        x = pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))
        parts = [dist.StudentT(1.5, loc, 0.05).log_prob(x) for loc in (-1.5, 1.0)]
        pyro.factor("modes", torch.stack(parts).logsumexp(0))

    result = quick(heavy_modes, refine="auto", max_seconds=2.0)
    outcomes = {stage.name: stage.outcome for stage in result.stages}
    assert outcomes["gaussian"].endswith("; annealing weighs the modes, and no guide is trained")
    assert "mixture" not in outcomes and "refine" in outcomes


def test_two_fits_keep_their_own_values():
    """Pyro's store has one name for all guides of a class."""
    first = quick(regression, X.float(), Y.float())
    before = draw(first.guide)
    other = quick(regression, X.float(), 5 + Y.float(), seed=1)
    assert_equal(draw(first.guide), before)
    assert (draw(other.guide)["weight"].mean(0) - before["weight"].mean(0)).norm() > 1
    mixtures = [quick(two_skewed_modes, seed=seed, num_steps=9, policy=FEW) for seed in (0, 1)]
    assert not torch.equal(*(draw(mixture.guide)["x"] for mixture in mixtures))
    # Each of two components gets 9 / sqrt(2) steps.
    assert [len(mixture.losses) for mixture in mixtures] == [14, 14]
    assert_equal(draw(first.guide), before)


def test_without_a_seed_the_streams_go_on_as_they_are():
    first = quick(funnel, seed=3, num_steps=4, policy=FEW)
    pyro.set_rng_seed(3)
    second = quick(funnel, seed=None, num_steps=4, policy=FEW)
    assert first.losses == second.losses and first.bounds == second.bounds
    assert_equal(draw(first.guide), draw(second.guide))


class Dying:
    """A model that dies like a killed process after so many runs."""

    def __init__(self, model, dies_after):
        self.model, self.runs_left = model, dies_after

    def __call__(self, *args):
        self.runs_left -= 1
        if self.runs_left == 0:
            raise SystemExit
        return self.model(*args)


@pytest.mark.parametrize("model", [funnel, two_modes, subsampled])
def test_a_resumed_fit_is_the_uninterrupted_one(model, tmp_path):
    args = (torch.arange(12.0),) if model is subsampled else ()

    def run(folder, process_seed, dies_after=-1):
        """As in a process of its own, with random streams of its own."""
        pyro.clear_param_store()
        pyro.set_rng_seed(process_seed)
        dying = Dying(model, dies_after)
        options = {"checkpoint": folder, "checkpoint_every": 4, "seed": None, "policy": FEW}
        result = quick(dying, *args, num_steps=16, **options)
        return result, -1 - dying.runs_left

    expected, num_runs = run(None, 0)
    with pytest.raises(SystemExit):
        run(tmp_path, 0, num_runs // 2)
    for number, share in enumerate([0.4, 0.8]):
        with contextlib.suppress(SystemExit):  # it may be finished by then
            run(tmp_path, 1 + number, math.ceil(share * num_runs))
    # Whatever the state of the process: the streams of the first start are in the folder.
    resumed, _ = run(tmp_path, 9)
    assert resumed.losses == expected.losses and resumed.bounds == expected.bounds
    assert_equal(resumed.guide.state_dict(), expected.guide.state_dict())
    assert_equal(draw(resumed.guide), draw(expected.guide))


def test_a_seeded_fit_can_be_calibrated():
    """Each simulation has a truth of its own, though each fit has the same seed."""

    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    seen = []

    def seeded(conditioned):
        result = fit(conditioned, seed=1, policy=FEW, progress=False)
        seen.append(result.guide.median()["x"].item())
        return result.guide

    calibration = simulation_based_calibration(
        model, seeded, torch.tensor(0.0), num_simulations=10, num_samples=9, num_bins=2
    )
    assert len(set(seen)) > 5  # starts near two similar modes may both be their guides
    assert calibration.is_calibrated
