"""Lists the images that `bigsgan data prepare` converts, and `encode` encodes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bigsgan.config.data import Data
from bigsgan.data.conversion import unreadable
from bigsgan.data.labels import in_folders, labels_of_images, left_out
from bigsgan.data.listing import LABELS_FILE, Files, Ignored, data_directory, files_below, some_names
from bigsgan.data.packed import PackedFiles, zip_content, zip_files, zip_listing, zip_members
from bigsgan.data.shards import check_shards, is_shard, names_beside, read_shards, tar_content
from bigsgan.errors import UserError, reason
from bigsgan.images.reading import CorruptImage


class Source(NamedTuple):
    """The images to convert, in the order of their paths; in shards, in the order of the shards."""

    root: Path
    classes: list[str]  # names of the class folders, or numbers; empty if the images have no classes
    paths: list[str]
    labels: list[int]
    ignored: Ignored = Ignored({})  # files that are listed, and not read
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
        """Return the hash of paths, sizes and modification times, which changes when a file does, or dataset.json."""
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
        if (self.root / LABELS_FILE).exists():
            digest.update(repr(self.labels).encode())
        return digest.hexdigest()


def list_source(root: Path, max_ignored: int | None = None) -> Source:
    """Find the images of a directory, beside at most ``max_ignored`` files that may be images.

    Raises:
        UserError: It is not a directory of images, or of class folders with images.
    """
    data_directory("SRC", str(root), "give the directory with the images")
    try:
        files = files_below(root)
    except OSError as error:
        raise UserError("SRC", str(root), f"cannot be read: {reason(error, root)}", "fix its permissions") from error
    with _blaming_source():
        names, labels, classes = _classified(_data("folder", root, 0, max_ignored), files)
        return Source(root, classes, [os.path.join(root, name) for name in names], labels, left_out(files, names))


def _classified(data: Data, files: Files) -> tuple[list[str], list[int], list[str]]:
    """Return the images, the class of each, and the names of the classes, which are empty if there are none.

    Raises:
        UserError: There are no images, or most files would be ignored; dataset.json does not fit the images; or there
            are images beside folders, a folder has no images, or its name is not UTF-8.
    """
    if not files.images:
        remedy = "give a directory with images, or with a folder for each class"
        raise UserError("SRC", str(data.root), "contains no images", remedy, left_out(files, []).text())
    left_out(files, files.images).check("SRC", data.root, len(files.images), data.max_ignored)
    labels = labels_of_images(data, files)
    if labels is not None:
        return files.images, labels, _numbered(labels)
    found = in_folders(files)
    classes = _class_names(str(data.root), [name for name in files.images if "/" not in name], found)
    if not classes:
        return files.images, [0] * len(files.images), []
    each = [(name, label) for label, folder in enumerate(classes) for name in found[folder]]
    return [name for name, _ in each], [label for _, label in each], classes


def _class_names(root: str, loose: list[str], files: dict[str, list[str]]) -> list[str]:
    """Return the names of the folders with images; none if all images are loose. ``files`` gives each folder's images.

    Raises:
        UserError: There are loose images beside folders, a folder has no images, or its name is not UTF-8.
    """
    filled, empty = [name for name in files if files[name]], [name for name in files if not files[name]]
    if not filled:
        return []
    if loose:
        problem = f"contains images beside its class folders{some_names(loose)}"
        raise UserError("SRC", root, problem, "move them into the folder of their class, or elsewhere")
    if empty:
        problem = f"has class folders without images{some_names(empty)}"
        raise UserError("SRC", root, problem, "fill or remove them")
    for name in filled:
        if any("\ud800" <= letter <= "\udfff" for letter in name):  # Python's escapes of bytes that are not UTF-8
            raise UserError("SRC", root, f"has a class folder whose name is not UTF-8, {name!r}", "rename it")
    return filled


def open_source(root: Path, max_ignored: int | None = None) -> Source:
    """Find the images of a directory, a zip file, or a directory of tar shards in WebDataset's layout.

    Classes come from dataset.json, if there is one, or from the folders. Null labels in dataset.json mean that there
    are no classes. In shards, classes are the numbers in ``<key>.cls``.

    Raises:
        UserError: The path is none of these, is damaged, or contains no images.
    """
    if os.path.isfile(root):
        return _open_zip(root, max_ignored)
    try:
        are_shards = any(is_shard(name, streams=True) for name in os.listdir(root))
    except OSError:
        are_shards = False
    return (_open_shards if are_shards else list_source)(root, max_ignored)


def _open_zip(root: Path, max_ignored: int | None) -> Source:
    with _blaming_source():
        data = _data("zip", root, 0, max_ignored)
        members = zip_members(data)
        files = zip_listing(data, members)
        names, labels, classes = _classified(data, files)
        packed = PackedFiles(*zip_files(data, members, names, labels), zip_content)
        return _source(root, classes, packed, left_out(files, names))


def _open_shards(root: Path, max_ignored: int | None) -> Source:
    with _blaming_source():
        data = _data("tar", root, 1, max_ignored)  # with 0, classes would not be read
        found = read_shards(data, streams=True)
        check_shards(data, found, "SRC")
        packed = PackedFiles(found.archives, found.names, found.entries, tar_content)
        numbers, names = _numbered(found.entries["label"].tolist()), names_beside(root)
        named = names if len(names) >= len(numbers) else numbers  # a part of a data set may lack its last classes
        return _source(root, named if numbers else [], packed, found.others)


def _data(kind: Any, root: Path, num_classes: int, max_ignored: int | None) -> Data:
    return Data(kind=kind, root=str(root), num_classes=num_classes, max_ignored=max_ignored)


def _numbered(labels: list[int]) -> list[str]:
    """Return names of classes that only have numbers, which sort as these do; none if all images have class 0."""
    most = max(labels, default=0)
    return [str(number).zfill(len(str(most))) for number in range(most + 1)] if most else []


def _source(root: Path, classes: list[str], packed: PackedFiles, ignored: Ignored) -> Source:
    if not len(packed):
        raise UserError("SRC", str(root), "contains no images", "give an archive with images", ignored.text())
    num = len(packed)
    labels = [packed.label(index) if classes else 0 for index in range(num)]
    return Source(root, classes, [packed.path(index) for index in range(num)], labels, ignored, packed)


@contextmanager
def _blaming_source() -> Iterator[None]:
    """Name the option in messages instead of a recipe's key."""
    try:
        yield
    except UserError as error:
        raise UserError("SRC", error.value, error.problem, error.remedy, error.detail) from None
