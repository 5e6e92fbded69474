"""Gives replicas of a network the same buffers and batch statistics; DeepSpeed keeps their parameters equal."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from bigsgan.models.layers import RankAverages
from bigsgan.models.network import LayerStack
from bigsgan.runtime import comm


def join_replicas(
    network: LayerStack, num_replicas: int, source: int = 0, group: dist.ProcessGroup | None = None
) -> None:
    """Give all replicas the buffers of one, and let batch statistics average over them. Every replica calls this.

    Args:
        network: This rank's layers.
        num_replicas: Number of ranks that hold these layers.
        source: The rank whose buffers all replicas get; DeepSpeed broadcasts parameters and not buffers.
        group: Process group of the replicas; None for all ranks.
    """
    if num_replicas == 1:
        return
    comm.broadcast(network.buffers(), source, group)
    for module in network.modules():
        if isinstance(module, RankAverages):
            module.average_over_ranks = partial(comm.mean_over_ranks, group=group)
            module.num_ranks = num_replicas
