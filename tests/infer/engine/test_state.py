# SPDX-License-Identifier: Apache-2.0
"""What an ELBO remembers: for one model and guide, new for others, saved and loaded."""

from __future__ import annotations

import dataclasses
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_implicit import (
    AVB_ELBO,
    LIVI_ELBO,
    MLP,
    UIVI_ELBO,
    AutoImplicit,
    AutoSemiImplicit,
    Implicit,
    SemiImplicit,
)
from pyro_implicit.infer import NonFiniteError
from pyro_implicit.infer.engine.steps import Pair


def model():
    pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def model_with_plates():
    pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("outer", 2, dim=-2), pyro.plate("inner", 3, dim=-1):
        pyro.sample("z", dist.Normal(0.0, 1.0))


def branching():
    x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    loc = 1.0 if x.sum().item() > 0 else -1.0
    pyro.sample("y", dist.Normal(loc, 1.0), obs=torch.tensor(0.5))


def test_a_second_model_is_met_anew():
    """Its plates are counted and its shapes found again."""
    elbo = LIVI_ELBO(3)
    guide = AutoSemiImplicit(model, frame=None)
    elbo.loss(model, guide)
    first = elbo.state
    assert elbo.max_plate_nesting == 1 and "_AutoSemiImplicit_latent" in first.value_ndims
    elbo.loss(model, guide)
    assert elbo.state is first
    pyro.clear_param_store()  # both guides have the same names in it
    second = AutoSemiImplicit(model_with_plates, frame=None)
    elbo.loss(model_with_plates, second)
    assert elbo.state is not first and elbo.max_plate_nesting == 3
    assert {"x", "z"} <= set(elbo.state.value_ndims)


def test_an_outer_plate_is_refused():
    svi = SVI(model, AutoSemiImplicit(model, frame=None), pyro.optim.Adam({}), LIVI_ELBO(2))
    message = "LIVI_ELBO is called inside plate 'outer'.*Cure: .*outside of the plate"
    for _ in range(2):
        with pyro.plate("outer", 3), pytest.raises(ValueError, match=message):
            svi.step()
        svi.step()


def test_a_nesting_that_was_given_stays():
    elbo = LIVI_ELBO(3, max_plate_nesting=4)
    for target in (model, model_with_plates):
        pyro.clear_param_store()
        elbo.loss(target, AutoSemiImplicit(target, frame=None))
        assert elbo.max_plate_nesting == 5  # with the particle plate


def test_a_fallback_is_forgotten_with_its_model():
    guide = AutoSemiImplicit(model, frame=None)
    elbo = LIVI_ELBO(3)
    with pytest.warns(UserWarning, match="LIVI_ELBO runs the model one particle at a time"):
        elbo.loss(branching, guide)
    assert elbo.state.runs.mode is False
    elbo.loss(model, guide)
    assert elbo.state.runs.mode == "vmap"
    with pytest.warns(UserWarning, match="one particle at a time"):
        elbo.loss(branching, guide)


def test_sites_are_checked_once_for_each_guide():
    checked = []

    class Checking(LIVI_ELBO):
        def check_site(self, site):
            checked.append(site.name)

    SemiImplicit.trained_by.remove("Checking")
    elbo = Checking(2)
    guides = [AutoSemiImplicit(model, frame=None), AutoSemiImplicit(model, frame=None)]
    for guide in (guides[0], guides[0], guides[1], guides[1]):
        elbo.loss(model, guide)
    assert checked == ["_AutoSemiImplicit_latent"] * 2
    assert elbo.state.checked_sites == {"_AutoSemiImplicit_latent"}


def test_a_second_guide_gets_new_networks():
    elbo = AVB_ELBO(4, 20, discriminator_optim={"lr": 0.1})
    networks = []
    for _ in range(2):
        guide = AutoImplicit(model, frame=None)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), elbo)
        svi.step()
        (network,) = elbo.networks.values()
        networks.append(network)
        start = network.layers[0].weight.detach().clone()
        for _ in range(3):
            svi.step()
        (network,) = elbo.networks.values()
        assert network is networks[-1] and network.layers[0].weight.ne(start).any()
    first, second = (network.layers[0].weight for network in networks)
    # One step of 0.1 away from a start of its own, not from where the first was left.
    assert networks[0] is not networks[1]
    assert (first - second).abs().max() > 0.5


def test_a_second_guide_may_have_other_sizes():
    def wide():
        pyro.sample("x", dist.Normal(torch.zeros(5), 1.0).to_event(1))

    elbo = AVB_ELBO(2, 20)

    def guide_of(size):
        generator = MLP(size, size)
        return lambda: pyro.sample("x", Implicit(pyro.module(f"mlp{size}", generator), size))

    for target, size in ((model, 2), (wide, 5)):
        SVI(target, guide_of(size), pyro.optim.Adam({"lr": 1e-3}), elbo).step()
    (network,) = elbo.networks.values()
    assert network.layers[0].weight.shape[-1] == 5


def test_a_second_model_with_the_same_guide_keeps_its_networks():
    def data():
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x.sum(), 1.0), obs=torch.tensor(1.0))

    def guide():
        pyro.sample("x", Implicit(generator, 2))

    generator = MLP(2, 2)
    elbo = AVB_ELBO(2, 20)
    elbo.loss(model, guide)
    (network,) = elbo.networks.values()
    elbo.loss(data, guide)
    assert list(elbo.networks.values()) == [network]


def test_two_elbos_share_no_network():
    guide = AutoImplicit(model, frame=None)
    elbos = [AVB_ELBO(2, 20), AVB_ELBO(2, 20)]
    for elbo in elbos:
        elbo.loss(model, guide)
    first, second = (next(iter(elbo.networks.values())).layers[0].weight for elbo in elbos)
    assert first.ne(second).all()


def test_state_of_one_elbo_goes_on_in_another():
    """Step sizes, copied and pickled, with the numbers of steps."""
    guide = AutoSemiImplicit(model, frame=None)
    elbo = UIVI_ELBO(3)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), elbo)
    for _ in range(2):
        svi.step()
    elbo.num_left_out = 5
    saved = pickle.loads(pickle.dumps(elbo.get_state()))
    step_sizes = dict(elbo.step_sizes)
    svi.step()
    assert elbo.step_sizes != step_sizes  # the saved state is a copy

    fresh = UIVI_ELBO(3)
    fresh.set_state(saved)
    assert fresh.step_sizes == step_sizes
    assert fresh.num_steps_taken == 2 and fresh.num_left_out == 5
    SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), fresh).step()
    assert fresh.step_sizes != step_sizes and fresh.num_steps_taken == 3
    assert saved["num_steps"] == 2


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped():
    guide = AutoSemiImplicit(model, frame=None)
    elbo = UIVI_ELBO(4)
    for _ in range(3):
        elbo.loss(model, guide)
    saved, random = elbo.get_state(), pyro.util.get_rng_state()
    expected = [elbo.differentiable_loss(model, guide).item() for _ in range(3)]
    fresh = UIVI_ELBO(4)
    fresh.set_state(saved)
    pyro.util.set_rng_state(random)
    found = [fresh.differentiable_loss(model, guide).item() for _ in range(3)]
    assert found == expected


class Models:
    def model(self):
        model()


def test_bound_methods_are_one_model():
    """Python makes a bound method anew at each access."""
    models = Models()
    elbo, guide = LIVI_ELBO(2), AutoSemiImplicit(model, frame=None)
    elbo.loss(models.model, guide)
    state = elbo.state
    elbo.loss(models.model, guide)
    assert elbo.state is state
    elbo.loss(Models().model, guide)
    assert elbo.state is not state


def test_the_pair_keeps_nobody_alive():
    guide = AutoSemiImplicit(model, frame=None)
    pair = Pair(model, guide)
    assert pair.has(model, guide) and pair.has_guide(guide)
    assert not pair.has(branching, guide)
    assert not pair.has_guide(AutoSemiImplicit(model, frame=None))
    del guide
    assert pair._guide() is None
    assert not pickle.loads(pickle.dumps(Pair(model, model))).has(model, model)


def test_models_that_compare_by_value_are_told_apart_by_identity():
    """A dataclass with tensors has no truth value in ==."""

    @dataclasses.dataclass
    class Model:
        y: torch.Tensor

        def __call__(self):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            with pyro.plate("rows", len(self.y)):
                pyro.sample("y", dist.Normal(x, 1.0), obs=self.y)

    model = Model(torch.zeros(3))
    guide, elbo = AutoSemiImplicit(model, frame=None), LIVI_ELBO(2)
    elbo.loss(model, guide)
    state = elbo.state
    elbo.loss(model, guide)
    assert elbo.state is state
    elbo.loss(Model(torch.ones(3)), guide)
    assert elbo.state is not state


@pytest.mark.parametrize("vectorize", ["vmap", "plate", False])
@pytest.mark.parametrize("num_particles", [1, 4])
@pytest.mark.parametrize("value, kind", [(torch.nan, "NaN"), (-torch.inf, "infinite")])
def test_missing_data_are_refused_by_name(vectorize, num_particles, value, kind):
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    elbo, seen = LIVI_ELBO(num_particles, vectorize_particles=vectorize), []
    guide = AutoSemiImplicit(lambda y: (seen.append(y), model(y)), frame=None)
    svi = SVI(lambda y: (seen.append(y), model(y)), guide, pyro.optim.Adam({}), elbo)
    guide(torch.zeros(3))
    seen.clear()
    match = f"observation of site 'y' is {kind} in 1 of 3 elements. Cure: .* mask"
    with pytest.raises(ValueError, match=match):
        svi.step(torch.tensor([0.0, value, 1.0]))
    assert len(seen) == 1  # no other draw of the guide would help


def test_nan_among_the_observations_is_suspected():
    y = torch.tensor([0.0, torch.nan, 1.0])

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 3), pyro.validation_enabled(False):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    with pyro.validation_enabled(False):
        with pytest.raises(NonFiniteError, match="site 'y' is nan for every particle.*mask"):
            LIVI_ELBO(4).loss(model, AutoSemiImplicit(model, frame=None))


def test_sites_that_change_between_steps_are_named():
    def rows(x, y=None, slope=False):
        weight = pyro.sample("weight", dist.Normal(0.0, 1.0))
        if slope:
            pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", dist.Normal(weight * x, 1.0), obs=y)

    x = torch.linspace(-1, 1, 5)
    elbo, optim = LIVI_ELBO(2), pyro.optim.Adam({"lr": 0.01})
    svi = SVI(rows, AutoSemiImplicit(rows, frame=None), optim, elbo)
    svi.step(x)
    with pytest.raises(ValueError, match=r"samples \['y'\], which the model observes.*Cure"):
        svi.step(x, x)
    svi = SVI(rows, AutoSemiImplicit(rows, frame=None), optim, elbo)
    pyro.clear_param_store()
    svi.step(x, x)
    with pytest.raises(ValueError, match="slope.*Cure"):
        svi.step(x, x, slope=True)
    svi.step(x, x)
