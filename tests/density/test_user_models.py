# SPDX-License-Identifier: Apache-2.0
"""Models of the kinds that users write run in one go: scores as one by one, and nothing said."""

from __future__ import annotations

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from pyro.nn import PyroModule, PyroSample
from torch import nn

from pyro_implicit.density import Target
from pyro_implicit.density.batched_runs import BatchedRuns

pytestmark = pytest.mark.usefixtures("double")


GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


X, Y, Y1 = normal(12, 3), normal(12), normal(12, 2)
COUNTS = torch.poisson(Y.exp(), generator=GENERATOR)
LEVELS = torch.arange(12) % 4
GROUPS = torch.arange(12) % 3
TIMES = 0.1 + Y.abs()
SEEN = Y > 0


ENCODER = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True).double().eval()
ENCODER.requires_grad_(False)


def transformer():
    """In eval mode, in which torch has a way without gradients."""
    x = pyro.sample("x", dist.Normal(torch.zeros(1, 3, 4), 1.0).to_event(3))
    pyro.sample("y", dist.Normal(ENCODER(x).sum(), 1.0), obs=torch.tensor(0.5))


def ordinal():
    beta = pyro.sample("beta", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    cutpoints = pyro.sample(
        "cutpoints",
        dist.TransformedDistribution(
            dist.Normal(torch.zeros(3), 2.0).to_event(1), dist.transforms.OrderedTransform()
        ),
    )
    with pyro.plate("rows", 12):
        pyro.sample("y", dist.OrderedLogistic(X @ beta, cutpoints), obs=LEVELS)


def ordinal_of_a_flat_prior():
    cutpoints = pyro.sample(
        "cutpoints", dist.ImproperUniform(constraints.ordered_vector, (), event_shape=(3,))
    )
    with pyro.plate("rows", 12):
        pyro.sample("y", dist.OrderedLogistic(Y, cutpoints), obs=LEVELS)


def dirichlet_multinomial():
    alpha = pyro.sample("alpha", dist.Gamma(2.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("documents", 2):
        counts = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 5.0]])
        pyro.sample("y", dist.DirichletMultinomial(alpha, counts.sum(-1)), obs=counts)
        theta = pyro.sample("theta", dist.Dirichlet(alpha))
        pyro.sample("z", dist.Multinomial(4, theta), obs=torch.tensor([[2.0, 2, 0], [0, 1, 3]]))


def mixed_effects():
    scales = pyro.sample("scales", dist.HalfCauchy(torch.ones(2)).to_event(1))
    factor = pyro.sample("factor", dist.LKJCholesky(2, 2.0))
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("groups", 3):
        root = scales.unsqueeze(-1) * factor
        effect = pyro.sample("effect", dist.MultivariateNormal(loc, scale_tril=root))
    rate = (effect[GROUPS, 0] + effect[GROUPS, 1] * X[:, 0]).exp()
    pyro.deterministic("rate", rate)
    with pyro.plate("rows", 12):
        pyro.sample("y", dist.Poisson(rate), obs=COUNTS)


def horseshoe():
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    with pyro.plate("features", 3):
        lam = pyro.sample("lam", dist.HalfCauchy(1.0))
        beta = pyro.sample("beta", dist.Normal(0.0, tau * lam))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("rows", 12):
        pyro.sample("y", dist.Normal(X @ beta, sigma), obs=Y)


def car():
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    alpha = pyro.sample("alpha", dist.Beta(2.0, 2.0))
    near = torch.zeros(12, 12)
    for i in range(11):
        near[i, i + 1] = near[i + 1, i] = 1.0
    precision = tau * (torch.diag(near.sum(-1)) - 0.99 * alpha * near)
    phi = pyro.sample("phi", dist.MultivariateNormal(torch.zeros(12), precision_matrix=precision))
    with pyro.plate("cells", 12):
        pyro.sample("y", dist.Poisson(phi.exp()), obs=COUNTS)


def garch():
    omega = pyro.sample("omega", dist.LogNormal(-1.0, 1.0))
    a, b = pyro.sample("ab", dist.Dirichlet(torch.ones(3)))[:2]
    variance = torch.empty(12)
    variance[0] = omega / (1 - a - b)
    for t in range(1, 12):
        variance[t] = omega + a * Y[t - 1] ** 2 + b * variance[t - 1].clone()
    pyro.sample("y", dist.Normal(torch.zeros(12), variance.sqrt()).to_event(1), obs=Y)


def arma():
    phi = pyro.sample("phi", dist.Uniform(-1.0, 1.0))
    theta = pyro.sample("theta", dist.Uniform(-1.0, 1.0))
    error = torch.zeros(())
    for t in pyro.plate("times", 11):
        loc = phi * Y[t] + theta * error
        error = Y[t + 1] - loc
        pyro.sample(f"y_{t}", dist.Normal(loc, 1.0), obs=Y[t + 1])


def stochastic_volatility():
    phi = pyro.sample("phi", dist.Beta(20.0, 1.5))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    h = [pyro.sample("h_0", dist.Normal(0.0, 1.0))]
    for t in pyro.markov(range(1, 12)):
        h.append(pyro.sample(f"h_{t}", dist.Normal(phi * h[-1], scale)))
        pyro.sample(f"y_{t}", dist.StudentT(5.0, 0.0, (h[-1] / 2).exp()), obs=Y[t])


def zero_inflated():
    gate = pyro.sample("gate", dist.Beta(1.0, 1.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("rows", 12):
        pyro.sample("y", dist.ZeroInflatedPoisson((X @ beta).exp(), gate=gate), obs=COUNTS)
        negative = dist.ZeroInflatedNegativeBinomial(3.0, logits=X @ beta, gate=gate)
        pyro.sample("z", negative, obs=COUNTS)


def survival():
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    scale = (X @ beta).exp()
    with pyro.plate("seen", int(SEEN.sum())):
        pyro.sample("t", dist.Weibull(scale[SEEN], shape), obs=TIMES[SEEN])
    pyro.factor("censored", -((TIMES[~SEEN] / scale[~SEEN]) ** shape).sum())


def item_response():
    with pyro.plate("items", 4, dim=-1):
        a = pyro.sample("a", dist.LogNormal(0.0, 0.5))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("people", 3, dim=-2):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with pyro.plate("items_", 4, dim=-1):
            answers = (COUNTS > 0).double().reshape(3, 4)
            pyro.sample("y", dist.Bernoulli(logits=a * (theta - b)), obs=answers)


def gaussian_process():
    length = pyro.sample("length", dist.InverseGamma(3.0, 1.0))
    gap = (Y[:, None] - Y) ** 2
    covariance = (-0.5 * gap / length**2).exp() + 1e-6 * torch.eye(12)
    root = torch.linalg.cholesky(covariance)
    z = pyro.sample("z", dist.Normal(torch.zeros(12), 1.0).to_event(1))
    with pyro.plate("rows", 12):
        pyro.sample("y", dist.Bernoulli(logits=root @ z), obs=SEEN.double())


def discrete_hmm():
    transition = pyro.sample("transition", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    fn = dist.DiscreteHMM(torch.zeros(2), transition.log(), dist.Normal(loc, 1.0))
    pyro.sample("y", fn, obs=Y)


def gaussian_hmm():
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
    start = dist.Normal(torch.zeros(2), 1.0).to_event(1)
    fn = dist.GaussianHMM(
        start, torch.eye(2), dist.Normal(torch.zeros(2), scale).to_event(1),
        torch.eye(2), dist.Normal(torch.zeros(2), 1.0).to_event(1), duration=12,
    )  # fmt: skip
    pyro.sample("y", fn, obs=Y1)


def missing_data():
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    holes = Y1.masked_fill(Y1 > 1, torch.nan)
    with pyro.plate("rows", 12):
        pyro.sample("x", dist.NanMaskedNormal(loc[0], 1.0), obs=holes[:, 0])
        pyro.sample("y", dist.NanMaskedMultivariateNormal(loc, torch.eye(2)), obs=holes)
        pyro.sample("z", dist.Normal(loc[0], 1.0).mask(SEEN), obs=Y)


def measurement_error():
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 12):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("x_seen", dist.Normal(x, 0.3), obs=X[:, 0])
        pyro.sample("y", dist.Normal(slope * x, 0.5), obs=Y)


def sir():
    beta = pyro.sample("beta", dist.LogNormal(0.0, 0.3))
    gamma = pyro.sample("gamma", dist.Beta(2.0, 5.0))
    s, i = torch.tensor(95.0), torch.tensor(5.0)
    for t in range(8):
        infected, recovered = beta * s * i / 100, gamma * i
        s, i = s - infected, i + infected - recovered
        if i < 0:
            raise ValueError("nobody is left")
        pyro.sample(f"y_{t}", dist.Poisson(infected), obs=COUNTS[t])


def seasons():
    """Written into slices of a tensor, as NumPy users do."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    effect = pyro.sample("effect", dist.Normal(torch.zeros(3), scale).to_event(1))
    loc = torch.zeros(12)
    for season in range(3):
        loc[GROUPS == season] += effect[season]
    loc = loc.index_add(0, GROUPS, effect[GROUPS])
    with pyro.plate("rows", 12):
        pyro.sample("y", dist.Laplace(loc, 1.0), obs=Y)


def written_covariance():
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(3)).to_event(1))
    rho = pyro.sample("rho", dist.Uniform(-0.4, 0.4))
    correlation = torch.eye(3)
    correlation[0, 1] = correlation[1, 0] = rho
    root = torch.diag(scale)
    with pyro.plate("rows", 12):
        fn = dist.MultivariateNormal(torch.zeros(3), root @ correlation @ root)
        pyro.sample("y", fn, obs=X)


def change_point():
    tau = pyro.sample("tau", dist.Uniform(0.0, 12.0))
    level = pyro.sample("level", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    index = (torch.arange(12.0) > tau).long()
    pyro.sample("y", dist.Normal(level[index], 1.0).to_event(1), obs=Y)


def fixed_point():
    """A loop until it has converged."""
    x = pyro.sample("x", dist.LogNormal(0.0, 0.5))
    root = x
    for _ in range(50):
        old, root = root, 0.5 * (root + x / root)
        if (root - old).abs() < 1e-9:
            break
    pyro.sample("y", dist.Normal(max(root, x), 1.0), obs=torch.tensor(1.0))


def mixture():
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    loc = pyro.sample("loc", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("rows", 12):
        parts = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(loc, 1.0))
        pyro.sample("y", parts, obs=Y)


class Net(PyroModule):
    def __init__(self):
        super().__init__()
        self.hidden = PyroModule[nn.Linear](3, 4)
        self.hidden.weight = PyroSample(dist.Normal(0.0, 1.0).expand([4, 3]).to_event(2))
        self.hidden.bias = PyroSample(dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        self.norm = nn.LayerNorm(4)
        self.scale = PyroSample(dist.HalfNormal(1.0))

    def forward(self):
        loc = self.norm(torch.tanh(self.hidden(X))).sum(-1)
        with pyro.plate("rows", 12):
            pyro.sample("y", dist.StudentT(4.0, loc, self.scale), obs=Y)


MODELS = {
    model.__name__: model
    for model in [
        *(ordinal, ordinal_of_a_flat_prior, dirichlet_multinomial, mixed_effects, horseshoe),
        *(car, garch, arma, stochastic_volatility, zero_inflated, survival, item_response),
        *(gaussian_process, discrete_hmm, gaussian_hmm, missing_data, measurement_error, sir),
        *(seasons, written_covariance, change_point, fixed_point, mixture, Net),
        transformer,
    ]
}


@pytest.mark.parametrize("name", MODELS)
def test_in_one_go_as_one_by_one(name):
    model = MODELS[name]() if name == "Net" else MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        density = Target(model)
        looped = Target(model)
        looped._runs.batched = BatchedRuns("looped", False)
        points = density.init_loc + 0.3 * torch.randn(3, density.latent_dim)
        found, expected = density.score(points), looped.score(points)
        again = density.score(points)
    assert density.is_vectorized
    for one, other, third in zip(found, expected, again, strict=True):
        assert other.isfinite().all()
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(third, one)
