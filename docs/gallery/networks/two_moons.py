# SPDX-License-Identifier: Apache-2.0
"""
Uncertainty of a network, compared with NUTS
============================================

A small network separates two half moons. Near the data the class is certain, but far from the data
it is not. A mean field converges to a nearly straight boundary and is uncertain along it. After
refinement by short chains, its draws follow the data and are uncertain where NUTS is.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoNormal
from sklearn.datasets import make_moons

from pyro_implicit import diagnose, fit, refine

points, labels = make_moons(60, noise=0.15, random_state=0)
x = torch.tensor(points, dtype=torch.float32) - torch.tensor([0.5, 0.25])
y = torch.tensor(labels, dtype=torch.float32)


def logits(draws, x):
    hidden = torch.tanh(x @ draws["w1"] + draws["b1"].unsqueeze(-2))
    return (hidden @ draws["w2"].unsqueeze(-1)).squeeze(-1)


def model(x, y):
    draws = {
        "w1": pyro.sample("w1", dist.Normal(0.0, 2.0).expand([2, 8]).to_event(2)),
        "b1": pyro.sample("b1", dist.Normal(0.0, 2.0).expand([8]).to_event(1)),
        "w2": pyro.sample("w2", dist.Normal(0.0, 2.0).expand([8]).to_event(1)),
    }
    pyro.sample("y", dist.Bernoulli(logits=logits(draws, x)).to_event(1), obs=y)


grid = torch.cartesian_prod(torch.linspace(-4, 4, 41), torch.linspace(-4, 4, 41))


def probability(draws, x=grid):
    return logits(draws, x).sigmoid()


# %%
# Mean field
# ----------

pyro.set_rng_seed(0)
normal = fit(model, AutoNormal(model), x, y, num_steps=1000, lr=0.02, num_particles=16)
print(normal.diagnose(num_transitions=5, modes=None))

# %%
# Refine its draws
# ----------------
#
# Weights are not identified (any two hidden units may be swapped), so chains never agree on them.
# ``quantities`` gives the functions on which the chains must agree, the probabilities at 25 points.

few = torch.cartesian_prod(torch.linspace(-3, 3, 5), torch.linspace(-3, 3, 5))
refined = refine(
    model, normal.guide, x, y, quantities=lambda draws: probability(draws, few),
    num_chains=128, max_gradients=3000, seed=0,
)  # fmt: skip
print(refined)
print(diagnose(model, refined, x, y, num_transitions=0, modes=None))

# %%
# NUTS
# ----

nuts = NUTS(model, jit_compile=True, ignore_jit_warnings=True, max_tree_depth=5)
mcmc = MCMC(nuts, num_samples=200, warmup_steps=100, disable_progbar=True)
mcmc.run(x, y)

# %%
# Figure
# ------
#
# The standard deviation of the probability over draws of the weights: dark where the networks
# disagree.

panels = {
    "AutoNormal": normal.sample(500),
    "refined": refined.get_samples(500),
    "NUTS": mcmc.get_samples(),
}
maps = {name: probability(draws).detach().std(0) for name, draws in panels.items()}
figure, axes = plt.subplots(1, 3, figsize=(11, 3.8), sharey=True, layout="constrained")
for axis, (name, spread) in zip(axes, maps.items(), strict=True):
    image = axis.imshow(
        spread.reshape(41, 41).T.numpy(), origin="lower", extent=(-4, 4, -4, 4), cmap="Blues",
        vmin=0, vmax=0.5,
    )  # fmt: skip
    axis.scatter(*x.T, c=y, s=8, cmap="coolwarm")
    away = (spread - maps["NUTS"]).abs().mean()
    axis.set_title(name if name == "NUTS" else f"{name}\n{away:.3f} from NUTS, on average")
figure.colorbar(image, ax=axes, label="sd of the probability", shrink=0.8)
plt.show()
