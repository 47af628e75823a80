# SPDX-License-Identifier: Apache-2.0
"""The script that times GPVI runs with tiny arguments."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from benchmarks import gpvi_speed


def test_the_benchmark_has_60000_latents():
    assert sum(inputs * outputs for inputs, outputs in gpvi_speed.LAYERS) == 60_000


def test_logits():
    torch.manual_seed(0)
    hidden, output = torch.randn(3, 4), torch.randn(4, 2)
    net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    net[0].weight.data, net[2].weight.data = hidden.T, output.T
    x, theta = torch.randn(5, 3), torch.cat([hidden.flatten(), output.flatten()])
    batch = torch.stack([theta, 2 * theta])
    logits = gpvi_speed.logits(batch, x, [(3, 4), (4, 2)])
    torch.testing.assert_close(logits[0], net(x))
    torch.testing.assert_close(logits[1], 4 * net(x))


def test_peak_megabytes():
    megabytes = gpvi_speed.peak_megabytes(lambda: torch.ones(25_000_000))
    if megabytes is None:
        pytest.skip("no Linux")
    assert 90 < megabytes < 130


def test_script(tmp_path, capsys):
    out = tmp_path / "gpvi_speed.json"
    words = "--particles 3 --rows 4 --turns 5 --seconds 1e-9 --layers [[20,15],[15,2]]".split()
    arguments = [*words, "--generators", "default", "--out", str(out)]
    gpvi_speed.main(gpvi_speed.parser().parse_args(arguments))
    result = json.loads(out.read_text())
    assert result["settings"]["latents"] == 330
    timed = result["generators"]["default"]
    assert timed["ratios"]["amortised SVGD"] == 1
    for name, case in timed["cases"].items():
        assert case["steps"] == (2 if "helper" in name else 5)
        assert timed["ratios"][name] > 0
    assert "default: GPVI, helper network" in capsys.readouterr().out
