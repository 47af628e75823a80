# SPDX-License-Identifier: Apache-2.0
"""The UCI benchmark on a tiny set of its own."""

from __future__ import annotations

import io
import math
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine

from benchmarks import uci, uci_data, uci_methods


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.normal(3.0, 2.0, size=(30, 4)).astype(np.float32)
    x[:, 2] = 7.0  # as two columns of naval
    y = (5 + 10 * x[:, 0] + rng.normal(size=30)).astype(np.float32)
    rows = np.stack([rng.permutation(30) for _ in range(2)]).astype(np.int32)
    (tmp_path / "uci").mkdir()
    for name in ("bostonHousing", "energy"):
        path = tmp_path / "uci" / f"{name}.npz"
        np.savez(path, X=x, y=y, train_idx=rows[:, :27], test_idx=rows[:, 27:])
    return tmp_path


TINY = [f"{method}.steps=2" for method in ("livi", "kivi", "avb", "mean_field", "map", "ensemble")]
TINY += ["livi.particles=2", "ensemble.members=2"]
TINY += ["nuts.draws=3", "nuts.warmup=2", "nuts.max_tree_depth=2"]


def call(data_dir: Path, *words: str) -> list[dict]:
    out = data_dir / "out.jsonl"
    words = ("--data-dir", str(data_dir), "--out", str(out), "--sets", "boston", *words)
    uci.main(uci.parser().parse_args([*words, "--num-draws", "4", "--set-option", *TINY]))
    return uci.read_records(out)


def test_all_methods(no_search, data_dir) -> None:
    records = call(data_dir, "--splits", "1")
    assert [record["method"] for record in records] == list(uci.METHODS)
    for record in records:
        assert "error" not in record
        for field in ("rmse", "log_likelihood", "noise_sd", "seconds"):
            assert math.isfinite(record[field])
        assert record["split"] == 1
        assert {"commit", "torch", "pyro", "threads"} <= record.keys()
    settings = records[1]["settings"]
    assert settings["steps"] == 2
    assert settings["generators"] == [[20, 30], [20, 30]]
    assert settings["precision_prior"] == [1.0, 0.01]


def test_runs_are_not_repeated(data_dir) -> None:
    words = ["--splits", "0", "--methods", "map"]
    assert len(call(data_dir, *words)) == 1
    assert len(call(data_dir, *words)) == 1
    assert len(call(data_dir, *words, "--precision-prior", "2", "0.01")) == 2
    assert len(call(data_dir, *words, "--seed", "1")) == 3
    assert len(call(data_dir, *words, "--batch-size", "10")) == 4
    records = call(data_dir, "--splits", "0", "1", "--methods", "map")
    assert [record["split"] for record in records] == [0, 0, 0, 0, 1]


def test_a_failed_run_is_recorded(data_dir, monkeypatch) -> None:
    def diverge(*args):
        raise ValueError("lost")

    monkeypatch.setitem(uci.METHODS, "map", diverge)
    (record,) = call(data_dir, "--splits", "0", "--methods", "map")
    assert record["error"] == "ValueError: lost"
    assert "| failed | failed |" in uci.report(
        uci.parser().parse_args(["--out", str(out(data_dir))])
    )


def out(data_dir: Path) -> Path:
    return data_dir / "out.jsonl"


def test_report(data_dir, capsys) -> None:
    scores = [(2.0, -3.0, 10.0), (3.0, -2.0, 30.0), (7.0, -1.0, 20.0)]
    defaults = uci.SETTINGS["livi"] | {"num_draws": 500, "precision_prior": [1.0, 0.01]}
    for split, (rmse, log_likelihood, seconds) in enumerate(scores):
        record = {"set": "boston", "method": "livi", "seed": 0, "device": "cpu", "split": split}
        record["settings"] = defaults | {"noise_dim": 7}
        record |= {"rmse": rmse, "log_likelihood": log_likelihood, "seconds": seconds}
        uci.append_record(out(data_dir), record)
    uci.main(uci.parser().parse_args(["--out", str(out(data_dir)), "--report"]))
    text = out(data_dir).with_suffix(".md").read_text()
    assert text in capsys.readouterr().out
    row = text.splitlines()[2]
    # sd of (2, 3, 7) is 2.6458, of (-3, -2, -1) it is 1; both over the root of 3.
    assert "| 4.000 +- 1.528 | -2.000 +- 0.577 | 20 | 2.32 / -2.16 |" in row
    assert "steps 3000, lr 0.005, noise_dim 7 | 3 of 3" in row


def test_scores(data_dir) -> None:
    """Against numpy, from the raw file."""
    data = uci_data.load("boston", 0, data_dir)
    model = uci_methods.make_model(data, 5, None, [1.0, 0.01])
    trace = poutine.trace(model).get_trace(data.x_train, data.y_train)
    sites = [name for name, _ in trace.iter_stochastic_nodes() if name != "rows"]
    draws = {name: torch.rand(3, *trace.nodes[name]["value"].shape) for name in sites}
    scores = uci.scores(model, draws, data)

    with np.load(data_dir / "uci" / "bostonHousing.npz") as file:
        x, y, train, test = (file[key] for key in ("X", "y", "train_idx", "test_idx"))
    train, test = train[0], test[0]
    centre, spread = x[train].mean(0), x[train].std(0, ddof=1)
    spread[2] = 1.0
    x = (x[test] - centre) / spread
    y_mean, y_sd = y[train].mean(), y[train].std(ddof=1)
    means, sds = [], []
    for k in range(3):
        w1, b1, w2, b2 = (
            draws[name][k].numpy() for name in ("0.weight", "0.bias", "2.weight", "2.bias")
        )
        means.append(y_mean + y_sd * (np.maximum(x @ w1.T + b1, 0) @ w2.T + b2)[:, 0])
        sds.append(y_sd / math.sqrt(draws["precision"][k]))
    rmse = np.sqrt(np.mean((np.mean(means, 0) - y[test]) ** 2))
    density = [
        np.exp(-((y[test] - m) ** 2) / (2 * s**2)) / (s * math.sqrt(2 * math.pi))
        for m, s in zip(means, sds, strict=True)
    ]
    expected = {
        "rmse": rmse,
        "log_likelihood": np.log(np.mean(density, 0)).mean(),
        "noise_sd": np.mean(sds),
    }
    for field, value in expected.items():
        assert math.isclose(scores[field], value, rel_tol=1e-4)


def test_minibatches_count_for_all_rows(data_dir) -> None:
    data = uci_data.load("boston", 0, data_dir)
    full = uci_methods.make_model(data, 5, None, [1.0, 0.01])
    batches = uci_methods.make_model(data, 5, 9, [1.0, 0.01])
    trace = poutine.trace(full).get_trace(data.x_train, data.y_train)
    values = {name: site["value"] for name, site in trace.iter_stochastic_nodes()}
    values.pop("rows", None)
    expected = trace.log_prob_sum()
    pyro.set_rng_seed(0)
    found = [
        poutine.trace(poutine.condition(batches, values))
        .get_trace(data.x_train, data.y_train)
        .log_prob_sum()
        for _ in range(400)
    ]
    found = torch.stack(found)
    error = (found.mean() - expected) / (found.std() / len(found) ** 0.5)
    assert abs(error) < 4
    assert found.std() > 0.1


def test_missing_set(data_dir, capsys, monkeypatch) -> None:
    def offline(*args, **kwargs):
        raise URLError("no network")

    monkeypatch.setattr(uci_data, "urlopen", offline)
    (data_dir / "uci" / "bostonHousing.npz").unlink()
    assert call(data_dir, "--splits", "0") == []
    printed = capsys.readouterr().out
    assert "boston is left out" in printed
    assert "bostonHousing.npz not found. Cure: point --data-dir to the folder" in printed
    assert "housing.data: <urlopen error no network>" in printed


def test_download(tmp_path, monkeypatch) -> None:
    """The table of the repository and the standard splits: their start as in the papers' files."""
    table = np.random.default_rng(0).normal(size=(506, 14))
    text = io.BytesIO()
    np.savetxt(text, table)
    text.seek(0)
    monkeypatch.setattr(uci_data, "urlopen", lambda url, timeout: text)
    data = uci_data.load("boston", 0, tmp_path)
    with np.load(tmp_path / "uci" / "bostonHousing.npz") as file:
        np.testing.assert_allclose(file["y"], table[:, 13])
        np.testing.assert_allclose(file["X"], table[:, :13])
        assert file["train_idx"].shape == (20, 455)
        assert file["train_idx"][0, :5].tolist() == [307, 343, 47, 67, 362]
        assert file["test_idx"][19, -5:].tolist() == [482, 277, 446, 86, 283]
    assert len(data.y_test) == 51


def test_errors(data_dir, capsys) -> None:
    with pytest.raises(ValueError, match="has the splits 0 to 1, but got 2"):
        call(data_dir, "--splits", "2")
    with pytest.raises(SystemExit):
        uci.parser().parse_args(["--set-option", "livi.rate=1"])
    assert "'livi.rate=1' is no option" in capsys.readouterr().err
