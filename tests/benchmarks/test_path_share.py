# SPDX-License-Identifier: Apache-2.0
"""``benchmarks.path_share`` with tiny arguments."""

from __future__ import annotations

import math

from benchmarks import path_share


def test_runs_and_reports():
    records = [
        {"model": "gaussian", "frame": frame, "path": path}
        | path_share.run("gaussian", frame, path, 0, 2)
        for frame in ("auto", None)
        for path in path_share.SHARES
    ]
    assert all(math.isfinite(record["loss"]) for record in records)
    assert [bool(record["shares"]) for record in records] == [False, False, True] * 2
    lines = path_share.report(records).splitlines()
    assert lines[2].startswith("| gaussian | yes |") and '"auto"' in lines[0]
