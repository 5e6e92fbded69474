"""Clears the state that DeepSpeed keeps for the whole process, and that one engine would leave for the next.

Seen in DeepSpeed 0.19.8; tests/distributed/test_bench.py fails first if a later version changes them. Files are under
deepspeed/runtime/.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed.comm.comm
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import groups

from bigsgan.engines.deepspeed.reports import forget_log
from bigsgan.runtime import division

_MOST_NUMBERED = 1 << 32
"""More than the engines of a division have of parameters or modules."""


def forget_pipeline() -> None:
    """Forget the pipeline engine that was built last, whose ranks the next engine would take for its own."""
    groups.mpu = None


def divide_ranks(parts: Sequence[Sequence[int]]) -> None:
    """Let torch and DeepSpeed take this rank's part for the world, until ``unite_ranks``; see ``division.divide``."""
    _forget_world()
    division.divide(parts)


def unite_ranks() -> None:
    """Let torch and DeepSpeed take all ranks of the job for the world again, if they were divided."""
    if division.part() is None:
        return
    _forget_world()
    division.unite()
    # Stage 3 numbers parameters and modules in each process, from where the engine before ended, and compares them over
    # ranks (zero/partition_parameters.py; a default argument's list in zero/parameter_offload.py).
    Init.param_id = (Init.param_id // _MOST_NUMBERED + 1) * _MOST_NUMBERED
    (modules,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    modules[0] = (modules[0] // _MOST_NUMBERED + 1) * _MOST_NUMBERED


def _forget_world() -> None:
    """Forget DeepSpeed's copy of the group of all ranks, where others are going to be all ranks (utils/groups.py)."""
    groups._WORLD_GROUP = None


def process_groups() -> set[Any]:
    """Return the process groups that there are."""
    return set(dist.distributed_c10d._world.pg_map)


def release_process_groups(keep: set[Any]) -> None:
    """End process groups, of engines that were destroyed, but for ``keep`` and those that DeepSpeed still uses.

    Each of gloo's has three threads that look for work 100 times a second.
    """
    cached = (vars(groups), vars(deepspeed.comm.comm))
    keep = keep | {value for names in cached for value in names.values() if isinstance(value, dist.ProcessGroup)}
    # In the order of creation, which is the same on all ranks: ending one of NCCL's may wait for the other ranks.
    for group in [each for each in dist.distributed_c10d._world.pg_map if each not in keep]:
        dist.destroy_process_group(group)
    gc.collect()  # their threads end with the last reference


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Undo after the block, failed or not, what engines that were built and destroyed in it leave behind."""
    clear = clearing()
    try:
        yield
    finally:
        clear()


def clearing() -> Callable[[], None]:
    """Return what undoes all that engines leave behind which are built, and destroyed, from now on. A collective.

    That is their process groups, the log of their collectives, and at ZeRO 3 its own ``torch.nn.functional.linear``,
    which every later network would use, and the networks themselves: on a list (zero/parameter_offload.py) and as keys
    of a method's cache (zero/partitioned_param_coordinator.py), which all engines share.
    """
    keep, linear, depth = process_groups(), torch.nn.functional.linear, len(FWD_MODULE_STACK)

    def clear() -> None:
        unite_ranks()
        forget_log()
        torch.nn.functional.linear = linear
        del FWD_MODULE_STACK[depth:]
        method: Any = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
        for cell in method.__closure__:
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()
        release_process_groups(keep)

    return clear
