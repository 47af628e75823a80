# SPDX-License-Identifier: Apache-2.0
"""A fully Bayesian Gaussian process with a sparse prior: ``fit`` and NumPyro's NUTS.

::

    python -m benchmarks.saas --sizes 50x20 50x100 --numpyro NUMPYRO_PYTHON
    python -m benchmarks.saas --sizes 50x20 --methods long --numpyro NUMPYRO_PYTHON
    python -m benchmarks.saas --methods third

The model is SAAS (Eriksson and Jankowiak, 2021) with the priors and the Matern-5/2 kernel of
BoTorch. The function is Hartmann-6 in the first six of D dimensions, at n uniform points. NUTS has
BoTorch's settings: one chain, 512 steps of warm-up, 256 draws, trees of depth 6; CPU seconds
include the compilation. ``long`` are four chains of 1,700 steps, and ``third`` is ``fit`` with a
third of NUTS's seconds as ``max_seconds``. The test log-density is that of 500 noiseless values by
the mixture of all draws' predictions. No number of the library was chosen by these problems.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import warnings
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    Record,
    append_record,
    environment,
    markdown_table,
    missing_runs,
    read_records,
    write_page,
)
from benchmarks.posteriordb import metrics
from pyro_implicit import fit

ALPHA = torch.tensor([1.0, 1.2, 3.0, 3.2])
A = torch.tensor(
    [
        [10.0, 3.0, 17.0, 3.5, 1.7, 8.0],
        [0.05, 10.0, 17.0, 0.1, 8.0, 14.0],
        [3.0, 3.5, 1.7, 10.0, 17.0, 8.0],
        [17.0, 8.0, 0.05, 10.0, 0.1, 14.0],
    ]
)
P = 1e-4 * torch.tensor(
    [
        [1312.0, 1696.0, 5569.0, 124.0, 8283.0, 5886.0],
        [2329.0, 4135.0, 8307.0, 3736.0, 1004.0, 9991.0],
        [2348.0, 1451.0, 3522.0, 2883.0, 3047.0, 6650.0],
        [4047.0, 8828.0, 8732.0, 5743.0, 1091.0, 381.0],
    ]
)
NUM_TEST, NUM_DRAWS = 500, 1000
NAMES = {
    "fit": "`fit`",
    "third": "`fit`, a third of NUTS's seconds",
    "user": "NUTS, BoTorch's settings",
    "long": "NUTS, long",
}


def hartmann(x: Tensor) -> Tensor:
    """Hartmann's function of the first six columns, ``(n,)``."""
    inner = (A.to(x) * (x[:, None, :6] - P.to(x)).square()).sum(-1)
    return -(ALPHA.to(x) * (-inner).exp()).sum(-1)


def data(n: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs and standardised outputs for training and test."""
    generator = torch.Generator().manual_seed(1000 * n + dim)
    x = torch.rand(n + NUM_TEST, dim, generator=generator, dtype=torch.float64)
    y = hartmann(x)
    y = (y - y[:n].mean()) / y[:n].std()
    return x[:n], y[:n], x[n:], y[n:]


def matern(first: Tensor, second: Tensor) -> Tensor:
    """Matern-5/2 kernel of scaled inputs."""
    squares = first.square().sum(-1, keepdim=True) + second.square().sum(-1).unsqueeze(-2)
    r = (5 * (squares - 2 * first @ second.mT).clamp(min=1e-15)).sqrt()
    return (1 + r + r.square() / 3) * (-r).exp()


def model(x: Tensor, y: Tensor) -> None:
    outputscale = pyro.sample("outputscale", dist.Gamma(2.0, 0.15))
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    noise = pyro.sample("noise", dist.Gamma(0.9, 10.0))
    tau = pyro.sample("tau", dist.HalfCauchy(0.1))
    inverse = pyro.sample("inverse", dist.HalfCauchy(torch.ones(x.shape[-1])).to_event(1))
    scaled = x * (tau * inverse).sqrt()
    kernel = outputscale * matern(scaled, scaled) + noise * torch.eye(len(y))
    pyro.sample("y", dist.MultivariateNormal(mean.expand(len(y)), kernel), obs=y)


def log_predictive(
    draws: dict[str, Tensor], size: tuple[int, int], num_test: int = NUM_TEST
) -> tuple[float, float]:
    """Return the mean test log-density, and its standard error over the test points."""
    x, y, x_test, y_test = data(*size)
    x_test, y_test = x_test[:num_test], y_test[:num_test]
    parts = []
    for row in range(len(draws["tau"])):
        scale = (draws["tau"][row] * draws["inverse"][row]).sqrt()
        mean, noise = draws["mean"][row], draws["noise"][row]
        train, test = x * scale, x_test * scale
        height = draws["outputscale"][row]
        root = torch.linalg.cholesky(height * matern(train, train) + noise * torch.eye(len(y)))
        across = torch.linalg.solve_triangular(root, height * matern(train, test), upper=False)
        weights = torch.linalg.solve_triangular(root, (y - mean).unsqueeze(-1), upper=False)
        loc = mean + (across.mT @ weights).squeeze(-1)
        variance = height + noise - across.square().sum(0)
        parts.append(dist.Normal(loc, variance.clamp(min=1e-12).sqrt()).log_prob(y_test))
    each = torch.stack(parts).logsumexp(0) - np.log(len(parts))
    return each.mean().item(), (each.std() / len(each) ** 0.5).item()


def features(draws: dict[str, Tensor]) -> Tensor:
    """Return unconstrained draws, ``(num_draws, dim)``."""
    positive = [draws[name].log() for name in ("outputscale", "noise", "tau")]
    columns = [*positive, draws["mean"], draws["inverse"].log()]
    return torch.cat([column.reshape(len(draws["tau"]), -1) for column in columns], -1)


def by_numpyro(size: tuple[int, int], settings: str, args: argparse.Namespace) -> Record:
    stem = args.runs / f"saas-{size[0]}x{size[1]}"
    args.runs.mkdir(parents=True, exist_ok=True)
    x, y, _, _ = data(*size)
    np.savez(f"{stem}.npz", x=x.numpy(), y=y.numpy())
    words = ["-m", "benchmarks.saas_numpyro", f"{stem}.npz", f"{stem}-{settings}.npz", settings]
    found = subprocess.run([args.numpyro, *words], capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def by_fit(size: tuple[int, int], method: str, seed: int, args: argparse.Namespace) -> Record:
    x, y, _, _ = data(*size)
    max_seconds = None
    if method == "third":
        name = f"{size[0]}x{size[1]}"
        known = [one for one in read_records(args.out) if one["size"] == name]
        of_nuts = [one["cpu_seconds"] for one in known if one["method"] == "user"]
        if not of_nuts:
            raise ValueError(f"{args.out} has no run of NUTS of {name}. Cure: --methods user first")
        max_seconds = of_nuts[0] / 3
    began = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(model, "auto", x, y, seed=seed, max_seconds=max_seconds, progress=False)
        draws = result.sample(4 * NUM_DRAWS, x, y)
    cpu = time.process_time() - began
    np.savez(path(size, method, args), **{name: value.numpy() for name, value in draws.items()})
    verdict = result.diagnose().verdict
    return {
        "cpu_seconds": cpu,
        "report": str(result),
        "verdict": verdict,
        "warnings": [str(one.message)[:300] for one in caught],
    }


def path(size: tuple[int, int], method: str, args: argparse.Namespace) -> Path:
    args.runs.mkdir(parents=True, exist_ok=True)
    return args.runs / f"saas-{size[0]}x{size[1]}-{method}.npz"


def read(size: tuple[int, int], method: str, args: argparse.Namespace) -> dict[str, Tensor] | None:
    if not path(size, method, args).exists():
        return None
    with np.load(path(size, method, args)) as file:
        return {name: torch.as_tensor(file[name]) for name in file.files if name != "y"}


def measured(size: tuple[int, int], method: str, args: argparse.Namespace) -> Record:
    """Compare draws with the test points and with the long chains."""
    draws, reference = read(size, method, args), read(size, "long", args)
    assert draws is not None
    some = {
        name: value[:: max(1, len(value) // NUM_DRAWS)][:NUM_DRAWS] for name, value in draws.items()
    }
    value, error = log_predictive(some, size)
    record: Record = {"log_density": value, "log_density_error": error}
    if reference is None or method == "long":
        return record
    own, other = features(draws), features(reference)
    number = min(len(own), len(other), NUM_DRAWS)
    own, other = (part[torch.linspace(0, len(part) - 1, number).long()] for part in (own, other))
    found, floor = metrics.distance(own, other), metrics.floor(other)
    return record | {"distance": found, "floor": floor, "ratio": found / floor}


def run(size: str, method: str, seed: int, args: argparse.Namespace) -> Record:
    n, dim = (int(part) for part in size.split("x"))
    if method in ("fit", "third"):
        found = by_fit((n, dim), method, seed, args)
    else:
        found = by_numpyro((n, dim), method, args)
    return found | measured((n, dim), method, args)


def report(records: list[Record]) -> str:
    rows = [
        [
            record["size"],
            NAMES[record["method"]],
            str(record["seed"]),
            f"{record['cpu_seconds']:.0f}",
            f"{record['log_density']:.3f} +- {record['log_density_error']:.3f}",
            f"{record['ratio']:.2f}" if "ratio" in record else "",
            record.get("verdict", ""),
            ", ".join(
                f"{key} {record[key]:.3g}"
                for key in ("max_rhat", "min_ess", "divergent")
                if key in record
            ),
        ]
        for record in records
    ]
    header = [
        "n x D",
        "method",
        "seed",
        "CPU s",
        "test log-density",
        "ratio to the floor",
        "verdict",
        "chains",
    ]
    return f"# SAAS Gaussian process\n\n{__doc__.split('::')[1]}\n{markdown_table(header, rows)}"


def main(args: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if not args.report:
        keys = (
            {"size": size, "method": method, "seed": seed}
            for size in args.sizes
            for method in args.methods
            for seed in args.seeds
        )
        for key in missing_runs(args.out, keys):
            record = key | run(**key, args=args) | environment("cpu")
            append_record(args.out, record)
            print(
                record["size"],
                record["method"],
                record["cpu_seconds"],
                record["log_density"],
                record.get("ratio"),
                flush=True,
            )
    write_page(args.out, report(read_records(args.out)))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["50x20", "50x100", "100x20", "100x100"])
    parser.add_argument(
        "--methods", nargs="+", default=["user", "fit"], choices=("long", "user", "fit", "third")
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--numpyro", default="python", help="the interpreter of an environment with NumPyro"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of draws")
    parser.add_argument("--out", type=Path, default=RESULTS / "saas.jsonl")
    parser.add_argument("--report", action="store_true", help="only write the page of --out")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
