# SPDX-License-Identifier: Apache-2.0
"""The autoguides: their frame, their draws, what they save, and what they refuse."""

from __future__ import annotations

import io
from fractions import Fraction

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.infer.autoguide.initialization import init_to_value
from pyro.infer.reparam import NeuTraReparam
from torch import nn

from pyro_implicit import LIVI_ELBO, MLP, MMNN, AutoImplicit, AutoSemiImplicit, GatedMLP
from pyro_implicit.distributions import draw_through
from pyro_implicit.infer.engine.traces import DrawMessenger

both = pytest.mark.parametrize("make_guide", [AutoImplicit, AutoSemiImplicit])


def model(y=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    mix = pyro.sample("mix", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("outer", 2, dim=-2), pyro.plate("inner", 4, dim=-1):
        z = pyro.sample("z", dist.Normal(0.0, scale))
        pyro.sample("y", dist.Normal(z + mix.sum(), 1.0), obs=torch.zeros(2, 4) if y is None else y)


@both
def test_starts_at_init_loc_with_spread_init_scale(make_guide):
    def normal():
        pyro.sample("x", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    loc = torch.tensor([1.0, -2.0, 5.0])
    guide = make_guide(
        normal, init_loc_fn=init_to_value(values={"x": loc}), frame=None, init_scale=0.3
    )
    draws = guide.sample_posterior(20000)["x"]
    torch.testing.assert_close(draws.mean(0), loc, atol=0.02, rtol=0)
    torch.testing.assert_close(draws.std(0), torch.full((3,), 0.3), atol=0.02, rtol=0)


def test_nothing_at_construction_parameters_after_the_first_call():
    guide = AutoSemiImplicit(model)
    assert not list(guide.parameters())
    guide()
    names = set(dict(pyro.get_param_store().named_parameters()))
    assert "AutoSemiImplicit.loc" in names
    assert "AutoSemiImplicit.generator$$$affine.weight" in names
    assert guide.latent_dim == 1 + 2 + 8 and guide.noise_dim == 11


@both
def test_draws_have_the_sites_shapes_and_supports(make_guide):
    guide = make_guide(model, frame=None, init_scale=1.0)
    draws = guide.sample_posterior(50)
    shapes = {name: tuple(draw.shape) for name, draw in draws.items()}
    assert shapes == {"scale": (50,), "mix": (50, 3), "z": (50, 2, 4)}
    assert (draws["scale"] > 0).all()
    torch.testing.assert_close(draws["mix"].sum(-1), torch.ones(50))
    assert draws["z"].unique().numel() == 400 and not draws["z"].requires_grad
    assert len(poutine.trace(lambda: guide.sample_posterior(2)).get_trace().stochastic_nodes) == 0


def test_quantiles_and_median():
    guide = AutoSemiImplicit(model, frame=None, init_scale=0.5)
    levels = guide.quantiles([0.05, 0.5, 0.95], num_samples=4000)
    assert levels["z"].shape == (3, 2, 4) and levels["scale"].shape == (3,)
    assert (levels["z"].diff(dim=0) > 0).all()
    loc, scale = guide.loc[0], 0.5
    expected = (loc + scale * torch.tensor([-1.645, 0.0, 1.645])).exp()
    torch.testing.assert_close(levels["scale"], expected.detach(), rtol=0.1, atol=0.0)
    median = guide.median(num_samples=500)
    assert median["z"].shape == (2, 4) and median["mix"].shape == (3,)
    assert median["mix"].sum().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    "make_base",
    [AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal],
)
def test_a_gaussian_guide_becomes_the_frame(make_base):
    torch.set_default_dtype(torch.float64)
    base = make_base(model)
    base()
    for param in base.parameters():
        param.data += 0.3 * torch.randn_like(param)
    # float32 linspace would do; the point is a location and scale of the base's own
    with pyro.plate("draws", 40000, dim=-3), torch.no_grad():
        draws = {k: v.reshape(40000, -1) for k, v in base().items() if k in ("scale", "z")}
    expected = torch.cat([draws["scale"].log(), draws["z"]], -1)

    guide = AutoSemiImplicit(model, frame=base, noise_scale=1e-3)
    draws = guide.sample_posterior(40000)
    actual = torch.cat([draws["scale"].log()[:, None], draws["z"].flatten(1)], -1)
    sd = expected.std(0)
    assert ((actual.mean(0) - expected.mean(0)) / sd).abs().max() < 0.04
    error = (actual.T.cov() - expected.T.cov()) / (sd[:, None] * sd)
    assert error.abs().max() < 0.06
    assert not any("base" in name for name, _ in guide.named_parameters())


def test_laplace_frame():
    def gaussian():
        x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        pyro.sample("y", dist.Normal(x.sum(-1), 0.5), obs=torch.tensor(1.0))

    base = AutoLaplaceApproximation(gaussian)
    svi = SVI(gaussian, base, pyro.optim.Adam({"lr": 0.1}), pyro.infer.Trace_ELBO())
    for _ in range(200):
        svi.step()
    guide = AutoSemiImplicit(gaussian, frame=base)
    SVI(gaussian, guide, pyro.optim.Adam({"lr": 0.0}), LIVI_ELBO(2)).step()  # finds the frame
    precision = torch.eye(2) + 4 * torch.ones(2, 2)
    covariance = guide.frame_scale_tril @ guide.frame_scale_tril.T
    torch.testing.assert_close(covariance, precision.inverse(), rtol=1e-3, atol=1e-3)


def test_density_in_the_frame_is_that_of_the_transformed_gaussian():
    """theta = m + L (mu + D * (g(z) + rho eta)): the log-determinants of D and L both count."""
    torch.set_default_dtype(torch.float64)

    def normal():
        pyro.sample("x", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    base = AutoMultivariateNormal(normal)
    base()
    base.scale_tril = torch.tensor([[1.0, 0, 0], [0.5, 1, 0], [-0.3, 0.2, 1]])
    base.loc.data = torch.tensor([1.0, -2.0, 30.0])
    guide = AutoSemiImplicit(normal, nn.Linear(3, 3), frame=base, noise_dim=3, noise_scale="learn")
    guide()
    guide.loc = torch.tensor([0.3, -0.6, 2.0])
    guide.scale = torch.tensor([0.5, 2.0, 1.5])
    guide.noise_scale = torch.tensor([0.1, 0.4, 0.2])
    with DrawMessenger(LIVI_ELBO().draw, lambda site: None) as drawn:
        guide()
    (site,) = drawn.sites.values()
    log_q = LIVI_ELBO(1, entropy="quadratic").score_parts(site, None).log_prob - site.log_abs_det
    factor = guide.frame_scale_tril @ guide.scale.diag()
    weight, bias = guide.generator.weight, guide.generator.bias
    covariance = factor @ (weight @ weight.T + guide.noise_scale.square().diag()) @ factor.T
    mean = base.loc + guide.frame_scale_tril @ guide.loc + factor @ bias
    expected = dist.MultivariateNormal(mean, covariance)
    torch.testing.assert_close(log_q, expected.log_prob(site.draw))


def test_saved_guide_draws_without_model_and_data():
    data = torch.full((2, 4), 7.25)
    guide = AutoSemiImplicit(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), LIVI_ELBO(2))
    svi.step(data)
    file = io.BytesIO()
    torch.save(guide, file)
    assert data.numpy().tobytes() not in file.getvalue()
    pyro.set_rng_seed(1)
    expected = guide.sample_posterior(3)
    pyro.clear_param_store()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    pyro.set_rng_seed(1)
    actual = loaded.sample_posterior(3)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0)
    assert Predictive(model, guide=loaded, num_samples=4)()["y"].shape == (4, 2, 4)


def test_load_state_dict_before_the_first_call():
    with pytest.raises(RuntimeError, match=r"call guide\(\*args\) once"):
        AutoSemiImplicit(model).load_state_dict({})


@pytest.mark.parametrize(
    ("generator", "noise_dim", "expected"),
    [
        (lambda size: GatedMLP(7, size), None, 7),
        (nn.Linear(4, 11), 4, 4),
        (lambda size: MMNN((2, 3), ((4, 4),), (4, 3), output_dim=size), None, 6),
        (None, 20, 20),
        (MLP(5, 11), None, 5),
    ],
)
def test_generators(generator, noise_dim, expected):
    guide = AutoSemiImplicit(model, generator, noise_dim)
    guide()
    assert guide.noise_dim == expected
    assert isinstance(SVI(model, guide, pyro.optim.Adam({}), LIVI_ELBO(2)).step(), float)


def test_default_noise_dim_is_capped(monkeypatch):
    monkeypatch.setattr(AutoImplicit, "max_default_noise_dim", 6)
    guide = AutoSemiImplicit(model)
    guide()
    assert guide.noise_dim == 6


@both
def test_particles_differ(make_guide):
    """An expand that returned itself would give every particle the same draw."""
    guide = make_guide(model)
    with pyro.plate("particles", 5, dim=-3):
        trace = poutine.trace(guide).get_trace()
    site = trace.nodes[f"_{make_guide.__name__}_latent"]
    assert site["value"].shape == (5, 1, 1, 11)
    assert site["value"].unique().numel() == 55
    drawn = draw_through(site["fn"], lambda q: q.draw()).draw
    assert drawn.noise.shape[:-1] == (5, 1, 1) and drawn.noise.unique().numel() == 55


def test_auto_guide_list_shares_plates_and_summaries():
    guide = AutoGuideList(model)
    guide.append(AutoSemiImplicit(poutine.block(model, expose=["z"])))
    guide.append(AutoSemiImplicit(poutine.block(model, expose=["mix"]), noise_scale="learn"))
    guide.append(AutoNormal(poutine.block(model, expose=["scale"])))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), LIVI_ELBO(3))
    svi.step()
    assert set(guide.median()) == {"z", "mix", "scale"}
    assert guide.quantiles([0.1, 0.9])["z"].shape == (2, 2, 4)


@pytest.mark.parametrize("seed", range(4))
def test_an_impossible_start_gives_place_to_another(seed):
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Poisson(x), obs=torch.tensor(2.0))

    pyro.set_rng_seed(seed)
    guide = AutoSemiImplicit(model, frame=None)
    guide()
    assert guide.loc.item() > 0

    def impossible():
        pyro.sample("x", dist.Normal(0.0, 1.0))
        raise ValueError("nothing is possible")

    with pytest.raises(ValueError, match="nothing is possible"):
        AutoSemiImplicit(impossible, frame=None)()


def test_model_without_latents():
    with pytest.raises(RuntimeError, match=r"no latent sites.*observed \('y'\). Cure"):
        AutoSemiImplicit(lambda: pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.ones(())))()


def test_subsampled_local_latents_are_refused_with_the_cure():
    def subsampled():
        with pyro.plate("data", 100, subsample_size=10):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="site 'z'.*100.*plate 'data'.*10.*Cure.*amortize='cond"):
        AutoSemiImplicit(subsampled)()


def latent(fn):
    def only():
        pyro.sample("v", fn)

    return only


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (
            latent(dist.VonMises3D(torch.tensor([1.0, 0.0, 0.0]))),
            {},
            ValueError,
            "'v'. Consider using ProjectedNormal",
        ),
        (latent(dist.Poisson(3.0)), {}, ValueError, "'v' is a discrete latent .*Cure"),
        (
            latent(dist.Normal(torch.zeros(0), 1.0).to_event(1)),
            {},
            RuntimeError,
            r"no elements: 'v' of shape \(0,\). Cure",
        ),
        (model, {"generator": MLP(2, 5)}, ValueError, r"into \(2, 5\)"),
        (model, {"frame": AutoDelta(model)}, ValueError, "AutoDelta"),
    ],
    ids=["support", "discrete", "empty", "generator", "frame"],
)
def test_a_failed_first_call_says_why_each_time(model, options, error, message):
    """Also in SVI, whose first run calls the guide again."""
    guide = AutoSemiImplicit(model, **options)
    for call in (guide, guide, SVI(model, guide, pyro.optim.Adam({}), LIVI_ELBO(2)).step):
        with pytest.raises(error, match=message):
            call()


def test_bad_arguments():
    with pytest.raises(ValueError, match="init_scale"):
        AutoSemiImplicit(model, frame=None, init_scale=0.0)
    for wrong in (-0.1, 0, True, float("nan"), float("inf"), "fixed", None):
        with pytest.raises(ValueError, match="noise_scale must be a positive number"):
            AutoSemiImplicit(model, noise_scale=wrong)
    with pytest.raises(ValueError, match=r"turns noise of shape \(2, 3\) into \(2, 5\).*11"):
        AutoSemiImplicit(model, nn.Linear(3, 5), noise_dim=3)()
    for generator in (nn.Linear(3, 11), nn.Sequential(nn.Tanh(), nn.Linear(3, 11))):
        name = type(generator).__name__
        message = rf"a {name}, takes no noise of shape \(2, 11\): .*Cure: noise_dim=3"
        with pytest.raises(ValueError, match=message):
            AutoSemiImplicit(model, generator)()


@pytest.mark.parametrize("noise_scale", [1, 1.0, Fraction(1), torch.ones(1).numpy()[0]])
def test_any_number_is_a_noise_scale(noise_scale):
    def normal():
        pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    identity = nn.Linear(2, 2, bias=False)
    nn.init.eye_(identity.weight)
    guide = AutoSemiImplicit(
        normal, identity, 2, frame=None, init_scale=1.0, noise_scale=noise_scale
    )
    draws = guide.sample_posterior(20_000)["x"]
    torch.testing.assert_close(draws.var(0), torch.full((2,), 2.0), rtol=0.05, atol=0)
    assert type(guide.noise_scale) is float


def test_bad_frames():
    with pytest.raises(ValueError, match="frame must be a Gaussian autoguide.*AutoIAFNormal"):
        AutoSemiImplicit(model, frame=AutoIAFNormal(model))()
    with pytest.raises(ValueError, match="covers the sites"):
        part = poutine.block(model, hide=["z"])
        AutoSemiImplicit(model, frame=AutoNormal(part))()

    def flat():
        pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("upside_down", 5 * pyro.sample("z", dist.Normal(0.0, 1.0)) ** 2)

    with pytest.raises(ValueError, match="no positive definite Hessian"):
        AutoSemiImplicit(flat, frame=AutoLaplaceApproximation(flat))()


def test_neutra_refuses():
    guide = AutoSemiImplicit(model)
    guide()
    with pytest.raises(ValueError, match="get_transform"):
        NeuTraReparam(guide).reparam(model)()
