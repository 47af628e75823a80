# SPDX-License-Identifier: Apache-2.0
"""Constants of recorded functions: which values may be read, and equal ones."""

import pytest
import torch

from pyro_implicit.compiled import RecordedFunction, Untraceable

INDEX = torch.tensor([2, 0])


def written(x):
    made = torch.zeros(2, 3)
    made[0].copy_(x)
    return made


def reads_data(x):
    return [written(x)[:, : int(INDEX.max()) + 1].exp()]


def reads_what_was_made_before(x):
    ones = torch.ones(2)
    number = int(ones[1])
    return [written(x) * number, ones.add_(x[0])]


def test_numbers_of_constants():
    x, y = torch.randn(2, 3)
    for function in (reads_data, reads_what_was_made_before):
        recorded = RecordedFunction(lambda: function(x), [x])  # noqa: B023
        for found, expected in zip(recorded([y]), function(y), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_changed_data_are_noticed(monkeypatch):
    monkeypatch.setattr(f"{__name__}.INDEX", INDEX.clone())
    x = torch.randn(3)
    recorded = RecordedFunction(lambda: reads_data(x), [x])
    assert recorded.holds()
    INDEX[0] = 1
    assert not recorded.holds()


@pytest.mark.parametrize("place", [(0, 1), (slice(None), 1)])
def test_numbers_of_inputs_are_refused(place):
    x = torch.randn(3)
    with pytest.raises(Untraceable, match="reads the value"):
        RecordedFunction(lambda: [x * float(written(x)[place].sum())], [x])


def test_equal_constants_are_one():
    x = torch.randn(3)

    def function():
        parts = [(x[1:] / torch.tensor([number, 1.0])).exp() for number in (0.0, 0.0, -0.0)]
        return [*parts, x * torch.full((), 2.0), x * torch.tensor(2.0).expand(1)]

    recorded = RecordedFunction(function, [x])
    for found, expected in zip(recorded([x]), function(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    targets = [node.target for node in recorded.graph.nodes]
    assert targets.count(torch.ops.aten.exp.default) == 2  # -0 is another number
    assert targets.count(torch.ops.aten.mul.Tensor) == 2  # other shapes
