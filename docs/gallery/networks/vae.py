# SPDX-License-Identifier: Apache-2.0
"""
An autoencoder with an implicit encoder
=======================================

A decoder generates small images of digits from two latent variables each. The posterior of the
latent variables of an image is usually close to a Gaussian, but some images are ambiguous. A
Gaussian encoder cannot represent this; an implicit encoder, whose noise passes through the network,
can. This page compares both with the exact posterior. The gain is small.
"""

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

from pyro_implicit import KIVI_ELBO, Implicit, NoisyEncoder, diagnose, fit
from pyro_implicit.infer import ImplicitELBO

pyro.set_rng_seed(0)
x = (torch.tensor(load_digits().data).float() > 7).float()
loader = DataLoader(x, batch_size=200, shuffle=True)
decoder = nn.Sequential(nn.Linear(2, 100), nn.Tanh(), nn.Linear(100, 64))


def model(x, num_images=1797):
    with pyro.plate("images", num_images, subsample_size=len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Bernoulli(logits=decoder(z)).to_event(1), obs=x)


# %%
# Decoder and baseline
# --------------------
#
# A Gaussian encoder, trained together with the decoder.

gaussian = nn.Sequential(nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 4))


def gaussian_guide(x, num_images=1797):
    pyro.module("gaussian", gaussian)
    pyro.module("decoder", decoder)  # only in this guide, so that the other guide keeps it fixed
    with pyro.plate("images", num_images, subsample_size=len(x)):
        loc, log_scale = gaussian(x).chunk(2, -1)
        pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


print(fit(model, gaussian_guide, batches=loader, loss=ImplicitELBO(1), epochs=100, lr=5e-3))

# %%
# The implicit encoder
# --------------------
#
# ``Implicit`` is a distribution without a density: a generator applied to noise. ``KIVI_ELBO``
# trains it by a density ratio that it estimates from draws. The decoder stays fixed, so that both
# encoders approximate the same posterior.

encoder = NoisyEncoder(64, 2, hidden=(100, 100))


def implicit_guide(x, num_images=1797):
    pyro.module("encoder", encoder)
    with pyro.plate("images", num_images, subsample_size=len(x)):
        pyro.sample("z", Implicit(encoder, encoder.noise_dim, context=x))


print(fit(model, implicit_guide, batches=loader, loss=KIVI_ELBO(1, 20), epochs=60, lr=3e-3))

# %%
# The exact posterior
# -------------------
#
# With two latent variables it can be computed on a grid. The output is the share of each encoder's
# draws in the region that contains 90 % of the exact mass, averaged over images; the correct share
# is 90 %.

side = torch.linspace(-4, 4, 101)
grid = torch.cartesian_prod(side, side)
images = x[:300]
with torch.no_grad():
    log_prior = dist.Normal(0.0, 1.0).log_prob(grid).sum(-1)
    logits = decoder(grid)
    log_density = images @ logits.T - nn.functional.softplus(logits).sum(-1) + log_prior
    exact = log_density.softmax(-1)  # (images, grid points)
    loc, log_scale = gaussian(images).chunk(2, -1)
    draws = {
        "Gaussian": dist.Normal(loc, log_scale.exp()).sample((200,)),
        "implicit": Implicit(encoder, encoder.noise_dim, context=images).sample((200,)),
    }
ranked, order = exact.sort(-1, descending=True)
in_region = torch.zeros_like(exact).scatter(-1, order, (ranked.cumsum(-1) < 0.9).float())
cell = {name: ((z + 4) / 8 * 100).round().long().clamp(0, 100) for name, z in draws.items()}
inside = {
    name: in_region.gather(-1, (at[..., 0] * 101 + at[..., 1]).T).mean(-1)
    for name, at in cell.items()
}
for name, share in inside.items():
    print(f"{name:9} {share.mean():.2f} of the draws in the 90 % region")

# %%
# ``diagnose`` uses no grid. It checks five images jointly.

print(diagnose(model, gaussian_guide, x[:5], num_images=5))

# %%
print(diagnose(model, implicit_guide, x[:5], num_images=5))

# %%
# Figure
# ------
#
# The four of the first 300 images on which the Gaussian encoder is worst. Contours are exact.
# Usually both encoders have a wrong location rather than a wrong shape, because one network has to
# serve all images (the amortisation gap). If there are two modes, only the implicit encoder covers
# part of the second mode. With eight latent variables the gain is larger: see ``examples/vae.py``.

worst = inside["Gaussian"].argsort()[:4]
figure, axes = plt.subplots(3, 4, figsize=(9, 6.8), layout="constrained")
for column, index in enumerate(worst.tolist()):
    axes[0, column].imshow(images[index].reshape(8, 8).numpy(), cmap="gray_r")
    axes[0, column].set(xticks=[], yticks=[])
    density = exact[index].reshape(101, 101).T.numpy()
    for row, (name, z) in enumerate(draws.items(), start=1):
        axis = axes[row, column]
        axis.contour(
            side, side, density, levels=[density.max() * share for share in (0.05, 0.3, 0.7)]
        )
        axis.scatter(*z[:, index].T, s=3, color="C1", alpha=0.5)
        centre = (exact[index, :, None] * grid).sum(0).tolist()
        axis.set(xlim=(centre[0] - 1.5, centre[0] + 1.5), ylim=(centre[1] - 1.5, centre[1] + 1.5))
        axis.set(xticks=[], yticks=[])
        axes[row, 0].set_ylabel(name)
plt.show()
