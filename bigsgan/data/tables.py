"""What data sets of rows with an image and a class share: a file of HDF5, or columns of Hugging Face's `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from bigsgan.config.data import Data
from bigsgan.data.datasets import Label
from bigsgan.data.fingerprint import Fingerprint, digest, file_sizes
from bigsgan.data.listing import Ignored, wrong_num_classes
from bigsgan.data.outside import OutsideImages
from bigsgan.errors import UserError, shown

_NAMING = "name what has the labels (data.label_key), or set data.num_classes=0 and data.condition_size=0"


class Table(Protocol):
    """Rows with an image and a class, which each process opens for itself."""

    files: Sequence[str]  # that hold the rows
    others: Sequence[str]  # names of what is not read
    ignored: Ignored  # files beside those
    classes: Sequence[str]  # names of the classes; empty if they have none
    labels: np.ndarray | None  # of the rows, (N,) int64 or (N, K) float32; None if there are none

    def __len__(self) -> int:
        """Return N."""

    def __getitem__(self, row: int) -> tuple[Any, Label]:
        """Return the image of a row, in a form that ``OutsideImages`` converts, and its label."""


class TableImages(OutsideImages):
    """The images of a table."""

    source: Table

    def __init__(self, source: Table, data: Data, name: str) -> None:
        """Take the rows.

        Raises:
            UserError: There are none, or a class is below 0.
        """
        super().__init__(source, data, name)
        if not len(source):
            raise UserError("data.root", data.root, "contains no images", "give a file with images")
        if source.labels is not None and not data.has_vectors and (lowest := int(source.labels.min())) < 0:
            row = int(source.labels.argmin())
            remedy = "set data.missing_labels=accept if -1 is a missing label, or " * (lowest == -1) + _NAMING
            raise UserError("data.root", data.root, f"has a class below 0, {shown(lowest)} in row {row}", remedy)

    @property
    def labels(self) -> np.ndarray:
        """The label of each image, (N,) int64 or (N, K) float32."""
        found = self.source.labels if self.data.condition_width else None
        return np.zeros(len(self), np.int64) if found is None else found

    def fingerprint(self) -> Fingerprint:
        """Return digests of the classes, and of the sizes of the files."""
        return Fingerprint(len(self), "", digest([self.labels.tobytes()]), file_sizes(self.source.files))


def check_classes(images: TableImages, data: Data) -> TableImages:
    """Return a table whose labels are the recipe's.

    Raises:
        UserError: They are not.
    """
    source = images.source
    if data.condition_width and source.labels is None:
        raise UserError("data.root", data.root, "has no labels", _NAMING)
    if not data.num_classes or data.has_vectors:
        return images
    assert source.labels is not None
    found = len(source.classes) or int(source.labels.max()) + 1
    if found != data.num_classes:
        raise wrong_num_classes(data, found, "classes")
    return images
