"""Latents, labels and noise: functions of (seed, stream, update, step, global sample index), never of the rank.

Shapes: n samples of one micro-batch on one rank, Z numbers in a latent.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bigsgan.data.order import phase_positions
from bigsgan.draws import Draws
from bigsgan.engines.base import MicroBatch


class Slice(NamedTuple):
    """Which part of a batch a rank computes."""

    batch: int
    accumulation: int
    rank: int
    world_size: int

    def positions(self) -> list[range]:
        """Global sample indices of each of this rank's micro-batches."""
        return [
            phase_positions(0, self.batch, self.accumulation, j, self.rank, self.world_size)
            for j in range(self.accumulation)
        ]


class LatentSource:
    """Draws the generator's inputs for this rank."""

    def __init__(self, draws: Draws, latent_size: int, num_classes: int, device: torch.device) -> None:
        self._draws, self._latent_size, self._num_classes, self._device = draws, latent_size, num_classes, device

    def phase(self, stream: str, counters: tuple[int, ...], part: Slice) -> list[MicroBatch]:
        """Micro-batches of latents (n, Z) float32 standard normal and labels (n,) int64 uniform over the classes."""
        return [self._inputs(stream, counters, positions) for positions in part.positions()]

    def noise(self, stream: str, counters: tuple[int, ...], part: Slice, shape: tuple[int, ...]) -> list[Tensor]:
        """Standard normal noise (n, *shape) float32 for each micro-batch."""
        width = int(np.prod(shape))
        drawn = [self._draws.normal(stream, counters, p.start, len(p), width) for p in part.positions()]
        return [self._move(torch.from_numpy(d)).view(-1, *shape) for d in drawn]

    def grid(self, rows: int, columns: int) -> MicroBatch:
        """Fixed inputs of a sample grid, row by row; a column is a class where there are classes."""
        num = rows * columns
        latents = torch.from_numpy(self._draws.normal("grid", (), 0, num, self._latent_size))
        labels = torch.arange(columns).repeat(rows) % max(self._num_classes, 1)
        return self._move(latents), self._move(labels)

    def _inputs(self, stream: str, counters: tuple[int, ...], positions: range) -> MicroBatch:
        first, num = positions.start, len(positions)
        latents = torch.from_numpy(self._draws.normal(f"{stream}/latent", counters, first, num, self._latent_size))
        classes = max(self._num_classes, 1)
        labels = torch.from_numpy(self._draws.integers(f"{stream}/label", counters, first, num, classes))
        return self._move(latents), self._move(labels)

    def _move(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
