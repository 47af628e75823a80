# SPDX-License-Identifier: Apache-2.0
"""The distributions of random models, each with a log-density independent of Pyro."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as plain
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import logsigmoid, softplus

__all__ = ["FAMILIES", "SIZE", "Family"]

SIZE = 3  # of vectors and matrices
LogProb = Callable[..., Tensor]


@dataclass(frozen=True)
class Family:
    """A kind of site.

    :ivar kinds: kinds of its arguments: real, positive, vector, tril.
    :ivar make: Pyro's distribution for arguments in the batch's shape.
    :ivar log_prob: log-density of one value given the arguments of one element.
    :ivar support: support check of one value.
    :ivar event: event shape.
    :ivar latent: whether a latent site may have this family.
    """

    kinds: tuple[str, ...]
    make: Callable[..., Any]
    log_prob: LogProb
    support: Any = constraints.real
    event: tuple[int, ...] = ()
    latent: bool = True

    @property
    def is_discrete(self) -> bool:
        """Whether its values are counts or categories."""
        return self.support.is_discrete


def _same(name: str, kinds: str, support: Any = constraints.real, **rest: Any) -> Family:
    """A family that torch has by the same name, with scalar arguments."""

    def log_prob(value: Tensor, *args: Tensor) -> Tensor:
        return getattr(plain, name)(*args, validate_args=False).log_prob(value)

    words = {"r": "real", "p": "positive"}
    return Family(tuple(words[k] for k in kinds), getattr(dist, name), log_prob, support, **rest)


def _normal(value: Tensor, loc: Any, scale: Any) -> Tensor:
    return -0.5 * ((value - loc) / scale) ** 2 - torch.as_tensor(scale).log() - HALF_LOG_TAU


def _logistic(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    white = (value - loc) / scale
    return -white - scale.log() + 2 * logsigmoid(white)


def _asymmetric_laplace(value: Tensor, loc: Tensor, scale: Tensor, asymmetry: Tensor) -> Tensor:
    left, right = scale * asymmetry, scale / asymmetry
    distance = torch.where(value < loc, (loc - value) / left, (value - loc) / right)
    return -distance - (left + right).log()


def _soft_laplace(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    white = (value - loc) / scale
    return math.log(2 / math.pi) - scale.log() - torch.logaddexp(white, -white)


def _skew_logistic(value: Tensor, loc: Tensor, scale: Tensor, asymmetry: Tensor) -> Tensor:
    white = (value - loc) / scale
    return asymmetry.log() - scale.log() - white - (asymmetry + 1) * softplus(-white)


def _folded(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    return torch.logaddexp(_normal(value, loc, scale), _normal(-value, loc, scale))


def _affine_beta(value: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return plain.Beta(one, other, validate_args=False).log_prob((value + 1) / 3) - math.log(3)


def _tanh(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    return _normal(value.atanh(), loc, scale) - (1 - value * value).log()


def _shifted(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    return _normal((value.log() - 0.5) / 2, loc, scale) - (2 * value).log()


def _ordered(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    steps = (value[1:] - value[:-1]).log()
    whole = torch.cat([value[:1], steps])
    return (_normal(whole, loc, scale)).sum() - steps.sum()


def _multivariate_normal(value: Tensor, loc: Tensor, tril: Tensor) -> Tensor:
    white = torch.linalg.inv(tril) @ (value - loc)
    return (_normal(white, 0.0, 1.0)).sum() - tril.diagonal().log().sum()


def _multivariate_t(value: Tensor, df: Tensor, loc: Tensor, tril: Tensor) -> Tensor:
    square = (torch.linalg.inv(tril) @ (value - loc)).square().sum()
    half = (df + SIZE) / 2
    return (
        torch.lgamma(half) - torch.lgamma(df / 2) - SIZE / 2 * (df * math.pi).log()
        - tril.diagonal().log().sum() - half * (square / df).log1p()
    )  # fmt: skip


def _low_rank(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    ones = torch.ones(SIZE, SIZE, dtype=value.dtype)
    return _multivariate_normal(
        value, loc, torch.linalg.cholesky(ones + scale * torch.eye(SIZE, dtype=value.dtype))
    )


def _lkj(value: Tensor, concentration: Tensor) -> Tensor:
    """LKJ density of the Cholesky factor L of a correlation matrix."""
    powers = [SIZE - row - 1 + 2 * (concentration - 1) for row in range(1, SIZE)]
    total = sum(power * value[row, row].log() for row, power in enumerate(powers, start=1))
    alpha = concentration + (SIZE - 1) / 2
    constant: Any = 0.0
    for k in range(1, SIZE):
        constant = constant + k / 2 * math.log(math.pi)
        constant = constant + torch.lgamma(alpha - k / 2) - torch.lgamma(alpha)
    return total - constant


def _binomial(value: Tensor, logit: Tensor) -> Tensor:
    log_choose = math.lgamma(6) - torch.lgamma(value + 1) - torch.lgamma(6 - value)
    return log_choose + value * logsigmoid(logit) + (5 - value) * logsigmoid(-logit)


def _gamma_poisson(value: Tensor, shape: Tensor, rate: Tensor) -> Tensor:
    return (
        torch.lgamma(value + shape) - torch.lgamma(shape) - torch.lgamma(value + 1)
        + shape * (rate / (1 + rate)).log() - value * (1 + rate).log()
    )  # fmt: skip


def _beta_binomial(value: Tensor, one: Tensor, other: Tensor) -> Tensor:
    def log_beta(a: Tensor, b: Tensor) -> Tensor:
        return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)

    log_choose = math.lgamma(6) - torch.lgamma(value + 1) - torch.lgamma(6 - value)
    return log_choose + log_beta(value + one, 5 - value + other) - log_beta(one, other)


def _zero_inflated(value: Tensor, rate: Tensor, logit: Tensor) -> Tensor:
    log_prob = value * rate.log() - rate - torch.lgamma(value + 1) + logsigmoid(-logit)
    return torch.where(value == 0, torch.logaddexp(logsigmoid(logit), log_prob), log_prob)


def _ordered_logistic(value: Tensor, predictor: Tensor) -> Tensor:
    below = torch.cat([(CUTS.to(predictor) - predictor).sigmoid(), predictor.new_ones(1)])
    above = torch.cat([predictor.new_zeros(1), below[:-1]])
    return (below - above).log()[value.long()]


def _uniform(value: Tensor, _: Tensor) -> Tensor:
    return torch.where((value > -1) & (value < 2), -math.log(3), -math.inf) + 0 * value


def _pareto(value: Tensor, alpha: Tensor) -> Tensor:
    return alpha.log() + alpha * math.log(0.5) - (alpha + 1) * value.log()


HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
CUTS = torch.tensor([-1.0, 0.5])
POSITIVE, SIMPLEX = constraints.positive, constraints.simplex
COUNT, VECTOR = constraints.nonnegative_integer, constraints.real_vector
EVENT = (SIZE,)


def _transformed(*transforms: Any) -> Callable[..., Any]:
    return lambda loc, scale: dist.TransformedDistribution(
        dist.Normal(loc, scale), list(transforms)
    )


def _expand(arg: Tensor) -> Tensor:
    return arg.unsqueeze(-1).expand(*arg.shape, SIZE)


FAMILIES: dict[str, Family] = {
    "Normal": _same("Normal", "rp"),
    "StudentT": Family(
        ("positive", "real", "positive"), lambda a, b, c: dist.StudentT(1 + a, b, c),
        lambda v, a, b, c: plain.StudentT(1 + a, b, c, validate_args=False).log_prob(v),
    ),
    "Cauchy": _same("Cauchy", "rp"),
    "Laplace": _same("Laplace", "rp"),
    "Gumbel": _same("Gumbel", "rp"),
    "Logistic": Family(("real", "positive"), dist.Logistic, _logistic),
    "AsymmetricLaplace": Family(
        ("real", "positive", "positive"), dist.AsymmetricLaplace, _asymmetric_laplace
    ),
    "SoftLaplace": Family(("real", "positive"), dist.SoftLaplace, _soft_laplace),
    "SkewLogistic": Family(("real", "positive", "positive"), dist.SkewLogistic, _skew_logistic),
    "LogNormal": _same("LogNormal", "rp", POSITIVE),
    "Gamma": _same("Gamma", "pp", POSITIVE),
    "InverseGamma": _same("InverseGamma", "pp", POSITIVE),
    "Exponential": _same("Exponential", "p", POSITIVE),
    "HalfNormal": _same("HalfNormal", "p", POSITIVE),
    "HalfCauchy": _same("HalfCauchy", "p", POSITIVE),
    "Weibull": _same("Weibull", "pp", POSITIVE),
    "Chi2": _same("Chi2", "p", POSITIVE),
    "FisherSnedecor": _same("FisherSnedecor", "pp", POSITIVE),
    "Folded": Family(
        ("real", "positive"), lambda a, b: dist.FoldedDistribution(dist.Normal(a, b)), _folded,
        POSITIVE,
    ),
    "Beta": _same("Beta", "pp", constraints.unit_interval),
    "Kumaraswamy": _same("Kumaraswamy", "pp", constraints.unit_interval),
    "ContinuousBernoulli": Family(
        ("real",),
        lambda a: dist.ContinuousBernoulli(logits=a),
        lambda v, a: plain.ContinuousBernoulli(logits=a, validate_args=False).log_prob(v),
        constraints.unit_interval,
    ),
    "AffineBeta": Family(
        ("positive", "positive"), lambda a, b: dist.AffineBeta(a, b, -1.0, 3.0), _affine_beta,
        constraints.interval(-1.0, 2.0),
    ),
    "Uniform": Family(
        ("real",), lambda a: dist.Uniform(0 * a - 1, 0 * a + 2), _uniform,
        constraints.interval(-1.0, 2.0)
    ),
    "Pareto": Family(
        ("positive",), lambda a: dist.Pareto(0.5, a), _pareto, constraints.greater_than(0.5)
    ),
    "Tanh": Family(
        ("real", "positive"), _transformed(dist.transforms.TanhTransform()), _tanh,
        constraints.interval(-1.0, 1.0),
    ),
    "Shifted": Family(
        ("real", "positive"),
        _transformed(dist.transforms.AffineTransform(0.5, 2.0), dist.transforms.ExpTransform()),
        _shifted, POSITIVE,
    ),
    "Vector": Family(
        ("vector", "positive"),
        lambda a, b: dist.Normal(a, b.unsqueeze(-1)).to_event(1),
        lambda v, a, b: _normal(v, a, b).sum(), VECTOR, EVENT,
    ),
    "Ordered": Family(
        ("vector", "positive"),
        lambda a, b: dist.TransformedDistribution(
            dist.Normal(a, b.unsqueeze(-1)).to_event(1), dist.transforms.OrderedTransform()
        ),
        _ordered, dist.constraints.ordered_vector, EVENT,
    ),
    "MultivariateNormal": Family(
        ("vector", "tril"), lambda a, b: dist.MultivariateNormal(a, scale_tril=b),
        _multivariate_normal, VECTOR, EVENT,
    ),
    "MultivariateStudentT": Family(
        ("positive", "vector", "tril"), dist.MultivariateStudentT, _multivariate_t, VECTOR, EVENT
    ),
    "LowRank": Family(
        ("vector", "positive"),
        lambda a, b: dist.LowRankMultivariateNormal(
            a, torch.ones_like(a).unsqueeze(-1), _expand(b)
        ),
        _low_rank, VECTOR, EVENT,
    ),
    "Dirichlet": Family(
        ("positive",), lambda a: dist.Dirichlet(_expand(a)),
        lambda v, a: plain.Dirichlet(a.expand(SIZE), validate_args=False).log_prob(v),
        SIMPLEX, EVENT,
    ),
    "LKJCholesky": Family(
        ("positive",), lambda a: dist.LKJCholesky(SIZE, a), _lkj,
        constraints.corr_cholesky, (SIZE, SIZE),
    ),
    "VonMises": _same("VonMises", "rp", latent=False),
    "Bernoulli": Family(
        ("real",), lambda a: dist.Bernoulli(logits=a),
        lambda v, a: torch.where(v > 0.5, logsigmoid(a), logsigmoid(-a)), constraints.boolean,
    ),
    "Categorical": Family(
        ("vector",), lambda a: dist.Categorical(logits=a),
        lambda v, a: a.log_softmax(-1)[v.long()], constraints.integer_interval(0, SIZE - 1),
    ),
    "Poisson": _same("Poisson", "p", COUNT, latent=False),
    "Geometric": Family(
        ("real",), lambda a: dist.Geometric(logits=a),
        lambda v, a: logsigmoid(a) + v * logsigmoid(-a), COUNT, latent=False,
    ),
    "Binomial": Family(
        ("real",), lambda a: dist.Binomial(5, logits=a), _binomial, COUNT, latent=False
    ),
    "NegativeBinomial": Family(
        ("positive", "real"), lambda a, b: dist.NegativeBinomial(a, logits=b),
        lambda v, a, b: _gamma_poisson(v, a, (-b).exp()), COUNT, latent=False,
    ),
    "GammaPoisson": Family(
        ("positive", "positive"), dist.GammaPoisson, _gamma_poisson, COUNT, latent=False
    ),
    "BetaBinomial": Family(
        ("positive", "positive"), lambda a, b: dist.BetaBinomial(a, b, 5), _beta_binomial, COUNT,
        latent=False,
    ),
    "ZeroInflatedPoisson": Family(
        ("positive", "real"), lambda a, b: dist.ZeroInflatedPoisson(a, gate_logits=b),
        _zero_inflated, COUNT, latent=False,
    ),
    "OrderedLogistic": Family(
        ("real",), lambda a: dist.OrderedLogistic(a, CUTS.to(a)), _ordered_logistic, COUNT,
        latent=False,
    ),
}  # fmt: skip
