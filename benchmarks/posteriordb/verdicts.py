# SPDX-License-Identifier: Apache-2.0
"""Compare verdicts of :func:`~pyro_implicit.diagnostics.diagnose` with reference draws.

::

    python -m benchmarks.posteriordb.verdicts --data-dir /path/to/data
    python -m benchmarks.posteriordb.verdicts --report

Good and bad guides of each posterior: ``laplace``, the best Gaussian of
:func:`~pyro_implicit.density.find_modes`; ``mean-field``, the best Gaussian without correlations at
the same point; ``fit``, the result of :func:`~pyro_implicit.fitting.fit`; and, if this is a
mixture, its first component as ``one mode``. The posteriors are those of posteriordb and the
``target:`` posteriors of ``benchmarks.targets`` that need no data. Each run adds one line to
``--out``; runs that have a line are skipped.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    Record,
    append_record,
    environment,
    markdown_table,
    read_records,
    write_page,
)
from benchmarks.posteriordb import data
from benchmarks.posteriordb.metrics import floor, measure
from benchmarks.posteriordb.run import reference_of
from benchmarks.targets import make_target
from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.modes import Modes
from pyro_implicit.density.target import Target
from pyro_implicit.diagnostics import draw
from pyro_implicit.diagnostics.checkup import diagnose
from pyro_implicit.diagnostics.verdict import Diagnosis
from pyro_implicit.fitting import exact_guide, fit
from pyro_implicit.guides.auto_mixture import AutoMixture

OUT = RESULTS / "verdicts.jsonl"
KEY = ("posterior", "guide", "seed")
PREFIX = "target:"
TARGETS = ("banana", "x_shape", "multimodal", "funnel", "funnel_wide", "x_shape_gap", "gmm40")
NUM_DRAWS = 10_000
#: Names of the findings in the tables, by their distinctive words.
FINDINGS = {
    "cannot tell": "no power",
    "k-hat": "k-hat",
    "(importance weights)": "weights",
    "(Stein's identities)": "Stein",
    "(short HMC)": "HMC",
    "short HMC's draws end": "escape",
    "kernel Stein test": "kernel",
    "at a mode": "mode",
    "no importance weights": "no density",
    "chains keep": "kept weights",
}


@dataclass(frozen=True)
class Case:
    """A posterior: a function that flattens draws, and exact draws ``(num_draws, dim)``."""

    model: Callable[..., object]
    args: tuple
    flatten: Callable[[dict[str, Tensor]], Tensor]
    reference: Tensor


def load(name: str, data_dir: Path | None) -> Case:
    if name.startswith(PREFIX):
        target = make_target(name.removeprefix(PREFIX))
        return Case(target.model, (), target.flatten, target.truth(NUM_DRAWS, 0))
    posterior = data.load(name, data_dir)
    return Case(posterior.model, posterior.args, posterior.unconstrain, reference_of(posterior))


def gaussian_guide(case: Case, loc: Tensor, scale_tril: Tensor) -> Any:
    """Return a guide that is this Gaussian."""
    return exact_guide(case.model, Modes(loc[None], scale_tril[None], loc.new_zeros(1)), *case.args)


def guides(case: Case, seed: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Return functions that make guides, by name; ``None`` if there is no such guide."""
    model, args = case.model, case.args

    @cache
    def best_gaussian() -> tuple[Tensor, Tensor]:
        modes = find_modes(Target(model, *args))
        return modes.loc[0], modes.scale_tril[0]

    def mean_field() -> Any:
        loc, scale_tril = best_gaussian()
        sds = torch.cholesky_inverse(scale_tril).diagonal().rsqrt()
        return gaussian_guide(case, loc, sds.diag())

    @cache
    def fitted() -> Any:
        return fit(model, "auto", *args, refine=False, seed=seed, progress=False).guide

    def one_mode() -> Any:
        return fitted().components[0] if isinstance(fitted(), AutoMixture) else None

    yield "laplace", lambda: gaussian_guide(case, *best_gaussian())
    yield "mean-field", mean_field
    yield "one mode", one_mode
    yield "fit", fitted


def judge(
    case: Case, make_guide: Callable[[], Any], seed: int, directions: Tensor | None = None
) -> Record | None:
    """Return the verdict on a guide and its true errors; errors are recorded, too.

    :param directions: ``(dim, k)``, additional directions with possible errors.
    """
    # All Gaussian guides share their names in the store: the first would replace the others.
    pyro.clear_param_store()
    try:
        guide = make_guide()
        if guide is None:
            return None
        pyro.set_rng_seed(seed)
        clock = time.perf_counter()
        diagnosis = diagnose(case.model, guide, *case.args)
        seconds = time.perf_counter() - clock
        draws = case.flatten(draw(guide, NUM_DRAWS, *case.args)).detach()
        truth = measure(draws, case.reference, directions)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return summary(diagnosis) | {"seconds": seconds} | truth


def summary(diagnosis: Diagnosis) -> Record:
    """Return a diagnosis as numbers and short names."""
    bound, coverage = diagnosis.bound, diagnosis.coverage
    return {
        "verdict": diagnosis.verdict,
        "findings": [[f.verdict, short_name(f.reason)] for f in diagnosis.findings],
        "khat": bound and bound.khat,
        "efficiency": diagnosis.efficiency,
        "num_modes": None if coverage is None else len(coverage.mass),
        "report": str(diagnosis),
    }


def short_name(reason: str) -> str:
    return next((name for words, name in FINDINGS.items() if words in reason), "broken")


def sd_error(moments: Record) -> float:
    """Return the largest factor between standard deviations, at least 1."""
    return max(moments["sd_ratio_max"], 1 / max(moments["sd_ratio_min"], 1e-12))


def sd_noise(reference: Tensor, directions: Tensor | None = None) -> float:
    """Return the factor between two halves of the reference, which is large for heavy tails."""
    first, second = reference[::2], reference[1::2]
    return sd_error(measure(first, second, directions))


def true_class(record: Record) -> str:
    """Return ``"good"``, ``"bad"`` or ``"between"``, by the reference."""
    error = sd_error(record) / record["sd_noise"]
    if error > 1.25 or record["mean_error"] > 0.25:
        return "bad"
    if record["ratio"] <= 1.5 and error <= 1.1 and record["mean_error"] <= 0.1:
        return "good"
    return "between"


def confusion(records: list[Record]) -> str:
    """Count verdicts by truth, and name the wrong ones."""
    counts = Counter((true_class(record), record["verdict"]) for record in records)
    verdicts = ("trust", "check", "do not trust")
    classes = ("good", "between", "bad")
    rows = [[truth, *(str(counts[truth, verdict]) for verdict in verdicts)] for truth in classes]
    lines = [markdown_table(["truth", *verdicts], rows)]
    for label, truth, verdict in (
        ("false trust (trust when bad)", "bad", "trust"),
        ("trust when between", "between", "trust"),
        ("false alarm (do not trust when good)", "good", "do not trust"),
    ):
        found = [r for r in records if (true_class(r), r["verdict"]) == (truth, verdict)]
        names = ", ".join(f"{r['posterior']} {r['guide']}" for r in found)
        lines.append(f"* {label}: {len(found)}{f' ({names})' if names else ''}")
    return "\n".join(lines) + "\n"


def table(records: list[Record]) -> str:
    rows = []
    for r in records:
        findings = [name + "!" * (grade == "do not trust") for grade, name in r["findings"]]
        numbers = [
            f"{r['ratio']:.2f}",
            f"{r['mean_error']:.2f}",
            f"{r['sd_ratio_min']:.2f}-{r['sd_ratio_max']:.2f}",
            "" if r["khat"] is None else f"{r['khat']:.2f}",
            f"{r['efficiency']:.0%}",
        ]
        words = [true_class(r), r["verdict"], ", ".join(dict.fromkeys(findings))]
        rows.append([r["posterior"], r["guide"], *numbers, *words, f"{r['seconds']:.0f}"])
    header = ["posterior", "guide", "ratio", "mean error", "sds", "k-hat", "ESS"]
    return markdown_table([*header, "truth", "verdict", "findings", "seconds"], rows)


NOTE = """Good: ratio to the sampling floor at most 1.5, standard deviations within a factor of 1.1,
means within 0.1 sd. Bad: a standard deviation off by more than a factor of 1.25, or a mean by more
than 0.25 sd. Both are measured with 10,000 draws of the guide and of the reference, in
unconstrained space; the limits for standard deviations are widened by the difference between two
halves of the reference. Findings with "!" lead to "do not trust", the others to "check". Seconds
are those of the diagnosis.
"""


def failures(records: list[Record]) -> str:
    """Return one line for each record with an error."""
    failed = [record for record in records if "error" in record]
    lines = [f"* {r['posterior']} {r['guide']}: {r['error']}".split("\n")[0] for r in failed]
    return "\n".join(lines or ["None."]) + "\n"


def report(records: list[Record]) -> str:
    """Return the Markdown page of all records."""
    judged = [record for record in records if "error" not in record]
    parts = {
        "Truth and verdict": confusion(judged) + "\n" + NOTE,
        "Each guide": table(judged),
        "Failures": failures(records),
    }
    return "\n".join(["# Verdicts\n", *(f"## {head}\n\n{text}" for head, text in parts.items())])


def run_all(args: argparse.Namespace) -> None:
    machine = environment("cpu")
    done = {tuple(record[key] for key in KEY) for record in read_records(args.out)}
    for name in args.posteriors:
        # The last guide's line ends a posterior, as other guides may not exist.
        for seed in (s for s in args.seeds if (name, "fit", s) not in done):
            case = load(name, args.data_dir)
            size = {"dim": case.reference.shape[1], "floor": floor(case.reference)}
            size["sd_noise"] = sd_noise(case.reference)
            pyro.set_rng_seed(seed)
            for guide, make_guide in guides(case, seed):
                key = dict(zip(KEY, (name, guide, seed), strict=True))
                if tuple(key.values()) in done:
                    continue
                record = judge(case, make_guide, seed)
                if record is None:
                    continue
                if "distance" in record:
                    record["ratio"] = record["distance"] / size["floor"]
                append_record(args.out, key | size | record | machine)
                print(name, guide, record.get("verdict", record.get("error")), flush=True)


def parser() -> argparse.ArgumentParser:
    names = [*data.NAMES, *data.EXTRA, *(PREFIX + name for name in TARGETS)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="holds the folder posteriordb")
    parser.add_argument("--posteriors", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--report", action="store_true", help="only write the page next to --out")
    return parser


def main(args: argparse.Namespace) -> None:
    if args.report:
        write_page(args.out, report(read_records(args.out)))
        return
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(args.threads)
    run_all(args)


if __name__ == "__main__":
    main(parser().parse_args())
