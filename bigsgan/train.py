"""A training run from its plan to its exit status."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bigsgan import shipped
from bigsgan.config import NETWORKS, Recipe, RunPlan, both_engines
from bigsgan.config.run_directory import RECIPE_FILE
from bigsgan.data.shards import keep_indices
from bigsgan.engines.deepspeed import reports
from bigsgan.errors import UserError
from bigsgan.metrics.features import RECIPE, check_features
from bigsgan.monitor import RankLog, check_wandb, open_rank_log
from bigsgan.runtime import comm, memory, roll_call, roster
from bigsgan.runtime.compile_clock import CLOCK
from bigsgan.runtime.ending import exit_status
from bigsgan.runtime.kernels import choose_kernels
from bigsgan.runtime.locking import hold
from bigsgan.runtime.together import by_each, for_rank_zero
from bigsgan.training.alike import check_plans
from bigsgan.training.build import build_run, open_inputs
from bigsgan.training.directory import LOCK_FILE, RunDirectory, Traces, check_shared
from bigsgan.training.loop import Run, training_loop
from bigsgan.training.start import find_start
from bigsgan.training.stopping import LAUNCHER_ENDED, StopRequests
from bigsgan.training.watchdog import Watchdog

_log = logging.getLogger(__name__)


def main(plan: RunPlan, requests: StopRequests, allowed: Collection[str] = (), stopped_status: int = 0) -> int:
    """Train, and return the process's exit status. Every rank calls this.

    The status is 0 if the run is complete, 2 after the message of a UserError, 1 if the launcher's end stopped it.

    Args:
        plan: The run's plan.
        requests: Requests to stop. Until the ranks have joined, they may end the process at once.
        allowed: Keys of the recipe that may differ from a checkpoint's, though they change its meaning.
        stopped_status: The status if a signal stopped the run before its end.
    """

    def work() -> int:
        with requests.listening(), memory.naming_remedy(*_memory_remedy(plan)):
            with roll_call.taken():
                comm.initialize(comm.PATIENCE_HOURS * 3600)  # the watchdog is not as patient
            requests.joined()
            stopped_by = _run(plan, allowed, requests)
            requests.end_undisturbed()
        comm.leave()
        return {None: 0, LAUNCHER_ENDED: 1}.get(stopped_by, stopped_status)

    status = exit_status(work)
    roster.know(())
    for stream in filter(None, (sys.stdout, sys.stderr)):  # either may be closed
        try:
            stream.flush()
        except OSError:  # Python would flush again at its end, fail, and replace the status by 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return status


def check(plan: RunPlan, allowed: Collection[str]) -> None:
    """Check everything that a start checks before it builds networks, on this rank alone; write nothing.

    Raises:
        UserError: The start would be refused.
    """
    _check_libraries(plan.recipe)
    out = Path(plan.recipe.out)
    open_inputs(plan, out, find_start(plan, out, allowed, verify=False), RankLog(out, 0, print))


def _check_libraries(recipe: Recipe) -> None:
    if recipe.metrics:
        features = recipe.metrics.features  # files of each host
        by_each(comm, lambda: check_features(features, recipe.data, RECIPE))
    if "wandb" in recipe.monitor:
        for_rank_zero(comm, check_wandb)


def _run(plan: RunPlan, allowed: Collection[str], requests: StopRequests) -> str | None:
    """Train; return None if the run is complete, else what stopped it, the same on all ranks."""
    check_plans(plan)
    roster.know(comm.from_rank_zero(comm.gather_objects(roster.own(plan.held_by(comm.rank())))))
    recipe, out = plan.recipe, Path(plan.recipe.out)
    _check_libraries(recipe)  # before anything is written
    traces = Traces(out)
    try:
        check_shared(out)
    except UserError:
        traces.remove(files=False)
        raise
    with _alone_in(out) as lock:
        try:
            rank_log = open_rank_log(out / "logs", comm.rank(), lambda text: print(text, file=sys.stderr))
            choose_kernels(recipe.deterministic)
            return _train(plan, allowed, requests, out, rank_log, lock, traces)
        except UserError:
            if comm.rank() == 0:
                traces.remove(files=True)
            raise


@contextmanager
def _alone_in(out: Path) -> Iterator[Callable[[], None]]:
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


def _train(
    plan: RunPlan,
    allowed: Collection[str],
    requests: StopRequests,
    out: Path,
    rank_log: RankLog,
    lock: Callable[[], None] = lambda: None,
    traces: Traces | None = None,
) -> str | None:
    recipe, rank = plan.recipe, comm.rank()
    start = find_start(plan, out, allowed)
    if start.nimg >= recipe.total_nimg:
        if rank == 0:
            print(f"{out} is complete at {start.nimg} images; raise total_nimg to continue")
        return None
    rank_log.phase = "build"
    _log.info("%d ranks on %s; recipe:\n%s", comm.world_size(), comm.device(), recipe.to_yaml())
    run = build_run(plan, out, start, rank_log)
    run.directory = RunDirectory(plan, out, lock)  # only now, as the recipe fits the data and the checkpoint
    if traces:
        traces.began = True
    keep_indices()
    rank_log.write = run.reporter.message
    run.reporter.message(_opening_line(run))  # the first report may take minutes
    board = partial(
        comm.open_board, comm.from_rank_zero(uuid.uuid4().hex)
    )  # a launcher may keep its store for a restart
    watchdog = Watchdog(rank, comm.world_size(), recipe.hang_timeout_seconds, rank_log, board, CLOCK.seconds)
    try:
        with watchdog.watching():
            complete = training_loop(run, requests)
    finally:
        run.close()
    stopped_by = None if complete else _stopped_by(requests)
    if text := reports.summary():
        run.reporter.message(text)
    run.reporter.message(_stopping_line(stopped_by, run.counters.nimg) if stopped_by else _closing_lines(out, run))
    return stopped_by


def _opening_line(run: Run) -> str:
    num, recipe = comm.world_size(), run.recipe
    ranks = f"{num} rank{'s' if num > 1 else ''} on {comm.device().type}"
    return f"training: images {run.counters.nimg} to {recipe.total_nimg}, {ranks}, a report every {recipe.report_nimg}"


def _stopped_by(requests: StopRequests) -> str:
    """Return what stopped the run, which one rank may know; a signal outranks a launcher's end. A collective."""
    reasons = [reason for reason in comm.gather_objects(requests.reason) or [] if reason]
    chosen: str = comm.from_rank_zero(min(reasons, key=lambda reason: reason == LAUNCHER_ENDED, default=None))
    return chosen


def _stopping_line(reason: str, nimg: int) -> str:
    where = f"at {nimg} images, which are saved" if nimg else "before the first update"
    return f"stopped by {reason} {where}; the same command resumes"


def _closing_lines(out: Path, run: Run) -> str:
    nimg, board = run.counters.nimg, "tensorboard" in run.recipe.monitor
    return "\n".join(
        [
            f"done: {nimg} images",
            f"  samples      {out / 'samples'}",
            f"  checkpoint   {out / 'checkpoints' / f'{nimg:012d}'}",
            f"  TensorBoard  {out / 'tensorboard'}" if board else f"  reports      {out / 'metrics.jsonl'}",
            *([f"look at it:    tensorboard --logdir {out.parent}"] if board else []),
            f"continue:      {shipped.train_command()} --config {out / RECIPE_FILE} total_nimg={2 * nimg}",
        ]
    )


def _memory_remedy(plan: RunPlan) -> tuple[str, str]:
    """Return texts about where memory is not enough, and about the remedy."""
    sizes = ", ".join(f"{plan.engines[n].micro_batch_size} ({n})" for n in NETWORKS)
    staged = any(plan.placement(network).num_stages > 1 for network in NETWORKS)
    keeps = staged and plan.recipe.pipeline.generator_phase == "keep"
    return (
        f"on rank {comm.rank()} with {sizes} images a micro-batch",
        ("set pipeline.generator_phase=recompute; or set " if keeps else "set ")
        + " and ".join(both_engines("activation_checkpointing=true"))
        + f"; or start a new `out` with more micro-batches (accumulation={2 * plan.recipe.accumulation}) or "
        + ("more pipeline stages" if staged else "a higher ZeRO stage (ds_configs/zero3.json)"),
    )
