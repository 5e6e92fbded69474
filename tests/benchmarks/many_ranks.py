"""Processor seconds from the start of a rank's program to the end of its first update, as one of 8, 64 and 1,024 ranks.

    python -m tests.benchmarks.many_ranks [--rounds 3]

The tiny BigGAN whole on each rank and in two pipelines of four stages, on torch's `fake` backend: nothing is sent, and
nobody is waited for. What is left is the host's own work: building the run, and the first update. Not in it are the
import of torch and DeepSpeed, the launcher, meeting in the store, NCCL's connections, builds and compilation.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from tests.distributed.counting import as_one_of_many, first_update
from tests.tiny import stages


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    layouts = {"whole": [], "4 + 4 stages": stages(4, 4)}
    found = {(name, num): [] for name in layouts for num in (8, 64, 1024)}
    for _ in range(parser.parse_args().rounds):
        for (name, num), each in found.items():
            with tempfile.TemporaryDirectory() as directory:
                options = [f"batch={2 * num}", "accumulation=1", *layouts[name]]
                each.append(as_one_of_many(first_update, num // 2 + 1, num, Path(directory), options))
    for (name, num), each in found.items():
        columns = {part: sorted(run[part] for run in each) for part in each[0]}
        texts = (f"{statistics.median(own):.2f} ({own[0]:.2f} to {own[-1]:.2f})" for own in columns.values())
        print(f"| {name} | {num:,} | {' | '.join(texts)} |")


if __name__ == "__main__":
    main()
