# SPDX-License-Identifier: Apache-2.0
"""``fit`` with latent variables that are integrated out: a random walk and its exact smoother."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from torch import Tensor

from pyro_implicit import fit
from pyro_implicit.density.marginal_normal import NormalMarginal
from pyro_implicit.density.modes import Modes
from pyro_implicit.density.policy import MARGINAL
from pyro_implicit.fitting import CorrectionPolicy, Fit, FitPolicy, auto, refinement
from pyro_implicit.fitting.candidates import (
    _JointDraws,
    exact_guide,
    exact_log_weights,
    joint_draws,
)

QUIET: dict[str, Any] = {"seed": 0, "progress": False}
SIZE = 110
RANDOM = torch.Generator().manual_seed(2)
Y = 0.3 * torch.randn(SIZE, generator=RANDOM).cumsum(0) + torch.randn(SIZE, generator=RANDOM)
FEW = Y[:24]
SOME = FitPolicy(marginal=replace(MARGINAL, least_latents=0))
#: The same with small budgets.
SMALL = replace(
    SOME,
    budget=replace(SOME.budget, most_gradients=200, least_gradients=200, patience=1),
    integration=replace(SOME.integration, num_samples=1024, weigh_seconds=1e-3, step_seconds=1e-4),
)


def walk(y: Tensor) -> None:
    scale = pyro.sample("scale", dist.LogNormal(-1.0, 0.5))
    with pyro.plate("time", len(y)):
        steps = pyro.sample("steps", dist.Normal(0.0, 1.0))
        level = pyro.deterministic("level", scale * steps.cumsum(-1))
        pyro.sample("y", dist.Normal(level, 1.0), obs=y)


@pytest.fixture(scope="module")
def result() -> Fit:
    return fit(walk, "auto", Y, **QUIET)


@functools.cache
def exact() -> dict[str, tuple[Tensor, Tensor]]:
    """Means and sds of scale and levels, on a grid of scales and by dense algebra."""
    scale = torch.linspace(-4.0, 2.0, 400).double().exp()
    time = torch.arange(1, SIZE + 1).double()
    prior = scale.square()[:, None, None] * torch.minimum(time, time.unsqueeze(-1))
    total = prior + torch.eye(SIZE)
    normal = torch.distributions.MultivariateNormal(torch.zeros(SIZE).double(), total)
    weight = normal.log_prob(Y.double()) + dist.Normal(-1.0, 0.5).log_prob(scale.log())
    weight = weight.softmax(0)
    gain = torch.linalg.solve(total, prior).mT
    mean = gain @ Y.double()
    variance = (prior - gain @ prior).diagonal(dim1=-2, dim2=-1)
    parts = {"scale": (scale, torch.zeros_like(scale)), "level": (mean, variance)}
    found = {}
    for name, (centre, spread) in parts.items():
        first = torch.tensordot(weight, centre, 1)
        second = torch.tensordot(weight, spread + centre.square(), 1)
        found[name] = first, (second - first.square()).sqrt()
    return found


def test_draws_agree_with_the_exact_smoother(result: Fit) -> None:
    """4,000 draws: five standard errors of means and standard deviations."""
    draws = result.sample(4000)
    draws["level"] = draws["scale"].unsqueeze(-1) * draws["steps"].cumsum(-1)
    for name, (mean, sd) in exact().items():
        error = ((draws[name].double().mean(0) - mean) / sd).abs().max()
        assert error < 5 / 4000**0.5, name
        assert (draws[name].double().std(0) / sd - 1).abs().max() < 5 / 8000**0.5, name


def test_stages_and_verdict(result: Fit) -> None:
    assert result.stages[0].outcome == "110 latent variables (steps) integrated out, 1 remain"
    assert [stage.name for stage in result.stages[-2:]] == ["draws", "teach"]
    assert result.refined is None and list(result.marginal.sample(3)) == ["scale"]
    found = result.diagnose()
    assert found.verdict == "trust", found
    # The guide has the moments of each variable.
    _, sd = exact()["scale"]
    low, high = result.guide.quantiles([0.1587, 0.8413])["scale"]
    assert (high - low).item() / 2 == pytest.approx(sd.item(), rel=0.15)


def test_seeds_files_and_exports(result: Fit, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    one, two = (fit(walk, "auto", FEW, policy=SMALL, **QUIET).draws.samples for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    result.save(tmp_path / "result.pt")
    loaded = Fit.load(tmp_path / "result.pt", walk, Y)
    for name, value in result.draws.samples.items():
        assert torch.equal(value, loaded.draws.samples[name])
    tree = loaded.to_datatree()
    assert tree["posterior"]["steps"].shape == (1, 2000, SIZE)
    predicted = Predictive(walk, guide=loaded.posterior, num_samples=3)(Y)
    assert predicted["level"].shape == (3, SIZE)


def test_new_data_with_the_exact_marginal_density_as_prior(result: Fit) -> None:
    new = result.update(walk, FEW, policy=SMALL, **QUIET)
    assert list(new.prior.shapes) == ["scale"]
    assert "k-hat" in new.stages[0].outcome or "even" in new.stages[0].outcome
    assert new.sample(5)["steps"].shape == (5, 24)


def test_uneven_weights_of_the_remaining_variables_are_doubts(
    result: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = result.marginal
    monkeypatch.setattr("pyro_implicit.fitting.policy.EVEN_EFFICIENCY", 2.0)
    limits = CorrectionPolicy(least_efficiency=2.0, near=2.0, agrees=2.0)
    strict = replace(inner.policy, correction=limits)
    for policy, is_settled in ((inner.policy, True), (strict, False)):
        marginal = inner.source[0].marginal
        draws, _ = joint_draws(replace(inner, policy=policy), marginal, 256)
        assert draws.settled == is_settled and bool(draws.doubts) != is_settled


def test_a_narrow_guide_of_the_remaining_variables_is_widened(result: Fit) -> None:
    """The Gaussian with the moments of the weighted draws replaces it: five standard errors."""
    inner = result.marginal
    mean, sd = inner.sample(4000)["scale"].log().mean(), inner.sample(4000)["scale"].log().std()
    modes = Modes(mean.reshape(1, 1), 0.3 * sd.reshape(1, 1, 1), torch.zeros(1))
    narrow = exact_guide(inner.target.model, modes, *inner.target.args)
    weights = exact_log_weights(inner.target, narrow, 512)[1]
    assert not inner.policy.correction.accepts(weights)
    draws, _ = joint_draws(replace(inner, guide=narrow), inner.source[0].marginal, 2048)
    assert draws.settled and not draws.doubts
    expected, spread = exact()["scale"]
    drawn = draws.samples["scale"].double()
    assert abs(drawn.mean() - expected) < 5 * spread / 2048**0.5
    assert abs(drawn.std() / spread - 1) < 5 / 4096**0.5
    # A scale that repeats has other steps.
    assert len(drawn.unique()) < 2000 and len(draws.samples["steps"][:, 0].unique()) > 2045


def test_chains_of_the_remaining_variables_go_on() -> None:
    # As many chains as by default, for draws that suffice after fewer gradients.
    budget = replace(SMALL.budget, least_chains=128, usual_chains=128, most_gradients=500)
    policy = replace(SMALL, budget=budget)
    chains = fit(walk, "auto", FEW, refine=True, policy=policy, **QUIET)
    assert chains.marginal.refined.settled
    longer = chains.refine_more(max_gradients=20, progress=False)
    assert longer.marginal.refined.num_gradients > chains.marginal.refined.num_gradients
    assert longer.stages[-1].name == "draws" and longer.draws is not chains.draws
    one, two = chains.sample(1000)["steps"], longer.sample(1000)["steps"]
    assert ((one.mean(0) - two.mean(0)) / one.std(0)).abs().max() < 6 * (2 / 1000) ** 0.5
    few = replace(policy.integration, num_stored=256 * chains.target.latent_dim, least_draws=1)
    limited = replace(chains, policy=replace(policy, integration=few))
    limited = limited.refine_more(max_gradients=20, progress=False)
    assert limited.draws.num_draws <= 256 < longer.draws.num_draws


def test_a_density_that_fails_the_check_is_fitted_as_before(monkeypatch: Any) -> None:
    """Some quadratic forms hold only where the search has looked."""
    draw = NormalMarginal.draw

    def faulty(self: NormalMarginal, rest: Tensor, scale: float = 1.0) -> Any:
        drawn, value, fault = draw(self, rest, scale)
        return drawn, value, fault + (0.5 if len(rest) > 99 else 0.0)

    monkeypatch.setattr(NormalMarginal, "draw", faulty)
    found = fit(walk, "auto", FEW, policy=SMALL, **QUIET)
    outcomes = [(stage.name, stage.outcome) for stage in found.stages]
    dropped = outcomes.index(("draws", "dropped: their log-density is off by 0.5 nats"))
    assert found.draws is None and outcomes[dropped + 1][0] == "search"


def test_time_that_chains_of_the_rest_cannot_use_is_left_to_those_of_all(monkeypatch: Any) -> None:
    search = auto._fit_by_search

    def uncorrected(*args: Any) -> Fit:
        found = search(*args)
        found.correction = found.refined = None
        return found

    monkeypatch.setattr(auto, "_fit_by_search", uncorrected)
    with pytest.warns(UserWarning, match="chains"):
        found = fit(walk, "auto", Y, max_seconds=2.0, **QUIET)
    dropped = [stage.name for stage in found.stages if "nothing corrects" in stage.outcome]
    assert len(dropped) == 1 and found.marginal is None
    assert found.chosen == "mean-field" and found.stages[-1].name == "refine"


def test_an_improper_series_is_refused_before_the_search() -> None:
    def model(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        real = dist.constraints.real
        with pyro.plate("time", len(y)):
            x = pyro.sample("x", dist.ImproperUniform(real, (), ()))
        pyro.factor("steps", -0.5 * (x.diff() / scale).square().sum(-1) - len(y) * scale.log())
        pyro.factor("data", -0.5 * (x.diff() - y[1:]).square().sum(-1))

    with pytest.raises(ValueError, match=r"improper: .* site 'x'"):
        fit(model, "auto", Y, **QUIET)


def test_infinite_curvature_falls_back() -> None:
    """A scale that underflows has no precision matrix at some values."""

    def model(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 200.0))
        with pyro.plate("rows", len(y)):
            x = pyro.sample("x", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    found = fit(model, "auto", FEW, policy=SMALL, **QUIET)
    assert math.isfinite(found.sample(100)["x"].abs().max())


def names_after_few_gradients(
    verdict: str, monkeypatch: pytest.MonkeyPatch, y: Tensor = FEW
) -> tuple[Fit, list]:
    """Fit few latent variables by chains that stop early, and return the stages' names, too."""
    monkeypatch.setattr(refinement, "judge_chains", lambda drift: verdict)
    # Patience would be lost: these chains have something else to follow.
    budget = replace(SMALL.budget, most_gradients=16, least_gradients=16)
    policy = FitPolicy(budget=budget, integration=SMALL.integration)
    found = fit(walk, "auto", y, policy=policy, **QUIET)
    names = [stage.name for stage in found.stages]
    assert "R-hat" in found.stages[names.index("refine")].outcome
    return found, names


@pytest.mark.parametrize(("verdict", "y"), [("check", FEW), ("do not trust", FEW[:10])])
def test_integration_replaces_chains_that_end_before_convergence(
    verdict: str, y: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the first attempt is left, nor its warning, which would be an error here."""
    found, names = names_after_few_gradients(verdict, monkeypatch, y)
    assert names.index("refine") < names.index("marginal") < names.index("draws")
    assert found.refined is None and found.correction is None and found.symmetries is None
    assert found.modes is None and not found.bounds and not found.losses
    assert found.marginal is not None and found.num_modes == 1


def test_chains_use_their_patience_if_integration_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "fit_marginal", lambda *args: False)
    with pytest.warns(UserWarning, match="before they converged"):
        found, names = names_after_few_gradients("check", monkeypatch)
    assert names.count("refine") == 2 and found.refined.num_gradients > 100


def test_chains_without_doubts_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    found, names = names_after_few_gradients("trust", monkeypatch)
    assert "marginal" not in names and found.refined is not None


def test_joint_draws_without_a_density_have_no_small_fault():
    """Otherwise they would pass their check."""

    def draw(rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rest, torch.tensor([-math.inf, 0.0, 0.0]), torch.tensor([9.0, 0.5, 0.7])

    joint = _JointDraws(None, SimpleNamespace(draw=draw, policy=MARGINAL))
    assert joint.max_fault == math.inf
    joint.draw(torch.zeros(3, 1))
    latent, faults = joint.take()
    assert latent.shape == (3, 1) and joint.max_fault == math.inf
    joint.keep(faults[:2])
    assert joint.max_fault == 0.5
    joint.keep(faults[2:])
    joint.keep(faults[:2])
    assert joint.max_fault == pytest.approx(0.7)


@pytest.mark.parametrize(("num_wrong", "is_left_out"), [(1, True), (2, False)])
def test_few_joint_draws_whose_density_is_wrong_get_no_weight(
    num_wrong: int, is_left_out: bool
) -> None:
    """More of them are no rounding at vanishing scales."""
    wrong = torch.arange(100) < num_wrong

    def draw(rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rest, torch.where(wrong, 1e30, -3.0), torch.where(wrong, 1e31, 0.0)

    joint = _JointDraws(None, SimpleNamespace(draw=draw, policy=MARGINAL))
    value = joint.draw(torch.zeros(100, 1))
    assert bool((value[wrong] == -math.inf).all()) == is_left_out
    assert (value[~wrong] == -3.0).all()
    assert (joint.take()[1][wrong] > 1e30).all()
