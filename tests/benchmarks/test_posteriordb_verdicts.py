# SPDX-License-Identifier: Apache-2.0
"""The verdicts on a correlated Gaussian, of which one guide is exact and one is far too narrow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from benchmarks.common import read_records
from benchmarks.posteriordb import verdicts
from pyro_implicit.diagnostics.verdict import Diagnosis
from pyro_implicit.guides.auto_mixture import AutoMixture
from pyro_implicit.infer.bound import EvidenceBound

pytestmark = pytest.mark.usefixtures("double")

LOC = torch.tensor([1.0, -2.0], dtype=torch.float64)
COVARIANCE = torch.tensor([[4.0, 1.9], [1.9, 1.0]], dtype=torch.float64)


def gaussian(loc: Tensor) -> None:
    pyro.sample("x", dist.MultivariateNormal(loc, COVARIANCE))


@dataclass
class Stub:
    """What the script asks of a posterior."""

    model: Any = gaussian
    args: tuple = (LOC,)

    def reference(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(7)
        noise = torch.randn(2000, 2, generator=generator, dtype=torch.float64)
        return {"x": LOC + noise @ torch.linalg.cholesky(COVARIANCE).T}

    def unconstrain(self, draws: dict[str, Tensor]) -> Tensor:
        return draws["x"]


@pytest.fixture(autouse=True)
def stub(few_resamples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts.data, "NAMES", ("gaussian",))
    monkeypatch.setattr(verdicts.data, "EXTRA", ())
    monkeypatch.setattr(verdicts.data, "load", lambda name, data_dir: Stub())


def call(out: Path, *words: str) -> dict[tuple[str, str], dict]:
    verdicts.main(verdicts.parser().parse_args(["--data-dir", ".", "--out", str(out), *words]))
    return {(record["posterior"], record["guide"]): record for record in read_records(out)}


def test_gaussian_guides(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    records = call(out, "--posteriors", "gaussian")
    assert [guide for _, guide in records] == ["laplace", "mean-field", "fit"]
    for guide in ("laplace", "fit"):
        record = records["gaussian", guide]
        assert (verdicts.true_class(record), record["verdict"]) == ("good", "trust")
        assert record["ratio"] < 1.2 and record["findings"] == [] and record["num_modes"] == 1
        assert record["efficiency"] > 0.99 and record["dim"] == 2
    narrow = records["gaussian", "mean-field"]
    # Its variances are those given the other coordinate: 1 - 0.95^2 of the right ones.
    assert narrow["sd_ratio_min"] == pytest.approx(0.0975**0.5, rel=0.05)
    assert narrow["sd_ratio_max"] == pytest.approx(0.0975**0.5, rel=0.05)
    assert (verdicts.true_class(narrow), narrow["verdict"]) == ("bad", "do not trust")
    assert ["do not trust", "Stein"] in narrow["findings"]

    before = out.read_text()
    call(out, "--posteriors", "gaussian")
    assert out.read_text() == before
    call(out, "--report")
    page = out.with_suffix(".md").read_text()
    assert "| good | 2 | 0 | 0 |" in page and "| bad | 0 | 0 | 1 |" in page
    assert "false trust (trust when bad): 0\n" in page and "Stein!" in page


def test_one_mode_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mixture the first component is judged, too; and what fails does not end the run."""

    class Fake(AutoMixture):
        def __init__(self) -> None:
            pass

        def __call__(self, *args: Any) -> None:
            raise RuntimeError("broken")

        components = [lambda loc: pyro.sample("x", dist.MultivariateNormal(loc + 4, COVARIANCE))]

    def fails(*_: Any) -> None:
        raise ArithmeticError("no Gaussian")

    fits = []
    monkeypatch.setattr(verdicts, "NUM_DRAWS", 1000)
    monkeypatch.setattr(verdicts, "gaussian_guide", fails)
    quick = {"num_samples": 500, "num_transitions": 0, "modes": None}
    monkeypatch.setattr(verdicts, "diagnose", partial(verdicts.diagnose, **quick))
    monkeypatch.setattr(verdicts, "fit", lambda *_, **__: fits.append(1) or Fit(Fake()))
    records = call(tmp_path / "out.jsonl", "--posteriors", "gaussian")
    assert [guide for _, guide in records] == ["laplace", "mean-field", "one mode", "fit"]
    shifted = records["gaussian", "one mode"]
    assert shifted["verdict"] == "do not trust" and shifted["mean_error"] == pytest.approx(
        4, rel=0.1
    )
    assert "error" in records["gaussian", "fit"] and len(fits) == 1
    report = verdicts.report(list(records.values()))
    assert "* gaussian fit: " in report
    assert "* gaussian laplace: ArithmeticError: no Gaussian" in report


@dataclass
class Fit:
    guide: Any


def test_targets_need_no_data() -> None:
    for name in verdicts.TARGETS:
        case = verdicts.load(verdicts.PREFIX + name, None)
        assert case.reference.shape == (10_000, 10 if "funnel" in name else 2)
    assert torch.equal(case.flatten({"x": LOC.expand(3, 2)}), LOC.expand(3, 2))


@pytest.mark.parametrize(
    ("low", "high", "mean_error", "ratio", "truth"),
    [
        (0.92, 1.09, 0.09, 1.4, "good"),
        (0.89, 1.0, 0.0, 1.0, "between"),
        (1.0, 1.11, 0.0, 1.0, "between"),
        (1.0, 1.0, 0.11, 1.0, "between"),
        (1.0, 1.0, 0.0, 1.6, "between"),
        (0.79, 1.0, 0.0, 1.0, "bad"),
        (0.0, 1.0, 0.0, 1.0, "bad"),
        (1.0, 1.26, 0.0, 1.0, "bad"),
        (1.0, 1.0, 0.26, 1.0, "bad"),
    ],
)
def test_true_class(low: float, high: float, mean_error: float, ratio: float, truth: str) -> None:
    record = {"sd_ratio_min": low, "sd_ratio_max": high, "mean_error": mean_error, "ratio": ratio}
    assert verdicts.true_class(record | {"sd_noise": 1.0}) == truth


def test_noise_of_the_reference_is_forgiven() -> None:
    reference = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
    assert 1 < verdicts.sd_noise(reference) < 1.1
    noise = verdicts.sd_noise((4 * reference).exp())  # hardly any variance is ever seen
    assert noise > 1.3
    record = {"sd_ratio_min": 1.0, "sd_ratio_max": noise, "mean_error": 0.0, "ratio": 1.0}
    assert verdicts.true_class(record | {"sd_noise": noise}) == "good"
    assert verdicts.true_class(record | {"sd_noise": 1.0}) == "bad"


def test_findings_have_names() -> None:
    bound = EvidenceBound(0.0, 0.0, 0.9, 100.0)
    assert verdicts.summary(Diagnosis(1000, 2, bound))["findings"] == [["do not trust", "k-hat"]]
    found = verdicts.summary(Diagnosis(1000, 2, no_density="why"))
    assert found["findings"] == [["check", "no density"]] and found["khat"] is None
    found = verdicts.summary(Diagnosis(1000, 2, broken="collapsed"))
    assert found["findings"] == [["do not trust", "broken"]]


def test_false_trust_is_named() -> None:
    errors = {
        "sd_noise": 1.0,
        "sd_ratio_min": 0.5,
        "sd_ratio_max": 1.0,
        "mean_error": 0.0,
        "ratio": 5.0,
    }
    record = {"posterior": "p", "guide": "g", "verdict": "trust"} | errors
    assert "false trust (trust when bad): 1 (p g)" in verdicts.confusion([record])
