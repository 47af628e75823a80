# SPDX-License-Identifier: Apache-2.0
"""The order of minibatches: its own random streams, and the same again after a restart."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pyro_implicit.runtime.minibatches import BatchStream


class Augmented(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([float(index)]) + 0.1 * torch.rand(1)


def loader(own_generator=False):
    generator = torch.Generator().manual_seed(3) if own_generator else None
    return DataLoader(Augmented(), batch_size=3, shuffle=True, generator=generator)


def taken(stream, count):
    return [stream.next()[0].flatten().tolist() for _ in range(count)]


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("place", [0, 2, 4, 7])
def test_restored_stream_goes_on_alike(place, own_generator):
    torch.manual_seed(0)
    stream = BatchStream(loader(own_generator))
    taken(stream, place)
    state = stream.state()
    expected = taken(stream, 9)
    assert stream.epoch_length == 4 and len(stream.probed) == 16
    torch.manual_seed(1)
    other = BatchStream(loader(own_generator))
    other.restore(state)
    assert taken(other, 9) == expected


def test_streams_are_apart():
    """What is drawn outside does not change the order, nor the order what is drawn outside."""
    torch.manual_seed(0)
    first = BatchStream(loader())
    expected, outside = taken(first, 6), torch.rand(2)
    torch.manual_seed(0)
    second = BatchStream(loader())
    found = []
    for _ in range(6):
        found += taken(second, 1)
        torch.rand(5)
    assert found == expected
    torch.manual_seed(0)
    BatchStream([torch.zeros(2)])
    assert torch.rand(2).equal(outside)


def test_epochs_are_whole_and_shuffled_anew():
    stream = BatchStream(loader())
    epochs = [[int(v) for batch in taken(stream, 4) for v in batch] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10)) and epochs[0] != epochs[1]


class Counted:
    """Without a length."""

    def __iter__(self):
        return iter([torch.zeros(2), (torch.ones(1), torch.ones(2)), [torch.ones(3)]])


def test_kinds_of_minibatches():
    stream = BatchStream(Counted())
    assert stream.epoch_length == 3
    assert [len(stream.next()) for _ in range(4)] == [1, 2, 1, 1]
    assert BatchStream([()] * 5).next() == ()


def test_a_loader_without_a_length_is_counted():
    class Rows(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(10.0))

    stream = BatchStream(DataLoader(Rows(), batch_size=4))
    assert stream.epoch_length == 3 and [len(stream.next()[0]) for _ in range(4)] == [4, 4, 2, 4]


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        (torch.zeros(3), TypeError, "iterable of tuples.*got a Tensor"),
        (5, TypeError, "got a int"),
        ([], ValueError, "empty.*Cure"),
        ((torch.zeros(2) for _ in range(40)), ValueError, "exhausted after one pass.*Cure"),
        ([(torch.zeros(2), 1.0), (torch.zeros(0), 1.0)], ValueError, "minibatch 2.*no rows.*Cure"),
        ([{"x": torch.zeros(2)}], TypeError, "gives dicts.*Cure"),
    ],
)
def test_refuses(batches, error, message):
    with pytest.raises(error, match=message):
        BatchStream(batches)
