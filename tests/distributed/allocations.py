"""What torch's allocator on the host gives out while ranks train: the measured side of the planner's tests."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from deepspeed.comm import comm as deepspeed_comm
from torch.profiler import ProfilerActivity, profile, record_function

from tests.distributed import scenarios

GRACE_SECONDS = 0.005


def peaks(overrides: list[str], ds: dict[str, Any], num_updates: int) -> dict[str, int]:
    """Most bytes that this rank's tensors hold in the last of some updates and while it makes samples from the average.

    Beside the run's own, nothing counts: neither what an earlier run left nor the libraries.
    """
    gc.collect()
    with _giving_back(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with record_function("#build"):
            run = scenarios.build(overrides, ds)
        for update in range(num_updates):
            with record_function(f"#update{update}"):
                scenarios.update(run, 1)
        with record_function("#samples"), run.average.swapped():
            run.step.generator.infer_everywhere(run.standing[0])
    found = _by_mark(profiler)
    scenarios.destroy(run)
    before = found["#build"][0]
    return {"update": found[f"#update{num_updates - 1}"][1] - before, "samples": found["#samples"][1] - before}


def _by_mark(profiler: profile) -> dict[str, tuple[int, int]]:
    """Bytes before each mark, and the most inside of it."""
    marks, totals = [], []
    events = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while events:
        event = events.pop()
        events += event.children
        if event.name == "[memory]":
            fields = event.extra_fields
            totals.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
        elif event.name.startswith("#"):
            marks.append((event.name, event.start_time_ns, event.end_time_ns))
    totals.sort()
    found = {}
    for name, start, end in marks:
        inside = [(total, size) for at, total, size in totals if start <= at <= end]
        found[name] = inside[0][0] - inside[0][1], max(total for total, _ in inside)
    return found


@contextmanager
def _giving_back() -> Iterator[None]:
    """Let gloo's threads drop a collective's tensors first: what they free does not count as freed (torch 2.15)."""
    places = [(dist, name) for name in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor")]
    places += [(deepspeed_comm.cdb, name) for name in ("all_gather_function", "reduce_scatter_function")]
    with ExitStack() as stack:
        for place, name in places:
            stack.enter_context(mock.patch.object(place, name, _patient(getattr(place, name))))
        yield


def _patient(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        work = collective(*arguments, **options)
        if work is not None:
            return _Patient(work, (arguments, options))
        time.sleep(GRACE_SECONDS)
        return None

    return call


class _Patient:
    """A collective under way, whose tensors are held here until gloo has let them go."""

    def __init__(self, work: Any, tensors: Any) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        self._work.wait()
        self._work = None
        time.sleep(GRACE_SECONDS)
        self._tensors = None

    def is_completed(self) -> bool:
        return bool(self._work is None or self._work.is_completed())
