"""Whole updates on the stand-in, as each rank of a pool makes them."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.utils import nvtx
from torch.distributed import distributed_c10d

from bigsgan.adversarial.step import AdversarialStep
from bigsgan.checkpoint import saver
from bigsgan.config import NETWORKS
from bigsgan.engines.deepspeed.leftovers import leaving_nothing
from bigsgan.engines.deepspeed.prefetching import Prefetching
from bigsgan.engines.pipeline.observer import TRACED_UPDATE
from bigsgan.errors import UserError
from bigsgan.models import network, noise
from bigsgan.runtime import comm
from bigsgan.runtime.kernels import choose_kernels
from bigsgan.training import loop, state
from bigsgan.training.recovery import Recovery
from tests.distributed import scenarios
from tests.stand_in import sanitizing

WARM_UP, LONGER = 1, 2
"""Updates in which allocators fill; at ZeRO 3, which learns the order of modules."""

PASSED_OVER = "/torch/", "/deepspeed/accelerator/"
"""Directories of functions that only hand a wait on."""

SAMPLES_AT_A_TIME = 64
"""Of the 100 in a grid, and so in two parts."""


_new_group = distributed_c10d._new_process_group_helper


def _tell_and_make_group(size: int, *arguments: Any, **options: Any) -> Any:
    """Make a group, after the stand-in of NCCL has learned its size, which a part of a communicator does not tell."""
    ctypes.CDLL("libnccl.so.2").stand_in_size(size)
    return _new_group(size, *arguments, **options)


def prepare() -> None:
    """Make a rank ready for cells. Objects travel by the hosts' gloo: the stand-in carries and computes nothing."""
    if comm.world_size() > 1:
        group = dist.new_group(backend="gloo")

        def from_rank(source: int, value: Any) -> Any:
            if comm.world_size() == 1:
                return value
            values = [value]
            dist.broadcast_object_list(values, source, group=group, device=torch.device("cpu"))
            return values[0]

        def gather_objects(value: Any) -> list[Any] | None:
            if comm.world_size() == 1:  # a part of the ranks, which is a rank of its own here
                return [value]
            values: list[Any] = [None] * comm.world_size()
            dist.all_gather_object(values, value, group=group)
            return values if comm.rank() == 0 else None

        comm.from_rank, comm.gather_objects = from_rank, gather_objects
    distributed_c10d._new_process_group_helper = _tell_and_make_group
    # What depends on numbers, of which there are none here.
    saver.first_not_finite = lambda tensors: None
    state.float = _finite  # nor do optimizers count their steps
    Recovery.failed = lambda self, *arguments, **options: None
    network.is_spoilt = lambda tensor: False
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda numbers: None
    nvtx.enable_nvtx = False  # ranges around each of its functions, for a profiler


def _finite(number: Any) -> float:
    value = float(number)
    return value if math.isfinite(value) else 0.0


def refusals(cells: dict[str, Any]) -> dict[str, str]:
    """Of the cells those that the product refuses, and of which field it says so."""
    found = {}
    for name, (overrides, ds) in cells.items():
        try:
            with tempfile.TemporaryDirectory() as directory:
                scenarios.tiny_plan(Path(directory), comm.world_size(), overrides, dict.fromkeys(NETWORKS, ds))
        except UserError as error:
            found[name] = error.field.rpartition(".json: ")[2]  # of a file, the key in it
    return found


def walk(cells: dict[str, Any], shown: bool = True, deterministic: bool = False) -> dict[str, Any]:
    """What ``run`` finds, by the cell's name; a cell that fails ends the walk."""
    prepare()
    choose_kernels(deterministic)
    gc.freeze()  # what Triton has imported and compiled meanwhile, which each cell would look through at its end
    found = {}
    for name, (overrides, ds) in cells.items():
        try:
            with leaving_nothing():
                found[name] = run(overrides, ds, shown)
        except Exception as error:
            raise RuntimeError(f"{name} {sanitizing.report(error)}") from error
        sanitizing.forget()
    choose_kernels(False)
    return found


def walk_apart(cells: dict[str, Any], shown: bool) -> dict[str, list[Any]]:
    """What ``run`` finds, by the cell's name and by rank."""
    own = walk(cells, shown)
    return {name: [each[name] for each in comm.gather_objects(own) or []] for name in cells}


def walk_with_waits(cells: dict[str, Any]) -> dict[str, Any]:
    """``walk`` where each update ends with one of each ``PLANTED``."""
    update = AdversarialStep.__call__

    def with_more(step: AdversarialStep, *arguments: Any) -> None:
        update(step, *arguments)
        for wait in PLANTED:
            wait()

    with mock.patch.object(AdversarialStep, "__call__", with_more):
        return walk(cells, shown=False)


def _wait_for_the_device() -> None:
    torch.cuda.synchronize()


def _wait_for_a_stream() -> None:
    torch.cuda.current_stream().synchronize()


def _wait_for_an_event() -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def _wait_for_a_number() -> None:
    torch.ones((), device=comm.device()).item()


PLANTED = [_wait_for_the_device, _wait_for_a_stream, _wait_for_an_event, _wait_for_a_number]


def walk_with_stale_gathers(cells: dict[str, Any]) -> None:
    """``walk`` where ZeRO 3's gathers do not wait for the stream that writes the weights."""
    expect = Prefetching.expect

    def without_waiting(prefetching: Prefetching, kind: Any) -> None:
        with mock.patch.object(torch.cuda.Stream, "wait_stream"):
            expect(prefetching, kind)

    with mock.patch.object(Prefetching, "expect", without_waiting):
        walk(cells, shown=False)


def run(overrides: list[str], ds: dict[str, Any], shown: bool = True) -> dict[str, Any]:
    """Warm up, look at two updates, one with and one without a lazy penalty, then sample, report and save if shown.

    Returns:
        ``waits``: how often the host waited in those updates, by the innermost function outside of ``PASSED_OVER``;
        ``launches``: kernels in each of them.
    """
    made = scenarios.build(overrides, dict.fromkeys(NETWORKS, ds))
    warm_up = LONGER if ds["zero_optimization"]["stage"] == 3 else WARM_UP
    scenarios.update(made, TRACED_UPDATE if made.step.executor.observer is not None else warm_up)
    before = launches()
    with _waits() as waits:
        scenarios.update(made, 2)
    per_update = (launches() - before) / 2
    if shown:
        made.sampling_batch, made.standing = SAMPLES_AT_A_TIME, made.standing[:2]  # as more would do the same again
        loop._report_samples(made)
        made.statistics.reduce(comm.sum_over_ranks)
        scenarios.save(made, Path(comm.from_rank_zero(tempfile.mkdtemp())))
    scenarios.destroy(made)
    return {"waits": dict(waits), "launches": per_update}


@contextmanager
def _waits() -> Iterator[Counter[str]]:
    """Count inside the block where the host waits: for the device, a stream, an event, or memory to be released.

    The runtime tells of each call. torch's own warnings leave out ``torch.cuda.synchronize`` and events.
    """
    found: Counter[str] = Counter()

    @ctypes.CFUNCTYPE(None)
    def listener() -> None:
        frame = sys._getframe().f_back
        while frame is not None and any(part in frame.f_code.co_filename for part in PASSED_OVER):
            frame = frame.f_back
        code = frame and frame.f_code
        found[f"{Path(code.co_filename).name}:{code.co_name}" if code else "a thread of torch"] += 1

    tell = ctypes.CDLL("libcudart.so.13").stand_in_tell_of_waits
    gc.disable()  # an engine of a cell before would wait as it is collected
    tell(listener)
    try:
        yield found
    finally:
        tell(None)
        gc.enable()


def launches() -> int:
    """Kernels that this process has launched."""
    return int(ctypes.CDLL("libcudart.so.13").stand_in_launches())


def shared(cells: dict[str, Any]) -> dict[str, Any]:
    """Make an update of each cell on ranks that share a device: launches by cell, and what connects the ranks.

    Returns:
        ``sum``: what an all-reduce of each rank's number plus one, on the device, gives; by gloo it is computed.
        ``message``: the number plus one of the other rank, sent and received on the device.
        ``tf32``: whether float32 may be computed in TF32.
    """
    prepare()
    ours = torch.tensor([comm.rank() + 1.0]).to(comm.device())
    theirs = torch.zeros(1, device=comm.device())
    for work in (dist.isend(ours, 1 - comm.rank()), dist.irecv(theirs, 1 - comm.rank())):
        work.wait()
    dist.all_reduce(ours)
    found: dict[str, Any] = {"device": str(comm.device()), "backend": dist.get_backend(), "sum": float(ours)}
    found["message"] = float(theirs)
    found["tf32"] = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    for name, (overrides, ds) in cells.items():
        with leaving_nothing():
            made = scenarios.build(overrides, dict.fromkeys(NETWORKS, ds))
            before = launches()
            scenarios.update(made, 1)
            found[name] = launches() - before
            scenarios.destroy(made)
    return found


def compile_draws(num: int) -> dict[str, tuple[int, ...]]:
    """Have torch.compile and Triton compile what draws numbers on a device; by kind and streams, their shapes."""
    prepare()
    seeds = torch.arange(3, device=comm.device())
    torch.compiler.reset()
    found = {}
    with torch._inductor.config.patch(compile_threads=1):  # else other processes compile, without the stand-ins
        for kind in ("uniform", "normal"):
            for streams in (range(7, 8), range(7, 11)):
                found[f"{kind} {len(streams)}"] = tuple(
                    torch.compile(noise.draw, dynamic=False)(seeds, streams, num, kind).shape
                )
    return found
