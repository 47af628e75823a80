# SPDX-License-Identifier: Apache-2.0
"""Run the experiments of `paper_rows.py`, which take hours, one process at a time.

A row is a command that appends lines to a result file (JSON lines, committed) and keeps checkpoints
in ``--runs`` (not committed). A row is done if its lines are in the file. The queue starts the
unfinished row with the most value per remaining CPU hour, waits for it, and takes the next one::

    nohup nice -n 19 python -m benchmarks.long_runs --data-dir /path/to/data > long_runs.log &
    python -m benchmarks.long_runs --list
    python -m benchmarks.long_runs --data-dir /path/to/data --once "energy split GPVI 0"

SIGTERM, Ctrl-C and ``--max-seconds`` stop the queue after the next checkpoint of its row; a second
signal stops it at once. A killed row continues from its last checkpoint when the queue is started
again, and ends with the same result. The output of a row is in ``RUNS/queue/NAME.log``, and
``--hours`` gets a line with its CPU hours, all its processes included, when it is done.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEAST_SHARE = 0.1  # of the expected hours: what an unfinished row is expected to need at least


@dataclass(frozen=True)
class Row:
    """One experiment.

    :param name: a unique name.
    :param command: arguments of Python; ``{data}`` and ``{runs}`` stand for the two folders.
    :param hours: expected CPU hours.
    :param value: relative to other rows.
    :param out: the result file, relative to the repository.
    :param lines: for each line that the row leaves there, entries that identify the line.
    """

    name: str
    command: tuple[str, ...]
    hours: float
    value: float
    out: str
    lines: tuple[dict[str, Any], ...]

    def is_done(self) -> bool:
        path = ROOT / self.out
        text = path.read_text() if path.exists() else ""
        records = [json.loads(line) for line in text.splitlines()]
        return all(any(key.items() <= one.items() for one in records) for key in self.lines)


class Queue:
    """The rows, and a file for each with the CPU hours spent so far.

    :param rows: in any order.
    :param args: of :func:`parser`.
    """

    def __init__(self, rows: list[Row], args: argparse.Namespace) -> None:
        self.rows, self.args, self.runs = rows, args, args.runs.resolve()
        self.folder = self.runs / "queue"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.failed: set[str] = set()
        self.num_signals, self.asked_at, self.began = 0, 0.0, time.time()

    def file(self, row: Row, suffix: str) -> Path:
        return self.folder / (row.name.replace(" ", "_").replace("/", "_") + suffix)

    def spent(self, row: Row) -> float:
        """CPU hours of all processes of the row."""
        file = self.file(row, ".json")
        return json.loads(file.read_text())["cpu_hours"] if file.exists() else 0.0

    def save(self, row: Row, cpu_hours: float) -> None:
        self.file(row, ".partial").write_text(json.dumps({"cpu_hours": cpu_hours}))
        self.file(row, ".partial").replace(self.file(row, ".json"))

    def left(self, row: Row) -> float:
        """Expected CPU hours until the row is done."""
        return max(row.hours - self.spent(row), LEAST_SHARE * row.hours)

    def pending(self) -> list[Row]:
        """Unfinished rows, the highest value per remaining CPU hour first."""
        rows = [row for row in self.rows if not row.is_done() and row.name not in self.failed]
        return sorted(rows, key=lambda row: -row.value / self.left(row))

    def table(self) -> str:
        """All rows as Markdown: the pending ones in their order, then the others."""
        pending = self.pending()
        lines = ["| row | status | CPU hours: spent | expected | value | result file |"]
        lines.append("| :-- | :-- | --: | --: | --: | :-- |")
        for row in [*pending, *(row for row in self.rows if row not in pending)]:
            status = "failed" if row.name in self.failed else "done"
            if row in pending:
                status = "started" if self.spent(row) else "waiting"
            numbers = f"{self.spent(row):.2f} | {row.hours:g} | {row.value:g}"
            lines.append(f"| {row.name} | {status} | {numbers} | {row.out} |")
        hours = sum(map(self.left, pending))
        return "\n".join([*lines, f"\n{len(pending)} rows, about {hours:.1f} CPU hours to go"])

    def ask_to_stop(self, *_: Any) -> None:
        """Note the time of the first request; the handler of signals."""
        self.num_signals, self.asked_at = self.num_signals + 1, self.asked_at or time.time()

    def should_stop(self) -> bool:
        if not self.asked_at and time.time() - self.began > self.args.max_seconds:
            self.asked_at = time.time()
        return self.asked_at > 0

    def may_kill(self) -> bool:
        """Whether little work would be lost: a checkpoint was written since the request to stop."""
        files = [file for file in self.runs.rglob("*") if file.suffix not in (".partial", "")]
        kept = [file.stat().st_mtime for file in files if file.parent != self.folder]
        late = time.time() - self.asked_at > self.args.patience
        return late or self.num_signals > 1 or max(kept, default=0.0) > self.asked_at

    def run_all(self) -> None:
        while not self.should_stop() and (pending := self.pending()):
            self.run(pending[0])

    def run(self, row: Row) -> None:
        """Run a row until its process ends or the queue is asked to stop."""
        data, runs = str(self.args.data_dir), str(self.runs)
        command = [word.replace("{data}", data).replace("{runs}", runs) for word in row.command]
        before, cpu, killed = self.spent(row), 0.0, False
        with self.file(row, ".log").open("a") as log, (self.folder / "lock").open("a+") as lock:
            self.take(lock)
            # The row keeps the lock if the queue is killed. It has a session of its own, so that
            # Ctrl-C does not interrupt it between two checkpoints.
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env={"OMP_NUM_THREADS": "1"} | os.environ,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                pass_fds=[lock.fileno()],
            )  # fmt: skip
            _keep_niceness(process.pid)
            lock.write(f"process {process.pid}, row '{row.name}'")
            lock.flush()
            say(f"{row.name}: process {process.pid}, {before:.2f} CPU hours spent before")
            began = shown = time.time()
            while process.poll() is None:
                cpu = max(cpu, _cpu_seconds(process.pid) / 3600)
                if time.time() - shown > self.args.report_every:
                    shown = time.time()
                    self.save(row, before + cpu)
                    say(self.progress(row, max(cpu / (shown - began) * 3600, 1e-3)))
                if self.should_stop() and not killed and self.may_kill():
                    process.kill()
                    killed = True
                time.sleep(self.args.poll)
        self.save(row, before + cpu)
        end = f"exit status {process.returncode} without a result, see {log.name}"
        if row.is_done():
            end = "done"
            with self.args.hours.open("a") as file:
                file.write(
                    json.dumps({"row": row.name, "cpu_hours": round(before + cpu, 3)}) + "\n"
                )
        elif killed:
            end = "stopped; the next queue continues"
        else:
            self.failed.add(row.name)
        say(f"{row.name}: {before + cpu:.2f} CPU hours, {end}")

    def take(self, lock: Any) -> None:
        """Lock the folder, or exit with the name of its owner."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise SystemExit(
                f"{self.folder} belongs to {lock.read() or 'another queue'}. Cure: wait until it "
                "ends, kill it (its checkpoints are kept), or pass another --runs"
            ) from None
        lock.truncate(0)

    def progress(self, row: Row, cores: float) -> str:
        """One line: this row's share, and the time until all rows are done."""
        hours = sum(map(self.left, self.pending()))
        return (
            f"{row.name}: {self.spent(row):.2f} of about {row.hours:g} CPU hours; all rows: about "
            f"{hours:.1f} CPU hours to go, {hours / cores:.1f} hours at {cores:.2f} cores"
        )


def say(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M"), text, flush=True)


def _keep_niceness(pid: int) -> None:
    """Give a process that leads a session of its own the niceness of this one.

    Linux may schedule sessions as groups, and then niceness only counts within each of them.
    """
    file = Path(f"/proc/{pid}/autogroup")
    try:
        file.write_text(str(os.nice(0)))
    except OSError:  # no such groups, or a process that has just ended
        pass


def _cpu_seconds(pid: int) -> float:
    try:
        return time.clock_gettime((~pid << 3) | 2)  # Linux: the CPU clock of another process
    except OSError:  # it has just ended
        return 0.0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="data of the benchmarks")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="checkpoints and logs")
    hours = ROOT / "benchmarks/results/long_runs.jsonl"
    parser.add_argument("--hours", type=Path, default=hours, help="file of the CPU hours")
    parser.add_argument("--list", action="store_true", help="only print the table of the rows")
    parser.add_argument("--once", metavar="NAME", help="run only this row")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="wall time, then stop")
    parser.add_argument("--patience", type=float, default=900, help="seconds to wait for that")
    parser.add_argument("--report-every", type=float, default=600, help="seconds between lines")
    parser.add_argument("--poll", type=float, default=1.0, help=argparse.SUPPRESS)
    return parser


def main(args: argparse.Namespace, rows: list[Row]) -> None:
    queue = Queue(rows, args)
    if not args.list:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, queue.ask_to_stop)
        if args.once is None:
            queue.run_all()
        else:
            queue.run({row.name: row for row in rows}[args.once])
    print(queue.table())


if __name__ == "__main__":
    from benchmarks.paper_rows import ROWS

    main(parser().parse_args(), ROWS)
