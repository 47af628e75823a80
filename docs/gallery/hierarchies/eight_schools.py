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
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.infer.reparam import LocScaleReparam

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
# Automatic inference
# -------------------
#
# ``fit`` searches for modes and keeps the best Gaussian along the way. Importance weights cannot
# correct this Gaussian, so chains move its draws. The table shows the stages.

result = fit(model, "auto", error, effect, seed=0)
print(result)

# %%
# ``diagnose`` checks the draws against the model alone, without a reference.

print(result.diagnose())

# %%
# Baselines
# ---------
#
# A Gaussian over all ten latent variables, trained by Pyro's own ELBO, and NUTS. NUTS samples a
# non-centred model, which requires knowledge of the problem; ``fit`` used the centred one.

gaussian = fit(
    model,
    AutoMultivariateNormal(model),
    error,
    effect,
    num_steps=2000,
    lr=0.03,
    num_particles=16,
    seed=0,
)
print(gaussian.diagnose())

# %%
pyro.set_rng_seed(0)
non_centred = poutine.reparam(model, config={"theta": LocScaleReparam(centered=0.0)})
mcmc = MCMC(
    NUTS(non_centred, jit_compile=True, ignore_jit_warnings=True),
    num_samples=300,
    warmup_steps=150,
    disable_progbar=True,
)
mcmc.run(error, effect)
nuts = mcmc.get_samples()
nuts["theta"] = nuts["mu"][:, None] + nuts["tau"][:, None] * nuts["theta_decentered"]

# %%
# Figure
# ------
#
# The effect of the first school against the logarithm of the spread. The Gaussian is an ellipse
# without a neck, so it excludes that all schools have nearly the same effect.

panels = {
    "NUTS, non-centred": nuts,
    "fit": result.sample(1000),
    "AutoMultivariateNormal": gaussian.sample(1000),
}
figure, axes = plt.subplots(1, 3, figsize=(10, 3.6), sharex=True, sharey=True, layout="constrained")
for axis, (name, draws) in zip(axes, panels.items(), strict=True):
    axis.scatter(nuts["theta"][:, 0], nuts["tau"].log(), s=6, color="0.8", label="NUTS")
    if draws is not nuts:
        axis.scatter(draws["theta"][:, 0].detach(), draws["tau"].detach().log(), s=6, alpha=0.4)
    share = (draws["tau"] < 1).float().mean()
    axis.set(title=f"{name}\nP(tau < 1) = {share:.2f}", xlabel="effect of the first school")
axes[0].set(ylabel="log tau", xlim=(-17, 35), ylim=(-5, 4))
plt.show()
