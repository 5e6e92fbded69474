"""Latents, labels and noise: functions of (seed, stream, update, step, global sample index), never of the rank.

Shapes: n samples of one micro-batch on one replica, Z numbers in a latent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from bigsgan.data import LabelledImages, Slice
from bigsgan.data.order import Stretch
from bigsgan.draws import Draws
from bigsgan.engines import MicroBatch

Reals = Callable[[], list[LabelledImages]]
"""Gives the real micro-batches of a phase."""


class SampleDraws:
    """Random numbers of one micro-batch of a replica, on its device."""

    def __init__(self, draws: Draws, device: torch.device) -> None:
        self._draws, self._device = draws, device

    def normal(self, stream: str, counters: tuple[int, ...], samples: range, shape: tuple[int, ...]) -> Tensor:
        """Standard normal numbers (n, *shape) float32."""
        drawn = self._draws.normal(stream, counters, samples.start, len(samples), int(np.prod(shape)))
        return self._move(drawn).view(-1, *shape)

    def uniform(self, stream: str, counters: tuple[int, ...], samples: range, shape: tuple[int, ...]) -> Tensor:
        """Numbers (n, *shape) float32, uniform in (0, 1]."""
        drawn = self._draws.uniform(stream, counters, samples.start, len(samples), int(np.prod(shape)))
        return self._move(drawn.astype(np.float32)).view(-1, *shape)

    def labels(self, stream: str, counters: tuple[int, ...], samples: range, num_classes: int) -> Tensor:
        """Labels (n,) int64, uniform over the classes."""
        return self._move(self._draws.integers(stream, counters, samples.start, len(samples), num_classes))

    def seeds(self, stream: str, counters: tuple[int, ...], samples: range) -> Tensor:
        """Seeds (n,) int64, from which layers draw on the device."""
        return self._move(self._draws.seeds(stream, counters, samples.start, len(samples)))

    def _move(self, drawn: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(drawn)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


class Inputs(NamedTuple):
    """What the networks read in one phase on this rank, beside real images; by number of the micro-batch."""

    generator: Callable[[int], MicroBatch]  # G's inputs
    conditions: Callable[[int], MicroBatch]  # what D reads beside G's images


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

    def phase(self, stream: str, counters: tuple[int, ...], part: Slice) -> Callable[[int], MicroBatch]:
        """The generator's inputs in one phase, by number of the micro-batch."""

        @functools.cache  # a forward pass that is repeated reads the same tensors
        def inputs(index: int) -> MicroBatch:
            samples = part.positions(index)
            latents = self._draws.normal(f"{stream}/latent", counters, samples, (self._latent_size,))
            labels = self._labels(stream, counters, samples)
            if not self._seeded:
                return latents, labels
            return latents, labels, self._draws.seeds(f"{stream}/seed", counters, samples)

        return inputs

    def inputs(self, stream: str, counters: tuple[int, ...], slices: dict[str, Slice], reals: Reals) -> Inputs:
        """The same with the labels that D reads; see ``InputSource``."""
        judged = slices["discriminator"]

        @functools.cache
        def conditions(index: int) -> MicroBatch:
            return (self._labels(stream, counters, judged.positions(index)),)

        return Inputs(self.phase(stream, counters, slices["generator"]), conditions)

    def real(self, batch: LabelledImages) -> MicroBatch:
        """Images and labels."""
        return tuple(batch)

    def rewind(self, position: int, skipped: Sequence[Stretch]) -> None:
        """Do nothing: its draws depend on the update alone."""

    def close(self) -> None:
        """Do nothing: it only draws."""

    def _labels(self, stream: str, counters: tuple[int, ...], samples: range) -> Tensor:
        return self._draws.labels(f"{stream}/label", counters, samples, self._num_classes)
