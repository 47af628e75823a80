# SPDX-License-Identifier: Apache-2.0
"""
Eight schools: a funnel
=======================

Eight schools each measured what coaching adds to a test score. How far the true effects differ is
unknown too, and that makes the posterior a funnel: the smaller the spread ``tau``, the closer
together the effects must lie. A Gaussian guide cannot follow it.
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
# Nothing to set
# --------------
#
# ``fit`` searches for modes and takes the best Gaussian it meets on the way. Importance weights
# cannot right that one, so chains move its draws. The table says what was done.

result = fit(model, "auto", error, effect, seed=0)
print(result)

# %%
# Can it be trusted? ``diagnose`` looks at the draws and the model alone; it needs no reference.

print(result.diagnose())

# %%
# The baselines
# -------------
#
# A Gaussian over all ten latents, trained by Pyro's own ELBO, and NUTS. NUTS gets the non-centred
# model, which somebody had to know to write; ``fit`` had the centred one.

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
# The picture
# -----------
#
# The effect of the first school against the logarithm of the spread. The Gaussian is an ellipse: it
# has no neck, and so it never says that the schools may well be all alike.

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
