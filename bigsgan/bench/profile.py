"""`bigsgan bench profile`: where the time of one steady update goes, by phase and by operation, and what of the device
it uses."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from bigsgan import comm
from bigsgan.bench.about import about, describe
from bigsgan.bench.arithmetic import arithmetic_of, speed
from bigsgan.bench.lazy import partly_timed
from bigsgan.bench.measure import Stopwatch
from bigsgan.bench.phases import PhaseClock, label_phases, labelled_collectives
from bigsgan.bench.product import EngineLoop, build_engine_loop
from bigsgan.bench.table import NOTHING, Table, as_json, percent, shown
from bigsgan.bench.train import label
from bigsgan.config import RunPlan
from bigsgan.ending import exit_status
from bigsgan.monitor.sinks import writing

NUM_OPERATIONS = 10
TRACE_FILE = "trace.json"
_LABEL = "bigsgan: "
"""Before a phase's name in the trace, which has an operation of nearly every name."""


class Options(NamedTuple):
    """How to measure and show.

    Attributes:
        out: Directory of the trace.
        warmup: Updates before any clock starts.
        steps: Updates whose phases are timed; as many are timed as a whole.
        json: Print JSON.
        markdown: Print Markdown tables.
    """

    out: Path
    warmup: int
    steps: int
    json: bool
    markdown: bool


def main(plan: RunPlan, options: Options) -> int:
    """Profile, print, and return the exit status. Every rank calls this."""

    def work() -> int:
        with contextlib.redirect_stdout(sys.stderr):  # the results alone go to standard output
            comm.initialize(comm.PATIENCE_HOURS * 3600)
            if comm.rank() == 0:
                with writing(options.out):
                    options.out.mkdir(parents=True, exist_ok=True)
            found = profiled(plan, options)
        if comm.rank() == 0:
            _show(plan, found, options)
        comm.leave()
        return 0

    return exit_status(work)


def profiled(plan: RunPlan, options: Options) -> dict[str, Any]:
    """Time updates as a whole, by phase, and by operation; of this rank. Every rank calls this."""
    loop = build_engine_loop(plan)
    try:
        for _ in range(options.warmup):
            loop()
        comm.barrier()
        watch = Stopwatch()
        for _ in range(options.steps):
            loop()
        seconds = watch.seconds() / options.steps
        phases, operations = _by_phase_and_operation(loop, options)
    finally:
        loop.close()
    return {
        "update_seconds": seconds,
        "images_per_second": plan.recipe.batch / seconds,
        "phases": phases,
        "operations": operations,
        **speed(arithmetic_of(plan, {}), seconds),
        "trace": str(options.out / TRACE_FILE),
    }


def _by_phase_and_operation(loop: EngineLoop, options: Options) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Seconds of an update by phase, with the device waited for at each border; then a trace, without waiting."""
    clock, traces = PhaseClock(), False

    def entering(name: str) -> contextlib.AbstractContextManager[Any]:
        return record_function(_LABEL + name) if traces else clock.phase(name)

    label_phases(loop.run, entering)
    with labelled_collectives(entering):
        clock.restart()
        for _ in range(options.steps):
            loop()
        phases = {name: seconds / options.steps for name, seconds in clock.stop().items()}
        traces = True
        on_gpu = comm.device().type == "cuda"
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
            loop()
            comm.synchronize()
    if comm.rank() == 0:
        with writing(options.out):
            profiler.export_chrome_trace(str(options.out / TRACE_FILE))
    return phases, costliest(profiler.key_averages(), on_gpu)


def costliest(averages: Sequence[Any], on_gpu: bool) -> list[dict[str, Any]]:
    """The operations that take the most time by themselves: of the GPU, or of the host where there is none."""
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for each in averages:
        # An operation of the host has the time of the kernels that it started, which are events of their own as well.
        if each.device_type == DeviceType.CPU and not each.is_user_annotation:
            times[each.key] += each.self_device_time_total if on_gpu else each.self_cpu_time_total
            calls[each.key] += each.count
    total = max(times.total(), 1e-9)
    return [
        {"name": name, "calls": calls[name], "seconds": time / 1e6, "share": time / total}
        for name, time in times.most_common(NUM_OPERATIONS)
    ]


def _show(plan: RunPlan, found: dict[str, Any], options: Options) -> None:
    facts, name = about(), label(plan.recipe)
    if options.json:
        print(as_json({**facts, "recipe": name, **found, "notes": partly_timed(plan.recipe, options.steps)}))
        return
    total = sum(found["phases"].values())
    rows = [[phase, f"{1e3 * s:.2f}", percent(s / total)] for phase, s in found["phases"].items()]
    rows.append(["all, one after the other", f"{1e3 * total:.2f}", NOTHING])
    notes = [f"an update without waiting at the phases' borders: {1e3 * found['update_seconds']:.2f} ms"]
    print(
        shown(Table(f"phases of an update of rank 0: {name}", ("phase", "ms", "share"), rows, notes), options.markdown)
    )
    rows = [
        [each["name"], f"{each['calls']:,}", f"{1e3 * each['seconds']:.2f}", percent(each["share"])]
        for each in found["operations"]
    ]
    reached, peak = found["flops_per_second"] / 1e12, found["matrix_flops_per_second"] / 1e12
    notes = [
        f"{found['flops'] / 1e9:,.1f} GFLOP an update and rank, without penalties: {reached:.3f} TFLOP/s, "
        f"{percent(found['achieved_share'])} of the {peak:.3f} of a matrix product in {found['matrix_precision']}",
        f"timeline: {found['trace']}, for chrome://tracing or Perfetto",
        *partly_timed(plan.recipe, options.steps),
        *describe(facts),
    ]
    heading = ("operation", "calls", "ms", "share")
    print()
    print(shown(Table("operations that take the most time by themselves", heading, rows, notes), options.markdown))
