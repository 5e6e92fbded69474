"""Generator inputs that depend on the real images that the discriminator sees.

Shapes: n samples of one micro-batch on one replica, Z numbers in a latent, C_in and C channels of input and target, H x
W pixels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from bigsgan.adversarial.latents import DataSource, Inputs, InputSource, LatentSource, Reals, SampleDraws
from bigsgan.config import Recipe
from bigsgan.data import LabelledImages, RealImages, Slice
from bigsgan.data.conditions import Conditions
from bigsgan.engines import MicroBatch

_LEAST_TIME = 1e-3
"""An error of an estimate is divided by the time: below, it would be that of float32's rounding."""


def build_source(
    recipe: Recipe, draws: SampleDraws, conditions: Conditions, own: RealImages | None = None
) -> InputSource:
    """Make the source that a recipe asks for.

    Args:
        recipe: The run's recipe.
        draws: Draws latents and seeds.
        conditions: What samples from latents are conditioned on.
        own: Reads the data for G if G and D compute different samples on this rank; the source closes it.
    """
    if recipe.data.paired:
        return PairSource(draws, recipe.input_channels, recipe.generator.draws, own)
    if recipe.translates:
        return ImageSource(draws, recipe.input_channels, recipe.generator.draws, own)
    if recipe.adds_noise:
        return NoisySource(draws, recipe, own)
    drawn = draws, recipe.latent_size
    seeded, timed = recipe.generator.draws, recipe.generator.reads_times
    if recipe.objective.fake_labels == "data":
        return LatentsOfClasses(LatentSource(*drawn, range(1), seeded, timed), own)  # whose labels nobody reads
    return LatentSource(*drawn, conditions, seeded, timed, recipe.data.condition_dropout)


class LatentsOfClasses(DataSource):
    """Draws latents (n, Z) as ``LatentSource`` does, with the labels (n,) of the real images that D sees with them."""

    def __init__(self, latents: LatentSource, own: RealImages | None = None) -> None:
        super().__init__(own)
        self._latents = latents

    def inputs(self, stream: str, counters: tuple[int, ...], slices: dict[str, Slice], reals: Reals) -> Inputs:
        """Return latents, labels and, for a generator that draws noise, seeds; labels for D. See ``InputSource``."""
        drawn, batches = self._latents.phase(stream, counters, slices["generator"]), self._of_generator(reals)

        def generator(index: int) -> MicroBatch:
            latents, _, *seeds = drawn(index)
            return latents, batches()[index].labels, *seeds

        latents = self._latents.latents(drawn, stream, counters, slices)
        return Inputs(generator, lambda index: (reals()[index].labels,), latents)


class NoisySource(DataSource):
    """Mixes real images x (n, C, H, W) with noise z: (1 - t) x + t z (n, C * H * W), with the images' labels.

    Times t are those of flow matching, or of the generator's steps.
    """

    def __init__(self, draws: SampleDraws, recipe: Recipe, own: RealImages | None = None) -> None:
        super().__init__(own)
        generator: Any = recipe.generator
        self._draws, self._seeded, self._flow = draws, generator.draws, recipe.objective.flow
        self._of_steps = torch.tensor(generator.step_times)

    def inputs(self, stream: str, counters: tuple[int, ...], slices: dict[str, Slice], reals: Reals) -> Inputs:
        """Return images with noise, labels, times t (n,) and, for a generator that draws, seeds."""
        part, images = slices["generator"], self._of_generator(reals)

        @functools.cache  # a repeated forward pass reads the same tensors
        def generator(index: int) -> MicroBatch:
            batch, samples = images()[index], part.positions(index)
            x, labels = batch.images.flatten(1), batch.labels
            noise = self._draws.normal(f"{stream}/latent", counters, samples, x.shape[1:])
            times = self._drawn_times(f"{stream}/time", counters, samples)
            seeds = (self._draws.seeds(f"{stream}/seed", counters, samples),) if self._seeded else ()
            return torch.lerp(x.float(), noise, times[:, None]), labels, times, *seeds

        return Inputs(generator, lambda index: (reals()[index].labels,))

    def _drawn_times(self, stream: str, counters: tuple[int, ...], samples: range) -> Tensor:
        if self._flow is not None and self._flow.times == "logit_normal":
            return self._draws.normal(stream, counters, samples, ()).sigmoid().clamp(min=_LEAST_TIME)
        drawn = self._draws.uniform(stream, counters, samples, ())
        if self._flow is not None:
            return drawn.clamp(min=_LEAST_TIME)
        self._of_steps = self._of_steps.to(drawn.device)
        return self._of_steps[(drawn * len(self._of_steps)).ceil().long() - 1]


class ImageSource(DataSource):
    """Takes the generator's inputs from the data: the first C_in channels of its images, by default all."""

    def __init__(
        self, draws: SampleDraws, input_channels: int, seeded: bool = False, own: RealImages | None = None
    ) -> None:
        """Take C_in channels of an image, and draw seeds for a generator that draws, such as with dropout."""
        super().__init__(own)
        self._draws, self._input_channels, self._seeded = draws, input_channels, seeded

    def inputs(self, stream: str, counters: tuple[int, ...], slices: dict[str, Slice], reals: Reals) -> Inputs:
        """Return input images, labels and maybe seeds for G, and D's conditions; see ``InputSource``."""
        part, images = slices["generator"], self._of_generator(reals)

        def generator(index: int) -> MicroBatch:
            read, labels = images()[index]
            seeds = (self._draws.seeds(f"{stream}/seed", counters, part.positions(index)),) if self._seeded else ()
            return self._input(read), labels, *seeds

        return Inputs(generator, lambda index: self.real(reals()[index])[1:])

    def _input(self, images: Tensor) -> Tensor:
        return images[:, : self._input_channels]


class PairSource(ImageSource):
    """Takes the generator's inputs from pairs (n, C_in + C, H, W), an input's channels before its target's."""

    def real(self, batch: LabelledImages) -> MicroBatch:
        """Return targets, labels, inputs."""
        return batch.images[:, self._input_channels :], batch.labels, self._input(batch.images)
