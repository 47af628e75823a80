# SPDX-License-Identifier: Apache-2.0
"""Inductor's kernels in one file compute what the recorded function does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import fresh_cache

from pyro_implicit.compiled import RecordedFunction, inductor


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_kernels_share_a_file(tmp_path):
    def function():
        wave = x.sin()
        return [(wave @ wave).cos(), wave.sum(0)]  # a product between two kernels

    x = torch.randn(8, 8, dtype=torch.float64)
    recorded = RecordedFunction(function, [x])
    with fresh_cache(dir=str(tmp_path)):
        recorded.compile([x])
        (file,) = Path(tmp_path).rglob("*.main.cpp")
        assert file.read_text().count("PyMODINIT_FUNC") > 1
    x = torch.randn(8, 8, dtype=torch.float64)
    for found, expected in zip(recorded([x]), function(), strict=True):
        torch.testing.assert_close(found, expected)


def test_inductor_goes_its_own_way_where_torch_has_changed(monkeypatch):
    def fails(vectorised):
        raise AttributeError("torch has changed")

    used = []

    def compile_fx(module, examples, config_patches):
        used.append(config_patches)
        return module

    monkeypatch.setattr(inductor, "one_library", fails)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    x = torch.randn(3)
    recorded = RecordedFunction(lambda: [x.sin()], [x])
    recorded.compile([x])
    assert used == [inductor.SETTINGS]
    assert recorded([x])[0].equal(x.sin())
