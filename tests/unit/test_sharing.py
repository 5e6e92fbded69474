"""How tests are shared among workers."""

from __future__ import annotations

import pytest

from tests.conftest import choose

MANY = "tests/distributed/test_state.py"
FEW = "tests/distributed/test_scale.py"
LAUNCHES = "tests/distributed/test_signals.py"
DIGITS = "tests/test_digits.py"
UNIT = "tests/unit/test_layers.py"


@pytest.mark.parametrize(
    "files, is_first, wanted",
    [
        ([UNIT, MANY, FEW, LAUNCHES, DIGITS], True, MANY),
        ([UNIT, MANY, FEW, LAUNCHES, DIGITS], False, DIGITS),
        ([UNIT, MANY, FEW, LAUNCHES], False, UNIT),
        ([MANY, LAUNCHES], False, LAUNCHES),
        ([MANY, FEW], False, MANY),
        ([UNIT, LAUNCHES], True, UNIT),
    ],
)
def test_ranks_start_in_one_worker_until_the_other_has_nothing_else(files, is_first, wanted):
    assert choose(files, is_first) == wanted
