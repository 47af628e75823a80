# SPDX-License-Identifier: Apache-2.0
"""
A simulator without a likelihood: two moons
===========================================

The posterior of this simulator consists of two crescents. The model has no density of the data:
``fit_simulator`` learns the posterior from simulations alone, for all data at once.
"""

import math

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch

from pyro_implicit import fit_simulator


def simulate(theta):
    angle = math.pi * (torch.rand(()) - 0.5)
    radius = 0.1 + 0.01 * torch.randn(())
    moon = torch.stack([radius * angle.cos() + 0.25, radius * angle.sin()])
    return moon + torch.stack([-theta.sum().abs(), theta[1] - theta[0]]) / math.sqrt(2)


def model(y):
    theta = pyro.sample("theta", dist.Uniform(-torch.ones(2), torch.ones(2)).to_event(1))
    pyro.sample("y", dist.Delta(simulate(theta), event_dim=1), obs=y)


# %%
# Posteriors given three data sets, from one fit
# ----------------------------------------------

data = torch.tensor([[0.0, 0.0], [-0.4, 0.3], [-0.8, -0.2]])
result = fit_simulator(model, data[0], num_simulations=4000, seed=0)
fig, panels = plt.subplots(1, 3, figsize=(9, 3.2), sharex=True, sharey=True)
for axes, y in zip(panels, data, strict=True):
    draws = result.sample(1000, y)["theta"]
    axes.scatter(*draws.T, s=3, alpha=0.4)
    axes.set(title=f"y = ({y[0]:.1f}, {y[1]:.1f})", xlabel="theta[0]", xlim=(-1, 1), ylim=(-1, 1))
panels[0].set_ylabel("theta[1]")
fig.tight_layout()

# %%
# The verdict
# -----------
# Checks on new simulations: ranks of the true values, and a classifier that tells them from draws.

print(result.diagnose(seed=0))
