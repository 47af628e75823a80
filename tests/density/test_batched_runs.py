# SPDX-License-Identifier: Apache-2.0
"""BatchedRuns: one run inside vmap equals one run after the other, or the model is looped."""

from __future__ import annotations

import random as python_random
import sys
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.poutine.trace_struct import Trace
from torch import nn

from pyro_implicit.density.batched_runs import BatchedRuns
from pyro_implicit.density.model import (
    DiscreteSum,
    Model,
    SubsampledError,
    compute_log_prob,
    refuse_subsampling,
    total_log_prob,
)
from pyro_implicit.runtime.sites import is_discrete_latent, is_latent

pytestmark = pytest.mark.usefixtures("double")


def hierarchical(y):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", 3):
        x = pyro.sample("x", dist.Normal(0.0, scale).expand([2]).to_event(1))
        pyro.sample("y", dist.Normal(x.sum(-1), 1.0), obs=y)


Y = torch.tensor([0.3, -1.0, 2.0])


def prepare(model, *args, num_runs=5):
    """The model with its latents to be given, and values for them."""
    trace = poutine.trace(model).get_trace(*args)
    latents, values, discrete = Trace(), {}, DiscreteSum.of(trace)
    for name, site in trace.nodes.items():
        if is_latent(site) and not is_discrete_latent(site):
            latents.add_node(name, **site)
            values[name] = torch.rand((num_runs,) + site["value"].shape)
    return Model(model, args, {}, latents, discrete), values


def log_probs(trace):
    trace.compute_log_prob()
    sites = {n: s["log_prob"] for n, s in trace.nodes.items() if s["type"] == "sample"}
    return sites, trace.log_prob_sum()


def test_vmap_equals_the_loop_and_the_formula():
    model, values = prepare(hierarchical, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast, slow = BatchedRuns("Test"), BatchedRuns("Test", False)
        found = [fast.map(model, values, log_probs) for _ in range(2)]  # compared, and not again
        looped = slow.map(model, values, log_probs)
    for sites, total in found:
        torch.testing.assert_close(sites, looped[0])
        torch.testing.assert_close(total, looped[1])
    assert fast.mode == "vmap" and slow.mode is False
    x, scale = values["x"], values["scale"]
    expected = dist.LogNormal(0.0, 1.0).log_prob(scale)
    expected = expected + dist.Normal(0.0, scale[:, None, None]).log_prob(x).sum((1, 2))
    expected = expected + dist.Normal(x.sum(-1), 1.0).log_prob(Y).sum(-1)
    torch.testing.assert_close(looped[1], expected)


def test_gradients_in_the_values():
    model, values = prepare(hierarchical, Y)
    values = {name: value.requires_grad_() for name, value in values.items()}
    leaves, weight = list(values.values()), torch.rand(5)
    grads = []
    for mode in ("vmap", "vmap", False):
        _, total = BatchedRuns("Test", mode).map(model, values, log_probs)
        grads.append(torch.autograd.grad(total @ weight, leaves))
    torch.testing.assert_close(grads[0], grads[2])


def test_the_model_runs_twice_for_the_first_batch_and_once_for_others():
    ran = []

    def model():
        ran.append(1)
        pyro.sample("x", dist.Normal(0.0, 1.0))

    prepared, values = prepare(model, num_runs=7)
    runs = BatchedRuns("Test")
    for expected in (2, 1, 1):
        ran.clear()
        runs.map(prepared, values, log_probs)
        assert len(ran) == expected
    ran.clear()
    BatchedRuns("Test", False).map(prepared, values, log_probs)
    assert len(ran) == 7


def branching():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    loc = 1.0 if x.item() > 0.5 else -1.0
    pyro.sample("y", dist.Normal(loc, 1.0), obs=torch.tensor(0.5))


def only_of_the_model():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    z = pyro.sample("z", dist.Normal(x, 1.0))
    pyro.sample("y", dist.Normal(z, 1.0), obs=torch.tensor(0.5))


DROPOUT = nn.Dropout(0.5)


def random():
    x = pyro.sample("x", dist.Normal(torch.zeros(50), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(DROPOUT(x).sum(), 1.0), obs=torch.tensor(5.0))


@pytest.mark.parametrize(
    "model, cause",
    [
        (branching, r"a tensor is asked for its number \(.item\(\)\)"),
        (only_of_the_model, "site 'z' is a latent that is drawn anew in each run"),
        (random, r"the model is random .*its log-density at one point is .*, and then "),
    ],
)
def test_falls_back_to_the_loop_with_one_warning(model, cause):
    prepared, values = prepare(model)
    if model is only_of_the_model:
        values.pop("z")
        prepared.replayed.remove_node("z")
    runs = BatchedRuns("THIS_ELBO")
    message = rf"THIS_ELBO runs the model one particle at a time.*\({cause}.*Cure"
    with pytest.warns(UserWarning, match=message) as caught:
        _, total = runs.map(prepared, values, log_probs)
    assert len(caught) == 1 and runs.mode is False and total.shape == (5,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, again = runs.map(prepared, values, log_probs)
    if model is branching:
        x = values["x"]
        loc = torch.where(x > 0.5, 1.0, -1.0)
        expected = dist.Normal(0.0, 1.0).log_prob(x) + dist.Normal(loc, 1.0).log_prob(
            torch.tensor(0.5)
        )
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), np.random.rand, python_random.random])
def test_randomness_is_found_where_runs_agree_by_chance(draw):
    """Within the tolerance between vmap and a plain run."""
    pyro.set_rng_seed(0)

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("y", torch.as_tensor(-100 + 0.03 * draw()) + 0.0 * x)

    prepared, values = prepare(model)
    runs = BatchedRuns("Test")
    with pytest.warns(UserWarning, match="the model is random beyond its latents"):
        runs.map(prepared, values, log_probs)
    assert runs.mode is False


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_functions_that_vmap_cannot_run_are_named():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(Twice.apply(x), 1.0), obs=torch.tensor(1.0))

    message = r"Cure: give \S+\.Twice a method setup_context.*; in a loss of your own, fewer "
    with pytest.warns(UserWarning, match=message):
        BatchedRuns("ImplicitELBO").map(*prepare(model), total_log_prob)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_operations_that_vmap_lacks_have_a_cure_of_their_own(kind):
    network = kind(1, 2)

    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(3, 1), 1.0).to_event(2))
        pyro.sample("y", dist.Normal(network(x)[0].sum(), 1.0), obs=torch.tensor(0.5))

    prepared, values = prepare(model)
    message = rf"Batching rule not implemented for aten::{kind.__name__.lower()}.*Cure: .*GRUCell"
    with pytest.warns(UserWarning, match=message) as caught:
        BatchedRuns("Test").map(prepared, values, log_probs)
    assert ".item()" not in str(caught[0].message)


@pytest.mark.parametrize("mode", ["vmap", False])
def test_a_site_of_some_runs_is_refused_by_name(mode):
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        if x > 0.5:
            pyro.sample("v", dist.Normal(x, 1.0), obs=torch.tensor(0.5))

    prepared, values = prepare(model)
    values["x"] = torch.tensor([0.0, 1.0, 0.2])
    with pytest.raises(ValueError, match="site 'v' is in some runs .* and not in others.*Cure"):
        BatchedRuns("Test", mode).map(prepared, values, log_probs)


@pytest.mark.parametrize("mode", ["vmap", False])
@pytest.mark.parametrize("summed", [False, True])
def test_all_runs_share_a_minibatch(mode, summed):
    seen = []

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 20, subsample_size=5) as index:
            seen.append(index)
            flag = pyro.sample("flag", dist.Bernoulli(0.4)) if summed else 0.0
            pyro.sample("y", dist.Normal(x + flag, 1.0), obs=torch.arange(20.0)[index])

    prepared, values = prepare(model)
    seen.clear()
    (sites, _) = BatchedRuns("Test", mode).map(prepared, values, log_probs)
    assert all(index.equal(seen[0]) for index in seen)
    assert "data" not in sites


def test_an_error_of_the_model_is_its_own():
    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))
        raise KeyError("its own")

    prepared, values = prepare(hierarchical, Y)
    prepared.model, prepared.args = model, ()
    with pytest.raises(KeyError, match="its own"):
        BatchedRuns("Test").map(prepared, values, log_probs)


def test_subsampling_is_refused_by_name():
    def model(size):
        with pyro.plate("data", 20, subsample_size=size):
            pyro.sample("x", dist.Normal(0.0, 1.0))

    refuse_subsampling(poutine.trace(model).get_trace(20), "The test")
    message = "The test needs all data, but plate 'data' of site 'x' subsamples 5 of 20.*Cure"
    with pytest.raises(SubsampledError, match=message):
        refuse_subsampling(poutine.trace(model).get_trace(5), "The test")


def test_a_warm_batch_makes_few_calls():
    """Models are prepared once, and not at each step: the inner loop of every training."""

    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x.sum(-1), scale), obs=torch.tensor(1.0))

    def note(frame, event, arg):
        if event == "call" and "/pyro_implicit/" in frame.f_code.co_filename:
            calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    def read(trace):
        compute_log_prob(trace)
        return trace.nodes["y"]["log_prob"]

    runner, values = prepare(model)
    runs, calls = BatchedRuns("test"), []
    for _ in range(3):
        runs.map(runner, values, read)
    sys.setprofile(note)
    try:
        runs.map(runner, values, read)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 9 and len({file for file, _ in calls}) <= 3


@pytest.mark.parametrize("error", [IndexError, AssertionError, ValueError])
def test_faults_of_the_model_are_told_from_impossible_values(error):
    """A model that looks up a table, say, and rejects no values by itself."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        if x > 0.5:
            raise error("row 7 of the table")
        pyro.sample("y", dist.Normal(x, 1.0), obs=torch.tensor(0.3))

    prepared, values = prepare(lambda: pyro.sample("x", dist.Normal(0.0, 1.0)))
    prepared.model = model
    values["x"] = torch.tensor([0.0, 0.7, 0.2, 0.9])
    runs = BatchedRuns("Test", mode=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = runs.map(prepared, values, lambda trace: log_probs(trace)[1])
    assert found.isnan().tolist() == [False, True, False, True]
    expected = [] if error is ValueError else [f"raised {error.__name__}: row 7 of the table at"]
    assert len(told) == len(expected)
    assert all(text in str(one.message) for text, one in zip(expected, told, strict=True))
