"""The protocol of data sets, and the data sets of digits, of noise and of image files in folders.

Shapes: N images in a data set, C channels (1 grey, 3 RGB), H x W pixels. Images are uint8 until the loader has them
on the device.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.config.conditions import MOST_NUMBERS
from bigsgan.config.data import Data
from bigsgan.data.codecs import build_codec
from bigsgan.data.fingerprint import Fingerprint, digest, file_sizes, some_of
from bigsgan.data.labels import with_classes
from bigsgan.data.listing import Files, data_directory, files_below, some_names, unreadable_root
from bigsgan.data.tokens import padded
from bigsgan.draws import Draws
from bigsgan.errors import UserError, counted, reason
from bigsgan.images.codec import images_of
from bigsgan.images.reading import (
    CorruptImage,
    accepting_truncated,
    image_tensor,
    noting_proportions,
    noting_values,
    open_image,
    used_range,
)
from bigsgan.images.wide import outside_range, read_wide
from bigsgan.runtime.paths import check_regular

_SYNTHETIC_IMAGES, _SYNTHETIC_LABELS = 8_192, 1_009
_CPU = torch.device("cpu")

_log = logging.getLogger(__name__)

Label: TypeAlias = int | np.ndarray
"""Of an image: the number of its class, or a vector (K,) or tokens (T, W + 1) float32; see conditions.py."""


class ImageDataset(Protocol):
    """The interface that the loader needs. A data set is pickled for the loading processes."""

    in_memory: bool  # whether an image is so cheap that loading processes would only slow it down
    class_names: Sequence[str] = ()  # by number; empty if the data does not tell them

    def __len__(self) -> int:
        """Return N, at least 1."""

    @property
    def labels(self) -> np.ndarray | None:
        """The images' classes (N,) int64, or vectors (N, K) float32; None if only reading an image tells its label."""
        return None

    @property
    def num_files(self) -> int:
        """The number of files, of which some may be corrupt: N, unless a sample is no file."""
        return len(self)

    def __getitem__(self, index: int) -> tuple[Tensor, Label]:
        """Return image ``index``, uint8 (C, H, W), and its label, which is 0 if the recipe has none.

        With ``data.range``, the image is float32 in [-1, 1].

        For latents, the tensor is float32 (2 * C, H, W): means and standard deviations.

        Raises:
            CorruptImage: The image cannot be read.
        """

    def fingerprint(self) -> Fingerprint:
        """Return digests of the listing, computed without opening images and independent of the root's path."""
        return Fingerprint(len(self))


def readable_images(dataset: ImageDataset, data: Data, num: int, device: torch.device = _CPU) -> Tensor:
    """Return the images of ``readable_samples``."""
    return readable_samples(dataset, data, num, device)[0]


def readable_samples(dataset: ImageDataset, data: Data, num: int, device: torch.device = _CPU) -> tuple[Tensor, Tensor]:
    """Return up to ``num`` readable images, spread over the data set: (n, C, H, W) in [-1, 1] on the host, and labels.

    Warns of classes without images, of images of other proportions, and of more than 8 bits that use a part of their
    range. Latents are decoded on ``device``.

    Raises:
        UserError: None of them is readable, or their autoencoder cannot be read.
    """
    num, paths = min(num, len(dataset)), list[str]()
    with noting_values(paths) as values, noting_proportions() as kept:
        found, problems = _readable(dataset, [index * len(dataset) // num for index in range(num)])
    for root in dict.fromkeys((data.input_root or data.root, data.root)):
        own = [each for each, path in zip(values, paths, strict=True) if _root_of(path, data) == root]
        if text := used_range(own) if data.range is None else outside_range(own, data.range):
            text += ", or set data.range" * (data.range is None)
            _log.warning("%s: of %d images, %s", root or data.kind, num, text)
    if others := kept.count(False):
        have = "1 has" if others == 1 else f"{others} have"
        text = "%s: of %s, %s other proportions: %s (data.fit=%s)"
        _log.warning(text, data.root or data.kind, counted(len(kept), "image"), have, data.fitting.text, data.fit)
    if data.num_classes > 1 and not data.has_vectors and (labels := dataset.labels) is not None:
        empty = np.flatnonzero(np.bincount(labels, minlength=data.num_classes) == 0)  # as class 0 of those from 1 on
        if len(empty):
            have = "1 class has" if len(empty) == 1 else f"{len(empty)} classes have"
            _log.warning("%s: %s no images%s", data.root or data.kind, have, some_names([str(each) for each in empty]))
    if not found:
        detail = f"of {counted(num, 'image')} that {'was' if num == 1 else 'were'} tried, {problems[0]}"
        field, value = ("data.root", data.root) if data.root else ("data.kind", data.kind)
        raise UserError(field, value, "contains no readable images", "repair its images", detail)
    images, labelled = zip(*found.values(), strict=True)
    return _decoded(images, data, device), torch.from_numpy(np.array(labelled))


def images_of_classes(
    dataset: ImageDataset, data: Data, classes: Sequence[int], num: int, device: torch.device = _CPU
) -> Tensor | None:
    """Return a grid of real images whose columns are classes, with up to ``num`` of each, spread over its images.

    Row by row (num * classes, C, H, W) in [-1, 1] on the host, and black where a class has fewer. None if there are
    no classes, if only reading an image tells its own, or if no image can be read.

    Raises:
        UserError: An autoencoder cannot be read.
    """
    labels = dataset.labels
    if labels is None or not data.num_classes or data.has_vectors:
        return None
    places: dict[int, int] = {}
    for column, label in enumerate(classes):
        (of_class,) = np.nonzero(labels == label)
        rows = min(num, len(of_class))
        places |= {row * len(classes) + column: int(of_class[row * len(of_class) // rows]) for row in range(rows)}
    found, _ = _readable(dataset, sorted(set(places.values())))
    if not found:
        return None
    images = dict(zip(found, _decoded([image for image, _ in found.values()], data, device), strict=True))
    black = -torch.ones_like(next(iter(images.values())))
    return torch.stack([images.get(places.get(place, -1), black) for place in range(num * len(classes))])


def _readable(dataset: ImageDataset, indices: Sequence[int]) -> tuple[dict[int, tuple[Tensor, Label]], list[str]]:
    """Return the readable samples by their numbers, and what the others lack; the loader counts and reports these."""
    found, problems = {}, []
    for index in indices:
        try:
            found[index] = dataset[index]
        except CorruptImage as error:
            problems.append(str(error))
    return found, problems


def _decoded(found: Sequence[Tensor], data: Data, device: torch.device) -> Tensor:
    if data.kind != "latents":
        return images_of(torch.stack([*found]))
    codec, means = build_codec(data, device), torch.stack([*found]).chunk(2, dim=1)[0]
    return codec.decode(codec.encode(means.to(device))).cpu()


def _root_of(path: str, data: Data) -> str | None:
    """Return the root of an image: that of inputs, if it lies there and not in a root of targets below it."""
    inputs, others = (f"{Path(str(root))}/" for root in (data.input_root, data.root))
    is_input = data.input_root and path.startswith(inputs)
    return data.input_root if is_input and (len(inputs) >= len(others) or not path.startswith(others)) else data.root


class DigitImages(ImageDataset):
    """The 1,797 handwritten digits of scikit-learn (8x8, 17 grey levels), resized to H x W.

    The resizing is bicubic (a = -0.5) with antialiasing, which matters below 8x8, on floats, rounded once at the end.
    """

    in_memory = True

    def __init__(self, data: Data) -> None:
        pixels, labels = _load_digits()
        grey = torch.from_numpy(pixels).to(torch.float32).view(-1, 1, 8, 8) * (255 / 16)  # (N, 1, 8, 8), 0 .. 255
        large = F.interpolate(grey, tuple(data.resolution), mode="bicubic", align_corners=False, antialias=True)
        self.images = large.round().clamp(0, 255).to(torch.uint8)  # (N, 1, H, W); bicubic overshoots at edges
        self._labels: np.ndarray = np.array(labels if data.num_classes else [0] * len(labels), dtype=np.int64)
        if data.has_vectors:
            self._labels = np.eye(data.num_classes, dtype=np.float32)[self._labels]

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def labels(self) -> np.ndarray:
        """The digits, or their vectors."""
        return self._labels

    def __getitem__(self, index: int) -> tuple[Tensor, Label]:
        label = self._labels[index]
        return self.images[index], label if label.ndim else int(label)


@functools.cache
def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (1797, 64) and classes (1797,) from scikit-learn's file; to import scikit-learn takes seconds."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    try:
        table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    except OSError:  # another version of scikit-learn has moved it
        pixels, labels = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
        return pixels, labels
    return table[:, :-1], table[:, -1].astype(np.int64)


class SyntheticImages(ImageDataset):
    """Noise of any size for benchmarks and tests: image and class are a function of the index only.

    Each image is a window of one sequence of random bytes, which costs no work; 8,192 images are different.
    """

    in_memory = True

    def __init__(self, data: Data) -> None:
        self.num_images, self.num_classes, self._vectors = data.num_images, data.num_classes, _vectors(data)
        self.shape = (data.image_channels, *data.resolution)
        self.num_bytes = data.image_channels * data.resolution.num_pixels
        words = Draws(seed=0).words("synthetic", (), 0, 1, -(-(self.num_bytes + _SYNTHETIC_IMAGES) // 8))
        self.noise = torch.from_numpy(words[0].view(np.uint8).copy())

    def __len__(self) -> int:
        return self.num_images

    @property
    def labels(self) -> np.ndarray | None:
        """The classes, which take turns, or vectors; None for more images than one would list."""
        if self._vectors is not None and self._vectors.ndim > 2:
            return None
        if self._vectors is not None:
            return self._vectors[np.arange(min(self.num_images, 10**6)) % len(self._vectors)]  # they repeat themselves
        return np.arange(self.num_images) % max(self.num_classes, 1) if self.num_images <= 10**6 else None

    def __getitem__(self, index: int) -> tuple[Tensor, Label]:
        # An odd factor moves neighbours far apart, and maps no two of the 8,192 to the same window.
        first = index * 3_001 % _SYNTHETIC_IMAGES
        image = self.noise[first : first + self.num_bytes].view(self.shape)
        if self._vectors is not None:
            return image, self._vectors[index % len(self._vectors)]
        return image, index % self.num_classes if self.num_classes else 0


def _vectors(data: Data) -> np.ndarray | None:
    """Return vectors (_SYNTHETIC_LABELS, K) of classes in turn and normal numbers, if labels are vectors."""
    if not data.has_vectors:
        return None
    if data.conditions_are_tokens:  # of 1, 2, ... T tokens in turn
        (most, width), num = data.condition_shape, max(8, min(_SYNTHETIC_LABELS, MOST_NUMBERS // data.condition_width))
        tokens = Draws(seed=0).normal("synthetic/label", (), 0, num, most * width).reshape(num, most, width)
        tokens[..., -1] = np.arange(most) <= np.arange(num)[:, None] % most
        return np.stack([padded(data, each) for each in tokens])
    numbers = Draws(seed=0).normal("synthetic/label", (), 0, _SYNTHETIC_LABELS, data.condition_width - data.num_classes)
    classes = np.zeros((_SYNTHETIC_LABELS, data.num_classes), np.float32)
    if data.num_classes:
        places = np.arange(_SYNTHETIC_LABELS)
        classes[places, places % data.num_classes] = 1
    return np.concatenate([classes, numbers], axis=1)


def read_image(data: Data, path: str, content: bytes | None = None) -> Tensor:
    """Read an image file, or ``content``, for which ``path`` is only a name, as the recipe has images.

    Returns:
        uint8 (C, H, W); with ``data.range`` float32 in [-1, 1].

    Raises:
        CorruptImage: It cannot be read.
    """
    with accepting_truncated(data.accepts_truncated):
        if data.range is not None:
            return read_wide(path, data.fitting, data.image_channels, data.range, content)
        image = open_image(path, None if content is None else io.BytesIO(content))
        return image_tensor(image, path, data.fitting, data.image_channels)


class PathList:
    """A list of millions of paths, of files or archive members, that forked processes share."""

    def __init__(self, paths: Iterable[str]) -> None:
        # Not a list of str: reading a Python object writes its reference count, and each forked loading process would
        # end up with its own copy (pytorch issue 13246). One block of bytes stays shared.
        encoded = [path.encode("utf-8", "surrogateescape") for path in paths]
        self._paths = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __getitem__(self, index: int) -> str:
        return self._paths[self._ends[index] : self._ends[index + 1]].decode("utf-8", "surrogateescape")

    def digest(self) -> str:
        """Return the hash of all paths in order."""
        return digest(self._paths[first:end] for first, end in itertools.pairwise(self._ends))


def label_at(labels: np.ndarray, index: int) -> Label:
    """Return one of labels (N,) or (N, K)."""
    return int(labels[index]) if labels.ndim == 1 else labels[index]


class LooseFiles:
    """Files in a directory, each with a label."""

    def __init__(self, root: Path, names: list[str], labels: np.ndarray) -> None:
        self._root, self._names, self._labels = root, PathList(names), labels

    def __len__(self) -> int:
        return len(self._labels)

    def path(self, index: int) -> str:
        """Return the path of file ``index``."""
        return os.path.join(self._root, self._names[index])

    @property
    def labels(self) -> np.ndarray:
        """The label of each file: classes (N,) int64, or vectors (N, K) float32."""
        return self._labels

    def label(self, index: int) -> Label:
        """Return the label of file ``index``."""
        return label_at(self._labels, index)

    def read(self, index: int) -> bytes:
        """Return the content of file ``index``; raise CorruptImage if it cannot be read."""
        path = self.path(index)
        try:
            check_regular(path)
            return Path(path).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a name with a null byte
            raise CorruptImage(path, reason(error, path)) from None

    def fingerprint(self) -> Fingerprint:
        """Return digests of the names, of the classes, and of the sizes of some files."""
        sizes = file_sizes(map(self.path, some_of(len(self))))
        return Fingerprint(len(self), self._names.digest(), digest([self._labels.tobytes()]), sizes)


class FolderImages(LooseFiles, ImageDataset):
    """Image files."""

    in_memory = False

    def __init__(self, root: Path, names: list[str], labels: np.ndarray, class_names: list[str], data: Data) -> None:
        super().__init__(root, names, labels)
        self.class_names = class_names
        self.data = data

    def __getitem__(self, index: int) -> tuple[Tensor, Label]:
        return read_image(self.data, self.path(index)), self.label(index)


def build_folder(data: Data) -> FolderImages:
    """List the images below ``data.root``; see ``with_classes``.

    Raises:
        UserError: The directory cannot be read, or does not fit; see ``with_classes``.
    """
    root, files = directory_files(data)
    return FolderImages(root, *with_classes(data, files, "a directory with files"), data)


def directory_files(data: Data) -> tuple[Path, Files]:
    """Return the directory ``data.root``, and the files below it.

    Raises:
        UserError: It cannot be read.
    """
    remedy = "give the directory with the images"
    if os.path.isfile(str(data.root)):
        remedy += ", set data.kind=zip for a zip file, or unpack another archive"
    root = data_directory("data.root", data.root, remedy)
    try:
        return root, files_below(root, data.range is not None)
    except OSError as error:
        raise unreadable_root(data, error) from error
