# SPDX-License-Identifier: Apache-2.0
"""A kernel is one file and one line."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_implicit.mcmc import refine, refine_by_minibatches
from pyro_implicit.mcmc.kernels import KERNELS, Kernel, hmc, sghmc

MEAN, SD = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])


def normal():
    pyro.sample("x", dist.Normal(MEAN, SD).to_event(1))


def rows(y):
    x = pyro.sample("x", dist.Normal(MEAN, SD).to_event(1))
    with pyro.plate("rows", 4, subsample_size=len(y)):
        pyro.sample("y", dist.Normal(x[..., :1], 1e3), obs=y)


def test_a_new_kernel_with_all_data(monkeypatch):
    """Langevin steps with Metropolis' rule: one leapfrog."""

    def adaptation(policy, max_gradients):
        return hmc.adaptation(policy, 1)

    monkeypatch.setitem(KERNELS, "mala", Kernel(hmc.init, hmc.step, adaptation=adaptation))
    torch.manual_seed(0)
    options = {"kernel": "mala", "seed": 0, "progress": False, "num_chains": 512}
    result = refine(normal, AutoNormal(normal), **options)
    draws = result.get_samples()["x"]
    assert result.stopped == "converged" and result.kernel == "mala"
    # About four thousand effective draws: five standard errors.
    assert ((draws.mean(0) - MEAN) / SD).abs().max() < 0.08
    assert (draws.std(0) / SD - 1).abs().max() < 0.06


def test_chains_of_minibatches_call_the_registered_kernel(monkeypatch):
    calls = []

    def step(state, score, settings):
        calls.append(settings)
        return sghmc.step(state, score, settings)

    batches = [torch.zeros(2), torch.zeros(2)]
    options = {"batches": batches, "seed": 0, "progress": False, "max_epochs": 50}
    torch.manual_seed(0)
    guide = AutoNormal(rows)
    guide(batches[0])
    known = refine_by_minibatches(rows, guide, **options)
    monkeypatch.setitem(KERNELS, "sghmc", Kernel(sghmc.init, step, exact=False))
    other = refine_by_minibatches(rows, guide, **options)
    assert len(calls) == 100 and other.kernel == "sghmc"
    assert other.get_samples()["x"].equal(known.get_samples()["x"])


@pytest.mark.parametrize("name", KERNELS)
def test_steps_are_pure(name):
    """States and settings are not changed in place."""
    kernel = KERNELS[name]
    torch.manual_seed(0)

    def score(z):
        return -0.5 * z.square().sum(-1), -z

    state = kernel.init(torch.randn(20, 3), score)
    before = [part.clone() for part in state]
    if kernel.adaptation is not None:
        settings = kernel.adaptation().settings(state)
    else:
        settings = sghmc.Settings(0.1)
    after, info = kernel.step(state, score, settings)
    assert all(a.equal(b) for a, b in zip(state, before, strict=True))
    assert not after.position.equal(state.position) and info.num_gradients >= 1


def test_dual_averaging_is_pyros():
    from pyro.ops.dual_averaging import DualAveraging

    ours, theirs = hmc.Averaging(math.log(0.3), 0.2), DualAveraging(math.log(0.3), gamma=0.2)
    for gradient in (0.5, -0.2, 0.1, 0.3):
        ours = ours.update(gradient)
        theirs.step(gradient)
        assert (ours.value, ours.average) == theirs.get_state()
