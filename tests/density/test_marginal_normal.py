# SPDX-License-Identifier: Apache-2.0
"""Conditionally normal latent variables: what is found, refused and integrated out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam
from torch import Tensor

from pyro_implicit.density import marginal_normal as module
from pyro_implicit.density.marginal import MarginalModel
from pyro_implicit.density.marginal_normal import JointDensity, NormalMarginal
from pyro_implicit.density.policy import MARGINAL
from pyro_implicit.density.target import Target

SIZE = 40
Y = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)).cumsum(0)


def find_marginal(target: Target) -> NormalMarginal | None:
    return module.find_normal_marginal(target, replace(MARGINAL, least_latents=0))


def walk(y: Tensor, observe: Any = dist.Normal, mask: Any = None) -> None:
    """A random walk of standardised steps, as in the how-to on time series."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
    start = pyro.sample("start", dist.Normal(0.0, 5.0))
    with pyro.plate("time", len(y)):
        steps = pyro.sample("steps", dist.Normal(0.0, 1.0))
        with poutine.mask(mask=torch.ones(len(y), dtype=torch.bool) if mask is None else mask):
            pyro.sample("y", observe(start + scale * steps.cumsum(-1), noise), obs=y)


def walk_exactly(rest: Tensor, y: Tensor, seen: Tensor) -> Tensor:
    """The density of scale, noise and start in unconstrained space, by dense algebra."""
    scale, noise, start = rest[0].exp(), rest[1].exp(), rest[2]
    time = torch.arange(1, len(y) + 1).double()
    covariance = scale**2 * torch.minimum(time, time.unsqueeze(-1))
    covariance = covariance[seen][:, seen] + noise**2 * torch.eye(int(seen.sum())).double()
    normal = torch.distributions.MultivariateNormal(start.expand(len(covariance)), covariance)
    prior = dist.HalfNormal(1.0).log_prob(scale) + rest[0] + dist.Normal(0.0, 1.0).log_prob(rest[1])
    return normal.log_prob(y.double()[seen]) + prior + dist.Normal(0.0, 5.0).log_prob(start)


@pytest.mark.parametrize("is_missing", [False, True])
def test_value_gradient_and_curvature_of_a_walk(is_missing: bool) -> None:
    """The sums of the steps have a tridiagonal precision matrix; missing steps are NaN."""
    seen = torch.ones(SIZE, dtype=torch.bool)
    y = Y.clone()
    if is_missing:
        seen[3:9] = seen[-1] = False
        y[~seen] = math.nan
    target = Target(walk, y, mask=seen)
    marginal = find_marginal(target)
    assert marginal.names == ["steps"] and list(marginal.shapes) == ["scale", "noise", "start"]
    assert len(marginal._structure.seeds) == 3
    rest = 0.5 * torch.randn(3, 3).double()
    value, score = marginal.evaluate(rest)
    inner = Target(MarginalModel(marginal), y, mask=seen)
    hessian = inner.derivatives(rest.float())[2]
    for k, point in enumerate(rest):
        point = point.requires_grad_()
        exact = walk_exactly(point, y, seen)
        torch.testing.assert_close(value[k], exact.detach())
        slope = torch.autograd.grad(exact, point)[0]
        torch.testing.assert_close(score[k], slope, rtol=1e-6, atol=1e-6)
        curved = torch.autograd.functional.hessian(lambda p: walk_exactly(p, y, seen), point)
        size = curved.abs().max().item()
        torch.testing.assert_close(hessian[k].double(), curved, rtol=1e-4, atol=1e-4 * size)
    torch.testing.assert_close(
        inner.log_prob(rest.float().detach()).double(), value, rtol=1e-5, atol=1e-3
    )


def test_draws_have_the_conditional_moments() -> None:
    """Steps given the others, by dense algebra; the joint density of each draw agrees."""
    marginal = find_marginal(Target(walk, Y))
    rest = torch.tensor([[-0.5, 0.3, 1.0]]).double()
    number = 4000
    draws, value, fault = marginal.draw(rest.expand(number, -1))
    assert fault.max() == 0 and (value == value[0]).all()
    steps = marginal.target.split(draws)["steps"].double()
    sums = math.exp(-0.5) * torch.ones(SIZE, SIZE).double().tril()
    covariance = torch.linalg.inv(torch.eye(SIZE) + sums.T @ sums / math.exp(0.6))
    mean = covariance @ sums.T @ (Y.double() - 1.0) / math.exp(0.6)
    sd = covariance.diagonal().sqrt()
    assert ((steps.mean(0) - mean) / sd).abs().max() < 5 / number**0.5
    assert (steps.T.cov() - covariance).div(sd).div(sd.unsqueeze(-1)).abs().max() < 7 / number**0.5


@pytest.mark.parametrize(("is_dense", "size"), [(False, 150), (True, 150), (True, 90)], ids=str)
def test_small_sites_are_integrated_with_large_ones_if_it_is_cheap(
    is_dense: bool, size: int
) -> None:
    """Six starts of a season touch few data each; six slopes touch all, and stay."""
    x = torch.randn(size, 6)
    if not is_dense:
        x[12:] = 0.0
    y = torch.randn(size)

    def model(x: Tensor, y: Tensor) -> None:
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        small = pyro.sample("small", dist.Normal(torch.zeros(6), 1.0).to_event(1))
        with pyro.plate("rows", size):
            z = pyro.sample("z", dist.Normal(0.0, tau))
            pyro.sample("y", dist.Normal(z + x @ small, 1.0), obs=y)

    marginal = find_marginal(Target(model, x, y))
    assert set(marginal.names) == ({"z"} if is_dense else {"z", "small"})
    tau = torch.tensor([0.3, 1.0]).double()
    if not is_dense:
        for point, value in zip(tau.log(), marginal(tau.log().unsqueeze(-1)), strict=True):
            scale = point.exp()
            total = x.double() @ x.T.double() + (scale**2 + 1) * torch.eye(size)
            normal = dist.MultivariateNormal(torch.zeros(size).double(), total)
            exact = normal.log_prob(y.double()) + dist.HalfNormal(1.0).log_prob(scale) + point
            torch.testing.assert_close(value, exact)


def test_small_sites_alone_stay() -> None:
    def model(y: Tensor) -> None:
        small = pyro.sample("small", dist.Normal(torch.zeros(6), 1.0).to_event(1))
        pyro.sample("seen", dist.Normal(small, 1.0).to_event(1), obs=y[:6])
        with pyro.plate("rows", len(y)):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.StudentT(4.0, x, 1.0), obs=y)

    assert find_marginal(Target(model, Y[:25])) is None


def almost(kind: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor], None]:
    """A normal prior with a likelihood that is not, or not quite, normal."""

    def model(y: Tensor) -> None:
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("rows", len(y)):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            fn, value = kind(tau * x, y)
            pyro.sample("y", fn, obs=value)

    return model


def one_of_many(mean: Tensor, y: Tensor) -> tuple[Any, Tensor]:
    nu = torch.full_like(y, 1e7)
    nu[7] = 4.0
    return dist.StudentT(nu, mean, 1.0), y


ALMOST: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "student": lambda m, y: (dist.StudentT(4.0, m, 1.0), y),
    "student with many degrees of freedom": lambda m, y: (dist.StudentT(1e4, m, 1.0), y),
    "one student row": one_of_many,
    "wide student": lambda m, y: (dist.StudentT(4.0, m, 1e3), y),
    "logistic": lambda m, y: (dist.Bernoulli(logits=m), (y > 0).float()),
    "flat logistic": lambda m, y: (dist.Bernoulli(logits=1e-3 * m), (y > 0).float()),
    "poisson": lambda m, y: (dist.Poisson((1e-2 * m).exp()), y.abs().round()),
    "laplace": lambda m, y: (dist.Laplace(m, 1.0), y),
    "kink far out": lambda m, y: (dist.Normal(m + 0.1 * (m - 50).relu(), 1.0), y),
    "jump": lambda m, y: (dist.Normal(m.detach().sign() + m, 1.0), y),
    "sine": lambda m, y: (dist.Normal(m + 1e-3 * m.sin(), 1.0), y),
    "scale": lambda m, y: (dist.Normal(m, (1e-3 * m).exp()), y),
    "square": lambda m, y: (dist.Normal(m + 1e-6 * m**2, 1.0), y),
    "clamp": lambda m, y: (dist.Normal(m.clamp(-100.0, 100.0), 1.0), y),
    "uniform": lambda m, y: (dist.Uniform(m - 9.0, m + 9.0), y),
    "mixture": lambda m, y: (
        dist.MixtureSameFamily(
            dist.Categorical(torch.tensor([0.999, 0.001])),
            dist.Normal(m.unsqueeze(-1), torch.tensor([1.0, 3.0])),
        ),
        y,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALMOST)
def test_almost_quadratic_densities_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_bend", lambda target, groups, *args: [False] * len(groups))
    assert find_marginal(Target(almost(ALMOST[name]), Y)) is None


@pytest.mark.parametrize("name", ["student", "logistic", "laplace"])
def test_clearly_bent_densities_cost_no_whole_check(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JointDensity, "is_quadratic", lambda *args: pytest.fail("was checked"))
    assert find_marginal(Target(almost(ALMOST[name]), Y)) is None


@pytest.mark.parametrize("kink", [0.0, 1e-3])
def test_a_kink_that_a_large_constant_hides_from_the_value(kink: float) -> None:
    """The value is rounded by its size, and the Hessian sees no kinks: the gradient does."""

    def model(y: Tensor) -> None:
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("rows", len(y)):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(tau * x, 1.0), obs=y)
        pyro.factor("kinks", 1e15 - kink * x.abs().sum(-1).double())

    target = Target(model, Y)
    joint = JointDensity(target, target.in_double(), ["x"], MARGINAL)
    rest = joint.rest_of(target.sample_prior(3))
    assert joint.is_quadratic(rest) == (kink == 0)


def test_normal_likelihood_is_accepted() -> None:
    marginal = find_marginal(Target(almost(lambda m, y: (dist.Normal(m, 1.0), y)), Y))
    assert marginal.names == ["x"] and marginal._structure.size == 1


def test_a_product_of_two_sites_is_quadratic_in_one_of_them() -> None:
    def model(y: Tensor) -> None:
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("rows", len(y)):
            x = pyro.sample("x", dist.Normal(0.0, tau))
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(x * z, 1.0), obs=y)

    assert find_marginal(Target(model, Y)) is None  # 41 variables remain
    assert find_marginal(Target(model, Y[:25])).names in (["x"], ["z"])


def groups(x: Tensor, group: Tensor, y: Tensor) -> None:
    """Correlated intercepts and slopes: blocks of two."""
    scales = pyro.sample("scales", dist.HalfNormal(1.0).expand([2]).to_event(1))
    factor = pyro.sample("factor", dist.LKJCholesky(2, 2.0))
    centre = pyro.sample("centre", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with pyro.plate("groups", 25):
        effects = pyro.sample(
            "effects", dist.MultivariateNormal(centre, scale_tril=scales.unsqueeze(-1) * factor)
        )
    mean = effects[group, 0] + effects[group, 1] * x
    with pyro.plate("rows", len(y)), poutine.scale(scale=0.5):
        pyro.sample("y", dist.Normal(mean, 0.7), obs=y)


@pytest.mark.parametrize(
    ("handler", "share"),
    [(poutine.scale(scale=0.5), 0.5), (poutine.mask(mask=torch.tensor(True)), 1.0)],
)
def test_remaining_sites_may_be_scaled_or_masked(handler: Any, share: float) -> None:
    def model() -> None:
        with handler:
            noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", SIZE):
            x = pyro.sample("x", dist.Normal(0.0, noise))
            pyro.sample("y", dist.Normal(x, 0.5), obs=Y)

    marginal = find_marginal(Target(model))
    assert marginal is not None and list(marginal.shapes) == ["noise"]
    points = torch.tensor([[-0.4], [0.3]])
    wanted = dist.Normal(0.0, 1.0).log_prob(points[:, 0]) * share
    wanted += points[:, 0] * (1 - share)  # the Jacobian is not scaled
    wide = (points.exp().square() + 0.25).sqrt()
    wanted += dist.Normal(0.0, wide).log_prob(Y).sum(-1)
    found = Target(MarginalModel(marginal)).log_prob(points)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_correlated_groups_and_a_scaled_likelihood() -> None:
    x, noise = torch.randn(2, 200)
    group = torch.arange(200) % 25
    target = Target(groups, x, group, noise)
    marginal = find_marginal(target)
    assert marginal.names == ["effects"] and marginal._structure.size == 2
    # p(r, y) from a quadrature-free identity: the joint minus the conditional at any effects.
    rest = 0.3 * torch.randn(2, marginal.dim).double()
    own = marginal._to_latent(torch.randn(2, 50).double())
    points = marginal._vectors(rest, own).requires_grad_()
    exact = marginal._exact
    joint, slope, hessian = exact.derivatives(points)
    own = marginal._own_index
    precision = -hessian[:, own][:, :, own]
    step = torch.linalg.solve(precision, slope[:, own])
    rise = 0.5 * (slope[:, own] * step).sum(-1)
    expected = joint + rise - 0.5 * torch.logdet(precision) + 25 * math.log(2 * math.pi)
    torch.testing.assert_close(marginal.evaluate(rest)[0], expected)


def test_sites_of_a_loop_and_a_smooth_trend() -> None:
    """Steps of steps: twice the sums; sites of a loop are one series."""

    def smooth(y: Tensor) -> None:
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("time", len(y)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(tau * z.cumsum(-1).cumsum(-1), 1.0), obs=y)

    def loop(y: Tensor) -> None:
        phi = pyro.sample("phi", dist.Beta(2.0, 2.0))
        x = torch.tensor(0.0)
        for t in pyro.markov(range(len(y))):
            x = pyro.sample(f"x_{t}", dist.Normal(phi * x, 0.5))
            pyro.sample(f"y_{t}", dist.Normal(x, 1.0), obs=y[t])

    found = find_marginal(Target(smooth, Y))
    assert len(found._structure.seeds) == 5
    assert find_marginal(Target(loop, Y[:24])).num_integrated == 24


def test_sites_of_a_loop_with_censored_observations() -> None:
    """All but these sites are integrated; the value is that of dense algebra."""
    censored, level = torch.tensor([5, 17, 18]), -0.5

    def loop(y: Tensor) -> None:
        sd = pyro.sample("sd", dist.HalfNormal(1.0))
        x = torch.tensor(0.0)
        for t in pyro.markov(range(len(y))):
            x = pyro.sample(f"x_{t}", dist.Normal(x, sd))
            if t in censored:
                pyro.factor(f"below_{t}", torch.special.log_ndtr(level - x))
            else:
                pyro.sample(f"y_{t}", dist.Normal(x, 1.0), obs=y[t])

    marginal = find_marginal(Target(loop, Y))
    assert list(marginal.shapes) == ["sd", *(f"x_{t}" for t in censored.tolist())]
    rest = 0.5 * torch.randn(3, 4).double()
    value, _ = marginal.evaluate(rest)
    seen = torch.ones(SIZE, dtype=torch.bool).index_fill(0, censored, False)
    time = torch.arange(1, SIZE + 1).double()
    for point, found in zip(rest, value, strict=True):
        sd, x = point[0].exp(), point[1:]
        covariance = sd**2 * torch.minimum(time, time.unsqueeze(-1)) + seen.double().diag()
        given = torch.where(seen, Y.double(), 0.0).index_copy(0, censored, x)
        exact = torch.distributions.MultivariateNormal(time.new_zeros(SIZE), covariance)
        expected = exact.log_prob(given) + torch.special.log_ndtr(level - x).sum()
        expected = expected + dist.HalfNormal(1.0).log_prob(sd) + point[0]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)


def test_a_model_of_single_precision() -> None:
    """A matrix outside of the arguments cannot meet latent variables in double precision."""
    x = torch.randn(60, 25)
    y = x.sum(-1) + torch.randn(60)

    def model() -> None:
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        beta = pyro.sample("beta", dist.Normal(torch.zeros(25), tau).to_event(1))
        with pyro.plate("rows", 60):
            pyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)

    marginal = find_marginal(Target(model))
    assert marginal._exact.init_loc.dtype == torch.float32
    tau = torch.tensor([[0.2]]).double()
    covariance = tau.exp() ** 2 * x.double() @ x.double().T + torch.eye(60)
    normal = torch.distributions.MultivariateNormal(torch.zeros(60).double(), covariance)
    expected = normal.log_prob(y.double()) + dist.HalfNormal(1.0).log_prob(tau.exp()) + tau
    value = marginal.evaluate(tau)[0]
    torch.testing.assert_close(value, expected.reshape(1), rtol=1e-5, atol=1e-3)


def lattice(first: Tensor, second: Tensor, y: Tensor, seen: Tensor) -> None:
    """An intrinsic autoregression on a graph; ``seen`` cells have data."""
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    flat = dist.ImproperUniform(dist.constraints.real, (), ())
    with pyro.plate("cells", len(y)):
        x = pyro.sample("x", flat)
        with poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    apart = (x[first] - x[second]) / tau
    pyro.factor("neighbours", -0.5 * apart.square().sum(-1) - (len(y) - 2) * tau.log())


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_lattice_with_an_island(is_seen: bool) -> None:
    """Two parts without a common neighbour: right with data on both, improper without."""
    cell = torch.arange(30).reshape(5, 6)
    first = torch.cat([cell[:, :-1].flatten(), cell[:-1].flatten(), torch.tensor([30, 31])])
    second = torch.cat([cell[:, 1:].flatten(), cell[1:].flatten(), torch.tensor([31, 32])])
    seen = torch.ones(33, dtype=torch.bool)
    seen[30:] = is_seen
    target = Target(lattice, first, second, Y[:33], seen)
    if not is_seen:
        with pytest.raises(ValueError, match=r"improper: .*site 'x'.*Cure: a proper prior"):
            find_marginal(target)
        return
    marginal = find_marginal(target)
    tau = 0.8
    laplacian = torch.zeros(33, 33).double()
    for i, j in zip(first, second, strict=True):
        laplacian[i, i] += 1
        laplacian[j, j] += 1
        laplacian[i, j] -= 1
        laplacian[j, i] -= 1
    precision = laplacian / tau**2 + torch.eye(33).double()
    y = Y[:33].double()
    mean = torch.linalg.solve(precision, y)
    expected = (
        0.5 * y @ mean - 0.5 * y @ y - 0.5 * torch.logdet(precision) - 31 * math.log(tau)
        + dist.HalfNormal(1.0).log_prob(torch.tensor(tau).double()) + math.log(tau)
    )  # fmt: skip
    value = marginal.evaluate(torch.tensor([[math.log(tau)]]).double())[0]
    torch.testing.assert_close(value[0], expected)


def test_priors_that_depend_on_integrated_sites() -> None:
    """The remaining sites keep their priors, also if a reparameterisation replaces them."""

    def model(y: Tensor) -> None:
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with pyro.plate("groups", 24):
            x = pyro.sample("x", dist.Normal(0.0, tau))
        z = pyro.sample("z", dist.Normal(x.mean() + 0.3, 0.5))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(x, z.exp()), obs=y)

    target = Target(model, Y[:24])
    marginal = find_marginal(target)
    inner = MarginalModel(marginal)
    rest = torch.tensor([[0.2, -0.4], [0.9, 0.3]])
    value = marginal.evaluate(rest)[0].float()
    torch.testing.assert_close(Target(inner, Y[:24]).log_prob(rest), value)
    moved = poutine.reparam(inner, {"z": LocScaleReparam(0.0)})
    shift, scale = marginal.target.init_loc[1:25].mean() + 0.3, 0.5
    white = torch.stack([rest[:, 0], (rest[:, 1] - shift) / scale], -1)
    expected = value + math.log(scale)
    torch.testing.assert_close(Target(moved, Y[:24]).log_prob(white), expected)


def test_a_site_remains_if_all_are_normal() -> None:
    def model(y: Tensor) -> None:
        centre = pyro.sample("centre", dist.Normal(0.0, 3.0))
        with pyro.plate("rows", len(y)):
            x = pyro.sample("x", dist.Normal(centre, 1.0))
            z = pyro.sample("z", dist.Normal(x, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    assert list(find_marginal(Target(model, Y)).shapes) == ["centre"]


@pytest.mark.parametrize("change", ["few", "discrete", "wide"])
def test_other_models_are_left_alone(change: str) -> None:
    """Few normal variables, discrete ones, and more than forty that remain."""

    def model(y: Tensor) -> None:
        width = 41 if change == "wide" else 2
        tau = pyro.sample("tau", dist.HalfNormal(1.0).expand([width]).to_event(1))
        z = pyro.sample("z", dist.Bernoulli(0.5)) if change == "discrete" else 0.0
        with pyro.plate("rows", len(y)):
            x = pyro.sample("x", dist.Normal(0.0, tau.sum()))
            pyro.sample("y", dist.Normal(x + z, 1.0), obs=y)

    assert find_marginal(Target(model, Y[:10] if change == "few" else Y)) is None


def test_elements_on_which_all_others_depend_remain_if_that_is_less_work() -> None:
    def model(y: Tensor) -> None:
        shared = pyro.sample("shared", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            x = pyro.sample("x", dist.Normal(0.0, scale))
            mean = x.unsqueeze(-1) + shared
            pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y.unsqueeze(-1).expand(-1, 5))

    target = Target(model, Y[:40])
    found = find_marginal(target)
    assert found is not None and found.names == ["x"] and found.work == (2 * 6 + 1) ** 2
    little = replace(MARGINAL, least_latents=0, most_work=found.work - 1)
    assert module.find_normal_marginal(target, little) is None


def test_a_density_without_second_derivatives_is_left_alone() -> None:
    rows = torch.arange(40).reshape(20, 2)

    def model() -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        x = pyro.sample("x", dist.Normal(0.0, scale).expand([40, 1]).to_event(2))
        mean = torch.nn.functional.embedding_bag(rows, x).squeeze(-1)
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=torch.zeros(20))

    assert find_marginal(Target(model)) is None


def test_vague_priors() -> None:
    """The gradient of group means whose prior medians, 1e17, would round them to whole numbers."""
    stream = torch.Generator().manual_seed(0)
    y = 1500.0 + 40.0 * torch.randn(120, 1, generator=stream)
    y = y + 50.0 * torch.randn(120, 4, generator=stream)

    def model(y: Tensor) -> None:
        centre = pyro.sample("centre", dist.Normal(0.0, 1e5))
        between = pyro.sample("between", dist.Gamma(0.001, 0.001))
        within = pyro.sample("within", dist.Gamma(0.001, 0.001))
        with pyro.plate("groups", 120, dim=-2):
            mean = pyro.sample("mean", dist.Normal(centre, between**-0.5))
            with pyro.plate("rows", 4, dim=-1):
                pyro.sample("y", dist.Normal(mean, within**-0.5), obs=y)

    def exactly(rest: Tensor) -> Tensor:
        centre, between, within = rest[0], rest[1].exp(), rest[2].exp()
        means, data = y.double().mean(1), y.double()
        of_means = dist.Normal(centre, (1 / between + 1 / (4 * within)).sqrt()).log_prob(means)
        inner = -0.5 * within * (data - means.unsqueeze(1)).square().sum()
        inner = inner + 180 * within.log()
        return of_means.sum() + inner + dist.Normal(0.0, 1e5).log_prob(centre)

    marginal = find_marginal(Target(model, y))
    assert marginal is not None and marginal.names == ["mean"]
    points = torch.tensor([[1503.0, -7.4, -7.82], [1510.0, -7.0, -7.9]])
    value, score = marginal.evaluate(points.double())
    expected = torch.stack([exactly(point) for point in points.double()])
    slopes = torch.stack([torch.func.grad(exactly)(point) for point in points.double()])
    # The priors of the precisions are flat in their logarithms, up to 0.001.
    torch.testing.assert_close(value.diff(), expected.diff(), rtol=1e-5, atol=2e-3)
    torch.testing.assert_close(score, slopes, rtol=1e-3, atol=5e-3)
