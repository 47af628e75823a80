# SPDX-License-Identifier: Apache-2.0
"""Factors, abilities and topics."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from benchmarks.zoo.mixtures import log_ratios
from benchmarks.zoo.registry import add, floats, integers


def _factors_data() -> tuple:
    rng = np.random.default_rng(71)
    loadings = rng.normal(size=(8, 2))
    noise = rng.uniform(0.4, 1.0, 8)
    return floats(rng.normal(size=(100, 2)) @ loadings.T + noise * rng.normal(size=(100, 8)))


def _factors_invariant(draws, y):
    """The loadings, rotated so that the second factor does not load on the first variable."""
    loadings = draws["loadings"]
    rotation, upper = torch.linalg.qr(loadings[:, :2].mT)
    canonical = loadings @ (rotation * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2))
    rows, columns = torch.tril_indices(loadings.shape[1], 2)
    return {"loadings": canonical[:, rows, columns], "noise": draws["noise"].log()}


@add(_factors_data, _factors_invariant)
def factor_analysis(y):
    """The factors are marginalised; the loadings may rotate and change sign."""
    num_variables = y.shape[1]
    loadings = pyro.sample("loadings", dist.Normal(0.0, 1.0).expand([num_variables, 2]).to_event(2))
    noise = pyro.sample("noise", dist.HalfNormal(1.0).expand([num_variables]).to_event(1))
    with pyro.plate("data", len(y)):
        marginal = dist.LowRankMultivariateNormal(torch.zeros(num_variables), loadings, noise**2)
        pyro.sample("y", marginal, obs=y)


def _answers_data() -> tuple:
    rng = np.random.default_rng(72)
    ability, difficulty = rng.normal(size=80), rng.normal(size=15)
    slope = np.exp(0.3 * rng.normal(size=15))
    probability = 1 / (1 + np.exp(-slope * (ability[:, None] - difficulty)))
    person, item = (a.ravel() for a in np.meshgrid(np.arange(80), np.arange(15), indexing="ij"))
    correct = (rng.random((80, 15)) < probability).ravel()
    return integers(person), integers(item), *floats(correct)


@add(_answers_data)
def irt_2pl(person, item, correct):
    with pyro.plate("persons", 80):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    sd = pyro.sample("sd", dist.HalfNormal(2.0))
    with pyro.plate("items", 15):
        a = pyro.sample("a", dist.LogNormal(0.0, 0.5))
        b = pyro.sample("b", dist.Normal(mu, sd))
    logits = a[item] * (theta[person] - b[item])
    with pyro.plate("answers", len(correct)):
        pyro.sample("correct", dist.Bernoulli(logits=logits), obs=correct)


def _words_data() -> tuple:
    rng = np.random.default_rng(73)
    words = rng.dirichlet(0.3 * np.ones(12), size=2)
    topics = rng.dirichlet([0.7, 0.7], size=10)
    return floats([rng.multinomial(80, row) for row in topics @ words])


def _topics_invariant(draws, counts):
    topics, words = draws["topics"], draws["words"]
    # Words that identify the two topics of these data in either order.
    order = words[..., _TELLING].argsort(-1)
    words = words.gather(1, order.unsqueeze(-1).expand_as(words))
    topics = topics.gather(2, order.unsqueeze(1).expand_as(topics))
    return {"topics": log_ratios(topics), "words": log_ratios(words)}


_TELLING = 1


@add(_words_data, _topics_invariant)
def topics(counts):
    """A topic model with marginalised topics of words."""
    num_documents, num_words = counts.shape
    with pyro.plate("num_topics", 2):
        words = pyro.sample("words", dist.Dirichlet(0.5 * torch.ones(num_words)))
    with pyro.plate("documents", num_documents):
        topics = pyro.sample("topics", dist.Dirichlet(torch.ones(2)))
        pyro.sample("counts", dist.Multinomial(total_count=80, probs=topics @ words), obs=counts)
