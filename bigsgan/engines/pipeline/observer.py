"""Measures one update on ranks that wait for each other: the bubble, and a timeline that Perfetto shows."""

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
"""Of a run directory."""

TRACED_UPDATE = 3
"""The first updates warm up."""

_log = logging.getLogger(__name__)


class Span(NamedTuple):
    """A task as a rank computed it: seconds on the host's clock, since the update began."""

    task: Task
    phase: Phase
    start: float
    end: float


class Observer:
    """Measures one of a run's first updates.

    Attributes:
        is_watching: Whether it is that one which is computed.
        bubble: What was measured, on rank 0.
    """

    def __init__(self, path: Path | None, number: int = TRACED_UPDATE) -> None:
        """Measure later, in update ``number``; the timeline goes to ``path``, as a Chrome trace, and is told of."""
        self._path, self._number, self._updates, self._spans = path, number, 0, list[Span]()
        self._origin = 0.0
        self.is_watching = False
        self.bubble: float | None = None

    def begin(self) -> None:
        """An update is about to be computed. Every rank calls this."""
        self._updates += 1
        self.is_watching = self._updates == self._number
        if self.is_watching:
            comm.barrier()  # all clocks start together
            self._origin = time.perf_counter()

    def now(self) -> float:
        """Seconds since the update began, once the device has computed all that it was given.

        Its stream alone is waited for: messages that are expected ahead are under way on others, and a rank that waited
        for those would keep its neighbours waiting for it.
        """
        comm.synchronize_stream()
        return time.perf_counter() - self._origin

    def add(self, task: Task, phase: Phase, start: float) -> None:
        """Take note of a task that has just been computed."""
        self._spans.append(Span(task, phase, start, self.now()))

    def end(self) -> None:
        """The update is complete: report bubble and timeline, if it was the one. Every rank calls this."""
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
    """Share of the ranks' time between the first task's start and the last one's end in which they compute nothing.

    A step waits for the slowest rank; what the quickest wait took counts as computing.
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
    """Chrome's trace events, a row for each rank; microseconds."""
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
