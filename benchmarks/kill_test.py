# SPDX-License-Identifier: Apache-2.0
"""Is a training that is killed repeatedly bit-identical to an uninterrupted one?

Run ``fit(model, checkpoint=...)`` in a separate process, kill it with SIGKILL at ten random
moments, restart it each time, and compare the final parameters and losses bit by bit with those of
an uninterrupted run. Some minutes on one CPU thread::

    python -m benchmarks.kill_test
    python -m benchmarks.kill_test --target funnel --steps 3000 --kills 10 --seed 1

With a checkpoint every few steps, some kills are likely to occur during a write.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.common import RESULTS, append_record, environment
from benchmarks.targets import TARGETS, make_target

OUT = RESULTS / "kill_test.jsonl"
STARTED = "training"  # printed by the child after its imports


def train(args: argparse.Namespace, folder: Path) -> None:
    """Run the training in the child process and write ``final.pt``."""
    from pyro_implicit.fitting import fit

    target = make_target(args.target)
    print(STARTED, flush=True)
    start = time.perf_counter()
    result = fit(
        target.model,
        "auto",
        num_steps=args.steps,
        checkpoint=folder / "checkpoint",
        checkpoint_every=args.every,
        seed=args.seed,
        progress=False,
    )
    final = {
        "parameters": result.guide.state_dict(),
        "losses": torch.as_tensor(result.losses),
        "seconds": time.perf_counter() - start,
    }
    torch.save(final, folder / "final.pt")


def child(args: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
    """Start the training in ``folder``, from its checkpoint if there is one."""
    words = [sys.executable, "-m", "benchmarks.kill_test", "--train-in", str(folder)]
    for name in ("target", "steps", "every", "seed", "threads"):
        words += [f"--{name}", str(getattr(args, name))]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == STARTED:
            break
    return process


def finish(process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    process.communicate()
    if process.returncode:
        raise RuntimeError(f"the training in {folder} ended with {process.returncode}")
    return torch.load(folder / "final.pt")


def identical(a: Any, b: Any) -> bool:
    """Check whether two nested results are equal bit by bit; nan equals nan."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def kill_and_resume(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the experiment in an empty folder."""
    folders = folder / "undisturbed", folder / "killed"
    for place in folders:
        place.mkdir()
    expected = finish(child(args, folders[0]), folders[0])
    # In total at most the time of the uninterrupted run, most likely half of it.
    longest = expected["seconds"] / max(1, args.kills)
    generator = random.Random(args.seed)
    moments = [generator.uniform(0, longest) for _ in range(args.kills)]
    landed = 0
    for moment in tqdm(moments, unit="kill"):
        process = child(args, folders[1])
        time.sleep(moment)
        landed += process.poll() is None
        process.kill()
        process.communicate()
    found = finish(child(args, folders[1]), folders[1])
    return {
        "kills": landed,
        "seconds": expected["seconds"],
        "parameters_equal": identical(found["parameters"], expected["parameters"]),
        "losses_equal": identical(found["losses"], expected["losses"]),
    }


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    if args.train_in is not None:
        train(args, args.train_in)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = kill_and_resume(args, Path(folder))
    key = {name: getattr(args, name) for name in ("target", "steps", "every", "seed")}
    append_record(args.out, key | result | environment("cpu"))
    print(result)
    if not (result["parameters_equal"] and result["losses_equal"]):
        raise SystemExit("the resumed training ended elsewhere")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="x_shape", choices=list(TARGETS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=20, help="steps from checkpoint to checkpoint")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the training and of the moments")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--train-in", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
