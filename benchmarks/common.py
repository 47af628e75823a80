# SPDX-License-Identifier: Apache-2.0
"""Functions of all benchmarks: timed fits, one line of JSON for each run, and the report pages."""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import pyro
import torch
from pyro.infer import ELBO, SVI
from pyro.optim import CosineAnnealingLR, PyroLRScheduler
from tqdm import tqdm

from pyro_implicit.fitting import Schedule, train
from pyro_implicit.infer import ImplicitELBO

__all__ = [
    "RESULTS",
    "Record",
    "TimeLimit",
    "add_machine_arguments",
    "add_output_arguments",
    "add_paper_arguments",
    "append_record",
    "attempt",
    "cosine_adam",
    "cpu_seconds",
    "environment",
    "fit",
    "markdown_table",
    "missing_runs",
    "parse_arguments",
    "read_records",
    "run_and_report",
    "run_missing",
    "seconds",
    "spread",
    "time_limit",
    "train_resumably",
    "write_page",
]

RESULTS = Path(__file__).parent / "results"
Record = dict[str, Any]
LONG = 10_000  # steps; longer trainings, which take minutes, write checkpoints


def cpu_seconds() -> float:
    """Return those of this process and of the child processes, such as compilers, that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def add_output_arguments(parser: argparse.ArgumentParser, out: Path) -> None:
    """Add ``--out`` and ``--report``."""
    parser.add_argument("--out", type=Path, default=out, help="JSON lines; the page is next to it")
    parser.add_argument("--report", action="store_true", help="only write the page of --out")


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--device`` and ``--threads``."""
    parser.add_argument("--device", default="cpu", help="where the tensors live, e.g. cuda")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")


def add_paper_arguments(parser: argparse.ArgumentParser, seeds: int) -> None:
    """Add ``--seeds``, ``--first-seed``, ``--paper`` and ``--runs``."""
    parser.add_argument("--seeds", type=int, default=seeds, help="seeds FIRST_SEED to SEEDS - 1")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--paper", action="store_true", help="the paper's settings for defaults")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of checkpoints")


def parse_arguments(
    parser: argparse.ArgumentParser,
    paper: Callable[[argparse.Namespace], Record],
    words: list[str] | None = None,
) -> argparse.Namespace:
    """Parse the command line, with other defaults if it has ``--paper``.

    :param paper: a function from the arguments so far to these defaults.
    """
    args = parser.parse_args(words)
    if args.paper:
        parser.set_defaults(**paper(args))
        args = parser.parse_args(words)
    return args


def seconds(work: Callable[[], Any], device: str = "cpu") -> float:
    """Return the wall time of ``work()``, including the queue of the device."""
    start = time.perf_counter()
    work()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


class TimeLimit(BaseException):
    """A run took too long. Not an ``Exception``, because libraries catch those."""


@contextmanager
def time_limit(seconds: float | None, cpu: bool = False) -> Iterator[None]:
    """Interrupt the code inside after ``seconds``; ``None`` is no limit.

    :param cpu: whether to measure the CPU seconds of this process instead of wall time; other jobs
        on the machine do not affect them.
    :raises TimeLimit: after this time.
    """
    if seconds is None:
        yield
        return
    number, timer = (
        (signal.SIGPROF, signal.ITIMER_PROF) if cpu else (signal.SIGALRM, signal.ITIMER_REAL)
    )

    def interrupt(signum: int, frame: Any) -> None:
        raise TimeLimit(f"more than {seconds:g} {'CPU ' * cpu}s")

    before = signal.signal(number, interrupt)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


def cosine_adam(lr: float, steps: int) -> PyroLRScheduler:
    """Adam with clipped gradients and a learning rate that decays to 0 along a cosine."""
    return CosineAnnealingLR(
        {"optimizer": torch.optim.Adam, "optim_args": {"lr": lr}, "T_max": steps},
        {"clip_norm": 10.0},
    )


def fit(svi: SVI, steps: int, *args: Any) -> list[float]:
    """Take ``steps`` steps of ``svi`` and of its learning-rate schedule; return the losses."""
    losses = []
    for _ in range(steps):
        losses.append(svi.step(*args))
        svi.optim.step()
    return losses


def train_resumably(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    elbo: ELBO,
    args: argparse.Namespace,
    key: Record,
    *data: Any,
    rate: float = 1.0,
) -> list[float]:
    """Take ``args.steps`` steps of Adam, with a learning rate that decays to 0 along a cosine.

    A killed training continues from its checkpoint in ``args.runs`` (40 during the training) and
    ends with the same parameters. A training by Pyro's own ELBO starts again.

    :param key: the settings of the run, which name its folder.
    :param rate: a factor of ``args.lr``.
    """
    if not isinstance(elbo, ImplicitELBO):  # Pyro's flows list some parameters twice
        return fit(
            SVI(model, guide, cosine_adam(rate * args.lr, args.steps), elbo), args.steps, *data
        )
    folder = args.runs / args.out.stem / "-".join(str(value) for value in key.values())
    return train(
        model,
        guide,
        elbo,
        *data,
        schedule=Schedule(args.steps, rate * args.lr, decay=1.0, plateau=False, max_gap=0.0),
        checkpoint=folder if args.steps >= LONG else None,
        checkpoint_every=max(1, args.steps // 40),
        progress=False,
    )


def environment(device: str) -> Record:
    """Return commit (empty without git), versions and machine."""

    def git(*words: str) -> str:
        if shutil.which("git") is None:
            return ""
        return subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True
        ).stdout.strip()

    is_cuda = torch.device(device).type == "cuda"
    return {
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if git("diff", "HEAD") else ""),
        "torch": torch.__version__,
        "pyro": pyro.__version__,
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "threads": torch.get_num_threads(),
    }


def attempt(work: Callable[..., Record], *args: Any) -> Record:
    """Return ``work(*args)``, or the error as a record."""
    try:
        return work(*args)
    except (ArithmeticError, ValueError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def missing_runs(path: Path, keys: Iterable[Record]) -> Iterator[Record]:
    """Yield those of ``keys`` that have no record in the file, with a progress bar.

    :param keys: the identifying fields of each run, including its settings.
    """
    done = read_records(path)
    todo = [key for key in keys if not any(key.items() <= record.items() for record in done)]
    for key in (bar := tqdm(todo, unit="run")):
        bar.set_description(" ".join(str(value) for value in key.values()))
        yield key


def run_missing(path: Path, keys: Iterable[Record], work: Callable[[Record], Record]) -> None:
    """Append the missing records.

    :param keys: as for :func:`missing_runs`.
    :param work: returns the record of a key, without the key and the machine.
    """
    machine = environment("cpu")
    for key in missing_runs(path, keys):
        append_record(path, key | work(key) | machine)


def append_record(path: Path, record: Record) -> None:
    """Append one line of JSON, so that an interrupted run loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:  # one write, so that no partial line remains
        file.write(f"{json.dumps(record)}\n".encode())


def read_records(path: Path) -> list[Record]:
    """Return the records of a file of JSON lines; none if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with the first column aligned left, the others right."""
    rule = [":--"] + ["--:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows]) + "\n"


def spread(values: list[float], digits: int, none: str = "failed") -> str:
    """Return mean (range); ``none`` without values."""
    if not values:
        return none
    numbers = [f"{f(values):.{digits}f}" for f in (mean, min, max)]
    return numbers[0] if len(values) == 1 else f"{numbers[0]} ({numbers[1]} to {numbers[2]})"


def run_and_report(
    args: argparse.Namespace,
    run_all: Callable[[argparse.Namespace], None],
    report: Callable[[Path], str],
) -> None:
    """Run with one thread, unless ``--report`` is given, and write the page of ``--out``."""
    torch.set_num_threads(1)
    if not args.report:
        run_all(args)
    write_page(args.out, report(args.out))


def write_page(out: Path, text: str) -> None:
    """Print a page and write it next to its records, ``x.md`` next to ``x.jsonl``."""
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
