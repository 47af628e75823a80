# SPDX-License-Identifier: Apache-2.0
"""
Unseen animals: counts as latent variables
==========================================

Each of 30 ponds is visited three times, and each visit counts some of its frogs. The true numbers
are latent counts that Pyro cannot enumerate; ``fit`` sums them out, and draws them given the mean
number and the probability of detection (Royle's N-mixture model).
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch

from pyro_implicit import fit

NUM_PONDS, NUM_VISITS = 30, 3
pyro.set_rng_seed(0)
truth = torch.poisson(torch.full((NUM_PONDS, 1), 9.0))
seen = torch.binomial(truth.expand(-1, NUM_VISITS), torch.full((NUM_PONDS, NUM_VISITS), 0.4))


def model(seen):
    mean = pyro.sample("mean", dist.Gamma(4.0, 0.5))
    detected = pyro.sample("detected", dist.Beta(4.0, 4.0))
    with pyro.plate("ponds", len(seen), dim=-2):
        number = pyro.sample("number", dist.Poisson(mean))
        with pyro.plate("visits", seen.shape[1], dim=-1):
            pyro.sample("seen", dist.Binomial(number, detected), obs=seen)


# %%
# The fit
# -------
#
# No two of the 30 latent counts share a term of the log-density, so each can be summed out on its
# own. More frogs with a lower probability of detection explain the data equally well. Along this
# ridge chains of all variables are slow, because 30 counts must move with both parameters.

result = fit(model, "auto", seen, seed=0)
print(result)

# %%
# How many frogs there are
# ------------------------
#
# The checks are those of mean and probability, with the counts summed out.

print(result.diagnose())
draws = result.sample(2000)

figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
axes[0].scatter(draws["mean"], draws["detected"], s=3, alpha=0.3)
axes[0].set_xlabel("mean number of frogs")
axes[0].set_ylabel("probability of detection")
number = draws["number"].squeeze(-1)
order = seen.mean(-1).argsort()
low, middle, high = number[:, order].quantile(torch.tensor([0.05, 0.5, 0.95]), 0)
place = torch.arange(NUM_PONDS)
axes[1].vlines(place, low, high, color="C0", label="90 % interval")
axes[1].plot(place, middle, ".", color="C0")
axes[1].plot(place, truth[order, 0], "x", color="C1", label="truth")
axes[1].set_xlabel("pond, by frogs seen")
axes[1].set_ylabel("frogs")
axes[1].legend()
plt.show()
