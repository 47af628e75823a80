# SPDX-License-Identifier: Apache-2.0
"""
Horseshoe
=========

Sparse regression with fifteen covariates, of which five matter. The horseshoe prior gives each
coefficient its own scale with a heavy tail: it shrinks small coefficients to zero and leaves large
ones unchanged. The posterior has many funnels, and the data do not determine scale and sign of a
small coefficient.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import fit

pyro.set_rng_seed(1)
truth = torch.zeros(15)
truth[:5] = torch.tensor([2.0, -1.5, 1.0, 0.5, -0.3])
x = torch.randn(40, 15)
y = x @ truth + torch.randn(40)


def model(x, y):
    overall = pyro.sample("overall", dist.HalfCauchy(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(2.0))
    with pyro.plate("covariates", x.shape[1]):
        own = pyro.sample("own", dist.HalfCauchy(1.0))
        beta = pyro.sample("beta", dist.Normal(0.0, own * overall))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, noise), obs=y)


# %%
# Automatic inference with 32 latent variables
# --------------------------------------------

result = fit(model, "auto", x, y, seed=0)
print(result)
print(result.diagnose())

# %%
# Baseline
# --------

normal = fit(model, AutoNormal(model), x, y, num_steps=1500, lr=0.03, num_particles=8, seed=0)
print(normal.diagnose())

# %%
# Figure
# ------
#
# Left: the coefficients with 90 % intervals. Right: the value of the last coefficient, whose true
# value is zero, and its scale. The posterior is a funnel; the mean field selects one scale.

bounds = torch.tensor([0.05, 0.5, 0.95])
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=[3, 2], layout="constrained")
for shift, name, fitted in [(-0.17, "fit", result), (0.17, "AutoNormal", normal)]:
    draws = {site: value.detach() for site, value in fitted.sample(2000).items()}
    low, middle, high = draws["beta"].quantile(bounds, dim=0)
    axes[0].errorbar(
        torch.arange(15) + shift, middle, yerr=torch.stack([middle - low, high - middle]),
        fmt="o", markersize=3, label=name,
    )  # fmt: skip
    scale = draws["own"][:, -1] * draws["overall"].flatten()
    axes[1].scatter(draws["beta"][:, -1], scale, s=4, alpha=0.3)
axes[0].plot(truth, "kx", label="truth")
axes[0].set(xlabel="covariate", ylabel="coefficient")
axes[0].legend()
axes[1].set(xlabel="last coefficient", ylabel="its scale", yscale="log", xlim=(-0.7, 0.7))
plt.show()
