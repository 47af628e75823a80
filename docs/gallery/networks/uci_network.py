# SPDX-License-Identifier: Apache-2.0
"""
Regression with a Bayesian network
==================================

A network predicts the progression of diabetes from ten measurements of 442 patients, of whom 44 are
held out. It has one hidden layer, and priors on each weight and on the precision of its noise. The
weights themselves are of no interest; errors, intervals and their coverage on held-out rows are.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDelta, AutoNormal, init_to_value
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_implicit import diagnose, fit, refine
from pyro_implicit.nn import evaluate, predict, regressor, start_values, to_bayesian_

pyro.set_rng_seed(0)
x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
order = torch.randperm(len(y))
x, y = (x / x.std(0))[order], ((y - y.mean()) / y.std())[order].unsqueeze(-1)
train = TensorDataset(x[:398], y[:398])
test = TensorDataset(x[398:], y[398:])

# %%
# Priors on a module
# ------------------
#
# ``to_bayesian_`` puts priors on an ordinary ``torch.nn`` module, in place. ``regressor`` makes the
# Pyro model, with a plate that scales each minibatch to all rows, and here with a prior on the
# precision of the noise.

net = to_bayesian_(nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 1)))
model = regressor(net, num_data=len(train), noise=dist.Gamma(1.0, 0.1))

# %%
# Two baselines
# -------------
#
# A single network (maximum a posteriori), and a mean field over all weights, both trained on
# minibatches. With ``"auto"``, ``fit`` would train an ensemble of ten networks.

loader = DataLoader(train, batch_size=100, shuffle=True)
point = AutoDelta(model, init_loc_fn=init_to_value(values=start_values(net)))
single = fit(model, point, batches=loader, epochs=150, lr=0.02, seed=0)
start = init_to_value(values=start_values(net))
guide = AutoNormal(model, init_loc_fn=start, init_scale=0.05)
mean_field = fit(model, guide, batches=loader, epochs=150, lr=0.02, seed=0)
print(mean_field)

# %%
# Refine the mean field
# ---------------------
#
# 398 rows are few enough for Hamiltonian Monte Carlo on all of them. The weights are not
# identified, so the chains must agree on predictions. 600 gradients keep this page fast: the report
# says that the chains have not converged.


def predictions(draws):
    hidden = (
        torch.einsum("...hi,ri->...rh", draws["0.weight"], test[:][0])
        + draws["0.bias"][..., None, :]
    )
    return (hidden.relu() @ draws["2.weight"].mT).squeeze(-1)


refined = refine(
    model, mean_field.guide, *train[:], quantities=predictions, num_chains=64,
    max_gradients=600, seed=0,
)  # fmt: skip
print(refined)

# %%
# ``diagnose`` checks the 362 latent variables.

print(diagnose(model, mean_field.guide, *train[:], num_transitions=5))

# %%
# Held-out rows
# -------------

held_out = DataLoader(test, batch_size=44)
fits = {"one network": single, "mean field": mean_field, "refined": refined}
for name, fitted in fits.items():
    print(f"{name}\n{evaluate(fitted, held_out, model=model)}\n")

# %%
# Figure
# ------
#
# Predictions with 90 % intervals for a new measurement. All three predict about equally well,
# because ten measurements say little about one patient; the single network is overconfident.

target = test[:][1].squeeze(-1)
order = target.argsort()
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True, layout="constrained")
for axis, (name, fitted) in zip(axes, fits.items(), strict=True):
    found = next(predict(fitted, held_out, model=model))
    mean, sd = found.mean.squeeze(-1)[order], (found.aleatoric + found.epistemic).sqrt()[order]
    axis.errorbar(range(44), mean, yerr=1.645 * sd, fmt="none", alpha=0.5)
    axis.plot(target[order], "k.", markersize=4)
    inside = ((target[order] - mean).abs() < 1.645 * sd).float().mean()
    axis.set(title=f"{name}\n{inside:.0%} inside", xlabel="patient, by progression")
axes[0].set_ylabel("progression")
plt.show()
