# SPDX-License-Identifier: Apache-2.0
"""
Refine: from a rough guide to the posterior
===========================================

A substance decays; it was measured rarely, so that how fast it does and what is left in the end can
hardly be told apart. The posterior is long and narrow. No guide is trained well here:
a few hundred steps of a mean field, then chains put it right.
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
# Hundreds of short chains
# ------------------------
#
# Each draw of the guide starts a chain, and all of them move at once. They stop by themselves, when
# means and standard deviations drift no longer and each chain has forgotten where it began.

refined = refine(model, rough.guide, time, amount, seed=0)
print(refined)
print(diagnose(model, refined, time, amount))

# %%
# Beside NUTS
# -----------
#
# The *sampling floor* is the distance that two sets of exact draws of this size would have. One
# short chain of NUTS is worth few draws on such a ridge, and ``compare`` says so.

pyro.set_rng_seed(0)
nuts = NUTS(model, jit_compile=True, ignore_jit_warnings=True, max_tree_depth=5)
mcmc = MCMC(nuts, num_samples=250, warmup_steps=150, disable_progbar=True)
mcmc.run(time, amount)
print(compare(model, refined, mcmc, time, amount))

# %%
# The picture
# -----------

panels = {
    "AutoNormal, 300 steps": rough.sample(1000),
    "refined": refined.get_samples(1000),
    "NUTS": mcmc.get_samples(),
}
figure, axes = plt.subplots(1, 3, figsize=(10, 3.6), sharex=True, sharey=True, layout="constrained")
for axis, (name, draws) in zip(axes, panels.items(), strict=True):
    axis.scatter(draws["floor"].detach(), draws["rate"].detach(), s=5, alpha=0.3)
    axis.set(title=name, xlabel="what is left in the end")
axes[0].set_ylabel("rate")
plt.show()
