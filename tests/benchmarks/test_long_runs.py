# SPDX-License-Identifier: Apache-2.0
"""The queue of long runs with trivial rows: order, kills, stops, and the status from the files."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import energy_potentials, gpvi_tables, long_runs, toy_classification, vae_mnist
from benchmarks.long_runs import ROOT, Queue, Row, main, parser
from benchmarks.networks import lenet, open_category
from benchmarks.paper_rows import ROWS

STEPS = 40
# Adds random numbers, with a checkpoint in each step.
COUNTER = """
import json, os, pathlib, random, sys, time
file, out, name, steps = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
stream, step, total = random.Random(0), 0, 0.0
if file.exists():
    step, total, state = json.loads(file.read_text())
    stream.setstate((state[0], tuple(state[1]), state[2]))
while step < steps:
    step, total = step + 1, total + stream.random()
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps([step, total, stream.getstate()]))
    os.replace(partial, file)
    time.sleep(0.03)
print("finished")
with open(out, "a") as lines:
    lines.write(json.dumps({"name": name, "total": total}) + chr(10))
"""
QUEUE = """
import sys
from benchmarks.long_runs import main, parser
from tests_rows import ROWS
main(parser().parse_args(), ROWS)
"""


def counter(folder: Path, name: str = "count", steps: int = STEPS, **options: float) -> Row:
    out = str(folder / "results.jsonl")
    command = ("-c", COUNTER, "{runs}/" + name + ".pt", out, name, str(steps))
    return Row(name, command, **({"hours": 1.0, "value": 1.0} | options), out=out,
               lines=({"name": name},))  # fmt: skip


def exact(steps: int = STEPS) -> float:
    stream = random.Random(0)
    return sum(stream.random() for _ in range(steps))


def arguments(folder: Path, *words: str):
    files = ["--runs", str(folder / "runs"), "--hours", str(folder / "hours.jsonl")]
    return parser().parse_args([*files, "--poll", "0.01", *words])


def results(folder: Path) -> list[dict]:
    file = folder / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(autouse=True)
def handlers():
    """The handlers of signals as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_rows_run_by_value_per_hour_and_once(tmp_path, capsys):
    values = {"slow": (1.0, 4.0), "first": (3.0, 1.0), "second": (4.0, 2.0)}
    rows = [counter(tmp_path, n, 1, value=v, hours=h) for n, (v, h) in values.items()]
    main(arguments(tmp_path), rows)
    assert [one["name"] for one in results(tmp_path)] == ["first", "second", "slow"]
    assert "0 rows, about 0.0 CPU hours to go" in capsys.readouterr().out
    main(arguments(tmp_path), rows)
    assert len(results(tmp_path)) == 3
    assert (tmp_path / "runs/queue/slow.log").read_text() == "finished\n"


def test_a_started_row_counts_with_its_remaining_hours(tmp_path):
    rows = [counter(tmp_path, "short", hours=2.0), counter(tmp_path, "long", hours=3.0)]
    queue = Queue(rows, arguments(tmp_path))
    assert [row.name for row in queue.pending()] == ["short", "long"]
    queue.save(rows[1], 1.5)
    assert [row.name for row in queue.pending()] == ["long", "short"]
    assert queue.left(rows[1]) == 1.5
    queue.save(rows[1], 5.0)
    assert queue.left(rows[1]) == pytest.approx(0.3)
    assert "short: 0.00 of about 2 CPU hours" in queue.progress(rows[0], 0.5)
    assert "2.3 CPU hours to go, 4.6 hours at 0.50 cores" in queue.progress(rows[0], 0.5)


def test_status_comes_from_the_result_file(tmp_path, capsys):
    rows = [counter(tmp_path, "a"), counter(tmp_path, "b"), counter(tmp_path, "c")]
    (tmp_path / "results.jsonl").write_text('{"name": "b", "total": 1.0}\n{"name": "d"}\n')
    Queue(rows, arguments(tmp_path)).save(rows[2], 0.25)
    main(arguments(tmp_path, "--list"), rows)
    shown = [line.split(" | ")[:3] for line in capsys.readouterr().out.splitlines()[2:5]]
    assert shown == [
        ["| c", "started", "0.25"],
        ["| a", "waiting", "0.00"],
        ["| b", "done", "0.00"],
    ]
    assert len(results(tmp_path)) == 2  # nothing ran


def test_once_runs_one_row(tmp_path):
    main(arguments(tmp_path, "--once", "b"), [counter(tmp_path, n, 1) for n in "ab"])
    assert [one["name"] for one in results(tmp_path)] == ["b"]


@pytest.mark.skipif(
    not os.access("/proc/self/autogroup", os.W_OK), reason="sessions are no groups here"
)
def test_a_row_keeps_the_niceness_of_its_queue(tmp_path, monkeypatch):
    """Although it has a session of its own, whose niceness starts at 0."""
    monkeypatch.setattr(os, "nice", lambda change: 7)
    code = "import pathlib, sys, time; file = pathlib.Path('/proc/self/autogroup'); "
    code += "[time.sleep(0.01) for _ in range(500) if not file.read_text().endswith('nice 7\\n')]; "
    code += "pathlib.Path(sys.argv[1]).write_text(file.read_text())"
    row = Row("nice", ("-c", code, str(tmp_path / "found")), 1.0, 1.0, "none.jsonl", ({},))
    main(arguments(tmp_path, "--once", "nice"), [row])
    assert (tmp_path / "found").read_text().endswith("nice 7\n")


def test_a_row_that_fails_is_passed_over(tmp_path, capsys):
    bad = Row("bad", ("-c", "raise SystemExit(3)"), 0.1, 9.0, str(tmp_path / "no.jsonl"), ({},))
    main(arguments(tmp_path), [bad, counter(tmp_path, "good", 1)])
    assert [one["name"] for one in results(tmp_path)] == ["good"]
    printed = capsys.readouterr().out
    assert "exit status 3 without a result" in printed
    assert "| bad | failed |" in printed


def start(folder: Path, *words: str) -> subprocess.Popen:
    """A queue in a process of its own, once its row has written a few checkpoints."""
    row = counter(folder)
    (folder / "tests_rows.py").write_text(
        f"from benchmarks.long_runs import Row\nROWS = [{row!r}]\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", QUEUE, "--runs", str(folder / "runs"), "--poll", "0.01",
         "--hours", str(folder / "hours.jsonl"), *words],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"}, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: steps(folder) > 5 or process.poll() is not None)
    return process


def steps(folder: Path) -> int:
    file = folder / "runs/count.pt"
    return json.loads(file.read_text())[0] if file.exists() else 0


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_queue_continues_to_the_same_result(tmp_path):
    queue = start(tmp_path)
    queue.kill()
    queue.communicate()
    # The row outlives its queue, and a second queue does not start a second process.
    refused, _ = start(tmp_path).communicate()
    assert "belongs to process" in refused and "row 'count'" in refused
    pid = int((tmp_path / "runs/queue/lock").read_text().split()[1].rstrip(","))
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    reached = steps(tmp_path)
    assert 0 < reached < STEPS and results(tmp_path) == []
    main(arguments(tmp_path), [counter(tmp_path)])
    assert results(tmp_path) == [{"name": "count", "total": exact()}]
    assert json.loads((tmp_path / "hours.jsonl").read_text())["row"] == "count"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stops_on_request_after_a_checkpoint(tmp_path, number):
    queue = start(tmp_path)
    asked = time.time()
    os.killpg(queue.pid, number)  # as a terminal does; the row must not see it
    printed, _ = queue.communicate()
    assert queue.returncode == 0
    assert "stopped; the next queue continues" in printed and "| count | started |" in printed
    assert (tmp_path / "runs/count.pt").stat().st_mtime > asked
    assert 5 < steps(tmp_path) < STEPS and results(tmp_path) == []
    main(arguments(tmp_path), [counter(tmp_path)])
    assert results(tmp_path) == [{"name": "count", "total": exact()}]


def test_a_request_waits_for_a_checkpoint_but_not_for_ever(tmp_path):
    queue = Queue([], arguments(tmp_path, "--patience", "100"))
    old = tmp_path / "runs/old.pt"
    old.write_text("")
    os.utime(old, (time.time() - 9, time.time() - 9))
    queue.ask_to_stop()
    assert not queue.may_kill()
    for name in ("new.pt.partial", "queue/row.json"):
        (tmp_path / "runs" / name).write_text("")
    assert not queue.may_kill()
    queue.asked_at -= 101
    assert queue.may_kill()
    queue.asked_at += 101
    queue.ask_to_stop()
    assert queue.may_kill()  # asked twice


def test_max_seconds(tmp_path, capsys):
    main(arguments(tmp_path, "--max-seconds", "0.4"), [counter(tmp_path)])
    assert "stopped" in capsys.readouterr().out
    assert results(tmp_path) == [] and steps(tmp_path) < STEPS


def test_progress_is_printed(tmp_path, capsys):
    main(arguments(tmp_path, "--report-every", "0.2"), [counter(tmp_path, steps=20)])
    assert "0.00 of about 1 CPU hours; all rows: about 1.0 CPU hours" in capsys.readouterr().out


def test_the_folder_of_checkpoints_is_ignored():
    runs = long_runs.parser().parse_args([]).runs
    command = ["git", "check-ignore", "-q", str(runs / "x.pt")]
    assert subprocess.run(command, cwd=ROOT).returncode == 0


def test_rows_of_the_papers():
    """Names are unique, and each command is one that its script understands."""
    assert len({row.name for row in ROWS}) == len(ROWS)
    vae = vae_mnist.example()
    parsers = {
        "energy_potentials": energy_potentials.parser,
        "gpvi_tables": gpvi_tables.parser,
        "networks.lenet": lenet.parser,
        "networks.open_category": open_category.parser,
        "toy_classification": toy_classification.parser,
        "vae_mnist": lambda: vae_mnist.parser(vae),
    }
    for row in ROWS:
        assert row.command[0] == "-m" and row.hours > 0 and row.value > 0
        args = parsers[row.command[1].removeprefix("benchmarks.")]().parse_args(row.command[2:])
        for line in row.lines:
            seeds = range(args.first_seed, args.seeds)
            assert line["seed"] in seeds and (len(seeds) == 1 or not args.paper)
            for name in ("epochs", "hidden", "latent_dim", "entropy_particles"):
                if name in line and f"--{name.replace('_', '-')}" in row.command:
                    assert getattr(args, name) == line[name]
