# SPDX-License-Identifier: Apache-2.0
"""Hierarchies of 10^3 to 10^6 groups: accuracy, CPU seconds and memory.

Two models whose marginal posterior of two global variables is known: normal-normal, and
gamma-Poisson with one count for each group. Each run is a process of its own, so that its peak
memory can be read. It reports

- the error of the posterior means in standard deviations of the exact posterior (on a grid), and
  the ratio of the standard deviations;
- the p-value of the Kolmogorov-Smirnov test that the ranks of exact posterior draws of the latent
  variables of 1,000 random groups among 99 draws are uniform;
- CPU seconds of the fit, and peak memory above that after the data were made.

With ``--processes``, each of several processes (``torch.distributed``, gloo) has its own groups.
CPU seconds are those of all processes; the efficiency is the ratio to those of one process.

Methods: ``conditional`` and ``auto`` are ``fit(amortize=...)``; ``autonormal`` is Pyro's
``AutoNormal`` with parameters for each group, by ``SVI`` with 8 particles. Settings were chosen
with data of seed 1; the results are those of other seeds.

::

    python -m benchmarks.groups --groups 1000 10000 100000 --seeds 10 11 12
    python -m benchmarks.groups --groups 1000000 --seeds 11
    python -m benchmarks.groups --groups 1000 10000 --seeds 10 --methods auto autonormal
    python -m benchmarks.groups --groups 100000 --processes 1 2 4
    python -m benchmarks.groups --table
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from scipy import stats
from torch import Tensor, distributed, multiprocessing

from pyro_implicit import fit

RESULTS = Path(__file__).parent / "results" / "groups"
BATCH_SIZE, NUM_RANKED, NUM_DRAWS = 10_000, 1000, 99
MODELS, METHODS = ("normal", "counts"), ("conditional", "auto", "autonormal")
NAMES = {"normal": ("mean", "scale"), "counts": ("shape", "rate")}
CASE = ("model", "groups", "method", "seed")
TRUE = {"normal": (2.0, 0.7), "counts": (2.0, 0.5)}


def make_model(name: str, num_groups: int) -> Callable[..., None]:
    """A model of one minibatch; ``index`` are its groups, where a guide needs them."""

    def normal(x: Tensor, index: Tensor | None = None) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
        scale = pyro.sample("scale", dist.HalfNormal(5.0))
        with plate(x, index):
            z = pyro.sample("z", dist.Normal(mean, scale))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def counts(y: Tensor, index: Tensor | None = None) -> None:
        shape = pyro.sample("shape", dist.LogNormal(0.0, 1.0))
        rate = pyro.sample("rate", dist.LogNormal(0.0, 1.0))
        with plate(y, index):
            z = pyro.sample("z", dist.Gamma(shape, rate))
            pyro.sample("y", dist.Poisson(z), obs=y)

    def plate(x: Tensor, index: Tensor | None) -> pyro.plate:
        return pyro.plate("groups", num_groups, subsample_size=len(x), subsample=index)

    return {"normal": normal, "counts": counts}[name]


def make_data(name: str, num_groups: int, seed: int) -> Tensor:
    """One number for each group."""
    torch.manual_seed(seed)
    if name == "normal":
        z = 2 + 0.7 * torch.randn(num_groups)
        return z + torch.randn(num_groups)
    z = dist.Gamma(*TRUE["counts"]).sample((num_groups,))
    return torch.poisson(z)


def make_log_prob(name: str, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The exact marginal posterior of points (num, 2): mean and log scale, or both logarithms."""
    x = x.double()
    if name == "counts":
        values, numbers = x.unique(return_counts=True)

        def of_counts(point: Tensor) -> Tensor:
            shape, rate = point.exp().unsqueeze(-1).unbind(-2)
            rows = torch.lgamma(shape + values) - torch.lgamma(shape) - torch.lgamma(values + 1)
            rows = rows + shape * rate.log() - (shape + values) * torch.log1p(rate)
            return (rows * numbers).sum(-1) - 0.5 * point.square().sum(-1)

        return of_counts
    number, first, second = len(x), x.sum(), x.square().sum()

    def of_normal(point: Tensor) -> Tensor:
        mean, log_scale = point.unbind(-1)
        variance = 1 + (2 * log_scale).exp()
        square = second - 2 * mean * first + number * mean**2
        rows = -0.5 * (number * variance.log() + square / variance)
        return rows - 0.5 * (mean / 10) ** 2 - 0.5 * (log_scale.exp() / 5) ** 2 + log_scale

    return of_normal


class Exact(NamedTuple):
    """Points (num, 2) of the exact posterior of the global variables, and their weights."""

    values: Tensor
    weights: Tensor

    def moments(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations."""
        mean = self.weights @ self.values
        return mean, (self.weights @ (self.values - mean).square()).sqrt()

    def draw_local(self, name: str, x: Tensor) -> Tensor:
        """One exact posterior draw of the latent variable of each group."""
        first, second = self.values[self.weights.multinomial(len(x), replacement=True)].unbind(-1)
        if name == "counts":
            return dist.Gamma(first + x, second + 1).sample()
        precision = 1 + second**-2
        return dist.Normal((first / second**2 + x) / precision, precision.rsqrt()).sample()


def exact_posterior(name: str, x: Tensor) -> Exact:
    """The exact posterior of the global variables, on a grid along its Gaussian."""
    log_prob = make_log_prob(name, x)
    first, second = TRUE[name]
    point = torch.tensor([first if name == "normal" else math.log(first), math.log(second)])
    point = point.double()
    for _ in range(30):
        hessian = torch.autograd.functional.hessian(log_prob, point)
        score = torch.autograd.functional.jacobian(log_prob, point)
        point = point - torch.linalg.solve(hessian, score)
    root = torch.linalg.cholesky(torch.linalg.inv(-hessian))
    line = torch.linspace(-8, 8, 201).double()
    points = point + torch.cartesian_prod(line, line) @ root.mT
    weights = torch.cat([log_prob(some) for some in points.split(5000)]).softmax(0)
    values = points.exp()
    if name == "normal":
        values[:, 0] = points[:, 0]
    return Exact(values, weights)


def draws_of_autonormal(
    name: str, x: Tensor, chosen: Tensor, seed: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Draws of the global variables, and of the chosen groups (num_draws, num_chosen)."""
    pyro.set_rng_seed(seed)
    pyro.clear_param_store()
    model, size, steps = make_model(name, len(x)), 500, 6000

    def create_plates(data: Tensor, index: Tensor) -> Any:
        return pyro.plate("groups", len(x), subsample=index)

    guide = AutoNormal(model, create_plates=create_plates)
    optim = pyro.optim.ClippedAdam({"lr": 0.02, "lrd": 0.01 ** (1 / steps)})
    svi = SVI(model, guide, optim, Trace_ELBO(8, vectorize_particles=True, max_plate_nesting=1))
    for _ in range(steps):
        index = torch.randint(len(x), (size,)).unique()
        svi.step(x[index], index)
    posterior = [guide(x[chosen], chosen) for _ in range(2000)]
    shared = {key: torch.stack([one[key].detach() for one in posterior]) for key in NAMES[name]}
    return shared, torch.stack([one["z"].detach() for one in posterior[:NUM_DRAWS]])


def run(
    name: str, num_groups: int, method: str, seed: int, rank: int = 0, processes: int = 1
) -> dict[str, Any]:
    """Fit once, and compare with the exact posterior; one process of several has its groups."""
    x = make_data(name, num_groups, seed)
    chosen = torch.randperm(num_groups)[:NUM_RANKED].sort().values
    before = peak()
    cpu, wall = time.process_time(), time.perf_counter()
    stages = {}
    if method == "autonormal":
        draws, local = draws_of_autonormal(name, x, chosen, seed)
    else:
        options: dict[str, Any] = {"amortize": method, "seed": seed, "progress": False}
        batches: Any = x[rank::processes].split(min(BATCH_SIZE, num_groups))
        if method == "auto":
            batches = torch.utils.data.DataLoader(x, batch_size=500, shuffle=True)
            options["epochs"] = 6000 // len(batches)
        result = fit(make_model(name, num_groups), batches=batches, **options)
        stages = {stage.name: stage.outcome for stage in result.stages}
    cpu, wall, memory = time.process_time() - cpu, time.perf_counter() - wall, peak() - before
    if processes > 1:
        total = torch.tensor(cpu)
        distributed.all_reduce(total)
        cpu = total.item()
    if method != "autonormal":
        draws, again = result.sample(8192, x[:1]), result.sample(NUM_DRAWS, x[chosen])
        local = again["z"]
    exact = exact_posterior(name, x)
    ranks = (local.detach() < exact.draw_local(name, x[chosen])).sum(0) + torch.rand(len(chosen))
    mean, sd = exact.moments()
    found = torch.stack([draws[key].detach().double() for key in NAMES[name]])
    return {
        "model": name,
        "groups": num_groups,
        "method": method,
        "seed": seed,
        "processes": processes,
        "mean_error_sd": ((found.mean(1) - mean) / sd).tolist(),
        "sd_ratio": (found.std(1) / sd).tolist(),
        "rank_p": float(stats.kstest((ranks / (NUM_DRAWS + 1)).numpy(), "uniform").pvalue),
        "cpu_s": cpu,
        "wall_s": wall,
        "memory_mb": memory,
        "stages": stages,
    }


def run_part(rank: int, case: tuple, processes: int, folder: str) -> None:
    """Run one process of several; the first one prints the result."""
    torch.set_num_threads(1)
    method = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=processes)
    row = run(*case, rank, processes)
    if rank == 0:
        print(json.dumps(row), flush=True)
    distributed.destroy_process_group()


def peak() -> float:
    """Peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rows() -> Iterator[dict[str, Any]]:
    """All results, without earlier runs of the same case."""
    found = {}
    for line in (RESULTS.with_suffix(".jsonl")).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        key = (row["model"], row["groups"], row["method"], row["seed"], row.get("processes", 1))
        found[key] = row
    yield from (found[key] for key in sorted(found))


def write_table() -> None:
    """Write the table, and the picture of seconds and memory by number of groups."""
    lines = [
        "# Hierarchies of 10^3 to 10^6 groups",
        "",
        "Commands: see `benchmarks/groups.py`. Worst of the two global variables; one thread.",
        "",
        "| model | groups | method | seed | processes | error of mean (sd) | ratio of sd "
        "| p of ranks | CPU s | efficiency | memory of the fit (MB) |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    alone = {}
    for row in rows():
        case, processes = [row[key] for key in CASE], row.get("processes", 1)
        alone.setdefault(tuple(case), row["cpu_s"])
        mean = max(row["mean_error_sd"], key=abs)
        ratio = max(row["sd_ratio"], key=lambda one: abs(math.log(one)))
        lines.append(
            f"| {row['model']} | {row['groups']:,} | {row['method']} | {row['seed']} | {processes} "
            f"| {mean:+.3f} | {ratio:.4f} | {row['rank_p']:.2f} | {row['cpu_s']:.1f} "
            f"| {alone[tuple(case)] / row['cpu_s']:.0%} | {row['memory_mb']:.0f} |"
        )
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw_picture()


def draw_picture() -> None:
    """Draw CPU seconds and memory against the number of groups."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for name in MODELS:
        own = [row for row in rows() if row["model"] == name and row["method"] == "conditional"]
        own = [row for row in own if row.get("processes", 1) == 1]
        sizes = sorted({row["groups"] for row in own})
        for axis, key in zip(axes, ("cpu_s", "memory_mb"), strict=True):
            means = [
                sum(values) / len(values)
                for size in sizes
                if (values := [row[key] for row in own if row["groups"] == size])
            ]
            axis.loglog(sizes, means, "o-", label=name)
    axes[1].loglog(sizes, [4e-6 * size for size in sizes], "k:", label="data")
    axes[0].set(xlabel="groups", ylabel="CPU seconds")
    axes[1].set(xlabel="groups", ylabel="peak memory of the fit (MB)")
    for axis in axes:
        axis.legend()
    figure.savefig(RESULTS.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--methods", nargs="+", default=["conditional"], choices=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[10])
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--table", action="store_true", help="only write table and picture")
    parser.add_argument("--one", action="store_true", help="run one case in this process")
    options = parser.parse_args()
    if options.table:
        write_table()
        return
    if options.one:
        torch.set_num_threads(1)
        case = (options.models[0], options.groups[0], options.methods[0], options.seeds[0])
        (processes,) = options.processes
        if processes == 1:
            print(json.dumps(run(*case)))
            return
        with tempfile.TemporaryDirectory() as folder:
            arguments = (case, processes, folder)
            multiprocessing.spawn(run_part, arguments, nprocs=processes)
        return
    RESULTS.parent.mkdir(exist_ok=True)
    cases = [
        (model, size, method, seed, processes)
        for size in options.groups
        for model in options.models
        for method in options.methods
        for seed in options.seeds
        for processes in options.processes
    ]
    for model, size, method, seed, processes in cases:
        flags = ["--models", model, "--groups", str(size), "--methods", method]
        flags += ["--seeds", str(seed), "--processes", str(processes)]
        command = [sys.executable, "-m", "benchmarks.groups", "--one", *flags]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        with RESULTS.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
            file.write(output.splitlines()[-1] + "\n")
        print(output.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
