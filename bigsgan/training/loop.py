"""The training loop: the only while-loop of a run."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigsgan import checkpoint
from bigsgan.adversarial import AdversarialStep, InputSource, Scheduled
from bigsgan.config import Recipe
from bigsgan.data import RealImages
from bigsgan.engines import MicroBatch, Rates
from bigsgan.errors import UserError
from bigsgan.metrics.outside import MetricError
from bigsgan.monitor import RankLog, Reporter, Statistics
from bigsgan.monitor.statistics import refuse_other_names
from bigsgan.runtime import comm, division
from bigsgan.runtime.agreement import Agreement
from bigsgan.runtime.collective_errors import compared, for_rank_zero
from bigsgan.training import alarms
from bigsgan.training.callbacks import Callbacks
from bigsgan.training.clock import Clock
from bigsgan.training.directory import RunDirectory
from bigsgan.training.ema import ShardedEMA
from bigsgan.training.measuring import Measuring
from bigsgan.training.power import SNAPSHOTS
from bigsgan.training.recovery import Attempt, Recovery
from bigsgan.training.reports import REPORTS, Report, Reports
from bigsgan.training.returning import drop_measurements
from bigsgan.training.sampling import SampleGrid, making, sample, stand_statistics
from bigsgan.training.schedules import ema_decay, is_due, scheduled
from bigsgan.training.snapshots import Snapshots
from bigsgan.training.state import Counters
from bigsgan.training.stopping import StopRequests

MOST_RANKS_SHOWN = 16
"""With more ranks, a report has no memory of each."""

_log = logging.getLogger(__name__)


@dataclass
class Run:
    """All parts of a run, put together by ``build_run`` in build.py."""

    recipe: Recipe
    out: Path
    reals: RealImages
    source: InputSource
    step: AdversarialStep
    ema: ShardedEMA
    grid: SampleGrid
    sampling_batch: int
    standing: Sequence[MicroBatch]
    counters: Counters
    entries: dict[str, checkpoint.StateEntry]
    layout: dict[str, Any]
    saver: checkpoint.Saver
    recovery: Recovery
    statistics: Statistics
    reports: Reports  # saved beside ``entries``, which the weights depend on
    reporter: Reporter
    rank_log: RankLog
    measuring: Measuring | None  # None unless the recipe asks for metrics
    snapshots: Snapshots | None = None  # None unless the recipe asks for power function averages
    directory: RunDirectory | None = None  # None in tests and measurements
    callbacks: Callbacks = field(default_factory=Callbacks)

    def count_update(self) -> float:
        """Count an update, update the EMA, and return the EMA's decay."""
        recipe, counters = self.recipe, self.counters
        counters.count(recipe.batch)
        decay = ema_decay(recipe.ema, recipe.batch, counters.nimg)
        if self.step.generator.outcomes.last is not False:  # a skipped update leaves the weights unchanged
            self.ema.update(decay)
        self.ema.power.update(counters.nimg, recipe.batch)
        begins, every = counters.nimg >= recipe.ema.reset_from_nimg, recipe.ema.reset_nimg
        if begins and every and is_due(every, counters.nimg, recipe.batch):
            self.ema.reset_network()
        return decay

    def close(self) -> None:
        """End the loading processes, and wait for files that are being written."""
        self.reals.close()
        self.source.close()
        self.saver.close()
        if self.snapshots:
            self.snapshots.close()
        self.reporter.close()


def training_loop(run: Run, requests: StopRequests) -> Generator[Report, None, bool]:
    """Train until ``total_nimg`` images have been seen, or until any rank is asked to stop; then save.

    Yields:
        Each report, after what is due with it; the time until the next is asked for does not count.

    Returns:
        Whether the run is complete.

    Raises:
        UserError: The last checkpoint or EMA snapshot could not be saved; or code from outside failed.
    """
    recipe, counters = run.recipe, run.counters
    clock, agreement = Clock(counters.nimg, run.reals), Agreement()
    if comm.any_rank(requests.reason is not None):  # a rank was asked to stop while the run was put together
        return False
    with clock.paused():
        if counters.nimg == 0:
            _report_samples(run)
        if _measure_owed(run, requests):
            return False
    while counters.nimg < recipe.total_nimg:
        run.rank_log.phase = f"update {counters.update}"
        numbers = scheduled(recipe, counters.nimg)
        update, position = counters.update, counters.position
        run.step(update, numbers)
        decay = run.count_update()
        complete = counters.nimg >= recipe.total_nimg
        done = agreement.any_rank(requests.reason is not None) or complete
        due = _due(run, complete, done)
        attempt = Attempt(update, (position, counters.position), numbers)
        if failed := run.recovery.failed(attempt, at_once=any(due)):
            _roll_back(run, failed, clock)
            continue
        if any(due) and run.directory and run.directory.restored(run.reporter):
            due = due._replace(saves=True)
        if due.reports:
            with run.reports.counting(is_due(recipe.report_nimg, counters.nimg, recipe.batch)):
                _report_metrics(run, numbers, decay, clock)
        with clock.paused():
            owed, error = _show(run, due, requests, later=done and not complete)
            done = done or owed or error is not None
            if due.saves or done:
                finish_snapshots(run, must=complete)
                error = save(run, must=done) or error
        if error:
            raise error
        if run.saver.lost:
            _roll_back(run, attempt, clock)
            continue
        if due.tells:
            with clock.paused():
                yield Report(counters.nimg, run.reports.metrics_at(counters.nimg))
        if done:
            return complete and not owed
    return True


def _show(run: Run, due: _Due, requests: StopRequests, later: bool) -> tuple[bool, UserError | None]:
    """Make the grids of samples, quality metrics and the EMA snapshot that are due, and tell callbacks of a report.

    Metrics may be put off for ``later``. Returns whether the run owes them, as it is asked to stop; and what code from
    outside raised.
    """
    counters, recipe, owed, error = run.counters, run.recipe, False, None
    if due.samples:
        with run.reports.counting(is_due(recipe.sample_nimg, counters.nimg, recipe.batch)):
            _report_samples(run)
    if run.measuring and due.measures:
        owed, error = _measure(run, run.measuring, requests, later)
    if run.snapshots and due.snapshot:
        run.rank_log.phase = "EMA snapshot"
        run.snapshots.save(counters.nimg)
    if due.tells and error is None:
        error = run.callbacks.tell("on_report", counters.nimg, run.reports.metrics_at(counters.nimg))
    return owed, error


def finished(loop: Generator[Report, None, bool]) -> bool:
    """Go through a training loop to its end; return whether the run is complete."""
    while True:
        try:
            next(loop)
        except StopIteration as end:
            return bool(end.value)


class _Due(NamedTuple):
    """What an update is followed by; the same on all ranks."""

    reports: bool
    samples: bool
    measures: bool
    snapshot: bool
    saves: bool

    @property
    def tells(self) -> bool:
        """Whether it is a report, or quality metrics."""
        return self.reports or self.measures


def _due(run: Run, complete: bool, done: bool) -> _Due:
    """Return what is due. A run that is asked to stop makes no report for that, as it would make none if it went on."""
    recipe, nimg = run.recipe, run.counters.nimg

    def every(interval: int) -> bool:
        return is_due(interval, nimg, recipe.batch)

    return _Due(
        reports=complete or every(recipe.report_nimg),
        samples=complete or every(recipe.sample_nimg),
        measures=run.measuring is not None and (complete or run.measuring.is_due(nimg)),
        snapshot=run.snapshots is not None and (complete or run.snapshots.is_due(nimg)),
        saves=done or every(recipe.checkpoint_nimg),
    )


def _roll_back(run: Run, failed: Attempt, clock: Clock) -> None:
    run.rank_log.phase = "rollback"
    with clock.paused():
        run.saver.finish()
        lost, run.saver.lost = run.saver.lost, ""
        _log.warning("%s", run.recovery.roll_back(failed, lost))
    run.reporter.rewind(run.counters.nimg)
    for_rank_zero(comm, lambda: drop_measurements(run.out, run.counters.nimg))
    if run.snapshots:
        run.snapshots.rewind(run.counters.nimg)
    clock.restart(run.counters.nimg)


def _report_metrics(run: Run, numbers: Scheduled, decay: float, clock: Clock) -> None:
    """Report metrics. Only here does the loop wait for the device, to copy the statistics to the host."""
    run.rank_log.phase = "report"
    step, statistics = run.step, run.statistics
    own_peak = comm.peak_memory_bytes() / 2**30
    _add_spectral_norms(run)
    statistics.declare("data_wait")
    if run.reals.reads:
        statistics.add_host("data_wait", clock.data_wait())
    metrics = _reduce(statistics, own_peak)
    for name in step.executor.engines:
        rates: Rates = getattr(numbers, name)
        metrics[f"lr/{name}"] = rates.lr
        if rates.beta2 is not None:
            metrics[f"beta2/{name}"] = rates.beta2
    metrics.update({f"penalty_weight/{name}": weight for name, weight in numbers.penalty_weights.items()})
    for name, engine in step.executor.engines.items():
        metrics[f"loss_scale/{name}"] = engine.loss_scale
        metrics[f"skipped/{name}"] = engine.outcomes.num_skipped
        if f"grad_norm/{name}" not in metrics:
            _log.warning("all updates of the %s since the last report were skipped: non-finite gradients", name)
    metrics["ema_decay"] = decay
    if run.recipe.objective.schedule == "overlapped":
        metrics["staleness"] = 1.0  # each network learns from the other as it was this many updates ago
    metrics["checkpoint/stall_seconds"] = run.saver.stall_seconds
    metrics["checkpoint/write_seconds"] = run.saver.write_seconds
    metrics["images_per_second"] = clock.images_per_second(run.counters.nimg)
    if run.reports.diversity is not None:
        metrics[alarms.DIVERSITY] = run.reports.diversity
    raised = run.reports.alarms.examine(metrics)
    for name, text in raised.items():
        metrics[f"alarm/{name}"] = 1.0
        _log.warning("%s", text)
    run.reports.last = metrics
    run.reporter.report(run.counters.nimg, metrics)
    _log.info("%d images, peak of this rank %.2f GiB: %s", run.counters.nimg, own_peak, metrics)


def _add_spectral_norms(run: Run) -> None:
    """Add each network's largest spectral norm on this rank; the mean over the ranks is reported."""
    for name, engine in run.step.executor.engines.items():
        run.statistics.declare(f"spectral_norm/{name}")  # a pipeline stage may have no spectral layers
        sigmas = [layer.sigma for layer in engine.network.spectral_layers() if layer.sigma is not None]
        if sigmas:
            run.statistics.add(f"spectral_norm/{name}", torch.stack(sigmas).max())


def _reduce(statistics: Statistics, own_peak: float) -> dict[str, float]:
    """Return means over the ranks, their number, and the peak memory of each rank in GiB, by two collectives."""
    names = [f"memory/rank{rank}_gib" for rank in range(comm.world_size())]
    for rank, name in enumerate(names):  # times the number of ranks, as `reduce` returns the mean over them
        statistics.add_host(name, own_peak * len(names) if rank == comm.rank() else 0.0)
    statistics.check_names(comm.sum_over_ranks, lambda own: compared(comm, own, refuse_other_names))
    metrics = statistics.reduce(comm.sum_over_ranks)
    peaks = {name: metrics.pop(name) for name in names}
    metrics["ranks"] = len(names)
    metrics["memory/mean_gib"] = sum(peaks.values()) / len(peaks)
    metrics["memory/max_gib"] = max(peaks.values())
    if len(peaks) <= MOST_RANKS_SHOWN:
        metrics.update(peaks)
    return metrics


def _report_samples(run: Run) -> None:
    """Write sample grids of the live generator and of its EMA. The ranks that hold G compute them, rank 0 writes."""
    if not run.step.generator.is_held:
        return
    run.rank_log.phase = "samples"
    generator, nimg = run.step.generator, run.counters.nimg
    grid, batch, statistics = run.grid, run.sampling_batch, run.recipe.sample_statistics
    infer = making(run.recipe, generator.infer_everywhere)
    make = grid.makes(run.recipe, infer)

    def report(tag: str) -> Tensor:
        images = sample(generator.network, make, grid.inputs, batch, statistics)
        run.reporter.images(tag, grid.frame(images), grid.columns, nimg)
        return images

    report("samples/live")
    with run.ema.swapped():
        stand_statistics(generator.network, infer, run.standing)
        images = report("samples/ema")
    if grid.reals is not None:
        run.reports.diversity = alarms.diversity(images, grid.columns, grid.reals)


def _measure(
    run: Run, measuring: Measuring, requests: StopRequests, later: bool = False
) -> tuple[bool, UserError | None]:
    """Report metrics of the EMA's samples, unless a rank of G is asked to stop. G's ranks compute, rank 0 writes.

    A collective. ``later`` puts it off until the run resumes.

    Returns:
        Whether the run owes them, as it is asked to stop; and what a metric from outside raised:
        then it owes them too.
    """
    nimg, values, error = run.counters.nimg, None, None

    def stopped() -> bool:
        return comm.any_rank(requests.reason is not None)

    if run.step.generator.is_held and not later:
        try:
            with division.within_part():
                values = measuring(run.step.generator, run.ema, run.standing, nimg, stopped)
        except MetricError as failed:  # on all ranks of G
            error = failed
    if measuring.has_outside:
        error = comm.from_rank_zero(error)
        if error:
            run.reports.owed = True  # other metrics too
            return False, error
    if values is not None:
        run.reports.measured = nimg, values
        run.reporter.measured(nimg, values)
        _log.info("%d images: %s", nimg, values)
    run.reports.owed = comm.any_rank(run.step.generator.is_held and values is None)
    if run.reports.owed:
        _log.info("metrics at %d images follow when the run resumes: asked to stop", nimg)
    return run.reports.owed, None


def _measure_owed(run: Run, requests: StopRequests) -> bool:
    """Measure what a checkpoint owes, and note it there; return whether the run is asked to stop first.

    Raises:
        UserError: A metric from outside failed.
    """
    owed, run.reports.owed = run.reports.owed, False
    if not (run.measuring and owed):
        return False
    stopped, error = _measure(run, run.measuring, requests)
    if error:
        raise error
    if not stopped:
        nimg = run.counters.nimg
        run.saver.amend(nimg, REPORTS, run.reports.numbers(), run.reports.metrics_at(nimg))
    return stopped


def finish_snapshots(run: Run, must: bool) -> None:
    """Wait for snapshots before a checkpoint is saved: a run that resumes from it would not take them again."""
    if not run.snapshots:
        return
    run.rank_log.phase = "EMA snapshot"
    if not run.snapshots.finish() and must:
        raise _not_saved(run.out / SNAPSHOTS, "EMA snapshot")


def save(run: Run, must: bool) -> UserError | None:
    """Start to save a checkpoint; return what a callback raised that was told of it.

    With ``must``, wait until it is complete, unless the state turns out to be lost.

    Raises:
        UserError: It is not complete.
    """
    run.rank_log.phase, nimg = "checkpoint", run.counters.nimg
    description = checkpoint.Description(run.recipe.model_dump(), run.layout, run.reports.metrics_at(nimg))
    waits = must or run.callbacks.has("on_save")
    saved = run.saver.save(nimg, {**run.entries, REPORTS: run.reports}, description)
    complete = saved and (not waits or run.saver.finish())
    if must and not complete and not run.saver.lost:
        raise _not_saved(run.out / "checkpoints", "checkpoint")
    return run.callbacks.tell("on_save", nimg, str(run.saver.path(nimg))) if complete else None


def _not_saved(directory: Path, what: str) -> UserError:
    remedy = "fix what the warnings above name, then run the same command, which resumes from the newest checkpoint"
    return UserError(str(directory), None, f"does not hold the last {what}", remedy)
