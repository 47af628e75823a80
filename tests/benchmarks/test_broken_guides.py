# SPDX-License-Identifier: Apache-2.0
"""Faults have the sizes and densities that they claim, and their verdicts are counted right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from benchmarks.broken_guides import report, run
from benchmarks.broken_guides.cases import good_one, load, modes_of
from benchmarks.broken_guides.faults import SIZES, break_it
from benchmarks.broken_guides.split import LOOK, SCORE
from benchmarks.common import read_records

pytestmark = pytest.mark.usefixtures("double")

COVARIANCE = torch.tensor([[4.0, 1.9], [1.9, 1.0]], dtype=torch.float64)
POSTERIOR = MultivariateNormal(torch.tensor([1.0, -2.0], dtype=torch.float64), COVARIANCE)


class Good:
    """A correlated Gaussian."""

    def sample(self, num: int) -> Tensor:
        return POSTERIOR.sample((num,))

    def log_prob(self, points: Tensor) -> Tensor:
        return POSTERIOR.log_prob(points)


@pytest.mark.parametrize("kind", [kind for kind in SIZES if kind != "mode"])
def test_faults(kind: str) -> None:
    size = SIZES[kind][-1]
    fault = break_it(Good(), kind, size)
    assert fault is not None
    draws, exact = fault.broken.sample(20_000), POSTERIOR.sample((20_000,))
    # Both densities are normalised: each integrates to 1 over the draws of the other.
    log_ratio = fault.broken.log_prob(exact) - POSTERIOR.log_prob(exact)
    if kind not in ("width", "direction", "correlation"):  # where the weights vary too much
        assert log_ratio.exp().mean().item() == pytest.approx(1.0, abs=0.05)
    before, after = exact @ fault.directions, draws @ fault.directions
    ratio = [(a.std() / b.std()).item() for a, b in zip(after.T, before.T, strict=True)]
    if kind == "shift":
        distance = ((after - before).mean() / before.std()).item()
        assert distance == pytest.approx(size, abs=0.03)
    elif kind == "width":
        assert (draws.std(0) / exact.std(0)).tolist() == pytest.approx([size, size], rel=0.03)
        inside = POSTERIOR.log_prob((draws - POSTERIOR.loc) / size + POSTERIOR.loc)
        expected = inside - 2 * torch.tensor(size).log()
        torch.testing.assert_close(fault.broken.log_prob(draws), expected, atol=0.05, rtol=0)
    elif kind == "direction":
        assert ratio == pytest.approx([size], rel=0.03)
    elif kind == "correlation":
        assert draws.mT.corrcoef()[0, 1].item() == pytest.approx(0.0, abs=0.03)
        # A correlation of .95 lost: sds too small along one direction and too large along another.
        assert ratio == pytest.approx([1.95**-0.5, 0.05**-0.5], rel=0.04)
    elif kind == "tail":
        edge = before.quantile(1 - size).item()
        assert after.max().item() == pytest.approx(edge, abs=0.02 * before.std().item())


def test_modes_lose_their_weight_or_their_draws() -> None:
    name = "target:x_shape_gap"
    good, modes = good_one(name, load(name, None), 0), modes_of(name)
    for size, share in ((0.3, 0.3 / 1.3), (0.0, 0.0)):
        fault = break_it(good, "mode", size, modes)
        assert fault is not None
        left = (fault.broken.sample(5000)[:, 0] < 0).double().mean().item()
        assert min(left, 1 - left) == pytest.approx(share, abs=0.02)
    assert break_it(good, "correlation", 1.0) is None and break_it(good, "mode", 0.0) is None


def test_run_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A funnel whose tails are cut has even weights and no moments to speak of."""
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(run, "SIZES", {"tails": (0.1,)})
    monkeypatch.setattr(run, "floor", lambda reference: 0.01)
    words = run.parser().parse_args(["--posteriors", "target:funnel", "--out", str(out)])
    run.main(words)
    run.main(words)
    (record,) = read_records(out)
    assert record["efficiency"] > 0.999 and record["verdict"] != "trust"
    assert "escape" in [name for _, name in record["findings"]]
    trusted = record | {"verdict": "trust"}
    assert report.is_false_trust(trusted) and not report.is_false_trust(record)
    page = report.page([record, trusted])
    right, wrong = record["verdict"] == "check", record["verdict"] == "do not trust"
    row = f"| all tails cut, mass 0.1 | 2 | 2 | 1 | {right:d} | {wrong:d} | 1 |"
    assert row in page
    report.picture([record, trusted], tmp_path / "out.png")
    assert (tmp_path / "out.png").exists()


def test_no_posterior_is_looked_at_and_scored() -> None:
    assert not set(LOOK) & set(SCORE) and len(LOOK) + len(SCORE) >= 10
