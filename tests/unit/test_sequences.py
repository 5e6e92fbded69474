"""Sequences whose items are made on demand."""

import pytest
import torch

from bigsgan.engines.sequences import Kept, MicroBatches, OnDemand


def counted(kind):
    asked = []

    def make(index):
        asked.append(index)
        return index * index

    return kind(4, make), asked


def test_items_are_made_each_time_they_are_asked_for():
    items, asked = counted(OnDemand)
    assert len(items) == 4
    assert asked == []
    assert (items[2], items[2], items[-1]) == (4, 4, 9)
    assert asked == [2, 2, 3]


def test_kept_items_are_made_once():
    items, asked = counted(Kept)
    assert [*items, *items, items[-2]] == [0, 1, 4, 9, 0, 1, 4, 9, 4]
    assert asked == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [OnDemand, Kept])
def test_they_are_sequences(kind):
    items, _ = counted(kind)
    assert items[1:3] == [1, 4]
    for index in (4, -5):
        with pytest.raises(IndexError):
            items[index]


def test_given_micro_batches_know_their_size():
    given = [(torch.full((3, 2), float(i)), torch.zeros(3)) for i in range(2)]
    batches = MicroBatches.given(given)
    assert (len(batches), batches.num_samples, batches.source) == (2, 3, None)
    assert batches[1][0].unique().item() == 1.0
