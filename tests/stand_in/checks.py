"""The list of what the stand-ins show, which `bigsgan doctor --only stand_in` goes through as pytest does."""

from __future__ import annotations

from tests.gpu.__main__ import Check, _tests, run

__all__ = ["CHECKS", "run"]

_PLACE = "tests/stand_in"
_FAMILIES, _TWO_RANKS = f"{_PLACE}/test_every_family.py", f"{_PLACE}/test_two_ranks.py"

CHECKS = [
    Check("refusals", "what cannot run on a GPU is refused", 120, _tests(_FAMILIES, "-k", "refuses")),
    Check("waits", "updates of every game wait where the docs say", 600, _tests(_FAMILIES, "-k", "wait")),
    Check("races", "no two streams race, and a race is seen", 600, _tests(_TWO_RANKS, "-k", "race")),
    Check("pipelines", "pipelines wait where the docs say", 600, _tests(_TWO_RANKS, "-k", "not race")),
    Check("counts", "launches and bytes of published recipes", 600, _tests(f"{_PLACE}/test_counts.py")),
]
