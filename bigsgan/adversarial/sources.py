"""Generator inputs that depend on the real images that the discriminator sees.

Shapes: n samples of one micro-batch on one replica, Z numbers in a latent, C_in and C channels of input and target, H x
W pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bigsgan.adversarial.latents import DataSource, Inputs, InputSource, LatentSource, Reals, SampleDraws
from bigsgan.config import Recipe
from bigsgan.data import LabelledImages, RealImages, Slice
from bigsgan.data.conditions import Conditions
from bigsgan.engines import MicroBatch
from bigsgan.models.steps import with_less_noise

_LEAST_TIME = 1e-3
"""An error of an estimate is divided by the time: below, it would be that of float32's rounding."""

Infer = Callable[[MicroBatch], Tensor]
"""Makes images (n, C, H, W) of G's inputs on all ranks that hold a part of G, without a graph."""


def build_source(
    recipe: Recipe,
    draws: SampleDraws,
    conditions: Conditions,
    own: RealImages | None = None,
    infer: Infer | None = None,
) -> InputSource:
    """Make the source that a recipe asks for.

    Args:
        recipe: The run's recipe.
        draws: Draws latents and seeds.
        conditions: What samples from latents are conditioned on.
        own: Reads the data for G if G and D compute different samples on this rank; the source closes it.
        infer: Makes images; None on ranks that hold no part of G.
    """
    if recipe.data.paired:
        return PairSource(draws, recipe.input_channels, recipe.generator.draws, own)
    if recipe.translates:
        return ImageSource(draws, recipe.input_channels, recipe.generator.draws, own)
    if recipe.adds_noise:
        return NoisySource(draws, recipe, own)
    is_of_data, judged = recipe.objective.fake_labels == "data", recipe.discriminator_reads_latents
    seeded, timed, dropout = recipe.generator.draws, recipe.generator.reads_times, recipe.data.condition_dropout
    labels = range(1) if is_of_data else conditions  # of which nobody reads those
    latents = LatentSource(draws, recipe.latent_size, labels, seeded, timed, dropout, judged)
    source: InputSource = LatentsOfClasses(latents, own) if is_of_data else latents
    return SimulatedSource(source, draws, recipe.generator, infer) if recipe.generator.simulates_steps else source


class LatentsOfClasses(DataSource):
    """Draws latents (n, Z) as ``LatentSource`` does, with the labels (n,) of the real images that D sees with them."""

    def __init__(self, latents: LatentSource, own: RealImages | None = None) -> None:
        super().__init__(own)
        self._latents = latents

    def real(self, batch: LabelledImages) -> MicroBatch:
        """Return images and labels, and what stands for latents."""
        return self._latents.real(batch)

    def inputs(self, stream: str, counters: tuple[int, ...], slices: dict[str, Slice], reals: Reals) -> Inputs:
        """Return latents, labels and, for a generator that draws noise, seeds; labels for D. See ``InputSource``."""
        drawn, batches = self._latents.phase(stream, counters, slices["generator"]), self._of_generator(reals)

        def generator(index: int) -> MicroBatch:
            latents, _, *seeds = drawn(index)
            return latents, batches()[index].labels, *seeds

        latents = self._latents.latents(drawn, stream, counters, slices)

        def conditions(index: int) -> MicroBatch:
            return self._latents.conditions(reals()[index].labels, latents, index)

        return Inputs(generator, conditions, latents)


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
            noise = self._draws.noise(f"{stream}/latent", counters, samples, x.shape[1:])
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
        return self._of_steps[_numbered(drawn, len(self._of_steps))]


def _numbered(drawn: Tensor, num: int) -> Tensor:
    """Uniform numbers in (0, 1] -> integers from 0 to ``num`` - 1."""
    return (drawn * num).ceil().long() - 1


class SimulatedSource:
    """Adds noise to what G makes of another source's inputs by the steps before one that is drawn for each sample.

    Inputs are (n, Z) with the noise of the time t (n,) of that step, labels, t, and maybe seeds.
    """

    def __init__(self, latents: InputSource, draws: SampleDraws, section: Any, infer: Infer | None) -> None:
        """Take G's section, and what makes images; None on a rank that holds no part of G."""
        self._latents, self._draws, self._section, self._infer = latents, draws, section, infer
        self.real, self.rewind, self.close = latents.real, latents.rewind, latents.close

    def inputs(self, stream: str, counters: tuple[int, ...], slices: dict[str, Slice], reals: Reals) -> Inputs:
        """Return G's inputs, which ``prepare`` makes, and D's conditions; see ``InputSource``."""
        begun, part = self._latents.inputs(stream, counters, slices, reals), slices["generator"]
        made: list[MicroBatch] = []

        def prepare() -> None:
            for index in range(part.accumulation if self._infer else 0):
                made.append(self._simulated(stream, counters, part.positions(index), *begun.generator(index)))

        return Inputs(made.__getitem__, begun.conditions, prepare=prepare)

    def _simulated(
        self, stream: str, counters: tuple[int, ...], samples: range, noisy: Tensor, labels: Tensor, *more: Tensor
    ) -> MicroBatch:
        assert self._infer is not None, "this rank holds a part of G"
        ones, *seeds = more
        times = self._section.step_times
        last = _numbered(self._draws.uniform(f"{stream}/time", counters, samples, ()), len(times))
        found, found_times = noisy, ones
        for step, (time, later) in enumerate(pairwise(times)):
            images, drawn = self._infer((noisy, labels, ones * time, *seeds)).flatten(1), None
            if self._section.renoises:
                drawn = self._draws.noise(f"{stream}/step{step}", counters, samples, noisy.shape[1:])
            noisy = with_less_noise(images, noisy, time, later, drawn)
            found = torch.where((last == step + 1)[:, None], noisy, found)
            found_times = torch.where(last == step + 1, ones * later, found_times)
        return found, labels, found_times, *seeds


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
