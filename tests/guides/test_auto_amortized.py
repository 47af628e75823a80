# SPDX-License-Identifier: Apache-2.0
"""Latents of single rows: encoders beside an implicit guide of the others."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_implicit import LIVI_ELBO, AutoAmortized, AutoSemiImplicit, NoisyEncoder, fit
from pyro_implicit.fitting import Fit, default_loss
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.infer.bound import weighted_draws

NUM_ROWS, NOISE = 400, 0.5


def conjugate(x):
    mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    with pyro.plate("rows", NUM_ROWS, subsample_size=len(x)):
        z = pyro.sample("z", dist.Normal(mean, 1.0))
        pyro.sample("x", dist.Normal(z, NOISE), obs=x)


def data():
    generator = torch.Generator().manual_seed(0)
    return 3 + (1 + NOISE**2) ** 0.5 * torch.randn(NUM_ROWS, generator=generator)


def exact(x, new):
    """Mean and sd of the global latent, and of the local ones of new rows."""
    precision = 1 / 100 + NUM_ROWS / (1 + NOISE**2)
    mean, sd = (x.sum() / (1 + NOISE**2) / precision).item(), precision**-0.5
    share = 1 / (1 + NOISE**-2)  # of the prior, in a local latent's posterior
    local = share * (mean + new / NOISE**2)
    return mean, sd, local, math.sqrt(share + (share * sd) ** 2)


def test_exact_posteriors_of_a_conjugate_model(tmp_path):
    x = data()
    loader = DataLoader(TensorDataset(x), batch_size=100, shuffle=True)
    result = fit(
        conjugate, batches=loader, epochs=100, amortize="auto", lr=0.01, seed=0, progress=False
    )
    assert [stage.name for stage in result.stages] == ["amortised"]
    assert isinstance(result.guide.rest, AutoSemiImplicit)
    new = torch.tensor([1.5, 3.0, 4.5])
    mean, sd, local, local_sd = exact(x, new)
    draws = result.sample(4000, new)
    assert draws["mean"].mean().item() == pytest.approx(mean, abs=0.7 * sd)
    assert draws["mean"].std().item() == pytest.approx(sd, rel=0.4)
    assert draws["z"].shape == (4000, 3)
    torch.testing.assert_close(draws["z"].mean(0), local, rtol=0, atol=0.15 * local_sd)
    torch.testing.assert_close(draws["z"].std(0), torch.full((3,), local_sd), rtol=0.1, atol=0)

    with pytest.raises(ValueError, match="argument 0 of the model"):
        result.guide.median()
    medians, levels = result.guide.median(new), result.guide.quantiles([0.16, 0.84], new)
    torch.testing.assert_close(medians["z"], local, rtol=0, atol=0.15 * local_sd)
    assert medians["mean"].shape == () and levels["z"].shape == (2, 3)
    torch.testing.assert_close(levels["z"].diff(dim=0)[0] / 2, draws["z"].std(0), rtol=0.1, atol=0)

    predictive = Predictive(conjugate, guide=result.guide, num_samples=5)
    assert predictive(new)["z"].shape == (5, 3)
    result.save(tmp_path / "fit.pt")
    loaded = Fit.load(tmp_path / "fit.pt", conjugate)
    pyro.set_rng_seed(1)
    again = loaded.sample(10, new)["z"]
    pyro.set_rng_seed(1)
    torch.testing.assert_close(result.sample(10, new)["z"], again)
    with pytest.raises(ValueError, match=r"reads argument 0 of the model, .* which is missing"):
        result.sample(10)


def test_a_local_latent_is_refused_with_the_cure():
    loader = [(torch.randn(20),) for _ in range(20)]
    with pytest.raises(ValueError, match=r"latent 'z' lies in plate 'rows'.*amortize='cond"):
        fit(conjugate, batches=loader, progress=False)
    with pytest.raises(ValueError, match=r"site 'z' has one latent for each.*amortize='cond"):
        fit(conjugate, "auto", torch.randn(20), refine=False, progress=False)


def nested(x, y, count=3):
    """A positive vector and, in one more plate, a number for each row."""
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    rows = pyro.plate("rows", 100, subsample_size=len(x), dim=-1)
    with rows:
        z = pyro.sample("z", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("parts", count, dim=-2):
            part = pyro.sample("part", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(part + weights.sum(), 1.0), obs=y.mT)
        pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x)


@pytest.mark.parametrize("rest", [None, AutoNormal])
def test_supports_events_and_plates(rest):
    x, y = torch.randn(5), torch.randn(5, 3)
    guide = AutoAmortized(nested, rest=rest)
    values = guide(x, y)
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    assert shapes == {"weights": (3,), "z": (5, 2), "part": (3, 5)}
    assert (values["z"] > 0).all()
    loss = default_loss(guide, 2, x, y)
    assert type(loss) is (LIVI_ELBO if rest is None else ImplicitELBO)
    svi = SVI(nested, guide, pyro.optim.ClippedAdam({"lr": 0.01}), loss)
    assert all(math.isfinite(svi.step(x, y)) for _ in range(2))
    svi.step(x[:4], y[:4])  # the last minibatch is smaller
    draws = guide.sample_posterior(7, x[:2], y[:2])
    assert {name: tuple(value.shape) for name, value in draws.items()} == {
        "weights": (7, 3),
        "z": (7, 2, 2),
        "part": (7, 3, 2),
    }


def test_the_density_of_a_given_encoder():
    """Each row's in its place, scaled from the minibatch to all rows."""

    def model(x, y):
        with pyro.plate("rows", 10, subsample_size=len(x)):
            z = pyro.sample("z", dist.LogNormal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    class Encoder(nn.Module):
        def forward(self, x, y):
            assert y.shape == (4, 2)
            return x, 1 + y.sum(-1).square()

    x, y = torch.randn(4), torch.randn(4, 2)
    guide = AutoAmortized(model, {"z": Encoder()})
    assert guide(x, y).keys() == {"z"} and guide.rest is None
    trace = poutine.trace(guide).get_trace(x, y)
    trace.compute_log_prob()
    site = trace.nodes["z"]
    expected = dist.LogNormal(x, 1 + y.sum(-1).square()).log_prob(site["value"])
    torch.testing.assert_close(site["log_prob"], expected * 10 / 4)


@pytest.mark.parametrize("size", [10, 99])
@pytest.mark.parametrize("encoders", ["auto", {"z": lambda x, index: (x, torch.ones_like(x))}])
def test_a_model_that_is_given_its_rows(size, encoders):
    """The plate of the guide has the indices of each call."""

    def model(x, index):
        with pyro.plate("rows", 100, subsample=index):
            z = pyro.sample("z", dist.Normal(0.0, 100.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    guide = AutoAmortized(model, encoders)
    for index in (torch.randperm(100)[:size], torch.randperm(100)[:7]):
        x = index.double()
        trace = poutine.trace(guide).get_trace(x, index)
        replayed = poutine.trace(poutine.replay(model, trace=trace)).get_trace(x, index)
        for one in (trace, replayed):
            assert one.nodes["rows"]["value"].equal(index)
            assert one.nodes["z"]["cond_indep_stack"][0].size == len(index)

    def elsewhere(x):
        with pyro.plate("rows", 100, subsample=start + torch.arange(len(x))):
            z = pyro.sample("z", dist.Normal(0.0, 100.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    pyro.clear_param_store()
    start = 7
    with pytest.raises(ValueError, match="gives plate 'rows' the indices .* as an argument"):
        AutoAmortized(elsewhere)(5.0 + torch.arange(10))
    pyro.clear_param_store()
    start = 0  # as of a model without indices
    guide = AutoAmortized(elsewhere)
    for number in (10, 7):
        trace = poutine.trace(guide).get_trace(5.0 + torch.arange(number))
        assert trace.nodes["rows"]["value"].equal(torch.arange(number))


def test_the_parameter_store_has_the_whole_encoder(tmp_path):
    x, new = 5 + 3 * torch.randn(50), torch.tensor([1.0, 9.0])
    guide = AutoAmortized(conjugate)
    guide(x)
    pyro.set_rng_seed(0)
    expected = guide.sample_posterior(3, new)["z"]
    pyro.get_param_store().save(tmp_path / "store.pt")
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "store.pt")
    other = AutoAmortized(conjugate)
    other(new)
    pyro.set_rng_seed(0)
    torch.testing.assert_close(other.sample_posterior(3, new)["z"], expected)


def test_a_model_that_draws_its_rows():
    x = torch.arange(100.0)

    def model(x):
        with pyro.plate("rows", 100, subsample_size=10) as index:
            z = pyro.sample("z", dist.Normal(0.0, 100.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[index])

    seen = []

    def encoder(rows):
        seen.append(rows)
        return rows, torch.full_like(rows, 1e-3)

    guide = AutoAmortized(model, {"z": encoder})
    trace = poutine.trace(guide).get_trace(x)
    index = trace.nodes["rows"]["value"]
    assert index.shape == (10,) and seen[-1].equal(x[index])
    replayed = poutine.trace(poutine.replay(model, trace=trace)).get_trace(x)
    assert replayed.nodes["x"]["value"].equal(x[index])
    assert guide.sample_posterior(3, x)["z"].shape == (3, 100)  # of all rows


def test_weights_of_all_rows_after_minibatches():
    """Each row's likelihood and density count once, whatever the first minibatch had."""
    x = data()
    guide = AutoAmortized(conjugate, {"z": lambda x: (x, torch.full_like(x, 0.5))}, AutoNormal)
    guide(x[:100])
    rest = dist.Normal(guide.rest.locs.mean, guide.rest.scales.mean)
    found = weighted_draws(conjugate, guide, x, num_samples=5)
    mean, z = found.draws["mean"].unsqueeze(-1), found.draws["z"]
    assert z.shape == (5, NUM_ROWS)
    rows = dist.Normal(mean, 1.0).log_prob(z) + dist.Normal(z, NOISE).log_prob(x)
    rows = rows - dist.Normal(x, 0.5).log_prob(z)
    expected = rows.sum(-1) + dist.Normal(0.0, 10.0).log_prob(mean).squeeze(-1)
    expected = (expected - rest.log_prob(mean).squeeze(-1)).detach()
    torch.testing.assert_close(found.log_weights, expected)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_an_implicit_encoder(shape):
    def model(x):
        with pyro.plate("rows", 50, subsample_size=len(x)):
            prior = dist.LogNormal(torch.zeros(shape), 1.0).to_event(len(shape))
            z = pyro.sample("z", prior)
            mean = z.sum(-1) if shape else z
            pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    x = torch.rand(6)
    encoder = NoisyEncoder(1, max(1, math.prod(shape)), hidden=(8, 8), activation="tanh")
    guide = AutoAmortized(model, {"z": encoder})
    loss = default_loss(guide, 3, x)
    assert isinstance(loss, LIVI_ELBO)
    before = encoder.context_layer.weight.clone()
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.01}), loss)
    assert math.isfinite(svi.step(x)) and not encoder.context_layer.weight.equal(before)
    assert guide.sample_posterior(5, x[:2])["z"].shape == (5, 2, *shape)
    assert (guide.sample_posterior(5, x)["z"] > 0).all()


def test_rows_of_a_plate_that_is_not_subsampled():
    def whole(x):
        pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    x = torch.randn(20)
    for amortize in ("auto", {"z": lambda x: (x, torch.ones_like(x))}):
        guide = AutoAmortized(whole, amortize)
        assert guide(x)["z"].shape == guide.sample_posterior(1, x)["z"][0].shape == (20,)
        assert guide.sample_posterior(2, x[:3])["z"].shape == (2, 3)
        assert set(guide._rows) == {"rows"} and guide.rest is not None
        for few in (x[:5], torch.randn(30)):  # a plate of the size of each minibatch
            site = poutine.trace(guide).get_trace(few).nodes["z"]
            assert site["scale"] == 1.0 and site["cond_indep_stack"][0].size == len(few)


def test_effects_of_columns_belong_to_no_row():
    def model(x):
        rows = pyro.plate("rows", 100, subsample_size=len(x), dim=-2)
        columns = pyro.plate("columns", x.shape[1], dim=-1)
        with columns:
            effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        with rows:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with rows, columns:
            pyro.sample("x", dist.Normal(z + effect, 1.0), obs=x)

    guide = AutoAmortized(model)
    assert guide(torch.randn(20, 20))["z"].shape == (20, 1)
    assert set(guide._rows) == {"rows"} and list(guide.rest.prototype_trace.nodes) == ["effect"]


def labelled(x, w):
    """As in semi-supervised autoencoders: a class and a continuous latent of each row."""
    with pyro.plate("rows", NUM_ROWS, subsample_size=len(x)):
        y = pyro.sample("y", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, NOISE), obs=x)
        pyro.sample("w", dist.Normal(2.0 * y + z, 1.0), obs=w)


def labelled_batch(x, w):
    """The same with the plate of the batch, a global latent, and a global class."""
    shift = pyro.sample("shift", dist.Bernoulli(0.3))
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        y = pyro.sample("y", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
        z = pyro.sample("z", dist.Normal(mean, 1.0))
        pyro.sample("x", dist.Normal(z, NOISE), obs=x)
        pyro.sample("w", dist.Normal(2.0 * y + z + shift, 1.0), obs=w)


@pytest.mark.parametrize("model", [labelled, labelled_batch])
@pytest.mark.parametrize("amortize", ["auto", {"z": lambda x, w: (0.8 * x, 0.4 + 0.1 * w**2)}])
def test_discrete_latents_are_summed_out_as_by_pyro(model, amortize):
    x, w = torch.randn(2, 20)
    guide = AutoAmortized(model, amortize, AutoNormal)
    names = {"z"} if model is labelled else {"z", "mean"}
    assert guide(x, w).keys() == guide.sample_posterior(2, x, w).keys() == names
    ours, pyros = ImplicitELBO(1), TraceEnum_ELBO(max_plate_nesting=1)
    ours.loss(model, guide, x, w)  # the first step makes another run
    losses = []
    for elbo, one in ((ours, model), (pyros, config_enumerate(model))):
        pyro.set_rng_seed(1)
        losses.append(elbo.loss(one, guide, x, w))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    svi = SVI(config_enumerate(model), guide, pyro.optim.Adam({"lr": 0.01}), LIVI_ELBO(4))
    assert math.isfinite(svi.step(x, w)) and math.isfinite(svi.step(x, w))


def test_a_fit_with_a_class_of_each_row_reaches_the_evidence():
    def model(x, w):
        with pyro.plate("rows", NUM_ROWS, subsample_size=len(x)):
            y = pyro.sample("y", dist.Bernoulli(torch.tensor(0.3)))
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, NOISE), obs=x)
            pyro.sample("w", dist.Normal(2.0 * y, 1.0), obs=w)

    x, w = (1 + NOISE**2) ** 0.5 * torch.randn(NUM_ROWS), 2 * torch.randn(NUM_ROWS)
    batches = TensorDataset(x, w)
    loader = DataLoader(batches, batch_size=100)
    result = fit(
        model, batches=loader, epochs=150, amortize="auto", lr=0.01, seed=0, progress=False
    )
    classes = [math.log(p) + dist.Normal(m, 1.0).log_prob(w) for p, m in ((0.7, 0.0), (0.3, 2.0))]
    evidence = torch.logaddexp(*classes) + dist.Normal(0.0, (1 + NOISE**2) ** 0.5).log_prob(x)
    loss = torch.tensor(result.losses[-80:]).mean().item()
    assert loss == pytest.approx(-evidence.sum().item(), abs=0.03 * NUM_ROWS)
    assert list(result.sample(3, x[:2], w[:2])) == ["z"]


def test_discrete_latents_that_are_not_summed_out():
    x, w = torch.randn(2, 20)
    guide = AutoAmortized(labelled, rest=AutoNormal)
    with pytest.raises(
        ValueError, match="latents 'y' of the model are summed out.*Cure: vectorize"
    ):
        ImplicitELBO(4, vectorize_particles="plate").loss(labelled, guide, x, w)
    for vectorize in ("vmap", False):
        ImplicitELBO(4, vectorize_particles=vectorize).loss(labelled, guide, x, w)
    with pytest.raises(ValueError, match="names 'y', a discrete latent, .* Cure: leave it out"):
        AutoAmortized(labelled, {"z": nn.Identity(), "y": nn.Identity()})(x, w)

    def only_classes(x):
        with pyro.plate("rows", len(x)):
            y = pyro.sample("y", dist.Bernoulli(torch.tensor(0.3)))
            pyro.sample("x", dist.Normal(y, 1.0), obs=x)

    with pytest.raises(
        ValueError, match="continuous latents in a plate of data, and the model has"
    ):
        AutoAmortized(only_classes)(x)

    def counts(x):
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            y = pyro.sample("y", dist.Poisson(z.exp()))
            pyro.sample("x", dist.Normal(y, 1.0), obs=x)

    with pytest.raises(
        ValueError, match=r"site 'y' is a discrete latent \(Poisson\) that Pyro can"
    ):
        AutoAmortized(counts)(x)


def test_what_is_refused():
    x = torch.randn(20)
    with pytest.raises(ValueError, match="amortize= names 'w', which is not a latent of the model"):
        AutoAmortized(conjugate, {"z": nn.Identity(), "w": nn.Identity()})(x)
    with pytest.raises(ValueError, match=r"latent 'mean' lies in the plates \[\], but the plate"):
        AutoAmortized(conjugate, {"mean": nn.Identity()})(x)
    with pytest.raises(ValueError, match=r"latent 'z' lies in plate 'rows', .* names only \['w'\]"):
        AutoAmortized(conjugate, {"w": nn.Identity()})(x)
    for wrong in ("all", ["z"]):
        with pytest.raises(ValueError, match='amortize must be "auto" or a dict'):
            AutoAmortized(conjugate, wrong)

    def without_rows(x):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("effects", 3):
            effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("x", dist.Normal(mean + effect.sum(), 1.0), obs=x)

    with pytest.raises(ValueError, match="plate of data, and the model has none"):
        AutoAmortized(without_rows)(x)

    def closed_over():
        conjugate(x)

    with pytest.raises(ValueError, match="plate 'rows' has 20 rows, but no argument .* Cure: pass"):
        AutoAmortized(closed_over)()

    def without_size(x):
        with pyro.plate("rows"):
            z = pyro.sample("z", dist.Normal(torch.zeros(len(x)), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    with pytest.raises(ValueError, match=r"plate 'rows' has no size.* Cure: pyro.plate\('rows', l"):
        AutoAmortized(without_size)(x)

    def by_index(x, index):  # rows in the last dimension, which the encoder does not read
        with pyro.plate("rows", 40, subsample=index):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[0])

    with pytest.raises(
        ValueError, match="plate 'rows' has 20 rows, .*index of the rows does not count"
    ):
        AutoAmortized(by_index)(x.unsqueeze(0), torch.arange(20))
    guide = AutoAmortized(by_index)
    guide(x.unsqueeze(0).expand(20, 20), torch.arange(20))
    assert guide._rows["rows"].places == [0]
    short = AutoAmortized(conjugate, {"z": lambda x: (x[:3], x[:3].exp())})
    with pytest.raises(ValueError, match=r"encoder of 'z' gave .* \(3,\) for 20 rows of 1"):
        short(x)
    with pytest.raises(ValueError, match="refine moves draws of all latents"):
        fit(conjugate, "auto", x, amortize="auto", refine=True)
    with pytest.raises(ValueError, match="amortize= builds its own guide, but a guide was given"):
        fit(conjugate, AutoNormal(conjugate), x, amortize="auto")
