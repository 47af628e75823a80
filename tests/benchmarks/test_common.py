# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks rest on: no run twice, failures kept, limits held."""

from __future__ import annotations

import pytest

from benchmarks.common import (
    TimeLimit,
    append_record,
    attempt,
    missing_runs,
    read_records,
    run_missing,
    spread,
    time_limit,
    write_page,
)


def test_runs_are_missing_until_all_their_settings_are_recorded(tmp_path):
    out = tmp_path / "new" / "runs.jsonl"
    keys = [{"method": "a", "seed": seed, "lr": 0.1} for seed in range(3)]
    assert list(missing_runs(out, keys)) == keys
    append_record(out, keys[1] | {"sw2": 1.0})
    append_record(out, keys[2] | {"lr": 0.2})
    append_record(out, {"method": "a", "seed": 0})
    assert list(missing_runs(out, keys)) == [keys[0], keys[2]]


def test_what_is_missing_is_run_and_recorded_with_its_key(tmp_path):
    out, keys = tmp_path / "runs.jsonl", [{"seed": seed} for seed in range(2)]
    append_record(out, keys[0])
    run_missing(out, keys, lambda key: {"twice": 2 * key["seed"]})
    record = read_records(out)[1]
    assert (record["seed"], record["twice"], record["device"]) == (1, 2, "cpu")
    run_missing(out, keys, lambda key: pytest.fail("run twice"))


def test_a_diverged_fit_is_a_result_and_a_mistake_is_not():
    assert attempt(lambda x: {"half": x / 2}, 3) == {"half": 1.5}
    assert attempt(lambda: 1 / 0) == {"error": "ZeroDivisionError: division by zero"}
    with pytest.raises(KeyError):
        attempt(lambda: {}["x"])


@pytest.mark.parametrize("cpu, words", [(True, "0.05 CPU s"), (False, "0.05 s")])
def test_limits_interrupt(cpu, words):
    with pytest.raises(TimeLimit, match=f"more than {words}"), time_limit(0.05, cpu):
        while True:
            pass


def test_spread():
    assert spread([1.0, 2.0, 6.0], 1) == "3.0 (1.0 to 6.0)"
    assert spread([2.0], 2) == "2.00"
    assert spread([], 1) == "failed" and spread([], 1, none="-") == "-"


def test_the_page_lies_beside_its_records(tmp_path, capsys):
    write_page(tmp_path / "x.jsonl", "µ\n")
    assert (tmp_path / "x.md").read_text(encoding="utf-8") == "µ\n"
    assert "µ" in capsys.readouterr().out
