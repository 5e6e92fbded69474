"""Latents, labels and noise: functions of (seed, stream, update, step, global sample index), never of the rank.

Shapes: n samples of one micro-batch on one replica, Z numbers in a latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bigsgan.data.order import phase_positions
from bigsgan.draws import Draws
from bigsgan.engines.sequences import Kept, MicroBatch, MicroBatches, OnDemand


class Slice(NamedTuple):
    """Which part of a batch a replica of a network computes."""

    batch: int
    accumulation: int
    replica: int
    num_replicas: int

    @property
    def num_samples(self) -> int:
        """Samples in each micro-batch."""
        return self.batch // (self.accumulation * self.num_replicas)

    def positions(self, j: int) -> range:
        """Global sample indices of micro-batch ``j``."""
        return phase_positions(0, self.batch, self.accumulation, j, self.replica, self.num_replicas)


class LatentSource:
    """Draws the generator's inputs for one replica."""

    def __init__(self, draws: Draws, latent_size: int, num_classes: int, device: torch.device) -> None:
        self._draws, self._latent_size, self._num_classes, self._device = draws, latent_size, num_classes, device

    def phase(self, stream: str, counters: tuple[int, ...], part: Slice) -> MicroBatches:
        """Micro-batches of latents (n, Z) float32 standard normal and labels (n,) int64 uniform over the classes."""
        labels = self.labels(stream, counters, part)

        def draw(j: int) -> MicroBatch:
            return self._normal(f"{stream}/latent", counters, part.positions(j), (self._latent_size,)), labels[j]

        return MicroBatches(part.accumulation, part.num_samples, Kept(part.accumulation, draw).__getitem__)

    def labels(self, stream: str, counters: tuple[int, ...], part: Slice) -> Sequence[Tensor]:
        """The labels of ``phase`` alone."""
        classes = max(self._num_classes, 1)

        def draw(j: int) -> Tensor:
            positions = part.positions(j)
            drawn = self._draws.integers(f"{stream}/label", counters, positions.start, len(positions), classes)
            return self._move(torch.from_numpy(drawn))

        return Kept(part.accumulation, draw)

    def noise(self, stream: str, counters: tuple[int, ...], part: Slice, shape: tuple[int, ...]) -> Sequence[Tensor]:
        """Standard normal noise (n, *shape) float32 for each micro-batch."""
        return OnDemand(part.accumulation, lambda j: self._normal(stream, counters, part.positions(j), shape))

    def grid(self, rows: int, columns: int) -> MicroBatch:
        """Fixed inputs of a sample grid, row by row; a column is a class where there are classes."""
        num = rows * columns
        latents = torch.from_numpy(self._draws.normal("grid", (), 0, num, self._latent_size))
        labels = torch.arange(columns).repeat(rows) % max(self._num_classes, 1)
        return self._move(latents), self._move(labels)

    def _normal(self, stream: str, counters: tuple[int, ...], positions: range, shape: tuple[int, ...]) -> Tensor:
        drawn = self._draws.normal(stream, counters, positions.start, len(positions), int(np.prod(shape)))
        return self._move(torch.from_numpy(drawn)).view(-1, *shape)

    def _move(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
