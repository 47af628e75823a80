# SPDX-License-Identifier: Apache-2.0
"""NumPyro, nutpie and blackjax for ``field.py``, run in an environment that has them::

    python field_numpyro.py PROBLEM METHOD SEED FOLDER

reads ``data.npz`` in the folder and writes ``draws.npz`` and ``record.json``. The method
``reference`` is a long NUTS run.
"""

from __future__ import annotations

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
import nutpie
from blackjax.diagnostics import psis_weights
from blackjax.vi.pathfinder import approximate, sample
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, init_to_median, init_to_uniform
from numpyro.infer.autoguide import AutoBNAFNormal, AutoMultivariateNormal
from numpyro.infer.util import initialize_model
from nutpie.compiled_pyfunc import from_pyfunc

NUM_DRAWS, STEPS, RATE = 10_000, 3000, 1e-2
PATHS = 4  # paths of Pathfinder, Stan's default
COMPILING = ("backend_compile_duration", "jaxpr_to_mlir_module_duration")


def funnel() -> None:
    v = numpyro.sample("v", dist.Normal(0.0, 1.5))
    with numpyro.plate("coordinates", 9):
        numpyro.sample("x", dist.Normal(0.0, jnp.exp(v / 2)))


def eight_schools(y: Any, sigma: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(y)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def regression(x: Any, y: Any) -> None:
    weight = numpyro.sample("weight", dist.Normal(jnp.zeros(x.shape[-1]), 1.0).to_event(1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(x @ weight, 0.5), obs=y)


def network(x: Any, y: Any) -> None:
    one = jnp.ones(50)
    slope = numpyro.sample("slope", dist.Normal(0.0, one).to_event(1))
    bias = numpyro.sample("bias", dist.Normal(0.0, one).to_event(1))
    weight = numpyro.sample("weight", dist.Normal(0.0, one).to_event(1))
    offset = numpyro.sample("offset", dist.Normal(0.0, 1.0))
    mean = jnp.tanh(x[:, None] * slope + bias) @ weight + offset
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, 0.2), obs=y)


def garch_loop(y: Any) -> None:
    """The model by ``scan``, as usual in NumPyro."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    omega = numpyro.sample("omega", dist.HalfNormal(1.0))
    alpha = numpyro.sample("alpha", dist.Uniform(0.0, 1.0))
    beta = numpyro.sample("beta", dist.Uniform(0.0, 1.0))

    def step(variance: Any, before: Any) -> Any:
        variance = omega + alpha * (before - mu) ** 2 + beta * variance
        return variance, variance

    first = omega / (1 - 0.9 * beta)
    _, others = jax.lax.scan(step, first, y[:-1])
    variance = jnp.concatenate([first[None], others])
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mu, jnp.sqrt(variance)), obs=y)


def gp(factor: Any, y: Any) -> None:
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros_like(y), scale_tril=factor))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def nuts(model: Any, data: list, key: Any, warmup: int = 1000, draws: int = 1000) -> dict[str, Any]:
    kernel = NUTS(model, init_strategy=init_to_median)
    mcmc = MCMC(
        kernel, num_warmup=warmup, num_samples=draws, num_chains=4, chain_method="vectorized",
        progress_bar=False,
    )  # fmt: skip
    mcmc.run(key, *data)
    return mcmc.get_samples()


def svi(guide_type: Any) -> Any:
    def run(model: Any, data: list, key: Any) -> dict[str, Any]:
        guide = guide_type(model)
        rate = lambda i: RATE * 0.5 * (1 + jnp.cos(jnp.pi * i / STEPS))  # noqa: E731
        optimiser = numpyro.optim.ClippedAdam(rate, clip_norm=10.0)
        fitted = SVI(model, guide, optimiser, Trace_ELBO())
        result = fitted.run(key, STEPS, *data, progress_bar=False)
        return guide.sample_posterior(key, result.params, sample_shape=(NUM_DRAWS,))

    return run


def unconstrained(model: Any, data: list, keys: Any) -> tuple[Any, Any, Any]:
    """Return a point for each key, the log density of a point, and the sites of stacked points."""
    info = initialize_model(keys, model, model_args=data, init_strategy=init_to_uniform)
    points = jax.vmap(lambda one: ravel_pytree(one)[0])(info.param_info.z)
    unravel = ravel_pytree(jax.tree.map(lambda value: value[0], info.param_info.z))[1]
    constrained = jax.jit(jax.vmap(lambda x: info.postprocess_fn(unravel(x))))
    return points, lambda x: -info.potential_fn(unravel(x)), constrained


def nutpie_nuts(model: Any, data: list, key: Any) -> dict[str, Any]:
    points, log_density, constrained = unconstrained(model, data, jax.random.split(key, 1))
    gradient = jax.jit(jax.value_and_grad(log_density))

    def value_and_gradient(x: Any) -> tuple[float, Any]:
        value, slope = gradient(x)
        return float(value), np.asarray(slope)

    size = points.shape[-1]
    compiled = from_pyfunc(
        size, lambda: value_and_gradient, lambda *seeds: lambda x: {"x": x},
        [np.dtype("float64")], [(size,)], ["x"],
    )  # fmt: skip
    trace = nutpie.sample(
        compiled, chains=4, cores=1, seed=int(key[-1]), low_rank_modified_mass_matrix=True,
        progress_bar=False,
    )  # fmt: skip
    return constrained(trace.posterior["x"].values.reshape(-1, size))


def pathfinder(model: Any, data: list, key: Any) -> dict[str, Any]:
    """Draw from several paths; resample by Pareto-smoothed importance weights."""
    keys = jax.random.split(key, PATHS)
    points, log_density, constrained = unconstrained(model, data, keys)

    def one(key: Any, point: Any) -> tuple[Any, Any]:
        state, _ = approximate(key, log_density, point)
        draws, log_q = sample(key, state, NUM_DRAWS)
        return draws, jax.vmap(log_density)(draws) - log_q

    draws, log_weights = jax.jit(jax.vmap(one))(keys, points)
    log_weights, _ = psis_weights(jnp.where(jnp.isnan(log_weights), -jnp.inf, log_weights).ravel())
    rows = jax.random.choice(key, len(log_weights), (NUM_DRAWS,), p=jnp.exp(log_weights))
    return constrained(draws.reshape(len(log_weights), -1)[rows])


METHODS = {
    "NumPyro NUTS": nuts,
    "nutpie, low rank": nutpie_nuts,
    "blackjax Pathfinder": pathfinder,
    "NumPyro AutoMultivariateNormal": svi(AutoMultivariateNormal),
    "NumPyro AutoBNAFNormal": svi(AutoBNAFNormal),
    "reference": lambda *args: nuts(*args, draws=2500),
}


def main(problem: str, method: str, seed: str, folder: str) -> None:
    numpyro.enable_x64()
    compiling: list[float] = []

    def listen(event: str, seconds: float, **kwargs: Any) -> None:
        if event.endswith(COMPILING):
            compiling.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    data = [jnp.asarray(value) for value in np.load(Path(folder) / "data.npz").values()]
    wall, cpu = time.perf_counter(), time.process_time()
    draws = METHODS[method](globals()[problem], data, jax.random.PRNGKey(int(seed)))
    draws = {name: np.asarray(value) for name, value in draws.items()}
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    # The share of a core that this process gets on a busy machine.
    compiled = sum(compiling) * min(1.0, cpu / wall)
    record = {"cpu_seconds": cpu, "seconds": wall, "compile_seconds": compiled}
    np.savez(Path(folder) / "draws.npz", **draws)
    (Path(folder) / "record.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
