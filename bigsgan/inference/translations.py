"""Translates a directory's images by a run's generator, without the run's data.

Shapes: n images (n, C, H, W) in [-1, 1] on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.data.listing import IMAGE_EXTENSIONS, ignored, is_image
from bigsgan.draws import Draws
from bigsgan.errors import UserError, reason
from bigsgan.images.codec import decode
from bigsgan.images.reading import CorruptImage, image_tensor, open_image
from bigsgan.images.size import Fitting
from bigsgan.inference.sheets import Sheet
from bigsgan.inference.trained import TrainedNetwork
from bigsgan.training.sampling import sample, translation_inputs

_COLUMNS = 6
"""Columns of a sheet: three inputs, each with its translation."""


class Translations:
    """The images of a directory, in the order of their names, and their translations by a generator."""

    def __init__(
        self, trained: TrainedNetwork, directory: Path, num: int | None, seed: int, standing: bool = True
    ) -> None:
        """List the first ``num`` images, or all; sub-directories are ignored. ``seed`` is for the dropout.

        ``standing`` normalizes by the recipe's ``sample_statistics``, otherwise by batch norm's running statistics.

        Raises:
            UserError: The directory cannot be read, or contains no images.
        """
        self._trained, self._draws = trained, Draws(seed)
        self._paths = _images(directory)[:num]
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

    def of_own_sizes(self, numbers: Sequence[int], batch: int) -> list[Tensor]:
        """Translations (C_out, H, W) of images by their numbers, each as large as its image where the network can.

        The image is continued to sides that the network takes by the pixels of its border, and the translation is cut
        back. A network that takes only the data's size gets images that fit, as ``images`` has them.

        Raises:
            UserError: An image cannot be read.
        """
        recipe = self._trained.recipe
        factor = recipe.generator.input_multiple(recipe.data) if recipe.data.codec.kind == "pixels" else 0
        if not factor:
            return list(self.images(numbers, batch)[1])
        sources = {number: self._read(number, None) for number in numbers}
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, source in sources.items():
            alike.setdefault(tuple(source.shape), []).append(number)
        made: dict[int, Tensor] = {}
        for (_, height, width), group in alike.items():
            images = torch.stack([sources[number] for number in group])
            images = F.pad(images, (0, -width % factor, 0, -height % factor), mode="replicate")
            translated = self._translated(images, group, batch)[:, :, :height, :width]
            made |= dict(zip(group, translated, strict=True))
        return [made[number] for number in numbers]

    def _translated(self, sources: Tensor, numbers: Sequence[int], batch: int) -> Tensor:
        seeds = np.concatenate([self._draws.seeds("sample/seed", (0,), number, 1) for number in numbers])
        labels = torch.zeros(len(numbers), dtype=torch.int64)
        placed = translation_inputs(self._trained.recipe, sources, labels, seeds, self._trained.device)
        chunk = 1 if self._statistics == "batch" else batch
        return sample(self._trained.network, self._trained.show, placed, chunk, self._statistics)

    def sheet(self, batch: int) -> Sheet:
        """Show each image and its translation side by side."""
        shown = [part.expand(-1, 3, -1, -1) for part in self.images(range(len(self._paths)), batch)]
        return Sheet(torch.stack(shown, dim=1).flatten(0, 1), min(_COLUMNS, 2 * len(self._paths)))

    def _read(self, number: int, fitting: Fitting | None) -> Tensor:
        data, path = self._trained.recipe.data, self._paths[number]
        channels = data.input_channels if data.has_inputs else data.image_channels
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
    paths = [path for path in files if is_image(path.name)]
    names = [path.name for path in paths]
    others = ignored([path.name for path in files if not is_image(path.name)], names)
    if not paths:
        remedy = f"give a directory with files of {', '.join(IMAGE_EXTENSIONS)}"
        raise UserError("--input", str(directory), "contains no images", remedy, others.text())
    others.check("--input", directory, len(paths))
    others.tell(directory)
    return paths
