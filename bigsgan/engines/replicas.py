"""Gives replicas of a network the same buffers and batch statistics; DeepSpeed keeps their parameters equal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bigsgan.models.batch_norm import BatchStatistics
from bigsgan.models.layers import RankAverages
from bigsgan.models.network import LayerStack
from bigsgan.runtime import comm, division
from bigsgan.runtime.mean import mean_over_ranks

Kind = TypeVar("Kind", bound=RankAverages)


def join_replicas(
    network: LayerStack,
    num_replicas: int,
    source: int = 0,
    group: dist.ProcessGroup | None = None,
    parts: Sequence[Sequence[int]] = (),
) -> None:
    """Give all replicas the buffers of one, and let batch statistics average over them. Every replica calls this.

    Args:
        network: This rank's layers.
        num_replicas: Number of ranks that hold these layers.
        source: The rank whose buffers all replicas get; DeepSpeed broadcasts parameters and not buffers.
        group: Process group of the replicas; None for all ranks.
        parts: All ranks of the network, by the part over which batch norm takes its statistics; none for all replicas.
    """
    if num_replicas == 1:
        return
    comm.broadcast(network.buffers(), source, group)
    _average_over(network, RankAverages, num_replicas, group)
    if parts:
        (own,) = (part for part in parts if comm.rank() in part)
        near = division.partition(parts) if max(map(len, parts)) > 1 else None
        for norm in _average_over(network, BatchStatistics, len(own), near):
            norm.is_partial = True


def _average_over(network: LayerStack, kind: type[Kind], num: int, group: dist.ProcessGroup | None) -> list[Kind]:
    layers = [module for module in network.modules() if isinstance(module, kind)]
    for layer in layers:
        layer.average_over_ranks = partial(mean_over_ranks, group=group) if num > 1 else None
        layer.num_ranks = num
    return layers


def partial_statistics(network: LayerStack) -> list[Tensor]:
    """Return the running statistics that ``share`` has to average."""
    norms = [module for module in network.modules() if isinstance(module, BatchStatistics) and module.is_partial]
    return [statistics for norm in norms for statistics in (norm.running_mean, norm.running_var)]


@torch.no_grad()
def share(statistics: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Replace running statistics by their mean over all replicas, in one message. Every replica calls this."""
    flat = mean_over_ranks(torch.cat(list(statistics)), group)
    torch._foreach_copy_(list(statistics), flat.split([len(each) for each in statistics]))
