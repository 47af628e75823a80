# SPDX-License-Identifier: Apache-2.0
"""The table of step times measures plain and recorded steps of the same training."""

from __future__ import annotations

import pytest

from benchmarks.speed.steps import CASES, measure


@pytest.mark.parametrize("name", ["LIVI, 8", "SIVI, 64"])
def test_plain_and_recorded_steps_reach_the_same_loss(name: str) -> None:
    plain, recorded = (measure(CASES[name], mode, 5) for mode in (False, "trace"))
    assert plain["refusal"] is None and recorded["refusal"] is None
    assert recorded["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert plain["step"] > 0 and recorded["step"] > 0
