# SPDX-License-Identifier: Apache-2.0
"""
Well-separated modes
====================

Distances to three beacons locate a receiver in the plane. The beacons stand almost on a line, so
the receiver may be on either side of it. The posterior has two separated modes with different
weights. A guide that starts in one mode never finds the other, and NUTS does not move between them
either.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_implicit import fit

beacons = torch.tensor([[-4.0, 0.0], [0.0, 0.1], [4.0, 0.0]])
distance = torch.tensor([3.9, 2.6, 4.6])


def model(distance):
    place = pyro.sample("place", dist.Normal(torch.zeros(2), 5.0).to_event(1))
    far = (place - beacons).norm(dim=-1)
    with pyro.plate("beacons", 3):
        pyro.sample("distance", dist.Normal(far, 0.3), obs=distance)


# %%
# Mode search and a mixture
# -------------------------
#
# ``fit`` climbs from many prior draws. Each maximum becomes a component of an ``AutoMixture``, from
# which annealed chains start; annealing determines the weights of the modes.

result = fit(model, "auto", distance, seed=0)
print(result)
print(result.diagnose())

# %%
# Baselines: one Gaussian, and NUTS
# ---------------------------------
#
# The Gaussian converges to one mode. ``diagnose`` searches for modes and reports the missing one.

gaussian = fit(
    model, AutoMultivariateNormal(model), distance, num_steps=600, lr=0.03, num_particles=16, seed=0
)
print(gaussian.diagnose())

# %%
mcmc = MCMC(
    NUTS(model, jit_compile=True, ignore_jit_warnings=True),
    num_samples=300,
    warmup_steps=100,
    disable_progbar=True,
)
mcmc.run(distance)

# %%
# Comparison with the exact posterior
# -----------------------------------
#
# In two dimensions the posterior can be computed on a grid, which gives the contours and the mass
# above the line.

x, y = torch.meshgrid(torch.linspace(-3, 3, 201), torch.linspace(-5, 5, 301), indexing="ij")
grid = torch.stack([x, y], -1)
far = (grid.unsqueeze(-2) - beacons).norm(dim=-1)
log_density = dist.Normal(far, 0.3).log_prob(distance).sum(-1)
log_density += dist.Normal(0.0, 5.0).log_prob(grid).sum(-1)
density = (log_density - log_density.logsumexp((0, 1))).exp()
levels = density.max() * torch.tensor([0.05, 0.25, 0.5, 0.75])
print(f"above the line, exact:  {density[y > 0].sum():.3f}")

panels = {
    "fit": result.sample(1000),
    "AutoMultivariateNormal": gaussian.sample(1000),
    "NUTS, one chain": mcmc.get_samples(),
}
figure, axes = plt.subplots(1, 3, figsize=(10, 4.2), sharex=True, sharey=True, layout="constrained")
for axis, (name, draws) in zip(axes, panels.items(), strict=True):
    place = draws["place"].detach()
    axis.contour(x, y, density, levels=levels, colors="0.6", linewidths=0.8)
    axis.scatter(*place.T, s=5, alpha=0.3)
    axis.set(title=f"{name}\nabove the line: {(place[:, 1] > 0).float().mean():.2f}")
    axis.set(xlabel="east", xlim=(-2.5, 2.5), ylim=(-4.5, 4.5))
axes[0].set_ylabel("north")
plt.show()
