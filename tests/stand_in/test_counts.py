"""Launches and bytes of the published recipes' updates stay below what tests/stand_in/counts.py writes down."""

import pytest

from tests.stand_in import build, counts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle())),
]

CLOSE = 0.9
"""Of a bound, below which a count should have lowered it."""


@pytest.mark.parametrize("name", counts.CASES)
def test_an_update_keeps_within_its_bounds(on_ranks, name):
    found = on_ranks(1, counts.count, name)
    counts.show(name, found)
    for key in ("launches", "products", "rest"):
        bound = getattr(counts.CASES[name], key)
        assert CLOSE * bound <= found[key] <= bound, f"{key}: {found[key]:,.1f}; see tests/stand_in/counts.py"


def test_how_bytes_are_counted(on_ranks):
    """Of 6 numbers in float32: 24 bytes."""
    assert on_ranks(1, counts.known) == {"add": 72, "add_": 48, "expand": 0, "mul of a row": 24 + 12 + 24, "view": 0}
