"""Inputs of a generator that translates images: the inputs of the pairs that the discriminator sees.

Shapes: n samples of one micro-batch on one replica, C_in and C channels of input and target, R pixels a side.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from bigsgan.adversarial.latents import Inputs, Reals, SampleDraws
from bigsgan.data import LabelledImages, RealImages, Slice
from bigsgan.data.order import Stretch
from bigsgan.engines import MicroBatch


class PairSource:
    """Takes the generator's inputs from pairs (n, C_in + C, R, R), an input's channels before its target's."""

    def __init__(self, draws: SampleDraws, input_channels: int, own: RealImages | None = None) -> None:
        """Begin at the first phase that ``own`` gives.

        Args:
            draws: Of seeds for dropout.
            input_channels: C_in.
            own: Reads G's pairs where G and D compute different samples on this rank; closed with this source.
        """
        self._draws, self._input_channels, self._own = draws, input_channels, own

    def inputs(self, stream: str, counters: tuple[int, ...], slices: dict[str, Slice], reals: Reals) -> Inputs:
        """Input images, labels and seeds for G, labels and input images for D; see ``InputSource``."""
        part = slices["generator"]
        pairs = reals if self._own is None else functools.cache(self._own.next_phase)

        def generator(index: int) -> MicroBatch:
            images, labels = pairs()[index]
            return self._input(images), labels, self._draws.seeds(f"{stream}/seed", counters, part.positions(index))

        def conditions(index: int) -> MicroBatch:
            images, labels = reals()[index]
            return labels, self._input(images)

        return Inputs(generator, conditions)

    def real(self, batch: LabelledImages) -> MicroBatch:
        """Targets, labels, inputs."""
        return batch.images[:, self._input_channels :], batch.labels, self._input(batch.images)

    def rewind(self, position: int, skipped: Sequence[Stretch]) -> None:
        """Resume at another position of the data, of which ``skipped`` are passed over."""
        if self._own is not None:
            self._own.rewind(position, skipped)

    def close(self) -> None:
        """End the loading processes of a reader of its own."""
        if self._own is not None:
            self._own.close()

    def _input(self, images: Tensor) -> Tensor:
        return images[:, : self._input_channels]
