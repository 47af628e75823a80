# SPDX-License-Identifier: Apache-2.0
"""``fit(batches=...)`` with few latent variables: passes over all rows."""

from __future__ import annotations

import math
import re
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from pyro_implicit import fit
from pyro_implicit.density.model import SubsampledError
from pyro_implicit.density.modes import Modes
from pyro_implicit.fitting import Fit, FitPolicy, minibatch_fit, passes
from pyro_implicit.fitting.passes import PassStages
from pyro_implicit.fitting.policy import MinibatchPolicy
from pyro_implicit.guides import AutoImplicit, AutoMixture, AutoSemiImplicit
from pyro_implicit.runtime.clock import TimeLimit

QUIET = {"seed": 0, "progress": False}
NUM_ROWS, DIM = 1500, 6
POLICY = MinibatchPolicy(num_starts=2, search_rounds=1)
QUICK = FitPolicy(minibatch=POLICY)
#: The same, after a rough search on 64 rows.
ROUGH = replace(POLICY, num_pilot=64, pilot_per_dim=1, search_iterations=1)


def correlated(num_rows=NUM_ROWS):
    """Columns that are nearly equal: the condition number of the posterior is about 5,000."""
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(num_rows, 1, generator=generator)
    x = common + torch.randn(num_rows, DIM, generator=generator) * torch.logspace(-1.8, 0, DIM)
    return x, x.sum(-1) + torch.randn(num_rows, generator=generator)


def linear(x, y):
    weights = pyro.sample("weights", dist.Normal(torch.zeros(DIM), 3.0).to_event(1))
    with pyro.plate("rows", NUM_ROWS, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ weights, 1.0), obs=y)


def exact_posterior():
    x, y = (part.double() for part in correlated())
    precision = x.mT @ x + torch.eye(DIM).double() / 9
    covariance = torch.linalg.inv(precision)
    return covariance @ (x.mT @ y), covariance


def loader(*tensors, **options):
    return DataLoader(TensorDataset(*tensors), batch_size=64, **options)


@pytest.fixture(scope="module")
def found():
    return fit(linear, batches=loader(*correlated(), shuffle=True), policy=QUICK, **QUIET)


def test_a_correlated_posterior(found):
    """Exact draws; minibatches of 64 rows are joined, so that a pass runs the model once."""
    mean, covariance = exact_posterior()
    draws = found.sample(8000)["weights"].double()
    sds = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - mean) / sds).abs().max() < 0.05
    whitened = torch.linalg.solve_triangular(
        torch.linalg.cholesky(covariance), (draws - mean).mT, upper=False
    )
    torch.testing.assert_close(whitened.cov(), torch.eye(DIM).double(), atol=0.08, rtol=0)
    assert isinstance(found.guide, AutoImplicit) and found.chosen == "gaussian"
    assert [stage.name for stage in found.stages] == ["search", "gaussian", "correct"]
    assert len(list(found.passes.batches)) == 1 and found.passes.num_units == NUM_ROWS


def test_passes_follow_a_search_on_a_part_of_the_rows(found):
    """2,000 rows, unless fewer are asked for; with all rows in the search there are no passes."""
    assert found.stages[0].outcome == "1 mode of 1500 rows"
    assert found.stages[1].outcome == "of the search, which had all rows"
    few = replace(POLICY, num_pilot=300, pilot_per_dim=1, cheap_evaluations=0.0)
    policy = FitPolicy(minibatch=few)
    result = fit(linear, batches=loader(*correlated()), policy=policy, **QUIET)
    assert result.stages[0].outcome == "1 mode of 320 rows"  # five minibatches
    number = re.fullmatch(r"(\d+) passes over 1500 rows", result.stages[1].outcome)
    assert number is not None and 2 <= int(number[1]) <= 8
    assert result.stages[2].outcome.startswith("moments by 64 weights, effective sample size")
    mean, covariance = exact_posterior()
    shift = (result.sample(8000)["weights"].mean(0) - mean) / covariance.diagonal().sqrt()
    assert shift.abs().max() < 0.05


def test_a_part_of_a_large_minibatch_is_searched():
    policy = FitPolicy(minibatch=replace(POLICY, num_pilot=200, pilot_per_dim=1))
    result = fit(linear, batches=[correlated()], policy=policy, **QUIET)
    assert result.stages[0].outcome == "1 mode of 200 rows"
    rows = correlated()

    def whole(x, y):  # cannot run with fewer rows
        weights = pyro.sample("weights", dist.Normal(torch.zeros(DIM), 3.0).to_event(1))
        with pyro.plate("rows", NUM_ROWS):
            pyro.sample("y", dist.Normal(x @ weights, 1.0), obs=y)

    result = fit(whole, batches=[rows], policy=policy, **QUIET)
    assert result.stages[0].outcome == "1 mode of 1500 rows"


class Curve:
    """A density of one variable in place of a posterior."""

    def __init__(self, log_prob):
        self.log_prob, self.num_passes = log_prob, 0

    def centre(self, point):
        pass

    def height(self, log_prob):
        return log_prob.item()

    def derivatives(self, point):
        self.num_passes += 1
        with torch.enable_grad():
            point = point.detach().double().requires_grad_()
            value = self.log_prob(point.squeeze(-1))
            (score,) = torch.autograd.grad(value.sum(), point, create_graph=True)
            (hessian,) = torch.autograd.grad(score.sum(), point)
        return value.detach(), score.detach(), hessian.unsqueeze(-1)


def climbed(log_prob, *starts):
    stages = SimpleNamespace(limit=TimeLimit(None))
    points = torch.tensor(starts).unsqueeze(-1).double()
    modes = Modes(points, torch.ones(len(starts), 1, 1).double(), torch.zeros(len(starts)))
    curve = Curve(log_prob)
    return PassStages(stages, curve, POLICY, "x").climb_all(modes), curve.num_passes


def test_a_step_that_is_too_long_is_shortened():
    """A full Newton step from 1 would end at -1,100."""
    modes, num_passes = climbed(lambda x: -torch.cosh(5 * x).log(), 1.0)
    assert modes.loc.item() == pytest.approx(0.0, abs=0.01) and num_passes < 20
    assert modes.scale_tril.item() == pytest.approx(0.2, rel=0.01)


def test_equal_modes_are_merged_and_others_weighed():
    """Two modes of equal height, of which one is twice as wide, and has twice the mass."""

    def log_prob(x):
        return torch.logaddexp(-0.5 * (x - 5) ** 2, -0.5 * ((x + 5) / 2) ** 2)

    modes, _ = climbed(log_prob, 4.5, -6.0, 5.5)
    assert modes.loc.flatten().tolist() == pytest.approx([-5.0, 5.0], abs=0.02)
    assert modes.elbo.diff().item() == pytest.approx(-math.log(2.0), abs=0.01)


def test_the_guide_has_the_moments(found):
    mean, covariance = exact_posterior()
    torch.manual_seed(0)
    draws = found.guide.sample_posterior(4000)["weights"].double()
    sds = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - mean) / sds).abs().max() < 0.08
    assert (draws.std(0) / sds - 1).abs().max() < 0.08


def test_the_result_is_diagnosed(found):
    assert found.diagnose().verdict == "trust"


def test_functions_that_read_all_data_refuse(found):
    for ask in (lambda: found.target, found.sensitivity):
        with pytest.raises(SubsampledError, match="fitted by minibatches"):
            ask()


def test_predictions_and_files(found, tmp_path):
    x, y = correlated()
    new = Predictive(linear, guide=found.posterior, num_samples=20)(x[:5], None)["y"]
    assert new.shape == (20, 5)
    found.save(tmp_path / "fit.pt")
    loaded = Fit.load(tmp_path / "fit.pt", linear)
    pyro.set_rng_seed(0)
    first = found.sample(10)["weights"]
    pyro.set_rng_seed(0)
    torch.testing.assert_close(loaded.sample(10)["weights"], first)
    with pytest.raises(SubsampledError, match="fitted by minibatches.*Cure: diagnose"):
        loaded.diagnose()


def test_rows_of_a_loader_that_draws_them_are_trained():
    """Passes of a weighted sampler have other rows each time, so that no density is known."""
    x, y = correlated()
    sampler = WeightedRandomSampler(torch.ones(NUM_ROWS), NUM_ROWS)
    batches = loader(x, y, sampler=sampler)
    result = fit(linear, batches=batches, epochs=1, policy=FitPolicy(minibatch=ROUGH), **QUIET)
    assert isinstance(result.guide, AutoSemiImplicit) and len(result.losses) == 24
    reason = r"1 mode of \d+ rows; two passes differ by [\d.]+ nats: a guide is trained by minib"
    assert re.match(reason, result.stages[0].outcome)


def test_rows_that_a_loader_leaves_out_are_named():
    batches = loader(*correlated(), shuffle=True, drop_last=True)
    with pytest.warns(UserWarning, match="leaves out other rows.* Cure: drop_last=False"):
        result = fit(linear, batches=batches, epochs=1, policy=FitPolicy(minibatch=ROUGH), **QUIET)
    assert isinstance(result.guide, AutoSemiImplicit)


def test_rows_that_all_passes_lack_are_named():
    few = list(zip(*(part.split(350) for part in correlated()), strict=True))[:-1]
    with pytest.warns(UserWarning, match="have 1400 rows, but plate 'rows' has 1500.*Cure"):
        result = fit(linear, batches=few, policy=QUICK, **QUIET)
    assert result.passes.num_units == 1400


def test_parameters_of_the_model_are_trained():
    def model(y):
        w = pyro.sample("w", dist.Normal(pyro.param("loc", torch.zeros(())), 1.0))
        with pyro.plate("rows", 40, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    result = fit(model, batches=torch.ones(40).split(10), epochs=2, policy=QUICK, **QUIET)
    assert isinstance(result.guide, AutoSemiImplicit) and len(result.losses) == 8


def test_guides_of_random_models_are_trained():
    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0)) + torch.randn(()) / 10
        with pyro.plate("rows", 40, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    with pytest.warns(UserWarning, match="the model is random beyond its latents"):
        result = fit(model, batches=torch.ones(40).split(10), epochs=2, policy=QUICK, **QUIET)
    assert isinstance(result.guide, AutoSemiImplicit) and len(result.losses) == 8
    assert "the model is random beyond its latents" in str(result.stages[0].error)


def test_without_time_for_passes_a_guide_is_trained():
    policy = FitPolicy(minibatch=replace(ROUGH, least_passes=10**9))
    options = {"epochs": 1, "max_seconds": 100.0, "policy": policy}
    with pytest.warns(UserWarning, match="nothing checks its draws: max_seconds is too.*Cure"):
        result = fit(linear, batches=loader(*correlated()), **options, **QUIET)
    assert "max_seconds is too short for passes over all rows" in result.stages[0].outcome
    assert len(result.losses) == 24


def test_minibatches_that_do_not_fit_into_memory_are_read_in_each_pass():
    reads = 0

    class Loader:
        def __len__(self):
            return 24

        def __iter__(self):
            nonlocal reads
            reads += 1
            x, y = correlated()
            return iter(list(zip(x.split(64), y.split(64), strict=True)))

    policy = FitPolicy(minibatch=replace(ROUGH, most_bytes=1))
    result = fit(linear, batches=Loader(), policy=policy, **QUIET)
    num_passes, before = result.passes.num_passes, reads
    mean, covariance = exact_posterior()
    shift = (result.sample(8000)["weights"].mean(0) - mean) / covariance.diagonal().sqrt()
    assert shift.abs().max() < 0.05 and num_passes > 3
    result.passes.sums(result.modes)
    assert reads == before + 1


def test_minibatches_of_other_meaning_are_not_joined():
    """A fixed scale is that of a minibatch, and rows may enter by their mean."""
    y = torch.randn(60, generator=torch.Generator().manual_seed(0)) + 1

    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with poutine.scale(scale=6.0), pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    result = fit(model, batches=y.split(10), policy=QUICK, **QUIET)
    assert len(list(result.passes.batches)) == 6
    draws, precision = result.sample(8000)["w"], 61
    assert (draws.mean() - y.sum() / precision).abs() * precision**0.5 < 0.05
    assert draws.std() * precision**0.5 == pytest.approx(1.0, abs=0.04)


def test_arguments_that_minibatches_share():
    """One has as many elements as a minibatch has rows."""
    y = torch.randn(30, generator=torch.Generator().manual_seed(0))

    def model(y, scales):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 30, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(w, scales.mean()), obs=y)

    for size in (7, 10):
        scales = torch.arange(1.0, size + 1) / (size + 1)
        batches = [(part, scales) for part in y.split(10)]
        result = fit(model, batches=batches, policy=QUICK, **QUIET)
        precision = 1 + 30 / 0.25
        draws = result.sample(8000)["w"]
        assert (draws.mean() - y.sum() / 0.25 / precision).abs() * precision**0.5 < 0.05
        assert draws.std() * precision**0.5 == pytest.approx(1.0, abs=0.04)


def skewed(y):
    shape = pyro.sample("shape", dist.Exponential(1.0))
    scale = pyro.sample("scale", dist.Exponential(1.0))
    with pyro.plate("rows", 8, subsample_size=len(y)):
        pyro.sample("y", dist.Gamma(shape, 1 / scale), obs=y)


def exact_log_shape(y):
    """The mean and the standard deviation of the logarithm of the shape, on a grid."""
    at = torch.linspace(-6.0, 4.0, 400, dtype=torch.float64)
    log_shape, log_scale = torch.meshgrid(at, at, indexing="ij")
    shape, scale = log_shape.exp(), log_scale.exp()
    rows = dist.Gamma(shape, 1 / scale).log_prob(y.double()[:, None, None]).sum(0)
    weight = (rows - shape - scale + log_shape + log_scale).flatten().softmax(0)
    mean = weight @ log_shape.flatten()
    return mean, (weight @ (log_shape.flatten() - mean).square()).sqrt()


@pytest.mark.parametrize("refine", ["auto", True, False])
def test_chains_follow_uneven_weights(refine):
    y = torch.tensor([0.1, 0.5, 0.7, 0.9, 1.4, 2.0, 3.0, 5.0])
    poor = replace(POLICY, max_khat=1.0 if refine is True else -1.0)
    options = {"refine": refine, "policy": FitPolicy(minibatch=poor)}
    result = fit(skewed, batches=y.split(2), **options, **QUIET)
    assert (result.refined is not None) == (refine is not False)
    shape = result.sample(2000)["shape"].log()
    mean, sd = exact_log_shape(y)
    assert (shape.mean() - mean).abs() < 0.1 * sd
    if refine == "auto":
        assert result.diagnose().verdict in ("trust", "check")
        more = result.refine_more(max_gradients=20, progress=False)
        assert more.refined.num_gradients > result.refined.num_gradients
    if refine is False:
        assert result.draws.doubts and "importance weights: k-hat" in result.draws.doubts[0]


def test_too_many_rows_for_chains_are_named():
    few = replace(POLICY, max_khat=-1.0, most_chained=7)
    message = r"posterior of the latent variables is far from normal .* 8 rows would take too long"
    with pytest.warns(UserWarning, match=message + ".*Cure"):
        result = fit(
            skewed, batches=torch.ones(8).split(2), policy=FitPolicy(minibatch=few), **QUIET
        )
    assert result.refined is None and not result.draws.settled


def test_many_rows_with_reliable_weights_need_no_chains():
    policy = FitPolicy(minibatch=replace(POLICY, most_chained=7))
    y = torch.tensor([0.1, 0.5, 0.7, 0.9, 1.4, 2.0, 3.0, 5.0])
    result = fit(skewed, batches=y.split(2), refine=True, policy=policy, **QUIET)
    assert result.refined is None and result.draws.settled


def test_chains_of_stochastic_gradients_follow_unreliable_weights():
    policy = FitPolicy(minibatch=replace(POLICY, most_chained=7, max_khat=-9.0, near_normal=1.0))
    options = {"refine": True, "epochs": 50, "policy": policy}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # short chains
        y = torch.tensor([0.1, 0.5, 0.7, 0.9, 1.4, 2.0, 3.0, 5.0])
        result = fit(skewed, batches=y.split(2), **options, **QUIET)
    assert "relaxation times" in result.stages[-1].outcome and result.draws is None
    assert (
        result.posterior.samples["shape"].numel() == result.refined.get_samples()["shape"].numel()
    )


def test_draws_are_in_random_order_and_give_the_guide_its_moments():
    policy = FitPolicy(minibatch=replace(POLICY, max_khat=1.0))
    y = torch.tensor([0.1, 0.5, 0.7, 0.9, 1.4, 2.0, 3.0, 5.0])
    result = fit(skewed, batches=y.split(2), policy=policy, **QUIET)
    draws = result.draws.samples["shape"].log()
    few = draws[:64]
    assert (few.mean() - draws.mean()).abs() < 0.4 * draws.std()
    assert few.std() == pytest.approx(draws.std().item(), rel=0.3)
    torch.manual_seed(0)
    again = result.guide.sample_posterior(4000)["shape"].log()
    assert (again.mean() - draws.mean()).abs() < 0.06 * draws.std()
    assert again.std() == pytest.approx(draws.std().item(), rel=0.06)


def test_two_modes_have_their_shares():
    def model(y):
        w = pyro.sample("w", dist.Normal(0.3, 2.0))
        with pyro.plate("rows", 50, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(w.abs(), 1.0), obs=y)

    y = torch.full((50,), 2.0)
    result = fit(model, batches=y.split(10), **QUIET)
    assert isinstance(result.guide, AutoMixture) and result.num_modes == 2
    share = (result.sample(8000)["w"] > 0).double().mean().item()
    # The prior's densities at 2 and -2 have the ratio exp(2 * 2 * .3 / 2 ** 2).
    assert share == pytest.approx(1 / (1 + math.exp(-0.3)), abs=0.02)
    torch.manual_seed(0)
    share = (result.guide.sample_posterior(4000)["w"] > 0).double().mean().item()
    assert share == pytest.approx(1 / (1 + math.exp(-0.3)), abs=0.04)


def test_held_out_rows_are_scored():
    x, y = correlated()
    options = {"batches": loader(x, y), "validation": loader(x[:100], y[:100]), "policy": QUICK}
    result = fit(linear, **options, **QUIET)
    score = float(re.search(r"held-out NLL ([\d.]+)", result.stages[-1].outcome)[1])
    draws = result.sample(500)["weights"]
    expected = -dist.Normal(x[:100] @ draws.mT, 1.0).log_prob(y[:100, None]).logsumexp(-1).mean()
    assert score == pytest.approx(expected.item() + math.log(500), abs=0.01)


def test_a_limit_of_time_counts_passes_after_the_first_one(monkeypatch):
    """The minibatches stay in memory: later passes do not wait for the loader."""

    class Loader:
        def __len__(self):
            return 2

        def __iter__(self):
            time.sleep(0.3)
            return iter(list(zip(*(part.split(750) for part in correlated()), strict=True)))

    needed = []

    def spy(limit, like, seconds=0.0):
        needed.append(seconds)
        return is_late(limit, like, seconds)

    is_late = minibatch_fit.is_late
    monkeypatch.setattr(minibatch_fit, "is_late", spy)
    result = fit(linear, batches=Loader(), policy=QUICK, max_seconds=60.0, **QUIET)
    assert len(needed) == 1 and 0 < needed[0] < 0.3 * POLICY.least_passes
    # A search that a limit may have ended is no end of a climb.
    assert re.match(r"\d+ passes over 1500 rows$", result.stages[1].outcome)


def test_a_climb_that_ends_early_is_named():
    # Weights of a Gaussian away from the mode are uneven; more of them, and chains, are not tested.
    few = {"num_pilot": 64, "pilot_per_dim": 1, "max_passes": 0, "num_samples": 1024}
    few |= {"cheap_evaluations": 0.0, "least_effective": 0.0, "max_khat": math.inf}
    policy = FitPolicy(minibatch=replace(POLICY, **few))
    result = fit(linear, batches=loader(*correlated()), policy=policy, **QUIET)
    assert result.stages[1].outcome.endswith("; not converged")


def test_weights_end_once_they_suffice():
    few = replace(
        POLICY, cheap_evaluations=0.0, least_effective=50.0, near_normal=1.0, max_khat=1.0
    )
    y = torch.tensor([0.1, 0.5, 0.7, 0.9, 1.4, 2.0, 3.0, 5.0])
    result = fit(skewed, batches=y.split(2), policy=FitPolicy(minibatch=few), **QUIET)
    number = int(result.stages[2].outcome.split(" weights")[0])
    assert 50 <= number < 1000


def test_rows_of_discrete_latents_have_no_score():
    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 40, subsample_size=len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(w + z, 1.0), obs=y)

    y = torch.ones(40)
    with pytest.raises(ValueError, match=r"single rows, but the discrete latents \['z'\].*Cure"):
        fit(model, batches=y.split(10), validation=[y], policy=QUICK, **QUIET)


def test_interrupted_it_keeps_the_gaussian(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(passes, "_log_weights", interrupt)
    policy = FitPolicy(minibatch=ROUGH)
    result = fit(linear, batches=loader(*correlated()), policy=policy, **QUIET)
    assert result.interrupted and result.sample(3)["weights"].shape == (3, DIM)
