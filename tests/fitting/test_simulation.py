# SPDX-License-Identifier: Apache-2.0
"""Posteriors of simulators, against closed forms; bad input; the verdict."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_implicit import fit_simulator
from pyro_implicit.callbacks import Callback
from pyro_implicit.diagnostics.calibration import simulation_trace
from pyro_implicit.fitting import SimulatorFit, SimulatorPolicy
from pyro_implicit.fitting.simulation_networks import (
    ConditionalDensity,
    PairClassifier,
    PairFrame,
    train_network,
)
from pyro_implicit.fitting.simulator import Pairs, Simulator
from pyro_implicit.runtime.clock import TimeLimit
from pyro_implicit.runtime.global_state import seeded as pyro_seed

SMALL = SimulatorPolicy(
    num_networks=2, width=32, classifier_width=32, num_steps=400, lr=5e-3, batch_size=128
)
OPTIONS = {"policy": SMALL, "seed": 0, "progress": False}
SINGLE = OPTIONS | {"policy": replace(SMALL, num_networks=1)}
#: Without training.
QUICK = {
    "policy": SimulatorPolicy(num_networks=1, num_steps=1),
    "num_simulations": 150,
    "seed": 0,
    "progress": False,
}


class Sampled(dist.TorchDistribution):
    """A distribution without a density."""

    arg_constraints = {}

    def __init__(self, function, event_shape=()):
        self.function = function
        super().__init__(torch.Size(), torch.Size(event_shape))

    def sample(self, sample_shape=()):
        return self.function()


def nuisance(y=None):
    """Given z, y is normal; z is discrete, and only the slope is asked for."""
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    z = pyro.sample("z", dist.Bernoulli(0.5))
    pyro.sample("y", Sampled(lambda: slope + 2 * z + 0.5 * torch.randn(2), (2,)), obs=y)


@pytest.fixture(scope="module")
def fitted():
    return fit_simulator(
        nuisance, torch.tensor([1.0, 1.5]), sites=["slope"], num_simulations=2000,
        **OPTIONS | {"policy": replace(SMALL, num_steps=700)},
    )  # fmt: skip


def exact_slope(y):
    """A mixture of N(0.8 (y - 2 z), 0.2 I), with the weights of y ~ N(2 z, 1.25 I)."""
    shifts = torch.tensor([0.0, 2.0])
    weights = (-((y - shifts[:, None]) ** 2).sum(-1) / 2.5).softmax(0)
    means = 0.8 * (y - shifts[:, None])
    mean = weights @ means
    covariance = 0.2 * torch.eye(2) + torch.einsum("k,ki,kj->ij", weights, means, means)
    return mean, covariance - torch.outer(mean, mean)


@pytest.mark.parametrize("y", [(1.0, 1.5), (-0.5, 0.0), (2.0, 1.0)])
def test_latents_not_asked_for_are_averaged_over(fitted, y):
    data = torch.tensor(y)
    draws = fitted.sample(8000, data)["slope"]
    mean, covariance = exact_slope(data)
    assert set(fitted.sample(3)) == {"slope"} and draws.shape == (8000, 2)
    torch.testing.assert_close(draws.mean(0), mean, rtol=0, atol=0.15)
    torch.testing.assert_close(draws.T.cov(), covariance, rtol=0, atol=0.15)


def test_the_verdict_of_a_right_and_of_a_wrong_posterior(fitted):
    right = fitted.diagnose(seed=1)
    assert right.verdict == "check", right
    assert abs(right.accuracy - 0.5) < 0.08 and "no fault found, but" in str(right)
    for network in fitted._networks:
        network.frame.latent_loc += 0.4
    wrong = fitted.diagnose(seed=1)
    for network in fitted._networks:
        network.frame.latent_loc -= 0.4
    assert wrong.verdict == "do not trust" and "ranks of slope" in str(wrong)


def test_a_classifier_sees_what_ranks_of_marginals_miss():
    """Draws with the right marginals, but independent."""

    def model(y):
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x.sum(), 0.1), obs=y)

    found = fit_simulator(model, torch.tensor(0.0), **QUICK)
    for network in found._networks:  # no coordinate depends on the data or on the others
        for parameter in network.networks.parameters():
            parameter.data.zero_()
    pairs, _ = found._simulator.draw(1500, TimeLimit(None), 1.0)
    objective = partial(found._classifier.contrast, found._sample(pairs.data, 1).squeeze(-2))
    train_network(pairs, found._classifier, objective, SMALL, math.inf, "ratio")
    wrong = found.diagnose(seed=1)
    assert not wrong.calibration.failures
    assert wrong.accuracy > 0.7 and wrong.verdict == "do not trust"


def test_data_outside_of_all_simulations_are_named(fitted):
    found = fitted.diagnose(torch.tensor([1.0, 40.0]), num_simulations=100, seed=0)
    assert found.verdict == "do not trust" and found.outside == ("y[1]",)
    assert "the data y[1] lie outside" in str(found)


def test_the_density_is_normalised_and_matches_its_draws():
    torch.manual_seed(0)
    pairs = Pairs(*(3 + 2 * torch.randn(200, 1, dtype=torch.float64) for _ in range(2)))
    density = ConditionalDensity(pairs, SMALL)
    y = torch.tensor([[2.0]], dtype=torch.float64)
    grid = torch.linspace(-40, 40, 8001, dtype=torch.float64).unsqueeze(-1)
    density_at = density.log_prob(grid, y.expand(8001, -1)).exp().detach() / 2
    scale = density.frame.latent_scale.item() / 2
    assert density_at.sum().item() * 0.01 / scale == pytest.approx(1.0, abs=1e-3)
    draws = density.sample(y.expand(20_000, -1))
    mean = (density_at / density_at.sum() * grid.squeeze(-1)).sum()
    assert (draws.mean() - mean).abs() < 5 * draws.std() / 20_000**0.5


def test_heavy_tails_do_not_move_the_frame():
    """The quartiles of Cauchy(2, 3) are 3 from its median, those of a normal .6745 sds."""
    levels = (torch.arange(9999) + 0.5) / 9999
    cauchy = 2 + 3 * (math.pi * (levels - 0.5)).tan()
    mostly_zero = torch.where(levels < 0.8, 0.0, 5.0)  # its sd is 2
    data = torch.stack([cauchy, mostly_zero, torch.full_like(cauchy, 7.0)], -1)
    frame = PairFrame(Pairs(cauchy.unsqueeze(-1), data))
    scale, middle = 3 / 0.6745, torch.tensor([2.0, 0.0, 7.0])
    torch.testing.assert_close(frame.data_loc, middle, atol=0.01, rtol=0)
    torch.testing.assert_close(frame.data_scale, torch.tensor([scale, 2.0, 1.0]), rtol=0.01, atol=0)
    far = torch.tensor([[2 + scale * math.sinh(3.0), 2 * math.sinh(1.0), 7.0]])
    latent, white = frame(torch.tensor([[2 + scale]]), far)
    torch.testing.assert_close(white, torch.tensor([[3.0, 1.0, 0.0]]), atol=0.01, rtol=0)
    assert latent.item() == pytest.approx(1.0, abs=0.01)


def test_far_values_are_moderate_inputs_of_networks():
    pairs = Pairs(torch.randn(100, 2), torch.randn(100, 3))
    far = Pairs(torch.full((1, 2), 1e12), torch.full((1, 3), 1e12))
    density, classifier = (
        one(pairs, SimulatorPolicy()) for one in (ConditionalDensity, PairClassifier)
    )
    largest = []
    for network in (*density.networks, classifier.network):
        network.register_forward_pre_hook(lambda _, given: largest.append(given[0].abs().max()))
    density.log_prob(*far), classifier(*far)
    assert len(largest) == 3 and max(largest) < 40


def test_a_coordinate_depends_on_the_data_and_the_earlier_ones():
    pairs = Pairs(torch.randn(200, 3), torch.randn(200, 2))
    density, (x, y) = ConditionalDensity(pairs, SMALL), pairs
    others = [x.clone() for _ in range(3)]
    for i, other in enumerate(others):
        other[:, i] += 1
    for i in range(3):
        found = density._parts(i, x, y)[1]
        moved = [not torch.equal(found, density._parts(i, other, y)[1]) for other in others]
        assert moved == [j < i for j in range(3)]
        assert not torch.equal(found, density._parts(i, x, y + 1)[1])


def test_bounded_latents_and_discrete_data():
    def model(y):
        p = pyro.sample("p", dist.Uniform(0.0, 1.0))
        pyro.sample("y", dist.Delta((torch.rand(20) < p).sum()), obs=y)

    found = fit_simulator(model, torch.tensor(16), num_simulations=1000, **SINGLE)
    draws = found.sample(4000)["p"]
    exact = dist.Beta(17.0, 5.0)
    assert ((draws > 0) & (draws < 1)).all()
    assert draws.mean().item() == pytest.approx(exact.mean.item(), abs=0.02)
    assert draws.std().item() == pytest.approx(exact.stddev.item(), abs=0.015)


def test_failed_simulations_do_not_change_the_posterior():
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        noisy = x + 0.5 * torch.randn(())
        pyro.sample("y", dist.Delta(torch.where(noisy > 1.0, math.nan, noisy)), obs=y)

    found = fit_simulator(model, torch.tensor(0.8), num_simulations=2000, **SINGLE)
    assert 200 < found.num_failed < 600 and "not finite" in str(found)
    draws = found.sample(4000)["x"]
    assert draws.mean().item() == pytest.approx(0.64, abs=0.08)
    assert draws.std().item() == pytest.approx(0.2**0.5, abs=0.05)
    assert f"{found.num_failed} of 2000" in str(found.diagnose(num_simulations=100, seed=0))


def one(x, y):
    pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def test_bad_models_are_refused():
    def flat(y):
        one(pyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), ())), y)

    def nothing(y):
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    def depends(y):
        low = pyro.sample("low", dist.Normal(0.0, 1.0))
        one(pyro.sample("x", dist.Uniform(low, low + 1)), y)

    def varying(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Delta(torch.randn(2 + int(x > 0)), event_dim=1), obs=y)

    def broken(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Delta(math.nan * x), obs=y)

    y = torch.tensor(1.0)
    for model, data, message in (
        (flat, y, r"'x' \(ImproperUniform\) is flat.*Cure"),
        (nothing, y, "no latent variable. Cure"),
        (nuisance, None, r"observes nothing. Cure: call it with data"),
        (nuisance, torch.ones(2), r"latent 'z' is discrete.*Cure: sites=\['slope'\]"),
        (nuisance, torch.tensor([1.0, math.nan]), "site 'y' are not finite. Cure"),
        (depends, y, "support of latent 'x' depends on other latents. Cure"),
        (varying, torch.ones(2), r"site 'y' has shape \(3,\), but in the first call \(2,\). Cure"),
        (broken, y, "only 0 of 150 simulations are finite.*Cure"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_simulator(model, data, **QUICK)
    with pytest.raises(ValueError, match=r"sites names 'w', but .* \['slope', 'z'\]"):
        fit_simulator(nuisance, torch.ones(2), sites=["w"], **QUICK)
    with pytest.raises(TypeError, match=r"sites must be a list.*Cure: sites=\['slope'\]"):
        fit_simulator(nuisance, torch.ones(2), sites="slope", **QUICK)
    with pytest.raises(ValueError, match=r"sites is empty. Cure: some of \['slope', 'z'\]"):
        fit_simulator(nuisance, torch.ones(2), sites=[], **QUICK)
    for data, kind in ((np.ones(2), "ndarray"), ([1.0, 2.0], "list")):
        with pytest.raises(TypeError, match=rf"site 'y' is a {kind}.*Cure: torch.as_tensor\(y\)"):
            fit_simulator(nuisance, data, **QUICK)
    with pytest.raises(ValueError, match="num_simulations must be at least 100"):
        fit_simulator(nuisance, torch.ones(2), **QUICK | {"num_simulations": 5})


def test_other_data_of_another_shape_or_type_are_refused(fitted):
    with pytest.raises(ValueError, match=r"'y' has shape \(3,\), but in the first call \(2,\)"):
        fitted.sample(5, torch.ones(3))
    with pytest.raises(TypeError, match=r"site 'y' is a list"):
        fitted.sample(5, [1.0, 2.0])


def test_a_seed_fixes_the_result_and_keeps_the_callers_stream():
    torch.manual_seed(3)
    first = fit_simulator(nuisance, torch.ones(2), sites=["slope"], **QUICK)
    after = torch.rand(())
    second = fit_simulator(nuisance, torch.ones(2), sites=["slope"], **QUICK)
    torch.manual_seed(3)
    assert torch.rand(()) == after
    for one_, other in zip(first._networks, second._networks, strict=True):
        for a, b in zip(one_.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def test_limits_and_callbacks_end_the_simulations():
    class Stop(Callback):
        def on_step(self, step):
            if step.number == 120:
                raise StopIteration

    found = fit_simulator(
        nuisance, torch.ones(2), sites=["slope"], callbacks=[Stop()],
        **QUICK | {"num_simulations": 10**6},
    )  # fmt: skip
    assert found.num_simulations == 120
    found = fit_simulator(
        nuisance, torch.ones(2), sites=["slope"], max_seconds=1.0,
        **QUICK | {"num_simulations": 10**6},
    )  # fmt: skip
    assert 100 <= found.num_simulations < 10**6


def test_simulations_replay_the_model():
    simulator = Simulator(nuisance, (torch.ones(2),), {}, ["slope"])
    torch.manual_seed(0)
    trace = simulation_trace(nuisance, (torch.ones(2),), {})
    torch.manual_seed(0)
    assert torch.equal(simulator._latent(trace), trace.nodes["slope"]["value"])
    assert simulator.columns == ["y[0]", "y[1]"]


def far(y):
    """The posterior of a is N(y / (1 + s), 1 / (1 / 4 + 1 / 0.2^2)), s = 0.01; b is in (0, 10)."""
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Uniform(0.0, 10.0))
    pyro.sample("y", Sampled(lambda: torch.stack([a, b]) + 0.2 * torch.randn(2), (2,)), obs=y)


@pytest.fixture(scope="module")
def sequential():
    return fit_simulator(far, torch.tensor([3.0, 8.0]), rounds=2, num_simulations=1200, **SINGLE)


def test_rounds_reach_the_closed_form(sequential):
    assert [stage.name for stage in sequential.stages] == ["simulate", "posterior"] * 2 + ["ratio"]
    assert sequential.num_simulations == 1200 and 600 < len(sequential._proposal) < 900
    draws = sequential.sample(8000)
    for name, mean in (("a", 3 / 1.01), ("b", 8.0)):
        low, middle, high = draws[name].quantile(torch.tensor([0.159, 0.5, 0.841])).tolist()
        assert middle == pytest.approx(mean, abs=0.1)
        # With simulations at draws of the posterior, 0.2 / sqrt(2).
        assert (high - low) / 2 == pytest.approx(0.2, abs=0.04)
    assert sequential.diagnose(seed=1).accuracy < 0.6  # with draws of the prior, near 1


def test_proposals_are_draws_of_the_prior_in_a_region():
    y = torch.tensor([0.5, 5.0])
    options = {"policy": SimulatorPolicy(num_networks=1, num_steps=1, tail=0.3)}
    found = fit_simulator(far, y, rounds=2, **QUICK | options | {"num_simulations": 400})
    torch.manual_seed(0)
    proposals, is_inside = found._propose(8_000)
    assert is_inside(proposals).all()
    uniform = torch.rand(60_000, 2)
    exact = torch.stack([2 * torch.special.ndtri(uniform[:, 0]), uniform[:, 1].logit()], -1)
    exact = exact[is_inside(exact)]
    assert 0.1 < len(exact) / 60_000 < 0.9
    torch.testing.assert_close(proposals.mean(0), exact.mean(0), rtol=0, atol=0.05)
    torch.testing.assert_close(proposals.T.cov(), exact.T.cov(), rtol=0.06, atol=0.05)


def test_the_log_density_of_the_prior_in_unconstrained_space():
    def model(y):
        with pyro.plate("rows", 3):
            p = pyro.sample("p", dist.Beta(2.0, 3.0))
        m = pyro.sample("m", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(p.sum() + m.sum(), 1.0), obs=y)

    simulator = Simulator(model, (torch.tensor(1.0),), {}, None)
    latent = torch.randn(4, 5)
    p = latent[:, :3].sigmoid()
    beta = dist.Beta(2.0, 3.0).log_prob(p) + p.log() + (1 - p).log()
    normal = dist.Normal(0.0, 1.0).log_prob(latent[:, 3:])
    torch.testing.assert_close(simulator.log_prior(latent), beta.sum(-1) + normal.sum(-1))


def test_rounds_refuse_other_data_and_dependent_priors(sequential, tmp_path):
    def nested(y):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        one(pyro.sample("x", dist.Normal(0.0, scale)), y)

    with pytest.raises(ValueError, match=r"prior of latent 'x' depends.*Cure: rounds=1, or"):
        fit_simulator(nested, torch.tensor(1.0), rounds=2, **QUICK | {"num_simulations": 200})
    with pytest.raises(ValueError, match="num_simulations must be at least 200"):
        fit_simulator(far, torch.ones(2), rounds=2, **QUICK)
    sequential.save(tmp_path / "fit.pt")
    loaded = SimulatorFit.load(tmp_path / "fit.pt", far, torch.tensor([3.0, 8.0]))
    accuracies = []
    for found in (sequential, loaded):
        with pytest.raises(ValueError, match="one data set only. Cure: rounds=1"):
            found.sample(5, torch.tensor([3.0, 7.9]))
        accuracies.append(found.diagnose(num_simulations=100, seed=1).accuracy)
    assert accuracies[0] == accuracies[1]


def test_save_and_load(fitted, tmp_path):
    file, other = tmp_path / "fit.pt", torch.tensor([0.3, -0.2])
    fitted.save(file)
    before = torch.get_rng_state()
    loaded = SimulatorFit.load(file, nuisance, torch.tensor([1.0, 1.5]))
    assert torch.equal(torch.get_rng_state(), before)
    with pyro_seed(1):
        draws = fitted.sample(50, other)["slope"]
    with pyro_seed(1):
        assert torch.equal(loaded.sample(50, other)["slope"], draws)
    assert str(loaded) == str(fitted) and loaded.policy == fitted.policy
    assert loaded.diagnose(num_simulations=200, seed=1).verdict == "check"
    assert loaded.diagnose(torch.tensor([99.0, 0.0]), num_simulations=200, seed=1).outside
    torch.load(file, weights_only=True)  # no code


def test_files_of_other_simulators_are_refused(tmp_path):
    def model(y):
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x.sum(), 0.1).expand(y.shape).to_event(1), obs=y)

    fit_simulator(model, torch.zeros(3), **QUICK).save(tmp_path / "fit.pt")
    with pytest.raises(ValueError, match=r"'y': \[3\].*'y': \[4\].*Cure: the simulator"):
        SimulatorFit.load(tmp_path / "fit.pt", model, torch.zeros(4))
    with pytest.raises(ValueError, match="sites names 'x'"):
        SimulatorFit.load(tmp_path / "fit.pt", nuisance, torch.zeros(2))


def test_subsampled_models_are_refused():
    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 10, subsample_size=2) as index:
            pyro.sample("y", dist.Normal(w, 1.0), obs=y[index])

    with pytest.raises(ValueError, match="a simulation needs all data, but plate 'rows'"):
        fit_simulator(model, torch.zeros(10), num_simulations=100, progress=False)


@pytest.mark.parametrize("how", ["mask", "poutine.mask", "scale"])
def test_masks_and_scales_of_data_are_refused(how: str) -> None:
    """They act on densities, and a simulator has none: all data would count in full."""
    seen = torch.tensor([True, True, False])
    handlers = {"poutine.mask": poutine.mask(mask=seen), "scale": poutine.scale(scale=0.5)}

    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 3), handlers.get(how, contextlib.nullcontext()):
            fn = dist.Normal(w, 1.0)
            pyro.sample("y", fn.mask(seen) if how == "mask" else fn, obs=y)

    what = "scaled" if how == "scale" else "masked"
    with pytest.raises(ValueError, match=f"site 'y' is {what}, but no density of the data is used"):
        fit_simulator(model, torch.zeros(3), num_simulations=100, progress=False)
