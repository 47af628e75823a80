# SPDX-License-Identifier: Apache-2.0
"""What each ELBO must do where two features of Pyro meet."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoNormal,
    AutoStructured,
    init_to_value,
)
from torch import Tensor

from pyro_implicit import (
    AVB_ELBO,
    AutoImplicit,
    AutoregressiveGenerator,
    AutoSemiImplicit,
    Implicit,
    ImplicitRenyiELBO,
    InjectiveELBO,
    compare,
    diagnose,
    evidence_bound,
    fit,
    refine,
)
from pyro_implicit.density.mode_search import find_modes
from pyro_implicit.density.target import Target
from pyro_implicit.infer import ImplicitELBO
from pyro_implicit.mcmc import refine_by_minibatches
from tests.test_contract import ELBOS

NUM_PARTICLES = 4
OPTIONS: dict[str, Callable] = {
    **ELBOS,
    "Injective-coverage": lambda k: InjectiveELBO(k, coverage=1.0),
    "Renyi-prior": lambda k: ImplicitRenyiELBO(-0.5, k, 10, proposal="prior"),
    "Injective-plain": lambda k: InjectiveELBO(k, path_derivative=False),
}
#: Its loss is quadratic in the model's score.
QUADRATIC = {"AmortizedKSD", "HSIVI", "KSIVI", "KSIVI-two-batch-imq"}
#: Its bound is no mean over particles, nor over data.
POWER = {"Renyi", "Renyi-prior"}
#: Contrasts that want draws of a prior.
OF_PRIOR = {"AVB-prior", "KIVI-prior"}


def without(names: set[str]) -> list[str]:
    return [name for name in OPTIONS if name not in names]


elbos = pytest.mark.parametrize("elbo_name", OPTIONS)
#: Those whose gradient is linear in the model's log-density.
linear = pytest.mark.parametrize("elbo_name", without(QUADRATIC | POWER))


def make_guide(model: Callable, elbo: ImplicitELBO, **init: Any) -> Callable:
    """One that the ELBO can train, which starts where it is told."""
    init["frame"] = None
    if isinstance(elbo, (InjectiveELBO, ImplicitRenyiELBO)):
        return AutoImplicit(model, AutoregressiveGenerator, **init)
    return (AutoImplicit if Implicit in elbo.site_types else AutoSemiImplicit)(model, **init)


def gradients(
    elbo: ImplicitELBO, model: Callable, guide: Callable, *args: Any
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of all but the networks that an ELBO owns, from seed 0."""
    pyro.set_rng_seed(0)
    loss = elbo.loss_and_grads(model, guide, *args)
    result = {}
    for name, param in pyro.get_param_store().named_parameters():
        if param.grad is not None and "_ELBO" not in name:
            result[name] = param.grad.clone()
        param.grad = None
    assert result
    return loss, result


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.isfinite().all(), name
        size = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-8 + 1e-6 * size)


Y = torch.tensor([0.3, -1.0, 2.0, 0.7, 1.5, -0.2], dtype=torch.float64)


def one_latent(y: Tensor = Y) -> None:
    x = pyro.sample("x", dist.Normal(y.new_zeros(()), 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


# One latent, and a parameter of the model.


def with_parameter(y: Tensor = Y) -> None:
    shift = pyro.param("shift", torch.tensor(0.5, dtype=y.dtype))
    x = pyro.sample("x", dist.Normal(y.new_zeros(()), 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(x + shift, 1.0), obs=y)


@elbos
def test_one_latent_and_the_gradient_of_a_parameter_of_the_model(elbo_name):
    elbo = OPTIONS[elbo_name](NUM_PARTICLES)
    start = init_to_value(values={"x": torch.tensor(0.2, dtype=Y.dtype)})
    guide = make_guide(with_parameter, elbo, init_loc_fn=start, init_scale=1e-3)
    loss, found = gradients(elbo, with_parameter, guide)
    assert abs(loss) < 1e4 and guide.median()["x"].shape == ()
    assert found["shift"].item() == pytest.approx((0.7 - Y).sum().item(), abs=0.03)


# Minibatches.


def subsampled(rows: Tensor | None = None) -> None:
    slope = pyro.sample("slope", dist.Normal(Y.new_zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(Y), subsample=rows) as rows:
        mean = slope[0] + slope[1] * rows
        pyro.sample("y", dist.Normal(mean, 1.0), obs=Y[rows])


@linear
def test_minibatches_have_the_gradient_of_all_data_in_the_mean(elbo_name):
    found = {}
    for part, rows in enumerate([None, *torch.arange(len(Y)).split(2)]):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        elbo = OPTIONS[elbo_name](NUM_PARTICLES)
        guide = make_guide(subsampled, elbo)
        guide()
        try:
            _, found[part] = gradients(elbo, subsampled, guide, rows)
        except ValueError as error:  # rather none than a wrong one
            assert "subsample" in str(error) and "Cure" in str(error)
            return
    mean = {name: (found[1][name] + found[2][name] + found[3][name]) / 3 for name in found[0]}
    assert_close(mean, found[0])


# Scales.


@linear  # of the others the discrepancy of p^s from q^s is not s times that of p from q
def test_gradients_follow_the_scale_of_model_and_guide(elbo_name):
    found = []
    for scale in (1.0, 3.0):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        elbo = OPTIONS[elbo_name](NUM_PARTICLES)
        guide = make_guide(one_latent, elbo)
        guide()
        found.append(gradients(elbo, poutine.scale(one_latent, scale), poutine.scale(guide, scale)))
    (loss, plain), (scaled_loss, scaled) = found
    assert scaled_loss == pytest.approx(3 * loss, rel=1e-6)
    assert_close(scaled, {name: 3 * gradient for name, gradient in plain.items()})


# A second model, a second ELBO.


@elbos
def test_a_second_model_finds_nothing_of_the_first(elbo_name):
    def first() -> None:
        with pyro.plate("groups", 3, dim=-2):
            pyro.sample("x", dist.Normal(Y.new_zeros(()), 5.0))

    def second_step(elbo: ImplicitELBO) -> tuple[float, dict[str, Tensor]]:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = make_guide(one_latent, elbo)
        gradients(elbo, one_latent, guide)
        return gradients(elbo, one_latent, guide)

    used, new = (OPTIONS[elbo_name](NUM_PARTICLES) for _ in range(2))
    used.loss_and_grads(first, make_guide(first, used))
    (found_loss, found), (loss, expected) = second_step(used), second_step(new)
    assert found_loss == pytest.approx(loss, rel=1e-9)
    found, expected = ({n.split(".")[-1]: g for n, g in part.items()} for part in (found, expected))
    assert_close(found, expected)


def test_a_second_elbo_has_a_discriminator_of_its_own():
    names: list[set[str]] = []
    for _ in range(2):
        elbo = AVB_ELBO(NUM_PARTICLES, 20)
        before = set(pyro.get_param_store().keys())
        guide = AutoImplicit(one_latent, frame=None)
        SVI(one_latent, guide, pyro.optim.Adam({"lr": 0.01}), elbo).step()
        after = set(pyro.get_param_store().keys())
        names.append({name for name in after - before if "_ELBO" in name})
    assert len(names[0]) == len(names[1])


# A guide of another model, and a guide without sites.


def with_another_latent(y: Tensor = Y) -> None:
    """As one_latent, with a latent site more."""
    one_latent(y)
    pyro.sample("noise", dist.Normal(y.new_zeros(()), 1.0))


def without_x(y: Tensor = Y) -> None:
    noise = pyro.sample("noise", dist.Normal(y.new_zeros(()), 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(noise, 1.0), obs=y)


@pytest.mark.parametrize("elbo_name", ["Implicit", *OPTIONS])
@pytest.mark.parametrize("validates", [True, False])
def test_a_guide_of_another_model_is_refused_at_the_first_step(elbo_name, validates):
    def step(model: Callable, guide_model: Callable) -> None:
        elbo = {**OPTIONS, "Implicit": ImplicitELBO}[elbo_name](NUM_PARTICLES)
        is_plain = elbo_name == "Implicit"
        guide = AutoNormal(guide_model) if is_plain else make_guide(guide_model, elbo)
        pyro.clear_param_store()
        with pyro.validation_enabled(validates):
            SVI(model, guide, pyro.optim.Adam({}), elbo).step()

    with pytest.raises(ValueError, match=r"no draws of \['noise'\], which the model samples. Cu"):
        step(with_another_latent, one_latent)
    has_both = r"no draws of \['noise'\], which the model samples, but has \['x'\], .*not. Cure"
    with pytest.raises(ValueError, match=has_both):
        step(without_x, one_latent)
    with pytest.raises(ValueError, match=r"samples \['noise'\], which the model does not have."):
        step(one_latent, with_another_latent)
    conditioned = poutine.condition(with_another_latent, data={"noise": Y.new_zeros(())})
    with pytest.raises(ValueError, match=r"samples \['noise'\], which the model observes or c"):
        step(conditioned, with_another_latent)


def in_subsample() -> None:
    x = pyro.sample("x", dist.Normal(Y.new_zeros(()), 1.0))
    with pyro.plate("rows", len(Y), subsample_size=2) as rows:
        pyro.sample("y", dist.Normal(x, 1.0), obs=Y[rows])


def two_latents() -> None:
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("scale", dist.LogNormal(x, 1.0))


def two_guides() -> AutoGuideList:
    guides = AutoGuideList(two_latents)
    guides.append(AutoNormal(poutine.block(two_latents, expose=["x"])))
    guides.append(AutoNormal(poutine.block(two_latents, expose=["scale"])))
    return guides


def with_choice() -> None:
    x = pyro.sample("x", dist.Normal(Y.new_zeros(()), 1.0))
    sign = pyro.sample("sign", dist.Bernoulli(Y.new_tensor(0.4)))
    pyro.deterministic("shifted", x + sign)
    pyro.sample("y", dist.Normal(x + sign, 1.0), obs=Y[0])


def guide_of_choice() -> None:
    loc = pyro.param("loc", Y.new_zeros(()))
    own = pyro.sample("own", dist.Normal(loc, 1.0), infer={"is_auxiliary": True})
    x = pyro.sample("x", dist.Normal(own, 0.1))
    pyro.factor("term", 0 * x, has_rsample=True)
    pyro.sample("known", dist.Normal(x, 1.0), obs=Y[0], infer={"is_auxiliary": True})


GUIDES_THAT_FIT: dict[str, tuple[Callable, Callable]] = {
    "subsample": (in_subsample, lambda: AutoNormal(in_subsample)),
    "auxiliary sites and a factor": (with_choice, lambda: guide_of_choice),
    "list": (two_latents, two_guides),
    "blocked": (
        poutine.block(with_another_latent, hide=["noise"]),
        lambda: AutoDelta(one_latent),
    ),
    "structured": (two_latents, lambda: AutoStructured(two_latents)),
    "low rank": (two_latents, lambda: AutoLowRankMultivariateNormal(two_latents)),
    "flow": (two_latents, lambda: AutoIAFNormal(two_latents)),
}


@pytest.mark.parametrize("num_particles", [1, 4])
@pytest.mark.parametrize("name", GUIDES_THAT_FIT)
def test_guides_whose_sites_differ_from_the_model_s_for_good_reason(name, num_particles):
    model, make = GUIDES_THAT_FIT[name]
    loss = ImplicitELBO(num_particles).loss(model, make())
    assert abs(loss) < 1e4


@pytest.mark.parametrize("elbo_name", ["Trace", "Implicit", *OPTIONS])
def test_maximum_likelihood_with_an_empty_guide(elbo_name):
    def model() -> None:
        mean = pyro.param("mean", Y.new_zeros(()))
        with pyro.plate("rows", len(Y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=Y)

    extra = {"Trace": Trace_ELBO, "Implicit": ImplicitELBO}
    elbo = {**OPTIONS, **extra}[elbo_name](NUM_PARTICLES)
    loss, found = gradients(elbo, model, lambda: None)
    assert found["mean"].item() == pytest.approx(-Y.sum().item())
    assert loss == pytest.approx(-dist.Normal(0.0, 1.0).log_prob(Y).sum().item())


# Draws that are all the same.


@pytest.mark.parametrize("scale", [1e-3, 1e-6, 1e-9, 1e-20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_collapsed_draws_get_a_verdict(scale, dtype):
    y = Y.to(dtype)
    start = init_to_value(values={"x": torch.tensor(1.1, dtype=dtype)})
    guide = AutoNormal(one_latent, init_loc_fn=start, init_scale=scale)
    guide(y)
    diagnosis = diagnose(one_latent, guide, y, num_samples=200, num_transitions=2, modes=None)
    assert diagnosis.verdict == "do not trust"


# Two dtypes.


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float64-data", "float32-data"])
def data(request):
    """Data of the dtype that is not the default one."""
    torch.set_default_dtype(request.param)
    return Y.to(torch.float64 if request.param == torch.float32 else torch.float32)


def flat(y: Tensor) -> None:
    support = dist.constraints.real, dist.constraints.positive
    mean, scale = (
        pyro.sample(name, dist.ImproperUniform(part, (), ()))
        for name, part in zip(("mean", "scale"), support, strict=True)
    )
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, scale), obs=y)


@pytest.mark.parametrize("elbo_name", without(OF_PRIOR))  # a flat prior has no draws
def test_the_data_rule_the_dtype_under_flat_priors(elbo_name, data):
    elbo = OPTIONS[elbo_name](NUM_PARTICLES)
    guide = make_guide(flat, elbo)
    elbo.loss_and_grads(flat, guide, data)
    assert elbo.differentiable_loss(flat, guide, data).dtype == data.dtype
    params = dict(pyro.get_param_store().named_parameters())
    assert {name: param.dtype for name, param in params.items()} == dict.fromkeys(
        params, data.dtype
    )


def test_the_data_rule_the_dtype_of_a_density(data):
    density = Target(flat, data)
    points = density.sample_prior(3)
    assert points.dtype == density.init_loc.dtype == density.log_prob(points).dtype == data.dtype
    modes = find_modes(density, num_starts=5, max_rounds=2)
    assert modes.loc.dtype == modes.scale_tril.dtype == data.dtype


@pytest.mark.parametrize("method", ["refine", "diagnose", "Renyi", "SIVI"])
def test_single_precision_under_data_of_double(method):
    """As where numpy's arrays meet priors of plain numbers."""

    def model(y: Tensor = Y) -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(0.0, scale), obs=y)

    guide = AutoNormal(model)
    if method == "refine":
        samples = refine(model, guide, num_chains=8, max_gradients=30, progress=False).samples
        assert samples["scale"].dtype == torch.float32
    elif method == "diagnose":
        diagnose(model, guide, num_samples=100, num_transitions=1, modes=None)
    else:
        elbo = ELBOS[method](NUM_PARTICLES)
        guide = make_guide(model, elbo)
        guide()
        _, found = gradients(elbo, model, guide)
        assert {gradient.dtype for gradient in found.values()} == {torch.float32}


# Pyro's own arguments.

CLASSES = {type(make(NUM_PARTICLES)): None for make in OPTIONS.values()}
ARGUMENTS: dict[str, Any] = {
    "max_plate_nesting": 2,
    "strict_enumeration_warning": False,
    "ignore_jit_warnings": True,
    "jit_options": {"check_trace": True},
    "retain_graph": True,
    "tail_adaptive_beta": -0.5,
}


@pytest.mark.parametrize("elbo_class", [ImplicitELBO, *CLASSES])
def test_arguments_of_pyros_elbo(elbo_class):
    elbo = elbo_class(num_particles=NUM_PARTICLES, **ARGUMENTS)
    for name, value in ARGUMENTS.items():
        if name != "max_plate_nesting":  # counts the particle plate, too
            assert getattr(elbo, name) == value
    with pytest.warns(DeprecationWarning, match="max_plate_nesting"):
        elbo_class(num_particles=NUM_PARTICLES, max_iarange_nesting=2)
    guide = make_guide(one_latent, elbo) if elbo.site_types else AutoNormal(one_latent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(elbo.loss_and_grads(one_latent, guide), float)


@pytest.mark.parametrize("elbo_class", [ImplicitELBO, *CLASSES])
def test_vectorize_particles_true_is_pyros_plate(elbo_class):
    losses = []
    for mode in (True, "plate"):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        elbo = elbo_class(num_particles=NUM_PARTICLES, vectorize_particles=mode)
        guide = make_guide(one_latent, elbo) if elbo.site_types else AutoNormal(one_latent)
        losses.append(gradients(elbo, one_latent, guide))
    assert losses[0][0] == losses[1][0]
    assert_close(losses[0][1], losses[1][1])


def test_the_graph_is_retained_on_request():
    seen = []

    def model() -> None:
        x = pyro.sample("x", dist.Normal(Y.new_zeros(()), 1.0))
        seen.append(x)
        pyro.sample("y", dist.Normal(x, 1.0), obs=Y.new_tensor(1.0))

    elbo = ImplicitELBO(1, retain_graph=True)
    guide = AutoNormal(model)
    elbo.loss_and_grads(model, guide)
    loc = guide.locs.x_unconstrained
    first = loc.grad.clone()
    seen[-1].sum().backward()  # a second pass through the guide
    torch.testing.assert_close(loc.grad, first + 1)


@pytest.mark.parametrize(
    "function", [fit, refine, refine_by_minibatches, evidence_bound, diagnose, compare]
)
def test_a_guide_in_place_of_the_model_is_named(function: Callable) -> None:
    def model() -> None:
        pyro.sample("x", dist.Normal(0.0, 1.0))

    options: dict = {refine_by_minibatches: {"batches": [()]}, compare: {"reference": {}}}
    name = function.__name__
    message = rf"{name} needs the model first, .* Cure: {name}\(model, guide, ...\)"
    with pytest.raises(TypeError, match=message):
        function(AutoNormal(model), model, **options.get(function, {}))
