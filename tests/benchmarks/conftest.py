# SPDX-License-Identifier: Apache-2.0
"""What several benchmarks' tests share."""

from __future__ import annotations

import pytest

from pyro_implicit.guides import auto_implicit


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guides start as with frame=None: of tiny runs the search takes nine tenths of the time."""
    monkeypatch.setattr(auto_implicit, "find_frame", lambda *args: None)
