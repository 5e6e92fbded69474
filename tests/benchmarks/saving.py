"""How long a save holds training up, beside torch.save and torch.distributed.checkpoint, taking turns in one process.

    python -m tests.benchmarks.saving [--gigabytes 1] [--rounds 5]

The state is 64 float32 tensors on the CPU. bigsgan copies it and writes in a thread, with a checksum and a check for
Inf and NaN; `async_save` copies and writes in a thread too. Each save is complete before the next begins, and on the
disk: torch's are synced after the clock has stopped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from bigsgan import checkpoint
from bigsgan.config.sections import Checkpoints
from tests.alone import entry
from tests.benchmarks.turns import rows, take_turns

NUM_TENSORS = 64


def sides(state, directory):
    """By name, a function that saves the state and returns the seconds for which it kept its caller."""
    saver = checkpoint.Saver(directory / "bigsgan", checkpoint.SingleProcess(), Checkpoints())
    written = []

    def bigsgan():
        nimg = len(written) + 1
        assert saver.save(nimg, {"state": entry(state)}, checkpoint.Description({}, {}, {}))
        assert saver.finish()
        written.append(saver.write_seconds)
        shutil.rmtree(directory / "bigsgan" / f"{nimg:012d}")
        return saver.stall_seconds

    def timed(save):
        def call():
            start = time.perf_counter()
            left = save()
            seconds = time.perf_counter() - start
            if isinstance(left, Future):
                left.result()
            os.sync()
            for path in directory.glob("torch*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            return seconds

        return call

    return written, {
        "bigsgan": bigsgan,
        "torch.save": timed(lambda: torch.save(state, directory / "torch.pt")),
        "torch.distributed.checkpoint.save": timed(lambda: dcp.save(state, checkpoint_id=directory / "torch")),
        "torch.distributed.checkpoint.async_save": timed(
            lambda: dcp.async_save(state, checkpoint_id=directory / "torch")
        ),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    numel = int(options.gigabytes * 1e9 / 4 / NUM_TENSORS)
    state = {f"layers.{i}.weight": torch.randn(numel) for i in range(NUM_TENSORS)}
    with tempfile.TemporaryDirectory() as directory:
        written, each = sides(state, Path(directory))
        seconds = take_turns(each, options.rounds)
    print(f"{options.gigabytes:g} GB, {options.rounds} rounds, torch {torch.__version__}; ms of the caller, ratio")
    for name, row in rows(seconds, "bigsgan").items():
        print(f"| {name} | {row} |")
    print("bigsgan's thread wrote for", ", ".join(f"{each:.2f}" for each in written), "s")


if __name__ == "__main__":
    main()
