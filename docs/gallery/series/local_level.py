# SPDX-License-Identifier: Apache-2.0
"""
Time series: a local level
==========================

A level follows a random walk and is measured with noise. Both sds are unknown latent variables, and
so are the steps of the walk: 42 latent variables in total.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import fit

pyro.set_rng_seed(4)
truth = (0.4 * torch.randn(40)).cumsum(0)
y = truth + 0.8 * torch.randn(40)


def model(y):
    sd_step = pyro.sample("sd_step", dist.HalfNormal(1.0))
    sd_noise = pyro.sample("sd_noise", dist.HalfNormal(1.0))
    with pyro.plate("steps", len(y)):
        step = pyro.sample("step", dist.Normal(0.0, 1.0))
    level = pyro.deterministic("level", sd_step * step.cumsum(-1))
    with pyro.plate("times", len(y)):
        pyro.sample("y", dist.Normal(level, sd_noise), obs=y)


# %%
# Write the walk as a cumulative sum of its steps, not as a loop over times: one site instead of
# forty, and fast gradients.

result = fit(model, "auto", y, seed=0)
print(result)
print(result.diagnose())

# %%
# Baseline
# --------

normal = fit(model, AutoNormal(model), y, num_steps=1500, lr=0.03, num_particles=8, seed=0)
print(normal.diagnose())

# %%
# Figure
# ------
#
# Neighbouring levels share their steps, and a mean field over the steps ignores how their errors
# accumulate. It selects an sd that is far too small, so its band cannot follow the data.


def levels(fitted):
    draws = fitted.sample(2000)
    steps = draws["step"].reshape(2000, -1)
    spread = draws["sd_step"].reshape(2000, 1)
    return (spread * steps.cumsum(-1)).detach(), spread.detach().flatten()


figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=[2, 1], layout="constrained")
axes[0].plot(y, "k.", markersize=4, label="measured")
axes[0].plot(truth, "k-", linewidth=1, label="truth")
for name, fitted in {"fit": result, "AutoNormal": normal}.items():
    level, spread = levels(fitted)
    low, high = level.quantile(torch.tensor([0.05, 0.95]), dim=0)
    axes[0].fill_between(range(40), low, high, alpha=0.35, label=f"{name}, 90 %")
    axes[1].hist(spread, bins=40, range=(0, 1.2), density=True, alpha=0.6, label=name)
axes[0].set(xlabel="time", ylabel="level")
axes[1].set(xlabel="sd of a step (truth: 0.4)", yticks=[])
axes[0].legend(fontsize=8)
plt.show()
