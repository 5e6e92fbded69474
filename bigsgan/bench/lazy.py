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
    """Number of updates after which each penalty's turns repeat, by field. R1 and R2 count D's steps."""
    section = recipe.objective
    found = {
        f"objective.{name}.every": penalty.every // math.gcd(penalty.every, section.d_steps)
        for name, penalty in section.gradient_norms.items()
    }
    if section.path_length is not None:
        found["objective.path_length.every"] = section.path_length.every
    return found
