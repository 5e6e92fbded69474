"""Counters of a run, and what they save."""

from __future__ import annotations

from types import SimpleNamespace

from bigsgan.training.state import Counters


def loaded(numbers, d_steps=1):
    counters = Counters(d_steps)
    counters.load(SimpleNamespace(numbers=numbers))
    return counters


def test_what_is_saved_is_loaded():
    counters = Counters(d_steps=2, skipped=((64, 80), (24, 40)))
    counters = Counters(2, rollbacks=2, skipped=tuple(sorted(counters.skipped)))
    for _ in range(3):
        counters.count(batch=8)
    assert (counters.update, counters.nimg) == (3, 24)
    assert counters.position == 64  # 0 to 24, 40 to 64
    counters.count(batch=16)
    assert counters.position == 80 + 2 * 16
    assert loaded(counters.numbers(), 2) == counters


def test_an_update_that_failed_twice_is_one_stretch():
    counters = Counters(skipped=((8, 16), (24, 32)))
    assert counters.skipped_with((24, 40)) == ((8, 16), (24, 40))
    assert counters.skipped_with((16, 24)) == ((8, 16), (16, 24), (24, 32))
