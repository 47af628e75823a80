# SPDX-License-Identifier: Apache-2.0
"""NumPyro's part of ``refine_ess.py``, run in an environment with NumPyro.

::

    python refine_ess_numpyro.py MODEL SEED WARMUP DRAWS FOLDER

Reads ``data.npz`` in the folder and writes ``draws.npz`` and ``record.json``.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

WIDTHS = (2, 10, 10, 4)


def schools(effect: Any, error: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    eta = numpyro.sample("eta", dist.Normal(jnp.zeros(8), 1.0).to_event(1))
    numpyro.sample("y", dist.Normal(mu + tau * eta, error).to_event(1), obs=effect)


def counts(x: Any, y: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    effect = numpyro.sample("effect", dist.Normal(jnp.zeros(len(x)), 1.0).to_event(1))
    rate = jnp.exp(mean + scale * effect[:, None] + slope * x)
    numpyro.sample("y", dist.Poisson(rate).to_event(2), obs=y)


def toy(x: Any, y: Any) -> None:
    """The network of ``toy_classification.py``."""
    size = sum((rows + 1) * columns for rows, columns in itertools.pairwise(WIDTHS))
    theta = numpyro.sample("theta", dist.Normal(jnp.zeros(size), 1.0).to_event(1))
    hidden, used = x, 0
    for layer, (rows, columns) in enumerate(itertools.pairwise(WIDTHS)):
        weight = theta[used : used + rows * columns].reshape(columns, rows)
        bias = theta[used + rows * columns : used + (rows + 1) * columns]
        hidden = (hidden if layer == 0 else jax.nn.relu(hidden)) @ weight.T + bias
        used += (rows + 1) * columns
    numpyro.sample("y", dist.Categorical(logits=hidden).to_event(1), obs=y)


MODELS = {"eight schools": schools, "counts": counts, "toy": toy}


def main(name: str, seed: str, warmup: str, draws: str, folder: str) -> None:
    start = time.process_time()
    data = list(np.load(Path(folder) / "data.npz").values())
    mcmc = MCMC(
        NUTS(MODELS[name]), num_warmup=int(warmup), num_samples=int(draws), progress_bar=False
    )
    seconds = []
    for part in (0, 1):
        clock = time.process_time()
        mcmc.run(jax.random.PRNGKey(10 * int(seed) + part), *data)
        samples = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
        seconds.append(time.process_time() - clock)
    record = {"cpu_seconds": seconds[0], "run_seconds": seconds[1], "all_seconds": clock - start}
    (Path(folder) / "record.json").write_text(json.dumps(record))
    np.savez(Path(folder) / "draws.npz", **samples)


if __name__ == "__main__":
    main(*sys.argv[1:])
