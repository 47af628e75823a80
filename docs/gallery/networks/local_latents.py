# SPDX-License-Identifier: Apache-2.0
"""
Local latent variables with minibatches
=======================================

The data are a thousand rows of counts, each with its own rate. A guide with parameters for every
row would have thousands of parameters and could not be applied to a new row. ``amortize="auto"``
trains an encoder instead, which maps a row to the posterior of its latent variable.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoNormal
from torch.utils.data import DataLoader

from pyro_implicit import diagnose, fit

pyro.set_rng_seed(0)
log_rates = 1.0 + 0.7 * torch.randn(1000)
counts = torch.poisson(log_rates.exp().unsqueeze(-1).expand(-1, 3))


def model(counts, num_rows=1000):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with pyro.plate("rows", num_rows, subsample_size=len(counts)):
        log_rate = pyro.sample("log_rate", dist.Normal(mean, spread))
        pyro.sample("counts", dist.Poisson(log_rate.exp().unsqueeze(-1)).to_event(1), obs=counts)


# %%
# An encoder for the rows
# -----------------------

loader = DataLoader(counts, batch_size=100, shuffle=True)
result = fit(model, batches=loader, epochs=60, amortize="auto", num_particles=8, seed=0)
print(result)

# %%
# Draws for new rows:

new = torch.tensor([[0.0, 0.0, 0.0], [2.0, 3.0, 4.0], [20.0, 25.0, 21.0]])
print(result.sample(1000, new)["log_rate"].mean(0))

# %%
# ``diagnose`` needs all rows at once. A single encoder does not give the exact posterior of each
# row; the largest error is in the spread, which all rows share.

print(diagnose(model, result.guide, counts))

# %%
# Baseline
# --------
#
# A mean field with a location and a scale for each of the 1,002 latent variables, trained on all
# rows.

normal = fit(model, AutoNormal(model), counts, num_steps=1000, lr=0.03, num_particles=4, seed=0)
print(normal.diagnose())

# %%
# Figure
# ------
#
# Left: the two latent variables that all rows share. Right: the rows. Given mean and spread, the
# posterior of a row depends only on its total and can be computed on a grid.

amortised = {name: value.detach() for name, value in result.sample(1000, counts).items()}
separate = {name: value.detach() for name, value in normal.sample(1000).items()}
grid, totals = torch.linspace(-4, 5, 500), torch.arange(0, 61.0)
log_density = dist.Normal(1.0, 0.7).log_prob(grid) + totals[:, None] * grid - 3 * grid.exp()
weights = log_density.softmax(-1)
mean = weights @ grid
sd = (weights @ grid**2 - mean**2).sqrt()

figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
axes[1].plot(totals, sd, "k-", linewidth=1, label="exact")
for name, draws in {"amortised": amortised, "AutoNormal": separate}.items():
    axes[0].scatter(draws["mean"], draws["spread"], s=4, alpha=0.3, label=name)
    axes[1].scatter(counts.sum(-1), draws["log_rate"].std(0), s=5, alpha=0.4, label=name)
axes[0].plot(1.0, 0.7, "k+", markersize=12, label="truth")
axes[0].set(xlabel="mean of the log-rates", ylabel="their spread")
axes[1].set(xlabel="total count of a row", ylabel="sd of its log-rate", xlim=(-1, 61))
axes[0].legend()
axes[1].legend()
plt.show()
