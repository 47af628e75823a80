# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoMultivariateNormal, AutoNormal

from pyro_implicit.mcmc import warm_start


def model(data):
    """A conjugate normal mean with a positive precision, and vectors in and out of a plate."""
    precision = pyro.sample("precision", dist.Gamma(3.0, 1.0))
    offset = pyro.sample("offset", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("data", len(data)):
        local = pyro.sample("local", dist.Normal(offset.sum(), 1.0))
        pyro.sample("obs", dist.Normal(local, precision.rsqrt()), obs=data)


def hand_written_guide(data):
    pyro.sample("precision", dist.Gamma(30.0, 10.0))
    pyro.sample("offset", dist.Normal(5.0, 0.1).expand([2]).to_event(1))
    pyro.sample("weights", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))
    with pyro.plate("data", len(data)):
        pyro.sample("local", dist.Normal(torch.arange(1.0 * len(data)), 0.01))


UNCONSTRAINED = {"precision": (), "offset": (2,), "weights": (2,), "local": (4,)}


class RecordingNUTS(NUTS):
    """Keeps what each chain starts from; the kernel itself forgets it."""

    def setup(self, *args, **kwargs):
        self.starts = [*getattr(self, "starts", []), dict(self.initial_params)]
        super().setup(*args, **kwargs)


@pytest.mark.parametrize("autoguide", [AutoNormal, AutoMultivariateNormal])
@pytest.mark.parametrize("num_chains", [1, 2])
def test_nuts_runs_from_the_guides_draws(autoguide, num_chains, monkeypatch):
    # With one processor Pyro draws the chains in this process, and says so.
    monkeypatch.setattr(torch.multiprocessing, "cpu_count", lambda: 1)
    data = torch.tensor([1.0, 2.0, 3.0, 4.0])
    guide = autoguide(model)
    guide(data)
    start = warm_start(model, guide, num_chains, data)
    kernel = RecordingNUTS(model)

    def sampler():
        return MCMC(
            kernel,
            num_samples=3,
            warmup_steps=3,
            initial_params=start,
            num_chains=num_chains,
            disable_progbar=True,
        )

    if num_chains == 1:
        mcmc = sampler()
    else:
        with pytest.warns(UserWarning, match="drawn sequentially"):
            mcmc = sampler()
    mcmc.run(data)
    assert len(kernel.starts) == num_chains
    for chain, actual in enumerate(kernel.starts):
        expected = {k: v[chain] if num_chains > 1 else v for k, v in start.items()}
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert {name: tuple(value.shape) for name, value in actual.items()} == UNCONSTRAINED
    samples = mcmc.get_samples()
    assert samples["local"].shape == (3 * num_chains, 4)
    assert (samples["precision"] > 0).all()


def test_shapes_are_those_of_the_kernels_own_starts():
    data = torch.zeros(4)
    kernel = NUTS(model)
    kernel.setup(0, data)
    own = {name: value.shape for name, value in kernel.initial_params.items()}
    start = warm_start(model, hand_written_guide, 1, data)
    assert {name: value.shape for name, value in start.items()} == own


def test_values_are_unconstrained_draws_of_the_guide():
    start = warm_start(model, hand_written_guide, 200, torch.zeros(4))
    # Gamma(30, 10) has mean 3 and the log of it about log 3; the exponential is the transform.
    assert start["precision"].shape == (200,)
    torch.testing.assert_close(start["precision"].exp().mean(), torch.tensor(3.0), rtol=0.1, atol=0)
    assert start["precision"].unique().numel() == 200
    torch.testing.assert_close(
        start["offset"].mean(dim=0), torch.full((2,), 5.0), rtol=0, atol=0.05
    )
    torch.testing.assert_close(start["local"][7], torch.arange(4.0), rtol=0, atol=0.1)
    assert not any(value.requires_grad for value in start.values())


def test_a_point_guide_keeps_its_parameters():
    guide = AutoDelta(model)
    guide(torch.zeros(4))
    before = guide.median()["offset"].clone()
    warm_start(model, guide, 2, torch.zeros(4))["offset"].fill_(99.0)
    warm_start(model, guide, 1, torch.zeros(4))["offset"].fill_(99.0)
    torch.testing.assert_close(guide.median()["offset"], before, rtol=0, atol=0)


def test_composite_guide():
    guide = AutoGuideList(model)
    guide.append(AutoNormal(pyro.poutine.block(model, expose=["precision", "local"])))
    guide.append(AutoMultivariateNormal(pyro.poutine.block(model, hide=["precision", "local"])))
    start = warm_start(model, guide, 3, torch.zeros(4))
    assert {name: tuple(v.shape) for name, v in start.items()} == {
        name: (3, *shape) for name, shape in UNCONSTRAINED.items()
    }


def test_discrete_sites_are_left_to_nuts():
    def mixture(data):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(data)):
            which = pyro.sample("which", dist.Bernoulli(0.5))
            pyro.sample("obs", dist.Normal(loc + which, 1.0), obs=data)

    def guide(data):
        pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(data)):
            pyro.sample("which", dist.Bernoulli(0.3))

    data = torch.zeros(4)
    start = warm_start(mixture, guide, 1, data)
    assert list(start) == ["loc"]
    mcmc = MCMC(
        NUTS(mixture), num_samples=2, warmup_steps=2, initial_params=start, disable_progbar=True
    )
    mcmc.run(data)
    assert mcmc.get_samples()["loc"].isfinite().all()


def test_messages():
    data = torch.zeros(4)
    with pytest.raises(TypeError, match=r"needs the model first.*warm_start\(model, guide, ...\)"):
        warm_start(AutoNormal(model), model, 2, data)
    with pytest.raises(TypeError, match="guide model observes site 'obs'.*model, guide, .args"):
        warm_start(hand_written_guide, model, 2, data)
    with pytest.raises(ValueError, match="num_chains must be at least 1, but got 0"):
        warm_start(model, hand_written_guide, 0, data)
    with pytest.raises(TypeError, match=r"could not run without arguments"):
        warm_start(model, AutoNormal(model), 2)

    def lacking(data):
        pyro.sample("precision", dist.Gamma(30.0, 10.0))

    with pytest.raises(ValueError, match="guide has no site 'offset'"):
        warm_start(model, lacking, 2, data)

    def on_the_boundary(data):
        pyro.sample("precision", dist.Delta(torch.tensor(0.0)))

    def positive(data):
        pyro.sample("precision", dist.Gamma(3.0, 1.0))

    with pytest.raises(ValueError, match="site 'precision': .* on the boundary of its support"):
        warm_start(positive, on_the_boundary, 2, data)


def test_model_keywords_of_our_names_and_flat_priors():
    def flat(num_chains):
        pyro.sample("x", dist.ImproperUniform(dist.constraints.positive, (), (num_chains,)))

    def guide(num_chains):
        pyro.sample("x", dist.LogNormal(0.0, 1.0).expand([num_chains]).to_event(1))

    start = warm_start(flat, guide, 2, model_kwargs={"num_chains": 5})
    assert start["x"].shape == (2, 5) and start["x"].min() < 0
