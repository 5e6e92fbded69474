"""Times the guide's autoencoder with an adaptive weight of the adversarial loss and with a fixed one, in turns.

    python -m tests.benchmarks.adaptive_weight FOLDER

FOLDER holds autoencoder.py and autoencoder.yaml of docs/how-to/image-games.md. Each line has the time of an update over
that with a fixed weight, and the fixed weight's against itself as a control: medians of 50 updates.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import bigsgan
from bigsgan.training.schedules import scheduled

FIXED = "objective.adversarial={weight: 0.5}"
ADAPTIVE = "objective.adversarial={weight: 0.5, adaptive: {parameter: decoder.5.weight}}"


def seconds(folder: str, weight: str) -> float:
    """The median update of a new run, after ten that are not timed."""
    changes = [f"out={tempfile.mkdtemp()}/run", "objective.discriminator_from_nimg=0", weight]
    with bigsgan.Trainer(bigsgan.Recipe.read(f"{folder}/autoencoder.yaml", *changes)) as trainer:
        run, found = trainer.build(), []
        for _ in range(60):
            start = time.perf_counter()
            run.step(run.counters.update, scheduled(run.recipe, run.counters.nimg))
            run.count_update()
            found.append(time.perf_counter() - start)
    return statistics.median(found[10:])


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    for _ in range(3):
        first, adaptive, again = (seconds(sys.argv[1], each) for each in (FIXED, ADAPTIVE, FIXED))
        print(f"adaptive {adaptive / first:.2f}, control {again / first:.2f}")
