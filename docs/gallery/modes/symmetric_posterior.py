# SPDX-License-Identifier: Apache-2.0
"""
A symmetric, curved posterior
=============================

The data determine only the product of two factors. Both factors have the same unknown sign, and if
one is larger, the other is smaller: the posterior consists of two crescents that are mirror images.
A mixture of Gaussians cannot represent crescents.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_implicit import fit

y = torch.tensor([2.1, 1.8, 2.2, 1.9, 2.0])


def model(y):
    a = pyro.sample("a", dist.Normal(0.0, 2.0))
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(a * b, 0.5), obs=y)


# %%
# Automatic inference
# -------------------
#
# The search finds the modes; annealed chains move draws of their Gaussians to the posterior,
# whatever the shape of a mode.

result = fit(model, "auto", y, seed=0)
print(result)
print(result.diagnose())

# %%
# Baseline
# --------

gaussian = fit(
    model, AutoMultivariateNormal(model), y, num_steps=600, lr=0.03, num_particles=16, seed=0
)
print(gaussian.diagnose())

# %%
# Figure
# ------
#
# In two dimensions the exact posterior is available on a grid. The contours contain 50, 90 and 99 %
# of its mass.

axis_values = torch.linspace(-6, 6, 301)
a, b = torch.meshgrid(axis_values, axis_values, indexing="ij")
log_density = dist.Normal((a * b).unsqueeze(-1), 0.5).log_prob(y).sum(-1) - (a**2 + b**2) / 8
density = (log_density - log_density.logsumexp((0, 1))).exp()
ranked = density.flatten().sort(descending=True).values
levels = [ranked[(ranked.cumsum(0) < mass).sum()].item() for mass in (0.99, 0.9, 0.5)]

figure, axes = plt.subplots(1, 2, figsize=(8, 4.2), sharex=True, sharey=True, layout="constrained")
for axis, (name, fitted) in zip(
    axes, {"fit": result, "AutoMultivariateNormal": gaussian}.items(), strict=True
):
    draws = fitted.sample(2000)
    axis.scatter(draws["a"].detach(), draws["b"].detach(), s=3, alpha=0.3)
    axis.contour(a, b, density, levels=levels, colors="k", linewidths=0.7)
    axis.set(title=name, xlabel="a", xlim=(-5, 5), ylim=(-5, 5))
axes[0].set_ylabel("b")
plt.show()
