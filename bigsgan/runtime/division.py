"""Divides the ranks of a job into parts, each of which torch and DeepSpeed then take for the whole world.

Engines count ranks from 0 and make collectives among all ranks there are. Where the generator and the discriminator
have ranks of their own, the world of each is its part. bigsgan's own collectives (``runtime/comm.py``) are made
among all ranks of the job all the same, but for those inside ``within_part``.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion


class _Division(NamedTuple):
    """Process groups of a divided job."""

    job: Any  # all ranks
    part: Any  # those of this rank's part


_MOST_GROUPS = 1 << 20
"""More than a part makes."""

_division: _Division | None = None
_of_thread = threading.local()
"""Whether a thread is ``within_part``: others, such as those that write checkpoints, still belong to all ranks."""


def partition(parts: Sequence[Sequence[int]], description: str | None = None) -> Any:
    """Return the process group of this rank's part. Every rank calls this, with parts that each rank is in one of.

    It is one call on each rank, however many parts there are. Over NCCL all ranks split the communicator of all at
    once, and those with one colour, which torch makes of a part's ranks, come together; elsewhere the ranks of a part
    meet in the store. ``dist.split_group`` does the first alone.
    """
    (own,) = (part for part in parts if dist.get_rank() in part)
    if TorchVersion(torch.__version__) < "2.14":
        dist.distributed_c10d._hash_ranks_to_str = _name
    return dist.new_group(list(own), use_local_synchronization=True, group_desc=description)


def _name(ranks: Sequence[int]) -> str:
    """Name a group by its ranks and the number of groups so far, as torch does from 2.14 on.

    An older torch takes the number that there are, and so the name of a group that has ended, whose ranks' addresses
    are still in the store; and names that differ between ranks which have different numbers.
    """
    world = dist.distributed_c10d._world
    world.group_count += 1
    return hashlib.sha1(f"{list(ranks)} {world.group_count}".encode(), usedforsecurity=False).hexdigest()


def divide(parts: Sequence[Sequence[int]]) -> None:
    """Let torch take this rank's part for all ranks. Every rank calls this, with the same parts.

    Groups that were made before stay what they were.
    """
    global _division
    job, own = dist.group.WORLD, partition(parts)
    _division = _Division(job, own)
    _take_for_world(own)


def unite() -> None:
    """Undo ``divide``, if it was called; what uses the part has to be gone."""
    global _division
    if _division is not None:
        job, part = _division
        _division = None
        _take_for_world(job)
        # Groups of all ranks are named by their number, which has to be the same on all, whatever the parts have made.
        world = dist.distributed_c10d._world
        world.group_count = (world.group_count // _MOST_GROUPS + 1) * _MOST_GROUPS
        dist.destroy_process_group(part)


def world() -> Any:
    """The group of all ranks of the job, or of this rank's part inside ``within_part``; any thread may ask."""
    if _division is None:
        return dist.group.WORLD
    return _division.part if getattr(_of_thread, "is_within_part", False) else _division.job


def part() -> Any:
    """The group of this rank's part; None where the job is not divided."""
    return None if _division is None else _division.part


def store() -> Any:
    """The store that all ranks of the job met at; any thread may ask."""
    c10d = dist.distributed_c10d  # torch 2.8 to 2.15 have no public name for it
    return c10d._get_default_store() if _division is None else c10d._world.pg_map[_division.job][1]


@contextmanager
def scope(group: Any = None) -> Iterator[None]:
    """Make bigsgan's own collectives in here: among all ranks of the job, or in a group, which is that of a part.

    Inside ``within_part`` they are made among the ranks of the part. In a job of one part the world stays as it is. The
    world is the process's, so that only its main thread may come here, as the one that makes collectives.
    """
    if _division is None or group is not None or world() is _division.part:
        yield
        return
    assert threading.current_thread() is threading.main_thread(), "collectives are made by the main thread"
    before = dist.group.WORLD
    _take_for_world(_division.job)
    try:
        yield
    finally:
        _take_for_world(before)


@contextmanager
def within_part() -> Iterator[None]:
    """Make this thread's collectives inside the block among the ranks of its part; without effect in a job of one."""
    before = getattr(_of_thread, "is_within_part", False)
    _of_thread.is_within_part = True
    try:
        yield
    finally:
        _of_thread.is_within_part = before


def _take_for_world(group: Any) -> None:
    # torch 2.8 to 2.15 have no public name for it; tests/distributed/test_split.py fails first if it goes.
    dist.distributed_c10d._update_default_pg(group)
