# SPDX-License-Identifier: Apache-2.0
"""
A posterior that is updated every day
=====================================

Each day a shop learns how many visitors of two versions of a page bought something. The posterior
of one day is the prior of the next, so the data of earlier days are not needed again.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch

from pyro_implicit import fit

NUM_DAYS, VISITORS = 6, 40.0
pyro.set_rng_seed(0)
truth = torch.tensor([0.10, 0.16])
sales = torch.binomial(torch.full((NUM_DAYS, 2), VISITORS), truth.expand(NUM_DAYS, 2))


def model(sales):
    base = pyro.sample("base", dist.Normal(-2.0, 1.0))
    gain = pyro.sample("gain", dist.Normal(0.0, 1.0))
    logits = torch.stack([base, base + gain], -1)
    with pyro.plate("days", len(sales), dim=-2), pyro.plate("versions", 2, dim=-1):
        pyro.sample("sales", dist.Binomial(VISITORS, logits=logits), obs=sales)


# %%
# One update per day
# ------------------
#
# ``result.update`` takes the model with its own priors, and only the new data. The first stage
# reports how well the prior represents yesterday's posterior.

results = [fit(model, "auto", sales[:1], seed=0)]
for day in range(1, NUM_DAYS):
    results.append(results[-1].update(model, sales[day : day + 1], seed=day))
print(results[-1])
print(results[-1].diagnose())

# %%
# Compared with one fit to all data
# ---------------------------------

at_once = fit(model, "auto", sales, seed=0)


def interval(result):
    gain = result.sample(2000)["gain"].detach()
    return gain.quantile(torch.tensor([0.05, 0.5, 0.95]))


figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
for day, result in enumerate([*results, at_once], 1):
    low, middle, high = interval(result)
    colour = "C1" if result is at_once else "C0"
    axis.plot([day, day], [low, high], color=colour, linewidth=3)
    axis.plot(day, middle, "o", color=colour)
exact = (truth.logit()[1] - truth.logit()[0]).item()
axis.axhline(exact, color="0.5", linestyle="--", linewidth=1, label="truth")
labels = [*(f"day {day}" for day in range(1, NUM_DAYS + 1)), "all at once"]
axis.set_xticks(range(1, NUM_DAYS + 2), labels)
axis.set(ylabel="gain of version B, log odds", title="90 % intervals")
axis.legend()
plt.show()
