# SPDX-License-Identifier: Apache-2.0
"""Random streams apart from torch's own, on several GPUs, which need not be there."""

from __future__ import annotations

import pytest
import torch

from pyro_implicit.runtime.random_stream import own_stream, same_streams


@pytest.fixture
def gpus(monkeypatch):
    """The generators of two."""
    found = tuple(torch.Generator().manual_seed(seed) for seed in (5, 6))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "default_generators", found)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda index: found[index].get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, i: found[i].set_state(state))
    return found


def drawn(gpus):
    return torch.stack([torch.rand(()), *(torch.rand((), generator=gpu) for gpu in gpus)])


def test_all_of_them_have_a_stream_of_their_own(gpus):
    torch.manual_seed(4)
    states = [torch.get_rng_state(), *(gpu.get_state() for gpu in gpus)]
    with own_stream(seed=3):
        first = drawn(gpus)
    with own_stream(seed=3):
        assert torch.equal(drawn(gpus), first)
    with same_streams():
        assert not (drawn(gpus) == first).any()
    after = [torch.get_rng_state(), *(gpu.get_state() for gpu in gpus)]
    assert all(map(torch.equal, after, states))


def test_of_a_known_device_no_other_is_touched(gpus):
    before = gpus[0].get_state()
    with own_stream(torch.device("cuda:1"), seed=3):
        inside = torch.rand((), generator=gpus[1])
        assert torch.equal(gpus[0].get_state(), before)
    with own_stream(seed=3):
        assert torch.rand((), generator=gpus[1]) == inside
