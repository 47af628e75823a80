# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import json
import re
from dataclasses import fields, replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from pyro_implicit import AutoImplicit
from pyro_implicit.diagnostics import (
    ComparePolicy,
    against_reference,
    compare,
    maximum_mean_discrepancy,
    sliced_wasserstein,
    sliced_wasserstein_floor,
)
from pyro_implicit.diagnostics.comparison import ReferenceCheck


def made_draws():
    torch.manual_seed(3)
    guide = {"a": torch.randn(300) * 2 + 1, "b": torch.randn(300, 2, 3), "extra": torch.zeros(300)}
    reference = {"b": torch.randn(200, 2, 3) * 1.5 - 1, "a": torch.randn(200), "c": torch.ones(200)}
    return (
        {name: value.double() for name, value in guide.items()},
        {name: value.double() for name, value in reference.items()},
    )


@functools.cache
def made_report():
    """Return draws and their report, which no test changes."""
    guide, reference = made_draws()
    return guide, reference, compare(None, guide, reference)


def test_marginals_against_numpy():
    guide, reference, report = made_report()
    assert set(report.sites) == {"a", "b"}
    for name, site in report.sites.items():
        x, y = guide[name].numpy(), reference[name].numpy()
        sd = y.std(axis=0, ddof=1)
        probs = [0.05, 0.25, 0.5, 0.75, 0.95]
        quantile_errors = (np.quantile(x, probs, axis=0) - np.quantile(y, probs, axis=0)) / sd
        for actual, expected in [
            (site.guide_mean, x.mean(axis=0)),
            (site.guide_sd, x.std(axis=0, ddof=1)),
            (site.reference_mean, y.mean(axis=0)),
            (site.reference_sd, sd),
            (site.mean_error, (x.mean(axis=0) - y.mean(axis=0)) / sd),
            (site.sd_ratio, x.std(axis=0, ddof=1) / sd),
            (site.quantile_errors, quantile_errors),
        ]:
            np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-10, atol=1e-12)


def test_joint_distances():
    guide, reference, report = made_report()
    x = torch.cat([guide["b"].reshape(300, 6), guide["a"][:, None]], dim=-1)
    y = torch.cat([reference["b"].reshape(200, 6), reference["a"][:, None]], dim=-1)
    x_standard, y_standard = ((v - y.mean(0)) / y.std(0) for v in (x, y))
    assert report.sliced_wasserstein_constrained == pytest.approx(sliced_wasserstein(x, y).item())
    standardised = sliced_wasserstein(x_standard, y_standard).item()
    assert report.sliced_wasserstein == pytest.approx(standardised)
    size = report.reference.independent_draws
    assert 150 < size <= 200  # of 200 independent ones
    floor = sliced_wasserstein_floor(y_standard, 300, effective_size=size).item()
    assert report.sampling_floor == pytest.approx(floor)
    assert report.floor_ratio == pytest.approx(standardised / floor)
    mmd = maximum_mean_discrepancy(x_standard, y_standard).item()
    assert report.squared_mmd == pytest.approx(mmd)
    assert (report.only_in_guide, report.only_in_reference) == (("extra",), ("c",))


def test_a_perfect_guide_is_at_the_floor(few_resamples):
    ratios = [
        compare(None, {"z": torch.randn(500, 4)}, {"z": torch.randn(500, 4)}).floor_ratio
        for _ in range(5)
    ]
    assert 0.8 < np.mean(ratios) < 1.3
    assert (
        compare(None, {"z": torch.randn(500, 4) * 0.7}, {"z": torch.randn(500, 4)}).floor_ratio > 2
    )


def autoregression(num_chains, length, dim=2, memory=0.7):
    """Chains of standard normal draws, of which (1 + memory) / (1 - memory) are worth one."""
    x = [torch.randn(num_chains, dim)]
    for _ in range(length - 1):
        x.append(memory * x[-1] + (1 - memory**2) ** 0.5 * torch.randn(num_chains, dim))
    return {"x": torch.stack(x, 1)}


def test_the_noise_of_the_reference_is_not_the_guides():
    """Exact draws against chains of 1,000 draws that are worth 176 independent ones."""
    reports = [compare(None, {"x": torch.randn(1000, 2)}, autoregression(4, 250)) for _ in range(8)]
    sizes = [report.reference.independent_draws for report in reports]
    assert np.mean(sizes) == pytest.approx(1000 * 0.3 / 1.7, rel=0.1)
    # The root mean square, which the floor is, of so many has a standard error of about 0.1.
    ratios = np.array([report.floor_ratio for report in reports])
    assert np.sqrt(np.square(ratios).mean()) == pytest.approx(1.0, abs=0.3)
    for report in reports:
        low, high = report.floor_ratio_interval
        assert low == 1 and high > report.floor_ratio
        assert report.verdict == (
            f"the guide is as near as exact draws would be, at most {high:.1f} times as far off"
            if report.floor_ratio <= 1.5
            else f"cannot tell: {report.floor_ratio:.1f} times as far off as exact draws would be, "
            f"but noise alone may do that (95 % interval 1 to {high:.1f})"
        )


def test_verdicts_by_interval():
    report = compare(None, {"x": torch.randn(50, 2)}, {"x": torch.randn(50, 2)})
    report = replace(report, reference=ReferenceCheck(), sampling_floor=1.0)

    def verdict(distance, low, high):
        return replace(report, sliced_wasserstein=distance, distance_interval=(low, high)).verdict

    near = "the guide is as near as exact draws would be, at most {} times as far off"
    far = "the guide is {} times as far off as exact draws would be (95 % interval {} to {})"
    assert verdict(1.4, 0.0, 3**0.5) == near.format("2.0")
    assert verdict(1.2, 0.75, 1.05) == near.format("1.4")  # small, though no chance
    assert verdict(1.4, 0.75, 3**0.5) == far.format("1.4", "1.2", "2.0")
    assert verdict(9.0, 8.0, 10.0) == far.format("9.0", "8.1", "10.0")
    assert verdict(1.7, 0.0, 3**0.5).startswith("cannot tell: 1.7 times as far off as exact draws")


def one_mode_and_few_draws_of_the_other():
    """Only four of 500 draws are far from the reference, fewer than the default limit."""
    reference = 4 + torch.randn(500, 2)
    guide = reference.clone()
    guide[:4] -= 8
    return two_modes, {"x": guide}, {"x": reference}


def far_off_chains():
    return None, {"x": 2 * torch.randn(500, 2)}, autoregression(4, 200)


LIMITS = {
    "at_floor": (far_off_chains, 1e9, "the guide is as near as exact draws would be"),
    "least_ess": (far_off_chains, 1000, "the reference is too poor to judge by: [0-9]+ effective"),
    "max_r_hat": (far_off_chains, 0.9, "the reference is too poor to judge by: R-hat"),
    "least_mass": (one_mode_and_few_draws_of_the_other, 0.005, "the reference is the worse one"),
}


@functools.cache
def verdict_by_default(make):
    """Return the verdict on draws of seed 0, once for all limits."""
    torch.manual_seed(0)
    return compare(*make()).verdict


@pytest.mark.parametrize("name", [field.name for field in fields(ComparePolicy)])
def test_every_limit_of_a_policy_moves_the_verdict(name):
    make, limit, expected = LIMITS[name]
    verdict = verdict_by_default(make)
    assert re.match("the guide is|cannot tell", verdict) and not re.match(expected, verdict)
    policy = ComparePolicy(**{name: limit})
    torch.manual_seed(0)
    assert re.match(expected, compare(*make(), policy=policy).verdict)


def test_to_dict_is_json():
    report = made_report()[-1]
    loaded = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert loaded["sites"]["a"]["sd_ratio"] == pytest.approx(report.sites["a"].sd_ratio.item())
    assert np.shape(loaded["sites"]["b"]["quantile_errors"]) == (5, 2, 3)
    assert loaded["num_samples"] == 300 and loaded["num_reference_samples"] == 200
    assert loaded["floor_ratio"] == pytest.approx(report.floor_ratio)
    assert loaded["floor_ratio_interval"] == pytest.approx(report.floor_ratio_interval)


def test_printed_table():
    guide, reference, report = made_report()
    lines = str(report).splitlines()
    assert lines[0].split("  ")[-1] == "quantile err"
    row = next(line for line in lines if line.startswith("a "))
    site = report.sites["a"]
    worst = site.quantile_errors.abs().argmax()
    cells = row.split()
    assert cells[1] == f"{site.guide_mean.item():.4g}"
    assert cells[4] == f"{site.reference_sd.item():.4g}"
    assert cells[5] == f"{site.mean_error.item():+.2f}"
    assert cells[6] == f"{site.sd_ratio.item():.2f}"
    level = ["5%", "25%", "50%", "75%", "95%"][worst]
    assert cells[7:] == [f"{site.quantile_errors[worst].item():+.2f}", "at", level]
    assert any(line.startswith("b[1, 2]") for line in lines)
    table = [line for line in lines if line.startswith(("a", "b["))]
    assert len(table) == 7 and len({len(line) for line in table}) == 1
    assert f"= {report.floor_ratio:.1f} x its sampling floor" in str(report)
    assert lines[-3:-1] == [
        "Not compared, only in the guide: extra",
        "Not compared, only in the reference: c",
    ]
    assert lines[-1] == f"Verdict: {report.verdict}"
    assert f"{report.floor_ratio:.1f} times as far off as exact draws" in report.verdict


def test_a_large_site_is_summarised_by_its_worst_coordinate():
    reference = torch.randn(100, 50)
    guide = reference.clone()
    guide[:, 42] += 3
    lines = str(compare(None, {"w": guide}, {"w": reference})).splitlines()
    rows = [line for line in lines if line.startswith("w[")]
    assert len(rows) == 20
    assert rows[18].startswith("w[18]") and rows[19].startswith("w[42]")
    assert any(line.startswith("... 31 more, worst:") for line in lines)
    twenty = str(compare(None, {"w": guide[:, :20]}, {"w": reference[:, :20]}))
    assert "w[19]" in twenty and "more" not in twenty


def test_constant_and_discrete_coordinates():
    zeros_and_noise = torch.stack([torch.zeros(50), torch.randn(50)], dim=-1)
    guide = {"tril": zeros_and_noise, "count": torch.arange(50) % 3}
    reference = {"tril": zeros_and_noise.flip(0) + 1e-9, "count": torch.arange(50) % 2}
    report = compare(None, guide, reference)
    torch.testing.assert_close(report.sites["tril"].sd_ratio, torch.ones(2))
    torch.testing.assert_close(report.sites["tril"].mean_error, torch.zeros(2), rtol=0, atol=1e-6)
    assert report.sites["count"].guide_mean == pytest.approx(0.98)
    # Where only the reference is constant, errors are in the coordinate's own units.
    report = compare(None, {"x": 3 + torch.randn(50)}, {"x": torch.zeros(50)})
    assert report.sites["x"].mean_error == report.sites["x"].guide_mean
    assert (
        json.loads(json.dumps(report.to_dict(), allow_nan=False))["sites"]["x"]["sd_ratio"] is None
    )


def test_mixed_precision_and_gradients_are_accepted():
    guide = {"x": torch.randn(50, requires_grad=True)}
    report = compare(None, guide, {"x": torch.randn(50).double()})
    assert report.guide_draws["x"].dtype == torch.float64
    assert not report.guide_draws["x"].requires_grad
    str(report)


def model(data):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with pyro.plate("data", len(data)):
        pyro.sample("obs", dist.Normal(0.0, scale), obs=data)


def test_guide_against_nuts(few_resamples):
    data = torch.randn(20) * 2
    mcmc = MCMC(NUTS(model), num_samples=150, warmup_steps=100, disable_progbar=True)
    with pytest.raises(ValueError, match=r"the reference MCMC has no draws yet: call its run"):
        compare(model, AutoNormal(model), mcmc, data)
    mcmc.run(data)
    guide = AutoNormal(model, init_scale=0.15)
    report = compare(model, guide, mcmc, data)
    assert report.guide_draws["scale"].shape == report.reference_draws["scale"].shape == (150,)
    assert (report.guide_draws["scale"] > 0).all()
    torch.testing.assert_close(report.reference_draws["scale"], mcmc.get_samples()["scale"])
    more = compare(model, guide, mcmc, num_samples=70)
    assert more.to_dict()["num_samples"] == 70
    # A guide compared with its own draws is at the floor.
    own = AutoMultivariateNormal(model)
    own(data)
    pyro.set_rng_seed(1)
    draws = {"scale": torch.stack([own(data)["scale"].detach() for _ in range(500)])}
    assert compare(model, own, draws, data).floor_ratio < 2


@pytest.mark.parametrize(
    "guide, reference, message",
    [
        (
            {"a": torch.zeros(9)},
            {"b": torch.zeros(9), "c": torch.zeros(9)},
            r"no site in common: guide \['a'\], reference \['b', 'c'\]",
        ),
        (
            {"z": torch.zeros(9, 3)},
            {"z": torch.zeros(9, 1, 3)},
            r"site 'z' has shape \(3,\) in the guide and \(1, 3\) in the reference",
        ),
        (
            {"z": torch.tensor([0.0, float("nan"), 1.0])},
            {"z": torch.randn(9)},
            r"site 'z': 1 of 3 draws of the guide are not finite",
        ),
        ({"z": torch.zeros(9)}, {"z": torch.zeros(3)}, "the reference has 3 draws, .* at least 4"),
        ({"z": torch.zeros(1)}, {"z": torch.zeros(9)}, "the guide has 1 draws, .* at least 2"),
        (
            {"z": torch.zeros(9), "y": torch.zeros(8)},
            {"z": torch.zeros(9)},
            "sites of the guide have different numbers of draws: {'z': 9, 'y': 8}",
        ),
    ],
)
def test_bad_draws(guide, reference, message):
    with pytest.raises(ValueError, match=message):
        compare(None, guide, reference)


class Sampler:
    """What has draws: a sampler of any kind."""

    def __init__(self, draws):
        self.draws = draws

    def get_samples(self):
        return self.draws


def test_anything_that_has_draws():
    guide, reference = made_draws()
    expected = compare(None, guide, reference).to_dict()
    found = compare(model, Sampler(guide), Sampler(reference), torch.zeros(3)).to_dict()
    assert "no draws of" in found["reference"].pop("unsearched")  # of a site of the model
    assert expected["reference"].pop("unsearched") == "" and found == expected
    with pytest.raises(ValueError, match="leave num_samples out"):
        compare(model, Sampler(guide), reference, num_samples=3)


def test_the_order_of_arguments():
    reference = {"scale": torch.rand(9)}
    with pytest.raises(TypeError, match=r"needs the model first, but got AutoNormal there"):
        compare(AutoNormal(model), reference, torch.zeros(3))
    with pytest.raises(TypeError, match=r"but got dict there.*Cure: compare\(model, guide, "):
        compare(reference, AutoNormal(model), reference)
    with pytest.raises(TypeError, match=r"got function. Cure: compare\(model, guide, reference"):
        compare(None, reference, model)


def test_model_keywords_of_our_names():
    def scaled(num_samples):
        pyro.sample("scale", dist.Normal(0.0, 1.0).expand([num_samples]).to_event(1))

    names = {"num_samples": 2}
    for guide in (scaled, AutoNormal(scaled), AutoImplicit(scaled, frame=None)):
        report = compare(
            scaled, guide, {"scale": torch.randn(9, 2)}, num_samples=20, model_kwargs=names
        )
        assert report.guide_draws["scale"].shape == (20, 2)


def test_bad_arguments():
    with pytest.raises(ValueError, match="leave num_samples out, or slice the draws"):
        compare(None, {"z": torch.zeros(9)}, {"z": torch.zeros(9)}, num_samples=3)
    with pytest.raises(
        TypeError, match=r"or a dict of draws, but got NUTS. Cure: compare\(model, guide, ref"
    ):
        compare(None, {"z": torch.zeros(9)}, NUTS(model))
    with pytest.raises(TypeError, match=r"AutoNormal could not run .* guide\(x, y\)"):
        compare(model, AutoNormal(model), {"scale": torch.ones(9)})


def two_modes():
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 10.0).to_event(1))
    apart = torch.stack([(x - 4).square().sum(), (x + 4).square().sum()])
    pyro.factor("modes", torch.logsumexp(-0.5 * apart, 0))


def both_modes(share=0.5):
    sign = torch.where(torch.rand(500, 1) < share, 1.0, -1.0)
    return {"x": 4 * sign + torch.randn(500, 2)}


@pytest.mark.parametrize("with_density", [False, True])
def test_a_reference_that_lost_a_mode_is_the_worse_one(with_density):
    lost = {"x": 4 + torch.randn(500, 2)}

    def guide():
        where = dist.Normal(torch.tensor([[4.0, 4.0], [-4.0, -4.0]]), 1.0).to_event(1)
        pyro.sample("x", MixtureOfNormals(dist.Categorical(torch.ones(2)), where))

    found = compare(two_modes, guide if with_density else both_modes(), lost, model_kwargs={})
    assert found.reference.missing == pytest.approx(0.5, abs=0.06)
    assert found.verdict.startswith("the reference is the worse one: no draws where about ")
    assert str(found).splitlines()[-1] == f"Verdict: {found.verdict}"


def test_a_guide_that_lost_a_mode_is_the_worse_one():
    """So is one far out where nothing is."""
    lost = {"x": 4 + torch.randn(500, 2)}
    other = compare(two_modes, lost, both_modes())
    assert other.reference.missing == 0 and "times as far off" in other.verdict
    astray = compare(two_modes, {"x": 20 + both_modes()["x"]}, both_modes())
    assert astray.reference.missing == 0 and not astray.reference.is_worse()


def test_a_draw_is_far_from_twice_the_distance_of_neighbours():
    line = against_reference._Neighbours(torch.arange(100.0)[:, None])
    points = torch.tensor([[-2.1], [-1.9], [0.5], [50.0], [100.9], [101.1]])
    assert line.are_far(points).tolist() == [True, False, False, False, False, True]


def test_why_lost_mass_is_unknown_is_said():
    """The draws are compared all the same."""

    def fails():
        raise ZeroDivisionError("of the model")

    draws = both_modes()
    found = compare(fails, draws, draws)
    assert found.reference.missing is None and found.floor_ratio < 1
    line = "Whether the reference lacks mass is unknown: ZeroDivisionError: of the model"
    assert line in str(found).splitlines()

    def larger():
        two_modes()
        pyro.sample("z", dist.Normal(0.0, 1.0))

    found = compare(larger, draws, draws)
    assert "no draws of ['z'], which the model samples" in found.reference.unsearched
    assert "unknown" not in str(compare(two_modes, draws, draws))


def test_a_lost_mode_far_from_the_origin():
    """In float32 the square of 20,000 has rounding errors of 32, a spread of 0.1 has none left."""
    centers = 20_000 + torch.tensor([[0.4], [-0.4]]).expand(2, 2)

    def far_modes():
        x = pyro.sample("x", dist.Normal(centers.mean(0), 10.0).to_event(1))
        pyro.factor("modes", dist.Normal(centers, 0.1).log_prob(x).sum(-1).logsumexp(0))

    guide = {"x": centers.repeat(250, 1) + 0.1 * torch.randn(500, 2)}
    lost = {"x": centers[0] + 0.1 * torch.randn(500, 2)}
    found = compare(far_modes, guide, lost)
    assert found.reference.missing == pytest.approx(0.5, abs=0.05) and found.reference.is_worse()
    # Means are taken in double precision: draws and errors are multiples of 2^-9 there.
    expected = guide["x"].double().mean(0) - lost["x"].double().mean(0)
    site = found.sites["x"]
    torch.testing.assert_close(site.mean_error * site.reference_sd, expected.float())


class MixtureOfNormals(dist.MixtureSameFamily):
    support = torch.distributions.constraints.real_vector


def test_a_guide_that_is_too_wide_finds_no_lost_mass():
    wide = {"x": 1.5 * torch.randn(1000, 5)}

    def normal():
        pyro.sample("x", dist.Normal(torch.zeros(5), 1.0).to_event(1))

    found = compare(normal, wide, {"x": torch.randn(1000, 5)})
    assert found.reference.missing < 0.01 and not found.reference.is_worse()


def test_poor_chains_are_named():
    chains = torch.randn(4, 100, 3)
    chains[3, :, 1] += 2.0  # one chain is elsewhere
    guide = {"x": torch.randn(400, 3)}
    found = compare(None, guide, {"x": chains})
    assert found.reference_draws["x"].shape == (400, 3)
    assert found.reference.worst_r_hat == "x[1]" and found.reference.r_hat > 1.2
    assert "the reference is too poor to judge by: R-hat 1." in found.verdict
    assert "of `x[1]`" in found.verdict
    # Without chains: a walk that hardly moves.
    walk = torch.randn(400, 3)
    walk[:, 2] = 0.1 * torch.randn(400).cumsum(0)
    found = compare(None, guide, {"x": walk})
    assert found.reference.r_hat is None and found.reference.worst_ess == "x[2]"
    assert found.reference.effective_sample_size < 30
    assert "effective draws of `x[2]`" in found.verdict
    json.dumps(found.to_dict(), allow_nan=False)


class Chains:
    """As Pyro's MCMC."""

    def __init__(self, samples):
        self.samples = samples

    def get_samples(self, num_samples=None, group_by_chain=False):
        return (
            self.samples
            if group_by_chain
            else {k: v.flatten(0, 1) for k, v in self.samples.items()}
        )


def test_good_chains_are_good():
    chains = {"x": torch.randn(4, 200), "extra": torch.randn(4, 200, 2)}
    guide = {"x": torch.randn(800)}
    for reference in (chains, Chains(chains)):
        found = compare(None, guide, reference)
        assert 0.9 < found.reference.r_hat < 1.03 and found.reference.effective_sample_size > 400
        assert found.verdict.startswith("the guide is as near as exact draws would be, at most ")
        assert found.only_in_reference == ("extra",)
