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

from bigsgan.data import LabelledImages, RealImages, Slice
from bigsgan.data.conditions import Conditions, picked, without
from bigsgan.data.order import Stretch
from bigsgan.draws import Draws
from bigsgan.engines import MicroBatch
from bigsgan.models import noise

_IMAGES = 0
"""The stream of a sample's seed from which noise of images comes."""

Reals = Callable[[], list[LabelledImages]]
"""Returns the real micro-batches of a phase."""


class SampleDraws:
    """Draws random numbers for one micro-batch of a replica, on its device."""

    def __init__(self, draws: Draws, device: torch.device) -> None:
        self._draws, self._device = draws, device

    def normal(self, stream: str, counters: tuple[int, ...], samples: range, shape: tuple[int, ...]) -> Tensor:
        """Draw standard normal numbers (n, *shape) float32 on the host."""
        drawn = self._draws.normal(stream, counters, samples.start, len(samples), int(np.prod(shape)))
        return self._move(drawn).view(-1, *shape)

    def noise(self, stream: str, counters: tuple[int, ...], samples: range, shape: tuple[int, ...]) -> Tensor:
        """Draw noise of images (n, *shape) float32, standard normal, on the device from a seed of each sample."""
        return noise.normal(self.seeds(stream, counters, samples), _IMAGES, shape)

    def uniform(self, stream: str, counters: tuple[int, ...], samples: range, shape: tuple[int, ...]) -> Tensor:
        """Draw numbers (n, *shape) float32, uniform in (0, 1]."""
        drawn = self._draws.uniform(stream, counters, samples.start, len(samples), int(np.prod(shape)))
        return self._move(drawn.astype(np.float32)).view(-1, *shape)

    def labels(
        self, stream: str, counters: tuple[int, ...], samples: range, conditions: Conditions, dropout: float = 0.0
    ) -> Tensor:
        """Draw labels, uniform over the conditions: (n,) int64 or (n, K) float32, null with a probability."""
        places = self._draws.integers(stream, counters, samples.start, len(samples), len(conditions))
        found = picked(conditions, places)
        if dropout:
            drawn = self._draws.uniform(f"{stream}/null", counters, samples.start, len(samples), 1)
            found = without(found, drawn[:, 0] < dropout)
        return self._moved(found)

    def seeds(self, stream: str, counters: tuple[int, ...], samples: range) -> Tensor:
        """Draw seeds (n,) int64, from which layers draw on the device."""
        return self._move(self._draws.seeds(stream, counters, samples.start, len(samples)))

    def _move(self, drawn: np.ndarray) -> Tensor:
        return self._moved(torch.from_numpy(drawn))

    def _moved(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


class Inputs(NamedTuple):
    """The networks' inputs in one phase on this rank, except real images; by number of the micro-batch."""

    generator: Callable[[int], MicroBatch]  # G's inputs
    conditions: Callable[[int], MicroBatch]  # D's inputs beside G's images
    # The latents (n, Z) of the images that D sees; None of a generator from images.
    latents: Callable[[int], Tensor] | None = None
    # Makes what G's inputs depend on, before the first phase. All ranks that hold a part of G call it together.
    prepare: Callable[[], None] | None = None


class InputSource(Protocol):
    """The source of a phase's inputs."""

    def inputs(self, stream: str, counters: tuple[int, ...], slices: dict[str, Slice], reals: Reals) -> Inputs:
        """Return the inputs of the networks.

        Args:
            stream: Name of the stream of random numbers.
            counters: The phase's place in the run.
            slices: The samples that each network computes.
            reals: Returns the phase's micro-batches of the data, on ranks that read D's inputs.
        """

    def real(self, batch: LabelledImages) -> MicroBatch:
        """Return D's inputs for a micro-batch of the data: images, labels, and input images if there are any."""

    def rewind(self, position: int, skipped: Sequence[Stretch]) -> None:
        """Resume at another position of the data, and pass over the stretches ``skipped``."""

    def close(self) -> None:
        """Release the source's readers."""


class DataSource:
    """Base of sources: takes D's inputs from the data, and owns the reader of G's data, if there is one."""

    def __init__(self, own: RealImages | None = None) -> None:
        """Begin at the first phase of ``own``, which reads the data for G if G and D compute different samples here."""
        self._own = own

    def real(self, batch: LabelledImages) -> MicroBatch:
        """Return images and labels."""
        return tuple(batch)

    def rewind(self, position: int, skipped: Sequence[Stretch]) -> None:
        """Resume at another position of the data, and pass over the stretches ``skipped``."""
        if self._own is not None:
            self._own.rewind(position, skipped)

    def close(self) -> None:
        """End the loading processes of ``own``."""
        if self._own is not None:
            self._own.close()

    def _of_generator(self, reals: Reals) -> Reals:
        """Return the data for G's inputs: the micro-batches that D sees on this rank, unless G computes others.

        These are read at once, on each rank that reads some: a stage may not ask for those of each phase.
        """
        if self._own is None or not self._own.reads:
            return reals
        read = self._own.next_phase()
        return lambda: read


class LatentSource(DataSource):
    """Draws the inputs of a generator that makes images from latents.

    The inputs are latents (n, Z) float32 standard normal, labels (n,) int64 or (n, K) float32, times (n,) of 1, if the
    generator reads some, and seeds (n,) int64, if it draws noise. Vectors are null with the probability ``dropout``.
    If they are ``judged``, D reads the latents too, 0 for real images.
    """

    def __init__(
        self,
        draws: SampleDraws,
        latent_size: int,
        conditions: Conditions,
        seeded: bool = False,
        timed: bool = False,
        dropout: float = 0.0,
        judged: bool = False,
    ) -> None:
        super().__init__()
        self._draws, self._latent_size, self._conditions = draws, latent_size, conditions
        self._seeded, self._timed, self._dropout, self._judged = seeded, timed, dropout, judged

    def phase(self, stream: str, counters: tuple[int, ...], part: Slice) -> Callable[[int], MicroBatch]:
        """Return the generator's inputs in one phase, by number of the micro-batch."""

        @functools.cache  # a repeated forward pass reads the same tensors
        def inputs(index: int) -> MicroBatch:
            samples = part.positions(index)
            latents = self._draws.normal(f"{stream}/latent", counters, samples, (self._latent_size,))
            times = (latents.new_ones(len(latents)),) if self._timed else ()
            seeds = (self._draws.seeds(f"{stream}/seed", counters, samples),) if self._seeded else ()
            return latents, self._labels(stream, counters, samples), *times, *seeds

        return inputs

    def inputs(self, stream: str, counters: tuple[int, ...], slices: dict[str, Slice], reals: Reals) -> Inputs:
        """Return G's inputs and the labels that D reads; see ``InputSource``."""
        part, generator = slices["discriminator"], self.phase(stream, counters, slices["generator"])
        latents = self.latents(generator, stream, counters, slices)

        @functools.cache
        def conditions(index: int) -> MicroBatch:
            labels = self._labels(stream, counters, part.positions(index))
            return self.conditions(labels, latents, index)

        return Inputs(generator, conditions, latents)

    def real(self, batch: LabelledImages) -> MicroBatch:
        """Return images and labels, and what stands for latents."""
        images, labels = batch
        return (images, labels, images.new_zeros(len(images), self._latent_size)) if self._judged else (images, labels)

    def conditions(self, labels: Tensor, latents: Callable[[int], Tensor], index: int) -> MicroBatch:
        """Return what D reads beside a micro-batch of G's images: labels, and the latents if they are judged."""
        return (labels, latents(index)) if self._judged else (labels,)

    def latents(
        self, generator: Callable[[int], MicroBatch], stream: str, counters: tuple[int, ...], slices: dict[str, Slice]
    ) -> Callable[[int], Tensor]:
        """Return those of the images that D sees; G's inputs have them where both compute the same samples."""
        is_same = slices["generator"] == slices["discriminator"]
        seen = generator if is_same else self.phase(stream, counters, slices["discriminator"])
        return lambda index: seen(index)[0]

    def _labels(self, stream: str, counters: tuple[int, ...], samples: range) -> Tensor:
        return self._draws.labels(f"{stream}/label", counters, samples, self._conditions, self._dropout)
