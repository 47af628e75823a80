# SPDX-License-Identifier: Apache-2.0
"""
From a prior to a decision: model comparison, predictive checks, sensitivity
=============================================================================

This page goes through the whole workflow on a real data set, the diabetes study that comes with
scikit-learn: 442 patients, and the progression of their disease within a year.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_diabetes

from pyro_implicit import compare_models, fit

data = load_diabetes()
columns = [data.feature_names.index(name) for name in ("bmi", "bp", "s5")]
x = torch.as_tensor(data.data[::3, columns], dtype=torch.float32)  # a third, for a fast page
x = x / x.std(0)
y = torch.as_tensor(data.target[::3], dtype=torch.float32) / 100

# %%
# Three models
# ------------
#
# Body mass, blood pressure and a blood value predict the progression. The models differ in the
# distribution of the progression. With a gamma distribution, it is positive, and its spread grows
# with the mean.


def model(x, y, family):
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    slopes = pyro.sample("slopes", dist.Normal(0.0, 0.5).expand([3]).to_event(1))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    mean = level + x @ slopes
    with pyro.plate("patients", len(x)):
        if family == "gamma":
            shape = 1 / spread**2
            pyro.sample("y", dist.Gamma(shape, shape * torch.exp(-mean)), obs=y)
        elif family == "normal":
            pyro.sample("y", dist.Normal(mean, spread), obs=y)
        else:
            pyro.sample("y", dist.StudentT(4.0, mean, spread), obs=y)


# %%
# Fit and verdict
# ---------------

families = ("normal", "Student", "gamma")
results = {name: fit(model, "auto", x, y, name, seed=0) for name in families}
print(results["gamma"].diagnose())

# %%
# Summary of the draws, with effective sample sizes and Monte Carlo errors:

print(results["gamma"].summary())

# %%
# Prior predictive check
# ----------------------
#
# Data drawn from the prior should cover the observed data without being absurd.

print(results["gamma"].check_prior_predictive(seed=0))

# %%
# Posterior predictive check
# --------------------------
#
# The normal model predicts negative progressions, which do not exist: see its minimum.

checks = {name: result.check_posterior_predictive(seed=0) for name, result in results.items()}
for name, check in checks.items():
    print(f"{name}\n{check}\n")

# %%
# Model comparison
# ----------------
#
# Leave-one-out cross-validation (LOO), stacking weights and log evidence:

comparison = compare_models(results, seed=0)
print(comparison)

# %%
# Sensitivity to the prior
# ------------------------

print(results["gamma"].sensitivity(seed=0))

# %%
# Decision
# --------
#
# A treatment costs 1, and a strong progression (above 2.5) without treatment costs 4. To minimise
# the expected loss, treat the patients whose probability of a strong progression exceeds 1 / 4. The
# stacking weights mix the predictions of the three models.

weights = comparison.table["stacking"]
risk = sum(
    weights[name] * (check.sites["y"].replicated > 2.5).float().mean(0)
    for name, check in checks.items()
)
print(f"treat {int((risk > 0.25).sum())} of {len(x)} patients")

# %%
# Figure
# ------

figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for name, check in checks.items():
    band = check.sites["y"].pit_ecdf
    assert band is not None
    axes[0].plot(band.x, band.observed, label=name)
axes[0].fill_between(band.x, band.low, band.high, color="0.9")
axes[0].set(xlabel="PIT of leave-one-out predictions", ylabel="ECDF - uniform")
axes[0].legend()
order = risk.argsort()
axes[1].plot(risk[order], ".")
axes[1].axhline(0.25, color="0.5", linestyle="--")
axes[1].set(xlabel="patients, by risk", ylabel="probability of a strong progression")
plt.show()
