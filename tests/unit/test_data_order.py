"""The order of real images against plain counting: nothing dropped, nothing read twice, the same on every layout."""

from __future__ import annotations

import numpy as np
import pytest

from bigsgan.data.order import EpochOrder, Slice, horizontal_flips, phase_start, random_crops
from bigsgan.draws import Draws
from bigsgan.images.size import Size

LAYOUTS = [(accumulation, world_size) for accumulation in (1, 2, 3) for world_size in (1, 2, 4)]


@pytest.mark.parametrize("accumulation, world_size", LAYOUTS)
def test_ranks_side_by_side_make_each_micro_batch(accumulation, world_size):
    batch = 24
    for phase in (0, 5):
        read = [
            position
            for micro_step in range(accumulation)
            for rank in range(world_size)
            for position in Slice(batch, accumulation, rank, world_size).positions(micro_step, phase * batch)
        ]
        assert read == list(range(phase * batch, (phase + 1) * batch))


@pytest.mark.parametrize(
    "position, batch, skipped, start",
    [
        (24, 8, [], 24),
        (24, 8, [(32, 40)], 24),  # ends where the stretch begins
        (24, 8, [(16, 24)], 24),
        (24, 8, [(24, 32)], 32),
        (24, 16, [(32, 40)], 40),  # of another batch: it would reach into the stretch
        (28, 8, [(24, 32)], 32),
        (24, 8, [(24, 32), (32, 40), (50, 60)], 40),
        (24, 16, [(24, 32), (40, 48)], 48),
    ],
)
def test_a_phase_keeps_clear_of_what_is_passed_over(position, batch, skipped, start):
    assert phase_start(position, batch, skipped) == start


@pytest.mark.parametrize("accumulation, world_size", LAYOUTS)
def test_every_image_is_read_once_an_epoch_over_all_ranks(accumulation, world_size):
    length, batch, epochs = 50, 24, 3  # 50 is not a multiple of 24: batches lie across the ends of epochs
    read = []
    for phase in range(-(-length * epochs // batch)):
        for micro_step in range(accumulation):
            for rank in range(world_size):
                # Each rank has an order of its own, as each process has.
                order = EpochOrder(Draws(7), length)
                read += order.indices(
                    Slice(batch, accumulation, rank, world_size).positions(micro_step, phase * batch)
                ).tolist()
    for epoch in range(epochs):
        assert sorted(read[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_an_epoch_is_its_own_permutation():
    length, draws = 40, Draws(3)
    order = EpochOrder(draws, length)
    expected = np.concatenate([draws.permutation("order", (epoch,), length) for epoch in range(4)])
    assert np.array_equal(order.indices(range(160)), expected)  # a range of four epochs at once
    for first in (159, 0, 41, 40, 39):  # and parts of one, in any order
        assert order.indices(range(first, first + 1)).tolist() == [expected[first]]
    assert not np.array_equal(expected[:40], expected[40:80])
    assert not np.array_equal(expected[:40], EpochOrder(Draws(4), length).indices(range(40)))


def test_an_epoch_is_drawn_once_while_it_lasts():
    class CountingDraws(Draws):
        calls: list[int] = []  # noqa: RUF012 - one test, one class

        def permutation(self, stream, counters, num):
            self.calls.append(counters[0])
            return super().permutation(stream, counters, num)

    order = EpochOrder(CountingDraws(0), 10)
    for position in [*range(30), 19, 29]:
        order.indices(range(position, position + 1))
    assert CountingDraws.calls == [0, 1, 2]  # going back one epoch costs nothing either


def test_flips_are_a_function_of_the_position():
    draws, num = Draws(11), 4096
    flips = horizontal_flips(draws, range(num))
    assert flips.dtype == bool
    split = [horizontal_flips(draws, range(first, first + 128)) for first in range(0, num, 128)]
    assert np.array_equal(flips, np.concatenate(split))
    assert abs(flips.mean() - 0.5) < 4 * 0.5 / num**0.5  # four standard deviations of a fair coin
    assert not np.array_equal(flips, horizontal_flips(draws, range(num, 2 * num)))
    assert not np.array_equal(flips, horizontal_flips(Draws(12), range(num)))


def test_crops_are_a_function_of_the_position():
    draws, num, margin = Draws(11), 4096, 3
    offsets = random_crops(draws, range(num), Size.of(margin))
    assert (offsets.dtype, offsets.shape) == (np.int64, (num, 2))
    split = [random_crops(draws, range(first, first + 128), Size.of(margin)) for first in range(0, num, 128)]
    assert np.array_equal(offsets, np.concatenate(split))
    # Each of the 16 corners as often as chance has it: four standard deviations.
    counts = np.bincount(offsets @ (margin + 1, 1), minlength=16)
    assert (np.abs(counts - num / 16) < 4 * (num / 16 * 15 / 16) ** 0.5).all()
    assert not np.array_equal(offsets, random_crops(draws, range(num, 2 * num), Size.of(margin)))
    assert not np.array_equal(offsets, random_crops(Draws(12), range(num), Size.of(margin)))
