# SPDX-License-Identifier: Apache-2.0
"""Groups that leave a posterior unchanged: how they are found, and their maps."""

from __future__ import annotations

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_implicit import fit, refine
from pyro_implicit.density import Target, find_modes, symmetry
from pyro_implicit.density.symmetry import (
    Place,
    Symmetries,
    Symmetry,
    confirmed,
    find_symmetries,
)
from pyro_implicit.fitting import log_evidence
from pyro_implicit.fitting.policy import DEFAULT as FIT
from pyro_implicit.mcmc.stopping import Tracker

Y = torch.tensor([[-40.0, -39.0], [-21.0, -20.0], [0.0, 1.0], [19.0, 21.5], [40.0, 41.0]])
X = torch.linspace(-1, 1.5, 7).unsqueeze(-1)


def mixture(y, concentration=(1.0, 1.0, 1.0), sds=(1.0, 1.0, 1.0)):
    weights = pyro.sample("weights", dist.Dirichlet(torch.tensor(concentration)))
    with pyro.plate("components", 3):
        loc = pyro.sample("loc", dist.Normal(0.0, torch.tensor(sds)))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(loc[z], scale[z]), obs=y)


def network(x):
    """Two hidden layers of three units each."""
    a = pyro.sample("a", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
    b = pyro.sample("b", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))
    c = pyro.sample("c", dist.Normal(torch.zeros(3, 1), 1.0).to_event(2))
    hidden = torch.sigmoid(torch.tanh(x.to(a) @ a) @ b) @ c
    pyro.sample("y", dist.Normal(hidden, 0.1).to_event(2), obs=x)


def recurrent(x):
    """The weights between the states of two times lie in two dimensions of one site."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))
    out = pyro.sample("out", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    state = torch.ones(3).to(w)
    for _ in range(2):
        state = torch.sigmoid(w @ state)
    pyro.sample("y", dist.Normal(state @ out, 0.1), obs=torch.tensor(1.0))


def factors(y):
    loadings = pyro.sample("loadings", dist.Normal(torch.zeros(4, 2), 1.0).to_event(2))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(z @ loadings.mT, 0.5).to_event(1), obs=y)


def schools(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.Normal(mean, 2.0))
        pyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def bounded(high):
    with pyro.plate("units", 2):
        x = pyro.sample("x", dist.Uniform(0.0, torch.tensor(high)))
    pyro.sample("y", dist.Normal(x.sum(-1), 1.0), obs=torch.tensor(1.0))


def product(y):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Laplace(a.unsqueeze(-1) * b, 0.2), obs=y)


def walk(y):
    load = pyro.sample("load", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    x = torch.zeros(())
    for time, row in enumerate(y):
        x = pyro.sample(f"x_{time}", dist.Normal(x, 1.0))
        pyro.sample(f"y_{time}", dist.Laplace(loc + load * x, 0.5).to_event(1), obs=row)


def bilinear():
    """Signs of a and b as a whole are products of those of their units, which w has, too."""
    a = pyro.sample("a", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    mean = (b**3).unsqueeze(-2) @ w @ (a**3).unsqueeze(-1)
    pyro.sample("y", dist.Normal(mean.squeeze(-1).squeeze(-1), 1.0), obs=torch.tensor(2.0))


def odd_recurrent():
    """The signs of all units change those of w twice."""
    first = pyro.sample("first", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    w = pyro.sample("w", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    out = pyro.sample("out", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    state = torch.tanh((w @ first.unsqueeze(-1)).squeeze(-1)) + 0.1 * first
    pyro.sample("y", dist.Normal((state * out).sum(-1), 0.1), obs=torch.tensor(1.0))


def loop_mixture(y, sds=(1.0, 1.0, 1.0)):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    locs, scales = [], []
    for k, sd in enumerate(sds):
        locs.append(pyro.sample(f"loc_{k}", dist.Normal(0.0, sd)))
        scales.append(pyro.sample(f"scale_{k}", dist.LogNormal(0.0, 1.0)))
    parts = dist.Normal(torch.stack(locs, -1).unsqueeze(-2), torch.stack(scales, -1).unsqueeze(-2))
    whole = dist.MixtureSameFamily(dist.Categorical(weights.unsqueeze(-2)), parts)
    pyro.sample("y", whole.to_event(1), obs=y)


def loop_factors(y):
    mean = 0.0
    for k in range(2):
        a = pyro.sample(f"a_{k}", dist.Normal(torch.zeros(len(y)), 1.0).to_event(1))
        b = pyro.sample(f"b_{k}", dist.Laplace(torch.zeros(3), 1.0).to_event(1))
        mean = mean + a.unsqueeze(-1) * b.unsqueeze(-2)
    pyro.sample("y", dist.Normal(mean, 0.5).to_event(2), obs=y.outer(torch.tensor([1.0, 2.0, 0.5])))


def loop_chain(y):
    """Hidden Markov models with a row of transitions for each step of a loop."""
    rows = [pyro.sample(f"row_{k}", dist.Dirichlet(torch.ones(2))) for k in range(2)]
    loc = [pyro.sample(f"loc_{k}", dist.Normal(0.0, 1.0)) for k in range(2)]
    trans, loc = torch.stack(rows, -2), torch.stack(loc, -1)
    log_prob = dist.Normal(loc.unsqueeze(-1), 1.0).log_prob(y.to(loc))  # (*batch, 2, times)
    alpha = log_prob[..., 0]
    for time in range(1, len(y)):
        alpha = (alpha.unsqueeze(-1) + trans.log()).logsumexp(-2) + log_prob[..., time]
    pyro.factor("y", alpha.logsumexp(-1))


def triple(y, size=()):
    """Any two of three factors may change their signs."""
    a, b, c = (
        pyro.sample(name, dist.Normal(torch.zeros(size), 1.0).to_event(len(size))) for name in "abc"
    )
    mean = a * b * c
    pyro.sample("y", dist.Laplace(mean.sum(-1) if size else mean, 0.3), obs=y)


def many(y):
    """Twelve sites, of which two may change their signs."""
    a, b = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "ab")
    pyro.sample("y", dist.Laplace(a * b, 0.3), obs=y)
    for name in "cdefghijkl":
        pyro.sample(name, dist.Normal(1.0, 1.0))


def scaled_triple(y):
    """The signs of a and b change by units, those of c and d with one of them as a whole."""
    a = pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    c, d = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "cd")
    mean = a * b * (c * d).unsqueeze(-1)
    pyro.sample("y", dist.Normal(mean, 0.3).to_event(1), obs=y)


def many_in_a_row():
    x = 0.0
    for name in "abcdefghijkl":
        x = pyro.sample(name, dist.Normal(x, 1.0))


FEW = torch.tensor([0.0, 1.0, -2.0, 0.5])
UNITS = "permutations of the 3 units of 'weights' and 'loc' and 'scale'"
MODELS = {
    "mixture": (mixture, (FEW,), UNITS),
    "unequal weights": (mixture, (FEW, (1.0, 1.0, 2.0)), ""),
    "unequal priors": (
        mixture,
        (FEW, (1.0,) * 3, (1.0, 1.0, 1.01)),
        "",
    ),
    "network": (
        network,
        (X,),
        "reflections of the 3 units of 'a' and 'b'; permutations of the 3 units of 'a' and 'b'; "
        "permutations of the 3 units of 'b' and 'c'",
    ),
    "recurrent": (recurrent, (X,), "permutations of the 3 units of 'w' and 'out'"),
    "factors": (
        factors,
        (torch.randn(3, 4, generator=torch.Generator().manual_seed(1)),),
        "rotations of the 2 units of 'loadings' and 'z'",
    ),
    "schools": (schools, (torch.tensor([1.0, -2.0, 3.0]),), ""),
    "equal schools": (schools, (torch.ones(3),), "permutations of the 3 units of 'theta'"),
    "bounded": (bounded, ([1.0, 1.0],), "permutations of the 2 units of 'x'"),
    "unequal bounds": (bounded, ([1.0, 1.1],), ""),
    "bilinear": (
        bilinear,
        (),
        "reflections of the 2 units of 'b' and 'w'; reflections of the 3 units of 'a' and 'w'; "
        "permutations of the 2 units of 'b' and 'w'; permutations of the 3 units of 'a' and 'w'",
    ),
    "odd recurrent": (
        odd_recurrent,
        (),
        "reflections of the 2 units of 'first' and 'w' and 'out'; "
        "permutations of the 2 units of 'first' and 'w' and 'out'",
    ),
    "loop mixture": (
        loop_mixture,
        (FEW,),
        "permutations of the 3 units of 'weights' and 'loc_0' and ... and 'scale_2'",
    ),
    "unequal loop": (loop_mixture, (FEW, (1.0, 1.0, 1.01)), ""),
    "loop factors": (
        loop_factors,
        (FEW,),
        "reflections of the 2 units of 'a_0' and 'a_1' and 'b_0' and 'b_1'; "
        "permutations of the 2 units of 'a_0' and 'a_1' and 'b_0' and 'b_1'",
    ),
    "loop chain": (
        loop_chain,
        (FEW,),
        "permutations of the 2 units of 'row_0' and 'row_1' and 'loc_0' and 'loc_1'",
    ),
    "triple": (
        triple,
        (torch.tensor(1.0),),
        "reflections of 'a' and 'c' as a whole; reflections of 'b' and 'c' as a whole",
    ),
    "triples": (
        triple,
        (torch.tensor(1.0), (2,)),
        "reflections of the 2 units of 'a' and 'c'; reflections of the 2 units of 'b' and 'c'; "
        "permutations of the 2 units of 'a' and 'b' and 'c'",
    ),
    "many": (many, (torch.tensor(1.0),), "reflections of 'a' and 'b' as a whole"),
    "many in a row": (
        many_in_a_row,
        (),
        "reflections of 'a' and 'b' and ... and 'l' as a whole",
    ),
    "scaled triple": (
        scaled_triple,
        (torch.tensor([1.0, 2.0]),),
        "reflections of 'b' and 'c' as a whole; reflections of 'b' and 'd' as a whole; "
        "reflections of the 2 units of 'a' and 'b'",
    ),
    "product": (product, (FEW,), "reflections of 'a' and 'b' as a whole"),
    "walk": (
        walk,
        (torch.ones(10, 2),),
        "reflections of 'load' and 'x_0' and ... and 'x_9' as a whole; "
        "permutations of the 2 units of 'load'",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_finds_the_groups_of_a_model(name):
    model, args, groups = MODELS[name]
    target = Target(model, *args, sample_discrete=True)
    state = torch.get_rng_state()
    assert str(find_symmetries(target)) == groups
    assert torch.get_rng_state().equal(state)


def test_many_trials_are_divided(monkeypatch):
    monkeypatch.setattr(symmetry, "RUNS", replace(symmetry.RUNS, draws_at_once=2))
    model, args, groups = MODELS["walk"]
    assert str(find_symmetries(Target(model, *args))) == groups


def ring():
    x = pyro.sample("x", dist.LogNormal(torch.zeros(4), 1.0).to_event(1))
    pyro.factor("neighbours", -(x - x.roll(1, -1)).square().sum(-1))


def pair(size):
    x = pyro.sample("x", dist.Normal(torch.zeros(size), 1.0).to_event(1))
    pyro.factor("signs", -(x.sum(-1).square() - 1).square())
    pyro.factor("order", 0.01 * x[..., 0].square())


def test_a_part_of_a_group_is_not_the_group():
    """Cycles are some of all permutations, and one sign of all is one of all reflections."""
    for seed in range(8):
        for model, args in ((ring, ()), (pair, (2,)), (pair, (3,))):
            torch.manual_seed(seed)
            whole = "" if model is ring else "reflections of 'x' as a whole"
            assert str(find_symmetries(Target(model, *args))) == whole
    swap = Symmetry("permutations", (Place(("x",), -1),), 2)
    target = Target(pair, 2)
    for seed in range(8):
        torch.manual_seed(seed)
        point = target.sample_prior(1)
        kept = confirmed(Symmetries(target.shapes, target.transforms, (swap,)), target, point)
        assert swap not in kept.groups


@pytest.mark.parametrize("name", [name for name, (_, _, groups) in MODELS.items() if groups])
def test_maps_leave_the_density_unchanged(name):
    torch.manual_seed(0)
    model, args, _ = MODELS[name]
    target = Target(model, *args, sample_discrete=True)
    found = find_symmetries(target)
    exact = target.in_double()
    x = torch.randn(20, target.latent_dim, dtype=torch.float64)
    shuffled = found.shuffled(x)

    def density(points):
        return exact.log_prob(points) - exact.log_det(points)

    assert (shuffled - x).abs().amax() > 0.1
    assert torch.allclose(density(shuffled), density(x), rtol=1e-8, atol=1e-4)
    ordered = found.keyed(x).ordered(x)
    assert torch.allclose(density(ordered), density(x), rtol=1e-8, atol=1e-4)
    assert torch.allclose(found.keyed(x).ordered(shuffled), ordered, atol=1e-6)
    assert found.keyed(x).is_ordered(ordered).all()
    assert not found.keyed(x).is_ordered(shuffled).all()


def units(kind, size):
    shapes = {"x": torch.Size([size])}
    real = dist.transforms.identity_transform
    return Symmetries(shapes, {"x": real}, (Symmetry(kind, (Place(("x",), -1),), size),))


def test_drift_is_that_of_ordered_units():
    target = Target(tied, 3)
    track, x = Tracker(target, None, find_symmetries(target)), torch.randn(10, 3)
    values = track(x, torch.zeros(10)).values
    assert values.equal(track(x.flip(-1), torch.zeros(10)).values)
    assert values[:, :3].equal(x.sort(-1).values)


def test_all_orders_and_signs_are_equally_frequent():
    torch.manual_seed(0)
    x = torch.tensor([1.0, 2.0, 3.0]).expand(60_000, 3)
    orders = units("permutations", 3).shuffled(x) @ torch.tensor([100.0, 10.0, 1.0])
    values, counts = orders.unique(return_counts=True)
    assert values.tolist() == [123.0, 132.0, 213.0, 231.0, 312.0, 321.0]
    assert ((counts - 10_000).abs() < 4 * (10_000 * 5 / 6) ** 0.5).all()
    signs = units("reflections", 3).shuffled(x) @ torch.tensor([100.0, 10.0, 1.0])
    assert units("reflections", 3).ordered(-x).equal(x)
    assert ((signs.unique(return_counts=True)[1] - 7500).abs() < 4 * (7500 * 7 / 8) ** 0.5).all()
    permuted = units("permutations", 3)
    share = permuted.is_ordered(permuted.shuffled(x)).double().mean().item()
    assert share == pytest.approx(math.exp(-permuted.log_size), abs=0.006)


def test_key_separates_units_that_no_entry_separates():
    """Latent classes at three corners of a cube, of which each coordinate has two values."""
    torch.manual_seed(0)
    shapes = {"x": torch.Size([3, 3])}
    group = Symmetry("permutations", (Place(("x",), -1),), 3)
    found = Symmetries(shapes, {"x": dist.transforms.identity_transform}, (group,))
    corners = 5 * torch.eye(3)
    x = found.shuffled(corners.flatten() + torch.randn(500, 9))
    ordered = found.keyed(x).ordered(x)
    assert ordered.std(0).max() < 1.2  # 2.6 sds apart along the best line
    equal = torch.ones(5, 9)  # as particles that start at one point
    assert found.keyed(equal).ordered(equal).equal(equal)


def test_keys_belong_to_the_same_entries_without_rotations():
    """Rotations of ``a`` exclude it from the key of the units along its other dimension."""
    rotations = Symmetry("rotations", (Place(("a",), -1),), 2)
    order = Symmetry("permutations", (Place(("a",), -2), Place(("c",), -1)), 3)
    shapes = {"a": torch.Size([3, 2]), "c": torch.Size([3])}
    real = dist.transforms.identity_transform
    found = Symmetries(shapes, dict.fromkeys(shapes, real), (rotations, order))
    x = torch.randn(20, 9)
    assert found.finite().groups == (order,)
    assert found.finite().ordered(x)[:, 6:].equal(x[:, 6:].sort(-1).values)


def test_rotations_are_uniform():
    torch.manual_seed(0)
    found = units("rotations", 3)
    moved = found.shuffled(torch.tensor([2.0, 0.0, 0.0]).expand(20_000, 3))
    assert torch.allclose(moved.norm(dim=-1), torch.tensor(2.0))
    assert moved.mean(0).abs().max() < 4 * (4 / 3 / 20_000) ** 0.5
    assert torch.allclose(moved.T.cov(), 4 / 3 * torch.eye(3), atol=0.04)
    # A uniform point of a sphere has uniform coordinates (Archimedes).
    assert moved[:, 0].kthvalue(15_000).values.item() == pytest.approx(1.0, abs=0.06)
    assert found.log_size == math.inf and not found.finite()


def test_key_has_the_entries_by_which_units_differ():
    torch.manual_seed(0)
    shapes = {"far": torch.Size([3, 2]), "alike": torch.Size([2])}
    real = dist.transforms.identity_transform
    group = Symmetry("permutations", (Place(("alike",), -1), Place(("far",), -1)), 2)
    found = Symmetries(shapes, dict.fromkeys(shapes, real), (group,))
    far = torch.tensor([0.0, 0.0, -5.0, 5.0, 0.0, 0.0, 0.0, 0.0])
    x = found.shuffled(far + torch.randn(500, 8))
    keyed = found.keyed(x)
    weights = torch.tensor(keyed.groups[0].key)  # of ``alike``, and of the rows of ``far``
    assert weights.abs().argmax() == 2
    assert sorted(keyed.ordered(x)[:, 2:4].mean(0).tolist()) == pytest.approx([-5.0, 5.0], abs=0.2)


def test_groups_that_do_not_hold_in_the_posterior_are_dropped():
    def model():
        with pyro.plate("units", 2):
            x = pyro.sample("x", dist.LogNormal(0.0, 1.0))
        pyro.factor("rare", -(x[0] - 1e4).clamp(min=0.0))

    target = Target(model)
    found = find_symmetries(target)
    assert str(found) == "permutations of the 2 units of 'x'"
    near, far = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[11.0, 2.0], [12.0, 1.0]])
    assert confirmed(found, target, near).groups == found.groups
    assert not confirmed(found, target, far)


def test_a_cut_far_from_the_mode_breaks_permutations():
    """The densities near the mode are those of exchangeable elements."""

    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.factor("cut", torch.where(x[..., 0] > -1.5, 0.0, -torch.inf))

    assert find_symmetries(Target(model))
    result = fit(model, "auto", seed=0, progress=False)
    assert not result.symmetries and (result.sample(1000)["x"][:, 0] > -1.5).all()


PLACES = torch.tensor([-4.0, 1.0, 6.0])


def tied(size=2):
    """Each unit is at one of three places: modes with equal units have fewer copies."""
    with pyro.plate("units", size):
        x = pyro.sample("x", dist.Normal(0.0, 6.0))
    pyro.factor("places", dist.Normal(PLACES.unsqueeze(-1), 0.5).log_prob(x).logsumexp(0).sum(-1))


def test_groups_that_a_false_one_hides_are_found():
    """Draws of the prior are below the data, where the density of Laplace depends on a b' alone."""

    def model():
        a = pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Laplace(a * b, 1.0).to_event(1), obs=torch.tensor([30.0, 40.0]))

    target = Target(model)
    found = find_symmetries(target)
    assert str(found) == "rotations of the 2 units of 'a' and 'b'"
    point = torch.tensor([[6.0, 6.0, 7.0, 6.5]])
    again = str(confirmed(found, target, point))
    assert again == "reflections of the 2 units of 'a' and 'b'"


def test_search_keeps_one_copy_of_each_mode():
    target = Target(tied, 3)
    pyro.set_rng_seed(0)
    found = find_symmetries(target)
    every, some = find_modes(target), find_modes(target, symmetries=found)
    distinct = every.loc.sort(-1).values.round().unique(dim=0)
    assert len(every.loc) > len(distinct) == len(some.loc)
    assert some.loc.sort(-1).values.round().unique(dim=0).equal(distinct)


def test_modes_with_fewer_copies_have_their_weights():
    """Two independent units: equal places have a third of the mass, in one copy of each mode."""
    result = fit(tied, "auto", seed=0, progress=False)
    assert result.num_modes == 6 and result.refined.modes_weighed
    place = (result.sample(20_000)["x"].unsqueeze(-1) - PLACES).abs().argmin(-1)
    mass = dist.Normal(PLACES, (36 + 0.25) ** 0.5).log_prob(torch.zeros(())).exp()
    shares = torch.zeros(3, 3).index_put((place[:, 0], place[:, 1]), torch.tensor(5e-5), True)
    assert torch.allclose(shares, (mass / mass.sum()).outer(mass / mass.sum()), atol=0.012)
    expected = 2 * mass.sum().log().item()
    assert result.refined.weights.log_evidence == pytest.approx(expected, abs=0.05)
    assert log_evidence(result).value == pytest.approx(expected, abs=0.02)


def clusters(y):
    """Each component must take one of five clusters: 120 equal copies of one mode."""
    with pyro.plate("components", 5):
        loc = pyro.sample("loc", dist.Normal(0.0, 30.0))
    with pyro.plate("rows", y.numel()):
        z = pyro.sample("z", dist.Categorical(torch.ones(5)), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(loc[z], 1.0), obs=y.flatten())


def test_all_copies_of_a_mixture_have_draws():
    """Posterior and evidence of five conjugate normals, in all orders."""
    result = fit(clusters, "auto", Y, seed=0, progress=False)
    variance = 1 / (2 + 1 / 900)
    means = Y.sum(-1) * variance
    assert result.stages[0].outcome.startswith("1 mode up to symmetries, best ELBO")
    assert "permutations of the 5 units of 'loc'" in str(result)
    loc = result.sample(10_000)["loc"]
    sd = means.std(correction=0)
    assert ((loc.mean(0) - means.mean()).abs() < 4 * sd / 100).all()
    assert torch.allclose(loc.std(0), (sd**2 + variance).sqrt().expand(5), rtol=0.02)
    ordered = loc.sort(-1).values
    assert torch.allclose(ordered.mean(0), means, atol=0.04)
    assert torch.allclose(ordered.std(0), torch.tensor(variance).sqrt(), rtol=0.04)
    of_pair = dist.MultivariateNormal(torch.zeros(2), torch.eye(2) + 900)
    expected = of_pair.log_prob(Y).sum().item() + 10 * math.log(0.2) + math.lgamma(6)
    found = log_evidence(result)
    assert found.value == pytest.approx(expected, abs=0.02) and found.standard_error < 0.01


def test_signs_of_whole_sites():
    """Moments and evidence by quadrature; the two copies of the mode are far apart."""
    y = torch.tensor([1.5, -1.0])
    result = fit(product, "auto", y, seed=0, progress=False)
    assert result.num_modes == 1 and "reflections of 'a' and 'b' as a whole" in str(result)
    grid = torch.linspace(-8, 8, 2001, dtype=torch.float64)
    log_prior = dist.Normal(0.0, 1.0).log_prob(grid) + math.log(16 / 2000)
    means = grid.unsqueeze(-1) * grid  # of a and of one b
    log_joint = torch.stack([dist.Laplace(means, 0.2).log_prob(one) + log_prior for one in y])
    log_of_a = log_joint.logsumexp(-1).sum(0) + log_prior
    of_a, of_b = log_of_a.softmax(0), log_joint.softmax(-1)
    draws = result.sample(20_000)
    a, b = draws["a"].double(), draws["b"].double()
    assert torch.allclose(b.mean(0), torch.zeros(2).double(), atol=0.05)
    assert a.mean().item() == pytest.approx(0.0, abs=0.05)
    assert a.square().mean().item() == pytest.approx((of_a * grid.square()).sum().item(), rel=0.04)
    expected = (of_a * (of_b * means).sum(-1)).sum(-1)
    assert torch.allclose((a.unsqueeze(-1) * b).mean(0), expected, atol=0.02)


def test_signs_of_any_two_of_three_factors():
    """Moments by quadrature; four copies of the mode are far apart."""
    y = torch.tensor(8.0)
    result = fit(triple, "auto", y, seed=0, progress=False)
    assert result.num_modes == 1 and "'b' and 'c' as a whole" in str(result)
    c = torch.linspace(0.005, 7, 1400, dtype=torch.float64)  # in steps of 0.005
    ab = torch.linspace(0.01, 40, 4000, dtype=torch.float64)  # has the density K_0(ab) / pi
    log_joint = dist.Laplace(ab.outer(c), 0.3).log_prob(y) + dist.Normal(0.0, 1.0).log_prob(c)
    weight = log_joint.exp() * torch.special.modified_bessel_k0(ab).unsqueeze(-1) / math.pi
    expected = (weight.sum(0) * c.square()).sum() / weight.sum()
    draws = result.sample(20_000)
    signs = torch.stack([draws[name] > 0 for name in "abc"]).long()
    patterns, counts = (4 * signs[0] + 2 * signs[1] + signs[2]).unique(return_counts=True)
    assert patterns.tolist() == [1, 2, 4, 7]  # the product is positive
    assert ((counts / 20_000 - 0.25).abs() < 0.015).all()
    for name in "abc":
        assert draws[name].square().mean().item() == pytest.approx(expected.item(), rel=0.04)
    log_mass = (2 * weight.sum() * 0.01 * 0.005).log().item()  # of both signs of c
    assert log_evidence(result).value == pytest.approx(log_mass, abs=0.03)


@pytest.mark.parametrize("height", [20.0, -20.0])
def test_a_spike_that_few_points_show_is_no_copy(height):
    """The mode or the hole at 4 is too narrow to be seen from elsewhere."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("spike", height * torch.exp(-0.5 * ((x - 4) / 0.01) ** 2))

    target = Target(model)
    found = find_symmetries(target)
    assert str(found) == "reflections of 'x' as a whole"
    points = torch.randn(30, 1, generator=torch.Generator().manual_seed(0))
    assert confirmed(found, target, points)
    points[20] = 4.0
    assert not confirmed(found, target, points)


def test_integrated_variables_are_moved_with_the_others():
    """Two rates that differ by about 20, in both orders, and counts that are summed out."""

    def model(y):
        with pyro.plate("rows", 2):
            rate = pyro.sample("rate", dist.Gamma(4.0, 0.1))
            n = pyro.sample("n", dist.Poisson(rate))
            pyro.sample("y", dist.Binomial(n, 0.3), obs=y)
        pyro.factor("apart", dist.Normal(20.0, 1.0).log_prob((rate[..., 0] - rate[..., 1]).abs()))

    integration = replace(FIT.integration, num_samples=2048, weigh_seconds=1e-3, step_seconds=1e-4)
    options = {"seed": 0, "progress": False, "policy": replace(FIT, integration=integration)}
    result = fit(model, "auto", torch.tensor([8.0, 8.0]), **options)
    assert str(result.marginal.symmetries) == "permutations of the 2 units of 'rate'"
    assert result.marginal.num_modes == 1
    draws = result.sample(4000)
    is_first = draws["rate"][:, 0] > draws["rate"][:, 1]
    assert is_first.double().mean().item() == pytest.approx(0.5, abs=0.05)
    more = draws["n"][:, 0] - draws["n"][:, 1]
    # The counts are y and Poisson(0.7 rate) more.
    assert more[is_first].mean().item() == pytest.approx(14.0, abs=1.0)
    assert more[~is_first].mean().item() == pytest.approx(-14.0, abs=1.0)


def test_a_guide_alone_has_all_copies():
    result = fit(tied, "auto", seed=0, refine=False, num_steps=20, progress=False)
    assert result.num_modes == 9 and result.symmetries is None


def test_chains_of_one_copy_give_draws_of_all():
    loc = torch.tensor([40.0, 0.0, 20.0, -40.0, -20.0]) + torch.randn(64, 5)
    start = {"loc": units("permutations", 5).shuffled(loc)}
    found = refine(clusters, start, Y, num_chains=64, seed=0, progress=False)
    assert found.stopped == "converged" and found.drift.r_hat < 1.1
    assert "symmetries" in str(found) and len(found.chains.points.argsort(-1).unique(dim=0)) == 1
    shares = (found.get_samples()["loc"] > 30).double().mean(0)
    assert torch.allclose(shares, torch.tensor(0.2).double(), atol=0.02)
    again = refine(clusters, start, Y, num_chains=64, seed=0, progress=False)
    assert again.get_samples()["loc"].equal(found.get_samples()["loc"])


def spike_and_slab(y):
    """Coefficients whose prior depends on a discrete latent variable that is summed out."""
    with pyro.plate("coefficients", len(y)):
        slab = pyro.sample("slab", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
        b = pyro.sample("b", dist.Normal(0.0, torch.where(slab > 0, 3.0, 0.5)))
        pyro.sample("y", dist.Normal(b, 1.0), obs=y)


def test_sites_that_depend_on_summed_out_ones():
    found = find_symmetries(Target(spike_and_slab, torch.ones(3)))
    assert str(found) == "permutations of the 3 units of 'b'"


def test_a_spike_and_a_slab_have_their_exact_posterior():
    y = torch.tensor([0.5, -2.5])
    draws = fit(spike_and_slab, "auto", y, seed=0, progress=False).sample(4000)["b"]
    variances = torch.tensor([[0.5], [3.0]]) ** 2
    log_evidence = dist.Normal(0.0, (1 + variances).sqrt()).log_prob(y)
    weights = (torch.tensor([[0.6], [0.4]]).log() + log_evidence).softmax(0)
    means, given = y * variances / (1 + variances), variances / (1 + variances)
    mean = (weights * means).sum(0)
    sd = ((weights * (given + means**2)).sum(0) - mean**2).sqrt()
    assert ((draws.mean(0) - mean).abs() < 0.08 * sd).all()  # four standard errors and a half
    assert torch.allclose(draws.std(0), sd, rtol=0.06)
