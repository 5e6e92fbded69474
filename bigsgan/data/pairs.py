"""Pairs of an input and a target image, for generators that translate one into the other, and images of two domains.

A pair is one uint8 tensor (C_in + C, H, W), the input's channels first, so that loading, flips and order treat it like
any image. Shapes: C_in and C channels of input and target, H x W pixels.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.data.datasets import DigitImages, ImageDataset
from bigsgan.data.fingerprint import Fingerprint, digest, file_sizes, some_of
from bigsgan.data.labels import left_out
from bigsgan.data.listing import data_directory, files_below
from bigsgan.draws import Draws
from bigsgan.errors import UserError, counted, reason
from bigsgan.images.reading import CorruptImage, accepting_truncated, image_tensor, open_image, upright

_NUM_KINDS = 8
_NUM_RECTANGLES = 12
_YELLOW, _BLUE = (1.0, 0.9, 0.35), (0.1, 0.2, 0.5)
_MOST_PASSES, _MOST_SAMPLES = 64, 2**22  # every rank permutes all samples of an epoch


class FilePairs(ImageDataset):
    """Pairs of files, or the two halves of a file if both paths of a pair are the same."""

    in_memory = False

    def __init__(self, pairs: list[tuple[str, str]], data: Data) -> None:
        self.pairs, self.data = pairs, data

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with accepting_truncated(self.data.accepts_truncated):
            return self._pair(index), 0

    def images(self, index: int, read: Callable[[str], Image.Image] = open_image) -> tuple[Image.Image, Image.Image]:
        """Return the input and the target, ``read`` from their paths.

        Raises:
            CorruptImage: One of them cannot be read.
        """
        source, target = self.pairs[index]
        if source != target:
            return read(source), read(target)
        whole = upright(read(source))
        width, height = whole.size
        if width < 2:
            raise CorruptImage(source, f"must be at least 2 pixels wide, got {width}")
        left = whole.crop((0, 0, width // 2, height))
        right = whole.crop((width - width // 2, 0, width, height))
        return (left, right) if self.data.input_side == "left" else (right, left)

    def _pair(self, index: int) -> Tensor:
        data, images, (source, target) = self.data, self.images(index), self.pairs[index]
        first = image_tensor(images[0], source, data.fitting, data.input_channels)
        return torch.cat([first, image_tensor(images[1], target, data.fitting, data.image_channels)])

    def fingerprint(self) -> Fingerprint:
        """Return digests of the paths below the roots, and of the sizes of some files."""
        data = self.data
        sources = data.input_root if data.kind == "paired_folders" else data.root
        roots = [str(Path(str(root)).expanduser()) for root in (sources, data.root)]
        names = [path.removeprefix(root) for pair in self.pairs for path, root in zip(pair, roots, strict=True)]
        return _fingerprint(len(self), names, [path for i in some_of(len(self)) for path in self.pairs[i]])


class TwoDomains(ImageDataset):
    """Images of one folder, each joined with one of another.

    To train, a sample is an image of the first with a random one of the second; each of the first is in about as many.
    To look and to measure, each image of the second comes once.
    """

    in_memory = False

    def __init__(self, sources: Sequence[Any], targets: Sequence[Any], data: Data, trains: bool = False) -> None:
        """Take the files of both domains; unless they are to train on, those of the second come in their order."""
        self.sources, self.targets, self.data = sources, targets, data
        longest, self._draws = max(len(sources), len(targets)), Draws(seed=0)
        self._num_passes = max(2, min(_MOST_PASSES, _MOST_SAMPLES // longest)) if trains else 1

    def __len__(self) -> int:
        longest = max(len(self.sources), len(self.targets))
        return len(self.targets) if self._num_passes == 1 else self._num_passes * longest

    @property
    def reversed(self) -> TwoDomains:
        """The samples of the same domains in the other order."""
        found = copy.copy(self)
        found.sources, found.targets = self.targets, self.sources
        roots = {"root": self.data.input_root, "input_root": self.data.root}
        channels = {"input_channels": self.data.image_channels, "image_channels": self.data.input_channels}
        found.data = self.data.model_copy(update=roots | channels)
        return found

    @property
    def num_files(self) -> int:
        """Files of both folders."""
        return len(self.sources) + len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        num = len(self.targets)
        other = index % num if self._num_passes == 1 else self._draws.integers("unpaired", (), index, 1, num)[0]
        return torch.cat(self._images(self.sources[index % len(self.sources)], self.targets[other])), 0

    def _images(self, source: Any, target: Any) -> list[Tensor]:
        """Return the image of each domain."""
        data = self.data
        with accepting_truncated(data.accepts_truncated):
            return [
                image_tensor(open_image(path), path, data.fitting, channels)
                for path, channels in ((source, data.input_channels), (target, data.image_channels))
            ]

    def fingerprint(self) -> Fingerprint:
        """Return digests of the paths below the roots, and of the sizes of some files."""
        names, some = list[str](), list[str]()
        for root, paths in ((self.data.input_root, self.sources), (self.data.root, self.targets)):
            names += [path.removeprefix(str(Path(str(root)).expanduser())) for path in paths] + [""]
            some += [paths[i] for i in some_of(len(paths))]
        return _fingerprint(len(self), names, some)


class UnpairedDigits(TwoDomains):
    """Half of scikit-learn's digits as they are, and the other half drawn as outlines, yellow on blue.

    A digit is an outline where it is neither black nor white. So no image has a counterpart in the other domain.
    """

    in_memory = True

    def __init__(self, data: Data, trains: bool = False) -> None:
        digits = DigitImages(data.model_copy(update={"num_classes": 0})).images.float() / 255
        of_input, of_target = digits[::2], digits[1::2]
        ink, paper = (torch.tensor(colour).view(3, 1, 1) for colour in (_YELLOW, _BLUE))
        outlined = paper + 4 * of_target * (1 - of_target) * (ink - paper)
        pairs = ((of_input, data.input_channels), (outlined, data.image_channels))
        sources, targets = ([_pixels(each, channels) for each in images] for images, channels in pairs)
        super().__init__(sources, targets, data, trains)

    def _images(self, source: Tensor, target: Tensor) -> list[Tensor]:
        return [source, target]

    def fingerprint(self) -> Fingerprint:
        """Return the number of samples; the digits are always the same."""
        return Fingerprint(len(self))


class SyntheticPairs(ImageDataset):
    """Pairs of a drawing of rectangles, and the same drawing with a pattern for each kind of rectangle.

    The target is a function of the input, so that a generator can learn it. A pair is a function of its index only.
    """

    in_memory = True

    def __init__(self, data: Data) -> None:
        self.data = data
        self._colours = Draws(seed=0).uniform("pairs/colours", (), 0, _NUM_KINDS, 3 + 3 + 3)

    def __len__(self) -> int:
        return self.data.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image_height, image_width = self.data.resolution
        drawn = Draws(seed=0).uniform("pairs/rectangles", (), index * _NUM_RECTANGLES, _NUM_RECTANGLES, 5)
        kinds = np.zeros((image_height, image_width), dtype=np.int64)
        for x, y, width, height, kind in drawn:
            columns = slice(int(x * image_width), int((x + 0.1 + width / 2) * image_width))
            rows = slice(int(y * image_height), int((y + 0.1 + height / 2) * image_height))
            kinds[rows, columns] = int(kind * _NUM_KINDS)
        colours = self._colours[kinds]  # (H, W, 9)
        rows, columns = np.mgrid[:image_height, :image_width]
        rows, columns = rows / image_height, columns / image_width
        # Stripes whose direction, width and colour depend on the kind.
        phase = 40 * ((colours[..., 3] - 0.5) * rows + (colours[..., 4] - 0.5) * columns) + 6 * colours[..., 5]
        target = colours[..., 6:] * (0.6 + 0.4 * np.sin(phase))[..., None]
        pair = [_channels(colours[..., :3], self.data.input_channels), _channels(target, self.data.image_channels)]
        return torch.from_numpy((np.concatenate(pair) * 255).astype(np.uint8)), 0


def _fingerprint(num: int, names: list[str], some: list[str]) -> Fingerprint:
    encoded = digest(name.encode("utf-8", "surrogateescape") for name in names)
    return Fingerprint(num, encoded, sizes=file_sizes(some))


def _pixels(image: Tensor, channels: int) -> Tensor:
    """(1 or 3, H, W) in [0, 1] -> (channels, H, W) uint8."""
    image = image.mean(dim=0, keepdim=True) if channels == 1 else image.expand(channels, -1, -1)
    return (image * 255).round().to(torch.uint8)


def _channels(colours: np.ndarray, channels: int) -> np.ndarray:
    """(H, W, 3) in [0, 1] -> (channels, H, W)."""
    return colours.transpose(2, 0, 1) if channels == 3 else colours.mean(axis=2)[None]


def build_paired_folders(data: Data) -> FilePairs:
    """Match the files of two folders by their relative paths without suffixes.

    Raises:
        UserError: A folder cannot be read or contains no images, or a file has no counterpart.
    """
    sources = _by_name("data.input_root", str(data.input_root), data.max_ignored)
    targets = _by_name("data.root", str(data.root), data.max_ignored)
    unpaired = sorted(sources.keys() ^ targets.keys())
    if unpaired:
        field, root = ("data.input_root", data.input_root) if unpaired[0] in targets else ("data.root", data.root)
        problem = f"has no counterpart for {counted(len(unpaired), 'image')}, such as {unpaired[0]}"
        raise UserError(field, root, problem, "give input and target the same name")
    return FilePairs([(sources[name], targets[name]) for name in sorted(sources)], data)


def build_unpaired_folders(data: Data, trains: bool = False) -> TwoDomains:
    """List the files of two folders; to train, each image meets many of the other folder's.

    Raises:
        UserError: A folder cannot be read or contains no images.
    """
    sources = list(_by_name("data.input_root", str(data.input_root), data.max_ignored).values())
    targets = list(_by_name("data.root", str(data.root), data.max_ignored).values())
    return TwoDomains(sources, targets, data, trains)


def build_side_by_side(data: Data) -> FilePairs:
    """List images whose halves are input and target.

    Raises:
        UserError: The folder cannot be read or contains no images.
    """
    found = _by_name("data.root", str(data.root), data.max_ignored)
    return FilePairs([(found[name], found[name]) for name in sorted(found)], data)


def _by_name(field: str, text: str, max_ignored: int | None) -> dict[str, str]:
    """Return the image files below a folder, by relative path without suffix."""
    root = data_directory(field, text, "give the directory with the images")
    try:
        files = files_below(root)
    except OSError as error:
        raise UserError(field, text, f"cannot be read: {reason(error, text)}", "fix its permissions") from error
    others = left_out(files, files.images)
    if not files.images:
        raise UserError(field, text, "contains no images", "give a directory with images", others.text())
    found = {os.path.splitext(name)[0]: os.path.join(root, name) for name in files.images}
    if len(found) < len(files.images):
        raise UserError(field, text, "has images whose names differ only in the suffix", "keep one of each name")
    others.check(field, text, len(found), max_ignored)
    others.tell(text)
    return found
