# SPDX-License-Identifier: Apache-2.0
"""Draw the README's figure: Neal's funnel by two Gaussian guides and ``fit``, and exact draws.

::

    python -m benchmarks.funnel_picture      # a minute or two on one core

The funnel [1] is :math:`v \\sim N(0, 3)`, :math:`x_i | v \\sim N(0, e^{v/2})`, with nine
:math:`x_i`. The model itself samples exact draws.

**References:**

[1] `Slice sampling`, R. M. Neal, Annals of Statistics 2003.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from PIL import Image
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch import Tensor

from benchmarks.common import cosine_adam
from benchmarks.common import fit as train
from pyro_implicit import fit
from pyro_implicit.diagnostics import draw

PICTURE = Path(__file__).parents[1] / "docs" / "img" / "funnel.png"
NUM_DRAWS, STEPS = 4000, 3000


def funnel() -> None:
    v = pyro.sample("v", dist.Normal(0.0, 3.0))
    scale = (v / 2).exp().unsqueeze(-1)
    pyro.sample("x", dist.Normal(torch.zeros(9), scale).to_event(1))


def exact() -> dict[str, Tensor]:
    v = 3 * torch.randn(NUM_DRAWS)
    return {"v": v, "x": torch.randn(NUM_DRAWS, 9) * (v / 2).exp()[:, None]}


def by_svi(guide) -> dict[str, Tensor]:
    elbo = Trace_ELBO(32, vectorize_particles=True, max_plate_nesting=0)
    train(SVI(funnel, guide, cosine_adam(3e-2, STEPS), elbo), STEPS)
    return draw(guide, NUM_DRAWS)


def by_fit() -> dict[str, Tensor]:
    result = fit(funnel, "auto", seed=0, progress=False)
    print(result)
    return result.sample(NUM_DRAWS)


def main() -> None:
    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    panels = {
        "posterior": (exact, "0.35"),
        "AutoNormal": (lambda: by_svi(AutoNormal(funnel)), "C1"),
        "AutoMultivariateNormal": (lambda: by_svi(AutoMultivariateNormal(funnel)), "C1"),
        'fit(model, "auto")': (by_fit, "C0"),
    }
    figure, axes = plt.subplots(
        1, 4, figsize=(10, 2.9), sharex=True, sharey=True, layout="constrained"
    )
    for axis, (name, (sample, color)) in zip(axes, panels.items(), strict=True):
        draws = sample()
        print(f"{name}: sd of v {draws['v'].std():.2f}")
        axis.plot(
            draws["x"][..., 0], draws["v"].reshape(-1), ".", color=color, alpha=0.4, markersize=3,
            markeredgewidth=0,
        )  # fmt: skip
        axis.set(title=name, xlim=(-25, 25), ylim=(-10, 10), xlabel="x", xticks=[-20, 0, 20])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("v, log variance of x")
    figure.savefig(PICTURE, dpi=110)
    # 64 colours are sufficient for dots and need a third of the bytes.
    Image.open(PICTURE).convert("RGB").quantize(64).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
