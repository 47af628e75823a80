# SPDX-License-Identifier: Apache-2.0
"""
Ordinal regression
==================

Answers on a scale from 1 to 5 are ordered categories: the step from 1 to 2 may differ from the step
from 4 to 5. The model has a latent opinion and four ordered cutpoints, which are latent variables,
too. Ordered, positive or bounded latent variables need no special treatment, because guides work in
unconstrained space, as in Pyro.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.transforms import OrderedTransform
from pyro.infer.autoguide import AutoNormal

from pyro_implicit import fit
from pyro_implicit.diagnostics import plot_posteriors

pyro.set_rng_seed(3)
x = torch.randn(80, 2)
opinion = x @ torch.tensor([1.0, -0.5]) + dist.Logistic(torch.zeros(80), 1.0).sample()
answer = torch.bucketize(opinion, torch.tensor([-2.0, -0.5, 0.5, 2.0]))


def model(x, answer=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    base = dist.Normal(0.0, 3.0).expand([4]).to_event(1)
    cuts = pyro.sample("cuts", dist.TransformedDistribution(base, OrderedTransform()))
    with pyro.plate("people", len(x)):
        pyro.sample("answer", dist.OrderedLogistic(x @ slope, cuts), obs=answer)


# %%
# Automatic inference
# -------------------
#
# The posterior is nearly Gaussian. Importance weights can correct the Gaussian of the search, and
# ``fit`` skips the training.

result = fit(model, "auto", x, answer, seed=0)
print(result)
print(result.diagnose())

# %%
# Baseline
# --------
#
# A mean field has correct means, but it ignores the correlation of the cutpoints, so its standard
# deviations are wrong.

normal = fit(model, AutoNormal(model), x, answer, num_steps=1000, lr=0.03, num_particles=8, seed=0)
print(normal.diagnose())

# %%
# Figure
# ------
#
# ``plot_posteriors`` overlays several sets of draws: marginal densities, and regions that contain
# 50 % and 90 % of the draws. The result of ``fit`` is grey.

draws = {"fit": result.sample(4000), "AutoNormal": normal.sample(4000)}
plot_posteriors(draws, sites=["cuts", "slope"], max_coordinates=4, reference="fit")

# %%
# Predictions
# -----------
#
# ``result.posterior`` is a guide for Pyro's ``Predictive``. The figure shows the predicted share of
# each answer as a function of the first covariate.

new_x = torch.stack([torch.linspace(-3, 3, 41), torch.zeros(41)], -1)
draws = result.sample(500)
logits = torch.einsum("nd,sd->sn", new_x, draws["slope"])
share = dist.OrderedLogistic(logits, draws["cuts"][:, None]).probs.mean(0)

figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
axis.stackplot(new_x[:, 0], share.T, labels=[f"answer {k}" for k in range(1, 6)], alpha=0.8)
axis.set(xlabel="first covariate", ylabel="probability", xlim=(-3, 3), ylim=(0, 1))
axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True, frameon=False)
plt.show()
