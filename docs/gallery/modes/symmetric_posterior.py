# SPDX-License-Identifier: Apache-2.0
"""
A symmetric posterior
=====================

Two factors are known by their product alone. Whatever sign one has, the other has too, and what one
is larger the other is smaller: the posterior is two crescents, each the mirror image of the other.
Crescents are what Gaussians cannot do, not even a mixture of one for each mode.
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
# Two bent guides
# ---------------
#
# Each mode gets a guide that can bend, an ``AutoImplicit`` with an exact density; what is left is
# righted by importance weights.

result = fit(model, "auto", y, seed=0)
print(result)
print(result.diagnose())

# %%
# The Gaussian
# ------------

gaussian = fit(
    model, AutoMultivariateNormal(model), y, num_steps=600, lr=0.03, num_particles=16, seed=0
)
print(gaussian.diagnose())

# %%
# The picture
# -----------
#
# In two dimensions the posterior can be drawn as contours, of the regions that hold 50, 90 and 99 %
# of it.

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
