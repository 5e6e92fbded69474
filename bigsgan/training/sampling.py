"""Images from a generator: standing statistics and fixed inputs, for one that an engine holds or a plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bigsgan.config import Recipe
from bigsgan.draws import Draws
from bigsgan.engines.sequences import MicroBatch
from bigsgan.errors import UserError
from bigsgan.models.layers import BatchStatistics
from bigsgan.models.network import LayerStack

STANDING_BATCHES, STANDING_IMAGES = 16, 1600
UNCONDITIONAL_COLUMNS = 10
MAX_COLUMNS = 16
LEAST_BATCH, LARGEST_NUM = 1, 10**9
LEAST_TRUNCATION = 0.02
"""The paper's tables go down to 0.04; resampling until all numbers are smaller still takes for ever."""

Infer = Callable[[MicroBatch, bool], Tensor]
"""(inputs, moving) -> images on every rank, without a graph."""


def stand_statistics(network: LayerStack, infer: Infer, batches: Sequence[MicroBatch]) -> None:
    """Replace the running statistics by the mean over fresh batches (Brock et al. 2019, section 4.1).

    The power iterations move along, so that the norms of an average's weights are their own and not the live ones'.
    """
    norms = [module for module in network.modules() if isinstance(module, BatchStatistics)]
    momenta = [norm.momentum for norm in norms]
    network.train()
    try:
        for i, batch in enumerate(batches):
            for norm in norms:
                norm.momentum = 1.0 / (i + 1)  # a cumulative mean: the first batch replaces what was there
            infer(batch, True)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def standing_batches(
    recipe: Recipe, truncation: float | None, batch: int, device: torch.device
) -> Sequence[MicroBatch]:
    """Inputs for ``stand_statistics``: latents drawn like the samples', labels of all classes as in training.

    The run's seed determines them, so that samples of any seed and an exported file have the same statistics.
    """
    draws = Draws(recipe.seed)
    width, classes = recipe.generator.latent_size, max(recipe.data.num_classes, 1)
    batches = []
    for i in range(max(STANDING_BATCHES, -(-STANDING_IMAGES // batch))):
        latents = draw_latents(draws, "standing", i * batch, batch, width, truncation)
        labels = torch.from_numpy(draws.integers("standing/label", (0,), i * batch, batch, classes))
        batches.append((latents.to(device), labels.to(device)))
    return batches


def draw_latents(draws: Draws, stream: str, first: int, num: int, width: int, truncation: float | None) -> Tensor:
    """Latents (num, width) float32 of the samples from ``first`` on, truncated where a threshold is given."""
    if truncation is None:
        return torch.from_numpy(draws.normal(stream, (0,), first, num, width))
    return torch.from_numpy(draws.truncated_normal(stream, first, num, width, truncation))


def check_options(truncation: float | None, batch: int) -> None:
    """Refuse options that no samples can be made with.

    Raises:
        UserError: The one that is out of range.
    """
    if truncation is not None and not truncation >= LEAST_TRUNCATION:
        remedy = f"give a number from {LEAST_TRUNCATION} on, such as 0.8"
        raise UserError("--truncation", truncation, "is no threshold for resampling", remedy)
    if not LEAST_BATCH <= batch <= LARGEST_NUM:
        problem = "is no number of images to compute at a time"
        raise UserError("--batch", batch, problem, f"give {LEAST_BATCH} to {LARGEST_NUM}")


def smaller_batch(batch: int) -> str:
    """The remedy where computing ``batch`` images at a time needs more memory than there is."""
    if batch == LEAST_BATCH:
        return "use a machine with more memory"
    return f"compute fewer images at a time (--batch {max(batch // 2, LEAST_BATCH)})"


def sample(network: LayerStack, infer: Infer, inputs: MicroBatch, chunk: int, statistics: str = "running") -> Tensor:
    """Images (n, C, H, W) in [-1, 1], ``chunk`` at a time, on the host.

    Args:
        network: On this rank.
        infer: Of that network.
        inputs: Latents and labels, the same on all ranks.
        chunk: Images at a time.
        statistics: ``running`` or ``batch``; see ``Recipe.sample_statistics``.
    """
    network.train(statistics == "batch")
    try:
        pieces = zip(*(tensor.split(chunk) for tensor in inputs), strict=True)
        return torch.cat([infer(piece, False).cpu() for piece in pieces])
    finally:
        network.train()


def grid_columns(num_classes: int) -> int:
    """Columns of a sample grid: one for each class, while they fit."""
    return min(num_classes, MAX_COLUMNS) if num_classes else UNCONDITIONAL_COLUMNS
