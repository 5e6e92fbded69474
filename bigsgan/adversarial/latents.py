"""Latents, labels and noise: functions of (seed, stream, update, step, global sample index), never of the rank.

Shapes: n samples of one micro-batch on one replica, Z numbers in a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from bigsgan.data import LabelledImages
from bigsgan.data.order import Stretch, phase_positions
from bigsgan.draws import Draws
from bigsgan.engines.sequences import Kept, MicroBatch, MicroBatches, OnDemand

Reals = Callable[[], list[LabelledImages]]
"""Gives the real micro-batches of a phase."""


class Slice(NamedTuple):
    """Which part of a batch a replica of a network computes."""

    batch: int
    accumulation: int
    replica: int
    num_replicas: int

    @property
    def num_global_samples(self) -> int:
        """Samples in each micro-batch over all replicas."""
        return self.batch // self.accumulation

    @property
    def num_samples(self) -> int:
        """Samples in each micro-batch."""
        return self.num_global_samples // self.num_replicas

    def positions(self, j: int) -> range:
        """Global sample indices of micro-batch ``j``."""
        return phase_positions(0, self.batch, self.accumulation, j, self.replica, self.num_replicas)


class SampleDraws:
    """Random numbers of one replica's micro-batches, on its device."""

    def __init__(self, draws: Draws, device: torch.device) -> None:
        self._draws, self._device = draws, device

    def normal(self, stream: str, counters: tuple[int, ...], part: Slice, shape: tuple[int, ...]) -> Sequence[Tensor]:
        """Standard normal numbers (n, *shape) float32 for each micro-batch."""

        def draw(j: int) -> Tensor:
            positions = part.positions(j)
            drawn = self._draws.normal(stream, counters, positions.start, len(positions), int(np.prod(shape)))
            return self._move(drawn).view(-1, *shape)

        return OnDemand(part.accumulation, draw)

    def uniform(self, stream: str, counters: tuple[int, ...], part: Slice, shape: tuple[int, ...]) -> Sequence[Tensor]:
        """Numbers (n, *shape) float32, uniform in (0, 1], for each micro-batch."""

        def draw(j: int) -> Tensor:
            positions = part.positions(j)
            drawn = self._draws.uniform(stream, counters, positions.start, len(positions), int(np.prod(shape)))
            return self._move(drawn.astype(np.float32)).view(-1, *shape)

        return OnDemand(part.accumulation, draw)

    def labels(self, stream: str, counters: tuple[int, ...], part: Slice, num_classes: int) -> Sequence[Tensor]:
        """Labels (n,) int64, uniform over the classes, for each micro-batch."""
        return self._integers(part, lambda p: self._draws.integers(stream, counters, p.start, len(p), num_classes))

    def seeds(self, stream: str, counters: tuple[int, ...], part: Slice) -> Sequence[Tensor]:
        """Seeds (n,) int64 for each micro-batch, from which layers draw on the device."""
        return self._integers(part, lambda p: self._draws.seeds(stream, counters, p.start, len(p)))

    def _integers(self, part: Slice, draw: Callable[[range], np.ndarray]) -> Sequence[Tensor]:
        return Kept(part.accumulation, lambda j: self._move(draw(part.positions(j))))

    def _move(self, drawn: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(drawn)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


class Inputs(NamedTuple):
    """What the networks read in one phase on this rank, beside real images.

    Attributes:
        generator: G's inputs.
        conditions: By micro-batch, what D reads beside G's images.
    """

    generator: MicroBatches
    conditions: Sequence[tuple[Tensor, ...]]


class InputSource(Protocol):
    """Where a phase's inputs come from."""

    def inputs(self, stream: str, counters: tuple[int, ...], slices: dict[str, Slice], reals: Reals) -> Inputs:
        """Give what the networks read.

        Args:
            stream: Name of what is drawn.
            counters: Where in the run.
            slices: What each network computes.
            reals: The phase's micro-batches of the data, on ranks that read D's inputs.
        """
        ...

    def real(self, batch: LabelledImages) -> MicroBatch:
        """What D reads of a micro-batch of the data: images, and what else it reads beside them."""
        ...

    def rewind(self, position: int, skipped: Sequence[Stretch]) -> None:
        """Resume at another position of the data, of which ``skipped`` are passed over."""
        ...

    def close(self) -> None:
        """Release what it reads from."""
        ...


class LatentSource:
    """Draws the inputs of a generator of images from latents.

    Its inputs are latents (n, Z) float32 standard normal, labels (n,) int64 and, for one that draws noise of its own,
    seeds (n,) int64.
    """

    def __init__(self, draws: SampleDraws, latent_size: int, num_classes: int, seeded: bool = False) -> None:
        self._draws, self._latent_size, self._num_classes = draws, latent_size, max(num_classes, 1)
        self._seeded = seeded

    def phase(self, stream: str, counters: tuple[int, ...], part: Slice) -> MicroBatches:
        """The generator's inputs in one phase."""
        latents = self._draws.normal(f"{stream}/latent", counters, part, (self._latent_size,))
        entries = [latents, self._labels(stream, counters, part)]
        if self._seeded:
            entries.append(self._draws.seeds(f"{stream}/seed", counters, part))
        made = Kept(part.accumulation, lambda j: tuple(entry[j] for entry in entries))
        return MicroBatches(part.accumulation, part.num_samples, made.__getitem__)

    def inputs(self, stream: str, counters: tuple[int, ...], slices: dict[str, Slice], reals: Reals) -> Inputs:
        """The same with the labels that D reads; see ``InputSource``."""
        labels = self._labels(stream, counters, slices["discriminator"])
        conditions = OnDemand(len(labels), lambda j: (labels[j],))
        return Inputs(self.phase(stream, counters, slices["generator"]), conditions)

    def real(self, batch: LabelledImages) -> MicroBatch:
        """Images and labels."""
        return tuple(batch)

    def rewind(self, position: int, skipped: Sequence[Stretch]) -> None:
        """Do nothing: its draws depend on the update alone."""

    def close(self) -> None:
        """Do nothing: it only draws."""

    def _labels(self, stream: str, counters: tuple[int, ...], part: Slice) -> Sequence[Tensor]:
        return self._draws.labels(f"{stream}/label", counters, part, self._num_classes)
