"""Times updates of variants in turns: in each round, each variant is built, warmed up, timed and destroyed.

So a variant's peak memory is its own, and slow changes of the machine affect all variants alike. A ratio compares a
variant with the first one within a round. The first one is measured twice in each round, the second time as a control.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bigsgan.bench.host import HostPeak, return_unused
from bigsgan.bench.plain import PlainLoop
from bigsgan.bench.product import EngineLoop
from bigsgan.engines.deepspeed.leftovers import leaving_nothing
from bigsgan.errors import UserError
from bigsgan.runtime import comm, memory

_NCCL, _GLOO = "nccl", "gloo:"
"""A part of the names of NCCL's kernels (ncclDevKernel_AllReduce ...), and the prefix of gloo's collectives."""

_MESSAGES = ("gloo:send", "gloo:recv")
"""From one rank to another, which are expected long before they come."""

_REPEATS = 5

Loop = EngineLoop | PlainLoop
"""A callable that makes one update, to be measured."""

Builder = Callable[[], Loop | None]
"""Builds a loop, or returns None on a rank that takes no part in it."""

Setting = Callable[[], AbstractContextManager[None]]
"""Makes the context in which a loop is built and run, such as the precision of float32."""


class Settings(NamedTuple):
    """How much is measured."""

    rounds: int  # in each of which every variant takes its turn
    warmup: int  # updates before the clock starts, at least one
    steps: int  # updates that are timed as one block
    looks_at_talk: bool = False  # whether `talking` is measured also on CPUs, in one more update under the profiler


class Visit(NamedTuple):
    """Measurements of one block on one rank; memory in bytes, times in seconds for an update."""

    seconds: float  # by the device's clock
    data_seconds: float  # time that the rank waited for images
    busy: float  # share of the time in which the device computed, or the threads of a CPU
    device_peak: int | None  # peak memory of the device; None on a CPU
    host_peak: int  # peak memory of the process
    host_before: int  # memory of the process before the variant was built
    first_losses: dict[str, float]  # mean losses of the first update
    losses: dict[str, float]  # mean losses of the timed updates
    # Share of the time in which ranks communicated, or waited for each other to, and nothing computed on a GPU
    # meanwhile; on CPUs the share of collectives alone.
    talking: float = 0.0
    idle: float | None = None  # share of an update in which the ranks waited for each other, on rank 0, if it is known


class Stopwatch:
    """Times work on this rank's device: by its own events on a GPU, else by the clock."""

    def __init__(self) -> None:
        self._events = None
        if comm.device().type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        comm.synchronize()
        self._start = time.perf_counter()
        if self._events is not None:
            self._events[0].record()

    def seconds(self) -> float:
        """Wait for the work and return how long it took."""
        if self._events is None:
            comm.synchronize()
            return time.perf_counter() - self._start
        self._events[1].record()
        comm.synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1000


def fastest(operation: Callable[[], Any]) -> float:
    """Seconds of the fastest of a few calls, after one that is not timed."""
    found = []
    for _ in range(1 + _REPEATS):
        watch = Stopwatch()
        operation()
        found.append(watch.seconds())
    return min(found[1:])


def start_profiler() -> None:
    """Start torch's profiler of a GPU once, before anything is timed: its first start takes long."""
    if comm.device().type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]):  # no kernel runs meanwhile
            pass


def take_turns(
    builders: Sequence[tuple[Builder, Setting]], settings: Settings, announce: Callable[[int, int, float | None], None]
) -> tuple[list[list[list[Visit]]], dict[int, str]]:
    """Measure loops round by round, forwards and backwards in turn. Every rank calls this.

    ``announce`` is called before each visit with the numbers of its round and its loop, and on rank 0 again after it,
    with the seconds of an update.

    Returns:
        On rank 0, by loop and round, the visits of the ranks that took part; and why loops failed.

    Raises:
        UserError: A loop failed on one of several ranks, for which the others are waiting.
    """
    start_profiler()
    found: list[list[list[Visit]]] = [[] for _ in builders]
    failed: dict[int, str] = {}
    for turn in range(settings.rounds):
        order = range(len(builders)) if turn % 2 == 0 else reversed(range(len(builders)))
        for i in order:
            if i in failed:
                continue
            announce(turn, i, None)
            try:
                gathered = comm.gather_objects(visit(*builders[i], settings))
            except UserError as error:
                if comm.world_size() > 1:
                    raise
                failed[i] = str(error)
            else:
                found[i].append([visit for visit in gathered or () if visit is not None])
                if found[i][-1]:
                    announce(turn, i, max(visit.seconds for visit in found[i][-1]))
    return found, failed


def visit(build: Builder, setting: Setting, settings: Settings) -> Visit | None:
    """Build a loop, warm it up, time a block, and destroy it; None on a rank that takes no part. All ranks call this.

    Raises:
        UserError: The loop cannot be built, or memory runs out.
    """
    remedy = "choose others, or a smaller batch"
    with leaving_nothing(), memory.naming_remedy("while a variant is measured", remedy), setting():
        return_unused()
        comm.forget_peak_memory()
        comm.barrier()  # no rank measures while others still clean up
        with closing(HostPeak()) as host:
            loop = build()
            if loop is None:
                return None
            with closing(loop):
                return _timed(loop, settings, host)


def _timed(loop: Loop, settings: Settings, host: HostPeak) -> Visit:
    """Warm up, and time one block."""
    loop()
    first = loop.means()
    for _ in range(settings.warmup - 1):
        loop()
    loop.means()
    comm.synchronize()
    waited, used, start = loop.waited_seconds, time.process_time(), time.perf_counter()
    watch = Stopwatch()
    for _ in range(settings.steps):
        loop()
    seconds = watch.seconds()
    wall, used = time.perf_counter() - start, time.process_time() - used
    on_cpu = comm.device().type == "cpu"
    data_seconds, losses = loop.waited_seconds - waited, loop.means()
    device_peak, host_peak = None if on_cpu else comm.peak_memory_bytes(), host.peak()  # before the profiler's memory
    cores = used / (wall * torch.get_num_threads())
    if on_cpu:
        busy, talking = cores, _talk_of_cpus(loop) if settings.looks_at_talk and comm.world_size() > 1 else 0.0
    else:
        busy, talking = _profiled_shares(loop)
    return Visit(
        seconds=seconds / settings.steps,
        data_seconds=data_seconds / settings.steps,
        busy=busy,
        device_peak=device_peak,
        host_peak=host_peak,
        host_before=host.before,
        first_losses=first,
        losses=losses,
        talking=talking,
        idle=loop.idle(),
    )


def _profiled_shares(loop: Loop) -> tuple[float, float]:
    """Shares of one more update in which the GPU ran any kernel, and in which it ran only NCCL's.

    NCCL's kernels run while they wait for other ranks.
    """
    events, wall = _profiled(loop, ProfilerActivity.CUDA)
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    computing = [span for span, event in zip(spans, kernels, strict=True) if _NCCL not in event.name.lower()]
    return covered(spans) / wall, (covered(spans) - covered(computing)) / wall


def _talk_of_cpus(loop: Loop) -> float:
    """Share of one more update in which a collective of gloo was running; CPUs compute during few of them.

    They do compute during messages to single ranks, whose cost ``Visit.idle`` tells.
    """
    events, wall = _profiled(loop, ProfilerActivity.CPU)
    talk = [event for event in events if event.name.startswith(_GLOO) and event.name not in _MESSAGES]
    return min(1.0, covered((event.time_range.start, event.time_range.end) for event in talk) / wall)


def _profiled(loop: Loop, activity: ProfilerActivity) -> tuple[list[Any], float]:
    """Events of one more update, and its time in microseconds, the events' unit."""
    with profile(activities=[activity]) as running:
        comm.synchronize()
        start = time.perf_counter()  # after the profiler has started
        loop()
        comm.synchronize()
        wall = time.perf_counter() - start
    return list(running.events() or ()), wall * 1e6


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
