# SPDX-License-Identifier: Apache-2.0
"""WideResNets on CIFAR-10: time of a LIVI step compared with a MAP step, per particle.

Each row of the table is a separate process: seconds of a step (the median of ``--steps``) and the
peak memory in excess of the memory before. Normalisation is by groups. WRN-16-4 needs a GPU
(``--width 4 --batch-size 128 --device cuda``); on a CPU take ``--width 1``::

    python -m benchmarks.networks.wide_resnet --data-dir /path/to/data --width 1 --batch-size 32
    python -m benchmarks.networks.wide_resnet --report
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoDelta, init_to_value
from torch import Tensor, nn

from benchmarks.common import (
    RESULTS,
    add_machine_arguments,
    add_output_arguments,
    append_record,
    environment,
    markdown_table,
    read_records,
    write_page,
)
from benchmarks.networks.data import cifar
from pyro_implicit import LIVI_ELBO, AutoSemiImplicit, CorrelatedMMNN
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.nn import classifier, start_values, to_bayesian_

IMAGES = 2000
ROWS = ("MAP", "LIVI L'", "LIVI L''")


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, before), nn.GroupNorm(8, after)])
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.relu(self.norms[0](x))
        around = x if self.around is None else self.around(inside)
        return around + self.second(torch.relu(self.norms[1](self.first(inside))))


def wide_resnet(width: int) -> nn.Sequential:
    """WRN-16-width for 32x32 pixels: three groups of two blocks."""
    sizes = [16, 16 * width, 32 * width, 64 * width]
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    for before, after, stride in zip(sizes, sizes[1:], (1, 2, 2), strict=False):
        layers += [Block(before, after, stride), Block(after, after, 1)]
    layers += [nn.GroupNorm(8, sizes[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def work(args: argparse.Namespace, row: str) -> dict[str, Any]:
    """Return seconds and memory of one particle."""
    torch.set_num_threads(args.threads)
    x, y = (part.to(args.device) for part in cifar(args.data_dir / "cifar10", "train", IMAGES))
    pyro.set_rng_seed(0)
    model = classifier(to_bayesian_(wide_resnet(args.width).to(args.device)), len(x))
    start = init_to_value(values=start_values(model))
    sizes = [value.numel() for value in start_values(model).values()]
    guide: Any = AutoDelta(model, init_loc_fn=start)
    loss: Any = ImplicitELBO(1)
    if row != "MAP":
        side = args.noise
        guide = AutoSemiImplicit(
            model,
            CorrelatedMMNN(
                sizes, (side, side), [(2 * side, 4 * side)], [(side, side)], output_scale=1.0
            ),
            init_loc_fn=start,
            frame=None,
            init_scale=0.01,
        )
        log_det: Any = "stochastic" if row == "LIVI L'" else "smallest"
        loss = LIVI_ELBO(1, log_det=log_det, num_probes=1, max_iterations=args.solver)
    batches = list(zip(x.split(args.batch_size), y.split(args.batch_size), strict=True))
    loss.differentiable_loss(model, guide, *batches[0])  # creates the guide's parameters
    optimiser = torch.optim.Adam(guide.parameters(), 1e-3)
    before, taken, losses = peak(args.device, reset=True), [], []
    for step in range(args.steps):
        began = time.process_time() if args.device == "cpu" else time.perf_counter()
        value = loss.differentiable_loss(model, guide, *batches[step % len(batches)])
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        losses.append(value.item())
        now = time.process_time() if args.device == "cpu" else time.perf_counter()
        taken.append(now - began)
    numbers = {"row": row, "weights": sum(sizes), "seconds": median(taken), "losses": losses}
    numbers |= {"parameters": sum(part.numel() for part in guide.parameters())}
    return numbers | {"megabytes": peak(args.device), "before": before}


def peak(device: str, reset: bool = False) -> float:
    """Return the peak memory in megabytes."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated() / 2**20


def report(path: Path) -> str:
    """Return the table, with ratios to the MAP of the same setting."""
    records, rows = read_records(path), []
    for one in records:
        setting = ("width", "batch_size", "device")
        base = next(
            r for r in records if r["row"] == "MAP" and all(r[k] == one[k] for k in setting)
        )
        cells = [f"WRN-16-{one['width']}", one["row"], f"{one['weights']:,}"]
        cells += [f"{one['parameters']:,}", str(one["batch_size"]), f"{one['seconds']:.2f}"]
        cells += [f"{one['seconds'] / base['seconds']:.2f}", f"{one['megabytes']:.0f}"]
        rows.append([*cells, f"{one['megabytes'] / base['megabytes']:.2f}", one["device"]])
    header = ["network", "row", "weights", "parameters", "batch", "seconds of a step", "over MAP"]
    header += ["MB at the peak", "over MAP", "device"]
    return markdown_table(header, rows) + (
        "\nOne particle; seconds of one core; the peak memory is that of the process, including "
        "library and images.\nThese are test runs: no network is trained to convergence.\n\n"
        "To reproduce: `python -m benchmarks.networks.wide_resnet --data-dir D --width 4`, and "
        "`--width 1` for the other rows.\n"
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--noise", type=int, default=60, help="side of the noise of the MMNN")
    parser.add_argument("--solver", type=int, default=20, help="iterations of a log-determinant")
    add_output_arguments(parser, RESULTS / "networks_wide_resnet.jsonl")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    add_machine_arguments(parser)
    return parser


def main(args: argparse.Namespace) -> None:
    if args.worker:
        numbers = work(args, args.worker)
        setting = {name: getattr(args, name) for name in ("width", "batch_size", "noise", "solver")}
        append_record(args.out, numbers | setting | environment(args.device))
        return
    for row in [] if args.report else ROWS:
        command = [sys.executable, "-m", "benchmarks.networks.wide_resnet", *sys.argv[1:]]
        subprocess.run([*command, "--worker", row], check=True)
    write_page(args.out, report(args.out))


if __name__ == "__main__":
    main(parser().parse_args())
