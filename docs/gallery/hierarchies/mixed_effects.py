# SPDX-License-Identifier: Apache-2.0
"""
Mixed effects
=============

The data are reaction times of 12 people on eight days of sleep deprivation. Each person has a level
and a slope from a common distribution with unknown sds. Priors that depend on other latent
variables cause funnels. ``fit`` detects them and samples in a space without funnels.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import fit

pyro.set_rng_seed(0)
num_people, num_days = 12, 8
person = torch.arange(num_people).repeat_interleave(num_days)
day = torch.arange(num_days).repeat(num_people) / num_days
level = 0.25 * torch.randn(num_people)
slope = 1.0 + 0.1 * torch.randn(num_people)
reaction = level[person] + slope[person] * day + 0.3 * torch.randn(len(day))


def model(person, day, reaction):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    spread = pyro.sample("spread", dist.HalfNormal(1.0).expand([2]).to_event(1))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    with pyro.plate("people", num_people):
        level = pyro.sample("level", dist.Normal(mean[0], spread[0]))
        slope = pyro.sample("slope", dist.Normal(mean[1], spread[1]))
    with pyro.plate("days", len(day)):
        predicted = level[person] + slope[person] * day
        pyro.sample("reaction", dist.Normal(predicted, noise), obs=reaction)


# %%
# Automatic inference
# -------------------
#
# The model has 29 latent variables and is centred. The report names the space in which the chains
# ran, "conditional": the residual of each latent variable given its parents and its data. You need
# not write a non-centred model.

result = fit(model, "auto", person, day, reaction, seed=0)
print(result)
print(result.diagnose())

# %%
print(result.refined)

# %%
# Baseline
# --------

normal = fit(
    model,
    AutoNormal(model),
    person,
    day,
    reaction,
    num_steps=1000,
    lr=0.03,
    num_particles=8,
    seed=0,
)
print(normal.diagnose())

# %%
# Figure
# ------
#
# Left: the posterior allows a very small spread of the slopes. The mean field selects one value,
# and its intervals of the slopes (right) are too narrow.

draws, narrow = result.sample(2000), normal.sample(2000)
bounds = torch.tensor([0.05, 0.5, 0.95])
order = draws["slope"].mean(0).argsort()
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
for shift, name, own in [(-0.15, "fit", draws), (0.15, "AutoNormal", narrow)]:
    spread = own["spread"][..., 1].detach().flatten()
    axes[0].hist(spread, bins=40, range=(0, 0.8), density=True, alpha=0.6, label=name)
    low, middle, high = own["slope"].detach()[:, order].quantile(bounds, dim=0)
    axes[1].errorbar(
        torch.arange(num_people) + shift, middle, yerr=torch.stack([middle - low, high - middle]),
        fmt="o", markersize=3, label=name,
    )  # fmt: skip
axes[1].plot(slope[order], "kx", label="truth")
axes[1].set_xticks(range(num_people))
axes[0].set(xlabel="spread of the slopes (truth: 0.1)", yticks=[])
axes[1].set(xlabel="person, by slope", ylabel="slope, 90 % interval")
axes[0].legend()
axes[1].legend(loc="upper left")
plt.show()
