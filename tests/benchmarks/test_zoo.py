# SPDX-License-Identifier: Apache-2.0
"""The zoo: every model has a density, references fit their models, and the metric measures."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.common import read_records
from benchmarks.zoo import registry, split
from benchmarks.zoo.metrics import Reference, measure, read_reference
from benchmarks.zoo.references.make import CHECKS, kept_columns
from benchmarks.zoo.report import report

NAMES = registry.names()
CHECKED = {record["model"]: record for record in read_records(CHECKS)}


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


def test_split_is_of_all_models_half_and_half():
    assert sorted(split.LOOK + split.SCORE) == sorted(NAMES)
    assert len(split.LOOK) == len(split.SCORE) >= 20


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
    columns = kept_columns([2, 500, 1, 300]).tolist()
    assert len(columns) <= 75 and columns == sorted(set(columns))
    assert {0, 1, 502} <= set(columns)
    assert kept_columns([1] * 100).shape == (75,)


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
    assert "* silently wrong (trusted, over 1.5 floors): 1 (ordinal)" in text
    assert "* failed or stopped: 1 of 3 (33%) (topics)" in text
