# SPDX-License-Identifier: Apache-2.0
"""Fused graphs compute what the functions compute."""

import pytest
import torch

from pyro_implicit.compiled import RecordedFunction
from pyro_implicit.compiled.fusion import FusedGraph, _Planner
from pyro_implicit.compiled.program import simplify
from pyro_implicit.compiled.recorder import must_run, record

N = 30


def loop(x):
    return [sum((x[i] * (0.1 * i + 0.5)).sin() for i in range(N))]


def reversed_loop(x):
    return [sum(x[i] * x[N - 1 - i].exp() for i in range(N)), x[3] + 1]


def recurrence(x):
    state, total = x[0], 0.0
    for i in range(N):
        state = 0.9 * state.tanh() + x[i]
        total = total + (state - 1.0).square()
    return [total, state]


def alternating(x):
    parts = [x[i].sin() if i % 2 else x[i].cos() for i in range(N)]
    return [sum(part * x[N - 1 - i] for i, part in enumerate(parts))]


def split(x):
    parts = x.split([2] * (N // 2))
    return [torch.cat([part.exp() for part in parts]), sum(part.sum() for part in parts[2:])]


def moving_sums(x):
    """Each with terms of two groups and of both signs, and in an order of its own."""
    parts = x.split([1] * N)
    waves = [part.sin() for part in parts]
    total = 0.0
    for t in range(12, N):
        sign = -1.0 if t % 2 else 1.0
        near = sum(reversed(waves[t - 9 : t])) if t % 3 else sum(waves[t - 9 : t])
        total = total + (sign * (near - parts[t] - parts[t - 12] + parts[t - 2])).exp().sum()
    return [total]


def in_place(x):
    made = torch.zeros(N, dtype=x.dtype)
    for i in range(N):
        made[i] = x[i].sin()
    return [made.sum(), made * 2]


def mixed_types(x):
    small = [x[i].float() for i in range(N)]
    return [sum((one * 2.0).double() + (x[3] > 0.0) * 0.5 for one in small)]


def random(x):
    return [sum(x[i] * torch.randn((), dtype=x.dtype) for i in range(N))]


def without_rules(x):
    """Operations that torch cannot run quietly with stacked tensors."""
    aten, one, row = torch.ops.aten, torch.ones(3, dtype=x.dtype), torch.zeros(2, 3, dtype=x.dtype)
    parts = [(part, aten.log_sigmoid_forward(part)[1]) for part in x.split([3] * (N // 3))]
    slopes = [aten.log_sigmoid_backward(one, *part) for part in parts]
    return [sum(aten.copy(row, slope.float()) for slope in slopes)]


SEVERAL = [loop, reversed_loop, recurrence, alternating, split, moving_sums]
FUNCTIONS = [*SEVERAL, in_place, mixed_types, random, without_rules]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_values(function, capfd):
    torch.manual_seed(0)
    x, other = torch.randn(2, N, dtype=torch.float64)
    recorder = record(lambda: function(x), [x])
    simplify(recorder)
    fused = FusedGraph(recorder)
    torch.manual_seed(1)
    expected = function(other)
    torch.manual_seed(1)
    for one, result in zip(fused([other]), expected, strict=True):
        torch.testing.assert_close(one, result, rtol=1e-12, atol=1e-12)
    assert not capfd.readouterr().err  # where torch prints the warnings of its kernels


@pytest.mark.parametrize("function", SEVERAL)
def test_gradients(function):
    torch.manual_seed(0)
    x = torch.randn(N, dtype=torch.float64)
    recorder = record(lambda: function(x), [x])
    fused = FusedGraph(recorder)
    x.requires_grad_()
    found, expected = (
        torch.autograd.grad(sum(one.sum() for one in results), x)[0]
        for results in (fused([x]), function(x))
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert fused.num_steps < fused.num_nodes


def test_moving_sums_run_as_one():
    x = torch.randn(N, dtype=torch.float64)
    recorder = record(lambda: moving_sums(x), [x])
    fused = FusedGraph(recorder)
    assert fused.num_nodes > 8 * (N - 12) and fused.num_steps < N


def test_recorded_gradient_of_a_loop():
    """A long recording is fused and recorded again."""
    torch.manual_seed(0)
    x, other = torch.randn(2, 100, dtype=torch.float64)

    def score(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            total = sum((x[i] - x[i - 1]).square().exp() for i in range(1, 100))
            return [total.detach(), *torch.autograd.grad(total, x)]

    recorded = RecordedFunction(lambda: score(x), [x])
    assert len(recorded.graph.nodes) < 450
    for one, result in zip(recorded([other]), score(other), strict=True):
        torch.testing.assert_close(one, result, rtol=1e-12, atol=1e-12)


def test_draws_between_the_terms_of_an_alternating_sum():
    """Random draws keep their order, and do not keep other operations apart."""

    def function(x):
        total = torch.zeros((), dtype=x.dtype)
        for i in range(N):
            z = x[i] + torch.randn((), dtype=x.dtype) * x[0]
            total = total + z.square() - z.exp()
        return [total]

    torch.manual_seed(0)
    x, other = torch.randn(2, N, dtype=torch.float64)
    recorder = record(lambda: function(x), [x])
    simplify(recorder)
    fused = FusedGraph(recorder)
    torch.manual_seed(1)
    expected = function(other)
    torch.manual_seed(1)
    torch.testing.assert_close(fused([other]), expected, rtol=1e-12, atol=1e-12)
    assert fused.num_steps < N + 20


def written(x):
    y = x.sin()
    total = y.sum()
    return [total + y.mul_(2.0).masked_fill_(x < 0.0, -1.0).sum()]


def written_view(x):
    y = x.sin()
    y[1:].mul_(2.0)
    return [y.sum()]


def written_input(x):
    y = x.view(-1)
    return [(y.clone().add_(1.0) + y).sum()]


def written_in_single(x):
    return [x.float().add_(x).sum()]


@pytest.mark.parametrize(
    ("function", "left"),
    [(written, 0), (written_view, 1), (written_input, 0), (written_in_single, 1)],
)
def test_writes_become_functional(function, left):
    """Where nothing else shares the tensor, and its dtype stays; results are bit-identical."""
    torch.manual_seed(0)
    x, other = torch.randn(2, N, dtype=torch.float64)
    recorder = record(lambda: function(x), [x])
    assert recorder.mutated
    simplify(recorder)
    assert len(recorder.mutated) == left
    writes = [node for node in recorder.graph.nodes if must_run(node)]
    assert bool(writes) == bool(left)
    found = FusedGraph(recorder)([other])
    assert all(one.dtype == y.dtype for one, y in zip(found, function(other), strict=True))
    torch.testing.assert_close(found, function(other), rtol=0.0, atol=0.0)


def test_groups_that_need_each_other_cannot_run():
    """Each group may run alone, but the last element of one needs the first of the other."""
    x = torch.zeros(2)
    planner = _Planner(record(lambda: [x[0].exp().sin() + x[1].sin().exp()], [x]))
    names = {str(node): node for node in planner.deps}
    exponentials = [node for name, node in names.items() if "exp" in name]
    sines = [node for name, node in names.items() if "sin" in name]
    assert len(exponentials) == len(sines) == 2
    assert planner._is_acyclic([exponentials]) and planner._is_acyclic([sines])
    assert not planner._is_acyclic([exponentials, sines])
    assert not planner._is_acyclic([[exponentials[0], sines[0]]])


def test_graphs_that_cannot_be_shortened_are_not_planned(monkeypatch):
    def chain(x):
        for _ in range(20):
            x = (x.sin() + 1.0) * x.cos().exp()
        return [x]

    x = torch.randn(3)
    fused = FusedGraph(record(lambda: chain(x), [x]))
    monkeypatch.setattr(_Planner, "plan", lambda planner: pytest.fail("was planned"))
    assert not fused.pays
