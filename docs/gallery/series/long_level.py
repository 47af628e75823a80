# SPDX-License-Identifier: Apache-2.0
"""
Time series: five hundred steps
===============================

The level of :doc:`local_level`, with 500 steps instead of 40. ``dist.GaussianHMM`` marginalises
the levels, so the posterior has two latent variables instead of 502.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch

from pyro_implicit import fit

NUM_STEPS = 500
pyro.set_rng_seed(4)
truth = (0.2 * torch.randn(NUM_STEPS)).cumsum(0)
y = truth + torch.randn(NUM_STEPS)


def series(sd_step, sd_noise):
    """The distribution of all observations: a random walk that is observed with noise."""
    start = dist.Normal(torch.zeros(1), 1.0).to_event(1)
    step = dist.Normal(torch.zeros(1), sd_step[..., None, None]).to_event(1)
    noise = dist.Normal(torch.zeros(1), sd_noise[..., None, None]).to_event(1)
    one = torch.ones(1, 1)
    return dist.GaussianHMM(start, one, step, one, noise, duration=NUM_STEPS)


def model(y):
    sd_step = pyro.sample("sd_step", dist.HalfNormal(1.0))
    sd_noise = pyro.sample("sd_noise", dist.HalfNormal(2.0))
    pyro.sample("y", series(sd_step, sd_noise), obs=y[:, None])


result = fit(model, "auto", y, seed=0)
print(result)
print(result.diagnose())

# %%
# Levels
# ------
#
# Each draw of the two standard deviations gives a path of levels.

draws = result.sample(500)
sd_step, sd_noise = draws["sd_step"].detach(), draws["sd_noise"].detach()
posterior = series(sd_step, sd_noise)
levels = posterior.rsample_posterior(y[:, None].expand(len(sd_step), -1, -1))[..., 0]

figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=[2, 1], layout="constrained")
low, high = levels.quantile(torch.tensor([0.05, 0.95]), dim=0)
axes[0].plot(y, "k.", markersize=1, alpha=0.5, label="measured")
axes[0].plot(truth, "k-", linewidth=1, label="truth")
axes[0].fill_between(range(NUM_STEPS), low, high, alpha=0.5, label="90 %")
axes[0].set(xlabel="time", ylabel="level")
axes[0].legend(fontsize=8)
axes[1].scatter(sd_step, sd_noise, s=4)
axes[1].set(xlabel="sd of a step (truth: 0.2)", ylabel="sd of the noise (truth: 1)")
plt.show()
