"""Seconds that a save of a run's state holds its ranks up, and until it is on the disk, beside torch's own ways.

    python -m tests.benchmarks.saving [--gigabytes 1] [--ranks 1] [--rounds 3] [--sides NAMES] [--out DIRECTORY]

Each rank holds its part of the state in float32 tensors of 64 MB, and writes it in turns by each of them:

    bigsgan        as a run saves: it copies, and writes while training continues
    foreground     the same with checkpoints.background=false
    torch.save     a file for each rank
    dcp            torch.distributed.checkpoint.save
    async_dcp      torch.distributed.checkpoint.async_save, which copies too

Nobody trains meanwhile. The files are removed. All but torch.save's are on the disk at the end (fsync); bigsgan's have
checksums besides, and are searched for Inf and NaN. A rank's tensors share 1 GB of memory, so that only the copies take
more: of 10 GB as much for each side that copies, so give fewer ``--sides`` at a time.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from bigsgan import checkpoint
from bigsgan.config.sections import Checkpoints
from bigsgan.runtime import comm
from tests.benchmarks.turns import rows, take_turns
from tests.distributed.pool import RankPool
from tests.single_process import Entry

NUMEL = 1 << 24
"""Elements of a tensor."""

SHARED = 15
"""Tensors that have memory of their own, 1 GB; each further one is another view of one of these."""


def state(num_bytes, directory):
    """Tensors of so many bytes by name, each with a storage of its own."""
    found = {}
    for i in range(max(1, round(num_bytes / 4 / NUMEL))):
        file = directory / f"memory{comm.rank()}_{i % SHARED}"
        found[f"rank{comm.rank()}.{i}"] = torch.from_file(str(file), True, NUMEL, dtype=torch.float32)
        if i < SHARED:
            found[f"rank{comm.rank()}.{i}"].uniform_()
    return found


def measure(num_bytes, rounds, out, names):
    """By side, seconds that this rank was held up, and until all was written, in each round and in one before."""
    memory = Path("/dev/shm") / Path(out).name
    memory.mkdir(exist_ok=True)
    comm.barrier()
    tensors, files, whole = state(num_bytes / comm.world_size(), memory), Path(out), {}
    entries = {"state": Entry([checkpoint.StateShard("master", name, 0, each) for name, each in tensors.items()])}
    savers = {
        name: checkpoint.Saver(files / name, comm, Checkpoints(keep=1, background=name == "bigsgan"))
        for name in ("bigsgan", "foreground")
    }
    number = iter(range(1, 1000))

    def by_saver(name):
        saver = savers[name]
        assert saver.save(next(number), entries, checkpoint.Description({}, {}, {}))
        held = saver.stall_seconds
        assert saver.finish()
        return held

    def by_torch():
        start = time.perf_counter()
        torch.save(tensors, files / f"rank{comm.rank()}.pt")
        return time.perf_counter() - start

    def by_dcp(is_async):
        start = time.perf_counter()
        saved = (dcp.async_save if is_async else dcp.save)(tensors, checkpoint_id=files / "dcp")
        held = time.perf_counter() - start
        if is_async:
            saved.result()
        return held

    sides = {
        "bigsgan": lambda: by_saver("bigsgan"),
        "foreground": lambda: by_saver("foreground"),
        "torch.save": by_torch,
        "dcp": lambda: by_dcp(False),
        "async_dcp": lambda: by_dcp(True),
    }

    def side(name):
        def timed():
            comm.barrier()
            start = time.perf_counter()
            held = sides[name]()
            comm.barrier()
            whole.setdefault(name, []).append((held, time.perf_counter() - start))
            for path in files.iterdir():
                if comm.rank() == 0 and path.name not in savers:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            comm.barrier()
            return held

        return timed

    take_turns({name: side(name) for name in names or sides}, rounds)
    comm.barrier()
    if comm.rank() == 0:
        shutil.rmtree(memory)
    return whole


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", default="", help="separated by commas; default all")
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.out) as directory:
        names = list(filter(None, options.sides.split(",")))
        num_bytes = options.gigabytes * 1e9
        by_rank = RankPool(options.ranks).run(measure, num_bytes, options.rounds, directory, names, timeout=3600.0)
    slowest = {
        name: [tuple(map(max, zip(*each, strict=True))) for each in zip(*(own[name] for own in by_rank), strict=True)]
        for name in by_rank[0]
    }
    held, written = ({name: [each[i] for each in rounds[1:]] for name, rounds in slowest.items()} for i in (0, 1))
    print(f"{options.gigabytes:g} GB, ranks: {options.ranks}")
    print("| | ms held up | over torch.save's | ms until written | ms that the first save held up |")
    for name, text in rows(held, "torch.save").items():
        print(f"| {name} | {text} | {1e3 * statistics.median(written[name]):.0f} | {1e3 * slowest[name][0][0]:.0f} |")


if __name__ == "__main__":
    main()
