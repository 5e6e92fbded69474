"""Images from a generator, in an engine or plain: standing statistics and fixed inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bigsgan.config import Recipe
from bigsgan.config.data import DIRECTIONS, Data
from bigsgan.data.codecs import Codec, build_codec
from bigsgan.data.conditions import Conditions, picked
from bigsgan.draws import Draws
from bigsgan.engines.base import MicroBatch
from bigsgan.errors import UserError
from bigsgan.models.batch_norm import BatchStatistics
from bigsgan.models.build import network_on_meta
from bigsgan.models.network import LayerStack
from bigsgan.models.steps import in_steps

STANDING_BATCHES, STANDING_IMAGES = 16, 1600
UNCONDITIONAL_COLUMNS = 10
MAX_COLUMNS = 16
GRID_ROWS, PAIR_COLUMNS, CIRCLE_COLUMNS = 10, 3, 2
FORWARD, _ = DIRECTIONS
LEAST_BATCH, LARGEST_BATCH, LARGEST_NUM = 1, 2**16, 10**9
LEAST_TRUNCATION = 0.02
"""The paper's tables go down to 0.04. Resampling for a much lower threshold takes for ever."""

Infer = Callable[[MicroBatch, bool], Tensor]
"""(inputs, moving) -> images on every rank, without a graph."""


def making(recipe: Recipe, infer: Infer) -> Infer:
    """Return a function that makes images as networks see them: ``infer``, or so many passes as samples take.

    Its inputs are those of ``generator_inputs``, without times.
    """
    section: Any = recipe.generator
    if not section.reads_times:
        return infer

    def make(inputs: MicroBatch, moving: bool) -> Tensor:
        return in_steps(lambda *more: infer(more, moving), section)(*inputs)

    return make


def stand_statistics(network: LayerStack, infer: Infer, batches: Sequence[MicroBatch]) -> None:
    """Replace the running statistics by the mean over fresh batches (Brock et al. 2019, section 4.1).

    The power iterations move too, so that an EMA's spectral norms follow its own weights and not the live ones.
    """
    norms = [module for module in network.modules() if isinstance(module, BatchStatistics)]
    momenta = [norm.momentum for norm in norms]
    network.train()
    try:
        for i, batch in enumerate(batches):
            for norm in norms:
                norm.momentum = 1.0 / (i + 1)  # a cumulative mean: the first batch replaces the old statistics
            infer(batch, True)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def has_standing_statistics(recipe: Recipe) -> bool:
    """Whether the generator needs ``stand_statistics``: it has batch norm or power iterations, and takes one step.

    In several, running statistics are those of images with more or less noise, as samples pass.
    """
    if recipe.generator.num_steps > 1:
        return False
    whole = network_on_meta(recipe, "generator")  # a rank may hold only a part of it
    return bool(whole.spectral_layers()) or any(isinstance(module, BatchStatistics) for module in whole.modules())


def standing_batches(
    recipe: Recipe, conditions: Conditions, truncation: float | None, batch: int, device: torch.device
) -> Sequence[MicroBatch]:
    """Return inputs for ``stand_statistics``: latents drawn like the samples', and any of ``conditions``.

    There are none if the generator has no such statistics, or reads images.
    The run's seed determines them, so that samples of any seed and an exported file have the same statistics.
    """
    if recipe.translates or not has_standing_statistics(recipe):
        return []
    draws, batches = Draws(recipe.seed), []
    for first in range(0, max(STANDING_BATCHES * batch, STANDING_IMAGES), batch):
        labels = picked(conditions, draws.integers("standing/label", (0,), first, batch, len(conditions)))
        batches.append(generator_inputs(recipe, draws, "standing", first, labels, truncation, device))
    return batches


@dataclass
class SampleGrid:
    """The inputs and the arrangement of a run's sample grids."""

    inputs: MicroBatch  # fixed inputs of the generator, row by row
    columns: int  # images in a row
    frame: Callable[[Tensor], Tensor]  # puts each pair's input and target beside its image
    # returns the function that makes images of inputs, in batches
    makes: Callable[[Recipe, Infer], Infer]
    # real images (n, C, H, W) to compare samples with, on rank 0; None for pairs
    reals: Tensor | None = None
    conditions: Conditions = range(1)  # what samples may be conditioned on


def latent_grid(
    recipe: Recipe, conditions: Conditions, device: torch.device, reals: Tensor | None = None
) -> SampleGrid:
    """Return a grid of fixed latents. If there are conditions, each column has one of them."""
    columns = column_labels(recipe.data, conditions)
    labels = columns[torch.arange(GRID_ROWS * len(columns)) % len(columns)]
    inputs = generator_inputs(recipe, Draws(recipe.seed), "grid", 0, labels, None, torch.device("cpu"))

    def makes(recipe: Recipe, infer: Infer) -> Infer:
        # Tokens of all columns are large: a batch at a time is on the device.
        return shown(recipe, lambda batch, moving: infer(tuple(entry.to(device) for entry in batch), moving))

    return SampleGrid(inputs, len(columns), lambda images: images, makes, reals, conditions)


def translation_grid(recipe: Recipe, samples: Tensor, labels: Tensor, device: torch.device) -> SampleGrid:
    """Return a grid of samples of the data, (n, C', H, W) in [-1, 1]: input, translation and target side by side.

    ``labels`` are those of the samples. Where a generator remakes its input, the target is left out. Of two domains,
    each image stands before its translation, and that before its own translation back.
    """
    data, compares = recipe.data, recipe.data.has_inputs
    sources = samples[:, : data.input_channels] if compares else samples
    targets = [samples[:, -data.image_channels :]] if compares else []
    seeds = Draws(recipe.seed).seeds("grid/seed", (0,), 0, len(samples))

    def frame(images: Tensor) -> Tensor:
        shown = [part.expand(-1, 3, -1, -1) for part in (sources, images, *targets)]  # grey beside colour
        return torch.stack(shown, dim=1).flatten(0, 1)

    def circle(images: Tensor) -> Tensor:
        parts = torch.cat([samples, images], dim=1).split([data.input_channels, data.image_channels] * 3, dim=1)
        a, b, into_a, into_b, back_to_a, back_to_b = (part.expand(-1, 3, -1, -1) for part in parts)
        return torch.stack([a, into_b, back_to_a, b, into_a, back_to_b], dim=1).flatten(0, 1)

    inputs = translation_inputs(recipe, samples, labels, seeds, device)
    if data.joins_domains:
        return SampleGrid(inputs, 6 * CIRCLE_COLUMNS, circle, there_and_back)
    return SampleGrid(inputs, (2 + len(targets)) * PAIR_COLUMNS, frame, shown)


def translation_inputs(
    recipe: Recipe, samples: Tensor, labels: Tensor, seeds: np.ndarray, device: torch.device, direction: str = FORWARD
) -> MicroBatch:
    """Return the inputs of a generator from images, given samples of the data (n, C', H, W) or images to translate.

    Of two domains, the other image is grey where only one is given, whose translation does not need it.
    """
    sources = samples[:, : recipe.input_channels]
    missing = recipe.input_channels - sources.shape[1]
    if missing:
        parts = sources, sources.new_zeros(len(sources), missing, *sources.shape[2:])
        sources = torch.cat(parts if direction == FORWARD else parts[::-1], dim=1)
    drawn = (torch.from_numpy(seeds).to(device),) if recipe.generator.draws else ()
    return sources.to(device), labels.to(device), *drawn


def generator_inputs(
    recipe: Recipe,
    draws: Draws,
    stream: str,
    first: int,
    labels: Tensor,
    truncation: float | None,
    device: torch.device,
) -> MicroBatch:
    """Return the inputs of the samples from number ``first`` on, one for each label.

    Latents are truncated if a threshold is given. Where a generator, or its steps, draw noise, samples get seeds too.
    """
    num, width = len(labels), recipe.latent_size
    if truncation is None:
        latents = draws.normal(stream, (0,), first, num, width)
    else:
        latents = draws.truncated_normal(stream, first, num, width, truncation)
    entries = [torch.from_numpy(latents), labels]
    if recipe.generator.seeds_samples:
        entries.append(torch.from_numpy(draws.seeds(f"{stream}/seed", (0,), first, num)))
    return tuple(entry.to(device) for entry in entries)


def check_truncation(recipe: Recipe, truncation: float) -> None:
    """Refuse a truncation with which no samples can be made.

    Raises:
        UserError: It is out of range for a threshold, or for psi if the generator has a mapping network.
    """
    if recipe.generator.truncates_w:
        if not math.isfinite(truncation):
            raise UserError("--truncation", truncation, "must be a finite number (psi)", "give a number such as 0.7")
    elif not LEAST_TRUNCATION <= truncation < math.inf:
        problem, detail = f"must be at least {LEAST_TRUNCATION}", "latents are resampled until they lie below it"
        raise UserError("--truncation", truncation, problem, "give a number such as 0.8", detail)


def check_guidance(recipe: Recipe, guidance: float) -> None:
    """Refuse a guidance with which no samples can be made.

    Raises:
        UserError: It is not finite, or the generator has no guidance, or samples have no class each.
    """
    if recipe.objective.flow:
        if not recipe.data.condition_dropout:
            raise UserError("--guidance", None, "needs a run with data.condition_dropout", "remove the option")
        if not 0 <= guidance <= 100:
            raise UserError("--guidance", guidance, "must be 0 to 100", "give a number such as 1.5")
    elif not recipe.generator.has_guidance or not recipe.data.num_classes or recipe.data.has_vectors:
        problem = "needs a GAT or CAT with classes, or flow matching"
        raise UserError("--guidance", None, problem, "remove the option")
    if not math.isfinite(guidance):
        raise UserError("--guidance", guidance, "must be a finite number", "give a number such as 1.5")


def check_batch(batch: int) -> None:
    """Refuse a number of images that cannot be computed at once.

    Raises:
        UserError: It is out of range.
    """
    if not LEAST_BATCH <= batch <= LARGEST_BATCH:
        problem = f"must be {LEAST_BATCH} to {LARGEST_BATCH}"
        raise UserError("--batch", batch, problem, "give a number in this range")


def smaller_batch(batch: int) -> str:
    """Return the remedy if there is not enough memory to compute ``batch`` images at a time."""
    if batch == LEAST_BATCH:
        return "use a machine with more memory"
    return f"compute fewer images at a time (--batch {max(batch // 2, LEAST_BATCH)})"


def there_and_back(recipe: Recipe, infer: Infer) -> Infer:
    """Return a function that translates both images of a sample of two domains, and the translations back.

    It makes images of A and of B, out of the sample's B and A, and then of A and of B out of these.
    """

    def circle(inputs: MicroBatch, moving: bool) -> Tensor:
        made = infer(inputs, moving)
        return torch.cat([made, infer((made, *inputs[1:]), moving)], dim=1)

    return circle


def shown(recipe: Recipe, infer: Infer, direction: str = FORWARD) -> Infer:
    """Return a function that makes the images people see: the last of those that G makes of each sample, decoded.

    Of two domains, those of the one where ``direction`` leads.
    """
    part = slice(-recipe.shown_channels, None) if direction == FORWARD else slice(recipe.data.input_channels)
    codecs: list[Codec] = []  # one, built with the first images, on their device

    @torch.no_grad()
    def show(inputs: MicroBatch, moving: bool) -> Tensor:
        made = infer(inputs, moving)[:, part]
        if not codecs:
            codecs.append(build_codec(recipe.data, made.device))
        return codecs[0].decode(made)

    return show


def sample(network: LayerStack, infer: Infer, inputs: MicroBatch, chunk: int, statistics: str = "running") -> Tensor:
    """Return images (n, C, H, W) in [-1, 1] on the host, made ``chunk`` at a time. All ranks have the same inputs.

    ``statistics`` is ``running`` or ``batch``; see ``Recipe.sample_statistics``.
    """
    with sampling_mode(network, statistics):
        pieces = zip(*(tensor.split(chunk) for tensor in inputs), strict=True)
        return torch.cat([infer(piece, False).cpu() for piece in pieces])


@contextmanager
def sampling_mode(network: LayerStack, statistics: str) -> Iterator[None]:
    """Let batch norm use the given statistics inside the block; see ``Recipe.sample_statistics``."""
    network.train(statistics == "batch")
    try:
        yield
    finally:
        network.train()


def column_labels(data: Data, conditions: Conditions) -> Tensor:
    """Return the label of each column of a sample grid: those of ``column_classes``, or of images over the data set."""
    if not data.condition_size and not data.multi_label:
        return class_labels(data, column_classes(data.num_classes))
    num = min(UNCONDITIONAL_COLUMNS, len(conditions))
    return picked(conditions, np.arange(num) * len(conditions) // num)


def class_labels(data: Data, classes: Sequence[int]) -> Tensor:
    """Return labels of one class each: (columns,) int64, or (columns, K) float32 where labels may be left out."""
    numbers = torch.tensor(classes)
    return torch.eye(data.num_classes)[numbers] if data.has_vectors else numbers


def column_classes(num_classes: int) -> list[int]:
    """Return the class of each column of a sample grid: the first classes that fit; all 0 if there are none."""
    return list(range(min(num_classes, MAX_COLUMNS))) if num_classes else [0] * UNCONDITIONAL_COLUMNS
