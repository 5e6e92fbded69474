"""What pipelines wait, send and hold: the bubble against the formula, bytes between stages, peak memory of each.

    python -m tests.benchmarks.pipeline [--trace FILE] [--unit MILLISECONDS] [--quick] [--r1]

A machine with fewer cores than stages cannot compute them side by side. Therefore the bubble is measured with stages
that sleep: a run of the tiny recipe, whose computing is real, but each task ends, and sends what it sends, at the
earliest when its planned time is over. A micro-batch takes a stage of G one unit forward and two units backward, and
half of the latter where the layers are frozen; the discriminator's own update sees twice the samples. Bytes and memory
are those of a larger recipe that does not sleep. With ``--r1`` D carries exact R1 in every update, and the bubble alone
is measured. The output is Markdown. Linux only.
"""

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import deepspeed
import torch

from bigsgan.config import both_engines
from bigsgan.engines.pipeline import schedule
from bigsgan.engines.pipeline.layout import usual_phases
from bigsgan.engines.pipeline.observer import Observer, bubble, trace_events
from bigsgan.engines.pipeline.schedule import Cost
from bigsgan.runtime import comm
from bigsgan.runtime.memory import resident_bytes
from tests.distributed import scenarios
from tests.distributed.pool import RankPool
from tests.tiny import tiny_plan, zero

NETWORKS = ("generator", "discriminator")
DS = {network: zero(0) for network in NETWORKS}
SCHEDULES = {"phases": schedule.one_after_the_other, "joint": schedule.plan}
KINDS = ("forward", "backward", "step")
SIZE = 2
"""Samples of a micro-batch of the tiny recipe."""

MICRO_BATCHES = 8
"""In an update of the larger recipe."""

LARGER = [
    "data.kind=synthetic", "data.resolution=64", "data.image_channels=3", "generator.channels=16",
    "discriminator.channels=16", "generator.latent_size=20", "batch=32", f"accumulation={MICRO_BATCHES}",
]  # fmt: skip
"""BigGAN for 64 x 64 at a sixth of the paper's width; micro-batches of 4."""


VARIANTS = {
    "default": [],
    "generator_phase: recompute": ["pipeline.generator_phase=recompute"],
    "schedule: phases": ["pipeline.schedule=phases"],
    "partition: profile": both_engines("partition=profile"),
}
"""Of the larger recipe, by what differs."""


class Recorder(Observer):
    """Keeps the spans of every update, on the clock that all processes of a machine share."""

    def __init__(self):
        super().__init__(Path())
        self.is_watching, self.phases = True, []

    def begin(self):
        pass

    def now(self):
        comm.synchronize_stream()
        return time.perf_counter()

    def end(self):
        pass

    def update(self, run):
        """Make an update and return its spans."""
        self._spans = []
        comm.barrier()
        scenarios.update(run, 1)
        self.phases = [phase for _, phase in sorted({span.task.phase: span.phase for span in self._spans}.items())]
        return self._spans


def planned(phase, kind, seconds_a_sample):
    """Seconds that a task of a kind is to take."""
    cost = {"forward": 1, "backward": 1 if phase.frozen else 2, "step": 0}[kind]
    return seconds_a_sample * cost * phase.samples_of_work


class Sleeper:
    """Makes each task of an engine take its planned time; none of the engine's messages leaves earlier."""

    def __init__(self, engine, seconds_a_sample):
        self._seconds, self._end = seconds_a_sample, 0.0
        for kind in KINDS:
            setattr(engine, kind, self._taking_time(kind, getattr(engine, kind)))
        for channel in (engine._to_next, engine._to_previous):
            channel.send = self._after_sleeping(channel.send)

    def _taking_time(self, kind, compute):
        def slowly(work, *arguments):
            self._end = time.perf_counter() + planned(work.phase, kind, self._seconds)
            compute(work, *arguments)
            self.sleep()

        return slowly

    def sleep(self):
        time.sleep(max(0.0, self._end - time.perf_counter()))

    def _after_sleeping(self, send):
        def later(tensors):
            self.sleep()
            send(tensors)

        return later


def observe(run):
    """Watch the programs of a run, after an update that warms it up."""
    scenarios.update(run, 1)
    recorder = Recorder()
    run.step.executor.observer = recorder
    return recorder


def asleep(options, unit, num_updates):
    """Spans of updates with sleeping stages; runs on every rank."""
    run = scenarios.build(options, DS)
    for network in NETWORKS:
        Sleeper(getattr(run.step, network), unit / SIZE)
    recorder = observe(run)
    found = [recorder.update(run) for _ in range(num_updates)]
    scenarios.destroy(run)
    return found


def awake(options, num_updates):
    """Spans of updates that compute, and bytes sent in one; runs on every rank."""
    run = scenarios.build(options, DS)
    recorder = observe(run)
    before = {name: channel.bytes_sent for name, channel in channels(run)}
    found = [recorder.update(run) for _ in range(num_updates)]
    sent = {name: (channel.bytes_sent - before[name]) / num_updates for name, channel in channels(run)}
    sizes = {name: crossing(run, recorder.phases, *name) for name in sent}
    scenarios.destroy(run)
    return found, sent, sizes


def memory(options):
    """Bytes that this rank holds after an update, and at most in the next; its layers and their parameters."""
    gc.collect()
    trim()
    before = resident_bytes()
    run = scenarios.build(options, DS)
    scenarios.update(run, 1)
    trim()
    held = resident_bytes() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from zero
    scenarios.update(run, 1)
    peak = resident_bytes(peak=True) - before
    engines = [getattr(run.step, network) for network in NETWORKS]
    layers = [
        "all" if e.division is None else f"{e.division[e._stage]} - {e.division[e._stage + 1] - 1}" for e in engines
    ]
    numel = sum(parameter.numel() for engine in engines for parameter in engine.network.parameters())
    scenarios.destroy(run)
    return held, peak, layers, numel


def trim():
    """Give the system back what is free, so that it does not count as held."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def channels(run):
    """Those that this rank sends on, by network, stage and direction."""
    for network in NETWORKS:
        engine = getattr(run.step, network)
        if not engine._is_last:
            yield (network, engine._stage, "forward"), engine._to_next
        if not engine._is_first:
            yield (network, engine._stage, "backward"), engine._to_previous


def crossing(run, phases, network, stage, direction):
    """Samples that cross a boundary with a micro-batch of an update; bytes of one there, and of its largest tensor."""
    engine = getattr(run.step, network)
    passed = [phase.num_samples for phase in phases if phase.network == network and getattr(phase, direction)]
    carry = engine._boundaries.at(stage + (direction == "forward"), SIZE)
    sizes = [spec.num_bytes // SIZE for spec in carry if direction == "forward" or spec.dtype.is_floating_point]
    return sum(passed), sum(sizes), max(sizes)


@contextlib.contextmanager
def fresh_ranks(num):
    """A pool of its own: what a run leaves behind, groups whose threads wake a hundred times a second, costs time."""
    pool = RankPool(num)
    try:
        yield pool
    finally:
        pool.stop()


def stages(num):
    return both_engines(f"pipeline_stages={num}")


def sleeping_options(num_stages, num_micro_batches, name):
    batch = [f"batch={SIZE * num_micro_batches}", f"accumulation={num_micro_batches}"]
    return [*stages(num_stages), *batch, f"pipeline.schedule={name}"]


def expected_bubble(num_stages, options, name):
    """What the planner expects of an update with equal stages."""
    with tempfile.TemporaryDirectory() as directory:
        plan = tiny_plan(Path(directory), num_stages, options, DS)
    costs = {network: [Cost(1.0, 2.0)] * num_stages for network in NETWORKS}
    return SCHEDULES[name](usual_phases(plan), num_stages, costs).bubble


def seconds(by_rank):
    """From the first task's start to the last one's end."""
    spans = [span for rank in by_rank for span in rank]
    return max(span.end for span in spans) - min(span.start for span in spans)


def percent(value):
    return f"{100 * value:.1f} %"


def row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def head(*cells):
    row(*cells)
    row(*("---" for _ in cells))


def measure_bubbles(unit, micro_batches, num_updates, penalty):
    """Print the table of bubbles; return an update with 4 stages and 8 micro-batches by schedule."""
    print(f"\nBubble, stages asleep, unit {1e3 * unit:g} ms, median (and range) of {num_updates} updates:\n")
    head(
        "stages", "micro-batches", "(S - 1) / (M + S - 1)", "phases: expected", "measured", "joint: expected",
        "measured", "ms an update: phases", "joint",
    )  # fmt: skip
    kept, overruns = {}, []
    for num_stages, num in itertools.product((2, 4), micro_batches):
        cells, times = [], []
        with fresh_ranks(num_stages) as pool:
            for name in SCHEDULES:
                options = [*sleeping_options(num_stages, num, name), *penalty]
                updates = [*zip(*pool.run(asleep, options, unit, num_updates), strict=True)]
                bubbles = sorted(bubble(by_rank) for by_rank in updates)
                cells += [
                    percent(expected_bubble(num_stages, options, name)),
                    f"{percent(statistics.median(bubbles))} ({100 * bubbles[0]:.1f} to {100 * bubbles[-1]:.1f})",
                ]
                overruns += [overrun(by_rank, unit) for by_rank in updates]
                middle = sorted(updates, key=seconds)[num_updates // 2]
                times.append(f"{1e3 * seconds(middle):.0f}")
                if (num_stages, num) == (4, 8):
                    kept[name] = middle
        row(num_stages, num, percent((num_stages - 1) / (num + num_stages - 1)), *cells, *times)
    low, half, high = (percent(value) for value in statistics.quantiles(overruns, n=4))
    print(f"\nForward and backward tasks took {half} longer than planned (quartiles {low} to {high}).")
    return kept


def phase_times(by_rank):
    """By phase and kind: seconds from its first task's start, since the update began, to its last one's end, and the
    mean over the ranks of the seconds that its tasks took."""
    spans = [span for rank in by_rank for span in rank]
    origin = min(span.start for span in spans)
    found = {}
    for span in sorted(spans, key=lambda span: (span.task.phase, KINDS.index(span.task.kind))):
        found.setdefault(f"{span.task.phase + 1}. {span.phase.label}: {span.task.kind}", []).append(span)
    return {
        name: (
            min(span.start for span in of) - origin,
            max(span.end for span in of) - origin,
            sum(span.end - span.start for span in of) / len(by_rank),
        )
        for name, of in found.items()
    }


def print_phases(title, updates):
    """Print phase times of updates, by name of a column."""
    print(f"\n{title}\n")
    head("phase: kind", *(cell for name in updates for cell in (f"{name}: from - to, ms", "tasks of a stage, ms")))
    times = {name: phase_times(by_rank) for name, by_rank in updates.items()}
    for phase in next(iter(times.values())):
        cells = []
        for found in times.values():
            start, end, busy = (1e3 * value for value in found[phase])
            cells += [f"{start:.0f} - {end:.0f}", f"{busy:.0f}"]
        row(phase, *cells)
    row("update", *(cell for by_rank in updates.values() for cell in (f"{1e3 * seconds(by_rank):.0f}", "")))


def load():
    return f"load of the machine {os.getloadavg()[0]:.1f}"


def write_trace(path, by_rank):
    origin = min(span.start for rank in by_rank for span in rank)
    moved = [[s._replace(start=s.start - origin, end=s.end - origin) for s in rank] for rank in by_rank]
    path.write_text(json.dumps({"traceEvents": trace_events(moved), "displayTimeUnit": "ms"}))


def overrun(by_rank, unit):
    """By how much the tasks took longer than planned, as a share."""
    spans = [span for rank in by_rank for span in rank if span.task.kind != "step"]
    return sum(s.end - s.start for s in spans) / sum(planned(s.phase, s.task.kind, unit / SIZE) for s in spans) - 1


def print_bytes(by_stages):
    """Print the bytes that the larger recipe sends, from what ``awake`` found."""
    print("\nLarger recipe: bytes sent for each micro-batch of an update:\n")
    head("stages", "boundary", "samples across", "bytes of a sample there", "of them activations", "sent", "ratio")
    for num, ranks in by_stages.items():
        sent = {name: value / MICRO_BATCHES for _, values, _ in ranks for name, value in values.items()}
        sizes = {name: value for _, _, values in ranks for name, value in values.items()}
        for name in sorted(sent, key=lambda name: (name[0] == "discriminator", KINDS.index(name[2]), name[1])):
            network, stage, direction = name
            samples, size, largest = sizes[name]
            boundary = f"{network[0].upper()} {stage} to {stage + (1 if direction == 'forward' else -1)}"
            ratio = f"{sent[name] / (samples * size):.3f}"
            row(num, boundary, samples, f"{size:,}", f"{largest:,}", f"{sent[name]:,.0f}", ratio)


def print_memory(found):
    """Print what ``memory`` found, by number of stages and variant."""
    print("\nLarger recipe: resident memory of each rank beyond that before the run was built, MiB:\n")
    head("stages", "variant", "rank", "layers of G", "of D", "parameters", "after an update", "peak of an update")
    for (num, variant), ranks in found.items():
        for rank, (held, peak, layers, numel) in enumerate(ranks):
            row(num, variant, rank, *layers, f"{numel:,}", f"{held / 2**20:.0f}", f"{peak / 2**20:.0f}")


def measure_larger(num_updates):
    """Print phases, bytes and memory of the larger recipe, which computes."""
    phases, by_stages, held = {}, {}, {}
    for num in (1, 2, 4):
        with fresh_ranks(num) as pool:
            if num == 1:
                pool.run(scenarios.train, [], DS, 1)  # as the others, it has computed before
            else:
                by_stages[num] = pool.run(awake, [*LARGER, *stages(num)], num_updates)
            if num == 2:
                apart = pool.run(awake, [*LARGER, *stages(num), "pipeline.schedule=phases"], num_updates)
                for name, ranks in (("phases", apart), ("joint", by_stages[num])):
                    updates = zip(*(spans for spans, _, _ in ranks), strict=True)
                    phases[name] = sorted(updates, key=seconds)[num_updates // 2]
            for variant, options in VARIANTS.items() if num > 1 else [("no pipeline", [])]:
                held[num, variant] = pool.run(memory, [*LARGER, *stages(num), *options])
    print_phases("Larger recipe in 2 stages, awake: an update by phase:", phases)
    print_bytes(by_stages)
    print_memory(held)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of 4 stages, 8 micro-batches, schedule joint")
    parser.add_argument("--unit", type=float, default=20.0, help="milliseconds of a micro-batch's forward pass")
    parser.add_argument("--quick", action="store_true", help="fewer micro-batches and updates")
    parser.add_argument("--r1", action="store_true", help="an exact penalty in every update; the bubble alone")
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    micro_batches, num_updates = ((2, 8), 1) if options.quick else ((2, 4, 8, 16), 3)
    print(
        f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, deepspeed {deepspeed.__version__}, {load()}"
    )
    penalty = ["objective.r1={weight: 1}"] if options.r1 else []
    kept = measure_bubbles(options.unit / 1e3, micro_batches, num_updates, penalty)
    if options.trace:
        write_trace(options.trace, kept["joint"])
    print_phases("4 stages asleep, 8 micro-batches: an update by phase:", kept)
    if not options.r1:
        measure_larger(num_updates)
    print(f"\nAt the end: {load()}")


if __name__ == "__main__":
    main()
