"""Finds the start of a run: its newest intact checkpoint, another run's weights, or random weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from bigsgan import checkpoint
from bigsgan.checkpoint import returns
from bigsgan.checkpoint.tags import complete, newer_of_another_version
from bigsgan.config import RunPlan
from bigsgan.config.recipe import parse_saved_recipe
from bigsgan.config.run_directory import RECIPE_FILE, compare_recipes, flat, read_saved_recipe
from bigsgan.config.saved_recipe import is_lost
from bigsgan.errors import UserError
from bigsgan.monitor import NOTICE
from bigsgan.runtime import comm
from bigsgan.runtime.collective_errors import by_rank_zero
from bigsgan.training.initial_weights import InitialWeights, read_exports
from bigsgan.training.reports import REPORTS, owes_metrics

_log = logging.getLogger(__name__)


class Start(NamedTuple):
    """What a run begins from: a checkpoint, initial weights, or random weights if it has neither."""

    found: checkpoint.Checkpoint | None = None  # the run's own checkpoint, to resume from
    initial: InitialWeights | None = None  # another run's weights, or imported ones
    asked: int | None = None  # the images to which the user asks the run to go back
    goes_back: bool = False  # whether it does so now
    left: Mapping[str, str] = {}  # manifests' checksums of checkpoints that it leaves, by tag

    @property
    def source(self) -> checkpoint.Checkpoint | None:
        """The checkpoint that the run reads from, its own or another's; None for random weights."""
        return self.found or (self.initial.checkpoint if self.initial else None)

    @property
    def nimg(self) -> int:
        """Images that the run has seen, or that weights imported into its directory have seen."""
        own = self.source if self.found or (self.initial and self.initial.own) else None
        return own.nimg if own else 0

    @property
    def owes_metrics(self) -> bool:
        """Whether the run has to measure where its checkpoint is."""
        return self.found is not None and owes_metrics(self.found.manifest["numbers"].get(REPORTS, {}))


def find_start(
    plan: RunPlan, out: Path, allowed: Collection[str], verify: bool = True, nimg: int | None = None
) -> Start:
    """Find what a run begins from, and read all of it to check that it is intact. Every rank calls this.

    Without ``verify`` only the sizes of its files are checked. The ``allowed`` keys may differ from the checkpoint's
    recipe, although they change what the run learns. With ``nimg`` the run goes back to the checkpoint at so many
    images, unless it did so before and has saved another one since.

    Raises:
        UserError: The run directory or the checkpoint does not fit the recipe, or nothing intact is left.
    """

    def choose(passed_over: Collection[Path]) -> Start:
        return by_rank_zero(comm, lambda: _choose(plan, out, allowed, passed_over, nimg))

    def look(found: checkpoint.Checkpoint) -> str | None:
        return checkpoint.damage(found, comm) if verify else None

    return checkpoint.first_intact(choose, lambda start: start.source, look)


def _choose(
    plan: RunPlan, out: Path, allowed: Collection[str], passed_over: Collection[Path], nimg: int | None
) -> Start:
    """Choose among the complete checkpoints. Only rank 0 calls this."""
    found, goes_back, left = _own(out, passed_over, nimg)
    if found is not None and found.is_imported:
        initial = InitialWeights(read_saved_recipe(out, "out"), found, live=True, own=True)
        return Start(None, initial, nimg, goes_back, left)
    if found is not None or os.path.lexists(out / RECIPE_FILE):
        read_saved_recipe(out, "out")  # refuses another program's config.yaml, which the run would overwrite
    if found is not None and is_lost(out / RECIPE_FILE):
        _log.log(NOTICE, "%s has no %s: %s has the run's recipe; training writes it", out, RECIPE_FILE, found.path)
    if found is not None:
        _compare(plan, found, allowed)
    if found is None and (init := plan.recipe.init_from):
        if init.run is None:
            return Start(initial=read_exports(init))
        other = read_saved_recipe(Path(init.run), "init_from.run")
        chosen = checkpoint.find(Path(init.run), init.nimg, passed_over, ("init_from.run", "init_from.nimg"))
        return Start(initial=InitialWeights(other, chosen, init.weights == "live"))
    return Start(found, None, nimg, goes_back, left)


def _own(
    out: Path, passed_over: Collection[Path], nimg: int | None
) -> tuple[checkpoint.Checkpoint | None, bool, dict[str, str]]:
    """Choose among the run's own checkpoints; return whether the run goes back to it, and which it leaves then."""
    directory = out / "checkpoints"
    mark = returns.read(directory)
    is_saved = mark is not None and returns.is_saved(directory, mark)
    left = returns.left(directory, mark) if mark and is_saved else []
    passed_over = {*passed_over, *(each.path for each in left)}
    if nimg is None or (mark and is_saved and mark.nimg == nimg):
        found = checkpoint.newest(directory, passed_over)
        if nimg is not None and found is not None:
            text = "%s went back to %d images before, and goes on from %d; remove %s to go back once more"
            _log.log(NOTICE, text, out, nimg, found.nimg, directory / returns.MARK)
        return found, False, {each.path.name: each.manifest["sha256"] for each in left}
    found = checkpoint.find(out, nimg, passed_over, ("out", "--nimg"))
    if other := newer_of_another_version(directory, found):
        path, problem, remedy = other
        raise UserError(str(path), None, problem, remedy)
    newer = (each for each in complete(directory) if each.nimg > nimg)
    return found, True, {each.path.name: each.manifest["sha256"] for each in newer}


def _compare(plan: RunPlan, found: checkpoint.Checkpoint, allowed: Collection[str]) -> None:
    """Refuse a recipe whose differences change what the run learns; log the other differences."""
    saved, given = flat(parse_saved_recipe(found.manifest["recipe"]).model_dump()), flat(plan.recipe.model_dump())
    if given["data.class_names"] is None:  # they come with the data
        del saved["data.class_names"], given["data.class_names"]
    for network in plan.recipe.networks:  # precision is what changes the numbers in a DeepSpeed file
        key = f"engines.{network}.precision"
        saved[key], given[key] = found.layout.get(f"{network}.precision"), plan.engines[network].file.precision
    lines = compare_recipes(saved, given, str(plan.recipe.out), allowed)
    lines = [line for line in lines if not line.startswith("out: ")]
    if lines:
        _log.log(NOTICE, "Resuming with changes to the recipe:\n  %s", "\n  ".join(lines))
