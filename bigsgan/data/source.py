"""Lists the images that `bigsgan data prepare` converts, and `encode` encodes."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bigsgan.config.data import Data
from bigsgan.data.conversion import unreadable
from bigsgan.data.datasets import LABELS_FILE, class_folders, data_directory, image_files, is_image, some_names
from bigsgan.data.packed import PackedFiles, build_zip, zip_content, zip_files, zip_folders, zip_images, zip_members
from bigsgan.data.shards import is_shard, read_shards, tar_content
from bigsgan.errors import UserError, reason
from bigsgan.images.reading import CorruptImage


class Source(NamedTuple):
    """The images to convert, in the order of their paths; in shards, in the order of the shards."""

    root: Path
    classes: list[str]  # names of the class folders, or numbers; empty if the images have no classes
    paths: list[str]
    labels: list[int]
    packed: PackedFiles | None = None  # the images' places in archives, if they are in archives

    def content(self, index: int) -> bytes | None:
        """Return the content of an image in an archive; None for a separate file.

        Raises:
            CorruptImage: The image cannot be read.
            UserError: The disk fails.
        """
        if self.packed is None:
            return None
        try:
            return self.packed.read(index)
        except CorruptImage as error:
            if isinstance(error.__cause__, OSError):
                raise unreadable(error.path, error.__cause__) from error.__cause__
            raise

    def digest(self) -> str:
        """Return the hash of paths, sizes and modification times, which changes when a file does."""
        if self.packed is not None:
            return hashlib.sha256(repr((self.packed.fingerprint(), self.packed.times())).encode()).hexdigest()
        digest = hashlib.sha256()
        for path in self.paths:
            try:
                found = os.stat(path)
                state = f"{found.st_size} {found.st_mtime_ns}"
            except OSError:  # a broken link: an unreadable image
                state = "unreadable"
            digest.update(os.fsencode(path.removeprefix(f"{self.root}/")) + f"\0{state}\n".encode())
        return digest.hexdigest()


def list_source(root: Path) -> Source:
    """Find the images of a directory.

    Raises:
        UserError: It is not a directory of images, or of class folders with images.
    """
    data_directory("SRC", str(root), "give the directory with the images")
    try:
        loose = sorted(str(entry) for entry in root.iterdir() if is_image(entry.name) and not entry.is_dir())
        files = {folder.name: image_files(folder) for folder in class_folders(root)}
    except OSError as error:
        raise UserError("SRC", str(root), f"cannot be read: {reason(error, root)}", "fix its permissions") from error
    classes = _class_names(root, [Path(path).name for path in loose], files)
    if not classes and not loose:
        remedy = "give a directory with images, or with a folder for each class"
        raise UserError("SRC", str(root), "contains no images", remedy)
    if not classes:
        return Source(root, [], loose, [0] * len(loose))
    labels = [label for label, name in enumerate(classes) for _ in files[name]]
    return Source(root, classes, [path for name in classes for path in files[name]], labels)


def _class_names(root: Path, loose: Sequence[str], files: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the names of the folders with images; none if all images are loose. ``files`` gives each folder's images.

    Raises:
        UserError: There are loose images beside folders, a folder has no images, or its name is not UTF-8.
    """
    filled, empty = [name for name in files if files[name]], [name for name in files if not files[name]]
    if not filled:
        return []
    if loose:
        problem = f"contains images beside its class folders{some_names(loose)}"
        raise UserError("SRC", str(root), problem, "move them into the folder of their class, or elsewhere")
    if empty:
        problem = f"has class folders without images{some_names(empty)}"
        raise UserError("SRC", str(root), problem, "fill or remove them")
    for name in filled:
        if any("\ud800" <= letter <= "\udfff" for letter in name):  # Python's escapes of bytes that are not UTF-8
            raise UserError("SRC", str(root), f"has a class folder whose name is not UTF-8, {name!r}", "rename it")
    return filled


def open_source(root: Path) -> Source:
    """Find the images of a directory, a zip file, or a directory of tar shards in WebDataset's layout.

    Classes in a zip file come from its dataset.json, if it has one, or from its folders. Null labels in dataset.json
    mean that there are no classes. In shards, classes are the numbers in ``<key>.cls``.

    Raises:
        UserError: The path is none of these, is damaged, or contains no images.
    """
    if os.path.isfile(root):
        return _open_zip(root)
    try:
        are_shards = any(is_shard(name) for name in os.listdir(root))
    except OSError:
        are_shards = False
    return _open_shards(root) if are_shards else list_source(root)


def _open_zip(root: Path) -> Source:
    with _blaming_source():
        data = _data("zip", root, 0)
        members = zip_members(data)
        packed: PackedFiles
        # The tools of EDM2 and StyleGAN list classes in this file; folders beside it are not classes.
        if all(info.filename != LABELS_FILE for info in members):
            loose = [info.filename for info in zip_images(members) if "/" not in info.filename]
            classes = _class_names(root, loose, zip_folders(members))
            packed = build_zip(_data("zip", root, len(classes)))
        elif (labels := _listed_labels(root)) is None:
            classes, packed = [], build_zip(data)
        else:
            images = zip_images(members)
            _check_listing(root, labels, [info.filename for info in images], [info.filename for info in members])
            numbers = [labels[info.filename] for info in images]
            packed = PackedFiles(*zip_files(data, images, numbers), zip_content)
            classes = _numbered(numbers)
        return _source(root, classes, packed)


def _listed_labels(root: Path) -> dict[str, int] | None:
    """Return the class of each image by name from dataset.json; None if it says that there are no classes."""
    try:
        with zipfile.ZipFile(root) as archive:
            pairs: Any = json.loads(archive.read(LABELS_FILE))["labels"]
        return None if pairs is None else {str(name): int(label) for name, label in pairs}
    except Exception as error:  # BadZipFile, ValueError, KeyError, ...
        problem = f"has no readable {LABELS_FILE}: {reason(error)}"
        raise UserError("SRC", str(root), problem, "pack it again") from None


def _check_listing(root: Path, labels: dict[str, int], images: list[str], members: list[str]) -> None:
    """Refuse an image that dataset.json does not list, and a listed image that is missing."""
    unknown = next((name for name in images if name not in labels), None)
    if unknown is not None:
        raise UserError("SRC", str(root), f"has {unknown}, which its {LABELS_FILE} does not list", "pack it again")
    there = set(members)
    missing = next((name for name in labels if name not in there), None)
    if missing is not None:
        raise UserError("SRC", str(root), f"has no {missing}, which its {LABELS_FILE} lists", "pack it again")


def _open_shards(root: Path) -> Source:
    with _blaming_source():
        archives, names, entries = read_shards(_data("tar", root, 1))  # with 0, classes would not be read
        packed = PackedFiles(archives, names, entries, tar_content)
        return _source(root, _numbered(entries["label"].tolist()), packed)


def _data(kind: Any, root: Path, num_classes: int) -> Data:
    return Data(kind=kind, root=str(root), num_classes=num_classes)


def _numbered(labels: list[int]) -> list[str]:
    """Return names of classes that only have numbers; none if all images have class 0."""
    return [str(number) for number in range(max(labels, default=0) + 1)] if any(labels) else []


def _source(root: Path, classes: list[str], packed: PackedFiles) -> Source:
    if not len(packed):
        raise UserError("SRC", str(root), "contains no images", "give an archive with images")
    num = len(packed)
    labels = [packed.label(index) if classes else 0 for index in range(num)]
    if (lowest := int(np.min(labels))) < 0:
        raise UserError("SRC", str(root), f"has a class below 0, {lowest}", "number classes from 0")
    return Source(root, classes, [packed.path(index) for index in range(num)], labels, packed)


@contextmanager
def _blaming_source() -> Iterator[None]:
    """Name the option in messages instead of a recipe's key."""
    try:
        yield
    except UserError as error:
        raise UserError("SRC", error.value, error.problem, error.remedy, error.detail) from None
