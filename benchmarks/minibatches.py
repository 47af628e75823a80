# SPDX-License-Identifier: Apache-2.0
"""Linear regression in minibatches: passes over all rows, compared with guides trained by steps.

The posterior of 13 slopes is normal and known. The columns share a common part, so that its
condition number is about 40 or 5,000. Minibatches of 100 rows come from a shuffled ``DataLoader``,
of a million rows from a list of 10,000 rows each. ``passes`` is ``fit(batches=...)`` by default,
``all data`` is ``fit(model, "auto", x, y)``, ``LIVI`` and ``mean field`` are guides that ``fit``
trains for ten epochs or 2,000 steps.

::

    python -m benchmarks.minibatches
"""

from __future__ import annotations

import itertools
import json
import operator
import statistics
import time
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from pyro_implicit import AutoSemiImplicit, fit

RESULTS = Path(__file__).parent / "results" / "minibatches"
NUM_SLOPES, NOISE = 13, 0.5
WIDTHS = {"40": -1.0, "5,000": -3.7}  # log10 of the smallest variance of a column's own part
METHODS = {
    "passes": lambda model: "auto",
    "all data": lambda model: "auto",
    "LIVI": lambda model: AutoSemiImplicit(model, frame=None, init_scale=0.05),
    "mean field": lambda model: AutoNormal(model, init_scale=0.05),
}
SMALL = itertools.product(WIDTHS, [4_000], METHODS, range(3))
LARGE = itertools.product(["5,000"], [100_000, 1_000_000], ["passes", "all data"], range(3))
CASES = [*SMALL, *LARGE]


def make_data(condition: str, num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return columns ``(num_rows, 13)`` and targets."""
    torch.manual_seed(1000 + seed)
    scales = torch.logspace(WIDTHS[condition], 0, NUM_SLOPES).sqrt()
    x = torch.randn(num_rows, 1) + scales * torch.randn(num_rows, NUM_SLOPES)
    return x, 0.1 * x @ torch.randn(NUM_SLOPES) + NOISE * torch.randn(num_rows)


def run(condition: str, num_rows: int, method: str, seed: int) -> dict[str, Any]:
    """Fit once, and compare with the exact posterior."""
    x, y = make_data(condition, num_rows, seed)

    def model(x: Tensor, y: Tensor) -> None:
        slopes = pyro.sample("slopes", dist.Normal(torch.zeros(NUM_SLOPES), 1.0).to_event(1))
        is_part = {} if method == "all data" else {"subsample_size": len(x)}
        with pyro.plate("rows", len(x) if method == "all data" else num_rows, **is_part):
            pyro.sample("y", dist.Normal(x @ slopes, NOISE), obs=y)

    batches: Any = DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True)
    if num_rows > 100_000:
        batches = list(zip(x.split(10_000), y.split(10_000), strict=True))
    pyro.clear_param_store()
    began = time.process_time()
    if method == "all data":
        result = fit(model, "auto", x, y, seed=seed, progress=False)
    else:
        result = fit(model, METHODS[method](model), batches=batches, seed=seed, progress=False)
    seconds = time.process_time() - began
    draws = result.sample(8192, x[:100], y[:100])["slopes"].detach().double()
    wide = x.double()
    covariance = torch.linalg.inv(wide.mT @ wide / NOISE**2 + torch.eye(NUM_SLOPES))
    sds = covariance.diagonal().sqrt()
    errors = (draws.mean(0) - covariance @ (wide.mT @ y.double()) / NOISE**2) / sds
    ratios = draws.std(0) / sds
    return {
        "condition": condition,
        "rows": num_rows,
        "method": method,
        "seed": seed,
        "mean_error_sd": errors.abs().max().item(),
        "sd_ratios": [ratios.min().item(), ratios.max().item()],
        "cpu_s": seconds,
    }


def write_table(rows: list[dict[str, Any]]) -> None:
    """Write the worst errors and median seconds of all seeds."""
    lines = [
        "# Linear regression in minibatches",
        "",
        "`python -m benchmarks.minibatches`. Worst of 13 slopes and 3 seeds; median CPU seconds.",
        "",
        "| condition number | rows | method | error of means, sds | sd ratios | CPU s |",
        "| --: | --: | :-- | --: | :-- | --: |",
    ]
    keys = ("condition", "rows", "method")
    for case, found in itertools.groupby(rows, key=operator.itemgetter(*keys)):
        group = list(found)
        error = max(row["mean_error_sd"] for row in group)
        low, high = zip(*(row["sd_ratios"] for row in group), strict=True)
        seconds = statistics.median(row["cpu_s"] for row in group)
        spread = f"{min(low):.2f} to {max(high):.2f}"
        cells = [case[0], f"{case[1]:,}", case[2], f"{error:.2f}", spread, f"{seconds:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = [run(*case) for case in CASES]
    text = "".join(json.dumps(row) + "\n" for row in results)
    RESULTS.with_suffix(".jsonl").write_text(text, encoding="utf-8")
    write_table(results)
