"""Conditions of samples: classes (n,) int64, or vectors (n, K) float32 of numbers.

A vector has a 0 or 1 for each class, and then ``data.condition_size`` further numbers. It is null, all 0, for an image
without a label.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.data.datasets import ImageDataset
from bigsgan.errors import UserError
from bigsgan.images.reading import CorruptImage

Conditions: TypeAlias = range | np.ndarray
"""What samples may be conditioned on, one item for each: classes, or an array of classes or of vectors."""

_MOST_READ = 256
"""Images that are read for their labels, where only an image tells its own."""


def conditions_of(data: Data, dataset: ImageDataset | None, as_often: bool = False) -> Conditions:
    """Return what samples are conditioned on: each class once, or, ``as_often`` as in the data, its images' labels.

    Vectors are always the images'. Of a data set whose images alone tell their labels, they are those of some.

    Raises:
        UserError: No image can be read.
    """
    if not (data.has_vectors or (as_often and data.num_classes)):
        return range(max(data.num_classes, 1))
    assert dataset is not None, "vectors are the data's"
    labels = dataset.labels
    return _labels_of_some(data, dataset) if labels is None else labels


def _labels_of_some(data: Data, dataset: ImageDataset) -> np.ndarray:
    num, found = min(_MOST_READ, len(dataset)), []
    for index in range(num):
        try:
            found.append(dataset[index * len(dataset) // num][1])
        except CorruptImage:  # the loader counts it
            continue
    if not found:
        raise UserError("data.root", data.root, "contains no readable images", "repair its images")
    return np.array(found, dtype=np.float32 if data.has_vectors else np.int64)


def picked(conditions: Conditions, places: np.ndarray) -> Tensor:
    """Return the conditions at some places (n,): (n,) int64 or (n, K) float32."""
    found = conditions.start + places if isinstance(conditions, range) else conditions[places]
    return torch.from_numpy(np.ascontiguousarray(found))
