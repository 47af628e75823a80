# SPDX-License-Identifier: Apache-2.0
"""
Gaussian process with Poisson counts
====================================

The data are counts in 20 bins. Their log-rate is a Gaussian process with unknown amplitude and
length scale. With a Poisson likelihood the function cannot be marginalised analytically, so its
values are latent variables, next to the two hyperparameters and a mean.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import fit

pyro.set_rng_seed(0)
x = torch.linspace(0, 5, 20)
rate = torch.exp(1.0 + torch.sin(1.5 * x))
counts = torch.poisson(rate)


def log_rate(amplitude, length, mean, white):
    distance = (x[:, None] - x) ** 2
    kernel = amplitude**2 * torch.exp(-0.5 * distance / length**2) + 1e-4 * torch.eye(len(x))
    return mean + (torch.linalg.cholesky(kernel) @ white.unsqueeze(-1)).squeeze(-1)


def model(counts):
    amplitude = pyro.sample("amplitude", dist.HalfNormal(1.0))
    length = pyro.sample("length", dist.InverseGamma(5.0, 5.0))
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    white = pyro.sample("white", dist.Normal(torch.zeros(len(x)), 1.0).to_event(1))
    f = log_rate(amplitude, length, mean, white)
    with pyro.plate("bins", len(x)):
        pyro.sample("counts", dist.Poisson(f.exp()), obs=counts)


# %%

result = fit(model, "auto", counts, seed=0)
print(result)
print(result.diagnose())

# %%
# Baseline
# --------

normal = fit(model, AutoNormal(model), counts, num_steps=1000, lr=0.03, num_particles=8, seed=0)
print(normal.diagnose())

# %%
# Figure
# ------
#
# Left: the rate with 90 % bands. Right: the posterior of the hyperparameters. The mean field is
# accurate for the rate and too narrow for the hyperparameters.

figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=[3, 2], layout="constrained")
axes[0].bar(x.numpy(), counts.numpy(), width=0.2, color="0.85", label="counts")
axes[0].plot(x, rate, "k-", linewidth=1, label="truth")
for name, fitted in {"fit": result, "AutoNormal": normal}.items():
    draws = {site: value.detach() for site, value in fitted.sample(1000).items()}
    amplitude, length, mean = (draws[k].reshape(-1, 1) for k in ("amplitude", "length", "mean"))
    f = log_rate(amplitude[..., None], length[..., None], mean, draws["white"])
    low, high = f.exp().quantile(torch.tensor([0.05, 0.95]), dim=0)
    axes[0].fill_between(x, low, high, alpha=0.35, label=name)
    axes[1].scatter(length, amplitude, s=4, alpha=0.4, label=name)
axes[0].set(xlabel="x", ylabel="rate", ylim=(0, 14))
axes[1].set(xlabel="length scale", ylabel="amplitude", xlim=(0, 3), ylim=(0, 3))
axes[0].legend()
plt.show()
