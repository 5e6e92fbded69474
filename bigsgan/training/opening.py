"""The beginning of a run: its directory, which no other job may use meanwhile, and the parts in it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bigsgan.config import Recipe, RunPlan
from bigsgan.data.shards import keep_indices
from bigsgan.errors import UserError
from bigsgan.metrics.features import RECIPE, check_features
from bigsgan.monitor import RankLog, check_wandb, open_rank_log
from bigsgan.runtime import comm, roster
from bigsgan.runtime.collective_errors import by_each, for_rank_zero
from bigsgan.runtime.kernels import choose_kernels
from bigsgan.runtime.locking import hold
from bigsgan.training.build import build_run
from bigsgan.training.callbacks import build_callbacks
from bigsgan.training.directory import LOCK_FILE, RunDirectory, Traces, check_shared
from bigsgan.training.loop import Run
from bigsgan.training.rank_consistency import check_plans
from bigsgan.training.returning import settle, undo
from bigsgan.training.start import Start, find_start

_log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """A run's directory, and what the run begins from."""

    start: Start
    rank_log: RankLog
    lock: Callable[[], None]  # locks the directory again
    traces: Traces


def check_libraries(recipe: Recipe) -> None:
    """Find what a recipe needs besides its data.

    Raises:
        UserError: It is missing.
    """
    if recipe.metrics and recipe.metrics.needs_features:
        features = recipe.metrics.features  # files of each host
        by_each(comm, lambda: check_features(features, recipe.data, RECIPE))
    if "wandb" in recipe.monitor:
        for_rank_zero(comm, check_wandb)


@contextmanager
def opened(plan: RunPlan, allowed: Collection[str], nimg: int | None = None) -> Iterator[Opened]:
    """Open a run's directory, which no other job may train in meanwhile, and find what the run begins from.

    With ``nimg`` the run goes back to the checkpoint at so many images; see ``find_start``.

    Raises:
        UserError: The ranks differ, the directory is in use or cannot be written, or the checkpoint does not fit. What
            a start made there is removed, unless the run began.
    """
    check_plans(plan)
    roster.know(comm.from_rank_zero(comm.gather_objects(roster.own(plan.held_by(comm.rank())))))
    recipe, out = plan.recipe, Path(plan.recipe.out)
    check_libraries(recipe)  # before anything is written
    traces = Traces(out)
    try:
        check_shared(out)
    except UserError:
        traces.remove(files=False)
        raise
    with exclusive_lock(out) as lock:
        try:
            rank_log = open_rank_log(out / "logs", comm.rank(), lambda text: print(text, file=sys.stderr))
            choose_kernels(recipe.deterministic, searches=not plan.has_messages)
            for_rank_zero(comm, lambda: settle(out))
            yield Opened(find_start(plan, out, allowed, nimg=nimg), rank_log, lock, traces)
        except UserError:
            if comm.rank() == 0:
                if not traces.began:
                    with suppress(UserError):
                        undo(out)
                traces.remove(files=True)
            raise


@contextmanager
def exclusive_lock(out: Path) -> Iterator[Callable[[], None]]:
    """Keep other jobs from training in a run directory; a collective.

    Yields:
        What locks it again on rank 0, where its lock was removed.

    Raises:
        UserError: Another job trains there.
    """
    remedy = "wait until that job has ended, or end it, or give another `out`"
    held: list[Callable[[], None]] = []

    def lock() -> None:
        while held:
            held.pop()()
        held.append(hold(out / LOCK_FILE, "out", str(out), remedy))

    for_rank_zero(comm, lock)
    try:
        yield lock
    finally:
        for release in held:
            release()


@contextmanager
def built(plan: RunPlan, opened: Opened, given: Sequence[object]) -> Iterator[Run]:
    """Build a run in its opened directory, with its recipe's callbacks and those ``given`` in Python; close it.

    Raises:
        UserError: The data, the checkpoint, a callback or this machine does not fit the plan.
    """
    recipe, rank_log, out = plan.recipe, opened.rank_log, Path(plan.recipe.out)
    rank_log.phase = "build"
    _log.info("%d ranks on %s; recipe:\n%s", comm.world_size(), comm.device(), recipe.to_yaml())
    callbacks = build_callbacks(recipe, given)
    run = build_run(plan, out, opened.start, rank_log)
    run.callbacks = callbacks
    # Only now, as the recipe fits the data and the checkpoint. It has the names of the data's classes.
    run.directory = RunDirectory(replace(plan, recipe=run.recipe), out, opened.lock)
    opened.traces.began = True
    keep_indices()
    rank_log.write = run.reporter.message
    try:
        yield run
    finally:
        run.close()
    run.step.executor.destroy()  # not after an error: see ``Script.joined``
