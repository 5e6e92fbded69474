"""Networks with ranks of their own: how long they wait and what they hold, against the planner.

    python -m tests.benchmarks.split [--schedules exact,overlapped] [--unit MILLISECONDS] [--quick] [--memory]

Eight ranks on fewer cores cannot compute side by side. Therefore they sleep, as in tests.benchmarks.pipeline: a run of
the tiny recipe, whose computing is real, but each task ends, and sends what it sends, at the earliest when its planned
time is over. A sample takes a forward pass of either network one unit / 15, a backward pass two, and one where the
layers are frozen. What is expected is the planner's simulation of the same update (bigsgan/planner/sides.py). With
``--memory`` the peak of a rank, from torch's allocator, stands beside the planner's prediction instead. The output is
Markdown.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import deepspeed
import torch

from bigsgan.planner import sides
from bigsgan.planner.activations import Traces
from bigsgan.planner.balance import one_of_each
from bigsgan.planner.memory import predict_each
from tests.benchmarks.pipeline import (
    KINDS,
    NETWORKS,
    Recorder,
    fresh_ranks,
    head,
    load,
    percent,
    planned,
    row,
    seconds,
)
from tests.distributed import allocations, scenarios
from tests.distributed.test_planner import BIGGAN
from tests.tiny import both, tiny_plan, tiny_recipe

DS = both(0)
SAMPLES = 15
"""Of a micro-batch on one of 4 ranks."""

MICRO_BATCHES = 2
DIVISIONS = ((1, 1), (4, 4), (3, 5))
LAYOUTS = {
    "all ranks hold both, ZeRO 0": ((1, 1), False, 0),
    "1 + 1, ZeRO 0": ((1, 1), True, 0),
    "1 + 1, ZeRO 2": ((1, 1), True, 2),
    "1 + 2, ZeRO 0": ((1, 2), True, 0),
    "1 + 2, ZeRO 2": ((1, 2), True, 2),
}
"""Ranks of G and of D, whether these are their own, and the ZeRO stage."""


def lasting(phase, kind, seconds_a_sample):
    """Seconds that a task is to take; to keep images for later takes none."""
    return 0.0 if not phase.computes else planned(phase, kind, seconds_a_sample)


def sleep_through(engine, seconds_a_sample):
    """Make each task of an engine take its planned time."""

    def taking_time(kind, compute):
        def slowly(work, *arguments):
            end = time.perf_counter() + lasting(work.phase, kind, seconds_a_sample)
            compute(work, *arguments)
            time.sleep(max(0.0, end - time.perf_counter()))

        return slowly

    for kind in KINDS:
        setattr(engine, kind, taking_time(kind, getattr(engine, kind)))


def asleep(options, unit, num_updates):
    """Spans of updates that sleep; runs on every rank."""
    run = scenarios.build(options, DS)
    for network in NETWORKS:
        sleep_through(getattr(run.step, network), unit / SAMPLES)
    scenarios.update(run, 1)
    recorder = Recorder()
    run.step.executor.observer = recorder
    found = [recorder.update(run) for _ in range(num_updates)]
    scenarios.destroy(run)
    return found


def idle(by_rank):
    """Share of the ranks' time from the first task's start to the last one's end in which they compute nothing.

    What a step takes is not computing here: it sleeps for no time, and else waits for the slowest rank.
    """
    busy = sum(s.end - s.start for spans in by_rank for s in spans if s.task.kind != "step")
    return 1 - busy / (len(by_rank) * seconds(by_rank))


def overrun(by_rank, unit):
    """By how much the tasks took longer than planned, as a share."""
    spans = [span for rank in by_rank for span in rank if span.task.kind != "step"]
    return sum(s.end - s.start for s in spans) / sum(lasting(s.phase, s.task.kind, unit / SAMPLES) for s in spans) - 1


def options_of(division, d_steps, schedule):
    """Of a run; the micro-batches of one of 4 ranks, or of one alone, are the same."""
    replicas = 4 if sum(division) > 2 else 1
    ranks = [f"engines.{network}.ranks={num}" for network, num in zip(NETWORKS, division, strict=True)]
    batch = [f"batch={SAMPLES * replicas * MICRO_BATCHES}", f"accumulation={MICRO_BATCHES}"]
    steps = [f"objective.d_steps={d_steps}"]
    return [*ranks, *batch, *steps, *([f"objective.schedule={schedule}"] if schedule != "exact" else [])]


def expected(division, options, unit):
    """What the planner expects where both networks take the same time for a sample."""
    with tempfile.TemporaryDirectory() as directory:
        counted = sides.count_update(one_of_each(tiny_recipe(Path(directory), *options), None))
    stages = {network: [sides.StageWork(1.0, 1.0)] for network in NETWORKS}
    work = sides.UpdateWork(counted.plan, stages, counted.kinds)
    found = sides.time_update(work, dict(zip(NETWORKS, division, strict=True)))
    return found._replace(seconds=found.seconds * unit / SAMPLES)


def measure_waiting(schedules, unit, num_updates):
    """Print the table of times and idle shares."""
    print(f"\nRanks asleep, unit {1e3 * unit:g} ms, {MICRO_BATCHES} micro-batches, median of {num_updates} updates:\n")
    head("ranks", "D steps", "schedule", "expected, ms", "measured, ms", "idle: expected", "idle: measured (range)")
    overruns = []
    for division in DIVISIONS:
        with fresh_ranks(sum(division)) as pool:
            for d_steps in (1, 2):
                for schedule in schedules:
                    options = options_of(division, d_steps, schedule)
                    timing = expected(division, options, unit)
                    updates = [*zip(*pool.run(asleep, options, unit, num_updates), strict=True)]
                    shares = sorted(map(idle, updates))
                    took = statistics.median(map(seconds, updates))
                    overruns += [overrun(by_rank, unit) for by_rank in updates]
                    row(
                        " + ".join(map(str, division)), d_steps, schedule, f"{1e3 * timing.seconds:.0f}",
                        f"{1e3 * took:.0f}", percent(timing.idle),
                        f"{percent(statistics.median(shares))} ({100 * shares[0]:.1f} to {100 * shares[-1]:.1f})",
                    )  # fmt: skip
    low, half, high = (percent(value) for value in statistics.quantiles(overruns, n=4))
    print(f"\nForward and backward tasks took {half} longer than planned (quartiles {low} to {high}).")


def measure_memory():
    """Print the table of peaks."""
    print("\nPeak of the fullest rank in the fifth update, torch's allocations, MB:\n")
    head("layout", "predicted", "measured", "ratio")
    for name, ((g, d), is_split, stage) in LAYOUTS.items():
        options = [*BIGGAN, "batch=32", *([f"engines.generator.ranks={g}"] if is_split else [])]
        options = [*dict.fromkeys(options)]
        with fresh_ranks(g + d) as pool:
            measured = max(found["update"] for found in pool.run(allocations.peaks, options, both(stage), 5))
        with tempfile.TemporaryDirectory() as directory:
            predictions = predict_each(tiny_plan(Path(directory), g + d, options, both(stage)), Traces())
        peak = max(each.updating + sum(each.host.values()) for each in predictions)
        row(name, f"{peak / 1e6:.1f}", f"{measured / 1e6:.1f}", f"{peak / measured:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", default="exact", help="objective.schedule, such as exact,overlapped")
    parser.add_argument("--unit", type=float, default=150.0, help="milliseconds of a forward pass of 15 images")
    parser.add_argument("--quick", action="store_true", help="one update of each")
    parser.add_argument("--memory", action="store_true", help="peaks of ranks that do not sleep, instead")
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, torch {torch.__version__}, deepspeed {deepspeed.__version__}, {load()}")
    if options.memory:
        measure_memory()
    else:
        measure_waiting(options.schedules.split(","), options.unit / 1e3, 1 if options.quick else 5)
    print(f"\nAt the end: {load()}")


if __name__ == "__main__":
    main()
