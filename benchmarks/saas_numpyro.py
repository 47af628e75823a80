# SPDX-License-Identifier: Apache-2.0
"""The Gaussian process of :mod:`benchmarks.saas` by NumPyro's NUTS, in an environment of its own.

::

    python -m benchmarks.saas_numpyro DATA.npz DRAWS.npz user     # BoTorch's settings
    python -m benchmarks.saas_numpyro DATA.npz DRAWS.npz long     # four chains, the reference
"""

import json
import os
import sys
import time

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

jax.config.update("jax_enable_x64", True)
SETTINGS = {  # chains, warm-up, draws, depth of a tree
    "user": (1, 512, 256, 6),
    "long": (4, 700, 1000, 8),
}


def model(x, y):
    outputscale = numpyro.sample("outputscale", dist.Gamma(2.0, 0.15))
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.Gamma(0.9, 10.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
    inverse = numpyro.sample("inverse", dist.HalfCauchy(jnp.ones(x.shape[-1])).to_event(1))
    scaled = x * jnp.sqrt(tau * inverse)
    squares = jnp.square(scaled).sum(-1)
    squares = squares[:, None] + squares - 2 * scaled @ scaled.T
    r = jnp.sqrt(5 * jnp.clip(squares, 1e-15))
    kernel = outputscale * (1 + r + r**2 / 3) * jnp.exp(-r) + noise * jnp.eye(len(y))
    numpyro.sample("y", dist.MultivariateNormal(jnp.full(len(y), mean), kernel), obs=y)


def main(data: str, out: str, settings: str) -> None:
    chains, warmup, number, depth = SETTINGS[settings]
    with np.load(data) as file:
        x, y = jnp.asarray(file["x"]), jnp.asarray(file["y"])
    began = time.process_time()
    kernel = NUTS(model, max_tree_depth=depth)
    mcmc = MCMC(
        kernel, num_warmup=warmup, num_samples=number, num_chains=chains,
        chain_method="sequential", progress_bar=False,
    )  # fmt: skip
    mcmc.run(jax.random.PRNGKey(0), x, y, extra_fields=("diverging", "num_steps"))
    grouped = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    cpu = time.process_time() - began
    extra = mcmc.get_extra_fields()
    found = {
        "cpu_seconds": cpu,
        "divergent": int(extra["diverging"].sum()),
        "leapfrogs": int(extra["num_steps"].sum()),
        "min_ess": float(
            min(
                effective_sample_size(np.log(v) if k != "mean" else v).min()
                for k, v in grouped.items()
            )
        ),
    }
    if chains > 1:
        found["max_rhat"] = float(
            max(
                split_gelman_rubin(np.log(v) if k != "mean" else v).max()
                for k, v in grouped.items()
            )
        )
    np.savez(out, **{k: v.reshape(-1, *v.shape[2:]) for k, v in grouped.items()})
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
