# SPDX-License-Identifier: Apache-2.0
"""NUTS on the centred eight schools: in the latent variables and in the noise of a fitted guide.

The centred model is a funnel, where plain NUTS diverges and mixes slowly. Each method fits its
guide if it has one, and then draws one chain:

* ``NUTS``, and ``NUTS, non-centred``: the latter with effects that were decoupled from their scale
  by hand (``LocScaleReparam``)
* ``noise space, residual`` and ``noise space, gated``: ``NoiseSpaceReparam`` of ``AutoImplicit``
  fitted by ``InjectiveELBO``, with ``ResidualGenerator`` (all noise in its core) or
  ``GatedResidualGenerator`` (the two parents in its core)
* ``NeuTra, IAF``: Pyro's ``NeuTraReparam`` of its ``AutoIAFNormal``, fitted by ``Trace_ELBO``

The script prints divergences, effective sample sizes (rank-normalised, the smallest of mu, log tau
and the effects; Vehtari et al., 2021), split R-hat, gradients and CPU seconds, and with
``--data-dir`` the distance to the reference draws of posteriordb
(``posteriordb/eight_schools-eight_schools_centered.npz``). Two to five minutes per run and CPU
thread; resumable::

    python -m benchmarks.noise_space_nuts --data-dir /path/to/data
    python -m benchmarks.noise_space_nuts --report
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arviz
import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.infer import ELBO, MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuide, AutoIAFNormal
from pyro.infer.reparam import LocScaleReparam, NeuTraReparam
from pyro.ops.stats import split_gelman_rubin
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    append_record,
    cosine_adam,
    environment,
    fit,
    markdown_table,
    missing_runs,
    read_records,
    spread,
    write_page,
)
from examples.eight_schools import EFFECT, STANDARD_ERROR, model, with_log_tau
from pyro_implicit import (
    AutoImplicit,
    GatedResidualGenerator,
    InjectiveELBO,
    NoiseSpaceReparam,
    ResidualGenerator,
)
from pyro_implicit.diagnostics import compare
from pyro_implicit.export import as_datatree

Draws = dict[str, Tensor]
#: the model for NUTS, and the function from its samples to the sites of ``model``
Problem = tuple[Callable[..., Any], Callable[[Draws], Draws]]

DATA = (STANDARD_ERROR, EFFECT)
REFERENCE = Path("posteriordb") / "eight_schools-eight_schools_centered.npz"


def centred(args: argparse.Namespace) -> Problem:
    return model, lambda samples: samples


def non_centred(args: argparse.Namespace) -> Problem:
    def restore(samples: Draws) -> Draws:
        mu, tau = samples["mu"], samples["tau"]
        theta = mu[:, None] + tau[:, None] * samples["theta_decentered"]
        return {"mu": mu, "tau": tau, "theta": theta}

    return poutine.reparam(model, config={"theta": LocScaleReparam(centered=0.0)}), restore


def over_noise(guide: AutoGuide, elbo: ELBO, kind: Callable[..., NeuTraReparam]) -> Callable:
    def problem(args: argparse.Namespace) -> Problem:
        fit(SVI(model, guide, cosine_adam(args.lr, args.steps), elbo), args.steps, *DATA)
        guide.requires_grad_(False)  # NUTS needs the gradient of the noise only
        reparam = kind(guide)

        @torch.no_grad()
        def restore(samples: Draws) -> Draws:
            return reparam.transform_sample(samples["mu_shared_latent"].unsqueeze(-2))

        return reparam.reparam(model), lambda samples: {
            name: value.reshape(len(value), -1).squeeze(-1)
            for name, value in restore(samples).items()
        }

    return problem


def residual(args: argparse.Namespace) -> Problem:
    guide = AutoImplicit(model, lambda size: ResidualGenerator(size, core_dim=size))
    return over_noise(guide, InjectiveELBO(args.particles), NoiseSpaceReparam)(args)


def gated(args: argparse.Namespace) -> Problem:
    guide = AutoImplicit(model, lambda size: GatedResidualGenerator(size, core_dim=2))
    return over_noise(guide, InjectiveELBO(args.particles), NoiseSpaceReparam)(args)


def flow(args: argparse.Namespace) -> Problem:
    guide = AutoIAFNormal(model)
    elbo = Trace_ELBO(args.particles, vectorize_particles=True, max_plate_nesting=1)
    return over_noise(guide, elbo, NeuTraReparam)(args)


METHODS: dict[str, Callable[[argparse.Namespace], Problem]] = {
    "NUTS": centred,
    "noise space, gated": gated,
    "noise space, residual": residual,
    "NeuTra, IAF": flow,
    "NUTS, non-centred": non_centred,
}


class Counted:
    """A model that counts its runs: NUTS needs one per gradient."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.runs = 0

    def __call__(self, *args: Any) -> Any:
        self.runs += 1
        return self.inner(*args)


class Clock:
    """CPU and wall seconds since its creation; other jobs on the machine inflate the latter."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def seconds(self, name: str) -> dict[str, float]:
        return {
            f"{name}_cpu_seconds": time.process_time() - self._cpu,
            f"{name}_wall_seconds": time.perf_counter() - self._wall,
        }


def run(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    pyro.set_rng_seed(seed)
    pyro.clear_param_store()
    clock = Clock()
    problem, restore = METHODS[name](args)
    training = clock.seconds("training")
    counted = Counted(problem)
    mcmc = MCMC(
        NUTS(counted), num_samples=args.draws, warmup_steps=args.warmup, disable_progbar=True
    )
    clock = Clock()
    mcmc.run(*DATA)
    sampling = clock.seconds("sampling")
    draws = with_log_tau(restore(mcmc.get_samples()))
    return {
        "divergences": sum(len(steps) for steps in mcmc.diagnostics()["divergences"].values()),
        "gradients": counted.runs,
        **training,
        **sampling,
        **chain_statistics(draws),
        **errors(draws, args.data_dir),
    }


def chain_statistics(draws: Draws) -> dict[str, float]:
    """Return bulk and tail effective sample sizes and R-hat of the worst coordinate."""
    chain = {name: value.unsqueeze(0) for name, value in draws.items()}
    data = as_datatree({"posterior": chain})["posterior"].to_dataset()
    worst: dict[str, float] = {}
    for method in ("bulk", "tail"):
        ess = arviz.ess(data, method=method)
        worst[f"ess_{method}"] = min(float(ess[name].min()) for name in chain)
        worst[f"ess_{method}_log_tau"] = float(ess["log tau"])
    r_hats = [split_gelman_rubin(value.unsqueeze(0)).max() for value in draws.values()]
    return worst | {"r_hat": float(max(r_hats))}


def errors(draws: Draws, data_dir: Path | None) -> dict[str, float]:
    """Return distances from the reference draws, if available."""
    if data_dir is None:
        return {}
    columns = np.load(data_dir / REFERENCE)
    reference = dict(zip(columns["names"].tolist(), torch.tensor(columns["draws"]).T, strict=True))
    theta = torch.stack([reference[f"theta[{school}]"] for school in range(1, 9)], -1)
    truth = {"mu": reference["mu"], "log tau": reference["tau"].log(), "theta": theta}
    report = compare(None, draws, truth)
    return {
        "mean_error": max(float(site.mean_error.abs().max()) for site in report.sites.values()),
        "sd_ratio_log_tau": float(report.sites["log tau"].sd_ratio),
        "sw2": report.sliced_wasserstein,
        "sw2_floor": report.sampling_floor,
    }


def derived(line: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the ratios of the table."""
    ess, sampling = line["ess_bulk"], line["sampling_cpu_seconds"]
    return line | {
        "per_gradient": 1000 * ess / line["gradients"],
        "per_second": ess / sampling,
        "per_second_trained": ess / (sampling + line["training_cpu_seconds"]),
    }


COLUMNS = {
    "divergences": ("divergences", 0),
    "least ESS": ("ess_bulk", 0),
    "in the tails": ("ess_tail", 0),
    "R-hat": ("r_hat", 3),
    "gradients": ("gradients", 0),
    "ESS per 1000 gradients": ("per_gradient", 1),
    "training, s": ("training_cpu_seconds", 0),
    "sampling, s": ("sampling_cpu_seconds", 0),
    "ESS/s": ("per_second", 2),
    "ESS/s, training included": ("per_second_trained", 2),
    "worst error of a mean, sds": ("mean_error", 2),
    "sd ratio of log tau": ("sd_ratio_log_tau", 2),
    "SW2": ("sw2", 3),
}
NOTE = """
Mean (range) over seeds, one chain each; CPU seconds of one thread. Errors are relative to the
reference draws of posteriordb, in their standard deviations.
"""


def report(path: Path) -> str:
    """Return the Markdown table of the records, with the methods as columns."""
    lines = [derived(line) for line in read_records(path)]
    methods = [name for name in METHODS if any(line["method"] == name for line in lines)]
    rows = []
    for title, (key, digits) in COLUMNS.items():
        known = [line for line in lines if line.get(key) is not None]
        values = [[line[key] for line in known if line["method"] == m] for m in methods]
        rows.append([title, *(spread(some, digits, none="") for some in values)])
    return markdown_table(["", *methods], rows) + NOTE


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=2, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--warmup", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=3000, help="of each guide")
    parser.add_argument("--particles", type=int, default=64, help="draws per step")
    parser.add_argument("--lr", type=float, default=1e-2, help="falls to zero along a cosine")
    parser.add_argument("--data-dir", type=Path, help="folder of posteriordb/")
    add_output_arguments(parser, RESULTS / "noise_space_nuts.jsonl")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings = {key: vars(args)[key] for key in ("draws", "warmup", "steps", "particles", "lr")}
    keys = [
        {"method": name, "seed": seed} | settings
        for seed in range(args.seeds)
        for name in args.methods
    ]
    for key in missing_runs(args.out, [] if args.report else keys):
        found = run(key["method"], key["seed"], args)
        append_record(args.out, key | found | environment("cpu"))
    write_page(args.out, report(args.out))


if __name__ == "__main__":
    main()
