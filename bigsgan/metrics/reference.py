"""Opens references for metrics instead of the run's data: an .npz file of images, of statistics, or of both.

Shapes: N images (N, R, R, C) uint8, D features.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bigsgan.checkpoint.files import checksum
from bigsgan.config.data import Data
from bigsgan.data.datasets import ImageDataset
from bigsgan.errors import UserError, reason
from bigsgan.images.npz import IMAGES, LABELS, mapped_arrays, read_arrays
from bigsgan.metrics.moments import Gaussian

_MOST_BYTES = 1 << 30
"""Largest covariance: that of 11,585 features in float64."""
_MOST_ASYMMETRY = 1e-4
"""Largest asymmetry of a covariance, relative to its largest element."""


class Reference(NamedTuple):
    """Real images, or their statistics, or both."""

    images: ImageDataset | None  # None if there are only statistics
    gaussian: Gaussian | None = None  # statistics that `fid` compares with instead of the images
    # whether samples get classes as frequent as those of the images; else all classes are equally frequent
    labelled: bool = True


class MappedImages(ImageDataset):
    """Images of a memory-mapped array, with their classes (N,) or class 0."""

    in_memory = True

    def __init__(self, images: np.ndarray, labels: np.ndarray | None) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(np.array(self._images[index])).permute(2, 0, 1).contiguous()
        return image, 0 if self._labels is None else int(self._labels[index])


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
    try:
        arrays = mapped_arrays(path, (IMAGES, LABELS)) | read_arrays(path, ("mu", "sigma"), _MOST_BYTES)
    except (OSError, ValueError) as error:
        problem = f"must be an .npz file whose images are uncompressed: {reason(error, path)}"
        raise UserError(field, str(path), problem, "write it with numpy.savez") from None
    found = _Checked(field, path, arrays)
    gaussian = found.gaussian(width) if {"mu", "sigma"} & arrays.keys() else None
    images = found.images(data) if IMAGES in arrays else None
    labels = found.labels(data) if LABELS in arrays and images is not None and data.num_classes else None
    if gaussian is None and images is None:
        found.refuse(f"has neither {IMAGES} nor mu and sigma", "give images or statistics")
    dataset = None if images is None else MappedImages(images, labels)
    return Reference(dataset, gaussian, labels is not None or not data.num_classes)


def about_reference(path: Path | None) -> dict[str, str]:
    """Return what the record of a measurement says about the file that it compared with."""
    return {} if path is None else {"reference": str(path), "reference_sha256": checksum(path)}


class _Checked:
    """The arrays of a file, each checked by the method that returns it."""

    def __init__(self, field: str, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
        self._field, self._path, self._arrays = field, path, arrays

    def refuse(self, problem: str, remedy: str) -> None:
        raise UserError(self._field, str(self._path), problem, remedy)

    def gaussian(self, width: int) -> Gaussian:
        """Mean and covariance in float64."""
        remedy = "give the statistics (D,) and (D, D) of one network's features"
        mean, covariance = (self._arrays.get(name, np.empty(0)) for name in ("mu", "sigma"))
        if mean.ndim != 1 or not mean.size or covariance.shape != (mean.size, mean.size):
            shapes = f"mu {mean.shape} and sigma {covariance.shape}"
            self.refuse(f"must have mu (D,) and sigma (D, D), got {shapes}", remedy)
        if not all(np.issubdtype(each.dtype, np.floating) for each in (mean, covariance)):
            self.refuse("must have mu and sigma of floating point numbers", remedy)
        mean, covariance = (np.array(each, dtype=np.float64) for each in (mean, covariance))
        if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
            self.refuse("has mu or sigma with non-finite values", remedy)
        if np.abs(covariance - covariance.T).max() > _MOST_ASYMMETRY * np.abs(covariance).max():
            self.refuse("has a sigma that is not symmetric", remedy)
        if len(mean) != width:
            problem = f"must have statistics of {width} features, as many as the feature network gives, got {len(mean)}"
            self.refuse(problem, "choose the network that they are of")
        return Gaussian(torch.from_numpy(mean), torch.from_numpy(covariance))

    def images(self, data: Data) -> np.ndarray:
        images = self._arrays[IMAGES]
        wanted = (data.resolution, data.resolution, data.image_channels)
        if images.ndim != 4 or images.shape[1:] != wanted or images.dtype != np.uint8:
            problem = f"must have {IMAGES} (N, {', '.join(map(str, wanted))}) uint8, as the run's images are"
            self.refuse(f"{problem}, got {images.shape} {images.dtype}", "give images of the same size")
        return images

    def labels(self, data: Data) -> np.ndarray:
        labels = np.array(self._arrays[LABELS])
        num = len(self._arrays[IMAGES])
        if labels.shape != (num,) or not np.issubdtype(labels.dtype, np.integer):
            problem = f"must have {LABELS} ({num},) of integers, got {labels.shape} {labels.dtype}"
            self.refuse(problem, f"give the class of each image, or no {LABELS}")
        if num and not 0 <= labels.min() <= labels.max() < data.num_classes:
            problem = f"must have classes 0 to {data.num_classes - 1} in {LABELS}, got {labels.min()} to {labels.max()}"
            self.refuse(problem, f"give the run's classes, or no {LABELS}")
        return labels
