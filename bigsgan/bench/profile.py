"""`bigsgan bench profile`: a steady update's time by phase and by operation, and its share of the device's peak."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from bigsgan.bench.about import on_all_ranks, print_results
from bigsgan.bench.arithmetic import arithmetic_of, speed
from bigsgan.bench.lazy import partly_timed
from bigsgan.bench.measure import Stopwatch
from bigsgan.bench.phases import PhaseClock, label_phases, labelled_collectives
from bigsgan.bench.product import EngineLoop, build_engine_loop
from bigsgan.bench.table import NOTHING, Table, percent
from bigsgan.bench.train import label
from bigsgan.config import RunPlan
from bigsgan.config.run_directory import TRACE_FILE
from bigsgan.runtime import comm
from bigsgan.runtime.paths import writing

NUM_OPERATIONS = 10
_LABEL = "bigsgan: "
"""Prefix of a phase's name in the trace, where operations may have the same names."""


def main(plan: RunPlan, out: Path, warmup: int, steps: int, form: str | None) -> int:
    """Profile updates, print, and return the exit status. Every rank calls this."""
    return on_all_ranks(lambda: profiled(plan, out, warmup, steps), lambda found: _show(plan, found, steps, form))


def profiled(plan: RunPlan, out: Path, warmup: int, steps: int) -> dict[str, Any]:
    """Time this rank's updates as a whole, by phase, and by operation. Every rank calls this.

    Args:
        plan: A plan without pipeline stages.
        out: Directory of the trace; made if it is missing.
        warmup: Updates before any clock starts.
        steps: Updates that are timed as a whole; as many again are timed by phase.
    """
    if comm.rank() == 0:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(build_engine_loop(plan)) as loop:
        for _ in range(warmup):
            loop()
        comm.barrier()
        watch = Stopwatch()
        for _ in range(steps):
            loop()
        seconds = watch.seconds() / steps
        phases, operations = _by_phase_and_operation(loop, out / TRACE_FILE, steps)
    return {
        "update_seconds": seconds,
        "images_per_second": plan.recipe.batch / seconds,
        "phases": phases,
        "operations": operations,
        **speed(arithmetic_of(plan, {}), seconds),
        "trace": str(out / TRACE_FILE),
    }


def _by_phase_and_operation(loop: EngineLoop, trace: Path, steps: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Seconds of an update by phase, waiting for the device at each border, and operations of a trace without waits."""
    clock, traces = PhaseClock(), False

    def entering(name: str) -> contextlib.AbstractContextManager[Any]:
        return record_function(_LABEL + name) if traces else clock.phase(name)

    label_phases(loop.run, entering)
    with labelled_collectives(entering):
        clock.restart()
        for _ in range(steps):
            loop()
        phases = {name: seconds / steps for name, seconds in clock.stop().items()}
        traces = True
        on_gpu = comm.device().type == "cuda"
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
            loop()
            comm.synchronize()
    if comm.rank() == 0:
        with writing(trace.parent):
            profiler.export_chrome_trace(str(trace))
    return phases, costliest(profiler.key_averages(), on_gpu)


def costliest(averages: Sequence[Any], on_gpu: bool) -> list[dict[str, Any]]:
    """The operations with the most time of their own: on the GPU, or on the host if there is none."""
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for each in averages:
        # An operation of the host includes the time of its kernels, which also are events of their own.
        if each.device_type == DeviceType.CPU and not each.is_user_annotation:
            times[each.key] += each.self_device_time_total if on_gpu else each.self_cpu_time_total
            calls[each.key] += each.count
    total = max(times.total(), 1e-9)
    return [
        {"name": name, "calls": calls[name], "seconds": time / 1e6, "share": time / total}
        for name, time in times.most_common(NUM_OPERATIONS)
    ]


def _show(plan: RunPlan, found: dict[str, Any], steps: int, form: str | None) -> None:
    name, untimed = label(plan.recipe), partly_timed(plan.recipe, steps)
    total = sum(found["phases"].values())
    rows = [[phase, f"{1e3 * s:.2f}", percent(s / total)] for phase, s in found["phases"].items()]
    rows.append(["all, one after the other", f"{1e3 * total:.2f}", NOTHING])
    notes = [f"an update without waiting at the phases' borders: {1e3 * found['update_seconds']:.2f} ms"]
    phases = Table(f"phases of an update of rank 0: {name}", ("phase", "ms", "share"), rows, notes)
    rows = [
        [each["name"], f"{each['calls']:,}", f"{1e3 * each['seconds']:.2f}", percent(each["share"])]
        for each in found["operations"]
    ]
    reached, peak = found["flops_per_second"] / 1e12, found["matrix_flops_per_second"] / 1e12
    notes = [
        f"{found['flops'] / 1e9:,.1f} GFLOP in the mean update of a rank: {reached:.3f} TFLOP/s, "
        f"{percent(found['achieved_share'])} of the {peak:.3f} of a matrix product in {found['matrix_precision']}",
        f"timeline: {found['trace']}, for chrome://tracing or Perfetto",
        *untimed,
    ]
    heading = ("operation", "calls", "ms", "share")
    operations = Table("operations that take the most time by themselves", heading, rows, notes)
    print_results(form, {"recipe": name, **found, "notes": untimed}, phases, operations)
