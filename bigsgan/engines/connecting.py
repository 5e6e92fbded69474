"""Connects the ranks of each process group before the first update."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist

from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines.pipeline.transport import MESSAGES
from bigsgan.runtime import comm

_NUMBERS = (1, 1 << 21)
"""Elements of a small collective, such as a norm, and of a large one: NCCL has other connections for each."""


_STREAMS, _MOST_AT_ONCE = 32, 24
"""Streams that torch hands out in turn, and communicators, each of which takes one; DeepSpeed takes some too."""

_log = logging.getLogger(__name__)


def num_communicators(plan: RunPlan, rank: int) -> int:
    """Return the number of process groups of several ranks that a rank of a run is in: over NCCL communicators."""
    if plan.world_size == 1:
        return 0
    held = [own for own in map(plan.placement, NETWORKS) if rank in own.ranks]
    found = 1 + plan.images_travel
    found += plan.is_split and len(held[0].ranks) > 1  # those that hold this network
    found += any(own.num_stages == 1 and own.num_replicas > 1 for own in held)  # DeepSpeed's copy of that of all
    for network in NETWORKS:
        local = rank - plan.placement(network).first
        found += any(local in part and len(part) > 1 for part in plan.statistics_parts(network))
    # its pipeline, two for messages, and the replicas of its stage
    return found + sum(3 + (own.num_replicas > 1) for own in held if own.num_stages > 1)


def connect_groups() -> None:
    """Make the collectives of an update in each process group of this rank, in the order in which they were made.

    NCCL connects the ranks of a communicator at the first collective of a kind, and each waits there for the others.
    Now all come at once, and not in the middle of an update. Channels connect as they open. Every rank calls this when
    the engines are built.
    """
    num = sum(backend == dist.Backend.NCCL for backend, _ in dist.distributed_c10d._world.pg_map.values())
    if num > _MOST_AT_ONCE:
        text = "%d communicators: two may share one of torch's %d streams, where their messages wait for each other"
        _log.warning(text, num, _STREAMS)
    for group in list(_of_collectives()):
        size = dist.get_world_size(group)
        for num in _NUMBERS:
            part = torch.zeros(-(-num // size), device=comm.device())
            whole = part.new_empty(len(part) * size)
            dist.all_gather_into_tensor(whole, part, group=group)
            dist.reduce_scatter_tensor(part, whole, group=group)
            dist.all_reduce(whole, group=group)
            dist.reduce(whole, group=group, group_dst=0)
            dist.broadcast(whole, group=group, group_src=0)
    comm.synchronize()


def _of_collectives() -> Iterator[dist.ProcessGroup]:
    """Groups of several ranks over NCCL, but for those of messages; gloo has connected its own as it made them."""
    for group, (backend, _) in dist.distributed_c10d._world.pg_map.items():
        if backend == dist.Backend.NCCL and dist.get_world_size(group) > 1 and group.group_desc != MESSAGES:
            yield group
