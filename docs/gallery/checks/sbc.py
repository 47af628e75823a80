# SPDX-License-Identifier: Apache-2.0
"""
Simulation-based calibration
============================

Is a fitting procedure correct on average over all data that the model can generate? To test this,
draw latent variables from the prior and data from the model, fit, rank the true values among the
draws, and repeat. If everything is correct, the ranks are uniform. This detects errors in model,
data and fit that no check of a single posterior detects.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import fit, simulation_based_calibration

x = torch.linspace(1.0, 3.0, 10)


def model(x, y=None):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(intercept + slope * x, 1.0), obs=y)


# %%
# Two fitting procedures
# ----------------------
#
# The covariate is not centred, so intercept and slope are strongly correlated. A mean field ignores
# the correlation: the histogram of its ranks is U-shaped, which indicates intervals that are too
# narrow.


def by_fit(model):
    return fit(model, "auto").sample(99)


def by_mean_field(model):
    return fit(model, AutoNormal(model), num_steps=100, lr=0.1, num_particles=4).guide


reports = {}
for name, way in {"fit": by_fit, "AutoNormal": by_mean_field}.items():
    pyro.set_rng_seed(0)
    reports[name] = simulation_based_calibration(model, way, x, torch.zeros(10), num_simulations=50)
    print(f"{name}\n{reports[name]}\n")

# %%
# Figure
# ------
#
# Ranks of the true slopes. The band contains 99 % of the heights of a bar if the fit is correct.

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
low, high = (torch.distributions.Binomial(50, torch.tensor(0.1)).sample((10_000,))).quantile(
    torch.tensor([0.005, 0.995])
)
for axis, (name, report) in zip(axes, reports.items(), strict=True):
    counts = report.counts["slope"]
    axis.bar(range(1, len(counts) + 1), counts.numpy())
    axis.axhspan(low, high, color="0.8", zorder=0)
    axis.set(title=name, xlabel="rank of the true slope, in tenths")
axes[0].set_ylabel("simulations")
plt.show()
