"""Builds a run's engines as one of many ranks would, in a process alone, and counts: on torch's `fake` backend.

Nothing is sent, and a collective leaves its tensors as they are.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bigsgan.bench.comm import Traffic
from bigsgan.config import RunPlan
from bigsgan.engines.build import build_executor
from bigsgan.engines.connecting import num_communicators
from bigsgan.engines.pipeline.transport import MESSAGES, Channel
from bigsgan.monitor import RankLog
from bigsgan.runtime import comm
from bigsgan.training.build import build_run
from bigsgan.training.schedules import scheduled
from bigsgan.training.start import Start
from tests.distributed.nursery import nurseries
from tests.tiny import both, tiny_plan


def as_one_of_many(function: Callable[..., Any], rank: int, world_size: int, *arguments: Any) -> Any:
    """Call a function as a rank of a job."""
    _, pipe = nurseries("cpu")[0].begin(_call, function, rank, world_size, arguments)()
    result = pipe.recv()
    assert not isinstance(result, str), result
    return result


def _call(pipe: Any, function: Callable[..., Any], rank: int, world_size: int, arguments: Sequence[Any]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size), LOCAL_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    try:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        comm.initialize()
        known = {"from_rank": lambda source, value: value, "gather_objects": lambda value: [value] * world_size}
        with mock.patch.multiple(comm, any_rank=bool, **known):
            pipe.send(function(*arguments))
    except Exception:
        pipe.send(traceback.format_exc())


def build(plan: RunPlan) -> None:
    """Build a run's engines, whose channels do not greet each other."""
    with mock.patch.object(Channel, "greet"):
        build_executor(plan, {})


def first_update(out: Path, overrides: Sequence[str]) -> dict[str, float]:
    """Processor seconds of a rank to build its run and for the first update, and its collectives; see ``groups``."""
    plan, start, traffic = tiny_plan(out, dist.get_world_size(), overrides, both(1)), time.process_time(), Traffic()
    with mock.patch.object(Channel, "greet"), traffic:
        run = build_run(plan, out, Start(None), RankLog(out / "log", comm.rank(), print))
        built = time.process_time()
        run.step(0, scheduled(run.recipe, 0))
    seconds = {"build": built - start, "update": time.process_time() - built}
    return {**seconds, "collectives": sum(each["calls"] for each in traffic.counts.values())}


def groups(out: Path, overrides: Sequence[str]) -> dict[str, int]:
    """What the engines of a run take of process groups: calls that make them, and those that the rank is in.

    ``out`` is the run directory, and ``overrides`` are of the tiny recipe.
    """
    plan = replace(tiny_plan(out, dist.get_world_size(), overrides, both(1)), ranks_per_host=4)
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        build(plan)
    own = dist.distributed_c10d._world.pg_map
    descriptions = [group.group_desc for group in own if dist.get_world_size(group) > 1]
    assert len(descriptions) == num_communicators(plan, comm.rank())
    return {"calls": new_group.call_count, "own": len(descriptions), "messages": descriptions.count(MESSAGES)}
