# SPDX-License-Identifier: Apache-2.0
"""``fit(batches=loader)``."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_implicit import fit
from pyro_implicit.density.model import SubsampledError
from pyro_implicit.fitting import FitPolicy, auto, stages
from pyro_implicit.fitting.policy import Schedule, TrainingPolicy
from pyro_implicit.guides import AutoSemiImplicit
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.nn import to_bayesian_
from pyro_implicit.runtime.clock import TimeLimit

QUIET = {"seed": 0, "progress": False}
TRUE_SLOPE = 0.7


def rows(number=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, generator=generator)
    return x, TRUE_SLOPE * x + 0.5 * torch.randn(number, generator=generator)


def loader(*tensors, batch_size=50):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=True)


def line(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 400, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)


def exact_posterior():
    x, y = rows()
    precision = 1 + x.square().sum() / 0.25
    return (x @ y / 0.25 / precision).item(), precision.rsqrt().item()


def test_a_line():
    result = fit(line, AutoNormal(line), batches=loader(*rows()), epochs=30, lr=0.02, **QUIET)
    assert len(result.losses) <= 30 * 8
    mean, sd = exact_posterior()
    draws = result.sample(4000)["slope"]
    assert draws.mean().item() == pytest.approx(mean, abs=0.6 * sd)
    assert draws.std().item() == pytest.approx(sd, rel=0.4)


@pytest.mark.parametrize("least_steps, num_steps", [(30, 32), (5, 16)])
def test_default_epochs_make_a_number_of_steps(least_steps, num_steps):
    """Of eight minibatches."""
    policy = FitPolicy(training=TrainingPolicy(epochs=2, least_steps=least_steps))
    result = fit(line, AutoNormal(line), batches=loader(*rows()), policy=policy, **QUIET)
    assert len(result.losses) == num_steps


def test_refined_by_stochastic_gradients():
    guide = AutoNormal(line)
    options = {"batches": loader(*rows()), "epochs": 30, "refine": True}
    result = fit(line, guide, **options, **QUIET)
    mean, sd = exact_posterior()
    assert [stage.name for stage in result.stages] == ["guide", "refine"]
    assert "relaxation times" in result.stages[-1].outcome
    draws = result.sample(2000)["slope"]
    assert draws.mean().item() == pytest.approx(mean, abs=sd)
    assert draws.std().item() == pytest.approx(sd, rel=0.5)


@pytest.mark.filterwarnings("ignore:the chains ran for only")
@pytest.mark.filterwarnings("ignore:the velocities' temperature")  # on a busy machine: few steps
@pytest.mark.parametrize("refine", [True, "auto"])
def test_chains_keep_to_the_time_and_training_leaves_them_half(refine, monkeypatch):
    given = []
    train = stages.train

    def spy(*args, max_seconds, **kwargs):
        given.append(max_seconds)
        return train(*args, max_seconds=max_seconds, **kwargs)

    monkeypatch.setattr(stages, "train", spy)
    # A busy machine may need longer than the limit before the training begins.
    monkeypatch.setattr(TimeLimit, "left", lambda self, share=1.0: 0.3 * share)
    options = {"batches": loader(*rows()), "epochs": 10**4, "max_seconds": 0.3}
    result = fit(line, AutoNormal(line), **options, refine=refine, **QUIET)
    if refine is True:
        assert given[0] == 0.15 and result.refined.stopped == "max_seconds"
    else:
        assert given[0] == 0.3 and result.refined is None


def test_a_network_of_many_weights():
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    labels = (x[:, 0] * x[:, 1] > 0).long()
    net = to_bayesian_(nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 2)))
    assert isinstance(net, PyroModule)

    def model(x, labels=None):
        logits = net(x)
        with pyro.plate("rows", 200, subsample_size=len(x)):
            pyro.sample("label", dist.Categorical(logits=logits), obs=labels)

    result = fit(model, "auto", batches=loader(x, labels), epochs=50, lr=0.03, **QUIET)
    assert isinstance(result.guide, AutoNormal) and result.chosen == "mean-field"
    found = Predictive(model, guide=result.posterior, num_samples=30)(x)["label"]
    share = (found.float().mean(0).round() == labels).float().mean().item()
    assert share > 0.8  # 0.5 by guessing


def test_resumed_it_is_the_same(tmp_path):
    def run(folder, dies_after=-1):
        left = dies_after

        def model(x, y):
            nonlocal left
            left -= 1
            if left == 0:
                raise SystemExit
            line(x, y)

        pyro.clear_param_store()
        options = {"batches": loader(*rows()), "epochs": 2, "checkpoint": folder}
        guide = AutoSemiImplicit(model, frame=None)
        return fit(model, guide, checkpoint_every=3, **options, **QUIET)

    expected = run(None)
    with pytest.raises(SystemExit):
        run(tmp_path, 12)
    assert run(tmp_path).losses == expected.losses and len(expected.losses) == 16


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"epochs": 2}, "epochs=1, but this run has epochs=2"),
        ({"validation": [rows(10)]}, "validation=False, but this run has validation=True"),
    ],
)
def test_a_checkpoint_of_other_epochs(tmp_path, other, message):
    options = {"batches": loader(*rows()), "checkpoint": tmp_path, **QUIET}
    fit(line, AutoNormal(line), epochs=1, **options)
    with pytest.raises(ValueError, match=f"is of a run with {message}.*Cure: another folder"):
        fit(line, AutoNormal(line), **{"epochs": 1, **options, **other})


def unscaled(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)


def test_a_model_that_does_not_scale_its_minibatch():
    with pytest.raises(ValueError, match="takes each of 8 minibatches for all data.*Cure: with"):
        fit(unscaled, "auto", batches=loader(*rows()), **QUIET)


@pytest.mark.parametrize("guide", ["auto", "given"])
def test_nan_in_a_later_minibatch(guide):
    x, y = rows()
    y[330:340] = torch.nan
    batches = list(zip(x.split(50), y.split(50), strict=True))
    guide = AutoNormal(line) if guide == "given" else guide
    match = "site 'y' in minibatch 7 of a pass over batches is NaN in 10 of 50 elements. Cure"
    with pytest.raises(ValueError, match=match):
        fit(line, guide, batches=batches, epochs=2, **QUIET)


def test_nan_that_is_masked_is_no_reason_to_refuse():
    """Though steps are skipped, for another reason: the loss says so."""
    x, y = rows()
    y[330:340] = torch.nan

    def masked(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 400, subsample_size=len(x)):
            fn = dist.Normal(slope * x, 0.5).mask(~y.isnan())
            pyro.sample("y", fn, obs=y)
        pyro.factor("lost", torch.tensor(torch.nan if y.isnan().any() else 0.0))

    batches = list(zip(x.split(50), y.split(50), strict=True))
    with pytest.warns(UserWarning, match="2 of 16 steps of 'guide' were skipped.*Cure") as caught:
        result = fit(masked, AutoNormal(masked), batches=batches, epochs=2, **QUIET)
    assert caught[0].filename == __file__
    assert result.stages[-1].outcome.startswith("16 steps (2 skipped)")


@pytest.mark.parametrize("size, particles", [(100, 8), (101, 2)])
def test_particles_of_a_given_guide(monkeypatch, size, particles):
    """Few of a network, which runs once for each."""

    def model(y):
        pyro.sample("x", dist.Normal(torch.zeros(size), 1.0).to_event(1))
        with pyro.plate("rows", 4, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    def default_loss(guide, number, *args, **kwargs):
        numbers.append(number)
        return ImplicitELBO(1)

    numbers = []
    monkeypatch.setattr(auto, "default_loss", default_loss)
    fit(model, AutoNormal(model), batches=torch.ones(4).split(2), epochs=1, **QUIET)
    assert numbers == [particles]


def test_single_tensors_and_shared_arguments():
    def model(noise, y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 40, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(x, noise), obs=y)

    options = {"batches": torch.ones(40).split(10), "epochs": 3}
    result = fit(model, AutoNormal(model), 0.5, **options, **QUIET)
    assert all(math.isfinite(loss) for loss in result.losses) and len(result.losses) == 12


def test_an_encoder_written_by_hand():
    """Of rows y = z + noise, both of variance 1, where q(z | y) = N(y / 2, 1 / 2) is exact."""
    pyro.set_rng_seed(0)
    y = 2.0**0.5 * torch.randn(300)

    def model(y):
        with pyro.plate("rows", 300, subsample_size=len(y)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    def guide(y):
        slope = pyro.param("slope", torch.tensor(0.0))
        scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
        with pyro.plate("rows", 300, subsample_size=len(y)):
            pyro.sample("z", dist.Normal(slope * y, scale))

    fit(model, guide, batches=DataLoader(y, 50), epochs=40, lr=0.05, loss=ImplicitELBO(4), **QUIET)
    assert pyro.param("slope").item() == pytest.approx(0.5, abs=0.03)
    assert pyro.param("scale").item() == pytest.approx(0.5**0.5, abs=0.03)


def test_interrupted_it_keeps_the_guide():
    left = 10

    def model(x, y):
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        line(x, y)

    result = fit(model, AutoNormal(line), batches=loader(*rows()), **QUIET)
    assert result.interrupted and result.sample(3)["slope"].shape == (3,)
    assert (
        str(result).splitlines()[-1].startswith("interrupted by Ctrl-C: the best guide and draws")
    )


@pytest.mark.parametrize("held_out", [False, True])
def test_interrupted_it_tells_what_it_has(held_out, monkeypatch):
    """Of held-out rows it has the best epoch: later ones move the slope away from them."""
    x, y = rows()
    passes = 0

    class Loader:
        def __iter__(self):
            nonlocal passes
            passes += 1  # the first ones look at the data
            if passes == 9:
                raise KeyboardInterrupt
            return iter(
                [
                    (x[part], y[part] + 20 * x[part] * (passes > 6))
                    for part in torch.arange(400).split(50)
                ]
            )

    options = {"validation": loader(x, y)} if held_out else {}
    options |= {"epochs": 50, "lr": 0.3}
    result = fit(line, AutoNormal(line), batches=Loader(), **options, **QUIET)
    outcome = result.stages[-1].outcome
    assert result.interrupted and "interrupted" in outcome
    assert len(result.losses) in (32, 40, 48) and outcome.startswith(f"{len(result.losses)} steps")
    assert (abs(result.sample(200)["slope"].mean().item()) < 1) == held_out
    assert ("held-out NLL" in outcome) == held_out


def arrays(x, y):
    return list(zip(x.numpy().reshape(8, 50), y.numpy().reshape(8, 50), strict=True))


def test_minibatches_of_arrays():
    """Are the model's to convert: one that does gets what it is written for."""

    def converting(x, y):
        assert isinstance(x, np.ndarray) and isinstance(y, np.ndarray)
        line(torch.from_numpy(x), torch.from_numpy(y))

    result = fit(converting, "auto", batches=arrays(*rows()), epochs=2, **QUIET)
    mean, sd = exact_posterior()
    assert result.sample(4000)["slope"].mean().item() == pytest.approx(mean, abs=0.1 * sd)
    message = r"site 'y' is a NumPy array, but Normal takes a tensor. Cure: torch.as_tensor\(y\)"
    for guide in ("auto", AutoNormal(line)):
        with pytest.raises(TypeError, match=message):
            batches = [(torch.from_numpy(x), y) for x, y in arrays(*rows())]
            fit(line, guide, batches=batches, **QUIET)


def test_minibatches_of_arrays_that_the_model_cannot_multiply():
    def model(x, y):
        slope = pyro.sample("slope", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        with pyro.plate("rows", 400, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x[:, None] @ slope, 0.5), obs=y)

    message = (
        "argument 1 is a NumPy array and argument 2 is a NumPy array. Cure: torch.as_tensor of"
    )
    with pytest.raises(TypeError, match=message):
        fit(model, "auto", batches=arrays(*rows()), **QUIET)
    with pytest.raises(ValueError, match="exhausted after one pass. Cure: .*__iter__ starts anew"):
        fit(model, "auto", batches=(batch for batch in arrays(*rows())), **QUIET)


def autoencoder(x):
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 0.5), obs=x)


def encoder(x):
    slope = pyro.param("slope", torch.tensor(0.0))
    log_scale = pyro.param("log_scale", torch.tensor(0.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("z", dist.Normal(slope * x, log_scale.exp()))


@pytest.mark.parametrize("options", [{"guide": encoder}, {"amortize": "auto"}])
def test_latents_of_the_rows_alone_need_no_scale(options):
    """z given x is normal with mean .8 x and variance .2, whatever factor the ELBO has."""
    x = 1.1 * torch.randn(410, generator=torch.Generator().manual_seed(0))
    result = fit(autoencoder, batches=x.split(50), epochs=40, lr=0.03, **options, **QUIET)
    new = torch.tensor([-1.0, 0.5, 1.0])
    draws = result.sample(4000, new)["z"]
    assert (draws.mean(0) - 0.8 * new).abs().max() < 0.05
    assert (draws.std(0) / 0.2**0.5 - 1).abs().max() < 0.1


def test_unscaled_minibatches_are_refused_if_a_latent_is_global():
    def model(x):
        pyro.sample("mean", dist.Normal(0.0, 1.0))
        autoencoder(x)

    def of_groups(x):  # every minibatch has rows of the same ten groups
        with pyro.plate("groups", 10):
            mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    for one in (model, of_groups):
        with pytest.raises(ValueError, match="no observed site is scaled"):
            fit(one, batches=torch.zeros(40).split(10), amortize="auto", **QUIET)


@pytest.mark.parametrize("size", [None, 40])
@pytest.mark.parametrize("amortize", [None, "auto"])
def test_validation_of_an_autoencoder_is_refused_with_another_score(size, amortize):
    def model(x):
        with pyro.plate("rows", size or len(x), subsample_size=len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        scale = pyro.param("scale", torch.tensor(0.5**0.5))
        with pyro.plate("rows", size or len(x), subsample_size=len(x)):
            pyro.sample("z", dist.Normal(0.5 * x, scale))

    given = "auto" if amortize else guide
    data = {"batches": torch.zeros(40).split(10), "amortize": amortize}
    message = r"single rows. Cure: leave validation out; ImplicitELBO\(8\).loss\(model, result.guid"
    with pytest.raises(ValueError, match=message):
        fit(model, given, validation=[torch.zeros(10)], **data, **QUIET)
    held_out = torch.tensor([1.0, -2.0, 0.5])
    loss = ImplicitELBO(8).loss(model, guide, held_out)
    exact = -dist.Normal(0.0, 2**0.5).log_prob(held_out).sum() * (size or 3) / 3
    assert loss == pytest.approx(exact.item(), rel=1e-4)


def test_held_out_rows_of_other_parts():
    x, y = rows()
    with pytest.raises(
        ValueError, match=r"validation has 1 parts, but one of batches has 2. Cure: a Da"
    ):
        fit(line, "auto", batches=loader(x, y), validation=(x, y), **QUIET)


def test_all_data_are_wanted_of_a_fit_by_minibatches():
    result = fit(line, AutoNormal(line), batches=loader(*rows()), epochs=1, **QUIET)
    for ask in (result.diagnose, lambda: result.target):
        with pytest.raises(SubsampledError, match="fitted by minibatches.*Cure: diagnose"):
            ask()


def test_all_epochs_are_taken():
    """Of a guide that is right from the start, whose loss never falls."""
    guide = AutoNormal(line)
    first = next(iter(loader(*rows())))
    guide(*first)
    mean, sd = exact_posterior()
    guide.locs.slope.data.fill_(mean)
    guide.scales.slope_unconstrained.data.fill_(math.log(math.expm1(sd)))
    # With all data, a training would stand still after 100 steps and end after 220.
    policy = FitPolicy(schedule=Schedule(window=25))
    options = {"epochs": 30, "lr": 1e-5, "policy": policy}
    result = fit(line, guide, batches=loader(*rows()), **options, **QUIET)
    assert len(result.losses) == 30 * 8


def test_means_of_skewed_data():
    """Gradients clipped at each minibatch had the posterior 2.6 sds too low."""
    y = torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(1.2).exp()
    sd = y.std().item()

    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 5.0))
        with pyro.plate("rows", 1000, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(w, sd), obs=y)

    loader = DataLoader(y, batch_size=20, shuffle=True)
    guide = AutoNormal(model)
    fit(model, guide, batches=loader, epochs=20, seed=0, progress=False)
    precision = 1000 / sd**2 + 1 / 25
    exact = y.sum() / sd**2 / precision
    assert abs(guide.locs.w.item() - exact) * precision**0.5 < 0.4


@pytest.mark.parametrize("is_scaled_by_plate", [True, False])
def test_rows_of_a_smaller_minibatch_count_as_others(is_scaled_by_plate):
    """In the same order in all passes; a fixed scale needs no weights."""
    y = torch.cat([torch.randn(100), torch.tensor([20.0])])

    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 5.0))
        size = 101 if is_scaled_by_plate else len(y)
        scale = 1.0 if is_scaled_by_plate else 10.1
        with pyro.plate("rows", size, subsample_size=len(y)), poutine.scale(scale=scale):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    guide = AutoNormal(model)
    fit(model, guide, batches=list(y.split(10)), epochs=40, seed=0, progress=False)
    precision = 101 + 1 / 25
    assert abs(guide.locs.w.item() - y.sum() / precision) * precision**0.5 < 0.6
