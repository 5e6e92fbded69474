"""Processor seconds that a rank's engines take to build, as one of 8, 64 and 1,024 ranks, in one run.

    python -m tests.benchmarks.many_ranks [--rounds 3]

Two pipelines of four stages of the tiny BigGAN, on torch's `fake` backend: nothing is sent. What is left is the host's
own work that grows with the ranks, such as calls that make process groups, and lists of all ranks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from tests.distributed.counting import as_one_of_many, build_seconds
from tests.tiny import stages


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    seconds = {8: [], 64: [], 1024: []}
    for _ in range(parser.parse_args().rounds):
        for num, found in seconds.items():
            with tempfile.TemporaryDirectory() as directory:
                options = [f"batch={2 * num}", "accumulation=1", *stages(4, 4)]
                found.append(as_one_of_many(build_seconds, num // 2 + 1, num, Path(directory), options))
    for num, found in seconds.items():
        print(f"{num} ranks: {statistics.median(found):.2f} s ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
