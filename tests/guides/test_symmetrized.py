# SPDX-License-Identifier: Apache-2.0
"""Symmetrised guides, beside averages that can be written out."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoNormal
from torch.distributions import MultivariateNormal, Normal

from pyro_implicit import (
    KIVI_ELBO,
    LIVI_ELBO,
    AutoImplicit,
    AutoregressiveGenerator,
    AutoSemiImplicit,
    InjectiveELBO,
    diagnose,
    evidence_bound,
    refine,
)
from pyro_implicit.guides import Permutations, StoredDraws, Symmetrized, Translations

UNITS = {"w": -1, "v": -1}
Y = torch.tensor([0.3, -0.2])


def two_units(y: torch.Tensor = Y) -> None:
    """A network of two hidden units, and a weight that belongs to neither."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    v = pyro.sample("v", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    mean = (v * torch.tanh(w * torch.tensor([[1.0], [-0.5]]))).sum(-1) + b
    with pyro.plate("rows", 2):
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


LOC = {"w": torch.tensor([0.4, 0.0]), "v": torch.tensor([0.2, 0.7]), "b": torch.tensor(0.0)}
SD = {"w": torch.tensor([0.4, 0.5]), "v": torch.tensor([0.3, 0.4]), "b": torch.tensor(0.3)}


def by_hand(y: torch.Tensor = Y) -> None:
    for name, loc in LOC.items():
        pyro.sample(name, dist.Normal(loc, SD[name]).to_event(loc.dim()))


def log_density(draws: dict[str, torch.Tensor]) -> torch.Tensor:
    parts = [Normal(LOC[name], SD[name]).log_prob(value) for name, value in draws.items()]
    return sum(part.reshape(len(part), -1).sum(-1) for part in parts)


def swapped(draws: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.flip(-1) if name in UNITS else value for name, value in draws.items()}


@pytest.fixture
def double() -> None:
    torch.set_default_dtype(torch.float64)


def test_the_gap_is_that_of_the_average_over_both_orders() -> None:
    draws = {name: loc + SD[name] * torch.randn(20_000, *loc.shape) for name, loc in LOC.items()}
    both = torch.stack([log_density(draws), log_density(swapped(draws))])
    exact = (both[0] - both.logsumexp(0) + math.log(2)).mean().item()
    assert 0.2 < exact < math.log(2) - 0.2  # else there was nothing to find out
    guide = Symmetrized(by_hand, Permutations(UNITS), num_samples=4000)
    found = guide.gap(num_samples=4000)
    assert found.bound == pytest.approx(math.log(2))
    error = 4 * found.standard_error
    assert exact - 0.03 - error < found.value < exact + error
    bound = evidence_bound(two_units, guide, num_samples=4000, chunk_size=4000)
    alone = evidence_bound(two_units, by_hand, num_samples=4000, chunk_size=4000)
    error = 4 * math.hypot(bound.standard_error, alone.standard_error)
    assert bound.value - alone.value == pytest.approx(exact, abs=0.03 + error)


@pytest.mark.usefixtures("double")
def test_information_of_translations_is_that_of_the_convolution() -> None:
    inputs = torch.randn(2, 4)
    group = Translations("w", inputs, scale=0.7, tolerance=0.1)
    loc, sd = torch.randn(3, 4), 0.2 + torch.rand(3, 4)
    others = {"w": torch.stack([loc + sd / math.sqrt(2), loc - sd / math.sqrt(2)])}  # sd by n - 1
    draws = {"w": loc + sd * torch.randn(5, 3, 4)}
    maps = group.sample(draws)
    moved = group.move(maps, draws)
    found = group.information(maps, moved, others)
    delta = 0.1**2 * inputs.square().sum() / 2
    projection = torch.linalg.inv(torch.eye(4) + inputs.T @ inputs / delta)
    torch.testing.assert_close(moved["w"], draws["w"] + 0.7 * maps @ projection)
    log_q = Normal(loc, sd).log_prob(draws["w"]).sum((-1, -2))
    covariance = sd.square().diag_embed() + 0.49 * projection @ projection
    exact = MultivariateNormal(loc, covariance).log_prob(moved["w"]).sum(-1)
    torch.testing.assert_close(log_q - found, exact)
    seen = ((moved["w"] - draws["w"]) @ inputs.T).std()
    assert seen < 0.05 * inputs.norm() < 0.5 * (moved["w"] - draws["w"]).norm()


@pytest.mark.usefixtures("double")
def test_translations_make_the_mean_field_of_a_sum_the_posterior() -> None:
    y, size, noise_sd = torch.tensor(0.8), 6, 0.2

    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, size**-0.5).expand([size]).to_event(1))
        pyro.sample("y", dist.Normal(w.sum(), noise_sd), obs=y)

    posterior_sd = math.sqrt(noise_sd**2 / (1 + noise_sd**2) / size)

    def mean_field() -> None:
        mean = y / (1 + noise_sd**2) / size * torch.ones(size)
        pyro.sample("w", dist.Normal(mean, posterior_sd).to_event(1))

    width = math.sqrt(1 / size - posterior_sd**2)
    group = Translations("w", torch.ones(1, size), scale=width, tolerance=1e-4)
    guide = Symmetrized(mean_field, group, num_samples=10_000)
    bound = evidence_bound(model, guide, num_samples=100, chunk_size=100)
    evidence = Normal(0.0, math.sqrt(1 + noise_sd**2)).log_prob(y).item()
    assert bound.value == pytest.approx(evidence, abs=0.01)
    assert evidence_bound(model, mean_field, num_samples=100).value < evidence - 2


CASES = {
    "AutoNormal": (AutoNormal, lambda: Trace_ELBO(2, vectorize_particles=True)),
    "AutoDiagonalNormal": (AutoDiagonalNormal, Trace_ELBO),
    "LIVI": (lambda model: AutoSemiImplicit(model, frame=None), lambda: LIVI_ELBO(2)),
    "injective": (
        lambda model: AutoImplicit(model, AutoregressiveGenerator, frame=None),
        lambda: InjectiveELBO(2),
    ),
    "by hand": (lambda model: by_hand, lambda: Trace_ELBO(2, vectorize_particles=True)),
}


def symmetrized(guide) -> Symmetrized:
    inputs = torch.tensor([[1.0, 1.0]])
    shifted = Symmetrized(guide, Translations("v", inputs, 0.5), num_samples=50)
    return Symmetrized(shifted, Permutations(UNITS), num_samples=50)


@pytest.mark.parametrize("case", CASES)
def test_it_is_a_guide_like_any_other(case) -> None:
    make, elbo = CASES[case]
    guide = symmetrized(make(two_units))
    svi = SVI(two_units, guide, pyro.optim.Adam({"lr": 0.01}), elbo())
    before = guide.guide.group.scale.item()
    assert all(math.isfinite(svi.step(Y)) for _ in range(2))
    assert guide.guide.group.scale.item() != before  # it is trained as well
    pyro.set_rng_seed(1)
    first = guide(Y)
    assert {name: tuple(value.shape) for name, value in first.items()} == {
        "w": (2,), "v": (2,), "b": ()
    }  # fmt: skip
    pyro.set_rng_seed(1)
    assert all((value == first[name]).all() for name, value in guide(Y).items())
    assert Predictive(two_units, guide=guide, num_samples=3)()["y"].shape == (3, 2)
    bound = evidence_bound(two_units, guide, Y, num_samples=25, num_starts=1, num_steps=5)
    assert math.isfinite(bound.value)
    if case == "by hand":
        return
    pyro.clear_param_store()
    fresh = symmetrized(make(two_units))
    fresh(Y)
    fresh.load_state_dict(guide.state_dict())
    pyro.set_rng_seed(1)
    assert all((value == first[name]).all() for name, value in fresh(Y).items())


def test_the_order_of_units_is_random_and_the_values_are_the_guides() -> None:
    guide = Symmetrized(by_hand, Permutations(UNITS), num_samples=10)
    draws = guide.sample_posterior(4000)
    assert set(draws) == {"w", "v", "b"}
    assert (draws["w"].mean(0) - LOC["w"].mean()).abs().max() < 0.05
    assert (draws["w"].sum(-1).std() - SD["w"].norm()).abs() < 0.05
    # Units stay together: the first belongs to the smaller v.
    assert torch.corrcoef(torch.stack([draws["w"][:, 0], draws["v"][:, 0]]))[0, 1] < -0.15


@pytest.mark.parametrize("make", [lambda model: by_hand, AutoNormal], ids=["by hand", "autoguide"])
def test_medians_and_quantiles(make) -> None:
    guide = symmetrized(make(two_units))
    levels, median = guide.quantiles([0.1, 0.9], Y), guide.median(Y)
    state = torch.get_rng_state()
    assert {name: tuple(value.shape) for name, value in median.items()} == {
        "w": (2,), "v": (2,), "b": ()
    }  # fmt: skip
    for name, value in guide.median(Y, num_samples=1000).items():
        assert torch.equal(value, median[name])
        assert ((levels[name][0] < value) & (value < levels[name][1])).all()
    assert torch.equal(torch.get_rng_state(), state)


def test_sites_in_a_plate_of_units() -> None:
    def model() -> None:
        with pyro.plate("units", 3, dim=-1):
            w = pyro.sample("w", dist.LogNormal(0.0, 1.0))
        pyro.sample("y", dist.Normal(w.sum(), 0.1), obs=torch.tensor(3.0))

    guide = Symmetrized(AutoNormal(model), Permutations({"w": -1}), num_samples=50)
    elbo = Trace_ELBO(4, vectorize_particles=True, max_plate_nesting=1)
    pyro.set_rng_seed(0)
    assert math.isfinite(SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), elbo).step())
    trace = poutine.trace(guide).get_trace()
    assert [frame.name for frame in trace.nodes["w"]["cond_indep_stack"]] == ["units"]
    assert (guide.quantiles([0.01, 0.5])["w"] > 0).all()
    inside = trace.nodes["w"]["fn"].log_density.sum()  # of the transform to positive numbers
    torch.testing.assert_close(inside, -trace.nodes["w"]["value"].log().sum())


def test_chains_and_diagnoses_begin_with_it() -> None:
    guide = Symmetrized(AutoNormal(two_units), Permutations(UNITS), num_samples=50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = refine(two_units, guide, Y, num_chains=8, max_gradients=20, seed=0, progress=False)
    assert result.get_samples()["w"].shape[-1] == 2
    report = diagnose(
        two_units, guide, Y, num_samples=100, modes=None, num_transitions=0, progress=False
    )
    assert report.bound is not None and not report.broken


@pytest.mark.parametrize(
    "group, message",
    [
        (Permutations({"u": -1}), "'u'.*Cure"),
        (Permutations({"w": 0}), "from the right"),
        (Translations("v", torch.ones(1, 3), 1.0), "'v'.*Cure"),
        (Translations("u", torch.ones(1, 3), 1.0), "'u'.*Cure"),
    ],
)
def test_groups_that_do_not_fit_are_refused(group, message) -> None:
    with pytest.raises(ValueError, match=message):
        Symmetrized(by_hand, group)()


def test_what_has_no_density_is_refused() -> None:
    group = Permutations(UNITS)
    draws = {name: value.expand(5, *value.shape) for name, value in LOC.items()}
    for guide in (AutoDelta(two_units), StoredDraws(draws)):
        with pytest.raises(ValueError, match="points or stored draws.*Cure"):
            Symmetrized(guide, group)()
    with pytest.raises(ValueError, match="num_samples"):
        Symmetrized(by_hand, group, num_samples=1)
    with pytest.raises(ValueError, match="scale"):
        Translations("v", Y, 0.0)
    implicit = Symmetrized(AutoSemiImplicit(two_units, frame=None), group, num_samples=10)
    svi = SVI(two_units, implicit, pyro.optim.Adam({"lr": 0.01}), KIVI_ELBO(4, contrast="prior"))
    with pytest.raises(ValueError, match="'w, before a map of its group'"):
        svi.step(Y)
    with pytest.raises(ValueError, match="LIVI_ELBO"):
        Trace_ELBO().loss(two_units, implicit, Y)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda guide: pickle.loads(pickle.dumps(guide))]
)
def test_copies_draw_as_the_original(duplicate):
    guide = Symmetrized(AutoNormal(two_units), Permutations(UNITS))
    duplicate(guide)  # before the first call
    guide()
    draws = []
    for each in (guide, duplicate(guide)):
        pyro.set_rng_seed(0)
        draws.append(each.sample_posterior(3)["w"])
    assert draws[0].equal(draws[1])
    assert guide.guide.model is not None
