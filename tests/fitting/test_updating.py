# SPDX-License-Identifier: Apache-2.0
"""Posteriors as priors."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal, biject_to

from pyro_implicit import LIVI_ELBO, AutoSemiImplicit, fit
from pyro_implicit.density import Target
from pyro_implicit.fitting import (
    ChoicePolicy,
    Fit,
    FitPolicy,
    JointPrior,
    UpdatePolicy,
    log_evidence,
    posterior_as_prior,
    updating,
)
from pyro_implicit.fitting.policy import HierarchyPolicy
from pyro_implicit.fitting.updating import log_prob_of, normal_mixture
from pyro_implicit.guides import StoredDraws
from pyro_implicit.guides.auto_draws import own_names
from pyro_implicit.guides.posterior_draws import draw
from pyro_implicit.ops import LogWeights


def model(y: Tensor) -> None:
    """Sites of each kind: a scale, a vector event, a plate of its own, and rows of the data."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0).expand(()))
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("groups", 3):
        group = pyro.sample("group", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        own = pyro.sample("own", dist.Normal(slope.sum(-1), 1.0))
        loc = own + group.sum(-1, keepdim=True)
        pyro.sample("y", dist.Normal(loc, scale), obs=y)


def earlier(num: int = 2_000) -> dict[str, Tensor]:
    shared = torch.randn(num)
    return {
        "scale": (0.1 * torch.randn(num) + 0.5 * shared).exp(),
        "slope": torch.randn(num, 2) + shared.unsqueeze(-1),
        "group": torch.randn(num, 3).exp(),
        "own": torch.randn(num, 4),
    }


def test_the_density_is_that_of_the_mixture() -> None:
    torch.set_default_dtype(torch.float64)
    y = torch.zeros(4)
    prior = posterior_as_prior(earlier(), model, y)
    assert list(prior.shapes) == ["scale", "slope", "group"]  # "own" belongs to the rows
    values = {"scale": torch.tensor(0.7), "slope": torch.tensor([0.3, -1.0])}
    values["group"] = torch.tensor([0.2, 1.0, 3.0])
    values["own"] = torch.randn(4)
    trace = poutine.trace(poutine.condition(prior(model), values)).get_trace(y)
    mixture = prior.density
    logs = torch.cat([values["scale"].log()[None], values["slope"], values["group"].log()])
    parts = dist.MultivariateNormal(
        mixture.component_distribution.loc,
        covariance_matrix=mixture.component_distribution.covariance_matrix,
    ).log_prob(logs)
    expected = torch.logsumexp(parts + mixture.mixture_distribution.probs.log(), 0)
    expected = expected - logs[0] - logs[3:].sum()  # d log(x) / dx
    own = dist.Normal(values["slope"].sum(), 1.0).log_prob(values["own"]).sum()
    likelihood = dist.Normal(values["own"] + values["group"].sum(), 0.7).log_prob(y).sum()
    total = expected + own + likelihood
    torch.testing.assert_close(torch.as_tensor(trace.log_prob_sum()), total)


def test_it_has_the_moments_of_the_draws() -> None:
    torch.set_default_dtype(torch.float64)
    draws = earlier(5_000)
    prior = posterior_as_prior(draws, model, torch.zeros(4))
    new = prior.sample(20_000)
    one, other = (
        torch.cat([d["scale"].log()[:, None], d["slope"], d["group"].log()], -1)
        for d in (draws, new)
    )
    torch.testing.assert_close(other.mean(0), one.mean(0), atol=0.06, rtol=0)
    torch.testing.assert_close(other.T.cov(), one.T.cov(), atol=0.08, rtol=0)


def test_a_skewed_and_a_bimodal_posterior_need_several_normals() -> None:
    y = torch.zeros(1)

    def one(y: Tensor) -> None:
        pyro.sample("x", dist.Normal(0.0, 1.0))

    signs = torch.randint(2, (4_000,)) * 8.0 - 4.0
    prior = posterior_as_prior({"x": signs + torch.randn(4_000)}, one, y)
    assert "normals for x" in repr(prior)
    assert abs((prior.sample(4_000)["x"] > 0).float().mean() - (signs > 0).float().mean()) < 0.04
    assert repr(posterior_as_prior({"x": torch.randn(4_000)}, one, y)).startswith("a normal")


def test_particles_have_joint_draws_and_their_own_densities() -> None:
    """Vectorised ones give the same estimate as one after another."""
    y = torch.zeros(4)
    updated = posterior_as_prior(earlier(), model, y)(model)
    guide = AutoNormal(updated)
    elbo = Trace_ELBO(num_particles=100, vectorize_particles=True, max_plate_nesting=1)
    guide(y)
    pyro.set_rng_seed(1)
    value = elbo.loss(updated, guide, y)
    pyro.set_rng_seed(2)
    other = Trace_ELBO(num_particles=100).loss(updated, guide, y)
    spread = torch.tensor([Trace_ELBO().loss(updated, guide, y) for _ in range(50)]).std()
    assert abs(value - other) < 5 * spread * math.sqrt(2 / 100)


def test_draws_of_all_sites_are_joint() -> None:
    y = torch.zeros(4)
    prior = posterior_as_prior(earlier(), model, y)
    drawn = Predictive(prior(model), num_samples=2_000, parallel=True)(y)
    shared = torch.stack([drawn["scale"].log().flatten(), *drawn["slope"].flatten(1).T])
    assert shared.corrcoef()[0, 1] > 0.5
    one_by_one = Predictive(prior(model), num_samples=300)(y)
    assert one_by_one["group"].flatten(1).shape == (300, 3)


def test_it_is_a_pyro_model() -> None:
    y = torch.zeros(4)
    updated = posterior_as_prior(earlier(), model, y)(model)
    copy.deepcopy(AutoNormal(updated))
    svi = SVI(updated, AutoSemiImplicit(updated), Adam({"lr": 0.01}), LIVI_ELBO(4))
    assert all(math.isfinite(svi.step(y)) for _ in range(3))
    target = Target(updated, y)
    points = torch.randn(5, target.latent_dim)
    alone = torch.cat([target.log_prob(point[None]) for point in points])
    torch.testing.assert_close(target.log_prob(points), alone, atol=1e-4, rtol=1e-4)
    mcmc = MCMC(NUTS(updated), num_samples=5, warmup_steps=5, disable_progbar=True)
    mcmc.run(y)
    assert mcmc.get_samples()["slope"].shape == (5, 2)


def conjugate(y: Tensor) -> None:
    x = pyro.sample("x", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def test_the_prior_matches_the_log_density_and_not_only_the_draws() -> None:
    torch.set_default_dtype(torch.float64)
    truth = dist.Normal(3.0, 0.5)
    draws = {"x": truth.sample((200,))}
    supports = {"x": dist.constraints.real}
    prior = JointPrior.of_draws(
        draws, supports, log_prob=lambda values: truth.log_prob(values["x"])
    )
    points = torch.linspace(1.0, 5.0, 9).unsqueeze(-1)
    found = prior.density.log_prob(points)
    torch.testing.assert_close(found, truth.log_prob(points[:, 0]), atol=1e-4, rtol=1e-4)


def schools(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = pyro.sample("spread", dist.HalfNormal(5.0))
    with pyro.plate("schools", len(y)):
        effect = pyro.sample("effect", dist.Normal(mean, spread))
        pyro.sample("y", dist.Normal(effect, 2.0), obs=y)


def counts(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Gamma(2.0, 1.0))
    spread = pyro.sample("spread", dist.HalfNormal(5.0))
    with pyro.plate("rows", len(y)):
        rate = pyro.sample("rate", dist.Gamma(mean, spread))
        pyro.sample("y", dist.Poisson(rate), obs=y)


@pytest.mark.parametrize("model", [schools, counts])
def test_latents_of_groups_are_integrated_out_of_the_density(model: Callable) -> None:
    y = torch.tensor([3.0, 0.0, 7.0, 4.0])
    draws = {"mean": 0.5 + torch.rand(100), "spread": 0.3 + torch.rand(100)}
    found = Fit(guide=StoredDraws(draws), source=(model, (y,), {}))
    mean, spread = (value.double() for value in draws.values())
    prior = dist.HalfNormal(5.0).log_prob(spread)
    if model is schools:
        of_rows = dist.Normal(mean, (spread**2 + 4).sqrt())
        prior = prior + dist.Normal(0.0, 5.0).log_prob(mean)
    else:
        of_rows = dist.GammaPoisson(mean, spread)
        prior = prior + dist.Gamma(2.0, 1.0).log_prob(mean)
    expected = of_rows.log_prob(y.double().unsqueeze(-1)).sum(0) + prior
    log_prob = log_prob_of(found, draws.keys())
    torch.testing.assert_close(log_prob(draws).double(), expected, atol=0.02, rtol=1e-4)
    assert log_prob_of(found, ["mean"]) is None
    found.policy = FitPolicy(hierarchy=HierarchyPolicy(max_shift=0.0))  # no number suffices
    assert log_prob_of(found, draws.keys()) is None


def test_latents_that_share_data_have_no_known_density() -> None:
    def coupled(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
        with pyro.plate("rows", 3):
            effect = pyro.sample("effect", dist.Normal(mean, 1.0))
        pyro.sample("y", dist.Normal(effect.sum(-1), 1.0), obs=y)

    result = Fit(
        guide=StoredDraws({"mean": torch.zeros(3)}), source=(coupled, (torch.ones(()),), {})
    )
    assert log_prob_of(result, ["mean"]) is None


def test_a_scale_that_underflows_is_rejected(monkeypatch) -> None:
    step = torch.optim.LBFGS.step

    def collapsing(self, closure):
        step(self, closure)
        self.param_groups[0]["params"][1].data[1].diagonal().sub_(200.0)  # of the component at 50

    monkeypatch.setattr(torch.optim.LBFGS, "step", collapsing)
    normals = MultivariateNormal(torch.tensor([[0.2], [50.0]]), scale_tril=torch.ones(2, 1, 1))
    start = MixtureSameFamily(Categorical(torch.tensor([1.0, 1e-12])), normals)
    log_prob = dist.Normal(torch.zeros(1), 1.0).to_event(1).log_prob
    found, _ = updating._matched(start, torch.randn(1000, 1), log_prob, UpdatePolicy())
    assert found is start


def test_more_normals_are_tried_after_a_number_that_does_not_help(monkeypatch) -> None:
    faults = {1: 0.5, 2: 0.6, 4: 0.01, 8: 0.02}

    def matched(start: MixtureSameFamily, *_: object) -> tuple[MixtureSameFamily, float]:
        return start, faults[len(start.mixture_distribution.probs)]

    monkeypatch.setattr(updating, "_matched", matched)
    policy = UpdatePolicy(components=(2, 4, 8))
    found = normal_mixture(torch.randn(200, 1), policy, lambda at: -at.square().sum(-1))
    assert len(found.mixture_distribution.probs) == 4


def test_the_seed_governs_the_prior_and_leaves_the_callers_stream() -> None:
    y = torch.tensor([1.0, 2.0])
    first = Fit(guide=StoredDraws({"x": torch.randn(100)}), source=(conjugate, (y,), {}))
    before = torch.get_rng_state()
    results = [first.update(conjugate, y, seed=5, progress=False) for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    means = [one.prior.density.component_distribution.loc for one in results]
    assert torch.equal(means[0], means[1])


def test_update_has_the_options_of_fit_and_their_defaults() -> None:
    options, own = (inspect.signature(one).parameters for one in (fit, Fit.update))
    assert options.keys() - own.keys() == {"guide", "loss", "teach", "kwargs"}
    shared = options.keys() & own.keys()
    assert [own[one].default for one in shared] == [options[one].default for one in shared]


def test_new_data_without_rows_are_named() -> None:
    first = Fit(guide=StoredDraws({"x": torch.randn(100)}), source=(conjugate, (), {}))
    with pytest.raises(ValueError, match="argument 1 has no rows.*Cure: data of at least one row"):
        first.update(conjugate, torch.zeros(0), progress=False)


def test_a_site_that_a_model_observes_has_no_joint_prior() -> None:
    prior = JointPrior.of_draws({"x": torch.randn(100)}, {"x": dist.constraints.real})

    def observed() -> None:
        pyro.sample("x", dist.Normal(0.0, 1.0), obs=torch.tensor(0.3))

    with pytest.raises(ValueError, match=r"did not sample \['x'\]"):
        poutine.trace(prior(observed)).get_trace()


def test_a_stream_ends_at_the_posterior_of_all_data(tmp_path: Path) -> None:
    y = torch.randn(40) + 1
    result = fit(conjugate, "auto", y[:10], seed=0, progress=False)
    for index in range(1, 4):
        batch = y[10 * index : 10 * index + 10]
        result = result.update(conjugate, batch, seed=index, progress=False)
    assert result.stages[0].name == "prior"
    assert "a normal distribution for x; " in result.stages[0].outcome
    draws = result.sample(10_000)["x"]
    precision = 0.25 + 40
    assert abs(draws.mean() - y.sum() / precision) < 0.05 / math.sqrt(precision)
    assert abs(draws.std() * math.sqrt(precision) - 1) < 0.05
    assert result.diagnose().verdict == "trust"

    # The file contains the prior, so that a loaded result has the posterior of all data.
    result.save(tmp_path / "result.pt")
    loaded = Fit.load(tmp_path / "result.pt", conjugate, y[30:])
    point = torch.zeros(1, 1)
    torch.testing.assert_close(loaded.target.log_prob(point), result.target.log_prob(point))


def test_small_shares_of_a_simplex_in_float32() -> None:
    """Torch's bijection cuts them off below 1e-7: the last share then had the mean 3e-8."""

    def model(counts: Tensor) -> None:
        p = pyro.sample("p", dist.Dirichlet(torch.full((3,), 0.5)))
        pyro.sample("counts", dist.Multinomial(int(counts.sum()), p), obs=counts)

    options, counts = {"seed": 0, "progress": False}, torch.tensor([3.0, 1.0, 0.0])
    once = dist.Dirichlet(0.5 + counts).sample(torch.Size((4_000,)))
    prior = posterior_as_prior({"p": once}, model, counts)
    twice = fit(prior(model), "auto", counts, **options)
    found, exact = twice.sample(4_000)["p"], dist.Dirichlet(0.5 + 2 * counts)
    sds = exact.variance.sqrt()
    assert ((found.mean(0) - exact.mean) / sds).abs().max() < 0.06
    assert (found.std(0) / sds - 1).abs().max() < 0.06
    logs = exact.sample(torch.Size((20_000,))).log()
    assert found.log().std(0).tolist() == pytest.approx(logs.std(0).tolist(), rel=0.1)


def test_new_data_may_come_in_minibatches() -> None:
    y = torch.randn(400) + 1

    def scaled(y: Tensor) -> None:
        x = pyro.sample("x", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", 200, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    loaders = [
        torch.utils.data.DataLoader(one, batch_size=50, shuffle=True) for one in y.split(200)
    ]
    options = {"seed": 0, "progress": False}
    first = fit(scaled, "auto", batches=loaders[0], **options)
    log_prob = log_prob_of(first, {"x"})
    assert log_prob is not None
    found = log_prob({"x": torch.tensor([0.9, 1.0])}).diff()
    expected = dist.Normal(torch.tensor([0.9, 1.0]), 1.0).log_prob(y[:200, None]).sum(0).diff()
    torch.testing.assert_close(found, expected - (1 - 0.81) / 8, atol=1e-3, rtol=0)
    second = first.update(scaled, batches=loaders[1], **options)
    draws = second.sample(4_000)["x"]
    precision = 0.25 + 400
    assert abs(draws.mean() - y.sum() / precision) < 0.06 / math.sqrt(precision)
    assert abs(draws.std() * math.sqrt(precision) - 1) < 0.05
    with pytest.raises(ValueError, match="no observed site is scaled"):
        first.update(conjugate, batches=loaders[1], **options)


def test_modes_that_the_new_data_exclude_are_named() -> None:
    def squared(y: Tensor) -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x.square(), 0.1), obs=y)

    def signed(y: Tensor) -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, 0.1), obs=y)

    result = fit(squared, "auto", torch.tensor(1.0), seed=0, progress=False)
    again = result.update(squared, torch.tensor(1.0), seed=0, progress=False)
    assert "before the new data" not in again.stages[0].outcome
    assert abs((again.sample(4_000)["x"] > 0).float().mean() - 0.5) < 0.05
    after = again.update(signed, torch.tensor(1.0), seed=0, progress=False)
    assert "2 modes before the new data, 1 now" in after.stages[0].outcome
    assert after.sample(1_000)["x"].min() > 0


def test_guides_and_chains_are_posteriors() -> None:
    y = torch.zeros(3)
    guide = own_names(AutoNormal(conjugate))
    guide(y)
    policy = UpdatePolicy(num_samples=500)
    assert posterior_as_prior(guide, conjugate, y, policy=policy).shapes == {"x": torch.Size()}
    mcmc = MCMC(NUTS(conjugate), num_samples=50, warmup_steps=20, disable_progbar=True)
    mcmc.run(y)
    assert posterior_as_prior(mcmc, conjugate, y).shapes == {"x": torch.Size()}


@pytest.mark.parametrize(
    ("draws", "sites", "message"),
    [
        ({"z": torch.randn(100)}, None, r"draws of \['z'\], and none of them"),
        ({"own": torch.randn(100, 4)}, None, "outside of the plates of its data"),
        ({"scale": torch.rand(100)}, ["slope"], "earlier posterior has no .* 'slope'"),
        ({"z": torch.rand(100)}, ["z"], "new model has no .* 'z'"),
        ({"group": torch.rand(100, 5)}, None, r"shape \(3,\) in the new model and \(5,\)"),
        ({"scale": torch.rand(3)}, None, "3 draws .* at least 4"),
        ({"scale": torch.randn(100)}, None, "site 'scale' .* outside of its support in the new"),
    ],
)
def test_errors_name_the_site(draws: dict, sites: list | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        posterior_as_prior(draws, model, torch.zeros(4), sites=sites)


def test_a_string_is_no_list_of_sites() -> None:
    with pytest.raises(TypeError, match=r"sites must be a list of names.*Cure: sites=\['scale'\]"):
        posterior_as_prior({"scale": torch.rand(9)}, model, torch.zeros(4), sites="scale")


def test_sites_of_one_model_only_are_named() -> None:
    y = torch.zeros(4)
    draws = {"scale": torch.rand(100), "own": torch.randn(100, 4), "old": torch.randn(100)}
    prior = posterior_as_prior(draws, model, y)
    found = "a normal distribution for scale; own prior of group, slope; the new model lacks old"
    assert repr(prior) == found


def test_another_model_is_refused_when_it_runs() -> None:
    prior = JointPrior.of_draws({"z": torch.randn(100)}, {"z": dist.constraints.real})
    with pytest.raises(ValueError, match=r"did not sample \['z'\]"):
        prior(conjugate)(torch.zeros(2))


def test_the_share_beyond_the_earlier_draws_is_that_of_smaller_densities() -> None:
    """The farthest of the earlier draws, in the normal's own units, is the bound."""
    normal = MultivariateNormal(torch.zeros(1), torch.eye(1))
    one = MixtureSameFamily(Categorical(torch.ones(1)), normal.expand([1]))
    prior = JointPrior(one, {"x": torch.Size([])}, {"x": biject_to(dist.constraints.positive)})
    values = torch.tensor([-2.5, -1.5, 0.0, 1.5, 3.0]).exp()
    points = prior.points({"x": values})
    torch.testing.assert_close(points, values.log().unsqueeze(-1))
    assert prior.share_beyond(points) == 0.0
    prior.least = normal.log_prob(torch.tensor([2.0])).item()
    assert prior.share_beyond(points) == 0.4
    draws = {"x": torch.randn(1_000).exp()}
    prior = JointPrior.of_draws(draws, {"x": dist.constraints.positive})
    assert prior.share_beyond(prior.points(draws)) == 0.0
    assert prior.share_beyond(12.0 + torch.randn(100, 1)) == 1.0


def test_weights_are_those_of_the_known_density() -> None:
    """Weights exp(d x - d^2 / 2) of draws from a standard normal have the share exp(-d^2)."""
    one = MixtureSameFamily(
        Categorical(torch.ones(1)), MultivariateNormal(torch.zeros(1, 1), torch.eye(1))
    )
    prior = JointPrior(one, {"x": torch.Size([])}, {"x": biject_to(dist.constraints.real)})
    points = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(0))
    truth = dist.Normal(0.5, 1.0)
    found = prior.weights(points, lambda values: truth.log_prob(values["x"]))
    torch.testing.assert_close(found.values, 0.5 * points[:, 0] - 0.125)
    assert abs(found.efficiency - math.exp(-0.25)) < 0.01


def test_weights_are_those_of_values_in_other_coordinates() -> None:
    """A result of ``fit`` may have other coordinates than the prior: 2 sinh(u), and turns."""
    torch.set_default_dtype(torch.float64)

    def model(y: Tensor) -> None:
        x = pyro.sample("x", dist.Cauchy(0.0, 2.0))
        angle = pyro.sample("angle", dist.VonMises(3.0, 0.1))
        pyro.sample("y", dist.Normal(x * angle.cos(), 1.0), obs=y)

    # The coordinates are those of the search; the quality of the draws does not matter.
    few = {"num_steps": 2, "refine": False, "policy": FitPolicy(choice=ChoicePolicy(100))}
    first = fit(model, "auto", torch.tensor(1.0), **few, seed=0, progress=False)
    assert first.tails.keys() == {"x"} and first.turns.keys() == {"angle"}
    values = {"x": torch.tensor([0.0, 40.0, -3.0]), "angle": torch.tensor([3.0, -3.1, 1.0])}
    expected = (
        dist.Cauchy(0.0, 2.0).log_prob(values["x"])
        + dist.VonMises(3.0, 0.1).log_prob(values["angle"])
        + dist.Normal(values["x"] * values["angle"].cos(), 1.0).log_prob(torch.tensor(1.0))
    )
    log_prob = log_prob_of(first, {"x", "angle"})
    assert log_prob is not None
    torch.testing.assert_close(log_prob(values), expected)


def test_a_prior_that_moves_keeps_its_constant() -> None:
    """Far from its first draws it still is the earlier density, which is known up to 7 nats."""
    torch.set_default_dtype(torch.float64)
    truth = dist.Gamma(5.0, 4.0)

    def log_prob(values: dict[str, Tensor]) -> Tensor:
        return 7.0 + truth.log_prob(values["rate"])

    supports = {"rate": dist.constraints.positive}
    policy = UpdatePolicy(num_matched=2_000)
    first = JointPrior.of_draws({"rate": truth.sample((2_000,))}, supports, policy, log_prob)
    assert first.offset == 0.0
    twice = first
    for center in (4.0, 6.0):  # the posterior's mean is 1.25, its standard deviation .56
        far = {"rate": center + 0.3 * torch.rand(2_000)}
        twice = twice.moved(far, log_prob, policy)
        found = twice.log_prob(far, {"rate": 0})
        torch.testing.assert_close(found, truth.log_prob(far["rate"]), atol=0.02, rtol=0.0)


def rates(y: Tensor) -> None:
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Poisson(rate), obs=y)


EARLIER = torch.tensor([1.0, 0.0, 2.0])


@pytest.fixture(scope="module")
def of_earlier() -> Fit:
    return fit(rates, "auto", EARLIER, seed=0, progress=False)


def test_the_prior_moves_to_data_that_disagree(of_earlier: Fit, tmp_path: Path) -> None:
    """The exact posterior is Gamma(2 + sum, 1 + rows); its evidence is known, too."""
    first, y = of_earlier, torch.cat([EARLIER, torch.tensor([9.0, 12.0, 10.0])])
    options = {"seed": 0, "progress": False, "checkpoint": tmp_path}
    second = first.update(rates, y[3:], **options)
    exact = dist.Gamma(2.0 + y.sum(), 1.0 + len(y))
    draws = second.sample(10_000)["rate"]
    assert abs(draws.mean() - exact.mean) < 0.05 * exact.stddev
    assert abs(draws.std() / exact.stddev - 1) < 0.05
    assert second.extrapolated < 0.01
    names = [stage.name for stage in second.stages]
    assert names.count("prior") > 1
    assert names.count("prior") == names.count("search")
    assert "moved: it was wrong for" in second.stages[names.index("prior", 1)].outcome
    assert (tmp_path / "moved-1").is_dir()
    before = dist.Gamma(2.0 + y[:3].sum(), 4.0)
    at = torch.tensor(5.0)  # Bayes' theorem at any rate
    likelihood = dist.Poisson(at).log_prob(y[3:]).sum()
    evidence = before.log_prob(at) + likelihood - exact.log_prob(at)
    assert abs(log_evidence(second).value - evidence) < 0.05


def test_moves_share_the_time_and_end_when_nothing_is_lost(of_earlier: Fit, monkeypatch) -> None:
    first = of_earlier
    limits, beyond = [], iter([1.0, 0.0, 0.0])
    # First of its own draws; beyond them, where the earlier density differs, and nothing is lost.
    found = iter([torch.zeros(9), torch.zeros(9), torch.arange(9.0), torch.zeros(9)])

    def fit_again(*args: object, max_seconds: float, **options: object) -> Fit:
        limits.append(max_seconds)
        return replace(first, stages=[])

    monkeypatch.setattr(Fit, "_fit", staticmethod(fit_again))
    monkeypatch.setattr(JointPrior, "share_beyond", lambda *args: next(beyond))
    monkeypatch.setattr(JointPrior, "weights", lambda *args: LogWeights(next(found)))
    result = first.update(rates, torch.ones(3), max_seconds=1_000.0)
    assert result.extrapolated == 0.0
    assert 1_000.0 > limits[0] > limits[1] > limits[2]


def test_data_that_disagree_with_the_earlier_ones_are_not_trusted(of_earlier: Fit) -> None:
    """The tail of a prior that must not move is a guess."""
    first = copy.copy(of_earlier)
    first.policy = replace(first.policy, update=UpdatePolicy(num_moves=0))
    near = first.update(rates, torch.tensor([1.0, 2.0]), seed=0, progress=False)
    assert near.extrapolated < 0.01 and near.diagnose().verdict == "trust"
    with pytest.warns(UserWarning, match="the new data disagree with the earlier ones: 1"):
        far = first.update(rates, torch.tensor([30.0, 36.0, 33.0]), seed=0, progress=False)
    found = far.diagnose()
    assert found.verdict == "do not trust"
    assert found.cures[0].startswith("one fit to the earlier and the new data")


def test_weights_of_the_earlier_density_correct_the_draws(of_earlier: Fit, monkeypatch) -> None:
    """A prior that is off and too wide; the exact posterior is a gamma density."""

    def coarse(points: Tensor, *args: object) -> MixtureSameFamily:
        mean, sd = points.mean(0), points.std(0)
        normal = MultivariateNormal((mean + 0.5 * sd)[None], scale_tril=torch.diag(1.3 * sd)[None])
        return MixtureSameFamily(Categorical(torch.ones(1)), normal)

    first, y = of_earlier, torch.cat([EARLIER, torch.tensor([0.0, 1.0])])
    monkeypatch.setattr(updating, "normal_mixture", coarse)
    second = first.update(rates, y[3:], seed=0, progress=False)
    assert second.stages[-1].name == "weigh" and second.refined is None
    exact = dist.Gamma(2.0 + y.sum(), 1.0 + len(y))
    draws, before = second.sample(5_000)["rate"], draw(second.unweighted, 5_000)["rate"]
    assert abs(draws.mean() - exact.mean) < 0.08 * exact.stddev < abs(before.mean() - exact.mean)
    assert abs(draws.std() / exact.stddev - 1) < 0.08 < abs(before.std() / exact.stddev - 1)
    assert second.draws.num_independent < 5_000
    assert second.extrapolated < 0.01 and second.diagnose().verdict == "trust"
    with pytest.raises(ValueError, match="weights of the earlier density have replaced the chains"):
        second.refine_more()


def test_a_prior_that_weights_cannot_correct_is_named(of_earlier: Fit, monkeypatch) -> None:
    """Draws of a prior that is much too narrow reach only a part of the earlier density."""

    def narrow(points: Tensor, *args: object) -> MixtureSameFamily:
        mean, sd = points.mean(0), points.std(0)
        normal = MultivariateNormal(mean[None], scale_tril=torch.diag(0.2 * sd)[None])
        return MixtureSameFamily(Categorical(torch.ones(1)), normal)

    monkeypatch.setattr(updating, "normal_mixture", narrow)
    with pytest.warns(UserWarning, match="mixture of normals that is the prior is too coarse"):
        second = of_earlier.update(rates, torch.ones(2), seed=0, progress=False)
    found = second.diagnose()
    assert found.verdict == "do not trust" and second.unweighted is None
    reasons = [finding for finding in found.findings if finding.reason.startswith("the mixture of")]
    assert [finding.cure for finding in reasons] == ["one fit to the earlier and the new data"]
    assert not any("disagree" in finding.reason for finding in found.findings)


def test_a_new_fit_has_the_policy_of_the_earlier_one_unless_another_is_given(
    of_earlier: Fit, monkeypatch
) -> None:
    first = copy.copy(of_earlier)
    first.policy = replace(first.policy, update=UpdatePolicy(num_samples=500, num_moves=0))
    policies = []

    def fit_again(*args: object, policy: FitPolicy, **options: object) -> Fit:
        policies.append(policy)
        return replace(first, stages=[])

    monkeypatch.setattr(Fit, "_fit", staticmethod(fit_again))
    given = replace(first.policy, hierarchy=HierarchyPolicy(max_shift=0.0))
    first.update(rates, torch.ones(3), seed=0, progress=False)
    first.update(rates, torch.ones(3), seed=0, progress=False, policy=given)
    assert policies == [first.policy, given] and policies[0] != FitPolicy()
