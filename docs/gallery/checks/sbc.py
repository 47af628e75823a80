# SPDX-License-Identifier: Apache-2.0
"""
Model checking with simulation-based calibration
================================================

Is a way of fitting right, on average over all data that the model could make? Draw latents from the
prior and data from the model, fit, and rank the true latents among the draws; again and again. If
all is right, every rank is as likely as every other. This finds errors in model, data and fit that
no look at one posterior would.
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
# Two ways of fitting
# -------------------
#
# The covariate is not centred, so that intercept and slope are strongly correlated. A mean field
# does not see that: each histogram of its ranks is a U, the mark of intervals that are too narrow.


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
# The picture
# -----------
#
# Ranks of the true slopes. The band holds 99 % of a bar's heights if all is right.

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
low, high = (torch.distributions.Binomial(50, torch.tensor(0.1)).sample((10_000,))).quantile(
    torch.tensor([0.005, 0.995])
)
for axis, (name, report) in zip(axes, reports.items(), strict=True):
    counts = report.counts["slope"]
    axis.bar(range(1, len(counts) + 1), counts.numpy())
    axis.axhspan(low, high, color="0.8", zorder=0)
    axis.set(title=name, xlabel="tenth in which the true slope ranks")
axes[0].set_ylabel("simulations")
plt.show()
