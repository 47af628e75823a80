# SPDX-License-Identifier: Apache-2.0
"""The four-class toy, before and after ``refine``.

Data, network, map and NUTS map are those of ``toy_classification.py``. ``refine`` moves the
draws of four trained guides, and the maps before and after are compared with that of NUTS in
``--reference``. The chains stop by the probabilities on a coarse grid, or at the budget. "one call"
is ``fit(model, "auto", ...)`` of the same network, with a limit of ``--max-seconds`` CPU seconds::

    python -m benchmarks.refine_toy
    python -m benchmarks.refine_toy --guides "mean field" --seeds 1
    python -m benchmarks.refine_toy --report

Each run adds one line to ``--out``, with both maps; runs that have a line with
the same settings are skipped. ``--report`` writes the table and the figure.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal, init_to_sample
from torch import Tensor, nn

from benchmarks.common import (
    RESULTS,
    add_output_arguments,
    cosine_adam,
    fit,
    markdown_table,
    read_records,
    run_missing,
    write_page,
)
from benchmarks.networks.tabular import by_cpu_clock
from benchmarks.toy_classification import (
    NUM_TRAIN,
    difference,
    logits,
    make_data,
    make_grid,
    model,
    spread,
    uncertainty,
)
from pyro_implicit import (
    LIVI_ELBO,
    AutoImplicit,
    AutoSemiImplicit,
    InjectiveELBO,
    ResidualGenerator,
)
from pyro_implicit import fit as implicit_fit
from pyro_implicit.diagnostics import draw
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import refine
from pyro_implicit.nn import classifier, to_bayesian_

NUM_MEMBERS = 5
ONE_CALL = "one call"
COARSE = 9  # points per side of the grid whose probabilities determine convergence


def train(guide: Any, elbo: Any, args: argparse.Namespace) -> Any:
    optim = cosine_adam(args.lr, args.steps)
    fit(SVI(model, guide, optim, elbo), args.steps, *make_data(NUM_TRAIN, seed=0))
    return guide


def mean_field(args: argparse.Namespace) -> Any:
    elbo = ImplicitELBO(args.particles, vectorize_particles="plate")
    return train(AutoNormal(model, init_loc_fn=init_to_sample), elbo, args)


def livi(args: argparse.Namespace) -> Any:
    guide = AutoSemiImplicit(model, noise_dim=50, init_loc_fn=init_to_sample, frame="mode")
    # LIVI's determinants are as large as the noise: half the particles give about equal time.
    elbo = LIVI_ELBO(max(1, args.particles // 2), vectorize_particles="plate")
    return train(guide, elbo, args)


def injective(args: argparse.Namespace) -> Any:
    guide = AutoImplicit(
        model,
        generator=lambda size: ResidualGenerator(size, 10),
        init_loc_fn=init_to_sample,
        frame="mode",
    )
    elbo = InjectiveELBO(args.particles, vectorize_particles="plate")
    return train(guide, elbo, args)


def ensemble(args: argparse.Namespace) -> dict[str, Tensor]:
    """Draws of five mean-field fits in turn."""
    members = []
    for _ in range(NUM_MEMBERS):
        pyro.clear_param_store()
        members.append(networks(mean_field(args), args.draws // NUM_MEMBERS))
    return {"theta": torch.stack(members, 1).flatten(0, 1)}


GUIDES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "mean field": mean_field,
    "LIVI": livi,
    "InjectiveELBO": injective,
    "ensemble of 5 mean fields": ensemble,
}


def networks(guide: Any, num_draws: int) -> Tensor:
    """``(num_draws, 184)``."""
    if isinstance(guide, dict):
        return guide["theta"]
    return draw(guide, num_draws, *make_data(NUM_TRAIN, seed=0))["theta"]


def probabilities(draws: dict[str, Tensor]) -> Tensor:
    """``(num_chains, COARSE**2, 4)``."""
    return logits(draws["theta"], make_grid(COARSE)).softmax(-1)


def rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def one_call(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    x, y = make_data(NUM_TRAIN, seed=0)
    layers = [nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 4)]
    net = to_bayesian_(nn.Sequential(*layers), dist.Normal(0.0, 1.0))
    start = time.process_time()
    with by_cpu_clock():
        options: dict[str, Any] = {"max_seconds": args.max_seconds, "seed": seed, "progress": False}
        result = implicit_fit(classifier(net, NUM_TRAIN), "auto", x, y, **options)
    seconds, chains = time.process_time() - start, result.refined
    assert chains is not None and chains.drift is not None
    grid, first = make_grid(args.grid), result.stages[0].seconds

    def weights(draws: dict[str, Tensor]) -> Tensor:
        names = [f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")]
        return torch.cat([draws[name].flatten(1) for name in names], -1)

    return {
        "guide_seconds": first,
        "refine_seconds": seconds - first,
        "stopped": chains.stopped,
        "gradients": chains.num_gradients,
        "r_hat": chains.drift.r_hat,
        "failed": chains.failed,
        "space": chains.space,
        "before": rounded(uncertainty(weights(result.guide.get_samples()), grid)),
        "after": rounded(uncertainty(weights(chains.get_samples()), grid)),
    }


def run(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    if name == ONE_CALL:
        return one_call(seed, args)
    start = time.process_time()  # excludes other jobs on the machine
    guide = GUIDES[name](args)
    trained = time.process_time()
    result = refine(
        model,
        guide,
        *make_data(NUM_TRAIN, seed=0),
        num_chains=args.chains,
        max_gradients=args.max_gradients,
        quantities=probabilities,
        progress=False,
    )
    end = time.process_time()
    grid = make_grid(args.grid)
    return {
        "guide_seconds": trained - start,
        "refine_seconds": end - trained,
        "stopped": result.stopped,
        "gradients": result.num_gradients,
        "r_hat": None if result.drift is None else result.drift.r_hat,
        "failed": result.failed,
        "space": result.space,
        "before": rounded(uncertainty(networks(guide, args.draws), grid)),
        "after": rounded(uncertainty(result.get_samples()["theta"], grid)),
    }


def reference(path: Path) -> dict[str, Any]:
    """Return the record of NUTS."""
    return next(record for record in read_records(path) if record["method"] == "NUTS")


def run_all(args: argparse.Namespace) -> None:
    args.grid = reference(args.reference)["grid"]
    names = ["grid", "steps", "lr", "particles", "draws", "chains", "max_gradients"]
    settings = {name: getattr(args, name) for name in names}
    keys = (
        {"guide": guide, "seed": seed}
        | settings
        | ({"max_seconds": args.max_seconds} if guide == ONE_CALL else {})
        for seed in range(args.seeds)
        for guide in args.guides
    )
    run_missing(args.out, keys, lambda key: run(key["guide"], key["seed"], args))


def report(path: Path, nuts: dict[str, Any]) -> str:
    """Return the Markdown table of the records."""
    groups = defaultdict(list)
    for record in read_records(path):
        groups[record["guide"]].append(record)
    rows = []
    for name, runs in groups.items():
        cells = [
            spread([difference({"map": run[when]}, nuts) for run in runs], 3)
            for when in ("before", "after")
        ]
        columns = {"gradients": 0, "guide_seconds": 0, "refine_seconds": 0}
        cells += [spread([run[key] for run in runs], digits) for key, digits in columns.items()]
        converged = sum(run["stopped"] == "converged" for run in runs)
        rows.append([name, *cells, f"{converged} of {len(runs)}"])
    header = ["guide", "before", "after", "gradients", "CPU s: guide", "refine", "converged"]
    first = next(iter(groups.values()))[0]
    return (
        markdown_table(header, rows) + f"\nMean absolute difference between the uncertainty map "
        f"(`toy_classification.py`) and that of NUTS, before\nand after `refine`; mean (range) "
        f"over seeds. Two NUTS chains differ by {nuts['floor']:.3f} and took\n"
        f"{nuts['cpu_seconds']:.0f} CPU s, in a separate run with a density written by hand. "
        f"Guides: {first['steps']} steps with {first['particles']}\nparticles (LIVI: half as "
        f"many). Refined by {first['chains']} chains of at most about "
        f"{first['max_gradients']} gradients each.\nOne call: "
        "`fit(model, 'auto', x, y, max_seconds=18)`, a hundred members and chains of MCLMC.\n\n"
        "To reproduce: `python -m benchmarks.refine_toy`.\n"
    )


def plot(path: Path, nuts: dict[str, Any]) -> None:
    """Draw the maps of the first seed before (above) and after, and that of NUTS."""
    import matplotlib.pyplot as plt

    first = {record["guide"]: record for record in reversed(read_records(path))}
    shown = [name for name in GUIDES if name in first]
    figure, panels = plt.subplots(
        2, len(shown) + 1, figsize=(2 * len(shown) + 2, 4.4), squeeze=False, layout="constrained"
    )
    x, _ = make_data(NUM_TRAIN, seed=0)
    for column, name in enumerate(["NUTS", *shown]):
        for panel, when in zip(panels[:, column], ("before", "after"), strict=True):
            panel.axis("off")
            if name == "NUTS" and when == "after":
                continue
            values = nuts["map"] if name == "NUTS" else first[name][when]
            image = panel.imshow(
                torch.tensor(values).reshape(nuts["grid"], -1).T.numpy(),
                origin="lower",
                extent=(-10, 10, -10, 10),
                vmin=0,
                vmax=1.75,
                cmap="Blues",
            )
            panel.scatter(*x.T.numpy(), s=0.5, color="tab:red")
            distance = difference({"map": values}, nuts)
            title = name if name == "NUTS" else f"{name},\n{when}: {distance:.3f}"
            panel.set_title(title, fontsize=7)
    figure.colorbar(image, ax=panels, shrink=0.6)
    figure.savefig(path.with_suffix(".png"), dpi=90)
    plt.close(figure)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if not args.report:
        run_all(args)
    nuts = reference(args.reference)
    write_page(args.out, report(args.out, nuts))
    plot(args.out, nuts)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--guides", nargs="+", default=[*GUIDES, ONE_CALL], choices=[*GUIDES, ONE_CALL]
    )
    parser.add_argument("--seeds", type=int, default=2, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-2, help="falls to zero along a cosine")
    parser.add_argument("--particles", type=int, default=20)
    parser.add_argument("--draws", type=int, default=1000, help="networks drawn from a guide")
    parser.add_argument("--chains", type=int, default=256)
    parser.add_argument("--max-gradients", type=int, default=1000, help="of each chain")
    parser.add_argument("--max-seconds", type=float, default=18.0, help="of the one call")
    parser.add_argument("--reference", type=Path, default=RESULTS / "toy_classification.jsonl")
    add_output_arguments(parser, RESULTS / "refine_toy.jsonl")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
