# SPDX-License-Identifier: Apache-2.0
"""NumPyro's NUTS on one twin; run by ``make`` in an environment with NumPyro."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.diagnostics
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_median, init_to_uniform
from numpyro.infer.reparam import Reparam
from numpyro.infer.util import log_density

NUM_CHAINS = 4
# Chains with a smaller R-hat are continued; those that reach the other limits are not.
MIXING_RHAT, ENOUGH_RHAT, ENOUGH_ESS = 1.1, 1.008, 1200
NUM_POINTS = 6
COMMON_FLAGS = "--xla_cpu_multi_thread_eigen=false"
FAMILIES = (dist.Normal, dist.Laplace, dist.Cauchy)
QUICK_FLAGS = " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


class Noncentred(Reparam):
    """Sample a location-scale site as its location plus its scale, or Cholesky factor, times
    noise."""

    def __call__(self, name: str, fn: Any, obs: Any) -> tuple[None, Any]:
        prior, _, _ = self._unwrap(fn)
        if isinstance(prior, dist.StudentT):
            standard = dist.StudentT(prior.df, 0.0, 1.0)
        else:
            family = type(prior) if isinstance(prior, FAMILIES) else dist.Normal
            standard = family(0.0, 1.0)
        white = standard.expand(fn.shape()).to_event(fn.event_dim)
        noise = numpyro.sample(f"{name}_white", white)
        if isinstance(prior, dist.MultivariateNormal):
            return None, prior.loc + (prior.scale_tril @ noise[..., None])[..., 0]
        assert isinstance(prior, (*FAMILIES, dist.StudentT)), f"{name} has no location and scale"
        return None, prior.loc + prior.scale * noise


def collected(mcmc: MCMC) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The draws and the extra fields of the last run, by chain."""
    draws = {name: np.asarray(value) for name, value in mcmc.get_samples(True).items()}
    extra = {name: np.asarray(value) for name, value in mcmc.get_extra_fields(True).items()}
    return draws, extra


def is_short(draws: dict[str, np.ndarray]) -> bool:
    """Whether the chains mix, but have not enough effective draws for a reference."""
    statistics = numpyro.diagnostics.summary(draws).values()
    ess = min(np.nanmin(part["n_eff"]) for part in statistics)
    rhat = max(np.nanmax(part["r_hat"]) for part in statistics)
    return bool(rhat < MIXING_RHAT and (ess < ENOUGH_ESS or rhat > ENOUGH_RHAT))


def main(args: argparse.Namespace) -> None:
    if args.cpu_limit:
        resource.setrlimit(resource.RLIMIT_CPU, (args.cpu_limit, args.cpu_limit))
    # Read at the first computation. For most twins compilation takes longer than sampling.
    os.environ["XLA_FLAGS"] = COMMON_FLAGS + ("" if args.optimise else QUICK_FLAGS)
    jax.config.update("jax_enable_x64", True)
    wall, cpu = time.perf_counter(), time.process_time()
    model = getattr(importlib.import_module(args.module), args.name)
    with np.load(args.folder / "data.npz") as file:
        data = [file[f"argument_{i}"] for i in range(len(file.files))]
    start = init_to_median() if args.from_median else init_to_uniform()
    noncentred = {site: Noncentred() for site in args.noncentred}
    kernel = NUTS(
        numpyro.handlers.reparam(model, noncentred),
        target_accept_prob=args.target_accept,
        init_strategy=start,
        dense_mass=not args.diagonal,
    )
    mcmc = MCMC(
        kernel,
        num_warmup=args.warmup,
        num_samples=args.samples * args.thin,
        thinning=args.thin,
        num_chains=NUM_CHAINS,
        chain_method="sequential" if args.sequential else "vectorized",
        progress_bar=False,
    )
    fields = ("diverging", "num_steps")
    mcmc.run(jax.random.PRNGKey(args.seed), *data, extra_fields=fields)
    draws, extra = collected(mcmc)
    first = {"samples": args.samples, "cpu_seconds": time.process_time() - cpu}
    first |= {"divergences": float(extra["diverging"].mean())}
    block = first["cpu_seconds"]
    while time.process_time() - cpu + block < args.extend and is_short(draws):
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(mcmc.post_warmup_state.rng_key, *data, extra_fields=fields)
        draws, extra = (
            {name: np.concatenate([part[name], more[name]], 1) for name in part}
            for part, more in zip((draws, extra), collected(mcmc), strict=True)
        )
    for site in args.noncentred:
        del draws[f"{site}_white"]
    points = [{name: value[0, i] for name, value in draws.items()} for i in range(NUM_POINTS)]
    log_probs = [float(log_density(model, data, {}, point)[0]) for point in points]
    np.savez(args.folder / "draws.npz", **draws)
    record = {
        "numpyro": numpyro.__version__,
        "jax": jax.__version__,
        "log_probs": log_probs,
        "first": first,
        "divergences": float(extra["diverging"].mean()),
        "leapfrogs_per_draw": float(extra["num_steps"].mean()),
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
    }
    (args.folder / "run.json").write_text(json.dumps(record))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="of the twin")
    parser.add_argument("name")
    parser.add_argument("folder", type=Path, help="has the data and gets the draws")
    parser.add_argument("--warmup", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=2500, help="that each chain keeps")
    parser.add_argument("--thin", type=int, default=1)
    parser.add_argument("--target-accept", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimise", action="store_true", help="by XLA: for the large twins")
    parser.add_argument("--diagonal", action="store_true", help="mass matrix")
    parser.add_argument("--cpu-limit", type=int, help="seconds after which the kernel ends it")
    parser.add_argument("--extend", type=float, default=0.0, help="CPU s to continue short chains")
    parser.add_argument("--sequential", action="store_true", help="chains one after another")
    parser.add_argument("--noncentred", nargs="+", default=[], metavar="SITE")
    parser.add_argument("--from-median", action="store_true", help="of the prior")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
