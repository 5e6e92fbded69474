"""Opens references for metrics instead of the run's data: an .npz file of images, of statistics, or of both.

Shapes: N images (N, H, W, C) uint8, or with ``data.range`` float in its units, as `bigsgan sample` writes them; D
features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.config.metrics import LEAST_IMAGES
from bigsgan.data.datasets import ImageDataset
from bigsgan.errors import UserError, counted, reason
from bigsgan.images.npz import IMAGES, LABELS, mapped_arrays, read_arrays
from bigsgan.images.wide import wide_tensor
from bigsgan.metrics.moments import Gaussian

_MOST_BYTES = 1 << 30
"""Largest covariance: that of 11,585 features in float64."""
_MOST_ASYMMETRY = 1e-4
"""Largest asymmetry of a covariance, relative to its largest element."""


Refused = Callable[[str, str], UserError]
"""Makes the refusal of a file, of a problem and a remedy."""


class Reference(NamedTuple):
    """Real images, or their statistics, or both."""

    images: ImageDataset | None  # None if there are only statistics
    gaussian: Gaussian | None = None  # statistics that `fid` compares with instead of the images
    # whether samples get classes as frequent as those of the images; else all classes are equally frequent
    labelled: bool = True


class MappedImages(ImageDataset):
    """Images of a memory-mapped array, with their classes (N,) or class 0."""

    in_memory = True

    def __init__(self, images: np.ndarray, labels: np.ndarray | None, data: Data, path: Path) -> None:
        self._images, self._labels, self._data, self._path = images, labels, data, path

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = 0 if self._labels is None else int(self._labels[index])
        pixels, data = np.array(self._images[index]), self._data
        if pixels.dtype == np.uint8:
            return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), label
        assert data.range is not None
        name = f"image {index} of {self._path}"
        return wide_tensor(pixels, name, data.fitting, data.image_channels, data.range), label


def open_reference(path: Path, data: Data, width: int, field: str) -> Reference:
    """Open a file in the form of ADM's evaluation suite: `arr_0`, `arr_1`, `mu` and `sigma`; other keys are ignored.

    Args:
        path: The file.
        data: The run's data section.
        width: Number of features of the network that statistics must be of.
        field: The key or option that names the file.

    Raises:
        UserError: The file cannot be read, has none of these, or does not fit the run's images or the features.
    """
    refused = partial(UserError, field, str(path))
    try:
        arrays = mapped_arrays(path, (IMAGES, LABELS)) | read_arrays(path, ("mu", "sigma"), _MOST_BYTES)
    except (OSError, ValueError) as error:
        problem = f"must be an .npz file whose images are uncompressed: {reason(error, path)}"
        raise refused(problem, "write it with numpy.savez") from None
    gaussian = _gaussian(arrays, width, refused) if {"mu", "sigma"} & arrays.keys() else None
    images = _images(arrays[IMAGES], data, refused) if IMAGES in arrays else None
    labels = None
    if images is not None and LABELS in arrays and data.num_classes and not data.has_vectors:
        labels = _labels(arrays[LABELS], len(images), data, refused)
    if gaussian is None and images is None:
        raise refused(f"has neither {IMAGES} nor mu and sigma", "give images or statistics")
    if images is not None and len(images) < LEAST_IMAGES:
        raise refused(
            f"has {counted(len(images), 'image')}, and metrics need at least {LEAST_IMAGES}", "give more images"
        )
    dataset = None if images is None else MappedImages(images, labels, data, path)
    return Reference(dataset, gaussian, labels is not None or not data.num_classes or data.has_vectors)


def _gaussian(arrays: Mapping[str, np.ndarray], width: int, refused: Refused) -> Gaussian:
    """Return mean and covariance in float64."""
    remedy = "give the statistics (D,) and (D, D) of one network's features"
    mean, covariance = (arrays.get(name, np.empty(0)) for name in ("mu", "sigma"))
    if mean.ndim != 1 or not mean.size or covariance.shape != (mean.size, mean.size):
        shapes = f"mu {mean.shape} and sigma {covariance.shape}"
        raise refused(f"must have mu (D,) and sigma (D, D), got {shapes}", remedy)
    if not all(np.issubdtype(each.dtype, np.floating) for each in (mean, covariance)):
        raise refused("must have mu and sigma of floating point numbers", remedy)
    mean, covariance = (np.array(each, dtype=np.float64) for each in (mean, covariance))
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise refused("has mu or sigma with non-finite values", remedy)
    if np.abs(covariance - covariance.T).max() > _MOST_ASYMMETRY * np.abs(covariance).max():
        raise refused("has a sigma that is not symmetric", remedy)
    if len(mean) != width:
        problem = f"must have statistics of {width} features, as many as the feature network gives, got {len(mean)}"
        raise refused(problem, "choose the feature network that they are of, or give other statistics")
    return Gaussian(torch.from_numpy(mean), torch.from_numpy(covariance))


def _images(images: np.ndarray, data: Data, refused: Refused) -> np.ndarray:
    wanted = (*data.resolution, data.image_channels)
    is_typed = images.dtype == np.uint8 or (images.dtype.kind == "f" and data.range is not None)
    if images.ndim != 4 or images.shape[1:] != wanted or not is_typed:
        types = "uint8" if data.range is None else "uint8, or float in the units of data.range"
        problem = f"must have {IMAGES} (N, {', '.join(map(str, wanted))}) {types}, as the run's images are"
        raise refused(f"{problem}, got {images.shape} {images.dtype}", "give images of the same size")
    return images


def _labels(labels: np.ndarray, num: int, data: Data, refused: Refused) -> np.ndarray:
    labels = np.array(labels)
    if labels.shape != (num,) or not np.issubdtype(labels.dtype, np.integer):
        problem = f"must have {LABELS} ({num},) of integers, got {labels.shape} {labels.dtype}"
        raise refused(problem, f"give the class of each image, or no {LABELS}")
    if num and not 0 <= labels.min() <= labels.max() < data.num_classes:
        problem = f"must have classes 0 to {data.num_classes - 1} in {LABELS}, got {labels.min()} to {labels.max()}"
        raise refused(problem, f"give the run's classes, or no {LABELS}")
    return labels
