"""Updates of variants, timed in turns: each is built, warmed up, timed and destroyed, round by round.

So a variant's peak of memory is its own, and slow changes of the machine affect all variants alike. A ratio compares a
variant with the first one within a round. The first one is measured twice in each round, the second time as a control.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bigsgan.bench.host import HostPeak, disk_wait_seconds, return_unused
from bigsgan.engines.deepspeed.leftovers import leaving_nothing
from bigsgan.errors import UserError
from bigsgan.runtime import comm, memory

_NCCL, _GLOO = "nccl", "gloo:"
"""In the names of NCCL's kernels (ncclDevKernel_AllReduce ...), and before those of gloo's collectives."""

_MESSAGES = ("gloo:send", "gloo:recv")
"""From one rank to another, which are expected long before they come."""

Builder = Callable[[], "Loop | None"]
"""Makes a loop, or gives None on a rank that takes no part in it."""

Setting = Callable[[], AbstractContextManager[None]]
"""Makes what holds while a loop is built and run, such as how float32 is computed."""


class Loop(Protocol):
    """What is measured: a callable that makes one update."""

    @property
    def waited_seconds(self) -> float:
        """How long it has waited for images so far."""

    def __call__(self) -> None:
        """Make one update."""

    def means(self) -> dict[str, float]:
        """Means of losses and the like since the last call, over the ranks that take part. They all call this."""

    def idle(self) -> float | None:
        """Make one more update; the share of it in which ranks wait for each other, on rank 0, where that is known."""

    def close(self) -> None:
        """Release all it holds."""


class Settings(NamedTuple):
    """How much is measured.

    Attributes:
        rounds: In each of which every variant takes its turn.
        warmup: Updates before the clock starts, at least one.
        steps: Updates that are timed, as one block.
        looks_at_talk: Whether ``talking`` is measured on CPUs too, in one more update under the profiler.
    """

    rounds: int
    warmup: int
    steps: int
    looks_at_talk: bool = False


class Visit(NamedTuple):
    """What one block has shown on one rank; memory in bytes, times in seconds for an update.

    Attributes:
        seconds: Of the device's clock.
        data_seconds: In which the rank waited for images.
        disk_seconds: In which its processes waited for a disk; None where the kernel does not count it.
        busy: Share of the time in which the device computed, or the threads of a CPU.
        device_peak: None on a CPU.
        host_peak: Of the process.
        host_before: Of the process, before the variant was built.
        first_losses: Means of the first update.
        losses: Means of the timed updates.
        talking: Share of the time in which ranks exchanged numbers, or waited for each other to, and nothing computed
            on a GPU meanwhile; on CPUs that of collectives alone.
        idle: Share of an update in which the ranks waited for each other, on rank 0; None where it is not known.
    """

    seconds: float
    data_seconds: float
    disk_seconds: float | None
    busy: float
    device_peak: int | None
    host_peak: int
    host_before: int
    first_losses: dict[str, float]
    losses: dict[str, float]
    talking: float = 0.0
    idle: float | None = None


class Shares(NamedTuple):
    """Of the time of one update: with a kernel, and with none but those of communication."""

    busy: float
    talking: float


class Stopwatch:
    """Time that work takes on this rank's device: by its own events on a GPU, else by the clock."""

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


def take_turns(
    builders: Sequence[tuple[Builder, Setting]], settings: Settings, told: Callable[[int, int], None]
) -> tuple[list[list[list[Visit]]], dict[int, str]]:
    """Measure loops round by round, forwards and backwards in turn. Every rank calls this.

    ``told`` is called with the numbers of the round and of the loop before each of them.

    Returns:
        By loop and round, the visits of the ranks that took part, on rank 0; and why loops broke off.

    Raises:
        UserError: A loop broke off on one of several ranks, which the others are waiting for.
    """
    if comm.device().type == "cuda":
        with _kernel_profile():  # its first start takes long, in which no kernel runs
            pass
    found: list[list[list[Visit]]] = [[] for _ in builders]
    failed: dict[int, str] = {}
    for turn in range(settings.rounds):
        order = range(len(builders)) if turn % 2 == 0 else reversed(range(len(builders)))
        for i in order:
            if i in failed:
                continue
            told(turn, i)
            try:
                gathered = comm.gather_objects(visit(*builders[i], settings))
            except UserError as error:
                if comm.world_size() > 1:
                    raise
                failed[i] = str(error)
            else:
                found[i].append([visit for visit in gathered or () if visit is not None])
    return found, failed


def visit(build: Builder, setting: Setting, settings: Settings) -> Visit | None:
    """Build a loop, warm it up, time a block, and destroy it; None on a rank that takes no part. All ranks call this.

    Raises:
        UserError: It cannot be built, or memory runs out.
    """
    remedy = "choose others, or a smaller batch"
    with leaving_nothing(), memory.naming_remedy("while a variant was measured", remedy), setting():
        return_unused()
        comm.forget_peak_memory()
        comm.barrier()  # nobody measures while others still tidy up
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
    waited, disk, used, start = loop.waited_seconds, disk_wait_seconds(), time.process_time(), time.perf_counter()
    watch = Stopwatch()
    for _ in range(settings.steps):
        loop()
    seconds = watch.seconds()
    wall, used = time.perf_counter() - start, time.process_time() - used
    disk_after, on_cpu = disk_wait_seconds(), comm.device().type == "cpu"
    data_seconds, losses = loop.waited_seconds - waited, loop.means()
    device_peak, host_peak = None if on_cpu else comm.peak_memory_bytes(), host.peak()  # without the profiler's
    cores = used / (wall * torch.get_num_threads())
    if on_cpu:
        shares = Shares(cores, _talk_of_cpus(loop) if settings.looks_at_talk and comm.world_size() > 1 else 0.0)
    else:
        shares = _profiled_shares(loop)
    return Visit(
        seconds=seconds / settings.steps,
        data_seconds=data_seconds / settings.steps,
        disk_seconds=None if disk is None or disk_after is None else (disk_after - disk) / settings.steps,
        busy=shares.busy,
        device_peak=device_peak,
        host_peak=host_peak,
        host_before=host.before,
        first_losses=first,
        losses=losses,
        talking=shares.talking,
        idle=loop.idle(),
    )


def _profiled_shares(loop: Loop) -> Shares:
    """Of one more update: the time in which the GPU had a kernel to run, and that in which all of these were NCCL's.

    NCCL's kernels run while they wait for other ranks.
    """
    events, wall = _profiled(loop, _kernel_profile())
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    computing = [span for span, event in zip(spans, kernels, strict=True) if _NCCL not in event.name.lower()]
    return Shares(covered(spans) / wall, (covered(spans) - covered(computing)) / wall)


def _talk_of_cpus(loop: Loop) -> float:
    """Share of one more update in which a collective of gloo was under way; CPUs compute beside few of them.

    They do compute beside messages to single ranks: ``Visit.idle`` tells what these cost.
    """
    events, wall = _profiled(loop, profile(activities=[ProfilerActivity.CPU]))
    talk = [event for event in events if event.name.startswith(_GLOO) and event.name not in _MESSAGES]
    return min(1.0, covered((event.time_range.start, event.time_range.end) for event in talk) / wall)


def _profiled(loop: Loop, profiler: profile) -> tuple[list[Any], float]:
    """Events of one more update, and its time in their unit, us."""
    with profiler as running:
        comm.synchronize()
        start = time.perf_counter()  # not before the profiler has started
        loop()
        comm.synchronize()
        wall = time.perf_counter() - start
    return list(running.events() or ()), wall * 1e6


def _kernel_profile() -> profile:
    return profile(activities=[ProfilerActivity.CUDA])


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
