# SPDX-License-Identifier: Apache-2.0
"""
Time series: GARCH
==================

In this model, returns have autocorrelated variance: after a large return, large returns are likely.
The variance of each day depends on that of the previous day, so the model needs a loop over days.
The posterior has four latent variables, two of them bounded, and a curved ridge.
"""

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_implicit import fit
from pyro_implicit.diagnostics import plot_posteriors

rng = np.random.default_rng(43)
variance, returns = 1.0, []
for _ in range(80):
    returns.append(0.1 + np.sqrt(variance) * rng.normal())
    variance = 0.2 + 0.3 * (returns[-1] - 0.1) ** 2 + 0.5 * variance
y = torch.tensor(returns, dtype=torch.float32)


def variances(y, mean, base, shock, memory):
    variance = [base / (1 - 0.9 * memory)]
    for last in y[:-1]:
        variance.append(base + shock * (last - mean) ** 2 + memory * variance[-1])
    return torch.stack(variance, -1)


def model(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    base = pyro.sample("base", dist.HalfNormal(1.0))
    shock = pyro.sample("shock", dist.Uniform(0.0, 1.0))
    memory = pyro.sample("memory", dist.Uniform(0.0, 1.0))
    scale = variances(y, mean, base, shock, memory).sqrt()
    pyro.sample("y", dist.Normal(mean, scale).to_event(1), obs=y)


# %%
# The loop computes 80 numbers, but a single ``pyro.sample`` statement uses them.
# :doc:`/howto/time_series` explains the cost of loops and how to avoid it.

result = fit(model, "auto", y, seed=0)
print(result)
print(result.diagnose())

# %%
# Baseline
# --------
#
# Pyro's ELBO cannot vectorise particles in this model, so they run as separate loops.

normal = fit(model, AutoMultivariateNormal(model), y, num_steps=300, lr=0.03, num_particles=4)
print(normal.diagnose())

# %%
# Figures
# -------

draws = {"fit": result.sample(4000), "AutoMultivariateNormal": normal.sample(4000)}
plot_posteriors(draws, reference="fit")

# %%
# The volatility of each day, with its uncertainty.

picked = {name: value.detach().reshape(-1) for name, value in result.sample(500).items()}
volatility = variances(y, *(picked[name] for name in ("mean", "base", "shock", "memory"))).sqrt()
low, middle, high = volatility.quantile(torch.tensor([0.05, 0.5, 0.95]), dim=0)
figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
axis.bar(range(len(y)), y.abs().numpy(), color="0.75", label="absolute return")
axis.plot(middle, label="volatility")
axis.fill_between(range(len(y)), low, high, alpha=0.4, label="90 %")
axis.set(xlabel="day")
axis.legend()
plt.show()
