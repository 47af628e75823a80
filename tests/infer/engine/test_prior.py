# SPDX-License-Identifier: Apache-2.0
"""SitePrior: the density and the draws of a site's latents before the data."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions.score_parts import ScoreParts
from torch import nn
from torch.distributions import biject_to

from pyro_implicit import KIVI_ELBO, MLP, AutoImplicit, Implicit
from pyro_implicit.infer import ImplicitELBO, ImplicitSite
from pyro_implicit.infer.engine.prior import SitePrior

pytestmark = pytest.mark.usefixtures("double")

MODES = [(1, "vmap"), (4, "vmap"), (4, "plate"), (4, False)]


class Probe(ImplicitELBO):
    """Keeps the sites and priors that it is given."""

    site_types = (Implicit,)
    needs_prior = True

    def score_parts(self, site: ImplicitSite, prior: SitePrior) -> ScoreParts:
        self.site, self.prior = site, prior
        zeros = torch.zeros(site.batch_shape)
        return ScoreParts(zeros, 0, zeros)


Implicit.trained_by.remove("Probe")


def static(ran=None):
    pyro.sample("scale", dist.LogNormal(0.3, 0.5))
    with pyro.plate("groups", 3, dim=-2):
        pyro.sample("share", dist.Dirichlet(torch.tensor([2.0, 3.0, 4.0])))
        if ran is not None:
            ran.append(1)


def hierarchical(ran=None):
    scale = pyro.sample("scale", dist.LogNormal(0.3, 0.5))
    with pyro.plate("groups", 3, dim=-2):
        effect = pyro.sample("effect", dist.Normal(2.0, scale))
    if ran is not None:
        ran.append(1)
    pyro.sample("y", dist.Normal(effect.sum(), 1.0), obs=torch.tensor(1.0))


def does_not_broadcast(ran=None):
    scale = pyro.sample("scale", dist.LogNormal(0.3, 0.5))
    factor = torch.eye(3) * scale.reshape(-1)[0]  # sees the first of many
    pyro.sample("effect", dist.MultivariateNormal(2.0 * torch.ones(3), scale_tril=factor))
    if ran is not None:
        ran.append(1)


def probed(model, guide, num_particles=4, mode="vmap", *args) -> SitePrior:
    elbo = Probe(num_particles, vectorize_particles=mode)
    elbo.loss(model, guide, *args)
    return elbo.prior


@pytest.mark.parametrize("num_particles,mode", MODES)
@pytest.mark.parametrize("model", [static, hierarchical])
def test_density_in_unconstrained_space(model, num_particles, mode):
    prior = probed(model, AutoImplicit(model, frame=None), num_particles, mode)
    found = prior.log_prob()
    assert found.shape == prior.site.batch_shape
    draws = prior.site.draw.detach().reshape(num_particles, -1)
    for k, draw in enumerate(draws):
        expected, start, values = 0.0, 0, {}
        for name in prior.site.latents:  # in the order of the model, so that parents come first
            fn = poutine.trace(poutine.condition(model, values)).get_trace().nodes[name]["fn"]
            transform = biject_to(fn.support)
            shape = transform.inv(fn.sample()).shape
            free = draw[start : start + shape.numel()].reshape(shape)
            start += shape.numel()
            values[name] = transform(free)
            expected = expected + fn.log_prob(values[name]).sum()
            expected = expected + transform.log_abs_det_jacobian(free, values[name]).sum()
        torch.testing.assert_close(found.reshape(-1)[k], expected)


@pytest.mark.parametrize("num_particles,mode", MODES)
@pytest.mark.parametrize(
    "model,depends,parallel",
    [(static, False, None), (hierarchical, True, True), (does_not_broadcast, True, False)],
)
def test_draws_follow_the_prior_and_stop_before_the_likelihood(
    model, depends, parallel, num_particles, mode
):
    if model is does_not_broadcast and mode == "plate":
        pytest.skip("it does not broadcast")
    ran = []
    prior = probed(model, AutoImplicit(model, frame=None), num_particles, mode, ran)
    ran.clear()
    points = prior.sample(400)
    memory = prior.memory
    assert (memory.depends, memory.on_others, memory.parallel) == (depends, False, parallel)
    assert not ran
    inner = prior.site.batch_shape[int(num_particles > 1) :]
    assert points.shape == inner + (400, prior.site.draw.shape[-1])
    points = points.reshape(400, -1)
    log_scale = points[:, 0]
    assert log_scale.mean().item() == pytest.approx(0.3, abs=0.08)
    assert log_scale.std().item() == pytest.approx(0.5, abs=0.06)
    if model is static:
        transform = biject_to(dist.Dirichlet(torch.ones(3)).support)
        shares = transform(points[:, 1:].reshape(400, 3, 1, 2))
        torch.testing.assert_close(
            shares.mean(0)[:, 0], torch.tensor([2.0, 3.0, 4.0]).expand(3, 3) / 9, rtol=0, atol=0.03
        )
    else:
        standard = (points[:, 1:] - 2.0) / log_scale.exp().unsqueeze(-1)
        assert standard.mean().item() == pytest.approx(0.0, abs=0.1)
        assert standard.std().item() == pytest.approx(1.0, abs=0.1)


def test_costly_draws_are_kept():
    elbo = Probe(2)
    guide = AutoImplicit(does_not_broadcast, frame=None)
    ran, pools = [], []
    for _ in range(3):
        elbo.loss(does_not_broadcast, guide, ran)
        pools.append(elbo.prior.sample(40))
    for before, after in zip(pools, pools[1:], strict=False):
        assert after[..., 4:, :].equal(before[..., :-4, :])  # a tenth of them is new
        assert (after[..., :4, :] != before[..., :4, :]).all()
    elbo.loss(does_not_broadcast, guide, [])  # other arguments, perhaps another prior
    assert not torch.isin(elbo.prior.sample(40)[..., 0], pools[-1][..., 0]).any()


def test_draws_of_a_learnt_prior_are_always_new():
    def model():
        scale = pyro.param("s", torch.tensor(1.0))
        does_not_broadcast()
        return scale

    elbo = Probe(2)
    guide = AutoImplicit(model, frame=None)
    pools = []
    for _ in range(2):
        elbo.loss(model, guide)
        pools.append(elbo.prior.sample(20))
    assert not torch.isin(*pools).any()


class Local(nn.Module):
    """Implicit local latents beside an explicit global one."""

    def __init__(self):
        super().__init__()
        self.encoder = MLP(2, 2, context_dim=1)

    def __call__(self):
        pyro.sample("loc", dist.Normal(0.0, 10.0))
        with pyro.plate("rows", 3):
            pyro.sample("z", Implicit(self.encoder, 2, context=torch.arange(3.0).unsqueeze(-1)))


def local_model():
    loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
    with pyro.plate("rows", 3):
        z = pyro.sample("z", dist.Normal(loc, torch.ones(3, 2).T.reshape(3, 2)).to_event(1))
        pyro.sample("y", dist.Normal(z.sum(-1), 1.0), obs=torch.zeros(3))


def test_prior_of_local_latents_given_another_site():
    elbo = Probe(4)
    pyro.set_rng_seed(1)
    guide = Local()
    elbo.loss(local_model, guide)
    prior = elbo.prior
    with poutine.trace() as traced:
        points = prior.sample(300)
    assert prior.memory.on_others
    assert points.shape == (4, 3, 300, 2)
    loc = prior.particles.latents["loc"]
    torch.testing.assert_close(points.mean((1, 2, 3)), loc, rtol=0, atol=0.15)
    torch.testing.assert_close(points.std((1, 2, 3)), torch.ones(4), rtol=0, atol=0.1)
    assert not traced.trace.nodes, traced.trace.nodes  # nothing of all this is seen outside


def test_local_latents_with_a_prior_of_their_own():
    def model():
        with pyro.plate("rows", 3):
            pyro.sample(
                "z",
                dist.Normal(torch.arange(3.0).unsqueeze(-1), 0.5 * torch.ones(3, 2)).to_event(1),
            )

    def guide():
        with pyro.plate("rows", 3):
            pyro.sample("z", Implicit(MLP(2, 2), 2))

    prior = probed(model, guide)
    points = prior.sample(500)
    assert points.shape == (3, 500, 2) and not prior.memory.depends
    torch.testing.assert_close(
        points.mean(1), torch.arange(3.0).unsqueeze(-1).expand(3, 2), rtol=0, atol=0.1
    )


def test_positive_sites_meet_their_prior_in_unconstrained_space():
    def model():
        pyro.sample("x", dist.LogNormal(0.5, 2.0))

    def guide():
        base = Implicit(lambda z: z.squeeze(-1), 1)
        pyro.sample("x", dist.TransformedDistribution(base, [dist.transforms.ExpTransform()]))

    prior = probed(model, guide)
    torch.testing.assert_close(prior.unconstrain(prior.site.value).squeeze(-1), prior.site.value)
    torch.testing.assert_close(prior.site.push(prior.site.value), prior.site.draw)
    points = prior.sample(2000)
    assert points.mean().item() == pytest.approx(0.5, abs=0.2)
    assert points.std().item() == pytest.approx(2.0, abs=0.1)


def test_gradients_of_guide_and_prior():
    """With log q/p given, the gradient is that of the ratio for q and of log p for the prior."""
    spread = torch.tensor(2.0, requires_grad=True)
    loc = torch.tensor(0.7, requires_grad=True)

    def model():
        w = pyro.sample("w", dist.Normal(0.0, spread))
        pyro.sample("y", dist.Normal(w, 1.0), obs=torch.tensor(1.0))

    def guide():
        pyro.sample("w", Implicit(lambda z: loc + z.squeeze(-1), 1))

    class Given(ImplicitELBO):
        site_types = (Implicit,)
        needs_prior = True

        def score_parts(self, site, prior):
            self.draw = site.draw
            return prior.score_parts(3.0 * site.draw)

    Implicit.trained_by.remove("Given")
    elbo = Given(5)
    loss = elbo.differentiable_loss(model, guide)
    w = elbo.draw.detach()
    expected = -(dist.Normal(w, 1.0).log_prob(torch.tensor(1.0)) - 3.0 * w).mean()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    torch.testing.assert_close(loc.grad, -((1.0 - w) - 3.0).mean())
    log_prior = dist.Normal(0.0, other := torch.tensor(2.0, requires_grad=True)).log_prob(w).mean()
    torch.testing.assert_close(spread.grad, -torch.autograd.grad(log_prior, other)[0])


def flat():
    pyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), ()))
    pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0))


def test_refusals():
    with pytest.raises(ValueError, match="'b' .ImproperUniform.*Cure: contrast=\"adaptive\""):
        KIVI_ELBO(2, contrast="prior").loss(flat, AutoImplicit(flat, frame=None))
    KIVI_ELBO(2).loss(flat, AutoImplicit(flat, frame=None))

    def lost():
        latents = {"is_auxiliary": True, "latents": ["nowhere"]}
        x = pyro.sample("aux", Implicit(MLP(1, 1), 1), infer=latents)
        pyro.sample("b", dist.Delta(x.squeeze(-1)))

    with pytest.raises(ValueError, match="'aux'.*'nowhere'.*Cure"):
        KIVI_ELBO(2, contrast="prior").loss(flat, lost)

    def in_plates():
        with pyro.plate("rows", 3):
            infer = {"is_auxiliary": True, "latents": ["loc"]}
            x = pyro.sample("aux", Implicit(MLP(1, 1), 1), infer=infer)
            pyro.sample("z", dist.Delta(x.expand(x.shape[:-1] + (2,)), event_dim=1))
        pyro.sample("loc", dist.Delta(torch.tensor(0.0)))

    with pytest.raises(ValueError, match=r"'aux'.*\['rows'\].*Cure: contrast=\"adaptive\""):
        KIVI_ELBO(2, contrast="prior").loss(local_model, in_plates)
