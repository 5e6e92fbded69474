"""Conditions of samples: classes (n,) int64, or vectors (n, K) or tokens (n, T, W + 1) float32 of numbers.

A vector has a 0 or 1 for each class, and then ``data.condition_size`` further numbers. Behind the numbers of each token
is a mask: 1, or 0 for padding (tokens.py). A condition is null, all 0, for an image without a label, or where
``data.condition_dropout`` drops it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from bigsgan.config.conditions import MOST_NUMBERS
from bigsgan.config.data import Data
from bigsgan.config.run_directory import SOME_LABELS
from bigsgan.data.datasets import ImageDataset
from bigsgan.data.tokens import padded
from bigsgan.errors import UserError, counted, reason
from bigsgan.images.reading import CorruptImage
from bigsgan.runtime.atomic import replacing
from bigsgan.runtime.paths import check_regular, writing

Conditions: TypeAlias = range | np.ndarray
"""What samples may be conditioned on, one item for each: classes, or an array of classes, vectors or tokens."""

_MOST_READ, _FEW, _MOST_KEPT = 2_000, 256, 4_096
"""Images that are read for their labels, where only an image tells its own: all of a data set, or some; labels that a
run directory keeps."""


def conditions_of(data: Data, dataset: ImageDataset, as_often: bool = False) -> Conditions:
    """Return what samples are conditioned on: each class once, or, ``as_often`` as in the data, its images' labels.

    Vectors are always the images', and tokens those of ``some_conditions``.

    Raises:
        UserError: Only images tell their labels, and there are too many to read them all, or none can be read.
    """
    if not (data.has_vectors or (as_often and data.num_classes)):
        return range(max(data.num_classes, 1))
    if data.conditions_are_tokens:
        return some_conditions(data, dataset)
    labels = dataset.labels
    if labels is None and len(dataset) > _MOST_READ:
        problem, remedy = "has labels that only its images tell", "let the data set have an attribute `labels` with all"
        detail = f"fakes draw theirs from those of {counted(len(dataset), 'image')}"
        field = "dataset" if data.kind == "torchvision" else "kind"
        remedy += ", or set objective.fake_labels=data"
        raise UserError(f"data.{field}", getattr(data, field), problem, remedy, detail)
    return _read(data, dataset, len(dataset)) if labels is None else labels


def some_conditions(data: Data, dataset: ImageDataset) -> Conditions:
    """Return classes, or the vectors of up to 4,096 images over the data set: what sheets and a run directory show.

    Raises:
        UserError: No image can be read, where these alone tell labels.
    """
    if not data.has_vectors:
        return range(max(data.num_classes, 1))
    labels = dataset.labels
    if labels is None:
        return _read(data, dataset, min(_FEW, len(dataset), max(1, MOST_NUMBERS // data.condition_width)))
    num = min(_MOST_KEPT, len(labels))
    return labels[np.arange(num) * len(labels) // num]


def _read(data: Data, dataset: ImageDataset, num: int) -> np.ndarray:
    found, problem = [], ""
    for index in range(num):
        try:
            found.append(dataset[index * len(dataset) // num][1])
        except CorruptImage as error:  # the loader counts it
            problem = str(error)
    if not found:
        remedy = "correct its tokens, or data.condition_size" if data.conditions_are_tokens else "repair its images"
        raise UserError("data.root", data.root, "contains no readable images", remedy, problem)
    return np.array(found, dtype=np.float32 if data.has_vectors else np.int64)


def keep_labels(run: Path, conditions: Conditions) -> None:
    """Write vectors of some images into a run directory, from which samples take theirs without the data.

    Raises:
        UserError: The file cannot be written.
    """
    if isinstance(conditions, range):
        return
    content, path = io.BytesIO(), run / SOME_LABELS
    np.save(content, conditions)
    with writing(path), replacing(path) as unfinished:
        unfinished.write_bytes(content.getvalue())


def read_vectors(data: Data, path: Path, field: str) -> np.ndarray:
    """Read vectors (M, K) from a .npy file, or from text with commas, or tokens; ``field`` is what names the file.

    Raises:
        UserError: It cannot be read, or is not of this form.
    """
    remedy = "give a .npy file (M, K), or a line of numbers with commas for each vector"
    remedy = "give a .npy file (M, t, W)" if data.conditions_are_tokens else remedy
    try:
        check_regular(path)
        is_array = path.suffix == ".npy"
        found = np.load(path, allow_pickle=False) if is_array else np.loadtxt(path, delimiter=",", ndmin=2)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(field, str(path), f"cannot be read: {reason(error, path)}", remedy) from None
    return checked_vectors(data, np.atleast_2d(found), field, path)


def checked_vectors(data: Data, found: np.ndarray, field: str, value: object) -> np.ndarray:
    """Return vectors (M, K), or tokens (M, t, W) or (M, t, W + 1) with a mask as (M, T, W + 1), as float32.

    Raises:
        UserError: They are no finite numbers of this shape, of which there is one.
    """
    if data.conditions_are_tokens:
        return _checked_tokens(data, found, field, value)
    width = data.condition_width
    if found.dtype.kind not in "biuf" or found.ndim != 2 or found.shape[1] != width or not len(found):
        problem, remedy = f"must hold vectors of {counted(width, 'number')}", "give all numbers of each label"
        detail = f"it is {found.dtype} of shape {found.shape}"
        raise UserError(field, None if value is None else str(value), problem, remedy, detail)
    found = found.astype(np.float32)
    if not np.isfinite(found).all():
        problem = "has numbers that are not finite"
        raise UserError(field, None if value is None else str(value), problem, "correct them")
    return found


def _checked_tokens(data: Data, found: np.ndarray, field: str, value: object) -> np.ndarray:
    try:
        if found.dtype.kind not in "biuf" or found.ndim != 3 or not len(found):
            raise ValueError(f"it is {found.dtype} of shape {found.shape}")
        return np.stack([padded(data, each) for each in found])
    except ValueError as error:
        most, width = data.condition_shape
        problem, remedy = "must hold the tokens of labels", f"give (M, t, {width - 1}), t up to {most}"
        raise UserError(field, None if value is None else str(value), problem, remedy, str(error)) from None


def without(labels: Tensor, dropped: np.ndarray) -> Tensor:
    """Return vectors or tokens (n, ...), of which those that are ``dropped`` (n,) are null."""
    found = labels.clone()
    found[torch.from_numpy(dropped)] = 0
    return found


def picked(conditions: Conditions, places: np.ndarray) -> Tensor:
    """Return the conditions at some places (n,): (n,) int64, or float32 (n, K) or (n, T, W + 1)."""
    found = conditions.start + places if isinstance(conditions, range) else conditions[places]
    return torch.from_numpy(np.ascontiguousarray(found))
