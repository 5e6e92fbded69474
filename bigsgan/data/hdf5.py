"""Images in an HDF5 file, as BigGAN-PyTorch's make_hdf5.py writes it; with ``data.range``, of any numbers.

Shapes: N images, C channels (1 grey, 3 RGB), H by W pixels.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bigsgan.config.data import Data
from bigsgan.data.datasets import Label, label_at
from bigsgan.data.labels import vectors_of
from bigsgan.data.listing import Ignored, some_names, warn_once
from bigsgan.data.tables import TableImages, check_classes
from bigsgan.errors import UserError, counted, reason
from bigsgan.runtime.extras import require
from bigsgan.runtime.paths import check_regular

_LEAST_CACHED, _MOST_CACHED = 1 << 20, 1 << 29
_IMAGES, _LABELS = "imgs", "labels"
"""The data sets of BigGAN-PyTorch: uint8 (N, 3, R, R) and int64 (N,)."""
_REMEDY = f"give an HDF5 file with images, uint8 (N, C, H, W) or (N, H, W, C), in {_IMAGES} or data.image_key"


class Hdf5File:
    """The rows of a file, which every process opens for itself, as HDF5 does not survive a fork."""

    classes: Sequence[str] = ()
    ignored = Ignored({})

    def __init__(self, path: str, image_key: str, is_planar: bool, labels: np.ndarray | None) -> None:
        """Take the path, and where images are, (N, C, H, W) if they are planar; see ``Table`` for ``labels``."""
        self.files: Sequence[str] = [path]
        self.labels = labels
        self._image_key, self._is_planar = image_key, is_planar
        self._process, self._images = 0, None
        with opened(path) as file:
            images = file[image_key]
            self.others: Sequence[str] = [name for name in file if name != image_key]
            self._num = len(images)
            self.num_in_chunk = images.chunks[0] if images.compression else 1
            chunk = int(np.prod(images.chunks or (0,))) * images.dtype.itemsize
            self._cached = min(max(2 * chunk, _LEAST_CACHED), _MOST_CACHED)

    def __len__(self) -> int:
        return self._num

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the open file."""
        return {**self.__dict__, "_process": 0, "_images": None}

    def __getitem__(self, row: int) -> tuple[Any, Label]:
        if self._process != os.getpid():
            self._process, self._images = os.getpid(), opened(self.files[0], self._cached)[self._image_key]
        pixels = self._images[row]  # type: ignore[index]
        return torch.from_numpy(pixels) if self._is_planar else pixels, 0 if self.labels is None else label_at(
            self.labels, row
        )


def opened(path: str, cached: int = _LEAST_CACHED) -> Any:
    """Open a file to read, without a lock, which some file systems lack; ``cached`` bytes of chunks are kept."""
    return importlib.import_module("h5py").File(path, "r", locking=False, rdcc_nbytes=cached)


def build_hdf5(data: Data) -> TableImages:
    """Open the file ``data.root``.

    Raises:
        UserError: See ``read_hdf5`` and ``check_classes``.
    """
    images = check_classes(read_hdf5(data), data)
    if isinstance(images.source, Hdf5File) and (num := images.source.num_in_chunk) > 1:
        reason = f"{counted(num, 'image')} are compressed together, and all are read for each"
        warn_once(f"{data.root}: {reason}; `bigsgan data prepare` makes files that are read faster")
    return images


def read_hdf5(data: Data) -> TableImages:
    """Open the file ``data.root``, with its classes if the recipe has any.

    Raises:
        UserError: h5py is not installed; the file cannot be read or lacks images; or see ``TableImages``.
    """
    require("hdf5", "data.kind", data.kind)
    path = str(data.root)
    if not os.path.isfile(path):
        problem = "must be a file" if os.path.exists(path) else "does not exist"
        raise UserError("data.root", data.root, problem, _REMEDY)
    try:
        check_regular(path)
        with opened(path) as file:
            key = data.image_key or _IMAGES
            is_planar = _check_images(data, file, key)
            labels = _labels(data, file, len(file[key]))
            return TableImages(Hdf5File(path, key, is_planar, labels), data, path)
    except UserError:
        raise
    except Exception as error:  # OSError, KeyError, RuntimeError, ...: a damaged file raises all kinds
        raise UserError("data.root", data.root, f"cannot be read: {reason(error, path)}", _REMEDY) from error


def _check_images(data: Data, file: Any, key: str) -> bool:
    """Return whether images are planar, (N, C, H, W).

    Raises:
        UserError: They are not there, or have another form.
    """
    found = file.get(key)
    if found is None or not hasattr(found, "shape"):
        problem, names = f"has no images {key!r}", some_names([str(name) for name in file])
        raise UserError("data.root", data.root, problem, "name them in data.image_key", f"it has{names or ' nothing'}")
    if data.range is not None and len(found.shape) in (3, 4) and found.dtype.kind in "biuf":
        return False  # each image is an array, in which channels are found
    places = [place for place in (1, 3) if len(found.shape) == 4 and found.shape[place] in (1, 3)]
    if found.dtype != np.uint8 or not places:
        remedy = _REMEDY + ", or set data.range" * (data.range is None)
        raise UserError("data.root", data.root, f"has {found.dtype} of shape {found.shape} in {key!r}", remedy)
    return places[0] == 1


def _labels(data: Data, file: Any, num: int) -> np.ndarray | None:
    key = data.label_key or _LABELS
    if not data.condition_width or (data.label_key is None and key not in file):
        return None
    found = file.get(key)
    if data.has_vectors and getattr(found, "shape", ())[:1] == (num,):
        labels = np.asarray(found)  # of numbers as they are: lists of them take ten times the memory
        each = labels if labels.dtype.kind in "biuf" else labels.tolist()
        return vectors_of(data, each, lambda row: f"row {row}")
    is_numbers = getattr(found, "shape", ()) in ((num,), (num, 1)) and found.dtype.kind in "iuf"
    numbers = np.asarray(found).reshape(num) if is_numbers else np.full(num, np.nan)
    if not np.array_equal(numbers, np.round(numbers)):  # floats may count too
        what = "nothing" if found is None else f"{getattr(found, 'dtype', 'a group')} {getattr(found, 'shape', '')}"
        problem = f"has no label for each of {counted(num, 'image')} in {key!r}"
        remedy = "name them in data.label_key, or set data.num_classes=0"
        raise UserError("data.root", data.root, problem, remedy, f"it has {what.strip()}")
    return numbers.astype(np.int64)
