# SPDX-License-Identifier: Apache-2.0
"""Bars are for people who watch."""

from __future__ import annotations

import io

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import diagnose, fit
from pyro_implicit.runtime import progress
from pyro_implicit.runtime.policy import DisplayPolicy


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def model():
    pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def watch(monkeypatch, stream):
    """Not in a fixture: between setup and call pytest puts its own stream there again."""
    monkeypatch.setattr(progress, "DISPLAY", DisplayPolicy(0.0, 0.0))
    monkeypatch.setattr("sys.stderr", stream)
    return stream


def test_a_terminal_sees_every_part(monkeypatch):
    stream = watch(monkeypatch, Terminal())
    fit(model, seed=0)
    assert "search:" in stream.getvalue()
    diagnose(model, AutoNormal(model), num_samples=100, num_transitions=2)
    shown = stream.getvalue()
    for name in ("diagnose: about 0 s of one core", "weights:", "scores:", "short HMC:"):
        assert name in shown


@pytest.mark.parametrize(("stream", "wanted"), [(Terminal(), False), (io.StringIO(), True)])
def test_nothing_in_a_log_or_unless_wanted(stream, wanted, monkeypatch):
    watch(monkeypatch, stream)
    guide = AutoNormal(model)
    diagnose(model, guide, num_samples=100, num_transitions=2, progress=wanted)
    fit(model, guide, num_steps=3, progress=wanted)
    assert stream.getvalue() == ""


def test_inner_parts_are_silent_by_themselves(monkeypatch):
    stream = watch(monkeypatch, Terminal())
    with progress.watching(True):
        pass
    assert list(progress.steps_of(range(2), 2, "search")) == [0, 1]
    assert stream.getvalue() == ""
