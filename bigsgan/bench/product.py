"""Builds a run as `bigsgan train` does, for benchmarks and the doctor, which make its updates one by one."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from dataclasses import replace
from pathlib import Path

from bigsgan.checkpoint import Checkpoint
from bigsgan.config import RunPlan
from bigsgan.engines.pipeline.observer import Observer
from bigsgan.monitor import RankLog
from bigsgan.runtime import comm
from bigsgan.training.build import build_run
from bigsgan.training.loop import Run
from bigsgan.training.schedules import scheduled
from bigsgan.training.start import Start

_log = logging.getLogger(__name__)


class EngineLoop:
    """Callable that makes one update as the training loop does, without its reports.

    Attributes:
        run: The run with its two engines.
    """

    def __init__(self, run: Run, directory: tempfile.TemporaryDirectory[str]) -> None:
        self.run, self._directory = run, directory
        executor = run.step.executor
        self._has_spans, executor.observer = executor.observer is not None, None  # else it would observe timed updates

    @property
    def waited_seconds(self) -> float:
        """Seconds that it has waited for images so far."""
        return self.run.reals.waited_seconds

    def __call__(self) -> None:
        """Make one update of the networks and of the EMA."""
        run, counters = self.run, self.run.counters
        run.step(counters.update, scheduled(run.recipe, counters.nimg))
        run.count_update()

    def means(self) -> dict[str, float]:
        """Means of losses and other statistics since the last call, over all ranks, which all call this."""
        return self.run.statistics.reduce(comm.sum_over_ranks)

    def idle(self) -> float | None:
        """Share of one more update in which ranks wait for each other, on rank 0; None if networks take turns."""
        if not self._has_spans:
            return None
        executor = self.run.step.executor
        executor.observer = observer = Observer(None, 1)
        self()
        executor.observer = None
        return observer.bubble

    def close(self) -> None:
        """Release engines, files and loading processes."""
        run = self.run
        run.close()
        run.step.executor.destroy()
        self._directory.cleanup()


def build_engine_loop(plan: RunPlan, found: Checkpoint | None = None) -> EngineLoop:
    """Build a run, new or from a checkpoint, in a directory that ``close`` removes. Every rank calls this.

    The recipe's ``monitor`` is left out: otherwise variants would become runs of Weights & Biases. So is the profile of
    a DeepSpeed file's ``flops_profiler``, which belongs into `out`.

    Raises:
        UserError: The data or this machine do not fit the plan.
    """
    directory = tempfile.TemporaryDirectory(prefix="bigsgan-bench-")
    out = Path(directory.name)
    log = RankLog(out / "log", comm.rank(), lambda text: None)
    if comm.rank() == 0 and any(engine.file.profiles for engine in plan.engines.values()):
        _log.warning("flops_profiler is left out here; a run writes its profiles")
    engines = dict(plan.engines)
    for network, engine in plan.engines.items():
        content = {key: value for key, value in engine.file.content.items() if key != "flops_profiler"}
        engines[network] = replace(engine, file=replace(engine.file, content=content))
    silent = replace(plan, recipe=plan.recipe.model_copy(update={"monitor": []}), engines=engines)
    with contextlib.redirect_stderr(io.StringIO()):  # hides the run's progress
        return EngineLoop(build_run(silent, out, Start(found), log), directory)
