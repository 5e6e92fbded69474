"""Counters of a run: what they save, and what older checkpoints hold."""

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


def test_a_checkpoint_that_counts_phases_is_understood():
    numbers = {"update": 10, "nimg": 160, "rollbacks": 1, "skipped.0": 3, "skipped.1": 4}
    counters = loaded(numbers, d_steps=2)
    assert (counters.update, counters.nimg, counters.position, counters.skipped) == (10, 160, 22 * 16, ())


def test_phases_that_a_checkpoint_is_still_to_skip_are_kept():
    """It was saved after a rollback, and before the run came to the data of the failure again."""
    counters = loaded({"update": 4, "nimg": 32, "rollbacks": 3, "skipped.0": 5, "skipped.1": 2, "skipped.2": 8})
    assert (counters.position, counters.skipped) == (48, ((64, 72),))  # 0, 1, 3 and 4 are read, and 6 is next
    counters = loaded({"update": 4, "nimg": 32, "rollbacks": 2, "skipped.0": 6, "skipped.1": 2})
    assert (counters.position, counters.skipped) == (40, ((48, 56),))
    counters = loaded({"update": 4, "nimg": 32, "rollbacks": 1, "skipped.0": 5})
    assert (counters.position, counters.skipped) == (32, ((40, 48),))
    counters.count(8)
    counters.count(8)
    assert counters.position == 56
