"""Whole updates on the stand-in: one process for each rank, which prints a line of JSON for each cell.

python -m tests.stand_in.cells '[{"name": ..., "overrides": [...], "ds": {...}}, ...]' [sanitizer] [deterministic]
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.cuda._sanitizer as sanitizer
import torch.distributed as dist

if "sanitizer" in sys.argv:
    sanitizer.enable_cuda_sanitizer()  # before the first call of CUDA

from deepspeed.runtime.zero import partitioned_param_coordinator

from bigsgan import comm
from bigsgan.checkpoint import saver
from bigsgan.config import NETWORKS
from bigsgan.kernels import choose_kernels
from bigsgan.training import loop
from bigsgan.training.recovery import Recovery
from tests.distributed import scenarios

WARM_UP = 3
"""Updates in which allocators fill and stage 3 learns the order of modules; torch's lists of devices are read, too."""


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """Warm up, look at two updates, one with and one without a lazy penalty, then sample, report and save.

    Returns:
        ``waits``: how often torch had the host wait in those updates, by the innermost line outside of torch;
        ``launches``: kernels in each of them.
    """
    made = scenarios.build(cell["overrides"], dict.fromkeys(NETWORKS, cell["ds"]))
    scenarios.update(made, WARM_UP)
    before = _launches()
    with _waits() as waits:
        scenarios.update(made, 2)
    launches = (_launches() - before) / 2
    loop._report_samples(made)
    made.statistics.reduce(comm.sum_over_ranks)
    scenarios.save(made, Path(comm.from_rank_zero(tempfile.mkdtemp())))
    scenarios.destroy(made)
    return {"waits": dict(waits), "launches": launches}


@contextmanager
def _waits() -> Iterator[Counter[str]]:
    """Count inside the block where torch lets the host wait for the device."""
    found: Counter[str] = Counter()

    def show(message: Warning, *arguments: Any, **options: Any) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        place = next(
            frame for frame in reversed(frames) if Path(frame.filename).name not in ("warnings.py", "cells.py")
        )
        if "called a synchronizing" in str(message):
            found[f"{Path(place.filename).name}:{place.name}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.set_warn_always(True)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.set_warn_always(False)


def _launches() -> int:
    return int(ctypes.CDLL("libcudart.so.13").stand_in_launches())


def _join() -> None:
    """Join the ranks. Their objects travel by gloo, as the stand-in's collectives carry nothing between ranks."""
    comm.initialize()
    if comm.world_size() > 1:
        group = dist.new_group(backend="gloo")

        def from_rank_zero(value: Any) -> Any:
            values = [value]
            dist.broadcast_object_list(values, 0, group=group, device=torch.device("cpu"))
            return values[0]

        def gather_objects(value: Any) -> list[Any] | None:
            values: list[Any] = [None] * comm.world_size()
            dist.all_gather_object(values, value, group=group)
            return values if comm.rank() == 0 else None

        comm.from_rank_zero, comm.gather_objects = from_rank_zero, gather_objects
    # What depends on numbers, of which there are none here.
    saver.first_not_finite = lambda tensors: None
    Recovery.failed = lambda self, *arguments, **options: None
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda numbers: None


def main() -> None:
    """Run the cells of the command line; one that fails says so, and the next begins."""
    _join()
    choose_kernels("deterministic" in sys.argv)
    for cell in json.loads(sys.argv[1]):
        try:
            found = run(cell)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(json.dumps({"name": cell["name"], **found}), flush=True)


if __name__ == "__main__":
    main()
