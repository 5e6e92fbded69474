"""`bigsgan sample`: a grid of images from a run's generator, a column for each class."""

from __future__ import annotations

from collections.abc import Sequence
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
    generator_inputs,
    grid_columns,
    sample,
    smaller_batch,
    stand_statistics,
    standing_batches,
)


def main(
    run: Path,
    num: int,
    truncation: float | None,
    out: Path,
    seed: int,
    nimg: int | None,
    live: bool,
    classes: Sequence[range] | None,
    batch: int,
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
    with memory.naming_remedy(f"with {batch} images at a time and {num} in all", remedy):
        trained = open_trained(run, "generator", live, nimg, device)
        columns = choose_columns(trained.recipe.data.num_classes, classes, num)
        images = generate(trained, num, seed, truncation, columns, batch, device)
        grid = image_grid(images, len(columns))
    save_png(grid, out)
    print(f"{out}: {num} images of {run} at {trained.nimg} images seen, {len(columns)} columns")


def choose_columns(num_classes: int, asked: Sequence[range] | None, num: int) -> list[int]:
    """The class of each column: those that are asked for, else the first that fit; all 0 where there are no classes.

    Raises:
        UserError: A class does not exist, or ``num`` images would not show every column.
    """
    if asked is None:
        return [column if num_classes else 0 for column in range(grid_columns(num_classes))]
    if not num_classes:
        raise UserError("--classes", None, "is given, but the run has no classes", "leave it out")
    for part in asked:
        if part.stop > num_classes:
            problem = f"is no class of the run, which has {num_classes}"
            raise UserError("--classes", part.stop - 1, problem, f"give numbers from 0 to {num_classes - 1}")
    columns = [label for part in asked for label in part]
    if len(columns) > num:
        problem = f"images do not show the {len(columns)} classes asked for"
        raise UserError("--num", num, problem, f"give --num {len(columns)} or more")
    return columns


def generate(
    trained: TrainedNetwork,
    num: int,
    seed: int,
    truncation: float | None,
    columns: list[int],
    batch: int,
    device: torch.device,
) -> Tensor:
    """Images (num, C, H, W) in [-1, 1], row by row of a grid with the class of each of its ``columns``.

    Batch norm uses standing statistics of latents drawn like the samples' (Brock et al. 2019, section 4.1), unless the
    recipe's ``sample_statistics`` are each batch's own.
    """
    stand_statistics(trained.network, trained.infer, standing_batches(trained.recipe, truncation, batch, device))
    labels = torch.tensor(columns)[torch.arange(num) % len(columns)]
    inputs = generator_inputs(trained.recipe, Draws(seed), "sample", 0, labels, truncation, device)
    return sample(trained.network, trained.infer, inputs, batch, trained.recipe.sample_statistics)
