# SPDX-License-Identifier: Apache-2.0
"""Draws in memory and on disk."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.mcmc.draws import DrawStore

DRAWS = torch.arange(24.0).reshape(4, 3, 2)  # snapshots, chains, dimensions


@pytest.mark.parametrize("on_disk", [False, True])
def test_draws_are_taken_in_any_order(on_disk, tmp_path):
    store = DrawStore(tmp_path / "new" / "draws" if on_disk else None)
    for snapshot in DRAWS:
        store.append(snapshot)
    rows = torch.tensor([11, 0, 5, 5, 4])
    assert len(store) == 4 and store.take(rows).equal(DRAWS.flatten(0, 1)[rows])


def test_goes_on_after_a_kill(tmp_path):
    store = DrawStore(tmp_path)
    store.begin()
    for snapshot in DRAWS[:3]:
        store.append(snapshot)
    again = DrawStore(tmp_path)
    again.go_on(2)  # the last was written after the checkpoint
    again.append(DRAWS[2])
    assert again.take(torch.arange(9)).equal(DRAWS[:3].flatten(0, 1))
    with pytest.raises(ValueError, match="holds 3 snapshots of another run.*Cure"):
        DrawStore(tmp_path).begin()
    with pytest.raises(ValueError, match="holds 3 snapshots.*expects 5.*Cure"):
        DrawStore(tmp_path).go_on(5)
