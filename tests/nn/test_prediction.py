# SPDX-License-Identifier: Apache-2.0
"""``predict``: means over draws, from whatever stands for a posterior."""

from __future__ import annotations

from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_implicit import fit
from pyro_implicit.fitting import Fit
from pyro_implicit.guides.sampler import StoredDraws
from pyro_implicit.nn import classifier, evaluate, predict, regressor, to_bayesian_
from tests.devices import ELSEWHERE, Elsewhere

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


X, Y = normal(7, 3), normal(7)
LABELS = torch.tensor([0, 1, 1, 0, 1, 1, 0])
WEIGHTS = {"weight": normal(20, 2, 3), "bias": normal(20, 2)}


def labels_model():
    return classifier(to_bayesian_(nn.Linear(3, 2).double()), 70)


def probabilities(weights=WEIGHTS):
    logits = torch.einsum("nd,scd->snc", X, weights["weight"]) + weights["bias"].unsqueeze(1)
    return logits.softmax(-1)


def joined(found, name):
    return torch.cat([getattr(batch, name) for batch in found])


def test_small_variances_of_probabilities_are_no_rounding():
    """Confident draws, in single precision."""
    weights = {"weight": torch.zeros(20, 2, 3), "bias": torch.zeros(20, 2)}
    weights["bias"][:, 0] = 9 + 1e-2 * torch.randn(20)
    model = classifier(to_bayesian_(nn.Linear(3, 2).float()), 70)
    weights = {name: value.float() for name, value in weights.items()}
    (found,) = predict(weights, [X.float()], model=model)
    exact = weights["bias"].double().softmax(-1).var(0, unbiased=False).sum()
    torch.testing.assert_close(found.epistemic.double(), exact.expand(7), rtol=0.02, atol=0)


@pytest.mark.parametrize("size", [7, 3])
def test_labels(size):
    found = list(predict(WEIGHTS, X.split(size), model=labels_model()))
    each = probabilities()
    mean = each.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    own = -(each * each.log()).sum(-1).mean(0)
    assert len(found) == -(-7 // size) and found[0].num_samples == 20
    torch.testing.assert_close(joined(found, "probability"), mean)
    torch.testing.assert_close(joined(found, "entropy"), entropy)
    torch.testing.assert_close(joined(found, "mutual_information"), entropy - own)
    spread = each.var(0, unbiased=False).sum(-1)
    torch.testing.assert_close(joined(found, "epistemic"), spread)
    assert found[0].mean is None and found[0].log_prob is None


@pytest.mark.parametrize("noise", ["heteroscedastic", "precision"])
def test_numbers(noise):
    prior = noise if noise == "heteroscedastic" else dist.Gamma(2.0, 1.0)
    draws, outputs = dict(WEIGHTS), 2
    if noise == "precision":
        draws = {"weight": normal(20, 1, 3), "bias": normal(20, 1), "precision": normal(20).exp()}
        outputs = 1
    model = regressor(to_bayesian_(nn.Linear(3, outputs).double()), 70, noise=prior)
    found = list(predict(draws, X.split(4), model=model))
    output = torch.einsum("nd,scd->snc", X, draws["weight"]) + draws["bias"].unsqueeze(1)
    mean = output[..., 0]
    if noise == "precision":
        variance = (1 / draws["precision"]).mean().expand(7)
    else:
        variance = (nn.functional.softplus(output[..., 1]) + 1e-6).square().mean(0)
    torch.testing.assert_close(joined(found, "mean"), mean.mean(0))
    torch.testing.assert_close(joined(found, "aleatoric"), variance)
    torch.testing.assert_close(joined(found, "epistemic"), mean.var(0, unbiased=False))


def test_variances_far_from_zero():
    """In float32, where squares of the values would leave nothing of their variance."""
    model = regressor(to_bayesian_(nn.Linear(1, 1)), 70, noise=0.1)
    bias = 1e4 + torch.linspace(-1, 1, 21).unsqueeze(-1)
    found = next(predict({"weight": torch.zeros(21, 1, 1), "bias": bias}, [torch.zeros(2, 1)],
                         model=model))  # fmt: skip
    torch.testing.assert_close(found.epistemic, bias.var(unbiased=False).expand(2))


def hand_written(x, y=None):
    logits = NET(x)
    with pyro.plate("rows", 70 if y is not None else len(x), subsample_size=len(x)):
        return pyro.sample("label", dist.Categorical(logits=logits), obs=y)


NET = to_bayesian_(nn.Linear(3, 2).double())


def test_a_model_by_hand_and_loaders_with_labels():
    loader = DataLoader(TensorDataset(X, LABELS), batch_size=4)
    found = joined(predict(WEIGHTS, loader, model=hand_written), "probability")
    torch.testing.assert_close(found, probabilities().mean(0))


def test_yes_and_no():
    net = to_bayesian_(nn.Linear(3, 1).double())

    def model(x, y=None):
        logits = net(x).squeeze(-1)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    draws = {"weight": normal(20, 1, 3), "bias": normal(20, 1)}
    yes = (torch.einsum("nd,scd->sn", X, draws["weight"]) + draws["bias"]).sigmoid().mean(0)
    found = joined(predict(draws, [X], model=model), "probability")
    torch.testing.assert_close(found, torch.stack([1 - yes, yes], -1))


@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_a_model_that_goes_on_with_its_targets(kind):
    """They are on the model's device, and of the type that their distribution has."""

    def model(x, y=None):
        output = torch.einsum("ni,oi->no", x, pyro.sample("weight", prior))
        fn = dist.Categorical(logits=output) if is_label else dist.Normal(output[..., 0], 1.0)
        with pyro.plate("rows", len(x)):
            y = pyro.sample("y", fn, obs=y)
        pyro.deterministic("later", eye[y] if is_label else y @ x)

    is_label = kind == "labels"
    with Elsewhere():
        weights, x = WEIGHTS["weight"].to(ELSEWHERE), X.to(ELSEWHERE)
        eye = torch.eye(2).to(ELSEWHERE)
        prior = dist.Normal(torch.zeros_like(weights[0]), 1.0).to_event(2)
        (found,) = predict({"weight": weights}, [x], model=model)
        mean = (found.probability if is_label else found.mean).cpu()
    each = torch.einsum("nd,scd->snc", X, WEIGHTS["weight"])
    torch.testing.assert_close(mean, each.softmax(-1).mean(0) if is_label else each[..., 0].mean(0))


def stream():
    """As what ``refine`` with minibatches gives."""
    take = lambda rows: {name: value[rows] for name, value in WEIGHTS.items()}  # noqa: E731
    return SimpleNamespace(num_chains=4, num_draws=5, stream=None, take=take)


SOURCES = {
    "stored": lambda: StoredDraws(WEIGHTS),
    "samples": lambda: SimpleNamespace(get_samples=lambda: WEIGHTS),
    "stream": stream,
    "fit": lambda: Fit(StoredDraws(WEIGHTS), source=(labels_model(), (), {})),
    "refined fit": lambda: Fit(None, refined=stream(), source=(labels_model(), (), {})),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources(name):
    model = None if "fit" in name else labels_model()
    found = next(predict(SOURCES[name](), [X], model=model))
    torch.testing.assert_close(found.probability, probabilities().mean(0))
    few = next(predict(SOURCES[name](), [X], 3, model=model))
    three = {key: value[[0, 10, 19]] for key, value in WEIGHTS.items()}  # evenly spaced
    torch.testing.assert_close(few.probability, probabilities(three).mean(0))


def test_several_labels_a_row():
    net = to_bayesian_(nn.Linear(3, 2).double())

    def model(x, y=None):
        logits = net(x)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)

    logits = torch.einsum("nd,scd->snc", X, WEIGHTS["weight"]) + WEIGHTS["bias"].unsqueeze(1)
    found = joined(predict(WEIGHTS, [X], model=model), "probability")
    torch.testing.assert_close(found[..., 1], logits.sigmoid().mean(0))
    y = torch.stack([LABELS, 1 - LABELS], -1)
    with pytest.raises(ValueError, match=r"labels of shape \(2,\), but evaluate scores one. Cure"):
        evaluate(WEIGHTS, [(X, y)], model=model)


@pytest.mark.parametrize("kept", [True, False])
def test_a_guide_gives_all_minibatches_the_same_draws(kept, monkeypatch):
    """Whether they are kept, or made anew, a few at a time, for each."""
    if not kept:
        monkeypatch.setattr("pyro_implicit.nn.prediction.MAX_ENTRIES", 0)
    model = labels_model()
    guide = AutoNormal(model, init_scale=1.0)
    guide(X, LABELS)
    before = torch.get_rng_state()
    whole = list(predict(guide, [X], 50, model=model))
    assert not torch.equal(before, torch.get_rng_state())  # the next call has others
    torch.set_rng_state(before)
    parts = list(predict(guide, X.split(2), 50, model=model))
    for name in ("probability", "mutual_information"):
        torch.testing.assert_close(joined(parts, name), joined(whole, name))
    other = list(predict(guide, [X], 50, model=model))
    assert not torch.allclose(joined(other, "probability"), joined(whole, "probability"))


def shuffled(**options):
    return DataLoader(TensorDataset(X, LABELS), batch_size=4, shuffle=True, **options)


def test_a_seed_repeats_the_predictions_and_leaves_the_callers_streams():
    """Draws of a guide, targets and the order of a shuffled loader."""
    model = labels_model()
    guide = AutoNormal(model, init_scale=1.0)
    guide(X, LABELS)

    def all_of(seed):
        before = torch.get_rng_state()
        options = {"model": model, "seed": seed, "draws": True}
        found = []
        for batch in predict(guide, shuffled(), 50, **options):
            found.append(batch)
            torch.rand(seed or 1)  # the caller's own draws change nothing
        parts = [joined(found, "probability"), torch.cat([batch.draws for batch in found], 1)]
        torch.set_rng_state(before)
        list(predict(guide, shuffled(), 50, **options))
        assert torch.equal(torch.get_rng_state(), before) == (seed is not None)
        return parts

    for first, again, other in zip(all_of(3), all_of(3), all_of(4), strict=True):
        assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(all_of(None)[0], all_of(None)[0])
    test = [(X, LABELS)]
    scores = [evaluate(guide, test, num_samples=5, model=model, seed=s).nll for s in (0, 0, 1)]
    assert scores[0] == scores[1] != scores[2]


@pytest.mark.parametrize("probability", [0.5, 0.95])
def test_intervals_against_the_mixtures_distribution_function(probability):
    model = regressor(to_bayesian_(nn.Linear(3, 4).double()), 70, noise="heteroscedastic")
    weights = {"weight": normal(20, 4, 3), "bias": normal(20, 4)}
    options = {"model": model, "interval": probability}
    found = list(predict(weights, X.split(4), **options))
    output = torch.einsum("nd,scd->snc", X, weights["weight"]) + weights["bias"].unsqueeze(1)
    mean, sd = output[..., :2], nn.functional.softplus(output[..., 2:]) + 1e-6
    variance = (sd.square() + mean.square()).mean(0) - mean.mean(0).square()
    torch.testing.assert_close(joined(found, "variance"), variance)
    interval = torch.cat([batch.interval for batch in found], 1)
    assert interval.shape == (2, 7, 2)
    below = dist.Normal(mean, sd).cdf(interval.unsqueeze(1)).mean(1)
    tail = (1 - probability) / 2
    expected = torch.tensor([tail, 1 - tail], dtype=torch.float64).reshape(2, 1, 1).expand(2, 7, 2)
    torch.testing.assert_close(below, expected, atol=1e-12, rtol=0)
    assert found[0].draws is None


def rates(kind):
    """A model whose targets are of another distribution than normal."""

    def model(x, y=None):
        rate = torch.einsum("nd,d->n", x, pyro.sample("weight", prior)).exp()
        with pyro.plate("rows", len(x)):
            pyro.sample("y", kind(rate), obs=y)

    prior = dist.Normal(torch.zeros(3).double(), 1.0).to_event(1)
    return model


def test_targets_of_other_distributions():
    weight = {"weight": 0.1 * normal(5000, 3)}
    positive = rates(lambda rate: dist.Gamma(2.0, rate))
    found = next(predict(weight, [X], 5000, model=positive, seed=0, draws=True))
    each = torch.einsum("nd,sd->sn", X, weight["weight"]).exp()
    below = dist.Gamma(torch.tensor(2.0).double(), each).cdf(found.interval.unsqueeze(1)).mean(1)
    lower = torch.full((7,), 0.05, dtype=torch.float64)
    torch.testing.assert_close(below[0], lower, atol=1e-10, rtol=0)
    assert found.draws.shape == (5000, 7)
    error = (found.variance / 5000).sqrt()
    assert ((found.draws.mean(0) - found.mean).abs() < 4 * error).all()
    torch.testing.assert_close(found.draws.var(0), found.variance, rtol=0.25, atol=0)
    counts = next(predict(weight, [X], 5000, model=rates(dist.Poisson), seed=0, draws=True))
    assert torch.equal(counts.draws, counts.draws.round())
    for end, tail in zip(counts.interval, (0.05, 0.95), strict=True):  # Poisson has no cdf
        up_to, below = (torch.special.gammaincc(end + one, each).mean(0) for one in (1, 0))
        assert (up_to > tail - 0.005).all() and (below < tail + 0.005).all()
    unknown = rates(lambda rate: _Unknown(rate))
    with pytest.raises(ValueError, match="cannot draw targets of _Unknown.*Cure: pyro.infer"):
        next(predict(weight, [X], model=unknown, draws=True))
    assert next(predict(weight, [X], model=unknown)).interval is None


class _Unknown(dist.Normal):
    """A distribution that its ``arg_constraints`` do not determine."""

    def __init__(self, loc):
        super().__init__(loc, 1.0)

    def expand(self, batch_shape, _instance=None):
        return _Unknown(self.loc.expand(batch_shape))


def test_draws_of_labels():
    found = next(predict(WEIGHTS, [X], model=labels_model(), seed=1, draws=True))
    assert found.draws.shape == (20, 7) and found.interval is found.variance is None
    many = {name: value.repeat_interleave(200, 0) for name, value in WEIGHTS.items()}
    found = next(predict(many, [X], 4000, model=labels_model(), seed=1, draws=True))
    share = found.draws.double().reshape(20, 200, 7).mean(1)
    torch.testing.assert_close(share, probabilities()[..., 1], atol=0.15, rtol=0)


def test_from_fit_to_predictions(tmp_path):
    """With minibatches, refined by stochastic gradients; and back from a file."""
    x = torch.randn(60, 2)
    labels = (x[:, 0] > 0).long()
    loader = DataLoader(TensorDataset(x, labels), batch_size=20)
    model = classifier(
        to_bayesian_(nn.Sequential(nn.Linear(2, 26), nn.Tanh(), nn.Linear(26, 2))), 60
    )
    result = fit(model, "auto", batches=loader, epochs=20, refine=True, seed=0, progress=False)
    assert result.chosen == "ensemble" and result.refined is not None
    found = joined(predict(result, [x], 30), "probability")
    assert (found.argmax(-1) == labels).float().mean() > 0.9
    result.save(tmp_path / "fit.pt")
    loaded = Fit.load(tmp_path / "fit.pt", model)
    assert torch.equal(joined(predict(loaded, [x], 30), "probability"), found)


LOADERS = [
    (X, TypeError, r"this is a Tensor. Cure: a DataLoader, or \[x\] for a single one"),
    ({"test": X}, TypeError, "this is a dict"),
    ([{"x": X}], TypeError, "the loader gives dicts. Cure: tuples"),
    ([X.numpy()], TypeError, "the loader gives a ndarray, not a tensor. Cure: torch.as_tensor"),
]


@pytest.mark.parametrize(("loader", "error", "message"), LOADERS)
def test_what_is_no_loader(loader, error, message):
    with pytest.raises(error, match=message):
        next(predict(WEIGHTS, loader, model=labels_model()))


def test_errors():
    model = labels_model()
    with pytest.raises(TypeError, match="a dict does not know its model. Cure: model="):
        next(predict(WEIGHTS, [X]))
    with pytest.raises(TypeError, match="a posterior must be a guide, .*but got int"):
        next(predict(3, [X], model=model))
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        next(predict(WEIGHTS, [X], 0, model=model))
    with pytest.raises(ValueError, match="interval must be a probability between 0 and 1, but got"):
        next(predict(WEIGHTS, [X], model=model, interval=90))
    only = {"weight": WEIGHTS["weight"]}
    with pytest.raises(ValueError, match=r"\['bias', 'y'\] in addition to .*exactly one.*Cure"):
        next(predict(only, [X], model=model))
    with pytest.raises(ValueError, match=r"sites \[\] in addition to .*exactly one"):
        next(predict(WEIGHTS, [X], model=NET))
    with pytest.raises(ValueError, match="AutoNormal was never called.*Cure: train it first"):
        next(predict(AutoNormal(model), [X], model=model))
