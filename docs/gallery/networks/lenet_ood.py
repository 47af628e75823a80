# SPDX-License-Identifier: Apache-2.0
"""
LeNet and out-of-distribution images
====================================

A convolutional network learns the digits 0 to 7 and then sees the digits 8 and 9, which are not
among its classes. It must answer with one of eight classes. Disagreement between draws of its
weights can indicate that the answer is unreliable.
"""

import matplotlib.pyplot as plt
import pyro
import torch
from pyro.infer.autoguide import AutoDelta, init_to_value
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_implicit import fit
from pyro_implicit.nn import classifier, evaluate, start_values, to_bayesian_

pyro.set_rng_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
images = nn.functional.interpolate(images, (16, 16), mode="bilinear")
labels = torch.tensor(digits.target)
is_known = labels < 8
order = torch.randperm(int(is_known.sum()))
x, y = images[is_known][order], labels[is_known][order]
train, test = TensorDataset(x[:1000], y[:1000]), TensorDataset(x[1000:], y[1000:])
eights_and_nines = images[~is_known]

# %%
# Priors on LeNet
# ---------------
#
# A small LeNet for images of 16 x 16 pixels.


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 8),
    )  # fmt: skip


net = to_bayesian_(lenet())
model = classifier(net, num_data=len(train))
loader = DataLoader(train, batch_size=100, shuffle=True)
result = fit(model, "auto", batches=loader, epochs=20, lr=0.01, seed=0)
print(result)

# %%
# Baseline: a single network
# --------------------------
#
# The same priors and initial values, but a point estimate instead of a distribution.

pyro.clear_param_store()
point = AutoDelta(model, init_loc_fn=init_to_value(values=start_values(net)))
single = fit(model, point, batches=loader, epochs=20, lr=0.01, seed=0)

held_out, foreign = DataLoader(test, batch_size=200), DataLoader(eights_and_nines, batch_size=200)
report = evaluate(result, held_out, ood={"8 and 9": foreign}, num_samples=30)
print(report)

# %%
single_report = evaluate(single, held_out, ood={"8 and 9": foreign}, num_samples=1)
print(single_report)

# %%
# Ten point estimates are not the posterior of thousands of weights. ``diagnose`` would confirm
# this, but slowly, because it needs gradients at hundreds of draws on all images. The two reports
# judge the predictions instead.
#
# Figure
# ------

report.plot()

# %%
plt.show()
