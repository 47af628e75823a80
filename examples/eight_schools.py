# SPDX-License-Identifier: Apache-2.0
"""The eight schools, whose posterior is a funnel: four guides compared with NUTS.

Eight schools each estimate the effect of coaching on a test score [1]. For a small spread ``tau``
between schools, all effects ``theta`` must be close together: a funnel, which no Gaussian guide can
represent. The script fits two Gaussian guides and two implicit guides to the centred model: one
implicit guide is trained by ``SVI``, the other is found by ``pyro_implicit.fit`` with default
settings. NUTS on the non-centred model is the reference. The script prints a table of errors and
draws ``log tau`` against ``theta[0]``. It takes about four minutes on two CPU cores::

    python examples/eight_schools.py

**References:**

[1] `Estimation in parallel randomized experiments`, D. B. Rubin, Journal of Educational Statistics
    1981.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.infer.reparam import LocScaleReparam
from pyro.optim import CosineAnnealingLR
from torch import Tensor
from tqdm import trange

from pyro_implicit import LIVI_ELBO, AutoSemiImplicit, compare, fit
from pyro_implicit.diagnostics import Comparison, draw

EFFECT = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
STANDARD_ERROR = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
TRUTH = "NUTS, non-centred"
FIT = "fit, default settings"


def model(standard_error: Tensor, effect: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(effect)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("effect", dist.Normal(theta, standard_error), obs=effect)


def train(guide, elbo, lr: float, steps: int, num_draws: int) -> dict[str, Tensor]:
    # Decay the learning rate to zero along a cosine, so that the last steps average the gradients.
    schedule = {"optimizer": torch.optim.Adam, "optim_args": {"lr": lr}, "T_max": steps}
    optimizer = CosineAnnealingLR(schedule, {"clip_norm": 10.0})
    svi = SVI(model, guide, optimizer, loss=elbo)
    for _ in trange(steps, desc=type(guide).__name__):
        svi.step(STANDARD_ERROR, EFFECT)
        optimizer.step()
    return draw(guide, num_draws, STANDARD_ERROR, EFFECT)


def run_nuts(num_samples: int, warmup_steps: int) -> dict[str, Tensor]:
    # The scaled and shifted effects (theta - mu) / tau have no funnel, so NUTS samples them well.
    non_centred = poutine.reparam(model, config={"theta": LocScaleReparam(centered=0.0)})
    mcmc = MCMC(NUTS(non_centred), num_samples=num_samples, warmup_steps=warmup_steps)
    mcmc.run(STANDARD_ERROR, EFFECT)
    samples = mcmc.get_samples()
    mu, tau = samples["mu"], samples["tau"]
    return {
        "mu": mu,
        "tau": tau,
        "theta": mu[:, None] + tau[:, None] * samples["theta_decentered"],
    }


def with_log_tau(draws: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the coordinates of the comparison; ``log tau`` shows the neck of the funnel."""
    return {"mu": draws["mu"], "log tau": draws["tau"].log(), "theta": draws["theta"]}


def print_table(reports: dict[str, Comparison], seconds: dict[str, float]) -> None:
    row = "{:22} {:>11} {:>14} {:>10} {:>7} {:>7} {:>8}".format
    print()
    print(row("", "worst error", "sd ratios,", "sd ratio", "joint", "in", ""))
    print(row("", "of a mean", "min to max", "of log tau", "SW2", "ratio", "seconds"))
    for name, report in reports.items():
        sites = report.sites.values()
        error = max(site.mean_error.abs().max() for site in sites)
        ratios = torch.cat([site.sd_ratio.reshape(-1) for site in sites])
        print(
            row(
                name,
                f"{error:.2f}",
                f"{ratios.min():.2f} to {ratios.max():.2f}",
                f"{report.sites['log tau'].sd_ratio:.2f}",
                f"{report.sliced_wasserstein:.3f}",
                f"{report.floor_ratio:.1f}",
                f"{seconds[name]:.0f}",
            )
        )
    floor = next(iter(reports.values())).sampling_floor
    print(row(TRUTH, "", "", "", f"{floor:.3f}", "1.0", f"{seconds[TRUTH]:.0f}"))
    print(
        "Errors are in sds of the reference. SW2 is the sliced Wasserstein distance over mu, log\n"
        "tau and theta in these units; the ratio is SW2 divided by the distance between two sets\n"
        "of exact draws."
    )


def plot(draws: dict[str, dict[str, Tensor]], reports: dict[str, Comparison], path: Path) -> None:
    figure, axes = plt.subplots(
        1, len(draws), figsize=(15, 3.6), sharex=True, sharey=True, layout="constrained"
    )
    truth = draws[TRUTH]
    dots = {"linestyle": "", "marker": ".", "markeredgewidth": 0, "rasterized": True}
    for axis, (name, sample) in zip(axes, draws.items(), strict=True):
        axis.plot(truth["theta"][:, 0], truth["log tau"], color="0.78", markersize=4, **dots)
        color = "0.35" if name == TRUTH else "C0" if name in ("AutoSemiImplicit", FIT) else "C1"
        axis.plot(
            sample["theta"][:, 0], sample["log tau"], color=color, alpha=0.35, markersize=4, **dots
        )
        subtitle = f"{reports[name].floor_ratio:.1f} x the floor" if name in reports else "truth"
        axis.set_title(f"{name}\n{subtitle}", fontsize=11)
        axis.set_xlabel("effect of the first school, theta[0]")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("log tau")
    axes[0].text(0.03, 0.04, "grey: NUTS", color="0.5", transform=axes[0].transAxes)
    axes[0].set_xlim(-17, 35)
    axes[0].set_ylim(-6.5, 4)
    figure.savefig(path, dpi=150)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # more threads only slow down small tensors
    pyro.set_rng_seed(args.seed)
    gaussian = Trace_ELBO(args.particles, vectorize_particles=True, max_plate_nesting=1)
    implicit = LIVI_ELBO(num_particles=args.particles)
    # Each guide has its own learning rate: the Gaussians do not converge in as many steps of 1e-2.
    fits = {
        "AutoNormal": (AutoNormal(model), gaussian, 3e-2),
        "AutoMultivariateNormal": (AutoMultivariateNormal(model), gaussian, 3e-2),
        "AutoSemiImplicit": (AutoSemiImplicit(model), implicit, 1e-2),
    }
    draws, seconds = {}, {}
    for name, (guide, elbo, lr) in fits.items():
        start = time.perf_counter()
        draws[name] = with_log_tau(train(guide, elbo, lr, args.steps, args.num_draws))
        seconds[name] = time.perf_counter() - start
    start = time.perf_counter()
    result = fit(model, "auto", STANDARD_ERROR, EFFECT, max_seconds=args.max_seconds)
    draws[FIT] = with_log_tau(result.sample(args.num_draws))
    seconds[FIT] = time.perf_counter() - start
    start = time.perf_counter()
    draws[TRUTH] = with_log_tau(run_nuts(args.nuts_samples, args.nuts_warmup))
    seconds[TRUTH] = time.perf_counter() - start

    reports = {name: compare(None, draws[name], draws[TRUTH]) for name in draws if name != TRUTH}
    print_table(reports, seconds)
    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "eight_schools.png"
    plot(draws, reports, picture)
    print(f"Figure: {picture}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000, help="steps of each guide")
    parser.add_argument("--particles", type=int, default=128, help="draws per step")
    parser.add_argument("--nuts-samples", type=int, default=4000)
    parser.add_argument("--nuts-warmup", type=int, default=500)
    parser.add_argument("--max-seconds", type=float, help="time limit of fit")
    parser.add_argument("--num-draws", type=int, default=4000, help="draws of each guide")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the figure")
    main(parser.parse_args())
