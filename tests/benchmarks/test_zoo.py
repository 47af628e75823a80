# SPDX-License-Identifier: Apache-2.0
"""The zoo: every model has a density, references fit their models, and the metric measures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.common import read_records
from benchmarks.zoo import registry
from benchmarks.zoo.metrics import Reference, measure, read_reference
from benchmarks.zoo.references import gibbs
from benchmarks.zoo.references.make import checks_file, kept_columns, merged, read
from benchmarks.zoo.report import report, stage_shares

pytestmark = pytest.mark.usefixtures("double")

NAMES = [name for collection in registry.COLLECTIONS for name in registry.names(collection)]
CHECKED = {
    record["model"]: record
    for collection in registry.COLLECTIONS
    for record in read_records(checks_file(collection))
}


@pytest.mark.parametrize("collection", registry.COLLECTIONS)
def test_split_is_of_all_models_half_and_half(collection):
    split = registry.split_of(collection)
    assert sorted(split.LOOK + split.SCORE) == sorted(registry.names(collection))
    least = {"zoo": 25, "large": 15, "classics": 7}[collection]
    assert len(split.SCORE) >= least and 0 <= len(split.LOOK) - len(split.SCORE) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_density_and_reference(name):
    zoo = registry.load(name)
    args = zoo.data()
    potential, start, transforms = zoo.potential(args)
    assert math.isfinite(potential(start))
    draws = {}
    for site, value in start.items():
        constrained = transforms[site].inv(value)
        draws[site] = constrained.expand(2, *constrained.shape)
    features, sizes = zoo.features(draws, args)
    assert features.shape == (2, sum(sizes)) and features.isfinite().all()
    if zoo.invariant is None:
        flat = torch.cat([value.reshape(-1) for value in start.values()])
        torch.testing.assert_close(features[0], flat)
    reference, check = read_reference(name), CHECKED.get(name)
    assert (reference is not None) == bool(check and check["trusted"])
    if reference is not None:
        assert check["num_features"] == features.shape[-1]
        assert len(reference.mean) == features.shape[1] == check["num_features"]
        assert reference.values.shape == (check["num_draws"], len(reference.columns))


def test_data_are_the_same_each_time():
    for name in NAMES:
        zoo = registry.load(name)
        for first, second in zip(zoo.data(), zoo.data(), strict=True):
            assert torch.equal(first.nan_to_num(), second.nan_to_num())


@pytest.mark.parametrize(
    "name, site", [("mixture_4", "centres"), ("topics", "words"), ("factor_analysis", "loadings")]
)
def test_invariants_do_not_see_symmetries(name, site):
    zoo = registry.load(name)
    args = zoo.data()
    _, start, transforms = zoo.potential(args)
    draws = {
        key: transforms[key].inv(value + torch.randn(5, *value.shape))
        for key, value in start.items()
    }
    swapped = {
        "mixture_4": lambda: (
            draws | {"weights": draws["weights"].flip(-1), "centres": draws["centres"].flip(1)}
        ),
        "topics": lambda: (
            draws | {"words": draws["words"].flip(1), "topics": draws["topics"].flip(-1)}
        ),
        "factor_analysis": lambda: draws | {"loadings": draws["loadings"] @ _rotation()},
    }[name]()
    assert not torch.allclose(swapped[site], draws[site])
    torch.testing.assert_close(zoo.features(swapped, args)[0], zoo.features(draws, args)[0])


def _rotation():
    return torch.tensor([[0.6, -0.8], [-0.8, -0.6]])


def test_measure_in_floors():
    truth = torch.randn(4000, 3)
    reference = Reference(truth, torch.arange(3), torch.zeros(3), torch.ones(3))
    good = measure(torch.randn(4000, 3), reference)
    assert good["ratio"] < 1.2 and good["worst_ratio"] < 1.5
    bad = measure(torch.randn(4000, 3) * torch.tensor([1.0, 1.0, 0.5]), reference)
    assert bad["ratio"] > 2 and bad["worst_ratio"] > 4
    assert bad["sd_ratio_min"] == pytest.approx(0.5, rel=0.05)
    with pytest.raises(ValueError, match="1 of 4000 draws are not finite"):
        measure(torch.cat([truth[1:], torch.full((1, 3), math.inf)]), reference)


def test_kept_columns_have_the_small_sites():
    columns = kept_columns([2, 500, 1, 300], 75).tolist()
    assert len(columns) <= 75 and columns == sorted(set(columns))
    assert {0, 1, 502} <= set(columns)
    assert kept_columns([1] * 100, 75).shape == (75,)
    assert merged([1, 1, 1, 20, 20, 1], ["mu", "x_0", "x_1", "z0", "z1", "tau"]) == [1, 2, 40, 1]


def test_walk_of_local_scales(monkeypatch):
    monkeypatch.setattr(gibbs, "LOCAL_STEP", 0.7)  # accepts both steps of a sweep often
    x, y = np.array([[1.0, 1.0], [-0.6, -0.7], [0.8, 0.8]]), np.array([2.6, -1.4, 2.2])
    z, noise, rng = np.array([0.8, 1.3]), 0.3, np.random.default_rng(0)
    local = np.ones((8000, 2))
    for _ in range(200):
        coefficients = z * local
        residual = y - coefficients @ x.T
        local = gibbs.walk_local(rng, x, residual, local, coefficients, np.full(8000, noise))
    side = np.linspace(-12.0, 4.0, 400)
    grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    log_prob = (grid - np.log1p(np.exp(2 * grid))).sum(-1)
    log_prob -= ((y - (z * np.exp(grid)) @ x.T) ** 2).sum(-1) / (2 * noise)
    weights = np.exp(log_prob - log_prob.max())
    mean = weights @ grid / weights.sum()
    np.testing.assert_allclose(np.log(local).mean(0), mean, atol=0.05)


def test_gibbs_samples_the_horseshoe(tmp_path):
    x = torch.tensor([[1.0, 0.9], [-0.6, -0.8], [0.8, 1.1]])
    y = torch.tensor([2.6, -1.4, 2.2])
    np.savez(tmp_path / "data.npz", argument_0=x.numpy(), argument_1=y.numpy())
    gibbs.horseshoe(tmp_path, num_draws=500, thin=1)
    draws, _ = read(tmp_path)
    coefficients = draws["z"] * draws["lam"] * draws["tau"].unsqueeze(-1)
    scales = [draws["tau"], draws["sigma"], *draws["lam"].unbind(-1)]
    sampled = torch.cat([torch.stack(scales, -1).log(), coefficients], -1).flatten(0, 1)

    # By quadrature over the logarithms of the four scales, given which all is normal.
    wide, narrow = torch.linspace(-9.0, 9.0, 22), torch.linspace(-4.0, 2.5, 22)
    grid = torch.cartesian_prod(wide, narrow, wide, wide)
    tau, sigma, lam = grid[:, :1].exp(), grid[:, 1].exp(), grid[:, 2:].exp()
    precision = (x.T @ x) / sigma[:, None, None] ** 2 + torch.diag_embed((tau * lam) ** -2)
    (a, b), (_, d) = precision.permute(1, 2, 0)
    first, second = (y @ x).unsqueeze(-1) / sigma**2
    determinant = a * d - b**2
    means = torch.stack([d * first - b * second, a * second - b * first]) / determinant
    log_prob = 0.5 * (first * means[0] + second * means[1] - y @ y / sigma**2)
    log_prob -= 0.5 * determinant.log() + (tau * lam).log().sum(-1) + 3 * sigma.log()
    log_prob += grid.sum(-1) - sigma**2 / 8
    log_prob -= torch.log1p(tau**2).squeeze(-1) + torch.log1p(lam**2).sum(-1)
    mean = log_prob.softmax(0) @ torch.cat([grid, means.T], -1)
    errors = (sampled.mean(0) - mean) / sampled.std(0)
    assert errors.abs().max() < 0.12, errors


def test_report():
    record = {"model": "coin", "method": "fit", "seed": 0, "start_mb": 300.0, "peak_mb": 350.0}
    good = record | {"cpu_seconds": 2.0, "ratio": 0.7, "worst_ratio": 0.8, "mean_error": 0.01}
    good |= {"sd_ratio_min": 0.99, "sd_ratio_max": 1.01, "verdict": "trust", "chosen": "injective"}
    wrong = good | {"model": "ordinal", "ratio": 5.0}
    failed = record | {
        "model": "topics",
        "cpu_seconds": 9.0,
        "error": "ValueError: x",
        "frames": [],
    }
    text = report([good, wrong, failed])
    assert "* wrongly trusted (ratio above 1.5): 1 (ordinal)" in text
    assert "* failed or stopped: 1 of 3 (33%) (topics)" in text


def test_stage_shares():
    table = "stage                 seconds  outcome\n"
    first = table + "search                    1.0  1 mode\nmclmc, held out           2.0  done"
    second = table + "search                    3.0  2 modes, 1.5  2.0 nats"
    text = stage_shares([
        {"model": "coin", "report": first, "seconds": 4.0},
        {"model": "ordinal", "report": second, "seconds": 4.0},
    ])  # fmt: skip
    rows = [line.split("|")[1:-1] for line in text.splitlines()]
    found = [[cell.strip() for cell in row] for row in rows[2:] if row]
    assert found[0] == ["search", "2", "50%", "50%", "3.0 (ordinal)"]
    assert sorted(found[1:]) == [
        ["mclmc, held out", "1", "25%", "50%", "2.0 (coin)"],
        ["rest", "2", "25%", "25%", "1.0 (coin)"],
    ]
