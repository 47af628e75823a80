# SPDX-License-Identifier: Apache-2.0
"""Sparse regressions: horseshoes, and a spike and slab."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from benchmarks.zoo.registry import add, floats


def _sparse_data(rows: int, columns: int, seed: int) -> tuple:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns))
    beta = np.zeros(columns)
    beta[:5] = [2.0, -1.5, 1.0, 0.5, -0.3]
    return floats(x, x @ beta + rng.normal(size=rows))


def _horseshoe(x, y):
    num_features = x.shape[1]
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("features", num_features):
        lam = pyro.sample("lam", dist.HalfCauchy(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    beta = pyro.deterministic("beta", z * lam * tau)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


for _rows, _columns in ((60, 30), (80, 50), (200, 300)):
    add(lambda r=_rows, c=_columns: _sparse_data(r, c, 20 + c), name=f"horseshoe_{_columns}")(
        _horseshoe
    )


@add(lambda: _sparse_data(50, 20, 27))
def spike_slab(x, y):
    """The indicator of each coefficient is marginalised: a narrow and a wide normal."""
    inclusion = pyro.sample("inclusion", dist.Beta(1.0, 4.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("features", x.shape[1]):
        beta = pyro.sample("beta", dist.Normal(0.0, 1.5))
        slab = dist.Normal(0.0, 1.5).log_prob(beta)
        spike = dist.Normal(0.0, 0.05).log_prob(beta)
        mixture = torch.logaddexp(slab + inclusion.log(), spike + torch.log1p(-inclusion))
        pyro.factor("spike_or_slab", mixture - slab)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)
