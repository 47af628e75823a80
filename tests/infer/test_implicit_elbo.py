# SPDX-License-Identifier: Apache-2.0
"""The engine: where no site is implicit it is Trace_ELBO; where one is, Pyro's handlers hold."""

from __future__ import annotations

import math
import re
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions.score_parts import ScoreParts
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal, AutoNormalMessenger
from pyro.nn import PyroModule, PyroSample
from torch import nn

from pyro_implicit import (
    LIVI_ELBO,
    AutoAmortized,
    AutoImplicit,
    AutoSemiImplicit,
    SemiImplicit,
    infer,
)
from pyro_implicit.guides import AutoEnsemble
from pyro_implicit.infer import AmortizedSVGD_ELBO, ImplicitELBO, NonFiniteError
from pyro_implicit.infer.engine.steps import StepELBO

pytestmark = pytest.mark.usefixtures("double")

MODES = ["vmap", "plate", False]
every_mode = pytest.mark.parametrize("mode", MODES)


def regression(x=None, y=None):
    """Broadcasts, so that every mode can run it."""
    x = torch.linspace(-1, 1, 12).reshape(6, 2) if x is None else x
    y = torch.tensor([0.5, -1.0, 2.0, 0.3, 1.0, -0.2]) if y is None else y
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    bias = pyro.param("bias", torch.tensor(0.2))
    with pyro.plate("groups", 3, dim=-2):
        offset = pyro.sample("offset", dist.Normal(0.0, scale))
        with pyro.plate("data", 6, dim=-1):
            pyro.sample("y", dist.Normal((x * weight).sum(-1) + offset + bias, 1.0), obs=y)


def loss_and_gradients(elbo, model, guide, seed=5, **kwargs):
    """One estimate after a warm-up that lets the ELBO learn the shapes."""
    elbo.loss(model, guide, **kwargs)
    for _, param in pyro.get_param_store().named_parameters():
        param.grad = None
    pyro.set_rng_seed(seed)
    loss = elbo.loss_and_grads(model, guide, **kwargs)
    grads = {
        name: param.grad.clone()
        for name, param in pyro.get_param_store().named_parameters()
        if param.grad is not None
    }
    return loss, grads


def assert_same(actual, expected):
    assert actual[0] == pytest.approx(expected[0], rel=1e-10)
    assert actual[1].keys() == expected[1].keys() and expected[1]
    for name, grad in expected[1].items():
        torch.testing.assert_close(actual[1][name], grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make_guide", [AutoNormal, AutoMultivariateNormal])
@pytest.mark.parametrize("mode", ["vmap", "plate"])
def test_equals_trace_elbo_without_implicit_sites(make_guide, mode):
    guide = make_guide(regression)
    expected = loss_and_gradients(Trace_ELBO(5, vectorize_particles=True), regression, guide)
    elbo = ImplicitELBO(5, vectorize_particles=mode)
    assert_same(loss_and_gradients(elbo, regression, guide), expected)
    assert elbo.vectorize_particles == mode


def test_loop_equals_trace_elbo_without_implicit_sites():
    guide = AutoNormal(regression)
    expected = loss_and_gradients(Trace_ELBO(5), regression, guide)
    elbo = ImplicitELBO(5, vectorize_particles=False)
    assert_same(loss_and_gradients(elbo, regression, guide), expected)


@pytest.mark.parametrize("mode", ["vmap", "plate"])
def test_score_function_sites_as_in_trace_elbo(mode):
    def model():
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", 4):
            flip = pyro.sample("flip", dist.Bernoulli(0.4))
            pyro.sample("y", dist.Normal(flip * rate, 1.0), obs=torch.arange(4.0))

    def guide():
        shape = pyro.param("shape", torch.tensor(1.5))
        probs = pyro.param("probs", torch.tensor([0.2, 0.4, 0.6, 0.8]))
        pyro.sample("rate", dist.Gamma(shape, 1.0))
        with pyro.plate("data", 4):
            pyro.sample("flip", dist.Bernoulli(probs))

    expected = loss_and_gradients(Trace_ELBO(7, vectorize_particles=True), model, guide)
    elbo = ImplicitELBO(7, vectorize_particles=mode)
    assert_same(loss_and_gradients(elbo, model, guide), expected)


def causal(x, t):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)
        pyro.sample("t", dist.Bernoulli(logits=z), obs=t)


def guide_with_observations(x, t):
    """As in pyro.contrib.cevae, and with an observation that the model lacks."""
    a, b, c = (pyro.param(name, torch.tensor(0.1)) for name in "abc")
    auxiliary = {"is_auxiliary": True}
    with pyro.plate("data", len(x)):
        pyro.sample("t", dist.Bernoulli(logits=b * x), obs=t, infer=auxiliary)
        z = pyro.sample("z", dist.Normal(a * x + c * t, 0.6))
        pyro.sample("own", dist.Normal(z, 1.0), obs=x, infer=auxiliary)
    pyro.sample("one", dist.Normal(b, 1.0), obs=x[0], infer=auxiliary)


@every_mode
def test_observed_sites_of_the_guide_as_in_trace_elbo(mode):
    x, t = torch.randn(60), (torch.rand(60) < 0.5).double()
    ours, pyros = ImplicitELBO(4, mode), Trace_ELBO(4, vectorize_particles=mode is not False)
    data = {"x": x, "t": t}
    expected = loss_and_gradients(pyros, causal, guide_with_observations, **data)
    assert_same(loss_and_gradients(ours, causal, guide_with_observations, **data), expected)
    one = loss_and_gradients(ImplicitELBO(1), causal, guide_with_observations, **data)
    assert_same(one, loss_and_gradients(Trace_ELBO(), causal, guide_with_observations, **data))


def test_a_guide_of_observations_alone():
    def model(x):
        pyro.sample("x", dist.Normal(pyro.param("mean", torch.tensor(0.0)), 1.0), obs=x)

    def guide(x):
        pyro.sample("x", dist.Normal(0.0, 2.0), obs=x, infer={"is_auxiliary": True})

    x = torch.tensor(0.7)
    expected = dist.Normal(0.0, 2.0).log_prob(x) - dist.Normal(0.0, 1.0).log_prob(x)
    loss, gradients = loss_and_gradients(ImplicitELBO(4), model, guide, x=x)
    assert loss == pytest.approx(expected.item()) and gradients["mean"].item() == -0.7


@pytest.mark.parametrize("num_particles", [1, 4])
def test_modes_agree_on_implicit_sites(num_particles):
    guide = AutoSemiImplicit(regression, frame=None)
    guide()
    results = [
        loss_and_gradients(LIVI_ELBO(num_particles, vectorize_particles=m), regression, guide)
        for m in MODES
    ]
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_vmap_runs_the_model_once_and_any_network():
    class Net(PyroModule):
        def __init__(self):
            super().__init__()
            self.first = PyroModule[nn.Linear](2, 5)
            self.second = PyroModule[nn.Linear](5, 1)
            for layer in (self.first, self.second):
                for name, value in list(layer.named_parameters()):
                    prior = dist.Normal(0.0, 1.0).expand(value.shape).to_event(value.dim())
                    setattr(layer, name, PyroSample(prior))
            self.runs = 0

        def forward(self):
            self.runs += 1
            x = torch.linspace(-1, 1, 14).reshape(7, 2)
            mean = self.second(self.first(x).relu()).squeeze(-1)
            with pyro.plate("data", 7):
                pyro.sample("y", dist.Normal(mean, 0.5), obs=x[:, 0])

    model = Net()
    guide = AutoNormal(model)
    elbo = ImplicitELBO(9)
    elbo.loss(model, guide)
    model.runs = 0
    vmapped = loss_and_gradients(elbo, model, guide)
    assert model.runs == 2  # the warm-up and the step, nine particles each
    assert elbo.state.runs.mode == "vmap"
    elbo.state.runs.mode, elbo.state.implicit_sites = False, {"x"}  # the guide in a plate still
    assert_same(loss_and_gradients(elbo, model, guide), vmapped)


@pytest.mark.parametrize("mode", MODES)
def test_particles_share_a_minibatch(mode):
    seen = []
    data = torch.arange(20.0)

    def model():
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 20, subsample_size=5) as indices:
            seen.append(indices)
            pyro.sample("y", dist.Normal(loc, 1.0), obs=data[indices])

    elbo = LIVI_ELBO(3, vectorize_particles=mode)
    svi = SVI(model, AutoSemiImplicit(model, frame=None), pyro.optim.Adam({"lr": 1e-3}), elbo)
    svi.step()
    batches = []
    for _ in range(3):
        seen.clear()
        svi.step()
        assert all(s.equal(seen[0]) for s in seen)
        batches.append(seen[0])
    assert not batches[0].equal(batches[1])
    assert elbo.vectorize_particles == mode


@every_mode
def test_subsampled_plate_of_local_latents(mode):
    """The scale of the plate reaches prior, likelihood and the implicit entropy alike."""
    data = torch.randn(8, generator=torch.Generator().manual_seed(1))
    generator = nn.Linear(2, 1, bias=False)

    def model(size):
        with pyro.plate("data", 8, subsample=torch.arange(size)) as indices:
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
            pyro.sample("y", dist.Normal(z.squeeze(-1), 1.0), obs=data[indices])

    def guide(size):
        pyro.module("generator", generator)
        with pyro.plate("data", 8, subsample=torch.arange(size)):
            pyro.sample("z", SemiImplicit(lambda z, c: generator(z) + c, 2, 0.3, data[:size, None]))

    for size in (8, 2):
        elbo = LIVI_ELBO(3, vectorize_particles=mode)
        elbo.loss(model, guide, size)
        pyro.set_rng_seed(0)
        loss = elbo.loss(model, guide, size)
        pyro.set_rng_seed(0)
        ((_, guide_trace),) = elbo._get_traces(model, guide, (size,), {})
        z = guide_trace.nodes["z"]["value"].detach()  # (3, size, 1)
        variance = generator.weight.detach().square().sum() + 0.09
        entropy = 0.5 * (1 + math.log(2 * math.pi) + variance.log())
        normal = dist.Normal(0.0, 1.0)
        log_joint = normal.log_prob(z) + normal.log_prob(data[:size, None] - z)
        expected = -8 / size * (log_joint + entropy).sum() / 3
        assert loss == pytest.approx(expected.item(), rel=1e-10)


@every_mode
def test_poutine_scale_mask_and_block(mode):
    def elbo_of(guide, model):
        elbo = LIVI_ELBO(3, vectorize_particles=mode)
        return loss_and_gradients(elbo, model, guide)

    guide = AutoSemiImplicit(regression, frame=None)
    guide()
    plain = elbo_of(guide, regression)
    doubled = elbo_of(poutine.scale(guide, scale=2.0), poutine.scale(regression, scale=2.0))
    assert doubled[0] == pytest.approx(2 * plain[0], rel=1e-10)
    masked = elbo_of(poutine.mask(guide, mask=False), poutine.mask(regression, mask=False))
    assert masked[0] == 0.0

    hidden = poutine.block(regression, hide=["offset"])
    assert "offset" not in poutine.trace(hidden).get_trace()


@every_mode
@pytest.mark.parametrize("num_particles", [1, 3])
@pytest.mark.parametrize("by_handler", [True, False])
def test_masked_nan_counts_nothing(mode, num_particles, by_handler):
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        here = ~y.isnan()
        fn = dist.Normal(x, torch.ones(len(y)))
        with pyro.plate("rows", len(y)), poutine.mask(mask=here if by_handler else True):
            pyro.sample("y", fn if by_handler else fn.mask(here), obs=y)

    guide = AutoSemiImplicit(model, frame=None)
    y = torch.tensor([0.3, -1.0])
    guide(y)
    losses = []
    for data in (y, torch.cat([y, torch.tensor([math.nan])])):
        pyro.set_rng_seed(1)
        losses.append(LIVI_ELBO(num_particles, vectorize_particles=mode).loss(model, guide, data))
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def test_gradient_of_model_parameters():
    """Type-II maximum likelihood: the bias gets the gradient of the expected log-likelihood."""
    guide = AutoSemiImplicit(regression, frame=None)
    elbo = LIVI_ELBO(4)
    _, grads = loss_and_gradients(elbo, regression, guide)
    bias = pyro.param("bias")
    losses = []
    for step in (1e-5, -1e-5):
        bias.data += step
        pyro.set_rng_seed(5)
        losses.append(elbo.loss(regression, guide))
        bias.data -= step
    assert grads["bias"].item() == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-6)


def test_weights_of_prior_and_entropy():
    guide = AutoSemiImplicit(regression, frame=None)
    guide()

    def loss(prior_weight, entropy_weight):
        elbo = LIVI_ELBO(4, prior_weight=prior_weight, entropy_weight=entropy_weight)
        return loss_and_gradients(elbo, regression, guide)

    plain, no_prior, no_entropy, neither = loss(1, 1), loss(0, 1), loss(1, 0), loss(0, 0)
    assert neither[0] == pytest.approx(no_prior[0] + no_entropy[0] - plain[0], rel=1e-10)

    # Without both terms only the likelihood is left, Jacobians of positive sites included.
    elbo = LIVI_ELBO(4)
    elbo.loss(regression, guide)
    pyro.set_rng_seed(5)
    (traces,) = elbo._get_traces(regression, guide, (), {})
    likelihood = traces[0].nodes["y"]["log_prob_sum"].item() / 4
    assert neither[0] == pytest.approx(-likelihood, rel=1e-10)
    prior = sum(traces[0].nodes[n]["log_prob_sum"] for n in ("scale", "weight", "offset"))
    jacobian = sum(traces[1].nodes[n]["log_prob_sum"] for n in ("scale", "weight", "offset"))
    expected = -likelihood - (prior - jacobian).item() / 4
    assert no_entropy[0] == pytest.approx(expected, rel=1e-10)
    halved = loss(1, 0.5)[0]
    assert halved == pytest.approx((plain[0] + no_entropy[0]) / 2, rel=1e-10)


def branching():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    loc = 1.0 if x.item() > 0 else -1.0
    pyro.sample("y", dist.Normal(loc * x, 1.0), obs=torch.tensor(0.5))


def test_fallback_warns_once_with_cause_and_cure():
    guide = AutoSemiImplicit(branching, frame=None)
    elbo = LIVI_ELBO(3)
    svi = SVI(branching, guide, pyro.optim.Adam({"lr": 1e-3}), elbo)
    with pytest.warns(UserWarning, match=r"one particle at a time.*item\(\).*Cure") as caught:
        svi.step()
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svi.step()
    assert elbo.state.runs.mode is False
    assert elbo.vectorize_particles == "vmap"  # what the user asked for


def of_rows(x, has_class=False):
    with pyro.plate("batch", len(x)):
        first = pyro.sample("first", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        shift = pyro.sample("class", dist.Bernoulli(0.4)) if has_class else 0.0
        second = pyro.sample("second", dist.Normal(first, 1.0).to_event(1))
        pyro.sample("x", dist.Normal(second.sum(-1) + shift, 1.0), obs=x[:, 0])


def rows_guide(kind, is_implicit=False):
    """A guide with a network that accepts no leading dimension of particles."""
    encoder = nn.Linear(3, 2)
    head = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))

    def guide(x, has_class=False):
        pyro.module("encoder", encoder), pyro.module("head", head)
        with pyro.plate("batch", len(x)):
            posterior = dist.Normal(encoder(x), 0.5).to_event(1)
            if is_implicit:
                posterior = SemiImplicit(nn.Linear(2, 2), 2, 0.5)
            second = pyro.sample("second", posterior)
            rows = head(second) if kind == "norm" else second.view(len(x), -1) @ head[0].weight.T
            mean = rows if kind == "norm" else rows[:, :2]
            pyro.sample("first", dist.Normal(mean, 0.5).to_event(1))

    return guide


@pytest.mark.parametrize("kind", ["norm", "view"])
@pytest.mark.parametrize("mode", ["vmap", "plate"])
def test_a_guide_that_accepts_no_particle_dimension_runs_in_a_loop(mode, kind):
    x, guide = torch.randn(24, 3), rows_guide(kind)
    elbo, wanted = ImplicitELBO(4, mode), Trace_ELBO(4)
    message = (
        r"ImplicitELBO runs guide and model one particle at a time, because the guide guide .*"
        r"(running_mean should contain|shapes cannot be multiplied).*, behind site 'second'"
        r".*: 4 particles.* Cure: networks in the guide that accept leading dimensions"
        r".*ImplicitELBO\(4, vectorize_particles=False\)"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        elbo.loss(of_rows, guide, x)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = loss_and_gradients(elbo, of_rows, guide, x=x)
        assert_same(found, loss_and_gradients(wanted, of_rows, guide, x=x))
        same = ImplicitELBO(4, vectorize_particles=False)  # which the warning names
        assert_same(found, loss_and_gradients(same, of_rows, guide, x=x))
        ImplicitELBO(1).loss(of_rows, guide, x)


def test_a_guide_in_a_loop_sums_out_discrete_latents():
    x, guide = torch.randn(24, 3), rows_guide("norm")
    elbo, wanted = ImplicitELBO(4), TraceEnum_ELBO(4, max_plate_nesting=1)
    with pytest.warns(UserWarning, match="one particle at a time"):
        elbo.loss(of_rows, guide, x, True)
    found = loss_and_gradients(elbo, of_rows, guide, x=x, has_class=True)
    marked = config_enumerate(of_rows)
    assert_same(found, loss_and_gradients(wanted, marked, guide, x=x, has_class=True))


def test_a_guide_that_cannot_run_in_a_loop_names_the_cure():
    x = torch.randn(24, 3)
    implicit = rows_guide("norm", is_implicit=True)
    message = r"running_mean.*, as its implicit site 'second' needs. Cure: networks .*particles=1$"
    with pytest.raises(ValueError, match=message):
        LIVI_ELBO(4).loss(of_rows, implicit, x)
    LIVI_ELBO(1).loss(of_rows, implicit, x)
    with pytest.raises(ValueError, match="no .view with fixed sizes$"):  # it compares particles
        AmortizedSVGD_ELBO(4).loss(of_rows, implicit, x)


def test_a_later_error_of_the_guide_is_its_own():
    def guide(x):
        if steps > 1:
            raise KeyError("mine")
        with pyro.plate("batch", len(x)):
            for name in ("first", "second"):
                pyro.sample(name, dist.Normal(torch.zeros(2), 1.0).to_event(1))

    elbo, steps = ImplicitELBO(4), 0
    elbo.loss(of_rows, guide, torch.randn(24, 3))
    steps = 2
    with warnings.catch_warnings(), pytest.raises(KeyError, match="mine"):
        warnings.simplefilter("error")
        elbo.loss(of_rows, guide, torch.randn(24, 3))


def test_fallback_when_vmap_would_be_silently_different():
    dropout = nn.Dropout(0.5)

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([50]).to_event(1))
        pyro.sample("y", dist.Normal(dropout(x).sum(), 1.0), obs=torch.tensor(5.0))

    with pytest.warns(UserWarning, match="random beyond its latents"):
        LIVI_ELBO(2).loss(model, AutoSemiImplicit(model, frame=None, init_scale=1.0))


def test_error_in_the_model_is_the_models_own():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        pyro.sample("y", dist.Normal(x @ torch.ones(4), 1.0), obs=torch.tensor(0.0))

    with pytest.raises(RuntimeError, match="size"):
        LIVI_ELBO(2).loss(model, AutoSemiImplicit(model, frame=None))


def test_pyros_checks_run_at_the_first_step():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0).expand([4]), obs=torch.zeros(4))  # no plate

    with pytest.raises(ValueError, match="y"):
        LIVI_ELBO(2).loss(model, AutoSemiImplicit(model, frame=None))


def test_a_mask_that_changes_after_its_site_is_refused_at_the_first_step():
    """Pyro computes densities at the end of the run, with the final mask."""

    def model(y):
        x, seen = pyro.sample("x", dist.Normal(0.0, 1.0)), torch.zeros(2, dtype=torch.bool)
        with pyro.plate("rows", 2):
            for t in range(2):
                with poutine.mask(mask=seen):
                    pyro.sample(f"y_{t}", dist.Normal(x, 1.0), obs=y[t])
                seen |= y[t] > 0

    message = "changes the mask of site 'y_0' after it.* Cure: a new tensor"
    with pytest.raises(ValueError, match=message):
        LIVI_ELBO(2).loss(model, AutoNormal(model), torch.ones(2, 2))


def test_guide_messenger():
    guide = AutoNormalMessenger(regression)
    assert math.isfinite(ImplicitELBO(2).loss(regression, guide))


def test_untrainable_site_names_site_and_cure():
    with pytest.raises(ValueError, match="cannot train site .*: use one of KIVI_ELBO, "):
        LIVI_ELBO(2).loss(regression, AutoImplicit(regression, frame=None))
    with pytest.raises(ValueError, match="Cure: use one of LIVI_ELBO, "):
        ImplicitELBO(2).loss(regression, AutoSemiImplicit(regression, frame=None))
    with pytest.raises(ValueError, match="LIVI_ELBO"):  # Pyro's own ELBO on an implicit guide
        Trace_ELBO().loss(regression, AutoSemiImplicit(regression, frame=None))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_particles": 0}, "num_particles"),
        ({"vectorize_particles": "loop"}, "vectorize_particles"),
        ({"nonfinite": "ignore"}, "nonfinite"),
        ({"log_det": "cholesky"}, "log_det"),
        ({"entropy": "exact"}, "entropy"),
        ({"entropy": "quadratic", "log_det": "smallest"}, "quadratic"),
    ],
)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        LIVI_ELBO(**kwargs)


def test_true_stands_for_the_plate_as_in_pyro():
    assert LIVI_ELBO(vectorize_particles=True).vectorize_particles == "plate"


class Poisoned:
    """A model whose likelihood can be made nan, or finite with a nan gradient."""

    def __init__(self):
        self.poison = None

    def __call__(self):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        loc = x * math.nan if self.poison == "value" else x
        if self.poison == "gradient":
            loc = x + (x * 0.0).abs().sqrt()
        with pyro.validation_enabled(False):
            pyro.sample("y", dist.Normal(loc, 1.0, validate_args=False), obs=torch.tensor(0.5))


@pytest.mark.filterwarnings("ignore:Encountered NaN")
@pytest.mark.parametrize(
    ("poison", "match"),
    [
        ("value", "step 3: the model's log-probability of site 'y' is nan.*Cure"),
        ("gradient", "step 3: the gradient of AutoSemiImplicit.*Cure"),
    ],
)
def test_nonfinite_raises_with_the_term(poison, match):
    model = Poisoned()
    svi = SVI(
        model, AutoSemiImplicit(model, frame=None), pyro.optim.Adam({"lr": 1e-3}), LIVI_ELBO(2)
    )
    svi.step()
    svi.step()
    model.poison = poison
    with pytest.raises(NonFiniteError, match=match):
        svi.step()


@pytest.mark.parametrize("poison", ["value", "gradient"])
def test_nonfinite_skips_and_counts(poison):
    model = Poisoned()
    elbo = LIVI_ELBO(2, nonfinite="skip")
    svi = SVI(model, AutoSemiImplicit(model, frame=None), pyro.optim.Adam({"lr": 1e-3}), elbo)
    svi.step()
    params = dict(pyro.get_param_store().named_parameters())
    before = {name: param.detach().clone() for name, param in params.items()}
    model.poison = poison
    assert math.isnan(svi.step())
    assert elbo.num_skipped == 1
    assert all(param.equal(before[name]) for name, param in params.items())
    model.poison = None
    assert math.isfinite(svi.step())
    assert not all(param.equal(before[name]) for name, param in params.items())


@pytest.mark.filterwarnings("ignore:Encountered NaN")
@pytest.mark.parametrize("compile", [False, "trace"])
@pytest.mark.parametrize("vectorize", ["vmap", False])
@pytest.mark.parametrize("poison", ["value", "gradient"])
def test_a_skipped_step_leaves_accumulated_gradients(poison, vectorize, compile):
    def model(shift: torch.Tensor, radius: torch.Tensor) -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        # At radius 0 the value is finite, and the gradient 0 * inf.
        loc = x + shift + (0.0 * x + radius).sqrt()
        pyro.sample("y", dist.Normal(loc, 1.0, validate_args=False), obs=torch.tensor(0.5))

    clean, zero = torch.tensor(1.0), torch.tensor(0.0)
    bad = (zero * math.nan, clean) if poison == "value" else (zero, zero)
    elbo = ImplicitELBO(2, vectorize, nonfinite="skip", compile=compile)
    guide = AutoNormal(model)
    for num_steps in range(1, 6):  # one of them is recorded, some are compared
        guide(zero, clean)
        guide.zero_grad()
        elbo.loss_and_grads(model, guide, zero, clean)
        before = {name: p.grad.clone() for name, p in guide.named_parameters()}
        assert all(gradient.any() for gradient in before.values())
        assert math.isnan(elbo.loss_and_grads(model, guide, *bad))
        assert elbo.num_skipped == num_steps
        assert all(p.grad.equal(before[name]) for name, p in guide.named_parameters())


def test_skip_with_a_differentiable_loss():
    model = Poisoned()
    elbo = LIVI_ELBO(2, nonfinite="skip")
    guide = AutoSemiImplicit(model, frame=None)
    guide()
    elbo.differentiable_loss(model, guide)
    model.poison = "value"
    loss = elbo.differentiable_loss(model, guide)
    loss.backward()
    assert loss.isnan() and elbo.num_skipped == 1
    assert all(p.grad is None for p in guide.parameters())


def test_a_subclass_is_its_equation():
    """A minimal method: an explicit Gaussian told to the engine as an implicit site."""

    class Explicit_ELBO(ImplicitELBO):
        site_types = (SemiImplicit,)

        def score_parts(self, site, prior):
            log_q = site.distribution.conditional(site.noise).log_prob(site.value)
            return ScoreParts(log_q, 0, log_q)

    loc = torch.tensor([0.3, -0.2], requires_grad=True)

    def model():
        pyro.sample("x", dist.Normal(1.0, 1.0).expand([2]).to_event(1))

    def guide():
        pyro.sample("x", SemiImplicit(lambda z: loc + 0.0 * z, 2, 0.5))

    try:
        assert "Explicit_ELBO" in SemiImplicit.trained_by
        loss = Explicit_ELBO(4000).loss(model, guide)
    finally:
        SemiImplicit.trained_by.remove("Explicit_ELBO")
    posterior = dist.Normal(loc.detach(), 0.5)
    expected = torch.distributions.kl_divergence(posterior, dist.Normal(1.0, 1.0)).sum().item()
    assert loss == pytest.approx(expected, abs=0.1)


def test_a_subclass_is_named_once_and_not_first():
    """Also if a notebook's cell, which defines it, runs twice."""
    before = list(SemiImplicit.trained_by)
    for _ in range(2):
        type("MyLIVI_ELBO", (LIVI_ELBO,), {})
    try:
        assert SemiImplicit.trained_by == [*before, "MyLIVI_ELBO"]
    finally:
        SemiImplicit.trained_by[:] = before


@pytest.mark.parametrize("count", [2.0, 2.5, float("inf"), float("nan"), torch.tensor(2.0)])
def test_counts_are_whole_numbers(count):
    message = re.escape(f"num_particles must be a whole number (int), but got {count!r}")
    with pytest.raises(ValueError, match=message):
        ImplicitELBO(count)


def of_two_numbers(data):
    loc = pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    pyro.sample("data", dist.Normal(loc[0], 1.0), obs=data[0])


LOSSES = [
    one
    for name in infer.__all__
    if isinstance(one := getattr(infer, name), type) and issubclass(one, StepELBO)
]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_class_in_place_of_a_loss(loss):
    """``SVI`` calls it with model and guide."""
    svi = SVI(of_two_numbers, AutoNormal(of_two_numbers), pyro.optim.Adam({"lr": 0.01}), loss)
    with pytest.raises(TypeError, match=rf"{loss.__name__} was called with a model.*Cure.*loss="):
        svi.step()


@pytest.mark.parametrize("guide", [AutoSemiImplicit, AutoAmortized, AutoEnsemble, AutoNormal])
def test_a_class_in_place_of_a_guide(guide):
    """``SVI`` calls it with the data."""
    svi = SVI(of_two_numbers, guide, pyro.optim.Adam({"lr": 0.01}), ImplicitELBO())
    with pytest.raises(TypeError, match=rf"the class {guide.__name__}. Cure.*\(model\), \.\.\."):
        svi.step(torch.zeros(3))
    with pytest.raises(TypeError, match=r"got a Tensor. Cure.*AutoSemiImplicit\(model\), \.\.\."):
        SVI(of_two_numbers, AutoSemiImplicit, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO()).step(
            torch.zeros(3)
        )


@pytest.mark.parametrize("known_as", ["module", "hidden", "argument", "nothing"])
@pytest.mark.parametrize("vectorize", ["vmap", False])
def test_a_network_that_no_step_trains(known_as, vectorize):
    """Only ``SVI`` without any word of it is a mistake; each pair is searched once."""
    network = nn.Linear(2, 1)

    def target(weight=None):
        pyro.sample("x", dist.Normal(torch.zeros(1), 1.0).to_event(1))

    def guide(weight=None):
        if known_as in ("module", "hidden"):
            pyro.module("network", network)
        pyro.sample("x", SemiImplicit(network, 2, 0.1))

    args = tuple(network.parameters()) if known_as == "argument" else ()
    elbo = LIVI_ELBO(4, vectorize_particles=vectorize)

    def step():
        hide = ["param"] if known_as == "hidden" else []
        shown = poutine.block(guide, hide_types=hide) if hide else guide
        elbo.loss_and_grads(target, shown, *args)

    if known_as == "argument":
        target, guide = (lambda w, b, run=run: run(w) for run in (target, guide))
    if known_as == "hidden":
        guide()
    if known_as != "nothing":
        step()
        return
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"shapes .*\(1, 2\).*Cure.*: pyro.module") as w:
            step()
            step()
        assert len(w) == 1
        elbo.loss(target, lambda weight=None: guide())  # another pair
