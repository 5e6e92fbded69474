"""Lazy penalties: the number of updates to time so that each penalty counts as often as in a run.

No torch here.
"""

from __future__ import annotations

import math

from bigsgan.config import Recipe


def whole_cycles(recipe: Recipe, steps: int) -> int:
    """The largest multiple of a cycle of penalties that is at most ``steps``; ``steps`` if a cycle is longer."""
    cycle = math.lcm(*_cycles(recipe).values())
    return steps // cycle * cycle or steps


def partly_timed(recipe: Recipe, steps: int) -> list[str]:
    """Say in one line, or none, which penalties are too frequent or too rare in ``steps`` updates in a row."""
    cycles = _cycles(recipe)
    found = ", ".join(field for field, cycle in cycles.items() if steps % cycle)
    return [f"not timed as often as in a run: {found}; take --steps {math.lcm(*cycles.values())}"] if found else []


def _cycles(recipe: Recipe) -> dict[str, int]:
    """Number of updates after which each part's turns repeat, by field. Those of D count its steps."""
    section = recipe.objective
    found = {
        f"objective.{name}.every": every // math.gcd(every, section.d_steps)
        for name, every in section.intervals.items()
    }
    for number, term in enumerate(section.terms):
        if term.network == "generator":
            found[f"objective.terms.{number}.every"] = term.every
    if section.path_length is not None:
        found["objective.path_length.every"] = section.path_length.every
    return found
