# SPDX-License-Identifier: Apache-2.0
"""Implicit guides of models with latents of rows, with parameters of each row, by minibatches."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoGuideList, AutoNormal

from pyro_implicit import (
    LIVI_ELBO,
    AutoImplicit,
    AutoMixture,
    AutoregressiveGenerator,
    AutoSemiImplicit,
    InjectiveELBO,
    fit,
)
from pyro_implicit.fitting import Fit
from pyro_implicit.guides import AutoEnsemble, Frame
from pyro_implicit.guides.policy import ROW_SLOPE
from pyro_implicit.runtime.global_state import seeded
from tests.test_contract import ELBOS, NUM_PARTICLES, refusal

NUM_ROWS, SPREAD, NOISE = 12, 1.0, 1.0


def model(x, index):
    mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 3.0))
    with pyro.plate("rows", NUM_ROWS, subsample=index):
        z = pyro.sample("z", dist.Normal(mean, SPREAD))
        pyro.sample("x", dist.Normal(z, NOISE), obs=x)


def model_of_all(x, index):
    """The same; ``create_plates`` alone subsamples, as in Pyro's forecasting tutorial."""
    mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 3.0))
    with pyro.plate("rows", NUM_ROWS) as seen:
        z = pyro.sample("z", dist.Normal(mean, SPREAD))
        pyro.sample("x", dist.Normal(z, NOISE), obs=x[seen])


def rows_of(x, index):
    return pyro.plate("rows", NUM_ROWS, subsample=index)


def data():
    generator = torch.Generator().manual_seed(0)
    return 2 + 1.6 * torch.randn(NUM_ROWS, dtype=torch.float64, generator=generator)


def exact(x):
    """The posterior of the mean, and location, slope and scale of each row given the mean."""
    precision = 1 / 9 + NUM_ROWS / (SPREAD**2 + NOISE**2)
    mean, sd = (x.sum() / (SPREAD**2 + NOISE**2) / precision).item(), precision**-0.5
    share = NOISE**2 / (SPREAD**2 + NOISE**2)
    loc = share * mean + (1 - share) * x
    return mean, sd, loc, share, math.sqrt(share) * SPREAD


def log_evidence(x):
    covariance = 9 * torch.ones(NUM_ROWS, NUM_ROWS).double()
    covariance += (SPREAD**2 + NOISE**2) * torch.eye(NUM_ROWS).double()
    return dist.MultivariateNormal(0 * x, covariance).log_prob(x)


def set_exact(guide, x):
    mean, _, loc, slope, scale = exact(x)
    with torch.no_grad():
        guide.rows.loc_z.copy_(loc)
        guide.rows.slope_z.fill_(0.7 * slope / ROW_SLOPE)
        guide.rows.shared_z.fill_(0.3 * slope)
        guide.rows.scale_z_unconstrained.fill_(math.log(scale))


@pytest.mark.parametrize("size, whole", [(3, False), (4, False), (4, True)])
def test_minibatches_of_an_exact_guide_add_up_to_the_evidence(size, whole):
    """At each draw of the mean, the bounds of disjoint minibatches have the evidence as mean."""
    x, one = data(), model_of_all if whole else model
    mean, sd, *_ = exact(x)
    frame = Frame(torch.tensor([mean]).double(), scale=torch.tensor([sd]).double())
    guide = AutoImplicit(one, AutoregressiveGenerator, frame=frame, create_plates=rows_of)
    batches = [index for index in torch.randperm(NUM_ROWS).split(size)]
    seen = (lambda index: x) if whole else x.__getitem__
    guide(seen(batches[0]), batches[0])
    set_exact(guide, x)
    elbo, losses = InjectiveELBO(2), []
    elbo.loss(one, guide, seen(torch.arange(4)), torch.arange(4))  # the first run draws more
    for index in batches:
        pyro.set_rng_seed(1)  # the same draw of the mean
        losses.append(elbo.loss(one, guide, seen(index), index))
    assert max(losses) - min(losses) > 1  # the minibatches differ
    assert -sum(losses) / len(losses) == pytest.approx(log_evidence(x).item(), abs=1e-6)


def test_rows_of_a_part_of_a_guide_list():
    """The list has the plates, and the part the parameters of all rows."""

    def both(x, index):
        pyro.sample("other", dist.Normal(x.new_zeros(()), 1.0))
        model(x, index)

    x, index = data(), torch.tensor([2, 7, 5])
    guide = AutoGuideList(both, create_plates=rows_of)
    guide.append(AutoNormal(poutine.block(both, expose=["other"])))
    guide.append(AutoSemiImplicit(poutine.block(both, hide=["other"])))
    assert guide(x[index], index)["z"].shape == (3,)
    LIVI_ELBO(4).loss_and_grads(both, guide, x[index], index)
    grad = guide[1].rows.loc_z_unconstrained.grad
    assert grad.shape == (NUM_ROWS,) and sorted(grad.nonzero().flatten().tolist()) == [2, 5, 7]


@pytest.mark.parametrize("has_local", [True, False])
def test_discrete_latents_of_rows_are_summed_out(has_local):
    def with_classes(x, index, by_hand=False):
        mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 3.0))
        with pyro.plate("rows", NUM_ROWS, subsample=index):
            z = pyro.sample("z", dist.Normal(mean, SPREAD)) if has_local else mean
            if by_hand:
                parts = [0.7 * dist.Normal(z, NOISE).log_prob(x).exp()]
                parts.append(0.3 * dist.Normal(z + 2, NOISE).log_prob(x).exp())
                pyro.factor("x", sum(parts).log())
            else:
                y = pyro.sample("y", dist.Bernoulli(x.new_tensor(0.3)))
                pyro.sample("x", dist.Normal(z + 2 * y, NOISE), obs=x)

    x, index = data(), torch.tensor([2, 7, 5])
    guide = AutoImplicit(
        with_classes, AutoregressiveGenerator, frame=None, create_plates=lambda *a: rows_of(*a[:2])
    )
    assert guide(x[index], index).keys() == ({"mean", "z"} if has_local else {"mean"})
    losses = []
    for by_hand in (False, True):
        elbo = InjectiveELBO(4)
        elbo.loss(with_classes, guide, x[index], index, by_hand)  # the first run draws more
        pyro.set_rng_seed(1)
        losses.append(elbo.loss(with_classes, guide, x[index], index, by_hand))
    assert losses[0] == pytest.approx(losses[1])


def expected_loss(x, mean, sd, loc, slope, scale):
    """The expected share of rows in the loss, up to a constant."""
    prior = (mean - loc) ** 2 + (1 - slope) ** 2 * sd**2 + scale**2
    data = (x - loc) ** 2 + slope**2 * sd**2 + scale**2
    return prior / (2 * SPREAD**2) + data / (2 * NOISE**2) - scale.log()


@pytest.mark.parametrize("vectorize", ["vmap", "plate"])
def test_gradients_of_the_rows_of_a_minibatch(vectorize):
    x, index, sd = data(), torch.tensor([2, 7, 5]), 0.6
    frame = Frame(torch.tensor([1.0]).double(), scale=torch.tensor([sd]).double())
    guide = AutoImplicit(model, AutoregressiveGenerator, frame=frame, create_plates=rows_of)
    guide(x[index], index)
    values = [x + 0.3, 0.1 * x.unsqueeze(-1), 0.2 + 0.1 * x.abs()]
    with torch.no_grad():
        for name, value in zip(("loc", "slope", "scale"), values, strict=True):
            raw = {"scale": value.log(), "slope": value / ROW_SLOPE}.get(name, value)
            getattr(guide.rows, f"{name}_z_unconstrained").copy_(raw)
    loc, slope, raw = values[0], values[1].squeeze(-1), values[2].log()
    given = [one.clone().requires_grad_() for one in (loc, slope / ROW_SLOPE, raw)]
    loss = expected_loss(x, 1.0, sd, given[0], ROW_SLOPE * given[1], given[2].exp())
    exact = torch.autograd.grad(NUM_ROWS / 3 * loss[index].sum(), given)
    elbo = InjectiveELBO(20_000, vectorize_particles=vectorize)
    elbo.loss_and_grads(model, guide, x[index], index)
    for name, one in zip(("loc", "slope", "scale"), exact, strict=True):
        found = getattr(guide.rows, f"{name}_z_unconstrained").grad.reshape(-1)
        assert (found != 0).sum() == 3  # of these rows only
        torch.testing.assert_close(found, one, rtol=0.03, atol=0.3)


def test_fit_by_minibatches_against_the_exact_posterior(tmp_path):
    x, index = data().float(), torch.arange(NUM_ROWS)
    mean, sd, loc, share, scale = exact(x)
    guide = AutoSemiImplicit(model, create_plates=rows_of)
    batches = [(x[some], some) for some in index.split(4)]
    result = fit(
        model, guide, batches=batches, epochs=130, lr=0.05, num_particles=8, seed=0, progress=False
    )
    draws = result.sample(4000, x, index)
    width = math.sqrt(scale**2 + (share * sd) ** 2)
    assert draws["mean"].mean().item() == pytest.approx(mean, abs=0.3 * sd)
    # Rows that are independent of the mean would make it too narrow, by sqrt(1/2).
    assert draws["mean"].std().item() == pytest.approx(sd, rel=0.2)
    correlation = torch.corrcoef(torch.cat([draws["mean"][:, None], draws["z"]], -1).mT)[0, 1:]
    assert correlation.mean().item() == pytest.approx(share * sd / width, abs=0.1)
    torch.testing.assert_close(draws["z"].mean(0), loc, rtol=0, atol=0.3 * width)
    torch.testing.assert_close(draws["z"].std(0), torch.full_like(loc, width), rtol=0.2, atol=0)
    few = result.sample(5, x[:3], index[:3])
    assert few["z"].shape == (5, 3)
    with pytest.raises(TypeError, match="Cure: pass the arguments of the model as well"):
        result.sample(5)
    assert result.guide.median().keys() == {"mean"}
    predictive = Predictive(model, guide=result.guide, num_samples=2)
    assert predictive(x[:3], index[:3])["z"].shape == (2, 3)
    result.save(tmp_path / "fit.pt")
    loaded = Fit.load(tmp_path / "fit.pt", model)
    with seeded(0):
        first = result.sample(7, x[:3], index[:3])["z"]
    with seeded(0):
        assert torch.equal(first, loaded.sample(7, x[:3], index[:3])["z"])


def test_the_first_minibatch_gives_the_start():
    """The posterior of these rows alone: wide, and the prior where they say nothing."""

    def with_scale(x, index):
        model(x, index)
        pyro.sample("scale", dist.LogNormal(x.new_tensor(-1.0), 0.7))

    x = data()
    index = torch.tensor([7, 2, 10, 5])
    precision = 1 / 9 + 4 / (SPREAD**2 + NOISE**2)
    mean = (4 * x[index].mean() / (SPREAD**2 + NOISE**2) / precision).item()
    share = NOISE**2 / (SPREAD**2 + NOISE**2)
    guide = AutoImplicit(with_scale, AutoregressiveGenerator, create_plates=rows_of)
    guide(x[index], index)
    rows, close = guide.rows, {"rtol": 1e-4, "atol": 1e-4}
    scales = torch.tensor([precision**-0.5, 0.7]).double()
    torch.testing.assert_close(guide.frame_loc, torch.tensor([mean, -1.0]).double(), **close)
    torch.testing.assert_close(guide.frame_scale_tril, scales.diag(), **close)
    loc = share * mean + (1 - share) * x[index]
    others = torch.ones(NUM_ROWS).bool().index_fill(0, index, False)
    torch.testing.assert_close(rows.loc_z[index], loc, **close)
    torch.testing.assert_close(rows.loc_z[others], loc.mean().expand(8), **close)
    torch.testing.assert_close(rows.scale_z, torch.full_like(x, share**0.5 * SPREAD), **close)
    slopes = torch.tensor([share, 0.0]).double().expand(12, 2)
    torch.testing.assert_close(ROW_SLOPE * rows.slope_z + rows.shared_z, slopes, **close)


def test_the_start_of_crossed_rows_of_minibatches():
    """Each plate leaves out another share of its rows; the Gaussian of all latents is exact."""

    def crossed(x, users, items):
        mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 1.0))
        of_users, of_items = plates(x, users, items)
        with of_users:
            u = pyro.sample("u", dist.Normal(mean, 1.0))
        with of_items:
            v = pyro.sample("v", dist.Normal(x.new_zeros(()), 2.0))
        with of_users, of_items:
            pyro.sample("x", dist.Normal(u + v, 1.0), obs=x)

    def plates(x, users, items):
        return [
            pyro.plate("users", 20, subsample=users, dim=-2),
            pyro.plate("items", 1000, subsample=items, dim=-1),
        ]

    x, users, items = torch.randn(4, 3).double(), torch.tensor([3, 1, 9, 7]), torch.arange(5, 8)
    guide = AutoSemiImplicit(crossed, create_plates=plates)
    guide(x, users, items)
    precision = torch.zeros(8, 8).double()  # of the mean, u and v
    for row in range(4):
        for column in range(3):
            term = torch.zeros(8).double()
            term[1 + row] = term[5 + column] = 1.0
            precision += term.outer(term)
    precision += torch.tensor([1.0] + [0.0] * 4 + [0.25] * 3).double().diag()
    for row in range(4):
        term = torch.zeros(8).double()
        term[0], term[1 + row] = -1.0, 1.0
        precision += term.outer(term)
    covariance = precision.inverse()
    close = {"rtol": 1e-3, "atol": 1e-3}
    assert guide.frame_scale_tril.item() == pytest.approx(covariance[0, 0].item() ** 0.5, rel=1e-3)
    slopes = covariance[1:, 0] / covariance[0, 0]
    scales = (covariance.diagonal()[1:] - slopes**2 * covariance[0, 0]).sqrt()
    rows = guide.rows
    torch.testing.assert_close(rows.scale_u[users].flatten(), scales[:4], **close)
    torch.testing.assert_close(rows.scale_v[..., items].flatten(), scales[4:], **close)
    found = ROW_SLOPE * rows.slope_u + rows.shared_u
    torch.testing.assert_close(found[users].flatten(), slopes[:4], **close)


@pytest.mark.parametrize("sort", [True, False])
def test_a_first_call_with_all_rows(sort):
    """Later calls may have fewer, as with Pyro's AutoNormal, or another order."""
    x, index = data(), torch.randperm(NUM_ROWS)
    first = index.sort().values if sort else index
    guide = AutoSemiImplicit(model, create_plates=rows_of)
    guide(x[first], first)
    assert guide.latent_dim == 1
    assert guide(x[index[:5]], index[:5])["z"].shape == (5,)
    *_, loc, share, _ = exact(x)
    torch.testing.assert_close(guide.rows.loc_z, loc, rtol=1e-3, atol=1e-3)


def beside_groups(x, index):
    with pyro.plate("groups", 4):
        pyro.sample("y", dist.Normal(pyro.sample("group", dist.Normal(0.0, 1.0)), 1.0), obs=x[:4])
    model(x, index)


def in_parts(x, index):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("parts", 3, dim=-2), pyro.plate("rows", NUM_ROWS, subsample=index, dim=-1):
        pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(mean, 1.0)), 1.0), obs=x)


def rows_alone(x, index):
    with pyro.plate("rows", NUM_ROWS, subsample=index):
        pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0), obs=x)


@pytest.mark.parametrize(
    ("one", "dim", "shape"),
    [(model, 1, (5,)), (beside_groups, 5, (5,)), (in_parts, 1, (3, 5))],
)
@pytest.mark.parametrize("is_converted", [True, False])
def test_first_calls_with_all_rows_of_other_models(one, dim, shape, is_converted):
    """Also for indices of another type, which ``create_plates`` may convert."""
    x, index = data().float(), torch.arange(NUM_ROWS, dtype=torch.int32)

    def plates(x, index):
        return rows_of(x, index.long() if is_converted else index)

    guide = AutoSemiImplicit(one, create_plates=plates, frame=None)
    guide(x, index)
    assert guide.latent_dim == dim and guide(x[:5], index[:5])["z"].shape == shape


def test_an_integer_argument_may_equal_the_indices_of_all_rows():
    """A column of times 0, 1, ... is no ``subsample=``."""

    def drift(x, time):
        mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
        with pyro.plate("rows", len(x)):
            pyro.sample(
                "x", dist.Normal(pyro.sample("z", dist.Normal(mean * time, 1.0)), 1.0), obs=x
            )

    x, time = data().float(), torch.arange(NUM_ROWS)
    guide = AutoSemiImplicit(drift, create_plates=lambda x, time: pyro.plate("rows", len(x)))
    assert guide(x, time)["z"].shape == (NUM_ROWS,) and guide.latent_dim == NUM_ROWS + 1


@pytest.mark.parametrize("hides_data", [False, True])
def test_all_rows_and_then_few_rows_of_other_indices(hides_data):
    """The first call of all rows has NumPy indices, or belongs to a part that sees no data."""
    x, index = data().float(), torch.arange(NUM_ROWS)
    if hides_data:
        guide = AutoGuideList(model, create_plates=rows_of)
        guide.append(AutoSemiImplicit(poutine.block(model, expose=["mean", "z"])))
    else:
        index = index.numpy()

        def of_arrays(function):
            return lambda x, index: function(x, torch.as_tensor(index))

        guide = AutoSemiImplicit(of_arrays(model), create_plates=of_arrays(rows_of))
    assert guide(x, index)["z"].shape == (NUM_ROWS,)
    assert guide(x[:3], index[2:5])["z"].shape == (3,)


def test_all_rows_stay_in_a_joint_guide_that_cannot_have_rows():
    x, index = data().float(), torch.arange(NUM_ROWS)
    guide = AutoSemiImplicit(rows_alone, create_plates=rows_of)
    assert guide(x, index)["z"].shape == (NUM_ROWS,) and guide.latent_dim == NUM_ROWS
    parts = [AutoSemiImplicit(model, frame=None) for _ in range(2)]
    assert AutoMixture(model, parts, create_plates=rows_of)(x, index).keys() == {"mean", "z"}
    with pytest.raises(ValueError, match=r"all latents .* plate 'rows'.*Cure: AutoAmortized"):
        AutoSemiImplicit(rows_alone, create_plates=rows_of)(x[:3], index[:3])


def test_fit_of_an_exact_guide_whose_first_call_has_all_rows():
    """``fit`` has no paths to weigh of the rows' densities."""
    x, index = data(), torch.arange(NUM_ROWS)
    guide = AutoImplicit(model, AutoregressiveGenerator, create_plates=rows_of)
    result = fit(model, guide, x, index, num_steps=20, seed=0, progress=False, refine=False)
    assert result.sample(5, x, index)["z"].shape == (5, NUM_ROWS)


def test_rows_of_another_guide_in_the_store():
    AutoSemiImplicit(model, create_plates=rows_of, frame=None)(data()[:3], torch.arange(3))

    def more(x, index):
        mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 3.0))
        with pyro.plate("rows", 20, subsample=index):
            pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(mean, 1.0)), 1.0), obs=x)

    guide = AutoSemiImplicit(
        more, create_plates=lambda x, index: pyro.plate("rows", 20, subsample=index), frame=None
    )
    with pytest.raises(ValueError, match=r"rows\.loc_z' of another guide \(shape \(12,\), here"):
        guide(data()[:3], torch.arange(3))


def nested(x, index):
    """A positive vector of two numbers and, in one more plate, a number for each row."""
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("rows", 20, subsample=index, dim=-1):
        z = pyro.sample("z", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("parts", 2, dim=-2):
            part = pyro.sample("part", dist.Normal(0.0, scale.sum(-1)))
            pyro.sample("x", dist.Normal(part + z[..., 0], 1.0), obs=x)


@pytest.mark.parametrize(
    "name",
    [name for name in ELBOS if name != "Renyi" and not refusal("AutoSemiImplicit", name)],
)
def test_every_method_trains_the_rows_of_a_minibatch(name):
    x, index = torch.randn(2, 5), torch.tensor([3, 8, 0, 19, 4])
    guide = AutoSemiImplicit(
        nested, create_plates=lambda x, index: pyro.plate("rows", 20, subsample=index, dim=-1)
    )
    assert math.isfinite(ELBOS[name](NUM_PARTICLES).loss_and_grads(nested, guide, x, index))
    for site, dim, size in (("z", 0, 2), ("part", 1, 1)):
        for kind in ("loc", "scale", "slope"):
            grad = getattr(guide.rows, f"{kind}_{site}_unconstrained").grad
            found = grad.movedim(dim, 0).reshape(20, -1).abs().sum(-1)
            assert found.nonzero().flatten().tolist() == sorted(index.tolist())
        assert (getattr(guide.rows, f"shared_{site}_unconstrained").grad != 0).any()
        assert guide.rows.loc_z.shape[-1] == size or site == "part"
    draws = guide.sample_posterior(7, x[:, :2], index[:2])
    shapes = {key: tuple(value.shape) for key, value in draws.items()}
    assert shapes == {"scale": (7, 3), "z": (7, 2, 3), "part": (7, 2, 2)}
    torch.testing.assert_close(draws["z"].sum(-1), torch.ones(7, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"site 'z' has one latent for each of the 12.*with create_plates="),
        ({"create_plates": lambda *_: []}, r"one latent for each row of plate 'rows', but create_"),
    ],
)
def test_refusals(options, message):
    guide = AutoSemiImplicit(model, **options)
    for _ in range(2):  # the second call says the same
        with pytest.raises(ValueError, match=message):
            guide(torch.zeros(3), torch.arange(3))


def test_a_mixture_has_no_parameters_of_rows():
    parts = [AutoImplicit(model, AutoregressiveGenerator, create_plates=rows_of)]
    with pytest.raises(ValueError, match=r"AutoMixture has no .* site 'z'.*AutoSemiImplicit"):
        AutoMixture(model, parts, create_plates=rows_of)(torch.zeros(3), torch.arange(3))


def test_members_of_an_ensemble_have_common_rows():
    x, index = torch.zeros(3), torch.arange(3)
    guide = AutoEnsemble(model, 2, create_plates=rows_of)
    guide(x, index)
    with torch.no_grad():
        guide.members = torch.tensor([[-1.0], [3.0]])
        guide.rows.slope_z, guide.rows.shared_z = (
            torch.full((12, 1), 0.2 / ROW_SLOPE),
            torch.full((1, 1), 0.3),
        )
        guide.rows.scale_z = torch.full((12,), 1e-4)
    draws = guide.sample_posterior(2, x, index)
    expected = guide.rows.loc_z[:3] + 0.5 * (draws["mean"].unsqueeze(-1) - 1.0)
    torch.testing.assert_close(draws["z"], expected, atol=1e-3, rtol=0)


def test_names_with_dots_and_underscores_are_different_latents():
    def pair(x, index):
        pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", NUM_ROWS, subsample=index):
            first = pyro.sample("z.loc", dist.Normal(5.0, 1.0))
            second = pyro.sample("z_loc", dist.Normal(-5.0, 1.0))
            pyro.sample("x", dist.Normal(first + second, 1.0), obs=x)

    guide = AutoSemiImplicit(pair, frame=None, create_plates=rows_of)
    guide(data()[:4], torch.arange(4))
    with torch.no_grad():
        guide.rows.loc_z_loc.fill_(-7.0)
    drawn = guide.sample_posterior(100, data()[:4], torch.arange(4))
    assert drawn["z_loc"].mean() < -6 and drawn["z.loc"].mean() > 4


@pytest.mark.parametrize("kind", [AutoSemiImplicit, AutoEnsemble])
def test_summaries_have_the_latents_of_rows(kind):
    guide, index = kind(model, create_plates=rows_of), torch.tensor([2, 7, 5])
    x = data()[index]
    guide(x, index)
    median = guide.median(x, index)
    assert {name: value.shape for name, value in median.items()} == {"mean": (), "z": (3,)}
    low, high = guide.quantiles([0.1, 0.9], x, index)["z"]
    drawn = guide.sample_posterior(2000, x, index)["z"]
    share = ((drawn > low) & (drawn < high)).double().mean(0)
    assert (share - 0.8).abs().max() < 0.06
