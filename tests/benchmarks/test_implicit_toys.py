# SPDX-License-Identifier: Apache-2.0
"""The toys' total variation has its known values, and the script runs with tiny arguments."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch

from benchmarks import implicit_toys


def normal_cdf(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def test_bin_masses():
    masses = implicit_toys.bin_masses(torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64))
    mixture_cdf = [0.5 * (normal_cdf(x + 3) + normal_cdf(x - 3)) for x in (-3.0, 0.0, 2.0)]
    expected = [a - b for a, b in zip([*mixture_cdf, 1.0], [0.0, *mixture_cdf], strict=True)]
    assert masses.tolist() == pytest.approx(expected, abs=1e-12)


def test_total_variation_by_hand():
    edges = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    masses = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    draws = torch.tensor([-5.0, -0.5, -0.4, 0.5, 0.6, 0.7, 2.0, 3.0, 4.0, 9.0])
    # frequencies .1, .2, .3, .4: half of .2 + .2
    assert implicit_toys.total_variation(draws, edges, masses) == pytest.approx(0.2)


def test_total_variation_of_one_mode_and_of_the_truth():
    torch.manual_seed(0)
    one = implicit_toys.measure_mixture(torch.randn(100_000) - 3)
    assert one["total_variation"] == pytest.approx(0.5, abs=0.01)
    assert one["weight_right"] == pytest.approx(1 - normal_cdf(3), abs=5e-4)
    assert one["sd_left"] == pytest.approx(1, abs=0.02)
    truth = implicit_toys.measure_mixture(implicit_toys.MIXTURE.sample((100_000,)))
    assert truth["total_variation"] < 0.02
    assert truth["weight_right"] == pytest.approx(0.5, abs=0.01)


def test_the_mixture_of_two_unit_normals():
    x = torch.tensor([-3.0, 0.5])
    expected = [
        math.log(sum(math.exp(-((v - m) ** 2) / 2) for m in (-3, 3)) / 2 / math.sqrt(2 * math.pi))
        for v in x.tolist()
    ]
    assert implicit_toys.MIXTURE.log_prob(x).tolist() == pytest.approx(expected, rel=1e-5)


def test_the_exact_correlation_of_the_logistic_posterior():
    x, y = (tensor.double() for tensor in implicit_toys.logistic_data())
    axis = torch.linspace(-1.5, 1.0, 201, dtype=torch.float64)
    w = torch.cartesian_prod(axis, axis)
    margins = (2 * y - 1) * (w @ x.T)
    mass = (torch.nn.functional.logsigmoid(margins).sum(-1) - w.square().sum(-1) / 2).softmax(-1)
    cov = torch.cov(w.T, aweights=mass, correction=0)
    correlation = cov[0, 1] / cov.diagonal().prod().sqrt()
    assert correlation.item() == pytest.approx(implicit_toys.LOGISTIC_CORRELATION, abs=5e-4)


def test_script(no_search, few_resamples, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(implicit_toys, "NUTS", partial(implicit_toys.NUTS, max_tree_depth=3))
    out = tmp_path / "toys.jsonl"
    out.write_text('{"toy": "mixture", "method": "old"}\n')
    arguments = "--seeds 1 --steps 2 --draws 100 --nuts-draws 8".split()
    implicit_toys.main([*arguments, "--out", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    methods = {
        toy: {line["method"] for line in lines if line["toy"] == toy} for toy in implicit_toys.RUNS
    }
    assert methods["mixture"] == {*implicit_toys.MIXTURE_METHODS, "exact draws"}
    assert methods["logistic"] == {*implicit_toys.LOGISTIC_METHODS, "NUTS"}
    assert out.with_suffix(".md").read_text() in capsys.readouterr().out
    for toy in methods:
        assert (tmp_path / f"toys_{toy}.png").stat().st_size < 150_000
