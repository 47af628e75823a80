# SPDX-License-Identifier: Apache-2.0
"""
From a rough guide to the posterior with ``refine``
===================================================

A substance decays and is measured rarely, so the data hardly separate its decay rate from its final
amount. The posterior is long and narrow. A mean field is trained for a few hundred steps only, and
chains then move its draws to the posterior.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import compare, diagnose, fit, refine

time = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 6.0])
amount = torch.tensor([10.3, 7.0, 5.9, 3.9, 4.1, 2.3])


def model(time, amount):
    start = pyro.sample("start", dist.LogNormal(2.0, 0.5))
    rate = pyro.sample("rate", dist.LogNormal(-1.0, 1.0))
    floor = pyro.sample("floor", dist.LogNormal(0.5, 0.7))
    with pyro.plate("times", len(time)):
        left = floor + start * torch.exp(-rate * time)
        pyro.sample("amount", dist.Normal(left, 0.5), obs=amount)


# %%
# A rough guide
# -------------

rough = fit(model, AutoNormal(model), time, amount, num_steps=300, lr=0.03, seed=0)
print(rough.diagnose())

# %%
# Many short chains
# -----------------
#
# Each draw of the guide starts a chain, and all chains run in parallel. They stop when means and
# standard deviations no longer drift and each chain has forgotten its initial value.

refined = refine(model, rough.guide, time, amount, seed=0)
print(refined)
print(diagnose(model, refined, time, amount))

# %%
# Comparison with NUTS
# --------------------
#
# ``compare`` reports distances relative to the *sampling floor*, the distance between two sets of
# exact draws of this size. On such a ridge a short NUTS chain has few effective draws, as
# ``compare`` says.

pyro.set_rng_seed(0)
nuts = NUTS(model, jit_compile=True, ignore_jit_warnings=True, max_tree_depth=5)
mcmc = MCMC(nuts, num_samples=250, warmup_steps=150, disable_progbar=True)
mcmc.run(time, amount)
print(compare(model, refined, mcmc, time, amount))

# %%
# Figure
# ------

panels = {
    "AutoNormal, 300 steps": rough.sample(1000),
    "refined": refined.get_samples(1000),
    "NUTS": mcmc.get_samples(),
}
figure, axes = plt.subplots(1, 3, figsize=(10, 3.6), sharex=True, sharey=True, layout="constrained")
for axis, (name, draws) in zip(axes, panels.items(), strict=True):
    axis.scatter(draws["floor"].detach(), draws["rate"].detach(), s=5, alpha=0.3)
    axis.set(title=name, xlabel="final amount")
axes[0].set_ylabel("rate")
plt.show()
