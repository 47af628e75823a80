# SPDX-License-Identifier: Apache-2.0
"""Check every model against its reference draws by Stein's identities, and time it.

Draws u of a density p satisfy :math:`E[s] = 0` and :math:`E[s (u - E u)^T] = -I` with the score
:math:`s = \\nabla \\log p(u)`: a wrong prior, column or Jacobian breaks them. Here u are a thousand
reference draws in unconstrained space, whitened. About a minute for all on one CPU thread::

    python -m benchmarks.posteriordb.check --data-dir /path/to/data
    python -m benchmarks.posteriordb.check --data-dir /path/to/data nes1972-nes sblrc-blr
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.common import seconds
from benchmarks.posteriordb.data import EXTRA, NAMES, load
from pyro_implicit.density.target import Target

__all__ = ["THRESHOLD", "stein_z_scores"]

THRESHOLD = 4.5


def stein_z_scores(draws: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """Return the deviations from Stein's identities, in standard errors.

    :param draws: shape ``(num_draws, dim)``.
    :param score: of the density at the draws, same shape.
    :returns: of the score, ``(dim,)``, and of its products with the draws, ``(dim, dim)``.
    """
    frame = torch.linalg.cholesky(torch.cov(draws.T))
    white = torch.linalg.solve_triangular(frame, (draws - draws.mean(0)).T, upper=False).T
    score = score @ frame
    products = score.unsqueeze(-1) * white.unsqueeze(-2) + torch.eye(len(frame)).to(draws)

    def z_scores(terms: Tensor) -> Tensor:
        return terms.mean(0) / terms.std(0) * len(terms) ** 0.5

    return z_scores(score), z_scores(products)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all posteriors")
    parser.add_argument("--data-dir", type=Path, help="folder of the folder posteriordb/")
    parser.add_argument(
        "--num-draws", type=int, default=1000, help="reference draws, spread evenly"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)

    bad = []
    print(f"{'posterior':44} dim  score  Stein       ms of 128 densities and gradients")
    for name in args.names or NAMES + EXTRA:
        posterior = load(name, args.data_dir)
        latents = posterior.unconstrain(posterior.reference())
        latents = latents[:: len(latents) // args.num_draws]
        density = Target(posterior.model, *posterior.args)
        worst = [float(z.abs().max()) for z in stein_z_scores(latents, density.score(latents)[1])]
        batch = latents[:128]
        milliseconds = 1e3 * median(seconds(lambda: density.score(batch)) for _ in range(5))  # noqa: B023
        if not max(worst) < THRESHOLD:
            bad.append(name)
        verdict = "bad" if name in bad else "ok"
        first, second = worst
        dim = latents.shape[-1]
        print(f"{name:44} {dim:3}  {first:5.2f}  {second:5.2f}  {verdict:3}  {milliseconds:5.1f}")
    if bad:
        raise SystemExit(f"not the density of their reference draws: {', '.join(bad)}")


if __name__ == "__main__":
    main()
