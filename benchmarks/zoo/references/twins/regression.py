# SPDX-License-Identifier: Apache-2.0
"""Twins of the regressions."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import sample


def coin(flips):
    fairness = sample("fairness", dist.Beta(2.0, 2.0))
    sample("flip", dist.Bernoulli(fairness).expand([len(flips)]).to_event(1), obs=flips)


def linear_diabetes(x, y):
    weights = sample("weights", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    bias = sample("bias", dist.Normal(0.0, 1.0))
    sigma = sample("sigma", dist.Exponential(1.0))
    sample("obs", dist.Normal(x @ weights + bias, sigma), obs=y)


def logistic_breast_cancer(x, y):
    w = sample("w", dist.Normal(0.0, 2.0).expand([x.shape[1]]))
    b = sample("b", dist.Normal(0.0, 5.0))
    sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)


def poisson_exposure(x, exposure, y):
    intercept = sample("intercept", dist.Normal(0.0, 5.0))
    beta = sample("beta", dist.Normal(jnp.zeros(x.shape[1]), 2.5).to_event(1))
    sample("y", dist.Poisson(exposure * jnp.exp(intercept + x @ beta)), obs=y)


def negative_binomial(x, y):
    alpha = sample("alpha", dist.Normal(0.0, 2.0))
    beta = sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    phi = sample("phi", dist.HalfCauchy(2.0))
    sample("y", dist.NegativeBinomial2(jnp.exp(alpha + x @ beta), phi), obs=y)


def ordinal(x, y):
    beta = sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    base = dist.Normal(0.0, 3.0).expand([4]).to_event(1)
    cutpoints = sample(
        "cutpoints", dist.TransformedDistribution(base, dist.transforms.OrderedTransform())
    )
    sample("y", dist.OrderedLogistic(x @ beta, cutpoints), obs=y)


def dirichlet_multinomial(counts):
    share = sample("share", dist.Dirichlet(jnp.ones(counts.shape[1])))
    concentration = sample("concentration", dist.Gamma(2.0, 0.1))
    with numpyro.plate("groups", counts.shape[0]):
        theta = sample("theta", dist.Dirichlet(concentration * share))
        sample("counts", dist.Multinomial(total_count=50, probs=theta), obs=counts)


def zero_inflated_poisson(x, y):
    a = sample("a", dist.Normal(0.0, 2.0))
    b = sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    gate = sample("gate", dist.Beta(1.0, 1.0))
    sample("y", dist.ZeroInflatedPoisson(gate=gate, rate=jnp.exp(a + x @ b)), obs=y)


def student_robust(x, y):
    intercept = sample("intercept", dist.Normal(0.0, 10.0))
    beta = sample("beta", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
    sigma = sample("sigma", dist.HalfCauchy(5.0))
    nu = sample("nu", dist.Gamma(2.0, 0.1))
    sample("y", dist.StudentT(nu, intercept + x @ beta, sigma), obs=y)


def weibull_survival(x, time, censored):
    intercept = sample("intercept", dist.Normal(0.0, 3.0))
    beta = sample("beta", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    shape = sample("shape", dist.LogNormal(0.0, 1.0))
    scale = jnp.exp(intercept + x @ beta)
    seen = dist.Weibull(scale, shape).log_prob(time)
    numpyro.factor("times", jnp.where(censored, -((time / scale) ** shape), seen).sum())


def softmax_wine(x, y):
    b = sample("b", dist.Normal(0.0, 3.0).expand([3]))
    w = sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1], 3]))
    sample("y", dist.Categorical(logits=x @ w + b), obs=y)


def heteroscedastic(x, y):
    coefficients = sample("coefficients", dist.Normal(jnp.zeros(3), 2.0).to_event(1))
    log_scale = sample("log_scale", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    powers = jnp.stack([jnp.ones_like(x), x, x**2], axis=-1)
    scale = jax.nn.softplus(powers[:, :2] @ log_scale)
    sample("y", dist.Normal(powers @ coefficients, scale), obs=y)
