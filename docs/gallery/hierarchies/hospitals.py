# SPDX-License-Identifier: Apache-2.0
"""
Hierarchies: two hundred hospitals
==================================

Numbers of deaths in 200 hospitals of very different sizes. The data of a small hospital alone say
little about its rate, so the model draws the rates from a common distribution. The posterior has
202 latent variables.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch

from pyro_implicit import fit

pyro.set_rng_seed(1)
patients = torch.exp(3.0 + 1.2 * torch.randn(200)).ceil()
truth = -1.5 + 0.4 * torch.randn(200)
deaths = dist.Binomial(patients, logits=truth).sample()


def model(patients, deaths):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("hospitals", len(patients)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("deaths", dist.Binomial(patients, logits=theta), obs=deaths)


# %%
# ``fit`` trains a mean field and refines its draws with chains. The data determine the effects of
# large hospitals, while those of small hospitals follow ``mu`` and ``tau``; the chains run on noise
# that is centred for the former and non-centred for the latter.

result = fit(model, "auto", patients, deaths, seed=0)
print(result)
print(result.diagnose())

# %%
# Shrinkage
# ---------
#
# The smaller the hospital, the closer its estimate is to the common mean.

draws = result.sample(2000)
theta = draws["theta"].detach().reshape(-1, 200)
rates = theta.sigmoid()
low, middle, high = rates.quantile(torch.tensor([0.05, 0.5, 0.95]), dim=0)
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
axes[0].plot([0, 1], [0, 1], color="0.7", linewidth=1)
axes[0].scatter(deaths / patients, middle, s=patients.sqrt() * 3, alpha=0.5)
axes[0].set(xlabel="observed rate", ylabel="posterior median (area: patients)")
order = middle.argsort()
axes[1].fill_between(range(200), low[order], high[order], alpha=0.3, label="90 %")
axes[1].plot(middle[order], label="median")
axes[1].plot(truth.sigmoid()[order], "k.", markersize=3, label="truth")
axes[1].set(xlabel="hospital, by posterior median", ylabel="rate")
axes[1].legend(fontsize=8)
plt.show()
