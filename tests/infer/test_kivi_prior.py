# SPDX-License-Identifier: Apache-2.0
"""KIVI_ELBO with the prior as its contrast, which is the paper's setting."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, init_to_value
from pyro.nn import PyroModule, PyroParam
from torch.distributions import constraints

from pyro_implicit import KIVI_ELBO, MLP, AutoImplicit, AutoSemiImplicit, Implicit
from pyro_implicit.ops import log_density_ratio

pytestmark = pytest.mark.usefixtures("double")


def gaussian_pair(scale, prior_scale=1.0, dim=1):
    """A prior N(0, s_p^2), and a guide N(0.5, s^2) whose log-scale can be differentiated."""
    log_scale = torch.tensor(math.log(scale), requires_grad=True)

    def model():
        pyro.sample("x", dist.Normal(0.0, prior_scale).expand([dim]).to_event(1))

    def guide():
        pyro.sample("x", Implicit(lambda z: 0.5 + log_scale.exp() * z, dim))

    ratio = scale / prior_scale
    kl = dim * (0.5 * (ratio**2 + (0.5 / prior_scale) ** 2 - 1) - math.log(ratio))
    return model, guide, log_scale, kl, dim * (ratio**2 - 1)


@pytest.mark.parametrize(
    "direction,scale,prior_scale",
    [("forward", 0.7, 1.0), ("forward", 1.2, 3.0), ("reverse", 1.3, 1.0), ("reverse", 2.4, 2.0)],
)
def test_loss_is_the_kl_of_gaussians(direction, scale, prior_scale):
    """Each direction where it holds: q narrower than the prior, or wider."""
    model, guide, log_scale, kl, slope = gaussian_pair(scale, prior_scale)
    losses, slopes = [], []
    for seed in range(20):
        pyro.set_rng_seed(seed)
        elbo = KIVI_ELBO(4, 400, contrast="prior", direction=direction)
        loss = elbo.differentiable_loss(model, guide)
        losses.append(loss.item())
        slopes.append(torch.autograd.grad(loss, log_scale)[0].item())
    assert sum(losses) / 20 == pytest.approx(kl, abs=0.15)
    assert sum(slopes) / 20 == pytest.approx(slope, abs=0.3)


def test_loss_is_the_ratio_of_the_draws():
    """In unconstrained space, the likelihood's particles first among those of the ratio."""

    def model():
        pyro.sample("x", dist.LogNormal(0.3, 2.0))

    seen = []

    def guide():
        base = Implicit(lambda z: (0.5 * z).squeeze(-1), 1)
        transform = dist.transforms.ExpTransform()
        seen.append(pyro.sample("x", dist.TransformedDistribution(base, [transform])))

    sets = []

    def kernel(x, y, bandwidth):
        sets.append((x, y))
        return torch.exp(-0.5 * (x - y.mT).square() / bandwidth[..., None, None] ** 2)

    elbo = KIVI_ELBO(5, 20, 30, contrast="prior", kernel=kernel)
    loss = elbo.differentiable_loss(model, guide)
    points, centers = sets[-1]
    assert points.shape == (20, 1) and centers.shape == (50, 1)
    torch.testing.assert_close(points[:5, 0].exp(), seen[-1])
    contrast, draws = centers.split([30, 20])  # the denominator's come first
    assert draws.equal(points)
    assert contrast.mean().item() == pytest.approx(0.3, abs=1.2)
    expected = log_density_ratio(points, contrast, kernel=kernel).mean()
    torch.testing.assert_close(loss, expected)  # no data: nothing but the KL


def test_local_latents_with_a_prior_of_their_own_each():
    """Two data points, q = N(c, 0.5^2) against N(2 c, 1): a KL each, doubled by the subsample."""
    context = torch.tensor([[-1.0], [0.5], [1.0], [0.0]])

    def model(rows):
        with pyro.plate("data", 4, subsample=rows):
            pyro.sample("z", dist.Normal(2 * context[rows], 1.0).to_event(1))

    def guide(rows):
        with pyro.plate("data", 4, subsample=rows):
            pyro.sample("z", Implicit(lambda z, c: c + 0.5 * z, 1, context=context[rows]))

    rows = torch.tensor([0, 1])
    elbo = KIVI_ELBO(2, 500, contrast="prior")
    found = sum(elbo.loss(model, guide, rows) for _ in range(4)) / 4
    one = 0.5 * (0.5**2 - 1) - math.log(0.5)
    expected = 2 * (2 * one + 0.5 * (1.0**2 + 0.5**2))
    assert found == pytest.approx(expected, abs=0.5)


def test_a_prior_made_from_latents_that_do_not_move_it():
    """What vmap leaves of its distribution cannot be drawn from."""

    def loss(scale):
        def model():
            share = pyro.sample("share", dist.Dirichlet(torch.ones(3)))
            pyro.sample("size", dist.HalfNormal(scale(share)))
            pyro.sample("sign", dist.SoftLaplace(0.0, scale(share)))

        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoSemiImplicit(model, frame=None)
        elbo = KIVI_ELBO(5, 30, contrast="prior", num_prior_particles=50)
        return torch.as_tensor(elbo.differentiable_loss(model, guide))

    of_latents, of_numbers = loss(lambda share: share.sum().round()), loss(lambda share: 1.0)
    torch.testing.assert_close(of_latents, of_numbers)


def test_a_prior_that_is_summed_over_discrete_latents_is_refused():
    def model():
        choice = pyro.sample("choice", dist.Bernoulli(0.5))
        pyro.sample("x", dist.Normal(4 * choice, 1.0))

    guide = AutoSemiImplicit(model, frame=None)
    elbo = KIVI_ELBO(2, contrast="prior")
    with pytest.raises(ValueError, match="prior of site 'x' depends on the discrete .*'choice'"):
        elbo.loss(model, guide)


def test_a_model_that_cannot_run_at_draws_of_its_prior():
    def model():
        scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(0.0, scale))

    guide = AutoSemiImplicit(
        model, frame=None, init_loc_fn=init_to_value(values={"scale": torch.tensor(9.0)})
    )
    elbo = KIVI_ELBO(2, contrast="prior")
    with pytest.raises(ValueError, match="(?s)draws of the prior of 'scale', 'x'.*adaptive"):
        elbo.loss(model, guide)


class GammaPosterior(PyroModule):
    def __init__(self):
        super().__init__()
        self.shape = PyroParam(torch.tensor(12.0), constraints.positive)
        self.rate = PyroParam(torch.tensor(12.0), constraints.positive)

    def forward(self, *args):
        return {"precision": pyro.sample("precision", dist.Gamma(self.shape, self.rate))}


def test_explicit_gamma_precision_beside_implicit_weights():
    """Appendix E of the paper, on a linear model where the mean-field fixed point is known.

    By adaptive contrast: two standard deviations of the prior are nine of this posterior.
    """
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(30, 2, generator=generator)
    y = x @ torch.tensor([0.3, -0.2]) + 0.6 * torch.randn(30, generator=generator)

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 0.2).to_event(1))
        precision = pyro.sample("precision", dist.Gamma(6.0, 6.0))
        with pyro.plate("data", 30):
            pyro.sample("y", dist.Normal(x @ w, precision**-0.5), obs=y)

    shape, rate = torch.tensor(6.0 + 15), torch.tensor(6.0)
    for _ in range(50):  # coordinate ascent
        covariance = torch.linalg.inv(25 * torch.eye(2) + shape / rate * x.T @ x)
        mean = shape / rate * covariance @ x.T @ y
        rate = 6 + 0.5 * ((y - x @ mean).square().sum() + (x @ covariance * x).sum())

    pyro.set_rng_seed(0)
    guide = AutoGuideList(model)
    part = poutine.block(model, expose=["w"])
    guide.append(AutoImplicit(part, lambda size: MLP(4, size), frame=None, init_scale=0.3))
    guide.append(gamma := GammaPosterior())
    optim = pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.05 ** (1 / 500)})
    svi = SVI(model, guide, optim, KIVI_ELBO(16, compile="trace"))
    for _ in range(500):
        svi.step()
    with torch.no_grad(), pyro.plate("draws", 4000, dim=-2):
        draws = guide()["w"].reshape(-1, 2)
    assert (gamma.shape / gamma.rate).item() == pytest.approx((shape / rate).item(), rel=0.08)
    assert gamma.shape.item() == pytest.approx(21.0, rel=0.2)
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance))
    white = (draws - mean) @ whiten.T
    torch.testing.assert_close(white.mean(0), torch.zeros(2), rtol=0, atol=0.2)
    torch.testing.assert_close(white.std(0), torch.ones(2), rtol=0, atol=0.2)


def test_finds_a_posterior_that_is_not_much_narrower_than_the_prior():
    y = torch.tensor([1.0, -0.5])

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(w, 1.0).to_event(1), obs=y)

    pyro.set_rng_seed(0)
    guide = AutoImplicit(model, lambda size: MLP(2, size), frame=None, init_scale=0.8)
    optim = pyro.optim.ClippedAdam({"lr": 0.02, "lrd": 0.05 ** (1 / 300)})
    elbo = KIVI_ELBO(8, contrast="prior", compile="trace")
    svi = SVI(model, guide, optim, elbo)
    for _ in range(300):
        svi.step()
    draws = guide.sample_posterior(4000)["w"]
    torch.testing.assert_close(draws.mean(0), y / 2, rtol=0, atol=0.15)
    torch.testing.assert_close(draws.std(0), torch.full((2,), 0.5**0.5), rtol=0, atol=0.15)
