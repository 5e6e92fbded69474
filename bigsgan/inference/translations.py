"""Translates a directory's images by a run's generator, without the run's data.

Shapes: n images (n, C, H, W) in [-1, 1] on the host.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.data.listing import KINDS_OF_IMAGES, ignored, sort_files
from bigsgan.draws import Draws
from bigsgan.errors import UserError, counted, reason
from bigsgan.images.codec import decode
from bigsgan.images.reading import CorruptImage, image_tensor, noting_proportions, open_image
from bigsgan.images.size import Fitting
from bigsgan.inference.sheets import Sheet
from bigsgan.inference.trained import TrainedNetwork
from bigsgan.training.sampling import FORWARD, sample, shown, translation_inputs

_COLUMNS = 6
"""Columns of a sheet: three inputs, each with its translation."""

_log = logging.getLogger(__name__)
NO_LABELS = torch.zeros(1, dtype=torch.int64)
"""The labels of images without."""


class Translations:
    """The images of a directory, in the order of their names, and their translations by a generator."""

    def __init__(
        self,
        trained: TrainedNetwork,
        directory: Path,
        num: int | None,
        seed: int,
        standing: bool = True,
        direction: str = FORWARD,
        labels: Tensor = NO_LABELS,
    ) -> None:
        """List the first ``num`` images, or all; sub-directories are ignored. ``seed`` is for the dropout.

        ``direction`` is from which of two domains to the other. Images have the ``labels`` in turn.

        ``standing`` normalizes by the recipe's ``sample_statistics``, otherwise by batch norm's running statistics.

        Raises:
            UserError: The directory cannot be read, or contains no images.
        """
        self._trained, self._draws = trained, Draws(seed)
        self._paths, self._direction, self._labels = _images(directory)[:num], direction, labels
        self._statistics = trained.recipe.sample_statistics if standing else "running"

    def __len__(self) -> int:
        return len(self._paths)

    def file_names(self) -> list[str]:
        """Names of PNG files for the translations, after those of the images.

        Raises:
            UserError: Two images differ only in the suffixes of their names.
        """
        names = [f"{path.stem}.png" for path in self._paths]
        name, times = Counter(names).most_common(1)[0]
        if times > 1:
            problem = f"has {times} images whose translations would have the same name, {name}"
            raise UserError("--input", str(self._paths[0].parent), problem, "rename all but one")
        return names

    def images(self, numbers: Sequence[int], batch: int) -> tuple[Tensor, Tensor]:
        """Images by their numbers, made to fit as the data, (n, C_in, H, W), and their translations.

        If samples are normalized by their own batch, each image is a batch, as in the published test, so that no image
        depends on the others.

        Raises:
            UserError: An image cannot be read.
        """
        sources = torch.stack([self._read(number, self._trained.recipe.data.fitting) for number in numbers])
        return sources, self._translated(sources, numbers, batch)

    def of_own_sizes(self, numbers: Sequence[int], batch: int) -> Iterator[Tensor]:
        """Yield translations (C_out, H, W) of images by their numbers, each as large as its image where G can.

        The image is continued to sides that G takes by the pixels of its border, and the translation is cut back. A G
        that takes only the data's size gets images that fit, as ``images`` has them. Images of one size that follow
        each other are computed together, up to the pixels of ``batch`` of the data's.

        Raises:
            UserError: An image cannot be read.
        """
        recipe = self._trained.recipe
        sides = recipe.generator.input_sides(recipe.data) if recipe.data.codec.kind == "pixels" else None
        if sides is None:
            yield from self.images(numbers, batch)[1]
            return
        most, group, sources = batch * recipe.data.resolution.num_pixels, list[int](), list[Tensor]()
        for number in numbers:
            source = self._read(number, None)
            if sources and (source.shape != sources[0].shape or (len(sources) + 1) * source[0].numel() > most):
                yield from self._at_own_size(torch.stack(sources), group, batch, *sides)
                group, sources = [], []
            group.append(number)
            sources.append(source)
        yield from self._at_own_size(torch.stack(sources), group, batch, *sides)

    def _at_own_size(
        self, images: Tensor, numbers: Sequence[int], batch: int, multiple: int, shortest: int
    ) -> Iterator[Tensor]:
        height, width = images.shape[2:]
        below, right = (max(shortest, side + -side % multiple) - side for side in (height, width))
        padded = F.pad(images, (0, right, 0, below), mode="replicate")
        yield from self._translated(padded, numbers, batch)[:, :, :height, :width]

    def _translated(self, sources: Tensor, numbers: Sequence[int], batch: int) -> Tensor:
        seeds = np.concatenate([self._draws.seeds("sample/seed", (0,), number, 1) for number in numbers])
        labels = self._labels[torch.tensor(numbers) % len(self._labels)]
        recipe, direction = self._trained.recipe, self._direction
        placed = translation_inputs(recipe, sources, labels, seeds, self._trained.device, direction)
        chunk, show = 1 if self._statistics == "batch" else batch, shown(recipe, self._trained.infer, direction)
        return sample(self._trained.network, show, placed, chunk, self._statistics)

    def sheet(self, batch: int) -> Sheet:
        """Show each image and its translation side by side, in the data's size."""
        with noting_proportions() as kept:
            pairs = [part.expand(-1, 3, -1, -1) for part in self.images(range(len(self._paths)), batch)]
        if others := kept.count(False):
            fitting, num = self._trained.recipe.data.fitting, counted(len(self._paths), "image")
            _log.warning("--input: of %s, %d of other proportions: %s; --files keeps sizes", num, others, fitting.text)
        return Sheet(torch.stack(pairs, dim=1).flatten(0, 1), min(_COLUMNS, 2 * len(self._paths)))

    def _read(self, number: int, fitting: Fitting | None) -> Tensor:
        data, path = self._trained.recipe.data, self._paths[number]
        channels = data.input_channels if data.has_inputs and self._direction == FORWARD else data.image_channels
        try:
            pixels = image_tensor(open_image(str(path)), str(path), fitting, channels)
        except CorruptImage as error:
            raise UserError("--input", str(path), f"cannot be read: {error.reason}", "repair or remove it") from None
        return decode(pixels)


def _images(directory: Path) -> list[Path]:
    try:
        files = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        problem = f"cannot be read: {reason(error, directory)}"
        raise UserError("--input", str(directory), problem, "give a directory of images") from None
    names = sort_files((path.name for path in files), [], None).images
    paths, read = [directory / name for name in names], set(names)
    others = ignored([path.name for path in files if path.name not in read], names)
    if not paths:
        remedy = f"give a directory with files of {KINDS_OF_IMAGES}"
        raise UserError("--input", str(directory), "contains no images", remedy, others.text())
    others.check("--input", directory, len(paths))
    others.tell(directory)
    return paths
