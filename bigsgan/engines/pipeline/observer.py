"""Measures one update on ranks that wait for each other: the bubble, and a timeline to view in Perfetto."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bigsgan.engines.phases import Phase, Task
from bigsgan.monitor import NOTICE
from bigsgan.runtime import comm

TRACE_FILE = "pipeline_trace.json"
"""The timeline's file in a run directory."""

TRACED_UPDATE = 3
"""Number of the update that is measured, from 1; those before it are a warm-up."""

_log = logging.getLogger(__name__)


class Span(NamedTuple):
    """When a rank computed a task: seconds on the host's clock since the update began."""

    task: Task
    phase: Phase
    start: float
    end: float


class Observer:
    """Measures one of a run's first updates.

    Attributes:
        is_watching: Whether the update to measure is being computed.
        bubble: The measured bubble, on rank 0.
    """

    def __init__(self, path: Path | None, number: int = TRACED_UPDATE) -> None:
        """Measure update ``number``. With a ``path``, log the bubble and write the timeline there (Chrome trace)."""
        self._path, self._number, self._updates, self._spans = path, number, 0, list[Span]()
        self._origin = 0.0
        self.is_watching = False
        self.bubble: float | None = None

    def begin(self) -> None:
        """Begin an update. Every rank calls this."""
        self._updates += 1
        self.is_watching = self._updates == self._number
        if self.is_watching:
            comm.barrier()  # all clocks start together
            self._origin = time.perf_counter()

    def now(self) -> float:
        """Wait until the device has computed everything so far; return the seconds since the update began.

        Only the current stream is waited for. Messages that are expected ahead travel on other streams; a rank that
        waited for them would keep its neighbours waiting.
        """
        comm.synchronize_stream()
        return time.perf_counter() - self._origin

    def add(self, task: Task, phase: Phase, start: float) -> None:
        """Add a task that has just been computed."""
        self._spans.append(Span(task, phase, start, self.now()))

    def end(self) -> None:
        """End an update; if it was measured, report the bubble and the timeline. Every rank calls this."""
        was_watching, self.is_watching = self.is_watching, False
        by_rank = comm.gather_objects(self._spans) if was_watching else None
        if by_rank is None:
            return
        self.bubble = bubble(by_rank)
        if self._path is None:
            return
        _log.log(NOTICE, "measured bubble of an update: %.1f %% (timeline: %s)", 100 * self.bubble, self._path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"traceEvents": trace_events(by_rank), "displayTimeUnit": "ms"}))
        except OSError as error:  # a run is worth more than its timeline
            _log.warning("the timeline could not be written: %s", error)


def bubble(by_rank: Sequence[Sequence[Span]]) -> float:
    """Return the share of the ranks' time from the first task's start to the last one's end that they spend idle.

    A step waits for the slowest rank; of each step, the shortest time over the ranks counts as computing.
    """
    spans = [span for rank in by_rank for span in rank]
    steps: dict[Task, float] = {}
    for span in spans:
        if span.task.kind == "step":
            steps[span.task] = min(steps.get(span.task, float("inf")), span.end - span.start)
    busy = sum(steps[s.task] if s.task.kind == "step" else s.end - s.start for s in spans)
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    return 1 - busy / (whole * len(by_rank))


def trace_events(by_rank: Sequence[Sequence[Span]]) -> list[dict[str, object]]:
    """Return Chrome's trace events, a row for each rank, in microseconds."""
    events: list[dict[str, object]] = []
    for rank, spans in enumerate(by_rank):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for span in spans:
            events.append(
                {
                    "ph": "X",
                    "name": f"{span.phase.label} {span.task.kind} {span.task.micro_batch}",
                    "cat": span.task.kind,
                    "pid": 0,
                    "tid": rank,
                    "ts": 1e6 * span.start,
                    "dur": 1e6 * (span.end - span.start),
                    "args": {"phase": span.task.phase, "samples": span.phase.num_samples},
                }
            )
    return events
