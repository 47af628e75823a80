# SPDX-License-Identifier: Apache-2.0
"""The divergence of paper_numbers.py in closed form, and the comparisons with tiny arguments."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from benchmarks import implicit_methods, paper_networks, paper_numbers, sivi_sm_critic
from benchmarks.common import read_records
from benchmarks.targets import KnownPosterior, make_target
from pyro_implicit import AutoImplicit, AutoregressiveGenerator
from pyro_implicit.density import Target


def test_forward_kl_of_two_gaussians(monkeypatch: pytest.MonkeyPatch) -> None:
    """q is N(0, 0.25 + 0.25) in both coordinates, p is N(0, 1)."""
    monkeypatch.setattr(paper_numbers, "NUM_COMPONENTS", 4096)

    def model() -> None:
        pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    def truth(num_draws: int, seed: int) -> Tensor:
        return torch.randn(num_draws, 2, generator=torch.Generator().manual_seed(seed))

    target = KnownPosterior("normal", ("x",), model, truth)
    guide: Any = SimpleNamespace(generator=lambda z: 0.5 * z, noise_scale=torch.full((2,), 0.5))
    (row,) = [r for r in paper_numbers.ROWS if r.method == "AISIVI" and r.target == "banana"]
    exact = math.log(0.5) + 1 / 0.5 - 1
    assert paper_numbers.forward_kl(row, target, guide, 0) == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("method", ["PVI", "SIVI-SM", "AISIVI", "KSIVI", "LIVI, ours"])
def test_paper_numbers(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_numbers, "NUM_DRAWS", 50)
    monkeypatch.setattr(paper_numbers, "NUM_COMPONENTS", 64)
    monkeypatch.setattr(paper_numbers, "BUDGET", 0.1)
    monkeypatch.setattr(paper_numbers, "sliced_wasserstein", lambda *args, **kwargs: torch.ones(()))
    args = argparse.Namespace(
        threads=1, out=tmp_path / "numbers.jsonl", report=False, seeds=1, max_steps=2
    )
    args.methods, args.targets = [method], ["x_shape"]
    paper_numbers.main(args)
    args.report = True
    paper_numbers.main(args)
    page = (tmp_path / "numbers.md").read_text()
    assert f"| {method} | x_shape |" in page and "nan" not in page.split("paper")[0]


@pytest.mark.parametrize("method", [paper_networks.AUTHORS, "LIVI", "fit"])
def test_paper_networks(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_networks, "EPOCHS", 1)
    monkeypatch.setattr(paper_networks, "BATCH", 20)
    monkeypatch.setattr(paper_networks, "NOISE", 0.5)
    table = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    table[:, 3] = table[:, 0] + 0.1 * table[:, 3]
    (tmp_path / "tabular").mkdir()
    np.savetxt(tmp_path / "tabular" / "concrete.data", table.numpy())
    args = argparse.Namespace(data_dir=tmp_path, methods=[method], splits=1, budget=0.1)
    args.out, args.report = tmp_path / "networks.jsonl", False
    paper_networks.main(args)
    (record,) = read_records(args.out)
    assert record["rmse_of_mean"] <= record["rmse"] < 30
    assert f"| {method} | 1 |" in (tmp_path / "networks.md").read_text()


@pytest.mark.parametrize("choices", [[], [*sivi_sm_critic.CHOICES]])
def test_sivi_sm_critic(
    choices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sivi_sm_critic, "NUM_DRAWS", 1000)
    args = argparse.Namespace(choices=choices, steps=6, seed=0, out=tmp_path / "critic.jsonl")
    sivi_sm_critic.main(args)
    (record,) = read_records(args.out)
    assert [*record["distances"]] == ["1", "2", "3", "4", "5", "6"]
    assert all(0.5 < distance < 2 for distance in record["distances"].values())


def test_the_score_of_the_banana() -> None:
    target = Target(paper_numbers.TARGETS["PVI's banana"]().model)
    points = torch.randn(5, 2)
    torch.testing.assert_close(sivi_sm_critic.score(points), target.score(points)[1])


def test_density_of_an_injective_guide_at_given_points() -> None:
    guide = AutoImplicit(make_target("x_shape", "cpu", None).model, AutoregressiveGenerator)
    guide()
    with torch.no_grad():
        for parameter in guide.generator.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    noise = torch.randn(200, 2, requires_grad=True)
    transform = guide.get_transform()
    value = transform(noise)
    log_det = transform.log_abs_det_jacobian(noise, value)
    expected = dist.Normal(0.0, 1.0).log_prob(noise).sum(-1) - log_det
    found = implicit_methods.injective_log_prob(guide, value.detach())
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["KSIVI", "PVI", "Injective"])
def test_implicit_methods(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implicit_methods, "NUM_KL_DRAWS", 50)
    monkeypatch.setattr(implicit_methods, "NUM_COMPONENTS", 64)
    monkeypatch.setattr(implicit_methods, "truth", lambda target, seed: target.truth(100, seed))
    found = implicit_methods.run(make_target("x_shape", "cpu", None), method, 1, budget=0.1)
    assert found["steps"] > 0 and math.isfinite(found["kl"]) and math.isfinite(found["sw2"])


def test_draws_are_worth_fewer_exact_ones_the_larger_the_ratio() -> None:
    records = [{"ratio": ratio, "cpu_seconds": 5.0} for ratio in (0.5, 2.0, 10.0)]
    assert implicit_methods.rate(records) == f"{10_000 / 2**2 / 5:,.0f}"
    assert implicit_methods.rate(records[:1]) == f"{10_000 / 5:,.0f}"
    assert implicit_methods.rate([{"error": "died"}]) == ""
    refined = records[1] | {"refined_ratio": 1.0, "refined_cpu_seconds": 3.0}
    assert implicit_methods.rate([refined]) == f"{10_000 / 2**2 / 5:,.0f} → {10_000 / 8:,.0f}"
