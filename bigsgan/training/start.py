"""Finds the start of a run: its newest intact checkpoint, another run's weights, or random weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from bigsgan import checkpoint
from bigsgan.config import RunPlan, parse_recipe
from bigsgan.config.run_directory import RECIPE_FILE, compare_recipes, flat, read_saved_recipe
from bigsgan.monitor import NOTICE
from bigsgan.runtime import comm
from bigsgan.runtime.together import by_rank_zero
from bigsgan.training.initial_weights import InitialWeights

_log = logging.getLogger(__name__)


class Start(NamedTuple):
    """What a run begins from; with neither, at the beginning."""

    found: checkpoint.Checkpoint | None = None  # its own checkpoint, to resume from
    initial: InitialWeights | None = None  # weights of another run, or imported ones

    @property
    def source(self) -> checkpoint.Checkpoint | None:
        """Where any of it is read from."""
        return self.found or (self.initial.checkpoint if self.initial else None)

    @property
    def nimg(self) -> int:
        """Images that the run has seen, or the weights imported into its directory."""
        own = self.found or (self.initial.checkpoint if self.initial and self.initial.own else None)
        return own.nimg if own else 0


def find_start(plan: RunPlan, out: Path, allowed: Collection[str]) -> Start:
    """Find what to begin from, and read all of it to see that it is intact. Every rank calls this.

    Keys that are ``allowed`` may differ from the recipe of the checkpoint, though they change its meaning.

    Raises:
        UserError: The run directory or the checkpoint does not fit the recipe, or nothing intact is left.
    """

    def choose(passed_over: Collection[Path]) -> Start:
        return by_rank_zero(comm, lambda: _choose(plan, out, allowed, passed_over))

    return checkpoint.first_intact(choose, lambda start: start.source, lambda found: checkpoint.damage(found, comm))


def _choose(plan: RunPlan, out: Path, allowed: Collection[str], passed_over: Collection[Path]) -> Start:
    """Choose among what is complete; rank 0 alone calls this."""
    found = checkpoint.newest(out / "checkpoints", passed_over)
    if found is not None and found.is_imported:
        return Start(initial=InitialWeights(read_saved_recipe(out, "out"), found, live=True, own=True))
    if found is not None or os.path.lexists(out / RECIPE_FILE):
        read_saved_recipe(out, "out")  # and not somebody else's file of that name, which would be overwritten
    if found is not None:
        _compare(plan, found, allowed)
    if found is None and (init := plan.recipe.init_from):
        other = read_saved_recipe(Path(init.run), "init_from.run")
        chosen = checkpoint.find(Path(init.run), init.nimg, passed_over, ("init_from.run", "init_from.nimg"))
        return Start(initial=InitialWeights(other, chosen, init.weights == "live"))
    return Start(found)


def _compare(plan: RunPlan, found: checkpoint.Checkpoint, allowed: Collection[str]) -> None:
    """Refuse a recipe that differs in what the run has learnt from; log other differences."""
    saved, given = flat(parse_recipe(found.manifest["recipe"]).model_dump()), flat(plan.recipe.model_dump())
    for network, engine in plan.engines.items():  # the part of a DeepSpeed file that changes the numbers
        key = f"engines.{network}.precision"
        saved[key], given[key] = found.layout.get(f"{network}.precision"), engine.file.precision
    lines = compare_recipes(saved, given, str(plan.recipe.out), allowed)
    lines = [line for line in lines if not line.startswith("out: ")]
    if lines:
        _log.log(NOTICE, "Resuming with changes to the recipe:\n  %s", "\n  ".join(lines))
