# SPDX-License-Identifier: Apache-2.0
"""
NUTS in the noise of a guide
============================

Neal's funnel: one latent variable is the log-scale of four others. NUTS diverges in the neck, and
its draws do not show it. A guide that has learnt the funnel maps Gaussian noise to it. In the space
of this noise NUTS sees no funnel, and it corrects the errors of the guide.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from pyro.ops.stats import effective_sample_size

from pyro_implicit import AutoImplicit, AutoregressiveGenerator, NoiseSpaceReparam, fit


def model():
    log_scale = pyro.sample("log_scale", dist.Normal(0.0, 3.0))
    pyro.sample("x", dist.Normal(torch.zeros(4), (log_scale / 2).exp()).to_event(1))


def run_nuts(model):
    pyro.set_rng_seed(0)
    nuts = NUTS(model, jit_compile=True, ignore_jit_warnings=True, max_tree_depth=5)
    mcmc = MCMC(nuts, num_samples=300, warmup_steps=150, disable_progbar=True)
    mcmc.run()
    return mcmc.get_samples(), len(mcmc.diagnostics()["divergences"]["chain 0"])


# %%
# A guide with an exact density
# -----------------------------

guide = AutoImplicit(model, AutoregressiveGenerator)
result = fit(model, guide, num_steps=1000, num_particles=32, seed=0)
print(result.diagnose())

# %%
# NUTS in the latent variables and in the noise
# ---------------------------------------------

plain, plain_divergences = run_nuts(model)
guide.requires_grad_(False)
reparam = NoiseSpaceReparam(guide)
noise, noise_divergences = run_nuts(reparam.reparam(model))
better = {
    k: v.detach() for k, v in reparam.transform_sample(noise["log_scale_shared_latent"]).items()
}

# %%
# Figure
# ------
#
# The exact answer is known: the log-scale has a standard deviation of 3.

figure, axes = plt.subplots(1, 3, figsize=(10, 3.8), sharey=True, layout="constrained")
panels = {
    "NUTS": (plain, f"{plain_divergences} divergences"),
    "the guide": (result.sample(300), "no chain"),
    "NUTS over its noise": (better, f"{noise_divergences} divergences"),
}
for axis, (name, (draws, note)) in zip(axes, panels.items(), strict=True):
    log_scale, first = draws["log_scale"].detach().flatten(), draws["x"].detach()[..., 0].flatten()
    axis.scatter(first, log_scale, s=5, alpha=0.5)
    size = effective_sample_size(log_scale[None], chain_dim=0, sample_dim=1)
    axis.set(title=f"{name}: sd {log_scale.std():.1f}\nworth {size:.0f} draws, {note}")
    axis.set(xlabel="x[0]", xlim=(-20, 20))
axes[0].set_ylabel("log-scale")
plt.show()
