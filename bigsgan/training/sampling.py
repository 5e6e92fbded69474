"""Images from a generator: standing statistics and fixed inputs, for one that an engine holds or a plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bigsgan.engines.sequences import MicroBatch
from bigsgan.models.layers import BatchStatistics
from bigsgan.models.network import LayerStack

STANDING_BATCHES = 16
UNCONDITIONAL_COLUMNS = 10
MAX_COLUMNS = 16

Infer = Callable[[MicroBatch, bool], Tensor]
"""(inputs, moving) -> images on every rank, without a graph."""


def stand_statistics(network: LayerStack, infer: Infer, batches: Sequence[MicroBatch]) -> None:
    """Replace the running statistics by the mean over fresh batches (Brock et al. 2019, section 4.1).

    The power iterations move along, so that the norms of an average's weights are their own and not the live ones'.
    """
    norms = [module for module in network.modules() if isinstance(module, BatchStatistics)]
    momenta = [norm.momentum for norm in norms]
    network.train()
    try:
        for i, batch in enumerate(batches):
            for norm in norms:
                norm.momentum = 1.0 / (i + 1)  # a cumulative mean: the first batch replaces what was there
            infer(batch, True)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def sample(network: LayerStack, infer: Infer, inputs: MicroBatch, chunk: int) -> Tensor:
    """Images (n, C, H, W) in [-1, 1] from running statistics, ``chunk`` at a time, on the host."""
    network.eval()
    try:
        pieces = zip(*(tensor.split(chunk) for tensor in inputs), strict=True)
        return torch.cat([infer(piece, False).cpu() for piece in pieces])
    finally:
        network.train()


def grid_columns(num_classes: int) -> int:
    """Columns of a sample grid: one for each class, while they fit."""
    return min(num_classes, MAX_COLUMNS) if num_classes else UNCONDITIONAL_COLUMNS
