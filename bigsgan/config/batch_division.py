"""Whether a batch divides into micro-batches and replicas, and into groups within them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from bigsgan.config.recipe import Recipe
from bigsgan.errors import UserError, counted

_MOST_TRIES = 100
"""Batches that are tried for a remedy."""


def check_division(recipe: Recipe, divisions: Sequence[tuple[str, int, int]]) -> None:
    """Check a batch for each network, with the numbers of its micro-batches and replicas.

    Raises:
        UserError: It does not divide, or a network or path length does not support such micro-batches.
    """
    for network, accumulation, replicas in divisions:
        parts = accumulation * replicas
        if recipe.batch % parts:
            problem = f"must be a multiple of {parts}"
            detail = f"{counted(accumulation, 'micro-batch')} on {counted(replicas, 'rank')} for the {network}"
            remedy = f"set batch={_larger_batch(recipe, divisions)}"
            raise UserError("batch", recipe.batch, problem, remedy, detail)
        getattr(recipe, network).check_micro_batch(recipe.batch // parts, parts)
        if network == "generator" and recipe.objective.path_length:
            recipe.objective.path_length.check_micro_batch(recipe.batch // parts)


def _larger_batch(recipe: Recipe, divisions: Sequence[tuple[str, int, int]]) -> int:
    """Return the next batch that can be divided, and whose micro-batches fit the networks unless none of many does."""
    multiple = math.lcm(*(accumulation * replicas for _, accumulation, replicas in divisions))
    least = -(-recipe.batch // multiple) * multiple
    for batch in range(least, least + _MOST_TRIES * multiple, multiple):
        with suppress(UserError):
            check_division(recipe.model_copy(update={"batch": batch}), divisions)
            return batch
    return least
