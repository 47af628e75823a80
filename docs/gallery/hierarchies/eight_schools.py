# SPDX-License-Identifier: Apache-2.0
"""
Eight schools: a funnel
=======================

Eight schools each measured the effect of coaching on a test score. The sd ``tau`` of the true
effects is unknown, too, which makes the posterior a funnel: for a small ``tau`` all effects must be
close together. A Gaussian guide cannot represent it.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_implicit import fit

effect = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
error = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def model(error, effect):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(error)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("effect", dist.Normal(theta, error), obs=effect)


# %%
# Automatic inference, and a Gaussian guide
# -----------------------------------------
#
# ``fit`` searches for modes and keeps the best Gaussian along the way. Importance weights cannot
# correct this Gaussian, so chains move its draws. The baseline is a Gaussian over all ten latent
# variables, trained by Pyro's own ELBO.

result = fit(model, "auto", error, effect, seed=0)
options = {"num_steps": 2000, "lr": 0.03, "num_particles": 16, "seed": 0}
gaussian = fit(model, AutoMultivariateNormal(model), error, effect, **options)

# %%
# The exact posterior
# -------------------
#
# Given ``mu`` and ``tau`` the effects are normal, so they can be integrated out. ``mu`` and ``tau``
# are drawn on a grid, and then the effect of the first school given both.

mu, log_tau = (torch.linspace(*ends, 400, dtype=torch.float64) for ends in ((-25, 30), (-9, 6)))
grid = {"mu": mu[:, None], "tau": log_tau.exp()}
log_density = dist.Normal(0.0, 5.0).log_prob(grid["mu"]) + log_tau
log_density = log_density + dist.HalfCauchy(5.0).log_prob(grid["tau"])
for y, sd in zip(effect, error, strict=True):
    log_density = log_density + dist.Normal(grid["mu"], grid["tau"].hypot(sd)).log_prob(y)
density = log_density.flatten().softmax(0)
share = density.view(400, 400)[:, log_tau < 0].sum()
print(f"P(tau < 1) = {share:.3f}")

places = density.multinomial(1000, replacement=True)
tau = log_tau.exp()[places % 400]
precision = tau**-2 + error[0] ** -2
mean = (mu[places // 400] / tau**2 + effect[0] / error[0] ** 2) / precision
exact = {"tau": tau, "theta": (mean + torch.randn(1000) / precision.sqrt()).unsqueeze(-1)}

# %%
# Figure
# ------
#
# The effect of the first school against the logarithm of the spread. The Gaussian is an ellipse
# without a neck, so it rules out that all schools have nearly the same effect.

panels = {
    "exact": exact,
    "fit": result.sample(1000),
    "AutoMultivariateNormal": gaussian.sample(1000),
}
figure, axes = plt.subplots(1, 3, figsize=(9, 3.6), sharex=True, sharey=True, layout="constrained")
for axis, (name, draws) in zip(axes, panels.items(), strict=True):
    axis.scatter(exact["theta"][:, 0], exact["tau"].log(), s=6, color="0.8")
    if draws is not exact:
        axis.scatter(draws["theta"][:, 0].detach(), draws["tau"].detach().log(), s=6, alpha=0.4)
    below = (draws["tau"] < 1).float().mean()
    axis.set(title=f"{name}\nP(tau < 1) = {below:.2f}", xlabel="effect of the first school")
axes[0].set(ylabel="log tau", xlim=(-17, 35), ylim=(-5, 4))
plt.show()

# %%
# Stages and verdicts
# -------------------
#
# The stages of ``fit``, and the verdicts of ``diagnose`` on both results, which need only the model
# and not the exact posterior:

print(result)

# %%

print(result.diagnose())

# %%

print(gaussian.diagnose())
