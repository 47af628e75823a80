# SPDX-License-Identifier: Apache-2.0
"""Models with loops: their fused log-density is that of the model, in value and derivatives."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_implicit.compiled import RECORDINGS
from pyro_implicit.density import Target
from pyro_implicit.density.cost import TracedScore

pytestmark = pytest.mark.usefixtures("double")

SIZE = 40


def groups(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    for i in range(len(y)):
        theta = pyro.sample(f"theta_{i}", dist.Normal(mu, tau))
        pyro.sample(f"y_{i}", dist.Binomial(10.0 + i, logits=theta), obs=y[i])


def sequential_plate(y):
    tau = pyro.sample("tau", dist.Gamma(2.0, 2.0))
    for i in pyro.plate("groups", len(y)):
        theta = pyro.sample(f"theta_{i}", dist.StudentT(4.0, 0.0, tau))
        with poutine.scale(scale=1.0 + i), poutine.mask(mask=torch.tensor(i % 3 > 0)):
            pyro.sample(f"y_{i}", dist.Poisson(theta.exp()), obs=y[i])


def markov(y):
    """A random walk with missing steps, whose first step has another prior."""
    sd = pyro.sample("sd", dist.HalfCauchy(1.0))  # its density is written in place
    x = torch.tensor(0.0)
    for t in pyro.markov(range(len(y))):
        x = pyro.sample(f"x_{t}", dist.Normal(x, sd if t else torch.tensor(5.0)))
        seen = ~y[t].isnan()
        pyro.sample(f"y_{t}", dist.Normal(x, 0.5).mask(seen), obs=y[t].nan_to_num(0.0))


def recurrence(y):
    a = pyro.sample("a", dist.HalfNormal(1.0))
    b = pyro.sample("b", dist.Beta(2.0, 2.0))
    variance = torch.tensor(1.0)
    for t in range(1, len(y)):
        variance = 0.1 + a * y[t - 1] ** 2 + b * variance
        pyro.sample(f"y_{t}", dist.Normal(0.0, variance.sqrt()), obs=y[t])


def vectors(y):
    """Vector sites, constrained sites, and elements of one vector in a loop."""
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
    level = pyro.sample("level", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    factor = torch.tensor([[1.0, 0.0], [0.5, 1.0]])
    for i in range(len(y)):
        share = pyro.sample(f"share_{i}", dist.Dirichlet(torch.ones(3)))
        tril = scale.diag_embed() @ factor
        x = pyro.sample(f"x_{i}", dist.MultivariateNormal(torch.zeros(2), scale_tril=tril))
        mean = x.sum() + share[0] * level[i] * 0.1 * i + level[len(y) - 1 - i]
        pyro.sample(f"y_{i}", dist.Normal(mean, 1.0), obs=y[i])


def writes(y):
    """Numbers and rows are written to tensors, twice or never, and read in between."""
    sd = pyro.sample("sd", dist.HalfNormal(1.0))
    level, table = torch.zeros(len(y) + 1), torch.ones(2, len(y), 2)
    for t in range(len(y)):
        level[t] = 3.0  # which the next line replaces
        level[t] = pyro.sample(f"x_{t}", dist.Normal(0.9 * level[t - 1], sd))
        if t % 5:
            table[:, t] = torch.stack([level[t], level[t - 1]]).exp()
    level[-1] += 1.0
    with pyro.plate("rows", len(y)):
        spread = table.sum((0, 2)) + level[-1] ** 2
        pyro.sample("y", dist.Normal(level[1:], spread), obs=y)


def slices(y):
    """Slices that overlap are written, and the densities write to diagonals."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    x = torch.zeros(len(y) + 1)
    for t in range(len(y)):
        x[t : t + 2] = pyro.sample(f"x_{t}", dist.Normal(torch.zeros(2), scale).to_event(1))
        factor = torch.stack([scale, x[t]]).unsqueeze(-1)
        low_rank = dist.LowRankMultivariateNormal(torch.zeros(2), factor, torch.ones(2))
        pyro.sample(f"y_{t}", low_rank, obs=y[t].expand(2))


def compositions(y):
    """Multinomial densities set elements through masks of the latents."""
    total = pyro.sample("total", dist.Gamma(4.0, 1.0))
    share = pyro.sample("share", dist.Dirichlet(torch.ones(4)))
    for i in pyro.plate("groups", len(y)):
        own = pyro.sample(f"own_{i}", dist.Dirichlet(total * share))
        pyro.sample(f"y_{i}", dist.Multinomial(int(y[i].sum()), probs=own), obs=y[i])


def hidden_markov(y):
    """The states are summed out."""
    stay = pyro.sample("stay", dist.Beta(4.0, 2.0).expand([3]).to_event(1)).unsqueeze(-1)
    mean = pyro.sample("mean", dist.Normal(torch.arange(3.0), 1.0).to_event(1))
    transition = torch.where(torch.eye(3).bool(), stay, (1 - stay) / 2)
    x = 0
    for t in pyro.markov(range(len(y))):
        x = pyro.sample(f"x_{t}", dist.Categorical(transition[x]), infer={"enumerate": "parallel"})
        pyro.sample(f"y_{t}", dist.Normal(mean[x], 1.0), obs=y[t])


def data(kind, size=SIZE):
    y = torch.randn(size)
    if kind is compositions:
        return (4 * y.abs()).round().reshape(-1, 4)
    if kind in (groups, sequential_plate):
        return (4 * y.abs()).round()
    if kind is markov:
        y[::7] = torch.nan
    return y


def derivatives(log_prob, points):
    points = points.clone().requires_grad_()
    value = log_prob(points)
    (score,) = torch.autograd.grad(value.sum(), points, create_graph=True)
    (product,) = torch.autograd.grad((score * points.detach().cos()).sum(), points)
    return value.detach(), score.detach(), product


MODELS = [
    *(groups, sequential_plate, markov, recurrence, vectors, compositions, writes, slices),
    hidden_markov,
]


@pytest.mark.parametrize("model", MODELS)
def test_value_and_derivatives(model):
    size = SIZE if model is hidden_markov else SIZE // 2  # with fewer operations nothing is fused
    target = Target(model, data(model, size))
    points = target.init_loc + 0.3 * torch.randn(5, target.latent_dim)
    expected = derivatives(target._by_model, points)
    for _ in range(3):
        found = derivatives(target.log_prob, points)
    assert target._fused.refusal is None
    assert target._fused._function is not None
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    score = TracedScore(target.score)
    for _ in range(4):
        log_prob, gradient = score(points)
    torch.testing.assert_close(log_prob, expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-10, atol=1e-10)


def test_sum_over_a_chain():
    """The forward algorithm, one state after the other."""
    target = Target(hidden_markov, y := data(hidden_markov))
    for point in target.init_loc + 0.3 * torch.randn(2, target.latent_dim):
        stay, mean = point[:3].sigmoid(), point[3:]
        transition = torch.where(torch.eye(3).bool(), stay.unsqueeze(-1), (1 - stay[:, None]) / 2)
        forward = torch.tensor([1.0, 0.0, 0.0])
        total = dist.Beta(4.0, 2.0).log_prob(stay).sum() + (stay * (1 - stay)).log().sum()
        total = total + dist.Normal(torch.arange(3.0), 1.0).log_prob(mean).sum()
        for t in range(SIZE):
            forward = forward @ transition * dist.Normal(mean, 1.0).log_prob(y[t]).exp()
            total = total + forward.sum().log()
            forward = forward / forward.sum()
        torch.testing.assert_close(target.log_prob(point.unsqueeze(0))[0], total)


def test_the_same_posterior_in_double():
    target = Target(markov, data(markov).float())
    points = target.init_loc + 0.3 * torch.randn(5, target.latent_dim)
    target.log_prob(points.float())
    double = target.in_double()
    expected = derivatives(double._by_model, points.double())
    found = derivatives(double.log_prob, points.double())
    assert double._fused._function is not None
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_conditioned_model():
    y = data(groups)
    model = poutine.condition(
        groups, {f"theta_{i}": torch.tensor(0.1 * i) for i in range(0, SIZE, 2)}
    )
    target = Target(model, y)
    points = torch.randn(3, target.latent_dim)
    plain = target.log_prob(points)
    assert target.latent_dim == 2 + SIZE // 2
    torch.testing.assert_close(target.log_prob(points), plain, rtol=1e-12, atol=0.0)
    assert target._fused.refusal is None


def test_sites_of_a_loop_run_as_one():
    target = Target(groups, data(groups))
    points = torch.randn(3, target.latent_dim)
    runs = []
    original = target._runs.map
    target._runs.map = lambda *args, **kwargs: (runs.append(1), original(*args, **kwargs))[1]
    for _ in range(200):
        target.log_prob(points)
    assert len(runs) < 20  # comparisons with the model
    fused = target._fused._function._fused
    assert fused.num_nodes > RECORDINGS.least_operations
    assert fused.num_steps < 0.1 * fused.num_nodes


def strided(x):
    made = torch.zeros(3)
    made.as_strided((2,), (1,)).add_(x)
    return made


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_short_models_run_as_they_are():
    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))

    target = Target(model)
    for _ in range(2):
        target.log_prob(torch.zeros(2, 1))
    assert "operations" in target._fused.refusal


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        (lambda x: Doubled.apply(x), "gradients of its own"),
        (lambda x: torch.special.log_ndtr(x), None),
        (lambda x: strided(x), "in place"),
        (lambda x: x.detach() + x, "detaches"),
        (lambda x: torch.zeros(2).index_fill_(0, torch.tensor([1]), 1.0) * x, None),
        (lambda x: pyro.param("p", torch.tensor(1.0)) * x, "parameters"),
        (lambda x: x if x.item() > 100 else 2 * x, None),
    ],
)
def test_models_that_are_not_fused(part, cause):
    """Their log-density is that of the model."""
    pyro.clear_param_store()

    def model(y):
        for i in range(len(y)):
            x = pyro.sample(f"x_{i}", dist.Normal(0.0, 1.0))
            pyro.sample(f"y_{i}", dist.Normal(part(x).sum(), 1.0), obs=y[i])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyro_implicit.density.batched_runs.warn_user", lambda message: None)
        target = Target(model, torch.randn(SIZE))
        points = 0.1 * torch.randn(3, SIZE)
        plain = derivatives(target._by_model, points)
        for _ in range(3):
            found = derivatives(target.log_prob, points)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert (cause is None) == (target._fused.refusal is None)
    assert cause is None or cause in target._fused.refusal


def test_data_changed_in_place():
    y = data(groups)
    target = Target(groups, y)
    points = torch.randn(3, target.latent_dim)
    for _ in range(3):
        before = target.log_prob(points)
    y += 1.0
    after = target.log_prob(points)
    torch.testing.assert_close(after, Target(groups, y).log_prob(points))
    assert not torch.allclose(before, after)
    assert "changed in place" in target._fused.refusal


def test_data_changed_in_place_under_a_recorded_score():
    y = data(groups)
    target = Target(groups, y)
    score, points = TracedScore(target.score), torch.randn(3, target.latent_dim)
    for _ in range(7):
        score(points)
    y += 1.0
    torch.testing.assert_close(score(points)[0], Target(groups, y).log_prob(points))
