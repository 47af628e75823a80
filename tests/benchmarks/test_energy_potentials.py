# SPDX-License-Identifier: Apache-2.0
"""The potentials by hand, the grid's draws against closed forms, and a tiny run."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pyro
import pytest
import torch
from pyro import poutine

from benchmarks import common, energy_potentials
from pyro_implicit.fitting.checkpoint import TrainingCheckpoint


def bump(x: float, sd: float) -> float:
    return math.exp(-0.5 * (x / sd) ** 2)


def by_hand(name: str, x: float, y: float) -> float:
    """Table 1 of Rezende and Mohamed, for x between -4 and 4."""
    w1 = math.sin(2 * math.pi * x / 4)
    w2 = 3 * math.exp(-0.5 * ((x - 1) / 0.6) ** 2)
    w3 = 3 / (1 + math.exp(-(x - 1) / 0.3))
    if name == "two moons":
        ring = 0.5 * ((math.hypot(x, y) - 2) / 0.4) ** 2
        return ring - math.log(bump(x - 2, 0.6) + bump(x + 2, 0.6))
    if name == "sinusoid":
        return 0.5 * ((y - w1) / 0.4) ** 2
    if name == "bisected":
        return -math.log(bump(y - w1, 0.35) + bump(y - w1 + w2, 0.35))
    return -math.log(bump(y - w1, 0.4) + bump(y - w1 + w3, 0.35))


@pytest.mark.parametrize("name", ["two moons", "sinusoid", "bisected", "split"])
@pytest.mark.parametrize("point", [(1.3, -0.7), (-2.4, 0.9)])
def test_the_potentials_by_hand(name, point) -> None:
    x, y = torch.tensor(point, dtype=torch.float64)
    found = energy_potentials.POTENTIALS[name](x, y).item()
    assert found == pytest.approx(by_hand(name, *point), rel=1e-9)
    # and the model knows no other density
    model = energy_potentials.make_model(energy_potentials.POTENTIALS[name])
    value = torch.tensor(point)
    trace = poutine.trace(poutine.condition(model, {"x": value})).get_trace()
    assert trace.log_prob_sum().item() == pytest.approx(-found, rel=1e-5)


def test_the_ends() -> None:
    """One standard deviation of 0.4 beyond 4 costs 1/2, at both ends."""
    x = torch.tensor([4.0, 4.4, -4.4, -4.8])
    assert energy_potentials.end(x).tolist() == pytest.approx([0.0, 0.5, 0.5, 2.0], rel=1e-5)
    point = torch.tensor([4.4, 0.2], dtype=torch.float64)
    for name in ("sinusoid", "bisected", "split"):
        found = energy_potentials.POTENTIALS[name](*point).item()
        assert found - by_hand(name, *point.tolist()) == pytest.approx(0.5, rel=1e-6)


def test_draws_of_the_grid() -> None:
    draws = energy_potentials.grid_draws(energy_potentials.sinusoid, 50_000, 0).double()
    x, y = draws.T
    rest = y - torch.sin(math.pi * x / 2)
    assert rest.mean() == pytest.approx(0.0, abs=0.01)
    assert rest.std() == pytest.approx(0.4, abs=0.01)
    # flat on 8, with half a Gaussian of sd 0.4 at each end
    ends = 0.4 * math.sqrt(2 * math.pi)
    assert (x.abs() > 4).double().mean() == pytest.approx(ends / (8 + ends), abs=0.007)
    left = energy_potentials.grid_draws(energy_potentials.two_moons, 20_000, 1)[:, 0] < 0
    assert left.double().mean() == pytest.approx(0.5, abs=0.02)
    again = energy_potentials.grid_draws(energy_potentials.sinusoid, 50_000, 0).double()
    torch.testing.assert_close(again, draws)


def test_histogram() -> None:
    width = 2 * energy_potentials.HALF_WIDTH / energy_potentials.NUM_BINS
    low = -energy_potentials.HALF_WIDTH
    draws = torch.tensor([[low + 0.5 * width, low + 2.5 * width]] * 3 + [[9.0, 0.0]])
    counts = torch.tensor(energy_potentials.histogram(draws))
    assert counts.shape == (energy_potentials.NUM_BINS, energy_potentials.NUM_BINS)
    assert counts.sum() == 3
    assert counts[0, 2] == 3


@pytest.fixture
def few_draws(monkeypatch) -> None:
    monkeypatch.setattr(energy_potentials, "NUM_DRAWS", 300)


def call(out: Path, *words: str) -> list[dict]:
    tiny = ["--out", str(out), "--steps", "2", "--particles", "4", "--seeds", "1"]
    energy_potentials.main(energy_potentials.parser().parse_args([*tiny, *words]))
    return energy_potentials.read_records(out)


def test_script(few_draws, no_search, tmp_path, capsys, monkeypatch) -> None:
    fitted = SimpleNamespace(sample=lambda number: {"x": torch.randn(number, 2)})
    monkeypatch.setattr(energy_potentials, "fit", lambda model, progress: fitted)
    out = tmp_path / "out.jsonl"
    records = call(out, "--potentials", "split")
    assert [record["method"] for record in records] == [*energy_potentials.METHODS, "fit"]
    for record in records:
        assert "error" not in record
        assert math.isfinite(record["sw2"])
        assert record["sw2"] > 0
    text = out.with_suffix(".md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert "| floor | 0." in text
    assert out.with_suffix(".png").stat().st_size < 300_000
    assert len(call(out, "--potentials", "split")) == len(records)
    words = ["--potentials", "split", "sinusoid", "--methods", "LIVI"]
    records += call(out, *words)[len(records) :]
    assert [record["potential"] for record in records] == ["split"] * 7 + ["sinusoid"]


def test_a_failed_run_is_recorded(few_draws, tmp_path, monkeypatch) -> None:

    def diverge(model, hidden):
        raise RuntimeError("lost")

    monkeypatch.setitem(energy_potentials.METHODS, "LIVI", (diverge, None))
    out = tmp_path / "out.jsonl"
    (record,) = call(out, "--potentials", "sinusoid", "--methods", "LIVI")
    assert record["error"] == "RuntimeError: lost"
    assert "| LIVI | failed |" in out.with_suffix(".md").read_text(encoding="utf-8")


def test_a_killed_run_continues_to_the_same_result(few_draws, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(common, "LONG", 0)
    words = [
        "--potentials",
        "split",
        "--methods",
        "InjectiveELBO",
        "--steps",
        "20",
        "--hidden",
        "8",
    ]
    (exact,) = call(tmp_path / "exact.jsonl", "--runs", str(tmp_path / "a"), *words)
    save, saved = TrainingCheckpoint.save, []

    def killed(self, path) -> None:
        save(self, path)
        saved.append(len(self.state.losses))
        if len(saved) == 15:
            raise SystemExit

    monkeypatch.setattr(TrainingCheckpoint, "save", killed)
    resumed = tmp_path / "resumed.jsonl"
    with pytest.raises(SystemExit):
        call(resumed, "--runs", str(tmp_path / "b"), *words)
    assert saved[-1] == 15 and not resumed.exists()
    (found,) = call(resumed, "--runs", str(tmp_path / "b"), *words)
    assert saved[15:] == list(range(16, 21))  # nothing was repeated
    assert found["sw2"] == exact["sw2"] and found["histogram"] == exact["histogram"]


def test_paper_sets_defaults_that_words_override() -> None:
    def parse(*words: str):
        return common.parse_arguments(
            energy_potentials.parser(), lambda args: energy_potentials.PAPER, list(words)
        )

    args = parse("--paper", "--hidden", "7", "--seeds", "3")
    assert (args.steps, args.lr, args.hidden, args.seeds) == (200_000, 1e-4, 7, 3)
    assert parse().steps == 1000


def test_noise_enters_the_network_with_its_standard_deviation() -> None:
    weights = []
    for noise_sd in ("1", "6"):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        args = energy_potentials.parser().parse_args(["--hidden", "4", "--noise-sd", noise_sd])
        model = energy_potentials.make_model(energy_potentials.split)
        guide = energy_potentials.injective(model, args)
        guide()
        weights.append(guide.generator.network.layers[0].weight.detach().clone())
    torch.testing.assert_close(weights[1], 6 * weights[0])
