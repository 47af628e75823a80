# SPDX-License-Identifier: Apache-2.0
"""
Groups by minibatches
=====================

Each of 300 shops has its own rate and one count of sales. Two global variables describe the rates.
``amortize="conditional"`` integrates the rates out by quadrature around their modes, so that
minibatches of shops give the exact posterior of the global variables, even for a million shops
(:doc:`/howto/large_hierarchies`). This page compares the result with encoders, ``amortize="auto"``.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from torch.utils.data import DataLoader

from pyro_implicit import diagnose, fit

pyro.set_rng_seed(0)
NUM_SHOPS = 300
rates = dist.Gamma(2.0, 0.5).sample((NUM_SHOPS,))
sales = torch.poisson(rates)


def model(sales):
    shape = pyro.sample("shape", dist.LogNormal(0.0, 1.0))
    rate = pyro.sample("rate", dist.LogNormal(0.0, 1.0))
    with pyro.plate("shops", NUM_SHOPS, subsample_size=len(sales)):
        z = pyro.sample("z", dist.Gamma(shape, rate))
        pyro.sample("sales", dist.Poisson(z), obs=sales)


# %%
# Fit
# ---

result = fit(model, batches=sales.split(150), amortize="conditional", seed=0)
print(result)

# %%
# ``diagnose`` needs all shops at once, and judges all 302 latent variables. It never trusts a guide
# without a density, but would name any errors.

print(diagnose(model, result.guide, sales))

# %%
# Given the global variables, the sales of a shop have a negative binomial distribution, so the
# exact posterior can be computed on a grid.

values, numbers = sales.double().unique(return_counts=True)
grid = [torch.linspace(1.0, 4.5, 200).double(), torch.linspace(0.2, 1.2, 200).double()]
shape, rate = torch.meshgrid(*grid, indexing="ij")
rows = dist.NegativeBinomial(shape.unsqueeze(-1), 1 / (1 + rate.unsqueeze(-1))).log_prob(values)
prior = dist.LogNormal(0.0, 1.0).log_prob(shape) + dist.LogNormal(0.0, 1.0).log_prob(rate)
exact = ((rows * numbers).sum(-1) + prior).flatten().softmax(0).reshape(200, 200)

# %%
# Baseline
# --------
#
# An encoder draws the rates independently of the global variables. The global variables then appear
# as precise as if all rates were known.

loader = DataLoader(sales, batch_size=100, shuffle=True)
encoded = fit(model, batches=loader, epochs=40, amortize="auto", num_particles=8, seed=0)

# %%
# Rates of single shops
# ---------------------
#
# Draws for four new shops, which sold 0, 3, 10 and 30. (A shop without data has the prior of the
# rates given the global variables.)

new = torch.tensor([0.0, 3.0, 10.0, 30.0])
draws = result.sample(2000, new)
print(draws["z"].mean(0), draws["z"].std(0))

# %%
# Figure
# ------

figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
axes[0].contour(*grid, exact.T, 5, colors="k", linewidths=0.8)
some = {"conditional": result.sample(500), "encoder": encoded.sample(500, new)}
for name, one in some.items():
    shape, rate = one["shape"].detach(), one["rate"].detach()
    axes[0].plot(shape, rate, ".", markersize=3, label=name)
axes[0].set(xlabel="shape", ylabel="rate", title="global variables; exact contours")
axes[0].legend()
for column, number in enumerate(new.tolist()):
    axes[1].hist(draws["z"][:, column], 60, density=True, alpha=0.6, label=f"{number:.0f} sold")
axes[1].set(xlabel="rate of a shop", title="given its sales")
axes[1].legend()
plt.show()
