# SPDX-License-Identifier: Apache-2.0
"""
Mixture models and label switching
==================================

The data are measurements of two groups with unknown group membership. The group of each row is a
discrete latent variable, which Pyro's enumeration marginalises. The labels of the components can be
swapped, so the posterior has two modes that are mirror images. Averages over both modes are
meaningful only after sorting the components.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import config_enumerate
from pyro.infer.autoguide import AutoNormal, init_to_sample

from pyro_implicit import fit

pyro.set_rng_seed(0)
is_second = torch.rand(60) < 0.35
y = torch.where(is_second, 2.0, -2.0) + 0.8 * torch.randn(60)


@config_enumerate
def model(y):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    with pyro.plate("rows", len(y)):
        component = pyro.sample("component", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(locs[component], scale), obs=y)


# %%
# Automatic inference: both modes
# -------------------------------
#
# Neither the discrete site nor the two modes require a setting.

result = fit(model, "auto", y, seed=0)
print(result)
print(result.diagnose())

# %%
# Baseline: one mode
# ------------------
#
# The Gaussian guide starts at a prior draw. From its default initial value, where both components
# are equal, it had not reached a mode after 600 steps. One labelling is sufficient, so a guide with
# one mode is harmless in this case; ``diagnose`` cannot know this and rejects the guide.

mean_field = AutoNormal(poutine.block(model, hide=["component"]), init_loc_fn=init_to_sample)
normal = fit(model, mean_field, y, num_steps=1200, lr=0.03, num_particles=8, seed=0)
print(normal.diagnose())

# %%
# Figure
# ------
#
# Left: the draws, with one mode on each side of the diagonal. Right: the sorted draws, for which
# means and intervals are meaningful.

figure, axes = plt.subplots(1, 2, figsize=(8, 4), sharex=True, sharey=True, layout="constrained")
for name, fitted in {"fit": result, "AutoNormal": normal}.items():
    locs = fitted.sample(1000)["locs"].detach().reshape(-1, 2)
    axes[0].scatter(*locs.T, s=5, alpha=0.4, label=name)
    axes[1].scatter(*locs.sort(-1).values.T, s=5, alpha=0.4, label=name)
for axis, title in zip(axes, ["as drawn", "sorted"], strict=True):
    axis.axline((0, 0), slope=1, color="0.7", linewidth=0.8)
    axis.plot(-2, 2, "k+", markersize=12, label="truth")
    axis.set(title=title, xlabel="first location")
axes[0].set_ylabel("second location")
axes[0].legend()
plt.show()
