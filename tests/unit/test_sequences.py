"""Sequences whose items are made on demand: when they are made, and that they are sequences."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from bigsgan.engines.sequences import Kept, MicroBatches, OnDemand


class Squares:
    """A function that notes its calls, and what it returned."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, index: int) -> list[int]:
        self.calls.append(index)
        return [index**2]


@pytest.mark.parametrize("kind", [OnDemand, Kept])
def test_items_are_those_of_a_list(kind):
    expected = [[i**2] for i in range(5)]
    items = kind(5, Squares())
    assert len(items) == 5
    assert list(items) == expected
    for index in range(-5, 5):
        assert items[index] == expected[index]
    for part in (slice(None), slice(1, 3), slice(-2, None), slice(None, None, -2), slice(3, 99), slice(4, 1)):
        assert items[part] == expected[part]
    for index in (5, -6):
        with pytest.raises(IndexError):
            items[index]


@pytest.mark.parametrize("kind", [OnDemand, Kept])
def test_nothing_is_made_before_it_is_asked_for(kind):
    make = Squares()
    items = kind(5, make)
    assert len(items) == 5
    assert make.calls == []
    assert items[3:1] == []
    assert make.calls == []
    items[-2]
    assert make.calls == [3]
    items[1:3]
    assert make.calls == [3, 1, 2]


def test_on_demand_makes_an_item_each_time():
    make = Squares()
    items = OnDemand(3, make)
    assert items[1] is not items[1]
    items[-2], items[1:2]
    assert make.calls == [1, 1, 1, 1]


def test_kept_makes_an_item_once():
    make = Squares()
    items = Kept(3, make)
    assert items[1] is items[1]
    assert items[-2] is items[1]
    assert items[1:2][0] is items[1]
    assert [*items] == [*items]
    assert make.calls == [1, 0, 2]


@pytest.mark.parametrize("kind", [OnDemand, Kept])
def test_the_source_is_known_without_making_anything(kind):
    first = kind(3, Squares())
    second = kind(3, lambda index: first[index], source=first)
    assert first.source is None
    assert second.source is first
    assert second[2] == [4]


def test_micro_batches_say_how_many_samples_they_have():
    made = []

    def make(index: int) -> tuple[torch.Tensor, ...]:
        made.append(index)
        return torch.full((4, 2), float(index)), torch.arange(4)

    source = object()
    batches = MicroBatches(3, 4, make, source)
    assert (len(batches), batches.num_samples, batches.source, made) == (3, 4, source, [])
    images, labels = batches[-1]
    assert torch.equal(images, torch.full((4, 2), 2.0))
    assert torch.equal(labels, torch.arange(4))
    batches[2]
    assert made == [2, 2]


def test_given_micro_batches():
    items = [(torch.randn(4, 2), torch.arange(4)) for _ in range(3)]
    batches = MicroBatches.given(items)
    assert (len(batches), batches.num_samples, batches.source) == (3, 4, None)
    for index in (0, 1, 2, -1):
        assert batches[index] is items[index]
    assert batches[1:] == items[1:]
    with pytest.raises(IndexError):
        batches[3]


def test_what_is_kept_goes_with_the_sequence():
    """At once, not when the garbage collector comes: these are an update's images."""
    gc.disable()
    try:
        items = Kept(1, lambda i: torch.zeros(3))
        image = weakref.ref(items[0])
        assert image() is not None
        del items
        assert image() is None
    finally:
        gc.enable()
