"""Images as a data set has them, which `bigsgan data prepare` and `encode` convert.

Shapes: C channels (1 grey, 3 RGB), H by W pixels.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.data.datasets import Label
from bigsgan.data.fingerprint import digest
from bigsgan.data.labels import as_vector
from bigsgan.data.outside import OutsideImages, class_of, numbers_of, pil_image
from bigsgan.data.packed import PackedFiles
from bigsgan.data.pairs import FilePairs
from bigsgan.data.tables import TableImages
from bigsgan.errors import UserError, reason
from bigsgan.images.reading import (
    CorruptImage,
    accepting_truncated,
    image_tensor,
    noting_values,
    open_image,
    own_channels,
    values_of,
)
from bigsgan.images.size import Fitting
from bigsgan.images.wide import extent, fitted, read_numbers
from bigsgan.runtime.paths import check_regular

RESUMES = "then run the same command again, which resumes"
"""End of a remedy's text."""


_FAULTS_OF_IMAGES = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EINVAL)
"""Errors of one file, not of the disk. EINVAL is raised for a pipe instead of a file."""


class Originals:
    """Images by number. Worker processes inherit them, and read them."""

    def __init__(self, data: Data) -> None:
        """Take the section that says how images are read."""
        self._data = data

    def name(self, index: int) -> str:
        """Return the name of an image, for messages."""
        raise NotImplementedError

    def content(self, index: int) -> bytes | None:
        """Return the content of an image of which files are read from their beginning on; None for any other.

        Only one process calls this, in the order of the images.

        Raises:
            CorruptImage: The image cannot be read.
            UserError: The disk fails.
        """

    def image(self, index: int, content: bytes | None = None) -> Image.Image:
        """Return an image, of its ``content`` if it has one.

        Raises:
            CorruptImage: The image cannot be read.
            UserError: The disk fails.
        """
        raise NotImplementedError

    def numbers(self, index: int, content: bytes | None, channels: int | None) -> np.ndarray:
        """Return the numbers of an image in their units; see ``read_numbers``. Only ``data.range`` needs it.

        Raises:
            CorruptImage: The image cannot be read.
            UserError: The disk fails, or a package is missing.
        """
        raise NotImplementedError

    def pixels(self, index: int, content: bytes | None, fitting: Fitting, channels: int | None) -> tuple[Tensor, int]:
        """Return an image that fits, uint8 (C, H, W), and C, which is its own number if ``channels`` is None.

        With ``data.range``, it is float32 in the units of the data.

        Raises:
            CorruptImage: The image cannot be read.
            UserError: The disk fails, or a package is missing.
        """
        with accepting_truncated(self._data.accepts_truncated):
            if self._data.range is not None:
                numbers = self.numbers(index, content, channels)
                found = fitted(numbers, self.name(index), fitting, channels, self._data.range)
                return found, len(found)
            image = self.image(index, content)
            channels = own_channels(image) if channels is None else channels
            return image_tensor(image, self.name(index), fitting, channels), channels

    def values(self, index: int) -> Sequence[tuple[float, float]]:
        """Return the lowest and highest value of a readable image of more than 8 bits, with ``data.range`` of any."""
        with noting_values() as found, accepting_truncated(self._data.accepts_truncated):
            if self._data.range is not None:
                return [extent(self.numbers(index, None, None), self.name(index))]
            self.image(index)
        return found

    def digest(self) -> str:
        """Return a hash that changes when a file does."""
        raise NotImplementedError


class LooseOriginals(Originals):
    """Separate files."""

    def __init__(self, paths: list[str], data: Data) -> None:
        super().__init__(data)
        self._paths = paths

    def name(self, index: int) -> str:
        """Return the path."""
        return self._paths[index]

    def image(self, index: int, content: bytes | None = None) -> Image.Image:
        """Read the file; see ``Originals.image``."""
        return _image_of(self._paths[index])

    def numbers(self, index: int, content: bytes | None, channels: int | None) -> np.ndarray:
        """Read the file; see ``Originals.numbers``."""
        path = self._paths[index]
        return read_numbers(path, _content_of(path), channels)

    def values(self, index: int) -> Sequence[tuple[float, float]]:
        """Decode only an image of more than 8 bits, unless there is a range."""
        return values_of(self._paths[index]) if self._data.range is None else super().values(index)

    def digest(self) -> str:
        """Return the hash of paths, sizes and times."""
        return _digest_of_files(self._paths, str(self._data.root))


class PairedOriginals(Originals):
    """Pairs of images, which become one image with the input in its left half."""

    def __init__(self, pairs: FilePairs, data: Data) -> None:
        super().__init__(data)
        self._pairs = pairs

    def name(self, index: int) -> str:
        """Return the path of the target."""
        return self._pairs.pairs[index][1]

    def image(self, index: int, content: bytes | None = None) -> Image.Image:
        """Return the target; see ``Originals.image``."""
        return _image_of(self.name(index))

    def pixels(self, index: int, content: bytes | None, fitting: Fitting, channels: int | None) -> tuple[Tensor, int]:
        """Return both images that fit, side by side, with the channels of the one that has more: (C, H, 2 W)."""
        with accepting_truncated(self._data.accepts_truncated):
            images = self._pairs.images(index, _image_of)
            channels = max(map(own_channels, images)) if channels is None else channels
            names = self._pairs.pairs[index]
            both = [image_tensor(image, name, fitting, channels) for image, name in zip(images, names, strict=True)]
            return torch.cat(both, dim=2), channels

    def digest(self) -> str:
        """Return the hash of paths, sizes and times."""
        return _digest_of_files([path for pair in self._pairs.pairs for path in pair], str(self._data.root))


class PackedOriginals(Originals):
    """Files in archives."""

    def __init__(self, files: PackedFiles, data: Data) -> None:
        super().__init__(data)
        self._files = files

    def name(self, index: int) -> str:
        """Return the path of the archive, followed by the path in it."""
        return self._files.path(index)

    def content(self, index: int) -> bytes | None:
        """Read a file in a compressed archive; see ``Originals.content``."""
        return self._read(index) if self._files.is_in_stream(index) else None

    def image(self, index: int, content: bytes | None = None) -> Image.Image:
        """Read the file; see ``Originals.image``."""
        return open_image(self.name(index), io.BytesIO(self._read(index) if content is None else content))

    def numbers(self, index: int, content: bytes | None, channels: int | None) -> np.ndarray:
        """Read the file; see ``Originals.numbers``."""
        return read_numbers(self.name(index), self._read(index) if content is None else content, channels)

    def _read(self, index: int) -> bytes:
        try:
            return self._files.read(index)
        except CorruptImage as error:
            if isinstance(error.__cause__, OSError):
                raise unreadable(error.path, error.__cause__) from error.__cause__
            raise

    def digest(self) -> str:
        """Return the hash of the index, and of the times of the archives."""
        return hashlib.sha256(repr((self._files.fingerprint(), self._files.times())).encode()).hexdigest()


class OutsideOriginals(Originals):
    """Images of a data set of other code, or in the rows of a table. Other ranks build it for themselves."""

    def __init__(self, build: Callable[[Data], OutsideImages], data: Data) -> None:
        """Build the data set."""
        super().__init__(data)
        self._build, self.dataset = build, build(data)

    def __reduce__(self) -> tuple[type[OutsideOriginals], tuple[Callable[[Data], OutsideImages], Data]]:
        """Pickle what builds it, as code of the user's own need not be fit for it."""
        return OutsideOriginals, (self._build, self._data)

    def name(self, index: int) -> str:
        """Return the number and the data set."""
        return self.dataset.image_name(index)

    def image(self, index: int, content: bytes | None = None) -> Image.Image:
        """Return the image of a sample; see ``Originals.image``."""
        try:
            return pil_image(self.dataset.sample(index)[0])
        except ValueError as error:
            raise CorruptImage(self.name(index), str(error)) from error

    def numbers(self, index: int, content: bytes | None, channels: int | None) -> np.ndarray:
        """Return the numbers of a sample; see ``Originals.numbers``."""
        try:
            return numbers_of(self.dataset.sample(index)[0], channels)
        except ValueError as error:
            raise CorruptImage(self.name(index), str(error)) from error

    def label(self, index: int) -> Label | str | None:
        """Return the class of a sample, or its vector, or why it has none; None if the sample cannot be read."""
        try:
            label = self.dataset.sample(index)[1]
            return as_vector(self._data, label) if self._data.has_vectors else class_of(label)
        except CorruptImage:
            return None
        except ValueError as error:
            return str(error)

    def digest(self) -> str:
        """Return the hash of the data set's attributes, or of the sizes and times of a table's files."""
        files = list(self.dataset.source.files) if isinstance(self.dataset, TableImages) else []
        found = self.dataset.fingerprint(), _digest_of_files(files, str(self._data.root))
        return hashlib.sha256(repr(found).encode()).hexdigest()


def _digest_of_files(paths: Sequence[str], root: str) -> str:
    def state(path: str) -> bytes:
        try:
            found = os.stat(path)
        except OSError:  # a broken link: an unreadable image
            return b"unreadable"
        return f"{found.st_size} {found.st_mtime_ns}".encode()

    return digest(piece for path in paths for piece in (os.fsencode(path.removeprefix(root)), state(path)))


def _image_of(path: str) -> Image.Image:
    return open_image(path, io.BytesIO(_content_of(path)))


def _content_of(path: str) -> bytes:
    """Read a file.

    Raises:
        CorruptImage: The file is no readable image.
        UserError: The disk fails.
    """
    try:
        check_regular(path)
        return Path(path).read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: OSError) -> CorruptImage | UserError:
    """Return the error to raise after an error in reading an image: that image's fault, or the disk's."""
    if error.errno in _FAULTS_OF_IMAGES:
        return CorruptImage(path, reason(error, path))
    return UserError("SRC", path, f"cannot be read: {reason(error, path)}", f"fix the disk, {RESUMES}")
