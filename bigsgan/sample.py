"""`bigsgan sample`: a grid of images from a run's generator, a column for each class."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from bigsgan.config.run_directory import refuse_output
from bigsgan.config.sections import LARGEST_INT
from bigsgan.draws import Draws
from bigsgan.engines.sequences import MicroBatch
from bigsgan.errors import UserError
from bigsgan.monitor import image_grid, save_png
from bigsgan.trained import TrainedNetwork, open_trained
from bigsgan.training.sampling import STANDING_BATCHES, grid_columns, sample, stand_statistics

CHUNK = 100
LEAST_TRUNCATION = 0.02
"""The paper's tables go down to 0.04; resampling until all numbers are smaller still takes for ever."""


def main(run: Path, num: int, truncation: float | None, out: Path, seed: int, nimg: int | None, live: bool) -> None:
    """Write a PNG grid of ``num`` images.

    Raises:
        UserError: The run cannot be opened, or an option is out of range.
    """
    if num < 1:
        raise UserError("--num", num, "is no number of images", "give 1 or more")
    if truncation is not None and not truncation >= LEAST_TRUNCATION:
        remedy = f"give a number from {LEAST_TRUNCATION} on, such as 0.8"
        raise UserError("--truncation", truncation, "is no threshold for resampling", remedy)
    if not 0 <= seed <= LARGEST_INT:
        raise UserError("--seed", seed, "is no seed", f"give a number from 0 to {LARGEST_INT}")
    refuse_output(out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = open_trained(run, "generator", live, nimg, device)
    images, columns = generate(trained, num, seed, truncation, device)
    save_png(image_grid(images, columns), out)
    print(f"{out}: {num} images of {run} at {trained.nimg} images seen, {columns} columns")


def generate(
    trained: TrainedNetwork, num: int, seed: int, truncation: float | None, device: torch.device
) -> tuple[Tensor, int]:
    """Images (num, C, H, W) in [-1, 1] with a class for each of the grid's columns, and their number.

    Batch norm uses standing statistics of latents drawn like the samples' (Brock et al. 2019, section 4.1).
    """
    draws = Draws(seed)
    classes = trained.recipe.data.num_classes
    columns = grid_columns(classes)

    def latents(stream: str, first: int, size: int) -> Tensor:
        width = trained.recipe.generator.latent_size
        if truncation is None:
            drawn = draws.normal(stream, (0,), first, size, width)
        else:
            drawn = draws.truncated_normal(stream, first, size, width, truncation)
        return torch.from_numpy(drawn).to(device)

    def standing_batch(first: int) -> MicroBatch:
        labels = draws.integers("standing/label", (0,), first, CHUNK, max(classes, 1))  # of all classes, as in training
        return latents("standing", first, CHUNK), torch.from_numpy(labels).to(device)

    stand_statistics(trained.network, trained.infer, [standing_batch(i * CHUNK) for i in range(STANDING_BATCHES)])
    labels = torch.arange(num, device=device) % (columns if classes else 1)
    return sample(trained.network, trained.infer, (latents("sample", 0, num), labels), CHUNK), columns
