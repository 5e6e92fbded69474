"""Lists the images that `bigsgan data prepare` converts, and `encode` encodes, of every kind that training reads."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from bigsgan.config.class_names import with_class_names
from bigsgan.config.data import Data
from bigsgan.config.origin import Origin, by_option
from bigsgan.data.conversion import in_order, label_of
from bigsgan.data.fingerprint import digest
from bigsgan.data.hdf5 import read_hdf5
from bigsgan.data.huggingface import read_huggingface
from bigsgan.data.labels import in_folders, labels_of_images, left_out, with_classes
from bigsgan.data.listing import (
    Files,
    Ignored,
    data_directory,
    files_below,
    setting_range,
    some_names,
    unreadable_root,
    wrong_num_classes,
)
from bigsgan.data.originals import LooseOriginals, Originals, OutsideOriginals, PackedOriginals, PairedOriginals
from bigsgan.data.outside import build_outside
from bigsgan.data.packed import PackedFiles, zip_content, zip_files, zip_listing, zip_members
from bigsgan.data.pairs import build_paired_folders, build_side_by_side
from bigsgan.data.shards import names_beside, read_shards, tar_content
from bigsgan.data.tables import TableImages
from bigsgan.errors import UserError, shown
from bigsgan.images.reading import CorruptImage
from bigsgan.images.size import Fitting, Size

_NONE = Ignored({})
_MOST_CLASSES = 1_000_000
_LONGEST_NAME = 255
"""Bytes of a folder's name, on most file systems."""
_LOOKED_AT = 16  # images
_SMALL = Fitting(Size(1, 1), "stretch")

_log = logging.getLogger(__name__)


class Source(NamedTuple):
    """The images to convert, in the order in which training numbers them."""

    root: Path
    classes: list[str]  # their names, or numbers; empty if the images have no classes
    labels: list[int]
    images: Originals
    ignored: Ignored = Ignored({})  # files that are listed, and not read
    vectors: np.ndarray | None = None  # labels (N, K) float32, if they are no classes
    names: Sequence[str] = ()  # of the classes that are marked in vectors
    captions: Sequence[str] = ()  # of the images, if tokens are made of them

    def digest(self) -> str:
        """Return a hash that changes when a file does, or a label."""
        labels: Any = self.classes and self.labels
        if self.vectors is not None:
            labels = digest([self.vectors.tobytes()])
        captions = (digest(caption.encode() for caption in self.captions),) if self.captions else ()
        return hashlib.sha256(repr((self.images.digest(), labels, *captions)).encode()).hexdigest()

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, whether or not labels are vectors."""
        return self.classes or list(self.names)

    @property
    def label_size(self) -> int:
        """The numbers of a label; 0 if labels are no vectors."""
        return 0 if self.vectors is None else self.vectors.shape[1]

    def member(self, index: int) -> list[tuple[str, bytes]]:
        """Return the suffix and the content of the file beside an image in a shard that tells its label."""
        if self.vectors is not None:
            return [(".json", json.dumps({"label": self.vectors[index].tolist()}).encode())]
        return [(".cls", str(self.labels[index]).encode())] if self.classes else []


def open_source(origin: Origin, workers: int) -> Source:
    """List the images of a source.

    Classes are those that training would find, and are numbered as there. Null labels in dataset.json mean that there
    are none. The labels of data sets of other code are read once before, in ``workers`` processes.

    Raises:
        UserError: The source cannot be read, is damaged, contains no images, or has classes that do not fit.
    """
    data, num_classes = origin.data, origin.keys.get("num_classes")  # None for as many as the data has
    try:
        found = _READERS.get(data.kind, _outside)(data, num_classes != 0, workers)
    except UserError as error:
        raise by_option(error) from None
    if not found.labels:
        raise UserError("SRC", data.root, "contains no images", "give a source with images", found.ignored.text())
    if num_classes and not data.has_vectors and num_classes != len(found.classes):
        raise wrong_num_classes(data, len(found.classes), "classes")
    return found._replace(names=with_class_names(data, found.names).class_names or [])


def channels_of(source: Source) -> int:
    """Return the channels of images of ``data.range``, as far as some of them tell.

    Raises:
        UserError: They have different ones, or the disk fails.
    """
    num, found = len(source.labels), set[int]()
    for index in sorted({each * num // _LOOKED_AT for each in range(_LOOKED_AT)}):
        with suppress(CorruptImage):  # which the conversion tells
            found.add(source.images.pixels(index, None, _SMALL, None)[1])
    if len(found) > 1:
        problem = f"must be given for images of {' and '.join(map(str, sorted(found)))} channels"
        raise UserError("data.image_channels", None, problem, "give the number to train with; others are skipped")
    return found.pop() if found else 1


def check_folders(source: Source) -> None:
    """Refuse classes that folders would give other numbers, or names that folders cannot have.

    Raises:
        UserError: A class has no image, which dataset.json may have; or the names are not in alphabetical order, or are
            no names of folders, which those of other data sets may be.
    """
    classes, root = source.classes, str(source.root)
    remedy = "give --format tar, which keeps the numbers of classes"
    if lacking := sorted(set(range(len(classes))) - set(source.labels)):
        problem = f"has no image of class {lacking[0]}, of {len(classes)} classes"
        raise UserError("SRC", root, problem, remedy)
    if unfit := [name for name in classes if not _names_folder(name)]:
        raise UserError("SRC", root, f"has a class that cannot be a folder, {unfit[0]!r}", f"{remedy} and their names")
    if wrong := [pair for pair in itertools.pairwise(classes) if pair[0] >= pair[1]]:
        problem = f"has classes in another order than folders, {wrong[0][0]} before {wrong[0][1]}"
        raise UserError("SRC", root, problem, f"{remedy} and their names")


def _names_folder(name: str) -> bool:
    """Return whether a folder, or one in a zip file, can have a name."""
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return 0 < num_bytes <= _LONGEST_NAME and name[0] != "." and not {"/", "\\", "\0"} & set(name)


def _folder(data: Data, wants_classes: bool, workers: int) -> Source:
    root = data_directory("SRC", data.root, "give the directory with the images")
    try:
        files = files_below(root, data.range is not None)
    except OSError as error:
        raise unreadable_root(data, error) from error
    names, labels, classes = _classified(data, files, wants_classes)
    images = LooseOriginals([os.path.join(root, name) for name in names], data)
    return _source(root, labels, classes, images, left_out(files, names))


def _zip(data: Data, wants_classes: bool, workers: int) -> Source:
    members = zip_members(data)
    files = zip_listing(data, members)
    names, labels, classes = _classified(data, files, wants_classes)
    images = PackedOriginals(PackedFiles(*zip_files(data, members, names, labels), zip_content), data)
    return _source(Path(str(data.root)), labels, classes, images, left_out(files, names))


def _source(
    root: Path, labels: np.ndarray, classes: Sequence[str], images: Originals, others: Ignored = _NONE
) -> Source:
    """Return the source of images with labels (N,) or (N, K), and names of classes."""
    if labels.ndim > 1:
        return Source(root, [], [0] * len(labels), images, others, labels, classes)
    return Source(root, list(classes), labels.tolist(), images, others)


def _classified(data: Data, files: Files, wants_classes: bool) -> tuple[list[str], np.ndarray, list[str]]:
    """Return the images, the label of each, and the names of the classes, which are empty if there are none.

    Raises:
        UserError: There are no images, or most files would be ignored; dataset.json does not fit the images; or there
            are images beside folders, a folder has no images, or its name is not UTF-8.
    """
    if not files.images:
        others = left_out(files, [])
        remedy = "give a directory with images, or with a folder for each class, or give --kind"
        remedy = setting_range(data, others) + remedy
        raise UserError("SRC", str(data.root), "contains no images", remedy, others.text())
    left_out(files, files.images).check("SRC", data.root, len(files.images), data.max_ignored)
    if data.has_vectors:
        return with_classes(data, files, "a source with files")
    none = files.images, np.zeros(len(files.images), np.int64), list[str]()
    if not wants_classes:
        return none
    if (listed := labels_of_images(data, files)) is not None:
        labels, names = listed
        return files.images, labels, names or _numbered(labels.tolist())
    found = in_folders(files)
    classes = _class_names(str(data.root), [name for name in files.images if "/" not in name], found)
    if not classes:
        return none
    each = [(name, label) for label, folder in enumerate(classes) for name in found[folder]]
    return [name for name, _ in each], np.array([label for _, label in each]), classes


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


def _shards(data: Data, wants_classes: bool, workers: int) -> Source:
    if not data.has_vectors:
        data = data.model_copy(update={"num_classes": int(wants_classes)})  # with 0, classes are not read
    found = read_shards(data, streams=True, field="SRC")
    folders = {os.path.dirname(name) for name in found.names}
    is_flat = len(found.unlabelled) < len(found.names) or len(folders) < 2 or not wants_classes
    if not is_flat and len(found.archives) > 1:
        _log.warning(
            "%s: no labels are found, and folders in shards are no classes%s", data.root, some_names(sorted(folders))
        )
    elif not is_flat:
        problem, detail = f"has folders{some_names(sorted(folders))} and no labels", "folders in shards are no classes"
        remedy = "unpack it and give its folder, or give data.num_classes=0"
        raise UserError("SRC", str(data.root), problem, remedy, detail)
    root, labels, names = Path(str(data.root)), found.entries["label"], names_beside(Path(str(data.root)))
    images = PackedOriginals(PackedFiles(found.archives, found.names, found.entries, tar_content), data)
    if data.has_vectors:
        return _source(root, labels, names, images, found.others)
    numbers = _numbered(labels.tolist())
    named = names if len(names) >= len(numbers) else numbers  # a part of a data set may lack its last classes
    return _source(root, labels, named if numbers else [], images, found.others)


def _table(read: Callable[[Data], TableImages]) -> Callable[[Data, bool, int], Source]:
    def opened(data: Data, wants_classes: bool, workers: int) -> Source:
        if not data.has_vectors:
            data = data.model_copy(update={"num_classes": int(wants_classes)})
        images = OutsideOriginals(read, data)
        table = cast(TableImages, images.dataset)
        labels, classes = table.labels, list(table.source.classes)
        if not classes and not data.has_vectors:
            classes = _numbered(labels.tolist())
        if wants_classes and table.source.labels is None and (others := table.source.others):
            _log.warning("%s: no labels are read; data.label_key names them%s", data.root, some_names(others))
        return _source(Path(str(data.root)), labels, classes, images, table.source.ignored)

    return opened


def _pairs(build: Callable[[Data], Any]) -> Callable[[Data, bool, int], Source]:
    def opened(data: Data, wants_classes: bool, workers: int) -> Source:
        pairs = build(data)
        return Source(Path(str(data.root)), [], [0] * len(pairs), PairedOriginals(pairs, data))

    return opened


def _outside(data: Data, wants_classes: bool, workers: int) -> Source:
    """Open a data set of torchvision, or of the user's own code."""
    build = build_outside if data.is_outside else None
    if build is None:
        build = importlib.import_module("bigsgan.data.from_torchvision").build_torchvision
    root, images = Path(data.root or data.kind), OutsideOriginals(build, data)
    num, names = len(images.dataset), list(images.dataset.class_names)
    if data.has_vectors:
        return _source(root, _vectors(images, data, num, workers), names, images)
    found = _labels(images, root, num, workers) if wants_classes else None
    numbers = _numbered(found or [])
    classes = names if found and len(names) > max(found) else numbers
    return Source(root, classes, found or [0] * num, images)


def _labels(images: OutsideOriginals, root: Path, num: int, workers: int) -> list[int] | None:
    """Read the class of each sample; None if they have no class numbers. A sample that cannot be read has class 0.

    Raises:
        UserError: Some samples have no class number though the first one has, or one below 0.
    """
    with in_order(label_of, iter(range(num)), min(workers, num), images) as results:
        found = list(results)
    first = next((label for label in found if label is not None), None)
    if not isinstance(first, int):
        _log.info("%s: no classes: %s", root, first or "no image can be read")
        return None
    for index, label in enumerate(found):
        assert not isinstance(label, np.ndarray)
        if isinstance(label, str) or (label is not None and label < 0):
            problem = (
                f"has no class number for {images.name(index)}: {label if isinstance(label, str) else shown(label)}"
            )
            raise UserError("SRC", str(root), problem, "correct it, or give data.num_classes=0")
    return [label if isinstance(label, int) else 0 for label in found]


def _vectors(images: OutsideOriginals, data: Data, num: int, workers: int) -> np.ndarray:
    """Read the vector of each sample (N, K). A sample that cannot be read has a null one.

    Raises:
        UserError: A label does not fit the recipe's keys.
    """
    found = np.zeros((num, data.condition_width), np.float32)
    with in_order(label_of, iter(range(num)), min(workers, num), images) as results:
        for index, label in enumerate(results):
            if isinstance(label, str):
                problem = f"has a label that does not fit, of {images.name(index)}: {label}"
                raise UserError("SRC", data.root or data.kind, problem, "correct it, or the keys that describe labels")
            found[index] = 0 if label is None else label
    return found


def _numbered(labels: list[int]) -> list[str]:
    """Return names of classes that only have numbers, which sort as these do; none if all images have class 0.

    Raises:
        UserError: A number is too large for one of a class.
    """
    most = max(labels, default=0)
    if most >= _MOST_CLASSES:
        remedy = "number classes from 0, name what has them (data.label_key), or give data.num_classes=0"
        raise UserError("SRC", most, f"has a class number of {_MOST_CLASSES} or more", remedy)
    return [str(number).zfill(len(str(most))) for number in range(most + 1)] if most else []


_READERS: Mapping[str, Callable[[Data, bool, int], Source]] = {
    "folder": _folder,
    "zip": _zip,
    "tar": _shards,
    "hdf5": _table(read_hdf5),
    "huggingface": _table(read_huggingface),
    "paired_folders": _pairs(build_paired_folders),
    "side_by_side": _pairs(build_side_by_side),
}
