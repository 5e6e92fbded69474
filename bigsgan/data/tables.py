"""What data sets of rows with an image and a class share: a file of HDF5, or columns of Hugging Face's `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from bigsgan.config.data import Data
from bigsgan.data.fingerprint import Fingerprint, digest, file_sizes
from bigsgan.data.listing import wrong_num_classes
from bigsgan.data.outside import OutsideImages
from bigsgan.errors import UserError, shown

_NAMING = "name what has the class numbers (data.label_key), or set data.num_classes=0"


class Table(Protocol):
    """Rows with an image and a class, which each process opens for itself."""

    files: Sequence[str]  # that hold the rows
    classes: Sequence[str]  # names of the classes; empty if they have none
    labels: np.ndarray | None  # the class of each row, int64 (N,); None if there are none

    def __len__(self) -> int:
        """Return N."""

    def __getitem__(self, row: int) -> tuple[Any, int]:
        """Return the image of a row, in a form that ``OutsideImages`` converts, and its class."""


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
        if source.labels is not None and (lowest := int(source.labels.min())) < 0:
            row = int(source.labels.argmin())
            raise UserError("data.root", data.root, f"has a class below 0, {shown(lowest)} in row {row}", _NAMING)

    @property
    def labels(self) -> np.ndarray:
        """The class of each image, int64 (N,)."""
        found = self.source.labels if self.data.num_classes else None
        return np.zeros(len(self), np.int64) if found is None else found

    def fingerprint(self) -> Fingerprint:
        """Return digests of the classes, and of the sizes of the files."""
        return Fingerprint(len(self), "", digest([self.labels.tobytes()]), file_sizes(self.source.files))


def check_classes(images: TableImages, data: Data) -> TableImages:
    """Return a table whose classes are the recipe's.

    Raises:
        UserError: They are not.
    """
    source = images.source
    if not data.num_classes:
        return images
    if source.labels is None:
        raise UserError("data.root", data.root, "has no class numbers", _NAMING)
    found = len(source.classes) or int(source.labels.max()) + 1
    if found != data.num_classes:
        raise wrong_num_classes(data, found, "classes")
    return images
