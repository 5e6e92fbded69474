"""Images in data sets of Hugging Face's `datasets`: directories that ``save_to_disk`` has written, and parquet files.

Rows are read in any order from Arrow files, which are mapped into memory. The library copies parquet files to such
files once, in its cache.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bigsgan.config.data import Data
from bigsgan.config.origin import PARQUET, SPLITS_FILE, STATE_FILE
from bigsgan.data.datasets import Label, label_at
from bigsgan.data.label_tables import numbered
from bigsgan.data.labels import vectors_of
from bigsgan.data.listing import Ignored, files_below, ignored, some_names, wrong_num_classes
from bigsgan.data.tables import TableImages, check_classes
from bigsgan.errors import UserError, counted, reason, shown
from bigsgan.images.reading import CorruptImage, open_image
from bigsgan.images.wide import read_image
from bigsgan.runtime.extras import require

_REMEDY = f"give a directory that save_to_disk has written, or parquet files (*{PARQUET})"
_SPLITS = ("train", "test", "val", "dev", "eval")
_CARDS = ("README.md", "dataset_infos.json")
_NO_CLASSES = "or set data.num_classes=0"

_log = logging.getLogger(__name__)


class Columns:
    """The rows of a data set, of which two columns are read."""

    def __init__(
        self, data: Data, rows: Any, image: str, labels: np.ndarray | None, classes: list[str], files: list[str]
    ) -> None:
        """Take rows with bytes or paths in the column ``image``; see ``Table`` for the others."""
        self._has_range = data.range is not None
        self.labels = labels
        self.classes: Sequence[str] = classes
        self.files: Sequence[str] = files
        self.others: Sequence[str] = ()  # columns that are not read
        self.ignored = Ignored({})
        self._rows, self._image, self._whole = rows.select_columns([image]), image, rows

    def texts(self, name: str | None) -> list[str | None] | None:
        """Return a column of texts; None if it is none."""
        if getattr(self._whole.features.get(name), "dtype", "") not in ("string", "large_string"):
            return None
        found: list[str | None] = self._whole.select_columns([name]).with_format("arrow")[:][name].to_pylist()
        return found

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> tuple[Any, Label]:
        found = self._rows[row][self._image]
        content, path = (found.get("bytes"), found.get("path")) if isinstance(found, dict) else (found, None)
        if content is None and not path:
            raise ValueError("its row has no image")
        try:
            if self._has_range:
                image: Any = read_image(path or "image", content)
            else:
                image = open_image(path or "image", None if content is None else io.BytesIO(content))
        except CorruptImage as error:
            raise ValueError(error.reason) from None  # the row is named by its number
        return image, 0 if self.labels is None else label_at(self.labels, row)


def build_huggingface(data: Data) -> TableImages:
    """Open the data set ``data.root``.

    Raises:
        UserError: See ``read_huggingface`` and ``check_classes``.
    """
    return check_classes(read_huggingface(data), data)


def read_huggingface(data: Data) -> TableImages:
    """Open the data set ``data.root``, and find its columns of images, and of classes if the recipe has any.

    Raises:
        UserError: The package datasets is not installed; the data set cannot be read, has several splits and none is
            named, has files of no split, or lacks such a column; or see ``TableImages``.
    """
    require("huggingface", "data.kind", data.kind)
    library, root = importlib.import_module("datasets"), Path(str(data.root))
    if not os.path.exists(root):
        raise UserError("data.root", data.root, "does not exist", _REMEDY)
    try:
        opened, files, left = _opened(library, root)
    except UserError:
        raise
    except Exception as error:  # OSError, ValueError, ArrowInvalid, DatasetGenerationError, ...
        problem = f"cannot be read: {reason(error.__cause__ or error, root)}"
        raise UserError("data.root", data.root, problem, _REMEDY) from error
    rows = _split(data, opened)
    image = _image_column(data, library, rows.features)
    label, labels, classes = _label_column(data, library, rows.features), None, list[str]()
    if label is not None:
        labels, classes = _classes(data, library, rows, label)
    others = [name for name in rows.features if name not in (image, label)]
    rows = rows.with_format(None)
    if isinstance(rows.features[image], library.Image):
        rows = rows.cast_column(image, library.Image(decode=False))
    columns = Columns(data, rows, image, labels, classes, files)
    columns.others, columns.ignored = others, left
    left.tell(root)
    return TableImages(columns, data, str(root))


def _opened(library: Any, root: Path) -> tuple[Any, list[str], Ignored]:
    """Return a data set, or several by the names of their splits, the files with the rows, and those beside them."""
    left = Ignored({})
    if os.path.isdir(root) and any((root / name).exists() for name in (STATE_FILE, SPLITS_FILE)):
        opened = library.load_from_disk(str(root), keep_in_memory=False)
        each = opened.values() if isinstance(opened, dict) else [opened]
        return opened, sorted(file["filename"] for split in each for file in split.cache_files), left
    if os.path.isdir(root):
        files = sorted(str(path) for path in root.rglob(f"*{PARQUET}"))
        if not files:
            raise ValueError(f"it has neither {STATE_FILE} nor *{PARQUET}")
        places = sorted({Path(path).relative_to(root).parts[0] for path in files if Path(path).parent != root})
        if len(places) > 1 and not all(any(word in place for word in _SPLITS) for place in places):
            raise ValueError(f"it has several folders of parquet files{some_names(places)}, of which one must be given")
        where = {"data_dir": str(root)}
        left = _beside(root, library.load_dataset_builder("parquet", **where).config.data_files)
    else:
        files, where = [str(root)], {"data_files": str(root)}
    _log.info("%s: parquet is copied once to Arrow, in %s", root, library.config.HF_DATASETS_CACHE)
    return library.load_dataset("parquet", **where), files, left


def _beside(root: Path, splits: dict[str, list[str]]) -> Ignored:
    """Describe the files below a directory that no split has; once a name tells a split, the library passes others by.

    Raises:
        UserError: Rows are in them.
    """
    read = {os.path.realpath(path) for paths in splits.values() for path in paths}
    files = files_below(root)
    left = [name for name in (*files.images, *files.others) if os.path.realpath(root / name) not in read]
    if rows := sorted(name for name in left if name.endswith(PARQUET)):
        problem = f"has {counted(len(rows), 'file')} of no split, which would be ignored{some_names(rows)}"
        remedy = f"name each after its split, such as train-00000{PARQUET}, or move what is not to be read elsewhere"
        raise UserError("data.root", str(root), problem, remedy)
    return ignored([name for name in left if name not in _CARDS], [])


def _split(data: Data, opened: Any) -> Any:
    if not isinstance(opened, dict):
        if data.split is not None:
            raise UserError("data.split", data.split, "must be unset with this data", "remove it", "it has one split")
        return opened
    name = data.split if data.split is not None or len(opened) > 1 else next(iter(opened))
    if name not in opened:
        problem = f"must be one of {', '.join(opened)}" if opened else "does not help, as the data has no splits"
        raise UserError("data.split", name, problem, "name the split to train on")
    return opened[name]


def _image_column(data: Data, library: Any, features: Any) -> str:
    """Return the name of the column of images: that of the type Image, or else of bytes.

    Raises:
        UserError: There is none, or there are several.
    """
    typed = [name for name, kind in features.items() if isinstance(kind, library.Image)]
    found = typed or [name for name, kind in features.items() if _holds_bytes(kind)]
    if data.image_key is not None:
        found = [name for name in (data.image_key,) if name in typed or _holds_bytes(features.get(name))]
    if len(found) != 1:
        problem = "has several columns of images" if found else "has no column of images"
        problem += f" {data.image_key!r}" if data.image_key is not None else ""
        detail = f"it has{some_names(found or list(features)) or ' no columns'}"
        raise UserError("data.root", data.root, problem, "name the column in data.image_key", detail)
    return found[0]


def _holds_bytes(kind: Any) -> bool:
    kind = kind.get("bytes") if isinstance(kind, dict) else kind
    return getattr(kind, "dtype", "") in ("binary", "large_binary")


def _label_column(data: Data, library: Any, features: Any) -> str | None:
    """Return the name of the column of classes: the only one of the type ClassLabel, or else ``label``; None without.

    Raises:
        UserError: The column that is named is not there, or several could be meant.
    """
    if not data.condition_width:
        return None
    typed = [name for name, kind in features.items() if isinstance(kind, library.ClassLabel)]
    name = data.label_key or (typed[0] if len(typed) == 1 else "label")
    if name not in features and data.label_key is None and not typed:
        return None
    if name not in features:
        remedy = f"name the column in data.label_key, {_NO_CLASSES}"
        detail = f"it has{some_names(typed or list(features))}"
        raise UserError("data.root", data.root, f"has no column of classes {name!r}", remedy, detail)
    return name


def _classes(data: Data, library: Any, rows: Any, name: str) -> tuple[np.ndarray, list[str]]:
    """Return the label of each row, and the names of the classes; those of texts are in alphabetical order.

    Raises:
        UserError: The column holds something else, or a row has no class.
    """
    kind, column = rows.features[name], rows.select_columns([name]).with_format("arrow")[:][name]
    remedy = f"name another column in data.label_key, {_NO_CLASSES}"
    if data.has_vectors:
        names, labels = _names(library, kind), column.to_pylist()
        if isinstance(next((label for label in labels if label is not None), None), str):
            labels, names = numbered(labels)
        if names and len(names) != data.num_classes:
            raise wrong_num_classes(data, len(names), f"classes in {name!r}")
        if isinstance(getattr(kind, "feature", None), library.ClassLabel):  # the numbers of an image's classes
            places = np.arange(data.num_classes)
            labels = [None if classes is None else np.isin(places, classes) for classes in labels]
        return vectors_of(data, labels, lambda row: f"row {row}"), names
    if column.null_count:
        remedy = f"add them, set data.missing_labels=accept, {_NO_CLASSES}"
        raise UserError("data.root", data.root, f"has rows without a class in {name!r}", remedy)
    dtype = str(getattr(kind, "dtype", type(kind).__name__))
    if dtype in ("string", "large_string"):
        labels, names = numbered(column.to_pylist())
        return np.array(labels, np.int64), names
    if not dtype.startswith(("int", "uint")):
        raise UserError("data.root", data.root, f"has no class numbers in {name!r}, but {shown(dtype)}", remedy)
    return column.to_numpy().astype(np.int64), _names(library, kind)


def _names(library: Any, kind: Any) -> list[str]:
    """Return the names of classes in a column of one class, or of a list of several."""
    kind = getattr(kind, "feature", kind)
    return list(kind.names) if isinstance(kind, library.ClassLabel) else []
