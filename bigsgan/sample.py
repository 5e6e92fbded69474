"""`bigsgan sample`: a grid of images from a run's generator, a column for each class."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from bigsgan import memory
from bigsgan.config.run_directory import refuse_output
from bigsgan.config.sections import LARGEST_INT
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.monitor import image_grid, save_png
from bigsgan.trained import TrainedNetwork, best_device, open_trained
from bigsgan.training.sampling import (
    LARGEST_NUM,
    check_options,
    draw_latents,
    grid_columns,
    sample,
    smaller_batch,
    stand_statistics,
    standing_batches,
)


def main(
    run: Path, num: int, truncation: float | None, out: Path, seed: int, nimg: int | None, live: bool, batch: int
) -> None:
    """Write a PNG grid of ``num`` images, computed ``batch`` at a time.

    Raises:
        UserError: The run cannot be opened, an option is out of range, or memory runs out.
    """
    if not 1 <= num <= LARGEST_NUM:
        raise UserError("--num", num, "is no number of images", f"give 1 to {LARGEST_NUM}")
    check_options(truncation, batch)
    if not 0 <= seed <= LARGEST_INT:
        raise UserError("--seed", seed, "is no seed", f"give a number from 0 to {LARGEST_INT}")
    refuse_output(out)
    device = best_device()
    remedy = f"{smaller_batch(batch)}, or fewer in all (--num)"
    with memory.naming_remedy(f"with {batch} of {num} images at a time", remedy):
        trained = open_trained(run, "generator", live, nimg, device)
        images, columns = generate(trained, num, seed, truncation, batch, device)
        grid = image_grid(images, columns)
    save_png(grid, out)
    print(f"{out}: {num} images of {run} at {trained.nimg} images seen, {columns} columns")


def generate(
    trained: TrainedNetwork, num: int, seed: int, truncation: float | None, batch: int, device: torch.device
) -> tuple[Tensor, int]:
    """Images (num, C, H, W) in [-1, 1] with a class for each of the grid's columns, and their number.

    Batch norm uses standing statistics of latents drawn like the samples' (Brock et al. 2019, section 4.1).
    """
    draws, classes = Draws(seed), trained.recipe.data.num_classes
    columns = grid_columns(classes)
    stand_statistics(trained.network, trained.infer, standing_batches(trained.recipe, truncation, batch, device))
    latents = draw_latents(draws, "sample", 0, num, trained.recipe.generator.latent_size, truncation)
    labels = torch.arange(num) % (columns if classes else 1)
    return sample(trained.network, trained.infer, (latents.to(device), labels.to(device)), batch), columns
