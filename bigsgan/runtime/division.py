"""Divides the ranks of a job into parts, each of which torch and DeepSpeed then take for the whole world.

Engines count ranks from 0 and make collectives among all ranks there are. Where the generator and the discriminator
have ranks of their own, the world of each is its part. bigsgan's own collectives (``runtime/comm.py``) are made
among all ranks of the job all the same, but for those inside ``within_part``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist


class _Division(NamedTuple):
    """Process groups of a divided job.

    Attributes:
        job: All ranks.
        part: Those of this rank's part.
        patient: All ranks over gloo, which waits for hours.
    """

    job: Any
    part: Any
    patient: Any


_MOST_GROUPS = 1 << 20
"""More than a part makes."""

_division: _Division | None = None
_is_within_part = False


def divide(parts: Sequence[Sequence[int]], patience: timedelta) -> None:
    """Let torch take this rank's part for all ranks. Every rank calls this, with the same parts.

    Groups that were made before stay what they were. ``patience`` is that of the group for long waits.
    """
    global _division
    job = dist.group.WORLD
    groups = [dist.new_group(list(part)) for part in parts]
    patient = dist.new_group(backend="gloo", timeout=patience)
    (own,) = (group for group, part in zip(groups, parts, strict=True) if dist.get_rank() in part)
    _division = _Division(job, own, patient)
    _take_for_world(own)


def unite() -> None:
    """Undo ``divide``, if it was called."""
    global _division
    if _division is not None:
        job, part, patient = _division
        _division = None
        _take_for_world(job)
        # Groups of all ranks are named by their number, which has to be the same on all, whatever the parts have made.
        world = dist.distributed_c10d._world
        world.group_count = (world.group_count // _MOST_GROUPS + 1) * _MOST_GROUPS
        dist.destroy_process_group(part)
        dist.destroy_process_group(patient)


@contextmanager
def scope(group: Any = None) -> Iterator[None]:
    """Make bigsgan's own collectives in here: among all ranks of the job, or in a group, which is that of a part.

    Inside ``within_part`` they are made among the ranks of the part. In a job of one part the world stays as it is.
    """
    if _division is None or _is_within_part or group is not None:
        yield
        return
    _take_for_world(_division.job)
    try:
        yield
    finally:
        _take_for_world(_division.part)


def part() -> Any:
    """The group of this rank's part; None where the job is not divided."""
    return None if _division is None else _division.part


def patient_barrier() -> Callable[[], None] | None:
    """What waits for all ranks of a divided job for hours; None for a world, where a new group can do so."""
    if _division is None or _is_within_part:
        return None
    patient = _division.patient

    def wait() -> None:
        dist.barrier(patient)

    return wait


@contextmanager
def within_part() -> Iterator[None]:
    """Make collectives inside the block among the ranks of this rank's part; without effect in a job of one part."""
    global _is_within_part
    before, _is_within_part = _is_within_part, True
    try:
        yield
    finally:
        _is_within_part = before


def _take_for_world(group: Any) -> None:
    # torch 2.8 to 2.15 have no public name for it; tests/distributed/test_split.py fails first if it goes.
    dist.distributed_c10d._update_default_pg(group)
