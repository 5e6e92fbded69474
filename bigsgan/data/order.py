"""The order of real images, their crops and their flips: functions of the global position only.

A run reads images at the positions 0, 1, 2, ... for any number of ranks, so every layout trains on the same images in
the same batches. A phase, one discriminator step, takes the next ``batch`` positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from bigsgan.draws import Draws
from bigsgan.errors import counted
from bigsgan.images.size import Size

Stretch: TypeAlias = tuple[int, int]
"""An interval of positions: the first, and the one after the last."""


class Slice(NamedTuple):
    """The part of a batch that a replica computes: a contiguous range of each micro-batch."""

    batch: int  # images of a phase, over all micro-batches and replicas
    accumulation: int  # micro-batches of a phase
    replica: int  # index of the replica
    num_replicas: int  # number of replicas

    @property
    def num_samples(self) -> int:
        """Images in each micro-batch of the replica.

        Raises:
            ValueError: The batch does not divide into ``accumulation * num_replicas`` parts.
        """
        num = self.accumulation * self.num_replicas
        if self.batch % num:
            parts, ranks = counted(self.accumulation, "micro-batch"), counted(self.num_replicas, "rank")
            problem = f"does not divide into {parts} on {ranks}"
            raise ValueError(f"batch {self.batch} {problem}")
        return self.batch // num

    def positions(self, micro_batch: int, start: int = 0) -> range:
        """Global positions of one micro-batch, in the phase that begins at position ``start``."""
        size = self.num_samples
        first = start + (micro_batch * self.num_replicas + self.replica) * size
        return range(first, first + size)


def phase_start(position: int, batch: int, skipped: Sequence[Stretch]) -> int:
    """Return a phase's first position: ``position``, or one after the ``skipped`` intervals that it would overlap."""
    for first, end in skipped:
        if position < end and first < position + batch:
            position = end
    return position


class EpochOrder:
    """The index of the image at each position: a new permutation of all images in every epoch.

    A batch that reaches the end of an epoch continues in the next one.
    """

    def __init__(self, draws: Draws, length: int) -> None:
        self.length = length
        # Two epochs, because a batch may cross the end of an epoch and every rank computes the whole permutation.
        self._permutation = lru_cache(maxsize=2)(lambda epoch: draws.permutation("order", (epoch,), length))

    def indices(self, positions: range) -> np.ndarray:
        """Return the indices of the images at contiguous positions: int64 (n,)."""
        epochs, offsets = np.divmod(np.arange(positions.start, positions.stop), self.length)
        found = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = self._permutation(int(epoch))[offsets[here]]
        return found


def horizontal_flips(draws: Draws, positions: range) -> np.ndarray:
    """Return whether the image at each position is mirrored, with probability 1/2: bool (n,)."""
    return draws.integers("flip", (), positions.start, len(positions), 2) == 1


def drops_condition(draws: Draws, positions: range, probability: float) -> np.ndarray:
    """Return whether the image at each position loses its label: bool (n,)."""
    return draws.uniform("condition", (), positions.start, len(positions), 1)[:, 0] < probability


def random_crops(draws: Draws, positions: range, margins: Size) -> np.ndarray:
    """Return the rows and columns to cut off at the top and left of each image, 0 to ``margins``: int64 (n, 2)."""
    sides = [
        draws.integers(f"crop/{side}", (), positions.start, len(positions), margin + 1)
        for side, margin in zip(("top", "left"), margins, strict=True)
    ]
    return np.stack(sides, axis=1)


def posterior_noise(draws: Draws, positions: range, num: int) -> np.ndarray:
    """Return standard normal numbers, float32 (n, num), by which the latents at these positions are drawn."""
    return draws.normal("posterior", (), positions.start, len(positions), num)
