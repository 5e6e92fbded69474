"""Times the guide's autoencoder with an adaptive weight of the adversarial loss and with a fixed one, in turns.

    python -m tests.benchmarks.adaptive_weight FOLDER

FOLDER holds autoencoder.py and autoencoder.yaml of docs/how-to/image-games.md. Each line has the time of an update over
that with a fixed weight, and the fixed weight's against itself as a control: medians of 50 updates that take turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack

import bigsgan
from bigsgan.training.loop import Run
from bigsgan.training.schedules import scheduled

FIXED = "objective.adversarial={weight: 0.5}"
ADAPTIVE = "objective.adversarial={weight: 0.5, adaptive: {parameter: decoder.5.weight}}"


def begin(folder: str, weight: str, stack: ExitStack) -> Run:
    """Build a new run, which the stack ends."""
    changes = [f"out={tempfile.mkdtemp()}/run", "objective.discriminator_from_nimg=0", weight]
    return stack.enter_context(bigsgan.Trainer(bigsgan.Recipe.read(f"{folder}/autoencoder.yaml", *changes))).build()


def seconds(run: Run) -> float:
    """Make an update, and return how long it took."""
    start = time.perf_counter()
    run.step(run.counters.update, scheduled(run.recipe, run.counters.nimg))
    run.count_update()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    with ExitStack() as stack:
        runs = [begin(sys.argv[1], each, stack) for each in (FIXED, ADAPTIVE, FIXED)]
        for _ in range(6):
            turns = [[seconds(run) for run in runs] for _ in range(60)][10:]
            first, adaptive, again = (statistics.median(times) for times in zip(*turns, strict=True))
            print(f"adaptive {adaptive / first:.2f}, control {again / first:.2f}", flush=True)
